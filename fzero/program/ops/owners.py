"""Operations on whole matrices, each on one rank, its owner. Orthogonalizing slices emits them.

    to_owners         slices -> per-rank     this rank's whole matrices, one behind the other, each part by part
    orthogonalize     per-rank -> per-rank   each of these matrices orthogonalized
    from_owners       per-rank -> slices     this rank's slices of the matrices, each matrix times its scale

`buckets` and `leaves` name the leaf of each slice. `rows` lists the rows of each matrix, leaf by leaf. `plan_owners`
finds the owners from these. A leaf that every rank holds whole does not move: every rank orthogonalizes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.base.torch_private_functions import take_dtypes
from fzero.files import load
from fzero.layout.owners import Owners, Piece, Places, plan_owners
from fzero.layout.parts import cut_into_parts, join_parts
from fzero.optim import newton_schulz
from fzero.optim.newton_schulz import DTYPE, Blocks, NewtonSchulz, count_flops, count_scratch
from fzero.program.comm import Comm
from fzero.program.kinds import RAGGED, UNIFORM, Kind, Slice
from fzero.program.operation import Node, Work, read_and_write
from fzero.program.records import record, register_for_tracing
from fzero.program.refusals import refuse_node
from fzero.ranks.exchanges import AllToAll, Rank, Steps
from fzero.ranks.performer import MovePerformer

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program


def orthogonalize_on_owners(
    on: MovePerformer, slices: Sequence[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz
) -> list[Tensor]:
    """The slices of these leaves, orthogonalized: by three operations on `on` for all leaves that are split over the
    same axes, or at once where all slices are here."""
    if on.rank is None:
        fulls = [join_parts(load(x), *place).view(place[0].shape_of(place[1])) for x, place in zip(slices, places)]
        made = newton_schulz.orthogonalize(fulls, blocks, how)
        return [cut_into_parts(each, each.new_empty(x.shape), *place) for each, x, place in zip(made, slices, places)]
    done: dict[int, Tensor] = {}
    for axes in dict.fromkeys((layout.split_axis, layout.shard_axis) for layout, _ in places):
        mine = [i for i, (layout, _) in enumerate(places) if (layout.split_axis, layout.shard_axis) == axes]
        xs, at, rows = [slices[i] for i in mine], [places[i] for i in mine], [blocks[i] for i in mine]
        done |= zip(mine, _move_and_orthogonalize(on, xs, at, rows, how))
    return [done[i] for i in range(len(slices))]


def _move_and_orthogonalize(
    on: MovePerformer, slices: Sequence[Tensor], places: Places, blocks: Blocks, how: NewtonSchulz
) -> list[Tensor]:
    each = [block for row in blocks for block in row]
    rows, scales = [block.rows for block in each], [block.scale for block in each]
    plan = plan_owners(tuple(places), tuple(rows), count_flops)
    named = [layout for layout, _ in places], [leaf for _, leaf in places], rows
    sizes = [len(layout.part(leaf, 0)) for layout, leaf in places]
    owned = on.perform(record(to_owners), list(slices), *named, plan.largest, DTYPE)
    made = on.perform(record(orthogonalize), owned, *named, *how, how.steps * plan.costliest)
    back = on.perform(record(from_owners), made, *named, scales, sizes, [x.dtype for x in slices])
    return [x if x.ndim == like.ndim else x.view(like.shape) for x, like in zip(back, slices)]


def owners_of(program: Program, node: Node) -> Owners:
    """The owners of the matrices that a node names."""
    places = tuple((program.layouts[bucket], leaf) for bucket, leaf in zip(*node.args[1:3]))
    return plan_owners(places, tuple(node.args[3]), count_flops)


# checks and kinds


def _check(program: Program, node: Node) -> None:
    buckets, leaves = node.args[1:3]
    for bucket, leaf in zip(buckets, leaves, strict=True):
        layout = program.layouts.get(bucket)
        if layout is None or leaf not in range(len(layout.leaves)):
            problem = f"names leaf {leaf} of {bucket!r}"
            raise refuse_node(program, node, problem, f"there are {sorted(map(str, program.layouts))}")


def _check_size(program: Program, node: Node) -> None:
    _check(program, node)
    largest = owners_of(program, node).largest
    if node.args[4] != largest:
        problem = f"brings {node.args[4]} elements to a rank, its layouts {largest}"
        raise refuse_node(program, node, problem, "take fzero.layout's")


def _kinds_of_leaves(walk: Walk, node: Node) -> list[Kind]:
    layouts = walk.program.layouts
    return [UNIFORM if layouts[bucket].replicated else Slice(bucket, leaf) for bucket, leaf in zip(*node.args[1:3])]


def _to_owners_kind(walk: Walk, node: Node) -> Kind:
    for given, kind in zip(node.args[0], _kinds_of_leaves(walk, node), strict=True):
        walk.expect(node, given, kind)
    return _kind_of_matrices(walk, node)


def _kind_of_matrices(walk: Walk, node: Node) -> Kind:
    """Matrices differ between ranks that may own others, and so do their sizes."""
    return frozenset({RAGGED, *walk.program.mesh.split(owners_of(walk.program, node).axis)})


def _expect_matrices(walk: Walk, node: Node) -> None:
    """Refuse an operand that is not the matrices that the node names."""
    owned = node.args[0]
    walk.expect(node, owned, _kind_of_matrices(walk, node))
    if walk.record(owned).name not in ("to_owners", "orthogonalize") or owned.args[1:4] != node.args[1:4]:
        raise walk.refuse(node, f"takes {owned.name} for the matrices that it names")


def _orthogonalize_kind(walk: Walk, node: Node) -> Kind:
    _expect_matrices(walk, node)
    return _kind_of_matrices(walk, node)


def _from_owners_kind(walk: Walk, node: Node) -> Kind:
    _expect_matrices(walk, node)
    return _kinds_of_leaves(walk, node)


# communication, memory and work


def _list_exchange(program: Program, node: Node) -> Iterator[Comm]:
    """One all-to-all of unequal parts: as one of equal parts of which each rank sends what the busiest rank does."""
    plan, made = owners_of(program, node), node.meta["val"]
    dtype = made.dtype if isinstance(made, Tensor) else node.args[0].meta["val"].dtype
    if plan.moved:
        numel = -(-plan.busiest * plan.world // (plan.world - 1))
        yield Comm("all_to_all", plan.axis, None, dtype, numel * dtype.itemsize)


# Every rank counts as having the matrices of the rank that owns most elements. Scratch is what another rank, which owns
# less, may have more at its peak.


def _to_owners_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The matrices; until they are there, what is packed to be sent and what arrives."""
    allocator.scratch[node] = owners_of(allocator.program, node).moving * node.meta["val"].element_size()
    return (allocator.new(node, node.meta["val"]),)


