"""Scripts: a failing call as source text that runs by itself."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from fzero.base.torch_private import OpOverload


def write_script(call: str, given: Any, options: Mapping[str, Any]) -> str:
    """The source text of `call(given, **options)`, with what it needs: imports, and the source of each function that no
    import finds, with its globals and the variables of functions around it.

    Values are numbers, texts, dtypes, operators of torch, containers, dataclasses, named tuples, functions and classes.
    For any other value, such as a tensor, a lambda or an object that is called, stands a line that says what to put
    there.
    """
    script = _Script()
    script.imports.add(("fzero.testing", call))
    inside = [script.write(given), *(f"{name}={script.write(value)}" for name, value in options.items())]
    line = f"{call}({', '.join(inside)})"
    if len(line) > 110:
        line = f"{call}(\n" + "".join(f"    {each},\n" for each in inside) + ")"
    return script.join(line)


class _Script:
    """Lines of a script, which grow as values are written."""

    def __init__(self) -> None:
        self.imports = set[tuple[str, str]]()
        self._modules: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        self._names: dict[int, str] = {}

    def join(self, last: str) -> str:
        """The text, with a last line."""
        names = dict[str, list[str]]()
        for module, name in sorted(self.imports):
            names.setdefault(module, []).append(name)
        first = ["from __future__ import annotations"] if self._lines else []
        froms = (f"from {module} import {', '.join(each)}" for module, each in names.items())
        return "\n".join([*first, *sorted(self._modules.values()), *froms, "", *self._lines.values(), last])

    def write(self, value: Any) -> str:
        """A value as source text, without the fields that have their default."""
        kind: Any = type(value)
        if kind is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        if kind in (type(None), bool, int, float, complex, str, bytes, type(...)):
            return repr(value)
        if kind.__module__ == "fzero.base.mesh":
            self.imports.add(("fzero", kind.__name__))
            return repr(value)
        if isinstance(value, (torch.dtype, OpOverload)):
            self._modules["torch"] = "import torch"
            return str(value) if isinstance(value, torch.dtype) else f"torch.ops.{value}"
        if kind in (list, tuple):
            inside = ", ".join(map(self.write, value))
            return f"[{inside}]" if kind is list else f"({inside}{',' if len(value) == 1 else ''})"
        if kind is dict:
            return "{" + ", ".join(f"{self.write(key)}: {self.write(each)}" for key, each in value.items()) + "}"
        if kind is functools.partial:
            self.imports.add(("functools", "partial"))
            more = [*map(self.write, value.args), *(f"{name}={self.write(x)}" for name, x in value.keywords.items())]
            return f"partial({', '.join([self.write(value.func), *more])})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            known = {x.name: x.default for x in dataclasses.fields(value) if x.init}
            return self._write_fields(kind, {name: getattr(value, name) for name in known}, known)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._write_fields(kind, dict(zip(kind._fields, value)), kind._field_defaults)
        if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            return self._name(value)
        return self._leave_open(value)

    def _write_fields(self, kind: type, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        given = (
            f"{key}={self.write(value)}" for key, value in values.items() if _differs(value, defaults.get(key, _NONE))
        )
        return f"{self._name(kind)}({', '.join(given)})"

    def _name(self, value: Any) -> str:
        """The name of a function or a class, which is imported, or whose source text stands in the script."""
        home, name = str(value.__module__), value.__qualname__
        if home != "__main__" and _find(home, name) is value:
            self.imports.add(("fzero.testing" if home.startswith("fzero.testing.") else home, name))
            return name
        return self._names.get(id(value)) or self._write_source(value)

    def _write_source(self, value: Any) -> str:
        try:
            text = textwrap.dedent(inspect.getsource(value)).rstrip()
            (node,) = ast.parse(text).body
        except (OSError, TypeError, ValueError, SyntaxError):
            return self._leave_open(value)
        if getattr(node, "name", None) != value.__name__:
            return self._leave_open(value)
        name = self._names[id(value)] = str(value.__name__)
        home = str(value.__module__)
        known = {**vars(sys.modules.get(home, object)), **getattr(value, "__globals__", {}), **_list_closure(value)}
        for used in _list_outer_names(node, value):
            if used in known and known[used] is not value:
                self._define(used, known[used], home)
        self._add(name, f"{text}\n\n")
        return name

    def _define(self, name: str, value: Any, home: str) -> None:
        """Let a name have the value that it has in a module `home`, or in a function of it."""
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            module = value.__name__
            self._modules[name] = f"import {module}" if module == name else f"import {module} as {name}"
        elif isinstance(value, ModuleType) and value.__name__.startswith("torch.ops."):
            self._modules["torch"] = "import torch"
            self._add(name, f"{name} = {value.__name__}\n")
        elif home != "__main__" and _find(home, name) is value:
            self.imports.add((home, name))
        else:
            text = self.write(value)
            if text != name:
                self._add(name, f"{name} = {text}\n")

    def _leave_open(self, value: Any) -> str:
        """The name of a value that is no text, and the line that says so."""
        if id(value) not in self._names:
            kind = getattr(value, "__qualname__", None) or f"object of {type(value).__module__}.{type(value).__name__}"
            base = name = f"given_{'function' if isinstance(value, FunctionType) else type(value).__name__.lower()}"
            while name in self._lines:
                name = f"{base}_{len(self._lines)}"
            self._names[id(value)] = name
            what = f"put here what was given, {kind}: it has no text of its own, and the script needs it"
            self._add(name, f"{name} = ...  # {what}\n")
        return self._names[id(value)]

    def _add(self, name: str, line: str) -> None:
        before = self._lines.get(name, line)
        twice = f"# {name} is the name of two values: give one of them another\n"
        self._lines[name] = line if before == line else f"{before}{twice}{line}"


_NONE = object()


def _differs(value: Any, default: Any) -> bool:
    return default is _NONE or default is dataclasses.MISSING or value != default


def _find(module: str, name: str) -> Any:
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _list_closure(value: Any) -> dict[str, Any]:
    """The variables of functions around a function that it names, those that have a value."""
    cells = zip(value.__code__.co_freevars, value.__closure__ or ()) if isinstance(value, FunctionType) else ()
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _list_outer_names(node: ast.AST, value: Any) -> list[str]:
    """The names that a definition takes from around it, in order; those of the body's own variables are left out."""
    found = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]
    if not isinstance(node, ast.FunctionDef) or not isinstance(value, FunctionType):
        return list(dict.fromkeys(found))
    around = {x.id for part in (node.args, *node.decorator_list) for x in ast.walk(part) if isinstance(x, ast.Name)}
    own = {*value.__code__.co_varnames, *value.__code__.co_cellvars} - around
    return [name for name in dict.fromkeys(found) if name not in own]
