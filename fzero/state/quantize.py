"""Quantize: the large leaves of a tree as codes of 8 or 4 bits, before the tree is partitioned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape
from fzero.layout.layout import Layout, layer_of
from fzero.layout.ranges import intersect
from fzero.layout.splits import Split
from fzero.program.block_scales import store_scales
from fzero.program.blockwise import Coding, check_coding, encode_blocks
from fzero.ranks.calls import describe_leaf
from fzero.ranks.ranks import Ranks
from fzero.state.exchange import Stretch
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.grouping import LeafLayouts, plan_leaves
from fzero.state.partition import fill_leaves
from fzero.state.sources import Source, check_range, is_source, source_of
from fzero.state.splits import put_values, split_of_codes
from fzero.state.unpartition import SourceOfSharded, assemble_piece
from fzero.values.functions import is_sharded
from fzero.values.origin import describe_state
from fzero.values.quantized import Quantized, is_quantized
from fzero.values.sharded import Sharded

Where = str | Callable[[str, Any], bool]


@check_arguments
def quantize(
    params: tree.Tree,
    *,
    bits: int = 8,
    block: int = 256,
    levels: str = "even",
    double_quant: bool = False,
    where: Where | None = None,
    dtype: torch.dtype | None = None,
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
    * `levels`: "even" levels are whole numbers of the scale: with 8 bits no element changes by more than 1/254 of the
      largest in its block, with 4 bits by 1/14. "nf4" are the 16 levels of QLoRA's NormalFloat, which lie densely near
      zero: by at most 1/6.5, and by less in the mean, where elements are distributed normally.
    * `double_quant`: hold the scales as codes of 8 bits, too, in groups of 256, and the mean of all scales beside them.
      This is the double quantization of QLoRA, and of `bnb_4bit_use_double_quant`. A leaf takes `bits / 8 + 1 / block`
      bytes an element, and a 256th of the scales' `4 / block`. An element changes by as many times its code as its
      scale does: by at most 0.0071 of the largest distance of a scale of its group from the mean.
    * Blocks are counted from the start of the leaf, so the codes do not depend on the number of ranks.

    Tensors are quantized now, on their device; a source of values, as `fzero.open_safetensors` returns, while
    `fzero.partition` reads it, a chunk at a time. A `Sharded` leaf, as `fzero.build` returns, is quantized now. Its
    codes lie where the leaf lies, such as on the host or on a disk, and leaves that shared its bucket are partitioned
    anew: all ranks call together, in front of an optimizer's `init`, and send each other a chunk at a time. A tensor on
    the meta device gives codes and scales there, as `like` for `fzero.load_safetensors`.

    Dettmers et al., QLoRA, https://arxiv.org/abs/2305.14314; the gathers are ZeRO++'s, https://arxiv.org/abs/2306.10209.

    Raises:
        FzeroError: for other bits, for a block of no even number of elements, for a `dtype` that is not floating;
            where no leaf is chosen; naming the leaf, for a chosen leaf that is not floating, is smaller than a block,
            is quantized already, or has values that are not finite.
    """
    check_coding("fzero.quantize", Coding((), torch.float32, bits, block, levels, double_quant))
    if dtype is not None and not dtype.is_floating_point:
        raise FzeroError("fzero.quantize", f"dtype is {dtype}", "give a floating dtype, in which the leaf is read")
    chooses = _make_choice(where, block)
    leaves, treedef = tree.flatten(params, is_leaf=is_quantized)
    paths = tree.paths(params, is_leaf=is_quantized)
    chosen = [i for i, leaf in enumerate(leaves) if chooses(paths[i], leaf)]
    if not chosen:
        problem = f"chooses none of {len(leaves)} leaves (such as {', '.join(paths[:3])})"
        way_out = "call requires_grad_(False) before fzero.lower for what is not trained, or give `where`"
        raise FzeroError("fzero.quantize", problem, way_out)
    held = {paths[i]: leaves[i] for i in chosen if is_sharded(leaves[i])}
    for i in chosen:
        if not isinstance(leaves[i], Tensor):
            leaves[i] = source_of(leaves[i], paths[i])  # of an array
        _check_leaf(paths[i], leaves[i], block)
        coding = Coding(global_shape(leaves[i]), dtype or leaves[i].dtype, bits, block, levels, double_quant)
        leaves[i] = quantize_leaf(paths[i], leaves[i], coding)
    made = tree.unflatten(treedef, leaves)
    for on in dict.fromkeys(leaf.on for leaf in held.values()):
        made = _partition_anew(made, on, held)
    return made


