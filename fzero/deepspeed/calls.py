"""Calls: the calls of an engine whose outputs have a gradient (`fzero.training.outputs`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.training.outputs import Cotangents, Surroundings, attach

Pull = Callable[["Call", Cotangents], list[Tensor]]
"""(call, gradients of its outputs) -> the gradients of those arguments that require one."""


class Inputs(NamedTuple):
    """The arguments of a call. `wanted` are the positions among their leaves of tensors that require a gradient."""

    leaves: list[Any]
    treedef: Any
    wanted: tuple[int, ...]

    @classmethod
    def of(cls, args: dict[str, Any], kwargs: dict[str, Any]) -> Inputs:
        """The arguments of a call: those by position, with their names, and the others.

        Raises:
            FzeroError: for a 0-d tensor that requires a gradient.
        """
        leaves, treedef = tree.flatten((args, kwargs))
        wanted = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad)
        for i in wanted:
            if not leaves[i].ndim:
                where = f"argument {tree.dotted(tree.keys(treedef)[i][1:])}"
                raise FzeroError(where, "is one number that requires a gradient", "give it a dimension for examples")
        return cls(leaves, treedef, wanted)

    def count_rows(self) -> int | None:
        """The first dimension of the first tensor that has one: most often the number of examples."""
        return next((len(x) for x in self.leaves if isinstance(x, Tensor) and x.ndim), None)

    def detach(self) -> Any:
        """`(args, kwargs)` without gradients."""
        return tree.unflatten(self.treedef, [_detach(x) for x in self.leaves])

    def separate(self) -> tuple[dict[str, Tensor], Any]:
        """`(inputs, (args, kwargs))`: the tensors that get a gradient, by position, and the arguments with 0 in their
        places."""
        inputs = {str(i): _detach(self.leaves[i]) for i in self.wanted}
        rest = [0 if i in self.wanted else _detach(x) for i, x in enumerate(self.leaves)]
        return inputs, tree.unflatten(self.treedef, rest)


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


class Call:
    """A call of an engine in training. `pull` computes the gradients of its arguments, and adds those of parameters to
    the sums of the engine."""

    def __init__(self, engine: Any, inputs: Inputs, pull: Pull) -> None:
        self.engine, self.inputs, self._pull = engine, inputs, pull
        self._is_closed = False
        self.params, self.buffers = engine.state.params, engine.state.buffers  # those that the outputs come from
        self._surroundings = Surroundings.take()
        self.factor: float | None = None  # of the gradients of parameters, while `engine.backward` runs

    def attach(self, output: Any) -> Any:
        """The output of the call, with a gradient that torch follows."""
        return attach(self, output, [self.inputs.leaves[i] for i in self.inputs.wanted])

    def pull(self, cotangents: Cotangents) -> list[Tensor]:
        if self._is_closed:
            problem = "the gradients of this call are taken already"
            way_out = "call engine(...) again for each backward, or give retain_graph=True to the first one"
            raise FzeroError("engine.backward", problem, way_out)
        return self._pull(self, cotangents)

    def surround(self) -> AbstractContextManager[None]:
        """A context with the random state and the autocast of the call, in which its forward pass runs again."""
        return self._surroundings.restore()

    def close(self) -> None:
        """Forget the arguments: the gradients of the call are taken."""
        self.inputs, self._is_closed = Inputs.of({}, {}), True


def find_calls(loss: Tensor) -> list[Call]:
    """The calls of engines whose outputs a loss is computed from, through other calls too."""
    found: list[Call] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, Call):
            found.append(call)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
