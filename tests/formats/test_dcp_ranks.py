"""FSDP2 on real ranks: its checkpoints and its state dicts come in, ours go out; ranks that do not agree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Outcome, refusal, run_cases, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fzero
from fzero import VirtualMesh, optim, tree
from fzero.checkpoint import load_adam, load_params, open_dcp, open_state_dict, save_dcp
from fzero.state.publishing import TEMPORARY
from fzero.state.sources import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANKS = 2
ROWS = 8


def build() -> nn.Sequential:
    """7 rows on two ranks are 4 and 3; one row is 1 and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))


def batch() -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))


def train_fsdp2(mesh: DeviceMesh, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = batch().chunk(mesh.size())[mesh.get_rank()]
    for _ in range(count):
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
    return model, optimizer


def full(values: Any) -> dict[str, Tensor]:
    """Every tensor of a state dict, whole."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": tensor for name, tensor in full(value).items()}
        elif isinstance(value, Tensor):
            found[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def whole(source: Source) -> Tensor:
    out = torch.empty(source.shape.numel(), dtype=source.dtype)
    source.read(0, out)
    return out.view(source.shape)


def unpartition(state: Any) -> dict[str, Tensor]:
    return dict(zip(tree.paths(state), tree.leaves(fzero.unpartition(state))))


class Folders:
    """Where cases leave files for the tests of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def move_over(self, mesh: DeviceMesh) -> Any:
        """Three steps of FSDP2, saved; then a fourth in FSDP2, and in fzero from the state dicts."""
        model, optimizer = train_fsdp2(mesh, 3)
        model_state, optim_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=self.path / "fsdp2")
        like, apply = fzero.lower(build().to("meta"))
        sources, ours = open_state_dict({"model": model_state, "optim": optim_state}), optim.adamw(0.01)
        params = load_params(sources, like, mesh, prefix="model.")
        opt_state = load_adam(sources, ours.init(params), mesh, prefix="optim.state.", chunk=48)
        loaded = unpartition(params), unpartition(opt_state)

        def step(params: Any, opt_state: Any, x: Tensor) -> Any:
            grads = fzero.grad(lambda params: apply(params, x).square().mean())(params)
            updates, opt_state = ours.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state

        next_params, _ = fzero.shard(step, mesh)(params, opt_state, batch().chunk(mesh.size())[mesh.get_rank()])
        return (
            full(model_state),
            full(optim_state["state"]),
            loaded,
            unpartition(next_params),
            full(get_model_state_dict(train_fsdp2(mesh, 4)[0])),
        )

    def save(self, mesh: DeviceMesh) -> Any:
        params = fzero.partition(list(build().parameters()), mesh)
        state = {"params": params, "opt": optim.adamw(0.1).init(params), "step": 3, "extra": torch.arange(4)}
        save_dcp(self.path / "ours", state)
        again = [torch.zeros_like(p) for p in build().parameters()]
        into = {f"params.{i}": distribute_tensor(p, mesh, [Shard(p.ndim - 1)]) for i, p in enumerate(again)}
        dcp.load(into, checkpoint_id=self.path / "ours")
        return full(into)

    def other_trees(self, mesh: DeviceMesh) -> Any:
        params = fzero.partition({"w": torch.ones(6)}, mesh)
        said = [
            refusal(lambda: save_dcp(self.path / "differ", params | {"step": mesh.get_rank()})),
            refusal(lambda: save_dcp(self.path / f"only-{mesh.get_rank()}" / "x", {"w": params["w"], "o": nn})),
        ]
        failing = params | {"b": Failing() if mesh.get_rank() == 1 else fzero.partition([torch.ones(3)], mesh)[0]}
        said.append(refusal(lambda: save_dcp(self.path / "one fails", failing)))
        dist.barrier()  # the first rank removes what it made
        return [*said, os.listdir(self.path)]

    def two_axes(self, mesh: DeviceMesh) -> Any:
        """On 2 x 2 ranks: hybrid sharding, rows and columns, FSDP2 over tensor parallelism. Each comes in on one axis
        of four ranks, and on the two of hybrid sharding."""
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.arange(70.0).view(7, 10)
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        states: dict[str, dict[str, Any]] = {
            "hybrid": {"w": distribute_tensor(x, hybrid, [Replicate(), Shard(0)])},
            "rows and columns": {"w": distribute_tensor(x, both, [Shard(0), Shard(1)])},
            "rows twice": {"w": distribute_tensor(x, both, [Shard(0), Shard(0)])},
            "fsdp2 over tp": fully_shard(model, mesh=both["dp"]).state_dict(),
        }
        found = {}
        for name, state in states.items():
            like = {key: torch.empty(value.shape) for key, value in state.items()}
            for on in mesh, hybrid:
                params = fzero.unpartition(load_params(open_state_dict(state), like, on))
                found[name, on is mesh] = all(params[key].equal(value.full_tensor()) for key, value in state.items())
        save_dcp(self.path / "hybrid", fzero.partition({"w": x, "b": x[0, :3]}, hybrid))
        return found, [str(value.placements) for value in states["fsdp2 over tp"].values()]


class Failing:
    """A leaf that no checkpoint holds."""


def placements(mesh: DeviceMesh) -> Any:
    """DTensors of every placement, as parameters of another dtype, and where they come back."""
    tensors = [
        torch.arange(30.0).view(5, 6),
        torch.arange(12).view(3, 4),
        torch.arange(3.0),
        torch.arange(24.0).view(2, 3, 4),
    ]
    found = {}
    for name, placement in {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}.items():
        state = {
            str(i): distribute_tensor(x, mesh, [placement])
            for i, x in enumerate(tensors)
            if x.ndim > 1 or name != "columns"
        }
        like = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in state.items()}
        params = load_params(open_state_dict(state), like, mesh, dtype=torch.bfloat16, chunk=16)
        same = [params[key].full_tensor().equal(tensors[int(key)].to(params[key].dtype)) for key in state]
        found[name] = all(same), [params[key].dtype for key in state]
    return found


