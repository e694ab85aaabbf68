"""`TrainingArguments(deepspeed=...)`: a ds_config.json means what it means in transformers' integration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.optim import deepspeed as schedules

AUTO: dict[str, Any] = {
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
"""The shape of the files of transformers' own documentation."""


def without(*blocks: str, **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in {**AUTO, **changed}.items() if name not in blocks}


def make_ours(folder: Path, config: Any, *, kind: str = "bigram", mesh: Any = None, **changed: Any) -> Any:
    plain = make_arguments(folder, **changed).to_dict()
    arguments = fzero.hf.TrainingArguments(**{**plain, "deepspeed": config})
    mesh = VirtualMesh(fsdp=2) if mesh is None else mesh
    return fzero.hf.Trainer(make_model(kind), arguments, train_dataset=make_dataset(), mesh=mesh)


def train_plain(folder: Path, *, kind: str = "bigram", optimizers: Any = None, **changed: Any) -> Any:
    model = make_model(kind)
    given = {} if optimizers is None else {"optimizers": optimizers(model)}
    trainer = transformers.Trainer(model, make_arguments(folder, **changed), train_dataset=make_dataset(), **given)
    trainer.train()
    return trainer


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(read_logs(got), read_logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def warm_up(model: Any) -> tuple[Any, Any]:
    """AdamW of all parameters in one group, and DeepSpeed's WarmupDecayLR of six updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    rate = schedules.warmup_decay_lr(6, 0.0, 3e-3, 2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: float(rate(torch.tensor(n))) / 3e-3)


def test_a_file_of_auto_trains_as_torch_with_the_values_of_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(AUTO))
    got = make_ours(tmp_path, str(tmp_path / "ds_config.json"), kind="gpt2")
    assert got.stage == 3
    got.train()
    assert_close(got, train_plain(tmp_path, kind="gpt2", optimizers=warm_up))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_optimizer_and_scheduler_those_of_the_arguments_are_there(stage: int, tmp_path: Path) -> None:
    config = without("optimizer", "scheduler", zero_optimization={"stage": stage})
    got = make_ours(tmp_path, config, lr_scheduler_type="cosine", optim="adafactor")
    assert got.stage == stage
    got.train()
    assert_close(got, train_plain(tmp_path, lr_scheduler_type="cosine", optim="adafactor"))


def test_state_lies_on_the_host_where_the_file_says_so(tmp_path: Path) -> None:
    places = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
    config = without("scheduler", "optimizer", zero_optimization={"stage": 3, **places})
    got = make_ours(tmp_path, config)
    got.train()
    assert_close(got, train_plain(tmp_path))
    moments = [x for x in fzero.tree.leaves(got.sharded.opt_state) if x.ndim]
    for leaf in (*fzero.tree.leaves(got.sharded.params), *moments):
        assert leaf.form.place == fzero.host()


def test_a_checkpoint_goes_on_with_the_scheduler_of_the_file(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = make_ours(tmp_path, AUTO, **saving)
    first.train()
    again = make_ours(tmp_path, AUTO, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert read_logs(again)[3:] == read_logs(first)[3:]


def test_a_model_of_files_moves_to_the_host(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "files")
    places = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = without("scheduler", "optimizer", zero_optimization={"stage": 3, **places})
    arguments = make_arguments(tmp_path)
    arguments.deepspeed = config
    pretrained = fzero.hf.from_pretrained(tmp_path / "files", VirtualMesh(fsdp=2))
    got = fzero.hf.Trainer(pretrained, arguments, train_dataset=make_dataset())
    got.train()
    assert_close(got, train_plain(tmp_path, kind="llama"))
    assert {leaf.form.place for leaf in fzero.tree.leaves(got.sharded.params)} == {fzero.host()}


@pytest.mark.parametrize("narrow", ["bf16", "fp16"])
def test_narrow_compute_has_wide_weights_and_is_near_to_wide_compute(narrow: str, tmp_path: Path) -> None:
    got = make_ours(tmp_path, AUTO, kind="llama", **{narrow: True})
    got.train()
    assert {x.dtype for x in fzero.tree.leaves(got.sharded.params)} == {torch.float32}
    assert got.generate(torch.ones(2, 3, dtype=torch.long), max_new_tokens=2, use_cache=False).shape == (2, 5)
    ours, theirs = read_logs(got), read_logs(train_plain(tmp_path, kind="llama", optimizers=warm_up))
    losses = [[each["loss"] for each in log] for log in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0] != losses[1]


DIFFER: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 8}, r"ds gradient_accumulation_steps=8 vs hf .*_steps=2"),
    "batch": ({"train_batch_size": 99}, r"ds train_batch_size=99 vs hf train_batch_size \(calculated\)=8"),
    "clipping": ({"gradient_clipping": 0.5}, r"ds gradient_clipping=0\.5 vs hf max_grad_norm=1\.0"),
    "precision": ({"bf16": {"enabled": True}}, r"ds bf16\.enabled=True vs hf bf16\|bf16_full_eval=False"),
    "rate": (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}, r"ds optimizer\.params\.lr=0\.5 vs hf learning_rate",
    ),
    "monitor": ({"csv_monitor": {"enabled": True}}, r"csv_monitor\.enabled: is true.*report_to"),
    "clock": ({"wall_clock_breakdown": True}, r"wall_clock_breakdown: is true.*train_runtime"),
    "last batch": ({"dataloader_drop_last": True}, r"dataloader_drop_last: is true.*dataloader_drop_last=True"),
    "sums": ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op: is \"sum\""),
    "a key": ({"zero_optimisation": {"stage": 3}}, r"zero_optimisation.*the nearest one is the block zero_optim"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFER)
def test_what_contradicts_the_arguments_is_named(case: str, tmp_path: Path) -> None:
    changed, message = DIFFER[case]
    with pytest.raises(FzeroError, match=message):
        make_ours(tmp_path, without(**changed))


def test_all_contradictions_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"ds gradient_accumulation_steps=8 .*; ds gradient_clipping=0\.5 "):
        make_ours(tmp_path, without(gradient_accumulation_steps=8, gradient_clipping=0.5))


def test_a_number_of_updates_that_differs_is_named_by_train(tmp_path: Path) -> None:
    params = {"total_num_steps": 100, "warmup_num_steps": 7}
    trainer = make_ours(tmp_path, without(scheduler={"type": "WarmupDecayLR", "params": params}))
    message = (
        r"total_num_steps=100 vs hf num_training_steps \(calculated\)=6; .*warmup_num_steps=7 vs hf warmup_steps=2"
    )
    with pytest.raises(FzeroError, match=message):
        trainer.train()


def test_one_stage_and_one_wrapper(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    arguments.deepspeed = AUTO  # an argument may be set behind transformers' own constructor
    with pytest.raises(FzeroError, match=r"zero_optimization\.stage: says stage 3, and stage= is 2"):
        fzero.hf.Trainer(make_model(), arguments, stage=2)
    arguments.fsdp = True
    with pytest.raises(FzeroError, match=r"deepspeed: is given, and fsdp is given"):
        fzero.hf.Trainer(make_model(), arguments)


def test_a_scheduler_that_moves_momenta_is_refused_by_name(tmp_path: Path) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 3}}
    trainer = make_ours(tmp_path, without(scheduler=cycle))
    with pytest.raises(FzeroError, match=r"OneCycle moves .*cycle_momentum"):
        trainer.train()


@pytest.mark.parametrize(
    ("key", "mesh", "gathers"),
    [
        ("mics_shard_size", VirtualMesh(replica=2, fsdp=2), {"fsdp"}),
        ("zero_hpz_partition_size", VirtualMesh(node=2, local=2), {"node+local", "local"}),
    ],
)
def test_groups_of_ranks_are_a_mesh(key: str, mesh: VirtualMesh, gathers: set[str], tmp_path: Path) -> None:
    config = without("optimizer", "scheduler", zero_optimization={"stage": 3, key: 2})
    got = make_ours(tmp_path, config, kind="gpt2", mesh=mesh)  # whose backward pass gathers again
    got.train()
    assert_close(got, train_plain(tmp_path, kind="gpt2"))
    program = got._begin._pipeline._cache[0].finished
    assert {x.axis for x in program.comm() if x.op == "all_gather"} == gathers
    assert got.evaluate(make_dataset())["eval_loss"] < read_logs(got)[0]["loss"]
    with pytest.raises(FzeroError, match=rf"{key}: is 2, and mesh= is .*fsdp=4"):
        make_ours(tmp_path, config, mesh=VirtualMesh(fsdp=4))


@pytest.mark.parametrize("cls", [fzero.hf.TrainingArguments, fzero.hf.Seq2SeqTrainingArguments])
def test_arguments_come_from_a_command_line(cls: Any, tmp_path: Path) -> None:
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--deepspeed", "ds_config.json", "--learning_rate", "0.5"]
    (arguments,) = transformers.HfArgumentParser(cls).parse_args_into_dataclasses(given)
    assert (arguments.deepspeed, arguments.learning_rate) == ("ds_config.json", 0.5)
    assert dataclasses.replace(arguments, seed=7).deepspeed == "ds_config.json"
    assert isinstance(arguments, transformers.TrainingArguments) and arguments.deepspeed_plugin is None


def test_a_model_that_deepspeed_cut_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.transformer.wte.weight.ds_id = 0
    with pytest.raises(
        FzeroError, match=r"transformer\.wte\.weight was cut by deepspeed\.zero\.Init.*fzero\.hf\.Training"
    ):
        fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=VirtualMesh(fsdp=2))
