"""Charts as SVG: bytes over a step, stacked by what they are; lanes over time; bars.

Colours are variables of the page's style, so that they follow a light or a dark screen. What a part of a chart is
stands in its title.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT = 1000, 150
COLUMNS = 320
"""The columns of a stacked chart: a step of more operations shows the one of each column with most bytes."""
NARROWEST, WIDEST = 0.5, 5.0
"""The width from which on a bar has room of its own. Narrower ones are drawn together, up to the other width."""
COLOURS = 10
ROW, HEIGHT = 22, 260


class Bar(NamedTuple):
    """A part of a lane, in seconds. `tone` is the number of its colour."""

    start: float
    end: float
    text: str
    tone: int


def draw_stack(
    series: Mapping[str, Sequence[float]],
    name: Callable[[int], str],
    write: Callable[[float], str],
    limit: float | None = None,
    top: float = 0,
) -> str:
    """Values over positions, one series upon the other. `name` says what a position is, `write` what a value is. A line
    marks the `limit`, and the scale goes up to `top` at the least."""
    count = max((len(each) for each in series.values()), default=0)
    totals = [sum(each[i] for each in series.values()) for i in range(count)]
    if not totals or not max(totals):
        return "<p>Nothing.</p>"
    shown = [max(column, key=totals.__getitem__) for column in _cut(count, COLUMNS)]
    top = max(max(totals), limit or 0, top) * 1.05
    step, scale = (WIDTH - LEFT) / len(shown), (HEIGHT - 20) / top
    drawn, below = list(_draw_axis(top, scale, write)), [0.0] * len(shown)
    for tone, values in enumerate(series.values()):
        above = [low + values[at] for low, at in zip(below, shown)]
        if above != below:
            outline = [*_climb(above, step, scale), *reversed(list(_climb(below, step, scale)))]
            drawn.append(f'<polygon class="c{tone % COLOURS}" points="{" ".join(outline)}"/>')
        below = above
    if limit is not None:
        y = HEIGHT - limit * scale
        drawn.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for i, at in enumerate(shown):
        parts = [f"{write(each[at])} {label}" for label, each in series.items() if each[at]]
        text = "\n".join([f"{name(at)}: {write(totals[at])}", *reversed(parts)])
        drawn.append(_draw_box(LEFT + i * step, 0, step, HEIGHT, "hover", text))
    return _frame(drawn, HEIGHT + 4, "bytes over the step") + draw_legend(series)


def draw_lanes(lanes: Mapping[str, Iterable[Bar]], seconds: float, write: Callable[[float], str]) -> str:
    """Bars in lanes, from the beginning of a step to its end."""
    if not seconds:
        return "<p>Nothing.</p>"
    scale, drawn = (WIDTH - LEFT) / seconds, list[str]()
    for row, (label, bars) in enumerate(lanes.items()):
        y = row * (ROW + 8)
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 15}" class="end">{escape(_shorten(label))}</text>')
        drawn.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{ROW}"/>')
        for bar in _join_narrow(bars, NARROWEST / scale, WIDEST / scale):
            width = max((bar.end - bar.start) * scale, NARROWEST)
            text = f"{bar.text}\n{write(bar.start)} to {write(bar.end)}"
            drawn.append(_draw_box(LEFT + bar.start * scale, y, width, ROW, f"c{bar.tone}", text))
    height = len(lanes) * (ROW + 8) + 16
    for part in range(5):
        x, at = LEFT + part * (WIDTH - LEFT) / 4, ("start", "", "", "", "end")[part] or "middle"
        drawn.append(f'<text x="{x:.0f}" y="{height - 3}" class="{at}">{write(part * seconds / 4)}</text>')
    return _frame(drawn, height, "lanes over time")


def draw_bars(rows: Iterable[tuple[str, Sequence[tuple[str, float]]]], cuts: int = 1) -> str:
    """A bar for each row, of parts of these sizes. Lines cut each bar in `cuts` equal parts."""
    drawn, height = list[str](), 0
    for label, parts in rows:
        total, x = sum(size for _, size in parts) or 1.0, float(LEFT)
        drawn.append(f'<text x="{LEFT - 6}" y="{height + 15}" class="end">{escape(_shorten(label))}</text>')
        for i, (text, size) in enumerate(parts):
            width = size * (WIDTH - LEFT) / total
            drawn.append(_draw_box(x, height, width, ROW - 4, f"c{i % COLOURS}", f"{label}\n{text}"))
            x += width
        for cut in range(1, cuts):
            at = LEFT + cut * (WIDTH - LEFT) / cuts
            drawn.append(f'<line class="cut" x1="{at:.1f}" x2="{at:.1f}" y1="{height}" y2="{height + ROW - 4}"/>')
        height += ROW + 4
    return _frame(drawn, height, "leaves of buckets")


def draw_legend(labels: Iterable[str]) -> str:
    """Which colour stands for what."""
    marks = (f'<span><i class="b{i % COLOURS}"></i>{escape(label)}</span>' for i, label in enumerate(labels))
    return f'<p class="legend">{"".join(marks)}</p>'


def _cut(count: int, most: int) -> list[range]:
    """The numbers below `count` in order, in at most so many ranges of about equal lengths."""
    pieces = min(count, most)
    return [range(i * count // pieces, (i + 1) * count // pieces) for i in range(pieces)]


def _climb(values: Sequence[float], step: float, scale: float) -> Iterator[str]:
    """The points of a line of steps, without those in the middle of a level."""
    for i, value in enumerate(values):
        y = f"{HEIGHT - value * scale:.1f}"
        if i == 0 or values[i - 1] != value:
            yield f"{LEFT + i * step:.1f},{y}"
        if i + 1 == len(values) or values[i + 1] != value:
            yield f"{LEFT + (i + 1) * step:.1f},{y}"


def _join_narrow(bars: Iterable[Bar], least: float, most: float) -> Iterator[Bar]:
    """The bars in order, with neighbours of one colour that are narrower than `least` as one, up to `most`."""
    runs: list[tuple[Bar, int]] = []
    for bar in bars:
        last, count = runs[-1] if runs else (bar, 0)
        is_narrow = min(bar.end - bar.start, last.end - last.start) < least and bar.end - last.start < most
        if count and is_narrow and bar.tone == last.tone and bar.start - last.end < least:
            runs[-1] = last._replace(end=max(last.end, bar.end)), count + 1
        else:
            runs.append((bar, 1))
    for bar, count in runs:
        yield bar if count == 1 else bar._replace(text=f"{bar.text} and {count - 1} more")


def _draw_axis(top: float, scale: float, write: Callable[[float], str]) -> Iterator[str]:
    for part in range(4):
        value = part * top / 3.15
        y = HEIGHT - value * scale
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{escape(write(value))}</text>'


def _shorten(label: str) -> str:
    """A label with its end, which tells layers apart, where there is no room for all of it."""
    return label if len(label) <= 24 else "..." + label[-21:]


def _draw_box(x: float, y: float, width: float, height: float, kind: str, text: str) -> str:
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect class="{kind}" {place}><title>{escape(text)}</title></rect>'


def _frame(drawn: Iterable[str], height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
