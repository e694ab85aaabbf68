"""Types, contents and nodes in words, for what ranks compare of a program."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

from torch import Tensor

from fzero.base.dtypes import name_dtype
from fzero.layout.layout import Layout
from fzero.program.operation import Node
from fzero.program.records import body_of


def format_type(value: Tensor, shape: Sequence[int] | None = None) -> str:
    return f"{name_dtype(value.dtype)}{list(value.shape if shape is None else shape)}"


def format_node(node: Node) -> str:
    if body_of(node) is None:
        return str(node.format_node())
    _, turns, *given = node.args
    return f"%{node.name} = {turns} turns of a body with {tuple(given)}"


def list_shapes(layout: Layout) -> list[list[int]]:
    return [list(leaf.shape) for leaf in layout.leaves]


def format_contents(value: Tensor) -> str:
    """The elements of a tensor, or where there are more than 16 a hash of their bytes."""
    flat = value.detach().cpu().reshape(-1).contiguous()
    if flat.numel() <= 16:
        return str(flat.tolist())
    return hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.nbytes)).hexdigest()[:16]
