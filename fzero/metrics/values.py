"""Values: what one process measures, and what all of them are together, by torchtitan's names.

Source of the names: `torchtitan/components/metrics.py`. Names that begin with "predicted/", and `hfu(%)`, are fzero's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base.errors import FzeroError
from fzero.program.flops import count_flops, count_flops_again
from fzero.program.program import Program

GIB = 2**30
_BYTES = {"max_active": "active_bytes.all.peak", "max_reserved": "reserved_bytes.all.peak"}
_COUNTS = ("num_alloc_retries", "num_ooms")
"""Keys of `torch.cuda.memory_stats`, and torchtitan's names of these."""


class StepCosts(NamedTuple):
    """What one rank does in a step: `flops`, those of them that are computed `again`, the predicted bytes at the peak,
    and the predicted seconds, None where no one has measured the machine."""

    program: Program
    flops: int
    again: int
    peak: int
    seconds: float | None

    def predicted(self) -> dict[str, float]:
        """Name -> value."""
        seconds = {} if self.seconds is None else {"predicted/end_to_end(s)": self.seconds}
        return {"predicted/max_active(GiB)": self.peak / GIB, **seconds}


class Measured(NamedTuple):
    """What one process measured in some steps: the last loss, `means` and `largest` values by name, the seconds of all
    steps and of waiting for data, and sums of what it was told, None where a step told nothing."""

    loss: float
    means: Mapping[str, float]
    largest: Mapping[str, float]
    steps: int
    seconds: float
    loading: float
    tokens: int | None
    flops: int | None
    again: int | None
    peak_flops: float | None


def measure_program(program: Program) -> StepCosts:
    """The costs of a program, from its nodes."""
    seconds = None if program.measured is None else program.timeline().seconds
    flops = sum(count_flops(program).values())
    return StepCosts(program, flops, count_flops_again(program), program.memory().peak, seconds)


def find_memory(device: torch.device) -> dict[str, float]:
    """Name -> value, of a CUDA device since its peaks were reset. Empty for any other."""
    if device.type != "cuda":
        return {}
    stats, total = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
    found: dict[str, float] = {}
    for name, key in _BYTES.items():
        nbytes = stats.get(key, 0)
        found |= {f"memory/{name}(GiB)": nbytes / GIB, f"memory/{name}(%)": 100 * nbytes / total}
    return found | {f"memory/{name}": stats.get(name, 0) for name in _COUNTS}


def join_ranks(everyone: Sequence[Measured], sharers: int, where: str) -> dict[str, float]:
    """Name -> value, from what each process measured. `sharers` processes have the same tokens.

    Means are exact: they are rounded once, and do not depend on an order.

    Raises:
        FzeroError: where processes have different names.
    """
    first = everyone[0]
    for rank, each in enumerate(everyone):
        if differing := first.means.keys() ^ each.means.keys():
            word = sorted(differing)[0]
            have, lack = (0, rank) if word in first.means else (rank, 0)
            problem = f"rank {have} gives {word!r}, and rank {lack} does not"
            raise FzeroError(f"metrics, {where}", problem, "give the same names on all ranks")
    losses = [each.loss for each in everyone]
    seconds = _find_mean([each.seconds for each in everyone])
    loading = _find_mean([each.loading for each in everyone])
    values = {"loss_metrics/global_avg_loss": _find_mean(losses), "loss_metrics/global_max_loss": _find_largest(losses)}
    if None not in [each.tokens for each in everyone]:
        tokens = sum(each.tokens or 0 for each in everyone)
        values["throughput(tps)"] = tokens / sharers / seconds / len(everyone)  # of one device
    if None not in [each.flops for each in everyone]:
        flops, again = (sum(getattr(each, name) for each in everyone) for name in ("flops", "again"))
        values["tflops"] = (flops - again) / seconds / len(everyone) / 1e12
        if None not in (peaks := [each.peak_flops for each in everyone]):
            most = seconds * sum(peak or 0.0 for peak in peaks)
            values |= {"mfu(%)": 100 * (flops - again) / most, "hfu(%)": 100 * flops / most}
    values |= {
        "time_metrics/end_to_end(s)": seconds / first.steps,
        "time_metrics/data_loading(s)": loading / first.steps,
        "time_metrics/data_loading(%)": 100 * loading / seconds,
    }
    names = [name for name in first.largest if all(name in each.largest for each in everyone)]
    values |= {name: _find_largest([each.largest[name] for each in everyone]) for name in names}
    if taken := sorted(values.keys() & first.means.keys()):
        raise FzeroError(f"metrics, {where}", f"extra has {taken[0]!r}, a name of the meter's own", "give another name")
    return values | {name: _find_mean([each.means[name] for each in everyone]) for name in first.means}


def _find_mean(values: Sequence[float]) -> float:
    """The mean, rounded once."""
    return float(statistics.mean(values))


def _find_largest(values: Sequence[float]) -> float:
    """The largest value; NaN where one is NaN."""
    return next((value for value in values if value != value), max(values))
