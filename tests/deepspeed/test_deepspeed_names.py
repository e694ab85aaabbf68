"""Names around an engine: those that are here do what DeepSpeed's do, and those that are not say what to do instead."""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import MESH, make_batches, make_engine, make_model, run_loop
from torch import nn

import fzero.deepspeed as deepspeed
from fzero import FzeroError
from fzero.deepspeed import utils
from fzero.deepspeed.absent import render_absent
from fzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from fzero.deepspeed.runtime import lr_schedules
from fzero.deepspeed.utils import zero_to_fp32

CONFIG: dict[str, Any] = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def test_whole_states_are_read_and_set_by_parameter() -> None:
    plain, model = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    engine = make_engine(CONFIG | ADAMW | half | {"zero_optimization": {"stage": 3}}, model=model)
    run_loop(engine, make_batches(2))
    for batch in make_batches(2):
        (plain(*batch) / 2).backward()
    optimizer.step()
    named = dict(engine.named_parameters())
    for name, expected in plain.named_parameters():
        state = optimizer.state[expected]
        for found in (named[name], model.get_parameter(name)):
            value = utils.safe_get_full_fp32_param(found)
            torch.testing.assert_close(value, expected.detach(), rtol=2e-2, atol=2e-3)  # products of float16
        for key in ("exp_avg", "exp_avg_sq"):
            found = utils.safe_get_full_optimizer_state(named[name], key)
            torch.testing.assert_close(found, state[key], rtol=5e-2, atol=1e-4)
        assert utils.safe_get_full_grad(named[name]) is None
    x, y = make_batches(1)[0]
    engine.backward(engine(x, y))
    weight = named["head.weight"]
    gradient = utils.safe_get_full_grad(weight)
    assert gradient is not None and 0 < gradient.abs().max() < 1  # without the loss scale
    utils.safe_set_full_grad(weight, gradient * 0 + 2)
    assert torch.equal(utils.safe_get_full_grad(weight), gradient * 0 + 2)  # type: ignore[arg-type]
    utils.safe_set_full_fp32_param(weight, torch.full((4, 8), 3.0))
    utils.safe_set_full_optimizer_state(weight, torch.full((4, 8), 5.0), "exp_avg_sq")
    assert torch.equal(engine.module_state_dict()["head.weight"], torch.full((4, 8), 3.0))
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), torch.full((4, 8), 5.0))
    with pytest.raises(FzeroError, match=r"head\.weight: momentum: is not kept by the optimizer; it keeps exp_avg, "):
        utils.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(FzeroError, match=r"head\.weight: is \(4, 8\), the value \(3,\)"):
        utils.safe_set_full_fp32_param(weight, torch.ones(3))


def test_parameters_of_no_engine_are_named() -> None:
    model = make_model()
    engine = make_engine(CONFIG | ADAMW, model=model)
    with pytest.raises(FzeroError, match=r"parameter: a Parameter of shape \(8, 8\) is no engine's; give one of"):
        utils.safe_get_full_fp32_param(make_model().blocks[0].weight)
    del engine
    gc.collect()
    with pytest.raises(FzeroError, match=r"is no engine's"):
        utils.safe_get_full_fp32_param(model.blocks[0].weight)


def test_an_engine_goes_on_with_other_sizes_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = make_engine(CONFIG | ADAMW), make_engine(CONFIG | ADAMW | {"gradient_accumulation_steps": 4,
                                                                               "train_batch_size": 32})  # fmt: skip
    engine.set_train_batch_size(32)
    assert engine.get_batch_info() == other.get_batch_info() == (32, 4, 4)
    with engine.no_sync():
        loss = engine(*make_batches(1)[0])
        engine.backward(loss)
        with pytest.raises(FzeroError, match=r"engine\.step: is called within no_sync"):
            engine.step()
        with pytest.raises(FzeroError, match=r"engine\.no_sync: is entered twice"), engine.no_sync():
            pass
    with pytest.raises(FzeroError, match=r"set_train_batch_size: is called between"):
        engine.set_train_batch_size(16)
    with pytest.raises(FzeroError, match=r"optimizer\.zero_grad: is called while gradients wait for an update"):
        engine.optimizer.zero_grad()
    engine.zero_grad()
    assert run_loop(engine, make_batches(4)) == run_loop(other, make_batches(4))
    norms = engine.get_global_grad_norm(), other.get_global_grad_norm()
    assert norms[0] == norms[1]
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (16, 2, 4)
    engine.compile()
    assert engine.is_compiled and engine.settings.compile
    for misuse, said in (
        (lambda: engine.set_train_batch_size(18), r"set_train_batch_size: is 18, and a batch of all ranks has 4"),
        (lambda: engine.set_train_micro_batch_size(0), r"set_train_micro_batch_size: is 0"),
        (lambda: engine.compile(backend="eager"), r"engine\.compile: got backend 'eager'"),
    ):
        with pytest.raises(FzeroError, match=said):
            misuse()


