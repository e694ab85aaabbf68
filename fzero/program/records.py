"""Records: the operation that a node calls, and the way to define a new one.

record(node)            everything that is known of what the node calls
define("name", ...)     a new operation, known to every walk from then on
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.torch_private import below_autograd
from fzero.program import aten
from fzero.program.operation import Node, Operation

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_RECORDS: dict[Any, Operation] = {}
_NAMES: set[str] = set()
_describe = lru_cache(maxsize=None)(aten.describe)


def record(called: Any) -> Operation:
    """The record of what a node calls, or of a target."""
    target = getattr(called, "target", called)
    known = _RECORDS.get(target)
    return _describe(target) if known is None else known


def register(operation: Operation) -> Any:
    """Let every walk know an operation. Returns its target."""
    _RECORDS[operation.target] = operation
    _NAMES.add(operation.name)
    return operation.target


def register_traced(schema: str, fake: Callable[..., Any], **known: Any) -> Any:
    """Register an operation that steps call while they are traced: a node is written down, nothing is computed."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
    target = getattr(torch.ops.fzero, name).default
    return register(Operation(name=name, target=target, fake=fake, **known))


def define(
    name: str, *, like: Any = None, schema: str | None = None, fake: Callable[..., Any] | None = None, **known: Any
) -> Any:
    """Define an operation, to be traced, checked, costed, simulated, run and printed like fzero's own.

    Returns the target, which nodes call: a pass emits one with `program.emit(target, *args)`. With a `schema`, such as
    `"(Tensor x, float p) -> Tensor"`, a step may also call the target; it has no derivative then.

    `like`, the target of a known operation, gives every field that is not given here; where `perform` is given, not
    those that say how the known one is performed. The other keywords are the fields of `fzero.ops.Operation`. An
    operation without `like` needs at least `kind` and `fake`. `perform(program, node,
    rank)` returns a function of the node's arguments; where it communicates that is a generator of exchanges, and
    `moves` says what they are.

    Raises:
        FzeroError: for a name that is taken or is no name in Python; without a rule for kinds or a fake result; for an
            unknown field; for an operation that moves something, or starts, and has nothing that performs it.
    """
    where = f"operation {name!r}"
    if not name.isidentifier() or keyword.iskeyword(name):
        raise FzeroError(where, "is no name in Python", "give a name such as 'int8_all_gather'")
    if name in _NAMES or hasattr(torch.ops.fzero, name):
        raise FzeroError(where, "is defined already", "define an operation once, where its module is imported")
    unknown = sorted(known.keys() - set(Operation.__dataclass_fields__))
    if unknown:
        fields = ", ".join(sorted(Operation.__dataclass_fields__.keys() - {"name", "target"}))
        raise FzeroError(where, f"has no field {unknown[0]!r}", f"the fields are {fields}")
    base = None if like is None else record(like)
    if base is None and "kind" not in known:
        raise FzeroError(where, "has no rule for kinds", "give kind=..., or like=... an operation that has one")
    if base is None and fake is None:
        raise FzeroError(where, "has no fake result", "give fake=..., or like=... an operation that has one")
    if base is not None:
        known = _inherit(base, "perform" in known) | known
        fake = fake or base.fake
    if (known.get("moves") or known.get("starts")) and not known.get("perform"):
        raise FzeroError(where, "communicates, and nothing performs it", "give perform=..., a generator of exchanges")
    assert fake is not None
    known["is_foreign"] = True
    if known.get("starts") and not known.get("memory"):
        known["memory"] = _hold_moved
    if known.get("moves") and not known.get("label"):
        known["label"] = lambda program, node: f"{name} {node.args[1]}"
    if schema is not None:
        target = register_traced(name + schema, fake, **known)
        _LIBRARY.impl(name, _refuse_derivative(where, target), "Autograd")
        return target
    return register(Operation(name=name, target=_named(name, fake), fake=fake, **known))


_OF_PERFORMANCE = {"memory", "work", "alias_at", "label"}
"""Fields that say how an operation is performed: one that is performed in another way does not inherit them."""


def _inherit(base: Operation, performs: bool) -> dict[str, Any]:
    fields = base.__dataclass_fields__.keys() - {"name", "target", "fake", "is_foreign"}
    return {field: getattr(base, field) for field in fields - (_OF_PERFORMANCE if performs else set())}


def _hold_moved(held: Any, node: Node) -> tuple[Any, ...]:
    """New memory for what an operation starts, and for what it moves until it is waited for."""
    moved = sum(entry.nbytes for entry in record(node).moves(held.program, node))  # type: ignore[misc]  # it starts
    return held.new(node, node.meta["val"]), held.keep((node, "moved"), moved)


def _named(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this name, for nodes to call: it has no kernel, and gives the fake result."""

    def target(*args: Any, **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    target.__name__ = target.__qualname__ = name
    return target


def _refuse_derivative(where: str, target: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd calls for an operation without a derivative: the operation, or a refusal where a derivative of its
    result might be taken. torch's own refusal comes later, and in other words under torch.func."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            way_out = "detach its operands, or call it in the forward of a torch.autograd.Function that has a backward"
            raise FzeroError(where, "has no derivative", way_out)
        with below_autograd():
            return target(*args, **kwargs)

    return call


def is_call(node: Node, *targets: Any) -> bool:
    """Whether a node calls one of these."""
    return node.op == "call_function" and node.target in targets


def name_of(node: Node) -> str:
    """The name of what a node calls, without its overload: "mm", "all_gather"; of a draw what it draws with,
    "bernoulli"; of its target where the node calls nothing."""
    target = node.args[1] if record(node).draws else node.target
    return getattr(target, "__name__", str(target)).partition(".")[0]


def shares_memory(node: Node) -> bool:
    """Whether a node's result is a view of an operand, an item of one, or an operand itself, overwritten."""
    return node.op == "call_function" and record(node).shares(node)


def find_writes(node: Node) -> list[Node]:
    """The operands of a node whose memory it writes into."""
    return record(node).writes(node) if node.op == "call_function" else []


def is_random(node: Node) -> bool:
    """Whether a node calls an operation of aten that draws from a generator."""
    return node.op == "call_function" and record(node).is_random(node)


def starts(node: Node) -> str | None:
    """ "gathered" or "scattered" where a node starts a collective that another node waits for, else None."""
    return record(node).starts if node.op == "call_function" else None


def leaves_of(node: Node) -> Sequence[int]:
    """The leaves of its bucket that a node of `ops` is about."""
    named = node.args[2]
    if record(node).names == "position":
        return [named[node.args[3]]]
    return [named] if isinstance(named, int) else named


def storage(node: Node) -> Any:
    """What stands for the memory of a node's value, equal for its views; the node itself where it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node
