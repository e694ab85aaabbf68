"""Sequence models: the types of models that equal one device with `sp=`, by `tools/parallel_models.py`.

In these attention alone looks at other places than its own. Where another layer does, such as a convolution, a part of
a sequence would be silently another sequence. So other types are refused.
"""

from __future__ import annotations

MODEL_TYPES: tuple[str, ...] = ("llama", "qwen3", "mixtral", "gpt_neox", "gpt_oss", "mistral", "gpt2")
