"""Block-wise numbers: elements in blocks that share a scale, as codes of 8 or 4 bits beside the scales.

    elements            |---- block ----|---- block ----|- block -|
    codes, uint8        8 bits each, or 4: two elements a byte, the first one in the lower half
    scales, uint8       four bytes a block, those of a float32, or codes of scales (`fzero/program/block_scales.py`)

Blocks are counted from the start of a leaf, so codes do not depend on the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.program.block_scales import GROUP, read_scales, shape_scales, store_scales

LARGEST = {8: 127, 4: 7}
"""Bits of a code -> the largest code of even levels. The largest element of a block, in absolute value, has it."""

LEVELS = ("even", "nf4")
"""What codes stand for, times the scale: whole numbers, or the 16 values of `NF4`."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat of QLoRA (https://arxiv.org/abs/2305.14314), appendix E: equally many elements of a normal distribution
have each code."""

CHUNK = 1 << 18
"""Elements that a CPU computes at a time, so that float32 intermediates stay in its cache; a GPU 64 times as many."""


_DOUBLE = f"scales-dynamic8-{GROUP}"
"""The name of scales that are codes: of the paper's dynamic tree quantization."""


class Coding(NamedTuple):
    """All of a quantized value but its codes and scales: its shape and dtype, bits of a code, elements of a block, one
    of `LEVELS`, and whether the scales are codes, too."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    block: int
    levels: str = "even"
    double_quant: bool = False

    @property
    def numel(self) -> int:
        """The elements of the value."""
        return torch.Size(self.shape).numel()

    @property
    def keys(self) -> tuple[str, str]:
        """The names of codes and scales below the path of the value. The names say how to read them, so that a file of
        another coding, or of a value of another shape, lacks the leaf that a load asks for."""
        levels = f"int{self.bits}" if self.levels == "even" else self.levels
        codes = f"codes-{levels}-{self.block}-of-{'x'.join(map(str, self.shape))}"
        return codes, _DOUBLE if self.double_quant else "scales"

    @property
    def blocks(self) -> int:
        """The blocks of the value. The last one may be shorter."""
        return -(-self.numel // self.block)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the codes: one dimension of bytes."""
        return (-(-self.numel * self.bits // 8),)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales: a row of four bytes for each block, or one dimension of bytes."""
        return shape_scales(self.blocks, self.double_quant)

    @property
    def chunk(self) -> int:
        """The elements of the whole blocks in a `CHUNK`, at least one block."""
        return max(CHUNK // self.block, 1) * self.block


def is_part(path: str, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a leaf of this path is the codes or the scales of a quantized value (`Coding.keys`)."""
    if dtype != torch.uint8:
        return False
    name = path.rpartition(".")[2]
    is_scales = name == "scales" and len(shape) == 2 and shape[1] == 4
    return is_scales or name == _DOUBLE or re.fullmatch(r"codes-\w+-\d+-of-[\dx]*", name) is not None


def encode(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """`(codes, scales)` of all values of a leaf, as bytes.

    No element changes by more than `amax / 254` with 8 bits, `amax / 14` with 4, or `amax / 6.5` with 4 of NF4, where
    `amax` is the largest of its block in absolute value. Zeros stay zeros. With `double_quant` a scale changes by at
    most 0.0071 of the largest distance of a scale of its group from the mean of all scales, and elements by as many
    times their code.
    """
    codes, scales = encode_blocks(values, coding)
    return codes, store_scales(scales, coding.double_quant)


def encode_blocks(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """`(codes, scales)` of values [S], which begin at the start of a block: uint8 [S * bits / 8] and float32 [B]."""
    largest, size, is_even = LARGEST[coding.bits], values.numel(), coding.levels == "even"
    blocks = _split(values.float(), coding.block)
    scales = blocks.abs().amax(1) / (largest if is_even else 1)  # [B]
    numbers = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    if is_even:
        codes = numbers.round_().clamp_(-largest, largest).to(torch.int8).view(-1)
    else:
        codes = torch.full_like(numbers, -8, dtype=torch.int8)
        for below, above in pairwise(NF4):  # `torch.bucketize` takes twice as long
            codes += numbers > (below + above) / 2
        codes = codes.view(-1)
    if coding.bits == 4:
        pairs = (codes[: size + size % 2] + 8).view(torch.uint8).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4, scales
    return codes[:size].view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, coding: Coding) -> Tensor:
    """The value, in its shape, of all codes and scales. Each element is computed in float32 and rounded once."""
    out, block = torch.empty(coding.numel, dtype=coding.dtype, device=codes.device), coding.block
    step = coding.chunk * (1 if codes.device.type == "cpu" else 64)  # of a GPU few kernels, and 64 MiB in float32
    for start in range(0, coding.numel, step):
        piece = out[start : start + step]
        size = piece.numel()
        stored = codes[start * coding.bits // 8 : -(-(start + size) * coding.bits // 8)]
        numbers = _split(_read(stored, coding)[:size], block)  # [B, block]
        rows = range(start // block, start // block + len(numbers))
        of_rows = read_scales(scales, coding.blocks, rows, coding.double_quant)[:, None]
        if size % block:
            piece.copy_((numbers * of_rows).view(-1)[:size])
        else:
            torch.mul(numbers, of_rows, out=piece.view(-1, block))  # on a GPU one kernel, which casts on the way
    return out.view(coding.shape)


def _split(values: Tensor, block: int) -> Tensor:
    """[B, block] the values in blocks, the last one with zeros behind them. Views where there are none."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)


def _read(codes: Tensor, coding: Coding) -> Tensor:
    """What the codes stand for; with 4 bits twice as many numbers as there are bytes."""
    if coding.bits == 8:
        return codes.view(torch.int8)
    return torch.index_select(_list_pairs(codes.device, coding.levels), 0, codes.int()).view(torch.float32)


@lru_cache
def _list_pairs(device: torch.device, levels: str) -> Tensor:
    """[256] on a device: for each byte the two numbers that it stands for. They are one complex number, so that one
    read of the table gives both. Made once, because a CUDA graph does not capture a copy from the host."""
    numbers = NF4 if levels == "nf4" else range(-8, 8)
    pairs = [[numbers[byte & 15], numbers[byte >> 4]] for byte in range(256)]
    return torch.view_as_complex(torch.tensor(pairs, dtype=torch.float32, device=device))


# the operation: steps call it, and a trace records it

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor scales, int[] shape, ScalarType dtype, int bits, int block, str levels,"
    " bool double_quant, str leaf, Tensor? position=None, int runs=1, int ranks=1) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    block: int,
    levels: str,
    double_quant: bool,
    leaf: str,
    position: Tensor | None = None,
    runs: int = 1,
    ranks: int = 1,
) -> Tensor:
    coding = Coding(tuple(shape), dtype, bits, block, levels, double_quant)
    if position is not None:
        count = coding.blocks * ranks
        every = read_scales(scales, count, range(count), double_quant).view(runs, ranks, -1)
        mine = every.index_select(1, position.view(1)).reshape(-1)
        scales, coding = store_scales(mine, is_double=False), coding._replace(double_quant=False)
    return decode(codes, scales, coding)


def fake_dequantize(
    codes: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    block: int,
    levels: str,
    double_quant: bool,
    leaf: str,
    position: Tensor | None = None,
    runs: int = 1,
    ranks: int = 1,
) -> Tensor:
    """A tensor without data, of the value's shape.

    Raises:
        FzeroError: for codes or scales of another shape.
    """
    coding = Coding(tuple(shape), dtype, bits, block, levels, double_quant)
    scales_shape = shape_scales(coding.blocks * ranks, double_quant)
    for name, x, expected in (("codes", codes, coding.codes_shape), ("scales", scales, scales_shape)):
        if tuple(x.shape) != expected:
            problem = f"has {name} of shape {list(x.shape)}, and {list(expected)} belong to it"
            raise FzeroError(leaf or "a quantized leaf", problem, "give it to the step partitioned, by fzero.partition")
    return codes.new_empty(shape, dtype=dtype)


_LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("fzero::dequantize", fake_dequantize, lib=_LIBRARY)

dequantize = torch.ops.fzero.dequantize.default
"""`dequantize(codes, scales, shape, dtype, bits, block, levels, double_quant, leaf)` is `decode`, of a leaf.

With `position`, `runs` and `ranks` codes and shape are those of the part of a split leaf that the rank at a position
has, in so many runs, and scales are those of the whole leaf."""


def check_coding(path: str, coding: Coding) -> None:
    """Refuse codes of other than 8 or 4 bits, other levels, and blocks that are no multiple of two elements.

    Raises:
        FzeroError: with the number.
    """
    if coding.bits not in LARGEST:
        raise FzeroError(path, f"bits is {coding.bits!r}", "give 8 or 4")
    if coding.levels not in LEVELS or (coding.levels == "nf4" and coding.bits != 4):
        problem = f"levels is {coding.levels!r} with {coding.bits} bits"
        raise FzeroError(path, problem, "give 'even', or 'nf4' with bits=4")
    if not isinstance(coding.block, int) or coding.block < 2 or coding.block % 2:
        raise FzeroError(path, f"block is {coding.block!r}", "give an even number of elements, such as 256 or 64")
