"""Program: a flat graph of aten operations and communication, with what its arguments and results are."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.tree import TreeDef
from fzero.layout.layout import Layout, Leaf, Wire, wire
from fzero.program.comm import Comm, list_comm
from fzero.program.listing import list_program
from fzero.program.memory import Memory, measure_memory
from fzero.program.operation import Node
from fzero.program.rates import Rates, guess_rates
from fzero.program.records import record, shares_memory
from fzero.program.timeline import Costs, Timeline, cost_nodes, simulate_lanes
from fzero.program.work import find_device_type

RANK = 0
"""The rank whose slice sizes a graph shows. No node depends on these sizes: one program serves all ranks."""
_INDEX = re.compile(r"\b(cuda|xpu|mps|hpu):\d+")  # of a device


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its path among the step's arguments and, for state, its bucket and leaf; None for the batch.

    One that is `donated` is updated in place and gone for the caller.
    """

    path: str
    bucket: str | None = None
    leaf: int = 0
    donated: bool = False


@dataclass(frozen=True)
class Result:
    """A leaf of what the step returns: state (`bucket`, `leaf`), a tensor (`bucket` None), or a `constant`.

    `varies` names the mesh axes along which it differs between ranks, its slices apart.
    """

    path: str
    bucket: str | None = None
    leaf: int = 0
    constant: Any = None
    is_constant: bool = False
    varies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassState:
    """State that a pass has added to a step: an error-feedback buffer, a second copy.

    `path` names the state for the user, who holds and saves it; `bucket` and `leaf` say where it lies. It begins as
    `initial` everywhere.
    """

    path: str
    bucket: str
    leaf: int
    dtype: torch.dtype
    initial: float


