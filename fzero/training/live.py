"""Live models: a model that its user holds, and may change, while programs compute with a copy of it.

    model.temperature = 0.5   # between two steps

What the modules of a model hold is compared before each call. Where an attribute that their code names is another, the
model is copied anew, and the programs that compute with it are traced again. So are they for a hook that comes or goes,
and for what an attribute such as `model.config` holds. The mode of a model is no change: programs are of a mode.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, Literal

from torch import nn

from fzero.base.reachable import list_names
from fzero.tracing.code_paths import Names
from fzero.tracing.read_objects import ReadObject, describe_value, is_plain_object
from fzero.training.models import Lowered, copy_without_values, lower_modes
from fzero.values.live import LiveFunction

_TABLES = frozenset({"_parameters", "_buffers", "_modules", "training"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ABSENT = object()


class ModuleState:
    """What the modules in a model hold, but tensors, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._names = _list_names({type(x) for x in self._modules.values()})
        self._held = {path: dict(vars(x)) for path, x in self._modules.items()}
        self._hooks = {path: _list_hooks(x) for path, x in self._modules.items()}
        self._children = {path: dict(vars(x)["_modules"]) for path, x in self._modules.items()}
        self._read = Names(self._names, frozenset(), frozenset())
        objects = {id(x): (path, x) for path, x in self._list_objects()}
        self._objects = [(path, x, ReadObject(path, x, self._read).values) for path, x in objects.values()]

    def _list_objects(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._modules.items():
            for name, x in vars(module).items():
                is_read = name in self._names and name not in _TABLES
                if is_read and (isinstance(x, (list, dict, set)) or is_plain_object(x)):
                    yield _join(path, name), x

    def list_changes(self) -> list[str]:
        """The paths of attributes that are others now, and what `list_changes_inside` finds."""
        found = list[str]()
        for path, module in self._modules.items():
            then = self._held[path]
            now = {**vars(module), "training": then["training"]}
            if not _is_same(now, then):
                names = now.keys() | then.keys()
                found += (_join(path, name) for name in sorted(names & self._names) if _differs(now, then, name))
        return found + self.list_changes_inside()

    def list_changes_inside(self) -> list[str]:
        """The paths of what has changed inside of objects that are attributes, of modules that are others, and of those
        with other hooks."""
        found = [_join(path, "hooks") for path, x in self._modules.items() if _list_hooks(x) != self._hooks[path]]
        for path, x in self._modules.items():
            now, then = vars(x)["_modules"], self._children[path]
            if now != then:
                found += (_join(path, name) for name in {**now, **then} if now.get(name) is not then.get(name))
        for path, x, before in self._objects:
            after = ReadObject(path, x, self._read).values
            found += (name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT))
        return found


def _is_same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether two dicts have the same values, by identity or, for those that are not, as they compare."""
    try:
        return now == then
    except (RuntimeError, TypeError, ValueError):  # of tensors and arrays, which do not compare so
        return False


def _differs(now: Mapping[str, Any], then: Mapping[str, Any], name: str) -> bool:
    x, y = now.get(name, _ABSENT), then.get(name, _ABSENT)
    return x is not y and name not in _TABLES and describe_value(x) != describe_value(y)


def _list_hooks(module: nn.Module) -> list[int]:
    """The numbers of hooks, of which each has its own."""
    held = vars(module)
    return [key for name in _HOOKS for key in held[name]]


def _join(path: str, name: str) -> str:
    return ".".join(("model", *([path] if path else []), name))


def _list_names(classes: set[type]) -> frozenset[str]:
    """The names in the code of forwards of modules, and of the methods that have a name there."""
    methods: dict[str, list[CodeType]] = {}
    for cls in {each for x in classes for each in x.__mro__} - {nn.Module, object}:
        for name, x in vars(cls).items():
            function = inspect.unwrap(x.fget if isinstance(x, property) and x.fget else x)
            if isinstance(function, FunctionType):
                methods.setdefault(name, []).append(function.__code__)
    found, waiting = {"forward"}, {"forward", "__call__"}
    while waiting:
        names = {name for each in waiting for code in methods.pop(each, ()) for name in list_names(code)}
        found |= names
        waiting = names & methods.keys()
    return frozenset(found)


class LiveModel:
    """A model in both modes, as functions of `Lowered`, of which a copy is lowered anew where the model has changed.

    A copy lacks values of parameters, and those of the buffers `held`. It is lowered in the context `share(copy)`.
    `first` is the model as it was lowered before.
    """

    not_described = ("_model", "_share", "_state", "_changes")  # but what is lowered (`fzero.cache.describe`)

    def __init__(
        self,
        model: nn.Module,
        held: Sequence[str],
        share: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
        first: Lowered | None = None,
    ) -> None:
        self._model, self._held, self._share = model, held, share
        self._lowered, self._state, self._changes = first or self._lower(), ModuleState(model), Counter[str]()

    def _lower(self) -> Lowered:
        copied = copy_without_values(self._model, self._held)
        with self._share(copied):
            return lower_modes(copied)

    @property
    def buffers(self) -> Any:
        """As `Lowered.buffers`."""
        return self._lowered.buffers

    @property
    def train(self) -> LiveFunction:
        """As `Lowered.train`."""
        return self._follow("train")

    @property
    def evaluate(self) -> LiveFunction:
        """As `Lowered.evaluate`."""
        return self._follow("evaluate")

    def _follow(self, mode: Literal["train", "evaluate"]) -> LiveFunction:
        return LiveFunction(lambda: getattr(self._lowered, mode), self._refresh)

    def _refresh(self) -> dict[str, int]:
        """How often each attribute has changed. Lowers the model again where one has now."""
        changed = self._state.list_changes()
        if changed:
            self._changes.update(changed)
            self._lowered, self._state = self._lower(), ModuleState(self._model)
        return dict(self._changes)
