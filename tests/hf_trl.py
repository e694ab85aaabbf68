"""Models, datasets and configurations that the tests of TRL's trainers share. Nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over a lazy dog while some birds sing".split()
UPDATES = 20
TOLERANCE = 1e-4
TIMES = ("runtime", "per_second", "step_time")
"""What of a log is a time."""
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def make_tokenizer() -> Any:
    """One token a letter."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ."])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_language_model(folder: Path, cls: Any = LlamaForCausalLM) -> Any:
    """A Llama of a folder, as TRL wants a model that it makes a reference of. It is beside `folder`."""
    base = folder.parent / cls.__name__
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    if not base.is_dir():
        cls(config).save_pretrained(base)
    return cls.from_pretrained(base)


def make_texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 5))) for _ in range(count)]


def make_rows(*columns: str, rows: int = 16) -> Any:
    """Rows of texts of different lengths."""
    from datasets import Dataset

    texts = make_texts(rows * len(columns))
    return Dataset.from_dict({name: texts[i * rows : (i + 1) * rows] for i, name in enumerate(columns)})


def count_letters(completions: list[str], **_: Any) -> list[float]:
    """A reward: letters "e", and a little for each letter."""
    return [text.count("e") + 0.1 * len(text) for text in completions]


def make_trainer(cls: Any, folder: Path, kind: str, *, lora: str = "", changed: Any = None, **named: Any) -> Any:
    """A trainer of TRL, or ours. `lora` is "new" for a `peft_config`, and "given" for a model that has adapters."""
    import peft
    import trl

    columns = {
        "text": ["text"], "SFT": ["prompt", "completion"], "DPO": ["prompt", "chosen", "rejected"],
        "Reward": ["chosen", "rejected"], "GRPO": ["prompt"], "RLOO": ["prompt"], "KTO": ["prompt", "completion"],
    }  # fmt: skip
    made = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
    model = named.pop("model", None) or make_language_model(folder, made)
    if lora:
        config = peft.LoraConfig(task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM", **LORA)
        if lora == "given":
            torch.manual_seed(1)
            model = peft.get_peft_model(model, config)
            for path, x in model.named_parameters():
                if "lora_B" in path:
                    torch.nn.init.normal_(x, std=0.1)
        else:
            named["peft_config"] = config
    configs: dict[str, Callable[..., Any]] = {
        "DPO": trl.DPOConfig, "Reward": trl.RewardConfig, "GRPO": trl.GRPOConfig,
        "RLOO": trl.RLOOConfig, "KTO": trl.KTOConfig,
    }  # fmt: skip
    plain: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "max_steps": UPDATES, "learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "use_cpu": True, "bf16": False, "seed": 3, "dataloader_pin_memory": False,
    }  # fmt: skip
    if kind in ("GRPO", "RLOO"):
        plain |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        named["reward_funcs"] = count_letters
    args = configs.get(kind, trl.SFTConfig)(**{**plain, **(changed or {})})
    rows = make_rows(*columns[kind])
    if kind == "KTO":
        rows = rows.add_column("label", [i % 3 > 0 for i in range(len(rows))])
    return cls(model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=make_tokenizer(), **named)


def read_all_logs(trainer: Any) -> list[dict[str, float]]:
    """Each log, without times."""
    return [
        {name: x for name, x in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_equal_logs(
    got: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = TOLERANCE
) -> None:
    assert len(got) == len(expected) > 0
    for ours, theirs in zip(got, expected):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def find_class(module: Any, kind: str) -> Any:
    """The trainer of a kind, of TRL or ours."""
    return getattr(module, f"{'SFT' if kind == 'text' else kind}Trainer")
