"""A rank that an error takes out of a step: the other ranks are told at once, and nobody goes on with half a step.

Also what a mesh leaves behind: threads, descriptors, and the sockets that a child of a killed rank holds.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import Refusal, refusal, run
from programs import layers, training
from test_failure import STALL, Job
from test_origins import TRANSPORTS, X, descend, full
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import optim
from fzero.ranks.live import live
from fzero.ranks.transports import SameHost, Transport
from fzero.ranks.transports.worker import Worker

AT_ONCE = 20.0
"""Seconds: FAREWELL, and room for a busy machine. A rank that is not told waits three times as long."""


class Ends(NamedTuple):
    """The error of the step that one rank leaves, and that of the next step."""

    first: Refusal
    then: Refusal


class Interrupt(BaseException):
    """Stands for a KeyboardInterrupt, which a test may not raise."""


def caught(use: Callable[[], Any]) -> Refusal:
    """`refusal`, of interrupts too."""
    start = time.monotonic()
    try:
        return refusal(use)
    except BaseException as error:
        return Refusal(type(error).__name__, str(error), "", time.monotonic() - start)


def leaving(what: str, error: BaseException, transport: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> Ends:
    """Rank 1 raises an error of its own just before the collective `what`."""
    live(mesh).transports["fsdp"] = transport(mesh)
    job = Job(mesh)
    job.step()

    def act() -> None:
        raise error

    job.before(what, {1: act})
    return Ends(caught(job.step), caught(job.step))


ERRORS: dict[str, BaseException] = {
    "ValueError: no such token": ValueError("no such token"),
    "RuntimeError: out of memory": RuntimeError("out of memory"),
    "Interrupt": Interrupt(),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("said", ERRORS)
def test_the_others_are_told_at_once(said: str, transport: Callable[[DeviceMesh], Transport]) -> None:
    what = "reduce_scatter of layers.1"
    stayed, left, third = run(3, partial(leaving, what, ERRORS[said], transport))
    assert left.first.kind == type(ERRORS[said]).__name__ and left.first.seconds < AT_ONCE
    assert left.then.kind == "FzeroError" and left.then.seconds < 5
    assert left.then.message.startswith(f"a step: this rank left it by {said}; ")
    for ends in (stayed, third):
        assert ends.first.kind == "FzeroError" and ends.first.seconds < AT_ONCE, ends
        assert ends.first.message.startswith(f"{what}: rank 1 left a step by {said}; mend it there")
        assert ends.then.message == ends.first.message and ends.then.seconds < 5


def all_leave(mesh: DeviceMesh) -> Ends:
    """Each rank raises an error of its own, in the same collective."""
    job = Job(mesh)
    job.step()

    def act() -> None:
        dist.barrier()  # else one rank may hear of the other's error first
        raise ValueError(f"on {job.rank}")

    job.before("all_gather of layers.1", {0: act, 1: act})
    return Ends(caught(job.step), caught(job.step))


def test_all_ranks_may_leave() -> None:
    for rank, ends in enumerate(run(2, all_leave)):
        assert (ends.first.kind, ends.first.message) == ("ValueError", f"on {rank}") and ends.first.seconds < AT_ONCE
        assert ends.then.message.startswith(f"a step: this rank left it by ValueError: on {rank}; ")


def leaving_the_agreement(mesh: DeviceMesh) -> Refusal:
    """Rank 1 is interrupted while it agrees with the others."""
    job = Job(mesh)
    job.step()
    if job.rank == 1:

        def interrupted(work: Any) -> None:
            raise Interrupt

        job.on.members.wait = interrupted  # type: ignore[method-assign]
    return caught(job.step)


def test_a_rank_may_leave_while_ranks_agree() -> None:
    stayed, left = run(2, leaving_the_agreement)
    assert left.kind == "Interrupt" and stayed.kind == "FzeroError" and stayed.seconds < AT_ONCE
    assert "rank 1 left agreement before a step by Interrupt; " in stayed.message


def alone(mesh: DeviceMesh) -> list[Any]:
    """One rank has no others to tell, and goes on."""
    job = Job(mesh)

    def act() -> None:
        raise ValueError

    job.before("all_gather of layers.1", {0: act})
    kind = caught(job.step).kind
    return [kind, float(fzero.shard(lambda p, x: x.sum(), mesh)(fzero.partition(full(), mesh), X))]


def test_one_rank_alone_goes_on() -> None:
    assert run(1, alone) == [["ValueError", 8.0]]


# a child that holds the sockets of a killed rank


def die_with_a_child(other: int) -> None:
    """End this process. A child, which ends with the process `other`, holds its sockets."""
    if os.fork() == 0:
        while os.path.exists(f"/proc/{other}"):
            time.sleep(0.1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_a_child(what: str, transport: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> Refusal:
    live(mesh).transports["fsdp"] = transport(mesh)
    job, pids = Job(mesh), [None, None]
    job.step()
    dist.all_gather_object(pids, os.getpid())
    job.before(what, {1: partial(die_with_a_child, pids[0])})
    return refusal(job.step)


@pytest.mark.parametrize("what", ["agreement before a step", "all_gather of layers.1"])
def test_a_killed_rank_is_missed_at_once_though_its_sockets_live(what: str) -> None:
    found, _ = run(2, partial(killed_with_a_child, what, TRANSPORTS[0]), lost=[1])
    assert found.message.startswith(f"{what}: rank 1 died or left; ") and found.seconds < AT_ONCE


Waits = dict[Callable[[DeviceMesh], Transport], Future[list[Any]]]


@pytest.fixture(scope="module")
def waits() -> Iterator[Waits]:
    """How ranks end that miss one on other transports. They wait at once."""
    with ThreadPoolExecutor(len(TRANSPORTS)) as pool:
        killed = {each: partial(killed_with_a_child, "all_gather of layers.1", each) for each in TRANSPORTS[1:]}
        yield {each: pool.submit(run, 2, killed[each], stall=STALL, lost=[1]) for each in killed}


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_messages_miss_it_at_the_timeout(waits: Waits, transport: Callable[[DeviceMesh], Transport]) -> None:
    what = "all_gather of layers.1"
    found, _ = waits[transport].result()
    assert found.message.startswith(f"{what}: rank 1 died or left; ")
    assert found.seconds < STALL.total_seconds() + AT_ONCE


# what is left behind


def begin_again(number: int) -> DeviceMesh:
    """A mesh on process groups that take the place of all there are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"again {number}", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))


