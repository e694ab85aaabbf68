"""Open programs: programs with open sizes (`fzero.base.symbols`), and the programs of given sizes that they stand for.

In an open program numbers among the arguments of nodes, and sizes of fake values, are computed from symbols. Costs are
those of the sizes in `Open.reference`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.bits import has_equal_bits
from fzero.base.errors import FzeroError
from fzero.base.formulas import compile_formulas
from fzero.base.symbols import Symbols, adds_floats, is_open, key_of
from fzero.base.torch_private import pytree_leaves, storage_key
from fzero.base.torch_private_functions import copy_graph
from fzero.base.torch_private_traces import has_open_sizes, has_plain_form, make_fake
from fzero.program.operation import Node
from fzero.program.records import body_of, find_loops

if TYPE_CHECKING:
    from fzero.program.program import Program
    from fzero.program.signature import Result


@dataclass(frozen=True)
class Open:
    """The symbols of an open program, and the sizes by whose costs passes schedule it."""

    symbols: Symbols
    reference: tuple[int, ...]
    known: _Known = field(default_factory=lambda: _Known({}, {}, _Filling([], {}, {})), compare=False, repr=False)


class _Filling(NamedTuple):
    """What takes the place of open sizes: numbers by position, memory by its key, values by the `id` of open ones."""

    numbers: Sequence[Any]
    memory: dict[int, torch.UntypedStorage]
    values: dict[int, Any]


class _Known(NamedTuple):
    """What programs of one trace have in common, which passes fill one after the other: the positions of numbers by
    their keys, the forms of values, beside these, by their `id`, and the filling of the reference."""

    keys: dict[Any, Number]
    forms: dict[int, tuple[Any, Any]]
    filling: _Filling


class Number(int):
    """The position of a number that is computed from sizes."""


class ValueForm(NamedTuple):
    """The sizes of a fake value and its memory, where some of these are computed from sizes. Values of one `memory` lie
    in one memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    memory: int
    nbytes: int


