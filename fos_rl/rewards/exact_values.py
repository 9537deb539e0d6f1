"""Exact values of sympy trees, without rounding and without numbers too large to write down."""

from collections.abc import Mapping
from fractions import Fraction
from math import log2
from typing import Any

import sympy
from sympy import (
    Derivative,
    Expr,
    Float,
    Function,
    I,
    Limit,
    Pow,
    Rational,
    Symbol,
    UnevaluatedExpr,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import (
    InverseTrigonometricFunction,
    TrigonometricFunction,
)

# sympy has no types of its own; its trees are Any.

_MAX_BITS = 200_000
"""Of a numerator, a denominator or an exponent: 60,000 decimal digits. No power tower is built."""
_ZERO_DIGITS = 2_000
"""Two irrational numbers whose first digits, this many of them, agree are equal."""
ZERO_DIGITS_SLOW = 50
"""The same where digits are costly or chance is no danger: values of functions at points,
factorials of fractions, sums and integrals without a closed form."""
_MAX_DECIMALS = 1_000
"""A fraction with more decimals than an answer has characters counts as endless."""
_ELEMENTARY = (
    *(sympy.re, sympy.im, sympy.Abs, sympy.exp, sympy.log, sympy.floor, sympy.ceiling),
    *(TrigonometricFunction, InverseTrigonometricFunction, HyperbolicFunction),
)
_IMAGINARY = Symbol("i", real=True)


class TooLargeError(ValueError):
    """A number with more digits than an answer can have."""


def constants_equal(a: Any, b: Any, digits: int = _ZERO_DIGITS) -> bool:
    """Whether two evaluated numbers are the same, however small or large.

    Rational numbers exactly; others if this many leading digits cancel in their difference.
    """
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or not (is_finite(a) and is_finite(b)):
        return False
    difference = a - b
    if difference.is_Rational:
        return difference.is_zero is True
    if difference.free_symbols or difference.has(AppliedUndef):
        return sympy.expand(difference) == 0
    parts = (part(difference, evaluate=False) for part in (sympy.re, sympy.im))
    return all(_vanishes(part, digits) for part in parts)


def _vanishes(number: Any, digits: int) -> bool:
    """Whether no digit of a real number can be found that is not 0."""
    elementary = all(isinstance(f, _ELEMENTARY) for f in number.atoms(Function))
    fast = elementary and not number.has(ExprWithLimits, Limit)
    try:
        value = number.evalf(2, maxn=digits if fast else ZERO_DIGITS_SLOW, strict=True)
    except PrecisionExhausted:
        return True
    return value == 0


def evaluate(tree: Any, values: Mapping[Any, Any] | None = None) -> Any:
    """The exact value of a tree with `values` for its symbols; i is the imaginary unit.

    Raises:
        TooLargeError: some part of it would have more than 200,000 bits.
    """
    return _evaluate(tree, {_IMAGINARY: I, **(values or {})})


def _evaluate(tree: Any, values: Mapping[Any, Any]) -> Any:
    if isinstance(tree, Float):
        return Rational(str(tree))
    if isinstance(tree, Symbol):
        return values.get(tree, tree)
    if not tree.args:
        return tree
    if isinstance(tree, UnevaluatedExpr):
        return _evaluate(tree.args[0], values)
    if isinstance(tree, Derivative):
        # A name for it: sympy would make 0 of dy/dx, where y is a symbol.
        return Symbol(str(tree))
    if isinstance(tree, ExprWithLimits | Limit):
        bound = {*tree.variables} if isinstance(tree, ExprWithLimits) else {tree.args[1]}
        inner = {s: v for s, v in values.items() if s not in bound}
        return tree.func(*(_evaluate(argument, inner) for argument in tree.args)).doit()
    arguments = [_evaluate(argument, values) for argument in tree.args]
    _check_size(tree.func, arguments)
    return tree.func(*arguments)


def _check_size(function: Any, arguments: list[Any]) -> None:
    bits = 0.0
    if function is Pow and all(a.is_number for a in arguments):
        base, exponent = arguments
        if base.is_Rational and exponent.is_Rational:
            size = max(abs(base.p), base.q).bit_length() - 1
            bits = max(size, 0.6) * abs(exponent) if abs(base) not in (0, 1) else 0.0
        else:
            bits = _magnitude(sympy.log(base)) * _magnitude(exponent)
    elif function is sympy.exp and arguments[0].is_number:
        bits = _magnitude(arguments[0])
    elif function in (sympy.factorial, sympy.gamma) and arguments[0].is_number:
        size = _magnitude(arguments[0])
        bits = size * log2(size + 2)
    elif function is sympy.binomial and all(a.is_number for a in arguments):
        top, bottom = (_magnitude(a) for a in arguments)
        bits = min(bottom, abs(top - bottom)) * log2(top + 2)
    if bits > _MAX_BITS:
        raise TooLargeError(f"{function.__name__} has more than {_MAX_BITS} bits")


def _magnitude(number: Any) -> float:
    value = abs(number.evalf(5))
    return float(value) if value.is_finite else 0.0


def is_finite(value: Any) -> bool:
    """Whether a SymPy value holds no infinity and no NaN."""
    return not value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


def variables_of(*trees: Any) -> list[Any]:
    """The free symbols of SymPy trees without the imaginary unit, sorted by name."""
    symbols = set().union(*(tree.free_symbols for tree in trees)) - {_IMAGINARY}
    return sorted(symbols, key=str)


def is_close(tree: Any, value: Fraction, decimals: int) -> bool:
    """Whether a decimal number is a constant rounded or cut to its places; from 0.1 upwards.

    Only a constant whose decimals have no end is rounded.
    """
    if not isinstance(tree, Expr) or variables_of(tree) or tree.has(Float):
        return False
    exact = evaluate(tree)
    if exact.is_Rational and 10**_MAX_DECIMALS % exact.q == 0:
        return False
    error = (exact - Rational(value.numerator, value.denominator)).evalf(10)
    return bool(abs(error) < Rational(1, 10**decimals)) and bool(abs(exact.evalf(5)) >= 0.1)
