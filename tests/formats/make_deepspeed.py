"""Make the checkpoints in tests/formats/deepspeed: DeepSpeed trains a tiny model on gloo ranks and saves it.

Beside each checkpoint lies what DeepSpeed's own converters make of it, `expected.safetensors`: weights by
`zero_to_fp32`, moments by `ds_to_universal`. The tests compare. Not a test itself, because it needs DeepSpeed:

    benchmarks/deepspeed_environment.sh
    DS_ACCELERATOR=cpu build/deepspeed/bin/python tests/formats/make_deepspeed.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tied_model import TiedModel

HERE = Path(__file__).parent / "deepspeed"
RUNS: dict[str, tuple[int, int, bool]] = {
    "stage1": (1, 2, False),
    "stage2-bf16": (2, 2, True),
    "stage3-bf16": (3, 2, True),
    "stage3-three-ranks": (3, 3, False),
}
"""Name -> stage, ranks, whether the weights are bfloat16."""


def train(name: str, rank: int) -> None:
    """Three steps on this rank, with two groups of parameters."""
    stage, world, bf16 = RUNS[name]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    model = TiedModel()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 25,  # stage 3 then has more than one flat tensor for a group
        },
        "bf16": {"enabled": bf16},
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(7, (world * 2, 4), generator=draw)[rank * 2 : rank * 2 + 2]
        engine.backward(nn.functional.cross_entropy(engine(tokens).float().view(-1, 7), (tokens + 1).view(-1) % 7))
        engine.step()
    engine.save_checkpoint(str(HERE / name), tag="step3")
    dist.barrier()


def expect(folder: Path) -> dict[str, Tensor]:
    """What DeepSpeed's converters read, by the keys of `open_deepspeed`."""
    found = {f"model.{name}": x.clone() for name, x in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}
    with tempfile.TemporaryDirectory() as out:
        options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
        where = ["--input_folder", str(folder / "step3"), "--output_folder", f"{out}/universal"]
        subprocess.run([sys.executable, ds_to_universal.__file__, *where, *options], check=True)
        for file in Path(out).glob("universal/zero/*/exp_avg*.pt"):
            name = f"optim.state.{file.parent.name}.{file.stem}"
            loaded = torch.load(file, weights_only=False)
            values = loaded["param"] if isinstance(loaded, dict) else loaded
            found[name] = values.float().reshape(found[f"model.{file.parent.name}"].shape).clone()
    return found


def main() -> None:
    for name, (_, world, _) in RUNS.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        every = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, name, str(rank)], env=every | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(world)
        ]
        assert not any(rank.wait(400) for rank in ranks)
        save_file(expect(HERE / name), HERE / name / "expected.safetensors")
        for script in (HERE / name).glob("*.py"):
            script.unlink()  # DeepSpeed copies its converters there


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
