"""The engine on two processes: five public configurations as they are, with both loops, and data of `initialize`."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_models import MESH, ROWS, make_batches, make_model
from processes import refusal, run
from torch.distributed.device_mesh import DeviceMesh

import fzero.deepspeed
from fzero import FzeroError

STEPS = 20
SCHEDULED = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 10}}
CONFIGS: dict[str, dict[str, Any]] = {
    "ZeRO-2 with CPU offload and fp16": {
        "fp16": {
            "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW", "params": {"lr": 3e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
        },
        "scheduler": SCHEDULED,
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
            "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "ZeRO-3 with both offloads": {
        "optimizer": {
            "type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}
        },
        "scheduler": SCHEDULED,
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
            "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": 1e6,
            "stage3_prefetch_bucket_size": 1e6, "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
    },
    'bf16 with "auto"': {
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"
            },
        },
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
    },
    "ZeRO-1 with OneCycle": {
        "train_batch_size": 8, "steps_per_print": 1,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
        },
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 5, "cycle_first_stair_count": 2, "cycle_second_step_size": 5,
                "cycle_second_stair_count": 2, "decay_step_size": 5, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2,
                "decay_lr_rate": 0.1, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0,
            },
        },
    },
    "the tutorial's accumulation of 4": {
        "train_batch_size": 32, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0015}},
        "fp16": {"enabled": True}, "zero_optimization": True,
    },
}  # fmt: skip
ARGS = SimpleNamespace(
    per_device_train_batch_size=4, gradient_accumulation_steps=1, max_grad_norm=1.0, bf16=True, learning_rate=5e-3,
    adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.01, warmup_steps=4, max_steps=20,
)  # fmt: skip


def take_part(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = ROWS // 2
    return batch[0][rank * half : (rank + 1) * half], batch[1][rank * half : (rank + 1) * half]


def train(config: dict[str, Any], mesh: Any, rank: int | None) -> tuple[list[float], list[float], list[float]]:
    """The mean losses of 20 updates by both loops, and the rate and the loss scale behind the last."""
    batches = make_batches(4) * 20
    parts = batches if rank is None else [take_part(batch, rank) for batch in batches]

    def start() -> Any:
        return fzero.deepspeed.initialize(ARGS, make_model(), config=config, mesh=mesh).engine

    engine, by_engine = start(), []
    steps = engine.gradient_accumulation_steps()
    for number in range(STEPS):
        losses = []
        for batch in parts[number * steps : (number + 1) * steps]:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        by_engine.append(torch.stack(losses).mean().item())
    last = [*engine.get_lr(), engine.loss_scale, engine.skipped_steps]
    state, by_function = start().state, []
    for number in range(STEPS):
        state, loss = engine.train_step(state, *parts[number * steps : (number + 1) * steps])
        by_function.append(loss.item())
    return by_engine, by_function, last


def train_outside(mesh: Any, rank: int | None) -> list[float]:
    """The norms of gradients of losses that are computed outside of the model, and of arguments."""
    config = {"train_batch_size": ROWS, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    model = make_model()
    model.forward = model.scores  # type: ignore[method-assign]
    engine, found = fzero.deepspeed.initialize(model=model, config=config, mesh=mesh).engine, []
    for batch in make_batches(3):
        x, y = batch if rank is None else take_part(batch, rank)
        x.requires_grad_()
        engine.backward(torch.nn.functional.cross_entropy(engine(x), y))
        engine.step()
        assert x.grad is not None
        total = x.grad if rank is None else x.grad / mesh.size()
        found += [engine.get_global_grad_norm(), *total[:: ROWS // 2].square().sum(1).tolist()]
    return found


def place_on_disk(rank: int) -> dict[str, Any]:
    return {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ("/tmp", "/var")[rank]}}


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "steps_per_print": ({"steps_per_print": 7}, ""),
    "a rate": (
        {"optimizer": {"type": "Adam", "params": {"lr": 2e-3}}},
        r"configuration optimizer\.params: .*rank 0 has .*'lr', 0\.001.*, rank 1 has .*'lr', 0\.002",
    ),
    "sizes": ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, r".*_per_gpu: .*: 4', .*: 2'"),
    "nvme_path": (
        {"zero_optimization": place_on_disk},
        r"configuration zero_optimization\.offload_optimizer\.nvme_path: .*: '/tmp'.*: '/var'",
    ),
    "a mistake on one rank": (
        {"train_batch_size": 7},
        r"(rank 1: could not .*: FzeroError: )?train_batch_size: is 7, which is no multiple",
    ),
}  # fmt: skip
"""What rank 1 alone has in its configuration, or a function of the rank, and the error on both ranks."""


def disagree(mesh: DeviceMesh) -> dict[str, str]:
    config: dict[str, Any] = {"train_batch_size": ROWS, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    found = {}
    for name, (changed, _) in DIFFERENT.items():
        rank = mesh.get_local_rank()
        called = {key: of_rank(rank) for key, of_rank in changed.items() if callable(of_rank)}
        mine = config | (called or (changed if rank else {}))
        try:
            fzero.deepspeed.initialize(model=make_model(), config=mine, mesh=mesh)
            found[name] = ""
        except FzeroError as error:
            found[name] = str(error)
    return found


def go_on_data(mesh: DeviceMesh) -> list[float]:
    data = [(x, y) for batch in make_batches(4) for x, y in zip(*batch)]
    config = CONFIGS["ZeRO-1 with OneCycle"]
    engine, _, loader, scheduler = fzero.deepspeed.initialize(
        model=make_model(), training_data=data, config=config, mesh=mesh
    )
    rows = {len(y) for _, y in loader}
    return [*rows, *[engine.train_batch().item() for _ in range(6)], *scheduler.get_last_lr()]


def save_in_vain(mesh: DeviceMesh, folder: Path) -> list[str]:
    """The errors of saves whose last file only rank 0 writes, and cannot: there is a folder of that name."""
    config = {"train_batch_size": ROWS, "optimizer": {"type": "Adam"}}
    engine = fzero.deepspeed.initialize(model=make_model(), config=config, mesh=mesh).engine
    (folder / "latest").mkdir(exist_ok=True)
    saves = (lambda: engine.save_checkpoint(folder), lambda: engine.save_16bit_model(folder, "latest"))
    return [refusal(save).message for save in saves]


def train_each(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: train(config, mesh, mesh.get_local_rank()) for name, config in CONFIGS.items()}
    found |= {"outside": train_outside(mesh, mesh.get_local_rank()), "different": disagree(mesh)}
    return found | {"data": go_on_data(mesh), "in vain": save_in_vain(mesh, folder)}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(2, functools.partial(train_each, folder=tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_configuration_trains_alike_in_both_loops(name: str, on_ranks: list[dict[str, Any]]) -> None:
    (engine, function, last), (others, _, others_last) = (each[name] for each in on_ranks)
    assert engine == function == others and last == others_last
    assert engine[-1] < engine[0] and all(map(torch.isfinite, torch.tensor(engine)))


def test_a_loss_outside_gives_virtual_ranks_gradients(on_ranks: list[dict[str, Any]]) -> None:
    expected = torch.tensor(train_outside(MESH, None)).view(3, 3)  # norm, a row of the first rank, one of the second
    for rank in range(2):
        found = torch.tensor(on_ranks[rank]["outside"]).view(3, 2)
        torch.testing.assert_close(found, expected[:, [0, 1 + rank]], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_other_configurations_are_told_at_once(name: str, on_ranks: list[dict[str, Any]]) -> None:
    for each in on_ranks:
        assert re.match(DIFFERENT[name][1] or "$", each["different"][name])


def test_training_data_is_cut_over_ranks(on_ranks: list[dict[str, Any]]) -> None:
    first, second = (each["data"] for each in on_ranks)
    assert first == second and first[0] == 4 and len(first) == 8


def test_a_file_that_the_first_rank_cannot_write_is_an_error_on_both(on_ranks: list[dict[str, Any]]) -> None:
    first, second = (each["in vain"] for each in on_ranks)
    assert first == second and len(first) == 2
    for message in first:
        assert re.match(r".*latest: rank 0 could not write it: .*; mend that, and save again$", message)
