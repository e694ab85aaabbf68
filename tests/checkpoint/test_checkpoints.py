"""Checkpoints: saved on any number of ranks, loaded on any other, bit for bit; and what stands in the folder."""

from __future__ import annotations

import errno
import functools
import hashlib
import re
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from processes import Outcome, refusal, run_cases, values
from programs import layers, loss, training
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
import fzero.checkpoint
from fzero import FzeroError, Sharded, State, VirtualMesh, optim, tree
from fzero.checkpoint import latest, load, open_checkpoint, save, verify, writing
from fzero.checkpoint.manifest import OTHERS
from fzero.ranks.live import live
from fzero.state.safetensors.header import DTYPES
from fzero.state.safetensors.reading import TensorFile

WORLDS = (1, 2, 3, 4, 8)
MESHES = (
    *(VirtualMesh(fsdp=world) for world in WORLDS),
    VirtualMesh(replica=2, fsdp=3),
    VirtualMesh(fsdp=2, replica=2),
)
"""The last is one whose shard axis is the outer one."""
BUCKETS: dict[str, dict[str, Any]] = {
    "a layer each": {},
    "all in one": {"layers": lambda path: "all"},
    "rows": {"granularity": lambda path, shape: shape[-1] if shape else None},
    "persist": {"persist": 5},
    "units": {"unit": 256},
}
OPTIMIZERS: dict[str, optim.GradientTransformation] = {
    "adamw": optim.adamw(0.01),
    "adamw8bit": optim.adamw8bit(0.01),
    "muon": optim.muon(0.01, where=lambda path, leaf: leaf.ndim == 2),
    "bf16 momentum": optim.cast_state(optim.sgd(0.1, momentum=0.9), torch.bfloat16),
}
ROWS, WIDTH, TURNS = 48, 66, 10
"""66 x 66 elements are enough for moments of 8 bits. Each world of WORLDS divides 48 rows."""


def make(optimizer: str = "adamw") -> State:
    """A state of plain tensors: leaves that ranks cut, one of no elements, a scalar, several dtypes."""
    draw = torch.Generator().manual_seed(0)
    params = layers(2, width=WIDTH) | {
        "head": {"w": torch.randn(5, 7, generator=draw).bfloat16(), "none": torch.zeros(0, 3), "one": torch.tensor(2.0)}
    }
    opt_state = OPTIMIZERS[optimizer].init(params)
    drawn = tree.map(
        lambda x: x + 1 if x.ndim == 0 else x + torch.arange(x.numel()).view(x.shape).to(x.dtype), opt_state
    )
    return State(params=params, opt_state=drawn, step=torch.tensor(7), seed=torch.tensor(3), scale={"loss": 2.5})


def place(state: State, mesh: Any, **how: Any) -> State:
    """The tensors of a state on a mesh."""
    return fzero.partition(state._replace(scale=None), mesh, **how)._replace(scale=state.scale)


def whole(state: tree.Tree) -> tree.Tree:
    return fzero.unpartition(state)


def assert_equal(got: tree.Tree, expected: tree.Tree) -> None:
    """Equal structure, types and bits."""
    assert tree.paths(got) == tree.paths(expected)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(expected)):
        assert type(a) is type(b), path
        if isinstance(a, Tensor):
            assert (
                a.dtype == b.dtype
                and a.shape == b.shape
                and a.view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
            ), path
        else:
            assert a == b, path


# From any ranks to any ranks.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("saver", MESHES, ids=str)
def test_what_is_saved_anywhere_is_loaded_anywhere(saver: VirtualMesh, optimizer: str, tmp_path: Path) -> None:
    state = make(optimizer)
    save(tmp_path, place(state, saver, **BUCKETS["units"]), step=3)
    assert verify(tmp_path) == 3
    for mesh in MESHES:
        like = place(tree.map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, state), mesh, unit=256)
        got = load(tmp_path, like)
        assert_equal(whole(got), state)
        forms = [(a.form, b.form) for a, b in zip(tree.leaves(got), tree.leaves(like)) if isinstance(a, Sharded)]
        assert all(a == b for a, b in forms) and len(forms) > 10


