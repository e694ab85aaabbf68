"""Publishing: what ranks write together appears all at once or not at all, whichever of them fails, and wherever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fzero.base.errors import FzeroError
from fzero.state.publishing import Publication, give_name, open_temporary

RANKS = 4, 7
"""Global ranks of a mesh, for which the threads of this process stand."""
VICTIMS = [(4, "plan"), (4, "take"), (4, "write"), (4, "commit"), (7, "plan"), (7, "write")]


class Job:
    """Ranks that publish `target`, one a thread. The `victim`, a rank in a stage, raises `error`."""

    def __init__(self, target: Path, victim: tuple[int, str] = (0, ""), error: BaseException | None = None) -> None:
        self.target, self.victim, self.error = target, victim, error
        self.lines = {rank: ["a: 1", "b: 2"] for rank in RANKS}
        self.is_taken, self.stages, self.words = False, list[tuple[int, str]](), dict[int, Any]()
        self.barrier = threading.Barrier(len(RANKS))

    def run(self) -> list[BaseException | bool]:
        """What each rank raised; without an error, whether the place was taken when it returned."""
        with ThreadPoolExecutor(len(RANKS)) as pool:
            return list(pool.map(self._publish, RANKS))

    def _publish(self, rank: int) -> BaseException | bool:
        def act(stage: str) -> None:
            self.stages.append((rank, stage))
            if self.victim == (rank, stage) and self.error is not None:
                raise self.error

        def plan() -> list[str]:
            act("plan")
            return self.lines[rank]

        @contextmanager
        def take() -> Iterator[str]:
            with open_temporary(self.target, is_folder=True) as name:
                self.is_taken = True
                try:
                    act("take")
                    yield name
                finally:
                    self.is_taken = False

        def write(name: str) -> Path:
            assert self.is_taken
            act("write")
            (self.target.parent / name / f"{rank}").write_text("data")
            return self.target.parent / name

        def commit(written: list[Path]) -> None:
            assert self.is_taken and len(written) == len(RANKS)
            act("commit")
            give_name(written[0], self.target)

        try:
            Publication(self.target, "write", self._make_gather(rank), rank == RANKS[0]).run(plan, take, write, commit)
        except BaseException as error:
            return error
        return self.is_taken

    def _make_gather(self, rank: int) -> Callable[[Any], dict[int, Any]]:
        def gather(word: Any) -> dict[int, Any]:
            self.words[rank] = word
            self.barrier.wait(60)
            heard = {each: self.words[each] for each in RANKS}
            self.barrier.wait(60)
            return heard

        return gather


def test_all_of_it_is_there_and_the_place_is_given_up_when_ranks_return(tmp_path: Path) -> None:
    assert Job(tmp_path / "x").run() == [False, False]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["4", "7", "x"]


@pytest.mark.parametrize(("victim", "stage"), VICTIMS)
@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_where_a_rank_fails_all_ranks_hear_of_it_and_nothing_is_there(
    tmp_path: Path, victim: int, stage: str, error: BaseException
) -> None:
    job = Job(tmp_path / "x", (victim, stage), error)
    told = dict(zip(RANKS, job.run()))
    if isinstance(error, KeyboardInterrupt):
        assert told.pop(victim) is error
    for found in told.values():
        assert isinstance(found, FzeroError) and f"x: rank {victim} could not write it: " in str(found), found
    assert list(tmp_path.iterdir()) == [] and not job.is_taken
    begun = {at for _, at in job.stages}
    assert ("write" in begun, "commit" in begun) == (stage in ("write", "commit"), stage == "commit")


def test_the_first_line_that_differs_is_named_before_any_rank_writes(tmp_path: Path) -> None:
    job = Job(tmp_path / "x")
    job.lines[7] = ["a: 1", "b: 3"]
    for found in job.run():
        assert "x: ranks save different trees: rank 4 has b: 2, rank 7 has b: 3; give write the same" in str(found)
    job.lines[7] = ["a: 1"]
    assert all("rank 4 has 2 lines, rank 7 has 1 lines" in str(found) for found in job.run())
    assert list(tmp_path.iterdir()) == [] and "write" not in {stage for _, stage in job.stages}
