"""Models of peft in the Trainer: logs, files and tokens are those of transformers' Trainer."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")

import peft
import torch
import transformers
from hf_models import (
    assert_comm_is_its_closed_form,
    make_arguments,
    make_dataset,
    make_model,
    make_ragged_dataset,
    pad_rows,
    read_logs,
)
from peft import LoraConfig
from processes import run
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from traces import describe_trace

import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.base.frozen import is_frozen
from fzero.hf.adapters import load_adapters
from fzero.hf.codes import KINDS
from fzero.tracing.layers import Layers
from fzero.tracing.trace import trace

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LORA: dict[str, Any] = {**CAUSAL, "r": 4, "target_modules": ["q_proj", "v_proj"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(**LORA),
    "modules_to_save": lambda: LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "DoRA": lambda: LoraConfig(**LORA, use_dora=True),
    "rsLoRA of all layers": lambda: LoraConfig(
        **CAUSAL, r=2, target_modules="all-linear", use_rslora=True, init_lora_weights="gaussian"
    ),
    "LoRA of embeddings": lambda: LoraConfig(**CAUSAL, r=2, target_modules=["q_proj", "embed_tokens"]),
    "LoRA with biases": lambda: LoraConfig(**LORA, bias="lora_only"),
    "LoRA of tokens": lambda: LoraConfig(**LORA, trainable_token_indices=[3, 5]),
    "IA3": lambda: peft.IA3Config(
        **CAUSAL, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": lambda: peft.VeraConfig(**CAUSAL, r=4, target_modules=["q_proj"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(**CAUSAL, init_r=4, target_r=2, total_step=20, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(**CAUSAL, oft_block_size=4, target_modules=["q_proj"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(**CAUSAL, num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**CAUSAL, num_virtual_tokens=3),
}
RAGGED = {"LoRA", "prompt tuning", "prefix tuning"}
"""Adapters whose rows have two lengths, where each program is traced twice. The others are matrices or vectors beside
those of a layer, as LoRA's are: rows of one length show them."""
SUMMED = RAGGED | {"modules_to_save"}
"""Adapters whose gradients are sums of two batches, for which one program more is traced."""
TOLERANCE = 1e-5


def make_adapted(name: str, others: int = 0) -> Any:
    """A Llama with adapters: "default", and so many others."""
    model = peft.get_peft_model(make_model("llama"), CONFIGS[name]())
    for i in range(others):
        model.add_adapter(f"other {i}".replace(" ", "_"), CONFIGS[name]())
    return model


def train(cls: Any, folder: Path, name: str, others: int = 0, resume: Any = None, **named: Any) -> Any:
    """Four updates, saved after the second and at the end."""
    changed = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
        "gradient_accumulation_steps": 1 + (name in SUMMED and not others),
        "learning_rate": 1e-2, **named.pop("changed", {}),
    }  # fmt: skip
    rows = make_ragged_dataset() if name in RAGGED and not others else make_dataset()
    data = {"train_dataset": rows, "eval_dataset": rows[:8], "data_collator": pad_rows}
    trainer = cls(make_adapted(name, others), make_arguments(folder, **changed), **data, **named)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder / "last")
    return trainer


