"""Loops in a trace: `fzero.scan` traces one turn between marks, and autograd its backward pass between further marks.
The pass `roll` makes loops of the nodes between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.program.kinds import UNIFORM
from fzero.program.ops import loops
from fzero.program.program import Program
from fzero.program.records import is_call
from fzero.tracing.kinds import Kinds
from fzero.values.loops import Leaves, TurnOf
from fzero.values.regions import Turn, begin_turn, current_mark, end_turn, get_mark, leave_regions, open_turn, set_mark
from fzero.values.sharded import Sharded


class TurnRecorder:
    """The `LoopRecorder` of a trace. `find_kinds` returns the kinds of the trace while the step runs, `forget` lets
    leaves be gathered anew, because a value that is gathered in a turn belongs to the turn, and `name` gives the bucket
    of a layout."""

    def __init__(
        self, find_kinds: Callable[[], Kinds | None], forget: Callable[[], None], name: Callable[[Any], str]
    ) -> None:
        self._find_kinds, self._forget, self._name = find_kinds, forget, name
        self.turns: list[Turn] = []
        """All turns of the trace. A turn's number is its position."""
        self._given_up: set[Turn] = set()
        """Turns that were traced in vain."""

    def record(
        self, turn: TurnOf, carry: Leaves, xs: Leaves, layers: list[Leaves], length: int, sync: str | None
    ) -> tuple[Leaves, Leaves] | None:
        """Trace one turn. Where the carry behind the turn differs along more axes than the carry in front of it, trace
        again: what meets the carry is another value then. None

        * where layers lie in unlike layouts or have unequal strides, or leaves of one bucket of the first layer lie in
          several of another;
        * under vmap, forward mode and second derivatives, in backward passes;
        * where autograd follows the turn, and the carry has state, the turn captures a value that autograd follows, or
          it lies in a region of `remat` or in another turn that autograd follows.

        A turn that autograd follows to parameters of captured modules alone is a loop without a derivative: nothing
        differentiates a teacher, say. In a region of `remat` it is kept, as a whole.
        """
        is_followed = _is_followed([*carry, *xs, *itertools.chain(*layers)])
        if not may_be_loop() or (is_followed and not _can_follow(carry)) or not all(map(_are_alike, layers)):
            return None
        buckets = self._find_layers(layers)
        if buckets is None:
            return None
        with leave_regions():
            return self._record(turn, carry, xs, layers, length, sync, is_followed, buckets)

    def _record(
        self, turn: TurnOf, carry: Leaves, xs: Leaves, layers: list[Leaves], length: int, sync: str | None,
        is_followed: bool, buckets: dict[str, tuple[str, ...]],
    ) -> tuple[Leaves, Leaves] | None:  # fmt: skip
        carry, xs = list(map(_make_contiguous, carry)), [x.contiguous() for x in xs]
        axes: list[frozenset[str]] = [frozenset()] * len(carry)
        while True:
            this = self._open(length, sync, is_followed=is_followed)
            this.layers = buckets
            ports = _Ports(self, this, axes, len(xs), [self._find_buckets(items) for items in layers])
            given, slices, layer = ports.enter(carry, xs, layers)
            self._forget()
            with open_turn(this):
                news, ys = turn(given, slices, layer)
                news, ys = list(map(_make_contiguous, news)), [y.contiguous() for y in ys]
            self._forget()
            behind = [self._find_axes(x) for x in news]
            captured = find_captures([*given, *slices, *layer], [*news, *ys])
            ports.has_derivative = not captured
            is_unrolled = captured and (is_followed or any(map(_is_of_step, captured)))
            if not is_unrolled and all(new <= self._find_axes(x) for x, new in zip(given, behind)):
                return ports.leave(news, ys)
            self._given_up.add(this)
            if is_unrolled:
                return None
            axes = [each | new for each, new in zip(axes, behind)]

    def open_backward(self, forward: Turn) -> Turn:
        """The backward pass of a turn."""
        return self._open(forward.length, forward.sync, forward, is_followed=True)

    def _open(self, length: int, sync: str | None, forward: Turn | None = None, is_followed: bool = False) -> Turn:
        self.turns.append(Turn(length, len(self.turns), sync, forward, is_followed))
        return self.turns[-1]

    def list_axes(self) -> list[str]:
        """The axes of the mesh."""
        kinds = self._find_kinds()
        return [] if kinds is None else list(kinds.program.mesh.names)

    def finish(self, program: Program) -> None:
        """Note the turn whose border a node stands for, and erase the nodes that were traced in vain.

        Raises:
            FzeroError: where the step uses one of these.
        """
        nodes = []
        for node in program.graph.nodes if self.turns else ():
            mark = get_mark(node)
            if is_call(node, *_MARKS):
                mark = mark._replace(port=self.turns[node.args[1]])
                set_mark(node.meta, mark)
            if node.op != "get_attr" and self._given_up.intersection((*mark.turns, mark.port)):
                nodes.append(node)
        loops.check_users(nodes, set(nodes))
        for node in reversed(nodes):
            program.graph.erase_node(node)

    def _find_layers(self, layers: list[Leaves]) -> dict[str, tuple[str, ...]] | None:
        """A bucket of the first layer -> the bucket of each row. None where leaves of one bucket of the first layer lie
        in several buckets of another, as where layers share a leaf."""
        found: dict[str, tuple[str, ...]] = {}
        for names in map(self._find_buckets, layers):
            if names and found.setdefault(names[0], tuple(names)) != tuple(names):
                return None
        return found

    def _find_buckets(self, items: Leaves) -> list[str]:
        """The bucket of each item of a list of slices; an empty list for other values."""
        return [self._name(x.form.layout) for x in items] if isinstance(items[0], Sharded) else []

    def _find_axes(self, x: Any) -> frozenset[str]:
        """The axes along which a plain tensor differs between ranks."""
        kinds = self._find_kinds()
        node = None if kinds is None or isinstance(x, Sharded) else kinds.node_of(x)
        if kinds is None or node is None:
            return UNIFORM
        kinds.node_varies(node)  # follow the trace up to here
        kind = kinds.of(node)
        return kind if isinstance(kind, frozenset) else UNIFORM


