"""`check_pass` finds planted mistakes, names them, and prints a script that shows each."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero import FzeroError, Program, ops, optim, tree
from fzero.testing import TrainStep, check_pass
from fzero.testing.cases import CORNERS
from fzero.testing.passes import _compare
from fzero.variants.sign_scatter import sign_scatter
from fzero.variants.topk_scatter import topk_scatter

mul = torch.ops.aten.mul.Tensor
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def scatters(program: Program) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)


def replace_scatters(program: Program, target: Any) -> Program:
    program = program.copy()
    for node in scatters(program):
        node.target = target
    return program


def of_blocks(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`perform` of a reduce-scatter by an all-to-all, of blocks that each rank changes first."""

    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        along, axis = program.wire_of(node), program.mesh.shard_axis

        def run(fulls: list[Tensor], bucket: str, leaves: list[int], numel: int, **_: Any) -> Any:
            received = yield ops.AllToAll("blocks", axis, change(ops.pack_leaves(fulls, along)))
            return received.view(-1, numel).mean(0)

        return run

    return perform


def list_blocks(program: Program, node: Any, of: int = 1) -> list[Any]:
    value, axis = node.meta["val"], program.mesh.shard_axis
    nbytes = program.mesh.size(axis) * value.numel() * value.element_size() // of
    return [ops.Comm("all_to_all", axis, node.args[1], value.dtype, nbytes)]


def scale(blocks: Tensor) -> Tensor:
    return blocks.sign() * blocks.abs().mean()


def clone(blocks: Tensor) -> Tensor:
    return blocks.clone()


half_bytes = ops.define(
    "check_pass_half_bytes", like=ops.reduce_scatter, perform=of_blocks(clone),
    moves=lambda program, node: list_blocks(program, node, 2),
)  # fmt: skip
counts_padding = ops.define("check_pass_sign", like=ops.reduce_scatter, perform=of_blocks(scale), moves=list_blocks)
exchanges = ops.define("check_pass_exchange", like=ops.reduce_scatter, perform=of_blocks(clone), moves=list_blocks)
writes = ops.define(
    "check_pass_writes", fake=torch.empty_like, kind=lambda walk, node: walk.of(node.args[0]),
    perform=lambda program, node, rank: lambda x: x.mul_(2) / 2,
)  # fmt: skip
norm = ops.define(
    "check_pass_norm", fake=lambda x: x.new_empty(()), kind=lambda walk, node: ops.UNIFORM,
    perform=lambda program, node, rank: lambda x: x.norm(),
)  # fmt: skip


def lists_half_the_bytes(program: Program) -> Program:
    return replace_scatters(program, half_bytes)


def counts_what_is_padded(program: Program) -> Program:
    return replace_scatters(program, counts_padding)


def writes_into_gradients(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.part):
        with program.graph.inserting_after(node):
            made = program.emit(writes, node)
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    return program


def keeps_its_own_norm(program: Program) -> Program:
    """State that is one number for all ranks, and that each rank takes from its own slice."""
    if program.is_body:
        return program
    program = program.copy()
    parts = program.graph.find_nodes(op="call_function", target=ops.part)
    if parts:
        program, _ = program.add_state("mine.norm", (), parts[0].meta["val"].dtype, replicated=True)
        with program.graph.inserting_before(program.output):
            program.return_state("mine.norm", program.emit(norm, parts[0]))
    return program


def drops_a_wait(program: Program) -> Program:
    program = program.copy()
    for node in scatters(program):
        with program.graph.inserting_before(node):
            program.emit(ops.reduce_scatter, *node.args)
    return program


def doubles(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.part):
        with program.graph.inserting_after(node):
            made = program.emit(mul, node, 2.0)
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    return program


def exchanges_blocks(program: Program) -> Program:
    """A reduce-scatter by an all-to-all: no mistake, but for sums in another order with more than two ranks."""
    return replace_scatters(program, exchanges)


def refuses(program: Program) -> Program:
    raise FzeroError("pass 'refuses'", "takes no program", "give it none")


def looks_on(program: Program) -> Program:
    return program


def changes_its_program(program: Program) -> Program:
    for node in scatters(program):
        node.target = exchanges
    return program


PLANTED: dict[Callable[[Program], Program], tuple[dict[str, Any], str]] = {
    lists_half_the_bytes: ({}, r"moves lists all_to_all over 'fsdp' of float64, \d+ B as exchange 1, and"),
    writes_into_gradients: ({}, r"writes names \[\], and perform writes into part"),
    counts_what_is_padded: ({"exact": False, "rtol": 9, "atol": 9}, "counts padding: gives .* in the padding"),
    keeps_its_own_norm: ({}, "kind says a whole value, the same along 'fsdp', and perform gives .* on rank 0 and"),
    drops_a_wait: ({}, "is waited for 0 times"),
    doubles: ({}, r"gives \S+ for element \d+ of 0\.layers\.0\.\w+, which is \S+ without the pass, in call 1"),
    refuses: ({}, r"refuses all 1 steps, the last with: pass 'refuses': takes no program"),
    looks_on: ({}, r"changes none of 1 programs"),
    changes_its_program: ({}, "changes the program that it is given; begin with program = program.copy"),
}  # fmt: skip


def find(rewrite: Callable[[Program], Program], **how: Any) -> str:
    """The words of `check_pass`, "silent" where it finds nothing."""
    try:
        check_pass(rewrite, **how)
    except FzeroError as error:
        return str(error)
    return "silent"


def test_each_planted_mistake_is_found() -> None:
    words = {rewrite: find(rewrite, cases=CORNERS[:1], **how) for rewrite, (how, _) in PLANTED.items()}
    wrong = {x.__name__: said for x, said in words.items() if not re.search(PLANTED[x][1], said)}
    assert wrong == {}


