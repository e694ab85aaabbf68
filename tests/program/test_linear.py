"""Operations from outside with a transpose: their derivatives inside of a step and outside, and docs/operations.md."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, VirtualMesh, ops
from fzero.program.records import record
from fzero.ranks.live import live
from fzero.ranks.virtual import virtual

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def execute() -> tuple[dict[str, Any], str]:
    """The names of the page once its code has run, and what it printed. Operations are defined once a process."""
    names, printed = dict[str, Any](), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in PAGE.split("```python\n")[1:]:
            exec(compile(block.partition("```")[0], "docs/operations.md", "exec"), names)
    return names, printed.getvalue()


NAMES, PRINTED = execute()
shift = NAMES["shift"]


def test_the_page_prints_what_it_says() -> None:
    said = [block.partition("```")[0] for block in PAGE.split("```text\n")[1:]]
    assert "".join(said) == PRINTED


def loss(x: Tensor) -> Tensor:
    """This rank's value, squared, times the value of the rank two places before it."""
    return (x.square() * shift(x, "fsdp", 2)).sum()


def closed_form(x: Tensor) -> Tensor:
    """[N, S] the gradient of each rank's value by the sum of all losses."""
    return 2 * x * x.roll(2, 0) + x.roll(-2, 0).square()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_gradient_on_virtual_ranks_is_the_closed_form(world: int) -> None:
    x = torch.arange(1.0, 4 * world + 1).view(world, 4)
    assert torch.equal(fzero.simulate(fzero.grad(loss), VirtualMesh(fsdp=world))(x), closed_form(x))


def gradient_here(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of this rank's rows; those of the loss outside of the step, by fzero and by autograd."""
    mine = x.chunk(mesh.size())[mesh.get_local_rank()].contiguous()
    leaf = mine.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    return fzero.shard(fzero.grad(loss), mesh)(mine), fzero.grad(loss)(mine), leaf.grad


def test_the_gradient_on_live_ranks_is_the_closed_form() -> None:
    x = torch.arange(1.0, 13.0).view(3, 4)
    inside, outside, eager = (torch.cat(each) for each in zip(*run(3, gradient_here, x)))
    assert torch.equal(inside, closed_form(x))
    assert torch.equal(outside, 3 * x.square()) and torch.equal(eager, 3 * x.square())  # the loss of one rank is x**3


class OnTwo(NamedTuple):
    """What one of two ranks has: the gradient in a step, its value shifted at once, and the error of unlike shifts."""

    gradient: Tensor
    shifted: Tensor
    error: str


def on_two(mesh: DeviceMesh, x: Tensor) -> OnTwo:
    rank, on = mesh.get_local_rank(), live(mesh)
    mine = x.chunk(2)[rank].contiguous()
    gradient = fzero.shard(fzero.grad(lambda x: (x.square() * shift(x, "fsdp", 1)).sum()), mesh)(mine)
    with pytest.raises(FzeroError) as refused:
        on.perform(record(shift), mine, "fsdp", rank)
    return OnTwo(gradient, on.perform(record(shift), mine, "fsdp", 1), str(refused.value))


def test_two_live_ranks_shift_to_each_other_in_a_step_and_at_once() -> None:
    x = torch.arange(1.0, 9.0).view(2, 4)
    each = run(2, on_two, x)
    assert torch.equal(torch.cat([rank.gradient for rank in each]), 2 * x * x.roll(1, 0) + x.roll(1, 0).square())
    assert torch.equal(torch.cat([rank.shifted for rank in each]), x.roll(1, 0))
    for rank in each:
        assert "rank 0 has 'collective shift: ['torch.float32 [1, 4]'] ('fsdp', 0)" in rank.error.replace('"', "'")


def test_all_ranks_of_a_process_need_to_be_told_what_an_operation_does_to_them() -> None:
    with pytest.raises(FzeroError, match=r"shift over fsdp: communicates outside of a step, where .*; give of_all="):
        virtual(VirtualMesh(fsdp=2)).perform(record(shift), torch.ones(2), "fsdp", 1)


@pytest.mark.parametrize("axis", ["replica", "fsdp"])
def test_each_axis_of_a_mesh_shifts(axis: str) -> None:
    mesh = VirtualMesh(replica=2, fsdp=3)
    x = torch.arange(1.0, 7.0)
    along = ["replica", "fsdp"].index(axis)
    grid = x.view(2, 3)
    made = fzero.simulate(fzero.grad(lambda x: (x.square() * shift(x, axis, 1)).sum()), mesh)(x)
    assert torch.equal(made, (2 * grid * grid.roll(1, along) + grid.roll(-1, along).square()).view(-1))


def test_tangents_and_second_derivatives_are_the_closed_forms() -> None:
    mesh, x = VirtualMesh(fsdp=3), torch.tensor([1.0, 2.0, 4.0])

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1].reshape(1)

    def second(x: Tensor) -> Tensor:
        return fzero.grad(lambda x: fzero.grad(loss)(x).sum())(x)

    assert torch.equal(fzero.simulate(tangent, mesh)(x), 2 * x * x.roll(2) + x.square())
    assert torch.equal(fzero.simulate(second, mesh)(x), (2 * x.sum()).expand(3))  # of each pair of ranks once
    assert torch.equal(fzero.grad(lambda x: fzero.grad(loss)(x).sum())(x), 6 * x)


