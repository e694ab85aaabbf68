"""Attention over a sequence that ranks have parts of: by heads (`ulysses`), or by queries (`ring_attention`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import FzeroError
from fzero.base.arguments import check_arguments


@check_arguments
def ulysses(
    attention: Callable[..., Tensor], *, axis: str | tuple[str, ...] = "sp", heads: int = 1, rows: int = 2
) -> Callable[..., Tensor]:
    """`attention(q, k, v, ...)` of a sequence whose rows lie on several ranks: in it each rank has all rows, in rank
    order, of some heads.

    * q, k, v and the result have their heads along the dim `heads`, and their rows along `rows`. Each rank gives and
      gets some rows of all heads: these differ along the axis.
    * Further arguments go to `attention` as they are. So masks, positions and document ids are those of all rows, the
      same along the axis: `fzero.all_gather(positions, axis, 1)`.
    * Fewer heads of keys than ranks are repeated, so that each rank has one.

    A rank sends (N-1)/N of its rows of q, k, v and the result, and as much backward. DeepSpeed-Ulysses (Jacobs et al.,
    2023).

    Raises:
        FzeroError: for heads that do not divide by the ranks, and heads of keys that neither divide nor are divided.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        world, many, few = fzero.axis_size(axis), q.shape[heads], k.shape[heads]
        if many % world or (few % world and world % few):
            problem = f"{many} heads, and {few} of keys, on {world} ranks along {axis!r}"
            most = max(n for n in range(1, world) if not (many % n or (few % n and n % few)))
            raise FzeroError("ulysses", problem, f"use {most} ranks, or fzero.parallel.ring_attention")
        if few % world:
            k, v = (x.repeat_interleave(world // few, heads) for x in (k, v))
        q, k, v = (fzero.all_to_all(x, axis, heads, rows) for x in (q, k, v))
        return fzero.all_to_all(attention(q, k, v, *args, **kwargs), axis, rows, heads)

    return attend


@check_arguments
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: str | tuple[str, ...] = "sp",
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    rotate: bool = False,
    balanced: bool = False,
) -> Tensor:
    """Scaled dot-product attention of this rank's queries to the keys of all ranks. Any number of heads will do.

    * `q` [b, heads, s, d], and `k` and `v` [b, heads of keys, s, d], are this rank's rows. Ranks have the sequence's
      rows in rank order; with `balanced` in the order of `order_rows`. They differ along the axis, and so does the
      result, as `q`.
    * A query sees the keys at its place and, with `causal`, at earlier ones, else at all; of the last `window` places,
      itself among them; of its own document alone. `documents` [b, s] has a number for each document, or `positions`
      [b, s] count from 0 in each, as `position_ids` of packed documents do.
    * By default keys and values are gathered, and one call of torch's attention takes them. With `rotate` they go
      around, and each rank has those of one other rank at a time: the softmax is in float32, of float64 in float64,
      and the backward pass computes each part again.

    A rank sends its keys and values to N-1 others, and their gradients back (Liu et al., Ring Attention, 2023).

    Raises:
        FzeroError: for a `window` below 1, or one without `causal`; for heads that heads of keys do not divide; for
            both `positions` and `documents`; for other numbers of keys than of queries; with `balanced` for an odd
            number of rows.
    """
    (_, heads, rows, width), few = q.shape, k.shape[1]
    if k.shape[2] != rows or v.shape[2] != rows:
        problem = f"has {rows} rows, k and v {k.shape[2]} and {v.shape[2]}"
        raise FzeroError("ring_attention: q", problem, "give queries and keys of the same places of the sequence")
    _check(heads, few, rows, causal, window, positions, documents, balanced)
    world, rank = fzero.axis_size(axis), fzero.axis_index(axis, q.device)
    places = _find_places(rows, world, balanced, q.device)  # [N, s]
    mine = places.index_select(0, rank.view(1))[0]
    documents = documents if positions is None else mine - positions
    numbers, scale = [] if documents is None else [documents], width**-0.5 if scale is None else scale
    see = partial(_find_mask, causal, window)
    if rotate:
        return _rotate(_Rows([q], [mine, *numbers]), k, v, axis, places, see, scale, balanced and causal)
    k, v = fzero.all_gather((k, v), axis, 2)
    mask = see([mine, *numbers], [places.flatten(), *fzero.all_gather(numbers, axis, 1)])
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=heads != few)


def _find_mask(causal: bool, window: int | None, queries: list[Tensor], keys: list[Tensor]) -> Tensor:
    """[b or 1, 1, queries, keys]: which keys queries see, by the places of both, and documents where there are some."""
    distance = queries[0].unsqueeze(-1) - keys[0]
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    seen = seen if window is None else seen & (distance < window)
    for ours, theirs in zip(queries[1:], keys[1:]):
        seen = seen & (ours.unsqueeze(-1) == theirs.unsqueeze(-2))
    return seen.unsqueeze(1) if seen.ndim == 3 else seen[None, None]


