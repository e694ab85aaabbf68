"""Sinks: where metrics go. A sink opens once, on one rank, and is then given a step's number and its values."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError

Values = Mapping[str, float]


class Write(NamedTuple):
    """An open sink: `write(step, values)`, and `close()`."""

    write: Callable[[int, Values], object]
    close: Callable[[], object]


class Sink(NamedTuple):
    """A place for metrics: `open()` is called on the rank that writes. `packages` are what it imports.

    A sink of your own is `Sink("mine", lambda: Write(write, close))`.
    """

    name: str
    open: Callable[[], Write]
    packages: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a sink whose packages are not installed.

        Raises:
            FzeroError: naming the packages.
        """
        if missing := [package for package in self.packages if importlib.util.find_spec(package) is None]:
            names = " and ".join(missing)
            problem = f"needs {names}, which {'is' if len(missing) == 1 else 'are'} not installed"
            raise FzeroError(f"metrics.{self.name}", problem, f"pip install {' '.join(missing)}, or give another sink")


@check_arguments
def jsonl(path: str | os.PathLike[str]) -> Sink:
    """A file with one JSON object a line: "step", and each name with its value. Lines are appended to a file that is
    there. Values that are no finite numbers are written as NaN and Infinity, which Python's `json` and pandas read."""

    def append(text: str) -> None:
        with open(path, "a") as file:
            file.write(text)

    def open_file() -> Write:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        append("")  # a path that cannot be written to is an error now
        return Write(lambda step, values: append(json.dumps({"step": step, **values}) + "\n"), lambda: None)

    return Sink("jsonl", open_file)


@check_arguments
def console(say: Callable[[str], object] = print) -> Sink:
    """One line for each logged step, in torchtitan's order, to `say`."""

    def write(step: int, values: Values) -> None:
        shown = (form.format(values[name]) for name, form in _LINE.items() if name in values)
        say(f"step: {step:2}  " + "  ".join(shown))

    return Sink("console", lambda: Write(write, lambda: None))


_LINE = {
    "loss_metrics/global_avg_loss": "loss: {:7.4f}",
    "grad_norm": "grad_norm: {:7.4f}",
    "memory/max_reserved(GiB)": "memory: {:5.2f}GiB",
    "throughput(tps)": "tps: {:,.0f}",
    "tflops": "tflops: {:,.2f}",
    "mfu(%)": "mfu: {:.2f}%",
}


@check_arguments
def tensorboard(folder: str | os.PathLike[str]) -> Sink:
    """Event files of TensorBoard in a folder, by torch's `SummaryWriter`."""

    def open_writer() -> Write:
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

        def write(step: int, values: Values) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return Write(write, writer.close)

    return Sink("tensorboard", open_writer, ("tensorboard",))


def wandb(**options: Any) -> Sink:
    """A run of Weights & Biases: `options` are those of `wandb.init`, such as `project="mine"`."""

    def open_run() -> Write:
        run: Any = importlib.import_module("wandb").init(**options)
        return Write(lambda step, values: run.log(dict(values), step=step), run.finish)

    return Sink("wandb", open_run, ("wandb",))


def mlflow(**options: Any) -> Sink:
    """A run of MLflow: `options` are those of `mlflow.start_run`, such as `run_name="mine"`. MLflow takes no brackets
    and no "%" in a name: "mfu(%)" is called "mfu_pct" there, and "memory/max_active(GiB)" "memory/max_active_GiB"."""

    def open_run() -> Write:
        service: Any = importlib.import_module("mlflow")
        service.start_run(**options)

        def write(step: int, values: Values) -> None:
            service.log_metrics({_rename(name): value for name, value in values.items()}, step=step)

        return Write(write, service.end_run)

    return Sink("mlflow", open_run, ("mlflow",))


def _rename(name: str) -> str:
    return re.sub(r"\((\w+)\)", r"_\1", name.replace("(%)", "_pct"))
