"""Disk: steps with state in files are the steps with state in memory, and copy and hold as many bytes as planned."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from passes.test_offload import assert_equal, begin, train
from programs import rows, tensors, training
from torch import Tensor

import fzero
from fzero import VirtualMesh, optim, tree
from fzero.base.placement import Placement
from fzero.files import OnDisk
from fzero.program.operation import Node, nbytes
from fzero.program.records import record

ADAMW = optim.adamw(0.1, weight_decay=0.1)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), ADAMW)
HOST = fzero.host()


class Watch:
    """The bytes that rank 0 copies by each operation, and the most bytes that its values on disk have."""

    def __init__(self) -> None:
        self.copied = Counter[str]()
        self.most = 0

    def __call__(self, node: Node, ranks: list[dict[Node, Any]]) -> None:
        held = ranks[0]
        if node.op == "call_function" and record(node).to is not None:
            self.copied[record(node).name.rstrip("_")] += sum(nbytes(held[x]) for x in node.args[0])
        on_disk = {(id(x.extent), x.start): x.nbytes for value in held.values() for x in tensors(value) if _is_file(x)}
        self.most = max(self.most, sum(on_disk.values()))


def _is_file(x: Tensor) -> bool:
    return isinstance(x, OnDisk)


def fill_places(names: str, disk: Placement) -> tuple[Placement | None, Placement | None]:
    """Where parameters and state lie, of "disk host" and so on."""
    params, state = ({"device": None, "host": HOST, "disk": disk}[name] for name in names.split())
    return params, state


CASES = [
    (3, 2, ADAMW, "device disk"),
    (3, 2, ADAMW, "disk device"),
    (3, 2, ADAMW, "disk disk"),
    (2, 3, CLIPPED, "disk disk"),
    (1, 2, CLIPPED, "host disk"),
    (3, 1, ADAMW, "disk host"),
]
"""Stage, ranks, optimizer, and where parameters and state lie."""


@pytest.mark.parametrize(("stage", "world", "optimizer", "names"), CASES)
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_with_state_on_a_disk_is_the_resident_one(
    stage: int, world: int, optimizer: optim.GradientTransformation, names: str, donate: bool, tmp_path: Path
) -> None:
    """Bit for bit, with the bytes that are planned."""
    mesh, places = VirtualMesh(fsdp=world), fill_places(names, fzero.disk(tmp_path))
    step, batch = fzero.simulate(training(optimizer), mesh, stage=stage, donate=donate), rows(mesh)
    expected, losses = train(step, begin(optimizer, mesh), batch)
    program = step.trace(*begin(optimizer, mesh, places), batch)
    watch = Watch()
    (params, state), got = train(functools.partial(step, watch=watch), begin(optimizer, mesh, places), batch)
    assert_equal(fzero.unpartition((params, state)), fzero.unpartition(expected))
    assert_equal(got, losses)
    assert {leaf.place for leaf in tree.leaves(params) if not leaf.is_replicated} == {places[0]}
    assert {leaf.place for leaf in tree.leaves(state) if not leaf.is_replicated} == {places[1]}
    assert watch.copied == {name: 3 * each for name, each in program.copies().items()}
    assert watch.most == program.memory().disk
