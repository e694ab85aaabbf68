"""Ranks: runs a function on several gloo ranks, one process with one thread each. A helper of the tests.

    run(2, fn, 7)               -> [fn(mesh, 7) of rank 0, fn(mesh, 7) of rank 1]
    run_cases(2, {"a": case})   -> {"a": [Outcome of rank 0, Outcome of rank 1]}
    run_script(file, "--steps", "2", ranks=2) -> what it prints

Ranks are forked from one process that has imported what they need and done nothing else, and are there in a tenth of a
second.
A test file runs its cases in one `run_cases` a world size all the same, behind a fixture of module scope, and each test
looks at the outcome of its own: what a process does first (import, trace, connect) costs more than what it does next.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import traces
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fzero.ranks.transports import process_memory

Case = Callable[[DeviceMesh], Any]
STALL = timedelta(seconds=60)
"""After this long a collective that not all ranks have joined fails on those that have. On a busy machine a rank may
trace for many seconds while another waits."""
GRACE = 10.0
"""Seconds that ranks have to report after another failed, and to end after they reported."""

IMPORTED, IF_IMPORTED = ["torch._dynamo", "fzero", "pytest"], ["fzero.hf"]
"""What ranks find imported: what first traces and test files import; and what takes a second and few tests need, where
the tests of this run have imported it."""
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux: the signal that a process gets when its parent ends."""


class RankError(RuntimeError):
    """A rank failed; the message has the traceback of each that did, the first first."""


class Outcome(NamedTuple):
    """What one rank made of one case: its value, or the traceback of its error."""

    value: Any = None
    error: str = ""


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    stall: timedelta = STALL,
    lost: Collection[int] | None = None,
) -> list[Any]:
    """`fn(mesh, *args)` of each of `world` ranks, in their order. `fn` is importable; its result is pickled.

    `mesh` is a `DeviceMesh` with the one axis "fsdp". `stall` is the timeout of its process group, once all ranks are
    there. Where `lost` is given, those ranks are not waited for, their results are None, and each of the others leaves
    without a word as soon as it has its own. No process outlives the call.

    Raises:
        RankError: when a rank raises, dies, or does not return within `timeout` seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # takes a free port itself
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED + [name for name in IF_IMPORTED if name in sys.modules])
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(
            target=_rank,
            args=(rank, world, store.port, timeout, stall, lost is not None, pipes[rank][1], fn, args),
            daemon=True,
        )
        for rank in range(world)
    ]
    grace = 0.0
    try:
        for process, (_, theirs) in zip(processes, pipes):
            process.start()
            theirs.close()  # or the pipe of a rank that dies would never end
        results = _collect({pipes[rank][0]: rank for rank in range(world) if rank not in (lost or ())}, timeout)
        grace = GRACE if lost is None else 0.0
        return [results.get(rank) for rank in range(world)]
    finally:
        _end([process for process in processes if process.pid is not None], grace)


def run_script(script: Path, *flags: str, ranks: int | None = None) -> str:
    """What a script prints that is run in one process, without a group; with `ranks`, what rank 0 prints of so many,
    each with the variables that torchrun gives it. They are forked, and have imported torch already."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the agent of torchrun has one
    port = None if ranks is None else store.port
    return run(ranks or 1, _run_script, str(script), flags, port, timeout=240.0, lost=())[0]


