"""Folders of torch.distributed.checkpoint: written for torch, and read by ranges; what is refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fzero
from fzero import FzeroError, State, VirtualMesh, optim, tree
from fzero.base.torch_private import make_wrapper_subclass
from fzero.checkpoint import load_adam, load_params, open_dcp, read_dcp_values, save_dcp
from fzero.formats.dcp import DcpSource
from fzero.layout.boxes import Box, boxes
from fzero.layout.chunks import chunks
from fzero.state.publishing import TEMPORARY
from fzero.state.sources import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole(source: Source) -> Tensor:
    out = torch.empty(source.shape.numel(), dtype=source.dtype)
    source.read(0, out)
    return out.view(source.shape)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator).mul(9).to(dtype)


def make_state() -> State:
    """Dicts, lists and NamedTuples; several dtypes; leaves of no elements and of no dimensions."""
    params = {
        "layers": [{"up": draw(7, 5), "bias": draw(5)}, {"up": draw(3, 4, 5, dtype=torch.bfloat16), "bias": draw(1)}],
        "nothing": torch.zeros(0, 3),
        "scale": torch.tensor(3.5, dtype=torch.float64),
    }
    mesh = VirtualMesh(fsdp=3)
    params = fzero.partition(params, mesh)
    state = State(params, optim.adamw(0.1).init(params), step=torch.tensor(4), seed=torch.tensor(2), data={"epoch": 3})
    return state._replace(ema={"name": "half", "rate": 0.5, "is_on": True})


# What save_dcp writes.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "state"
    save_dcp(path, make_state())
    return path


def test_torch_loads_what_is_saved_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(folder, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt")
    expected = dict(zip(tree.paths(make_state()), tree.leaves(fzero.unpartition(make_state()))))
    assert found.keys() == expected.keys()
    into = {key: torch.full_like(x, 9) for key, x in expected.items() if isinstance(x, Tensor)}
    dcp.load(into, checkpoint_id=folder)
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype and found[key].equal(value) and into[key].equal(value), key
        else:
            assert found[key] == value


def test_what_is_saved_is_read_on_other_meshes(folder: Path) -> None:
    state, sources = make_state(), open_dcp(folder)
    for mesh in VirtualMesh(fsdp=1), VirtualMesh(fsdp=8), VirtualMesh(replica=2, fsdp=2):
        params = load_params(sources, state.params, mesh, prefix="params.")
        for got, expected in zip(tree.leaves(params), tree.leaves(state.params)):
            assert got.full_tensor().equal(expected.full_tensor()) and got.form.layout.mesh == mesh
    assert read_dcp_values(folder) == {"data.epoch": 3, "ema.name": "half", "ema.rate": 0.5, "ema.is_on": True}


def test_a_folder_appears_once_it_is_complete(folder: Path, tmp_path: Path) -> None:
    left = tmp_path / f".old.1234{TEMPORARY}"
    left.mkdir()
    (left / "of a killed save").write_text("")
    save_dcp(tmp_path / "new", {"w": torch.ones(3)})
    assert os.listdir(tmp_path) == ["new"] and sorted(os.listdir(tmp_path / "new")) == [".metadata", "__0_0.distcp"]
    with pytest.raises(FzeroError, match="is there already; give a new folder"):
        save_dcp(tmp_path / "new", {"w": torch.zeros(3)})
    assert whole(open_dcp(tmp_path / "new")["w"]).equal(torch.ones(3)) and os.listdir(tmp_path) == ["new"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FzeroError, match="rank 0 could not write it: OSError: .*No space left on device; what was"):
        save_dcp(tmp_path / "new", {"w": torch.ones(3)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("leaf", "said"),
    {"object": (object(), "w: is a object"), "meta": (torch.ones(2, device="meta"), "w: .*meta")}.values(),
)
def test_leaves_that_cannot_be_saved(leaf: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=said):
        save_dcp(tmp_path / "new", {"w": leaf})
    assert os.listdir(tmp_path) == []


# What others write: pieces of any form, which one process gives to torch.


class Cut(Tensor):
    """A tensor that torch.distributed.checkpoint writes as these rectangles."""

    def __new__(cls, full: Tensor, pieces: list[Box]) -> Cut:
        cut: Any = make_wrapper_subclass(cls, full.shape, dtype=full.dtype)
        cut.full, cut.pieces = full, pieces
        return cut

    def __init__(self, *of: Any) -> None:
        pass

    def __create_write_items__(self, key: str, value: Any) -> list[Any]:
        chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in self.pieces]
        properties, kind = TensorProperties(dtype=self.full.dtype), planner.WriteItemType.SHARD
        written = [planner.TensorWriteData(chunk, properties, self.full.shape) for chunk in chunks]
        return [planner.WriteItem(MetadataIndex(key, data.chunk.offsets), kind, tensor_data=data) for data in written]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        size = next(box.size for box in self.pieces if box.start == tuple(index.offset))
        return self.full[tuple(slice(start, start + length) for start, length in zip(index.offset, size))]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"nobody should call {func}")


def grid(shape: tuple[int, ...], *steps: int) -> list[Box]:
    """Rectangles that tile a shape, of up to these sizes."""
    tiles: list[Box] = [Box((), ())]
    for size, step in zip(shape, steps):
        tiles = [Box((*box.start, part.start), (*box.size, len(part))) for box in tiles for part in chunks(size, step)]
    return tiles


CUTS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "rows": ((9, 4), grid((9, 4), 3, 4)),
    "uneven rows": ((10, 3), grid((10, 3), 4, 3)),
    "columns": ((6, 7), grid((6, 7), 6, 3)),
    "blocks": ((7, 6, 5), grid((7, 6, 5), 3, 4, 2)),
    "flat ranges": ((5, 4, 3), [box for flat in chunks(60, 13) for box in boxes((5, 4, 3), flat)]),
    "one dimension": ((23,), grid((23,), 5)),
    "one piece": ((4, 4), grid((4, 4), 4, 4)),
}


@pytest.fixture(scope="module")
def cut_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "cut"
    state: dict[str, Any] = {name: Cut(draw(*shape), pieces) for name, (shape, pieces) in CUTS.items()}
    state["channels last"] = draw(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state["transposed"], state["scalar"], state["empty"] = draw(3, 4).T, torch.tensor(2.5), torch.zeros(0, 2)
    dcp.save({"model": state, "lr": 0.1, "names": ["a", "b"]}, checkpoint_id=path)
    return path


def iter_ranges(numel: int) -> Iterator[range]:
    starts = {0, 1, numel // 3, numel // 2, numel - 1}
    yield from (
        range(start, stop) for start in starts for stop in {start, start + 1, numel // 2 + 1, numel} if stop >= start
    )


@pytest.mark.parametrize("name", CUTS)
def test_any_range_is_read_from_any_pieces(name: str, cut_folder: Path) -> None:
    source = open_dcp(cut_folder)[f"model.{name}"]
    flat = draw(*CUTS[name][0]).view(-1)
    assert isinstance(source, DcpSource) and source.shape == CUTS[name][0]
    for elements in iter_ranges(flat.numel()):
        before, out = source.folder.nbytes_read, torch.full((len(elements),), torch.nan)
        source.read(elements.start, out)
        assert out.equal(flat[elements.start : elements.stop]), elements
        assert source.folder.nbytes_read - before == 4 * len(elements)
    doubles = torch.empty(flat.numel(), dtype=torch.float64)
    source.read(0, doubles)
    assert doubles.equal(flat.double())


def test_pieces_whose_elements_do_not_lie_in_order(cut_folder: Path) -> None:
    sources = open_dcp(cut_folder)
    assert whole(sources["model.channels last"]).equal(draw(2, 3, 4, 5))
    assert whole(sources["model.transposed"]).equal(draw(3, 4).T)
    some = torch.empty(50)
    sources["model.channels last"].read(31, some)
    assert some.equal(draw(2, 3, 4, 5).view(-1)[31:81])
    assert whole(sources["model.scalar"]) == 2.5 and whole(sources["model.empty"]).shape == (0, 2)
    assert read_dcp_values(cut_folder) == {"lr": 0.1, "names": ["a", "b"]}


def test_ranks_read_their_parts_once(tmp_path: Path) -> None:
    save_dcp(tmp_path / "x", {"w": draw(64, 16), "b": draw(9)})
    sources: Any = open_dcp(tmp_path / "x")
    params = load_params(sources, {"w": torch.empty(64, 16, device="meta"), "b": torch.empty(9)}, VirtualMesh(fsdp=4))
    assert params["w"].full_tensor().equal(draw(64, 16)) and sources["w"].folder.nbytes_read == 4 * (64 * 16 + 9)


# Adam of torch.


def steps_of_torch(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(count):
        optimizer.zero_grad()
        model(draw(8, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_run_of_torch_goes_on(tmp_path: Path) -> None:
    model, optimizer = steps_of_torch(3)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    mesh, sources, ours = VirtualMesh(fsdp=4), open_dcp(tmp_path / "run"), optim.adamw(0.01)
    like, apply = fzero.lower(steps_of_torch(0)[0])
    params = load_params(sources, like, mesh, prefix="model.")
    opt_state = load_adam(sources, ours.init(params), mesh, prefix="optim.state.")
    assert opt_state[0].count.full_tensor() == 3

    def step(params: Any, opt_state: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda params: apply(params, x).square().mean())(params)
        updates, opt_state = ours.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    params, opt_state = fzero.simulate(step, mesh)(params, opt_state, draw(8, 6))
    expected = dict(steps_of_torch(4)[0].named_parameters())
    for path, got in zip(tree.paths(params), tree.leaves(params)):
        # gradients are means over four ranks, in another order than torch's sum
        torch.testing.assert_close(got.full_tensor(), expected[path].detach(), rtol=1e-5, atol=1e-6)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = steps_of_torch(3)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "run" / "step-1000")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints_of_others.md").read_text()
    code, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"fzero": fzero, "Model": lambda: steps_of_torch(0)[0], "mesh": VirtualMesh(fsdp=2)}
    exec(code, names)
    params, opt_state = fzero.unpartition((names["params"], names["opt_state"]))
    assert all(x.equal(model.state_dict()[path]) for path, x in zip(tree.paths(params), tree.leaves(params)))
    assert opt_state[0].count == 3 and read_dcp_values("run/step-1000")["optim.param_groups.0.lr"] == 0.01


# What is refused.


class Shell:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_that_names_something_else_is_not_run(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / ".metadata").write_bytes(pickle.dumps(Shell(f"touch {tmp_path}/ran")))
    with pytest.raises(FzeroError, match=r"\.metadata: its pickle names (posix|os)\.system, which is no part of"):
        open_dcp(copy)
    dcp.save({"x": Shell(f"touch {tmp_path}/ran"), "w": torch.ones(2)}, checkpoint_id=tmp_path / "value")
    assert whole(open_dcp(tmp_path / "value")["w"]).equal(torch.ones(2))
    with pytest.raises(FzeroError, match=r"x: .*__0_0\.distcp at bytes 0 to \d+ .*names (posix|os)\.system, which loa"):
        read_dcp_values(tmp_path / "value")
    assert not (tmp_path / "ran").exists()


def rewrite(folder: Path, **fields: Any) -> None:
    """Change fields of every place in the metadata of a folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        vars(place).update(fields)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


