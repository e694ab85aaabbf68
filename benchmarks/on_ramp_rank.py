"""One rank of `on_ramp.py`, started by `launch.py`: one loop, of DeepSpeed or of fzero. Only the import differs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from means import mean
from torch import Tensor, nn

WIDTH, ROWS = 32, 4


class Regression(nn.Module):
    """A model that returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head, self.dtype = nn.Linear(WIDTH, 8), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).float(), y)


def main(given: dict[str, Any], out: Path) -> None:
    """Writes {case: {losses, rates, scales}}: what each call of the engine and each update gave."""
    library = importlib.import_module(given["library"])
    found = {}
    for name, config in given["cases"].items():
        torch.manual_seed(0)
        half = config.get("fp16", {}).get("enabled", False) and given["library"] == "deepspeed"
        model = Regression(torch.float16 if config.get("fp16", {}).get("enabled", False) else torch.float32)
        engine, *_ = library.initialize(
            model=model.half() if half else model, model_parameters=model.parameters(), config=config
        )
        found[name] = train(engine, given["steps"])
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(engine: Any, steps: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses, rates, scales = [], [], []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            loss = engine(x, (x[:, :8] * 3).argmax(1))
            engine.backward(loss)
            engine.step()
            losses.append(mean(loss))
        rates.append(float(engine.get_lr()[0]))
        scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
    return {"losses": losses, "rates": rates, "scales": scales}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
