"""Padding: the batches of all ranks get the length of the longest, because all ranks run one program."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.ranks.agreement import Everyone, digest, meet
from fzero.ranks.members import Members
from fzero.ranks.together import gather_words

Shapes = dict[str, tuple[int, ...]]
WHAT = "the shapes of a batch"
IGNORED = -100
"""The label that no loss counts."""
ZEROS = ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids")
"""Inputs whose padding is 0. Behind a mask no other number counts."""
TOKENS = ("input_ids", "decoder_input_ids")
WAY_OUT = 'give the collator padding="max_length", or pad_to_multiple_of='


def pad_to_longest(
    inputs: Mapping[str, Any], members: Members, labels: Collection[str], token: int, model: Any = None
) -> dict[str, Any]:
    """`inputs`, with padding behind sequences that are shorter than those of another rank. Sequences lie along dim 1.

    Padding is IGNORED in `labels`, and `token` in tokens. Tokens without a mask get one, so that no model looks at
    padding. Packed rows, which have `position_ids` and no mask, get none: with a mask a decoder would not look for
    their documents. A place of padding has position 0, so it is a document of its own. A `model` whose attention also
    looks ahead makes no documents of positions, and gets a mask. All `members` call `pad_to_longest`
    together. Those with equal shapes exchange one number.

    Raises:
        FzeroError: on all ranks, naming the input, for ranks with unequal numbers of rows, and for an input whose
            padding is not known.
    """
    shapes: Shapes = {name: tuple(x.shape) for name, x in inputs.items() if isinstance(x, Tensor)}
    of_ranks = _gather_shapes(members, shapes)
    if len({tuple((name, len(shape)) for name, shape in each.items()) for each in of_ranks}) > 1:
        return dict(inputs)  # the step says which inputs differ
    padded = dict(inputs)
    for name, x in inputs.items():
        length = _find_longest(name, of_ranks) if name in shapes else None
        if length is None:
            continue
        mask = name.replace("input_ids", "attention_mask")
        is_packed = name == "input_ids" and "position_ids" in inputs and not _looks_ahead(model)
        if name in TOKENS and mask not in inputs and not is_packed:
            padded[mask] = _pad(x.new_ones(x.shape), length, 0)
        padded[name] = _pad(x, length, _find_number(name, labels, token))
    return padded


def _looks_ahead(model: Any) -> bool:
    """Whether an attention of a model is not causal."""
    return model is not None and any(getattr(module, "is_causal", True) is False for module in model.modules())


def pad_to_rung(inputs: Mapping[str, Any], labels: Collection[str], token: int, most: int | None) -> dict[str, Any]:
    """`inputs`, with padding behind all sequences up to a rung of a ladder: so lengths that differ from batch to batch
    have few programs. Inputs whose padding is not known keep their length, and so do those that would pass `most`,
    which is the greatest length of the model."""
    sequences = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim > 1}
    is_known = all(name in (*TOKENS, *ZEROS, *labels) for name in sequences)
    rungs = {name: _find_rung(x.shape[1]) for name, x in sequences.items()}
    if not is_known or (most is not None and max(rungs.values(), default=0) > most):
        return dict(inputs)
    padded = {name: _pad(x, rungs[name], _find_number(name, labels, token)) for name, x in sequences.items()}
    return {**inputs, **padded}


def _find_rung(length: int) -> int:
    """The first number with three significant bits, and a multiple of 8, that is not smaller."""
    step = max(8, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


def cut_to_own(
    output: Any, inputs: Mapping[str, Any], padded: Mapping[str, Any], labels: Collection[str], sizes: Collection[int]
) -> Any:
    """An `output` of `padded` inputs as that of `inputs`: without the results at their padding. Changes a dict.

    A result [rows, length, ...] lies along the labels where each row has several. Without them, and in an encoder, it
    lies along the first other input. A result [rows, n] does so where n is the length, and none of `sizes`, the numbers
    of the configuration.

    Raises:
        FzeroError: for a result [rows, n] where n is both.
    """
    shapes = {name: x.shape for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim > 1}
    if all(padded[name].shape == shape for name, shape in shapes.items()):
        return output
    along_input = next((name for name in shapes if name not in labels), "")
    along_labels = next((name for name in shapes if name in labels), along_input)

    def cut(name: str, x: Any) -> Any:
        along = along_input if name.startswith("encoder") and along_input else along_labels
        length, own = padded[along].shape[1], inputs[along].shape[1]
        if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.shape[1] != length or own == length:
            return x
        if x.ndim == 2 and length in sizes:
            problem = f"has shape {list(x.shape)}, and {length} is a number of the configuration and a padded length"
            raise FzeroError(f"output {name}", problem, WAY_OUT)
        return x[:, :own]

    if isinstance(output, dict):
        for name, x in output.items():
            output[name] = tree.map(functools.partial(cut, name), x)
        return output
    return tree.map(functools.partial(cut, ""), output)


def _gather_shapes(members: Members, shapes: Shapes) -> list[Shapes]:
    """The different shapes of all ranks."""
    if members.is_alone:
        return [shapes]
    meet(members, WHAT)
    with members.begin(WHAT):
        said = Everyone((digest([repr(shapes)]),)).run(members)
    if all(number == said[0] for number in said):
        return [shapes]
    return list(gather_words(members, WHAT)(shapes).values())


def _find_longest(name: str, of_ranks: Sequence[Shapes]) -> int | None:
    """The greatest length of an input; None where all ranks have equal shapes."""
    shapes = [each[name] for each in of_ranks]
    if all(shape == shapes[0] for shape in shapes):
        return None
    if any(len(shape) < 2 or shape[:1] + shape[2:] != shapes[0][:1] + shapes[0][2:] for shape in shapes):
        told = ", ".join(str(list(shape)) for shape in shapes)
        way_out = "give dataloader_drop_last=True, or even_batches=True in accelerator_config"
        raise FzeroError(name, f"differs in more than its length, by rank: {told}", way_out)
    return max(shape[1] for shape in shapes)


def _find_number(name: str, labels: Collection[str], token: int) -> int:
    if name in TOKENS:
        return token
    if name in ZEROS:
        return 0
    if name in labels:
        return IGNORED
    raise FzeroError(name, "has other lengths on other ranks, and its padding is not known", WAY_OUT)


def _pad(x: Tensor, length: int, number: int) -> Tensor:
    behind = [0, 0] * (x.ndim - 2) + [0, length - x.shape[1]]
    return pad(x, behind, value=number) if length > x.shape[1] else x
