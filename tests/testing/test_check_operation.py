"""`check_operation` finds the law that an operation breaks, on virtual ranks and beside a live mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor

from fzero import FzeroError, Program, VirtualMesh, ops
from fzero.testing import check_operation

TWO = (VirtualMesh(fsdp=2),)


def perform_shift(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    axis = node.args[1]
    world, here = program.mesh.size(axis), rank.along(axis)

    def run(x: Tensor, axis: str, by: int) -> Any:
        given = [x.numel() if other == (here + by) % world else 0 for other in range(world)]
        taken = [x.numel() if other == (here - by) % world else 0 for other in range(world)]
        received = yield ops.AllToAll("shift", axis, x.reshape(-1), (given, taken))
        return received.view(x.shape)

    return run


def list_shift(program: Program, node: Any) -> list[Any]:
    value, (axis, by) = node.meta["val"], node.args[1:]
    world = program.mesh.size(axis)
    sent = value.numel() if by % world else 0
    return [ops.Comm("all_to_all", axis, None, value.dtype, -(-sent * world // max(world - 1, 1)) * value.itemsize)]


def define(name: str, **known: Any) -> Any:
    fields: dict[str, Any] = {
        "schema": "(Tensor x, str axis, int by) -> Tensor",
        "fake": lambda x, axis, by: torch.empty_like(x),
        "kind": lambda walk, node: walk.per_rank,
        "perform": perform_shift,
        "moves": list_shift,
    }
    return ops.define(name, **fields | known)


shift = define("operation_shift", transpose=lambda y, axis, by: shift(y, axis, -by))
wrong = define("operation_wrong_shift", transpose=lambda y, axis, by: shift(y, axis, by))
bent = ops.define(
    "operation_bent", schema="(Tensor x) -> Tensor", fake=torch.empty_like, kind=lambda walk, node: walk.per_rank,
    perform=lambda program, node, rank: lambda x: x * x, transpose=lambda y: y,
)  # fmt: skip
plain = ops.define("operation_plain", fake=torch.empty_like, kind=lambda walk, node: walk.per_rank)


def test_laws_that_hold_are_listed() -> None:
    assert check_operation(shift, "fsdp", 1, meshes=TWO) == ["record", "linear", "transpose", "jvp", "vmap"]


def test_broken_laws_are_named() -> None:
    with pytest.raises(FzeroError, match=r"'operation_bent': breaks the law 'linear' on VirtualMesh\(fsdp=2\): \["):
        check_operation(bent, meshes=TWO)
    with pytest.raises(FzeroError, match=r"'operation_wrong_shift': breaks the law 'transpose' on VirtualMesh\(fsdp=3"):
        check_operation(wrong, "fsdp", 1, meshes=[VirtualMesh(fsdp=3)])
    with pytest.raises(FzeroError, match="'operation_plain': has no schema, so no step calls it"):
        check_operation(plain)


seen = set[tuple[int, ...]]()


def note_shape(x: Tensor) -> Tensor:
    seen.add(tuple(x.shape))
    return 2 * x


double = ops.define(
    "operation_double", schema="(Tensor x) -> Tensor", fake=torch.empty_like, kind=lambda walk, node: walk.per_rank,
    perform=lambda program, node, rank: note_shape, transpose=lambda y: 2 * y,
)  # fmt: skip
rounds = ops.define(
    "operation_round", schema="(Tensor x) -> Tensor", fake=lambda x: torch.empty_like(x, dtype=torch.int64),
    kind=lambda walk, node: walk.per_rank, perform=lambda program, node, rank: lambda x: x.long(),
    transpose=lambda y: y.double(),
)  # fmt: skip


def test_a_number_is_a_tensor_without_dims() -> None:
    assert check_operation(double, shape=(), meshes=TWO) == ["record", "linear", "transpose", "jvp", "vmap"]
    assert seen == {()}


def test_what_has_no_laws_is_refused() -> None:
    with pytest.raises(FzeroError, match="'operation_double': has a transpose, and torch.int64 has no derivative"):
        check_operation(double, dtype=torch.int64)
    with pytest.raises(FzeroError, match="'operation_round': has a transpose, and its result is torch.int64"):
        check_operation(rounds, meshes=TWO)
    for known in (torch.relu, torch.ops.aten.relu.default, ops.all_reduce):
        with pytest.raises(FzeroError, match="operation '.*': is none of fzero.ops.define, and is held to no record"):
            check_operation(known)


def on_ranks(mesh: Any) -> tuple[list[str], str]:
    virtual_only = define("operation_knows_its_rank", perform=perform_knowing)
    laws = check_operation(shift, "fsdp", 1, meshes=(), live=mesh)
    try:
        check_operation(virtual_only, "fsdp", 1, meshes=(), live=mesh)
    except FzeroError as error:
        return laws, str(error)
    return laws, "silent"


def perform_knowing(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    is_virtual = type(rank).__name__ == "Seat"

    def run(x: Tensor, axis: str, by: int) -> Any:
        received = yield from perform_shift(program, node, rank)(x, axis, by)
        return received + is_virtual

    return run


def test_live_ranks_are_compared_with_virtual_ones() -> None:
    for laws, said in run(2, on_ranks):
        assert laws == ["live"]
        assert "operation 'operation_knows_its_rank': gives [" in said and "virtually; let perform depend on" in said
