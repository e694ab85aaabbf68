"""Each optimizer of torch.optim, written by hand as a pure function, in a training step on three virtual ranks.

A function takes a parameter, its gradient, its state by name and the number of the step, and returns the new parameter
and state; its options are torch's. Parameters after each of three steps are compared with those of the same function in
plain torch, and these with torch.optim's own, which keeps some numbers in float32 or bfloat16 whatever the dtype is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conformance.database import DEVICE
from conformance.verdict import (
    DTYPES,
    MESH,
    Cell,
    Trial,
    Verdict,
    choose_place,
    choose_stages,
    compare_lists,
    compare_runs,
    describe,
)
from torch import Tensor

import fzero

State = dict[str, Any]

FORMS = ("donate", "keep")
"""Whether a step updates its state in place."""


def with_decay(p: Any, g: Any, weight_decay: float, maximize: bool) -> Any:
    """The gradient as torch's optimizers take it."""
    g = -g if maximize else g
    return g + weight_decay * p if weight_decay else g


def sgd(p, g, s, t, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    if not momentum:
        return p - lr * g, s
    buffer = torch.where(t == 1, g, momentum * s["momentum"] + (1 - dampening) * g)
    return p - lr * (g + momentum * buffer if nesterov else buffer), {"momentum": buffer}


def adam(p, g, s, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    m, v = torch.lerp(s["m"], g, 1 - betas[0]), betas[1] * s["v"] + (1 - betas[1]) * g * g
    s = {"m": m, "v": v, "peak": torch.maximum(s["peak"], v)}
    rate = lr / (1 - betas[0] ** t)
    return p - rate * m / ((s["peak" if amsgrad else "v"] / (1 - betas[1] ** t)).sqrt() + eps), s


def adamw(p, g, s, t, lr=1e-3, weight_decay=1e-2, **options):
    return adam(p * (1 - lr * weight_decay), g, s, t, lr, **options)


def adamax(p, g, s, t, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    m, peak = torch.lerp(s["m"], g, 1 - betas[0]), torch.maximum(betas[1] * s["peak"], g.abs() + eps)
    return p - lr / (1 - betas[0] ** t) * m / peak, {"m": m, "peak": peak}


def nadam(p, g, s, t, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, momentum_decay=4e-3,
          decoupled_weight_decay=False, maximize=False):  # fmt: skip
    g = with_decay(p, g, 0 if decoupled_weight_decay else weight_decay, maximize)
    p = p * (1 - lr * weight_decay) if decoupled_weight_decay else p
    m, v = torch.lerp(s["m"], g, 1 - betas[0]), betas[1] * s["v"] + (1 - betas[1]) * g * g
    now, later = (betas[0] * (1 - 0.5 * 0.96 ** (k * momentum_decay)) for k in (t, t + 1))
    product = s["product"] * now
    scale = (v / (1 - betas[1] ** t)).sqrt() + eps
    update = (1 - now) / (1 - product) * g / scale + later / (1 - product * later) * m / scale
    return p - lr * update, {"m": m, "v": v, "product": product}


def radam(p, g, s, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, decoupled_weight_decay=False,
          maximize=False):  # fmt: skip
    g = with_decay(p, g, 0 if decoupled_weight_decay else weight_decay, maximize)
    p = p * (1 - lr * weight_decay) if decoupled_weight_decay else p
    m, v = torch.lerp(s["m"], g, 1 - betas[0]), betas[1] * s["v"] + (1 - betas[1]) * g * g
    most, correction = 2 / (1 - betas[1]) - 1, 1 - betas[1] ** t
    length = most - 2 * t * betas[1] ** t / correction
    rectified = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)).clamp(min=0).sqrt()
    factor = torch.where(length > 5, rectified * correction.sqrt() / (v.sqrt() + eps), 1.0)
    return p - lr * m / (1 - betas[0] ** t) * factor, {"m": m, "v": v}


def adagrad(p, g, s, t, lr=1e-2, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    total = torch.addcmul(s["total"], g, g)
    return p - lr / (1 + (t - 1) * lr_decay) * g / (total.sqrt() + eps), {"total": total}


def adadelta(p, g, s, t, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    squares = s["squares"].mul(rho).addcmul(g, g, value=1 - rho)
    delta = (s["deltas"] + eps).sqrt() / (squares + eps).sqrt() * g
    return p - lr * delta, {"squares": squares, "deltas": rho * s["deltas"] + (1 - rho) * delta.square()}


def adafactor(p, g, s, t, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False):
    g = -g if maximize else g
    tiny, weight = eps[0] or torch.finfo(p.dtype).eps, t**beta2_decay
    alpha = torch.clamp(p.norm() / p.numel() ** 0.5, min=eps[1]) * torch.clamp(t**-0.5, max=lr)
    p = p * (1 - lr * weight_decay)
    if p.ndim > 1:
        s = {
            "rows": s["rows"].lerp(g.norm(dim=-1, keepdim=True).square() / g.shape[-1], weight),
            "columns": s["columns"].lerp(g.norm(dim=-2, keepdim=True).square() / g.shape[-2], weight),
        }
        variance = s["rows"] @ s["columns"] / s["rows"].mean(dim=-2, keepdim=True).clamp(min=tiny)
    else:
        s = {"variance": s["variance"].lerp(g * g, weight)}
        variance = s["variance"]
    update = variance.clamp(min=tiny * tiny).rsqrt() * g
    return p - alpha / torch.clamp(update.norm() / (update.numel() ** 0.5 * d), min=1.0) * update, s


def asgd(p, g, s, t, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    p = p * (1 - lambd * s["eta"]) - s["eta"] * g
    average = torch.where(s["mu"] == 1, p, s["average"] + s["mu"] * (p - s["average"]))
    eta = lr / (1 + lambd * lr * t) ** alpha
    return p, {"average": average, "eta": s["eta"] * 0 + eta, "mu": 1 / torch.clamp(s["mu"] * 0 + t - t0, min=1.0)}


def rmsprop(p, g, s, t, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0, momentum=0, centered=False, maximize=False):
    g = with_decay(p, g, weight_decay, maximize)
    squares, mean = alpha * s["squares"] + (1 - alpha) * g * g, torch.lerp(s["mean"], g, 1 - alpha)
    update = g / ((squares - mean * mean if centered else squares).sqrt() + eps)
    buffer = momentum * s["buffer"] + update
    return p - lr * (buffer if momentum else update), {"squares": squares, "mean": mean, "buffer": buffer}


def rprop(p, g, s, t, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50), maximize=False):
    g = -g if maximize else g
    sign = (g * s["previous"]).sign()
    factor = torch.where(sign > 0, etas[1], torch.where(sign < 0, etas[0], 1.0))
    size = (s["size"] * factor).clamp(*step_sizes)
    g = torch.where(sign < 0, 0.0, g)
    return p - g.sign() * size, {"previous": g, "size": size}


def muon(p, g, s, t, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, eps=1e-7, ns_steps=5,
         ns_coefficients=(3.4445, -4.775, 2.0315), adjust_lr_fn=None):  # fmt: skip
    a, b, c = ns_coefficients
    buffer = torch.lerp(s["buffer"], g, 1 - momentum)
    x = (torch.lerp(g, buffer, momentum) if nesterov else buffer).bfloat16()
    x = x.T if p.shape[0] > p.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.T if p.shape[0] > p.shape[1] else x
    long, wide = p.shape
    ratio = 0.2 * max(long, wide) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1, long / wide) ** 0.5
    return p * (1 - lr * weight_decay) - lr * ratio * x, {"buffer": buffer}


def sparse_adam(p, g, s, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, maximize=False):
    g = -g if maximize else g
    m, v = s["m"] + (1 - betas[0]) * (g - s["m"]), s["v"] + (1 - betas[1]) * (g * g - s["v"])
    return p - lr * (1 - betas[1] ** t).sqrt() / (1 - betas[0] ** t) * m / (v.sqrt() + eps), {"m": m, "v": v}


HISTORY = 3


def lbfgs(params, grads, state, t, lr=1.0, **tolerances):
    """One iteration a step; takes all parameters at once. History that is not there yet has `ro` 0."""
    shapes = [p.shape for p in params.values()]
    flat, before, moved = (torch.cat([x.reshape(-1) for x in xs.values()]) for xs in (grads, state["g"], state["s"]))
    y = flat - before
    ys = y.dot(moved)
    keeps = (ys > 1e-10) & (t > 1)
    ys = torch.where(keeps, ys, 1.0)
    ydots = torch.cat((state["ydots"][1:], (ys / torch.where(keeps, y.dot(y), 1.0)).reshape(1)))
    pushed = {"y": y[None], "s_old": moved[None], "ro": (1 / ys).reshape(1)}
    pushed = {key: torch.where(keeps, torch.cat((state[key][1:], row)), state[key]) for key, row in pushed.items()}
    pushed["ydots"] = torch.where(keeps, ydots, state["ydots"])
    q, al = -flat, {}
    for i in reversed(range(HISTORY)):
        al[i] = pushed["s_old"][i].dot(q) * pushed["ro"][i]
        q = q - al[i] * pushed["y"][i]
    r = q * pushed["ydots"][-1]
    for i in range(HISTORY):
        r = r + pushed["s_old"][i] * (al[i] - pushed["y"][i].dot(r) * pushed["ro"][i])
    step = lr * torch.where(t == 1, torch.clamp(1 / flat.abs().sum(), max=1.0), 1.0) * r
    parts = [part.reshape(shape) for part, shape in zip(step.split([x.numel() for x in shapes]), shapes)]
    moves = {key: 0 * p + part for (key, p), part in zip(params.items(), parts)}
    return {key: params[key] + moves[key] for key in params}, {**pushed, "g": grads, "s": moves}


RULES: dict[str, Callable[..., Any]] = {
    "Adadelta": adadelta, "Adafactor": adafactor, "Adagrad": adagrad, "Adam": adam, "AdamW": adamw, "Adamax": adamax,
    "ASGD": asgd, "Muon": muon, "NAdam": nadam, "RAdam": radam, "RMSprop": rmsprop, "Rprop": rprop, "SGD": sgd,
    "SparseAdam": sparse_adam, "LBFGS": lbfgs,
}  # fmt: skip

ZEROS = {
    "Adadelta": "squares deltas", "Adagrad": "total", "Adam": "m v peak", "AdamW": "m v peak", "Adamax": "m peak",
    "ASGD": "average", "Muon": "buffer", "NAdam": "m v", "RAdam": "m v", "RMSprop": "squares mean buffer",
    "Rprop": "previous", "SGD": "momentum", "SparseAdam": "m v",
}  # fmt: skip
"""The state of an optimizer that begins as zeros of the parameter's shape."""


def init(name: str, params: dict[str, Tensor], options: dict[str, Any]) -> State:
    """The first state: `{entry: {parameter: tensor}}`."""
    dtype = next(iter(params.values())).dtype
    numel, one = sum(p.numel() for p in params.values()), torch.ones((), dtype=dtype, device=DEVICE)
    state: State = {
        entry: {key: torch.zeros_like(p) for key, p in params.items()} for entry in ZEROS.get(name, "").split()
    }
    match name:
        case "Adagrad":
            start = options.get("initial_accumulator_value", 0.0)
            return {"total": {key: torch.full_like(p, start) for key, p in params.items()}}
        case "ASGD":
            rate = options.get("lr", 1e-2)
            state |= {"eta": dict.fromkeys(params, one * rate), "mu": {key: one.clone() for key in params}}
        case "NAdam":
            state["product"] = {key: one.clone() for key in params}
        case "Rprop":
            state["size"] = {key: torch.full_like(p, options.get("lr", 1e-2)) for key, p in params.items()}
        case "Adafactor":
            matrices = {key: p for key, p in params.items() if p.ndim > 1}
            state = {
                "rows": {key: torch.zeros_like(p[:, :1]) for key, p in matrices.items()},
                "columns": {key: torch.zeros_like(p[:1]) for key, p in matrices.items()},
                "variance": {key: torch.zeros_like(p) for key, p in params.items() if p.ndim < 2},
            }
        case "LBFGS":
            state = {"g": tree_zeros(params), "s": tree_zeros(params)}
            state |= {key: one.new_zeros(HISTORY, numel) for key in ("y", "s_old")}
            state |= {"ro": one.new_zeros(HISTORY), "ydots": one.new_ones(HISTORY)}
    return state


def tree_zeros(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(p) for key, p in params.items()}


def update(name: str, params: Any, grads: Any, state: State, t: Any, options: dict[str, Any]) -> tuple[Any, State]:
    """All parameters and the state after a step."""
    if name == "LBFGS":
        return lbfgs(params, grads, state, t, **options)
    new, after = {}, {entry: {} for entry in state}
    for key, p in params.items():
        own = {entry: values[key] for entry, values in state.items() if key in values}
        new[key], own = RULES[name](p, grads[key], own, t, **options)
        for entry in own:
            after[entry][key] = own[entry]
    return new, after


@functools.cache
def optimizers() -> dict[str, Any]:
    """Every entry of the database by its name: `optim.Adam`."""
    from torch.testing._internal.common_optimizers import optim_db

    return {f"optim.{info.optim_cls.__name__}": info for info in optim_db}


def names() -> list[str]:
    return sorted(optimizers())


def cells(name: str) -> list[Cell]:
    return [Cell(form, dtype) for dtype in ("f64", "f32") for form in FORMS]


def trials(name: str, cell: Cell) -> Iterator[Trial]:
    """Every set of options of the database, at one stage each; the one in the middle at all."""
    samples = optimizers()[name].optim_inputs_func(DEVICE)
    for index, sample in enumerate(samples):
        for stage in choose_stages(index, len(samples)):
            place = choose_place(index, stage)
            yield Trial(index, functools.partial(judge_options, name, sample.kwargs, cell, stage, place))


def make_params(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A matrix, a vector and a 0-d parameter; Muon and SparseAdam take matrices only."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"m": (5, 4), "v": (4,), "s": ()} if name not in ("Muon", "SparseAdam") else {"m": (5, 4), "v": (1, 4)}
    drawn = {key: torch.randn(shape, generator=draw, dtype=torch.float64) for key, shape in shapes.items()}
    return {key: value.to(DEVICE, dtype) for key, value in drawn.items()}


def loss_of(params: Any, x: Tensor) -> Any:
    y = torch.tanh(x @ params["m"] + params["v"])
    return ((y * params["s"] if "s" in params else y) - 0.5).square().mean()


def judge_options(name: str, options: dict[str, Any], cell: Cell, stage: int, place: Any) -> Verdict:
    """The outcome of one set of options."""
    kind, dtype = name.removeprefix("optim."), DTYPES[cell.dtype]
    if "line_search_fn" in options:
        return Verdict("skipped", "a line search is control flow on values")
    whole = make_params(kind, dtype)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE, dtype)
    try:
        theirs = run_plain(kind, whole, x, options)
    except Exception as error:
        return Verdict("skipped", f"plain torch raises {describe(error)}")
    expected = run_step(make_step(kind, options), whole, first_state(kind, whole, options), x)
    if any((a - b).abs().max() > FORMULA * b.abs().max() for a, b in zip(expected, theirs)):
        return Verdict("wrong", "the function is not torch's")
    donates = cell.form == "donate"
    return compare_runs(
        lambda: run_sharded(kind, whole, x, options, donates, stage, place),
        expected,
        lambda got, want: compare_lists(got, want, "parameter"),
    )


STEPS = 3
FORMULA = 5e-5
"""How far a function may be from torch.optim: some bits of float32; and of Muon's update, a thousandth of the
parameter, some bits of bfloat16."""


def run_plain(kind: str, whole: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The parameters after each step of torch.optim."""
    params = {key: value.clone().requires_grad_() for key, value in whole.items()}
    given = {**options, "max_iter": 1} if kind == "LBFGS" else options
    optimizer, found = getattr(torch.optim, kind)(list(params.values()), **given), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, x)
        loss.backward()
        for p in params.values() if kind == "SparseAdam" else ():
            p.grad = p.grad.to_sparse()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        found += [p.detach().clone() for p in params.values()]
    return found


def make_step(kind: str, options: dict[str, Any]) -> Callable[..., Any]:
    """`step(params, state, x) -> (params, state)`."""

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads, t = fzero.grad(loss_of)(params, x), state["t"] + 1
        params, moments = update(kind, params, grads, state["moments"], t, options)
        return params, {"t": t, "moments": moments}

    return step


def run_step(step: Callable[..., Any], params: Any, state: Any, x: Tensor) -> list[Tensor]:
    """The whole parameters after each of some steps."""
    found = []
    for _ in range(STEPS):
        params, state = step(params, state, x)
        found += [value.clone() for value in fzero.unpartition(params).values()]
    return found


def run_sharded(
    kind: str, whole: dict[str, Tensor], x: Tensor, options: dict[str, Any], donates: bool, stage: int, place: Any
) -> list[Tensor]:
    """The parameters after each sharded step."""
    params = fzero.partition(whole, MESH, to=place)
    state = fzero.partition(first_state(kind, whole, options), MESH, to=place, like=params)
    return run_step(fzero.simulate(make_step(kind, options), MESH, stage=stage, donate=donates), params, state, x)


def first_state(kind: str, whole: dict[str, Tensor], options: dict[str, Any]) -> State:
    """The number of the step, and an optimizer's own state."""
    t = torch.zeros((), dtype=next(iter(whole.values())).dtype, device=DEVICE)
    return {"t": t, "moments": init(kind, whole, options)}
