"""The stream pass: leaves larger than a chunk are used chunk by chunk, and are never whole on any device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.base.errors import FzeroError
from fzero.base.sizes import format_size
from fzero.layout.layout import Layout
from fzero.layout.streams import Stream, find_obstacle, plan_stream
from fzero.passes.open_losses import Opened, open_loss, open_tiles
from fzero.passes.order import erase_dead, find_changes
from fzero.passes.rows import find_dims, find_lookup, find_sum_dims, follow_rows, is_carrier, list_reduction_dims
from fzero.passes.sink import list_leaves_in_front, list_leaves_within, sink
from fzero.passes.streamed_loops import Use, emit_loop, list_inputs
from fzero.program import ops
from fzero.program.arguments import LeafMove
from fzero.program.inference import infer
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import find_bodies, is_call, name_of, storage
from fzero.program.refusals import line_of

SMALL = 4
"""What would live longer to save time is small where a chunk is so many times larger."""
Key = tuple[str, int]
"""A leaf: its bucket, and its index in the bucket's layout."""


class _Leaf(NamedTuple):
    """A large leaf in one graph: where it is gathered, where its gradients are scattered, and the bytes of its widest
    element there."""

    key: Key
    gathers: list[Node]
    scatters: list[Node]
    itemsize: int
    numel: int


class _Plan(NamedTuple):
    """How a leaf is streamed: its chunks, the nodes that turns compute with the dimension of the rows, and the uses."""

    stream: Stream
    inner: dict[Node, int]
    uses: list[Use]


def stream(program: Program, *, chunk: int) -> Program:
    """Use each leaf of more than `chunk` gathered bytes chunk by chunk: each use becomes a loop that gathers a chunk of
    at most `chunk` bytes, uses it and drops it. Gradients of such a leaf are computed and scattered chunk by chunk too.

    A leaf is streamed where its uses are matrix products, with a bias or without, and lookups of its rows; the leaf may
    be cast first, or seen in another shape. A leaf with another use, or whose slices do not begin at rows, is gathered
    whole, and a line of `Program.remarks` says so. A streamed leaf is streamed at every stage: each use gathers it.

    Logits of more than `chunk` bytes that such a leaf gives, and that nothing but a cross entropy uses, are computed by
    chunks too, once for the loss and once for its gradient. So are those of `fzero.tiled_cross_entropy`, in at least as
    many chunks as that has parts.

    The parts of `fzero.tiled` gather such a leaf each, chunk by chunk: so many times the comm.

    Results are the same up to the order of sums: a product that sums over the rows of the leaf adds up the chunks. The
    comm is that of gathering the leaf for each use, with padding of less than one chunk for each rank.

    Raises:
        FzeroError: for a `chunk` below one row of every rank.
    """
    program = _join_bodies(_stream_tiles(program, chunk))
    program = replace(program, remarks=(*program.remarks, *_remark_on_owners(program, chunk)))
    if not _find_large(program, chunk):
        return program
    program, tiles = _open_tiles(program.copy(), chunk)
    found, remarks, taken = list[_Plan](), list[str](), set[Node]()
    for leaf in _find_large(program, chunk):
        tile = tiles.get(leaf.key, Opened())
        opened = {node: 1 for node in program.graph.nodes if node.name in tile.names}
        plan = _find_uses(program, leaf, chunk, taken, opened, tile.parts)
        if isinstance(plan, _Plan) and (more := _open_losses(program, plan, chunk)):
            plan = _find_uses(program, leaf, chunk, taken, opened | more, tile.parts)
        if isinstance(plan, str):
            remarks += [_describe(program, leaf, chunk, plan)] if leaf.gathers else []
        else:
            found.append(plan)
            taken.update(_list_nodes(plan))
    kinds = infer(program)
    for plan in found:
        for uses in _pair(plan, chunk):
            emit_loop(program, kinds, plan.stream, plan.inner, uses)
    erase_dead(program.graph)
    layouts = program.layouts | {plan.stream.layout.bucket: plan.stream.layout for plan in found}
    return replace(program, layouts=layouts, remarks=(*program.remarks, *remarks))


def _stream_tiles(program: Program, chunk: int) -> Program:
    """The program in which each tile of `fzero.tiled` gathers, chunk by chunk, the leaves that are never whole then."""
    keys = {leaf.key for leaf in _find_large(program, chunk)} & list_leaves_in_front(program)
    while keys:
        trial = ops.map_bodies(sink(program, keys), partial(stream, chunk=chunk))
        beside = [x for x in _find_large(trial, chunk) if isinstance(_find_uses(trial, x, chunk, set(), {}), str)]
        whole = {leaf.key for leaf in beside} | list_leaves_within(trial)
        if not keys & whole:
            return trial
        keys -= whole
    return program


