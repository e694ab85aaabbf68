"""Initial values: the same on any number of ranks, distributed as torch's, drawn only by ranks that keep them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import initializers, tree
from fzero.base.errors import FzeroError
from fzero.state import init
from fzero.state.initializers import Initializer

SHAPES = {
    "layers": [{"w": torch.empty(300, 40, device="meta"), "b": torch.empty(40, device="meta")} for _ in range(2)],
    "half": torch.empty(5, 7, dtype=torch.bfloat16, device="meta"),
    "double": torch.empty(9, dtype=torch.float64, device="meta"),
    "one": torch.empty((), device="meta"),
    "none": torch.empty(0, 3, device="meta"),
}


def rule(path: str, leaf: Any) -> Initializer:
    return initializers.kaiming_uniform() if leaf.ndim > 1 else initializers.normal(0.5)


def initialised(mesh: Any, seed: int = 0) -> tree.Tree:
    return fzero.unpartition(fzero.init(SHAPES, mesh, rule, seed=seed))


def assert_same(a: tree.Tree, b: tree.Tree) -> None:
    def same(x: Tensor, y: Tensor) -> None:
        assert x.dtype == y.dtype and torch.equal(x, y)

    tree.map(same, a, b)


@pytest.mark.parametrize("chunk", [7, init.DRAWN_TOGETHER])
def test_values_do_not_depend_on_the_number_of_ranks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "DRAWN_TOGETHER", chunk)
    first = initialised(fzero.VirtualMesh(fsdp=1))
    for mesh in (fzero.VirtualMesh(fsdp=3), fzero.VirtualMesh(replica=2, fsdp=64)):
        assert_same(initialised(mesh), first)


def test_values_on_real_ranks_are_those_of_virtual_ones() -> None:
    for values in run(3, initialised):
        assert_same(values, initialised(fzero.VirtualMesh(fsdp=1)))


def test_a_rank_draws_only_the_chunks_that_it_keeps() -> None:
    assert run(2, _numbers_drawn) == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9]]


def _numbers_drawn(mesh: DeviceMesh) -> list[int]:
    """The chunks that this rank draws, of 100 elements each. Rank 0 keeps 512 of the leaf's 1,000 elements."""
    init.DRAWN_TOGETHER = 100
    numbers: list[int] = []
    chunk = init.Initial._draw

    def noted(self: init.Initial, number: int) -> Tensor:
        numbers.append(number)
        return chunk(self, number)

    init.Initial._draw = noted  # type: ignore[method-assign]
    fzero.init({"w": torch.empty(1000, device="meta")}, mesh, lambda path, leaf: initializers.zeros())
    return numbers


def test_seed_path_and_position_make_a_value() -> None:
    a, b = initialised(fzero.VirtualMesh(fsdp=2)), initialised(fzero.VirtualMesh(fsdp=2), seed=1)
    assert not torch.equal(a["layers"][0]["w"], a["layers"][1]["w"])
    assert not torch.equal(a["layers"][0]["w"], b["layers"][0]["w"])
    assert a["layers"][0]["w"].unique().numel() > 11_000  # of 12,000


def values(initializer: Initializer, *shape: int) -> Tensor:
    params = fzero.init(torch.empty(shape, device="meta"), fzero.VirtualMesh(fsdp=4), lambda path, leaf: initializer)
    return fzero.unpartition(params)


def he(x: Tensor) -> Tensor:
    return torch.nn.init.kaiming_uniform_(x, nonlinearity="relu")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (initializers.zeros(), torch.nn.init.zeros_),
        (initializers.ones(), torch.nn.init.ones_),
        (initializers.constant(0.25), lambda x: torch.nn.init.constant_(x, 0.25)),
        (initializers.uniform(-1, 3), lambda x: torch.nn.init.uniform_(x, -1, 3)),
        (initializers.normal(0.02, 1), partial(torch.nn.init.normal_, mean=1, std=0.02)),
        (initializers.trunc_normal(2.0), lambda x: torch.nn.init.trunc_normal_(x, 0, 2)),
        (initializers.xavier_uniform(2.0), lambda x: torch.nn.init.xavier_uniform_(x, 2.0)),
        (initializers.xavier_normal(), torch.nn.init.xavier_normal_),
        (initializers.kaiming_uniform(5**0.5), lambda x: torch.nn.init.kaiming_uniform_(x, 5**0.5)),
        (initializers.kaiming_normal(mode="fan_out"), partial(torch.nn.init.kaiming_normal_, mode="fan_out")),
        (initializers.kaiming_normal(0.5), partial(torch.nn.init.kaiming_normal_, a=0.5)),
        (initializers.kaiming_uniform(0, "fan_in", "relu"), he),
    ],
)  # fmt: skip
def test_distributions_are_those_of_torch(ours: Initializer, theirs: Callable[[Tensor], Tensor]) -> None:
    """Mean, standard deviation and range of 240,000 values. A sample of this size has a standard deviation within a few
    thousandths of the true one."""
    got, expected = values(ours, 200, 100, 3, 4), theirs(torch.empty(200, 100, 3, 4))
    spread = float(expected.std()) or 1.0
    assert abs(float(got.mean() - expected.mean())) < 0.02 * spread
    assert float(got.std()) == pytest.approx(float(expected.std()), rel=0.01)
    if "normal" not in str(theirs):
        for end in (Tensor.min, Tensor.max):
            assert float(end(got)) == pytest.approx(float(end(expected)), abs=0.5 * spread)


def test_a_trunc_normal_stays_within_its_bounds() -> None:
    got = values(initializers.trunc_normal(1.0, low=-0.5, high=0.25), 10_000)
    assert float(got.min()) >= -0.5 and float(got.max()) <= 0.25


def test_fans() -> None:
    assert initializers.fans(torch.Size((6, 5, 3, 2))) == (30, 36)


def test_a_leaf_without_fans_is_refused_by_name() -> None:
    with pytest.raises(FzeroError, match=r"double: shape \[9\] has no fan_in and fan_out"):
        fzero.init(SHAPES, fzero.VirtualMesh(fsdp=2), lambda path, leaf: initializers.xavier_normal())


def test_an_initializer_in_the_place_of_a_rule_is_named() -> None:
    with pytest.raises(FzeroError, match=r"init: rule: .* does not take \(path, leaf\); give a function of a leaf"):
        fzero.init(SHAPES, fzero.VirtualMesh(fsdp=2), initializers.zeros())  # type: ignore[arg-type]


def test_a_rule_that_gives_no_initializer_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"double: the rule gives a float for it; give one of fzero\.initializers"):
        fzero.init(SHAPES, fzero.VirtualMesh(fsdp=2), lambda path, leaf: 0.02)  # type: ignore[arg-type,return-value]


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"mode: is 'fan_both'; give \"fan_in\" or \"fan_out\""):
        initializers.kaiming_normal(mode="fan_both")
