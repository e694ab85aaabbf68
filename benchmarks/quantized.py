"""A frozen GPT as 8-bit and 4-bit codes beside bfloat16, with trained factors of LoRA: bytes that a rank holds and that
a step gathers, the peak, and the seconds of a step.

    python benchmarks/quantized.py           # prints both tables
    python benchmarks/quantized.py --plan    # the first one alone: nothing is timed

The plan is that of one of 8 ranks at stage 3, on tensors without data, for a model of 7B parameters. The steps that run
have one rank and one thread, at size S, and take turns. They compute in bfloat16. The backward pass computes blocks
again.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rounds
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig
from lora import adapt

GIB = 1 << 30
RESULTS = Path(__file__).parent / "results" / "quantized.json"
RANKS = 8
PLANNED = GPTConfig(vocab=32000, seq=2048, dim=4096, layers=32, heads=32)
MEASURED, ROWS = GPTConfig(vocab=2048, seq=128, dim=256, layers=4, heads=4), 4
FORMS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "8 bits": {"bits": 8, "block": 256},
    "4 bits": {"bits": 4, "block": 64},
    "nf4": {"bits": 4, "block": 64, "levels": "nf4"},
}
"""Name -> how the frozen matrices are held: the keywords of `fzero.quantize`."""


class Recomputed(nn.Module):
    """A block whose values the backward pass computes again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return fzero.remat(self.block)(x)


def make(config: GPTConfig, device: str) -> tuple[Any, Callable[..., Tensor]]:
    """The parameters of a GPT in bfloat16 and its function. Everything but the factors of LoRA is frozen."""
    torch.manual_seed(0)
    with torch.device(device):
        model = adapt(GPT(config), rank=16).to(torch.bfloat16)
        model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return fzero.lower(model)


def step_of(apply: Callable[..., Tensor]) -> Callable[..., Any]:
    """The loss and its gradients."""

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return cross_entropy(apply(params, tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())

    return lambda params, tokens: fzero.value_and_grad(loss)(params, tokens)


def hold(params: Any, how: dict[str, Any] | None, mesh: Any) -> Any:
    """The parameters, partitioned in a form."""
    return fzero.partition(params if how is None else fzero.quantize(params, **how), mesh)


def plan() -> dict[str, Any]:
    """Form -> the bytes of parameters that a rank holds, that a step gathers, and the predicted peak."""
    mesh, found = fzero.VirtualMesh(fsdp=RANKS), dict[str, Any]()
    params, apply = make(PLANNED, "meta")
    tokens = torch.empty(RANKS, PLANNED.seq, dtype=torch.int64, device="meta")
    for name, how in FORMS.items():
        held = hold(params, how, mesh)
        program = fzero.simulate(step_of(apply), mesh).trace(held, tokens)
        found[name] = {
            "held": sum(leaf.nbytes for leaf in fzero.tree.leaves(held)) / RANKS,
            "gathered": sum(entry.nbytes for entry in program.comm() if entry.op == "all_gather"),
            "peak": program.memory().peak,
        }
    return found


def measure(count: int) -> dict[str, Any]:
    """Form -> the loss, and the seconds of each step."""
    found, steps = dict[str, Any](), dict[str, Callable[[], Any]]()
    with rounds.one_rank() as mesh:
        params, apply = make(MEASURED, "cpu")
        tokens = torch.randint(MEASURED.vocab, (ROWS, MEASURED.seq))
        for name, how in FORMS.items():
            held, step = hold(params, how, mesh), fzero.shard(step_of(apply), mesh)
            steps[name] = lambda held=held, step=step: step(held, tokens)
            found[name] = {"loss": steps[name]()[0].item()}
        for name, seconds in rounds.time_rounds(steps, count).items():
            found[name]["seconds"] = seconds
    return found


def main() -> None:
    """Prints the tables, and writes the record."""
    flags = rounds.parse(__doc__, RESULTS)
    planned = plan()
    print(f"planned, {PLANNED}, {RANKS} ranks, a row each")
    print(f"{'':<12}{'held GiB':>10}{'gathered GiB':>14}{'peak GiB':>10}")
    for name, row in planned.items():
        print(f"{name:<12}{row['held'] / GIB:>10.2f}{row['gathered'] / GIB:>14.2f}{row['peak'] / GIB:>10.2f}")
    if flags.plan:
        return
    measured = measure(flags.rounds)
    print(f"measured, {MEASURED}, one rank, {ROWS} rows")
    print(f"{'':<12}{'loss':>10}{'ms':>14}{'ratio':>10}")
    first = statistics.median(measured["bfloat16"]["seconds"])
    for name, row in measured.items():
        seconds = statistics.median(row["seconds"])
        print(f"{name:<12}{row['loss']:>10.4f}{1000 * seconds:>14.1f}{seconds / first:>10.2f}")
    rounds.write(flags.json, {"planned": planned, "measured": measured})


if __name__ == "__main__":
    main()
