"""DeepSpeed: its `initialize` and its configuration, over steps of fzero.

In: a module, and a ds_config.json. Out: an engine with DeepSpeed's loop, whose programs `shard` makes of two pure
functions. `keys` is the table of all keys; docs/deepspeed.md shows it. Imported by name: `import fzero.deepspeed`.
"""

from fzero.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from fzero.deepspeed.absent import make_getattr
from fzero.deepspeed.accelerator import get_accelerator
from fzero.deepspeed.engine import Engine
from fzero.deepspeed.initialize import Initialized, initialize
from fzero.deepspeed.utils import log_dist, logger
from fzero.training.meshes import add_config_arguments, init_distributed

DeepSpeedEngine = Engine

__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "Initialized",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = make_getattr(__name__, __all__)
