"""Sharded steps against the same step on plain tensors and the whole batch: stages 1-3 on 1-4 virtual ranks, and on two
gloo ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from processes import Outcome, chosen, run_cases, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, gelu, linear

import fzero
from fzero import optim, tree

pytestmark = pytest.mark.usefixtures("shared_traces")

ROWS, WIDTH, STEPS = 24, 7, 5
MAX_NORM, RATE, EPS = 0.5, 0.02, 1e-3
LOSS_TOLERANCE = 1e-5
"""Relative; seen: 4e-7."""
STATE_TOLERANCE = 5e-6
"""Of a leaf's largest element; seen: 1e-6, while parameters move by 0.1.

Ranks sum gradients in another order, and the fused kernel rounds elsewhere: a dozen roundings of 6e-8 each. Clipping
keeps gradients below MAX_NORM, so they are off by some 2e-7 at most. Adam divides by the root of v, which would make a
step of RATE of a gradient that is all rounding; eps bounds that to RATE / EPS = 20 times the rounding, 4e-6 a step.
"""
BF16_TOLERANCE = 2**-7
"""Likewise, for leaves that are stored in bf16, and for what they make of the others: one unit in their last place. The
fused kernel rounds a step to bf16 once, the stages that it replaces each do."""

Batch = dict[str, Tensor]


class Job(NamedTuple):
    """A training job: what it starts from, its step, and how a step's result gives the next state arguments."""

    params: tree.Tree
    train_step: Callable[..., Any]  # (*state, batch) -> result
    start: Callable[[tree.Tree], tuple[tree.Tree, ...]]  # params -> state
    after: Callable[[tuple[tree.Tree, ...], Any], tuple[Any, tree.Tree]] = lambda _, result: (result[:-1], result[-1])
    """(state, result) -> (next state, outputs); outputs are a loss, or a tree with one in its first leaf."""
    options: dict[str, Any] = {}  # noqa: RUF012  of `shard`


class Trained(NamedTuple):
    """What came of a job: outputs of each step, and the state at the end, in full."""

    outputs: list[tree.Tree]
    state: tuple[tree.Tree, ...]


def adamw(rate: Any = RATE, **options: Any) -> optim.GradientTransformation:
    clip = optim.clip_by_global_norm(MAX_NORM)
    return optim.chain(clip, optim.adamw(rate, eps=EPS, weight_decay=0.1, **options))


def batch_at(step: int, rank: int = 0, world: int = 1) -> Batch:
    """This rank's rows of the whole batch of a step."""
    draw = torch.Generator().manual_seed(step)
    batch = {
        "x": torch.randn(ROWS, WIDTH, generator=draw),
        "y": torch.randn(ROWS, 3, generator=draw),
        "tokens": torch.randint(11, (ROWS, 5), generator=draw),
    }
    return {name: whole.chunk(world)[rank] for name, whole in batch.items()}


def train(job: Job, params: tree.Tree, step: Callable[..., Any], rank: int = 0, world: int = 1) -> Trained:
    state, outputs = job.start(params), []
    for number in range(STEPS):
        state, output = job.after(state, step(*state, batch_at(number, rank, world)))
        outputs.append(output)
    return Trained(outputs, fzero.unpartition(state))


def simple(
    loss: Callable[..., Tensor],
    params: tree.Tree,
    optimizer: Any = None,
    differentiate: Callable[..., Any] = fzero.value_and_grad,
    **options: Any,
) -> Job:
    """The job of the README: value_and_grad, update, apply_updates. Returns the norm of the gradient beside the loss:
    clipping and Adam would hide gradients that are all too large by one factor."""
    optimizer = optimizer or adamw()

    def train_step(params: tree.Tree, state: Any, batch: Batch) -> Any:
        value, grads = differentiate(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, [value, optim.global_norm(grads)]

    return Job(params, train_step, lambda params: (params, optimizer.init(params)), options=options)


# models


def normal(*shape: int, seed: int = 0, scale: float = 0.4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100 * len(shape) + sum(shape))) * scale


