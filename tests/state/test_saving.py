"""Saving to one safetensors file: its content, the bytes that each rank writes, and the files after a failure."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from processes import Outcome, refusal, run, run_cases, values
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.state.partition import partition
from fzero.state.publishing import TEMPORARY
from fzero.state.safetensors import load_safetensors, open_safetensors, save_safetensors
from fzero.state.safetensors.header import DTYPES
from fzero.state.sources import SAMPLE, TensorSource
from fzero.state.unpartition import unpartition

MESH = VirtualMesh(fsdp=3)


def params() -> tree.Tree:
    """Two buckets; rank boundaries fall inside of leaves, and one leaf is empty."""
    numbers = torch.arange(200.0)
    return {
        "blocks": [{"w": numbers[:77].view(7, 11), "b": torch.zeros(0, 2)}],
        "head": {"w": numbers[77:130].bfloat16(), "n": numbers[130].to(torch.int64)},
    }


def flat(values: tree.Tree) -> dict[str, Tensor]:
    return dict(zip(tree.paths(values), tree.leaves(values)))


def assert_holds(file: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(file)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].equal(tensor), key


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# One process.


@pytest.mark.parametrize("chunk", [8, 10, 2**25])
def test_a_partitioned_tree_is_saved_whole(tmp_path: Path, chunk: int) -> None:
    save_safetensors(partition(params(), MESH), tmp_path / "x.safetensors", chunk=chunk)
    assert_holds(tmp_path / "x.safetensors", flat(params()))
    assert files(tmp_path) == ["x.safetensors"]


def test_a_file_is_the_reference_s_byte_for_byte(tmp_path: Path) -> None:
    tensors = {name.lower(): torch.arange(15).to(dtype).view(3, 5) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "nothing": torch.zeros(2, 0), 'sch"ön\n.1': torch.ones(3).half()}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    save_safetensors(partition(tensors, MESH), tmp_path / "ours.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_tree_without_leaves(tmp_path: Path) -> None:
    save_safetensors({}, tmp_path / "x.safetensors")
    assert_holds(tmp_path / "x.safetensors", {})


@pytest.mark.parametrize("chunk", [8, 2**25])
def test_plain_leaves_of_any_kind_are_saved_beside_sharded_ones(tmp_path: Path, chunk: int) -> None:
    w = partition({"w": torch.arange(8.0)}, MESH)["w"]
    plain = {
        "step": torch.tensor(3),
        "strided": torch.arange(12.0).view(3, 4).mT,
        "expanded": torch.tensor([1, 2]).expand(3, 2),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    sources = {"source": TensorSource(torch.arange(5.0), dtype=torch.float16), "array": numpy.arange(3).reshape(3, 1)}
    save_safetensors({"w": w, **plain, **sources}, tmp_path / "x.safetensors", chunk=chunk)
    expected = {key: value.resolve_conj().resolve_neg() for key, value in plain.items()}
    expected |= {"source": torch.arange(5).half(), "array": torch.arange(3).view(3, 1), "w": torch.arange(8.0)}
    assert_holds(tmp_path / "x.safetensors", expected)


def test_values_that_every_rank_holds_are_saved_once(tmp_path: Path) -> None:
    like = partition({"w": torch.arange(8.0)}, MESH)
    state = partition({"mu": {"w": torch.ones(8)}, "count": torch.tensor(7)}, MESH, like=like)
    assert state["count"].form.layout.replicated
    save_safetensors(state, tmp_path / "x.safetensors")
    assert_holds(tmp_path / "x.safetensors", {"mu.w": torch.ones(8), "count": torch.tensor(7)})


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    for value in (torch.ones(9), torch.zeros(2)):
        save_safetensors({"w": value}, tmp_path / "x.safetensors")
        assert_holds(tmp_path / "x.safetensors", {"w": value})


def test_a_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    save_safetensors({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "y").touch()
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    save_safetensors(params(), tmp_path / "x.safetensors")
    assert_holds(tmp_path / "x.safetensors", flat(params()))


@pytest.mark.parametrize(
    ("values", "metadata", "problem"),
    [
        ({"w": torch.ones(2, dtype=torch.complex128)}, {}, r"^w: safetensors has no torch.complex128, only U64, I64"),
        ({"__metadata__": torch.ones(2)}, {}, r"^__metadata__: safetensors keeps this key for its metadata"),
        ({"w": torch.ones(2)}, {"step": 3}, r"^__metadata__: has 'step': 3; metadata are strings by strings"),
        ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, {}, r"^a\.b: 2 leaves have this path"),
        ({"w": 0.5}, {}, r"^w: is a float, not a tensor"),
        ({"w": torch.empty(2, device="meta")}, {}, r"^w: is on the meta device"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, values: Any, metadata: Any, problem: str) -> None:
    with pytest.raises(FzeroError, match=problem):
        save_safetensors(values, tmp_path / "x.safetensors", metadata=metadata)
    assert files(tmp_path) == []


def test_leaves_of_several_meshes_are_refused(tmp_path: Path) -> None:
    values = {"v": partition({"v": torch.ones(2)}, MESH)["v"], "w": partition(torch.ones(2), VirtualMesh(fsdp=2))}
    with pytest.raises(FzeroError, match=r"lies on VirtualMesh\(fsdp=2\), v on VirtualMesh\(fsdp=3\)"):
        save_safetensors(values, tmp_path / "x.safetensors")


def test_saving_inside_of_a_step_is_refused(tmp_path: Path) -> None:
    def step(params: tree.Tree) -> tree.Tree:
        save_safetensors(params, tmp_path / "x.safetensors")
        return params

    with pytest.raises(FzeroError, match=r"w: is saved inside of a step, where it has no values"):
        fzero.simulate(step, MESH)(partition({"w": torch.ones(4)}, MESH))


# Failure.


@pytest.mark.parametrize("old", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:
        save_safetensors({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    with (
        full_disk(),
        pytest.raises(FzeroError, match=r"x\.safetensors: rank 0 could not write it: OSError: .*No space"),
    ):
        save_safetensors(params(), tmp_path / "x.safetensors")
    assert files(tmp_path) == ["x.safetensors"] * old
    if old:
        assert_holds(tmp_path / "x.safetensors", {"w": torch.ones(2)})


@contextmanager
def full_disk() -> Iterator[None]:
    """Within the block, the disk has no space behind byte 400 of a file."""
    pwrite = os.pwrite

    def writing(fd: int, data: memoryview, offset: int) -> int:
        if offset > 400:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    with mock.patch("os.pwrite", writing):
        yield


def save_with_a_limit(mesh: DeviceMesh, path: Path) -> str:
    """The error of a process that may write no file so large."""
    dist.destroy_process_group()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    return refusal(lambda: save_safetensors({"w": torch.ones(2**16)}, path)).message


def test_a_file_larger_than_the_system_allows(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("old")
    (message,) = run(1, save_with_a_limit, tmp_path / "x.safetensors", lost=())
    assert "x.safetensors: rank 0 could not write it: OSError: [Errno 27] File too large" in message
    assert files(tmp_path) == ["x.safetensors"] and (tmp_path / "x.safetensors").read_text() == "old"


def test_until_its_header_is_written_a_file_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, seen = os.pwrite, []

    def watching(fd: int, data: memoryview, offset: int) -> int:
        with pytest.raises(FzeroError, match="its header is not the JSON of a table"):
            open_safetensors(next(tmp_path.iterdir()))
        seen.append(offset)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", watching)
    save_safetensors(params(), tmp_path / "x.safetensors")
    assert len(seen) == 4 and seen[-1] == 0


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_safetensors(params(), tmp_path / "x.safetensors")
    assert files(tmp_path) == []


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_chunk_without_an_element(tmp_path: Path, chunk: int) -> None:
    with pytest.raises(FzeroError, match=rf"chunk: is {chunk} bytes, an element 8; give some megabytes"):
        save_safetensors({"n": torch.arange(3)}, tmp_path / "x.safetensors", chunk=chunk)
    assert files(tmp_path) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"rank 0 could not write it: FileNotFoundError"):
        save_safetensors(params(), tmp_path / "none" / "x.safetensors")


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"is a directory; give the path of a file"):
        save_safetensors(params(), tmp_path)


# Two ranks.


def saved(file: Path, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Saves on a mesh of two ranks; returns the offsets and sizes of this rank's writes."""
    like = partition(params(), mesh)
    count = partition({"count": torch.tensor(7)}, mesh, like=like)
    with written() as spans:
        save_safetensors({**like, **count, "plain": torch.ones(3, 2).mT}, file, chunk=16)
    return spans


