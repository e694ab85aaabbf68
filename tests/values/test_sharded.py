"""The rules of Sharded: a torch function of slices equals the function of full values, eagerly and in a traced step."""

from __future__ import annotations

import copy
import functools
import math
import operator
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import einops
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Outcome, chosen, run, run_cases, values
from programs import training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import Sharded, tree
from fzero.values import rules

ROWS = 6
Values = dict[str, Any]
Function = Callable[[Values], Any]


def draw(*shape: int, low: float = 0.1, high: float = 0.9, seed: int = 0) -> Tensor:
    """Random numbers at which every function below has a value and a derivative."""
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator)


def leaves() -> Values:
    """The leaves to partition. `w`, `v` and the 0-d `s` lie in one bucket, `far` in another."""
    return {
        "w": draw(5, 7),
        "v": draw(5, 7, seed=1),
        "far": draw(5, 7, seed=2),
        "row": draw(7, seed=3),
        "s": torch.tensor(0.7),
        "empty": draw(0, 3),
        "half": draw(5, 7, seed=4).bfloat16(),
        "ints": torch.arange(-17, 18).reshape(5, 7),
        "small": torch.arange(35).reshape(5, 7) % 4,
        "large": draw(5, 7, low=1.5, high=3.0, seed=8),
        "bools": torch.arange(35).reshape(5, 7) % 3 == 0,
        "zeros": torch.zeros(5, 7),
        "signed": draw(5, 7, low=-1.0, seed=5),
        "wave": torch.complex(draw(5, 7, seed=10), draw(5, 7, seed=11)),
        "holed": torch.where(torch.arange(35) == 30, math.nan, torch.arange(35.0)).reshape(5, 7),
    }


def uniform() -> Values:
    """Plain tensors that are the same on every rank."""
    return {"full": draw(5, 7, seed=6), "c": torch.tensor(0.3), "x": draw(4, 7, seed=7)}


def bucket(path: str) -> str | None:
    return None if path in ("far", "holed") else "near"


# the functions: elementwise ones stay sharded; reductions and all others return plain tensors

OPERATORS = "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split()


def function(name: str) -> Callable[..., Any]:
    """torch's function of this name, or one that calls the method."""
    for place in (torch, torch.special, F):
        if callable(getattr(place, name, None)):
            return getattr(place, name)
    return lambda x, *rest: getattr(x, name)(*rest)


def callable_on(*operands: Tensor) -> list[str]:
    """The elementwise functions that return a tensor, given these operands."""
    found = []
    for name in sorted(rules.ELEMENTWISE - {"cuda", "empty_like", "to", "type_as"}):
        with suppress(AttributeError, RuntimeError, TypeError):
            found += [name] * isinstance(function(name)(*operands), Tensor)
    return found


def on(call: Callable[..., Any], *operands: Any) -> Function:
    """The function that calls `call` on these operands; a string operand is the value of that name."""
    return lambda v: call(*(operand(v, x) for x in operands))


def operand(v: Values, x: Any) -> Any:
    if isinstance(x, list):
        return [operand(v, item) for item in x]
    return v[x] if isinstance(x, str) else x


def each(names: Iterable[str], title: str, find: Callable[[str], Callable[..., Any]], *operands: Any) -> Values:
    """`{title with the name: the function of that name on these operands}`."""
    return {title.format(name): on(find(name), *operands) for name in names}


def listed(name: str) -> Callable[..., Any]:
    return getattr(torch, f"_foreach_{name}")


def of(name: str) -> Callable[..., Any]:
    return getattr(operator, name)


