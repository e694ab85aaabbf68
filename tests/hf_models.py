"""Models, datasets and arguments that the tests of `fzero.hf` share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss


class Bigram(nn.Module):
    """Each token from the one in front of it: the model of what is not about models. A step of it is traced in half the
    time of GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, input_ids: Tensor, labels: Tensor, **named: Any) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": ForCausalLMLoss(logits, labels, 61, **named), "logits": logits}


def make_model(kind: str = "gpt2", layers: int = 1) -> Any:
    torch.manual_seed(0)
    if kind == "bigram":
        return Bigram()
    if kind == "gpt2 with frozen positions":
        model = make_model()
        model.transformer.wpe.requires_grad_(False)
        return model
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
    width = 64 if kind == "wide llama" else 16  # 4,096 elements and more are kept in 8 bits
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    ))  # fmt: skip


SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "pad_token_id": 0, "eos_token_id": 1}
SEQ2SEQ: dict[str, Any] = {
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(**SIZES, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    ),
    "BART": lambda: BartForConditionalGeneration(
        BartConfig(
            **SIZES, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, dropout=0.0, bos_token_id=2,
            decoder_start_token_id=1, forced_eos_token_id=None, init_std=1.0,
        )
    ),
}  # fmt: skip


def make_pairs() -> list[dict[str, Any]]:
    """Rows for encoder-decoders."""
    draws, shapes = torch.Generator().manual_seed(1), {"input_ids": (6,), "labels": (5,)}
    return [{name: torch.randint(3, 32, shape, generator=draws) for name, shape in shapes.items()} for _ in range(8)]


def measure_tokens(evaluation: Any) -> dict[str, float]:
    tokens = evaluation.predictions
    return {"sum": float(tokens[tokens != -100].sum()), "rows": float(len(tokens)), "length": float(tokens.shape[1])}


def train_seq2seq(cls: Any, name: str, folder: Any, rows: int = 4, **named: Any) -> dict[str, Any]:
    """What a run of a Seq2SeqTrainer returns: logs, metrics of generated tokens, and the tokens of `predict`, by beams.
    T5 and BART take means over their labels, so transformers must not multiply the loss by the number of ranks.
    Gradients of biases of keys are rounding, which Adam would blow up."""
    changed = {
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "optim": "sgd",
    }
    plain = make_arguments(folder, **changed, average_tokens_across_devices=False).to_dict()
    plain |= {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    arguments = Seq2SeqTrainingArguments(**plain, predict_with_generate=True, generation_max_length=7)
    torch.manual_seed(0)
    data = {"train_dataset": make_pairs(), "eval_dataset": make_pairs()}
    trainer = cls(SEQ2SEQ[name](), arguments, **data, compute_metrics=measure_tokens, **named)
    trainer.train()
    found = trainer.evaluate()
    tokens = trainer.predict(make_pairs(), num_beams=2, max_length=6).predictions
    metrics = {key: found[f"eval_{key}"] for key in ("loss", "sum", "rows", "length")}
    return {"logs": read_logs(trainer), "metrics": metrics, "tokens": tokens.tolist()}


def assert_equal_seq2seq(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(got["logs"], expected["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert got["tokens"] == expected["tokens"] and len({*map(tuple, expected["tokens"])}) > 1


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


def assert_comm_is_its_closed_form(
    program: Any,
    model: Any,
    gathers: list[int],
    trained: list[int],
    bits: int | None = None,
    double_quant: bool = False,
) -> None:
    """Of a Llama with LoRA of q_proj and v_proj on two ranks, each layer is gathered so many times: once for the
    forward pass, and at stage 3 once more where a gradient goes through it. The embedding and the head are gathered
    once. Gradients of adapters, in the layers `trained`, are scattered, and no others. With `bits` the products of the
    base are gathered as codes, with scales of 64 elements: four bytes each, or with `double_quant` one byte, and four
    for each 256 of them and for their mean."""
    sizes = {path.removeprefix("base_model.model."): x.numel() for path, x in model.named_parameters()}

    def count_scales(blocks: int) -> int:
        return blocks + 4 * -(-blocks // 256) + 4 if double_quant else 4 * blocks

    def count_bytes(layer: str) -> list[int]:
        named = {path: size for path, size in sizes.items() if path.startswith(layer)}
        coded = {path: size for path, size in named.items() if bits and "proj" in path and "lora_" not in path}
        numbers = 4 * sum(size for path, size in named.items() if path not in coded)
        codes = sum(size * (bits or 0) // 8 + count_scales(size // 64) for size in coded.values())
        return [_pad(numbers, 4), _pad(codes, 1)] if coded else [_pad(numbers, 4)]

    gathered = [*count_bytes("model.embed_tokens"), _pad(4 * (sizes["model.norm.weight"] + sizes["lm_head.weight"]), 4)]
    for layer, times in enumerate(gathers):
        gathered += count_bytes(f"model.layers.{layer}.") * times
    scattered = [
        4 * sum(size for path, size in sizes.items() if path.startswith(f"model.layers.{layer}.") and "lora_" in path)
        for layer in trained
    ]
    moved = program.comm()
    assert sorted(x.nbytes for x in moved if x.op == "all_gather") == sorted(gathered)
    assert [x.nbytes for x in moved if x.op == "reduce_scatter"] == scattered
    assert all(x.nbytes == 4 for x in moved if x.op == "all_reduce"), "losses alone"


def _pad(nbytes: int, itemsize: int) -> int:
    """Bytes of a buffer of two ranks, each with a multiple of 16 elements."""
    return -(-nbytes // (2 * 16 * itemsize)) * 2 * 16 * itemsize
