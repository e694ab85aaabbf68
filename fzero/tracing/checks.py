"""Checks in torch's own code that ask for the truth of a tensor. A trace has no truths: it goes on as torch does where
the check passes, and the check becomes a node of the program, which raises an error when the step runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fzero.base.errors import FzeroError
from fzero.base.torch_private import assert_later, depth, name_of_backward
from fzero.base.user_line import current_user_line
from fzero.program.records import is_random, name_of
from fzero.tracing.kinds import Kinds

_aten = torch.ops.aten

_PASSES = {
    "torch.distributions.distribution.__init__": True,
    "torch.distributions.distribution._validate_sample": True,
    "torch.distributions.constraints.check": True,
    "gaussian_nll_loss": False,
    "istft": False,
    "LinalgSvdBackward": True,
    "peft.tuners.vblora.layer._get_lora_matrices": False,
}
"""Who asks -> the truth with which the check passes. Who asks is a function of torch, a backward node of autograd, or
the place of a `bool(x)` in Python code of torch or a library."""

_HINTS = {
    "torch.nn.modules.transformer._detect_is_causal_mask",
    "transformers.masking_utils.flex_attention_mask",  # whether a padding mask leaves out nothing
}
"""Who asks only to choose a faster way where the truth is True."""

_OF_SECOND_ORDER = {
    ("ScatterReduceBackward", "any"),
    ("IndexReduceBackward", "any"),
    ("torch::autograd::CopySlices", "any"),  # one of these two, in place on a view
}
"""(who asks, the operation that made the tensor), for checks that the first derivative does not depend on."""

_COMPARISONS: dict[Any, Callable[[float, float], bool]] = {
    _aten.lt.Scalar: operator.lt,
    _aten.le.Scalar: operator.le,
    _aten.gt.Scalar: operator.gt,
    _aten.ge.Scalar: operator.ge,
}
_DREW_ZERO = "torch.rand drew 0, once in 16 million, where Python branches on it: go on from the last checkpoint"


class Checks:
    """What a trace answers to the checks of torch."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._running, self._in_transform = "", False

    def note_call(self, name: str) -> None:
        """Note the function of torch that the step calls. Below it torch shows no transforms."""
        self._running = name
        if name == "grad":
            self._in_transform = depth() > 0

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """The truth of `func(*args)`, for which torch asks, with which a check passes. The check is then a node of the
        program. None where no check of the tables asks."""
        asks = name_of_backward().rstrip("0123456789") or self._running
        if asks in _PASSES:
            x = torch.isclose(*args, **kwargs).all() if func is _aten.allclose.default else args[0]
            assert_later(x if _PASSES[asks] else ~x, f"{asks} found invalid values")
            return _PASSES[asks]
        if asks in _HINTS:
            return False
        node = self._kinds.node_of(args[0])
        if node is not None and node.target is _aten._is_any_true.default and torch.is_anomaly_check_nan_enabled():
            assert_later(~args[0], f"{current_user_line()}: {name_of_backward()} returned nan values")  # detect_anomaly
            return False
        truth = None if node is None else _compare_draw(node)
        if truth is not None:
            assert_later(args[0] if truth else ~args[0], _DREW_ZERO)
            return truth
        is_known = node is not None and (asks, name_of(node)) in _OF_SECOND_ORDER
        return False if is_known and not self._in_transform else None  # there it may be differentiated again

    def refuse_draw(self, x: Any) -> None:
        """Refuse to read `x` where a random draw of the step decides its value, and no argument does.

        Raises:
            FzeroError: at the user's line.
        """
        node = self._kinds.node_of(x)
        sources = [] if node is None else [node]
        for source in sources:  # grows
            sources += [other for other in source.all_input_nodes if other not in sources]
        if any(map(is_random, sources)) and all(source.op == "call_function" for source in sources):
            problem = "a random draw decides here which way Python goes, and a program goes one way"
            way_out = "turn off the option that leaves parts out at random, such as layerdrop"
            raise FzeroError(current_user_line(), problem, way_out)


def _compare_draw(node: Node) -> bool | None:
    """The truth of a comparison of `torch.rand` with a number that all draws above 0 have, as `rand > 0.0`, which
    leaves modules out at a rate of 0. None for other nodes, and for draws of 16 bits, which are 0 too often."""
    compare = _COMPARISONS.get(node.target)
    if compare is None:
        return None
    draw, number = node.args
    is_draw = isinstance(draw, Node) and draw.target is _aten.rand.default and draw.meta["val"].dtype.itemsize >= 4
    return compare(0.5, number) if is_draw and isinstance(number, float | int) and not 0 < number < 1 else None
