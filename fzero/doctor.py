"""The doctor: what this machine and its ranks have for fzero, what of it does not work, and what to change.

python -m fzero doctor                            this process and its host
torchrun --nproc-per-node 2 -m fzero doctor       also each collective between the ranks, along each axis
torchrun --nproc-per-node 8 -m fzero doctor --mesh fsdp=2,tp=4
srun python -m fzero doctor                       of SLURM, and likewise mpirun
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, read_mesh
from fzero.base.sizes import format_size
from fzero.launch.environment import ALONE, find_launch
from fzero.launch.mesh import choose_mesh, init_mesh
from fzero.layout.wires import wire
from fzero.program.comm import Comm
from fzero.program.rates import bus_bytes
from fzero.ranks.exchanges import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter
from fzero.ranks.live import Live, live
from fzero.ranks.objects import gather_objects
from fzero.state.partition import partition

TESTED = (2, 11), (2, 15)
"""The oldest and the newest torch that fzero's tests have run with."""
SMALL, LARGE = 1 << 16, 1 << 25
"""Bytes of the exchanges that are timed: of their start, and of their rate."""
FEW_FILES, LITTLE_SHARED = 4096, 1 << 30
"""Fewer open files, and fewer bytes of shared memory, than this are worth a word."""
_PACKAGES = "torch optree einops numpy transformers peft trl accelerate lightning deepspeed".split()
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_", "HF_HUB_OFFLINE")
_WAYS = {
    "Alone": "nothing is sent",
    "Native": "by the collectives of the backend",
    "PointToPoint": "by messages of gloo",
    "SameHost": "each rank reads the memory of the others",
}


class Facts(NamedTuple):
    """What one process finds: `shown` for a human, `versions` that must be the same everywhere, and `advice`."""

    shown: dict[str, str]
    versions: dict[str, str]
    advice: list[str]


class Timing(NamedTuple):
    """A collective along an axis: whether its values were right, the seconds of a small one, and bytes a second that
    each rank sent of a large one."""

    name: str
    is_right: bool
    seconds: float
    rate: float


def examine(mesh: str | None = None, seconds: float = 2.0) -> list[str]:
    """The lines of a report. Under a launcher all ranks call it, and each collective is tried for so many seconds.

    Raises:
        FzeroError: for a mesh that the ranks do not make, for ranks that do not come.
    """
    facts, launch = find_facts(), find_launch(os.environ)
    if launch == ALONE:
        read_mesh("--mesh", (mesh or "fsdp=1").replace("*", "1"))
        alone = "this process alone; to try collectives: torchrun --nproc-per-node 2 -m fzero doctor"
        return [*_describe(facts.shown), f"ranks        {alone}", *_advise(facts.advice)]
    choose_shape(mesh, launch.world)
    ranks = init_mesh(mesh, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        everyone: list[tuple[str, Facts]] = gather_objects((platform.node(), facts), group)
        on = live(ranks)
        lines = [*_describe(facts.shown), f"ranks        {_name_ranks(everyone)}, by {launch.launcher}"]
        wrong = list[str]()
        for axis in on.mesh.names:
            timings = try_collectives(on, axis, seconds)
            lines += ["", *_format_axis(axis, on, timings)]
            failed = (x.name for x in timings if not x.is_right)
            wrong += [f"{name} along {axis} has wrong values: report it, with this output" for name in failed]
        found = [each for _, each in everyone]
        advice = [*wrong, *compare_versions(found), *dict.fromkeys(x for each in found for x in each.advice)]
        return [*lines, "", *_advise(advice)]
    finally:
        dist.destroy_process_group()


def choose_shape(text: str | None, world: int) -> VirtualMesh:
    """The mesh of `--mesh`, with the axis "fsdp" among others; without it one axis of all ranks."""
    mesh = choose_mesh("--mesh", text, world)
    try:
        mesh.split(mesh.shard_axis)
    except FzeroError as error:
        raise FzeroError("--mesh", f"is {text}: {error.problem}", error.way_out) from None
    return mesh


# one process


def find_facts() -> Facts:
    """What this process finds about its host, without another process."""
    found = {name: version for name in _PACKAGES if (version := _find_version(name))}
    versions = {"fzero": fzero.__version__, "Python": platform.python_version(), **found}
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    shown = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "host": f"{platform.node()}: {cores} cores, {format_size(memory)} of memory, {format_size(shared)} of /dev/shm "
        f"free, {files} open files",
        "device": _describe_device(),
        "threads": f"{threads} in each of {local} process{'es' if local > 1 else ''} on this host",
        "environment": ", ".join(set_here) or "nothing of NCCL, gloo or threads is set",
    }
    advice = list(find_advice(cores, threads, local, shared, files))
    return Facts(shown, versions, advice)


