"""Runs that are killed or asked to stop at any step, and go on, on as many ranks or on others: the same losses."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import refusal, run
from programs import layers, mlp
from torch import Tensor
from torch.nn.functional import dropout

import fzero
import fzero.checkpoint
import fzero.data
from fzero import FzeroError, Sharded, State, VirtualMesh, optim, tree
from fzero.checkpoint import Stop, latest, writing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic.md"
STEPS, EVERY, BATCH, EXAMPLES = 14, 4, 12, 41
"""Five epochs of three batches: 41 examples fill no fourth."""
TERM, KILL = signal.SIGTERM, signal.SIGKILL
DATA = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(5))

Strike = Callable[[int], Any]


class Killed(BaseException):
    """Stands for the end of a process, of virtual ranks too."""


class Found(NamedTuple):
    """What a run has come to."""

    losses: dict[int, float]  # by step
    status: Any  # that the run exits with, None where it returns
    latest: int | None


def train(drop: float, optimizer: Any, state: State, x: Tensor) -> tuple[State, Tensor]:
    def loss(params: Any) -> Tensor:
        return dropout(mlp(params, x), drop).square().mean()

    value, grads = fzero.value_and_grad(loss)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optim.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state, step=state.step + 1), value


def make(mesh: Any, drop: float = 0.0) -> tuple[Callable[..., Any], State, fzero.data.Loader]:
    """A step, the state that a run begins with, and its data."""
    optimizer, params = optim.adamw(0.05), fzero.partition(layers(), mesh)
    state = State(params, optimizer.init(params), step=torch.tensor(0), seed=torch.tensor(3))
    convert = fzero.simulate if isinstance(mesh, VirtualMesh) else fzero.shard
    step = convert(partial(train, drop, optimizer), mesh)
    return step, fzero.partition(state, mesh), fzero.data.loader(DATA, BATCH, mesh, seed=1, drop_last=True)


def go(mesh: Any, folder: Path, strike: Strike = lambda number: None, drop: float = 0.0, **options: Any) -> Found:
    """Run to the end, or until the run is ended. `strike(number)` is called after each step."""
    losses, status = dict[int, float](), None

    def after(number: int, loss: Tensor) -> None:
        losses[number] = loss.mean().item()  # virtual ranks have one each
        strike(number)

    try:
        fzero.checkpoint.run(*make(mesh, drop), folder, **{"steps": STEPS, "every": EVERY, "after": after, **options})
    except (SystemExit, Killed) as end:
        status = getattr(end, "code", "killed")
    return Found(losses, status, latest(folder))


def die_at(step: int, number: int) -> None:
    if number == step:
        raise Killed


def end_at(step: int, signals: dict[int, list[int]], number: int) -> None:
    """After `step`, send these ranks their signals."""
    if number == step:
        for which in signals.get(dist.get_rank(), []):
            os.kill(os.getpid(), which)


# virtual ranks


@pytest.mark.parametrize(("before", "then"), [(2, 2), (4, 4), (2, 1), (1, 4), (4, 3), (3, 2)])
def test_a_killed_run_has_the_losses_of_an_uninterrupted_one(before: int, then: int, tmp_path: Path) -> None:
    """With the same number of ranks bit for bit, dropout too."""
    drop, step = 0.5 * (before == then), random.Random(f"{before} {then}").randrange(1, STEPS)
    whole = go(VirtualMesh(fsdp=before), tmp_path / "whole", drop=drop)
    killed = go(VirtualMesh(fsdp=before), tmp_path / "killed", partial(die_at, step), drop)
    assert killed.status == "killed" and (killed.latest or 0) == step // EVERY * EVERY
    rest = go(VirtualMesh(fsdp=then), tmp_path / "killed", drop=drop)
    assert list(rest.losses) == list(range(step // EVERY * EVERY + 1, STEPS + 1)) and rest.latest == STEPS
    expected = {number: whole.losses[number] for number in rest.losses}
    assert rest.losses == (expected if before == then else pytest.approx(expected, rel=1e-5))
    assert whole.latest == STEPS and go(VirtualMesh(fsdp=1), tmp_path / "whole").losses == {}


def test_a_save_under_way_counts_when_an_error_ends_its_run(tmp_path: Path) -> None:
    go(VirtualMesh(fsdp=2), tmp_path, partial(die_at, EVERY), wait=False)
    assert min(go(VirtualMesh(fsdp=2), tmp_path).losses) == EVERY + 1


def test_a_rank_holds_one_state_while_it_loads(tmp_path: Path) -> None:
    """A load reads into the memory of the state that it is given."""
    go(VirtualMesh(fsdp=2), tmp_path, steps=EVERY)
    step, state, loader = make(VirtualMesh(fsdp=2))
    given = [leaf.local for leaf in tree.leaves(state) if isinstance(leaf, Sharded)]
    last = fzero.checkpoint.run(step, state, loader, tmp_path, steps=EVERY, every=EVERY)
    loaded = [leaf.local for leaf in tree.leaves(last) if isinstance(leaf, Sharded)]
    assert [x.data_ptr() for x in loaded] == [x.data_ptr() for x in given] and len(given) > 4
    with pytest.raises(FzeroError, match="layers.0.w: this value was donated"):
        state.params["layers"][0]["w"].local  # noqa: B018


def test_checkpoints_of_a_run(tmp_path: Path) -> None:
    go(VirtualMesh(fsdp=2), tmp_path, keep=2, wait=False)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-12", "step-14"]


def test_what_a_run_refuses(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match="every: is 0; save every 1 steps or more"):
        go(VirtualMesh(fsdp=2), tmp_path, every=0)
    with pytest.raises(FzeroError, match="state: is a dict; give a fzero.State"):
        fzero.checkpoint.run(lambda state, batch: (state, None), {}, None, tmp_path, steps=1, every=1)  # type: ignore
    (tmp_path / "file").write_text("")
    with pytest.raises(FzeroError, match="cannot be read: Not a directory"):
        go(VirtualMesh(fsdp=2), tmp_path / "file")


def test_the_loop_of_the_page(tmp_path: Path) -> None:
    """The second block of docs/elastic.md, asked to stop after two steps and started again, for the epoch's rest."""
    _, loop = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    losses = dict[int, float]()
    for _ in range(2):
        mesh = VirtualMesh(fsdp=2)
        step, state, loader = make(mesh)

        def struck(state: State, batch: Tensor, step: Any = step) -> Any:
            state, loss = step(state, batch)
            losses[int(fzero.unpartition(state).step)] = loss.mean().item()
            if len(losses) == 2:
                os.kill(os.getpid(), TERM)
            return state, loss

        with contextlib.suppress(SystemExit):
            exec(
                loop,
                {"fzero": fzero, "folder": tmp_path, "mesh": mesh, "loader": loader, "state": state, "step": struck},
            )
        assert latest(tmp_path) == 2
    assert losses == go(VirtualMesh(fsdp=2), tmp_path / "whole", steps=3).losses


