"""Flags: how a step says that something went wrong that depends on data.

A step cannot raise for what depends on data: it runs to its end before anybody sees a number. So a stage of an
optimizer notes the problem in its state, as a `Flag`, and keeps it out of parameters and moments. The next call of the
step reads the flags among its arguments and raises. Every rank holds the same flag, so every rank raises.

On a CPU the flags of the arguments are read at once. On a GPU reading waits for all work in flight, so a call starts a
copy to the host, and raises for copies of earlier calls that have arrived. A flag stays set, so that none is missed.

What has no state of its own, as `fzero.accumulate`, makes a flag that the step returns beside its results: `note_flag`
and `note_local` of `fzero.values.flags`. The step holds it for its next call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError


class _Value(NamedTuple):
    value: Tensor  # 0-d, float32


class Flag(_Value):
    """A number among a step's state that is 0 as long as all is well.

    Each problem has a subclass, which says `where`, `problem`, as a format of the value, and `way_out`.
    """

    where: ClassVar[str] = ""
    problem: ClassVar[str] = "{value}"
    way_out: ClassVar[str] = ""

    def note(self, is_wrong: Tensor, value: Any) -> Self:
        """The flag, set to `value` where `is_wrong` and the flag is not set yet."""
        new = torch.where(is_wrong & (self.value == 0), value, self.value)
        return type(self)(new.to(self.value.dtype))

    def raise_if_set(self) -> None:
        """Raise the error of the flag where its value is not 0. Waits for the value.

        Raises:
            FzeroError: of the flag.
        """
        value = self.value.item()
        if value:
            raise FzeroError(self.where, self.problem.format(value=value), self.way_out)


@dataclass(frozen=True)
class FlagForm:
    """The words of a flag that are known when a step is traced: `FlagForm(...)(value)` is a flag with these words.

    The value is [2], the number of the flag and a `limit`, both of which `problem` may name.
    """

    where: str
    problem: str
    way_out: str

    def __call__(self, value: Tensor) -> Flag:
        return type("FlagOfForm", (_Limited,), asdict(self))(value)


class _Limited(Flag):
    def raise_if_set(self) -> None:
        value, limit = self.value.tolist()
        if value:
            raise FzeroError(self.where, self.problem.format(value=value, limit=limit), self.way_out)


MakeFlag = type[Flag] | FlagForm
"""What makes a flag of its value."""


def find_flags(treedef: tree.TreeDef) -> dict[int, type[Flag]]:
    """Position of a leaf -> the class of the flag that the leaf is the value of."""
    flags, pending = {}, [(treedef, 0)]
    for node, start in pending:  # breadth first: the list grows while it is read
        if isinstance(node.type, type) and issubclass(node.type, Flag):
            flags[start] = node.type
        for child in () if node.is_leaf() else node.children():
            pending.append((child, start))
            start += child.num_leaves
    return flags


def check_flags(state: tree.Tree) -> None:
    """Raise the error of the first flag that is set in `state`, if any. Waits for the values.

    A step does so for its arguments. Call this behind the last step of a run, and where no step of fzero runs.

    Raises:
        FzeroError: of the flag.
    """
    for flag in tree.find(state, lambda node: isinstance(node, Flag)):
        flag.raise_if_set()


class FlagReader:
    """Raises the errors of the flags among the arguments of calls, without waiting for a device."""

    def __init__(self) -> None:
        self._arriving: list[tuple[Flag, Any]] = []
        self._held: list[Flag] = []  # on the host

    def hold(self, flags: Iterable[Flag]) -> None:
        """Keep flags that a call has made for the next `read`. Only a flag in the state raises more than once."""
        for flag in flags:
            if _is_on_host(flag):
                self._held.append(flag)
            else:
                self._arriving.append(_copy_to_host(flag))

    def read_all(self) -> None:
        """Raise for any flag of earlier calls that is set. Waits for the values.

        Raises:
            FzeroError: of the flag.
        """
        for _, event in self._arriving:
            event.synchronize()
        self.read(())

    def read(self, flags: Iterable[Flag]) -> None:
        """Raise for a flag on the CPU that is set, for a flag of `hold`, or for an earlier call's flag whose copy has
        arrived and is set.

        Raises:
            FzeroError: of the flag.
        """
        readable: list[tuple[Flag, Any]] = [(flag, None) for flag in self._held]
        self._held = []
        arriving: list[tuple[Flag, Any]] = []
        for flag, event in self._arriving:
            (readable if event.query() else arriving).append((flag, event))
        for flag in flags:
            if _is_on_host(flag):
                readable.append((flag, None))
            else:
                arriving.append(_copy_to_host(flag))
        self._arriving = arriving
        for flag, _ in readable:
            flag.raise_if_set()


def _is_on_host(flag: Flag) -> bool:
    return flag.value.device.type != "cuda"


def _copy_to_host(flag: Flag) -> tuple[Flag, Any]:
    """The flag with a copy of its value in pinned memory, and an event behind the copy."""
    value = torch.empty(flag.value.shape, dtype=flag.value.dtype, pin_memory=True).copy_(flag.value, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return type(flag)(value), event
