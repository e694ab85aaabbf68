"""FlexAttention in a step: a call of torch's operator becomes a node of the program, with its gradient.

torch lets its compiler find what `score_mod` and `mask_mod` captured, and make operands of it. A trace cannot ask the
compiler: it looks at what the two give to functions of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fzero.base import torch_private, torch_private_operators
from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensor
from fzero.base.torch_private_functions import requires_grad
from fzero.base.user_line import current_user_line
from fzero.program import ops
from fzero.program.ops.attention import TENSOR, Flex, read
from fzero.program.records import find_writes, is_random, name_of
from fzero.tracing.kinds import Kinds
from fzero.values.functions import is_sharded
from fzero.values.sharded import Sharded

_NAME = "flex_attention"
_full = torch.ops.aten.full.default


def attend(
    kinds: Kinds,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Tensor] = (),
    mask_mod_other_buffers: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """What torch's operator `flex_attention` returns."""
    if torch_private.in_vmap():
        _refuse("is mapped by vmap", "give it the examples as its batch")
    query, key, value = map(_gather, (query, key, value))
    fake = torch_private.unwrap(query)
    if not isinstance(fake, FakeTensor):  # all of it is captured, and the result is a constant
        fake = kinds.program.fake_mode.from_tensor(fake, static_shapes=True)
    *blocks, mask_mod = block_mask
    score = _Function(kinds, score_mod, "score_mod", fake, 1, score_mod_other_buffers)
    mask = _Function(kinds, mask_mod, "mask_mod", fake, 0, mask_mod_other_buffers)
    is_differentiated = torch.is_grad_enabled()
    wanted = tuple(is_differentiated and requires_grad(x) for x in score.captured)
    if is_differentiated and any(map(requires_grad, mask.captured)):
        _refuse("has a mask_mod that captures a tensor with a gradient", "detach it: a mask has no gradient")
    is_differentiated = any(wanted) or (is_differentiated and any(map(requires_grad, (query, key, value))))
    if is_differentiated and blocks[7] is None:
        _refuse("has a BlockMask without q_indices", "make it with compute_q_blocks=True")
    flex = Flex(
        score.code,
        mask.code,
        score.differentiate(wanted) if is_differentiated else "",
        wanted,
        tuple(TENSOR if isinstance(x, Tensor) else x for x in blocks),
        scale,
        tuple(sorted(kernel_options.items())),
    )
    how = flex.write()
    if not _is_literal(how):
        _refuse("has a kernel option that is no number and no word", "leave it out")
    tensors = [x for x in blocks if isinstance(x, Tensor)]
    return _Flex.apply(len(tensors), how, query, key, value, *tensors, *score.captured, *mask.captured)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def _refuse(problem: str, way_out: str) -> NoReturn:
    raise FzeroError(current_user_line(), f"{_NAME} {problem}", way_out)


