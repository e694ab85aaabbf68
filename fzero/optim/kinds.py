"""Kinds: optimizers by name, and the group of `fzero.optim` that each makes of params."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fzero.base.errors import FzeroError
from fzero.optim.adam8bit import adamw8bit
from fzero.optim.base import GradientTransformation, chain
from fzero.optim.blocks import scale_by_param_block_rms
from fzero.optim.clipping import clip_by_block_rms
from fzero.optim.factored import scale_by_factored_rms
from fzero.optim.muon import muon
from fzero.optim.newton_schulz import NewtonSchulz
from fzero.optim.presets import adafactor, adagrad, adam, adamw, amsgrad, lamb, lion, nadam, rmsprop, sgd
from fzero.optim.transforms import add_decayed_weights, scale_by_learning_rate

Make = Callable[..., GradientTransformation]


class Group(NamedTuple):
    """A group of parameters: which optimizer updates them, and at which rate."""

    make: Make  # takes `learning_rate` beside `options`
    rate: float
    options: dict[str, Any]
    paths: frozenset[str] | None = None  # None: all parameters


def make_group(kind: str, params: Mapping[str, Any], where: str, *, torch_defaults: bool = False) -> Group:
    """The group of all parameters, for an optimizer's type and params as a configuration names them. With
    `torch_defaults` a param that is missing has torch's default, and else that of DeepSpeed's optimizer.

    Raises:
        FzeroError: for a type that there is not; for a param that the type does not have, or that is not supported.
    """
    name = kind.lower()
    kinds = {**KINDS, **OF_OBJECTS} if torch_defaults else KINDS
    if name not in kinds:
        known = "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, RMSprop, NAdam and Adafactor"
        way_out = f"there are {known}; give initialize(optimizer=) any optimizer of fzero.optim"
        raise FzeroError(where, f"is {kind!r}, which is not supported", way_out)
    options = Options(dict(params), where)
    group = kinds[name](options, torch_defaults or options.flag("torch_adam", False))
    options.check_empty()
    return group


OF_SPEED = ("foreach", "fused", "capturable", "differentiable", "fp32_optimizer_states", "set_grad_none")
"""Params that change no number."""


class Options:
    """Params of an optimizer, taken one by one: a param that nobody takes is refused. `where` is what has the params,
    the argument "optimizer" or the key "optimizer.type"."""

    def __init__(self, given: dict[str, Any], where: str) -> None:
        self.given, self.where = given, f"{where.removesuffix('.type')}.params"
        self._known: list[str] = []  # what was asked for

    def take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        value = self.given.pop(name, default)
        return default if value is None else value

    def take_betas(self, default: tuple[float, float]) -> dict[str, float]:
        betas = self.take("betas", default)
        if not isinstance(betas, (list, tuple)) or len(betas) != 2 or not all(map(_is_decay, betas)):
            raise FzeroError(f"{self.where}.betas", f"is {betas!r:.80}", "give two numbers from 0 to below 1")
        return {"b1": float(betas[0]), "b2": float(betas[1])}

    def number(self, name: str, default: float, lowest: float = 0.0) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FzeroError(f"{self.where}.{name}", f"is {value!r:.80}, a {type(value).__name__}", "give a number")
        if not lowest <= value < float("inf"):
            way_out = "give a number" if lowest < 0 else "give a number from 0 on"
            raise FzeroError(f"{self.where}.{name}", f"is {value!r}", way_out)
        return float(value)

    def decay(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if not _is_decay(value):
            raise FzeroError(f"{self.where}.{name}", f"is {value!r}", "give a number from 0 to below 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise FzeroError(
                f"{self.where}.{name}", f"is {value!r:.80}, a {type(value).__name__}", "give true or false"
            )
        return value

    def check_empty(self) -> None:
        """Refuse what is left, but for options of speed, and for options whose value asks for nothing."""
        for name, value in self.given.items():
            if name in OF_SPEED or (name == "bias_correction" and value is True):
                continue
            if name == "max_grad_norm":
                raise FzeroError(f"{self.where}.{name}", f"is {value!r}", "give gradient_clipping, as DeepSpeed wants")
            if value is not None and value is not False:
                raise FzeroError(f"{self.where}.{name}", f"is {value!r}, which is not supported", self._suggest(name))

    def _suggest(self, name: str) -> str:
        """What to do about a param that nobody takes: `learning_rate` is near to `lr`, by its initials."""
        initials = "".join(word[:1] for word in name.split("_"))
        near = [x for x in self._known if x == initials] or difflib.get_close_matches(name, self._known, 1)
        return f"leave it out, or write {near[0]}, the nearest one" if near else "leave it out"


def _is_decay(value: Any) -> bool:
    """Whether a value is a number from 0 to below 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def _adam(options: Options, torch_defaults: bool, decoupled: bool) -> Group:
    rate = options.number("lr", 1e-3)
    decoupled = options.flag("decoupled_weight_decay", decoupled)
    mine = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine["weight_decay"] = options.number("weight_decay", 1e-2 if torch_defaults and decoupled else 0.0)
    if options.flag("amsgrad", False):
        return Group(amsgrad, rate, {**mine, "decoupled": decoupled})
    return Group(adamw if decoupled else adam, rate, mine)


