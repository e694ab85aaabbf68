"""Runtime: the schedulers that DeepSpeed constructs by name."""

from fzero.deepspeed.absent import make_getattr
from fzero.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]

__getattr__ = make_getattr(__name__, __all__)
