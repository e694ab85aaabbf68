"""`fzero.accumulate`: the gradient of a batch, whatever its division over microbatches and ranks."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from processes import Outcome, run_cases, values
from programs import calls, measure_peak
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import ops, optim, tree

pytestmark = pytest.mark.usefixtures("shared_traces")

SYNCS = [None, "once", "each"]


def params(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    shapes = {"w": (4, 5), "b": (5,), "v": (5, 1)}
    return {"layer": {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}}


def batch(rows: int = 12) -> Any:
    """Rows with unequal weights: the first ones have none."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(rows, generator=generator) > 0.5).double()
    mask[:3] = 0
    mask[-1] = 1
    return {"x": torch.randn(rows, 4, generator=generator, dtype=torch.float64), "mask": mask, "scale": 2}


def sums(p: Any, batch: Any) -> tuple[Tensor, Tensor]:
    layer = p["layer"]
    h = torch.tanh(batch["x"].to(layer["w"].dtype) @ layer["w"] + layer["b"]) @ layer["v"]
    return (h[:, 0].square() * batch["mask"] * batch["scale"]).sum(), batch["mask"].sum()


def whole(p: Any, batch: Any) -> Tensor:
    total, weight = sums(p, batch)
    return total / weight


def assert_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
def test_the_gradient_of_a_batch_on_plain_tensors(microbatches: int) -> None:
    assert_equal(
        fzero.accumulate(sums, microbatches)(params(), batch()), fzero.value_and_grad(whole)(params(), batch())
    )


def take_turns(*columns: Any) -> list[Any]:
    """The rows of a product, with True or False in front. Rows that are neighbours in one column have unlike ones."""
    counts = itertools.product(*(range(len(column)) for column in columns))
    return [(sum(at) % 2 == 0, *(column[i] for i, column in zip(at, columns))) for at in counts]


@pytest.mark.parametrize(
    ("donate", "persist", "world", "stage", "sync"), take_turns([0, 6], [1, 2, 4], [1, 2, 3], SYNCS)
)
def test_the_gradient_of_a_batch_on_ranks(donate: bool, persist: int, world: int, stage: int, sync: Any) -> None:
    mesh = fzero.VirtualMesh(fsdp=world)
    step = fzero.simulate(
        lambda p, batch: fzero.accumulate(sums, 3, sync=sync)(p, batch), mesh, stage=stage, donate=donate
    )
    loss, grads = step(fzero.partition(params(), mesh, persist=persist), batch())
    assert_equal((loss, fzero.unpartition(grads)), fzero.value_and_grad(whole)(params(), batch()))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_a_mesh_of_two_axes(stage: int, sync: Any) -> None:
    mesh = fzero.VirtualMesh(replica=2, fsdp=2)
    step = fzero.simulate(lambda p, batch: fzero.accumulate(sums, 3, sync=sync)(p, batch), mesh, stage=stage)
    loss, grads = step(fzero.partition(params(), mesh), batch())
    assert_equal((loss, fzero.unpartition(grads)), fzero.value_and_grad(whole)(params(), batch()))


