"""Folders of transformers whose files have other keys than the model: an error names the way, and one line loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers

import fzero.hf
from fzero import FzeroError, VirtualMesh, tree

MESH = VirtualMesh(fsdp=2)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, tuple[Any, Any, Any, str]] = {
    "ViT": (
        transformers.ViTForImageClassification, transformers.ViTConfig(**SIZES, image_size=8, patch_size=4),
        transformers.AutoModelForImageClassification, "encoder.layer.0.attention",
    ),
    "Mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(**SIZES, vocab_size=32, num_key_value_heads=1, num_local_experts=2),
        None, "block_sparse_moe.experts.0.w1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strict", [True, False])
def test_old_keys_are_an_error_that_names_the_way_and_one_line_loads(name: str, strict: bool, tmp_path: Path) -> None:
    cls, config, auto, part = MODELS[name]
    torch.manual_seed(0)
    model = cls(config)
    model.save_pretrained(tmp_path)
    if not any(part in key for key in fzero.open_safetensors(tmp_path)):
        pytest.skip("this release of transformers saves the keys of the model")
    params = tree.map(lambda x: x.to("meta"), fzero.lower(model)[0])  # leaves with values may be absent without strict
    with pytest.raises(
        FzeroError, match=r"load_hf\(folder, params, mesh\).*fzero\.hf\.from_pretrained\(folder, mesh\)"
    ):
        fzero.load_safetensors(tmp_path, params, MESH, strict=strict)
    loaded = fzero.unpartition(fzero.hf.from_pretrained(tmp_path, mesh=MESH, cls=auto).params)
    for path, x in zip(tree.paths(loaded), tree.leaves(loaded), strict=True):
        assert torch.equal(x, model.get_parameter(path)), path
