"""The public names: docs/api.txt, CHANGELOG.md and `tools/api.py`, which holds one to the other."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    root, dot, rest = name.partition(".")
    name = f"{api.RETURNED.get(root, root)}{dot}{rest}"
    value: Any = fzero
    for depth, part in enumerate(name.split(".")[1:], 1):
        if not hasattr(value, part):
            importlib.import_module(".".join(name.split(".")[: depth + 1]))
        value = getattr(value, part)
    return value


def test_what_is_read_from_the_source_is_what_python_has(live: dict[str, str]) -> None:
    """Each name is there. Functions have these arguments in this order, and operations have these schemas."""
    checked, schemas = 0, 0
    for name, rest in live.items():
        is_attribute = live.get(name.rpartition(".")[0], "").startswith("class") and not rest.startswith("(")
        if name.startswith(HEAVY) or rest.startswith(":") or is_attribute:
            continue
        value = find_value(name)
        if isinstance(value, torch._ops.OpOverload) and rest:
            assert torch._C.parse_schema(value._schema.name + rest) == value._schema, name
            schemas += 1
        if inspect.isfunction(value) and rest.startswith("("):
            listed = inspect.signature(eval(f"lambda {drop_annotations(rest)}: 0"))
            found = [each for each in inspect.signature(value).parameters if each not in ("self", "cls")]
            assert list(listed.parameters) == found, name
            checked += 1
    assert checked > 250 and schemas > 15


def test_every_class_of_results_is_listed(live: dict[str, str]) -> None:
    assert {name for name in api.RESULTS if live.get(name) != "class"} == set()


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


# what is read of a module

MODULE = """
import functools
from functools import cached_property

_NAMED = "str bucket, int leaf"
SIZE = 4 << 20
LIMIT: frozenset[str] = frozenset()


class Base:
    limit: int

    def __getitem__(self, key: str) -> int: ...

    def __repr__(self) -> str: ...


class C(Base):
    limit = 3

    def __init__(self, first: str, second: int | None = None, *, path: str, size: int = SIZE) -> None:
        second = second or 1
        self.first, self.second = first, second
        self.path = self._path = path
        self.known: list[int] = []
        self.made = self.__hidden = len(first)

    @cached_property
    def a(self) -> int: ...

    @functools.cached_property
    def b(self) -> int: ...

    @property
    def c(self) -> int: ...

    @c.setter
    def c(self, value: int) -> None: ...

    def __call__(self, x: int) -> int: ...

    @staticmethod
    def of(x: int) -> int: ...

    forward = __call__
    d = c


