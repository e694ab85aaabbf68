"""API: the public names of fzero with their signatures, and the law that CHANGELOG.md names each change of them.

    python tools/api.py            fails for a change against docs/api.txt that CHANGELOG.md does not name
    python tools/api.py --write    writes docs/api.txt anew, which is part of a release

docs/api.txt has the names of the last release. The names of today are read from the source, which is not imported: so
the check takes less than a second, needs neither torch nor transformers, and gives the same lines with every version of
Python and torch. docs/stability.md says what the names promise.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LISTING = ROOT / "docs" / "api.txt"
CHANGELOG = ROOT / "CHANGELOG.md"
FAMILIES = ("fzero.optim.deepspeed", "fzero.optim.loss_scale")
"""Modules that are public although no `__all__` names them."""
RETURNED = {
    "Step": "fzero.transform.Step",
    "Simulation": "fzero.simulation.Simulation",
    "Report": "fzero.report.Report",
}
"""Classes of the results of `shard`, `simulate` and `step.report`, which no `__all__` names -> where they are. They are
listed without their modules, which are not public."""
RESULTS = {
    *RETURNED, "fzero.Program", "fzero.Sharded", "fzero.checkpoint.Checkpoint", "fzero.checkpoint.Saving",
    "fzero.data.Loader", "fzero.deepspeed.Engine", "fzero.deepspeed.accelerator.Accelerator", "fzero.hf.Generator",
    "fzero.hf.Pretrained",
}  # fmt: skip
"""Classes that functions of fzero construct, and users do not: their constructors may change."""
GUESTS = ("fzero.hf.", "fzero.lightning.")
"""Classes here have the methods of the libraries that they extend, so only their constructors are listed."""
HIDDEN = {
    *("__init__", "__new__", "__init_subclass__", "__post_init__", "__getattr__", "__setattr__", "__dir__", "__del__"),
    *("__repr__", "__str__", "__format__", "__eq__", "__hash__"),
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__slots__", "__torch_function__", "__torch_dispatch__"),
}
"""Special names that are not listed: they construct, describe, compare and copy an object, or are a protocol of torch.
Others, such as `__call__` and `__getitem__`, are listed."""
HEADS = {"added": "Added", "changed": "Changed", "removed": "Removed"}


def parse_path(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {parse_path(path): path for path in sorted((ROOT / "fzero").rglob("*.py"))}


class Import(NamedTuple):
    """A name that a module imports: `from origin import name`, or a whole module where `name` is empty."""

    origin: str
    name: str


class Found(NamedTuple):
    """Where a name is defined, what it is called there, and by which statement: None for a module, or outside fzero."""

    module: str
    name: str
    node: ast.stmt | None


@functools.cache
def definitions(module: str) -> dict[str, ast.stmt | Import]:
    """The names of a module at its top level, also those under `if` and `try`. The last definition counts."""
    if module not in MODULES:
        places = "FAMILIES or RETURNED of tools/api.py, or _ROOMS of fzero/__init__.py"
        sys.exit(f"{module} is no module of fzero, and {places} names it: write its new name there")
    found: dict[str, ast.stmt | Import] = {}
    waiting: list[ast.stmt] = list(ast.parse(MODULES[module].read_text()).body)
    for node in waiting:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case ast.Assign(targets=[ast.Tuple(elts=elements)]):
                found |= {each.id: node for each in elements if isinstance(each, ast.Name)}
            case ast.ImportFrom(module=str(origin), names=names):
                found |= {alias.asname or alias.name: Import(origin, alias.name) for alias in names}
            case ast.Import(names=names):
                found |= {alias.asname or alias.name: Import(alias.name, "") for alias in names}
            case ast.If(body=body, orelse=orelse) | ast.Try(body=body, orelse=orelse):
                waiting += [*body, *orelse]
    return found


def find(module: str, name: str) -> Found:
    """The definition of a module's name, through all imports."""
    known = definitions(module).get(name) if module in MODULES else None
    if known is None and f"{module}.{name}" in MODULES:  # imported where it is first used
        return Found(f"{module}.{name}", "", None)
    if not isinstance(known, Import):
        return Found(module, name, known)
    inner = f"{known.origin}.{known.name}".rstrip(".")
    return Found(inner, "", None) if inner in MODULES else find(known.origin, known.name)


def list_names(module: str) -> list[str]:
    """A module's public names: its `__all__`, or else what it defines itself."""
    match definitions(module).get("__all__"):
        case ast.Assign(value=value):
            return list(ast.literal_eval(value))
    own = {name: node for name, node in definitions(module).items() if not isinstance(node, Import)}
    return sorted(name for name in own if not name.startswith("_"))


