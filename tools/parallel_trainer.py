"""`fzero.hf.Trainer` and `generate` on ranks that share layers, beside transformers' Trainer on one process.

    python tools/parallel_trainer.py [family ...]               # virtual ranks (fsdp 2, tp 2)
    python tools/parallel_trainer.py --ranks 4 [family ...]     # gloo ranks (fsdp 2, tp 2)
    python tools/parallel_trainer.py --axis sp [family ...]     # virtual ranks (fsdp 2, sp 2), or ep

Each family trains three updates and evaluates, at stages 1 to 3, with one and with two microbatches, with and without
gradient checkpointing. Then its folder of `save_model` is loaded in plain transformers, its last update is repeated
from a checkpoint on two virtual ranks without model axes, and it generates five tokens, greedily and with two beams,
from the files that `fzero.hf.from_pretrained(folder, mesh, tp=)` reads. The table has the largest relative differences
of all cases: of losses, gradient norms and rates; of the loss of the evaluation; of the weights; of the resumed update.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import tiny_models
import torch
import torch.distributed as dist
import transformers
from families import FAMILIES
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments, default_data_collator

import fzero.hf
from fzero import VirtualMesh
from fzero.base.mesh import mesh_shape

TINY = {"Llama": "llama", "Qwen3": "qwen3", "Mixtral": "mixtral", "GPT-NeoX": "gpt_neox", "gpt-oss": "gpt_oss"}
NAMES = (*TINY, "DeepSeek-V3", "GPT-2", "T5")
TINY |= {"DeepSeek-V3": "deepseek_v3"}
ROWS, MICROBATCH, UPDATES, TOKENS = 16, 4, 3, 5
MEANS = ("T5",)
"""Families whose loss is a mean over their own labels: transformers must not multiply it by the processes."""
Case = tuple[int, int, bool]


def make(name: str) -> Any:
    """A model, the same in each call."""
    if name not in TINY:
        return FAMILIES[name].make()
    made = tiny_models.make(TINY[name], "tp_plan")
    assert made is not None
    return made[0].train()


def make_rows(name: str) -> list[dict[str, Any]]:
    """Rows with different numbers of labels, but for a loss that is a mean over them."""
    if name not in TINY:
        batch = FAMILIES[name].batch(2 * ROWS)
        batch = {key: x[::2] if name in MEANS else x[:ROWS] for key, x in batch.items()}
        return [{key: x[row] for key, x in batch.items()} for row in range(ROWS)]
    tokens = torch.randint(3, tiny_models.SPECIAL, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, 8 - row % 4 :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels)]


def make_trainer(cls: Any, name: str, folder: Path, case: Case, processes: int = 1, **how: Any) -> Any:
    _, microbatches, is_checkpointed = case
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=MICROBATCH // processes, gradient_accumulation_steps=microbatches,
        per_device_eval_batch_size=MICROBATCH // processes, gradient_checkpointing=is_checkpointed, max_steps=UPDATES,
        learning_rate=1e-3, optim="sgd", logging_steps=1, save_strategy="steps", save_steps=UPDATES - 1,
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, weight_decay=0.1,
        average_tokens_across_devices=name not in MEANS,
    )  # fmt: skip
    rows = make_rows(name)
    data = {"train_dataset": rows, "eval_dataset": rows[:8], "data_collator": default_data_collator}
    return cls(make(name), arguments, **data, **how)


def train(cls: Any, name: str, folder: Path, case: Case, processes: int = 1, **how: Any) -> dict[str, Any]:
    """The logs, and the loss of an evaluation, of a run that saves its model in a folder."""
    trainer = make_trainer(cls, name, folder / "checkpoints", case, processes, **how)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = [[entry[key] for key in ("loss", "grad_norm", "learning_rate")] for entry in logs]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "model"))
    return {"logs": found, "evaluation": evaluated}


def generate(model: Any, name: str) -> list[Any]:
    prompt = torch.stack([row["input_ids"] for row in make_rows(name)[:4]])
    given: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": TOKENS}
    return [model.generate(**given, do_sample=False, num_beams=beams).tolist() for beams in (1, 2)]


def list_cases() -> list[Case]:
    return list(itertools.product((1, 2, 3), (1, 2), (False, True)))


def run_plain(name: str, folder: Path) -> dict[int, Any]:
    """What transformers' Trainer finds, by the number of microbatches."""
    found: dict[int, Any] = {}
    for microbatches in (1, 2):
        at = folder / f"plain{microbatches}"
        found[microbatches] = train(transformers.Trainer, name, at, (0, microbatches, False))
        model = type(make(name)).from_pretrained(at / "model", dtype=make(name).dtype).eval()
        tiny_models.batch_experts(model)
        found[microbatches]["tokens"] = generate(model, name)
    return found


