"""The shape of the package: rooms and the arrows between them, the public names, the length of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import fzero

PACKAGE = Path(fzero.__file__).parent
MAX_LINES = 400

ROOMS = "base | layout optim | ranks values | program | tracing passes execution state | fzero | variants"
"""The rooms, from the bottom, a level between bars: folders of the package, and the modules beside them, "fzero"."""

LEVELS = [level.split() for level in ROOMS.split("|")]


def modules() -> dict[str, Path]:
    """`{"optim.base": .../fzero/optim/base.py, ...}`; a package has its folder's name, fzero itself ""."""
    parts = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


MODULES = modules()


def imports(name: str, *, typing: bool = True) -> Iterator[str]:
    """The modules of fzero that a module imports, anywhere in its file; with `typing` those for annotations too."""
    tree = ast.parse(MODULES[name].read_text())
    if not typing:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (inside(alias.name) for alias in node.names if is_fzero(alias.name))
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(name, node)
            if is_fzero(origin):
                attributes = [inside(f"{origin}.{alias.name}") for alias in node.names]
                yield from (attribute if attribute in MODULES else inside(origin) for attribute in attributes)


def absolute(name: str, node: ast.ImportFrom) -> str:
    """The dotted module that `from ... import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = ["fzero", *name.split(".")] if name else ["fzero"]
    depth = len(package) - node.level + (MODULES[name].name == "__init__.py")
    return ".".join([*package[:depth], *([node.module] if node.module else [])])


def is_fzero(module: str) -> bool:
    return module.split(".")[0] == "fzero"


def inside(module: str) -> str:
    return module.partition(".")[2]


def room(name: str) -> str:
    """The folder that a module is in, "fzero" for what is in none."""
    first = name.split(".")[0]
    return first if (PACKAGE / first).is_dir() and first else "fzero"


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms that it imports from."""
    found: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name in MODULES:
        found[room(name)] |= {room(other) for other in imports(name)} - {room(name)}
    return found


def test_every_room_has_its_level() -> None:
    assert sorted(arrows()) == sorted(name for level in LEVELS for name in level)


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_downwards(name: str) -> None:
    height = {each: number for number, level in enumerate(LEVELS) for each in level}
    upwards = {
        other for other in imports(name) if room(other) != room(name) and height[room(other)] >= height[room(name)]
    }
    assert not upwards, f"fzero.{name} ({room(name)}) imports from its own level or above: {sorted(upwards)}"


@pytest.mark.parametrize("name", sorted({room(name) for name in MODULES} - {"fzero"}))
def test_a_room_says_what_lives_there(name: str) -> None:
    doc = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert doc and len(doc.splitlines()) <= 8, f"fzero/{name}/__init__.py says in at most eight lines what lives there"


def test_no_import_is_cyclic() -> None:
    list(TopologicalSorter({name: set(imports(name, typing=False)) - {name} for name in MODULES}).static_order())


def test_imports_inside_functions_and_relative_ones_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text(
        "def f():\n    from ..base import tree\n    from .kernels import g\n    import fzero.base.mesh, torch\n"
    )
    monkeypatch.setitem(MODULES, "optim.base", file)
    assert sorted(imports("optim.base")) == ["base.mesh", "base.tree", "optim.kernels"]


def test_all_is_what_is_exported() -> None:
    listed = list(getattr(fzero, "__all__", ()))
    assert len(listed) == len(set(listed)), "a name stands twice in __all__"
    missing = [name for name in listed if not hasattr(fzero, name)]
    assert not missing, f"__all__ names what fzero does not have: {missing}"
    unlisted = {name for name, value in vars(fzero).items() if is_public(name, value)} - set(listed)
    assert not unlisted, f"public names that __all__ does not list: {sorted(unlisted)}"


def is_public(name: str, value: object) -> bool:
    """Submodules become attributes of a package by being imported: they are public only where `__all__` lists them."""
    return not name.startswith("_") and not isinstance(value, ModuleType)


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short(name: str) -> None:
    lines = len(MODULES[name].read_text().splitlines())
    assert lines <= MAX_LINES, f"{MODULES[name].name} has {lines} lines: it is usually two files (limit {MAX_LINES})"
