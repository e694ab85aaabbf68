"""`fzero.hf.parallel(pp=)`: stages of a model of transformers equal one device, on virtual and on real ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from processes import run_cases, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
import fzero.checkpoint
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.hf.stacks import unstack

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TOKENS = torch.randint(3, 32, (8, 6), generator=torch.Generator().manual_seed(0))
PADDING = (torch.arange(6) < torch.tensor([6, 3] * 4).unsqueeze(1)).long()
DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]).repeat(4, 1)
PACKED = {"position_ids": DOCUMENTS, "use_cache": False}
TWO = VirtualMesh(fsdp=1, pp=2)


def make(kind: str = "Llama", **settings: Any) -> Any:
    """A model in float64. Norms of transformers compute in float32, and those of torch take their place."""
    torch.manual_seed(0)
    sizes = GPT2 if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings})
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.add_(0.1 * torch.randn_like(leaf))
    return replace_norms(model.train())


def replace_norms(model: Any) -> Any:
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if "RMSNorm" in type(norm).__name__:
                plain = nn.RMSNorm(len(norm.weight), eps=1e-6)
                plain.weight = norm.weight
                setattr(module, name, plain)
    return model


def find_loss(output: Any, batch: Any) -> Tensor:
    """The loss of next tokens, in float64: transformers' own is in float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def differentiate(apply: Any, params: Any, batch: Any) -> Any:
    return fzero.value_and_grad(lambda params: find_loss(apply(params, **batch), batch))(params)


def assert_equals_one_device(model: Any, mesh: Any, batch: Any = None, **how: Any) -> Any:
    """Parameters, their function and its step, whose loss and gradients are those of the plain model."""
    batch = {"input_ids": TOKENS, **(batch or {})}
    params, apply = fzero.hf.parallel(model, mesh, pp="pp", **how)
    step = fzero.simulate(functools.partial(differentiate, apply), mesh, data=mesh.names[: mesh.names.index("pp")])
    loss, grads = step(params, batch)
    expected = find_loss(model(**batch), batch)
    torch.testing.assert_close(loss.mean(), expected.detach(), rtol=1e-12, atol=0)
    model.zero_grad()
    expected.backward()
    found = unstack(fzero.unpartition(grads), model)
    for path, leaf in model.named_parameters():
        torch.testing.assert_close(found[path], leaf.grad, rtol=1e-12, atol=1e-12)
    alone = find_loss(apply(fzero.unpartition(params), **batch), batch)  # outside of a step
    torch.testing.assert_close(alone, expected.detach(), rtol=1e-12, atol=0)
    return params, apply, step


@pytest.mark.parametrize(
    ("kind", "mesh", "batch", "how"),
    [
        ("Llama", VirtualMesh(fsdp=1, pp=4), {"attention_mask": PADDING}, {"num_microbatches": 8}),
        ("Qwen3", VirtualMesh(fsdp=1, pp=2, tp=2), PACKED, {"tp": "tp", "num_microbatches": 4}),
        ("Mistral", VirtualMesh(fsdp=2, pp=2), {}, {}),
    ],
)
def test_stages_equal_one_device(kind: str, mesh: Any, batch: Any, how: Any) -> None:
    few = {"num_hidden_layers": 2}
    settings = {"Qwen3": {"tie_word_embeddings": True, **few}, "Mistral": {"sliding_window": 3, **few}}.get(kind, {})
    assert_equals_one_device(make(kind, **settings), mesh, batch, **{"tp": None, **how})


def test_a_vocabulary_that_ranks_do_not_divide_is_whole() -> None:
    """And what ranks send, and have, is said: 1 / 2 of the layers, and one microbatch a tick."""
    model = make("GPT2", **QUIET, vocab_size=33)
    params, _, step = assert_equals_one_device(model, TWO, tp=None, num_microbatches=4)
    assert not params["transformer"]["wte"]["weight"].form.layout.split_axes
    program = step.trace(params, {"input_ids": TOKENS})
    sent = [entry.nbytes for entry in program.comm() if entry.axis == "pp" and entry.op == "ppermute"]
    assert sum(sent) == 2 * (4 + 2 - 1) * 2 * 2 * 6 * 16 * 8  # ticks, ranks, rows, places, width, bytes
    up = params["transformer"]["h"]["mlp"]["c_fc"]["weight"]
    assert up.global_shape == (2, 16, 64) and up.shape == (1, 16, 64)
    assert program.memory().peak > 0


