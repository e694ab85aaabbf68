"""Runtime: performs the operations of one program on one rank of a live mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.randomness import draw, fold
from fzero.layout import buffers
from fzero.layout.layout import Layout, wire
from fzero.optim.kernels import fused_adamw_
from fzero.ranks.live import Live
from fzero.ranks.transports import Pending

Lists = Sequence[Tensor]


class Runtime:
    """Performs the operations of one program, in which a bucket is a key of `layouts`: methods are named as `ops`, and
    there is one for each that is no view of a buffer in one piece."""

    def __init__(self, on: Live, layouts: dict[str | None, Layout]) -> None:
        self.on, self.layouts = on, layouts
        self.beside, self.spread, self.all_reduce = on.beside, on.spread, on.all_reduce
        self.axis_index, self.all_reduce_list = on.axis_index, on.all_reduce_list
        self.settle = on.settle

    def gather(self, x: Tensor, bucket: str, leaf: int, shape: Sequence[int]) -> Tensor:
        return self.on.gather(x, self.layouts[bucket], leaf)

    def scatter(self, x: Tensor, bucket: str, leaf: int, numel: int) -> Tensor:
        return self.on.scatter(x, self.layouts[bucket], leaf)

    def take(self, x: Tensor, bucket: str, leaf: int, numel: int) -> Tensor:
        return self.on.take(x, self.layouts[bucket], leaf)

    def draw(self, seed: int, number: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return draw(fold(seed, self.on.number, number), target, *args, **kwargs)

    def all_gather(
        self, slices: Lists, bucket: str, leaves: Sequence[int], numel: int, *, dtype: torch.dtype | None = None
    ) -> Pending:
        return self.on.all_gather(slices, self.layouts[bucket], tuple(leaves), dtype)

    def reduce_scatter(self, fulls: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int) -> Pending:
        return self.on.reduce_scatter(fulls, self.layouts[bucket], tuple(leaves))

    def wait(self, pending: Pending) -> Tensor:
        return pending.wait()

    def whole(self, buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]) -> Tensor:
        return buffers.join_leaf(buffer, wire(self.layouts[bucket], tuple(leaves)), position, shape)

    def adamw(
        self, params: Lists, grads: Lists, mu: Lists, nu: Lists, count: Tensor, rate: Any, *hyperparameters: float
    ) -> tuple[list[Tensor], ...]:
        new = [[x.clone() for x in column] for column in (params, mu, nu)]
        fused_adamw_(new[0], grads, new[1], new[2], count, rate, *hyperparameters)
        return tuple(new)

    def adamw_(
        self, params: Lists, grads: Lists, mu: Lists, nu: Lists, count: Tensor, rate: Any, *hyperparameters: float
    ) -> None:
        fused_adamw_(params, grads, mu, nu, count, rate, *hyperparameters)
