"""Bad checkpoints: damaged, incomplete, of another model or of a newer fzero. Each is an FzeroError that names leaf and
file, on all ranks, and the tree that was given is as it was."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Refusal, refusal, run_cases, values
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, Sharded
from fzero.base import tree
from fzero.checkpoint import latest, load, open_checkpoint, save, verify
from fzero.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest
from fzero.state.safetensors.header import PREFIX

MESH = fzero.VirtualMesh(fsdp=2)
TENSORS = {
    "up": torch.arange(35.0).view(7, 5),
    "down": torch.arange(12).view(3, 4).bfloat16(),
    "phase": torch.tensor([1 + 2j, 3.5], dtype=torch.complex128),
}
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


def make(mesh: Any = MESH) -> dict[str, Any]:
    """What is saved."""
    return {"params": fzero.partition(TENSORS, mesh), "step": 4, "rate": 0.1, "name": "a run"}


def make_like(mesh: Any = MESH, **changes: Any) -> dict[str, Any]:
    """A tree of the same structure with other values."""
    zeros = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    return {
        "params": fzero.partition(zeros | changes.pop("params", {}), mesh),
        "step": 0,
        "rate": 0.0,
        "name": "",
    } | changes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "run", make(), step=4, sha256=True, metadata={"note": ["mine", 1.5]})
    return tmp_path / "run"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint that a test damages in one file after the other, and mends."""
    path = tmp_path_factory.mktemp("damaged")
    save(path, make(), step=4, sha256=True)
    yield path
    verify(path)


def bits(value: Any) -> Any:
    """What tells two leaves apart."""
    if isinstance(value, Sharded):
        value = value.local
    return value.view(-1).view(torch.uint8).tolist() if isinstance(value, torch.Tensor) else (type(value), value)


def refuse(path: Path, like: Any = None, **how: Any) -> str:
    """The error of a load. The tree that was given is as it was."""
    like = make_like() if like is None else like
    before = [bits(leaf) for leaf in tree.leaves(like)]
    with pytest.raises(FzeroError) as caught:
        load(path, like, **how)
    assert [bits(leaf) for leaf in tree.leaves(like)] == before
    return str(caught.value)


