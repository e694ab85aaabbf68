"""Checkpoints: a tree to files, one a rank, and back on any number of ranks, bit for bit.

In: trees of `Sharded` leaves, tensors, numbers and strings. Out: folders of safetensors files with a JSON manifest.
docs/checkpoints.md says what a checkpoint is, and when it is one. docs/checkpoints_of_others.md says which files of
others are read and written: by `fzero.formats`, whose public names are here. Imported by name: `import
fzero.checkpoint`.
"""

from fzero.checkpoint.dcp_saving import save_dcp
from fzero.checkpoint.loading import load
from fzero.checkpoint.opening import Checkpoint, latest, open_checkpoint, verify
from fzero.checkpoint.running import run
from fzero.checkpoint.saving import save
from fzero.checkpoint.stopping import Stop
from fzero.checkpoint.writing import Saving
from fzero.formats.dcp import open_dcp, read_dcp_values
from fzero.formats.deepspeed import open_deepspeed
from fzero.formats.foreign import load_adam, load_params
from fzero.formats.hugging_face import export_hf, load_hf
from fzero.formats.state_dicts import open_state_dict

__all__ = [
    "Checkpoint",
    "Saving",
    "Stop",
    "export_hf",
    "latest",
    "load",
    "load_adam",
    "load_hf",
    "load_params",
    "open_checkpoint",
    "open_dcp",
    "open_deepspeed",
    "open_state_dict",
    "read_dcp_values",
    "run",
    "save",
    "save_dcp",
    "verify",
]