@pytest.mark.parametrize("make", [FusedAdam, DeepSpeedCPUAdam])
def test_optimizers_and_schedulers_of_deepspeed_are_those_of_the_configuration(make: Any) -> None:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-2, "warmup_num_steps": 4}
    by_config = make_engine(CONFIG | ADAMW | {"scheduler": {"type": "WarmupLR", "params": params}})
    model = make_model()
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = lr_schedules.WarmupLR(optimizer, 0.0, warmup_max_lr=2e-2, warmup_num_steps=4)
    engine = make_engine(CONFIG, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert run_loop(engine, make_batches(4)) == run_loop(by_config, make_batches(4))
    assert engine.get_lr() == by_config.get_lr()


def test_misused_constructors_are_named() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for misuse, said in (
        (lambda: FusedAdam(weights, amsgrad=True), r"FusedAdam: amsgrad: is True"),
        (lambda: DeepSpeedCPUAdam(weights, bias_correction=False), r"Adam: bias_correction: is False"),
        (lambda: lr_schedules.WarmupLR(None, 0, 1, 2, "log", 3), r"WarmupLR: got 5 params by position, the first 4"),
        (lambda: lr_schedules.OneCycle(None).step(), r"lr_scheduler\.step: engine\.step\(\) moves the rates"),
        (lambda: deepspeed.checkpointing.configure(object()), r"checkpointing\.configure: mpu_"),
        (lambda: deepspeed.checkpointing.configure(checkpoint_in_cpu=True), r"checkpoint_in_cpu: is True"),
    ):
        with pytest.raises(FzeroError, match=said):
            misuse()


def test_weights_of_a_checkpoint_are_read_in_one_process(tmp_path: Path) -> None:
    engine = make_engine(CONFIG | ADAMW | {"zero_optimization": {"stage": 3}})
    run_loop(engine, make_batches(2))
    engine.save_checkpoint(str(tmp_path))
    expected = engine.module_state_dict()
    for found in (
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)),
        zero_to_fp32.load_state_dict_from_zero_checkpoint(make_model(), str(tmp_path), tag="global_step1").state_dict(),
    ):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path / "out"))
    assert torch.load(tmp_path / "out" / "pytorch_model.bin").keys() == expected.keys()
    with pytest.raises(FzeroError, match=r"lacks \['0\.bias', '0\.weight'\], and has \['blocks\.0\.bias'"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Sequential(nn.Linear(2, 2)), str(tmp_path))
    with pytest.raises(FzeroError, match=r"has no file 'latest'"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))


def test_weights_of_deepspeeds_own_checkpoint_are_read() -> None:
    run = Path(__file__).parents[1] / "formats" / "deepspeed" / "stage3-three-ranks"
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(run))
    assert found["layers.1.weight"].shape == (6, 6) and found["fixed"].shape == (6,)


