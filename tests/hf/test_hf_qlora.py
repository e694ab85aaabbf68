"""QLoRA: adapters over codes train as over the dequantized weights in transformers' Trainer and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")

import peft
import torch
import transformers
from hf_models import assert_comm_is_its_closed_form, make_arguments, make_dataset, make_model, read_logs
from peft import LoraConfig
from torch import Tensor, nn

import fzero.hf
from fzero import VirtualMesh, tree
from fzero.hf.codes import KINDS, quantize_base
from fzero.values.quantized import is_quantized

MESH = VirtualMesh(fsdp=2)
TOLERANCE = 1e-5
THRESHOLDS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip
"""Where bitsandbytes' nf4 goes on to the next level: `dQuantizeNF4` of its kernels."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def round_to_nf4(weight: Tensor) -> Tensor:
    """A weight behind nf4 codes in blocks of 64, by the rules of bitsandbytes in plain torch."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks / scales, torch.tensor(THRESHOLDS))
    return (torch.tensor(LEVELS)[codes] * scales).reshape(weight.shape)


def round_to_int8(weight: Tensor) -> Tensor:
    """A weight behind 8-bit codes in blocks of 64."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales).round() * scales).reshape(weight.shape)


def make_adapted(round: Any = None) -> Any:
    """A Llama with LoRA. The products of its base went through `round`, but for the head."""
    model = make_model("llama")
    for path, module in model.named_modules():
        if round is not None and isinstance(module, nn.Linear) and path != "lm_head":
            module.weight.data = round(module.weight.data)
    return peft.get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def train(cls: Any, model: Any, folder: Path, changed: dict[str, Any], **named: Any) -> Any:
    changed = {"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, **changed}
    trainer = cls(model, make_arguments(folder, **changed), train_dataset=make_dataset(), **named)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("stage", "coding", "round", "changed"),
    [
        (3, "nf4", round_to_nf4, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
        (2, {"bits": 8, "block": 64}, round_to_int8, {"gradient_accumulation_steps": 1}),
    ],
)
def test_adapters_over_codes_train_as_over_the_dequantized_weights(
    stage: int, coding: Any, round: Any, changed: dict[str, Any], tmp_path: Path
) -> None:
    expected = train(transformers.Trainer, make_adapted(round), tmp_path, changed)
    got = train(fzero.hf.Trainer, make_adapted(), tmp_path, changed, mesh=MESH, stage=stage, quantize=coding)
    for mine, their in zip(read_logs(got), read_logs(expected), strict=True):
        assert mine == pytest.approx(their, rel=TOLERANCE, abs=TOLERANCE)
    params, plain = got.sharded.params, dict(expected.model.named_parameters())
    held = dict(zip(tree.paths(params, is_leaf=is_quantized), tree.flatten(params, is_leaf=is_quantized)[0]))
    codes = {path for path, leaf in held.items() if is_quantized(leaf)}
    assert codes == {path for path in plain if "proj" in path and "lora" not in path}
    program = got._begin._pipeline._cache[0].finished
    bits = 4 if coding == "nf4" else 8
    assert_comm_is_its_closed_form(program, expected.model, [2 if stage == 3 else 1], [0], bits)
    for path, leaf in held.items():
        assert torch.allclose(leaf.full_tensor(), plain[path], rtol=TOLERANCE, atol=TOLERANCE), path


def test_layers_below_the_lowest_adapter_are_gathered_once() -> None:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    model = peft.get_peft_model(make_model("llama", layers=2), adapters)
    params, apply = fzero.lower(model)
    params = quantize_base(fzero.partition(params, MESH), model, KINDS["nf4"])

    def compute(params: Any, tokens: Tensor) -> Any:
        return fzero.grad(lambda p: apply(p, input_ids=tokens, labels=tokens, use_cache=False).loss)(params)

    program = fzero.simulate(compute, MESH).trace(params, torch.ones(2, 6, dtype=torch.int64))
    assert_comm_is_its_closed_form(program, model, gathers=[1, 2], trained=[1], bits=4)
