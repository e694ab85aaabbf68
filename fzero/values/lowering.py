"""Lowering: an `nn.Module` becomes a pytree of its tensors and a pure function of that tree.

    params, apply = lower(module)                     # apply(params, *args, **kwargs) -> output
    params, buffers, apply = lower_stateful(module)   # apply(params, buffers, *args, **kwargs) -> output, buffers

The tree mirrors the module: dicts by attribute name, lists for `ModuleList`, `Sequential` and `ParameterList`, nothing
for submodules without tensors (`{}` where they hold a list position). A leaf's dotted path is its `state_dict` key.

A tensor that the module has under several names is one leaf, at the first of them in the order of
`module.named_parameters()`; the other names are not in the tree, and `apply` puts the leaf in all of their places. So
the gradient of a tied weight is the sum over its uses, and there is no second copy that could drift.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree, TreeDef


def lower(module: nn.Module) -> tuple[Tree, Apply]:
    """`(params, apply)` with `apply(params, *args, **kwargs) == module(*args, **kwargs)`, for a module without state.

    Leaves of `params` share memory with the module's parameters: nothing is copied. The module is not needed afterwards
    and `apply` holds none of its parameters. Training mode is that of now; buffers are constants of `apply`.

    Raises:
        FzeroError: for lazy parameters, and for a module that changes its buffers: here where it is known (BatchNorm in
            training mode), else when `apply` sees it. Such a module goes through `lower_stateful`.
    """
    _check(module)
    path = _running_statistics(module)
    if path is not None:
        raise _change(type(module).__name__, path, is_buffer=True)
    params = _nested(module, dict(module.named_parameters()))
    return params, Apply(module, params)


def lower_stateful(module: nn.Module) -> tuple[Tree, Tree, StatefulApply]:
    """`(params, buffers, apply)` with `apply(params, buffers, *args, **kwargs) -> (output, new buffers)`.

    `buffers` is a tree like `params`, of all the module's buffers. Neither is ever changed: what the module writes into
    a buffer is in the new ones. Under a `torch.func` transform return those as auxiliary output (`has_aux=True`).

    Raises:
        FzeroError: for lazy parameters.
    """
    _check(module)
    params = _nested(module, dict(module.named_parameters()))
    buffers = _nested(module, dict(module.named_buffers()))
    return params, buffers, StatefulApply(module, params, buffers)


class Apply:
    """The pure function of a lowered module: `apply(params, *args, **kwargs)` returns what the module would.

    Leaves of `params` are tensors, or anything whose `full_tensor()` gives the full tensor. What the forward stores in
    attributes of its submodules is forgotten when it returns.

    Raises:
        FzeroError: when `params` has other leaves or shapes than the module, or when the forward changed a buffer or a
            parameter. Outside of a trace or transform, what it wrote in place is then written, as by the module itself.
    """

    def __init__(self, module: nn.Module, params: Tree) -> None:
        self._function = _Function(module)
        self._params = _Slots.of(params)
        self._constants = _Constants({name: buffer.detach() for name, buffer in module.named_buffers()})

    def __call__(self, params: Tree, /, *args: Any, **kwargs: Any) -> Any:
        given = self._params.fill(params)
        constants = self._constants.beside(given.values())
        return self._function.call(given | constants, (), args, kwargs)[0]

    def __repr__(self) -> str:
        return f"Apply({self._function.name}, {self._params})"


class StatefulApply:
    """The pure function of a module that changes its buffers, else as `Apply`.

    `apply(params, buffers, *args, **kwargs)` returns `(output, new buffers)`.
    """

    def __init__(self, module: nn.Module, params: Tree, buffers: Tree) -> None:
        self._function = _Function(module)
        self._params, self._buffers = _Slots.of(params), _Slots.of(buffers)

    def __call__(self, params: Tree, buffers: Tree, /, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        given = self._params.fill(params)
        state = {path: buffer.clone() for path, buffer in self._buffers.fill(buffers).items()}
        output, after = self._function.call(given | state, state, args, kwargs)
        return output, tree.unflatten(self._buffers.treedef, [after[path] for path in self._buffers.paths])

    def __repr__(self) -> str:
        return f"StatefulApply({self._function.name}, {self._params}, {len(self._buffers.paths)} buffers)"


class _Slots(NamedTuple):
    """The leaves that a tree must have to stand for the parameters, or the buffers, of a module."""

    treedef: TreeDef
    paths: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Tree) -> _Slots:
        leaves, treedef = tree.flatten(tensors)
        return cls(treedef, tuple(tree.paths(tensors)), tuple(leaf.shape for leaf in leaves))

    def fill(self, values: Tree) -> dict[str, Tensor]:
        """`{path: full tensor}`; raises where `values` has other leaves or shapes."""
        leaves, treedef = tree.flatten(values)
        if treedef != self.treedef:
            raise tree.mismatch(self.treedef, treedef)
        for path, leaf, shape in zip(self.paths, leaves, self.shapes):
            _check_leaf(path, leaf, shape)
        return {path: full(leaf) for path, leaf in zip(self.paths, leaves)}

    def __str__(self) -> str:
        return f"{sum(shape.numel() for shape in self.shapes):,} parameters in {len(self.shapes)} leaves"


def full(leaf: Any) -> Tensor:
    """The full tensor of a leaf."""
    return leaf if isinstance(leaf, Tensor) else leaf.full_tensor()


def _check_leaf(path: str, leaf: Any, shape: torch.Size) -> None:
    if not isinstance(leaf, Tensor) and not hasattr(leaf, "full_tensor"):
        raise FzeroError(
            path, f"this leaf is a {type(leaf).__name__}, not a tensor", "give the tree that lower returned"
        )
    if tuple(leaf.shape) != tuple(shape):
        given, expected = list(leaf.shape), list(shape)
        raise FzeroError(path, f"shape is {given}, the module has {expected}", "give a tree of the module's shapes")


class _Function:
    """The forward of a module as a function of its tensors by name. It holds none of them."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self._module = _skeleton(module)
        self._buffers = {path for path, _ in module.named_buffers()}

    def call(
        self, given: dict[str, Tensor], mutable: Container[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """`(output, the tensors after the forward)`; raises where it changed one that is not `mutable`."""
        try:
            output, after, changed = self._run(given, args, kwargs)
        except RuntimeError as error:
            if "mutate a captured Tensor" in str(error):
                # A torch.func transform refused to change what the user's function captured, but does not say which
                # tensor that was. Copies made inside of the transform may be changed, and tell.
                copies = {path: value.clone() for path, value in given.items()}
                self._refuse_changes(self._run(copies, args, kwargs)[2], mutable)
            raise
        self._refuse_changes(changed, mutable)
        return output, after

    def _run(
        self, given: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor], list[str]]:
        """`(output, tensors after, paths of those that the forward assigned or changed in place)`."""
        versions = {path: _version(value) for path, value in given.items()}
        after = dict(given)
        with _attributes_kept(self._module):
            output = functional_call(self._module, after, args, kwargs)  # writes into `after` what was assigned
        changed = [p for p, value in given.items() if after[p] is not value or _version(value) != versions[p]]
        return output, after, changed

    def _refuse_changes(self, changed: list[str], mutable: Container[str]) -> None:
        for path in changed:
            if path not in mutable:
                raise _change(self.name, path, is_buffer=path in self._buffers)


class _Constants:
    """The buffers that travel with a function: on the device of its parameters, moved there once."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self._values = values
        self._by_device: dict[torch.device, dict[str, Tensor]] = {}

    def beside(self, params: Iterable[Tensor]) -> dict[str, Tensor]:
        """The buffers, on the device of the first of `params`."""
        device = next((param.device for param in params), None)
        if device is None:
            return self._values
        if device not in self._by_device:
            # A copy made here, under make_fx or torch.func, would be a fake or wrapped tensor of that one trace. All
            # such modes are thread-local: a fresh thread makes a real one.
            with ThreadPoolExecutor(1) as thread:
                self._by_device[device] = thread.submit(self._on, device).result()
        return self._by_device[device]

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        for path, value in self._values.items():
            if value.is_meta and device.type != "meta":
                problem = f"this buffer is on the meta device, the parameters are on {device}"
                raise FzeroError(path, problem, "give it data before lower, or take buffers from lower_stateful")
        return {path: value.to(device) for path, value in self._values.items()}


def _check(module: Any) -> None:
    if not isinstance(module, nn.Module):
        problem = f"lower takes an nn.Module, got a {type(module).__name__}"
        raise FzeroError("", problem, "a function of a tree of tensors needs no lowering")
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise FzeroError(path, "this lazy parameter has no shape yet", "run the module once on an example batch")


def _nested(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> Tree:
    """`tensors` by dotted name, detached, in the shape of the module tree; {} where there are none."""
    own = (name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    entries: dict[str, Tree] = {name: tensors[prefix + name].detach() for name in own if prefix + name in tensors}
    children = {name: _nested(child, tensors, f"{prefix}{name}.") for name, child in module.named_children()}
    entries |= {name: child for name, child in children.items() if child}
    if entries and isinstance(module, (nn.ModuleList, nn.Sequential, nn.ParameterList)):
        positions = [str(position) for position in range(len(module))]
        if entries.keys() <= set(positions):
            return [entries.get(position, {}) for position in positions]
    return entries


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of `module` with parameters and buffers on the meta device: no data is copied, ties stay ties."""
    shared = (value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor))
    memo: dict[int, Any] = {id(value): value.detach() for value in shared}  # tensor attributes that are no buffers
    memo |= {id(buffer): _on_meta(buffer) for buffer in module.buffers()}
    memo |= {id(param): nn.Parameter(_on_meta(param), param.requires_grad) for param in module.parameters()}
    skeleton = copy.deepcopy(module, memo)
    for child in skeleton.modules():
        if isinstance(child, nn.RNNBase):
            child.register_forward_pre_hook(_flat_weights_anew)
    return skeleton


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _flat_weights_anew(rnn: nn.RNNBase, args: Any) -> None:
    """An RNN reads its weights from a list, where `functional_call` does not replace them."""
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards all submodules have the attributes and buffers that they have now.

    A forward that keeps a table for its next call would else hand one trace's tensors to the next trace.
    """
    before = [(child, dict(vars(child)), dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes, buffers in before:
            vars(child).clear()
            vars(child).update(attributes, _buffers=buffers)


def _version(tensor: Tensor) -> int:
    """Counts the changes in place. Inference tensors have no count."""
    return -1 if tensor.is_inference() else tensor._version


def _running_statistics(module: nn.Module) -> str | None:
    """The first buffer that a normalization layer will change: its running mean."""
    for name, child in module.named_modules():
        if isinstance(child, _NormBase) and child.training and child.running_mean is not None:
            return f"{name}.running_mean" if name else "running_mean"
    return None


def _change(module: str, path: str, *, is_buffer: bool) -> FzeroError:
    if is_buffer:
        way_out = "use fzero.lower_stateful, whose apply takes and returns buffers"
        return FzeroError(path, f"the forward of {module} changes this buffer", way_out)
    return FzeroError(path, f"the forward of {module} changes this parameter", "compute a new tensor from it instead")
