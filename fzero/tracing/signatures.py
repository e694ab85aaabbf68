"""Signatures: the properties of a call's arguments that its program depends on, and how those of two calls differ.

A signature is `(settings of torch, structure of the arguments, a description of each leaf)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.frozen import is_frozen
from fzero.program.readings import Found, flatten
from fzero.tracing.read_objects import describe_value
from fzero.values.sharded import Form, Sharded

Signature = tuple[Any, tree.TreeDef, list[Any]]
SHOWN = 3  # shapes or values that a message shows


class SignedCall(NamedTuple):
    """The signature and the leaves of a call."""

    signature: Signature
    leaves: Sequence[Any]


def sign_leaf(leaf: Any) -> Any:
    """The properties of a leaf on which the program depends."""
    if isinstance(leaf, Sharded):
        return leaf.form
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride(), is_frozen(leaf)
    return describe_value(leaf)


def sign_read(value: Any) -> Any:
    """The properties of a value that a reading found, on which the program depends. A whole number is described as a
    size is, which may be open."""
    return (torch.Size([value]), int, None, (1,), False) if type(value) is int else sign_leaf(value)


def sign_all(signature: Signature, found: Found) -> Signature:
    """The signature of a call with what readings found in its batch."""
    settings, treedef, leaves = signature
    return settings, treedef, [*leaves, *map(sign_read, flatten(found))]


def _name_all(treedef: tree.TreeDef, read: Sequence[str]) -> list[str]:
    """A name for each position of a signature. `read` are the lines of what readings found."""
    return [*(f"argument {tree.dotted(path)}" for path in tree.keys(treedef)), *(f"what is read at {x}" for x in read)]


def describe_change(known: Any, signature: Any, read: Sequence[str] = ()) -> str:
    """The first argument in which two signatures differ, with both values of a constant, or the first value that was
    read at the lines `read`. "" where only settings differ."""
    (_, before, old), (_, treedef, new) = known, signature
    if before != treedef:
        mismatch = tree.mismatch(before, treedef)
        return f"argument {mismatch.where}: {mismatch.problem}"
    changed = ((name, _format_all([a, b])) for name, a, b in zip(_name_all(treedef, read), old, new) if a != b)
    return next((f"{name}: was {was}, is {now}" for name, (was, now) in changed), "")


def describe_changes(known: Sequence[Any], signature: Any, read: Sequence[str] = ()) -> str:
    """The argument that differs most often among signatures, with some of its shapes or values, and the way out."""
    _, treedef, new = signature
    rows = [new, *(leaves for _, other, leaves in known if other == treedef and len(leaves) == len(new))]
    columns = [[x for i, x in enumerate(column) if x not in column[:i]] for column in zip(*rows)]
    most = max(range(len(columns)), key=lambda i: len(columns[i]), default=None)
    if most is None or len(columns[most]) == 1:
        return describe_change(known[0], signature, read) or "settings such as autocast keep changing"
    name, seen = _name_all(treedef, read)[most], columns[most]
    shapes = list(dict.fromkeys(str(list(x[0])) for x in seen if is_batch(x) and x[1] is not int))
    if len(shapes) > 1:
        way_out = "round its lengths up a few fixed ones, as the ladder of fzero.data.loader does"
        return f"{name} had {len(shapes)} shapes, {_list_some(shapes)}; {way_out}, or give max_programs"
    values = _format_all(seen)
    return f"{name} had {len(values)} forms, {_list_some(values)}; give what changes as a tensor of one shape"


def is_batch(described: Any) -> bool:
    """Whether this is the description of a plain tensor, or of a number that was read."""
    return isinstance(described, tuple) and isinstance(described[0], torch.Size)


def _format_all(described: Sequence[Any]) -> list[str]:
    """A text for each of several unlike descriptions. Those of state are in full where short texts would be alike."""
    short = list(map(_format, described))
    is_clear = len(set(short)) == len(short) or not all(isinstance(x, Form) for x in described)
    return short if is_clear else list(map(str, described))


def _format(described: Any) -> str:
    if isinstance(described, Form):
        layout, where = described.layout, "" if described.place is None else f", in {described.place}"
        leaf, count = layout.leaves[described.leaf], len(layout.leaves)
        in_bucket = f"one of {count} in bucket {layout.bucket!r}" if count > 1 else f"alone in bucket {layout.bucket!r}"
        return f"{described.dtype} {list(leaf.shape)} of {leaf.path} on {layout.mesh}, {in_bucket}{where}"
    if is_batch(described):
        if described[1] is int:
            return repr(described[0][0])
        return f"{described[1]} {list(described[0])} on {described[2]} with strides {described[3]}"
    if not isinstance(described, tuple):
        return "another object"
    kind, value, *attributes = described
    return " with ".join([repr(value) if not attributes else kind.__name__, *map(repr, attributes)])


def _list_some(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
