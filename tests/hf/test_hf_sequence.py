"""Parts of a sequence on ranks, `sp=` of `fzero.hf.parallel`, beside one device; and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.hf.sequence_models import MODEL_TYPES

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def make_batch(length: int = 8) -> dict[str, torch.Tensor]:
    """Rows with unequal numbers of labels in their halves."""
    tokens = torch.randint(32, (2, length), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 5:] = -100
    return {"input_ids": tokens, "labels": labels}


def make_step(apply: Any, **how: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            output = apply(params, **batch, **how)
            return output.loss, output.logits

        return fzero.value_and_grad(loss, has_aux=True)(params)

    return step


def make(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt-oss":  # sinks, and a window
        config = GptOssConfig(
            **{**SIZES, "num_hidden_layers": 1}, num_local_experts=2, num_experts_per_tok=1, sliding_window=3
        )
        config._experts_implementation = "batched_mm"
        return GptOssForCausalLM(config).double()
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).double()


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "windows and sinks, by heads": ("gpt-oss", {"sp": 2}, {}),
    "packed documents, fewer heads of keys than ranks": ("llama", {"sp": 4}, {"position_ids": PACKED}),
    "packed documents, by keys": ("llama", {"sp": 8}, {"position_ids": PACKED}),
    "padding, beside parts of heads": ("llama", {"sp": 2, "tp": 2}, {"attention_mask": PADDED}),
    "windows, sinks and experts, between layers that ranks share": ("gpt-oss", {"tp": 2}, {"position_ids": PACKED}),
}


def assert_alike(model: Any, batch: dict[str, Any], loss: Any, logits: Any, grads: Any) -> None:
    """Loss, logits and gradients in slices are those of a model on one device."""
    expected = model(**batch)
    expected.loss.backward()
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-6, atol=0)  # in float32, as in transformers
    torch.testing.assert_close(logits, expected.logits.detach())
    whole = fzero.unpartition(grads)
    for path, grad in zip(tree.paths(whole), tree.leaves(whole)):
        torch.testing.assert_close(grad, model.get_parameter(path).grad, rtol=0, atol=1e-6, msg=path)


@pytest.mark.parametrize("case", CASES)
def test_loss_logits_and_gradients_are_those_of_one_device(case: str) -> None:
    name, axes, more = CASES[case]
    model, batch, mesh = make(name), {**make_batch(), **more}, VirtualMesh(fsdp=1, **axes)
    params, apply = fzero.hf.parallel(model, mesh, tp="tp" if "tp" in axes else None, sp="sp" if "sp" in axes else "tp")
    step = make_step(apply, use_cache=False)
    (loss, logits), grads = fzero.simulate(step, mesh, data=("fsdp",))(params, batch)
    assert_alike(model, {**batch, "use_cache": False}, loss, logits, grads)


def test_ranks_along_a_sequence_hold_slices_and_no_copies() -> None:
    """Without `state`, as with a mesh whose state was laid; `state=` says otherwise, and changes no result."""
    model, mesh, found = make("llama"), VirtualMesh(fsdp=2, tp=2, sp=2), []
    for state in (None, ("fsdp",), ("sp",), mesh.names):
        params, apply = fzero.hf.parallel(model, mesh, sp="sp", **({"state": state} if state else {}))
        axes = {leaf.form.layout.shard_axis for leaf in tree.leaves(params)}
        assert axes == ({"+".join(state or ("fsdp", "sp"))} if state != mesh.names else {"fsdp+tp+sp", "fsdp+sp"})
        step = fzero.simulate(make_step(apply, use_cache=False), mesh, data=("fsdp",))
        found.append(fzero.unpartition(step(params, {**make_batch(), "position_ids": PACKED})))
    torch.testing.assert_close(found[1:], found[:1] * 3)
    laid, _ = fzero.hf.parallel(model, mesh.lay_state(("sp",)), sp="sp")
    assert {leaf.form.layout.shard_axis for leaf in tree.leaves(laid)} == {"sp"}


def test_ranks_that_share_layers_have_their_own_places_between_them() -> None:
    """The sequence parallelism of Megatron: each layer gathers and scatters twice, forward and backward, and gathers
    twice more. The embedding scatters, the head gathers, and its logits go to the ranks of their places."""
    torch.manual_seed(0)
    model, mesh = LlamaForCausalLM(LlamaConfig(**SIZES)).double(), VirtualMesh(fsdp=1, tp=2)
    batch, long = {**make_batch(), "attention_mask": PADDED}, make_batch(length=512)
    hidden, logits, peaks = 2 * 8 * 16 * 8, 2 * 8 * 32 * 8, []
    for sp in (None, "tp"):
        params, apply = fzero.hf.parallel(model, mesh, tp="tp", sp=sp)
        step = fzero.simulate(make_step(apply, use_cache=False), mesh, data=("fsdp",))
        peaks.append(step.trace(params, long).memory().peak)
    (loss, got), grads = step(params, batch)
    assert_alike(model, {**batch, "use_cache": False}, loss, got, grads)
    sent = Counter[str]()
    for entry in step.trace(params, batch).comm():
        sent[entry.op] += entry.nbytes if entry.axis == "tp" and entry.bucket is None and entry.nbytes > 8 else 0
    assert +sent == {
        "all_gather": (6 * 2 + 3) * hidden + logits,  # the logits that the step returns are gathered
        "psum_scatter": (4 * 2 + 2) * hidden,
        "all_to_all": logits,  # half of them forward, and half backward
    }
    assert peaks[1] < 0.7 * peaks[0]


def test_a_budget_computes_again_what_lies_between_gathers() -> None:
    """What comes along the axis comes again in any case, and a budget chooses among the rest of a layer's values."""
    torch.manual_seed(0)
    model, mesh = LlamaForCausalLM(LlamaConfig(**SIZES)).double(), VirtualMesh(fsdp=1, tp=2)
    params, apply = fzero.hf.parallel(model, mesh, tp="tp", sp="tp")
    step, batch = make_step(apply, use_cache=False), make_batch(length=256)
    usual = fzero.simulate(step, mesh, data=("fsdp",))
    peak, right = usual.program(params, batch).memory().peak, fzero.unpartition(usual(params, batch))
    small = fzero.simulate(step, mesh, data=("fsdp",), memory=int(0.75 * peak))
    torch.testing.assert_close(fzero.unpartition(small(params, batch)), right, rtol=1e-9, atol=1e-12)
    assert small.program(params, batch).memory().peak <= 0.75 * peak


