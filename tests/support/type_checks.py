"""The checker behind jaxtyping's annotations in the test run: beartype, where it can tell."""

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, Self, TypeVar, Union, get_args, get_origin

from beartype import BeartypeConf, beartype

F = TypeVar("F", bound=Callable)

# An int is a float wherever Python takes it for one.
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: F) -> F:
    """The function with its arguments and its result checked at each call."""
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    function.__annotations__ = hints
    return _beartype(function)


def _checkable(hint: Any) -> Any:
    """Any for a protocol, of which a stand-in may have only the verbs that it needs, and for Self,
    since methods are decorated one by one."""
    if hint is Self or getattr(hint, "_is_protocol", False):
        return Any
    old = get_args(hint)
    new = tuple(_checkable(arg) for arg in old)
    if new == old:
        return hint
    origin: Any = get_origin(hint)
    return (
        functools.reduce(operator.or_, new) if origin in (Union, types.UnionType) else origin[new]
    )
