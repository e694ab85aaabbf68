"""Programs without processes: steps traced for a virtual mesh and run for all of its ranks at once, node by node.

    case = Case(train_step, VirtualMesh(fsdp=3), lambda seat: (partition(params, seat), rows(seat)))
    program = case.trace()
    assert_same(case.run(bucket(program)), case.run(program))

Every op is performed as `fzero.ops` defines it. At the end stand the steps on which all passes are tried.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

from fzero import buffers, grad, kinds, ops, optim, tracing, tree, value_and_grad
from fzero.layout import wire
from fzero.mesh import VirtualMesh
from fzero.optim.kernels import fused_adamw_
from fzero.passes.order import gathered
from fzero.placement import Buckets, layouts, place
from fzero.program import Program
from fzero.sharded import Sharded

CPU = torch.device("cpu")
Pass = Callable[[Program], Program]
Outputs = list[list[Tensor]]
"""The tensors that a program returns, rank by rank."""


class Seat(NamedTuple):
    """One rank of a virtual mesh. It stands where a `Sharded` has its `Live`, and communicates with nobody."""

    mesh: VirtualMesh
    position: tuple[int, ...]  # along each axis
    number: int  # among all ranks of the mesh, row by row
    device: torch.device = CPU
    is_tracing: bool = False

    def along(self, axis: str) -> int:
        """This rank's position along an axis."""
        return self.position[self.mesh.names.index(axis)]

    @property
    def rank(self) -> int:
        """This rank's position along the axis that state is partitioned over."""
        return self.along(self.mesh.shard_axis)


def seats(mesh: VirtualMesh) -> list[Seat]:
    """The ranks of a mesh in order."""
    positions = itertools.product(*(range(mesh.size(axis)) for axis in mesh.names))
    return [Seat(mesh, position, number) for number, position in enumerate(positions)]


def partition(params: tree.Tree, seat: Seat, layers: Buckets | None = None) -> tree.Tree:
    """What `fzero.partition` makes of `params` on the rank at `seat`."""
    leaves, treedef = tree.flatten(params)
    sharded: dict[int, Sharded] = {}
    for layout, members in layouts(tree.keys(treedef), leaves, seat.mesh, layers):
        slices = place([leaves[i] for i in members], layout, seat)
        sharded.update((i, Sharded(x, layout, index, seat)) for index, (i, x) in enumerate(zip(members, slices)))
    return tree.unflatten(treedef, [sharded[i] for i in range(len(leaves))])


class Case(NamedTuple):
    """A step, and the arguments that each rank of a mesh calls it with: `given(seat)`."""

    step: Callable[..., Any]
    mesh: VirtualMesh
    given: Callable[[Seat], tuple[Any, ...]]

    def trace(self) -> Program:
        """The step's program before any pass, its kinds resolved."""
        return kinds.resolve(self.trace_as_written())

    def trace_as_written(self) -> Program:
        """The step's program, its kinds not looked at."""
        return tracing.trace(self.step, self.given(seats(self.mesh)[0]), self.mesh)

    def run(self, program: Program) -> Outputs:
        """What each rank's `program` returns."""
        return run(program, [_tensors(self.given(seat)) for seat in seats(self.mesh)])

    def unsharded(self) -> dict[str, Tensor]:
        """Path -> what the plain step returns for the batches of all ranks, one behind the other."""
        (alone,) = seats(VirtualMesh(fsdp=1))
        leaves, treedef = tree.flatten(self.given(alone))
        batches = zip(*(tree.leaves(self.given(seat)) for seat in seats(self.mesh)))
        whole = [
            leaf.local.view(leaf.shape) if isinstance(leaf, Sharded) else torch.cat(batch)
            for leaf, batch in zip(leaves, batches)
        ]
        result = self.step(*tree.unflatten(treedef, whole))
        return dict(zip(tree.paths(result), tree.leaves(result)))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    leaves = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in tree.leaves(args)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


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


def moved(program: Program) -> list[str]:
    """Each collective in order as `"all_gather layers.0"`; of an all-reduce its axis."""
    return [f"{entry.op} {entry.bucket or entry.axis}" for entry in program.comm()]


def calls(program: Program, *targets: Any) -> list[fx.Node]:
    """The nodes that call one of these, in order."""
    return [node for node in program.graph.nodes if ops.is_call(node, *targets)]


def names(program: Program) -> list[str]:
    """The name of what each node calls, in order: "mm", "all_gather"."""
    return [ops.name_of(node) for node in program.graph.nodes if node.op == "call_function"]


