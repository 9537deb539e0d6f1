"""Exact comparison of sympy trees: numbers unrounded, functions at points, sets by pieces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import log2
from typing import Any

import sympy
from sympy import (
    Basic,
    Derivative,
    Expr,
    Float,
    Function,
    I,
    Interval,
    Limit,
    MatrixBase,
    Pow,
    Rational,
    Set,
    Symbol,
    Tuple,
    UnevaluatedExpr,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import (
    InverseTrigonometricFunction,
    TrigonometricFunction,
)

_MAX_BITS = 200_000
"""Of a numerator, a denominator or an exponent: 60,000 decimal digits. No power tower is built."""
_ZERO_DIGITS = 2_000
"""Two irrational numbers whose first digits, this many of them, agree are equal."""
_ZERO_DIGITS_SLOW = 50
"""The same where digits are costly or chance is no danger: values of functions at points,
factorials of fractions, sums and integrals without a closed form."""
_MAX_DECIMALS = 1_000
"""A fraction with more decimals than an answer has characters counts as endless."""
_ELEMENTARY = (
    *(sympy.re, sympy.im, sympy.Abs, sympy.exp, sympy.log, sympy.floor, sympy.ceiling),
    *(TrigonometricFunction, InverseTrigonometricFunction, HyperbolicFunction),
)
_IMAGINARY = Symbol("i", real=True)
_OPPOSITE = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class TooLargeError(ValueError):
    """A number with more digits than an answer can have."""


def trees_equal(a: Any, b: Any) -> bool:
    """Whether two trees of the LaTeX parser have the same value.

    Numbers are compared exactly: rational ones as fractions, others to 2,000 digits. Two functions
    are equal if they agree at rational points of both signs, which no two different formulas of an
    answer's length do by chance. Numbers too large to write down are equal if their trees are.
    """
    # The same tree, but for the order of sums and products.
    if a == b:
        return True
    try:
        return _equal(a, b)
    except TooLargeError:
        return False


def _equal(a: Any, b: Any) -> bool:
    if _is_matrix(a) or _is_matrix(b):
        return _is_matrix(a) and _is_matrix(b) and _matrices_equal(a, b)
    if isinstance(a, Relational) and isinstance(b, Relational):
        if _relations_equal(a, b):
            return True
        if _variables(a) != _variables(b):
            # x > 3 and y > 3 have the same solutions.
            return False
    if isinstance(a, sympy.And) and isinstance(b, sympy.And):
        if _matched(a.args, b.args):
            return True
        if _variables(a) != _variables(b):
            return False
    if isinstance(a, Tuple) or isinstance(b, Tuple):
        return _all_equal(a.args, b.args) if type(a) is type(b) else False
    if not isinstance(a, Expr) or not isinstance(b, Expr):
        set_a, set_b = as_set(a), as_set(b)
        return set_a is not None and set_b is not None and sets_equal(set_a, set_b)
    return _expressions_equal(a, b)


def _is_matrix(tree: Any) -> bool:
    return isinstance(tree, MatrixBase) or bool(getattr(tree, "is_Matrix", False))


def _matrices_equal(a: Any, b: Any) -> bool:
    a, b = (m if isinstance(m, MatrixBase) else m.doit() for m in (a, b))
    if not (isinstance(a, MatrixBase) and isinstance(b, MatrixBase) and a.shape == b.shape):
        return False
    return _all_equal(a.flat(), b.flat())


def _all_equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))


def _matched(
    a: Sequence[Any], b: Sequence[Any], equal: Callable[[Any, Any], bool] | None = None
) -> bool:
    """Whether the elements of two sequences are equal in some order."""
    left = list(b)
    for element in a:
        place = next((i for i, x in enumerate(left) if (equal or _equal)(element, x)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _expressions_equal(a: Expr, b: Expr) -> bool:
    variables = _variables(a, b)
    if not variables:
        return constants_equal(evaluate(a), evaluate(b))
    return all(
        constants_equal(value, other, _ZERO_DIGITS_SLOW)
        for value, other in _values_at_points(a, b, variables, needed=2)
    )


def _relations_equal(a: Relational, b: Relational) -> bool:
    """Whether two equations or inequalities say the same: one side's excess is a multiple."""
    if a.rel_op != b.rel_op:
        if _OPPOSITE.get(a.rel_op) != b.rel_op:
            return False
        b = b.reversed
    sides = (a.lhs, a.rhs, b.lhs, b.rhs)
    if not all(isinstance(side, Expr) for side in sides):
        return False
    excess_a, excess_b = (sympy.Add(r.lhs, -r.rhs, evaluate=False) for r in (a, b))
    pairs = list(_values_at_points(excess_a, excess_b, _variables(a, b), needed=3))
    first_a, first_b = pairs[0]
    # An excess of 0 at every point says nothing: AB = BA is true of all numbers.
    if constants_equal(first_a, sympy.Integer(0)) or constants_equal(first_b, sympy.Integer(0)):
        return False
    if a.rel_op in _OPPOSITE and not (first_a / first_b).is_positive:
        return False
    return all(constants_equal(x * first_b, y * first_a, _ZERO_DIGITS_SLOW) for x, y in pairs[1:])


