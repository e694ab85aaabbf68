"""Faults around saving: what is in the way, what fails, who is killed, and who else writes into the folder."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import LIKE, Calls, Folder, Save, fail_once, state, tensors
from processes import Refusal, refusal, run_cases, run_script, values
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError
from fzero.checkpoint import latest, load, open_dcp, save, save_dcp, verify
from fzero.checkpoint.folder import LOCK, list_steps, open_partial
from fzero.checkpoint.manifest import MANIFEST
from fzero.state import publishing
from fzero.state.publishing import TEMPORARY

MEMORY = Path("/dev/shm")
NOBODY = 65534
MESH = fzero.VirtualMesh(fsdp=2)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: to sync takes no time there."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made:
        os.chmod(made, 0o755)
        yield Path(made) / "run"


def names(path: Path) -> set[str]:
    return set(os.listdir(path)) - {LOCK}


def holds(path: Path, step: int, version: int) -> bool:
    """Whether a checkpoint verifies and has a version, bit for bit."""
    found = load(path, LIKE, step=step, verify=True)
    return found["version"] == version and all(map(torch.equal, found["params"].values(), tensors(version).values()))


# keep


@pytest.mark.parametrize("there", range(6))
@pytest.mark.parametrize("keep", [1, 2, 4, 9])
def test_keep_leaves_so_many_checkpoints_or_all_that_there_are(place: Path, there: int, keep: int) -> None:
    for step in range(there):
        save(place, {"x": torch.ones(2)}, step=step)
    save(place, {"x": torch.ones(2)}, step=there, keep=keep)
    assert list_steps(place) == list(range(there + 1))[-keep:]


def test_order_is_by_steps_where_clocks_go_back(place: Path) -> None:
    for step, year in (8, 0), (9, -10), (10, -20):
        save(place, state(step, MESH), step=step)
        for file in (place / f"step-{step}", *(place / f"step-{step}").iterdir()):
            os.utime(file, (time.time() + year * 3e7,) * 2)
    assert latest(place) == 10 and load(place, LIKE)["version"] == 10
    save(place, state(11, MESH), step=11, keep=2)
    assert list_steps(place) == [10, 11]


def test_what_cannot_be_removed_is_a_warning_and_the_next_save_removes_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, state(1, MESH), step=1)

    def refuse(entry: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(entry))

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="step-1 could not be removed: .*busy"):
        patched.setattr(shutil, "rmtree", refuse)
        save(place, state(2, MESH), step=2, keep=1)
    assert list_steps(place) == [2] and holds(place, 2, 2)
    assert "step-1.partial" in names(place)
    save(place, state(3, MESH), step=3, keep=1)
    assert names(place) == {"step-3"}


# kills and errors, drawn


def test_twelve_kills_and_six_errors(place: Path) -> None:
    """`python tests/checkpoint/faults.py` draws hundreds, and kills before each call."""
    place.mkdir()
    given = "--kills=12", "--every=12", "--errors=6", f"--scratch={place}"
    first, _, last = run_script(Path(__file__).with_name("faults.py"), *given).splitlines()
    assert first.startswith("12 kills") and last.startswith("6 errors")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("overwrite", ["nothing", "by an exchange", "by renames"])
@pytest.mark.filterwarnings("ignore:.*could not be removed")
def test_each_call_that_fails(place: Path, code: int, overwrite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save replaces a checkpoint or none and removes an older one, and each of its calls fails once. The save raises,
    names are as they were, and the same save succeeds. Or only a removal failed: then the checkpoint is there."""
    if overwrite == "by renames":
        monkeypatch.setattr(publishing, "_rename_exchange", lambda a, b: False)
    at, refused, moment, struck = Folder(place), 0, 0, "a call"
    at.save_next(MESH)
    while struck:
        at.save_next(MESH)
        shutil.copytree(place / f"step-{at.next_step - 1}", place / "step-0", dirs_exist_ok=True)
        at.versions[0] = at.versions[at.next_step - 1]
        replaces = overwrite != "nothing"
        each = Save(at.next_step - replaces, at.next_version(), keep=2, overwrite=replaces)
        struck, error = fail_once(at, each, MESH, moment, code)
        at.check()
        if error is not None:
            assert os.strerror(code) in error
            refused += 1
            at.begun(each)
            each.run(place, MESH)
            at.ended(each)
        else:
            at.save_next(MESH)
        at.check()
        at.check_tidy()
        moment += 1
    assert refused >= 12 and moment > refused


