"""What killed writers leave: the next save into the directory removes it, whatever its name, and so does a load."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load, open_dcp, save, save_dcp

MESH = fzero.VirtualMesh(fsdp=2)
VALUES = {"w": torch.arange(3.0)}
LIKE = {"w": torch.empty(3, device="meta")}


class Pausing:
    """A source whose process waits, to be killed, when it is read."""

    shape, dtype, path, is_frozen = torch.Size([4]), torch.float32, "pausing", False

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def fingerprint(self) -> bytes:
        return b""

    def read(self, start: int, out: Tensor) -> None:
        if out.numel():
            os.write(self.pipe, b"read")
            signal.pause()


def save_file(path: Path, values: Any) -> None:
    fzero.save_safetensors(values, path.with_name(f"{path.name}.safetensors"))


def load_file(path: Path) -> Any:
    found = fzero.load_safetensors(path.with_name(f"{path.name}.safetensors"), LIKE, MESH)
    return {"w": found["w"].full_tensor()}


def save_step(path: Path, values: Any) -> None:
    save(path.parent, values, step=int(path.name))


def load_step(path: Path) -> Any:
    return load(path.parent, LIKE, step=int(path.name))


def read_dcp(path: Path) -> Any:
    assert open_dcp(path).keys() == {"w"}
    return VALUES


KINDS: dict[str, tuple[Callable[[Path, Any], None], Callable[[Path], Any], bool]] = {
    "save_safetensors": (save_file, load_file, True),
    "checkpoint.save": (save_step, load_step, True),
    "save_dcp": (save_dcp, read_dcp, False),
}
"""How to write and to read something with a number for its name, and whether to read removes what was left."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_writer_left_goes_at_the_next_call(tmp_path: Path, kind: str) -> None:
    write, read, cleans = KINDS[kind]
    write(tmp_path / "1", VALUES)
    read(tmp_path / "1")  # what torch imports once
    before = sorted(os.listdir(tmp_path))

    def start(number: int) -> int:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(tmp_path / str(number), {"deadly": Pausing(send)})
            finally:
                os._exit(1)
        assert os.read(receive, 4) == b"read"
        return child

    def end(child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    child = start(2)
    assert torch.equal(read(tmp_path / "1")["w"], VALUES["w"])
    assert len(os.listdir(tmp_path)) == len(before) + 1, "a load removes what is being written"
    end(child)
    if cleans:
        assert torch.equal(read(tmp_path / "1")["w"], VALUES["w"])
        assert sorted(os.listdir(tmp_path)) == before
        end(start(2))
    assert len(os.listdir(tmp_path)) == len(before) + 1
    write(tmp_path / "3", VALUES)  # of another name
    assert len(os.listdir(tmp_path)) == len(before) + 1 and "3" in "".join(os.listdir(tmp_path))
    read(tmp_path / "3")


@pytest.mark.parametrize(
    "owner", [None, "", "process 1 on a host", "process 1 on a host\nof another place-1-2\n", "\0\n"]
)
def test_what_an_unknown_writer_left_stays_at_a_load(tmp_path: Path, owner: str | None) -> None:
    """It may be written by a process of another host, whose locks are unknown here."""
    save(tmp_path, VALUES, step=1)
    (tmp_path / "step-2.partial").mkdir()
    (tmp_path / ".lock").unlink() if owner is None else (tmp_path / ".lock").write_text(owner)
    assert torch.equal(load(tmp_path, LIKE)["w"], VALUES["w"])
    assert (tmp_path / "step-2.partial").exists()
    save(tmp_path, VALUES, step=3)
    assert not (tmp_path / "step-2.partial").exists()
