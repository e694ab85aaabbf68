"""Pairs: ranks that are in different public calls, or that give one call different results of one step.

    python tests/ranks/pairs.py 2        all pairs of calls, and all exchanges, on 2 ranks: a table of counts
    python tests/ranks/pairs.py 3        on 3 ranks, of which rank 1 differs

A pair has one of these outcomes:

    named    every rank raises an FzeroError soon, and the mesh goes on
    silent   no rank raises
    left     one rank raises, another does not
    raw      a rank raises another error
    hang     a rank waits for torch's timeout
    lost     the ranks lose each other, or end
"""

from __future__ import annotations

import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from processes import RankError, refusal, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
import fzero.checkpoint
import fzero.data
from fzero import optim, tree

STALL = timedelta(seconds=12)
SOON = 10.0
"""Seconds, of which a busy machine may need some: fewer than STALL."""
X = torch.linspace(-1, 1, 64).view(2, 32)


class Given(NamedTuple):
    """What calls work with. `first` and `second` are the two results of one step, equal in form."""

    mesh: DeviceMesh
    first: Any
    second: Any
    folder: Path
    steps: dict[str, Any]
    engine: Any
    cut: Any  # a module of `zero.Init`
    optimizer: Any


def loss_of(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["a"] + params["b"].sum()).square().mean()


