"""Published training runs beside what `python -m fzero plan` predicts for them: memory, and tokens a second.

    python benchmarks/published.py                     # plans each run, writes results/published.json and published.md
    python benchmarks/published.py torchtitan-8b       # plans runs whose names start so; others stay
    python benchmarks/published.py --write             # plans nothing: writes published.md again

Each run is planned in a process of its own, which may take `--cap` seconds. Rates are 70 % of the data sheets in
`fzero/program/hardware.py`, and 35 % for FlashAttention-2, fitted to no run. Runs, sources and reasons of misses are in
`published_runs.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from published_runs import FLASH_2, LACKS, MODELS, REASONS, RUNS, Run

from fzero.base.mesh import read_mesh
from fzero.planner import forecast, summary
from fzero.program.hardware import ATTAINED, HARDWARE

GIB, MEMORY, TIME = 1 << 30, 0.10, 0.25
RESULTS = Path(__file__).parent / "results"
JSON, TABLE = RESULTS / "published.json", RESULTS / "published.md"


def main() -> int:
    """Returns the exit status: 1 where a run was not planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the starts of names of runs; by default all")
    parser.add_argument("--cap", type=float, default=300, help="seconds that the plan of a run may take")
    parser.add_argument("--write", action="store_true", help="write the table alone")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [run for run in RUNS if not options.names or run.name.startswith(tuple(options.names))]
    if options.alone:
        print(json.dumps(predict(chosen[0])))
        return 0
    found = json.loads(JSON.read_text()) if JSON.exists() else {}
    failed, planned = list[str](), dict[Run, dict[str, Any]]()
    for run in [] if options.write else chosen:
        step = run._replace(name="", what="", memory=None, rate=None, reasons=())
        command = [sys.executable, __file__, run.name, "--alone"]
        try:
            if step not in planned:  # runs that differ in what the planner lacks are one step to it
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=options.cap)
                planned[step] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.SubprocessError as error:
            print(run.name, getattr(error, "stderr", None) or error, file=sys.stderr)
            failed.append(run.name)
            continue
        found[run.name] = planned[step]
        print(run.name, found[run.name], flush=True)
        JSON.write_text(
            json.dumps({each.name: found[each.name] for each in RUNS if each.name in found}, indent=1) + "\n"
        )
    TABLE.write_text("\n".join(describe(found)) + "\n")
    return 1 if failed else 0


def predict(run: Run) -> dict[str, Any]:
    """What the planner says of a run."""
    mesh, start = read_mesh("mesh", run.mesh), time.process_time()
    recipe = forecast.Recipe(run.batch, run.length, run.microbatches, run.stage, None, run.remat)
    recipe = recipe._replace(sequence_parallel=run.sequence_parallel)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[run.model]))
        hardware = HARDWARE[run.hardware]
        rates = hardware.rates(mesh)._replace(attention=FLASH_2 * hardware.flops if run.flash_2 else None)
        found = summary.summarize(forecast.trace_step(Path(folder), mesh, recipe, rates))
    return {
        "parameters": found.parameters,
        "peak": found.peak,
        "state": found.state,
        "largest": found.largest[:5],
        "moved": found.moved,
        "seconds": found.seconds,
        "busy": found.busy,
        "tokens_a_second": found.tokens_a_second,
        "planning": round(time.process_time() - start, 1),
    }


def describe(found: dict[str, Any]) -> list[str]:
    """The file of Markdown."""
    memory, times, lines = list[bool](), list[bool](), list[str]()
    for run in RUNS:
        if run.name not in found:
            continue
        plan = found[run.name]
        planned = f"{run.mesh}, {run.batch} x {run.length}"
        planned += f" in {run.microbatches}" if run.microbatches > 1 else ""
        planned += f", {run.layers} layers" if run.layers else ""
        planned += f", stage {run.stage}" if run.stage else ""
        planned += f", remat {run.remat}" if run.remat else ""
        planned += ", sequence-parallel" if run.sequence_parallel else ""
        cells = [
            run.what,
            planned,
            f"{plan['peak'] / GIB:.1f}",
            "",
            f"{plan['tokens_a_second']:,.0f}",
            "",
            ", ".join(run.reasons),
        ]
        if run.memory is not None:
            off = plan["peak"] / GIB / run.memory - 1
            memory.append(abs(off) <= MEMORY)
            cells[2], cells[3] = f"{run.memory:.1f} / {cells[2]}", mark(off, MEMORY)
        if run.rate is not None:
            off = run.rate / plan["tokens_a_second"] - 1
            times.append(abs(off) <= TIME)
            cells[4], cells[5] = f"{run.rate:,.0f} / {cells[4]}", mark(off, TIME)
        lines.append(f"| {' | '.join(cells)} |")
    return [
        "# Published runs beside plans",
        "",
        "`python benchmarks/published.py` writes this file. A cell has the published number / the predicted one.",
        "Memory is off by predicted / published - 1, time by the same of the seconds of a step. **Bold** is more than",
        "10 % of memory or 25 % of time.",
        f"Rates are {ATTAINED:.0%} of the data sheets in `fzero/program/hardware.py`, and {FLASH_2:.0%} for runs with",
        "FlashAttention-2 (torchtitan's of 2024, nanotron's): fitted to no run.",
        "A prediction is of fzero's own step, in bfloat16, eager. Letters name reasons of misses, below the table.",
        "",
        f"Within 10 % of memory: {sum(memory)} of {len(memory)}. Within 25 % of time: {sum(times)} of {len(times)}.",
        "",
        "| run | planned as: mesh, rows x tokens of a group | GiB of a rank | off | tokens/s of a rank | off | why |",
        "|---|---|---|---|---|---|---|",
        *lines,
        "",
        *(f"* {letter}: {reason}" for letter, reason in REASONS.items()),
        "",
        "Not planned:",
        "",
        *(f"* {lack}" for lack in LACKS),
        *(f"* {run.what}: no plan of it was made in time" for run in RUNS if run.name not in found),
    ]


def mark(off: float, allowed: float) -> str:
    """A deviation in percent, bold where it is more than allowed."""
    text = f"{off:+.0%}"
    return f"**{text}**" if abs(off) > allowed else text


if __name__ == "__main__":
    sys.exit(main())
