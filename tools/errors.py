"""Errors: what each `FzeroError` of the source says, by code, for docs/errors.md on the site.

    python tools/errors.py                 all codes, with the number of their errors
    python tools/errors.py values.loops    the errors of one code, or of a room such as `values`

A code is the module that raises. The texts are read from the source, so that there is no list to keep: an f-string
shows as it stands there, and a name is followed to the strings that it may have, in the function and in its callers.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import api

BASE = "FzeroError"
PAGE = "docs/errors.md"
"""The page that the list is added to when the site is built."""
MOST = 24
"""The texts of one error that are followed. Where there are more, the expression stands in their place."""
DEEPEST = 4
"""How many callers, and names of names, are followed."""
WIDEST = 60
"""The characters of an expression that is shown."""


class Said(NamedTuple):
    """An error: what it is about and what is wrong, and the ways out."""

    problem: str
    ways: tuple[str, ...]


class Scope(NamedTuple):
    """A place in the source: its module, the functions around it, the innermost first, the statements around it, the
    outermost first, and what a caller gives for parameters."""

    module: str
    functions: tuple[ast.FunctionDef, ...] = ()
    statements: tuple[ast.stmt, ...] = ()
    given: tuple[tuple[str, ast.expr, Any], ...] = ()


class Call(NamedTuple):
    """A call of a function, and where it stands."""

    node: ast.Call
    scope: Scope


class Value(NamedTuple):
    """What is assigned to a name, and where."""

    node: ast.expr
    scope: Scope


def list_errors() -> dict[str, list[Said]]:
    """Code -> its errors, in the order of the source."""
    found: dict[str, list[Said]] = {}
    for kind in find_kinds():
        for call in find_calls().get(kind, ()):
            found.setdefault(call.scope.module, []).extend(read_call(call))
    return {code: list(dict.fromkeys(found[code])) for code in sorted(found)}


@functools.cache
def find_kinds() -> tuple[str, ...]:
    """`FzeroError`, and the classes that derive from it."""
    classes = [node for module in list_modules() for node in parse(module).body if isinstance(node, ast.ClassDef)]
    return BASE, *(each.name for each in classes if any(ast.unparse(base) == BASE for base in each.bases))


@functools.cache
def list_modules() -> list[str]:
    """The modules that name the error. Callers in other modules are not followed."""
    named = (name for name, path in api.MODULES.items() if BASE in path.read_text())
    return [name.removeprefix("fzero").removeprefix(".") for name in named]


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse(api.MODULES[f"fzero.{module}" if module else "fzero"].read_text())


@functools.cache
def find_calls() -> dict[str, list[Call]]:
    """Name -> the calls of functions of this name."""
    found: dict[str, list[Call]] = {}
    for module in list_modules():
        for call in walk_calls(parse(module), Scope(module)):
            found.setdefault(name_of(call.node), []).append(call)
    return found


def walk_calls(node: ast.AST, scope: Scope) -> Iterator[Call]:
    for child in ast.iter_child_nodes(node):
        inside = scope
        if isinstance(child, ast.FunctionDef):
            inside = scope._replace(functions=(child, *scope.functions), statements=())
        elif isinstance(child, ast.stmt):
            inside = scope._replace(statements=(*scope.statements, child))
        if isinstance(child, ast.Call):
            yield Call(child, scope)
        yield from walk_calls(child, inside)


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def read_call(call: Call, depth: int = 0) -> Iterator[Said]:
    """What a call that makes an error says. Where its words are a parameter, what each caller gives; where they are a
    variable, what was assigned in front of the call, with the way out that was assigned beside it."""
    where, problem, way_out = take_arguments(call.node, ("where", "problem", "way_out"))
    scope, words = call.scope, [each.id for each in (problem, way_out) if isinstance(each, ast.Name)]
    if depth < DEEPEST and (callers := find_callers(scope, words)):
        for given in callers:
            yield from read_call(Call(call.node, scope._replace(given=given)), depth + 1)
        return
    assert problem is not None, f"{scope.module} line {call.node.lineno} says no problem"
    values = find_values(scope, problem.id) if isinstance(problem, ast.Name) else []
    start = show(where, scope)
    for value in values or [Value(problem, scope)]:
        ways = read_texts(way_out, scope)
        if values and isinstance(way_out, ast.Name):
            beside = [each for each in find_values(scope, way_out.id) if same_block(each.scope, value.scope)]
            ways = [text for each in beside for text in read_texts(each.node, each.scope)] or ways
        for text in read_texts(value.node, value.scope):
            yield Said(f"{start}: {text}" if start else text, tuple(ways))


def find_callers(scope: Scope, words: Sequence[str]) -> list[tuple[tuple[str, ast.expr, Scope], ...]]:
    """What each caller of a function gives, where some of these words are parameters that are not bound yet."""
    function = scope.functions[0] if scope.functions else None
    names = [] if function is None else list_parameters(function)
    if function is None or scope.given or not any(word in names and not find_values(scope, word) for word in words):
        return []
    found = []
    for call in find_calls().get(function.name, ()):
        if call.scope.module == scope.module or find_import(call.scope.module, function.name) == scope.module:
            pairs = zip(names, take_arguments(call.node, names), strict=True)
            found.append(tuple((name, value, call.scope) for name, value in pairs if value is not None))
    return found if len(found) <= MOST else []


def list_parameters(function: ast.FunctionDef) -> list[str]:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return names[names[:1] in (["self"], ["cls"]) :]


def take_arguments(call: ast.Call, names: Sequence[str]) -> list[ast.expr | None]:
    given = dict(zip(names, call.args)) | {each.arg: each.value for each in call.keywords if each.arg}
    return [given.get(name) for name in names]


def show(node: ast.expr | None, scope: Scope) -> str:
    """What an error is about, as one text."""
    texts = read_texts(node, scope)
    return texts[0] if len(texts) == 1 else "" if node is None else brace(node)


def brace(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"{{{text}}}" if len(text) <= WIDEST else "{...}"


def read_texts(node: ast.expr | None, scope: Scope, depth: int = 0) -> list[str]:
    """The texts that an expression may have. What is no text in the source stands in braces."""
    if node is None:
        return []
    texts = list(dict.fromkeys(itertools.islice(follow(node, scope, depth), MOST + 1)))
    return texts if len(texts) <= MOST else [brace(node)]


def follow(node: ast.expr, scope: Scope, depth: int) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield from map("".join, itertools.product(*(read_part(part, scope, depth) for part in node.values)))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = (read_texts(side, scope, depth) for side in (node.left, node.right))
        yield from map("".join, itertools.product(*both))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and is_text(node.left):
        yield from ("", *follow(node.left, scope, depth))
    elif isinstance(node, ast.IfExp):
        yield from follow(node.body, scope, depth)
        yield from follow(node.orelse, scope, depth)
    elif isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from follow(each, scope, depth)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("rstrip", "strip"):
        yield from follow(node.func.value, scope, depth)
    elif isinstance(node, ast.Name) and depth < DEEPEST:
        values = find_values(scope, node.id)
        for value in values:
            yield from read_texts(value.node, value.scope, depth + 1)
        if not values:
            yield brace(node)
    else:
        yield brace(node)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def read_part(part: ast.expr, scope: Scope, depth: int) -> list[str]:
    """A part of an f-string. A name in braces is replaced by its text where it has one only."""
    if not isinstance(part, ast.FormattedValue):
        return list(follow(part, scope, depth))
    if isinstance(part.value, ast.Name) and part.conversion == -1 and part.format_spec is None:
        texts = read_texts(part.value, scope, depth)
        if len(texts) == 1:
            return texts
    return [brace(part.value)]


def find_values(scope: Scope, name: str) -> list[Value]:
    """What a name may stand for at a place: what was assigned to it in front, what a caller gives, or a constant."""
    if scope.functions:
        function = scope.functions[0]
        if found := find_assigned(scope, name):
            return found
        for parameter, node, origin in scope.given:
            if parameter == name:
                return [Value(node, origin)]
        if name in list_parameters(function):
            return []
        around = scope._replace(functions=scope.functions[1:], statements=(), given=())
        return find_values(around, name)
    for module in (scope.module, find_import(scope.module, name)):
        if module is not None and name in (constants := list_constants(module)):
            return [Value(constants[name], Scope(module))]
    return []


def find_assigned(scope: Scope, name: str) -> list[Value]:
    """The assignments to a name in the statements in front of a place: back to one that surely runs."""
    found: list[Value] = []
    for depth in reversed(range(len(scope.statements))):
        here, outer = scope.statements[depth], scope.statements[:depth]
        parent: ast.stmt = outer[-1] if outer else scope.functions[0]
        block = next(block for block in list_blocks(parent) if here in block)
        for statement in reversed(block[: block.index(here)]):
            inside = list(walk_assignments(statement, name, (*outer, statement)))
            found += [Value(node, scope._replace(statements=path)) for node, path in inside]
            if is_assigned(statement, name):
                return found
    return found


def is_assigned(statement: ast.stmt, name: str) -> bool:
    """Whether a statement surely assigns to a name: itself, or in both blocks of an `if`."""
    if isinstance(statement, ast.If):
        return all(any(is_assigned(each, name) for each in block) for block in (statement.body, statement.orelse))
    return any(path == (statement,) for _, path in walk_assignments(statement, name, (statement,)))


def walk_assignments(
    statement: ast.stmt, name: str, path: tuple[ast.stmt, ...]
) -> Iterator[tuple[ast.expr, tuple[ast.stmt, ...]]]:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name and statement.value is not None:
                yield statement.value, path
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = zip(target.elts, statement.value.elts)
                yield from ((node, path) for each, node in pairs if isinstance(each, ast.Name) and each.id == name)
    elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        for block in list_blocks(statement):
            for inner in block:
                yield from walk_assignments(inner, name, (*path, inner))


def list_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements of a statement, those of an `except` and of a `case` too."""
    holders = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [block for each in holders for key in ("body", "orelse", "finalbody") if (block := getattr(each, key, None))]


