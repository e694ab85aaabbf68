"""Paths in code: what a function spells as a path from a variable, and the names by which it reads, writes and fills.

    config.rate, table["rate"], getattr(config, "rate"), `c = config` and then `c.rate`, `from settings import rate`

Bytecode is read, and nothing is run. A path begins at a variable, whose value is looked up elsewhere (`followed`).
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple


class Path(NamedTuple):
    """`root.a["b"]` in the code of a function: the root is a "LOCAL", "CELL" or "GLOBAL" variable, or a "MODULE" that
    the code imports."""

    kind: str
    root: str
    steps: tuple[tuple[bool, Any], ...] = ()  # (whether it is an item, its name)

    @property
    def names(self) -> tuple[str, ...]:
        """The variable, and the attributes and entries from there, as strings."""
        return (self.root, *(str(name) for _, name in self.steps))

    def __str__(self) -> str:
        return self.root + "".join(f"[{name!r}]" if is_item else f".{name}" for is_item, name in self.steps)


class Paths(NamedTuple):
    """Paths that code reads, and those of them that it also writes, such as a count of its calls."""

    read: frozenset[Path]
    written: frozenset[Path]


class Names(NamedTuple):
    """Names in code: of attributes and globals, with strings, that it may read by; of attributes that it writes; and of
    containers that it fills."""

    read: frozenset[str]
    written: frozenset[str]
    filled: frozenset[str]


_ROOTS = {"LOAD_FAST": "LOCAL", "LOAD_DEREF": "CELL", "LOAD_CLASSDEREF": "CELL", "LOAD_GLOBAL": "GLOBAL",
          "IMPORT_NAME": "MODULE"}  # fmt: skip
_STEPS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR")
_STORES = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_WRITES = ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR")
_FILLS = frozenset(
    """
    add append appendleft clear discard extend insert pop popitem popleft remove reverse setdefault sort update
    """.split()
)
"""Methods by which code changes a container."""
_MOST_ALIASES = 3  # of `a = config.a; b = a.b; c = b.c`


@functools.lru_cache(maxsize=4096)
def find_paths(code: CodeType) -> Paths:
    """The paths in the code of a function, and in that of the functions inside it."""
    found, written, aliases = _read_code(code)
    for _ in range(_MOST_ALIASES):
        found |= {
            path._replace(kind=other.kind, root=other.root, steps=other.steps + path.steps)
            for path in found
            for other in aliases.get(path.root, ())
            if path.kind in ("LOCAL", "CELL") and path.steps
        }
    return Paths(frozenset(found), frozenset(written))


@functools.lru_cache(maxsize=4096)
def find_names(code: CodeType) -> Names:
    """The names in the code of a function, and in that of the functions inside it."""
    codes = list(_list_codes(code))
    strings = {x for each in codes for x in _list_strings(each.co_consts)}
    named = [x for each in codes for x in dis.get_instructions(each) if x.argval in each.co_names]
    read = {x.argval for x in named if not x.opname.startswith(("STORE_", "DELETE_"))}
    filled = {name for each in codes for name in _find_fills(each)}
    aliases = _read_code(code)[2]
    filled |= {path.names[-1] for name in filled for path in aliases.get(name, ())}
    for path in find_paths(code).read:
        filled |= {path.names[i] for i, name in enumerate(path.names[1:]) if name in _FILLS}
    written = {x.argval for x in named if x.opname == "STORE_ATTR"}
    return Names(frozenset(strings | read), frozenset(written), frozenset(filled))


def _find_fills(code: CodeType) -> Iterator[str]:
    """The names of containers of which code writes an entry: `table` of `table[key] = x`, and of `self.table[key] = x`.
    Where the place in the source does not tell, all names of its lines, and without places all of the code."""
    instructions = list(dis.get_instructions(code))
    for store in instructions:
        if store.opname not in _STORES:
            continue
        at = store.positions
        if at is None or at.lineno is None or at.end_lineno is None:
            yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
            return
        near = [x for x in instructions if x.positions and x.positions.lineno in range(at.lineno, at.end_lineno + 1)]
        named = [x for x in near if x.opname.startswith(_LOADS)]
        start = [x for x in named if _begin(x) == _begin(store)]
        for each in start[-1:] or named:
            yield from each.argval if isinstance(each.argval, tuple) else [each.argval]


def _begin(instruction: dis.Instruction) -> tuple[Any, ...]:
    at = instruction.positions
    return () if at is None else (at.lineno, at.col_offset)


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_codes(inner)


def _list_strings(values: tuple[Any, ...]) -> Iterator[str]:
    for x in values:
        if isinstance(x, str):
            yield x
        elif isinstance(x, tuple):
            yield from _list_strings(x)


def _read_code(code: CodeType, is_inner: bool = False) -> tuple[set[Path], set[Path], dict[str, set[Path]]]:
    """The paths in a code and in the functions inside it, whose parameters are their own; those of variables and
    attributes that it writes; and local variables, each with the paths that are stored in it."""
    found: set[Path] = set()
    aliases: dict[str, set[Path]] = {}
    instructions = list(dis.get_instructions(code))
    written = {(each.opname == "STORE_ATTR", each.argval) for each in instructions if each.opname in _WRITES}
    path: Path | None = None
    module: Path | None = None  # the one that names are imported from
    item: Any = None
    for i, each in enumerate(instructions):
        is_pair = isinstance(each.argval, tuple) and "FAST" in each.opname  # two variables in one instruction
        name = each.argval[-1] if is_pair else each.argval
        kind = next((_ROOTS[root] for root in _ROOTS if each.opname.startswith(root)), None)
        if each.opname == "IMPORT_FROM" and path is None:  # the second name of one import
            path = module
        if path is not None and each.opname in _STEPS:
            path = path._replace(steps=(*path.steps, (False, name)))
        elif path is not None and each.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            item = name if item is None else item
        elif path is not None and (each.opname == "BINARY_SUBSCR" or each.argrepr == "[]") and item is not None:
            path, item = path._replace(steps=(*path.steps, (True, item))), None
        else:
            if path is not None:
                is_stored = each.opname.startswith(("STORE_FAST", "STORE_DEREF")) and item is None
                is_asked = each.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and isinstance(item, str)  # getattr
                if is_stored:
                    aliases.setdefault(each.argval[0] if is_pair else name, set()).add(path)
                found |= {path, *([path._replace(steps=(*path.steps, (False, item)))] if is_asked else [])}
            if kind == "MODULE":
                level, names = (x.argval for x in instructions[i - 2 : i])
                name = "." * level + (name if names else name.partition(".")[0])
            path, item = Path(kind, name) if kind else None, None
            module = path if kind == "MODULE" else module
    if is_inner:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = {path for path in found if path.kind != "LOCAL" or path.root not in parameters}
    own = {path for path in found if (bool(path.steps), path.steps[-1][1] if path.steps else path.root) in written}
    found -= own
    for inner, theirs, stored in (_read_code(x, True) for x in code.co_consts if isinstance(x, CodeType)):
        found |= inner
        own |= theirs
        for name, paths in stored.items():
            aliases.setdefault(name, set()).update(paths)
    return found, own, aliases
