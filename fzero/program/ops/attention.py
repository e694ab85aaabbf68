"""FlexAttention: attention whose scores a function of the user changes, without pairs that another one leaves out.

flex_attention            any -> as the operands   output, log-sum-exp and largest score of each row
flex_attention_backward   any -> as the operands   gradients of query, key, value, and of captured tensors

The functions (`score_mod`, `mask_mod`) stand in a node as code, and the tensors that they captured are operands. So
equal layers have equal nodes, and ranks compare the code as they compare numbers.

On CPU torch has no kernel for this, and makes the scores of all pairs. Elsewhere inductor makes a kernel of a node,
which keeps no scores, once for equal nodes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fzero.base import torch_private_operators as private
from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensorMode
from fzero.program.memory import Allocator
from fzero.program.operation import Node, Work, join_operands, read_and_write, values_of
from fzero.program.records import name_of, register_for_tracing

if TYPE_CHECKING:
    from fzero.program.program import Program

TENSOR = "tensor"
"""Stands for a tensor of a block mask."""


class Flex(NamedTuple):
    """What a call of FlexAttention has besides tensors.

    * `score`, `mask`: code of `score_mod` and `mask_mod`, functions of their usual arguments and captured tensors.
    * `joint`: code of the derivative of `score`; "" where nothing is differentiated.
    * `wanted`: for each tensor that `score` captured, whether it has a gradient. `mask` captured the other ones.
    * `blocks`: the block mask as torch's operator takes it, without `mask_mod`.
    """

    score: str
    mask: str
    joint: str
    wanted: tuple[bool, ...]
    blocks: tuple[Any, ...]
    scale: float
    options: tuple[tuple[str, Any], ...]

    def write(self) -> str:
        """The text of the node's last argument."""
        return repr(tuple(self))

    def fill(self, blocks: Sequence[Any], mask: Any) -> tuple[Any, ...]:
        """The block mask with these tensors."""
        given = iter(blocks)
        return (*(next(given) if x == TENSOR else x for x in self.blocks), mask)

    def split(self, captured: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors that `score` and `mask` captured."""
        return tuple(captured[: len(self.wanted)]), tuple(captured[len(self.wanted) :])


@lru_cache(maxsize=256)
def read(text: str) -> Flex:
    return Flex(*ast.literal_eval(text))


SCOPE = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
"""The names that code of a graph of torch uses."""


@lru_cache(maxsize=256)
def load(code: str) -> Callable[..., Any]:
    """The function that code defines."""
    scope = dict[str, Any](SCOPE)
    exec(code, scope)
    return lambda *args: scope["forward"](None, *args)


# how a node runs


Caller = Callable[..., Any]
"""Calls torch's operator, or writes its node into a graph."""
Loader = Callable[[str], Any]
"""A function from its code, or the node of one."""


def _call(call: Caller, load: Loader, flex: Flex, query: Any, key: Any, value: Any, blocks: Any, captured: Any) -> Any:
    operands = flex.fill(blocks, load(flex.mask)), flex.scale, dict(flex.options), *flex.split(captured)
    made = call(private.flex_attention, query, key, value, load(flex.score), *operands)
    return made[0], made[1], made[2]


def _call_backward(call: Caller, load: Loader, flex: Flex, *given: Any) -> tuple[Any, ...]:
    *tensors, blocks, captured = given
    operands = flex.fill(blocks, load(flex.mask)), flex.scale, dict(flex.options), *flex.split(captured)
    made = call(private.flex_attention_backward, *tensors, load(flex.score), load(flex.joint), *operands)
    return *(made[i] for i in range(3)), *(made[3][i] for i, is_wanted in enumerate(flex.wanted) if is_wanted)


def _run(*given: Any) -> tuple[Tensor, ...]:
    return _call(lambda operator, *args: operator(*args), load, read(given[-1]), *given[:-1])


def _run_backward(*given: Any) -> list[Tensor]:
    *tensors, captured, how = given
    flex = read(how)
    # torch's operator makes gradients of the captured tensors that require one.
    wanted = [*flex.wanted, *[False] * (len(captured) - len(flex.wanted))]
    held = [x.detach().requires_grad_() if is_wanted else x for x, is_wanted in zip(captured, wanted)]
    return list(_call_backward(lambda operator, *args: operator(*args), load, flex, *tensors, held))


class _Function(nn.Module):
    """A function as a module, which a graph of torch may hold."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class _Value(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _compile(call: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """The kernel of a node, made when it is called first. Results that nothing uses are None."""
    how, template = node.args[-1], describe(node)
    used = tuple(sorted({user.args[1] for user in node.users}))
    count = len(node.meta["val"])

    def run(*args: Any) -> list[Any]:
        made = dict(zip(used, _make_kernel(call, how, template, used)(*flatten(args[:-1]))))
        return [made.get(i) for i in range(count)]

    return run


def describe(node: Node) -> Any:
    """The operands of a node, a `_Value` for each tensor."""
    return _freeze(fx.map_arg(node.args[:-1], lambda x: _describe(x.meta["val"])))


def _describe(x: Tensor) -> _Value:
    return _Value(tuple(x.shape), x.stride(), x.dtype, x.device)


def _freeze(template: Any) -> Any:
    is_list = isinstance(template, (list, tuple)) and not isinstance(template, _Value)
    return tuple(map(_freeze, template)) if is_list else template


def flatten(given: Any) -> Iterator[Any]:
    for x in given:
        if isinstance(x, (list, tuple)) and not isinstance(x, _Value):
            yield from flatten(x)
        elif x is not None:
            yield x


@lru_cache(maxsize=64)
def _make_kernel(
    call: Callable[..., Any], how: str, template: tuple[Any, ...], used: tuple[int, ...]
) -> Callable[..., Any]:
    """The function that inductor makes of a node whose operands are like `template`. It returns the `used` results.

    Raises:
        FzeroError: where inductor fails.
    """
    module, inputs = make_graph(call, how, template, used)
    with FakeTensorMode():
        given = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=x.device) for x in inputs]
    try:
        return private.hold_strides(private.compile_graph(module, given), [x.strides for x in inputs])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        way_out = "use scaled_dot_product_attention, in transformers attn_implementation='sdpa'"
        raise FzeroError("flex_attention", f"inductor makes no kernel of it: {reason}", way_out) from error


def make_graph(
    call: Callable[..., Any], how: str, template: tuple[Any, ...], used: tuple[int, ...]
) -> tuple[fx.GraphModule, list[_Value]]:
    """A node as a graph that calls torch's operator, and what its inputs are."""
    root, graph, inputs = nn.Module(), fx.Graph(), list[_Value]()

    def place(x: Any) -> Any:
        if isinstance(x, tuple) and not isinstance(x, _Value):
            return tuple(map(place, x))
        if not isinstance(x, _Value):
            return x
        inputs.append(x)
        return graph.placeholder(f"x{len(inputs)}")

    def hold(code: str) -> Any:
        name = f"function_{len(list(root.children()))}"
        root.add_module(name, _Function(load(code)))
        return graph.get_attr(name)

    def write(operator: Any, *args: Any) -> fx.Proxy:
        return fx.Proxy(graph.call_function(operator, args))

    made = call(write, hold, read(how), *place(template))
    graph.output(tuple(made[i].node for i in used))
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph), inputs


