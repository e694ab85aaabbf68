"""Seeds: the arguments that the random draws of a step follow from are numbers that change from step to step."""

from __future__ import annotations

from fzero.base.errors import FzeroError
from fzero.program.program import Program


def check_seeds(program: Program) -> None:
    """Refuse seeds and step counts that a program with random draws cannot draw by. They stand in a `fzero.State`.

    Raises:
        FzeroError: for a seed without a step count; for a seed or step count that is not one integer, whole on every
            rank; where the step returns the step count unchanged, so that every step would draw the same numbers.
    """
    if not program.draws:
        return
    given = list(zip(program.arguments, program.placeholders))
    for argument, node in given:
        if argument.role:
            _check_number(program, argument.path, argument.bucket, node.meta["val"])
    roles = [argument.role for argument, _ in given]
    if "seed" in roles and "step" not in roles:
        path = program.arguments[roles.index("seed")].path.rpartition(".")[0]
        problem = "is None, and the draws of this step follow from seed and step"
        raise FzeroError(f"argument {path}.step", problem, "give step=torch.tensor(0), and return step + 1")
    returned = set(program.output.args[0])
    for argument, node in given:
        if argument.role == "step" and node in returned:
            problem = "is returned as it was given, and the step draws random numbers: every step would draw the same"
            way_out = "return state._replace(step=state.step + 1, ...)"
            raise FzeroError(f"argument {argument.path}", problem, way_out)


def _check_number(program: Program, path: str, bucket: str | None, value: object) -> None:
    dtype, shape = getattr(value, "dtype", None), tuple(getattr(value, "shape", ()))
    if bucket is not None:
        layout = program.layouts[bucket]
        if not layout.replicated:
            problem = f"lies in slices over {layout.world} ranks, and every rank draws by it"
            raise FzeroError(f"argument {path}", problem, "partition the whole fzero.State, or give like=params")
    if shape or dtype is None or dtype.is_floating_point or dtype.is_complex:
        way_out = "give one integer, as torch.tensor(0); fzero.partition makes it the same on all ranks"
        raise FzeroError(f"argument {path}", f"is {dtype} {list(shape)}, and random draws follow from it", way_out)
