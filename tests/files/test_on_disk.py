"""Tensors on disk: what is written is read, functions of torch give what they give in memory, the rest is refused."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.placement import Disk
from fzero.files import OnDisk, allocate, read, write

CUTS = ((0, 5000), (1, 2), (1000, 3048), (1023, 4097), (4999, 5000), (7, 7))


def put(path: Path, values: Tensor, leaf: str = "blocks.0.up") -> OnDisk:
    """A tensor on disk with these values."""
    made = allocate(Disk(path), values.dtype, values.numel(), 0, "blocks.0", leaf)
    write([values], [made]).wait()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(5000).to(dtype)
    made = put(tmp_path, values)
    assert (made.shape, made.dtype, made.device, made.is_meta) == ((5000,), dtype, torch.device("cpu"), False)
    assert torch.equal(read([made]).wait()[0], values)
    for start, stop in CUTS:
        assert torch.equal(made[start:stop].clone(), values[start:stop])


def test_values_longer_than_the_blocks_of_a_thread(tmp_path: Path) -> None:
    values = torch.arange((9 << 20) // 4 + 5, dtype=torch.int32)
    made = put(tmp_path, values)
    part = made[3:-7]
    part.copy_(values[3:-7] + 1)
    expected = torch.cat([values[:3], values[3:-7] + 1, values[-7:]])
    assert torch.equal(made.clone(), expected)
    assert made.extent.store.counts == (values.nbytes, values.nbytes + part.nbytes)


@pytest.mark.parametrize(("start", "stop"), CUTS)
def test_a_slice_is_written_and_its_neighbours_stay(tmp_path: Path, start: int, stop: int) -> None:
    values = torch.arange(5000.0)
    made = put(tmp_path, values)
    behind = put(tmp_path, values, "blocks.0.down")
    made[start:stop].fill_(-1)
    values[start:stop] = -1
    assert torch.equal(made.clone(), values)
    assert torch.equal(behind.clone(), torch.arange(5000.0))


READS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + 1, "sum": lambda x: x.sum(), "cat": lambda x: torch.cat([x, x[1:3]]),
    "tolist": lambda x: x.tolist(), "cast": lambda x: x.to(torch.float64), "equal": lambda x: int(torch.equal(x, x)),
    "view": lambda x: x.view(-1) * 2, "reshape": lambda x: x.reshape(-1), "detach": lambda x: x.detach(),
    "split": lambda x: torch.cat(x.split(3)), "bits": lambda x: x.view(torch.int32),
    "pinned": lambda x: [x.is_pinned()], "narrow": lambda x: x.narrow(0, 2, 5),
    "zeros": lambda x: torch.zeros_like(x), "cpu": lambda x: x.cpu(),
    "new": lambda x: x.new_zeros(3, dtype=torch.int8), "contiguous": lambda x: x.contiguous(),
    "into": lambda x: torch.zeros(10).copy_(x), "cast into": lambda x: torch.zeros(10, dtype=torch.float64).copy_(x),
    "spread into": lambda x: torch.zeros(2, 10).copy_(x), "into a step": lambda x: torch.zeros(20)[::2].copy_(x),
    "foreach": lambda x: list(torch._foreach_mul([x, x], 2.0)), "deepcopy": copy.deepcopy,
    "meta": lambda x: x.to("meta").numel(), "indexed": lambda x: x[torch.tensor([3, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_functions_that_read_give_what_they_give_in_memory(tmp_path: Path, name: str) -> None:
    values = torch.arange(10.0)
    got, expected = READS[name](put(tmp_path, values)), READS[name](values)
    torch.testing.assert_close(got.clone() if isinstance(got, OnDisk) else got, expected, rtol=0, atol=0)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy": lambda x: x.copy_(torch.arange(10.0) * 3), "cast": lambda x: x.copy_(torch.arange(10)),
    "spread": lambda x: x.copy_(torch.tensor(4.0)), "fill": lambda x: x.fill_(7), "zero": lambda x: x.zero_(),
    "part": lambda x: x[2:5].copy_(torch.ones(3)), "assign": lambda x: x.__setitem__(slice(2, 4), torch.ones(2)),
    "from steps": lambda x: x.copy_(torch.arange(20.0)[::2]), "from itself": lambda x: x[:5].copy_(x[5:]),
    "foreach": lambda x: torch._foreach_copy_([x[:2], x[4:]], [torch.ones(2), torch.ones(6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_functions_that_write_write_the_file(tmp_path: Path, name: str) -> None:
    values = torch.arange(10.0)
    made = put(tmp_path, values)
    WRITES[name](made)
    WRITES[name](values)
    assert torch.equal(made.clone(), values)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda x: x.view(2, 5), "cannot be viewed in the shape"),
    "one element": (lambda x: x[3], "cannot be viewed by aten.select"),
    "steps": (lambda x: x[::2], "cannot be viewed in steps"),
    "in place": (lambda x: x.add_(1), "cannot be written into by aten.add_"),
    "out": (lambda x: torch._foreach_add_([x], 1.0), "cannot be written into by aten._foreach_add_"),
    "address": (lambda x: x.data_ptr(), "has no address in memory"),
    "storage": (lambda x: x.untyped_storage(), "has no storage in memory"),
    "array": (lambda x: x.numpy(), "has no memory for an array"),
    "pickle": (pickle.dumps, "cannot be pickled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_would_write_into_a_copy_are_refused(tmp_path: Path, name: str) -> None:
    function, problem = REFUSED[name]
    with pytest.raises(FzeroError, match=rf"blocks.0.up: lies on disk: it {problem}.*clone\(\)"):
        function(put(tmp_path, torch.arange(10.0)))


def test_room_is_used_again_and_the_file_goes_with_the_last_value(tmp_path: Path) -> None:
    first = put(tmp_path, torch.arange(5000.0))
    file, start = first.extent.file.path, first.extent.start
    part = first[2:4]
    del first
    second = put(tmp_path, torch.zeros(5000))
    assert second.extent.start != start  # a slice holds the extent
    assert torch.equal(part.clone(), torch.tensor([2.0, 3.0]))
    del part
    third = put(tmp_path, torch.ones(10))
    assert (third.extent.start, third.extent.file.path) == (start, file)
    assert file.name == "rank-0.blocks.0" and list(tmp_path.iterdir()) == []
    descriptor = third.extent.file._fd
    del second, third
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_is_on_the_disk_before_it_is_written(tmp_path: Path) -> None:
    made = allocate(Disk(tmp_path), torch.float32, 5000, None, "a/b", "a.b.c")
    assert made.extent.file.path.name == "all-ranks.a%2Fb"
    assert os.fstat(made.extent.file._fd).st_blocks * 512 >= 20480
    assert "OnDisk(float32[5000] at byte 0 of" in repr(made)
