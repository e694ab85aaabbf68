"""Caches: keys and values of one length, so that one program serves every token that is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor
from transformers import cache_utils

from fzero import tree

LEAST = 16
"""The shortest bucket."""
OLD_NAMES = ("state", "mems", "past_buckets_states")
"""The outputs of models whose cache is tensors, without a class."""


def round_up(length: int) -> int:
    """The bucket of a length: the smallest power of two from the length on, at least `LEAST`."""
    return max(LEAST, 1 << (length - 1).bit_length())


class FixedLayer(cache_utils.CacheLayerMixin):
    """The keys and values of a layer, in tensors of a fixed length: a layer of transformers' caches.

    A program reads the layer and does not write into it: `update` notes new keys and values in `written`, and `write`
    puts them into the tensors after the program. Before the first `write` there are no tensors, and attention sees the
    new keys and values alone: such a program serves caches of all lengths.
    """

    is_compileable = True  # transformers then makes masks of the fixed length
    is_sliding = False  # masks hide what a sliding window does not see

    def __init__(self, max_length: int, device: torch.device) -> None:
        super().__init__()
        self.max_length = max_length
        self.cumulative_length = torch.zeros((), dtype=torch.int64, device=device)
        self.written: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tensors, for keys and values of these sizes and dtypes."""
        for name, x in (("keys", key_states), ("values", value_states)):
            setattr(self, name, x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that attention sees, with the new ones in their places."""
        self.written = key_states, value_states
        if not self.is_initialized:
            return key_states, value_states
        at = self._find_places(key_states.shape[2])
        return (
            self.keys.index_copy(2, at, key_states.to(self.keys.dtype)),
            self.values.index_copy(2, at, value_states.to(self.values.dtype)),
        )

    def write(self, keys: Tensor, values: Tensor, count: int) -> None:
        """Write the first `count` of new keys and values into the tensors, behind those that are there."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        at = self._find_places(count)
        self.keys.index_copy_(2, at, keys[:, :, :count].to(self.keys.dtype))
        self.values.index_copy_(2, at, values[:, :, :count].to(self.values.dtype))
        self.cumulative_length = self.cumulative_length + count

    def _find_places(self, count: int) -> Tensor:
        return torch.arange(count, device=self.cumulative_length.device) + self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.keys.shape[2] if self.is_initialized else query_length), 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else -1  # none is known yet


def _flatten(layer: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
    return (layer.keys, layer.values, layer.cumulative_length), None, ("keys", "values", "cumulative_length")


def _unflatten(_: Any, children: Any) -> Any:
    made = FixedLayer.__new__(FixedLayer)
    made.keys, made.values, made.cumulative_length = children
    made.is_initialized, made.written = made.keys is not None, None
    return made


optree.register_pytree_node(FixedLayer, _flatten, _unflatten, namespace=tree.NAMESPACE)

GROWING = (cache_utils.DynamicLayer, cache_utils.StaticLayer)
SLIDING = (cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticSlidingWindowLayer)
KEPT = tuple(  # whose sizes are fixed; transformers 5.22 has no DummyLayer
    x for x in (FixedLayer, cache_utils.LinearAttentionLayer, getattr(cache_utils, "DummyLayer", None)) if x
)


class Fixing:
    """A cache whose layers have a fixed length, until `undo` gives them back."""

    def __init__(self, cache: Any, length: int, device: torch.device) -> None:
        self._layers = find_decoder(cache).layers
        self._before = list(self._layers)
        if not all(_can_fix(layer) for layer in self._layers):
            return
        for i, layer in enumerate(self._layers):
            if not isinstance(layer, KEPT):
                self._layers[i] = made = FixedLayer(round_up(length), device)
                if layer.is_initialized:
                    count = int(layer.get_seq_length())
                    made.write(layer.keys, layer.values, count)

    def undo(self) -> None:
        """Give the cache its own layers back, with all keys and values."""
        for i, (layer, before) in enumerate(zip(self._layers, self._before)):
            if layer is before:
                continue
            count = int(layer.get_seq_length())
            self._layers[i] = before
            before.reset()
            if count:
                before.update(layer.keys[:, :, :count], layer.values[:, :, :count])


def _can_fix(layer: Any) -> bool:
    """Whether a layer of a fixed length can stand in the place of a layer. A sliding window may have dropped keys."""
    return isinstance(layer, KEPT) or type(layer) in GROWING or (type(layer) in SLIDING and not layer.is_initialized)


def find_caches(named: Mapping[str, Any]) -> dict[str, Any]:
    """The caches among the arguments of a model, or in its output, by name. Names differ between releases of
    transformers: `past_key_values` and `cache_params` became `cache` in 5.24."""
    return {name: x for name, x in named.items() if isinstance(x, cache_utils.Cache)}


def find_decoder(cache: Any) -> Any:
    """The cache of the decoder's own attention."""
    return cache.self_attention_cache if isinstance(cache, cache_utils.EncoderDecoderCache) else cache


def is_fixed(cache: Any) -> bool:
    """Whether all layers are of fixed length: a program may then be given more tokens than are written."""
    layers = find_decoder(cache).layers
    return bool(layers) and all(isinstance(layer, FixedLayer) for layer in layers)


def is_filled(cache: Any) -> bool:
    """Whether a layer has seen tokens. Layers of linear attention always have."""
    return any(getattr(layer, "is_initialized", True) for layer in find_decoder(cache).layers)


def copy_cache(cache: Any) -> Any:
    """A cache that a program may write into. Layers of linear attention write into their tensors."""
    copied = tree.map(lambda x: x, cache)
    for layer in find_decoder(copied).layers:
        if isinstance(layer, cache_utils.LinearAttentionLayer):
            vars(layer).update(tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, vars(layer)))
    return copied


def keep_new(cache: Any) -> Any:
    """A cache with what a program wrote: of a layer of fixed length the new keys and values alone."""
    for layer in find_decoder(cache).layers:
        if isinstance(layer, FixedLayer):
            (layer.keys, layer.values), layer.written = layer.written or (None, None), None
    return cache


def absorb(cache: Any, written: Any, count: int) -> Any:
    """`cache` after a program of `count` tokens, which returned `written`. The cache's objects stay the same."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        absorb(cache.self_attention_cache, written.self_attention_cache, count)
        absorb(cache.cross_attention_cache, written.cross_attention_cache, count)
        cache.is_updated = written.is_updated
        return cache
    for i, new in enumerate(written.layers):
        if i == len(cache.layers):
            cache.layers.append(new)  # a cache without a configuration begins without layers
        elif not isinstance(new, FixedLayer):
            vars(cache.layers[i]).update(vars(new))
        elif new.keys is not None:
            cache.layers[i].write(new.keys, new.values, count)
    return cache