@pytest.mark.parametrize("persist", [0, 6])
@pytest.mark.parametrize("sync", ["each", "once"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_are_averaged_once(stage: int, sync: str, persist: int) -> None:
    """In every turn gradients are averaged over the shard axis at most."""
    mesh = fzero.VirtualMesh(replica=2, fsdp=3)
    p = fzero.partition(params(), mesh, persist=persist)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    step = fzero.simulate(train(optimizer, 4, sync=sync), mesh, stage=stage)
    program = step.trace(p, optimizer.init(p), batch(24))
    moved = Counter((entry.op, entry.axis) for entry in program.comm() if entry.nbytes > 24)  # not of numbers
    scatters = 4 if sync == "each" else 1
    assert moved["reduce_scatter", "fsdp"] == scatters and moved["all_reduce", "replica"] <= 2
    whole_leaves = 1 if persist else 0
    assert moved["all_reduce", "fsdp"] + moved["all_reduce", "replica+fsdp"] == scatters * whole_leaves
    q, state = params(), optimizer.init(params())
    got, _, loss = step(p, optimizer.init(p), batch(24))
    q, state, expected = train(optimizer, 4)(q, state, batch(24))
    assert_equal((fzero.unpartition(got), loss), (q, expected))


@pytest.mark.parametrize(("sync", "scatters"), [("each", 4), ("once", 1)])
def test_a_leaf_without_a_gradient_leaves_the_others_their_one_mean(sync: str, scatters: int) -> None:
    """Gradients of all leaves are added by one list operation."""
    mesh = fzero.VirtualMesh(replica=2, fsdp=2)
    whole_params = params() | {"unused": torch.ones(3, dtype=torch.float64)}
    p = fzero.partition(whole_params, mesh)
    step = fzero.simulate(lambda p, batch: fzero.accumulate(sums, 4, sync=sync)(p, batch), mesh, stage=2)
    moved = Counter(entry.op for entry in step.program(p, batch(16)).comm() if entry.nbytes > 16)  # not of sums
    assert moved["reduce_scatter"] == scatters and moved["all_reduce"] == 1
    loss, grads = step(p, batch(16))
    assert_equal((loss, fzero.unpartition(grads)), fzero.value_and_grad(whole)(whole_params, batch(16)))


def test_replicas_are_averaged_in_the_dtype_of_reduce() -> None:
    mesh = fzero.VirtualMesh(replica=2, fsdp=2)
    narrow = fzero.precision(torch.float32, reduce=torch.bfloat16)(sums)
    step = fzero.simulate(lambda p, batch: fzero.accumulate(narrow, 3)(p, batch), mesh)
    moved = step.trace(fzero.partition(params(torch.float32), mesh), batch()).comm()
    means = [entry for entry in moved if entry.op == "reduce_scatter" or (entry.op, entry.axis, entry.dtype) == (
        "all_reduce", "replica", torch.bfloat16
    )]  # fmt: skip
    assert [entry.dtype for entry in means] == [torch.bfloat16] * 4


def train(optimizer: Any, microbatches: int, **how: Any) -> Any:
    def step(p: Any, state: Any, batch: Any) -> Any:
        loss, grads = fzero.accumulate(sums, microbatches, **how)(p, batch)
        updates, state = optimizer.update(grads, state, p)
        return optim.apply_updates(p, updates), state, loss

    return step


OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))


