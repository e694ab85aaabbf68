"""The coalesce pass: independent all-reduces of one kind travel together, dependent ones do not."""

from __future__ import annotations

import pytest
from programs import EVERY_STEP, MESH, Case, apply, assert_same, calls, check, layers, on_rows, tried
from torch import Tensor

import fzero
from fzero import optim
from fzero.base.mesh import VirtualMesh
from fzero.passes import coalesce
from fzero.program import ops
from fzero.program.program import Program


def of_rows(step: object, mesh: VirtualMesh = MESH) -> Case:
    return on_rows(step, mesh=mesh)


def of_params(step: object) -> Case:
    return Case(step, MESH, (fzero.partition(layers(2), MESH),))


def reductions(program: Program) -> list[tuple[str, int]]:
    """`(operation, number of values)` of each all-reduce."""
    nodes = calls(program, ops.all_reduce, ops.all_reduce_list)
    return [(node.args[1], len(node.args[0]) if isinstance(node.args[0], list) else 1) for node in nodes]


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_results_are_the_same_bit_for_bit(name: str, world: int) -> None:
    case, program, outputs = tried(name, world)
    assert_same(case.run(apply(program, coalesce)), outputs)


def test_a_global_norm_is_one_collective() -> None:
    case = of_params(optim.global_norm)
    program = check(case, coalesce)
    assert reductions(case.trace()) == [("sum", 1)] * 4 and reductions(program) == [("sum", 4)]
    assert [entry.nbytes for entry in program.comm()] == [4 * 4]


def test_a_chain_of_reductions_stays_a_chain() -> None:
    def step(x: Tensor) -> Tensor:
        return fzero.psum(fzero.psum(x, "fsdp").sin() * x, "fsdp")

    program = check(of_rows(step), coalesce)
    assert reductions(program) == [("sum", 1), ("sum", 1)]


def test_links_of_two_chains_go_together_pair_by_pair() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (fzero.psum(fzero.psum(start, "fsdp").sin() * x, "fsdp") for start in (x, x * 2))
        return a, b

    program = check(of_rows(step), coalesce)
    assert reductions(program) == [("sum", 2), ("sum", 2)]


def test_only_equal_operations_go_together() -> None:
    program = check(of_rows(lambda x: (fzero.psum(x, "fsdp"), fzero.pmean(x, "fsdp"), fzero.pmax(x, "fsdp"))), coalesce)
    assert sorted(reductions(program)) == [("avg", 1), ("max", 1), ("sum", 1)]


def test_only_equal_dtypes_go_together() -> None:
    program = check(of_rows(lambda x: (fzero.psum(x, "fsdp"), fzero.psum(x.double(), "fsdp"))), coalesce)
    assert reductions(program) == [("sum", 1), ("sum", 1)]


def test_only_equal_axes_go_together() -> None:
    program = check(
        of_rows(lambda x: (fzero.psum(x, "fsdp"), fzero.psum(x, "replica")), VirtualMesh(replica=2, fsdp=2)), coalesce
    )
    assert [entry.axis for entry in program.comm()] == ["fsdp", "replica"]


def test_shapes_may_differ() -> None:
    program = check(
        of_rows(lambda x: (fzero.psum(x, "fsdp"), fzero.psum(x.sum(0), "fsdp"), fzero.psum(x.sum(), "fsdp"))), coalesce
    )
    assert reductions(program) == [("sum", 3)] and program.comm()[0].nbytes == (10 + 5 + 1) * 4


def test_a_reduction_waits_for_the_last_of_its_inputs_and_stands_before_its_first_use() -> None:
    def step(x: Tensor) -> Tensor:
        early = fzero.psum(x, "fsdp").sin()
        late = fzero.psum(x.cos(), "fsdp")
        return early + late

    program = check(of_rows(step), coalesce)
    position = {node.name: i for i, node in enumerate(program.graph.nodes)}
    assert position["cos"] < position["all_reduce_list"] < position["sin"]


def test_what_is_overwritten_is_reduced_where_it_stands() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        before = fzero.psum(y, "fsdp")
        y.mul_(2)
        return before, fzero.psum(y, "fsdp")

    check(of_rows(step), coalesce)


def test_nothing_waits_for_a_reduction_whose_operand_is_there_early() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        value = x.square().mean()  # its mean over ranks comes last
        return value, fzero.pmean(x.sin().mean(), "fsdp").cos() * x, x.exp()

    program = check(of_rows(step), coalesce)
    position = {node.name: i for i, node in enumerate(program.graph.nodes)}
    assert reductions(program) == [("avg", 2)] and position["all_reduce_list"] < position["exp"]
