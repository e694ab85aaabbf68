"""Traces: what a profiler saw, and beside it what the program predicted, in one file."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.text_files import write_text
from fzero.program.program import Program

PREDICTED = 1 << 30
"""The process id of what was predicted: no process of Linux has it."""
Event = dict[str, Any]


@check_arguments
def export_trace(path: str | os.PathLike[str], seen: Any, program: Program) -> None:
    """Write a profile of torch to a JSON file for ui.perfetto.dev, with a process "predicted" beside the measured ones.

    `seen` is a `torch.profiler.profile` around one or more steps, `program` what `step.program` returns for them. The
    predicted lanes begin with each step: their first collective starts when that of the step did.

    Raises:
        FzeroError: for a profile without a collective of the program, that has not ended or was exported before; for
            what is no profile or no program; where the file cannot be written.
    """
    if not isinstance(program, Program):
        raise FzeroError("metrics: program", f"is {program!r:.80}", "give what step.program(*args) returns")
    if not hasattr(seen, "export_chrome_trace"):
        raise FzeroError("metrics: seen", f"is {seen!r:.80}", "give a torch.profiler.profile that has ended")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        try:
            seen.export_chrome_trace(str(file))
        except (AssertionError, AttributeError, RuntimeError) as error:  # not started, not ended, exported before
            problem = f"cannot be exported: {type(error).__name__}: {error}".removesuffix(": ")
            raise FzeroError("metrics: seen", problem, "give one that has ended, and export it once") from error
        trace = json.loads(file.read_text())
    write_text("trace", path, json.dumps(add_prediction(trace, program)))


def add_prediction(trace: dict[str, Any], program: Program) -> dict[str, Any]:
    """A trace in the Trace Event Format, with the predicted lanes of a program at each of its steps."""
    timeline = program.timeline()
    sent = sorted(timeline.transfers, key=lambda transfer: transfer.start)
    names, begun = Counter(transfer.name for transfer in sent), Counter[str]()
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation" and event.get("name") in names:
            begun[event["name"]] += 1
    first = next((transfer for transfer in sent if begun[transfer.name]), None)
    if first is None:
        problem = f"has no collective of {program.name}" if sent else "is of a program that moves nothing"
        raise FzeroError("metrics: seen", problem, "take the profile around a step on ranks with this program")
    found = (x for x in trace["traceEvents"] if x.get("cat") == "user_annotation" and x.get("name") == first.name)
    steps = sorted(event["ts"] for event in found)[:: names[first.name]]
    lanes = timeline.chrome_trace()["traceEvents"]
    heads = [event | {"pid": PREDICTED} for event in lanes if event["ph"] == "M"]
    heads.append({"ph": "M", "name": "process_name", "pid": PREDICTED, "tid": 0, "args": {"name": "predicted"}})
    entries: list[Event] = [
        event | {"pid": PREDICTED, "ts": begin - 1e6 * first.start + event["ts"]}
        for begin in steps
        for event in lanes
        if event["ph"] == "X"
    ]
    return trace | {"traceEvents": [*trace["traceEvents"], *heads, *entries]}
