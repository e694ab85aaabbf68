"""Frontier: the combinations of choices that no other combination beats in both bytes and seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_COMBINATIONS = 1 << 18
"""Up to so many combinations all are looked at."""
FEW_CHOICES = 16
"""Up to so many choices, of more combinations, are also taken one by one, with the best combinations so far."""
BANDS, MAX_OF_BAND = 1024, 8
"""The combinations that are kept: in each of so many bands of bytes the fastest."""
MAX_LEFT_OUT = 4
"""How many sizes of the largest steps greedy search leaves out, one after the other."""


class Lifetime(NamedTuple):
    """Bytes that are alive, or with a minus are not, from the place `start` of a line up to `stop`."""

    start: int
    stop: int
    nbytes: int


class Option(NamedTuple):
    """What an option of a choice costs: the seconds beside the fastest option, and the bytes beside the line's."""

    seconds: float
    spans: tuple[Lifetime, ...]


class Choice(NamedTuple):
    """Something to decide. Its options are ordered: each is faster than the one before."""

    name: str
    options: tuple[Option, ...]


class Point(NamedTuple):
    """A combination: the option of each choice, the peak of the line, and the seconds beside the fastest."""

    peak: int
    seconds: float
    picks: tuple[int, ...]


def find_frontier(
    line: Sequence[int], choices: Sequence[Choice], most_combinations: int = MAX_COMBINATIONS
) -> list[Point]:
    """The frontier of these choices for a line of bytes, from the least peak to the least seconds.

    No budget goes into it. So a larger budget has every point of a smaller one, and never costs more time.

    Up to `most_combinations` all are looked at. Of more, greedy searches go from the least bytes to the least seconds:
    each step is the one that saves most seconds for a byte by which the peak grows. Few choices with many options are
    also taken one by one: of the combinations of those so far the fastest are kept, for each of many numbers of bytes.
    """
    base, changes = _compress(line, choices)
    if math.prod(len(choice.options) for choice in choices) <= most_combinations:
        return keep_fastest(_list_all(base, changes, choices))
    points = list(_search(base, changes, choices))
    if len(choices) <= FEW_CHOICES:
        points += _list_all(base, changes, choices, is_partial=True)
    return keep_fastest(points)


