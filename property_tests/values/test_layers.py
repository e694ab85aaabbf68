"""Laws of `fzero.scan` over layers: a loop, and the loop of its backward pass, are the layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import fzero
from fzero import tree
from fzero.testing.steps import WIDE
from fzero.values.quantized import is_quantized
from property_tests.laws import slow

WIDTH = 4


def _write_rows(h: Tensor, q: Any) -> Tensor:
    y = h * 1
    y[:, 1] = q["b"][0]
    y[:, 2:] *= q["n"][:2]
    return y


def _swap_halves(h: Tensor, q: Any) -> Tensor:
    a, b = h.chunk(2, -1)
    return torch.cat([b * q["s"], a], -1)


def _attend(h: Tensor, q: Any) -> Tensor:
    return functional.scaled_dot_product_attention((h @ q["w"])[None, None], h[None, None], h[None, None])[0, 0]


PIECES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "dense": lambda h, q: h @ q["w"],
    "transposed": lambda h, q: (q["w"] @ h.T).T,
    "linear": lambda h, q: functional.linear(h, q["w"], q["b"]),
    "gated": lambda h, q: h * torch.sigmoid(h * q["n"]),
    "norm": lambda h, q: functional.layer_norm(h, (WIDTH,), q["n"], q["b"]),
    "tanh": lambda h, q: torch.tanh(h) * q["s"],
    "relu in place": lambda h, q: functional.relu(h + q["b"], inplace=True),
    "written rows": _write_rows,
    "swapped halves": _swap_halves,
    "attention": _attend,
    "masked": lambda h, q: torch.where(h > 0, h, h * q["s"]),
    "norm of a leaf": lambda h, q: h / (1 + q["w"].square().sum()) + q["w"].amax(),
    "leaf beside itself": lambda h, q: h @ (q["w"] * q["w"].sin()),
    "cut": lambda h, q: h.detach() * q["s"],
    "two views": lambda h, q: h.view(-1)[: h.numel()].view_as(h) * h.flip(0),
    "in place of a view": lambda h, q: (h * q["n"]).T.mul_(0.5).T,
    "softmax": lambda h, q: torch.softmax(h + q["b"], -1),
    "narrow": lambda h, q: (h.float() @ q["w"].float()).to(WIDE),
    "of ranks": lambda h, q: h - fzero.pmean(h.mean(), "fsdp") * q["s"],
}


@st.composite
def loops(draw: st.DrawFn) -> tuple[list[str], int, int, dict[str, Any]]:
    """`(pieces of a layer, layers, ranks, options)`."""
    pieces = draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4))
    options = {
        "stage": draw(st.sampled_from([1, 2, 3])),
        "donate": draw(st.booleans()),
        "policy": draw(st.sampled_from(["no region", "dots", None])),
        "begins": draw(st.sampled_from(["batch", "parameter"])),
        "rows": draw(st.booleans()),
        "microbatches": draw(st.sampled_from([None, 2])),
    }
    return pieces, draw(st.integers(1, 4)), draw(st.integers(1, 3)), options


def one_by_one(body: Any, carry: Any, xs: Any, *, layers: Any) -> Any:
    ys = []
    for i, layer in enumerate(layers):
        carry, y = body(carry, None if xs is None else xs[i], layer)
        ys.append(y)
    return carry, torch.stack(ys)


def make_arguments(case: Any) -> tuple[Any, Tensor]:
    """Parameters and a batch."""
    pieces, count, ranks, _ = case
    generator = torch.Generator().manual_seed(len(pieces))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=WIDE) * 0.6

    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "n": (WIDTH,), "s": ()}
    params = {
        "blocks": [{name: numbers(*shape) for name, shape in shapes.items()} for _ in range(count)],
        "first": {"w": numbers(WIDTH, WIDTH)},
    }
    return params, numbers(4 * ranks, WIDTH)


def make_loss(case: Any) -> Callable[[Any, Any, Tensor], Tensor]:
    """`loss(scan, params, x)`."""
    pieces, count, _, options = case

    def layer(h: Tensor, q: Any) -> Tensor:
        for piece in pieces:
            h = 0.5 * h + PIECES[piece](h, q)
        return h

    wrapped = layer if options["policy"] == "no region" else fzero.remat(layer, options["policy"])

    def loss(scan: Any, p: Any, x: Tensor) -> Tensor:
        def body(h: Tensor, row: Any, q: Any) -> Any:
            h = wrapped(h if row is None else h + row, q)
            return h, h.square().mean()

        start = x @ p["first"]["w"] if options["begins"] == "parameter" else x
        xs = (x @ p["first"]["w"])[None].expand(count, -1, -1) * 0.1 if options["rows"] else None
        h, ys = scan(body, start, xs, layers=p["blocks"])
        return h.square().sum() + ys.sum()

    return loss


@given(loops())
@slow
def test_a_loop_over_layers_is_its_layers(case: Any) -> None:
    _, _, ranks, options = case
    params, x = make_arguments(case)
    loss, mesh = make_loss(case), fzero.VirtualMesh(fsdp=ranks)

    def run(scan: Any) -> Any:
        def step(p: Any, x: Tensor) -> Any:
            if options["microbatches"] is not None:
                return fzero.accumulate(lambda p, x: (loss(scan, p, x), len(x)), options["microbatches"])(p, x)
            value, grads = fzero.value_and_grad(lambda p: loss(scan, p, x))(p)
            return value, tree.map(lambda leaf, grad: leaf - 0.1 * grad, p, grads)

        sharded = fzero.simulate(step, mesh, stage=options["stage"], donate=options["donate"])
        return fzero.unpartition(sharded(fzero.partition(params, mesh), x))

    torch.testing.assert_close(run(fzero.scan), run(one_by_one), rtol=1e-9, atol=1e-9)


@given(loops(), st.booleans(), st.sampled_from([8, 4]))
@slow
def test_quantized_layers_are_their_dequantized_values(case: Any, is_loop: bool, bits: int) -> None:
    _, _, ranks, options = case
    params, x = make_arguments(case)
    loss, mesh, scan = make_loss(case), fzero.VirtualMesh(fsdp=ranks), fzero.scan if is_loop else one_by_one
    held = fzero.quantize(params, bits=bits, block=6, where=r"blocks\.\d+\.w")
    leaves, treedef = tree.flatten(held, is_leaf=is_quantized)
    dense = [nn.Parameter(x.full_tensor(), requires_grad=False) if is_quantized(x) else x for x in leaves]

    def step(p: Any, x: Tensor) -> Any:
        if options["microbatches"] is not None:
            return fzero.accumulate(lambda p, x: (loss(scan, p, x), len(x)), options["microbatches"])(p, x)
        return fzero.value_and_grad(lambda p: loss(scan, p, x))(p)

    sharded = fzero.simulate(step, mesh, stage=options["stage"])
    got, expected = (
        tree.leaves(fzero.unpartition(sharded(fzero.partition(each, mesh), x)))
        for each in (held, tree.unflatten(treedef, dense))
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
