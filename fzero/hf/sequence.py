"""Sequence: a decoder of transformers whose ranks along an axis have parts of each row.

Ranks along the axis take the same rows. The forward of the model cuts them: each rank embeds, normalizes and multiplies
its own block of places. Attention, which is what looks at other places, is a function of transformers' registry around
the one that the model has:

    "heads"      they divide by the ranks: `fzero.parallel.ulysses`, each rank has all places of some heads
    "keys"       they do not: each rank has its own queries, and the keys of all places
    "rotated"    each rank has its own queries, and keys go around (`fzero.hf.rotation`)

Ranks that share layers may have parts of such a part: in layers each has all of it, and between them its own part
(`fzero.hf.places`). Attention goes around the other ranks, if there are any.

Masks are those that the model makes, by functions of the places of queries and keys, for all places or for a rank's
queries. Labels are shifted before they are cut, and the loss is a sum over ranks of sums, divided by the labels of all.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils, modeling_outputs
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import ModelOutput

from fzero import all_gather, axis_index, axis_size, parallel, psum
from fzero.base.errors import FzeroError
from fzero.hf.caches import find_caches, find_parts
from fzero.hf.losses import IGNORED, is_of_next_tokens, replace_loss, shift_labels
from fzero.hf.rotation import read_sight, rotate
from fzero.hf.sequence_models import LAYER_TYPES, MODEL_TYPES
from fzero.hf.styles import Axis, list_names, set_attributes, take_block
from fzero.values.regions import leave_regions

NAME = "fzero_sequence"
"""The attention of this file, and its masks, in the registries of transformers."""
INNER = ("sdpa", "eager")
"""The attentions of transformers that it goes around."""
CUT = ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels")
"""The inputs [rows, places, ...] of which a rank has a block."""
WHOLE = ("attention_mask", "num_items_in_batch")
REFUSED = ("output_attentions", "output_router_logits", "logits_to_keep")
"""What a rank has of its own places alone, as an argument or in a configuration."""
OF_PLACES = (
    *(modeling_outputs.BaseModelOutputWithPast, modeling_outputs.MoeModelOutputWithPast),
    *(modeling_outputs.CausalLMOutputWithPast, modeling_outputs.MoeCausalLMOutputWithPast),
    *(modeling_outputs.TokenClassifierOutput, modeling_outputs.QuestionAnsweringModelOutput),
)
"""The outputs of transformers that have values for each place."""
Way = Literal["heads", "keys", "rotated"]
"""How attention sees places of other ranks."""


class Parts(NamedTuple):
    """Which ranks have parts of a sequence, and the way of attention. Ranks along `around` cut it first. Those along
    `between` cut each part again, and have all of it in the layers that they share."""

    around: Axis | None
    between: Axis | None
    way: Way


class Sequence(NamedTuple):
    """What attention, its masks and the loss have to know of the whole sequence while a forward runs."""

    around: Axis | None  # as of `Parts`; None for one rank
    between: Axis | None
    inner: str  # the attention that the model has
    way: Way
    order: Tensor | None  # [places], in which they are cut, where keys are rotated
    length: int
    own: int  # places of this rank
    mask: Tensor | None  # [rows, places], of padding
    positions: Tensor | None  # [rows, places] of packed documents
    labels: Tensor | None  # [rows, places of this rank], which are shifted
    items: Any  # by which the loss is divided
    losses: list[Tensor]  # that were computed

    @property
    def axes(self) -> tuple[Axis, ...]:
        """In the order in which they cut the sequence."""
        return tuple(axis for axis in (self.around, self.between) if axis is not None)


_sequence: ContextVar[Sequence] = ContextVar("sequence")


def check_sequence(model: Any, axis: Axis) -> None:
    """Refuse a model whose ranks along an axis cannot have parts of a sequence.

    Raises:
        FzeroError: for a model of which it is not known that attention alone looks at other places; for an attention
            that is not of `INNER`; for positions that depend on the longest sequence; for noise on embeddings, and on
            the input of routers.
    """
    config = model.config.get_text_config()
    others = {*(getattr(config, "layer_types", None) or ())} - LAYER_TYPES
    if others:
        problem = f"has {min(others)!r}, whose layers look at other places"
        raise FzeroError("model: layer_types", problem, "leave sp out")
    if config.model_type not in MODEL_TYPES:
        problem = f"{type(model).__name__} is a {config.model_type}, which was not tried on parts of a sequence"
        way_out = f"leave sp out; these were: {', '.join(MODEL_TYPES)}"
        raise FzeroError(f"sp={axis!r}", problem, way_out)
    if config._attn_implementation not in INNER:
        problem = f"is {config._attn_implementation!r}, around which there is no attention over ranks"
        raise FzeroError("model: attn_implementation", problem, 'load the model with attn_implementation="sdpa"')
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(x for x in rope.values() if isinstance(x, dict))):
        if each.get("rope_type", "default") in ("dynamic", "longrope"):
            problem = f"is {each['rope_type']!r}, which changes with the longest sequence of a rank"
            raise FzeroError("model: rope_type", problem, "leave sp out")
    is_noisy = any(hasattr(module, "neftune_noise_alpha") for module in model.modules())
    noise = "neftune_noise_alpha" if is_noisy else "router_jitter_noise"
    if is_noisy or getattr(config, noise, None):
        problem = "is given, and its noise would be the same in each part of a sequence"
        raise FzeroError(f"model: {noise}", problem, "leave it out, or leave sp out")


def choose_way(model: Any, world: int, shared: int) -> Way:
    """How `world` ranks along the axis go to attention, where `shared` ranks have parts of the heads."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads // shared
    keys = max((getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // shared, 1)
    return "heads" if heads % world == 0 and (keys % world == 0 or world % keys == 0) else "keys"


def find_sequence() -> Sequence | None:
    """The sequence of the forward that runs."""
    return _sequence.get(None)


def cut_sequence(model: Any, parts: Parts) -> Callable[..., Any]:
    """The forward of a model on ranks that each compute a part of the places, with the output of all of them."""
    forward, inner = model.forward, model.config.get_text_config()._attn_implementation
    named = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        around, between = (axis if axis and axis_size(axis) > 1 else None for axis in parts[:2])
        if around is None and between is None:
            return forward(*args, **kwargs)
        given = named.bind(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        inputs = {**given, **more}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        sequence, inputs = _cut(model, Parts(around, between, parts.way), inner, inputs)
        configs = {id(x): x for x in (getattr(module, "config", None) for module in model.modules()) if x is not None}
        with ExitStack() as stack:
            for config in configs.values():
                stack.enter_context(set_attributes(config, _attn_implementation_internal=NAME))
            stack.enter_context(replace_loss(model, _compute_loss))
            token = _sequence.set(sequence)
            stack.callback(_sequence.reset, token)
            output = forward(**inputs)
        return _join(model, sequence, output)

    return run


def _cut(model: Any, parts: Parts, inner: str, inputs: dict[str, Any]) -> tuple[Sequence, dict[str, Any]]:
    """What the forward knows of the whole sequence, and the inputs of this rank."""
    name = type(model).__name__
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None:
        raise FzeroError(f"{name}: input_ids", "is None, and it is what ranks have parts of", "give it by its name")
    (rows, length), (around, between, way) = tokens.shape[:2], parts
    axes, is_rotated = [axis for axis in (around, between) if axis is not None], way == "rotated" and around is not None
    outer, inner_ranks = (1 if axis is None else axis_size(axis) for axis in (around, between))
    multiple = outer * (math.lcm(2, inner_ranks) if is_rotated else inner_ranks)
    if length % multiple:
        along = " and ".join(f"{axis_size(axis)} ranks along {axis!r}" for axis in axes)
        problem = f"has {length} places, for {'2 chunks on each of ' if is_rotated else ''}{along}"
        way_out = f"pad to a multiple of {multiple}, such as by pad_to_multiple_of="
        raise FzeroError(f"{name}: input_ids", problem, way_out)
    _check_inputs(model, inputs)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        problem = f"has {mask.ndim} dims, and it is one of [rows, places] that ranks can read"
        raise FzeroError(f"{name}: attention_mask", problem, "give 1 for places that count, and 0 for padding")
    places, config = inputs.get("position_ids"), model.config
    if places is not None and places.ndim != 2:
        raise FzeroError(f"{name}: position_ids", f"has {places.ndim} dims", "give [rows, places]")
    has_cache = inputs.get("use_cache", getattr(config.get_text_config(), "use_cache", False))
    has_cache = has_cache and not (torch.is_grad_enabled() and _is_checkpointed(model))
    is_packed = places is not None and mask is None and not has_cache  # as transformers decides it
    labels, items = inputs.get("shift_labels"), inputs.get("num_items_in_batch")
    if labels is None and "labels" in inputs:
        labels = shift_labels(inputs["labels"])
    if labels is not None and items is None:
        items = (labels != IGNORED).sum()
    if "labels" not in inputs and labels is not None:
        raise FzeroError(f"{name}: shift_labels", "is given without labels", "give both")
    if labels is not None and not is_of_next_tokens(model):
        problem = "is no mean over labels of next tokens, and its parts on ranks have no known sum"
        raise FzeroError(f"{name}: its loss", problem, "leave labels out, and compute the loss of the logits")
    places = torch.arange(length, device=tokens.device).unsqueeze(0) if places is None else places
    own = {key: x for key, x in {**inputs, "position_ids": places}.items() if key in CUT and key != "shift_labels"}
    inputs = {key: x for key, x in inputs.items() if key not in (*CUT, *WHOLE)}
    order = parallel.order_rows(length, outer).to(tokens.device) if is_rotated else None

    def take(x: Tensor, *axes: Axis) -> Tensor:
        """This rank's places of a value of all places."""
        x = x if order is None else x.index_select(1, order)
        for axis in axes:
            x = take_block(x, axis, 1)
        return x

    in_layers = [axis for axis in axes if axis != between]  # the embedding is one of those that ranks share
    inputs |= {key: take(x, *(axes if key == "inputs_embeds" else in_layers)) for key, x in own.items()}
    # with a mask the model does not look for documents in a rank's positions
    ones = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)
    inputs |= {} if is_packed else {"attention_mask": ones if mask is None else mask}
    packed = places.expand(rows, -1) if is_packed else None
    labels = None if labels is None else take(labels, *axes)
    mask = None if mask is None else mask.bool()
    own_places = length // (outer * inner_ranks)
    sequence = Sequence(around, between, inner, way, order, length, own_places, mask, packed, labels, items, [])
    return sequence, {**inputs, "use_cache": False}


def _check_inputs(model: Any, inputs: dict[str, Any]) -> None:
    """Refuse inputs of which ranks cannot have parts."""
    name = type(model).__name__
    asked = {name: getattr(model.config.get_text_config(), name, None) for name in REFUSED}
    for key, x in {**asked, **inputs}.items():
        wants_parts = key in REFUSED and (isinstance(x, Tensor) or x)
        if wants_parts or (isinstance(x, Tensor) and key not in CUT + WHOLE) or key in find_caches(inputs):
            problem = "is given, and it is not known how ranks that have parts of a sequence share it"
            raise FzeroError(f"{name}: {key}", problem, "leave it out, or leave sp out")
    if inputs.get("ignore_index", IGNORED) != IGNORED:
        problem = f"is {inputs['ignore_index']}, and ranks count the labels that are not {IGNORED}"
        raise FzeroError(f"{name}: ignore_index", problem, f"leave it out, and give {IGNORED} in labels")


def _is_checkpointed(model: Any) -> bool:
    """Whether layers are computed again in the backward pass: transformers then makes no cache."""
    return any(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())


def _compute_loss(logits: Tensor, labels: Tensor, vocab_size: int, **how: Any) -> Tensor:
    """This rank's share of the loss."""
    sequence = _sequence.get()
    how = {**how, "shift_labels": sequence.labels, "num_items_in_batch": sequence.items}
    loss = ForCausalLMLoss(logits, None, vocab_size, **how)
    sequence.losses.append(loss)
    return loss


def _join(model: Any, sequence: Sequence, output: Any) -> Any:
    """An output of all places, the same on all ranks. What nobody reads is not gathered."""
    if not isinstance(output, dict):
        problem = f"is a {type(output).__name__}, whose values have no names"
        raise FzeroError(f"{type(model).__name__}: its output", problem, "leave return_dict out")
    if isinstance(output, ModelOutput) and not isinstance(output, OF_PLACES):
        problem = f"is a {type(output).__name__}, whose values are not known to be those of each place"
        raise FzeroError(f"{type(model).__name__}: its output", problem, "leave sp out")
    own, along = sequence.own, tuple(name for axis in sequence.axes for name in list_names(axis))

    def join(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(join(name, each) for each in x)
        if not isinstance(x, Tensor) or not set(along).intersection(find_parts(x)):
            return x
        if any(x is loss for loss in sequence.losses):
            return psum(x, along)
        if x.ndim < 2 or x.shape[1] != own:
            problem = f"has shape {list(x.shape)} on ranks that have {own} places each"
            raise FzeroError(f"{type(model).__name__}: output {name}", problem, "do not ask for it, or leave sp out")
        whole = x.movedim(1, 0).contiguous()
        for axis in reversed(sequence.axes):
            whole = all_gather(whole, axis)
        whole = whole.movedim(0, 1)
        return whole if sequence.order is None else whole.index_select(1, sequence.order.argsort())

    for name, x in list(output.items()):
        output[name] = join(name, x)
    return output


# attention


class _OfHeads:
    """A module as its attention reads it, where a rank has some of its heads."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any) -> Any:
    """The attention of a module to all places, [rows, places of this rank, heads, size], and no weights."""
    sequence = _sequence.get()
    axis, heads = sequence.around, query.shape[1]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(sequence.inner, eager)
    for name, x in how.items():
        if isinstance(x, Tensor) and name not in ("s_aux", "position_ids"):
            problem = f"has the input {name!r}, of which it is not known how ranks share it"
            raise FzeroError(type(module).__name__, problem, "leave sp out")
    if axis is None:
        return inner(module, query, key, value, attention_mask, **how)[0], None
    if sequence.order is not None:
        return rotate(module, query, key, value, attention_mask, axis, how), None
    if sequence.way == "keys":
        keys, values = (all_gather(x.movedim(2, 0).contiguous(), axis).movedim(0, 2) for x in (key, value))
        return inner(module, query, keys, values, attention_mask, **how)[0], None

    def attend_by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        replaced: dict[str, Any] = {"num_key_value_groups": q.shape[1] // k.shape[1]}
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            replaced["sinks"] = take_block(sinks, axis, 0)
        if how.get("s_aux") is not None:
            how["s_aux"] = replaced.get("sinks", how["s_aux"])
        return inner(_OfHeads(module, **replaced), q, k, v, attention_mask, **how)[0].transpose(1, 2)

    if heads % (world := axis_size(axis)):
        problem = f"has {heads} heads on this rank, and its model {world} ranks for them along {axis!r}"
        raise FzeroError(type(module).__name__, problem, "leave sp out")
    with leave_regions(only_local=True):  # a rank keeps as many bytes of what comes as of what it sends
        return parallel.ulysses(attend_by_heads, axis=axis)(query, key, value).transpose(1, 2), None


def make_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **how: Any) -> Any:
    """The mask that a model asks for: of all places, or with all keys of this rank's queries."""
    sequence = _sequence.get()
    if args or how.get("use_vmap"):
        problem = "makes masks by a function of its own, which may read what ranks have parts of"
        raise FzeroError("attention_mask: the model", problem, "leave sp out")
    function, length = how.pop("mask_function", masking_utils.causal_mask_function), sequence.length
    if sequence.order is not None:
        assert sequence.around is not None
        return read_sight(function, sequence.order, sequence.around, sequence.positions, sequence.mask)
    function = _widen(function, sequence.positions)
    rows, how["q_offset"] = length, 0
    if sequence.around is not None and sequence.way == "keys":
        rows = length // axis_size(sequence.around)
        how |= {"q_offset": axis_index(sequence.around, how.get("device", "cpu")) * rows, "allow_is_causal_skip": False}
    how |= {"attention_mask": sequence.mask, "mask_function": function}
    mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[sequence.inner]
    return mask(batch_size, rows, length, **how)


def _widen(function: Any, positions: Tensor | None) -> Any:
    """A function of the places of queries and keys, which a model made of `masking_utils`, for all places. `positions`
    are those of packed documents in the whole sequence, of which the model has seen a rank's part."""
    maker = function.__qualname__.partition(".")[0]
    cells = zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))
    held = dict(cells)
    if maker in ("and_masks", "or_masks"):
        return getattr(masking_utils, maker)(*(_widen(each, positions) for each in held["mask_functions"]))
    if maker == "remap_positions_for_packed_sequence":
        return masking_utils.remap_positions_for_packed_sequence(_widen(held["mask_function"], positions), positions)
    if maker == "packed_sequence_mask_function":
        documents = masking_utils.find_packed_sequence_indices(positions)
        return (
            masking_utils.bidirectional_mask_function if documents is None else getattr(masking_utils, maker)(documents)
        )
    if any(callable(x) or (isinstance(x, Tensor) and x.ndim > 1) for x in held.values()):
        problem = f"is made by {function.__qualname__}, which may read what ranks have parts of"
        raise FzeroError("attention_mask: that of the model", problem, "leave sp out")
    return function


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
