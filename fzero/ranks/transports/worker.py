"""Worker: a thread that performs tasks while the calling thread goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

Task = Callable[[], None]


class Worker:
    """Performs tasks one after the other, in the order of `start`. The thread does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Task, Future[None]]] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def start(self, task: Task) -> Callable[[], Any]:
        """Hand over a task. The returned function waits for the task, and raises the error that the task raised."""
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future.result

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            task, future = self._tasks.get()
            try:
                task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del task, future  # or their memory would stay until the next task comes
