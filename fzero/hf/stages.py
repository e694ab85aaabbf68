"""Stages: the equal layers of a model of transformers in a pipeline.

In the place of the list of layers is a module with their leaves, stacked. The model runs its own forward: what it
iterates over are stand-ins of layers, which note what they are called with and return the hidden state as it came. The
last one runs the pipeline of all layers. So what comes before and behind the layers is the model's own code.

A first run of the forward with the rows of one microbatch ends at the last stand-in. It shows which dim of each
argument has rows: the dim that is larger in the run with all rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import cache_utils

from fzero import axis_size, lower, tree
from fzero.base.errors import FzeroError
from fzero.hf.caches import find_caches
from fzero.hf.equal_layers import EqualLayers, hide_numbers
from fzero.hf.stacks import Stack
from fzero.hf.styles import Axis
from fzero.parallel.stages import pipeline

HIDDEN = "hidden_states"
COUNTED = ("input_ids", "inputs_embeds", HIDDEN, "pixel_values", "input_values", "input_features")
"""The inputs of which one has the rows of the batch."""
ROWS = (*COUNTED, "attention_mask", "position_ids", "token_type_ids", "labels")
"""The inputs of a model's forward [rows, ...], or [1, ...] for all rows."""
REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What the model would read of single layers, as an argument or in its configuration."""


class Depth(NamedTuple):
    """Along which axis ranks have stages of a model, and through how many microbatches."""

    axis: Axis
    microbatches: int


class _Part:
    """A leaf of a layer, as `Apply` takes it: what a rank has of it, and the shape of the whole."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.shape, self.global_shape, self._tensor = tensor.shape, torch.Size(shape), tensor

    def full_tensor(self) -> Tensor:
        return self._tensor