def mlp_params(depth: int = 2) -> tree.Tree:
    """Sizes that nothing divides: buckets of 56, 56 and 24 elements, on slices of multiples of 16."""
    layers = [{"w": normal(WIDTH, WIDTH, seed=i), "b": normal(WIDTH, seed=i)} for i in range(depth)]
    return {"layers": layers, "head": {"w": normal(WIDTH, 3), "b": normal(3)}}


def forward(params: tree.Tree, batch: Batch) -> Tensor:
    x = batch["x"]
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["w"] + layer["b"])
    return x @ params["head"]["w"] + params["head"]["b"]


def scanned(params: tree.Tree, batch: Batch) -> Tensor:
    """`squared`, with its layers in a loop."""

    def turn(x: Tensor, _: None, layer: tree.Tree) -> tuple[Tensor, None]:
        return x + torch.tanh(x @ layer["w"] + layer["b"]), None

    x, _ = fzero.scan(turn, batch["x"], layers=params["layers"])
    return (x @ params["head"]["w"] + params["head"]["b"] - batch["y"]).square().mean()


def squared(params: tree.Tree, batch: Batch) -> Tensor:
    return (forward(params, batch) - batch["y"]).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Bytes(nn.Module):
    """Embedding, blocks, head; a position table that is a buffer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.register_buffer("position", normal(4, 6, seed=3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# jobs


def lowered(tied: bool = False) -> Job:
    torch.manual_seed(0)
    params, apply = fzero.lower(Bytes(tied))
    assert ("head.weight" in tree.paths(params)) != tied

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        logits = apply(params, batch["tokens"][:, :-1])
        return cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    return simple(loss, params)


def pytree() -> Job:
    return simple(squared, mlp_params())


def containers() -> Job:
    """A NamedTuple, a tuple and a None among the parameters."""

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        (block, head), _ = params["all"], params["none"]
        return (torch.tanh(linear(batch["x"], block.w, block.b)) @ head[0] - batch["y"]).square().mean()

    params = {"all": (Linear(normal(9, WIDTH), normal(9)), [normal(9, 3)]), "none": None}
    return simple(loss, params)


class Linear(NamedTuple):
    w: Tensor
    b: Tensor


def thrice() -> Job:
    """One layer, used three times, between uses of another."""

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        shared, other = params["layers"]
        x = batch["x"]
        for layer in (shared, other, shared, other, shared):
            x = x + torch.tanh(x @ layer["w"] + layer["b"])
        return (x @ params["head"]["w"] + params["head"]["b"] - batch["y"]).square().mean()

    return simple(loss, mlp_params())


def frozen() -> Job:
    """Biases and a whole layer take no part in the gradient, nor in the optimizer's state."""
    optimizer = adamw()

    def train_step(params: tree.Tree, rest: tree.Tree, state: Any, batch: Batch) -> Any:
        value, grads = fzero.value_and_grad(lambda p, b: squared(tree.merge(p, rest), b))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    def start(params: tree.Tree) -> tuple[tree.Tree, ...]:
        chosen, others = tree.split(params, lambda path, _: path.endswith("w") and path != "layers.0.w")
        return chosen, others, optimizer.init(chosen)

    return Job(mlp_params(), train_step, start, lambda state, out: ((out[0], state[1], out[1]), out[2]))


def unused() -> Job:
    """A layer that the loss does not use, and one leaf of one that it does."""
    params = mlp_params()
    params["layers"].append({"w": normal(4, 5), "b": normal(4)})
    params["head"]["spare"] = normal(5)

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        return squared({**params, "layers": params["layers"][:2]}, batch)

    return simple(loss, params)


class Result(NamedTuple):
    loss: Tensor
    residual: Tensor
    note: str