UNARY = callable_on(draw(5, 7))
ELEMENTWISE: dict[str, Function] = {
    **each(UNARY, "{}", function, "w"),
    **each(["acosh", "arccosh"], "{}", function, "large"),
    **each(callable_on(draw(5, 7), draw(5, 7)), "{}", function, "w", "v"),
    **each(["add", "mul", "atan2"], "{} of far", function, "w", "far"),
    **each("bitwise_and bitwise_or bitwise_xor".split(), "{}", function, "ints", "small"),
    **each("bitwise_left_shift bitwise_right_shift".split(), "{}", function, "ints", "small"),
    **each(OPERATORS, "operator {}", of, "w", "v"),
    **each(OPERATORS, "operator {} scalar", of, "w", 0.5),
    **each(OPERATORS, "scalar operator {}", of, 0.5, "w"),
    **each(OPERATORS, "operator {} full", of, "w", "full"),
    **each(OPERATORS, "full operator {}", of, "full", "w"),
    **each(OPERATORS, "operator {} 0-d", of, "w", "c"),
    **each(OPERATORS, "0-d operator {}", of, "c", "w"),
    **each(OPERATORS, "operator {} 0-d leaf", of, "w", "s"),
    **each(OPERATORS, "0-d leaf operator {}", of, "s", "w"),
    **each(["and_", "or_", "xor"], "operator {} scalar", of, "ints", 6),
    **each(["and_", "or_", "xor"], "scalar operator {}", of, 6, "ints"),
    **each(["lshift", "rshift"], "operator {}", of, "ints", "small"),
    **each(["lshift", "rshift"], "operator {} scalar", of, "ints", 2),
    **each(["lshift", "rshift"], "scalar operator {}", of, 6, "small"),
    "operator neg": lambda v: -v["w"],
    "operator pos": lambda v: +v["w"],
    "operator abs": lambda v: abs(v["signed"]),
    "operator invert": lambda v: ~v["bools"],
    "operator and": lambda v: v["bools"] & (v["w"] > 0.5),
    "operator or": lambda v: v["bools"] | (v["w"] > 0.5),
    "operator xor": lambda v: v["bools"] ^ (v["w"] > 0.5),
    "bitwise_not": lambda v: v["ints"].bitwise_not(),
    "ldexp": lambda v: torch.ldexp(v["w"], v["ints"]),
    "polynomial": lambda v: (2 * v["w"] - v["v"] / 3) ** 2 + v["w"],
    "method with scalar": lambda v: v["w"].add(v["v"], alpha=0.5).mul(2).sub(1).clamp(-1, 1),
    "to a dtype": lambda v: v["w"].to(torch.float64),
    "to a device and dtype": lambda v: v["w"].to("cpu", dtype=torch.bfloat16),
    "to as another": lambda v: v["w"].to(v["half"]),
    "full_like": lambda v: torch.full_like(v["w"], 3.0),
    "empty_like": lambda v: torch.empty_like(v["w"]).mul(0).nan_to_num(0.0),
    "zeros_like with dtype": lambda v: torch.zeros_like(v["w"], dtype=torch.int32),
    "where": lambda v: torch.where(v["w"] > 0.5, v["v"], 0.0),
    "where of far": lambda v: torch.where(v["bools"], v["w"], v["far"]),
    "where of full": lambda v: torch.where(v["full"] > 0.5, v["w"], v["c"]),
    "method where": lambda v: v["w"].where(v["w"] > 0.5, v["v"]),
    "clamp": lambda v: v["signed"].clamp(min=-0.3, max=0.4),
    "clamp by values": lambda v: torch.clamp(v["signed"], -v["w"], v["far"]),
    "clip": lambda v: v["w"].clip(0.3, 0.6),
    "clamp_min": lambda v: v["signed"].clamp_min(0.1),
    "clamp_max": lambda v: v["signed"].clamp_max(0.1),
    "lerp": lambda v: v["w"].lerp(v["v"], 0.3),
    "lerp by values": lambda v: torch.lerp(v["w"], v["v"], v["far"]),
    "addcmul": lambda v: torch.addcmul(v["w"], v["v"], v["far"], value=0.5),
    "addcdiv": lambda v: v["w"].addcdiv(v["v"], v["full"], value=0.5),
    "masked_fill": lambda v: v["w"].masked_fill(v["bools"], 0.0),
    "threshold": lambda v: F.threshold(v["w"], 0.5, 0.1),
    "gelu with option": lambda v: F.gelu(v["w"], approximate="tanh"),
    "leaky_relu with option": lambda v: F.leaky_relu(v["signed"], 0.3),
    "functions of negatives": lambda v: F.elu(v["signed"]) + F.celu(v["signed"]) + F.selu(v["signed"]).relu(),
    "bf16 with fp32": on(torch.add, "half", "w"),
    "bf16 with scalar": lambda v: v["half"] * 2.5,
    "bf16 with 0-d fp32 leaf": on(torch.mul, "half", "s"),
    "bf16 with 0-d fp32": on(torch.mul, "half", "c"),
    "ints with scalar": lambda v: v["ints"] / 4 + v["ints"] // 3,
    "ints with 0-d leaf": lambda v: v["ints"] * v["s"],
    "complex numbers": lambda v: (v["wave"] * 2 + v["w"]).conj() * v["wave"],
    "0-d leaves": lambda v: v["s"].exp() * v["s"] + 1,
    "0-d leaf with 0-d": lambda v: (v["s"] - v["c"]) * v["s"] / v["c"],
    "0-d leaf with python numbers": lambda v: 2 ** v["s"] + (1 - v["s"]) / 3,
    "empty leaf": lambda v: v["empty"].exp() * 2 + v["empty"] * v["s"],
    "detached factor": lambda v: v["w"].detach() * v["v"],
    "data of a factor": lambda v: v["w"].data * v["v"],
    "type_as": lambda v: v["w"].mul(v["v"]).type_as(v["half"]),
    "type": lambda v: v["w"].type(torch.float64),
    **each("add sub mul div maximum minimum pow".split(), "list {}", listed, ["w", "s"], ["far", "s"]),
    **each("sqrt exp neg reciprocal abs log tanh".split(), "list {}", listed, ["w", "empty", "s"]),
    "list add scalar": lambda v: torch._foreach_add([v["w"], v["half"]], 1.5),
    "list mul scalars": lambda v: torch._foreach_mul([v["w"], v["s"]], [2.0, 3.0]),
    "list mul 0-d": lambda v: torch._foreach_mul([v["w"], v["row"]], v["c"]),
    "list mul 0-d leaf": lambda v: torch._foreach_mul([v["w"], v["row"]], v["s"]),
    "list add with alpha": lambda v: torch._foreach_add([v["w"], v["row"]], [v["v"], v["row"]], alpha=0.5),
    "list lerp": lambda v: torch._foreach_lerp([v["w"], v["row"]], [v["v"], v["row"]], 0.1),
    "list addcmul": lambda v: torch._foreach_addcmul([v["w"]], [v["v"]], [v["full"]], 0.3),
    "list addcdiv": lambda v: torch._foreach_addcdiv([v["w"]], [v["v"]], [v["far"].detach()], 0.3),
}