def descend(params: Any, mean: Any, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    params = tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, tree.map(lambda m, p: 0.5 * m + p, mean, params), loss


def evaluate(params: Any, x: Tensor) -> Tensor:
    return loss_of(params, x)


def train(state: fzero.State, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_of)(state.params, x)
    return state._replace(params=tree.map(lambda p, g: p - 0.1 * g, state.params, grads)), loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def make_plain() -> dict[str, Tensor]:
    return {"a": torch.linspace(-1, 1, 1024).view(32, 32), "b": torch.linspace(0, 1, 1024).view(32, 32)}


def make_engine(mesh: DeviceMesh) -> Any:
    import fzero.deepspeed

    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine = fzero.deepspeed.initialize(model=Model(), config=config, mesh=mesh).engine
    engine.backward(engine(X[:, :8]))
    engine.step()
    return engine


def prepare(mesh: DeviceMesh, folder: Path, with_engine: bool) -> Given:
    params = fzero.partition(make_plain(), mesh)
    optimizer = optim.adamw(1e-3)
    steps = {fn.__name__: fzero.shard(fn, mesh, donate=False) for fn in (descend, evaluate, train)}
    first, second, _ = steps["descend"](params, params, X)
    steps["evaluate"](first, X)
    fzero.save_safetensors(first, folder / "ready.safetensors")
    fzero.checkpoint.save(folder / "ready", first, step=1)
    engine, cut = (make_engine(mesh), _cut(mesh)) if with_engine else (None, None)
    return Given(mesh, first, second, folder, steps, engine, cut, optimizer)


def make_loader(mesh: DeviceMesh) -> Any:
    rows = 2 * mesh.size()
    return fzero.data.loader([torch.zeros(32)] * 2 * rows, rows, mesh)


def go_on(given: Given) -> None:
    state, loader = fzero.State(params=given.first), make_loader(given.mesh)
    fzero.checkpoint.run(given.steps["train"], state, loader, given.folder / "run", steps=1, every=1)


def export(given: Given) -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    params = fzero.partition(fzero.lower(model)[0], given.mesh, source_rank=None)
    fzero.checkpoint.export_hf(given.folder / "hf", params, model)


def gather_deferred(given: Given) -> None:
    fzero.build(lambda: nn.Linear(64, 64), given.mesh)


CALLS: dict[str, Callable[[Given], Any]] = {
    "partition(source_rank=0)": lambda g: fzero.partition(make_plain(), g.mesh, source_rank=0),
    "partition(to=disk)": lambda g: fzero.partition(make_plain(), g.mesh, to=fzero.disk(g.folder)),
    "unpartition": lambda g: fzero.unpartition(g.first),
    "unpartition(rank=1)": lambda g: fzero.unpartition(g.first, rank=1),
    "iter_full": lambda g: list(fzero.iter_full(g.first)),
    "iter_full(chunk=)": lambda g: list(fzero.iter_full(g.first, chunk=1024)),
    "update_leaf": lambda g: fzero.update_leaf(g.first, "a", lambda x: x + 1),
    "init(to=disk)": lambda g: g.optimizer.init(g.first, to=fzero.disk(g.folder)),
    "build": gather_deferred,
    "quantize": lambda g: fzero.quantize(g.first, where="."),
    "save_safetensors": lambda g: fzero.save_safetensors(g.first, g.folder / "new.safetensors"),
    "load_safetensors(to=disk)": lambda g: fzero.load_safetensors(
        g.folder / "ready.safetensors", make_plain(), g.mesh, to=fzero.disk(g.folder)
    ),
    "checkpoint.save": lambda g: fzero.checkpoint.save(g.folder / "new", g.first, step=2, overwrite=True),
    "checkpoint.save(wait=False)": lambda g: fzero.checkpoint.save(
        g.folder / "new", g.first, step=2, overwrite=True, wait=False
    ).wait(),
    "checkpoint.load": lambda g: fzero.checkpoint.load(g.folder / "ready", g.first),
    "checkpoint.save_dcp": lambda g: fzero.checkpoint.save_dcp(g.folder / f"dcp{time.time():.0f}", g.first),
    "step": lambda g: g.steps["descend"](g.first, g.second, X),
    "evaluating step": lambda g: g.steps["evaluate"](g.first, X),
    "step.calibrate": lambda g: g.steps["evaluate"].calibrate(g.first, X),
    "sum": lambda g: g.first["a"].sum(),
    "max": lambda g: g.first["a"].max(),
    "norm": lambda g: g.first["a"].norm(),
    "matmul": lambda g: torch.ones(2, 32) @ g.first["a"],
    "full_tensor": lambda g: g.first["a"].full_tensor(),
    "gradient outside of a step": lambda g: fzero.grad(loss_of)(g.first, X),
    "loop over a loader": lambda g: next(iter(make_loader(g.mesh))),
    "checkpoint.run": go_on,
}
ENGINE: dict[str, Callable[[Given], Any]] = {
    "engine()": lambda g: g.engine(X[:, :8]),
    "engine.save_checkpoint": lambda g: g.engine.save_checkpoint(g.folder / "deepspeed", tag="x"),
    "engine.load_checkpoint": lambda g: g.engine.load_checkpoint(g.folder / "deepspeed"),
    "engine.module_state_dict": lambda g: g.engine.module_state_dict(),
    "deepspeed.initialize": lambda g: make_engine(g.mesh),
    "deepspeed.zero.Init": lambda g: _cut(g.mesh),
    "deepspeed.zero.GatheredParameters": lambda g: _edit(g.cut.weight),
    "deepspeed.zero.GatheredParameters of what is whole": lambda g: _edit(nn.Linear(4, 4).weight),
    "checkpoint.export_hf": export,
    "safe_get_full_fp32_param": lambda g: _states().safe_get_full_fp32_param(_weight(g)),
    "safe_get_full_optimizer_state": lambda g: _states().safe_get_full_optimizer_state(_weight(g), "exp_avg"),
}
"""Calls of `fzero.deepspeed`, which take an engine, and of a model of transformers."""


def _cut(mesh: DeviceMesh) -> nn.Module:
    import fzero.deepspeed

    with fzero.deepspeed.zero.Init(mesh=mesh):
        return nn.Linear(64, 64)


def _edit(parameter: Tensor) -> None:
    import fzero.deepspeed

    with fzero.deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        pass


def _states() -> Any:
    import fzero.deepspeed.utils

    return fzero.deepspeed.utils


def _weight(given: Given) -> Any:
    return next(iter(given.engine.module.parameters()))


def pick(given: Given) -> Any:
    """One of two results of a step: another one on rank 1."""
    return given.second if dist.get_rank() == 1 else given.first


EXCHANGES: dict[str, Callable[[Given], Any]] = {
    **{
        name: lambda g, call=call: call(g._replace(first=pick(g)))
        for name, call in CALLS.items()
        if name
        not in ("partition(source_rank=0)", "partition(to=disk)", "build", "load_safetensors(to=disk)", "init(to=disk)")
        and name not in ("checkpoint.load", "loop over a loader")  # which take no values
    },
    "other leaves to sum": lambda g: g.first["b" if dist.get_rank() == 1 else "a"].sum(),
    "other leaves to max": lambda g: g.first["b" if dist.get_rank() == 1 else "a"].max(),
    "other orders of a norm": lambda g: g.first["a"].norm(dist.get_rank() + 1),
    "a sum and a mean": lambda g: g.first["a"].mean() if dist.get_rank() == 1 else g.first["a"].sum(),
    "old and new state in a product": lambda g: torch.ones(2, 32) @ pick(g)["a"],
    "moments of an update outside of a step": lambda g: fzero.unpartition(_moment(g)),
    "gradients of two losses": lambda g: fzero.unpartition(
        [fzero.grad(lambda p, k=k: k * loss_of(p, X))(g.first) for k in (1, 2)][dist.get_rank() % 2]
    ),
    "clamped from below and from above": lambda g: fzero.unpartition(
        g.first["a"].clamp(**{"max" if dist.get_rank() == 1 else "min": 0.5})
    ),
    "leaves of two sources": lambda g: fzero.unpartition(_two_partitions(g)[dist.get_rank() % 2]),
    "two modules that were built": lambda g: fzero.unpartition(
        [fzero.build(lambda: nn.Linear(8, 8), g.mesh, seed=seed)[0] for seed in (1, 2)][dist.get_rank() % 2]
    ),
}


def _moment(given: Given) -> Any:
    """One of the two moments that Adam, outside of a step, computes together."""
    scale = optim.scale_by_adam()
    _, state = scale.update(given.first, scale.init(given.first), given.first)
    return state.nu if dist.get_rank() == 1 else state.mu


def _two_partitions(given: Given) -> Any:
    plain = make_plain()
    doubled = tree.map(lambda x: 2 * x, plain)
    return [fzero.partition(values, given.mesh, source_rank=0) for values in (plain, doubled)]


class Found(NamedTuple):
    """What one rank saw of one case, and whether ranks could go on together afterwards."""

    kind: str
    message: str
    seconds: float
    goes_on: bool


Case = tuple[str, str]
"""The calls of rank 1 and of the other ranks; twice the name of an exchange."""


FILLS = {"partition(to=disk)", "load_safetensors(to=disk)"}
"""Calls that are one call of `partition` inside, and exchange no values. Other values are told at the next call."""


def list_cases(calls: Sequence[str]) -> list[Case]:
    pairs = [(a, b) for a in calls for b in calls if a != b and {a, b} != FILLS]
    return [(name, name) for name in EXCHANGES] + pairs


def list_sample(stride: int = 1) -> list[Case]:
    """Some pairs, of which each call is in two, and with a `stride` only some calls."""
    calls = [*CALLS, *ENGINE][::stride]
    order = sorted(calls, key=lambda name: hash_of(name))
    return [(a, b) for a, b in zip(order, order[1:] + order[:1]) if {a, b} != FILLS]


def hash_of(name: str) -> int:
    """An order that mixes kinds of calls, the same in every process."""
    return zlib.crc32(name.encode())


def run_pairs(mesh: DeviceMesh, cases: Sequence[Case], folder: Path, progress: Path) -> list[Found]:
    """What this rank sees of each case, up to the first after which ranks cannot go on."""
    with_engine = any(name in ENGINE for case in cases for name in case)
    given = prepare(mesh, folder, with_engine)
    if with_engine:
        given.engine.save_checkpoint(folder / "deepspeed", tag="x")
    found: list[Found] = []
    for mine, theirs in cases:
        name = mine if dist.get_rank() == 1 else theirs
        call = EXCHANGES[name] if mine == theirs else (CALLS | ENGINE)[name]
        kind, message, _, seconds = refusal(partial(call, given))
        after = refusal(lambda: fzero.unpartition(given.first))
        found.append(Found(kind, message, seconds, after.kind == "nothing"))
        if dist.get_rank() == 0:
            progress.write_text(str(len(found)))
        if not found[-1].goes_on:
            break
    return found


def judge(row: Sequence[Found]) -> str:
    """The outcome of a case, from what each rank saw."""
    kinds = {each.kind for each in row}
    if not all(each.goes_on for each in row):
        return "lost" if max(each.seconds for each in row) < SOON else "hang"
    if kinds == {"FzeroError"}:
        return "named" if max(each.seconds for each in row) < SOON else "hang"
    if kinds == {"nothing"}:
        return "silent"
    return "left" if kinds == {"nothing", "FzeroError"} else "raw"


def run_all(world: int, cases: Sequence[Case], timeout: float = 300.0) -> dict[Case, tuple[str, list[Found]]]:
    """The outcome of each case. Ranks go from case to case, and are started again behind one that ends them."""
    outcomes: dict[Case, tuple[str, list[Found]]] = {}
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "progress"
            progress.write_text("0")
            try:
                rows = run(world, run_pairs, left, Path(folder), progress, timeout=timeout, stall=STALL, lost=[])
            except RankError as error:
                done = int(progress.read_text())
                for case in left[:done]:
                    outcomes.setdefault(case, ("unknown", []))
                outcomes[left[done]] = "lost", [Found("RankError", str(error)[-600:], 0.0, False)]
                left = left[done + 1 :]
                continue
        done = min(map(len, rows))
        for case, row in zip(left, zip(*rows)):
            outcomes[case] = judge(row), list(row)
        left = left[done:]
    return outcomes


def main(world: int, names: Sequence[str]) -> None:
    calls = [name for name in CALLS | ENGINE if not names or name in names]
    outcomes = run_all(world, list_cases(calls), timeout=3000.0)
    for (mine, theirs), (outcome, row) in outcomes.items():
        if outcome != "named":
            print(f"{outcome}: {theirs} | {mine}")
            for each in row:
                print(f"    {each.kind} {each.seconds:.1f} s {each.message[:300]}")
    for what, of in ("exchanges", True), ("pairs", False):
        print(what, dict(Counter(outcome for (a, b), (outcome, _) in outcomes.items() if (a == b) == of)))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(int(sys.argv[1]), sys.argv[2:])
