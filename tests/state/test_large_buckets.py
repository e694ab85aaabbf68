"""Layers of a dict, and the warning of a bucket that holds several layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import tree

MESH = fzero.VirtualMesh(fsdp=4)


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, make_layers: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 128), nn.Linear(128, 50)
        self.layers = make_layers([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return self.head(x)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def by_number(layers: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})


def by_name(layers: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict(dict(zip("abcd", layers)))


def peak(make_layers: Callable[[list[nn.Module]], Any], **how: Any) -> int:
    params, apply = fzero.lower(Net(make_layers))
    step = fzero.simulate(fzero.value_and_grad(lambda p, x: apply(p, x).square().mean()), MESH)
    program = step.trace(fzero.partition(params, MESH, **how), torch.zeros(8, 4, dtype=torch.int64))
    return program.memory().peak


def test_numbers_as_keys_are_positions_of_layers() -> None:
    """As torchtitan has its layers. A stage then needs the memory of a list of layers."""
    assert peak(by_number) == peak(nn.ModuleList)
    nested = {
        "blocks": {"0": {"1": torch.ones(3), "w": torch.ones(3)}, "7": {"w": torch.ones(3)}},
        "head": torch.ones(2),
    }
    placed = fzero.partition(nested, MESH)
    assert sorted({x.form.layout.bucket for x in tree.leaves(placed)}) == ["blocks.0", "blocks.7", "head"]
    words = nn.ParameterDict({str(i): torch.ones(3) for i in range(2)})
    placed = fzero.partition(fzero.lower(Wrapped(words))[0], MESH)
    assert sorted({x.form.layout.bucket for x in tree.leaves(placed)}) == ["model.0", "model.1"]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_bucket_of_most_bytes_is_warned_of_with_what_mends_it(
    is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(by_name)
    params, _ = fzero.lower(Wrapped(net) if is_wrapped else net)
    fzero.partition(params, MESH)
    (message,) = caplog.messages
    assert message.startswith("bucket 'model' has 2." if is_wrapped else "bucket 'layers' has 2.0 MiB of the tree's 2.")
    layers = eval(message.partition("layers=")[2])
    caplog.clear()
    placed = fzero.partition(params, MESH, layers=layers)
    buckets = {x.form.layout.bucket for x in tree.leaves(placed)}
    assert not caplog.messages and {f"{'model.' * is_wrapped}layers.{name}" for name in "abcd"} <= buckets
    assert is_wrapped or peak(by_name, layers=layers) == peak(nn.ModuleList) < peak(by_name) / 1.5


GOOD: dict[str, Callable[[], nn.Module]] = {
    "a linear layer": lambda: nn.Linear(2000, 2000),
    "a linear layer in a module": lambda: Wrapped(nn.Linear(2000, 2000)),
    "one layer": lambda: Wrapped(nn.TransformerEncoderLayer(256, 4)),
    "one block": lambda: Wrapped(Block(512)),
    "an embedding beside a list": lambda: Wrapped(nn.ModuleList([nn.Embedding(9000, 64), nn.Linear(64, 64)])),
    "an encoder and a decoder": lambda: nn.Transformer(128, 4, 2, 2),
    "a list": lambda: Wrapped(Net(nn.ModuleList)),
    "small layers": lambda: nn.ModuleDict({name: nn.Sequential(nn.Linear(9, 9)) for name in "abc"}),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_has_no_better_cut_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        params, _ = fzero.lower(GOOD[name]())
    fzero.partition(params, MESH)
    assert not caplog.messages