def _orthogonalize_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """New matrices, and beside all matrices the products of one at a time; of one that comes in parts, the whole too,
    in the order of rows, before and behind."""
    plan, steps = owners_of(allocator.program, node), node.args[4]
    size = 2 * node.meta["val"].element_size()  # of an element before and behind
    joined = size if plan.places[0][0].splits > 1 else 0

    def count(rows: int, columns: int) -> int:
        return count_scratch(rows, columns, steps) + joined * rows * columns

    allocator.scratch[node] = plan.find_scratch(size, count)
    return (allocator.new(node, node.meta["val"]),)


def _from_owners_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The slices; until they are filled, what is packed to be sent and what arrives."""
    plan = owners_of(allocator.program, node)
    allocator.scratch[node] = plan.moving * node.args[0].meta["val"].element_size()
    return (allocator.new_slices(node, plan.places),)


def _orthogonalize_work(node: Node) -> Work:
    """The flops of the busiest rank."""
    return Work(node.args[7], read_and_write(node).nbytes)


# performance: slices --bring_to_owners--> matrices, flat --orthogonalize_matrices--> matrices --bring_back--> slices


def _to_owners(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    plan, dtype = owners_of(program, node), node.args[5]
    return lambda slices, *_: bring_to_owners(slices, plan, rank.along(plan.axis), dtype)


def _orthogonalize(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    plan, how = owners_of(program, node), NewtonSchulz(*node.args[4:7])
    return lambda owned, *_: orthogonalize_matrices(owned, plan, rank.along(plan.axis), how)


def _from_owners(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    plan, (scales, _, dtypes) = owners_of(program, node), node.args[4:7]
    sizes = [len(layout.part(leaf, layout.rank_of(rank))) for layout, leaf in plan.places]
    return lambda owned, *_: bring_back(owned, plan, rank.along(plan.axis), scales, sizes, take_dtypes(dtypes))


def bring_to_owners(slices: Sequence[Tensor], plan: Owners, rank: int, dtype: torch.dtype) -> Steps:
    """The whole matrices that this rank owns, one behind the other, cast to `dtype`."""
    route, flats = plan.route(rank), [x.reshape(-1) for x in slices]
    owned = flats[0].new_empty(sum(len(at) for _, at in route.matrices), dtype=dtype)
    _copy([owned[piece.owned.start : piece.owned.stop] for piece in route.kept], _take_from_slices(flats, route.kept))
    if plan.moved:
        lent, borrowed = list(_chain(route.lent)), list(_chain(route.borrowed))
        sent = owned.new_empty(sum(len(piece.local) for piece in lent))
        _copy(sent.split([len(piece.local) for piece in lent]), _take_from_slices(flats, lent))
        splits = _count(route.lent), _count(route.borrowed)
        arrived = yield AllToAll("all_to_all of matrices to their owners", plan.axis, sent, splits)
        _copy(_take_from_buffer(owned, borrowed), arrived.split([len(piece.owned) for piece in borrowed]))
    return owned


def orthogonalize_matrices(owned: Tensor, plan: Owners, rank: int, how: NewtonSchulz) -> Tensor:
    """The matrices that this rank owns, orthogonalized: a new tensor."""
    made = torch.empty_like(owned)
    for matrix, at in plan.route(rank).matrices:
        (layout, leaf), where = plan.places[matrix.place], slice(at.start, at.stop)
        whole = join_parts(owned[where], layout, leaf, matrix.part).view(matrix.rows, matrix.columns)
        cut_into_parts(how.apply(whole), made[where], layout, leaf, matrix.part)
    return made


def bring_back(
    owned: Tensor,
    plan: Owners,
    rank: int,
    scales: Sequence[float],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> Steps:
    """This rank's slices, of these sizes and dtypes, of the matrices on all owners, each matrix times its scale."""
    route = plan.route(rank)
    slices = [owned.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes)]
    _copy(_take_from_slices(slices, route.kept), _take_from_buffer(owned, route.kept))
    pieces = list(route.kept)
    if plan.moved:
        lent, borrowed = list(_chain(route.lent)), list(_chain(route.borrowed))
        sent = owned.new_empty(sum(len(piece.owned) for piece in borrowed))
        _copy(sent.split([len(piece.owned) for piece in borrowed]), _take_from_buffer(owned, borrowed))
        splits = _count(route.borrowed), _count(route.lent)
        arrived = yield AllToAll("all_to_all of matrices from their owners", plan.axis, sent, splits)
        _copy(_take_from_slices(slices, lent), arrived.split([len(piece.local) for piece in lent]))
        pieces += lent
    for piece, here in zip(pieces, _take_from_slices(slices, pieces)):
        here.mul_(scales[piece.matrix])  # torch's in-place product of a list rounds the number to a narrow dtype first
    return slices


