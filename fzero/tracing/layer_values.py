"""What goes into a call of a layer, and what comes out of it: tensors of a trace, and plain values."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.hugging_face import is_cache
from fzero.base.symbols import is_open, key_of
from fzero.base.torch_private import storage_key, unwrap
from fzero.program.operation import Node
from fzero.tracing.copies import TracePart, Uncopied
from fzero.tracing.layer_caches import find_cache, leave_cache_out
from fzero.tracing.repeats import Repeats, Unknown
from fzero.values.layers import LayerCall

_PLAIN = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.device))


class Operands:
    """The tensors that go into a call of a layer: among its arguments, and its parameters.

    Operands of equal `key` may take each other's place.

    Raises:
        Unknown: where a layer is given anything but traced tensors and plain values, trees of them, and a cache that is
            known (`LayerCache`). Others are objects, which a layer may change where their children do not show it.
    """

    def __init__(self, repeats: Repeats, call: LayerCall) -> None:
        self.layer = call.list_layers()[call.at]
        self.cache = find_cache(call, repeats)
        plain = leave_cache_out(call.args, call.kwargs)
        if tree.find(plain, _has_attributes):
            raise Unknown
        self._leaves, self._treedef = tree.flatten(plain)
        self._owners = [(part, name) for part in self.layer.modules() for name in part._parameters]
        parameters = [part._parameters[name] for part, name in self._owners]
        given = [x for x in (*self._leaves, *parameters) if isinstance(x, Tensor)]
        self.tensors = list({id(x): x for x in given}.values())
        self._places = {id(x): i for i, x in enumerate(self.tensors)}
        described = [repeats.describe_tensor(unwrap(x)) for x in self.tensors]
        self.nodes = [node for _, node in described]
        memory = [storage_key(unwrap(x)) for x in self.tensors]
        forms = [
            (form, x.requires_grad, torch_private.is_wrapper(x), self.nodes.index(node), memory.index(key))
            for (form, node), x, key in zip(described, self.tensors, memory)
        ]
        names = [name if x is None else (name, self._places[id(x)]) for (_, name), x in zip(self._owners, parameters)]
        cache = None if self.cache is None else self.cache.description
        self.key = self._treedef, tuple(map(self._describe, self._leaves)), tuple(names), tuple(forms), cache
        self.followed = [i for i, x in enumerate(self.tensors) if torch.is_grad_enabled() and x.requires_grad]

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._places[id(leaf)]
        if type(leaf) not in _PLAIN:
            raise Unknown
        return type(leaf), repr(leaf) if type(leaf) in (float, complex) else leaf  # 0.0 is no -0.0

    def list_followed(self) -> list[Tensor]:
        """The tensors that autograd follows."""
        return [self.tensors[i] for i in self.followed]

    def find_given(self) -> set[Node]:
        """The nodes of arguments that autograd follows, without the layer's parameters."""
        places = {self._places[id(x)] for x in self._leaves if isinstance(x, Tensor)}
        return {self.nodes[i] for i in self.followed if i in places}

    @contextmanager
    def replace(self, call: LayerCall, entered: Sequence[Tensor]) -> Iterator[_Given]:
        """The arguments with other tensors for those that autograd follows, which the layer has as parameters, too.
        Lists and dicts without such tensors stay the same objects: the layer may write into them."""
        new = {id(self.tensors[i]): x for i, x in zip(self.followed, entered)}
        before: list[Any] = [part._parameters[name] for part, name in self._owners]

        def put(x: Any) -> Any:
            if is_cache(x):
                return x
            leaves, treedef = tree.flatten(x)
            is_same = not any(id(leaf) in new for leaf in leaves)
            return x if is_same else tree.unflatten(treedef, [new.get(id(leaf), leaf) for leaf in leaves])

        args, kwargs = tuple(map(put, call.args)), {name: put(x) for name, x in call.kwargs.items()}
        try:
            for (part, name), x in zip(self._owners, before):
                part._parameters[name] = new.get(id(x), x)
            yield _Given(call, args, kwargs, new)
        finally:
            for (part, name), x in zip(self._owners, before):
                part._parameters[name] = x


class _Given:
    """The arguments with which a layer runs in the place of those of a `call`. `new`: `id` of a tensor of the call ->
    the tensor in its place."""

    def __init__(
        self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any], new: Mapping[int, Tensor]
    ) -> None:
        self._call, self.args, self.kwargs, self._new = call, args, kwargs, new
        self._before = tree.flatten(leave_cache_out(args, kwargs))

    def is_kept(self) -> bool:
        """Whether the lists and dicts among the arguments hold what they held."""
        return self._holds(*self._before)

    def reaches_call(self) -> bool:
        """Whether what the layer wrote into lists and dicts is in those of the call, too."""
        leaves, treedef = tree.flatten(leave_cache_out(self._call.args, self._call.kwargs))
        return self._holds([self._new.get(id(x), x) for x in leaves], treedef)

    def _holds(self, leaves: list[Any], treedef: Any) -> bool:
        held, structure = tree.flatten(leave_cache_out(self.args, self.kwargs))
        return bool(structure == treedef and all(map(operator.is_, held, leaves)))


def _has_attributes(x: Any) -> bool:
    """Whether an argument is an object with attributes: no tensor, no plain value and no container of Python."""
    return hasattr(x, "__dict__") and not isinstance(x, (Tensor, Mapping)) and type(x) not in _PLAIN


class LayerResults:
    """What a call of a layer returned: `names` of nodes of its tensors, of which autograd follows some.

    Raises:
        Uncopied: where that is anything but traced tensors and plain values, and where a tensor is none of the layer.
    """

    def __init__(self, repeats: Repeats, returned: Any, part: TracePart) -> None:
        leaves, self._treedef = tree.flatten(returned)
        self.tensors = list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())
        places = {id(x): i for i, x in enumerate(self.tensors)}
        if any(type(x) not in _PLAIN and not is_open(x) and id(x) not in places for x in leaves):
            raise Uncopied("returns an object")
        self._leaves = [(places.get(id(x)), None if id(x) in places else x) for x in leaves]
        nodes = [repeats.describe_tensor(unwrap(x))[1] for x in self.tensors]
        if any(node not in part.names for node in nodes):
            raise Uncopied("returns a tensor from elsewhere")
        self.names = [part.names[node] for node in nodes]
        self.followed = [i for i, x in enumerate(self.tensors) if torch.is_grad_enabled() and x.requires_grad]
        plain = [(at, key_of(x) if is_open(x) else x) for at, x in self._leaves]
        self.key = self._treedef, tuple(plain), tuple(map(str, self.names)), tuple(self.followed)

    def build(self, tensors: Sequence[Any]) -> Any:
        """What is returned, with other tensors."""
        return tree.unflatten(self._treedef, [x if at is None else tensors[at] for at, x in self._leaves])