REDUCTIONS: dict[str, Function] = {
    **each("sum mean norm max min amax amin".split(), "{} of w", function, "w"),
    **each("sum mean norm max min amax amin".split(), "{} of signed", function, "signed"),
    **each("sum mean norm max min amax amin".split(), "{} of a 0-d leaf", function, "s"),
    **each("sum mean norm max".split(), "{} of half", function, "half"),
    **each("sum mean norm max".split(), "{} of zeros", function, "zeros"),
    **each("sum mean norm".split(), "{} of empty", function, "empty"),
    **each("sum mean norm max min amax amin".split(), "{} of a nan", function, "holed"),
    **each("sum max min".split(), "{} of ints", function, "ints"),
    **each("sum max min".split(), "{} of bools", function, "bools"),
    **each("all any count_nonzero".split(), "{} of w", function, "w"),
    **each("all any count_nonzero".split(), "{} of zeros", function, "zeros"),
    **each("all any count_nonzero".split(), "{} of bools", function, "bools"),
    **each("all any count_nonzero".split(), "{} of ints", function, "ints"),
    **each("all any count_nonzero".split(), "{} of empty", function, "empty"),
    **each("all any count_nonzero".split(), "{} of a 0-d leaf", function, "s"),
    **each("all any count_nonzero".split(), "{} of a nan", function, "holed"),
    **each("sum mean norm any".split(), "{} of complex numbers", function, "wave"),
    "sum as float64": lambda v: v["w"].sum(dtype=torch.float64),
    "sum of bf16 as float32": lambda v: v["half"].sum(dtype=torch.float32),
    "sum of ints as int32": lambda v: v["ints"].sum(dtype=torch.int32),
    "mean of ints as float32": lambda v: torch.mean(v["ints"], dtype=torch.float32),
    "mean as float64": lambda v: v["w"].mean(dtype=torch.float64),
    "norm 1": lambda v: v["signed"].norm(1),
    "norm p=2.0": lambda v: torch.norm(v["signed"], p=2.0),
    "norm 3": lambda v: v["signed"].norm(3),
    "norm inf": lambda v: v["signed"].norm(math.inf),
    "norm fro": lambda v: torch.norm(v["w"], p="fro"),
    "norm as float64": lambda v: torch.norm(v["w"], dtype=torch.float64),
    "norm of bf16 as float32": lambda v: v["half"].norm(dtype=torch.float32),
    "vector_norm": lambda v: torch.linalg.vector_norm(v["signed"]),
    "vector_norm 1": lambda v: torch.linalg.vector_norm(v["signed"], ord=1),
    "vector_norm inf": lambda v: torch.linalg.vector_norm(v["signed"], ord=math.inf),
    "vector_norm as float64": lambda v: torch.linalg.vector_norm(v["w"], 2, dtype=torch.float64),
    "linalg norm": lambda v: torch.linalg.norm(v["w"]),
    "isfinite().all()": lambda v: v["w"].isfinite().all(),
    "isfinite().all() with a nan": lambda v: torch.isfinite(v["holed"]).all(),
    "isnan().any()": lambda v: v["holed"].isnan().any(),
    "max with ties": lambda v: (v["w"] > 0.5).float().max() + (v["w"] * 0 + v["s"]).amax() + v["bools"].float().min(),
    "max of the product": lambda v: (v["w"] * v["signed"]).max(),
    "sum of squares": lambda v: v["w"].square().sum() + v["w"].pow(2).mean(),
    "stacked": lambda v: torch.stack([v["w"].sum(), v["row"].norm(), v["s"].sum()]).sum().sqrt(),
    "a clip": lambda v: torch.clamp(1 / (v["w"].norm() + 1e-6), max=1.0) * v["row"].sum(),
    "variance": lambda v: (v["w"] - v["w"].mean()).square().mean(),
    "std": lambda v: torch.std(v["w"]),
    "prod": lambda v: v["row"].prod(),
    "argmax": lambda v: v["w"].argmax(),
    "logsumexp": lambda v: v["w"].logsumexp((0, 1)),
    "dot": lambda v: v["w"].flatten() @ v["v"].flatten(),
    "equal": lambda v: torch.tensor(torch.equal(v["w"], v["w"])),
    "global norm": lambda v: fzero.optim.global_norm([v["w"], v["half"], v["s"], v["empty"]]),
}  # fmt: skip

