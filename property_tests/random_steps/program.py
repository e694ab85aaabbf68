"""Random train steps as source text: `draw(seed)` returns a step, its state and its batch, as a script to paste."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fzero
from property_tests.random_steps import grammar, updates
from property_tests.random_steps.grammar import WAITING, Rule

HEAD = '''\
import functools

import torch
from torch.nn import functional as F

import fzero


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.round(x * 4) / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, (grad * x).sum()


TABLE = torch.linspace(0.5, 1.0, 8, dtype=torch.float64)
CACHE = {}


@functools.lru_cache
def table(n):
    return torch.arange(1, n + 1, dtype=torch.float64) / n
'''

NORM = """
_, _, norm = fzero.lower_stateful(torch.nn.BatchNorm1d({width}, dtype=torch.float64))
"""


@dataclass(frozen=True)
class Program:
    """A train step. `source` makes it a script that defines `params`, `init`, `batch` and `step`.

    `is_local`: examples of one rank meet in the loss. Such a step is compared with the mean over ranks of plain steps
    on each rank's part; any other with the plain step on the whole batch.
    """

    seed: int
    is_local: bool
    mesh: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]  # of a rank, for each call
    stage: int
    donate: bool
    width: int
    shapes: dict[str, tuple[tuple[int, ...], str, float]]  # leaf -> shape, dtype, deviation
    layers: int
    dtype: str  # of the batch
    loss: tuple[str, ...]
    terms: tuple[str, ...]
    rowwise: dict[str, str]  # results of each example, by name
    own: dict[str, str]  # results of each rank's examples, by name
    update: tuple[str, ...]
    metrics: tuple[str, ...]
    gradients: str  # how the loss is differentiated
    contexts: tuple[str, ...]  # around each call
    between: str = ""  # a statement between calls
    held: str = ""  # what a user makes of a leaf before the first call

    @property
    def world(self) -> int:
        """The number of ranks."""
        size = 1
        for _, ranks in self.mesh:
            size *= ranks
        return size

    @property
    def text(self) -> str:
        """The statements that hang on a draw, for a search of names."""
        parts = (*self.loss, *self.terms, *self.rowwise.values(), *self.own.values(), *self.update, *self.metrics)
        return "\n".join(parts)

    def source(self) -> str:
        """The script."""
        axes = [name for name, _ in self.mesh]
        mean = "x"
        for axis in axes:
            mean = f"fzero.pmean({mean}, {axis!r})"
        lines = [HEAD]
        lines += [NORM.format(width=self.width)] * ("norm(" in self.text or "(norm)" in self.text)
        lines += ["", f"def pmean(x):\n    return {mean}\n\n", *self._state_lines(), "", *self._step_lines(), ""]
        return "\n".join(lines)

    def call(self) -> str:
        """How the script is run, as a comment for a human."""
        mesh = ", ".join(f"{name}={ranks}" for name, ranks in self.mesh)
        batches = f"batch(rows * {self.world}) for rows in {self.rows}"
        return (
            f"# fzero.simulate(step, fzero.VirtualMesh({mesh}), stage={self.stage}, donate={self.donate}), "
            f"{batches}\n# contexts {self.contexts}, between {self.between!r}, held {self.held!r}, "
            f"local {self.is_local}\n"
        )

    def _state_lines(self) -> Iterator[str]:
        yield "def draw(*shape, dtype=torch.float64, deviation=0.5):"
        yield "    return (torch.randn(shape, dtype=torch.float64) * deviation).to(dtype)\n\n"
        yield f"def params():\n    torch.manual_seed({self.seed % 1000})\n    return {{"
        for name, (shape, dtype, deviation) in self.shapes.items():
            options = f"dtype=torch.{dtype}, deviation={deviation}"
            yield f"        {name!r}: draw({', '.join(map(str, shape))}{', ' if shape else ''}{options}),"
        if self.layers:
            layer = f'{{"w": draw({self.width}, {self.width}), "b": draw({self.width})}}'
            yield f"        'layers': [{', '.join([layer] * self.layers)}],"
        if "p['norm']" in self.text:
            yield f"        'norm': {{'weight': draw({self.width}) + 1, 'bias': draw({self.width})}},"
        yield "    }\n\n"
        yield f"def init(p):\n    torch.manual_seed({self.seed % 1000 + 1})\n    return {{"
        entries = {
            "m": "fzero.tree.map(torch.zeros_like, p)",
            "ema": "fzero.tree.map(lambda a: a * 0.5, p)",
            "adam": "fzero.optim.adamw(0.05).init(p)",
            "chain": "fzero.optim.chain(fzero.optim.clip_by_global_norm(0.5), fzero.optim.adam(0.05)).init(p)",
            "count": "torch.tensor(1)",
            "scale": "torch.tensor(1.5, dtype=torch.float64)",
            "avg": "torch.tensor(0.25, dtype=torch.float64)",
            "history": f"draw(3, {self.width})",
            "mean": f"draw({self.width})",
            "var": f"draw({self.width}).abs()",
            "norm": f"{{'running_mean': torch.zeros({self.width}, dtype=torch.float64), 'running_var': "
            f"torch.ones({self.width}, dtype=torch.float64), 'num_batches_tracked': torch.tensor(0)}}",
        }
        for name, text in entries.items():
            if f"s['{name}']" in self.text or f's["{name}"]' in self.text:
                yield f"        {name!r}: {text},"
        yield "    }\n\n"
        yield f"def batch(rows):\n    torch.manual_seed({self.seed % 1000 + 2})"
        yield f"    return draw(rows, {self.width}, dtype=torch.{self.dtype}), torch.randint(5, (rows,))\n"

    def _step_lines(self) -> Iterator[str]:
        yield "def step(p, s, x, t):\n    def loss_fn(p):"
        yield from _indent(self.loss, 8)
        yield f"        loss = {' + '.join(self.terms) or 'x.mean()'}"
        yield f"        return loss, ({_dict(self.rowwise)}, {_dict(self.own)})\n"
        if self.gradients == "fzero":
            yield "    (loss, (results, own)), g = fzero.value_and_grad(loss_fn, has_aux=True)(p)"
        else:
            yield "    g, (loss, (results, own)) = torch.func.grad_and_value(loss_fn, has_aux=True)(p)"
        yield "    results['loss'], out = loss, dict(s)"
        yield from _indent(self.update, 4)
        for number, metric in enumerate(self.metrics):
            yield f"    results['metric{number}'] = {metric}"
        yield "    return new, out, results, own"

    def define(self) -> dict[str, Any]:
        """The names of the script, freshly run."""
        source, name = self.source(), f"step_{self.seed}.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        names: dict[str, Any] = {"__name__": "step"}
        exec(compile(source, name, "exec"), names)
        return names


def _indent(statements: Sequence[str], by: int) -> Iterator[str]:
    for statement in statements:
        for line in statement.split("\n"):
            yield " " * by + line


def _dict(entries: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in entries.items()) + "}"


SLOT = re.compile(r"<([A-Z])>")
KINDS = {"uniform": "QUWBSCE", "rows": "RXM"}


class Draw:
    """One draw of a program. Statements are run as they are drawn, on one part of the batch without fzero: so the
    shapes and sizes of variables are known, and a statement that torch refuses is drawn again."""

    def __init__(self, seed: int, waiting: frozenset[str], attempt: int = 0) -> None:
        self.random = random.Random(f"{seed}.{attempt}")
        self.seed, self.waiting = seed, waiting
        self.variables: dict[str, tuple[str, torch.Tensor]] = {}  # name -> kind, value
        self.tainted: set[str] = set()  # names that depend on other ranks
        self.count = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choose(self, table: Sequence[Rule], without: frozenset[str] = frozenset(), linear: bool = False) -> Rule:
        off = self.waiting | without
        fitting = [rule for rule in table if rule.switch not in off and (rule.is_linear or not linear)]
        return self.random.choices(fitting, [rule.weight for rule in fitting])[0]

    def program(self) -> Program:
        """The program."""
        pick, chance = self.random.choice, self.chance
        self.is_local, self.is_narrow = chance(0.3), chance(0.25)
        self.width, world = pick([1, 2, 3, 3, 4, 5]), pick([2, 2, 3, 3, 4, 5])
        mesh: tuple[tuple[str, int], ...] = (("fsdp", world),)
        if world == 4 and chance(0.5):
            mesh = pick([(("replica", 2), ("fsdp", 2)), (("fsdp", 2), ("replica", 2))])
        rows = pick([1, 1, 2, 3])
        steps = pick([1, 2, 2, 3])
        dtype = pick(["float64", "float32", "bfloat16"]) if self.is_narrow and chance(0.3) else "float64"
        self.base = Program(
            seed=self.seed,
            is_local=self.is_local,
            mesh=mesh,
            rows=(rows,) * steps,
            stage=pick([1, 2, 3]),
            donate=chance(0.7),
            width=self.width,
            shapes=self._shapes(),
            layers=pick([0, 0, 1, 2, 3]),
            dtype=dtype,
            loss=(),
            terms=(),
            rowwise={},
            own={},
            update=(),
            metrics=(),
            gradients="fzero" if chance(0.8) else "torch",
            contexts=("",) * steps,
            # the text names all state, so that statements can be tried before the program is complete
        )
        self._run_head()
        program = self._body()
        return self._surroundings(program)

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], str, float]]:
        d = self.width
        shapes = {"w": (d, d), "v": (d, d), "b": (d,), "a": (d,), "c": (1,), "s": (), "e": (5, d)}
        dtypes = ["float64", "float64", "float32", "bfloat16", "float16"] if self.is_narrow else ["float64"]
        return {name: (shape, self.random.choice(dtypes), 0.5) for name, shape in shapes.items()}

    def _run_head(self) -> None:
        """Run the head of the script with all state."""
        all_state = "\n".join(f"s['{name}']" for name in ("mean", "var", "history", "count", "scale", "avg", "norm"))
        everything = replace(self.base, loss=("p['norm'] norm(", all_state), rows=self.base.rows)
        source = everything.source().split("def step(")[0]
        self.names: dict[str, Any] = {"__name__": "step"}
        exec(source, self.names)
        self.names["p"] = self.names["params"]()
        self.names["s"] = self.names["init"](self.names["p"])
        self.names["x"], self.names["t"] = self.names["batch"](self.base.rows[0])
        self.variables["x"] = ("rows", self.names["x"])

    # ---- slots

    def _fill(self, text: str, new: str = "") -> str:
        return SLOT.sub(lambda match: self._slot(match[1], new), text)

    def _slot(self, letter: str, new: str) -> str:
        d = self.width
        match letter:
            case "N":
                return new
            case "D":
                return str(d)
            case "T":
                return f"({self._fill(self.choose(grammar.NUMBERS).text)})"
            case "R":
                return self._variable("rows", (d,)) or "x"
            case "X":
                return self._variable("rows", None) or "x"
            case "M":
                return self._variable("rows", (d,), is_made=True) or "(x * 1)"
            case "Q":
                return f"({self._uniform((d, d))} @ {self._leaf((d, d))})"
            case "L":
                return self.random.choice(self._leaves(None))
            case "U":
                return self._uniform(None)
            case "W":
                return self._uniform((d, d))
            case "B":
                return self._uniform((d,))
            case "S":
                return self._uniform(())
            case "C":
                return self._uniform((1,))
            case "E":
                return self._uniform((5, d))
        raise ValueError(letter)

    def _variable(self, kind: str, tail: tuple[int, ...] | None, is_made: bool = False) -> str | None:
        skip = 1 if kind == "rows" else 0
        fitting = [
            name
            for name, (found, value) in self.variables.items()
            if found == kind and (tail is None or tuple(value.shape[skip:]) == tail) and not (is_made and name == "x")
        ]
        if not fitting:
            return None
        recent = fitting[-3:]
        return self.random.choice(recent if self.chance(0.6) else fitting)

    def _uniform(self, shape: tuple[int, ...] | None) -> str:
        variable = self._variable("uniform", shape) if self.chance(0.35) else None
        return variable or self._leaf(shape)

    def _leaf(self, shape: tuple[int, ...] | None) -> str:
        text = self.random.choice(self._leaves(shape))
        if self.is_narrow and self.chance(0.6):
            return f"{text}.{self.random.choice(['double()', 'double()', 'to(torch.float64)', 'to(x.dtype)'])}"
        return text

    def _leaves(self, shape: tuple[int, ...] | None) -> list[str]:
        found = [f'p["{name}"]' for name, (of, _, _) in self.base.shapes.items() if shape is None or of == shape]
        d = self.width
        for number in range(self.base.layers):
            found += [f'p["layers"][{number}]["w"]'] * (shape in (None, (d, d)))
            found += [f'p["layers"][{number}]["b"]'] * (shape in (None, (d,)))
        found += ['s["mean"]'] * (shape == (d,) and self.chance(0.3))
        found += ['s["scale"]'] * (shape == () and self.chance(0.3))
        return found

    # ---- statements

    def _statement(self, table: Sequence[Rule], kind: str, without: frozenset[str] = frozenset()) -> str | None:
        """A new statement of a rule of the table that runs; None after ten that do not."""
        for _ in range(10):
            rule = self.choose(table, without)
            name = f"v{self.count + 1}"
            text = self._fill(rule.text, name)
            text = text if "<N>" in rule.text else f"{name} = {text}"
            if self._try(text, name, kind):
                self.count += 1
                return text
        return None

    def _try(self, text: str, name: str, kind: str) -> bool:
        before = {key: value.clone() for key, (_, value) in self.variables.items()}
        state = fzero.tree.map(lambda leaf: leaf.clone(), (self.names["p"], self.names["s"]))
        try:
            exec(text, self.names)
            value = self.names[name]
            good = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0
            good = good and (kind != "rows" or (value.ndim > 0 and len(value) == len(self.names["x"])))
            good = good and all(self._is_moderate(self.names[key]) for key in (*self.variables, name))
        except Exception:
            good = False
        if not good:  # undo what the statement wrote
            self.names.update(before)
            self.names["p"], self.names["s"] = state
            self.variables = {key: (found, before[key]) for key, (found, _) in self.variables.items()}
            return False
        self.variables[name] = (kind, value)
        words = set(re.findall(r"\w+", text))
        if "pmean" in words or words & self.tainted:
            self.tainted.add(name)
        return True

    @staticmethod
    def _is_moderate(value: torch.Tensor) -> bool:
        return bool(torch.isfinite(value).all()) and float(value.detach().double().abs().max()) < 8

    def _value(self, table: Sequence[Rule]) -> str | None:
        """An expression of a rule of the table that runs, and gives a moderate tensor."""
        for _ in range(10):
            text = self._fill(self.choose(table).text)
            try:
                value = eval(text, self.names)
            except Exception:
                continue
            if isinstance(value, torch.Tensor) and (not value.is_floating_point() or self._is_moderate(value)):
                return text
        return None

    def _body(self) -> Program:
        wide = frozenset() if self.is_narrow else frozenset({"float32", "bfloat16", "autocast"})
        here = wide | (frozenset({"pmean"}) if self.is_local else frozenset())
        lines: list[str | None] = []
        size = self.random.choice([1, 2, 3, 4, 6])
        if self.is_local and self.chance(0.5):
            lines.append("mean, var = s['mean'] * 1, s['var'] * 1")
            lines.append("buffers = s['norm']")
            exec("\n".join(filter(None, lines)), self.names)
        for _ in range(size):
            draw = self.random.random()
            if draw < 0.35:
                lines.append(self._statement(grammar.UNIFORM, "uniform", here))
            elif draw < 0.65 and self.is_local:
                lines.append(self._statement(grammar.LOCAL, "rows", here))
            else:
                lines.append(self._statement(grammar.ROWS, "rows", here))
        terms = [self._value(grammar.TERMS) for _ in range(self.random.choice([1, 1, 2]))]
        if self.is_local:
            terms.append(self._value(grammar.LOCAL_TERMS))
        terms += [self._value(grammar.PENALTIES)] * self.chance(0.4)
        loss = tuple(line for line in lines if line)
        rowwise, own = {}, {}
        last = self._variable("rows", None)
        if last and last != "x" and self.chance(0.6):
            (own if self.is_local else rowwise)["rows"] = last
        if self.chance(0.4):
            value = self._value(grammar.OWN)
            if value and not set(re.findall(r"\w+", value)) & self.tainted:
                own["own"] = value
        kept = []
        for written, of in (("mean", "mean, var"), ("var", "mean, var"), ("norm", "buffers")):
            if any(f"{of}, <" in line or f", {of}, " in line for line in loss):
                own[written] = of if of == "buffers" else written
                kept.append(self._keep(written))
        return replace(
            self.base,
            loss=loss,
            terms=tuple(term for term in terms if term) or ("x.mean()",),
            rowwise=rowwise,
            own=own,
            **self._update(kept),
        )

    def _keep(self, name: str) -> str:
        """A statement that makes what the loss wrote into state."""
        mean = "pmean(b) if b.is_floating_point() else b" if self.chance(0.9) else "b"
        return f"out[{name!r}] = fzero.tree.map(lambda b: {mean}, own.pop({name!r}))"

    def _update(self, kept: Sequence[str]) -> dict[str, Any]:
        linear = self.is_local
        lines = [self._fill(self.choose(updates.OPTIMIZERS, linear=linear).text)]
        lines += [
            self._fill(self.choose(updates.STATE, linear=linear).text) for _ in range(self.random.choice([0, 0, 1, 1, 2, 3]))
        ]
        metrics = [self.choose(updates.METRICS, linear=linear).text for _ in range(self.random.choice([0, 1, 1, 2, 3]))]
        lines += kept
        return {"update": tuple(line.replace("  # ", "") for line in lines), "metrics": tuple(metrics)}

    def _surroundings(self, program: Program) -> Program:
        contexts, steps = list(program.contexts), len(program.contexts)
        if "context" not in self.waiting and self.chance(0.06):
            contexts[self.random.randrange(steps)] = self.random.choice(
                ["torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)"]
            )
        between = "TABLE.mul_(0.5)" if "between" not in self.waiting and self.chance(0.1) else ""
        rows = program.rows
        if steps > 1 and self.chance(0.15):
            rows = (*rows[:-1], rows[-1] + 1)
        held = self.choose(updates.HELD).text if "held" not in self.waiting and self.chance(0.25) else ""
        text = program.text + "fzero.tree.leaves(p)" * ("tree.leaves(p)" in program.text)
        used = set(re.findall(r"""\w\[["'](\w)["']\]""", text)) | {"w", "b", "s"}
        shapes = {name: of for name, of in program.shapes.items() if name in used or self.chance(0.1)}
        layers = program.layers if "layers" in program.text or self.chance(0.2) else 0
        return replace(
            program, contexts=tuple(contexts), between=between, rows=rows, held=held, shapes=shapes, layers=layers
        )


def draw(seed: int, attempt: int = 0, waiting: frozenset[str] = frozenset(WAITING)) -> Program:
    """The program of a seed. Attempts of one seed differ."""
    with torch.random.fork_rng(devices=[]):
        return Draw(seed, waiting, attempt).program()
