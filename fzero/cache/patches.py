"""Patches: what stands in a module or a class of torch and does not come from torch.

Who replaces `torch.nn.functional.gelu` or a method of `nn.Linear` changes what a step computes, and no file of torch.
Inductor comes behind a program, and makes methods of its own while it is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fzero.cache.code import find_owner

_PATCHED = frozenset({"torch", "fzero", "optree", "einops", "math", "operator", "builtins"})


def list_patches() -> list[tuple[str, Any]]:
    """`(place, object)` of each."""
    found = []
    for name, module in sorted(sys.modules.items()):
        is_of_program = name.partition(".")[0] in _PATCHED and not name.startswith("torch._inductor")
        if isinstance(module, ModuleType) and is_of_program:
            for key, value in _find_foreign(vars(module)):
                found.append((f"{name}.{key}", value))
            for cls in list(vars(module).values()):
                if issubclass(type(cls), type) and cls.__module__ == name:
                    found += [(f"{name}.{cls.__qualname__}.{key}", value) for key, value in _find_foreign(vars(cls))]
    return found


def _find_foreign(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The functions, and other objects that may be called, that are made by code of another package."""
    for key, value in list(held.items()):
        cls = type(value)  # not `isinstance`, which asks deprecated objects for their class
        if cls is staticmethod or cls is classmethod:
            value = value.__func__
            cls = type(value)
        if cls is FunctionType:
            module = value.__globals__.get("__name__")
            if _is_of_another(module) or (module in ("functools", "contextlib") and _holds_foreign(value)):
                yield key, value
        elif cls is functools.partial:
            yield from ((key, value) for _ in _find_foreign({"": value.func}))
        elif cls not in _OF_PYTHON and _is_of_another(cls.__module__) and callable(value) and not issubclass(cls, type):
            yield key, value


_OF_PYTHON = frozenset({str, int, bool, float, tuple, list, dict, set, frozenset, type, type(None), ModuleType})


def _holds_foreign(wrapper: FunctionType) -> bool:
    """Whether a wrapper of Python's library is around a function of another package."""
    held = (cell.cell_contents for cell in wrapper.__closure__ or ())
    return any(type(x) is FunctionType and _is_of_another(x.__globals__.get("__name__")) for x in held)


@functools.lru_cache(1 << 12)
def _is_of_another(module: Any) -> bool:
    name = str(module)
    return find_owner(name) != "closed" and not name.startswith("namedtuple_") and name != "typing_extensions"
