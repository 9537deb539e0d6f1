"""Sets of numbers that intervals, lists, unions and inequalities describe, compared by pieces."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
from sympy import Expr, Function, Interval, Pow, Set, Symbol, Tuple
from sympy.core.relational import Relational

from fos_rl.rewards.exact_values import constants_equal, evaluate, variables_of


def as_set(tree: Any) -> Any:
    """The set that an interval, a list, a union or an inequality of one variable describes."""
    if isinstance(tree, Interval):
        return Interval(
            evaluate(tree.start), evaluate(tree.end), bool(tree.left_open), bool(tree.right_open)
        )
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
    if isinstance(tree, Relational) and len(variables_of(tree)) == 1:
        return _solution(tree)
    # A lone value is the set of it.
    return sympy.FiniteSet(evaluate(tree)) if isinstance(tree, Expr) else None


def _solution(relation: Any) -> Any:
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


def sets_equal(a: Any, b: Any) -> bool:
    """Whether two sets of numbers have the same pieces: intervals with equal ends, equal points."""
    if a == b:
        return True
    return matched(list(_pieces(a)), list(_pieces(b)), _pieces_equal)


def _pieces(whole: Any) -> Iterator[Any]:
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


def union(sets: Sequence[Any]) -> Any:
    """SymPy's union of sets."""
    return sympy.Union(*sets)


def intersection(sets: Sequence[Any]) -> Any:
    """SymPy's intersection of sets."""
    return sympy.Intersection(*sets)


def matched(a: Sequence[Any], b: Sequence[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether the elements of two sequences are equal in some order."""
    left = list(b)
    for element in a:
        place = next((i for i, x in enumerate(left) if equal(element, x)), None)
        if place is None:
            return False
        del left[place]
    return not left