@pytest.mark.parametrize("saved", BUCKETS)
def test_buckets_that_are_cut_otherwise_hold_the_same(saved: str, tmp_path: Path) -> None:
    state = make()
    save(tmp_path, place(state, VirtualMesh(fsdp=3), **BUCKETS[saved]))
    for loaded in BUCKETS.values():
        mesh = VirtualMesh(replica=2, fsdp=4)
        assert_equal(whole(load(tmp_path, state, mesh, **loaded)), state)
        assert_equal(whole(load(tmp_path, place(state, mesh, **loaded))), state)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_as_if_nothing_had_been(optimizer: str, stage: int, tmp_path: Path) -> None:
    """Bit for bit on the ranks of before, to rounding on others."""
    params, x = layers(1, width=WIDTH), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    meshes = [VirtualMesh(fsdp=world) for world in (2, 3)]
    step, (before, other) = training(OPTIMIZERS[optimizer], loss), meshes

    def go(state: tuple[Any, Any], mesh: VirtualMesh) -> Any:
        run = fzero.simulate(step, mesh, stage=stage, donate=False)
        for _ in range(TURNS):
            *state, value = run(*state, x)  # type: ignore[assignment]
        return whole((*state, value))

    first = fzero.partition(params, before, unit=256)
    start = first, OPTIMIZERS[optimizer].init(first)
    *middle, _ = fzero.simulate(step, before, stage=stage, donate=False)(*start, x)
    save(tmp_path, middle, step=1)
    uninterrupted = go(middle, before)
    assert_equal(go(load(tmp_path, start), before), uninterrupted)
    elsewhere = fzero.partition(params, other, unit=256)
    got = go(load(tmp_path, (elsewhere, OPTIMIZERS[optimizer].init(elsewhere))), other)
    if optimizer == "adamw":  # rounding turns a sign, or a step of 8 bits, in the others
        torch.testing.assert_close(got, uninterrupted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[-1], uninterrupted[-1], rtol=1e-2, atol=0)


# Leaves.


def test_leaves_of_every_kind(tmp_path: Path) -> None:
    dtypes = {*DTYPES.values(), *OTHERS.values()}
    tensors = {str(dtype): torch.arange(30).to(torch.float32).to(dtype).view(5, 6) for dtype in dtypes}
    numbers = {
        "inf": float("inf"),
        "tenth": 0.1,
        "int": -(10**30),
        "bool": True,
        "complex": 1 - 2j,
        "text": "ö\n'\"",
        "": 1,
    }
    array = numpy.arange(6.0).reshape(2, 3).T
    sharded = fzero.partition(tensors, VirtualMesh(fsdp=3))
    save(tmp_path, (tensors, sharded, numbers, array, [None, ()]), step=0)
    *got, found, _ = load(tmp_path, (tensors, sharded, numbers, array, [None, ()]))
    assert_equal(whole(got), [tensors, tensors, numbers])
    assert isinstance(found, numpy.ndarray) and found.dtype == array.dtype and (found == array).all()
    *_, found, _ = load(tmp_path, (tensors, sharded, numbers, array, [None, ()]), VirtualMesh(fsdp=2))
    assert isinstance(found, Sharded) and (whole(found).numpy() == array).all()


