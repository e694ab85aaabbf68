"""File faults: files that changed places, were replaced, damaged or written by somebody else; and what a reader says.

    python tests/checkpoint/file_faults.py          prints a table of counts; --full tries more values in each place

A row does one thing to the files of a checkpoint, an index or a run, and reads. It ends as

    right    what was saved came back
    named    a `FzeroError`
    silent   something else came back
    raw      another exception
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
import fzero.checkpoint
import fzero.data
import fzero.deepspeed
from fzero import FzeroError
from fzero.checkpoint import latest, load, open_checkpoint, save, verify
from fzero.state.safetensors.header import PREFIX

MESH = fzero.VirtualMesh(fsdp=2)
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
MANIFEST = "manifest.json"


def make(version: int) -> dict[str, Any]:
    """What is saved. Versions have equal shapes, and so files of equal sizes."""
    draw = torch.Generator().manual_seed(version)
    values = {"up": torch.randn(7, 5, generator=draw), "down": torch.randn(3, 4, generator=draw)}
    return {"params": fzero.partition(values, MESH), "version": version}


LIKE = {"params": {"up": torch.empty(7, 5, device="meta"), "down": torch.empty(3, 4, device="meta")}, "version": 0}


def is_version(found: Any, version: int) -> bool:
    expected = make(version)
    same = (torch.equal(found["params"][x], expected["params"][x].full_tensor()) for x in ("up", "down"))
    return found["version"] == version and all(same)


class Place:
    """Two checkpoints of one run: step 1 has version 1, step 2 version 2."""

    def __init__(self, path: Path) -> None:
        self.path = path / "run"
        for step in 1, 2:
            save(self.path, make(step), step=step)

    def file(self, step: int, name: str = SECOND) -> Path:
        return self.path / f"step-{step}" / name

    def load(self, version: int = 2, **how: Any) -> bool:
        """Whether what is loaded is of this version."""
        return is_version(load(self.path, LIKE, **how), version)


AS_SAID = {"change_a_byte, verify=False"}
"""Rows that are silent, as the documents say."""
Row = Callable[[Place], bool]
"""Does something, and returns whether what was read is right."""


class Outcome(NamedTuple):
    group: str
    row: str
    end: str
    error: str


def run(group: str, name: str, row: Row, place: Place) -> Outcome:
    try:
        return Outcome(group, name, "right" if row(place) else "silent", "")
    except FzeroError as error:
        return Outcome(group, name, "named", str(error))
    except Exception as error:
        return Outcome(group, name, "raw", f"{type(error).__name__}: {error}")


# files that changed places, with and without sums


def swap(a: Path, b: Path) -> None:
    aside = a.with_suffix(".aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def age(folder: Path) -> None:
    """Make a checkpoint one of those that say nothing of their save."""
    file = folder / MANIFEST
    body = json.loads(file.read_bytes())["body"]
    body.pop("save", None)
    for number, row in enumerate(body["files"]):
        each = folder / f"rank-{number:05}.safetensors"
        data = each.read_bytes()
        end = PREFIX + int.from_bytes(data[:PREFIX], "little")
        header = json.loads(data[PREFIX:end])
        header.pop("__metadata__", None)
        data = render_header(header) + data[end:]
        each.write_bytes(data)
        row[0], row[1] = len(data), f"{zlib.crc32(data):08x}"
    file.write_bytes(render(body))


def render(body: Any) -> bytes:
    text = json.dumps(body)
    head = f'{{"format": "fzero.checkpoint", "version": 1, "crc32": "{zlib.crc32(text.encode()):08x}"'
    return f'{head}, "body": {text}}}'.encode()


def render_header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % PREFIX)
    return len(text).to_bytes(PREFIX, "little") + text


def list_moves() -> dict[str, Row]:
    def change_places(place: Place, **how: Any) -> bool:
        swap(place.file(1), place.file(2))
        return place.load(**how)

    def change_numbers(place: Place, **how: Any) -> bool:
        swap(place.file(2, FIRST), place.file(2))
        return place.load(**how)

    def change_manifests(place: Place, **how: Any) -> bool:
        swap(place.file(1, MANIFEST), place.file(2, MANIFEST))
        return place.load(**how)

    def copy_of_another_run(place: Place, **how: Any) -> bool:
        save(place.path.with_name("other"), make(3), step=2)
        shutil.copy(place.path.with_name("other") / "step-2" / SECOND, place.file(2))
        return place.load(**how)

    def change_a_byte(place: Place, **how: Any) -> bool:
        flip(place.file(2), -1)
        return place.load(**how)

    def old_file_in_a_new_checkpoint(place: Place, **how: Any) -> bool:
        age(place.path / "step-1")
        shutil.copy(place.file(1), place.file(2))
        return place.load(**how)

    def old_checkpoint(place: Place, **how: Any) -> bool:
        age(place.path / "step-2")
        return place.load(**how)

    def copied_folder(place: Place, **how: Any) -> bool:
        shutil.copytree(place.path, place.path.with_name("copy"))
        return is_version(load(place.path.with_name("copy"), LIKE, **how), 2)

    rows = change_places, change_numbers, change_manifests, copy_of_another_run, change_a_byte
    rows += old_file_in_a_new_checkpoint, old_checkpoint, copied_folder
    return {
        f"{row.__name__}, verify={checks}": lambda place, row=row, checks=checks: row(place, verify=checks)
        for row in rows
        for checks in (True, False)
    }


# a checkpoint that is replaced while it is read


def read(checkpoint: Any, path: str = "params.up") -> torch.Tensor:
    source = checkpoint[path]
    values = torch.empty(source.shape)
    source.read(0, values.view(-1))
    return values


def list_replacements() -> dict[str, Row]:
    def is_first(checkpoint: Any, *paths: str) -> bool:
        """Whether numbers and tensors are those of version 2."""
        found = {path: read(checkpoint, f"params.{path}") for path in paths}
        expected = make(2)["params"]
        is_same = all(torch.equal(value, expected[path].full_tensor()) for path, value in found.items())
        return is_same and checkpoint.values_by_path["version"] == 2

    def overwrite(place: Place) -> None:
        save(place.path, make(3), step=2, overwrite=True)

    def before_any_read(place: Place) -> bool:
        opened = open_checkpoint(place.path)
        overwrite(place)
        return is_first(opened, "up", "down")

    def between_reads(place: Place) -> bool:
        opened = open_checkpoint(place.path)
        is_right = is_first(opened, "up")
        overwrite(place)
        return is_first(opened, "down") and is_right

    def between_reads_of_equal_time(place: Place) -> bool:
        opened = open_checkpoint(place.path)
        is_right = is_first(opened, "up")
        times = {name: os.stat(place.file(2, name)).st_mtime_ns for name in (FIRST, SECOND)}
        overwrite(place)
        for name, time in times.items():
            os.utime(place.file(2, name), ns=(time, time))
        return is_first(opened, "down") and is_right

    def by_one_without_a_save(place: Place) -> bool:
        opened = open_checkpoint(place.path)
        overwrite(place)
        age(place.path / "step-2")
        return is_first(opened, "up", "down")

    def old_one_by_new_one(place: Place) -> bool:
        age(place.path / "step-2")
        opened = open_checkpoint(place.path)
        overwrite(place)
        return is_first(opened, "up", "down")

    def removed(place: Place) -> bool:
        opened = open_checkpoint(place.path)
        shutil.rmtree(place.path / "step-2")
        return is_first(opened, "up", "down")

    rows = before_any_read, between_reads, between_reads_of_equal_time, by_one_without_a_save
    return {row.__name__: row for row in (*rows, old_one_by_new_one, removed)}


# other things in the place of a file


def list_entries() -> dict[str, Row]:
    def be_folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    def be_fifo(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    def be_link_to_itself(file: Path) -> None:
        file.unlink()
        file.symlink_to(file.name)

    def be_link_to_nothing(file: Path) -> None:
        file.unlink()
        file.symlink_to("nothing")

    def be_link_to_a_copy(file: Path) -> None:
        file.rename(file.with_name("moved"))
        file.symlink_to("moved")

    def be_empty(file: Path) -> None:
        file.write_bytes(b"")

    def be_gone(file: Path) -> None:
        file.unlink()

    def be_noise(file: Path) -> None:
        file.write_bytes(random.Random(0).randbytes(file.stat().st_size))

    def be_zeros(file: Path) -> None:
        file.write_bytes(bytes(file.stat().st_size))

    def is_right(place: Place, how: dict[str, Any]) -> bool:
        open_checkpoint(place.path, 2)
        assert latest(place.path) == 2
        return place.load(step=2, **how)

    changes = be_folder, be_fifo, be_link_to_itself, be_link_to_nothing, be_link_to_a_copy
    changes += be_empty, be_gone, be_noise, be_zeros
    rows: dict[str, Row] = {}
    for change in changes:
        for name in SECOND, MANIFEST:
            for checks in True, False:

                def row(place: Place, change: Any = change, name: str = name, checks: bool = checks) -> bool:
                    change(place.file(2, name))
                    return is_right(place, {"verify": checks})

                rows[f"{name.partition('.')[0]} {change.__name__}, verify={checks}"] = row
    for change in changes[:5]:

        def of_a_folder(place: Place, change: Any = change) -> bool:
            folder = place.path / "step-2"
            if change is not be_link_to_a_copy:
                shutil.rmtree(folder)
                folder.touch()
            change(folder)
            return is_right(place, {})

        rows[f"step-2 {change.__name__}"] = of_a_folder
    return rows


# JSON that lies

STRANGE: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**62, 2**70, 10**400, 0.5, float("inf"), float("nan"), "", "x", "x" * 5000, "\0",
    "\ud800", "../../x", "/x", "F64", "float", [], [1], [[]], {}, {"": {}}, {"fsdp": 3},
]  # fmt: skip


def spots(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a value of JSON."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from spots(value, (*at, key))


def list_bodies(body: Any) -> Iterator[tuple[str, Any]]:
    """A value of JSON with another value in each place, without each entry, and with each entry of a list twice."""
    for spot in list(spots(body)):
        for value in [*STRANGE, "absent", "twice"]:
            changed = copy.deepcopy(body)
            inner = changed
            for key in spot[:-1]:
                inner = inner[key]
            if value == "absent":
                del inner[spot[-1]]
            elif value == "twice":
                if not isinstance(inner, list):
                    continue
                inner.insert(spot[-1], inner[spot[-1]])
            elif inner[spot[-1]] == value and type(inner[spot[-1]]) is type(value):
                continue
            else:
                inner[spot[-1]] = value
            yield f"{'.'.join(map(str, spot))} = {value!r:.30}", changed


def list_texts(text: bytes) -> Iterator[tuple[str, bytes]]:
    """A text of JSON as somebody else may have written it."""
    yield "not UTF-8", text.replace(b"step", b"st\xffep").replace(b"up", b"u\xffp").replace(b"F32", b"\xff")
    yield "UTF-16", text.decode().encode("utf-16")
    yield "a mark in front", b"\xef\xbb\xbf" + text
    yield "deep lists", b"[" * 100_000
    yield "deep dicts", b'{"a":' * 100_000
    yield "a deep value", text.replace(b"{", b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b", ", 1)
    yield "a key twice", text.replace(b"{", b'{"weight_map": {}, "format": 1, ', 1)
    yield "a long number", text.replace(b"{", b'{"a": ' + b"9" * 5000 + b", ", 1)
    yield "two values", text + text
    yield "nothing", b""
    yield "zeros", bytes(len(text))
    for value in b"null", b"5", b'"x"', b"[]", b"{}", b"NaN":
        yield value.decode(), value


def draw_some(rows: list[Any], every: int) -> list[Any]:
    return rows[random.Random(len(rows)).randrange(every) :: every]


def fuzz_manifests(place: Place, every: int) -> Iterator[Outcome]:
    file = place.file(2, MANIFEST)
    data = file.read_bytes()
    body = json.loads(data)["body"]
    texts = [(name, render(changed)) for name, changed in draw_some(list(list_bodies(body)), every)]
    inner = json.dumps(body).encode()
    wrapped = [
        (name, b'{"format": "fzero.checkpoint", "version": 1, "crc32": "%08x", "body": %b}' % (zlib.crc32(text), text))
        for name, text in list_texts(inner)
    ]
    for name, text in [*texts, *wrapped, *list_texts(data)]:
        file.write_bytes(text)
        unchecked = name.startswith(("values", "metadata", "versions", "a key twice"))

        def row(place: Place, unchecked: bool = unchecked) -> bool:
            opened = open_checkpoint(place.path, 2)
            repr(opened), repr(opened.metadata)
            found = load(place.path, LIKE, step=2, verify=False)
            return unchecked or is_version(found, 2)

        yield run("manifest's JSON", name, row, place)
    file.write_bytes(data)


def fuzz_headers(place: Place, every: int) -> Iterator[Outcome]:
    file = place.file(2)
    data = file.read_bytes()
    end = PREFIX + int.from_bytes(data[:PREFIX], "little")
    header = json.loads(data[PREFIX:end])
    texts = [(name, json.dumps(changed).encode()) for name, changed in draw_some(list(list_bodies(header)), every)]
    manifest = place.file(2, MANIFEST)
    known = manifest.read_bytes()
    for name, text in [*texts, *list_texts(data[PREFIX:end])]:
        text += b" " * (-len(text) % PREFIX)
        file.write_bytes(len(text).to_bytes(PREFIX, "little") + text + data[end:])
        body = json.loads(known)["body"]
        body["files"][1][:2] = [file.stat().st_size, f"{zlib.crc32(file.read_bytes()):08x}"]
        manifest.write_bytes(render(body))
        yield run("file's header", name, lambda place: place.load(verify=False), place)
        yield run(
            "file's header", name, lambda place: fzero.state.safetensors.open_safetensors(file) is not None, place
        )
    file.write_bytes(data)
    manifest.write_bytes(known)


def fuzz_indexes(scratch: Path, place: Place, every: int) -> Iterator[Outcome]:
    """Indexes of Hugging Face's."""
    folder = scratch / "index"
    folder.mkdir()
    a, b = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    fzero.save_safetensors({"a": a}, folder / "one.safetensors")
    fzero.save_safetensors({"b": b}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    known = {"metadata": {"total_size": 40}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    like = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(4, device="meta")}
    names = [
        ".",
        "..",
        "/",
        "",
        "model.safetensors.index.json",
        "no",
        "x/one.safetensors",
        "one.safetensors/",
        "\0",
        "a\nb",
    ]
    bodies = [(f"b in {name!r:.20}", known | {"weight_map": known["weight_map"] | {"b": name}}) for name in names]
    texts = [(name, json.dumps(changed).encode()) for name, changed in [*list_bodies(known), *bodies]]

    def row(_: Place) -> bool:
        found = fzero.load_safetensors(folder, like, MESH)
        return torch.equal(found["a"].full_tensor(), a) and torch.equal(found["b"].full_tensor(), b)

    for name, text in [*texts, *list_texts(json.dumps(known).encode())]:
        index.write_bytes(text)
        yield run("index's JSON", name, row, place)


# arguments


NUMBERS: list[Any] = [-1, 0, True, 0.5, 2.0, float("nan"), float("inf"), "1", 2**63, 2**70, torch.tensor(-1),
                      torch.tensor(1.5)]  # fmt: skip


def list_calls(scratch: Path, place: Place) -> dict[str, Callable[[Any], bool]]:
    """Calls with a number, by function and argument. Each says whether its result is right for this number."""
    file, empty = scratch / "numbers.safetensors", {"x": torch.empty(6, device="meta")}
    values = {"x": torch.arange(6.0)}
    fzero.save_safetensors(values, file)
    examples = torch.utils.data.TensorDataset(torch.arange(10.0))

    def is_whole(found: Any) -> bool:
        return torch.equal(found["x"].full_tensor(), values["x"])

    def write(**how: Any) -> bool:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        save(folder / "run", make(1), **{"step": 1} | how)
        return is_version(load(folder / "run", LIKE), 1)

    def write_file(**how: Any) -> bool:
        fzero.save_safetensors(values, scratch / "it", **how)
        return torch.equal(fzero.load_safetensors(scratch / "it", empty, MESH)["x"].full_tensor(), values["x"])

    def load_donated(**how: Any) -> bool:
        given = make(1)
        try:
            return is_version(load(place.path, given, donate=True, **how), 2)
        except FzeroError:
            assert is_version(given, 1), "the values that were given are lost"
            raise

    def draw(x: Any) -> bool:
        rule = lambda path, leaf: fzero.initializers.normal(1.0)  # noqa: E731
        return fzero.init(empty, MESH, rule, seed=x)["x"].full_tensor().isfinite().all().item()

    def run_steps(**how: Any) -> bool:
        state = fzero.State(params=fzero.partition({"w": torch.zeros(4)}, MESH), step=torch.tensor(0))
        loader = fzero.data.loader(examples, 2, MESH)
        taken = list[int]()
        folder, given = Path(tempfile.mkdtemp(dir=scratch)), {"steps": 2, "every": 1} | how
        if isinstance(given["steps"], int) and given["steps"] > 2**62:
            raise FzeroError("steps", "is too much to wait for", "")
        checkpoint.run(
            lambda state, batch: (state, 0), state, loader, folder, **given, after=lambda n, _: taken.append(n)
        )
        return len(taken) == given["steps"]

    def rows(**how: Any) -> bool:
        loader = fzero.data.loader(examples, **{"batch": 2, "mesh": MESH} | how)
        return sorted(x for batch in loader for x in batch[0].tolist()) == list(range(10))

    def pad(x: Any) -> bool:
        found = fzero.data.pad({"a": torch.ones(3, 2)}, {"a": 0}, count=x)["a"]
        return found.sum().item() == 2 * min(int(x), 3)

    checkpoint, parts = fzero.checkpoint, fzero.partition
    return {
        "load chunk": lambda x: is_version(load(place.path, LIKE, chunk=x), 2) and x > 0,
        "load chunk, donated": lambda x: load_donated(chunk=x) and x > 0,
        "load chunk on a mesh": lambda x: load(place.path, LIKE, MESH, chunk=x)["version"] == 2 and x > 0,
        "load step": lambda x: is_version(load(place.path, LIKE, step=x), 2),
        "open_checkpoint step": lambda x: open_checkpoint(place.path, x).step == x,
        "verify step": lambda x: verify(place.path, x) == x,
        "save step": lambda x: write(step=x),
        "save keep": lambda x: write(keep=x) and x > 0,
        "save_safetensors chunk": lambda x: write_file(chunk=x) and x > 0,
        "load_safetensors chunk": lambda x: is_whole(fzero.load_safetensors(file, empty, MESH, chunk=x)) and x > 0,
        "partition chunk": lambda x: is_whole(parts(values, MESH, chunk=x)) and x > 0,
        "partition persist": lambda x: is_whole(parts(values, MESH, persist=x)) and x >= 0,
        "partition unit": lambda x: is_whole(parts(values, MESH, unit=x)) and x > 0,
        "partition source_rank": lambda x: is_whole(parts(values, MESH, source_rank=x)) and x in (0, 1),
        "load_params chunk": lambda x: is_whole(
            checkpoint.load_params(fzero.state.safetensors.open_safetensors(file), empty, MESH, chunk=x)
        ),
        "init seed": draw,
        "run steps": lambda x: run_steps(steps=x),
        "run every": lambda x: run_steps(every=x),
        "run keep": lambda x: run_steps(keep=x),
        "loader batch": lambda x: rows(batch=x),
        "loader seed": lambda x: rows(seed=x),
        "pad count": pad,
    }


def run_numbers(scratch: Path, place: Place) -> Iterator[Outcome]:
    for name, call in list_calls(scratch, place).items():
        for value in NUMBERS:
            yield run("numbers", f"{name}={value!r}", lambda _, call=call, value=value: call(value), place)


# paths


def list_paths(scratch: Path) -> dict[str, Any]:
    folder = scratch / "paths"
    folder.mkdir()
    (folder / "file").write_text("{}")
    (folder / "file.json").write_text("{}")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.json")
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "folder.json").mkdir()
    names = [
        "nothing",
        "file",
        "file.json",
        "file/child",
        "loop",
        "loop/child",
        "dangling",
        "empty",
        "fifo",
        "fifo.json",
    ]
    names += ["fifo.safetensors", "folder.json", "x" * 300, "x" * 300 + ".json", "y/" * 3000, "\0", "\udcff", "a\nb"]
    return {f"{name!r:.24}": folder / name for name in names} | {"''": "", "b''": b"x", "0": 0}


