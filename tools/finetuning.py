"""Fine-tuning on two processes beside peft and TRL in plain transformers under DDP: the largest differences.

    python tools/finetuning.py --write                 # all cases, and docs/finetuning_table.md
    python tools/finetuning.py Llama DPO               # cases whose name has one of these words

* Adapters: five families of `benchmarks/families.py`, five forms each, at stages 3 and 2. A run makes 20 updates of two
  microbatches, with activation checkpointing. Plain peft reads the adapters that were saved, and computes logits.
* TRL: 20 updates of a tiny Llama, whose logs have all metrics of TRL.

Codes are compared with a plain base model whose weights plain torch rounded to the values of the codes. Nothing is
downloaded. Both packages have to be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import fzero.hf  # noqa: E402
from fzero.hf.merging import list_leaves  # noqa: E402
from fzero.values.quantized import is_quantized  # noqa: E402

PAGE, JOURNAL = ROOT / "docs" / "finetuning_table.md", ROOT / "build" / "finetuning.json"
RANKS, ROWS, UPDATES = 2, 24, 20
CLOSE, CLOSE_LOGS = 1e-5, 1e-4
"""What adapters, and logs of TRL, may be apart."""
TARGETS: dict[str, list[str]] = {
    "Llama": ["q_proj", "v_proj", "up_proj"], "Qwen3": ["q_proj", "v_proj", "up_proj"], "Mixtral": ["q_proj", "v_proj"],
    "GPT-2": ["c_attn", "c_fc"], "T5": ["q", "v", "wi"],
}  # fmt: skip
NF4, INT8 = {"bits": 4, "block": 64, "levels": "nf4"}, {"bits": 8, "block": 64}
DOUBLE = {**NF4, "double_quant": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "LoRA": ({}, None),
    "DoRA": ({"use_dora": True}, None),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None),
    "QLoRA, nf4": ({}, NF4),
    "QLoRA, nf4-dq": ({}, DOUBLE),
    "QLoRA, 8 bits": ({}, INT8),
}
"""Form -> further options of LoraConfig, and the codes of the base model."""
PACKED = {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}
FAST = {"learning_rate": 3e-2}
TRL: dict[str, dict[str, Any]] = {
    "SFT, packed": {"kind": "text", "changed": PACKED},
    "SFT, completions": {"kind": "SFT"},
    "SFT, LoRA": {"kind": "SFT", "lora": "new"},
    "SFT, QLoRA, nf4": {"kind": "SFT", "lora": "new", "quantize": NF4, "changed": FAST},
    "SFT, QLoRA, nf4-dq": {"kind": "SFT", "lora": "new", "quantize": DOUBLE, "changed": FAST},
    "SFT, packed, QLoRA, 8 bits": {"kind": "text", "lora": "new", "quantize": INT8, "changed": PACKED},
    "DPO": {"kind": "DPO"},
    "DPO, LoRA": {"kind": "DPO", "lora": "new"},
    "DPO, QLoRA, nf4": {"kind": "DPO", "lora": "new", "quantize": NF4},
    "Reward": {"kind": "Reward"},
    "Reward, QLoRA, 8 bits": {"kind": "Reward", "lora": "new", "quantize": INT8, "changed": FAST},
    "GRPO": {"kind": "GRPO"},
    "GRPO, LoRA": {"kind": "GRPO", "lora": "new"},
    "GRPO, QLoRA, nf4": {"kind": "GRPO", "lora": "new", "quantize": NF4, "changed": FAST},
}
"""Case -> the arguments of `hf_trl.make_trainer`."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of nf4, as bitsandbytes has them."""


def round_to_codes(weight: torch.Tensor, coding: dict[str, Any]) -> torch.Tensor:
    """A weight as codes in blocks of 64 stand for it, in plain torch. Of two levels the nearer one counts."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    if coding["bits"] == 4:
        numbers = round_to_levels(blocks / scales, torch.tensor(LEVELS))
        made = numbers * (round_scales(scales) if coding.get("double_quant") else scales)
    else:
        made = (blocks / (scales / 127)).round() * (scales / 127)
    return made.flatten()[: weight.numel()].view(weight.shape)


def round_to_levels(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Of each value the nearest level."""
    return levels[(values.unsqueeze(-1) - levels).abs().argmin(-1)]


