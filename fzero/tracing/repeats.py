"""Repeats: what traces know of operations that they have seen.

Layers are alike, so most operations of a step have been called before, on other tensors of the same forms. Their nodes
are recorded at once, in a tenth of the time that torch takes to find the same forms of results again. Python runs for
each layer as ever: nothing is assumed about that. Steps of a process are alike too, such as one that trains and one
that evaluates: what a trace finds of torch's operations, later traces know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.symbols import is_open, is_same_number, key_of
from fzero.base.torch_private import FakeTensor, FakeTensorMode, OpOverload, no_dispatch, schema_of, storage_key
from fzero.base.torch_private_traces import OpenForms, TraceGraph, make_as, make_empty, make_pair, without_proxies
from fzero.program.aten import infer_lists
from fzero.program.operation import Node
from fzero.program.records import record

_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

_BY_BACKEND = frozenset({"convolution", "convolution_backward"})
"""Operations to whose results torch gives the strides of the library that it chooses: flags may change that choice."""
_DETACH = torch.ops.aten.detach.default
"""`x.data` calls it too, and takes from its result what torch alone puts there."""
_MOST_FORMS, _MOST_OPERANDS = 10_000, 16
_FORMS: dict[Any, Any] = {}
"""The forms of results of torch's operations, which all traces of this process share: at most `_MOST_FORMS`, of calls
with at most `_MOST_OPERANDS` tensors."""


class Call(NamedTuple):
    """A call of an operation on traced tensors. Calls of one key have results of the same forms."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[FakeTensor]  # among the operands, in order
    nodes: list[Node]
    key: Any
    is_shared: bool  # whether other traces find the same forms


