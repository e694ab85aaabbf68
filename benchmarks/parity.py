"""How far fzero is from its references: losses beside torch's and its peers', optimizers and schedules beside torch's.

    python benchmarks/parity.py                                          # writes docs/parity.md
    python benchmarks/parity.py --steps 12 --page build/parity.md        # a short run

Exit status 1 where a difference is larger than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from environments import DEEPSPEED, OURS, ROOT, deepspeed_version
from launch import Launch, launch
from machine import machine

import fzero
from fzero import optim

sys.path += [str(ROOT / "examples"), str(ROOT / "tests")]
import references
import schedule_references
from parity_rank import CONFIG, DTYPES, OVERFLOW, WINDOWS
from parity_steps import B1, B2, CONTENDERS, DECAY, EPS, GROWTH_INTERVAL, MAX_NORM, RATE, REFERENCE, SCALE

Losses = dict[str, dict[str, list[float]]]
"""{precision: {contender: the loss before the first step and after each}}"""

HALVES = "torch, one device, two halves"
SHOWN = (1, 10, 100)
STEPS = 20  # of each optimizer
WORLDS = (1, 8)
LIMITS = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""The largest relative difference of two losses of a precision: rounding, which grows from step to step. At a rate of
3e-3 the loss has spikes, and torch's own two runs on one device end 1e-2 apart in fp32."""
OPTIMIZER_LIMIT = 64
"""Of the results of an optimizer, in units of the dtype's eps: some 20 roundings in each of 20 steps, which mostly do
not add up."""
SCHEDULE_LIMIT = 1.2e-7
"""Of a value of a schedule: it is rounded once, to float32."""
MUON = references.of_torch(optim.muon(0.02, where=lambda path, leaf: True), "Muon", lr=0.02)


def main(given: argparse.Namespace) -> None:
    """Measures everything, writes the page, and fails where something is too far from its reference."""
    optimizers = [compare_optimizer(name, case) for name, case in references.CASES.items()]
    optimizers.append(compare_optimizer("muon", MUON, ("weight",)))
    schedules = [compare_schedule(name, case) for name, case in schedule_references.CASES.items()]
    losses = train(given.steps, given.timeout)
    given.page.parent.mkdir(exist_ok=True)
    given.page.write_text(page(losses, optimizers, schedules, given.steps))
    if wrong := [*find_wrong_losses(losses), *find_wrong(optimizers, schedules)]:
        sys.exit("too far from its reference: " + ", ".join(wrong))


# losses


def train(steps: int, timeout: float) -> Losses:
    """The losses of every contender that is installed. Ranks of both environments run at once."""
    homes = {OURS: [name for name in CONTENDERS if "DeepSpeed" not in name]}
    if deepspeed_version() is not None:
        homes[DEEPSPEED] = [name for name in CONTENDERS if "DeepSpeed" in name]
    launches = [
        Launch("parity_rank.py", {"steps": steps, "contenders": names}, "cpu", home) for home, names in homes.items()
    ]
    found = launch(launches, 2, timeout)
    return {precision: {name: row for part in found for name, row in part[precision].items()} for precision in DTYPES}


