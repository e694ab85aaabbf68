"""docs/huggingface.md: the table of TrainingArguments is the one that the code has, and names each field."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import transformers
from hf_models import make_arguments
from test_docs import ROOT

from fzero import FzeroError
from fzero.hf.arguments import ARGUMENTS
from fzero.hf.checks import check_training_arguments
from fzero.hf.release import LEAST, check_version

sys.path.insert(0, str(ROOT / "tools"))

import hf_arguments
import train_beside


def test_releases_of_transformers_that_do_not_work_are_refused_by_name() -> None:
    for version in ("4.57.6", "5.0.0", "5.9.0", "5.21.1"):
        with pytest.raises(FzeroError, match=rf"transformers: is {version}, and fzero.hf works with 5.22 and later"):
            check_version(version)
    for version in ("5.22.0", "5.23.0", "6.0.0.dev0", transformers.__version__):
        check_version(version)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    least = f"transformers>={'.'.join(map(str, LEAST))}"
    assert least in declared["hf"] and least in declared["test"]


def test_each_field_has_a_meaning() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert fields == set(ARGUMENTS)
    assert all(each.note for each in ARGUMENTS.values() if each.meaning != "the same")


def test_each_field_that_is_refused_names_itself_and_its_note(tmp_path: Path) -> None:
    refused = [each for each in ARGUMENTS.values() if each.meaning == "refused"]
    assert len(refused) >= 5
    for each in refused:
        arguments = make_arguments(tmp_path)
        setattr(arguments, each.name, True)
        with pytest.raises(FzeroError, match=rf"^TrainingArguments: {each.name}: is True") as caught:
            check_training_arguments(arguments)
        assert caught.value.way_out == each.note


@pytest.mark.parametrize("table", hf_arguments.TABLES, ids=lambda table: table.name)
def test_the_tables_are_current(table: Any) -> None:
    assert table.read() == table.render(), "run: make arguments"


def test_tables_of_models_take_no_nan_and_no_missing_leaf_for_equal() -> None:
    start, theirs = {"a": torch.zeros(2), "b": torch.zeros(2)}, ([1.0, 2.0], {"a": torch.ones(2), "b": torch.ones(2)})
    assert train_beside.measure(theirs, theirs, start) == (0.0, 0.0)
    broken = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])}
    assert train_beside.measure(([1.0, torch.nan], broken), theirs, start) == (torch.inf, torch.inf)
    assert train_beside.measure(([1.0, 2.0], {"a": torch.ones(2)}), theirs, start) == (0.0, torch.inf)


@pytest.mark.parametrize("name", ["trained_models", "timm_models"])
def test_a_page_of_models_has_all_outcomes_that_it_counts(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    found = train_beside.read_outcomes(page)
    counts = Counter(x.outcome for x in found.values())
    shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in train_beside.OUTCOMES)
    assert re.search(rf"^{len(found)} of \d+ were tried: {shown}\.$", page, re.MULTILINE)
    assert all(x.why for x in found.values() if x.outcome != "equal")