@pytest.fixture(scope="module")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The trainer of adapters of a name on two virtual ranks, and its folder: one run for all tests of the file."""

    @functools.cache
    def once(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("ours")
        return train(fzero.hf.Trainer, folder, name, mesh=VirtualMesh(fsdp=2)), folder

    return once


def assert_equal_logs(got: Any, expected: Any, last: int = 0) -> None:
    ours, theirs = read_logs(got)[-last:], read_logs(expected)[-last:]
    assert len(ours) == len(theirs) > 0
    for mine, their in zip(ours, theirs):
        assert mine == pytest.approx(their, rel=TOLERANCE, abs=TOLERANCE)


def list_files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def read_config(file: Path) -> dict[str, Any]:
    """What a file of a configuration says. Names of modules are a set for peft, in any order."""
    return {key: sorted(x) if isinstance(x, list) else x for key, x in json.loads(file.read_text()).items()}


def assert_equal_files(ours: Path, theirs: Path) -> None:
    """The same files, equal configurations, and equal adapters."""
    assert list_files(ours) == list_files(theirs)
    for name in list_files(ours):
        if name.endswith(".json"):
            assert read_config(ours / name) == read_config(theirs / name), name
        if name.endswith(".safetensors"):
            mine, their = load_file(ours / name), load_file(theirs / name)
            assert mine.keys() == their.keys()
            for key, x in mine.items():
                torch.testing.assert_close(
                    x, their[key], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, k=key: k + text
                )


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_train_and_are_saved_as_in_transformers(name: str, train_once: Any, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path, name)
    got, folder = train_once(name)
    assert_equal_logs(got, expected)
    assert got.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=TOLERANCE)
    assert_equal_files(folder / "last", tmp_path / "last")


@pytest.mark.parametrize(
    ("name", "others"), [("LoRA", 0), ("modules_to_save", 0), ("prompt tuning", 0), ("modules_to_save", 1)]
)
def test_training_goes_on_from_adapters(name: str, others: int, train_once: Any, tmp_path: Path) -> None:
    mesh = VirtualMesh(fsdp=2)
    if others:
        got, folder = train(fzero.hf.Trainer, tmp_path / "first", name, others, mesh=mesh), tmp_path / "first"
    else:
        got, folder = train_once(name)
    again = train(fzero.hf.Trainer, tmp_path / "again", name, others, folder / "checkpoint-2", mesh=mesh, stage=2)
    assert_equal_logs(again, got, last=2)


def test_peft_reads_what_was_saved_and_generates_the_same_tokens(train_once: Any) -> None:
    trainer, folder = train_once("LoRA")
    read = peft.PeftModel.from_pretrained(make_model("llama"), folder / "last").eval()
    ours = fzero.unpartition(trainer.sharded.params)
    held = dict(zip(tree.paths(ours), tree.leaves(ours)))
    for path, x in read.named_parameters():
        assert torch.equal(x, held[path]), path
    prompt = torch.tensor([[5, 6, 7]] * 2)
    expected = read.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(trainer.generate(input_ids=prompt, max_new_tokens=4, do_sample=False), expected)


def test_arguments_mean_the_same_for_adapters(tmp_path: Path) -> None:
    changed = {"gradient_checkpointing": True, "optim": "sgd", "max_grad_norm": 0.0}
    expected = train(transformers.Trainer, tmp_path / "theirs", "LoRA with biases", changed=changed)
    got = train(fzero.hf.Trainer, tmp_path / "ours", "LoRA with biases", changed=changed, mesh=VirtualMesh(fsdp=2))
    assert_equal_logs(got, expected)


def test_only_adapters_have_gradients_and_state(train_once: Any) -> None:
    trainer, _ = train_once("LoRA")
    params = trainer.sharded.params
    trained = {path for path, leaf in zip(tree.paths(params), tree.leaves(params)) if not is_frozen(leaf)}
    assert trained and all("lora_" in path for path in trained)
    moments = [x for x in tree.leaves(trainer.sharded.opt_state) if isinstance(x, fzero.Sharded) and x.ndim]
    assert len(moments) == 2 * len(trained)
    program = trainer._begin._pipeline._cache[0].finished
    assert_comm_is_its_closed_form(program, trainer.model, gathers=[2], trained=[0])


def train_on_two(mesh: DeviceMesh, folder: Path) -> list[dict[str, Any]]:
    rank = str(mesh.get_local_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    trainer = train(fzero.hf.Trainer, folder, "modules_to_save", mesh=mesh, changed={"per_device_train_batch_size": 2})
    again = train(
        fzero.hf.Trainer, folder, "modules_to_save", resume=folder / "checkpoint-2", mesh=mesh,
        changed={"per_device_train_batch_size": 2},
    )  # fmt: skip
    assert_equal_logs(again, trainer, last=2)
    again.merge_and_unload().save_pretrained(folder / "merged")
    coded = fzero.hf.from_pretrained(folder / "merged", mesh, peft_config=LoraConfig(**LORA), quantize="nf4")
    coded.merge_and_unload().save_pretrained(folder / "coded")  # untrained adapters add nothing
    return read_logs(trainer)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """And merge adapters, and hold codes of a model."""
    changed = {"per_device_train_batch_size": 4}
    expected = train(transformers.Trainer, tmp_path / "theirs", "modules_to_save", changed=changed)
    for logs in run(2, train_on_two, tmp_path / "ours"):
        for mine, their in zip(logs, read_logs(expected), strict=True):
            assert mine == pytest.approx(their, rel=TOLERANCE, abs=TOLERANCE)
    assert_equal_files(tmp_path / "ours" / "last", tmp_path / "theirs" / "last")
    merged, coded = (load_file(tmp_path / "ours" / name / "model.safetensors") for name in ("merged", "coded"))
    for path, x in expected.model.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[path], x, rtol=TOLERANCE, atol=TOLERANCE)
        if "proj" in path:
            x = fzero.quantize({"x": merged[path]}, **KINDS["nf4"], where="x")["x"].full_tensor()
            assert torch.equal(coded[path], x), path


def test_layers_with_adapters_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's input has no gradient, the last one is held against the second. Node by node the program is
    that of layers which run."""
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2
    )
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj"], r=2))
    params, apply = fzero.lower(model.train())
    given = fzero.partition(params, VirtualMesh(fsdp=2)), torch.zeros(2, 4, dtype=torch.int64)

    def step(params: Any, x: torch.Tensor) -> Any:
        return fzero.value_and_grad(lambda params: apply(params, input_ids=x, labels=x, use_cache=False).loss)(params)

    copied, copy = list[int](), Layers._copy
    monkeypatch.setattr(Layers, "_copy", lambda self, *how: (copied.append(1), copy(self, *how))[1])
    with_copies = trace(step, given, VirtualMesh(fsdp=2))
    assert len(copied) == 3
    assert describe_trace(with_copies) == describe_trace(trace(step, given, VirtualMesh(fsdp=2), copies=False))


