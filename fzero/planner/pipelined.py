"""Pipelined: a decoder of transformers whose equal layers are stages along the axis "pp"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.parallel import pipeline, vocab_cross_entropy, vocab_embedding
from fzero.state.partition import partition
from fzero.values.lowering import lower

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The types of models that equal one device as stages: the embedding is a look-up, and the head one product."""
AXIS = "pp"


class Stages(nn.Module):
    """The equal layers of a decoder as one module: leaves [L, ...], and their pipeline over `microbatches`."""

    def __init__(self, layers: nn.ModuleList, microbatches: int, remat: bool) -> None:
        super().__init__()
        held, calls = zip(*(lower(layer) for layer in layers))
        leaves, self.structure = tree.flatten(tree.map(lambda *each: torch.stack(each), *held))
        self.stacked = nn.ParameterList(leaves)
        self.call: Callable[..., Any] = calls[0]
        self.microbatches, self.remat = microbatches, remat

    def forward(self, hidden: Tensor, attention_mask: Any = None, **given: Any) -> Tensor:
        """`hidden` [B, S, D] of all rows -> the same behind all layers. The mask is that of every row: no row is
        padded, or has places of its own."""
        rows = hidden.shape[0] // self.microbatches
        mask = attention_mask[:rows] if isinstance(attention_mask, Tensor) else attention_mask

        def body(leaves: Any, h: Tensor) -> Tensor:
            made: Tensor = self.call(tree.unflatten(self.structure, leaves), h, attention_mask=mask, **given)
            return made

        parts = hidden.unflatten(0, (self.microbatches, rows))
        return pipeline(body, list(self.stacked), parts, axis=AXIS, remat=self.remat).flatten(0, 1)


def make_stages(
    model: Any, mesh: VirtualMesh, microbatches: int, remat: bool
) -> tuple[tree.Tree, Callable[[tree.Tree, Tensor], Tensor]]:
    """`(params, loss)`: parameters in slices, layers stacked and split over "pp", embedding and head split over it by
    words; `loss(params, tokens)` is that of the next tokens. `model` loses its layers to the stages.

    Raises:
        FzeroError: for a type of model whose stages were not held to one device, for layers that are not alike, for
            layers and words that the ranks do not divide.
    """
    kind, ranks = model.config.model_type, mesh.size(AXIS)
    if kind not in MODEL_TYPES:
        problem = f"the stages of {kind!r} were not held to one device"
        raise FzeroError(AXIS, problem, f"plan {', '.join(MODEL_TYPES)}, or a step of your own by --script")
    decoder, head = model.model, model.lm_head
    if not len(decoder.layers):
        raise FzeroError(AXIS, f"has {ranks} ranks, and the model no layers", "plan it without this axis")
    alike = [list(_describe(layer)) for layer in decoder.layers]
    if odd := [i for i, each in enumerate(alike) if each != alike[0]]:
        raise FzeroError(AXIS, f"layer {odd[0]} is not like layer 0", "plan it without this axis")
    for what, number in (("layers", len(alike)), ("words", head.weight.shape[0])):
        if number % ranks:
            raise FzeroError(AXIS, f"has {ranks} ranks, and the model {number} {what}", f"give a divisor of {number}")
    decoder.layers = nn.ModuleList([Stages(decoder.layers, microbatches, remat)])
    decoder.config.num_hidden_layers = 1  # transformers takes so many of the list
    inner, apply = lower(decoder)
    is_tied = head.weight is decoder.embed_tokens.weight
    params = {"decoder": inner} if is_tied else {"decoder": inner, "head": head.weight.detach()}
    split = {"decoder.layers.*": (AXIS, 0), "decoder.embed_tokens.weight": (AXIS, 0)}
    held = partition(params, mesh, split=split if is_tied else split | {"head": (AXIS, 0)})

    def loss(params: Any, tokens: Tensor) -> Tensor:
        words = params["decoder"]["embed_tokens"]["weight"]
        hidden = apply(params["decoder"], inputs_embeds=vocab_embedding(tokens, words, axis=AXIS), use_cache=False)
        seen = hidden.last_hidden_state[:, :-1]
        labels, last = tokens[:, 1:], words if is_tied else params["head"]
        return vocab_cross_entropy(seen, last, labels, axis=AXIS, chunks=microbatches)

    return held, loss


def _describe(layer: nn.Module) -> Iterator[Any]:
    """What two layers have alike when one can compute with the other's parameters: shapes, and numbers of modules."""
    yield [(name, leaf.shape) for name, leaf in layer.named_parameters()]
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k != "layer_idx"}
        yield name, type(module), plain, [each.shape for each in module.buffers()]
