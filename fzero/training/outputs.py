"""Outputs: what a program of a model returned as tensors with a gradient, for a loss that is computed outside of it.

torch differentiates the loss as far as the outputs. There a second program takes over: it runs the model again, with
the random numbers of the first, and multiplies the derivative of the outputs with torch's gradient of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.values.collectives import mean_over_data

_DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
"""The devices that a model may compute on."""


Cotangents = tuple[Tensor | None, ...]
"""The gradients of the floating tensors of an output. None where the loss does not depend on one."""


class Pulls(Protocol):
    """What takes the gradients of outputs. `pull` returns the gradients of the inputs that `attach` was given."""

    def pull(self, cotangents: Cotangents) -> Sequence[Tensor | None]: ...


def attach(call: Pulls, output: Any, inputs: Sequence[Tensor] = ()) -> Any:
    """`output` with a gradient that torch follows: a backward pass calls `call.pull` with the gradients of its floating
    tensors."""
    leaves, treedef = tree.flatten(output)
    at = list_floating(leaves)
    if not at:
        return output
    root = torch.empty(0, requires_grad=True)  # the outputs require a gradient because this tensor does
    attached = _Outputs.apply(call, tuple(leaves[i] for i in at), root, *inputs)
    replaced = dict(zip(at, attached))
    return tree.unflatten(treedef, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])


class _Outputs(torch.autograd.Function):
    """Outputs of a program. torch calls `backward` with the gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, call: Pulls, values: tuple[Tensor, ...], root: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(root)  # torch refuses a second backward pass without retain_graph
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  raises where the graph is freed
        return None, None, None, *ctx.call.pull(cotangents)


def weigh(output: Any, cotangents: Cotangents, virtual_ranks: int) -> Tensor:
    """In a program, a number whose gradients with respect to the floating tensors of `output` are `cotangents`: the sum
    of outputs times cotangents. `virtual_ranks` is how many ranks run in this process: their outputs come joined, as
    one batch.

    Raises:
        FzeroError: for an output that does not depend on the batch.
    """
    leaves, terms = tree.leaves(output), []
    for value, cotangent in zip((leaves[i] for i in list_floating(leaves)), cotangents, strict=True):
        if cotangent is None:
            continue
        if value.shape != cotangent.shape:
            problem = f"is {tuple(value.shape)} on each of {virtual_ranks} virtual ranks, and depends on no batch"
            raise FzeroError("output of the model", problem, "return what depends on the batch")
        # one number is a mean over ranks; other values are this rank's part of what virtual ranks return
        weight = cotangent * virtual_ranks if value.ndim else mean_over_data(cotangent)
        terms.append((value * weight.to(value.dtype)).sum())
    return sum(terms, start=torch.zeros((), device=terms[0].device))


def list_floating(leaves: list[Any]) -> list[int]:
    """The positions of floating tensors."""
    return [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]


class Numbers(NamedTuple):
    """A number that each rank computed: [ranks of this process]. A program would return one number for all ranks."""

    values: Tensor


def keep_numbers(output: Any) -> Any:
    """In a program, an output in which each floating number stays that of its rank."""

    def keep(x: Any) -> Any:
        is_number = isinstance(x, Tensor) and not x.ndim and x.is_floating_point()
        return Numbers(x.reshape(1)) if is_number else x

    return tree.map(keep, output)


def join_numbers(output: Any) -> Any:
    """The inverse of `keep_numbers`. A number is the mean over the ranks of this process."""
    leaves, treedef = tree.flatten(output, is_leaf=lambda x: isinstance(x, Numbers))
    return tree.unflatten(treedef, [x.values.mean() if isinstance(x, Numbers) else x for x in leaves])


class Surroundings(NamedTuple):
    """The random state and the autocast of a call, in which its forward pass runs again."""

    random: Tensor
    casts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def take(cls) -> Surroundings:
        """Those of now."""
        casts = ((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES)
        return cls(torch.get_rng_state(), tuple(casts))

    @contextmanager
    def restore(self) -> Iterator[None]:
        """A context with these surroundings."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for device, is_enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(device, dtype, is_enabled))
            torch.set_rng_state(self.random)
            yield
