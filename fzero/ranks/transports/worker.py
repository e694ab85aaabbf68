"""Worker: a thread that performs what is not to hold up this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

Task = Callable[[], None]


class Worker:
    """Performs tasks one behind the other. It never keeps a process from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Task, Future[None]]] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def start(self, task: Task) -> Callable[[], Any]:
        """What waits until a task is done, and raises what it raised."""
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
            del task, future  # before the next one comes
