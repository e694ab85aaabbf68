"""The documents: code on docs/passes.md runs and does what the page says; names and links on all pages are real."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, run_script
from test_package import LEVELS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, Program, ops, passes, tree
from fzero.passes.run import Pass, name_of_pass

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
)
PASSES = (ROOT / "docs" / "passes.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in fences if name == language]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins like this, without that line."""
    lines = text[text.index(f"\n| {head}") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


class Page(dict[str, Any]):
    """What the names of docs/passes.md stand for once its code has run, and `printed`: what it printed."""

    printed: str

    def arguments(self) -> tuple[Any, ...]:
        """Fresh arguments of the page's step."""
        params = fzero.partition(self["whole_params"], self["mesh"])
        return params, self["optimizer"].init(params), self["batch"]

    def step(self, rewrite: Pass, before: str = "prefetch", stage: int = 3) -> Any:
        rewrites = passes.insert(passes.defaults(stage=stage), rewrite, before=before)
        return fzero.simulate(self["train_step"], self["mesh"], passes=rewrites)

    def rank_grads(self, params: tree.Tree) -> list[tree.Tree]:
        """The gradients of each of four ranks, from whole parameters."""
        batches = [{key: x.chunk(4)[rank] for key, x in self["batch"].items()} for rank in range(4)]
        return [fzero.grad(self["loss_fn"])(params, batch) for batch in batches]

    def update(self, grads: tree.Tree) -> tree.Tree:
        """Whole parameters after one step with these gradients."""
        whole = self["whole_params"]
        updates, _ = self["optimizer"].update(grads, self["optimizer"].init(whole), whole)
        return fzero.optim.apply_updates(whole, updates)


def execute() -> Page:
    """Run the page's code, all blocks in one namespace. Operations are defined once a process."""
    page, printed = Page(), io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        for number, block in enumerate(blocks(PASSES, "python")):
            exec(compile(block, f"docs/passes.md, block {number}", "exec"), page)
    page.printed = printed.getvalue()
    return page


@pytest.fixture(scope="module")
def page() -> Page:
    return execute()


def assert_close(got: tree.Tree, expected: tree.Tree) -> None:
    """AdamW's first step is about the rate, 1e-2, in each element: errors of float32 are some 1e-7 of a weight."""
    whole = fzero.unpartition(got)
    for path, a, b in zip(tree.paths(expected), tree.leaves(whole), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


# the examples of docs/passes.md


def shown(listing: str) -> list[str]:
    """A listing without what depends on the version of torch: the number of nodes, and what kernels are called."""
    return [re.sub(r"\d+ nodes", "", line) for line in listing.splitlines() if not line.startswith("  compute ")]


def test_the_listing_is_the_one_that_is_printed(page: Page) -> None:
    (listing,) = blocks(PASSES, "text")
    assert shown(page.printed)[: len(shown(listing))] == shown(listing)


def test_half_the_bytes_of_gathers_move(page: Page) -> None:
    half, exact = (page[name].trace(*page.arguments()).comm() for name in ("half", "step"))
    for got, expected in zip(half, exact, strict=True):
        if expected.op == "all_gather":
            assert (got.dtype, got.nbytes) == (torch.bfloat16, expected.nbytes // 2)
        else:
            assert got == expected


def test_rounded_weights_are_used_and_exact_ones_updated(page: Page) -> None:
    params, _, _ = page["half"](*page.arguments())
    rounded = tree.map(lambda p: p.to(torch.bfloat16).float(), page["whole_params"])
    grads = tree.map(lambda *each: torch.stack(each).mean(0), *page.rank_grads(rounded))
    assert_close(params, page.update(grads))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_gathers_as_bfloat16(page: Page, stage: int) -> None:
    step = page.step(page["gather_as_bfloat16"], "bucket", stage)
    gathered = [entry for entry in step.trace(*page.arguments()).comm() if entry.op == "all_gather"]
    assert {entry.dtype for entry in gathered} == {torch.bfloat16}
    step(*page.arguments())


def test_gradients_become_their_median(page: Page) -> None:
    params, _, _ = page["robust"](*page.arguments())
    grads = tree.map(lambda *each: torch.stack(each).median(0).values, *page.rank_grads(page["whole_params"]))
    assert_close(params, page.update(grads))
    program = page["robust"].trace(*page.arguments())
    assert [entry.op for entry in program.comm()].count("all_to_all") == 2
    assert "all_to_all" in page.printed


def test_the_average_of_median_losses_is_kept(page: Page) -> None:
    step, exact, expected = page["watched"], page["step"], torch.tensor(0.0)
    state = step.init_pass_state(*page.arguments())
    (params, opt_state, batch), (others, opt_others, _) = page.arguments(), page.arguments()
    for _ in range(3):
        whole = fzero.unpartition(params)
        losses = [page["loss_fn"](whole, {key: x.chunk(4)[rank] for key, x in batch.items()}) for rank in range(4)]
        expected = torch.lerp(expected, torch.stack(losses).median(), 0.1)
        (params, opt_state, loss), state = step(params, opt_state, batch, pass_state=state)
        others, opt_others, other = exact(others, opt_others, batch)
        assert torch.equal(loss, other)  # results do not change
    torch.testing.assert_close(fzero.unpartition(state)["loss.average"], expected)
    assert all(map(torch.equal, tree.leaves(fzero.unpartition(params)), tree.leaves(fzero.unpartition(others))))


def test_state_is_saved_and_loaded(page: Page, tmp_path: Path) -> None:
    step = page["watched"]
    fresh = step.init_pass_state(*page.arguments())
    (params, opt_state, _), state = step(*page.arguments(), pass_state=fresh)
    page["save_state"](state, tmp_path / "state.safetensors")
    loaded = page["load_state"](fresh, tmp_path / "state.safetensors", page["mesh"])
    assert torch.equal(loaded["loss.average"].local, state["loss.average"].local)
    step(params, opt_state, page["batch"], pass_state=loaded)


def test_state_of_any_shape_is_saved_and_loaded(page: Page, tmp_path: Path) -> None:
    shapes = {"a": ((), True), "b": ((3, 5), True), "c": ((), False), "d": ((7, 3), False), "e": ((0,), True)}

    def add_all(program: Program) -> Program:
        program = program.copy()
        for path, (shape, replicated) in shapes.items():
            program, _ = program.add_state(path, shape, torch.float32, initial=2.0, replicated=replicated)
        return program

    step = page.step(add_all)
    fresh = step.init_pass_state(*page.arguments())
    assert {path: tuple(value.shape) for path, value in fzero.unpartition(fresh).items()} == {
        path: shape for path, (shape, _) in shapes.items()
    }
    _, state = step(*page.arguments(), pass_state=fresh)
    page["save_state"](state, tmp_path / "state.safetensors")
    loaded = page["load_state"](fresh, tmp_path / "state.safetensors", page["mesh"])
    _, again = step(*page.arguments(), pass_state=loaded)
    assert all((value == 2).all() for value in fzero.unpartition(again).values())


def on_real_ranks(mesh: DeviceMesh) -> list[bool]:
    """Each example on real ranks and on virtual ones: the same bits?"""
    page, world, rank = execute(), mesh.size(), mesh.get_rank()
    page["mesh"] = fzero.VirtualMesh(fsdp=world)
    mine, same = {key: x.chunk(world)[rank] for key, x in page["batch"].items()}, []
    places = {"gather_as_bfloat16": "bucket", "median_of_gradients": "prefetch", "watch_losses": "coalesce"}
    for rewrite, before in ((page[name], before) for name, before in places.items()):
        rewrites = passes.insert(passes.defaults(stage=3), rewrite, before=before)
        real, virtual = fzero.shard(page["train_step"], mesh, passes=rewrites), page.step(rewrite, before)
        params = fzero.partition(page["whole_params"], mesh)
        given = params, page["optimizer"].init(params), mine
        outcomes = [
            step(*args, pass_state=step.init_pass_state(*args))
            for step, args in ((real, given), (virtual, page.arguments()))
        ]
        pairs = zip(*(tree.leaves(fzero.unpartition(outcome)) for outcome in outcomes), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
    return same


def test_one_text_serves_real_ranks_and_virtual_ones() -> None:
    assert run(2, on_real_ranks) == [[True] * 3] * 2


def test_the_examples_of_budgets_say_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "budget.md").read_text()
    names, printed = dict[str, Any](), io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed), torch.random.fork_rng():  # it saves a plan
        for example in blocks(page, "python"):
            exec(compile(example, "docs/budget.md", "exec"), names)
    said = [line.strip() for line in printed.getvalue().splitlines()[1:9]]
    assert said[0].startswith("memory: ") and said[4] == "alive at the peak:"
    assert all(f"    {line}\n" in page for line in said)
    assert names["program"].mesh.size() == 8 and names["program"].memory().peak < 80e9


def test_the_examples_of_offload_run() -> None:
    names, printed = dict[str, Any](), io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        for example in blocks((ROOT / "docs" / "offload.md").read_text(), "python"):
            exec(compile(example, "docs/offload.md", "exec"), names)
    state, *of_saved = printed.getvalue().splitlines()
    memory = names["program"].memory()
    assert state == f"{memory.peak} bytes on the device, {memory.host} bytes on the host"
    assert memory.host > 0 and names["loss"].isfinite()
    kept, again, moved = (tuple(map(int, re.findall(r"\d+", line))) for line in of_saved)
    assert max(again[0], moved[0]) < kept[0] and (kept[1], again[1]) == (0, 0) < (0, moved[1])


# the tables of docs/passes.md


def test_the_table_of_fields_is_complete() -> None:
    named = [re.match(r"`(\w+)", field)[1] for field, _, _ in rows(PASSES, "field ")]  # type: ignore[index]
    assert sorted(named) == sorted(ops.Operation.__dataclass_fields__.keys() - {"name", "target"})


def test_the_table_of_places_has_the_default_passes_in_order() -> None:
    named = [name for place, _ in rows(PASSES, "behind the pass ") for name in re.findall(r"`(\w+)`", place)]
    every = passes.defaults(stage=1, reduce_dtype=torch.float32, to=fzero.host())
    expected = [name_of_pass(rewrite) for rewrite in every]
    assert named == expected


def _returns_nothing(program: Program) -> Any:
    program.copy()


def _moves_first(program: Program) -> Program:
    program = program.copy()
    program.placeholders[-1].append(program.output.all_input_nodes[-1])
    return program


def _adds_a_placeholder(program: Program) -> Program:
    program = program.copy()
    with program.graph.inserting_after(program.placeholders[-1]):
        program.graph.placeholder("extra")
    return program


def _drops_a_wait(program: Program) -> Program:
    program = program.copy()
    node = program.graph.find_nodes(op="call_function", target=ops.wait)[0]
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)
    return program


def _renames_a_bucket(program: Program) -> Program:
    program = program.copy()
    node = program.graph.find_nodes(op="call_function", target=ops.all_gather)[0]
    node.args = (node.args[0], "nobody", *node.args[2:])
    return program


def _drops_means(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        with program.graph.inserting_before(node):
            program.substitute(node, program.emit(ops.take, *node.args))
    return program


def _keeps_a_loss(program: Program) -> Program:
    program = program.copy()
    (mean,) = (node for node in program.output.args[0] if ops.is_call(node, ops.all_reduce))
    program, _ = program.add_state("mine", (), torch.float32, replicated=True)
    program.return_state("mine", mean.args[0])
    return program


def _adds_twice(program: Program) -> Program:
    program = program.copy()
    for _ in range(2):
        program, _ = program.add_state("mine", (), torch.float32)
    return program


def _keeps_buckets(program: Program) -> Program:
    program, first = program.copy(), dict[str, Any]()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_gather):
        kept = first.setdefault(node.args[1], node)
        if kept is not node:
            (waits,), (again,) = kept.users, node.users
            program.substitute(again, waits)
            program.graph.erase_node(node)
    return program


def _calls(name: str, kind: Any) -> Pass:
    """A pass that calls an operation whose rule for kinds gives `kind`."""
    target = ops.define(name, fake=torch.empty_like, kind=lambda walk, node: kind)

    def call(program: Program) -> Program:
        program = program.copy()
        with program.graph.inserting_before(program.output):
            program.emit(target, program.placeholders[0])
        return program

    return call


def _yields_by_rank(program: Program) -> Program:
    def perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
        def run(x: torch.Tensor, op: str, axis: str) -> Any:
            return (yield ops.AllReduce("all", axis, x, op) if rank.rank else ops.AllToAll("all", axis, x.reshape(1)))

        return run

    target, program = ops.define("out_of_step", like=ops.all_reduce, perform=perform), program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_reduce):
        node.target = target
    return program