def find_advice(cores: int, threads: int, local: int, shared: int, files: int) -> Iterator[str]:
    """What to change, where `local` processes of a host have so many cores, threads each, bytes of shared memory and
    files that they may open."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not TESTED[0] <= version <= TESTED[1]:
        tested = " to ".join(f"{major}.{minor}" for major, minor in TESTED)
        yield f"torch {torch.__version__} is none of those that fzero was tested with, {tested}: install one of them"
    if local * threads > cores and not torch.cuda.is_available():
        yield (
            f"{local} ranks of {threads} threads share {cores} cores: set OMP_NUM_THREADS={max(1, cores // local)}, "
            f"or start fewer ranks"
        )
    if shared < LITTLE_SHARED:
        yield (
            f"/dev/shm has {format_size(shared)}, which data loaders of several processes and NCCL may fill: in a "
            f"container give --shm-size=8g"
        )
    if files < FEW_FILES:
        yield f"a process may open {files} files, and many ranks or shards need more: ulimit -n 65536"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) > 1 and not torch.cuda.is_available():
        yield "the kernel lets no process read another's memory (yama/ptrace_scope), so that CPU ranks send messages"
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1":
        yield "TORCH_NCCL_BLOCKING_WAIT=1 makes each collective wait, so that none is hidden behind compute: unset it"


def _describe_device() -> str:
    if not torch.cuda.is_available():
        return (
            "CPU, no CUDA"
            if torch.version.cuda is None
            else f"CPU; torch has CUDA {torch.version.cuda} and finds no GPU"
        )
    count, of = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{count} x {of.name}, {format_size(of.total_memory)} each, CUDA {torch.version.cuda}, NCCL {nccl}"


def _find_version(package: str) -> str:
    """The installed version, that of torch with what it was built for; "" where there is none."""
    try:
        if package == "torch":
            return str(torch.__version__)
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# several processes


Check = Callable[[Tensor], bool]


def list_exchanges(on: Live, axis: str) -> Iterator[tuple[Callable[[int], Exchange], Check]]:
    """For each collective along an axis a function of bytes that makes it, and whether a result of it is right. Each
    rank gives its own number, from 1 on."""
    world, rank, device = on.mesh.size(axis), on.along(axis), on.device
    numbers = torch.arange(1.0, world + 1, device=device)

    def fill(nbytes: int, blocks: int = 1) -> Tensor:
        return torch.full((max(1, nbytes // 4 // world) * blocks,), rank + 1.0, device=device)

    def scatter(nbytes: int) -> Exchange:
        full = fill(nbytes, world)
        layout = partition({"x": torch.empty(full.shape, device="meta")}, VirtualMesh(**{axis: world}))["x"].form.layout
        return ReduceScatter("doctor", axis, [full], wire(layout, (0,)))

    def is_in_order(x: Tensor) -> bool:
        return torch.equal(x.view(world, -1), numbers[:, None].expand(-1, x.numel() // world))

    yield lambda n: AllGather("doctor", axis, fill(n)), is_in_order
    yield scatter, lambda x: bool((x == numbers.mean()).all())
    yield lambda n: AllReduce("doctor", axis, fill(n, world), "sum"), lambda x: bool((x == numbers.sum()).all())
    yield lambda n: AllToAll("doctor", axis, fill(n, world)), is_in_order


def try_collectives(on: Live, axis: str, seconds: float) -> list[Timing]:
    """Each collective along an axis, tried for about so many seconds. All ranks call."""
    return [time_exchange(on, make, check, seconds) for make, check in list_exchanges(on, axis)]


def time_exchange(on: Live, make: Callable[[int], Exchange], check: Check, seconds: float) -> Timing:
    """Try a collective with few and with many bytes, for about so many seconds."""
    medians, is_right = list[float](), True
    for size in (SMALL, LARGE):
        exchange = make(size)
        times = list[float]()
        while not times or on.find_largest(int(sum(times) < seconds / 2 and len(times) < 100), "the doctor goes on"):
            on.agree("the doctor's next exchange")
            begin = time.perf_counter()
            result = on.begin(exchange).wait()
            on.settle()
            if on.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        is_right = is_right and check(result)
        medians.append(sorted(times)[len(times) // 2])
    is_right = not on.find_largest(int(not is_right), "the doctor's values")
    given, count = exchange.measure(on.mesh.size(exchange.axis))
    sent = bus_bytes(Comm(exchange.name, exchange.axis, None, given.dtype, count * given.element_size()), on.mesh)
    return Timing(exchange.name, is_right, medians[0], sent / medians[1])


def compare_versions(everyone: Sequence[Facts]) -> Iterator[str]:
    """What to change where the versions of ranks differ."""
    for package in dict.fromkeys(name for facts in everyone for name in facts.versions):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(facts.versions.get(package) or "none", []).append(rank)
        if len(ranks) > 1:
            yield (
                f"{package} differs: " + ", ".join(f"{x} on ranks {who}" for x, who in ranks.items()) + ": install one"
            )


# text


def _describe(shown: dict[str, str]) -> list[str]:
    return [f"{name:<12} {text}" for name, text in shown.items()]


def _name_ranks(everyone: Sequence[tuple[str, Facts]]) -> str:
    hosts = len({host for host, _ in everyone})
    return f"{len(everyone)} on {hosts} host{'s' if hosts > 1 else ''}"


def _format_axis(axis: str, on: Live, timings: Sequence[Timing]) -> list[str]:
    transport = on.transports[axis]
    way = _WAYS.get(type(transport).__name__, type(transport).__name__)
    head = f"axis {axis}: {on.mesh.size(axis)} ranks, {way}"
    small, large = (f"{x >> 10} KiB" if x < 1 << 20 else f"{x >> 20} MiB" for x in (SMALL, LARGE))
    rows = [
        f"  {x.name:<16} {'right' if x.is_right else 'WRONG':<6} {x.seconds * 1e3:>10.3f} ms {x.rate / 1e9:>10.2f} GB/s"
        for x in timings
    ]
    return [head, f"  {'collective':<16} {'values':<6} {'of ' + small:>13} {'of ' + large:>15}", *rows]


def _advise(advice: Sequence[str]) -> list[str]:
    return ["to change", *(f"* {x}" for x in advice)] if advice else ["nothing to change was found"]
