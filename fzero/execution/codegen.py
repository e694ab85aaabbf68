"""Code generation: a program to the Python function that runs it on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.ambient import disable_autocast
from fzero.base.progress import Progress
from fzero.base.randomness import step_seed
from fzero.base.torch_private import is_profiling
from fzero.execution.bind import Call, bind
from fzero.execution.claims import has_foreign, is_foreign
from fzero.execution.failures import name_failure_of_line
from fzero.execution.loops import Early, Rows, operands, run_turns
from fzero.execution.outline import Fragment
from fzero.execution.profiling import name_calls
from fzero.execution.source import Expression, FunctionSource
from fzero.program.inference import infer
from fzero.program.open import Template, fill_numbers
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import body_of, early_of, find_writes, record
from fzero.ranks.live import Live

Runner = Callable[[list[Tensor]], list[Tensor]]
Compile = Callable[[Fragment], Callable[..., Any]]
CompileOpen = Callable[[Fragment], Callable[[Sequence[int]], Callable[..., Any]]]


def link(program: Program, on: Live, compile: Compile = lambda fragment: fragment, *, is_held: bool = False) -> Runner:
    """A function of the program's tensor arguments that runs the program on the rank `on` and returns its tensor
    results.

    The function is generated once, as Python code that drops each value at its last use. An aten operation runs as it
    is. Every other operation is bound once, to the rank and to the layout that its node names. A program that draws
    random numbers, and has no seeds among its arguments, advances torch's default CPU generator by one draw a call.
    `compile(fragment)` returns the function that runs for a `Fragment`; it is called once for equal fragments.
    With `is_held` operations from outside of fzero are held to their records (`fzero.execution.claims`).
    """
    return _with_seed(program, _link(program, on, compile, is_held)[0])


def link_open(template: Template, on: Live, compile: CompileOpen) -> Callable[[Sequence[int]], Runner]:
    """A function of sizes that returns what `link` returns for the program of these sizes. The code is the same for all
    sizes: it takes the numbers that are computed from them. Operations that are bound to a node with open sizes are
    bound for each size. `compile(fragment)` returns a function of sizes, which returns the function that runs."""
    linked = _generate(template.program, on, is_held=False, template=template)

    def at(sizes: Sequence[int]) -> Runner:
        run = _run_open(linked, template, on, template.evaluate(sizes), lambda fragment: compile(fragment)(sizes))
        return _with_seed(template.program, run)

    return at


def _run_open(
    linked: _Linked, template: Template, on: Live, numbers: Sequence[Any], compile: Compile
) -> Callable[[int | None, list[Tensor]], list[Tensor]]:
    """`_make_run` for a template that is filled with numbers."""
    calls = dict(linked.calls)
    for name, node in linked.bound.items():
        if template.is_open(node):
            calls[name] = bind(template.program, template.fill_node(node, numbers), on)
    for name, (node, inside) in linked.loops.items():
        run = _run_open(inside, template.bodies[node], on, numbers, compile)
        calls[name] = Call(_link_turns(node, run, inside.begun), name, False, False)
    compiled = {name: compile(fragment) for fragment, name in linked.fragments.items()}
    return _make_run(linked._replace(calls=calls), on, compiled, numbers)


def _with_seed(program: Program, run_once: Callable[..., list[Tensor]]) -> Runner:
    """A function of a program's arguments that calls `run_once(seed, arguments)` with the seed of this step."""
    draws, seeds = program.draws, program.seeds

    @torch.no_grad()
    def run(tensors: list[Tensor]) -> list[Tensor]:
        with disable_autocast(), step_seed([tensors[i] for i in seeds]) if draws else nullcontext() as seed:
            return run_once(seed, tensors)

    return run


class _Linked(NamedTuple):
    """The code of a program, and what it calls. `bound` has the node of each call that `bind` made, and `loops` the
    node and the body of each loop of a template."""

    forward: Callable[..., Any]
    calls: dict[str, Call]
    bound: dict[str, Node]
    loops: dict[str, tuple[Node, _Linked]]
    fragments: dict[Fragment, str]
    nodes: list[Node]
    begun: list[Early]


def _link(
    program: Program,
    on: Live,
    compile: Callable[[Fragment], Callable[..., Any]],
    is_held: bool,
    early: Mapping[Node, int] | None = None,
) -> tuple[Callable[[int | None, list[Tensor]], list[Tensor]], list[Early]]:
    """A function of a seed and the program's arguments, and what its nodes `early` call."""
    linked = _generate(program, on, is_held, compile, early)
    progress = Progress("compiling", program.name, "fragments", len(linked.fragments))
    compiled = {}
    for fragment, name in linked.fragments.items():
        compiled[name] = compile(fragment)
        progress.count(name)
    return _make_run(linked, on, compiled), linked.begun