def test_adapters_of_another_shape_are_refused(train_once: Any, tmp_path: Path) -> None:
    shutil.copytree(train_once("LoRA")[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    file = tmp_path / "checkpoint-2" / "adapter_model.safetensors"
    held = load_file(file)
    save_file(dict(list(held.items())[1:]), file)
    with pytest.raises(FzeroError, match=r"adapter_model.safetensors lacks \['base_model.*; resume with the config"):
        train(fzero.hf.Trainer, tmp_path, "LoRA", resume=tmp_path / "checkpoint-2", mesh=VirtualMesh(fsdp=2))
    file.unlink()
    with pytest.raises(FzeroError, match=r"has no adapter_model.safetensors: it is no checkpoint"):
        train(fzero.hf.Trainer, tmp_path, "LoRA", resume=tmp_path / "checkpoint-2", mesh=VirtualMesh(fsdp=2))


def test_virtual_tokens_generate_nothing(train_once: Any) -> None:
    trainer, _ = train_once("prompt tuning")
    with pytest.raises(FzeroError, match=r"generate: .* has virtual tokens of .*; save_model"):
        trainer.generate(input_ids=torch.tensor([[5, 6, 7]] * 2))


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model("llama")
    model._hf_peft_config_loaded = True  # what add_adapter of transformers sets
    with pytest.raises(FzeroError, match=r"has adapters of add_adapter.*; give peft.get_peft_model"):
        fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=VirtualMesh(fsdp=2))
    adapters = LoraConfig(r=2, target_parameters=["mlp.up_proj.weight"])
    with pytest.raises(FzeroError, match=r"0\.mlp\.up_proj\.weight has adapters by target_parameters.*; give target_m"):
        of_a_parameter = peft.get_peft_model(make_model("llama"), adapters)
        fzero.hf.Trainer(of_a_parameter, make_arguments(tmp_path), mesh=VirtualMesh(fsdp=2))
    with pytest.raises(FzeroError, match=r"mlp\.up_proj\.weight: has adapters by target_parameters.*; name linear mod"):
        fzero.lower(of_a_parameter)


def test_adapters_whose_forward_asks_for_values_train_by_hand_as_in_torch() -> None:
    """They leave out no module at a rate of 0, and look for infinite logits."""
    mesh, x = VirtualMesh(fsdp=2), torch.randn(4, 8)
    layers = {"target_modules": ["0", "1"]}
    for config in (
        peft.LoHaConfig(r=2, init_weights=False, **layers),
        peft.LoKrConfig(r=2, init_weights=False, **layers),
        peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, topk=2, **layers),
    ):
        model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config)
        params, apply = fzero.lower(model)
        step = fzero.simulate(fzero.value_and_grad(lambda p, x, apply=apply: apply(p, x).square().mean()), mesh)
        loss, grads = step(fzero.partition(params, mesh), x)
        expected = model(x).square().mean()
        expected.backward()
        torch.testing.assert_close(loss.mean(), expected.detach())
        leaves = [leaf for leaf in tree.leaves(fzero.unpartition(grads)) if leaf is not None]
        wanted = [leaf.grad for leaf in model.parameters() if leaf.grad is not None]
        assert len(wanted) >= 2
        torch.testing.assert_close(leaves, wanted)


