"""The shape of the package: the ladder of DESIGN section 7, the public names, the length of files."""

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

RUNGS = [
    set(names.split())
    for names in (
        "errors",
        "ranges levels tree mesh control regions randomness source initializers",
        "layout packing boxes buffers transports moves collectives ops mode store deferred",
        "chunks rules sharded buckets sources interop lowering live virtual streaming feed agreement optim",
        "placement assembly building initial tensorfiles kinds inference program tracing costs work rates "
        "timeline listing differentiation fragments compilation linking capture runtime lockstep calibration profiling",
        "passes",
        "pipeline transform simulation equivalence checkpoint",
        "report cli",
    )
]
"""The modules of each rung, from the bottom, without the leading "fzero."; a package stands for all its modules."""


def modules() -> dict[str, Path]:
    """`{"optim.base": .../fzero/optim/base.py, ...}`; a package has its folder's name, fzero itself ""."""
    parts = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules of fzero that the module `name` imports, at the top of the file or anywhere inside."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
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


def rung(name: str) -> int:
    """The rung of a module, or of the package it is in; fzero itself, "", stands above all."""
    for height, names in enumerate([*RUNGS, {""}]):
        if name.split(".")[0] in names:
            return height
    pytest.fail(f"fzero/{name.replace('.', '/')}.py stands on no rung: add {name!r} to RUNGS in {Path(__file__).name}")


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_from_their_rung_or_below(name: str) -> None:
    above = {other for other in imports(name) if rung(other) > rung(name)}
    assert not above, f"fzero.{name} (rung {rung(name)}) imports from above: {sorted(above)}"


def test_no_import_is_cyclic() -> None:
    list(TopologicalSorter({name: set(imports(name)) - {name} for name in MODULES}).static_order())


def test_imports_inside_functions_and_relative_ones_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text("def f():\n    from .. import tree\n    from .kernels import g\n    import fzero.mesh, torch\n")
    monkeypatch.setitem(MODULES, "optim.base", file)
    assert sorted(imports("optim.base")) == ["mesh", "optim.kernels", "tree"]


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
