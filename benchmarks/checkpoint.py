"""Seconds and memory of checkpoints, beside `dd conv=fsync` and torch.distributed.checkpoint (DCP) in the same run.

    python benchmarks/checkpoint.py                      # 1 GiB a rank, on 2 and on 4 ranks
    python benchmarks/checkpoint.py --ranks 2 --mib 64   # smaller

The state is that of a GPT in training with AdamW: fp32, three trees. fzero and DCP save the same bytes, fzero from its
slices, DCP from DTensors cut along the first dimension, as FSDP2 has them. DCP has the defaults of its
`FileSystemWriter`: one file a rank, one thread, `sync_files=True`. `dd` copies the files that fzero wrote, one process
a rank, from the page cache. The ways take turns, and the first round does not count. Times are medians, until the last
rank is done.

Loads are timed with the files dropped from the page cache ("cold": a virtual machine's host may still have them) and
with the files in it ("warm"), on as many ranks as saved and on another number. fzero loads into new memory, and
("donated") into the memory of the state, as DCP does. All loaded values are compared with what was saved.

At last, `save(..., wait=False)`: seconds until it returns, and what the writing thread takes from the next steps.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from environments import OURS
from launch import Launch, launch
from machine import add_runs
from quartiles import quartiles
from runs import SIZES

MIB, TIMEOUT = 1 << 20, 900.0


def run(task: str, ranks: int, **given: Any) -> dict[str, Any]:
    """What rank 0 of a launch found."""
    started = Launch("checkpoint_rank.py", given | {"task": task}, "cpu", OURS)
    found: dict[str, Any] = launch([started], ranks, TIMEOUT)[0]
    return found


def show_saves(found: dict[str, Any], ranks: int) -> None:
    """A line for each way to save, and the parts of fzero's."""
    mib, reference = found["nbytes"] / MIB, median(found["save"]["dd"])
    print(f"\nsave on {ranks} ranks, {mib:.0f} MiB a rank: seconds, and the speed of `dd` = 1")
    for name, seconds in found["save"].items():
        low, middle, high = quartiles(seconds)
        rate = ranks * mib * MIB / middle / 1e6
        print(f"{name:8}{middle:8.2f} ({low:.2f} - {high:.2f}){rate:8.0f} MB/s{reference / middle:8.2f}")
    names = [name for name in found["parts"][0][0] if name != "copy"]
    parts = {name: median(each[name] for rank in found["parts"] for each in rank) for name in names}
    print("  of fzero's: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()))
    returned, done = found["beside"]["returned"], found["beside"]["done"]
    print(
        f"  wait=False returns after {returned[0]:.2f}, again {median(returned[1:]):.2f}; done {median(done[1:]):.2f}"
    )
    show_memory("save", found, mib)


def show_loads(found: dict[str, Any], saved_on: int, ranks: int) -> None:
    """A line for each kind of load."""
    mib = found["nbytes"] / MIB
    print(f"\nload on {ranks} ranks what {saved_on} saved, {mib:.0f} MiB a rank: seconds, and the speed of DCP = 1")
    for kind, ways in found["load"].items():
        for name, seconds in ways.items():
            low, middle, high = quartiles(seconds)
            ratio = median(ways["dcp"]) / middle
            print(f"{kind:6}{name:16}{middle:8.2f} ({low:.2f} - {high:.2f}){ratio:8.2f}")
    show_memory("load", found, mib)


def show_memory(what: str, found: dict[str, Any], mib: float) -> None:
    """The growth of a rank's bytes in use."""
    grown = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in found[f"memory of {what}"].items())
    print(f"  memory of {what}, MiB over what was held before: {grown}; a share is {mib:.0f}")


def show_training(found: dict[str, Any], size: str, ranks: int) -> None:
    """What the writing thread takes from the steps."""
    without, beside = median(found["without"]), median(found["beside"])
    print(f"\ntraining of size {size} on {ranks} ranks, {found['nbytes'] / MIB:.0f} MiB of state a rank")
    print(f"{found['steps']} steps {without:.2f} s; with a save under way {beside:.2f} s, {beside - without:+.2f} s")
    returned, work = median(found["returned"]), median(found["done"])
    print(f"save(..., wait=False) returns after {returned:.2f} s; {work:.2f} s of work")


def main() -> None:
    """Prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=1024, help="of a rank's share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=[*SIZES, ""], default="M", help='of the training; "" for none')
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="adds every figure to a file, with versions and machine")
    flags = parser.parse_args()
    for ranks in flags.ranks:
        others, nbytes = (4 if ranks == 2 else 2), flags.mib * MIB * ranks
        with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
            given = {"folder": folder, "nbytes": nbytes, "rounds": flags.rounds}
            found = run("save_and_load", ranks, **given)
            show_saves(found, ranks)
            show_loads(found, ranks, ranks)
            elsewhere = run("load_elsewhere", others, **given, saved=found.pop("saved"))
            show_loads(elsewhere, ranks, others)
            add_runs(flags.json, {f"{ranks} ranks": found | {f"on {others} ranks": elsewhere}})
    if flags.size:
        with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
            trained = run("train", 2, folder=folder, size=flags.size, rounds=flags.rounds)
        show_training(trained, flags.size, 2)
        add_runs(flags.json, {"training": trained})


if __name__ == "__main__":
    main()
