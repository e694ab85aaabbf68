"""Where torch asks for values, a step computes what plain torch does; a check that fails does so when the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fzero
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=3)
INDEX = torch.tensor([0, 2, 0])
MASK = torch.tensor([True, False, True, True])
Params = dict[str, Tensor]
Loss = Callable[[Params], Tensor]


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 3), "v": (4, 3), "s": (), "wave": (24,)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def through_svd(p: Params) -> Tensor:
    """A number that does not depend on the phases of singular vectors."""
    u, s, vh = torch.linalg.svd(torch.complex(p["w"], p["v"]), full_matrices=False)
    return torch.view_as_real((u * s.log1p()) @ vh)


def invert_stft(p: Params) -> Tensor:
    window = torch.hann_window(8, dtype=torch.float64)
    spectrum = torch.stft(p["wave"], 8, window=window, return_complex=True)
    return torch.istft(spectrum.square(), 8, window=window)


def in_place(p: Params, write: Callable[[Tensor, Params], object]) -> Tensor:
    """A copy of the weight after a write."""
    copy = p["w"].clone()
    write(copy, p)
    return copy


def set_item(key: Any, value: Loss) -> Loss:
    """`copy[key] = value(p)`."""
    return lambda p: in_place(p, lambda copy, p: copy.__setitem__(key, value(p)))


def column_of_clone(p: Params) -> Tensor:
    """The products of rows with equal indices, written into a view."""
    both = torch.stack([p["w"], p["v"]])
    both[0].scatter_reduce_(0, INDEX.expand(3, 3).T, p["v"][:3].square(), "prod")
    return both


CHECKED: dict[str, Loss] = {
    "gaussian_nll_loss": lambda p: F.gaussian_nll_loss(p["w"], p["v"], p["s"].exp().expand(4, 3)),
    "a distribution": lambda p: torch.distributions.Normal(p["w"], p["s"].exp(), validate_args=True).log_prob(p["v"]),
    "istft": invert_stft,
    "svd of complex numbers": through_svd,
    "scatter_reduce": lambda p: p["w"].scatter_reduce(0, INDEX.expand(3, 3).T, p["v"][:3].relu(), "prod"),
    "index_reduce": lambda p: p["w"].index_reduce(0, INDEX, p["v"][:3].relu(), "prod"),
    "scatter_reduce_ of a view": column_of_clone,
    "cov": lambda p: torch.cov(p["w"]),
    "cov of one row": lambda p: torch.cov(p["wave"], correction=0),
    "cov of too few columns": lambda p: torch.cov(p["w"], correction=3).isinf().double() * p["s"],
    "cov with both weights": lambda p: torch.cov(
        p["w"], fweights=torch.tensor([1, 2, 1]), aweights=p["v"][0].exp(), correction=0
    ),
    "cov with frequencies": lambda p: torch.cov(p["w"], fweights=torch.tensor([1, 2, 0])),
    "cov with weights": lambda p: torch.cov(p["w"], aweights=p["v"][0].abs()),
    "cov of complex numbers": lambda p: torch.view_as_real(torch.cov(torch.complex(p["w"], p["v"]))),
    "corrcoef": lambda p: torch.corrcoef(p["w"]),
    "corrcoef of one row": lambda p: torch.corrcoef(p["wave"]) * p["s"],
    "corrcoef of complex numbers": lambda p: torch.view_as_real(torch.corrcoef(torch.complex(p["w"], p["v"]))),
    "index_fill": lambda p: p["w"].index_fill(-1, INDEX, p["s"]),
    "arguments by their names in torch": lambda p: (
        torch.cov(input=p["w"])
        @ F.linear(input=p["w"], weight=torch.index_fill(input=p["v"], dim=0, index=INDEX, value=p["s"]))
    ),
    "dropout of torch, which has no argument of its place": lambda p: (
        torch.dropout(p["w"], 0.5, False) + torch.dropout(input=p["w"], p=0.5, train=False)
    ),
    "index_fill of one number": lambda p: p["wave"].sum().index_fill(0, INDEX[:1], p["s"]),
    "index_fill by a number": lambda p: p["w"].index_fill(0, INDEX, 2.0),
    "index_fill_": lambda p: in_place(p, lambda copy, p: copy.index_fill_(0, INDEX, p["s"])),
    "a row in those of a mask": set_item(MASK, lambda p: p["v"][0]),
    "a parameter in those of a mask": set_item(MASK, lambda p: p["s"]),
    "a row of two axes": set_item((MASK, ...), lambda p: p["v"][:1]),
    "a mask of all axes": set_item(MASK.unsqueeze(1).expand(4, 3), lambda p: p["s"]),
    "a mask behind all axes": set_item((..., MASK[:3]), lambda p: p["s"]),
    "a mask behind a number": set_item((1, MASK[:3]), lambda p: p["s"]),
    "a mask before a part": set_item((None, MASK, slice(1, None)), lambda p: p["v"][3, :2]),
    "a mask between axes": set_item((..., None, MASK, slice(1, None), None), lambda p: p["v"][:2, :1]),
    "rows for each place of a mask": set_item(MASK, lambda p: p["v"][: int(MASK.sum())]),
    "a mask of no gradient": set_item(MASK, lambda p: p["v"][0].detach()),
    "squeeze_": lambda p: in_place(p, lambda copy, p: copy.unsqueeze_(1).squeeze_().mul_(p["w"])),
    "t_": lambda p: in_place(p, lambda copy, p: copy.t_()) @ p["v"],
    "as_strided_": lambda p: in_place(p, lambda copy, p: copy.as_strided_((2, 3), (6, 1)).mul_(p["s"])),
    "resize_": lambda p: in_place(p, lambda copy, p: copy.detach().resize_(2, 2)) * p["s"],
    "resize_as_": lambda p: (
        in_place(p, lambda copy, p: copy.detach().resize_as_(the_template=torch.empty(2, 2))) * p["s"]
    ),
    "floor_divide_": lambda p: in_place(p, lambda copy, p: copy.detach().floor_divide_(p["v"].detach())) * p["s"],
}


def run(loss: Loss, stage: int = 3) -> tuple[Tensor, Params]:
    step = fzero.simulate(fzero.value_and_grad(lambda p: loss(p).square().sum()), MESH, stage=stage)
    value, grads = step(fzero.partition(params(), MESH))
    return value, fzero.unpartition(grads)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", CHECKED)
def test_it_is_what_plain_torch_computes(name: str, stage: int) -> None:
    leaves = {key: leaf.requires_grad_() for key, leaf in params().items()}
    expected = CHECKED[name](leaves).square().sum()
    gradients = torch.autograd.grad(expected, list(leaves.values()), allow_unused=True, materialize_grads=True)
    value, found = run(CHECKED[name], stage)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, dict(zip(leaves, gradients)), rtol=1e-10, atol=1e-10)


FAILING: dict[str, tuple[Loss, str]] = {
    "a variance below 0": (
        lambda p: F.gaussian_nll_loss(p["w"], p["v"], p["w"], reduction="none"),
        "gaussian_nll_loss found invalid",
    ),
    "a distribution": (
        lambda p: torch.distributions.Normal(p["w"], p["v"], validate_args=True).mean,
        r"torch\.distributions\.distribution\.__init__ found invalid",
    ),
    "a weight below 0": (lambda p: torch.cov(p["w"], aweights=p["v"][0]), "cov found a weight below 0"),
    "weights that sum to 0": (lambda p: torch.cov(p["w"], aweights=p["v"][0] * 0), "cov found weights that sum to 0"),
    "a window of zeros": (
        lambda p: torch.istft(torch.complex(p["w"], p["v"])[:3], 4, window=p["v"][:, 0] * 0),
        "istft found invalid",
    ),
    "a loss of the phases": (
        lambda p: torch.view_as_real(torch.linalg.svd(torch.complex(p["w"], p["v"]), full_matrices=False)[0]),
        "LinalgSvdBackward found invalid",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_check_fails_when_the_step_runs(name: str) -> None:
    loss, message = FAILING[name]
    with pytest.raises((RuntimeError, ValueError)):
        torch.autograd.grad(loss({k: x.requires_grad_() for k, x in params().items()})[..., 0].sum(), [])
    with pytest.raises(RuntimeError, match=message):
        run(lambda p: loss(p)[..., 0])


def test_a_second_derivative_with_a_check_of_its_own_is_refused() -> None:
    def slope(p: Params) -> Tensor:
        return fzero.grad(lambda p: CHECKED["scatter_reduce"](p).square().sum())(p)["v"].full_tensor()

    with pytest.raises(FzeroError, match="Python needs a value.*"):
        run(slope)


def test_rows_for_each_place_of_a_mask_of_state_are_refused() -> None:
    def write(copy: Tensor, p: Params) -> None:
        copy[p["w"][:, 0] > 0] = p["v"][:3]

    with pytest.raises(FzeroError, match=r"Python needs a value.*torch\.where"):
        run(lambda p: in_place(p, write))


def test_a_dtype_that_torch_does_not_write_is_its_error() -> None:
    loss = set_item(MASK, lambda p: p["v"][0].float())
    for compute in (loss, run):
        with pytest.raises(RuntimeError, match="dtypes match"):
            compute(params() if compute is loss else loss)


def test_what_the_user_asks_for_is_no_check() -> None:
    def ask(p: Params) -> Tensor:
        return p["w"] if (p["w"] < 0).any() else p["v"]

    with pytest.raises(FzeroError, match=r"test_checks.*Python needs a value"):
        run(ask)


def test_a_shape_is_not_changed_from_inside_of_a_gradient() -> None:
    def step(p: Params) -> Params:
        copy = p["w"].clone()
        return fzero.grad(lambda p: (copy.unsqueeze_(0) * p["w"]).sum())(p)

    with pytest.raises(FzeroError, match="^w: the shape of a value from outside of a gradient is changed"):
        fzero.simulate(step, MESH)(fzero.partition(params(), MESH))


def test_what_is_outside_of_a_gradient_is_not_written_to_inside() -> None:
    def step(p: Params) -> Params:
        copy = p["w"].clone()
        return fzero.grad(lambda p: (copy.mul_(p["w"]) * p["w"]).sum())(p)

    with pytest.raises(FzeroError, match="test_checks.*a tensor from outside of a gradient is written to"):
        fzero.simulate(step, MESH)(fzero.partition(params(), MESH))


@pytest.mark.parametrize("differentiate", [fzero.grad, lambda loss: loss])
def test_the_data_of_a_captured_tensor_is_not_replaced(differentiate: Callable[..., Any]) -> None:
    kept = torch.ones(3, dtype=torch.float64)

    def loss(p: Params) -> Tensor:
        kept.data = kept  # changes nothing
        kept.data = torch.zeros(3, dtype=torch.float64)
        return (kept * p["w"]).sum()

    with pytest.raises(FzeroError, match="test_checks.*the data of a tensor from outside of the step is replaced"):
        fzero.simulate(differentiate(loss), MESH)(fzero.partition(params(), MESH))
    assert torch.equal(kept, torch.ones(3, dtype=torch.float64))


class Proxies(torch.nn.Module):
    """A module that moves its parameter to its input, as losses of metric learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.w.data = self.w.data.to(device=x.device, dtype=x.dtype)
        return (x @ self.w).tanh().mean()


