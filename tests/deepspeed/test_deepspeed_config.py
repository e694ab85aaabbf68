"""Configurations of DeepSpeed: every key has a meaning, and what contradicts itself is named with its way out."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_models import MESH, make_model

from fzero import FzeroError
from fzero.deepspeed.keys import KEYS, Key
from fzero.deepspeed.plan import OF_A_RANK, make_plan
from fzero.deepspeed.reading import read_config
from fzero.deepspeed.settings import Settings, find_batch_sizes, settle
from fzero.ranks.live import find_ranks

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}


def settings(config: dict[str, Any], world: int = 2, **how: Any) -> Settings:
    return settle(read_config(BATCH | config), world, **how)


def test_every_key_has_a_meaning_and_a_note() -> None:
    assert {key.meaning for key in KEYS.values()} == {"honoured", "mapped", "no meaning", "refused"}
    assert all(key.note for key in KEYS.values()) and all(path == key.path for path, key in KEYS.items())


def test_every_key_may_have_its_default(subtests: pytest.Subtests) -> None:
    for path in [path for path, key in KEYS.items() if not path.endswith("*") and not key.alias_of]:
        with subtests.test(path):
            block: dict[str, Any] = {}
            at = block
            *heads, last = path.split(".")
            for head in heads:
                at = at.setdefault(head, {})
            at[last] = KEYS[path].default
            assert path in read_config(block) or "cpu_offload" in path


SIZES = [
    ((16, 2, 4), (16, 2, 4)), ((16, 2, None), (16, 2, 4)), ((16, None, 4), (16, 2, 4)), ((None, 2, 4), (16, 2, 4)),
    ((16, None, None), (16, 8, 1)), ((None, 2, None), (4, 2, 1)), ((16, "auto", "auto"), (16, 8, 1)),
]  # fmt: skip
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(("given", "expected"), SIZES)
def test_two_batch_sizes_give_the_third(given: Any, expected: Any) -> None:
    assert find_batch_sizes({name: size for name, size in zip(NAMES, given) if size}, 2) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((16, 2, 3), r"train_batch_size: is 16, and 2 a rank x 3 steps x 2 ranks are 12; leave one"),
        ((15, 2, None), r"train_batch_size: is 15, which is no multiple of 2 a rank x 2 ranks"),
        ((None, None, 4), r"train_batch_size: and train_micro_batch_size_per_gpu are missing; give one"),
        ((1, None, None), r"train_batch_size: is 1, which is no multiple of 1 steps x 2 ranks"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_refused(given: Any, said: str) -> None:
    with pytest.raises(FzeroError, match=said):
        find_batch_sizes({name: size for name, size in zip(NAMES, given) if size}, 2)


BAD = [
    ({"train_batch": 3}, r"train_batch: is no key of DeepSpeed's configuration; the nearest one is train_batch_size"),
    ({"zero_optimization": {"stge": 2}}, r"zero_optimization\.stge: .*the nearest one is zero_optimization\.stage"),
    ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: is 4; stages are 0, 1, 2 and 3"),
    ({"zero_optimization": 3}, r"zero_optimization: is 3, a int; give a block of keys"),
    ({"train_batch_size": "16"}, r"train_batch_size: is '16', a str; give a whole number from 0 on"),
    ({"steps_per_print": True}, r"steps_per_print: is True, a bool; give a whole number"),
    ({"fp16": {"enabled": 1}}, r"fp16\.enabled: is 1, a int; give true or false"),
    ({"communication_data_type": "fp8"}, r'communication_data_type: is \'fp8\', a str; give "fp16" or "bf16"'),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"fp16\.enabled: is true, and bf16\.enabled is true"),
    ({"fp16": {"enabled": True, "initial_scale_power": 999}}, r"fp16\.initial_scale_power: is 999; give at most 127"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, r"fp16\.min_loss_scale: is 0; give at least 1"),
    ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, r"bfloat16\.enabled: is False, and another name"),
    ({"gradient_clipping": "auto"}, r'gradient_clipping: is "auto", and nothing tells the value; .*max_grad_norm'),
    ({"elasticity": {"enabled": True}}, r"elasticity: is .*not supported; DeepSpeed 0\.19 removed it too"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, r"zero_hpz_partition_size: is 2 at stage 0, .*give zero"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        r'offload_param\.nvme_path: is missing, and the device is "nvme"; give a folder',
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        r'offload_param\.device: is "cpu" at stage 2, .*give zero_optimization\.stage 3',
    ),
    ({"optimizer": {"params": {"lr": 1}}}, r"optimizer\.type: is missing, and optimizer\.params is given"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said"), BAD)
def test_what_contradicts_itself_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FzeroError, match=said):
        settings(config)


def test_blocks_that_are_off_pass() -> None:
    off = {name: {"enabled": False} for name in ("wandb", "tensorboard", "amp", "elasticity", "flops_profiler")}
    assert settings(off | {"zero_optimization": {"zero_hpz_partition_size": 1}}).stage == 0


def test_former_names_mean_the_present_ones() -> None:
    zero = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    assert str(settings({"zero_optimization": zero}).optimizer_at) == "fzero.host(pin=False)"
    assert settings({"bfloat16": {"enabled": True}}).compute is torch.bfloat16
    assert settings({"zero_optimization": True}).stage == 1


def test_the_version_decides_what_a_missing_clipping_means(caplog: pytest.LogCaptureFixture) -> None:
    given = read_config({"train_batch_size": 2})
    assert settle(given, 2).clipping == 1.0 and settle(given, 2, version="0.18.2").clipping == 0.0
    assert "gradient_clipping is missing, which is 0.0 in DeepSpeed 0.18.2" in caplog.text
    with pytest.raises(FzeroError, match=r"version: is 'new'"):
        settle(given, 2, version="new")


def test_the_table_of_given_keys_is_logged_at_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fzero")
    settings({"prescale_gradients": True}, rank=1)
    assert not caplog.text
    settings({"prescale_gradients": True})
    assert "prescale_gradients = True: no meaning, gradients are means in any case" in caplog.text


def test_auto_is_what_training_arguments_say() -> None:
    config = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    }  # fmt: skip
    args = SimpleNamespace(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, max_grad_norm=0.5, bf16=True,
        learning_rate=2e-4, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-6,
    )  # fmt: skip
    found = settings(config, args=args)
    assert found[:3] == (24, 4, 3) and found.clipping == 0.5 and found.compute is torch.bfloat16
    assert found.optimizer == ("AdamW", {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-6})
    assert found.scheduler == ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-4})


def test_a_configuration_is_a_dict_a_file_or_base64(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8})
    (tmp_path / "ds.json").write_text(text)
    expected = {"train_batch_size": 8}
    assert read_config(tmp_path / "ds.json") == read_config({"train_batch_size": 8}) == expected
    assert read_config(base64.urlsafe_b64encode(text.encode()).decode()) == expected
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8,}')
    with pytest.raises(FzeroError, match=r"bad\.json: line 1, column \d+: .*; write JSON"):
        read_config(str(tmp_path / "bad.json"))
    (tmp_path / "cut.json").write_text('{"train_batch_size": 8, "optim')
    with pytest.raises(FzeroError, match=r"cut\.json: line 1, column 25: Unterminated string"):
        read_config(tmp_path / "cut.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FzeroError, match=r"binary\.json: is no text: .*; give the path of a JSON file"):
        read_config(tmp_path / "binary.json")
    (tmp_path / "twice.json").write_text('{"train_batch_size": 8, "train_batch_size": 4}')
    with pytest.raises(FzeroError, match=r"config: train_batch_size: stands twice"):
        read_config(str(tmp_path / "twice.json"))
    with pytest.raises(FzeroError, match=r"config no\.json: is neither a file nor"):
        read_config("no.json")
    with pytest.raises(FzeroError, match=r"config: is a int; give a dict"):
        read_config(3)


CONTEXT: dict[str, dict[str, Any]] = {
    "fp16.": {"fp16": {"enabled": True}},
    "bf16.": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "bfloat16.": {"bfloat16": {"enabled": True}},
    "torch_autocast.": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "optimizer.": {"optimizer": {"type": "Adam"}},
    "scheduler.": {"scheduler": {"type": "OneCycle"}},
    "zero_optimization.offload_optimizer.": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "zero_optimization.offload_param.": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    "zero_optimization.offload_optimizer.nvme_path": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "zero_optimization.offload_param.nvme_path": {"zero_optimization": {"offload_param": {"device": "nvme"}}},
    "zero_optimization.mics_hierarchical": {"zero_optimization": {"mics_shard_size": 4}},
    "zero_optimization.cpu_offload_use": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
} | {
    f"{name}.": {name: {"enabled": True}} for name in ("wandb", "comet", "tensorboard", "csv_monitor", "flops_profiler")
}
"""Beginning of a path -> what else a configuration needs, for the keys below to matter."""
VALUES = {"int": 7, "float": 0.5, "str": "text", "dict": {"a": 1}}


def other_value(key: Key) -> Any:
    """A value that is not the one without the key."""
    if key.path == "zero_optimization.stage":
        return 2
    if key.type == "bool":
        return not (key.default or "pin_memory" in key.path)
    return VALUES[key.type] if key.type in VALUES else key.type.split("|")[-1]


def put(block: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A block of keys in which the key at a path has a value."""
    head, _, rest = path.partition(".")
    return {**block, head: put(block.get(head, {}), rest, value) if rest else value}


