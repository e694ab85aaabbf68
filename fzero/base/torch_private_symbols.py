"""Private names of torch about symbolic sizes, each behind a small function, as in `torch_private`. What is imported in
functions brings sympy with it, which takes half a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_REMEMBERED = ("_add", "_sub", "_mul", "_mod", "_int_floordiv", "_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_sym_max")


@cache
def _find_environment() -> type:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, SLoc

    nowhere = SLoc(None, None)

    class Environment(ShapeEnv):
        known: dict[Any, Any]
        lines: list[str]
        find_line: Callable[[], str]

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            result = super().evaluate_expr(*args, **kwargs)
            self.lines.extend([self.find_line()] * (len(self.guards) - len(self.lines)))
            return result

        def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            version = getattr(self, "_replacements_version_counter", None)
            key = "asked", sym_node._expr, version, args, *kwargs
            if version is None or key not in self.known:
                answer = super().evaluate_sym_node(sym_node, *args, **kwargs)
                if version is None or self._suppress_guards_tls():  # no condition was noted
                    return answer
                self.known[key] = answer
            return self.known[key]

        def _get_stack_summary(self, *args: Any, **kwargs: Any) -> Any:
            return nowhere, ""  # torch's own reads the stack, and imports 370 modules to see which frames are its own

    return Environment


def make_environment(lines: list[str], find_line: Callable[[], str]) -> Any:
    """An environment of torch for symbols. It adds the user's line of each condition to `lines`. Public replacement:
    none; a public `ShapeEnv`."""
    # equal examples are equal by chance, and what depends on elements has a size that no symbol says
    made = _find_environment()(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    made.known, made.lines, made.find_line = {}, lines, find_line
    return made


def make_source(name: str) -> Any:
    """A name for a symbol of a `ShapeEnv`. Public replacement: `ShapeEnv.create_symbol` that takes a text."""
    import torch._dynamo.source  # which make_fx imports at its first trace

    return torch._dynamo.source.ConstantSource(name)


def make_number(environment: Any, kind: type, expression: Any) -> Any:
    """A number of a kind, such as `torch.SymInt`, that is computed from symbols of an environment. Public replacement:
    none; a public constructor."""
    from torch.fx.experimental.sym_node import SymNode

    kinds: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kind(SymNode(expression, environment, kinds[kind], None))


def write_expressions(expressions: Sequence[Any]) -> list[str]:
    """Sympy expressions of a `ShapeEnv` as texts of Python: formulas of the names of its symbols. Public replacement:
    `sympy.lambdify` that knows the functions of torch's symbolic sizes."""
    import torch.utils._sympy.printers

    printer = torch.utils._sympy.printers.PythonPrinter()
    texts = map(printer.doprint, expressions)
    return [text.replace("torch.sym_float(", "float(").replace("torch._sym_sqrt(", "math.sqrt(") for text in texts]


def is_whole_float(expression: Any) -> bool:
    """Whether an expression is an integer as a float: `float(size)`, or a constant such as 2.0. Public replacement:
    none; torch's symbols know no more of it than that it is real."""
    import torch.utils._sympy.functions

    is_size = isinstance(expression, torch.utils._sympy.functions.ToFloat)
    return is_size or bool(expression.is_Float and float(expression).is_integer())


@cache
def _make_remembering() -> type:
    from torch.fx.experimental.sym_node import SymNode

    def remember(name: str) -> Callable[[Any, Any], Any]:
        compute = getattr(SymNode, name)

        def call(self: Any, other: Any) -> Any:
            env = self.shape_env
            version = env._replacements_version_counter
            found = self._results.get((name, id(other)))
            if found is not None and found[0] == version:
                return found[1]
            key = name, self._expr, self.pytype, other._expr, other.pytype, version
            if key not in env.known:
                env.known[key] = remembering(compute(self, other))
            self._results[name, id(other)] = version, env.known[key], other  # which lives on, and so does its id
            return env.known[key]

        return call

    class Remembering(SymNode):
        _expr_ver: int
        _expr_cache: Any
        _int_ver: int | None = None
        _results: dict[tuple[str, int], tuple[int, Any, Any]]

        @property
        def expr(self) -> Any:
            version = self.shape_env._replacements_version_counter
            if version != self._expr_ver:
                self._expr_ver, self._expr_cache = version, super().expr
            return self._expr_cache

        def maybe_as_int(self) -> int | None:
            version = self.shape_env._replacements_version_counter
            if version != self._int_ver:
                self._int_ver, self._int = version, super().maybe_as_int()
            return self._int

        def wrap_int(self, num: int) -> Any:
            if num not in self.shape_env.known:
                self.shape_env.known[num] = remembering(super().wrap_int(num))
            return self.shape_env.known[num]

    def remembering(number: Any) -> Any:
        if type(number) is SymNode:
            number.__class__, number._results = Remembering, {}
        return number

    for name in _REMEMBERED:
        setattr(Remembering, name, remember(name))
    return Remembering


def remember_results(size: torch.SymInt) -> None:
    """Let torch compute each sum, product and comparison of a symbolic size and of what comes of it once: a trace asks
    for the same ones for each layer. `known` of its `ShapeEnv` is the dict of what was computed. Public replacement:
    none; a faster `torch.SymInt`."""
    if hasattr(size.node.shape_env, "_replacements_version_counter"):  # torch 2.11 does not count what it replaces
        size.node.__class__, size.node._results = _make_remembering(), {}
