"""docs/conformance.md, from the table."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

from conformance.forms import FORMS
from conformance.table import COLUMNS, KINDS, Table, describe_samples, kind_of, must_refuse, version
from conformance.verdict import DTYPES, Cell

FILE = Path(__file__).parents[2] / "docs" / "conformance.md"

INTRODUCTION = """\
# Conformance: what torch does, and what a sharded step does

The law of fzero: a sharded step equals the plain one, or raises an `FzeroError` that says why. This page measures the
law on torch's own databases of operators, modules and optimizers. `make conformance ARGS=--write` writes the page and
its table, `tests/conformance/table.txt`. Outcomes may only get better: `make conformance` fails where one is worse, and
`make test-all` tries one or two samples of everything.

Each sample runs in plain torch and in a step on three virtual ranks. Stages 1, 2 and 3 take turns; one sample of each
operator runs at all three. Parameters of modules, and parameters and state of optimizers, lie on the device and on the
host in turn. The outcome of an operator in a form and a dtype is the worst outcome of its samples:

| outcome | meaning |
|---|---|
| equal | results and gradients are plain torch's, up to rounding |
| refused | fzero raises an `FzeroError` |
| raw | something else is raised |
| wrong | a result or a gradient differs |
| skipped | there is nothing to compare: plain torch raises an error, the result is random, or no tensor can be a leaf |

"""

FORM_WORDS = {
    "value": "a function of the first tensor, a leaf",
    "others": "each other tensor is the leaf",
    "all": "all tensors are leaves",
    "batch": "the first tensor is a leaf, the others are batches",
    "method": "a method of the leaf",
    "unbound": "`torch.Tensor.name(leaf)`",
    "operator": "an operator such as `+`",
    "state": "the result is the new state, two steps, donated",
    "in_place": "in place on a clone of the leaf",
    "in_place_result": "in place on what was computed from the leaf",
    "in_place_leaf": "in place on the leaf: must be refused",
    "out": "`out=` a plain tensor",
    "out_leaf": "`out=` a leaf: must be refused",
    "train": "in training mode",
    "eval": "in evaluation mode",
    "train_batch": "in training mode, the inputs are batches",
    "eval_batch": "in evaluation mode, the inputs are batches",
    "donate": "three steps that update state in place",
    "keep": "three steps that keep their arguments",
}

BECAUSE = {
    "Python needs a value": "The shape of the result, or a branch of Python code inside torch, depends on values. A "
    "step is traced before it has values, so that it has no shape or branch for them.",
    "would change a value in place": "A leaf is a value that every rank holds a part of, and other code may hold it "
    "too. A step is a function: it returns new state.",
    "writes into it": "The operator writes to a tensor that the step closes over. A step is a function: what changes "
    "is an argument and a result.",
    "a per-rank value meets a slice": "A batch differs between ranks, and so does what is computed from it. Beside "
    "a slice of a leaf it would make ranks hold different state.",
    "sparse": "A sparse tensor has no elements at fixed places, of which each rank could hold some.",
}
"""The start of a refusal, and why it is one."""

DTYPE_WORDS = {"f64": "float64", "f32": "float32", "c64": "complex64", "i64": "int64"}
COUNTED = ("equal", "refused", "raw", "wrong", "skipped")


def render(table: Table, samples: int | None) -> str:
    """The page of a table."""
    measured = f"torch {version()}, {describe_samples(samples)} of each operator in each form and dtype"
    parts = [INTRODUCTION, f"Measured with {measured}.\n\n"]
    for kind in KINDS:
        parts += [f"## {kind.capitalize()}\n\n", summarize(kind, table), count_cells(kind, table)]
    parts.append("## What is not equal\n\nIn a reason, NAME stands for an operator and N for a number.\n\n")
    reasons = "".join(list_reasons(outcome, table) for outcome in ("wrong", "raw", "refused"))
    parts.append(reasons or "Nothing.\n")
    return "".join(parts).rstrip() + "\n"


def summarize(kind: str, table: Table) -> str:
    """How many of a kind have a cell of each outcome."""
    rows = {name: row for name, row in table.items() if kind_of(name) == kind}
    found = Counter[str]()
    for name, row in rows.items():
        found.update({v.outcome for cell, v in row.items() if not must_refuse(name, cell)})
    share = 100 * found["refused"] / max(len(rows), 1)
    unless = ", forms that would write to a leaf not counted" if kind == "operators" else ""
    text = (
        f"{len(rows)} {kind}. Wrong in some form and dtype: {found['wrong']}. A raw error in some: {found['raw']}. "
        f"Refused in some: {found['refused']} ({share:.1f} %){unless}."
    )
    return textwrap.fill(text, 118) + "\n\n"


def count_cells(kind: str, table: Table) -> str:
    """A table: for each form and dtype, how many have each outcome."""
    lines = [f"| form | dtype | {' | '.join(COUNTED)} |", "|---|---|" + "--:|" * len(COUNTED)]
    for cell in sorted(COLUMNS[kind], key=lambda cell: [column.form for column in COLUMNS[kind]].index(cell.form)):
        verdicts = [row[cell].outcome for name, row in table.items() if kind_of(name) == kind and cell in row]
        if verdicts:
            numbers = (str(verdicts.count(outcome)) for outcome in COUNTED)
            lines.append(
                f"| `{cell.form}`: {FORM_WORDS[cell.form]} | {DTYPE_WORDS[cell.dtype]} | {' | '.join(numbers)} |"
            )
    return "\n".join([*lines, "", ""])


def list_reasons(outcome: str, table: Table) -> str:
    """The reasons of an outcome, the most frequent first, each with its operators and forms."""
    by_reason: dict[str, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for name, row in sorted(table.items()):
        for cell, verdict in row.items():
            if verdict.outcome == outcome and not (outcome == "refused" and must_refuse(name, cell)):
                by_reason[generalize(verdict.reason, name)][name].append(cell)
    if not by_reason:
        return ""
    parts = [f"### {outcome.capitalize()}\n\n"]
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        parts.append(f"* `{reason}`\n\n")
        parts += [textwrap.fill(text, 118, initial_indent="  ", subsequent_indent="  ") + "\n\n"
                  for start, text in BECAUSE.items() if start in reason]  # fmt: skip
        forms = defaultdict(list)
        for name, cells in names.items():
            forms[", ".join(form for form in [*FORMS, *FORM_WORDS] if form in {c.form for c in cells})].append(name)
        for given, members in forms.items():
            unique = ", ".join(dict.fromkeys(given.split(", ")))
            listed = textwrap.fill(f"{unique}: {', '.join(f'`{m}`' for m in members)}", 116, break_on_hyphens=False)
            parts.append(textwrap.indent(listed, "  ") + "\n\n")
    return "".join(parts)


def generalize(reason: str, name: str) -> str:
    """The first words of a reason, with NAME for the operator and N for numbers, so that operators share it."""
    parts = name.split(".")
    words = sorted({*parts, "_".join(parts)}, key=len, reverse=True)
    own = "|".join(re.escape(word) for word in words if len(word) > 2)
    text = re.sub(rf"(?<![\w.])({own})_?(?!\w)", "NAME", reason) if own else reason
    text = re.sub(r"\bin \w+:", "in NAME:", re.sub(r"\w+ (would change|writes)", r"NAME \1", text))
    text = re.sub(r"(, N)+", ", N", re.sub(r"_?\d+", "N", text)).replace("`", "'")
    return textwrap.shorten(text, 84, placeholder=" ...")


assert set(DTYPES) == set(DTYPE_WORDS)