def keep_fastest(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both bytes and seconds, from the least peak on."""
    frontier: list[Point] = []
    for point in sorted(points):
        if not frontier or point.seconds < frontier[-1].seconds:
            frontier.append(point)
    return frontier


def _compress(line: Sequence[int], choices: Sequence[Choice]) -> tuple[Tensor, list[Tensor]]:
    """The line and the options of each choice in intervals within which no span begins or ends: [I] the largest bytes,
    and [options, I] the bytes beside them."""
    spans = [span for choice in choices for option in choice.options for span in option.spans]
    borders = sorted({0, len(line), *(span.start for span in spans), *(span.stop for span in spans)})
    at = {border: i for i, border in enumerate(borders)}
    base = torch.tensor([max(line[a:b]) for a, b in itertools.pairwise(borders)], device="cpu")
    changes = []
    for choice in choices:
        rows = torch.zeros(len(choice.options), len(base), dtype=torch.int64, device="cpu")
        for row, option in zip(rows, choice.options):
            for span in option.spans:
                row[at[span.start] : at[span.stop]] += span.nbytes
        changes.append(rows)
    return base, changes


def _list_all(
    base: Tensor, changes: Sequence[Tensor], choices: Sequence[Choice], is_partial: bool = False
) -> Iterator[Point]:
    """Of all combinations those that none with fewer bytes beats. With `is_partial` of those that `_keep` keeps."""
    totals = (base + sum(rows[0] for rows in changes))[None]  # choices have their first option until they are taken
    seconds = torch.zeros(1, dtype=torch.float64, device="cpu")
    numbers = torch.zeros(1, dtype=torch.int64, device="cpu")  # of the combinations, among all
    for rows, choice in zip(changes, choices):
        own = torch.tensor([option.seconds for option in choice.options], dtype=torch.float64, device="cpu")
        totals, seconds = (
            (totals[:, None] + (rows - rows[0])[None]).flatten(0, 1),
            (seconds[:, None] + own[None]).flatten(),
        )
        numbers = (len(own) * numbers[:, None] + torch.arange(len(own), device="cpu")).flatten()
        if is_partial:
            kept = _keep(totals, seconds)
            totals, seconds, numbers = totals[kept], seconds[kept], numbers[kept]
    peaks = totals.amax(1)
    order = torch.argsort(seconds, stable=True)
    order = order[torch.argsort(peaks[order], stable=True)]  # by bytes, of equal bytes by seconds
    fastest = seconds[order].cummin(0).values
    is_faster = torch.ones(len(order), dtype=torch.bool, device="cpu")
    is_faster[1:] = fastest[1:] < fastest[:-1]
    sizes = [len(choice.options) for choice in choices]
    for at in order[is_faster]:
        picks = tuple(int(i) for i in torch.unravel_index(numbers[at], sizes)) if sizes else ()
        yield Point(int(peaks[at]), sum(choice.options[i].seconds for choice, i in zip(choices, picks)), picks)


def _keep(totals: Tensor, seconds: Tensor) -> Tensor:
    """The positions of the combinations to go on with: the fastest of each band of bytes."""
    peaks = totals.amax(1)
    least = peaks.min()
    bands = (peaks - least) * BANDS // (peaks.max() - least + 1)
    order = torch.argsort(seconds, stable=True)
    order = order[torch.argsort(bands[order], stable=True)]
    counts = torch.bincount(bands, minlength=BANDS)
    ranks = torch.arange(len(order), device="cpu") - (counts.cumsum(0) - counts)[bands[order]]
    return order[ranks < MAX_OF_BAND]


def _search(base: Tensor, changes: Sequence[Tensor], choices: Sequence[Choice]) -> Iterator[Point]:
    """The combinations on the ways of greedy searches. Each search leaves out the steps above a size: a large step that
    does not fit may stand in the way of small ones."""
    base, changes = base.double(), [rows.double() for rows in changes]  # exact up to 2**53 bytes, and twice as fast
    steps = torch.cat([rows[1:] - rows[:-1] for rows in changes])  # [steps, I] of all choices, in order
    sizes = steps.amax(1)
    largest = sorted(set(sizes.tolist()), reverse=True)
    for limit in largest[: MAX_LEFT_OUT + 1]:
        yield from _climb(base, changes, choices, steps, sizes <= limit)


def _climb(
    base: Tensor, changes: Sequence[Tensor], choices: Sequence[Choice], steps: Tensor, allowed: Tensor
) -> Iterator[Point]:
    """The combinations from the least bytes on, one step each. A step that adds nothing to the peak comes first, else
    the one with most seconds for a byte."""
    alive = base + sum(rows[0] for rows in changes)
    seconds = sum(choice.options[0].seconds for choice in choices)
    picks = [0] * len(choices)
    firsts = list(itertools.accumulate((len(choice.options) - 1 for choice in choices), initial=0))
    owner = [i for i, choice in enumerate(choices) for _ in choice.options[1:]]
    saves = torch.tensor(
        [a.seconds - b.seconds for choice in choices for a, b in itertools.pairwise(choice.options)],
        dtype=torch.float64,
        device="cpu",
    )
    is_open = torch.zeros(len(steps), dtype=torch.bool, device="cpu")
    is_open[[first for first, choice in zip(firsts, choices) if len(choice.options) > 1]] = True
    is_open &= allowed
    yield Point(int(alive.max()), seconds, tuple(picks))
    while is_open.any():
        next_steps = is_open.nonzero().flatten()
        grown = (alive + steps[next_steps]).amax(1) - alive.max()
        best = int(next_steps[(saves[next_steps] / grown.clamp(min=1)).argmax()])
        alive, seconds, choice = alive + steps[best], seconds - float(saves[best]), owner[best]
        picks[choice] += 1
        is_open[best] = False
        if picks[choice] + 1 < len(choices[choice].options):
            is_open[best + 1] = allowed[best + 1]
        yield Point(int(alive.max()), seconds, tuple(picks))
