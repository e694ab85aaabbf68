"""Calls: what ranks compare of a function of torch on `Sharded` values, outside of a step.

Before a function communicates, ranks compare its name, its options and the origins of its operands. Where a function
makes a new value, the value's origin is a hash of these. Contents of plain tensors do not count.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.ranks.performer import MovePerformer
from fzero.values import rules
from fzero.values.origin import UNKNOWN, Origin, follow

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def perform_call(name: str, x: Sharded, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MovePerformer:
    """What performs the moves of a value for a function of a name and with options beside the value."""
    if x.on.is_tracing or not (args or kwargs):
        return x.perform_for(name)
    options = [_describe(option) for option in args]
    options += [f"{key}={_describe(x)}" for key, x in kwargs.items() if x is not None and x is not False]
    return x.perform_for(f"{name}({', '.join(options)})")


def follow_call(anchor: Sharded, operands: Iterable[Any], *call: int) -> Origin:
    """The origin of what a `call` makes of these operands. `call` is a number of `hash_call`, and the position of the
    result where there are several."""
    if anchor.on.is_tracing:
        return UNKNOWN
    return follow([x.origin for x in operands if isinstance(x, Tensor) and hasattr(x, "origin")], hash(call))


def hash_call(func: Callable[..., Any], anchor: Sharded | None, *given: Any) -> int:
    """A hash of a function and of what it is given beside tensors, the same in every process; 0 in a trace."""
    if anchor is None or anchor.on.is_tracing:
        return 0
    return zlib.crc32(f"{rules.name_of(func)} {_describe(given)}".encode())


def _describe(given: Any) -> str:
    """Numbers, texts and dtypes of the arguments of a function. A device may differ between ranks."""
    if isinstance(given, dict):
        return "{" + ", ".join(f"{key}={_describe(x)}" for key, x in given.items()) + "}"
    if isinstance(given, (list, tuple)):
        return "(" + ", ".join(map(_describe, given)) + ")"
    if isinstance(given, Tensor):
        return "_"
    return repr(given) if isinstance(given, (int, float, complex, str, torch.dtype)) else type(given).__name__
