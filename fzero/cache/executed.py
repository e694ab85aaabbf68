"""Executed code: which functions a trace ran, and a hash of the globals that they name.

Whatever way leads to a function, the function that ran is known. So are the globals of packages that other code may
change, such as a registry of attention functions.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from fzero.base.executed_code import record_code
from fzero.cache.code import find_owner
from fzero.cache.describe import Description
from fzero.cache.rules import Undescribed

_MODULES = frozenset({"modules", "import_module", "__import__"})
_BY_NAME = _MODULES | {"getattr", "vars", "globals", "eval", "exec", "__dict__", "attrgetter"}
"""Names in code that reads what no name in it says."""


MOST_SHOWN = 20
"""How many globals of a module a message names."""


class Executed:
    """The code that ran in the block of `record_calls`, and the globals as they were before."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []
        self.before = {name: dict(vars(module)) for name, module in _iter_modules()}

    def list_names(self, imported: Container[str]) -> dict[str, list[str]]:
        """Module -> the globals that code of its file names, and that the module had before. None of modules that
        traces `imported`, whose files alone are compared."""
        modules = {getattr(module, "__file__", None): name for name, module in _iter_modules()}
        found: dict[str, set[str]] = {}
        for code in self.codes:
            module = modules.get(code.co_filename)
            if module in self.before and module not in imported:
                found.setdefault(module, set()).update(code.co_names)
                for other in self._list_dynamic(module, set(code.co_names)):
                    found.setdefault(other, set()).update(self.before[other])
        return {name: sorted(names & self.before[name].keys()) for name, names in sorted(found.items())}

    def _list_dynamic(self, module: str, names: set[str]) -> list[str]:
        """The modules of the user whose globals this code may read by names that are computed."""
        if find_owner(module) != "user" or names.isdisjoint(_BY_NAME):
            return []
        if names & _MODULES:
            return [name for name in self.before if find_owner(name) == "user"]
        held = (x.__name__ for x in self.before[module].values() if isinstance(x, ModuleType))
        return [name for name in (module, *held) if name in self.before and find_owner(name) == "user"]

    def hash(self, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """`hash_globals` of these names as they were bound before the block."""
        return _hash(names, self.before)


def hash_globals(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What these globals of modules are, in words -> a hash of them as they are now: those of a module of the user, or
    those of an installed package."""
    return _hash(names, {name: vars(module) for name, module in _iter_modules()})


def _hash(names: Mapping[str, Sequence[str]], known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    roots: dict[str, list[tuple[str, Any]]] = {}
    for module, keys in names.items():
        package = f"the globals of {module.partition('.')[0]}"
        shown = f"{', '.join(keys[:MOST_SHOWN])}{', ...' if len(keys) > MOST_SHOWN else ''} of the module {module}"
        of = roots.setdefault(shown if find_owner(module) == "user" else package, [])
        of += [(f"{module}.{key}", known.get(module, {}).get(key)) for key in keys]
    return {of: Description(each, is_exact=False).digest for of, each in roots.items()}


def _iter_modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and find_owner(name) != "closed":
            yield name, module


@contextmanager
def record_calls() -> Iterator[Executed]:
    """Record the functions of Python that run in a block, by Python's profiler.

    Raises:
        Undescribed: where another profiler runs.
    """
    executed = Executed()
    with record_code() as codes:
        if codes is None:
            raise Undescribed("the step", "is traced under a profiler")
        yield executed
    executed.codes += codes
