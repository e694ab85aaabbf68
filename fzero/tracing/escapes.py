"""Escapes: values of a trace that would outlive it, and objects that a trace cannot see into.

A traced value has no data: it stands for a value of the program. Only the results of a step leave the program, and only
trees are looked into. So these checks refuse

* an argument or a result that holds tensors where no tree is: an unregistered cache, a generator,
* a traced value that the step stored: in a variable, an attribute, a list, the `.grad` of a parameter,
* a cache of transformers that the step was given and filled, and did not return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.dense import check_dense
from fzero.base.errors import FzeroError
from fzero.base.hugging_face import is_cache
from fzero.base.reachable import LIMIT, Walked, find_tensor, walk, walk_with_contents
from fzero.base.torch_private import FakeTensor, is_batch, storage_key, unwrap
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import storage
from fzero.program.refusals import line_of
from fzero.tracing.read_objects import is_plain_object
from fzero.values.sharded import Sharded

_CONSTANTS = (Enum, type, slice, torch.dtype, torch.layout, torch.memory_format)
"""Classes of values that never change, some without a hash of their own."""

REGISTER = "register the class with torch.utils._pytree.register_pytree_node"


def check_argument(where: str, leaf: Any) -> None:
    """Refuse a leaf of the arguments that a trace cannot see into. `where` says which one it is.

    Callables may hold tensors: they are code, and what they hold is captured as by a closure.

    Raises:
        FzeroError: for an object that holds a tensor; for a container that is no tree, and another object of a library,
            that does not hash; for a tensor without one dense memory.
    """
    if isinstance(leaf, Sharded):
        return
    if isinstance(leaf, Tensor):
        check_dense(where, leaf)
    elif not (_is_hashable(leaf) or is_plain_object(leaf)):
        way_out = "give dict(...) of it" if isinstance(leaf, Mapping) else "give a tensor or a number"
        raise FzeroError(where, f"a {type(leaf).__name__} is no tensor and does not hash", way_out)
    elif not callable(leaf):
        _refuse_opaque(where, leaf, "give its tensors in a dict, or")


def check_result(path: str, leaf: Any, arguments: Sequence[Any]) -> None:
    """Refuse a leaf of the results that is no tensor and no constant. `arguments` are the leaves of the arguments.

    Every call of the step returns the constant that the trace saw. A constant is a value that never changes, or an
    object that the step was called with.

    Raises:
        FzeroError: for any other object, naming its class.
    """
    where = f"result {path!r}" if path else "the result"
    if isinstance(leaf, Sharded):
        return
    if isinstance(leaf, Tensor) and is_batch(leaf):
        problem = "is one example of a batch, kept from a function under vmap"
        raise FzeroError(where, problem, "return it from the function that vmap maps")
    if isinstance(leaf, Tensor):
        return check_dense(where, leaf)
    way_out = "return dict(...) of it" if isinstance(leaf, Mapping) else "return its tensors in a dict, or"
    _refuse_opaque(where, leaf, way_out)
    if not _is_value(leaf) and not any(leaf is given for given in arguments):
        problem = f"is an object of class {type(leaf).__name__} that the step made: each call would return the same one"
        raise FzeroError(where, problem, f"return tensors, numbers and trees of them, or {REGISTER}")


def _is_value(leaf: Any) -> bool:
    """Whether an object is known to be a value: of a class that never changes, or that is hashed by its value."""
    by_value: Any = type(leaf).__hash__
    return isinstance(leaf, _CONSTANTS) or by_value not in (None, object.__hash__)


def _refuse_opaque(where: str, leaf: Any, way_out: str) -> None:
    """Refuse an object, which is no tree, that holds a tensor."""
    place = find_tensor(leaf)
    if place is not None:
        problem = f"is an object of class {type(leaf).__name__}, which is no tree, and holds a tensor at {place}"
        raise FzeroError(where, problem, f"{way_out} {REGISTER}" if way_out.endswith(" or") else way_out)


class CacheCheck:
    """Refuses a change of a cache among the arguments `given` where the step does not return the cache.

    The step changes objects of its own, in the places of the caller's. Other containers may change: what a step takes
    out of a batch, or puts in, is of no use to the caller.
    """

    def __init__(self, given: tree.Tree) -> None:
        self._held = [(cache, tree.leaves(cache)) for cache in tree.find(given, is_cache)]

    def check(self, fn: Callable[..., Any], returned: tree.Tree) -> None:
        """Look for the change, after the step.

        Raises:
            FzeroError: naming the class of the cache.
        """
        if not self._held:
            return
        kept = tree.find(returned, is_cache)
        for cache, before in self._held:
            after = tree.leaves(cache)
            is_same = len(after) == len(before) and all(a is b for a, b in zip(after, before))
            if not is_same and not any(cache is x for x in kept):
                problem = f"fills a {type(cache).__name__} that it was given, and does not return it"
                way_out = "return it, and give it to the next call; or fill another: fzero.tree.map(lambda x: x, cache)"
                raise FzeroError(getattr(fn, "__name__", "step"), problem, way_out)


def check_escapes(program: Program, fn: Callable[..., Any], constants: Iterable[tuple[str, Any]]) -> Walked:
    """Refuse a traced value that can be reached from the step, or from `(name, object)` of its constant arguments, and
    a captured tensor that an earlier trace left behind. A `functools.lru_cache` that holds one is cleared. Returns what
    can be reached from the step.

    Raises:
        FzeroError: naming the place, and the user's line that computed the value.
    """
    for node in program.graph.find_nodes(op="get_attr"):
        if isinstance(unwrap(program.constants[node.target]), FakeTensor):
            problem = f"the step uses a tensor without data, which an earlier trace left behind{_find_use(node)}"
            raise FzeroError(program.name, problem, "make the tensor anew, outside of a step; call jvp for linearize")
    walks = []
    for root, held in ((getattr(fn, "__name__", "step"), fn), *constants):
        reachable = list(walk_with_contents(root, held))
        found = _find_escape(reachable, program)
        if (found or len(reachable) >= LIMIT) and _clear_caches(reachable, program):
            reachable = list(walk_with_contents(root, held))
            found = _find_escape(reachable, program)
        if found:
            raise _refuse_escape(program, *found)
        walks.append(reachable)
    return walks[0]


def _find_escape(reachable: Walked, program: Program) -> tuple[str, Tensor] | None:
    """The name and the value of the first traced value of a walk."""
    return next(((name, value) for name, value, _ in reachable if _is_traced(value, program)), None)


def _clear_caches(reachable: Walked, program: Program) -> bool:
    """Clear each `functools.lru_cache` that holds a traced value. Returns whether there was one. The cache computes its
    results again when it is asked for them."""
    caches = [value for _, value, _ in reachable if isinstance(value, functools._lru_cache_wrapper)]
    stale = [cache for cache in caches if any(_is_traced(value, program) for _, value in walk("", cache))]
    for cache in stale:
        cache.cache_clear()
    return bool(stale)


def _find_use(node: Node) -> str:
    return next((line_of(user) for user in node.users if user.stack_trace), "")


def _is_traced(value: Any, program: Program) -> bool:
    """Whether a value is of the trace that made the program: what an earlier one left behind is no matter of this."""
    if isinstance(value, Sharded):
        return value.on.is_tracing and _is_traced(value.local, program)
    inner = unwrap(value) if isinstance(value, Tensor) else None
    return isinstance(inner, FakeTensor) and inner.fake_mode is program.fake_mode


def _refuse_escape(program: Program, name: str, value: Tensor) -> FzeroError:
    if name.endswith(".grad"):
        way_out = "take gradients with fzero.value_and_grad, which returns them: backward() stores them in .grad"
    else:
        way_out = "return the value from the step and pass it in again, or keep it out of variables and attributes"
    memory = storage_key(unwrap(value.local if isinstance(value, Sharded) else value))
    lines = [line_of(node) for node in program.graph.nodes if storage(node) == memory and node.op == "call_function"]
    shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    problem = f"holds {shape} of the step after its trace{lines[0] if lines else ''}, where there is no data"
    return FzeroError(name, problem, way_out)


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
