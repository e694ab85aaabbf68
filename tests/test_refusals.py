"""Bad input, on two ranks: each an FzeroError that names the leaf, the numbers and the way out, on every rank, soon."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mistakes import IN_A_STEP, place_state
from processes import Outcome, Refusal, refusal, run_cases, values
from programs import training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import optim, tree

SOON = 20.0
"""Seconds, of which a busy machine may need some. A collective that a rank does not join waits three times as long."""

OPTIMIZER = optim.adamw(0.1)
Params = dict[str, Any]


def full_params() -> Params:
    return {"layers": [{"w": torch.ones(5, 7), "b": torch.ones(7)}], "scale": torch.tensor(0.5)}


def batch_of(rows: int = 2) -> Tensor:
    return torch.ones(rows, 5)


def loss_of(params: Params, x: Tensor) -> Tensor:
    (layer,) = params["layers"]
    return ((x @ layer["w"] + layer["b"]) * params["scale"]).square().mean()


train_step = training(OPTIMIZER, loss_of)


class Setup(NamedTuple):
    """A job on one rank, ready for its first step."""

    mesh: DeviceMesh
    rank: int
    params: Params
    state: Any
    step: Callable[..., Any]


def setup(mesh: DeviceMesh, step: Callable[..., Any] = train_step) -> Setup:
    params = fzero.partition(full_params(), mesh)
    return Setup(mesh, mesh.get_rank(), params, OPTIMIZER.init(params), fzero.shard(step, mesh, donate=False))


# one tree, one mesh


def partitioned_twice(mesh: DeviceMesh) -> Refusal:
    return refusal(lambda: fzero.partition({"all": setup(mesh).params}, mesh))


def of_another_mesh(mesh: DeviceMesh) -> list[Refusal]:
    """State of one mesh in a step on another; the whole tree, one leaf of it, and a trace."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "fsdp"))
    job, other = setup(mesh), fzero.partition(full_params(), grid)
    mixed = {**job.params, "scale": other["scale"]}
    return [
        refusal(lambda: job.step(other, OPTIMIZER.init(other), batch_of())),
        refusal(lambda: job.step(mixed, job.state, batch_of())),
        refusal(lambda: job.step.trace(other, OPTIMIZER.init(other), batch_of())),  # type: ignore[attr-defined]
        refusal(lambda: fzero.shard(train_step, grid)(job.params, job.state, batch_of())),
    ]


def of_no_mesh(mesh: DeviceMesh) -> list[Refusal]:
    """What is not a mesh of devices with named axes."""
    nameless = init_device_mesh("cpu", (2,))
    virtual = fzero.VirtualMesh(fsdp=2)
    return [
        refusal(lambda: fzero.partition(full_params(), nameless)),
        refusal(lambda: fzero.shard(train_step, nameless)),
        refusal(lambda: fzero.shard(train_step, virtual)),
    ]


