"""The memory that a function needs beside its operands and its result, found without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base import tree
from fzero.base.torch_private import DispatchMode, storage_key


def measure_scratch(function: Callable[..., Any], *args: Any) -> int:
    """The most bytes of tensors that a function holds at a time, beside its operands and its result.

    The function is called with `args`, in which tensors on the meta device take the place of nodes and of tensors, in
    lists too. So it may not look at elements. The workspace of torch's kernels does not count.
    """
    given = list[Tensor]()

    def find_operand(x: Any) -> Any:
        x = x.meta["val"] if isinstance(x, fx.Node) else x
        if isinstance(x, Tensor):
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            given.append(x)
        return x

    operands = tree.map(find_operand, [list(x) if isinstance(x, list) else x for x in args])
    with _Watch(given) as watch:
        result = function(*operands)
    made = {storage_key(x): x.untyped_storage().nbytes() for x in tree.leaves(result) if isinstance(x, Tensor)}
    return watch.most - sum(nbytes for key, nbytes in made.items() if key in watch.alive)


class _Watch(DispatchMode):
    """Counts the bytes of storages that calls of torch make, while they are alive."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {storage_key(x) for x in given}
        self.alive: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for x in tree.leaves(result):
            if isinstance(x, Tensor) and storage_key(x) not in {*self.given, *self.alive}:
                storage, key = x.untyped_storage(), storage_key(x)
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)
