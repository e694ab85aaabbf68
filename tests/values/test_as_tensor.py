"""A `Sharded` is a tensor to torch: whatever a loss does with a leaf, loss and gradients are those of plain torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fzero
from fzero.base.errors import FzeroError

RANKS = 4
MESH = fzero.VirtualMesh(fsdp=RANKS)
Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient straight through."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, cotangent, 0.0)


LINEAR = nn.Linear(3, 5).double()


def add_in_place(h: Tensor, bias: Tensor) -> Tensor:
    h += bias
    return h


def write_rows(h: Tensor, rows: Tensor) -> Tensor:
    h[1:] = rows
    return h


def of_each(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([fn(row).square().sum() for row in x])


WRITTEN: dict[str, Loss] = {
    # functions of torch that call no `__torch_function__`
    "a custom Function": lambda p, x, ids: x @ Straight.apply(p["w"]),
    "a custom Function of a 0-d leaf": lambda p, x, ids: x * Straight.apply(p["s"]),
    "pmean of a leaf": lambda p, x, ids: x @ fzero.pmean(p["w"], "fsdp"),
    "pmax of a leaf": lambda p, x, ids: x @ fzero.pmax(p["w"], "fsdp"),
    "unpartition": lambda p, x, ids: x @ fzero.unpartition(p)["w"],
    "functional_call": lambda p, x, ids: torch.func.functional_call(
        LINEAR, {"weight": p["w"], "bias": p["square"][0]}, (x[:, :3],)
    ),
    "leaves of torch's pytrees": lambda p, x, ids: x @ p["w"] + sum(leaf.norm() for leaf in pytree.tree_leaves(p)),
    "a map of torch's pytrees": lambda p, x, ids: x @ pytree.tree_map(lambda leaf: leaf * leaf.mean(), p)["w"],
    "get_total_norm": lambda p, x, ids: x @ p["w"] * nn.utils.get_total_norm(list(p.values())),
    "an unbound method": lambda p, x, ids: x @ torch.Tensor.add(p["w"], 1),
    "a reflected method": lambda p, x, ids: x @ (p["w"] + 9).__rdiv__(2.0),
    "an attribute": lambda p, x, ids: x @ p["w"] if p["w"].layout is torch.strided else x,
    "a memory format": lambda p, x, ids: x @ p["w"].clone(memory_format=torch.contiguous_format),
    "masked": lambda p, x, ids: x * torch.masked.sum(p["w"], mask=p["w"].detach() > 0),
    # a plain tensor that differs between ranks, beside a leaf
    "one example": lambda p, x, ids: of_each(x, lambda row: row @ p["w"] + p["b"]),
    "a number of the batch": lambda p, x, ids: of_each(x, lambda row: p["w"] * row.mean()),
    "a bias of shape (1,)": lambda p, x, ids: x.mean(1) + p["one"],
    "an embedding and a leaf": lambda p, x, ids: of_each(
        ids, lambda i: F.embedding(i[:3], p["square"]) + p["square"][:3]
    ),
    "a 0-d leaf below": lambda p, x, ids: (x @ p["w"]).square().mean() / p["s"],
    "new_zeros": lambda p, x, ids: p["w"].new_zeros(len(x), 3) + x @ p["w"],
    "new_zeros written to": lambda p, x, ids: p["w"].new_zeros(len(x), 3).add_(x @ p["w"]),
    "a list": lambda p, x, ids: of_each(
        x, lambda row: torch._foreach_mul([p["w"], p["b"]], [row[:, None], row[:3]])[0]
    ),
    "one position of a list": lambda p, x, ids: (
        x[:, :3] + torch._foreach_mul([p["w"], p["b"]], [p["other"], p["b"]])[1]
    ),
    "+=": lambda p, x, ids: add_in_place(x @ p["w"], p["b"]),
    "add_": lambda p, x, ids: (x @ p["w"]).add_(p["b"]),
    "a write into a row": lambda p, x, ids: write_rows(x @ p["w"], p["b"]),
    # what needs no values
    "one number beside two leaves": lambda p, x, ids: x @ (p["w"] * torch.tensor(0.1)) + p["b"] * torch.tensor(0.1),
    "one number twice": lambda p, x, ids: (lambda rate: x @ (p["w"] * rate) + p["b"] * rate)(torch.tensor(0.1)),
    "one_hot": lambda p, x, ids: F.one_hot(ids[:, 0], 5).double() @ p["w"],
    "a distribution": lambda p, x, ids: -torch.distributions.Normal(x @ p["w"], p["s"].exp()).log_prob(x[:, :3]),
    "rrelu outside of training": lambda p, x, ids: F.rrelu(x @ p["w"], training=False),
    "masked_fill by a leaf": lambda p, x, ids: (x @ p["w"]).masked_fill(x[:, :3] > 0, p["s"]),
}


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "other": (5, 3), "b": (3,), "one": (1,), "s": (), "square": (5, 5)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=draw, dtype=torch.float64), torch.randint(0, 5, (8, 4), generator=draw)


def mean_of(loss: Loss) -> Loss:
    return lambda p, x, ids: loss(p, x, ids).square().mean()


def plain(loss: Loss) -> tuple[Tensor, Params]:
    """Loss and gradients by plain torch: the mean over ranks of each rank's, on its part of the batch."""
    leaves = {name: leaf.requires_grad_() for name, leaf in params().items()}
    parts = zip(*(part.chunk(RANKS) for part in batch()))
    total = torch.stack([mean_of(loss)(leaves, *part) for part in parts]).mean()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return total.detach(), dict(zip(leaves, found))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_what_plain_torch_computes(name: str, stage: int) -> None:
    step = fzero.simulate(fzero.value_and_grad(mean_of(WRITTEN[name])), MESH, stage=stage)
    value, grads = step(fzero.partition(params(), MESH), *batch())
    expected, gradients = plain(WRITTEN[name])
    torch.testing.assert_close(value.mean(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fzero.unpartition(grads), gradients, rtol=1e-11, atol=1e-11)


def gradient_of(loss: Loss) -> Any:
    return fzero.simulate(fzero.grad(mean_of(loss)), MESH)(fzero.partition(params(), MESH), *batch())


class Scaled(nn.Module):
    """A module that makes another one in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear(5, 3).double()(x)


def save_on_cpu(p: Any, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ p["w"]).sin()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (save_on_cpu, "hooks on saved tensors have no place under torch.func.*fzero.remat"),
        (
            lambda p, x, ids: torch.cond(torch.tensor(True), torch.sin, torch.cos, (x @ p["w"],)),
            "does not have torch's higher-order operator cond.*torch.where",
        ),
        (lambda p, x, ids: Scaled()(x) @ p["w"].T, "is replaced inside of a gradient.*outside of the step"),
        (lambda p, x, ids: F.embedding(ids, p["square"], sparse=True), "makes a torch.sparse_coo tensor.*dense"),
        (lambda p, x, ids: x @ p["w"].to_sparse(), "makes a torch.sparse_coo tensor.*dense"),
        (lambda p, x, ids: (x @ p["w"]).mean().backward(), "backward.*fzero.value_and_grad"),
        (lambda p, x, ids: p["w"].register_hook(print), "^w: register_hook is no .*value_and_grad"),
        (lambda p, x, ids: torch.autograd.grad(x.sum(), p["w"]), "^w: grad is no .*value_and_grad"),
        (lambda p, x, ids: F.one_hot((p["w"] > 0).long()), "Python needs a value"),
    ],
)  # fmt: skip
def test_what_torch_func_cannot_do_is_refused_with_the_line(loss: Loss, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        gradient_of(loss)


def test_a_check_of_torch_fails_when_the_step_runs() -> None:
    def step(p: Params, x: Tensor) -> Tensor:
        scale = x.mean()
        found = torch.distributions.Normal(p["b"], scale, validate_args=True)  # torch.compile changes the default
        return found.log_prob(p["b"].full_tensor()).sum()

    given = fzero.partition(params(), MESH)
    run = fzero.simulate(step, MESH)
    assert run(given, torch.ones(RANKS, 1, dtype=torch.float64)).isfinite().all()
    with pytest.raises(RuntimeError, match=r"torch\.distributions\.distribution\.__init__ found invalid values"):
        run(given, -torch.ones(RANKS, 1, dtype=torch.float64))


def test_a_class_out_of_range_fails_when_the_step_runs() -> None:
    with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
        fzero.simulate(lambda ids: F.one_hot(ids, 5), MESH)(torch.full((4, 1), 5))


# outside of a step


def held() -> Any:
    return fzero.partition(params(), MESH)


def test_functions_outside_of_a_step_see_the_whole_value() -> None:
    leaf, whole = held()["w"], params()["w"]
    assert isinstance(leaf, Tensor) and not leaf.is_sparse and leaf.layout is torch.strided and leaf.is_contiguous()
    assert (leaf.shape, leaf.stride(), leaf.nbytes, leaf.T.shape) == ((5, 3), (3, 1), 120, (3, 5))
    assert leaf.tolist() == whole.tolist() and (leaf.numpy() == whole.numpy()).all()
    torch.testing.assert_close(nn.utils.get_total_norm([leaf]), whole.norm())
    assert Straight.apply(leaf).tolist() == whole.round().tolist()
    assert [x.norm() for x in pytree.tree_leaves(held())] == [x.norm() for x in held().values()]
    assert type(pytree.tree_map(lambda x: x, held())["w"]) is fzero.Sharded


def test_a_gradient_outside_of_a_step_goes_through_a_custom_function() -> None:
    def loss(p: Params) -> Tensor:
        return Straight.apply(p["w"] * 0.3).square().sum()

    whole = {"w": params()["w"]}
    torch.testing.assert_close(
        fzero.unpartition(torch.func.grad(loss)({"w": held()["w"]})), torch.func.grad(loss)(whole)
    )


@pytest.mark.parametrize("write", [pickle.dumps, lambda leaf: torch.save(leaf, "/dev/null")])
def test_a_part_of_a_value_is_not_pickled(write: Callable[[Any], Any]) -> None:
    with pytest.raises(FzeroError, match=r"^w: .* cannot be pickled; .*fzero.save_safetensors"):
        write(held()["w"])


def test_kernels_below_torch_functions_refuse_the_leaf() -> None:
    with (
        pytest.raises(FzeroError, match=r"^w: .*has no memory of its own; give leaf.full_tensor\(\)"),
        torch.DisableTorchFunctionSubclass(),
    ):
        torch.sin(held()["w"])


@pytest.mark.parametrize(
    "use", [lambda leaf: leaf.sum(), lambda leaf: leaf * 2, lambda leaf: torch.stack([leaf, leaf])]
)
def test_state_that_a_step_captures_is_refused(use: Callable[[Any], Any]) -> None:
    captured = held()["w"]
    with pytest.raises(FzeroError, match=r"test_as_tensor.py.*: w is state that the step captured.*as an argument"):
        fzero.simulate(lambda p: (p, use(captured)), MESH)(held())


def test_the_largest_element_under_autocast_of_another_dtype() -> None:
    leaf = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fzero.simulate(lambda p: p.max(), MESH)(fzero.partition(leaf, MESH)) == 3.0


def test_a_function_that_torch_traces_without_its_out_writes_into_that() -> None:
    def step(p: Params) -> tuple[Tensor, Tensor]:
        rank, doubled = torch.zeros((), dtype=torch.int64), torch.zeros(5, 5, dtype=torch.float64)
        torch.linalg.matrix_rank(p["square"] + p["square"].T, hermitian=True, out=rank)
        return rank, torch.mul(p["square"], 2.0, out=doubled)

    for found, expected in zip(fzero.simulate(step, MESH)(held()), step(params())):
        assert torch.equal(found, expected)