def list_openers(place: Place) -> dict[str, Callable[[Any], Any]]:
    """Functions that take a path to read."""
    checkpoint, like = fzero.checkpoint, {"x": torch.empty(6, device="meta")}
    zero = fzero.deepspeed.utils.zero_to_fp32
    return {
        "load": lambda path: load(path, LIKE),
        "latest": lambda path: latest(path) is None,
        "verify": verify,
        "open_checkpoint": open_checkpoint,
        "load_safetensors": lambda path: fzero.load_safetensors(path, like, MESH),
        "open_dcp": checkpoint.open_dcp,
        "read_dcp_values": checkpoint.read_dcp_values,
        "open_deepspeed": checkpoint.open_deepspeed,
        "zero_to_fp32": zero.get_fp32_state_dict_from_zero_checkpoint,
        "disk": lambda path: fzero.partition({"x": torch.ones(3)}, MESH, to=fzero.disk(path)) is not None,
        "load_hf": lambda path: checkpoint.load_hf(path, like, MESH),
    }


def list_writers(scratch: Path) -> dict[str, Callable[[Any], Any]]:
    """Functions that take a path to write to, which then can be read."""
    values = {"x": torch.arange(6.0)}
    like = {"x": torch.empty(6, device="meta")}

    def write_checkpoint(path: Any) -> bool:
        save(path, make(1), step=1)
        return is_version(load(path, LIKE), 1)

    def write_file(path: Any) -> bool:
        fzero.save_safetensors(values, path)
        found = fzero.load_safetensors(path, like, MESH)["x"].full_tensor()
        os.unlink(path)
        return torch.equal(found, values["x"])

    def write_dcp(path: Any) -> bool:
        fzero.checkpoint.save_dcp(path, fzero.partition(values, MESH))
        return "x" in fzero.checkpoint.open_dcp(path)

    return {"save": write_checkpoint, "save_safetensors": write_file, "save_dcp": write_dcp}