def _variables(*trees: Basic) -> list[Symbol]:
    symbols = set().union(*(tree.free_symbols for tree in trees)) - {_IMAGINARY}
    return sorted(symbols, key=str)  # pyright: ignore[reportArgumentType]


def _values_at_points(
    a: Basic, b: Basic, variables: list[Symbol], *, needed: int
) -> Iterator[tuple[Expr, Expr]]:
    """Both values at points where both are finite.

    Raises:
        ValueError: there are fewer than `needed` such points.
    """
    found = 0
    for k in range(4):
        # Numerators and denominators are primes that no answer is built of.
        point = {
            variable: Rational(
                (-1) ** (k * (j + 1) + k // 2) * (1009 + 34 * k), 601 + 6 * k + 96 * j
            )
            for j, variable in enumerate(variables)
        }
        value, other = evaluate(a, point), evaluate(b, point)
        if _is_finite(value) and _is_finite(other):
            found += 1
            yield value, other
        elif _is_finite(value) != _is_finite(other):
            found += 1
            yield sympy.Integer(0), sympy.Integer(1)
    if found < needed:
        raise ValueError("no value at the points of comparison")


def _is_finite(value: Basic) -> bool:
    return not value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


def constants_equal(a: Expr, b: Expr, digits: int = _ZERO_DIGITS) -> bool:
    """Whether two evaluated numbers are the same, however small or large.

    Rational numbers exactly; others if this many leading digits cancel in their difference.
    """
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or not (_is_finite(a) and _is_finite(b)):
        return False
    difference = a - b
    if difference.is_Rational:
        return difference.is_zero is True
    if difference.free_symbols or difference.has(AppliedUndef):
        return sympy.expand(difference) == 0
    parts = (part(difference, evaluate=False) for part in (sympy.re, sympy.im))
    return all(_vanishes(part, digits) for part in parts)


def _vanishes(number: Expr, digits: int) -> bool:
    """Whether no digit of a real number can be found that is not 0."""
    elementary = all(isinstance(f, _ELEMENTARY) for f in number.atoms(Function))
    fast = elementary and not number.has(ExprWithLimits, Limit)
    try:
        value = number.evalf(2, maxn=digits if fast else _ZERO_DIGITS_SLOW, strict=True)
    except PrecisionExhausted:
        return True
    return value == 0


def evaluate(tree: Any, values: Mapping[Symbol, Expr] | None = None) -> Any:
    """The exact value of a tree with `values` for its symbols; i is the imaginary unit.

    Raises:
        TooLargeError: some part of it would have more than 200,000 bits.
    """
    return _evaluate(tree, {_IMAGINARY: I, **(values or {})})


def _evaluate(tree: Any, values: Mapping[Symbol, Expr]) -> Any:
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


def _magnitude(number: Expr) -> float:
    value = abs(number.evalf(5))
    return float(value) if value.is_finite else 0.0


def as_set(tree: Any) -> Set | None:
    """The set that an interval, a list, a union or an inequality of one variable describes."""
    if isinstance(tree, Interval):
        return Interval(evaluate(tree.start), evaluate(tree.end), tree.left_open, tree.right_open)
    if isinstance(tree, sympy.FiniteSet):
        if any(isinstance(element, Relational | Set | Tuple) for element in tree.args):
            return None
        return sympy.FiniteSet(*(evaluate(element) for element in tree.args))
    if isinstance(tree, sympy.Union | sympy.Intersection | sympy.Complement):
        parts = [as_set(part) for part in tree.args]
        return None if None in parts else tree.func(*parts)
    if isinstance(tree, Set):
        return tree
    if isinstance(tree, sympy.And):
        parts = [as_set(part) for part in tree.args]
        return None if None in parts else sympy.Intersection(*parts)
    if isinstance(tree, sympy.Eq) and isinstance(tree.rhs, Set):
        return as_set(tree.rhs)
    if isinstance(tree, Relational) and len(_variables(tree)) == 1:
        return _solution(tree)
    # A lone value is the set of it.
    return sympy.FiniteSet(evaluate(tree)) if isinstance(tree, Expr) else None


def _solution(relation: Relational) -> Set | None:
    left, right = evaluate(relation.lhs), evaluate(relation.rhs)
    if isinstance(right, Symbol):
        relation = relation.reversed
        left, right = right, left
    if not isinstance(left, Symbol) or not right.is_number:
        evaluated = relation.func(left, right)
        # sympy is slow on other functions.
        simple = all(isinstance(f, sympy.Abs) for f in (left - right).atoms(Function))
        simple = simple and all(p.exp.is_Rational for p in (left - right).atoms(Pow))
        return evaluated.as_set() if simple and isinstance(evaluated, Relational) else None
    match relation.rel_op:
        case "<" | "<=":
            return Interval(-sympy.oo, right, True, relation.rel_op == "<")
        case ">" | ">=":
            return Interval(right, sympy.oo, relation.rel_op == ">", True)
        case "!=":
            return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(right))
        case _:
            return sympy.FiniteSet(right)


