"""Caches of transformers, into which each layer writes its keys and values: into a slot of its own.

What a layer leaves in its slot is among its results, and a copy of the layer leaves its own there. So a layer with a
cache is copied where it does nothing else with the cache: other slots are as they were, and code outside of
transformers' caches looks neither into the cache nor at the layer's index, but to hand it to the cache.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fzero.base.hugging_face import is_cache, is_cache_module
from fzero.base.torch_private import unwrap
from fzero.tracing.copies import Uncopied
from fzero.tracing.repeats import Repeats, Unknown
from fzero.tracing.watched_reads import watch_reads
from fzero.values.layers import LayerCall

Attributes = dict[str, Any]

_CACHE, _SLOTS = "DynamicCache", frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
_METHODS = frozenset({"__class__", "update", "get_seq_length", "get_mask_sizes"})
"""What code of a layer may read of a cache. A length is that of the slot of an index, or of the first one: that has
none in front of the first layer, and the same one in front of all others, of which the last one runs."""
_PLAIN = (bool, int, type(None), torch.dtype, torch.device, type)


class LayerCache:
    """The cache among the arguments of the layer at a position, and its slot there. A cache that makes slots when they
    are written to may have none there yet.

    Raises:
        Unknown: where the cache is not one of those whose slots are known, and where the slot has values of the trace.
    """

    def __init__(self, cache: Any, at: int, repeats: Repeats) -> None:
        self._cache, self._at = cache, at
        if type(cache).__name__ != _CACHE or len(cache.layers) < at:
            raise Unknown
        self._slot = cache.layers[at] if at < len(cache.layers) else None
        before = {} if self._slot is None else vars(self._slot)
        self._constants = {name: x for name, x in before.items() if isinstance(x, Tensor)}
        is_known = self._slot is None or _is_slot(self._slot)
        if not is_known or any(_is_traced(x, repeats) for x in self._constants.values()):
            raise Unknown
        plain = {name: x for name, x in {**self._list_own(), **before}.items() if name not in self._constants}
        if not all(isinstance(x, _PLAIN) for x in plain.values()):
            raise Unknown
        self.description = type(self._slot), tuple(plain.items()), tuple(self._constants)

    def _list_own(self) -> Attributes:
        return {name: x for name, x in vars(self._cache).items() if name != "layers"}

    @contextmanager
    def watch(self) -> Iterator[Callable[[], Attributes]]:
        """The context in which a layer runs. Gives a function that returns the attributes of the slot behind it.

        Raises:
            Uncopied: by that function, where anything else in the cache has changed, or code has looked into it.
        """
        own, others = self._list_own(), [(x, dict(vars(x))) for x in self._cache.layers if x is not self._slot]
        looked = list[str]()

        def note(name: str, x: Any) -> Any:
            if name not in _METHODS and not is_cache_module(sys._getframe(2).f_globals.get("__name__", "")):
                looked.append(name)
            return x

        def take() -> Attributes:
            slots = list(self._cache.layers)
            slot = slots.pop(self._at) if self._at < len(slots) else None
            is_alone = len(slots) == len(others) and all(
                x is y and _is_same(vars(x), before) for x, (y, before) in zip(slots, others)
            )
            is_new = _is_slot(slot) and type(slot) is self._cache.layer_class_to_replicate
            is_own = slot is self._slot or (self._slot is None and is_new)
            if looked or not (is_alone and is_own and is_watched(self._cache) and _is_same(own, self._list_own())):
                raise Uncopied("does more with a cache than to write into its slot")
            after = {} if slot is None else vars(slot)
            return {name: x for name, x in after.items() if x is not self._constants.get(name, self)}

        with watch_reads([(self._cache, note)]) as is_watched:
            yield take

    def put(self, attributes: Attributes) -> None:
        """Leave these attributes in the slot."""
        slots = self._cache.layers
        if attributes and len(slots) == self._at:
            cls = self._cache.layer_class_to_replicate
            slots.append(cls.__new__(cls))
        if attributes:
            vars(slots[self._at]).update(attributes)


def find_cache(call: LayerCall, repeats: Repeats) -> LayerCache | None:
    """The cache among the arguments of a layer. None where there is none.

    Raises:
        Unknown: for two of them, and for one that is not known.
    """
    found = [x for x in (*call.args, *call.kwargs.values()) if is_cache(x)]
    if len(found) > 1:
        raise Unknown
    return LayerCache(found[0], call.at, repeats) if found else None


def leave_cache_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer, with None for a cache."""
    return tuple(None if is_cache(x) else x for x in args), {k: None if is_cache(x) else x for k, x in kwargs.items()}


def _is_slot(x: Any) -> bool:
    return is_cache(x) and type(x).__name__ in _SLOTS


def _is_traced(x: Tensor, repeats: Repeats) -> bool:
    """Whether a tensor is a value of the trace. One that is made of a number in Python is none."""
    try:
        repeats.describe_tensor(unwrap(x))
    except Unknown:
        return False
    return True


def _is_same(one: Attributes, other: Attributes) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), other.values()))
