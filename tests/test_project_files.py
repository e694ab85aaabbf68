"""Files of the repository that other programs read: mkdocs.yml, Dockerfile, CITATION.cff, forms of issues."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import api

ROOT = api.ROOT


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def list_pages(nav: Any) -> Iterator[str]:
    """The pages of mkdocs' navigation: a list of pages, of titles with pages and of titles with lists."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from list_pages(each)


def test_the_site_has_every_page_once() -> None:
    added = {"index.md", "benchmarks.md", "changelog.md", "contributing.md"}
    modules = {f"api/{name}.md" for name, _ in api.list_modules()} | {"api/fzero.variants.md"}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | added | modules
    assert sorted(list_pages(read_yaml("mkdocs.yml")["nav"])) == sorted(pages)


def test_the_image_copies_what_is_there() -> None:
    copies = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copies for name in line.split()]
    assert {"fzero", "requirements-dev.txt"} <= set(names) and all((ROOT / name).exists() for name in names)


def test_forms_of_issues_have_what_github_asks_for() -> None:
    for name in ("bug", "feature"):
        form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form.keys() >= {"name", "description", "body"}
        names = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert names and len(set(names)) == len(names)
        assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["license"] == "Apache-2.0" and "version" not in citation  # fzero.__version__ is its home
