"""Claims: what the record of an operation from outside says, held against what the operation does.

A record is believed: memory is reserved, kernels are fused and collectives are counted by it. So a simulation, and the
first call of a program on a live mesh, compare each call of such an operation with its record. Later calls do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.bits import copy_bytes, format_values, has_equal_bits
from fzero.base.dtypes import describe_form, name_dtype
from fzero.base.errors import FzeroError
from fzero.base.torch_private import storage_key, version_of
from fzero.execution.moves import Moves
from fzero.files import OnDisk
from fzero.program.kinds import RAGGED, Kind, Slice, axes_of
from fzero.program.operation import Node
from fzero.program.program import RANK, Program
from fzero.program.records import averages_alone, find_bodies, find_writes, record, storage
from fzero.program.refusals import describe_kind
from fzero.ranks.exchanges import AllToAll, Rank, Steps


def has_foreign(program: Program) -> bool:
    """Whether a program, or the body of a loop of it, calls an operation from outside of fzero."""
    return any(map(is_foreign, program.graph.nodes)) or any(map(has_foreign, find_bodies(program.graph)))


def is_foreign(node: Node) -> bool:
    """Whether a node calls an operation from outside of fzero."""
    return node.op == "call_function" and record(node).is_foreign


def hold(program: Program, node: Node, rank: Rank, run: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """`run`, which performs a node of this kind on one rank, and raises where it does not do what the record says.

    Compared are the results' structure, shape, dtype, device, strides and memory, the operands that it writes into, the
    span of a view, and the exchanges: the collective, its axis, dtype and bytes. Ranks also tell each other the splits
    of each all-to-all.

    Raises:
        FzeroError: naming the operation, the field of its record, the node, the rank, and both values. For any other
            error of `run`, with its words.
    """
    moves = record(node).moves

    def call(*args: Any, **kwargs: Any) -> Any:
        claim = _Claim(program, node, rank, kind, args, kwargs)
        with claim:
            result = run(*args, **kwargs)
        if isinstance(result, GeneratorType):
            raise claim.refuse("moves lists no exchange, and perform gives a generator of exchanges", "give moves=")
        return claim.check_result(result)

    def exchange(*args: Any, **kwargs: Any) -> Steps:
        claim = _Claim(program, node, rank, kind, args, kwargs)
        with claim:
            steps = run(*args, **kwargs)
        if not isinstance(steps, GeneratorType):
            problem = f"moves lists exchanges, and perform gives a {type(steps).__name__} at once"
            raise claim.refuse(problem, "let perform return a generator that yields exchanges, or give no moves")
        answer = None
        while True:
            with claim:
                try:
                    asked = steps.send(answer)
                except StopIteration as end:
                    result = end.value
                    break
            claim.moves.check(asked)
            if isinstance(asked, AllToAll):
                yield from claim.moves.check_splits(asked)
            answer = yield asked
        claim.moves.check_end()
        return claim.check_result(result)

    return call if moves is None else exchange


def check_alike(program: Program, node: Node, kind: Kind, results: Sequence[Any]) -> None:
    """Refuse the results of all virtual ranks where two of them differ along an axis along which the node's kind says
    that they are the same. Buffers, and results whose shape differs between ranks, are left out.

    Raises:
        FzeroError: naming the operation, the axis, both ranks and both values.
    """
    if isinstance(results[0], (list, tuple)):
        of = kind if isinstance(kind, list) else [kind] * len(results[0])
        for position, each in enumerate(of):
            check_alike(program, node, each, [values[position] for values in results])
        return
    if not isinstance(kind, (Slice, frozenset)) or (isinstance(kind, frozenset) and RAGGED in kind):
        return
    differing = axes_of(program, kind)
    for axis in program.mesh.names:
        for row in program.mesh.rows(axis) if axis not in differing else ():
            for other in row[1:]:
                a, b = results[row[0]], results[other]
                if isinstance(a, Tensor) and not _is_elsewhere(a) and not has_equal_bits(a, b):
                    says = f"kind says {describe_kind(program, kind)}, the same along {axis!r}"
                    gives = f"perform gives {format_values(a)} on rank {row[0]} and {format_values(b)} on rank {other}"
                    where = f"operation {record(node).name!r}"
                    way_out = "give a kind that differs along the axis, or make the value the same on its ranks"
                    raise FzeroError(where, f"{says}, and {gives}, in {node.name}", way_out)


class Operand(NamedTuple):
    """A tensor that a node takes: the node that made it, its fake value, and its value."""

    node: Node
    fake: Tensor
    value: Tensor


class _Claim:
    """One call of an operation, and what the operation's record says of the call. In a `with` of it stands what the
    operation does by itself, between two exchanges."""

    def __init__(
        self, program: Program, node: Node, rank: Rank, kind: Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._program, self._node, self._rank, self._kind = program, node, rank, kind
        self._operation = record(node)
        self._operands = pair_arguments(node, args, kwargs)
        written = {_address(x.value) for x in self._operands if x.node in find_writes(node)}
        self._kept = [x for x in self._operands if _address(x.value) not in written and not _is_elsewhere(x.value)]
        self._before: list[tuple[int, Tensor]] = []
        self.moves = Moves(program, node, self.refuse)

    def refuse(self, problem: str, way_out: str) -> FzeroError:
        where = f"in {self._node.name} on rank {self._rank.number}"
        return FzeroError(f"operation {self._operation.name!r}", f"{problem}, {where}", way_out)

    def _disagree(self, field: str, says: str, does: str) -> FzeroError:
        return self.refuse(f"{field} {says}, and perform {does}", f"make perform and {field} agree")

    # what it does by itself

    def __enter__(self) -> None:
        self._before = [(version_of(x.value), copy_bytes(x.value)) for x in self._kept]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        before, self._before = self._before, []
        if isinstance(error, FzeroError) or (error is not None and not isinstance(error, Exception)):
            return
        if error is not None:
            problem = f"perform raises {type(error).__name__}: {_first_line(error)}"
            sizes = ", ".join(_describe(x.value) for x in self._operands)
            raise self.refuse(f"{problem}, of {sizes or 'no tensors'}", "see the error above") from error
        for operand, (version, old) in zip(self._kept, before):
            if version_of(operand.value) != version or not torch.equal(copy_bytes(operand.value), old):
                named = [x.name for x in find_writes(self._node)]
                raise self._disagree("writes", f"names {named}", f"writes into {operand.node.name}")

    # what it returns

    def check_result(self, result: Any) -> Any:
        """Refuse a result that the record does not describe. Returns `result`."""
        claimed, kinds = self._node.meta["val"], self._kind
        is_scatter = self._operation.starts == "scattered"
        if is_scatter and isinstance(result, list) and averages_alone(self._program, self._node):
            return result
        if isinstance(claimed, Tensor) != isinstance(result, Tensor) or (
            not isinstance(claimed, Tensor) and not (isinstance(result, (list, tuple)) and len(result) == len(claimed))
        ):
            raise self._disagree("fake", f"gives {_describe(claimed)}", f"gives {_describe(result)}")
        here = self._fake_here()
        each = [(claimed, result, kinds, here)]
        if not isinstance(claimed, Tensor):
            of = kinds if isinstance(kinds, list) else [kinds] * len(result)
            each = list(zip(claimed, result, of, here if here is not None else [None] * len(result)))
        made: list[tuple[Tensor, Tensor]] = []
        for fake, value, kind, mine in each:
            if not isinstance(fake, Tensor):
                continue
            if not isinstance(value, Tensor):
                raise self._disagree("fake", f"gives {_describe(fake)}", f"gives {_describe(value)}")
            self._check_form(fake, value, kind, mine)
            self._check_memory(fake, value, made)
            made.append((fake, value))
        self._check_span(result)
        return result

    def _check_form(self, fake: Tensor, value: Tensor, kind: Kind, mine: Tensor | None) -> None:
        shape, field, says = tuple(fake.shape), "fake", "gives"
        if isinstance(kind, Slice):
            field, says = "kind", f"says {describe_kind(self._program, kind)}, here"
            layout = self._program.layouts[kind.bucket]
            shape = (len(layout.part(kind.leaf, layout.rank_of(self._rank))),)
        elif isinstance(kind, frozenset) and RAGGED in kind and self._rank.rank != RANK:
            shape = tuple(value.shape if mine is None else mine.shape)
        strides = tuple((fake if mine is None else mine).stride())
        dtypes = [name_dtype(x.dtype) for x in (fake, value)]
        places = [x.device.type for x in (fake, value)]
        if tuple(value.shape) != shape:
            raise self._disagree(field, f"{says} the shape {list(shape)}", f"gives {list(value.shape)}")
        if dtypes[0] != dtypes[1]:
            raise self._disagree("fake", f"gives the dtype {dtypes[0]}", f"gives {dtypes[1]}")
        if places[0] != places[1]:
            raise self._disagree("fake", f"gives a tensor on {places[0]}", f"gives one on {places[1]}")
        steps = [(a, b) for a, b, size in zip(strides, value.stride(), value.shape) if size > 1]
        if value.numel() and any(a != b for a, b in steps) and not _is_elsewhere(value):
            raise self._disagree("fake", f"gives the strides {list(strides)}", f"gives {list(value.stride())}")

    def _check_memory(self, fake: Tensor, value: Tensor, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse a result in memory of an operand, or of another result, of which the fake result has none, and one in
        memory of its own where the fake result is a view."""
        if not value.numel() or _is_elsewhere(value) or self._is_alone():
            return
        nodes = [x for x in self._node.all_input_nodes if storage(x) == storage_key(fake)]
        claimed = " or ".join(x.name for x in nodes)
        if isinstance(self._node.meta["val"], Tensor) and self._operation.shares(self._node) != bool(nodes):
            says = "says that the result has memory of its own" if nodes else "says that the result is a view"
            gives = f"a view of {claimed}" if nodes else "new memory"
            raise self.refuse(f"shares {says}, and fake gives {gives}", "make shares and fake agree")
        lies = [x.node for x in self._operands if _overlaps(x.value, value)]
        if lies and not nodes:
            does = f"gives memory of {' or '.join(dict.fromkeys(x.name for x in lies))}"
            raise self._disagree("fake", "gives new memory", does)
        is_copied = self._operation.span is not None and self._span() is None  # a view of several pieces
        if any(x.node in nodes for x in self._operands) and not is_copied and not set(lies) & set(nodes):
            raise self._disagree("fake", f"gives memory of {claimed}", "gives other memory")
        for other, earlier in made:
            if storage_key(other) != storage_key(fake) and _overlaps(earlier, value):
                raise self._disagree("fake", "gives results in memory of their own", "gives two in one memory")

    def _is_alone(self) -> bool:
        """Whether the rank exchanges with nobody: it may then get the memory that it sends."""
        return self._operation.moves is not None and self.moves.is_empty

    def _span(self) -> range | None:
        return self._operation.span(self._program, self._node, self._rank) if self._operation.span else None

    def _check_span(self, result: Any) -> None:
        """Refuse a view that is not what `span` says: generated code takes `span`, and does not perform."""
        span = self._span()
        if span is None:
            return
        base = self._operands[0].value
        start = (result.data_ptr() - base.data_ptr()) // base.element_size()
        does = range(start, start + result.numel())
        if does != span and (does or span):
            raise self._disagree("span", f"gives elements {_format(span)}", f"gives elements {_format(does)}")

    def _fake_here(self) -> Any:
        """The fake result for this rank's operands, which may differ in size from rank 0's; None where the record does
        not know it."""
        if self._rank.rank == RANK or all(tuple(x.fake.shape) == tuple(x.value.shape) for x in self._operands):
            return None

        def make(node: Node) -> Any:
            made = [_make_like(x.value) for x in self._operands if x.node is node]
            return made[0] if isinstance(node.meta["val"], Tensor) else made

        with self._program.fake_mode:
            try:
                args, kwargs = fx.map_arg((self._node.args, dict(self._node.kwargs)), make)
                here = self._operation.fake(*args, **kwargs)
            except Exception:  # what waits takes no tensor, and sizes of rank 0 may stand among the arguments
                return None
        claimed = self._node.meta["val"]
        pairs = [(claimed, here)] if isinstance(claimed, Tensor) else list(zip(claimed, here))
        known = [b if tuple(a.shape) != tuple(b.shape) else None for a, b in pairs if isinstance(a, Tensor)]
        return (known[0] if isinstance(claimed, Tensor) else known) if len(known) == len(pairs) else None