GATHERED: dict[str, Function] = {
    **each(["logit", "sgn"], "{}", function, "w"),  # derivatives of these make tensors of the slice's size
    **each(["copysign", "nextafter"], "{}", function, "w", "v"),
    "matmul": lambda v: v["x"] @ v["w"].T,
    "matmul of sharded": lambda v: v["w"] @ v["v"].mT,
    "torch.matmul": lambda v: torch.matmul(v["w"], v["row"]),
    "sum over a dimension": lambda v: v["w"].sum(0),
    "sum over the last, kept": lambda v: v["w"].sum(dim=-1, keepdim=True),
    "mean over dimensions": lambda v: torch.mean(v["w"], (0, 1)),
    "norm over a dimension": lambda v: torch.linalg.vector_norm(v["w"], dim=1),
    "max over a dimension": lambda v: v["w"].max(dim=1).values,
    "max of two": lambda v: torch.max(v["w"], v["far"]),
    "amax over a dimension": lambda v: v["w"].amax(0),
    "all over a dimension": lambda v: v["bools"].all(0),
    "softmax": lambda v: v["w"].softmax(-1),
    "cumsum": lambda v: v["w"].cumsum(0),
    "sort": lambda v: v["signed"].sort(dim=1).values,
    "index": lambda v: v["w"][1:4, 2],
    "index by list": lambda v: v["w"][[0, 2], :],
    "index by tensor": lambda v: v["w"][torch.tensor([3, 0, 3])],
    "index with None": lambda v: v["w"][:, None, ..., ::2],
    "index by mask": lambda v: v["w"][v["bools"]],
    "index a plain one": lambda v: v["x"][v["bools"].long()[0]],
    "reshape": lambda v: v["w"].reshape(7, 5).sum(1),
    "view, permute": lambda v: v["w"].view(5, 7, 1).permute(2, 1, 0),
    "transpose": lambda v: v["w"].transpose(0, 1).contiguous(),
    "flatten": lambda v: torch.flatten(v["w"]),
    "unsqueeze": lambda v: v["row"].unsqueeze(0).expand(3, -1),
    "split": lambda v: v["w"].split(2)[1],
    "unbind": lambda v: torch.unbind(v["w"])[2],
    "iteration": lambda v: sum(row * i for i, row in enumerate(v["w"])),
    "cat": lambda v: torch.cat([v["w"], v["row"][None], v["x"]]),
    "stack": lambda v: torch.stack([v["w"], v["far"]]),
    "einsum": lambda v: torch.einsum("xc,rc->xr", v["x"], v["w"]),
    "linear": lambda v: F.linear(v["x"], v["w"], v["w"][:, 0]),
    "layer_norm": lambda v: F.layer_norm(v["x"], (7,), v["row"], bias=v["row"]),
    "embedding": lambda v: F.embedding(torch.tensor([[0, 4], [4, 1]]), v["w"]),
    "convolution": lambda v: F.conv1d(v["x"][:, None], v["w"][:, None, :3]),
    "broadcast with a row": lambda v: v["w"] + v["row"],
    "broadcast with a full row": lambda v: v["w"] * v["x"][0],
    "0-d leaf with full": lambda v: v["s"] * v["full"],
    "pad": lambda v: F.pad(v["w"], (1, 1)),
    "tril": lambda v: v["w"].tril(),
    "outer": lambda v: torch.outer(v["row"], v["row"]),
    "norm by parts": lambda v: v["w"] / v["w"].norm(dim=1, keepdim=True),
    "empty, in cat": lambda v: torch.cat([v["empty"], v["w"][:, :3]]),
    "in a plain one": lambda v: torch.add(v["x"], v["row"]) * v["s"],
    "einops rearrange": lambda v: einops.rearrange(v["w"], "a b -> b a"),
    "einops reduce": lambda v: einops.reduce(v["w"], "a b -> b", "mean"),
    "einops repeat": lambda v: einops.repeat(v["row"], "a -> b a", b=2),
    "list norms": lambda v: torch.stack(torch._foreach_norm([v["w"], v["row"]])),
    "list norms 1": lambda v: torch.stack(torch._foreach_norm([v["w"], v["signed"]], 1)),
    "list max": lambda v: torch.stack(torch._foreach_max([v["w"], v["row"]])),
    "einops einsum": lambda v: einops.einsum(v["x"], v["w"], "x c, r c -> x r"),
}

FUNCTIONS = ELEMENTWISE | REDUCTIONS | GATHERED
GROUPS = {
    "one by one": [name for name in FUNCTIONS if not name.startswith("list")],
    "lists": [name for name in FUNCTIONS if name.startswith("list")],
}
"""Evaluated on ranks of their own: what fails on one rank alone leaves the others out of step for what follows."""
ALIASES = """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh conj_physical divide expit fix greater greater_equal
    less less_equal multiply negative not_equal positive subtract true_divide
""".split()
TRACED = [
    name
    for name in FUNCTIONS
    if name not in ("index by mask", "equal", *ALIASES)
    and ("operator" not in name or " add" in name)
    and (name.split()[0] not in ("all", "any", "count_nonzero") or name.endswith("w"))
    and (name not in UNARY or UNARY.index(name) % 4 == 0)
]
"""What a trace can hold, without shapes and Python values that only data tells; of what traces alike, one, or a few:
tests/conformance traces all of torch's operators."""
ON_RANKS = TRACED[::8]
"""Traced on two real ranks too. What they alone show is that collectives move the bytes: few functions do."""
VIRTUAL = fzero.VirtualMesh(fsdp=2)


# evaluation


class Evaluated(NamedTuple):
    """The full result of a function, its kind, and the gradients of `evaluate`; or the function's error."""

    kinds: set[str]
    value: list[Tensor]
    grads: dict[str, Tensor]
    error: str = ""


