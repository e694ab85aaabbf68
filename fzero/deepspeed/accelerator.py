"""Accelerator: DeepSpeed's `get_accelerator()`, over torch's device modules."""

from __future__ import annotations

from typing import Any

import torch

from fzero.deepspeed.absent import refuse_method


class Accelerator:
    """The kind of device that ranks compute on: "cuda" where torch finds it, else "cpu". Other methods are those of
    `torch.cuda`, or of `torch.cpu`."""

    def __init__(self) -> None:
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = getattr(torch, self.kind)

    def device_name(self, device_index: int | None = None) -> str:
        """The kind, with a number where one is given. A CPU has no number."""
        return self.kind if device_index is None or self.kind == "cpu" else f"{self.kind}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._module.current_device() if self.kind == "cuda" else None)

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one. A CPU is current anyway."""
        if self.kind == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self.kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self.kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        """Give cached memory back to the driver. torch keeps none of a CPU."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._module, name):
            return getattr(self._module, name)
        raise refuse_method("accelerator", name, [*dir(type(self)), *dir(torch.cuda)])


def get_accelerator() -> Accelerator:
    """The kind of device that ranks compute on."""
    return Accelerator()