def of_axes_without_a_meaning(mesh: DeviceMesh) -> list[Refusal]:
    """Axes that are neither named "replica" or "fsdp" nor in `data`, and a mesh whose shard axis nobody can know."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "fsdp"))
    nowhere = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    return [
        refusal(lambda: fzero.shard(train_step, grid)),
        refusal(lambda: fzero.shard(train_step, grid, data=("dp", "fsdp"))),
        refusal(lambda: fzero.shard(train_step, grid, data=("tp",))),
        refusal(lambda: fzero.shard(train_step, nowhere, data=("tp", "dp"))),
        refusal(lambda: fzero.partition(full_params(), nowhere)),
    ]


def unusual_arguments(mesh: DeviceMesh) -> list[Refusal]:
    """A stage that there is not, and a constant that does not hash."""
    job = setup(mesh)
    return [
        refusal(lambda: fzero.shard(train_step, mesh, stage=4)(job.params, job.state, batch_of())),
        refusal(lambda: job.step(job.params, job.state, {"x": batch_of(), "note": bytearray(b"text")})),
    ]


# gradients


def missing_leaf(params: Params, state: Any, x: Tensor) -> Any:
    grads = fzero.grad(loss_of)(params, x)
    del grads["layers"][0]["b"]
    return OPTIMIZER.update(grads, state, params)


def other_shape(params: Params, state: Any, x: Tensor) -> Any:
    grads = fzero.grad(loss_of)(params, x)
    grads["layers"][0]["w"] = params["layers"][0]["b"]
    return OPTIMIZER.update(grads, state, params)


def surplus_leaf(params: Params, state: Any, x: Tensor) -> Any:
    grads = fzero.grad(loss_of)(params, x)
    return optim.apply_updates(params, {**grads, "spare": grads["scale"]})


def other_gradients(mesh: DeviceMesh) -> list[Refusal]:
    """Gradients that are not as the parameters, in a step and outside of one."""
    found = []
    for wrong in (missing_leaf, other_shape, surplus_leaf):
        job = setup(mesh, wrong)
        found += [
            refusal(lambda job=job: job.step(job.params, job.state, batch_of())),
            refusal(lambda job=job, wrong=wrong: wrong(job.params, job.state, batch_of())),
        ]
    return found


def integer_parameters(mesh: DeviceMesh) -> list[Refusal]:
    params = {**full_params(), "steps": torch.tensor([3, 4])}
    placed = fzero.partition(params, mesh)
    step = fzero.shard(lambda params, x: fzero.value_and_grad(loss_of)(params, x), mesh)
    return [
        refusal(lambda: fzero.value_and_grad(loss_of)(params, batch_of())),
        refusal(lambda: fzero.grad(loss_of)(placed, batch_of())),
        refusal(lambda: step(placed, batch_of())),
    ]


def no_single_number(mesh: DeviceMesh) -> list[Refusal]:
    """Functions whose value is not one floating number."""
    params = fzero.partition(full_params(), mesh)
    functions = [lambda p: p["layers"][0]["b"], lambda p: p["scale"].sum() > 0, lambda p: (p["scale"].sum(), 1)]
    return [refusal(lambda fn=fn: fzero.value_and_grad(fn)(params)) for fn in functions]


# Python that looks at data


def branching(params: Params, state: Any, x: Tensor) -> Any:
    value = loss_of(params, x)
    if value > 1:  # line: branching
        value = value / 2
    return params, state, value


def looping(params: Params, state: Any, x: Tensor) -> Any:
    while (params["scale"] < 4).all():  # line: looping
        params = tree.map(lambda p: 2 * p, params)
    return params, state, x.sum()


def converting(params: Params, state: Any, x: Tensor) -> Any:
    rate = float((x * params["scale"]).mean())  # line: converting
    return tree.map(lambda p: p * rate, params), state, x.sum()


def itemizing(params: Params, state: Any, x: Tensor) -> Any:
    return params, state, params["scale"].item()  # line: itemizing


def inside_of_a_loss(params: Params, state: Any, x: Tensor) -> Any:
    def loss(params: Params) -> Tensor:
        value = loss_of(params, x)
        return value if value.isfinite() else value * 0  # line: inside_of_a_loss

    return fzero.grad(loss)(params), state, x.sum()


def masking(params: Params, state: Any, x: Tensor) -> Any:
    return params, state, x[x * params["scale"] > 0].sum()  # line: masking


LOOKING = [branching, looping, converting, itemizing, inside_of_a_loss, masking]


def looking_at_data(mesh: DeviceMesh) -> dict[str, Refusal]:
    found = {}
    for wrong in LOOKING:
        job = setup(mesh, wrong)
        found[wrong.__name__] = refusal(lambda job=job: job.step(job.params, job.state, batch_of()))
    return found


# values that differ between ranks


def drifting_apart(mesh: DeviceMesh) -> dict[str, Refusal]:
    """Each step of the catalogue, on a mesh with the axes that they name."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "fsdp"))
    state, x = place_state(grid), batch_of()
    return {name: refusal(lambda: fzero.shard(wrong.step, grid)(state, x)) for name, wrong in IN_A_STEP.items()}  # noqa: B023


def averaged_first(mesh: DeviceMesh) -> list[float]:
    """The way out that the refusals name: a mean over ranks may be state. The new scale, a number."""

    def step(params: Params, x: Tensor) -> Params:
        return {**params, "scale": params["scale"] * fzero.pmean(x.mean(), "fsdp")}

    params = fzero.partition(full_params(), mesh)
    x = batch_of() * (1 + 2 * mesh.get_rank())  # 1 and 3
    return fzero.unpartition(fzero.shard(step, mesh)(params, x)["scale"]).tolist()


CASES = {
    case.__name__: case
    for case in (
        partitioned_twice, of_another_mesh, of_no_mesh, of_axes_without_a_meaning, unusual_arguments, other_gradients,
        integer_parameters, no_single_number, looking_at_data, drifting_apart, averaged_first,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outcome]]:
    return run_cases(2, CASES)


def assert_refused(refusal: Refusal, *parts: str) -> None:
    """An FzeroError, soon, whose message has these parts and a way out."""
    assert refusal.kind == "FzeroError", refusal
    missing = [part for part in parts if part not in refusal.message]
    assert not missing, f"{missing} not in: {refusal.message}"
    assert "; " in refusal.message, f"no way out: {refusal.message}"
    assert refusal.seconds < SOON


