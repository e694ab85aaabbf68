"""Records: the record of the operation that a node calls, and the way to define a new operation.

record(node)            the `Operation` that the node calls
define("name", ...)     a new operation, which every walk can read from then on
"""

from __future__ import annotations

import itertools
import keyword
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import OpOverload, storage_key
from fzero.base.torch_private_functions import inputs_of, list_targets
from fzero.program import aten
from fzero.program.arguments import call_of, operand_of, start_of, view_of
from fzero.program.linear import make_kernel, perform_here
from fzero.program.operation import Node, Operation
from fzero.program.rules import check_fields, guard

if TYPE_CHECKING:
    from fzero.program.comm import Comm
    from fzero.program.memory import Allocator
    from fzero.program.program import Program

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_RECORDS: dict[int, Operation] = {}
"""`id` of a target -> its record, which keeps the target alive. torch's operators hash slowly, and walks ask often."""
_NAMES: set[str] = set()
_FUNCTIONS: dict[str, Any] = {}
"""Name -> target of the operations that are Python functions."""


def record(called: Any) -> Operation:
    """The record of the operation that a node calls, or of a target."""
    target = called.target if isinstance(called, fx.Node) else called
    known = _RECORDS.get(id(target))
    if known is None:
        known = aten.describe(target)
        if isinstance(target, (OpOverload, BuiltinFunctionType)):  # only so many; each program has fragments of its own
            _RECORDS[id(target)] = known
    return known


def register(operation: Operation) -> Any:
    """Add the record of an operation to the table that walks read. Returns the operation's target."""
    _RECORDS[id(operation.target)] = operation
    _NAMES.add(operation.name)
    if isinstance(operation.target, FunctionType):
        _FUNCTIONS[operation.name] = operation.target
    return operation.target


def find_function(name: str) -> Any:
    """The target of this operation, where that is a Python function and no operator of torch; None for any other."""
    return _FUNCTIONS.get(name)


def find_foreign(name: str) -> Operation | None:
    """The record of an operation that `define` made; None for any other name."""
    return next((known for known in _RECORDS.values() if known.is_foreign and known.name == name), None)