def sets_equal(a: Set, b: Set) -> bool:
    """Whether two sets of numbers have the same pieces: intervals with equal ends, equal points."""
    if a == b:
        return True
    return _matched(list(_pieces(a)), list(_pieces(b)), _pieces_equal)


def _pieces(whole: Set) -> Iterator[Basic]:
    for part in whole.args if isinstance(whole, sympy.Union) else (whole,):
        yield from part.args if isinstance(part, sympy.FiniteSet) else (part,)


def _pieces_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Interval) and isinstance(b, Interval):
        return (
            (a.left_open, a.right_open) == (b.left_open, b.right_open)
            and constants_equal(a.start, b.start)
            and constants_equal(a.end, b.end)
        )
    return constants_equal(a, b) if isinstance(a, Expr) and isinstance(b, Expr) else a == b


def union(sets: Sequence[Set]) -> Set:
    return sympy.Union(*sets)


def intersection(sets: Sequence[Set]) -> Set:
    return sympy.Intersection(*sets)


def is_close(tree: Any, value: Fraction, decimals: int) -> bool:
    """Whether a decimal number is a constant rounded or cut to its places; from 0.1 upwards.

    Only a constant whose decimals have no end is rounded.
    """
    if not isinstance(tree, Expr) or _variables(tree) or tree.has(Float):
        return False
    exact = evaluate(tree)
    if exact.is_Rational and 10**_MAX_DECIMALS % exact.q == 0:
        return False
    error = (exact - Rational(value.numerator, value.denominator)).evalf(10)
    return bool(abs(error) < Rational(1, 10**decimals)) and bool(abs(exact.evalf(5)) >= 0.1)