@dataclass(frozen=True, repr=False)
class Program:
    """A step as one graph that every rank of `mesh` runs. Passes take a program and return another.

    `graph` is a `torch.fx.Graph` whose placeholders are `arguments` in order and whose output is a list of the
    tensors among `results`. `layouts` says what a bucket's name means in it. `measured` is how fast the machine is,
    where that is known. The last arguments and results are `pass_state`, which `out_tree` does not have.
    """

    name: str
    graph: fx.Graph
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    out_tree: TreeDef
    layouts: dict[str | None, Layout]
    constants: dict[str, Tensor]
    mesh: VirtualMesh
    fake_mode: Any
    measured: Rates | None = None
    pass_state: tuple[PassState, ...] = ()

    def copy(self) -> Program:
        """A program with a graph of its own, for a pass to change."""
        graph = fx.Graph()
        output = graph.graph_copy(self.graph, {}, return_output_node=True)
        assert output is not None  # every traced graph has an output
        graph.output(output[0]).meta = dict(output[1].meta)
        return replace(self, graph=graph)

    def __repr__(self) -> str:
        return f"Program({self.name} on {self.mesh}: {len(self.graph.nodes)} nodes, {len(self.arguments)} arguments)"

    @property
    def placeholders(self) -> list[Node]:
        """The nodes of `arguments`, in order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def tensor_results(self) -> list[Result]:
        """The results that the output node lists, in its order."""
        return [result for result in self.results if not result.is_constant]

    @property
    def output(self) -> Node:
        """The node whose first argument lists the results that are tensors."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def draws(self) -> bool:
        """Whether some node draws random numbers."""
        return any(node.op == "call_function" and record(node).draws for node in self.graph.nodes)

    def lines(self) -> list[str]:
        """What all ranks must have in common: arguments, buckets, constants and nodes, a line each. No local size is
        in it, nor which of its GPUs a rank uses."""
        values = [node.meta["val"] for node in self.placeholders]
        return [
            *(f"argument {given.path}: {self._described(given, x)}" for given, x in zip(self.arguments, values)),
            *(f"bucket {name}: {_shapes(layout)} on {layout.mesh}" for name, layout in self.layouts.items()),
            *(f"constant {name}: {_typed(value)} {_contents(value)}" for name, value in self.constants.items()),
            *(_INDEX.sub(r"\1", f"node {node.name}: {node.format_node()}") for node in self.graph.nodes),
        ]

    def _described(self, argument: Argument, value: Tensor) -> str:
        if argument.bucket is None:
            return _typed(value)
        shape = self.layouts[argument.bucket].leaves[argument.leaf].shape
        return f"{_typed(value, shape)} of {argument.bucket}"

    def comm(self) -> list[Comm]:
        """Every collective, in the order in which all ranks start them."""
        return list_comm(self)

    def memory(self) -> Memory:
        """Bytes of tensors that are alive on the rank that has most, arguments included, node by node."""
        return measure_memory(self)

    @property
    def rates(self) -> Rates:
        """How fast the machine is: as measured, or else a guess from the type of device."""
        return self.measured or guess_rates(find_device_type(self.graph))

    def costs(self) -> Costs:
        """Seconds of each node, and of the collectives that it starts, by `rates`."""
        return cost_nodes(self, self.rates)

    def timeline(self, rates: Rates | None = None) -> Timeline:
        """When a step computes and communicates, simulated before anything runs: by these rates, or the program's."""
        return simulate_lanes(self, rates or self.rates)

    def __str__(self) -> str:
        return list_program(self)

    def layout_of(self, node: Node) -> Layout:
        """The layout of the bucket that a node of `ops` names."""
        return self.layouts[node.args[1]]

    def wire_of(self, node: Node) -> Wire:
        """The buffer of the leaves that a node of `ops` names, in which they move together."""
        leaves = node.args[2]
        return wire(self.layouts[node.args[1]], (leaves,) if isinstance(leaves, int) else tuple(leaves))

    def path_of(self, value: Argument | Result) -> str:
        """A state value's path in the tree that was partitioned, else the value's own."""
        leaf = self.layouts[value.bucket].leaves[value.leaf].path if value.bucket is not None else ""
        return leaf or value.path

    def add_state(
        self, path: str, shape: Sequence[int], dtype: torch.dtype, *, initial: float = 0.0, whole: bool = False
    ) -> tuple[Program, Node]:
        """`(program, node)`: this program with one more state, and the node that has its value.

        Each rank holds one slice of `shape`, counted over all ranks, or with `whole` all of it. The step returns the
        state unchanged until `return_state` says otherwise. Users hold it: they give it to each call of the step, which
        returns the new one beside its results (`step.init_pass_state`).

        Raises:
            FzeroError: for a path that an argument has already.
        """
        if path in [argument.path for argument in self.arguments] or path in self.layouts:
            raise FzeroError(path, "the step has an argument of this name", "name a pass's state after the pass")
        leaf = Leaf(path, tuple(shape))
        layout = Layout(path, (leaf,), self.mesh, replicated=whole)
        held = tuple(shape) if whole else (len(layout.part(0, RANK)),)
        device = torch.device(find_device_type(self.graph))
        with self.graph.inserting_after(self.placeholders[-1]) if self.placeholders else nullcontext(), self.fake_mode:
            node = self.graph.placeholder(re.sub(r"\W", "_", path))
            node.meta["val"] = torch.empty(held, dtype=dtype, device=device)
        self.output.args = ([*self.output.args[0], node],)
        return replace(
            self,
            arguments=(*self.arguments, Argument(path, path, 0)),
            results=(*self.results, Result(path, path, 0)),
            layouts={**self.layouts, path: layout},
            pass_state=(*self.pass_state, PassState(path, path, 0, dtype, initial)),
        ), node

    def return_state(self, path: str, node: Node) -> None:
        """Let the step return this node's value as the new value of a state that a pass added."""
        paths = [result.path for result in self.tensor_results]
        returned = list(self.output.args[0])
        returned[paths.index(path, len(paths) - len(self.pass_state))] = node
        self.output.args = (returned,)

    def substitute(self, old: Node, new: Node) -> None:
        """Give every user of `old` the node `new`, and erase `old`; what shares its memory learns whose that now is."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self.refresh([new])

    def substitute_all(self, news: Mapping[Node, Node]) -> None:
        """`substitute` each key by its value, all at once: an operation may take a list of as many as there are."""
        for user in dict.fromkeys(user for old in news for user in old.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: news.get(node, node))
        for old in news:
            self.graph.erase_node(old)
        self.refresh(news.values())

    def refresh(self, nodes: Iterable[Node]) -> None:
        """Let what shares memory with nodes that it has been given in place of others learn whose that now is."""
        stale = list(nodes)
        while stale:
            for user in stale.pop().users:
                if shares_memory(user):
                    user.meta["val"] = self._fake(user.target, user.args, user.kwargs)
                    stale.append(user)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new node, at the graph's insert point, that knows its fake result."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._fake(target, args, kwargs)
        return node

    def _fake(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with self.fake_mode:
            return record(target).fake(*args, **kwargs)


def _typed(value: Tensor, shape: Sequence[int] | None = None) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape if shape is None else shape)}"


def _shapes(layout: Layout) -> list[list[int]]:
    return [list(leaf.shape) for leaf in layout.leaves]


def _contents(value: Tensor) -> str:
    """The elements of a tensor, a hash of their bytes where they are many."""
    flat = value.detach().cpu().reshape(-1).contiguous()
    if flat.numel() <= 16:
        return str(flat.tolist())
    return hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.nbytes)).hexdigest()[:16]