def test_data_is_replaced_by_itself() -> None:
    module, x = Proxies(), torch.linspace(0.0, 2.0, 24, dtype=torch.float64).reshape(6, 4)
    whole, apply = fzero.lower(module)
    loss, grads = fzero.simulate(fzero.value_and_grad(apply), MESH)(fzero.partition(whole, MESH), x)
    expected = module(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fzero.unpartition(grads)["w"], module.w.grad, rtol=1e-12, atol=1e-12)


def test_data_that_differs_is_not_replaced() -> None:
    whole, apply = fzero.lower(Proxies().float())
    x = torch.ones(6, 4, dtype=torch.float64)
    with pytest.raises(FzeroError, match="self.w.data = .*the data of a tensor is replaced inside of a gradient"):
        fzero.simulate(fzero.value_and_grad(apply), MESH)(fzero.partition(whole, MESH), x)


@pytest.mark.parametrize("differentiate", [fzero.grad, lambda loss: loss])
def test_a_module_is_not_converted_in_a_step(differentiate: Callable[..., Any]) -> None:
    captured = torch.nn.Linear(3, 3)
    for make in (lambda: captured, lambda: torch.nn.Linear(3, 3)):

        def loss(p: Params, make: Callable[[], torch.nn.Linear] = make) -> Tensor:
            return make().to(torch.float64)(p["w"]).sum()

        with pytest.raises(FzeroError, match="a module is converted|data of a tensor.* is replaced|holds float64"):
            fzero.simulate(differentiate(loss), MESH)(fzero.partition(params(), MESH))
