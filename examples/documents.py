"""What the recipes of docs/finetune.md share: pages of Python's own reference, which Python ships, and a tiny Llama."""

from __future__ import annotations

import inspect
from pydoc_data.topics import topics

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

tokenizer = ByT5Tokenizer(extra_ids=0)  # a token a byte: nothing is downloaded


def make_model(length: int = 512) -> LlamaForCausalLM:
    """A new Llama of bytes, the same on all ranks."""
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**ids, **sizes, max_position_embeddings=length))


def read_blocks(length: int) -> list[dict[str, list[int]]]:
    """All pages, one behind another, in blocks of tokens."""
    ids = tokenizer("\n".join(topics.values()), add_special_tokens=False)["input_ids"]
    cut = [ids[i : i + length] for i in range(0, len(ids) - length, length)]
    return [{"input_ids": each, "labels": each} for each in cut]


def read_answers(most: int = 96) -> list[dict[str, str]]:
    """For each method of a str a question, its documentation, which is `chosen`, and that of another method, which is
    `rejected`."""
    found = [(name, inspect.getdoc(getattr(str, name)) or "") for name in dir(str) if not name.startswith("_")]
    pairs = zip(found, found[1:] + found[:1])
    return [
        {"prompt": f"What does str.{name} do? ", "chosen": text[:most], "rejected": other[:most]}
        for (name, text), (_, other) in pairs
    ]
