"""TraceMode: a torch dispatch mode that sees each operation of a step while make_fx records it."""

from __future__ import annotations

import keyword
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta, preserve_node_meta, set_stack_trace

from fzero.base.errors import FzeroError
from fzero.base.progress import Progress
from fzero.base.torch_private import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    has_known_value,
    no_dispatch,
    no_functions,
    overload_name,
    pytree_leaves,
)
from fzero.base.torch_private_functions import HigherOrderOperator, dispatch_in_python
from fzero.base.torch_private_traces import has_open_sizes
from fzero.base.user_line import current_user_line
from fzero.program.records import record
from fzero.tracing.checks import Checks
from fzero.tracing.higher_order import refuse
from fzero.tracing.readings import BY_INDEX, Readings
from fzero.tracing.repeats import Repeats
from fzero.tracing.user_errors import MASKS, refuse_collective
from fzero.values import regions

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)
"""Operations that return a Python value."""
_UNLIKE_TRACED = frozenset(
    getattr(getattr(_aten, name), overload or "default")
    for name, _, overload in (
        x.partition(".")
        for x in """
        native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit.no_stats
        _batch_norm_with_update batch_norm_backward native_group_norm native_group_norm_backward
        native_layer_norm_backward native_dropout_backward
        binary_cross_entropy_backward mse_loss_backward huber_loss_backward smooth_l1_loss_backward
        _log_softmax_backward_data log_sigmoid_forward softplus_backward hardsigmoid_backward hardswish_backward
        hardtanh_backward logit_backward pow.Scalar div.Tensor_mode copysign.Tensor logaddexp xlogy.Tensor
        special_xlog1py normal.Tensor_Tensor channel_shuffle max_unpool2d reflection_pad3d replication_pad3d
        reflection_pad2d_backward reflection_pad3d_backward replication_pad2d_backward replication_pad3d_backward
        """.split()
    )
)
"""Operations whose results have other strides than torch says while it traces, where operands are not contiguous; and
group norms, which refuse operands whose strides are no memory format."""
_IMAGE_NORMS = frozenset(x for x in _UNLIKE_TRACED if "batch_norm" in x.__name__ or "group_norm" in x.__name__)
"""Those of them whose results have their channels last where all operands have."""
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
"""Operations to which torch gives other strides along dimensions of size 1 while it traces."""


