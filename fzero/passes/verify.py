"""The verify pass: refuse a program in which ranks could drift apart, wait for each other for ever, or read padding."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import inputs_of
from fzero.passes.order import find_origins, list_uses
from fzero.program import ops
from fzero.program.arguments import bucket_of, start_of
from fzero.program.inference import infer
from fzero.program.kinds import Buffer, Kind, Slice, axes_of, kind_of_state
from fzero.program.operation import Node, Operation, no_operands
from fzero.program.places import check_places
from fzero.program.plan import check_names
from fzero.program.program import Program
from fzero.program.records import (
    find_bodies,
    find_calls,
    find_writes,
    is_call,
    leaves_of,
    name_of,
    record,
    starts,
    storage,
)
from fzero.program.refusals import PASS_BUG, advise_mean, describe_kind, line_of, refuse_node, refuse_state


def verify(
    program: Program, *, stage: int | None = None, keep: Collection[str] = (), is_placed: bool = True
) -> Program:
    """Check a program. Returns `program` itself where all of this holds:

    * every value has a kind (`inference`), so that no value is computed from padding;
    * a state result has the kind of its leaf, so that it depends on per-rank data through collectives only;
    * another result differs along those axes at most along which it did when the step was traced;
    * a collective names leaves, sizes and axes that the program's layouts and mesh have;
    * a started collective has exactly one wait, behind its start, and nothing writes to its operands before the wait;
    * nodes write to donated arguments and to temporaries only;
    * an operation's operands lie on the device, or all on the host, and so do results where they belong; in front of
      the pass `offload`, before which the program is not `is_placed`, this does not hold yet;
    * a loop's body holds all of this, and gets what it expects in every turn;
    * at `stage` 3 a gathered bucket that `keep` does not name is not kept while other layers are used;
    * `keep` names buckets of the program.

    Ranks start collectives in one order, because all ranks run one program. `verify` believes the shapes and the memory
    that nodes claim, that a kernel gives the same bits on every rank, and that captured tensors are the same on every
    rank. It does not see a mistake that all ranks make alike: a sum for a mean, or another tree of the same layout.

    Raises:
        FzeroError: naming the leaf or bucket, the node and, where it has one, the user's line.
    """
    _check_order(program)
    _check_collectives(program)
    kinds = infer(program)
    check_results(program, kinds)
    _check_axes(program, kinds)
    check_writes(program)
    if is_placed:
        check_places(program)
    if stage == 3:
        _check_releases(program, keep)
    if keep and not program.is_body:
        check_names("keep", keep, _list_buckets(program), "the buckets that the step gathers")
    return program


def check_results(program: Program, kinds: dict[Node, Kind]) -> None:
    """Refuse a state result that has not the kind of its leaf, and a result that is a buffer with padding."""
    returned = program.returned
    if len(returned) != len(program.tensor_results):
        problem = f"returns {len(returned)} tensors for {len(program.tensor_results)} results"
        raise FzeroError(program.name, problem, PASS_BUG)
    for result, node in zip(program.tensor_results, returned):
        kind, expected = kinds[node], kind_of_state(program, result)
        if kind == expected or (expected is None and not isinstance(kind, Buffer)):
            continue
        if isinstance(kind, frozenset) and isinstance(expected, frozenset) and kind <= expected:
            continue
        if isinstance(kind, Slice) and isinstance(expected, Slice) and kind.over < expected.over:
            kind = replace(kind, over=expected.over)  # what may differ along axes may be the same along them
            if kind == expected:
                continue
        where, name = program.path_of(result), f"result {result.path!r}"
        if isinstance(kind, frozenset) and kind:
            raise refuse_state(program, where, result.path, kind, node)
        wanted = f", not {describe_kind(program, expected)}," if expected is not None else ""
        problem = f"{name} is {describe_kind(program, kind)}{wanted} in {node.name}{line_of(node)}"
        raise FzeroError(where, problem, "return the leaf that belongs there")


def _check_axes(program: Program, kinds: dict[Node, Kind]) -> None:
    """Refuse a result that is no state, and differs along axes that its record does not name."""
    for result, node in zip(program.tensor_results, program.returned):
        if result.varies is not None and (axes := axes_of(program, kinds[node]) - result.varies):
            problem = f"is the same along {sorted(axes)} in the step that was traced, and differs in {node.name}"
            raise FzeroError(f"result {result.path!r}", problem + line_of(node), advise_mean(program, axes))


def check_writes(program: Program) -> None:
    """Refuse operations that write into an argument that is not donated, into a gathered leaf, into a captured
    constant, or into memory that a collective is sending."""
    given = {
        storage(node): program.path_of(argument)
        for argument, node in zip(program.arguments, program.placeholders)
        if not argument.donated
    }
    sending: dict[Node, set[object]] = {}
    moves = ops.gather, ops.whole
    calls = find_calls(
        program.graph,
        lambda known: bool(known.target in moves or known.starts or known.waits or known.writes is not no_operands),
    )
    for node in sorted([*calls, *program.graph.find_nodes(op="get_attr")]):
        if is_call(node, *moves):
            (leaf,) = leaves_of(node)
            given[storage(node)] = program.layout_of(node).leaves[leaf].path
        elif starts(node):
            sending[node] = {storage(source) for source in node.all_input_nodes}
        elif node.op == "call_function" and record(node).waits:
            del sending[start_of(node)]
        elif node.op == "get_attr":
            given[storage(node)] = "a tensor that the step captured"
        _check_writes_of(program, node, given, sending)


def _check_writes_of(program: Program, node: Node, given: dict[object, str], sending: dict[Node, set[object]]) -> None:
    for memory in map(storage, find_writes(node)):
        if memory in given:
            problem = f"{name_of(node)} writes into it, but a step is a pure function{line_of(node)}"
            way_out = "give the operation a clone, and return the clone"
            if name_of(node).endswith("_"):
                way_out = "write the operation without its trailing underscore, or clone first"
                way_out += ": leaf.full_tensor().clone() of a leaf"
            raise FzeroError(given[memory], problem, way_out)
        for start, sent in sending.items():
            if memory in sent:
                raise refuse_node(program, node, f"writes to what {start.name} is sending", "wait for it first")


def _check_order(program: Program) -> None:
    seen: set[Node] = set()
    for node in program.graph.nodes:
        for source in inputs_of(node):
            if source.graph is not program.graph:
                problem = f"takes {source.name} of another graph"
                raise refuse_node(program, node, problem, "find nodes in what program.copy() returns, not before it")
            if source not in seen:
                raise refuse_node(
                    program, node, f"stands before its input {source.name}", "order the nodes by their use"
                )
        seen.add(node)


def _check_collectives(program: Program) -> None:
    for node in find_calls(program.graph, lambda known: known.check is not Operation.check or known.starts is not None):
        record(node).check(program, node)
        if starts(node):
            waits = [user for user in node.users if user.op == "call_function" and record(user).waits]
            if len(waits) != 1:
                problem = f"of {bucket_of(node)!r} is waited for {len(waits)} times"
                raise refuse_node(program, node, problem, "wait for a collective once")


def _check_releases(program: Program, keep: Collection[str]) -> None:
    """Refuse a gathered buffer, but of the buckets to keep, that is used before and after a node that uses other layers
    only."""
    last: dict[Node, tuple[int, Node]] = {}
    for node, runs in list_uses(program, find_origins(program.graph, "gathered")):
        for start, run in runs.items():
            if start in last and last[start][0] != run and bucket_of(start) not in keep:
                raise refuse_node(
                    program, start, f"of {bucket_of(start)!r} is kept from {last[start][1].name} to {node.name}",
                    "at stage 3 release a bucket when another layer is used, and gather it again",
                )  # fmt: skip
            last[start] = (run, node)


def _list_buckets(program: Program) -> set[str]:
    """The buckets of a program and of the bodies of its loops."""
    return {name for name in program.layouts if name}.union(*map(_list_buckets, find_bodies(program.graph)))
