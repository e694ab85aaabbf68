"""Higher-order operators of torch, which take functions: which of them a step runs, and how. All others are refused by
name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.base.user_line import current_user_line
from fzero.tracing.flex import attend
from fzero.tracing.kinds import Kinds
from fzero.values.loops import scan
from fzero.values.sharded import Sharded


def call(kinds: Kinds, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `operator(*args, **kwargs)` returns in a step.

    Raises:
        FzeroError: for an operator that a step does not have.
    """
    name = operator.__name__
    if name == "flex_attention":
        return attend(kinds, *args, **kwargs)
    if name == "custom_function_call":  # how torch.func calls an autograd Function
        return operator(*args, **kwargs)
    if name in RUNS:
        return RUNS[name](*args, **kwargs)
    raise refuse(name)


def refuse(name: str) -> FzeroError:
    """The error of an operator that a step does not have."""
    way_out = WAYS_OUT.get(name, "write it with functions of torch, or call it outside of the step")
    return FzeroError(current_user_line(), f"a step does not have torch's higher-order operator {name}", way_out)


def _map(function: Callable[..., Any], xs: Sequence[Any], args: Sequence[Any], mutated_arg_indices: str = "") -> Any:
    """`torch._higher_order_ops.map`. torch 2.15 lists operands that the function writes into."""
    if mutated_arg_indices:
        raise FzeroError(current_user_line(), "the function of map writes into its operands", "return new tensors")
    return scan(lambda carry, rows: (carry, function(*rows, *args)), (), _gather(xs))[1]


def _scan(function: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Any = ()) -> Any:
    """`torch._higher_order_ops.scan`. The function returns a pair of trees, or all leaves of both."""
    count, forms = len(init), list[Any]()

    def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        made = function(*carry, *rows, *additional_inputs)
        is_pair = isinstance(made, tuple) and len(made) == 2 and len(torch_private.pytree_leaves(made[0])) == count
        pair = made if is_pair else (list(made[:count]), list(made[count:]))
        forms[:] = [is_pair, *pair]
        new, ys = map(torch_private.pytree_leaves, pair)
        return new, ys

    last, stacked = scan(body, list(init), _gather(xs))
    is_pair, *trees = forms
    carry, ys = (_fill(tree, leaves) for tree, leaves in zip(trees, (last, stacked)))
    return (carry, ys) if is_pair else (*carry, *ys)


def _fill(tree: Any, leaves: Sequence[Any]) -> Any:
    """A pytree of torch with other leaves."""
    given = iter(leaves)
    return torch_private.map_pytree(lambda _: next(given), tree)


def _gather(xs: Sequence[Any]) -> list[Any]:
    return [x.full_tensor() if isinstance(x, Sharded) else x for x in xs]


RUNS: dict[str, Callable[..., Any]] = {
    "map_impl": _map,
    "scan": _scan,
    "strict_mode": lambda function, operands: function(*operands),
    "invoke_subgraph": lambda function, identifier, *operands: function(*operands),
    "hints_wrapper": lambda function, args, kwargs, hints: function(*args, **kwargs),
}
"""Name of an operator -> what is called in its place."""

WAYS_OUT = {
    "cond": "compute both branches, and choose with torch.where",
    "while_loop": "give a number of turns, fzero.scan(body, carry, length=n), and keep what is done with torch.where",
    "while_loop_stack_output": "give a number of turns: fzero.scan(body, carry, length=n)",
    "associative_scan": 'give combine_mode="generic", or use torch.cumsum or fzero.scan',
    "flex_attention_backward": "call flex_attention, and differentiate it with fzero.grad",
    "out_dtype": "cast the operands, and the result: op(x.to(dtype), y.to(dtype))",
    "print": "return the tensor, and print it outside of the step",
    "foreach_map": "call the function for each tensor of the lists",
    "triton_kernel_wrapper_mutation": "make an operation of the kernel with torch.library.custom_op, and a backward",
    "triton_kernel_wrapper_functional": "make an operation of the kernel with torch.library.custom_op, and a backward",
    "call_torchbind": "make an operation of it with torch.library.custom_op",
}
"""Name of an operator that is refused -> what to write in its place."""
