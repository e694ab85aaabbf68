"""Wrong operations: each operation of `fzero.variants` with one thing changed in what it does, or in what its record
says, and the field of the record that the error has to name. A helper of the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from programs import Case, Outputs, apply, layers, loss, trained
from torch import Tensor

from fzero import VirtualMesh, optim
from fzero.passes import bucket
from fzero.program import ops
from fzero.program.operation import Operation
from fzero.program.program import Program
from fzero.program.records import record, register
from fzero.program.rules import guard
from fzero.variants import int8_gather, int8_mean, int8_scatter

MESH = VirtualMesh(fsdp=2)
TARGETS = {
    "int8_gather": [int8_gather.int8_all_gather],
    "int8_mean": [int8_mean.pack],
    "int8_scatter": [int8_scatter.add_error, int8_scatter.exchange],
}
PASSES = {"int8_gather": int8_gather.int8_gather, "int8_mean": int8_mean.int8_mean,
          "int8_scatter": int8_scatter.int8_scatter}  # fmt: skip


class Mutant(NamedTuple):
    """A wrong operation in the place of `target`, and what its error says."""

    name: str
    variant: str
    target: Any
    operation: Operation
    says: str


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def first(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A result with its first tensor changed."""
    return [change(value[0]), *value[1:]] if isinstance(value, list) else change(value)


def in_memory_of(operand: Tensor, like: Tensor) -> Tensor:
    """Memory of an operand, in the form of a result where it is as large."""
    flat = operand.view(-1).view(torch.uint8)
    nbytes = min(flat.numel(), like.nbytes) // like.element_size() * like.element_size()
    return flat[:nbytes].view(like.dtype)


def write(x: Tensor) -> None:
    x.view(-1)[:1].add_(1)


# what it returns, of the right result and its operands -> the field that is named
RESULTS: dict[str, tuple[Callable[[Any, list[Tensor]], Any], str]] = {
    "fewer elements": (lambda y, xs: first(y, lambda x: x[:-16].clone()), "the shape"),
    "more elements": (lambda y, xs: first(y, lambda x: torch.cat([x, x])), "the shape"),
    "another rank": (lambda y, xs: first(y, lambda x: x[None].clone()), "the shape"),
    "another dtype": (lambda y, xs: first(y, lambda x: x.to(torch.float64)), "fake gives the dtype .*float64"),
    "other strides": (lambda y, xs: first(y, lambda x: torch.stack([x, x], 1)[:, 0]), "fake gives the strides"),
    "nothing": (lambda y, xs: None, "fake gives .*, and perform gives nothing"),
    "another structure": (lambda y, xs: y[0] if isinstance(y, list) else [y, y], "fake gives"),
    "no tensor": (lambda y, xs: first(y, lambda x: 1.0), "fake gives"),
    "memory of an operand": (
        lambda y, xs: first(y, lambda x: in_memory_of(xs[0], x)),
        "(fake gives new memory, and perform gives memory of|the shape)",
    ),
    "a write": (lambda y, xs: [write(xs[0]), y][1], r"writes names \[\], and perform writes into"),
    "a write behind torch's back": (lambda y, xs: [write(xs[-1].data), y][1], r"writes names \[\], and perform"),
    "a write that changes nothing": (lambda y, xs: [xs[0].mul_(1), y][1], r"writes names \[\], and perform"),
}  # fmt: skip
TWO_RESULTS: dict[str, tuple[Callable[[Any, list[Tensor]], Any], str]] = {
    "two results in one memory": (
        lambda y, xs: [y[1].view(torch.uint8)[: y[0].numel()], y[1]], "(two in one memory|the shape)"
    ),
    "a third result": (lambda y, xs: [*y, y[0]], "fake gives"),
}  # fmt: skip


def longer(asked: Any) -> Any:
    if isinstance(asked, ops.AllGather):
        return ops.AllGather(asked.what, asked.axis, torch.cat([asked.block, asked.block]))
    return ops.AllToAll(asked.what, asked.axis, torch.cat([asked.blocks, asked.blocks]))


def wider(asked: Any) -> Any:
    if isinstance(asked, ops.AllGather):
        return ops.AllGather(asked.what, asked.axis, asked.block.to(torch.int16))
    return ops.AllToAll(asked.what, asked.axis, asked.blocks.to(torch.int16))


def sent(asked: Any) -> Tensor:
    return asked.block if isinstance(asked, ops.AllGather) else asked.blocks


# what it asks other ranks for -> the words of the error
EXCHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "other bytes": (lambda asked: longer(asked), r"moves lists .*, \d+ B as exchange 1, and perform yields .* B"),
    "bytes of another dtype": (lambda asked: wider(asked), "moves lists .*uint8.*, and perform yields .*int16"),
    "another collective": (
        lambda asked: ops.AllReduce(asked.what, asked.axis, sent(asked), "max"), "moves lists .*yields all_reduce over"
    ),
    "an unknown axis": (lambda asked: ops.AllReduce(asked.what, "tp", sent(asked), "max"), "over the axis 'tp'; the m"),
    "no exchange": (lambda asked: "all_gather", "perform yields a str, which is no exchange"),
}  # fmt: skip