def _deep(page: Page, rewrite: Pass) -> None:
    """Trace a step of three layers, of which stage 3 gathers the second again."""
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    whole, apply = fzero.lower(torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2]))
    rewrites = passes.insert(passes.defaults(stage=3), rewrite, before="fuse")
    step = fzero.simulate(fzero.grad(lambda params, x: apply(params, x).square().mean()), 4, passes=rewrites)
    step.trace(fzero.partition(whole, page["mesh"]), torch.ones(4, 8))


def _fills_late(program: Program) -> Program:
    program = program.copy()
    nodes = {node.name: node for node in program.graph.nodes}
    nodes["zeros"].append(nodes["sum_1"])
    return program


def _fill(page: Page) -> None:
    """Trace a step that fills a buffer and reads it."""

    def step(x: Tensor) -> Tensor:
        buffer = torch.zeros(5)
        buffer[0].copy_(x.mean())
        return buffer.sum()

    rewrites = passes.insert(passes.defaults(stage=3), _fills_late, before="prefetch")
    fzero.simulate(step, page["mesh"], passes=rewrites).trace(torch.ones(4, 8))


def _give_uniform(walk: Any, node: Any) -> Any:
    return ops.UNIFORM


def _trace(rewrite: Pass, before: str = "prefetch") -> Callable[[Page], Any]:
    return lambda page: page.step(rewrite, before).trace(*page.arguments())


