"""Models, datasets and arguments that the tests of `fzero.hf` share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, TrainingArguments


def make_model(kind: str = "gpt2") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2 with frozen positions":
        model = make_model()
        model.transformer.wpe.requires_grad_(False)
        return model
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    ))  # fmt: skip


def make_dataset(rows: int = 24, length: int = 10) -> list[dict[str, Any]]:
    """Rows with different numbers of labels that count."""
    draw = torch.Generator().manual_seed(1)
    dataset = []
    for row in range(rows):
        tokens = torch.randint(1, 61, (length,), generator=draw)
        labels = tokens.clone()
        labels[length - row % 5 :] = -100
        dataset.append({"input_ids": tokens, "labels": labels})
    return dataset


def make_ragged_dataset(rows: int = 24) -> list[dict[str, Any]]:
    """Rows of 10 and of 7 tokens."""
    return [
        {name: x[: 7 if row % 3 else 10] for name, x in each.items()} for row, each in enumerate(make_dataset(rows))
    ]


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as long as its longest row. Tokens are padded with 0, and labels with -100."""
    numbers = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=number)
        for name, number in numbers.items()
    }


def make_arguments(folder: Any, **changed: Any) -> TrainingArguments:
    named: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6,
        "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(**{**named, **changed})


def read_logs(trainer: Any) -> list[dict[str, float]]:
    """Loss, gradient norm and rate of each update."""
    names = ("loss", "grad_norm", "learning_rate")
    return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]


def read_evaluations(trainer: Any) -> list[float]:
    """The loss of each evaluation."""
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
