"""Differentiable moves between the kinds of value (sharded, uniform, per-rank), each with its transpose.

One convention makes `torch.func` compose: *the cotangent of a uniform or per-rank value is per-rank and waits to be
averaged over ranks; the cotangent of a sharded value is the slice of that average.*

    move                            transpose
    gather   sharded -> uniform     scatter
    scatter  any -> sharded         gather      (mean over ranks, keep the slice)
    take     uniform -> sharded     gather      (keep the slice: no communication)
    whole    replicated -> uniform  mean
    mean     any -> uniform         mean
    beside   uniform -> beside it   parts       (autograd sums over the slice; the other ranks' slices count too)
    parts    sums of slices -> uniform  beside  (of the mean)
    total    sharded -> uniform     spread      (of the mean)
    spread   uniform -> sharded     total
    peak     sharded -> uniform     to the elements that hold it, in equal parts
    psum, pmean  per-rank -> uniform    themselves
    pmax     per-rank -> uniform    to the ranks that hold the maximum, in equal parts

Along a tangent a linear move is itself; an extreme is the mean of the tangents where it is held.

Only psum, pmean and pmax take a batch of `torch.func.vmap`, elementwise. The others refuse one: where a value leaves
its slices, reverse mode takes a mean over ranks, which would mix the i-th example of one rank with the i-th of another;
and a slice has no room for a batch.

What performs a move is a `Primitives`: the tracer writes it down, a live mesh communicates at once.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout


class Primitives(Protocol):
    """Performs moves for one rank of a mesh."""

    mesh: VirtualMesh
    is_tracing: bool  # whether moves are written down, not performed

    @property
    def rank(self) -> int | None:
        """The position along the mesh's shard axis; None stands for all ranks together."""

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


WHOLE_FIRST = (
    "take the leaf whole before the transform, with fzero.unpartition, map and differentiate plain tensors, and "
    "average what depends on this rank's batch with fzero.pmean"
)
"""The way out of every refusal of a batch."""


class _Linear(torch.autograd.Function):
    """A linear function of its first argument; the others are constants, kept for the transpose."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.rest = inputs

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return cls.apply(tangent, *ctx.rest)


def _transposed(ctx: Any, move: Any, cotangent: Tensor) -> tuple[Any, ...]:
    """What `backward` returns where `move` with the same constants is the transpose."""
    return (move.apply(cotangent, *ctx.rest), *(None for _ in ctx.rest))


class _Move(_Linear):
    """`(x, on, path)`, linear where it does not say otherwise: what becomes of a value of the leaf at `path`."""

    why = "a Sharded holds one slice of the leaf, not a batch of them"
    """Of the refusal of a batch."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor, on: Primitives, *leaf: Any) -> NoReturn:
        raise FzeroError(cls.path(*leaf), f"vmap over its {cls.__name__.lower()}: {cls.why}", WHOLE_FIRST)

    @staticmethod
    def path(path: str) -> str:
        """Of the leaf, from the constants behind `on`."""
        return path


class _LeafMove(_Move):
    """`(x, on, layout, leaf)`: likewise of a leaf of a layout."""

    @staticmethod
    def path(layout: Layout, leaf: int) -> str:  # type: ignore[override]
        return layout.leaves[leaf].path


class Gather(_LeafMove):
    """Sharded -> uniform."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.gather(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Scatter, cotangent)


_MIXES = "the mean over ranks that {} takes would mix the i-th example of each rank's batch"


class Scatter(_LeafMove):
    """Any -> sharded, the mean over ranks."""

    why = _MIXES.format("the transpose of its gather")

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.scatter(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Gather, cotangent)


class Take(_LeafMove):
    """Uniform -> sharded, this rank's slice."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, layout: Layout, leaf: int) -> Tensor:
        return on.take(x, layout, leaf)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Gather, cotangent)