def evaluate(function: Function, v: Values, rows: Tensor, wanted: Iterable[str]) -> tuple[Any, Values]:
    """`function(v)`, and for the wanted leaves the gradients of a number made of the result and of this rank's rows.

    Each element of the result counts differently. The mean of the ranks' numbers is the number of all rows.
    """

    def number(chosen: Values) -> tuple[Tensor, Any]:
        result = function(v | chosen)
        total = rows.mean() * 0
        for y in (part.to(torch.float32) for part in tree.leaves(result) if part.is_floating_point()):
            weights = torch.arange(1.0, y.numel() + 1).remainder(7).reshape(y.shape) / 7
            total = total + rows.mean() * ((y * y + y).nan_to_num(0.0, 0.0, 0.0) * weights).sum()
        return total, result

    if not wanted:
        return function(v), {}
    gradient, result = fzero.grad(number, has_aux=True)({name: v[name] for name in wanted})
    return result, gradient


def rows_of(rank: int, world: int) -> Tensor:
    return draw(ROWS, 3, seed=9).chunk(world)[rank]


def described(result: Any, gradient: Values) -> Evaluated:
    parts = tree.leaves(result)
    kinds = {"sharded" if isinstance(part, Sharded) else "plain" for part in parts}
    return Evaluated(kinds, fzero.unpartition(parts), fzero.unpartition(gradient))


@functools.cache
def expected(name: str) -> Evaluated:
    """The function on plain tensors and all rows, with gradients where the function has them."""
    v = leaves() | uniform()
    floating = [path for path, leaf in v.items() if leaf.is_floating_point()]
    try:
        result, gradient = evaluate(FUNCTIONS[name], v, rows_of(0, 1), floating)
    except (RuntimeError, NotImplementedError):  # torch has no derivative of it
        result, gradient = FUNCTIONS[name](v), {}
    return described(result, {path: part for path, part in gradient.items() if part.count_nonzero()})


def eagerly(mesh: DeviceMesh, names: Iterable[str]) -> dict[str, Evaluated]:
    """Each function outside a step, on values with poisoned padding."""
    v = poisoned(fzero.partition(leaves(), mesh, layers=bucket)) | uniform()
    rows = rows_of(mesh.get_rank(), mesh.size())
    return {name: attempt(name, functools.partial(eager, v=v, rows=rows)) for name in names}


def eager(name: str, v: Values, rows: Tensor) -> Evaluated:
    result, gradient = evaluate(FUNCTIONS[name], v, rows, expected(name).grads)
    return described(result, {path: averaged(part) for path, part in gradient.items()})


def averaged(cotangent: Any) -> Any:
    """A gradient's mean over ranks: still to take for a plain value, already taken for a sharded one."""
    if isinstance(cotangent, Sharded):
        return cotangent
    cotangent = cotangent.clone()
    dist.all_reduce(cotangent)
    return cotangent / dist.get_world_size()


def tracedly(mesh: DeviceMesh, names: Iterable[str]) -> dict[str, Evaluated]:
    """Each function in a step of its own, without passes."""
    v = poisoned(fzero.partition(leaves(), mesh, layers=bucket))
    rows = rows_of(mesh.get_rank(), mesh.size())
    call = functools.partial(fzero.shard, mesh=mesh, passes=())
    return {name: attempt(name, functools.partial(in_a_step, v=v, rows=rows, transform=call)) for name in names}


def in_a_step(name: str, v: Values, rows: Tensor, transform: Callable[[Any], Any]) -> Evaluated:
    constants, wanted = uniform(), [path for path in expected(name).grads if path in v]

    def step(v: Values, rows: Tensor) -> Any:
        return evaluate(lambda given: FUNCTIONS[name](given | constants), v, rows, wanted)

    used = {path: v[path] for path in names_used(FUNCTIONS[name]) if path in v}
    return described(*transform(step)(used, rows))


def simulated(step: Any) -> Any:
    """The step on two virtual ranks, whose slices lie amid garbage."""
    return functools.partial(fzero.simulate(step, VIRTUAL, passes=()), watch=surround)


def surround(node: Any, ranks: list[dict[Any, Any]]) -> None:
    """Put garbage around each rank's slices, before the first node."""
    if node.prev.op != "root":
        return
    for held in ranks:
        for argument, x in held.items():
            if x._base is not None and x._base.ndim == 1:  # a slice, and no rows of the batch
                around = torch.full((x.numel() + 32,), garbage(x.dtype), dtype=x.dtype)
                held[argument] = around[16:-16].view(x.shape).copy_(x)


def names_used(function: Function) -> set[str]:
    """The values that a function looks up."""
    used: set[str] = set()

    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            used.add(name)
            return super().__getitem__(name)

    function(Watched(leaves() | uniform()))
    return used


def attempt(name: str, in_mode: Callable[[str], Evaluated]) -> Evaluated:
    try:
        return in_mode(name)
    except Exception:
        return Evaluated(set(), [], {}, traceback.format_exc(limit=-4))


