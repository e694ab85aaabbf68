"""Garbage: Python's collector, which takes its time where many objects are made and none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 250_000
"""From so many objects on that a block has made, they count as old behind it."""
FEW_FROZEN = 10_000
"""Python 3.12 counts objects that never die among those that are frozen, some hundreds. Who freezes what an application
has imported, freezes hundreds of thousands."""


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector in a block, and enable it again behind the block.

    Otherwise the collector walks all objects again and again while their number grows: the graph of a program, a
    quarter of the time of a trace, and the leaves of a manifest. Many objects would be walked three times more behind
    the block, as young ones: they count as old at once. Cyclic garbage stays until the next collection, for a trace a
    few megabytes a layer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > MANY and gc.get_freeze_count() < FEW_FROZEN:  # else they stay frozen
                gc.freeze()
                gc.unfreeze()  # puts all objects among the old ones
            gc.enable()