def test_packed_documents_are_separated_where_layers_are_computed_again() -> None:
    """transformers then makes no cache, whatever the configuration says, and so looks for documents."""
    model, mesh = make("llama").train(), VirtualMesh(fsdp=1, sp=2)
    model.gradient_checkpointing_enable()
    params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp")
    batch = {**make_batch(), "position_ids": PACKED}
    (loss, _), _ = fzero.simulate(make_step(apply), mesh, data=("fsdp",))(params, batch)
    torch.testing.assert_close(loss, model(**batch).loss.detach(), rtol=1e-6, atol=0)


def test_activations_fall_with_the_ranks() -> None:
    model, batch = make("llama"), make_batch(length=1024)
    peaks = []
    for ranks in (2, 4):
        mesh = VirtualMesh(fsdp=1, sp=ranks)
        params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp")
        step = fzero.simulate(
            fzero.grad(lambda params, batch, run=apply: run(params, **batch).loss), mesh, data=("fsdp",)
        )
        peaks.append(step.trace(params, batch).memory().peak)
    assert 1.7 < peaks[0] / peaks[1] < 2.3


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "has 9 places, for 2 ranks along 'sp'": ({}, {"input_ids": torch.ones(2, 9, dtype=torch.int64)}),
    "LlamaForCausalLM: inputs_of_mine": ({}, {**make_batch(), "inputs_of_mine": torch.ones(2, 8)}),
    "attention_mask: has 4 dims": ({}, {**make_batch(), "attention_mask": torch.ones(2, 1, 8, 8)}),
    "LlamaForCausalLM: logits_to_keep": ({}, {**make_batch(), "logits_to_keep": torch.arange(4)}),
    "LlamaForCausalLM: ignore_index: is 0": ({}, {**make_batch(), "ignore_index": 0}),
    "LlamaForCausalLM: output_attentions": ({}, {**make_batch(), "output_attentions": True}),
    "rope_type: is 'dynamic'": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str) -> None:
    settings, batch = REFUSED[words]
    model, mesh = LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings})), VirtualMesh(fsdp=1, sp=2)
    with pytest.raises(FzeroError) as caught:
        params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp")
        fzero.simulate(lambda params: apply(params, **batch).logits, mesh, data=("fsdp",))(params)
    assert words in str(caught.value)


