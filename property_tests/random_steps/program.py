"""A random train step, printed as a script: its state, its batch and the step."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = """\
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


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x.abs() <= bound)
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside + 0.1 * grad, None


class Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.x, ctx.kept = x, {"y": y, "sine": x.sin()}
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return ctx.kept["sine"] * y, positive, x

    @staticmethod
    def backward(ctx, grad, _, of_x):
        y, sine = ctx.kept["y"], ctx.kept["sine"]
        return grad * y * ctx.x.cos() + of_x, (grad * sine).sum() if ctx.needs_input_grad[1] else None


TABLE = torch.linspace(0.5, 1.0, 8, dtype=torch.float64)
CACHE = {}
GROUPS = {True: fzero.optim.adamw(0.05, eps=1e-2), False: fzero.optim.sgd(0.1, momentum=0.9)}


def cosine(w, h):
    return torch.cos(h @ w)


def dense(w, h):
    return torch.tanh(h @ w)


def nested(w, h):
    return fzero.tiled(cosine, 1)(w, h).sin()


def swapped(w, h):
    return fzero.scan(lambda c, _: ((c[1] @ w, c[0]), None), (h, h), length=2)[0][0]


@functools.lru_cache
def table(n):
    return torch.arange(1, n + 1, dtype=torch.float64) / n
"""

MODULES = {
    "norm": "_, _, norm = fzero.lower_stateful(torch.nn.BatchNorm1d({d}, dtype=torch.float64))",
    "lowered": "_, lowered = fzero.lower(torch.nn.Linear({d}, {d}, dtype=torch.float64))",
    "linear": "linear = torch.nn.Linear({d}, {d}, dtype=torch.float64)",
}
"""Names of modules -> the line that makes one. A script has what its statements name."""

STATE_TEXT = """\
def draw(*shape, dtype=torch.float64, deviation=0.5):
    return (torch.randn(shape, dtype=torch.float64) * deviation).to(dtype)


def params():
    torch.manual_seed({seed})
    return {{
{params}    }}


def init(p):
    torch.manual_seed({seed} + 1)
    return {{
{state}    }}


def batch(rows):
    torch.manual_seed({seed} + 2)
    return draw(rows, {d}, dtype=torch.{dtype}), torch.randint(5, (rows,))

