"""Kinds: ranks cannot drift apart, scalars of the batch become means, and needless means go."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import MESH, Case, calls, layers, loss, moved, names, on_rows, rows, whole
from torch import Tensor

import fzero
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.passes import resolve
from fzero.program import ops
from fzero.program.inference import infer
from fzero.program.kinds import RAGGED, UNIFORM, Slice

HYBRID = VirtualMesh(replica=2, fsdp=2)
WEIGHT = {"block": {"w": torch.arange(25.0).view(5, 5)}}


def on_weight(step: Callable[..., Any], mesh: VirtualMesh = MESH) -> Case:
    """`step(w, x)`: a sharded [5, 5] and a per-rank [2, 5]."""
    return on_rows(lambda params, x: step(params["block"]["w"], x), WEIGHT, mesh=mesh)


def on_new_weight(step: Callable[..., Any], mesh: VirtualMesh = MESH) -> Case:
    """`step(w, x)`, the new value of the weight."""
    return on_rows(lambda params, x: {"block": {"w": step(params["block"]["w"], x)}}, WEIGHT, mesh=mesh)


def batches(mesh: VirtualMesh = MESH) -> list[Tensor]:
    """The x of each rank."""
    return list(rows(mesh).chunk(mesh.size()))


def kind(step: Callable[..., Any], mesh: VirtualMesh = MESH) -> Any:
    """The kind of the one tensor that a step returns."""
    program = on_weight(step, mesh).trace_as_written()
    (result,) = program.output.args[0]
    return infer(program)[result]


PER_RANK = frozenset({"fsdp"})
SLICE = Slice("block", 0)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda w, x: w * 2, SLICE),
        (lambda w, x: w + torch.ones(5, 5), SLICE),
        (lambda w, x: w * w.sum(), SLICE),
        (lambda w, x: torch.zeros_like(w), SLICE),
        (lambda w, x: w.to(torch.bfloat16), SLICE),
        (lambda w, x: torch._foreach_mul([w], 2.0)[0], SLICE),
        (lambda w, x: torch._foreach_norm([w])[0], UNIFORM),
        (lambda w, x: w.full_tensor(), UNIFORM),
        (lambda w, x: w @ w, UNIFORM),
        (lambda w, x: w.sum(), UNIFORM),
        (lambda w, x: torch.arange(5), UNIFORM),
        (lambda w, x: fzero.psum(x, "fsdp"), UNIFORM),
        (lambda w, x: x.new_zeros(3), UNIFORM),
        (lambda w, x: torch.zeros_like(x), UNIFORM),
        (lambda w, x: x, PER_RANK),
        (lambda w, x: x @ w, PER_RANK),
        (lambda w, x: fzero.axis_index("fsdp"), PER_RANK),
        (lambda w, x: torch.rand(3), PER_RANK),
        (lambda w, x: torch.bernoulli(w @ w), PER_RANK),
        (lambda w, x: torch._foreach_mul([x], 2.0)[0], PER_RANK),
        (lambda w, x: torch.split(x, 1)[0], PER_RANK),
    ],
)
def test_kind_of_a_result(step: Callable[..., Any], expected: Any) -> None:
    assert kind(step) == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda w, x: x, {"replica", "fsdp"}),
        (lambda w, x: fzero.psum(x, "fsdp"), {"replica"}),
        (lambda w, x: fzero.psum(fzero.psum(x, "fsdp"), "replica"), set()),
        (lambda w, x: fzero.axis_index("replica"), {"replica"}),
        (lambda w, x: w.sum(), set()),
        (lambda w, x: w @ w, set()),
    ],
)
def test_on_two_axes_a_kind_says_along_which_a_value_differs(step: Callable[..., Any], expected: set[str]) -> None:
    assert kind(step, HYBRID) == expected


OF_SLICES = PER_RANK | {RAGGED}


def written(x: Tensor, into: Tensor) -> Tensor:
    """`into`, with a rank's rows written into a view of it."""
    into[:1].add_(x[:1])
    return into


def filled(into: Tensor, *parts: slice) -> Tensor:
    """`into`, with these rows filled."""
    for part in parts:
        into[part].fill_(1.0)
    return into


def copied(into: Tensor) -> Tensor:
    """`into`, of which the second row is the first."""
    into[1].copy_(into[0])
    return into


