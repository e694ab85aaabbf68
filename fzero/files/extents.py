"""Extents: integers that say which bytes of a file are in use."""

from __future__ import annotations

from bisect import insort

ALIGN = 4096
"""Extents begin and end at multiples of so many bytes, which files that are read past the page cache ask for."""


def align_down(offset: int) -> int:
    """The largest multiple of `ALIGN` that is at most `offset`."""
    return offset // ALIGN * ALIGN


def align_up(offset: int) -> int:
    """The smallest multiple of `ALIGN` that is at least `offset`."""
    return -(-offset // ALIGN) * ALIGN


class FreeList:
    """The bytes of one file that nothing uses, and the file's end.

    `take` returns the first gap that is large enough, else room at the end. Neighbouring gaps are one gap.
    """

    def __init__(self) -> None:
        self.end = 0
        self.gaps: list[range] = []

    def take(self, nbytes: int) -> range:
        """An extent of `nbytes` bytes, rounded up to a multiple of `ALIGN`."""
        nbytes = align_up(nbytes)
        for i, gap in enumerate(self.gaps):
            if len(gap) >= nbytes:
                rest = range(gap.start + nbytes, gap.stop)
                self.gaps[i : i + 1] = [rest] if rest else []
                return range(gap.start, gap.start + nbytes)
        self.end += nbytes
        return range(self.end - nbytes, self.end)

    def give_back(self, extent: range) -> None:
        """Let later calls of `take` return these bytes again. A gap at the end of the file becomes no gap."""
        insort(self.gaps, extent, key=lambda gap: gap.start)
        merged: list[range] = []
        for gap in self.gaps:
            if merged and merged[-1].stop == gap.start:
                merged[-1] = range(merged[-1].start, gap.stop)
            else:
                merged.append(gap)
        if merged and merged[-1].stop == self.end:
            self.end = merged.pop().start
        self.gaps = merged
