"""DPO of a Llama in slices with LoRA, by TRL's DPOTrainer: docs/finetune.md.

torchrun --standalone --nproc-per-node 2 examples/finetune_dpo.py
"""

from __future__ import annotations

import argparse
from typing import Any

import peft
from datasets import Dataset
from documents import make_model, read_answers, tokenizer
from trl import DPOConfig

import fzero.hf


def main(mesh: Any = None, steps: int = 20, folder: str = "out_dpo") -> Any:
    args = DPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        beta=0.1,
        max_length=160,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        bf16=False,
    )
    trainer = fzero.hf.DPOTrainer(
        make_model(),
        args=args,
        train_dataset=Dataset.from_list(read_answers()),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        mesh=mesh,
    )
    trainer.train()  # the reference is the model without its adapters
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    main(steps=parser.parse_args().steps)