class _Rows(NamedTuple):
    """Some rows of a sequence: tensors [..., rows, d], and where they lie: [..., rows]."""

    tensors: list[Tensor]
    where: list[Tensor]

    def halve(self) -> list[_Rows]:
        cut = [x.chunk(2, -2) for x in self.tensors], [x.chunk(2, -1) for x in self.where]
        return [_Rows(*([halves[i] for halves in each] for each in cut)) for i in range(2)]


def _choose(is_first: Tensor, first: _Rows, second: _Rows) -> _Rows:
    return fzero.tree.map(lambda x, y: torch.where(is_first, x, y), first, second)


def _rotate(
    queries: _Rows, k: Tensor, v: Tensor, axis: Any, places: Tensor, see: Any, scale: float, by_halves: bool
) -> Tensor:
    """Attention to the keys of one rank after the other, which go around: the softmax of all from those of parts.

    With `by_halves` a rank has a chunk from the head of the sequence and one from its tail. Of another rank's chunks
    the queries of both see the first where that rank is earlier, else those of the tail alone see both. So in each turn
    all ranks compute two of four blocks.
    """
    world, rank, (q,) = fzero.axis_size(axis), fzero.axis_index(axis, k.device), queries.tensors
    around, grouped = [(i, (i + 1) % world) for i in range(world)], q.unflatten(1, (k.shape[1], -1))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    @fzero.remat
    def add(sums: _Rows, queries: _Rows, keys: _Rows) -> _Rows:
        (values, total, top), (q,), (k, v) = sums.tensors, queries.tensors, keys.tensors
        scores = (q @ k.unsqueeze(2).mT).to(wide) * scale  # [b, heads of keys, heads of each, queries, keys]
        scores = scores.masked_fill(~see(queries.where, keys.where).unsqueeze(1), -math.inf)
        higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        shares, less = (scores - higher).exp(), (top - higher).exp()
        return _Rows(
            [values * less + shares @ v.unsqueeze(2).to(wide), total * less + shares.sum(-1, True), higher], []
        )

    queries, held = queries._replace(tensors=[grouped]), [k, v, *queries.where[1:]]
    values = torch.zeros(*grouped.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
    sums = _Rows([values, values[..., :1], torch.full_like(values[..., :1], -math.inf)], [])
    for turn in range(world):
        held = fzero.ppermute(held, axis, around) if turn else held
        source = (rank - turn) % world
        keys = _Rows(held[:2], [places.index_select(0, source.view(1))[0], *held[2:]])
        if turn == 0 or not by_halves:
            sums = add(sums, queries, keys)
            continue
        (low, high), (first, second), (head, tail) = (each.halve() for each in (sums, queries, keys))
        high, is_earlier = add(high, second, head), source < rank
        other = [_choose(is_earlier, *pair) for pair in ((low, high), (first, second), (head, tail))]
        low, high = _choose(is_earlier, (made := add(*other)), low), _choose(is_earlier, high, made)
        sums = _Rows([torch.cat(pair, -2) for pair in zip(low.tensors, high.tensors)], [])
    return (sums.tensors[0] / sums.tensors[1]).to(q.dtype).flatten(1, 2)


@check_arguments
def order_rows(length: int, ranks: int) -> Tensor:
    """The order in which rows of a sequence are cut, so that all ranks have equal parts of a causal triangle.

    Index a batch by the order before ranks take their parts: `tokens[:, order_rows(s, N)]`. Rank i then has chunks i
    and 2 N - 1 - i, of 2 N chunks. Positions go with their tokens.

    Raises:
        FzeroError: for a length that does not divide by 2 N, and without ranks.
    """
    if ranks < 1 or length % (2 * ranks):
        problem = f"is {length}, for {ranks} ranks"
        raise FzeroError("order_rows: length", problem, "give a multiple of 2 chunks for each rank, at least one")
    return _find_places(length // ranks, ranks, True, torch.device("cpu")).flatten()


def _find_places(rows: int, world: int, balanced: bool, device: torch.device) -> Tensor:
    """[N, s]: the places in the sequence of the rows of each rank."""
    if not balanced:
        return torch.arange(world * rows, device=device).view(world, rows)
    chunks = torch.arange(world * rows, device=device).view(2 * world, rows // 2)
    return torch.cat([chunks[:world], chunks[world:].flip(0)], 1)


def _check(
    heads: int, few: int, rows: int, causal: bool, window: int | None, positions: Any, documents: Any, balanced: bool
) -> None:
    for where, is_wrong, problem, way_out in (
        ("window", window is not None and (window < 1 or not causal), f"is {window}", "give 1 or more, with causal"),
        ("k", bool(heads % few), f"has {few} heads, q has {heads}", "give a number that divides the heads of q"),
        ("documents", None not in (positions, documents), "is given beside positions", "give one of both"),
        ("balanced", balanced and bool(rows % 2), f"cuts {rows} rows of a rank into halves", "give an even number"),
    ):
        if is_wrong:
            raise FzeroError(f"ring_attention: {where}", problem, way_out)
