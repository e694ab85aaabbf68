"""Every in-place operation of torch, and every operation on lists, at each stage: as new state, which `donate` writes
in place, and in place on temporaries with views. Each step equals the plain one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from programs import MESH
from torch import Tensor

import fzero
from fzero import tree
from fzero.passes import defaults

DRAW = torch.Generator().manual_seed(0)
A, B, C = (torch.rand(5, 7, generator=DRAW, dtype=torch.float64) * 0.8 + 0.1 for _ in range(3))

NOT_A_FUNCTION_OF_VALUES = frozenset(
    """
    requires_grad_ detach_ set_ resize_ resize_as_ apply_ map_ map2_ share_memory_ as_strided_ rename_ retain_grad_
    sparse_resize_ sparse_resize_and_clear_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_
    random_ uniform_ normal_ bernoulli_ cauchy_ exponential_ geometric_ log_normal_
    """.split()
)
"""In-place methods that draw, or change a tensor's shape or memory."""

OPERANDS: dict[str, tuple[Any, ...]] = {"alone": (), "with a number": (0.3,), "with one": (B,), "with two": (B, C)}
BY_NAME: dict[str, Any] = {"value": 0.5, "alpha": 0.5, "beta": 0.5, "rounding_mode": "trunc", "weight": 0.5}
"""What operations take by keyword."""
LISTS: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "with a number": (0.5,),
    "with numbers": ([0.5, 0.25],),
    "with a list": ([C, A],),
    "with a list and a number": ([B, C], 0.5),
    "with two lists": ([B, C], [C, A]),
    "with two lists and a number": ([B, C], [C, A], 0.5),
}


def runs(call: Callable[[], Any]) -> bool:
    """Whether plain torch takes these arguments, and returns values of the first one's shape and kind."""
    try:
        result = call()
    except Exception:
        return False
    leaves = result if isinstance(result, (list, tuple)) else [result]
    return all(x is None or (x.shape == A.shape and not x.isnan().any()) for x in leaves)


REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm"}
EVERY = list(itertools.product((1, 2, 3), (True, False)))


def in_place_methods(operands: tuple[Any, ...]) -> Iterator[str]:
    for name in dir(Tensor):
        is_function = name.endswith("_") and not name.startswith("_") and name not in NOT_A_FUNCTION_OF_VALUES
        if is_function and runs(lambda name=name: getattr(A.clone(), name)(*operands)):
            yield name


def list_functions(operands: tuple[Any, ...], *, in_place: bool) -> Iterator[str]:
    for name in dir(torch):
        is_function = name.startswith("_foreach_") and name.endswith("_") is in_place and name not in REDUCTIONS
        if is_function and runs(lambda name=name: getattr(torch, name)([A.clone(), B.clone()], *operands)):
            yield name


def whole(leaf: Any) -> Tensor:
    return leaf.full_tensor() if isinstance(leaf, fzero.Sharded) else leaf


