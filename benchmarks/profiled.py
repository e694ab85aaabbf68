"""Where the seconds of fzero's step go on the thread that takes it, by Python's profiler."""

from __future__ import annotations

from collections import Counter
from cProfile import Profile
from pathlib import Path
from types import CodeType
from typing import Any

from runs import Plan
from training import Batch, Contender

import fzero.ranks.transports

TRANSPORTS = str(Path(fzero.ranks.transports.__file__).parent)


def kind(code: CodeType | str, called_by: str) -> str:
    """What a function's own seconds are: "compute", which is torch's C functions, views too; "transport"; or "own",
    which is all else.

    C functions, of which the profiler knows a name only, are transport where a function of transports calls them.
    """
    if isinstance(code, CodeType):
        return "transport" if code.co_filename.startswith(TRANSPORTS) else "own"
    if called_by == "transport" or "_distributed_c10d" in code:
        return "transport"
    is_torch = "built-in method torch." in code or "of 'torch._C.TensorBase'" in code
    return "compute" if is_torch else "own"


def shares(contender: Contender, plan: Plan, batch: Batch) -> dict[str, Any]:
    """Seconds of a step by `kind`, and the five functions that have most of what is "own".

    The profiler adds about a microsecond to each call of a function, most of it to "own".
    """
    profile = Profile()
    for _ in range(plan.steps):
        profile.runcall(contender.step, batch)
    seconds: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            continue  # counted below, by who calls it
        caller = kind(entry.code, "")
        called = [(call.code, call.inlinetime) for call in entry.calls or () if isinstance(call.code, str)]
        for code, spent in [(entry.code, entry.inlinetime), *called]:
            seconds[kind(code, caller)] += spent / plan.steps
            if kind(code, caller) == "own":
                own[_name(code)] += spent / plan.steps
    return {"seconds": dict(seconds), "most": own.most_common(5)}


def _name(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_name}"
