"""Initial values: leaves drawn chunk by chunk from a seed, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.randomness import fold
from fzero.state.initializers import Initializer
from fzero.state.partition import partition
from fzero.state.sources import asked, described

CHUNK = 2**20
"""Elements that are drawn together, from a generator of their own. Part of what a seed means: never to be changed."""

Rule = Callable[[str, Any], Initializer]


def init(shapes: tree.Tree, mesh: Any, rule: Rule, *, seed: int = 0, **how: Any) -> tree.Tree:
    """A tree of `Sharded` leaves of the shapes and dtypes of `shapes`, with the values that `rule` gives.

    `shapes` is a tree of tensors, on the meta device say, as `fzero.lower` gives them for a module there;
    `rule(path, leaf)` is one of `fzero.initializers`. Values follow from `seed`, path and position alone: they are the
    same for any mesh and partition, and a rank draws only the chunks that its slices touch. `how` are further keywords
    of `fzero.partition`.

        params, apply = fzero.lower(torch.nn.Linear(8, 8, device="meta"))
        params = fzero.init(params, mesh, lambda path, leaf: kaiming_uniform() if leaf.ndim > 1 else zeros())

    Raises:
        FzeroError: for a rule that gives no initializer, or one that does not fit a leaf; as `fzero.partition` does.
    """
    return partition(
        tree.map_with_path(lambda path, leaf: Initial(path, leaf, rule(path, leaf), seed), shapes), mesh, **how
    )


class Initial:
    """The values of one leaf, a `Source`: chunk k of the flattened leaf comes from a generator with the seed
    `fold(seed, path, k)`, in fp32 or, for a leaf of that, fp64."""

    def __init__(self, path: str, leaf: Any, initializer: Any, seed: int) -> None:
        if not callable(initializer):
            problem = f"the rule gives a {type(initializer).__name__} for it"
            raise FzeroError(path, problem, "give one of fzero.initializers, such as normal(0.02)")
        self.path, self.shape, self.dtype = path, torch.Size(leaf.shape), leaf.dtype
        self.initializer: Initializer = initializer
        self.seed = seed

    def read(self, start: int, out: Tensor) -> None:
        flat = asked(self, start, out)
        for number in range(flat.start // CHUNK, -(-flat.stop // CHUNK)):
            values, first = self._chunk(number), number * CHUNK
            begin, end = max(flat.start, first), min(flat.stop, first + CHUNK)
            out[begin - start : end - start].copy_(values[begin - first : end - first])

    def _chunk(self, number: int) -> Tensor:
        """[at most CHUNK] chunk `number`, the last one shorter."""
        numel = min(CHUNK, self.shape.numel() - number * CHUNK)
        values = torch.empty(numel, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        generator = torch.Generator().manual_seed(fold(self.seed, self.path, number))
        try:
            self.initializer(values, self.shape, generator)
        except FzeroError as error:
            raise FzeroError(self.path, error.problem, error.way_out) from None
        return values

    def __repr__(self) -> str:
        return f"Initial({self.path}: {described(self)})"
