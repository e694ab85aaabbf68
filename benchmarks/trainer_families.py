"""`fzero.hf.Trainer` on several ranks beside transformers' Trainer, for each family of models: the largest differences.

    python benchmarks/trainer_families.py

Each family is a tiny configuration of `families.py`. A run makes three updates of two microbatches, and evaluates. The
ranks have equal shares of the batch of one process. Rows have different numbers of labels. Where transformers divides a
loss by the labels of all ranks, its Trainer has the same numbers on one process and on several. Where a model takes the
mean over its own labels, a mean over ranks is another number, and only the runs on several ranks have to agree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from families import FAMILIES
from transformers import TrainingArguments, default_data_collator

ROWS, MICROBATCH, UPDATES = 24, 4, 3
ALLOWED = 1e-5
NAMES = ("loss", "grad_norm", "eval_loss")
Found = dict[str, dict[str, list[float]]]
"""Family -> what of NAMES -> its values."""


def train(trainer: str, names: list[str], folder: str) -> Found:
    """The logs of each family, of this rank."""
    if trainer == "fzero":
        from fzero.hf import Trainer
    else:
        from transformers import Trainer
    world = int(os.environ.get("WORLD_SIZE", 1))
    found: Found = {}
    for name in names:
        family = FAMILIES[name]
        batch = family.batch(ROWS)
        dataset = [{key: x[row] for key, x in batch.items()} for row in range(ROWS)]
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=MICROBATCH // world, gradient_accumulation_steps=2, max_steps=UPDATES,
            per_device_eval_batch_size=MICROBATCH // world, learning_rate=1e-3, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        )  # fmt: skip
        made = Trainer(
            family.make(),
            arguments,
            train_dataset=dataset,
            eval_dataset=dataset[:8],
            data_collator=default_data_collator,
        )
        made.train()
        made.evaluate()
        found[name] = {what: [entry[what] for entry in made.state.log_history if what in entry] for what in NAMES}
    return found


def run(trainer: str, ranks: int, names: list[str]) -> Found:
    """`train` in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        given = ["--only", ",".join(names), "--rank-of", trainer, "--json", str(out)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, *launcher, __file__, *given]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def apart(first: dict[str, list[float]], second: dict[str, list[float]], what: str) -> float:
    return max(abs(a - b) for a, b in zip(first[what], second[what], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, with commas between them")
    parser.add_argument("--json", type=Path, help="a file for all values")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.only.split(",")
    if given.rank_of:
        found = train(given.rank_of, names, tempfile.mkdtemp())
        if int(os.environ.get("RANK", 0)) == 0:
            given.json.write_text(json.dumps(found))
        return
    ours, theirs, alone = (
        run(trainer, ranks, names) for trainer, ranks in (("fzero", given.ranks), ("plain", given.ranks), ("plain", 1))
    )
    if given.json:
        given.json.write_text(json.dumps({"fzero": ours, "plain": theirs, "plain on one": alone}))
    print(f"{given.ranks} ranks; the largest difference from transformers' Trainer on as many, and on one process\n")
    print("| family | loss | gradient norm | evaluation | on one: loss | its own on one: loss |")
    print("|---|---|---|---|---|---|")
    wrong = []
    for name in names:
        same = [apart(ours[name], theirs[name], what) for what in NAMES]
        one, own = apart(ours[name], alone[name], "loss"), apart(theirs[name], alone[name], "loss")
        print(f"| {name} | " + " | ".join(f"{x:.1e}" for x in (*same, one, own)) + " |")
        if max(same) > ALLOWED or (own <= ALLOWED < one):
            wrong.append(name)
    if wrong:
        sys.exit("too far apart: " + ", ".join(wrong))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