def _make_choice(where: Where | None, block: int) -> Callable[[str, Any], bool]:
    """The predicate of path and leaf that `where` stands for."""
    if isinstance(where, str):
        try:
            pattern = re.compile(where)
        except re.error as error:
            way_out = "give one such as r'proj\\.weight$', or a function of path and leaf"
            raise FzeroError("where", f"{where!r} is no regular expression: {error}", way_out) from error
        return lambda path, leaf: pattern.search(path) is not None
    if where is not None:
        return where
    return lambda path, leaf: (
        not is_quantized(leaf)
        and is_frozen(leaf)
        and len(leaf.shape) >= 2
        and leaf.dtype.is_floating_point
        and torch.Size(global_shape(leaf)).numel() >= block
        and not is_embedding(leaf)
    )


def _check_leaf(path: str, leaf: Any, block: int) -> None:
    if is_quantized(leaf):
        raise FzeroError(path, f"is quantized already, with {leaf.coding.bits} bits", "quantize a tree once")
    if not leaf.dtype.is_floating_point:
        raise FzeroError(path, f"is {leaf.dtype}, and codes stand for floating numbers", "leave it out of `where`")
    if (numel := torch.Size(global_shape(leaf)).numel()) < block:
        problem = f"has {numel} elements, a block {block}"
        raise FzeroError(path, problem, "leave it out of `where`, or give a smaller block")


def quantize_leaf(path: str, leaf: Any, coding: Coding) -> Quantized:
    """The codes and scales of a tensor; of a source or a `Sharded`, sources of these."""
    if isinstance(leaf, Tensor) and leaf.is_meta and not is_sharded(leaf):
        made = [torch.empty(x, dtype=torch.uint8, device="meta") for x in (coding.codes_shape, coding.scales_shape)]
    elif is_sharded(leaf) or is_source(leaf):
        stored = _StoredOnRanks if is_sharded(leaf) else _Stored
        return Quantized(*(stored(leaf, coding, path, item) for item in range(2)), coding)
    else:
        made = _encode(source_of(leaf, path), path, coding, getattr(leaf, "device", torch.device("cpu")))
    return Quantized(*(torch.nn.Parameter(x, requires_grad=False) for x in made), coding)


def _partition_anew(made: tree.Tree, on: Ranks, held: Mapping[str, Sharded]) -> tree.Tree:
    """A tree in which the codes and scales of the leaves that were `held` on a mesh are partitioned there. They lie
    where these leaves lie.

    The other leaves of their buckets are partitioned anew, as if they had been partitioned beside codes: they were cut
    as parts of larger buckets, so that few ranks would hold them all, and are views of memory that would stay.
    """
    leaves, treedef = tree.flatten(made)
    keys = tree.keys(treedef)
    lost = {leaf.form.layout for leaf in held.values() if leaf.on is on and not leaf.is_replicated}
    codes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _StoredOnRanks) and leaf.value.on is on]
    rest = [i for i, leaf in enumerate(leaves) if is_sharded(leaf) and leaf.on is on and leaf.form.layout in lost]
    old = {i: leaves[i].value if i in codes else leaves[i] for i in (*codes, *rest)}
    found: LeafLayouts = {}
    for unit in dict.fromkeys(leaf.form.layout.unit for leaf in old.values()):
        here = [i for i in sorted(old) if old[i].form.layout.unit == unit]
        names = [keys[i] if i in codes else tuple(leaves[i].path.split(".")) for i in here]
        layers = {tree.dotted(name): layer_of(old[i].form.layout.bucket) for name, i in zip(names, here)}
        blocks = {leaves[i].path: leaves[i].leaf.block for i in here if i in rest}
        how: dict[str, Any] = {"granularity": lambda path, shape, blocks=blocks: blocks.get(path), "unit": unit}
        split = {path: each for i in here for path, each in _find_splits(leaves[i], old[i], on).items()}
        given = [leaves[i] if i in codes else SourceOfSharded(leaves[i]) for i in here]
        layouts = plan_leaves(names, given, on.mesh, layers=layers.get, split=split, **how)
        found.update((here[position], where) for position, where in layouts.items())
    sources = {i: leaves[i] if i in codes else SourceOfSharded(leaves[i]) for i in found}
    dtypes = {i: sources[i].dtype for i in found}
    lines = [f"leaf {sources[i].path}: {describe_leaf(*found[i], dtypes[i])}" for i in found]
    on.agree("quantize", [*lines, *(describe_state(path, leaf.origin) for path, leaf in held.items())])
    devices, places = {i: old[i].device for i in found}, {i: old[i].place for i in found}
    filled = fill_leaves(on, found, sources, dtypes, devices, CHUNK_NBYTES, places=places)
    return tree.unflatten(treedef, [filled.get(i, leaf) for i, leaf in enumerate(leaves)])


