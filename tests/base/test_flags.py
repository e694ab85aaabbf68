"""Flags: a problem that a step notes in its state is an error of the next call, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from processes import Outcome, run_cases
from programs import layers, training
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, optim, tree
from fzero.base import flags
from fzero.base.flags import Flag, FlagReader, check_flags, find_flags


class Spilled(Flag):
    where = "cup"
    problem = "holds {value}"
    way_out = "pour less"


def flag(value: float = 0.0) -> Spilled:
    return Spilled(torch.tensor(value))


def test_a_flag_keeps_its_first_value() -> None:
    noted = flag().note(torch.tensor(False), 1.0)
    assert noted.value == 0
    noted = noted.note(torch.tensor(True), torch.tensor(2.0, dtype=torch.float64)).note(torch.tensor(True), 3.0)
    assert noted.value == 2 and noted.value.dtype == torch.float32 and isinstance(noted, Spilled)


@pytest.mark.parametrize("value", [1.5, math.inf, math.nan])
def test_check_flags_raises_for_the_first_that_is_set(value: float) -> None:
    state = {"a": flag(), "b": [flag(value), torch.ones(2)]}
    check_flags({"a": flag()})
    with pytest.raises(FzeroError, match=f"^cup: holds {value}; pour less"):
        check_flags(state)


def test_flags_are_found_by_position() -> None:
    state = {"a": [torch.ones(2), flag()], "b": torch.ones(3), "c": (flag(), torch.ones(1))}
    assert find_flags(tree.flatten(state)[1]) == {1: Spilled, 3: Spilled}
    assert find_flags(tree.flatten(flag())[1]) == {0: Spilled}


class Arrival:
    """An event of a copy to the host."""

    def __init__(self) -> None:
        self.is_here = False

    def query(self) -> bool:
        return self.is_here


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arrival]]:
    """Flags are read as if they were on a GPU: the events of their copies, in order."""
    events: list[Arrival] = []

    def copy(flag: Flag) -> tuple[Flag, Arrival]:
        events.append(Arrival())
        return type(flag)(flag.value.clone()), events[-1]

    monkeypatch.setattr(flags, "_is_on_host", lambda flag: False)
    monkeypatch.setattr(flags, "_copy_to_host", copy)
    yield events


def test_a_flag_of_a_gpu_raises_when_its_copy_has_arrived(copies: list[Arrival]) -> None:
    reader = FlagReader()
    reader.read([flag(), flag(1.0)])
    reader.read([])  # nothing has arrived, and nobody waits
    copies[0].is_here = True
    reader.read([])
    copies[1].is_here = True
    with pytest.raises(FzeroError, match="^cup: holds 1.0"):
        reader.read([])
    reader.read([])  # it has been told


def test_a_reader_on_the_cpu_reads_at_once() -> None:
    FlagReader().read([flag()])
    with pytest.raises(FzeroError, match="^cup"):
        FlagReader().read([flag(), flag(1.0)])


# on ranks


OPTIMIZER = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))


def fail_once(mesh: DeviceMesh) -> list[str]:
    """What the calls behind a step with a gradient that is not finite raise, and the loss of a step with another
    state."""
    step = fzero.shard(training(OPTIMIZER), mesh)
    batch = torch.ones(2, 5)
    params = fzero.partition(layers(1), mesh)
    first = OPTIMIZER.init(params)
    params, state, _ = step(params, first, batch * math.nan)
    said = []
    for _ in range(2):
        try:
            step(params, state, batch)
        except FzeroError as error:
            said.append(str(error))
    _, _, value = step(params, OPTIMIZER.init(params), batch)
    return [*said, str(value.isfinite().item())]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return run_cases(2, {"fail": fail_once})


def test_every_rank_raises_at_the_next_call(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["fail"]:
        *said, is_finite = outcome.value
        assert len(said) == 2 and is_finite == "True"
        assert all(text.startswith("clip_by_global_norm: the norm of the updates is nan") for text in said)
