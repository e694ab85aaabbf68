"""The pipeline: one program for each signature of a step's arguments, and what the step returns of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.pipeline import Pipeline
from fzero.program.program import Program
from fzero.ranks.virtual import virtual
from fzero.returned import Returned
from fzero.values.sharded import Sharded

MESH = VirtualMesh(fsdp=2)
ON = virtual(MESH)


def double(params: Any, *rest: Any) -> Any:
    return tree.map(lambda p: p * 2, params)


def state(**how: Any) -> Any:
    return fzero.partition({"w": torch.ones(4, 3), "b": torch.ones(5)}, MESH, **how)


def pipeline(step: Any = double, limit: int = 16) -> Pipeline[Program]:
    return Pipeline(step, ON, (), lambda on, program: program, limit)


def made(given: Pipeline[Program], *args: Any) -> Program:
    return given.prepare(*tree.flatten(args))


def test_arguments_of_one_signature_have_one_program() -> None:
    given = pipeline()
    first = made(given, state(), torch.ones(2, 3), 1)
    assert made(given, state(), torch.zeros(2, 3), 1) is first


def test_the_program_of_a_call_is_looked_up() -> None:
    params = state()
    step = fzero.simulate(double, MESH, donate=False)
    for rows in (2, 4, 6):  # the last two are of one trace with open sizes
        x = torch.ones(rows, 3)
        program = step.program(params, x)
        step(params, x)
        assert step.program(params, x) is program is step.report(params, x).program
        assert step.trace(params, x) is not program


def test_the_program_used_longest_ago_goes() -> None:
    given, params = pipeline(limit=2), state()
    one, two = (made(given, params, torch.ones(n)) for n in (1, 2))
    assert made(given, params, torch.ones(1)) is one
    made(given, params, torch.ones(3))
    assert made(given, params, torch.ones(1)) is one
    assert made(given, params, torch.ones(2)) is not two


def test_state_in_another_bucket_is_named_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    given, whole = pipeline(), {f"leaf{i}": torch.ones(4) for i in range(20)}
    for layers in (lambda path: "all", lambda path: path):
        made(given, fzero.partition(whole, fzero.VirtualMesh(fsdp=2), layers=layers))
    (message,) = caplog.messages
    same = "torch.float32 [4] of leaf0 on VirtualMesh(fsdp=2)"
    assert (
        f"argument 0.leaf0: was {same}, one of 20 in bucket 'all'" in message
        and f"is {same}, alone in bucket" in message
    )


def test_shapes_that_keep_changing_end_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    given, params = pipeline(limit=3), state()
    for length in range(4, 40):
        made(given, params, {"labels": torch.ones(4), "inputs": torch.ones(4, length)})
    assert len(given._cache) == 3
    *traced, last = caplog.messages
    assert len(traced) == 2 and all("is traced again: its arguments differ" in message for message in traced)
    assert last.endswith(
        "has 3 programs, and drops one for each further one: argument 1.inputs had 4 shapes, [4, 7], [4, 6], [4, 5] "
        "and 1 more; round its lengths up a few fixed ones, as the ladder of fzero.data.loader does, or give "
        "max_programs"
    )


@pytest.mark.parametrize(
    ("changing", "said"),
    {
        "a number": (
            lambda n: {"rate": n / 2},
            "argument 1.rate had 3 forms, '1.0', '0.5', '0.0'; give what changes as a",
        ),
        "a structure": (lambda n: {f"x{n}": torch.ones(2)}, "argument 1.x1: this leaf is missing"),
        "dtypes": (
            lambda n: torch.ones(2, dtype=[torch.float32, torch.float64, torch.int32][n]),
            "argument 1 had 3 forms, torch.int32 [2] on cpu with strides (1,), torch.float64 [2]",
        ),
        "functions": (lambda n: lambda x: x, "argument 1 had 3 forms, another object, another object, another object"),
    }.values(),
)
def test_what_keeps_changing_is_named(changing: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    given, params, kept = pipeline(limit=2), state(), [changing(n) for n in range(3)]
    for x in kept:
        made(given, params, x)
    assert said in caplog.messages[-1]


def test_surroundings_that_keep_changing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    rate = 1.0
    given, params = pipeline(lambda params: tree.map(lambda p: p * rate, params), 2), state()
    for _ in range(4):
        made(given, params)
        rate += 1.0
    assert len(caplog.messages) == 2 and "has 2 programs" in caplog.messages[1] and "reads rate" in caplog.messages[1]


def test_settings_that_keep_changing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    given, params = pipeline(limit=1), state()
    made(given, params)
    with torch.autocast("cpu", torch.bfloat16):
        made(given, params)
    assert caplog.messages[-1].endswith("settings such as autocast keep changing")


def on_ranks(mesh: DeviceMesh) -> tuple[list[float], int]:
    """The results of a step that keeps one program, for shapes that come and go, and how many programs it keeps."""
    step = fzero.shard(lambda params, x: (params, x.sum() * params["w"].sum()), mesh, max_programs=1)
    params = fzero.partition({"w": torch.ones(4)}, mesh)
    sums = [step(params, torch.ones(length))[1].item() for length in (1, 2, 1, 3, 2)]
    return sums, len(step._pipeline._cache)


def test_ranks_that_drop_programs_stay_together() -> None:
    assert run(2, on_ranks) == [([4.0, 8.0, 4.0, 12.0, 8.0], 1)] * 2


@pytest.mark.parametrize("limit", [0, 1.5, None])
def test_a_number_of_programs_is_a_whole_number(limit: Any) -> None:
    with pytest.raises(FzeroError, match=f"^max_programs: is {limit!r}"):
        fzero.simulate(double, MESH, max_programs=limit)


def test_garbage_is_not_collected_meanwhile() -> None:
    given = pipeline(lambda params: (params, gc.isenabled()))
    assert made(given, state()).results[-1].constant is False and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        made(pipeline(lambda params: 1 / 0), state())
    assert gc.isenabled()
    gc.disable()
    try:
        made(pipeline(), state())
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "other",
    [
        lambda: (state(dtype=torch.float64), torch.ones(2, 3), 1),
        lambda: (state(device="meta"), torch.ones(2, 3), 1),
        lambda: (state(persist=5), torch.ones(2, 3), 1),
        lambda: (state(layers=lambda path: "all"), torch.ones(2, 3), 1),
        lambda: ({"w": state()["w"]}, torch.ones(2, 3), 1),
        lambda: ([state()], torch.ones(2, 3), 1),
        lambda: (state(), torch.ones(3, 2), 1),
        lambda: (state(), torch.ones(3, 2).T, 1),
        lambda: (state(), torch.ones(2, 3, dtype=torch.int64), 1),
        lambda: (state(), torch.ones(2, 3), 2),
        lambda: (state(), torch.ones(2, 3), 1.0),
        lambda: (state(), torch.ones(2, 3), True),
    ],
)
def test_each_signature_has_its_own(other: Any) -> None:
    given = pipeline()
    first = made(given, state(), torch.ones(2, 3), 1)
    second = made(given, *other())
    assert second is not first
    assert made(given, state(), torch.ones(2, 3), 1) is first and made(given, *other()) is second


def test_what_a_step_returns_has_the_form_of_what_it_was_given() -> None:
    given, params = pipeline(), state()
    program = made(given, params)
    returned = Returned(program, ON)
    for _ in range(3):
        params = returned([leaf.local * 2 for leaf in tree.leaves(params)])
        assert made(given, params) is program
        for leaf in tree.leaves(params):
            assert leaf.form == Sharded(leaf.local, leaf.form.layout, leaf.index, leaf.on).form
    assert tree.leaves(params)[0].local.tolist() == [8.0] * 5


def test_state_of_another_mesh_is_refused_though_its_layout_is_known() -> None:
    given, params = pipeline(), state()
    made(given, params)
    strangers = tree.map(lambda leaf: Sharded(leaf.local, leaf.form.layout, leaf.index, type(ON)(MESH)), params)
    with pytest.raises(FzeroError, match="another mesh"):
        made(given, strangers)


def test_what_is_refused_is_not_said_to_be_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    given, params = pipeline(), state()
    made(given, params, 1)
    with pytest.raises(FzeroError, match=r"^argument 1: a set is no tensor and does not hash"):
        made(given, params, {1})
    assert not caplog.messages
    made(given, params, 2)
    assert len(caplog.messages) == 1 and "traced again" in caplog.messages[0]


def test_constants_stand_where_the_step_returned_them() -> None:
    def step(params: Any, x: Tensor) -> Any:
        return "first", params["b"] * 2, 3, 4, (x.sum(), params["w"] + 1), "last"

    program = made(pipeline(step), state(), torch.ones(2))
    b, mean, w = torch.full((5,), 2.0), torch.ones(()), torch.full((12,), 2.0)
    first, its_b, three, four, (its_mean, its_w), last = Returned(program, ON)([b, mean, w])
    assert (first, three, four, last) == ("first", 3, 4, "last")
    assert its_mean is mean and its_b.local is b and its_w.local is w
    assert (its_b.path, its_w.path, its_b.on) == ("b", "w", ON)


def test_all_substitutions_at_once_are_those_one_by_one() -> None:
    def step(params: Any, x: Tensor) -> list[Tensor]:
        first, second = x * 2, x * 3
        return [*torch._foreach_add([first, second, first], [x, first, second]), second.view(-1)]

    def replaced(together: bool) -> str:
        program = made(pipeline(step), state(), torch.ones(2, 3)).copy()
        first, second = (node for node in program.graph.nodes if node.name in ("mul", "mul_1"))
        with program.graph.inserting_before(first):
            news = {old: program.emit(torch.ops.aten.neg.default, old.args[0]) for old in (first, second)}
        if together:
            program.substitute_all(news)
        else:
            for old, new in news.items():
                program.substitute(old, new)
        (view,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
        storage = view.args[0].meta["val"].untyped_storage()._cdata
        assert view.meta["val"].untyped_storage()._cdata == storage  # it has learnt whose memory it now shares
        return str(program.graph)

    assert replaced(together=True) == replaced(together=False)
