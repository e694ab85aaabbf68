"""Lockstep: cases that the property tests have found, shrunk."""

from __future__ import annotations

import torch
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.ranks.virtual import virtual
from fzero.values.sharded import Sharded

MESH = VirtualMesh(fsdp=2)


def test_the_gradient_of_a_bucket_without_elements_is_scattered() -> None:
    empty = Sharded(torch.zeros(0), Layout("none", (Leaf("none", (0, 3)),), MESH), 0, virtual(MESH))

    def step(none: Sharded, x: Tensor) -> Sharded:
        return fzero.grad(lambda none: (torch.cat([x, none.T @ none])).square().mean())(none)

    assert fzero.simulate(step, MESH)(empty, torch.ones(4, 3)).shape == (0, 3)
