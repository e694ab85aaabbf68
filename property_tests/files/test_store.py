"""Laws of files: a read that starts after a write has started returns what was written, whatever else is under way."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule
from torch import Tensor

from fzero.base.placement import Disk
from fzero.files import OnDisk, Started, allocate, read, write
from fzero.files.extents import ALIGN

SIZES = st.one_of(st.integers(0, 3), st.integers(-2, 2).map(lambda x: 3 * ALIGN + x), st.integers(0, 6 * ALIGN))
Pair = tuple[OnDisk, Tensor]


class Files(RuleBasedStateMachine):
    """Tensors on disk, beside tensors in memory that have the same values."""

    pairs = Bundle("pairs")
    reads = Bundle("reads")

    @initialize()
    def make_folder(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.seed, self.writes = 0, list[Started]()

    def _draw(self, numel: int) -> Tensor:
        self.seed += 1
        return torch.randint(256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(self.seed))

    @rule(target=pairs, numel=SIZES, bucket=st.sampled_from("ab"))
    def make(self, numel: int, bucket: str) -> Pair:
        made, values = allocate(Disk(self.path), torch.uint8, numel, 0, bucket), self._draw(numel)
        self.writes.append(write([values], [made]))
        return made, values

    @rule(target=pairs, pair=consumes(pairs), start=SIZES, stop=SIZES)
    def cut(self, pair: Pair, start: int, stop: int) -> Pair:
        return pair[0][start:stop], pair[1][start:stop].clone()  # the rest is free once no slice holds it

    @rule(pair=consumes(pairs))
    def drop(self, pair: Pair) -> None:
        pass

    @rule(pair=pairs, start=SIZES, stop=SIZES)
    def start_write(self, pair: Pair, start: int, stop: int) -> None:
        target = pair[1][start:stop]
        target.copy_(self._draw(target.numel()))
        self.writes.append(write([target.clone()], [pair[0][start:stop]]))

    @rule(target=reads, pair=pairs, start=SIZES, stop=SIZES)
    def start_read(self, pair: Pair, start: int, stop: int) -> Any:
        return read([pair[0][start:stop]]), pair[1][start:stop].clone()

    @rule(started=consumes(reads))
    def finish_read(self, started: tuple[Started, Tensor]) -> None:
        assert torch.equal(started[0].wait()[0], started[1])

    @rule(pair=pairs)
    def compare(self, pair: Pair) -> None:
        assert torch.equal(pair[0].clone(), pair[1])

    def teardown(self) -> None:
        for started in self.writes:
            started.wait()
        shutil.rmtree(self.path)


TestFiles = Files.TestCase
TestFiles.settings = settings(max_examples=25, stateful_step_count=30)


def test_a_file_grows_while_it_is_read_and_written() -> None:
    """200 rounds of 10 writes, 10 reads and 10 extents that are new, which threads do at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        made = [allocate(Disk(Path(folder)), torch.uint8, ALIGN, 0, "a") for _ in range(10)]
        kept = list[Tensor]()
        for turn in range(200):
            values = torch.full((10, ALIGN), turn, dtype=torch.uint8)
            written, found = write(list(values), made), read(made)
            kept += [torch.empty_like(x) for x in made]
            written.wait()
            assert torch.equal(torch.stack(found.wait()), values)