def _take_from_slices(slices: Sequence[Tensor], pieces: Iterable[Piece]) -> list[Tensor]:
    """The pieces in the slices of the rank that holds them: views."""
    return [slices[piece.place][piece.local.start : piece.local.stop] for piece in pieces]


def _take_from_buffer(owned: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
    """The pieces in the buffer of their owner: views."""
    return [owned[piece.owned.start : piece.owned.stop] for piece in pieces]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _chain(pieces: Sequence[Sequence[Piece]]) -> Iterable[Piece]:
    return itertools.chain.from_iterable(pieces)


def _count(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """For each rank, the elements of its pieces."""
    return [sum(len(piece.owned) for piece in each) for each in pieces]


def _line(program: Program, node: Node) -> str:
    plan = owners_of(program, node)
    share = plan.costliest / max(sum(plan.costs), 1)
    return f"orthogonalize   {len(plan.matrices)} matrices, {share:.1%} of the work on the busiest rank"


_NAMED = "str[] buckets, int[] leaves, int[] rows"
to_owners = register_for_tracing(
    f"to_owners(Tensor[] slices, {_NAMED}, int numel, ScalarType dtype) -> Tensor",
    lambda slices, buckets, leaves, rows, numel, dtype: slices[0].new_empty(numel, dtype=dtype),
    kind=_to_owners_kind,
    check=_check_size,
    moves=_list_exchange,
    memory=_to_owners_memory,
    perform=_to_owners,
    label=lambda program, node: "to_owners",
)
orthogonalize = register_for_tracing(
    f"orthogonalize(Tensor owned, {_NAMED}, int steps, float[] coefficients, float eps, int flops) -> Tensor",
    lambda owned, *_: torch.empty_like(owned),
    kind=_orthogonalize_kind,
    check=_check,
    memory=_orthogonalize_memory,
    work=_orthogonalize_work,
    perform=_orthogonalize,
    line=_line,
    label=lambda program, node: "orthogonalize",
)
from_owners = register_for_tracing(
    f"from_owners(Tensor owned, {_NAMED}, float[] scales, int[] numels, ScalarType[] dtypes) -> Tensor[]",
    lambda owned, buckets, leaves, rows, scales, numels, dtypes: [
        owned.new_empty(numel, dtype=dtype) for numel, dtype in zip(numels, take_dtypes(dtypes))
    ],
    kind=_from_owners_kind,
    check=_check,
    moves=_list_exchange,
    memory=_from_owners_memory,
    perform=_from_owners,
    label=lambda program, node: "from_owners",
)
