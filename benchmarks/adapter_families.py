"""Adapters in `fzero.hf.Trainer` on two virtual ranks beside peft in transformers' Trainer: the largest differences.

    python benchmarks/adapter_families.py

Each family is a tiny configuration of `families.py`, and trains in five forms: LoRA, DoRA, a whole head beside LoRA
(`modules_to_save`), and LoRA over nf4 and 8-bit codes of the base model. The plain model of the last two has the same
weights, which plain torch rounded to the codes' values. A run makes 20 updates of two microbatches, with activation
checkpointing, at stage 3 and at stage 2. Adapters that were saved are read by peft and compared, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES, Family
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import TrainingArguments, default_data_collator

import fzero.hf
from fzero.hf.merging import list_leaves
from fzero.values.quantized import is_quantized

ROWS, MICROBATCH, UPDATES = 24, 4, 20
ALLOWED = 1e-5
TARGETS: dict[str, Any] = {
    "Llama": ["q_proj", "v_proj", "up_proj"], "Qwen3": ["q_proj", "v_proj", "up_proj"], "Mixtral": ["q_proj", "v_proj"],
    "GPT-2": ["c_attn", "c_fc"], "T5": ["q", "v", "wi"],
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "QLoRA, nf4": {},
    "QLoRA, 8 bits": {},
}
CODES: dict[str, dict[str, Any]] = {
    "QLoRA, nf4": {"bits": 4, "block": 64, "levels": "nf4"},
    "QLoRA, 8 bits": {"bits": 8, "block": 64},
}
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of nf4, as bitsandbytes has them."""


def round_to_codes(weight: Tensor, form: str) -> Tensor:
    """A weight as the codes of a form stand for it, in plain torch. Of two levels the nearer one counts."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    if form == "QLoRA, nf4":
        levels = torch.tensor(LEVELS)
        made = levels[((blocks / scales).unsqueeze(-1) - levels).abs().argmin(-1)] * scales
    else:
        made = (blocks / (scales / 127)).round() * (scales / 127)
    return made.flatten()[: weight.numel()].view(weight.shape)


def make(name: str, form: str) -> Any:
    """A model of peft of a family."""
    family: Family = FAMILIES[name]
    adapters = LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights=True, **FORMS[form])
    return get_peft_model(family.make(), adapters)


def train(cls: Any, name: str, model: Any, folder: str, **named: Any) -> Any:
    """A Trainer behind a run, whose adapters are in `folder`."""
    batch = FAMILIES[name].batch(ROWS)
    dataset = [{key: x[row] for key, x in batch.items()} for row in range(ROWS)]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=MICROBATCH, gradient_accumulation_steps=2, max_steps=UPDATES,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, activation_checkpointing=True, train_sampling_strategy="sequential",
        average_tokens_across_devices=False, optim="adamw_torch",
    )  # fmt: skip
    trainer = cls(model, arguments, train_dataset=dataset, data_collator=default_data_collator, **named)
    trainer.train()
    trainer.save_model(folder)
    return trainer


def compare(name: str, form: str) -> list[float]:
    """The largest differences of losses, of gradient norms and of adapters, over both stages."""
    most, plain = [0.0, 0.0, 0.0], None
    for stage in (3, 2):
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
            got = train(
                fzero.hf.Trainer, name, make(name, form), ours, mesh=fzero.VirtualMesh(fsdp=2), stage=stage,
                quantize=CODES.get(form),
            )  # fmt: skip
            if plain is None:
                model = make(name, form)
                for path, leaf in list_leaves(got.sharded.params).items():
                    if is_quantized(leaf):
                        weight = model.get_parameter(path)
                        weight.data = round_to_codes(weight.data, form)
                plain = train(transformers.Trainer, name, model, theirs)
            logs = [[x for x in each.state.log_history if "loss" in x] for each in (got, plain)]
            for i, what in enumerate(("loss", "grad_norm")):
                most[i] = max(most[i], *(abs(a[what] - b[what]) for a, b in zip(*logs, strict=True)))
            read = PeftModel.from_pretrained(FAMILIES[name].make(), Path(ours))
            held = dict(plain.model.named_parameters())
            trained = {path: x for path, x in read.named_parameters() if held[path].requires_grad}
            assert trained.keys() == {path for path, x in held.items() if x.requires_grad}
            most[2] = max(most[2], *((x - held[path]).abs().max().item() for path, x in trained.items()))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(TARGETS), help="families, with commas between them")
    given = parser.parse_args()
    print("| family | form | loss | gradient norm | adapters |\n|---|---|---|---|---|")
    wrong = []
    for name in given.only.split(","):
        for form in FORMS:
            found = compare(name, form)
            print(f"| {name} | {form} | " + " | ".join(f"{x:.1e}" for x in found) + " |", flush=True)
            if max(found) > ALLOWED:
                wrong.append(f"{name}, {form}")
    if wrong:
        sys.exit("too far apart: " + "; ".join(wrong))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
