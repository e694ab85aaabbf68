"""Moves: differentiable changes between the kinds of value (sharded, uniform, per-rank), each with its transpose.

A *sharded* value is one global value of which a rank holds a slice. A *uniform* value is the same on every rank. A
*per-rank* value may differ between ranks.

One convention makes `torch.func` transforms compose:

* The cotangent of a uniform or per-rank value is per-rank. Its mean over ranks has not been taken yet.
* The cotangent of a sharded value is the slice of that mean.

    move                                        transpose
    gather   sharded -> uniform                 scatter
    scatter  any -> sharded                     gather       (scatter: mean over ranks, keep the slice)
    take     uniform -> sharded                 gather       (take: keep the slice, no communication)
    use      replicated -> uniform              mean
    mean     any -> uniform                     mean
    beside   uniform -> beside a slice          parts        (autograd sums over one slice, parts over all slices)
    parts    sums of slices -> uniform          beside of the mean
    total    sharded -> uniform                 spread of the mean
    spread   uniform -> sharded                 total
    peak     sharded -> uniform                 equal shares to the elements that equal the extreme
    psum, pmean   per-rank -> uniform           themselves
    pmax          per-rank -> uniform           equal shares to the ranks that hold the maximum

A linear move's tangent is the move of the tangent. An extreme's is the mean of those at the elements that equal it.

`torch.func.vmap` works over psum, pmean and pmax, elementwise. Every other move refuses a batch: a slice has no
dimension for it, and the means over ranks of reverse mode would mix the i-th examples of different ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.base.ambient import disable_autocast
from fzero.base.dtypes import accumulator
from fzero.base.errors import FzeroError
from fzero.files import duplicate, is_alias
from fzero.layout.layout import Layout
from fzero.ranks.performer import MovePerformer

UNPARTITION_FIRST = (
    "take the leaf whole before the transform, with fzero.unpartition, map and differentiate plain tensors, and "
    "average what depends on this rank's batch with fzero.pmean"
)
"""The way out in every error that refuses a batch."""


def copy_alias(x: Tensor, on: MovePerformer, operands: Iterable[Any]) -> Tensor:
    """`x`, copied outside of a trace where it lies in an operand's memory, or in its file, as `p.detach()` does: a step
    that updates one of the two in place would change the other. A trace has no memory yet, and `donate` knows its
    views."""
    if on.is_tracing or not any(is_alias(x, each) for each in operands if isinstance(each, Tensor)):
        return x
    return duplicate(x)


# Linear moves: the class says the forward, `TRANSPOSES` below the backward.


class _Linear(torch.autograd.Function):
    """A linear function of its first argument. The other arguments are constants, which its transpose takes too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.constants = inputs
        ctx.set_materialize_grads(False)  # zeros that autograd makes for a slice are no slice to a program

    @classmethod
    def backward(cls, ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        for move in TRANSPOSES[cls] if cotangent is not None else ():
            cotangent = move.apply(cotangent, *ctx.constants)
        return cotangent, *(None for _ in ctx.constants)

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return cls.apply(tangent, *ctx.constants)


class _Move(_Linear):
    """A move `(x, on, path)` of a value that belongs to the leaf at `path`. It refuses a batch of vmap."""

    why = "a Sharded holds one slice of the leaf, not a batch of them"
    """The reason in the error that refuses a batch."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor, on: MovePerformer, *leaf: Any) -> NoReturn:
        raise FzeroError(cls.path(*leaf), f"vmap over its {cls.__name__.lower()}: {cls.why}", UNPARTITION_FIRST)

    @staticmethod
    def path(path: str) -> str:
        """The leaf's path, from the constants that follow `on`."""
        return path


class _LeafMove(_Move):
    """A move `(x, on, layout, leaf)` of a leaf of a layout."""

    @staticmethod
    def path(layout: Layout, leaf: int) -> str:  # type: ignore[override]
        return layout.leaves[leaf].path


class Gather(_LeafMove):
    """Sharded -> uniform: the full leaf."""

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, layout: Layout, leaf: int) -> Tensor:
        return on.gather(x, layout, leaf)


_MIXES = "the mean over ranks that {} takes would mix the i-th example of each rank's batch"


class Scatter(_LeafMove):
    """Any -> sharded: the slice of the mean over ranks."""

    why = _MIXES.format("the transpose of its gather")

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, layout: Layout, leaf: int) -> Tensor:
        return on.scatter(x, layout, leaf)


class Take(_LeafMove):
    """Uniform -> sharded: this rank's slice."""

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, layout: Layout, leaf: int) -> Tensor:
        return on.take(x, layout, leaf)


class Mean(_Move):
    """Any -> uniform: the mean over all ranks of the mesh, which a cotangent still needs."""

    why = _MIXES.format("the transpose of its use")

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str) -> Tensor:
        for axis in on.mesh.names:
            x = on.all_reduce(x, "avg", axis, path)
        return x


