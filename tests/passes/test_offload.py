"""Offload: steps with state on the host are the steps with state on the device, and need the memory that is planned."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import Peaks
from processes import run
from programs import Case, assert_same, dense, layers, list_programs, loss, mlp, rows, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, VirtualMesh, optim, passes, tree
from fzero.base.placement import Host, Placement
from fzero.execution.outline import outline
from fzero.files import load
from fzero.program import ops
from fzero.program.rates import GUESSES

HOST = fzero.host()
ADAMW = optim.adamw(0.1, weight_decay=0.1)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), ADAMW)
RATE = torch.tensor(0.1)
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


STATE, PARAMS, BOTH = PLACES
CASES = [
    *((3, 2, optimizer, places) for optimizer in (ADAMW, CLIPPED) for places in PLACES),
    (1, 2, CLIPPED, STATE),
    (1, 2, ADAMW, PARAMS),
    (2, 3, ADAMW, BOTH),
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
        assert peaks.most == {"device": planned.peak, "host": planned.host, "disk": 0}
    assert planned.peak < resident.peak and resident.host == 0


def update_by_hand(params: Any, means: Any, x: Tensor) -> Any:
    """An optimizer without a fused kernel, leaf by leaf, that writes into a temporary."""
    value, grads = fzero.value_and_grad(loss)(params, x)

    def average(mean: Tensor, grad: Tensor) -> Tensor:
        scaled = torch.zeros_like(grad)
        scaled.add_(grad, alpha=0.1)
        return 0.9 * mean + scaled

    means = tree.map(average, means, grads)
    return tree.map(lambda p, m: p - 0.1 * m.sign() - 0.01 * m / m.abs().max(), params, means), means, value


def update_lists(params: Any, means: Any, x: Tensor) -> Any:
    """An optimizer of list operations. Its lists are written into behind the last read of the old parameters and means,
    by the step itself and, where `donate` reuses a list, by the program."""
    value, grads = fzero.value_and_grad(loss)(params, x)
    leaves, treedef = tree.flatten(params)
    momenta = [mean.clone() for mean in tree.leaves(means)]
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, tree.leaves(grads), alpha=0.1)
    news = torch._foreach_mul(leaves, 0.9)
    news = torch._foreach_add(news, leaves, alpha=0.1)
    news = torch._foreach_sub(news, momenta)
    return tree.unflatten(treedef, list(news)), tree.unflatten(treedef, momenta), value


def accumulate(params: Any, state: Any, x: Tensor) -> Any:
    """Two microbatches."""
    value, grads = fzero.accumulate(lambda p, x: (mlp(p, x).square().sum(), x.shape[0]), 2)(params, x)
    updates, state = ADAMW.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


def scan_layers(params: Any, state: Any, x: Tensor) -> Any:
    """A loop over layers."""

    def loss_of(params: Any) -> Tensor:
        return fzero.scan(lambda h, _, layer: (dense(layer, h), None), x, layers=params["layers"])[0].square().mean()

    value, grads = fzero.value_and_grad(loss_of)(params)
    updates, state = ADAMW.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


def scan_steps(params: Any, state: Any, x: Tensor) -> Any:
    """Two steps in one: a loop that carries parameters and state."""

    def body(carry: Any, x: Tensor) -> Any:
        *carry, value = training(ADAMW)(*carry, x)
        return tuple(carry), value

    (params, state), values = fzero.scan(body, (params, state), x.reshape(2, -1, 5))
    return params, state, values.sum()


LOOPS = {
    "by hand": update_by_hand,
    "lists": update_lists,
    "accumulate": accumulate,
    "layers": scan_layers,
    "steps": scan_steps,
}


@pytest.mark.parametrize(
    ("name", "stage", "places"),
    [
        ("by hand", 3, BOTH),
        ("by hand", 2, STATE),
        ("lists", 3, BOTH),
        ("accumulate", 3, BOTH),
        ("accumulate", 1, PARAMS),
        ("layers", 2, BOTH),
        ("steps", 3, STATE),
    ],
)
def test_other_steps_are_the_resident_ones(name: str, stage: int, places: Any) -> None:
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(LOOPS[name], mesh, stage=stage), torch.cat([rows(mesh), 2 * rows(mesh)])
    optimizer = optim.trace(0.9) if name in ("by hand", "lists") else ADAMW

    def start(places: Any) -> Any:
        params, state = begin(optimizer, mesh, places)
        return params, state.trace if name in ("by hand", "lists") else state

    expected, losses = train(step, start((None, None)), batch)
    program = step.trace(*start(places), batch)
    peaks, planned = Peaks(program), program.memory()
    got, others = train(functools.partial(step, watch=peaks.watch), start(places), batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)
    assert peaks.most["host"] == planned.host
    assert abs(peaks.most["device"] - planned.peak) <= batch.nbytes // mesh.size()  # its rows are views in a loop


def orthogonalize_by_hand(params: Any, means: Any, x: Tensor) -> Any:
    """An optimizer that captures its rate, and uses what the host computes of a mean twice: its norm, and gathered."""
    value, grads = fzero.value_and_grad(loss)(params, x)
    means = tree.map(lambda m, g: torch.lerp(m, g, 0.1), means, grads)

    def update(p: Tensor, m: Tensor) -> Tensor:
        half = m.bfloat16()
        return p * (1 - RATE * 0.1) - RATE * (half / half.norm()) @ torch.eye(5).bfloat16()

    return tree.map(update, params, means), means, value


def test_what_the_host_computes_may_have_several_users() -> None:
    """One of them gathers it on the device. A captured number goes to the host behind its own node."""
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(orthogonalize_by_hand, mesh), rows(mesh)

    def start(place: Host | None) -> Any:
        params = fzero.partition(layers(), mesh, to=place)
        return params, tree.map(torch.zeros_like, params)

    expected, losses = train(step, start(None), batch)
    got, others = train(step, start(HOST), batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)


@pytest.mark.parametrize("places", PLACES)
def test_a_list_with_items_on_the_device_and_on_the_host_is_written_into_where_they_lie(places: Any) -> None:
    """The gradient of a leaf that the loss does not use is made where the leaf lies, any other on the device."""
    mesh = VirtualMesh(fsdp=2)

    def add_in_place(params: Any, means: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda params: dense(params["layers"][0], x).square().mean())(params)
        news = list(torch._foreach_mul(tree.leaves(grads), -0.1))
        torch._foreach_add_(news, tree.leaves(params))
        both = [2 * params["layers"][0]["w"], grads["layers"][0]["w"] * 3, means["layers"][0]["w"] * 4]
        torch._foreach_add_(both, [x.clone() for x in reversed(both)])
        news = tree.unflatten(tree.flatten(params)[1], news)
        news["layers"][0]["w"] = both[0]
        means = tree.map(torch.add, means, news)
        means["layers"][0]["w"] = both[1] + both[2]
        return news, means, x.new_zeros(())

    step, batch = fzero.simulate(add_in_place, mesh), rows(mesh)
    whole = layers(2)
    start = [fzero.partition(whole, mesh, to=place) for place in places]
    got, _ = train(step, tuple(start), batch)
    expected, _ = train(step, (fzero.partition(whole, mesh), fzero.partition(whole, mesh)), batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))


def test_some_leaves_on_the_host_and_some_whole_on_every_rank() -> None:
    """Each leaf is updated where it lies: those of 5 elements are whole on every rank, and stay on the device."""
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(training(CLIPPED), mesh), rows(mesh)

    def start(place: Host | None) -> Any:
        resident = fzero.partition(layers(), mesh, persist=5)
        hosted = fzero.partition(layers(), mesh, persist=5, to=place)
        params = {"layers": [hosted["layers"][0], *resident["layers"][1:]]}
        return params, CLIPPED.init(params)

    expected, losses = train(step, start(None), batch)
    (params, state), got = train(step, start(HOST), batch)
    assert_equal(fzero.unpartition((params, state)), fzero.unpartition(expected))
    assert_equal(got, losses)
    assert where(params) == [HOST, None, None]


def test_a_streamed_leaf_is_copied_chunk_by_chunk() -> None:
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(training(ADAMW), mesh, chunk=256), rows(mesh, width=16)

    def start(to: Host | None) -> Any:
        params = fzero.partition(layers(width=16), mesh, layers=lambda path: path, to=to)
        return params, ADAMW.init(params)

    expected, losses = train(step, start(None), batch)
    program = step.trace(*start(HOST), batch)
    bodies = list(list_programs(program))[1:]
    copied = [node for body in bodies for node in body.graph.find_nodes(op="call_function", target=ops.to_device)]
    assert copied and all(node.args[0][0].meta["val"].nbytes <= 256 for node in copied)
    got, others = train(step, start(HOST), batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)


def test_a_listing_shows_copies_and_bytes_of_the_host() -> None:
    mesh = VirtualMesh(fsdp=2)
    program = fzero.simulate(training(ADAMW), mesh).trace(*begin(ADAMW, mesh, STATE), rows(mesh))
    first, *lines = str(program).splitlines()
    assert f"peak {program.memory().peak} B and {program.memory().host} B on the host" in first
    assert "  to_host         2 values                       64 B" in lines
    assert "  to_device       2 values                       64 B" in lines


def test_state_is_updated_where_it_lies() -> None:
    mesh = VirtualMesh(fsdp=2)
    step = fzero.simulate(training(ADAMW), mesh)
    program = step.trace(*begin(ADAMW, mesh, (None, HOST)), rows(mesh))
    updates = [node for node in program.graph.nodes if ops.is_call(node, ops.adamw_)]
    assert len(updates) == 3, "one for each bucket"
    assert not program.graph.find_nodes(op="call_function", target=ops.to_device), "new parameters overwrite old ones"
    sliced = [argument for argument in program.arguments if argument.bucket is not None]
    assert all(argument.donated for argument in sliced if not program.layouts[argument.bucket].replicated)


def test_a_parameter_that_is_read_late_is_not_overwritten_early() -> None:
    """The norm of the old parameters is taken behind the update."""
    mesh = VirtualMesh(fsdp=2)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        new, state, value = training(ADAMW)(params, state, x)
        return new, state, value + sum(leaf.square().sum() for leaf in tree.leaves(params))

    simulated, batch = fzero.simulate(step, mesh), rows(mesh)
    expected, losses = train(simulated, begin(ADAMW, mesh), batch)
    program = simulated.trace(*begin(ADAMW, mesh, STATE), batch)
    assert not program.graph.find_nodes(op="call_function", target=ops.to_device_)
    got, others = train(simulated, begin(ADAMW, mesh, STATE), batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert_equal(others, losses)


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


def on_ranks(mesh: DeviceMesh, disk: Placement) -> tuple[list[Any], Any, str]:
    """Training with state on the device, on the host and on a disk, clipped and not: results of this rank. Measured
    rates, and the error of ranks that place state differently."""
    results, on_disk = [], (disk, disk)
    steps = training(ADAMW), training(CLIPPED), scan_layers, scan_layers
    for train_step, optimizer, places in zip(steps, (ADAMW, CLIPPED, ADAMW, ADAMW), (STATE, STATE, BOTH, on_disk)):
        step = fzero.shard(train_step, mesh)
        batch = rows(VirtualMesh(fsdp=mesh.size())).chunk(mesh.size())[mesh.get_rank()]
        runs = [train(step, begin(optimizer, mesh, each), batch) for each in ((None, None), places)]
        results.append([(tree.map(lambda x: load(x.local), state), losses) for state, losses in runs])
    for places, early in ((BOTH, ""), (on_disk, ", reads three turns early")):
        listing = str(step.trace(*begin(ADAMW, mesh, places), batch))
        assert f"{early}, copies two turns early, gathers one turn early:" in listing
    rates = step.calibrate(*begin(ADAMW, mesh, (HOST, HOST)), batch)
    try:
        step(*begin(ADAMW, mesh, (HOST if mesh.get_rank() else None, None)), batch)
    except FzeroError as error:
        return results, rates, str(error)
    return results, rates, ""


def test_live_ranks_do_the_same(tmp_path: Path) -> None:
    """Ranks that place state differently are named."""
    for results, rates, message in run(2, on_ranks, fzero.disk(tmp_path)):
        for resident, offloaded in results:
            assert_equal(offloaded, resident)
        assert all(rate > 0 for rate in rates[:-1] if rate is not None) and rates.link != GUESSES["cpu"].link
        assert "argument 0.layers.0.b: float32[5] of layers.0 in fzero.host(pin=True)" in message


def update_named(state: Any, params: Any, x: Tensor) -> Any:
    """Results are in another order than the arguments, and have names."""
    params, state, value = training(ADAMW)(params, state, x)
    return {"params": params, "rest": {"value": value, "state": state}}


def return_gradients(state: Any, params: Any, x: Tensor) -> Any:
    """Two results are trees like the parameters, and like parts of the state."""
    value, grads = fzero.value_and_grad(loss)(params, x)
    updates, state = ADAMW.update(grads, state, params)
    return {"grads": grads, "params": optim.apply_updates(params, updates), "rest": {"value": value, "state": state}}


@pytest.mark.parametrize(("fn", "places"), [*itertools.product([update_named], PLACES), (return_gradients, STATE)])
def test_results_in_a_tree_of_their_own_lie_where_the_state_lay(fn: Callable[..., Any], places: Any) -> None:
    mesh = VirtualMesh(fsdp=2)
    params, state = begin(ADAMW, mesh, places)
    new = fzero.simulate(fn, mesh)(state, params, rows(mesh))
    assert ({*where(new["params"])}, {*where(new["rest"]["state"])}) == ({places[0]}, {places[1]})
    assert {*where(new.get("grads", params))} == {places[0]}
    expected, _ = train(fzero.simulate(training(ADAMW), mesh), begin(ADAMW, mesh), rows(mesh), steps=1)
    assert_equal(fzero.unpartition((new["params"], new["rest"]["state"])), fzero.unpartition(expected))


def test_a_step_that_keeps_its_arguments_is_the_resident_one() -> None:
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(training(CLIPPED), mesh, donate=False), rows(mesh)
    expected, _ = train(step, begin(CLIPPED, mesh), batch)
    start = begin(CLIPPED, mesh, STATE)
    got, _ = train(step, start, batch)
    assert_equal(fzero.unpartition(got), fzero.unpartition(expected))
    assert not any(leaf.is_donated for leaf in tree.leaves(start))


def test_outlined_fragments_leave_the_host_alone() -> None:
    """As `compile=True` calls them: what runs on the host is in no fragment."""
    mesh = VirtualMesh(fsdp=2)
    step, batch = fzero.simulate(training(CLIPPED), mesh), rows(mesh)
    args = (*begin(CLIPPED, mesh, BOTH), batch)
    program = step.trace(*args)
    case = Case(training(CLIPPED), mesh, args)
    assert_same(case.run(outline(program)), case.run(program))


@pytest.mark.parametrize("name", ["host", "disk"])
def test_passes_without_offload_are_named(name: str, tmp_path: Path) -> None:
    mesh, place = VirtualMesh(fsdp=2), HOST if name == "host" else fzero.disk(tmp_path)
    chosen = [each for each in passes.defaults(stage=3) if each is not passes.offload]
    step = fzero.simulate(training(ADAMW), mesh, passes=chosen)
    with pytest.raises(FzeroError, match=f"lies on the {name}.*put the pass offload among the passes"):
        step(*begin(ADAMW, mesh, (place, place)), rows(mesh))


def test_state_of_plain_parameters_has_no_placement() -> None:
    with pytest.raises(FzeroError, match="a parameter is a Tensor; partition the tree first"):
        ADAMW.init(layers(), to=HOST)
