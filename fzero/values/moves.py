"""Moves: differentiable changes between the kinds of value (sharded, uniform, per-rank), each with its transpose.

A *sharded* value is one global value of which a rank holds a slice. A *uniform* value is the same on every rank. A
*per-rank* value may differ between ranks.

`fzero.program.linear` says what cotangents are, and differentiates the linear moves. Those of one operation have their
transpose in its record (`fzero.program.ops`); the others are here.

    move                                        transpose
    gather   sharded -> uniform                 scatter
    scatter  any -> sharded                     gather       (scatter: mean over ranks, keep the slice)
    take     uniform -> sharded                 gather, times n  (take: keep the slice; n ranks have parts of the leaf)
    use      replicated -> uniform              mean
    mean     any -> uniform                     mean
    beside   uniform -> beside a slice          parts        (autograd sums over one slice, parts over all slices)
    parts    sums of slices -> uniform          beside of the mean
    total    sharded -> uniform                 spread of the mean
    spread   uniform -> sharded                 total
    peak     sharded -> uniform                 equal shares to the elements that equal the extreme
    psum, pmean   per-rank -> uniform           themselves
    pmax, pmin    per-rank -> uniform           equal shares to the ranks that hold the extreme

A linear move's tangent is the move of the tangent. An extreme's is the mean of those at the elements that equal it.

`torch.func.vmap` works over psum, pmean, pmax and pmin, elementwise. Every other move refuses a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.base.ambient import disable_autocast
from fzero.base.dtypes import accumulator
from fzero.program import ops
from fzero.program.linear import Composite, apply, refuse_batch
from fzero.program.records import record
from fzero.ranks import calls
from fzero.ranks.performer import MovePerformer


def copy_alias(x: Tensor, on: MovePerformer, operands: Sequence[Any]) -> Tensor:
    """`x`, copied outside of a trace where it lies in an operand's memory, or in its file, as `p.detach()` does: a step
    that updates one of the two in place would change the other. A trace has no memory yet, and `donate` knows its
    views."""
    return x if on.is_tracing else calls.copy_alias(x, operands)


@dataclass(frozen=True)
class Cut:
    """The leaf that a slice belongs to: its path, the axes along which ranks hold different elements, and the number of
    these on all ranks. With `is_part` what ranks have is no slice, but a part of a split leaf, gathered."""

    path: str = ""
    axes: str = ""
    numel: int = 0
    is_part: bool = False


def reduce(x: Tensor, on: MovePerformer, op: str, axis: str, **of: str) -> Tensor:
    """The reduction `op` of `x` over the ranks along an axis. No derivative."""
    return on.perform(record(ops.all_reduce), x, op, axis, **of)


def reduce_linear(x: Tensor, op: str, axis: str, on: MovePerformer) -> Tensor:
    """The sum or mean of `x` over the ranks along an axis, its own transpose."""
    return apply(record(ops.all_reduce), x, op, axis, on=on)


MEAN: Composite = Composite(
    "mean",
    lambda x, on, cut: reduce(x, on, "avg", on.mesh.join(on.mesh.names), leaf=cut.path),
    lambda cotangent, cut: apply(MEAN, cotangent, cut),
)
"""Any -> uniform: the mean over all ranks of the mesh, which a cotangent still needs."""

USE: Composite = Composite(  # of which only the cotangent communicates
    "use",
    lambda x, on, cut: x.view_as(x) if on.is_tracing else x.clone(),  # a step may write over the memory of the value
    lambda cotangent, cut: apply(MEAN, cotangent, cut),
)
"""Replicated -> uniform: the value of a leaf that every rank holds in full."""

BESIDE: Composite = Composite(
    "beside",
    lambda x, on, cut: on.perform(record(ops.beside), x),
    lambda cotangent, cut: apply(PARTS, cotangent, cut),
)
"""Uniform -> beside a slice: a 0-d value that becomes an operand beside a slice."""

PARTS: Composite = Composite(
    "parts",
    lambda x, on, cut: reduce(x, on, "sum", cut.axes),
    lambda cotangent, cut: apply(BESIDE, apply(MEAN, cotangent, cut), cut),
)
"""Sums of slices -> uniform: the sum over all slices, from the sum that each rank took over its own slice."""


def move(composite: Composite, x: Tensor, on: MovePerformer, cut: Cut) -> Tensor:
    """A move of a value that belongs to a leaf."""
    return apply(composite, x, cut, on=on)


# Moves whose derivatives need a slice as well: its shape (`Total`, `Spread`) or its elements (`Peak`, `Extreme`).


class _OfSlice(torch.autograd.Function):
    """A move of a value that belongs to a leaf, whose `Cut` is among the arguments. It refuses a batch of vmap."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor, *given: Any) -> Any:
        raise refuse_batch(next(x.path for x in given if isinstance(x, Cut)), cls.__name__.lower())


