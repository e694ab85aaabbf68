"""Programs without processes: a step on all ranks of a virtual mesh, and its program before and after a pass.

    case = on_rows(train_step, layers(), mesh=VirtualMesh(fsdp=3))
    program = case.trace()
    assert_same(case.run(bucket(program)), case.run(program))

`fzero.simulate` places the arguments and traces, `fzero.execution.lockstep` runs whatever a pass returns. At the end
stand the steps on which all passes are tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

import fzero
from fzero import grad, optim, tree, value_and_grad
from fzero.base.mesh import VirtualMesh
from fzero.execution import lockstep
from fzero.passes.order import find_origins
from fzero.program import ops
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import find_bodies, name_of
from fzero.tracing import trace

Pass = Callable[[Program], Program]
Outputs = list[list[Tensor]]
"""The tensors that a program returns, rank by rank."""
MESH = VirtualMesh(fsdp=2)


class Storages:
    """Counts the bytes that the values of a rank keep alive, each storage once. A rank's rows are a view of the batch
    of all ranks: of that storage they alone count."""

    def __init__(self, program: Program) -> None:
        given = zip(program.placeholders, program.arguments)
        self._batches = {node.name for node, argument in given if argument.bucket is None}
        self._rows: dict[int, int] = {}

    def count(self, values: dict[Node, Any], tensors: Iterable[Tensor]) -> int:
        """The bytes of the storages of `tensors`, which are those among `values`."""
        for node, value in values.items():
            if node.op == "placeholder" and node.name in self._batches:
                self._rows[value.untyped_storage()._cdata] = nbytes(value)
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        return sum(self._rows.get(key, size) for key, size in storages.items())


def measure_peak(step: Any, *args: Any) -> tuple[Program, int]:
    """The program of a simulated step, and the most bytes that the values of a rank keep alive while all ranks run."""
    program, most = step.trace(*args), 0
    storages = Storages(program)

    def watch(node: Node, ranks: list[dict[Node, Any]]) -> None:
        nonlocal most
        most = max(most, *(storages.count(held, tensors(held.values())) for held in ranks))

    step(*args, watch=watch)
    return program, most


def list_programs(program: Program) -> Iterator[Program]:
    """A program and the bodies of its loops, in the order in which they run first."""
    yield program
    for body in find_bodies(program.graph):
        yield from list_programs(body)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of a program, what a collective has under way among them."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (int, str)) and hasattr(value, "__iter__"):
        for item in value:
            yield from tensors(item)


class Case(NamedTuple):
    """A step on a mesh and its arguments, as `fzero.simulate` takes them: state of all ranks, and batches of all ranks
    one behind the other."""

    step: Callable[..., Any]
    mesh: VirtualMesh
    args: tuple[Any, ...]

    @property
    def simulation(self) -> Any:
        """The step on every rank of the mesh, without passes."""
        return fzero.simulate(self.step, self.mesh, passes=())

    def trace(self) -> Program:
        """The step's program before any pass, its kinds resolved."""
        return self.simulation.trace(*self.args)

    def trace_as_written(self) -> Program:
        """The step's program, its kinds not looked at."""
        leaves, treedef = tree.flatten(self.args)
        args = tree.unflatten(treedef, self.simulation._select_rank(0, treedef, leaves))
        return trace.trace(self.step, args, self.mesh)

    def arguments(self) -> Outputs:
        """The tensors that each rank's program takes, fresh copies."""
        leaves, treedef = tree.flatten(self.args)
        return self.simulation._place_arguments(treedef, leaves)

    def run(self, program: Program, watch: lockstep.Watch | None = None) -> Outputs:
        """What each rank's `program` returns."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return lockstep.run(program, self.arguments(), watch)

    def unsharded(self) -> dict[str, Tensor]:
        """Path -> what the plain step returns for the whole batch."""
        result = self.step(*fzero.unpartition(self.args))
        return dict(zip(tree.paths(result), tree.leaves(result)))


def on_rows(step: Callable[..., Any], *params: tree.Tree, mesh: VirtualMesh = MESH, width: int = 5) -> Case:
    """`step(*params, x)`: trees of state, and `rows`."""
    return Case(step, mesh, (*(fzero.partition(tree, mesh) for tree in params), rows(mesh, width=width)))


def on_ones(step: Callable[..., Any], params: tree.Tree, mesh: VirtualMesh = MESH) -> Case:
    """`step(params, x)`, x [2, 4] of ones on each rank."""
    return Case(step, mesh, (fzero.partition(params, mesh), torch.ones(2 * mesh.size(), 4)))


def assert_same(got: Outputs, expected: Outputs) -> None:
    """Every rank's results are equal, bit for bit."""
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def apply(program: Program, *passes: Pass) -> Program:
    """What the passes make of a program, one after the other; each must leave a graph that is well formed."""
    for rewrite in passes:
        program = rewrite(program)
        program.graph.lint()
    return program