def differ(ours: Any, theirs: Any) -> float:
    """The largest relative difference of two lists of numbers."""
    pairs = zip(torch.tensor(ours).flatten().tolist(), torch.tensor(theirs).flatten().tolist(), strict=True)
    return max(abs(a - b) / max(abs(b), 1e-8) for a, b in pairs)


def compare(name: str, folder: Path, mesh: Any, case: Case, theirs: Any, processes: int) -> list[float]:
    """How far a case is from the plain one. All ranks call it together."""
    stage, microbatches, _ = case
    at = folder / f"{stage}{case[1]}{case[2]}"
    axis = mesh_shape(mesh).names[1]
    how: dict[str, Any] = {axis: axis}
    ours = train(fzero.hf.Trainer, name, at, case, processes, mesh=mesh, stage=stage, **how)
    apart = [differ(ours["logs"], theirs["logs"]), differ([ours["evaluation"]], [theirs["evaluation"]])]
    pretrained = fzero.hf.from_pretrained(at / "model", mesh, cls=type(make(name)), dtype=make(name).dtype, **how)
    tiny_models.batch_experts(pretrained.model)
    if generate(pretrained, name) != theirs["tokens"]:
        raise SystemExit(f"{name}, {case}: other tokens")
    if processes > 1:
        dist.barrier()
    if processes == 1 or dist.get_rank() == 0:
        models = [type(make(name)).from_pretrained(where / "model") for where in (at, folder / f"plain{microbatches}")]
        pairs = list(zip(*(model.parameters() for model in models), strict=True))
        apart.append(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    if processes == 1:
        other = make_trainer(fzero.hf.Trainer, name, at / "checkpoints", case, mesh=VirtualMesh(fsdp=2))
        other.train(resume_from_checkpoint=str(at / "checkpoints" / f"checkpoint-{UPDATES - 1}"))
        apart.append(differ(read_last(other), theirs["logs"][-1]))
    return apart


def read_last(trainer: Any) -> list[float]:
    last = [entry for entry in trainer.state.log_history if "grad_norm" in entry][-1]
    return [last[key] for key in ("loss", "grad_norm", "learning_rate")]


def run_family(name: str, folder: Path, mesh: Any, processes: int, theirs: Any, cases: list[Case]) -> str:
    """A row of the table."""
    with contextlib.redirect_stdout(io.StringIO()):
        rows = [compare(name, folder, mesh, case, theirs[case[1]], processes) for case in cases]
    return f"| {name} | {len(cases)} | " + " | ".join(f"{max(column):.1e}" for column in zip(*rows)) + " |"


def run_rank(names: list[str], axis: str, folder: Path, cases: list[Case]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", axis))
    for name in names:
        theirs = {int(key): x for key, x in json.loads((folder / name / "plain.json").read_text()).items()}
        row = run_family(name, folder / name, mesh, mesh["fsdp"].size(), theirs, cases)
        if dist.get_rank() == 0:
            print(row, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, default=0, help="gloo ranks, two of which share layers")
    parser.add_argument("--axis", default="tp", choices=("tp", "ep", "sp"), help="along which two ranks share a model")
    parser.add_argument("--few", action="store_true", help="stage 3, two microbatches and checkpointing alone")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[Case] = [(3, 2, True)] if given.few else list_cases()
    if given.rank_of is not None:
        dist.init_process_group("gloo")
        run_rank(given.names, given.axis, given.rank_of, cases)
        return
    print("| family | cases | logs | evaluation | weights |" + ("" if given.ranks else " resumed |"))
    print("|---|---|---|---|---|" + ("" if given.ranks else "---|"))
    for name in given.names:
        with TemporaryDirectory() as made:
            folder = Path(made)
            with contextlib.redirect_stdout(io.StringIO()):
                theirs = run_plain(name, folder / name)
            if not given.ranks:
                print(
                    run_family(name, folder / name, VirtualMesh(**{"fsdp": 2, given.axis: 2}), 1, theirs, cases),
                    flush=True,
                )
                continue
            (folder / name / "plain.json").write_text(json.dumps(theirs))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", str(given.ranks), __file__, name, "--axis", given.axis]
            command += ["--rank-of", str(folder)]
            command += ["--few"] if given.few else []
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main()
