"""Offload: steps with state on the host are the steps with state on the device, and need the memory that is planned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from processes import run
from programs import layers, rows, tensors, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, VirtualMesh, optim, passes, tree
from fzero.base.placement import Host
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.places import find_places
from fzero.program.program import Program

HOST = fzero.host()
ADAMW = optim.adamw(0.1, weight_decay=0.1)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), ADAMW)
PLACES = [(None, HOST), (HOST, None), (HOST, HOST)]
"""Where parameters and the optimizer's state lie."""


def begin(
    optimizer: optim.GradientTransformation, mesh: Any, places: tuple[Host | None, Host | None] = (None, None)
) -> tuple[Any, Any]:
    """The first parameters and state, in these places."""
    params = fzero.partition(layers(), mesh, to=places[0])
    if places[0] is not None:  # else the state would lie where the parameters do
        resident = fzero.partition(layers(), mesh)
        return params, optimizer.init(resident if places[1] is None else params, to=places[1])
    return params, optimizer.init(params, to=places[1])


def train(step: Any, state: tuple[Any, Any], batch: Tensor, steps: int = 3) -> tuple[Any, list[Tensor]]:
    """`(params and state, losses)` after some steps."""
    losses = []
    for _ in range(steps):
        *state, value = step(*state, batch)
        losses.append(value)
    return tuple(state), losses


def assert_equal(got: Any, expected: Any) -> None:
    """Bit for bit."""
    for path, a, b in zip(tree.paths(expected), tree.leaves(got), tree.leaves(expected), strict=True):
        assert torch.equal(a, b), path


def where(values: Any) -> list[Host | None]:
    """The place of each leaf of which ranks keep slices."""
    return [leaf.place for leaf in tree.leaves(values) if not leaf.is_replicated]


class Peaks:
    """The most bytes that a rank's values keep alive on the device and on the host, each storage once."""

    def __init__(self, program: Program) -> None:
        self.places = {node.name: place for node, place in find_places(program).items()}
        given = zip(program.placeholders, program.arguments)
        self._batches = {node.name for node, argument in given if argument.bucket is None}
        self.most = {"device": 0, "host": 0}

    def watch(self, node: Node, ranks: list[dict[Node, Any]]) -> None:
        for held in ranks:
            now: dict[str, dict[int, int]] = {"device": {}, "host": {}}
            for each, value in held.items():
                for x in tensors(value):
                    rows_only = each.name in self._batches
                    size = x.nbytes if rows_only else x.untyped_storage().nbytes()
                    now[self.places.get(each.name, "device")][x.untyped_storage()._cdata] = size
            for place, storages in now.items():
                self.most[place] = max(self.most[place], sum(storages.values()))


STATE, PARAMS, BOTH = PLACES
CASES = [
    *((3, 2, optimizer, places) for optimizer in (ADAMW, CLIPPED) for places in PLACES),
    (1, 2, CLIPPED, STATE),
    (2, 3, ADAMW, BOTH),
    (1, 2, ADAMW, PARAMS),
    (3, 1, CLIPPED, BOTH),
]
"""Stage, ranks, optimizer, and where parameters and state lie."""


@pytest.mark.parametrize(("stage", "world", "optimizer", "places"), CASES)
def test_a_step_with_state_on_the_host_is_the_resident_one(
    stage: int, world: int, optimizer: optim.GradientTransformation, places: Any
) -> None:
    """Bit for bit, with the bytes on device and host that are predicted."""
    mesh = VirtualMesh(fsdp=world)
    step, batch = fzero.simulate(training(optimizer), mesh, stage=stage), rows(mesh)
    resident = step.trace(*begin(optimizer, mesh), batch).memory()
    expected, losses = train(step, begin(optimizer, mesh), batch)
    program = step.trace(*begin(optimizer, mesh, places), batch)
    peaks, planned = Peaks(program), program.memory()
    (params, state), got = train(functools.partial(step, watch=peaks.watch), begin(optimizer, mesh, places), batch)
    assert_equal(fzero.unpartition((params, state)), fzero.unpartition(expected))
    assert_equal(got, losses)
    assert {*where(params)} == {places[0]} and {*where(state)} == {places[1]}
    if world < 3:  # a simulation does not hold the blocks that a rank receives from N - 2 others
        assert peaks.most == {"device": planned.peak, "host": planned.host}
    assert planned.peak < resident.peak and resident.host == 0


def test_state_is_updated_where_it_lies() -> None:
    mesh = VirtualMesh(fsdp=2)
    step = fzero.simulate(training(ADAMW), mesh)
    program = step.trace(*begin(ADAMW, mesh, (None, HOST)), rows(mesh))
    updates = [node for node in program.graph.nodes if ops.is_call(node, ops.adamw_)]
    assert len(updates) == 3, "one for each bucket"
    assert not program.graph.find_nodes(op="call_function", target=ops.to_device), "new parameters overwrite old ones"
    sliced = [argument for argument in program.arguments if argument.bucket is not None]
    assert all(argument.donated for argument in sliced if not program.layouts[argument.bucket].replicated)


def test_gradients_leave_as_soon_as_they_are_there() -> None:
    mesh = VirtualMesh(fsdp=2)
    step = fzero.simulate(training(CLIPPED), mesh)
    program = step.trace(*begin(CLIPPED, mesh, (None, HOST)), rows(mesh))
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    scatters = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    sent = [
        node for node in program.graph.find_nodes(op="call_function", target=ops.to_host)
        if ops.is_call(node.args[0][0], ops.part)
    ]  # fmt: skip
    assert len(sent) == len(scatters) == 3 and position[sent[0]] < position[scatters[-1]]


def on_ranks(mesh: DeviceMesh) -> list[Any]:
    """Training with state on the device and on the host, clipped and not: results of this rank."""
    results = []
    for optimizer, places in ((ADAMW, (None, HOST)), (CLIPPED, (None, HOST)), (ADAMW, (HOST, HOST))):
        step = fzero.shard(training(optimizer), mesh)
        batch = rows(VirtualMesh(fsdp=mesh.size())).chunk(mesh.size())[mesh.get_rank()]
        runs = [train(step, begin(optimizer, mesh, each), batch) for each in ((None, None), places)]
        results.append([(tree.map(lambda x: x.local, state), losses) for state, losses in runs])
    return results


def test_live_ranks_do_the_same() -> None:
    for results in run(2, on_ranks):
        for resident, offloaded in results:
            assert_equal(offloaded, resident)


def test_passes_without_offload_are_named() -> None:
    mesh = VirtualMesh(fsdp=2)
    chosen = [each for each in passes.defaults(stage=3) if each is not passes.offload]
    step = fzero.simulate(training(ADAMW), mesh, passes=chosen)
    with pytest.raises(FzeroError, match="lies on the .*put the pass offload among the passes"):
        step(*begin(ADAMW, mesh, (None, HOST)), rows(mesh))


def test_state_of_plain_parameters_has_no_placement() -> None:
    with pytest.raises(FzeroError, match="a parameter is a Tensor; partition the tree first"):
        ADAMW.init(layers(), to=HOST)
