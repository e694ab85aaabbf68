"""Which operations have results of other strides than torch's fake tensors say, by samples of torch's database."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.utils._pytree as pytree
from conformance import database
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.tracing.trace_mode import _UNLIKE_TRACED

SAMPLES = 4


class _Compare(TorchDispatchMode):
    """Notes the operations whose results have other strides than a fake tensor of their form."""

    def __init__(self) -> None:
        super().__init__()
        self.unlike, self._seen = set[Any](), set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, treedef = pytree.tree_flatten((args, kwargs or {}))
        forms = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else None for x in leaves]
        made = func(*args, **kwargs or {})
        if func.is_view or func._schema.is_mutable or str((func, forms)) in self._seen:
            return made
        self._seen.add(str((func, forms)))
        try:
            with FakeTensorMode():
                fakes = [
                    x if form is None else torch.empty_strided(*form[:2], dtype=form[2])
                    for x, form in zip(leaves, forms)
                ]
                given, named = pytree.tree_unflatten(fakes, treedef)
                fake = func(*given, **named)
        except Exception:  # what torch cannot fake is not traced
            return made
        pairs = zip(pytree.tree_leaves(made), pytree.tree_leaves(fake))
        if any(isinstance(x, Tensor) and _list_strides(x) != _list_strides(y) for x, y in pairs):
            self.unlike.add(func)
        return made


def _list_strides(x: Tensor) -> Any:
    """The strides that matter: along dimensions of size 1, and of no elements, any is right."""
    is_dense = x.layout is torch.strided and x.numel() > 0
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1] if is_dense else None


def _transpose(x: Any) -> Any:
    """The same tensor, whose last two dimensions lie the other way in memory."""
    is_wide = isinstance(x, Tensor) and x.ndim > 1 and x.layout is torch.strided
    return x.detach().mT.contiguous().mT if is_wide else x


def _follow(x: Any) -> Any:
    """The same tensor, which autograd follows where it can."""
    return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def test_operations_of_other_strides_than_traced_are_known() -> None:
    """With operands that are not contiguous, forward and backward: all such operations have contiguous operands in a
    trace. A view behind another one would fail when the program runs."""
    compare = _Compare()
    warnings.simplefilter("ignore")
    for op in database.operators().values():
        if database.has_derivative(op, torch.float64) and not op.name.startswith(("linalg.", "fft.")):
            samples = list(database.samples(op, torch.float64))
            for at in range(0, len(samples), -(-len(samples) // SAMPLES)):
                _try(compare, op, samples[at])
                _try(compare, op, samples[at].transform(_transpose))
    assert len(compare.unlike & _UNLIKE_TRACED) > 15
    assert compare.unlike <= _UNLIKE_TRACED, sorted(map(str, compare.unlike - _UNLIKE_TRACED))


def _try(compare: _Compare, op: Any, sample: Any) -> None:
    try:
        with compare:
            followed = sample.transform(_follow)
            made = pytree.tree_leaves(op(followed.input, *followed.args, **followed.kwargs))
            made = [x for x in made if isinstance(x, Tensor) and x.requires_grad]
            given = pytree.tree_leaves((followed.input, followed.args, followed.kwargs))
            given = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            for change in (lambda x: x, _transpose):
                cotangents = [change(torch.randn_like(x)) for x in made]
                torch.autograd.grad(made, given, cotangents, allow_unused=True, retain_graph=True)
    except (RuntimeError, ValueError, NotImplementedError):  # of strides that an operation does not take
        pass