@dataclass(frozen=True)
class Template:
    """The program of the sizes `reference`, and where numbers that are computed from sizes stand in it.

    `formulas` are those numbers by position, of sizes with these `names`. Of nodes with such numbers `arguments` has
    the arguments, with positions in their places and without a loop's body, and `values` the forms of values; `results`
    has constants, by the position of the result. `bodies` has the template of each loop's body, with the numbers of the
    whole program.
    `opened` is the open program of which the template was made, where it was made of one.
    """

    program: Program
    names: tuple[str, ...]
    reference: tuple[int, ...]
    formulas: tuple[str, ...]
    arguments: dict[Node, Any]
    values: dict[Node, Any]
    results: dict[int, Any]
    bodies: dict[Node, Template]
    opened: Program | None = None

    @cached_property
    def evaluate(self) -> Callable[[Sequence[int]], Sequence[Any]]:
        """A function of sizes that returns the numbers by position."""
        return compile_formulas(self.names, self.formulas)

    def is_open(self, node: Node) -> bool:
        """Whether a node's arguments or value, or an operand's value, are computed from sizes."""
        return node in self.arguments or any(x in self.values for x in (node, *node.all_input_nodes))

    def fill(self, sizes: Sequence[int]) -> Program:
        """The program of these sizes, which fulfil the conditions of the symbols."""
        filled = fill_readings(self._fill(_Filling(self.evaluate(sizes), {}, {})), sizes)
        if not filled.remarks or tuple(sizes) == self.reference:
            return filled
        chosen_for = f"chosen at another size, {list(self.reference)} where this is {list(sizes)}:"
        return replace(filled, remarks=(chosen_for, *filled.remarks))

    def _fill(self, to: _Filling) -> Program:
        graph = copy_graph(self.program.graph, partial(self._fill_node, to))
        return replace(self.program, graph=graph, results=self._fill_results(to.numbers), open=None)

    def _fill_node(self, to: _Filling, node: Node, given: Any) -> Any:
        args, kwargs, meta = given
        if node in self.arguments:
            args, kwargs = fill_numbers(self.arguments[node], to.numbers.__getitem__)
        if node in self.bodies:
            args = (self.bodies[node]._fill(to), *args[1:])
        if node in self.values:
            value = meta["val"]
            if id(value) not in to.values:
                to.values[id(value)] = _make_value(self.values[node], value, to)
            meta = {**meta, "val": to.values[id(value)]}
        return args, kwargs, meta

    def fill_node(self, node: Node, numbers: Sequence[Any]) -> Node:
        """A node of the program of these numbers, in a graph of its operands, itself and its users: all that an
        operation is bound by."""
        graph, copies, to = fx.Graph(), dict[Node, Node](), _Filling(numbers, {}, {})
        whole = dict.fromkeys((*node.all_input_nodes, node, *node.users))
        around = dict.fromkeys(x for each in whole for x in (*each.all_input_nodes, each))
        for each in sorted(around):
            args, kwargs, meta = self._fill_node(to, each, (each.args, each.kwargs, each.meta))
            if each in whole:
                args, kwargs = fx.map_arg((args, kwargs), copies.__getitem__)
                copies[each] = graph.create_node(each.op, each.target, args, kwargs, each.name)
            else:
                copies[each] = graph.placeholder(each.name)
            copies[each].meta.update(meta)
        return copies[node]

    def fill_results(self, sizes: Sequence[int]) -> tuple[Result, ...]:
        """The results of the program of these sizes, whose constants may be computed from sizes."""
        return self._fill_results(self.evaluate(sizes))

    def _fill_results(self, numbers: Sequence[Any]) -> tuple[Result, ...]:
        results = list(self.program.results)
        for i, constant in self.results.items():
            results[i] = replace(results[i], constant=fill_numbers(constant, numbers.__getitem__))
        return tuple(results)

    def _move(self, program: Program) -> Template:
        """The template whose nodes are those of `program`, a copy of its own program."""
        to = dict(zip(self.program.graph.nodes, program.graph.nodes))
        found = find_loops(program.graph)
        bodies = {to[node]: body._move(found[to[node]]) for node, body in self.bodies.items()}
        arguments = {to[node]: fx.map_arg(given, to.__getitem__) for node, given in self.arguments.items()}
        values = {to[node]: form for node, form in self.values.items()}
        return replace(self, program=program, arguments=arguments, values=values, bodies=bodies)


def make_template(opened: Program) -> Template:
    """The template of an open program.

    Raises:
        FzeroError: for an open value that is more than its form, or for a number that is computed from several floats.
    """
    assert opened.open is not None
    symbols, reference, known = opened.open.symbols, opened.open.reference, opened.open.known
    made = _list_numbers(opened, known)
    made = replace(made, names=symbols.names, reference=reference, formulas=tuple(symbols.write_keys(known.keys)))
    filled = made._fill(known.filling._replace(numbers=made.evaluate(reference)))
    return replace(made._move(fill_readings(filled, reference)), opened=opened)


def fill_readings(program: Program, sizes: Sequence[int]) -> Program:
    """A program with its readings of these sizes."""
    return replace(program, readings=tuple(x.fill(sizes) for x in program.readings)) if program.readings else program


