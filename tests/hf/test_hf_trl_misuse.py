"""TRL's trainers: what is refused by name, what may be looked at in a loss, files that plain libraries read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")
pytest.importorskip("trl", reason="TRL is not installed: pip install fzero[trl]")

import peft
import torch
import transformers
import trl
from hf_trl import assert_equal_logs, make_language_model, make_trainer, read_all_logs
from test_docs import ROOT

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.hf.trl_options import BEFORE, LEAST, NAMES, check_options, check_version, list_fields
from fzero.hf.trl_options import REFUSED as FIELDS

FEW: dict[str, Any] = {"max_steps": 4, "gradient_checkpointing": False}


def make_ours(folder: Path, kind: str = "SFT", **named: Any) -> Any:
    cls = getattr(fzero.hf, f"{'SFT' if kind == 'text' else kind}Trainer")
    return make_trainer(cls, folder, kind, **{"mesh": VirtualMesh(fsdp=2), **named})


def test_releases_of_trl_that_do_not_work_are_refused_by_name() -> None:
    for version in ("0.29.1", "1.15.0", "1.17.0", "2.0.0"):
        with pytest.raises(FzeroError, match=rf"trl: is {version}, and fzero.hf works with 1.16 to before 1.17"):
            check_version(version)
    for version in ("1.16.0", "1.16.3", trl.__version__):
        check_version(version)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"trl>={'.'.join(map(str, LEAST))},<{'.'.join(map(str, BEFORE))}" in declared["trl"]


def test_axes_of_ranks_that_share_a_model_are_refused_by_name(tmp_path: Path) -> None:
    for name, given in (("tp", "tp"), ("capacity", None)):
        with pytest.raises(FzeroError, match=f"{name}: is given, and SFTTrainer calls the model outside of programs"):
            make_ours(tmp_path, **{name: given})


def test_names_of_fzero_hf_are_there_and_no_other() -> None:
    for name in NAMES:
        assert issubclass(getattr(fzero.hf, name), getattr(trl, name))
    with pytest.raises(AttributeError, match="no attribute 'ORPOTrainer'; of TRL's trainers there are SFTTrainer"):
        fzero.hf.ORPOTrainer  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'generate'$"):
        fzero.hf.generate  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_trl_is_taken_by_accident(name: str) -> None:
    """What our classes define, and what TRL's class defines or sets, beside names of transformers and Python."""
    cls, theirs = getattr(fzero.hf, name), getattr(trl, name)
    ours = {each for base in cls.__mro__ if base.__module__.startswith("fzero.") for each in vars(base)}
    source = Path(__import__(theirs.__module__, fromlist=[""]).__file__).read_text()
    used = {*vars(theirs), *re.findall(r"self\.(\w+)", source)} - set(dir(transformers.Trainer))
    assert ours & used - set(dir(object)) <= {"ref_model", "_precompute_ref_logps", "model_wrapped", "__module__"}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    r"SFTConfig: activation_offloading: is True.*gradient_checkpointing=True": (
        "SFT", {"activation_offloading": True},
    ),
    r"SFTConfig: packing: joins the rows of a batch into one, which 2 virtual ranks.*wrapped": (
        "text", {"packing": True, "max_length": 40},
    ),
    r"SFTConfig: padding_free: joins the rows": ("text", {"padding_free": True, "max_length": None}),
    r"GRPOConfig: use_transformers_continuous_batching: is True.*fzero\.hf\.Generator": (
        "GRPO", {"use_transformers_continuous_batching": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_are_not_here_name_themselves(message: str, tmp_path: Path) -> None:
    kind, changed = REFUSED[message]
    with pytest.raises(FzeroError, match=message):
        make_ours(tmp_path / "ours", kind, changed=changed)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_not_here_names_itself(field: str, tmp_path: Path) -> None:
    model = make_language_model(tmp_path / "ours")
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8)
    check_options(args, model, 1)
    setattr(args, field, "given")
    with pytest.raises(FzeroError, match=f"GRPOConfig: {field}: is 'given', which is not supported"):
        check_options(args, model, 1)


def test_options_that_a_model_or_a_missing_package_rules_out_name_themselves(tmp_path: Path) -> None:
    model = make_language_model(tmp_path / "ours")
    args = trl.SFTConfig(str(tmp_path), packing=True, use_cpu=True, bf16=False)
    check_options(args, model, 1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(FzeroError, match=r'packing: joins rows for kernels of .flash_attention_2.*"sdpa"'):
        check_options(args, model, 1)
    model.config._attn_implementation, model.config.layer_types = "sdpa", ["full_attention", "conv"]
    with pytest.raises(FzeroError, match=r"packing: joins rows, and LlamaForCausalLM has layers with a state"):
        check_options(args, model, 1)
    model.config.layer_types, model.config.output_router_logits = None, False
    model.config.router_aux_loss_coef = 0.01
    with pytest.raises(FzeroError, match=r"packing: joins rows without a mask.*weighs 0.01.*router_aux_loss_coef=0"):
        check_options(args, model, 1)
    args.router_aux_loss_coef = 0.0
    check_options(args, model, 1)
    vllm = trl.GRPOConfig(str(tmp_path), use_vllm=True, use_cpu=True, bf16=False)
    with pytest.raises(FzeroError, match=r"GRPOConfig: use_vllm: is True"):
        check_options(vllm, model, 1)


def test_ranks_compare_the_fields_of_a_configuration_of_trl(tmp_path: Path) -> None:
    lines = list(list_fields(trl.SFTConfig(str(tmp_path), max_length=7, use_cpu=True, bf16=False)))
    assert "configuration SFTConfig.max_length: 7" in lines
    assert not any("learning_rate" in line for line in lines)


def test_a_model_of_from_pretrained_trains_and_takes_no_peft_config(tmp_path: Path) -> None:
    expected = make_trainer(trl.SFTTrainer, tmp_path / "theirs", "SFT", changed=FEW)
    expected.train()
    pretrained = fzero.hf.from_pretrained(tmp_path / "LlamaForCausalLM", VirtualMesh(fsdp=2))
    named = {"train_dataset": expected.train_dataset, "processing_class": expected.processing_class}
    got = fzero.hf.SFTTrainer(pretrained, expected.args, **named)
    got.train()
    assert_equal_logs(read_all_logs(got), read_all_logs(expected))
    with pytest.raises(FzeroError, match="peft_config: needs a whole model"):
        fzero.hf.SFTTrainer(pretrained, expected.args, peft_config=peft.LoraConfig(), **named)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_training_of_trl_goes_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    changed = {**FEW, "save_strategy": "steps", "save_steps": 2}
    whole = make_ours(tmp_path / "whole", kind, lora="new", changed=changed)
    whole.train()
    resumed = make_ours(tmp_path / "resumed", kind, lora="new", changed=changed, mesh=VirtualMesh(fsdp=1), stage=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    ours, theirs = ([x for x in read_all_logs(each) if "loss" in x] for each in (resumed, whole))
    assert len(ours) == 4
    for each in (*ours, *theirs):
        del each["num_tokens"]  # which TRL counts anew in each run
    assert_equal_logs(ours[2:], theirs[2:])


def test_plain_libraries_read_what_was_saved(tmp_path: Path) -> None:
    tokens = torch.arange(3, 11)[None]
    trained = make_ours(tmp_path / "full", "SFT", changed=FEW)
    trained.train()
    trained.save_model(tmp_path / "last")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    held = fzero.unpartition(trained.sharded.params)
    for path, value in zip(fzero.tree.paths(held), fzero.tree.leaves(held)):
        assert torch.equal(read.get_parameter(path), value), path
    adapted = make_ours(tmp_path / "adapted", "DPO", lora="new", changed=FEW)
    adapted.train()
    adapted.save_model(tmp_path / "adapters")
    base = make_language_model(tmp_path / "adapted")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad(), adapted._bind() as model:
        got = model(input_ids=tokens.repeat(2, 1), attention_mask=torch.ones(2, 8, dtype=torch.long)).logits
        assert torch.allclose(got[:1], loaded(input_ids=tokens).logits, atol=1e-5)
        assert not torch.allclose(
            got[:1], make_language_model(tmp_path / "adapted")(input_ids=tokens).logits, atol=1e-5
        )


def count_tokens(evaluation: Any) -> dict[str, float]:
    is_counted = evaluation.label_ids != -100
    return {"tokens": float(is_counted.sum()), "squares": float((evaluation.predictions[is_counted] ** 2).mean())}


def test_metrics_of_logits_and_a_loss_function_of_the_user_are_those_of_trl(tmp_path: Path) -> None:
    def half(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return found / 2 if found.item() > 0 else found  # which looks at a value

    named: dict[str, Any] = {"changed": FEW, "compute_metrics": count_tokens, "compute_loss_func": half}
    expected = make_trainer(trl.SFTTrainer, tmp_path / "theirs", "SFT", **named)
    got = make_ours(tmp_path / "ours", "SFT", **named)
    for each in (expected, got):
        each.train()
        assert each.evaluate()["eval_tokens"] > 0
    assert_equal_logs(read_all_logs(got), read_all_logs(expected))


class Late(fzero.hf.SFTTrainer):
    """A loss that is computed from the call of the model in the update before."""

    before: Any = None

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        before, self.before = self.before, super().compute_loss(model, inputs, **named)
        return super().compute_loss(model, inputs, **named) if before is None else before


def test_a_loss_of_parameters_that_have_changed_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(Late, tmp_path / "ours", "SFT", mesh=VirtualMesh(fsdp=2), changed=FEW)
    with pytest.raises(FzeroError, match="the parameters have changed since the call of the model"):
        trainer.train()
