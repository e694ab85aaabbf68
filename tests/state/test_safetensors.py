"""Safetensors files: ranges that are read, files that changed or are damaged, and the leaves of a tree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.state.safetensors import FileSource, TensorFile, load_safetensors, load_sources, open_safetensors
from fzero.state.safetensors.header import DTYPES, MAX_NBYTES, Header, parse_header, plan_header, render_header
from fzero.state.safetensors.transfer import CAST_NBYTES
from fzero.state.sources import Source, TensorSource

W = torch.arange(6.0).view(2, 3)
B = torch.tensor([7, 8], dtype=torch.int64)


def sample(dtype: torch.dtype, *shape: int) -> Tensor:
    """Values that every dtype can hold."""
    values = torch.linspace(0 if dtype in (torch.uint16, torch.uint32, torch.uint64) else -3, 5, 64)
    return values[: torch.Size(shape).numel()].to(dtype).view(shape)


def everything() -> dict[str, Tensor]:
    """A tensor of every dtype, and of unusual shapes."""
    tensors = {name.lower(): sample(dtype, 3, 5) for name, dtype in DTYPES.items()}
    return tensors | {"scalar": torch.tensor(1.5), "nothing": torch.zeros(2, 0), 'sch"ön\n.1': sample(torch.float16, 3)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.ndim and tensor.numel() else tensor


def whole(source: Source, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(source.shape.numel(), dtype=dtype or source.dtype)
    source.read(0, out)
    return out.view(source.shape)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of `w` and `b`."""
    save_file({"w": W, "b": B}, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index."""
    save_file({"w": W}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B, "unused": W}, tmp_path / "model-00002-of-00002.safetensors")
    index(tmp_path, {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def index(folder: Path, weights: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


# Reading.


def test_what_the_reference_writes_is_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = everything()
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    sources = open_safetensors(tmp_path / "x.safetensors")
    assert sources.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (sources[key].dtype, sources[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(whole(sources[key])).equal(bits(tensor))
    assert sources["f32"].file.header.metadata == {"format": "pt"}


def test_an_empty_file_of_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    assert open_safetensors(tmp_path / "x.safetensors") == {}


def test_no_more_is_read_than_is_asked_for(file: Path) -> None:
    w = open_safetensors(file)["w"]
    assert w.file.nbytes_read == 0
    out = torch.full((4,), -1.0)
    w.read(2, out[1:3])
    assert out.tolist() == [-1, 2, 3, -1]
    assert w.file.nbytes_read == 2 * 4


def test_values_are_read_into_any_dtype_and_stride(tmp_path: Path) -> None:
    numel = CAST_NBYTES // 8 * 2 + 5  # two full casts and a rest
    save_file({"n": torch.arange(numel)}, tmp_path / "x.safetensors")
    n = open_safetensors(tmp_path / "x.safetensors")["n"]
    out = torch.zeros(2 * numel)[::2]
    n.read(3, out[:-3])
    assert out[:-3].equal(torch.arange(3, numel).float())
    assert n.file.nbytes_read == 8 * (numel - 3)


def test_values_are_read_between_others(file: Path) -> None:
    out = torch.full((7,), -1.0)
    open_safetensors(file)["w"].read(1, out[1::2])
    assert out.tolist() == [-1, 1, -1, 2, -1, 3, -1]


def test_nothing_is_asked_for(file: Path) -> None:
    open_safetensors(file)["w"].read(6, torch.empty(0))


def test_the_next_tensor_is_out_of_reach(file: Path) -> None:
    with pytest.raises(FzeroError, match=r"(?m)^b: elements \[1, 3\) were asked for, it has 2$"):
        open_safetensors(file)["b"].read(1, torch.empty(2, dtype=torch.int64))


def test_a_short_read_is_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:3]], offset))
    assert whole(open_safetensors(file)["w"]).equal(W)


def test_a_key_that_a_file_lacks(file: Path) -> None:
    with pytest.raises(FzeroError, match=r"(?m)^u: .*model\.safetensors has no 'u' among its 2 tensors$"):
        FileSource(TensorFile(file), "u")


def test_representations(file: Path) -> None:
    w = open_safetensors(file)["w"]
    assert repr(w) == f"FileSource(w: float32[2, 3] in {file})"
    assert repr(w.file) == f"TensorFile({file}: 2 tensors, 40 bytes)"


# Files that change.


def test_a_file_that_vanished(file: Path) -> None:
    w = open_safetensors(file)["w"]
    file.unlink()
    with pytest.raises(FzeroError, match=r"^w: .*model\.safetensors cannot be read: No such file"):
        whole(w)


def test_a_file_that_vanishes_while_it_is_looked_at_is_no_fifo(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.stat

    def look_and_remove(path: Any, **how: Any) -> os.stat_result:
        found = look(path, **how)
        if str(path) == str(file):
            file.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "stat", look_and_remove)
    with pytest.raises(FzeroError, match="cannot be read: No such file or directory; see to the file"):
        TensorFile(file)


def test_a_file_that_shrank(file: Path) -> None:
    w, size = open_safetensors(file)["w"], file.stat().st_size
    os.truncate(file, size - 4)
    with pytest.raises(
        FzeroError, match=rf"^w: .* has {size - 4} bytes, it had {size} when it was opened; leave a file"
    ):
        whole(w)


def test_a_file_that_shrinks_under_a_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, size, preadv = open_safetensors(file)["w"], file.stat().st_size, os.preadv

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(file, size - 8)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(FzeroError, match=rf"^w: .* has {size - 8} bytes, it had {size} when it was opened"):
        whole(w)


def test_a_file_that_was_written_again(file: Path) -> None:
    w, time = open_safetensors(file)["w"], file.stat().st_mtime_ns
    os.utime(file, ns=(time, time + 1))
    with pytest.raises(FzeroError, match=rf"^w: .* was written at {time + 1} ns, what was opened at {time} ns"):
        whole(w)


def test_a_file_that_is_written_under_a_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, preadv = open_safetensors(file)["w"], os.preadv

    def writing(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.utime(file, ns=(0, 1))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", writing)
    with pytest.raises(FzeroError, match=r"^w: .* was written at 1 ns, what was opened at "):
        whole(w)


def test_a_file_that_ends_before_its_size(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = open_safetensors(file)["w"]
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(FzeroError, match=r"^w: .* gave 0 of the 24 bytes asked for"):
        whole(w)


# Damaged files.


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(folder: Path, header: bytes, data: bytes = b"\0" * 4, length: int | None = None) -> Path:
    prefix = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / "bad.safetensors").write_bytes(prefix + header + data)
    return folder / "bad.safetensors"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"w": entry("F33")}, r"w: .* gives it the dtype 'F33', torch has U64, "),
        ({"w": entry(["F32"])}, r"w: .* gives it the dtype \['F32'\]"),
        ({"w": entry(shape=[-1])}, r"w: .* gives it the shape \[-1\], not a list of sizes"),
        ({"w": entry(shape=[1.0])}, r"w: .* gives it the shape \[1.0\]"),
        ({"w": entry(shape=[True])}, r"w: .* gives it the shape \[True\]"),
        ({"w": entry(shape=[2**63, 0], offsets=[0, 0])}, r"w: .* gives it the shape \[9223372036854775808, 0\]"),
        ({"w": entry(shape="1")}, r"w: .* gives it the shape '1'"),
        ({"w": entry(shape=[2])}, r"w: .* has 4 bytes for it, F32 of shape \[2\] takes 8"),
        ({"w": entry(offsets=[0, 8], shape=[2])}, r"w: .* its bytes are \[0, 8\] of 4, not \[begin, end\] within them"),
        ({"w": entry(offsets=[4, 0])}, r"w: .* its bytes are \[4, 0\] of 4"),
        ({"w": entry(offsets=[-4, 0])}, r"w: .* its bytes are \[-4, 0\] of 4"),
        ({"w": entry(offsets=[0, 4, 4])}, r"w: .* its bytes are \[0, 4, 4\] of 4"),
        ({"w": entry(offsets=None)}, r"w: .* its bytes are None of 4"),
        ({"w": entry(), "x": entry()}, r"x: .* has it begin at byte 0, the tensor before it ends at 4"),
        ({"w": entry("U8", [1], [3, 4])}, r"w: .* has it begin at byte 3, the tensor before it ends at 0"),
        ({"w": entry("U8", [1], [0, 1])}, r"bad.safetensors: has 4 bytes of data, its tensors end at 1"),
        ({"w": {"dtype": "F32", "shape": [1]}}, r"w: .* gives no dtype, shape and data_offsets for it, but \{'dtype'"),
        ({"w": 3}, r"w: .* gives no dtype, shape and data_offsets for it, but 3"),
        ({"w": entry(), "__metadata__": {"a": 1}}, r"its __metadata__ are not strings by strings"),
        ({"w": entry(), "__metadata__": ["a"]}, r"its __metadata__ are not strings by strings"),
        ([], r"its header is a list, not a table"),
        ("[" * 100_000, r"its header is not the JSON of a table"),
        ('{"w": 1, "w": 2}', r"its header is not the JSON of a table: the key 'w' stands in it twice"),
        ('{"w": {"dtype": "F32", "dtype": "F32"}}', r"the key 'dtype' stands in it twice"),
        ("{", r"its header is not the JSON of a table"),
        (b"\xff", r"its header is not the JSON of a table: 'utf-8' codec"),
        ("", r"its header is not the JSON of a table"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, problem: str) -> None:
    text = json.dumps(header) if isinstance(header, (dict, list)) else header
    path = written(tmp_path, text.encode() if isinstance(text, str) else text)
    with pytest.raises(FzeroError, match=problem):
        open_safetensors(path)


@pytest.mark.parametrize(
    ("length", "problem"),
    [(20, "says its header has 20 bytes, 6 follow"), (2**64 - 1, f"says its header has {2**64 - 1} bytes, 6 follow")],
)
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int, problem: str) -> None:
    with pytest.raises(FzeroError, match=problem):
        open_safetensors(written(tmp_path, b"{}", length=length))


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = written(tmp_path, b"{}", length=MAX_NBYTES + 1)
    os.truncate(path, 2 * MAX_NBYTES)
    with pytest.raises(FzeroError, match=f"says its header has {MAX_NBYTES + 1} bytes, the format allows {MAX_NBYTES}"):
        open_safetensors(path)


@pytest.mark.parametrize("kept", [0, 5, 8, 30, -1])
def test_a_truncated_file_is_refused(file: Path, kept: int) -> None:
    os.truncate(file, kept % file.stat().st_size)
    with pytest.raises(FzeroError, match=r"the file is damaged, incomplete or no safetensors file"):
        open_safetensors(file)


def test_a_file_with_more_behind_it_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    with pytest.raises(FzeroError, match=r"has 48 bytes of data, its tensors end at 40"):
        open_safetensors(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    said = r"(?m)x\.safetensors cannot be read: No such file or directory; see to the file$"
    with pytest.raises(FzeroError, match=said):
        open_safetensors(tmp_path / "x.safetensors")


def test_a_machine_of_other_byte_order_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(FzeroError, match="is little-endian, this machine is big-endian"):
        open_safetensors(file)


def test_null_metadata_are_none() -> None:
    assert parse_header(b'{"__metadata__": null}', 0, "x") == Header({}, {})


def test_a_header_is_what_was_rendered() -> None:
    header = plan_header(everything(), {"format": "pt"})
    text = render_header(header)
    assert len(text) % 8 == 0 and int.from_bytes(text[:8], "little") == len(text) - 8
    assert parse_header(text[8:], header.nbytes, "x") == header


# Directories and indexes.


def test_a_directory_of_one_file(file: Path) -> None:
    assert open_safetensors(file.parent).keys() == {"w", "b"}


def test_a_directory_of_one_file_of_any_name(file: Path) -> None:
    file.rename(file.with_name("adapter.safetensors"))
    assert open_safetensors(file.parent).keys() == {"w", "b"}


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"])
def test_an_index(folder: Path, path: str) -> None:
    sources = open_safetensors(folder / path)
    assert list(sources) == ["w", "b"]
    assert whole(sources["w"]).equal(W) and whole(sources["b"]).equal(B)


def test_an_index_of_any_name(folder: Path) -> None:
    (folder / "model.safetensors.index.json").rename(folder / "diffusion.safetensors.index.json")
    assert open_safetensors(folder).keys() == {"w", "b"}


def test_a_directory_without_files(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"has 0 files \*\.safetensors; give the path of a safetensors file"):
        open_safetensors(tmp_path)


def test_a_directory_of_several_files_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FzeroError, match=r"has 2 files \*\.safetensors: model-00001-of-00002\.safetensors, model-"):
        open_safetensors(folder)


def test_an_index_whose_file_is_missing(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FzeroError, match=r"^b: .* has it and 0 more in model-00002-of-00002\.safetensors, which is not"
    ):
        open_safetensors(folder)


def test_an_index_whose_file_lacks_a_key(folder: Path) -> None:
    index(folder, {"u": "model-00001-of-00002.safetensors"})
    with pytest.raises(FzeroError, match=r"^u: .*model-00001-of-00002\.safetensors has no 'u' among its 1 tensors"):
        open_safetensors(folder)


def test_an_index_that_leads_out_of_its_directory(folder: Path) -> None:
    index(folder, {"w": "../model.safetensors"})
    with pytest.raises(
        FzeroError, match=r"^w: .* has it in '\.\./model\.safetensors'; an index names files in its own"
    ):
        open_safetensors(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 3}}'])
def test_what_is_no_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FzeroError, match=r"is not an index with a weight_map|its weight_map is not file names by keys"):
        open_safetensors(folder)


# The tensors of a tree.

LIKE = {"layer": {"w": torch.empty(2, 3, device="meta"), "b": torch.empty(2, dtype=torch.int64, device="meta")}}


def short(path: str) -> str:
    return path.removeprefix("layer.")


def test_leaves_get_the_tensors_of_their_paths(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        like, _ = fzero.lower(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    sources = load_sources(tmp_path, like)
    tree.map(lambda source, tensor: torch.testing.assert_close(whole(source), tensor), sources, fzero.lower(model)[0])


def test_a_leaf_is_renamed_to_a_key(file: Path) -> None:
    sources = load_sources(file, LIKE, rename=short)
    assert whole(sources["layer"]["w"]).equal(W) and whole(sources["layer"]["b"]).equal(B)
    assert (sources["layer"]["w"].path, sources["layer"]["w"].key) == ("layer.w", "w")


def test_two_leaves_may_have_one_key(file: Path) -> None:
    sources = load_sources(file, {"u": W, "w": W, "b": B}, rename=lambda path: "w" if path == "u" else path)
    assert whole(sources["u"]).equal(W) and whole(sources["w"]).equal(W)


def test_opened_files_count_what_a_tree_reads(file: Path) -> None:
    opened = open_safetensors(file)
    whole(load_sources(opened, LIKE, rename=short)["layer"]["b"])
    assert opened["w"].file.nbytes_read == 16


def test_every_missing_and_left_over_key_is_listed_at_once(file: Path) -> None:
    like = {**LIKE, "v": W, "w": W}
    with pytest.raises(FzeroError) as caught:
        load_sources(file, like, rename=lambda path: path.replace("layer.b", "bias"))
    assert caught.value.where == str(file)
    assert caught.value.problem == (
        "leaves without values (3): layer.b (as 'bias'), layer.w, v; keys without a leaf (1): 'b'"
    )


def test_without_strict_what_the_files_lack_stays_and_what_is_left_over_is_skipped(file: Path) -> None:
    like = {"w": torch.empty(2, 3, device="meta"), "head": torch.ones(2)}
    sources = load_sources(file, like, strict=False, dtype=torch.bfloat16)
    assert isinstance(sources["head"], TensorSource) and whole(sources["head"]).tolist() == [1, 1]
    assert tree.map(lambda source: source.dtype, sources) == {"w": torch.bfloat16, "head": torch.bfloat16}


def test_without_strict_a_missing_leaf_needs_values(file: Path) -> None:
    with pytest.raises(FzeroError, match=r"leaves without values \(1\): head; rename\(path\) gives"):
        load_sources(file, {"head": torch.empty(2, device="meta")}, strict=False)


def test_a_leaf_that_has_no_key_stays(file: Path) -> None:
    sources = load_sources(file, {"w": W, "b": B, "v": B}, rename=lambda path: None if path == "v" else path)
    assert whole(sources["v"]).equal(B)


def test_a_leaf_of_another_shape(file: Path) -> None:
    with pytest.raises(FzeroError, match=r"^w: has shape \[2, 3\] in .*model\.safetensors, \[3, 2\] in the tree; give"):
        load_sources(file, {"w": W.mT, "b": B})


def test_leaves_are_cast_to_the_dtypes_of_the_tree_or_to_one(file: Path) -> None:
    sources = load_sources(file, {"w": W.half(), "b": B.double()})
    assert (sources["w"].dtype, sources["b"].dtype) == (torch.float16, torch.float64)
    sources = load_sources(file, {"w": W.half(), "b": B}, dtype=torch.bfloat16)
    assert (sources["w"].dtype, sources["b"].dtype) == (torch.bfloat16, torch.int64)
    assert whole(sources["w"]).equal(W.bfloat16())


@pytest.mark.parametrize(
    ("stored", "target", "fits"),
    [
        ("BOOL", torch.float32, True),
        ("I8", torch.bfloat16, True),
        ("F8_E4M3", torch.float32, True),
        ("F64", torch.float8_e5m2, True),
        ("F32", torch.complex64, True),
        ("F32", torch.int64, False),
        ("F8_E5M2", torch.int8, False),
        ("C64", torch.float32, False),
        ("I8", torch.bool, False),
    ],
)
def test_casts_keep_the_kind_of_a_number(tmp_path: Path, stored: str, target: torch.dtype, fits: bool) -> None:
    tensor = sample(DTYPES[stored], 4)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    like = {"x": torch.empty(4, dtype=target, device="meta")}
    if fits:
        assert whole(load_sources(tmp_path, like)["x"]).equal(tensor.to(target))
    else:
        with pytest.raises(FzeroError, match=rf"^x: is {tensor.dtype} in .*x\.safetensors, {target} in the tree; cast"):
            load_sources(tmp_path, like)


def test_a_leaf_that_is_no_tensor(file: Path) -> None:
    with pytest.raises(FzeroError, match=r"^b: is a int, not a tensor"):
        load_sources(file, {"w": W, "b": 3})


def test_a_tree_is_loaded_onto_a_mesh(file: Path) -> None:
    opened = open_safetensors(file)
    params = load_safetensors(opened, LIKE, VirtualMesh(fsdp=3), rename=short, dtype=torch.bfloat16)
    assert params["layer"]["w"].full_tensor().equal(W.bfloat16())
    assert params["layer"]["b"].full_tensor().equal(B)
    assert opened["w"].file.nbytes_read == 40


def test_the_reference_reads_what_a_header_plans(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(render_header(plan_header({"w": W}, {})) + bytes(24))
    assert load_file(path)["w"].equal(torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FzeroError, match=rf"{name}: is a FIFO, a socket or a device; give a regular file"):
        open_safetensors(tmp_path / name)