class TraceMode(DispatchMode):
    """While this mode is active, each new node of a trace

    * has the running line of user code as its `stack_trace`,
    * has the mark of the present `regions`,
    * does not have a result computed at trace time, or a kind of zeros that a trace loses.

    `checks` answers where torch's own code asks for the truth of a traced tensor, and `readings` where the batch alone
    decides a value or a shape.

    `read` lists the captured tensors whose elements Python has read: these stand in the program as numbers. With
    `is_open` sizes torch's Python code for operations is run: its kernels ask for the values of sizes.

    Raises:
        FzeroError: for an operation that cannot be in a program.
    """

    supports_higher_order_operators = True  # torch asks this mode about them, and it refuses them

    def __init__(
        self, checks: Checks, readings: Readings, repeats: Repeats, progress: Progress, is_open: bool = False
    ) -> None:
        super().__init__()
        self._checks, self._readings, self._repeats, self._progress = checks, readings, repeats, progress
        self.read: list[Tensor] = []
        self._default, self._asked = torch.get_default_dtype(), ""  # the line of the last value that a trace lacks
        self._dispatch = dispatch_in_python if is_open else nullcontext

    def __enter__(self) -> TraceMode:
        self._preserved = preserve_node_meta()
        self._preserved.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._preserved.__exit__(*error)
        if error[0] is None and self._asked:
            problem = (
                "Python needs a value, or a shape, that is only known when the step runs; the step catches the error"
            )
            raise FzeroError(self._asked, problem, "compute with torch there, and choose with torch.where")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two calls of three: torch asks where operands lie
            return args[0].device
        if isinstance(func, HigherOrderOperator):
            raise refuse(func.__name__)
        line, kwargs = current_user_line(), kwargs or {}
        self._progress.count(line)
        set_stack_trace([line])
        regions.set_mark(get_current_meta(), regions.current_mark())
        if func in _UNLIKE_TRACED and not (func in _IMAGE_NORMS and _are_channels_last(args)):
            args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)
        if func in BY_INDEX:
            args = args[0], [_to_mask(x) for x in args[1]], *args[2:]
        with no_functions():
            is_default = torch.get_default_dtype() == self._default
            call = self._repeats.sign(func, args, kwargs) if is_default else None
            if call is not None and self._repeats.knows(call):
                return self._repeats.repeat(call)
        _check_call(line, func, args, kwargs)
        if call is not None and self._repeats.learn_lists(call):
            return self._repeats.repeat(call)
        if func in _READS:
            self.read += [x for x in args if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
        if record(func).perform is not None:
            args = tuple(_forget_constant(arg) for arg in args)
        if func is _aten._efficientzerotensor.default:
            func = _aten.zeros.default  # forward mode makes these lazy zeros; a trace turns them into meta tensors
        last = self._repeats.find_last()
        try:
            with self._dispatch():
                result = func(*args, **kwargs)
        except DataDependentOutputException:
            result = self._checks.answer(func, args, kwargs)
            if result is None:
                found = self._readings.read_value(func, args, kwargs)
                if found is None:
                    self._asked = line
                    self._checks.refuse_draw(args[0])
                    raise
                return found[0]
        except DynamicOutputShapeException:
            result = self._readings.read_rows(func, args, kwargs)
            self._asked = self._asked if result is not None else line
            if result is None and regions.current_mark().turns:
                problem = "values of a turn decide a shape, and a loop has one program for all of its turns"
                raise FzeroError(line, problem, MASKS) from None
            if result is None:
                raise
            return result
        if isinstance(result, Tensor) and result.layout is not torch.strided:
            problem = f"makes a {result.layout} tensor, and programs have dense ones"
            raise FzeroError(line, problem, "leave it dense; give an embedding sparse=False")
        if not is_default and _takes_default(args, kwargs, result):
            problem = f"takes its dtype from torch.set_default_dtype({result.dtype}) inside of the step"
            raise FzeroError(line, problem, f"write dtype={result.dtype}, or set the default around the step")
        if func in _VIEWS:
            _correct_strides(args[0], result, self._repeats.find_last())
        if call is not None:
            self._repeats.learn(call, last, result)
        return result


def _takes_default(args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    """Whether neither operands nor a dtype that is given say which dtype of fractions a result has."""
    given = pytree_leaves((args, kwargs))
    is_said = any(isinstance(x, torch.dtype) or _has_fractions(x) for x in given)
    return _has_fractions(result) and not is_said


def _has_fractions(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _to_mask(index: Any) -> Any:
    """An index. One of bytes is a mask, which torch takes for wrong while it traces."""
    return index.bool() if isinstance(index, Tensor) and index.dtype == torch.uint8 else index


def _are_channels_last(args: Any) -> bool:
    """Whether all images among operands have their channels last in memory, whatever torch says while it traces of
    strides along a dimension of size 1."""
    images = [x for x in args if isinstance(x, Tensor) and x.ndim == 4]
    formats = [1 not in x.shape and x.is_contiguous(memory_format=torch.channels_last) for x in images]
    return bool(formats) and all(formats)


def _correct_strides(x: Tensor, view: Tensor, node: Any) -> None:
    """Give a traced view of `x`, and the value of its node, the strides that it has when the program runs.

    Along a dimension of size 1 any stride is right, but padding takes its memory format from it. So the strides of
    later tensors follow from it, and whether a reshape of them is a view.
    """
    if 1 not in view.shape or has_open_sizes(x) or has_open_sizes(view) or x.is_contiguous():
        return
    with no_functions(), no_dispatch():
        stride = torch.empty_strided(x.shape, x.stride(), device="meta").view(view.shape).stride()
        if stride != view.stride():
            for each in (view, node.meta["val"]):
                each.as_strided_(view.shape, stride, view.storage_offset())


def _forget_constant(arg: Any) -> Any:
    """`arg` as a tensor whose value torch does not know.

    torch remembers the value of a traced tensor like `torch.tensor(2.0)`, and computes with it at trace time.
    Operations of `ops` have no kernels to compute with. torch remembers values of one element only: a selected row of
    an expanded tensor has no known value.
    """
    if not isinstance(arg, FakeTensor) or not has_known_value(arg):
        return arg
    return arg.expand(2, *arg.shape).select(0, 0)


class _Call(NamedTuple):
    """What a record asks of a node, before there is one."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _check_call(line: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a random operation with a generator, a write to a captured tensor, a collective of torch.distributed, and
    an operation that torch cannot write as Python code.

    A generator's draws follow each other in an order, and a program has no such order: passes move and repeat draws.
    A write whose operands are all captured would happen now, and not when the step runs.
    """
    if kwargs.get("generator") is not None:
        raise FzeroError(
            line,
            "a generator is given, but what a step draws follows from its seed alone",
            "leave it out; torch.manual_seed and torch.get_rng_state seed and save the steps' draws",
        )
    written: Any = record(func).writes(_Call(func, args, kwargs))
    if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in written):
        problem = f"{record(func).name} writes into it, but a step is a pure function ({line})"
        raise FzeroError("a tensor that the step captured", problem, "give it to the step, and return a new one")
    if func.namespace == "c10d":
        raise refuse_collective(line)
    if keyword.iskeyword(overload_name(func)):
        raise FzeroError(line, f"torch cannot trace {func}, whose name is no name in Python", "draw with torch.randint")
