"""Higher-order operators of torch in a step: each is run as plain torch runs it, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._higher_order_ops
from programs import rows
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator

import fzero
from fzero.base.errors import FzeroError
from fzero.base.torch_private_operators import operators
from fzero.tracing.higher_order import RUNS

MESH = fzero.VirtualMesh(fsdp=2)
OP = torch.ops.higher_order
X, W = rows(MESH, width=4), torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4


def cumulate(carry: Any, x: Tensor) -> Any:
    return {"sum": carry["sum"] * 0.5 + x}, (carry["sum"] * x, x.sin())


def by_scan(w: Tensor, x: Tensor, **how: Any) -> Tensor:
    carry, (y, z) = scan(cumulate, {"sum": w[0]}, x @ w, **how)
    return carry["sum"].sum() + (y * z).sum()


def by_flat_scan(w: Tensor, x: Tensor) -> Tensor:
    carry, _, y = OP.scan(lambda a, b, row: [a + row, b * row, a.clone()], [w[0], w[1]], [x @ w], ())
    return carry.sum() + y.square().sum()


def stack(w: Tensor, x: Tensor) -> Tensor:
    """What a map does, by plain functions."""
    return torch.stack([row * w.sum(0) for row in x]).sin().sum()


def fold(w: Tensor, x: Tensor, is_reversed: bool = False, dim: int = 0) -> Tensor:
    """What `by_scan` does, by plain functions."""
    carry, total, at = {"sum": w[0]}, torch.tensor(0.0), list((x @ w).unbind(dim))
    for row in at[::-1] if is_reversed else at:
        carry, (y, z) = cumulate(carry, row)
        total = total + (y * z).sum()
    return carry["sum"].sum() + total


def fold_two(w: Tensor, x: Tensor) -> Tensor:
    a, total = w[0], torch.tensor(0.0)
    for row in x @ w:
        total, a = total + a.square().sum(), a + row
    return a.sum() + total


RUN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "map": (lambda w, x: torch_map(lambda row, w: row * w.sum(0), x, w).sin().sum(), stack),
    "map of captured": (lambda w, x: torch_map(lambda row: row * w.sum(0), x).sin().sum(), stack),
    "scan": (by_scan, fold),
    "scan back": (lambda w, x: by_scan(w, x, reverse=True), lambda w, x: fold(w, x, True)),
    "scan of columns": (lambda w, x: by_scan(w, x[:4], dim=1), lambda w, x: fold(w, x[:4], dim=1)),
    "scan of leaves": (by_flat_scan, fold_two),
    "associative_scan": (
        lambda w, x: associative_scan(torch.add, x @ w, 0, combine_mode="generic").sin().sum(),
        lambda w, x: (x @ w).cumsum(0).sin().sum(),
    ),
    "strict_mode": (lambda w, x: OP.strict_mode(lambda x: (x @ w).sum(), (x,)), lambda w, x: (x @ w).sum()),
    "wrap": (lambda w, x: OP.wrap(lambda x: (x @ w).sum(), x), lambda w, x: (x @ w).sum()),
    "wrap_with_set_grad_enabled": (
        lambda w, x: OP.wrap_with_set_grad_enabled(False, torch.sin, w).sum() + (x @ w).sum(),
        lambda w, x: w.detach().sin().sum() + (x @ w).sum(),
    ),
    "invoke_subgraph": (
        lambda w, x: OP.invoke_subgraph(lambda x, w: ((x @ w).sum(),), "name", x, w)[0],
        lambda w, x: (x @ w).sum(),
    ),
    "nested_compile_region": (
        lambda w, x: torch.compiler.nested_compile_region(lambda x: x @ w)(x).sum(),
        lambda w, x: (x @ w).sum(),
    ),
    "hints_wrapper": (lambda w, x: OP.hints_wrapper(torch.mm, (x, w), {}, hints={}).sum(), lambda w, x: (x @ w).sum()),
    "cond of a number": (
        lambda w, x: torch.cond(True, lambda x: x @ w, lambda x: x, (x,)).sum(),
        lambda w, x: (x @ w).sum(),
    ),
}
"""Name -> a function of a leaf and rows that calls an operator, and the same in plain functions."""


def compile_both() -> dict[str, Any]:
    """Functions that `torch.compile` made outside of the step, as those of `RUN`. It imports inductor for seconds."""
    plain = lambda w, x: (x @ w).sum()  # noqa: E731
    return {
        "compile": (torch.compile(lambda w, x: (x @ w).sum()), plain),
        "compile, full graph": (torch.compile(lambda w, x: (x @ w).sum(), fullgraph=True), plain),
    }


def run(loss: Callable[..., Any]) -> Any:
    step = fzero.simulate(fzero.value_and_grad(lambda p, x: loss(p["w"].full_tensor(), x)), MESH)
    value, grads = step(fzero.partition({"w": W}, MESH), torch.cat([X, X]))
    return value.mean(), fzero.unpartition(grads)["w"]


def test_an_operator_that_runs_is_equal_to_plain_functions() -> None:
    failed = []
    for name, (call, plain) in {**RUN, **compile_both()}.items():
        try:
            w = W.clone().requires_grad_()
            expected = plain(w, X)
            expected.backward()
            torch.testing.assert_close(run(call), (expected.detach(), w.grad), rtol=1e-5, atol=1e-5)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def test_a_map_that_writes_into_its_operands_is_refused() -> None:
    """torch 2.15 says which operands these are."""
    with pytest.raises(FzeroError, match="the function of map writes into its operands"):
        RUNS["map_impl"](lambda x: (x.mul_(2),), (X,), (), mutated_arg_indices="0")


NAMED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "cond": (lambda w, x: torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, (x,)).sum(), "torch.where"),
    "while_loop": (
        lambda w, x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ w), (torch.tensor(0), x))[1].sum(),
        "fzero.scan",
    ),
    "out_dtype": (lambda w, x: OP.out_dtype(torch.ops.aten.mm.default, torch.int32, x, w).sum(), "cast the operands"),
    "print": (lambda w, x: OP.print("{}", x) or (x @ w).sum(), "outside of the step"),
}


def test_any_other_operator_is_refused_by_name_at_the_users_line() -> None:
    """Those above as users call them, and all that torch has, whatever their arguments."""
    taken = {*RUNS, "flex_attention", "custom_function_call"}
    calls = {name: (call, way_out) for name, (call, way_out) in NAMED.items()}
    for name, operator in operators.items():
        if name not in taken | calls.keys():
            calls[name] = (lambda w, x, operator=operator: HigherOrderOperator.__call__(operator, x, w), "")
    assert len(calls) > 25
    failed = []
    for name, (call, way_out) in calls.items():
        with warnings.catch_warnings(), pytest.raises(FzeroError) as caught:
            warnings.simplefilter("ignore")
            run(call)
        said = str(caught.value)
        if f"operator {name}" not in said or __file__ not in said or way_out not in said:
            failed.append(f"{name}: {said}")
    assert not failed, "\n".join(failed)


def test_a_compiled_function_that_a_step_has_called_is_still_compiled_outside() -> None:
    """torch's compiler would remember that it could not compile the function in a trace."""
    compiled = list[Any]()

    def count(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    function = torch.compile(lambda w, x: (x @ w).sum(), backend=count, fullgraph=True)
    run(function)
    assert not compiled
    torch.testing.assert_close(function(W, X), (X @ W).sum())
    assert len(compiled) == 1
