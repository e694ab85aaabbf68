"""What the variants cost in loss and save in bytes: a byte-level GPT on virtual ranks, exact and with each variant.

python benchmarks/variants.py --json benchmarks/results/variants.json
python benchmarks/variants.py --table benchmarks/results/variants.json    # the rows of docs/variants.md
python benchmarks/variants.py --table benchmarks/results/variants.json --plot docs/variants.png    # and curves

All runs of a seed have the same batches and optimizer, and the same initial weights but for the control. The control is
exact, and begins with weights that are off by a hundredth, which is about what int8 rounding takes: its gap says how
far apart two exact runs end. Printed are the mean loss of the last 20 steps and that of text that is held out, their
gaps to those of the exact run, and the bytes that a step moves in collectives that the variant changes, beside those
that the exact step moves in their place on the same mesh.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from flags import picture
from machine import machine
from torch import Tensor
from torch.nn.functional import cross_entropy

import fzero
from fzero import passes
from fzero.passes.run import Pass
from fzero.variants.ademamix import ademamix
from fzero.variants.bf16_scatter import bf16_scatter
from fzero.variants.diloco import diloco
from fzero.variants.fp8_gather import fp8_gather
from fzero.variants.hpz import hpz
from fzero.variants.int8_gather import int8_gather
from fzero.variants.int8_mean import int8_mean
from fzero.variants.int8_scatter import int8_scatter
from fzero.variants.loco_scatter import loco_scatter
from fzero.variants.mics import mics
from fzero.variants.power_sgd import power_sgd
from fzero.variants.qgz import qgz
from fzero.variants.sign_scatter import sign_scatter
from fzero.variants.streaming_diloco import plan_step, streaming_diloco
from fzero.variants.topk_scatter import topk_scatter
from fzero.variants.two_hop_scatter import two_hop_scatter
from fzero.variants.zeropp import zeropp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=256, seq=64, dim=64, layers=2, heads=2)
WINDOWS = 16  # a step, of all ranks together
LAST = 20  # steps whose losses are averaged, and batches of text that is held out
RATE = 1e-3  # at 4e-3, the main job's, two exact runs end up to 4 % apart
NOISE = 1e-2  # of each initial weight of the control


class Variant(NamedTuple):
    """A pass, the pass that it stands in front of, and how many ranks there are along "replica". With `nodes` above 1
    state lies along "node" and "local". `plan(n)` gives the pass of step `n` instead; its passes repeat after `every`
    steps, the first ones apart."""

    rewrite: Pass | None = None
    before: str = "prefetch"
    replicas: int = 1
    nodes: int = 1
    every: int = 1
    plan: Callable[[int], Pass] | None = None

    def rewrite_of(self, number: int) -> Pass | None:
        """The pass of the step of this number, which counts from 0."""
        return self.plan(number) if self.plan else self.rewrite


def meet(number: int, **outer: float) -> Pass:
    """The pass of DiLoCo for a step: workers meet in the last of 20."""
    return partial(diloco, syncs=number % 20 == 19, **outer)


def stream(number: int) -> Pass:
    """The pass of Streaming DiLoCo for a step: two fragments meet every 20 steps, each in five steps."""
    return partial(streaming_diloco, **plan_step(number, every=20, fragments=2, delay=5))


VARIANTS = {
    "exact": Variant(),
    "control": Variant(),
    "int8_gather": Variant(int8_gather),
    "fp8_gather": Variant(fp8_gather),
    "hpz": Variant(hpz, "offload", nodes=2),
    "mics": Variant(mics, nodes=2),
    "two_hop_scatter": Variant(two_hop_scatter, nodes=2),
    "qgz": Variant(qgz, nodes=2),
    "zeropp": Variant(zeropp, "offload", nodes=2),
    "bf16_scatter": Variant(bf16_scatter),
    "int8_mean": Variant(int8_mean),
    "int8_scatter": Variant(int8_scatter),
    "loco_scatter": Variant(loco_scatter),
    "sign_scatter": Variant(sign_scatter),
    "topk_scatter, density=0.05": Variant(topk_scatter),
    "power_sgd, rank=4": Variant(power_sgd, "bucket"),
    "diloco, every 20 steps": Variant(None, "bucket", 2, every=20, plan=meet),
    "diloco, every 20 steps, rate=1, momentum=0": Variant(
        None, "bucket", 2, every=20, plan=partial(meet, rate=1, momentum=0)
    ),
    "streaming_diloco, every 20 steps": Variant(None, "bucket", 2, every=20, plan=stream),
    "ademamix, b3=0.9999, warmup=2000": Variant(partial(ademamix, warmup=2000), "bucket"),
    "ademamix, b3=0.99, warmup=2000": Variant(partial(ademamix, b3=0.99, warmup=2000), "bucket"),
}


class Outcome(NamedTuple):
    """The loss of each step, that of text that is held out, and the bytes of a step in the collectives that the variant
    changes: its own, and those of the exact step on the same mesh."""

    losses: list[float]
    heldout: float
    moved: dict[str, float]
    exact: dict[str, float]

    @property
    def loss(self) -> float:
        """The mean loss of the last steps."""
        return fmean(self.losses[-LAST:])


def train(
    variant: Variant, ranks: int, steps: int, stage: int, seed: int, noise: float, text: corpus.Corpus
) -> Outcome:
    """Train the GPT for some steps on virtual ranks, with a variant among the default passes or without.

    `noise` disturbs each initial weight by about this part of its size.
    """
    torch.manual_seed(seed)
    sizes = {"replica": variant.replicas, "node": variant.nodes, "local": ranks // variant.replicas // variant.nodes}
    if variant.nodes == 1:
        sizes = {"replica": variant.replicas, "fsdp": ranks // variant.replicas}
    mesh = fzero.VirtualMesh(**{axis: size for axis, size in sizes.items() if axis != "replica" or size > 1})
    params, apply = fzero.lower(GPT(CONFIG))
    params = fzero.tree.map(lambda p: p * (1 + noise * torch.randn(p.shape)), params)
    rate = fzero.optim.warmup_cosine_decay_schedule(0.0, RATE, steps // 10, steps, RATE / 10)
    optimizer = fzero.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1)

    def loss_fn(params: Any, batch: corpus.Batch) -> Tensor:
        return cross_entropy(apply(params, batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    def train_step(params: Any, opt_state: Any, batch: corpus.Batch) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    defaults = passes.defaults(stage=stage)

    steps_of = dict[str, Any]()

    def simulate(rewrite: Pass | None) -> Any:
        """The step with this pass, the same one each time."""
        if str(rewrite) not in steps_of:
            given = defaults if rewrite is None else passes.insert(defaults, rewrite, before=variant.before)
            steps_of[str(rewrite)] = fzero.simulate(train_step, mesh, passes=given)
        return steps_of[str(rewrite)]

    params = fzero.partition(params, mesh)
    opt_state, cut, losses = optimizer.init(params), corpus.Cut(WINDOWS, CONFIG.seq), []
    first = corpus.train_batch(text.train, cut, seed=seed, step=0)
    state = simulate(variant.rewrite_of(0)).init_pass_state(params, opt_state, first)
    usual, total = count(simulate(None).trace(params, opt_state, first)), Counter[str]()
    for number in range(variant.every, 2 * variant.every):
        total.update(count(simulate(variant.rewrite_of(number)).trace(params, opt_state, first)))
    moved = {key: total[key] / variant.every for key in usual | total}
    for index in range(steps):
        batch = corpus.train_batch(text.train, cut, seed=seed, step=index)
        result = simulate(variant.rewrite_of(index))(params, opt_state, batch, pass_state=state)
        (params, opt_state, loss), state = result if state else (result, state)
        losses.append(loss.item())
    whole, heldout = (
        fzero.unpartition(params),
        [corpus.train_batch(text.heldout, cut, seed=seed, step=index) for index in range(LAST)],
    )
    changed = {key for key in moved if moved[key] != usual[key]}
    return Outcome(
        losses, fmean(loss_fn(whole, batch).item() for batch in heldout),
        {key: x for key, x in moved.items() if key in changed and x},
        {key: x for key, x in usual.items() if key in changed and x},
    )  # fmt: skip


def count(program: fzero.Program) -> Counter[str]:
    """The bytes of a step by collective and axis."""
    moved = Counter[str]()
    for comm in program.comm():
        moved[f"{comm.op} over {comm.axis}"] += comm.nbytes
    return moved


def show(moved: dict[str, float]) -> str:
    return ", ".join(f"{key} {nbytes / 1024:.1f}" for key, nbytes in moved.items() if nbytes >= 100) or "-"


def write_table(results: dict[str, Any]) -> None:
    """Prints the rows of the table in docs/variants.md: the lines of the variant's file, bytes, and means over seeds. A
    run that was stopped has no rows for what it did not come to."""
    runs = list(results["runs"].values())
    for name in (name for name in VARIANTS if all(name in run for run in runs)):
        gaps = [fmean(run[name][key] / run["exact"][key] - 1 for run in runs) for key in ("loss", "heldout")]
        lines = ""
        if VARIANTS[name].rewrite_of(0) is not None:
            file = importlib.import_module(f"fzero.variants.{name.partition(',')[0]}").__file__
            lines = str(len(Path(file or "").read_text().splitlines()))
        moved = [show(runs[0][name][key]) for key in ("exact", "moved")]
        print("|", " | ".join([f"`{name}`", lines, *moved, *(f"{100 * gap:+.2f} %" for gap in gaps)]), "|")


def draw(path: Path, results: dict[str, Any]) -> None:
    """Draws the loss of each step, the mean over seeds and over the steps around it, beside the exact run's."""
    from matplotlib.figure import Figure  # here: no other part needs it

    runs = list(results["runs"].values())
    names = [name for name in VARIANTS if all(name in run for run in runs)]
    curves = {name: smooth([fmean(each) for each in zip(*(run[name]["losses"] for run in runs))]) for name in names}
    figure = Figure(figsize=(11, 9), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True)
    for number, (name, curve) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if name == "exact" else {"color": f"C{number % 10}"}
        style["linestyle"] = "-" if number <= 10 else "--"
        losses.plot(curve, label=name, **style)
        gaps.plot([100 * (a / b - 1) for a, b in zip(curve, curves["exact"])], **style)
    losses.set(ylabel="loss", yscale="log", title=f"{results['ranks']} virtual ranks, stage {results['stage']}")
    gaps.set(ylabel="gap to exact, %", xlabel="step", yscale="symlog")
    losses.set_ylim(0.8 * min(curves["exact"]), 1.1 * max(curves["exact"]))  # what diverges leaves the picture
    gaps.set_ylim(-30, 30)
    for axis, minor in ((losses.yaxis, "{x:g}"), (gaps.yaxis, "")):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(minor)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=100)