def list_modules() -> Iterator[tuple[str, str]]:
    """`(public name, module)` of every public module. The modules in an `__all__` are public."""
    rooms = definitions("fzero")["_ROOMS"]
    assert isinstance(rooms, ast.Assign)
    waiting = [("fzero", "fzero")]
    waiting += [(f"fzero.{name}", module) for name, module in ast.literal_eval(rooms.value).items()]
    waiting += [(name, name) for name in FAMILIES]
    for public, module in waiting:
        yield public, module
        inner = [(f"{public}.{name}", find(module, name)) for name in list_names(module)]
        waiting += [(name, found.module) for name, found in inner if not found.name and found.module in MODULES]


def list_variants() -> list[str]:
    """The functions that have their file's names; helpers of variants have others."""
    parts = [(module, module.rpartition(".")) for module in MODULES]
    return [
        f"{module}.{name}"
        for module, (room, _, name) in parts
        if room == "fzero.variants" and name in definitions(module)
    ]


def list_surface() -> dict[str, str]:
    """Public name -> the rest of its line: a signature, a value, or nothing."""
    surface: dict[str, str] = {}
    for public, module in list_modules():
        for name in list_names(module):
            surface |= describe(f"{public}.{name}", find(module, name))
    for public, place in ({each: each for each in list_variants()} | RETURNED).items():
        surface |= describe(public, find_place(place))
    return dict(sorted(surface.items()))


def find_place(place: str) -> Found:
    """The definition at a place such as "fzero.transform.Step". There has to be one."""
    module, _, name = place.rpartition(".")
    if name not in definitions(module):
        sys.exit(f"{module} has no {name}: write the new name of {place} in RETURNED of tools/api.py")
    return find(module, name)


def describe(public: str, found: Found) -> dict[str, str]:
    """The lines of one name: a class has one for each member."""
    match found.node:
        case ast.FunctionDef() as function:
            return {public: render_signature(found.module, function)}
        case ast.ClassDef() as cls:
            constructor = "" if public in RESULTS else render_constructor(found.module, cls)
            members = {} if public.startswith(GUESTS) else describe_members(public, found.module, cls)
            return {public: f"class{constructor}"} | members
        case ast.Assign(value=ast.Call() as call) | ast.AnnAssign(value=ast.Call() as call):
            return {public: read_schema(found.module, call)}
        case ast.Assign(targets=[ast.Name()], value=value):
            return {public: f" = {ast.unparse(value)}"}
        case ast.AnnAssign(annotation=annotation):
            return {public: f": {ast.unparse(annotation)}"}
    return {public: ""}


def read_schema(module: str, call: ast.Call) -> str:
    """`(Tensor x, str axis) -> Tensor` of a call that defines an operation by its schema, else nothing."""
    text = read_text(module, call.args[0]) if call.args else ""
    return text[text.index("(") :] if re.fullmatch(r"\w+\(.*\) -> .*", text) else ""


def read_text(module: str, node: ast.expr) -> str:
    """A string, with the strings of fzero that it names in braces. Anything else is empty."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(read_text(module, each) for each in values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            origin, _, defined = find(module, name)
            return read_text(origin, defined.value) if isinstance(defined, ast.Assign) else ""
    return ""


def list_bases(module: str, cls: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and those of fzero that it extends, the nearest first, each with its module."""
    yield module, cls
    for base in cls.bases:
        if isinstance(base, ast.Name):
            origin, _, node = find(module, base.id)
            if isinstance(node, ast.ClassDef):
                yield from list_bases(origin, node)


def describe_members(public: str, module: str, cls: ast.ClassDef) -> dict[str, str]:
    """The lines of methods, properties and attributes, but for the fields that a constructor's line has."""
    members: dict[str, str] = {}
    for origin, base in list_bases(module, cls):
        methods = {node.name: node for node in reversed(base.body) if isinstance(node, ast.FunctionDef)}
        has_fields = public not in RESULTS and is_record(base)
        for node in base.body:
            match node:
                case ast.FunctionDef(name="__init__"):
                    found = list_attributes(node)
                case ast.FunctionDef(name=name):
                    found = [(name, render_signature(origin, node, method=True))]
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)) if other in methods:
                    found = [(name, render_signature(origin, methods[other], method=True))]
                case ast.Assign(targets=[ast.Name(id=name)]):
                    found = [(name, "")]
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if not has_fields:
                    found = [(name, f": {ast.unparse(annotation)}")]
                case _:
                    continue
            for name, rest in found:
                if is_public(name):
                    members[f"{public}.{name}"] = members.get(f"{public}.{name}") or rest
    return members


def list_attributes(init: ast.FunctionDef) -> list[tuple[str, str]]:
    """The attributes that `__init__` sets, each with its annotation, or with that of the argument that it is set to."""
    found: list[tuple[str, str]] = []
    given = (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)
    new = {node.id for node in ast.walk(init) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    annotations = {each.arg: each.annotation for each in given if each.arg not in new}
    for node in ast.walk(init):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = [(target, annotations.get(ast.unparse(value))) for target, value in zip(targets, values)]
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, annotations.get(ast.unparse(value))) for target in targets]
            case ast.AnnAssign(target=target, annotation=annotation):
                pairs = [(target, annotation)]
            case _:
                continue
        found += [
            (target.attr, f": {ast.unparse(annotation)}" if annotation else "")
            for target, annotation in pairs
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        ]
    return found


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.endswith("__") and name not in HIDDEN)


