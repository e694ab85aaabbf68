"""TRL's trainers over slices: logs, files and adapters are those of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")
pytest.importorskip("trl", reason="TRL is not installed: pip install fzero[trl]")

import torch
import trl
from hf_trl import (
    TOLERANCE,
    assert_equal_logs,
    find_class,
    make_trainer,
    read_all_logs,
)
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

import fzero.hf
from fzero import VirtualMesh

CASES: dict[str, dict[str, Any]] = {
    "SFT of texts": {"kind": "text"},
    "SFT of completions, several batches an update": {"kind": "SFT", "changed": {"gradient_accumulation_steps": 2}},
    "SFT of packed texts": {
        "kind": "text", "ranks": 1, "changed": {"packing": True, "max_length": 40, "per_device_train_batch_size": 2},
    },
    "SFT of wrapped texts": {
        "kind": "text",
        "changed": {"packing": True, "packing_strategy": "wrapped", "max_length": 12, "dataloader_drop_last": True},
    },
    "SFT of adapters": {"kind": "SFT", "lora": "new"},
    "SFT without checkpointing, DFT": {
        "kind": "SFT", "changed": {"gradient_checkpointing": False, "loss_type": "dft", "max_steps": 4},
    },
    "SFT with label smoothing": {"kind": "SFT", "changed": {"label_smoothing_factor": 0.1, "max_steps": 4}},
    "SFT in bfloat16": {"kind": "SFT", "changed": {"bf16": True, "max_steps": 4}},
    "DPO": {"kind": "DPO"},
    "DPO in bfloat16": {"kind": "DPO", "changed": {"bf16": True, "gradient_checkpointing": False, "max_steps": 2}},
    "DPO of new adapters": {"kind": "DPO", "lora": "new"},
    "DPO of given adapters": {"kind": "DPO", "lora": "given", "changed": {"max_steps": 4}},
    "DPO with a computed reference": {"kind": "DPO", "changed": {"precompute_ref_log_probs": True, "max_steps": 4}},
    "DPO with a reference that moves, weights": {
        "kind": "DPO",
        "changed": {
            "sync_ref_model": True, "ref_model_sync_steps": 2, "use_weighting": True, "ld_alpha": 0.5, "max_steps": 5,
        },
    },
    "Reward": {"kind": "Reward", "changed": {"center_rewards_coefficient": 0.01}},
    "GRPO": {"kind": "GRPO"},
    "GRPO of adapters": {
        "kind": "GRPO", "lora": "new", "changed": {"max_steps": 4, "num_iterations": 2, "top_entropy_quantile": 0.5},
    },
    "RLOO": {"kind": "RLOO", "changed": {"max_steps": 2}},
    "KTO": {"kind": "KTO", "changed": {"max_steps": 4}},
    "KTO of adapters with a computed reference": {
        "kind": "KTO", "lora": "new", "changed": {"precompute_ref_log_probs": True, "max_steps": 2},
    },
}  # fmt: skip


def train(module: Any, folder: Path, kind: str, ranks: int = 2, resume: Any = None, **named: Any) -> Any:
    mesh = {} if module is trl else {"mesh": VirtualMesh(fsdp=ranks)}
    trainer = make_trainer(find_class(module, kind), folder, kind, **mesh, **named)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.save_model(folder / "last")
    return trainer


def assert_equal_weights(ours: Path, theirs: Path, tolerance: float, farthest: float = 0.0) -> None:
    """Files of the same names, and tensors of the same values. README.md is of `create_model_card`. With `farthest`
    one element of a hundred may be so far apart."""
    files = {folder: sorted(str(x.relative_to(folder)) for x in folder.rglob("*")) for folder in (ours, theirs)}
    assert files[ours] == files[theirs]
    weights = [name for name in files[ours] if name.endswith(".safetensors")]
    assert weights
    for name in weights:
        mine, their = load_file(ours / name), load_file(theirs / name)
        assert mine.keys() == their.keys()
        for key, x in mine.items():
            far = ~torch.isclose(x, their[key], rtol=tolerance, atol=tolerance)
            assert far.sum() <= (x.numel() // 100 if farthest else 0), key
            torch.testing.assert_close(x[far], their[key][far], rtol=0, atol=farthest)


@pytest.mark.parametrize("case", CASES)
def test_logs_and_files_are_those_of_trl(case: str, tmp_path: Path) -> None:
    ranks = {"ranks": CASES[case].get("ranks", 2)}
    named = {name: x for name, x in CASES[case].items() if name != "ranks"}
    expected = train(trl, tmp_path / "theirs", **named)
    got = train(fzero.hf, tmp_path / "ours", **ranks, **named)
    is_narrow = "bfloat16" in case
    tolerance = 1e-3 if is_narrow else TOLERANCE  # autocast rounds to 8 bits
    assert_equal_logs(read_all_logs(got), read_all_logs(expected), tolerance)
    # AdamW moves an element by the rate, up or down, even where all of its gradient is a rounding
    moved = 2 * got.args.learning_rate * got.args.max_steps if is_narrow else 0.0
    assert_equal_weights(tmp_path / "ours" / "last", tmp_path / "theirs" / "last", tolerance, moved)


def test_the_load_of_experts_is_logged_and_counts_as_in_trl(tmp_path: Path) -> None:
    """On one virtual rank: on several the loss of the load is the mean of those of their parts of a batch."""
    found = []
    for module, mesh in ((trl, {}), (fzero.hf, {"mesh": VirtualMesh(fsdp=1)})):
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, router_aux_loss_coef=0.02, pad_token_id=0))
        changed = {"max_steps": 2, "gradient_checkpointing": False}
        trainer = make_trainer(
            module.SFTTrainer, tmp_path / module.__name__, "text", changed=changed, model=model, **mesh
        )
        trainer.train()
        found.append(read_all_logs(trainer))
    assert found[0][0]["aux_loss"] > 1
    assert_equal_logs(found[1], found[0])
