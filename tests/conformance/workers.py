"""Processes that judge, each one name after the other."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from conformance.judge import Row, judge, kind_of
from conformance.verdict import Verdict


def judge_all(chosen: list[str], workers: int, samples: int | None) -> Iterator[tuple[str, Row]]:
    """Each name and its row, as they are ready, from processes that are replaced when they die."""
    waiting, ready = queue.Queue[str](), queue.SimpleQueue[tuple[str, Row]]()
    for name in chosen:
        waiting.put(name)
    for _ in range(workers):
        threading.Thread(target=keep_worker, args=(waiting, ready, samples), daemon=True).start()
    for number in range(1, len(chosen) + 1):
        yield ready.get()
        if number % 50 == 0:
            print(f"{number} of {len(chosen)}", flush=True)


def keep_worker(waiting: queue.Queue[str], ready: queue.SimpleQueue[tuple[str, Row]], samples: int | None) -> None:
    """Give names to a process, one after the other. An operator that ends the process takes no other along."""
    pipe = start_worker(samples)
    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return pipe.close()
        pipe.send(name)
        try:
            ready.put((name, pipe.recv()))
        except (EOFError, ConnectionError):
            died = Verdict("raw", "the process died")
            ready.put((name, dict.fromkeys(kind_of(name).cells(name), died)))
            pipe = start_worker(samples)


def start_worker(samples: int | None) -> Any:
    """The pipe to a new process that runs `serve`."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=serve, args=(there, samples), daemon=True).start()
    there.close()
    return here


def serve(pipe: Any, samples: int | None) -> None:
    """A worker: the row of each name that comes, until the pipe is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(name, samples))
