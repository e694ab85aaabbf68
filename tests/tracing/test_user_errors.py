"""Errors of torch while a step is traced: each becomes an `FzeroError` with the user's line and a way out."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as with_gradients
from torch.nn import functional as F

import fzero
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=2)
Change = Callable[[Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone, as a program has it that was written for DistributedDataParallel; that of
    a trainer which another test has left."""
    is_own = not dist.is_initialized()
    if is_own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_own:
        dist.destroy_process_group()


COLLECTIVES: dict[str, Change] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce of a constant": lambda x: dist.all_reduce(torch.ones(2)),
    "all_reduce of another thread": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_gather": lambda x: dist.all_gather([torch.zeros_like(x)], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.zeros_like(x), x),
    "all_gather_object": lambda x: dist.all_gather_object([None], x),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros_like(x), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.zeros_like(x), x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "gather": lambda x: dist.gather(x, [torch.zeros_like(x)]),
    "scatter": lambda x: dist.scatter(torch.zeros_like(x), [x]),
    "barrier": lambda x: dist.barrier(),
    "all_gather with gradients": with_gradients.all_gather,
    "all_reduce with gradients": with_gradients.all_reduce,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("in_loss", [False, True], ids=["behind the loss", "in the loss"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_torch_is_refused_by_its_line(name: str, in_loss: bool) -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            y = x @ w
            if in_loss:
                COLLECTIVES[name](y)
            return y.square().mean()

        grad = fzero.grad(loss)(w)
        if not in_loss:
            COLLECTIVES[name](grad.full_tensor())
        return w - grad

    with pytest.raises(FzeroError, match=r"test_user_errors\.py.*: calls a collective of torch\.distributed.*psum"):
        fzero.simulate(step, MESH)(fzero.partition(torch.ones(3, 3), MESH), torch.ones(4, 3))


def test_the_rank_and_the_number_of_ranks_are_numbers() -> None:
    step = fzero.simulate(lambda x: x * dist.get_world_size() + dist.get_rank(), MESH)
    assert step(torch.ones(2)).tolist() == [1, 1]


ELEMENTS: dict[str, Change] = {
    "deepcopy of the batch": copy.deepcopy,
    "deepcopy": lambda x: copy.deepcopy(x * 2),
    "save": lambda x: torch.save(x * 2, io.BytesIO()),
    "pickle": lambda x: pickle.dumps(x * 2),
    "shared memory": lambda x: (x * 2).share_memory_(),
    "a function of Python": lambda x: (x * 2).map_(x, lambda a, b: a + b),
    "a nested tensor": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "a jagged tensor": lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)])),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("in_loss", [False, True], ids=["behind the loss", "in the loss"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_what_needs_elements_is_refused_by_its_line_or_runs(name: str, in_loss: bool) -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            if in_loss:
                ELEMENTS[name](x)
            return (x @ w).square().mean()

        grad = fzero.grad(loss)(w)
        if not in_loss:
            ELEMENTS[name](x)
        return w - grad

    w, x = torch.ones(3, 3), torch.ones(4, 3)
    try:
        found = fzero.simulate(step, MESH)(fzero.partition(w, MESH), x)
    except FzeroError as error:
        assert error.where.startswith(f"{__file__}:") and error.way_out
    else:
        torch.testing.assert_close(fzero.unpartition(found), step(w, x))


MAPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two leaves": lambda p, x: torch.func.vmap(lambda p, x: x @ p["w"] + p["b"], (0, None))(p, x),
    "a leaf and a batch": lambda p, x: torch.func.vmap(lambda w, row: row @ w)(p["w"], x[:3]),
    "another dimension": lambda p, x: torch.func.vmap(lambda w: x[:, :3] @ w, in_dims=2)(p["w"]),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_over_leaves_is_refused_and_its_way_out_is_what_plain_torch_computes(name: str) -> None:
    p, x = {"w": torch.randn(3, 5, 4), "b": torch.randn(3, 4)}, torch.randn(6, 5)
    x = torch.cat([x, x])

    def step(p: Any, x: Tensor, take: Callable[[Any], Any] = lambda p: p) -> Any:
        return fzero.grad(lambda p: MAPS[name](take(p), x).square().mean())(p)

    params = fzero.partition(p, MESH)
    with pytest.raises(FzeroError, match=rf"{__file__}:\d+.*vmap maps over a leaf.*fzero.unpartition"):
        fzero.simulate(step, MESH, donate=False)(params, x)
    found = fzero.simulate(lambda p, x: step(p, x, fzero.unpartition), MESH)(params, x)
    torch.testing.assert_close(fzero.unpartition(found), step(p, x[:6]))


def test_an_error_of_the_user_in_a_gradient_is_no_map() -> None:
    """`torch.func` calls the function from the module of `vmap`."""

    def loss(p: Any, x: Tensor) -> Tensor:
        raise ValueError("no such mode")

    params = fzero.partition({"w": torch.ones(3)}, MESH)
    with pytest.raises(ValueError, match=r"^no such mode$"):
        fzero.simulate(lambda p, x: fzero.value_and_grad(loss)(p, x), MESH)(params, torch.ones(2))


MASKS: dict[str, tuple[Change, Change]] = {
    "elements of a mask": (lambda y: y[y > 0].mean(), lambda y: (y * (y > 0)).sum() / (y > 0).sum()),
    "rows of a mask": (lambda y: y[y[:, 0] > 0].sum(), lambda y: torch.where(y[:, :1] > 0, y, 0).sum()),
    "masked_select": (lambda y: y.masked_select(y > 0).sum(), lambda y: torch.where(y > 0, y, 0).sum()),
    "where": (lambda y: y[torch.where(y > 0)].sum(), lambda y: torch.where(y > 0, y, 0).sum()),
    "rows that count": (
        lambda y: F.cross_entropy(y[y[:, 0] > 0], torch.ones(int((y[:, 0] > 0).sum()), dtype=torch.long)),
        lambda y: F.cross_entropy(y, torch.where(y[:, 0] > 0, 1, -100)),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_refused_by_its_line_and_its_way_out_is_what_plain_torch_computes(name: str) -> None:
    taken, weighed = MASKS[name]
    w, x = torch.linspace(-1, 1, 9).view(3, 3), torch.linspace(-2, 1, 12).view(4, 3)
    one = fzero.VirtualMesh(fsdp=1)

    def step(of: Change) -> Change:
        return lambda w: fzero.value_and_grad(lambda w: of(x @ w))(w)

    with pytest.raises(FzeroError) as error:
        fzero.simulate(step(taken), one)(fzero.partition(w, one))
    assert error.value.where.startswith(f"{__file__}:") and "torch.where" in error.value.way_out
    found = fzero.unpartition(fzero.simulate(step(weighed), one)(fzero.partition(w, one)))
    torch.testing.assert_close(found, step(taken)(w))


def penalize(by: Callable[..., Tensor]) -> Change:
    """A gradient penalty, whose gradient by `inputs` is taken `by` a function."""
    return lambda w: by(lambda x: (x @ w).tanh().sum(), torch.ones(2, 3)).square().mean()


def by_autograd(fn: Change, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(fn(x), x, create_graph=True)[0]


def by_backward(fn: Change, x: Tensor) -> Tensor:
    fn(x.requires_grad_()).backward()
    assert x.grad is not None
    return x.grad


AUTOGRAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "grad in a loss": (fzero.grad(penalize(by_autograd)), r"torch\.autograd\.grad is called"),
    "backward in a loss": (fzero.grad(penalize(by_backward)), "backward is called"),
    "backward of a step": (lambda w: w.square().sum().backward(), "backward is called"),
}


@pytest.mark.parametrize("name", AUTOGRAD)
def test_autograd_is_refused_by_its_line(name: str) -> None:
    step, problem = AUTOGRAD[name]
    with pytest.raises(FzeroError) as error:
        fzero.simulate(step, MESH)(fzero.partition(torch.ones(3, 3), MESH))
    assert error.value.where.startswith(f"{__file__}:")
    assert re.match(problem, error.value.problem)
    assert re.search(r"fzero\.value_and_grad|torch\.func", error.value.way_out)


def test_the_way_out_of_autograd_is_what_plain_torch_computes() -> None:
    w = torch.linspace(-1, 1, 9).view(3, 3)
    held, leaf = fzero.partition(w, MESH), w.clone().requires_grad_()
    expected = penalize(by_autograd)(leaf)
    expected.backward()
    found = fzero.simulate(fzero.grad(penalize(lambda fn, x: torch.func.grad(fn)(x))), MESH)(held)
    torch.testing.assert_close(fzero.unpartition(found), leaf.grad)
    outside_of_a_loss = fzero.simulate(penalize(by_autograd), MESH)(held)  # nothing of torch.func is there
    torch.testing.assert_close(outside_of_a_loss, expected.detach())


X = torch.linspace(-1, 1, 9).view(3, 3)
OPAQUE: dict[str, tuple[Change, str, Change]] = {
    "a scripted function": (
        lambda w: torch.jit.script(F.relu6)(w),
        "full_tensor",
        lambda w: torch.jit.script(F.relu6)(fzero.unpartition(w)),
    ),
    "functionalize": (lambda w: torch.func.functionalize(lambda x: x * w)(X), "leave it out", lambda w: X * w),
    "linearize": (
        lambda w: torch.func.linearize(torch.tanh, X)[1](X @ w),
        "call jvp",
        lambda w: torch.func.jvp(torch.tanh, (X,), (X @ w,))[1],
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("name", OPAQUE)
def test_what_takes_no_leaf_is_refused_and_its_way_out_is_what_plain_torch_computes(name: str) -> None:
    taken, instead = (fzero.grad(lambda w, fn=fn: fn(w).square().mean()) for fn in OPAQUE[name][::2])
    params = fzero.partition(X, MESH)
    with pytest.raises(FzeroError, match=OPAQUE[name][1]):
        fzero.simulate(taken, MESH, donate=False)(params)
    found = fzero.unpartition(fzero.simulate(instead, MESH)(params))
    leaf = X.clone().requires_grad_()
    OPAQUE[name][0](leaf).square().mean().backward()
    torch.testing.assert_close(found, leaf.grad)


CAUGHT: dict[str, Change] = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool((x > 0).any()),
    "rows": lambda x: x[x > 0],
    "a draw": lambda x: torch.rand(()).item(),
}


@pytest.mark.parametrize("in_loss", [False, True], ids=["behind the loss", "in the loss"])
@pytest.mark.parametrize("name", CAUGHT)
def test_a_step_that_catches_the_error_of_a_value_is_refused(name: str, in_loss: bool) -> None:
    """It would go the other way for ever."""

    def ask(w: Tensor) -> float:
        try:
            CAUGHT[name](w)
        except Exception:
            return 2.0
        return 1.0

    def step(w: Tensor) -> Tensor:
        return fzero.grad(lambda w: w.sum() * (ask(w) if in_loss else 1))(w) * (1 if in_loss else ask(w))

    with pytest.raises(FzeroError, match=rf"{__file__}:\d+ in <lambda>.*; the step catches the error; compute with"):
        fzero.simulate(step, MESH)(fzero.partition(torch.ones(3, 3), MESH))