def run_paths(scratch: Path, place: Place) -> Iterator[Outcome]:
    here = os.getcwd()
    # Writers replace files, and tests may run as root: no path leads out of the scratch folder.
    for name, call in (list_openers(place) | list_writers(scratch)).items():
        home = Path(tempfile.mkdtemp(dir=scratch))
        for value in list_paths(home).items():
            os.chdir(home)  # for the path ""
            inside = value[1] in ("", b"x", 0) or str(value[1]).startswith(f"{home}/paths/")
            assert inside and ".." not in str(value[1]), value

            def row(_: Place, call: Any = call, path: Any = value[1]) -> bool:
                return call(path) is True  # nothing is there to read

            yield run("paths", f"{name}({value[0]})", row, place)
    os.chdir(here)


# metadata


METADATA: dict[str, Any] = {
    "a number as key": {1: 2},
    "None as key": {"a": {None: 1}},
    "True as key": {"a": [{True: 1}]},
    "a tuple": {"a": (1, 2)},
    "a tensor": {"a": torch.ones(1)},
    "a set": {"a": {1}},
    "bytes": {"a": b"x"},
    "deep": None,
    "all of JSON": {"a": [1, 2.5, None, True, "x", {"b": []}], "": {}},
    "not a number": {"a": float("inf")},
    "surrogates": {"\ud800": "\udfff"},
}


