"""Aliases: what a user holds does not change when a step updates state in place, and state is no user's tensor.

One live rank shows most of it: there a gathered leaf is the slice itself. Two ranks show leaves that every rank holds.
"""

from __future__ import annotations

import copy
import functools
import operator
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import Outcome, run_cases, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree

GIVEN = {"w": torch.arange(12.0).view(4, 3), "b": torch.arange(5.0) - 2, "s": torch.tensor(2.0)}
SOME = 5
"""`persist=SOME` keeps the leaves "b" and "s" whole on every rank."""


def update(params: Any) -> Any:
    return tree.map(lambda p: p + 1, params)


@functools.cache
def updating(mesh: DeviceMesh) -> Any:
    return fzero.shard(lambda params: (update(params),), mesh)  # on a disk a path stays itself, or nothing is donated


def settings(mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """Where leaves lie, and which of them are whole on every rank: options of `partition`. On two ranks some are always
    whole: the others are sharded beside them."""
    for place in (None, fzero.host(), fzero.disk(tempfile.gettempdir())):  # where files have no names
        for persist in (0, SOME) if mesh.size() == 1 else (SOME,):
            yield {"to": place, "persist": persist}


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, fzero.Sharded) else x).clone()


# taken outside of a step

TAKEN: dict[str, Callable[[Any], Any]] = {
    **{name: operator.methodcaller(name) for name in ("detach", "positive", "conj", "float", "cpu", "clone")},
    "real": lambda p: p.real,
    "to": lambda p: p.to(torch.float32),
    "to like": lambda p: p.to(p),
    "type_as": lambda p: p.type_as(p),
    "+": lambda p: +p,
    "full_tensor": lambda p: p.full_tensor(),
    "unpartition": lambda p: fzero.unpartition([p])[0],
    "iter_full": lambda p: next(iter(fzero.iter_full([p])))[1],
    "iter_full by chunks": lambda p: next(iter(fzero.iter_full([p], chunk=1000)))[1][1],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "view": lambda p: p.view(-1),
    "contiguous": lambda p: p.contiguous(),
    "index": lambda p: p[...],
    "data": lambda p: p.data,
    "dropout": lambda p: torch.nn.functional.dropout(p, training=False),
    "slice_of": lambda p: p.slice_of(p.full_tensor()),
    "new_zeros": lambda p: p.new_zeros(3),
    "in a transform": lambda p: torch.func.vjp(lambda p: p.full_tensor(), p)[0],
}


def find_changed(mesh: DeviceMesh, take: Callable[[Any], Any]) -> list[str]:
    """The leaves of which a taken value changes, without an error, when a step updates them."""
    changed = []
    for setting in settings(mesh):
        params = fzero.partition(GIVEN, mesh, **setting)
        taken = tree.map(take, params)
        before = tree.map(whole, taken)
        updating(mesh)(params)
        assert all(map(is_donated, tree.leaves(params)))
        for key, value in taken.items():
            if not is_donated(value) and not torch.equal(whole(value), before[key]):
                changed.append(key)
    return changed


# returned by a step

CONSTANT = torch.full((4, 3), 7.0)


def full(p: Any) -> Any:
    return p.full_tensor() if isinstance(p, fzero.Sharded) else p


