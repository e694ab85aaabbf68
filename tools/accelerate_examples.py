"""The scripts of accelerate's repository on tiny models and data: with its Accelerator, and with ours.

    git clone https://github.com/huggingface/accelerate
    python tools/accelerate_examples.py accelerate

Prints a line for each script: how many losses both gave, the largest difference of two, and whether both printed the
same, to four digits. What scripts load from the Hub (a tokenizer, models, data, metrics) is replaced by tiny things.
Nothing else changes, but for the class of Accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import fzero.hf

ROWS = {"train": 64, "validation": 16}
FLAGS = {
    "nlp_example": [], "complete_nlp_example": ["--checkpointing_steps", "epoch", "--output_dir", "out"],
    "by_feature/automatic_gradient_accumulation": [], "by_feature/checkpointing": ["--checkpointing_steps", "2"],
    "by_feature/cross_validation": ["--num_folds", "2"], "by_feature/early_stopping": [],
    "by_feature/gradient_accumulation": ["--gradient_accumulation_steps", "2"],
    "by_feature/gradient_accumulation_for_autoregressive_models": ["--gradient_accumulation_steps", "2"],
    "by_feature/local_sgd": [], "by_feature/memory": [], "by_feature/multi_process_metrics": [],
    "by_feature/profiler": [], "by_feature/tracking": [], "by_feature/ddp_comm_hook": ["--ddp_comm_hook", "no"],
}  # fmt: skip


class Tokenizer:
    """A number for each word. It has what the examples use of a tokenizer."""

    pad_token = eos_token = "."
    pad_token_id = eos_token_id = 0

    def __call__(self, first: Any, second: Any = None, **_: Any) -> dict[str, Any]:
        pairs = zip(first, second or [""] * len(first))
        ids = [[1 + hash_word(word) for word in f"{a} {b}".split()[:12]] for a, b in pairs]
        return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}

    def pad(self, rows: Any, max_length: int | None = None, **_: Any) -> BatchEncoding:
        longest = max(max(len(row["input_ids"]) for row in rows), max_length or 0)
        data = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            is_sequence = isinstance(values[0], list)
            data[name] = torch.tensor([x + [0] * (longest - len(x)) for x in values] if is_sequence else values)
        return BatchEncoding(data)


def hash_word(word: str) -> int:
    return sum(map(ord, word)) % 60


class Rows(list):  # type: ignore[type-arg]
    """Rows of a split, with the methods of a Dataset that the examples call."""

    @property
    def num_rows(self) -> int:
        return len(self)

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def select(self, at: Any) -> Rows:
        return Rows(list.__getitem__(self, int(i)) for i in at if i < len(self))


class Splits(dict):  # type: ignore[type-arg]
    """Splits of a data set."""

    def map(self, function: Any, remove_columns: Any = (), **_: Any) -> Splits:
        return Splits({name: map_rows(rows, function, remove_columns) for name, rows in self.items()})

    def filter(self, keep: Any, input_columns: str) -> Splits:
        return Splits({name: Rows(row for row in rows if keep(row[input_columns])) for name, rows in self.items()})

    def rename_column(self, old: str, new: str) -> Splits:
        return Splits({
            name: Rows({new if key == old else key: x for key, x in row.items()} for row in rows)
            for name, rows in self.items()
        })  # fmt: skip


def map_rows(rows: Rows, function: Any, removed: Any) -> Rows:
    made = function({name: rows[name] for name in rows.column_names})
    kept = [{name: x for name, x in row.items() if name not in removed} for row in rows]
    return Rows({**row, **{name: column[i] for name, column in made.items()}} for i, row in enumerate(kept))


class Halves:
    """What an example takes of sklearn: two folds."""

    def __init__(self, n_splits: int) -> None:
        assert n_splits == 2

    def split(self, rows: Any, _: Any) -> Any:
        half = len(rows) // 2
        first, second = list(range(half)), list(range(half, 2 * half))
        return [(first, second), (second, first)]


class Metric:
    """The accuracy of all batches."""

    def __init__(self) -> None:
        self._pairs: list[Any] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs.append((predictions, references))

    def compute(self, **given: Any) -> dict[str, float]:
        pairs = [(given["predictions"], given["references"])] if given else self._pairs
        self._pairs = []
        right = sum(int((a == b).sum()) for a, b in pairs)
        return {"accuracy": right / sum(len(a) for a, _ in pairs), "f1": 0.0}


def read_rows(clone: Path) -> Splits:
    found = {}
    for name, file in {"train": "train", "validation": "dev", "test": "dev"}.items():
        with (clone / "tests" / "test_samples" / "MRPC" / f"{file}.csv").open() as lines:
            read = list(csv.DictReader(lines))
        texts = [{key: row[key] for key in ("sentence1", "sentence2")} for row in read]
        labels = [int(row["label"] == "equivalent") for row in read]
        rows = [{**text, "label": label, "idx": i} for i, (text, label) in enumerate(zip(texts, labels))]
        found[name] = Rows((rows * 8)[: ROWS.get(name, 16)])
    return Splits(found)


def make_bert(*_: Any, **__: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **off, intermediate_size=16, max_position_embeddings=64))


def make_llama(*_: Any, **__: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, max_position_embeddings=64))


def run(path: Path, flags: list[str], cls: type, splits: Splits, **named: Any) -> tuple[list[float], list[str]]:
    """Losses and printed lines of an example."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    losses: list[float] = []

    class Recorder(cls):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{**given, **named})

        def backward(self, loss: Any, **given: Any) -> None:
            losses.append(loss.item())
            super().backward(loss, **given)

    def load(name: str, *_: Any) -> Splits:
        if "wikitext" not in name:
            return splits
        return Splits({key: Rows({"text": row["sentence1"]} for row in rows) for key, rows in splits.items()})

    stubs: dict[str, dict[str, Any]] = {
        "datasets": {"load_dataset": load, "DatasetDict": Splits},
        "evaluate": {"load": lambda *_: Metric()},
        "sklearn.model_selection": {"StratifiedKFold": Halves},
        "sklearn": {},
    }
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Accelerator = Recorder
    printed, before = io.StringIO(), (sys.argv, os.getcwd())
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        sys.argv = [path.name, "--cpu", *flags]
        os.chdir(folder)
        try:
            module.main()
        finally:
            sys.argv = before[0]
            os.chdir(before[1])
    lines = re.findall(r"^(?:epoch|Average).*$", printed.getvalue(), re.MULTILINE)
    return losses, [re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4f}", line) for line in lines]


