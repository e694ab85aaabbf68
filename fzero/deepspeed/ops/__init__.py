"""Ops: the optimizers that DeepSpeed constructs by name."""

from fzero.deepspeed.absent import make_getattr
from fzero.deepspeed.ops import adam

__all__ = ["adam"]

__getattr__ = make_getattr(__name__, __all__)