def _join_bodies(program: Program) -> Program:
    """The program with the layouts of chunks, and the remarks, of the bodies of its loops."""
    bodies = list(find_bodies(program.graph))
    layouts = {name: layout for body in bodies for name, layout in body.layouts.items()}
    remarks = tuple(dict.fromkeys([*program.remarks, *(each for body in bodies for each in body.remarks)]))
    if layouts.keys() <= program.layouts.keys() and remarks == program.remarks:
        return program
    program = replace(program.copy(), layouts={**layouts, **program.layouts}, remarks=remarks)
    for node in program.graph.find_nodes(op="call_function", target=ops.loop):
        node.args = tuple(_name_chunks(Loop(*node.args)))
    return program


def _name_chunks(loop: Loop) -> Loop:
    """A loop over layers whose chunks have, in each turn, the name of the layer."""
    chunks = {
        name: [f"{each}{name.removeprefix(bucket)}" for each in of_rows]
        for bucket, of_rows in loop.layers.items()
        for name in map(str, loop.body.layouts)
        if name.startswith(f"{bucket} in ")
    }
    return loop._replace(layers={**loop.layers, **chunks})


def _find_large(program: Program, chunk: int) -> list[_Leaf]:
    """The leaves of more than `chunk` bytes that the graph gathers, or whose gradients it scatters."""
    moves: dict[Key, dict[Any, list[Node]]] = {}
    for node in program.graph.nodes:
        if is_call(node, ops.gather, ops.scatter):
            moves.setdefault(LeafMove(*node.args).key, {}).setdefault(node.target, []).append(node)
    found = []
    for key, nodes in moves.items():
        gathers, scatters = nodes.get(ops.gather, []), nodes.get(ops.scatter, [])
        itemsize = max(node.meta["val"].element_size() for node in (*gathers, *scatters))
        numel = program.layouts[key[0]].leaves[key[1]].numel
        if itemsize * numel > chunk:
            found.append(_Leaf(key, gathers, scatters, itemsize, numel))
    return found


def _describe(program: Program, leaf: _Leaf, chunk: int, obstacle: str, where: str = "") -> str:
    """The remark on a leaf that is gathered whole, on every rank if `where` does not say else."""
    own = program.layouts[leaf.key[0]].leaves[leaf.key[1]]
    size = format_size(own.numel * leaf.itemsize)
    return f"{own.path} is gathered whole{where}, {size} with chunks of {format_size(chunk)}: {obstacle}"


def _remark_on_owners(program: Program, chunk: int) -> list[str]:
    """The remarks on leaves of more than `chunk` bytes that an update brings together on one rank, as Muon does."""
    remarks = []
    for node in program.graph.find_nodes(op="call_function", target=ops.to_owners):
        _, buckets, leaves, *_ = node.args
        for bucket, index in zip(buckets, leaves):
            layout, itemsize = program.layouts[bucket], node.meta["val"].element_size()
            leaf = _Leaf((bucket, index), [], [], itemsize, layout.leaves[index].numel)
            if itemsize * leaf.numel > chunk and not layout.replicated:
                obstacle = f"{name_of(node)} uses it{line_of(node)}"
                remarks.append(_describe(program, leaf, chunk, obstacle, " on one rank"))
    return remarks


def _open_tiles(program: Program, chunk: int) -> tuple[Program, dict[Key, Opened]]:
    """The program in which `fzero.tiled_cross_entropy` takes all tokens at once where its head is streamed then, and by
    such a head what was opened."""
    found: dict[Key, Opened] = {}
    for key in [leaf.key for leaf in _find_large(program, chunk)] if _has_tiles(program) else ():
        trial = program.copy()
        (leaf,) = (each for each in _find_large(trial, chunk) if each.key == key)
        opened = open_tiles(trial, leaf.gathers)
        values = {node: 1 for node in trial.graph.nodes if node.name in opened.names}
        if values and isinstance(_find_uses(trial, leaf, chunk, set(), values), _Plan):
            program, found[key] = trial, opened
    return program, found


def _has_tiles(program: Program) -> bool:
    loops = program.graph.find_nodes(op="call_function", target=ops.loop)
    return any(Loop(*node.args).loss is not None for node in loops)


def _open_losses(program: Program, plan: _Plan, chunk: int) -> dict[Node, int]:
    """Products that are logits larger than a chunk, and nodes beside them, with the dimension of the classes: the loops
    of their cross entropies compute them by rows too. The program's own graph changes."""
    opened: dict[Node, int] = {}
    for use in plan.uses:
        if use.how == "rows" and nbytes(use.node.meta["val"]) > chunk:
            misses = open_loss(program, use.node, use.dim, plan.stream.rows)
            opened |= {} if misses is None else {use.node: use.dim, misses: 1}
    return opened


