"""Styles: what a rule of a tensor or expert plan of transformers means for a module: for its leaves, and its forward.

Each rank along the axis runs the module's own forward with its parts. Around the forward a style does one of five
things, with public collectives: nothing, the sum over ranks, a gather of the last dim, the rank's own block of a value,
or a mask of what other ranks compute. transformers has further styles that correct gradients alone. These do nothing
here: the gradient of a leaf is a mean over ranks by one law, whatever the forward is (docs/axes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fzero import all_gather, all_to_all, axis_index, axis_size, psum, psum_scatter
from fzero.base.mesh import JOINT
from fzero.parallel.routing import experts
from fzero.parallel.vocabulary import find_local

Cut = tuple[int, int]
"""The dim of a leaf that is cut, and into how many parts, each of which is cut over the ranks by itself."""
Axis = str | tuple[str, ...]
Effect = Callable[..., Any]
"""`effect(module, axis, forward, *args, **kwargs)` returns the output on each rank."""


def list_names(axis: Axis) -> tuple[str, ...]:
    """The names of mesh axes, one or several, as the user gave them."""
    return tuple(name for each in ((axis,) if isinstance(axis, str) else axis) for name in each.split(JOINT))


class Style(NamedTuple):
    """What a rule means. `cut(module, name, leaf)` says which dim of a leaf ranks have parts of, None for none."""

    cut: Callable[[nn.Module, str, Tensor], Cut | None]
    effect: Effect | None = None
    is_whole: bool = False  # whether input and output are the same on all ranks, so that the style may be left out
    sends: bool = False  # whether ranks have different tokens, which go to other ranks


def _cut_nothing(module: nn.Module, name: str, leaf: Tensor) -> Cut | None:
    return None


def _cut_first(module: nn.Module, name: str, leaf: Tensor) -> Cut | None:
    """The dim of experts, or of the words of an embedding."""
    return 0, 1


def _cut_outputs(parts: int) -> Callable[[nn.Module, str, Tensor], Cut | None]:
    """The dim of outputs: the rows of a linear layer's weight and its bias, the columns of other modules' tables."""

    def cut(module: nn.Module, name: str, leaf: Tensor) -> Cut | None:
        is_last = leaf.ndim == 1 or is_transposed(module)
        return leaf.ndim - (1 if is_last else 2), max(parts, _count_parts(module, name))

    return cut


def _cut_inputs(parts: int) -> Callable[[nn.Module, str, Tensor], Cut | None]:
    """The dim of inputs. A bias is whole."""

    def cut(module: nn.Module, name: str, leaf: Tensor) -> Cut | None:
        if leaf.ndim == 1:
            return None
        return leaf.ndim - (2 if is_transposed(module) else 1), max(parts, _count_parts(module, name))

    return cut


def _count_parts(module: nn.Module, name: str) -> int:
    """2 for gate and up of experts that transformers knows to lie behind each other, whatever the plan says."""
    return 2 if name.startswith("gate_up_proj") and getattr(module, "is_concatenated", False) else 1


def is_transposed(module: nn.Module) -> bool:
    """Whether the last dim of a module's weight is that of its outputs: embeddings, and Conv1D of GPT-2."""
    return isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"


# what a forward does

_noted: ContextVar[list[tuple[Tensor, Axis, Callable[[int], Tensor]]]] = ContextVar("noted")


def note(whole: Tensor, axis: Axis, take: Callable[[int], Tensor]) -> Tensor:
    """`whole`, which is the same along an axis; `take(dim)` computes a rank's own block of it from what ranks have."""
    noted = _noted.get(None)
    if noted is not None:
        noted[:] = [(whole, axis, take)]
    return whole


@contextmanager
def noting() -> Iterator[Callable[[Tensor, Axis, int], Tensor]]:
    """A context, and a function that takes the rank's own block, along a dim, of a value that was computed in it. Of
    the last sum or gather it does so without the whole, which nothing reads then."""
    noted: list[tuple[Tensor, Axis, Callable[[int], Tensor]]] = []
    token = _noted.set(noted)

    def take(x: Tensor, axis: Axis, dim: int) -> Tensor:
        for whole, along, each in noted:
            if whole is x and along == axis:
                return each(dim)
        return take_block(x, axis, dim)

    try:
        yield take
    finally:
        _noted.reset(token)