def with_new(view: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step that returns the new state, and a view of it."""

    def step(params: Any, x: Tensor) -> Any:
        new = update(params)
        return new, tree.map(view, new)

    return step


RETURNED: dict[str, Callable[..., Any]] = {
    "itself": lambda params, x: params,
    "itself, detached": lambda params, x: tree.map(lambda p: p.detach(), params),
    "itself and new": lambda params, x: (params, update(params)),
    "new and itself": lambda params, x: (update(params), params),
    "new twice": with_new(lambda p: p),
    "new and detached": with_new(lambda p: p.detach()),
    "new and whole": with_new(full),
    "whole": lambda params, x: tree.map(full, params),
    "a view of the whole": lambda params, x: full(params["w"]).T[1:],
    "a mean of the whole": lambda params, x: fzero.pmean(full(params["w"]), "fsdp"),
    "swapped": lambda params, x: {"w": params["b"], "b": params["w"]},
    "gradients": lambda params, x: fzero.grad(lambda p: (p["w"] @ x).sum() * p["s"] + p["b"].sum())(params),
    "a list operation": lambda params, x: torch._foreach_mul(list(params.values()), 2),
    "a captured tensor as state": lambda params, x: params["w"] * 0 + 7 if isinstance(params["w"], Tensor) else
    params["w"].slice_of(CONSTANT),
    "a view of the batch": lambda params, x: x.view(-1),
}  # fmt: skip


def find_moved(mesh: DeviceMesh, step: Callable[..., Any], donate: bool) -> list[Any]:
    """What is not as in plain torch after a step and, leaf by leaf, an update of all the state that it returned."""
    found: list[Any] = []
    for setting in settings(mesh):
        params, x = fzero.partition(GIVEN, mesh, **setting), torch.arange(6.0).view(3, 2)
        constant = CONSTANT.clone()
        expected = tree.leaves(step(GIVEN, x))
        result = tree.leaves(fzero.shard(step, mesh, donate=donate)(params, x))
        held = [*zip(result, map(whole, expected)), *zip(tree.leaves(params), map(whole, tree.leaves(GIVEN)))]
        held += [(x, torch.arange(6.0).view(3, 2)), (CONSTANT, constant)]
        for new in [None, *result]:
            if isinstance(new, fzero.Sharded) and not is_donated(new):
                updating(mesh)([new])
            found += [i for i, (x, value) in enumerate(held) if not is_donated(x) and not torch.equal(whole(x), value)]
    return found


def is_donated(x: Any) -> bool:
    return isinstance(x, fzero.Sharded) and "donated" in repr(x)


def copies(mesh: DeviceMesh) -> list[int]:
    """How many results are copied: parameters that pass through, gradients and new state never are."""
    params, x = fzero.partition(GIVEN, mesh), torch.arange(6.0).view(3, 2)
    steps = ("itself", "itself, detached", "itself and new", "new twice", "gradients", "a list operation", "swapped")
    found = []
    for name in steps:
        step = fzero.shard(RETURNED[name], mesh, donate=False)
        found.append(len(step._pipeline.prepare(*tree.flatten((params, x))).returned._copied))
    return found


# given to partition


def partition_copies(mesh: DeviceMesh) -> bool:
    module = nn.Linear(3, 4)
    params, _ = fzero.lower(module)
    before = copy.deepcopy(params)
    for persist in (0, 100):
        updating(mesh)(fzero.partition(params, mesh, persist=persist))
    return torch.equal(module.weight, before["weight"]) and torch.equal(params["bias"], before["bias"])


def batch_in_state(mesh: DeviceMesh) -> list[Any]:
    """A batch that is a view of state is read before the state is overwritten, or not overwritten."""
    params = fzero.partition(torch.arange(4.0), mesh)
    new, x = fzero.shard(lambda p, x: (p + 1, x * 2), mesh)(params, params.local[1:])
    return [new.full_tensor().tolist(), x.tolist()]


ONE_RANK: dict[str, Callable[[DeviceMesh], Any]] = {
    **{f"taken: {name}": functools.partial(find_changed, take=take) for name, take in TAKEN.items()},
    **{
        f"returned: {name}, {donate}": functools.partial(find_moved, step=step, donate=donate)
        for name, step in RETURNED.items()
        for donate in (True, False)
    },
    "copies": copies,
    "partition": partition_copies,
    "batch in state": batch_in_state,
}


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, list[Outcome]]:
    return run_cases(1, {name: Local(name) for name in ONE_RANK})


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Outcome]]:
    return run_cases(2, {name: Local(name) for name in ONE_RANK if ":" in name})


class Local:
    """A case by its name: a lambda does not go to another process, its name does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, mesh: DeviceMesh) -> Any:
        return ONE_RANK[self.name](mesh)


@pytest.mark.parametrize("name", [name for name in ONE_RANK if ":" in name])
def test_what_a_user_holds_does_not_change(
    on_one_rank: dict[str, list[Outcome]], on_two_ranks: dict[str, list[Outcome]], name: str
) -> None:
    assert values(on_one_rank[name]) == [[]]
    if "batch" not in name and "gradients" not in name:
        assert values(on_two_ranks[name]) == [[], []]


def test_state_that_passes_through_is_not_copied(on_one_rank: dict[str, list[Outcome]]) -> None:
    assert values(on_one_rank["copies"]) == [[0] * 7]


def test_partition_copies(on_one_rank: dict[str, list[Outcome]]) -> None:
    assert values(on_one_rank["partition"]) == [True]


def test_a_batch_may_lie_in_state(on_one_rank: dict[str, list[Outcome]]) -> None:
    assert values(on_one_rank["batch in state"]) == [[[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0]]]


def test_a_simulation_gives_state_that_passes_through_back() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    params = fzero.partition(GIVEN, mesh)
    same = fzero.simulate(lambda params: (update(params), params), mesh, donate=False)(params)[1]
    assert all(a is b for a, b in zip(tree.leaves(same), tree.leaves(params), strict=True))


def test_a_value_on_virtual_ranks_is_nobodys_tensor() -> None:
    mesh = fzero.VirtualMesh(fsdp=3)
    given = torch.arange(12.0)
    params = fzero.partition(given, mesh)
    params.full_tensor().zero_()
    params.detach().local.zero_()
    params.slice_of(given).local.zero_()
    assert torch.equal(params.full_tensor(), torch.arange(12.0)) and torch.equal(given, torch.arange(12.0))
