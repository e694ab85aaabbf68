"""Linear: the derivative of every operation whose record has a transpose.

One convention makes `torch.func` transforms compose. The cotangent of a uniform or per-rank value is per-rank: its mean
over ranks has not been taken yet. The cotangent of a sharded value is the slice of that mean. So a scatter takes a mean
over ranks, and is the transpose of a gather.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.tangents import has_tangent
from fzero.base.torch_private import below_autograd
from fzero.layout.layout import Layout
from fzero.program.operation import Operation
from fzero.ranks.performer import MovePerformer, bind_axes, current_performer
from fzero.ranks.virtual import ALONE

UNPARTITION_FIRST = (
    "take the leaf whole before the transform, with fzero.unpartition, map and differentiate plain tensors, and "
    "average what depends on this rank's batch with fzero.pmean"
)
"""The way out in every error that refuses a batch."""

_MIXES = {
    name: f"the mean over ranks that the transpose of its {move} takes would mix the i-th example of each rank's batch"
    for name, move in {"scatter": "gather", "mean": "use"}.items()
}


def refuse_batch(path: str, move: str) -> FzeroError:
    """The error of a batch of vmap, of the leaf at `path`."""
    why = _MIXES.get(move, "a Sharded holds one slice of the leaf, not a batch of them")
    return FzeroError(path, f"vmap over its {move}: {why}", UNPARTITION_FIRST)


class Composite(NamedTuple):
    """A linear function that takes the place of an operation: `run(x, on, of)` of a value that belongs to the leaf with
    the path `of.path`, and its transpose `(cotangent, of)`."""

    name: str
    run: Callable[[Tensor, MovePerformer, Any], Tensor]
    transpose: Callable[[Tensor, Any], Tensor]


def apply(operation: Operation | Composite, x: Any, *args: Any, on: MovePerformer | None = None, **kwargs: Any) -> Any:
    """`operation(x, *args)`, differentiable by x. Performed by `on`, or else by the performer of the step."""
    return Linear.apply(x, on or current_performer(), SimpleNamespace(operation=operation, args=args, kwargs=kwargs))


def make_kernel(operation: Operation) -> Callable[..., Any]:
    """The autograd kernel of an operation of torch that has a record. It differentiates by the first argument.

    Raises:
        FzeroError: for an operation without a transpose, and where another argument is differentiated. torch's own
            refusals come later, and in other words under torch.func.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        where, is_linear = f"operation {operation.name!r}", operation.transpose is not None
        if any(map(_is_differentiated, (*args[is_linear:], *kwargs.values()))):
            problem = "has no derivative but by its first operand" if is_linear else "has no derivative"
            way_out = "detach its operands, or call it in the forward of a torch.autograd.Function that has a backward"
            raise FzeroError(where, problem, way_out)
        if not any(map(_is_differentiated, args)):
            with below_autograd():
                return operation.target(*args, **kwargs)
        try:
            return Linear.apply(args[0], None, SimpleNamespace(operation=operation, args=args[1:], kwargs=kwargs))
        except NotImplementedError as error:
            problem = "is differentiated by torch.func, which takes no operation that has a derivative of its own"
            raise FzeroError(where, problem, "differentiate by fzero.grad or fzero.value_and_grad") from error

    return call


def _is_differentiated(x: Any) -> bool:
    """Whether the transform that a kernel runs in, or autograd, differentiates by x."""
    if not isinstance(x, Tensor):
        return isinstance(x, (list, tuple)) and any(map(_is_differentiated, x))
    return (torch.is_grad_enabled() and x.requires_grad) or has_tangent(x)


def perform_here(operation: Operation) -> Callable[..., Any]:
    """The kernel of an operation outside of a step: one rank performs it."""
    return lambda *args, **kwargs: (current_performer() or ALONE).perform(operation, *args, **kwargs)


class Linear(torch.autograd.Function):
    """`(x, on, given)`: a linear function of x, `given.operation` with `given.args` and `given.kwargs`, whose transpose
    its record has. torch.func would open a tuple of these.

    * Without `on`, in the autograd kernel of the operation, torch's dispatcher goes on to what performs the operation.
    * `torch.func.vmap` works over operations that belong to no leaf: these are elementwise, or act along dim 0, and the
      dim of the batch becomes the last. A slice has no dimension for a batch, and the means over ranks of reverse mode
      would mix the i-th examples of different ranks.
    """

    @staticmethod
    def forward(x: Tensor, on: MovePerformer | None, given: Any) -> Tensor:
        operation = given.operation
        if on is None:
            with below_autograd():
                return operation.target(x, *given.args, **given.kwargs)
        if isinstance(operation, Composite):
            return operation.run(x, on, *given.args)
        return on.perform(operation, x, *given.args, **given.kwargs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.on, ctx.given = inputs
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)  # zeros that autograd makes for a slice are no slice to a program

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        if cotangent is not None:
            with bind_axes(ctx.on or current_performer()):
                cotangent = ctx.given.operation.transpose(cotangent, *ctx.given.args, **ctx.given.kwargs)
            if ctx.on is None and getattr(cotangent, "shape", None) != ctx.shape:
                gives = list(cotangent.shape) if isinstance(cotangent, Tensor) else f"a {type(cotangent).__name__}"
                problem = f"its transpose gives {gives}, where the first operand has the shape {list(ctx.shape)}"
                raise FzeroError(f"operation {ctx.given.operation.name!r}", problem, "give that operand's cotangent")
        return cotangent, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Linear.apply(tangent, ctx.on, ctx.given)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, on: MovePerformer, given: Any) -> Any:
        name, first, path = given.operation.name, given.args[0], ""
        if isinstance(given.operation, Composite):
            path = first.path
        elif isinstance(first, Layout):
            path = first.leaves[given.args[1]].path
        if path:
            raise refuse_batch(path, name)
        at = in_dims[0]
        if at == 0:  # operations that belong to no leaf are elementwise, or act along dim 0 and on its elements alone
            at, x = x.ndim - 1, x.movedim(0, -1)
        return Linear.apply(x, on, given), at
