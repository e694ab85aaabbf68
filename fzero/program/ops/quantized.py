"""Codes and their scales: leaves that are stored so, and updates of 8-bit state.

dequantize          uniform -> uniform   a leaf from codes and scales; `Quantized` calls it
scale_by_adam8bit   slices -> slices     Adam's scaled gradients and new state; `fzero.optim` calls it

Codes of 8-bit state lie as their parameter does, scales on the rank that holds their block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fzero.optim import quantized
from fzero.optim.quantized import BLOCK
from fzero.program import blockwise
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node, Operation, read_and_write
from fzero.program.records import register

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator


def _dequantize_kind(walk: Walk, node: Node) -> Kind:
    _, _, _, _, _, _, _, _, _, *place = node.args
    given = [*node.args[:2], *place[:1]]  # and, of a split leaf whose scales are whole, the rank's position
    for each in given:
        walk.expect_full(node, each)
    return walk.join(node, given, pointwise=False)


dequantize = register(
    Operation(
        name="dequantize",
        target=blockwise.dequantize,
        fake=blockwise.fake_dequantize,
        kind=_dequantize_kind,
    )
)


def _kind(walk: Walk, node: Node) -> list[list[Kind]]:
    updates, *state = node.args[:5]
    for update, mu, mu_scales, nu, nu_scales in zip(updates, *state, strict=True):
        walk.join(node, [update, mu, nu], pointwise=True, beside=[node.args[5]])
        for codes, scales in ((mu, mu_scales), (nu, nu_scales)):
            _expect_scales(walk, node, walk.of(codes), scales)
    return [[walk.of(x) for x in column] for column in (state[0], *state)]


def _expect_scales(walk: Walk, node: Node, kind: Kind, scales: Node) -> None:
    """Refuse scales that do not lie as the blocks of their codes."""
    found = walk.of(scales)
    if not isinstance(kind, Slice):
        return walk.expect(node, scales, kind)
    layout = walk.program.layouts[kind.bucket].coarsen(BLOCK)
    if not isinstance(found, Slice) or walk.program.layouts[found.bucket] != layout or found.leaf != kind.leaf:
        raise walk.refuse(node, f"takes {scales.name} for the scales of blocks of {BLOCK} elements")


def _memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    state = node.args[1:5]
    return (allocator.new_lists(node, [state[0], *state]),)


scale_by_adam8bit = register(
    Operation(
        name="scale_by_adam8bit",
        target=quantized.scale_by_adam8bit.default,
        fake=quantized.scale_by_adam8bit.default,
        kind=_kind,
        memory=_memory,
        work=read_and_write,
    )
)