def refusals(mesh: DeviceMesh) -> Any:
    rows = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    like = {"w": torch.empty(4, 3)}
    return [
        refusal(lambda: open_state_dict({"w": partial})),
        refusal(lambda: load_params(open_state_dict({"w": rows}), like, VirtualMesh(fsdp=2))),
        refusal(lambda: load_params(open_state_dict({"w": rows}), {"w": torch.empty(3, 4)}, mesh)),
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(path: Path) -> dict[str, list[Outcome]]:
    on = Folders(path)
    cases = {"move": on.move_over, "save": on.save, "trees": on.other_trees, "placements": placements, "no": refusals}
    return run_cases(RANKS, cases)


def test_state_dicts_of_fsdp2_come_in_bit_for_bit(outcomes: dict[str, list[Outcome]]) -> None:
    for model_state, optim_state, (params, opt_state), after, expected in values(outcomes["move"]):
        assert params.keys() == model_state.keys() and all(params[key].equal(model_state[key]) for key in params)
        for ours, theirs in {"mu": "exp_avg", "nu": "exp_avg_sq"}.items():
            assert all(opt_state[f"0.{ours}.{key}"].equal(optim_state[f"{key}.{theirs}"]) for key in params)
        assert opt_state["0.count"] == 3
        for key in params:  # of two ranks' gradients, kernels and reductions sum in other orders
            torch.testing.assert_close(after[key], expected[key], rtol=1e-5, atol=1e-6)


def test_files_of_fsdp2_come_in_on_another_number_of_ranks(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    model_state, optim_state, *_ = values(outcomes["move"])[0]
    sources: Any = open_dcp(path / "fsdp2")
    like = fzero.lower(build().to("meta"))[0]
    for mesh in VirtualMesh(fsdp=1), VirtualMesh(fsdp=3):
        params = load_params(sources, like, mesh, prefix="model.")
        opt_state = load_adam(sources, optim.adamw(0.01).init(params), mesh, prefix="optim.state.")
        assert all(x.equal(model_state[key]) for key, x in unpartition(params).items())
        state = unpartition(opt_state)
        assert all(state[f"0.mu.{key}"].equal(optim_state[f"{key}.exp_avg"]) for key in model_state)
    weight = sources["model.0.weight"]
    before, some = weight.folder.nbytes_read, torch.empty(10)
    weight.read(20, some)  # of the rows of both ranks
    assert some.equal(model_state["0.weight"].view(-1)[20:30]) and weight.folder.nbytes_read - before == 40


def test_torch_reads_what_ranks_saved_as_dtensors_and_as_tensors(
    outcomes: dict[str, list[Outcome]], path: Path
) -> None:
    expected = {f"params.{i}": p.detach() for i, p in enumerate(build().parameters())}
    for found in values(outcomes["save"]):
        assert all(found[key].equal(expected[key]) for key in expected)
    into = {key: torch.zeros_like(p) for key, p in expected.items()} | {"extra": torch.zeros(4, dtype=torch.int64)}
    dcp.load(into, checkpoint_id=path / "ours", no_dist=True)
    assert all(into[key].equal(p) for key, p in expected.items()) and into["extra"].tolist() == [0, 1, 2, 3]
    assert sorted(os.listdir(path / "ours")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_ranks_that_save_other_trees_are_told(outcomes: dict[str, list[Outcome]]) -> None:
    for differ, unknown, one, listed in values(outcomes["trees"]):
        assert differ.kind == "FzeroError" and "step: int 0" in differ.message and "step: int 1" in differ.message
        assert "o: is a module" in unknown.message
        assert "rank 1 could not write it: b: is a Failing" in one.message
        assert not [name for name in listed if name in ("differ", "one fails") or name.endswith(TEMPORARY)]


def test_dtensors_of_every_placement_come_in(outcomes: dict[str, list[Outcome]]) -> None:
    kinds = [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]
    for found in values(outcomes["placements"]):
        assert found == {"rows": (True, kinds), "columns": (True, [*kinds[:2], kinds[3]]), "whole": (True, kinds)}


def test_two_axes(path: Path) -> None:
    for found, placements in values(run_cases(4, {"two": Folders(path).two_axes})["two"]):
        assert len(found) == 8 and all(found.values()), found
        assert any("Strided" in each for each in placements)  # what FSDP2 makes of what is sharded already
    written: Any = open_dcp(path / "hybrid")
    assert whole(written["w"]).equal(torch.arange(70.0).view(7, 10)) and whole(written["b"]).equal(torch.arange(3.0))
    entries = written["w"].folder.contents.tensors.values()
    stored = [torch.Size(piece.box.size).numel() for entry in entries for piece in entry.pieces]
    assert sum(stored) == 73 and len(os.listdir(path / "hybrid")) == 5  # one replica of each element, of four ranks


def test_dtensors_that_cannot_come_in(outcomes: dict[str, list[Outcome]]) -> None:
    for partial, virtual, shape in values(outcomes["no"]):
        assert "w: is a DTensor of (Partial(sum),), not cut along an axis" in partial.message
        assert (
            "w: lies on ranks [0, 1], and is partitioned on VirtualMesh(fsdp=2); partition it on a" in virtual.message
        )
        assert "w: has shape [4, 3] in RowSource(w: float32[4, 3]), [3, 4] in the tree" in shape.message