def _define(name: str, **known: Any) -> Callable[[Page], Any]:
    return lambda page: ops.define(name, **known)


MISTAKES: dict[str, Callable[[Page], Any]] = {
    "the pass returns nothing": _trace(_returns_nothing),
    "a node stands before one of its inputs": _trace(_moves_first),
    "a placeholder without an argument": _trace(_adds_a_placeholder),
    "a collective that nothing waits for": _trace(_drops_a_wait),
    "a leaf, bucket, axis or size that does not exist": _trace(_renames_a_bucket),
    "a node moves past a write into memory that it reads": _fill,
    "a value of one rank's batch meets a slice": _trace(_drops_means, "bucket"),
    "state that depends on one rank's batch": _trace(_keeps_a_loss, "coalesce"),
    "state is like a leaf that there is not": _trace(lambda program: program.copy().add_state("mine", like="9.w")[0]),
    "two states of one path": _trace(_adds_twice),
    "a bucket is kept at stage 3": lambda page: _deep(page, _keeps_buckets),
    "no pass of that name to stand in front of": _trace(_drops_a_wait, "prefech"),
    "an operation is defined twice": _define("reduce_median", like=ops.reduce_scatter),
    "an operation without a rule for kinds": _define("no_kind", fake=torch.empty_like),
    "an operation without a fake result": _define("no_fake", kind=_give_uniform),
    "a field that there is not": _define("odd", like=ops.wait, costs=1),
    "`moves`, and no `perform`": _define("silent", fake=torch.empty_like, kind=_give_uniform, moves=_give_uniform),
    "a rule for kinds gives an axis that there is not": _trace(_calls("strange", frozenset({"tp"}))),
    "a rule for kinds gives no kind": _trace(_calls("wordy", "uniform")),
    "a rule for kinds gives a slice of another size": _trace(_calls("other_size", ops.Slice("2", 1))),
    "ranks yield different exchanges": lambda page: page.step(_yields_by_rank)(*page.arguments()),
    "a step is called without its state": lambda page: page["watched"](*page.arguments()),
    "a step is given state that no pass keeps": lambda page: page["step"](
        *page.arguments(), pass_state=page["watched"].init_pass_state(*page.arguments())
    ),
}