def render_constructor(module: str, cls: ast.ClassDef) -> str:
    """The arguments of `__init__`, or the fields of a NamedTuple or dataclass."""
    for origin, base in list_bases(module, cls):
        for node in base.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return render_signature(origin, node, method=True).removesuffix(" -> None")
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    return f"({', '.join(map(ast.unparse, fields))})" if fields and is_record(cls) else ""


def is_record(cls: ast.ClassDef) -> bool:
    """Whether a class is a NamedTuple or a dataclass."""
    decorators = [ast.unparse(each).partition("(")[0] for each in cls.decorator_list]
    is_dataclass = any(each.endswith("dataclass") for each in decorators)
    return is_dataclass or any(ast.unparse(base) == "NamedTuple" for base in cls.bases)


def render_signature(module: str, function: ast.FunctionDef, *, method: bool = False) -> str:
    """`(x: int, *, y: str = "a") -> bool`. A constant of fzero that is a default stands with its value."""
    decorators = [ast.unparse(each).rpartition(".")[2] for each in function.decorator_list]
    if "property" in decorators or "cached_property" in decorators:
        return f": {ast.unparse(function.returns) if function.returns else 'Any'}"
    arguments = copy.deepcopy(function.args)
    if method and "staticmethod" not in decorators:
        del (arguments.posonlyargs or arguments.args)[:1]
    arguments.defaults = [resolve_default(module, each) for each in arguments.defaults]
    arguments.kw_defaults = [each and resolve_default(module, each) for each in arguments.kw_defaults]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def resolve_default(module: str, default: ast.expr) -> ast.expr:
    if isinstance(default, ast.Name):
        match find(module, default.id).node:
            case ast.Assign(value=value) if not any(isinstance(each, ast.Name | ast.Call) for each in ast.walk(value)):
                return value
    return default


def render(surface: dict[str, str]) -> str:
    return "".join(f"{name}{rest if rest[:5] != 'class' else f' {rest}'}\n" for name, rest in surface.items())


def compare(old: list[str], new: list[str]) -> dict[str, list[str]]:
    """The names that were added, changed and removed between two listings. Members of a class that comes or goes as a
    whole are not named."""
    before, after = ({re.split(r"[ (:]", line)[0]: line for line in lines} for lines in (old, new))
    added = [name for name in after if name not in before]
    removed = [name for name in before if name not in after]
    changed = [name for name in after if name in before and after[name] != before[name]]
    alone = {"added": added, "removed": removed}
    return {kind: [name for name in names if name.rpartition(".")[0] not in names] for kind, names in alone.items()} | {
        "changed": changed
    }


def read_section(changelog: str) -> tuple[str, str, str]:
    """The version, the date and the text of the topmost section. `## 0.2.0 (unreleased)` has no date."""
    _, *sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    heading, _, text = sections[0].partition("\n") if sections else ("", "", "")
    found = re.fullmatch(r"## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)", heading)
    if found is None:
        way_out = 'write it as "## 0.2.0 (unreleased)" or "## 0.2.0 (2026-12-31)"'
        sys.exit(f"CHANGELOG.md: the topmost section has the heading {heading!r}: {way_out}")
    version, date = found.groups()
    return version, "" if date == "unreleased" else date, text


def find_unnamed(changes: dict[str, list[str]], changelog: str) -> list[str]:
    """What a changelog does not name and should: "`fzero.a` was added: name it under `### Added`"."""
    _, date, text = read_section(changelog)
    parts = re.split(r"^### (.*)\n", "" if date else text, flags=re.MULTILINE)
    told = {head: set(re.findall(r"`([\w.]+)", body)) for head, body in zip(parts[1::2], parts[2::2], strict=True)}
    return [
        f"`{name}` was {kind}: name it in CHANGELOG.md, in an unreleased section, under `### {HEADS[kind]}`"
        for kind, names in changes.items()
        for name in names
        if name not in told.get(HEADS[kind], ())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write docs/api.txt: part of a release")
    live = render(list_surface())
    if parser.parse_args().write:
        LISTING.write_text(live)
        return
    changes = compare(LISTING.read_text().splitlines(), live.splitlines())
    if missing := find_unnamed(changes, CHANGELOG.read_text()):
        sys.exit("\n".join(missing))
    print(f"{len(live.splitlines())} public lines; since the last release " + ", ".join(
        f"{len(names)} {kind}" for kind, names in changes.items()
    ))  # fmt: skip


if __name__ == "__main__":
    main()
