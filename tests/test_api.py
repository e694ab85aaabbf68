"""The public names: docs/api.txt, CHANGELOG.md and `tools/api.py`, which holds one to the other."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import api

HEAVY = ("fzero.hf.", "fzero.lightning.")
"""Modules whose import takes seconds: here they are only read."""


@pytest.fixture(scope="module")
def live() -> dict[str, str]:
    return api.list_surface()


def test_the_changelog_names_every_change_of_the_public_names(live: dict[str, str]) -> None:
    changes = api.compare(api.LISTING.read_text().splitlines(), api.render(live).splitlines())
    assert api.find_unnamed(changes, api.CHANGELOG.read_text()) == []


def test_the_topmost_section_is_of_the_version_of_the_source() -> None:
    version, date, _ = api.read_section(api.CHANGELOG.read_text())
    assert version == fzero.__version__ and re.fullmatch(r"|\d{4}-\d\d-\d\d", date)


def find_value(name: str) -> Any:
    value: Any = fzero
    for depth, part in enumerate(name.split(".")[1:], 1):
        if not hasattr(value, part):
            importlib.import_module(".".join(name.split(".")[: depth + 1]))
        value = getattr(value, part)
    return value


def test_what_is_read_from_the_source_is_what_python_has(live: dict[str, str]) -> None:
    """Each name is there, and the arguments of each function have these names, in this order."""
    checked = 0
    for name, rest in live.items():
        is_field = rest.startswith(":")
        if name.startswith(HEAVY) or is_field:
            continue
        value = find_value(name)
        if inspect.isfunction(value) and rest.startswith("("):
            listed = inspect.signature(eval(f"lambda {drop_annotations(rest)}: 0"))
            found = [each for each in inspect.signature(value).parameters if each not in ("self", "cls")]
            assert list(listed.parameters) == found, name
            checked += 1
    assert checked > 200


def drop_annotations(signature: str) -> str:
    """`a, /, *b, c=0` of `(a: int, /, *b: str, c: int = 5) -> bool`: every default is 0."""
    arguments = api.ast.parse(f"def f{signature}: ...").body[0].args  # type: ignore[attr-defined]
    for each in api.ast.walk(arguments):
        if isinstance(each, api.ast.arg):
            each.annotation = None
    zero = api.ast.Constant(0)
    arguments.defaults = [zero for _ in arguments.defaults]
    arguments.kw_defaults = [each and zero for each in arguments.kw_defaults]
    return api.ast.unparse(arguments)


def test_all_names_of_public_modules_are_read(live: dict[str, str]) -> None:
    for public, module in api.list_modules():
        if not f"{public}.".startswith(HEAVY) and hasattr(there := importlib.import_module(module), "__all__"):
            assert {f"{public}.{name}" for name in there.__all__} <= live.keys()


# changes

OLD = ["fzero.f(x: int) -> int", "fzero.g() -> int", "fzero.C class(n: int)", "fzero.C.m() -> int"]


def test_changes_are_names_that_come_go_or_have_another_signature() -> None:
    new = ["fzero.f(x: int, y: int=0) -> int", "fzero.D class", "fzero.D.m() -> int", "fzero.g() -> int"]
    assert api.compare(OLD, new) == {"added": ["fzero.D"], "removed": ["fzero.C"], "changed": ["fzero.f"]}
    assert not any(api.compare(OLD, OLD).values())


@pytest.mark.parametrize(
    ("section", "unnamed"),
    [
        ("(unreleased)\n\n### Changed\n\n* `fzero.f(x, y)` takes y.\n", False),
        ("(unreleased)\n\n### Added\n\n* `fzero.f` takes y.\n", True),
        ("(unreleased)\n\n### Changed\n\n* f takes y.\n", True),
        ("(unreleased)\n\n### Changed\n\n* `fzero.ff` takes y.\n\n## 0.1.0 (2026-01-01)\n\n* `fzero.f`\n", True),
        ("(2026-01-02)\n\n### Changed\n\n* `fzero.f` takes y.\n", True),
    ],
)
def test_a_change_is_named_in_backticks_under_its_head_of_the_unreleased_section(section: str, unnamed: bool) -> None:
    found = api.find_unnamed({"added": [], "changed": ["fzero.f"], "removed": []}, f"# Changes\n\n## 0.2.0 {section}")
    assert bool(found) == unnamed
    assert not found or ("`fzero.f` was changed: name it" in found[0] and "`### Changed`" in found[0])


def test_a_default_that_is_a_constant_stands_with_its_value(live: dict[str, str]) -> None:
    assert "max_programs: int=16" in live["fzero.shard"]
    assert "class" in live["fzero.Program"] and live["fzero.Program.graph"] == ": fx.Graph"
    assert live["fzero.optim.ScaleByAdamState"] == "class(count: Tensor, mu: Tree, nu: Tree)"
    assert "fzero.variants.quantization.quantize" not in live and "fzero.variants.diloco.diloco" in live


# releases

SOURCE = '__version__ = "0.2.0"\n'
NEEDS = "packaging and setuptools, of the extra dev, are not installed"


def write_tree(folder: Path, changelog: str, project: str) -> None:
    (folder / "fzero").mkdir()
    texts = {"CHANGELOG.md": changelog, "pyproject.toml": project, "fzero/__init__.py": SOURCE}
    for name, text in texts.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("changelog", "project", "missing"),
    [
        ("## 0.2.0 (2026-12-01)\n", "[project.urls]\na = 'b'\n", []),
        ("## 0.2.0 (unreleased)\n", "[project.urls]\na = 'b'\n", ["the section 0.2.0 of CHANGELOG.md has no date"]),
        ("## 0.1.0 (2026-12-01)\n", "[project.urls]\na = 'b'\n", ["CHANGELOG.md begins with 0.1.0, fzero/__init__.py"]),
        ("## 0.2.0 (2026-12-01)\n", "[project]\nname = 'a'\n", ["pyproject.toml has no [project.urls]"]),
    ],
)
def test_a_release_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changelog: str, project: str, missing: list[str]
) -> None:
    release = pytest.importorskip("release", reason=NEEDS)
    write_tree(tmp_path, changelog, project)
    monkeypatch.setattr(release, "run_git", lambda *arguments: "")
    monkeypatch.setattr(api, "list_surface", lambda: {"fzero.f": "()"})
    monkeypatch.setattr(api, "LISTING", tmp_path / "api.txt")
    api.LISTING.write_text("fzero.f()\n")
    found = list(release.find_obstacles(tmp_path))
    assert [each[: len(said)] for each, said in zip(found, missing, strict=True)] == missing
    api.LISTING.write_text("")
    assert "docs/api.txt is not that of the source: python tools/api.py --write" in release.find_obstacles(tmp_path)


def test_a_release_wants_a_clean_tree_and_a_new_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = pytest.importorskip("release", reason=NEEDS)
    write_tree(tmp_path, "## 0.2.0 (2026-12-01)\n", "[project.urls]\n")
    monkeypatch.setattr(api, "list_surface", dict)
    monkeypatch.setattr(api, "LISTING", tmp_path / "fzero" / "api.txt")
    api.LISTING.write_text("")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a"), ("tag", "v0.2.0")):
        release.run_git(tmp_path, *command)
    (tmp_path / "b.py").touch()
    changed, tagged = release.find_obstacles(tmp_path)
    assert changed == "changes that are not committed: b.py" and tagged == "the tag v0.2.0 is there already"


def test_a_release_names_the_files_that_an_archive_has_or_lacks() -> None:
    release = pytest.importorskip("release", reason=NEEDS)
    assert list(release.compare_files("a.whl", {"fzero/a.py", "tests/b.py"}, {"fzero/a.py", "fzero/c.py"})) == [
        "a.whl has tests/b.py, which is no file of the package",
        "a.whl lacks fzero/c.py",
    ]
