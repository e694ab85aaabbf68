"""Arguments of public functions: the signature says what a function takes, and anything else is refused by name."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import operator
import os
import types
import typing
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, ParamSpec, TypeVar, Union

import torch

from fzero.base.errors import FzeroError

P = ParamSpec("P")
R = TypeVar("R")
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
    os.PathLike: "a path",
    torch.dtype: "a dtype, such as torch.float32",
    torch.Tensor: "a tensor",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a list or a tuple",
    tuple: "a tuple",
}
_LISTS = (collections.abc.Sequence, tuple)


def check_arguments(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, which refuses an argument that is not of the type that the signature of `fn` says.

    A bool is no number. A 0-d tensor is a number where it holds one. The elements of a list are checked too. An
    annotation of another kind, such as a tree or a placement, takes everything: `fn` looks at these values.

    Raises:
        FzeroError: naming the argument, its value, and what the signature takes.
    """

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        names, hints = _read_signature(fn)
        for name, value in (*zip(names, args), *kwargs.items()):
            if name in hints and not is_of(value, hints[name]):
                raise FzeroError(name, f"is {value!r:.80}", f"give {describe(hints[name])}")
        return fn(*args, **kwargs)

    return checked


@functools.cache
def _read_signature(fn: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of arguments that may be given by position, and the type of each argument."""
    known = inspect.signature(fn).parameters
    single = {name for name, x in known.items() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
    names = [name for name, x in known.items() if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return names, {name: hint for name, hint in typing.get_type_hints(fn).items() if name in single}


def is_of(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type that an annotation says."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if any(typing.get_origin(each) is os.PathLike for each in inner) and _has_null(value):
            return False
        return any(is_of(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is int:
        return is_whole(value)
    if origin is float:
        is_number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.ndim == 0)
        return is_number and not isinstance(value, bool)
    if origin in _LISTS:
        is_list = isinstance(value, collections.abc.Sequence) and not isinstance(value, (str, bytes))
        return is_list and all(is_of(item, inner[0]) for item in value)
    return origin not in _WORDS or isinstance(value, origin)


def _has_null(value: Any) -> bool:
    """Whether a text or a path has a character that no path may have."""
    return isinstance(value, (str, os.PathLike)) and "\0" in os.fsdecode(value)


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number. A bool is none."""
    if isinstance(value, torch.SymInt):
        return True  # its index would be that of one size
    try:
        operator.index(value)
    except (TypeError, RuntimeError):  # a tensor with a fraction, or of several elements
        return False
    return not isinstance(value, bool)


def describe(hint: Any) -> str:
    """The type that an annotation says, in words."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, types.UnionType):
        *first, last = (describe(each) for each in inner)
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return " or ".join(map(repr, inner))
    each = f", of each {describe(inner[0])}" if origin in _LISTS and inner[0] in _WORDS else ""
    return _WORDS[origin] + each
