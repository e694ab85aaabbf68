"""fzero: ZeRO as a program transformation.

A pure training step on one device becomes one that runs on every rank of a mesh, with parameters, gradients and
optimizer state in slices:

    step = fzero.shard(train_step, mesh)
"""

from fzero import initializers, optim, tree
from fzero.assembly import iter_full, unpartition, update_leaf
from fzero.building import build, build_stateful
from fzero.collectives import axis_index, pmax, pmean, psum
from fzero.differentiation import grad, value_and_grad
from fzero.equivalence import check_equivalence
from fzero.errors import FzeroError
from fzero.initial import init
from fzero.interop import ShardedBackend as _ShardedBackend  # noqa: F401  found by einops
from fzero.lowering import lower, lower_stateful
from fzero.mesh import VirtualMesh
from fzero.placement import partition
from fzero.program import Program
from fzero.regions import remat
from fzero.sharded import Sharded
from fzero.simulation import simulate
from fzero.tensorfiles import load_safetensors, open_safetensors, save_safetensors
from fzero.transform import shard

__all__ = [
    "FzeroError",
    "Program",
    "Sharded",
    "VirtualMesh",
    "axis_index",
    "build",
    "build_stateful",
    "check_equivalence",
    "grad",
    "init",
    "initializers",
    "iter_full",
    "load_safetensors",
    "lower",
    "lower_stateful",
    "open_safetensors",
    "optim",
    "partition",
    "pmax",
    "pmean",
    "psum",
    "remat",
    "save_safetensors",
    "shard",
    "simulate",
    "tree",
    "unpartition",
    "update_leaf",
    "value_and_grad",
]
