"""fzero: ZeRO as a program transformation.

`fzero.shard` turns a pure training step for one device into a step that every rank of a mesh runs, with parameters,
gradients and optimizer state in slices:

    step = fzero.shard(train_step, mesh)

`fzero.checkpoint`, `fzero.data`, `fzero.deepspeed`, `fzero.hf`, `fzero.initializers`, `fzero.lightning` and
`fzero.parallel` are imported where they are first used.
"""

import importlib
import typing

from fzero import optim, passes
from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.placement import disk, host
from fzero.base.state import State
from fzero.equivalence import check_equivalence
from fzero.program import ops
from fzero.program.program import Program
from fzero.simulation import simulate
from fzero.state.build.build import build, build_stateful
from fzero.state.init import init
from fzero.state.partition import partition
from fzero.state.quantize import quantize
from fzero.state.safetensors import load_safetensors, open_safetensors, save_safetensors
from fzero.state.unpartition import iter_full, unpartition, update_leaf
from fzero.transform import shard
from fzero.values.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from fzero.values.cross_entropy import tiled_cross_entropy
from fzero.values.einops_backend import ShardedBackend as _ShardedBackend  # noqa: F401  found by einops
from fzero.values.gradients import grad, value_and_grad
from fzero.values.loops import scan
from fzero.values.lowering import lower, lower_stateful
from fzero.values.microbatches import accumulate
from fzero.values.precision import precision
from fzero.values.regions import remat
from fzero.values.sharded import Sharded
from fzero.values.tiles import tiled

__version__ = "0.1.0"

_ROOMS = {
    "checkpoint": "fzero.checkpoint",
    "data": "fzero.data",
    "deepspeed": "fzero.deepspeed",
    "hf": "fzero.hf",
    "initializers": "fzero.state.initializers",
    "lightning": "fzero.lightning",
    "parallel": "fzero.parallel",
    "testing": "fzero.testing",
}

__all__ = [
    "FzeroError",
    "Program",
    "Sharded",
    "State",
    "VirtualMesh",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "build",
    "build_stateful",
    "check_equivalence",
    "disk",
    "grad",
    "host",
    "init",
    "iter_full",
    "load_safetensors",
    "lower",
    "lower_stateful",
    "open_safetensors",
    "ops",
    "optim",
    "partition",
    "passes",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "precision",
    "psum",
    "psum_scatter",
    "quantize",
    "remat",
    "save_safetensors",
    "scan",
    "shard",
    "simulate",
    "tiled",
    "tiled_cross_entropy",
    "tree",
    "unpartition",
    "update_leaf",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__doc__", "__file__", "__name__", "__path__", "__version__"])


if typing.TYPE_CHECKING:
    from fzero.state import initializers as initializers
else:  # a checker of types would take any name for one of these

    def __getattr__(name: str) -> typing.Any:
        if name not in _ROOMS:
            raise AttributeError(f"module 'fzero' has no attribute {name!r}")
        try:
            return importlib.import_module(_ROOMS[name])
        except ImportError as error:
            raise AttributeError(f"fzero.{name} cannot be imported: {error}", name=name, obj=None) from error
