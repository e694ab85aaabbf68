"""Every optimizer and stage of `fzero.optim`, sharded: as the same step on plain tensors and the whole batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import Outcome, run_cases, values
from programs import layers, mlp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.checkpoint import load, save

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH, STEPS, WIDTH, MAX_NORM = VirtualMesh(fsdp=3), 3, 5, 0.2
SGD_RATE, ADAM_RATE, EPS = 1.0, 0.1, 0.1
TOLERANCE = 6
"""In units of the dtype's eps, for results of size about 1; seen: 2.1.

In each of 3 steps a parameter of size up to 2 is rounded on both sides, each time by up to 1 eps. A gradient below 0.5
is off by a dozen roundings of eps / 2 of it, since ranks add up in another order. SGD multiplies that by SGD_RATE, Adam
by at most ADAM_RATE / EPS: both are 1. Parameters move by far more than that, which the test checks.
"""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def is_matrix(path: str, leaf: Any) -> bool:
    return leaf.ndim > 1


def scheduled(schedule: optim.base.Schedule) -> optim.GradientTransformation:
    return optim.sgd(schedule, momentum=0.5)


PRESETS: dict[str, optim.GradientTransformation] = {
    "sgd": optim.sgd(SGD_RATE),
    "sgd, momentum": optim.sgd(SGD_RATE, momentum=0.5),
    "sgd, nesterov": optim.sgd(SGD_RATE, momentum=0.5, nesterov=True),
    "adam": optim.adam(ADAM_RATE, eps=EPS),
    "adamw": optim.adamw(ADAM_RATE, eps=EPS, weight_decay=0.1, mask=is_matrix),
}
"""Whole optimizers: name -> optimizer. A name begins with that of a public function."""

OTHERS: dict[str, optim.GradientTransformation] = {
    "sgd, decay": optim.sgd(SGD_RATE, momentum=0.5, weight_decay=0.1, mask=is_matrix),
    "adam, decay": optim.adam(ADAM_RATE, eps=EPS, weight_decay=0.1),
    "adam, narrow": optim.cast_state(optim.adam(ADAM_RATE, eps=EPS), torch.bfloat16),
    "adagrad": optim.adagrad(ADAM_RATE, eps=EPS, weight_decay=0.1),
    "adagrad, lr_decay": optim.adagrad(ADAM_RATE, 0.5, eps=EPS),
    "amsgrad": optim.amsgrad(ADAM_RATE, eps=EPS, weight_decay=0.1, mask=is_matrix),
    "nadam": optim.nadam(ADAM_RATE, eps=EPS),
    "rmsprop": optim.rmsprop(ADAM_RATE, 0.5, EPS, momentum=0.5),
    "rmsprop, centered": optim.rmsprop(ADAM_RATE, 0.5, EPS, centered=True),
    "lion": optim.lion(ADAM_RATE, weight_decay=0.1, mask=is_matrix),
    "lamb": optim.lamb(ADAM_RATE, eps=EPS),
    "adafactor": optim.adafactor(ADAM_RATE, eps=(EPS, 1e-3), weight_decay=0.1),
    "schedule_free": optim.schedule_free(optim.sgd(SGD_RATE), SGD_RATE),
}
"""Whole optimizers that are tried at every stage, and at stage 3 with and without donation; the rest takes turns."""

STAGES: dict[str, optim.GradientTransformation] = {
    "identity": optim.chain(optim.identity(), optim.scale(-SGD_RATE)),
    "stateless": optim.stateless(lambda updates, params: tree.map(lambda g: -SGD_RATE * g, updates)),
    "chain": optim.chain(optim.chain(optim.trace(0.5), optim.scale(2.0)), optim.scale(-0.5 * SGD_RATE)),
    "scale": optim.scale(-SGD_RATE),
    "scale_by_adam": optim.chain(optim.scale_by_adam(eps=EPS), optim.scale(-ADAM_RATE)),
    "scale_by_amsgrad": optim.chain(optim.scale_by_amsgrad(eps=EPS), optim.scale(-ADAM_RATE)),
    "scale_by_learning_rate": optim.scale_by_learning_rate(SGD_RATE),
    "scale_by_schedule": optim.scale_by_schedule(lambda count: -SGD_RATE / (1.0 + count)),
    "trace": optim.chain(optim.trace(0.5, nesterov=True), optim.scale(-SGD_RATE)),
    "add_decayed_weights": optim.chain(optim.add_decayed_weights(0.1), optim.scale(-SGD_RATE)),
    "clip_by_global_norm": optim.chain(optim.clip_by_global_norm(0.5 * MAX_NORM), optim.scale(-SGD_RATE)),
    "cast_state": optim.cast_state(optim.sgd(SGD_RATE, momentum=0.5), torch.float32),
    "scale_by_factored_rms": optim.chain(optim.scale_by_factored_rms(eps=EPS), optim.scale(-ADAM_RATE)),
    "scale_by_lion": optim.chain(optim.scale_by_lion(), optim.scale(-ADAM_RATE)),
    "scale_by_nadam": optim.chain(optim.scale_by_nadam(eps=EPS), optim.scale(-ADAM_RATE)),
    "scale_by_param_block_rms": optim.chain(optim.scale_by_param_block_rms(), optim.scale(-SGD_RATE)),
    "scale_by_rms": optim.chain(optim.scale_by_rms(0.5, EPS), optim.scale(-ADAM_RATE)),
    "scale_by_rss": optim.chain(optim.scale_by_rss(0.1, EPS), optim.scale(-ADAM_RATE)),
    "scale_by_stddev": optim.chain(optim.scale_by_stddev(0.5, EPS), optim.scale(-ADAM_RATE)),
    "scale_by_trust_ratio": optim.chain(optim.scale_by_trust_ratio(), optim.scale(-ADAM_RATE)),
    "constant_schedule": scheduled(optim.constant_schedule(SGD_RATE)),
    "linear_schedule": scheduled(optim.linear_schedule(SGD_RATE, 0.5 * SGD_RATE, 2)),
    "cosine_decay_schedule": scheduled(optim.cosine_decay_schedule(SGD_RATE, 5)),
    "warmup_cosine_decay_schedule": scheduled(optim.warmup_cosine_decay_schedule(0.5, SGD_RATE, 1, 5)),
    "join_schedules": scheduled(
        optim.join_schedules([optim.constant_schedule(SGD_RATE), optim.constant_schedule(0.5)], [1])
    ),
    "polynomial_schedule": scheduled(optim.polynomial_schedule(SGD_RATE, 0.5, 2, 3)),
    "exponential_decay": scheduled(optim.exponential_decay(SGD_RATE, 2, 0.5, staircase=True)),
    "inverse_sqrt_schedule": scheduled(optim.inverse_sqrt_schedule(SGD_RATE, 2)),
    "sqrt_decay_schedule": scheduled(optim.sqrt_decay_schedule(SGD_RATE, 0.5, 3)),
    "piecewise_constant_schedule": scheduled(optim.piecewise_constant_schedule(SGD_RATE, {1: 0.5})),
    "piecewise_interpolate_schedule": scheduled(optim.piecewise_interpolate_schedule("cosine", SGD_RATE, {2: 0.5})),
    "linear_onecycle_schedule": scheduled(optim.linear_onecycle_schedule(4, SGD_RATE)),
    "cosine_onecycle_schedule": scheduled(optim.cosine_onecycle_schedule(4, SGD_RATE)),
    "sgdr_schedule": scheduled(
        optim.sgdr_schedule([{"init_value": 0.5, "peak_value": SGD_RATE, "warmup_steps": 1, "decay_steps": 2}] * 2)
    ),
    "warmup_constant_schedule": scheduled(optim.warmup_constant_schedule(0.5, SGD_RATE, 2)),
    "warmup_exponential_decay_schedule": scheduled(optim.warmup_exponential_decay_schedule(0.5, SGD_RATE, 1, 2, 0.5)),
    "warmup_inverse_sqrt_schedule": scheduled(optim.warmup_inverse_sqrt_schedule(0.5, SGD_RATE, 1)),
    "warmup_stable_decay_schedule": scheduled(optim.warmup_stable_decay_schedule(0.5, SGD_RATE, 1, 1, 2)),
    "clip": optim.chain(optim.clip(0.05), optim.scale(-SGD_RATE)),
    "clip_by_block_rms": optim.chain(optim.clip_by_block_rms(0.02), optim.scale(-3 * SGD_RATE)),
    "ema": optim.chain(optim.ema(0.5), optim.scale(-SGD_RATE)),
    "apply_if_finite": optim.apply_if_finite(optim.adamw(ADAM_RATE, eps=EPS), 2),
    "inject_hyperparams": optim.inject_hyperparams(optim.adamw)(
        ADAM_RATE, b1=optim.linear_schedule(0.8, 0.9, 3), eps=EPS
    ),
    "masked": optim.chain(optim.masked(optim.trace(0.5), is_matrix), optim.scale(-SGD_RATE)),
    "multi_transform": optim.multi_transform(
        {True: optim.sgd(SGD_RATE, momentum=0.5), False: optim.adam(ADAM_RATE, eps=EPS)}, is_matrix
    ),
    "set_to_zero": optim.multi_transform(
        {True: optim.set_to_zero(), False: optim.sgd(SGD_RATE)}, lambda path, leaf: path.endswith("b")
    ),
}
"""Stages and schedules: the name of the public function -> an optimizer that has it."""

OPTIMIZERS = PRESETS | OTHERS | STAGES

SIGNS, WIDE = {"lion", "scale_by_lion"}, torch.float64
"""Their updates are signs, which rounding turns over where a sum is nearly zero: they are compared in float64."""


class Cell(NamedTuple):
    """One way to run an optimizer."""

    name: str
    dtype: torch.dtype = torch.float32
    is_clipped: bool = True
    stage: int = 3
    donate: bool = True

    def __str__(self) -> str:
        clipped, donated = "clipped" if self.is_clipped else "free", "donated" if self.donate else "kept"
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}-{clipped}-{self.stage}-{donated}"


def cells() -> Iterator[Cell]:
    """Presets in each dtype at every stage, at stage 3 with and without donation. Other optimizers at every stage. A
    schedule, which knows nothing of ranks, at one stage. The rest takes turns."""
    for number, (name, dtype) in enumerate(itertools.product(PRESETS, DTYPES)):
        for stage, donate in (1, number % 2 == 0), (2, number % 2 == 1), (3, True), (3, False):
            yield Cell(name, dtype, (number + number // 4) % 2 == 0, stage, donate)
    for number, (name, stage) in enumerate(itertools.product(OTHERS, (1, 2, 3))):
        for donate in (True, False) if stage == 3 else (number % 2 == 0,):
            yield Cell(name, WIDE if name in SIGNS else DTYPES[number % 4], number % 3 == 0, stage, donate)
    turns = itertools.cycle(itertools.product((True, False), (True, False), DTYPES))
    for number, (name, stage) in enumerate(itertools.product(STAGES, (1, 2, 3))):
        donate, is_clipped, dtype = next(turns)
        if name.endswith("_schedule") and number // 3 % 3 != stage - 1:
            continue
        yield Cell(name, WIDE if name in SIGNS else dtype, is_clipped, stage, donate)


def train_step(optimizer: optim.GradientTransformation) -> Callable[..., Any]:
    """`step(params, state, x) -> (params, state, [loss, norm of the gradients])`."""

    def step(params: tree.Tree, state: Any, x: Tensor) -> Any:
        def loss_of(params: tree.Tree) -> Tensor:
            params = tree.map(lambda leaf: leaf.to(x.dtype), params)
            return (params["scale"] * mlp(params, x)).square().mean()

        loss, grads = fzero.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, [loss, optim.global_norm(grads)]

    return step


def optimizer_of(name: str, is_clipped: bool) -> optim.GradientTransformation:
    optimizer = OPTIMIZERS[name]
    return optim.chain(optim.clip_by_global_norm(MAX_NORM), optimizer) if is_clipped else optimizer


def first_params(dtype: torch.dtype) -> tree.Tree:
    """A layer of 30 elements, which 3 ranks hold as 16, 14 and 0, and a 0-d leaf."""
    return tree.map(lambda x: x.to(dtype), {**layers(1, width=WIDTH), "scale": torch.tensor(1.5)})


def train(
    step: Callable[..., Any], optimizer: optim.GradientTransformation, params: tree.Tree, dtype: torch.dtype
) -> tree.Tree:
    """The outputs of all steps and the state at the end, in full."""
    state, outputs = (params, optimizer.init(params)), []
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        *state, output = step(*state, torch.randn(12, WIDTH, generator=draw).to(dtype))
        outputs.append(output)
    return outputs, fzero.unpartition(tuple(state))


@functools.cache
def unsharded(name: str, dtype: torch.dtype, is_clipped: bool) -> tree.Tree:
    optimizer = optimizer_of(name, is_clipped)
    return train(train_step(optimizer), optimizer, first_params(dtype), dtype)


def check(got: tree.Tree, cell: Cell) -> None:
    """Results are those of the plain step, within TOLERANCE, and parameters moved by far more."""
    expected, tolerance = unsharded(cell.name, cell.dtype, cell.is_clipped), TOLERANCE * torch.finfo(cell.dtype).eps
    assert tree.paths(got) == tree.paths(expected)
    for path, ours, theirs in zip(tree.paths(got), tree.leaves(got), tree.leaves(expected)):
        assert ours.dtype == theirs.dtype, path
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=f"{path}: {ours}, not {theirs}")
    moved = tree.map(lambda new, old: (new - old).abs().max().item(), expected[1][0], first_params(cell.dtype))
    assert max(tree.leaves(moved)) > 2 * tolerance


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_a_sharded_optimizer_is_the_plain_one(cell: Cell) -> None:
    optimizer = optimizer_of(cell.name, cell.is_clipped)
    step = fzero.simulate(train_step(optimizer), MESH, stage=cell.stage, donate=cell.donate)
    check(train(step, optimizer, fzero.partition(first_params(cell.dtype), MESH), cell.dtype), cell)


TRIED_ELSEWHERE = {"adamw8bit", "muon", "report", "scale_by_adam8bit", "scale_by_muon"}
"""Tried in test_muon.py and test_adam8bit.py: rounding to bfloat16 or 8 bits makes results differ by more than
TOLERANCE."""


NO_OPTIMIZERS = {
    "apply_updates", "global_norm",  # in every step
    "from_torch",  # in test_from_torch.py
    "all_finite", "carry_state", "check_flags", "incremental_update", "schedule_free_eval_params", "select",
}  # fmt: skip


def test_every_public_function_is_tried() -> None:
    functions = {name for name in optim.__all__ if not isinstance(getattr(optim, name), type)}
    assert functions - TRIED_ELSEWHERE - NO_OPTIMIZERS == {name.partition(",")[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_survives_a_checkpoint(name: str, tmp_path: Path) -> None:
    """On another number of ranks, bit for bit: parameters, and the state behind a step, which is not zero."""
    optimizer, plain = optimizer_of(name, is_clipped=True), first_params(torch.bfloat16)

    def place(world: int) -> tuple[Any, Any]:
        params = fzero.partition(plain, VirtualMesh(fsdp=world))
        return params, optimizer.init(params)

    params, state = place(3)
    _, state = optimizer.update(tree.map(lambda x: 0.1 * x, params), state, params)
    save(tmp_path, (params, state), step=1)
    expected, got = (fzero.unpartition(each) for each in ((params, state), load(tmp_path, place(2))))
    for path, a, b in zip(tree.paths(expected), tree.leaves(expected), tree.leaves(got), strict=True):
        assert type(a) is type(b) and (a.equal(b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b), path


def compiled(mesh: DeviceMesh, name: str) -> tree.Tree:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    optimizer = optimizer_of(name, Cell(name).is_clipped)
    step = fzero.shard(train_step(optimizer), mesh, compile=True)
    return train(step, optimizer, fzero.partition(first_params(torch.float32), mesh), torch.float32)


COMPILED = (*PRESETS, "lion", "adafactor")


@pytest.fixture(scope="module")
def compilations() -> dict[str, list[Outcome]]:
    """Some optimizers compiled, on one rank: inductor takes many seconds for the first one, and one for each other."""
    return run_cases(1, {name: functools.partial(compiled, name=name) for name in COMPILED}, timeout=600.0)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_optimizer_is_the_plain_one(compilations: dict[str, list[Outcome]], name: str) -> None:
    (got,) = values(compilations[name])
    check(got, Cell(name))


ELSEWHERE = {"state": "device host", "params": "host device", "both": "host host", "disk": "disk disk"}
"""Where parameters and the optimizer's state lie."""
WITH_STATE = [
    *PRESETS, *OTHERS, "clip_by_block_rms", "ema", "apply_if_finite", "inject_hyperparams", "masked", "multi_transform"
]  # fmt: skip
"""Whole optimizers, and stages around others."""
WITH_NORMS = ["lamb", "adafactor", "clip_by_block_rms"]
"""Those with a sum over each leaf that ranks add up. They are tried everywhere, and the others in turns."""