def run_cases(world: int, cases: Mapping[str, Case], timeout: float = 240.0) -> dict[str, list[Outcome]]:
    """`case(mesh)` for each case, one after the other, on each of `world` ranks. A case that raises does not stop the
    next one, unless it left the ranks out of step."""
    ranks = run(world, _attempt_all, dict(cases), timeout=timeout)
    return {name: [outcomes[name] for outcomes in ranks] for name in cases}


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The value of each rank.

    Raises:
        RankError: when the case failed on one of them.
    """
    failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    if failed:
        raise _failure(failed)
    return [outcome.value for outcome in outcomes]


class Refusal(NamedTuple):
    """The error that a call raised: its class and message, the class of its cause, and after how many seconds."""

    kind: str
    message: str
    cause: str
    seconds: float


def refusal(use: Callable[[], Any]) -> Refusal:
    """The error of `use()`; of the kind "nothing" where it raises none."""
    start = time.monotonic()
    try:
        use()
    except Exception as error:
        cause = type(error.__cause__).__name__
        return Refusal(type(error).__name__, str(error), cause, time.monotonic() - start)
    return Refusal("nothing", "was raised", "", time.monotonic() - start)


def collect_seldom() -> None:
    """Let Python's collector leave alone what is there now, modules above all, and look seldom at what comes: a trace
    makes objects by the thousand, few of them in cycles."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def can_read_memory() -> bool:
    """Whether this kernel lets processes of one user read each other's memory, as seen on this process itself."""
    word, found = ctypes.create_string_buffer(b"word"), ctypes.create_string_buffer(5)
    try:
        process_memory.read(os.getpid(), ctypes.addressof(word), ctypes.addressof(found), 5)
    except (RuntimeError, AttributeError):
        return False
    return found.raw == word.raw


def chosen(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter in those tests of the fixture's file that will run: others need no cases."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params[parameter] for item in items if parameter in item.callspec.params}


def _run_script(mesh: DeviceMesh, script: str, flags: Sequence[str], port: int | None) -> str:
    if port is not None:
        rank, world = str(mesh.get_rank()), str(mesh.size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_USE_AGENT_STORE="True")
    dist.destroy_process_group()
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))  # as Python does
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def _rank(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    stall: timedelta,
    abrupt: bool,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of one rank: join, run, report, leave. Ends itself after `timeout`, with its stack on stderr."""
    _end_with_the_tests()
    collect_seldom()
    faulthandler.dump_traceback_later(timeout, exit=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=STALL)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        dist.barrier()
        _set_pg_timeout(stall)  # not from the start: on a busy machine ranks may start further apart than that
        result = fn(mesh, *args)
        message = pickle.dumps((result, ""))  # by value: torch's own pickling for pipes shares memory
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
        os._exit(1)  # without waiting for ranks that wait for this one
    pipe.send_bytes(message)
    if abrupt:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


def _end_with_the_tests() -> None:
    """Let the kernel end this rank when the fork server ends, which ends when the process of the tests does."""
    if sys.platform == "linux":
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # it waits for this one too
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def _collect(pipes: dict[Connection, int], timeout: float) -> dict[int, Any]:
    """What each rank sent."""
    waiting = dict(pipes)
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    deadline = time.monotonic() + timeout + GRACE
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), deadline - time.monotonic()):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            results[rank], error = _received(pipe)  # type: ignore[arg-type]
            if error:
                failed[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE)
    if failed:
        raise _failure(failed)
    if waiting:
        raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not return within {timeout:.0f} s")
    return results


def _received(pipe: Connection) -> tuple[Any, str]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "it died without a word, or did not return in time: see its stderr"


def _failure(failed: Mapping[int, str]) -> RankError:
    return RankError("\n".join(f"rank {rank} failed:\n{error}" for rank, error in failed.items()))


def _end(processes: Sequence[Any], grace: float) -> None:
    """Let the processes end within `grace` seconds, then make them."""
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _attempt_all(mesh: DeviceMesh, cases: dict[str, Case]) -> dict[str, Outcome]:
    outcomes = {name: Outcome(error="not run: an earlier case left the ranks out of step") for name in cases}
    with traces.share_traces():
        for name, case in cases.items():
            outcomes[name] = _attempt(mesh, case)
            if not _in_step():
                break
    return outcomes


def _attempt(mesh: DeviceMesh, case: Case) -> Outcome:
    try:
        return Outcome(case(mesh))
    except Exception:
        return Outcome(error=traceback.format_exc())


def _in_step() -> bool:
    """Whether every rank gets here; one that left a case with an error may have left others waiting in it."""
    try:
        dist.barrier()
    except RuntimeError:
        return False
    return True
