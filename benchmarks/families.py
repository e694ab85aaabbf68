"""Families of Hugging Face's models, each as a tiny configuration, and batches for them. Nothing is downloaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers import BatchEncoding

LENGTH, VOCABULARY, CLASSES, MELS, FRAMES, PIXELS = 8, 32, 4, 8, 16, 8
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


class Family(NamedTuple):
    """The model with its head, and its configuration: sizes, and no dropout, so that losses can be compared."""

    model: str
    config: str
    settings: dict[str, Any]
    inputs: str = "tokens"  # or "tokens to tokens", "sound to tokens", "pixels"

    def make(self, seed: int = 0, **settings: Any) -> Any:
        """The model with random weights, in training mode. `settings` replace those of the family."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.settings, **settings})
        return getattr(transformers, self.model)(config).train()

    def batch(self, rows: int, seed: int = 0) -> BatchEncoding:
        """Inputs, labels, and the mask of padding where the family takes one. Every second row is padded, so two
        parts of a batch have equal numbers of labels where each has an even number of rows."""
        draw = torch.Generator().manual_seed(seed)
        if self.inputs == "pixels":
            pixels = torch.randn(rows, 3, PIXELS, PIXELS, generator=draw)
            return BatchEncoding({"pixel_values": pixels, "labels": torch.randint(CLASSES, (rows,), generator=draw)})
        tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=draw)
        mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 3]).repeat(rows // 2).unsqueeze(1)).long()
        labels = tokens.masked_fill(mask == 0, -100)
        if self.inputs == "sound to tokens":
            sound = torch.randn(rows, MELS, FRAMES, generator=draw)
            return BatchEncoding({"input_features": sound, "labels": labels})
        return BatchEncoding({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})

    def prompt(self, rows: int) -> dict[str, Any]:
        """What `generate` begins with; empty for a family that generates nothing."""
        if self.inputs == "pixels" or "MaskedLM" in self.model:
            return {}
        batch = self.batch(rows, seed=1)
        if self.inputs == "sound to tokens":
            return {"input_features": batch["input_features"]}
        tokens = batch["input_ids"][:, : LENGTH // 2]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


FAMILIES = {
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", {**SIZES, **TOKENS, "num_key_value_heads": 1}),
    "Qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**SIZES, **TOKENS, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "Gemma": Family("GemmaForCausalLM", "GemmaConfig", {**SIZES, **TOKENS, "num_key_value_heads": 1, "head_dim": 8}),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, **TOKENS,
        },
    ),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, **TOKENS}),
    "OLMo-2": Family("Olmo2ForCausalLM", "Olmo2Config", {**SIZES, **TOKENS}),
    "BERT": Family(
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32},
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES,
        },
        "pixels",
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        "tokens to tokens",
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 16, "dropout": 0.0,
            "decoder_start_token_id": 1, **TOKENS,
        },
        "sound to tokens",
    ),
    "Mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, **TOKENS},
    ),
    "Mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SIZES, **TOKENS, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
