"""Scripts: a failing call as source text that runs by itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any


def write_script(call: str, given: Any, options: Mapping[str, Any]) -> str:
    """The source text of `call(given, **options)`, with the imports that it needs.

    Values are dataclasses, named tuples, functions and what `repr` writes. A function that no import finds stands in
    the text itself.
    """
    imports, functions = _Imports({("fzero.testing", call)}), dict[str, str]()
    for value in (given, *options.values()):
        _note(value, imports, functions)
    inside = [format_value(given), *(f"{name}={format_value(value)}" for name, value in options.items())]
    line = f"{call}({', '.join(inside)})"
    if len(line) > 110:
        line = f"{call}(\n" + "".join(f"    {each},\n" for each in inside) + ")"
    body = "\n".join([*functions.values(), line])
    names = dict[str, list[str]]()
    for module, name in sorted(imports):
        if re.search(rf"\b{name}\b", body):
            names.setdefault(module, []).append(name)
    lines = (f"from {module} import {', '.join(each)}" for module, each in names.items())
    return "\n".join([*lines, "", body])


_Imports = set[tuple[str, str]]
"""Modules, and the names to import from them."""


_LAMBDA = "given_function"
"""What a lambda is called, whose own text may stand in the middle of a line."""


def format_value(value: Any) -> str:
    """A value as source text, without the fields that have their default."""
    kind: Any = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {x.name: x.default for x in dataclasses.fields(value)}
        return _format_fields(kind.__name__, {name: getattr(value, name) for name in known}, known)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _format_fields(kind.__name__, dict(zip(kind._fields, value)), kind._field_defaults)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, functools.partial):
        more = [*map(format_value, value.args), *(f"{name}={format_value(x)}" for name, x in value.keywords.items())]
        return f"partial({', '.join([format_value(value.func), *more])})"
    name = getattr(value, "__name__", None) or repr(value)
    return _LAMBDA if name == "<lambda>" else name


def _format_fields(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    given = (
        f"{key}={format_value(value)}" for key, value in values.items() if _differs(value, defaults.get(key, _NONE))
    )
    return f"{name}({', '.join(given)})"


_NONE = object()


def _differs(value: Any, default: Any) -> bool:
    return default is _NONE or default is dataclasses.MISSING or value != default


def _note(value: Any, imports: _Imports, functions: dict[str, str]) -> None:
    """Add the imports and the functions that the text of a value needs."""
    if type(value).__module__ == "fzero.base.mesh":
        imports.add(("fzero", type(value).__name__))
    elif isinstance(value, functools.partial):
        imports.add(("functools", "partial"))
        for each in (value.func, *value.args, *value.keywords.values()):
            _note(each, imports, functions)
    elif dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        imports.add((_find_home(type(value)), type(value).__name__))
        for each in _list_inside(value):
            _note(each, imports, functions)
    elif isinstance(value, (list, tuple, dict)):
        for each in _list_inside(value):
            _note(each, imports, functions)
    elif callable(value) and hasattr(value, "__qualname__"):
        name, module = value.__qualname__, getattr(value, "__module__", "__main__")
        if name.isidentifier() and module != "__main__":
            imports.add((module, name))
        else:
            functions[value.__name__] = _write_source(value)


def _list_inside(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value):
        yield from (getattr(value, x.name) for x in dataclasses.fields(value))
    else:
        yield from value.values() if isinstance(value, dict) else value


def _find_home(kind: type) -> str:
    return "fzero.testing" if kind.__module__.startswith("fzero.testing") else kind.__module__


def _write_source(function: Any) -> str:
    if function.__name__ == "<lambda>":
        return f"{_LAMBDA} = ...  # the lambda that was given, of {function.__module__}\n"
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n\n"
    except (OSError, TypeError):
        return f"# {function.__qualname__} of {function.__module__}, which has no source text\n\n"