def unwritten(x: Tensor) -> Tensor:
    first, second = torch.split(torch.zeros(2, 5), 1)
    first.add_(x[:1])
    return second


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda w, x: w.local, SLICE),
        (lambda w, x: w.local.sort().values, OF_SLICES),
        (lambda w, x: torch.zeros_like(w.local.sort().values), OF_SLICES),
        (lambda w, x: w.local.new_zeros(3), UNIFORM),
        (lambda w, x: w.local.sum(), PER_RANK),
        (lambda w, x: w.local.sort().values.sum(), PER_RANK),
        (lambda w, x: torch._foreach_norm([w.local])[0], PER_RANK),
        (lambda w, x: fzero.psum(w.local.sum(), "fsdp"), UNIFORM),
        (lambda w, x: torch.empty(3), PER_RANK),
        (lambda w, x: torch.empty_like(w), SLICE),
        (lambda w, x: torch.empty(3).fill_(1.0), UNIFORM),
        (lambda w, x: torch.empty(5, 5).copy_(w @ w), UNIFORM),
        (lambda w, x: torch.empty(2, 5).copy_(x), PER_RANK),
        (lambda w, x: torch.empty(2, 5)[:1].fill_(1.0), UNIFORM),
        (lambda w, x: filled(torch.empty(2, 5), slice(1), slice(1, 2)), UNIFORM),
        (lambda w, x: filled(torch.empty(2, 5), slice(1), slice(1)), PER_RANK),
        (lambda w, x: filled(torch.empty(2, 5), slice(1), slice(1))[:1] * 2, UNIFORM),
        (lambda w, x: filled(torch.empty(2, 5), slice(1), slice(1))[1:] * 2, PER_RANK),
        (lambda w, x: filled(torch.empty(2, 5), slice(0, 2, 2), slice(1, 2)), UNIFORM),
        (lambda w, x: filled(torch.empty(2, 5).t(), slice(0, 3), slice(3, 5)), UNIFORM),
        (lambda w, x: filled(torch.empty(5, 2).t(), slice(1), slice(1, 2)), UNIFORM),
        (lambda w, x: filled(torch.empty(4, 5), slice(0, 3, 2), slice(1, 4, 2)), PER_RANK),  # no boxes
        (lambda w, x: filled(torch.empty(10), slice(4), slice(4, 10)).view(2, 5) * 2, UNIFORM),
        (lambda w, x: filled(torch.empty(4), slice(4)).add_(x[0, :4]), PER_RANK),
        (lambda w, x: torch.nn.functional.pad((w @ w)[None], (1, 2), mode="circular"), UNIFORM),
        (lambda w, x: torch.nn.functional.pad((w @ w + x[0])[None], (1, 2), mode="circular"), PER_RANK),
        (lambda w, x: torch.nn.functional.pad((w @ w)[None, None], (1, 2, 2, 1), mode="circular"), UNIFORM),
        (lambda w, x: copied(torch.empty(2, 5)), PER_RANK),
        (lambda w, x: copied(torch.zeros(2, 5)), UNIFORM),
        (lambda w, x: torch.add(w @ w, 1, out=torch.empty(5, 5)), UNIFORM),
        (lambda w, x: torch.add(x, 1, out=torch.zeros(2, 5)), PER_RANK),
        (lambda w, x: torch.nn.functional.rrelu(w @ w), UNIFORM),
        (lambda w, x: torch.zeros(2, 5).add_(x), PER_RANK),
        (lambda w, x: written(x, torch.zeros(2, 5)), PER_RANK),
        (lambda w, x: unwritten(x), PER_RANK),  # of the same memory: told apart by nothing
        (lambda w, x: torch.nn.functional.scaled_dot_product_attention(*[(w @ w).view(1, 1, 5, 5)] * 3), UNIFORM),
    ],
)
def test_kind_of_memory_that_is_written_to_and_of_what_is_made_of_slices(step: Any, expected: Any) -> None:
    assert kind(step) == expected


@pytest.mark.parametrize("largest", [torch.amax, torch.max, torch.argmin])
def test_an_extreme_of_a_slice_that_may_be_empty_is_refused(largest: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        FzeroError, match=r"^block\.w: \w+ \w+ fails where a slice is empty .*; join an element to it first"
    ):
        kind(lambda w, x: largest(w.local))
    with pytest.raises(FzeroError, match="fails where a slice is empty"):
        kind(lambda w, x: largest(w.local.flip(0)))
    assert kind(lambda w, x: largest(torch.cat([w.local, torch.ones(1)]))) == PER_RANK


def test_positions_of_a_list_have_kinds_of_their_own() -> None:
    program = on_weight(lambda w, x: tuple(torch._foreach_mul([x, w @ w], 2.0))).trace_as_written()
    found = infer(program)
    assert [found[node] for node in program.output.args[0]] == [PER_RANK, UNIFORM]


# a per-rank value meets a slice, or is returned as state: see IN_A_STEP of mistakes.py


def test_the_line_is_that_of_the_meeting_not_of_the_step() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        scale = x.square().mean()
        return w * scale  # here

    with pytest.raises(FzeroError, match=re.escape("in step: return w * scale  # here")):
        on_new_weight(step).trace()


def test_the_mean_over_ranks_may_meet_a_slice() -> None:
    case = on_weight(lambda w, x: w * fzero.pmean(x.sum(), "fsdp"))
    program = case.trace()
    mean = torch.stack([x.sum() for x in batches()]).mean()
    torch.testing.assert_close(whole(program, case.run(program))[""], WEIGHT["block"]["w"] * mean)


