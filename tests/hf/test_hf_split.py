"""A model of transformers whose projections are split over a model axis, by hooks of its user, beside one device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero import VirtualMesh, optim

SPLIT = {f"*.{name}_proj.weight": ("tp", 0) for name in ("q", "k", "v", "gate", "up")} | {
    f"*.{name}_proj.weight": ("tp", 1) for name in ("o", "down")
}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).double()
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(lambda module, given, made: fzero.psum(made, "tp"))
    return model


def test_a_llama_whose_heads_are_split_trains_as_on_one_device() -> None:
    params, apply = fzero.lower(make_model())
    optimizer, mesh = optim.sgd(0.1), VirtualMesh(fsdp=2, tp=2)

    def train_step(params: Any, state: Any, ids: Tensor) -> Any:
        def loss_of(params: Any) -> Tensor:
            return apply(params, input_ids=ids, labels=ids, use_cache=False).loss

        loss, grads = fzero.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    held = fzero.partition(params, mesh, split=SPLIT)
    step = fzero.simulate(train_step, mesh, data=("fsdp",))
    state, alone, draws = optimizer.init(held), (params, optimizer.init(params)), torch.Generator().manual_seed(0)
    for length in (9, 12, 7):
        ids = torch.randint(64, (4, length), generator=draws)
        held, state, loss = step(held, state, ids)
        *alone, expected = train_step(*alone, ids)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # transformers computes the loss in float32
    torch.testing.assert_close(fzero.unpartition(held), alone[0], rtol=0, atol=1e-7)  # whose gradients are so too
