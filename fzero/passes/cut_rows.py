"""Cut rows: operations on lists with one item for each leaf, cut into several calls by leaf."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from fzero.optim.operations import MAPS, STAGES, SUMS
from fzero.program.arguments import operand_of, position_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, name_of, record


def has_rows(node: Node) -> bool:
    """Whether a node calls an operation on lists that computes each leaf on its own, with one result for each."""
    if node.op != "call_function" or not node.args or not isinstance(operand_of(node), (list, tuple)):
        return False
    name = name_of(node)
    if name in SUMS | MAPS:
        return len(node.meta["val"]) == len(operand_of(node))
    return name.startswith("_foreach_") or record(node).gradients is not None or name in STAGES


def cut_rows(program: Program, call: Node, groups: Sequence[Sequence[int]]) -> list[Node]:
    """Replace one call by several: one for each group of leaves, in order. Returns the new calls.

    An argument that is a list has one item for each leaf, or an equal number of them.
    """
    count, items, calls = len(operand_of(call)), dict[tuple[Node, int], Node](), list[Node]()
    value = call.meta.get("val")  # None of a call that writes into its operands: it has no lists, and no users
    is_each = all(isinstance(x, (list, tuple)) for x in value or ())  # several lists of results
    lists = (value or ()) if is_each else [value]
    columns = list(call.users) if is_each else [call]

    def cut(given: Any, rows: Sequence[int]) -> Any:
        each, rest = divmod(len(given), count) if isinstance(given, (list, tuple)) else (0, 0)
        is_column = each == 1 or (each > 1 and rest == 0 and name_of(call) in MAPS)
        return [given[row * each + i] for row in rows for i in range(each)] if is_column else given

    with program.graph.inserting_before(call.next):
        for rows in groups:
            args = [cut(arg, rows) for arg in call.args]
            kept = [[each[row] for row in rows] for each in lists]
            results = value and (tuple(kept) if is_each else kept[0])
            part = program.emit_as(results, call.target, *args, **call.kwargs)
            part.meta.update({key: each for key, each in call.meta.items() if key != "val"})
            calls.append(part)
            for column in columns:
                at = position_of(column) if is_each else 0
                news = part if column is call else program.emit_as(kept[at], operator.getitem, part, at)
                for index, row in enumerate(rows):
                    items[column, row] = program.emit_as(kept[at][index], operator.getitem, news, index)
    old = [(column, item) for column in columns for item in column.users if is_call(item, operator.getitem)]
    program.substitute_all({item: items[column, position_of(item)] for column, item in old})
    for node in dict.fromkeys([*columns, call]):
        program.graph.erase_node(node)
    return calls
