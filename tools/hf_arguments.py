"""Writes the tables of TrainingArguments, `optim` and `fsdp_config` into docs/huggingface.md: `make arguments`.

The fields and names are those of the installed transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import transformers
from pages import Table
from transformers.training_args import OptimizerNames

from fzero.hf import fsdp
from fzero.hf.arguments import ARGUMENTS
from fzero.hf.optimizers import HELD, REFUSED


def join_rows(head: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A table of rows `(name, meaning, note)`: names of one meaning and note share a line."""
    yield f"| {head} | meaning | here |"
    yield "|---|---|---|"
    ordered = sorted((meaning, note, name) for name, meaning, note in rows)
    for (meaning, note), group in itertools.groupby(ordered, key=lambda row: row[:2]):
        names = ", ".join(f"`{name}`" for _, _, name in group)
        yield f"| {names} | {meaning} | {note} |"


def render_arguments() -> list[str]:
    """The table of all fields of the installed transformers, by meaning and note.

    Raises:
        KeyError: for a field without a meaning.
    """
    fields = dataclasses.fields(transformers.Seq2SeqTrainingArguments)
    return list(join_rows("TrainingArguments", (ARGUMENTS[field.name] for field in fields)))


def render_optimizers() -> list[str]:
    """The table of the names of `optim` of the installed transformers."""
    return list(join_rows("`optim`", (_describe(each.value) for each in OptimizerNames)))


def _describe(name: str) -> tuple[str, str, str]:
    if name in REFUSED:
        return name, "refused", REFUSED[name]
    if name in HELD:
        kind = HELD[name][0]
        return name, "mapped", f"to `fzero.optim.{kind}`; needs no bitsandbytes, and pages nothing"
    return name, "the same", ""


def render_fsdp() -> list[str]:
    """The table of the keys of `fsdp_config`."""
    return list(join_rows("`fsdp_config`", ((name, *row) for name, row in fsdp.KEYS.items())))


TABLES = [
    Table("huggingface.md", "arguments", "hf_arguments.py", render_arguments),
    Table("huggingface.md", "names of optim", "hf_arguments.py", render_optimizers),
    Table("huggingface.md", "keys of fsdp_config", "hf_arguments.py", render_fsdp),
]

if __name__ == "__main__":
    for table in TABLES:
        table.write()