def check(case: Case, *passes: Pass) -> Program:
    """The program of a case after the passes. Asserts that every rank's results stay the same, bit for bit."""
    before = case.trace()
    program = apply(before, *passes)
    assert_same(case.run(program), case.run(before))
    return program


def moved(program: Program) -> list[str]:
    """Each collective in order as `"all_gather layers.0"`; of an all-reduce its axis."""
    return [f"{entry.op} {entry.bucket or entry.axis}" for entry in program.comm()]


def calls(program: Program, *targets: Any) -> list[fx.Node]:
    """The nodes that call one of these, in order."""
    return [node for node in program.graph.nodes if ops.is_call(node, *targets)]


def names(program: Program) -> list[str]:
    """The name of what each node calls, in order: "mm", "all_gather"."""
    return [name_of(node) for node in program.graph.nodes if node.op == "call_function"]


def most_gathered(program: Program) -> int:
    """How many gathered buckets are alive at once, at most: from the all-gather to the last use of what it gave."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node, start in find_origins(program.graph, "gathered").items():
        last[start] = max([last.get(start, 0), *(position[user] for user in node.users)])
    return max(sum(position[start] <= at <= end for start, end in last.items()) for at in position.values())


def whole(program: Program, outputs: Outputs) -> dict[str, Tensor]:
    """Path -> result, as one process would have it: state from the slices of all ranks along the shard axis, numbers as
    rank 0 has them, other tensors of all ranks one behind the other."""
    seats = lockstep.seats(program.mesh)
    slices = [seat.number for seat in seats if not any(map(seat.along, program.mesh.replica_axes))]
    values = {}
    for result, parts in zip(program.tensor_results, zip(*outputs), strict=True):
        layout = program.layouts[result.bucket] if result.bucket is not None else None
        if layout is not None and not layout.replicated:
            flat = torch.cat([parts[number] for number in slices])
            values[result.path] = flat.view(layout.leaves[result.leaf].shape)
        else:
            values[result.path] = parts[0] if layout is not None or not parts[0].ndim else torch.cat(parts)
    return values


def layers(count: int = 3, *, width: int = 5, seed: int = 0) -> tree.Tree:
    """`{"layers": [{"w": [width, width], "b": [width]}, ...]}`. At width 5 a layer is 30 elements, which 3 ranks hold
    as 16, 14 and 0, and 2 ranks as 16 and 14: alignment is 16."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "layers": [
            {"w": torch.randn(width, width, generator=draw), "b": torch.randn(width, generator=draw)}
            for _ in range(count)
        ]
    }


def rows(mesh: VirtualMesh, *, width: int = 5) -> Tensor:
    """[2 * ranks, width] a batch, two rows a rank."""
    draws = [torch.Generator().manual_seed(number) for number in range(mesh.size())]
    return torch.cat([torch.randn(2, width, generator=draw) for draw in draws])


def dense(layer: tree.Tree, x: Tensor) -> Tensor:
    """One layer of `layers`."""
    return torch.tanh(x @ layer["w"] + layer["b"])


