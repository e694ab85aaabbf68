"""Utils: DeepSpeed's functions around an engine: whole parameters and optimizer state by parameter, logs, loaders."""

import importlib
from typing import Any

from fzero.deepspeed.absent import make_getattr
from fzero.deepspeed.utils.helpers import (
    RepeatingLoader,
    log_dist,
    logger,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    unset_z3_leaf_modules,
)
from fzero.deepspeed.utils.states import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "unset_z3_leaf_modules",
    "zero_to_fp32",
]

_refuse = make_getattr(__name__, __all__)


def __getattr__(name: str) -> Any:
    # Imported when it is used: `python -m` warns of a module that its package has imported already.
    return importlib.import_module(f"{__name__}.{name}") if name == "zero_to_fp32" else _refuse(name)