def register_for_tracing(schema: str, fake: Callable[..., Any], **known: Any) -> Any:
    """Register an operation of `torch.ops.fzero` that steps may call: tracing records a node and computes nothing."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
    target = getattr(torch.ops.fzero, name).default
    return register(Operation(name=name, target=target, fake=fake, **known))


def define(
    name: str, *, like: Any = None, schema: str | None = None, fake: Callable[..., Any] | None = None, **known: Any
) -> Any:
    """Define an operation that is traced, checked, costed, simulated, run and printed like fzero's own.

    Returns the target that nodes call: a pass emits a node with `program.emit(target, *args)`. With a `schema`, such as
    `"(Tensor x, float p) -> Tensor"`, a step may call the target too, and so may code outside of steps, where one rank
    performs it. With a `transpose` the operation has a derivative by its first argument.

    The other keywords are the fields of `fzero.ops.Operation`. An operation needs at least `kind` and `fake`.
    `perform(program, node, rank)` returns a function of the node's arguments; where the operation communicates the
    function is a generator of exchanges, and `moves` lists the collectives. `like`, the target of a known operation,
    fills the fields that are not given. With `perform`, `like` does not fill `memory`, `scratch`, `work`,
    `alias_at` and `label`, because these fields say how the known operation is performed.

    Raises:
        FzeroError: for a name that another operation has or that is no name in Python; without a rule for kinds or a
            fake result; for an unknown field; for an operation that communicates and has no `perform`.
    """
    where = f"operation {name!r}"
    if not name.isidentifier() or keyword.iskeyword(name):
        raise FzeroError(where, "is no name in Python", "give a name such as 'int8_gather'")
    if name in _NAMES or hasattr(torch.ops.fzero, name):
        raise FzeroError(where, "is defined already", "define an operation once, where its module is imported")
    unknown = sorted(known.keys() - set(Operation.__dataclass_fields__))
    if unknown:
        fields = ", ".join(sorted(Operation.__dataclass_fields__.keys() - {"name", "target"}))
        raise FzeroError(where, f"has no field {unknown[0]!r}", f"the fields are {fields}")
    check_fields(where, {"fake": fake, **known})
    base = None if like is None else record(like)
    if base is None and "kind" not in known:
        raise FzeroError(where, "has no rule for kinds", "give kind=..., or like=... an operation that has one")
    if base is None and fake is None:
        raise FzeroError(where, "has no fake result", "give fake=..., or like=... an operation that has one")
    if base is not None:
        known = _inherit(base, "perform" in known) | known
        fake = fake or base.fake
    if known.get("transpose") and not (schema and schema.startswith("(Tensor ") and schema.endswith("-> Tensor")):
        problem = f"has a transpose and the schema {schema!r}"
        raise FzeroError(where, problem, "give a schema from a tensor to a tensor, such as '(Tensor x) -> Tensor'")
    if (known.get("moves") or known.get("starts")) and not known.get("perform"):
        raise FzeroError(where, "communicates, and nothing performs it", "give perform=..., a generator of exchanges")
    assert fake is not None
    known["is_foreign"] = True
    if known.get("starts") and not known.get("memory"):
        known["memory"] = _hold_transfers
    if known.get("moves") and not known.get("label"):
        known["label"] = lambda program, node: " ".join([name, *map(str, node.args[1:2])])
    fake = guard(name, "fake", fake)
    known = {x: guard(name, x, rule, base if rule is getattr(base, x, None) else None) for x, rule in known.items()}
    if schema is not None:
        target = register_for_tracing(name + schema, fake, **known)
        _LIBRARY.impl(name, make_kernel(record(target)), "Autograd")
        _LIBRARY.impl(name, perform_here(record(target)), "CompositeExplicitAutograd")
        return target
    return register(Operation(name=name, target=_make_target(name, fake), fake=fake, **known))


_OF_ITSELF = {"name", "target", "fake", "is_foreign", "transpose", "together", "mean_of", "is_identity"}
"""Fields that no operation inherits: what the operation is itself, and what passes put in its place."""
_OF_PERFORMANCE = {"memory", "scratch", "work", "alias_at", "label", "of_all"}
"""Fields that say how an operation is performed. An operation with a `perform` of its own does not inherit them."""


def _inherit(base: Operation, performs: bool) -> dict[str, Any]:
    fields = base.__dataclass_fields__.keys() - _OF_ITSELF
    return {field: getattr(base, field) for field in fields - (_OF_PERFORMANCE if performs else set())}


def _hold_transfers(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The memory of an operation that starts: new memory for the result and, until the wait, the operands, which are
    sent, and as many bytes as the operation moves, which arrive."""
    moved = sum(entry.nbytes for entry in record(node).moves(allocator.program, node))  # type: ignore[misc]  # it starts
    arriving = allocator.keep((node, "moved"), moved)
    return allocator.new(node, node.meta["val"]), arriving, *allocator.keys_of(node.all_input_nodes)


