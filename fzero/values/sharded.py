"""Sharded: one global value of which each rank holds a flat slice. `functions` says what torch's functions do to it.

A `Sharded` is a leaf to optree, so that `fzero.tree.map` sees one value. To torch.func it is a node with one child, its
slice, so that torch.func differentiates the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.ambient import leave_inference_mode
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk, Host, Placement, check_placement
from fzero.files import OnDisk, allocate
from fzero.files.memory import allocate_pinned_memory
from fzero.layout.layout import Layout, Leaf, replicated_layout
from fzero.program.linear import UNPARTITION_FIRST
from fzero.program.ops.leaves import gather_leaf, take_leaf
from fzero.ranks.performer import MovePerformer
from fzero.ranks.ranks import Ranks
from fzero.values import functions, rules
from fzero.values.functions import is_sharded
from fzero.values.moves import USE, Cut, copy_alias, move
from fzero.values.origin import UNKNOWN, Origin, describe_state, follow


class Form(NamedTuple):
    """All of a `Sharded` but its elements. A program that was traced for a value fits every value of an equal form.

    `device` is the device that computes with the value. With a `place` the slice lies there, and not on the device.
    """

    layout: Layout
    leaf: int
    on: MovePerformer
    dtype: torch.dtype | None
    device: torch.device | None
    place: Placement | None = None


class Sharded(Tensor):
    """A tensor of global `shape`, of which this rank holds the slice `local`.

    `local` is 1-d: the elements `form.layout.part(index, rank)` of the flattened value. With a replicated layout
    `local` is the full value, in its shape. `on` performs the moves of the value. Ranks compare the `origin`. A
    `Sharded` is immutable: write `p = p - g`.

    To torch a `Sharded` is a tensor without memory of its own. Its functions come to `__torch_function__`.
    """

    _local: Tensor | None
    _full: tuple[Tensor, int] | None  # and the number of writes to values before it was gathered
    _level: int
    form: Form
    origin: Origin

    def __new__(cls, local: Tensor, layout: Layout, index: int, on: MovePerformer) -> Sharded:
        return cls.of_form(local, Form(layout, index, on, local.dtype, local.device))

    def __init__(self, *of: Any) -> None:
        pass  # `__new__` did it; the constructor of Tensor takes no arguments

    @classmethod
    def of_form(cls, local: Tensor, form: Form, origin: Origin = UNKNOWN) -> Sharded:
        """A value of a known form. Steps return their state so: equal forms are then the same object, and comparing the
        arguments of the next call takes no time."""
        shape = form.layout.leaves[form.leaf].shape
        value: Sharded = torch_private.make_wrapper_subclass(cls, shape, dtype=form.dtype, device=form.device)
        value._local, value.form, value.origin, value._full = local, form, origin, None
        value._level = torch_private.depth() if form.on.is_tracing else 0
        return value

    @property
    def index(self) -> int:  # type: ignore[override]
        """The position of the value's leaf among the leaves of `form.layout`."""
        return self.form.leaf

    @property
    def on(self) -> MovePerformer:
        """What performs the moves of the value."""
        return self.form.on

    @property
    def local(self) -> Tensor:
        """This rank's slice itself: a step that updates the value in place writes over it. Clone what you keep.

        Raises:
            FzeroError: when this value was donated.
        """
        if self._local is None:
            raise FzeroError(
                self.path,
                "this value was donated: a step or a load wrote another one into its memory",
                "use the value that was returned, or give donate=False to shard or load; where passes are given, "
                "in_place=False to fzero.passes.defaults",
            )
        return self._local

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold slices.

        Raises:
            FzeroError: inside of a step.
        """
        if not isinstance(self.on, Ranks):
            raise FzeroError(self.path, "is inside of a step, where it has no values", "do that outside of the step")
        return self.on

    @property
    def place(self) -> Placement | None:
        """Where the slice lies, None for the device."""
        return self.form.place

    @property
    def is_donated(self) -> bool:
        """Whether this value was donated to a step or a load, and cannot be used any more."""
        return self._local is None

    def give_up(self) -> None:
        """Drop the slice, because a step or a load reuses its memory. This value cannot be used afterwards."""
        self._local = None

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full value."""
        return self.form.layout.replicated

    @property
    def leaf(self) -> Leaf:
        """Path and global shape."""
        return self.form.layout.leaves[self.form.leaf]

    @property
    def path(self) -> str:
        """Dotted path in the tree that was partitioned."""
        return self.leaf.path

    @property
    def cut(self) -> Cut:
        """The leaf and its axes, for moves of slices."""
        return Cut(self.path, self.form.layout.cut_axes, self.numel())

    @property
    def cut_of_part(self) -> Cut:
        """The same for what this rank has of a leaf that is split over model axes, gathered."""
        return replace(self.cut, axes=self.form.layout.split_axis, is_part=True)

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole value. A leaf that is split over model axes has the `shape` of this rank's part."""
        return torch.Size(self.form.layout.shape_of(self.form.leaf))

    @property
    def part(self) -> range:
        """The elements of the flattened value that this rank holds."""
        return self.form.layout.part(self.form.leaf, self.form.layout.rank_of(self.on))

    # Of Tensor's attributes these are asked for most: without the way through `__torch_function__`.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self.leaf.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.leaf.shape)

    def numel(self) -> int:
        """The elements that a sum is of: those of the whole value, where `shape` is that of a part."""
        return self.form.layout.splits * self.leaf.numel

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.form.dtype  # type: ignore[return-value]  # None only while torch.func builds trees of dimensions

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.form.device  # type: ignore[return-value]

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise self._refuse_autograd("requires_grad")

    @property
    def grad(self) -> None:
        """None: gradients are what `fzero.value_and_grad` returns."""

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:  # None sets nothing, as `zero_grad` does
            raise self._refuse_autograd("grad")

    def _refuse_autograd(self, name: str) -> FzeroError:
        return FzeroError(self.path, f"{name} of a Sharded cannot be set", rules.REFUSED["backward"])

    def full_tensor(self) -> Tensor:
        """The full value, a plain tensor, the same on every rank. The transpose scatters the cotangent.

        In a trace, uses within one torch.func transform share one gather: the sum of their cotangents scatters once.
        """
        return self.gather_for("full_tensor")

    def gather_for(self, what: str) -> Tensor:
        """The `full_tensor` for a function of the name `what`, which ranks compare outside of a step."""
        if self._full is not None and self._full[1] == self.on.writes:
            return self._full[0]
        on = self.perform_for(what)
        is_mode_left = torch.is_inference_mode_enabled() and not on.is_tracing  # its tensors count no writes
        with leave_inference_mode() if is_mode_left else nullcontext():
            if self.is_replicated:
                full = move(USE, self.local, on, self.cut)
            else:
                full = gather_leaf(self.local, self.form.layout, self.index, on=on)
        # A gather under no_grad or of an inner transform has no cotangent for later uses: do not share it.
        if self.on.is_tracing and torch.is_grad_enabled() and self._level == torch_private.depth():
            self._full = full, self.on.writes
        return full

    def perform_for(self, what: str) -> MovePerformer:
        """What performs the moves of this value for a function. Outside of a step ranks compare, before each move, what
        the function is and where the value came from."""
        if self.on.is_tracing:
            return self.on
        return self.on.specify(f"{what} of {self.path}", [describe_state(self.path, self.origin)])

    def with_local(self, local: Tensor) -> Sharded:
        """A value of the same leaf and layout with the slice `local`, which lies where this value's slice does."""
        device = local.device if self.place is None else self.form.device
        if isinstance(self.place, Disk) and not self.on.is_tracing and not torch_private.depth():
            local = self._write(local, self.place)
        return self.of_form(local, self.form._replace(dtype=local.dtype, device=device))

    def at(self, place: Placement | None) -> Sharded:
        """A copy of this value with its slice in a placement, None for the device. The value itself where its slice
        lies there, or where it is replicated: replicated values are on the device."""
        check_placement(place)
        if self.is_replicated or self.local.is_meta:
            return self if self.is_replicated else self.of_form(self.local, self.form._replace(place=place))
        local = self.local
        if isinstance(place, Disk):
            local = local if place == self.place else self._write(local, place)
        elif place != self.place:
            local = local.to(self.device if place is None else "cpu", copy=True)
        if isinstance(place, Host) and place.pin and torch.accelerator.is_available() and not local.is_pinned():
            local = allocate_pinned_memory(local.numel(), local.dtype, self.path).copy_(local)
        return self if local is self.local else self.of_form(local, self.form._replace(place=place), self.origin)

    def lie_in(self, place: Placement | None, local: Tensor) -> None:
        """Turn into the value whose slice is `local`, a copy of this slice in a placement. The object stays the
        same."""
        self._local, self.form = local, self.form._replace(place=place)

    def _write(self, local: Tensor, place: Disk) -> Tensor:
        """A slice of this value's leaf in a file below a path. A slice that is in a file there stays where it is."""
        if local.is_meta or (isinstance(local, OnDisk) and local.place == place):
            return local
        made = allocate(place, local.dtype, local.numel(), self.on.rank, self.form.layout.bucket, self.path)
        return made.copy_(local)

    def slice_of(self, full: Tensor) -> Sharded:
        """The value whose full tensor is `full`, a uniform tensor of the global shape. Inverse of `full_tensor`."""
        if self.is_replicated:
            return self.with_local(copy_alias(full, self.on, [full]))
        value = self.with_local(take_leaf(full, self.form.layout, self.index, on=self.perform_for("a slice")))
        value._full = (full, self.on.writes) if self.on.is_tracing and torch.is_grad_enabled() else None
        return value

    def become_replicated(self, full: Tensor) -> None:
        """Turn into the value of which every rank holds `full`, of another shape. The object stays the same.

        Raises:
            FzeroError: inside of another transform of torch.func than the one that made the value: `full` ends there.
        """
        if self._level != torch_private.depth():
            problem = "the shape of a value from outside of a gradient is changed in place, inside"
            raise FzeroError(self.path, problem, "reshape it into a new value")
        value = Sharded(full, replicated_layout(full.shape, self.form.layout.mesh), 0, self.on)
        with torch.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, value)

    def new_zeros(self, *shape: Any, **options: Any) -> Tensor:
        """Zeros. In a step a plain tensor. Elsewhere a replicated value on this value's mesh, of which every rank
        holds all: state such as a step count."""
        zeros = self.local.new_zeros(*shape, **{"device": self.device, **options})
        if self.on.is_tracing:
            return zeros
        return Sharded(zeros, replicated_layout(zeros.shape, self.form.layout.mesh), 0, self.on)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(getattr(each, "is_read_first", False) for each in types):
            return NotImplemented  # torch asks that class next, which calls `func` with plain tensors in its place
        return functions.apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse a kernel of torch: a function that does not look at `__torch_function__` called it."""
        given = torch_private.pytree_leaves((args, kwargs), is_leaf=is_sharded)
        path = next(x.path for x in given if is_sharded(x))
        raise FzeroError(path, f"{func} got this leaf, which has no memory of its own", "give leaf.full_tensor()")

    def __copy__(self) -> Sharded:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        value = self.with_local(self.local.clone())
        value.origin = self.origin
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(
            self.path,
            "a Sharded is this rank's part of a value, and cannot be pickled",
            "write the tree with fzero.save_safetensors, or pickle fzero.unpartition(tree)",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        layout = self.form.layout
        held = "replicated" if self.is_replicated else f"[{self.part.start}:{self.part.stop}] of {self.leaf.numel}"
        rank = "every rank" if self.on.rank is None else f"rank {self.on.rank}"
        where = f"{layout.bucket!r}, {rank} of {layout.world}"
        state = str(self.form.dtype).removeprefix("torch.") if self._local is not None else "donated"
        where += f", {self.place}" if self.place is not None else ""
        return f"Sharded({self.path or 'value'}: {state}{list(self.leaf.shape)}, {held}, bucket {where})"

    __hash__ = object.__hash__  # by identity: __eq__ is elementwise, as a tensor's


class Whole(Sharded):
    """A `Sharded` that pytrees of torch do not open. `_flatten` says where values become such leaves."""


@dataclass(frozen=True)
class _Context:
    """All of a value but its slice: the context of the pytree node. torch.func compares those of primal and tangent,
    and prints both in its error."""

    layout: Layout
    leaf: int
    on: MovePerformer
    origin: Origin = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.layout.leaves[self.leaf].path} on {self.layout.mesh}"


def _flatten(value: Sharded) -> tuple[list[Any], _Context]:
    """The child of the pytree node: for torch.func the slice, which torch.func wraps and differentiates. Anybody else
    gets a leaf that behaves as the value: a norm of what `torch.utils._pytree.tree_leaves` finds is the global norm,
    and a custom `torch.autograd.Function` sees an argument with a `__torch_function__`."""
    is_transform = torch_private.is_called_by_functorch()
    child = value.local if is_transform else Whole.of_form(value.local, value.form, value.origin)
    return [child], _Context(value.form.layout, value.index, value.on, value.origin)


def _unflatten(children: Iterable[Any], context: _Context) -> Any:
    """The value of one child, where torch rebuilds a pytree.

    Raises:
        FzeroError: where torch.func gives a slice of another shape than the rank holds: a batch of slices, or a slice
            of a slice.
    """
    (child,) = children
    if not torch_private.is_called_by_functorch():
        return Sharded.of_form(child.local, child.form, child.origin) if isinstance(child, Whole) else child
    if not isinstance(child, Tensor):  # torch.func also builds trees of dimensions, one for each slice
        return Sharded.of_form(child, Form(context.layout, context.leaf, context.on, dtype=None, device=None))
    value = Sharded(child, context.layout, context.leaf, context.on)
    if not context.on.is_tracing:  # a transform's argument, or what it computed, such as a gradient
        value.origin = follow([context.origin], context.on.count_agreements())
    held = value.shape if value.is_replicated else torch.Size([len(value.part)])
    if child.shape != held:
        raise FzeroError(
            value.path,
            f"a transform maps over this leaf, to slices of {list(child.shape)} where a rank holds {list(held)}: "
            "jacrev, jacfwd, hessian, and in_dims and out_dims of vmap know no dimensions of a Sharded",
            UNPARTITION_FIRST,
        )
    return value


torch_private.register_pytree_node(Sharded, _flatten, _unflatten, serialized_type_name="fzero.Sharded")