def program_of(stage: int, microbatches: int, sync: Any = None, world: int = 2) -> Any:
    mesh = fzero.VirtualMesh(fsdp=world)
    p = fzero.partition(params(), mesh)
    return fzero.simulate(train(OPTIMIZER, microbatches, sync=sync), mesh, stage=stage).trace(
        p, OPTIMIZER.init(p), batch(64 * 2)
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sync", SYNCS)
def test_collectives_of_k_microbatches(stage: int, sync: Any) -> None:
    moved = Counter(entry.op for entry in program_of(stage, 4, sync).comm())
    is_once = sync == "once" or (sync is None and stage == 1)
    assert moved["reduce_scatter"] == (1 if is_once else 4)
    assert moved["all_gather"] == (4 if stage == 3 else 1)


def test_the_update_stays_one_node() -> None:
    for stage in (1, 2, 3):
        program = program_of(stage, 4)
        assert len(calls(program, ops.adamw_)) == 1 and len(calls(program, ops.loop)) == 1


SCALER = optim.loss_scale.dynamic(init_scale=2.0**10)
SAFE = optim.apply_if_finite(OPTIMIZER, 10)


def scaled_step(p: Any, state: Any, scale: Any, batch: Any) -> Any:
    """float16 compute, a loss scale, microbatches, clipping, AdamW."""

    def scaled(p: Any, batch: Any) -> Any:
        total, weight = fzero.precision(torch.float16, reduce=torch.float32, output=torch.float32)(sums)(p, batch)
        return total * scale.scale, weight

    loss, grads = fzero.accumulate(scaled, 3)(p, batch)
    updates, state = SAFE.update(optim.loss_scale.unscale(grads, scale), state, p)
    return optim.apply_updates(p, updates), state, SCALER.update(scale, state.last_finite), loss / scale.scale


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_scaled_clipped_accumulated_step_updates_in_one_node(stage: int) -> None:
    """And a step with an overflow changes no bit of parameters and moments."""
    mesh = fzero.VirtualMesh(fsdp=2)
    plain = params(torch.float32)
    p = fzero.partition(plain, mesh)
    state, scale = SAFE.init(p), SCALER.init(p)
    step = fzero.simulate(scaled_step, mesh, stage=stage)
    (update,) = calls(step.trace(p, state, scale, batch()), ops.adamw_)
    assert "where" in update.kwargs
    q, plain_state, plain_scale = plain, SAFE.init(plain), SCALER.init(plain)
    for number in range(4):
        given = batch()
        if number == 2:
            given["x"][-1] = torch.inf
            before = fzero.unpartition((p, state.inner_state))
        p, state, scale, _ = step(p, state, scale, given)
        q, plain_state, plain_scale, _ = scaled_step(q, plain_state, plain_scale, given)
        torch.testing.assert_close(fzero.unpartition(p), q, rtol=2e-3, atol=2e-4)  # float16 gradients
        assert bool(state.last_finite.full_tensor()) == (number != 2)
        if number == 2:
            after = fzero.unpartition((p, state.inner_state))
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(after), tree.leaves(before)))
    assert float(scale.scale.full_tensor()) == float(plain_scale.scale)


def test_the_program_does_not_grow_with_microbatches() -> None:
    few, many = program_of(3, 2), program_of(3, 64)
    assert len(few.graph.nodes) == len(many.graph.nodes)
    assert len(str(few).splitlines()) == len(str(many).splitlines())


def test_sums_are_wide_and_the_gradient_is_rounded_once() -> None:
    """In float16 the sum of 64 gradients would be inf."""

    def large(p: Any, x: Tensor) -> Any:
        return (p["w"] * x).sum(), 1

    p = {"w": torch.ones(4, dtype=torch.float16)}
    x = torch.full((64, 4), 2000.0, dtype=torch.float16)
    loss, grads = fzero.accumulate(large, 64)(p, x)
    assert torch.equal(grads["w"], torch.full((4,), 2000.0, dtype=torch.float16)) and loss == 8000
    narrow = fzero.accumulate(large, 64, dtype=torch.float16)(p, x)[1]["w"]
    assert narrow.isinf().all()


def test_frozen_leaves_have_no_gradient() -> None:
    p = params()
    p["layer"]["b"].requires_grad_(False)
    module = torch.nn.Linear(4, 1).double()
    module.bias.requires_grad_(False)
    held, apply = fzero.lower(module)
    mesh = fzero.VirtualMesh(fsdp=2)

    def losses(p: Any, batch: Any) -> Any:
        return apply(p, batch["x"]).square().sum(), len(batch["x"])

    step = fzero.simulate(lambda p, b: fzero.accumulate(losses, 3)(p, b), mesh)
    _, grads = step(fzero.partition(held, mesh), batch())
    _, expected = fzero.value_and_grad(lambda p, b: losses(p, b)[0] / 12)(held, batch())
    assert grads["bias"] is None
    assert_equal(fzero.unpartition(grads)["weight"], expected["weight"])