class ResultForm(NamedTuple):
    """A tensor among the results of a call. It lies in memory of its own, or in that of the operand at `memory`. With
    `is_operand` it is that operand."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    start: Any
    memory: int | None
    is_operand: bool


class ResultValue(NamedTuple):
    """A value of Python among the results of a call: None, or a number that follows from the forms of its operands."""

    value: int | None


class Unknown(Exception):
    """An operand that is no traced tensor of a plain form, and no plain value."""


class Repeats:
    """The forms of the results of the calls that a trace has seen, or another one of this process, by the forms of
    their operands."""

    def __init__(self, traced: TraceGraph, mode: FakeTensorMode) -> None:
        self._traced, self._mode = traced, mode
        self._open = None if mode.shape_env is None else OpenForms()
        self._known: dict[Any, Any] = {}  # what no other trace knows
        self._plain: dict[torch.device, FakeTensor] = {}
        self._describe_sizes: Callable[..., Any] = tuple if self._open is None else _describe_open
        self._aside: Callable[[], AbstractContextManager[Any]] = nullcontext if self._open is None else without_proxies

    def sign(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call of an operation. None where its results may depend on more than the forms of its operands: those of
        an operation from elsewhere are what code of others says."""
        if not isinstance(operation, OpOverload) or torch.Tag.inplace_view in operation.tags or operation is _DETACH:
            return None
        is_own = _is_own(operation)
        if (operation.namespace != "aten" and not is_own) or torch.is_inference_mode_enabled():
            return None
        tensors, nodes = list[FakeTensor](), list[Node]()
        given = (args, tuple(kwargs.items()))
        if is_own and record(operation).stands_for is None:  # texts name layouts and axes, which have no part in a form
            given = _forget_names(given)
        try:
            described = self._describe(given, tensors, nodes)
        except Unknown:
            return None
        memory = [storage_key(x) for x in tensors] if len(tensors) > 1 else []
        shared = tuple(map(memory.index, memory))
        # a default device is among the operands by now
        key = operation, described, shared, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        is_shared = self._open is None and not is_own and len(tensors) <= _MOST_OPERANDS
        is_shared = is_shared and operation.__name__.partition(".")[0] not in _BY_BACKEND
        return Call(operation, args, kwargs, tensors, nodes, key, is_shared)

    def _describe(self, x: Any, tensors: list[FakeTensor], nodes: list[Node]) -> Any:
        kind = type(x)
        if kind is FakeTensor:
            form, node = self.describe_tensor(x)
            tensors.append(x)
            nodes.append(node)
            return form
        if kind in _PLAIN:
            return kind, x
        if kind is list or kind is tuple:
            return kind, tuple([self._describe(item, tensors, nodes) for item in x])
        if is_open(x):
            return key_of(x)
        raise Unknown

    def describe_form(self, x: Tensor) -> Any:
        """What calls of one key have in common of an operand."""
        return x.dtype, x.device, self._describe_sizes((*x.shape, *x.stride(), x.storage_offset()))

    def find_last(self) -> Node | None:
        """The node that was traced last."""
        return self._traced.find_last()

    def knows(self, call: Call) -> bool:
        """Whether the results of a call have known forms."""
        return self._known_to(call).get(call.key) is not None

    def _known_to(self, call: Call) -> dict[Any, Any]:
        """What is known of calls such as this one. None stands for a call that is not recorded as one node."""
        return _FORMS if call.is_shared else self._known

    def _note(self, call: Call, forms: Any) -> None:
        known = self._known_to(call)
        if known is _FORMS and len(known) >= _MOST_FORMS:
            known.clear()
        known[call.key] = forms

    def repeat(self, call: Call) -> Any:
        """Record a known call. Returns its results."""
        forms, nodes = self._known_to(call)[call.key], iter(call.nodes)
        args, kwargs = _place(call.args, nodes), _place(call.kwargs, nodes)
        with self._aside():
            made, value = self._make(forms, call.tensors)
        self._track(made, value, self._traced.emit(call.operation, args, kwargs, value))
        return made

    def _track(self, made: Any, value: Any, node: Node) -> None:
        """Let a node be that of a result. Items of a list have nodes of their own."""
        if isinstance(made, Tensor):
            return self._traced.track(made, node)
        for i, (item, value_of_item) in enumerate(zip(made, value)):
            is_plain = is_plain_result(item)
            taken = self._traced.emit_item(node, i, None if is_plain else value_of_item)
            if not is_plain:
                self._track(item, value_of_item, taken)

    def learn(self, call: Call, last: Node | None, result: Any) -> None:
        """Note the forms of the results of a call that torch has recorded behind the node `last`. A call that was
        recorded in another way than as one node, or that changed the form of an operand, stays unknown."""
        if call.key in self._known_to(call):
            return
        with self._aside():
            self._note(call, self._find_forms(call, last, result))

    def learn_lists(self, call: Call) -> bool:
        """Note the forms of the results of a function of lists, elementwise at each position. Returns whether they are
        known then. The function is called on one position of each form: an update of an optimizer has one position for
        each leaf, and few forms."""
        known = record(call.operation)
        if call.key in self._known_to(call) or known.kind is not infer_lists or schema_of(call.operation).is_mutable:
            return False
        lists = [x for x in call.args if type(x) is list]
        count = len(lists[0]) if lists else 0
        if any(len(x) != count for x in lists):
            return False
        rows = list(zip(*(map(self._describe_item, x) for x in lists)))
        first = {row: i for i, row in reversed(list(enumerate(rows)))}  # the first position of each form
        if len(first) == count:
            return False
        args = [[x[i] for i in first.values()] if type(x) is list else x for x in call.args]
        memory = set(map(storage_key, call.tensors))
        with without_proxies():
            result = call.operation(*args, **call.kwargs)
            is_one = not isinstance(result, tuple)
            columns = [
                {row: self._find_new(x, memory) for row, x in zip(first, column)}
                for column in ([result] if is_one else result)
            ]
        if any(None in column.values() for column in columns):
            return False
        made = [[column[row] for row in rows] for column in columns]
        self._note(call, made[0] if is_one else tuple(made))
        return True

    def _describe_item(self, x: Any) -> Any:
        return self.describe_form(x) if isinstance(x, Tensor) else type(x)

    def _find_new(self, x: Any, memory: set[int]) -> ResultForm | None:
        """The form of a result, None where it is no tensor in memory of its own."""
        if not isinstance(x, FakeTensor) or storage_key(x) in memory:
            return None
        form: ResultForm | None = self._find_form(x, [], [], set())
        return form

    def _find_forms(self, call: Call, last: Node | None, result: Any) -> Any:
        again = self.sign(call.operation, call.args, call.kwargs)
        if again is None or again.key != call.key:
            return None
        # nodes that compute open numbers may stand between
        nodes = [x for x in self._traced.nodes_after(last) if isinstance(x.meta.get("val"), (Tensor, list, tuple))]
        following = iter(nodes[1:])
        if not nodes or not _is_recorded(result, nodes[0], following) or next(following, None) is not None:
            return None
        if nodes[0].target is not call.operation or not _has_form(nodes[0], call):  # torch leaves out default values
            return None
        memory, own = [storage_key(x) for x in call.tensors], set[int]()
        return self._find_form(result, call.tensors, memory, own)

    def find_forms(self, result: Any, operands: list[Any]) -> Any:
        """The forms of the values of a node whose operands have these values; None where that is not all of them."""
        with self._aside():
            return self._find_form(result, operands, list(map(storage_key, operands)), set())

    def make_value(self, form: Any, operands: list[Any]) -> Any:
        """The value of a new node with such a form, or values of a list of forms, where its operands have these values.
        Call it in the block of `making`."""
        if isinstance(form, ResultValue):
            return form.value
        if not isinstance(form, ResultForm):
            return type(form)([self.make_value(x, operands) for x in form])
        operand = None if form.memory is None else operands[form.memory]
        if self._open is not None:
            return self._open.make_one(self._find_plain(form.device), form, operand)
        storage = None if operand is None else operand.untyped_storage()
        return make_as(self._find_plain(form.device), form.dtype, form.shape, form.stride, form.start, storage)

    @contextmanager
    def making(self) -> Iterator[None]:
        """A block in which `make_value` may be called."""
        with self._aside(), no_dispatch():
            yield

    def describe_forms(self, forms: Any) -> Any:
        """Forms, with numbers for open sizes that are equal where the sizes are."""
        if isinstance(forms, ResultForm):
            return forms._replace(
                shape=self._describe_sizes(forms.shape),
                stride=self._describe_sizes(forms.stride),
                start=self._describe_sizes((forms.start,)),
            )
        if isinstance(forms, (list, tuple)):
            return [self.describe_forms(x) for x in forms]
        return self._describe_sizes((forms,)) if is_open(forms) else None if isinstance(forms, Tensor) else forms

    def make_constant(self, x: Tensor) -> FakeTensor:
        """The value of a node that takes a tensor from outside of the trace: the same one for each such node."""
        with without_proxies():
            made: FakeTensor = self._mode.from_tensor(x, static_shapes=True)
        return made

    def make_alias(self, x: FakeTensor, node: Node) -> FakeTensor:
        """Another tensor for the value of a node, which `x` is."""
        form = ResultForm(x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), 0, False)
        with self._aside():
            made: FakeTensor = self._make(form, [x])[0]
        self._traced.track(made, node)
        return made

    def make_again(self, x: FakeTensor) -> FakeTensor:
        """Another tensor for the value of a traced one that no transform wraps."""
        return self.make_alias(x, self.describe_tensor(x)[1])

    def describe_tensor(self, x: Tensor) -> tuple[Any, Node]:
        """The form and the node of a traced tensor that no transform wraps.

        Raises:
            Unknown: for any other tensor.
        """
        slot = self._traced.slot_of(x) if type(x) is FakeTensor else None
        if not isinstance(x, FakeTensor) or slot is None or slot.constant is not None or not _is_plain(x):
            raise Unknown
        return self.describe_form(x), slot.proxy.node

    def _find_form(self, x: Any, operands: list[FakeTensor], memory: list[int], own: set[int]) -> Any:
        """The form of a result, or of each of a list. None where a tensor made of it is another one. `own` is the
        memory of earlier results."""
        if isinstance(x, (list, tuple)):
            forms = [self._find_form(item, operands, memory, own) for item in x]
            return None if None in forms else type(x)(forms)
        if is_plain_result(x):
            return ResultValue(x)
        key = storage_key(x)
        place = memory.index(key) if key in memory else None
        same = [i for i, operand in enumerate(operands) if operand is x]
        at = same[0] if same else place
        form = ResultForm(x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), at, bool(same))
        made, _ = self._make(form, operands)
        is_whole = is_same_number(*(y.untyped_storage().nbytes() for y in (x, made)))
        is_alike = self.describe_form(made) == self.describe_form(x) and is_whole
        is_alone = place is not None or key not in own
        own.add(key)
        return form if is_alike and is_alone else None

    def _make(self, form: Any, operands: list[FakeTensor]) -> tuple[Any, Any]:
        """A tensor of a form, and the fake value of its node; lists of these of a list of forms."""
        if isinstance(form, ResultValue):
            return form.value, form.value
        if not isinstance(form, ResultForm):
            pairs = [self._make(item, operands) for item in form]
            return type(form)(made for made, _ in pairs), type(form)(value for _, value in pairs)
        dtype, device, shape, stride, start, memory, is_operand = form
        operand, like = None if memory is None else operands[memory], self._find_plain(device)
        if self._open is not None:
            made, value = self._open.make(like, form, operand)
        else:
            storage = None if operand is None else operand.untyped_storage()
            made, value = make_pair(like, dtype, shape, stride, start, storage)
        return operand if is_operand else made, value

    def _find_plain(self, device: torch.device) -> FakeTensor:
        """A fake tensor of a device, about which nothing was asked."""
        if device not in self._plain:
            self._plain[device] = make_empty(self._mode, device)
        return self._plain[device]


