"""`ragged_all_to_all` on virtual ranks: against its definition and its transpose, and where rows overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import F64, ragged_rows
from torch import Tensor

import fzero
from fzero import FzeroError, VirtualMesh, tree
from fzero.parallel import ragged_all_to_all
from fzero.pipeline import Pipeline

MESHES = {
    "fsdp": VirtualMesh(fsdp=2),
    "a": VirtualMesh(fsdp=1, a=3),
    ("a", "fsdp"): VirtualMesh(fsdp=2, a=2),
    ("b", "fsdp", "a"): VirtualMesh(b=2, fsdp=2, a=2),
}
"""Axes -> a mesh that has them."""


def expect(mesh: VirtualMesh, axes: Any, x: Tensor, sizes: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """What all ranks get, one after the other, by the definition."""
    rows: list[Any] = [None] * mesh.size()
    taken: list[Any] = [None] * mesh.size()
    for row in mesh.rows(mesh.join((axes,) if isinstance(axes, str) else axes)):
        cut = [x[number].split([*sizes[number], len(x[number]) - int(sizes[number].sum())]) for number in row]
        for to, number in enumerate(row):
            came = torch.cat([each[to] for each in cut])
            rows[number] = torch.cat([came, came.new_zeros(max(0, bound - len(came)), *came.shape[1:])])[:bound]
            taken[number] = torch.stack([sizes[other][to] for other in row])
    return torch.cat(rows), torch.cat(taken)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_rows_go_where_sizes_say_and_cotangents_back(axes: Any) -> None:
    """`<A x, y> = <x, At y>`, added up over all ranks, with and without room for all rows; tangents; batches."""
    mesh = MESHES[axes]
    x, sizes = ragged_rows(mesh, axes)
    for bound in (24, 5):
        y = torch.randn(mesh.size() * bound, 3, dtype=F64)

        def several(x: Tensor, y: Tensor, sizes: Tensor, bound: int = bound) -> Any:
            def run(x: Tensor) -> Tensor:
                return ragged_all_to_all({"x": x}, sizes[0], axes, bound, cut=True)[0]["x"]

            made, pull = torch.func.vjp(run, x)
            tangent = torch.func.jvp(run, (x,), (x + 1,))[1]
            batched = torch.func.vmap(run, 1, 1)(x)
            products = (made * y).sum(), (x * pull(y)[0]).sum()
            same = fzero.pmax(
                torch.stack([(tangent - run(x + 1)).abs().amax(), (batched - made).abs().amax()]), mesh.names
            )
            return (
                made,
                ragged_all_to_all(x, sizes[0], axes, 24)[1],
                fzero.psum(torch.stack(products), mesh.names),
                same,
            )

        made, taken, (forward, backward), same = fzero.simulate(several, mesh, data=mesh.names)(
            x.flatten(0, 1), y, sizes
        )
        torch.testing.assert_close((made, taken), expect(mesh, axes, x, sizes, bound), rtol=0, atol=0)
        torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)
        assert not same.any()


def exchange(x: Tensor, sizes: Tensor) -> Tensor:
    return ragged_all_to_all(x, sizes, "fsdp", 5)[0]


def differentiated(x: Tensor, sizes: Tensor) -> Tensor:
    return fzero.value_and_grad(lambda x: fzero.remat(exchange)(x, sizes).square().sum())(x)[1]


def looped(x: Tensor, sizes: Tensor) -> Tensor:
    def turn(carry: Tensor, _: Any) -> Any:
        return carry + exchange(x, sizes).sum(), None

    return fzero.grad(lambda x: fzero.scan(turn, x[0] * 0, None, length=3)[0].sum())(x)


X, EVEN = torch.arange(6.0).view(6, 1), torch.tensor([2, 1, 1, 2])


@pytest.mark.parametrize("fn", [exchange, differentiated, looped], ids=lambda fn: fn.__name__)
def test_rows_that_do_not_fit_are_an_error_of_the_next_call(fn: Any) -> None:
    step = fzero.simulate(fn, VirtualMesh(fsdp=2))
    for wrong, words in (
        (
            [3, 0, 3, 0],
            "ragged_all_to_all over 'fsdp': 6 rows come to a rank, and its bound is 5; give a larger bound .*capacity=",
        ),
        (
            [2, 2, 0, 0],
            "over 'fsdp': sizes: has a number below 0, or more rows together than the 3 of x; give how many",
        ),
        ([2, -1, 0, 0], "over 'fsdp': sizes: has a number below 0"),
    ):
        step(X, EVEN)
        step(X, torch.tensor(wrong))
        with pytest.raises(FzeroError, match=words):
            step(X, EVEN)
    step(X, EVEN)


def test_a_program_from_a_file_has_its_flags(tmp_path: Path) -> None:
    step = fzero.simulate(exchange, VirtualMesh(fsdp=2), passes=())
    traced, restored = (
        Pipeline(exchange, step._pipeline.on, (), lambda on, program: program, cache=tmp_path) for _ in "ab"
    )
    given = [X[:3], EVEN[:2]], tree.flatten((X, EVEN))[1]
    traced.prepare(*given)
    restored.program = None  # type: ignore[assignment]  # no trace
    assert restored.prepare(*given).noted == traced.prepare(*given).noted != ()


def test_bytes_are_those_of_the_bound_and_new_lengths_need_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    def there_and_back(x: Tensor, sizes: Tensor) -> Tensor:
        rows, taken = ragged_all_to_all(x, sizes, "fsdp", 2 * x.shape[0])
        return ragged_all_to_all(rows, taken, "fsdp", x.shape[0])[0]

    step = fzero.simulate(there_and_back, VirtualMesh(fsdp=2))
    sent = [entry.nbytes for entry in step.trace(X, EVEN).comm() if entry.op == "ragged_all_to_all"]
    assert sent == [3 * 4] * 2
    with caplog.at_level("INFO", "fzero"):
        for rows in (3, 5, 4):
            x = torch.randn(2 * rows, 2)
            assert torch.equal(step(x, torch.tensor([rows, 0, 1, rows - 1])), x)
    assert sum("is traced" in each.message for each in caplog.records) <= 2


def test_outside_of_a_step_there_is_one_rank() -> None:
    rows, taken = ragged_all_to_all(X, torch.tensor([4]), "ep", 5)
    assert rows.tolist() == [[0.0], [1.0], [2.0], [3.0], [0.0]] and taken.tolist() == [4]
    with pytest.raises(FzeroError, match="6 rows come to a rank, and its bound is 5"):
        ragged_all_to_all(X, torch.tensor([6]), "ep", 5)
    for args, words in (
        ((X, torch.tensor([1.0]), "ep", 2), "sizes: is torch.float32"),
        ((X, torch.tensor([1, 1]), "ep", 2), "for each of the 1 ranks along 'ep'"),
        ((X, torch.tensor([1]), "ep", -1), "bound: is -1"),
        (({"a": X, "b": X[:2]}, torch.tensor([1]), "ep", 1), "x b: is"),
    ):
        with pytest.raises(FzeroError, match=words):
            ragged_all_to_all(*args)  # type: ignore[arg-type]
    with pytest.raises(FzeroError, match="sizes: is a batch of vmap"):
        torch.func.vmap(lambda sizes: ragged_all_to_all(X, sizes, "ep", 6)[0])(torch.tensor([[1], [2]]))