# what is known of a node


def _make_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    row = query.shape[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    stats = (query.new_empty(row, dtype=dtype) for _ in range(2))
    return _order_as(query.new_empty((*row, value.shape[-1])), query), *stats


def _make_fake_backward(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    captured, wanted = given[-2], read(given[-1]).wanted
    grads = [_order_as(x.new_empty(x.shape), x) for x in (query, key, value)]
    return grads + [x.new_empty(x.shape) for x, is_wanted in zip(captured, wanted) if is_wanted]


def _order_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor whose dimensions lie in memory in the order of those of `like`, the last one innermost."""
    order = sorted(range(x.ndim - 1), key=lambda dim: like.stride()[dim])
    strides, size = [1] * x.ndim, x.shape[-1]
    for dim in order:
        strides[dim], size = size, size * x.shape[dim]
    return x.new_empty_strided(x.shape, strides)


def _count_pairs(node: Node) -> tuple[int, int, int]:
    """The pairs of positions of all heads, and the sizes of a key and of a value."""
    query, key, value = values_of(node.args[:3])
    return query[..., 0].numel() * key.shape[2], key.shape[3], value.shape[3]


def _work(node: Node) -> Work:
    """As `torch.utils.flop_counter` counts: all pairs, though a block mask leaves out some."""
    pairs, width, of_value = _count_pairs(node)
    return _count_work(2 * pairs * (width + of_value), node)


def _work_backward(node: Node) -> Work:
    pairs, width, of_value = _count_pairs(node)
    return _count_work(2 * pairs * (3 * width + 2 * of_value), node)


def _count_work(flops: int, node: Node) -> Work:
    return Work(flops, read_and_write(node).nbytes, attention=flops)


SCORES = 4
SCORES_BACKWARD = 6
"""The matrices of all pairs that torch makes on CPU at once, forward and backward."""


def _allocate(matrices: int) -> Callable[[Allocator, Node], tuple[Any, ...]]:
    """The results; beside them on CPU the scores, elsewhere a number for each row of the backward pass."""

    def memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
        query, value = values_of(node.args[0]), node.meta["val"]
        size = 8 if query.dtype == torch.float64 else 4
        if query.device.type == "cpu":
            allocator.scratch[node] = matrices * size * _count_pairs(node)[0]
        elif matrices == SCORES_BACKWARD:
            allocator.scratch[node] = 4 * query[..., 0].numel()
        return ([allocator.new((node, i), x) for i, x in enumerate(value)],)

    return memory


def _perform(run: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def perform(program: Program, node: Node, rank: Any) -> Callable[..., Any]:
        return run if node.meta["val"][0].device.type == "cpu" else _compile(call, node)

    return perform


def _line(program: Program, node: Node) -> str:
    return f"{'attention':<15} {name_of(node)}"


_OPERANDS = "Tensor[] blocks, Tensor[] captured, str how"
flex_attention = register_for_tracing(
    f"flex_attention(Tensor query, Tensor key, Tensor value, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _make_fake,
    kind=join_operands,
    perform=_perform(_run, _call),
    work=_work,
    memory=_allocate(SCORES),
    line=_line,
    stands_for=private.flex_attention,
)
flex_attention_backward = register_for_tracing(
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor grad, "
    f"Tensor? grad_lse, {_OPERANDS}) -> Tensor[]",
    _make_fake_backward,
    kind=join_operands,
    perform=_perform(_run_backward, _call_backward),
    work=_work_backward,
    memory=_allocate(SCORES_BACKWARD),
    line=_line,
    stands_for=private.flex_attention_backward,
)
