"""Options of `shard`, `simulate` and `check_equivalence`, two at a time: each pair of values is taken, or refused by
the name of an option."""

from __future__ import annotations

import inspect
import itertools
import os
from typing import Any

import pytest
import torch
from processes import run
from programs import layers, loss, training
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, optim
from fzero.passes import Plan, defaults

MESH = fzero.VirtualMesh(fsdp=2)
SGD = optim.sgd(0.1)
GOOD: dict[str, list[Any]] = {
    "stage": [2],
    "memory": ["1MiB"],
    "to": [fzero.host()],
    "donate": [False, True],
    "compile": [True, "graph"],
    "reduce_dtype": [torch.float32],
    "chunk": ["1KiB"],
    "passes": [defaults(stage=3)],
    "plan": [Plan(stage=2)],
    "data": [("fsdp",)],
    "dynamic": [{"*": {0: (1, 64)}}],
    "max_programs": [2],
    "cache": [os.devnull],  # which no file can be in: that fails nothing
    "steps": [2],
    "rtol": [1e-3],
    "atol": [1e-3],
    "ranks": [2],
    "pass_state": [{}],
    "split": [{}],  # a mesh of ranks alone has no axis to split over
}
BAD: dict[str, list[Any]] = {
    "stage": [7, "3"],
    "memory": [-1, "much"],
    "to": ["host"],
    "donate": ["no"],
    "compile": ["fast"],
    "reduce_dtype": [torch.int8, "float32"],
    "chunk": [0, "a lot"],
    "passes": [7, [None]],
    "plan": [7, Plan(mesh=fzero.VirtualMesh(fsdp=4))],
    "data": [("model",), 3],
    "dynamic": [{"tokens": {0: None}}, {"*": {0: (5, 1)}}, 3],
    "max_programs": [0],
    "cache": [7, ""],
    "steps": [0],
    "rtol": ["small"],
    "atol": ["small"],
    "ranks": [0],
    "pass_state": [7, {"unknown": torch.ones(1)}],
    "split": [7, {"*": ("fsdp", 0)}],
}
BESIDE_PASSES = {"stage", "memory", "donate", "reduce_dtype", "chunk", "to", "plan"}
NAMES = {
    "ranks": "mesh axis fsdp",
    "data": "mesh axis 'model'",
    "split": "split '*'",
    "pass_state": "pass_state 'unknown'",
}
"""What errors call an option in the place of its name."""


def excludes(given: dict[str, Any]) -> set[str]:
    """The options of which one has to be named, of good values; none where all are taken."""
    names = given.keys()
    for decides in ("passes", "plan"):
        beside = {x for x in names if x in BESIDE_PASSES and x != decides and given[x] is not True}
        if decides in names and beside:
            return {*beside, decides}
    if {"stage", "memory"} <= names:
        return {"stage", "memory"}
    if "to" in names and "memory" not in names:
        return {"to"}
    if given.get("compile") == "graph":
        return {"compile"}  # on CPU
    return set()


def judge(given: dict[str, Any], bad: set[str], act: Any) -> str | None:
    """What is wrong with how these options are taken."""
    wanted = bad or excludes(given)
    try:
        act()
    except FzeroError as error:
        if not wanted:
            return f"{given}: refused: {error}"
        named = {each for x in wanted | excludes(given) for each in (x, NAMES.get(x, x))}
        return None if error.where.partition("[")[0] in named else f"{given}: {error}"
    except Exception as error:
        return f"{given}: raw {type(error).__name__}: {error}"
    return f"{given}: taken" if wanted else None


def list_pairs(options: list[str]) -> list[tuple[dict[str, Any], set[str]]]:
    """All pairs of options with good and bad values, of which at most one is bad, and the bad one."""
    made = []
    for a, b in itertools.combinations(options, 2):
        for x, y in itertools.product(GOOD[a], GOOD[b]):
            made.append(({a: x, b: y}, set[str]()))
        made += [({a: x, b: y}, {a}) for x, y in itertools.product(BAD[a], GOOD[b])]
        made += [({a: x, b: y}, {b}) for x, y in itertools.product(GOOD[a], BAD[b])]
    return made


def options_of(fn: Any) -> list[str]:
    """The keywords of a function."""
    return [x.name for x in inspect.signature(fn).parameters.values() if x.kind is x.KEYWORD_ONLY]


def give(step: Any) -> Any:
    """The loss of a step that is called once."""
    params = fzero.partition(layers(1), MESH)
    return step(params, SGD.init(params), torch.ones(4, 5))[2]


def test_every_option_has_values() -> None:
    for fn in (fzero.shard, fzero.simulate, fzero.check_equivalence):
        assert set(options_of(fn)) <= GOOD.keys() & BAD.keys()


def test_two_options_of_simulate() -> None:
    wrong = [
        judge(given, bad, lambda given=given: fzero.simulate(training(SGD), MESH, **given).trace)
        for given, bad in list_pairs(options_of(fzero.simulate))
    ]
    assert [x for x in wrong if x] == []


def test_two_options_of_check_equivalence() -> None:
    params = layers(1)

    def check(given: dict[str, Any]) -> None:
        fzero.check_equivalence(training(SGD), (params, SGD.init(params)), (torch.ones(4, 5),), **{"ranks": 2, **given})

    pairs = [x for x in list_pairs(options_of(fzero.check_equivalence)) if x[1] or excludes(x[0]) or "passes" in x[0]]
    assert [x for given, bad in pairs if (x := judge(given, bad, lambda given=given: check(given)))] == []


def shard_pairs(mesh: DeviceMesh) -> list[str]:
    pairs = list_pairs(options_of(fzero.shard))
    wrong = [judge(given, bad, lambda given=given: fzero.shard(loss, mesh, **given)) for given, bad in pairs]
    return [x for x in wrong if x]


def test_two_options_of_shard() -> None:
    assert run(1, shard_pairs) == [[]]


def test_passes_that_do_not_donate_leave_the_arguments() -> None:
    """And the error of a donated value says where to say so."""
    params = fzero.partition(layers(1), MESH)
    x, state = torch.ones(4, 5), SGD.init(params)
    fzero.simulate(training(SGD), MESH, passes=defaults(stage=3, in_place=False))(params, state, x)
    fzero.simulate(training(SGD), MESH, passes=defaults(stage=3))(params, state, x)
    with pytest.raises(FzeroError, match="where passes are given, in_place=False to fzero.passes.defaults"):
        fzero.simulate(training(SGD), MESH)(params, state, x)
    alone = r"(?m)^donate: is False, and passes are given; .*defaults\(stage=3, in_place=False\)$"
    with pytest.raises(FzeroError, match=alone):
        fzero.simulate(training(SGD), MESH, passes=defaults(stage=3), donate=False)
    with pytest.raises(FzeroError, match=r"(?m)^stage: is 2, and passes are given; .*defaults\(stage=2\)$"):
        fzero.simulate(training(SGD), MESH, passes=defaults(stage=3), stage=2)