def most_gathered(program: Program) -> int:
    """How many gathered buckets are alive at once, at most: from the all-gather to the last use of what it gave."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node, start in gathered(program.graph).items():
        last[start] = max([last.get(start, 0), *(position[user] for user in node.users)])
    return max(sum(position[start] <= at <= end for start, end in last.items()) for at in position.values())


def whole(program: Program, outputs: Outputs) -> dict[str, Tensor]:
    """Path -> result, as one process would have it: state from the slices of all ranks along the shard axis, numbers as
    rank 0 has them, other tensors of all ranks one behind the other."""
    slices = [seat.number for seat in seats(program.mesh) if sum(seat.position) == seat.rank]  # 0 along other axes
    tensors = [result for result in program.results if not result.is_constant]
    values = {}
    for result, parts in zip(tensors, zip(*outputs), strict=True):
        layout = program.layouts[result.bucket] if result.bucket is not None else None
        if layout is not None and not layout.replicated:
            flat = torch.cat([parts[number] for number in slices])
            values[result.path] = flat.view(layout.leaves[result.leaf].shape)
        else:
            values[result.path] = parts[0] if layout is not None or not parts[0].ndim else torch.cat(parts)
    return values


def run(program: Program, arguments: Sequence[Sequence[Tensor]]) -> Outputs:
    """What each rank returns, given its arguments, which are left as they are."""
    given = [copy.deepcopy(list(tensors)) for tensors in arguments]  # keeps what shares memory sharing it
    known: list[dict[fx.Node, Any]] = [dict(zip(program.placeholders, tensors, strict=True)) for tensors in given]
    ranks = Ranks(program)
    for node in program.graph.nodes:
        if node.op == "get_attr":
            results = [program.constants[node.target] for _ in known]
        elif node.op == "call_function":
            results = ranks.call(node, [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in known])
        else:
            continue
        for values, result in zip(known, results, strict=True):
            values[node] = result
    return [list(fx.map_arg(program.output.args[0], values.__getitem__)) for values in known]


class _Pending(NamedTuple):
    """A started communication: its result, what it reads, and what that was at the start."""

    result: Tensor
    sent: Tensor
    before: Tensor


_EXCHANGES = {ops.gather, ops.scatter, ops.all_reduce, ops.all_gather, ops.reduce_scatter, ops.all_reduce_list}


class Ranks:
    """All ranks of a program's mesh. Methods are named as `ops`.

    An exchange takes, as its first argument, what each rank gives; the rest is the same on all of them, and it returns
    a result a rank. Every other method is one rank's. Memory is shared where it is on a live mesh: what one rank
    gathers alone is a view of its slices.
    """

    def __init__(self, program: Program) -> None:
        self.layouts, self.mesh, self.seats = program.layouts, program.mesh, seats(program.mesh)
        self.random = [torch.Generator().manual_seed(seat.number).get_state() for seat in self.seats]

    def call(self, node: fx.Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """What a node gives on each rank, called with each rank's arguments."""
        if node.target in _EXCHANGES:
            return getattr(self, ops.name_of(node))([args[0] for args, _ in calls], *calls[0][0][1:])
        if node.target in ops.FAKES:
            perform = getattr(self, ops.name_of(node))
            return [perform(seat, *args, **kwargs) for seat, (args, kwargs) in zip(self.seats, calls)]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return [self._draw(seat.number, node, *call) for seat, call in zip(self.seats, calls)]
        return [node.target(*args, **kwargs) for args, kwargs in calls]

    def _draw(self, number: int, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random[number])
            result = node.target(*args, **kwargs)
            self.random[number] = torch.get_rng_state()
        return result

    def _rows(self, axis: str) -> Iterator[list[int]]:
        """The numbers of the ranks that communicate along an axis: those whose other positions are equal."""
        along = self.mesh.names.index(axis)
        rows: dict[tuple[int, ...], list[int]] = {}
        for seat in self.seats:
            rows.setdefault((*seat.position[:along], *seat.position[along + 1 :]), []).append(seat.number)
        yield from rows.values()

    def gather(self, slices: list[Tensor], bucket: str, leaf: int, shape: Sequence[int]) -> list[Tensor]:
        fulls = dict[int, Tensor]()
        for row in self._rows(self.mesh.shard_axis):
            full = torch.cat([slices[number] for number in row]).view(shape)
            fulls.update((number, full.clone()) for number in row)
        return [fulls[seat.number] for seat in self.seats]

    def scatter(self, fulls: list[Tensor], bucket: str, leaf: int, numel: int) -> list[Tensor]:
        mean = _reduced([full.reshape(-1) for full in fulls], "avg")
        return [self.take(seat, mean, bucket, leaf, numel).clone() for seat in self.seats]

    def all_reduce(self, values: list[Tensor], op: str, axis: str) -> list[Tensor]:
        reduced = dict[int, Tensor]()
        for row in self._rows(axis):
            result = _reduced([values[number] for number in row], op)
            reduced.update((number, result.clone()) for number in row)
        return [reduced[seat.number] for seat in self.seats]

    def all_reduce_list(self, values: list[Sequence[Tensor]], op: str, axis: str) -> list[list[Tensor]]:
        columns = [self.all_reduce(list(column), op, axis) for column in zip(*values)]
        return [list(row) for row in zip(*columns)]

    def all_gather(self, slices: list[Sequence[Tensor]], bucket: str, leaves: Sequence[int], numel: int) -> list[Any]:
        blocks = [buffers.block_of(given, wire(self.layouts[bucket], tuple(leaves))) for given in slices]
        pending = dict[int, _Pending]()
        for row in self._rows(self.mesh.shard_axis):
            together = [blocks[number] for number in row]
            for number in row:
                buffer = torch.cat(together) if len(row) > 1 else together[0]
                parts = sum(x.numel() for x in slices[number])  # behind them a block may hold what lies next to it
                pending[number] = _started(buffer, blocks[number][:parts])
        return [pending[seat.number] for seat in self.seats]

    def reduce_scatter(
        self, fulls: list[Sequence[Tensor]], bucket: str, leaves: Sequence[int], numel: int
    ) -> list[Any]:
        sent = [buffers.blocks_of(given, wire(self.layouts[bucket], tuple(leaves))) for given in fulls]
        if len(sent) == 1:
            return [_started(sent[0], sent[0])]
        blocks = _reduced(sent, "avg").view(-1, numel)
        return [_started(blocks[seat.rank].clone(), sent[seat.number]) for seat in self.seats]

    def wait(self, seat: Seat, pending: _Pending) -> Tensor:
        """The result. Nothing may write to what is sent while it is on its way."""
        assert torch.equal(pending.sent, pending.before), "written to before it was sent"
        return pending.result

    def whole(
        self, seat: Seat, buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]
    ) -> Tensor:
        return buffers.whole(buffer, wire(self.layouts[bucket], tuple(leaves)), position, shape)

    def part(self, seat: Seat, block: Tensor, bucket: str, leaves: Sequence[int], position: int, numel: int) -> Tensor:
        return buffers.part(block, wire(self.layouts[bucket], tuple(leaves)), seat.rank, position)

    def take(self, seat: Seat, full: Tensor, bucket: str, leaf: int, numel: int) -> Tensor:
        part = self.layouts[bucket].part(leaf, seat.rank)
        return full.reshape(-1)[part.start : part.stop]

    def beside(self, seat: Seat, x: Tensor) -> Tensor:
        return x.clone()

    def spread(self, seat: Seat, x: Tensor, like: Tensor) -> Tensor:
        return x.expand(like.shape).clone()

    def axis_index(self, seat: Seat, axis: str, device: torch.device) -> Tensor:
        return torch.tensor(seat.along(axis), device=device)

    def adamw(self, seat: Seat, *args: Any) -> tuple[list[Tensor], ...]:
        params, grads, mu, nu = ([x.clone() for x in column] for column in args[:4])
        fused_adamw_(params, grads, mu, nu, *args[4:])
        return params, mu, nu

    def adamw_(self, seat: Seat, *args: Any) -> None:
        fused_adamw_(*args)


