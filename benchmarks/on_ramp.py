"""`fzero.deepspeed` beside the installed DeepSpeed: one script, one configuration, two imports. Stages 0 to 3.

python benchmarks/on_ramp.py            # after benchmarks/deepspeed_environment.sh
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from environments import DEEPSPEED, OURS, deepspeed_version
from launch import Launch, launch

LIMIT = 1e-5
"""The largest relative difference of losses in float32, over all steps: sums in another order."""


def config(stage: int, fp16: bool) -> dict[str, Any]:
    """A configuration with a schedule, and the clipping that a missing key means; in fp32 with accumulation. In fp16
    DeepSpeed adds microbatches in float16, so that other batches overflow."""
    precision = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 15}} if fp16 else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1 if fp16 else 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10, "total_num_steps": 90},
        },
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **precision,
    }


CASES = {
    f"stage {stage}, {'fp16' if fp16 else 'fp32'}": config(stage, fp16)
    for fp16 in (False, True)
    for stage in range(4)
    if stage or not fp16  # at stage 0 engine.backward of DeepSpeed 0.19.8 does not multiply the loss by the scale
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="cases whose names have this text")
    given = parser.parse_args()
    if deepspeed_version() is None:
        sys.exit("DeepSpeed is not installed: benchmarks/deepspeed_environment.sh installs it")
    cases = {name: each for name, each in CASES.items() if given.only in name}
    sides = {"deepspeed": DEEPSPEED, "fzero.deepspeed": OURS}
    found = launch(
        [
            Launch("on_ramp_rank.py", {"library": library, "cases": cases, "steps": given.steps}, "cpu", home)
            for library, home in sides.items()
        ],
        2,
        1200,
    )
    wrong = []
    print("| case | rates | loss scales | largest difference of losses | falls of the scale |\n|---|---|---|---|---|")
    for name in cases:
        theirs, ours = (side[name] for side in found)
        same = [theirs[what] == ours[what] for what in ("rates", "scales")]
        rates = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(theirs["rates"], ours["rates"]))
        apart = max(abs(a - b) / abs(a) for a, b in zip(theirs["losses"], ours["losses"]))
        falls = sum(b < a for a, b in zip(ours["scales"], ours["scales"][1:]))
        print(f"| {name} | {rates:.1e} | {'equal' if same[1] else 'differ'} | {apart:.1e} | {falls} |")
        if rates > 1e-6 or not same[1] or ("fp32" in name and apart > LIMIT):
            wrong.append(name)
    if wrong:
        sys.exit("too far apart: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