def _list_numbers(program: Program, known: _Known) -> Template:
    """A template on the nodes of an open program, with the numbers that are known and further ones."""

    def number(x: Any) -> Number:
        if adds_floats(x.node.expr):
            raise FzeroError(program.name, f"computes {x.node.expr}, which rounds", "it is traced again")
        return known.keys.setdefault(key_of(x), Number(len(known.keys)))

    def find_form(value: Any) -> Any:
        """The form of a fake value, or of each of a list; None where nothing of it is open."""
        if isinstance(value, (list, tuple)):
            forms = [find_form(x) for x in value]
            return None if all(x is None for x in forms) else forms
        if not isinstance(value, Tensor):
            return None
        nbytes = value.untyped_storage().nbytes()
        if not has_open_sizes(value) and not is_open(nbytes):
            return None
        shape, stride, start, size = map_numbers(
            (tuple(value.shape), value.stride(), value.storage_offset(), nbytes), number
        )
        if not has_plain_form(value):
            raise FzeroError(program.name, "has an open value that is more than its form", "it is traced again")
        return ValueForm(shape, stride, start, storage_key(value), size)

    bodies = {node: _list_numbers(body, known) for node, body in find_loops(program.graph).items()}
    arguments, values = dict[Node, Any](), dict[Node, Any]()
    for node in program.graph.nodes:
        given, value = (node.args, node.kwargs), node.meta.get("val")
        _, form = known.forms.get(id(value)) or known.forms.setdefault(id(value), (value, find_form(value)))
        numbered = map_numbers(given, number)
        if numbered is not given:
            arguments[node] = ((None, *numbered[0][1:]), numbered[1]) if node in bodies else numbered
        if form is not None:
            values[node] = form
    constants = ((i, x.constant, map_numbers(x.constant, number)) for i, x in enumerate(program.results))
    results = {i: numbered for i, constant, numbered in constants if numbered is not constant}
    return Template(program, (), (), (), arguments, values, results, bodies)


def fill_reference(program: Program) -> Program:
    """The program of the sizes by which an open one is scheduled; the program itself where no size is open."""
    return program if program.open is None else make_template(program).program


def fill_numbers(given: Any, find: Callable[[int], Any]) -> Any:
    """Arguments of a template with the number at each position in its place."""
    return _map_leaves(given, lambda x: find(x) if type(x) is Number else x)


def _make_value(form: Any, like: Any, to: _Filling) -> Any:
    """The fake value of a form, of the dtype and device of `like`. Values of one memory lie in one memory again."""
    if form is None:
        return like
    if not isinstance(form, ValueForm):
        return type(like)(_make_value(*pair, to) for pair in zip(form, like))
    if type(form.nbytes) is not Number:  # a view of memory of a fixed size, in which other values may lie
        to.memory[form.memory] = like.untyped_storage()
    elif form.memory not in to.memory:
        to.memory[form.memory] = torch.UntypedStorage(to.numbers[form.nbytes], device="meta")
    shape, stride, start = fill_numbers((form.shape, form.stride, form.start), to.numbers.__getitem__)
    return make_fake(like, shape, stride, start, to.memory[form.memory])


def map_numbers(given: Any, number: Callable[[Any], Any]) -> Any:
    """`given` with each open number in it replaced; `given` itself where it has none."""
    return _map_leaves(given, lambda x: number(x) if is_open(x) else x) if _has_open(given) else given


def depends_on_sizes(node: Node) -> bool:
    """Whether a node computes with open sizes: it is such a number, has one among its arguments, or makes a tensor of
    an open shape, as `zeros_like` does."""
    values = pytree_leaves(node.meta.get("val"))
    is_made = any(has_open_sizes(x) if isinstance(x, Tensor) else is_open(x) for x in values)
    return is_made or _has_open(node.args) or _has_open(node.kwargs)


_CLOSED = frozenset((fx.Node, int, float, bool, str, type(None), torch.dtype, torch.device))


def _has_open(x: Any) -> bool:
    """Whether an open number is among the leaves of a structure."""
    if type(x) in _CLOSED:
        return False
    if isinstance(x, (tuple, list)):
        return any(map(_has_open, x))
    if isinstance(x, dict):
        return any(map(_has_open, x.values()))
    return any(map(_has_open, (x.start, x.stop, x.step))) if isinstance(x, slice) else is_open(x)