def poisoned(v: Values) -> Values:
    """`v` with garbage in the padding of each bucket."""
    for leaf in v.values():
        block, layout = leaf.local._base, leaf.form.layout
        held = sum(len(layout.part(index, leaf.on.rank)) for index in range(len(layout.leaves)))
        block[held:] = garbage(block.dtype)
    return v


def garbage(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else math.nan if dtype in ROUNDING else 10**6


@pytest.fixture(scope="module", params=[1, 3])
def evaluated(request: pytest.FixtureRequest) -> list[dict[str, Evaluated]]:
    """The functions' results on each rank, outside a step: of all on three ranks, and of some on one, whose slices are
    whole leaves."""
    return on_ranks(request.param, eagerly, FUNCTIONS.keys() if request.param > 1 else ON_RANKS)


@pytest.fixture(scope="module")
def evaluated_in_steps(request: pytest.FixtureRequest) -> list[dict[str, Evaluated]]:
    """Some functions' results on each rank, in traced steps."""
    return on_ranks(2, tracedly, chosen(request, "name") & set(ON_RANKS))


@pytest.fixture(scope="module")
def virtual_values() -> Values:
    return fzero.partition(leaves(), VIRTUAL, layers=bucket)


def on_ranks(world: int, try_all: Callable[..., dict[str, Evaluated]], names: Collection[str]) -> list[Any]:
    parts = [run(world, try_all, [name for name in group if name in names]) for group in GROUPS.values()]
    return [ones | lists for ones, lists in zip(*parts)]


def test_functions_of_slices_are_those_of_full_values(evaluated: list[dict[str, Evaluated]]) -> None:
    failed = {}
    assert set(evaluated[0]) in (set(FUNCTIONS), set(ON_RANKS))
    for name in evaluated[0]:
        try:
            for outcomes in evaluated:
                assert_as_expected(name, outcomes[name])
                assert outcomes[name].grads.keys() == expected(name).grads.keys()
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed


@pytest.mark.parametrize("name", TRACED)
def test_a_function_in_a_step_is_that_of_full_values(virtual_values: Values, name: str) -> None:
    assert_in_step(
        name, attempt(name, functools.partial(in_a_step, v=virtual_values, rows=rows_of(0, 1), transform=simulated))
    )


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_function_in_a_step_on_ranks_is_that_of_full_values(
    evaluated_in_steps: list[dict[str, Evaluated]], name: str
) -> None:
    for outcomes in evaluated_in_steps:
        assert_in_step(name, outcomes[name])


def assert_in_step(name: str, got: Evaluated) -> None:
    assert_as_expected(name, got)
    assert got.grads.keys() == expected(name).grads.keys() & leaves().keys()


HALF = {"bf16", "half", "type_as"}


def assert_as_expected(name: str, got: Evaluated) -> None:
    assert not got.error, got.error
    if name != "0-d leaf with 0-d":  # differentiated it is plain: it may weigh this rank's loss
        assert got.kinds == {"sharded" if name in ELEMENTWISE else "plain"}
    want, through = (
        expected(name),
        torch.bfloat16 if "bf16" in name or "half" in name or name == "type_as" else torch.float64,
    )
    assert len(got.value) == len(want.value)
    for value, right in zip(got.value, want.value):
        assert_same(value, right, through)
    for path, gradient in got.grads.items():
        assert_same(gradient, want.grads[path], through)


ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 3e-6,
    torch.complex64: 3e-6,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}
"""Relative to the largest element. Sums are in another order, and where a slice does not fill a vector register, torch
calls libm's functions instead of vector ones."""


