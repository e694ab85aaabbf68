"""Lowering: an `nn.Module` becomes a pytree of its tensors and a pure function of that tree.

    params, apply = lower(module)                     # apply(params, *args, **kwargs) -> output
    params, buffers, apply = lower_stateful(module)   # apply(params, buffers, *args, **kwargs) -> output, buffers

The tree mirrors the module:

* A module is a dict by attribute name. `ModuleList`, `Sequential` and `ParameterList` are lists.
* A submodule without tensors is not in the tree; in a list it is `{}`.
* A leaf's dotted path is its `state_dict` key.

A parameter that does not require grad is a frozen leaf: `fzero.grad` gives None for it, an optimizer keeps no state for
it, and `apply_updates` returns it as it is.

A tensor with several names in the module (a tied weight) is one leaf, at its first name in the order of
`module.named_parameters()`. `apply` puts the leaf in the places of all its names. So the gradient of a tied weight is
the sum over its uses, and no second copy can drift away.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.embeddings import mark_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze, is_frozen
from fzero.base.torch_private_functions import list_vectors
from fzero.base.tree import Tree, TreeDef
from fzero.values.skeleton import Skeleton, has_storage

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of a normalization layer of torch."""
_log = logging.getLogger("fzero")


@check_arguments
def lower(module: nn.Module) -> tuple[Tree, Apply]:
    """`(params, apply)` with `apply(params, *args, **kwargs) == module(*args, **kwargs)`, for a module without state.

    Leaves of `params` share memory with the module's parameters: nothing is copied. `apply` holds none of the module's
    parameters, so the module may be deleted. `apply` stays in the module's present training mode. The module's buffers
    are constants of `apply`.

    Raises:
        FzeroError: for lazy parameters; for parameters with hooks, and modules with full backward hooks; for
            nn.DataParallel and scripted modules; for adapters of peft by `target_parameters`; for a module that changes
            its buffers, here (BatchNorm in training mode) or in `apply` (any other). Lower such a module with
            `lower_stateful`.
    """
    _check_module(module)
    path = next(_iter_statistics(module), None)
    if path is not None:
        raise _change_error(type(module).__name__, path, is_buffer=True)
    params = _list_params(module)
    _report_frozen(module)
    return params, Apply(module, params)


@check_arguments
def lower_stateful(module: nn.Module) -> tuple[Tree, Tree, StatefulApply]:
    """`(params, buffers, apply)` with `apply(params, buffers, *args, **kwargs) -> (output, new buffers)`.

    `buffers` is a tree like `params`, of all the module's buffers. `apply` changes neither tree: what the module writes
    into a buffer is in the new buffers. Under a `torch.func` transform, return the new buffers as auxiliary output
    (`has_aux=True`).

    Raises:
        FzeroError: for lazy parameters; for parameters with hooks, and modules with full backward hooks.
    """
    _check_module(module)
    params = _list_params(module)
    _report_frozen(module)
    buffers = _nest(module, dict(module.named_buffers()))
    return params, buffers, StatefulApply(module, params, buffers)


def find_statistics(module: nn.Module) -> Tree | None:
    """A tree like `buffers` of `lower_stateful`, of the running statistics alone that normalization layers change in
    the present mode. None where no layer changes any."""
    buffers = dict(module.named_buffers())
    found = {path: buffers[path] for path in _iter_statistics(module)}
    return _nest(module, found) if found else None