def _started(result: Tensor, sent: Tensor) -> _Pending:
    return _Pending(result, sent, sent.clone())


def _reduced(values: Sequence[Tensor], op: str) -> Tensor:
    """The values of all ranks to one, in rank order."""
    join = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = functools.reduce(join, values).clone()
    return total / len(values) if op == "avg" else total


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


def rows(seat: Seat, *, width: int = 5) -> Tensor:
    """[2, width] this rank's part of a batch."""
    return torch.randn(2, width, generator=torch.Generator().manual_seed(seat.number))


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

    def given(seat: Seat) -> tuple[Any, ...]:
        held = partition(params, seat)
        return held, optimizer.init(held), rows(seat, width=width)

    return Case(training(optimizer, loss), mesh, given)


def differentiated(loss: Callable[..., Tensor], params: tree.Tree, mesh: VirtualMesh, *, width: int = 5) -> Case:
    """The loss on `rows` and its gradient."""
    return Case(value_and_grad(loss), mesh, lambda seat: (partition(params, seat), rows(seat, width=width)))


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

    return Case(step, mesh, lambda seat: (partition(layers(), seat), partition(layers(seed=1), seat), rows(seat)))


def _unrolled(mesh: VirtualMesh) -> Case:
    """Two dependent steps in one, no result that is state, and one that is this rank's own."""

    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        params = tree.map(lambda p, g: p - 0.1 * g, params, grad(loss)(params, x))
        return loss(params, x), mlp(params, x)

    return Case(step, mesh, lambda seat: (partition(layers(), seat), rows(seat)))


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
