"""The grammar of random train steps: tables of source text with slots.

A slot is a name in angle brackets. `<N>` is the new variable of a statement, `<D>` the width of a row, and

    <R>  rows [n, D], each of one example           <W>  [D, D] of leaves     <S>  [] of leaves
    <X>  rows of any shape                          <B>  [D] of leaves        <U>  any value of leaves
    <T>  a 0-d value of this rank's examples        <C>  [1] of leaves        <L>  a leaf of the parameters
    <M>  rows [n, D] in a variable                  <E>  [5, D] of leaves     <Q>  [D, D], a product of leaves

`x` [n, D] and `t` [n] are the batch, `p` and `s` the parameters and the other state.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """A piece of source text, how often it is chosen, and the switch that it hangs on."""

    text: str
    weight: float = 1.0
    switch: str = ""
    is_linear: bool = True


def rules(text: str) -> tuple[Rule, ...]:
    """The rules of a table: a rule a line.

    A heading `## switch 0.5 nonlinear blocks` holds for the lines below. All its words are optional: the name of a
    switch, a weight, and two flags. With `blocks`, a rule is a paragraph.
    """
    found: list[Rule] = []
    for section in re.split(r"^## ", f"## \n{text}", flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        words = heading.split()
        weights = [float(word) for word in words if word[0].isdigit()]
        switches = [word for word in words if not word[0].isdigit() and word not in ("nonlinear", "blocks")]
        for piece in body.strip("\n").split("\n\n" if "blocks" in words else "\n"):
            if piece:
                found.append(Rule(piece, *weights or [1.0], *switches or [""], "nonlinear" not in words))
    return tuple(found)


WAITING: dict[str, str] = {}
"""Switch -> the cause that is still open. Steps with a rule of such a switch are not drawn, except with `--all`."""