def list_metadata() -> dict[str, Row]:
    def write(place: Place, name: str) -> bool:
        given = METADATA[name]
        if name == "deep":
            given = []
            for _ in range(5000):
                given = [given]
            given = {"a": given}
        save(place.path, make(3), step=3, metadata=given)
        found = open_checkpoint(place.path, 3).metadata
        return repr(found) == repr(given) and place.load(3)

    return {name: lambda place, name=name: write(place, name) for name in METADATA}


# the table


def run_all(scratch: Path, every: int = 1) -> list[Outcome]:
    """All rows; of those that put other values into JSON one of `every`."""
    found, pristine = [], Place(scratch / "pristine")
    groups = {
        "files change places": list_moves(),
        "replaced while read": list_replacements(),
        "other things for files": list_entries(),
        "metadata": list_metadata(),
    }
    for group, rows in groups.items():
        for name, row in rows.items():
            target = scratch / "row"
            shutil.copytree(scratch / "pristine", target, symlinks=True)
            place = copy.copy(pristine)
            place.path = target / "run"
            found.append(run(group, name, row, place))
            shutil.rmtree(target)
    found += fuzz_manifests(pristine, every)
    found += fuzz_headers(pristine, every)
    found += fuzz_indexes(scratch, pristine, every)
    found += run_numbers(scratch, pristine)
    found += run_paths(scratch, pristine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of values in JSON, try one of so many")
    parser.add_argument("--show", action="store_true", help="also the errors that are named")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run_all(Path(scratch), given.every)
    for outcome in found:
        if given.show or outcome.end in ("silent", "raw"):
            print(f"{outcome.end:7} {outcome.group}: {outcome.row}  {outcome.error:.200}")
    for group in dict.fromkeys(outcome.group for outcome in found):
        counts = Counter(outcome.end for outcome in found if outcome.group == group)
        print(f"{group:24}", ", ".join(f"{end} {counts[end]}" for end in ("named", "right", "silent", "raw")))
    sys.exit(any(outcome.end in ("silent", "raw") and outcome.row not in AS_SAID for outcome in found))


if __name__ == "__main__":
    main()