def line_of(name: str) -> str:
    """`file:line` of the line of this file that is marked with this name."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# line: {name}")]
    return f"{Path(__file__).name}:{number} in "


def test_a_tree_is_partitioned_once(found: dict[str, list[Outcome]]) -> None:
    for refused in values(found["partitioned_twice"]):
        assert_refused(refused, "all.layers.0.b: ", "partitioned already", "2 ranks", "fzero.unpartition")


def test_state_of_another_mesh_is_named(found: dict[str, list[Outcome]]) -> None:
    for whole, mixed, traced, reverse in values(found["of_another_mesh"]):
        for refused in (whole, traced):
            assert_refused(refused, "layers.0.b: ", "VirtualMesh(replica=1, fsdp=2)", "VirtualMesh(fsdp=2)")
        assert_refused(mixed, "scale: ", "VirtualMesh(replica=1, fsdp=2)", "partition the tree on the step's mesh")
        assert_refused(reverse, "layers.0.b: ", "VirtualMesh(replica=1, fsdp=2)", "VirtualMesh(fsdp=2)")


def test_a_mesh_has_devices_and_names(found: dict[str, list[Outcome]]) -> None:
    for nameless, nameless_step, virtual_step in values(found["of_no_mesh"]):
        assert_refused(nameless, "mesh: ", "no named axes", "mesh_dim_names")
        assert_refused(nameless_step, "mesh: ", "no named axes", "mesh_dim_names")
        assert_refused(virtual_step, "mesh: ", "VirtualMesh(fsdp=2)", "DeviceMesh")


def test_axes_have_a_meaning(found: dict[str, list[Outcome]]) -> None:
    for unknown, lacking, without, step, state in values(found["of_axes_without_a_meaning"]):
        assert_refused(unknown, "mesh axis 'tp': ", "VirtualMesh(tp=1, fsdp=2)", "data=('fsdp', 'tp')")
        assert_refused(lacking, "mesh axis 'dp': ", "('tp', 'fsdp')")
        assert_refused(without, "data: ", "'fsdp'", "data=('tp', 'fsdp')")
        for refused in (step, state):
            assert_refused(refused, "mesh: ", "('tp', 'dp')", '"fsdp"')


def test_arguments_that_make_no_sense_are_named(found: dict[str, list[Outcome]]) -> None:
    for stage, constant in values(found["unusual_arguments"]):
        assert_refused(stage, "stage: ", "4", "1, 2 and 3")
        assert_refused(constant, "2.note: ", "bytearray")


def test_gradients_of_another_structure_are_named(found: dict[str, list[Outcome]]) -> None:
    for refusals in values(found["other_gradients"]):
        for missing in refusals[:2]:
            assert_refused(missing, "layers.0.b: ", "missing", "3 leaves expected, 2 given")
        for shape in refusals[2:4]:
            assert_refused(shape, "layers.0.w: ", "(7,)", "(5, 7)")
        for surplus in refusals[4:]:
            assert_refused(surplus, "spare: ", "not expected", "3 leaves expected, 4 given")


def test_an_integer_parameter_has_no_gradient(found: dict[str, list[Outcome]]) -> None:
    for refusals in values(found["integer_parameters"]):
        for refused in refusals:
            assert_refused(refused, "steps: ", "int64", "fzero.tree.split")


def test_a_gradient_is_of_one_number(found: dict[str, list[Outcome]]) -> None:
    for sharded, boolean, several in values(found["no_single_number"]):
        assert_refused(sharded, "value_and_grad: ", "not one floating number")
        assert_refused(boolean, "value_and_grad: ", "bool")
        assert_refused(several, "value_and_grad: ", "tuple")


@pytest.mark.parametrize("name", [step.__name__ for step in LOOKING])
def test_python_that_needs_data_is_refused_with_its_line(found: dict[str, list[Outcome]], name: str) -> None:
    for refusals in values(found["looking_at_data"]):
        assert_refused(refusals[name], line_of(name), "torch.where")


@pytest.mark.parametrize("name", IN_A_STEP)
def test_what_would_let_ranks_drift_apart_is_refused_with_leaf_and_line(
    found: dict[str, list[Outcome]], name: str
) -> None:
    for refusals in values(found["drifting_apart"]):
        assert_refused(refusals[name], IN_A_STEP[name].message, "fzero.pmean(x, ")


def test_a_mean_over_ranks_may_be_state(found: dict[str, list[Outcome]]) -> None:
    assert values(found["averaged_first"]) == [1.0, 1.0]  # 0.5 times the mean of 1 and 3


def test_an_error_survives_the_way_to_another_process() -> None:
    error = fzero.FzeroError("blocks.3.up", "has 12 elements, 16 expected", "partition the tree again")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) and (copied.where, copied.way_out) == (error.where, error.way_out)
