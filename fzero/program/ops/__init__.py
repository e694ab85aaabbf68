"""The operations of a program that are not aten's. They name a communication; a runtime performs it.

They exist so that `make_fx` writes them down and passes rewrite them; none has a kernel. `bucket` is a key of the
program's table of layouts, `leaf` an index into that layout.

Traced, a leaf at a time:

    gather      sharded -> uniform   this leaf, whole
    scatter     any -> sharded       this rank's slice of the mean over ranks
    take        uniform -> sharded   this rank's slice, a view: no communication
    beside      uniform -> uniform   the identity, on a 0-d value that is about to meet a slice
    spread      uniform -> sharded   a 0-d value, repeated over a slice
    all_reduce  any -> uniform       "sum", "avg", "max" or "min" over a mesh axis
    axis_index  -> per-rank          this rank's position along a mesh axis, a 0-d int64
    draw        any -> per-rank      what a random operation of aten draws, by its number

Made by passes, a bucket at a time; plain functions of which only the name and the result for fake tensors matter:

    all_gather, wait, whole          slices of some leaves -> their buffer -> one leaf, a view of it
    reduce_scatter, wait, part       leaves in full -> this rank's block of their mean -> one leaf's slice, a view of it
    all_reduce_list                  `all_reduce` of several values at once
    adamw, adamw_                    an AdamW step of many leaves in one call; the second in place
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Node = Any
"""A `torch.fx.Node`, whose arguments are typed as a union of twenty types that no call site can tell apart."""

F = TypeVar("F", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
FAKES: dict[Any, Callable[..., Any]] = {}
"""Operation -> what it returns for fake tensors, views as views: the `meta["val"]` of a node that a pass makes."""


def _traced(schema: str, fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
    operation = getattr(torch.ops.fzero, name).default
    FAKES[operation] = fake
    return operation


def _made(operation: F) -> F:
    FAKES[operation] = operation
    return operation


gather = _traced(
    "gather(Tensor x, str bucket, int leaf, int[] shape) -> Tensor",
    lambda x, bucket, leaf, shape: x.new_empty(shape),
)
scatter = _traced(
    "scatter(Tensor x, str bucket, int leaf, int numel) -> Tensor",
    lambda x, bucket, leaf, numel: x.new_empty(numel),
)
take = _traced(
    "take(Tensor x, str bucket, int leaf, int numel) -> Tensor",
    lambda x, bucket, leaf, numel: x.reshape(-1)[:numel],
)
beside = _traced("beside(Tensor x) -> Tensor", lambda x: torch.empty_like(x))
spread = _traced(
    "spread(Tensor x, Tensor like) -> Tensor",
    lambda x, like: torch.empty_like(like, dtype=x.dtype),
)
all_reduce = _traced("all_reduce(Tensor x, str op, str axis) -> Tensor", lambda x, op, axis: torch.empty_like(x))
axis_index = _traced(
    "axis_index(str axis, Device device) -> Tensor",
    lambda axis, device: torch.empty((), dtype=torch.int64, device=device),
)


@_made
def draw(number: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`target(*args, **kwargs)`, a random operation of aten, which draws the same for each call with one number in one
    step on one rank. Nothing else uses a value that it writes into."""
    return target(*args, **kwargs)


@_made
def all_gather(
    slices: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Start gathering these leaves of a bucket, cast to `dtype` where one is given: a buffer of `numel` elements, to
    wait for."""
    return slices[0].new_empty(numel, dtype=dtype)


@_made
def reduce_scatter(fulls: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int) -> Tensor:
    """Start scattering the mean of these leaves: this rank's block of `numel` elements, to wait for."""
    return fulls[0].new_empty(numel)


@_made
def wait(pending: Tensor) -> Tensor:
    """What was started, done."""
    return pending


@_made
def whole(buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position` of `leaves`, in its shape."""
    return buffer[: torch.Size(shape).numel()].view(shape)


@_made
def part(block: Tensor, bucket: str, leaves: Sequence[int], position: int, numel: int) -> Tensor:
    """This rank's slice of the leaf at `position` of `leaves`."""
    return block[:numel]


@_made
def all_reduce_list(values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
    """`all_reduce` of each value."""
    return [torch.empty_like(value) for value in values]


Lists = Sequence[Tensor]


@_made
def adamw(
    params: Lists, grads: Lists, mu: Lists, nu: Lists, count: Tensor, rate: Any, *hyperparameters: float
) -> tuple[list[Tensor], ...]:
    """New parameters, first and second moments. `hyperparameters` are b1, b2, eps and the weight decay."""
    return tuple([torch.empty_like(x) for x in column] for column in (params, mu, nu))


@_made
def adamw_(
    params: Lists, grads: Lists, mu: Lists, nu: Lists, count: Tensor, rate: Any, *hyperparameters: float
) -> None:
    """`adamw` that writes into the lists that it is given."""


def is_call(node: Node, *targets: Any) -> bool:
    """Whether a node calls one of these."""
    return node.op == "call_function" and node.target in targets


def cast_of(node: Node) -> torch.dtype | None:
    """What an `all_gather` casts slices to, None where it does not."""
    return node.kwargs.get("dtype")


def is_random(node: Node) -> bool:
    """Whether a node calls an operation of aten that draws from a generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = {argument.name: _given(node, i, argument) for i, argument in enumerate(node.target._schema.arguments)}
    return given.get("dropout_p") != 0  # that of attention


def shares_memory(node: Node) -> bool:
    """Whether a node's result is a view of what it is given, or an item of it, or that itself, overwritten."""
    if node.target in (operator.getitem, take, wait, whole, part, torch.ops.aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def overwritten(node: Node) -> list[Node]:
    """The arguments of a node whose memory it writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [x for position in (0, 2, 3) for x in node.args[position]] if node.target is adamw_ else []
    given = (_given(node, i, argument) for i, argument in enumerate(schema.arguments) if _is_written(argument))
    return [x for arg in given for x in (arg if isinstance(arg, (list, tuple)) else [arg]) if x is not None]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _given(node: Node, position: int, argument: Any) -> Any:
    """What a node gives for an argument of its operation's schema."""
    default = node.args[position] if position < len(node.args) else argument.default_value
    return node.kwargs.get(argument.name, default)


def storage(node: Node) -> Any:
    """What stands for the memory of a node's value, equal for its views; the node itself where it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


def name_of(node: Node) -> str:
    """The name of what a node calls, without its overload: "mm", "all_gather"; of a draw what it draws with,
    "bernoulli"; of its target where it calls nothing."""
    target = node.args[1] if is_call(node, draw) else node.target
    return getattr(target, "__name__", str(target)).partition(".")[0]
