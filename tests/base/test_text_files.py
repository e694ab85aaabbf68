"""Texts that users name a file for: written, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fzero import FzeroError
from fzero.base.text_files import write_text


def test_a_lone_surrogate_becomes_its_escape_which_is_the_same_in_json(tmp_path: Path) -> None:
    text = json.dumps("ä\ud800", ensure_ascii=False)
    write_text("page", tmp_path / "page", text)
    assert json.loads((tmp_path / "page").read_text(encoding="utf-8")) == "ä\ud800"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (3.5, "path: is 3.5; give a text or a path"),
        ("a\0b", r"path: is 'a\x00b'; give a text or a path"),
        ("\ud800", r"page '\ud800': is not written: "),
        ("/nowhere/page", "page '/nowhere/page': is not written: "),
    ],
)
def test_a_path_that_cannot_be_written_is_named(path: Any, words: str) -> None:
    with pytest.raises(FzeroError) as error:
        write_text("page", path, "text")
    assert words in str(error.value)


def test_folders_are_made_where_they_are_wanted(tmp_path: Path) -> None:
    write_text("page", tmp_path / "a" / "b" / "page", "text", parents=True)
    assert (tmp_path / "a" / "b" / "page").read_text() == "text"
    with pytest.raises(FzeroError, match="is not written"):
        write_text("page", tmp_path / "a" / "b" / "page" / "c", "text", parents=True)
