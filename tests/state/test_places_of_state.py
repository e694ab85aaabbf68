"""Placements: state on the host or a disk is made, saved and loaded as that on the device, and stays where it lies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import layers
from torch import nn

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, initializers, optim, tree
from fzero.base.placement import Disk
from fzero.files import OnDisk

HOST = fzero.host()
ADAM = optim.adamw(0.1)


def places(values: Any) -> set[Any]:
    """Where the leaves of which ranks keep slices lie."""
    leaves = [leaf for leaf in tree.leaves(values) if not leaf.is_replicated]
    assert all(leaf.is_donated or isinstance(leaf.local, OnDisk) == isinstance(leaf.place, Disk) for leaf in leaves)
    return {leaf.place for leaf in leaves}


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


def make_large_and_small() -> nn.Module:
    """A layer that `build` cuts while it is made, and one that stays an ordinary tensor until then."""
    return nn.Sequential(nn.Linear(48, 48), nn.Linear(4, 3))


def test_a_placement_is_a_value() -> None:
    assert fzero.host() == fzero.host(pin=True) != fzero.host(pin=False)
    assert repr(HOST) == "fzero.host(pin=True)"


@pytest.fixture(params=["host", "disk"])
def there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A placement."""
    return HOST if request.param == "host" else fzero.disk(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("donate", [False, True])
def test_a_checkpoint_is_loaded_to_where_like_lies(tmp_path: Path, donate: bool, there: Any) -> None:
    saved = state(2, to=there)
    checkpoint.save(tmp_path, saved, step=1)
    for world, to, of_params in ((3, there, None), (2, None, there), (2, there, there)):
        like = state(world, to, of_params)
        params, moments = checkpoint.load(tmp_path, like, donate=donate)
        assert_equal((params, moments), saved)
        assert places(params) == {of_params} and places(moments) == places(like[1])


def test_a_save_beside_training_copies_state(tmp_path: Path, there: Any) -> None:
    saved = state(2, to=there)
    kept = tree.map(lambda x: x.local.clone(), saved)
    saving = checkpoint.save(tmp_path, saved, step=1, wait=False)
    for leaf in tree.leaves(saved):
        leaf.local.zero_()
    saving.wait()
    loaded = checkpoint.load(tmp_path, state(2, to=there))
    assert all(torch.equal(x.local, y) for x, y in zip(tree.leaves(loaded), tree.leaves(kept), strict=True))


def test_every_maker_of_state_takes_a_placement(tmp_path: Path, there: Any) -> None:
    mesh, model = VirtualMesh(fsdp=2), nn.Linear(8, 8)
    whole, _ = fzero.lower(model)
    resident = fzero.partition(whole, mesh)
    fzero.save_safetensors(fzero.partition(whole, mesh, to=there), tmp_path / "model.safetensors")
    loaded = fzero.load_safetensors(tmp_path / "model.safetensors", whole, mesh, to=there)
    assert places(loaded) == {there}
    assert_equal(loaded, resident)
    drawn = fzero.init(whole, mesh, lambda path, leaf: initializers.normal(1.0), to=there)
    assert places(drawn) == {there}
    assert_equal(drawn, fzero.init(whole, mesh, lambda path, leaf: initializers.normal(1.0)))
    built, _ = fzero.build(make_large_and_small, mesh, to=there)
    expected, _ = fzero.build(make_large_and_small, mesh)
    assert_equal(built, expected)
    assert places(built) == {there} and not any(leaf.local.is_meta for leaf in tree.leaves(built))


def test_what_is_computed_from_state_in_a_placement_lies_there(there: Any) -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2), to=there)
    assert places(tree.map(lambda x: 2 * x, params)) == {there}
    assert places(ADAM.init(params)) == {there}
    changed = fzero.update_leaf(params, "layers.0.b", lambda b: torch.cat([b, b]))
    assert places(changed) == {there} and changed["layers"][0]["b"].shape == (10,)


def test_a_value_moves_to_a_placement_and_back(there: Any) -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2))
    moved = tree.map(lambda x: x.at(there), params)
    assert places(moved) == {there} and repr(there) in repr(moved["layers"][0]["w"])
    returned = tree.map(lambda x: x.at(None), moved)
    assert places(returned) == {None} and places(tree.map(lambda x: x.at(HOST), moved)) == {HOST}
    assert_equal(returned, params)
    assert_equal(copy.deepcopy(moved), params)
    assert all(leaf.at(there) is leaf for leaf in tree.leaves(moved))
    tree.map(lambda x: x.local.zero_(), moved)
    assert all(leaf.local.any() for leaf in tree.leaves(params)), "a copy"


def test_leaves_that_are_whole_on_every_rank_stay_on_the_device() -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2), persist=5, to=HOST)
    assert [leaf.place for leaf in tree.leaves(params)] == [None, HOST] * 3


def test_a_placement_beside_another_device_is_named() -> None:
    with pytest.raises(FzeroError, match="^device: is 'mps': .*; name a device of this process"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), device="mps", to=HOST)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params = fzero.partition(layers(), VirtualMesh(fsdp=2))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    message = r"\d+ bytes of the host cannot be pinned: .*; raise the limit of locked memory \(ulimit -l\), or"
    with pytest.raises(FzeroError, match=rf"layers.0.b: {message} give pin=False"):
        tree.map(lambda x: x.at(HOST), params)
    with pytest.raises(FzeroError, match=f"pin: {message} give pin=False"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), to=HOST)


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match="disk '.*/none': is no folder; give the path of a folder that is there"):
        fzero.disk(tmp_path / "none")
    place = fzero.disk(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(FzeroError, match="is no folder"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), to=place)


def test_a_placement_of_another_kind_is_named() -> None:
    with pytest.raises(FzeroError, match="to.*is 'cpu'.*fzero.host()"):
        fzero.partition(layers(), VirtualMesh(fsdp=2), to="cpu")
    with pytest.raises(FzeroError, match="to.*is 'cpu'.*fzero.host()"):
        ADAM.init(fzero.partition(layers(), VirtualMesh(fsdp=2)), to="cpu")
