"""Views of a leaf outside of a step: they read as in plain torch, and no write to one is lost without an error."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from conformance.database import operators, samples
from torch import Tensor, nn

import fzero
from fzero.base import torch_private
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=2)
Read = Callable[[Tensor], Any]


def matrix() -> Tensor:
    return torch.arange(12.0).view(4, 3) / 5 + 1


def leaf_of(x: Tensor, persist: int = 0) -> Any:
    return fzero.partition({"w": x.clone()}, MESH, persist=persist)["w"]


# every operator of torch that returns a view

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda view: view.add_(1),
    "fill": lambda view: view.fill_(0),
    "an item": lambda view: view.__setitem__(..., 5),
    "an operator": lambda view: view.__imul__(3),
    "a view of it": lambda view: view.reshape(-1)[:1].zero_(),
    "what is detached": lambda view: view.detach().sub_(1),
    "data": lambda view: view.data.copy_(torch.ones(())),
    "out=": lambda view: torch.sin(torch.ones(view.shape), out=view),
    "a list": lambda view: torch._foreach_add_([view], 1.0),
    "inplace": lambda view: nn.functional.hardtanh(view, 0.1, 0.2, True),
    "numpy": lambda view: view.numpy().fill(7),
    "init": lambda view: nn.init.constant_(tensor=view, val=3.0),
    "a parameter": lambda view: nn.Parameter(view).data.add_(1),
}


def list_reads() -> Iterator[tuple[str, Tensor, Read]]:
    """`(name, input, read)`, of each operator of torch's database that returns a view of its input: its first samples.
    Further ones that the database lacks."""
    for name, op in operators().items():
        if torch.float32 not in op.dtypes:
            continue
        for sample in itertools.islice(samples(op, torch.float32), 4):
            x = sample.input
            if isinstance(x, Tensor) and x.layout is torch.strided and x.numel() and not x.is_conj():
                yield name, x.detach().clone(), lambda y, op=op, s=sample: op(y, *s.args, **s.kwargs)
    more: dict[str, Read] = {
        "iter": lambda x: list(x),
        "next": lambda x: next(iter(x)),
        "data": lambda x: x.data[0],
        "view of dtype": lambda x: x.view(torch.int32),
        "einsum": lambda x: torch.einsum("ij->ji", x),
        "swapaxes": lambda x: x.swapaxes(0, 1),
        "view of a view": lambda x: x[1:].T[0],
        "identity": lambda x: nn.Identity()(x[0]),
        "masked": lambda x: x[..., None, :],
        "unsafe": lambda x: x.unsafe_chunk(2),
    }
    yield from ((name, matrix(), read) for name, read in more.items())


@functools.cache
def list_viewing() -> list[tuple[str, Tensor, Read, int]]:
    """`(name, input, read, position)` of each read that returns a view, and writes nothing. `position`: the place of
    the first view among the tensors of the result."""
    viewing = []
    for name, x, read in list_reads():
        plain = x.clone()
        try:
            made = list_tensors(read, plain)
        except Exception:
            continue
        position = next((i for i, y in enumerate(made) if torch_private.is_alias(y, plain)), None)
        if position is not None and torch.equal(plain, x):
            viewing.append((name, x, read, position))
    return viewing


def list_tensors(read: Read, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return [y for y in torch_private.pytree_leaves(read(x)) if isinstance(y, Tensor) and y.layout is torch.strided]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persist", [0, 10**6], ids=["cut", "whole on every rank"])
def test_no_write_through_a_view_is_lost(persist: int) -> None:
    numbers, failures, names = Counter[str](), [], set[str]()
    for name, x, read, position in list_viewing():
        names.add(name)
        leaf = leaf_of(x, persist)
        for kind, write in WRITES.items():
            plain = x.clone()
            try:
                write(list_tensors(read, plain)[position])
            except Exception:
                continue
            try:
                write(list_tensors(read, leaf)[position])
            except ValueError as error:  # numpy's own: assignment destination is read-only
                numbers["refused"] += 1
                is_named = str(error).startswith("w: ") or "read-only" in str(error)
                failures += [] if is_named else [(name, kind, error)]
            except Exception as error:
                failures.append((name, kind, error))
            else:
                numbers["equal"] += 1
                failures += [] if torch.equal(leaf.full_tensor(), plain) else [(name, kind, "is lost")]
                leaf = leaf_of(x, persist)
        failures += [] if torch.equal(leaf.full_tensor(), x) else [(name, "refused", "is written")]
    assert not failures, (len(failures), Counter(name for name, *_ in failures), failures[:20])
    assert len(names) > 60 and numbers["refused"] > 1500, (len(names), numbers)


@pytest.mark.filterwarnings("ignore")
def test_views_read_as_in_plain_torch() -> None:
    for name, x, read, _ in list_viewing():
        for a, b in zip(list_tensors(read, leaf_of(x)), list_tensors(read, x), strict=True):
            a = a.full_tensor() if isinstance(a, fzero.Sharded) else a
            assert torch.equal(a, b) and (a.shape, a.dtype) == (b.shape, b.dtype), name


# settings in which a view is made, or written to

IN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("write", ["in place", "inplace", "out=", "numpy"])
@pytest.mark.parametrize("around", IN)
def test_modes_hide_no_write(around: str, write: str) -> None:
    leaf = leaf_of(matrix())
    with IN[around](), pytest.raises((FzeroError, ValueError), match="^w: |read-only"):
        WRITES[write](leaf[0])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, p: fzero.grad(f)(p),
        lambda f, p: fzero.value_and_grad(f)(p),
        lambda f, p: torch.func.grad(f)(p),
        lambda f, p: torch.func.jvp(f, (p,), (p,)),
        lambda f, p: torch.func.grad(lambda q: torch.func.jvp(f, (q,), (q,))[1])(p),
        lambda f, p: torch.func.vmap(lambda x: f(p) * x)(torch.ones(2)),
    ],
)
@pytest.mark.parametrize("write", ["in place", "an item", "inplace"])
def test_a_write_inside_of_a_transform_is_refused(transform: Callable[..., Any], write: str) -> None:
    def loss(p: Any) -> Tensor:
        WRITES[write](p["w"][1])
        return p["w"].sum()

    with pytest.raises(FzeroError, match="^w: "):
        transform(loss, {"w": leaf_of(matrix())})


@pytest.mark.parametrize(
    "write",
    [
        lambda p: nn.functional.alpha_dropout(p, 0.5, True, True),
        lambda p: nn.functional.embedding(torch.tensor([0, 1]), p, max_norm=0.1),
        lambda p: nn.functional.batch_norm(torch.rand(5, 3), p[0], p[1], training=True),
    ],
)
def test_a_function_that_writes_without_saying_so_is_refused(write: Read) -> None:
    with pytest.raises(FzeroError, match="^w: "):
        write(leaf_of(matrix()))


def test_a_view_of_a_quantized_leaf_is_one() -> None:
    tree = fzero.quantize({"w": torch.randn(64, 64)}, where=lambda path, leaf: True)
    leaf = fzero.partition(tree, MESH)["w"]
    assert torch.equal(leaf[0] + 1, leaf.full_tensor()[0] + 1)
    with pytest.raises(FzeroError, match="^w: add_ would write into a copy of this leaf"):
        leaf[0].add_(1)


@pytest.mark.parametrize("ask", [lambda p: p.data_ptr(), lambda p: p[0].untyped_storage(), lambda p: p[0].__dlpack__()])
def test_memory_of_a_copy_is_not_handed_out(ask: Read) -> None:
    with pytest.raises(FzeroError, match="^w: (data_ptr|untyped_storage|dlpack) "):
        ask(leaf_of(matrix()))
    with torch.device("cpu"), pytest.raises(FzeroError, match="^w: (data_ptr|untyped_storage|dlpack) "):
        ask(leaf_of(matrix()))  # a function mode of torch calls it for somebody else


# what a view is otherwise good for: whatever a tensor is


def save(view: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    return torch.load(file)


def train(view: Tensor) -> Tensor:
    parameter = nn.Parameter(view)
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


GOOD_FOR: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda view: view + view * 2,
    "a function": torch.sin,
    "text": repr,
    "a format": lambda view: f"{view[0]:.3f} {view[1]}",
    "a number": lambda view: view[1].item(),
    "numbers": lambda view: view.tolist(),
    "an array": lambda view: np.array(view.numpy()).tolist(),
    "pickle": lambda view: pickle.loads(pickle.dumps(view)),
    "deepcopy": lambda view: copy.deepcopy(view).add_(1),
    "clone": lambda view: view.clone().add_(1),
    "a file": save,
    "a parameter": train,
    "copy_": lambda view: torch.zeros(3).copy_(view),
    "out=": lambda view: torch.add(view, 1, out=torch.zeros(3)),
    "a list": lambda view: torch.stack([view, view]),
    "like": lambda view: torch.zeros_like(view).add_(view),
    "collate": lambda view: torch.utils.data.default_collate([view, view]),
    "a key": lambda view: len({view: 1}),
    "vmap": lambda view: torch.func.vmap(lambda x: x * view)(torch.ones(2, 3)),
    "grad": lambda view: torch.func.grad(lambda x: (x * view).sum())(view),
    "a module": lambda view: nn.functional.linear(torch.ones(2, 3), view[None]),
    "compile": lambda view: torch.compile(lambda x: x * 2, backend="eager")(view),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOOD_FOR)
def test_a_view_is_good_for_whatever_a_tensor_is(name: str) -> None:
    expected, found = GOOD_FOR[name](matrix()[1]), GOOD_FOR[name](leaf_of(matrix())[1])
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0) if isinstance(found, Tensor) else None
    assert isinstance(found, Tensor) or found == expected


def test_steps_take_views() -> None:
    leaf, view = leaf_of(matrix()), leaf_of(matrix() * 2)[:, :]
    found = fzero.simulate(lambda p, x: p * view + fzero.psum(x.sum(), "fsdp"), MESH)(leaf, view)
    torch.testing.assert_close(found.full_tensor(), matrix() * matrix() * 2 + (matrix() * 2).sum())


def test_a_view_beside_a_leaf_is_a_plain_tensor() -> None:
    leaf, view = leaf_of(matrix()), leaf_of(matrix() * 2)[:, :]
    for product in (view * leaf, leaf * view):
        assert isinstance(product, fzero.Sharded) and torch.equal(product.full_tensor(), matrix() * 2 * matrix())
