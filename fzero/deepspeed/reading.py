"""Reading: a DeepSpeed configuration becomes values by path, each key checked against the table of `keys`."""

from __future__ import annotations

import base64
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fzero.base.errors import FzeroError
from fzero.deepspeed.keys import KEYS, Key

Values = dict[str, Any]
"""Path of a key -> its value, for the keys that a configuration gives."""


def read_config(config: Any) -> Values:
    """The values of a configuration: a dict, the path of a JSON file, or base64 of JSON, as DeepSpeed takes it.

    Raises:
        FzeroError: for a key that DeepSpeed does not have, with the nearest that it has; for a value of another type;
            for a key that is refused; for a file that is no JSON, or has a key twice.
    """
    given: Values = {}
    for key, value in _walk("", _open(config)):
        if value != "auto":
            _check_type(key, value)
        path, value = _resolve_alias(key, value)
        if path in given and given[path] != value:
            problem = f"is {value!r}, and another name of the key says {given[path]!r}"
            raise FzeroError(key.path, problem, f"keep {path} alone")
        if key.meaning == "refused" and _is_used(key, value):
            raise FzeroError(key.path, f"is {value!r:.80}, which is not supported", key.note)
        given[path] = value
    return given


def look_up(given: Values, path: str) -> Any:
    """The value of a key: the one that is given, else DeepSpeed's default."""
    value = given.get(path)
    return KEYS[path].default if value is None else value


def render_table(given: Values) -> str:
    """One line for each key that is given: value, meaning and note."""
    lines = []
    for path, value in given.items():
        key = KEYS.get(path) or KEYS[_find_wildcard(path)]
        meaning = "off" if key.meaning == "refused" else f"{key.meaning}, {key.note}"
        lines.append(f"{path} = {value!r:.60}: {meaning}")
    return "\n".join(lines)


def _open(config: Any) -> Mapping[str, Any]:
    """The configuration as a dict."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise FzeroError("config", f"is a {type(config).__name__}", "give a dict, or the path of a JSON file")
    path, where = Path(config), str(config)
    try:
        is_file = path.is_file()
    except OSError:  # a text of base64 may be too long for a name of a file
        is_file = False
    if is_file:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FzeroError(f"config {where}", f"is no text: {error}", "give the path of a JSON file") from None
    else:
        try:
            text, where = base64.urlsafe_b64decode(str(config)).decode(), "config"
        except ValueError:
            problem = "is neither a file nor a configuration in base64"
            raise FzeroError(f"config {where:.80}", problem, "give a dict, or the path of a JSON file") from None
    try:
        found = json.loads(text, object_pairs_hook=_refuse_twins)
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise FzeroError(f"config {where}", problem, "write JSON, without comments and trailing commas") from None
    if not isinstance(found, dict):
        raise FzeroError(f"config {where}", f"holds a {type(found).__name__}", "write an object of keys")
    return found


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise FzeroError(f"config: {twins[0]}", "stands twice in one block", "keep one of both")
    return dict(pairs)


def _walk(prefix: str, block: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """`(key, value)` of each key in a block and below. A key of a block that is not looked into has its own path."""
    for name, value in block.items():
        path = f"{prefix}{name}"
        if path == "zero_optimization" and isinstance(value, bool):  # DeepSpeed's first form of the block
            value = {"stage": int(value)}
        if path in KEYS:
            yield KEYS[path], value
        elif any(known.startswith(f"{path}.") and known != f"{path}.*" for known in KEYS):
            _check_block(path, value)
            yield from _walk(f"{path}.", value or {})
        elif f"{path}.*" in KEYS:
            _check_block(path, value)
            yield KEYS[f"{path}.*"]._replace(path=path), value
        elif f"{prefix}*" in KEYS:
            yield KEYS[f"{prefix}*"]._replace(path=path, type="any"), value
        else:
            raise _refuse_unknown(path, prefix)


def _check_block(path: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise FzeroError(path, f"is {value!r:.80}, a {type(value).__name__}", "give a block of keys")


def _refuse_unknown(path: str, prefix: str) -> FzeroError:
    names = sorted(known.removesuffix(".*") for known in KEYS)
    blocks = {prefix + known.removeprefix(prefix).partition(".")[0] for known in names if known.startswith(prefix)}
    if block := difflib.get_close_matches(path, sorted(blocks - set(names)), 1, 0.8):
        return FzeroError(path, "is no key of DeepSpeed's configuration", f"the nearest one is the block {block[0]}")
    beside = [known for known in names if known.startswith(prefix)]
    near = difflib.get_close_matches(path, beside, 1) or difflib.get_close_matches(path, names, 1)
    way_out = f"the nearest one is {near[0]}" if near else "take it out: DeepSpeed has no key with a name like it"
    return FzeroError(path, "is no key of DeepSpeed's configuration", way_out)


def _resolve_alias(key: Key, value: Any) -> tuple[str, Any]:
    """The path and value that a key stands for, where it is another name, or a former one."""
    zero = "zero_optimization."
    if key.path in (f"{zero}cpu_offload", f"{zero}cpu_offload_param") and isinstance(value, bool):
        place = "optimizer" if key.path.endswith("cpu_offload") else "param"
        return f"{zero}offload_{place}.device", "cpu" if value else "none"
    return key.alias_of or key.path, value


_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "str": (str,), "list": (list, tuple), "dict": (dict,)}


def _check_type(key: Key, value: Any) -> None:
    """Refuse a value of another type. None stands for the default. A whole number may be written 5e8."""
    is_default = type(value) is type(key.default) and value == key.default
    if value is None or is_default or key.type == "any":
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    for kind in key.type.split("|"):
        if kind == "int" and is_number and float(value).is_integer() and (value >= 0 or "granularity" in key.path):
            return
        if kind == "float" and is_number and 0 <= value < float("inf"):
            return
        if isinstance(value, _TYPES.get(kind, ())) or value == kind:
            return
    if key.meaning == "refused" and not value:
        return
    wanted = {"int": "a whole number from 0 on", "float": "a number from 0 on", "bool": "true or false"}
    names = [wanted.get(kind, kind if kind in _TYPES else f'"{kind}"') for kind in key.type.split("|")]
    raise FzeroError(key.path, f"is {value!r:.80}, a {type(value).__name__}", f"give {' or '.join(names)}")


def _is_used(key: Key, value: Any) -> bool:
    """Whether the value of a key that is refused asks for something."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    return value is not None and value != key.default and value is not False


def _find_wildcard(path: str) -> str:
    """The path in the table of the block that a key lies in."""
    while f"{path}.*" not in KEYS:
        path = path.rpartition(".")[0]
    return f"{path}.*"
