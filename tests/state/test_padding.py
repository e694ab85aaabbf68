"""Padding is zeros, whatever the memory held before: torch fills new memory with nan here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import VirtualMesh, optim, partition, tree, unpartition
from fzero.state.initializers import normal

MESH = VirtualMesh(fsdp=4)


@contextmanager
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory, its default
    try:
        assert torch.empty(5).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(41, 37)  # large enough that fzero.build defers it
        self.small = nn.Linear(37, 3, bias=False)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.small(torch.tanh(self.big(x))) * self.scale


APPLY = fzero.lower(Model())[1]
BATCHES = torch.randn(3, 8, 41, generator=torch.Generator().manual_seed(0))


def params() -> tree.Tree:
    torch.manual_seed(0)
    return fzero.lower(Model())[0]


def loaded(file: Path) -> tree.Tree:
    fzero.save_safetensors(params(), file)
    return fzero.load_safetensors(file, params(), MESH, chunk=12)


def grown(file: Path) -> tree.Tree:
    return fzero.update_leaf(partition(params(), MESH), "big.bias", lambda b: torch.cat([b, torch.ones(2)]))


WAYS: dict[str, Callable[[Path], tree.Tree]] = {
    "partition": lambda file: partition(params(), MESH),
    "chunks": lambda file: partition(params(), MESH, chunk=12),
    "cast": lambda file: partition(params(), MESH, dtype=torch.bfloat16),
    "persist": lambda file: partition(params(), MESH, persist=1),
    "rows": lambda file: partition(params(), MESH, granularity=lambda path, shape: shape[-1] if shape else 1),
    "init": lambda file: fzero.init(params(), MESH, lambda path, leaf: normal(0.1)),
    "build": lambda file: fzero.build(Model, MESH, seed=0)[0],
    "load": loaded,
    "update_leaf": grown,
}


def padding(values: tree.Tree) -> Tensor:
    """All elements of the leaves' memory that belong to no leaf."""
    blocks: dict[int, Tensor] = {}
    rest: dict[int, Tensor] = {}
    for value in tree.leaves(values):
        local = value.local
        storage = local.untyped_storage()
        block = blocks.setdefault(storage._cdata, local.new_empty(0).set_(storage))
        free = rest.setdefault(storage._cdata, torch.ones(block.shape, dtype=torch.bool))
        free[local.storage_offset() : local.storage_offset() + local.numel()] = False
    return torch.cat([block[rest[key]].float() for key, block in blocks.items()])


@pytest.mark.parametrize("way", WAYS)
def test_padding_is_zeros(way: str, tmp_path: Path) -> None:
    with poisoned():
        values = WAYS[way](tmp_path / "w.safetensors")
    assert not any(leaf.isnan().any() for leaf in tree.leaves(unpartition(values)))
    assert_zeros(padding(values))


def assert_zeros(found: Tensor) -> None:
    assert found.numel() and torch.equal(found, torch.zeros(found.shape))


OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))


def step(params: tree.Tree, state: tree.Tree, x: Tensor) -> tree.Tree:
    gradients = fzero.grad(lambda params: APPLY(params, x).square().mean())(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optim.apply_updates(params, updates), state


def trained(mesh: DeviceMesh) -> tuple[tree.Tree, Tensor]:
    """The parameters after three steps, and the padding of parameters and moments."""
    with poisoned():
        shards = partition(params(), mesh)
        state = shards, partition(OPTIMIZER.init(params()), mesh, like=shards)
        sharded = fzero.shard(step, mesh)
        for x in BATCHES:
            state = sharded(*state, x.chunk(2)[mesh.get_rank()])
        return unpartition(state[0]), padding(state)


def test_padding_stays_zeros_while_training() -> None:
    state = params(), OPTIMIZER.init(params())
    for x in BATCHES:
        state = step(*state, x)
    for values, found in run(2, trained):
        tree.map(torch.testing.assert_close, values, state[0])
        assert_zeros(found)
