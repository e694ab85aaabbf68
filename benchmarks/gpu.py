"""One GPU, lent by the minute: is fzero right on it, and how many tokens a second, MFU and bytes beside FSDP2, in bf16.

    python benchmarks/gpu.py checks --json checks.json          # tiny models: is every kind of step right on NCCL?
    python benchmarks/gpu.py 0.4B --json 0.4B.json              # figures, and a profile of one step
    python benchmarks/gpu.py 1.5B --json 1.5B.json
    python benchmarks/gpu.py checks --device cpu --broken       # a dry run on a core, with jobs that fail

Each job has processes of its own, and at most the seconds that are left of `--seconds`. The record is written behind
each job, so a job that raises, dies or hangs costs itself alone. The exit status is the number of jobs that failed.

One rank: no contender communicates, all else is as on many. MFU is relative to products of matrices in one process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import flags
import turns
from contenders import able
from environments import OURS
from launch import torchrun
from machine import machine
from quartiles import quartiles
from runs import SIZES, Plan, Size
from step import TOLERANCE, Results, loss_differences, milliseconds

HERE = Path(__file__).resolve().parent
CONTESTANTS = {
    "0.4B": "fsdp2,fzero-3,fsdp2-compiled,fzero-3-compiled,fzero-3-graph",
    "1.5B": "fsdp2-compiled,fzero-3-compiled,fzero-3-graph",
}
PAIR = ("fsdp2", "fzero-1", "fzero-2", "fzero-3")
BROKEN = ("fails", "dies")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Variables of a rank that torchrun does not start; torchrun sets its own."""
LEAST = 15.0
"""Seconds without which no job begins: a process has to import torch."""


class Job(NamedTuple):
    """A command that writes JSON to `out`, and the seconds that it may take."""

    name: str
    command: list[str]
    device: str
    out: Path
    limit: float  # since it last wrote to `out`


class Record:
    """What is known so far, on disk after each `note`."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.path, self.jobs = given.json, dict[str, Any]()
        self._head = {"part": given.part, "device": given.device} | machine()

    def note(self, name: str, **found: Any) -> None:
        """Add what is known of a job."""
        self.jobs.setdefault(name, {}).update(found)
        flags.write(self.path, self._head | {"jobs": self.jobs})
        shown = {key: value for key, value in self.jobs[name].items() if key not in ("result", "log")}
        print(f"== {name}: {shown}", flush=True)

    @property
    def failed(self) -> list[str]:
        """The jobs that have not ended well."""
        return [name for name, job in self.jobs.items() if job["status"] not in ("ok", "left out")]


def main(given: argparse.Namespace) -> int:
    """Run the jobs of a part, one after the other. Returns how many failed."""
    record, deadline = Record(given), time.monotonic() + given.seconds
    store = turns.store()  # workers ask it whose turn it is
    with TemporaryDirectory() as folder:
        if given.part == "checks":
            run_checks(given, Path(folder), record, deadline)
        for job in list_jobs(given, Path(folder), store.port):
            perform(job, record, deadline)
    if given.part == "checks":
        agree(record, record.jobs["two ranks"].get("result", {}), TOLERANCE[False])
    else:
        agree(record, print_rows(given, record), TOLERANCE[True])
    print(f"failed: {', '.join(record.failed) or 'none'}")
    return len(record.failed)


def run_checks(given: argparse.Namespace, folder: Path, record: Record, deadline: float) -> None:
    """The checks share a process. Where one ends the process, the next process goes on behind that check."""
    left = given.checks.split(",") if given.checks else list_checks()
    if given.broken:
        left[1:1] = BROKEN
    while left and time.monotonic() < deadline - LEAST:
        out = folder / f"checks{len(left)}.json"
        command = [sys.executable, str(HERE / "gpu_checks.py"), given.device, str(out), ",".join(left)]

        def take_over(out: Path = out) -> None:
            found: dict[str, Any] = json.loads(out.read_text())
            for name in [name for name in left if name in found]:
                left.remove(name)
                record.note(name, **found[name])

        status, log = run(Job("checks", command, given.device, out, given.limit), deadline, take_over)
        if status != "ok":
            record.note(left.pop(0) if left else "end of the checks", status=status, log=log)
    for name in left:
        record.note(name, status="no time")


def list_checks() -> list[str]:
    """The names of all checks, whose file imports a model of the examples."""
    sys.path.append(str(HERE.parent / "examples"))
    return list(importlib.import_module("gpu_checks").CHECKS)


def list_jobs(given: argparse.Namespace, folder: Path, port: int) -> Iterator[Job]:
    """The jobs of a part that are contenders, each alone; at the end of "checks" two ranks on the one GPU."""
    size = "tiny" if given.tiny or given.part == "checks" else given.part
    if given.part == "checks":
        pair = tuple(given.contenders.split(",")) if given.contenders else PAIR
        plan = Plan(able(pair, given.device), size, "time", 1, 3, given.device, one_gpu=given.device == "cuda")
        yield contend("two ranks", plan, 2, folder, port, 60)
        return
    names = able(tuple((given.contenders or CONTESTANTS[given.part]).split(",")), given.device)
    for name in (names[0], "broken", *names[1:]) if given.broken else names:
        plan = Plan((name,), size, "gpu", given.rounds, given.steps, given.device, bf16=True)
        yield contend(name, plan, 1, folder, port, given.limit)
    if given.trace:
        plan = Plan((names[-1],), size, "trace", 1, 2, given.device, bf16=True, trace=str(given.trace.absolute()))
        yield contend(f"trace of {names[-1]}", plan, 1, folder, port, given.limit)


def contend(name: str, plan: Plan, ranks: int, folder: Path, port: int, limit: float) -> Job:
    """The job of a plan for `worker.py`. One rank needs no torchrun."""
    given, out = folder / f"{name}.given", folder / f"{name}.json"
    given.write_text(json.dumps(asdict(plan) | {"here": plan.contenders}))
    start = [sys.executable] if ranks == 1 else torchrun(OURS, ranks)
    command = [*start, str(HERE / "worker.py"), str(given), str(out), str(port)]
    return Job(name, command, plan.device, out, limit)


def perform(job: Job, record: Record, deadline: float) -> None:
    """Run a job and note what it found. What it wrote counts, also where it fails later."""
    if deadline - time.monotonic() < LEAST:
        record.note(job.name, status="no time")
        return
    begin = time.monotonic()
    status, log = run(job, deadline)
    found = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
    if job.out.exists():
        found["result"] = json.loads(job.out.read_text())
    record.note(job.name, **found, **({"log": log} if log else {}))


def run(job: Job, deadline: float, take_over: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """Run a job's command to its end, or to its limit: ("ok", "") or what happened, and the last lines that it printed.
    `take_over()` is called when there is news in `out`. No process of the job is left behind."""
    with job.out.with_suffix(".log").open("w+") as log:
        environment = OURS.of_ranks(job.device) | ALONE
        process = subprocess.Popen(job.command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = wait(process, job, deadline, take_over)
        finally:
            end(process)
        log.seek(0)
        text = log.read()
    print(text, flush=True)
    return status, "" if status == "ok" else "\n".join(text.splitlines()[-70:])


def wait(process: subprocess.Popen[bytes], job: Job, deadline: float, take_over: Callable[[], None]) -> str:
    """How a process ends: by itself, or because nothing new came to `out` within the job's limit."""
    written, news, code = 0, time.monotonic(), None
    while code is None:
        code = process.poll()
        if job.out.exists() and job.out.stat().st_mtime_ns != written:
            written, news = job.out.stat().st_mtime_ns, time.monotonic()
            take_over()
        if code is None and time.monotonic() > min(deadline, news + job.limit):
            return f"stopped {time.monotonic() - news:.0f} s after its last word"
        time.sleep(0.1)
    return f"exit status {code}" if code else "ok"


