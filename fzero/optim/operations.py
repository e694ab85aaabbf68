"""Operations on lists of leaves: a traced program has one node for each, however many leaves there are.

`define_stage` makes the operation of a stage. Rules for `Sharded` and for programs find operations in these tables:

    STAGES   elementwise at each position of their lists
    SUMS     their results are sums over the elements of a leaf: the sum over slices is the sum over ranks
    MAPS     one new leaf for each leaf of the first list, with other operands of any shape
    PLACED   operations that need to know which elements of its leaf a slice has, from their last arguments, `PLACES`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.tangents import has_tangent

STAGES: dict[str, Any] = {}
SUMS: dict[str, Any] = {}
MAPS: dict[str, Any] = {}
PLACED: dict[str, Any] = {}


class _Library(torch.library.Library):
    """Operations whose autograd kernels, which `torch.library.register_autograd` makes, refuse forward mode. As torch
    makes them, they give a tangent of zero."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> Any:
        def refuse_tangents(*args: Any) -> Any:
            if has_tangent(args):
                raise _refuse_derivative(str(op_name))
            return fn(*args)

        return super().impl(op_name, refuse_tangents if dispatch_key == "Autograd" else fn, dispatch_key, **how)


def _refuse_derivative(name: str) -> FzeroError:
    way_out = "update outside the differentiated function, or use sgd, which has one"
    return FzeroError(name.partition(".")[0], "has no derivative", way_out)


_LIBRARY = _Library("fzero", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *tables: dict[str, Any]) -> Any:
    """Define `torch.ops.fzero.<name of the schema>`, add it to the tables, and return it.

    `kernel` returns new tensors and writes into no argument. The operation has no derivative. It has an overload
    `tensors` that takes 0-d tensors for the numbers of the schema.

    The result is the overload packet, because the rules of `Sharded` know a function by its name, and the name of the
    packet's `.default` overload is "scale_by_adam.default".
    """
    name, _, rest = schema.partition("(")

    def refuse_backward(context: Any, *cotangents: Any) -> NoReturn:
        raise _refuse_derivative(name)

    for overload in (name, f"{name}.tensors") if " float " in rest else (name,):
        _LIBRARY.define(
            f"{overload}({rest if overload == name else rest.replace(' float ', ' Tensor ')}",
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        _LIBRARY.impl(overload, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fzero::{overload}", fake, lib=_LIBRARY)
        torch.library.register_autograd(f"fzero::{overload}", refuse_backward, lib=_LIBRARY)
    packet = getattr(torch.ops.fzero, name)
    for table in tables:
        table[name] = packet
    return packet


def define_stage(schema: str, kernel: Callable[..., tuple[list[Tensor], ...]]) -> Any:
    """Define the operation of a stage: `(updates, *states, *others) -> (new updates, *new states)`.

    `updates` and each state are lists with one item a leaf; `others` are such lists, numbers and 0-d tensors. The
    schema's results say how many states there are. `kernel` gets and returns all lists in float32 or wider. New updates
    have the dtype that updates and first state promote to; states keep their dtypes.
    """
    count = schema.partition("->")[2].count("Tensor[]")  # of lists that the operation returns

    def compute(*args: Any) -> tuple[list[Tensor], ...]:
        if not args[0]:
            return tuple([] for _ in range(count))
        lists = [arg for arg in args if _is_list_of_tensors(arg)]
        wide = [_promote(row, torch.float32) for row in zip(*lists)]
        given = [cast_each(arg, wide) if _is_list_of_tensors(arg) else arg for arg in args]
        return tuple(map(cast_each, kernel(*given), _list_dtypes(args, count)))

    def fake(*args: Any) -> tuple[list[Tensor], ...]:
        likes = (args[1], *args[1:count])
        return tuple(
            [torch.empty_like(like, dtype=dtype) for like, dtype in zip(*column)]
            for column in zip(likes, _list_dtypes(args, count))
        )

    return define(schema, compute, fake, STAGES)


PLACES = "int[] shards, int[] begins, int[] runs, int[] splits, str[] axes, str[] cuts, int[] positions, int[] ranks"
"""The last arguments of an operation of `PLACED`, of which lists have an item for each leaf. A leaf's bucket has
`shards` elements a rank, and the leaf begins at element `begins` of the bucket. It is split over `axes`, of `splits`
ranks, in runs of `runs` elements, and cut over the axes `cuts`; this rank is at `positions` and `ranks` along these."""


def list_whole(count: int) -> tuple[Any, ...]:
    """`PLACES` of so many leaves of which this rank has all elements."""
    zeros = [0] * count
    return zeros, zeros, zeros, [1] * count, [""] * count, [""] * count, zeros, zeros


class SlicePlace(NamedTuple):
    """Which elements of its leaf a slice has: those from `start` on, of what the rank at a position has of a leaf whose
    runs go to so many ranks in turn."""

    start: int
    run: int
    ranks: int
    position: int


def find_places(
    shards: Sequence[int],
    begins: Sequence[int],
    runs: Sequence[int],
    splits: Sequence[int],
    axes: Sequence[str],
    cuts: Sequence[str],
    positions: Sequence[int],
    ranks: Sequence[int],
) -> Iterator[SlicePlace]:
    """The place of this rank's slice of each leaf, from `PLACES`."""
    starts = (max(0, rank * shard - begin) for rank, shard, begin in zip(ranks, shards, begins))
    return map(SlicePlace, starts, runs, splits, positions)


def _is_list_of_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _list_dtypes(args: Sequence[Any], count: int) -> list[list[torch.dtype]]:
    """The dtypes of the lists that the operation of a stage returns."""
    updates = [_promote(row) for row in zip(args[0], args[1])]
    return [updates, *([state.dtype for state in column] for column in args[1:count])]


def _promote(row: Sequence[Tensor], dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype that the tensors of a row, and `dtype`, promote to."""
    for x in row:
        dtype = x.dtype if dtype is None else torch.promote_types(dtype, x.dtype)
    assert dtype is not None
    return dtype


def cast_each(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each tensor in the dtype at its position. A tensor that has the dtype already stays the same object."""
    return [tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes)]
