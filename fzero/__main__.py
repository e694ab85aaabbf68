"""The command line of fzero.

python -m fzero doctor                             versions, limits, and what to change; under torchrun also collectives
python -m fzero plan --config F --mesh fsdp=8      memory and time of a step of a model, on ranks that are not there
python -m fzero plan --config F --sweep 64         the meshes of 64 ranks, the fastest that fits first
python -m fzero plan --script F:G --mesh fsdp=8    the same of a step of your own
python -m fzero checkpoint ls PATH                 the checkpoints of a folder
python -m fzero checkpoint verify PATH             reads all of the latest, and compares with its sums
python -m fzero checkpoint export PATH FILE        the tensors of the latest as one safetensors file
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import fzero
from fzero import FzeroError
from fzero.checkpoint import Checkpoint, open_checkpoint
from fzero.checkpoint.folder import list_steps
from fzero.doctor import examine
from fzero.launch import find_launch
from fzero.planner.command import add_arguments, print_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 1 after an `FzeroError`, whose message goes to stderr."""
    options = _make_parser().parse_args(arguments)
    try:
        options.run(options)
    except FzeroError as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fzero")
    rooms = parser.add_subparsers(required=True, metavar="{doctor,plan,checkpoint}")
    doctor = rooms.add_parser("doctor", help="look at this machine, and under torchrun at its ranks")
    doctor.add_argument("--mesh", help="axes and their sizes, as in fsdp=2,tp=4; by default one of all ranks")
    doctor.add_argument("--seconds", type=float, default=2.0, help="how long each collective is tried")
    doctor.set_defaults(run=_examine)
    plan = rooms.add_parser("plan", help="say what a training step would take, without a device and without weights")
    add_arguments(plan)
    plan.set_defaults(run=print_plan)
    commands = rooms.add_parser("checkpoint", help="look at checkpoints").add_subparsers(required=True)
    for name, run, help in (
        ("ls", _list, "list the checkpoints of a folder"),
        ("verify", _verify, "read all of a checkpoint, and compare with its sums"),
        ("export", _export, "write the tensors of a checkpoint to one safetensors file"),
    ):
        command = commands.add_parser(name, help=help)
        command.add_argument("path", type=Path, help="a folder that fzero.checkpoint.save wrote to")
        command.set_defaults(run=run)
        if name != "ls":
            command.add_argument("--step", type=int, help="by default the latest")
        if name == "export":
            command.add_argument("file", type=Path, help="the file to write")
            command.add_argument("--prefix", default="", help='only leaves below this path, such as "params"')
    return parser


def _examine(options: argparse.Namespace) -> None:
    lines = examine(options.mesh, options.seconds)
    if find_launch(os.environ).rank == 0:
        print("\n".join(lines), flush=True)


def _list(options: argparse.Namespace) -> None:
    steps = list_steps(options.path)
    if not steps:
        raise FzeroError(str(options.path), "has no checkpoint", "give a folder that fzero.checkpoint.save wrote to")
    for step in steps:
        print(_describe(open_checkpoint(options.path, step)))


def _verify(options: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(options.path, options.step)
    checkpoint.verify()
    print(f"{_describe(checkpoint)}: as it was written")


def _export(options: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(options.path, options.step)
    start = f"{options.prefix}." if options.prefix else ""
    chosen = {path.removeprefix(start): checkpoint[path] for path in checkpoint if path.startswith(start)}
    if not chosen:
        some = ", ".join(sorted({path.split(".")[0] for path in checkpoint}))
        raise FzeroError(options.prefix, f"is no path in {checkpoint.folder}", f"give one of {some}")
    fzero.save_safetensors(chosen, options.file)
    print(f"{len(chosen)} tensors of {checkpoint.folder} in {options.file}")


def _describe(checkpoint: Checkpoint) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in checkpoint.manifest.mesh.items()) or "one process"
    size = f"{checkpoint.nbytes / 2**20:.1f} MiB"
    return f"{checkpoint.folder.name}  {len(checkpoint)} tensors, {size}, saved on {mesh}"


if __name__ == "__main__":
    sys.exit(main())