@contextmanager
def written() -> Iterator[list[tuple[int, int]]]:
    pwrite, spans = os.pwrite, []

    def noting(fd: int, data: memoryview, offset: int) -> int:
        spans.append((offset, len(data)))
        return pwrite(fd, data, offset)

    with mock.patch("os.pwrite", noting):
        yield spans


def saved_by_replicas(file: Path, mesh: DeviceMesh) -> list[tuple[int, int]]:
    return saved(file, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "fsdp")))


def full_on_one(file: Path, mesh: DeviceMesh) -> str:
    if mesh.get_rank() == 0:
        save_file({"w": torch.ones(2)}, file)
    values = partition(params(), mesh)
    with full_disk() if mesh.get_rank() == 1 else written():
        return refused(lambda: save_safetensors(values, file))


def different_trees(file: Path, mesh: DeviceMesh) -> str:
    values = partition(params(), mesh)
    return refused(lambda: save_safetensors(values, file, metadata={"rank": str(mesh.get_rank())}))


def donated_on_one(file: Path, mesh: DeviceMesh) -> str:
    values = partition(params(), mesh)
    if mesh.get_rank() == 1:
        values["head"]["w"]._local = None
    return refused(lambda: save_safetensors(values, file))


def loaded(file: Path, mesh: DeviceMesh) -> tuple[dict[str, Tensor], int]:
    """Saves and loads on a mesh of two ranks; returns the whole values, and the bytes that this rank read."""
    save_safetensors(partition(params(), mesh), file)
    opened = open_safetensors(file)
    values = load_safetensors(opened, tree.map(lambda leaf: leaf.to("meta"), params()), mesh)
    assert all(tree.leaves(tree.map(lambda a, b: a.local.equal(b.local), values, partition(params(), mesh))))
    return flat(unpartition(values)), opened["head.n"].file.nbytes_read