def same_block(one: Scope, other: Scope) -> bool:
    """Whether two statements of a function stand in one block: those of an `if` and its `else` do not."""
    if not one.statements or one.statements[:-1] != other.statements[:-1]:
        return one.statements == other.statements
    parent = one.statements[-2] if len(one.statements) > 1 else one.functions[0]
    return any(one.statements[-1] in block and other.statements[-1] in block for block in list_blocks(parent))


@functools.cache
def list_constants(module: str) -> dict[str, ast.expr]:
    """The names that a module assigns texts to."""
    assigned = [node for node in parse(module).body if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value]
    return {
        target.id: node.value
        for node in assigned
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and node.value is not None
    }


def find_import(module: str, name: str) -> str | None:
    """The module of fzero that a module imports a name from."""
    return list_imports(module).get(name)


@functools.cache
def list_imports(module: str) -> dict[str, str]:
    origins = {
        alias.name: (node.module or "").removeprefix("fzero").removeprefix(".")
        for node in parse(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: origin for name, origin in origins.items() if f"fzero.{origin}".rstrip(".") in api.MODULES}


def render() -> str:
    """The list for the site, from the second level on: a section for each code."""
    return "\n".join(line for code, errors in list_errors().items() for line in render_code(code, errors))


def render_code(code: str, errors: Sequence[Said]) -> Iterator[str]:
    about = (ast.get_docstring(parse(code)) or "").partition("\n\n")[0].replace("\n", " ")
    yield from (f'<a id="{anchor(code)}"></a>', "", f"### {code}", "", about, "")
    for said in errors:
        ways = "; or: ".join(filter(None, said.ways))
        yield f"* {quote(said.problem)}" + (f"<br>Way out: {quote(ways)}" if ways else "")
    yield ""


def anchor(code: str) -> str:
    return re.sub(r"[._]", "-", code)


def quote(text: str) -> str:
    """A text as code, on one line."""
    line = " ".join(text.split())
    mark = "``" if "`" in line else "`"
    return f"{mark} {line} {mark}" if mark in ("``",) else f"{mark}{line}{mark}"


def main(wanted: Sequence[str]) -> None:
    errors = list_errors()
    if not wanted:
        print("\n".join(f"{code:<40}{len(said):>4}" for code, said in errors.items()))
        print(f"{len(errors)} codes, {sum(map(len, errors.values()))} errors")
    for each in wanted:
        codes = [code for code in errors if code == each or code.startswith(f"{each}.")]
        if not codes:
            sys.exit(f"{each!r} is no code: python tools/errors.py lists them")
        for code in codes:
            print(f"{code}\n")
            for said in errors[code]:
                print(f"  {said.problem}\n      way out: {'; or: '.join(filter(None, said.ways)) or 'none is given'}")


if __name__ == "__main__":
    main(sys.argv[1:])