class UseReplicated(_Move):
    """Replicated -> uniform: the value of a leaf that every rank holds in full. Only the cotangent communicates."""

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str) -> Tensor:
        return x.view_as(x) if on.is_tracing else x.clone()  # a step may write over the memory of the value


class Beside(_Move):
    """Uniform -> beside a slice: a 0-d value that becomes an operand beside a slice."""

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str) -> Tensor:
        return on.beside(x)


class Parts(_Move):
    """Sums of slices -> uniform: the sum over all slices, from the sum that each rank took over its own slice."""

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str) -> Tensor:
        return on.all_reduce(x, "sum", on.mesh.shard_axis)


class AllReduce(_Linear):
    """`(x, on, op, axes)` with op "sum" or "avg", per-rank -> uniform: elementwise over ranks.

    Raises:
        FzeroError: for the mean of integers and for the sum of bools, which have another dtype than the operand.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, op: str, axes: tuple[str, ...]) -> Tensor:
        if x.dtype == torch.bool or (op == "avg" and not (x.is_floating_point() or x.is_complex())):
            name, to = ("pmean", "a floating dtype") if op == "avg" else ("psum", "torch.int64")
            problem = f"the result cannot have the dtype of the operand, {x.dtype}"
            raise FzeroError(name, problem, f"cast the operand to {to}")
        for axis in axes:
            x = on.all_reduce(x, op, axis)
        return x

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *constants: Any) -> tuple[Tensor, int]:
        return AllReduce.apply(x, *constants), in_dims[0]


TRANSPOSES: dict[type[_Linear], tuple[type[_Linear], ...]] = {
    Gather: (Scatter,),
    Scatter: (Gather,),
    Take: (Gather,),
    Mean: (Mean,),
    UseReplicated: (Mean,),
    Beside: (Parts,),
    Parts: (Mean, Beside),
    AllReduce: (AllReduce,),
}
"""Linear move -> the moves of its cotangent, the first one first. All of them take the constants of the move."""


# Moves whose derivatives need a slice as well: its shape (`Total`, `Spread`) or its elements (`Peak`, `Extreme`).


class Total(_Move):
    """Sharded -> uniform: the sum of all elements of a value, each counted once; 0-d.

    A sum of float16 or bfloat16 is float32. The caller rounds it, once.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str) -> Tensor:
        wide = accumulator(x.dtype)
        return on.all_reduce(x.sum() if wide == x.dtype else x.sum(dtype=wide), "sum", on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.constants = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        mean = Mean.apply(cotangent, *ctx.constants)
        return Spread.apply(mean.to(x.dtype), x, *ctx.constants), None, None


class Spread(_Move):
    """`(x, like, on, path)`, uniform -> sharded: a 0-d value, repeated over the shape of the slice `like`."""

    @staticmethod
    def forward(x: Tensor, like: Tensor, on: MovePerformer, path: str) -> Tensor:
        return on.spread(x, like)

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


class Peak(_Move):
    """`(x, on, path, op)` with op "max" or "min", sharded -> uniform: the extreme of all elements of a value; 0-d.

    Elements that equal the extreme share the cotangent equally.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, path: str, op: str) -> Tensor:
        with disable_autocast():  # which casts what `cat` joins
            padded = torch.cat([x.reshape(-1), x.new_full((1,), _identity(x.dtype, op))])  # a slice may be empty
        return on.all_reduce(padded.amax() if op == "max" else padded.amin(), op, on.mesh.shard_axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.constants, _ = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        is_peak, count = Peak.find(ctx, cotangent.dtype)
        mean = Mean.apply(cotangent, *ctx.constants)
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
        is_peak = (x == Beside.apply(peak, *ctx.constants)).to(dtype)
        return is_peak, Total.apply(is_peak, *ctx.constants)


def _identity(dtype: torch.dtype, op: str) -> float | int:
    """The value that does not change the result of `op`, "max" or "min"."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


class Extreme(torch.autograd.Function):
    """`(x, on, op, axes)` with op "max", per-rank -> uniform: elementwise over ranks.

    Ranks that hold the maximum of an element share its cotangent equally.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer, op: str, axes: tuple[str, ...]) -> Tensor:
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
        total = AllReduce.apply(cotangent, ctx.on, "sum", ctx.axes)
        return total * Extreme.share(ctx, cotangent.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return AllReduce.apply(tangent * Extreme.share(ctx, tangent.dtype), ctx.on, "sum", ctx.axes)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *constants: Any) -> tuple[Tensor, int]:
        return Extreme.apply(x, *constants), in_dims[0]

    @staticmethod
    def share(ctx: Any, dtype: torch.dtype) -> Tensor:
        """This rank's share of each element's cotangent: 1 / (ranks that hold the maximum), or 0."""
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(dtype)
        return holds / AllReduce.apply(holds, ctx.on, "sum", ctx.axes)
