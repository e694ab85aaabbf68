"""Stacks: the leaves of equal layers as one leaf, of which ranks along a pipeline's axis have their stages' layers.

    a leaf that each rank has whole       [L, ...], split along dim 0 over "pp": L / N layers a rank
    one of which ranks along "tp" have    [N T, L / N, ...], split along dim 0 over ("pp", "tp"): of the layers of stage
    parts                                 p the part t, at p T + t

A leaf is split along one dim, so the parts come in front. Parts that are cut apart, such as gate and up in one leaf,
have a dim of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape
from fzero.formats.inner import Inner
from fzero.layout.strides import dense, view_to_view
from fzero.state.sources import Source, TensorSource, check_range
from fzero.values.sharded import Sharded


class Stack(NamedTuple):
    """How the leaves of L layers, each of this `shape`, are one leaf on N `stages`. A layer's leaf is cut over `ranks`
    along `dim`, in `parts` that are cut apart."""

    shape: tuple[int, ...]
    layers: int
    stages: int
    ranks: int = 1
    dim: int = 0
    parts: int = 1

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of a rank's part of a layer's leaf, with a dim for parts that are cut apart."""
        size = self.shape[self.dim] // (self.parts * self.ranks) if self.ranks > 1 else 0
        lead, last = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return (*lead, *([self.parts] if self.parts > 1 else []), size, *last) if self.ranks > 1 else self.shape

    @property
    def stacked(self) -> tuple[int, ...]:
        """The shape of the one leaf."""
        if self.ranks == 1:
            return (self.layers, *self.shape)
        return (self.stages * self.ranks, self.layers // self.stages, *self.block)

    def take(self, x: Tensor) -> Tensor:
        """[layers, ...] what a function of layers computes with: of all of the one leaf the layers' leaves, and of what
        a rank has of the one leaf its parts of its stage's layers."""
        if self.ranks == 1:
            return x
        merged = self.dim + 2 if self.parts > 1 else None  # dims of a block come behind [blocks, layers]
        if x.shape[0] == 1:
            return (x if merged is None else x.flatten(merged, merged + 1))[0]
        whole = x.unflatten(0, (self.stages, self.ranks))  # [N, T, L / N, block]
        return whole.movedim(1, 2 + self.dim + (self.parts > 1)).reshape(self.layers, *self.shape)

    def view_block(self, leaf: Tensor, rank: int) -> Tensor:
        """The part of a layer's leaf that ranks at a position have."""
        if self.ranks == 1:
            return leaf
        cut = leaf.unflatten(self.dim, (self.parts, self.ranks, -1)).select(self.dim + 1, rank)
        return cut if self.parts > 1 else cut.squeeze(self.dim)

    def place_of(self, number: int) -> tuple[int, int]:
        """The layer, and the position of ranks that have parts of it, of a block of the one leaf."""
        if self.ranks == 1:
            return number, 0
        each = self.layers // self.stages
        at, inside = divmod(number, each)
        stage, rank = divmod(at, self.ranks)
        return stage * each + inside, rank

    def place_layer(self, layer: int) -> list[Any]:
        """The copies from the one leaf to a layer's leaf."""
        numel = math.prod(self.shape)
        if self.ranks == 1:
            return view_to_view([numel], [1], [1], layer * numel)
        each, block = self.layers // self.stages, math.prod(self.block)
        stage, inside = divmod(layer, each)
        step = each * block  # from rank to rank
        start = stage * self.ranks * step + inside * block
        lead, last = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])
        run = self.shape[self.dim] // (self.parts * self.ranks) * last
        sizes = [lead * self.parts, self.ranks, run]
        return view_to_view(sizes, [run, step, 1], dense(sizes), start)


class StackSource:
    """The values of a stack, read from the leaves of layers: they are not copied."""

    def __init__(self, stack: Stack, leaves: Sequence[Tensor], path: str) -> None:
        self.shape, self.dtype, self.path = torch.Size(stack.stacked), leaves[0].dtype, path
        self.device, self.is_frozen = leaves[0].device, is_frozen(leaves[0])
        self._stack, self._leaves = stack, [leaf.detach() for leaf in leaves]

    def read(self, start: int, out: Tensor) -> None:
        check_range(self, start, out)
        numel, done = math.prod(self._stack.block), 0
        while done < out.numel():
            number, offset = divmod(start + done, numel)
            layer, rank = self._stack.place_of(number)
            size = min(numel - offset, out.numel() - done)
            block = self._stack.view_block(self._leaves[layer], rank)
            TensorSource(block, self.path).read(offset, out[done : done + size])
            done += size


def open_stack(stack: Stack, leaves: Sequence[Tensor], path: str) -> Any:
    """What `fzero.partition` takes for a stack: its source, or a meta tensor where layers have no values."""
    if leaves[0].is_meta:
        empty = torch.empty(stack.stacked, dtype=leaves[0].dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False) if is_frozen(leaves[0]) else empty
    return StackSource(stack, leaves, path)


def unstack(params: tree.Tree, model: nn.Module) -> dict[str, Sharded | Source | Tensor | Inner]:
    """`{name in the model: value}` of a tree that `fzero.hf.parallel` made along `pp`, and of any other tree of the
    model: leaves of layers are parts of the stacks. Nothing is copied.

    Raises:
        FzeroError: for a leaf that the model has no layers for.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in model.named_parameters()}
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    made: dict[str, Any] = {}
    for path, leaf in zip(tree.paths(params), tree.leaves(params)):
        if path in shapes:
            made[path] = leaf
            continue
        at = next((name for name in lists if path.startswith(f"{name}.")), None)
        rest = "" if at is None else path[len(at) + 1 :]
        if at is None or f"{at}.0.{rest}" not in shapes:
            raise FzeroError(
                path, f"is no leaf of {type(model).__name__}, and no stack of its layers'", "give its model"
            )
        stack = _recognize(path, global_shape(leaf), shapes[f"{at}.0.{rest}"], lists[at])
        for layer in range(stack.layers):
            made[f"{at}.{layer}.{rest}"] = _cut_out(stack, leaf, layer)
    return made


def _cut_out(stack: Stack, leaf: Any, layer: int) -> Any:
    if isinstance(leaf, Sharded):
        return Inner(leaf, torch.Size(stack.shape), tuple(stack.place_layer(layer)))
    return stack.take(leaf)[layer]


def _recognize(path: str, given: tuple[int, ...], shape: tuple[int, ...], layers: int) -> Stack:
    """The stack of layers' leaves of this shape that has the `given` shape: each has another one."""
    if given == (layers, *shape):
        return Stack(shape, layers, 1)
    for stack in _list_stacks(given, shape, layers):
        if stack.stacked == given:
            return stack
    raise FzeroError(
        path, f"has the shape {list(given)}, and {layers} layers have {list(shape)} each", "give its model"
    )


def _list_stacks(given: tuple[int, ...], shape: tuple[int, ...], layers: int) -> Iterator[Stack]:
    if len(given) < 3 or layers % given[1] or given[0] % (layers // given[1]):
        return
    stages = layers // given[1]
    ranks, is_apart = given[0] // stages, len(given) > len(shape) + 2
    for dim in range(len(shape)):
        parts = given[2 + dim] if is_apart else 1
        if shape[dim] % (parts * ranks) == 0:
            yield Stack(shape, layers, stages, ranks, dim, parts)