MISTAKES: dict[str, tuple[Any, str]] = {
    "no folder": (lambda path: shutil.rmtree(path), r"\.metadata: cannot be read: No such file or directory; give a f"),
    "no file": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp: is not there; the checkpoint is dama"),
    "truncated": (lambda path: os.truncate(path / "__0_0.distcp", 99), r"__0_0\.distcp: has 99 bytes, the metadata"),
    "no pickle": (lambda path: (path / ".metadata").write_bytes(b"{}"), "is not the metadata of a checkpoint: "),
    "an empty pickle": (
        lambda path: (path / ".metadata").write_bytes(b""),
        "is not the metadata of a checkpoint: EOFE",
    ),
    "another pickle": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])),
        "is not the metadata of a che",
    ),
    "outside": (
        lambda path: rewrite(path, relative_path="../x"),
        r"places values in '\.\./x'; a checkpoint names file",
    ),
    "absolute": (lambda path: rewrite(path, relative_path="/etc/passwd"), "places values in '/etc/passwd'"),
    "negative": (lambda path: rewrite(path, offset=-4), "in place of sizes"),
    "transformed": (
        lambda path: rewrite(path, transform_descriptors=["zstd"]),
        r"bytes transformed by \['zstd'\]; loa",
    ),
    "shifted": (lambda path: rewrite(path, offset=1, length=900), r"w: .*__0_0\.distcp at bytes 1 to 901 cannot be r"),
}


