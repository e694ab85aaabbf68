"""Operation: one record with everything that fzero knows about an operation.

Walks over a program (kinds, collectives, memory, work, timeline, listing, code generation, lockstep, calibration) read
records. The records of fzero's own operations are in `ops`. The record of an aten operation comes from its schema, with
the corrections of `aten`. `define` adds the record of an operation from outside of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, fx

if TYPE_CHECKING:
    from fzero.program.comm import Comm
    from fzero.program.inference import Walk
    from fzero.program.kinds import Kind
    from fzero.program.memory import Allocator
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank

Node = Any
"""A `torch.fx.Node`. `Any`, because fx types a node's arguments as a union of twenty types: each use needs a cast."""

EMITTED_BY = "emitted_by"
"""The key in a node's `meta` of the name of the pass from outside of fzero that made the node."""
AGAIN = "again"
"""The key in the `meta` of a node that computes again, in the backward pass, what the forward pass has computed."""


class Work(NamedTuple):
    """The work of an operation: floating-point operations, where a multiply-add counts as two, and bytes read and
    written. Of the flops `attention` are those of fused attention, whose kernels have a rate of their own."""

    flops: int
    nbytes: int
    attention: int = 0


NO_WORK = Work(0, 0)


def nbytes(value: Any) -> int:
    """Bytes of the elements of a tensor, or of all tensors of a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def values_of(given: Any) -> Any:
    """`given`, a node or a structure of nodes such as `node.args`, with each node replaced by its fake value."""
    return fx.map_arg(given, lambda node: node.meta.get("val"))


def no_operands(node: Node) -> list[Node]:
    """No operands: the rule of an operation that writes into none."""
    return []


def _never(node: Node) -> bool:
    return False


def _no_alias(node: Node, position: int) -> None:
    return None


def _accept(program: Program, node: Node) -> None:
    pass


def read_and_write(node: Node) -> Work:
    """The work of an operation without flops that counts: it reads its operands and writes its result, once each."""
    return Work(0, nbytes(values_of(node.all_input_nodes)) + nbytes(node.meta.get("val")))


def join_operands(walk: Walk, node: Node) -> Any:
    """The kind of a result whose elements depend on all elements of all operands."""
    return walk.join(node, node.all_input_nodes, pointwise=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """The record of an operation, which nodes of a program call by `target`.

    * `fake(*args)`: the result for fake tensors. A view is a view of its fake operand.
    * `kind(walk, node)`: the kind of the result, from the kinds of the operands; raises where these do not fit.
    * `check(program, node)`: raises where the node's other arguments (bucket, leaves, axis, sizes) do not fit.
    * `perform(program, node, rank)`: a function of the node's arguments that runs on one rank. Called once for a node.
      Where the operation communicates, the function is a generator: it yields exchanges (`fzero.ranks.exchanges`) and
      is sent their results. None: `target` itself runs. Outside of a program, an `EagerCall`
      (`fzero.ranks.calls`) stands for the node, and for the program, of which it has the mesh and the layouts.
    * `of_all(*args)`: outside of a step on virtual ranks, where one process has the slices of all ranks, joined: the
      result of all ranks, joined too. None: `perform`, which then may not communicate.
    * `transpose(cotangent, *args)`: for an operation that is linear in its first argument, that argument's cotangent,
      by differentiable functions of the result's cotangent. `args` are the other arguments of the call. None: the
      operation has no derivative.
    * `span(program, node, rank)`: for a view of the flat first operand, the elements that the result is; None where the
      result is in several pieces. Generated code takes such a view by itself: a step has one for each leaf.
    * `moves(program, node)`: the collectives, in order. None: the operation does not communicate.
    * `starts`: the operation starts a collective for another node to wait for. The waited-for buffer holds the
      "gathered" leaves, or this rank's block of the "scattered" mean.
    * `waits`: the operation waits for the collective that its operand started.
    * `shares(node)`: whether the result is a view of an operand.
    * `alias_at(node, position)`: for an operation that starts, the operand whose memory the leaf at `position` has on a
      mesh of one rank; None where the leaf is always new memory.
    * `writes(node)`: the operands that the operation writes into.
    * `overwrites(node)`: the operands whose every element the operation overwrites, and none of which it reads.
    * `memory(allocator, node)`: the location of the result, then further storages that the result keeps alive. None: by
      `shares` the operand's, else new memory.
    * `scratch(program, node)`: the bytes that a rank needs while it performs the operation, or while it waits for what
      the operation started: beside operands, results and what is sent and arrives. None: no such bytes.
    * `work(node)`: the flops and bytes of this rank, besides communication.
    * `line(program, node)`: the node's line in a listing. None: by `moves`, else part of a "compute" line.
    * `label(program, node)`: the name of the operation in a profile. None: no name.
    * `names`: what the node's arguments from the second on name: a bucket and one "leaf", a bucket and "leaves", or a
      bucket, leaves and a "position" among these leaves.
    * `is_quiet`: a listing does not name the operation.
    * `is_derived`: passes repeat the operation rather than keep a gathered leaf alive for it, because it is so cheap.
    * `is_pointwise`: each element of the result depends only on the elements at its position.
    * `takes_shape`: the operation takes the shapes of its operands, and reads none of their elements.
    * `takes_buffers`: the operation takes gathered or scattered buffers, padding included. Its rule for kinds refuses
      the buffers that it does not take.
    * `is_random(node)`: whether the operation draws from a generator of torch.
    * `body(node)`: for a loop, the program that it runs once for each turn.
    * `early(node)`: for a loop, the nodes of its body that start in front of their turn -> so many turns early.
    * `draws`: the operation is called with the step's seed, as the keyword `seed`.
    * `in_place`: the target that computes the same results and writes them over operands.
    * `replaces`: for `in_place`, the position among the arguments of the list that each list of results overwrites.
    * `gradients`: for an update of many leaves, the position among the arguments of the list of gradients. All lists of
      arguments and results have one item for each leaf, and leaves do not depend on each other: `split` relies on that.
    * `together`: the target that does in one collective what several nodes of the operation do. Its first argument is
      the list of theirs.
    * `taken`: for an operation that starts, the target that takes one leaf of the buffer.
    * `mean_of(program, node)`: the path of the leaf of whose gradient the node takes the mean over ranks, else None.
    * `is_identity(program, node, kind)`: whether the result is the first operand, which is of this kind.
    * `takes_where`: the operation takes the keyword `where`, a 0-d bool, the same on all ranks. Where that is false,
      the results are the operands that `replaces` names.
    * `source`, `to`: the operation starts to copy the values of its first argument from one place to another. Places
      are the "device", the "host" and the "disk".
    * `arrives`: the operation waits for the copies that its operand started.
    * `stands_for`: the operator of torch that the operation stands for, which policies of checkpoints are asked about.
    * `is_foreign`: the operation was defined outside of fzero. The walk checks the kinds that its rule gives.
    """

    name: str
    target: Any
    kind: Callable[[Walk, Node], Any]
    fake: Callable[..., Any]
    check: Callable[[Program, Node], None] = _accept
    perform: Callable[[Program, Node, Rank], Callable[..., Any]] | None = None
    of_all: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    span: Callable[[Program, Node, Rank], range | None] | None = None
    moves: Callable[[Program, Node], Iterable[Comm]] | None = None
    starts: Literal["gathered", "scattered"] | None = None
    waits: bool = False
    shares: Callable[[Node], bool] = _never
    alias_at: Callable[[Node, int], Node | None] = _no_alias
    writes: Callable[[Node], list[Node]] = no_operands
    overwrites: Callable[[Node], list[Node]] = no_operands
    memory: Callable[[Allocator, Node], tuple[Any, ...]] | None = None
    scratch: Callable[[Program, Node], int] | None = None
    work: Callable[[Node], Work] = read_and_write
    line: Callable[[Program, Node], str] | None = None
    label: Callable[[Program, Node], str] | None = None
    names: Literal["leaf", "leaves", "position"] | None = None
    is_quiet: bool = False
    is_derived: bool = False
    is_pointwise: bool = False
    takes_shape: bool = False
    takes_buffers: bool = False
    is_random: Callable[[Node], bool] = _never
    body: Callable[[Node], Program] | None = None
    early: Callable[[Node], Mapping[Node, int]] | None = None
    draws: bool = False
    in_place: Any = None
    replaces: tuple[int, ...] = ()
    gradients: int | None = None
    together: Any = None
    taken: Any = None
    mean_of: Callable[[Program, Node], str | None] | None = None
    is_identity: Callable[[Program, Node, Kind], bool] | None = None
    takes_where: bool = False
    source: Literal["device", "host", "disk"] | None = None
    to: Literal["device", "host", "disk"] | None = None
    arrives: bool = False
    stands_for: Any = None
    is_foreign: bool = False