def keep_columns(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The rank's own outputs. Conv1D of GPT-2 has their number in an attribute."""
    with set_attributes(module, nf=getattr(module, "nf", 0) // axis_size(axis)):
        return forward(*args, **kwargs)


def add_up(module: Any, axis: Axis, forward: Callable[..., Any], x: Tensor) -> Any:
    """The sum over ranks of what each computes of its columns of the input. A bias, which is whole, counts once.

    A rank takes its columns of an input that has all of them, and so is the same on all ranks.
    """
    ranks = axis_size(axis)
    if ranks == 1:
        return forward(x)
    columns = module.weight.shape[0 if is_transposed(module) else -1]
    x = x if x.shape[-1] == columns else take_block(x, axis)
    bias = getattr(module, "bias", None)
    if bias is not None and type(module).forward is nn.Linear.forward:
        own = nn.functional.linear(x, module.weight)
        return note(psum(own, axis) + bias, axis, lambda dim: psum_scatter(own, axis, dim) + bias)
    own = forward(x) if bias is None else forward(x) - bias * (1 - 1 / ranks)
    return note(psum(own, axis), axis, lambda dim: psum_scatter(own, axis, dim))


def add_up_whole(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The sum over ranks of what a module without leaves of its own computes on each."""
    made = forward(*args, **kwargs)
    return None if made is None else psum(made, axis)


def add_up_experts(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The sum over ranks of what each computes of every expert. The last bias, which is whole, counts once."""
    bias = getattr(module, "down_proj_bias", None)
    if bias is None or axis_size(axis) == 1:
        return add_up_whole(module, axis, forward, *args, **kwargs)
    with set_attributes(module, forward=forward):
        return psum(functional_call(module, {"down_proj_bias": bias / axis_size(axis)}, args, kwargs), axis)


def take_block(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """This rank's block along a dim of a value that is the same on all ranks."""
    ranks, dim = axis_size(axis), dim % x.ndim
    if ranks == 1:
        return x
    blocks = x.unflatten(dim, (ranks, x.shape[dim] // ranks))
    return blocks.index_select(dim, axis_index(axis, x.device).reshape(1)).squeeze(dim)


def gather(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of all ranks, joined along the last dim."""
    own = forward(*args, **kwargs)
    blocks = all_gather(own.unsqueeze(0), axis, 0)
    whole = blocks.movedim(0, -2).flatten(-2)  # copies runs: a gather along the last dim would copy single elements
    return note(whole, axis, lambda dim: all_to_all(own, axis, dim, own.ndim - 1))


def scatter(module: Any, axis: Axis, forward: Callable[..., Any], x: Tensor) -> Any:
    """The rank's own block of the sum over ranks of what each computes."""
    made = psum_scatter(nn.functional.linear(x, module.weight), axis, -1)
    return made if module.bias is None else made + take_block(module.bias, axis)


def keep_block(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The rank's own block of an output that is the same on all ranks."""
    return take_block(forward(*args, **kwargs), axis)


def look_up(module: Any, axis: Axis, forward: Callable[..., Any], input: Tensor) -> Any:
    """The rows of an embedding of which each rank has a part: zeros for those of other ranks, and the sum.

    The padding row has no gradient, as in torch. A token outside of all rows is nowhere, which torch refuses.
    """
    if axis_size(axis) == 1:
        return forward(input)
    local, is_own = find_local(input, module.weight, axis)
    padding = getattr(module, "padding_idx", None)
    with set_attributes(module, padding_idx=None):
        found = forward(local)
    if padding is not None:
        found = torch.where((input == padding).unsqueeze(-1), found.detach(), found)
    own = found.masked_fill(is_own.logical_not().unsqueeze(-1), 0)
    return note(psum(own, axis), axis, lambda dim: psum_scatter(own, axis, dim))


def share(module: Any, axis: Axis, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The rank's share of a value that a sum over ranks takes in."""
    return forward(x / axis_size(axis), *args, **kwargs)


def dispatch(module: Any, axis: Axis, forward: Callable[..., Any], x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """The sum over ranks of what each rank's experts add for all tokens, which are the same on all ranks.

    Experts of other ranks have the number behind the last own one, and the weight 0, as in transformers.
    """
    if axis_size(axis) == 1:
        return forward(x, index, weights)
    own = module.num_experts // axis_size(axis)
    is_other = index // own != axis_index(axis, index.device)
    given = torch.where(is_other, own, index % own), weights.masked_fill(is_other, 0)
    with set_attributes(module, num_experts=own, _is_expert_parallel=True):
        return psum(forward(x, *given), axis)


def send_tokens(capacity: float | None) -> Effect:
    """The effect of experts whose ranks have different tokens: tokens go to the ranks of their experts and come back.

    A rank computes the rows that came, in order of its experts, by the module's own forward with weights of 1. Rows
    that are not filled have the number behind the last own expert, and the weight 0, as those of other ranks have in
    transformers. The weights of the router count where the tokens came from.
    """

    def run(module: Any, axis: Axis, forward: Callable[..., Any], x: Tensor, index: Tensor, weights: Tensor) -> Any:
        if axis_size(axis) == 1:
            return forward(x, index, weights)
        own = module.num_experts // axis_size(axis)

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            places = torch.arange(len(rows), device=rows.device)
            owner = torch.searchsorted(counts.cumsum(0), places, right=True).unsqueeze(-1)
            with set_attributes(module, num_experts=own, _is_expert_parallel=True):
                return forward(rows, owner, (owner < own).to(weights.dtype))

        made = experts(compute, x, index, weights, number=module.num_experts, axis=axis, capacity=capacity)
        assert isinstance(made, Tensor)
        return made.to(x.dtype)

    return run


def divide(names: tuple[str, ...]) -> Effect:
    """Numbers that a module keeps of its whole, such as of heads, are those of the rank's part."""

    def run(module: Any, axis: Axis, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with set_attributes(module, **{name: getattr(module, name) // axis_size(axis) for name in names}):
            return forward(*args, **kwargs)

    return run


@contextmanager
def set_attributes(module: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module within this context."""
    before = {name: getattr(module, name) for name in values if hasattr(module, name)}
    for name in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


STYLES = {
    "colwise": Style(_cut_outputs(1), keep_columns),
    "colwise_gather_output": Style(_cut_outputs(1), gather, is_whole=True),
    "colwise_rep": Style(_cut_outputs(1), gather, is_whole=True),
    "packed_colwise": Style(_cut_outputs(2), keep_columns),
    "rowwise": Style(_cut_inputs(1), add_up),
    "rowwise_split_input": Style(_cut_inputs(1), add_up, is_whole=True),
    "rowwise_rep": Style(_cut_inputs(1), add_up, is_whole=True),
    "rowwise_own_block": Style(_cut_inputs(1), scatter),
    "packed_rowwise": Style(_cut_inputs(2)),
    "embedding_rowwise": Style(_cut_first, look_up, is_whole=True),
    "embedding_colwise": Style(_cut_outputs(1), gather, is_whole=True),
    "all_reduce": Style(_cut_nothing, add_up_whole),
    "moe_tp_experts": Style(_cut_nothing, add_up_experts),
    "moe_identity_expert": Style(_cut_nothing, share),
    "grouped_gemm": Style(_cut_first),
    "ep_dispatch_experts": Style(_cut_nothing, dispatch),
    "own_block": Style(_cut_nothing, keep_block),
    "replicate": Style(_cut_nothing, is_whole=True),
    "local_params": Style(_cut_nothing),
    "replicated_with_grad_allreduce": Style(_cut_nothing),
    "mla_kv_a_proj": Style(_cut_nothing),
}
"""The styles of transformers by name. Ours are "own_block", "rowwise_own_block", "packed_colwise N" for N parts, and
"divide NAMES" for attributes of a module, which become those of a rank's part."""


def find_style(name: str) -> Style | None:
    """The style of a name; None for an unknown one."""
    word, *words = name.split()
    if word == "divide" and words:
        return Style(_cut_nothing, divide(tuple(words)))
    if word == "packed_colwise" and len(words) == 1 and words[0].isdigit():
        return Style(_cut_outputs(int(words[0])), keep_columns)
    return STYLES.get(name)
