"""A folder of files: whatever happens to it, a step runs, with its own program."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import threading
import zlib
from pathlib import Path

import pytest
from programs import STEPS, assert_same
from test_cache_programs import Process, assert_equal

import fzero.cache.store
from fzero.base.mesh import VirtualMesh
from fzero.cache.store import MARK, ProgramStore
from fzero.program.program import Program

CASE = STEPS["unrolled"](VirtualMesh(fsdp=2))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Program]:
    """A folder, and the program that is in it."""
    folder = tmp_path_factory.mktemp("written")
    return folder, Process(CASE, folder).prepare()


@pytest.fixture
def traced(written: tuple[Path, Program], tmp_path: Path) -> Program:
    """The program of a folder of each test's own."""
    folder, program = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return program


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def check_traced_again(folder: Path, traced: Program) -> None:
    process = Process(CASE, folder)
    assert_same(CASE.run(process.prepare()), CASE.run(traced))
    assert process.traces == 1


def test_a_file_of_any_other_bytes_is_as_no_file(
    tmp_path: Path, traced: Program, caplog: pytest.LogCaptureFixture
) -> None:
    file = only_file(tmp_path)
    whole, draw = file.read_bytes(), random.Random(0)
    spoiled = [b"", whole[:10], whole[: len(whole) // 2], whole[:-1], whole + b"x", b"x" + whole, bytes(len(whole))]
    for _ in range(20):
        at = draw.randrange(len(whole))
        spoiled.append(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
    for content in spoiled:
        file.write_bytes(content)
        assert ProgramStore(tmp_path).read(file.stem) is None
    check_traced_again(tmp_path, traced)
    assert "is damaged" in caplog.text
    restored = Process(CASE, tmp_path)  # from the file, which was written anew
    assert_equal(restored.prepare(), traced)
    assert restored.traces == 0


def rewrite(folder: Path, change: object) -> None:
    """Change the data of the only file, with its hash."""
    file = only_file(folder)
    store, key = ProgramStore(folder), file.stem
    data = store.read(key)
    change(data)  # type: ignore[operator]
    store.write(key, data)


@pytest.mark.parametrize("what", ["target", "function", "builtin", "class", "record", "kind", "missing", "number"])
def test_data_that_is_no_program_is_as_no_file(
    what: str, tmp_path: Path, traced: Program, caplog: pytest.LogCaptureFixture
) -> None:
    def change(data: dict[str, object]) -> None:
        top = data["program"]["top"]  # type: ignore[index]
        node = next(node for node in top["nodes"] if node[1] == "call_function")
        if what == "target":
            node[2] = ["operator", "aten.no_such_operation.default"]
        elif what == "function":
            node[2] = ["function", "system"]
        elif what == "builtin":
            node[2] = ["builtin", "os", "system"]
        elif what == "class":
            top["noted"] = ["tuple", ["class", "os:PathLike2"]]
        elif what == "record":
            top["measured"] = ["record", "subprocess:Popen", "true"]
        elif what == "kind":
            node[3] = ["tuple", ["pickle", "cos"]]
        elif what == "missing":
            del top["nodes"]
        else:
            node[3] = ["tuple", ["node", 10**6]]

    rewrite(tmp_path, change)
    check_traced_again(tmp_path, traced)
    assert "is traced" in caplog.text


def test_a_file_under_the_key_of_another_is_as_no_file(tmp_path: Path, traced: Program) -> None:
    other = STEPS["averaged"](VirtualMesh(fsdp=2))
    Process(other, tmp_path / "other").prepare()
    os.replace(only_file(tmp_path / "other"), next(x for x in tmp_path.iterdir() if x.is_file()))
    check_traced_again(tmp_path, traced)


@pytest.mark.parametrize("folder", ["a file", "no permission", "a folder in the place of the file"])
def test_a_folder_that_cannot_be_used_fails_no_step(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "folder"
    if folder == "a file":
        place.write_text("")
    elif folder == "no permission":
        monkeypatch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(PermissionError("no permission")))
    else:
        Process(CASE, place).prepare()
        file = only_file(place)
        file.unlink()
        file.mkdir()
    assert Process(CASE, place).prepare()
    assert "cannot be" in caplog.text


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert Process(CASE, tmp_path).prepare()
    assert "No space left" in caplog.text and not list(tmp_path.iterdir())


def test_two_jobs_share_a_folder(tmp_path: Path) -> None:
    """Readers beside writers of one key see a whole file or none."""
    store, key, wrong = ProgramStore(tmp_path), "k", list[object]()
    contents = [{"is": "a" * 10**5}, {"is": "b" * 10**4}]

    def write(data: object) -> None:
        for _ in range(50):
            store.write(key, data)

    def read() -> None:
        for _ in range(200):
            found = store.read(key)
            if found is not None and found not in contents:
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.read(key) in contents
    assert only_file(tmp_path) == store.path(key)


def test_a_file_holds_plain_data(tmp_path: Path, traced: Program) -> None:
    content = only_file(tmp_path).read_bytes()
    data = json.loads(zlib.decompress(content[len(MARK) + 32 :]))
    assert data["key"] == only_file(tmp_path).stem


def test_a_file_of_another_version_is_as_no_file(
    tmp_path: Path, traced: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fzero.cache.store, "MARK", b"fzero program 0\n")
    assert ProgramStore(tmp_path).read(only_file(tmp_path).stem) is None


def test_the_logger_says_where_a_program_comes_from(
    tmp_path: Path, traced: Program, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fzero"):
        assert_equal(Process(CASE, tmp_path).prepare(), traced)
    assert f"has its program from {only_file(tmp_path)}" in caplog.text
