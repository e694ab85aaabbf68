"""An optimizer is two pure functions, `init` and `update`; `chain` combines such pairs. Names and meanings are optax's.

    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = apply_updates(params, updates)

Each stage of an optimizer is one list operation on all leaves. So a traced step has one node for a stage, not one for
each leaf.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.placement import Disk, Placement, check_placement
from fzero.base.shapes import of_whole
from fzero.base.tree import Tree, TreeDef
from fzero.optim.rounding import Key, add_stochastically, make_key

State = Any
Schedule = Callable[[Any], Any]
"""(step count, a 0-d integer tensor that starts at 0) -> a 0-d float32 tensor, or a number."""
Mask = Callable[[str, Any], bool]
"""(dotted path, leaf with its global `shape`, `ndim` and `dtype`) -> whether the leaf takes part."""


class Init(Protocol):
    def __call__(self, params: Tree, *, to: Placement | None = None) -> State: ...


class Update(Protocol):
    def __call__(self, updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]: ...


class _Pair(NamedTuple):
    init: Init
    update: Update


class GradientTransformation(_Pair):
    """A stage of an optimizer, or a whole optimizer, as two functions (optax's `GradientTransformation`).

    `init(params)` returns the first state, `init(params, to=fzero.host())` a state in that placement: the leaves of
    which ranks keep slices. Beside `Sharded` parameters each leaf of the state is one too. `update(updates, state,
    params=None)` returns `(new updates, new state)`. The pair itself holds no state.
    """

    __slots__ = ()

    def __new__(cls, init: Callable[[Tree], State], update: Update) -> Self:
        return super().__new__(cls, _take_placement(init), update)


def _take_placement(init: Callable[[Tree], State]) -> Init:
    """`init` with the keyword `to`, the placement of its state: that of parameters that lie there."""

    @functools.wraps(init)
    def init_at(params: Tree, *, to: Placement | None = None) -> State:
        check_placement(to)

        def make() -> State:
            if to is None:
                return _replicate_state(init(params), params)
            moved = tree.map(lambda x: _move(x, to), params)
            return tree.map(lambda x: _move(x, to), _replicate_state(init(moved), moved))

        places = (to, *(getattr(leaf, "place", None) for leaf in tree.leaves(params)))
        anchor = _find_anchor(params) if any(isinstance(place, Disk) for place in places) else None
        return make() if anchor is None else anchor.on.do_together(make, "an optimizer's init on a disk")

    return init_at


def _find_anchor(params: Tree) -> Any:
    """The first `Sharded` leaf, None where there is none."""
    return next((leaf for leaf in tree.leaves(params) if hasattr(leaf, "with_local")), None)


def _replicate_state(state: State, params: Tree) -> State:
    """`state` with each plain tensor as a value that every rank holds, on the mesh of `params`. To a step a plain
    tensor counts as this rank's batch. A stage that gets none of the parameters, such as one of `masked`, knows no
    mesh, and makes a plain step count. Inside of a step, and beside plain parameters, `state` stays."""
    anchor = _find_anchor(params)

    def replicate(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or hasattr(leaf, "with_local"):
            return leaf
        beside = anchor.new_zeros(leaf.shape, dtype=leaf.dtype)
        return beside.with_local(leaf.to(beside.device, copy=True)) if hasattr(beside, "with_local") else leaf

    return state if anchor is None else tree.map(replicate, state)


def _move(leaf: Any, to: Placement) -> Any:
    if not hasattr(leaf, "at"):
        raise FzeroError("init", f"to={to}, and a parameter is a {type(leaf).__name__}", "partition the tree first")
    return leaf.at(to)


class EmptyState(NamedTuple):
    """The state of a stage without state."""


def stage(
    state_type: type, init: Callable[[Tree], State], update: Update, *, takes_integers: bool = False
) -> GradientTransformation:
    """A stage whose state is a `state_type`. The stage refuses any other state.

    With `takes_integers` updates may be of any dtype: a stage around other stages leaves the dtypes to them.

    Raises:
        FzeroError: in `update`, for a state of another type, such as that of another optimizer; for updates of
            integers, naming the leaf.
    """

    def update_of_state(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        check_state(state_type.__name__, state, state_type)
        if not takes_integers:
            _check_updates(updates)
        return update(updates, state, params)

    return GradientTransformation(init, update_of_state)


def check_state(where: str, state: Any, expected: type) -> None:
    """Refuse a state that is not an `expected`."""
    if type(state) is not expected:  # the state of a chain is a tuple, and so is every NamedTuple
        problem = f"the state is of type {type(state).__name__}, not {expected.__name__}"
        raise FzeroError(where, problem, "give the state that this optimizer's init or update returned")


def _check_updates(updates: Tree) -> None:
    """Refuse updates of integers, and what is no tensor. Complex ones are a matter of the stage."""
    for i, leaf in enumerate(tree.leaves(updates)):
        if not isinstance(leaf, Tensor):
            raise FzeroError(tree.paths(updates)[i], f"is a {type(leaf).__name__}, not a tensor", "give a gradient")
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            check_floating(tree.paths(updates)[i], leaf)


def stateless(update: Callable[[Tree, Tree | None], Tree], *, takes_integers: bool = False) -> GradientTransformation:
    """A stage without state: its new updates are `update(updates, params)` (optax's `stateless`).

    Raises:
        FzeroError: in `update`, unless it `takes_integers`, for updates of integers, naming the leaf.
    """
    return stage(
        EmptyState,
        lambda params: EmptyState(),
        lambda updates, state, params=None: (update(updates, params), state),
        takes_integers=takes_integers,
    )


def identity() -> GradientTransformation:
    """A stage that returns its updates unchanged."""
    return stateless(lambda updates, params: updates, takes_integers=True)


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """A stage that runs `transforms` one after the other. Its state is the tuple of their states.

    Raises:
        FzeroError: for what is no stage; in `update`, for a state that is not a tuple of the length of `transforms`.
    """
    check_stages("chain", *transforms)

    def init(params: Tree) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        check_state("chain", state, tuple)
        if len(state) != len(transforms):
            raise FzeroError(
                "chain",
                f"the state has {len(state)} parts, the chain {len(transforms)}",
                "give the state that this optimizer's init or update returned",
            )
        states = []
        for transform, part in zip(transforms, state):
            updates, part = transform.update(updates, part, params)
            states.append(part)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: Tree, updates: Tree, *, bf16_stochastic_round: Key | Sequence[Key] | None = None) -> Tree:
    """`params + updates`, each leaf in its parameter's dtype. The sum is rounded once, as in optax.

    A leaf whose update is None, as a frozen leaf's is, stays as it is.

    `bf16_stochastic_round` is a key, such as the step count or `(seed, step)`, that is another one in each step. Sums
    of bfloat16 parameters are then rounded to one of the two nearest numbers, so that the mean over keys is the sum.
    The rounding of an element depends on the key, the leaf's path and the element's position alone: it is the same
    for every number of ranks. One list operation; see `rounding`.

    Raises:
        FzeroError: where the trees differ in structure or shapes, naming the leaf; for a key that is no whole number.
    """
    moving, still = tree.split_as(params, updates)
    treedef, (weights, steps) = flatten_alike(moving, updates)
    if not weights:
        return params
    if bf16_stochastic_round is None:
        sums = cast(torch._foreach_add(weights, steps), weights)
    else:
        sums = add_stochastically(weights, steps, make_key(bf16_stochastic_round, weights[0]), tree.paths(moving))
    return tree.merge(tree.unflatten(treedef, sums), still)


def flatten_alike(first: Tree, *rest: Tree) -> tuple[TreeDef, list[list[Any]]]:
    """`(treedef, lists)`: the leaves of each tree as a list, for list operations.

    Raises:
        FzeroError: for a tree in `rest` with other paths or shapes than `first`, naming the first leaf that differs.
    """
    leaves, treedef = tree.flatten(first)
    lists = [leaves]
    for other in rest:
        others, other_def = tree.flatten(other)
        if other_def != treedef:
            raise tree.mismatch(treedef, other_def)
        for i, (leaf, given) in enumerate(zip(leaves, others)):
            if tuple(leaf.shape) != tuple(given.shape):
                problem = f"shape {tuple(given.shape)} given, {tuple(leaf.shape)} expected"
                raise FzeroError(tree.paths(first)[i], problem, "give a leaf of the parameter's shape")
        lists.append(others)
    return treedef, lists


def cast(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Each value in the dtype of the like at its position. A value that has the dtype already stays the same object."""
    return [value if value.dtype == like.dtype else value.to(like.dtype) for value, like in zip(values, likes)]


def add_multiple(first: Sequence[Any], second: Sequence[Any], factor: float | Tensor) -> Sequence[Any]:
    """`first + factor * second`, position by position: one list operation where the factor is a number, else two."""
    a, b = list(first), list(second)
    if isinstance(factor, Tensor):
        return torch._foreach_add(a, torch._foreach_mul(b, factor))
    return torch._foreach_add(a, b, alpha=factor)


def same_kind(like: Tensor | None, *hyperparameters: float | Tensor) -> list[float | Tensor]:
    """The hyperparameters, all as numbers or all as 0-d tensors beside `like`. A number becomes float64.

    None stands for one of those tensors.
    """
    tensors = [x for x in hyperparameters if isinstance(x, Tensor)]
    if not tensors:
        return list(hyperparameters)
    beside = tensors[0] if like is None else like
    return [x if isinstance(x, Tensor) else torch.full_like(beside, x, dtype=torch.float64) for x in hyperparameters]


def is_zero(hyperparameter: float | Tensor) -> bool:
    """Whether a hyperparameter is the number 0, so that its stage does nothing. A tensor may change."""
    return not isinstance(hyperparameter, Tensor) and hyperparameter == 0


def init_zeros(params: Tree) -> Tree:
    """Zeros with the shapes, dtypes and layouts of `params`; None in the places of frozen leaves.

    Raises:
        FzeroError: for a parameter whose dtype is not floating, naming the leaf.
    """
    return tree.map_with_path(_zeros_like, params)


def _zeros_like(path: str, leaf: Any) -> Any:
    if is_frozen(leaf):
        return None
    check_floating(path, leaf)
    return torch.zeros_like(leaf)


def check_floating(path: str, leaf: Any) -> None:
    """Refuse a parameter or an update that is no tensor, or whose dtype is not floating."""
    if not isinstance(leaf, Tensor):
        raise FzeroError(path, f"is a {type(leaf).__name__}, an optimizer needs a tensor", "give a tree of tensors")
    if not leaf.dtype.is_floating_point:
        raise FzeroError(
            path,
            f"dtype is {leaf.dtype}, an optimizer needs a floating one",
            "set such leaves aside with fzero.tree.split",
        )


def init_count(params: Tree) -> Tensor:
    """A step count of 0, a 0-d int32, as `init_number`."""
    return init_number(params, 0, torch.int32)


def init_number(params: Tree, value: float, dtype: torch.dtype) -> Tensor:
    """A 0-d tensor on the device of the first leaf; beside `Sharded` leaves, a replicated value."""
    leaves = [leaf for leaf in tree.leaves(params) if isinstance(leaf, Tensor)]
    zero = leaves[0].new_zeros((), dtype=dtype) if leaves else torch.zeros((), dtype=dtype)
    return zero + value if value else zero


def cast_state(
    optimizer: GradientTransformation, dtype: torch.dtype, mask: Mask | None = None
) -> GradientTransformation:
    """`optimizer` with state in `dtype`, such as bfloat16. Numbers without dimensions, such as step counts, keep their
    dtypes.

    `mask(path, leaf)` chooses the leaves of the state, for example `lambda path, leaf: ".mu." in path`; None chooses
    all. Every stage computes in float32 or wider, rounds its new state to the state's dtype, and keeps that dtype.

    Raises:
        FzeroError: for a dtype that is not floating.
    """
    check_stages("cast_state", optimizer)
    if not getattr(dtype, "is_floating_point", False):
        raise FzeroError("cast_state", f"dtype is {dtype}", "give a floating one, such as torch.bfloat16")

    def store(path: str, leaf: Any) -> Any:
        is_chosen = leaf.dtype.is_floating_point and leaf.ndim and (mask is None or of_whole(mask)(path, leaf))
        return leaf.to(dtype) if is_chosen else leaf

    return GradientTransformation(
        lambda params: tree.map_with_path(store, optimizer.init(params)),
        optimizer.update,
    )


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of Python or numpy."""
    return isinstance(value, Real)


def check_number(where: str, **hyperparameters: Any) -> None:
    """Refuse a tensor in the place of a number, such as a schedule of `inject_hyperparams` puts there."""
    for name, value in hyperparameters.items():
        if isinstance(value, Tensor):
            raise FzeroError(where, f"{name} is a tensor", "give a number, which stays the same")


def check_decay(where: str, name: str, value: Any) -> None:
    """Refuse a decay rate outside [0, 1)."""
    _check(where, name, value, lambda x: 0 <= x < 1, "a decay rate lies in [0, 1)")


def check_not_negative(where: str, name: str, value: Any) -> None:
    """Refuse a number below 0, nan, and what is no number."""
    _check(where, name, value, lambda x: x >= 0, "give one that is at least 0")


def check_positive(where: str, name: str, value: Any) -> None:
    """Refuse a number that is not above 0, and what is no number."""
    _check(where, name, value, lambda x: x > 0, "give a positive one")


def check_finite(where: str, name: str, value: Any) -> None:
    """Refuse inf, nan, and what is no number."""
    _check(where, name, value, lambda x: abs(x) <= sys.float_info.max, "give a finite number")


def _check(where: str, name: str, value: Any, is_right: Callable[[Any], bool], way_out: str) -> None:
    if isinstance(value, Tensor):
        if value.ndim:  # else it may be the value of a schedule, at which a step cannot look
            raise FzeroError(where, f"{name} is a tensor of shape {list(value.shape)}", "give a number")
    elif not (is_number(value) and is_right(value)):
        raise FzeroError(where, f"{name} is {value!r}", way_out)


def check_choice(where: str, name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is none of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise FzeroError(where, f"{name} is {value!r}", f"give one of {list(choices)}")


def check_stages(where: str, *given: Any) -> None:
    """Refuse what has no `init` and `update`, such as a factory that was not called."""
    for each in given:
        if not (hasattr(each, "init") and hasattr(each, "update")):
            name = getattr(each, "__name__", repr(each))
            way_out = f"call it, as {name}(0.1)" if callable(each) else "give one of fzero.optim, such as sgd(0.1)"
            raise FzeroError(where, f"{name:.80} is no optimizer and no stage", way_out)


def check_function(where: str, name: str, value: Any, way_out: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise FzeroError(where, f"{name} is {value!r}", way_out)