def test_what_peft_does_not_merge_and_what_files_cannot_begin_with_is_refused_by_name(tmp_path: Path) -> None:
    mesh = VirtualMesh(fsdp=2)
    biased = peft.get_peft_model(make_model("llama"), LoraConfig(**LORA, lora_bias=True))
    trainer = fzero.hf.Trainer(biased, make_arguments(tmp_path), mesh=mesh)
    with pytest.raises(FzeroError, match=r"q_proj: peft does not merge it: .*base layer has no bias.*; save_model"):
        trainer.merge_and_unload()
    prompts = peft.get_peft_model(make_model("llama"), peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1))
    with pytest.raises(FzeroError, match=r"merge_and_unload: .* adapters of .*ADAPTION_PROMPT, which peft does not"):
        fzero.hf.Trainer(prompts, make_arguments(tmp_path), mesh=mesh).merge_and_unload()
    make_model("llama").save_pretrained(tmp_path)
    for start in ("pissa", "pissa_niter_4"):
        config = LoraConfig(**LORA, init_lora_weights=start)
        with pytest.raises(FzeroError, match=f"init_lora_weights: is '{start}', which changes weights of the base"):
            fzero.hf.from_pretrained(tmp_path, mesh, peft_config=config)


@pytest.mark.parametrize("more", [{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {}])
def test_adapters_of_tied_weights_are_saved_and_read_as_by_peft(more: Any, tmp_path: Path) -> None:
    """Where peft saves a weight by its second name."""

    def make() -> Any:
        config = make_model("llama").config
        config.tie_word_embeddings = True
        targets = ["q_proj"] if more else ["q_proj", "lm_head"]
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        return peft.get_peft_model(model, LoraConfig(**{**LORA, "target_modules": targets}, **more))

    make().save_pretrained(tmp_path / "theirs")
    trainer = fzero.hf.Trainer(make(), make_arguments(tmp_path), mesh=VirtualMesh(fsdp=2))
    trainer.save_model(tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[key]) for key, x in ours.items())
    read = load_adapters(tmp_path / "theirs", make())
    held = dict(make().named_parameters())
    assert read and all(torch.equal(x, held[path]) for path, x in read.items())
