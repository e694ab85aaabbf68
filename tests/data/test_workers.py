"""Workers of a loader: signals to a whole job do not end them, and their rank does."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch

import fzero.data
from fzero import VirtualMesh
from fzero.data.workers import StartWorker

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
    others = multiprocessing.active_children()  # of a test before this one, whose loader is no garbage yet
    next(iter(loader))
    (worker,) = set(multiprocessing.active_children()) - set(others)
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


def test_a_worker_that_a_server_forked_ends_when_its_rank_ends_it() -> None:
    """As with multiprocessing_context="forkserver": the parent is the server, and the rank sends the signal."""
    receive, send = os.pipe()
    given = pickle.dumps(StartWorker(None))
    server = os.fork()
    if server == 0:
        worker = os.fork()
        if worker == 0:
            pickle.loads(given)(0)
            os.write(send, str(os.getpid()).encode())
            while True:
                time.sleep(1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) & 127)
    worker = int(os.read(receive, 20))
    os.system(f"kill {worker}")  # of a shell, not of this process
    time.sleep(0.1)
    os.kill(worker, 0)
    os.kill(worker, signal.SIGTERM)
    for _ in range(100):
        pid, status = os.waitpid(server, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(server, 0)
        pytest.fail("the worker lives on")
    assert os.waitstatus_to_exitcode(status) == 0