def change_entry(**fields: Any) -> Callable[[Any, Any], Any]:
    return lambda moves, given: [entry._replace(**fields) for entry in moves(*given)]


# what `moves` lists -> the words of the error
MOVES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "lists no collective": (lambda moves, given: [], "moves lists 0 exchanges, and perform yields another"),
    "lists one more": (lambda moves, given: [*moves(*given)] * 2, "as exchange 2, and perform ends before it"),
    "lists other bytes": (change_entry(nbytes=8), "moves lists .* 8 B as exchange 1, and perform yields"),
    "lists another collective": (change_entry(op="broadcast"), "moves lists broadcast over 'fsdp'"),
    "lists another dtype": (change_entry(dtype=torch.float32), "moves lists .*float32.*, and perform yields .*uint8"),
    "lists an unknown axis": (change_entry(axis="tp"), r"moves names the axis 'tp'; the mesh has \('fsdp',\)"),
    "lists an unknown bucket": (change_entry(bucket="nobody"), r"moves names the bucket 'nobody'; there are \["),
}


def wrap(original: Operation, change: Callable[[Any, list[Tensor]], Any], ask: Callable[[Any], Any]) -> Any:
    """The `perform` of an operation, with its result and its exchanges changed."""

    def perform(program: Program, node: Any, rank: Any) -> Any:
        assert original.perform is not None
        run = original.perform(program, node, rank)

        def steps(given: list[Tensor], made: Any) -> Any:
            answer = None
            while True:
                try:
                    asked = made.send(answer)
                except StopIteration as end:
                    return change(end.value, given)
                answer = yield ask(asked)

        def changed(*args: Any, **kwargs: Any) -> Any:
            made, given = run(*args, **kwargs), list(tensors(args))
            return steps(given, made) if inspect.isgenerator(made) else change(made, given)

        return changed

    return perform


def _keep(y: Any, xs: list[Tensor]) -> Any:
    return y


def _list_changes(original: Operation, two: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each mutant of an operation: its name, the fields that differ, the words of its error."""
    for name, (change, says) in (RESULTS | (TWO_RESULTS if two else {})).items():
        yield name, {"perform": wrap(original, change, lambda asked: asked)}, says
    yield "raises", {"perform": wrap(original, lambda y, xs: 1 / 0, lambda asked: asked)}, "perform raises ZeroDivision"
    if original.moves is None:
        yield "yields", {"perform": lambda program, node, rank: lambda *args: (x for x in [])}, "moves lists no exch"
        yield "shares", {"shares": lambda node: True}, "(shares says that the result is a view|$)"
        return
    moves = original.moves
    for name, (ask, says) in EXCHANGES.items():
        yield name, {"perform": wrap(original, _keep, ask)}, says
    for name, (listed, says) in MOVES.items():
        yield name, {"moves": lambda *given, listed=listed: listed(moves, given)}, says
    yield "at once", {"perform": lambda program, node, rank: lambda *args: args[0]}, "perform gives a .* at once"
    yield "moves nothing", {"moves": None, "starts": original.starts}, "moves lists no exchange, and perform gives a ge"
    yield "shares", {"shares": lambda node: True}, "shares says that the result is a view, and fake gives new memory"


@cache
def list_mutants() -> list[Mutant]:
    """All mutants, registered."""
    made = []
    for variant, targets in TARGETS.items():
        for target in targets:
            original = record(target)
            two = original.name == "int8_add_error"
            for number, (name, fields, says) in enumerate(_list_changes(original, two)):
                if name == "shares" and two:
                    continue  # `shares` is of a single result
                mutant = f"{original.name}_{number}"

                def call(*args: Any, fake: Any = original.fake, **kwargs: Any) -> Any:
                    return fake(*args, **kwargs)

                wrong = replace(
                    original, name=mutant, target=call, **{x: guard(mutant, x, rule) for x, rule in fields.items()}
                )
                register(wrong)
                made.append(
                    Mutant(f"{original.name}: {name}", variant, target, wrong, f"operation '{mutant}': .*{says}")
                )
    return made


@cache
def good(variant: str | None) -> tuple[Case, Program]:
    """A step of one layer, and its program with a variant, in which each collective is waited for where it starts."""
    case = trained(optim.sgd(0.1), layers(1), MESH, loss)
    return case, apply(case.trace(), bucket, *([PASSES[variant]] if variant else []))


def give(variant: str | None) -> Outputs:
    """The arguments of each rank: fresh ones, with state of the variant that is zero."""
    case, program = good(variant)
    for rank, given in enumerate(arguments := case.arguments()):
        layouts = [(program.layouts[state.bucket], state) for state in program.pass_state]
        given += [torch.zeros(len(layout.part(state.leaf, rank)), dtype=state.dtype) for layout, state in layouts]
    return arguments


def seed(mutant: Mutant) -> Program:
    """The good program with the wrong operation in it."""
    program = good(mutant.variant)[1].copy()
    for node in program.graph.find_nodes(op="call_function", target=mutant.target):
        node.target = mutant.operation.target
    return program
