"""Differentiable moves between the kinds of value (sharded, uniform, per-rank), each with its transpose.

One convention makes `torch.func` compose: *the cotangent of a uniform or per-rank value is per-rank and waits to be
averaged over ranks; the cotangent of a sharded value is the slice of that average.*

    move                            transpose
    gather   sharded -> uniform     scatter
    scatter  any -> sharded         gather      (mean over ranks, keep the slice)
    take     uniform -> sharded     gather      (keep the slice: no communication)
    beside   uniform -> beside it   parts       (autograd sums over the slice; the other ranks' slices count too)
    parts    sums of slices -> uniform  beside
    total    sharded -> uniform     spread
    peak     sharded -> uniform     to the elements that hold it, in equal parts
    spread   uniform -> sharded     total
    psum, pmean  per-rank -> uniform    themselves
    pmax     per-rank -> uniform    to the ranks that hold the maximum, in equal parts

What performs a move is a `Primitives`: the tracer writes it down, a live mesh communicates at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero import tree
from fzero.layout import Layout
from fzero.mesh import VirtualMesh


class Primitives(Protocol):
    """Performs moves for one rank of a mesh."""

    mesh: VirtualMesh
    rank: int  # along the mesh's shard axis
    is_tracing: bool  # whether moves are written down, not performed

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """The whole leaf, in its shape, from each rank's slice."""

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """This rank's slice, 1-d, of the mean over all ranks of `x`."""

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        """This rank's slice, 1-d, of `x`."""

    def beside(self, x: Tensor) -> Tensor:
        """`x`, a 0-d value that is about to meet a slice."""

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        """`x`, 0-d, repeated over the shape of the slice `like`."""

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        """`op` ("sum", "avg", "max", "min") of `x` over the ranks along `axis`."""

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        """This rank's position along `axis`, a 0-d int64."""


_current: ContextVar[Primitives | None] = ContextVar("fzero_primitives", default=None)


@contextmanager
def using(on: Primitives) -> Iterator[None]:
    """Within, the named-axis collectives below mean the mesh of `on`; outside they see one rank."""
    token = _current.set(on)
    try:
        yield
    finally:
        _current.reset(token)


class _Move(torch.autograd.Function):
    """A linear function of its first argument; the others are constants, kept for the transpose."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest = inputs[1:]

    @classmethod
    def transposed(cls, ctx: Any, move: type[_Move], cotangent: Tensor) -> tuple[Any, ...]:
        return (move.apply(cotangent, *ctx.rest), *(None for _ in ctx.rest))


class Gather(_Move):
    """`(x, on, layout, leaf)`: sharded -> uniform."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.gather(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _Move.transposed(ctx, Scatter, cotangent)


class Scatter(_Move):
    """`(x, on, layout, leaf)`: any -> sharded, the mean over ranks."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.scatter(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _Move.transposed(ctx, Gather, cotangent)


class Take(_Move):
    """`(x, on, layout, leaf)`: uniform -> sharded, this rank's slice."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.take(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _Move.transposed(ctx, Gather, cotangent)


