"""Newton-Schulz: the orthogonal factor of a matrix, up to a factor near 1 for each singular value.

Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/. The arithmetic is that of `torch.optim.Muon`, in
bfloat16: each step applies an odd polynomial of degree 5 to all singular values, and five steps bring them near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE = torch.bfloat16
"""The dtype of the iteration. Matrices move between ranks in this dtype, to which the iteration would cast them."""


class NewtonSchulz(NamedTuple):
    """How to orthogonalize: `steps` of `x <- a x + (b g + c g g) x` with `g = x x^T`, from `x / max(|x|, eps)`."""

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7

    def apply(self, matrix: Tensor) -> Tensor:
        """The orthogonalized matrix [rows, columns], in bfloat16."""
        a, b, c = self.coefficients
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.to(DTYPE)
        x = x.T if is_tall else x  # the smaller Gram matrix
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x


def count_flops(rows: int, columns: int) -> int:
    """The flops of one step on a matrix: two products with the Gram matrix's shorter side squared, and its square."""
    short, long = min(rows, columns), max(rows, columns)
    return 4 * short * short * long + 2 * short**3


def count_scratch(rows: int, columns: int, steps: int) -> int:
    """The bytes that `NewtonSchulz.apply` allocates at most, its result among them: in a step two squares of the
    shorter side, and the matrix before and behind the step."""
    short, long = min(rows, columns), max(rows, columns)
    return DTYPE.itemsize * (2 * short * short + 2 * short * long if steps else short * long)


class Block(NamedTuple):
    """One matrix of a leaf: the next `rows` rows of the leaf. What is made of it is multiplied by `scale`."""

    rows: int
    scale: float


Blocks = Sequence[Sequence[Block]]
"""For each leaf the matrices that its rows are cut into."""


def orthogonalize(updates: Sequence[Tensor], blocks: Blocks, how: NewtonSchulz) -> list[Tensor]:
    """Each update with its matrices orthogonalized and scaled, in its own shape and dtype.

    An update [..., C] is read as rows of C columns. `blocks[i]` cuts the rows of update i into matrices. A list of
    `Sharded` updates is orthogonalized on owners: each matrix on one rank.
    """
    if torch.overrides.has_torch_function(updates):
        return torch.overrides.handle_torch_function(orthogonalize, updates, updates, blocks, how)
    return [_orthogonalize(*row, how) for row in zip(updates, blocks, strict=True)]


def _orthogonalize(update: Tensor, blocks: Sequence[Block], how: NewtonSchulz) -> Tensor:
    if not blocks:  # no elements
        return torch.zeros_like(update)
    matrices = update.reshape(-1, update.shape[-1]).split([block.rows for block in blocks])
    made = [how.apply(matrix).to(update.dtype) * block.scale for matrix, block in zip(matrices, blocks)]
    return torch.cat(made).view(update.shape)
