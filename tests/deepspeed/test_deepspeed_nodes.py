"""Groups and nodes of ranks that a configuration names: MiCS, and the second copy of hpZ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_models import make_batches, make_engine, make_model, run_loop
from processes import run
from torch.distributed.device_mesh import DeviceMesh

import fzero.deepspeed
from fzero import FzeroError, VirtualMesh
from fzero.base.mesh import mesh_shape
from fzero.deepspeed.initialize import choose_mesh
from fzero.deepspeed.reading import read_config
from fzero.deepspeed.settings import find_spread
from fzero.training.meshes import EVENLY, StateSpread, split_world

PLAIN = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # whose steps show the size of a gradient


def spread_of(stage: int = 3, **keys: Any) -> StateSpread:
    return find_spread(read_config({"zero_optimization": {"stage": stage, **keys}}))


def test_groups_of_mics_are_a_mesh_of_two_axes() -> None:
    assert split_world(8, EVENLY) == {"fsdp": 8} and split_world(8, StateSpread(2)) == {"replica": 4, "fsdp": 2}
    assert split_world(8, StateSpread(None, 2)) == {"node": 4, "local": 2}
    assert split_world(8, StateSpread(4, 2)) == {"replica": 2, "node": 2, "local": 2}
    with pytest.raises(FzeroError, match="mesh: 8 ranks are no nodes of 3; give a number of ranks that divides 8"):
        split_world(8, StateSpread(None, 3))
    with pytest.raises(FzeroError, match=r"mesh: 8 ranks are no groups of 3; give a number of ranks that divides 8"):
        split_world(8, StateSpread(3))
    mesh = VirtualMesh(replica=2, fsdp=4)
    assert choose_mesh(mesh, StateSpread(4), 0, 0, None) is mesh is choose_mesh(mesh, EVENLY, 0, 0, None)
    with pytest.raises(FzeroError, match=r"mics_shard_size: is 2, and mesh= is VirtualMesh\(replica=2, fsdp=4\); give"):
        choose_mesh(mesh, StateSpread(2), 0, 0, None)
    with pytest.raises(FzeroError, match=r"zero_hpz_partition_size: is 2, and mesh= is VirtualMesh\(replica=2, "):
        choose_mesh(mesh, StateSpread(None, 2), 0, 0, None)
    assert spread_of(mics_shard_size=-1) == EVENLY
    with pytest.raises(FzeroError, match=r"mics_shard_size: is 2 at stage 2, .*; give zero_optimization\.stage 3"):
        spread_of(stage=2, mics_shard_size=2)
    with pytest.raises(FzeroError, match=r"zero_hpz_partition_size: is 2 at stage 2, .*; give zero_optim"):
        spread_of(stage=2, zero_hpz_partition_size=2)


def test_nodes_are_those_of_the_key_or_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy in each node of so many ranks; groups that gather in two hops where they have several hosts."""
    assert (
        spread_of(zero_hpz_partition_size=4) == StateSpread(None, 4) and spread_of(zero_hpz_partition_size=1) == EVENLY
    )
    hops = {"mics_hierarchical_params_gather": True}
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spread_of(mics_shard_size=4, **hops) == StateSpread(4)  # the launcher names no hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert spread_of(mics_shard_size=4, **hops) == StateSpread(4, 2) and spread_of(
        mics_shard_size=2, **hops
    ) == StateSpread(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    assert spread_of(mics_shard_size=4) == StateSpread(4)  # it is asked for hosts alone
    with pytest.raises(FzeroError, match="LOCAL_WORLD_SIZE: is 'two' in the environment; give the number of ranks"):
        spread_of(mics_shard_size=4, **hops)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(FzeroError, match=r"zero_hpz_partition_size: is 2, and .*mics_shard_size is 4; leave one"):
        spread_of(mics_shard_size=4, zero_hpz_partition_size=2)
    with pytest.raises(FzeroError, match=r"zero_quantized_weights: is true, and so is .*mics_hierarchical_param"):
        spread_of(mics_shard_size=4, zero_quantized_weights=True, **hops)


def test_gathers_inside_of_nodes_and_in_two_hops_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """hpZ, ZeRO++ with int8 between nodes, and MiCS, beside a plain engine. Evaluations gather too."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    expected, (x, y) = run_loop(make_engine(PLAIN | SGD), make_batches(4)), make_batches(1)[0]
    int8 = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    mics = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    nodes = VirtualMesh(node=2, local=2)
    for mesh, keys, rel in (
        (nodes, {"zero_hpz_partition_size": 2}, 1e-5),
        (nodes, {"zero_hpz_partition_size": 2, **int8}, 0.01),
        (nodes, {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}, 1e-5),
        (VirtualMesh(replica=1, node=2, local=2), mics, 1e-5),
    ):
        engine = make_engine(PLAIN | SGD | {"zero_optimization": {"stage": 3, **keys}}, mesh=mesh)
        assert ("all_gather", "local") in engine.report(x, y).comm
        assert run_loop(engine, make_batches(4)) == pytest.approx(expected, rel=rel)
        assert torch.isfinite(engine.eval()(x, y))


def train_in_groups(mesh: DeviceMesh) -> tuple[Any, list[float]]:
    config = PLAIN | ADAMW | {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    engine = fzero.deepspeed.initialize(model=make_model(), config=config).engine
    half = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    return mesh_shape(engine.mesh).sizes, run_loop(engine, [(x[half], y[half]) for x, y in make_batches(4)])


def test_groups_of_mics_train_as_one() -> None:
    expected = run_loop(make_engine(PLAIN | ADAMW), make_batches(4))
    for sizes, losses in run(2, train_in_groups):
        assert sizes == {"replica": 2, "fsdp": 1} and losses == pytest.approx(expected, rel=1e-5)