def check(step: Callable[[Any], Any], params: dict[str, Tensor], stage: int, donate: bool) -> None:
    """The step's results on two ranks are those of the plain step. Only reductions over slices round differently."""
    expected = step(tree.map(torch.clone, params))
    given = fzero.partition(tree.map(torch.clone, params), MESH)
    got = fzero.unpartition(fzero.simulate(step, MESH, passes=defaults(stage=stage, in_place=donate))(given))
    pairs = zip(tree.paths(expected), tree.leaves(got), tree.leaves(expected), strict=True)
    wrong = [path for path, mine, theirs in pairs if not close(mine, theirs)]
    assert expected and not wrong


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the blocks of vectorized kernels, which begin elsewhere in a slice."""
    return a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stage", "donate"), EVERY)
@pytest.mark.parametrize("operands", OPERANDS)
def test_new_state(operands: str, stage: int, donate: bool) -> None:
    names = [name.removesuffix("_") for name in in_place_methods(OPERANDS[operands])]
    names = [name for name in names if runs(lambda name=name: getattr(A, name)(*OPERANDS[operands]))]

    def step(params: Any) -> Any:
        beside = params["beside"][: len(OPERANDS[operands])] if operands != "with a number" else [0.3]
        new = {name: getattr(params["state"][name], name)(*beside) for name in names}
        return {"state": new, "beside": params["beside"]}

    params: Any = {"state": dict.fromkeys(names, A), "beside": [B, C]}
    check(step, params, stage, donate)


@pytest.mark.parametrize("stage", [1, 3])
def test_new_state_by_operations_with_keywords(stage: int) -> None:
    calls = {
        (name.removesuffix("_"), operands, keyword)
        for operands, keyword in itertools.product(["with one", "with two"], BY_NAME)
        for name in dir(Tensor)
        if name.endswith("_") and not name.startswith("_")
        if runs(lambda n=name, o=operands, k=keyword: getattr(A.clone(), n)(*OPERANDS[o], **{k: BY_NAME[k]}))
    }
    known = {("addcmul", "with two", "value"), ("add", "with one", "alpha"), ("div", "with one", "rounding_mode")}
    assert known < calls

    def step(params: Any) -> Any:
        new = {}
        for name, operands, keyword in calls:
            beside = params["beside"][: len(OPERANDS[operands])]
            x = params["state"][f"{name} {keyword}"]
            new[f"{name} {keyword}"] = getattr(x, name)(*beside, **{keyword: BY_NAME[keyword]})
        return {"state": new, "beside": params["beside"]}

    check(step, {"state": {f"{name} {keyword}": A for name, _, keyword in calls}, "beside": [B, C]}, stage, donate=True)


@pytest.mark.parametrize(("stage", "donate"), EVERY)
@pytest.mark.parametrize("operands", OPERANDS)
def test_temporaries(operands: str, stage: int, donate: bool) -> None:
    names = list(in_place_methods(OPERANDS[operands]))

    def step(params: Any) -> Any:
        results = {}
        for name in names:
            copy = whole(params["a"]).clone()
            view, before = copy.t()[1:], copy * 2
            beside = [whole(params[key]) for key in "bc"][: len(OPERANDS[operands])]
            getattr(copy, name)(*(beside if operands != "with a number" else [0.3]))
            results[name] = [copy, view * 2, before]
        return results

    check(step, {"a": A, "b": B, "c": C}, stage, donate)


def fill_lists(operands: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
    """The operands with `params` in the places of A, B and C."""
    values = {id(A): params["a"], id(B): params["b"], id(C): params["c"]}
    return [[values.get(id(x), x) for x in arg] if isinstance(arg, list) else arg for arg in operands]


@pytest.mark.parametrize(("stage", "donate"), EVERY)
@pytest.mark.parametrize("operands", LISTS)
def test_lists_of_new_state(operands: str, stage: int, donate: bool) -> None:
    names = list(list_functions(LISTS[operands], in_place=False))

    def step(params: Any) -> Any:
        new = {}
        for name in names:
            beside = fill_lists(LISTS[operands], params["beside"])
            new[name] = getattr(torch, name)(params["state"][name], *beside)
        return {"state": new, "beside": params["beside"]}

    params: Any = {"state": {name: [A, B] for name in names}, "beside": {"a": A, "b": B, "c": C}}
    check(step, params, stage, donate)


@pytest.mark.parametrize(("stage", "donate"), EVERY)
@pytest.mark.parametrize("operands", LISTS)
def test_lists_of_temporaries(operands: str, stage: int, donate: bool) -> None:
    names = list(list_functions(LISTS[operands], in_place=True))

    def step(params: Any) -> Any:
        results = {}
        for name in names:
            copies = [whole(params[key]).clone() for key in "ab"]
            views = [copy.t()[1:] for copy in copies]
            beside = fill_lists(LISTS[operands], {key: whole(leaf) for key, leaf in params.items()})
            getattr(torch, name)(copies, *beside)
            results[name] = [*copies, *torch._foreach_mul(views, 2.0)]
        return results

    check(step, {"a": A, "b": B, "c": C}, stage, donate)


@pytest.mark.parametrize(("stage", "donate"), EVERY)
def test_a_number_to_the_power_of_a_list(stage: int, donate: bool) -> None:
    check(lambda p: dict(zip("ab", torch._foreach_pow(2.0, [p["a"], p["b"]]))), {"a": A, "b": B}, stage, donate)


@pytest.mark.parametrize(("stage", "donate"), EVERY)
@pytest.mark.parametrize("update", ["sgd", "momentum", "loop"])
def test_plain_updates(update: str, stage: int, donate: bool) -> None:
    """Without clipping the gradients go from the reduce-scatter into a list operation."""
    optimizer = fzero.optim.sgd(0.1, momentum=0.9 if update == "momentum" else None)

    def step(params: Any) -> Any:
        value, grads = fzero.value_and_grad(lambda p: ((p["a"] @ p["b"].T) @ p["c"]).square().mean())(params)
        if update == "loop":
            return tree.map(lambda p, g: p - 0.1 * g, params, grads), value
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return fzero.optim.apply_updates(params, updates), state, value

    check(step, {"a": A, "b": B, "c": C}, stage, donate)


NARROW: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "with a number": (0.3,),
    "with numbers": ([0.3, 0.7],),
    "with a list": (["b", "a"],),
    "with a list and a number": (["b", "a"], 0.3),
    "with two lists": (["b", "a"], ["a", "b"]),
    "with two lists and a number": (["b", "a"], ["a", "b"], 0.3),
}
"""Operands of functions of two tensors `a` and `b`. No number is one of a narrow dtype."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("operands", NARROW)
def test_working_in_place_changes_no_bit(operands: str, dtype: torch.dtype) -> None:
    """Of new state and of temporaries, by functions of lists and by overloads of one tensor and a number."""
    values = {"a": A.to(dtype), "b": B.to(dtype)}

    def fill(of: dict[str, Any]) -> list[Any]:
        return [[of.get(x, x) for x in arg] if isinstance(arg, list) else arg for arg in NARROW[operands]]

    names = [name for name in dir(torch) if name.startswith("_foreach_") and name[-1] != "_" and name not in REDUCTIONS]
    lists = {name: getattr(torch, name) for name in names}
    functions = {name: f for name, f in lists.items() if runs(lambda f=f: f(list(values.values()), *fill(values)))}
    aten = torch.ops.aten
    if operands == "with a number":
        for op in (aten.mul.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.div.Scalar):
            functions[str(op)] = lambda xs, number, op=op: [op(x, number) for x in xs]

    def step(params: Any) -> Any:
        beside = fill(params["beside"])
        state = {name: f(params["state"][name], *beside) for name, f in functions.items()}
        temporaries = {name: f(torch._foreach_neg(params["negated"]), *beside) for name, f in functions.items()}
        return {"state": state, "beside": params["beside"], "negated": params["negated"]}, temporaries

    both = list(values.values())
    params: Any = {"state": dict.fromkeys(functions, both), "beside": values, "negated": both}
    one = fzero.VirtualMesh(fsdp=1)
    kept, in_place = (
        fzero.unpartition(fzero.simulate(step, one, donate=donate)(fzero.partition(params, one)))
        for donate in (False, True)
    )
    pairs = zip(tree.paths(kept), tree.leaves(kept), tree.leaves(in_place), strict=True)
    wrong = [path for path, a, b in pairs if not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))]
    assert functions and not wrong