def pair_arguments(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Operand]:
    """The tensors that a call of a node is given, in order, with the nodes that made them."""
    return [*_pair(node.args, args), *_pair(dict(node.kwargs), kwargs)]


def _make_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _pair(node_args: Any, given: Any) -> Iterator[Operand]:
    """The tensors among the arguments of a call, with the nodes that stand for them."""
    if isinstance(node_args, fx.Node):
        yield from _pair_values(node_args, node_args.meta.get("val"), given)
    elif isinstance(node_args, (list, tuple)) and isinstance(given, (list, tuple)):
        for claimed, value in zip(node_args, given):
            yield from _pair(claimed, value)
    elif isinstance(node_args, dict):
        for key, claimed in node_args.items():
            yield from _pair(claimed, given[key])


def _pair_values(node: Node, fake: Any, value: Any) -> Iterator[Operand]:
    if isinstance(fake, Tensor) and isinstance(value, Tensor):
        yield Operand(node, fake, value)
    elif isinstance(fake, (list, tuple)) and isinstance(value, (list, tuple)):
        for a, b in zip(fake, value):
            yield from _pair_values(node, a, b)


def _is_elsewhere(x: Tensor) -> bool:
    """Whether a tensor has no memory: one on a disk."""
    return isinstance(x, OnDisk)


def _address(x: Tensor) -> Any:
    return None if _is_elsewhere(x) else x.untyped_storage().data_ptr()


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    if _is_elsewhere(a) or not a.numel():
        return False
    x, y = a.untyped_storage(), b.untyped_storage()
    return x.data_ptr() < y.data_ptr() + y.nbytes() and y.data_ptr() < x.data_ptr() + x.nbytes()


def _format(span: range) -> str:
    return f"{span.start} to {span.stop}"


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return describe_form(x)
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_describe, x))}]"
    return "nothing" if x is None else f"a {type(x).__name__}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
