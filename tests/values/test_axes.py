"""Collectives over named axes and model axes, on virtual ranks: each against its definition and its transpose, and
steps that compute parts of a model on each rank against the same functions on one device."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from axes import (
    ADAMW,
    COLLECTIVES,
    EXAMPLES,
    F64,
    WEIGHTS,
    WIDTH,
    Collective,
    block,
    loss_of,
    mlp,
    on_a_sequence,
    on_ranks,
    rows_of,
    train,
)
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, tree

MESHES = {
    "fsdp": VirtualMesh(fsdp=2),
    "a": VirtualMesh(fsdp=1, a=3),
    "b": VirtualMesh(b=2, fsdp=2),
    ("a", "fsdp"): VirtualMesh(fsdp=2, a=3),
    ("b", "a"): VirtualMesh(b=2, fsdp=1, a=2),
    ("b", "fsdp", "a"): VirtualMesh(b=2, fsdp=2, a=2),
}
"""Axes, in any order -> a mesh that has them."""


def define(name: str, row: list[Tensor]) -> list[Tensor]:
    """What each rank gets, by the definition of a collective of the tensors of a row of ranks."""
    n = len(row)
    total = sum(row[1:], row[0])
    each: dict[str, Callable[[int], Tensor]] = {
        "psum": lambda rank: total,
        "pmean": lambda rank: total / n,
        "all_gather": lambda rank: torch.cat(row),
        "all_gather of dim 1": lambda rank: torch.cat(row, 1),
        "psum_scatter": lambda rank: total.chunk(n)[rank],
        "psum_scatter of dim 1": lambda rank: total.chunk(n, 1)[rank],
        "all_to_all": lambda rank: torch.cat([x.chunk(n, 1)[rank] for x in row]),
        "all_to_all of one dim": lambda rank: torch.cat([x.chunk(n)[rank] for x in row]),
        "ppermute": lambda rank: row[rank - 1] if rank else torch.zeros_like(row[0]),
        "ppermute around": lambda rank: row[(rank + 1) % n],
    }
    return [each[name](rank) for rank in range(n)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_collective_is_what_its_name_says(axes: str | tuple[str, ...]) -> None:
    mesh, wrong = MESHES[axes], []
    x = rows_of(mesh)
    for name, collective in COLLECTIVES.items():
        got = on_ranks(lambda x, c=collective: c(x, axes) + 0 * fzero.axis_index(mesh.names), mesh, x)
        parts = x.chunk(mesh.size())
        expected: list[Any] = [None] * mesh.size()
        for row in mesh.rows(mesh.join((axes,) if isinstance(axes, str) else axes)):
            for number, value in zip(row, define(name, [parts[i] for i in row])):
                expected[number] = value
        if not torch.allclose(got, torch.cat(expected), rtol=1e-12):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_transpose_is_the_adjoint(axes: str | tuple[str, ...]) -> None:
    """`<A x, y> = <x, At y>`, added up over all ranks."""
    mesh, wrong = MESHES[axes], []
    x, y = rows_of(mesh), rows_of(mesh, 24 * 8, seed=1)
    for name, collective in COLLECTIVES.items():

        def products(x: Tensor, y: Tensor, collective: Collective = collective) -> Any:
            made, pull = torch.func.vjp(lambda x: collective(x, axes), x)
            other = y.reshape(-1)[: made.numel()].view(made.shape)
            (back,) = pull(other)
            return fzero.psum((made * other).sum(), mesh.names), fzero.psum((x * back).sum(), mesh.names)

        forward, backward = on_ranks(products, mesh, x, y)
        if not torch.allclose(forward, backward, rtol=1e-11):
            wrong.append((name, float(forward), float(backward)))
    assert not wrong


def test_tangents_batches_and_empty_parts() -> None:
    mesh, wrong = VirtualMesh(fsdp=3), []
    x, dx = torch.randn(9, 6, 3, dtype=F64), torch.randn(9, 6, 3, dtype=F64)

    def several(x: Tensor, dx: Tensor) -> list[Tensor]:
        found = []
        for name, collective in COLLECTIVES.items():
            tangent = torch.func.jvp(lambda x, c=collective: c(x, "fsdp"), (x,), (dx,))[1]
            batched = [
                torch.func.vmap(lambda x, c=collective: c(x, "fsdp"), at, at)(x.movedim(-1, at)) for at in (0, 2)
            ]
            alone = [collective(x.select(-1, i), "fsdp") for i in range(3)]
            empty = collective(x[:, :, :0], "fsdp")
            found += [(tangent - collective(dx, "fsdp")).abs().sum(), empty.sum()]
            found += [(one - torch.stack(alone, at)).abs().sum() for at, one in zip((0, 2), batched)]
            if empty.numel():
                wrong.append(name)
        return found

    assert on_ranks(lambda x, dx: fzero.psum(torch.stack(several(x, dx)).sum(), "fsdp"), mesh, x, dx) == 0 and not wrong


def test_extremes_share_their_cotangent() -> None:
    mesh = VirtualMesh(fsdp=2, a=2)
    x = torch.tensor([3.0, 1.0, 1.0, 2.0]).repeat_interleave(2)
    for extreme, best in ((fzero.pmin, 1.0), (fzero.pmax, 3.0)):
        value, grad = on_ranks(
            lambda x, e=extreme: (
                e(x, ("fsdp", "a")),
                torch.func.vjp(lambda x: e(x, ("a", "fsdp")), x)[1](x * 0 + 1)[0],
            ),
            mesh,
            x,
        )
        assert value.tolist() == [best] * 2
        assert grad.tolist() == ((x == best) * 4.0 / (x == best).sum() * 2).tolist()


def test_outside_of_a_step_there_is_one_rank() -> None:
    x = torch.arange(6.0).view(2, 3)
    for collective in COLLECTIVES.values():
        same = collective(x, ("tp", "fsdp"))
        assert same is x or (collective is COLLECTIVES["ppermute"] and not same.any()) or torch.equal(same, x)
    assert fzero.axis_size("tp") == 1 and fzero.axis_index(("tp", "sp")) == 0


def test_axes_together_are_numbered_row_by_row() -> None:
    mesh = VirtualMesh(b=2, fsdp=1, a=3)
    for axes in (("b", "a"), ("a", "b"), "b+a"):
        assert on_ranks(lambda x, axes=axes: fzero.axis_index(axes), mesh, torch.ones(6)).tolist() == list(range(6))
    with pytest.raises(FzeroError, match=re.escape("mesh axes: are ('a', 'b', 'a'); name one or more")):
        on_ranks(lambda x: fzero.psum(x, ("a", "b", "a")), mesh, torch.ones(6))
    with pytest.raises(FzeroError, match="mesh axis 'c': this mesh has"):
        on_ranks(lambda x: fzero.psum(x, ("a", "c")), mesh, torch.ones(6))
    with pytest.raises(FzeroError, match=r"mesh axis 'a\+b': has a '\+', which joins axes"):
        VirtualMesh(**{"a+b": 2})


REFUSED: dict[str, tuple[Collective, str]] = {
    "a dim that is not there": (lambda x, axis: fzero.all_gather(x, axis, 2), r"dim: is 2, of a tensor \[24, 24\]"),
    "rows that do not divide": (
        lambda x, axis: fzero.psum_scatter(x[:5], axis),
        r"psum_scatter: cuts dim 0 of \[5, 24\] into 2 blocks, .* along 'fsdp', and 5 does not divide by 2",
    ),
    "columns that do not divide": (lambda x, axis: fzero.all_to_all(x[:, :3], axis, 1, 0), r"all_to_all: cuts dim 1 "),
    "a position that is not there": (
        lambda x, axis: fzero.ppermute(x, axis, [(0, 2)]),
        r"names others than the 2 ranks",
    ),
    "bools": (lambda x, axis: fzero.psum_scatter(x > 0, axis), "psum_scatter: the result cannot have the dtype"),
    "two to one": (lambda x, axis: fzero.ppermute(x, axis, [(0, 1), (1, 1)]), "has a source or a target twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_collective_cannot_do_is_refused(case: str) -> None:
    use, words = REFUSED[case]
    with pytest.raises(FzeroError, match=words):
        on_ranks(lambda x: use(x, "fsdp"), VirtualMesh(fsdp=2), rows_of(VirtualMesh(fsdp=2)))


def test_bytes_are_those_of_the_closed_form() -> None:
    mesh = VirtualMesh(fsdp=1, a=4)

    def each(x: Tensor) -> list[Tensor]:
        return [COLLECTIVES[name](x, "a").sum() for name in ("all_gather", "psum_scatter", "all_to_all", "ppermute")]

    program = fzero.simulate(each, mesh, data=mesh.names).trace(rows_of(mesh))
    size = 24 * 24 * 8
    sent = {entry.op: entry.nbytes for entry in program.comm() if entry.nbytes > 64}
    assert sent == {"all_gather": 4 * size, "psum_scatter": size, "all_to_all": size, "ppermute": 4 * size}
    assert "over a" in str(program)


# model axes

GRID = VirtualMesh(fsdp=2, tp=2)


def microbatches(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    def sums(params: Any, x: Tensor) -> Any:
        return forward(params, x).square().sum(), torch.tensor(x.numel())

    return lambda params, x: (params, *fzero.accumulate(sums, 2)(params, x))


def looped(params: Any, x: Tensor) -> Tensor:
    return fzero.scan(lambda x, _: (mlp(params, x), None), x, None, length=3)[0]


STEPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "tensor parallel": (train(mlp), True),
    "sequence parallel": (train(on_a_sequence), True),
    "recomputed": (train(fzero.remat(mlp)), True),
    "in a loop": (train(looped), True),
    "microbatches": (microbatches(on_a_sequence), False),
    "second derivatives": (
        lambda params, x: (
            params,
            fzero.grad(lambda p: sum(g.square().sum() for g in tree.leaves(fzero.grad(loss_of(mlp))(p, x))))(params),
        ),
        False,
    ),
}
"""A step, and whether it takes the state of `ADAMW`."""


@pytest.mark.parametrize(("name", "stage"), [*itertools.product(STEPS, [3]), ("tensor parallel", 1), ("in a loop", 2)])
def test_a_step_on_a_model_axis_is_that_of_one_device(name: str, stage: int) -> None:
    step, has_state = STEPS[name]
    state = (WEIGHTS, ADAMW.init(WEIGHTS)) if has_state else (WEIGHTS,)
    for mesh in (GRID, VirtualMesh(tp=4, fsdp=1)):
        options = {"ranks": mesh, "data": ("fsdp",), "stage": stage, "steps": 3, "rtol": 1e-12, "atol": 1e-13}
        fzero.check_equivalence(step, state, (EXAMPLES,), **options)


def test_new_lengths_need_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    step = fzero.simulate(lambda params, x: fzero.value_and_grad(loss_of(mlp))(params, x), GRID, data=("fsdp",))
    held = fzero.partition(WEIGHTS, GRID)
    with caplog.at_level("INFO", "fzero"):
        for rows in (16, 8, 12, 4):
            loss, grads = step(held, EXAMPLES[:rows])
            right = fzero.value_and_grad(loss_of(mlp))(WEIGHTS, EXAMPLES[:rows])
            torch.testing.assert_close((loss, tree.map(lambda g: g.full_tensor(), grads)), right)
    assert sum("is traced" in each.message for each in caplog.records) == 1


def test_draws_are_the_same_where_values_are() -> None:
    def step(x: Tensor, params: Any) -> Any:
        wide = x.repeat(1, 16)
        return F.dropout(wide, 0.5), F.dropout(wide @ block(params["wide"], 0).T, 0.5), torch.rand(64)

    torch.manual_seed(0)
    params = fzero.partition({"wide": torch.ones(128, 16 * WIDTH, dtype=F64)}, GRID)
    stream, heads, drawn = fzero.simulate(step, GRID, data=("fsdp",))(torch.ones(8, WIDTH, dtype=F64), params)
    assert stream.shape == (8, 64) and drawn.shape == (128,)  # equal along tp, else they are refused
    masks = (heads == 0).view(4, -1)
    assert not any(torch.equal(masks[i], masks[j]) for i, j in itertools.combinations(range(4), 2))
    assert not torch.equal(stream[:4] == 0, stream[4:] == 0) and not torch.equal(drawn[:64], drawn[64:])


def part(params: Any, x: Tensor) -> Tensor:
    return (x @ block(params["up"], 0).T).square().mean()


MISTAKES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a loss that is a part": (
        lambda params, x: fzero.grad(part)(params, x),
        r"value_and_grad: the value: differs along the model axis 'tp', .*fzero.psum\(x, 'tp'\)",
    ),
    "a result that is a part": (part, r"result '': differs along the model axis 'tp'.*test_axes.py"),
    "a sum of what is the same": (
        lambda params, x: fzero.psum(x, "tp").mean(),
        r"psum: the value \[8, 4\] is the same on all ranks along the model axis 'tp'; leave the collective out",
    ),
    "a sum of state": (
        lambda params, x: fzero.psum(params["up"], "tp"),
        r"psum: the value \[12, 4\] is the same on all ranks along the model axis 'tp'",
    ),
    "a gather of what is the same": (lambda params, x: fzero.all_gather(x, ("fsdp", "tp")), "all_gather: the value"),
    "an axis that nothing uses": (
        lambda params, x: (x @ params["up"].T).mean(),
        r"mesh axis 'tp': is a model axis of VirtualMesh\(fsdp=2, tp=2\), and nothing that <lambda> computes differs",
    ),
    "state that is a part": (
        lambda params, x: {**params, "up": params["up"] * fzero.axis_index("tp")},
        r"up: result 'up' is state but differs between ranks.*join the parts of all ranks along 'tp' first",
    ),
    "a collective of state": (
        lambda params, x: fzero.all_gather(params["up"], "tp"),
        "up: all_gather over 'tp': it is state, which is the same on all ranks; compute with it first",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_on_a_model_axis_are_named(mistake: str) -> None:
    step, words = MISTAKES[mistake]
    with pytest.raises(FzeroError, match=words):
        fzero.simulate(step, GRID, data=("fsdp",))(fzero.partition(WEIGHTS, GRID), EXAMPLES)


def test_the_first_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "axes.md").read_text()
    exec(compile(page.split("```python\n")[1].split("```")[0], "axes.md", "exec"), {})
    assert "over tp" in capsys.readouterr().out
