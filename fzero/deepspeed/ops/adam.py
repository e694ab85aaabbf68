"""Adam: DeepSpeed's constructors of Adam, for `initialize(optimizer=)`. They make torch's, which `initialize` converts.

An update is one program in any case: `fzero.passes.fuse` makes one kernel of it, on the device or on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import make_getattr

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

__getattr__ = make_getattr(__name__, __all__)


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """torch's AdamW, or Adam without `adam_w_mode`, with DeepSpeed's defaults.

    Raises:
        FzeroError: for `amsgrad`, as in DeepSpeed, and without `bias_correction`.
    """
    if amsgrad:
        raise FzeroError("FusedAdam: amsgrad", "is True, which DeepSpeed does not have", "leave it out")
    return _make_adam(params, adam_w_mode, bias_correction, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """torch's AdamW, or Adam without `adamw_mode`. `offload_optimizer` of the configuration says that state lies on the
    host and is updated there.

    Raises:
        FzeroError: without `bias_correction` or `fp32_optimizer_states`.
    """
    if not fp32_optimizer_states:
        way_out = "optimizer=fzero.optim.cast_state(...) holds narrower state"
        raise FzeroError("DeepSpeedCPUAdam: fp32_optimizer_states", "is False", way_out)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    return _make_adam(model_params, adamw_mode, bias_correction, **options)


def _make_adam(params: Any, is_decoupled: bool, bias_correction: bool, **options: Any) -> torch.optim.Optimizer:
    if not bias_correction:
        raise FzeroError("Adam: bias_correction", "is False", "give fzero.optim.chain(...) of fzero.optim")
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(params, **options)
