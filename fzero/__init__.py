"""fzero: ZeRO as a program transformation.

A pure training step on one device becomes one that runs on every rank of a mesh, with parameters, gradients and
optimizer state in slices:

    step = fzero.shard(train_step, mesh)
"""

from fzero import optim, tree
from fzero.collectives import axis_index, pmax, pmean, psum
from fzero.differentiation import grad, value_and_grad
from fzero.errors import FzeroError
from fzero.interop import ShardedBackend as _ShardedBackend  # noqa: F401  found by einops
from fzero.lowering import lower, lower_stateful
from fzero.mesh import VirtualMesh
from fzero.placement import partition, unpartition
from fzero.program import Program
from fzero.sharded import Sharded
from fzero.transform import shard

__all__ = [
    "FzeroError",
    "Program",
    "Sharded",
    "VirtualMesh",
    "axis_index",
    "grad",
    "lower",
    "lower_stateful",
    "optim",
    "partition",
    "pmax",
    "pmean",
    "psum",
    "shard",
    "tree",
    "unpartition",
    "value_and_grad",
]
