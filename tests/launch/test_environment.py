"""What a process learns from the variables of its launcher, by the sets that launchers are known to set."""

from __future__ import annotations

import pytest

from fzero import FzeroError
from fzero.launch import Launch, find_launch
from fzero.launch.environment import ALONE, find_first_host

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "200505", "SLURM_JOBID": "200505", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]", "SLURM_JOB_NUM_NODES": "4", "SLURM_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
"""Of the script of a batch job of Slurm, as users print it."""
SRUN = BATCH | {
    "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gnode[10,20,25,37]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.205.134",
}  # fmt: skip
SALLOC = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
"""Of the shell that salloc opens on a node: an interactive step."""
PORT = 10_000 + (200505 + 2 * 101) % 20_000
MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_ADDR": "node1"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
"""Of a worker of a PyTorchJob: RANK is that of the pod."""
INDEXED = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-workers-0-0.train"}


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, ALONE),
        (TORCHRUN, Launch("torchrun", 5, 16, 1, "node1", 29400)),
        (SRUN | TORCHRUN, Launch("torchrun", 5, 16, 1, "node1", 29400)),
        (SRUN, Launch("SLURM", 3, 4, 0, "gnode10", PORT)),
        (SRUN | {"MASTER_ADDR": "gnode10-ib", "MASTER_PORT": "7"}, Launch("SLURM", 3, 4, 0, "gnode10-ib", 7)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, Launch("SLURM", 3, 4, 0, "127.0.0.1", PORT)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Launch("SLURM", 3, 4, 0, "gnode10", PORT)),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "4"}, Launch("SLURM", 3, 4, 0, "gnode10", PORT)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launch("SLURM", 0, 1, 0, "127.0.0.1", PORT)),
        (SRUN | {"MASTER_ADDR": "", "MASTER_PORT": ""}, Launch("SLURM", 3, 4, 0, "gnode10", PORT)),
        (BATCH | {"SLURM_NTASKS": "1"}, ALONE),
        (SALLOC | {"SLURM_NTASKS": "1"}, ALONE),
        (SALLOC | HYDRA, Launch("PMI", 1, 2, 1, "127.0.0.1", 29500)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, ALONE),
        (MPI, Launch("Open MPI", 3, 4, 1, "node1", 29500)),
        (SRUN | MPI | {"SLURM_PROCID": "1"}, Launch("Open MPI", 3, 4, 1, "node1", 29500)),
        (HYDRA, Launch("PMI", 1, 2, 1, "127.0.0.1", 29500)),
        (BATCH | HYDRA, Launch("PMI", 1, 2, 1, "127.0.0.1", 29500)),
        (PMI | {"PMI_LOCAL_RANK": "3", "LOCAL_RANK": "2"}, Launch("PMI", 5, 8, 3, "node1", 29500)),
        (PMI | {"LOCAL_RANK": "1"}, Launch("PMI", 5, 8, 1, "node1", 29500)),
        (PMI | {"LOCAL_RANK": "1", "RANK": "5", "WORLD_SIZE": "8"}, Launch("PMI", 5, 8, 1, "node1", 29500)),
        (POD, Launch("RANK and WORLD_SIZE", 1, 2, None, "job-master-0", 23456)),
        (INDEXED, Launch("Kubernetes", 2, 4, None, "train-workers-0-0.train", 29500)),
        # a launcher of eight processes within each task of srun
        (
            SRUN | {"RANK": "25", "WORLD_SIZE": "32", "LOCAL_RANK": "1", "MASTER_PORT": "8"},
            Launch("RANK and WORLD_SIZE", 25, 32, 1, "gnode10", 8),
        ),
    ],
)
def test_what_a_launcher_sets_is_understood(variables: dict[str, str], launch: Launch) -> None:
    assert find_launch(variables) == launch


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (BATCH, "SLURM_NTASKS: is 4, and this process is the script or shell of the job, no task; start it"),
        (SALLOC, "SLURM_NTASKS: is 4, and this process is the script or shell of the job, no task; start it"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID: is 'x'; give a whole number"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM: says rank 4 of 4; ranks count from 0"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE: are 0 and 4, and SLURM says 3 and 4; unset"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "RANK and WORLD_SIZE: are 0 and 4, and SLURM"),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "8"}, "RANK and WORLD_SIZE: are 3 and 8, and SLURM says 3 and 4"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM: SLURM_LOCALID: is not set"),
        (
            without(TORCHRUN, "LOCAL_RANK"),
            "torchrun: LOCAL_RANK: is not set beside RANK",
        ),
        (without(MPI, "MASTER_ADDR"), "MASTER_ADDR: is not set, and Open MPI does not"),
        ({"RANK": "1"}, "RANK and WORLD_SIZE: WORLD_SIZE: is not set beside RANK"),
        ({"WORLD_SIZE": "2"}, "RANK and WORLD_SIZE: RANK: is not set beside WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE: MASTER_ADDR: is not set beside RANK, WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK and WORLD_SIZE: says rank 2 of 2"),
        (POD | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE: is 8, and this process is the only one of its pod"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES: is meant for torchrun, which did not start"),
        ({"JOB_COMPLETION_INDEX": "2"}, "Kubernetes: WORLD_SIZE: is not set beside JOB_COMPLETION_INDEX"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(FzeroError) as error:
        find_launch(variables)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node3", "node3"), ("node3,node1", "node3"), ("gpu[08-11,20],node3", "gpu08"), ("a[7,9]-ib", "a7-ib"),
        ("r[1-2]n[03-04],x", "r1n03"), ("a-b[1-2],c", "a-b1"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert find_first_host(hosts) == first
