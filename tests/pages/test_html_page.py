"""The page of a program: its pictures show the program's own numbers, in HTML that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.pages.charts import LEFT, WIDTH, Bar, draw_lanes, draw_stack
from fzero.pages.comparison import draw_comparison
from fzero.pages.page import draw_page
from fzero.program.largest import list_alive
from fzero.program.program import Program

PANELS = (
    "Plan", "Memory over the step", "Alive at the peak", "Time", "Communication", "State in slices", "Program",
    "By line of your code", "By layer",
)  # fmt: skip
VOID = {"meta", "br"}
OPTIMIZER = fzero.optim.adamw(0.1)


def train_step(params: Any, state: Any, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(lambda p, x: apply(p, x).square().mean())(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return fzero.optim.apply_updates(params, updates), state, loss


def apply(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        x = torch.tanh(x @ layer["weight"].T + layer["bias"])
    return x


def make_report(**options: Any) -> Any:
    modules = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    params = fzero.partition(fzero.lower(modules)[0], mesh := fzero.VirtualMesh(fsdp=3))
    state = OPTIMIZER.init(params)
    return fzero.simulate(train_step, mesh, **options).report(params, state, torch.ones(6, 6))


@pytest.fixture(scope="module")
def program() -> Program:
    program: Program = make_report().program
    return program


class Reader(HTMLParser):
    """Checks that tags are closed in order, and collects texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.titles, self.addresses = list[str](), set[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title" and "svg" in self.open:
            self.titles.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


def test_a_page_has_all_panels_and_needs_nothing(program: Program) -> None:
    page = draw_page(program)
    reader = read(page)
    assert tuple(re.findall("<summary>(.*?)</summary>", page)) == PANELS
    assert not reader.addresses and "script" not in reader.tags and "url(" not in page and "@import" not in page
    assert 'content="width=device-width"' in page and "prefers-color-scheme:dark" in page


def test_what_stands_under_the_mouse_is_what_the_program_says(program: Program) -> None:
    titles = read(draw_page(program)).titles
    peak = program.memory().summary
    assert any(title.split("\n")[0].endswith(f": {peak}") for title in titles), "no column has the peak"
    for transfer in program.timeline().transfers:
        assert any(transfer.name in title for title in titles), transfer.name
    assert {title for title in titles if title.startswith("0 x3")} == {
        "0 x3\n0.weight [6, 6]",
        "0 x3\n0.bias [6]",
        "0 x3\npadding",
    }


def test_the_user_s_code_is_named(program: Program) -> None:
    page = draw_page(program)
    assert "test_html_page.py" in page and "in apply: x = torch.tanh" in page
    assert str(Path(__file__).parent) not in page, "folders take room, and are nobody's business"


@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"memory": "2KiB"}, {"passes": ()}], ids=str)
def test_groups_add_up_to_the_memory_of_the_program(options: dict[str, Any]) -> None:
    program = make_report(**options).program
    groups = list_alive(program, lambda node, path: path.partition(".")[0] or str(node))
    assert [sum(values) for values in zip(*groups.values())] == program.memory().during


def test_loops_have_their_place_in_the_forward_or_the_backward_pass() -> None:
    weights = fzero.partition([torch.ones(4, 4) for _ in range(3)], mesh := fzero.VirtualMesh(fsdp=2))

    def loss(params: Any, x: Tensor) -> Tensor:
        carry, _ = fzero.scan(lambda x, _, weight: (torch.tanh(x @ weight), None), x, layers=params)
        return carry.square().mean()

    scanned = fzero.simulate(fzero.grad(loss), mesh).program(weights, torch.ones(4, 4))
    summed = fzero.accumulate(lambda p, x: (loss(p, x) * len(x), torch.tensor(float(len(x)))), 2)
    turned = fzero.simulate(summed, mesh).program(weights, torch.ones(4, 4))
    for program, group in ((scanned, "made in the backward pass"), (turned, "made behind it")):
        assert any(group in title for title in read(draw_page(program)).titles), group


def test_leaves_stand_where_they_lie() -> None:
    """There is padding between leaves of which no rank may have less than some elements."""
    leaves = {"block": {"a": torch.ones(5, 5), "b": torch.ones(7), "c": torch.ones(40)}}
    params = fzero.partition(leaves, mesh := fzero.VirtualMesh(fsdp=2), unit=32)
    program = fzero.simulate(lambda p: fzero.tree.map(lambda x: x * 2, p), mesh).program(params)
    (layout,) = (layout for layout in program.layouts.values() if not layout.replicated)
    assert layout.has_gaps
    shown = re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)" height="18"><title>block\n(.*?)<', draw_page(program))
    scale = (WIDTH - LEFT) / (2 * layout.shard)
    places = {text.partition(" ")[0]: (float(x) - LEFT, float(width)) for x, width, text in shown}
    for leaf, where in zip(layout.leaves, layout.leaf_ranges):
        assert places[leaf.path] == pytest.approx((where.start * scale, len(where) * scale), abs=0.02)
    assert sum(float(width) for _, width, _ in shown) == pytest.approx(WIDTH - LEFT, abs=0.1)


