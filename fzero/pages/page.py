"""The page of a program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fzero.base.dtypes import name_dtype
from fzero.base.sizes import format_size
from fzero.layout.layout import Layout
from fzero.pages.charts import Bar, draw_bars, draw_lanes, draw_legend, draw_stack
from fzero.pages.style import STYLE
from fzero.program.arguments import name_in
from fzero.program.flops import count_flops
from fzero.program.largest import WITHIN, list_alive
from fzero.program.operation import Node
from fzero.program.peak import Memory
from fzero.program.program import Program
from fzero.program.records import body_of, name_of, starts
from fzero.program.timeline import Timeline, Transfer
from fzero.values.regions import get_mark

MOST_ROWS, MOST_ARGUMENTS, MOST_CUTS, MOST_LARGEST = 40, 3, 64, 1000
GATHERED, SCATTERED, BESIDE = "gathered parameters", "gradients on their way", "other arguments and constants"
FORWARD, BACKWARD, BEHIND = "made in the forward pass", "made in the backward pass", "made behind it"
_NUMBER, _BUCKET = re.compile(r"\d+"), re.compile(r"(?<= of )\S+")
_FOLDER = re.compile(r"\([^()]*/(?=[^/]*:\d+ in )")


def draw_page(program: Program, limit: int | None = None) -> str:
    """One HTML page: what a step holds at each of its operations, beside a `limit` in bytes; when it computes and
    communicates; how its state is cut; its listing; what each line of the user's code takes. It has no script, and
    refers to nothing."""
    timeline, memory, listing = program.timeline(), program.memory(), str(program)
    flops, summary = count_flops(program), listing.partition("\n")[0]
    of_rank = f"Of the rank with the highest peak, {memory.summary}."
    parts = [
        f"<h1>{escape(program.name)}</h1><p>{escape(summary)}</p>",
        _draw_tiles(program, timeline, memory, sum(flops.values())),
        draw_panel("Memory over the step", draw_memory(program, limit), of_rank),
        draw_panel("Alive at the peak", _draw_largest(program)),
        draw_panel("Time", draw_time(timeline), "By the rates of this step; <code>calibrate</code> measures them."),
        draw_panel("Communication", _draw_communication(timeline)),
        draw_panel("State in slices", _draw_buckets(program), "The leaves of each bucket, and the borders of ranks."),
        draw_panel("Program", f"<pre>{escape(listing)}</pre>"),
        draw_panel("By line of your code", _draw_lines(program)),
        draw_panel("By layer", _draw_layers(flops)),
    ]
    if program.plan is not None:
        parts.insert(2, draw_panel("Plan", f"<pre>{escape(str(program.plan))}</pre>"))
    return frame_page(program.name, parts)


def frame_page(title: str, parts: Iterable[str]) -> str:
    """A file of HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</title><style>{STYLE}</style></head>\n<body>' + (
        "\n".join(parts) + "\n</body></html>\n"
    )


def draw_panel(title: str, body: str, note: str = "") -> str:
    shown = f"<p>{note}</p>" if note else ""
    return f"<details open><summary>{escape(title)}</summary>{shown}{body}</details>"


def _draw_tiles(program: Program, timeline: Timeline, memory: Memory, flops: int) -> str:
    tiles = list_tiles(program, timeline, memory, flops)
    shown = "".join(f"<div><b>{write(value)}</b>{name}</div>" for name, (value, write) in tiles.items())
    return f'<section class="tiles">{shown}</section>'


def list_tiles(
    program: Program, timeline: Timeline, memory: Memory, flops: int
) -> dict[str, tuple[float, Callable[[float], str]]]:
    """The main numbers of a program, each with what writes it."""
    return {
        "peak of a rank": (memory.peak, write_bytes),
        "a step": (timeline.seconds, write_seconds),
        "waiting": (timeline.exposed / timeline.seconds if timeline.seconds else 0.0, "{:.0%}".format),
        "moved": (sum(entry.nbytes for entry in program.comm()), write_bytes),
        "flops of a rank": (flops, write_flops),
        "ranks": (program.mesh.size(), "{:,}".format),
        "operations": (len(program.graph.nodes), "{:,}".format),
    }


