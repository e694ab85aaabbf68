"""Places: ranks that share layers have all places of a sequence in them, and between them each has its own.

    own places, of a norm  ->  gather  ->  all places, some heads or columns  ->  scatter  ->  own places, added

It is the sequence parallelism of Megatron (Korthikanti et al., 2022) for models of transformers. A block is what reads
all places: what lies directly in a layer and has rules or modules of its own, the embedding, and the head if it has a
rule. What a block sums over ranks as its result is scattered instead, and what it gathers goes to the rank of its
place. Of other results, such as a sum of experts in another shape, a rank takes its places. The backward pass gathers
the input of a block again, so that a rank keeps its own places alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fzero import all_gather, axis_size, remat, tree
from fzero.base.errors import FzeroError
from fzero.hf.caches import find_parts
from fzero.hf.sequence import find_sequence
from fzero.hf.styles import list_names, noting


def find_blocks(model: Any, names: Sequence[str]) -> list[nn.Module]:
    """The blocks of a model that has rules for modules of these names. Layers are the elements of lists of modules.
    What lies in them and has no modules, such as a norm, computes place by place.

    Raises:
        FzeroError: for a rule elsewhere.
    """
    modules = dict(model.named_modules())
    layers = list[str]()
    for name in modules:  # a list in a layer, such as one of experts, comes behind the layer
        is_element = isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)
        if is_element and not any(name.startswith(f"{layer}.") for layer in layers):
            layers.append(name)
    ends = {id(x) for x in (model.get_input_embeddings(), model.get_output_embeddings()) if x is not None}
    outside = {name for name, x in modules.items() if id(x) in ends}
    blocks = {name for name, x in modules.items() if x is model.get_input_embeddings()}
    blocks |= {name for name, x in modules.items() if name.rpartition(".")[0] in layers and any(x.children())}
    for name in names:
        layer = next((each for each in layers if name.startswith(f"{each}.")), None)
        if layer is not None:
            blocks.add(".".join(name.split(".")[: layer.count(".") + 2]))
            continue
        found = next((each for each in outside if f"{name}.".startswith(f"{each}.")), None)
        if found is None:
            problem = "has a rule, and lies in no layer: it is not known which places of a sequence it reads"
            raise FzeroError(name, problem, "leave sp out, or leave it whole: plan={name: 'replicate'}")
        blocks.add(found)
    return [modules[name] for name in sorted(blocks)]


def keep_places(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block, which takes and returns a rank's own places and computes with all."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        sequence = find_sequence()
        if sequence is None or sequence.between is None:
            return forward(*args, **kwargs)
        axis, own, along = sequence.between, sequence.own, {*list_names(sequence.between)}
        inside = own * axis_size(axis)

        def gather(x: Any) -> Any:
            is_own = isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == own and along.intersection(find_parts(x))
            return all_gather(x, axis, 1).contiguous() if is_own else x  # modules view it as they view their own places

        def compute(*args: Any, **kwargs: Any) -> Any:
            with noting() as take:
                made = forward(*map(gather, args), **{name: gather(x) for name, x in kwargs.items()})
                return tree.map(lambda x: take(x, axis, 1) if x.ndim == 3 and x.shape[1] == inside else x, made)

        return remat(compute, policy="local")(*args, **kwargs)

    return run