def compare(clone: Path, name: str, splits: Splits) -> str:
    file = clone / "examples" / f"{name}.py"
    theirs = run(file, FLAGS[name], accelerate.Accelerator, splits)
    try:
        ours = run(file, FLAGS[name], fzero.hf.Accelerator, splits, mesh=fzero.VirtualMesh(fsdp=2))
    except fzero.FzeroError as error:
        return f"| `{name}` | refused: {error} |"
    assert len(theirs[0]) == len(ours[0]) > 0
    worst = max(abs(a - b) for a, b in zip(theirs[0], ours[0]))
    said = "equal" if theirs[1] == ours[1] else f"{theirs[1]} and {ours[1]}"
    return f"| `{name}` | {len(theirs[0])} losses, at most {worst:.1e} apart; prints: {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("names", nargs="*", default=list(FLAGS))
    args = parser.parse_args()
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Tokenizer()  # type: ignore[method-assign]
    transformers.AutoModelForSequenceClassification.from_pretrained = make_bert  # type: ignore[method-assign]
    transformers.AutoModelForCausalLM.from_pretrained = make_llama  # type: ignore[method-assign]
    splits = read_rows(args.clone.resolve())
    for name in args.names:
        print(compare(args.clone.resolve(), name, splits), flush=True)


if __name__ == "__main__":
    main()
