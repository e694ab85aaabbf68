"""Refusals: the errors about a program's nodes and kinds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.program.arguments import bucket_of, view_of
from fzero.program.kinds import RAGGED, Buffer, Kind, Slice, axes_of
from fzero.program.operation import Node
from fzero.program.records import leaves_of, name_of, record
from fzero.program.variation import find_sources, is_in_place_of_state, is_number

if TYPE_CHECKING:
    from fzero.program.program import Program

PASS_BUG = "a bug in the last pass: please report it, or remove the pass to confirm"


def refuse_node(program: Program, node: Node, problem: str, way_out: str) -> FzeroError:
    """The error of a node, at the leaf nearest to the node and with the user's line."""
    return FzeroError(leaf_near(program, node), f"{node.name} {problem}{line_of(node)}", way_out)


def refuse_emit(target: Any, args: Any, kwargs: Any, error: Exception) -> FzeroError:
    """The error of a node that a pass emits, and that refuses its operands with `error`."""
    given: list[Node] = []
    fx.map_arg((args, kwargs), given.append)
    values = [x.meta.get("val") for x in given]
    sizes = ", ".join(describe_form(x) for x in values if isinstance(x, Tensor))
    problem = f"cannot be emitted: {type(error).__name__}: {str(error).strip()}, of {sizes or 'no tensors'}"
    way_out = "give operands that it takes; a slice has the elements of a leaf that one rank holds, flat"
    return FzeroError(getattr(target, "__name__", str(target)), problem, way_out)


def refuse_drift(
    program: Program, node: Node, axes: frozenset[str], leaf: Slice | None = None, use: Node | None = None
) -> FzeroError:
    """The error of a node where a value that differs along these axes meets a slice of `leaf`, by default of the leaf
    nearest to the node.

    `use` is the node of the user's code, where `node` only prepares an operand for it.
    """
    use = node if use is None else use
    met = name_of(use if use.op == "call_function" else node)
    where = path_of(program, leaf) if leaf is not None else leaf_near(program, node)
    problem = f"a per-rank value meets a slice of this leaf in {met}: ranks would drift apart"
    plain, way_out = _find_plain_state(program, node, axes)
    if plain:
        problem = f"{plain} meets this leaf in {met}: {_IS_BATCH}"
    return FzeroError(where, problem + (line_of(node) or line_of(use)), way_out)


def refuse_state(program: Program, where: str, path: str, kind: Kind, node: Node) -> FzeroError:
    """The error of the result at `path`: new state of the leaf `where` that differs between ranks since `node`."""
    has_batch = bool(find_sources(program, node))  # else draws, a collective over other axes, or an index
    problem = f"depends on this rank's batch in {node.name}" if has_batch else f"differs between ranks in {node.name}"
    problem = f"result {path!r} is state but {problem}: ranks would drift apart"
    plain, way_out = _find_plain_state(program, node, axes_of(program, kind))
    if plain:
        problem = f"{plain} meets this leaf in {node.name}: {_IS_BATCH}"
    return FzeroError(where, problem + line_of(node), way_out)


_IS_BATCH = "a plain tensor counts as this rank's batch, and ranks would drift apart"


def _find_plain_state(program: Program, node: Node, axes: frozenset[str]) -> tuple[str, str]:
    """The plain arguments in the place of state from which the variation of a node comes, in words, "" where it comes
    from others too; and the way out."""
    sources = find_sources(program, node)
    if not sources or not all(is_in_place_of_state(program, source) for source in sources):
        return "", advise_mean(program, axes)
    way_out = "partition it, with fzero.partition(state, mesh, like=params), or make it with optimizer.init(params)"
    if all(is_number(program, source) for source in sources):
        way_out += f"; or {advise_mean(program, axes)}"
    names = " and ".join(f"argument {source.path}" for source in sources[:2])
    return f"{names}, a plain tensor in the place of state,", way_out


def refuse_objective(what: str, axes: Iterable[str], line: str) -> FzeroError:
    """The error of a number that differs along model axes, where the ranks compute parts of one number."""
    names = ", ".join(map(repr, sorted(axes)))
    problem = f"differs along the model axis {names}, along which ranks compute parts of one value{line}"
    return FzeroError(what, problem, f"join the parts where they first belong together, as by fzero.psum(x, {names})")


def advise_mean(program: Program, axes: frozenset[str]) -> str:
    """The way out for a value that differs along these axes: the call of `fzero.pmean` that makes it uniform. Along
    model axes ranks have parts, of which a mean says nothing."""
    names = tuple(sorted(axes - {RAGGED}))
    if set(names) <= {*program.model_axes}:
        given = f"{(names[0] if len(names) == 1 else names)!r}"
        return f"join the parts of all ranks along {given} first (docs/axes.md)"
    return f"make it the same on every rank first, with fzero.pmean(x, {(names[0] if len(names) == 1 else names)!r})"


def line_of(node: Node) -> str:
    """The line of the user's code behind a node, in parentheses and with a blank in front; "" where there is none."""
    return f" ({node.stack_trace})" if node.stack_trace else ""


def describe_kind(program: Program, kind: Kind) -> str:
    """A kind in words, for an error."""
    if isinstance(kind, Slice):
        over = f" that differs along {sorted(kind.over)}" if kind.over else ""
        return f"a slice of {path_of(program, kind)}{over}"
    if isinstance(kind, Buffer):
        state = "gathered" if kind.gathered else "scattered"
        return f"a {state} buffer of leaves {list(kind.leaves)} of {kind.bucket!r}{'' if kind.done else ' on its way'}"
    if isinstance(kind, list):
        return "a list"
    ragged = ", in shape too" if RAGGED in kind else ""
    return f"a value that differs along {sorted(kind - {RAGGED})}{ragged}" if kind else "a whole value"


def path_of(program: Program, kind: Slice) -> str:
    """The path of the leaf that a slice belongs to, or its bucket where the leaf has no path."""
    return program.layouts[kind.bucket].leaves[kind.leaf].path or kind.bucket


def leaf_near(program: Program, node: Node) -> str:
    """The path of the leaf or bucket that a node names. For a node that names none, the path of the nearest state
    argument: breadth first over the inputs of the node and of its users. The node's own name where there is none."""
    if node.op == "call_function" and record(node).names and bucket_of(node) in program.layouts:
        return _name_leaf(program, node)
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


def _name_leaf(program: Program, node: Node) -> str:
    """The path of the one leaf that a node names; its bucket where the node names several, or a leaf out of range."""
    layout = program.layout_of(node)
    if record(node).names == "position":
        view = view_of(node)
        if view.position not in range(len(view.leaves)):
            return layout.bucket
    leaves = leaves_of(node)
    is_one = record(node).names != "leaves" and leaves[0] in range(len(layout.leaves))
    return layout.leaves[leaves[0]].path if is_one else layout.bucket
