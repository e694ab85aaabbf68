"""States: a parameter of an engine, its gradient and its optimizer state, whole, to read and to set.

A parameter is one of `engine.module`, or of the model that `initialize` was given. All ranks call each function
together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero import tree, update_leaf
from fzero.base.errors import FzeroError
from fzero.deepspeed.marks import find_owner
from fzero.formats.foreign import MOMENTS


def safe_get_full_fp32_param(param: Any) -> Tensor:
    """The value of a parameter, in the dtype in which it is updated."""
    engine, path = find_owner(param)
    return _read(engine.state.params, path)


def safe_get_full_grad(param: Any) -> Tensor | None:
    """The gradient of a parameter since the last update, the mean over ranks and without the loss scale. None where
    there is none."""
    engine, path = find_owner(param)
    if engine.gradients is None or path not in tree.paths(engine.gradients):  # of a frozen parameter
        return None
    return _read(engine.gradients, path) / engine.loss_scale


def safe_get_full_optimizer_state(param: Any, optim_state_key: str) -> Tensor:
    """Optimizer state of a parameter: "exp_avg", "exp_avg_sq", or a name of fzero.optim such as "mu".

    Raises:
        FzeroError: for state that the optimizer does not keep.
    """
    engine, path = find_owner(param)
    return _read(engine.state.opt_state, _find_state(engine, path, optim_state_key))


def safe_set_full_fp32_param(param: Any, value: Tensor) -> None:
    """Give a parameter another value."""
    engine, path = find_owner(param)
    engine.state = engine.state._replace(params=_write(engine.state.params, path, value))


def safe_set_full_grad(param: Any, value: Tensor) -> None:
    """Give the gradient of a parameter another value: behind `backward`, before `step`.

    Raises:
        FzeroError: where there is no gradient.
    """
    engine, path = find_owner(param)
    if engine.gradients is None:
        raise FzeroError(path, "has no gradient now", "call safe_set_full_grad behind backward, before step")
    engine.gradients = _write(engine.gradients, path, value * engine.loss_scale)


def safe_set_full_optimizer_state(param: Any, value: Tensor, optim_state_key: str) -> None:
    """Give optimizer state of a parameter another value. Raises as `safe_get_full_optimizer_state`."""
    engine, path = find_owner(param)
    held = engine.state.opt_state
    engine.state = engine.state._replace(opt_state=_write(held, _find_state(engine, path, optim_state_key), value))


def _read(values: Any, path: str) -> Tensor:
    leaf: Any = dict(zip(tree.paths(values), tree.leaves(values))).get(path)
    if leaf is None:
        raise FzeroError(path, "is held as codes", "read engine.module_state_dict()")
    return leaf.full_tensor().detach().clone()


def _write(values: Any, path: str, value: Tensor) -> Any:
    def replace(old: Tensor) -> Tensor:
        if value.shape != old.shape:
            raise FzeroError(path, f"is {tuple(old.shape)}, the value {tuple(value.shape)}", "give the whole value")
        return torch.as_tensor(value).to(old)

    return update_leaf(values, path, replace)


def _find_state(engine: Any, path: str, key: str) -> str:
    """The path in the optimizer state of one value of a parameter."""
    name = next((ours for ours, theirs in MOMENTS.items() if theirs == key), key)
    kinds: set[str] = set()
    for each in tree.paths(engine.state.opt_state):
        if each.endswith(f".{path}"):
            kind = each.removesuffix(f".{path}").rpartition(".")[2]
            kinds.add(MOMENTS.get(kind, kind))
            if kind == name:
                return each
    raise FzeroError(f"{path}: {key}", "is not kept by the optimizer", f"it keeps {', '.join(sorted(kinds)) or 'none'}")
