"""Fakes: fake values whose form is known. To make them takes a fifth of the time of a call of their operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from fzero.base.torch_private import storage_key
from fzero.base.torch_private_traces import make_fake
from fzero.program.operation import Node


def copy_form(value: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """What `torch.empty_like` returns."""
    is_usual = value.stride() == _list_strides(value.shape)
    made = make_fake(value, value.shape, value.stride()) if is_usual else None
    return torch.empty_like(value, memory_format=memory_format) if made is None else made


def view_first(value: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a flat value, in a shape."""
    count, made = math.prod(shape), None
    if count <= value.numel() and value.is_contiguous():
        made = make_fake(value, shape, _list_strides(shape), value.storage_offset(), value.untyped_storage())
    return value.narrow(0, 0, count).view(shape) if made is None else made


def _list_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = accumulate((max(n, 1) for n in reversed(shape[1:])), mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


def repeat_value(node: Node, repeated: Node) -> Any:
    """The value of a node that calls what another `node` calls, with other operands: one of the same form. It lies in
    the memory of the new operands where the old one lies in that of the old ones. None where operands differ in form,
    and where only the operation can say."""
    memory: dict[int, torch.UntypedStorage] = {}  # storage of an old value -> that of the new one
    olds, news = node.all_input_nodes, repeated.all_input_nodes
    if len(olds) != len(news):
        return None
    for old, new in zip((x.meta.get("val") for x in olds), (x.meta.get("val") for x in news)):
        if not (isinstance(old, Tensor) and isinstance(new, Tensor) and _describe(old) == _describe(new)):
            return None
        if memory.setdefault(storage_key(old), new.untyped_storage())._cdata != storage_key(new):
            return None
    return _place(node.meta.get("val"), memory)


def pair_memory(news: Mapping[Node, Node]) -> dict[int, torch.UntypedStorage]:
    """Memory of old values -> that of the new values in their places, where all of these have the old forms."""
    memory: dict[int, torch.UntypedStorage] = {}
    unlike = set[int]()
    for old, new in ((old.meta.get("val"), new.meta.get("val")) for old, new in news.items()):
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            key, storage = storage_key(old), new.untyped_storage()
            if _describe(old) != _describe(new) or memory.setdefault(key, storage)._cdata != storage._cdata:
                unlike.add(key)
    return {key: storage for key, storage in memory.items() if key not in unlike}


def move_view(view: Node, memory: Mapping[int, torch.UntypedStorage]) -> Tensor | None:
    """The value of a view in the memory that has the place of the former one's. None where nothing has its place."""
    value = view.meta.get("val")
    storage = memory.get(storage_key(value)) if memory and isinstance(value, Tensor) else None
    return None if storage is None else make_fake(value, value.shape, value.stride(), value.storage_offset(), storage)


def _describe(value: Tensor) -> tuple[Any, ...]:
    """What the form of a result follows from."""
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def _place(value: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    """A value like another one, in this memory or in memory of its own. None where only the operation can say."""
    if isinstance(value, (list, tuple)):
        items = [_place(x, memory) for x in value]
        return None if any(x is None for x in items) else type(value)(items)
    if not isinstance(value, Tensor):
        return None
    storage = memory.get(storage_key(value))
    made = make_fake(value, value.shape, value.stride(), value.storage_offset(), storage)
    if made is None or (storage is None and not _fill_alike(value, made)):
        return None
    memory.setdefault(storage_key(value), made.untyped_storage())
    return made


def _fill_alike(value: Tensor, other: Tensor) -> bool:
    """Whether two values begin where their memory does, and have as much of it."""
    sizes = [x.untyped_storage().nbytes() for x in (value, other)]
    return sizes[0] == sizes[1] and not value.storage_offset() and not other.storage_offset()
