"""QLoRA of a Llama in slices: adapters train over frozen weights that are held and gathered as nf4 codes.

torchrun --standalone --nproc-per-node 2 examples/finetune_qlora.py
"""

from __future__ import annotations

import argparse
from typing import Any

import peft
from documents import make_model, read_blocks
from transformers import TrainingArguments, default_data_collator

import fzero.hf


def main(mesh: Any = None, steps: int = 30, folder: str = "out_qlora") -> Any:
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(), config)
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        max_grad_norm=0.3,
        lr_scheduler_type="cosine",
        optim="paged_adamw_32bit",  # fzero.optim.adamw: state of adapters is small, and in slices
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    data = {"train_dataset": read_blocks(64), "data_collator": default_data_collator}
    trainer = fzero.hf.Trainer(model, args, **data, mesh=mesh, quantize="nf4")
    trainer.train()
    trainer.save_model()  # adapter_model.safetensors and adapter_config.json, which peft reads
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    main(steps=parser.parse_args().steps)