class Beside(_Move):
    """`(x, on)`: a uniform 0-d value beside a slice."""

    @staticmethod
    def forward(x: Tensor, on: Primitives) -> Tensor:
        return on.beside(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        (on,) = ctx.rest
        return Parts.apply(cotangent, on), None


class Parts(_Move):
    """`(x, on)`: what each rank has summed over its slice -> the uniform sum over all slices. Transpose of `Beside`."""

    @staticmethod
    def forward(x: Tensor, on: Primitives) -> Tensor:
        return on.all_reduce(x, "sum", on.mesh.shard_axis)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        (on,) = ctx.rest
        return Beside.apply(AllReduce.apply(cotangent, on, "avg", on.mesh.names), on), None


class AllReduce(_Move):
    """`(x, on, op, axes)` with op "sum" or "avg": per-rank -> uniform; its own transpose."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, op: str, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            x = on.all_reduce(x, op, axis)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _Move.transposed(ctx, AllReduce, cotangent)


class Whole(_Move):
    """`(x, on)`: a replicated leaf's value, whose cotangent waits to be averaged."""

    @staticmethod
    def forward(x: Tensor, on: Primitives) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        (on,) = ctx.rest
        return AllReduce.apply(cotangent, on, "avg", on.mesh.names), None


class Total(torch.autograd.Function):
    """`(x, on)`: the sum of a sharded value over all its elements, each counted once; 0-d."""

    @staticmethod
    def forward(x: Tensor, on: Primitives) -> Tensor:
        return on.all_reduce(x.sum(), "sum", on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.on = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        mean = AllReduce.apply(cotangent, ctx.on, "avg", ctx.on.mesh.names)
        return Spread.apply(mean, ctx.saved_tensors[0], ctx.on), None


class Spread(torch.autograd.Function):
    """`(x, like, on)`: a uniform 0-d value, repeated over a slice."""

    @staticmethod
    def forward(x: Tensor, like: Tensor, on: Primitives) -> Tensor:
        return on.spread(x, like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.on = inputs[2]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return Total.apply(cotangent, ctx.on), None, None


class Peak(torch.autograd.Function):
    """`(x, on, op)` with op "max" or "min": over all elements of a sharded value; 0-d. Ties share the cotangent."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, op: str) -> Tensor:
        padded = torch.cat([x.reshape(-1), x.new_full((1,), _identity(x.dtype, op))])  # a slice may be empty
        return on.all_reduce(padded.amax() if op == "max" else padded.amin(), op, on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.on, _ = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        x, peak = ctx.saved_tensors
        holds = (x == ctx.on.beside(peak)).to(cotangent.dtype)
        mean = AllReduce.apply(cotangent, ctx.on, "avg", ctx.on.mesh.names)
        return Spread.apply(mean / Total.apply(holds, ctx.on), x, ctx.on) * holds, None, None


def _identity(dtype: torch.dtype, op: str) -> float | int:
    """What leaves a "max" or "min" as it is."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


class Extreme(torch.autograd.Function):
    """`(x, on, op, axes)` with op "max": elementwise over ranks; ties share the cotangent."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, op: str, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            x = on.all_reduce(x, op, axis)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.rest = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        on, _, axes = ctx.rest
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(cotangent.dtype)
        ties = AllReduce.apply(holds, on, "sum", axes)
        return AllReduce.apply(cotangent, on, "sum", axes) * holds / ties, None, None, None


def psum(x: tree.Tree, axis: str) -> tree.Tree:
    """The sum over ranks along a mesh axis, leaf by leaf; the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [10, 20]: both get [11, 22].
    """
    return _reduced(AllReduce, x, "sum", axis)


def pmean(x: tree.Tree, axis: str) -> tree.Tree:
    """The mean over ranks along a mesh axis, leaf by leaf; the same on every rank. The identity outside `shard`.

    Ranks hold [1, 2] and [3, 6]: both get [2, 4].
    """
    return _reduced(AllReduce, x, "avg", axis)


def pmax(x: tree.Tree, axis: str) -> tree.Tree:
    """The elementwise maximum over ranks along a mesh axis, leaf by leaf. The identity outside `shard`.

    Ranks hold [1, 9] and [3, 6]: both get [3, 9].
    """
    return _reduced(Extreme, x, "max", axis)


def axis_index(axis: str, device: torch.device | str = "cpu") -> Tensor:
    """This rank's position along a mesh axis, a 0-d int64 tensor; 0 outside `shard`."""
    on = _current.get()
    device = torch.device(device)
    if on is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    on.mesh.size(axis)
    return on.axis_index(axis, device)


def _reduced(move: Any, x: tree.Tree, op: str, axis: str) -> tree.Tree:
    on = _current.get()
    if on is None:
        return x
    on.mesh.size(axis)  # an axis the mesh does not have is refused here
    return tree.map(lambda leaf: move.apply(leaf, on, op, (axis,)), x)