def assert_same(got: Tensor, want: Tensor, through: torch.dtype) -> None:
    """Equal up to the rounding of their dtype, or of the dtype `through` that an intermediate value had."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    tolerance = max(ROUNDING[want.dtype], ROUNDING[through]) if want.dtype in ROUNDING else 0
    size = float(want.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tolerance and want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * size, equal_nan=True)


def test_every_elementwise_rule_is_tried() -> None:
    tried = {word for title in ELEMENTWISE for word in title.split()}
    reflected = {f"r{title.split()[-1].strip('_')}" for title in ELEMENTWISE if title.startswith("scalar operator")}
    named = {word.strip("_") for word in tried}
    assert rules.ELEMENTWISE - tried - named - reflected <= {"cuda"}


# what else a Sharded is and does, on two ranks


def params_on(mesh: DeviceMesh) -> Values:
    return fzero.partition({"layers": [{"w": draw(5, 7), "b": draw(7)}], "s": torch.tensor(0.7)}, mesh)


class Described(NamedTuple):
    """The reprs and attributes of leaves."""

    reprs: dict[str, str]
    facts: dict[str, Any]
    parts: dict[str, range]


def describing(mesh: DeviceMesh) -> Described:
    params = params_on(mesh)
    w, s = params["layers"][0]["w"], params["s"]
    count = fzero.optim.adam(0.1).init(params)[0].count
    reprs = {"w": repr(w), "s": repr(s), "half": repr(2 * w.bfloat16()), "count": repr(count)}
    facts = {
        "shape": w.shape,
        "ndim": (w.ndim, w.dim(), s.ndim),
        "numel": (w.numel(), s.numel()),
        "size": (w.size(), w.size(1), w.size(-1)),
        "len": len(w),
        "dtype": (w.dtype, (w > 0).dtype),
        "device": str(w.device),
        "floating": (w.is_floating_point(), w.long().is_floating_point()),
        "numbers": (float(s) == float(torch.tensor(0.7)), int(s), bool(s > 0.5), s.item() == float(s)),
        "attributes": (hasattr(w, "exp"), hasattr(w, "no_such_thing")),
        "hashable": len({w, s, w}),
        "leaves": [leaf is w for leaf in tree.leaves(params)],
        "paths": tree.paths(params),
        "mapped": tree.map(lambda p: tuple(p.shape), params),
        "pytree": [leaf.numel() for leaf in torch.utils._pytree.tree_leaves(params)],
    }
    return Described(reprs, facts, {leaf.path: leaf.part for leaf in tree.leaves(params)})


def refusing(mesh: DeviceMesh) -> dict[str, str]:
    """The message of each refusal."""
    params = params_on(mesh)
    w, plain = params["layers"][0]["w"], torch.ones(5, 7)
    uses: dict[str, Callable[[], Any]] = {
        "add_": lambda: w.add_(1),
        "mul_": lambda: w.mul_(w),
        "zero_": lambda: w.zero_(),
        "copy_": lambda: w.copy_(plain),
        "requires_grad_": lambda: w.requires_grad_(),
        "setitem": lambda: operator.setitem(w, 0, 1.0),
        "+=": lambda: operator.iadd(w, 1),
        "data": lambda: setattr(w, "data", plain),
        "out": lambda: torch.add(plain, 1, out=w),
        "inplace": lambda: F.relu(w, inplace=True),
        "list": lambda: torch._foreach_add_([w], [1.0]),
        "partition": lambda: fzero.partition(params, mesh),
        "no tensor": lambda: fzero.partition({"a": torch.ones(2), "b": [3.0]}, mesh),
    }
    return {name: message_of(use) for name, use in uses.items()}


def message_of(use: Callable[[], Any]) -> str:
    """The message of the FzeroError that `use` raises; the name of another error with its message."""
    try:
        use()
    except fzero.FzeroError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def keeping(mesh: DeviceMesh) -> dict[str, bool]:
    """Laws that hold bit for bit."""
    full = leaves()
    v = fzero.partition(full, mesh, layers=bucket)
    back = fzero.unpartition(v)
    mixed = fzero.unpartition({"a": v["w"], "b": full["w"], "c": "text"})
    return {
        "there and back": all(torch.equal(back[name].nan_to_num(), full[name].nan_to_num()) for name in full),
        "dtypes": all(back[name].dtype == full[name].dtype for name in full),
        "others stay": mixed["b"] is full["w"] and mixed["c"] == "text",
        "full results are copies": is_unharmed_by_writing(v["w"], full["w"]),
        "poison": trained(mesh, poison=True) == trained(mesh, poison=False),
    }


def is_unharmed_by_writing(leaf: Sharded, full: Tensor) -> bool:
    fzero.unpartition(leaf).zero_()
    return torch.equal(fzero.unpartition(leaf), full)


def trained(mesh: DeviceMesh, poison: bool) -> list[float]:
    """All parameters after two steps of AdamW with clipping; with `poison`, the padding starts as garbage."""
    optimizer = fzero.optim.chain(fzero.optim.clip_by_global_norm(0.1), fzero.optim.adamw(0.1))

    def loss(p: Values, rows: Tensor) -> Tensor:
        return (rows @ p["row"][:3]).mean() + (p["w"] @ p["row"]).square().sum() + p["w"].norm()

    params = fzero.partition({name: leaves()[name] for name in ("w", "row")}, mesh, layers=lambda path: "all")
    state = optimizer.init(params)
    if poison:
        poisoned(params)
    step = fzero.shard(training(optimizer, loss), mesh)
    for _ in range(2):
        params, state, _ = step(params, state, rows_of(mesh.get_rank(), mesh.size()))
    return torch.cat([leaf.flatten() for leaf in tree.leaves(fzero.unpartition(params))]).tolist()


def deepcopied(mesh: DeviceMesh) -> bool:
    """Whether a deep copy of a tree holds the same values in memory of its own."""
    params = params_on(mesh)
    copied = copy.deepcopy(params)
    apart = all(a.local.data_ptr() != b.local.data_ptr() for a, b in pairs(copied, params) if a.local.numel())
    return apart and all(torch.equal(a, b) for a, b in pairs(fzero.unpartition(copied), fzero.unpartition(params)))


def pairs(first: tree.Tree, second: tree.Tree) -> list[tuple[Any, Any]]:
    return list(zip(tree.leaves(first), tree.leaves(second)))


def curvature(v: Values, rows: Tensor) -> Values:
    """A Hessian times a vector: a gradient of a gradient, with this rank's rows in the inner one."""

    def loss(v: Values) -> Tensor:
        return ((rows @ v["w"][:3]).exp() @ v["row"]).mean() + (v["w"] * v["s"]).square().sum() * rows.mean()

    def along(v: Values) -> Tensor:
        return sum((part * part.detach().cos()).sum() for part in tree.leaves(torch.func.grad(loss)(v)))

    return torch.func.grad(along)(v)