def round_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [B, 1] as double quantization holds them: distances from their mean as dynamic 8-bit numbers, with a
    scale for 256 of them."""
    numbers = [0.0, 1.0]
    for k in range(7):
        borders = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float64)
        numbers += [
            sign * x * 10.0 ** (k - 6) for x in (borders[1:] + borders[:-1]).div(2).tolist() for sign in (1, -1)
        ]
    levels, mean = torch.tensor(sorted(numbers)), scales.double().mean().float()
    groups = [(group, group.abs().max()) for group in (scales - mean).split(256)]
    return torch.cat([round_to_levels(group / most, levels) * most for group, most in groups]) + mean


def round_as(trainer: Any, model: Any, coding: dict[str, Any] | None) -> Any:
    """The model, with the weights that `trainer` holds as codes rounded to their values."""
    for path, leaf in list_leaves(trainer.sharded.params).items():
        if is_quantized(leaf):
            assert coding is not None
            weight = model.get_parameter(path)
            weight.data = round_to_codes(weight.data, coding)
    return model


def make_adapted(family: str, form: str) -> Any:
    import peft
    from families import FAMILIES

    config = peft.LoraConfig(r=4, target_modules=TARGETS[family], init_lora_weights=True, **FORMS[form][0])
    return peft.get_peft_model(FAMILIES[family].make(), config)


def train(cls: Any, family: str, model: Any, folder: Path, **named: Any) -> Any:
    """A Trainer behind a run, whose adapters are in `folder`."""
    from families import FAMILIES

    batch = FAMILIES[family].batch(ROWS)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=UPDATES,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, activation_checkpointing=True, optim="adamw_torch",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = cls(
        model,
        arguments,
        train_dataset=[{key: x[row] for key, x in batch.items()} for row in range(ROWS)],
        data_collator=transformers.default_data_collator,
        **named,
    )
    trainer.train()
    trainer.save_model(folder)
    return trainer


def compare_adapters(family: str, form: str, folder: Path) -> dict[str, float]:
    """The largest differences over both stages."""
    import peft
    from families import FAMILIES

    most, plain = dict.fromkeys(("loss", "gradient norm", "adapters", "logits"), 0.0), None
    for stage in (3, 2):
        ours = folder / str(stage)
        got = train(fzero.hf.Trainer, family, make_adapted(family, form), ours, stage=stage, quantize=FORMS[form][1])
        if plain is None:
            model = round_as(got, make_adapted(family, form), FORMS[form][1])
            plain = train(transformers.Trainer, family, model, folder / "plain")
        logs = [[x for x in each.state.log_history if "loss" in x] for each in (got, plain)]
        for name, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
            most[name] = max(most[name], *(abs(a[key] - b[key]) for a, b in zip(*logs, strict=True)))
        dist.barrier()
        base = round_as(got, make_adapted(family, form), FORMS[form][1]).unload()
        read = peft.PeftModel.from_pretrained(base, ours)
        held = dict(plain.model.named_parameters())
        trained = {path for path, x in held.items() if x.requires_grad}
        assert trained and trained <= dict(read.named_parameters()).keys()
        for path in trained:
            most["adapters"] = max(most["adapters"], (read.get_parameter(path) - held[path]).abs().max().item())
        batch = FAMILIES[family].batch(ROWS)
        with torch.no_grad():
            apart = read.eval()(**batch).logits - plain.model.eval()(**batch).logits
        most["logits"] = max(most["logits"], apart.abs().max().item())
    return most


def compare_trl(name: str, folder: Path) -> dict[str, float]:
    """The largest difference of any number of the logs, of a loss, and of saved weights."""
    import trl
    from hf_trl import UPDATES, find_class, make_language_model, make_trainer, read_all_logs
    from safetensors.torch import load_file

    case = {"changed": {}, **TRL[name]}
    changed = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **case.pop("changed")}
    kind, coding, trainers = case["kind"], case.pop("quantize", None), []
    made = transformers.LlamaForSequenceClassification if kind == "Reward" else transformers.LlamaForCausalLM
    if dist.get_rank() == 0:
        make_language_model(folder / "first", made)  # which writes a folder that all ranks read
    dist.barrier()
    for module in (fzero.hf, trl):
        own = folder / module.__name__
        model, named = make_language_model(own, made), {}
        if module is fzero.hf:
            named = {"quantize": coding}
        elif coding is not None:
            held = {path.replace(".base_layer", ""): x for path, x in list_leaves(trainers[0].sharded.params).items()}
            for path, x in model.named_parameters():
                if is_quantized(held.get(f"base_model.model.{path}")):
                    x.data = round_to_codes(x.data, coding)
        trainer = make_trainer(find_class(module, kind), own, changed=changed, model=model, **case, **named)
        trainer.train()
        trainer.evaluate()
        trainer.save_model(own)
        trainers.append(trainer)
    dist.barrier()
    logs = [read_all_logs(trainer) for trainer in trainers]
    assert len(logs[1]) == UPDATES + 2  # the last two are of the run, and of `evaluate`
    most = {"loss": 0.0, "logs": 0.0, "weights": 0.0}
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        for key, x in theirs.items():
            apart = abs(ours[key] - x) / max(1.0, abs(x))
            most["logs"] = max(most["logs"], apart)
            most["loss"] = max(most["loss"], apart if key == "loss" else 0.0)
    for file in (folder / "trl").glob("*.safetensors"):
        mine, their = load_file(folder / "fzero.hf" / file.name), load_file(file)
        assert mine.keys() == their.keys()
        most["weights"] = max(most["weights"], *((mine[key] - x).abs().max().item() for key, x in their.items()))
    most["from"], most["to"] = logs[0][0]["loss"], logs[0][UPDATES - 1]["loss"]
    return most


def list_cases() -> Iterator[tuple[str, str]]:
    """(table, name) of each case."""
    yield from (("adapters", f"{family}: {form}") for family in TARGETS for form in FORMS)
    yield from (("trl", name) for name in TRL)


def run_rank(names: list[str], out: Path) -> None:
    """Compare cases as a rank. Rank 0 adds a line to `out` for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    tables = {name: table for table, name in list_cases()}
    for name in names:
        shared = [TemporaryDirectory().name if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        folder = Path(str(shared[0]))
        if tables[name] == "trl":
            found = compare_trl(name, folder)
        else:
            found = compare_adapters(*name.split(": "), folder)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            with out.open("a") as file:
                print(json.dumps({name: found}), file=file)
    dist.barrier()  # gloo aborts ranks whose peers leave early
    dist.destroy_process_group()


def launch(names: list[str]) -> dict[str, dict[str, float]]:
    """What two processes find; a case that ended with an error is not there."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--rank-of", str(out), *names]
        subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            timeout=3600,
        )
        lines = out.read_text().splitlines() if out.exists() else []
        return {name: found for line in lines for name, found in json.loads(line).items()}


PAGE_HEAD = """# Fine-tuning beside peft and TRL

`python tools/finetuning.py --write` makes this page. Each row is a run of {updates} updates on two processes (gloo),
beside the plain trainer under DDP on two processes, with the same seed, in float32. Models are tiny.

{versions}."""
ADAPTERS_HEAD = """
## Adapters

`fzero.hf.Trainer` at stages 3 and 2 beside transformers' Trainer with peft: two microbatches an update, activation
checkpointing, AdamW. Where the base is codes, plain torch rounded that of the plain run to the values of the codes.
Largest differences over all updates and both stages. Logits are those of plain peft with the adapters that were saved.

| family | form | loss | gradient norm | adapters | logits |
|---|---|---|---|---|---|""".splitlines()
TRL_HEAD = """
## TRL

A Llama in the trainers of `fzero.hf` at stage 3 beside those of TRL. The logs are all metrics of each update, of the
run and of `evaluate`; differences of numbers above 1 are relative.

| run | loss | logs | saved weights | first and last loss |
|---|---|---|---|---|""".splitlines()


def write_page(found: dict[str, dict[str, float]]) -> str:
    """The tables."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "peft", "trl", "torch"))
    lines = [PAGE_HEAD.format(updates=UPDATES, versions=versions), *ADAPTERS_HEAD]
    for family in TARGETS:
        for form in (form for form in FORMS if f"{family}: {form}" in found):
            values = found[f"{family}: {form}"]
            numbers = " | ".join(f"{values[key]:.1e}" for key in ("loss", "gradient norm", "adapters", "logits"))
            lines.append(f"| {family} | {form} | {numbers} |")
    lines += TRL_HEAD
    for name in (name for name in TRL if name in found):
        values = found[name]
        numbers = " | ".join(f"{values[key]:.1e}" for key in ("loss", "logs", "weights"))
        lines.append(f"| {name} | {numbers} | {values['from']:.4f} to {values['to']:.4f} |")
    missing = "; ".join(name for _, name in list_cases() if name not in found)
    lines += [f"\nNot run for this page: {missing}."] if missing else []
    return "\n".join(lines) + "\n"


def is_far(found: dict[str, float]) -> bool:
    if "logs" in found:
        return found["logs"] > CLOSE_LOGS
    return any(found[key] > CLOSE for key in ("loss", "gradient norm", "adapters", "logits"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of names of cases; all cases without")
    parser.add_argument("--write", action="store_true", help=f"{PAGE.relative_to(ROOT)}, with what earlier runs found")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        run_rank(given.words, given.rank_of)
        return
    chosen = [name for _, name in list_cases() if not given.words or any(word in name for word in given.words)]
    journal = json.loads(JOURNAL.read_text()) if JOURNAL.exists() else {}
    failed, far = list[str](), list[str]()
    for group in [chosen[i : i + 5] for i in range(0, len(chosen), 5)]:
        found = launch(group)
        failed += [name for name in group if name not in found]
        far += [name for name, each in found.items() if is_far(each)]
        for name, each in found.items():
            print(f"{name}: " + ", ".join(f"{key} {x:.1e}" for key, x in each.items()), flush=True)
        journal |= found
        JOURNAL.parent.mkdir(exist_ok=True)
        JOURNAL.write_text(json.dumps(journal, indent=1))
    if failed or far:
        sys.exit(f"errors: {failed}; too far apart: {far}")
    if given.write:
        PAGE.write_text(write_page(journal))


if __name__ == "__main__":
    main()
