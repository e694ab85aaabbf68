"""Mistakes of an operation from outside in what it yields, in what its rules give, and in what it calls the same on all
ranks: each is an error that names the operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import FzeroError, Program, ops, passes
from fzero.execution import lockstep

MESH = fzero.VirtualMesh(replica=1, fsdp=2)
FLOAT = torch.float32


def list_one(op: str, nbytes: int, axis: str = "fsdp") -> Callable[..., Any]:
    return lambda program, node: [ops.Comm(op, axis, None, FLOAT, nbytes)]


def exchange(ask: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    """`perform` of an operation that yields what `ask(rank, x)` gives."""

    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            received = yield ask(rank, x)
            return received.sum()

        return run

    return perform


def give(splits: Any, numel: int = 4) -> dict[str, Any]:
    ask = exchange(lambda rank, x: ops.AllToAll("e", "fsdp", x.new_ones(numel), splits))
    return {"perform": ask, "moves": list_one("all_to_all", 4 * numel)}


def gather(of: Any, axis: Any = "fsdp", listed: str = "fsdp") -> dict[str, Any]:
    return {
        "perform": exchange(lambda rank, x: ops.AllGather("e", axis, of)),
        "moves": list_one("all_gather", 16, listed),
    }


def reduce(by: Callable[[Any], str]) -> dict[str, Any]:
    ask = exchange(lambda rank, x: ops.AllReduce("e", "fsdp", x.new_ones(2), by(rank)))
    return {"perform": ask, "moves": list_one("all_reduce", 8)}


def is_uniform(walk: Any, node: Any) -> Any:
    return ops.UNIFORM


def sum_own(program: Program, node: Any, rank: Any) -> Any:
    return lambda x: x.sum()


PAIR = torch.ones(2)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "gathers a list": (gather([PAIR]), "perform yields an AllGather of a list, in .* on rank 0; exchange tensors"),
    "gathers nothing": (gather(None), "yields an AllGather of a NoneType"),
    "gathers over 3": (gather(PAIR, axis=3), r"over the axis 3; the mesh has \('replica', 'fsdp'\)"),
    "lists over tp": (gather(PAIR, listed="tp"), "moves names the axis 'tp'; the mesh has"),
    "reduces by mean": (reduce(lambda rank: "mean"), "yields an AllReduce by 'mean', .*; reduce by one of 'sum'"),
    "reduces otherwise": (
        reduce(lambda rank: ("sum", "max")[rank.rank]),
        "yields AllReduce over 'fsdp' by 'sum' on one rank and AllReduce over 'fsdp' by 'max' on another",
    ),
    "gives 33": (give(None, 33), "yields an all-to-all that exchanges 33 elements, which do not divide by 2 ranks, in"),
    "gives too few": (give(([1, 2], [1, 2])), r"exchanges 4 elements over 2 ranks: gives \[1, 2\], takes \[1, 2\], in"),
    "gives halves": (give(([1.5, 2.5], [2, 2])), r"yields the splits \(\[1.5, 2.5\], \[2, 2\]\), .*; give splits=\("),
    "gives one list": (give([2, 2]), r"yields the splits \[2, 2\]"),
    "gives less than none": (give(([-1, 5], [-1, 5])), r"yields splits below 0: gives \[-1, 5\]"),
    "is not uniform": (
        {"kind": is_uniform, "perform": sum_own},
        r"kind says a whole value, the same along 'fsdp', and perform gives \[\S+\] on rank 0 and \[\S+\] on rank 1",
    ),
    "pair is not uniform": (
        {
            "fake": lambda x: [x.new_zeros(()), x.new_zeros(())],
            "kind": is_uniform,
            "perform": lambda program, node, rank: lambda x: [x.new_ones(()), x.sum()],
        },
        r"kind says a whole value, the same along 'fsdp', and perform gives \[\S+\] on rank 0 and \[\S+\] on rank 1",
    ),
    "kind of two": ({"kind": lambda walk, node: [ops.UNIFORM] * 2}, "rule for kinds gives a list of 2"),
    "performs nothing": ({"perform": lambda program, node, rank: None}, "its perform gives None, in test_moves_perf"),
    "lists tuples": ({**gather(PAIR), "moves": lambda program, node: [("all_gather",)]}, "let it give ops.Comm"),
    "writes a name": ({"writes": lambda node: ["x"]}, r"its writes gives \['x'\], in .*; let it give a list of op"),
    "works a number": ({"work": lambda node: 3}, r"its work gives 3, in .*; let it give ops.Work\(flops, nbytes\)"),
    "line of a number": ({"line": lambda program, node: 3}, "its line gives 3, in .*; let it give a text"),
    "memory of a number": ({"memory": lambda allocator, node: 3}, "its memory gives 3, in .*; let it give a tuple"),
    "starts a word": ({**gather(PAIR), "starts": "gather"}, r"starts is 'gather'; give one of"),
    "kind is a text": ({"kind": "per_rank"}, "kind is 'per_rank', which is no function"),
}  # fmt: skip


@pytest.fixture(scope="module")
def traced() -> tuple[Program, Any]:
    """A program without passes of a step over a weight of three elements, of which rank 1 has one."""
    params = fzero.partition({"w": torch.arange(19.0)}, MESH)
    step = fzero.simulate(lambda params, x: fzero.tree.map(lambda w: 2 * w, params), MESH, donate=False)
    return step.trace(params, torch.ones(2)), params


def say(program: Program, name: str, known: dict[str, Any]) -> str:
    """What fzero says of an operation, in a run on all ranks and in the listing of its program."""
    fields = {"fake": lambda x: x.new_zeros(()), "kind": lambda walk, node: walk.per_rank} | known
    try:
        target = ops.define(f"test_moves_{name.replace(' ', '_')}", **fields)
        program = program.copy()
        with program.graph.inserting_before(program.output):
            program.emit(target, program.placeholders[0])
        str(passes.verify(program)), program.timeline()
        lockstep.run(program, [[torch.ones(16), torch.ones(1)], [torch.ones(3), torch.ones(1)]])
    except FzeroError as error:
        return str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "silent"


def test_each_mistake_names_the_operation(traced: Any) -> None:
    words = {name: say(traced[0], name, known) for name, (known, _) in WRONG.items()}
    prefix = "operation 'test_moves_"
    assert {
        name: said
        for name, said in words.items()
        if not said.startswith(prefix + name.replace(" ", "_")) or not re.search(WRONG[name][1], said)
    } == {}


def test_values_may_differ_along_the_axes_of_their_kind(traced: Any) -> None:
    known = {"kind": lambda walk, node: frozenset({"fsdp"}), "perform": sum_own}
    assert say(traced[0], "differs along one axis", known) == "silent"
