"""Source: the Python function that a linked program runs as, written a line for each node."""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fzero.base.torch_private_functions import inputs_of
from fzero.program.operation import Node

_PLAIN = (bool, int, str, type(None))
_numbers = itertools.count()


class Expression(str):
    """Python code, which stands in arguments beside nodes and values."""


class FunctionSource:
    """The lines of a function, and the objects that they name. Its first parameters are `calls`, `seed` and `numbers`.

    A node's variable has the node's name, and is dropped on the line of its last use. Numbers, texts, lists and slices
    are written as they are; every other object is a global of the function, under a name that no node has.
    """

    def __init__(self, name: str, graph: fx.Graph) -> None:
        self._name, self._lines = name, list[str]()
        self._taken = {node.name for node in graph.nodes}  # also names of state that a pass added, such as "seed"
        self.calls, self.seed, self.numbers = (Expression(self._find_free(x)) for x in ("calls", "seed", "numbers"))
        self._parameters: list[str] = [self.calls, self.seed, self.numbers]
        self._globals: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of globals, by identity
        self._dropped = _find_last_uses(graph)

    def take(self, node: Node) -> None:
        """Add a parameter: the variable of a node."""
        self._parameters.append(node.name)
        if dropped := self._drop(node):
            self._lines.append(dropped)

    def run(self, code: str) -> None:
        """Add a statement."""
        self._lines.append(code)

    def set(self, node: Node, code: str) -> None:
        """Let the variable of a node be the value of some code."""
        dropped = self._drop(node)
        self._lines.append(f"{node.name} = {code};  {dropped}" if dropped else f"{node.name} = {code}")

    def give_back(self, value: Any) -> None:
        """Add the end of the function, which returns a value."""
        self._lines.append(f"return {self.write(value)}")

    def call(self, function: str, args: Iterable[Any], kwargs: Any) -> str:
        """The code of a call of a function with arguments that hold nodes."""
        given = [*map(self.write, args), *(f"{key} = {self.write(x)}" for key, x in kwargs.items())]
        return f"{function}({', '.join(given)})"

    def call_target(self, target: Any, args: Sequence[Any], kwargs: Any) -> str:
        """The code of what a node calls."""
        if target is operator.getitem:
            return f"{self.write(args[0])}[{self.write(args[1])}]"
        return self.call(self.name(target), args, kwargs)

    def write(self, x: Any) -> str:
        """The code of an argument."""
        kind = type(x)
        if kind is fx.Node:
            return str(x.name)
        if kind is Expression:
            return str(x)
        if kind in _PLAIN or (kind is float and math.isfinite(x)):
            return repr(x)
        if kind is tuple:
            return f"({', '.join(map(self.write, x))}{',' if len(x) == 1 else ''})"
        if isinstance(x, list):
            return f"[{', '.join(map(self.write, x))}]"
        if isinstance(x, tuple):
            made = self.name(kind)
            return self.call(made, x, {}) if hasattr(x, "_fields") else f"{made}([{', '.join(map(self.write, x))}])"
        if isinstance(x, dict):
            return "{" + ", ".join(f"{key!r}: {self.write(item)}" for key, item in x.items()) + "}"
        if kind is slice:
            return self.call("slice", (x.start, x.stop, x.step), {})
        return self.name(x)

    def name(self, x: Any) -> str:
        """The global name of an object."""
        key = (x.type, x.index) if isinstance(x, torch.device) else id(x)
        if key in self._names:
            return self._names[key]
        words = getattr(x, "__qualname__", None) or getattr(x, "__name__", None) or type(x).__name__
        base = "".join(c if c.isidentifier() or c.isdigit() else "_" for c in str(words)).strip("_0123456789")
        name = self._find_free(f"{base or 'value'}_0")
        self._globals[name], self._names[key] = x, name
        return name

    def make(self) -> Callable[..., Any]:
        """The function. Its lines can be read, by tracebacks among others, as long as it lives."""
        body = "\n    ".join(self._lines)
        text = f"def forward({', '.join(self._parameters)}):\n    {body}\n"
        file = f"<{self._name} {next(_numbers)}>"
        module = compile(text, file, "exec")
        code = next(x for x in module.co_consts if isinstance(x, types.CodeType))
        made = types.FunctionType(code, self._globals)
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        weakref.finalize(made, linecache.cache.pop, file, None)
        return made

    def _find_free(self, wanted: str) -> str:
        """A name that no node and no other object has."""
        names = itertools.chain([wanted], (f"{wanted}_{i}" for i in itertools.count(1)))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name

    def _drop(self, node: Node) -> str:
        dropped = self._dropped.get(node)
        return " = ".join((*dropped, "None")) if dropped else ""


def _find_last_uses(graph: fx.Graph) -> dict[Node, list[str]]:
    """Node -> the variables that nothing uses behind it. Those that the last node uses need no end."""
    nodes = list(graph.nodes)
    last = {used: node for node in nodes for used in (node, *inputs_of(node))}
    dropped: dict[Node, list[str]] = {}
    for used, node in last.items():
        if node is not nodes[-1]:
            dropped.setdefault(node, []).append(used.name)
    return dropped
