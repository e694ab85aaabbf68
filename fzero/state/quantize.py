"""Quantize: the large leaves of a tree as codes of 8 or 4 bits, before the tree is partitioned."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.layout.ranges import intersect
from fzero.state.sources import Source, check_range, is_source, source_of
from fzero.values.blockwise import CHUNK, Coding, check_coding, encode
from fzero.values.functions import is_sharded
from fzero.values.quantized import Quantized, is_quantized

Where = str | Callable[[str, Any], bool]


def quantize(
    params: tree.Tree, *, bits: int = 8, block: int = 256, where: Where | None = None, dtype: torch.dtype | None = None
) -> tree.Tree:
    """`params` with large leaves held as codes of 8 or 4 `bits`, and a scale for each `block` of elements.

        params, apply = fzero.lower(model)
        held = fzero.partition(fzero.quantize(params, bits=4, block=64), mesh)

    Partitioned, such a leaf takes `bits / 8 + 4 / block` bytes an element over all ranks. A step reads it as a floating
    tensor of `dtype`, by default the leaf's: it gathers codes and scales, dequantizes them in front of each use, and
    keeps nothing of the dequantized value in between. So a step equals plain torch on the dequantized weights,
    `leaf.full_tensor()`, bit for bit where ranks take no mean.

    The leaf is frozen: it has neither gradient nor optimizer state. Below its path are two leaves, `codes` and
    `scales`. A leaf that is trained keeps its precision; `fzero.variants.int8_gather` gathers it as codes.

    * `where`: which leaves. A function of path and leaf, or a regular expression that is searched in the path. By
      default the frozen floating leaves of two or more dimensions and at least one block, but no embeddings.
    * With 8 bits no element changes by more than 1/254 of the largest in its block, with 4 bits by 1/14. Blocks are
      counted from the start of the leaf, so the codes do not depend on the number of ranks.

    Tensors are quantized now, on their device; a source of values, as `fzero.open_safetensors` returns, while
    `fzero.partition` reads it, a chunk at a time. A tensor on the meta device gives codes and scales there, as `like`
    for `fzero.load_safetensors`.

    Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314; the gathers are ZeRO++'s, https://arxiv.org/abs/2306.10209.

    Raises:
        FzeroError: for other bits, for a block of no even number of elements, for a `dtype` that is not floating;
            where no leaf is chosen; naming the leaf, for a chosen leaf that is not floating, is smaller than a block,
            is quantized or partitioned already, or has values that are not finite.
    """
    check_coding("fzero.quantize", Coding((), torch.float32, bits, block))
    if dtype is not None and not dtype.is_floating_point:
        raise FzeroError("fzero.quantize", f"dtype is {dtype}", "give a floating dtype, in which the leaf is read")
    chooses = _make_choice(where, block)
    leaves, treedef = tree.flatten(params, is_leaf=is_quantized)
    paths = [tree.dotted(key) for key in tree.keys(treedef)]
    chosen = [i for i, leaf in enumerate(leaves) if chooses(paths[i], leaf)]
    if not chosen:
        problem = f"chooses none of {len(leaves)} leaves (such as {', '.join(paths[:3])})"
        way_out = "call requires_grad_(False) before fzero.lower for what is not trained, or give `where`"
        raise FzeroError("fzero.quantize", problem, way_out)
    for i in chosen:
        _check_leaf(paths[i], leaves[i], block)
        coding = Coding(tuple(leaves[i].shape), dtype or leaves[i].dtype, bits, block)
        leaves[i] = _quantize(paths[i], leaves[i], coding)
    return tree.unflatten(treedef, leaves)


def _make_choice(where: Where | None, block: int) -> Callable[[str, Any], bool]:
    """The predicate of path and leaf that `where` stands for."""
    if isinstance(where, str):
        pattern = re.compile(where)
        return lambda path, leaf: pattern.search(path) is not None
    if where is not None:
        return where
    return lambda path, leaf: (
        not is_quantized(leaf)
        and is_frozen(leaf)
        and len(leaf.shape) >= 2
        and leaf.dtype.is_floating_point
        and torch.Size(leaf.shape).numel() >= block
        and not is_embedding(leaf)
    )


def _check_leaf(path: str, leaf: Any, block: int) -> None:
    if is_quantized(leaf):
        raise FzeroError(path, f"is quantized already, with {leaf.coding.bits} bits", "quantize a tree once")
    if is_sharded(leaf):
        way_out = "quantize first: fzero.partition(fzero.quantize(params), mesh)"
        raise FzeroError(path, "is partitioned already, and rounding needs whole blocks", way_out)
    if not leaf.dtype.is_floating_point:
        raise FzeroError(path, f"is {leaf.dtype}, and codes stand for floating numbers", "leave it out of `where`")
    if torch.Size(leaf.shape).numel() < block:
        problem = f"has {torch.Size(leaf.shape).numel()} elements, a block {block}"
        raise FzeroError(path, problem, "leave it out of `where`, or give a smaller block")


def _quantize(path: str, leaf: Any, coding: Coding) -> Quantized:
    """A tensor or a source, as codes and scales."""
    if isinstance(leaf, Tensor) and leaf.is_meta:
        made = [torch.empty(x, dtype=torch.uint8, device="meta") for x in (coding.codes_shape, coding.scales_shape)]
    elif is_source(leaf):
        return Quantized(_Stored(leaf, coding, path, "codes"), _Stored(leaf, coding, path, "scales"), coding)
    else:
        made = _encode(source_of(leaf, path), path, coding, getattr(leaf, "device", torch.device("cpu")))
    return Quantized(*(torch.nn.Parameter(x, requires_grad=False) for x in made), coding)


def _encode(source: Source, path: str, coding: Coding, device: torch.device) -> list[Tensor]:
    """`[codes, scales]` of a source's values, a chunk at a time."""
    codes, scales = (
        torch.empty(x, dtype=torch.uint8, device=device) for x in (coding.codes_shape, coding.scales_shape)
    )
    step = max(CHUNK // coding.block, 1) * coding.block
    for start in range(0, coding.numel, step):
        elements = range(start, min(start + step, coding.numel))
        made, of_blocks = encode(_read(source, path, elements, device), coding)
        codes[start * coding.bits // 8 :][: made.numel()] = made
        scales[start // coding.block :][: len(of_blocks)] = of_blocks
    return [codes, scales]


def _read(source: Source, path: str, elements: range, device: torch.device) -> Tensor:
    """Some values of a source, in float32.

    Raises:
        FzeroError: for values that are not finite, with the place of the first.
    """
    values = torch.empty(len(elements), dtype=torch.float32, device=device)
    source.read(elements.start, values)
    if not values.sum().isfinite() and not values.isfinite().all():
        at = elements.start + int((~values.isfinite()).nonzero()[0])
        problem = f"element {at} is {values[at - elements.start].item()}, and a block of it has no scale"
        raise FzeroError(path, problem, "quantize finite values")
    return values


class _Stored:
    """The source of the codes, or of the scales, of a source's values. It reads whole blocks of these."""

    is_frozen, dtype = True, torch.uint8

    def __init__(self, source: Source, coding: Coding, path: str, name: str) -> None:
        self._source, self._form, self._where = source, coding, path
        self._item = ("codes", "scales").index(name)
        self._width = (coding.block * coding.bits // 8, 4)[self._item]  # bytes of a block
        self.path, self.shape = f"{path}.{name}", torch.Size((coding.codes_shape, coding.scales_shape)[self._item])

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out`, 1-d and uint8, with the bytes [start, start + out.numel())."""
        wanted, width, coding = check_range(self, start, out), self._width, self._form
        blocks = range(wanted.start // width, -(-wanted.stop // width))
        many = max(CHUNK // coding.block, 1)
        for first in blocks[::many]:
            elements = range(first * coding.block, min(min(first + many, blocks.stop) * coding.block, coding.numel))
            made = encode(_read(self._source, self._where, elements, out.device), coding)[self._item].view(-1)
            begin = first * width
            here = intersect(wanted, range(begin, begin + made.numel()))
            out[here.start - start : here.stop - start] = made[here.start - begin : here.stop - begin]
