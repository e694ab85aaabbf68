"""Codes and scales: their errors, and a `Quantized` as a tensor of torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.program import blockwise
from fzero.program.blockwise import Coding, decode, encode
from fzero.values.quantized import Quantized

ERRORS = {(8, "even"): 254, (4, "even"): 14, (4, "nf4"): 6.5}
"""Bits and levels -> by what part of the largest element of its block an element changes at most."""
KINDS = pytest.mark.parametrize(("bits", "levels"), ERRORS)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of blocks with very different scales, and with some zeros."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=draw, dtype=torch.float64)
    return (drawn * torch.rand(shape, generator=draw).mul(20).sub(10).exp() * (drawn > -1.5)).to(dtype)


def quantized(bits: int, *shape: int, levels: str = "even", dtype: torch.dtype = torch.float32) -> Quantized:
    made = fzero.quantize({"w": values(*shape, dtype=dtype)}, bits=bits, block=64, levels=levels, where="w")["w"]
    assert isinstance(made, Quantized)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@KINDS
@pytest.mark.parametrize("shape", [(64, 32), (3, 5, 7), (1001,), (64,)])
def test_no_element_changes_by_more_than_is_said(
    bits: int, levels: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    exact, read = values(*shape, dtype=dtype), quantized(bits, *shape, levels=levels, dtype=dtype).full_tensor()
    assert (read.shape, read.dtype) == (exact.shape, dtype)
    change = nn.functional.pad((exact.double() - read.double()).view(-1), (0, -exact.numel() % 64)).view(-1, 64)
    largest = nn.functional.pad(exact.double().abs().view(-1), (0, -exact.numel() % 64)).view(-1, 64).amax(1)
    rounding = torch.finfo(dtype).eps if dtype != torch.float64 else torch.finfo(torch.float32).eps
    assert bool((change.abs().amax(1) <= largest * (1 / ERRORS[bits, levels] + 2 * rounding)).all())
    assert torch.equal(read[exact == 0], exact[exact == 0])
    assert float(change.abs().max()) > 0, "codes of so few bits change something"


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_by_hand(bits: int) -> None:
    coding = Coding((6,), torch.float32, bits, 4)
    codes, scales = encode(torch.tensor([1.0, -0.6, 0.0, 0.25, 8.0, -8.0]), coding)
    assert scales.view(torch.float32).view(-1).tolist() == pytest.approx(
        [1 / blockwise.LARGEST[bits], 8 / blockwise.LARGEST[bits]]
    )
    if bits == 8:
        assert codes.view(torch.int8).tolist() == [127, -76, 0, 32, 127, -127]
    else:
        assert [[byte & 15, byte >> 4] for byte in codes.tolist()] == [[15, 4], [8, 10], [15, 1]]  # eight more each
    assert decode(codes, scales, coding)[[2, 4, 5]].tolist() == [0.0, 8.0, -8.0]


@KINDS
def test_a_chunk_changes_nothing(bits: int, levels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantized(bits, 37, 29, levels=levels)
    read = whole.full_tensor()
    monkeypatch.setattr(blockwise, "CHUNK", 128)
    assert torch.equal(whole.full_tensor(), read)


def test_each_level_of_nf4_is_kept_and_normal_elements_change_less() -> None:
    exact = torch.tensor(blockwise.NF4).repeat(4)
    assert torch.equal(
        fzero.quantize({"w": 3 * exact}, bits=4, block=64, levels="nf4", where="w")["w"].full_tensor(), 3 * exact
    )
    normal = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    even, nf4 = (
        fzero.quantize({"w": normal}, bits=4, block=64, levels=levels, where="w")["w"].full_tensor()
        for levels in ("even", "nf4")
    )
    assert (nf4 - normal).square().mean() < 0.9 * (even - normal).square().mean()


@pytest.mark.parametrize("bits", [8, 4])
def test_it_takes_the_bytes_that_it_should(bits: int) -> None:
    held = quantized(bits, 64, 64)
    assert sum(x.nbytes for x in tree.leaves(held)) == 64 * 64 * bits // 8 + 64 * 64 // 64 * 4


@pytest.mark.parametrize("shape", [(8, 64), (130, 160), (500,)])  # of one group of scales, of two, and with a part
def test_double_quantization_is_that_of_qlora_by_hand(shape: tuple[int, ...]) -> None:
    exact = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"bits": 4, "block": 64, "levels": "nf4", "where": "w"}
    plain, held = (fzero.quantize({"w": exact}, double_quant=is_double, **how)["w"] for is_double in (False, True))
    assert torch.equal(plain.codes, held.codes)
    scales = plain.scales.view(torch.float32).view(-1)

    table = [0.0, 1.0]  # 8 bits: 2 ** k middles of equal parts of [0.1, 1], times 10 ** (k - 6), with both signs
    for k in range(7):
        borders = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float64)
        middles = ((borders[1:] + borders[:-1]) / 2 * 10 ** (k - 6)).tolist()
        table += [*middles, *(-x for x in middles)]
    levels = torch.tensor(sorted(table))
    offset, expected = scales.double().mean().float(), list[Tensor]()
    for group in (scales - offset).split(256):
        of_group = group.abs().max()
        nearest = (group[:, None] / of_group - levels).abs().argmin(1)
        expected.append(levels[nearest] * of_group + offset)
    blocks = nn.functional.pad(plain.full_tensor().view(-1), (0, -exact.numel() % 64)).view(-1, 64)
    numbers = torch.tensor(blockwise.NF4)[
        (blocks / scales[:, None])[..., None].sub(torch.tensor(blockwise.NF4)).abs().argmin(-1)
    ]
    made = (numbers * torch.cat(expected)[:, None]).view(-1)[: exact.numel()].view(shape)
    assert torch.equal(held.full_tensor(), made) and not torch.equal(made, plain.full_tensor())

    count = len(scales)
    assert sum(x.nbytes for x in tree.leaves(held)) == exact.numel() // 2 + count + 4 * -(-count // 256) + 4
    assert tree.paths({"w": held})[1] == "w.scales-dynamic8-256"
    assert repr(held).endswith("as 4 bits of nf4 in blocks of 64, scales as 8 bits)")
    parts = fzero.partition({"w": held}, fzero.VirtualMesh(fsdp=2))["w"]
    with pytest.raises(FzeroError, match="scales-dynamic8-256: is a part of a quantized leaf: mul would take"):
        parts.scales * 2


def test_scales_that_are_all_equal_are_the_mean() -> None:
    held = fzero.quantize({"w": torch.ones(4, 64)}, bits=4, block=64, double_quant=True, where="w")["w"]
    assert torch.equal(held.full_tensor(), torch.ones(4, 64))


def test_to_torch_it_is_the_dequantized_tensor() -> None:
    w = quantized(8, 16, 32)
    read, x = w.full_tensor(), torch.randn(4, 32)
    assert (w.shape, w.dtype, w.ndim, w.numel(), w.requires_grad) == (read.shape, torch.float32, 2, 512, False)
    for got, expected in (
        (nn.functional.linear(x, w), nn.functional.linear(x, read)),
        (x @ w.T, x @ read.T),
        (w @ x.T, read @ x.T),
        (w[2:5] * 2 + 1, read[2:5] * 2 + 1),
        (torch.stack([w, w]), torch.stack([read, read])),
        (nn.functional.embedding(torch.tensor([3]), w), read[[3]]),
        (w.to(torch.bfloat16), read.to(torch.bfloat16)),
        (torch.ops.aten.mm.default(w, x.T), read @ x.T),
        (torch.zeros(16, 32).add_(w), read),
    ):
        assert type(got) is Tensor and torch.equal(got, expected)


def test_it_is_a_tree_of_codes_and_scales() -> None:
    held = {"layer": quantized(4, 16, 32)}
    assert tree.paths(held) == ["layer.codes-int4-64-of-16x32", "layer.scales"]
    assert repr(held["layer"]) == "Quantized(value: float32[16, 32] as 4 bits in blocks of 64)"
    read = held["layer"].full_tensor()
    copies = copy.deepcopy(held), pickle.loads(pickle.dumps(held)), tree.map(torch.clone, held)
    assert all(torch.equal(each["layer"].full_tensor(), read) for each in copies)
    assert tree.flatten(held)[1] != tree.flatten({"layer": quantized(8, 16, 32)})[1]


@pytest.mark.parametrize(
    "change",
    [lambda w: w.add_(1), lambda w: w.__setitem__(0, 1.0), lambda w: w.requires_grad_(), lambda w: w.backward()],
)
def test_it_is_immutable(change: Any) -> None:
    with pytest.raises(FzeroError, match="a quantized leaf: is quantized: .*; train other leaves beside it"):
        change(quantized(8, 16, 32))


def test_its_gradient_is_refused_or_none() -> None:
    params = {"w": quantized(8, 16, 32), "b": torch.ones(16)}

    def loss(p: Any) -> Tensor:
        return (p["w"].sum(1) * p["b"]).square().sum()

    gradient = fzero.grad(loss)(params)
    assert tree.paths(gradient) == ["b"] and gradient["w"].codes is None
    held = fzero.partition(params, fzero.VirtualMesh(fsdp=2))
    with pytest.raises(FzeroError, match="w: is quantized, and a transform of torch.func"):
        torch.func.grad(loss)(held)
    with pytest.raises(FzeroError, match="each of the 2 leaves of its first argument is frozen"):
        fzero.grad(lambda w: w.sum())(params["w"])


def test_what_a_step_captures_is_a_constant_or_refused() -> None:
    mesh, plain = fzero.VirtualMesh(fsdp=2), quantized(8, 16, 32)
    held = fzero.partition({"w": plain}, mesh)["w"]
    params = fzero.partition({"t": torch.ones(16, 32)}, mesh)
    gradient = fzero.simulate(fzero.grad(lambda p: (plain * p["t"]).sum()), mesh)(params)
    assert torch.equal(fzero.unpartition(gradient)["t"], plain.full_tensor())
    with pytest.raises(FzeroError, match=r"w\.codes-int8-\S+ is state that the step captured.*give it to the step"):
        fzero.simulate(lambda p: (held * p["t"]).sum(), mesh)(params)


def test_a_step_is_given_codes_of_their_own_shape() -> None:
    """Plain leaves among the arguments of a simulated step are the batch of all ranks, and are cut."""
    with pytest.raises(
        FzeroError, match=r"has codes of shape \[256\], and \[512\] belong to it; give it .* partitioned"
    ):
        fzero.simulate(lambda q: q.sum(), fzero.VirtualMesh(fsdp=2))(quantized(8, 16, 32))


NORMS = {
    "norm": lambda p: p["w"].norm(),
    "global_norm": fzero.optim.global_norm,
    "_foreach_norm": lambda p: torch.stack(torch._foreach_norm([p["w"], p["b"]])),
    "var": lambda p: p["w"].var(),
    "max": lambda p: p["w"].max(),
    "long": lambda p: (p["w"] * 9).long(),
    "bool": lambda p: p["w"].bool(),
    "byte": lambda p: p["w"].clamp(0, 200).byte(),
    "psum": lambda p: fzero.psum(p["w"], "fsdp") * 1,
    "pmean": lambda p: fzero.pmean(p["w"], "fsdp") * 1,
    "pmax": lambda p: fzero.pmax(p["w"], "fsdp") * 1,
    "rows of a scan": lambda p: fzero.scan(lambda c, row: (c + row, None), torch.zeros(32), p["w"])[0],
    "an operand of tiles": lambda p: fzero.tiled(lambda _, w: w * 2, 2)((), p["w"]),
}
"""Functions of a tree with a quantized leaf."""


def test_reductions_collectives_and_casts_are_those_of_the_dequantized_value() -> None:
    mesh, failures = fzero.VirtualMesh(fsdp=2), list[str]()
    params = {"w": quantized(8, 16, 32), "b": torch.ones(16)}
    read = {**params, "w": params["w"].full_tensor()}
    for name, function in NORMS.items():
        expected = function(read)
        for where, got in (
            ("outside", function(fzero.partition(params, mesh))),
            ("plain", function(params)),
            ("step", fzero.simulate(function, mesh, donate=False)(fzero.partition(params, mesh))),
        ):
            wanted = expected * 2 if (name, where) == ("psum", "step") else expected
            if got.dtype != wanted.dtype or not torch.allclose(got.double(), wanted.double(), rtol=1e-5):
                failures.append(f"{name}, {where}: {got} for {wanted}")
    assert not failures


def test_codes_and_scales_are_not_numbers() -> None:
    """A function of each leaf of a tree would compute with bytes."""
    mesh, failures = fzero.VirtualMesh(fsdp=2), list[str]()
    params = fzero.partition({"w": quantized(8, 16, 32)}, mesh)
    leaves: list[Any] = [
        lambda x: x.norm(),
        lambda x: x.double(),
        lambda x: x.to(torch.float32),
        lambda x: x * 0.5,
        lambda x: x.reshape(-1),
        lambda x: x.sum(),
    ]
    for i, function in enumerate(leaves):
        for run in (lambda p: tree.map(function, p), fzero.simulate(lambda p: tree.map(function, p), mesh)):  # noqa: B023
            try:
                run(params)
                failures.append(f"{i} computes")
            except FzeroError as error:
                if "would take its bytes for numbers; take the leaf whole" not in str(error):
                    failures.append(f"{i}: {error}")
    assert not failures
    for kept in (tree.map(torch.clone, params), tree.map(lambda x: x.detach().to("cpu"), params)):
        assert torch.equal(kept["w"].full_tensor(), params["w"].full_tensor())
    whole, _ = tree.flatten(params, is_leaf=lambda x: isinstance(x, Tensor))
    assert torch.equal(whole[0].norm(), params["w"].full_tensor().norm())
