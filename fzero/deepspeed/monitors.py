"""Monitors: files and services that get loss, rate and loss scale behind each update, by DeepSpeed's names.

Source: `deepspeed/monitor` of DeepSpeed 0.19.8. Only rank 0 writes.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fzero.base.errors import FzeroError

Options = Mapping[str, Any]


class Event(NamedTuple):
    """A number, and how many examples all ranks have seen."""

    name: str
    value: float
    samples: int


Write = Callable[[Sequence[Event]], None]


class Monitors:
    """The monitors of an engine: block of the configuration -> its options. On other ranks than 0 it does nothing.

    Raises:
        FzeroError: for a package that is not installed, on all ranks; for a folder that cannot be made.
    """

    def __init__(self, blocks: Mapping[str, Options], rank: int) -> None:
        for name in blocks:
            package = _PACKAGES.get(name)
            if package is not None and importlib.util.find_spec(package) is None:
                problem = f"needs the package {package}, which is not installed"
                raise FzeroError(f"{name}.enabled", problem, f"install {package}, or give csv_monitor")
        self._writes = [_OPENERS[name](options) for name, options in blocks.items()] if rank == 0 else []

    def write(self, engine: Any, losses: Sequence[Tensor]) -> None:
        """Write the mean of an update's losses, the rate of the next update and, with fp16, the loss scale. Waits for
        the device."""
        if not self._writes:
            return
        values, rates = dict[str, float](), engine.get_lr()
        if losses:  # `loss.backward()` tells the engine none
            values["train_loss"] = sum(map(float, losses)) / len(losses)
        if rates:
            values["lr"] = rates[0]
        if engine.fp16_enabled():
            values["loss_scale"] = engine.loss_scale
        events = [Event(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
        for write in self._writes:
            write(events)


def _open_csv(options: Options) -> Write:
    """One file for each name. A process begins its part of a file with a header, also where the file is there."""
    folder = _make_folder("csv_monitor", options)
    begun: set[str] = set()

    def write(events: Sequence[Event]) -> None:
        for event in events:
            with open(folder / f"{event.name.replace('/', '_')}.csv", "a") as file:
                rows = csv.writer(file)
                if event.name not in begun:
                    begun.add(event.name)
                    rows.writerow(["step", event.name.rpartition("/")[2]])
                rows.writerow([event.samples, event.value])

    return write


def _open_tensorboard(options: Options) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=str(_make_folder("tensorboard", options)))

    def write(events: Sequence[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def _open_wandb(options: Options) -> Write:
    wandb: Any = importlib.import_module("wandb")
    wandb.init(project=options["project"], group=options["group"], entity=options["team"])

    def write(events: Sequence[Event]) -> None:
        for event in events:
            wandb.log({event.name: event.value}, step=event.samples)

    return write


def _open_comet(options: Options) -> Write:
    """An experiment of Comet, which gets a number each `samples_log_interval` examples."""
    names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
    experiment: Any = importlib.import_module("comet_ml").start(**{name: options[name] for name in names})
    if options["experiment_name"] is not None:
        experiment.set_name(options["experiment_name"])
    last: dict[str, int] = {}

    def write(events: Sequence[Event]) -> None:
        for event in events:
            if event.name not in last or event.samples - last[event.name] >= options["samples_log_interval"]:
                last[event.name] = event.samples
                experiment.log_metric(event.name, event.value, step=event.samples)

    return write


def _make_folder(block: str, options: Options) -> Path:
    folder = Path(options["output_path"]) / options["job_name"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder {str(folder)!r} cannot be made: {error.strerror}"
        raise FzeroError(f"{block}.output_path", problem, "give a folder that this process can write to") from None
    return folder


_OPENERS: dict[str, Callable[[Options], Write]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "comet": _open_comet,
    "csv_monitor": _open_csv,
}
"""Block of a configuration -> the function that makes its monitor."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