class StagedLayers(nn.Module):
    """The list of a model's layers, with one leaf for those of all layers. Its items are stand-ins."""

    def __init__(self, layers: EqualLayers, stacks: dict[str, Stack], depth: Depth) -> None:
        super().__init__()
        with hide_numbers(layers):
            held, self._call = lower(layers.modules[0])
        self._structure, self._paths = tree.flatten(held)[1], tree.paths(held)
        self._stacks, self._depth, self._where = stacks, depth, layers.name
        self._plain = layers.attributes
        first = dict(layers.modules[0].named_parameters())
        for path in self._paths:
            leaf = torch.empty(stacks[path].stacked, dtype=first[path].dtype, device="meta")
            _put(self, path, nn.Parameter(leaf, requires_grad=first[path].requires_grad))

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[_StandIn]:
        return iter([_StandIn(self, number) for number in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def take_leaves(self) -> list[Tensor]:
        """The leaves [layers, ...] of all layers, or on ranks of the stage's."""
        given = (functools.reduce(getattr, path.split("."), self) for path in self._paths)
        return [self._stacks[path].take(leaf) for path, leaf in zip(self._paths, given)]  # type: ignore[arg-type]

    def compute(self, leaves: Any, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer that has these leaves returns."""
        parts = [_Part(leaf, self._stacks[path].shape) for path, leaf in zip(self._paths, leaves)]
        return self._call(tree.unflatten(self._structure, parts), hidden, *args, **kwargs)


def _put(module: nn.Module, path: str, leaf: nn.Parameter) -> None:
    """Register a leaf at its path, in modules that are only names."""
    *names, last = path.split(".")
    for name in names:
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    module.register_parameter(last, leaf)


# calls of layers


class _End(Exception):
    """The run that shows the rows has called the last layer."""


class _Moved(Exception):
    """A layer was called with another hidden state than the one before returned."""


class _Run:
    """One run of the forward around the layers: with `rows` of one microbatch, or of all of them."""

    def __init__(self, stages: StagedLayers, is_first: bool, is_tuple: bool, shown: tuple[Any, Any] | None) -> None:
        self._stages, self._is_first, self._is_tuple, self._shown = stages, is_first, is_tuple, shown
        self.called: tuple[Any, ...] | None = None
        self.done = 0
        self._hidden: Tensor | None = None

    def take(self, number: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = f"{self._stages._where}.{number}"
        if number != self.done:
            problem = f"is called as number {self.done}"
            raise FzeroError(where, problem, "leave pp out: its model does not call each layer once, in order")
        if number and hidden is not self._hidden:
            raise _Moved
        self.done, self._hidden = self.done + 1, hidden
        args, kwargs = (_leave_caches_out(x) for x in (args, kwargs))
        if self.called is None:
            self.called = args, kwargs
        _check_alike(where, self.called, (args, kwargs))
        if self.done < len(self._stages):
            return self._give(hidden, self._is_tuple)
        if self._is_first:
            raise _End
        return self._pass_through(hidden)

    def _give(self, hidden: Tensor, is_tuple: bool) -> Any:
        return _Made((hidden,), f"{self._stages._where}.{self.done - 1}") if is_tuple else hidden

    def _pass_through(self, hidden: Tensor) -> Any:
        """The hidden state behind all layers."""
        stages, found, was_tuple = self._stages, self.called, False
        count = stages._depth.microbatches if self._shown is not None else 1
        leaves, structure = tree.flatten(found)
        dims = _find_rows(stages._where, leaves, self._shown, count)

        def body(layer: Any, h: Tensor, given: list[Tensor] | None = None) -> Tensor:
            nonlocal was_tuple
            own = iter(given or ())
            args, kwargs = tree.unflatten(structure, [x if d is None else next(own) for x, d in zip(leaves, dims)])
            made = stages.compute(layer, h, args, kwargs)
            was_tuple = isinstance(made, tuple)
            return _take_hidden_of(stages._where, made, h)

        if self._shown is None:  # one device
            for layer in zip(*(leaf.unbind() for leaf in stages.take_leaves())):
                hidden = body(layer, hidden)
            return self._give(hidden, was_tuple)
        cut = [x.unflatten(d, (count, -1)).movedim(d, 0) for x, d in zip(leaves, dims) if d is not None]
        parts, axis = hidden.unflatten(0, (count, -1)), stages._depth.axis
        made = pipeline(body, stages.take_leaves(), parts, beside=cut or None, axis=axis).flatten(0, 1)
        return self._give(made, was_tuple)


class _Made(tuple[Any, ...]):
    """What a layer returns with its hidden state in front: nothing else is known of single layers."""

    _where: str

    def __new__(cls, values: tuple[Any, ...], where: str) -> _Made:
        made = super().__new__(cls, values)
        made._where = where
        return made

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        self[1]

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            problem = "the model reads what its layers return beside the hidden state, which stages do not have"
            raise FzeroError(self._where, problem, "leave pp out")
        return super().__getitem__(0)


_run: ContextVar[_Run] = ContextVar("run")


class _StandIn:
    """A layer as its model sees it: its plain attributes, and a call."""

    def __init__(self, stages: StagedLayers, number: int) -> None:
        self._stages, self._number = stages, number

    def __getattr__(self, name: str) -> Any:
        plain = self._stages._plain[self._number]
        if name not in plain:
            problem = f"the model reads {name!r} of it, which stages have no layer for"
            raise FzeroError(f"{self._stages._where}.{self._number}", problem, "leave pp out")
        return plain[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and HIDDEN in kwargs:
            args, kwargs = (kwargs[HIDDEN],), {name: x for name, x in kwargs.items() if name != HIDDEN}
        if not args or not isinstance(args[0], Tensor):
            where = f"{self._stages._where}.{self._number}"
            raise FzeroError(where, "is called without a hidden state in front", "leave pp out")
        return _run.get().take(self._number, args[0], args[1:], kwargs)


def _leave_caches_out(x: Any) -> Any:
    """The arguments of a layer that has no cache."""
    if isinstance(x, dict):
        return {name: False if name == "use_cache" else _leave_caches_out(each) for name, each in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(_leave_caches_out, x))
    return None if isinstance(x, cache_utils.Cache) else x


def _check_alike(where: str, first: Any, now: Any) -> None:
    """Refuse a layer that is called with other arguments than the first."""
    (ours, structure), (theirs, other) = tree.flatten(first), tree.flatten(now)
    is_alike = structure == other and all(
        x is y or (not isinstance(x, Tensor) and type(x) is type(y) and x == y) for x, y in zip(ours, theirs)
    )
    if not is_alike:
        odd = [path for path, x, y in zip(tree.paths(first), ours, theirs) if x is not y]
        problem = f"is called with another {', '.join(odd)[:80] or 'set of arguments'} than the first layer"
        raise FzeroError(where, problem, "leave pp out: a stage has one set of arguments for all of its layers")


def _find_rows(where: str, whole: list[Any], shown: tuple[Any, Any] | None, count: int) -> list[int | None]:
    """The dim of rows of each argument of layers; None for one that all rows share."""
    if shown is None or count == 1:
        return [None] * len(whole)
    found: list[int | None] = []
    part = tree.leaves(shown)
    for x, of_part in zip(whole, part):
        if len(part) != len(whole) or isinstance(x, Tensor) != isinstance(of_part, Tensor):
            raise FzeroError(where, "has other arguments for fewer rows", "leave pp out")
        if not isinstance(x, Tensor) or x.shape == of_part.shape:
            found.append(None)
            continue
        odd = [d for d, sizes in enumerate(zip(x.shape, of_part.shape)) if sizes[0] != sizes[1]]
        if len(odd) != 1 or x.ndim != of_part.ndim or x.shape[odd[0]] != count * of_part.shape[odd[0]]:
            problem = (
                f"has an argument {list(x.shape)} for all rows, and {list(of_part.shape)} for those of a microbatch"
            )
            raise FzeroError(where, problem, "leave pp out")
        found.append(odd[0])
    return found


def _take_hidden_of(where: str, made: Any, given: Tensor) -> Tensor:
    """The hidden state of what a layer returned for a given one."""
    hidden = made[0] if isinstance(made, tuple) else made
    if not isinstance(hidden, Tensor) or (hidden.shape, hidden.dtype) != (given.shape, given.dtype):
        problem = f"a layer gets a hidden state {list(given.shape)} of {given.dtype}, and returns {_describe(hidden)}"
        raise FzeroError(where, problem, "leave pp out: microbatches keep their shape and dtype from stage to stage")
    return hidden


def _describe(x: Any) -> str:
    return f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


# the model around the layers


def run_in_stages(owner: Any, stages: StagedLayers) -> Callable[..., Any]:
    """The forward of the module that has the layers, by microbatches through the stages."""
    forward = owner.forward
    named = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = named.bind(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        inputs = {**given, **more}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        rows = _check_inputs(owner, inputs)
        if axis_size(stages._depth.axis) == 1:
            return _run_as(forward, inputs, stages, rows, rows)
        count = stages._depth.microbatches
        if rows % count:
            problem = f"has {rows} rows, for {count} microbatches"
            divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise FzeroError(f"{type(owner).__name__}: batch", problem, f"give num_microbatches one of {divisors}")
        return _run_as(forward, inputs, stages, rows, rows // count)

    return run


def _run_as(forward: Callable[..., Any], inputs: dict[str, Any], stages: StagedLayers, rows: int, few: int) -> Any:
    """The output of a forward, with layers that return a tensor or, if the model wants that, a tuple."""
    own = {name: _cut(name, x, rows, few) for name, x in inputs.items()}
    is_alone = axis_size(stages._depth.axis) == 1
    for is_tuple in (False, True):
        first = _Run(stages, True, is_tuple, None)
        try:
            _enter(first, forward, own)
            raise _end_early(stages, first)
        except _Moved:
            continue
        except _End:
            pass
        except (TypeError, AttributeError, IndexError, RuntimeError) as error:
            if not is_tuple:  # of layers that return a tensor it came as far as the second
                raise
            raise _explain(stages) from error
        whole = _Run(stages, False, is_tuple, None if is_alone else first.called)
        output = _enter(whole, forward, inputs)
        if whole.done != len(stages):
            raise _end_early(stages, whole)
        for name in find_caches(output) if isinstance(output, dict) else ():
            output[name] = None
        return output
    raise _explain(stages)


def _explain(stages: StagedLayers) -> FzeroError:
    problem = "is called with another hidden state than the layer before returned"
    return FzeroError(stages._where, problem, "leave pp out: the model computes between its layers")


def _end_early(stages: StagedLayers, run: _Run) -> FzeroError:
    problem = f"has {len(stages)} layers, of which the model called {run.done}"
    return FzeroError(stages._where, problem, "leave pp out, or give the model fewer layers")


def _enter(run: _Run, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    token = _run.set(run)
    try:
        return forward(**inputs)
    finally:
        _run.reset(token)


def _cut(name: str, x: Any, rows: int, few: int) -> Any:
    return x[:few] if name in ROWS and isinstance(x, Tensor) and x.shape[0] == rows else x


def _check_inputs(owner: Any, inputs: dict[str, Any]) -> int:
    """The rows of the inputs.

    Raises:
        FzeroError: for an input of which it is not known which rows it belongs to, and for caches.
    """
    name = type(owner).__name__
    rows = next((len(inputs[key]) for key in COUNTED if isinstance(inputs.get(key), Tensor)), None)
    if rows is None:
        raise FzeroError(f"{name}: {COUNTED[0]}", "is not given", f"give one of {', '.join(COUNTED)}")
    config = getattr(owner, "config", None)
    asked = {key: getattr(config, key, None) for key in REFUSED}
    for key, x in {**asked, **inputs}.items():
        is_of_rows = key in ROWS and isinstance(x, Tensor) and x.shape[:1] in ((1,), (rows,))
        is_strange = isinstance(x, Tensor) and x.ndim > 0 and not is_of_rows
        if is_strange or (key in REFUSED and x) or key in find_caches(inputs):
            problem = "is given, and stages do not have it: they know rows of a batch, and no values of single layers"
            raise FzeroError(f"{name}: {key}", problem, "leave it out, or leave pp out")
    return rows


@contextmanager
def replace_layers(model: nn.Module, layers: EqualLayers, stages: StagedLayers) -> Iterator[None]:
    """Within this context the model has stages in the place of its layers."""
    owner_name, _, name = layers.name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    before = vars(owner).get("forward")
    owner.forward = run_in_stages(owner, stages)
    owner._modules[name] = stages
    try:
        yield
    finally:
        owner._modules[name] = layers.modules
        del owner.forward
        if before is not None:
            owner.forward = before
