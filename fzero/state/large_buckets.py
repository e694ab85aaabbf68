"""Large buckets: a bucket that holds most of a model is gathered at once, though its layers could be buckets.

A layer is an entry of a tree that has entries with leaves of its own. A bucket of one large leaf, such as an embedding,
and one of a single layer have no better cut.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fzero.base.sizes import format_size
from fzero.state.grouping import Keys, LeafLayouts

LEAST_NBYTES = 2**20
"""The least size of a bucket that is worth a warning."""
_log = logging.getLogger("fzero")


def warn_of_large_buckets(keys: Keys, leaves: Sequence[Any], planned: LeafLayouts) -> None:
    """Warn of a bucket that has most bytes of a tree, where the layers in it could be buckets."""
    sizes = [leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves]
    buckets: dict[str, list[int]] = {}
    for i, (layout, _) in planned.items():
        if not layout.replicated:
            buckets.setdefault(layout.bucket, []).append(i)
    for name, members in buckets.items():
        nbytes = sum(sizes[i] for i in members)
        head = (
            _find_layers(members, keys, leaves, sizes) if 2 * nbytes > sum(sizes) and nbytes >= LEAST_NBYTES else None
        )
        if head is not None:
            cut = f'".".join(path.split(".")[:{len(head) + 1}])'
            start = ".".join(map(str, head))
            way_out = f'layers=lambda path: {cut} if path.startswith("{start}.") else None'
            message = (
                "bucket %r has %s of the tree's %s, and is gathered at once; to make a bucket of each layer in it: %s"
            )
            _log.warning(message, name, format_size(nbytes), format_size(sum(sizes)), way_out)


def _find_layers(
    members: list[int], keys: Keys, leaves: Sequence[Any], sizes: list[int]
) -> tuple[str | int, ...] | None:
    """The path below which the layers stand that have most bytes of a bucket: two of one structure, or three of any.
    None where there are none."""
    total, depth = sum(sizes[i] for i in members), 0
    while True:
        entries: dict[Any, list[int]] = {}
        for i in members:
            entries.setdefault(keys[i][depth], []).append(i)
        layers = [held for held in entries.values() if any(len(keys[i]) > depth + 2 for i in held)]
        nbytes = [sum(sizes[i] for i in held) for held in layers]
        if 2 * sum(nbytes) <= total:
            return None
        if max(nbytes) <= 0.6 * total:
            kinds = Counter(tuple((keys[i][depth + 1 :], tuple(leaves[i].shape)) for i in held) for held in layers)
            has_layers = len(layers) > 2 or max(kinds.values()) > 1
            return keys[members[0]][:depth] if has_layers and depth else None
        members, depth = layers[nbytes.index(max(nbytes))], depth + 1