@pytest.mark.parametrize(
    ("mesh", "settings", "more"),
    [
        (VirtualMesh(fsdp=1, pp=2, tp=2), {}, {"attention_mask": PADDING.repeat(1, 2)}),
        (TWO, {"vocab_size": 33}, {"num_items_in_batch": 7}),  # the head is whole
    ],
)
def test_the_loss_of_labels_is_computed_by_places(mesh: Any, settings: Any, more: Any) -> None:
    """That of transformers is in float32. No rank has the logits of all words at all places, where words are cut."""
    model = make(num_hidden_layers=2, **settings)
    tokens = TOKENS.repeat(1, 2)
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens < 9, -100), **more}
    params, apply = fzero.hf.parallel(model, mesh, tp="tp" if mesh.has("tp") else None, pp="pp")
    step = fzero.simulate(
        lambda p, batch: fzero.value_and_grad(lambda p: apply(p, **batch).loss)(p), mesh, data=("fsdp",)
    )
    loss, grads = step(params, batch)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    found = unstack(fzero.unpartition(grads), model)
    for path, leaf in model.named_parameters():
        torch.testing.assert_close(found[path], leaf.grad, rtol=1e-6, atol=1e-7)
    values = (node.meta.get("val") for node in step.trace(params, batch).graph.nodes)
    largest = max(x.numel() for x in values if isinstance(x, Tensor) and x.shape[-1:] == (model.config.vocab_size,))
    assert largest == tokens.numel() * model.config.vocab_size // (4 if mesh.has("tp") else 1)


def test_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, mesh = make("Phi3"), VirtualMesh(fsdp=2, pp=2, tp=2)  # gate and up in one leaf
    params, _ = fzero.hf.parallel(model, mesh, pp="pp", num_microbatches=4)
    fzero.hf.save_pretrained(tmp_path / "ours", params, model)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs
    back = replace_norms(type(model).from_pretrained(tmp_path / "ours", dtype=torch.float64))
    again, function = fzero.hf.parallel(back, TWO, tp=None, pp="pp")
    logits = function(fzero.unpartition(again), input_ids=TOKENS).logits
    assert torch.equal(logits, model(input_ids=TOKENS).logits)
    with pytest.raises(FzeroError, match="is no leaf of LlamaForCausalLM"):
        fzero.hf.save_pretrained(tmp_path / "other", params, make())


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx, self.linear = number, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.layer_idx + 1)


class Numbers(nn.Module):
    """Layers that compute with their number, or with what stands between them."""

    def __init__(self, is_between: bool = False) -> None:
        super().__init__()
        self.layers, self.is_between = nn.ModuleList([Numbered(i) for i in range(2)]), is_between

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states + 1 if self.is_between else hidden_states)
        return hidden_states


@pytest.mark.parametrize(
    ("kind", "settings", "batch", "how", "words"),
    [
        ("Llama", {"num_hidden_layers": 3}, {}, {}, "model.layers: has 3 layers, for stages on 2 ranks along 'pp'"),
        (
            "Llama",
            {},
            {},
            {"num_microbatches": 3},
            "8 rows, for 3 microbatches; give num_microbatches one of 1, 2, 4, 8",
        ),
        ("Llama", {}, {}, {"num_microbatches": 0}, "num_microbatches: is 0"),
        ("Llama", {}, {"output_hidden_states": True}, {}, "LlamaModel: output_hidden_states: is given"),
        ("Llama", {}, {"cache": transformers.DynamicCache()}, {}, "LlamaModel: cache: is given"),
        ("Llama", {}, {}, {"plan": {"lm_head": "replicate"}}, "plan: is given, and neither tp nor ep"),
        ("Llama", {"attention_dropout": 0.1}, {}, {}, "self_attn.attention_dropout: is 0.1, and stages would draw"),
        ("GPT2", {}, {}, {}, "transformer.h.0.attn.attn_dropout.p: is 0.1"),
        ("Gemma2", {}, {}, {}, "layers.1: is not like layer 0: self_attn.layer_type is sliding_attention and full"),
        (
            "DeepseekV3",
            {"first_k_dense_replace": 1, "n_routed_experts": 8},
            {},
            {},
            "mlp.class is DeepseekV3MLP and DeepseekV3MoE",
        ),
    ],
)
def test_what_no_stages_are(kind: str, settings: Any, batch: Any, how: Any, words: str) -> None:
    with pytest.raises(FzeroError) as caught:
        params, apply = fzero.hf.parallel(make(kind, **settings), TWO, tp=None, pp="pp", **how)
        step = fzero.simulate(functools.partial(differentiate, apply), TWO, data=("fsdp",))
        step(params, {"input_ids": TOKENS, **batch})
    assert words in str(caught.value)


