"""Caches: keys and values of one length, so that one program serves every token that is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor
from transformers import cache_utils

from fzero import all_gather, tree
from fzero.base.errors import FzeroError
from fzero.hf.styles import take_block
from fzero.ranks.performer import current_performer

LEAST = 16
"""The shortest bucket."""
HEADS = 1
"""The dim of heads in keys and values."""
SHARED = "fzero_shared"
"""The attribute of a layer that grows: its tensors that ranks join, and the axes along which they do."""
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

    Ranks that share layers all have the tensors of all heads. In a program each reads its own heads.
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
        keys, values = (
            take_block(x, axes, HEADS) if (axes := find_parts(new)) else x
            for x, new in ((self.keys, key_states), (self.values, value_states))
        )
        return (
            keys.index_copy(2, at, key_states.to(keys.dtype)),
            values.index_copy(2, at, value_states.to(values.dtype)),
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
    """A cache that a program may write into. Layers of linear attention write into their tensors. On ranks that share
    layers, those that grow have this rank's heads."""
    copied = tree.map(lambda x: x, cache)
    for layer in _list_layers(copied):
        if isinstance(layer, cache_utils.LinearAttentionLayer):
            vars(layer).update(tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, vars(layer)))
        for name, axes in vars(layer).get(SHARED, {}).items():
            setattr(layer, name, take_block(getattr(layer, name), tuple(axes), HEADS))
    return copied


def keep_new(cache: Any, given: Any) -> Any:
    """A cache with what a program wrote, which was given `given`: of a layer of fixed length the new keys and values
    alone. Ranks that share layers join their heads.

    Raises:
        FzeroError: for state of another layer, of which ranks have parts.
    """
    for layer in find_decoder(cache).layers:
        if isinstance(layer, FixedLayer):
            (layer.keys, layer.values), layer.written = layer.written or (None, None), None
    is_known = isinstance(cache, cache_utils.EncoderDecoderCache) and any(given.is_updated.values())
    for at, layer in enumerate(_list_layers(cache)):
        if is_known and layer in cache.cross_attention_cache.layers:  # of the encoder's output, as before
            vars(layer).update(vars(_list_layers(given)[at]))
            continue
        shared = {name: axes for name in ("keys", "values") if (axes := find_parts(getattr(layer, name, None)))}
        for name, axes in shared.items():
            x = getattr(layer, name)
            setattr(layer, name, all_gather(x.movedim(HEADS, 0).contiguous(), axes).movedim(0, HEADS))
        if shared and not isinstance(layer, FixedLayer):
            setattr(layer, SHARED, shared)
        if any(map(find_parts, tree.leaves(vars(layer)))):
            problem = f"a {type(layer).__name__} has state that differs between ranks that share layers"
            raise FzeroError("generate: the cache", problem, "generate on a mesh without tp and ep")
    return cache


def _list_layers(cache: Any) -> list[Any]:
    """The layers of a cache, those of cross-attention last."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def find_parts(x: Any) -> tuple[str, ...]:
    """In a step, the model axes along which ranks have parts of a tensor, in order of the mesh."""
    on = current_performer()
    axes = on.find_differing(x) if on is not None and isinstance(x, Tensor) else ()
    return on.mesh.split(on.mesh.join(axes)) if on is not None and axes else ()


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