@pytest.mark.parametrize(("spoil", "said"), MISTAKES.values(), ids=MISTAKES)
def test_damaged_folders(spoil: Any, said: str, tmp_path: Path) -> None:
    save_dcp(tmp_path / "x", {"w": draw(5, 4)})
    spoil(tmp_path / "x")
    with pytest.raises(FzeroError, match=said):
        whole(open_dcp(tmp_path / "x")["w"])


def test_a_class_in_the_metadata_cannot_be_changed(tmp_path: Path) -> None:
    """A pickle may set attributes of the classes that it names: those are classes of this one pickle."""
    save_dcp(tmp_path / "x", {"w": draw(5, 4)})
    text = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00versionK\x01s\x86b."
    (tmp_path / "x" / ".metadata").write_bytes(text)
    with pytest.raises(FzeroError, match="is not the metadata of a checkpoint"):
        open_dcp(tmp_path / "x")
    assert dcp.Metadata.version is None


def test_bytes_that_were_overwritten_are_noticed(tmp_path: Path) -> None:
    save_dcp(tmp_path / "x", {"w": draw(5, 4)})
    with open(tmp_path / "x" / "__0_0.distcp", "r+b") as file:
        file.write(b"\0" * 64)
    with pytest.raises(FzeroError, match=r"w: .*__0_0\.distcp at bytes 0 to \d+ cannot be read"):
        whole(open_dcp(tmp_path / "x")["w"])


def test_a_tree_of_another_model_is_refused(folder: Path) -> None:
    sources, params, mesh = open_dcp(folder), make_state().params, VirtualMesh(fsdp=2)
    other = params | {"scale": torch.zeros(2)}
    with pytest.raises(
        FzeroError, match=r"scale: has shape \[\] in DcpSource\(params.scale: float64\[\] in .*state\), \[2\]"
    ):
        load_params(sources, other, mesh, prefix="params.")
    with pytest.raises(FzeroError, match=r"leaves without values \(1\): new; keys without a leaf \(1\): 'nothing'"):
        renamed = {"new" if key == "nothing" else key: value for key, value in params.items()}
        load_params(sources, renamed, mesh, prefix="params.")