def _find_splits(leaf: Any, held: Sharded, on: Ranks) -> dict[str, Split]:
    """The split, by its path, of a leaf that was `held` on ranks: of that leaf itself, or of its codes or scales."""
    split = held.leaf.split
    if split is None or not isinstance(leaf, _StoredOnRanks):
        return {} if split is None else {leaf.path: split}
    found = split_of_codes(held.path, leaf.coding, split, on.mesh)
    return {path: each for path, each in found.items() if path == leaf.path}


def _encode(source: Source, path: str, coding: Coding, device: torch.device) -> list[Tensor]:
    """`[codes, scales]` of a source's values, a chunk at a time."""
    codes = torch.empty(coding.codes_shape, dtype=torch.uint8, device=device)
    scales = torch.empty(coding.blocks, dtype=torch.float32, device=device)
    for start in range(0, coding.numel, coding.chunk):
        values = torch.empty(min(coding.chunk, coding.numel - start), dtype=torch.float32, device=device)
        source.read(start, values)
        made, of_blocks = encode_blocks(_check_finite(path, start, values), coding)
        codes[start * coding.bits // 8 :][: made.numel()] = made
        scales[start // coding.block :][: len(of_blocks)] = of_blocks
    return [codes, store_scales(scales, coding.double_quant)]


def _check_finite(path: str, start: int, values: Tensor) -> Tensor:
    """`values`, elements of a leaf from `start` on.

    Raises:
        FzeroError: for values that are not finite, with the place of the first.
    """
    if not values.sum().isfinite() and not values.isfinite().all():
        at = int((~values.isfinite()).nonzero()[0])
        problem = f"element {start + at} is {values[at].item()}, and a block of it has no scale"
        raise FzeroError(path, problem, "quantize finite values")
    return values


class _Stored:
    """The source of the codes, item 0, or of the scales, item 1, of a leaf's values. It reads whole blocks of these."""

    is_frozen, dtype = True, torch.uint8

    def __init__(self, leaf: Any, coding: Coding, path: str, item: int) -> None:
        self.value, self.coding, self._where, self._item = leaf, coding, path, item
        self._width = (coding.block * coding.bits // 8, 4)[self._item]  # bytes of a block
        self.path, self.shape = (
            f"{path}.{coding.keys[item]}",
            torch.Size((coding.codes_shape, coding.scales_shape)[self._item]),
        )

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out`, 1-d and uint8, with the bytes [start, start + out.numel())."""
        self._fill(Stretch(start, out), check_range(self, start, out), self.coding.chunk // self.coding.block)

    def _fill(self, room: Stretch, wanted: range, many: int) -> None:
        """Compute the bytes `wanted`, so `many` blocks at a time, and copy those that a stretch of memory has room
        for."""
        mine = range(room.start, room.start + len(room.values))
        for made in self._compute(wanted, many):
            here = intersect(intersect(wanted, mine), range(made.start, made.start + len(made.values)))
            if here:
                room.put(here, made.at(here))

    def _compute(self, wanted: range, many: int) -> Iterator[Stretch]:
        """The bytes `wanted`, and more of the first and the last block. Scales that are codes are one stretch: the mean
        is that of all values."""
        width, coding = self._width, self.coding
        is_double, scales = self._item == 1 and coding.double_quant, list[Tensor]()
        blocks = range(coding.blocks) if is_double else range(wanted.start // width, -(-wanted.stop // width))
        for first in blocks[::many]:
            elements = range(first * coding.block, min(min(first + many, blocks.stop) * coding.block, coding.numel))
            made = encode_blocks(_check_finite(self._where, elements.start, self._read(elements)), coding)
            if is_double:
                scales.append(made[1])
            else:
                yield Stretch(first * width, made[self._item].view(torch.uint8).view(-1))
        if is_double:
            yield Stretch(0, store_scales(torch.cat(scales), is_double))

    def _read(self, elements: range) -> Tensor:
        values = torch.empty(len(elements), dtype=torch.float32, device="cpu")
        self.value.read(elements.start, values)
        return values


class _StoredOnRanks(_Stored):
    """`_Stored` of a `Sharded` leaf. Ranks send each other a chunk at a time, and none holds the whole leaf."""

    fills_parts = True

    def fingerprint(self) -> bytes:
        """Nothing: one rank alone cannot read the values."""
        return b""

    def fill(self, on: Ranks, out: Tensor, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of the codes or scales, 1-d. All ranks of the leaf's mesh call together."""
        for made in self._compute(range(self.shape.numel()), max(chunk // (4 * self.coding.block), 1)):
            put_values(out, made, layout, leaf, on)

    def _read(self, elements: range) -> Tensor:
        return assemble_piece(self.value, elements).float()
