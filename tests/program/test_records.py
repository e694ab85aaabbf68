"""Records: operations from outside of the package, and the mistakes in them that are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, Program, ops, passes
from fzero.program.operation import Operation

MESH = fzero.VirtualMesh(fsdp=3)
UNIFORM = {"kind": lambda walk, node: ops.UNIFORM, "fake": torch.empty_like}


def _ring(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    """Each rank gets the value of its left neighbour."""
    world = program.mesh.size()

    def run(x: Tensor, axis: str) -> Any:
        blocks = torch.zeros(world, *x.shape)
        blocks[(rank.along(axis) + 1) % world] = x
        received = yield ops.AllToAll(f"ring over {axis}", axis, blocks.view(-1))
        return received.view(world, *x.shape).sum(0)

    return run


def _ring_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    value = node.meta["val"]
    yield ops.Comm("all_to_all", node.args[1], None, value.dtype, program.mesh.size() * 4 * value.numel())


ring = ops.define(
    "test_ring",
    schema="(Tensor x, str axis) -> Tensor",
    fake=lambda x, axis: torch.empty_like(x),
    kind=lambda walk, node: walk.of(node.args[0]),
    perform=_ring,
    moves=_ring_moves,
)
halve = ops.define(
    "test_halve",
    schema="(Tensor x) -> Tensor",
    fake=torch.empty_like,
    kind=lambda walk, node: walk.of(node.args[0]),
    perform=lambda program, node, rank: lambda x: x / 2,
)


def on_rings(x: Tensor) -> Tensor:
    return ring(halve(x), "fsdp")


def test_an_operation_of_the_users_is_traced_run_and_costed() -> None:
    step = fzero.simulate(on_rings, MESH)
    x = torch.arange(6.0)
    assert step(x).tolist() == [2.0, 2.5, 0.0, 0.5, 1.0, 1.5]
    program = step.trace(x)
    assert [entry for entry in program.comm() if entry.op == "all_to_all"] == [
        ops.Comm("all_to_all", "fsdp", None, torch.float32, 3 * 4 * 2)
    ]
    assert "all_to_all      1 values" in str(program) and "test_halve" in str(program)
    assert [transfer.name for transfer in program.timeline().transfers] == ["all_to_all fsdp"]
    assert program.memory().peak >= 3 * 2 * 4


def test_what_it_gives_must_have_its_kind() -> None:
    def step(x: Tensor, w: Any) -> Any:
        return w.with_local(w.local * ring(x.sum(), "fsdp"))

    given = torch.arange(6.0), fzero.partition(torch.ones(5), MESH)
    with pytest.raises(FzeroError, match="a per-rank value meets a slice of this leaf in mul"):
        fzero.simulate(step, MESH)(*given)


def test_it_has_no_derivative() -> None:
    def step(x: Tensor) -> Tensor:
        return fzero.grad(lambda x: halve(x).sum())(x)

    with pytest.raises(FzeroError, match=r"operation 'test_halve': has no derivative; detach its operands"):
        fzero.simulate(step, MESH)(torch.ones(3))


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("test_ring", UNIFORM, "operation 'test_ring': is defined already; define an operation once"),
        ("gather", UNIFORM, "operation 'gather': is defined already"),
        ("reduce_scatter", UNIFORM, "operation 'reduce_scatter': is defined already"),
        ("two words", UNIFORM, "operation 'two words': is no name in Python"),
        ("lambda", UNIFORM, "operation 'lambda': is no name in Python"),
        (
            "test_new",
            {"fake": torch.empty_like},
            "operation 'test_new': has no rule for kinds; give kind=..., or like=",
        ),
        ("test_new", {"kind": UNIFORM["kind"]}, "operation 'test_new': has no fake result; give fake=..., or like="),
        ("test_new", {**UNIFORM, "move": None}, "operation 'test_new': has no field 'move'; the fields are .*moves"),
        ("test_new", {**UNIFORM, "moves": _ring_moves}, "operation 'test_new': communicates, and nothing performs it"),
        ("test_new", {**UNIFORM, "starts": "gathered"}, "operation 'test_new': communicates, and nothing performs it"),
    ],
)
def test_a_mistake_in_a_definition_is_named(name: str, known: dict[str, Any], message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        ops.define(name, **known)
    if name == "test_new":
        assert not hasattr(torch.ops.fzero, name)


def _with_kind(name: str, kind: Callable[..., Any]) -> passes.Pass:
    """A pass that sends each gathered leaf through an operation of this kind."""
    target = ops.define(name, fake=torch.empty_like, kind=kind, perform=lambda program, node, rank: torch.clone)

    def through(program: Program) -> Program:
        program = program.copy()
        for node in program.graph.find_nodes(op="call_function", target=ops.whole):
            with program.graph.inserting_after(node):
                new = program.emit(target, node)
            node.replace_all_uses_with(new)
            new.args = (node,)
        return program

    return through


@pytest.mark.parametrize(
    ("kind", "gives"),
    [
        ("uniform", "a str"),
        (None, "a NoneType"),
        (frozenset({"tp"}), "a value that differs along 'tp', which is no axis"),
        (ops.Slice("elsewhere", 0), "leaf [0] of 'elsewhere', which the program does not have"),
        (ops.Slice("w", 3), "leaf [3] of 'w', which the program does not have"),
        (ops.Slice("w", 0), "a slice of w of 20 elements, where rank 0 holds 16"),
    ],
    ids=str,
)
def test_a_rule_that_gives_the_wrong_kind_is_named(kind: Any, gives: str, request: pytest.FixtureRequest) -> None:
    name = f"test_kind_{abs(hash(request.node.name))}"
    through = _with_kind(name, lambda walk, node: kind)
    params = {"w": fzero.partition(torch.ones(4, 5), fzero.VirtualMesh(fsdp=2))}
    params = fzero.partition({"w": torch.ones(4, 5)}, fzero.VirtualMesh(fsdp=2))
    step = fzero.simulate(
        fzero.grad(lambda p, x: (x @ p["w"]).sum()),
        fzero.VirtualMesh(fsdp=2),
        passes=passes.insert(passes.defaults(stage=3), through, before="prefetch"),
    )
    with pytest.raises(FzeroError) as error:
        step(params, torch.ones(2, 4))
    assert f"operation '{name}': its rule for kinds gives {gives}, in " in str(error.value)
    assert "pass 'through'" in str(error.value)


def test_ranks_that_ask_for_different_exchanges_are_named() -> None:
    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            if rank.rank == 0:
                return x
            return (yield ops.AllReduce("sum", "fsdp", x, "sum"))

        return run

    lonely = ops.define(
        "test_lonely",
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
        kind=lambda walk, node: walk.per_rank,
        perform=perform,
        moves=lambda program, node: [ops.Comm("all_reduce", "fsdp", None, torch.float32, 4)],
    )
    with pytest.raises(FzeroError, match="'test_lonely': moves lists all_reduce over .* and perform ends before"):
        fzero.simulate(lambda x: lonely(x), MESH)(torch.ones(3))


def test_blocks_that_do_not_divide_by_the_ranks_are_named() -> None:
    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            return (yield ops.AllToAll("an exchange", "fsdp", x))

        return run

    uneven = ops.define(
        "test_uneven",
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
        kind=lambda walk, node: walk.per_rank,
        perform=perform,
        moves=lambda program, node: [ops.Comm("all_to_all", "fsdp", None, torch.float32, 16)],
    )
    with pytest.raises(
        FzeroError, match=r"all-to-all that exchanges 4 elements, which do not divide by 3 ranks, in .* on rank 0; pad"
    ):
        fzero.simulate(lambda x: uneven(x), MESH)(torch.ones(12))


def test_an_operation_performed_in_another_way_does_not_inherit_how() -> None:
    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        raise NotImplementedError

    target = ops.define("test_other_gather", like=ops.all_gather, perform=perform)
    own, like = ops.record(target), ops.record(ops.all_gather)
    default = {name: field.default for name, field in Operation.__dataclass_fields__.items()}
    assert (own.kind.__wrapped__, own.check.__wrapped__) == (like.kind, like.check)  # type: ignore[attr-defined]
    assert (own.starts, own.names) == (like.starts, like.names)
    assert (own.work, own.alias_at) == (default["work"], default["alias_at"])
    assert own.memory not in (None, like.memory) and own.is_foreign


def test_an_operation_from_outside_does_not_inherit_what_passes_put_in_its_place() -> None:
    """A mean of its own, such as one of rounded numbers, is neither dropped, nor cast, nor taken with others."""
    known = ops.record(ops.define("mean_of_my_own", like=ops.all_reduce))
    assert (known.together, known.mean_of, known.is_identity) == (None, None, None)
    assert known.moves is not None and None not in (
        ops.record(ops.all_reduce).together,
        ops.record(ops.scatter).mean_of,
    )
