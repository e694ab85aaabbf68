"""Soundness of kinds: in a program that `verify` accepts, ranks agree on every value whose kind is the same on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from torch import Tensor, fx

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.execution import lockstep
from fzero.passes import verify
from fzero.program.inference import infer
from fzero.program.kinds import RAGGED, Kind, Slice
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.values.sharded import Sharded
from property_tests.laws import slow
from property_tests.running import bits, finished

MESHES = [*(VirtualMesh(fsdp=size) for size in (2, 3, 4)), VirtualMesh(replica=2, fsdp=2)]


# the law


class Same:
    """A `Watch` that asserts the kind of each value: values that are uniform along an axis are equal along the axis,
    bit for bit, and a slice has the size that the layout gives it."""

    def __init__(self, program: Program) -> None:
        self.kinds, self.program = infer(program), program
        self.seats = lockstep.seats(program.mesh)

    def __call__(self, node: Node, alive: list[dict[Node, Any]]) -> None:
        for value in dict.fromkeys((node, *node.all_input_nodes)):
            if value in self.kinds:
                self._agree(value, self.kinds[value], [values[value] for values in alive])

    def _agree(self, node: Node, kind: Kind, values: list[Any]) -> None:
        if isinstance(kind, Slice):
            layout = self.program.layouts[kind.bucket]
            for seat, value in zip(self.seats, values):
                assert list(value.shape) == [len(layout.part(kind.leaf, seat.rank))], f"{node} is no slice"
            kind = frozenset({self.program.mesh.shard_axis, RAGGED})
        if not isinstance(kind, frozenset) or not isinstance(values[0], Tensor):
            return
        groups: dict[tuple[int, ...], Tensor] = {}
        for seat, value in zip(self.seats, values):
            first = groups.setdefault(tuple(seat.along(axis) for axis in sorted(kind - {RAGGED})), value)
            assert value.shape == first.shape and torch.equal(bits(value), bits(first)), f"{node} differs: {values}"
        if RAGGED not in kind:
            assert len({value.shape for value in values}) == 1, f"{node} is ragged: {values}"


# random steps


class Instruction(NamedTuple):
    """An operation of `OPERATIONS` on two earlier values, by their numbers modulo the number of values; `returned` says
    whether the step returns the result."""

    name: str
    first: int = 0
    second: int = 0
    returned: bool = True


@dataclass(frozen=True)
class Wild:
    """A step of `instructions`. Leaves out each instruction that is refused."""

    mesh: VirtualMesh
    instructions: tuple[Instruction, ...]
    stage: int = 3
    donate: bool = True

    def partition(self) -> tuple[tree.Tree, ...]:
        draw = torch.Generator().manual_seed(0)
        bucket = {"w": torch.randn(5, 3, generator=draw), "v": torch.randn(5, 3, generator=draw)}
        params = fzero.partition({"layers": [bucket], "m": torch.randn(7, 3, generator=draw)}, self.mesh)
        return params, params["m"].new_zeros(()) + 1

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.randn(5 * self.mesh.size(), 3, generator=torch.Generator().manual_seed(1)),)

    def __call__(self, params: tree.Tree, count: Any, x: Tensor) -> list[Any]:
        (layer,) = params["layers"]
        values = [layer["w"], layer["v"], params["m"], count, x, torch.linspace(-1, 1, 15).view(5, 3)]
        returned = []
        for name, first, second, is_returned in self.instructions:
            a, b = values[first % len(values)], values[second % len(values)]
            if name in PAIRS and not (a.shape == b.shape or (name not in SHAPED and 0 in (a.ndim, b.ndim))):
                continue
            with suppress(*REFUSALS):
                values.append(OPERATIONS[name](a, b, self.mesh))
                returned += values[-1:] * is_returned
        return returned


REFUSALS = FzeroError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError


def gradient(a: Any, b: Any, mesh: VirtualMesh) -> Any:
    return fzero.grad(lambda a: (a * b).sum() + (torch.tanh(a) @ torch.ones(3, 2)).square().mean())(a)


def as_state(a: Sharded, b: Tensor, mesh: VirtualMesh) -> Sharded:
    """What a user does who goes around the rules."""
    local = b.local if isinstance(b, Sharded) else b
    if local.shape != a.local.shape:
        raise TypeError
    return a.with_local(local)


def added_to(a: Tensor, b: Tensor, mesh: VirtualMesh) -> Tensor:
    if isinstance(a, Sharded) or not a.is_floating_point() or a.ndim < b.ndim:
        raise TypeError
    copy = a.clone()
    return copy.add_(b)


def through_a_view(a: Tensor, b: Tensor, mesh: VirtualMesh) -> Tensor:
    copy = _plain(a).clone()
    copy[:1].add_(_plain(b).sum())
    return copy


def second_half(a: Tensor, b: Tensor, mesh: VirtualMesh) -> Tensor:
    first, second = torch.split(_plain(a).clone(), [2, 3])
    first.copy_(_plain(b)[:2])
    return torch.cat([second, second, second])[:5]


def over(collective: Callable[[Any, str], Any], position: int) -> Any:
    return lambda a, b, mesh: collective(_plain(a), mesh.names[position % len(mesh.names)])


def _plain(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


OPERATIONS: dict[str, Callable[[Any, Any, VirtualMesh], Any]] = {
    "add": lambda a, b, mesh: a + b,
    "sub": lambda a, b, mesh: b - a * 0.5,
    "mul": lambda a, b, mesh: a * b,
    "where": lambda a, b, mesh: torch.where(a > 0, a, b),
    "tanh": lambda a, b, mesh: torch.tanh(a),
    "sum": lambda a, b, mesh: a.sum(),
    "mean": lambda a, b, mesh: a.mean(),
    "max": lambda a, b, mesh: a.max(),
    "norm": lambda a, b, mesh: torch.linalg.vector_norm(a),
    "rows": lambda a, b, mesh: a.sum(0),
    "matmul": lambda a, b, mesh: torch.tanh(a @ torch.ones(3, 3)) @ (b.T @ b),
    "sorted": lambda a, b, mesh: torch.sort(a.reshape(-1)).values,
    "zeros": lambda a, b, mesh: torch.zeros_like(a),
    "new": lambda a, b, mesh: a.new_zeros(()),
    "lists": lambda a, b, mesh: torch._foreach_add([a, b], [b, a])[1],
    "list norms": lambda a, b, mesh: torch._foreach_norm([a, b])[0],
    "list of numbers": lambda a, b, mesh: torch._foreach_mul([a], b.sum())[0],
    "gradient": gradient,
    "psum": over(fzero.psum, 0),
    "pmean": over(fzero.pmean, 1),
    "pmax": over(fzero.pmax, 0),
    "rank": lambda a, b, mesh: fzero.axis_index(mesh.names[-1]) + 0.0,
    "random": lambda a, b, mesh: torch.rand(5, 3),
    "random like": lambda a, b, mesh: torch.rand_like(a),
    "mask": lambda a, b, mesh: torch.bernoulli(torch.sigmoid(a)),
    "unset": lambda a, b, mesh: torch.empty(5, 3) * 0 + a,
    "set": lambda a, b, mesh: torch.empty(a.shape).copy_(_plain(b)),
    "added to": added_to,
    "through a view": through_a_view,
    "second half": second_half,
    "whole": lambda a, b, mesh: a.full_tensor(),
    "slice of": lambda a, b, mesh: a.slice_of(_plain(b)),
    "slice": lambda a, b, mesh: a.local,
    "as state": as_state,
}


SHAPED = {"lists", "slice of", "second half", "set"}
PAIRS = SHAPED | {"gradient", "add", "sub", "mul", "where", "added to"}
"""Operations on two values of one shape; those that are not `SHAPED` may be given a number."""


def instructions() -> st.SearchStrategy[tuple[Instruction, ...]]:
    """Some."""
    values = st.integers(0, 15)
    one = st.builds(Instruction, st.sampled_from(list(OPERATIONS)), values, values, st.booleans())
    return st.lists(one, min_size=3, max_size=10).map(tuple)


@example(Wild(MESHES[0], (Instruction("gradient"),)))  # a value of one element and stride 0
@given(st.builds(Wild, st.sampled_from(MESHES), instructions(), st.sampled_from([1, 2, 3]), st.booleans()))
@slow
def test_ranks_agree_on_what_is_uniform_in_a_step_that_is_accepted(step: Wild) -> None:
    try:
        running = finished(step)
    except FzeroError as error:
        event(f"refused: {error.problem.split(' in ')[0][:40]}")
        return
    event("accepted")
    running.outputs(watch=Same(running.program))


# random mistakes


def model(params: tree.Tree, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["u"]) * layer["s"] @ layer["v"]
    return x.square().mean()


OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1, weight_decay=0.1))


@dataclass(frozen=True)
class Training:
    """A step of two layers of two equal matrices and a number, clipped AdamW, a result of each rank and a draw."""

    mesh: VirtualMesh
    stage: int = 3
    donate: bool = True

    def partition(self) -> tuple[tree.Tree, ...]:
        draw = torch.Generator().manual_seed(0)
        shapes = {"u": (4, 4), "v": (4, 4), "s": ()}
        layers = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(2)]
        params = fzero.partition({"layers": layers}, self.mesh)
        return params, OPTIMIZER.init(params)

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.randn(2 * self.mesh.size(), 4, generator=torch.Generator().manual_seed(1)),)

    def __call__(self, params: tree.Tree, state: Any, x: Tensor) -> Any:
        noisy = x + 0.1 * torch.randn_like(x)
        value, grads = fzero.value_and_grad(model)(params, noisy)
        updates, state = OPTIMIZER.update(grads, state, params)
        spread = fzero.pmax(noisy.abs().amax(0), self.mesh.shard_axis)
        return optim.apply_updates(params, updates), state, value, noisy * spread, params["layers"][0]["u"].max()


trained = cache(lambda mesh, stage, donate: finished(Training(mesh, stage, donate)))


class Mutant(NamedTuple):
    """A change of a program: a `kind` of `MUTATIONS`, and the numbers of the node and of the replacement, each modulo
    the number of choices."""

    kind: str
    where: int
    what: int


def _calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def other_input(program: Program, node: fx.Node, what: int) -> None:
    """The node gets another operand of the same shape."""
    sources = list(node.all_input_nodes)
    old = sources[what % len(sources)]
    before = list(program.graph.nodes)[: list(program.graph.nodes).index(node)]
    alike = [x for x in before if x is not old and _form(x) == _form(old)]
    node.replace_input_with(old, alike[what % len(alike)])


def _form(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def other_number(program: Program, node: fx.Node, what: int) -> None:
    """The node gets another index, axis or name."""
    names = [*program.mesh.names, "sum", "avg", "max", *program.layouts]
    others: list[Any] = [0, 1, 2, 16, *names, [0], [0, 1], [0, 2], [1, 2], [0, 1, 2]]
    places = [i for i, arg in enumerate(node.args) if isinstance(arg, (int, str)) or _is_numbers(arg)]
    place = places[what % len(places)]
    alike = [x for x in others if type(x) is type(node.args[place]) and x != node.args[place]]
    node.args = (*node.args[:place], alike[what // 7 % len(alike)], *node.args[place + 1 :])


def _is_numbers(arg: Any) -> bool:
    return isinstance(arg, list) and all(isinstance(x, int) for x in arg)


def swapped_lists(program: Program, node: fx.Node, what: int) -> None:
    """Two values of a list operand change places."""
    lists = [i for i, arg in enumerate(node.args) if isinstance(arg, (list, tuple)) and len(arg) > 1]
    place = lists[what % len(lists)]
    old = list(node.args[place])
    i, j = what % len(old), what // 3 % len(old)
    old[i], old[j] = old[j], old[i]
    node.args = (*node.args[:place], old, *node.args[place + 1 :])


def dropped(program: Program, node: fx.Node, what: int) -> None:
    """The node's users get the node's operand."""
    sources = [x for x in node.all_input_nodes if _form(x) == _form(node)]
    node.replace_all_uses_with(sources[what % len(sources)])


def moved(program: Program, node: fx.Node, what: int) -> None:
    """The node stands elsewhere."""
    nodes = _calls(program)
    nodes[what % len(nodes)].append(node)


def other_result(program: Program, node: fx.Node, what: int) -> None:
    """The program returns the node in place of another result."""
    returned = list(program.output.args[0])
    alike = [i for i, x in enumerate(returned) if _form(x) == _form(node)]
    returned[alike[what % len(alike)]] = node
    program.output.args = (returned,)


MUTATIONS = {
    function.__name__: function for function in (other_input, other_number, swapped_lists, dropped, moved, other_result)
}


def mutated(program: Program, mutant: Mutant) -> Program | None:
    """The program with a mistake at the first node from `where` on that can take one; None where torch refuses."""
    program = program.copy()
    nodes = _calls(program)
    start = mutant.where % len(nodes)
    for node in nodes[start:] + nodes[:start]:
        with suppress(ZeroDivisionError):  # nothing to choose from
            MUTATIONS[mutant.kind](program, node, mutant.what)
            break
    try:
        for node in _calls(program):
            node.meta["val"] = program._fake(node.target, node.args, node.kwargs)
    except Exception:
        return None
    return program


def mutants() -> st.SearchStrategy[Mutant]:
    """Any."""
    return st.builds(Mutant, st.sampled_from(list(MUTATIONS)), st.integers(0, 400), st.integers(0, 400))


@given(st.sampled_from(MESHES), st.sampled_from([1, 3]), st.booleans(), mutants())
def test_ranks_agree_on_what_is_uniform_in_a_changed_program_that_is_accepted(
    mesh: VirtualMesh, stage: int, donate: bool, mutant: Mutant
) -> None:
    running = trained(mesh, stage, donate)
    program = mutated(running.program, mutant)
    if program is None:
        return event(f"{mutant.kind}: none")
    try:
        verify(program)
    except FzeroError:
        return event(f"{mutant.kind}: refused")
    event(f"{mutant.kind}: accepted")
    running.outputs(program, Same(program))