def smooth(losses: list[float], width: int = 2 * LAST) -> list[float]:
    """The mean of the steps around each, at most `width` / 2 on either side."""
    half = min(width // 2, len(losses) // 10)
    return [fmean(losses[max(0, at - half) : at + half + 1]) for at in range(len(losses))]


def main() -> None:
    """Prints a line for each seed and variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and batches")
    parser.add_argument(
        "--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="beside the exact run"
    )
    parser.add_argument(
        "--table", type=Path, help="print the rows of docs/variants.md from such a file, and train nothing"
    )
    parser.add_argument("--plot", type=picture, help="beside --table: a file for a picture of losses; needs matplotlib")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.plot and not flags.table:
        parser.error("--plot draws what a file has: give --table FILE")
    if flags.table:
        results = json.loads(flags.table.read_text())
        if flags.plot:
            draw(flags.plot, results)
        return write_table(results)
    text, runs = corpus.stdlib(), dict[str, dict[str, Any]]()
    print(f"{'seed':<6}{'':<44}{'loss':>10}{'gap':>10}{'held out':>10}{'gap':>10}   KiB a step")
    options = {key: value for key, value in vars(flags).items() if key not in ("json", "table", "plot")}
    known = options | machine()  # before a file is written that makes the checkout another one than the commit
    for seed in flags.seeds:
        exact: Outcome | None = None
        for name, variant in VARIANTS.items():
            if name not in ("exact", *flags.only):
                continue
            noise = NOISE if name == "control" else 0.0
            found = train(variant, flags.ranks, flags.steps, flags.stage, seed, noise, text)
            exact = exact or found
            gaps = found.loss / exact.loss - 1, found.heldout / exact.heldout - 1
            figures = f"{found.loss:>10.5f}{gaps[0]:>+10.3%}{found.heldout:>10.5f}{gaps[1]:>+10.3%}"
            print(f"{seed:<6}{name:<44}{figures}   {show(found.exact)} -> {show(found.moved)}", flush=True)
            losses = [round(loss, 5) for loss in found.losses]
            runs.setdefault(str(seed), {})[name] = {"loss": found.loss, **found._asdict(), "losses": losses}
            if flags.json:  # as far as it came
                flags.json.write_text(json.dumps(known | {"runs": runs}) + "\n")


if __name__ == "__main__":
    main()
