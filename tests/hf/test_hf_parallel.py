"""`fzero.hf.parallel` beside one device: the model's own plans and those of fzero, ties, and what is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.hf.styles import STYLES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from families import FAMILIES

MESH = VirtualMesh(fsdp=2, tp=2)
ONE_LAYER = {"num_hidden_layers": 1}
SIZES = {
    "Llama": ONE_LAYER | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "pad_token_id": 5},
    "GPT-2": {"n_layer": 1},
    "T5": {"num_layers": 1},
    "Whisper": {"encoder_layers": 1, "decoder_layers": 1},
}


def assert_equals_one_device(model: Any, batch: Any, mesh: Any = MESH, **how: Any) -> Any:
    """The loss, and the gradient of each leaf. Returns the parameters."""
    params, apply = fzero.hf.parallel(model, mesh, **how)
    assert not any("forward" in vars(module) for module in model.modules())

    def step(params: Any, batch: Any) -> Any:
        return fzero.value_and_grad(lambda params: apply(params, **batch).loss)(params)

    loss, grads = fzero.simulate(step, mesh, data=("fsdp",))(params, batch)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss.mean(), expected.detach(), rtol=1e-6, atol=0)  # in float32, as of many models
    whole = fzero.unpartition(grads)
    for path, grad in zip(tree.paths(whole), tree.leaves(whole)):
        theirs = model.get_parameter(path).grad
        torch.testing.assert_close(grad, torch.zeros_like(grad) if theirs is None else theirs, rtol=0, atol=1e-6)
    return params


def make(name: str, **settings: Any) -> tuple[Any, Any]:
    model, batch = FAMILIES[name].make(**settings).double(), FAMILIES[name].batch(4)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.add_(0.1 * torch.randn_like(leaf))  # biases too
    return model, {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_of_its_plan_equals_one_device(name: str) -> None:
    params = assert_equals_one_device(*make(name, **SIZES[name]))
    assert sum(leaf.form.layout.split_axes == ("tp",) for leaf in tree.leaves(params)) > 6


ADAPTED: dict[str, dict[str, Any]] = {
    "Llama": {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "bias": "all"},
    "GPT-2": {"target_modules": ["wte", "c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_peft_are_shared_as_their_layers(name: str) -> None:
    peft = pytest.importorskip("peft")
    model, batch = make(name, **SIZES[name])
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTED[name])).double()
    with torch.no_grad():
        for path, leaf in model.named_parameters():
            if "lora_" in path:
                leaf.add_(0.1 * torch.randn_like(leaf))
    params = assert_equals_one_device(model, batch)
    parts = [path for path, x in zip(tree.paths(params), tree.leaves(params)) if x.form.layout.split_axes]
    matrices = {path.split(".")[-2 if path.endswith("default") else -3] for path in parts if "lora_" in path}
    assert matrices == {"lora_A", "lora_B"}


def test_adapters_that_no_rule_fits_are_refused() -> None:
    peft = pytest.importorskip("peft")
    at, model = {"target_modules": ["q_proj"]}, make("Llama", **SIZES["Llama"])[0]
    for config, words in (
        (peft.LoraConfig(**at, use_dora=True), "q_proj: has DoraLinearVariant, which ranks cannot share"),
        (peft.LoraConfig(**at, trainable_token_indices=[1]), "is a peft.utils.other.TrainableTokensWrapper"),
        (peft.IA3Config(**at, feedforward_modules=[]), "adapter 'default' is IA3, and ranks can share LoRA alone"),
    ):
        with pytest.raises(FzeroError, match=words):
            fzero.hf.parallel(peft.get_peft_model(copy.deepcopy(model), config), MESH)
    plan = {"model.layers.*.self_attn.q_proj": "packed_rowwise"}
    with pytest.raises(FzeroError, match="q_proj: has adapters, and the style 'packed_rowwise'"):
        fzero.hf.parallel(peft.get_peft_model(model, peft.LoraConfig(**at)), MESH, plan=plan)


def test_experts_are_shared_along_an_axis_of_their_own() -> None:
    sizes = ONE_LAYER | {"num_key_value_heads": 2, "experts_implementation": "batched_mm"}
    params = assert_equals_one_device(*make("Mixtral", **sizes), VirtualMesh(fsdp=2, tp=2, ep=2), ep="ep")
    assert params["model"]["layers"][0]["mlp"]["experts"]["down_proj"].form.layout.split_axes == ("ep",)


def test_a_plan_adds_to_that_of_the_model() -> None:
    """A head that is whole makes the embedding whole that is tied to it."""
    model, batch = make("Qwen3", **ONE_LAYER, num_key_value_heads=2)
    plan = {"lm_head": "replicate", "model.layers.*.mlp.down_proj": "rowwise_split_input"}
    plan |= {f"model.layers.*.mlp.{name}_proj": "colwise_gather_output" for name in ("gate", "up")}
    params = assert_equals_one_device(model, batch, plan=plan)
    assert not params["model"]["embed_tokens"]["weight"].form.layout.split_axes


def test_one_head_of_keys_stays_whole() -> None:
    plan = {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "kv"}
    plan["model.layers.*.self_attn"] = "divide num_key_value_groups"
    assert_equals_one_device(*make("Llama", **ONE_LAYER, num_key_value_heads=1), plan=plan)


def test_the_page_has_each_style_and_transformers_has_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hf_parallel.md").read_text()
    assert [name for name in STYLES if f"`{name}`" not in page and f"`{name}` (of" not in page] == []
    assert set(ALL_PARALLEL_STYLES) - set(STYLES) <= {"sequence_parallel"}


def test_heads_in_one_leaf_with_others_are_counted() -> None:
    model = FAMILIES["GPT-2"].make(n_head=3, n_embd=24, n_layer=1)
    with pytest.raises(FzeroError, match=r"h.0.attn.c_attn: has 3 heads, to be split over 2 ranks along 'tp'"):
        fzero.hf.parallel(model, MESH)


def test_the_biases_of_positions_of_t5_are_one_number_for_each_head() -> None:
    fzero.hf.parallel(FAMILIES["T5"].make(num_heads=8, d_kv=8, num_layers=1), MESH)
    with pytest.raises(FzeroError, match="3 n_heads, to be split over 2 ranks"):
        fzero.hf.parallel(FAMILIES["T5"].make(num_heads=3, num_layers=1), MESH)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).reshape(len(x), 2, 4).flatten(1))


@pytest.mark.parametrize(
    ("settings", "how", "words"),
    [
        ({"num_key_value_heads": 1}, {}, "self_attn.k_proj: has 1 heads, to be split over 2 ranks along 'tp'"),
        ({"vocab_size": 33}, {}, "lm_head.weight: has 33 elements along dim 0"),
        ({}, {"plan": {"model.layers.*.mlp.down": "rowwise"}}, "near to it are model.layers.*.mlp.down_proj"),
        ({}, {"plan": {"lm_head": "sequence_parallel"}}, "lm_head: has the style 'sequence_parallel'"),
        ({}, {"ep": "tp"}, "LlamaForCausalLM: has no expert plan"),
        ({}, {"tp": "dp"}, "dp"),
        ({}, {"ep": "fsdp"}, "'fsdp': is an axis over which VirtualMesh(fsdp=2, tp=2) cuts all state"),
        ({}, {"split": {}}, "split: is given"),
        (
            {"tie_word_embeddings": True},
            {"plan": {"lm_head": "rowwise"}},
            "is one leaf with model.embed_tokens",
        ),
    ],
)
def test_what_is_refused(settings: Any, how: Any, words: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, **settings})
    with pytest.raises(FzeroError) as caught:
        fzero.hf.parallel(LlamaForCausalLM(config), MESH, **how)
    assert words in str(caught.value)


def test_a_model_that_counts_on_whole_weights_is_named() -> None:
    model = nn.Sequential(Attention())
    params, apply = fzero.hf.parallel(model, MESH, plan={"*.first": "colwise", "*.second": "rowwise"})
    with pytest.raises(FzeroError, match="0: its forward does not fit parts of its weights"):
        fzero.simulate(lambda params, x: apply(params, x), MESH, data=("fsdp",))(params, torch.ones(4, 4))


def test_a_token_outside_of_the_vocabulary_is_refused_as_by_torch() -> None:
    model, batch = make("Llama", **SIZES["Llama"])
    params, apply = fzero.hf.parallel(model, MESH)
    tokens = torch.full_like(batch["input_ids"], model.config.vocab_size)
    with pytest.raises(IndexError, match="index out of range"):
        fzero.simulate(lambda p, x: apply(p, input_ids=x).logits.mean(), MESH, data=("fsdp",))(params, tokens)
