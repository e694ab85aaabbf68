"""DeepSpeed: its `initialize` and its configuration, over steps of fzero.

In: a module, and a ds_config.json. Out: an engine with DeepSpeed's loop, whose programs `shard` makes of two pure
functions. `keys` is the table of all keys; docs/deepspeed.md shows it. Imported by name: `import fzero.deepspeed`.
"""

from fzero.deepspeed import zero
from fzero.deepspeed.engine import Engine
from fzero.deepspeed.initialize import Initialized, initialize
from fzero.training.meshes import add_config_arguments, init_distributed

__all__ = ["Engine", "Initialized", "add_config_arguments", "init_distributed", "initialize", "zero"]
