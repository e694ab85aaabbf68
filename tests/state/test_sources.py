"""Sources: ranges of tensors of any strides, of memory-mapped files, and of arrays."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.state.sources import Source, TensorSource, is_source, source_of

LINUX = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps here")
GRID = torch.arange(24.0).view(2, 3, 4)


def read(source: Source, start: int, stop: int, dtype: torch.dtype | None = None) -> list[float]:
    out = torch.empty(stop - start, dtype=dtype or source.dtype)
    source.read(start, out)
    return out.tolist()


def residents(file: Path) -> int:
    """Bytes of this process's resident memory that map a file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_range_is_row_major() -> None:
    assert read(TensorSource(GRID), 5, 18) == list(range(5, 18))


def test_a_range_of_a_transposed_tensor() -> None:
    assert read(TensorSource(GRID.permute(2, 0, 1)), 4, 9) == [16, 20, 1, 5, 9]


def test_a_range_of_an_expanded_tensor_of_any_size() -> None:
    source = TensorSource(torch.tensor([[1.0], [2.0]]).expand(2, 2**40))
    assert read(source, 2**40 - 2, 2**40 + 2) == [1, 1, 2, 2]


def test_a_range_of_a_slice_with_steps() -> None:
    assert read(TensorSource(GRID[:, ::2, 1::2]), 1, 6) == [3, 9, 11, 13, 15]


def test_what_has_no_elements_or_no_dimensions() -> None:
    assert read(TensorSource(torch.zeros(3, 0)), 0, 0) == []
    assert read(TensorSource(torch.tensor(7)), 0, 1) == [7]


def test_values_are_cast_to_what_they_are_read_into() -> None:
    assert read(TensorSource(GRID), 2, 4, torch.int8) == [2, 3]
    out = torch.empty(1, dtype=torch.bfloat16)
    TensorSource(torch.tensor([1 + 2**-9])).read(0, out)
    assert out.item() == 1.0


def test_a_dtype_that_values_count_as_casts_nothing_yet() -> None:
    source = TensorSource(torch.tensor([1 + 2**-9]), dtype=torch.bfloat16)
    assert source.dtype == torch.bfloat16
    assert read(source, 0, 1, torch.float32) == [1 + 2**-9]


def test_only_out_is_written() -> None:
    buffer = torch.full((5,), -1.0)
    TensorSource(GRID.mT).read(3, buffer[1:3])
    assert buffer.tolist() == [-1, 1, 5, -1, -1]


def test_conjugated_values_are_read_as_they_count() -> None:
    out = torch.empty(1, dtype=torch.complex64)
    TensorSource(torch.tensor([1 + 2j]).conj()).read(0, out)
    assert out.item() == 1 - 2j


def test_parameters_are_read_without_a_graph() -> None:
    out = torch.empty(2)
    TensorSource(torch.ones(2, requires_grad=True)).read(0, out)
    assert not out.requires_grad


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (23, 2), (24, 1)])
def test_elements_that_are_not_there_are_refused(start: int, count: int) -> None:
    with pytest.raises(FzeroError, match=rf"(?m)^w: elements \[{start}, {start + count}\) were asked for, it has 24$"):
        TensorSource(GRID, "w").read(start, torch.empty(count))


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.empty(2, device="meta"), "w: is on the meta device"),
        (torch.eye(2).to_sparse(), "w: is a torch.sparse_coo tensor"),
    ],
)
def test_tensors_without_values_at_strides_are_refused(tensor: Tensor, problem: str) -> None:
    with pytest.raises(FzeroError, match=problem):
        source_of(tensor, "w")


def test_a_source_of_a_source_is_itself() -> None:
    source = source_of(GRID, "w")
    assert source_of(source) is source
    assert repr(source) == "TensorSource(w: float32[2, 3, 4])"


def test_tensors_and_arrays_are_no_sources_yet() -> None:
    assert is_source(TensorSource(GRID))
    assert not is_source(GRID) and not is_source(GRID.numpy()) and not is_source(None)


@LINUX
def test_a_mapped_checkpoint_is_read_by_pages(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.arange(2**22).view(2**11, 2**11)}, file)  # 32 MiB
    loaded = torch.load(file, mmap=True)["w"]
    before = residents(file)
    assert read(source_of(loaded), 2**21, 2**21 + 3) == [2**21, 2**21 + 1, 2**21 + 2]
    assert residents(file) - before <= 2**21  # a page fault also loads pages around it


@LINUX
def test_a_mapped_array_is_read_by_pages_without_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    numpy.save(file, numpy.arange(2**22, dtype=numpy.float64).reshape(2**11, 2**11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = source_of(numpy.load(file, mmap_mode="r"))
    before = residents(file)
    assert source.shape == (2**11, 2**11) and source.dtype == torch.float64
    assert read(source, 2**21, 2**21 + 2, torch.float32) == [2**21, 2**21 + 1]
    assert residents(file) - before <= 2**21


def test_a_transposed_array() -> None:
    assert read(source_of(numpy.arange(6).reshape(2, 3).T), 1, 4) == [3, 1, 4]


@pytest.mark.parametrize(
    "array",
    [numpy.arange(3, dtype=">f4"), numpy.arange(3)[::-1], numpy.array(["a"])],
    ids=["byte order", "negative strides", "strings"],
)
def test_arrays_that_torch_cannot_view_are_refused(array: numpy.ndarray) -> None:
    with pytest.raises(FzeroError, match=r"^w: torch cannot view an array of .* with strides .*; give a copy"):
        source_of(array, "w")


@pytest.mark.parametrize("value", [1.5, [GRID], None, numpy.float32(1)])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(FzeroError, match=rf"^w: is a {type(value).__name__}, not a tensor"):
        source_of(value, "w")