def test_every_mistake_on_the_page_is_made_here() -> None:
    assert [mistake for mistake, _ in rows(PASSES, "mistake ")] == list(MISTAKES)


@pytest.mark.parametrize(("mistake", "said"), rows(PASSES, "mistake "))
def test_a_mistake_is_named(page: Page, mistake: str, said: str) -> None:
    with pytest.raises(FzeroError, match=re.escape(said.strip("`"))):
        MISTAKES[mistake](page)


def test_a_higher_peak_is_reported(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    page["robust"].trace(*page.arguments())
    page["half"].trace(*page.arguments())
    (message,) = {record.getMessage() for record in caplog.records if record.name == "fzero"}
    assert re.fullmatch(
        r"train_step: its peak is [\d.]+ KiB, without the passes median_of_gradients it is [\d.]+ KiB", message
    )


# names and links on every page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(
        r"\b((?:fzero|tests|examples|benchmarks|property_tests|docs|tools)/[\w/]+\.(?:py|md|txt))\b", path.read_text()
    )
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_fzero_that_are_named_exist(path: Path) -> None:
    named = set(re.findall(r"\bfzero((?:\.[A-Za-z_]\w*)+)", path.read_text()))
    assert not sorted(name for name in named if not resolves(name.strip(".").split(".")))


