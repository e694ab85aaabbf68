"""One seed: its model, mesh and options, and whether ranks train it as one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, optim, tree
from property_tests.random_axes.layers import WHOLE, WIDTH, Apply, draw_layer, finish, wrap

F64 = torch.float64
ROWS = 24
"""Rows of each data rank: divide by the ranks along the model axes, also in two microbatches."""
MESHES: tuple[tuple[dict[str, int], Any], ...] = (
    ({"fsdp": 2, "tp": 2}, "tp"),
    ({"tp": 3, "fsdp": 2}, "tp"),
    ({"fsdp": 1, "tp": 4}, "tp"),
    ({"replica": 2, "fsdp": 2, "tp": 2}, "tp"),
    ({"a": 2, "fsdp": 2, "b": 2}, ("a", "b")),
    ({"a": 2, "fsdp": 2, "b": 2}, ("b",)),
    ({"fsdp": 3, "tp": 1}, "tp"),
)
"""The axes of a mesh, and those along which ranks have parts."""


OPTIMIZERS = {
    "adamw": optim.adamw(0.01),
    "muon": optim.muon(0.01, eps=1e-3, where=lambda path, leaf: leaf.ndim == 2),
    "adafactor": optim.adafactor(0.01, eps=(1e-9, 1e-3)),  # a gradient that is zero but for rounding stays so
}


LENGTHS = ((ROWS, ROWS), (ROWS, ROWS), (ROWS, ROWS // 2, ROWS + ROWS // 2))
"""The rows that each data rank has in the steps of a training: of three lengths the last two share a program."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {}, {"chunk": 512}, {"to": fzero.host()}, {"donate": False}, {"to": fzero.host(), "chunk": 1024},
)  # fmt: skip
"""Options of a step beside its stage, and `to`, where parameters and state lie."""


@dataclass(frozen=True)
class Case:
    """A seed's model."""

    seed: int
    mesh: VirtualMesh
    axes: Any
    options: dict[str, Any]
    kind: str
    names: tuple[str, ...]
    splits: dict[str, tuple[Any, ...]]
    state: tuple[str, ...] | None
    params: dict[str, Tensor]
    x: Tensor
    batches: tuple[Tensor, ...]
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: str

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.mesh.lay_state(self.state)}, parts along {self.axes}, {self.options}, {self.kind}"
        ]
        lines += [f"  {self.optimizer}"] * (self.kind == "train")
        return "\n".join([*lines, *(f"  {name}" for name in self.names), f"  split: {self.splits}"])


def draw_case(seed: int) -> Case:
    draw, more = Random(seed), Random(f"{seed} more")  # seeds keep what `draw` draws
    sizes, axes = draw.choice(MESHES)
    if "b" in sizes and axes == ("b",):
        sizes = {"fsdp": 2, "b": 2}
    has, names, chain, shapes, splits = WHOLE, list[str](), list[Apply](), dict[str, Any](), dict[str, Any]()
    for number in range(draw.randint(1, 6)):
        layer = draw_layer(draw, more, number, has, axes)
        names.append(layer.name)
        chain.append(layer.apply)
        shapes |= layer.shapes
        splits |= layer.splits
        has = layer.after
    name, forward = wrap(draw, lambda params, x: _apply(chain, params, x), has is WHOLE)
    names.append(name or "plain")
    is_summed, kind = draw.random() < 0.5, draw.choice(["train", "train", "microbatches", "second", "forward"])
    generator = torch.Generator().manual_seed(seed)
    shapes.setdefault("w", (WIDTH,))  # a model has a parameter
    params = {key: torch.randn(shape, dtype=F64, generator=generator) / 3 for key, shape in sorted(shapes.items())}
    mesh = VirtualMesh(**sizes)
    ranks = mesh.size() // mesh.size(mesh.join((axes,) if isinstance(axes, str) else axes))
    x = torch.randn(ranks * ROWS, WIDTH, dtype=F64, generator=generator)

    def loss(params: Any, x: Tensor) -> Tensor:
        return finish(forward(params, x * params["w"]), has, axes, is_summed)

    options: dict[str, Any] = {"stage": draw.choice([1, 2, 3])} | more.choice(OPTIONS)
    optimizer = draw.choice(list(OPTIMIZERS))
    batches = tuple(_take_rows(x, ranks, rows) for rows in more.choice(LENGTHS))
    state = Random(f"{seed} state").choice([None, None, mesh.names, tuple(axis for axis in mesh.names if axis != "a")])
    return Case(seed, mesh, axes, options, kind, tuple(names), splits, state, params, x, batches, loss, optimizer)


