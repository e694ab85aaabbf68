"""Block-wise numbers: elements in blocks that share a scale, as codes of 8 or 4 bits beside the scales.

    elements            |---- block ----|---- block ----|- block -|
    codes, uint8        8 bits each, or 4: two elements a byte, the first one in the lower half
    scales, uint8       four bytes a block, those of a float32

Blocks are counted from the start of a leaf, so codes do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError

LARGEST = {8: 127, 4: 7}
"""Bits of a code -> the largest code. The largest element of a block, in absolute value, has it."""

CHUNK = 1 << 20
"""Elements that a CPU computes at a time, so that float32 intermediates stay in its cache. A multiple of a block."""


class Coding(NamedTuple):
    """All of a quantized value but its codes and scales: its shape and dtype, bits of a code, elements of a block."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    block: int

    @property
    def numel(self) -> int:
        """The elements of the value."""
        return torch.Size(self.shape).numel()

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the codes: one dimension of bytes."""
        return (-(-self.numel * self.bits // 8),)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales: a row of four bytes for each block."""
        return (-(-self.numel // self.block), 4)


def encode(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """`(codes, scales)` of values [S], which begin at the start of a block: uint8 [S * bits / 8] and [B, 4].

    No element changes by more than `amax / 254` with 8 bits, or `amax / 14` with 4, where `amax` is the largest of its
    block in absolute value. Zeros stay zeros.
    """
    largest, size = LARGEST[coding.bits], values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -size % coding.block)).view(-1, coding.block)
    scales = blocks.abs().amax(1) / largest  # [B]
    codes = (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).round_().to(torch.int8).view(-1)
    if coding.bits == 4:
        pairs = (codes[: size + size % 2] + 8).view(torch.uint8).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4, scales.view(torch.uint8).view(-1, 4)
    return codes[:size].view(torch.uint8), scales.view(torch.uint8).view(-1, 4)


def decode(codes: Tensor, scales: Tensor, coding: Coding) -> Tensor:
    """The value, in its shape, of all codes and scales. Each element is computed in float32 and rounded once."""
    out = torch.empty(coding.numel, dtype=coding.dtype, device=codes.device)
    step = max(CHUNK // coding.block, 1) * coding.block if codes.device.type == "cpu" else coding.numel
    # `contiguous` and `clone`: the bytes of float32 numbers must begin at a multiple of four
    factors = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).view(-1)
    for start in range(0, coding.numel, step or 1):
        piece = out[start : start + step]
        stored = codes[start * coding.bits // 8 : -(-(start + piece.numel()) * coding.bits // 8)]
        numbers = torch.nn.functional.pad(
            _read(stored, coding.bits)[: piece.numel()], (0, -piece.numel() % coding.block)
        )
        of_blocks = factors[start // coding.block : start // coding.block + numbers.numel() // coding.block]
        piece.copy_(numbers.view(-1, coding.block).mul_(of_blocks[:, None]).view(-1)[: piece.numel()])
    return out.view(coding.shape)


def _read(codes: Tensor, bits: int) -> Tensor:
    """The codes as float32 numbers; with 4 bits twice as many as there are bytes."""
    if bits == 8:
        return codes.view(torch.int8).float()
    return torch.stack((codes & 15, codes >> 4), 1).view(-1).float().sub_(8)


# the operation: steps call it, and a trace records it

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor scales, int[] shape, ScalarType dtype, int bits, int block, str leaf) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dequantize(
    codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, bits: int, block: int, leaf: str
) -> Tensor:
    return decode(codes, scales, Coding(tuple(shape), dtype, bits, block))


def fake_dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    """A tensor without data, of the value's shape."""
    return codes.new_empty(shape, dtype=dtype)


_LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("fzero::dequantize", fake_dequantize, lib=_LIBRARY)

dequantize = torch.ops.fzero.dequantize.default
"""`dequantize(codes, scales, shape, dtype, bits, block, leaf)`: `decode`, of the leaf at this path."""


def check_coding(path: str, coding: Coding) -> None:
    """Refuse codes of other than 8 or 4 bits, and blocks that are no multiple of two elements.

    Raises:
        FzeroError: with the number.
    """
    if coding.bits not in LARGEST:
        raise FzeroError(path, f"bits is {coding.bits!r}", "give 8 or 4")
    if not isinstance(coding.block, int) or coding.block < 2 or coding.block % 2:
        raise FzeroError(path, f"block is {coding.block!r}", "give an even number of elements, such as 256 or 64")
