"""Names of communication in a profile of torch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_cases, values
from programs import layers, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import fzero
from fzero import optim, tree
from fzero.base.torch_private import is_profiling
from fzero.execution.bind import Call
from fzero.execution.profiling import name_calls

train_step = training(optim.adamw(0.1))


def profiled(mesh: DeviceMesh, folder: Path, donate: bool) -> tuple[list[str], list[Tensor]]:
    """The names in a trace of a second step, and that step's results."""
    params = fzero.partition(layers(2), mesh)
    step = fzero.shard(train_step, mesh, donate=donate)
    *state, _ = step(params, optim.adamw(0.1).init(params), torch.ones(2, 5))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        *state, value = step(*state, torch.ones(2, 5))
    path = folder / f"{mesh.get_rank()}{donate}.json"
    seen.export_chrome_trace(str(path))
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return names, [value, *(leaf.local for leaf in tree.leaves(state))]


def plain(mesh: DeviceMesh) -> list[Tensor]:
    params = fzero.partition(layers(2), mesh)
    step = fzero.shard(train_step, mesh)
    *state, _ = step(params, optim.adamw(0.1).init(params), torch.ones(2, 5))
    *state, value = step(*state, torch.ones(2, 5))
    return [value, *(leaf.local for leaf in tree.leaves(state))]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("traces")
    cases = {
        "in place": functools.partial(profiled, folder=folder, donate=True),
        "anew": functools.partial(profiled, folder=folder, donate=False),
        "plain": plain,
    }
    return {name: values(found) for name, found in run_cases(2, cases).items()}


@pytest.mark.parametrize("case", ["in place", "anew"])
def test_a_trace_names_collectives_by_bucket(on_ranks: dict[str, list[Any]], case: str) -> None:
    for names, _ in on_ranks[case]:
        for layer in ("layers.0", "layers.1"):
            for op in ("all_gather", "reduce_scatter"):
                assert names.count(f"{op} {layer}") == names.count(f"wait {op} {layer}") > 0
        assert "all_reduce fsdp" in names
        assert any(name.startswith("adamw ") for name in names)


def test_a_profiled_step_gives_the_same_bit_for_bit(on_ranks: dict[str, list[Any]]) -> None:
    for case in ("in place", "anew"):
        for (_, got), expected in zip(on_ranks[case], on_ranks["plain"]):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class Started:
    def wait(self) -> str:
        return "done"


def test_a_name_changes_nothing_about_a_call() -> None:
    calls = {
        "start": Call(lambda *args: Started(), "all_gather w", starts=True, waits=False),
        "wait": Call(lambda pending: pending.wait(), "", starts=False, waits=True),
        "reduce": Call(lambda *args: args, "all_reduce fsdp", starts=False, waits=False),
        "take": Call(lambda *args: args, "", starts=False, waits=False),
    }
    named = name_calls(calls)
    assert named["wait"](named["start"]("x")) == "done"
    assert named["reduce"]("x", "sum", "fsdp") == ("x", "sum", "fsdp")
    assert named["take"] is calls["take"].run


def test_without_a_profile_nothing_is_named() -> None:
    assert not is_profiling()
    with profile(activities=[ProfilerActivity.CPU]):
        assert is_profiling()
