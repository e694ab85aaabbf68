"""What to run: sizes, and the plan that a launcher hands to its ranks as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """A GPT with heads 64 wide, and the batch of each rank."""

    layers: int
    dim: int
    seq: int
    batch: int
    vocab: int

    def __str__(self) -> str:
        return f"GPT {self.layers} x d{self.dim}, vocab {self.vocab}, {self.batch} x {self.seq} tokens a rank"


SIZES = {
    "tiny": Size(layers=2, dim=64, seq=16, batch=2, vocab=128),
    "S": Size(layers=4, dim=256, seq=128, batch=4, vocab=2048),
    "M": Size(layers=8, dim=768, seq=256, batch=2, vocab=8192),
    "0.4B": Size(layers=24, dim=1024, seq=1024, batch=8, vocab=50304),
    "1.5B": Size(layers=26, dim=2048, seq=1024, batch=8, vocab=50304),
}


@dataclass(frozen=True)
class Plan:
    """A comparison: `contenders` take `rounds` turns of `steps` steps each, in this order, under the meter.

    `here` are those that one launch of it has; others may be in a launch beside it.
    """

    contenders: tuple[str, ...]
    size: str
    meter: str  # "time", "memory", "comm", "overhead", "gpu", "budget" or "trace"
    rounds: int
    steps: int
    device: str = "cpu"
    bf16: bool = False
    one_gpu: bool = False  # all ranks on GPU 0, as hosts of their own in NCCL's eyes
    here: tuple[str, ...] = ()
    trace: str = ""  # the file of a profile

    @property
    def turns(self) -> tuple[str, ...]:
        """Whose turn it is, one after the other."""
        return self.contenders * self.rounds

    def record(self) -> dict[str, Any]:
        """What was compared, ready for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("here", "meter")}
        return fields | {"gpt": asdict(SIZES[self.size])}

    @staticmethod
    def read(path: Path) -> Plan:
        """The plan that `asdict` and JSON made of one."""
        fields: dict[str, Any] = json.loads(path.read_text())
        return Plan(**fields | {name: tuple(fields[name]) for name in ("contenders", "here")})
