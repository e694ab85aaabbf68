"""State that was not made alike on all ranks: on every transport, every rank raises at the next step, by name.

All ranks can go on afterwards, with state that was made alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import Outcome, Refusal, refusal, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import initializers, tree
from fzero.ranks.live import live
from fzero.ranks.transports import Native, PointToPoint, Transport
from fzero.values.origin import MASK, UNKNOWN, describe_origin, follow, make_origin, number_values, tell_apart

STATE = "ranks hold state that was not made alike: rank 0 has 'state "
SOON = 20.0
"""Seconds, of which a busy machine may need some."""


class Told(NamedTuple):
    """The error of a step on state that differs, and the loss of a step that all ranks take alike afterwards."""

    refusal: Refusal
    loss_after: float


def same_host(mesh: DeviceMesh) -> Transport:
    return live(mesh).transports["fsdp"]


def messages(mesh: DeviceMesh) -> Transport:
    return PointToPoint(mesh.get_group("fsdp"), live(mesh).members.timeout)


def native(mesh: DeviceMesh) -> Transport:
    return Native(mesh.get_group("fsdp"), live(mesh).members.new_twin(mesh.get_group("fsdp")))


TRANSPORTS = same_host, messages, native


def full(scale: float = 1.0) -> dict[str, Any]:
    return {"layers": [{"w": scale * torch.ones(4, 5), "b": torch.zeros(5)}]}


def loss_of(params: Any, x: Tensor) -> Tensor:
    (layer,) = params["layers"]
    return (x @ layer["w"] + layer["b"]).square().mean()


def descend(params: Any, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def is_odd(mesh: DeviceMesh) -> bool:
    return dist.get_rank() == 1


X = torch.ones(2, 4)


def told(transport: Callable[[DeviceMesh], Transport], make: Callable[[DeviceMesh], Any], mesh: DeviceMesh) -> Told:
    """The error of a step on the state that `make` returns."""
    live(mesh).transports["fsdp"] = transport(mesh)
    step = fzero.shard(descend, mesh, donate=False)
    found = refusal(lambda: step(make(mesh), X))
    _, loss = step(fzero.partition(full(), mesh), X)
    return Told(found, float(loss))


# how state differs


def other_values(mesh: DeviceMesh, **how: Any) -> Any:
    return fzero.partition(full(2.0 if is_odd(mesh) else 1.0), mesh, **how)


def other_values_of_leaves_that_ranks_hold_in_full(mesh: DeviceMesh) -> Any:
    return other_values(mesh, persist=1000)


def another_seed(mesh: DeviceMesh) -> Any:
    return fzero.init(full(), mesh, lambda path, leaf: initializers.normal(0.1), seed=dist.get_rank())


def another_initializer(mesh: DeviceMesh) -> Any:
    return fzero.init(full(), mesh, lambda path, leaf: initializers.normal(0.2 if is_odd(mesh) else 0.1))


def an_older_file(mesh: DeviceMesh) -> Any:
    with tempfile.TemporaryDirectory() as folder:  # each rank has its own disk
        file = Path(folder) / "model.safetensors"
        fzero.save_safetensors(full(0.5 if is_odd(mesh) else 1.0), file)
        return fzero.load_safetensors(file, full(), mesh)


def a_skipped_step(mesh: DeviceMesh) -> Any:
    old = fzero.partition(full(), mesh)
    new, _ = fzero.shard(descend, mesh, donate=False)(old, X)
    return old if is_odd(mesh) else new


def another_of_two_results(mesh: DeviceMesh) -> Any:
    """Two calls with equal state, and other batches."""
    old, step = fzero.partition(full(), mesh), fzero.shard(descend, mesh, donate=False)
    first, _ = step(old, X)
    second, _ = step(old, 2 * X)
    return first if is_odd(mesh) else second


def a_change_outside_of_steps(mesh: DeviceMesh) -> Any:
    params = fzero.partition(full(), mesh)
    return tree.map(lambda p: 0.9 * p, params) if is_odd(mesh) else params


def another_number_outside_of_steps(mesh: DeviceMesh) -> Any:
    return tree.map(lambda p: p * (0.8 if is_odd(mesh) else 0.9), fzero.partition(full(), mesh))


def another_new_leaf(mesh: DeviceMesh) -> Any:
    scale = 2.0 if is_odd(mesh) else 3.0
    return fzero.update_leaf(fzero.partition(full(), mesh), "layers.0.w", lambda w: scale * w)


def another_tree_of_one_source(mesh: DeviceMesh) -> Any:
    first, second = (fzero.partition(full(scale), mesh, source_rank=0) for scale in (1.0, 2.0))
    return first if is_odd(mesh) else second


FAULTS = (
    other_values,
    other_values_of_leaves_that_ranks_hold_in_full,
    another_seed,
    another_initializer,
    an_older_file,
    a_skipped_step,
    another_of_two_results,
    a_change_outside_of_steps,
    another_number_outside_of_steps,
    another_new_leaf,
    another_tree_of_one_source,
)


# how state is the same


def equal_values(mesh: DeviceMesh) -> Any:
    return fzero.partition(full(), mesh, persist=5)


def values_of_one_rank(mesh: DeviceMesh) -> Any:
    return fzero.partition(full(dist.get_rank()), mesh, source_rank=0)


def one_seed(mesh: DeviceMesh) -> Any:
    return fzero.init(full(), mesh, lambda path, leaf: initializers.normal(0.1), seed=7)


def a_copy_on_one_rank(mesh: DeviceMesh) -> Any:
    import copy

    params = fzero.partition(full(), mesh)
    return copy.deepcopy(params) if is_odd(mesh) else params


ALIKE = equal_values, values_of_one_rank, one_seed, a_copy_on_one_rank


# beside steps


def differing(mesh: DeviceMesh) -> Any:
    return a_skipped_step(mesh)


def unpartitioned(mesh: DeviceMesh) -> Refusal:
    params = differing(mesh)
    return refusal(lambda: fzero.unpartition(params))


def iterated(mesh: DeviceMesh) -> Refusal:
    params = differing(mesh)
    return refusal(lambda: list(fzero.iter_full(params, chunk=16)))


def saved(mesh: DeviceMesh) -> Refusal:
    params = differing(mesh)
    with tempfile.TemporaryDirectory() as folder:
        return refusal(lambda: fzero.save_safetensors(params, Path(folder) / "model.safetensors"))


def replicas(mesh: DeviceMesh) -> Refusal:
    """Copies of the state that differ."""
    rows = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "fsdp"))
    return refusal(lambda: fzero.shard(descend, rows)(other_values(rows), X))


BESIDE = unpartitioned, iterated, saved, replicas


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return run_cases(
        2,
        {
            **{
                f"{make.__name__} {transport.__name__}": partial(told, transport, make)
                for transport in TRANSPORTS
                for make in (*FAULTS, *ALIKE)
            },
            **{case.__name__: case for case in BESIDE},
        },
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", FAULTS)
def test_state_that_was_not_made_alike_is_refused_by_all_ranks(
    outcomes: dict[str, list[Outcome]], make: Any, transport: Any
) -> None:
    for found, loss_after in values(outcomes[f"{make.__name__} {transport.__name__}"]):
        assert found.kind == "FzeroError" and found.seconds < SOON, found
        assert found.message.startswith("state 0.layers.0.") and STATE in found.message, found.message
        assert "rank 1 has '" in found.message and len(found.message) < 1000
        assert loss_after == 16.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", ALIKE)
def test_state_that_was_made_alike_is_not(outcomes: dict[str, list[Outcome]], make: Any, transport: Any) -> None:
    for found, _ in values(outcomes[f"{make.__name__} {transport.__name__}"]):
        assert found.kind == "nothing", found


@pytest.mark.parametrize("case", BESIDE)
def test_nothing_else_takes_such_state(outcomes: dict[str, list[Outcome]], case: Any) -> None:
    for found in values(outcomes[case.__name__]):
        assert found.kind == "FzeroError" and found.seconds < SOON, found
        assert "ranks hold state that was not made alike" in found.message or "different trees" in found.message


# what an origin is


def test_an_origin_follows_from_origins_in_order() -> None:
    a, b = make_origin(11, 2), make_origin(12, 5)
    assert follow([a, b]) == follow([a, b]) != follow([b, a])
    assert follow([a, b], 1) != follow([a, b], 2)
    assert describe_origin(follow([a, b])).startswith("6 steps") and describe_origin(follow([])).startswith("1 steps")


def test_the_hash_is_the_same_in_every_process() -> None:
    assert follow([make_origin(2, 1), UNKNOWN], 3) == make_origin(2258963878412437353, 2)


def test_an_origin_says_how_old_it_is() -> None:
    assert describe_origin(make_origin(0xABC, 3)) == "3 steps after 000000000abc"


def test_values_that_are_made_together_have_origins_of_their_own() -> None:
    call, another = make_origin(11, 2), make_origin(12, 2)
    found = [*tell_apart(call, number_values(900)), *tell_apart(another, number_values(900))]
    assert len(set(found)) == 1800 and {origin >> MASK.bit_length() for origin in found} == {2}
    assert tell_apart(UNKNOWN, number_values(3)) == [UNKNOWN] * 3
