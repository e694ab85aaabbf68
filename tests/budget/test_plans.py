"""Plans: what was decided about a step is a value. By it another step has the same program, with no further search."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import axes
import pytest
import torch
from test_fit import case
from test_general import program_of

import fzero
from fzero import FzeroError, tree
from fzero.budget import fit
from fzero.passes import Plan, defaults
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.program.rates import GUESSES

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH = fzero.VirtualMesh(fsdp=2)
HOST = fzero.host()
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("unrolled", {"stage": 1}),
    ("scan", {"stage": 2, "donate": False}),
    ("microbatches", {"reduce_dtype": torch.bfloat16}),
    ("remat", {"chunk": "4KiB"}),
    ("unrolled", {"memory": "150KiB"}),
    ("remat by budget", {"memory": "110KiB", "to": HOST}),
    ("scan", {"memory": "180KiB", "chunk": "8KiB", "donate": False}),
]


def assert_same(got: Program, expected: Program) -> None:
    """But for what a search says of other budgets."""
    bare = replace(expected, remarks=got.remarks)
    assert find_difference(got, bare) is None and str(got) == str(bare) and got.lines() == bare.lines()
    assert got.memory() == expected.memory() and got.timeline() == expected.timeline()


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_step_by_its_own_plan_is_the_same(name: str, how: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    given = case(name)
    step = fzero.simulate(given.step, given.mesh, **how)
    searched, expected = step.trace(*given.args), fzero.unpartition(step(*given.args))
    plan = step.plan(*given.args)
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(fit, "Space", None)  # no further search
    again = fzero.simulate(given.step, given.mesh, plan=Plan.load(tmp_path / "plan.json"))
    assert_same(again.trace(*given.args), searched)
    assert again.plan(*given.args) == plan == searched.plan
    got = fzero.unpartition(again(*given.args))
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(expected)))


def test_a_plan_is_a_few_lines_and_has_the_rates_that_scheduled_it(tmp_path: Path) -> None:
    given = case("unrolled")
    step = fzero.simulate(given.step, given.mesh, memory="110KiB", to=HOST)
    step._pipeline.reschedule(GUESSES["cuda"]._replace(wire=1e8, axes=(("fsdp", 1e8),)))
    searched, plan = step.trace(*given.args), step.plan(*given.args)
    again = fzero.simulate(given.step, given.mesh, plan=plan)
    assert_same(again.trace(*given.args), searched)
    assert searched.measured == plan.rates == again.trace(*given.args).measured
    assert re.fullmatch(
        r"stage: 3\n(keep: .*\n)?again: (\w+( x\d+)?(, )?)+(\.\.\.)? \(\d+\)\non_host: .*\nto: fzero\.host\(pin=True\)"
        r"\naway: .*\n(ahead: .*\n)?mesh: VirtualMesh\(fsdp=2\)\nrates: Rates\(.*\)",
        str(plan),
    ), str(plan)


def test_a_plan_holds_at_all_lengths() -> None:
    """A plan of one length serves another one, in a program with open sizes and in one that is traced by itself."""
    given = case("unrolled")
    params, state, x = given.args
    batches = [x, x[:64], x[:112]]
    searched = fzero.simulate(given.step, MESH, memory="110KiB", to=HOST, donate=False)
    found, _, same = (searched.plan(params, state, x) for x in batches)
    assert found == same and found.again and found.on_host and found.away
    plan = replace(found, on_host=())
    step, free = fzero.simulate(given.step, MESH, plan=plan), fzero.simulate(given.step, MESH, donate=False)
    assert [step.plan(params, state, x) for x in batches] == [plan] * 3
    assert all(len(each._pipeline._generals._found) == 1 for each in (step, searched))
    assert_same(program_of(step, params, state, batches[2]), step.trace(params, state, batches[2]))
    ran = [tree.leaves(fzero.unpartition(each(params, state, batches[2]))) for each in (free, searched, step)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*ran))


def test_a_plan_of_a_mesh_with_model_axes() -> None:
    mesh = fzero.VirtualMesh(fsdp=2, tp=2)
    params = fzero.partition(axes.WEIGHTS, mesh, split=axes.SPLIT)
    args, step = (params, axes.ADAMW.init(params), axes.EXAMPLES), axes.train(axes.split_mlp)
    free = fzero.simulate(step, mesh, data=("fsdp",), donate=False)
    limit = free.trace(*args).memory().peak - 200
    searched = fzero.simulate(step, mesh, data=("fsdp",), memory=limit, to=HOST, donate=False)
    again = fzero.simulate(step, mesh, data=("fsdp",), plan=searched.plan(*args))
    assert searched.plan(*args).away and again.trace(*args).memory().peak <= limit
    assert_same(again.trace(*args), searched.trace(*args))
    results = [tree.leaves(fzero.unpartition(each(*args))) for each in (free, again)]
    assert all(map(torch.equal, *results))


def test_a_file_of_a_plan_is_readable_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = Plan(keep=["blocks.1", "blocks.0"], chunk="4KiB", to=fzero.disk(tmp_path), away=["0.w"], in_place=False)
    assert plan.keep == {"blocks.0", "blocks.1"} and plan.chunk == 4096
    plan.save(path)
    rows = json.loads(path.read_text())
    assert list(rows) == ["fzero plan", "stage", "keep", "to", "away", "chunk", "in_place"]
    assert rows["keep"] == ["blocks.0", "blocks.1"] and Plan.load(path) == plan
    wrong = {
        "[]": "is no plan: TypeError.*; give a file that Plan.save wrote",
        "{": "is no plan: JSONDecodeError.*Expecting",
        '{"stage": 3}': "is no plan: KeyError.*fzero plan",
        '{"fzero plan": 2}': "is no plan: .*of another version than 1",
        '{"fzero plan": 1, "kep": []}': r"keys: 'kep' is not of a plan; the nearest are keep, ",
        '{"fzero plan": 1, "stage": 4}': "stage: is 4; stages are 0, 1, 2 and 3",
        '{"fzero plan": 1, "keep": "blocks.0"}': "keep: is 'blocks.0'; give names",
        '{"fzero plan": 1, "to": {"hst": {}}}': "is no plan: TypeError.*hst",
        '{"fzero plan": 1, "to": {"host": {}, "disk": "x"}}': "is no plan: TypeError.*of the host or of a disk",
        '{"fzero plan": 1, "in_place": "no"}': "in_place: is 'no'",
        '{"fzero plan": true}': "of another version",
        '{"fzero plan": 1, "again": ["gelu"], "on_host": ["gelu"]}': "both computed again and moved to the host: gelu",
        '{"fzero plan": 1, "rates": {"flops": "fast"}}': "rates: is no rates: .*memory",
        '{"fzero plan": 1, "reduce_dtype": "float31"}': "is no plan: AttributeError.*float31",
        '{"fzero plan": 1, "mesh": {"fsdp": 0}}': "mesh axis fsdp: has size 0",
    }
    for text, problem in wrong.items():
        path.write_text(text)
        with pytest.raises(FzeroError, match=rf"^plan '.*plan\.json':? .*{problem}"):
            Plan.load(path)
    with pytest.raises(FzeroError, match="is no plan: FileNotFoundError.*No such file"):
        Plan.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stage": 2, "keep": ["a"]}, "keep: names buckets, and the stage is 2, which gathers no bucket twice"),
        ({"away": ["0.w"]}, "away: names state, and `to` is None"),
        ({"ahead": -1}, "ahead: is -1; give a number of bytes"),
        ({"again": [3]}, r"again: is \[3\]; give names"),
        ({"to": "host"}, "to: is 'host'; give a placement"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(FzeroError, match=problem):
        Plan(**fields)


def test_a_plan_of_another_step_is_refused_by_the_name_that_is_unknown() -> None:
    given = case("unrolled")

    def trace(**fields: Any) -> Program:
        return fzero.simulate(given.step, given.mesh, plan=Plan(**fields)).trace(*given.args)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"keep": ["block.1"]}, r"keep: 'block\.1' is not of the buckets .*; the nearest are blocks\.1, blocks\.\d, "),
        ({"again": ["gelu_7"]}, "again: 'gelu_7' is not of the values that .*again; the nearest are gelu_\\d, gelu"),
        ({"again": ["mm_9"]}, "again: 'mm_9' is not of"),  # of the backward pass
        ({"on_host": ["glu"]}, "on_host: 'glu' is not of the values of the step; the nearest are gelu, "),
        (
            {"to": HOST, "away": ["1.0.nu.blocks.0.u"]},
            r"away: '1.* is not of the state .*; the nearest are 1\.0\.nu\.bl",
        ),
    ]
    for fields, problem in wrong:
        with pytest.raises(FzeroError, match=problem):
            trace(**fields)
    way_out = r"fsdp=2\); search again with memory=, or take it as it is: dataclasses\.replace\(plan, mesh=None\)"
    with pytest.raises(
        FzeroError, match=rf"^plan: was made for VirtualMesh\(fsdp=4\), and the step runs on .*{way_out}"
    ):
        trace(mesh=fzero.VirtualMesh(fsdp=4))


def test_passes_of_a_user_have_no_plan_and_what_they_cannot_do_is_refused() -> None:
    step = fzero.simulate(torch.sum, MESH, passes=defaults(stage=3))
    assert step.trace(torch.ones(2)).plan is None
    with pytest.raises(FzeroError, match="plan: passes were given to sum, and nothing is known of them"):
        step.plan(torch.ones(2))
    with pytest.raises(FzeroError, match=r"again: counts before any pass runs; give shard\(\.\.\., plan=plan\)"):
        defaults(Plan(again=["gelu"]))
    with pytest.raises(
        FzeroError, match=r"^chunk: is '1KiB', and a plan .*; give plan=dataclasses\.replace\(plan, chunk="
    ):
        fzero.simulate(torch.sum, MESH, plan=Plan(), chunk="1KiB")
    with pytest.raises(
        FzeroError, match="^memory: is '1KiB', and a plan is given, which decides that; give memory or plan"
    ):
        fzero.simulate(torch.sum, MESH, plan=Plan(), memory="1KiB")
