"""Positions: how far a run has come in its data, for any number of ranks and workers."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

import fzero
from fzero import FzeroError, Sharded

ENDLESS = -1
"""The length of a dataset that does not know its own, and the seed of data in their own order."""


class Position(NamedTuple):
    """How far a run has come: `index` examples of `epoch`, counted over all ranks. The other fields say of which data.

    The fields of `loader.position` are 0-d int64 tensors, so that a position may stand in `fzero.State.data` and in
    safetensors files.
    """

    epoch: Any
    index: Any
    length: Any  # examples an epoch, -1 where the dataset does not know
    seed: Any  # -1 for the dataset's own order
    fingerprint: Any  # a hash of the name that the loader was given for its data, 0 without a name

    @classmethod
    def of(cls, *numbers: int) -> Self:
        """A position of tensors, from its numbers.

        Raises:
            FzeroError: for another count of numbers than there are fields.
        """
        if len(numbers) != len(cls._fields):
            raise FzeroError("Position.of", f"has {len(numbers)} numbers", f"give {', '.join(cls._fields)}")
        return cls(*map(torch.tensor, numbers))

    def to_numbers(self) -> tuple[int, ...]:
        """The fields as numbers. Collective where they are partitioned.

        Raises:
            FzeroError: for a field that is not one whole number.
        """
        fields = fzero.unpartition(self) if any(isinstance(x, Sharded) for x in self) else self
        for name, value in zip(self._fields, fields):
            is_number = isinstance(value, int) or (
                isinstance(value, Tensor) and value.numel() == 1 and not value.dtype.is_floating_point
            )
            if not is_number:
                raise FzeroError(f"position.{name}", f"is {value!r}, not a whole number", "give loader.position")
        return tuple(int(x) for x in fields)


def check_position(given: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Refuse the position of other data than the loader's.

    Raises:
        FzeroError: with the field and both numbers.
    """
    for name, theirs, ours in list(zip(Position._fields, given, own))[2:]:
        if theirs != ours:
            way_out = "make the loader with the dataset, seed and fingerprint that the position was saved with"
            raise FzeroError(f"position.{name}", f"is {theirs}, this loader's is {ours}", way_out)
    epoch, index, length, *_ = given
    if epoch < 0:
        raise FzeroError("position.epoch", f"is {epoch}", "give loader.position")
    if index < 0 or (length != ENDLESS and index > length):
        problem = f"is {index}, and an epoch has {length} examples" if length != ENDLESS else f"is {index}"
        raise FzeroError("position.index", problem, "give loader.position")


def mix(*keys: int | str) -> int:
    """Hash `keys` to a number of 62 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=8).digest(), "big") >> 2
