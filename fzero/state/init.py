"""Init: leaves drawn chunk by chunk from a seed, with the same values on any number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.randomness import fold
from fzero.files.memory import new_buffer
from fzero.state.initializers import Initializer
from fzero.state.partition import partition
from fzero.state.sources import check_range

DRAWN_TOGETHER = 2**20
"""Elements that one generator draws. Never change this number: another number gives other values for the same seed."""

PROBE = 8
"""Elements that ranks compare."""

Rule = Callable[[str, Any], Initializer]


@check_arguments
def init(shapes: tree.Tree, mesh: Any, rule: Rule, *, seed: int = 0, **how: Any) -> tree.Tree:
    """A tree of `Sharded` leaves with the shapes and dtypes of `shapes` and the values that `rule` draws.

    `shapes` is a tree of tensors, such as `fzero.lower` returns for a module on the meta device. `rule(path, leaf)`
    returns one of `fzero.initializers`. `how` are further keywords of `fzero.partition`.

    Values depend on `seed`, the leaf's path and the element's position alone: they are the same for any mesh and
    partition. A rank draws only the chunks that its slices touch.

        params, apply = fzero.lower(torch.nn.Linear(8, 8, device="meta"))
        params = fzero.init(params, mesh, lambda path, leaf: kaiming_uniform() if leaf.ndim > 1 else zeros())

    Raises:
        FzeroError: for a rule that does not take `(path, leaf)` or returns no initializer; for an initializer that
            does not fit a leaf; as `fzero.partition` does.
    """
    try:
        inspect.signature(rule).bind("path", None)
    except TypeError:
        way_out = "give a function of a leaf's path and the leaf: lambda path, leaf: fzero.initializers.normal(0.02)"
        raise FzeroError("init: rule", f"{rule!r:.80} does not take (path, leaf)", way_out) from None
    except ValueError:
        pass  # a function of C tells nothing
    return partition(
        tree.map_with_path(lambda path, leaf: Initial(path, leaf, rule(path, leaf), seed), shapes), mesh, **how
    )


class Initial:
    """The initial values of one leaf, a `Source`.

    A generator with the seed `fold(seed, path, k)` draws chunk k of the flattened leaf: in fp64 for an fp64 leaf, else
    in fp32. `unit` is the size of a chunk.
    """

    unit = DRAWN_TOGETHER

    def __init__(self, path: str, leaf: Any, initializer: Any, seed: int) -> None:
        if not callable(initializer):
            problem = f"the rule gives a {type(initializer).__name__} for it"
            raise FzeroError(path, problem, "give one of fzero.initializers, such as normal(0.02)")
        self.path, self.shape, self.dtype = path, torch.Size(leaf.shape), leaf.dtype
        self.is_frozen, self.is_embedding = is_frozen(leaf), is_embedding(leaf)
        self.initializer: Initializer = initializer
        self.seed = seed

    def read(self, start: int, out: Tensor) -> None:
        flat = check_range(self, start, out)
        for number in range(flat.start // DRAWN_TOGETHER, -(-flat.stop // DRAWN_TOGETHER)):
            values, first = self._draw(number), number * DRAWN_TOGETHER
            begin, end = max(flat.start, first), min(flat.stop, first + DRAWN_TOGETHER)
            out[begin - start : end - start].copy_(values[begin - first : end - first])

    def fingerprint(self) -> bytes:
        """Some values, drawn for this purpose alone: drawing a chunk takes too long."""
        values = self._draw_elements(min(PROBE, self.shape.numel()), number=-1)
        return repr((self.seed, values.tolist())).encode()

    def _draw(self, number: int) -> Tensor:
        """[at most DRAWN_TOGETHER] chunk `number`; the last chunk is shorter."""
        return self._draw_elements(min(DRAWN_TOGETHER, self.shape.numel() - number * DRAWN_TOGETHER), number)

    def _draw_elements(self, numel: int, number: int) -> Tensor:
        values = new_buffer(numel, torch.float64 if self.dtype == torch.float64 else torch.float32)
        generator = torch.Generator().manual_seed(fold(self.seed, self.path, number))
        try:
            self.initializer(values, self.shape, generator)
        except FzeroError as error:
            raise FzeroError(self.path, error.problem, error.way_out) from None
        return values

    def __repr__(self) -> str:
        return f"Initial({self.path}: {describe_form(self)})"