def _make_adam(options: Options, torch_defaults: bool) -> Group:
    """DeepSpeed's Adam decouples the decay, unless `adam_w_mode` is false; torch's does not."""
    is_torch_object = torch_defaults and "decoupled_weight_decay" in options.given
    return _adam(options, torch_defaults, options.flag("adam_w_mode", not is_torch_object))


def _make_adamw(options: Options, torch_defaults: bool) -> Group:
    options.flag("adam_w_mode", True)
    return _adam(options, torch_defaults, True)


def _make_sgd(options: Options, torch_defaults: bool) -> Group:
    if options.number("dampening", 0.0):
        raise FzeroError(f"{options.where}.dampening", "is not 0, which is not supported", "leave it out")
    names = {"momentum": options.number("momentum", 0.0), "weight_decay": options.number("weight_decay", 0.0)}
    return Group(sgd, options.number("lr", 1e-3), {**names, "nesterov": options.flag("nesterov", False)})


def _make_adagrad(options: Options, torch_defaults: bool) -> Group:
    names = ("lr_decay", "weight_decay", "initial_accumulator_value")
    mine = {name: options.number(name, 0.0) for name in names}
    return Group(adagrad, options.number("lr", 1e-2), {**mine, "eps": options.number("eps", 1e-10)})


def _make_rmsprop(options: Options, torch_defaults: bool) -> Group:
    mine = {"decay": options.decay("alpha", 0.99), "eps": options.number("eps", 1e-8)}
    mine |= {name: options.number(name, 0.0) for name in ("weight_decay", "momentum")}
    centered = options.flag("centered", False)
    return Group(rmsprop, options.number("lr", 1e-2), {**mine, "centered": centered})


def _make_nadam(options: Options, torch_defaults: bool) -> Group:
    mine = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine |= {"momentum_decay": options.number("momentum_decay", 4e-3)}
    mine |= {"weight_decay": options.number("weight_decay", 0.0)}
    decoupled = options.flag("decoupled_weight_decay", False)
    return Group(nadam, options.number("lr", 2e-3), {**mine, "decoupled": decoupled})


def _make_lion(options: Options, torch_defaults: bool) -> Group:
    mine = {**options.take_betas((0.9, 0.999)), "weight_decay": options.number("weight_decay", 0.0)}
    return Group(lion, options.number("lr", 1e-3), mine)  # DeepSpeed's defaults, not the paper's


def _make_lamb(options: Options, torch_defaults: bool) -> Group:
    """DeepSpeed's FusedLamb."""
    mine: dict[str, Any] = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    mine["bounds"] = (options.number("min_coeff", 0.01), options.number("max_coeff", 10.0))
    mine["corrects"] = "rate" if options.flag("bias_correction", True) else "nothing"
    return Group(lamb, options.number("lr", 1e-3), mine)


