"""Program: a flat graph of aten operations and communication, with a description of its arguments and results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.flags import Flag, MakeFlag
from fzero.base.mesh import VirtualMesh
from fzero.base.torch_private_functions import call_function, copy_graph, mute_fakes
from fzero.base.tree import TreeDef
from fzero.layout.layout import Layout
from fzero.layout.wires import LayoutTable
from fzero.program.comm import Comms
from fzero.program.copies import count_copies
from fzero.program.fakes import move_view, pair_memory, repeat_value
from fzero.program.largest import Alive, list_largest
from fzero.program.lines import format_contents, format_node, format_type, list_shapes
from fzero.program.listing import list_program
from fzero.program.memory import measure_memory
from fzero.program.open import Open, fill_reference, pair_nodes
from fzero.program.operation import Node
from fzero.program.peak import Memory
from fzero.program.plan import Plan
from fzero.program.rates import Rates, guess_rates
from fzero.program.readings import Reading
from fzero.program.records import comm_of, find_bodies, record, shares_memory
from fzero.program.refusals import refuse_emit
from fzero.program.signature import Argument, Result
from fzero.program.state_layouts import STEP_COUNT, Initial, PassState, lay_out_state
from fzero.program.timeline import Costs, Timeline, cost_nodes, simulate_timeline
from fzero.program.work import find_device_type

RANK = 0
"""The rank whose slice sizes a graph shows. No node depends on these sizes, so one program serves all ranks."""
_INDEX = re.compile(r":(?:(?<=\bcuda:)|(?<=\b(?:xpu|mps|hpu):))\d+")  # of a device; `re` looks for the ":" first


@dataclass(frozen=True, repr=False)
class Program(LayoutTable):
    """A step as one graph that every rank of `mesh` runs. Passes take a program and return another.

    * `graph` is a `torch.fx.Graph`. Its placeholders are `arguments`, in order. Its output is a list of the tensors
      among `results`, in order.
    * `model_axes` are the axes of the mesh along which ranks take the same batch.
    * `layouts` maps the bucket names that nodes use to layouts.
    * `constants` are the tensors that the step captured, by reference. `read` are captured tensors whose elements
      Python read while the step was traced: the program is right for these elements only.
    * `reduce_dtypes` has, by the path of a leaf, the dtype in which its gradients are averaged (`fzero.precision`).
    * `measured` are the rates of the machine, None where no one has measured them.
    * `plan` is what was decided about the program; None where passes of a user decide.
    * `noted` makes each flag that the step returns beside its results (`fzero.base.flags`). `out_tree` lacks
      these results.
    * `pass_state` is the state that passes added: the last arguments, and the last results, which `out_tree` lacks.
    * `remarks` are lines about the program, for its listing and its report.
    * `is_body` says that the program is what a loop runs once for each turn, and no step of its own.
    * `open` says which sizes are open, and None for a program of given sizes (`fzero.program.open`).
    * `readings` compute the last arguments from the others in front of each step (`fzero.program.readings`).
    * `is_spare`: nothing else holds the graph, which the pass that was given the program may change (`take`).
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
    plan: Plan | None = None
    noted: tuple[MakeFlag, ...] = ()
    pass_state: tuple[PassState, ...] = ()
    read: tuple[Tensor, ...] = ()
    reduce_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    is_body: bool = False
    model_axes: tuple[str, ...] = ()
    open: Open | None = None
    readings: tuple[Reading, ...] = ()
    is_spare: bool = False

    def copy(self) -> Program:
        """A copy of the program with a graph of its own, for a pass to change."""
        return replace(self, graph=copy_graph(self.graph), is_spare=False)

    def take(self) -> Program:
        """The program with a graph to change: that of a spare program itself, or else a copy. The given program is not
        used any more."""
        return replace(self, is_spare=False) if self.is_spare else self.copy()

    def begin_body(self, graph: fx.Graph) -> Program:
        """A program without arguments and results: `graph` becomes the body of one of this program's loops."""
        empty: Any = dict.fromkeys(("arguments", "results", "pass_state", "read", "readings", "remarks"), ())
        return replace(self, name="turn", graph=graph, constants={}, plan=None, is_body=True, is_spare=False, **empty)

    def __repr__(self) -> str:
        return f"Program({self.name} on {self.mesh}: {len(self.graph.nodes)} nodes, {len(self.arguments)} arguments)"

    @property
    def placeholders(self) -> list[Node]:
        """The nodes of `arguments`, in order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def tensor_results(self) -> list[Result]:
        """The results that are tensors, in the order of the output node's list."""
        return [result for result in self.results if not result.is_constant]

    @property
    def output(self) -> Node:
        """The output node. Its one argument is the list `returned`."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def returned(self) -> list[Node]:
        """The nodes of `tensor_results`, in order."""
        (returned,) = self.output.args
        return returned

    def find(self, target: Callable[..., Any]) -> list[Node]:
        """The nodes that call `target`, those in the bodies of loops included."""
        own = self.graph.find_nodes(op="call_function", target=target)
        return [*own, *(node for body in find_bodies(self.graph) for node in body.find(target))]

    @cached_property
    def flags(self) -> list[tuple[int, type[Flag]]]:
        """`(position, class)` of each argument that is the value of a flag."""
        return [(i, argument.flag) for i, argument in enumerate(self.arguments) if argument.flag is not None]

    @cached_property
    def seeds(self) -> list[int]:
        """The positions of the arguments that random draws follow from. Without any, draws follow from torch's
        generator."""
        return [i for i, argument in enumerate(self.arguments) if argument.role]

    @property
    def draws(self) -> bool:
        """Whether some node draws random numbers."""
        return any(node.op == "call_function" and record(node).draws for node in self.graph.nodes) or any(
            body.draws for body in find_bodies(self.graph)
        )

    def lines(self) -> list[str]:
        """What must be the same on all ranks for good: arguments, buckets and nodes, one line each.

        The sizes of slices and the index of a rank's GPU differ between ranks, and are left out.
        """
        values = [node.meta["val"] for node in self.placeholders]
        return [
            *(f"argument {given.path}: {self._describe(given, x)}" for given, x in zip(self.arguments, values)),
            *(f"bucket {name}: {list_shapes(layout)} on {layout.mesh}" for name, layout in self.layouts.items()),
            *(_INDEX.sub("", f"node {node.name}: {format_node(node)}") for node in self.graph.nodes),
            *(f"body {line}" for body in find_bodies(self.graph) for line in body.lines()),
        ]

    @property
    def captured(self) -> dict[str, Tensor]:
        """The tensors that the step captured, those that only readings take among them."""
        read = {f"{name} read at {x.where}": y for x in self.readings for name, y in x.program.constants.items()}
        return {**self.constants, **read}

    def constant_lines(self) -> list[str]:
        """What must be the same on all ranks at each call: the present contents of constants, one line each."""
        return [f"constant {name}: {format_type(x)} {format_contents(x)}" for name, x in self.captured.items()]

    def _describe(self, argument: Argument, value: Tensor) -> str:
        if argument.bucket is None:
            return format_type(value)
        shape = self.layouts[argument.bucket].leaves[argument.leaf].shape
        where = "" if argument.place is None else f" in {argument.place}"
        return f"{format_type(value, shape)} of {argument.bucket}{where}"

    def comm(self) -> Comms:
        """All collectives, in the order in which every rank starts them. Prints as a table."""
        return Comms(entry for node in self.graph.nodes for entry in comm_of(self, node))

    def copies(self, rank: int = RANK) -> dict[str, int]:
        """Operation -> the bytes that a rank copies by it in a step: "read" and "write" of files, "to_host" and
        "to_device". `rank` is a position along the shard axis."""
        return dict(count_copies(self, rank))

    def memory(self) -> Memory:
        """Bytes of live tensors after each node, arguments included, on the rank whose peak is largest."""
        return measure_memory(self)

    def largest(self, count: int = 5) -> list[Alive]:
        """The largest values that are alive at the peak, largest first: `nbytes`, and `what` with the user's line."""
        return list_largest(self, count)

    @property
    def rates(self) -> Rates:
        """The rates of the machine: measured, or else guessed from the type of device."""
        return self.measured or guess_rates(find_device_type(self.graph))

    def costs(self) -> Costs:
        """The seconds of each node, and of the collectives that it starts, by `rates`."""
        filled = fill_reference(self)
        costs = cost_nodes(filled, self.rates)
        return costs if filled is self else {node: costs[same] for node, same in pair_nodes(self, filled)}

    def timeline(self, rates: Rates | None = None) -> Timeline:
        """When a step computes and communicates, simulated before anything runs, by `rates` or else `self.rates`."""
        return simulate_timeline(self, cost_nodes(self, rates or self.rates))

    def __str__(self) -> str:
        return list_program(self)

    def path_of(self, value: Argument | Result) -> str:
        """For state, the path of its leaf in the tree that was partitioned; for other values their own path."""
        leaf = self.layouts[value.bucket].leaves[value.leaf].path if value.bucket is not None else ""
        return leaf or value.path

    def add_state(
        self,
        path: str,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        like: str | Node | None = None,
        initial: Initial = 0.0,
        replicated: bool = False,
        differs: Sequence[str] = (),
    ) -> tuple[Program, Node]:
        """`(program, node)`: a program with one more state, and the node of its value. Changes this program's graph.

        `shape` is the shape over all ranks. Each rank holds one slice of it, or with `replicated` all of it. State that
        is `like` a leaf, given by path or node, lies in slices as the leaf does, and has its dtype unless one is given.
        Along the axes of `differs` each rank has its own; with the shard axis among them, a whole value, flat.
        `initial` is a number, or a function of the shape and a generator, whose seed follows from `path`.

        The step returns the state unchanged, unless the pass calls `return_state`. The user holds the state: the first
        value comes from `step.init_pass_state`, every call takes the state and returns the new one beside its results.

        Raises:
            FzeroError: for a path that an argument has already; as `lay_out_state`.
        """
        if path in [argument.path for argument in self.arguments] or path in self.layouts:
            raise FzeroError(path, "the step has an argument of this name", "name a pass's state after the pass")
        layout, leaf, whole, local, of_leaf, own = lay_out_state(self, path, shape, like, replicated, tuple(differs))
        dtype = dtype or of_leaf
        with self.graph.inserting_after(self.placeholders[-1]) if self.placeholders else nullcontext(), self.fake_mode:
            node = self.graph.placeholder(re.sub(r"\W", "_", path))
            node.meta["val"] = torch.empty(local, dtype=dtype, device=find_device_type(self.graph))
        self.output.args = ([*self.returned, node],)
        return replace(
            self,
            arguments=(*self.arguments, Argument(path, layout.bucket, leaf, own=own)),
            results=(*self.results, Result(path, layout.bucket, leaf, own=own)),
            layouts={**self.layouts, layout.bucket: layout},
            pass_state=(*self.pass_state, PassState(path, layout.bucket, leaf, dtype, initial, whole)),
        ), node

    def step_count(self) -> tuple[Program, Node]:
        """`(program, node)`: the number of steps before this one, 0-d int64, which is state as that of `add_state`.
        All passes of a step share it."""
        paths = [argument.path for argument in self.arguments]
        if STEP_COUNT in paths:
            return self, self.placeholders[paths.index(STEP_COUNT)]
        program, node = self.add_state(STEP_COUNT, (), torch.int64, replicated=True)
        with program.graph.inserting_before(program.output):
            program.return_state(STEP_COUNT, program.emit(torch.ops.aten.add.Scalar, node, 1))
        return program, node

    def return_state(self, path: str, node: Node) -> None:
        """Let the step return the value of `node` as the new value of the state `path`, which a pass added."""
        paths = [result.path for result in self.tensor_results]
        returned = list(self.returned)
        returned[paths.index(path, len(paths) - len(self.pass_state))] = node  # a result of the step may have the path
        self.output.args = (returned,)

    def substitute(self, old: Node, new: Node) -> None:
        """Replace `old` by `new` in all its users, and erase `old`. Views of `old` become views of `new`."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self.refresh([new], pair_memory({old: new}))

    def substitute_all(self, news: Mapping[Node, Node]) -> None:
        """`substitute` each key by its value, all at once: one by one would rewrite a list of n operands n times."""
        for user in dict.fromkeys(user for old in news for user in old.users):
            user.args = fx.map_arg(user.args, lambda node: news.get(node, node))
            if user.kwargs:
                user.kwargs = fx.map_arg(user.kwargs, lambda node: news.get(node, node))
        for old in news:
            self.graph.erase_node(old)
        self.refresh(news.values(), pair_memory(news))

    def refresh(self, nodes: Iterable[Node], memory: Mapping[int, torch.UntypedStorage] | None = None) -> None:
        """Compute the fake values of all views of these nodes again, so that a view has the memory of its operand.

        `storage` and `verify` compare memory. Call this where nodes took the place of others, with their `pair_memory`.
        """
        found, views = list(nodes), set[Node]()
        for node in found:  # the list grows while it is read
            new = [user for user in node.users if user not in views and shares_memory(user)]
            views.update(new)
            found += new
        for view in sorted(views):  # operands first
            value = move_view(view, memory or {})
            view.meta["val"] = self._fake(view.target, view.args, view.kwargs) if value is None else value

    def refresh_with(self, nodes: Iterable[Node]) -> None:
        """`refresh`, of nodes whose arguments have changed and whose own fake values are therefore stale too."""
        changed = list(nodes)
        for node in changed:
            node.meta["val"] = self._fake(node.target, node.args, node.kwargs)
        self.refresh(changed)

    def emit(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Node:
        """A new node at the graph's insert point, with its fake result. `target` is an operation of torch or `ops`."""
        try:
            value = self._fake(target, args, kwargs)
        except FzeroError:
            raise
        except Exception as error:
            raise refuse_emit(target, args, kwargs, error) from error
        return self.emit_as(value, target, *args, **kwargs)

    def repeat(self, node: Node, find: Callable[[Node], Node]) -> Node:
        """A new node that calls what another `node` calls, with `find(x)` in the place of each operand x, at the
        graph's insert point and with its fake result."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), find)
        repeated = call_function(self.graph, node.target, args, kwargs)
        value = repeat_value(node, repeated)
        repeated.meta["val"] = self._fake(node.target, args, kwargs) if value is None else value
        return repeated

    def emit_as(self, value: Any, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Node:
        """A new node, as `emit`, whose fake result is known: that of nodes whose place the new one takes."""
        node = call_function(self.graph, target, args, kwargs)
        node.meta["val"] = value
        return node

    def _fake(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_inference = False

        def find_value(node: Node) -> Any:
            nonlocal is_inference
            value = node.meta["val"]
            is_inference = is_inference or (isinstance(value, Tensor) and value.is_inference())
            return value

        known = record(target)
        args, kwargs = fx.map_arg((args, kwargs), find_value)
        if known.names == "position" and not (known.is_foreign or is_inference):  # a view, which needs no mode
            return known.fake(*args, **kwargs)
        # Outside of inference mode torch refuses writes into what was made in it, and passes write there.
        with self.fake_mode, mute_fakes(), torch.inference_mode() if is_inference else nullcontext():
            return known.fake(*args, **kwargs)