def describe(config: dict[str, Any]) -> str:
    """The settings of a configuration, or the error that names a key."""
    try:
        found = settings(config)
    except FzeroError as error:
        return str(error)
    cells = [cell.cell_contents for each in found.scaler or () for cell in getattr(each, "__closure__", None) or ()]
    numbers = [value for value in cells if isinstance(value, (int, float))]
    return repr((found._replace(scaler=None), numbers))


def test_keys_with_a_meaning_change_the_settings(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or are refused by name, with a value that makes no sense beside the others. So no key is dropped on the way."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for path, key in KEYS.items():
        if key.meaning in ("honoured", "mapped"):
            with subtests.test(path):
                check_meaning(path.removesuffix(".*"), key)


def check_meaning(path: str, key: Any) -> None:
    block: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for prefix, needed in CONTEXT.items():
        for name, value in needed.items() if path.startswith(prefix) else ():
            block[name] = {**block.get(name, {}), **value}
    here, there = put(block, path, other_value(key)), put(block, path, key.default)
    assert describe(here) != describe(there)
    is_told = list_lines(here) != list_lines(there)
    assert is_told or any(part in path for part in OF_A_RANK)  # a rank with another value says so


def list_lines(config: dict[str, Any]) -> list[str]:
    """What ranks compare, or the error that names a key."""
    try:
        given = BATCH | {"optimizer": {"type": "Adam"}} | config
        return make_plan(
            None, {"config": given}, make_model(), None, None, None, on=find_ranks(MESH), version="0"
        ).lines
    except FzeroError as error:
        return [str(error)]
