"""The hoist pass: leaves that a loop gathers in every turn are gathered once, in front of it, and stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from fzero.passes.order import erase_dead
from fzero.program import ops
from fzero.program.arguments import LeafMove, operand_of
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import find_loops, is_call
from fzero.program.signature import Argument


def hoist(program: Program, *, keep: Collection[str] | None = None) -> Program:
    """Gather the leaves that all turns of a loop share, and those of the layer of each turn, in front of the loop, with
    the casts of their slices: all of them, as stages 1 and 2 do, or the leaves of the buckets that `keep` names.

    Same results, bit for bit. k microbatches then gather once, and so do the forward and backward pass of a layer. The
    gathered leaves live until the last turn.
    """
    if not find_loops(program.graph):
        return program
    program = program.copy()
    for node in find_loops(program.graph):
        _hoist_gathers(program, node, keep)
    return program


def _hoist_gathers(program: Program, node: Node, keep: Collection[str] | None) -> None:
    loop = Loop(*node.args)
    body = loop.body.copy()
    given, arguments, end = body.placeholders, list(body.arguments), len(body.arguments) - len(loop.constants)
    layers = {
        x: items for x, items in zip(given[end - len(loop.lists) :], loop.lists) if not isinstance(items, fx.Node)
    }
    constants, lists, gathered = dict(zip(given[end:], loop.constants)), list(loop.lists), list(loop.constants)
    for gather in body.graph.find_nodes(op="call_function", target=ops.gather):
        name = LeafMove(*gather.args).bucket
        names = loop.layers.get(name, [name])
        if keep is not None and not set(names) <= set(keep):
            continue
        chain = _find_chain(gather)
        root = operand_of(chain[0])
        if root in constants:
            gathered.append(_copy_chain(program, node, chain, constants[root], 0))
            at = len(given)
        elif root in layers:
            lists.append([_copy_chain(program, node, chain, x, row) for row, x in enumerate(layers[root])])
            at, end = end, end + 1
        else:
            continue
        with body.graph.inserting_after(given[at - 1]):
            given.insert(at, body.graph.placeholder(f"gathered_{len(given)}"))
        given[at].meta["val"] = gather.meta["val"]
        kind = frozenset(program.layout_of(gather).split_axes)
        arguments.insert(at, Argument(f"gathered.{len(given)}", kind=kind))
        body.substitute(gather, given[at])
    erase_dead(body.graph)
    body = replace(body, arguments=tuple(arguments))
    node.args = tuple(loop._replace(body=body, lists=lists, constants=gathered))


def _find_chain(gather: Node) -> list[Node]:
    """The casts that make what a gather moves, and the gather."""
    chain = [gather]
    while is_call(source := operand_of(chain[0]), torch.ops.aten._to_copy.default):
        chain.insert(0, source)
    return chain


def _copy_chain(program: Program, node: Node, chain: list[Node], value: Node, row: int) -> Node:
    """A copy of a chain from another value on, in front of a loop. The gather is one of the layer at a row."""
    layers = Loop(*node.args).layers
    with program.graph.inserting_before(node):
        for link in chain:
            _, *rest = link.args
            if link is chain[-1]:
                bucket, *others = rest
                rest = [layers[bucket][row] if bucket in layers else bucket, *others]
            meta = {key: each for key, each in link.meta.items() if key != "val"}
            value = program.emit(link.target, value, *rest, **link.kwargs)
            value.meta.update(meta)
    return value
