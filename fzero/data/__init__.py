"""Batches for steps: each rank's part of a global batch, from a position that is the same for any number of ranks.

In: a dataset of torch, a mesh. Out: trees of tensors of this rank's rows, of lengths that all ranks agree on. Made of
public names of fzero and torch, and of the ranks' one agreement. Imported by name: `import fzero.data`.
"""

from fzero.data.loader import Loader, loader
from fzero.data.padding import pad, round_up
from fzero.data.position import Position

__all__ = ["Loader", "Position", "loader", "pad", "round_up"]
