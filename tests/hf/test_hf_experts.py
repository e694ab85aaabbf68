"""Experts of transformers' models on ranks with different tokens: tokens go to experts, as on one device."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, read_logs
from parallel_layers import list_bytes
from processes import run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree

MESH = VirtualMesh(fsdp=2, ep=2)
SIZES: dict[str, Any] = {
    "vocab_size": 62, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
    "max_position_embeddings": 32, "num_experts_per_tok": 2, "experts_implementation": "batched_mm",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 8, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 0,
}  # fmt: skip


def make(kind: str = "Mixtral") -> Any:
    torch.manual_seed(0)
    if kind == "DeepSeek-V3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **LATENT}))
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


@pytest.mark.parametrize(("kind", "capacity"), [("Mixtral", None), ("DeepSeek-V3", 2.0)])
def test_tokens_go_to_experts_and_come_back(kind: str, capacity: float | None) -> None:
    """The loss and all gradients, with and without a bound; and a layer's bytes, of which a rank sends (E - 1) / E."""
    model, tokens = make(kind).double(), torch.randint(62, (8, 6))
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.add_(0.3 * torch.randn_like(leaf))
    params, apply = fzero.hf.parallel(model, MESH, tp=None, ep="ep", capacity=capacity)

    def step(params: Any, tokens: Any) -> Any:
        return fzero.value_and_grad(lambda params: apply(params, input_ids=tokens, labels=tokens).loss)(params)

    run = fzero.simulate(step, MESH, data=("fsdp", "ep"))
    loss, grads = run(params, tokens)
    expected = model(input_ids=tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss.mean(), expected.detach(), rtol=1e-6, atol=0)
    whole = fzero.unpartition(grads)
    for path, grad in zip(tree.paths(whole), tree.leaves(whole)):
        torch.testing.assert_close(grad, model.get_parameter(path).grad, rtol=0, atol=1e-7)
    chosen, width = 8 * 6 // 4 * 2, 16 * 8
    found = list_bytes(run.trace(params, tokens), "ep")
    assert found["ragged_all_to_all"] == 4 * chosen * width
    run.check_flags()


def test_what_is_refused() -> None:
    """Examples that are alike where tokens travel, and others where none does, would be another result in silence."""
    model, tokens = make(), torch.ones(8, 4, dtype=torch.int64)
    for how, data, words in (
        ({"ep": None, "capacity": None}, ("fsdp",), "capacity=None: is given without ep"),
        ({"capacity": float("nan")}, ("fsdp", "ep"), "capacity=nan: is no room for tokens; give a number above 0"),
        ({"tp": "ep", "capacity": 2.0}, ("fsdp",), "ranks along tp='ep' have the same tokens"),
        ({"capacity": None}, ("fsdp",), "has the same examples along 'ep', and capacity= sends each rank's own"),
        ({}, ("fsdp", "ep"), "has other examples on each rank along 'ep', whose ranks share layers"),
        ({"ep": None, "tp": "ep"}, ("fsdp", "ep"), "has other examples on each rank along 'ep', whose ranks share"),
    ):
        with pytest.raises(FzeroError, match=words):
            params, apply = fzero.hf.parallel(model, MESH, **{"tp": None, "ep": "ep", **how})  # type: ignore[arg-type]
            fzero.simulate(lambda p, x, apply=apply: apply(p, x).logits, MESH, data=data).trace(params, tokens)


def make_trainer(cls: Any, folder: Path, rows: int = 8, steps: int = 10, **how: Any) -> Any:
    changed = {"max_steps": steps, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    return cls(make(), make_arguments(folder, **changed), train_dataset=make_dataset(), **how)


def test_more_tokens_than_there_is_room_for_are_an_error_after_the_last_step(tmp_path: Path) -> None:
    trainer = make_trainer(fzero.hf.Trainer, tmp_path, steps=1, mesh=MESH, ep="ep", capacity=0.2)
    with pytest.raises(FzeroError, match="ragged_all_to_all over 'ep': .* rows come to a rank, and its bound is"):
        trainer.train()
    trainer = make_trainer(fzero.hf.Trainer, tmp_path, steps=1, mesh=MESH, ep="ep", capacity=0.2)
    with pytest.raises(FzeroError, match="rows come to a rank, and its bound is"):
        trainer.evaluate(make_dataset(8))


def train(mesh: DeviceMesh, folder: Path) -> list[dict[str, float]]:
    world = mesh.size()
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    shared = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "ep"))
    trainer = make_trainer(fzero.hf.Trainer, folder, rows=8 // world, mesh=shared, ep="ep", capacity=None)
    trainer.train()
    axes = {leaf.form.layout.shard_axis for leaf in tree.leaves(trainer.sharded.params)}
    assert axes == {"fsdp", "fsdp+ep"} and trainer.mesh.size() == world  # experts, and the rest; a mesh of torch
    trainer.save_model(str(folder / "model"))
    return read_logs(trainer)


def test_ranks_train_save_and_are_read_as_in_transformers(tmp_path: Path, world: int = 2) -> None:
    expected = make_trainer(transformers.Trainer, tmp_path / "theirs")
    expected.train()
    for logs in run(world, functools.partial(train, folder=tmp_path / "ours")):
        for ours, theirs in zip(logs, read_logs(expected), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    read, tokens = MixtralForCausalLM.from_pretrained(tmp_path / "ours" / "model"), torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, expected.model(tokens).logits, rtol=1e-5, atol=1e-5)
