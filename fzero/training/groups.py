"""Optimizers: a type and params of a configuration, or an optimizer of torch, as optimizers of `fzero.optim`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import optim
from fzero.base.errors import FzeroError
from fzero.optim.base import GradientTransformation
from fzero.optim.newton_schulz import NewtonSchulz

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
    if name not in _KINDS:
        known = "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, RMSprop, NAdam and Adafactor"
        way_out = f"there are {known}; give initialize(optimizer=) any optimizer of fzero.optim"
        raise FzeroError(where, f"is {kind!r}, which is not supported", way_out)
    options = _Options(dict(params), where)
    group = _KINDS[name](options, torch_defaults or options.flag("torch_adam", False))
    options.check_empty()
    return group


def convert_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Group]:
    """The groups of an optimizer of torch, by its exact type.

    Raises:
        FzeroError: for a type that is not converted, a parameter that is not the model's, and an optimizer that has
            made steps already.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch" or kind.__name__.lower() not in _KINDS:
        problem = f"is a {kind.__module__}.{kind.__name__}, which is not converted"
        raise FzeroError("optimizer", problem, "give an optimizer of torch.optim or of fzero.optim, or a configuration")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # a new Adagrad has states at step 0
        raise FzeroError("optimizer", "has made steps already", "give a new one, and load its state from a checkpoint")
    return list_groups(kind.__name__, {}, optimizer.param_groups, model, "optimizer", torch_defaults=True)


def list_groups(
    kind: str,
    params: Mapping[str, Any],
    groups: Iterable[Any],
    model: nn.Module,
    where: str,
    *,
    torch_defaults: bool = False,
) -> list[Group]:
    """One group for each dict of parameters, with the params of all groups and its own; parameters outside of dicts
    are one more group.

    Raises:
        FzeroError: for a parameter that is not the model's, or that is in two groups.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[Group] = []
    if not isinstance(groups, Iterable) or isinstance(groups, (str, bytes)):
        raise FzeroError(where, f"is {groups!r:.80}", "give parameters, or a list of dicts of parameters")
    members = list(groups)
    if not members:
        way_out = "give model.parameters() itself; an iterator that was read before is empty"
        raise FzeroError("model_parameters", "has no parameter", way_out)
    loose = [member for member in members if not isinstance(member, Mapping)]
    dicts = [member for member in members if isinstance(member, Mapping)] + [{"params": loose}] * bool(loose)
    seen: set[str] = set()
    for number, member in enumerate(dicts):
        if "params" not in member:
            way_out = "give each group as {'params': [...], ...}"
            raise FzeroError(where, f"group {number} has {list(member)}, and no 'params'", way_out)
        given = member["params"]
        paths = {_find_name(x, names, number) for x in ([given] if isinstance(given, torch.Tensor) else given)}
        if paths & seen:
            raise FzeroError(min(paths & seen), "is in two groups of parameters", "put it into one")
        seen |= paths
        own = {name: value for name, value in member.items() if name not in _OF_SCHEDULERS}
        if kind.lower() == "muon" and not torch_defaults:
            found += _split_for_muon(params, own, paths, model, where)
        else:
            group = make_group(kind, {**params, **own}, where, torch_defaults=torch_defaults)
            found.append(group._replace(paths=frozenset(paths)))
    return found


def _split_for_muon(
    params: Mapping[str, Any], own: Mapping[str, Any], paths: Iterable[str], model: nn.Module, where: str
) -> Iterator[Group]:
    """The groups of DeepSpeed's Muon: its matrices, and Adam for all others. DeepSpeed takes each trained parameter of
    2 or more dimensions for a matrix, unless its name says that it is an embedding or a head. A rate of a group's own
    goes before `muon_lr` and `adam_lr`, which go before `lr`."""
    trained = {path: x for path, x in model.named_parameters() if x.requires_grad}
    words = ("embed", "lm_head")
    is_matrix = {
        path: trained[path].ndim >= 2 and not any(word in path.lower() for word in words)
        for path in paths
        if path in trained
    }
    of_halves = {"muon_lr", "adam_lr"}
    for make, rate, chosen in ((_make_muon, "muon_lr", True), (_make_adam_beside_muon, "adam_lr", False)):
        members = frozenset(path for path, value in is_matrix.items() if value is chosen)
        if not members:
            continue
        given = {name: value for name, value in params.items() if name not in of_halves}
        given |= {"lr": _Options(dict(params), where).number(rate, 0.0)} if rate in params else {}
        options = _Options({**given, **own}, where)
        group = make(options)
        options.check_empty()
        yield group._replace(paths=members)


_OF_SCHEDULERS = (
    *("params", "param_names", "initial_lr", "max_lr", "min_lr", "initial_momentum", "max_momentum", "base_momentum"),
)
"""What is in a group of torch and is no param of its optimizer: schedulers write most of these."""


_OF_SPEED = ("foreach", "fused", "capturable", "differentiable", "fp32_optimizer_states", "set_grad_none")
"""Params that change no number."""


def list_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group of an optimizer has beside parameters and its rate: what programs take once."""
    left_out = {*_OF_SCHEDULERS, *_OF_SPEED, "lr"}
    return [{name: x for name, x in group.items() if name not in left_out} for group in optimizer.param_groups]


