"""Wrong arguments of public functions: each is an `FzeroError` that names the argument, its value and the way out.

Functions and the types of their arguments are read off the packages, so a new function is tried by itself.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import fzero
import fzero.checkpoint
import fzero.data
import fzero.deepspeed
import fzero.hf
from fzero import tree
from fzero.base.arguments import describe, is_of
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh

MESH = VirtualMesh(fsdp=2)
ROOMS = (fzero, fzero.checkpoint, fzero.data, fzero.deepspeed, fzero.hf)
PUBLIC = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in ROOMS
    for name in room.__all__
    if inspect.isfunction(getattr(room, name))
}
PUBLIC |= {
    f"fzero.hf.{owner}.{name}": method
    for owner in fzero.hf.__all__
    for base in getattr(getattr(fzero.hf, owner), "__mro__", ())
    if base.__module__.startswith("fzero.") and not is_dataclass(base)  # whose fields are transformers'
    for name, method in vars(base).items()
    if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
}
"""Functions, and the methods that classes of `fzero.hf` have of their own."""
OTHERS = (None, True, -1.5, 3, "text", b"text", [object()], {}, object(), int, torch.ones(2), torch.int8)
"""Values, of which most are wrong for each type."""
GOOD: dict[Any, Any] = {
    bool: True,
    int: 1,
    float: 0.5,
    str: "text",
    os.PathLike: Path("nowhere"),
    torch.dtype: torch.float32,
    Tensor: torch.ones(2),
    get_origin(Callable[..., Any]): lambda *args: None,
    Mapping: {},
    Sequence: (),
    tuple: (),
}
"""One value of each type that a signature may say."""


def split(hint: Any) -> tuple[Any, ...]:
    """The types of which an annotation is a union, without their parameters."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in members)


def list_arguments() -> Iterator[tuple[str, str, Any]]:
    """Each argument that says its type: function, name, type."""
    for name, function in PUBLIC.items():
        hints = get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            kinds = split(hints.get(parameter.name))
            is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if (
                parameter.name in hints
                and is_one
                and all(kind in GOOD or kind in (type(None), Literal) for kind in kinds)
            ):
                yield name, parameter.name, hints[parameter.name]


ARGUMENTS = list(list_arguments())


