"""Rules: the fields of a record that are functions. Those of an operation from outside of fzero may raise, or give what
no walk can read: the error names the operation, the field and the node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fzero.base.errors import FzeroError
from fzero.program.comm import Comm
from fzero.program.operation import Node, Operation, Work

if TYPE_CHECKING:
    from fzero.program.program import Program

_RULES = frozenset(
    """
    fake kind check perform of_all transpose span moves shares alias_at writes overwrites memory scratch work line label
    is_random body early mean_of is_identity
    """.split()
)
_STARTS = ("gathered", "scattered")


def check_fields(where: str, known: dict[str, Any]) -> None:
    """Refuse a rule that is no function, and a word that no walk knows."""
    for field in sorted(_RULES & known.keys()):
        if known[field] is not None and not callable(known[field]):
            problem = f"{field} is {known[field]!r}, which is no function"
            raise FzeroError(where, problem, f"give {field}= a function of what nodes have (docs/passes.md)")
    if known.get("starts") not in (None, *_STARTS):
        raise FzeroError(where, f"starts is {known['starts']!r}", f"give one of {_STARTS}, or leave it out")


def guard(name: str, field: str, rule: Any, base: Operation | None = None) -> Any:
    """A rule of an operation whose errors name the operation and the field, and the operation `base` that `like=` took
    the rule from. A field that is no rule stays as it is."""
    if field not in _RULES or rule is None:
        return rule

    @functools.wraps(rule)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        node = next((x.name for x in args if isinstance(x, fx.Node)), "")
        try:
            made = rule(*args, **kwargs)
            made = list(made) if field == "moves" else made
        except (FzeroError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            where = "" if base is None else f", which like={base.name} gives,"
            problem = f"its {field}{where} raises {type(error).__name__}: {error}{f' of {node}' if node else ''}"
            way_out = "let it take the arguments that nodes have"
            if base is not None:
                way_out = f"give {field}= for arguments that {base.name} does not have, or pass those by keyword"
            raise FzeroError(f"operation {name!r}", problem, way_out) from error
        is_right, wanted = _RESULTS.get(field, (_accept, ""))
        if not is_right(made):
            problem = f"its {field} gives {made!r}{f', in {node}' if node else ''}"
            raise FzeroError(f"operation {name!r}", problem, f"let it give {wanted}")
        if field == "moves":
            _check_moves(name, made, *args)
        return made

    return guarded


def _check_moves(name: str, listed: list[Comm], program: Program, node: Node) -> None:
    """Refuse a collective over an axis, or of a bucket, that there is not."""
    for entry in listed:
        if not isinstance(entry.axis, str) or not program.mesh.has(entry.axis):
            problem = f"moves names the axis {entry.axis!r}; the mesh has {program.mesh.names}, in {node.name}"
            raise FzeroError(f"operation {name!r}", problem, "name an axis of it")
        if entry.bucket is not None and entry.bucket not in program.layouts:
            known = sorted(map(str, program.layouts))
            problem = f"moves names the bucket {entry.bucket!r}; there are {known}, in {node.name}"
            raise FzeroError(f"operation {name!r}", problem, "name one, or give None")


def _accept(made: Any) -> bool:
    return True


def _is_list_of_nodes(made: Any) -> bool:
    return isinstance(made, (list, tuple)) and all(isinstance(x, fx.Node) for x in made)


_RESULTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moves": (lambda made: all(isinstance(x, Comm) for x in made), "ops.Comm objects"),
    "writes": (_is_list_of_nodes, "a list of operands, nodes such as node.args[0]"),
    "overwrites": (_is_list_of_nodes, "a list of operands, nodes such as node.args[0]"),
    "work": (lambda made: isinstance(made, Work), "ops.Work(flops, nbytes)"),
    "memory": (lambda made: isinstance(made, tuple) and len(made) > 0, "a tuple that begins with a location"),
    "scratch": (lambda made: isinstance(made, int) and made >= 0, "a number of bytes"),
    "line": (lambda made: isinstance(made, str), "a text"),
    "label": (lambda made: isinstance(made, str), "a text"),
    "span": (lambda made: made is None or isinstance(made, range), "a range of elements, or None"),
    "perform": (callable, "a function of the node's arguments"),
}
"""Rule -> whether walks can read what it gives, and what it should give."""
