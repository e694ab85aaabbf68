"""Operation: everything that is known of one operation, in one record.

A walk over a program (kinds, collectives, memory, work, timeline, listing, code generation, lockstep, calibration)
reads records. The records of fzero's own operations stand in `ops`; an operation of aten has the record that its schema
gives, with the corrections of `aten`. `define` makes a record for an operation from outside of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, fx

if TYPE_CHECKING:
    from fzero.program.comm import Comm
    from fzero.program.inference import Walk
    from fzero.program.memory import Held
    from fzero.program.program import Program

Node = Any
"""A `torch.fx.Node`, whose arguments are typed as a union of twenty types that no call site can tell apart."""


class Work(NamedTuple):
    """Floating-point operations, of which a multiply-add is two, and bytes read and written."""

    flops: int
    nbytes: int


NO_WORK = Work(0, 0)


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor's elements, or of all tensors of a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def values_of(given: Any) -> Any:
    """A node's arguments, with the fake value in the place of each node."""
    return fx.map_arg(given, lambda node: node.meta.get("val"))


def _no_operands(node: Node) -> list[Node]:
    return []


def _never(node: Node) -> bool:
    return False


def _no_alias(node: Node, position: int) -> None:
    return None


def _unchecked(program: Program, node: Node) -> None:
    pass


def read_and_write(node: Node) -> Work:
    """The work of an operation that reads its operands and writes its result, once each, and multiplies nothing."""
    return Work(0, nbytes(values_of(node.all_input_nodes)) + nbytes(node.meta.get("val")))


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """What is known of an operation that nodes of a program call by `target`.

    * `fake(*args)`: the result for fake tensors, views as views.
    * `kind(walk, node)`: the kind of the result, from those of the operands; raises where they do not fit.
    * `check(program, node)`: raises where the node's other arguments (bucket, leaves, axis, sizes) do not fit.
    * `perform(program, node, rank)`: a function of the node's arguments, for one rank, made once for a linked program.
      Where the operation communicates the function is a generator: it yields exchanges (`fzero.ranks`) and is sent
      their results. None: `target` itself runs.
    * `moves(program, node)`: the collectives, in order. None: the operation does not communicate.
    * `starts`: what the operation returns has to be waited for, and is then a buffer of leaves: "gathered", or this
      rank's block of their "scattered" mean.
    * `waits`: the operation waits for what its operand started.
    * `shares(node)`: whether the result is memory of an operand.
    * `alias_at(node, position)`: for an operation that starts: the operand whose memory the leaf at a position may be,
      on one rank; None where the leaf is always new memory.
    * `writes(node)`: the operands that the operation writes into.
    * `memory(held, node)`: where the result lies, then what else the result keeps alive. None: by `shares`, else new.
    * `work(node)`: flops and bytes of this rank, besides communication.
    * `line(program, node)`: the node's line in a listing; None: by `moves`, else a part of a "compute" line.
    * `label(program, node)`: what a profile calls the operation. None: no name of its own.
    * `names`: how the node's arguments 1 to 3 name what the operation is about: a bucket and one "leaf", a bucket and
      "leaves", or a bucket, leaves and a "position" among them.
    * `is_quiet`: not worth a word in a listing.
    * `is_derived`: so cheap that the operation is done again rather than keeping a gathered leaf alive for it.
    * `is_pointwise`: each element of the result depends on the elements at its position.
    * `is_random(node)`: whether the operation draws from a generator.
    * `draws`: the operation is called with the step's seed, as the keyword `seed`.
    * `in_place`: the target that computes the same, and writes results over the operands that they replace.
    * `replaces`: for each list of results, the argument that has the list of operands that they replace.
    * `is_foreign`: the operation was defined outside of fzero, so that its rules are checked as programs are.
    """

    name: str
    target: Any
    kind: Callable[[Walk, Node], Any]
    fake: Callable[..., Any]
    check: Callable[[Program, Node], None] = _unchecked
    perform: Callable[[Program, Node, Any], Callable[..., Any]] | None = None
    moves: Callable[[Program, Node], Iterable[Comm]] | None = None
    starts: Literal["gathered", "scattered"] | None = None
    waits: bool = False
    shares: Callable[[Node], bool] = _never
    alias_at: Callable[[Node, int], Node | None] = _no_alias
    writes: Callable[[Node], list[Node]] = _no_operands
    memory: Callable[[Held, Node], tuple[Any, ...]] | None = None
    work: Callable[[Node], Work] = read_and_write
    line: Callable[[Program, Node], str] | None = None
    label: Callable[[Program, Node], str] | None = None
    names: Literal["leaf", "leaves", "position"] | None = None
    is_quiet: bool = False
    is_derived: bool = False
    is_pointwise: bool = False
    is_random: Callable[[Node], bool] = _never
    draws: bool = False
    in_place: Any = None
    replaces: tuple[int, ...] = ()
    is_foreign: bool = False