def test_the_command_writes_what_the_functions_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`python -m fzero.deepspeed.utils.zero_to_fp32 CHECKPOINT OUT`, with DeepSpeed's options."""
    run = Path(__file__).parents[1] / "formats" / "deepspeed" / "stage3-three-ranks"
    expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(run)

    def call(*words: Any) -> int:
        monkeypatch.setattr(sys, "argv", ["zero_to_fp32", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(zero_to_fp32.__file__), run_name="__main__")
        return int(ended.value.code or 0)

    assert call(run, tmp_path / "out", "-d") == 0
    assert f"9 tensors of {run} in {tmp_path / 'out' / 'pytorch_model.bin'}" in capsys.readouterr().out
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    (tmp_path / "file").touch()
    for words, problem in {
        (tmp_path / "nothing", tmp_path / "x"): "nothing: is no folder",
        (run, tmp_path / "file"): "pytorch_model.bin: cannot be written",
        (run, tmp_path / "x", "--max_shard_size", "5GB"): "max_shard_size: is '5GB', which is not supported",
        (run, tmp_path / "x", "--safe_serialization"): "safe_serialization: is True",
        (run, tmp_path / "x", "-t", "nothing"): "nothing: ",
    }.items():
        assert call(*words) == 1 and problem in capsys.readouterr().err
    assert call(run) == 2  # the parser's own
    assert not (tmp_path / "x").exists()


def test_helpers_do_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with caplog.at_level("INFO", "fzero"):
        utils.log_dist("first", ranks=[0])
        utils.log_dist("second", ranks=[3])
    assert "first" in caplog.text and "second" not in caplog.text
    model = make_model()
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == utils.set_z3_leaf_modules(model, ["Linear"])
    assert utils.set_z3_leaf_modules_by_name(model, ["head"]) == [model.head]
    assert utils.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []
    for misuse, problem in {
        lambda: utils.set_z3_leaf_modules(model, [nn.Conv1d]): r"has none of \['Conv1d'\]; give classes or paths",
        lambda: utils.set_z3_leaf_modules_by_name(model, ["tail"]): r"has none of \['tail'\]; give classes or paths",
        lambda: utils.RepeatingLoader(3): "RepeatingLoader: loader is 3; give a DataLoader",  # type: ignore[arg-type]
        lambda: next(utils.RepeatingLoader([])): "RepeatingLoader: the loader gives no batch; give one with batches",
    }.items():
        with pytest.raises(FzeroError, match=problem):
            misuse()
    accelerator = deepspeed.get_accelerator()
    assert torch.device(accelerator.device_name(0)).type == accelerator.kind
    assert deepspeed.comm.get_local_rank() == 0
    assert deepspeed.comm.is_initialized() == torch.distributed.is_initialized()  # another test may have made a group


def test_what_is_computed_again_is_torchs(tmp_path: Path) -> None:
    class Again(type(make_model())):  # type: ignore[misc]
        def scores(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = deepspeed.checkpointing.checkpoint(lambda x, block=block: torch.tanh(block(x)), x)
            return self.head(x)

    torch.manual_seed(0)
    deepspeed.checkpointing.configure(None, CONFIG, partition_activations=True)
    engine = make_engine(CONFIG | ADAMW, model=Again())
    assert run_loop(engine, make_batches(2)) == run_loop(make_engine(CONFIG | ADAMW), make_batches(2))


def test_a_constructor_may_be_decorated() -> None:
    @deepspeed.zero.Init(mesh=MESH)
    def construct() -> nn.Module:
        return make_model()

    engine = make_engine(CONFIG | ADAMW, model=construct())
    deepspeed.zero.register_external_parameter(engine.module, engine.module.head.weight)
    assert run_loop(engine, make_batches(2)) == run_loop(make_engine(CONFIG | ADAMW), make_batches(2))


ABSENT = [name for name in render_absent() if not name.startswith("engine.")]


@pytest.mark.parametrize("module", ["", ".zero", ".utils", ".comm", ".ops.adam", ".checkpointing"])
def test_absent_names_of_modules_say_what_to_do(module: str) -> None:
    found = importlib.import_module(f"fzero.deepspeed{module}")
    for name in ABSENT:
        if not hasattr(torch.distributed, name):
            with pytest.raises(FzeroError, match=rf"fzero\.deepspeed{module}\.{name}: is not here; \w"):
                getattr(found, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'initialise'"):
        getattr(found, "initialise")  # noqa: B009


def test_absent_methods_of_an_engine_say_what_to_do() -> None:
    engine = make_engine(CONFIG | ADAMW)
    for name in (each.removeprefix("engine.") for each in render_absent() if each.startswith("engine.")):
        assert not hasattr(engine, name)
        with pytest.raises(FzeroError, match=rf"engine\.{name}: is not here.*; \w"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=r"engine\.zero_gard: is not here \(the nearest is zero_grad\)"):
        getattr(engine, "zero_gard")  # noqa: B009
    with pytest.raises(AttributeError, match=r"accelerator\.frobnicate: is not here"):
        getattr(deepspeed.get_accelerator(), "frobnicate")  # noqa: B009
