"""Wishes: along which axes of a mesh the ranks shall share a model, as the user gave them."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, lay_state, mesh_shape
from fzero.hf.styles import Axis, list_names
from fzero.hf.tensor_plans import TensorPlan

Capacity = float | Literal["same"] | None
"""What `capacity` of `fzero.hf.parallel` takes."""


class Wish(NamedTuple):
    """The arguments `tp`, `ep`, `sp`, `plan`, `capacity` and `rotate` of `fzero.hf.parallel`."""

    tp: Axis | None = None
    ep: Axis | None = None
    sp: Axis | None = None
    plan: TensorPlan | None = None
    capacity: Capacity = "same"
    rotate: bool = False

    @property
    def sends(self) -> bool:
        """Whether ranks along `ep` take different examples, whose tokens go to the ranks of their experts."""
        return self.ep is not None and self.capacity != "same"

    @property
    def between(self) -> Axis | None:
        """The axis of ranks that share layers, in which they have each other's places, and between them their own:
        that of `tp`, where `sp` has its names."""
        tp, _, sp = _list_names(self)
        return self.tp if tp is not None and sp is not None and {*tp} <= {*sp} else None

    @property
    def around(self) -> Axis | None:
        """The axis of ranks that have parts of a sequence in layers too: what `sp` has besides `between`."""
        if self.between is None:
            return self.sp
        tp, _, sp = _list_names(self)
        others = tuple(name for name in sp or () if name not in (tp or ()))
        return others[0] if len(others) == 1 else others or None

    def of_equal_examples(self) -> dict[str, Any]:
        """The arguments of `generate`, where ranks along all of these axes have the same examples, and all places."""
        return {"tp": self.tp, "ep": self.ep, "sp": self.sp, "plan": self.plan}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that are given."""
        return tuple(axis for axis in self[:3] if axis is not None)

    def find_axes(self, mesh: VirtualMesh) -> dict[Axis, str]:
        """Each axis that was given, and its name on the mesh.

        Raises:
            FzeroError: for an axis that is no name or tuple of names; for one that the mesh lacks; for the one that all
                state is cut over; for some ranks along `sp` that also share layers; for a `capacity` that is not above
                0, without `ep`, or where `ep` is an axis of `tp`.
        """
        for word, axis in zip(self._fields, self[:3]):
            names = axis if isinstance(axis, tuple) else (axis,)
            if axis is not None and not (names and all(isinstance(name, str) for name in names)):
                raise FzeroError(f"{word}={axis!r}", "is no axis", 'give a name, such as "tp", or a tuple of names')
        axes = {axis: mesh.join(list_names(axis)) for axis in self.axes}
        others = (self.tp if self.between is None else None, self.ep)
        of_layers = {name for axis in others if axis is not None for name in mesh.split(axes[axis])}
        if self.sp is not None and of_layers.intersection(mesh.split(axes[self.sp])):
            problem = f"some of its ranks share layers too: tp={self.tp!r}, ep={self.ep!r}"
            way_out = "give sp all axes of tp, or none, and the mesh an axis besides for parts of a sequence"
            raise FzeroError(f"sp={self.sp!r}", problem, way_out)
        if isinstance(self.capacity, (int, float)) and not 0 < self.capacity < math.inf:
            raise FzeroError(f"capacity={self.capacity!r}", "is no room for tokens", "give a number above 0, or None")
        if self.capacity != "same" and self.ep is None:
            raise FzeroError(f"capacity={self.capacity!r}", "is given without ep", 'name the axis, as in ep="ep"')
        of_tokens = {*mesh.split(axes[self.ep])} if self.ep is not None and self.sends else set[str]()
        if self.tp is not None and of_tokens & {*mesh.split(axes[self.tp])}:
            problem = f"is given, and ranks along tp={self.tp!r} have the same tokens"
            raise FzeroError(f"capacity={self.capacity!r}", problem, "give ep another axis, or leave capacity out")
        for given, axis in axes.items():
            is_cut = mesh.state is None or given != self.sp  # parts of a sequence are no parts of leaves
            if is_cut and set(mesh.shard_axes) <= set(mesh.split(axis)):
                way_out = 'give the mesh an axis "fsdp" besides, of one rank if need be'
                raise FzeroError(repr(axis), f"is an axis over which {mesh} cuts all state", way_out)
        return axes

    def lay_state(self, mesh: Any) -> Any:
        """The mesh with state along its axes for it, and along those whose ranks would have copies: of parts of a
        sequence, and of experts whose tokens come from ranks with examples of their own. A mesh whose state was laid
        stays as it is."""
        if not self.axes:
            return mesh
        sizes = mesh_shape(mesh)
        axes: dict[Axis | None, tuple[str, ...]] = {x: sizes.split(name) for x, name in self.find_axes(sizes).items()}
        chosen = {*axes.get(self.sp, ()), *(axes[self.ep] if self.sends else ())} - {*axes.get(self.tp, ())}
        if not chosen or sizes.state is not None:
            return mesh
        return lay_state(mesh, [axis for axis in sizes.names if axis in chosen.union(sizes.shard_axes)])

    def find_data(self, mesh: Any) -> tuple[str, ...] | None:
        """The axes along which ranks take different examples; None for what the names of axes say."""
        sizes = mesh_shape(mesh)
        axes = self.find_axes(sizes)
        alike = [joined for axis, joined in axes.items() if not (self.sends and axis == self.ep)]
        shared = {name for joined in alike for name in sizes.split(joined)}
        return tuple(name for name in sizes.names if name not in shared) if axes else None


def choose_wish(given: Wish, of_model: Wish) -> Wish:
    """How a model that is in slices already is shared.

    Raises:
        FzeroError: for a wish beside it that differs.
    """
    if given.axes and _list_names(given) != _list_names(of_model):
        problem = f"are {given[:3]}, and from_pretrained had {of_model[:3]}"
        raise FzeroError("tp, ep, sp", problem, "give them to from_pretrained alone")
    if given.capacity != of_model.capacity and (given.axes or given.capacity != "same"):
        problem = f"is {given.capacity!r}, and from_pretrained had {of_model.capacity!r}"
        raise FzeroError("capacity", problem, "give it to from_pretrained alone")
    if given.plan is not None and given.plan != of_model.plan:
        problem = f"is given, and the slices are those of plan={of_model.plan!r:.80} of from_pretrained"
        raise FzeroError("plan", problem, "give it to from_pretrained alone")
    return of_model


def _list_names(wish: Wish) -> list[tuple[str, ...] | None]:
    """The names of mesh axes of tp, ep and sp."""
    return [None if axis is None else list_names(axis) for axis in wish[:3]]


def check_mesh_of(wish: Wish, mesh: Any) -> None:
    """Refuse axes without a mesh that has them.

    Raises:
        FzeroError: naming the axis; for a plan without an axis.
    """
    if wish.plan is not None and wish.tp is None and wish.ep is None:
        raise FzeroError("plan", "is given, and neither tp nor ep", 'name the axis, as in tp="tp"')
    if wish.axes and mesh is None:
        axis = wish.axes[0]
        way_out = 'give mesh=init_device_mesh("cuda", (4, 2), mesh_dim_names=("fsdp", "tp"))'
        raise FzeroError(repr(axis), "is no axis of a mesh: none is given", way_out)
    if wish.axes:
        wish.find_axes(mesh_shape(mesh))