def check_options(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups whose options are no longer those of `list_options` `before`.

    Raises:
        FzeroError: naming the group, the option and both values.
    """
    way_out = "give the value to the Trainer at first; a rate, lr, may change at each update"
    now = list_options(optimizer)
    if len(now) != len(before):
        raise FzeroError("optimizer", f"had {len(before)} groups of parameters and has {len(now)}", way_out)
    for number, (old, new) in enumerate(zip(before, now)):
        for name in old.keys() & new.keys():
            if old[name] != new[name]:
                problem = f"was {old[name]!r} when the state was made, and is {new[name]!r}"
                raise FzeroError(f"optimizer: group {number}: {name}", problem, way_out)


def _find_name(parameter: Any, names: Mapping[int, str], number: int) -> str:
    parameter = parameter[1] if isinstance(parameter, tuple) else parameter  # of named_parameters()
    if id(parameter) not in names:
        shape = tuple(getattr(parameter, "shape", ()))
        problem = f"group {number} has a {type(parameter).__name__} of shape {shape} that is no parameter of the model"
        raise FzeroError("model_parameters", problem, "give parameters of the model that is trained")
    return names[id(parameter)]


def combine(groups: Sequence[Group], schedules: Sequence[Mapping[str, Any]]) -> GradientTransformation:
    """One optimizer of all groups. `schedules` has for each group the hyperparameters that change, such as
    `learning_rate`. A parameter outside of all groups is not updated."""
    made = [
        optim.inject_hyperparams(group.make)(**{**group.options, **changing})
        for group, changing in zip(groups, schedules)
    ]
    return join(groups, made)


def join(groups: Sequence[Group], made: Sequence[GradientTransformation]) -> GradientTransformation:
    """One optimizer of these optimizers, one for each group. A parameter outside of all groups is not updated."""
    if len(made) == 1 and groups[0].paths is None:
        return made[0]
    label = {path: str(number) for number, group in enumerate(groups) for path in group.paths or ()}
    transforms = {str(number): each for number, each in enumerate(made)} | {"none": optim.set_to_zero()}
    return optim.multi_transform(transforms, lambda path, leaf: label.get(path, "none"))


class _Options:
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
            if name in _OF_SPEED or (name == "bias_correction" and value is True):
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


def _adam(options: _Options, torch_defaults: bool, decoupled: bool) -> Group:
    rate = options.number("lr", 1e-3)
    decoupled = options.flag("decoupled_weight_decay", decoupled)
    mine = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine["weight_decay"] = options.number("weight_decay", 1e-2 if torch_defaults and decoupled else 0.0)
    if options.flag("amsgrad", False):
        return Group(optim.amsgrad, rate, {**mine, "decoupled": decoupled})
    return Group(optim.adamw if decoupled else optim.adam, rate, mine)


def _make_adam(options: _Options, torch_defaults: bool) -> Group:
    """DeepSpeed's Adam decouples the decay, unless `adam_w_mode` is false; torch's does not."""
    is_torch_object = torch_defaults and "decoupled_weight_decay" in options.given
    return _adam(options, torch_defaults, options.flag("adam_w_mode", not is_torch_object))


def _make_adamw(options: _Options, torch_defaults: bool) -> Group:
    options.flag("adam_w_mode", True)
    return _adam(options, torch_defaults, True)


def _make_sgd(options: _Options, torch_defaults: bool) -> Group:
    if options.number("dampening", 0.0):
        raise FzeroError(f"{options.where}.dampening", "is not 0, which is not supported", "leave it out")
    names = {"momentum": options.number("momentum", 0.0), "weight_decay": options.number("weight_decay", 0.0)}
    return Group(optim.sgd, options.number("lr", 1e-3), {**names, "nesterov": options.flag("nesterov", False)})


def _make_adagrad(options: _Options, torch_defaults: bool) -> Group:
    names = ("lr_decay", "weight_decay", "initial_accumulator_value")
    mine = {name: options.number(name, 0.0) for name in names}
    return Group(optim.adagrad, options.number("lr", 1e-2), {**mine, "eps": options.number("eps", 1e-10)})


def _make_rmsprop(options: _Options, torch_defaults: bool) -> Group:
    mine = {"decay": options.decay("alpha", 0.99), "eps": options.number("eps", 1e-8)}
    mine |= {name: options.number(name, 0.0) for name in ("weight_decay", "momentum")}
    centered = options.flag("centered", False)
    return Group(optim.rmsprop, options.number("lr", 1e-2), {**mine, "centered": centered})


def _make_nadam(options: _Options, torch_defaults: bool) -> Group:
    mine = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine |= {"momentum_decay": options.number("momentum_decay", 4e-3)}
    mine |= {"weight_decay": options.number("weight_decay", 0.0)}
    decoupled = options.flag("decoupled_weight_decay", False)
    return Group(optim.nadam, options.number("lr", 2e-3), {**mine, "decoupled": decoupled})


def _make_lion(options: _Options, torch_defaults: bool) -> Group:
    mine = {**options.take_betas((0.9, 0.999)), "weight_decay": options.number("weight_decay", 0.0)}
    return Group(optim.lion, options.number("lr", 1e-3), mine)  # DeepSpeed's defaults, not the paper's


def _make_lamb(options: _Options, torch_defaults: bool) -> Group:
    """DeepSpeed's FusedLamb."""
    mine: dict[str, Any] = {**options.take_betas((0.9, 0.999)), "eps": options.number("eps", 1e-8)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    mine["bounds"] = (options.number("min_coeff", 0.01), options.number("max_coeff", 10.0))
    mine["corrects"] = "rate" if options.flag("bias_correction", True) else "nothing"
    return Group(optim.lamb, options.number("lr", 1e-3), mine)


def _make_adafactor(options: _Options, torch_defaults: bool) -> Group:
    mine: dict[str, Any] = {"decay_rate": -options.number("beta2_decay", -0.8, lowest=-1e9)}
    eps = options.take("eps", (None, 1e-3))
    numbers = [x for i, x in enumerate(eps) if i or x is not None] if isinstance(eps, (list, tuple)) else []
    if not numbers or len(eps) != 2 or not all(map(_is_decay, numbers)):
        raise FzeroError(f"{options.where}.eps", f"is {eps!r:.80}", "give two numbers from 0 to below 1")
    mine |= {"eps": tuple(eps), "clipping_threshold": options.number("d", 1.0)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    return Group(optim.adafactor, options.number("lr", 1e-2), mine)


def _update_by_muon(learning_rate: Any, **how: Any) -> GradientTransformation:
    """Muon for all leaves of a group."""
    return optim.muon(learning_rate, where=lambda path, leaf: True, **how)


def _make_torch_muon(options: _Options, torch_defaults: bool) -> Group:
    mine = {name: options.number(name, default) for name, default in (("weight_decay", 0.1), ("momentum", 0.95))}
    adjust = options.take("adjust_lr_fn", "original")
    how = {"nesterov": options.flag("nesterov", True), "adjust": adjust, "eps": options.number("eps", 1e-7)}
    how |= {"ns_steps": options.take("ns_steps", 5)}
    how |= {"ns_coeffs": tuple(options.take("ns_coefficients", NewtonSchulz().coefficients))}
    return Group(partial(_update_by_muon, **how), options.number("lr", 1e-3), mine)


def _make_muon(options: _Options) -> Group:
    """The matrices of DeepSpeed's Muon. Both of its methods have one result, up to rounding."""
    method = options.take("ns_method", "gram")
    if method not in ("gram", "standard"):
        raise FzeroError(f"{options.where}.ns_method", f"is {method!r}", 'give "gram" or "standard"')
    for name in ("betas", "eps", "adam_w_mode"):
        options.take(name, None)
    mine = {name: options.number(name, default) for name, default in (("weight_decay", 0.0), ("momentum", 0.95))}
    return Group(_update_by_muon, options.number("lr", 0.02), mine)


def _make_adam_beside_muon(options: _Options) -> Group:
    """Adam for the parameters that DeepSpeed's Muon leaves, with the defaults that it has there."""
    for name in ("momentum", "ns_method"):
        options.take(name, None)
    mine = {**options.take_betas((0.9, 0.95)), "eps": options.number("eps", 1e-10)}
    mine["weight_decay"] = options.number("weight_decay", 0.0)
    decoupled = options.flag("adam_w_mode", True)
    return Group(optim.adamw if decoupled else optim.adam, options.number("lr", 3e-4), mine)


_KINDS: dict[str, Callable[[_Options, bool], Group]] = {
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
