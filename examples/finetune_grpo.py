"""GRPO of a Llama in slices with a reward function, by TRL's GRPOTrainer: docs/finetune.md.

torchrun --standalone --nproc-per-node 2 examples/finetune_grpo.py
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from documents import make_model, read_answers, tokenizer
from trl import GRPOConfig

import fzero.hf


def count_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of letters and spaces: a model that writes text gets 1."""
    return [sum(x.isascii() and (x.isalpha() or x == " ") for x in text) / max(len(text), 1) for text in completions]


def main(mesh: Any = None, steps: int = 20, folder: str = "out_grpo") -> Any:
    args = GRPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
    )
    trainer = fzero.hf.GRPOTrainer(
        make_model(),
        reward_funcs=count_letters,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in read_answers()]),
        processing_class=tokenizer,
        mesh=mesh,
    )
    trainer.train()  # completions are generated from slices
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    main(steps=parser.parse_args().steps)
