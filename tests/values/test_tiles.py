"""`fzero.tiled` against the function of all rows, on plain tensors and in steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import measure_peak
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import tree

ROWS, WIDTH, INSIDE = 12, 4, 64
WIDE = torch.float64


def params() -> Any:
    torch.manual_seed(0)
    shapes = {"up": (WIDTH, INSIDE), "b": (INSIDE,), "down": (INSIDE, WIDTH)}
    return {"mlp": {name: 0.3 * torch.randn(shape, dtype=WIDE) for name, shape in shapes.items()}}


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, WIDTH, dtype=WIDE, generator=torch.Generator().manual_seed(1))


def mlp(p: Any, x: Tensor) -> Tensor:
    return functional.gelu(x @ p["up"] + p["b"]) @ p["down"]


def loss_of(fn: Any) -> Any:
    return lambda p, x: (x + fn(p["mlp"], x.sin())).square().mean()


def assert_close(got: Any, expected: Any) -> None:
    """Equal but for the order of sums over rows."""
    torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_results_and_gradients_are_those_of_all_rows(chunks: int, dim: int) -> None:
    expected = fzero.value_and_grad(loss_of(mlp))(params(), batch())
    assert_close(fzero.value_and_grad(loss_of(fzero.tiled(mlp, chunks, dim)))(params(), batch()), expected)


@pytest.mark.parametrize("world, stage", [(1, 1), (3, 2), (3, 3)])
def test_a_step_is_the_step_without_tiles(world: int, stage: int) -> None:
    """With 5 rows for each rank: parts of 2, 2 and 1."""
    mesh, x = fzero.VirtualMesh(fsdp=world), batch(5 * world)
    p = fzero.partition(params(), mesh)
    plain, tiled = (
        fzero.simulate(fzero.value_and_grad(loss_of(fn)), mesh, stage=stage) for fn in (mlp, fzero.tiled(mlp, 3))
    )
    assert_close(fzero.unpartition(tiled(p, x)), fzero.unpartition(plain(p, x)))
    assert [(each.op, each.nbytes) for each in tiled.trace(p, x).comm()] == [
        (each.op, each.nbytes) for each in plain.trace(p, x).comm()
    ]


def test_trees_go_in_and_come_out() -> None:
    def fn(p: Any, x: Tensor, more: Any) -> Any:
        return {"sum": x @ p["w"] + more[0], "norms": (x.norm(dim=1), more[0].sum(1, keepdim=True))}

    w, x, more = (torch.randn(n, WIDTH, dtype=WIDE) for n in (WIDTH, 7, 7))
    given = {"w": w}, x, [more]
    assert_close(fzero.tiled(fn, 3)(*given), fn(*given))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_peak_falls_with_the_rows_of_a_part(stage: int) -> None:
    """Inside of the function 512 rows have 3 x 512 x 64 float64, 768 KiB; those of a part an eighth. Neither the loop
    forward nor the one back keeps a copy of the weights, or anything but arguments and results, for each part."""
    mesh, x = fzero.VirtualMesh(fsdp=2), batch(1024)
    p = fzero.partition(params(), mesh)
    peaks = {}
    for chunks in (1, 8, 32):
        step = fzero.simulate(fzero.value_and_grad(loss_of(fzero.tiled(mlp, chunks))), mesh, stage=stage)
        program, peaks[chunks] = measure_peak(step, p, x)
        assert program.memory().peak == peaks[chunks]
    inside, weights = 3 * 512 * INSIDE * 8, 9 * INSIDE * 8
    assert peaks[1] > 3 * inside
    assert peaks[8] < peaks[1] - 2 * inside
    assert peaks[32] < peaks[8] + weights  # 32 copies of the weights would be more


def test_transforms_of_torch_func_compose() -> None:
    p, x = params(), batch(4)
    plain, tiled = loss_of(mlp), loss_of(fzero.tiled(mlp, 3))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_close(transform(lambda b: tiled({"mlp": {**p["mlp"], "b": b}}, x))(p["mlp"]["b"]),
                     transform(lambda b: plain({"mlp": {**p["mlp"], "b": b}}, x))(p["mlp"]["b"]))  # fmt: skip
    each = torch.func.vmap(torch.func.grad(tiled), in_dims=(None, 0))(p, x[:, None].expand(4, 3, 3, WIDTH))
    assert_close(each, torch.func.vmap(torch.func.grad(plain), in_dims=(None, 0))(p, x[:, None]))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p, x: fzero.tiled(mlp, 0)(p, x), "tiled: chunks: is 0, for 12 rows"),
        (lambda p, x: fzero.tiled(mlp, 13)(p, x), "tiled: chunks: is 13, for 12 rows"),
        (lambda p, x: fzero.tiled(mlp, 2.0)(p, x), "chunks: is 2.0; give a whole number"),  # type: ignore[arg-type]
        (lambda p, x: fzero.tiled(mlp, 2, dim=3)(p, x), "tiled: argument 0: has 3 dimensions, and no dim 3"),
        (lambda p, x: fzero.tiled(mlp, 2)(p), "tiled: has no argument"),
        (lambda p, x: fzero.tiled(mlp, 2)(p, 1.0), "tiled: argument 0: is a float"),
        (lambda p, x: fzero.tiled(mlp, 2)(p, x, x[1:]), "argument 1: has size 11 along dim 0, argument 0 has 12"),
        (lambda p, x: fzero.tiled(lambda p, x: x.sum(), 2)(p, x), "tiled: result: has 0 dimensions, and no dim 0"),
        (lambda p, x: fzero.tiled(lambda p, x: x[1:], 2)(p, x), "result: has size 5 along dim 0, of a part of 6"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(fzero.FzeroError, match=message):
        call(params()["mlp"], batch())


def test_tiles_in_tiles_are_the_function_under_every_transform() -> None:
    """With leaves that are streamed."""
    draw, mesh = torch.Generator().manual_seed(0), fzero.VirtualMesh(fsdp=2)
    plain = {"w": torch.rand(4, 4, generator=draw, dtype=torch.float64)}
    x, failures = torch.rand(8, 4, generator=draw, dtype=torch.float64), list[str]()

    def nested(tiled: Any) -> Any:
        def outer(p: Any, h: Any) -> Any:
            return tiled(lambda p, h: torch.cos(h @ p["w"]), 2)(p, h).sin()

        return tiled(outer, 2)

    transforms: dict[str, Any] = {
        "jvp by rows": lambda f, p, x: torch.func.jvp(lambda h: f(p, h), (x,), (x,))[1],
        "jvp by leaves": lambda f, p, x: torch.func.jvp(lambda q: f(q, x), (p,), (p,))[1],
        "vjp": lambda f, p, x: torch.func.vjp(lambda h: f(p, h), x)[1](x)[0],
        "grad": lambda f, p, x: fzero.grad(lambda p: f(p, x).square().mean())(p),
        "grad of jvp": lambda f, p, x: fzero.grad(
            lambda p: torch.func.jvp(lambda h: f(p, h), (x,), (x,))[1].square().mean()
        )(p),
        "remat": lambda f, p, x: fzero.grad(lambda p: fzero.remat(f)(p, x).square().mean())(p),
        "scan": lambda f, p, x: fzero.grad(
            lambda p: fzero.scan(lambda h, _: (f(p, h), None), x, length=2)[0].square().mean()
        )(p),
    }
    for name, transform in transforms.items():
        expected = transform(nested(lambda fn, chunks: fn), plain, x)
        step = fzero.simulate(lambda p, x: transform(nested(fzero.tiled), p, x), mesh, chunk=64)  # noqa: B023
        got = fzero.unpartition(step(fzero.partition(plain, mesh), x))
        pairs = zip(fzero.tree.leaves(got), fzero.tree.leaves(expected))
        failures += [name for a, b in pairs if not torch.allclose(a, b, rtol=1e-12)]
    assert not failures