class Total(_OfSlice):
    """Sharded -> uniform: the sum of all elements of a value, each counted once; 0-d.

    A sum of float16 or bfloat16 is float32. The caller rounds it, once.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, cut: Cut) -> Tensor:
        wide = accumulator(x.dtype)
        return reduce(x.sum() if wide == x.dtype else x.sum(dtype=wide), on, "sum", cut.axes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.constants = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        mean = move(MEAN, cotangent, *ctx.constants)
        return Spread.apply(mean.to(x.dtype), x, *ctx.constants), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Total.apply(tangent, *ctx.constants)


def sum_all(x: Tensor, on: MovePerformer, cut: Cut) -> Tensor:
    """The sum of all elements of a leaf, from what this rank has of it, as `Total` takes it."""
    if not cut.is_part:
        return Total.apply(x, on, cut)
    wide = accumulator(x.dtype)
    return add_parts(x.sum() if wide == x.dtype else x.sum(dtype=wide), on, cut)


def add_parts(x: Tensor, on: MovePerformer, cut: Cut) -> Tensor:
    """The sum over what ranks have of a leaf, from the sum that each rank took over its own."""
    return reduce_linear(x, "sum", cut.axes, on) if cut.is_part else move(PARTS, x, on, cut)


class Spread(_OfSlice):
    """`(x, like, on, cut)`, uniform -> sharded: a 0-d value, repeated over the shape of the slice `like`."""

    @staticmethod
    def forward(x: Tensor, like: Tensor, on: MovePerformer, cut: Cut) -> Tensor:
        return on.perform(record(ops.spread), x, like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, like, *ctx.constants = inputs
        ctx.save_for_forward(like)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return Total.apply(cotangent, *ctx.constants).to(cotangent.dtype), None, None, None

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return Spread.apply(tangent, ctx.saved_tensors[0], *ctx.constants)


class Peak(_OfSlice):
    """`(x, on, cut, op)` with op "max" or "min", sharded -> uniform: the extreme of all elements of a value; 0-d.

    Elements that equal the extreme share the cotangent equally.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, cut: Cut, op: str) -> Tensor:
        with disable_autocast():  # which casts what `cat` joins
            padded = torch.cat([x.reshape(-1), x.new_full((1,), _identity(x.dtype, op))])  # a slice may be empty
        return reduce(padded.amax() if op == "max" else padded.amin(), on, op, cut.axes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.constants, _ = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        is_peak, count = Peak.find(ctx, cotangent.dtype)
        mean = move(MEAN, cotangent, *ctx.constants)
        share = (mean / count).to(cotangent.dtype)
        return Spread.apply(share, is_peak, *ctx.constants) * is_peak, None, None, None

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        is_peak, count = Peak.find(ctx, tangent.dtype)
        return (Total.apply(tangent * is_peak, *ctx.constants) / count).to(tangent.dtype)

    @staticmethod
    def find(ctx: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """1 for each element of the slice that equals the extreme, else 0; and the number of such elements, 0-d."""
        x, peak = ctx.saved_tensors
        is_peak = (x == move(BESIDE, peak, *ctx.constants)).to(dtype)
        return is_peak, Total.apply(is_peak, *ctx.constants)


def _identity(dtype: torch.dtype, op: str) -> float | int:
    """The value that does not change the result of `op`, "max" or "min"."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def find_peak(x: Tensor, on: MovePerformer, cut: Cut, op: str) -> Tensor:
    """The "max" or "min" of all elements of a leaf, from what this rank has of it, as `Peak` takes it."""
    if not cut.is_part:
        return Peak.apply(x, on, cut, op)
    return Extreme.apply(x.amax() if op == "max" else x.amin(), on, cut.axes, op)


class Extreme(torch.autograd.Function):
    """`(x, on, axis, op)` with op "max" or "min", per-rank -> uniform: the extreme, elementwise over the ranks along an
    axis.

    Ranks that hold the extreme of an element share its cotangent equally.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, axis: str, op: str) -> Tensor:
        return reduce(x, on, op, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.on, ctx.axis, _ = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return Extreme.sum(ctx, cotangent) * Extreme.share(ctx, cotangent.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Extreme.sum(ctx, tangent * Extreme.share(ctx, tangent.dtype))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *constants: Any) -> tuple[Tensor, int]:
        return Extreme.apply(x, *constants), in_dims[0]

    @staticmethod
    def sum(ctx: Any, x: Tensor) -> Tensor:
        return reduce_linear(x, "sum", ctx.axis, ctx.on)

    @staticmethod
    def share(ctx: Any, dtype: torch.dtype) -> Tensor:
        """This rank's share of each element's cotangent: 1 / (ranks that hold the extreme), or 0."""
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(dtype)
        return holds / Extreme.sum(ctx, holds)
