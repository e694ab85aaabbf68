"""The release pass: the stages of ZeRO, which say how long a gathered bucket lives and when gradients are scattered."""

from __future__ import annotations

from collections.abc import Collection

from fzero.base.errors import FzeroError
from fzero.passes.order import find_dependences, find_mutable, find_origins, list_uses, reorder, sink_gathers
from fzero.program.arguments import bucket_of
from fzero.program.operation import Node
from fzero.program.plan import check_stage
from fzero.program.program import Program
from fzero.program.records import body_of, starts


def release(program: Program, *, stage: int, keep: Collection[str] = ()) -> Program:
    """Set how long gathered buckets and full gradients live.

    * Stage 3: drop a gathered bucket when another layer is used, and gather it again for its next use. A layer has a
      bucket for each dtype. The buckets that `keep` names stay, as at stage 2.
    * Stage 2: gather each bucket once, and keep it until its last use.
    * Stage 1: as 2; keep full gradients too, and scatter all of them at the end.
    * Stage 0: there is nothing to gather and to scatter, because every leaf is whole on every rank.

    Same results, bit for bit. Of P bytes of parameters, stages 1 and 2 move 2P and gather up to P at once. Stage 3
    moves at most 3P, where the backward pass uses each bucket once more, and gathers the two largest neighbouring
    layers at once.

    Raises:
        FzeroError: for a stage other than 0, 1, 2 or 3; at stage 0 for a leaf of which ranks hold slices; where `keep`
            is one name, such as that of an axis.
    """
    check_stage(stage)
    if isinstance(keep, str):
        way_out = "give a set of buckets; for a copy inside of a node insert the pass fzero.variants.hpz"
        raise FzeroError("keep", f"is {keep!r}", way_out)
    if stage == 0:
        _check_whole(program)
    program = program.take()
    if stage == 3:
        _regather(program, keep)
    if stage == 1:
        _scatter_last(program)
    return program


def _check_whole(program: Program) -> None:
    """Refuse state of which ranks hold slices: plain data parallel has whole state on each rank."""
    cut = [layout for layout in program.layouts.values() if not layout.replicated and layout.world > 1]
    if cut:
        leaf = max((leaf for layout in cut for leaf in layout.leaves), key=lambda leaf: leaf.numel)
        problem = f"is cut into slices over {cut[0].world} ranks, and stage 0 keeps state whole on each rank"
        raise FzeroError(leaf.path, problem, f"partition with persist={leaf.numel}, or use stage 1, 2 or 3")


def _regather(program: Program, keep: Collection[str]) -> None:
    """Give each run of uses of a bucket, but of those to keep, an all-gather of its own. The first run keeps the one
    that there is."""
    origin = find_origins(program.graph, "gathered")
    spans: dict[Node, dict[int, list[Node]]] = {}
    for user, runs in list_uses(program, origin):
        for start, run in runs.items():
            spans.setdefault(start, {}).setdefault(run, []).append(user)
    for start, of_runs in spans.items():
        for users in list(of_runs.values())[1:] if bucket_of(start) not in keep else ():
            _gather_again(program, start, users, origin)
    sink_gathers(program.graph)


def _gather_again(program: Program, bucket: Node, users: list[Node], origin: dict[Node, Node]) -> None:
    """Give these users a copy of an all-gather, and of the nodes derived from its buffer that they use."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        chain = [node]
        while chain[-1] is not bucket and chain[-1] not in copies:
            chain.append(chain[-1].all_input_nodes[0])
        for link in reversed(chain):
            if link not in copies:
                copies[link] = program.repeat(link, lambda n: copies.get(n, n))
        return copies[node]

    with program.graph.inserting_before(users[0]):
        for user in users:
            for source in user.all_input_nodes:
                if origin.get(source) is bucket:
                    user.replace_input_with(source, copy(source))


def _scatter_last(program: Program) -> None:
    """Move every reduce-scatter, and the nodes that depend on one through values or memory, behind all other nodes.
    What a pass sends of slices that the step is given stays."""
    late, dependences = set[Node](), find_dependences(find_mutable(program.graph))
    given = {node for node, x in zip(program.placeholders, program.arguments) if x.bucket is not None}
    for node in program.graph.nodes:
        operands = node.all_input_nodes
        is_given, before = bool(operands) and given.issuperset(operands), (*operands, *dependences.get(node, ()))
        if (starts(node) == "scattered" and not is_given) or any(n in late for n in before):
            late.add(node)
        elif is_given and not starts(node) and body_of(node) is None:
            given.add(node)
    reorder(program.graph, sorted(program.graph.nodes, key=late.__contains__))
