"""Workers of a loader: signals to a whole job do not end them, and their rank does."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch

import fzero.data
from fzero import VirtualMesh

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system tells no sender of a signal")


def begin(number: int) -> None:
    torch.set_num_threads(1)


def test_a_worker_outlives_a_signal_of_another_process_than_its_rank() -> None:
    loader = fzero.data.loader(torch.arange(40), 4, VirtualMesh(fsdp=1), num_workers=1, worker_init_fn=begin)
    found = list[int]()
    for number, batch in enumerate(loader):
        found += batch.tolist()
        if number == 1:
            for worker in multiprocessing.active_children():
                os.system(f"kill {worker.pid}")  # of a shell, not of this process
    assert found == list(range(40))


def test_a_worker_ends_when_its_rank_ends_it() -> None:
    loader = fzero.data.loader(torch.arange(400), 4, VirtualMesh(fsdp=1), num_workers=1, persistent_workers=True)
    next(iter(loader))
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0