# signals


def test_a_signal_is_heard_within_the_block_alone() -> None:
    before = signal.getsignal(TERM)
    with Stop(VirtualMesh(fsdp=2)) as stop:
        assert not stop.is_asked()
        os.kill(os.getpid(), TERM)
        assert stop.is_asked() and stop.is_asked()
        with pytest.raises(SystemExit) as end:
            stop.leave()
    assert end.value.code == 143 and signal.getsignal(TERM) is before


def test_a_signal_that_nobody_hears_is_refused() -> None:
    before = signal.getsignal(TERM)
    with pytest.raises(FzeroError, match="has <Signals.SIGKILL: 9>, which cannot be heard: "):
        Stop(VirtualMesh(fsdp=2), (TERM, KILL)).__enter__()
    assert signal.getsignal(TERM) is before


def test_a_signal_while_a_run_loads(tmp_path: Path) -> None:
    resume = fzero.data.Loader.resume

    def struck(self: Any, position: Any) -> None:
        os.kill(os.getpid(), TERM)
        resume(self, position)

    go(VirtualMesh(fsdp=2), tmp_path, steps=EVERY)
    with mock.patch.object(fzero.data.Loader, "resume", struck):
        assert go(VirtualMesh(fsdp=2), tmp_path) == Found({}, 143, EVERY)


def test_signals_come_to_the_main_thread_alone() -> None:
    found = list[str]()
    thread = threading.Thread(target=lambda: found.append(refusal(Stop(VirtualMesh(fsdp=2)).__enter__).message))
    thread.start()
    thread.join()
    assert found == ["Stop: is used on a thread, where Python hears no signals; use it on the main thread"]


def stopped(mesh: Any, folder: Path, step: int, signals: dict[int, list[int]], **options: Any) -> list[Found]:
    """A run that is asked to stop after `step`, and the run that goes on."""
    return [go(mesh, folder, partial(end_at, step, signals), **options), go(mesh, folder, **options)]


def during_a_save(mesh: Any, folder: Path) -> list[Found]:
    """Signals come while ranks write."""
    write = writing.Saving._write_file

    def struck(self: Any, *args: Any) -> Any:
        os.kill(os.getpid(), TERM)
        return write(self, *args)

    writing.Saving._write_file = struck  # type: ignore[method-assign]
    first = go(mesh, folder)
    writing.Saving._write_file = write  # type: ignore[method-assign]
    return [first, go(mesh, folder)]


def killed(mesh: Any, folder: Path, step: int) -> str:
    """What rank 0 is told of rank 1, which is killed after `step`."""
    return refusal(lambda: go(mesh, folder, partial(end_at, step, {1: [KILL]}))).message


SIGNALS = {"one rank": {1: [TERM]}, "all ranks, twice": {0: [TERM, TERM], 1: [TERM, TERM]}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an uninterrupted run on two ranks."""
    first, second = run(2, go, tmp_path_factory.mktemp("whole"))
    assert first == second and first.status is None and list(first.losses) == list(range(1, STEPS + 1))
    return first.losses


@pytest.mark.parametrize(("name", "wait"), [("one rank", False), ("all ranks, twice", True)])
def test_a_signal_to_any_rank_stops_all_at_one_step(
    name: str, wait: bool, tmp_path: Path, whole: dict[int, float]
) -> None:
    step = random.Random(f"{name} {wait}").randrange(1, STEPS)
    for first, rest in run(2, partial(stopped, wait=wait), tmp_path, step, SIGNALS[name]):
        assert (first.status, first.latest) == (143, step) and list(first.losses) == list(range(1, step + 1))
        assert (rest.status, rest.latest) == (None, STEPS)
        assert first.losses | rest.losses == whole


def test_signals_during_a_save(tmp_path: Path, whole: dict[int, float]) -> None:
    for first, rest in run(2, during_a_save, tmp_path):
        assert (first.status, first.latest) == (143, EVERY)
        assert first.losses | rest.losses == whole
    assert not list(tmp_path.glob("*.partial"))


def test_a_rank_that_is_killed_is_named_and_others_go_on(tmp_path: Path, whole: dict[int, float]) -> None:
    step = random.Random("killed").randrange(EVERY, STEPS)
    told, _ = run(2, killed, tmp_path, step, lost=[1])
    assert "rank 1 died or left" in told
    for rest in run(3, go, tmp_path):
        assert min(rest.losses) == step // EVERY * EVERY + 1
        assert rest.losses == pytest.approx({number: whole[number] for number in rest.losses}, rel=1e-5)