@pytest.mark.parametrize(
    ("fn", "how", "given", "message"),
    [
        (sums, {"microbatches": 5}, batch(), "accumulate: batch mask: has 12 rows, which do not divide into 5"),
        (sums, {"microbatches": 0}, batch(), "microbatches: is 0"),
        (sums, {"microbatches": 2, "sync": "never"}, batch(), "sync: is 'never'"),
        (sums, {"microbatches": 2, "dtype": torch.int32}, batch(), "dtype: is torch.int32"),
        (lambda p, b: (sums(p, b)[0].expand(2), 1), {"microbatches": 2}, batch(), "not one floating number"),
        (lambda p, b: (sums(p, b)[0], b["mask"]), {"microbatches": 2}, batch(), r"weight: is torch.float64 \(6,\)"),
        (lambda p, b: (sums(p, b)[0], "many"), {"microbatches": 2}, batch(), "weight: is str, not one number"),
    ],
)
def test_bad_input_is_named(fn: Any, how: Any, given: Any, message: str) -> None:
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.accumulate(fn, **how)(params(), given)


# weights that are zero everywhere

NO_WEIGHT = "accumulate: weight: is 0 over all microbatches and ranks"


def ignored(rows: int = 24) -> Any:
    return batch(rows) | {"mask": torch.zeros(rows, dtype=torch.float64)}


def test_no_weight_raises_at_once_on_plain_tensors() -> None:
    with pytest.raises(fzero.FzeroError, match=NO_WEIGHT):
        fzero.accumulate(sums, 3)(params(), ignored())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("world", [1, 8])
def test_no_weight_reaches_no_parameter_and_the_next_call_raises(world: int, sync: Any, stage: int) -> None:
    mesh, optimizer = fzero.VirtualMesh(fsdp=world), optim.adamw(1e-2, weight_decay=0.0)  # no clipping looks at it
    step = fzero.simulate(train(optimizer, 3, sync=sync), mesh, stage=stage)
    p = fzero.partition(params(), mesh)
    state, before = optimizer.init(p), params()
    p, state, loss = step(p, state, ignored())
    assert loss.isnan()
    for a, b in zip(tree.leaves(fzero.unpartition(p)), tree.leaves(before)):
        assert torch.equal(a, b)
    with pytest.raises(fzero.FzeroError, match=NO_WEIGHT):
        step(p, state, batch(24))
    p, state, loss = step(p, state, batch(24))  # the state of the call that raised is there still
    assert_equal(loss, whole(before, batch(24)))
    assert len(step(p, state, batch(24))) == 3


def test_no_weight_of_a_rank_or_a_microbatch_is_no_error() -> None:
    mesh, given = fzero.VirtualMesh(fsdp=8), ignored()
    given["mask"][5] = 1
    step = fzero.simulate(lambda p, batch: fzero.accumulate(sums, 3)(p, batch), mesh)
    for _ in range(2):
        loss, grads = step(fzero.partition(params(), mesh), given)
        assert_equal((loss, fzero.unpartition(grads)), fzero.value_and_grad(whole)(params(), given))


def test_no_weight_in_a_scan_is_a_loss_of_nan_and_no_gradient() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def step(p: Any, batch: Any) -> Any:
        def turn(total: Tensor, mask: Tensor) -> Any:
            loss, grads = fzero.accumulate(sums, 2)(p, batch | {"mask": mask * batch["mask"]})
            return total + loss, sum(grad.sum() for grad in tree.leaves(grads))

        return fzero.scan(turn, torch.zeros((), dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))

    simulated = fzero.simulate(step, mesh)
    for _ in range(2):
        loss, slopes = simulated(fzero.partition(params(), mesh), ignored())
        assert loss.isnan() and torch.equal(slopes, torch.zeros(2, dtype=torch.float64))


def without_weight(mesh: DeviceMesh) -> list[str]:
    """What two calls raise, as it is and compiled."""
    found, rank = [], mesh.get_local_rank()
    for compile in (False, True):
        step = fzero.shard(train(OPTIMIZER, 3), mesh, compile=compile)
        p = fzero.partition(params(), mesh)
        state = OPTIMIZER.init(p)
        mine = {key: x.chunk(2)[rank] if isinstance(x, Tensor) else x for key, x in ignored().items()}
        p, state, _ = step(p, state, mine)
        try:
            step(p, state, mine)
        except fzero.FzeroError as error:
            found.append(str(error))
    return found


