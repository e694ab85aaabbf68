"""What to run: sizes, and the plan that `step.py` hands to its ranks as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """A GPT with heads 64 wide, and the batch of each rank."""

    layers: int
    dim: int
    seq: int
    batch: int
    vocab: int


SIZES = {
    "S": Size(layers=4, dim=256, seq=128, batch=4, vocab=2048),
    "M": Size(layers=8, dim=768, seq=256, batch=2, vocab=8192),
}


@dataclass(frozen=True)
class Plan:
    """One launch: `contenders` take `rounds` turns of `steps` steps each, under the clock or under the memory meter."""

    contenders: tuple[str, ...]
    size: str
    meter: str  # "time" or "memory"
    rounds: int
    steps: int
    device: str = "cpu"
    bf16: bool = False

    def write(self, path: Path) -> None:
        """The inverse of `read`."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Plan:
        """The inverse of `write`."""
        fields = json.loads(path.read_text())
        return Plan(**(fields | {"contenders": tuple(fields["contenders"])}))
