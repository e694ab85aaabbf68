"""Faults: processes that are killed, and system calls that fail, in the middle of saves; and the folder afterwards.

    python tests/checkpoint/faults.py --kills 300 --errors 50 --seed 0

A round makes a few saves and kills one process or all of them: before a system call that is drawn by chance, or after a
random time. Then every checkpoint of the folder is verified and compared with what was saved at its step, and the next
save has to leave nothing but checkpoints. Processes are forked from one that has imported torch and saved once.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import io
import itertools
import json
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.checkpoint import latest, load, open_checkpoint, save, verify
from fzero.checkpoint.folder import LOCK, list_steps
from fzero.checkpoint.manifest import MANIFEST, name_file
from fzero.state import publishing

SHAPES = {"w": (37, 11), "b": (13,), "scale": ()}
STALL = timedelta(seconds=30)
PATIENCE = 60
"""Seconds after which a process of a round ends itself, and the round has failed."""


# calls that change files


class Calls:
    """The calls by which this process changes files, counted. `strike(name)` happens in place of call number `at`; of a
    write, after half of the data.

    Not a call of Python's `os`, and not counted: the exchange of two names. Counted calls surround it.
    """

    NAMES = "open mkdir rename replace unlink rmdir fsync pwrite ftruncate".split()

    def __init__(self, at: int = -1, strike: Callable[[str], None] = lambda name: None) -> None:
        self.at, self.strike, self.made = at, strike, list[str]()

    def note(self, name: str) -> None:
        self.made.append(name)
        if len(self.made) == self.at + 1:
            self.strike(name)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count within the block, in all threads of this process."""
        known = {name: getattr(os, name) for name in self.NAMES}
        plain_open = builtins.open
        for name, call in known.items():
            setattr(os, name, self._wrap(name, call))
        builtins.open = self._open_with(plain_open)  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.open = plain_open
            for name, call in known.items():
                setattr(os, name, call)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.note(name)
            return call(*args, **options)

        return counted

    def _open_with(self, plain_open: Any) -> Callable[..., Any]:
        calls = self

        class Written(io.FileIO):
            def write(self, data: Any) -> int:
                with memoryview(data) as view, view[: len(view) // 2] as half, view[len(view) // 2 :] as rest:
                    done = super().write(half) or 0
                    calls.note("write")
                    return done + (super().write(rest) or 0)

        def counted(file: Any, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
            if mode not in ("wb", "xb"):
                return plain_open(file, mode, buffering, **options)
            self.note("create")
            return io.BufferedWriter(Written(file, mode), 1 << 16)

        return counted


def draw_call(made: Sequence[str], draw: random.Random) -> int:
    """The number of one of the calls. Rare calls, such as a rename, are drawn as often as frequent ones."""
    name = draw.choice(sorted(set(made)))
    return draw.choice([number for number, other in enumerate(made) if other == name])


# what is saved


def tensors(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, which no other has."""
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def state(version: int, mesh: Any) -> dict[str, Any]:
    values = tensors(version)
    return {"params": values if mesh is None else fzero.partition(values, mesh), "version": version, "name": "a run"}


LIKE = {
    "params": {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()},
    "version": 0,
    "name": "",
}


class Save(NamedTuple):
    """One save of a round."""

    step: int
    version: int
    keep: int | None = None
    overwrite: bool = False
    wait: bool = True

    def run(self, path: Path, mesh: Any) -> None:
        how = {"step": self.step, "keep": self.keep, "overwrite": self.overwrite, "wait": self.wait}
        save(path, state(self.version, mesh), **how).wait()


class Folder:
    """A folder of checkpoints, and what may be in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.versions: dict[int, set[int]] = {}
        self.done: int | None = None
        self._numbers = itertools.count(1)

    @property
    def next_step(self) -> int:
        return max(self.versions, default=0) + 1

    def draw(self, wait: bool) -> list[Save]:
        """Saves that a process may be killed in: two new ones, and the second again. Old ones are removed."""
        step, version = self.next_step, self.next_version
        first, second = Save(step, version(), None, False, wait), Save(step + 1, version(), 2, False, wait)
        return [first, second, Save(step + 1, version(), 2, True, wait)]

    def next_version(self) -> int:
        return next(self._numbers)

    def begun(self, each: Save) -> None:
        self.versions.setdefault(each.step, set()).add(each.version)

    def ended(self, each: Save) -> None:
        self.versions[each.step], self.done = {each.version}, each.step

    def hear(self, reports: Sequence[Any]) -> None:
        """Note the saves that a process began and ended."""
        for what, *values in reports:
            if what in ("begun", "ended"):
                (self.begun if what == "begun" else self.ended)(Save(*values))

    def check(self) -> None:
        """Every checkpoint verifies, and has one of the versions that it may have; the last committed one is there."""
        steps = list_steps(self.path)
        assert self.done is None or self.done in steps, f"step {self.done} was saved, there are {steps}"
        for step in steps:
            verify(self.path, step)
            found = load(self.path, LIKE, step=step)
            assert found["version"] in self.versions[step], (step, found["version"], self.versions)
            for name, value in tensors(found["version"]).items():
                assert torch.equal(found["params"][name], value), (step, name)
            self.versions[step] = {found["version"]}
        assert latest(self.path) == max(steps, default=None)

    def save_next(self, mesh: Any) -> None:
        each = Save(self.next_step, self.next_version(), keep=2)
        self.begun(each)
        each.run(self.path, mesh)
        self.ended(each)

    def check_tidy(self) -> None:
        """Nothing but checkpoints is there, and no more than two."""
        steps = list_steps(self.path)
        assert set(os.listdir(self.path)) == {LOCK, *(f"step-{step}" for step in steps)}, os.listdir(self.path)
        assert len(steps) <= 2, steps
        for step in steps:
            count = len(open_checkpoint(self.path, step).manifest.files)
            assert set(os.listdir(self.path / f"step-{step}")) == {MANIFEST, *map(name_file, range(count))}


# processes


class Reporter:
    """Sends what happens in a forked process to the process that forked it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, what: str, *values: Any) -> None:
        os.write(self._fd, (json.dumps([what, *values]) + "\n").encode())


def fork(work: Callable[[Reporter], None]) -> tuple[int, int]:
    """A process that does `work`, and the end of a pipe that has its reports."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.alarm(PATIENCE)
        os.close(read)
        work(Reporter(write))
    except BaseException:
        Reporter(write).send("failed", traceback.format_exc())
    finally:
        os._exit(0)


def collect(processes: Sequence[tuple[int, int]]) -> list[list[Any]]:
    """All reports of processes that have ended. Raises where one failed in another way than it should."""
    reports = []
    for pid, fd in processes:
        with open(fd) as pipe:
            reports.append([json.loads(line) for line in pipe])
        _, status = os.waitpid(pid, 0)
        assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL, f"ended by {status}: {reports[-1]}"
    failed = [report[1] for report in itertools.chain(*reports) if report[0] == "failed"]
    assert not failed, "\n".join(failed)
    return reports


@contextmanager
def ranks(store: str, rank: int, world: int) -> Iterator[Any]:
    """The mesh of forked processes that meet at a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=STALL)
    yield init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))


@contextmanager
def without_exchange() -> Iterator[None]:
    """As on a filesystem that cannot exchange two names."""
    known, publishing._rename_exchange = publishing._rename_exchange, lambda a, b: False
    try:
        yield
    finally:
        publishing._rename_exchange = known


# kills


class Round(NamedTuple):
    """How processes are killed."""

    victims: str  # "alone": the one process; "one": a rank; "all": all ranks
    moment: str  # "call" or "time"
    wait: bool
    world: int  # virtual ranks of the one process, 0 for a tree that is not partitioned; or processes
    can_exchange: bool


KINDS = [
    ("alone", "call", True),
    ("one", "call", True),
    ("alone", "time", True),
    ("all", "call", True),
    ("alone", "call", False),
    ("one", "call", False),
    ("alone", "time", False),
    ("all", "time", True),
]


class Killer:
    """Rounds of saves in which processes are killed. Knows how many calls and seconds the saves of a round take."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self._draw, self._scratch = random.Random(seed), scratch
        self._stores = itertools.count()
        self._extents: dict[Round, list[tuple[list[str], float]]] = {}
        self.struck = Counter[str]()

    def kill(self, number: int, at: Folder) -> None:
        """One round of kind `number`, which kills at a moment that is drawn."""
        victims, moment, wait = KINDS[number % len(KINDS)]
        world = self._draw.randint(0, 4) if victims == "alone" else self._draw.randint(2, 3)
        kind = Round(victims, moment, wait, world, can_exchange=self._draw.random() < 0.75)
        extents = self._measure(kind)
        rank = self._draw.randrange(len(extents))
        calls, seconds = extents[rank]
        self._strike(kind, at, rank, draw_call(calls, self._draw), self._draw.uniform(0, seconds))

    def kill_at_each_call(self, every: int, at: Folder) -> None:
        """Rounds that kill before each call of a process, or one of `every`, on both sorts of filesystems."""
        for can_exchange in (True, False):
            kind = Round("alone", "call", True, 2, can_exchange)
            for moment in range(0, len(self._measure(kind)[0][0]), every):
                self._strike(kind, at, 0, moment, 0)
                self.save_next(at)

    def _strike(self, kind: Round, at: Folder, rank: int, call: int, seconds: float) -> None:
        """Kill, before this call or after so many seconds, and look at the folder."""
        processes = self._start(kind, at, rank, call if kind.moment == "call" else -1)
        if kind.moment == "time":
            self._kill_after(seconds, processes)
        reports = collect(processes)
        at.hear(reports[0])
        struck = [name for what, *values in itertools.chain(*reports) if what == "struck" for name in values]
        assert len(struck) == (kind.moment == "call"), (kind, reports)
        self.struck.update(struck or ["a random time"])
        if kind.victims == "one":
            check_survivors(reports, rank, kind.wait)
        at.check()

    def save_next(self, at: Folder) -> None:
        """A save that is not disturbed, from another number of ranks. Nothing but checkpoints is there then."""
        world = self._draw.randint(0, 4)
        at.save_next(fzero.VirtualMesh(fsdp=world) if world else None)
        at.check()
        at.check_tidy()

    def _measure(self, kind: Round) -> list[tuple[list[str], float]]:
        """Calls and seconds of each process of a round that nothing happens to."""
        key = kind._replace(victims="alone" if kind.victims == "alone" else "ranks", moment="")
        if key not in self._extents:
            with tempfile.TemporaryDirectory(dir=self._scratch) as path:
                at = Folder(Path(path))
                at.save_next(None)
                at.save_next(None)  # so that there is something to remove
                reports = collect(self._start(kind, at, 0, -1))
            self._extents[key] = [tuple(values) for what, *values in itertools.chain(*reports) if what == "took"]
        return self._extents[key]

    def _start(self, kind: Round, at: Folder, rank: int, moment: int) -> list[tuple[int, int]]:
        """The processes of a round. That of `rank` kills before its call number `moment`."""
        saves, store = at.draw(kind.wait), str(self._scratch / f"store-{next(self._stores)}")

        def work_alone(reporter: Reporter) -> None:
            self._work(
                kind, saves, at.path, fzero.VirtualMesh(fsdp=kind.world) if kind.world else None, [], moment, reporter
            )

        def work(mine: int, reporter: Reporter) -> None:
            with ranks(store, mine, kind.world) as mesh:
                pids: list[Any] = [None] * kind.world
                dist.all_gather_object(pids, os.getpid())
                others = [pid for pid in pids if pid != os.getpid()] if kind.victims == "all" else []
                self._work(kind, saves, at.path, mesh, others, moment if mine == rank else -1, reporter)

        if kind.victims == "alone":
            return [fork(work_alone)]
        return [fork(partial(work, mine)) for mine in range(kind.world)]

    @staticmethod
    def _work(
        kind: Round, saves: list[Save], path: Path, mesh: Any, others: list[int], moment: int, reporter: Reporter
    ) -> None:
        """What a process of a round does. Before call number `moment` it kills the others, and itself."""

        def strike(name: str) -> None:
            reporter.send("struck", name)
            for pid in (*others, os.getpid()):
                os.kill(pid, signal.SIGKILL)

        warnings.simplefilter("ignore")
        state(0, mesh)
        calls, start = Calls(moment, strike), time.monotonic()
        reporter.send("ready")
        try:
            with calls.watch(), nullcontext() if kind.can_exchange else without_exchange():
                for each in saves:
                    reporter.send("begun", *each)
                    each.run(path, mesh)
                    reporter.send("ended", *each)
            reporter.send("took", calls.made, time.monotonic() - start)
        except fzero.FzeroError as error:
            reporter.send("refused", str(error))

    @staticmethod
    def _kill_after(seconds: float, processes: Sequence[tuple[int, int]]) -> None:
        """Wait until the first process is ready, and so many seconds more."""
        os.read(processes[0][1], len('["ready"]\n'))
        time.sleep(seconds)
        for pid, _ in processes:
            os.kill(pid, signal.SIGKILL)


def check_survivors(reports: list[list[Any]], rank: int, wait: bool) -> None:
    """Every rank but the killed one has an error. It names the killed one, where the caller waited for the save."""
    for other, said in enumerate(reports):
        errors = [message for what, *values in said if what == "refused" for message in values]
        assert len(errors) == (other != rank), (rank, other, said)
        assert not wait or all(f"rank {rank} died" in error for error in errors), (rank, errors)


def run_kills(count: int, seed: int, scratch: Path) -> Counter[str]:
    """Kill so many times. What was struck, and how often."""
    killer, at = Killer(seed, scratch), Folder(scratch / "killed")
    for number in range(count):
        killer.kill(number, at)
        if number % 3 < 2 or number == count - 1:  # some saves find what two killed ones left
            killer.save_next(at)
    return killer.struck


def run_each_call(every: int, seed: int, scratch: Path) -> Counter[str]:
    """Kill a process once before each call that it makes, or before one of `every`. What was struck, and how often."""
    killer = Killer(seed, scratch)
    killer.kill_at_each_call(every, Folder(scratch / "killed"))
    return killer.struck


# errors


def run_errors(count: int, seed: int, scratch: Path) -> Counter[str]:
    """Let so many calls of saves of two ranks fail. What failed, and how often."""

    def work(rank: int, reporter: Reporter) -> None:
        with ranks(str(scratch / "store of errors"), rank, 2) as mesh:
            reporter.send("seen", fail_all(count, random.Random(seed), Folder(scratch / "failed"), mesh, rank))

    reports = collect([fork(partial(work, rank)) for rank in range(2)])
    return Counter(reports[0][0][1])


def fail_all(count: int, draw: random.Random, at: Folder, mesh: Any, rank: int) -> Counter[str]:
    """Let so many calls fail. Both ranks call together, with equal draws."""
    warnings.simplefilter("ignore")
    seen = Counter[str]()
    for _ in range(3):
        calls = Calls()
        with calls.watch():
            at.save_next(mesh)
    made = gather(calls.made)
    while seen.total() < count:
        victim, code = draw.randrange(2), draw.choice((errno.ENOSPC, errno.EIO))
        moment, overwrite = draw_call(made[victim], draw), draw.random() < 0.3
        each = Save(at.next_step - overwrite, at.next_version(), 2, overwrite, wait=draw.random() < 0.5)
        name, error = fail_once(at, each, mesh, moment if rank == victim else -1, code)
        errors = gather(error)
        assert len({each is None for each in errors}) == 1, errors
        if error is not None:
            assert all(f"rank {victim} could not save" in each and os.strerror(code) in each for each in errors), errors
        at.check()
        if error is None:
            at.save_next(mesh)
        else:  # the same save again
            at.begun(each)
            each.run(at.path, mesh)
            at.ended(each)
        at.check()
        at.check_tidy()
        if struck := gather(name)[victim]:  # a save that overwrites has fewer calls
            seen[f"{struck} ({'refused' if error else 'saved'})"] += 1
    return seen


def fail_once(at: Folder, each: Save, mesh: Any, moment: int, code: int) -> tuple[str, str | None]:
    """A save of which call number `moment` fails: the call's name, and the save's error."""
    struck, before = [""], at.versions.get(each.step, set())

    def strike(name: str) -> None:
        struck.append(name)
        raise OSError(code, os.strerror(code), "a fault")

    try:
        with Calls(moment, strike).watch():
            each.run(at.path, mesh)
    except fzero.FzeroError as error:
        at.versions[each.step] = before
        return struck[-1], str(error)
    at.begun(each)
    at.ended(each)
    return struck[-1], None


def gather(word: Any) -> list[Any]:
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, word)
    return words


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument(
        "--every", type=int, default=1, help="beside that, kill before every so manieth call of a process"
    )
    parser.add_argument("--errors", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", help="a folder to save in; in /dev/shm to sync takes no time")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runs: dict[str, Callable[[Path], Counter[str]]] = {
        "kills": partial(run_kills, given.kills, given.seed),
        "kills at each call": partial(run_each_call, given.every, given.seed),
        "errors": partial(run_errors, given.errors, given.seed),
    }
    for what, run in runs.items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
            seen = run(Path(scratch))
        shown = ", ".join(f"{name} {number}" for name, number in sorted(seen.items()))
        print(f"{seen.total()} {what}, {time.monotonic() - start:.0f} s, as it should be: {shown}", flush=True)


if __name__ == "__main__":
    main()
