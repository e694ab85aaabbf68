"""Values that are used twice at each of many steps: from the first to the last there are 2 ** LEVELS paths, and a pass
that looks at each path does not end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from passes.test_disk import fill_places
from torch import Tensor

import fzero
from fzero import tree
from fzero.execution.outline import outline

LEVELS, MESH = 30, fzero.VirtualMesh(fsdp=2)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "state on a disk": ("device disk", {}),
    "by budget": ("device device", {"memory": 1000, "to": fzero.host()}),
}
"""Where parameters and state lie, and what else the step is given."""


def climb(x: Tensor) -> Tensor:
    for _ in range(LEVELS):
        x = x + x.sin()
    return x


def train(params: tree.Tree, means: tree.Tree, rate: Tensor, x: Tensor) -> Any:
    """An update by hand. Its numbers, its slices and a region that is computed again have many paths."""
    loss = fzero.remat(lambda w: (x @ climb(w)).square().mean())
    value, grads = fzero.value_and_grad(lambda params: loss(params["w"]))(params)
    rate, means = climb(rate), tree.map(lambda m, g: climb(m + g), means, grads)
    return tree.map(lambda p, m: p - rate * m, params, means), means, value


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_plain_step(name: str, tmp_path: Path) -> None:
    places, how = OPTIONS[name]
    params = {"w": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}
    given = (params, tree.map(torch.zeros_like, params), torch.tensor(0.1))
    to = (*fill_places(places, fzero.disk(tmp_path)), None)
    held = [fzero.partition(each, MESH, to=place) for each, place in zip(given, to)]
    x = torch.linspace(-1, 1, 32).view(4, 8)
    step = fzero.simulate(train, MESH, **how)
    outline(step.trace(*held, x))
    params, means, value = fzero.unpartition(step(*held, x))
    torch.testing.assert_close((params, means, value.mean()), train(*given, x))