def mixed_params() -> tree.Tree:
    """Leaves of two layers in float32 and float64 in turns, so that each bucket has both."""
    dtypes = itertools.cycle([torch.float32, torch.float64])
    return tree.map(lambda x: x.to(next(dtypes)), {**layers(2, width=WIDTH), "scale": torch.tensor(1.5)})


@pytest.mark.parametrize(
    ("name", "where"),
    dict.fromkeys([*zip(WITH_STATE, itertools.cycle(ELSEWHERE)), *itertools.product(WITH_NORMS, ELSEWHERE)]),
)
def test_an_optimizer_elsewhere_is_the_resident_one(name: str, where: str, tmp_path: Path) -> None:
    """Bit for bit, with leaves of two dtypes, and with parameters, state or both on the host or on a disk."""
    optimizer = optimizer_of(name, is_clipped=len(name) % 2 == 0)
    step = fzero.simulate(train_step(optimizer), MESH)
    places = {"device": None, "host": fzero.host(), "disk": fzero.disk(tmp_path)}
    of_params, of_state = (places[each] for each in ELSEWHERE[where].split())
    resident = fzero.partition(mixed_params(), MESH)
    params = fzero.partition(mixed_params(), MESH, to=of_params)
    placed = optimizer._replace(init=lambda params: optimizer.init(resident, to=of_state))
    got = train(step, placed, params, WIDE)
    expected = train(step, optimizer, resident, WIDE)
    for path, a, b in zip(tree.paths(expected), tree.leaves(got), tree.leaves(expected), strict=True):
        assert a.equal(b) and a.dtype == b.dtype, path
