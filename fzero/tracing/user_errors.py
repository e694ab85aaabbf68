"""Errors of torch while a step is traced, as `FzeroError` with the line of user code that they come from."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.torch_private import DataDependentOutputException, DynamicOutputShapeException
from fzero.base.user_line import user_line_of_error
from fzero.program.linear import UNPARTITION_FIRST
from fzero.values.sharded import Sharded

_CHOICES = "choose with torch.where(condition, a, b), or return the tensor and look at it outside the step"
MASKS = (
    "keep all elements, and weigh them: torch.where(mask, x, 0), (x * mask).sum() / mask.sum(), or a cross entropy's "
    "ignore_index"
)
_NEEDS_VALUES = "this needs the values of a tensor, which a trace does not have"
_BACKWARD = (
    "backward is called, but a step is a pure function, and its tensors have no .grad",
    "differentiate with fzero.value_and_grad(loss)(params)",
)
_COPIES = (
    "Python copies a tensor, or writes it to a file, and a trace has none of its elements",
    "copy it with .clone(), and save the step's results outside of the step",
)
_KNOWN = {
    "must override the setup_context": (
        "this torch refuses an `apply = F.apply`, kept from before, of an autograd Function whose forward takes ctx",
        "call F.apply(...), or write forward without ctx and setup_context(ctx, inputs, output)",
    ),
    "saved tensor hooks": (
        "hooks on saved tensors have no place under torch.func",
        "compute again with fzero.remat(fn)",
    ),
    "TransformType": (
        "torch has no derivative of this higher-order operation under torch.func",
        "compute both branches and choose with torch.where, or take torch.cond and its like out of the loss",
    ),
    "differentiated Tensors does not require grad": (
        "torch.autograd.grad is called, but torch.func differentiates a step",
        "write what is differentiated as a function, and call torch.func.grad(fn)(x), also inside of a loss",
    ),
    "does not have a grad_fn": _BACKWARD,
    "call backward() outside": _BACKWARD,
    "mutating directly with `.data`": (
        "the data of a tensor is replaced inside of a gradient, as the constructor of a module does",
        "make modules outside of the step, and compute with the new value here",
    ),
    "Couldn't swap": ("a module is converted inside of the step", "convert it, or make it, outside of the step"),
    "mutate a captured Tensor": (
        "a tensor from outside of a gradient is written to, inside",
        "write into a copy that is made inside, and return it",
    ),
    "metadata mutating": (
        "this changes the shape of a tensor in place, beside one that the step captured",
        "make a tensor of that shape",
    ),
    "WeakValueDictionary": _COPIES,
    "_share_fd_": _COPIES,
    "storage of TensorWrapper": _COPIES,
    "deepcopy protocol": _COPIES,
    "__deepcopy__() for wrapper": _COPIES,
    "nested_tensor_from": (
        "the step makes a nested tensor, and programs have dense ones",
        "give rows of one length, and a mask",
    ),
    "supported for tensor subclasses": (_NEEDS_VALUES, "compute with torch"),
    "do not have strides": ("the step uses a sparse tensor, and programs have dense ones", "give tensor.to_dense()"),
    "data is not allocated": (_NEEDS_VALUES, "give the numbers as Python numbers"),
    "with unallocated storage": (
        _NEEDS_VALUES,
        "compute with torch; for experts of transformers choose config._experts_implementation = 'batched_mm'",
    ),
    "Cannot access data pointer": (_NEEDS_VALUES, "give the numbers as Python numbers"),
    "match the broadcast shape": ("torch cannot tell the shape of this while it traces", "write the shapes out"),
    "primals and tangents": ("primals and tangents are of different leaves", "give each leaf its own tangent"),
    "Sharded": ("torch takes no Sharded here", "give leaf.full_tensor()"),
    "FlexAttention does not support backward": (
        "torch has no gradient of flex_attention on this device",
        "train on a GPU, or use scaled_dot_product_attention, in transformers attn_implementation='sdpa'",
    ),
    "\nRuntimeError: \n": (  # torch.jit says no more
        "a function of torch.jit.script takes no Sharded",
        "give leaf.full_tensor(), or call the function of Python",
    ),
    "Functionalize rule": ("torch.func.functionalize does not support this", "leave it out: a program keeps writes"),
    "functorch": ("torch.func does not support this", "take it out of the loss, or out of the step"),
    "vmap": ("torch.func does not support this", "take it out of the loss, or out of the step"),
    "FakeTensor": (_NEEDS_VALUES, "do it outside of the step"),
}
"""A part of a message of torch -> the problem and the way out."""


_COLLECTIVES = "torch.distributed.distributed_c10d"
"""The module of torch whose functions are collectives."""
_MAPS = "torch._functorch.vmap"
"""The module of torch that maps a function."""


def refuse_collective(where: str) -> FzeroError:
    """The error of a collective of torch.distributed."""
    return FzeroError(
        where,
        "calls a collective of torch.distributed, which would run once, while the step is traced",
        "call fzero.psum, or another collective of fzero, with the axis of the mesh, or call it outside of the step",
    )


def _maps_leaves(tb: Any) -> bool:
    """Whether vmap itself has refused its arguments, one of which is a leaf."""
    frames = [frame for frame, _ in walk_tb(tb)]
    is_vmap = [frame.f_globals.get("__name__") == _MAPS for frame in frames]
    given = (frame.f_locals.get("args") for frame, is_own in zip(frames, is_vmap) if is_own)
    return is_vmap[-1] and any(isinstance(x, Sharded) for args in given for x in tree.leaves(args))


class NameErrors:
    """A context that turns errors of torch which come from tracing `fn` into an `FzeroError` with the user's line.

    Errors that plain torch raises too, for shapes that do not fit say, stay as they are.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if error is None or isinstance(error, FzeroError):
            return
        where = user_line_of_error(tb) or getattr(self.fn, "__name__", "step")
        if isinstance(error, ValueError) and _maps_leaves(tb):
            problem = "vmap maps over a leaf, and knows no dimensions of a Sharded"
            raise FzeroError(where, problem, UNPARTITION_FIRST) from error
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            problem = "Python needs a value, or a shape, that is only known when the step runs"
            way_out = MASKS if isinstance(error, DynamicOutputShapeException) else _CHOICES
            raise FzeroError(where, problem, way_out) from error
        if isinstance(error, (RuntimeError, TypeError, KeyError, AttributeError, AssertionError)):
            if any(frame.f_globals.get("__name__") == _COLLECTIVES for frame, _ in walk_tb(tb)):
                raise refuse_collective(where) from error
            message = str(error)
            for part, (problem, way_out) in _KNOWN.items():
                if part in message:
                    raise FzeroError(where, f"{problem}: {message.splitlines()[0][:500]}", way_out) from error
