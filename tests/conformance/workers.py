"""Processes that judge, each one name after the other."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Judge = Callable[[str], T]


def judge_all(chosen: list[str], workers: int, judge: Judge[T], died: Judge[T]) -> Iterator[tuple[str, T]]:
    """Each name with what `judge` says of it, as they are ready, from processes that are replaced when they die: then
    `died` says it, here."""
    waiting, ready = queue.Queue[str](), queue.SimpleQueue[tuple[str, T]]()
    for name in chosen:
        waiting.put(name)
    for _ in range(workers):
        threading.Thread(target=keep_worker, args=(waiting, ready, judge, died), daemon=True).start()
    for number in range(1, len(chosen) + 1):
        yield ready.get()
        if number % 50 == 0:
            print(f"{number} of {len(chosen)}", flush=True)


def keep_worker(
    waiting: queue.Queue[str], ready: queue.SimpleQueue[tuple[str, T]], judge: Judge[T], died: Judge[T]
) -> None:
    """Give names to a process, one after the other. A name that ends the process takes no other along."""
    pipe = start_worker(judge)
    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return pipe.close()
        pipe.send(name)
        try:
            ready.put((name, pipe.recv()))
        except (EOFError, ConnectionError):
            ready.put((name, died(name)))
            pipe = start_worker(judge)


def start_worker(judge: Judge[Any]) -> Any:
    """The pipe to a new process that runs `serve`."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=serve, args=(there, judge), daemon=True).start()
    there.close()
    return here


def serve(pipe: Any, judge: Judge[Any]) -> None:
    """A worker: what `judge` says of each name that comes, until the pipe is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        found = judge(name)
        if "CUDA error" in str(found):  # after which the device serves this process no more
            os._exit(1)
        pipe.send(found)
