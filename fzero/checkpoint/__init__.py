"""Checkpoints: a tree to files, one a rank, and back on any number of ranks, bit for bit.

In: trees of `Sharded` leaves, tensors, numbers and strings. Out: folders of safetensors files with a JSON manifest.
docs/checkpoints.md says what a checkpoint is, and when it is one. Imported by name: `import fzero.checkpoint`.
"""

from fzero.checkpoint.loading import load
from fzero.checkpoint.opening import Checkpoint, latest, open_checkpoint, verify
from fzero.checkpoint.running import run
from fzero.checkpoint.saving import save
from fzero.checkpoint.stopping import Stop
from fzero.checkpoint.writing import Saving

__all__ = ["Checkpoint", "Saving", "Stop", "latest", "load", "open_checkpoint", "run", "save", "verify"]
