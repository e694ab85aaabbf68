"""Experts that ranks have some of: tokens go to the ranks of the experts that a router chose, and come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

import fzero
from fzero import FzeroError
from fzero.base.arguments import check_arguments
from fzero.values.ragged import ragged_all_to_all


@check_arguments
def experts(
    apply: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    number: int,
    axis: str | tuple[str, ...] = "ep",
    capacity: float | None = 1.25,
    overflow: Literal["error", "drop"] = "error",
) -> Tensor | tuple[Tensor, Tensor]:
    """The sum over k of `weights[..., k]` times what expert `ids[..., k]` makes of each token. Experts are routed; add
    shared ones to the result.

    * `x` [..., d], `ids` [..., K] and `weights` [..., K] are those of this rank's tokens. They differ along the axis,
      which may be a data axis. A router is the user's: `weights, ids = scores.topk(K)`.
    * `apply(rows, counts)` computes this rank's experts, of `number` on all ranks in rank order. Its weights are split
      along the axis by expert. `rows` [B, d] stand in order of these experts, `counts` says how many each has, and rows
      behind them are zeros, of which it makes finite numbers. Rows and results, [B, ...], differ along the axis.
    * The result [..., ...] differs along the axis, as `x` does.

    B is `capacity` times the mean of rows that a rank gets. Where more come, "error" raises in the next call of the
    step, and "drop" leaves out what the further rows would add and returns `(result, dropped)`, the number of these on
    this rank. Without a capacity B has room for all tokens of all ranks: nothing is ever dropped. The rows that travel
    are those that the router chose: on average tokens x K a rank, there and back, and again in the backward pass.

    Raises:
        FzeroError: for a `number` that does not divide by the ranks; for a capacity that is not above 0; as
            `ragged_all_to_all`.
    """
    world = fzero.axis_size(axis)
    if number % world or (capacity is not None and not 0 < capacity < math.inf):
        problem = f"has {number} experts on {world} ranks along {axis!r}, and a capacity of {capacity}"
        raise FzeroError("experts", problem, "give equal numbers of experts, and a capacity above 0 or None")
    local, chosen = number // world, ids.flatten(0, -2)
    tokens, k = chosen.shape
    room = world * tokens * k
    bound = room if capacity is None else min(room, math.ceil(capacity * tokens * k))
    order = chosen.flatten().argsort(stable=True)
    counts = torch.zeros(number, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten())).view(world, local)
    came = fzero.all_to_all(counts, axis, 0, 0)  # [N, experts of this rank] from each rank
    cut, sent = overflow == "drop", x.flatten(0, -2)[order // k]
    rows, taken = ragged_all_to_all(sent, counts.sum(1), axis, bound, cut=cut)
    ends = came.flatten().cumsum(0)
    segment = torch.searchsorted(ends, torch.arange(bound, device=ids.device), right=True)
    by_expert = torch.where(segment < number, segment % local, local).argsort(stable=True)
    fitting = ends.clamp(max=bound).diff(prepend=ends.new_zeros(1)).view(world, local).sum(0)
    made = apply(rows[by_expert], fitting)[by_expert.argsort()]
    back, _ = ragged_all_to_all(made, taken, axis, tokens * k, cut=cut)
    of_token = back[order.argsort()].unflatten(0, (tokens, k))
    shares = weights.reshape(tokens, k, *[1] * (of_token.ndim - 2))
    result = (of_token * shares).sum(1).unflatten(0, ids.shape[:-1])
    return (result, (taken.sum() - bound).clamp(min=0)) if cut else result