"""

STATE = {
    "m": "fzero.tree.map(torch.zeros_like, p)",
    "ema": "fzero.tree.map(lambda a: a * 0.5, p)",
    "adam": "fzero.optim.adamw(0.05).init(p)",
    "chain": "fzero.optim.chain(fzero.optim.clip_by_global_norm(0.5), fzero.optim.adam(0.05)).init(p)",
    "finite": "fzero.optim.apply_if_finite(fzero.optim.adamw(0.05), 2).init(p)",
    "groups": "fzero.optim.multi_transform(GROUPS, lambda path, leaf: leaf.ndim > 1).init(p)",
    "masked": "fzero.optim.masked(fzero.optim.adamw(0.05), lambda path, leaf: leaf.ndim > 0).init(p)",
    "total": "fzero.tree.map(torch.zeros_like, p)",
    "count": "torch.tensor(1)",
    "scale": "torch.tensor(1.5, dtype=torch.float64)",
    "avg": "torch.tensor(0.25, dtype=torch.float64)",
    "history": "draw(3, {d})",
    "mean": "draw({d})",
    "var": "draw({d}).abs()",
    "norm": "dict(running_mean=draw({d}), running_var=draw({d}).abs(), num_batches_tracked=torch.tensor(0))",
}
"""State beside the parameters -> its first value. A script has what its statements name."""


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
    gradients: str  # how the loss is differentiated
    contexts: tuple[str, ...]  # around each call
    loss: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    rowwise: dict[str, str] = field(default_factory=dict)  # results of each example, by name
    own: dict[str, str] = field(default_factory=dict)  # results of each rank's examples, by name
    update: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    between: str = ""  # a statement between calls
    held: str = ""  # what a user makes of the leaf `w` before the first call
    on_host: str = ""  # which of the trees `p` and `s` lie on the host
    on_disk: str = ""  # which of them lie on a disk
    chunk: int | None = None  # bytes
    memory: str | None = None  # the budget, in the place of the stage
    is_dynamic: bool = False  # whether rows are open from the first call on

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(ranks for _, ranks in self.mesh)

    @property
    def options(self) -> dict[str, Any]:
        """How the step is made."""
        how = {"stage": self.stage} if self.memory is None else {"memory": self.memory}
        dynamic = {"dynamic": {"x": {0: (1, 64)}, "t": {0: None}}} if self.is_dynamic else {}
        return {**how, "donate": self.donate, **({} if self.chunk is None else {"chunk": self.chunk}), **dynamic}

    @property
    def text(self) -> str:
        """All statements, for a search of names."""
        parts = (*self.loss, *self.terms, *self.rowwise.values(), *self.own.values(), *self.update, *self.metrics)
        return "\n".join(parts)

    def source(self) -> str:
        """The script."""
        used = set(re.findall(r"(?<![\"'.])\b\w+\b(?![\"'])", self.text))
        modules = [line.format(d=self.width) for name, line in MODULES.items() if name in used]
        mean = "x"
        for axis, _ in self.mesh:
            mean = f"fzero.pmean({mean}, {axis!r})"
        pmean = f"\ndef pmean(x):\n    return {mean}\n\n"
        return "\n".join([HEAD, *modules, pmean, self._describe_state(), "", *self._step_lines(), ""])

    def comment(self) -> str:
        """How the script is run, for a human."""
        mesh = ", ".join(f"{name}={ranks}" for name, ranks in self.mesh)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        call = f"fzero.simulate(step, fzero.VirtualMesh({mesh}), {options})"
        around = f"contexts {self.contexts}, between {self.between!r}, held {self.held!r}, local {self.is_local}"
        places = f"on the host {self.on_host or 'nothing'}, on a disk {self.on_disk or 'nothing'}"
        return f"# {call}, batch(rows * {self.world}) for rows in {self.rows}\n# {around}, {places}\n"

    def _describe_state(self) -> str:
        """The functions that make parameters, other state and batches."""
        d, params, state = self.width, {}, {}
        for name, (shape, dtype, deviation) in self.shapes.items():
            params[name] = f"draw({', '.join(map(str, (*shape, '')))}dtype=torch.{dtype}, deviation={deviation})"
        if self.layers:
            params["layers"] = f"[dict(w=draw({d}, {d}), b=draw({d})) for _ in range({self.layers})]"
        if "p['norm']" in self.text:
            params["norm"] = f"dict(weight=draw({d}) + 1, bias=draw({d}))"
        for name, text in STATE.items():
            if re.search(rf"""\b(s|out)\[["']{name}["']\]""", self.text):
                state[name] = text.format(d=d)
        return STATE_TEXT.format(
            seed=self.seed % 1000, params=_entries(params), state=_entries(state), d=d, dtype=self.dtype
        )

    def _step_lines(self) -> Iterator[str]:
        yield "def step(p, s, x, t):\n    def loss_fn(p):"
        yield from _indent(self.loss, 8)
        yield f"        loss = {' + '.join(self.terms)}"
        yield f"        return loss, ({_dict(self.rowwise)}, {_dict(self.own)})\n"
        if self.gradients == "fzero":
            yield "    (loss, (results, own)), g = fzero.value_and_grad(loss_fn, has_aux=True)(p)"
        else:
            yield "    g, (loss, (results, own)) = torch.func.grad_and_value(loss_fn, has_aux=True)(p)"
        yield '    results["loss"], out = loss, dict(s)'
        yield from _indent(self.update, 4)
        for number, metric in enumerate(self.metrics):
            yield f'    results["metric{number}"] = {metric}'
        yield "    return new, out, results, own"

    def define(self) -> dict[str, Any]:
        """The names of the script, freshly run. Tracebacks and errors of fzero show its lines."""
        source, name = self.source(), f"step_{self.seed}.py"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        names: dict[str, Any] = {"__name__": "step"}
        exec(compile(source, name, "exec"), names)
        return names


def _indent(statements: Sequence[str], by: int) -> Iterator[str]:
    for statement in statements:
        for line in statement.split("\n"):
            yield " " * by + line


def _entries(entries: dict[str, str]) -> str:
    return "".join(f"        {key!r}: {value},\n" for key, value in entries.items())


def _dict(entries: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in entries.items()) + "}"