def refused(save: Callable[[], None]) -> str:
    with pytest.raises(FzeroError) as caught:
        save()
    return str(caught.value)


CASES = {
    case.__name__: case for case in (saved, saved_by_replicas, full_on_one, different_trees, donated_on_one, loaded)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    return run_cases(2, {name: partial(case, folder / f"{name}.safetensors") for name, case in CASES.items()})


def all_of_it() -> dict[str, Tensor]:
    return {**flat(params()), "count": torch.tensor(7), "plain": torch.ones(2, 3)}


def test_ranks_save_their_own_parts(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    spans = values(outcomes["saved"])
    assert_holds(folder / "saved.safetensors", all_of_it())
    assert spans[0].pop()[0] == 0  # the header, last of all
    places = sorted(span for rank in spans for span in rank)
    assert all(start + size == after for (start, size), (after, _) in pairwise(places))  # each byte once
    assert max(size for _, size in places) == 16
    mine = [sum(size for _, size in rank) for rank in spans]
    # Buckets of 77 float32, 53 bfloat16 and 1 int64 elements are cut at 48, 32 and 16; rank 0 also has the rest.
    assert mine == [48 * 4 + 32 * 2 + 8 + 8 + 6 * 4, 29 * 4 + 21 * 2]


def test_of_replicas_the_first_saves(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    first, second = values(outcomes["saved_by_replicas"])
    assert_holds(folder / "saved_by_replicas.safetensors", all_of_it())
    assert first and not second


def test_ranks_load_their_own_parts(outcomes: dict[str, list[Outcome]]) -> None:
    found, nbytes = zip(*values(outcomes["loaded"]))
    for rank in found:
        assert rank.keys() == flat(params()).keys()
        assert all(rank[path].equal(leaf) for path, leaf in flat(params()).items())
    sample = sum(leaf.dtype.itemsize * min(leaf.numel(), SAMPLE) for leaf in flat(params()).values())
    assert nbytes == (48 * 4 + 32 * 2 + 8 + sample, 29 * 4 + 21 * 2 + sample)


def test_when_one_rank_s_disk_is_full_every_rank_says_so(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    file = folder / "full_on_one.safetensors"
    first, second = values(outcomes["full_on_one"])
    assert first == second
    assert first.startswith(f"{file}: rank 1 could not write it: OSError: [Errno 28] No space left on device; what was")
    assert_holds(file, {"w": torch.ones(2)})


def test_ranks_with_different_trees_refuse(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    told = "ranks save different trees: rank 0 has metadata rank: 0, rank 1 has metadata rank: 1; give save_safetensors"
    assert all(told in error for error in values(outcomes["different_trees"]))


def test_a_leaf_that_one_rank_lost_is_named_on_all(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    for error in values(outcomes["donated_on_one"]):
        assert "rank 1 could not write it: head.w: this value was donated" in error


def test_a_failed_save_leaves_no_file(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    assert files(folder) == [f"{name}.safetensors" for name in ("full_on_one", "loaded", "saved", "saved_by_replicas")]


# a save that is killed


class Deadly:
    """A source whose process ends while it is read."""

    shape, dtype, path = torch.Size([4]), torch.float32, "deadly"

    def read(self, start: int, out: Tensor) -> None:
        if out.numel():
            os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(mesh: DeviceMesh, folder: Path) -> str:
    """The first rank, which writes what all ranks hold, is killed."""
    values = {"w": partition({"w": torch.arange(1000.0)}, mesh)["w"], "deadly": Deadly()}
    with pytest.raises(FzeroError) as caught:
        save_safetensors(values, folder / "step-1.safetensors")
    return str(caught.value)


def test_a_killed_save_leaves_nothing_behind_the_next(tmp_path: Path) -> None:
    _, told = run(2, killed_while_saving, tmp_path, lost=[0])
    assert "rank 0 died or left" in told
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(TEMPORARY) and left.stat().st_size > 4000
    save_safetensors({"w": torch.ones(3)}, tmp_path / "step-2.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["step-2.safetensors"]


def test_a_save_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    theirs, ours = tmp_path / f".other.safetensors.1234{TEMPORARY}", tmp_path / "ours.safetensors"
    with open(theirs, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save_safetensors({"w": torch.ones(3)}, ours)
        assert sorted(tmp_path.iterdir()) == sorted([theirs, ours])
    save_safetensors({"w": torch.ones(3)}, ours)
    assert [*tmp_path.iterdir()] == [ours]
