"""Simulation: virtual ranks do what real ones do, on whole batches, and say where ranks would disagree."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import traces
from mistakes import CLIPPED, drop_average, drop_mean
from processes import can_read_memory, run
from programs import layers, loss, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.passes import defaults


def examples(count: int = 12) -> Tensor:
    """[count, 5]"""
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(7))


def assert_close(got: tree.Tree, expected: tree.Tree) -> None:
    tree.map(torch.testing.assert_close, fzero.unpartition(got), expected)


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


def test_an_error_says_where_parameters_were_cut_as_a_batch() -> None:
    """Half of a leaf does not fit the function, and a note says why there is half."""
    mesh, sgd, plain = fzero.VirtualMesh(fsdp=2), optim.sgd(0.1, momentum=0.9), layers()
    params = fzero.partition(plain, mesh)
    step = fzero.simulate(training(sgd), mesh)
    for given, path in (((plain, sgd.init(plain)), "0"), ((params, sgd.init(plain)), "1.0.trace")):
        with pytest.raises((FzeroError, RuntimeError)) as error:
            step.trace(*given, examples())
        note = error.value.__notes__[-1]
        assert note.startswith(f"argument {path}.layers.0.") and "params = fzero.partition(params, mesh)" in note
    with pytest.raises(RuntimeError) as error:
        step.trace(params, sgd.init(params), torch.ones(4, 99))
    assert not hasattr(error.value, "__notes__")


def test_a_step_is_copied_as_a_function_is() -> None:
    step = fzero.simulate(lambda x: x * 2, 2)
    step(torch.ones(2))
    assert copy.copy(step) is step and copy.deepcopy({"step": step})["step"] is step
    with pytest.raises(FzeroError, match=r"^fzero.simulate\(<lambda>, .*: is pickled, .*; pickle the function"):
        pickle.dumps(step)


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


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float", "dropout", "grouped"])
def test_a_plan_of_attention_has_no_matrix_of_all_pairs(mask: str | None) -> None:
    """torch has no fused attention on the meta device. A plan has it: the peak is that on a CPU, and a GPU's state of
    draws."""
    key_heads, length = 1 if mask == "grouped" else 4, 256
    mesh = fzero.VirtualMesh(fsdp=2)

    def attend(w: Tensor, x: Tensor) -> Tensor:
        parts = (x @ w).unflatten(-1, (4 + 2 * key_heads, 4)).transpose(1, 2).split((4, key_heads, key_heads), 1)
        ones = torch.ones(length, length, device=x.device)
        mask_ = {"bool": ones.tril().bool(), "float": ones.log()}.get(str(mask))
        how = {"enable_gqa": mask == "grouped", "is_causal": mask == "causal", "dropout_p": 0.1 * (mask == "dropout")}
        return scaled_dot_product_attention(*parts, attn_mask=mask_, **how).square().mean()  # type: ignore[arg-type]

    def plan(device: str) -> int:
        w = fzero.partition(torch.empty(16, 4 * (4 + 2 * key_heads), device=device), mesh)
        x = torch.empty(4, length, 16, device=device)
        return fzero.simulate(fzero.value_and_grad(attend), mesh).trace(w, x).memory().peak

    if mask == "dropout":  # a CPU has no fused kernel that draws
        assert plan("meta") < 4 * length**2 * 4
    else:
        assert abs(plan("meta") - plan("cpu")) <= 2 * 8 + 8


def test_a_value_that_must_be_the_same_on_all_ranks_and_is_not_is_an_error() -> None:
    step = fzero.simulate(loss, 2)
    step._pipeline.passes, step._pipeline.finish = (
        (),
        lambda on, program: drop_average(program),
    )  # without verify, which refuses the next
    with pytest.raises(FzeroError, match=r"ranks that must hold the same value of result '' hold \[0\.\d+\] and \[0\."):
        step(fzero.partition(layers(), fzero.VirtualMesh(fsdp=2)), examples())


def test_replicas_that_disagree_are_an_error() -> None:
    mesh = fzero.VirtualMesh(replica=2, fsdp=2)
    step = fzero.simulate(fzero.grad(loss), mesh)
    step._pipeline.passes, step._pipeline.finish = (), lambda on, program: drop_mean(program)
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


def _real_and_virtual(mesh: DeviceMesh, stage: int, clip: bool) -> tuple[Ran, Ran | None]:
    """What came of a rank, and on rank 0 what came of virtual ranks."""
    optimizer = CLIPPED if clip else optim.adamw(0.1)
    train_step, world, rank = training(optimizer), mesh.size(), mesh.get_rank()
    virtual = fzero.VirtualMesh(fsdp=world)
    real = _ran(fzero.shard(train_step, mesh, stage=stage), mesh, optimizer, examples().chunk(world)[rank])
    if rank:
        return real, None
    return real, _ran(fzero.simulate(train_step, virtual, stage=stage), virtual, optimizer, examples())


def _all_real_and_virtual(mesh: DeviceMesh) -> dict[tuple[int, bool], tuple[Ran, Ran | None]]:
    with traces.share_traces():  # stages have one
        return {(stage, clip): _real_and_virtual(mesh, stage, clip) for stage in (1, 3) for clip in (False, True)}


def test_four_real_ranks_and_four_virtual_ones_hold_the_same_bits() -> None:
    """Everything is summed in the order of ranks. Where they cannot read each other's memory gloo adds up an all-reduce
    of four in an order of its own: then the loss, and what clipping makes of it, is equal only up to rounding."""
    is_exact, ranks = can_read_memory(), run(4, _all_real_and_virtual)
    for (stage, clip), (_, virtual) in ranks[0].items():
        expected, expected_losses = virtual
        for params, losses in (rank[stage, clip][0] for rank in ranks):
            tree.map(assert_same_bits if is_exact or not clip else torch.testing.assert_close, params, expected)
            (assert_same_bits if is_exact else torch.testing.assert_close)(losses, expected_losses)


def test_two_real_ranks_and_two_virtual_ones_hold_the_same_bits_everywhere() -> None:
    """Two numbers have one sum, in either order."""
    (_, (expected, expected_losses)), *_ = ranks = run(2, _real_and_virtual, 3, True)
    for (params, losses), _ in ranks:
        tree.map(assert_same_bits, params, expected)
        assert_same_bits(losses, expected_losses)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a, b)


def test_the_default_passes_end_with_verify() -> None:
    assert defaults(stage=3, in_place=True)[-1].func is fzero.passes.verify  # type: ignore[attr-defined]


# batches as they lie in memory


def batches() -> dict[str, Tensor]:
    """Batches of 12 rows whose memory has gaps, overlaps, an order of its own or something in front."""
    all_of_it = torch.randn(60, 30, generator=torch.Generator().manual_seed(0))
    return {
        "contiguous": all_of_it[:12].clone(),
        "offset": all_of_it.view(-1)[7 : 7 + 12 * 8].view(12, 8),
        "cropped": all_of_it[3:15, 4:20],
        "steps": all_of_it[:36:3, ::2],
        "transposed": all_of_it.T[2:14, 1:9],
        "expanded rows": all_of_it[0].expand(12, 30),
        "expanded columns": all_of_it[:12, :1].expand(12, 7),
        "overlapping": all_of_it.view(-1).as_strided((12, 8), (4, 1), 3),
        "channels last": all_of_it[:48].reshape(12, 4, 5, 6).to(memory_format=torch.channels_last),
    }


def strided(x: Tensor) -> Tensor:
    """The first two elements of the memory of each row, whatever its columns are."""
    return x.as_strided((len(x), 2), (x.stride(0), 1))


READERS: dict[str, Any] = {
    "as_strided": strided,
    "its sum": lambda x: strided(x).sum(1),
    "strides": lambda x: x * x.stride(0) + x.stride(-1),
    "is_contiguous": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "rows": lambda x: x.reshape(len(x), -1).contiguous(),
    "windows": lambda x: x.unfold(-1, 2, 1).sum(-1),
    "stft": lambda x: torch.stft(x, 4, 2, window=torch.hann_window(4), center=False, return_complex=True).abs(),
    "gradient": lambda x: torch.func.grad(lambda y: (y.reshape(len(y), -1)[:, :2] * strided(x)).sum())(x),
}


@pytest.mark.parametrize("batch", batches())
@pytest.mark.parametrize("reader", READERS)
def test_a_rank_sees_its_rows_as_they_lie_in_memory(reader: str, batch: str) -> None:
    x, read = batches()[batch], READERS[reader]
    if reader == "stft" and x.ndim > 2:
        x = x.flatten(1)
    expected = read(x)
    for ranks in (1, 2, 3):
        assert torch.equal(fzero.simulate(read, ranks)(x), expected)


def test_on_a_live_rank_too() -> None:
    assert run(1, _find_differences) == [[]]


def _find_differences(mesh: DeviceMesh) -> list[str]:
    found = []
    for name, read in READERS.items():
        step = fzero.shard(read, mesh)
        for batch, x in batches().items():
            if name != "stft" or x.ndim == 2:
                got, expected = step(x), read(x)
                found += [f"{name} of {batch}"] * (not torch.equal(got, expected) or got.stride() != expected.stride())
    return found


def test_a_simulation_leaves_its_batch_as_it_was() -> None:
    x, count = examples(), torch.tensor(1.0)
    step = fzero.simulate(lambda p, x, n: (tree.map(lambda p: p + 1, p), x * n, n), 2)
    _, rows, n = step(fzero.partition(layers(), step.mesh), x, count)
    rows.zero_()
    assert torch.equal(x, examples()) and count == 1 and n == 1
