"""Placements: state on the host is made, saved and loaded as state on the device is, and stays where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import layers
from torch import nn

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, initializers, optim, tree

HOST = fzero.host()
ADAM = optim.adamw(0.1)


def places(values: Any) -> set[Any]:
    """Where the leaves of which ranks keep slices lie."""
    return {leaf.place for leaf in tree.leaves(values) if not leaf.is_replicated}


def state(world: int, to: Any = None, of_params: Any = None) -> Any:
    """Parameters, and AdamW's state behind an update: not zero."""
    params = fzero.partition(layers(), VirtualMesh(fsdp=world), to=of_params)
    resident = ADAM.init(params, to=to)
    _, filled = ADAM.update(tree.map(lambda x: 0.1 * x, params), resident, params)
    return params, filled


def assert_equal(got: Any, expected: Any) -> None:
    whole, known = fzero.unpartition(got), fzero.unpartition(expected)
    for path, a, b in zip(tree.paths(known), tree.leaves(whole), tree.leaves(known), strict=True):
        assert torch.equal(a, b), path


def test_a_placement_is_a_value() -> None:
    assert fzero.host() == fzero.host(pin=True) != fzero.host(pin=False)
    assert repr(HOST) == "fzero.host(pin=True)"


@pytest.mark.parametrize("donate", [False, True])
def test_a_checkpoint_is_loaded_to_where_like_lies(tmp_path: Path, donate: bool) -> None:
    saved = state(2, to=HOST)
    checkpoint.save(tmp_path, saved, step=1)
    for world, to, of_params in ((3, HOST, None), (2, None, HOST), (2, HOST, HOST)):
        like = state(world, to, of_params)
        params, moments = checkpoint.load(tmp_path, like, donate=donate)
        assert_equal((params, moments), saved)
        assert places(params) == {of_params} and places(moments) == places(like[1])


def test_a_save_beside_training_copies_state_of_the_host(tmp_path: Path) -> None:
    saved = state(2, to=HOST)
    kept = tree.map(lambda x: x.local.clone(), saved)
    saving = checkpoint.save(tmp_path, saved, step=1, wait=False)
    for leaf in tree.leaves(saved):
        leaf.local.zero_()
    saving.wait()
    loaded = checkpoint.load(tmp_path, state(2, to=HOST))
    assert all(torch.equal(x.local, y) for x, y in zip(tree.leaves(loaded), tree.leaves(kept), strict=True))


def test_every_maker_of_state_takes_a_placement(tmp_path: Path) -> None:
    mesh, model = VirtualMesh(fsdp=2), nn.Linear(8, 8)
    whole, _ = fzero.lower(model)
    resident = fzero.partition(whole, mesh)
    fzero.save_safetensors(fzero.partition(whole, mesh, to=HOST), tmp_path / "model.safetensors")
    loaded = fzero.load_safetensors(tmp_path / "model.safetensors", whole, mesh, to=HOST)
    assert places(loaded) == {HOST}
    assert_equal(loaded, resident)
    drawn = fzero.init(whole, mesh, lambda path, leaf: initializers.normal(1.0), to=HOST)
    assert places(drawn) == {HOST}
    assert_equal(drawn, fzero.init(whole, mesh, lambda path, leaf: initializers.normal(1.0)))
    built, _ = fzero.build(lambda: nn.Linear(8, 8), mesh, to=HOST)
    assert places(built) == {HOST} and not any(leaf.local.is_meta for leaf in tree.leaves(built))


def test_what_is_computed_from_state_on_the_host_lies_there() -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2), to=HOST)
    assert places(tree.map(lambda x: 2 * x, params)) == {HOST}
    assert places(ADAM.init(params)) == {HOST}
    changed = fzero.update_leaf(params, "layers.0.b", lambda b: torch.cat([b, b]))
    assert places(changed) == {HOST} and changed["layers"][0]["b"].shape == (10,)


def test_a_value_moves_to_a_placement_and_back() -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2))
    there = tree.map(lambda x: x.at(HOST), params)
    assert places(there) == {HOST} and "fzero.host(pin=True)" in repr(there["layers"][0]["w"])
    assert places(tree.map(lambda x: x.at(None), there)) == {None}
    assert_equal(there, params)
    assert all(leaf.at(HOST) is leaf for leaf in tree.leaves(there))
    tree.map(lambda x: x.local.zero_(), there)
    assert all(leaf.local.any() for leaf in tree.leaves(params)), "a copy"


def test_leaves_that_are_whole_on_every_rank_stay_on_the_device() -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2), persist=5, to=HOST)
    assert [leaf.place for leaf in tree.leaves(params)] == [None, HOST] * 3


def test_a_placement_beside_another_device_is_named() -> None:
    with pytest.raises(FzeroError, match="beside slices for mps.*CPU or CUDA"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), device="mps", to=HOST)


def test_a_placement_of_another_kind_is_named() -> None:
    with pytest.raises(FzeroError, match="to.*is 'cpu'.*fzero.host()"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), to="cpu")
    with pytest.raises(FzeroError, match="to.*is 'cpu'.*fzero.host()"):
        ADAM.init(fzero.partition(layers(), VirtualMesh(fsdp=2)), to="cpu")
