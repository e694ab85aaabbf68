"""einops on `Sharded` values. einops finds its backends among the subclasses of its own backend class."""

from __future__ import annotations

from typing import Any

from fzero.base.torch_private import EinopsTorchBackend
from fzero.values.functions import is_sharded


class ShardedBackend(EinopsTorchBackend):
    """torch's backend, for `Sharded` values. No einops pattern is elementwise, so its first operation gathers."""

    framework_name = "fzero"  # einops' key for the backend

    def is_appropriate_type(self, tensor: Any) -> bool:
        return is_sharded(tensor)