class Apply:
    """The pure function of a lowered module: `apply(params, *args, **kwargs)` returns the module's output.

    A leaf of `params` is a tensor, or an object whose `full_tensor()` returns one. Attributes that the forward sets on
    its submodules are reset when it returns.

    Raises:
        FzeroError: for `params` with other leaves or shapes than the module's; for a forward that changed a buffer or a
            parameter. Outside of a trace or transform, an in-place change is not undone.
    """

    def __init__(self, module: nn.Module, params: Tree) -> None:
        self._function = _Function(module)
        self._params = _Slots.of(params)
        self._constants = _Constants({name: buffer.detach() for name, buffer in module.named_buffers()})

    def __call__(self, params: Tree, /, *args: Any, **kwargs: Any) -> Any:
        given = self._params.fill(params)
        constants = self._constants.on_device_of(given.values())
        return self._function.call(given | constants, (), args, kwargs)[0]

    def find_lowered(self) -> dict[int, str]:
        """The paths of the lowered module's parameters that still live, by the key of their memory."""
        return self._function.find_lowered()

    def list_classes(self) -> list[type[nn.Module]]:
        """The classes of the lowered module and of those in it."""
        return self._function.list_classes()

    def __repr__(self) -> str:
        return f"Apply({self._function.name}, {self._params})"


class StatefulApply:
    """`Apply` for a module that changes its buffers.

    `apply(params, buffers, *args, **kwargs)` returns `(output, new buffers)`. Buffers of the module that the tree
    `buffers` lacks are constants, as in `Apply`.
    """

    def __init__(self, module: nn.Module, params: Tree, buffers: Tree) -> None:
        self._function = _Function(module)
        self._params, self._buffers = _Slots.of(params), _Slots.of(buffers)
        held = set(self._buffers.paths)
        self._constants = _Constants({name: x.detach() for name, x in module.named_buffers() if name not in held})

    def __call__(self, params: Tree, buffers: Tree, /, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        given = self._params.fill(params)
        given |= self._constants.on_device_of(given.values())
        state = {path: buffer.clone() for path, buffer in self._buffers.fill(buffers).items()}
        output, after = self._function.call(given | state, state, args, kwargs)
        return output, tree.unflatten(self._buffers.treedef, [after[path] for path in self._buffers.paths])

    def find_lowered(self) -> dict[int, str]:
        """As `Apply.find_lowered`."""
        return self._function.find_lowered()

    def list_classes(self) -> list[type[nn.Module]]:
        """As `Apply.list_classes`."""
        return self._function.list_classes()

    def __repr__(self) -> str:
        return f"StatefulApply({self._function.name}, {self._params}, {len(self._buffers.paths)} buffers)"


class _Slots(NamedTuple):
    """The structure, paths and shapes that a tree needs to replace the parameters, or the buffers, of a module."""

    treedef: TreeDef
    paths: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Tree) -> _Slots:
        leaves, treedef = tree.flatten(tensors)
        return cls(treedef, tuple(tree.paths(tensors)), tuple(leaf.shape for leaf in leaves))

    def fill(self, values: Tree) -> dict[str, Tensor]:
        """`{path: full tensor}` of the tree `values`.

        Raises:
            FzeroError: for other leaves or shapes.
        """
        leaves, treedef = tree.flatten(values, is_leaf=lambda x: hasattr(x, "full_tensor"))
        if treedef != self.treedef:
            raise tree.mismatch(self.treedef, treedef)
        for path, leaf, shape in zip(self.paths, leaves, self.shapes):
            _check_leaf(path, leaf, shape)
        return {path: _full_tensor(leaf) for path, leaf in zip(self.paths, leaves)}

    def __str__(self) -> str:
        return f"{sum(shape.numel() for shape in self.shapes):,} parameters in {len(self.shapes)} leaves"


def _full_tensor(leaf: Any) -> Tensor:
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


def _check_leaf(path: str, leaf: Any, shape: torch.Size) -> None:
    if not isinstance(leaf, Tensor) and not hasattr(leaf, "full_tensor"):
        raise FzeroError(
            path, f"this leaf is a {type(leaf).__name__}, not a tensor", "give the tree that lower returned"
        )
    whole = getattr(leaf, "global_shape", leaf.shape)  # a module computes with a part of a split leaf
    if tuple(whole) != tuple(shape):
        given, expected = list(whole), list(shape)
        raise FzeroError(path, f"shape is {given}, the module has {expected}", "give a tree of the module's shapes")


