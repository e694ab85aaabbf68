"""QLoRA: adapters over codes train as over the dequantized weights in transformers' Trainer and peft."""

from __future__ import annotations

import re
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
from torch import Tensor
from transformers import BitsAndBytesConfig

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.hf.codes import KINDS, quantize_base
from fzero.hf.merging import list_leaves
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


def round_to_nf4(weight: Tensor, double_quant: bool = False) -> Tensor:
    """A weight behind nf4 codes in blocks of 64, by the rules of bitsandbytes in plain torch."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks / scales, torch.tensor(THRESHOLDS))
    if double_quant:
        scales = round_scales(scales.view(-1))[:, None]
    return (torch.tensor(LEVELS)[codes] * scales).reshape(weight.shape)


def round_scales(scales: Tensor) -> Tensor:
    """Scales behind bitsandbytes' second quantization: distances from their mean, in groups of 256, as values of its
    dynamic map."""
    values = [0.0, 1.0]
    for k in range(7):
        borders = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float64)
        middles = ((borders[1:] + borders[:-1]) / 2 * 10.0 ** (k - 6)).tolist()
        values += [*middles, *(-x for x in middles)]
    levels, mean = torch.tensor(sorted(values)), scales.double().mean().float()
    groups = [(group, group.abs().max()) for group in (scales - mean).split(256)]
    nearest = [levels[(group[:, None] / most - levels).abs().argmin(1)] * most for group, most in groups]
    return torch.cat(nearest) + mean


def round_to_nf4_dq(weight: Tensor) -> Tensor:
    return round_to_nf4(weight, double_quant=True)


def round_to_int8(weight: Tensor) -> Tensor:
    """A weight behind 8-bit codes in blocks of 64."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales).round() * scales).reshape(weight.shape)


def round_base(model: Any, round: Any) -> Any:
    """A Llama whose weights of products, but for the head, went through `round`."""
    for path, x in model.named_parameters():
        if "proj" in path and "lora_" not in path:
            x.data = round(x.data)
    return model


def make_from(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def make_adapted(round: Any = None) -> Any:
    """A Llama with LoRA, whose base went through `round`."""
    model = make_model("llama") if round is None else round_base(make_model("llama"), round)
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
    held, plain = list_leaves(got.sharded.params), dict(expected.model.named_parameters())
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
    params = quantize_base(fzero.partition(params, MESH), model, KINDS["nf4-dq"])

    def compute(params: Any, tokens: Tensor) -> Any:
        return fzero.grad(lambda p: apply(p, input_ids=tokens, labels=tokens, use_cache=False).loss)(params)

    program = fzero.simulate(compute, MESH).trace(params, torch.ones(2, 6, dtype=torch.int64))
    assert_comm_is_its_closed_form(program, model, gathers=[1, 2], trained=[1], bits=4, double_quant=True)


def test_a_base_model_is_born_in_slices_with_adapters_and_merged_there(tmp_path: Path) -> None:
    """As `get_peft_model` and `merge_and_unload` of peft do it with the whole, dequantized model: bit for bit."""
    make_model("llama").save_pretrained(tmp_path / "base")
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"], use_dora=True, init_lora_weights=False
    )
    got = fzero.hf.from_pretrained(tmp_path / "base", MESH, seed=5, peft_config=adapters, quantize="nf4-dq")
    torch.manual_seed(5)
    plain = peft.get_peft_model(make_from(tmp_path / "base"), adapters)  # DoRA takes norms of the weights as they were
    round_base(plain.get_base_model(), round_to_nf4_dq)
    held = dict(fzero.iter_full({path: x for path, x in list_leaves(got.params).items() if not is_quantized(x)}))
    assert {path for path in held if "lora_" in path} == {
        path for path, x in plain.named_parameters() if x.requires_grad
    }
    assert all(torch.equal(x, plain.get_parameter(path)) for path, x in held.items())

    got.save_pretrained(tmp_path / "adapters")
    read = peft.PeftModel.from_pretrained(make_from(tmp_path / "base"), tmp_path / "adapters")
    assert all(torch.equal(x, plain.get_parameter(path)) for path, x in read.named_parameters() if "lora_" in path)

    merged = plain.merge_and_unload()
    got.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert all(
        torch.equal(x, merged.get_parameter(path)) for path, x in make_from(tmp_path / "merged").named_parameters()
    )


def test_codes_of_bitsandbytes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    for config, way_out in (
        (BitsAndBytesConfig(load_in_4bit=True), 'quantize="nf4"'),
        (BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True), 'quantize="nf4-dq"'),
        (BitsAndBytesConfig(load_in_8bit=True), 'quantize="int8"'),
    ):
        with pytest.raises(FzeroError, match=f"quantization_config: is a BitsAndBytesConfig.*; give {way_out}"):
            fzero.hf.from_pretrained(tmp_path, MESH, quantization_config=config)
        with pytest.raises(FzeroError, match=f"quantize: is a BitsAndBytesConfig; give {way_out}"):
            fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=MESH, quantize=config)
        model.is_quantized, model.config.quantization_config = True, config  # what transformers sets
        with pytest.raises(FzeroError, match=f"LlamaForCausalLM is quantized.*give {way_out} to fzero.hf.Trainer"):
            fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=MESH)
        model.config.save_pretrained(tmp_path)
        with pytest.raises(FzeroError, match=f"are codes of bitsandbytes; give the files.* and {way_out}"):
            fzero.hf.from_pretrained(tmp_path, MESH)
        model.is_quantized = False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fp4", 'quantize: is \'fp4\'; give "nf4", "nf4-dq" or "int8", or a dict'),
        ({"bit": 4}, "quantize: has 'bit', which fzero.quantize does not take; give a dict of bits, block"),
        ({"bits": 3}, "bits is 3; give 8 or 4"),
    ],
)
def test_other_codes_are_refused_by_name(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=re.escape(message)):
        fzero.hf.Trainer(make_adapted(), make_arguments(tmp_path), mesh=MESH, quantize=given)
