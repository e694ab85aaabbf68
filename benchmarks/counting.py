"""Counts what a step really exchanges, beside what its program says of its collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

from runs import Plan
from torch.distributed.device_mesh import DeviceMesh
from training import Batch, Contender

from fzero.ranks.exchanges import Exchange
from fzero.ranks.live import live
from fzero.ranks.transports import Pending


def count(contender: Contender, plan: Plan, batch: Batch, mesh: DeviceMesh) -> dict[str, Any]:
    """For each collective, `[calls, bytes moved]` of one step: predicted, and counted over `plan.steps`."""
    assert contender.program is not None  # nobody else says before
    predicted: dict[str, list[int]] = {}
    for entry in contender.program(batch).comm():
        before = predicted.get(entry.op, (0, 0))
        predicted[entry.op] = [before[0] + 1, before[1] + entry.nbytes]
    on, calls, nbytes = live(mesh), Counter[str](), Counter[str]()
    begin = on.begin

    def begin_and_count(exchange: Exchange) -> Pending:
        value, numel = exchange.measure(on.mesh.size(exchange.axis))
        calls[exchange.name] += 1
        nbytes[exchange.name] += numel * value.element_size()
        return begin(exchange)

    with mock.patch.object(on, "begin", begin_and_count):
        for _ in range(plan.steps):
            contender.step(batch)
    return {"predicted": predicted, "counted": {op: [calls[op] / plan.steps, nbytes[op] / plan.steps] for op in calls}}
