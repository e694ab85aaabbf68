"""Starts ranks on this machine, under torchrun, in one environment or in several at once, and ends them."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import turns
from contenders import environment
from environments import OURS, Environment
from runs import Plan

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 60
"""torchrun itself gives its ranks 30 seconds before it kills them."""


class Launch(NamedTuple):
    """Ranks that start together: the script in this folder that each runs, what it is given, and where it runs."""

    script: str
    given: dict[str, Any]  # ready for JSON
    device: str
    environment: Environment = OURS


def run(plan: Plan, ranks: int, timeout: float) -> dict[str, Any]:
    """What rank 0 made of each contender of a plan: a launch for each environment, and these take turns."""
    homes: dict[Environment, list[str]] = {}
    for name in plan.contenders:
        homes.setdefault(environment(name), []).append(name)
    launches = [
        Launch("worker.py", asdict(replace(plan, here=tuple(names))), plan.device, home)
        for home, names in homes.items()
    ]
    found = {name: value for result in launch(launches, ranks, timeout) for name, value in result.items()}
    return {name: found[name] for name in plan.contenders}


def run_each(plan: Plan, ranks: int, timeout: float) -> dict[str, Any]:
    """As `run`, each contender in processes of its own, one after the other."""
    alone = [run(replace(plan, contenders=(name,)), ranks, timeout) for name in plan.contenders]
    return {name: value for result in alone for name, value in result.items()}


def launch(launches: list[Launch], ranks: int, timeout: float) -> list[Any]:
    """What rank 0 of each launch wrote, all of them running at once. All processes have ended when this returns or
    raises.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds.
        subprocess.CalledProcessError: when a rank fails.
    """
    store = turns.store()
    with TemporaryDirectory() as folder:
        outs = [Path(folder) / f"result{i}.json" for i in range(len(launches))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i, (started, out) in enumerate(zip(launches, outs)):
                given = Path(folder) / f"given{i}.json"
                given.write_text(json.dumps(started.given))
                processes.append(_start(started, ranks, given, out, store.port))
            _wait(processes, timeout)
        finally:
            _end(processes)
        return [json.loads(out.read_text()) for out in outs]


def torchrun(environment: Environment, ranks: int) -> list[str]:
    """The command that starts ranks of a script. `--standalone` finds a free port, `--local-addr` asks no network for
    this machine's name. torchrun ends the other ranks when one fails."""
    python = [str(environment.python), "-m", "torch.distributed.run"]
    return [*python, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]


def _start(started: Launch, ranks: int, given: Path, out: Path, port: int) -> subprocess.Popen[bytes]:
    command = [*torchrun(started.environment, ranks), str(HERE / started.script), str(given), str(out), str(port)]
    return subprocess.Popen(command, env=started.environment.of_ranks(started.device))


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended well, or one has not."""
    deadline = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(processes[0].args, timeout)
        time.sleep(0.2)
    for code, process in zip(codes, processes):
        if code:
            raise subprocess.CalledProcessError(code, process.args)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs and with it its ranks, which torchrun ends on SIGTERM."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    for process in left:
        process.wait(GRACE_SECONDS)