def test_a_nan_keeps_its_bits_and_a_float_its_sign(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800123, -0x80000000, 1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    save(tmp_path, {"x": bits, "nan": float("nan"), "zero": -0.0}, step=0)
    got = load(tmp_path, {"x": torch.zeros(4), "nan": 0.0, "zero": 0.0})
    assert got["x"].view(torch.int32).equal(bits.view(torch.int32)) and got["nan"] != got["nan"]
    assert str(got["zero"]) == "-0.0"


def test_a_frozen_parameter_and_an_embedding_keep_their_marks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    params, _ = fzero.lower(model)
    save(tmp_path, fzero.partition(params, VirtualMesh(fsdp=2)), step=0)
    got = load(tmp_path, params, VirtualMesh(fsdp=3))
    assert_equal(whole(got), whole(fzero.partition(params, VirtualMesh(fsdp=3))))
    assert [leaf.leaf.is_frozen for leaf in tree.leaves(got)] == [False, True, True]
    assert tree.leaves(got)[0].leaf.is_embedding
    assert all(not leaf.requires_grad for leaf in tree.leaves(load(tmp_path, params))[1:])


def test_like_may_have_no_values_at_all(tmp_path: Path) -> None:
    state, mesh = make(), VirtualMesh(fsdp=4)
    save(tmp_path, place(state, VirtualMesh(fsdp=3)))
    meta = tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, state)
    for like in (place(meta, mesh), place(meta, VirtualMesh(fsdp=2))):
        got = load(tmp_path, like, mesh)
        assert_equal(whole(got), state)
        assert {leaf.on.mesh for leaf in tree.leaves(got) if isinstance(leaf, Sharded)} == {mesh}
    assert_equal(load(tmp_path, meta), state)


def test_a_load_into_the_memory_of_what_it_is_given(tmp_path: Path) -> None:
    """Leaves that share memory, that are donated already, or that lie on the meta device get memory of their own."""
    mesh = VirtualMesh(fsdp=3)
    trees = [fzero.partition({str(i): torch.randn(7, 5), "one": torch.tensor(1.0 + i)}, mesh) for i in range(4)]
    save(tmp_path, trees, step=1)
    like = [tree.map(lambda x: x.with_local(torch.zeros_like(x.local)), each) for each in trees]
    shared, donated, meta = like[1]["1"], like[2]["2"], like[3]["3"]
    like[0]["0"] = like[0]["0"].with_local(shared.local)
    addresses = [x.local.data_ptr() for x in tree.leaves(like[:3])]
    held = donated.local  # or another tensor might get its address
    donated.give_up()
    like[3]["3"] = meta.with_local(meta.local.to("meta"))
    got = load(tmp_path, like, donate=True)
    assert_equal(whole(got), whole(trees))
    assert all(x.is_donated for x in tree.leaves(like) if x is not like[3]["3"])
    kept = [x.local.data_ptr() == at for x, at in zip(tree.leaves(got), addresses)]
    assert kept == [True, True, False, True, False, True] and held.numel()
    with pytest.raises(FzeroError, match="was donated"):
        whole(like)


def test_slices_that_overlap_do_not_both_give_their_memory(tmp_path: Path) -> None:
    params = fzero.partition({"a": torch.randn(10), "b": torch.randn(8)}, VirtualMesh(fsdp=1))
    save(tmp_path, params, step=1)
    memory = torch.zeros(12)
    like = {"a": params["a"].with_local(memory[:10]), "b": params["b"].with_local(memory[4:])}
    assert_equal(whole(load(tmp_path, like, donate=True)), whole(params))


def test_bad_input_leaves_what_was_to_be_donated(tmp_path: Path) -> None:
    params = fzero.partition({"x": torch.ones(6)}, VirtualMesh(fsdp=2))
    save(tmp_path, params, step=1)
    for like in ({"y": params["x"]}, {"x": fzero.partition(torch.ones(5), VirtualMesh(fsdp=2))}):
        with pytest.raises(FzeroError):
            load(tmp_path, like, donate=True)
        assert whole(like)


def test_a_part_of_a_state_is_loaded(tmp_path: Path) -> None:
    state = make()
    save(tmp_path, place(state, VirtualMesh(fsdp=3)))
    with pytest.raises(FzeroError, match="has 1[0-9] leaves that `like` lacks"):
        load(tmp_path, State(params=state.params))
    assert_equal(load(tmp_path, State(params=state.params), strict=False), State(params=state.params))


