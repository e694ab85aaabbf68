"""Ranks that die or stall, in real processes: each other rank soon raises an FzeroError that names rank and collective.

A fault strikes a rank in place of a collective, in which the other ranks then wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Refusal, can_read_memory, refusal, run
from programs import layers, training
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import optim
from fzero.passes import defaults
from fzero.ranks.failure import _wait_until, format_seconds, group_by_word, name_ranks, roll_error
from fzero.ranks.live import find_ranks, live
from fzero.ranks.transports import Native, PointToPoint, Transport, process_memory

STALL = timedelta(seconds=5)
"""Torch's timeout in tests of a rank that stalls. A rank that is later than others by less than STALL is in time, as a
busy machine makes ranks that do not stall."""
SOON = 30.0
"""Seconds within which every other rank has its error: 2 * STALL, and room for a busy machine."""
GONE, LATE = "died or left", f"did not take part within {STALL.total_seconds():g} s"
BEFORE = "agreement before a step"

Act = Callable[[], Any]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(300)  # longer than any test lasts: the process is ended


def pause() -> None:
    time.sleep(1)


class Job:
    """Training on one rank, with faults.

    A step without passes gathers one leaf at a time and waits for the leaf, so that nothing is on its way when a rank
    dies. Ranks meet after tracing, because tracing on a busy machine may take longer than a short timeout allows.
    """

    def __init__(self, mesh: DeviceMesh, passes: tuple[Any, ...] = ()) -> None:
        self.mesh, self.on, self.rank = mesh, live(mesh), dist.get_rank()
        adamw = optim.adamw(0.1)
        self.params = fzero.partition(layers(), mesh)
        self.state = adamw.init(self.params)
        others = dist.new_group(timeout=timedelta(minutes=2))

        def meet(program: Any) -> Any:
            dist.barrier(group=others)
            return program

        self._step = fzero.shard(training(adamw), mesh, passes=(*passes, meet))

    def step(self) -> None:
        self.params, self.state, _ = self._step(self.params, self.state, torch.ones(2, 5))

    def before(self, what: str, acts: dict[int, Act]) -> None:
        """From now on, these ranks act just before they begin the collective that errors call `what`."""
        begin, act = self.on.members.begin, acts.get(self.rank)

        def strike(collective: str) -> Any:
            if act is not None and collective == what:
                act()
            return begin(collective)

        self.on.members.begin = strike  # type: ignore[method-assign]


def assert_named(ends: list[Refusal | None], where: str, *parts: str, blamed: set[int]) -> None:
    """Every rank that is left ended soon, with an FzeroError that has these parts and blames these ranks alone."""
    for found in filter(None, ends):
        assert found.kind == "FzeroError", found
        assert found.message.startswith(f"{where}: "), found.message
        missing = [part for part in parts if part not in found.message]
        assert not missing, f"{missing} not in: {found.message}"
        assert ranks_of(found.message) == blamed, found.message
        assert found.cause.endswith("Error") and "; " in found.message, found
        assert found.seconds < SOON


def ranks_of(message: str) -> set[int]:
    """`"all_gather of layers.1: ranks 1, 2 died or left; ..." -> {1, 2}`."""
    problem = message.partition(": ")[2].partition(";")[0]
    return {int(word) for word in problem.replace(LATE, "").replace(",", "").split() if word.isdigit()}


# ranks that are waited for until a timeout


Silences = dict[Callable[[], list[Refusal | None]], Future[list[Refusal | None]]]


@pytest.fixture(scope="module")
def silent() -> Iterator[Silences]:
    """How ranks end that miss one which says nothing, or is late. All such jobs run at once, because all they do is
    wait."""
    jobs = (in_a_step, two_of_four, between_steps, at_the_mesh, too_late, late_in_time)
    with ThreadPoolExecutor(len(jobs)) as pool:
        yield {job: pool.submit(job) for job in jobs}


# in a step


def second_step(mesh: DeviceMesh, what: str, acts: dict[int, Act], passes: tuple[Any, ...] = ()) -> Refusal:
    job = Job(mesh, passes)
    job.step()
    job.before(what, acts)
    return refusal(job.step)


IN_A_STEP = ["all_gather of layers.1", "reduce_scatter of layers.1", "all_reduce over fsdp"]


@pytest.mark.parametrize("what", IN_A_STEP)
def test_a_rank_that_dies_in_a_step_is_named(what: str) -> None:
    ends = run(3, second_step, what, {2: die}, lost=[2])
    assert_named(ends, what, GONE, blamed={2})


class _Forbids:
    """A kernel that keeps processes from each other's memory."""

    @staticmethod
    def process_vm_readv(*of: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1


def be_forbidden() -> None:
    process_memory._libc = _Forbids


def test_a_rank_that_may_not_read_the_memory_of_another_one_any_more_is_told_so() -> None:
    if not can_read_memory():
        pytest.skip("this kernel keeps processes from reading each other's memory")
    ends = run(2, second_step, "all_gather of layers.1", {1: be_forbidden}, stall=STALL, lost=[])
    told = "all_gather of layers.1: rank 1 may not read the memory of another rank in all_gather of layers.1: "
    for found in ends:
        assert found is not None and found.kind == "FzeroError" and found.seconds < SOON
        assert found.message.startswith(told)
        assert "Operation not permitted; the kernel let ranks read each other's memory when they met" in found.message


def in_a_step() -> list[Refusal | None]:
    """With the default passes, which gather ahead: the rank has begun an earlier gather, and has not read in it."""
    passes = defaults(stage=3, in_place=True)
    return run(3, second_step, "all_gather of layers.1", {1: stall}, passes, stall=STALL, lost=[1])


def test_a_rank_that_stalls_in_a_step_is_named(silent: Silences) -> None:
    assert_named(silent[in_a_step].result(), "all_gather of layers.0", LATE, blamed={1})


def native(mesh: DeviceMesh) -> Transport:
    return Native(mesh.get_group(), live(mesh).members.new_twin(mesh.get_group()))


def by_messages(mesh: DeviceMesh) -> Transport:
    return PointToPoint(mesh.get_group(), live(mesh).members.timeout)


def with_another(transport: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> Refusal:
    live(mesh).transports["fsdp"] = transport(mesh)
    return second_step(mesh, "reduce_scatter of layers.1", {1: die})


@pytest.mark.parametrize("transport", [native, by_messages])
def test_other_transports_name_it_too(transport: Callable[[DeviceMesh], Transport]) -> None:
    """The transports of CUDA tensors (here on gloo) and of ranks of several hosts."""
    ends = run(4, partial(with_another, transport), lost=[1])
    assert_named(ends, "reduce_scatter of layers.1", GONE, blamed={1})


def two_of_four() -> list[Refusal | None]:
    return run(4, second_step, "all_gather of layers.0", {1: stall, 3: die}, stall=STALL, lost=[1, 3])


def test_every_missing_rank_is_named(silent: Silences) -> None:
    assert_named(silent[two_of_four].result(), "all_gather of layers.0", LATE, blamed={1, 3})


class Silent:
    """A torch work that never succeeds. torch waits for whole milliseconds."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout // timedelta(milliseconds=1) / 1000)
        raise RuntimeError


def test_a_rank_that_is_late_is_waited_for_until_the_deadline() -> None:
    for fraction in range(20):
        deadline = time.monotonic() + 0.003 + fraction / 20_000
        assert not _wait_until(Silent(), deadline) and time.monotonic() >= deadline


def test_a_rank_that_left_because_of_another_is_not_blamed() -> None:
    """Rank 1 sees at once that rank 2 is gone. Rank 0 comes to the collective a second later."""
    ends = run(3, second_step, "all_gather of layers.1", {0: pause, 2: die}, lost=[2])
    assert_named(ends, "all_gather of layers.1", GONE, blamed={2})


def come_late() -> None:
    time.sleep(7.5)


def too_late() -> list[Refusal | None]:
    return run(3, second_step, "all_gather of layers.1", {1: come_late}, stall=STALL, lost=[])


def test_a_rank_that_comes_too_late_is_told_from_one_that_is_missing(silent: Silences) -> None:
    """The rank comes after the timeout of 5 s, and before the others stop waiting, after 10 s."""
    for found in silent[too_late].result():
        assert found is not None
        assert found.kind == "FzeroError" and found.seconds < SOON
        assert "though every rank answers: " in found.message
        assert re.search(r"rank 1 waited [0-2] s in all_gather of layers\.1", found.message)


def test_ranks_in_different_collectives_are_told_to_call_the_same() -> None:
    for second, way_out in (("generate", "in equal time"), ("save out", "none may save, evaluate or generate alone")):
        words = {0: "waited 0 s in generate", 1: f"waited 2 s in {second}"}
        assert way_out in str(roll_error("generate", words, {}))


def test_an_error_that_is_not_about_a_connection_is_told_as_it_is() -> None:
    words = dict.fromkeys(range(2), "waited 0 s in the first word of ranks to each other")
    told = str(roll_error("the first word", words, {}, "Numpy is not available"))
    assert told.startswith("the first word: failed on this rank: Numpy is not available") and "timeout" not in told
    for cause in ("Connection closed by peer [127.0.0.1]", "Timed out waiting 15000ms for send operation"):
        assert "though every rank answers" in str(roll_error("the first word", words, {}, cause))


def fail_in_a_collective(mesh: DeviceMesh) -> str:
    live = find_ranks(mesh)

    def exchange() -> None:
        with live.members.begin("a collective"):
            raise RuntimeError("no room for a tensor")

    return refusal(exchange).message


def test_ranks_that_fail_alike_in_a_collective_say_why() -> None:
    for message in run(2, fail_in_a_collective, lost=()):
        assert "failed on this rank: no room for a tensor" in message


def test_a_rank_that_is_alone_gets_the_error_itself() -> None:
    assert run(1, fail_in_a_collective) == ["no room for a tensor"]


def two_axes(mesh: DeviceMesh) -> Refusal:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    return second_step(grid, "all_reduce of layers.1 over replica", {3: die})


def test_ranks_that_do_not_communicate_with_the_missing_one_name_it_too() -> None:
    ends = run(4, two_axes, lost=[3])
    for found in filter(None, ends):
        assert_named([found], found.message.partition(":")[0], GONE, blamed={3})
    assert ends[1].message.startswith("all_reduce of layers.1 over replica: ")  # rank 1 waits for rank 3 there


def a_step_after(mesh: DeviceMesh) -> list[Refusal]:
    job = Job(mesh)
    job.before("all_gather of layers.1", {1: die})
    return [refusal(job.step), refusal(job.step)]


def test_a_step_after_that_says_so_again_at_once() -> None:
    (first, second), _ = run(2, a_step_after, lost=[1])
    assert second.message == first.message and second.seconds < STALL.total_seconds()


# between steps


def loading(mesh: DeviceMesh, load: Callable[[int], Any]) -> Refusal:
    job = Job(mesh)
    job.step()
    load(job.rank)
    return refusal(job.step)


def raising(rank: int) -> None:
    if rank == 2:
        raise OSError("no such file: tokens-07.bin")


def waiting(rank: int) -> None:
    if rank == 2:
        stall()


def test_a_rank_that_raises_in_its_data_loader_is_named() -> None:
    """Of four ranks, one does not hear from the missing rank itself in gloo's all-reduce."""
    assert_named(run(4, loading, raising, lost=[2]), BEFORE, GONE, blamed={2})


def between_steps() -> list[Refusal | None]:
    return run(3, loading, waiting, stall=STALL, lost=[2])


def test_a_rank_that_waits_for_data_is_named(silent: Silences) -> None:
    assert_named(silent[between_steps].result(), BEFORE, LATE, blamed={2})


def dawdling(rank: int) -> None:
    if rank == 2:
        time.sleep(2.5)  # two glances of the others


def late_in_time() -> list[Refusal | None]:
    return run(3, loading, dawdling, stall=STALL)


def test_a_rank_that_is_late_but_in_time_is_waited_for(silent: Silences) -> None:
    for found in silent[late_in_time].result():
        assert found is not None and found.kind == "nothing", found


# outside of steps


def unpartitioning(mesh: DeviceMesh) -> Refusal:
    job = Job(mesh)
    job.before("all_gather of layers.2", {1: die})
    return refusal(lambda: fzero.unpartition(job.params))


def test_a_gather_outside_of_a_step_names_the_missing_rank() -> None:
    assert_named(run(2, unpartitioning, lost=[1]), "all_gather of layers.2", GONE, blamed={1})


def partitioning(mesh: DeviceMesh) -> Refusal:
    if mesh.get_rank() == 1:
        die()
    return refusal(lambda: fzero.partition(layers(), mesh))


def at_the_mesh() -> list[Refusal | None]:
    return run(2, partitioning, stall=STALL, lost=[1])


def test_a_rank_that_does_not_come_to_the_mesh_ends_the_others(silent: Silences) -> None:
    found, _ = silent[at_the_mesh].result()
    assert found is not None
    assert found.kind == "FzeroError" and found.seconds < SOON
    assert found.message.startswith(f"mesh: not all of ranks 0, 1 came to it within {STALL.total_seconds():g} s; ")


# how errors name ranks


def test_one_rank_or_some_are_named() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([0, 1]) == "ranks 0, 1"


def test_no_more_than_eight_ranks_are_named() -> None:
    assert name_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert name_ranks(range(512)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more"


def test_ranks_that_say_the_same_stand_together() -> None:
    assert group_by_word({2: "a", 1: "b", 0: "a"}) == {"a": [0, 2], "b": [1]}


def test_seconds_are_short() -> None:
    assert [format_seconds(timedelta(minutes=30)), format_seconds(timedelta(milliseconds=2500))] == ["1800 s", "2.5 s"]