def test_a_batch_of_vmap_is_shifted_item_by_item() -> None:
    x = torch.arange(6.0).view(3, 2)
    made = fzero.simulate(torch.vmap(lambda row: shift(row, "fsdp", 1)), VirtualMesh(fsdp=3))(x)
    assert torch.equal(made, x.roll(1, 0))


BROADCAST = """
import torch, fzero
assert "copy" in fzero.__file__
step = fzero.simulate(lambda x: fzero.grad(lambda x: (x * fzero.broadcast(x, "fsdp", 1)).sum())(x), 3)
print(step(torch.tensor([1.0, 2.0, 4.0])).tolist())
"""


def test_a_collective_is_a_diff_of_three_files_and_sixty_lines(tmp_path: Path) -> None:
    (diff,) = (block.partition("```")[0] for block in PAGE.split("```diff\n")[1:])
    added = re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)
    assert diff.count("\n+++ ") <= 3 and len(added) <= 60
    root = tmp_path / "copy"
    shutil.copytree(Path(fzero.__file__).parent, root / "fzero")  # with what Python compiled of it
    subprocess.run(["git", "apply", "-"], cwd=root, input=diff, text=True, check=True)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    told = subprocess.run([sys.executable, "-c", BROADCAST], env=environment, cwd=root, capture_output=True, text=True)
    # x[r] * x[1] on rank r: its gradient is x[1], and on rank 1 the sum of all x beside
    assert told.stdout == "[2.0, 9.0, 2.0]\n", told.stderr


KNOWN: dict[str, Any] = {"kind": lambda walk, node: walk.of(node.args[0]), "fake": lambda x, *_: torch.empty_like(x)}
double = ops.define(
    "test_double", schema="(Tensor x) -> Tensor", perform=lambda program, node, rank: lambda x: 2 * x, **KNOWN
)
scale = ops.define(
    "test_scale",
    schema="(Tensor x, Tensor by) -> Tensor",
    perform=lambda program, node, rank: torch.mul,
    transpose=lambda cotangent, by: scale(cotangent, by),
    **KNOWN,
)


def test_an_operation_runs_outside_of_a_step() -> None:
    x = torch.arange(3.0)
    assert torch.equal(double(x), 2 * x)
    assert torch.equal(fzero.grad(lambda x: scale(x, torch.full((), 3.0)).sum())(x), torch.full((3,), 3.0))


def jvp(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("transform", [jvp, fzero.grad])
@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: fzero.simulate(fn, VirtualMesh(fsdp=3))])
def test_an_operation_without_a_transpose_is_refused_in_both_modes(transform: Any, wrap: Any) -> None:
    """In forward mode its tangent was zero, without a word."""
    with pytest.raises(FzeroError, match="operation 'test_double': has no derivative; detach its operands"):
        wrap(transform(lambda x: double(x).sum()))(torch.ones(3))


def test_only_the_first_argument_has_a_derivative() -> None:
    with pytest.raises(FzeroError, match="operation 'test_scale': has no derivative but by its first operand; detach"):
        fzero.grad(lambda by: scale(torch.ones(3), by).sum())(torch.ones(()))


def test_torch_func_alone_is_told_which_transform_to_take() -> None:
    with pytest.raises(FzeroError, match=r"'shift': is differentiated by torch\.func.*; differentiate by fzero\.grad"):
        torch.func.grad(loss)(torch.ones(3))


@pytest.mark.parametrize("schema", [None, "(Tensor x) -> Tensor[]", "(Tensor[] x) -> Tensor", "(str axis) -> Tensor"])
def test_a_transpose_is_of_one_tensor_by_another(schema: str | None) -> None:
    with pytest.raises(FzeroError, match="'test_passes_only': has a transpose and the schema .*; give a schema from a"):
        ops.define("test_passes_only", schema=schema, perform=lambda *_: torch.clone, transpose=lambda x: x, **KNOWN)


@pytest.mark.parametrize(("made", "gives"), [(lambda x: x[:1], r"\[1, 3\]"), (lambda x: None, "a NoneType")])
def test_a_transpose_gives_a_cotangent_of_the_operand(made: Any, gives: str) -> None:
    name = f"test_gives_{len(gives)}"
    wrong = ops.define(name, schema="(Tensor x) -> Tensor", perform=lambda *_: torch.clone, transpose=made, **KNOWN)
    with pytest.raises(FzeroError, match=f"its transpose gives {gives}, where the first operand has the shape"):
        fzero.grad(lambda x: wrong(x).sum())(torch.ones(2, 3))


def test_a_mistake_in_a_transpose_is_named() -> None:
    wrong = ops.define(
        "test_wrong_transpose",
        schema="(Tensor x) -> Tensor",
        perform=lambda *_: torch.clone,
        transpose=lambda cotangent, axis: cotangent,
        **KNOWN,
    )
    with pytest.raises(FzeroError, match="operation 'test_wrong_transpose': its transpose raises TypeError: .*axis"):
        fzero.simulate(fzero.grad(lambda x: wrong(x).sum()), VirtualMesh(fsdp=2))(torch.ones(2))
