"""Tracing: from a training step and its arguments to a `Program`, one flat graph of forward, backward and update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from fzero.base import tree
from fzero.base.ambient import leave_inference_mode
from fzero.base.errors import FzeroError
from fzero.base.flags import find_flags
from fzero.base.frozen import freeze
from fzero.base.mesh import VirtualMesh
from fzero.base.progress import Progress
from fzero.base.state import find_seeds
from fzero.base.symbols import Symbols
from fzero.base.torch_private import FakeTensor, FakeTensorMode, compiling, unwrap
from fzero.base.torch_private_functions import replace_checkpoint
from fzero.base.torch_private_operators import ignore_compile
from fzero.base.torch_private_traces import (
    TraceGraph,
    import_tracer,
    make_empty,
    make_graph,
    make_pair,
    one_trace,
    take_value,
    without_code,
)
from fzero.layout.layout import Layout
from fzero.program.open import Open
from fzero.program.places import place_results
from fzero.program.program import RANK, Program
from fzero.program.records import find_writes, storage
from fzero.program.signature import Argument, Result
from fzero.ranks.performer import MovePerformer, Record, bind_axes
from fzero.tracing.call_mode import CallMode
from fzero.tracing.calls import Calls
from fzero.tracing.checks import Checks
from fzero.tracing.copies import LIFT
from fzero.tracing.draws import number_draws
from fzero.tracing.escapes import CacheCheck, check_escapes, check_result
from fzero.tracing.followed import refresh_functions
from fzero.tracing.kinds import Kinds
from fzero.tracing.layers import Layers, Unlike
from fzero.tracing.loops import TurnRecorder
from fzero.tracing.module_hooks import ModuleHooks
from fzero.tracing.numbers import inline_numbers
from fzero.tracing.readings import Readings
from fzero.tracing.repeats import Repeats
from fzero.tracing.side_effects import SideEffects
from fzero.tracing.state_results import pair_results, take_state
from fzero.tracing.trace_mode import TraceMode
from fzero.tracing.user_errors import NameErrors
from fzero.values.checkpoint import checkpoint
from fzero.values.custom_functions import take_custom_functions
from fzero.values.flags import Noted, collect_flags, join_ranks
from fzero.values.layers import record_layers
from fzero.values.loops import record_loops
from fzero.values.sharded import Sharded

_aten = torch.ops.aten
T = TypeVar("T")
OpenForm = tuple[Sequence[Any], Sequence[Any]]
"""The shape and the strides of a batch, with open sizes."""


class Tracer(MovePerformer):
    """The performer of a trace: each operation becomes a node.

    `layouts` is the program's table of layouts: key -> layout. Nodes name a layout by its key.
    """

    rank = RANK
    is_tracing = True

    def __init__(self, mesh: VirtualMesh) -> None:
        self.mesh = mesh
        self.layouts: dict[str | None, Layout] = {}
        self.kinds: Kinds | None = None  # while the step runs
        self._names: dict[Layout, str] = {}
        self.reduce_dtypes: dict[str, torch.dtype] = {}

    def name(self, layout: Layout) -> str:
        """The key of a layout in the program's table: the bucket's name, numbered where two layouts share a name."""
        if layout not in self._names:
            taken = sum(other.bucket == layout.bucket for other in self._names)
            self._names[layout] = f"{layout.bucket}#{taken + 1}" if taken else layout.bucket
            self.layouts[self._names[layout]] = layout
        return self._names[layout]

    def perform(self, operation: Record, *args: Any, **kwargs: Any) -> Any:
        return operation.target(*map(self._name_layouts, args), **kwargs)

    def _name_layouts(self, given: Any) -> Any:
        """An argument with the key of each layout in the layout's place."""
        if isinstance(given, list):
            return [self._name_layouts(x) for x in given]
        return self.name(given) if isinstance(given, Layout) else given

    def varies(self, x: Tensor) -> bool:
        return self.kinds is not None and self.kinds.varies(x)

    def find_same(self, x: Tensor) -> frozenset[str]:
        return frozenset() if self.kinds is None else self.kinds.find_model_axes(x, differs=False)

    def find_differing(self, x: Tensor) -> frozenset[str]:
        return frozenset() if self.kinds is None else self.kinds.find_model_axes(x, differs=True)

    def may_write(self, x: Tensor) -> bool:
        return self.kinds is not None and self.kinds.may_write(x)

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        if self.kinds is not None:
            self.kinds.note_result(x, full, result)

    def note_write(self) -> None:
        self.writes += 1

    def note_reduce_dtype(self, path: str, dtype: torch.dtype) -> None:
        known = self.reduce_dtypes.setdefault(path, dtype)
        if known != dtype:
            raise FzeroError(path, f"is used with reduce={known} and reduce={dtype}", "give one dtype for one leaf")


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: VirtualMesh,
    symbols: Symbols | None = None,
    shapes: Mapping[int, OpenForm] | None = None,
    model_axes: tuple[str, ...] = (),
    copies: bool = True,
    given: Sequence[Sequence[Any]] | None = None,
    calls: Calls | None = None,
) -> Program:
    """The program of `fn(*args)` before any pass: each gather is of one leaf, and stands at the leaf's use.

    `Sharded` leaves of `args` are state. Tensors are this rank's batch, the same along `model_axes`. Other leaves are
    constants of the program.

    With `symbols` the program is open: `shapes` has, by the position of a leaf, a shape and strides with open sizes.
    Behind the leaves are the positions of what readings find. `given` are the values of readings, for a trace of other
    sizes than those of `args`.

    With `copies` equal layers are traced once (`Layers`). The program is the same without. `calls`, where they are
    given, note what the step calls: then no layer is copied.

    Raises:
        FzeroError: for Python control flow or `.item()` on a traced value, naming the user's line.
    """
    import_tracer()
    refresh_functions(fn)
    effects = SideEffects(getattr(fn, "__name__", "step"), fn)
    make = partial(_Trace, fn, args, mesh, symbols, shapes or {}, model_axes, given, calls)
    this, traced = _record(make, copies and calls is None)
    graph = traced.graph if symbols is None else inline_numbers(traced.graph)
    captured = {node: getattr(traced, node.target) for node in graph.find_nodes(op="get_attr")}
    for node, tensor in captured.items():  # the tensor that its views are views of
        is_literal = all(user.target is LIFT for user in node.users)  # whose copies have memory of their own
        node.meta["val"] = this.fake_mode.from_tensor(tensor.clone() if is_literal else tensor, static_shapes=True)
    program = place_results(this.describe(graph, {node.target: tensor for node, tensor in captured.items()}))
    number_draws(program)
    constants = ((f"argument {path}", leaf) for path, leaf in zip(this.paths, this.leaves) if not _is_tensor(leaf))
    effects.check(check_escapes(program, fn, constants))
    this.recorder.finish(program)
    if calls is not None:
        calls.finish({storage(x) for node in program.graph.nodes for x in find_writes(node)})
    this.leaves.clear()  # what a trace leaves behind are cycles, and arguments are not to wait for their collection
    return program