def test_no_weight_raises_on_all_real_ranks(on_ranks: dict[str, list[Outcome]]) -> None:
    for rank in values(on_ranks["without weight"]):
        assert len(rank) == 2 and all(message.startswith(NO_WEIGHT) for message in rank)


def test_parameters_that_were_not_partitioned_are_refused() -> None:
    plain = {"layer": {name: leaf.repeat_interleave(2, 0) for name, leaf in params()["layer"].items()}}

    def losses(p: Any, batch: Any) -> Any:
        return sum(leaf.square().sum() for leaf in p["layer"].values()) * batch["mask"].sum(), 1

    def step(p: Any, batch: Any) -> Any:
        loss, grads = fzero.accumulate(losses, 3)(p, batch)
        return optim.apply_updates(p, tree.map(lambda g: -0.1 * g, grads)), loss

    with pytest.raises(fzero.FzeroError, match="plain tensor.*updated by a gradient.*partition the parameters"):
        fzero.simulate(step, fzero.VirtualMesh(fsdp=2))(plain, batch())


def test_numbers_of_any_width_are_taken() -> None:
    """The loss is wider than the parameters, and the weight is state."""
    p = tree.map(lambda x: x.float(), params())

    def wide(p: Any, batch: Any) -> Any:
        total, weight = sums(tree.map(torch.Tensor.double, p), batch)
        return total, weight

    loss, grads = fzero.accumulate(wide, 2)(p, batch())
    expected, wanted = fzero.value_and_grad(whole)(params(), batch())
    torch.testing.assert_close(loss, expected.float())
    torch.testing.assert_close(grads, tree.map(lambda x: x.float(), wanted), rtol=1e-5, atol=1e-6)
    mesh, p = fzero.VirtualMesh(fsdp=2), {**params(), "scale": torch.tensor(2.0, dtype=torch.float64)}

    def weighed(p: Any, batch: Any) -> Any:
        return sums(p, batch)[0], p["scale"]

    loss, grads = fzero.simulate(lambda p, b: fzero.accumulate(weighed, 2)(p, b), mesh)(
        fzero.partition(p, mesh), batch()
    )
    assert_equal((loss, fzero.unpartition(grads)), fzero.accumulate(weighed, 4)(p, batch()))


def gives(*result: Any) -> Any:
    return lambda p, batch: (sums(p, batch)[0], *result)


@pytest.mark.parametrize("world", [0, 2])
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda p, b: sums(p, b)[0], r"^accumulate: the function returned a Tensor, not two; return a pair: \(sum, we"),
        (gives(1, 2), "^accumulate: the function returned 3 values, not two"),
        (gives(0), "^accumulate: weight: is 0"),
        (gives(-1.5), "^accumulate: weight: is -1.5; return how many"),
        (gives(float("nan")), "^accumulate: weight: is nan; return how many"),
        (gives("two"), "^accumulate: weight: is str, not one number"),
    ],
)
def test_what_a_function_returns_is_checked(world: int, fn: Any, message: str) -> None:
    step = lambda p, batch: fzero.accumulate(fn, 2)(p, batch)  # noqa: E731
    mesh = fzero.VirtualMesh(fsdp=2)
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.simulate(step, mesh)(fzero.partition(params(), mesh), batch()) if world else step(params(), batch())


def test_a_leaf_without_a_row_for_each_example_is_named() -> None:
    """Such as positions, of which each microbatch needs all."""
    with pytest.raises(fzero.FzeroError, match="^accumulate: batch positions: has 6 rows, batch mask has 12; "):
        fzero.accumulate(sums, 2)(params(), {**batch(), "positions": torch.arange(6)})