WRITERS: dict[str, tuple[Callable[[Path, Any], None], Callable[[Path], Any], bool]] = {
    "save_safetensors": (lambda at, values: fzero.save_safetensors(values, at), fzero.open_safetensors, False),
    "over a file": (lambda at, values: fzero.save_safetensors(values, at), fzero.open_safetensors, True),
    "save_dcp": (save_dcp, open_dcp, False),
}
"""A function that writes a file or a folder, one that opens it, and whether there is an older one."""


@pytest.mark.parametrize("writer", WRITERS)
def test_each_call_that_fails_in_a_save_of_another_format(place: Path, writer: str) -> None:
    """Each call fails once: the save raises, and what was there before is as it was; or all of it is there."""
    (write, read, has_old), refused, moment, struck = WRITERS[writer], 0, 0, [""]
    while struck:
        at, struck, version = place / f"{moment}", list[str](), 2

        def strike(name: str, struck: list[str] = struck) -> None:
            struck.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO), "a fault")

        at.mkdir(parents=True)
        if has_old:
            write(at / "x", fzero.partition(tensors(1), MESH))
        try:
            with Calls(moment, strike).watch():
                write(at / "x", fzero.partition(tensors(2), MESH))
        except FzeroError as error:
            assert "rank 0 could not write it" in str(error) and os.strerror(errno.EIO) in str(error)
            refused, version = refused + 1, int(has_old)
        is_removal = bool({"unlink", "rmdir"} & set(struck))  # then the next process removes it
        left = [name for name in os.listdir(at) if not (is_removal and name.endswith(TEMPORARY))]
        assert left == ["x"] * (version > 0), struck
        for name, source in (read(at / "x") if version else {}).items():
            values = torch.empty(source.shape)
            source.read(0, values.view(-1))
            assert values.equal(tensors(version)[name]), struck
        moment += 1
    assert refused >= 4 and moment > refused


def test_a_kill_between_two_renames_leaves_the_replaced_checkpoint(place: Path) -> None:
    """On a filesystem that cannot exchange names, a checkpoint that is being replaced has another name for a moment."""
    save(place, state(1, MESH), step=4)
    os.rename(place / "step-4", place / f"step-4{publishing.REPLACED}")
    assert list_steps(place) == [4] and holds(place, 4, 1)
    save(place, state(2, MESH), step=4, overwrite=True)
    assert names(place) == {"step-4"} and holds(place, 4, 2)
    shutil.copytree(place / "step-4", place / f"step-4{publishing.REPLACED}")
    save(place, state(3, MESH), step=5)
    assert names(place) == {"step-4", "step-5"} and holds(place, 4, 2)


# full and read-only


def assert_refused_and_mended(path: Path, words: str, large: Any) -> None:
    """A save of too much is refused; the checkpoint before it is as it was, and a small save succeeds."""
    with pytest.raises(FzeroError, match=words):
        save(path, large, step=2)
    assert names(path) == {"step-1"} and holds(path, 1, 1)
    save(path, state(3, MESH), step=2)
    assert names(path) == {"step-1", "step-2"} and holds(path, 2, 3)


LARGE = {"x": torch.ones(1 << 17)}


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", tmp_path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this process may not mount a filesystem of 128 KiB: {done.stderr.strip()}")
    try:
        save(tmp_path, state(1, MESH), step=1)
        assert_refused_and_mended(tmp_path, "step-2: rank 0 could not save: .*No space left", LARGE)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_that_may_not_be_so_large(place: Path) -> None:
    save(place, state(1, MESH), step=1)
    known = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, known[1]))
    try:
        assert_refused_and_mended(place, "step-2: rank 0 could not save: .*File too large", LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, known)


