"""Generator: transformers' `generate`, whose forward passes are programs of slices."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from fzero import lower, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import mesh_shape
from fzero.hf.adapters import find_base, take_base
from fzero.hf.caches import (
    OLD_NAMES,
    Fixing,
    absorb,
    copy_cache,
    find_caches,
    find_decoder,
    is_filled,
    is_fixed,
    keep_new,
    round_up,
)
from fzero.hf.checks import check_model
from fzero.hf.sharing import check_sharable, check_whole, find_sharing, share_forwards
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import TensorPlan
from fzero.hf.turns import WHAT, Request, choose, fail
from fzero.hf.wishes import Wish, check_mesh_of
from fzero.ranks.agreement import meet
from fzero.ranks.live import find_ranks
from fzero.training.live import ModuleState
from fzero.training.models import copy_without_values
from fzero.training.programs import compile_function

PADDED = ("input_ids", "position_ids", "attention_mask")
"""The tensors of a prompt that may be padded. A prompt with other tensors keeps its length."""
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""The tensors [rows, length, ...] that a forward pass may read. The first that is given is what it reads."""
MAX_PROGRAMS = 64
SEAMS = (
    *("_prepare_cache_for_generation", "_supports_mm_encoder_outputs", "_valid_auto_compile_criteria"),
    "_can_compile_fullgraph",
)
"""The private names of transformers' models that are used here."""


class Generator:
    """transformers' `generate` for parameters in slices: `generator(params, input_ids, max_new_tokens=20)`.

        generator = fzero.hf.Generator(model, mesh)
        tokens = generator(params, **tokenizer(texts, return_tensors="pt", padding=True), num_beams=4)

    `model` is a model of transformers, or of peft, whose values may be on the meta device, and `params` its parameters
    in slices of `mesh`. The further arguments, and the result, are those of `model.generate`, whose loop runs:
    sampling, beams, stopping criteria, logits processors, streamers.

    * A prompt is one program, padded to a bucket: a power of two, at least 16.
    * Each further token is one program for all tokens of a cache. A cache has the length of a bucket.
    * All ranks call the generator together, each with its own prompts. A rank takes part in the programs of the others
      until all have their results.
    * On a `VirtualMesh` the rows of a prompt are cut over the ranks, so there are a multiple of the ranks.

    `call(apply, params, **inputs)` computes an output, and `how` are keywords of `fzero.shard`. `tp`, `ep`, `sp`
    and `plan` are those of `fzero.hf.parallel`, which split `params`: ranks along these axes call with the same
    prompts, and have the same random numbers. Ranks along `sp` each have all places of a prompt.

    Raises:
        FzeroError: for a model without `generate`; where another rank raises an error; with `tp`, `ep` or `sp` as
            `fzero.hf.parallel`.
    """

    @check_arguments
    def __init__(
        self,
        model: Any,
        mesh: Any,
        *,
        call: Callable[..., Any] | None = None,
        tp: Axis | None = None,
        ep: Axis | None = None,
        sp: Axis | None = None,
        plan: TensorPlan | None = None,
        **how: Any,
    ) -> None:
        self.given, self.mesh, self._wish = model, mesh, Wish(tp, ep, sp, plan)
        check_mesh_of(self._wish, mesh)
        check_sharable(self._wish, model, None)
        self._call = call or (lambda apply, params, **inputs: apply(params, **inputs))
        self._how = {"max_programs": MAX_PROGRAMS, **how}
        self._state: ModuleState | None = None  # of the model, with which the programs compute

    def __call__(self, params: tree.Tree, *args: Any, **named: Any) -> Any:
        session = _Session(self, take_base(self.given, params))
        named.pop("synced_gpus", None)  # ranks wait for each other in any case
        if self._state is not None and self._state.list_changes():
            del self.programs

        def generate() -> Any:
            _check(self.model)
            return self._bind(session).generate(*args, **named)

        with torch.no_grad():
            return session.run(generate)

    @functools.cached_property
    def model(self) -> Any:
        """The model of transformers."""
        return find_base(self.given)

    @functools.cached_property
    def programs(self) -> dict[str, Any]:
        """The steps "prompt", "token" and "encoder", by name."""
        self._state = ModuleState(self.model)
        model: Any = copy_without_values(self.model).eval()
        wish = self._wish._replace(sp=None)  # ranks along sp each have the prompts, and all places
        with share_forwards(model, find_sharing(model, wish, self.mesh)):
            apply = lower(model)[1]
            encode = lower(_Encoder(model))[1] if model.config.is_encoder_decoder else None
        data = (wish.find_data(self.mesh) or mesh_shape(self.mesh).names) if self._wish.axes else None
        how = {"data": data, **self._how}

        def forward(params: Any, inputs: dict[str, Any], count: Tensor | None) -> Any:
            given = find_caches(inputs)
            caches = {name: copy_cache(cache) for name, cache in given.items()}
            inputs = {**inputs, **caches}
            kept = inputs.get("logits_to_keep")
            if count is not None and kept:
                inputs["logits_to_keep"] = torch.arange(kept, device=count.device) + count - kept
            output = self._call(apply, params, **inputs)
            for name in caches.keys() & output.keys():  # the model filled them; `call` may have copied them since
                output[name] = keep_new(caches[name], given[name])
            return check_whole(output)

        def prompt(params: Any, inputs: dict[str, Any], count: Tensor | None) -> Any:
            return forward(params, inputs, count)

        def token(params: Any, inputs: dict[str, Any]) -> Any:
            return forward(params, inputs, None)

        def encoder(params: Any, inputs: dict[str, Any]) -> Any:
            assert encode is not None
            return encode({"model": params}, **inputs)

        made: dict[str, Callable[..., Any]] = {"prompt": prompt, "token": token, "encoder": encoder}
        return {
            name: compile_function(function, self.mesh, title=f"generate: forward pass of a {name}", **how)
            for name, function in made.items()
        }

    @property
    def device(self) -> torch.device:
        return find_ranks(self.mesh).choose_device()

    def _bind(self, session: _Session) -> Any:
        """The model as `generate` takes it: its forward passes are those of a session."""
        cls: Any = type(self.model)

        def prepare_cache(bound: Any, config: Any, inputs: Any, mode: Any, batch_size: int, length: int) -> None:
            if config.cache_implementation not in (None, "static", "dynamic"):
                problem = f"is {config.cache_implementation!r}, which a program cannot fill"
                raise FzeroError("generate: cache_implementation", problem, "leave it out, or give 'static'")
            is_kept = config.return_dict_in_generate or _find_cache(inputs) is not None
            cls._prepare_cache_for_generation(bound, config, inputs, mode, batch_size, length)
            cache = _find_cache(inputs)
            if cache is not None and mode != GenerationMode.ASSISTED_GENERATION and _may_fix(self.model, config):
                fixing = Fixing(cache, math.ceil(max(length, config.max_cache_len or 0)), self.device)
                if is_kept:
                    session.at_end.append(fixing.undo)

        replaced: dict[str, Any] = {
            "device": property(lambda _: self.device),
            "_prepare_cache_for_generation": prepare_cache,
            "_supports_mm_encoder_outputs": lambda _: False,  # images are read by the program of the prompt
            "_valid_auto_compile_criteria": lambda *_: False,  # `how` says what is compiled
        }
        if self.model.config.is_encoder_decoder:
            encoder = _replace(self.model.get_encoder(), session.encode)
            replaced["get_encoder"] = lambda *_, **__: encoder
        return _replace(self.model, session.forward, **replaced)


