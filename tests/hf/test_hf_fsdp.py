"""`fsdp`, `fsdp_config` and `parallelism_config`: mapped to a stage, a place and a mesh, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import transformers
from accelerate import ParallelismConfig
from hf_models import make_arguments, make_dataset, make_model, read_logs

import fzero.hf
from fzero import FzeroError, VirtualMesh

SHORT = {"max_steps": 3, "gradient_accumulation_steps": 1}


def make(folder: Path, kind: str = "bigram", mesh: Any = None, stage: int | None = None, **changed: Any) -> Any:
    arguments = make_arguments(folder, **{**SHORT, **changed})
    mesh = VirtualMesh(fsdp=2) if mesh is None else mesh
    return fzero.hf.Trainer(make_model(kind), arguments, train_dataset=make_dataset(), mesh=mesh, stage=stage)


def assert_trains_as_plain(got: Any, folder: Path, kind: str = "bigram") -> None:
    """transformers trains with fsdp on several processes alone, with the numbers of a run without."""
    plain = transformers.Trainer(make_model(kind), make_arguments(folder, **SHORT), train_dataset=make_dataset())
    plain.train()
    got.train()
    for ours, theirs in zip(read_logs(got), read_logs(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


MEANT: dict[str, tuple[dict[str, Any], int]] = {
    "true": ({"fsdp": True}, 3),
    "words": ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "GPT2Block"}}, 3),
    "kept behind the forward pass": ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": "false"}}, 2),
    "version 1": (
        {"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": "SHARD_GRAD_OP", "use_orig_params": 1}},
        2,
    ),
    "whole": ({"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": "no_shard"}}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_a_stage_is_meant(case: str, tmp_path: Path) -> None:
    changed, stage = MEANT[case]
    kind = "gpt2" if case == "words" else "bigram"  # which name a class of GPT-2
    got = make(tmp_path, kind, **changed)
    assert got.stage == stage and got.args.fsdp
    assert_trains_as_plain(got, tmp_path, kind)


def test_offload_is_the_host(tmp_path: Path) -> None:
    got = make(tmp_path, fsdp=True, fsdp_config={"cpu_offload": True})
    assert_trains_as_plain(got, tmp_path)
    moments = [x for x in fzero.tree.leaves(got.sharded.opt_state) if x.ndim]
    assert {x.form.place for x in (*fzero.tree.leaves(got.sharded.params), *moments)} == {fzero.host()}


def test_activation_checkpointing_is_that_of_the_model(tmp_path: Path) -> None:
    got = make(tmp_path, "llama", fsdp=True, fsdp_config={"activation_checkpointing": True})
    assert got.model.is_gradient_checkpointing
    assert_trains_as_plain(got, tmp_path, "llama")


def test_hybrid_needs_replicas(tmp_path: Path) -> None:
    config = {"version": 1, "reshard_after_forward": "hybrid_shard"}
    got = make(tmp_path, fsdp=True, fsdp_config=config, mesh=VirtualMesh(replica=2, fsdp=2))
    assert got.stage == 3
    assert_trains_as_plain(got, tmp_path)
    with pytest.raises(FzeroError, match=r"reshard_after_forward: is hybrid, and mesh= is .*fsdp=4.* no replicas"):
        make(tmp_path, fsdp=True, fsdp_config=config, mesh=VirtualMesh(fsdp=4))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key": ({"reshard_after_foward": True}, r"reshard_after_foward: is no key.* reshard_after_forward"),
    "a value": ({"version": 2, "reshard_after_forward": "sometimes"}, r"reshard_after_forward: "),
    "xla": ({"xla_fsdp_v2": True}, r"xla_fsdp_v2: is True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_here_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    arguments = make_arguments(tmp_path, **SHORT)
    arguments.fsdp, arguments.fsdp_config = True, config  # transformers refuses some of them itself
    with pytest.raises(FzeroError, match=message):
        fzero.hf.Trainer(make_model(), arguments, mesh=VirtualMesh(fsdp=2))


def test_contradictions_are_named(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"fsdp_config: says stage 3, and stage= is 2"):
        make(tmp_path, fsdp=True, stage=2)
    with pytest.raises(FzeroError, match=r"activation_checkpointing: is true, and TrainingArguments"):
        make(tmp_path, fsdp=True, fsdp_config={"activation_checkpointing": True}, activation_checkpointing=True)


def test_a_parallelism_config_is_a_mesh(tmp_path: Path) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    got = make(tmp_path, parallelism_config=config, mesh=VirtualMesh(replica=2, fsdp=2))
    assert_trains_as_plain(got, tmp_path)
    with pytest.raises(FzeroError, match=r"parallelism_config: asks for the axes .*'replica': 2, 'fsdp': 2.*fsdp=4"):
        make(tmp_path, parallelism_config=config, mesh=VirtualMesh(fsdp=4))
    with pytest.raises(FzeroError, match=r"parallelism_config: has 2 replicas of 2 ranks, and there are 2 ranks"):
        make(tmp_path, parallelism_config=config)
    with pytest.raises(FzeroError, match=r"parallelism_config: tp_size: is 2, which is not supported"):
        make(tmp_path, parallelism_config=ParallelismConfig(tp_size=2))
