"""Disk: steps with state in files are the steps with state in memory, and copy and hold as many bytes as planned."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.test_everywhere import OTHERS, PRESETS, STAGES
from passes.test_offload import (
    ADAMW,
    CLIPPED,
    HOST,
    LOOPS,
    assert_equal,
    begin,
    scan_steps,
    train,
    where,
)  # fmt: skip
from peaks import Peaks
from programs import loss, rows, training
from torch import Tensor

import fzero
from fzero import VirtualMesh, optim, tree
from fzero.base.placement import Placement
from fzero.files import OnDisk
from fzero.program import ops
from fzero.program.kinds import Slice
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import find_bodies, record


class Watch(Peaks):
    """The bytes that rank 0 copies by each operation, and the most bytes that a rank holds in each place."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.copied = Counter[str]()

    def watch(self, node: Node, ranks: list[dict[Node, Any]]) -> None:
        super().watch(node, ranks)
        if node.op == "call_function" and record(node).to is not None:
            self.copied[record(node).name.rstrip("_")] += sum(nbytes(ranks[0][x]) for x in node.args[0])


def fill_places(names: str, disk: Placement) -> tuple[Any, Any]:
    """Where parameters and state lie, of words such as "disk host"."""
    params, state = ({"device": None, "host": HOST, "disk": disk}[name] for name in names.split())
    return params, state


def read_late(params: Any, state: Any, x: Tensor) -> Any:
    """Two steps in a loop, which may not write over its parameters: their norm is taken behind it."""
    new, state, value = scan_steps(params, state, x)
    return new, state, value + sum(leaf.square().sum() for leaf in tree.leaves(params))


def update_lists(params: Any, state: Any, x: Tensor) -> Any:
    """An optimizer that writes over new state, which may leave the host no earlier."""
    value, grads = fzero.value_and_grad(loss)(params, x)
    means = [0.9 * mean for mean in tree.leaves(state.trace)]
    torch._foreach_add_(means, tree.leaves(grads))
    news = [param - 0.1 * mean for param, mean in zip(tree.leaves(params), means)]
    torch._foreach_mul_(news, 0.9)
    treedef = tree.flatten(params)[1]
    return tree.unflatten(treedef, news), state._replace(trace=tree.unflatten(treedef, means)), value


LAMB = optim.lamb(0.1)
CASES: list[tuple[Callable[..., Any], Any, int, int, bool, str]] = [
    (training(ADAMW), ADAMW, 3, 2, True, "device disk"),
    (training(ADAMW), ADAMW, 3, 1, True, "disk host"),
    (training(CLIPPED), CLIPPED, 2, 3, False, "disk disk"),
    (training(LAMB), LAMB, 1, 2, True, "disk disk"),
    (LOOPS["accumulate"], ADAMW, 3, 2, True, "disk disk"),
    (LOOPS["layers"], ADAMW, 2, 2, False, "disk device"),
    (read_late, ADAMW, 3, 2, True, "disk disk"),
    (update_lists, optim.trace(0.9), 3, 2, True, "device disk"),
]
"""Step, optimizer, stage, ranks, whether the step may write over its arguments, and where parameters and state lie."""


@pytest.mark.parametrize(("fn", "optimizer", "stage", "world", "donate", "names"), CASES)
def test_a_step_with_state_on_a_disk_is_the_resident_one(
    fn: Callable[..., Any], optimizer: Any, stage: int, world: int, donate: bool, names: str, tmp_path: Path
) -> None:
    """Bit for bit, with the bytes that are planned."""
    mesh, places = VirtualMesh(fsdp=world), fill_places(names, fzero.disk(tmp_path))
    step, batch = fzero.simulate(fn, mesh, stage=stage, donate=donate), rows(mesh)
    expected, losses = train(step, begin(optimizer, mesh), batch)
    program = step.trace(*begin(optimizer, mesh, places), batch)
    watch, planned = Watch(program), program.memory()
    (params, state), got = train(functools.partial(step, watch=watch.watch), begin(optimizer, mesh, places), batch)
    assert_equal(fzero.unpartition((params, state)), fzero.unpartition(expected))
    assert_equal(got, losses)
    assert ({*where(params)}, {*where(state)}) == ({places[0]}, {places[1]})
    assert watch.copied == {name: 3 * each for name, each in program.copies().items()}
    assert watch.most["disk"] == planned.disk and watch.most["host"] <= planned.host
    if world < 3:  # a simulation does not hold the blocks that a rank receives from N - 2 others
        rows_only = batch.nbytes // world if fn in LOOPS.values() or fn is read_late else 0  # are views in a loop
        assert abs(watch.most["device"] - planned.peak) <= rows_only


