"""Services get the calls of their own packages, which stand-ins write down, and packages that are missing are named."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fzero import FzeroError, metrics

VALUES = {"loss_metrics/global_avg_loss": 0.5, "throughput(tps)": 8.0, "mfu(%)": 40.0, "memory/max_active(GiB)": 1.5}


class Recorder:
    """A stand-in for a package, and for what its functions return: it writes calls down."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, *args, *([kwargs] if kwargs else [])))
            return self

        return call


@pytest.mark.parametrize(
    ("package", "sink", "calls"),
    [
        (
            "wandb",
            metrics.wandb(project="mine"),
            [("init", {"project": "mine"}), ("log", VALUES, {"step": 3}), ("finish",)],
        ),
        (
            "torch.utils.tensorboard",
            metrics.tensorboard("runs"),
            [
                ("SummaryWriter", "runs"),
                *(("add_scalar", name, value, 3) for name, value in VALUES.items()),
                ("flush",),
                ("close",),
            ],
        ),
    ],
)
def test_services_get_the_calls_of_their_packages(
    package: str, sink: metrics.Sink, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: Any = Recorder()
    monkeypatch.setitem(sys.modules, package, recorder)
    opened = sink.open()
    opened.write(3, VALUES)
    opened.close()
    assert recorder.calls == calls


def test_mlflow_gets_names_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names have letters, digits, and the signs _ - . : / and space (mlflow/utils/validation.py)."""
    logged: dict[str, Any] = {}
    service: Any = SimpleNamespace(
        start_run=lambda **options: logged.update(options),
        log_metrics=lambda values, step: logged.update(values=values, step=step),
        end_run=lambda: logged.update(ended=True),
    )
    monkeypatch.setitem(sys.modules, "mlflow", service)
    opened = metrics.mlflow(run_name="mine").open()
    opened.write(3, VALUES)
    opened.close()
    assert logged["run_name"] == "mine" and logged["step"] == 3 and logged["ended"]
    assert logged["values"]["mfu_pct"] == 40.0 and logged["values"]["memory/max_active_GiB"] == 1.5
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in logged["values"])


@pytest.mark.parametrize("sink", [metrics.wandb(), metrics.mlflow(), metrics.tensorboard("runs")])
def test_a_package_that_is_missing_is_named(sink: metrics.Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FzeroError, match=rf"metrics\.{sink.name}: needs {sink.name}, .*; pip install {sink.name}, or"):
        sink.check()
