"""Mistakes of a step that computes something, and not what its author means.

    plain parameters             ranks train apart: parameters were not partitioned
    captured parameters          they are constants of the program: no step trains them; of a module that the step
                                 uses by `apply`, an error
    state that is not returned   an optimizer begins anew at each step
    elements of a part           a sum over a whole split leaf, divided by the product of the shape of this rank's part

What is certainly wrong is an error. What may be meant is a warning of the logger "fzero".
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.reachable import walk
from fzero.base.torch_private import is_wrapper, storage_key
from fzero.layout.layout import Leaf
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import body_of, is_call, record, shares_memory
from fzero.program.refusals import line_of
from fzero.program.signature import Argument
from fzero.values.lowering import Apply, StatefulApply
from fzero.values.regions import get_mark

_log = logging.getLogger("fzero")


def check_mistakes(program: Program, fn: Callable[..., Any], *, warn: bool = True) -> None:
    """Look for mistakes in a program that was just traced from `fn`.

    Raises:
        FzeroError: where each rank would update plain tensors by gradients of its own batch; where the step uses the
            parameters of a module that was lowered, beside the function that `lower` returned; where a mean over a
            split leaf is taken over the elements of a part.
    """
    _refuse_plain_parameters(program)
    _refuse_counts_of_parts(program)
    _report_captured_parameters(program, fn, warn)
    if warn:
        _warn_of_lost_state(program)


# parameters that were not partitioned


def _refuse_plain_parameters(program: Program) -> None:
    """Refuse a step that updates plain arguments by gradients which no collective averaged.

    An update is computed from the argument and the gradient element by element, outside of the backward pass, and is
    returned at the argument's place with its shape. Two kinds of update are meant, and silent: of state that no
    gradient meets, and of a part of the batch, which has the other batch arguments' first dimension.
    """
    if program.mesh.size() == 1:
        return
    gradients = _find_gradients(program, through_collectives=False)
    given = zip(program.arguments, program.placeholders)
    plain = {argument: node for argument, node in given if argument.bucket is None}
    updated: dict[Argument, Node] = {}
    for argument, node in plain.items():
        users = _follow_elementwise([node]) & gradients
        for result, value in zip(program.tensor_results, program.output.args[0]) if users else ():
            if value in users and _has_place_of(result.path, argument) and _has_type_of(value, node):
                updated[argument] = value
    others = [node.meta["val"] for argument, node in plain.items() if argument not in updated]
    rows = {value.shape[0] for value in others if value.ndim}
    for argument, value in updated.items():
        shape = value.meta["val"].shape
        if rows and not (shape and shape[0] in rows):
            raise FzeroError(
                f"argument {argument.path}",
                "is a plain tensor, which counts as this rank's batch, and is updated by a gradient of this rank's "
                f"batch{_find_line(value)}: each of {program.mesh.size()} ranks would train alone",
                "partition the parameters first, with fzero.partition(params, mesh)",
            )


def _has_place_of(path: str, argument: Argument) -> bool:
    """Whether the path of a result ends as the path of an argument, without the argument's position."""
    inner = argument.path.partition(".")[2]
    return not inner or path == inner or path.endswith(f".{inner}")


def _has_type_of(value: Node, other: Node) -> bool:
    a, b = value.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


# elements of a part


def _refuse_counts_of_parts(program: Program) -> None:
    """Refuse to divide a sum over a whole split leaf by the elements of a part, the product of its shape in a step."""
    if all(layout.splits == 1 for layout in program.layouts.values()):
        return
    for node in program.graph.nodes:
        by = _find_divisor(node)
        leaf = None if by is None else _find_summed_leaf(program, node.args[0])
        if leaf is not None and by is not None and math.isclose(by, leaf.numel, rel_tol=1e-12):
            problem = f"its sum over all ranks is divided by {leaf.numel}, the elements of a rank's part"
            way_out = (
                "take .mean(), or divide by .numel(), the number of all elements, or by what global_shape says; give"
                " a number that is not of the leaf as a tensor"
            )
            raise FzeroError(leaf.path, f"{problem}{_find_line(node)}", way_out)


def _find_divisor(node: Node) -> float | None:
    """The number that a node divides by, or by whose reciprocal it multiplies."""
    is_product = is_call(node, torch.ops.aten.mul.Tensor)
    if not (is_product or is_call(node, torch.ops.aten.div.Tensor)) or type(node.args[1]) not in (int, float):
        return None
    by = float(node.args[1])
    return by if not is_product else (1 / by if by else None)


def _find_summed_leaf(program: Program, node: Any) -> Leaf | None:
    """The split leaf that a 0-d value was computed from alone, as a sum over all of its elements."""
    layouts, is_summed = program.layouts, False
    given = dict(zip(program.placeholders, program.arguments))
    while isinstance(node, fx.Node):
        if is_call(node, ops.scatter):
            layout, leaf = layouts[node.args[1]], node.args[2]
        elif node in given and given[node].bucket is not None:
            layout, leaf = layouts[given[node].bucket], given[node].leaf
        else:
            is_summed |= node.op == "call_function" and record(node).moves is not None and "sum" in node.args
            node = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
            continue
        return layout.leaves[leaf] if is_summed and layout.splits > 1 else None
    return None


# parameters that the step captured


