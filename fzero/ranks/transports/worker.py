"""Worker: a thread that performs tasks while the calling thread goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

Task = Callable[[], None]
_Queue = SimpleQueue[tuple[Task, Future[None]] | None]


class Worker:
    """Performs tasks one after the other, in the order of `start`. The thread ends with the worker, or the process."""

    def __init__(self, name: str) -> None:
        self._tasks: _Queue = SimpleQueue()
        # the thread knows the queue and not the worker, so that the worker can go
        Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def start(self, task: Task) -> Callable[[], Any]:
        """Hand over a task. The returned function waits for the task, and raises the error that the task raised."""
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future.result


@torch.no_grad()
def _work(tasks: _Queue) -> None:
    while (given := tasks.get()) is not None:
        task, future = given
        try:
            task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del given, task, future  # or their memory would stay until the next task comes