def is_whole(path: Path, **how: Any) -> bool:
    """Whether a load gives what was saved."""
    expected = [bits(leaf) for leaf in tree.leaves(make())]
    return [bits(leaf) for leaf in tree.leaves(load(path, make_like(), **how))] == expected


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the body of a manifest, and its sum with it."""
    table = json.loads(path.read_bytes())
    change(table["body"])
    path.write_bytes(render(table["body"]))


def render(body: Any) -> bytes:
    text = json.dumps(body)
    head = f'{{"format": "fzero.checkpoint", "version": 1, "crc32": "{zlib.crc32(text.encode()):08x}"'
    return f'{head}, "body": {text}}}'.encode()


# another tree


def test_what_was_saved_is_loaded(saved: Path) -> None:
    assert is_whole(saved) and verify(saved) == 4


def test_the_checkpoint_of_another_model(saved: Path) -> None:
    like = {"params": fzero.partition({"gate": torch.ones(3), "up": TENSORS["up"]}, MESH), "step": 0}
    message = refuse(saved, like)
    assert message.startswith(f"{saved / 'step-4'}: lacks 1 leaves of `like`: params.gate; ")
    assert "has 4 leaves that `like` lacks: name, params.down, params.phase, rate;" in message
    assert "params.gate" in refuse(saved, like, strict=False)


OTHERS = {
    "params.up: is float32[7, 5] in {}, float32[5, 7] in `like`": {"params": {"up": torch.zeros(5, 7)}},
    "params.up: is float32[7, 5] in {}, bfloat16[7, 5] in `like`": {"params": {"up": torch.zeros(7, 5).bfloat16()}},
    "params.phase: is complex128[2] in {}, float64[2] in `like`": {"params": {"phase": torch.zeros(2).double()}},
    "step: is a int in {}, a float in `like`": {"step": 0.0},
    "step: is a int in {}, a bool in `like`": {"step": False},
    "name: is a str in {}, a tensor in `like`": {"name": torch.tensor(1)},
    "params: has": {"params": 5},
    "rate: is a object": {"rate": object()},
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_leaf_that_like_has_otherwise(saved: Path, message: str) -> None:
    changes = OTHERS[message]
    like = make_like(**changes) if isinstance(changes.get("params", {}), dict) else make_like() | changes
    found = refuse(saved, like)
    if message == "params: has":
        assert "lacks 1 leaves of `like`: params; has 3 leaves" in found
    else:
        assert found.startswith(message.format(saved / "step-4"))


def test_a_tensor_that_is_a_number_in_like(saved: Path) -> None:
    like = make_like()
    like["params"]["up"] = 3
    assert refuse(saved, like).startswith(f"params.up: is a tensor in {saved / 'step-4'}, a int in `like`")


def test_every_rank_reads_for_itself(saved: Path) -> None:
    assert refuse(saved, source_rank=0).startswith("source_rank: is for values that one rank has; leave it out")


# what is not there


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "step-4").mkdir(parents=True)
    (tmp_path / "begun" / "step-4" / FIRST).write_bytes(b"")
    (tmp_path / "begun" / "step-5.partial").mkdir()
    for name in "nothing", "empty", "begun":
        assert latest(tmp_path / name) is None
        for step in None, 4:
            message = refuse(tmp_path / name, step=step)
            assert message == f"{tmp_path / name}: has no checkpoint; give a folder that fzero.checkpoint.save wrote to"
    (tmp_path / "file").write_text("")
    assert refuse(tmp_path / "file").startswith(f"{tmp_path / 'file'}: cannot be read: Not a directory")


def test_a_step_that_is_not_there(saved: Path) -> None:
    assert refuse(saved, step=5).startswith(f"{saved}: has no checkpoint 5, only 4;")


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [remove, truncate, lengthen, empty, replace_by_folder, replace_by_fifo])
def test_a_file_that_is_missing_or_of_another_size(saved: Path, damage: Callable[[Path], None]) -> None:
    file = saved / "step-4" / SECOND
    damage(file)
    message = refuse(saved, verify=False)
    assert message.startswith("params.") and str(file) in message
    for use in partial(verify, saved), partial(load, saved, make_like()):
        with pytest.raises(FzeroError, match=f"step-4: {SECOND} .*; load another checkpoint"):
            use()


def test_all_damaged_files_are_named(saved: Path) -> None:
    truncate(saved / "step-4" / FIRST)
    remove(saved / "step-4" / SECOND)
    with pytest.raises(
        FzeroError, match=rf"{FIRST} has (\d+) bytes, \d+ were written; {SECOND} cannot be read: No such"
    ):
        verify(saved)


def test_a_checkpoint_that_is_removed_while_it_is_read(saved: Path) -> None:
    source = open_checkpoint(saved)["params.up"]
    shutil.rmtree(saved / "step-4")
    with pytest.raises(FzeroError, match=f"params.up: .*{FIRST} cannot be read: No such file"):
        source.read(0, torch.empty(35))


# sums


def flip(file: Path, at: int, mask: int = 1) -> bytes:
    """Change a byte of a file. Returns the bytes that the file had."""
    data = file.read_bytes()
    changed = bytearray(data)
    changed[at] ^= mask
    file.write_bytes(changed)
    return data


def test_a_value_that_changed_is_found_by_its_sum(saved: Path) -> None:
    file = saved / "step-4" / SECOND
    data = flip(file, -1)
    assert not is_whole(saved, verify=False)
    for use in partial(verify, saved), partial(load, saved, make_like()):
        with pytest.raises(
            FzeroError, match=f"step-4: {SECOND} has the CRC-32 [0-9a-f]{{8}}, [0-9a-f]{{8}} was written"
        ):
            use()
    crc = f"{zlib.crc32(file.read_bytes()):08x}"
    rewrite(saved / "step-4" / MANIFEST, lambda body: body["files"][1].__setitem__(1, crc))
    with pytest.raises(FzeroError, match=f"{SECOND} has the SHA-256 [0-9a-f]{{64}}, [0-9a-f]{{64}} was written"):
        verify(saved)
    file.write_bytes(data)
    with pytest.raises(FzeroError, match=f"{SECOND} has the CRC-32"):
        verify(saved)


# manifests


def test_a_manifest_of_a_newer_version_or_of_something_else(saved: Path) -> None:
    file = saved / "step-4" / MANIFEST
    text = file.read_text()
    file.write_text(text.replace('"version": 1', '"version": 4'))
    assert refuse(saved) == f"{file}: is version 4 of the format, this fzero reads 1 to 3; install a newer fzero"
    file.write_text(text.replace("fzero.checkpoint", "fzero.elephants"))
    assert refuse(saved).startswith(f"{file}: has the format 'fzero.elephants', not 'fzero.checkpoint'")
    replace_by_fifo(file)
    assert refuse(saved).startswith(f"{saved}: has no checkpoint;")


def test_any_byte_of_a_manifest_that_changed(saved: Path) -> None:
    """Each byte is changed to three others: a bit is flipped, any bit, and any byte put in its place."""
    file, draw = saved / "step-4" / MANIFEST, random.Random(0)
    data, found = file.read_bytes(), read_manifest(saved / "step-4")
    refused = 0
    for at, byte in enumerate(data):
        for other in {byte ^ 1, byte ^ 1 << draw.randrange(8), draw.randrange(256), ord(" ")} - {byte}:
            try:
                assert parse_manifest(data[:at] + bytes([other]) + data[at + 1 :], "it") == found, (at, other)
            except FzeroError as error:
                assert str(error).startswith("it: ")
                refused += 1
    assert refused > 3 * len(data) - 20  # but for spaces that other spaces replace


def test_a_manifest_that_ends_early_or_has_more(saved: Path) -> None:
    data = (saved / "step-4" / MANIFEST).read_bytes()
    for at in range(len(data)):
        with pytest.raises(FzeroError, match="^it: "):
            parse_manifest(data[:at], "it")
        with pytest.raises(FzeroError, match="^it: "):
            parse_manifest(data[:at] + b"{" + data[at:], "it")
    for other in b"[]", b"5", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}', data + data:
        with pytest.raises(FzeroError, match="^it: "):
            parse_manifest(other, "it")


STRANGE = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**62,
    2**70,
    0.5,
    float("inf"),
    "",
    "x",
    "../../x",
    "F64",
    "float",
    [],
    [1],
    {},
    {"fsdp": 3},
)


def spots(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a value of JSON."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from spots(value, (*at, key))


def test_a_manifest_that_says_anything_with_a_right_sum(damaged: Path) -> None:
    """Whatever stands in place of a value: a load is refused, or gives what was saved."""
    file = damaged / "step-4" / MANIFEST
    data = file.read_bytes()
    body = json.loads(data)["body"]
    refused = count = 0
    for spot in spots(body):
        for value in STRANGE:
            changed = copy.deepcopy(body)
            inner = changed
            for key in spot[:-1]:
                inner = inner[key]
            if inner[spot[-1]] == value and type(inner[spot[-1]]) is type(value):
                continue
            inner[spot[-1]], count = value, count + 1
            file.write_bytes(render(changed))
            try:
                found = load(damaged, make_like(), verify=False)
                verify(damaged)
            except FzeroError:
                refused += 1
                continue
            for path, leaf, expected in zip(tree.paths(found), tree.leaves(found), tree.leaves(make())):
                assert bits(leaf) == bits(expected) or spot[0] == "values", (spot, value, path)
    file.write_bytes(data)
    assert refused > count * 0.8


# files


def test_any_byte_of_a_files_header_that_changed(damaged: Path) -> None:
    file, draw = damaged / "step-4" / FIRST, random.Random(0)
    data = file.read_bytes()
    refused, end = 0, PREFIX + int.from_bytes(data[:PREFIX], "little")
    for at in range(end):
        flip(file, at, 1 << draw.randrange(8))
        try:
            assert is_whole(damaged, verify=False), at
        except FzeroError as error:
            assert str(file) in str(error)
            refused += 1
        file.write_bytes(data)
    assert refused > end - 10  # but for the spaces at the end


def test_paths_of_leaves_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    """A path is a key in a file, and never the name of one."""
    names = "../../x", "/etc/x", "..", "a/../../b", "rank-00001.safetensors", MANIFEST, "\0", "${HOME}", "~/x"
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate(names)}
    save(tmp_path / "a" / "b", fzero.partition(tensors, MESH), step=1)
    found = load(tmp_path / "a" / "b", {name: torch.empty(3) for name in names})
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert files == [f"a/b/{name}" for name in (".lock", f"step-1/{MANIFEST}", f"step-1/{FIRST}", f"step-1/{SECOND}")]


def test_a_manifest_cannot_name_a_file(saved: Path) -> None:
    outside = saved.parent / "outside"
    shutil.move(saved / "step-4" / SECOND, outside)
    for name in "../../outside", str(outside):
        for row in [name, "", ""], name, {"name": name}:
            rewrite(saved / "step-4" / MANIFEST, lambda body, row=row: body["files"].__setitem__(1, row))
            assert "is not the manifest of a checkpoint" in refuse(saved)


# ranks


def load_damaged(path: Path, damage: Callable[[Path], Any], mesh: DeviceMesh, **how: Any) -> tuple[Refusal, bool]:
    """The error of a load after damage to the file of rank 1, and whether the tree is as it was."""
    save(path, make(mesh), step=4)
    if dist.get_rank() == 0:
        damage(path / "step-4" / SECOND)
    dist.barrier()
    like = make_like(mesh)
    before = [bits(leaf) for leaf in tree.leaves(like)]
    found = refusal(lambda: load(path, like, **how))
    return found, [bits(leaf) for leaf in tree.leaves(like)] == before


def load_truncated(path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    """Only rank 1 reads the file."""
    return load_damaged(path, truncate, mesh, verify=False)


def load_verified(path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    return load_damaged(path, partial(flip, at=-1), mesh)


def load_whole_on_a_mesh(path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    """Leaves get their layouts while they are loaded, and rank 1 lacks the manifest."""
    save(path / str(dist.get_rank()), {"x": torch.ones(3)}, step=4)
    if dist.get_rank() == 1:
        truncate(path / "1" / "step-4" / MANIFEST)
    return refusal(lambda: load(path / str(dist.get_rank()), {"x": torch.ones(3)}, mesh)), True


def load_two_checkpoints(path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    """Each rank sees a folder of its own of this name, with the same step of another run."""
    mine = path / str(dist.get_rank())
    save(mine, {"params": {"up": TENSORS["up"] + dist.get_rank()}}, step=4)
    like = {"params": {"up": fzero.partition(TENSORS, mesh)["up"]}}
    before = bits(like["params"]["up"])
    found = refusal(lambda: load(mine, like, donate=True))
    return found, bits(like["params"]["up"]) == before


def load_another_dtype(path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    save(path, make(mesh), step=4)
    like = make_like(mesh, params={"up": torch.zeros(7, 5, dtype=torch.float64 if dist.get_rank() else torch.float32)})
    return refusal(lambda: load(path, like)), True


CASES = {
    load_truncated: f"rank 1 could not load: params\\..*{SECOND} has \\d+ bytes, \\d+ were written",
    load_verified: f"rank 1 could not load: .*step-4: {SECOND} has the CRC-32",
    load_whole_on_a_mesh: f"rank 1 could not load: .*{MANIFEST}: ",
    load_two_checkpoints: "ranks opened different checkpoints: step 4, save [0-9a-f]{32} [0-9a-f]{8}; step 4, save",
    load_another_dtype: r"rank 1 could not load: params.up: is float32\[7, 5\] in .*step-4, float64\[7, 5\] in `like`",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ranks")
    return run_cases(2, {case.__name__: partial(case, path / case.__name__) for case in CASES})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_error_of_one_rank_is_raised_on_all(case: Any, outcomes: dict[str, Any]) -> None:
    for found, is_as_it_was in values(outcomes[case.__name__]):
        assert found.kind == "FzeroError" and is_as_it_was
        assert re.search(CASES[case], found.message), found.message