gather = register("gather(Tensor x, {}) -> Tensor".format("int leaf"))
scatter = register("scatter(Tensor x, int leaf) -> Tensor", names="leaf")
take: Any = register(f"take(Tensor x, {_NAMED}, " "int numel) -> Tensor")
spread = register(Operation(name="spread"))
logger = logging.getLogger("spread(ed)")
"""
LINES = """
LIMIT
SIZE = 4 << 20
C class(first: str, second: int | None=None, *, path: str, size: int=4 << 20)
C.__call__(x: int) -> int
C.__getitem__(key: str) -> int
C.a: int
C.b: int
C.c: int
C.d: int
C.first: str
C.forward(x: int) -> int
C.known: list[int]
C.limit: int
C.made
C.of(x: int) -> int
C.path: str
C.second
gather
logger
scatter(Tensor x, int leaf) -> Tensor
spread
take(Tensor x, str bucket, int leaf, int numel) -> Tensor
"""


def test_members_attributes_aliases_and_schemas_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up.py").write_text(MODULE)
    monkeypatch.setitem(api.MODULES, "fzero.made_up", tmp_path / "made_up.py")
    names = [name for name in api.list_names("fzero.made_up") if name != "Base"]
    lines = [line for name in names for line in api.describe(name, api.find("fzero.made_up", name)).items()]
    assert sorted(api.render(dict(lines)).splitlines()) == sorted(LINES.split("\n")[1:-1])


def test_modules_in_a_public_all_are_public(live: dict[str, str]) -> None:
    assert live["fzero.deepspeed.Engine.forward"] == live["fzero.deepspeed.Engine.__call__"]
    assert "fzero.deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint" in live
    assert live["fzero.deepspeed.zero.GatheredParameters"].startswith("class(params: Any, ")


def test_a_module_or_class_that_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FAMILIES", ("fzero.optim.gone",))
    with pytest.raises(
        SystemExit, match=r"fzero.optim.gone is no module of fzero, and FAMILIES or .*: write its new name"
    ):
        api.list_surface()
    monkeypatch.setattr(api, "FAMILIES", ())
    monkeypatch.setattr(api, "RETURNED", {"Step": "fzero.transform.Gone"})
    with pytest.raises(SystemExit, match=r"fzero.transform has no Gone: write the new name .* in RETURNED"):
        api.list_surface()


@pytest.mark.parametrize("heading", ["", "## 0.3.0", "## 0.3.0 (soon)", "## 0.3.0 unreleased"])
def test_a_heading_that_cannot_be_read_is_named(heading: str) -> None:
    older = "## 0.2.0 (2026-01-01)\n" if heading else ""
    with pytest.raises(SystemExit, match=f"the heading {re.escape(repr(heading))}: write it as"):
        api.read_section(f"# Changes\n\n{heading}\n\n* A.\n\n{older}")


# releases

SOURCE = '__version__ = "0.2.0"\n'
NEEDS = "packaging and setuptools, of the extra dev, are not installed"


def write_tree(folder: Path, changelog: str, project: str, readme: str = "[a](https://b.c/d.md) [e](#f)\n") -> None:
    (folder / "fzero").mkdir()
    texts = {"CHANGELOG.md": changelog, "pyproject.toml": project, "fzero/__init__.py": SOURCE, "README.md": readme}
    for name, text in texts.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("changelog", "project", "missing"),
    [
        ("## 0.2.0 (2026-12-01)\n", "[project.urls]\nSource = 'b'\n", []),
        (
            "## 0.2.0 (unreleased)\n",
            "[project.urls]\nSource = 'b'\n",
            ["the section 0.2.0 of CHANGELOG.md has no date"],
        ),
        (
            "## 0.1.0 (2026-12-01)\n",
            "[project.urls]\nSource = 'b'\n",
            ["CHANGELOG.md begins with 0.1.0, fzero/__init__.py"],
        ),
        (
            "## 0.2.0 (2026-12-01)\n",
            "[project]\nname = 'a'\n",
            ["pyproject.toml has no Source in [project.urls]: 0 links"],
        ),
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


def test_links_of_the_readme_lead_to_the_tag_of_a_release() -> None:
    try_wheel = pytest.importorskip("try_wheel", reason=NEEDS)
    text = "[a](docs/a.md#b) ![c](d.png) [e](#f) [g](https://h.i)"
    assert try_wheel.make_absolute(text, None, "0.2.0") == text
    made = try_wheel.make_absolute(text, "https://host/project", "0.2.0")
    at = "https://host/project"
    assert made == f"[a]({at}/blob/v0.2.0/docs/a.md#b) ![c]({at}/raw/v0.2.0/d.png) [e](#f) [g](https://h.i)"
    readme = try_wheel.make_absolute((api.ROOT / "README.md").read_text(), at, "0.2.0")
    assert f"{at}/raw/v0.2.0/benchmarks/" in readme and not try_wheel.LINK.findall(readme)


def test_a_release_wants_a_clean_tree_and_a_new_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = pytest.importorskip("release", reason=NEEDS)
    write_tree(tmp_path, "## 0.2.0 (2026-12-01)\n", "[project.urls]\nSource = 'b'\n")
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
