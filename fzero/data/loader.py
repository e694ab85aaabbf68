"""The loader: torch's DataLoader on this rank's part of each global batch, from a global position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fzero import FzeroError, tree
from fzero.base.arguments import check_arguments
from fzero.data.padding import Collate, check_ladder, check_numbers, find_longest, pad, round_up
from fzero.data.parts import BatchPlace, find_indices, find_part, list_places, order
from fzero.data.position import ENDLESS, Position, check_position, mix
from fzero.data.streams import BatchStream, CollateTaken, Taken
from fzero.data.workers import StartWorker
from fzero.ranks.live import find_ranks

OWN = ("batch_size", "shuffle", "sampler", "batch_sampler", "generator", "in_order")
"""Options of torch's DataLoader that follow from the loader's own."""


@check_arguments
def loader(
    dataset: Any,
    batch: int,
    mesh: Any,
    *,
    seed: int | None = None,
    drop_last: bool = False,
    padding: tree.Tree | None = None,
    ladder: Sequence[int] | None = None,
    sequences: Sequence[str] | None = None,
    fingerprint: str = "",
    data: Sequence[str] | None = None,
    **options: Any,
) -> Loader:
    """A `Loader` of this rank's rows of each batch of `batch` examples, counted over all ranks.

    `dataset` is a map-style or an iterable dataset of torch. Rank `r` of `n` along the data axes of `mesh` takes the
    `r`-th of `n` equal parts of each batch; ranks along other axes take the same part. On a `VirtualMesh` a batch has
    the rows of all ranks, as `fzero.simulate` takes them.

        loader = fzero.data.loader(dataset, 512, mesh, seed=0, num_workers=4, pin_memory=True)
        for batch in loader:                    # the rest of the epoch
            state, loss = step(state, batch)
        fzero.save_safetensors(state._replace(data=loader.position), path)

    * `seed`: the examples of an epoch are shuffled by `seed` and epoch, and by nothing else. None keeps their order.
    * `drop_last`: leave out the last examples of an epoch where they fill no batch. By default the last batch is filled
      up with rows of `padding`, perhaps all rows of a rank. Weigh these rows by 0 (`fzero.accumulate`).
    * `padding`: a number for each leaf of a batch, a tree with its paths, as in `{"inputs": 0, "labels": -100}`.
    * `ladder`: ascending lengths. The sequences of a batch are padded to the first one that those of all ranks fit
      into, which ranks agree on in one all-reduce of 24 bytes a batch. So a step has at most `len(ladder)` programs.
    * `sequences`: the paths of leaves `[rows, length, ...]`, by default all leaves with two dimensions or more.
    * `fingerprint`: a name of the data. A position of data of another name is refused.
    * `data`: the data axes, as in `fzero.shard`.
    * `options` go to torch's DataLoader: `num_workers`, `pin_memory`, `prefetch_factor`, `collate_fn` and more.

    An iterable dataset has an order of its own, is read whole by every rank, and by at most one worker: several workers
    would read it in an order that depends on their number. A position in it is reached by skipping.

    Raises:
        FzeroError: for a batch that does not divide by the ranks; for examples that fill no last batch, without
            `padding` or `drop_last`; for a ladder without padding; for an option of torch that the loader sets itself.
    """
    part = find_part(batch, mesh, data)
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise FzeroError("seed", f"is {seed!r}", "give a whole number from 0 to 2**63 - 1, or None for no shuffling")
    check_numbers(padding)
    if ladder is not None:
        check_ladder(ladder)
        if padding is None:
            raise FzeroError("padding", "is None, and a ladder pads sequences", "give a number for each leaf")
    for name in OWN:
        if name in options:
            raise FzeroError(name, "is an option that the loader sets itself", "give batch, seed or fingerprint")
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream:
        _check_stream(dataset, seed, options)
    if not is_stream and not hasattr(dataset, "__len__"):
        raise FzeroError("dataset", f"is a {type(dataset).__name__} without a length", "give it __len__")
    length = ENDLESS if is_stream else len(dataset)
    if not length or (drop_last and 0 < length < batch):
        raise FzeroError("dataset", f"has {length} examples, and a batch {batch}", "give a smaller batch, or padding")
    if options.get("collate_fn") is None:
        options["collate_fn"] = default_collate if ladder is None else Collate(padding, sequences)
    own = length, ENDLESS if seed is None else seed, mix(fingerprint) if fingerprint else 0
    pads = _Pads(mesh, padding, ladder, sequences)
    return Loader(dataset, batch, part, drop_last, pads, own, options)


def _check_stream(dataset: Any, seed: int | None, options: dict[str, Any]) -> None:
    """Refuse what an iterable dataset cannot be read by."""
    if isinstance(dataset, Iterator):
        raise FzeroError("dataset", "is an iterator, which is read once", "give a dataset whose __iter__ begins anew")
    if not isinstance(dataset, Iterable):
        raise FzeroError("dataset", f"is a {type(dataset).__name__}", "give a map-style or an iterable dataset")
    if seed is not None:
        raise FzeroError("seed", f"is {seed}, and an iterable dataset has its own order", "shuffle in the dataset")
    if options.get("num_workers", 0) > 1:
        problem = f"is {options['num_workers']}, and several workers would read an iterable dataset in another order"
        raise FzeroError("num_workers", problem, "give 0 or 1, or a map-style dataset")
    if options.get("persistent_workers"):
        problem = "is True, and a worker that lives on does not hear where an iterable dataset begins"
        raise FzeroError("persistent_workers", problem, "leave it out")


class _Pads:
    """How batches are padded, on all ranks of a mesh alike."""

    def __init__(
        self, mesh: Any, padding: tree.Tree | None, ladder: Sequence[int] | None, sequences: Sequence[str] | None
    ) -> None:
        self.mesh, self.padding, self.ladder, self.sequences = mesh, padding, ladder, sequences

    def __call__(self, rows: tree.Tree, valid: int) -> tree.Tree:
        if self.padding is None:
            return rows
        length = None
        if self.ladder is not None:
            length = round_up(find_longest(rows, self.sequences), self.ladder, self.mesh)
        return pad(rows, self.padding, count=valid, length=length, sequences=self.sequences)


class Loader:
    """This rank's batches. Each `for` over a loader goes on from its `position` to the end of the epoch.

    All ranks of the mesh begin a loop together: they agree on data and position, in one all-reduce of 24 bytes.
    `len(loader)` is the number of batches in a whole epoch. `fzero.data.loader` makes one.
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        part: range,
        drop_last: bool,
        pads: _Pads,
        own: tuple[int, int, int],
        options: dict[str, Any],
    ) -> None:
        self._batch, self._part, self._drop_last, self._pads = batch, part, drop_last, pads
        self._on = find_ranks(pads.mesh)
        self._length, self._seed, self._fingerprint = own
        self._epoch, self._index = 0, 0
        self._turn: object = None
        self._generator = torch.Generator()  # of workers' seeds: torch's own stays as it is
        self._check_end(self._index)
        start = StartWorker(options.get("worker_init_fn"))
        how = {**options, "generator": self._generator, "worker_init_fn": start}
        self._dataset, self._stream = dataset, None
        if self._length == ENDLESS:
            self._stream = BatchStream(dataset, batch, part, drop_last)
            how["collate_fn"] = CollateTaken(options["collate_fn"])
            self._loads: DataLoader[Any] = DataLoader(self._stream, batch_size=None, **how)
        else:
            self._loads = DataLoader(dataset, batch_sampler=_Indices(self), **how)

    @property
    def mesh(self) -> Any:
        """The mesh whose ranks share each batch."""
        return self._pads.mesh

    @property
    def position(self) -> Position:
        """The position behind the last batch that was handed out, for `resume` of a loader on any number of ranks."""
        return Position.of(self._epoch, self._index, self._length, self._seed, self._fingerprint)

    def resume(self, position: Position) -> None:
        """Go on from a position: of this loader, or of one with another mesh, batch or number of workers.

        Raises:
            FzeroError: for a position of other data, with the field and both numbers; for examples that fill no last
                batch from there on, without `padding` or `drop_last`.
        """
        if not isinstance(position, tuple) or len(position) != len(Position._fields):
            raise FzeroError("position", f"is a {type(position).__name__}", "give loader.position")
        numbers = Position(*position).to_numbers()
        check_position(numbers, self.position.to_numbers())
        epoch, index, length, *_ = numbers
        is_over = length != ENDLESS and length - index < (self._batch if self._drop_last else 1)
        epoch, index = (epoch + 1, 0) if is_over else (epoch, index)
        self._check_end(index)
        self._turn, self._epoch, self._index = None, epoch, index

    def __len__(self) -> int:
        if self._length == ENDLESS:
            raise TypeError("an iterable dataset does not know how many batches it has")
        return self._length // self._batch if self._drop_last else -(-self._length // self._batch)

    def __iter__(self) -> Iterator[Any]:
        self._on.agree("a loop over data", self._describe())
        self._turn = turn = object()
        self._generator.manual_seed(mix("workers", self._seed, self._epoch, self._index))
        is_last = False
        for rows, valid, stop, is_last in map(_raise_error, self._fetch()):
            if self._turn is not turn:
                problem = "another iteration has begun, or the loader was resumed elsewhere"
                raise FzeroError("loader", problem, "iterate over a loader in one place at a time")
            batch = self._pads(rows, valid)
            self._epoch, self._index = (self._epoch + 1, 0) if is_last else (self._epoch, stop)
            yield batch
        if not is_last and self._turn is turn:  # nothing was left
            self._epoch, self._index = self._epoch + 1, 0

    def iter_indices(self) -> Iterator[list[int]]:
        """The examples of a map-style dataset in this rank's rows, for each batch to the end of the epoch."""
        examples = order(self._seed, self._epoch, self._length)
        return (find_indices(examples, place, self._part) for place in self._list_places())

    def _list_places(self) -> Iterator[BatchPlace]:
        return list_places(self._length, self._index, self._batch, self._part, self._drop_last)

    def _fetch(self) -> Iterator[Any]:
        """The `Taken` rows of each batch, or the error of a worker, to the end of the epoch."""
        if self._stream is None:
            for rows, place in zip(self._loads, self._list_places()):
                yield Taken(rows, place.valid, place.stop, place.is_last)
            return
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._stream.start = self._index
        yield from self._loads

    def _describe(self) -> list[str]:
        """What all ranks must have alike, one line each."""
        how = {"batch": self._batch, "drop_last": self._drop_last, "ladder": self._pads.ladder}
        numbers = zip(Position._fields, self.position.to_numbers())
        return [f"data {name}: {value}" for name, value in (*how.items(), *numbers)]

    def _check_end(self, index: int) -> None:
        """Refuse examples from `index` on that fill no last batch, where nothing says what to do with them."""
        if self._pads.padding is not None:
            return
        if self._length == ENDLESS:
            if not self._drop_last:
                problem = "is iterable, and its last batch may be short"
                raise FzeroError("dataset", problem, "give padding={...} to fill it up, or drop_last=True")
            return
        left = self._length - index
        rest = left % self._batch
        if rest and not self._drop_last:
            problem = f"has {left} examples from {index} on: the last batch has {rest} of {self._batch}"
            raise FzeroError("dataset", problem, "give padding={...} to fill it up, or drop_last=True")


def _raise_error(taken: Any) -> Taken:
    """What a worker sent. Raises the error that it sent instead."""
    for sent in (taken, getattr(taken, "rows", None)):
        if isinstance(sent, FzeroError):
            raise sent
    return taken


class _Indices:
    """The index lists of a loader, for the `batch_sampler` of torch's DataLoader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.iter_indices()

    def __len__(self) -> int:
        return len(self._loader)
