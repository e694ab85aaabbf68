"""What variants know of leaves that are split over model axes: along which axes their gradients and codes differ."""

from __future__ import annotations

from typing import Any

from fzero import Program


def list_replicas(program: Program, bucket: Any, replicas: bool) -> str:
    """The axes, together, over which a scatter of a bucket takes the mean behind that over the shard axis; "" for none.
    Its leaves are not split over these."""
    axes = [axis for axis in program.layouts[bucket].replica_axes if replicas and program.mesh.size(axis) > 1]
    return program.mesh.join(axes) if axes else ""


def lies_along_all(program: Program, node: Any) -> bool:
    """Whether the bucket of a node is cut over all axes that state lies along: its leaves are not split over some."""
    return program.layout_of(node).shard_axis == program.mesh.shard_axis


def find_split_axes(walk: Any, bucket: Any) -> tuple[str, ...]:
    """The model axes that the leaves of a bucket are split over: a buffer of such leaves differs along these."""
    split_axes: tuple[str, ...] = walk.program.layouts[bucket].split_axes
    return split_axes


def find_pack_kind(walk: Any, node: Any) -> Any:
    """The kind of codes of gradients, and of what is kept: both differ along data axes, and as gradients do."""
    fulls, *_, kept, _, _ = node.args
    kind = walk.per_rank.union(*map(walk.of, fulls), walk.of(kept))
    return [kind] * 2 if isinstance(node.meta["val"], list) else kind