def mlp(params: tree.Tree, x: Tensor) -> Tensor:
    """All layers, one behind the other."""
    return functools.reduce(lambda x, layer: dense(layer, x), params["layers"], x)


def loss(params: tree.Tree, x: Tensor) -> Tensor:
    """A mean over examples."""
    return mlp(params, x).square().mean()


def training(optimizer: optim.GradientTransformation, loss: Callable[..., Tensor] = loss) -> Callable[..., Any]:
    """`step(params, state, *batch) -> (params, state, loss)`."""

    def step(params: tree.Tree, state: Any, *batch: Tensor) -> tuple[tree.Tree, Any, Tensor]:
        value, grads = value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    return step


def trained(
    optimizer: optim.GradientTransformation,
    params: tree.Tree,
    mesh: VirtualMesh,
    loss: Callable[..., Tensor] = loss,
    *,
    width: int = 5,
) -> Case:
    """Training of `params` on `rows`."""

    held = fzero.partition(params, mesh)
    return Case(training(optimizer, loss), mesh, (held, optimizer.init(held), rows(mesh, width=width)))


def differentiated(loss: Callable[..., Tensor], params: tree.Tree, mesh: VirtualMesh, *, width: int = 5) -> Case:
    """The loss on `rows` and its gradient."""
    return on_rows(value_and_grad(loss), params, mesh=mesh, width=width)


def _clipped(mesh: VirtualMesh) -> Case:
    return trained(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1, weight_decay=0.1)), layers(), mesh)


def _odd(mesh: VirtualMesh) -> Case:
    """A layer used three times, a tied leaf, a scalar, an empty and an unused leaf, a cast and a penalty on slices."""
    params = {**layers(2), "scale": torch.tensor(0.5), "none": torch.zeros(0, 3), "unused": torch.ones(3)}

    def odd(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = params["layers"]
        for _ in range(3):
            x = dense(first, x)
        x = dense(second, x * params["scale"])
        x = (x @ first["w"].to(torch.bfloat16).float().T).square().mean()
        return x + 0.1 * second["w"].square().sum() + params["none"].sum()

    return trained(optim.sgd(0.1, momentum=0.9, nesterov=True), params, mesh, odd)


def _averaged(mesh: VirtualMesh) -> Case:
    """Two trees of one layout: parameters, and their moving average as a teacher."""

    def step(params: tree.Tree, average: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree, Tensor]:
        value, grads = value_and_grad(lambda p: (mlp(p, x) - mlp(average, x)).square().mean())(params)
        params = tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, tree.map(lambda a, p: torch.lerp(a, p, 0.5), average, params), value

    return on_rows(step, layers(), layers(seed=1), mesh=mesh)


def _unrolled(mesh: VirtualMesh) -> Case:
    """Two dependent steps in one, no result that is state, and one that is this rank's own."""

    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        params = tree.map(lambda p, g: p - 0.1 * g, params, grad(loss)(params, x))
        return loss(params, x), mlp(params, x)

    return on_rows(step, layers(), mesh=mesh)


STEPS: dict[str, Callable[[VirtualMesh], Case]] = {
    "clipped": _clipped, "odd": _odd, "averaged": _averaged, "unrolled": _unrolled
}  # fmt: skip
"""Steps on which every pass is tried."""


class Tried(NamedTuple):
    """One of `STEPS` on some ranks, its program before any pass, and what that returns."""

    case: Case
    program: Program
    outputs: Outputs


@functools.cache
def tried(name: str, world: int) -> Tried:
    """A step of `STEPS` on `world` ranks. Traced once: a pass leaves the program that it is given as it was."""
    case = STEPS[name](VirtualMesh(fsdp=world))
    program = case.trace()
    return Tried(case, program, case.run(program))


EVERY_STEP = [pytest.param(name, world, id=f"{name}-{world}") for name in STEPS for world in (1, 2, 3)]
"""`("name", "world")` of each step on 1, 2 and 3 ranks, for `pytest.mark.parametrize`."""
