"""Comm: the collectives of a program, from its graph, before anything runs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from fzero.base.dtypes import name_dtype
from fzero.base.sizes import format_size
from fzero.program.tables import LINES, fold_layers, limit_lines


class Comm(NamedTuple):
    """One collective. `nbytes` is the size of the full buffer: the parts of all ranks together, padding included."""

    op: str  # the name of the collective, as of torch.distributed's: "all_gather", "all_to_all"
    axis: str
    bucket: str | None
    dtype: torch.dtype
    nbytes: int


class Comms(list[Comm]):
    """Collectives in the order in which every rank starts them. Prints as a table."""

    def __str__(self) -> str:
        return self.table()

    def table(self, *, full: bool = False) -> str:
        """A line for each collective. Where these are more than 40 lines, those of equal layers have one together, with
        the bytes of each and of all. `full` lists each by itself."""
        total = Counter[str]()
        for entry in self:
            total[entry.op] += entry.nbytes
        moved = ", ".join(f"{op} {format_size(nbytes)}" for op, nbytes in total.items()) or "nothing"
        head = [f"{len(self)} collectives move {moved}"]
        if full or len(self) + 2 <= LINES:
            groups = [(entry.bucket or "", [entry]) for entry in self]
        else:
            known = ((" ".join([x.op, x.axis, str(x.dtype), str(x.nbytes)]), x) for x in self)
            kinds: dict[str, list[Comm]] = {}
            for kind, entry in known:
                kinds.setdefault(kind, []).append(entry)
            groups = [each for same in kinds.values() for each in fold_layers((x.bucket or "", x) for x in same)]
        is_folded = any(len(entries) > 1 for _, entries in groups)
        columns = f"{'each':>10} {'times':>6} {'bytes':>10}" if is_folded else f"{'bytes':>10}"
        head.append(f"  {'collective':<15} {'axis':<12} {'bucket':<24} {columns} dtype")
        rows = list[str]()
        for name, entries in groups:
            first, size = entries[0], format_size(sum(entry.nbytes for entry in entries))
            each = f"{format_size(first.nbytes):>10} {len(entries):>6} " if is_folded else ""
            dtype = name_dtype(first.dtype)
            rows.append(f"  {first.op:<15} {first.axis:<12} {name:<24} {each}{size:>10} {dtype}")
        return limit_lines(head if self else head[:1], rows, full)
