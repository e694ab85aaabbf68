"""Updates: the step of an optimizer for many leaves in one call.

    those of `fzero.optim.fused`       a step of the optimizer; the `fuse` pass emits these
    the same with `_` behind the name  the same in place; the `donate` pass emits these
    those of `fzero.optim.operations`  a stage of an optimizer; `fzero.optim` calls these

aten's own functional kernels do not serve: they return copies of the gradients too, and need a step count for each
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fzero.optim import rounding
from fzero.optim.fused import KERNELS, Kernel
from fzero.optim.operations import MAPS, PLACED, STAGES, SUMS
from fzero.program.aten import describe, infer_lists
from fzero.program.kinds import Kind, axes_of
from fzero.program.operation import Node, Operation, Work, nbytes, values_of
from fzero.program.records import register

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank


def _define_update(kernel: Kernel) -> tuple[Any, Any]:
    """Define `name(params, grads, *states, *numbers) -> (new params, *new states)`, with the name of a kernel, and
    `name_`, which writes over params and states. Returns both targets.

    With the keyword `where`, a 0-d bool, the results are the operands unless it is true.
    """
    name = kernel.name
    written = (0, *range(2, 2 + kernel.states))  # the positions of params and states

    def update(*args: Any, where: Any = None) -> tuple[Any, ...]:
        return tuple([torch.empty_like(x) for x in args[position]] for position in written)

    def update_(*args: Any, where: Any = None) -> None:
        pass

    def run(*args: Any, where: Any = None) -> tuple[Any, ...]:
        given = [[x.clone() for x in arg] if i in written else arg for i, arg in enumerate(args)]
        kernel.run(*given, where=where)
        return tuple(given[position] for position in written)

    def find_writes(node: Node) -> list[Node]:
        return [x for position in written for x in node.args[position]]

    def work_in_place(node: Node) -> Work:
        return Work(0, nbytes(values_of(node.all_input_nodes)) + nbytes(values_of(find_writes(node))))

    def label(program: Program, node: Node) -> str:
        return f"{name} {len(node.args[0])} leaves"

    def line(program: Program, node: Node) -> str:
        return f"update          {name}, {len(node.args[0])} leaves"

    update.__name__ = update.__qualname__ = name
    update_.__name__ = update_.__qualname__ = f"{name}_"
    functional = Operation(
        name=name,
        target=update,
        fake=update,
        kind=infer_lists,
        perform=lambda program, node, rank: run,
        line=line,
        label=label,
        in_place=update_,
        replaces=written,
        gradients=1,
        takes_where=True,
    )
    in_place = Operation(
        name=f"{name}_",
        target=update_,
        fake=update_,
        kind=infer_lists,
        writes=find_writes,
        work=work_in_place,
        perform=lambda program, node, rank: kernel.run,
        line=lambda program, node: f"{line(program, node)}, in place",
        label=label,
    )
    return register(functional), register(in_place)


UPDATES = {name: _define_update(kernel) for name, kernel in KERNELS.items()}
"""Name of a kernel -> the operation that returns new tensors, and the one in place."""


# stages, and the sums over whole leaves that some of them need


def _sums_kind(walk: Walk, node: Node) -> Kind:
    """Sums over slices differ between ranks, until they are summed over ranks. Their shapes do not."""
    kinds = [axes_of(walk.program, walk.of(leaf)) for leaf in node.args[0]]
    return [kinds[i % len(kinds)] for i in range(len(node.meta["val"]))]


def _sums_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    return ([allocator.new((node, i), value) for i, value in enumerate(node.meta["val"])],)


def _maps_kind(walk: Walk, node: Node) -> Kind:
    lists = [arg for arg in node.args[1:] if isinstance(arg, Sequence) and isinstance(arg[0], fx.Node)]
    beside = [arg for arg in node.args[1:] if isinstance(arg, fx.Node)]
    return [walk.join(node, [leaf], True, [*others, *beside]) for leaf, *others in zip(node.args[0], *lists)]


def _bind_rank(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    """The last arguments of a node are the positions of the rank whose fake values the program shows."""
    positions, ranks = ([rank.along(axis) if axis else 0 for axis in axes] for axes in node.args[-4:-2])
    return lambda *args: node.target(*args[:-2], positions, ranks)


for _name, _packet in (STAGES | SUMS | MAPS).items():
    _kind: Any = infer_lists if _name in STAGES else _sums_kind if _name in SUMS else _maps_kind
    for _overload in _packet.overloads():
        register(
            Operation(
                name=_name,
                target=getattr(_packet, _overload),
                fake=getattr(_packet, _overload),
                kind=_kind,
                memory=_sums_memory if _name in SUMS else None,
                perform=_bind_rank if _name in PLACED else None,
            )
        )
for _target in (rounding.foreach_stochastic_add.default, torch.ops.fzero._foreach_stochastic_add_.default):
    register(replace(describe(_target), perform=_bind_rank))