def twice(mesh: DeviceMesh) -> Values:
    v = fzero.partition({name: leaves()[name] for name in ("w", "row", "s")}, mesh)
    return fzero.unpartition(curvature(v, rows_of(mesh.get_rank(), mesh.size())))


def spoiled(mesh: DeviceMesh) -> list[bool]:
    """Whether a maximum is nan where one rank has a nan: of a value's slices, and of plain tensors over ranks."""
    largest = fzero.shard(lambda x: fzero.pmax(x, "fsdp"), mesh)
    one = largest(torch.tensor([1.0, math.nan if mesh.get_rank() == 0 else 2.0]))
    other = largest(torch.tensor([math.nan if mesh.get_rank() == 1 else 2.0, 1.0]))
    holed = fzero.partition({"holed": leaves()["holed"]}, mesh)["holed"]
    return [holed.max().isnan().item(), one.isnan().tolist() == [False, True], other.isnan().tolist() == [True, False]]


BESIDE = {
    "describing": describing,
    "refusing": refusing,
    "keeping": keeping,
    "deepcopied": deepcopied,
    "twice": twice,
    "spoiled": spoiled,
}


@pytest.fixture(scope="module")
def beside() -> dict[str, list[Outcome]]:
    return run_cases(2, BESIDE)


def test_repr_shows_global_shape_dtype_range_and_bucket(beside: dict[str, list[Outcome]]) -> None:
    first, second = (described.reprs for described in values(beside["describing"]))
    assert first["w"] == "Sharded(layers.0.w: float32[5, 7], [0:25] of 35, bucket 'layers.0', rank 0 of 2)"
    assert second["w"] == "Sharded(layers.0.w: float32[5, 7], [25:35] of 35, bucket 'layers.0', rank 1 of 2)"
    assert first["s"] == "Sharded(s: float32[], [0:1] of 1, bucket 's', rank 0 of 2)"
    assert second["s"] == "Sharded(s: float32[], [1:1] of 1, bucket 's', rank 1 of 2)"
    assert first["half"].startswith("Sharded(layers.0.w: bfloat16[5, 7], ")
    assert "int32[], replicated" in first["count"]


def test_parts_of_all_ranks_tile_each_leaf(beside: dict[str, list[Outcome]]) -> None:
    first, second = (described.parts for described in values(beside["describing"]))
    for path, numel in {"layers.0.b": 7, "layers.0.w": 35, "s": 1}.items():
        assert [*first[path], *second[path]] == list(range(numel))


def test_a_sharded_value_has_the_attributes_of_the_full_one(beside: dict[str, list[Outcome]]) -> None:
    for rank, (_, facts, _) in enumerate(values(beside["describing"])):
        assert facts == {
            "shape": torch.Size([5, 7]),
            "ndim": (2, 2, 0),
            "numel": (35, 1),
            "size": (torch.Size([5, 7]), 7, 7),
            "len": 5,
            "dtype": (torch.float32, torch.bool),
            "device": "cpu",
            "floating": (True, False),
            "numbers": (True, 0, True, True),
            "attributes": (True, False),
            "hashable": 2,
            "leaves": [False, True, False],
            "paths": ["layers.0.b", "layers.0.w", "s"],
            "mapped": {"layers": [{"w": (5, 7), "b": (7,)}], "s": ()},
            "pytree": [35, 7, 1],
        }, f"rank {rank}"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        *((name, ("layers.0.w: ", name, "p = p + u")) for name in ("add_", "mul_", "zero_", "copy_")),
        ("requires_grad_", ("layers.0.w: ", "requires_grad_", "fzero.value_and_grad")),
        ("setitem", ("layers.0.w: ", "setitem")),
        ("+=", ("layers.0.w: ", "add_", "p = p + u")),
        ("data", ("layers.0.w: ", "data", "in place")),
        ("out", ("layers.0.w: ", "add", "in place")),
        ("inplace", ("layers.0.w: ", "relu", "in place")),
        ("list", ("_foreach_add_", "in place")),
        ("partition", ("layers.0.b: ", "partitioned already", "2 ranks", "layers.0", "unpartition")),
        ("no tensor", ("b.0: ", "float", "give a tensor")),
    ],
)
def test_what_is_refused_is_named(beside: dict[str, list[Outcome]], use: str, expected: tuple[str, ...]) -> None:
    for messages in values(beside["refusing"]):
        assert all(part in messages[use] for part in expected), messages[use]


def test_laws_that_hold_bit_for_bit(beside: dict[str, list[Outcome]]) -> None:
    for laws in values(beside["keeping"]):
        assert all(laws.values()), laws


def test_a_deep_copy_is_a_value_of_its_own(beside: dict[str, list[Outcome]]) -> None:
    assert values(beside["deepcopied"]) == [True, True]


def test_a_gradient_of_a_gradient(beside: dict[str, list[Outcome]]) -> None:
    want = curvature({name: leaves()[name] for name in ("w", "row", "s")}, rows_of(0, 1))
    for got in values(beside["twice"]):
        for path, gradient in got.items():
            assert_same(gradient, want[path], torch.float32)


def test_a_nan_on_one_rank_is_the_maximum_on_all(beside: dict[str, list[Outcome]]) -> None:
    assert values(beside["spoiled"]) == [[True, True, True]] * 2