def _record(make: Callable[..., _Trace], copies: bool) -> tuple[_Trace, fx.GraphModule]:
    """A trace that came to its end, and its graph. One that fails is made again: without copies of layers where there
    were some; then as code that no compiler reads, for libraries that do without a default in front of a compiler."""
    this = make(copies)
    try:
        return this, this.record()
    except (Exception, Unlike) as error:
        found = error
    if this.has_borders:
        this = make(copies=False)
        try:
            return this, this.record()
        except Exception as error:
            found = error
    if isinstance(found, Exception) and not isinstance(found, FzeroError):
        this = make(copies=False, is_compiling=False)
        try:
            return this, this.record()
        except FzeroError as error:
            raise error from found
        except Exception:  # what failed first is what the user's code says
            pass
    raise found


class _Trace:
    """The trace of a function, and what it finds. While it `is_compiling`, `torch.compiler.is_compiling()` is true."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        mesh: VirtualMesh,
        symbols: Symbols | None,
        shapes: Mapping[int, OpenForm],
        model_axes: tuple[str, ...],
        given: Sequence[Sequence[Any]] | None,
        calls: Calls | None,
        copies: bool,
        is_compiling: bool = True,
    ) -> None:
        self.fn, self.tracer, self._model_axes, self._copies = fn, Tracer(mesh), model_axes, copies
        self._shapes, self._given, self._calls = shapes, given, calls
        self._is_compiling = is_compiling
        self._layers: Layers | None = None
        self._readings: Readings | None = None
        self.open = None if symbols is None else Open(symbols, tuple(symbols.examples))
        environment = None if symbols is None else symbols.env
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
        if environment is not None:  # torch would make each result twice, and repeats are known (`Repeats`)
            self.fake_mode.cache_enabled = False
        self.leaves, self.treedef = tree.flatten(args)
        self.paths = [tree.dotted(key) for key in tree.keys(self.treedef)]
        self.recorder = TurnRecorder(lambda: self.tracer.kinds, self.tracer.note_write, self.tracer.name)
        flags, roles = find_flags(self.treedef), find_seeds(self.treedef)
        self._arguments = tuple(
            replace(_describe_argument(path, leaf, self.tracer), flag=flags.get(i), role=roles.get(i, ""))
            for i, (path, leaf) in enumerate(zip(self.paths, self.leaves))
            if _is_tensor(leaf)
        )
        self._out_def = self.treedef
        self._results: list[Result] = []
        self._read: list[Tensor] = []
        self._noted: list[Noted] = []
        self._make_fakes = partial(_make_fakes, self.fake_mode, {})

    @property
    def has_borders(self) -> bool:
        """Whether a layer was traced in another way than without copies."""
        return self._layers is not None and self._layers.is_used

    def describe(self, graph: fx.Graph, constants: dict[str, Tensor]) -> Program:
        """The program of a graph, with what has been found by now."""
        read = self._readings
        return Program(
            name=getattr(self.fn, "__name__", type(self.fn).__name__),
            graph=graph,
            arguments=(*self._arguments, *(read.arguments if read else ())),
            results=tuple(self._results),
            out_tree=self._out_def,
            layouts=self.tracer.layouts,
            constants=constants,
            mesh=self.tracer.mesh,
            fake_mode=self.fake_mode,
            read=tuple(self._read),
            reduce_dtypes=self.tracer.reduce_dtypes,
            noted=tuple(flag.make for flag in self._noted),
            model_axes=self._model_axes,
            open=self.open,
            readings=tuple(read.found) if read else (),
        )

    def _begin_reading(self, graph: fx.Graph, constants: dict[str, Tensor]) -> Program:
        """A program that a reading computes."""
        opened = self.open and Open(self.open.symbols, self.open.reference)
        empty: Any = dict.fromkeys(("arguments", "results", "read", "noted", "readings"), ())
        return replace(self.describe(graph, constants), name="reading", open=opened, **empty)

    def record(self) -> fx.GraphModule:
        """The graph of the function."""
        given = [(self._shapes.get(i), leaf) for i, leaf in enumerate(self.leaves) if _is_tensor(leaf)]
        fakes = [self._make_fakes(leaf, opened) for opened, leaf in given]
        with one_trace, self.surround():
            return make_graph(lambda: self.run(fakes))

    def run(self, fakes: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The function that make_fx traces, to the tensors among the results. `fakes` are those among the arguments,
        each beside the value of its node."""
        traced, leaves, tracer = TraceGraph(), self.leaves, self.tracer
        if self.open is not None:
            traced.inline_numbers()
        for i, (fake, value) in enumerate(fakes):
            traced.track(fake, traced.emit_argument(f"arg{i}_1", value))
        values = iter(fake for fake, _ in fakes)
        wrapped = [_wrap(x, next(values), tracer) if _is_tensor(x) else x for x in leaves]
        given, before = (tree.unflatten(self.treedef, wrapped) for _ in range(2))  # a step may fill those given
        kinds = tracer.kinds = Kinds(self.describe(traced.graph, {}), traced)
        checks, caches = Checks(kinds), CacheCheck(given)
        symbols = None if self.open is None else self.open.symbols
        readings = self._readings = Readings(
            traced, kinds, leaves, self._arguments, self._make_fakes, self._shapes, symbols, self._given,
            self._begin_reading,
        )  # fmt: skip
        name, repeats = getattr(self.fn, "__name__", "step"), Repeats(traced, self.fake_mode)
        progress = Progress("tracing", name, "operations")
        layers = self._layers = Layers(traced, repeats, lambda: self._count(mode)) if self._copies else None
        if self._calls is not None:
            self._calls.begin([fake for fake, _ in fakes])
        with (
            TraceMode(checks, readings, repeats, progress, self.open is not None) as mode,
            CallMode(kinds, checks, readings, tracer, self._calls),
            ModuleHooks(),
            record_layers(layers),
        ):
            returned = self.fn(*given)
            caches.check(self.fn, returned)
            returned = take_state(before, returned, kinds)
            out_leaves, self._out_def = tree.flatten(returned)
            replaced = pair_results(before, returned)
            flags = join_ranks(self._noted, tracer)
        if layers is not None:
            layers.finish()
        self._read.extend(mode.read)
        for i, (path, leaf) in enumerate(zip(map(tree.dotted, tree.keys(self._out_def)), out_leaves)):
            check_result(path, leaf, leaves)
            self._results.append(_describe_result(path, leaf, tracer, self.paths[replaced[i]] if i in replaced else ""))
        self._results.extend(Result(flag.make.where) for flag in self._noted)
        # A value that a loss appended to a list is still wrapped by its transform: the trace knows the value inside.
        made = [unwrap(x.local if isinstance(x, Sharded) else x) for x in out_leaves if _is_tensor(x)]
        if self._calls is not None:
            self._calls.note("returns", out_leaves, None)
        return made + flags

    def _count(self, mode: TraceMode) -> Any:
        """Numbers that change where the step does more than to record operations of torch."""
        tracer, count = self.tracer, self._readings.count if self._readings else 0
        lists: tuple[Any, ...] = (mode.read, self._noted, tracer.layouts, tracer.reduce_dtypes)
        return tracer.writes, count, *(len(x) for x in (*lists, self.recorder.turns))

    @contextmanager
    def surround(self) -> Iterator[None]:
        """What is in force while the function is traced."""
        with (
            bind_axes(self.tracer),
            record_loops(self.recorder),
            collect_flags(self._noted),
            self.fake_mode,
            NameErrors(self.fn),
            compiling(self._is_compiling),
            ignore_compile(),
            without_code(),
            replace_checkpoint(checkpoint),
            leave_inference_mode(),
            take_custom_functions(),
            # On a GPU the backward pass would run in another thread, without context variables and user's lines.
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield


def _is_tensor(leaf: Any) -> bool:
    """Whether a leaf is an input of the graph, not a constant."""
    return isinstance(leaf, Tensor)


def _wrap(leaf: Any, value: Tensor, tracer: Tracer) -> Any:
    """The traced `value` of a leaf as the step sees it: a `Sharded` on the tracer where the leaf is one."""
    return Sharded(value, leaf.form.layout, leaf.index, tracer) if isinstance(leaf, Sharded) else value


def _make_fakes(
    fake_mode: FakeTensorMode, plain: dict[torch.device, FakeTensor], leaf: Tensor, opened: OpenForm | None
) -> tuple[Tensor, Tensor]:
    """A tensor without data, of the shape that rank `RANK` holds of a leaf, or of the open shape of a batch, and the
    value of its node. `plain` has a fake tensor of each device that was met."""
    if not isinstance(leaf, Sharded):
        if opened is None:
            fake = freeze(fake_mode.from_tensor(leaf.detach(), static_shapes=True), leaf)
        else:
            with fake_mode:
                fake = freeze(torch.empty_strided(*opened, dtype=leaf.dtype, device=leaf.device), leaf)
        return fake, take_value(fake)
    layout, device = leaf.form.layout, leaf.device
    shape = tuple(leaf.shape) if layout.replicated else (len(layout.part(leaf.index, RANK)),)
    if device not in plain:
        plain[device] = make_empty(fake_mode, device)
    stride = torch.empty(shape, device="meta").stride()
    return make_pair(plain[device], leaf.dtype, shape, stride, 0, None)


def _describe_argument(path: str, leaf: Any, tracer: Tracer) -> Argument:
    if isinstance(leaf, Sharded):
        return Argument(path, tracer.name(leaf.form.layout), leaf.index, place=leaf.place)
    return Argument(path)


def _describe_result(path: str, leaf: Any, tracer: Tracer, replaces: str) -> Result:
    if isinstance(leaf, Sharded):
        return Result(path, tracer.name(leaf.form.layout), leaf.index, replaces=replaces)
    return Result(path) if isinstance(leaf, Tensor) else Result(path, constant=leaf, is_constant=True)
