"""The command: `python -m fzero plan`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fzero.base.errors import FzeroError
from fzero.base.mesh import JOINT, SHARD_AXIS, VirtualMesh, read_mesh
from fzero.base.sizes import format_size, parse_size
from fzero.base.text_files import write_text
from fzero.pages.comparison import draw_comparison
from fzero.pages.page import draw_page
from fzero.planner.summary import SHARED, Forecast, Traced, count_groups, summarize
from fzero.program.hardware import ATTAINED, HARDWARE, Hardware
from fzero.program.rates import Rates, read_rates

if TYPE_CHECKING:
    from fzero.planner.forecast import Recipe
    from fzero.planner.sweep import Candidate


_AXES = ("fsdp", "replica", "dp", *SHARED)
"""The axes that a plan knows: along the last four ranks share examples, along the others they do not."""
_OF_CONFIGS = {
    "batch": 1, "length": 4096, "microbatches": 1, "remat": None, "compute": "bfloat16", "offload": False, "fit": False,
    "sequence_parallel": False,
}  # fmt: skip
"""Options of the step that a plan makes of a configuration -> their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="a config.json of transformers, or its folder")
    what.add_argument(
        "--script",
        metavar="FILE:FUNCTION",
        help="a function of a mesh that returns (train_step, its arguments, the tokens of a step)",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", help='axes and ranks, as in fsdp=64,tp=8; "tp", "ep", "sp" and "pp" share examples')
    where.add_argument(
        "--sweep", type=count, metavar="RANKS", help="rank the meshes of so many ranks; --batch is of a rank"
    )
    parser.add_argument("--axes", help="axes along which ranks share examples that --sweep tries, by default tp,ep")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100-sxm", help="of which data sheets are known")
    parser.add_argument(
        "--rates",
        type=Path,
        help="a file of JSON with fields of fzero.Rates, measured ones; in a sweep a mesh takes those of its axes",
    )
    parser.add_argument(
        "--batch", type=count, default=_OF_CONFIGS["batch"], help="rows of each group of ranks that share examples"
    )
    parser.add_argument("--length", type=count, default=_OF_CONFIGS["length"], help="tokens of a row")
    parser.add_argument(
        "--microbatches", type=count, default=_OF_CONFIGS["microbatches"], help="parts of a batch, one after the other"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stage", type=int, choices=(1, 2, 3), help="by default 3")
    how.add_argument("--memory", help='a budget that a plan is searched within, as "70GiB"')
    parser.add_argument(
        "--remat",
        nargs="?",
        const="layers",
        choices=("layers", "selective"),
        help='what the backward pass computes again: each layer, or with "selective" a layer without attention and '
        "every other matrix product",
    )
    parser.add_argument(
        "--compute",
        choices=("bfloat16", "float32", "float8"),
        default=_OF_CONFIGS["compute"],
        help="of matrix products",
    )
    parser.add_argument("--offload", action="store_true", help="the state of the optimizer lies on the host")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help='ranks along "tp" have parts of rows between layers'
    )
    parser.add_argument("--fit", action="store_true", help="where it does not fit, plan changes: the three cheapest")
    parser.add_argument("--html", type=Path, help="a file to write a page with pictures to")
    parser.add_argument(
        "--beside",
        metavar="MESH",
        help="another mesh, which the page of --html shows beside --mesh, with the same rows",
    )
    parser.add_argument("--json", action="store_true", help="numbers in bytes and seconds, in the place of a text")


def count(text: str) -> int:
    """A whole number from 1 on, as argparse asks for one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def print_plan(options: argparse.Namespace) -> None:
    """Print what a step would take."""
    if options.memory is not None:
        parse_size("--memory", options.memory)
    hardware = HARDWARE[options.hardware]
    _check_together(options)
    if options.sweep is not None:
        _print_sweep(options)
        return
    mesh, rates = _read_axes("--mesh", options.mesh, options)
    trace = _trace_script if options.script is not None else _trace_config
    beside = None if options.beside is None else _trace_beside(options, mesh, trace)
    traced = trace(options, mesh, rates, options.batch)
    found = summarize(traced)
    if options.html is not None:
        page = (
            draw_page(traced.program, hardware.nbytes)
            if beside is None
            else draw_comparison(traced.program, beside.program, hardware.nbytes)
        )
        write_text("--html", options.html, page)
    if options.json:
        print(json.dumps(to_dict(found, hardware) | {"rates": rates._asdict()}, indent=2))
        return
    print("\n".join(describe(found, options, mesh)))
    if found.peak > hardware.nbytes:
        print("\n".join(_plan_ways(options, mesh) if options.fit else _list_ways(found, options)))


def _check_together(options: argparse.Namespace) -> None:
    """Refuse an option that nothing would read beside another."""
    if options.axes is not None and options.sweep is None:
        raise FzeroError("--axes", "is of --sweep, and --mesh names its own axes", "give --sweep, or no --axes")
    if options.fit and options.sweep is not None:
        raise FzeroError("--fit", "plans changes of one mesh, and --sweep plans many", "give --mesh, or no --fit")
    if options.fit and options.memory is not None:
        problem = "tries a budget among its changes, and --memory gives one"
        raise FzeroError("--fit", problem, "leave --memory out; --hardware says what the device has")
    if options.fit and options.json:
        raise FzeroError("--fit", "says its changes as text, and --json prints none", "give one of the two")


def _read_axes(word: str, text: str, options: argparse.Namespace) -> tuple[VirtualMesh, Rates]:
    """A mesh that an option names, with the axis that state lies along if need be, and the rates on it."""
    mesh = read_mesh(word, text)
    for axis in mesh.names:
        if axis not in _AXES:
            raise FzeroError(word, f"has the axis {axis!r}", f"a plan knows {', '.join(_AXES)}")
    if not mesh.has(SHARD_AXIS) and (len(mesh.names) > 1 or mesh.names[0] in SHARED):  # a shard axis of one rank
        sizes = mesh.sizes | {SHARD_AXIS: 1}
        mesh = VirtualMesh(**{axis: sizes[axis] for axis in sorted(sizes, key=lambda axis: axis in SHARED)})
    hardware = HARDWARE[options.hardware]
    return mesh, hardware.rates(mesh) if options.rates is None else read_file(options.rates, mesh.names)


def _trace_config(options: argparse.Namespace, mesh: VirtualMesh, rates: Rates, batch: int) -> Traced:
    """The step of a model of transformers, with `batch` rows of each group of ranks that share examples."""
    recipe = _read_recipe(options)
    from fzero.planner.forecast import trace_step

    return trace_step(options.config, mesh, recipe._replace(batch=batch), rates)


def _read_recipe(options: argparse.Namespace) -> Recipe:
    try:
        from fzero.planner.forecast import Recipe  # with transformers, which other commands do without
    except ModuleNotFoundError as error:
        raise FzeroError("plan", f"needs {error.name}, which is not installed", "pip install 'fzero[hf]'") from error
    if options.compute == "float8":
        problem = "is float8, and no layer of transformers makes float8 products whose gradients are scaled"
        raise FzeroError("--compute", problem, "plan in bfloat16, whose products take up to twice the time")
    given = options.batch, options.length, options.microbatches, options.stage, options.memory, options.remat
    return Recipe(*given, getattr(torch, options.compute), options.offload, options.sequence_parallel)


def _trace_script(options: argparse.Namespace, mesh: VirtualMesh, rates: Rates, batch: int) -> Traced:
    """The step of a user's file, which says itself what a batch is."""
    from fzero.planner.script import trace_script

    for name, usual in _OF_CONFIGS.items():
        if getattr(options, name) != usual:
            option = f"--{name.replace('_', '-')}"
            raise FzeroError(option, "is for --config", "let the function of --script make such a batch or step")
    data = tuple(axis for axis in mesh.names if axis not in SHARED)
    return trace_script(options.script, mesh, options.stage, options.memory, data, rates)


def _trace_beside(options: argparse.Namespace, mesh: VirtualMesh, trace: Callable[..., Traced]) -> Traced:
    """The step on the mesh of --beside, with as many rows as on `mesh`.

    Raises:
        FzeroError: without a page that would show it, for rows that the ranks do not divide; as `trace`.
    """
    if options.html is None:
        raise FzeroError("--beside", "is shown on a page", "give --html FILE too")
    other, rates = _read_axes("--beside", options.beside, options)
    rows, groups = options.batch * count_groups(mesh), count_groups(other)
    if options.script is None and rows % groups:
        problem = f"has {groups} groups of ranks that share examples, and a step has {rows} rows"
        raise FzeroError("--beside", problem, f"give a --batch with which {groups} groups divide the rows")
    return trace(options, other, rates, rows // groups if options.script is None else options.batch)


def _print_sweep(options: argparse.Namespace) -> None:
    """Print the meshes of so many ranks, the fastest that fits first. Each mesh goes to stderr once it is planned.

    Raises:
        FzeroError: for an option that no mesh can be planned with; for a sweep without a plan, after the table.
    """
    if options.script is not None:
        raise FzeroError("--script", "makes a step of one mesh", "give --mesh in the place of --sweep")
    if options.html is not None or options.beside is not None:
        word = "--html" if options.html is not None else "--beside"
        raise FzeroError(word, "is a page of one plan, and --sweep makes many", "give --mesh in the place of --sweep")
    recipe = _read_recipe(options)
    from fzero.planner.sweep import rank_candidates, sweep_meshes

    hardware, rates_of, axes = HARDWARE[options.hardware], choose_rates(options), choose_axes(options.axes)
    tried: list[Candidate] = []
    given = options.config, options.sweep, hardware.host, recipe, rates_of, limit_of(options), axes
    for candidate in sweep_meshes(*given):
        print(f"{candidate} parts={candidate.microbatches}: {candidate.remark or 'fits'}", file=sys.stderr, flush=True)
        tried.append(candidate)
    ranked = rank_candidates(tried)
    if options.json:
        rows = []
        for mesh, parts, found, problem in ranked:
            row = {"mesh": {axis: mesh.size(axis) for axis in mesh.names}, "microbatches": parts, "problem": problem}
            rows.append(row | (to_dict(found, hardware) if found is not None else {}))
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(tabulate(ranked, options)))
    if all(candidate.found is None for candidate in tried):
        raise FzeroError(f"--sweep {options.sweep}", f"plans no mesh; the first, {tried[0]}: {tried[0].problem}")


def choose_axes(text: str | None) -> tuple[str, ...]:
    """The axes of --axes."""
    axes = ("tp", "ep") if text is None else tuple(text.split(","))
    if unknown := [axis for axis in axes if axis not in SHARED]:
        raise FzeroError("--axes", f"has {unknown}, along which ranks share no examples", f"give {', '.join(SHARED)}")
    return axes


def limit_of(options: argparse.Namespace) -> int:
    """The bytes that a step may take: the memory of the device, or a budget that is smaller."""
    held = HARDWARE[options.hardware].nbytes
    return held if options.memory is None else min(held, parse_size("--memory", options.memory))


def choose_rates(options: argparse.Namespace) -> Callable[[VirtualMesh], Rates]:
    """Mesh of a sweep -> its rates: those of data sheets, or of a file without the axes that the mesh does not have.

    Raises:
        FzeroError: as `read_file`, which is called here and not for each mesh.
    """
    from fzero.planner.sweep import AXES

    if options.rates is None:
        return HARDWARE[options.hardware].rates
    rates = read_file(options.rates, AXES)
    return lambda mesh: rates._replace(axes=tuple((axis, wire) for axis, wire in rates.axes if mesh.has(axis)))


def to_dict(found: Forecast, hardware: Hardware) -> dict[str, Any]:
    """A forecast as plain data."""
    return found._asdict() | {
        "tokens_a_second": found.tokens_a_second,
        "utilization": found.utilization(hardware),
        "fits": found.peak <= hardware.nbytes,
    }


def read_file(path: Path, axes: Sequence[str]) -> Rates:
    """Rates from a file of JSON.

    Raises:
        FzeroError: for a file that has no rates, or those of an axis that is none of `axes`.
    """
    try:
        rates = read_rates(str(path), json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        way_out = "write json.dumps(step.calibrate(...)._asdict()) to it"
        raise FzeroError(str(path), f"has no rates: {error}", way_out) from error
    if unknown := [axis for axis, _ in rates.axes if not set(axis.split(JOINT)) <= set(axes)]:
        raise FzeroError(str(path), f"has rates of {unknown}, which are no axes", f"give those of {', '.join(axes)}")
    return rates


def tabulate(ranked: Sequence[Candidate], options: argparse.Namespace) -> list[str]:
    """A sweep as lines: a row for each mesh, in this order."""
    hardware, limit = HARDWARE[options.hardware], format_size(limit_of(options))
    lines = [
        f"{options.sweep:,} x {options.hardware} with {limit}, {options.batch} x {options.length:,} tokens a rank",
        f"{'mesh':<28}{'parts':>6}{'memory':>12}{'s a step':>10}{'waiting':>9}"
        f"{'tokens/s':>10}{'in all':>14}{'of flops':>10}",
    ]
    for candidate in ranked:
        start = f"{candidate!s:<28}{candidate.microbatches:>6}"
        if (found := candidate.found) is None:
            lines.append(f"{start}  {candidate.remark}")
            continue
        waiting, of_flops = (found.seconds - found.busy) / found.seconds, found.utilization(hardware)
        lines.append(
            f"{start}{format_size(found.peak):>12}{found.seconds:>10.3f}{waiting:>9.1%}{found.tokens_a_second:>10,.0f}"
            f"{found.tokens / found.seconds:>14,.0f}{of_flops:>10.1%}  {candidate.remark}".rstrip()
        )
    return lines


def describe(found: Forecast, options: argparse.Namespace, mesh: VirtualMesh) -> list[str]:
    """A forecast as lines."""
    hardware = HARDWARE[options.hardware]
    room, waiting = hardware.nbytes - found.peak, found.seconds - found.busy
    ranks = " x ".join(f"{mesh.size(axis)} {axis}" for axis in mesh.names)
    rates = f"{options.rates}" if options.rates else f"{ATTAINED:.0%} of the data sheet ({hardware.source})"
    fits = f"{format_size(room)} are free" if room >= 0 else f"{format_size(-room)} TOO MUCH"
    return [
        f"{found.parameters:,} parameters on {found.ranks:,} x {options.hardware} ({ranks}), "
        f"{found.tokens:,} tokens a step",
        f"memory    {format_size(found.peak)} at the peak of {format_size(hardware.nbytes)}: {fits}",
        f"          {format_size(found.state)} of parameters and optimizer state",
        *([f"          {format_size(found.host)} on the host, at its peak"] if found.host else []),
        *(f"          {format_size(size)} of {what}, at the peak" for what, size in found.largest[:4]),
        *(f"moved     {format_size(size)} a step over {axis}" for axis, size in found.moved.items()),
        f"time      {found.seconds:.3f} s a step: {found.busy:.3f} s of compute, {waiting:.3f} s of waiting",
        f"          {found.tokens_a_second:,.0f} tokens a second and rank, {found.tokens / found.seconds:,.0f} in all, "
        f"{found.utilization(hardware):.1%} of the dense flops",
        f"rates     {rates}",
        *(f"plan      {line}" for remark in found.remarks for line in remark.splitlines()),
    ]


def _list_ways(found: Forecast, options: argparse.Namespace) -> list[str]:
    """What may make a step fit, the cheapest first, as options of the command."""
    short = found.peak / HARDWARE[options.hardware].nbytes
    ways = [
        ("--remat: layers are computed again, for about a third more compute", options.remat != "layers"),
        (f"--memory {int(HARDWARE[options.hardware].nbytes * 0.95) >> 30}GiB: a search decides what is computed again",
         options.memory is None),
        (f"--microbatches {options.batch}: one row at a time", options.batch > options.microbatches),
        (f"a mesh of {2 ** math.ceil(math.log2(short))} times the ranks", True),
        ("--fit: plans these, --offload and other axes, and says the three cheapest", options.config is not None),
    ]  # fmt: skip
    return ["to try    " + way for way, helps in ways if helps]


def _plan_ways(options: argparse.Namespace, mesh: VirtualMesh) -> list[str]:
    """The three cheapest changes that make a step fit, as options of the command, each with its plan."""
    from fzero.planner.ways import find_ways

    rates_of = HARDWARE[options.hardware].rates if options.rates is None else choose_rates(options)
    fits = find_ways(options.config, mesh, _read_recipe(options), rates_of, limit_of(options))
    return [
        f"fits      {way}: {format_size(found.peak)}, {found.tokens_a_second:,.0f} tokens a second and rank"
        for way, found in fits
    ] or ["fits      no change that was tried; give more ranks, or shorter rows"]