def resources() -> tuple[int, int]:
    """The threads and descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def renewed(mesh: DeviceMesh) -> list[tuple[int, int]]:
    found = []
    for number in range(5):
        params, _ = fzero.shard(descend, mesh)(fzero.partition(full(), mesh), X)
        del params
        found.append(resources())
        mesh = begin_again(number)
    return found


def test_new_process_groups_leave_nothing_of_the_old_ones() -> None:
    for first, second, *others in run(2, renewed):
        for threads, descriptors in others:
            assert threads <= max(first[0], second[0]) and descriptors <= max(first[1], second[1]), (first, others)


# interrupts at random moments

COUNT = 8  # steps
SEEDS = 50


class Ran(NamedTuple):
    """What a rank made of a job that was interrupted once: the losses of its steps, and the error that ended it."""

    losses: dict[int, float]  # by the number of the step
    error: str  # "" where all steps ran
    was_interrupted: bool


@contextmanager
def interrupts(delay: float, kind: type[BaseException]) -> Iterator[Callable[[], bool]]:
    """Raise an error after `delay` seconds, once, wherever the main thread is. Yields whether that has happened."""
    is_armed, has_struck = True, False

    def strike(*_: Any) -> None:
        nonlocal has_struck
        if is_armed:
            has_struck = True
            raise kind

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        yield lambda: has_struck
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reading(mesh: DeviceMesh) -> Transport:
    """A transport that reads on a thread."""
    transport = live(mesh).transports["fsdp"]
    if isinstance(transport, SameHost):
        transport._reader = Worker("reader")
    return transport


def interrupted(mesh: DeviceMesh, seed: int) -> Ran:
    """Steps that go on after an interrupt, with the state that the rank has."""
    live(mesh).transports["fsdp"] = (*TRANSPORTS, reading)[seed % 4](mesh)
    draw, optimizer = random.Random(seed), optim.adamw(0.1)
    params, step = fzero.partition(layers(2), mesh), fzero.shard(training(optimizer), mesh, donate=seed % 8 < 4)
    batch, losses, error = torch.ones(2, 5), dict[int, float](), ""
    for _ in range(2):  # the first call traces; the state that they make is not used
        start = time.monotonic()
        step(fzero.partition(layers(2), mesh), optimizer.init(params), batch)
        seconds = time.monotonic() - start
    held, is_over = (params, optimizer.init(params), torch.zeros(()), 0), False
    is_victim = dist.get_rank() == draw.randrange(2)
    delay, kind = COUNT * seconds * draw.uniform(0.01, 0.7), draw.choice([KeyboardInterrupt, SystemExit, ValueError])
    with interrupts(delay if is_victim else 60, kind) as has_struck:
        while not is_over:
            try:
                while held[3] < COUNT:
                    held = (*step(*held[:2], batch), held[3] + 1)  # stored at once: an interrupt comes before, or after
                    losses[held[3]] = float(held[2])
                is_over = True
            except fzero.FzeroError as caught:
                if "could not make the step" in str(caught):
                    continue  # no rank has begun: all ranks may take the step again
                error, is_over = str(caught), True
            except (KeyboardInterrupt, SystemExit, ValueError):
                pass  # and once more
    return Ran(losses, error, has_struck())


def interrupted_again_and_again(mesh: DeviceMesh) -> list[Ran]:
    found = []
    for seed in range(SEEDS):
        found.append(interrupted(mesh, seed))
        mesh = begin_again(seed)
    return found


def trained_alone() -> dict[int, float]:
    """The losses of the unsharded steps."""
    optimizer = optim.adamw(0.1)
    params, batch, losses = layers(2), torch.ones(2, 5), dict[int, float]()
    state, step = optimizer.init(params), training(optimizer)
    for number in range(1, COUNT + 1):
        params, state, loss = step(params, state, batch)
        losses[number] = float(loss)
    return losses


def test_a_step_after_an_interrupt_is_right_or_named() -> None:
    first, second = run(2, interrupted_again_and_again, timeout=200)
    right = trained_alone()
    for seed, ends in enumerate(zip(first, second)):
        for rank, ran in enumerate(ends):
            assert ran.losses == pytest.approx({i: right[i] for i in ran.losses}, rel=1e-5), (seed, rank, ran)
            assert ran.error or COUNT in ran.losses or ran.was_interrupted, (seed, rank, ran)
            assert not ran.error or "; " in ran.error, (seed, rank, ran)
    assert sum(ran.was_interrupted for ran in (*first, *second)) > SEEDS // 3
    assert sum(bool(ran.error) for ran in first) > 5
