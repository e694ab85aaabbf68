"""General programs as plain data: a template, the formulas of its numbers, and the conditions of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero.base.formulas import Condition, Conditions, is_formula
from fzero.cache.encode import ProgramReader, ProgramWriter
from fzero.cache.values import Unreadable
from fzero.general.programs import General
from fzero.general.sizes import Sizes
from fzero.program.open import Template
from fzero.program.program import Program
from fzero.program.records import find_loops
from fzero.tracing.signatures import Signature, is_batch


def write_general(general: General, template: Template, writer: ProgramWriter) -> dict[str, Any]:
    """Plain data for a template of a general program.

    Raises:
        Undescribed: as `ProgramWriter.write`.
    """
    described, conditions = general.sizes.signature[2], general.conditions()
    return {
        "program": writer.write(template.program),
        "marks": _write_marks(template, writer),
        "formulas": template.formulas,
        "reference": template.reference,
        "names": conditions.names,
        "conditions": [list(row) for row in conditions.rows],
        "batches": {str(i): [list(x[0]), list(x[3])] for i, x in enumerate(described) if is_batch(x)},
        "places": general.sizes.places,
    }


def _write_marks(template: Template, writer: ProgramWriter) -> dict[str, Any]:
    """Where numbers stand in a template, and in the templates of its bodies, by positions of nodes."""
    numbers = {node: i for i, node in enumerate(template.program.graph.nodes)}
    return {
        "arguments": [[numbers[x], writer.write_arguments(given, numbers)] for x, given in template.arguments.items()],
        "values": [[numbers[x], writer.values.write(form)] for x, form in template.values.items()],
        "results": [[i, writer.values.write(constant)] for i, constant in template.results.items()],
        "bodies": [[numbers[node], _write_marks(body, writer)] for node, body in template.bodies.items()],
    }


def read_sizes(data: Mapping[str, Any], signature: Signature) -> tuple[Sizes, Conditions]:
    """The sizes of a general program and what they have to fulfil. `signature` is one with the same key."""
    settings, treedef, described = signature
    shapes = {int(i): (torch.Size(shape), tuple(stride)) for i, (shape, stride) in data["batches"].items()}
    leaves = [(shapes[i][0], *x[1:3], shapes[i][1], *x[4:]) if i in shapes else x for i, x in enumerate(described)]
    places = tuple(tuple((i, dim) for i, dim in places) for places in data["places"])
    rows = tuple(Condition(*row) for row in data["conditions"])
    _check_formulas(data["names"], [row.formula for row in rows])
    return Sizes((settings, treedef, leaves), places), Conditions(tuple(data["names"]), rows)


def read_template(data: Mapping[str, Any], reader: ProgramReader, names: tuple[str, ...]) -> Template:
    """The template of plain data.

    Raises:
        Unreadable: where names are unknown, and for a formula that is none.
    """
    _check_formulas(names, data["formulas"])
    made = _read_marks(reader.read(data["program"]), data["marks"], reader)
    return replace(made, names=names, reference=tuple(data["reference"]), formulas=tuple(data["formulas"]))


def _read_marks(program: Program, data: Mapping[str, Any], reader: ProgramReader) -> Template:
    nodes, bodies = list(program.graph.nodes), find_loops(program.graph)
    return Template(
        program,
        (),
        (),
        (),
        arguments={nodes[i]: reader.read_arguments(given, nodes) for i, given in data["arguments"]},
        values={nodes[i]: reader.values.read(form) for i, form in data["values"]},
        results={i: reader.values.read(constant) for i, constant in data["results"]},
        bodies={nodes[i]: _read_marks(bodies[nodes[i]], marks, reader) for i, marks in data["bodies"]},
    )


def _check_formulas(names: Sequence[str], formulas: Sequence[str]) -> None:
    wrong = next((text for text in formulas if not is_formula(names, text)), None)
    if wrong is not None:
        raise Unreadable(f"formula {wrong}")