def end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the session that a process began. torchrun ends its ranks on SIGTERM, within 30 seconds."""
    for sign, grace in ((signal.SIGTERM, 35.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)


def print_rows(given: argparse.Namespace, record: Record) -> Results:
    """Note and print a row for each contender that was timed. Returns what they found."""
    size = SIZES["tiny" if given.tiny else given.part]
    results = {name: job["result"][name] for name, job in record.jobs.items() if name in job.get("result", {})}
    for name, result in results.items():
        seconds = quartiles(milliseconds(result)).median / 1000
        row = {"tokens": size.batch * size.seq / seconds, "mfu": flops(size) / seconds / result["matrix"]}
        record.note(name, **row, peak=result["peak"], reserved=result["reserved"])
    return results


def agree(record: Record, results: Results, tolerance: float) -> None:
    """Note whether the losses of contenders agree."""
    differences = loss_differences(results)
    apart = [name for name, value in differences.items() if not value <= tolerance]
    record.note("losses agree", status="ok" if not apart else f"no: {', '.join(apart)}", result=differences)


def flops(size: Size) -> int:
    """Floating-point operations of a step: 6 for a token and an element of a matrix, and those of causal attention.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    matrices = size.layers * 12 * size.dim**2 + size.dim * size.vocab
    attention = size.layers * size.seq * size.dim
    return size.batch * size.seq * 6 * (matrices + attention)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("checks", *CONTESTANTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, help="a file for every figure, written behind each job")
    parser.add_argument("--trace", type=Path, help="a .json.gz for a profile of the last contender")
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can train")
    parser.add_argument("--checks", help="some of gpu_checks.py; all without it")
    parser.add_argument("--contenders", help="some of those of step.py")
    parser.add_argument("--broken", action="store_true", help="add jobs that fail")
    parser.add_argument("--rounds", type=int, default=2, help="turns of a contender")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--limit", type=float, default=150, help="seconds for a job")
    parser.add_argument("--seconds", type=float, default=500, help="for all jobs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse()))