_MARKS = (loops.carry, loops.row, loops.pick, loops.last, loops.stack, loops.collect)


def may_be_loop() -> bool:
    """Whether one turn may stand for all: outside of transforms but for one in reverse mode, and of its backward
    pass."""
    if torch_private.in_vmap() or torch_private.in_forward_mode() or torch_private.in_second_order():
        return False
    return torch_private.depth() == 0 or not current_mark().in_backward


def _is_followed(values: Leaves) -> bool:
    """Whether autograd differentiates by one of these: in a transform, and for `torch.autograd.grad` in a step."""
    return torch.is_grad_enabled() and any(_local(x).requires_grad for x in values)


def _can_follow(carry: Leaves) -> bool:
    """Whether one turn may stand for all where autograd follows it."""
    mark = current_mark()
    is_inside = mark.in_backward or mark.regions or any(turn.is_followed for turn in mark.turns)
    return not is_inside and not any(isinstance(x, Sharded) for x in carry)


class _Ports:
    """What goes into a turn and comes out of it: a carry whose leaves differ between ranks along `axes`, so many leaves
    of `xs`, and leaves of layers that lie in these `buckets`. Lists of tensors have them in this order."""

    def __init__(
        self, recorder: TurnRecorder, turn: Turn, axes: list[frozenset[str]], xs: int, buckets: list[list[str]]
    ) -> None:
        self.recorder, self.turn, self.axes, self.buckets = recorder, turn, axes, buckets
        self.carry, self.xs = range(len(axes)), range(len(axes), len(axes) + xs)
        self.backward: Turn | None = None
        self.has_derivative = True

    def enter(self, carry: Leaves, xs: Leaves, layers: list[Leaves]) -> tuple[Leaves, Leaves, Leaves]:
        """The carry, the slices of xs and the leaves of a layer, in any turn."""
        firsts = [*carry, *xs, *(items[0] for items in layers)]
        made = _apply(_Enter, self, [*carry, *xs, *itertools.chain(*layers)])
        given = list(map(_put_local, firsts, made))
        return given[: self.xs.start], given[self.xs.start : self.xs.stop], given[self.xs.stop :]

    def leave(self, news: Leaves, ys: Leaves) -> tuple[Leaves, Leaves]:
        """The carry behind the last turn, and the stacked y."""
        made = _apply(_Leave, self, [*news, *ys])
        return list(map(_put_local, news, made)), made[len(news) :]

    def cut_layers(self, flat: Sequence[Any]) -> list[Sequence[Any]]:
        """The list of each leaf of the layers, among the tensors that go in."""
        return [flat[i : i + self.turn.length] for i in range(self.xs.stop, len(flat), self.turn.length)]


class _Enter(torch.autograd.Function):
    """`(ports, *tensors)`, from the tensors in front of a loop to those in any turn. The transpose ends the backward
    pass of the turn: autograd runs it behind all others of the turn, because it was made first."""

    @staticmethod
    def forward(ports: _Ports, *flat: Tensor) -> tuple[Tensor, ...]:
        number = ports.turn.number
        return (
            *(loops.carry(flat[i], number, sorted(ports.axes[i])) for i in ports.carry),
            *(loops.row(flat[i], number) for i in ports.xs),
            *(loops.pick(list(items), number) for items in ports.cut_layers(flat)),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.ports = inputs[0]
        ctx.like = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)  # zeros that autograd makes for a slice are no slice to a program

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        ports: _Ports = ctx.ports
        this, length = ports.backward, ports.turn.length
        if this is None:
            return None, *(None for _ in ctx.needs_input_grad[1:])
        carry = [_fill(cotangents[i], *ctx.like[i]) for i in ports.carry]
        rest = [None if x is None else x.contiguous() for x in cotangents[len(carry) :]]
        end_turn()
        wanted, results = ctx.needs_input_grad[1:], [_mark(loops.last, x, this.number) for x in carry]
        for x in rest[: len(ports.xs)]:
            results.append(_mark(loops.stack, x, this.number, length) if wanted[len(results)] else None)
        for x, buckets in zip(rest[len(ports.xs) :], ports.buckets):
            is_wanted = x is not None and any(wanted[len(results) :][:length])
            results += _mark(loops.collect, x, this.number, length, buckets) if is_wanted else [None] * length
        return None, *results