def apart(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference at any step."""
    pairs = zip(*(torch.tensor(values, dtype=torch.float64) for values in (losses, reference)))
    return max(relative(a, b) for a, b in pairs)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference of two elements, in units of the largest element of `want`; inf for what is no number."""
    difference = (got.double() - want.double()).abs().max().item()
    if not difference:
        return 0.0
    return difference / want.abs().max().item() if difference < torch.inf else torch.inf


def find_wrong_losses(losses: Losses) -> list[str]:
    """The contenders that did not train as torch on one device."""
    return [
        f"{name} in {precision}"
        for precision, rows in losses.items()
        for name, row in rows.items()
        if apart(row, rows[REFERENCE]) > LIMITS[precision]
    ]


# optimizers and schedules


class Row(NamedTuple):
    """How far an optimizer or a schedule is from its reference."""

    name: str
    source: str
    differences: dict[tuple[torch.dtype, int], float]  # (dtype, world size) -> the largest relative one
    moved: float = 0.0  # the least movement of a leaf, relative to the leaf's largest element


def compare_optimizer(name: str, case: references.Case, leaves: tuple[str, ...] | None = None) -> Row:
    """Runs an optimizer and its reference, for all leaves or for some."""
    differences, moved = {}, 0.0
    for dtype in (torch.float32, torch.float64):
        params, *grads = (
            {key: x for key, x in tree.items() if leaves is None or key in leaves}
            for tree in (references.first_params(dtype), *references.draw_gradients(dtype, STEPS))
        )
        expected = {key: x for key, x in case.reference(params, grads).items() if x.numel()}
        moved = min(relative(params[key], x) for key, x in expected.items())
        for world in WORLDS:
            got, _ = references.train(case.optimizer, params, grads, world)
            differences[dtype, world] = max(relative(got[key], x) for key, x in expected.items())
    return Row(name, case.source, differences, moved)


def compare_schedule(name: str, case: schedule_references.Case) -> Row:
    """Runs a schedule in sharded steps, and its reference."""
    expected = case.values(schedule_references.STEPS)
    return Row(name, case.source, {(torch.float32, world): apart(rates(case, world), expected) for world in WORLDS})


def rates(case: schedule_references.Case, world: int) -> list[float]:
    """The value of a schedule at each step, as a sharded step uses it."""
    mesh, stage = fzero.VirtualMesh(fsdp=world), optim.scale_by_schedule(case.schedule)
    ones = fzero.partition({"w": torch.ones(3)}, mesh)
    step, state, found = fzero.simulate(stage.update, mesh, donate=False), stage.init(ones), []
    for _ in range(schedule_references.STEPS):
        updates, state = step(ones, state)
        found.append(fzero.unpartition(updates)["w"][0].item())
    return found


def find_wrong(optimizers: list[Row], schedules: list[Row]) -> list[str]:
    """The names of those that are too far from their references."""
    wrong = [
        row.name
        for row in optimizers
        if any(
            difference > OPTIMIZER_LIMIT * torch.finfo(dtype).eps for (dtype, _), difference in row.differences.items()
        )
    ]
    return wrong + [row.name for row in schedules if max(row.differences.values()) > SCHEDULE_LIMIT]


# the page


def page(losses: Losses, optimizers: list[Row], schedules: list[Row], steps: int) -> str:
    """docs/parity.md."""
    about = machine()
    limits = ", ".join(f"{limit:.0e} in {precision}" for precision, limit in LIMITS.items())
    installed = f"is {about['deepspeed']}" if about["deepspeed"] else "was not installed here, so it has no rows"
    return f"""# Parity

`{about["command"]}` wrote this page on {about["date"][:10]}: torch {about["torch"]}, Python {about["python"]},
{about["cores"]} cores ({about["processor"]}), no GPU used. Do not edit it.

A difference is relative: the largest difference of two elements, in units of the largest element of the reference.

## Losses

A GPT of {CONFIG.layers} layers of width {CONFIG.dim}, on {WINDOWS} windows of {CONFIG.seq} bytes of the standard
library a step. AdamW with a rate of {RATE}, betas {B1} and {B2}, eps {EPS} and decay {DECAY}. Gradients are clipped to
a norm of {MAX_NORM} as torch clips. All contenders have the same first weights, batches and optimizer. "After k" is the
loss of batch k + 1.

* Weights, moments and averages over ranks are float32. In bf16 and fp16 weights are cast, and the model computes so.
* fp16 has a loss scale: {SCALE:.0f} at first, doubled after {GROWTH_INTERVAL} clean steps, halved by an overflow.
  The gradients of step {OVERFLOW + 1} overflow, and every contender skips that step.
* fzero, FSDP2 and DeepSpeed run on two gloo ranks. "Two halves" is one device that averages the gradients of the two
  ranks' rows: the arithmetic of two ranks, without ranks. The difference of the halves from one device is rounding.
* DeepSpeed {installed}; `benchmarks/deepspeed_environment.sh` installs it.
* Expected from one device: at most {limits}. Beyond: {", ".join(find_wrong_losses(losses)) or "none"}.

{loss_table(losses, [step for step in SHOWN if step <= steps])}

## Optimizers

Parameters after {STEPS} steps with random gradients: a matrix, a vector, a stack of two matrices, a number and an
empty leaf. torch's optimizers are run; other references are written out in `tests/references.py`. "Moved" is how far
the least moved leaf has come. Muon has the matrix alone, and orthogonalizes in bfloat16.
`tests/optim/test_adam8bit.py` has the reference of 8-bit Adam.

{optimizer_table(optimizers)}

## Schedules

{schedule_references.STEPS} steps of each, as a sharded step uses the value. torch's schedulers are run; formulas are
computed in Python numbers. A value is rounded once, to float32: half a unit is 6.0e-08.

{schedule_table(schedules)}
"""


def loss_table(losses: Losses, shown: list[int]) -> str:
    """A row for each contender and precision."""
    rows = [
        [
            name,
            precision,
            *(f"{row[step]:.6f}" for step in shown),
            *(number(apart(row, named[other])) for other in (REFERENCE, HALVES)),
        ]
        for precision, named in losses.items()
        for name, row in named.items()
    ]
    head = ["contender", "precision", *(f"after {step}" for step in shown)]
    return table([*head, "largest difference from one device", "from two halves"], rows)


def optimizer_table(rows: list[Row]) -> str:
    cells = [[f"`{row.name}`", row.source, number(row.moved), *map(number, row.differences.values())] for row in rows]
    kinds = [f"{str(dtype).removeprefix('torch.')}, {ranks(world)}" for dtype, world in rows[0].differences]
    return table(["optimizer", "reference", "moved", *kinds], cells)


def schedule_table(rows: list[Row]) -> str:
    cells = [[f"`{row.name}`", row.source, *map(number, row.differences.values())] for row in rows]
    return table(["schedule", "reference", *map(ranks, WORLDS)], cells)


def ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of each contender, for its losses")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "parity.md", help="the file to write")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the losses")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
