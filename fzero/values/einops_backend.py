"""Interop: einops takes `Sharded` values. It finds backends among the subclasses of its own, by `framework_name`."""

from __future__ import annotations

from typing import Any

from einops._backends import TorchBackend

from fzero.values.sharded import is_sharded


class ShardedBackend(TorchBackend):
    """torch's backend: a pattern is no elementwise function, so its first operation gathers the value."""

    framework_name = "fzero"

    def is_appropriate_type(self, tensor: Any) -> bool:
        return is_sharded(tensor)