def test_an_optimizer_state_that_is_lost_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mesh, optimizer = fzero.VirtualMesh(fsdp=2), optim.sgd(0.1, momentum=0.9)

    def step(p: Any, state: Any, batch: Any) -> Any:
        return train(optimizer, 3)(p, state, batch)[0]

    p = fzero.partition(params(), mesh)
    with caplog.at_level(logging.WARNING, "fzero"):
        fzero.simulate(step, mesh).trace(p, optimizer.init(p), batch())
    assert "argument 1 meets gradients" in caplog.text


# on real ranks


def trained(mesh: DeviceMesh) -> list[Any]:
    """Losses and parameters of three steps: as it is, with sync, compiled, and after a calibration."""
    found = []
    for how in ({}, {"sync": "once"}, {"compile": True}, {"stage": 2}):
        options = {key: value for key, value in how.items() if key != "sync"}
        step = fzero.shard(train(OPTIMIZER, 3, sync=how.get("sync")), mesh, **options)
        p = fzero.partition(params(), mesh)
        state, rank = OPTIMIZER.init(p), mesh.get_local_rank()
        mine = {key: x.chunk(2)[rank] if isinstance(x, Tensor) else x for key, x in batch().items()}
        if not how:
            step.calibrate(p, state, mine)
        losses = []
        for _ in range(3):
            p, state, loss = step(p, state, mine)
            losses.append(float(loss))
        found.append((losses, fzero.unpartition(p)))
    return found


def test_on_two_real_ranks(on_ranks: dict[str, list[Outcome]]) -> None:
    p, state, losses = params(), OPTIMIZER.init(params()), []
    for _ in range(3):
        p, state, loss = train(OPTIMIZER, 3)(p, state, batch())
        losses.append(float(loss))
    for rank in values(on_ranks["trained"]):
        for got, weights in rank:
            assert got == pytest.approx(losses, rel=1e-9)
            torch.testing.assert_close(weights, p, rtol=1e-7, atol=1e-9)


def on_replicas(mesh: DeviceMesh) -> Any:
    """The gradient on two replicas of one rank each."""
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "fsdp"))
    step = fzero.shard(lambda p, batch: fzero.accumulate(sums, 3)(p, batch), both)
    mine = {key: x.chunk(2)[mesh.get_local_rank()] if isinstance(x, Tensor) else x for key, x in batch().items()}
    loss, grads = step(fzero.partition(params(), both, persist=6), mine)
    return loss, fzero.unpartition(grads)


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, list[Outcome]]:
    """One launch of two ranks, which start inductor once."""
    return run_cases(2, {"trained": trained, "without weight": without_weight, "on replicas": on_replicas})


def test_on_two_real_replicas(on_ranks: dict[str, list[Outcome]]) -> None:
    for got in values(on_ranks["on replicas"]):
        assert_equal(got, fzero.value_and_grad(whole)(params(), batch()))


@pytest.mark.parametrize(
    ("donate", "stage", "sync", "world", "replicas"), take_turns([1, 2, 3], ["each", "once"], [1, 2, 3], [1, 2])
)
def test_the_predicted_peak_is_what_ranks_hold(donate: bool, stage: int, sync: Any, world: int, replicas: int) -> None:
    """As counted while all ranks run in lockstep. Real ranks also receive blocks of the N - 2 other ranks."""
    mesh = fzero.VirtualMesh(fsdp=world) if replicas == 1 else fzero.VirtualMesh(replica=replicas, fsdp=world)
    shapes = {"w": (64, 80), "b": (80,), "v": (80, 1)}
    p = fzero.partition({"layer": {name: torch.randn(shape) for name, shape in shapes.items()}}, mesh)
    given = {"x": torch.randn(48, 64).double(), "mask": torch.ones(48), "scale": 1}
    step = fzero.simulate(train(OPTIMIZER, 4, sync=sync), mesh, stage=stage, donate=donate)
    args = p, OPTIMIZER.init(p), given
    program, most = measure_peak(step, *args)
    assert most <= program.memory().peak
    assert world > 2 or program.memory().peak == pytest.approx(most, rel=0.05)