def _find_uses(
    program: Program, leaf: _Leaf, chunk: int, taken: Set[Node], opened: Mapping[Node, int], parts: int = 1
) -> _Plan | str:
    """How a leaf is streamed; a text for a leaf that is not, also where loops of other leaves have `taken` a use of it.
    Turns compute the nodes that are `opened`, rather than the loop behind the last turn. The leaf has `parts` chunks or
    more.

    Raises:
        FzeroError: for a `chunk` below one row of every rank.
    """
    layout = program.layouts[leaf.key[0]]
    obstacle = find_obstacle(layout, leaf.key[1])
    if obstacle:
        return obstacle
    rows, changed = layout.leaves[leaf.key[1]].shape[0], find_changes(program.graph)
    inner = {**dict.fromkeys(leaf.gathers, 0), **opened}
    uses: list[Use] = []
    refused = _follow_gathers(leaf, rows, inner, uses, opened) or _follow_scatters(leaf, rows, inner, uses)
    refused = refused or next((node for node in inner if storage(node) in changed), None)
    refused = refused or next((use.node for use in uses if _gets_another_shape(use.node)), None)
    if refused is None:
        _add_own(inner, uses, rows, leaf.numel, changed)
    limit = min(chunk, leaf.itemsize * leaf.numel // parts)
    plan = _Plan(plan_stream(layout, leaf.key[1], leaf.itemsize, limit), inner, uses)
    refused = refused or next((node for node in _list_nodes(plan) if node in taken), None)
    if refused is not None:
        return f"{name_of(refused)} uses it{line_of(refused)}"
    _check_chunk(layout, leaf, chunk)
    return plan


def _gets_another_shape(node: Node) -> bool:
    """Whether a user gives a value another shape in place, as `squeeze_` does: the value's own shape is not known."""
    return any(torch.Tag.inplace_view in getattr(user.target, "tags", ()) for user in node.users)


def _list_nodes(plan: _Plan) -> list[Node]:
    """The nodes that the loops of a leaf take the places of."""
    return [*plan.inner, *(use.node for use in plan.uses)]


def _pair(plan: _Plan, chunk: int) -> list[list[Use]]:
    """The uses of a leaf, those together that become one loop: a sum over rows, and a gradient that can be computed in
    its turns. So a turn of the backward pass scatters while it multiplies."""
    scatters = [use for use in plan.uses if use.how == "scatter"]
    pairs: list[list[Use]] = []
    for use in sorted((use for use in plan.uses if use.how != "scatter"), key=lambda use: use.node):
        inputs = list_inputs(use, plan.inner)
        alike = [each for each in pairs if use.how == each[0].how == "reduce" and max(inputs) < each[0].node]
        if alike:
            alike[0].append(use)
        else:
            pairs.append([use])
    for uses in pairs:
        fitting = (each for each in scatters if _fits(plan, uses[0], each, chunk))
        beside = next(fitting, None) if uses[0].how == "sum" else None
        if beside is not None:
            uses.append(beside)
            scatters.remove(beside)
    return pairs + [[use] for use in scatters]


def _fits(plan: _Plan, first: Use, scatter: Use, chunk: int) -> bool:
    """Whether the inputs of a gradient are there before another use, its users come behind that, and what it alone
    reads is small: that lives until the end of the loop."""
    inputs, known = list_inputs(scatter, plan.inner), set(map(storage, list_inputs(first, plan.inner)))
    own = sum(nbytes(x.meta["val"]) for x in inputs if storage(x) not in known)
    users = scatter.node.users
    return bool(users) and max(inputs) < first.node < min(users) and own * SMALL <= chunk


def _check_chunk(layout: Layout, leaf: _Leaf, chunk: int) -> None:
    own = layout.leaves[leaf.key[1]]
    least = layout.world * own.numel // own.shape[0] * leaf.itemsize
    if chunk < least:
        problem = f"is {chunk} bytes, and one row of {own.path} of each of {layout.world} ranks has {least}"
        raise FzeroError("chunk", problem, f"give at least {least}, or None to gather leaves whole")


def _list_gradients(leaf: _Leaf) -> set[Node]:
    """The nodes of the leaf's size that give its gradients, from products on."""
    found, waiting = set[Node](), [LeafMove(*node.args).value for node in leaf.scatters]
    for node in waiting:
        if node.op == "call_function" and node.meta["val"].numel() >= leaf.numel:
            found.add(node)
            waiting += node.all_input_nodes if is_carrier(node) or list_reduction_dims(node) else []
    return found


def _follow_gathers(
    leaf: _Leaf, rows: int, inner: dict[Node, int], uses: list[Use], opened: Collection[Node]
) -> Node | None:
    """Add the nodes that a gathered leaf goes through to `inner`, and its uses to `uses`. Returns a node that uses the
    leaf in another way, if there is one."""
    waiting, gradients = list(inner), _list_gradients(leaf)
    for source in waiting:
        for user in source.users:
            if user in leaf.scatters or user in opened:
                continue
            found = follow_rows(user, source, inner[source], rows) if user.op == "call_function" else None
            if found is not None and is_carrier(user):
                if inner.setdefault(user, found[0]) != found[0]:
                    return user
                waiting += [user] if user not in waiting else []
            elif found is not None:
                uses += [] if user in gradients else [Use(user, "rows", found[1], found[0])]
            else:
                use = _find_sum(user, source, inner[source])
                if use is None:
                    return user
                uses.append(use)
    uses[:] = dict.fromkeys(uses)
    by_node = {use.node: use for use in uses}
    broken = (use for use in uses if by_node[use.node] != use or any(x in inner for x in _list_whole(use)))
    return next((use.node for use in broken), None)


def _list_whole(use: Use) -> list[Any]:
    """The operands that a use needs whole."""
    if use.how in ("lookup", "reduce"):
        return use.node.all_input_nodes[1:]
    return [x for x, dim in zip(use.node.args, use.dims) if dim is None and isinstance(x, fx.Node)]


def _add_own(inner: dict[Node, int], uses: list[Use], rows: int, numel: int, changed: Collection[Node]) -> None:
    """Add to `inner` other values of the leaf's size that loops of the leaf alone use, such as the gradient of a mean,
    or a product that is added to a function of the leaf. Each turn then makes its rows of the value."""
    given = [(node, find_dims(node, dim, rows) or ()) for node, dim in inner.items()]
    given += [(use.node, use.dims) for use in uses if use.how in ("rows", "sum")]
    whole = {x for node, dims in given for x in _list_whole(Use(node, "rows", (*dims, *[None] * len(node.args))))}
    waiting = [(x, dim) for node, dims in given for x, dim in zip(node.args, dims) if dim is not None]
    users = {node for node, _ in given}
    for node, dim in waiting:
        is_free = node not in users and node not in whole and storage(node) not in changed
        is_own = node.op == "call_function" and node.meta["val"].numel() == numel and users.issuperset(node.users)
        dims = find_dims(node, dim, rows) if is_free and is_own else None
        shared = [] if dims is None else _list_whole(Use(node, "rows", dims))
        if dims is not None and users.isdisjoint(shared):
            inner[node] = dim
            users.add(node)
            whole.update(shared)
            waiting += [(x, at) for x, at in zip(node.args, dims) if at is not None]


def _find_sum(node: Node, source: Node, dim: int) -> Use | None:
    """The use of a node that sums over the leaf's rows, reduces them, or looks rows up."""
    if node.op != "call_function" or source not in node.args:
        return None
    lookup = find_lookup(node)
    if lookup is not None:
        return Use(node, "lookup") if lookup.given is source and dim == 0 else None
    if name_of(node) in ("sum", "mean", "logsumexp"):
        return Use(node, "reduce") if dim in list_reduction_dims(node) and node.args.index(source) == 0 else None
    dims = find_sum_dims(node, node.args.index(source), dim)
    return None if dims is None else Use(node, "sum", dims)


def _follow_scatters(leaf: _Leaf, rows: int, inner: dict[Node, int], uses: list[Use]) -> Node | None:
    """Add the nodes that compute gradients of a leaf, of its size, to `inner`, and the scatters to `uses`. Returns a
    node that computes a gradient in another way, or that uses one for something else, if there is one."""
    gathered, numel = set(inner), leaf.numel
    waiting = [(LeafMove(*node.args).value, 0) for node in leaf.scatters]
    for node, dim in waiting:
        if node in inner:
            if inner[node] != dim:
                return node
            continue
        if node.meta["val"].numel() < numel:
            continue  # a value of another size, which is cut into rows
        dims = find_dims(node, dim, rows) if node.op == "call_function" else None
        if dims is None:
            return node
        inner[node] = dim
        given = list(zip(node.args, dims))
        if any(x in gathered for x in node.all_input_nodes if not any(x is y and at is not None for y, at in given)):
            return node
        if is_carrier(node) or list_reduction_dims(node):
            waiting += [(x, at) for x, at in given if at is not None]
        elif any(x in gathered and inner[x] != at for x, at in given):
            return node
    own = {*inner, *leaf.scatters}
    for node in inner:
        stranger = next((user for user in node.users if node not in gathered and user not in own), None)
        if stranger is not None:
            return stranger
    uses += [Use(node, "scatter") for node in leaf.scatters]
    return None
