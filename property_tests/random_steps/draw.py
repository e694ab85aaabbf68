"""Drawing: `draw(seed)` returns the random train step of a seed."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import torch

from property_tests.random_steps import losses, updates, values
from property_tests.random_steps.grammar import WAITING
from property_tests.random_steps.program import Program
from property_tests.random_steps.scope import Scope

DTYPES = ("float64", "float64", "float32", "bfloat16", "float16")
CONTEXTS = ("torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)")
MESHES = {
    2: [(("fsdp", 2),), (("fsdp", 2),), (("replica", 2), ("fsdp", 1))],
    3: [(("fsdp", 3),)],
    4: [(("fsdp", 4),), (("replica", 2), ("fsdp", 2)), (("fsdp", 2), ("replica", 2))],
    5: [(("fsdp", 5),)],
}


def draw(seed: int, attempt: int = 0, waiting: frozenset[str] = frozenset(WAITING)) -> Program:
    """The program of a seed. `waiting`: switches that are off. Attempts of one seed differ."""
    draws = random.Random(f"{seed}.{attempt}")
    with torch.random.fork_rng(devices=[]):
        base = draw_setting(seed, draws)
        scope = Scope(base, draws, waiting)
        return draw_surroundings(draw_step(base, scope), scope)


def draw_setting(seed: int, draws: random.Random) -> Program:
    """Mesh, shapes and dtypes: a program without statements."""
    pick, steps, d = draws.choice, draws.choice([1, 2, 2, 3]), draws.choice([1, 2, 3, 3, 4, 5])
    changes = random.Random(f"{seed} rows")  # apart from the others, which draw the same steps with it and without it
    is_narrow, world = draws.random() < 0.25, draws.choice([2, 2, 3, 3, 4, 5])
    shapes = {"w": (d, d), "v": (d, d), "b": (d,), "a": (d,), "c": (1,), "s": (), "e": (5, d)}
    leaves = {name: (shape, pick(DTYPES) if is_narrow else "float64", 0.5) for name, shape in shapes.items()}
    leaves["h"] = ((d, 3), "float16", 300.0)  # its squares overflow
    is_local, mesh, rows = draws.random() < 0.3, pick(MESHES[world]), (pick([1, 1, 2, 3]),) * steps
    if changes.random() < 0.35:  # from the second shape on one trace serves all
        rows = tuple(changes.choices(range(1, 7), k=4))
    return Program(
        seed=seed,
        is_local=is_local,
        mesh=mesh,
        rows=rows,
        contexts=("",) * len(rows),
        stage=pick([1, 2, 3]),
        donate=draws.random() < 0.7,
        width=d,
        shapes=leaves,
        layers=pick([0, 0, 1, 2, 3]),
        dtype=pick(["float64", "float32", "bfloat16"]) if is_narrow and draws.random() < 0.3 else "float64",
        gradients="fzero" if draws.random() < 0.8 else "torch",
        chunk=8 * d * world * pick([1, 1, 2]) if draws.random() < 0.3 else None,
        memory=pick(["1GiB", "1MiB", "6KiB"]) if draws.random() < 0.12 else None,
        is_dynamic=changes.random() < 0.2,
    )


def draw_step(base: Program, scope: Scope) -> Program:
    """The statements of a step."""
    draws, is_local, lines = scope.random, base.is_local, []
    if is_local and draws.random() < 0.5:
        lines = [scope.run("mean, var, buffers = s['mean'] * 1, s['var'] * 1, s['norm']")]
    for _ in range(draws.choice([1, 2, 3, 4, 6])):
        kind = draws.random()
        if kind < 0.35:
            lines.append(scope.statement(values.UNIFORM, "uniform"))
        else:
            lines.append(scope.statement(losses.LOCAL if is_local and kind < 0.65 else values.ROWS, "rows"))
    loss = tuple(line for line in lines if line)
    terms = [scope.expression(losses.TERMS) for _ in range(draws.choice([1, 1, 2]))]
    terms += [scope.expression(losses.LOCAL_TERMS)] * is_local
    terms += [scope.expression(losses.PENALTIES)] * (draws.random() < 0.4)
    own = draw_own(loss, scope)
    rows = scope.variable("rows", but="x") if draws.random() < 0.6 else None
    if rows and is_local:
        own["rows"] = rows
    return replace(
        base,
        loss=loss,
        terms=tuple(term for term in terms if term) or ("x.mean()",),
        rowwise={"rows": rows} if rows and not is_local else {},
        own=own,
        update=(*draw_update(scope), *(_keep(name, scope) for name in own if name in ("mean", "var", "norm"))),
        metrics=draw_metrics(scope),
    )


def draw_own(loss: tuple[str, ...], scope: Scope) -> dict[str, str]:
    """Results of each rank's own examples, among them the buffers that the loss writes."""
    own = {}
    value = scope.expression(losses.OWN) if scope.random.random() < 0.4 else None
    if value and not scope.is_tainted(value):
        own["own"] = value
    if any(", mean, var, " in line for line in loss):
        own |= {"mean": "mean", "var": "var"}
    if any(", buffers, " in line for line in loss):
        own["norm"] = "buffers"
    return own


def _keep(name: str, scope: Scope) -> str:
    """A statement that makes a buffer that the loss wrote into state; now and then without the mean over ranks."""
    mean = "pmean(b) if b.is_floating_point() else b" if scope.random.random() < 0.9 else "b"
    return f'out["{name}"] = fzero.tree.map(lambda b: {mean}, own.pop("{name}"))'


def draw_update(scope: Scope) -> list[str]:
    """Statements that make new state."""
    linear = scope.base.is_local
    rules = [scope.choose(updates.OPTIMIZERS, linear=linear)]
    rules += [scope.choose(updates.STATE, linear=linear) for _ in range(scope.random.choice([0, 0, 1, 1, 2, 3]))]
    return [scope.fill(rule.text) for rule in rules]


def draw_metrics(scope: Scope) -> tuple[str, ...]:
    """Other results. With narrow dtypes gradients are among them: new parameters hide what is wrong in a digit."""
    rules = [
        scope.choose(updates.METRICS, linear=scope.base.is_local) for _ in range(scope.random.choice([0, 1, 1, 2, 3]))
    ]
    return (*(rule.text for rule in rules), *(("g",) if scope.is_narrow else ()))


def draw_surroundings(program: Program, scope: Scope) -> Program:
    """What is around the calls, and what leaves there are."""
    draws, steps = scope.random, len(program.rows)
    place = draws.choice(["", "", "", "", "p", "s", "ps", "p s", "s p", "- ps", "- s"]).replace("-", "")
    on_host, _, on_disk = place.partition(" ")
    contexts, rows = list(program.contexts), program.rows
    if draws.random() < 0.06 and "context" not in scope.off:
        contexts[draws.randrange(steps)] = draws.choice(CONTEXTS)
    if draws.random() < 0.15:
        rows = (*rows[:-1], rows[-1] + (steps > 1))
    spare = (0.1, 0.0 if "narrow-norms" in scope.off else 0.1)
    used = {*re.findall(r"""\w\[["'](\w)["']\]""", program.text), "w", "b", "s"}
    return replace(
        program,
        contexts=tuple(contexts),
        rows=rows,
        between="TABLE.mul_(0.5)" if draws.random() < 0.1 else "",
        held=scope.choose(updates.HELD).text if draws.random() < 0.25 else "",
        shapes={name: of for name, of in program.shapes.items() if name in used or draws.random() < spare[name == "h"]},
        layers=program.layers if "layers" in program.text or draws.random() < 0.2 else 0,
        on_host=on_host,
        on_disk=on_disk,
    )
