"""A plugin of pytest: tests of TRL, peft and transformers see the trainers of `fzero.hf` in the place of their own.

`tools/upstream_tests.py` passes the environment. Tests look at `trainer.model` as at a whole model: where the code of a
test asks, it gets a copy with the present values, for which others write `fzero.unpartition(trainer.sharded.params)`.
The trainers' own code gets the structure, as always. Data sets that a script of the checkout makes are made by it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT, CHOSEN = Path(os.environ["UPSTREAM_ROOT"]), os.environ.get("UPSTREAM_CHOSEN")
OUT, IS_OURS = Path(os.environ["UPSTREAM_OUT"]), os.environ["UPSTREAM_TRAINERS"] == "fzero"
LIBRARIES = ("trl", "peft", "transformers")
TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


def pytest_configure() -> None:
    stand_for_diffusers()
    serve_datasets()
    stand_for_missing()
    if IS_OURS:
        replace_trainers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that call a trainer, that the command chose, and that have no outcome; with UPSTREAM_FIRST a case of
    each function."""
    chosen = None if CHOSEN is None else set(json.loads(Path(CHOSEN).read_text()))
    done = {json.loads(line)["test"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    items[:] = [
        x for x in items if calls_trainer(x) and x.nodeid not in done and (chosen is None or x.nodeid in chosen)
    ]
    if "UPSTREAM_FIRST" in os.environ:
        items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
        items.reverse()


def calls_trainer(item: Any) -> bool:
    return "rainer(" in inspect.getsource(inspect.unwrap(item.obj))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """A trainer of fzero begins a process group of one rank. Fixtures of TRL take any group for that of a server."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash is not None else str(report.longrepr or "")
        with OUT.open("a") as file:
            found = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "why": why[:2000]}
            print(json.dumps(found), file=file)


def stand_for_diffusers() -> None:
    """peft's tests import one class, which those that call a trainer do without."""
    if importlib.util.find_spec("diffusers") is None:
        stand_in = types.ModuleType("diffusers")
        vars(stand_in).update(StableDiffusionPipeline=type("StableDiffusionPipeline", (), {}), __spec__=None)
        sys.modules["diffusers"] = stand_in


def stand_for_missing() -> None:
    """Names that tests import and this release of a library lacks: nothing is available, and a use is an error. So the
    other tests of a file of another release are collected."""
    for file in [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / "trainer").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            source = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            if source and source.partition(".")[0] in LIBRARIES and _has(source):
                module = importlib.import_module(source)
                for name in (each.name for each in node.names if not hasattr(module, each.name)):
                    setattr(module, name, make_absent(f"{source}.{name}"))


def _has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def make_absent(name: str) -> Any:
    if name.rpartition(".")[2].startswith("is_"):
        return lambda *_, **__: False

    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError(f"{name} is not in this release")

    return absent


def replace_trainers() -> None:
    import transformers

    import fzero.hf

    if importlib.util.find_spec("trl") is not None:
        import trl

        for name in TRAINERS:
            setattr(trl, name, show_whole(getattr(fzero.hf, name)))
    for name in ("Trainer", "Seq2SeqTrainer"):
        made = show_whole(getattr(fzero.hf, name))
        setattr(transformers, name, made)


def show_whole(cls: Any) -> Any:
    """A subclass whose `model` is whole for the code of tests."""

    def get(self: Any) -> Any:
        model = vars(self).get("model")
        asks = sys._getframe(1).f_code.co_filename
        if not asks.startswith(f"{ROOT}{os.sep}tests") or not hasattr(self, "sharded") or model is not self._structure:
            return model
        return fill(self, model)

    def put(self: Any, model: Any) -> None:
        vars(self)["model"] = model

    return type(
        cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, "model": property(get, put)}
    )


def fill(trainer: Any, structure: Any) -> Any:
    """A copy of the model with the present values. One is made for each state."""
    from fzero.hf.adapters import fill_model
    from fzero.hf.merging import list_leaves

    held, kept = trainer.sharded.params, vars(trainer).get("_upstream")
    if kept is None or kept[0] is not held:
        whole = {path: leaf.full_tensor() for path, leaf in list_leaves(held).items()}
        filled = fill_model(structure, whole)
        if hasattr(filled, "tie_weights"):
            filled.tie_weights()  # the values came in by the first names
        kept = vars(trainer)["_upstream"] = (held, filled)
    return kept[1]


def serve_datasets() -> None:
    """Let `load_dataset` return what the scripts of the checkout would push to the Hub, and lines of Python's
    documentation for the quotes with which peft's tests train."""
    if importlib.util.find_spec("datasets") is None:
        return
    import datasets

    quotes = [line for line in (inspect.getdoc(str.split) or "").splitlines() if line] * 4
    made: dict[tuple[str, str | None], Any] = {
        ("ybelkada/english_quotes_copy", None): datasets.DatasetDict(
            train=datasets.Dataset.from_dict({"quote": quotes})
        )
    }
    script = ROOT / "scripts" / "generate_zen_dataset.py"
    if script.exists():
        push = datasets.DatasetDict.push_to_hub
        datasets.DatasetDict.push_to_hub = lambda self, repo, config_name=None: made.update({(repo, config_name): self})
        spec = importlib.util.spec_from_file_location("generate_zen_dataset", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["generate_zen_dataset"] = module  # as dataclasses want
        spec.loader.exec_module(module)
        module.main(test_size=0.1, push_to_hub=True, repo_id="trl-internal-testing/zen")
        datasets.DatasetDict.push_to_hub = push
    load = datasets.load_dataset

    def load_made(path: str, name: str | None = None, *more: Any, split: Any = None, **named: Any) -> Any:
        found = made.get((path, name))
        if found is None:
            return load(path, name, *more, split=split, **named)
        if named.get("streaming"):
            found = datasets.IterableDatasetDict({key: x.to_iterable_dataset() for key, x in found.items()})
        return found if split is None else found[split]

    datasets.load_dataset = load_made