def test_sources_of_a_checkpoint_are_read_by_range(tmp_path: Path) -> None:
    params = {"w": torch.randn(64, 64), "b": torch.randn(9)}
    save(tmp_path, fzero.partition(params, VirtualMesh(fsdp=3)), step=2, metadata={"note": [1, "x"]})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.metadata, sorted(checkpoint)) == (2, {"note": [1, "x"]}, ["b", "w"])
    out = torch.empty(100)
    checkpoint["w"].read(1350, out)
    assert out.equal(params["w"].view(-1)[1350:1450]) and checkpoint.nbytes_read == 400
    half = fzero.partition(dict(checkpoint), VirtualMesh(fsdp=2), dtype=torch.float16)
    assert_equal(whole(half), tree.map(Tensor.half, params))


# The folder.


def test_each_leaf_is_written_once_and_copies_share_the_work(tmp_path: Path) -> None:
    params = {str(i): torch.randn(40, 25) for i in range(8)}
    save(tmp_path, fzero.partition(params, VirtualMesh(replica=4, fsdp=2)), step=1)
    sizes = [sum(x.nbytes for x in load_file(tmp_path / f"step-1/rank-{n:05}.safetensors").values()) for n in range(8)]
    assert sum(sizes) == sum(x.nbytes for x in params.values())
    assert max(sizes) <= 2 * 4 * (500 + 16)  # two leaves a copy, half of each a rank


def test_sums_are_those_of_the_files(tmp_path: Path) -> None:
    save(tmp_path, place(make(), VirtualMesh(fsdp=2)), step=1, sha256=True)
    for number, file in enumerate(open_checkpoint(tmp_path).manifest.files):
        data = (tmp_path / f"step-1/rank-{number:05}.safetensors").read_bytes()
        assert file == (len(data), f"{zlib.crc32(data):08x}", hashlib.sha256(data).hexdigest())


def test_a_file_is_larger_than_what_is_written_at_a_time(tmp_path: Path) -> None:
    numel = (writing.BEHIND_NBYTES + writing.PIECE_NBYTES) // 8 + 3
    state = {"large": torch.arange(numel), "columns": torch.arange(1 << 18).view(512, 512).t(), "small": torch.ones(5)}
    save(tmp_path, state, step=1)
    verify(tmp_path)
    loaded = load(tmp_path, state)
    assert all(torch.equal(loaded[name], x) for name, x in state.items())


def test_the_latest_of_a_few_is_kept(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    for step in (1, 9, 10, 11):
        save(tmp_path, {"x": torch.full((3,), float(step))}, step=step, keep=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "step-10", "step-11"]
    assert latest(tmp_path) == 11
    like = {"x": torch.zeros(3)}
    assert load(tmp_path, like)["x"][0] == 11 and load(tmp_path, like, step=10)["x"][0] == 10
    with pytest.raises(FzeroError, match="has no checkpoint 9, only 10, 11"):
        load(tmp_path, like, step=9)


def test_a_step_that_goes_back_keeps_its_checkpoint(tmp_path: Path) -> None:
    for step in (5, 6, 2):
        save(tmp_path, {"x": torch.ones(3)}, step=step, keep=1)
    assert latest(tmp_path) == 2


def test_a_load_inside_of_a_step_is_refused(tmp_path: Path) -> None:
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition({"w": torch.ones(4)}, mesh)
    save(tmp_path, params, step=1)
    with pytest.raises(FzeroError, match=r"^w: is inside of a step, where it has no values"):
        fzero.simulate(lambda params: load(tmp_path, params), mesh)(params)


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.zeros(3)}, step=1)
    with pytest.raises(FzeroError, match=r"step-1: is there already; give another step, or overwrite=True"):
        save(tmp_path, {"x": torch.ones(3)}, step=1)
    assert load(tmp_path, {"x": torch.ones(3)})["x"].sum() == 0
    save(tmp_path, {"x": torch.ones(3)}, step=1, overwrite=True)
    assert load(tmp_path, {"x": torch.ones(3)})["x"].sum() == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "step-1"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the thread
