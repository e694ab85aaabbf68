"""Codes of errors, and docs/errors.md, whose list tools/errors.py reads from the source."""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import api
import errors

import fzero
from fzero.__main__ import main
from fzero.base.mesh import read_mesh
from fzero.deepspeed.absent import AbsentAttribute

PAGE = (api.ROOT / errors.PAGE).read_text()
SOURCE = """
'''Samples: errors of each form.'''
WAY = "leave it out"

def check(name, value, is_odd):
    if value is None:
        raise FzeroError(name, "is None", WAY)
    problem = f"is {value!r:.80}"
    if is_odd:
        problem, way_out = "is odd", "give 2"
    else:
        problem, way_out = f"is {value}, at a kind", "give 4" + " or 8"
    raise FzeroError(f"{name} of x".strip(), problem, way_out)

def refuse(name, problem):
    raise FzeroError(f"argument {name}", problem, way_out="give another" if name else WAY)

def one(kind):
    kind = "k"
    refuse(kind, "is one")
    refuse("b", f"is {kind} of {len(kind)}")
"""


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "samples.py").write_text(SOURCE)
    caches = [value for value in vars(errors).values() if hasattr(value, "cache_clear")]
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(api, "MODULES", {"fzero.samples": tmp_path / "samples.py"})
    yield
    for each in caches:
        each.cache_clear()


def test_errors_are_read_from_the_source(sample: None) -> None:
    """Variables as they are at the raise, a problem with the way out beside it, what each caller gives."""
    assert errors.list_errors() == {
        "samples": [
            errors.Said("{name}: is None", ("leave it out",)),
            errors.Said("{name} of x: is odd", ("give 2",)),
            errors.Said("{name} of x: is {value}, at a kind", ("give 4 or 8",)),
            errors.Said("argument k: is one", ("give another", "leave it out")),
            errors.Said("argument b: is k of {len(kind)}", ("give another", "leave it out")),
        ]
    }
    assert "### samples\n\nSamples: errors of each form.\n\n* `{name}: is None`<br>Way out: `leave" in errors.render()


def test_an_error_has_the_code_of_its_module() -> None:
    with pytest.raises(fzero.FzeroError) as raised:
        read_mesh("--mesh", "eight")
    error = raised.value
    assert error.code == "base.mesh" and "base.mesh" not in str(error)
    last = traceback.format_exception_only(error)[-1]
    assert last.startswith("[base.mesh] docs/errors.md ")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.code, copied.__notes__) == (str(error), error.code, error.__notes__)
    mine = fzero.FzeroError("x", "is mine")
    assert mine.code == "" and not hasattr(mine, "__notes__")
    assert AbsentAttribute("x", "is not here").code == ""


def test_the_command_line_prints_the_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["checkpoint", "ls", str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "has no checkpoint" in first
    assert second.startswith("[__main__] ")


def test_the_page_says_where_to_read_on_for_each_code() -> None:
    found = errors.list_errors()
    rooms = {code.partition(".")[0] for code in found}
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \|$", PAGE.split("## Where to read on")[1], re.MULTILINE)
    assert sorted(room for row in rows for room in re.findall(r"`(\w+)`", row)) == sorted(rooms)
    calls = {
        name.removeprefix("fzero.") for name, path in api.MODULES.items()
        if re.search(r"(?<!class )\bFzeroError\($", path.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert calls <= set(found)


def test_the_example_of_the_page_is_an_error() -> None:
    with pytest.raises(fzero.FzeroError) as raised:
        fzero.scan(lambda x, _, layer: (x, None), torch.ones(2), layers=[])
    assert "".join(traceback.format_exception_only(raised.value)) in PAGE
