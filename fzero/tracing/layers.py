"""Layers of a trace: equal layers are traced once.

Of the layers of a list that are equal but for their parameters and buffers, the first and the last one run. What the
first one recorded is copied for those between them, and so is what the backward pass of the last one recorded:
autograd reaches that first. Where the last one is unlike the first one, or anything else does not fit, the step is
traced without copies (`Unlike`): a program is the one that a trace without copies makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fzero.base import torch_private
from fzero.base.ambient import find_ambient
from fzero.base.torch_private import no_functions, no_transforms, storage_key, unwrap
from fzero.base.torch_private_traces import TraceGraph
from fzero.base.user_line import current_user_line
from fzero.program.operation import Node
from fzero.program.records import find_writes, storage
from fzero.tracing.contents import HeldContents
from fzero.tracing.copies import Name, TracePart, Uncopied
from fzero.tracing.layer_borders import CopyLayer, EnterLayer, LeaveLayer
from fzero.tracing.layer_values import LayerResults, Operands
from fzero.tracing.likeness import (
    Attribute,
    ReadAttributes,
    ReadGlobals,
    find_differences,
    find_differing,
    has_index,
    list_buffers,
)
from fzero.tracing.loops import find_captures, may_be_loop
from fzero.tracing.repeats import Repeats, Unknown
from fzero.values.layers import FEWEST, LayerCall
from fzero.values.regions import Mark, Region, current_mark, get_mark


class Unlike(BaseException):
    """A step whose layers are not what copies of one of them would be. No code of a user catches it."""


@dataclass(eq=False)
class _BackwardPart:
    """What the backward pass of a layer records, for cotangents of a `key`. `gradients` are names of nodes, None for
    no gradient, and `line` is the user's that called the layer."""

    key: Any
    part: TracePart
    gradients: list[Any]
    line: str

    def describe(self) -> Any:
        return self.part.describe(), self.gradients


@dataclass(eq=False)
class _Template:
    """A layer that has run, and those that are equal to it: position -> the attributes in which one differs, which the
    layer did not read. `indices` are those that it gave to a cache, which are a layer's position. `contents` are those
    of the layer."""

    layer: nn.Module
    line: str
    regions: tuple[Region, ...]
    members: dict[int, set[Attribute]]
    indices: set[Attribute]
    surroundings: ReadGlobals
    contents: HeldContents
    forward: TracePart
    results: LayerResults
    backward: _BackwardPart | None = None
    is_copied = is_confirmed = False

    def stands_for(self, at: int, layer: nn.Module) -> bool:
        """Whether a layer is like this one still, and would read what this one has read."""
        found = find_differences(self.layer, layer)
        is_like = found is not None and found <= self.members[at] and has_index(layer, self.indices, at)
        return is_like and self.contents.is_same() and self.surroundings.is_same()


class _Layer:
    """A layer between its two borders, while it runs, or while it is copied."""

    def __init__(self, layers: Layers, operands: Operands, line: str) -> None:
        self.layers, self.operands = layers, operands
        self.buffers = list_buffers(operands.layer)
        self.template: _Template | None = None
        self.nodes: dict[Name, Node] = {("given", i): node for i, node in enumerate(operands.nodes)}
        """The nodes of the operands and of the layer by name."""
        self.regions, self.line = current_mark().regions, line
        self.copied_regions: dict[Region, Region] = {}
        self.begin: tuple[Any, dict[Name, Node], Node | None] | None = None

    def change(self, mark: Mark) -> Mark:
        """The mark of a node of the template, as one of this layer's. Its regions are of this layer."""
        assert self.template is not None
        outer = len(self.template.regions)
        inner = [self.copied_regions.setdefault(x, x.copy()) for x in mark.regions[outer:]]
        return mark._replace(regions=(*self.regions, *inner) if mark.regions else ())


