"""The scope of a step while it is drawn: its variables, with values, and the text that rules become in it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from property_tests.random_steps import losses
from property_tests.random_steps.grammar import Rule
from property_tests.random_steps.program import MODULES, STATE, Program

SLOT = re.compile(r"<([A-Z])>")
CASTS = ("double()", "double()", "to(torch.float64)", "to(x.dtype)")
LIMIT = 8.0
"""The largest element of a variable: larger ones lose digits."""


class Scope:
    """Variables of a step. Statements are run as they are drawn, on one rank's part of the batch, without fzero. So
    shapes are known, and a statement that torch refuses is drawn again."""

    def __init__(self, base: Program, draws: random.Random, waiting: frozenset[str]) -> None:
        self.base, self.random = base, draws
        self.is_narrow = any(dtype != "float64" for name, (_, dtype, _) in base.shapes.items() if name != "h")
        narrow = () if self.is_narrow else ("float32", "bfloat16", "autocast")
        self.off = waiting | {*narrow, *(("pmean",) if base.is_local else ())}
        self.tainted: set[str] = set()
        """Variables that depend on other ranks' examples."""
        self._kinds: dict[str, str] = {"x": "rows"}
        self._run_script()

    def _run_script(self) -> None:
        """Run the script up to the step, with all state that rules may name."""
        everything = replace(self.base, loss=("p['norm']", *MODULES, *(f"s['{name}']" for name in STATE)))
        self.names: dict[str, Any] = {"__name__": "step"}
        exec(everything.source().split("def step(")[0], self.names)
        self.names["p"] = self.names["params"]()
        self.names["s"] = self.names["init"](self.names["p"])
        self.names["x"], self.names["t"] = self.names["batch"](self.base.rows[0])

    def run(self, statement: str) -> str:
        """Run a statement, and return it."""
        exec(statement, self.names)
        return statement

    # ---- rules

    def choose(self, table: Sequence[Rule], *, linear: bool = False) -> Rule:
        """A rule of the table that no switch turns off."""
        fitting = [rule for rule in table if rule.switch not in self.off and (rule.is_linear or not linear)]
        return self.random.choices(fitting, [rule.weight for rule in fitting])[0]

    def fill(self, text: str, new: str = "") -> str:
        """The text of a rule, its slots filled; `new` is the variable that the rule makes."""
        return SLOT.sub(lambda match: new if match[1] == "N" else self._fill_slot(match[1]), text)

    def _fill_slot(self, letter: str) -> str:
        d = self.base.width
        shapes: dict[str, tuple[int, ...] | None]
        shapes = {"U": None, "W": (d, d), "B": (d,), "S": (), "C": (1,), "E": (5, d)}
        if letter in shapes:
            return self._uniform(shapes[letter])
        match letter:
            case "D":
                return str(d)
            case "T":
                return f"({self.fill(self.choose(losses.NUMBERS).text)})"
            case "R":
                return self.variable("rows", (d,)) or "x"
            case "M":
                return self.variable("rows", (d,), but="x") or "(x * 1)"
            case "X":
                return self.variable("rows") or "x"
            case "Q":
                return f"({self._uniform((d, d))} @ {self._leaf((d, d))})"
            case "L":
                return self.random.choice(self._leaves(None))
        raise ValueError(f"no slot <{letter}>")

    def variable(self, kind: str, tail: tuple[int, ...] | None = None, but: str = "") -> str | None:
        """A variable of a kind, mostly a recent one; rows of shape [n, *tail]."""
        skip = 1 if kind == "rows" else 0
        fitting = [
            name
            for name, found in self._kinds.items()
            if found == kind and name != but and (tail is None or tuple(self.names[name].shape[skip:]) == tail)
        ]
        if not fitting:
            return None
        return self.random.choice(fitting[-3:] if self.random.random() < 0.6 else fitting)

    def _uniform(self, shape: tuple[int, ...] | None) -> str:
        variable = self.variable("uniform", shape) if self.random.random() < 0.35 else None
        return variable or self._leaf(shape)

    def _leaf(self, shape: tuple[int, ...] | None) -> str:
        text = self.random.choice(self._leaves(shape))
        return f"{text}.{self.random.choice(CASTS)}" if self.is_narrow and self.random.random() < 0.6 else text

    def _leaves(self, shape: tuple[int, ...] | None) -> list[str]:
        """Leaves of a shape: of the parameters, and now and then of the state."""
        of_leaf = {f'p["{name}"]': of for name, (of, _, _) in self.base.shapes.items() if name != "h"}
        d = self.base.width
        for number in range(self.base.layers):
            of_leaf |= {f'p["layers"][{number}]["w"]': (d, d), f'p["layers"][{number}]["b"]': (d,)}
        found = [leaf for leaf, of in of_leaf.items() if shape is None or of == shape]
        state = {(d,): 's["mean"]', (): 's["scale"]'}
        is_state = shape in state and self.random.random() < 0.3
        return [*found, state[shape]] if is_state else found

    # ---- statements and expressions

    def statement(self, table: Sequence[Rule], kind: str) -> str | None:
        """A statement that makes a variable, `h3` of rows or `u3` of leaves; None after ten that do not run."""
        name = f"{'h' if kind == 'rows' else 'u'}{len(self._kinds)}"
        for _ in range(10):
            rule = self.choose(table)
            text = self.fill(rule.text, name)
            text = text if "<N>" in rule.text else f"{name} = {text}"
            if self._try(text, name, kind):
                return text
        return None

    def _try(self, text: str, name: str, kind: str) -> bool:
        """Run a statement. Undo what it wrote where it is no good."""
        kept = {key: self.names[key].clone() for key in self._kinds}
        state = tree.map(torch.clone, (self.names["p"], self.names["s"]))
        try:
            exec(text, self.names)
            is_good = self._is_good(self.names[name], kind) and all(_is_moderate(self.names[key]) for key in kept)
        except Exception:
            is_good = False
        if not is_good:
            self.names.update(kept)
            self.names["p"], self.names["s"] = state
            return False
        self._kinds[name] = kind
        if self.is_tainted(text):
            self.tainted.add(name)
        return True

    def _is_good(self, value: Any, kind: str) -> bool:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return False
        return _is_moderate(value) and (kind != "rows" or (value.ndim > 0 and len(value) == len(self.names["x"])))

    def is_tainted(self, text: str) -> bool:
        """Whether a text depends on other ranks' examples."""
        return not {"pmean", *self.tainted}.isdisjoint(re.findall(r"\w+", text))

    def expression(self, table: Sequence[Rule]) -> str | None:
        """An expression whose value is a tensor of moderate numbers; None after ten that are not."""
        for _ in range(10):
            text = self.fill(self.choose(table).text)
            try:
                value = eval(text, self.names)
            except Exception:
                continue
            if isinstance(value, Tensor) and (not value.is_floating_point() or _is_moderate(value)):
                return text
        return None


def _is_moderate(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all()) and (
        not value.numel() or float(value.detach().double().abs().max()) < LIMIT
    )
