"""Kinds: how the values of a program relate across ranks.

    Slice(bucket, leaf)    sharded: one global value, of which each rank holds a slice
    a frozenset            the mesh axes along which the value differs between ranks
                           empty: uniform, the same on all ranks
                           all axes: per-rank, as the batch, random draws, and values computed from these
                           with RAGGED: the shape differs between ranks too, as the shape of slices does
    Buffer(...)            the buffer that a collective moves for some leaves of a bucket, with padding
    a list of kinds        the kinds of a list of values, position by position

After the varying and invariant values of JAX's shard_map. `inference` finds the kinds of a program's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fzero.program.program import Program
    from fzero.program.signature import Argument, Result

UNIFORM: frozenset[str] = frozenset()
RAGGED = "its shape"
Kind = Any


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a leaf of a bucket. It differs along the axes `over`, where its mean is not taken yet."""

    bucket: str
    leaf: int
    over: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Buffer:
    """A buffer of leaves of a bucket with padding: the gathered leaves, or this rank's block of their scattered mean.
    `done`: a node has waited for the buffer. `over` is as in `Slice`."""

    gathered: bool
    bucket: str
    leaves: tuple[int, ...]
    done: bool = False
    over: frozenset[str] = frozenset()


def kind_of_state(program: Program, value: Argument | Result) -> Kind | None:
    """The kind that a state argument has and a state result must have, or that a loop's body has been given; None for
    other values."""
    if value.kind is not None or value.own is not None or value.bucket is None:
        return value.own if value.kind is None else value.kind
    return UNIFORM if program.layouts[value.bucket].replicated else Slice(value.bucket, value.leaf)


def axes_of(program: Program, kind: Kind) -> frozenset[str]:
    """The mesh axes along which a value of this kind differs between ranks."""
    if isinstance(kind, Slice):
        return kind.over.union(program.mesh.split(program.layouts[kind.bucket].cut_axes))
    return kind - {RAGGED}
