"""The committed table of outcomes, and its law: outcomes only get better.

The first part has a line for each operator, module and optimizer, with a letter for each dtype and form. The second
part has a line for each reason why cells of a line are wrong, raw or refused. A refusal that must be has no line: a
form that would write to a leaf is refused always.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from conformance import forms, modules, operators, optimizers
from conformance.judge import Row
from conformance.verdict import DTYPES, OUTCOMES, Cell, Verdict

FILE = Path(__file__).with_name("table.txt")
Table = Mapping[str, Row]

KINDS = {"operators": operators, "modules": modules, "optimizers": optimizers}
COLUMNS = {
    "operators": [Cell(form, dtype) for dtype in DTYPES for form in forms.FORMS],
    "modules": [Cell(form, dtype) for dtype in ("f64", "f32", "c64") for form in modules.FORMS],
    "optimizers": [Cell(form, dtype) for dtype in ("f64", "f32") for form in optimizers.FORMS],
}
"""The cells of a line, in order."""

LETTERS = {"equal": "=", "refused": "r", "raw": "!", "wrong": "x", "skipped": ".", "absent": "-"}


def kind_of(name: str) -> str:
    """`operators`, `modules` or `optimizers`, without torch's databases."""
    if name.startswith("optim."):
        return "optimizers"
    return "modules" if re.match(r"nn\.[A-Z]", name) else "operators"


def must_refuse(name: str, cell: Cell) -> bool:
    """Whether refusing is what is right: the operator would write to a leaf."""
    return kind_of(name) == "operators" and forms.FORMS[cell.form].writes_leaf


def load() -> dict[str, Row]:
    """The committed table. Under another torch, whose samples may differ, only its cells that are wrong."""
    text = FILE.read_text()
    table = from_text(text)
    if is_of_this_torch(text):
        return table
    return {name: {cell: v for cell, v in row.items() if v.outcome == "wrong"} for name, row in table.items()}


def is_of_this_torch(text: str) -> bool:
    return text.startswith(f"# torch {version()}, ")


def samples_in(text: str) -> int | None:
    """How many samples of each cell a table is made of; None for all."""
    found = re.search(r"^# torch \S+ (\d+) sample", text)
    return int(found.group(1)) if found else None


def describe_samples(samples: int | None) -> str:
    """`every sample`, `1 sample` or `3 samples`."""
    return f"{samples} sample{'s' if samples > 1 else ''}" if samples else "every sample"


def version() -> str:
    """`2.13.0`, without the build."""
    return torch.__version__.partition("+")[0]


def from_text(text: str) -> dict[str, Row]:
    """The table of a text."""
    table: dict[str, Row] = {}
    outcomes = {letter: outcome for outcome, letter in LETTERS.items()}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        name, second, *rest = line.split(maxsplit=1 if name_is_new(line, table) else 4)
        if rest:
            for cell in parse_cells(rest[1]):
                table[name][cell] = Verdict(second, rest[2], int(rest[0]))
        else:
            letters = zip(COLUMNS[kind_of(name)], second.replace(" ", ""))
            table[name] = {cell: Verdict(outcomes[letter]) for cell, letter in letters if letter != "-"}
    return table


def name_is_new(line: str, table: Table) -> bool:
    return line.split(maxsplit=1)[0] not in table


def to_text(table: Table, samples: int | None) -> str:
    """The table as text, sorted by name."""
    lines = [
        f"# torch {version()}, {describe_samples(samples)} of each cell: {counts(table)}",
        "# Each line: a letter for each dtype and form. `make conformance ARGS=--write` writes this file.",
        "# " + ", ".join(f"{letter} {outcome}" for outcome, letter in LETTERS.items()),
    ]
    for kind in KINDS:
        rows = {name: table[name] for name in sorted(table) if kind_of(name) == kind}
        if rows:
            lines += [f"# {kind}, {describe_columns(kind)}"]
            lines += [f"{name:<48} {to_letters(COLUMNS[kind], row)}" for name, row in rows.items()]
    lines.append("# Why: the outcome, the first sample that has it, the cells, the reason")
    for name in sorted(table):
        lines += [f"{name} {why}" for why in explain(name, table[name])]
    return "\n".join([*lines, ""])


def describe_columns(kind: str) -> str:
    """`f64 f32: value others ...`"""
    dtypes, names = (dict.fromkeys(cell[i] for cell in COLUMNS[kind]) for i in (1, 0))
    return f"{' '.join(dtypes)}, of each: {' '.join(names)}"


def to_letters(columns: list[Cell], row: Row) -> str:
    """`==r.- ==r.-`: a group for each dtype."""
    groups: dict[str, str] = defaultdict(str)
    for cell in columns:
        groups[cell.dtype] += LETTERS[row[cell].outcome if cell in row else "absent"]
    return " ".join(groups.values())


def explain(name: str, row: Row) -> list[str]:
    """`refused 3 value[f64,f32] reason` for each reason that needs one."""
    by_reason: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell, verdict in row.items():
        if verdict.outcome in ("wrong", "raw") or (verdict.outcome == "refused" and not must_refuse(name, cell)):
            by_reason[verdict.outcome, verdict.reason].append(cell)
    return [
        f"{outcome} {min(row[cell].sample for cell in cells)} {format_cells(cells)} {reason}"
        for (outcome, reason), cells in sorted(by_reason.items(), key=lambda item: OUTCOMES.index(item[0][0]))
    ]


def format_cells(cells: Iterable[Cell]) -> str:
    """`value,all[f64,f32];method[i64]`"""
    dtypes: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        dtypes[cell.form].append(cell.dtype)
    names: dict[str, list[str]] = defaultdict(list)
    for form, given in dtypes.items():
        names[",".join(given)].append(form)
    return ";".join(f"{','.join(forms)}[{given}]" for given, forms in names.items())


def parse_cells(text: str) -> list[Cell]:
    """The inverse of `format_cells`."""
    groups = (re.fullmatch(r"(.*)\[(.*)\]", group).groups() for group in text.split(";"))  # type: ignore[union-attr]
    return [Cell(form, dtype) for names, dtypes in groups for form in names.split(",") for dtype in dtypes.split(",")]


def counts(table: Table) -> str:
    """`57800 equal, 320 refused, ...`, of all cells."""
    found = Counter(verdict.outcome for row in table.values() for verdict in row.values())
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in (*reversed(OUTCOMES), "skipped"))


def regressions(before: Table, today: Table) -> dict[str, list[str]]:
    """What became worse: name -> what happened in each cell.

    A cell that the table lacks or skips may become anything but wrong. One that the table does not skip may not be
    skipped. What torch lacks today counts as neither worse nor better.
    """
    return changes(before, today, is_worse)


def improvements(before: Table, today: Table) -> dict[str, list[str]]:
    """What became better, or was not tested before: name -> what happened in each cell."""
    return changes(before, today, lambda was, now: was != now and not is_worse(was, now))


def changes(before: Table, today: Table, is_change) -> dict[str, list[str]]:
    """Name -> what happened in each cell that changed."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, row in today.items():
        for cell, now in row.items():
            was = before[name][cell].outcome if cell in before.get(name, {}) else "unknown"
            if is_change(was, now.outcome):
                text = f"{cell.form} in {cell.dtype}: sample {now.sample} is {now.outcome} ({now.reason}), was {was}"
                found[name].append(text)
    return dict(found)


def is_worse(before: str, today: str) -> bool:
    if before not in OUTCOMES:
        return today == "wrong"
    return today not in OUTCOMES or OUTCOMES.index(today) < OUTCOMES.index(before)
