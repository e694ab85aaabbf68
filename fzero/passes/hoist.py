"""The hoist pass of stages 1 and 2: leaves that a loop gathers in every turn are gathered once, in front of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fzero.passes.order import erase_dead
from fzero.program import ops
from fzero.program.kinds import UNIFORM
from fzero.program.operation import Node
from fzero.program.program import Argument, Program
from fzero.program.records import body_of, is_call


def hoist(program: Program) -> Program:
    """Gather the leaves that all turns of a loop share in front of the loop, with the casts of their slices.

    Same results, bit for bit. k microbatches then gather once, and the gathered leaves live until the last turn.
    """
    loops = [node for node in program.graph.nodes if body_of(node) is not None]
    if not loops:
        return program
    names = [node.name for node in loops]
    program = program.copy()
    for node in list(program.graph.nodes):
        if node.name in names:
            _hoist_gathers(program, node)
    return program


def _hoist_gathers(program: Program, loop: Node) -> None:
    body = loop.args[0].copy()
    given = list(loop.args[4])
    constants = dict(zip(body.placeholders[-len(given) :] if given else (), given))
    arguments = list(body.arguments)
    for gather in body.graph.find_nodes(op="call_function", target=ops.gather):
        chain = _find_chain(gather, constants)
        if chain is None:
            continue
        values = dict(constants)
        with program.graph.inserting_before(loop):
            for node in chain:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = program.emit(node.target, *args, **kwargs)
                values[node].meta = {**node.meta, "val": values[node].meta["val"]}
        with body.graph.inserting_after(body.placeholders[-1]):
            new = body.graph.placeholder(f"gathered_{len(arguments)}")
        new.meta["val"] = gather.meta["val"]
        arguments.append(Argument(f"gathered.{len(arguments)}", kind=UNIFORM))
        given.append(values[gather])
        body.substitute(gather, new)
    body = replace(body, arguments=tuple(arguments))
    erase_dead(body.graph)
    loop.args = (body, *loop.args[1:4], given, *loop.args[5:])


def _find_chain(gather: Node, constants: dict[Node, Node]) -> list[Node] | None:
    """The casts of a constant that a gather moves, and the gather; None where it moves another value."""
    chain = [gather]
    while chain[0].args[0] not in constants:
        source = chain[0].args[0]
        if not is_call(source, torch.ops.aten._to_copy.default):
            return None
        chain.insert(0, source)
    return chain