def test_a_mean_over_one_of_two_axes_is_not_enough() -> None:
    with pytest.raises(FzeroError, match=re.escape("fzero.pmean(x, 'replica')")):
        on_new_weight(lambda w, x: w * fzero.pmean(x.sum(), "fsdp"), HYBRID).trace()
    on_new_weight(lambda w, x: w * fzero.pmean(fzero.pmean(x.sum(), "fsdp"), "replica"), HYBRID).trace()


def test_uniform_state_is_state() -> None:
    count = fzero.partition(WEIGHT, MESH)["block"]["w"].new_zeros(())
    case = Case(lambda count, x: count + fzero.pmean(x.sum(), "fsdp") + 1, MESH, (count, rows(MESH)))
    program = case.trace()
    first, second = case.run(program)
    assert torch.equal(first[0], second[0]) and program.results[0].bucket is not None


def test_gradients_of_state_need_no_mean_of_their_own() -> None:
    case = on_rows(fzero.grad(loss), layers(1))
    assert moved(case.trace()) == ["all_gather layers.0"] * 2 + ["reduce_scatter layers.0"] * 2


# results


def results(step: Callable[..., Any], mesh: VirtualMesh = MESH) -> list[Tensor]:
    """The one result of `step(w, x)`, rank by rank."""
    case = on_weight(step, mesh)
    return [tensor for (tensor,) in case.run(case.trace())]


def test_a_floating_scalar_of_the_batch_becomes_the_mean_over_ranks() -> None:
    mean = sum(x.sum().item() for x in batches()) / 2
    assert [value.item() for value in results(lambda w, x: x.sum())] == [pytest.approx(mean)] * 2


def test_on_two_axes_it_becomes_the_mean_over_both() -> None:
    mean = sum(x.sum().item() for x in batches(HYBRID)) / 4
    assert [value.item() for value in results(lambda w, x: x.sum(), HYBRID)] == [pytest.approx(mean)] * 4


def test_a_mean_over_two_axes_is_one_collective() -> None:
    assert moved(on_weight(lambda w, x: x.sum(), HYBRID).trace()) == ["all_reduce replica+fsdp"]


def test_a_result_learns_along_which_axes_it_differs_its_slices_apart() -> None:
    program = on_weight(lambda w, x: (x, fzero.psum(x, "fsdp"), x.sum(), 3, w * 2, w.sum(), w.local), HYBRID).trace()
    assert [set(result.varies or ()) for result in program.results] == [
        {"replica", "fsdp"}, {"replica"}, set(), set(), set(), set(), {"fsdp"}
    ]  # fmt: skip


def test_of_a_mean_over_one_axis_only_the_other_is_missing() -> None:
    program = on_weight(lambda w, x: fzero.pmean(x.sum(), "fsdp"), HYBRID).trace()
    assert moved(program) == ["all_reduce fsdp", "all_reduce replica"]


@pytest.mark.parametrize(
    "step", [lambda w, x: x.sum(0), lambda w, x: x[:1], lambda w, x: (x > 0).sum(), lambda w, x: x.sum() > 0]
)
def test_other_results_of_the_batch_stay_each_ranks_own(step: Callable[..., Any]) -> None:
    program = on_weight(step).trace()
    assert calls(program, ops.all_reduce) == []
    assert all(torch.equal(got, step(None, x)) for got, x in zip(results(step), batches()))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda w, x: fzero.pmean(w.sum(), "fsdp"), ["sum"]),
        (lambda w, x: fzero.pmax(w @ w, "fsdp"), []),
        (lambda w, x: fzero.pmean(fzero.pmean(x.sum(), "fsdp"), "fsdp"), ["avg"]),
        (lambda w, x: fzero.psum(w @ w, "fsdp"), ["sum"]),
        (lambda w, x: fzero.pmean(x, "fsdp"), ["avg"]),
    ],
)
def test_the_mean_of_what_is_uniform_is_dropped_and_its_sum_is_not(step: Any, expected: list[str]) -> None:
    assert [node.args[1] for node in calls(on_weight(step).trace(), ops.all_reduce)] == expected


def test_the_sum_of_what_is_uniform_counts_every_rank() -> None:
    square = WEIGHT["block"]["w"] @ WEIGHT["block"]["w"]
    assert all(torch.equal(value, square * 2) for value in results(lambda w, x: fzero.psum(w @ w, "fsdp")))


def test_marks_of_scalars_beside_slices_are_dropped() -> None:
    assert "beside" not in names(on_weight(lambda w, x: w * w.sum()).trace())


def test_random_draws_differ_between_ranks() -> None:
    first, second = results(lambda w, x: torch.nn.functional.dropout(w.full_tensor()))
    assert not torch.equal(first, second)


def test_the_given_program_is_left_as_it_was() -> None:
    program = on_weight(lambda w, x: (x.sum(), w * w.sum())).trace_as_written()
    before = str(program.graph)
    resolve(program)
    assert str(program.graph) == before
