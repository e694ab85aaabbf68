"""Quantized: ZeRO++ and MiCS of a configuration, as passes of an engine's programs and codes of frozen leaves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fzero import iter_full, passes, quantize, tree
from fzero.base.embeddings import is_embedding
from fzero.base.frozen import is_frozen
from fzero.deepspeed.settings import Settings
from fzero.passes.run import Pass
from fzero.values.quantized import is_quantized
from fzero.variants.hpz import hpz
from fzero.variants.int8_gather import int8_gather
from fzero.variants.int8_mean import int8_mean
from fzero.variants.mics import mics

BLOCK = 256
"""The elements that share a scale."""


def choose_passes(settings: Settings, *, in_place: bool) -> tuple[Pass, ...] | None:
    """The passes of an engine's program; None for the default ones. With `in_place` the program donates its state. The
    program of an update gathers no weights, that of an evaluation scatters no gradients."""
    spread = settings.spread
    added: list[tuple[Any, str]] = [(int8_gather, "prefetch")] * settings.quantizes_weights
    added += [(int8_mean, "prefetch")] * settings.quantizes_gradients
    if spread.local is not None:
        added.insert(0, (hpz, "offload") if spread.shard is None else (mics, "prefetch"))
    if not added:
        return None
    plan = passes.Plan(settings.stage, in_place=in_place, reduce_dtype=settings.reduce_dtype, chunk=settings.chunk)
    chosen = passes.defaults(plan)
    for each, before in added:
        chosen = passes.insert(chosen, partial(each, strict=False), before=before)
    return chosen


def quantize_frozen(params: Any) -> Any:
    """The parameters with large frozen leaves as codes of 8 bits, but no embeddings. Without such a leaf they stay as
    they are, as in DeepSpeed."""
    has_any = any(map(_is_large, tree.paths(params), tree.leaves(params)))
    return quantize(params, block=BLOCK, where=_is_large) if has_any else params


def iter_values(params: Any) -> Iterator[tuple[str, Any]]:
    """`(path, whole tensor)` of each parameter by its name in the module, as `fzero.iter_full`. Codes become numbers.
    All ranks iterate together to the end."""
    leaves, _ = tree.flatten(params, is_leaf=is_quantized)
    for path, leaf in zip(tree.paths(params, is_leaf=is_quantized), leaves):
        if is_quantized(leaf):
            yield path, leaf.full_tensor()
        else:
            yield from iter_full({path: leaf})


def _is_large(path: str, leaf: Any) -> bool:
    is_matrix = leaf.is_floating_point() and leaf.ndim >= 2 and leaf.numel() >= BLOCK
    return is_frozen(leaf) and is_matrix and not is_embedding(leaf)
