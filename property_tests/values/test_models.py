"""Law of lowered modules: on any ranks they compute what the module computes, and every leaf comes back as it was."""

from __future__ import annotations

import torch
from hypothesis import given

import fzero
from fzero.testing.strategies import models, small_meshes
from property_tests.laws import slow


@given(models(), small_meshes(max_world=4))
@slow
def test_a_lowered_model_computes_what_the_module_does(model: torch.nn.Sequential, mesh: fzero.VirtualMesh) -> None:
    whole, apply = fzero.lower(model)
    x = torch.linspace(-1, 1, mesh.size() * model[0].in_features).view(mesh.size(), -1)
    params = fzero.partition(whole, mesh)
    torch.testing.assert_close(fzero.simulate(apply, mesh)(params, x), model(x).detach(), rtol=1e-5, atol=1e-6)
    back = fzero.tree.leaves(fzero.unpartition(params))
    assert all(torch.equal(a, b) for a, b in zip(back, fzero.tree.leaves(whole), strict=True))