@pytest.fixture
def powerless() -> Iterator[None]:
    """The effective user is not root, whom no mode of a folder keeps out."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(user)


def test_a_folder_that_is_read_only(place: Path, request: pytest.FixtureRequest) -> None:
    save(place, state(1, MESH), step=1)
    place.chmod(0o555)
    request.getfixturevalue("powerless")
    with pytest.raises(FzeroError, match=r"step-2: rank 0 could not save: PermissionError: .*run/\.lock"):
        save(place, state(2, MESH), step=2)
    assert latest(place) == 1 and holds(place, 1, 1)


def test_a_folder_that_cannot_be_listed(place: Path, request: pytest.FixtureRequest) -> None:
    save(place, state(1, MESH), step=1)
    place.chmod(0o000)
    request.getfixturevalue("powerless")
    for read in (latest, verify, lambda path: load(path, LIKE)):
        with pytest.raises(FzeroError, match="run: cannot be read: Permission denied"):
            read(place)


# filesystems that lack something


def test_a_filesystem_that_cannot_sync_folders(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, refused = os.fsync, []

    def sync_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync_files)
    save(place, state(1, MESH), step=1)
    assert refused and holds(place, 1, 1)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_locks(place: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", raise_error(code))
    save(place, state(1, MESH), step=1)
    assert holds(place, 1, 1)


def test_a_lock_that_fails_is_no_other_process(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", raise_error(errno.EIO))
    with pytest.raises(FzeroError, match="rank 0 could not save: OSError: .*Input/output error"):
        save(place, state(1, MESH), step=1)
    assert names(place) == set()


def raise_error(code: int) -> Callable[..., None]:
    def refuse(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_filesystem_that_cannot_exchange_names(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_rename_exchange", lambda a, b: False)
    for version in 1, 2:
        save(place, state(version, MESH), step=1, overwrite=True)
        assert names(place) == {"step-1"} and holds(place, 1, version)


# something in the way


def put_folder(entry: Path, elsewhere: Path) -> None:
    entry.mkdir(parents=True)
    (entry / "mine").write_text("kept")


def put_file(entry: Path, elsewhere: Path) -> None:
    entry.parent.mkdir(parents=True)
    entry.write_text("kept")


def put_link(entry: Path, elsewhere: Path) -> None:
    put_folder(elsewhere, elsewhere)
    entry.parent.mkdir(parents=True)
    entry.symlink_to(elsewhere)


def put_link_to_nothing(entry: Path, elsewhere: Path) -> None:
    entry.parent.mkdir(parents=True)
    entry.symlink_to(elsewhere)


def put_link_to_checkpoint(entry: Path, elsewhere: Path) -> None:
    save(elsewhere, state(9, MESH), step=9)
    entry.parent.mkdir(parents=True)
    entry.symlink_to(elsewhere / "step-9")


PUTS = [put_folder, put_file, put_link, put_link_to_nothing, put_link_to_checkpoint]


def list_all(path: Path) -> dict[str, Any]:
    """All that is below a folder: what a link leads to, and the bytes of a file."""
    found = sorted(path.rglob("*"))
    return {
        str(file): os.readlink(file) if file.is_symlink() else file.read_bytes() if file.is_file() else ""
        for file in found
        if file.name != LOCK
    }


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_has_a_checkpoints_name_and_is_none_is_left_alone(
    place: Path, tmp_path: Path, put: Callable[[Path, Path], None], overwrite: bool
) -> None:
    put(place / "step-9", tmp_path / "elsewhere")
    before = list_all(place), list_all(tmp_path)
    with pytest.raises(FzeroError, match="run/step-9: is there already, and is no folder of a checkpoint; move it"):
        save(place, state(1, MESH), step=9, overwrite=overwrite)
    assert (list_all(place), list_all(tmp_path)) == before
    is_checkpoint = put is put_link_to_checkpoint
    assert latest(place) == (9 if is_checkpoint else None)
    save(place, state(1, MESH), step=10, keep=1)
    assert names(place) == ({"step-10"} if is_checkpoint else {"step-9", "step-10"})
    assert list_all(tmp_path) == before[1]


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("step", [3, 4])
def test_what_has_a_partial_name_is_removed_but_not_what_a_link_leads_to(
    place: Path, tmp_path: Path, put: Callable[[Path, Path], None], step: int
) -> None:
    put(place / "step-3.partial", tmp_path / "elsewhere")
    before = list_all(tmp_path)
    save(place, state(1, MESH), step=step)
    assert names(place) == {f"step-{step}"} and holds(place, step, 1)
    assert list_all(tmp_path) == before


def test_a_partial_checkpoint_of_another_world_size(place: Path) -> None:
    save(place, state(1, fzero.VirtualMesh(fsdp=4)), step=3)
    (place / "step-3" / MANIFEST).unlink()
    (place / "step-3" / "a folder").mkdir()
    os.rename(place / "step-3", place / "step-3.partial")
    save(place, state(2, MESH), step=3)
    assert holds(place, 3, 2)
    assert set(os.listdir(place / "step-3")) == {MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"}


def test_names_that_are_not_fzeros_are_left_alone(place: Path) -> None:
    others = {"step-x.partial", "step-07.partial", "step-7.old", "my-step-7.partial"}
    for name in others:
        (place / name).mkdir(parents=True)
    save(place, state(1, MESH), step=8, keep=1)
    assert names(place) == others | {"step-8"}


# two jobs in one folder


def hold_until_killed(path: Path, pipe: Connection) -> None:
    """A job in the middle of its save of step 7."""
    with open_partial(path, 7):
        (path / "step-7.partial" / "rank-00000.safetensors").write_text("half of it")
        pipe.send(os.getpid())
        time.sleep(120)


def test_a_second_job_is_refused_by_name_until_the_first_is_killed(place: Path) -> None:
    save(place, state(1, MESH), step=1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "fzero"])  # as processes.py
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold_until_killed, args=(place, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        owner = f"process {ours.recv()} on {os.uname().nodename} is writing there"
        for step in 7, 7, 8:
            with pytest.raises(FzeroError, match=f"run: {owner}; end that process, or give each job a folder"):
                save(place, state(2, MESH), step=step)
        assert (place / "step-7.partial" / "rank-00000.safetensors").read_text() == "half of it"
        assert holds(place, 1, 1)
    finally:
        process.kill()
        process.join()
    save(place, state(2, MESH), step=7)
    assert names(place) == {"step-1", "step-7"} and holds(place, 7, 2)


def test_a_checkpoint_that_appears_during_a_save_is_not_replaced(place: Path, tmp_path: Path) -> None:
    """As by another job on a filesystem without locks."""
    save(tmp_path, state(1, MESH), step=7)

    def appear(name: str) -> None:
        shutil.copytree(tmp_path / "step-7", place / "step-7")

    save(place, state(2, MESH), step=6)
    calls = Calls(12, appear)  # the checkpoint is being written
    with calls.watch(), pytest.raises(FzeroError, match="step-7: rank 0 could not save: .*Directory not empty"):
        save(place, state(2, MESH), step=7)
    assert calls.made[12] in ("create", "write", "fsync")
    assert names(place) == {"step-6", "step-7"} and holds(place, 7, 1)


def test_two_saves_of_one_process_into_one_folder(place: Path) -> None:
    with open_partial(place, 3):
        with pytest.raises(FzeroError, match="another save of this process is writing there; wait for that one"):
            save(place, state(1, MESH), step=1)
        assert names(place) == {"step-3.partial"}
    save(place, state(1, MESH), step=1)
    assert names(place) == {"step-1"}


# saves without waiting


def test_a_call_that_waits_for_a_save_and_is_interrupted_leaves_it_alone(
    place: Path, request: pytest.FixtureRequest
) -> None:
    """The thread goes on to read the copy of the values: the next save waits for the thread before it copies others."""
    goes_on, before = threading.Event(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background does not have
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    with Calls(8, lambda name: assert_true(goes_on.wait(60))).watch():  # the first file is being written
        save(place, state(1, MESH), step=1, wait=False)
        interrupt = partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, interrupt).start()
            save(place, state(2, MESH), step=2, wait=False)
        threading.Timer(0.3, goes_on.set).start()
        save(place, state(3, MESH), step=3, wait=False).wait()
    assert list_steps(place) == [1, 3] and holds(place, 1, 1) and holds(place, 3, 3)


def assert_true(condition: bool) -> None:
    assert condition


# ranks


def interrupt_one(path: Path, mesh: DeviceMesh) -> Refusal | str:
    """Rank 1 is interrupted while it writes. The next save of both succeeds."""
    found: Refusal | str
    try:
        with Calls(0 if dist.get_rank() else -1, interrupted).watch():
            found = refusal(lambda: save(path, state(1, mesh), step=1))
    except KeyboardInterrupt:
        found = "interrupted"
    save(path, state(2, mesh), step=1)
    return found


def interrupted(name: str) -> None:
    raise KeyboardInterrupt


def fail_in_thread(path: Path, mesh: DeviceMesh) -> tuple[Refusal, Refusal]:
    """A save of a thread fails on rank 1: the next call has the error, on both ranks, and the one after it is fine."""

    def strike(name: str) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Calls(1 if dist.get_rank() else -1, strike).watch(), pytest.warns(RuntimeWarning, match="quota"):
        pending = save(path, state(1, mesh), step=1, wait=False)
        while not pending.is_done:
            time.sleep(0.01)
    return refusal(lambda: save(path, state(2, mesh), step=2)), refusal(lambda: save(path, state(2, mesh), step=2))


def save_what_changes(path: Path, mesh: DeviceMesh) -> list[Refusal]:
    """A tensor that each rank overwrites at once, and otherwise: ranks compare the values of the moment of the call."""
    found = []
    for step in range(5):
        tree = {"whole": torch.ones(8), **state(1, mesh)}
        pending = save(path, tree, step=step, wait=False)
        tree["whole"].fill_(dist.get_rank())
        found.append(refusal(pending.wait))
    return found


def save_other_steps(path: Path, mesh: DeviceMesh) -> Refusal:
    return refusal(lambda: save(path, state(1, mesh), step=5 + dist.get_rank()))


def save_elsewhere(path: Path, mesh: DeviceMesh) -> Refusal:
    """Ranks that do not share a filesystem: rank 1 means another folder."""
    return refusal(lambda: save(path / f"seen by {dist.get_rank()}", state(1, mesh), step=5))


def save_where_another_writes(path: Path, mesh: DeviceMesh) -> tuple[int, Refusal, list[str]]:
    """Rank 1 stands for another job too, which is writing the same step."""
    if dist.get_rank():
        with open_partial(path, 1):
            for number in range(2):
                (path / "step-1.partial" / f"rank-0000{number}.safetensors").write_text("half of it")
            dist.barrier()
            found = refusal(lambda: save(path, state(1, mesh), step=1))
            return os.getpid(), found, [file.read_text() for file in (path / "step-1.partial").iterdir()]
    dist.barrier()
    return os.getpid(), refusal(lambda: save(path, state(1, mesh), step=1)), []


CASES = [interrupt_one, fail_in_thread, save_what_changes, save_other_steps, save_elsewhere, save_where_another_writes]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("ranks")
    return path, run_cases(2, {case.__name__: partial(case, path / case.__name__) for case in CASES})


def test_ranks_hear_of_an_interrupt(ranks: tuple[Path, dict[str, Any]]) -> None:
    path, outcomes = ranks
    first, second = values(outcomes["interrupt_one"])
    assert second == "interrupted"
    assert first.kind == "FzeroError" and "rank 1 could not save: KeyboardInterrupt" in first.message
    assert first.seconds < 30
    assert names(path / "interrupt_one") == {"step-1"} and holds(path / "interrupt_one", 1, 2)


def test_an_error_of_a_thread_is_raised_on_all_ranks_at_the_next_call(ranks: tuple[Path, dict[str, Any]]) -> None:
    path, outcomes = ranks
    for told, then in values(outcomes["fail_in_thread"]):
        assert told.kind == "FzeroError" and "step-1: rank 1 could not save: OSError" in told.message
        assert "quota" in told.message and then.kind == "nothing"
    assert names(path / "fail_in_thread") == {"step-2"} and holds(path / "fail_in_thread", 2, 2)


def test_ranks_compare_the_values_of_the_moment_of_the_call(ranks: tuple[Path, dict[str, Any]]) -> None:
    path, outcomes = ranks
    assert all(found.kind == "nothing" for row in values(outcomes["save_what_changes"]) for found in row)
    for step in range(5):
        found = load(path / "save_what_changes", {"whole": torch.empty(8)}, step=step, strict=False)
        assert torch.equal(found["whole"], torch.ones(8))


def test_ranks_that_save_different_steps_are_refused(ranks: tuple[Path, dict[str, Any]]) -> None:
    path, outcomes = ranks
    for found in values(outcomes["save_other_steps"]):
        assert found.kind == "FzeroError" and "rank 0 has step 5, rank 1 has step 6" in found.message
    assert names(path / "save_other_steps") == set()


def test_ranks_that_see_different_folders_are_refused(ranks: tuple[Path, dict[str, Any]]) -> None:
    path, outcomes = ranks
    for found in values(outcomes["save_elsewhere"]):
        assert found.kind == "FzeroError" and "lacks rank-00001.safetensors, which other ranks wrote" in found.message
    assert names(path / "save_elsewhere" / "seen by 0") == set()


def test_ranks_that_are_refused_leave_the_files_of_the_other_job_alone(ranks: tuple[Path, dict[str, Any]]) -> None:
    _, outcomes = ranks
    (_, first, _), (owner, second, files) = values(outcomes["save_where_another_writes"])
    for found in first, second:
        assert found.kind == "FzeroError" and "rank 0 could not save: " in found.message
        assert f"process {owner} on {os.uname().nodename} is writing there" in found.message
    assert files == ["half of it"] * 2