class Mean(_Move):
    """Any -> uniform, the mean over ranks that a cotangent waits for."""

    why = _MIXES.format("the transpose of its use")

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str) -> Tensor:
        for axis in on.mesh.names:
            x = on.all_reduce(x, "avg", axis)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Mean, cotangent)


class Whole(_Move):
    """A replicated leaf's value, whose cotangent waits to be averaged."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Mean, cotangent)


class Beside(_Move):
    """A uniform 0-d value beside a slice."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str) -> Tensor:
        return on.beside(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Parts, cotangent)


class Parts(_Move):
    """What each rank has summed over its slice -> the uniform sum over all slices. Transpose of `Beside`."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str) -> Tensor:
        return on.all_reduce(x, "sum", on.mesh.shard_axis)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, Beside, Mean.apply(cotangent, *ctx.rest))


class Total(_Move):
    """The sum of a sharded value over all its elements, each counted once; 0-d."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str) -> Tensor:
        return on.all_reduce(x.sum(), "sum", on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.rest = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        mean = Mean.apply(cotangent, *ctx.rest)
        return Spread.apply(mean, ctx.saved_tensors[0], *ctx.rest), None, None


class Spread(_Move):
    """`(x, like, on, path)`: a uniform 0-d value, repeated over the slice `like`."""

    @staticmethod
    def forward(x: Tensor, like: Tensor, on: Primitives, path: str) -> Tensor:
        return on.spread(x, like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, like, *ctx.rest = inputs
        ctx.save_for_forward(like)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return Total.apply(cotangent, *ctx.rest), None, None, None

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return Spread.apply(tangent, ctx.saved_tensors[0], *ctx.rest)


class Peak(_Move):
    """`(x, on, path, op)` with op "max" or "min": of all elements of a sharded value; 0-d. Ties share the cotangent."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, path: str, op: str) -> Tensor:
        padded = torch.cat([x.reshape(-1), x.new_full((1,), _identity(x.dtype, op))])  # a slice may be empty
        return on.all_reduce(padded.amax() if op == "max" else padded.amin(), op, on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.rest, _ = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        holds, count = Peak.held(ctx, cotangent.dtype)
        mean = Mean.apply(cotangent, *ctx.rest)
        return Spread.apply(mean / count, holds, *ctx.rest) * holds, None, None, None

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        holds, count = Peak.held(ctx, tangent.dtype)
        return Total.apply(tangent * holds, *ctx.rest) / count

    @staticmethod
    def held(ctx: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Which elements of the slice hold the extreme, as numbers; and how many of all slices do."""
        x, peak = ctx.saved_tensors
        holds = (x == Beside.apply(peak, *ctx.rest)).to(dtype)
        return holds, Total.apply(holds, *ctx.rest)


def _identity(dtype: torch.dtype, op: str) -> float | int:
    """What leaves a "max" or "min" as it is."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


class AllReduce(_Linear):
    """`(x, on, op, axes)` with op "sum" or "avg": elementwise over ranks, per-rank -> uniform; its own transpose."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, op: str, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            x = on.all_reduce(x, op, axis)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return _transposed(ctx, AllReduce, cotangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return AllReduce.apply(x, *rest), in_dims[0]


class Extreme(torch.autograd.Function):
    """`(x, on, op, axes)` with op "max": elementwise over ranks; ties share the cotangent."""

    @staticmethod
    def forward(x: Tensor, on: Primitives, op: str, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            x = on.all_reduce(x, op, axis)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.on, _, ctx.axes = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return (
            AllReduce.apply(cotangent, ctx.on, "sum", ctx.axes) * Extreme.share(ctx, cotangent.dtype),
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return AllReduce.apply(tangent * Extreme.share(ctx, tangent.dtype), ctx.on, "sum", ctx.axes)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return Extreme.apply(x, *rest), in_dims[0]

    @staticmethod
    def share(ctx: Any, dtype: torch.dtype) -> Tensor:
        """What this rank's elements have in the extreme."""
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(dtype)
        return holds / AllReduce.apply(holds, ctx.on, "sum", ctx.axes)
