"""Tracing: a training step and its arguments to a `Program`, one flat graph of forward, backward and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import RANK, Argument, Program, Result
from fzero.program.records import find_writes, is_random, name_of
from fzero.tracing.trace_mode import TraceMode
from fzero.tracing.user_line import user_line_of_error
from fzero.values.collectives import using
from fzero.values.sharded import Sharded

_aten = torch.ops.aten


class Tracer:
    """The `Primitives` that write each move down as a node of `ops`."""

    rank = RANK
    is_tracing = True

    def __init__(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh
        self.layouts: dict[str | None, Layout] = {}
        self._names: dict[Layout, str] = {}

    def name(self, layout: Layout) -> str:
        """The layout's key in the program's table: its bucket's name, numbered where two layouts share it."""
        if layout not in self._names:
            taken = sum(other.bucket == layout.bucket for other in self._names)
            self._names[layout] = f"{layout.bucket}#{taken + 1}" if taken else layout.bucket
            self.layouts[self._names[layout]] = layout
        return self._names[layout]

    def gather(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return ops.gather(x, self.name(layout), leaf, list(layout.leaves[leaf].shape))

    def scatter(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return ops.scatter(x, self.name(layout), leaf, len(layout.part(leaf, RANK)))

    def take(self, x: Tensor, layout: Layout, leaf: int) -> Tensor:
        return ops.take(x, self.name(layout), leaf, len(layout.part(leaf, RANK)))

    def beside(self, x: Tensor) -> Tensor:
        return ops.beside(x)

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return ops.spread(x, like)

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        return ops.all_reduce(x, op, axis)

    def axis_index(self, axis: str, device: torch.device) -> Tensor:
        return ops.axis_index(axis, device)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], mesh: VirtualMesh) -> Program:
    """The program of `fn(*args)`, as written: every gather at its use, one leaf each.

    `Sharded` leaves of `args` are state, tensors are this rank's batch, anything else is a constant of the program.

    Raises:
        FzeroError: for Python control flow or `.item()` on a traced value, naming the user's line.
    """
    leaves, treedef = tree.flatten(args)
    paths = [tree.dotted(key) for key in tree.keys(treedef)]
    tracer = Tracer(mesh)
    results: list[Result] = []
    out_tree: list[tree.TreeDef] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        values = iter(tensors)
        given = [_traced(leaf, next(values), tracer) if _is_traced(leaf) else leaf for leaf in leaves]
        with TraceMode():
            out_leaves, out_def = tree.flatten(fn(*tree.unflatten(treedef, given)))
        out_tree.append(out_def)
        results.extend(
            _result(path, leaf, tracer) for path, leaf in zip(map(tree.dotted, tree.keys(out_def)), out_leaves)
        )
        return [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in out_leaves if _is_traced(leaf)]

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [_fake(leaf, fake_mode) for leaf in leaves if _is_traced(leaf)]
    with using(tracer), fake_mode, _named_errors(fn):
        traced = make_fx(flat, tracing_mode="real")(*fakes)
    arguments = tuple(_argument(path, leaf, tracer) for path, leaf in zip(paths, leaves) if _is_traced(leaf))
    constants = {node.target: getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    program = Program(
        name=getattr(fn, "__name__", type(fn).__name__),
        graph=traced.graph,
        arguments=arguments,
        results=tuple(results),
        out_tree=out_tree[0],
        layouts=tracer.layouts,
        constants=constants,
        mesh=mesh,
        fake_mode=fake_mode,
    )
    _number_draws(program)
    return program


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Sharded))


def _traced(leaf: Any, value: Tensor, tracer: Tracer) -> Any:
    return Sharded(value, leaf.layout, leaf.index, tracer) if isinstance(leaf, Sharded) else value


def _fake(leaf: Tensor | Sharded, fake_mode: FakeTensorMode) -> Tensor:
    """A tensor without data, as rank `RANK` holds it."""
    if isinstance(leaf, Tensor):
        return fake_mode.from_tensor(leaf.detach(), static_shapes=True)
    layout = leaf.layout
    shape = leaf.shape if layout.replicated else (len(layout.part(leaf.index, RANK)),)
    with fake_mode:
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)


def _argument(path: str, leaf: Any, tracer: Tracer) -> Argument:
    if isinstance(leaf, Sharded):
        return Argument(path, tracer.name(leaf.layout), leaf.index)
    return Argument(path)


def _result(path: str, leaf: Any, tracer: Tracer) -> Result:
    if isinstance(leaf, Sharded):
        return Result(path, tracer.name(leaf.layout), leaf.index)
    return Result(path) if isinstance(leaf, Tensor) else Result(path, constant=leaf, is_constant=True)


def _number_draws(program: Program) -> None:
    """Random operations become `ops.draw`, numbered in the order in which they were traced."""
    for number, node in enumerate(filter(is_random, program.graph.nodes)):
        with program.graph.inserting_before(node):
            program.substitute(node, _draw(program, number, node))


def _draw(program: Program, number: int, node: Node) -> Node:
    """What takes the place of a random operation. One in place draws apart, into memory that nothing else sees."""
    known = {key: value for key, value in node.meta.items() if key != "val"}

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        new = program.emit(target, *args, **kwargs)
        new.meta.update(known)
        return new

    written, (first, *rest) = find_writes(node), node.args
    if not written:
        return emit(ops.draw, number, node.target, *node.args, **node.kwargs)
    if written != [first]:
        raise FzeroError(
            node.stack_trace,
            f"{name_of(node)} writes what it draws into an argument other than its first",
            "draw with an operation that returns it, such as torch.rand_like",
        )
    if len(first.users) == 1 and "empty" in name_of(first):
        return emit(ops.draw, number, node.target, *node.args, **node.kwargs)
    apart = emit(_aten.clone.default, first)
    return emit(_aten.copy_.default, first, emit(ops.draw, number, node.target, apart, *rest, **node.kwargs))


class _named_errors:
    """A context that turns torch's refusal of data-dependent Python into an `FzeroError` with the user's line."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            raise FzeroError(
                user_line_of_error(tb) or getattr(self.fn, "__name__", "step"),
                "Python needs a value, or a shape, that is only known when the step runs",
                "choose with torch.where, or return the tensor and look at it outside the step",
            ) from error