def _gather(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


class _Function:
    """A `score_mod` or a `mask_mod`: its `code`, and the tensors that it `captured`, whole.

    It is called without any mode or transform, with tensors without data. `like` is one of these.
    """

    def __init__(
        self, kinds: Kinds, function: Callable[..., Any], name: str, like: Any, n_scores: int, given: Sequence[Any]
    ) -> None:
        self._like, self._name, self._n_scores = like, name, n_scores
        captured = [*given]
        with self._alone():
            found = [self._make_like(x) for x in captured]
            examples = self._make_examples()
            with torch_private_operators.index_by_tensors(), (swap := _Swap(self._make_like, [*examples, *found])):
                function(*examples, *found)
        captured += swap.captured
        self.captured = [_gather(x) for x in captured]
        for x in map(torch_private.unwrap, self.captured):
            if isinstance(x, FakeTensor) and kinds.node_of(x) is None:
                problem = f"has a {name} that uses a tensor which no operation of the step has made"
                _refuse(problem, f"write {name} with functions of torch, without custom autograd Functions")

        def run(*args: Tensor) -> Any:
            own, held = args[: len(examples) + len(given)], args[len(examples) + len(given) :]
            stand_ins = dict(zip(map(id, swap.captured), held))
            with torch_private_operators.index_by_tensors(), _Swap(lambda x: stand_ins[id(x)], [*own, *held]):
                return function(*own)

        self._run = run
        with self._alone():
            self.code = self._check(make_fx(run)(*self._make_examples(), *map(self._make_like, self.captured)))

    def differentiate(self, wanted: Sequence[bool]) -> str:
        """The code of the derivative, by the score and the captured tensors that are `wanted`."""
        with self._alone():
            examples, held = self._make_examples(), list(map(self._make_like, self.captured))
            for x in (examples[0], *(x for x, is_wanted in zip(held, wanted) if is_wanted)):
                x.requires_grad_()
            # Not the code: torch has derivatives of its own of what it puts in the place of `x[i]`.
            return self._check(torch_private_operators.differentiate_score(self._run, examples, held))

    def _alone(self) -> ExitStack:
        """A context with the mode of fake tensors alone."""
        stack = ExitStack()
        stack.enter_context(torch_private_operators.outside_of_transforms())
        stack.enter_context(torch_private.disable_modes())
        stack.enter_context(self._like.fake_mode)
        stack.enter_context(torch.no_grad())
        return stack

    def _make_examples(self) -> list[Tensor]:
        """A score, for a `score_mod`, and the indices of an example, a head, a query and a key."""
        scores = [torch.empty((), dtype=self._like.dtype, device=self._like.device)] * self._n_scores
        return scores + [torch.empty((), dtype=torch.int, device=self._like.device) for _ in range(4)]

    def _make_like(self, x: Tensor) -> Tensor:
        """A tensor without data and without history, of the shape of another."""
        if isinstance(x, Sharded):
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x = torch_private.unwrap(x)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def _check(self, module: Any) -> str:
        """The code of a graph, which nothing but its operands may enter, and which only computes."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self._write_number(module, node)
            if node.op == "call_function" and (find_writes(node) or is_random(node)):
                does = "writes into a tensor" if find_writes(node) else "draws random numbers"
                _refuse(f"has a {self._name} that {does}, by {name_of(node)}", "compute a new value from its arguments")
        module.graph.eliminate_dead_code()
        return module.graph.python_code("self").src

    def _write_number(self, module: Any, node: Any) -> None:
        """Write the number of a tensor that the function made, such as an index, into the graph."""
        held = getattr(module, node.target)
        if isinstance(held, FakeTensor) or held.numel() != 1:
            _refuse(f"has a {self._name} that makes a tensor of values", "make the tensor outside of it")
        with torch_private.disable_modes():
            number = held.item()
        how = {"dtype": held.dtype, "device": held.device, "pin_memory": False}
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_function(_full, (tuple(held.shape), number), how))


class _Swap(TorchFunctionMode):
    """In a function of the user: each tensor that the function has not made, and was not given, is replaced by
    `stand_in(tensor)`. `captured` lists these tensors."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor], given: Sequence[Tensor]) -> None:
        super().__init__()
        self._stand_in, self._stand_ins = stand_in, dict[int, Tensor]()
        self._own = {id(x): x for x in given}
        self.captured: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = torch_private.map_pytree(self._swap, (args, kwargs or {}), is_leaf=is_sharded)
        made = func(*args, **kwargs)
        self._own |= {id(x): x for x in torch_private.pytree_leaves(made, is_leaf=is_sharded) if isinstance(x, Tensor)}
        return made

    def _swap(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in self._own:
            return x
        if id(x) not in self._stand_ins:
            self.captured.append(x)
            self._stand_ins[id(x)] = self._stand_in(x)
        return self._stand_ins[id(x)]


class _Flex(torch.autograd.Function):
    """`apply(number of blocks, how, query, key, value, *blocks, *captured)`."""

    @staticmethod
    def forward(n: int, how: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ops.flex_attention(*tensors[:3], list(tensors[3 : 3 + n]), list(tensors[3 + n :]), how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.n, ctx.how, *tensors = inputs
        out, lse, largest = output
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        wanted = read(ctx.how).wanted
        made = iter(_FlexBackward.apply(ctx.n, ctx.how, grad, grad_lse, out, lse, *tensors))
        grads = [next(made) for _ in range(3)]
        of_captured = [next(made) if is_wanted else None for is_wanted in wanted]
        rest = len(tensors) - 3 - ctx.n - len(wanted)
        return None, None, *grads, *[None] * ctx.n, *of_captured, *[None] * rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("has no forward-mode derivative in torch", "differentiate it in reverse mode, by fzero.grad")


class _FlexBackward(torch.autograd.Function):
    """The gradients, which torch does not differentiate again."""

    @staticmethod
    def forward(n: int, how: str, grad: Tensor, grad_lse: Any, out: Tensor, lse: Tensor, *tensors: Tensor) -> Any:
        blocks, captured = list(tensors[3 : 3 + n]), list(tensors[3 + n :])
        return tuple(ops.flex_attention_backward(*tensors[:3], out, lse, grad, grad_lse, blocks, captured, how))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _refuse("has no second derivative in torch", "differentiate it once")

    jvp = backward