def _report_captured_parameters(program: Program, fn: Callable[..., Any], warn: bool) -> None:
    """Refuse a captured parameter of a module that was lowered, and warn of others. One whose shape or dtype alone is
    used, as by `weight.new_zeros(...)`, is none of them."""
    read = {node.target for node in program.graph.find_nodes(op="get_attr") if _is_read(node)}
    captured = {id(x): name for name, x in program.constants.items() if x.requires_grad and name in read}
    if not captured:
        return
    found = list(walk("step", fn))
    lowered = [(name, x.find_lowered()) for name, x in found if isinstance(x, (Apply, StatefulApply))]
    for value in program.constants.values():
        key = storage_key(value) if id(value) in captured and not is_wrapper(value) else None
        for name, paths in lowered:
            if key in paths:
                problem = (
                    f"the step uses this parameter of a module that was lowered{_find_use(program, value)}, beside "
                )
                problem += f"the leaf that {name} is given: it is a constant, and no step trains it"
                way_out = "let the forward use its own submodules, or give the step a frozen copy of the module: "
                raise FzeroError(paths[key], problem, f"{way_out}copy.deepcopy(module).requires_grad_(False)")
    if not warn:
        return
    places = {id(value): name for name, value in found if isinstance(value, Tensor)}
    names = [places.get(each, captured[each]) for each in captured]
    message = (
        "%s: uses %s, which requires grad and is no argument: it is a constant of the program, and no step trains it; "
        "call apply(params, ...) of fzero.lower(module) with the params that the step is given, or freeze the module "
        "with requires_grad_(False)"
    )
    _log.warning(message, program.name, _list_some(names))


def _is_read(node: Node) -> bool:
    """Whether elements of a value are used, in the bodies of loops too, and not its shape or its dtype alone."""
    for user in node.users:
        body = body_of(user)
        if body is None:
            is_read = user.op == "output" or not record(user).takes_shape
        else:
            inside = [x for x, given in zip(body.placeholders, Loop(*user.args).operands) if given is node]
            is_read = not inside or any(map(_is_read, inside))
        if is_read:
            return True
    return False


def _find_use(program: Program, value: Tensor) -> str:
    """The user's line of the first use of a constant."""
    nodes = (node for node in program.graph.find_nodes(op="get_attr") if program.constants[node.target] is value)
    return next((line_of(user) for node in nodes for user in node.users if line_of(user)), "")


def _list_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


# state that is not returned


def _warn_of_lost_state(program: Program) -> None:
    """Warn of an argument whose slices meet gradients and which the step does not return, where it returns other state.

    Arguments of one structure are told apart by their use: what is gathered too is taken for the parameters.
    """
    gradients = _find_gradients(program, through_collectives=True)
    returned = [result.path for result in program.tensor_results if result.bucket is not None]
    state = zip(program.tensor_results, program.output.args[0])
    if not any(result.bucket is not None and value in gradients for result, value in state):
        return
    nodes: dict[str, dict[str, Node]] = {}  # position of an argument -> path in it -> node
    for argument, node in zip(program.arguments, program.placeholders):
        if argument.bucket is not None:
            position, _, inner = argument.path.partition(".")
            nodes.setdefault(position, {})[inner] = node
    uses = {position: _follow_elementwise(held.values()) for position, held in nodes.items()}
    meeting = [position for position in nodes if uses[position] & gradients]
    count = Counter(frozenset(nodes[position]) for position in meeting)
    for position in sorted(meeting, key=lambda position: _is_gathered(uses[position] | {*nodes[position].values()})):
        paths = frozenset(nodes[position])
        if count[paths] > _count_copies(paths, returned):
            count[paths] -= 1
            meets = next(node for node in program.graph.nodes if node in uses[position] & gradients)
            message = (
                "%s: argument %s meets gradients%s, and is not returned while other state is: the next step would "
                "begin with its old values; return it if it is state of an optimizer"
            )
            _log.warning(message, program.name, position, line_of(meets))


def _is_gathered(uses: Iterable[Node]) -> bool:
    return any(is_call(user, ops.gather) for node in uses for user in node.users)


def _count_copies(paths: frozenset[str], returned: list[str]) -> int:
    """How many trees with these paths are among the paths of results."""
    first = min(paths)
    heads = [path.removesuffix(first) for path in returned if path == first or path.endswith(f".{first}") or not first]
    return sum({head + path if path else head for path in paths} <= set(returned) for head in heads)


# flow


def _is_in_backward(node: Node) -> bool:
    return node.op == "call_function" and get_mark(node).in_backward


def _find_gradients(program: Program, *, through_collectives: bool) -> set[Node]:
    """The nodes of the backward pass and all that is computed from them; without `through_collectives`, from what no
    collective has moved."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        body = body_of(node)
        if body is not None and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        elif body is not None:
            inside = _find_gradients(body, through_collectives=through_collectives)
            if not inside.isdisjoint(body.output.args[0]):
                found.add(node)
        if node.op != "call_function" or (not through_collectives and record(node).moves is not None):
            continue
        if _is_in_backward(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _follow_elementwise(nodes: Iterable[Node]) -> set[Node]:
    """The nodes outside of the backward pass that are computed from `nodes` element by element, step by step."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and _is_elementwise(user) and not _is_in_backward(user):
                found.add(user)
                waiting.append(user)
    return found


def _is_elementwise(node: Node) -> bool:
    """Whether a node is elementwise. A function that returns a list is one of lists, elementwise at each position."""
    if node.op != "call_function" or record(node).moves is not None:
        return False
    return record(node).is_pointwise or shares_memory(node) or isinstance(node.meta.get("val"), (list, tuple))


def _find_line(node: Node) -> str:
    """The user's line of a node, or of the nearest of its inputs that has one."""
    frontier, seen = [node], set[Node]()
    while frontier:
        for near in frontier:
            if line_of(near):
                return line_of(near)
        seen.update(frontier)
        frontier = [x for near in frontier for x in near.all_input_nodes if x not in seen]
    return ""