def fill(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Arguments of the right types for all that a function needs, and those given. No function runs with them."""
    hints = get_type_hints(function)
    needed = [x.name for x in inspect.signature(function).parameters.values() if x.default is x.empty and x.kind < 4]
    return {
        name: GOOD.get(split(hints.get(name))[0]) for name in needed if name not in ("how", "options", "named")
    } | given


def test_functions_and_their_arguments_are_found() -> None:
    assert {"fzero.shard", "fzero.partition", "fzero.checkpoint.save", "fzero.deepspeed.initialize"} <= set(PUBLIC)
    assert {"fzero.hf.Trainer.__init__", "fzero.hf.Trainer.save_model", "fzero.hf.Generator.__init__"} <= set(PUBLIC)
    assert len(ARGUMENTS) > 110
    names = {name for _, name, _ in ARGUMENTS}
    assert {"memory", "stage", "donate", "persist", "label_smoothing", "keep", "version", "compile"} <= names


def test_values_of_another_type_are_named(subtests: pytest.Subtests) -> None:
    for function, name, hint in ARGUMENTS:
        wrong = [value for value in OTHERS if not is_of(value, hint)]
        assert len(wrong) >= 6
        with subtests.test(f"{function}({name})"):
            for value in wrong:
                with pytest.raises(FzeroError, match=rf"\b{name}: is ") as caught:
                    PUBLIC[function](**fill(PUBLIC[function], **{name: value}))
                assert f"{value!r:.80}" in caught.value.problem and caught.value.way_out == f"give {describe(hint)}"


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [0, -3, torch.tensor(3)], [True, 1.0, "1", None, torch.tensor(1.0), torch.ones(2)]),
        (float, [0, 0.5, torch.tensor(0.5)], [False, "0.5", None, 1j, torch.ones(2)]),
        (bool, [True, False], [0, 1, None, "no"]),
        (str | None, ["", None], [b"", 0, Path("x")]),
        (Sequence[str], [["a"], ("a", "b"), []], ["a", b"a", [1], {"a"}, {"a": 1}, None]),
        (tuple[Any, ...], [(), [1]], ["a", {}, 1]),
        (Mapping[str, Any] | None, [{}, None], [[], "a", 0]),
        (Callable[..., Any], [len, int], [None, "len", 0]),
        (bool | Literal["graph"], [True, "graph"], ["other", 1, None]),
        (str | os.PathLike[str], ["a", Path("a")], [b"a", 1, None]),
        (torch.dtype | None, [torch.int8, None], ["float32", torch.float32.__class__]),
        (VirtualMesh | int, [MESH, 2, "anything"], []),
        (tree.Tree, [None, 1, {}], []),
    ],
)
def test_types(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(is_of(value, hint) for value in right)
    assert not any(is_of(value, hint) for value in wrong)


def place(**how: Any) -> Any:
    return fzero.partition({"w": torch.ones(4, 4), "b": torch.ones(4)}, MESH, **how)


def lose(z_loss: float) -> Tensor:
    return fzero.tiled_cross_entropy(torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 2]), 1, z_loss=z_loss)


def average(params: Any) -> Any:
    return fzero.optim.incremental_update(params, params, 0.5)


MEANINGLESS: dict[str, tuple[Callable[[], Any], str]] = {
    "persist": (lambda: place(persist=-1), r"persist: is -1; give"),
    "source_rank": (lambda: place(source_rank=2), r"source_rank: is 2, the mesh has ranks \[0, 1\]"),
    "rank": (lambda: fzero.unpartition(place(), rank=-1), r"rank: is -1, the mesh has ranks"),
    "device": (lambda: place(device="xyz"), r"device: is 'xyz': .*; name a device"),
    "number of a device": (lambda: place(device="cuda:99"), r"device: is 'cuda:99': "),
    "device of an index": (lambda: fzero.axis_index("fsdp", "1.5"), r"device: is '1.5': "),
    "layers": (lambda: place(layers=lambda path: 3), r"layers: returns 3 for leaf b"),
    "granularity": (lambda: place(granularity=lambda path, shape: 0.5), r"granularity: returns 0.5 for leaf b"),
    "dtype": (lambda: place(dtype=lambda path, leaf: "int8"), r"dtype: returns 'int8' for leaf b"),
    "place": (lambda: place()["w"].at("host"), r"to: is 'host'; give a placement"),
    "steps": (lambda: fzero.check_equivalence(len, (), (), steps=0), r"steps: is 0; compare at least 1 step"),
    "ranks": (lambda: VirtualMesh(fsdp=torch.ones(2)), r"mesh axis fsdp: has size tensor"),  # type: ignore[arg-type]
    "z_loss": (lambda: lose(z_loss=-1.0), r"z_loss: is -1.0; give 0 or more"),
    "codes": (
        lambda: average({"w": torch.ones(2, dtype=torch.uint8)}),
        r"w: dtype is torch.uint8, which has no average",
    ),
    "a leaf": (lambda: fzero.optim.adam().init({"w": 3.0}), r"w: is a float, an optimizer needs a tensor"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_value_without_meaning_is_named(name: str) -> None:
    call, message = MEANINGLESS[name]
    with pytest.raises(FzeroError, match=re.compile(rf"^(tiled_cross_entropy: )?{message}", re.DOTALL)):
        call()


def test_the_signature_stays() -> None:
    assert [*inspect.signature(fzero.partition).parameters][:2] == ["params", "mesh"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mesh'"):
        fzero.partition({})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'stages'"):
        fzero.shard(nn.Identity(), MESH, stages=3)  # type: ignore[call-arg]
