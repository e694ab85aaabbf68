"""Writes into a `Sharded` inside of a step: what plain torch computes, or a refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=3)
Params = dict[str, Tensor]
Step = Callable[[Params, Tensor], Params]


def params() -> Params:
    return {"w": torch.arange(12.0).view(4, 3) / 7, "b": torch.ones(3), "s": torch.tensor(2.0)}


def gradients(p: Params, x: Tensor) -> Params:
    return fzero.grad(lambda p: ((x @ p["w"] + p["b"]) * p["s"]).square().mean())(p)


def copy_of_weight(write: Callable[[Tensor, Params], object]) -> Step:
    """A step that writes into a copy of the weight, which becomes the weight."""

    def step(p: Params, x: Tensor) -> Params:
        new = p["w"].clone()
        write(new, p)
        return {**p, "w": new}

    return step


def decay_gradients(p: Params, x: Tensor) -> Params:
    grads = gradients(p, x)
    for name, grad in grads.items():
        grad.mul_(0.1).add_(p[name], alpha=0.01)
    return tree.map(torch.sub, p, grads)


def decay_lists(p: Params, x: Tensor) -> Params:
    grads = gradients(p, x)
    torch._foreach_mul_(tree.leaves(grads), 0.1)
    torch._foreach_add_(tree.leaves(grads), tree.leaves(p), alpha=0.01)
    return tree.map(torch.sub, p, grads)


def read_between_writes(p: Params, x: Tensor) -> Params:
    total = torch.zeros_like(p["w"])
    before = total.add_(p["w"]).sum()
    return {**p, "w": total.mul_(2.0) * before, "s": total.sum()}


def write_to_an_alias(p: Params, x: Tensor) -> Params:
    copy = p["w"].clone()
    copy.detach().add_(1.0)
    return {**p, "w": copy}


RIGHT: dict[str, Step] = {
    "gradients": decay_gradients,
    "lists": decay_lists,
    "between reads": read_between_writes,
    "an alias": write_to_an_alias,
    "+=": copy_of_weight(lambda new, p: new.__iadd__(p["w"])),
    "copy_ and zero_": copy_of_weight(lambda new, p: new.zero_().copy_(p["w"] * 2).fill_(3.0).sub_(p["w"])),
    "a row": copy_of_weight(lambda new, p: new.__setitem__(1, 5.0)),
    "broadcasting": copy_of_weight(lambda new, p: new.add_(p["b"])),
    "no elementwise function": copy_of_weight(lambda new, p: new.clamp_(min=0.3).cumsum_(0)),
    "out=": copy_of_weight(lambda new, p: torch.sin(p["w"], out=new)),
    "out= of no elementwise function": copy_of_weight(lambda new, p: torch.cumsum(p["w"], 0, out=new)),
    "inplace=": copy_of_weight(lambda new, p: torch.nn.functional.relu(new.sub_(0.5), inplace=True)),
    "a number beside a 0-d leaf": lambda p, x: {**p, "s": p["s"].clone().masked_fill_(torch.tensor(True), p["s"] * 2)},
    "a 0-d leaf": lambda p, x: {**p, "s": p["s"].clone().mul_(3.0)},
    "new_zeros": lambda p, x: {**p, "w": p["w"] + p["w"].new_zeros(4, 3).add_(p["b"])},
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_it_is_what_plain_torch_computes(name: str, stage: int, donate: bool) -> None:
    step, x = RIGHT[name], torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = fzero.simulate(step, MESH, stage=stage, donate=donate)(fzero.partition(params(), MESH), x)
    torch.testing.assert_close(fzero.unpartition(found), step(params(), x))


def write_beside_a_view(new: Tensor, p: Params) -> None:
    view = new.view(-1)
    new.add_(view.view(4, 3))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda p, x: {**p, "w": p["w"].add_(1)}, "^w: add_ would change a value in place; arguments of a step"),
        (lambda p, x: {**p, "w": p["w"].detach().add_(1)}, "^w: add_ would change a value in place"),
        (lambda p, x: {**p, "w": torch.sin(p["b"], out=p["b"])}, "^b: sin would change a value in place"),
        (lambda p, x: torch._foreach_mul_([p["w"]], 2.0), "^w: _foreach_mul_ would change a value in place"),
        (lambda p, x: setattr(p["w"].clone(), "data", x), "^w: data would change a value in place"),
        (copy_of_weight(write_beside_a_view), "^w: add_ would change a value in place; .*that have views"),
        (copy_of_weight(lambda new, p: new.view(-1).add_(1)), "^w: add_ writes into it, but a step is a pure function"),
        (lambda p, x: p["w"].clone().add_(x.mean()), "^w: add_ would write what differs between ranks into a slice"),
        (
            lambda p, x: torch._foreach_mul_([p["w"].clone()], x.mean()),
            "^w: a list operation would write what differs between ranks",
        ),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_another_write_is_refused(step: Step, message: str, stage: int) -> None:
    with pytest.raises(FzeroError, match=message):
        fzero.simulate(step, MESH, stage=stage)(fzero.partition(params(), MESH), torch.ones(3, 4))


def test_the_way_out_of_a_write_through_a_view_is_what_plain_torch_computes() -> None:
    def step(p: Params, whole: Callable[[Tensor], Tensor]) -> Params:
        new = whole(p["w"]).clone()
        new.view(-1).add_(1)
        return {**p, "w": p["w"] * new}

    with pytest.raises(
        FzeroError, match=r"write the operation without .* or clone first: leaf\.full_tensor\(\)\.clone\(\)"
    ):
        fzero.simulate(lambda p: step(p, lambda w: w), MESH)(fzero.partition(params(), MESH))
    found = fzero.simulate(lambda p: step(p, lambda w: w.full_tensor()), MESH)(fzero.partition(params(), MESH))
    torch.testing.assert_close(fzero.unpartition(found), step(params(), lambda w: w))


def move_statistics(p: Params, x: Tensor) -> Params:
    """Batch norm of a weight: the statistics are the same on every rank."""
    mean, var = p["b"] * 1, p["b"].clone()
    torch.nn.functional.batch_norm(p["w"], mean, var, training=True)
    return {**p, "w": p["w"] * mean * p["s"], "b": var}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batch_norm_moves_statistics_that_the_step_made(stage: int) -> None:
    expected = move_statistics(params(), torch.ones(3, 1))
    found = fzero.simulate(move_statistics, MESH, stage=stage)(fzero.partition(params(), MESH), torch.ones(3, 1))
    torch.testing.assert_close(fzero.unpartition(found), expected)


def test_statistics_of_the_batch_differ_between_ranks() -> None:
    def step(p: Params, x: Tensor) -> Params:
        mean, var = p["b"].clone(), p["b"].clone()
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        return {**p, "b": mean}

    with pytest.raises(FzeroError, match="^b: batch_norm would write what differs between ranks into a slice"):
        fzero.simulate(step, MESH)(fzero.partition(params(), MESH), torch.rand(6, 3))


def test_several_values_are_written_by_one_call() -> None:
    def step(p: Params, x: Tensor) -> Params:
        out = p["b"].clone(), torch.zeros_like(p["b"], dtype=torch.int64)
        torch.max(p["w"], 0, out=out)
        return {**p, "b": out[0] + out[1]}

    expected = params()["w"].max(0)
    found = fzero.simulate(step, MESH)(fzero.partition(params(), MESH), torch.ones(3, 1))
    torch.testing.assert_close(fzero.unpartition(found)["b"], expected.values + expected.indices)


# every function of torch that writes


def list_writers() -> dict[str, Callable[..., object]]:
    """The functions of torch whose names say that they write into their first argument."""
    owners = {"Tensor": Tensor, "torch": torch, "functional": torch.nn.functional, "init": torch.nn.init}
    special = [f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()]
    found = {f"{owner}.{name}": getattr(x, name) for owner, x in owners.items() for name in dir(x)}
    return {
        path: fn
        for path, fn in found.items()
        if path.partition(".")[2] in special or (path.endswith("_") and not path.endswith("__") and "._" not in path)
    }


MATRIX = torch.arange(12.0).view(4, 3) / 5 + 1
ARGUMENTS: list[tuple[object, ...]] = [
    (),
    (2.0,),
    (MATRIX,),
    (0, 1),
    (MATRIX, MATRIX),
    (MATRIX, 0.5),
    (MATRIX > 2, 2.0),
    (MATRIX > 2, torch.arange(12.0)),
    (1.0, 2.0),
    (0, torch.tensor([0]), 5.0),
    (0, torch.tensor([0]), MATRIX[:1]),
    (0, torch.zeros(4, 3, dtype=torch.int64), MATRIX),
    (0, torch.zeros(4, 3, dtype=torch.int64), 9.0),
    (0, torch.zeros(4, 3, dtype=torch.int64), MATRIX, "sum"),
    (0, torch.tensor([0]), MATRIX[:1], "prod"),
    (torch.tensor([0]), torch.tensor([9.0])),
    ((torch.tensor([0]),), MATRIX[0]),
    (MATRIX[:, :2], MATRIX[:2]),
    (MATRIX[:, 0], MATRIX[0]),
    (MATRIX[:3, :1], torch.ones(1)),
    ((2, 6),),
    (2, 0, 1.0),
]


def assign(name: str, value: object) -> Callable[[Tensor], None]:
    return lambda x: setattr(x, name, value)


OTHER_WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": assign("data", MATRIX),
    "grad": assign("grad", MATRIX),
    "requires_grad": assign("requires_grad", True),
    "into data": lambda x: x.data.fill_(3.0),
    "items of data": lambda x: x.data.__setitem__(0, 3.0),
    "into what is detached": lambda x: x.detach().add_(1.0),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "numpy": lambda x: x.numpy().__setitem__(0, 5.0),
    "an array": lambda x: __import__("numpy").asarray(x).__setitem__(0, 5.0),
    "vector_to_parameters": lambda x: torch.nn.utils.vector_to_parameters(torch.ones(12), [x]),
    "a list": lambda x: torch._foreach_add_([x], 1.0),
    "out=": lambda x: torch.sin(MATRIX, out=x),
    "out= of no elementwise function": lambda x: torch.mm(MATRIX, MATRIX[:3], out=x),
    "inplace=": lambda x: torch.nn.functional.relu(x, inplace=True),
    "inplace": lambda x: torch.nn.functional.hardtanh(x, -0.1, 0.1, True),
    "init by names": lambda x: torch.nn.init.trunc_normal_(tensor=x, std=0.5),
    "an optimizer of torch": lambda x: (setattr(x, "grad", MATRIX), torch.optim.SGD([x], lr=1.0).step()),
}


@pytest.mark.filterwarnings("ignore")
def test_no_write_outside_of_a_step_is_lost() -> None:
    """Each function of torch that writes, on a leaf: what plain torch gives, or an error with the leaf's name. A
    function that plain torch refuses with all arguments is of no use here."""
    numbers, failures = {"equal": 0, "refused": 0}, []
    cases = [(name, fn, args) for name, fn in list_writers().items() for args in ARGUMENTS]
    tried = Counter[str]()
    for name, fn, args in [*cases, *((name, fn, ()) for name, fn in OTHER_WRITES.items())]:
        plain = MATRIX / 2
        try:
            torch.manual_seed(0)
            fn(plain, *args)
        except Exception:
            continue
        tried[name] += 1
        if tried[name] > 2:
            continue
        leaf = fzero.partition({"w": MATRIX / 2}, MESH)["w"]
        torch.manual_seed(0)
        try:
            fn(leaf, *args)
        except ValueError as error:  # numpy's own: assignment destination is read-only
            is_named = isinstance(error, FzeroError) or "read-only" in str(error)
            numbers["refused"] += 1
            failures += [] if is_named else [(name, error)]
            continue
        except Exception as error:
            failures.append((name, error))
            continue
        whole, numbers["equal"] = fzero.unpartition(leaf), numbers["equal"] + 1
        is_same = torch.equal(whole, plain.detach()) and leaf.requires_grad == plain.requires_grad
        failures += [] if is_same else [(name, "is lost")]
    assert not failures
    assert len(tried) > 200 and numbers["refused"] > 200 and numbers["equal"] > 5, (len(tried), numbers)
