"""Peak: the bytes of tensors that are alive through a step, and the most at once. `memory` counts them."""

from __future__ import annotations

from typing import NamedTuple

from fzero.base.sizes import format_size
from fzero.program.tables import LINES, limit_lines

BAR = 32
"""Characters of the bar of the peak."""


class Memory(NamedTuple):
    """Bytes of live tensors on the device of the rank whose peak is largest: the `peak`, the node `at` which it is
    reached, the bytes that are alive after each node (`timeline`), and those while it runs (`during`). `host` is the
    largest peak of any rank on the host beside the device: of state that lies there, and of copies. `disk` is the
    largest peak of any rank in files. Another rank may have these than the one with the largest peak on the device.
    `names` are those of the nodes, or none; the first `arguments` nodes are the step's arguments. Prints as a table.

    Ranks hold slices of different sizes, so that values computed from slices differ in size too.
    """

    peak: int
    at: str
    timeline: list[int]
    during: list[int]
    host: int = 0
    disk: int = 0
    names: tuple[str, ...] = ()
    arguments: int = 0

    def __str__(self) -> str:
        return self.table()

    @property
    def summary(self) -> str:
        """The peaks in one line: "3.7 KiB and 1.0 KiB on the host"."""
        beside = ((self.host, "on the host"), (self.disk, "on disk"))
        return format_size(self.peak) + "".join(f" and {format_size(size)} {where}" for size, where in beside if size)

    def table(self, *, full: bool = False) -> str:
        """The bytes through the step. The first line is of all arguments. Each other one is of nodes that run one after
        the other: the most that are alive during one of them, and its name. With `full` each node has a line."""
        head = [f"peak {self.summary}, at {self.at}", f"  {'nodes':<14} {'bytes':>10}"]
        count, rows = len(self.during), list[str]()
        if self.arguments:
            rows.append(self._draw(range(self.arguments), self.arguments - 1, "all arguments"))
        each = 1 if full else max(1, -(-(count - self.arguments) // (LINES - len(head) - 1)))
        for start in range(self.arguments, count, each):
            nodes = range(start, min(start + each, count))
            most = max(nodes, key=self.during.__getitem__)
            rows.append(self._draw(nodes, most, self.names[most] if self.names else ""))
        return limit_lines(head, rows, full)

    def _draw(self, nodes: range, most: int, name: str) -> str:
        number = str(nodes.start) if len(nodes) == 1 else f"{nodes.start} to {nodes.stop - 1}"
        bar = "#" * round(BAR * self.during[most] / max(self.peak, 1))
        return f"  {number:<14} {format_size(self.during[most]):>10}  {bar:<{BAR}}  {name}".rstrip()
