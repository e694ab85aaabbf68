"""Streams: this rank's rows of the batches of an iterable dataset, each with the place where the batch ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from fzero import FzeroError


class Taken(NamedTuple):
    """This rank's rows of one batch, of which the first `valid` are data. The rest is as in `parts.Place`."""

    rows: Any
    valid: int
    stop: int
    is_last: bool


class BatchStream(IterableDataset[Taken | FzeroError]):
    """The batches of an iterable dataset from example `start` on, as lists of this rank's examples.

    The dataset is read from its beginning, and the examples in front of `start` are skipped. Each rank reads every
    example and keeps its own. `dataset` must yield the same examples on all ranks, in the same order in each epoch or,
    where it has `set_epoch`, in an order that depends on the epoch alone.

    A dataset that ends before `start` yields an error as its only batch: torch would change the class of an error that
    a worker raises.
    """

    def __init__(self, dataset: Iterable[Any], batch: int, part: range, drop_last: bool) -> None:
        self.dataset, self.batch, self.part, self.drop_last = dataset, batch, part, drop_last
        self.start = 0

    def __iter__(self) -> Iterator[Taken | FzeroError]:
        stop, examples = self.start, iter(self.dataset)
        skipped = sum(1 for _ in itertools.islice(examples, self.start))
        if skipped < self.start:
            problem = f"is {self.start}, and the dataset ends after {skipped} examples"
            yield FzeroError("position.index", problem, "give the dataset that the position was saved with")
            return
        kept, count = self._take(examples)
        while count == self.batch or (count and not self.drop_last):
            following, more = self._take(examples)  # tells whether this batch is the last
            stop += count
            is_last = more < self.batch if self.drop_last else not more
            valid = len(range(self.part.start, min(self.part.stop, count)))
            yield Taken(kept, valid, stop, is_last)
            kept, count = following, more

    def _take(self, examples: Iterator[Any]) -> tuple[list[Any], int]:
        """This rank's examples of the next batch, filled up with the batch's first, and how many the batch has."""
        first, kept, count = None, list[Any](), 0
        for row, example in zip(range(self.batch), examples):
            first = example if row == 0 else first
            kept += [example] * (row in self.part)
            count = row + 1
        return kept + [first] * (len(self.part) - len(kept)), count


class CollateTaken:
    """A collate function of lists of examples, on what a `BatchStream` yields. An error stays."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, taken: Taken | FzeroError) -> Taken | FzeroError:
        return taken if isinstance(taken, FzeroError) else taken._replace(rows=self.collate(taken.rows))