class _Session:
    """The forward passes of one call of `generate`."""

    def __init__(self, generator: Generator, params: tree.Tree) -> None:
        self._generator, self._params = generator, params
        self._members = find_ranks(generator.mesh).members
        self._is_over = False  # all ranks have ended
        self.at_end: list[Callable[[], None]] = []

    def run(self, generate: Callable[[], Any]) -> Any:
        """The result of `generate`, once all ranks have theirs."""
        meet(self._members, WHAT)
        try:
            result = generate()
            if not self._members.is_alone:
                self._perform(None)
            return result
        except Exception as error:
            if not self._members.is_alone and not self._is_over:
                fail(self._members, error)
            raise
        except BaseException as error:
            self._members.leave("generate", error)
            raise
        finally:
            for act in self.at_end:
                act()

    def forward(self, **inputs: Any) -> Any:
        """The output of the model, whose cache is the given one."""
        rows, count = _count(inputs)
        inputs = _spread(inputs, rows)
        given = find_caches(inputs)
        if count == 1:
            output = self._perform(Request("token", (inputs,)))
        else:
            padded = _pad(inputs, count)
            number = None if padded is None else torch.tensor(count, device=self._generator.device)
            output = self._perform(Request("prompt", (inputs if padded is None else padded, number)))
            if padded is not None and not inputs.get("logits_to_keep"):
                output["logits"] = output["logits"][:, :count]
        for name in given.keys() & output.keys():
            output[name] = absorb(given[name], output[name], count)
        is_returned = find_caches(output) or any(output.get(name) is not None for name in OLD_NAMES)
        if inputs.get("use_cache") and not (is_returned and all(map(is_filled, given.values()))):
            # attention sees both sides, so that each token changes what others see; or the module keeps the state
            problem = f"{type(self._generator.model).__name__} fills no cache"
            raise FzeroError("generate", problem, "set is_decoder=True in its config, or give use_cache=False")
        return output

    def encode(self, **inputs: Any) -> Any:
        return self._perform(Request("encoder", (inputs,)))

    def _perform(self, wanted: Request | None) -> Any:
        """The output of a program, after those that other ranks want first. With None, those of the others alone."""
        while True:
            try:
                chosen, is_own = (wanted, True)
                if not self._members.is_alone:
                    chosen, is_own = choose(self._members, self._generator.device, wanted)
                if chosen is None:
                    return None
                output = self._generator.programs[chosen.program](self._params, *chosen.arguments)
            except Exception:
                self._is_over = True  # all ranks learn of an error of a program
                raise
            if is_own:
                return output