def test_a_report_writes_its_page(program: Program, tmp_path: Path) -> None:
    report = make_report()
    report.export_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == draw_page(report.program)
    with pytest.raises(fzero.FzeroError, match="page .*nowhere.* is not written"):
        report.export_html(tmp_path / "nowhere" / "report.html")


def test_two_programs_stand_side_by_side(program: Program, tmp_path: Path) -> None:
    other = make_report(stage=2)
    make_report().export_html(tmp_path / "page.html", beside=other)
    page = (tmp_path / "page.html").read_text()
    reader = read(page)
    assert not reader.addresses and "script" not in reader.tags
    assert tuple(re.findall("<summary>(.*?)</summary>", page)) == (
        "Side by side", "Memory over the step", "Time", "Communication", "Plans", "Where the programs differ",
    )  # fmt: skip
    sides = (program, other.program)
    for each in sides:
        assert any(title.split("\n")[0].endswith(f": {each.memory().summary}") for title in reader.titles)
    numbers = dict(re.findall(r"<tr><td>([\w ]+)</td>((?:<td.*?</td>)+)</tr>", page))
    moved = [sum(entry.nbytes for entry in each.comm()) for each in sides]
    assert moved[1] < moved[0] and f"<td>{moved[1] / moved[0] - 1:+.1%}</td>" in numbers["moved"]
    assert "<td>equal</td>" in numbers["ranks"]
    counts = [sum(entry.op == "all_gather" for entry in each.comm()) for each in sides]
    (gathers,) = re.findall(r"<tr><td>all_gather</td><td>fsdp</td><td>float32</td>(.*?)</tr>", page)
    cells = re.findall(r">([^<>]+)</td>", gathers)
    assert [int(cells[0]), int(cells[3])] == counts and counts[1] < counts[0]
    assert "\n-  all_gather      1 " in page and "\n+  all_gather" not in page, "stage 3 gathers a layer again"
    stacks = re.findall(r'<svg [^>]*aria-label="bytes over the step">.*?</svg>', page, re.DOTALL)
    scales = [re.findall(r'class="end">([^<]*)<', stack) for stack in stacks]
    assert scales[0] == scales[1] and len(scales) == 2, "the scales are equal"


def test_a_program_beside_itself_is_equal(program: Program) -> None:
    page = draw_comparison(program, program)
    assert "The listings are equal." in page and page.count("<td>equal</td>") == 7
    with pytest.raises(fzero.FzeroError, match="beside: is 3; give what step.report"):
        make_report().export_html("page.html", beside=3)


def test_names_of_the_user_are_escaped() -> None:
    params = {"<b>&": torch.ones(4)}
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(fzero.grad(lambda p, x: (p["<b>&"] * x).sum()), mesh)
    page = draw_page(step.report(fzero.partition(params, mesh), torch.ones(2, 4)).program)
    assert "b" not in read(page).tags - {"b"} and "<b>&" not in page and "&lt;b&gt;&amp;" in page


def test_a_program_without_state_has_a_page() -> None:
    program = fzero.simulate(lambda x: x * 2, fzero.VirtualMesh(fsdp=2)).report(torch.ones(2)).program
    assert "<p>Nothing.</p>" in draw_page(program)


def write(x: float) -> str:
    return f"{x:g}"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_stack({"a": list(range(100_000))}, str, write),
        lambda: draw_lanes({"a": [Bar(i, i + 0.9, f"{i}", 0) for i in range(100_000)]}, 100_000, write),
    ],
    ids=["stack", "lanes"],
)
def test_a_long_program_has_a_short_chart(draw: Callable[[], str]) -> None:
    chart = draw()
    assert len(chart) < 200_000 and chart.count("<title>") > 1


def test_a_stack_shows_the_highest_of_each_column() -> None:
    values = [0.0] * 10_000
    values[1234] = 7.0
    assert "at 1234: 7" in draw_stack({"a": values}, lambda at: f"at {at}", write)


def test_narrow_blocks_are_drawn_together_and_none_is_lost() -> None:
    blocks = [Bar(i / 1000, (i + 1) / 1000, "tiny", i // 500) for i in range(1000)]
    chart = draw_lanes({"a": blocks}, 1000.0, write)
    assert re.findall(r"tiny and (\d+) more", chart) == ["499", "499"]
