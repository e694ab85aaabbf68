"""Counts what a step really hands to its transports, beside what its program says of its collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from runs import Plan
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from training import Batch, Contender

from fzero.layout.layout import Wire
from fzero.ranks.live import live
from fzero.ranks.members import Attempt
from fzero.ranks.transports import Pending, Splits, Transport


class Counting:
    """A `Transport` that counts the calls of another and the bytes that they move, and is otherwise like it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_gather(self, block: Tensor, attempt: Attempt, into: Tensor | None = None) -> Pending:
        self._add("all_gather", block.nbytes * self.inner.world)
        return self.inner.all_gather(block, attempt, into)

    def reduce_scatter(self, fulls: Sequence[Tensor], wire: Wire, attempt: Attempt) -> Pending:
        self._add("reduce_scatter", wire.sent * fulls[0].element_size())
        return self.inner.reduce_scatter(fulls, wire, attempt)

    def all_to_all(self, blocks: Tensor, attempt: Attempt, splits: Splits) -> Pending:
        self._add("all_to_all", blocks.nbytes)
        return self.inner.all_to_all(blocks, attempt, splits)

    def all_reduce(self, x: Tensor, op: str, attempt: Attempt) -> Tensor:
        self._add("all_reduce", x.nbytes)
        return self.inner.all_reduce(x, op, attempt)

    def _add(self, op: str, nbytes: int) -> None:
        self.calls[op] += 1
        self.nbytes[op] += nbytes


def count(contender: Contender, plan: Plan, batch: Batch, mesh: DeviceMesh) -> dict[str, Any]:
    """For each collective, `[calls, bytes moved]` of one step: predicted, and counted over `plan.steps`."""
    assert contender.program is not None  # nobody else says before
    predicted: dict[str, list[int]] = {}
    for entry in contender.program(batch).comm():
        calls, nbytes = predicted.get(entry.op, (0, 0))
        predicted[entry.op] = [calls + 1, nbytes + entry.nbytes]
    transports = live(mesh).transports
    (axis,) = transports
    counting = Counting(transports[axis])
    transports[axis] = counting
    for _ in range(plan.steps):
        contender.step(batch)
    transports[axis] = counting.inner
    counted = {op: [counting.calls[op] / plan.steps, counting.nbytes[op] / plan.steps] for op in counting.calls}
    return {"predicted": predicted, "counted": counted}