def is_plain_result(x: Any) -> bool:
    """Whether a result is a value of Python, for which a trace has a node without a value."""
    return x is None or type(x) is int


def _is_recorded(result: Any, node: Node, following: Iterator[Node]) -> bool:
    """Whether a result is the value of a node, and its items, in order, those of the next nodes behind it."""
    if type(result) is FakeTensor:
        return _is_plain(result)
    if type(result) not in (list, tuple):
        return False
    for i, item in enumerate(result):
        if is_plain_result(item):
            continue
        taken = next(following, None)
        if taken is None or taken.target is not operator.getitem or taken.args != (node, i):
            return False
        if not _is_recorded(item, taken, following):
            return False
    return True


def _has_form(node: Node, call: Call) -> bool:
    """Whether a node has as many arguments as a call, and by the same names."""
    return len(node.args) == len(call.args) and node.kwargs.keys() == call.kwargs.keys()


@cache
def _is_own(operation: Any) -> bool:
    """Whether an operation is one of `fzero.program.ops`."""
    return operation.namespace == "fzero" and not record(operation).is_foreign


def _forget_names(given: Any) -> Any:
    kind = type(given)
    if kind is list or kind is tuple:
        return kind([_forget_names(x) for x in given])
    return "" if kind is str else given


def _is_plain(x: FakeTensor) -> bool:
    """Whether a tensor is no more than its form, and a position in a graph of derivatives."""
    if x.layout is not torch.strided or x.constant is not None:
        return False
    return not (x.is_inference() or x.is_conj() or x.is_neg())


def _describe_open(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([key_of(x) if is_open(x) else x for x in sizes])


def _place(x: Any, nodes: Iterator[Node]) -> Any:
    """Operands with nodes in the places of tensors."""
    kind = type(x)
    if kind is FakeTensor:
        return next(nodes)
    if kind is list or kind is tuple:
        return kind([_place(item, nodes) for item in x])
    return {key: _place(item, nodes) for key, item in x.items()} if kind is dict else x