def resolves(parts: list[str]) -> bool:
    """Whether `fzero.a.b` is there, as an attribute or as a module."""
    value: Any = fzero
    if parts[0] == "hf" and importlib.util.find_spec("trl") is None:
        from fzero.hf.trl_options import NAMES

        if parts[1:] in ([name] for name in NAMES):
            return True  # without TRL it is refused by name
    for depth, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(["fzero", *parts[: depth + 1]]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


# docs/architecture.md

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_has_the_rooms_on_their_levels() -> None:
    (picture,) = blocks(ARCHITECTURE, "text")
    floors = [
        [line.split()[0] for line in floor.splitlines() if line] for floor in re.split(r"^-+$", picture, flags=re.M)
    ]
    assert [sorted(floor) for floor in floors] == [sorted(level) for level in reversed(LEVELS)]
    assert all(len(line.split()) > 1 for line in picture.splitlines() if not line.startswith("-"))


def test_every_file_in_the_tables_exists() -> None:
    named = re.findall(r"`(fzero/[\w/]*(?:\.py)?)`", ARCHITECTURE)
    assert len(named) > 40 and not [name for name in named if not (ROOT / name).exists()]


def test_functions_that_are_named_with_their_file_are_there() -> None:
    named = re.findall(r"`(\w+)` in `(fzero/[\w/]+\.py)`", ARCHITECTURE)
    assert named and all(f"def {name}(" in (ROOT / path).read_text() for name, path in named)


def test_the_journey_visits_the_stops_in_order() -> None:
    stops = [stop for stop, _, _ in rows(ARCHITECTURE, "stop ")]
    assert [word for stop in stops for word in re.findall(r"`(\w+)`", stop)] == [
        "Sharded", "all_gather", "wait", "whole", "mm", "reduce_scatter", "part",
    ]  # fmt: skip


def test_the_page_lists_every_public_name_once() -> None:
    named = [name for _, names in rows(ARCHITECTURE, "family ") for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(fzero.__all__)


# README.md

README = (ROOT / "README.md").read_text()
HOW = (ROOT / "docs" / "how_it_works.md").read_text()


LAUNCHES = {(): 1, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"): 2}
"""How the README says that its code is started, and in how many processes."""


def test_the_first_code_of_the_readme_runs_alone_and_under_torchrun() -> None:
    """With the same program, and the same loss: on virtual ranks, and on real ones."""
    file, printed = ROOT / "examples" / "first.py", list[str]()
    assert blocks(README, "python")[0] == file.read_text()
    clean = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for launch, processes in LAUNCHES.items():
        if launch:
            command = [sys.executable, *launch, str(file)]
            done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=200)
            out, err = done.stdout, done.stderr
        else:
            out, err = run_script(file), ""
        printed += (losses := re.findall(r"loss ([\d.]+)", out))
        assert len(losses) == processes == out.count("train_step on VirtualMesh(fsdp=2): "), err
        assert out.count("reduce_scatter  3 ") == processes
    assert len(set(printed)) == 1 and float(printed[0]) < 5.4, printed  # log(256) is 5.5


def test_the_table_of_the_readme_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "budget-m.json").read_text())
    assert f"({int(measured['date'][8:10])} November 2026" in README and measured["ranks"] == 2
    contenders = dict(
        zip(
            [name for name, _, _ in rows(README, "")],
            "deepspeed-3 deepspeed-2 fsdp2-keep fsdp2 fzero-2 fzero-3 fzero-memory-683509997".split(),
            strict=True,
        )
    )
    for name, milliseconds, mebibytes in rows(README, ""):
        found = measured["results"][contenders[name]]
        seconds = statistics.median(itertools.chain(*found["seconds"]))
        assert (milliseconds, mebibytes) == (f"{1000 * seconds:,.0f}", f"{found['peak'] / 2**20:,.0f}"), name