def _make_target(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this name for nodes to call. It has no kernel, and returns the fake result."""

    def target(*args: Any, **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    target.__name__ = target.__qualname__ = name
    return target


def is_call(node: Node, *targets: Any) -> bool:
    """Whether a node calls one of these."""
    return node.op == "call_function" and node.target in targets


def name_of(node: Node) -> str:
    """The name of the operation that a node calls, without its overload: "mm", "all_reduce". For a random draw the
    operation that draws: "bernoulli". For a node that calls nothing its target."""
    if node.op != "call_function":
        return str(node.target)
    operation = record(node)
    return record(call_of(node)[0]).name if operation.draws else operation.name


def list_operands(node: Node) -> list[Node]:
    """The operands of a node in order. Unlike `all_input_nodes`, a value that is given twice is there twice."""
    found = list[Node]()
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def comm_of(program: Program, node: Node) -> Iterable[Comm]:
    """The collectives that a node starts, in order."""
    moves = record(node).moves if node.op == "call_function" else None
    return () if moves is None else moves(program, node)


def mean_of(program: Program, node: Node) -> str | None:
    """The path of the leaf of whose gradient a node takes the mean over ranks; None for any other node."""
    rule = record(node).mean_of if node.op == "call_function" else None
    return None if rule is None else rule(program, node)


def shares_memory(node: Node) -> bool:
    """Whether a node's result has the memory of an operand: a view, an item of a list, or an operand written to."""
    return node.op == "call_function" and record(node).shares(node)


def alias_of(node: Node) -> Node | None:
    """The operand whose memory a node's result has: the one that it writes to, or the one that it views; None where the
    result has memory of its own."""
    if not shares_memory(node):
        return None
    return next(iter(find_writes(node) or inputs_of(node)), None)


def follow_memory(node: Node) -> Iterator[Node]:
    """The nodes whose values may lie in the memory of a node's value, from the node to the one that made the memory.

    An item of a list of new tensors made its own memory. On one rank a collective may return its operand's memory: so
    the memory of a gathered leaf was made by the leaf's argument.
    """
    source: Any = node
    while source is not None:
        yield source
        made, source = source, None
        while made.target is operator.getitem:
            made = operand_of(made)
        known = record(made) if made.op == "call_function" else None
        if known is not None and known.names == "position":
            view = view_of(made)
            started = start_of(view.buffer)
            source = record(started).alias_at(started, view.position)
        elif known is not None and known.moves is not None and known.body is None:
            source = next(iter(made.all_input_nodes), None)
        elif known is None or not known.arrives:  # each copy has memory of its own
            source = alias_of(made)


def find_writes(node: Node) -> list[Node]:
    """The operands that a node writes into."""
    return record(node).writes(node) if node.op == "call_function" else []


def body_of(node: Node) -> Program | None:
    """The program that a loop runs once for each of its turns; None for any other node."""
    body = record(node).body if node.op == "call_function" else None
    return None if body is None else body(node)


def turns_of(loop: Node) -> int:
    """The number of turns of a loop."""
    return int(loop.args[1])


def early_of(loop: Node) -> Mapping[Node, int]:
    """The nodes of a loop's body that start in front of their turn -> so many turns early: all-gathers one, their
    copies two, and the reads of these from a disk three."""
    early = record(loop).early
    return {} if early is None else early(loop)


def find_calls(graph: fx.Graph, is_wanted: Callable[[Operation], bool]) -> list[Node]:
    """The nodes of a graph that call an operation whose record is wanted, in order, without a walk over all nodes."""
    targets = [target for target in list_targets(graph) if is_wanted(record(target))]
    nodes = (graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)
    return sorted(itertools.chain.from_iterable(nodes))


def find_loops(graph: fx.Graph) -> dict[Node, Program]:
    """The loops of a graph, in order -> their bodies."""
    nodes = find_calls(graph, lambda known: known.body is not None)
    return {node: body for node in nodes if (body := body_of(node)) is not None}


def find_bodies(graph: fx.Graph) -> Iterator[Program]:
    """The bodies of the loops of a graph."""
    return iter(find_loops(graph).values())


def is_random(node: Node) -> bool:
    """Whether a node draws from a generator of torch."""
    return node.op == "call_function" and record(node).is_random(node)


def averages_alone(program: Program, node: Node) -> bool:
    """Whether the rank of a node that scatters averages leaves with no other rank."""
    return program.layout_of(node).is_averaged_alone(node.kwargs.get("replicas", True))


def starts(node: Node) -> str | None:
    """ "gathered" or "scattered" where a node starts a collective that another node waits for, else None."""
    return record(node).starts if node.op == "call_function" else None


def leaves_of(node: Node) -> Sequence[int]:
    """The leaves that a node of an operation of `ops` names, as indices into its bucket's layout."""
    named = node.args[2]
    if record(node).names == "position":
        return [named[node.args[3]]]
    return [named] if isinstance(named, int) else named


def storage(node: Node) -> Any:
    """The key of the memory of a node's value, equal for all views of it; the node itself where it has no tensor."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, Tensor) else node
