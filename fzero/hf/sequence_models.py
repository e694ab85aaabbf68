"""Sequence models: the types of models that equal one device with `sp=`, by `tools/sequence_models.py`.

In these attention alone looks at other places than its own. Where another layer does, such as a convolution, a part of
a sequence would be silently another sequence. So other types are refused.
"""

from __future__ import annotations

MODEL_TYPES: tuple[str, ...] = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone4", "gemma",
    "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
    "llama", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The `layer_types` of a configuration whose layers are attention."""