# docs/how_it_works.md


def test_the_page_names_the_default_passes_in_order() -> None:
    (line,) = (line for line in HOW.splitlines() if line.strip().startswith("Program --passes-->"))
    assert line.partition(": ")[2].split(", ") == [name_of_pass(rewrite) for rewrite in passes.defaults(stage=3)]


def list_main_jobs(mesh: DeviceMesh) -> dict[int, list[str]]:
    """Layers -> the listing that the main job prints with so many. What torchrun adds is for test_examples.py."""
    os.chdir(ROOT)
    sys.path.insert(0, "examples")
    job = importlib.import_module("train_bytes")
    listings = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "start", lambda: (torch.device("cpu"), mesh))
        patch.setattr(job, "finish", lambda mesh: None)
        text = job.corpus.Corpus(*(part[:50_000] for part in job.corpus.stdlib()))  # the listing says nothing of it
        patch.setattr(job.corpus, "stdlib", lambda device: text)
        patch.setattr(job, "MEASURED_STEPS", 1)
        for layers in (2, 5):
            patch.setattr(sys, "argv", f"train_bytes.py --layers {layers} --steps 1 --heldout 1 --program".split())
            with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
                job.main(job.parse())
            _, head, listing = printed.getvalue().partition("train_step on ")
            listings[layers] = (head + listing).strip().splitlines()
    return listings


@pytest.fixture(scope="module")
def listings() -> dict[int, list[str]]:
    return run(2, list_main_jobs, timeout=240)[0]


def test_the_listing_of_the_page_is_that_of_the_main_job(listings: dict[int, list[str]]) -> None:
    (said,) = (block for block in blocks(HOW, "") if "blocks.1" in block and block.startswith("train_step"))
    printed = "\n".join(listings[2])
    if torch.__version__.startswith("2.13."):
        assert printed == said.strip()
    else:
        assert shown(printed) == shown(said.strip())


def test_equal_layers_are_listed_once_as_the_page_says(listings: dict[int, list[str]]) -> None:
    """With 5 layers as with 24; with fewer, the backward pass has no three equal ones."""
    (said,) = (block for block in blocks(HOW, "") if block.startswith("  23 times"))
    printed, (count,) = listings[5], re.findall(r"With 24 layers the listing has (\d+) lines", HOW)
    assert len(printed) == int(count)
    assert said.strip().replace("23 times", "4 times") in "\n".join(printed)


def test_the_listing_of_the_page_adds_up() -> None:
    """Of the main job with two layers: what its head says is the sum of its lines."""
    (listing,) = (block for block in blocks(HOW, "") if "blocks.1" in block and block.startswith("train_step"))
    head, *lines = listing.splitlines()
    unit = {"B": 1, "KiB": 1024, "MiB": 1024**2}
    total = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0.0)
    for line in lines:
        op, *rest = line.split()
        if op in total:
            total[op] += float(rest[-3]) * unit[rest[-2]]
    for op, nbytes in total.items():
        number, size = re.search(rf"{op} ([\d.]+) (\w+)", head).groups()  # type: ignore[union-attr]
        assert nbytes == pytest.approx(float(number) * unit[size], rel=0.05)