def outputs(kind: str) -> Job:
    """A step that returns a dict, a tuple or a NamedTuple, with a tensor of this rank's rows and a constant."""
    optimizer = adamw()

    def loss(params: tree.Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        residual = forward(params, batch) - batch["y"]
        return residual.square().mean(), residual

    def train_step(params: tree.Tree, state: Any, batch: Batch) -> Any:
        (value, residual), grads = fzero.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        if kind == "dict":
            return {"state": {"params": params, "optimizer": state}, "metrics": {"a_loss": value, "rows": residual}}
        if kind == "tuple":
            return (params, (state, [value, residual, optim.global_norm(grads)]))
        return params, state, Result(value, residual, "done")

    def after(_: Any, result: Any) -> tuple[Any, tree.Tree]:
        if kind == "dict":
            return (result["state"]["params"], result["state"]["optimizer"]), result["metrics"]
        if kind == "tuple":
            return (result[0], result[1][0]), result[1][1]
        assert isinstance(result[2], Result) and result[2].note == "done"
        return result[:2], result[2]._replace(note=None)

    return Job(mlp_params(), train_step, lambda params: (params, optimizer.init(params)), after)


def penalty() -> Job:
    """Squares, norms, absolute values and a maximum of parameters inside the loss."""

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        weights = [layer["w"] for layer in params["layers"]]
        decay = sum(w.square().sum() for w in weights) + params["head"]["w"].norm() + weights[0].abs().mean()
        return squared(params, batch) + 0.03 * decay + 0.1 * params["head"]["b"].max() * weights[1].norm()

    return simple(loss, mlp_params())


def odd_leaves() -> Job:
    """0-d and zero-size leaves; a learnable scalar beside a slice; uniform full-shaped tensors beside a slice."""

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        causal = torch.ones(WIDTH, WIDTH).tril()
        layer = params["layers"][0]
        gated = params["gate"] * (layer["w"] * causal) + params["shift"].exp() * layer["w"].sigmoid()
        x = (
            torch.tanh(batch["x"] @ gated + layer["b"]) * params["gate"]
            + torch.cat([params["empty"].flatten()] * 2).sum()
        )
        return ((x @ params["head"]["w"] - batch["y"]) * params["shift"]).square().mean() + params["none"][0].sum()

    params = {**mlp_params(1), "gate": torch.tensor(0.7), "shift": torch.tensor(-0.4), "empty": normal(0, 3)}
    params["none"] = [normal(2, 0), torch.tensor(0.5)]  # a bucket of one element, between ranks that hold nothing
    return simple(loss, params)


def weighed_loss(params: tree.Tree, batch: Batch) -> Tensor:
    """Two losses, weighed by learnable 0-d leaves (Kendall et al., https://arxiv.org/abs/1705.07115)."""
    return weighed(params, *separate_losses(params, batch))


def separate_losses(params: tree.Tree, batch: Batch) -> list[Tensor]:
    residual = forward(params, batch) - batch["y"]
    return [residual.square().mean(), residual.abs().mean()]


def weighed(params: tree.Tree, first: Tensor, second: Tensor) -> Tensor:
    s, t = params["log_variances"]
    return first * torch.exp(-s) + s + second * torch.exp(-t) + t


def weighed_means(params: tree.Tree, batch: Batch) -> Tensor:
    """The same where nothing is differentiated: then a number that meets a 0-d leaf is uniform, for it may be state."""
    return weighed(params, *fzero.pmean(separate_losses(params, batch), "fsdp"))


def weighed_params() -> tree.Tree:
    return {**mlp_params(), "log_variances": [torch.tensor(0.3), torch.tensor(-0.2)]}


def mixed(**options: Any) -> Job:
    """bf16 and fp32 leaves in one layer; products are in fp32, so that only storing rounds to bf16."""
    params = mlp_params()
    for layer in params["layers"]:
        layer["w"] = layer["w"].bfloat16()

    def loss(params: tree.Tree, batch: Batch) -> Tensor:
        return squared(tree.map(lambda p: p.to(torch.float32), params), batch)

    return simple(loss, params, **options)


def accumulated() -> Job:
    """Gradients of two microbatches, averaged."""
    optimizer = adamw()

    def train_step(params: tree.Tree, state: Any, batch: Batch) -> Any:
        micro = [{name: rows.chunk(2)[i] for name, rows in batch.items()} for i in range(2)]
        results = [fzero.value_and_grad(squared)(params, part) for part in micro]
        grads = tree.map(lambda a, b: (a + b) / 2, results[0][1], results[1][1])
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, (results[0][0] + results[1][0]) / 2

    return Job(mlp_params(), train_step, lambda params: (params, optimizer.init(params)))


def momentum() -> Job:
    return simple(squared, mlp_params(), optim.sgd(0.02, 0.9, nesterov=True))


def scheduled() -> Job:
    schedule = optim.warmup_cosine_decay_schedule(0.0, 0.03, 2, 8, 0.001)
    return simple(squared, mlp_params(), adamw(schedule, mask=lambda path, leaf: leaf.ndim > 1))


def averaged() -> Job:
    """A moving average of the parameters, which at the first step *is* the parameters: one tree, given twice."""
    optimizer = adamw()

    def train_step(params: tree.Tree, average: tree.Tree, state: Any, batch: Batch) -> Any:
        value, grads = fzero.value_and_grad(squared)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        return params, tree.map(lambda a, p: a.lerp(p, 0.3), average, params), state, value

    return Job(mlp_params(), train_step, lambda params: (params, params, optimizer.init(params)))


def momentum_average() -> Job:
    """The same with SGD, whose state is updated by list operations and not by one kernel."""
    optimizer = optim.sgd(0.1, 0.9)

    def train_step(params: tree.Tree, average: tree.Tree, state: Any, batch: Batch) -> Any:
        value, grads = fzero.value_and_grad(squared)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        average = tree.map(lambda a, p: 0.7 * a + 0.3 * p, average, params)
        return optim.apply_updates(params, updates), average, state, value

    return Job(mlp_params(), train_step, lambda params: (params, params, optimizer.init(params)))


JOBS: dict[str, Callable[[], Job]] = {
    "a lowered module": lowered,
    "tied weights": functools.partial(lowered, tied=True),
    "a pytree": pytree,
    "a layer used three times": thrice,
    "frozen leaves": frozen,
    "unused parameters": unused,
    "a penalty on weights": penalty,
    "0-d and empty leaves": odd_leaves,
    "bf16 and fp32 in a layer": mixed,
    "0-d leaves weigh the loss": functools.partial(simple, weighed_loss, weighed_params()),
    "other containers": containers,
    "dict output": functools.partial(outputs, "dict"),
    "tuple output": functools.partial(outputs, "tuple"),
    "NamedTuple output": functools.partial(outputs, "NamedTuple"),
    "two microbatches": accumulated,
    "layers in a loop": functools.partial(simple, scanned, mlp_params(3)),
    "layers in a loop, donate=False": functools.partial(simple, scanned, mlp_params(3), donate=False),
    "sgd with momentum": momentum,
    "a schedule and a mask": scheduled,
    "a moving average": averaged,
    "a moving average with sgd": momentum_average,
    "donate=False": functools.partial(simple, squared, mlp_params(), donate=False),
    "passes=()": functools.partial(simple, squared, mlp_params(), passes=()),
    "bf16 and fp32, passes=()": functools.partial(mixed, passes=()),
}
AT_EVERY_STAGE = list(JOBS)[:9]
CELLS: dict[str, list[tuple[int, int]]] = {
    name: [
        *((2, stage) for stage in (1, 2, 3)),
        *((world, 1 + (i + world) % 3) for world in (1, 3)),
        *[(4, 3)][i % 2 :],
    ]
    if name in AT_EVERY_STAGE
    else [(2 + i % 2, 1 + i % 3)]
    for i, name in enumerate(JOBS)
}
"""Job -> (world, stage) of virtual ranks.

* Two ranks run the first jobs at every stage. One rank and three run each of them at one stage, in turns.
* Four ranks run half of them at stage 3.
* Jobs in which stage and number of ranks have no part run at one stage, on two ranks or on three, in turns.
"""
ON_RANKS = {name: 1 + i % 3 for i, name in enumerate(JOBS)}
"""Job -> stage of two real ranks, in turns. That real ranks have the bits of virtual ones is for test_simulation.py."""


def trained_on(mesh: DeviceMesh | fzero.VirtualMesh, name: str, stage: int) -> Trained:
    """The job at a stage: on one rank, or on all virtual ranks."""
    job = JOBS[name]()
    how = job.options if "passes" in job.options else {"stage": stage} | job.options
    params = fzero.partition(job.params, mesh)
    if isinstance(mesh, fzero.VirtualMesh):
        return train(job, params, fzero.simulate(job.train_step, mesh, **how))
    return train(job, params, fzero.shard(job.train_step, mesh, **how), mesh.get_rank(), mesh.size())


@functools.cache
def unsharded(name: str) -> Trained:
    """The same job on plain tensors and the whole batch."""
    job = JOBS[name]()
    return train(job, job.params, job.train_step)


@pytest.mark.parametrize("name", JOBS)
def test_the_plain_step_trains(name: str) -> None:
    """What the others are compared with is no standstill."""
    plain, job = unsharded(name), JOBS[name]()
    assert len({float(loss_of(outputs)) for outputs in plain.outputs}) == STEPS
    assert max(distance(after, before) for _, after, before in rows(plain.state[0], job.start(job.params)[0])) > 0.02


def test_clipping_is_active() -> None:
    norms = [outputs[2] for outputs in unsharded("tuple output").outputs]
    assert min(norms) > MAX_NORM


def loss_of(outputs: tree.Tree) -> Tensor:
    return tree.leaves(outputs)[0]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    names = chosen(request, "name") & set(JOBS)
    return run_cases(2, {name: functools.partial(trained_on, name=name, stage=ON_RANKS[name]) for name in names})


@pytest.mark.parametrize("name", JOBS)
def test_a_sharded_step_equals_the_plain_one(on_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert_as_plain(values(on_ranks[name]), name)


@pytest.mark.parametrize("name", JOBS)
def test_a_step_of_virtual_ranks_equals_the_plain_one(name: str) -> None:
    for world, stage in CELLS[name]:
        try:
            assert_as_plain([trained_on(fzero.VirtualMesh(fsdp=world), name, stage)], name)
        except Exception as error:
            raise AssertionError(f"{name} on {world} ranks at stage {stage}") from error


def assert_as_plain(ranks: list[Trained], name: str) -> None:
    """What ranks made of a job is what the plain step made of it."""
    plain, rounded = unsharded(name), name == "bf16 and fp32 in a layer"
    for step in range(STEPS):
        assert_outputs_agree(
            [rank.outputs[step] for rank in ranks], plain.outputs[step], BF16_TOLERANCE if rounded else LOSS_TOLERANCE
        )
    for path, *full, expected in rows(*(rank.state for rank in ranks), plain.state):
        assert all(torch.equal(other, full[0]) for other in full), f"{path} differs between ranks"
        tolerance = BF16_TOLERANCE if rounded else STATE_TOLERANCE
        assert distance(full[0], expected) <= tolerance, f"{path} is off by {distance(full[0], expected)}"


def assert_outputs_agree(ranks: list[tree.Tree], plain: tree.Tree, tolerance: float) -> None:
    """0-d outputs are the same on every rank; others are each rank's rows of the whole."""
    for path, *parts, expected in rows(*ranks, plain):
        if expected.ndim == 0:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{path} differs between ranks"
            assert abs(parts[0] - expected) <= tolerance * abs(expected), f"{path}: {parts[0]} against {expected}"
        else:
            assert distance(torch.cat(parts), expected) <= tolerance, path


def rows(*trees: tree.Tree) -> list[tuple[Any, ...]]:
    """`(path, leaf of each tree)` for each leaf."""
    assert all(tree.paths(other) == tree.paths(trees[0]) for other in trees)
    return list(zip(tree.paths(trees[0]), *map(tree.leaves, trees)))


def distance(got: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements, in units of the largest element expected."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if not expected.numel():
        return 0.0
    off = (got.double() - expected.double()).abs().max()
    return float(off / expected.abs().max()) if off else 0.0


# what stands beside the numbers, on two ranks


def with_grad(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda params, batch: (loss(params, batch), torch.func.grad(loss)(params, batch))


def with_grad_and_value(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda params, batch: torch.func.grad_and_value(loss)(params, batch)[::-1]


def with_vjp(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    def differentiated(params: tree.Tree, batch: Batch) -> Any:
        value, pull_back = torch.func.vjp(lambda params: loss(params, batch), params)
        return value, pull_back(torch.ones_like(value))[0]

    return differentiated


DIFFERENTIATORS = {"grad": with_grad, "grad_and_value": with_grad_and_value, "vjp": with_vjp}


def with_torch_func(mesh: DeviceMesh, name: str) -> Trained:
    """A job whose gradient is torch.func's own."""
    job = simple(penalized, mlp_params(), differentiate=DIFFERENTIATORS.get(name, fzero.value_and_grad))
    step = fzero.shard(job.train_step, mesh)
    return train(job, fzero.partition(job.params, mesh), step, mesh.get_rank(), mesh.size())


def penalized(params: tree.Tree, batch: Batch) -> Tensor:
    return squared(params, batch) + 0.1 * params["head"]["w"].norm() + (params["layers"][0]["b"] * 0.5).square().sum()


class Retraced(NamedTuple):
    """How often a step was traced after each of its calls, and what was logged meanwhile."""

    traces: list[int]
    messages: list[str]


def retracing(mesh: DeviceMesh) -> Retraced:
    """Four calls with one shape, one with another, one with the first again."""
    job, traces, counts, messages = pytree(), 0, [], []

    def train_step(params: tree.Tree, state: Any, batch: Batch) -> Any:
        nonlocal traces
        traces += 1
        return job.train_step(params, state, batch)

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fzero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    step = fzero.shard(train_step, mesh)
    state = job.start(fzero.partition(job.params, mesh))
    for number in range(6):
        batch = batch_at(number)
        *state, _ = step(*state, {name: x[:4] for name, x in batch.items()} if number == 4 else batch)
        counts.append(traces)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return Retraced(counts, messages)


class Donated(NamedTuple):
    """Messages of using donated state, its repr, and whether state that was not given away is as before."""

    messages: list[str]
    text: str
    kept: bool


def donating(mesh: DeviceMesh) -> Donated:
    job = frozen()
    state = job.start(fzero.partition(job.params, mesh))
    before = fzero.unpartition(state[1])
    step = fzero.shard(job.train_step, mesh)
    step(*state, batch_at(0))
    weight = state[0]["head"]["w"]
    uses = [
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: weight.full_tensor(),
        lambda: fzero.unpartition(state[0]),
        lambda: step(*state, batch_at(0)),
        lambda: tree.leaves(state[2])[-1].full_tensor(),
    ]
    kept = all(torch.equal(after, full) for _, after, full in rows(fzero.unpartition(state[1]), before))
    return Donated([refusal(use) for use in uses], repr(weight), kept)


def undonated(mesh: DeviceMesh) -> bool:
    """Whether without donation a step leaves its arguments as they were, and gives the same twice."""
    job = simple(squared, mlp_params(), donate=False)
    state = job.start(fzero.partition(job.params, mesh))
    step = fzero.shard(job.train_step, mesh, donate=False)
    results = [fzero.unpartition(step(*state, batch_at(0))) for _ in range(2)]
    kept = rows(fzero.unpartition(state[0]), job.params) + rows(*results)
    return all(torch.equal(a, b) for _, a, b in kept)


LOSSES = {
    "plain": (squared, mlp_params),
    "penalized": (penalized, mlp_params),
    "weighed": (weighed_means, weighed_params),
}


def evaluating(mesh: DeviceMesh, name: str) -> float:
    """A loss alone, without a gradient, of this rank's rows."""
    loss, params = LOSSES[name]
    evaluate = fzero.shard(loss, mesh)
    return float(evaluate(fzero.partition(params(), mesh), batch_at(0, mesh.get_rank(), mesh.size())))


def refusal(use: Callable[[], Any]) -> str:
    """The message of the FzeroError that `use` raises."""
    with pytest.raises(fzero.FzeroError) as caught:
        use()
    return str(caught.value)


def hybrid(mesh: DeviceMesh) -> Trained:
    """Two replicas of two slices each."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    job = penalty()
    step = fzero.shard(job.train_step, grid)
    return train(job, fzero.partition(job.params, grid), step, mesh.get_rank(), mesh.size())


BESIDE = {
    **{name: functools.partial(with_torch_func, name=name) for name in ("fzero", *DIFFERENTIATORS)},
    **{f"{name} loss": functools.partial(evaluating, name=name) for name in LOSSES},
    "retracing": retracing,
    "donating": donating,
    "undonated": undonated,
}


@pytest.fixture(scope="module")
def beside() -> dict[str, list[Outcome]]:
    return run_cases(2, BESIDE)


@pytest.mark.parametrize("name", DIFFERENTIATORS)
def test_torch_func_gives_the_same_bit_for_bit(beside: dict[str, list[Outcome]], name: str) -> None:
    for ours, theirs in zip(values(beside["fzero"]), values(beside[name])):
        for path, a, b in rows(ours, theirs):
            assert torch.equal(a, b), path


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_alone_is_that_of_all_rows(beside: dict[str, list[Outcome]], name: str) -> None:
    loss, params = LOSSES[name]
    assert values(beside[f"{name} loss"]) == pytest.approx([float(loss(params(), batch_at(0)))] * 2, LOSS_TOLERANCE)


def test_a_step_is_traced_once_a_shape_and_says_so(beside: dict[str, list[Outcome]]) -> None:
    for traces, messages in values(beside["retracing"]):
        messages = [text for text in messages if "s of tracing" not in text]  # which a slow machine says
        assert traces == [1, 1, 1, 1, 2, 2]
        assert len(messages) == 1 and "train_step" in messages[0] and "traced with open sizes" in messages[0]


def test_donated_state_is_refused_by_name(beside: dict[str, list[Outcome]]) -> None:
    for messages, text, kept in values(beside["donating"]):
        assert all("donated" in message and "donate=False" in message for message in messages)
        assert all(message.startswith("head.w: ") for message in messages[:4])
        assert "donated" in text and "head.w" in text
        assert kept, "frozen leaves, which no result replaces, were changed"


def test_without_donation_arguments_stay(beside: dict[str, list[Outcome]]) -> None:
    assert values(beside["undonated"]) == [True, True]


def test_a_mesh_of_two_axes_equals_the_plain_step() -> None:
    (ranks,) = run_cases(4, {"hybrid": hybrid}).values()
    plain = unsharded("a penalty on weights")
    for trained in values(ranks):
        for path, full, expected in rows(trained.state, plain.state):
            assert distance(full, expected) <= STATE_TOLERANCE, path