def _take_rows(x: Tensor, ranks: int, rows: int) -> Tensor:
    """So many rows of each data rank, from a batch of `ROWS`."""
    return x.unflatten(0, (ranks, ROWS)).repeat(1, 2, 1)[:, :rows].flatten(0, 1)


def _apply(chain: list[Apply], params: Any, x: Tensor) -> Tensor:
    for apply in chain:
        x = apply(params, x)
    return x


def _choose_optimizer(case: Case) -> optim.GradientTransformation:
    chosen = OPTIMIZERS[case.optimizer]
    return optim.chain(optim.clip_by_global_norm(0.5), chosen)


def _train(case: Case) -> Callable[..., Any]:
    optimizer = _choose_optimizer(case)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(case.loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return tree.map(torch.add, params, updates), state, loss

    return step


def _derive(case: Case) -> Callable[..., Any]:
    """A function of parameters and a batch, by the kind of a case."""

    def sums(params: Any, x: Tensor) -> Any:
        return case.loss(params, x) * len(x), torch.tensor(len(x))

    def norm(params: Any, x: Tensor) -> Tensor:
        return sum(g.square().sum() for g in tree.leaves(fzero.grad(case.loss)(params, x)))

    def forward(params: Any, x: Tensor) -> Tensor:
        ones = tree.map(torch.ones_like, params)
        return torch.func.jvp(lambda params: case.loss(params, x), (params,), (ones,))[1]

    by_kind = {"microbatches": fzero.accumulate(sums, 2), "second": fzero.grad(norm), "forward": forward}
    return by_kind[case.kind]


def run_on_ranks(case: Case, simulate: Callable[..., Any] = fzero.simulate) -> Any:
    options = dict(case.options)
    to = options.pop("to", None)
    held = fzero.partition(case.params, case.mesh, split=case.splits, state=case.state, to=to)
    names = case.axes if isinstance(case.axes, tuple) else (case.axes,)
    data = tuple(axis for axis in case.mesh.names if axis not in names)
    if case.kind != "train":
        step = simulate(lambda *given: _derive(case)(*given), case.mesh, data=data, **options)
        return fzero.unpartition(step(held, case.x))
    step, state = (
        simulate(_train(case), case.mesh, data=data, **options),
        _choose_optimizer(case).init(held, to=to),
    )
    for x in case.batches:
        held, state, loss = step(held, state, x)
    return fzero.unpartition((held, state, loss))


def run_alone(case: Case, axis_ranks: int) -> Any:
    """The same on one device: the loss is the mean over what data ranks have, as each of them sees its rows alone."""
    chunks = case.x.chunk(axis_ranks)

    def loss(params: Any, x: Tensor) -> Tensor:
        rows = x.chunk(axis_ranks)
        return sum(case.loss(params, each) for each in rows) / len(rows)

    alone = Case(**{**vars(case), "loss": loss})
    if case.kind == "train":
        params, state = case.params, _choose_optimizer(case).init(case.params)
        for x in case.batches:
            params, state, value = _train(alone)(params, state, x)
        return params, state, value
    if case.kind == "microbatches":  # a turn takes the n-th rows of each rank
        halves = [torch.cat([chunk.chunk(2)[turn] for chunk in chunks]) for turn in range(2)]
        found = [fzero.value_and_grad(loss)(case.params, half) for half in halves]
        return tree.map(lambda *each: sum(each) / 2, *found)
    return _derive(alone)(case.params, case.x)


def judge(seed: int) -> tuple[int, str, str]:
    """`(seed, verdict, detail)`: equal, refused, wrong or raw."""
    torch.set_num_threads(1)
    case = draw_case(seed)
    names = case.axes if isinstance(case.axes, tuple) else (case.axes,)
    ranks = case.mesh.size() // case.mesh.size(case.mesh.join(names))
    try:
        got = run_on_ranks(case)
    except FzeroError as error:
        return seed, "refused", str(error)
    except Exception as error:
        return seed, "raw", f"{type(error).__name__}: {error}"
    expected = run_alone(case, ranks)
    try:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    except AssertionError as error:
        return seed, "wrong", str(error)[:300]
    return seed, "equal", ""