def _map_leaves(given: Any, change: Callable[[Any], Any]) -> Any:
    """`given` with each leaf of its tuples, lists, dicts and slices changed, but those of `_CLOSED` classes."""
    if type(given) in _CLOSED:
        return given
    if isinstance(given, (tuple, list)):
        items = [_map_leaves(x, change) for x in given]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    if isinstance(given, dict):
        return type(given)((key, _map_leaves(x, change)) for key, x in given.items())
    if isinstance(given, slice):
        return slice(*(_map_leaves(x, change) for x in (given.start, given.stop, given.step)))
    return change(given)


def pair_nodes(a: Program, b: Program) -> Iterator[tuple[Node, Node]]:
    """The nodes of two programs that differ in sizes, and those of their loops' bodies."""
    for node, same in zip(a.graph.nodes, b.graph.nodes):
        yield node, same
        body, body_of_same = body_of(node), body_of(same)
        if body is not None and body_of_same is not None:
            yield from pair_nodes(body, body_of_same)


def find_difference(a: Program, b: Program) -> str | None:
    """The first difference of two programs: of arguments, results, nodes and the forms of their values. None where they
    are equal. It does not matter where in its memory a batch lies: that differs between ranks, which decide alike."""
    for name in ("arguments", "out_tree", "layouts", "mesh", "pass_state", "noted", "remarks", "plan"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}: {getattr(a, name)} and {getattr(b, name)}"
    if _describe_results(a) != _describe_results(b):
        return "results"
    for mine, other in zip_longest(a.readings, b.readings):
        if None in (mine, other) or (mine.where, mine.sources, mine.count) != (other.where, other.sources, other.count):
            return f"readings {mine} and {other}"
        difference = find_difference(mine.program, other.program)
        if difference is not None:
            return f"what is read at {mine.where}: {difference}"
    constants = (a.constants.keys() ^ b.constants.keys()) or [
        name for name, x in a.constants.items() if not (x is b.constants[name] or has_equal_bits(x, b.constants[name]))
    ]
    if constants:
        return f"constants {sorted(constants)}"
    ours, theirs = list(a.graph.nodes), list(b.graph.nodes)
    memory = [_number_memory(program) for program in (a, b)]
    for left, right in zip(ours, theirs):
        mine, other = (_describe_node(node, seen) for node, seen in zip((left, right), memory))
        if mine != other:
            return f"{mine} and {other}"
    return None if len(ours) == len(theirs) else f"{len(ours)} and {len(theirs)} nodes"


def _describe_results(program: Program) -> list[Any]:
    """The results of a program. A constant may be anything, such as nan, which does not equal itself."""
    return [(replace(result, constant=None), repr(result.constant)) for result in program.results]


def _number_memory(program: Program) -> defaultdict[int, int]:
    """The key of memory -> a number, in the order in which they are asked for. Memory of batches has the number -1:
    whether batches are parts of one tensor is no part of a program."""
    given = zip(program.arguments, program.placeholders)
    batches = {storage_key(node.meta["val"]): -1 for argument, node in given if argument.bucket is None}
    return defaultdict(count().__next__, batches)


def _describe_node(node: Node, memory: defaultdict[int, int]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: f"%{x.name}")
    body, inside = body_of(node), None
    if body is not None:
        inside = [_describe_node(x, memory) for x in body.graph.nodes], body.arguments, _describe_results(body)
        args = args[1:]
    target = node.target if isinstance(node.target, str) else id(node.target)
    return node.name, node.op, target, inside, repr(args), repr(kwargs), _describe_value(node.meta.get("val"), memory)


def _describe_value(value: Any, memory: defaultdict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_describe_value(x, memory) for x in value]
    if not isinstance(value, Tensor):
        return value
    place = memory[storage_key(value)]
    where = () if place < 0 else (value.storage_offset(), value.untyped_storage().nbytes())
    steps = [step for size, step in zip(value.shape, value.stride()) if size != 1]  # a step of one place leads nowhere
    return list(value.shape), steps, value.dtype, value.device, place, *where