def test_axes_and_layers_that_no_pipeline_takes() -> None:
    model, mesh = make(), VirtualMesh(fsdp=1, tp=2, pp=2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pp": "pp"}, "pp='pp': is behind 'tp'"),
        ({"pp": "tp"}, "pp='tp': is 'tp' too"),
        ({"pp": "fsdp"}, "is an axis over which"),
        ({"tp": None, "pp": "pp", "sp": "tp"}, "is given beside sp"),
        ({"num_microbatches": 2}, "num_microbatches: is given without pp"),
    ]
    for how, words in cases:
        with pytest.raises(FzeroError, match=words):
            fzero.hf.parallel(model, mesh, **how)
    for is_between, words in ((False, "layer_idx: is the number of a layer"), (True, "computes between its layers")):
        params, apply = fzero.hf.parallel(Numbers(is_between), TWO, tp=None, pp="pp")
        with pytest.raises(FzeroError, match=words):
            fzero.simulate(lambda p, x, f=apply: f(p, x).sum(), TWO, data=("fsdp",))(params, torch.ones(2, 4))
    params, apply = fzero.hf.parallel(model, VirtualMesh(fsdp=1, pp=2), tp=None, pp="pp")
    step = fzero.simulate(functools.partial(differentiate, apply), VirtualMesh(fsdp=1, pp=2), data=("fsdp", "pp"))
    with pytest.raises(FzeroError, match="other examples on each rank along 'pp'"):
        step(params, {"input_ids": TOKENS})


def train(ranks: Any, folder: Path, pp: int, tp: int) -> tuple[list[float], dict[str, float]]:
    """Losses of three updates on ranks, and the weights of the files that they wrote."""
    mesh = init_device_mesh("cpu", (1, pp, tp), mesh_dim_names=("fsdp", "pp", "tp"))
    model, optimizer = make(), fzero.optim.adamw(1e-2)
    params, apply = fzero.hf.parallel(model, mesh, pp="pp", num_microbatches=4)
    state = optimizer.init(params)

    def update(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = differentiate(apply, params, batch)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    step, losses = fzero.shard(update, mesh, data=("fsdp",)), []
    for _ in range(3):
        params, state, loss = step(params, state, {"input_ids": TOKENS})
        losses.append(loss.item())
    fzero.hf.save_pretrained(folder, params, model)
    back = type(model).from_pretrained(folder, dtype=torch.float64)
    return losses, {path: leaf.sum().item() for path, leaf in back.named_parameters()}


def test_four_ranks_train_as_one_device(tmp_path: Path) -> None:
    model, optimizer = make(), fzero.optim.adamw(1e-2)
    params, apply = fzero.lower(model)
    state, losses = optimizer.init(params), []
    for _ in range(3):
        loss, grads = differentiate(apply, params, {"input_ids": TOKENS})
        updates, state = optimizer.update(grads, state, params)
        params = fzero.optim.apply_updates(params, updates)
        losses.append(loss.item())
    weights = {path: leaf.sum().item() for path, leaf in zip(tree.paths(params), tree.leaves(params))}
    outcomes = run_cases(4, {"train": functools.partial(train, folder=tmp_path / "out", pp=2, tp=2)})
    for found, sums in values(outcomes["train"]):
        torch.testing.assert_close(found, losses, rtol=1e-11, atol=0)
        torch.testing.assert_close(sums, weights, rtol=0, atol=1e-10)
