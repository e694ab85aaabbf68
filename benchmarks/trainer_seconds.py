"""Seconds of a short run of `fzero.hf.Trainer` beside transformers' Trainer: six updates, an evaluation, one rank.

    python benchmarks/trainer_seconds.py                     five pairs of a small Llama of 8 layers
    python benchmarks/trainer_seconds.py --hidden 512 --rows 8 --longest 256
    python benchmarks/trainer_seconds.py --profile out.prof  one run of fzero's under cProfile

The collator pads each batch to its own longest row, so that each has a length of its own. A run is a process of its
own; runs of both take turns. Seconds go from the construction of the Trainer to the end of the evaluation, and `import`
is what importing the Trainer takes, with transformers for both. Medians, then the median of the quotients of pairs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 6
VOCABULARY = 1024
KINDS = ("plain", "fzero")


def import_trainer(kind: str) -> Any:
    if kind == "plain":
        from transformers import Trainer
    else:
        from fzero.hf import Trainer
    return Trainer


def make(given: argparse.Namespace) -> dict[str, Any]:
    """What a Trainer of either kind takes."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=given.hidden, intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=given.longest, pad_token_id=0,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    draws = torch.Generator().manual_seed(given.seed)

    def rows(count: int) -> list[dict[str, Any]]:
        lengths = torch.randint(given.longest // 8, given.longest + 1, (count,), generator=draws).tolist()
        return [{"input_ids": torch.randint(2, VOCABULARY, (n,), generator=draws).tolist()} for n in lengths]

    return {
        "model": LlamaForCausalLM(config),
        "train_dataset": rows(STEPS * given.rows),
        "eval_dataset": rows(4 * given.rows),
        "data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "processing_class": tokenizer,
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one run, as the clock and as the processor count them, its losses and how often it was traced."""
    import logging

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    traces: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: traces.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    logging.getLogger("fzero").setLevel(logging.DEBUG)
    wall, cpu = time.perf_counter(), time.process_time()
    cls = import_trainer(given.kind)
    imported = time.perf_counter() - wall, time.process_time() - cpu
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=given.rows, per_device_eval_batch_size=given.rows,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=given.seed,
        )  # fmt: skip
        named = make(given)
        profile = cProfile.Profile() if given.profile else None
        wall, cpu = time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        trainer = cls(args=args, **named)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        if profile is not None:
            profile.disable()
            profile.dump_stats(given.profile)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "import": imported, "run": seconds, "losses": [*losses, evaluated],
        "traces": [text for text in traces if "is traced" in text],
    }  # fmt: skip


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument(
        "--longest", type=int, default=128, help="tokens of the longest row; the shortest has an eighth"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", help="a file for cProfile's numbers of one run")
    parser.add_argument("--kind", choices=KINDS, help="only one run, in this process")
    given = parser.parse_args()
    if given.kind or given.profile:
        given.kind = given.kind or "fzero"
        print(json.dumps(run(given)))
        return
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for pair in range(given.pairs):
        for kind in KINDS if pair % 2 else KINDS[::-1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
            if done.returncode:
                sys.exit(done.stderr)
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    gap = max(abs(a - b) for a, b in zip(found["plain"][0]["losses"], found["fzero"][0]["losses"], strict=True))
    print(f"{given.layers} layers of {given.hidden}, {given.rows} rows of up to {given.longest} tokens;", end=" ")
    print(f"losses differ by at most {gap:.1e}; traces again: {len(found['fzero'][0]['traces'])}")
    print("| seconds | import | run | run, processor |\n|---|---|---|---|")
    for kind in KINDS:
        of = found[kind]
        columns = [median([x["import"][0] for x in of]), *(median([x["run"][i] for x in of]) for i in (0, 1))]
        print(f"| {kind} | " + " | ".join(f"{x:.2f}" for x in columns) + " |")
    quotients = [median([b["run"][i] / a["run"][i] for a, b in zip(found["plain"], found["fzero"])]) for i in (0, 1)]
    print(f"| fzero / plain | | {quotients[0]:.2f} | {quotients[1]:.2f} |")


if __name__ == "__main__":
    main()