class _Function:
    """The forward of a module as a function of its tensors by name. Holds no tensor of the module."""

    not_described = ("_modules",)  # for errors (`fzero.cache.describe`)

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self._skeleton = Skeleton(module)
        self._buffers = {path for path, _ in module.named_buffers()}
        # of modules: torch does not swap the values of a parameter that has a weak reference
        self._modules = [(path, weakref.ref(each)) for path, each in module.named_modules()]

    def find_lowered(self) -> dict[int, str]:
        alive = ((path, ref()) for path, ref in self._modules)
        own = [pair for path, each in alive if each for pair in each.named_parameters(path, recurse=False)]
        return {torch_private.storage_key(x): path for path, x in own if has_storage(x)}

    def list_classes(self) -> list[type[nn.Module]]:
        return self._skeleton.list_classes()

    def call(
        self, given: dict[str, Tensor], mutable: Container[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """`(output, the tensors after the forward)`.

        Raises:
            FzeroError: where the forward changed a tensor whose path is not in `mutable`.
        """
        try:
            output, after, changed = self._run(given, args, kwargs)
        except RuntimeError as error:
            if "mutate a captured Tensor" in str(error):
                # A torch.func transform refused to change a captured tensor, and its error does not name the tensor.
                # A transform allows changes to copies made inside it: run on copies, and see which one changes.
                copies = {path: value.clone() for path, value in given.items()}
                self._refuse_changes(self._run(copies, args, kwargs)[2], mutable)
            raise
        self._refuse_changes(changed, mutable)
        return output, after

    def _run(
        self, given: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor], list[str]]:
        """`(output, tensors after, paths of the tensors that the forward assigned or changed in place)`."""
        versions = {path: torch_private.version_of(value) for path, value in given.items()}
        output, after = self._skeleton.call(given, args, kwargs)
        changed = [
            p for p, x in given.items() if not _is_same(after[p], x) or torch_private.version_of(x) != versions[p]
        ]
        return output, after, changed

    def _refuse_changes(self, changed: list[str], mutable: Container[str]) -> None:
        for path in changed:
            if path not in mutable:
                raise _change_error(self.name, path, is_buffer=path in self._buffers)


class _Constants:
    """The buffers of an `Apply`: copied once to each device that its parameters come on."""

    not_described = ("_by_device",)  # copies (`fzero.cache.describe`)

    def __init__(self, values: dict[str, Tensor]) -> None:
        self._values = values
        self._by_device: dict[torch.device, dict[str, Tensor]] = {}

    def on_device_of(self, params: Iterable[Tensor]) -> dict[str, Tensor]:
        """The buffers, on the device of the first of `params`."""
        device = next((param.device for param in params), None)
        if device is None:
            return self._values
        if device not in self._by_device:
            # Under make_fx or torch.func, a copy made in this thread would be a fake or wrapped tensor of one trace.
            # All such modes are thread-local: a fresh thread makes a real tensor.
            with ThreadPoolExecutor(1) as thread:
                self._by_device[device] = thread.submit(self._copy_to, device).result()
        return self._by_device[device]

    def _copy_to(self, device: torch.device) -> dict[str, Tensor]:
        for path, value in self._values.items():
            if value.is_meta and device.type != "meta":
                problem = f"this buffer is on the meta device, the parameters are on {device}"
                raise FzeroError(path, problem, "give it data before lower, or take buffers from lower_stateful")
        return {path: value.to(device) for path, value in self._values.items()}


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        problem = f"lower takes an nn.Module, got a {type(module).__name__}"
        raise FzeroError("", problem, "a function of a tree of tensors needs no lowering")
    if isinstance(module, nn.DataParallel):
        problem = "divides batches over the devices of one process"
        raise FzeroError("DataParallel", problem, "give its .module to lower; a step runs on all ranks")
    if isinstance(module, torch.jit.ScriptModule):
        problem = "is a scripted module, whose parameters torch cannot replace"
        raise FzeroError(type(module).__name__, problem, "give the module that was scripted, or one that holds it")
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise FzeroError(path, "this lazy parameter has no shape yet", "run the module once on an example batch")
        if torch_private.has_hooks(tensor):
            problem = "a hook waits for this parameter's gradient, and a function of tensors has no such hooks"
            raise FzeroError(
                path, problem, "remove the hook, and change the gradients that fzero.value_and_grad returns"
            )
    for path, child in module.named_modules():
        if torch_private.has_full_backward_hooks(child):
            problem = "this module has a full backward hook, which torch.func cannot call"
            way_out = "remove it, and register a forward hook that calls output.register_hook(fn)"
            raise FzeroError(path or type(child).__name__, problem, way_out)
        if (type(child).__module__, type(child).__name__) == ("peft.tuners.lora.layer", "ParamWrapper"):
            problem = "has adapters by target_parameters, whose forward registers a parametrization"
            raise FzeroError(f"{path}.{child.parameter_name}", problem, "name linear modules by target_modules")


def _list_params(module: nn.Module) -> Tree:
    """The tree of a module's parameters. A mark on each leaf says whether it is an embedding, alone or tied."""
    named = dict(module.named_parameters())
    tables = (child for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag)))
    weights = {id(weight) for table in tables for weight in table.parameters()}
    params = _nest(module, named)
    return tree.map_with_path(lambda path, leaf: mark_embedding(leaf, id(named[path]) in weights), params)