class Layers:
    """The `LayerRecorder` of a trace. `count` returns numbers that change where a step does more than to record."""

    def __init__(self, traced: TraceGraph, repeats: Repeats, count: Callable[[], Any]) -> None:
        self._traced, self.repeats, self._count = traced, repeats, count
        self._templates: dict[Any, list[_Template]] = {}
        self._given_up: Counter[nn.Module] = Counter()
        self._given: dict[nn.Module, set[Node]] = {}
        self._is_inside = False
        self._first: list[_Layer] = []
        self._runs: list[_Layer] = []
        self._backward: list[tuple[_Layer, _BackwardPart]] = []
        self._followed: set[Node] = set()
        self._is_unlike = False

    def _refuse(self) -> Unlike:
        """The error that ends this trace, even where code of the step catches it."""
        self._is_unlike = True
        return Unlike()

    @property
    def is_used(self) -> bool:
        """Whether a layer was copied, or has borders."""
        return bool(self._runs)

    def call_layer(self, call: LayerCall) -> Any:
        """What the call of a layer returns: it runs, or is copied."""
        mark = current_mark()
        if self._is_inside or self._given_up[call.layers] >= MOST or mark.in_backward or not may_be_loop():
            return call.forward(*call.args, **call.kwargs)
        try:
            operands = Operands(self.repeats, call)
        except Unknown:
            return call.forward(*call.args, **call.kwargs)
        modes = tuple(map(id, torch_private.function_modes())), tuple(map(id, torch_private.dispatch_modes()))
        key = call.layers, operands.key, find_ambient(), mark.turns, len(mark.regions), modes
        known = self._templates.setdefault(key, [])
        template = next((x for x in known if call.at in x.members), None)
        run = _Layer(self, operands, current_user_line())
        if template is None and call.at + FEWEST <= len(call.list_layers()):
            if self._may_share(call, operands):
                return call.forward(*call.args, **call.kwargs)
            made = self._run(call, run, None)
            if run.template is not None:
                known.append(run.template)
            return made
        if template is None or not template.stands_for(call.at, run.operands.layer):
            return call.forward(*call.args, **call.kwargs)
        run.template = template
        if call.at == max(template.members):
            return self._run(call, run, template)
        return self._copy(run, template)

    def _may_share(self, call: LayerCall, operands: Operands) -> bool:
        """Whether a layer is given a value that autograd follows and the next layer may be given, too, as layers of a
        decoder are given what the encoder returned: the next one tells. Such layers are not copied (`_enter`)."""
        given, before = operands.find_given(), self._given.get(call.layers, set())
        self._given[call.layers] = given
        if given & before:
            self._given_up[call.layers] = MOST
        return bool(given & before) or len(before) < 2 <= len(given)

    def _run(self, call: LayerCall, run: _Layer, known: _Template | None) -> Any:
        """Run a layer between borders. It becomes a template where it can be one, or is held against the `known`
        one."""
        operands, before, last = run.operands, self._count(), self._traced.find_last()
        self._enter(run)
        entered = EnterLayer.apply(run, *operands.list_followed()) if operands.followed else ()
        surroundings = ReadGlobals()
        differing = {} if known is not None else find_differing(call.layers, call.at)
        attributes = {each for found in differing.values() for each in found}
        contents = HeldContents()
        contents.add(operands.layer)
        read = ReadAttributes(operands.layer, attributes, None if operands.cache is None else call.at)
        take: Callable[[], Any] = dict
        self._is_inside = True
        try:
            with operands.replace(call, entered) as given, ExitStack() as stack:
                if operands.cache is not None:
                    take = stack.enter_context(operands.cache.watch())
                if known is None:
                    stack.enter_context(read.watch())
                    stack.enter_context(surroundings.record())
                returned = call.forward(*given.args, **given.kwargs)
        except Exception:
            self._is_unlike = self._is_unlike or bool(read.indices)
            raise
        finally:
            self._is_inside = False
        try:
            if any(x._backward_hooks for x in entered):  # which would run at another place in the backward pass
                raise self._refuse()
            if not given.is_kept():
                self._given_up[call.layers] = MOST
                raise Uncopied("changes its arguments") if known is None and given.reaches_call() else self._refuse()
            if before != self._count() or not contents.is_same():
                raise Uncopied("does more than to compute")
            part = self._take(last, run, run.nodes, "forward")
            results = LayerResults(self.repeats, (returned, take()), part)
            if find_captures(list(entered), [results.tensors[i] for i in results.followed]):
                raise Uncopied("differentiates by what it captures")
            if known is None:
                members = _find_members(call, differing, read)
                if len(members) + 1 < FEWEST or not (surroundings.is_known and contents.is_known):
                    raise Uncopied("has too few like it")
                if surroundings.holds(run.buffers):
                    raise Uncopied("has a buffer that its code reads from elsewhere, too")
        except (Uncopied, Unknown) as error:
            if known is not None or read.indices:  # a `LayerIndex` may not be what the code can do with an int
                raise self._refuse() from error
            self._given_up[call.layers] += 1
            run.nodes |= {("other", i): node for i, node in enumerate(self._traced.nodes_after(last))}
            return returned
        if known is None:
            members[call.at] = set()
            run.template = _Template(
                operands.layer, run.line, run.regions, members, read.indices, surroundings, contents, part, results
            )
            self._first.append(run)
        elif (part.describe(), results.key) != (known.forward.describe(), known.results.key):
            raise self._refuse()
        else:
            known.is_confirmed = True
        run.nodes |= part.own
        followed = [results.tensors[i] for i in results.followed]
        left = dict(zip(results.followed, LeaveLayer.apply(run, *followed) if followed else ()))
        return self._return(run, results, [left.get(i, x) for i, x in enumerate(results.tensors)])

    def _return(self, run: _Layer, results: LayerResults, tensors: Sequence[Any]) -> Any:
        """What a layer returns, with these tensors. What it leaves in its cache is there then."""
        returned, left = results.build(tensors)
        if run.operands.cache is not None:
            run.operands.cache.put(left)
        return returned

    def _enter(self, run: _Layer) -> None:
        """Note a layer with borders, or a copy. Autograd adds up what such a layer gives for a value before it adds
        what others give: so no other layer may compute with that.

        Raises:
            Unlike: where another one does.
        """
        self._runs.append(run)
        followed = {run.operands.nodes[i] for i in run.operands.followed}
        if followed & self._followed:
            raise self._refuse()
        self._followed |= followed

    def _copy(self, run: _Layer, template: _Template) -> Any:
        template.is_copied = True
        self._enter(run)
        operands, results = run.operands, template.results
        made: list[Any] = [None] * len(results.names)

        def copy() -> tuple[Tensor, ...]:
            with no_functions(), no_transforms():
                run.nodes |= template.forward.copy(run.nodes, run.change, {template.line: run.line}, run.buffers)
                made[:] = [self._make(run.nodes[name]) for name in results.names]
            return tuple(made[i] for i in results.followed)

        followed = CopyLayer.apply(run, copy, *operands.list_followed()) if results.followed else copy()
        for i, x in zip(results.followed, followed):
            made[i] = x
        return self._return(run, results, made)

    def _take(self, last: Node | None, run: _Layer, nodes: Mapping[Name, Node], kind: str) -> TracePart:
        """What a layer has recorded behind a node, beside `nodes` by name."""
        with no_functions(), no_transforms():
            return TracePart(self._traced, self.repeats, last, nodes, kind, run.buffers)

    def _make(self, node: Node) -> Tensor:
        """A new tensor for the value of a node."""
        return self.repeats.make_alias(node.meta["val"], node)

    def begin_backward(self, run: _Layer, cotangents: Sequence[Tensor | None]) -> tuple[Any, dict[Name, Node]]:
        """The key of the cotangents of a layer, and all nodes that its backward pass may compute with."""
        names = {node: name for name, node in reversed(run.nodes.items())}
        described = [None if x is None else self.repeats.describe_tensor(unwrap(x)) for x in cotangents]
        memory = [None if x is None else storage_key(unwrap(x)) for x in cotangents]
        key = [
            each if each is None else (each[0], names.get(each[1]), memory.index(of))
            for each, of in zip(described, memory)
        ]
        nodes = {("cotangent", i): each[1] for i, each in enumerate(described) if each is not None}
        return key, {**run.nodes, **{name: node for name, node in nodes.items() if node not in names}}

    def end_backward(self, run: _Layer, gradients: Sequence[Tensor | None]) -> None:
        """Note what the backward pass of a layer has recorded."""
        if run.begin is None or run.template is None:
            return
        (key, nodes, last), run.begin = run.begin, None
        part = self._take(last, run, nodes, "backward")
        made = [None if x is None else part.names[self.repeats.describe_tensor(unwrap(x))[1]] for x in gradients]
        this, known = _BackwardPart(key, part, made, run.line), run.template.backward
        run.nodes |= part.own
        self._backward.append((run, this))
        if known is None:
            run.template.backward = this
        elif known.key == key and known.describe() != this.describe():
            raise self._refuse()

    def copy_backward(self, run: _Layer, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a layer that is a copy."""
        key, nodes = self.begin_backward(run, cotangents)
        known = run.template.backward if run.template is not None else None
        if known is None or known.key != key:
            raise self._refuse()
        with no_functions(), no_transforms():
            made = {**nodes, **known.part.copy(nodes, run.change, {known.line: run.line}, run.buffers)}
            return [None if name is None else self._make(made[name]) for name in known.gradients]

    def start_backward(self, run: _Layer, cotangents: Sequence[Tensor | None]) -> None:
        """Note where the backward pass of a layer begins that runs."""
        if run.template is not None:
            run.begin = (*self.begin_backward(run, cotangents), self._traced.find_last())

    def finish(self) -> None:
        """Check, behind the step, what a layer cannot know while it runs.

        Raises:
            Unlike: where the last layer did not run behind copies, or behind a layer that was given a `LayerIndex`,
                where a value of a layer that ran is used outside of it, where a value that autograd follows goes into a
                layer and elsewhere, where memory of a layer is written into outside of it, and where code of the step
                has caught one.
        """
        templates = (x.template for x in self._runs if x.template is not None)
        if self._is_unlike or any((x.is_copied or x.indices) and not x.is_confirmed for x in templates):
            raise Unlike
        for run in self._runs:
            own = set(run.nodes.values())
            for i in run.operands.followed:
                others = (node for node in run.operands.nodes[i].users if node not in own)
                if not all(get_mark(node).in_backward for node in others):
                    raise self._refuse()
        for run in self._first:
            own = set(run.nodes.values())
            assert run.template is not None
            results = {run.nodes[name] for name in run.template.results.names}
            for node in run.template.forward.nodes:
                if node not in results and not own.issuperset(node.users):
                    raise self._refuse()
        for run, backward in self._backward:
            own, results = set(run.nodes.values()), set(backward.gradients)
            for node in backward.part.nodes:
                if backward.part.names[node] not in results and not own.issuperset(node.users):
                    raise Unlike
        inside = {node for run in self._runs for name, node in run.nodes.items() if name[0] != "given"}
        memory = {storage(node) for run in self._runs for node in run.nodes.values()}
        for node in self._traced.graph.nodes:
            if node not in inside and any(storage(x) in memory for x in find_writes(node)):
                raise self._refuse()


MOST = 3
"""Layers of a list that may turn out to have too few like them."""


def _find_members(
    call: LayerCall, differing: Mapping[int, set[Attribute]], read: ReadAttributes
) -> dict[int, set[Attribute]]:
    """Of the layers behind the called one that differ in some attributes, those that differ in nothing it has read."""
    layers, seen = call.list_layers(), read.list_read()
    behind = ((at, found) for at, found in differing.items() if at > call.at and not found & seen)
    return {at: found for at, found in behind if has_index(layers[at], read.indices, at)}
