"""Stochastic rounding: a sum that lies between two bfloat16 numbers becomes either, so that the mean is the sum.

Training in bfloat16 without float32 copies of the parameters needs it: rounded to nearest, a step smaller than half of
bfloat16's spacing, 1/256 of a parameter, is lost every time. Gupta et al., Deep Learning with Limited Numerical
Precision, https://arxiv.org/abs/1502.02551; torchao's optimizers name it `bf16_stochastic_round`.

The random bits of an element are a hash of a key, of the leaf's path and of the element's position in the whole leaf.
So they do not depend on ranks, buckets or the order of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.randomness import fold
from fzero.optim.operations import PLACED, PLACES, SlicePlace, define, find_places, list_whole

Lists = Sequence[Tensor]
Key = int | Tensor
"""A whole number, maybe a 0-d tensor, that keys random bits."""
CHUNK = 2**20
"""The elements that are rounded at once: the scratch of a sum and its random bits is 16 bytes for each of them,
and more for a leaf that is split over model axes."""
LARGEST = torch.finfo(torch.bfloat16).max

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_STEP, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014), as int64."""


def make_key(given: Key | Sequence[Key], like: Any) -> Tensor:
    """The key, a 0-d int64 beside the leaf `like`, of a whole number or of several, such as a seed and a step.

    Raises:
        FzeroError: for a number that is not whole.
    """
    parts: Sequence[Any] = given if isinstance(given, (tuple, list)) else [given]
    key: Key = 0
    for part in parts:
        if not _is_whole(part):
            got = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else repr(part)
            way_out = "give whole numbers, such as the step count or (seed, step)"
            raise FzeroError("apply_updates: bf16_stochastic_round", f"is {got}", way_out)
        key = _wrap(key * _STEP) + (part.to(torch.int64) if isinstance(part, Tensor) else _wrap(part))
    return key if isinstance(key, Tensor) else like.new_zeros((), dtype=torch.int64) + _wrap(key)


def _is_whole(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not (x.ndim or x.is_floating_point() or x.is_complex())
    return isinstance(x, int)


def _wrap(x: Key) -> Key:
    """A Python number as int64 holds it."""
    return x if isinstance(x, Tensor) else (x + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's hash of each int64. Products wrap around, and shifts fill with zeros."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shift(x, shift)) * factor
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)


def draw_bits(key: Tensor, start: int, numel: int) -> Tensor:
    """[numel] 16 random bits, an int32, for each of the elements from `start` on. One hash has the bits of four."""
    first, last = start // 4, -(-(start + numel) // 4)
    counters = torch.arange(first, last, device=key.device)
    bits = _mix(key + counters * _STEP).view(torch.int16)[start - 4 * first :][:numel]
    return bits.to(torch.int32) & 0xFFFF


def round_to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Each float32 of `x`, rounded away from zero where its last 16 bits and `bits` carry, and toward zero elsewhere.

    That is with a probability of the part of the spacing that `x` is beyond the number nearer to zero. What is not
    finite, or larger than all of bfloat16, is rounded as torch does.
    """
    carried = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(x.abs() <= LARGEST, carried, x).to(torch.bfloat16)


def _draw_bits_of(key: Tensor, at: SlicePlace, start: int, numel: int) -> Tensor:
    """[numel] the bits of the elements of a slice from `start` on."""
    if at.ranks == 1:
        return draw_bits(key, at.start + start, numel)
    held = at.start + start + torch.arange(numel, device=key.device)  # of this rank's part
    whole = (held // at.run * at.ranks + at.position) * at.run + held % at.run
    bits = _mix(key + whole // 4 * _STEP).view(torch.int16).view(-1, 4)
    return bits.gather(1, (whole % 4)[:, None]).view(-1).to(torch.int32) & 0xFFFF


def _add_to_leaf(param: Tensor, update: Tensor, key: Tensor, at: SlicePlace) -> None:
    """Add an update to a parameter in place, a slice at a place of its leaf."""
    if param.dtype != torch.bfloat16:
        param.add_(update)
        return
    flat, steps = param.reshape(-1), update.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        into = flat[start : start + CHUNK]
        total = into.to(torch.float32) + steps[start : start + CHUNK].to(torch.float32)
        into.copy_(round_to_bfloat16(total, _draw_bits_of(key, at, start, into.numel())))
    if not param.is_contiguous():  # `flat` is a copy
        param.copy_(flat.view(param.shape))


def _add_(params: Lists, updates: Lists, key: Tensor, names: Sequence[int], *places: Any) -> None:
    for param, update, name, at in zip(params, updates, names, find_places(*places)):
        _add_to_leaf(param, update, _mix(_mix(key) + name), at)


def _add(params: Lists, *others: object) -> list[Tensor]:
    news = [param.clone() for param in params]
    _add_(news, *others)  # type: ignore[arg-type]
    return news


_ARGUMENTS = f"Tensor[] updates, Tensor key, int[] names, {PLACES}"
foreach_stochastic_add = define(
    f"_foreach_stochastic_add(Tensor[] params, {_ARGUMENTS}) -> Tensor[]",
    _add,
    lambda params, *others: [torch.empty_like(param) for param in params],
    PLACED,
)
"""`add_stochastically`, with a number for each path. The last arguments are those of `PLACED`."""

_LIBRARY.define(
    f"_foreach_stochastic_add_(Tensor(a!)[] params, {_ARGUMENTS}) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("_foreach_stochastic_add_", _add_, "CompositeExplicitAutograd")
torch.library.register_fake("fzero::_foreach_stochastic_add_", lambda *_: None, lib=_LIBRARY)


def add_stochastically(params: Sequence[Any], updates: Sequence[Any], key: Tensor, paths: Sequence[str]) -> list[Any]:
    """Each parameter plus its update, in its own dtype: one of bfloat16 is rounded stochastically, others as torch
    rounds. One list operation, of lists of plain tensors or of `Sharded`."""
    names = [fold(0, path) for path in paths]  # the same in every process
    return list(foreach_stochastic_add(params, updates, key, names, *list_whole(len(params))))