def test_a_program_says_what_it_reads_and_writes(tmp_path: Path) -> None:
    """Three layers of 30 elements: Adam reads and writes three of each. Parameters are read for gathers too, those of
    the middle layer twice."""
    mesh, disk = VirtualMesh(fsdp=2), fzero.disk(tmp_path)
    step, args = fzero.simulate(training(ADAMW), mesh), (*begin(ADAMW, mesh, (disk, disk)), rows(mesh))
    program = step.trace(*args)
    copied = [Counter(program.copies(rank)) for rank in (0, 1)]
    assert (copied[0] + copied[1])["write"] == 3 * 3 * 30 * 4 and (copied[0] + copied[1])["read"] == (9 + 4) * 30 * 4
    report = step.report(*args)
    assert report.copies == program.copies() and "on disk" in report.summary
    written = program.graph.find_nodes(op="call_function", target=ops.write_)
    assert len(written) == 3 and not program.graph.find_nodes(op="call_function", target=ops.write)
    assert f"reads {report.copies['read']} B, writes {report.copies['write']} B" in str(program).splitlines()[0]


@pytest.mark.parametrize(("names", "place"), [("disk disk", HOST), ("host device", HOST), ("device disk", None)])
def test_sums_of_gradients_lie_with_the_parameters_or_on_the_host(names: str, place: Any, tmp_path: Path) -> None:
    mesh, places = VirtualMesh(fsdp=2), fill_places(names, fzero.disk(tmp_path))
    program = fzero.simulate(LOOPS["accumulate"], mesh).trace(*begin(ADAMW, mesh, places), rows(mesh))
    (body,) = find_bodies(program.graph)
    assert {result.place for result in body.results if isinstance(result.kind, Slice)} == {place}


@pytest.mark.parametrize("name", ["adamw8bit", *PRESETS, *OTHERS, *STAGES])
def test_state_of_parameters_on_a_disk_lies_there(name: str, tmp_path: Path) -> None:
    """Of every optimizer and stage, all of it that ranks hold in slices."""
    optimizer = {"adamw8bit": optim.adamw8bit(1e-2), **PRESETS, **OTHERS, **STAGES}[name]
    disk = fzero.disk(tmp_path)
    params = fzero.partition({"a": torch.ones(64, 128)}, VirtualMesh(fsdp=2), unit=256, to=disk)
    leaves = [x for x in tree.leaves(optimizer.init(params)) if isinstance(x, fzero.Sharded)]
    assert all((x.place == disk) is isinstance(x.local, OnDisk) is not x.is_replicated for x in leaves)


def test_one_slice_in_two_arguments_is_written_for_each_on_its_own(tmp_path: Path) -> None:
    mesh, whole = VirtualMesh(fsdp=2), {"a": torch.arange(6.0)}
    params = fzero.partition(whole, mesh, to=fzero.disk(tmp_path))
    others = tree.map(lambda x: x.with_local(x.local), params)
    step = fzero.simulate(lambda a, b: (tree.map(lambda x: x + 1, a), tree.map(lambda x: 2 * x, b)), mesh)
    new, doubled = fzero.unpartition(step(params, others))
    assert torch.equal(new["a"], whole["a"] + 1) and torch.equal(doubled["a"], 2 * whole["a"])


def test_a_step_on_a_disk_runs_in_inference_mode(tmp_path: Path) -> None:
    mesh = VirtualMesh(fsdp=2)
    params = fzero.partition({"b": torch.ones(5)}, mesh, to=fzero.disk(tmp_path))
    step = fzero.simulate(lambda p, x: ({"b": p["b"] * 0.5 + 1}, (p["b"] * x).sum()), mesh)
    for expected in (1.5, 1.75):
        with torch.inference_mode():
            params, _ = step(params, torch.ones(2, 5))
        assert torch.equal(fzero.unpartition(params)["b"], torch.full((5,), expected))


def test_a_loss_that_is_computed_on_the_host_is_differentiated_there(tmp_path: Path) -> None:
    """The derivative begins with a one that takes the shape of the loss, a number on the host."""
    mesh, x = VirtualMesh(fsdp=2), torch.linspace(-1, 1, 6).view(6, 1)
    plain = {"w": torch.full((1, 1), 0.5), "b": torch.full((1,), 0.25)}

    def train(params: tree.Tree, x: Tensor) -> tree.Tree:
        def loss_of(p: tree.Tree) -> Tensor:
            return ((p["b"].new_zeros(len(x), 1) + x @ p["w"]) * p["b"]).square().mean()

        return tree.map(lambda p, g: p - 0.1 * g, params, fzero.grad(loss_of)(params))

    for place in (fzero.host(), fzero.disk(tmp_path)):
        got = fzero.simulate(train, mesh)(fzero.partition(plain, mesh, to=place), x)
        torch.testing.assert_close(fzero.unpartition(got), train(plain, x))
