"""Whether two sympy trees are equal: numbers unrounded, functions at points, sets by pieces."""

from collections.abc import Iterator
from typing import Any

import sympy
from sympy import Expr, MatrixBase, Rational, Tuple
from sympy.core.relational import Relational

from fos_rl.rewards.exact_values import (
    ZERO_DIGITS_SLOW,
    TooLargeError,
    constants_equal,
    evaluate,
    is_finite,
    variables_of,
)
from fos_rl.rewards.real_sets import as_set, matched, sets_equal

_OPPOSITE = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


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
        if variables_of(a) != variables_of(b):
            # x > 3 and y > 3 have the same solutions.
            return False
    if isinstance(a, sympy.And) and isinstance(b, sympy.And):
        if matched(a.args, b.args, _equal):
            return True
        if variables_of(a) != variables_of(b):
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


def _expressions_equal(a: Any, b: Any) -> bool:
    variables = variables_of(a, b)
    if not variables:
        return constants_equal(evaluate(a), evaluate(b))
    return all(
        constants_equal(value, other, ZERO_DIGITS_SLOW)
        for value, other in _values_at_points(a, b, variables, needed=2)
    )


def _relations_equal(a: Any, b: Any) -> bool:
    """Whether two equations or inequalities say the same: one side's excess is a multiple."""
    if a.rel_op != b.rel_op:
        if _OPPOSITE.get(a.rel_op) != b.rel_op:
            return False
        b = b.reversed
    sides = (a.lhs, a.rhs, b.lhs, b.rhs)
    if not all(isinstance(side, Expr) for side in sides):
        return False
    excess_a, excess_b = (sympy.Add(r.lhs, -r.rhs, evaluate=False) for r in (a, b))
    pairs = list(_values_at_points(excess_a, excess_b, variables_of(a, b), needed=3))
    first_a, first_b = pairs[0]
    # An excess of 0 at every point says nothing: AB = BA is true of all numbers.
    if constants_equal(first_a, sympy.Integer(0)) or constants_equal(first_b, sympy.Integer(0)):
        return False
    if a.rel_op in _OPPOSITE and not (first_a / first_b).is_positive:
        return False
    return all(constants_equal(x * first_b, y * first_a, ZERO_DIGITS_SLOW) for x, y in pairs[1:])


def _values_at_points(
    a: Any, b: Any, variables: list[Any], *, needed: int
) -> Iterator[tuple[Any, Any]]:
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
        if is_finite(value) and is_finite(other):
            found += 1
            yield value, other
        elif is_finite(value) != is_finite(other):
            found += 1
            yield sympy.Integer(0), sympy.Integer(1)
    if found < needed:
        raise ValueError("no value at the points of comparison")