class _Encoder(nn.Module):
    """The encoder of a model, with the parameters of the whole model: some may be tied."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model.get_encoder()(**inputs)


def _replace(module: nn.Module, call: Callable[..., Any], **replaced: Any) -> Any:
    """A module with the attributes and methods of `module`, except for those that are `replaced`, and its forward:
    `call` with all arguments by name."""
    cls: Any = type(module)
    names = list(inspect.signature(module.forward).parameters)

    @functools.wraps(cls.forward)
    def forward(_: Any, *args: Any, **inputs: Any) -> Any:
        return call(**dict(zip(names, args)), **inputs)

    made: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward, **replaced})
    bound = made.__new__(made)
    vars(bound).update({name: x for name, x in vars(module).items() if name != "forward"})  # that was put over another
    return bound


def _check(model: Any) -> None:
    check_model(model)
    if not isinstance(model, GenerationMixin):
        problem = f"{type(model).__name__} has no generate"
        raise FzeroError("generate", problem, "give a model with a head for it, such as AutoModelForCausalLM makes")
    missing = [name for name in SEAMS if not hasattr(model, name)]
    if missing:
        problem = f"is {transformers.__version__}, whose models have no {missing[0]}"
        raise FzeroError("transformers", problem, "install transformers 5.22 or later")


def _find_cache(inputs: dict[str, Any]) -> Any:
    return next(iter(find_caches(inputs).values()), None)


def _may_fix(model: Any, config: Any) -> bool:
    """Whether caches may have a fixed length, apart from their layers. Flash attention wants other masks, and attention
    that is returned has the length of the cache."""
    return (
        config.cache_implementation in (None, "static")
        and not config.output_attentions
        and model._can_compile_fullgraph
        and "flash" not in str(model.config._attn_implementation)
    )


def _count(inputs: dict[str, Any]) -> tuple[int, int]:
    """The number of rows that a forward pass reads, and of tokens in each."""
    for name in TOKENS:
        if inputs.get(name) is not None:
            return inputs[name].shape[0], inputs[name].shape[1]
    raise FzeroError("generate", f"calls the model with {sorted(inputs)}, without {TOKENS[2]}", "give input_ids")


def _spread(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Tensors of one row, such as positions without padding, become tensors of all rows."""

    def spread(x: Any) -> Any:
        is_one = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] == 1 < rows
        return x.expand(rows, *x.shape[1:]).contiguous() if is_one else x

    caches = find_caches(inputs)
    return {name: x if name in caches else tree.map(spread, x) for name, x in inputs.items()}


def _pad(inputs: dict[str, Any], count: int) -> dict[str, Any] | None:
    """A prompt with padding behind it, up to its bucket. What comes later does not change what a token sees, and is not
    written into a cache of fixed length. None for other inputs, which keep their length."""
    caches, cache = find_caches(inputs), _find_cache(inputs)
    given = [(name, x) for name, x in inputs.items() if name not in caches]
    tensors = {name for name, x in given if any(isinstance(leaf, Tensor) for leaf in tree.leaves(x))}
    is_plain = {"input_ids", "position_ids"} <= tensors <= set(PADDED)
    asked = any(inputs.get(name) for name in ("output_hidden_states", "output_attentions"))
    masks = tree.leaves(inputs.get("attention_mask"))
    if not is_plain or asked or (cache is not None and not is_fixed(cache)):
        return None
    if any(mask.ndim != (2 if cache is None else 4) for mask in masks):
        return None
    if not masks and cache is None:  # attention may see what comes later
        masks = [torch.ones_like(inputs["input_ids"])]
    room, is_square = round_up(count), True
    if cache is not None and cache.is_initialized:
        layer, is_square = find_decoder(cache).layers[0], False
        room = min(room, layer.keys.shape[2] - int(layer.get_seq_length()))
    more = room - count

    def pad_mask(mask: Tensor) -> Tensor:
        if mask.ndim == 2:
            return nn.functional.pad(mask, (0, more))
        hidden, seen = (0, 1) if mask.dtype == torch.bool else (torch.finfo(mask.dtype).min, 0)
        mask = nn.functional.pad(mask, (0, more if is_square else 0), value=hidden)
        return nn.functional.pad(mask, (0, 0, 0, more), value=seen)

    padded = {name: nn.functional.pad(inputs[name], (0, more)) for name in ("input_ids", "position_ids")}
    mask = inputs.get("attention_mask") if cache is not None else masks[0]
    return {**inputs, **padded, "attention_mask": tree.map(pad_mask, mask)}
