"""The environment of a process: which launcher started it, and which of the run's processes it is.

Launchers stand in each other: `srun` starts a `torchrun` on each host, whose processes have the variables of both. The
inner one counts. From the inner to the outer:

    torchrun    TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    variables   RANK, WORLD_SIZE: other launchers, and one process for each pod of a PyTorchJob
    Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    PMI         PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH and Intel MPI. Others that speak PMI give
                PMI_LOCAL_RANK, or leave LOCAL_RANK to a wrapper
    SLURM       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST: a task of srun
    Kubernetes  JOB_COMPLETION_INDEX, WORLD_SIZE: one process for each pod of an indexed Job, as of a JobSet
    nothing     a process that is alone

Sources: torch/distributed/run.py; Slurm's srun(1) and sbatch(1); Open MPI's mpirun(1); Intel MPI's reference;
pkg/controller.v1/pytorch/envvar.go of kubeflow's training-operator; Kubernetes' page on indexed Jobs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from fzero.base.errors import FzeroError

PORT = 29500
"""torchrun's port of rank 0."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports of SLURM's steps, below those that Linux gives to connections."""
_HERE = "127.0.0.1"
_NO_TASK = 0xFFFFFFF0
"""Steps of SLURM from this number on are no tasks of srun: the shell of salloc, the script of a batch job."""
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
Variables = Mapping[str, str]


class Launch(NamedTuple):
    """This process among all processes of a run, as its `launcher` says. Rank 0 listens at `address` and `port`.
    `local_rank` is its number on its host, None where the launcher does not tell."""

    launcher: str
    rank: int
    world: int
    local_rank: int | None
    address: str
    port: int


ALONE = Launch("no launcher", 0, 1, 0, _HERE, 0)


def find_launch(variables: Variables) -> Launch:
    """What the variables of a process, such as `os.environ`, say.

    Raises:
        FzeroError: for a variable that is missing or no number, for variables that contradict each other, for the
            script or the shell of a job of several tasks, which `srun` did not start.
    """
    found = _find_inner({name: value for name, value in variables.items() if value or name not in _ADDRESS})
    if found.world < 1 or not 0 <= found.rank < found.world:
        problem = f"says rank {found.rank} of {found.world}"
        raise FzeroError(found.launcher, problem, "ranks count from 0, and there are fewer than the world has")
    return found


def _find_inner(variables: Variables) -> Launch:
    if "TORCHELASTIC_RUN_ID" in variables:
        _require("torchrun", variables, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        return _read_plain("torchrun", variables)
    outer = _read_open_mpi(variables) or _read_pmi(variables) or _read_slurm(variables)
    is_indexed = "JOB_COMPLETION_INDEX" in variables
    if "RANK" in variables or ("WORLD_SIZE" in variables and not outer and not is_indexed):
        return _read_beside(variables, outer)
    if outer is not None:
        return outer
    if is_indexed:
        _require("Kubernetes", variables, "WORLD_SIZE")
        return _read_plain("Kubernetes", {**variables, "RANK": variables["JOB_COMPLETION_INDEX"]})
    if "PET_NNODES" in variables:
        raise FzeroError("PET_NNODES", "is meant for torchrun, which did not start this process", "start torchrun")
    return ALONE


# one launcher each


def _read_plain(launcher: str, variables: Variables) -> Launch:
    """RANK and its like."""
    _require(launcher, variables, "RANK", "WORLD_SIZE")
    rank, world = _read(variables, "RANK"), _read(variables, "WORLD_SIZE")
    if world > 1:
        _require(launcher, variables, "MASTER_ADDR")
    local = _read(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else None
    return Launch(launcher, rank, world, local, variables.get("MASTER_ADDR", _HERE), _find_port(variables))


def _read_beside(variables: Variables, outer: Launch | None) -> Launch:
    """RANK and its like, beside what MPI or SLURM say. A launcher of several processes within a task gives each a
    LOCAL_RANK, and has a larger world."""
    if outer is not None:
        variables = {"MASTER_ADDR": outer.address, "MASTER_PORT": str(outer.port), **variables}
    found = _read_plain("RANK and WORLD_SIZE", variables)
    if outer is not None and (found.local_rank is None or found.world == outer.world):
        if found[1:3] != outer[1:3]:
            problem = f"are {found.rank} and {found.world}, and {outer.launcher} says {outer.rank} and {outer.world}"
            raise FzeroError("RANK and WORLD_SIZE", problem, f"unset them: {outer.launcher} needs none")
        return outer._replace(address=found.address, port=found.port)
    processes = variables.get("PET_NPROC_PER_NODE", "1")
    if found.local_rank is None and processes.isdecimal() and int(processes) > 1:
        problem = f"is {processes}, and this process is the only one of its pod"
        raise FzeroError("PET_NPROC_PER_NODE", problem, "start torchrun, which starts so many, or give 1")
    return found


def _read_open_mpi(variables: Variables) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    rank, world, local, here = (f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    _require("Open MPI", variables, world, local, here)
    return _read_mpi("Open MPI", variables, rank, world, local, here)


def _read_pmi(variables: Variables) -> Launch | None:
    """MPICH and Intel MPI. A task of srun that has the same numbers from PMI is SLURM's."""
    if "PMI_RANK" not in variables:
        return None
    _require("PMI", variables, "PMI_SIZE")
    slurm = _read_slurm(variables) if _is_task(variables) else None
    if slurm is not None and (_read(variables, "PMI_RANK"), _read(variables, "PMI_SIZE")) == slurm[1:3]:
        return None
    names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "LOCAL_RANK")
    local = next((name for name in names if name in variables), names[0])
    return _read_mpi("PMI", variables, "PMI_RANK", "PMI_SIZE", local, "MPI_LOCALNRANKS")


