"""Ranks of tests: nothing of one launch is seen in the next, and no rank outlives the tests."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch.distributed.device_mesh import DeviceMesh

import fzero

ASK = 2  # PR_GET_PDEATHSIG


def look(mesh: DeviceMesh) -> dict[str, Any]:
    """What a process of a rank begins with."""
    return {
        "dtype": torch.get_default_dtype(),
        "seed": torch.initial_seed(),
        "grad": torch.is_grad_enabled(),
        "limit": resource.getrlimit(resource.RLIMIT_FSIZE),
        "variables": {key: x for key, x in os.environ.items() if key != "GLOO_SOCKET_IFNAME"},
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        "folder": os.getcwd(),
        "groups": dist.get_world_size(),
        "fzero": hasattr(fzero, "spoiled"),
    }


def spoil(mesh: DeviceMesh) -> tuple[int, dict[str, Any]]:
    """Change all that, and leave it so."""
    before = look(mesh)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    os.environ["SPOILED"] = os.open(os.devnull, os.O_RDONLY) * "x"
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.chdir("/")
    dist.new_group([0])
    fzero.spoiled = True  # type: ignore[attr-defined]
    assert all(before[key] != x for key, x in look(mesh).items() if key != "groups")
    return os.getpid(), before


def test_a_launch_begins_as_the_one_before_it() -> None:
    first, second = run(2, spoil), run(2, spoil)
    assert len({process for process, _ in first + second}) == 4
    for (_, before), (_, after) in zip(first, second):
        assert after == before


def signal_at_the_end(mesh: DeviceMesh) -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(ASK, ctypes.byref(found))
    return found.value


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_rank_ends_with_the_tests() -> None:
    assert run(2, signal_at_the_end) == [signal.SIGKILL] * 2