def test_a_model_that_was_not_tried_is_refused() -> None:
    model = BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8))
    with pytest.raises(FzeroError, match="BertForMaskedLM is a bert, which was not tried on parts of a sequence"):
        fzero.hf.parallel(model, VirtualMesh(fsdp=1, sp=2), tp=None, sp="sp")


def test_a_model_whose_output_is_not_of_places_is_refused() -> None:
    """The 4 logits of a row are as many as the places of a rank."""
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=4, pad_token_id=0))
    mesh, tokens = VirtualMesh(fsdp=1, sp=2), make_batch()["input_ids"]
    params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp")
    step = fzero.simulate(lambda params, x: apply(params, x).logits, mesh, data=("fsdp",))
    with pytest.raises(FzeroError, match="is a SequenceClassifierOutputWithPast, whose values are not known"):
        step(params, tokens)


REFUSED_AXES: dict[str, dict[str, Any]] = {
    r"sp='tp': some of its ranks share layers too: tp=None, ep='tp'": {"tp": None, "ep": "tp", "sp": "tp"},
    r"some of its ranks share layers too: tp=\('tp', 'sp'\)": {"tp": ("tp", "sp"), "sp": "tp"},
    r"sp=\['sp'\]: is no axis": {"tp": None, "sp": ["sp"]},
    "rotate: is given, and in attention ranks along sp, which is tp, have all": {"sp": "tp", "rotate": True},
}


def test_axes_that_are_none_or_the_same_are_refused() -> None:
    for words, how in REFUSED_AXES.items():
        with pytest.raises(FzeroError, match=words):
            fzero.hf.parallel(make("llama"), VirtualMesh(fsdp=1, tp=2, sp=1), **how)


def test_noise_on_the_input_of_routers_is_refused() -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.1))
    with pytest.raises(FzeroError, match="model: router_jitter_noise: is given, and its noise would be the same"):
        fzero.hf.parallel(model, VirtualMesh(fsdp=1, sp=2), tp=None, sp="sp")


def test_the_page_has_each_type() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hf_parallel.md").read_text()
    assert [name for name in MODEL_TYPES if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, {}), (4, {"position_ids": PACKED, "use_cache": False})], ids=["sp 2", "sp 4, packed"]
)
def test_rotated_keys_are_those_of_one_device(ranks: int, more: dict[str, Any]) -> None:
    """Grouped heads and a window, in balanced order. 4 ranks share 2 heads of keys."""
    config = MistralConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=3)
    torch.manual_seed(0)
    model, batch, mesh = MistralForCausalLM(config).double(), {**make_batch(), **more}, VirtualMesh(fsdp=1, sp=ranks)
    params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp", rotate=True)
    step = fzero.simulate(make_step(apply), mesh, data=("fsdp",))
    (loss, logits), grads = step(params, batch)
    assert_alike(model, batch, loss, logits, grads)
    assert any(entry.op == "ppermute" and entry.axis == "sp" for entry in step.trace(params, batch).comm())


def test_attention_that_rotated_keys_do_not_have_is_refused() -> None:
    mesh, long = VirtualMesh(fsdp=1, sp=2), {"input_ids": torch.ones(2, 6, dtype=torch.int64)}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (make("llama"), {**make_batch(), "attention_mask": PADDED}, "attention to rotated keys hides no padding"),
        (make("llama"), long, "has 6 places, for 2 chunks on each of 2 ranks along 'sp'; pad to a multiple of 4"),
        (make("gpt-oss"), make_batch(), "self_attn.sinks: are part of its softmax"),
    ]
    for model, batch, words in cases:
        with pytest.raises(FzeroError, match=words):
            params, apply = fzero.hf.parallel(model, mesh, tp=None, sp="sp", rotate=True)
            fzero.simulate(lambda p, run=apply, b=batch: run(p, **b).logits, mesh, data=("fsdp",))(params)
    with pytest.raises(FzeroError, match="rotate: is given without sp"):
        fzero.hf.parallel(make("llama"), mesh, tp=None, rotate=True)