def _nest(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> Tree:
    """The tree of a module's `tensors`, detached, from `{dotted name: tensor}`; {} for a module without tensors.
    Frozen parameters stay frozen."""
    own = (name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    held = {name: tensors[prefix + name] for name in own if prefix + name in tensors}
    entries: dict[str, Tree] = {name: freeze(tensor.detach(), tensor) for name, tensor in held.items()}
    children = {name: _nest(child, tensors, f"{prefix}{name}.") for name, child in module.named_children()}
    entries |= {name: child for name, child in children.items() if child}
    if entries and isinstance(module, (nn.ModuleList, nn.Sequential, nn.ParameterList)):
        positions = [str(position) for position in range(len(module))]
        if entries.keys() <= set(positions):
            return [entries.get(position, {}) for position in positions]
    return entries


def _report_frozen(module: nn.Module) -> None:
    """Log the parameters that do not require grad."""
    parameters = dict(module.named_parameters())
    frozen = [path for path, param in parameters.items() if is_frozen(param)]
    if frozen:
        some = ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else "")
        message = "%s: %d of %d parameters do not require grad and are frozen, without gradient and optimizer state: %s"
        _log.info(message, type(module).__name__, len(frozen), len(parameters), some)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are one, apart from wrappers of transforms: `buffer.to(device)` returns one in a gradient."""
    return a is b or (isinstance(a, Tensor) and torch_private.unwrap(a) is torch_private.unwrap(b))


def _iter_statistics(module: nn.Module) -> Iterator[str]:
    """The paths of the buffers that layers of torch in training mode change: running statistics of normalization
    layers, and the vectors of spectral norms."""
    for name, child in module.named_modules():
        own = dict(child.named_buffers(recurse=False)) if child.training else {}
        has_statistics = isinstance(child, torch_private.NormBase) and child.running_mean is not None
        names = STATISTICS if has_statistics else list_vectors(child)
        yield from (f"{name}.{key}".lstrip(".") for key in names if key in own)


def _change_error(module: str, path: str, *, is_buffer: bool) -> FzeroError:
    if is_buffer:
        way_out = "use fzero.lower_stateful, whose apply takes and returns buffers"
        return FzeroError(path, f"the forward of {module} changes this buffer", way_out)
    way_out = "compute a new tensor from it instead, or convert the module before lower"
    return FzeroError(path, f"the forward of {module} changes this parameter", way_out)
