"""The committed table of outcomes, one operator a line, and its law: outcomes only get better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from conformance.operators import OUTCOMES, Verdict

FILE = Path(__file__).with_name("table.txt")
Table = Mapping[str, Verdict]


def load() -> dict[str, Verdict]:
    """The committed table. Under another torch, whose samples may differ, only its rows that are wrong."""
    text = FILE.read_text()
    rows = from_text(text)
    return rows if is_of_this_torch(text) else {name: row for name, row in rows.items() if row.outcome == "wrong"}


def is_of_this_torch(text: str) -> bool:
    return text.startswith(f"# torch {version()}:")


def from_text(text: str) -> dict[str, Verdict]:
    """The rows `name outcome sample reason` of a table."""
    rows = (line.split(maxsplit=3) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: Verdict(outcome, *reason, sample=int(sample)) for name, outcome, sample, *reason in rows}


def to_text(table: Table) -> str:
    """The table as text, sorted by name; `from_text(to_text(table)) == table`."""
    width = max(map(len, table), default=0)
    rows = [
        f"{name:<{width}}  {verdict.outcome:<7}  {verdict.sample:>4}  {verdict.reason}".rstrip()
        for name, verdict in sorted(table.items())
    ]
    head = [
        f"# torch {version()}: {counts(table)}",
        "# Operator, its outcome, the first sample that has it, and why. `make conformance ARGS=--write` writes this.",
    ]
    return "\n".join([*head, *rows, ""])


def version() -> str:
    """`2.13.0`, without the build."""
    return torch.__version__.partition("+")[0]


def counts(table: Table) -> str:
    """`578 equal, 32 refused, ...`"""
    found = Counter(verdict.outcome for verdict in table.values())
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in (*reversed(OUTCOMES), "skipped"))


def regressions(before: Table, today: Table) -> dict[str, str]:
    """What became worse: operator -> what happened.

    An operator that the table lacks or skips may become anything but wrong. One that the table does not skip may not
    be skipped. One that torch lacks today counts as neither worse nor better.
    """
    return {
        name: f"sample {verdict.sample} is {verdict.outcome} ({verdict.reason}), was {outcome_in(before, name)}"
        for name, verdict in today.items()
        if is_worse(outcome_in(before, name), verdict.outcome)
    }


def improvements(before: Table, today: Table) -> dict[str, str]:
    """What became better, or was not tested before: operator -> what happened."""
    return {
        name: f"is {verdict.outcome}, was {outcome_in(before, name)}"
        for name, verdict in today.items()
        if verdict.outcome != outcome_in(before, name) and not is_worse(outcome_in(before, name), verdict.outcome)
    }


def outcome_in(table: Table, name: str) -> str:
    """The outcome in the table; "unknown" where the table lacks the operator."""
    return table[name].outcome if name in table else "unknown"


def is_worse(before: str, today: str) -> bool:
    if before not in OUTCOMES:
        return today == "wrong"
    return today not in OUTCOMES or OUTCOMES.index(today) < OUTCOMES.index(before)
