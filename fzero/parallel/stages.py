"""A pipeline: ranks have some of a model's equal layers, and microbatches go from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import FzeroError
from fzero.base.arguments import check_arguments


@check_arguments
def pipeline(
    body: Callable[..., Tensor],
    layers: Any,
    microbatches: Tensor,
    *,
    beside: Any = None,
    axis: str | tuple[str, ...] = "pp",
    repeats: int = 1,
    remat: bool = True,
) -> Tensor:
    """`body(layer, h)` of all layers in order, for each of M microbatches.

    * `layers` is a tree of stacked leaves [L, ...], split along dim 0: each rank has L / N layers, in rank order, which
      differ along the axis. With `repeats` the leaves are [repeats, L / repeats, ...], split along dim 1: microbatches
      go around so many times, and a rank has layers of each round.
    * `microbatches` [M, ...] are the same along the axis, and so is the result [M, ...]. A microbatch keeps its shape
      and dtype. Between ranks it differs, as each rank has another one.
    * `beside` is a tree of tensors [M, ...] that belong to microbatches, such as masks: the same along the axis. Layers
      are then `body(layer, h, those of the microbatch)`. They do not travel: each rank has all of them.
    * Compute what comes before and behind on all ranks, or in parts: `vocab_embedding` and `vocab_cross_entropy` along
      the same axis cut the work of a vocabulary.

    A `fzero.scan` over M x repeats + N - 1 ticks, of which N - 1 compute what nobody uses; in each a rank sends one
    microbatch. The backward pass is the loop's transpose. With `remat` it keeps the input of each tick and computes the
    rank's layers again, else it keeps what `body` does. One all-reduce of the results ends the loop.

    Raises:
        FzeroError: for unequal numbers of layers, rounds or tensors `beside`; for too few microbatches for rounds.
    """
    held = [leaf if repeats > 1 else leaf.unsqueeze(0) for leaf in map(_whole, fzero.tree.leaves(layers))]
    structure, world, count = fzero.tree.flatten(layers)[1], fzero.axis_size(axis), microbatches.shape[0]
    _check(held, repeats, count, world, beside)
    rank, ticks = fzero.axis_index(axis, microbatches.device), count * repeats + world - 1
    around = [(i, (i + 1) % world) for i in range(world)]

    def compute(stage: list[Tensor], h: Tensor, given: tuple[Any, ...]) -> Tensor:
        for leaves in zip(*(leaf.unbind() for leaf in stage)):
            h = body(fzero.tree.unflatten(structure, leaves), h, *given)
        return h

    def tick(carry: Any, x: tuple[Tensor, Tensor]) -> Any:
        (arrived, waiting, held, beside), (now, new) = carry, x
        item = (now - rank).clamp(0, count * repeats - 1)
        fresh = new if repeats == 1 else torch.where(item < count, new, _take(waiting, item % count))
        h = torch.where((rank == 0) | (now < rank), fresh, arrived)  # in a bubble a microbatch, whose numbers are sane
        stage = [leaf[0] if repeats == 1 else _take(leaf, item // count) for leaf in held]
        given = () if beside is None else (fzero.tree.map(lambda x: _take(x, item % count), beside),)
        h = (fzero.remat(compute) if remat else compute)(stage, h, given)
        arrived = fzero.ppermute(h, axis, around)
        if repeats > 1:  # what comes back to the first rank waits there for its next round
            back = now - (world - 1)
            is_slot = (torch.arange(count, device=back.device) == back % count) & (back >= 0)
            waiting = torch.where(is_slot.view(-1, *[1] * h.ndim), arrived, waiting)
        return (arrived, waiting, held, beside), h

    first = microbatches[0]
    start = torch.zeros_like(first), torch.zeros_like(microbatches) if repeats > 1 else (), held, beside
    news = torch.cat([microbatches, first.expand(ticks - count, *first.shape)])
    _, made = fzero.scan(tick, start, (torch.arange(ticks, device=first.device), news))
    return fzero.psum(torch.where(rank == world - 1, made[ticks - count :], 0), axis)


def _whole(leaf: Any) -> Tensor:
    return leaf.full_tensor() if isinstance(leaf, fzero.Sharded) else leaf


def _check(held: list[Tensor], repeats: int, count: int, world: int, beside: Any) -> None:
    shapes = {tuple(leaf.shape[:2]) for leaf in held}
    if len(shapes) != 1 or next(iter(shapes))[0] != repeats or count < (world if repeats > 1 else 1):
        problem = f"{count} microbatches on {world} ranks, {repeats} rounds, leaves of layers {sorted(shapes)}"
        raise FzeroError("pipeline", problem, "give leaves [rounds, layers, ...], and a microbatch for each rank")
    if counts := {len(x) for x in fzero.tree.leaves(beside)} - {count}:
        problem = f"has {min(counts)} tensors for {count} microbatches"
        raise FzeroError("pipeline: beside", problem, "give tensors [microbatches, ...]")


def _take(x: Tensor, at: Tensor) -> Tensor:
    return x.index_select(0, at.view(1))[0]