# memory


def draw_memory(program: Program, limit: int | None, top: int = 0) -> str:
    """The bytes over a step, on a scale that ends at `top` at the least."""
    nodes = [node for node in program.graph.nodes if node.op != "placeholder"]
    found, given = list_alive(program, _name_groups(program)), len(program.placeholders)
    series = {group: values[given:] for group, values in found.items()}
    order = [BESIDE, GATHERED, SCATTERED, FORWARD, BACKWARD, BEHIND, WITHIN]
    state = [group for group in series if group not in order]
    ordered = {group: series[group] for group in (*state, *order) if group in series}
    return draw_stack(ordered, lambda at: _name_node(nodes[at]), write_bytes, limit, top)


def _name_groups(program: Program) -> Callable[[Node | None, str], str]:
    """A function that names the group of what a node makes."""
    roots = list(dict.fromkeys(argument.path.partition(".")[0] for argument in program.arguments))
    gathered = {node for node in program.graph.nodes if starts(node) == "gathered"}
    position = {node: at for at, node in enumerate(program.graph.nodes)}
    backward = set(filter(_is_of_backward, program.graph.nodes))
    last = max((position[node] for node in backward), default=len(position))

    def name(node: Node | None, path: str) -> str:
        root = roots.index(path.partition(".")[0]) if path else MOST_ARGUMENTS
        if path or node is None:
            return f"argument {roots[root]}" if root < MOST_ARGUMENTS else BESIDE
        if node in gathered:
            return GATHERED
        if starts(node) == "scattered":
            return SCATTERED
        return BACKWARD if node in backward else FORWARD if position.get(node, 0) < last else BEHIND

    return name


def _is_of_backward(node: Node) -> bool:
    """Whether a backward pass made a node. A loop counts as one where a turn has such nodes: it gives gradients."""
    body = body_of(node)
    return get_mark(node).in_backward if body is None else any(map(_is_of_backward, body.graph.nodes))


def _name_node(node: Node) -> str:
    bucket = name_in(node) if starts(node) is not None else None
    what = name_of(node) if node.op == "call_function" else node.op
    line = f"\n{_shorten(node.stack_trace)}" if node.stack_trace else ""
    return what + (f" {bucket}" if bucket is not None else "") + line


def _draw_largest(program: Program) -> str:
    values = [(_FOLDER.sub("(", value.what), value.nbytes) for value in program.largest(MOST_LARGEST)]
    found = _fold(values, lambda what: _BUCKET.sub(lambda name: _NUMBER.sub("*", name[0]), what))
    return draw_table(("bytes", "of them", "value"), [(write_bytes(x), str(n), what) for what, n, x in found])


# time


def draw_time(timeline: Timeline, seconds: float | None = None) -> str:
    """The lanes of a step, on a scale of so many seconds: by default those of the step."""
    lanes = {lane: [_draw_entry(entry) for entry in entries] for lane, entries in timeline.lanes.items()}
    named = {lane.replace("communication", "wire"): bars for lane, bars in lanes.items()}
    tones = draw_legend(["compute", "hidden", "compute waits for it"])
    return draw_lanes(named, seconds or timeline.seconds, write_seconds) + tones


def _draw_entry(entry: Any) -> Bar:
    if not isinstance(entry, Transfer):
        return Bar(entry.start, entry.end, entry.name, 0)
    text = f"{entry.name}, {format_size(entry.comm.nbytes)}, compute waits {write_seconds(entry.exposed)}"
    return Bar(entry.start, entry.end, text, 2 if entry.exposed > 0.5 * entry.seconds else 1)


def _draw_communication(timeline: Timeline) -> str:
    rows = [
        (
            *kind, str(len(members)), write_bytes(sum(each.comm.nbytes for each in members)),
            write_seconds(sum(each.seconds for each in members)), write_seconds(sum(each.exposed for each in members)),
        )
        for kind, members in group_transfers(timeline).items()
    ]  # fmt: skip
    return draw_table(("collective", "axis", "dtype", "times", "bytes", "time", "compute waits"), rows)


