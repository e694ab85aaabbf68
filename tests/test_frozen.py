"""Frozen parameters: `requires_grad_(False)` holds from the module to the trained tree, as in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import training
from torch import Tensor, nn

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen

MESH = fzero.VirtualMesh(fsdp=3)


class Net(nn.Module):
    """Two layers; the first weight, the second bias and a table of integers are frozen."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 40, device=device), nn.Linear(40, 5, device=device)])
        self.order = nn.Parameter(torch.arange(5, device=device), requires_grad=False)
        self.layers[0].weight.requires_grad_(False)
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))[:, self.order]


FROZEN = ["layers.0.weight", "layers.1.bias", "order"]
TRAINED = ["layers.0.bias", "layers.1.weight"]
OPTIMIZERS: dict[str, tuple[optim.GradientTransformation, Callable[[list[Any]], torch.optim.Optimizer]]] = {
    "momentum": (optim.sgd(0.1, momentum=0.9), lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)),
    "adamw": (
        optim.adamw(0.01, b2=0.95, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, 0.01, (0.9, 0.95), weight_decay=0.1),
    ),
}


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def step_of(apply: Any, optimizer: optim.GradientTransformation) -> Callable[..., Any]:
    return training(optimizer, lambda params, x: apply(params, x).square().mean())


def paths_where(params: Any, predicate: Callable[[Any], bool]) -> list[str]:
    return [path for path, leaf in zip(tree.paths(params), tree.leaves(params)) if predicate(leaf)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_training_equals_plain_torch(name: str, stage: int | None) -> None:
    optimizer, make_plain = OPTIMIZERS[name]
    module = make()
    params, apply = fzero.lower(module)
    step = step_of(apply, optimizer)
    if stage is not None:
        params, step = fzero.partition(params, MESH), fzero.simulate(step, MESH, stage=stage)
    else:
        params = fzero.lower(make())[0]  # of its own memory: torch's optimizer writes into the module's
    state = optimizer.init(params)
    plain = make_plain([param for param in module.parameters() if param.requires_grad])
    for _ in range(3):
        params, state, loss = step(params, state, batch())
        expected = module(batch()).square().mean()
        plain.zero_grad()
        expected.backward()
        plain.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert paths_where(params, is_frozen) == FROZEN
    for path, leaf in zip(tree.paths(params), tree.leaves(fzero.unpartition(params))):
        # sums over 2 rows a rank in place of 6, through three steps of AdamW
        torch.testing.assert_close(leaf.detach(), dict(module.named_parameters())[path].detach(), rtol=1e-4, atol=1e-5)


def test_frozen_leaves_have_neither_gradient_nor_state_nor_reduce_scatter() -> None:
    params, apply = fzero.lower(make())
    held, optimizer = fzero.partition(params, MESH), optim.adamw(0.1)
    state = optimizer.init(held)
    assert tree.paths(state[0].mu) == TRAINED == tree.paths(state[0].nu)
    gradient = fzero.simulate(fzero.grad(lambda p, x: apply(p, x).mean()), MESH)(held, batch())
    assert tree.paths(gradient) == TRAINED and gradient["layers"][0]["weight"] is None
    program = fzero.simulate(step_of(apply, optimizer), MESH).trace(held, state, batch())
    moved = sum(entry.nbytes for entry in program.comm() if entry.op == "reduce_scatter")
    trained = sum(leaf.numel() * 4 for leaf in tree.leaves(gradient))
    assert trained <= moved < trained + 2 * 16 * 3 * 4  # less than a padding of each of two buckets


def test_lower_says_once_what_is_frozen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fzero"):
        fzero.lower(make())
        fzero.lower(nn.Linear(2, 2))
    (record,) = caplog.records
    assert "Net: 3 of 5 parameters do not require grad" in record.getMessage()
    assert "order, layers.0.weight" in record.getMessage()


def test_a_tree_survives_the_way_to_slices_and_back(tmp_path: Path) -> None:
    params, _ = fzero.lower(make())
    held = fzero.partition(params, MESH)
    whole = fzero.unpartition(held)
    fzero.save_safetensors(held, str(tmp_path / "net.safetensors"))
    on_meta, _ = fzero.lower(Net(device="meta"))
    trees = {
        "lower": params,
        "partition": held,
        "unpartition": whole,
        "partition again": fzero.partition(whole, MESH),
        "whole leaves": fzero.partition(params, MESH, persist=10_000),
        "blocks": fzero.partition(params, MESH, granularity=lambda path, shape: 5),
        "as parameters": fzero.partition(params, MESH, like=held),
        "a cast": tree.map(lambda leaf: leaf.to(torch.bfloat16) if leaf.is_floating_point() else leaf, held),
        "files": fzero.load_safetensors(str(tmp_path / "net.safetensors"), on_meta, MESH),
        "files as parameters": fzero.partition(
            fzero.open_safetensors(str(tmp_path / "net.safetensors")), MESH, like=held
        ),
        "init": fzero.init(on_meta, MESH, lambda path, leaf: fzero.initializers.zeros()),
        "build": fzero.build(Net, MESH)[0],
        "an update": fzero.update_leaf(held, "layers.0.weight", lambda w: w * 2),
    }
    found = {name: paths_where(each, is_frozen) for name, each in trees.items()}
    del found["files as parameters"]  # keys of a file are no paths of a tree
    assert found == dict.fromkeys(found, FROZEN)


def test_large_frozen_parameters_are_built() -> None:
    params, _ = fzero.build(lambda: nn.Linear(64, 64).requires_grad_(False), MESH, seed=3)
    torch.manual_seed(3)
    expected = nn.Linear(64, 64)
    assert paths_where(params, is_frozen) == ["bias", "weight"]
    assert torch.equal(fzero.unpartition(params)["weight"], expected.weight)


def test_a_plain_tree_stays_frozen_in_a_step() -> None:
    params, apply = fzero.lower(make())
    step = step_of(apply, optim.sgd(0.1))
    one = fzero.simulate(step, 1)
    new = one(params, optim.sgd(0.1).init(params), batch())[0]
    expected = step(params, optim.sgd(0.1).init(params), batch())[0]
    for mine, theirs in zip(tree.leaves(new), tree.leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(new["layers"][0]["weight"], params["layers"][0]["weight"])


def test_equivalence_is_checked_with_frozen_leaves() -> None:
    params, apply = fzero.lower(make())
    optimizer = optim.adamw(0.01)
    fzero.check_equivalence(step_of(apply, optimizer), (params, optimizer.init(params)), (batch(),), ranks=3, steps=2)


def test_all_frozen_is_refused() -> None:
    params, apply = fzero.lower(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(FzeroError, match=r"each of the 2 leaves .* is frozen.*requires_grad_\(True\)"):
        fzero.grad(lambda params: apply(params, torch.ones(1, 2)).sum())(params)


def test_unfreezing_needs_a_module_that_requires_grad() -> None:
    module = make().requires_grad_(False)
    module.layers.requires_grad_(True)
    assert paths_where(fzero.lower(module)[0], is_frozen) == ["order"]


def test_a_none_update_leaves_a_leaf_alone() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    new = optim.apply_updates(params, {"a": torch.ones(2), "b": None})
    assert new["a"].tolist() == [2.0, 2.0] and new["b"] is params["b"]
    with pytest.raises(FzeroError, match="^b: this leaf was not expected"):
        optim.apply_updates({"a": torch.ones(2), "b": None}, params)
