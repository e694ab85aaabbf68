"""Kinds: what the values of a program are, seen across ranks, and how an error speaks of them.

    Slice(bucket, leaf)    sharded: one global value of which this rank holds a slice
    otherwise              the mesh axes along which the value differs between ranks, a frozenset
                           uniform, the same everywhere: none of them
                           per-rank, the batch and random draws and what is computed from them: all of them
                           with RAGGED among them its shape differs, too, as that of slices does
    Buffer(...)            what a collective moves for some leaves of a bucket: padding is in it
    a list of kinds        a list of leaves, position by position

After the varying and invariant values of JAX's shard_map. `inference` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fzero.base.errors import FzeroError
from fzero.program import ops
from fzero.program.ops import Node, is_call, name_of
from fzero.program.program import Argument, Program, Result

UNIFORM: frozenset[str] = frozenset()
RAGGED = "its shape"
Kind = Any


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a leaf of a bucket."""

    bucket: str
    leaf: int


@dataclass(frozen=True)
class Buffer:
    """A buffer of leaves of a bucket, padding included: gathered, or a block of their scattered mean; `done` once it
    was waited for."""

    gathered: bool
    bucket: str
    leaves: tuple[int, ...]
    done: bool = False


def kind_of_state(program: Program, value: Argument | Result) -> Kind | None:
    """The kind that a state argument has and a state result must have; None for other values."""
    if value.bucket is None:
        return None
    return UNIFORM if program.layouts[value.bucket].replicated else Slice(value.bucket, value.leaf)


def axes_of(program: Program, kind: Kind) -> frozenset[str]:
    """The mesh axes along which a value of this kind differs between ranks."""
    return frozenset({program.mesh.shard_axis}) if isinstance(kind, Slice) else kind - {RAGGED}


def drifts(program: Program, node: Node, axes: frozenset[str], leaf: Slice | None = None) -> FzeroError:
    """The error of a node where a value that differs along these axes meets a slice, that of `leaf` where known."""
    use = next(iter(node.users), node) if is_call(node, ops.beside, ops.take) else node
    met = name_of(use if use.op == "call_function" else node)
    problem = f"a per-rank value meets a slice of this leaf in {met}: ranks would drift apart"
    where = path_of(program, leaf) if leaf is not None else leaf_near(program, node)
    return FzeroError(where, problem + (line_of(node) or line_of(use)), average_first(axes))


def broken(program: Program, node: Node, problem: str, way_out: str) -> FzeroError:
    """The error of a node that does something else with its values than their kinds allow."""
    return FzeroError(leaf_near(program, node), f"{node.name} {problem}{line_of(node)}", way_out)


def average_first(axes: frozenset[str]) -> str:
    """The way out for a value that differs along these axes."""
    means = " and ".join(f"fzero.pmean(x, {axis!r})" for axis in sorted(axes - {RAGGED}))
    return f"make it the same on every rank first, with {means}"


def line_of(node: Node) -> str:
    """` (the user's line)` of a node, "" where it has none."""
    return f" ({node.stack_trace})" if node.stack_trace else ""


def words(program: Program, kind: Kind) -> str:
    """A kind as an error says it."""
    if isinstance(kind, Slice):
        return f"a slice of {path_of(program, kind)}"
    if isinstance(kind, Buffer):
        held = "gathered" if kind.gathered else "scattered"
        return f"a {held} buffer of leaves {list(kind.leaves)} of {kind.bucket!r}{'' if kind.done else ' on its way'}"
    if isinstance(kind, list):
        return "a list"
    ragged = ", in shape too" if RAGGED in kind else ""
    return f"a value that differs along {sorted(kind - {RAGGED})}{ragged}" if kind else "a whole value"


def path_of(program: Program, kind: Slice) -> str:
    """The path of the leaf."""
    return program.layouts[kind.bucket].leaves[kind.leaf].path or kind.bucket


def leaf_near(program: Program, node: Node) -> str:
    """The path of the leaf that a node works on, or its bucket: those that it names, or the nearest state argument
    behind it."""
    if is_call(node, *_NAMES_BUCKET) and node.args[1] in program.layouts:
        return _leaf_named(program, node)
    given = zip(program.placeholders, program.arguments)
    state = {node: program.path_of(argument) for node, argument in given if argument.bucket is not None}
    frontier, seen = [node, *node.users], set[Node]()
    while frontier:
        for near in frontier:
            if near in state:
                return state[near]
        seen.update(frontier)
        frontier = list(dict.fromkeys(x for near in frontier for x in near.all_input_nodes if x not in seen))
    return node.name


_NAMES_BUCKET = (ops.gather, ops.scatter, ops.take, ops.all_gather, ops.reduce_scatter, ops.whole, ops.part)


def _leaf_named(program: Program, node: Node) -> str:
    layout, leaf = program.layout_of(node), node.args[2]
    if is_call(node, ops.whole, ops.part):
        leaf = dict(enumerate(leaf)).get(node.args[3])
    return layout.leaves[leaf].path if leaf in range(len(layout.leaves)) else layout.bucket
