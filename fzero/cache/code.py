"""Code: which modules are whose, and what identifies the code of a function in memory."""

from __future__ import annotations

import functools
import hashlib
import sys
from types import CodeType
from typing import Literal

from fzero.base.installed import is_installed

CLOSED = frozenset(
    {
        *sys.stdlib_module_names,
        "torch",
        "torchgen",
        "triton",
        "fzero",
        "optree",
        "numpy",
        "einops",
        "sympy",
        "pluggy",
        "_pytest",
        "hypothesis",
    }
)
"""Packages whose functions read no values of the user but those that they are given: their globals do not count."""
Owner = Literal["closed", "installed", "user"]


@functools.lru_cache(1 << 14)
def find_owner(module: str | None) -> Owner:
    """Whose a module is, by its name: of a "closed" package, of another "installed" one, or of the user."""
    name = module or ""
    if name.partition(".")[0] in CLOSED:
        return "closed"
    file = getattr(sys.modules.get(name), "__file__", None)
    return "installed" if file and is_installed(file) else "user"


@functools.lru_cache(1 << 14)
def hash_code(code: CodeType) -> str:
    """A hash of a code object and of those inside it: instructions, names, constants and lines."""
    parts = [
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_filename, code.co_firstlineno,
        code.co_linetable, getattr(code, "co_exceptiontable", b""), code.co_qualname,
    ]  # fmt: skip
    constants = list(map(_format_constant, code.co_consts))
    return hashlib.sha256(repr((parts, constants)).encode()).hexdigest()


def _format_constant(x: object) -> str:
    """A text that differs for 1, 1.0 and True, and does not depend on the order of a set."""
    if isinstance(x, CodeType):
        return hash_code(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(_format_constant, x))})"
    if isinstance(x, frozenset):
        return f"{{{', '.join(sorted(map(_format_constant, x)))}}}"
    return f"{type(x).__name__} {x!r}"