def group_transfers(timeline: Timeline) -> dict[tuple[str, str, str], list[Transfer]]:
    """Collective, axis and dtype -> the transfers of this kind."""
    groups: dict[tuple[str, str, str], list[Transfer]] = {}
    for each in timeline.transfers:
        groups.setdefault((each.comm.op, each.comm.axis, name_dtype(each.comm.dtype)), []).append(each)
    return groups


# state


def _draw_buckets(program: Program) -> str:
    alike: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in program.layouts.values():
        key = _NUMBER.sub("*", layout.bucket), *(leaf.shape for leaf in layout.leaves), layout.replicated
        alike.setdefault(key, []).append(layout)
    rows = [_list_leaves(members) for members in alike.values() if not members[0].replicated][:MOST_ROWS]
    world = max((layout.world for layout in program.layouts.values()), default=1)
    return draw_bars(rows, world if world <= MOST_CUTS else 1) if rows else "<p>Nothing.</p>"


def _list_leaves(layouts: Sequence[Layout]) -> tuple[str, list[tuple[str, float]]]:
    """A bucket's name, and its leaves with their elements; of equal layers those of the first."""
    layout, parts, end = layouts[0], list[tuple[str, float]](), 0
    label = layout.bucket + (f" x{len(layouts)}" if len(layouts) > 1 else "")
    for leaf, where in sorted(zip(layout.leaves, layout.leaf_ranges), key=lambda pair: pair[1].start):
        parts += [("padding", where.start - end), (f"{leaf.path} {list(leaf.shape)}", len(where))]
        end = where.stop
    return label, [part for part in (*parts, ("padding", layout.world * layout.shard - end)) if part[1]]


# code


def _draw_lines(program: Program) -> str:
    costs, counts, seconds = program.costs(), Counter[str](), dict[str, float]()
    for node in program.graph.nodes:
        if node.op == "call_function":
            line = node.stack_trace or "no line: made by a pass"
            seconds[line] = seconds.get(line, 0.0) + costs[node].seconds
            counts[line] += 1
    most = sorted(seconds.items(), key=lambda item: -item[1])[:MOST_ROWS]
    rows = [(write_seconds(taken), str(counts[line]), _shorten(line)) for line, taken in most]
    return draw_table(("compute", "operations", "line"), rows)


def _draw_layers(flops: Mapping[str, int]) -> str:
    found = _fold(flops.items(), lambda layer: _NUMBER.sub("*", layer))
    rows = [(layer, str(n), write_flops(total)) for layer, n, total in found]
    return draw_table(("layer or operation", "of them", "flops of a rank"), rows)


# words


def _fold(rows: Iterable[tuple[str, int]], mask: Callable[[str], str]) -> list[tuple[str, int, int]]:
    """`(name, how many, sum)` of rows whose names are alike behind a `mask`, the largest first. A single one keeps its
    name."""
    alike: dict[str, dict[str, list[int]]] = {}
    for name, value in rows:
        alike.setdefault(mask(name), {}).setdefault(name, []).append(value)
    found = [
        (masked if len(names) > 1 else next(iter(names)), sum(map(len, names.values())), sum(map(sum, names.values())))
        for masked, names in alike.items()
    ]
    return sorted(found, key=lambda row: -row[2])[:MOST_ROWS]


def draw_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    shown = [f"<tr>{''.join(_draw_cell(cell) for cell in row)}</tr>" for row in rows]
    if not shown:
        return "<p>Nothing.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(shown)}</table></div>'


def _draw_cell(text: str) -> str:
    is_number = text[:1].isdigit()
    return f"<td{' class=number' if is_number else ''}>{escape(text)}</td>"


def write_bytes(nbytes: float) -> str:
    return format_size(round(nbytes))


def write_flops(flops: float) -> str:
    """`1.5e12 -> "1.50 T"`."""
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
    size, unit = next(((size, unit) for size, unit in units if flops >= size), (1e3, "k"))
    return f"{flops / size:,.2f} {unit}"


def write_seconds(seconds: float) -> str:
    """`0.0123 -> "12.3 ms"`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.1f} us"


def _shorten(line: str) -> str:
    """`/long/folder/train.py:12 in step: code` without its folder."""
    where, _, code = line.partition(" in ")
    return where.rpartition("/")[2] + (f" in {code}" if code else "")
