"""Launchers: the mesh of a run, from what torchrun, SLURM, MPI, Kubernetes or Ray Train tell each of its processes.

In: variables of the environment. Out: torch's process group and a `DeviceMesh`; a process without a launcher is a mesh
of one rank. docs/launchers.md has a script for each launcher. Imported by name: `import fzero.launch`.
"""

from fzero.launch.environment import Launch, find_launch
from fzero.launch.mesh import init_mesh

__all__ = ["Launch", "find_launch", "init_mesh"]
