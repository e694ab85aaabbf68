"""Skeleton: a module without the data of its parameters and buffers, which runs with tensors that it is given.

Given tensors go to all places that hold a parameter or a buffer: attributes of modules, entries of lists and dicts,
attributes of objects, variables of closures. A place that cannot be changed, such as an entry of a tuple, holds a
stand-in that raises an error when it is used. So does a place with a tensor that was computed from parameters before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fzero.base import torch_private
from fzero.base.changes import Content, find_changes, is_read, take_content
from fzero.base.errors import FzeroError
from fzero.base.reachable import walk, walk_inside
from fzero.values import rules
from fzero.values.layers import hand_over_layers
from fzero.values.rebinding import copy_and_bind

Place = tuple[str, Callable[[Tensor], None], Tensor]
"""The name of a parameter or buffer, a function that puts a tensor there, and the stand-in that is there."""


_NOTHING = Content.of(())


class Skeleton:
    """A copy of a module on the meta device. What a call sets in its modules and containers is reset at its end."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _copy_to_meta(module)
        self._modules = dict(self._module.named_modules())
        slots = list(_iter_slots(self._modules))
        first = {id(tensor): slot for slot, tensor in reversed(slots)}
        self._slots = {slot: first[id(tensor)] for slot, tensor in slots}  # -> the first slot of its tensor
        known = {id(value) for _, value in walk_inside("", module)}
        known |= {id(table) for child in self._modules.values() for table in _list_tables(child)}
        held = [(name, value) for name, value in walk_inside("", self._module) if id(value) not in known]
        self._places = [place for _, value in held for place in _iter_places(value, first)]
        contents = [(name.lstrip("."), value, take_content(value)) for name, value in held if _is_container(value)]
        self._containers = [(name, value) for name, value, content in contents if content is not None]

    def list_classes(self) -> list[type[nn.Module]]:
        """The classes of the module and of those in it, each once."""
        return list(dict.fromkeys(map(type, self._modules.values())))

    def call(self, given: Mapping[str, Tensor], args: Any, kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """The module's output with the tensors `given` by name, and these tensors after the call.

        Raises:
            FzeroError: where the call counted in an attribute, and where it assigned different tensors to one.
        """
        held = {slot: given[path] for slot, path in self._slots.items() if path in given}
        with self._keep(), self._fill(given):
            hand_over_layers(self._modules)
            output = functional_call(self._module, held, args, kwargs, tie_weights=False)
        after = dict(given)
        for slot, value in held.items():  # those that the call assigned
            path = self._slots[slot]
            if value is not given[path]:
                if after[path] is not given[path] and after[path] is not value:
                    problem = f"is one tensor with {slot}, and the forward assigns two tensors to them"
                    raise FzeroError(path, problem, "make two tensors of it before lower")
                after[path] = value
        return output, after

    @contextmanager
    def _fill(self, given: Mapping[str, Tensor]) -> Iterator[None]:
        """Put given tensors into places that are no slots."""
        places = [place for place in self._places if place[0] in given]
        for path, put, _ in places:
            put(given[path])
        try:
            yield
        finally:
            for _, put, stand_in in places:
                put(stand_in)

    @contextmanager
    def _keep(self) -> Iterator[None]:
        """Reset modules and containers at the end of this context.

        Without the reset, a forward that stores a table for its next call would pass a tensor of one trace, or of other
        parameters, to the next.
        """
        before = [
            (name, child, Content.of(torch_private.copy_attributes(child).items()))
            for name, child in self._modules.items()
        ]
        contents = [(name, value, take_content(value) or _NOTHING) for name, value in self._containers]
        try:
            yield
            for name, value, content in (*before, *contents):
                self._refuse_changes(name, value, content)
        finally:
            for _, child, content in before:
                child.__dict__.clear()
                child.__dict__.update(content.items)
            for _, value, content in contents:
                _reset(value, content)

    def _refuse_changes(self, name: str, value: Any, before: Content) -> None:
        for key, change in find_changes(value, before, take_content(value) or before):
            is_item = isinstance(value, (dict, list, deque))
            place = name if key is None else f"{name}[{key!r}]" if is_item else f"{name}.{key}".lstrip(".")
            functions = (x for _, x in walk("", self._module) if isinstance(x, FunctionType))
            if before.states.get(key) or is_read(place, functions):
                problem = f"the forward changes it {change}, and reads it: a function of tensors has no memory of calls"
                way_out = "give what changes as an argument, or keep it in a buffer, with lower_stateful"
                raise FzeroError(place, problem, way_out)


def _list_tables(module: nn.Module) -> list[Any]:
    """The dicts of a module that `copy_attributes` copies."""
    attributes = vars(module)
    return [
        attributes[key]
        for key, copied in torch_private.copy_attributes(module).items()
        if copied is not attributes[key]
    ]


def _is_container(value: Any) -> bool:
    """Whether an object may be reset: no module, whose attributes are reset apart."""
    return not isinstance(value, (nn.Module, Tensor, type, FunctionType))


def _reset(value: Any, before: Content) -> None:
    now = take_content(value) or _NOTHING
    is_same = len(now.items) == len(before.items) and all(now.items.get(k, now) is v for k, v in before.items.items())
    if is_same:
        return
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(before.items.values())
        return
    table = value if isinstance(value, dict) else vars(value)
    table.clear()
    table.update(before.items)


# the copy


def _copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a module with stand-ins for its parameters and buffers. No data is copied; ties stay ties."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    memories = {torch_private.storage_key(x): path for path, x in own.items() if has_storage(x)}
    parts = {id(x) for x in own.values()}
    held = [
        (name.lstrip("."), x) for name, x in walk_inside("", module) if isinstance(x, Tensor) and id(x) not in parts
    ]
    memo: dict[int, Any] = {id(value): _share(name, value, memories) for name, value in held}
    memo |= {id(value): _stand_in(path, value) for path, value in own.items()}
    stale = [value for _, value in held if isinstance(memo[id(value)], _StandIn)]
    skeleton = copy_and_bind(module, memo, stale)
    for child in skeleton.modules():
        torch_private.assign_conversions(child)
        if isinstance(child, nn.RNNBase):
            child.register_forward_pre_hook(_refresh_weights)
    return skeleton


def _share(name: str, value: Tensor, memories: Mapping[int, str]) -> Tensor:
    """A tensor that is no parameter and no buffer, for the copy: the tensor itself, in its memory. A stand-in where it
    depends on parameters."""
    if value.is_leaf and value.requires_grad:
        return value  # which the trace warns of
    if value.grad_fn is not None:
        return _StandIn.of(value, name, "holds a tensor that an earlier forward computed from parameters")
    if has_storage(value) and torch_private.storage_key(value) in memories:
        path = memories[torch_private.storage_key(value)]
        return _StandIn.of(value, name, f"holds a tensor in the memory of {path}")
    return value.detach()


def has_storage(value: Tensor) -> bool:
    """Whether a tensor lies in memory that it can tell from other memory."""
    is_plain = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and not torch_private.is_wrapper(value)
    return is_plain and value.layout is torch.strided and not value.is_meta


class _StandIn(nn.Parameter):
    """A tensor that no function may use: it stands where a tensor of a module would be out of date."""

    place: str
    problem: str

    @classmethod
    def of(cls, value: Tensor, where: str, problem: str) -> _StandIn:
        requires_grad = isinstance(value, nn.Parameter) and value.requires_grad
        made = cls(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad)
        made.place, made.problem = where, problem
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if rules.name_of(func) in rules.METADATA | {"requires_grad", "grad", "grad_fn"}:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = torch_private.pytree_leaves((args, kwargs))
        this = next(x for x in given if isinstance(x, cls))
        if torch_private.in_backward():
            problem = (
                "is used in a backward pass behind apply, as torch.utils.checkpoint does, which runs a layer again"
            )
            raise FzeroError(
                this.place, problem, "differentiate with fzero.value_and_grad, or switch checkpointing off"
            )
        problem = f"{this.problem}, and the forward uses it: apply(params, ...) would compute with old values"
        raise FzeroError(this.place, problem, "empty it, or make the module anew, before lower")


def _stand_in(path: str, value: Tensor) -> Tensor:
    """What stands for a parameter or a buffer."""
    return _StandIn.of(value, path, "is held in a place that cannot be filled, such as a tuple")


def _refresh_weights(rnn: nn.RNNBase, args: Any) -> None:
    """A forward pre-hook: an RNN reads its weights from a list of its own, which `functional_call` does not replace."""
    torch_private.refresh_flat_weights(rnn)


def _iter_slots(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of each parameter and buffer of each module: a tied one comes several times."""
    for path, child in modules.items():
        for name, value in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            yield f"{path}.{name}".lstrip("."), value


def _iter_places(value: Any, first: Mapping[int, str]) -> Iterator[Place]:
    """The places in which an object holds a parameter or a buffer, beside the slots of modules."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
            if id(content) in first:
                yield first[id(content)], functools.partial(setattr, cell, "cell_contents"), content
        return
    content = None if isinstance(value, Tensor) else take_content(value)
    table: Any = value if isinstance(value, (dict, list, deque)) else getattr(value, "__dict__", None)
    for key, item in content.items.items() if content is not None else ():
        if id(item) in first:
            yield first[id(item)], functools.partial(table.__setitem__, key), item