@pytest.mark.parametrize(
    "state, how, message",
    [
        ({"x": torch.ones(2)}, {}, r"step: is None, not a whole number.*give save\(\.\.\., step=n\)"),
        ({"x": torch.ones(2)}, {"step": -1}, "step: is -1"),
        ({"x": torch.ones(2)}, {"step": 1.0}, "step: is 1.0"),
        ({"x": torch.ones(2)}, {"step": 1, "keep": 0}, "keep: is 0; keep at least 1"),
        (
            {"x": torch.ones(2)},
            {"step": 1, "metadata": {"a": {1}}},
            r"metadata\.a: is \{1\}, a set; metadata are values of JSON",
        ),
        ({"x": object()}, {"step": 1}, "x: is a object: a checkpoint holds tensors"),
        ({"x": torch.ones(2, device="meta")}, {"step": 1}, "x: is on the meta device"),
        ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, {"step": 1}, "a.b: 2 leaves have this path"),
        (
            [fzero.partition({"x": torch.ones(4)}, VirtualMesh(fsdp=n)) for n in (2, 3)],
            {"step": 1},
            "1.x: lies on .*: other process groups",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused(state: Any, how: dict[str, Any], message: str, tmp_path: Path) -> None:
    for wait in (True, False):
        with pytest.raises(FzeroError, match=message):
            save(tmp_path, state, wait=wait, **how).wait()
    assert latest(tmp_path) is None


# Without waiting.


def test_the_values_are_those_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Ten steps write into the memory of the saved values before the thread may write the file."""
    mesh, optimizer = VirtualMesh(fsdp=2), OPTIMIZERS["adamw"]
    params = fzero.partition(layers(), mesh)
    state: Any = params, optimizer.init(params)
    expected = whole(fzero.tree.map(lambda x: x.with_local(x.local.clone()), state))
    gate = threading.Event()
    step = fzero.simulate(training(optimizer, loss), mesh)
    with hold_back(gate):
        saving = save(tmp_path, state, step=1, wait=False)
        for _ in range(10):
            *state, _ = step(*state, torch.ones(4, 5))
        assert not saving.is_done and "under way" in repr(saving)
        gate.set()
        saving.wait()
    assert "done" in repr(saving)
    like = fzero.partition(layers(), mesh)
    assert_equal(whole(load(tmp_path, (like, optimizer.init(like)))), tuple(expected))


def test_the_next_save_waits_for_the_last_and_one_buffer_is_used_again(tmp_path: Path) -> None:
    params = fzero.partition({"x": torch.randn(100)}, VirtualMesh(fsdp=2))
    gate = threading.Event()
    with hold_back(gate):
        first = save(tmp_path, params, step=1, wait=False)
        threading.Timer(0.2, gate.set).start()
        second = save(tmp_path, params, step=2, wait=False)
    assert first.is_done and latest(tmp_path) in (1, 2)
    second.wait()
    assert latest(tmp_path) == 2


def test_a_failure_of_the_thread_is_raised_by_the_next_call_once(tmp_path: Path) -> None:
    params = fzero.partition({"x": torch.randn(100)}, VirtualMesh(fsdp=2))
    failing = mock.patch.object(writing, "give_name", side_effect=OSError(errno.EIO, "broken disk"))
    with failing, pytest.warns(RuntimeWarning, match="broken disk"):
        save(tmp_path, params, step=1, wait=False)
        with pytest.raises(FzeroError, match=r"step-1: rank 0 could not save: OSError.*broken disk"):
            save(tmp_path, params, step=2)
    save(tmp_path, params, step=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "step-3"]


def test_a_save_holds_nothing_of_the_state_when_it_is_done(tmp_path: Path) -> None:
    leaf = torch.randn(10)
    before = sys.getrefcount(leaf)
    saving = save(tmp_path, {"x": leaf}, step=1)
    assert sys.getrefcount(leaf) == before and saving.seconds.keys() == {"plan", "checksum", "write", "sync"}


@contextmanager
def hold_back(gate: threading.Event) -> Iterator[None]:
    """Saves write nothing before the gate is open."""
    with mock.patch.object(writing, "check_free", lambda *args: gate.wait(60)):
        yield


# Real ranks.


def build(mesh: Any) -> tuple[Any, Any]:
    params = fzero.partition(layers(2, width=WIDTH), mesh, unit=256)
    return params, OPTIMIZERS["adamw8bit"].init(params)


def save_from_ranks(mesh: DeviceMesh, path: Path) -> Any:
    """A replica axis of two where there are four ranks; saved with and without waiting, while steps go on."""
    if mesh.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    state: Any = build(mesh)
    step = fzero.shard(training(OPTIMIZERS["adamw8bit"], loss), mesh)
    x = torch.ones(1, WIDTH)
    *state, _ = step(*state, x)
    save(path, state, step=1)
    *state, _ = step(*state, x)
    saved = whole(state)
    pending = save(path, state, step=2, wait=False, keep=2)
    for _ in range(3):
        *state, _ = step(*state, x)
    pending.wait()
    again = save(path, state, step=3, wait=False)
    again.wait()
    local, seen = state[0]["layers"][0]["w"].local, list[Tensor]()
    before = local.clone()
    live(mesh).readers.append(lambda: seen.append(local.clone()))  # as a copy from a GPU, which is under way
    loaded = load(path, state, step=3)
    final = whole(state)
    step(*state, x)
    (copied,) = seen
    assert copied.equal(before) and not local.equal(before)  # the step wrote over the memory, after the copy
    return saved, whole(loaded), final


def load_on_ranks(mesh: DeviceMesh, path: Path) -> Any:
    """What is loaded, and the bytes that this rank read and that it holds."""
    like, read, nbytes = build(mesh), TensorFile.read, list[int]()

    def count(self: TensorFile, *args: Any) -> None:
        before = self.nbytes_read
        read(self, *args)
        nbytes.append(self.nbytes_read - before)

    with mock.patch.object(TensorFile, "read", count):
        got = load(path, like, step=2)
    return whole(got), sum(nbytes), sum(leaf.local.nbytes for leaf in tree.leaves(got))


def move_on_disk(mesh: DeviceMesh, path: Path, saved: Path) -> Any:
    """State on disks that ranks send, gather, save, load for another number of ranks, and edit; each beside the same
    state in memory."""
    rank, disk = mesh.get_rank(), path / f"disk-{mesh.get_rank()}"
    disk.mkdir(parents=True)
    place, given = fzero.disk(disk), layers(2, width=WIDTH)
    absent = tree.map(lambda x: x.to("meta"), given)
    params = fzero.partition(given if rank == 1 else absent, mesh, to=place, source_rank=1, chunk=256)
    loaded = load(saved, tree.map(lambda x: x.at(place), build(mesh)), step=2)
    save(path / "run", (params, loaded), step=1, wait=False).wait()
    fzero.save_safetensors(params, path / "model.safetensors")
    read = fzero.load_safetensors(path / "model.safetensors", absent, mesh, to=place, chunk=256)
    built, _ = fzero.build(lambda: nn.Linear(48, 48), mesh, to=place)
    known, _ = fzero.build(lambda: nn.Linear(48, 48), mesh)
    edited = fzero.update_leaf(read, "layers.0.w", lambda w: torch.cat([w, w]))
    chunks = [values for _, (_, values) in fzero.iter_full(params, chunk=100)]
    assert torch.equal(torch.cat(chunks), torch.cat([x.reshape(-1) for x in tree.leaves(given)]))
    assert_equal(whole(edited), whole(fzero.update_leaf(params, "layers.0.w", lambda w: torch.cat([w, w]))))
    assert_equal(whole(built), whole(known))
    assert_equal(whole(load(path / "run", (read, loaded), step=1)), (given, whole(loaded)))
    on_rank = fzero.unpartition(params, rank=2)
    assert rank != 2 or (assert_equal(on_rank, given) is None)
    assert {leaf.place for leaf in tree.leaves((params, read, built, edited))} == {place}
    return whole(loaded)


def refuse_other_trees(mesh: DeviceMesh, path: Path) -> Any:
    params = fzero.partition({"x": torch.ones(8)}, mesh)
    rank = mesh.get_rank()
    found = [
        refusal(lambda: save(path / "trees", (params, 1 + rank), step=1)),
        refusal(lambda: save(path / "tensors", (params, torch.full((3,), float(rank))), step=1)),
        refusal(lambda: save(path / "leaves", (params, *[1] * rank), step=1)),
        refusal(lambda: save(path / "failing", (params, object()) if rank else (params, 1), step=1)),
        refusal(lambda: load(path / "nowhere", params)),
    ]
    save(path / "trees", params, step=1)
    found.append(refusal(lambda: load(path / "trees", (params, 1) if rank else params)))
    found.append(refusal(lambda: load(path / "trees", params, step=[None, 2, 1][rank])))
    return found, latest(path / "trees"), sorted(file.name for file in (path / "trees").iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[int, dict[str, list[Outcome]]]:
    saves = {n: run_cases(n, {"save": functools.partial(save_from_ranks, path=folder / str(n))}) for n in (2, 4)}
    cases = {str(n): functools.partial(load_on_ranks, path=folder / str(n)) for n in (2, 4)}
    cases["disk"] = functools.partial(move_on_disk, path=folder / "on-disk", saved=folder / "2")
    loads = run_cases(3, cases | {"refuse": functools.partial(refuse_other_trees, path=folder / "refused")})
    return {**saves, 3: loads}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_save_and_others_load(world: int, outcomes: dict[int, dict[str, list[Outcome]]], folder: Path) -> None:
    for saved, loaded, state in values(outcomes[world]["save"]):
        assert_equal(loaded, state)
        for got, read, held in values(outcomes[3][str(world)]):
            assert_equal(got, tuple(saved))
            assert read == held
    assert verify(folder / str(world)) == 3
    assert sorted(file.name for file in (folder / str(world)).iterdir()) == [".lock", "step-1", "step-2", "step-3"]


def test_ranks_move_state_on_disks_as_state_in_memory(outcomes: dict[int, dict[str, list[Outcome]]]) -> None:
    for on_disk, (in_memory, _, _) in zip(values(outcomes[3]["disk"]), values(outcomes[3]["2"]), strict=True):
        assert_equal(on_disk, in_memory)


def test_a_mistake_of_one_rank_is_an_error_on_all(outcomes: dict[int, dict[str, list[Outcome]]]) -> None:
    expected = (
        r"step-1: ranks save different trees: rank 0 has 1: int 1, rank 1 has 1: int 2; give save the same tree",
        r"step-1: ranks save different trees: rank 0 has 1: F32\[3\] .*, rank 1 has 1: F32\[3\]",
        r"step-1: ranks save different trees: rank 0 has 0.x: F32\[8\].*, rank 1 has 1: int 1;",
        r"step-1: ranks 1, 2 could not save: 1: is a object: a checkpoint holds tensors",
        r"nowhere: ranks 0, 1, 2 could not load: .*has no checkpoint",
        r"trees: ranks 1, 2 could not load: .*step-1: lacks 2 leaves of `like`: 0.x, 1; has 1 leaves .* lacks: x",
        r"ranks 0, 1 could not load: .*no checkpoint 2.*, rank 2 could not load: step: is 1, another rank loads 2",
    )
    for found, step, names in values(outcomes[3]["refuse"]):
        for message, got in zip(expected, found, strict=True):
            assert got.kind == "FzeroError" and re.search(message, got.message), got
        assert (step, names) == (1, [".lock", "step-1"])
