"""Simulation: virtual ranks do what real ones do, on whole batches, and say where ranks would disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import can_read_memory, run
from programs import layers, loss, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.passes import defaults
from fzero.program import ops
from fzero.program.program import Program

MESHES = [
    fzero.VirtualMesh(fsdp=1), fzero.VirtualMesh(fsdp=3), fzero.VirtualMesh(replica=2, fsdp=3),
    fzero.VirtualMesh(data=2),
]  # fmt: skip
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1, weight_decay=0.1))


def examples(count: int = 12) -> Tensor:
    """[count, 5]"""
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(7))


def assert_close(got: tree.Tree, expected: tree.Tree) -> None:
    tree.map(torch.testing.assert_close, fzero.unpartition(got), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_equals_the_plain_one_on_the_whole_batch(mesh: fzero.VirtualMesh, stage: int) -> None:
    train_step = training(CLIPPED)
    step = fzero.simulate(train_step, mesh, stage=stage)
    params = fzero.partition(layers(), mesh)
    sharded, plain = (params, CLIPPED.init(params)), (layers(), CLIPPED.init(layers()))
    for _ in range(3):
        *sharded, value = step(*sharded, examples())
        *plain, expected = train_step(*plain, examples())
        assert_close(sharded[0], plain[0])
        torch.testing.assert_close(value, expected)


def test_the_number_of_ranks_will_do() -> None:
    step = fzero.simulate(lambda params, x: loss(params, x), 3)
    assert step.mesh == fzero.VirtualMesh(fsdp=3)
    value = step(fzero.partition(layers(), fzero.VirtualMesh(fsdp=3)), examples())
    torch.testing.assert_close(value, loss(layers(), examples()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_named_data_axis_is_a_replica_axis(stage: int) -> None:
    train_step, found = training(CLIPPED), []
    for mesh, data in (
        (fzero.VirtualMesh(replica=2, fsdp=2), None),
        (fzero.VirtualMesh(dp=2, fsdp=2), ("dp", "fsdp")),
    ):
        step = fzero.simulate(train_step, mesh, stage=stage, data=data)
        params = fzero.partition(layers(), mesh)
        result = step(params, CLIPPED.init(params), examples())
        found.append(tree.leaves(fzero.unpartition(result)))
    assert all(map(torch.equal, *found)) and len(found[0]) > 3


def test_an_axis_without_a_meaning_is_refused() -> None:
    mesh = fzero.VirtualMesh(fsdp=2, tp=2)
    params = fzero.partition(layers(), mesh)  # state lies along fsdp, whatever the other axis means
    assert_close(params, layers())
    with pytest.raises(FzeroError, match=r"mesh axis 'tp': has no meaning on VirtualMesh\(fsdp=2, tp=2\)"):
        fzero.simulate(loss, mesh)
    with pytest.raises(FzeroError, match=r"mesh axis 'tp': has no meaning on VirtualMesh\(fsdp=2, tp=2\)"):
        fzero.check_equivalence(loss, (layers(),), (examples(),), ranks=mesh)
    fzero.simulate(loss, mesh, data=("fsdp", "tp"))


def test_a_mesh_without_a_shard_axis_is_refused() -> None:
    mesh = fzero.VirtualMesh(dp=2, tp=2)
    for use in (lambda: fzero.partition(layers(), mesh), lambda: fzero.simulate(loss, mesh, data=("dp", "tp"))):
        with pytest.raises(FzeroError, match=r"mesh: none of the axes \('dp', 'tp'\) is the shard axis; call the axis"):
            use()


def test_results_that_differ_between_ranks_are_joined() -> None:
    def step(x: Tensor) -> Any:
        return {
            "rows": x * 2,
            "rank": fzero.axis_index("fsdp"),
            "count": torch.tensor(1) + fzero.axis_index("fsdp") * 0,
            "mean": x.sum(),
            "all": fzero.psum(x.sum(), "fsdp"),
            "uniform": torch.arange(2),
            "constant": "text",
        }

    result = fzero.simulate(step, 3)(torch.arange(6.0))
    assert result.pop("constant") == "text"
    assert tree.map(Tensor.tolist, result) == {
        "rows": [0, 2, 4, 6, 8, 10], "rank": [0, 1, 2], "count": [1, 1, 1], "mean": 5, "all": 15, "uniform": [0, 1]
    }  # fmt: skip


def test_results_may_be_views_of_one_number() -> None:
    step = fzero.simulate(lambda w: w.sum().expand(1), 2)
    assert torch.equal(step(fzero.partition(torch.arange(5.0), fzero.VirtualMesh(fsdp=2))), torch.tensor([10.0]))


def test_a_0d_tensor_is_given_to_every_rank() -> None:
    result = fzero.simulate(lambda x, scale: x * scale, 2)(torch.ones(4), torch.tensor(3.0))
    assert result.tolist() == [3, 3, 3, 3]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    step = fzero.simulate(lambda batch: batch["x"] * 2, 4)
    with pytest.raises(FzeroError, match=r"argument 0\.x: 6 rows do not divide by 4 ranks; give a multiple of 4"):
        step({"x": torch.ones(6)})


def test_donated_state_is_gone() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    params = fzero.partition(layers(), mesh)
    sgd = optim.sgd(0.1)
    step = fzero.simulate(training(sgd), mesh)
    step(params, sgd.init(params), examples())
    with pytest.raises(FzeroError, match="donated"):
        fzero.unpartition(params)


def test_without_donation_it_stays() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    params = fzero.partition(layers(), mesh)
    sgd = optim.sgd(0.1)
    fzero.simulate(training(sgd), mesh, donate=False)(params, sgd.init(params), examples())
    assert_close(params, layers())


def test_state_of_another_mesh_is_refused() -> None:
    params = fzero.partition(layers(), fzero.VirtualMesh(fsdp=2))
    with pytest.raises(
        FzeroError, match=r"on VirtualMesh\(fsdp=2\) as every rank, the step runs on VirtualMesh\(fsdp=4\)"
    ):
        fzero.simulate(loss, 4)(params, examples())


def test_the_program_is_the_one_that_shard_makes() -> None:
    (virtual, real) = run(1, _virtual_and_real)[0]
    assert virtual == real


def _virtual_and_real(mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    adam = optim.adamw(0.1)

    def lines(step: Any, mesh: Any) -> list[str]:
        params = fzero.partition(layers(), mesh)
        return step.trace(params, adam.init(params), examples()).lines()

    train_step = training(adam)
    return lines(fzero.simulate(train_step, 1), fzero.VirtualMesh(fsdp=1)), lines(fzero.shard(train_step, mesh), mesh)


def test_a_program_is_planned_for_leaves_without_data() -> None:
    mesh = fzero.VirtualMesh(fsdp=1024)
    params = fzero.partition(tree.map(lambda x: x.to("meta"), layers(width=4096)), mesh)
    program = fzero.simulate(loss, mesh).trace(params, torch.empty(1024, 4096, device="meta"))
    assert program.comm()[0].nbytes == 1025 * 1024 * 16 * 4  # 4096 * 4096 + 4096 elements, padded to 1024 x 16


# ranks that disagree


def drop_mean(program: Program) -> Program:
    """A wrong pass: gradients of a rank's own rows are taken for the mean over ranks."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        with program.graph.inserting_before(node):
            program.substitute(node, program.emit(ops.take, *node.args))
    return program


