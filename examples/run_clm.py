"""Train a causal language model as transformers' example run_clm.py does, with its own Trainer or with fzero's.

    python examples/run_clm.py --trainer plain --output_dir out --do_train --do_eval
    torchrun --standalone --nproc-per-node 2 examples/run_clm.py --trainer fzero --output_dir out --do_train --do_eval

The scripts of both trainers differ in one line. All other arguments are those of `TrainingArguments`: `--save_steps 10
--resume_from_checkpoint true` goes on from the last checkpoint, on any number of ranks. A text is cut into blocks of
bytes, so no tokenizer has to be downloaded.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

TRAINERS = ("plain", "fzero")


@dataclass
class ModelArguments:
    """Which model is trained, and by which Trainer."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "a folder; by default a new small model"})
    model_type: str = field(default="gpt2", metadata={"help": "of a new model, such as gpt2 or llama"})
    config_overrides: str = field(
        default="n_embd=64,n_layer=2,n_head=4,n_positions=128,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
        metadata={"help": "settings of a new model: n_embd=10,n_layer=2"},
    )
    trainer: str = field(default="fzero", metadata={"choices": TRAINERS, "help": "the line that differs"})


@dataclass
class DataArguments:
    """Which text is read, and how it is cut."""

    train_file: str = field(default=argparse.__file__, metadata={"help": "a text"})
    validation_split_percentage: int = field(default=5, metadata={"help": "of the text, from its end"})
    block_size: int = field(default=64, metadata={"help": "tokens of an example"})
    max_train_samples: int | None = field(default=None, metadata={"help": "examples that are trained on"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "examples that are evaluated on"})
    prompt: str | None = field(default=None, metadata={"help": "a text that the trained model goes on with"})


def load_model(args: ModelArguments) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    if args.model_name_or_path is not None:
        folder = args.model_name_or_path
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(args.model_type, **ids)
    config.update_from_string(args.config_overrides)
    return AutoModelForCausalLM.from_config(config), tokenizer


def load_blocks(args: DataArguments, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """The examples of training and of evaluation. What is left at the end of a text is dropped."""
    text = Path(args.train_file).read_text()
    border = len(text) * (100 - args.validation_split_percentage) // 100
    parts, limits = (text[:border], text[border:]), (args.max_train_samples, args.max_eval_samples)
    blocks = []
    for part, limit in zip(parts, limits):
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - args.block_size + 1, args.block_size)[:limit]
        cut = [ids[start : start + args.block_size] for start in starts]
        blocks.append([{"input_ids": each, "labels": list(each)} for each in cut])
    return blocks[0], blocks[1]


def choose_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens: so few numbers are kept that a whole evaluation fits into memory."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def measure(evaluation: Any) -> dict[str, float]:
    """The accuracy of `choose_tokens`. Token i predicts label i + 1."""
    predicted, labels = evaluation.predictions[:, :-1], evaluation.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels).mean())}


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Train, evaluate and save, as the arguments say. Returns the metrics and the log of the run."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses(words)
    if model_args.trainer == "plain":
        from transformers import Trainer
    else:
        from fzero.hf import Trainer  # the line that differs

    set_seed(args.seed)
    model, tokenizer = load_model(model_args)
    train_dataset, eval_dataset = load_blocks(data_args, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset if args.do_train else None,
        eval_dataset=eval_dataset if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=measure if args.do_eval else None,
        preprocess_logits_for_metrics=choose_tokens if args.do_eval else None,
    )
    found: dict[str, Any] = {}
    if args.do_train:
        last = None if args.resume_from_checkpoint is None else find_checkpoint(args)
        metrics = trainer.train(resume_from_checkpoint=last).metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model()  # with the tokenizer
        report(trainer, "train", metrics)
        trainer.save_state()
        found |= metrics
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics |= {"eval_samples": len(eval_dataset), "perplexity": math.exp(metrics["eval_loss"])}
        report(trainer, "eval", metrics)
        found |= metrics
    if data_args.prompt is not None:
        found["text"] = generate(trainer, tokenizer, data_args.prompt)
        if trainer.is_world_process_zero():
            print(found["text"])
    card = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-generation", "dataset": "a text"}
    if args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
    return found | {"log": trainer.state.log_history}


def find_checkpoint(args: TrainingArguments) -> str | None:
    """The folder to go on from: the one that is named, or the last one of the output folder."""
    named = args.resume_from_checkpoint
    return get_last_checkpoint(args.output_dir) if named.lower() == "true" else named


def generate(trainer: Any, tokenizer: Any, prompt: str) -> str:
    """The prompt and what the trained model goes on with."""
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(trainer.args.device)
    model = trainer if hasattr(trainer, "generate") else trainer.model.eval()  # fzero's parameters are in slices
    return tokenizer.decode(model.generate(**tokens, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)


def report(trainer: Any, split: str, metrics: dict[str, Any]) -> None:
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