def _read_mpi(launcher: str, variables: Variables, rank: str, world: str, local: str, here: str) -> Launch:
    """Variables by these names. They do not say where rank 0 is, unless all ranks are on one host."""
    if _read(variables, world) > 1 and variables.get(here) != variables[world] and "MASTER_ADDR" not in variables:
        way_out = "give the host of rank 0 to all processes, as in mpirun -x MASTER_ADDR=node1"
        raise FzeroError("MASTER_ADDR", f"is not set, and {launcher} does not say where rank 0 is", way_out)
    number = _read(variables, local) if local in variables else None
    address, port = variables.get("MASTER_ADDR", _HERE), _find_port(variables)
    return Launch(launcher, _read(variables, rank), _read(variables, world), number, address, port)


def _read_slurm(variables: Variables) -> Launch | None:
    """A task of srun. The script of a batch job and the shell of salloc have SLURM_PROCID too."""
    if "SLURM_PROCID" not in variables:
        return None
    if not _is_task(variables):
        if "RANK" not in variables and "SLURM_NTASKS" in variables and _read(variables, "SLURM_NTASKS") > 1:
            problem = f"is {variables['SLURM_NTASKS']}, and this process is the script or shell of the job, no task"
            raise FzeroError("SLURM_NTASKS", problem, "start it with srun there")
        return None
    step, job = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"), ("SLURM_NTASKS", "SLURM_JOB_NODELIST")
    size, hosts = (mine if mine in variables else others for mine, others in zip(step, job))
    _require("SLURM", variables, size, "SLURM_LOCALID", "SLURM_JOB_ID")
    world = _read(variables, size)
    if variables.get("SLURM_STEP_NUM_NODES") == "1":
        address = _HERE
    elif world > 1 and "MASTER_ADDR" not in variables:
        _require("SLURM", variables, hosts)
        address = find_first_host(variables[hosts])
    else:
        address = _HERE
    number = _read(variables, "SLURM_JOB_ID") + 101 * _read(variables, "SLURM_STEP_ID")
    port = _find_port(variables, _FIRST_PORT + number % _PORTS)
    rank, local = _read(variables, "SLURM_PROCID"), _read(variables, "SLURM_LOCALID")
    return Launch("SLURM", rank, world, local, variables.get("MASTER_ADDR", address), port)


def _is_task(variables: Variables) -> bool:
    return "SLURM_STEP_ID" in variables and _read(variables, "SLURM_STEP_ID") < _NO_TASK


def find_first_host(hosts: str) -> str:
    """The first host of a list in SLURM's form: `"gpu[08-11,20],node3" -> "gpu08"`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


# variables


def _find_port(variables: Variables, port: int = PORT) -> int:
    return _read(variables, "MASTER_PORT") if "MASTER_PORT" in variables else port


def _read(variables: Variables, name: str) -> int:
    if not variables[name].isdecimal():
        raise FzeroError(name, f"is {variables[name]!r}", "give a whole number")
    return int(variables[name])


def _require(launcher: str, variables: Variables, *names: str) -> None:
    if missing := [name for name in names if name not in variables]:
        given = [name for name in ("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX") if name in variables]
        beside = f" beside {', '.join(given)}" if given else ""
        problem = f"{'is' if len(missing) == 1 else 'are'} not set{beside}"
        raise FzeroError(f"{launcher}: {', '.join(missing)}", problem, "set it as docs/launchers.md says")
