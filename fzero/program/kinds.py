"""Kinds: what a value of a program is, seen across ranks.

    Slice(bucket, leaf)    sharded: one global value of which this rank holds a slice
    a frozenset            the mesh axes along which the value differs between ranks
                           uniform, the same everywhere: no axis
                           per-rank, as the batch, random draws and what is computed from them: all axes
                           with RAGGED among them the shape differs too, as that of slices does
    Buffer(...)            what a collective moves for some leaves of a bucket: there is padding in it
    a list of kinds        a list of leaves, position by position

After the varying and invariant values of JAX's shard_map. `inference` finds the kinds of a program's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fzero.program.program import Argument, Program, Result

UNIFORM: frozenset[str] = frozenset()
RAGGED = "its shape"
Kind = Any


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a leaf of a bucket."""

    bucket: str
    leaf: int


@dataclass(frozen=True)
class Buffer:
    """A buffer of leaves of a bucket, padding included: gathered, or a block of their scattered mean. `done`: something
    has waited for the buffer."""

    gathered: bool
    bucket: str
    leaves: tuple[int, ...]
    done: bool = False


def kind_of_state(program: Program, value: Argument | Result) -> Kind | None:
    """The kind that a state argument has and a state result must have; None for other values."""
    if value.bucket is None:
        return None
    return UNIFORM if program.layouts[value.bucket].replicated else Slice(value.bucket, value.leaf)


def axes_of(program: Program, kind: Kind) -> frozenset[str]:
    """The mesh axes along which a value of this kind differs between ranks."""
    return frozenset({program.mesh.shard_axis}) if isinstance(kind, Slice) else kind - {RAGGED}