def _make_adafactor(options: Options, torch_defaults: bool) -> Group:
    mine: dict[str, Any] = {"decay_rate": -options.number("beta2_decay", -0.8, lowest=-1e9)}
    eps = options.take("eps", (None, 1e-3))
    numbers = [x for i, x in enumerate(eps) if i or x is not None] if isinstance(eps, (list, tuple)) else []
    if not numbers or len(eps) != 2 or not all(map(_is_decay, numbers)):
        raise FzeroError(f"{options.where}.eps", f"is {eps!r:.80}", "give two numbers from 0 to below 1")
    mine |= {"eps": tuple(eps), "clipping_threshold": options.number("d", 1.0)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    return Group(adafactor, options.number("lr", 1e-2), mine)


def _make_adafactor_of_transformers(options: Options, torch_defaults: bool) -> Group:
    """transformers' Adafactor. It adds `eps[0]` to squares, where torch's has a floor."""
    if options.flag("relative_step", True):
        raise FzeroError(f"{options.where}.relative_step", "is true, which is not supported", "give false, and lr")
    if options.take("beta1", None) is not None:
        raise FzeroError(f"{options.where}.beta1", "is given, which is not supported", "leave it out")
    options.flag("warmup_init", False)
    mine: dict[str, Any] = {"decay_rate": -options.number("decay_rate", -0.8, lowest=-1e9)}
    mine |= {"eps": tuple(options.take("eps", (1e-30, 1e-3))), "threshold": options.number("clip_threshold", 1.0)}
    mine |= {"weight_decay": options.number("weight_decay", 0.0), "scales": options.flag("scale_parameter", True)}
    return Group(_update_by_factors, options.number("lr", 0.0), mine)


def _update_by_factors(
    learning_rate: Any,
    decay_rate: float,
    eps: tuple[float, float],
    threshold: float,
    weight_decay: float,
    scales: bool,
) -> GradientTransformation:
    """Adafactor whose rate is the given one, and with `scales` times the root mean square of the parameter."""
    return chain(
        scale_by_factored_rms(decay_rate, 1.2e-19, added=eps[0]),
        clip_by_block_rms(threshold),
        *([add_decayed_weights(weight_decay)] if weight_decay else []),
        *([scale_by_param_block_rms(eps[1])] if scales else []),
        scale_by_learning_rate(learning_rate),
    )


def _make_adamw8bit(options: Options, torch_defaults: bool) -> Group:
    """bitsandbytes' AdamW of 8 bits. A group with `optim_bits` 32 has moments of float32."""
    group = _adam(options, True, True)
    return group if options.take("optim_bits", 8) == 32 else group._replace(make=adamw8bit)


def _update_by_muon(learning_rate: Any, **how: Any) -> GradientTransformation:
    """Muon for all leaves of a group."""
    return muon(learning_rate, where=lambda path, leaf: True, **how)


def _make_torch_muon(options: Options, torch_defaults: bool) -> Group:
    mine = {name: options.number(name, default) for name, default in (("weight_decay", 0.1), ("momentum", 0.95))}
    adjust = options.take("adjust_lr_fn", "original")
    how = {"nesterov": options.flag("nesterov", True), "adjust": adjust, "eps": options.number("eps", 1e-7)}
    how |= {"ns_steps": options.take("ns_steps", 5)}
    how |= {"ns_coeffs": tuple(options.take("ns_coefficients", NewtonSchulz().coefficients))}
    return Group(partial(_update_by_muon, **how), options.number("lr", 1e-3), mine)


def make_muon(options: Options) -> Group:
    """The matrices of DeepSpeed's Muon. Both of its methods have one result, up to rounding."""
    method = options.take("ns_method", "gram")
    if method not in ("gram", "standard"):
        raise FzeroError(f"{options.where}.ns_method", f"is {method!r}", 'give "gram" or "standard"')
    for name in ("betas", "eps", "adam_w_mode"):
        options.take(name, None)
    mine = {name: options.number(name, default) for name, default in (("weight_decay", 0.0), ("momentum", 0.95))}
    return Group(_update_by_muon, options.number("lr", 0.02), mine)


def make_adam_beside_muon(options: Options) -> Group:
    """Adam for the parameters that DeepSpeed's Muon leaves, with the defaults that it has there."""
    for name in ("momentum", "ns_method"):
        options.take(name, None)
    mine = {**options.take_betas((0.9, 0.95)), "eps": options.number("eps", 1e-10)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    decoupled = options.flag("adam_w_mode", True)
    return Group(adamw if decoupled else adam, options.number("lr", 3e-4), mine)


KINDS: dict[str, Callable[[Options, bool], Group]] = {
    "adam": _make_adam,
    "adamw": _make_adamw,
    "sgd": _make_sgd,
    "adagrad": _make_adagrad,
    "rmsprop": _make_rmsprop,
    "nadam": _make_nadam,
    "lion": _make_lion,
    "lamb": _make_lamb,
    "adafactor": _make_adafactor,
    "muon": _make_torch_muon,  # of torch: DeepSpeed's is split before
}
"""Type in lower case -> the function that makes a group of its params."""
OF_OBJECTS: dict[str, Callable[[Options, bool], Group]] = {
    "adafactor of transformers": _make_adafactor_of_transformers,
    "adamw8bit": _make_adamw8bit,
}
"""Likewise, for optimizers that are objects, and no types of a configuration."""