class _Leave(torch.autograd.Function):
    """`(ports, *tensors)`, from the carry and y of any turn to those behind the loop. The transpose begins the backward
    pass of the turn: autograd runs it in front of all others of the turn, because it was made last."""

    @staticmethod
    def forward(ports: _Ports, *flat: Tensor) -> tuple[Tensor, ...]:
        number, count = ports.turn.number, len(ports.carry)
        stacked = (loops.stack(y, number, ports.turn.length) for y in flat[count:])
        return *(loops.last(x, number) for x in flat[:count]), *stacked

    setup_context = staticmethod(_Enter.setup_context)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        ports: _Ports = ctx.ports
        if not ports.has_derivative:
            problem = "a loop of a step is differentiated with respect to parameters that its body captures"
            raise FzeroError("scan", problem, "give these to the step as arguments")
        if torch_private.in_vmap():
            problem = "the derivative of a loop is mapped, by jacrev, vmap of a vjp or is_grads_batched"
            raise FzeroError("scan", problem, "take torch.func.jacfwd, or map a function that takes the derivative")
        this = ports.backward = ports.recorder.open_backward(ports.turn)
        axes = ports.recorder.list_axes()  # a cotangent differs between ranks until its mean has been taken
        carry = [_fill(cotangents[i], *ctx.like[i]) for i in ports.carry]
        entered = [_mark(loops.carry, x, this.number, axes) for x in carry]
        rows = [x if x is None else _mark(loops.row, x.contiguous(), this.number) for x in cotangents[len(carry) :]]
        begin_turn(this)
        return None, *entered, *rows


class _Border(torch.autograd.Function):
    """`(mark, tensor, ...)`, at the border of the backward pass of a turn, which is not differentiated in its turn."""

    @staticmethod
    def forward(mark: Any, x: Tensor, *how: Any) -> Any:
        made = mark(x, *how)
        return tuple(made) if isinstance(made, list) else made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> NoReturn:
        problem = "the derivative of a loop is differentiated again, by autograd outside of torch.func"
        raise FzeroError("scan", problem, "nest fzero.grad or torch.func.grad, in which turns are traced one by one")


def _mark(mark: Any, x: Tensor | None, *how: Any) -> Any:
    """A mark of a cotangent, None for none."""
    return None if x is None else _Border.apply(mark, x, *how)


def _fill(cotangent: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The cotangent of a leaf of a carry: zeros where autograd has none. None for a leaf without a derivative."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return None
    return torch.zeros(shape, dtype=dtype, device=device) if cotangent is None else cotangent.contiguous()


def _apply(function: Any, ports: _Ports, values: Leaves) -> list[Tensor]:
    """The results of a function of the values' tensors. torch has no function of none."""
    return list(function.apply(ports, *map(_local, values))) if values else []


def _local(x: Any) -> Tensor:
    return x.local if isinstance(x, Sharded) else x


def _put_local(x: Any, local: Tensor) -> Any:
    """`x` with another tensor, or another slice of the same shape."""
    return x.with_local(local) if isinstance(x, Sharded) else local


def _make_contiguous(x: Any) -> Any:
    return _put_local(x, _local(x).contiguous())


def _are_alike(items: Leaves) -> bool:
    """Whether the items of a list may take each other's place in a program: plain tensors of equal strides, or slices
    of the same leaf of layouts that are equal but for names."""
    first = items[0]
    if not isinstance(first, Sharded):
        return not any(isinstance(x, Sharded) or x.stride() != first.stride() for x in items)
    return all(
        isinstance(x, Sharded) and x.index == first.index and x.form.layout.is_like(first.form.layout) for x in items
    )


def _is_of_step(captured: Tensor | None) -> bool:
    """Whether a step may differentiate by a captured value: by all but tensors with data, which are constants of the
    program, such as the parameters of a captured module."""
    return captured is None or isinstance(torch_private.unwrap(captured), torch_private.FakeTensor)


def find_captures(given: Leaves, results: Leaves) -> list[Tensor | None]:
    """The leaves that autograd follows results to, but not through the values `given`. None for an unknown one."""
    entrance = next((x.grad_fn for x in map(_local, given) if x.grad_fn is not None), None)
    roots = [x for x in map(_local, results) if torch.is_grad_enabled() and x.requires_grad]
    found: list[Tensor | None] = [x for x in roots if x.grad_fn is None]
    stack, seen = [x.grad_fn for x in roots], set[Any]((entrance, None))
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            found.append(getattr(node, "variable", None))
        stack += [source for source, _ in node.next_functions]
    return found