def _generate(
    program: Program,
    on: Live,
    is_held: bool,
    compile: Compile = lambda fragment: fragment,
    early: Mapping[Node, int] | None = None,
    template: Template | None = None,
) -> _Linked:
    """The code of a program. That of a `template` takes the numbers that are computed from sizes."""
    begun: list[Early] = []
    kinds = infer(program) if is_held and has_foreign(program) else None
    source = FunctionSource(program.name, program.graph)
    calls: dict[str, Call] = {}
    bound: dict[str, Node] = {}
    loops: dict[str, tuple[Node, _Linked]] = {}
    fragments: dict[Fragment, str] = {}
    for node in program.graph.nodes:
        if node.op == "output" or find_writes(node):  # other ranks may still read memory that this rank has sent
            source.run(f"{source.calls}.settle()")
        args, kwargs = node.args, node.kwargs
        is_open = template is not None and template.is_open(node)
        if template is not None and node in template.arguments:
            args, kwargs = fill_numbers(template.arguments[node], lambda i: Expression(f"{source.numbers}[{i}]"))
        if node.op == "placeholder":
            source.take(node)
        elif node.op == "output":
            source.give_back(args[0])
        elif node.op == "get_attr":
            source.set(node, source.name(program.constants[node.target]))
        elif isinstance(node.target, Fragment):
            name = fragments.setdefault(node.target, f"fragment_{len(fragments)}")
            source.set(node, source.call(f"{source.calls}.{name}", args, kwargs))
        elif (body := body_of(node)) is not None:
            name = f"loop_{len(calls) + len(loops)}"
            if template is not None:
                inside = template.bodies[node]
                loops[name] = node, _generate(inside.program, on, False, early=early_of(node), template=inside)
            else:
                run = _link_turns(node, *_link(body, on, compile, is_held, early_of(node)))
                calls[name] = Call(run, name, False, False)
            source.set(node, source.call(f"{source.calls}.{name}", (source.seed, *operands(args)), {}))
        elif not (is_open or (kinds and is_foreign(node))) and (span := _find_span(program, node, on)) is not None:
            source.set(node, _take_view(source, args[0], span, node))
        elif record(node).perform is not None or (kinds and is_foreign(node)):
            name = f"{record(node).name}_{len(calls) + len(loops)}"
            calls[name], bound[name] = bind(program, node, on, kinds), node
            if early and node in early:
                wait = next((bind(program, user, on, kinds).run for user in node.users if record(user).arrives), None)
                begun.append(Early(node, early[node], calls[name].run, begun, wait))
                calls[name] = calls[name]._replace(run=begun[-1])
            how = {**kwargs, "seed": source.seed} if record(node).draws else kwargs
            source.set(node, source.call(f"{source.calls}.{name}", args, how))
        else:
            source.set(node, source.call_target(node.target, args, kwargs))
    return _Linked(source.make(), calls, bound, loops, fragments, list(program.graph.nodes), begun)


def _make_run(
    linked: _Linked, on: Live, compiled: Mapping[str, Callable[..., Any]], numbers: Sequence[Any] = ()
) -> Callable[[int | None, list[Tensor]], list[Tensor]]:
    """A function of a seed and a program's arguments that runs its code with its fragments `compiled`."""
    # Methods of a receiver, not globals of the generated code: one forward serves both sets of calls.
    plain = SimpleNamespace(settle=on.settle, **compiled, **{name: call.run for name, call in linked.calls.items()})
    named = SimpleNamespace(settle=on.settle, **compiled, **name_calls(linked.calls))
    forward = linked.forward

    def run(seed: int | None, tensors: list[Tensor]) -> list[Tensor]:
        try:
            return forward(named if is_profiling() else plain, seed, numbers, *tensors)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            named_error = name_failure_of_line(error, forward.__code__, linked.nodes, on.number)
            if named_error is error:
                raise
            raise named_error from error

    return run


def _link_turns(
    loop: Node, run: Callable[[int | None, list[Tensor]], list[Tensor]], early: list[Early]
) -> Callable[..., list[Tensor]]:
    """A function of a seed and a loop's operands."""

    def run_here(seed: int | None, ranks: Rows) -> Rows:
        (tensors,) = ranks
        return [run(seed, tensors)]

    return lambda seed, *given: run_turns(loop, run_here, seed, [given], early)[0]


def _find_span(program: Program, node: Node, on: Live) -> range | None:
    """The elements of a node's first operand that its result is, where the result is a view in one piece."""
    span = record(node).span if node.op == "call_function" else None
    return None if span is None else span(program, node, on)


def _take_view(source: FunctionSource, buffer: Node, span: range, node: Node) -> str:
    """The code of these elements of a buffer, in the shape of the node's value."""
    flat, shape = f"{buffer.name}.narrow(0, {span.start}, {len(span)})", tuple(node.meta["val"].shape)
    return flat if len(shape) == 1 else f"{flat}.view({source.write(shape)})"
