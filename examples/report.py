"""A run in a few lines: what it is, how good the model became, what a step cost beside what its program predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from measure import Cost

Row = tuple[str, str, str, str]


def heading(numel: int, world: int, stage: int) -> str:
    """What is about to be trained, and how."""
    how = f"stage {stage} on {world} ranks" if world > 1 else "in one process"
    return f"GPT of {numel:,} parameters, {how}"


def quality(gpt: float, bigram: float) -> str:
    """Bits per byte of both models on the same held-out bytes."""
    return f"\nheld-out text{'GPT':>30}{'bigram':>13}\n  bits per byte{gpt:>28.3f}{bigram:>13.3f}\n"


def costs(cost: Cost, steps: int, program: Any | None, world: int) -> str:
    """What one step of one rank communicates and holds; `cost` was measured over `steps` steps.

    Collectives count the full, gathered buffer; a rank sends the part that others lack, or lets them read it.
    """
    sent = cost.sent // (steps * world) if program and cost.sent else None
    comm = program.comm() if program else ()
    rows = [("one step", "collectives", "predicted", "measured"), *collectives(comm)]
    if program:
        rows.append(("  sent by a rank", "", size(round(sent_nbytes(comm, world))), ""))
        rows.append(("  by sockets", "", "", size(sent)))
    rows.append(("  peak memory", "", size(program.memory().peak if program else None), size(cost.peak)))
    return "\n".join("{:<18}{:>12}{:>13}{:>13}".format(*row).rstrip() for row in rows)


def collectives(comm: Iterable[Any]) -> Iterator[Row]:
    """A row for each kind of collective."""
    nbytes: dict[str, list[int]] = {}
    for entry in comm:
        nbytes.setdefault(entry.op, []).append(entry.nbytes)
    for op, sizes in nbytes.items():
        yield f"  {op.replace('_', '-')}", str(len(sizes)), size(sum(sizes)), ""


def sent_nbytes(comm: Iterable[Any], world: int) -> float:
    """Bytes that a rank sends: (N - 1) / N of each buffer, and twice that for an all-reduce."""
    return sum(entry.nbytes * (2 if entry.op == "all_reduce" else 1) for entry in comm) * (world - 1) / world


def size(nbytes: int | None) -> str:
    """`1536 -> "1.5 KiB"`; a dash for what is not known."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
