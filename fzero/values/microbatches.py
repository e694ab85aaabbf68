"""Accumulation: the gradient of a batch, from its microbatches one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.dtypes import accumulator
from fzero.base.errors import FzeroError
from fzero.base.flags import Flag
from fzero.base.frozen import is_frozen
from fzero.base.symbols import is_open
from fzero.values.collectives import is_in_step, mean_over_data
from fzero.values.flags import note_flag
from fzero.values.functions import is_sharded
from fzero.values.gradients import take_pair, value_and_grad
from fzero.values.loops import take_turns


class NoWeight(Flag):
    """The weights of a batch are zero everywhere."""

    where = "accumulate: weight"
    problem = "is 0 over all microbatches and ranks, so there is no mean loss"
    way_out = "leave out a batch without examples that count, such as one whose labels are all ignored"


_SYNCS = (None, "once", "each")


@check_arguments
def accumulate(
    fn: Callable[..., tuple[Any, Any]], microbatches: int, *, sync: str | None = None, dtype: torch.dtype | None = None
) -> Callable[[tree.Tree, tree.Tree], tuple[Tensor, tree.Tree]]:
    """`g(params, batch) -> (loss, gradient)`, like `value_and_grad(loss)`, in `microbatches` turns.

    `fn(params, microbatch)` returns `(sum, weight)`: the sum of a loss over examples or tokens, and how many these are.
    The loss is the sum over all microbatches and ranks, divided by all of their weight. So it is the same for every
    division of a batch, also where microbatches or ranks have unequal numbers of tokens. Weigh an auxiliary loss like
    the others: add `coefficient * aux * weight` to the sum.

        def sums(params, batch):
            losses = cross_entropy(apply(params, batch["inputs"]), batch["labels"], reduction="sum")
            return losses, (batch["labels"] != -100).sum()
        loss, grads = fzero.accumulate(sums, microbatches=4)(params, batch)

    The tensors of `batch` have equal sizes along dim 0, and are cut there into equal parts. Other leaves and 0-d
    tensors go to every microbatch.

    `sync` says when gradients are averaged over ranks: "once" keeps full gradients and averages them at the end, "each"
    averages in every turn and keeps slices. By default stage 1 does the first, and stages 2 and 3 the second.

    Gradients add up in `dtype`, by default in float32 where a leaf is narrower and in the leaf's dtype otherwise. The
    result is rounded to the leaf's dtype once. The loss is float32, or float64 where a leaf is as wide. Outside of a
    sharded step there is one rank.

    Where all weights are zero the loss is nan and the gradient zero, so that nan does not reach the parameters, and the
    next call of the step raises. Outside of a step the call itself raises. In a `scan` nothing raises.

    Raises:
        FzeroError: for another `sync`; for a dtype that is not floating; for `microbatches` below 1; for leaves of
            the batch with unequal numbers of rows, or with rows that do not divide by `microbatches`, naming the leaf;
            for a function that does not return a pair; for a weight that is not one number, or a negative one; for
            weights that add up to 0; as `value_and_grad`.
    """
    if sync not in _SYNCS:
        raise FzeroError("accumulate: sync", f"is {sync!r}", 'give "once", "each" or None')
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise FzeroError("accumulate: dtype", f"is {dtype!r}", "give a floating one, or None")
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise FzeroError("accumulate: microbatches", f"is {microbatches!r}", "give a whole number of at least 1")

    def pair(params: tree.Tree, part: tree.Tree) -> tuple[Any, Any]:
        return take_pair("accumulate", fn(params, part), "(sum, weight)")

    def accumulated(params: tree.Tree, batch: tree.Tree) -> tuple[Tensor, tree.Tree]:
        leaves, treedef = tree.flatten(batch)
        cut = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not is_sharded(leaf) and leaf.ndim]
        paths = tree.paths(batch)
        _check_rows([paths[i] for i in cut], [leaves[i] for i in cut])
        rows = [_cut(paths[i], leaves[i], microbatches) for i in cut]

        def turn(carry: Any, parts: list[Tensor]) -> tuple[Any, None]:
            loss, weight, sums = carry
            part = list(leaves)
            for i, rows_of_part in zip(cut, parts):
                part[i] = rows_of_part
            (value, count), grads = value_and_grad(pair, has_aux=True)(params, tree.unflatten(treedef, part))
            return (loss + value.to(loss.dtype), weight + _to_weight(count, weight), _add(sums, grads)), None

        wide = _find_wide(params)
        start = torch.zeros((), dtype=wide[0], device=wide[1])
        zeros = tree.map(lambda leaf: _zeros(leaf, dtype), params)
        (loss, weight, sums), _ = take_turns(turn, (start, start.clone(), zeros), rows, microbatches, sync)
        weight = mean_over_data(weight)
        has_none = weight == 0
        note_flag(NoWeight(has_none.to(torch.float32)))
        return mean_over_data(loss) / weight, _divide(sums, torch.where(has_none, math.inf, weight), params)

    return accumulated


def _check_rows(paths: list[str], leaves: list[Tensor]) -> None:
    """Refuse a leaf with another number of rows than the first leaf: its rows are not those of the examples."""
    for path, leaf in zip(paths, leaves):
        if leaf.shape[0] != leaves[0].shape[0]:
            problem = f"has {leaf.shape[0]} rows, batch {paths[0]} has {leaves[0].shape[0]}"
            way_out = "give equal numbers of rows; what all microbatches share, capture in the function"
            raise FzeroError(f"accumulate: batch {path}".rstrip(), problem, way_out)


def _cut(path: str, leaf: Tensor, microbatches: int) -> Tensor:
    """[k, rows / k, ...]"""
    if leaf.shape[0] % microbatches:
        problem = f"has {leaf.shape[0]} rows, which do not divide into {microbatches} microbatches"
        raise FzeroError(f"accumulate: batch {path}".rstrip(), problem, f"give a multiple of {microbatches} rows")
    return leaf.unflatten(0, (microbatches, -1))


def _find_wide(params: tree.Tree) -> tuple[torch.dtype, torch.device]:
    """The dtype of the sum of losses and weights, and the device of the parameters."""
    leaves = tree.leaves(params)
    is_double = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    return torch.float64 if is_double else torch.float32, leaves[0].device if leaves else torch.device("cpu")


def _to_weight(count: Any, like: Tensor) -> Tensor:
    """A weight, as a 0-d tensor."""
    if isinstance(count, (int, float)) or is_open(count):
        if not count >= 0 or (count == 0 and is_in_step()):
            raise FzeroError("accumulate: weight", f"is {count}", "return how many examples the sum has")
        return torch.full_like(like, count)
    count = count.full_tensor() if is_sharded(count) else count
    if isinstance(count, (list, tuple, dict)):
        problem = f"returned a {type(count).__name__} beside the sum, as value_and_grad does with its gradients"
        way_out = "give the function of the loss itself, and return (sum, weight): accumulate takes its gradient"
        raise FzeroError("accumulate", f"the function {problem}", way_out)
    if not isinstance(count, Tensor) or count.ndim or count.is_complex():
        got = f"{count.dtype} {tuple(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
        raise FzeroError("accumulate: weight", f"is {got}, not one number", "return how many examples the sum has")
    return count.to(like.dtype)


def _zeros(leaf: Any, dtype: torch.dtype | None) -> Any:
    return None if is_frozen(leaf) else torch.zeros_like(leaf, dtype=_sum_dtype(leaf, dtype))


def _sum_dtype(leaf: Any, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return accumulator(leaf.dtype)
    return dtype.to_complex() if leaf.dtype.is_complex else dtype


def _add(sums: tree.Tree, grads: tree.Tree) -> tree.Tree:
    """The sums of all leaves, in one list operation."""
    leaves, treedef = tree.flatten(sums)
    added = [grad.to(leaf.dtype) for leaf, grad in zip(leaves, tree.leaves(grads))]
    return tree.unflatten(treedef, torch._foreach_add(leaves, added)) if leaves else sums


def _divide(sums: tree.Tree, weight: Tensor, params: tree.Tree) -> tree.Tree:
    """The gradient, each leaf in its parameter's dtype."""
    leaves, treedef = tree.flatten(sums)
    likes = tree.leaves(tree.split_as(params, sums)[0])
    divided = torch._foreach_div(leaves, weight) if leaves else []
    return tree.unflatten(treedef, [leaf.to(like.dtype) for leaf, like in zip(divided, likes)])
