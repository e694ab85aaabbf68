"""Equal layers: the list of a model's layers, each of which can compute with the leaves of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.base.errors import FzeroError

PLAIN = (bool, int, float, str, tuple, list, torch.dtype, FunctionType, type(None))
"""Attributes of modules that are compared."""
NOISE = ("drop", "jitter")
"""Words in the names of attributes that are rates of random draws."""


class EqualLayers(NamedTuple):
    """The layers of a model: their name and list, the plain attributes of each, and for attributes that are the number
    of the layer (module in the layer, attribute)."""

    name: str
    modules: nn.ModuleList
    attributes: list[dict[str, Any]]
    numbers: frozenset[tuple[str, str]]


def find_layers(model: nn.Module, ranks: int, axis: Any) -> EqualLayers:
    """The equal layers of a model, for stages on so many ranks.

    Raises:
        FzeroError: for a model that has no list of layers, or several; for a layer that is not like the first, by the
            attribute, leaf or buffer; for layers that the ranks do not divide; for layers with random draws.
    """
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    lists = [(name, each) for name, each in lists if any(True for _ in each.parameters())]
    outer = [(name, each) for name, each in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        names = ", ".join(name for name, _ in outer) or "none"
        problem = f"{type(model).__name__} has {len(outer)} lists of layers: {names}"
        raise FzeroError(f"pp={axis!r}", problem, "leave pp out: a pipeline is of one list of equal layers")
    ((name, modules),) = outer
    if len(modules) % ranks:
        divisors = ", ".join(str(n) for n in range(1, len(modules) + 1) if len(modules) % n == 0)
        problem = f"has {len(modules)} layers, for stages on {ranks} ranks along {axis!r}"
        raise FzeroError(name, problem, f"take a mesh with {divisors} ranks along it")
    described = [_describe(layer) for layer in modules]
    numbers = frozenset(key for key, x in described[0].items() if _is_number(key, x, described))
    for number, each in enumerate(described):
        odd = next(
            (k for k in {**described[0], **each} if k not in numbers and not _is_equal(k, described[0], each)), None
        )
        if odd is not None:
            values = " and ".join(str(x.get(odd, "nothing"))[:60] for x in (described[0], each))
            problem = f"is not like layer 0: {'.'.join(odd).lstrip('.')} is {values}"
            raise FzeroError(f"{name}.{number}", problem, "leave pp out: stages have equal layers")
    _check_noise(model, name, modules)
    return EqualLayers(name, modules, [_list_plain(layer) for layer in modules], numbers)


def _list_plain(module: nn.Module) -> dict[str, Any]:
    return {key: x for key, x in vars(module).items() if isinstance(x, PLAIN) and not key.startswith("_")}


def _describe(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """What two layers have alike when one can compute with the leaves of the other."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module).__name__
        found |= {(path, key): x for key, x in _list_plain(module).items()}
        for key, leaf in module.named_parameters(recurse=False):
            found[path, key] = f"{leaf.dtype} {list(leaf.shape)}" + ("" if leaf.requires_grad else ", frozen")
        found |= {(path, key): buffer for key, buffer in module.named_buffers(recurse=False)}
    return found


def _is_number(key: tuple[str, str], x: Any, described: list[dict[tuple[str, str], Any]]) -> bool:
    """Whether an attribute is the number of the layer, counted from any first one."""
    if type(x) is not int or len(described) == 1:
        return False
    return all(type(each.get(key)) is int and each[key] == x + i for i, each in enumerate(described))


def _is_equal(key: tuple[str, str], first: dict[tuple[str, str], Any], other: dict[tuple[str, str], Any]) -> bool:
    if key not in first or key not in other:
        return False
    x, y = first[key], other[key]
    if isinstance(x, Tensor):  # a buffer
        is_alike = isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
        return is_alike and (x.is_meta or torch.equal(x, y))
    return bool(type(x) is type(y) and x == y)


def _check_noise(model: nn.Module, name: str, modules: nn.ModuleList) -> None:
    """Refuse layers whose random draws would be others than those of one device."""
    owner = model.get_submodule(name.rpartition(".")[0])
    inside = [(f"{name}.0.{path}".rstrip("."), each) for path, each in modules[0].named_modules()]
    for path, module in [(name.rpartition(".")[0], owner), *inside]:
        rates = {key: x for key, x in vars(module).items() if any(word in key for word in NOISE)}
        if isinstance(module, nn.Dropout):
            rates["p"] = module.p
        for key, x in rates.items():
            if module.training and isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0:
                problem = f"is {x}, and stages would draw other numbers than one device"
                raise FzeroError(
                    f"{path}.{key}".lstrip("."), problem, "set it to 0 in the model's config, or leave pp out"
                )


class _Number:
    """Stands for the number of a layer: in stages one code is that of several layers."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __deepcopy__(self, memo: Any) -> _Number:
        return self

    def _refuse(self, *_: Any) -> Any:
        problem = "is the number of a layer, and its forward computes with it"
        raise FzeroError(self._path, problem, "leave pp out: in a stage one code is that of several layers")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __mod__ = _refuse
    __floordiv__ = __index__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __pow__ = _refuse
    __eq__ = _refuse
    __hash__ = object.__hash__


@contextmanager
def hide_numbers(layers: EqualLayers) -> Iterator[None]:
    """Within this context the first layer does not know its number."""
    modules = dict(layers.modules[0].named_modules())
    before = {(path, key): getattr(modules[path], key) for path, key in layers.numbers}
    for path, key in layers.numbers:
        setattr(modules[path], key, _Number(f"{layers.name}.0.{path}.{key}"))
    try:
        yield
    finally:
        for (path, key), value in before.items():
            setattr(modules[path], key, value)