def drop_average(program: Program) -> Program:
    """A wrong pass: each rank keeps its own loss."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_reduce):
        program.substitute(node, node.args[0])
    return program


def test_a_value_that_must_be_the_same_on_all_ranks_and_is_not_is_an_error() -> None:
    step = fzero.simulate(loss, 2)
    step._pipeline.passes, step._pipeline.finish = (), drop_average  # without verify, which refuses the next
    with pytest.raises(FzeroError, match=r"ranks that must hold the same value of result '' hold \[0\.\d+\] and \[0\."):
        step(fzero.partition(layers(), fzero.VirtualMesh(fsdp=2)), examples())


def test_replicas_that_disagree_are_an_error() -> None:
    mesh = fzero.VirtualMesh(replica=2, fsdp=2)
    step = fzero.simulate(fzero.grad(loss), mesh)
    step._pipeline.passes, step._pipeline.finish = (), drop_mean
    with pytest.raises(FzeroError, match=r"layers\.0\.b: ranks that must hold the same value of result 'layers\.0\.b'"):
        step(fzero.partition(layers(), mesh), examples())


def test_a_wrong_pass_is_refused_before_anything_runs() -> None:
    step = fzero.simulate(fzero.grad(loss), 2, passes=[drop_mean])
    with pytest.raises(FzeroError, match=r"layers\.\d\.[bw]: a per-rank value meets a slice of this leaf in take"):
        step(fzero.partition(layers(), fzero.VirtualMesh(fsdp=2)), examples())


# real ranks against virtual ones


class Ran(tuple[Any, ...]):
    """`(parameters after some steps, losses)`."""


def _ran(step: Any, mesh: Any, optimizer: optim.GradientTransformation, batch: Tensor) -> Ran:
    params = fzero.partition(layers(), mesh)
    state = (params, optimizer.init(params))
    losses = []
    for _ in range(3):
        *state, value = step(*state, batch)
        losses.append(value)
    return Ran((fzero.unpartition(state[0]), torch.stack(losses)))


def _real_and_virtual(mesh: DeviceMesh, stage: int, clip: bool) -> tuple[Ran, Ran]:
    optimizer = CLIPPED if clip else optim.adamw(0.1)
    train_step, world, rank = training(optimizer), mesh.size(), mesh.get_rank()
    virtual = fzero.VirtualMesh(fsdp=world)
    real = _ran(fzero.shard(train_step, mesh, stage=stage), mesh, optimizer, examples().chunk(world)[rank])
    return real, _ran(fzero.simulate(train_step, virtual, stage=stage), virtual, optimizer, examples())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_four_real_ranks_and_four_virtual_ones_hold_the_same_bits(stage: int, clip: bool) -> None:
    """Everything is summed in the order of ranks. Where they cannot read each other's memory gloo adds up an all-reduce
    of four in an order of its own: then the loss, and what clipping makes of it, is equal only up to rounding."""
    is_exact = can_read_memory()
    for (params, losses), (expected, expected_losses) in run(4, _real_and_virtual, stage, clip):
        tree.map(assert_same_bits if is_exact or not clip else torch.testing.assert_close, params, expected)
        (assert_same_bits if is_exact else torch.testing.assert_close)(losses, expected_losses)


def test_two_real_ranks_and_two_virtual_ones_hold_the_same_bits_everywhere() -> None:
    """Two numbers have one sum, in either order."""
    for (params, losses), (expected, expected_losses) in run(2, _real_and_virtual, 3, True):
        tree.map(assert_same_bits, params, expected)
        assert_same_bits(losses, expected_losses)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a, b)


def test_the_default_passes_end_with_verify() -> None:
    assert defaults(stage=3, in_place=True)[-1].func is fzero.passes.verify  # type: ignore[attr-defined]