def test_the_script_shows_the_mistake_on_the_smallest_step() -> None:
    """The script runs as it is. The step in it has leaves of one element, the step that failed first of five."""
    said = find(drops_a_wait)
    *_, script = said.partition("this script shows it:")
    assert "width=1" in script and "ops=(Op(name='dense'),)" in script
    with pytest.raises(FzeroError, match="is waited for 0 times"):
        exec(script, {})


def adds_noise(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        with program.graph.inserting_before(node):
            noise = program.emit(torch.ops.aten.rand_like.default, node.args[0])
            node.update_arg(0, program.emit(torch.ops.aten.add.Tensor, node.args[0], noise))
    return program


@pytest.mark.parametrize(
    ("rewrite", "before"), [(sign_scatter, "prefetch"), (topk_scatter, "prefetch"), (adds_noise, "bucket")]
)
def test_masks_of_padding_and_random_numbers_are_no_mistakes(rewrite: Any, before: str) -> None:
    case = replace(CORNERS[0], dtypes=("float32",) * 4, compute="float32")
    state = torch.get_rng_state()
    assert check_pass(rewrite, exact=False, rtol=9, atol=9, before=before, cases=[case]) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_zero_is_not_minus_zero() -> None:
    """The first element that differs in a bit is named, also before one that differs more."""
    zero = torch.zeros(2)
    assert _compare([("w", zero)], [("w", zero.clone())], None) is None
    assert _compare([("w", zero)], [("w", -zero)], None) == "gives 0 for element 0 of w, which is -0"
    assert _compare([("w", zero)], [("w", -zero)], (0, 0)) is None
    assert (
        _compare([("w", zero)], [("w", torch.tensor([-0.0, 1.0]))], None) == "gives 0 for element 0 of w, which is -0"
    )


MAIN = """
import torch
from fzero import Program, ops
from fzero.testing import check_pass
from fzero.testing.cases import CORNERS

aten = torch.ops.aten
mul, DTYPE, FACTORS, rng = aten.mul.Tensor, torch.float64, {"by": [1, float("inf")]}, torch.Generator()


def emit(program: Program, x, by: float = FACTORS["by"][0]):
    return program.emit(mul, program.emit(aten._to_copy.default, x, dtype=DTYPE), by)


def scaled(k):
    def inner(program: Program) -> Program:
        rng = program = program.copy()
        for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
            with program.graph.inserting_before(node):
                node.update_arg(0, emit(rng, node.args[0], k))
        return program

    return inner


class Scaled:
    __call__ = staticmethod(scaled(2.0))


def find(rewrite):
    try:
        check_pass(rewrite, before="bucket", cases=CORNERS[:1])
    except Exception as error:
        return str(error)


closure, called = find(scaled(2.0)), find(Scaled())
"""


def test_the_script_has_globals_and_closures_of_a_main_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MAIN)
    said = runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    law, _, script = said["closure"].partition("this script shows it:")
    assert "k = 2.0" in script and "rng = " not in script.partition("def inner")[0]
    with pytest.raises(FzeroError) as error:
        exec(script, {})
    assert str(error.value).partition("this script")[0] == law
    assert "\ngiven_scaled = ...  # put here what was given, object of __main__.Scaled: it has no" in said["called"]
    assert "check_pass(given_scaled, " in said["called"] or "    given_scaled,\n" in said["called"]


def count_bytes(program: Program) -> dict[str, int]:
    """What the step moves whose reduce-scatters are all-to-alls of padded blocks."""
    moved = {
        "all_to_all": sum(program.mesh.size() * node.meta["val"].nbytes for node in program.find(ops.reduce_scatter))
    }
    for entry in program.comm():
        if entry.op != "reduce_scatter":
            moved[entry.op] = moved.get(entry.op, 0) + entry.nbytes
    return moved


def test_a_right_pass_and_its_costs() -> None:
    """Two ranks add up in one order only, so results are equal bit for bit."""
    case = CORNERS[:1]
    assert check_pass(exchanges_blocks, cases=case, bytes=count_bytes, peak=lambda program: 10**6) == 1
    assert "bytes, and the formula gives {}" in find(exchanges_blocks, cases=case, bytes=lambda program: {})
    assert re.search(r"needs \d+ B, and may need 1 B", find(exchanges_blocks, cases=case, peak=lambda program: 1))


def of_doubled_gradients(step: TrainStep) -> Callable[..., Any]:
    def reference(params: Any, *rest: Any) -> Any:
        new, *others, _ = step(params, *rest)
        new = tree.map(lambda p, q: p + 2 * (q - p), params, new)
        return new, *others, optim.global_norm(new)

    return reference


def test_a_reference_says_what_results_are() -> None:
    assert check_pass(doubles, reference=of_doubled_gradients, cases=CORNERS[:1]) == 1
    said = find(exchanges_blocks, reference=of_doubled_gradients, cases=CORNERS[:1])
    assert "by the reference, in call 1" in said and "reference=of_doubled_gradients" in said


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, Any] = {"__name__": "docs_testing"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, "a block of docs/testing.md", "exec"), page)  # no file: hypothesis would read its lines
    assert capsys.readouterr().out == "['record', 'linear', 'transpose', 'jvp', 'vmap']\n"


def test_without_hypothesis_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fzero.testing.strategies", raising=False)
    with pytest.raises(FzeroError, match=r"needs hypothesis, which is not installed; pip install 'fzero\[testing\]'"):
        importlib.import_module("fzero.testing.strategies")
