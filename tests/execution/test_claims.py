"""Operations from outside are held to their records: in a simulation, and at the first call of a program on a mesh."""

from __future__ import annotations

import re
from typing import Any

from mutants import give, good, list_mutants, seed
from processes import run
from programs import assert_same
from torch.distributed.device_mesh import DeviceMesh

from fzero import FzeroError
from fzero.execution import lockstep
from fzero.execution.codegen import link
from fzero.ranks.live import live


def attempt(act: Any) -> str:
    try:
        act()
    except FzeroError as error:
        return str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "silent"


def list_unnamed(words: dict[str, str]) -> list[str]:
    """The mutants whose error is not the one that the table wants."""
    wanted = {mutant.name: mutant.says for mutant in list_mutants()}
    return [f"{name}: {said}" for name, said in words.items() if not re.search(wanted[name], said)]


def simulate_all() -> dict[str, str]:
    return {x.name: attempt(lambda x=x: lockstep.run(seed(x), give(x.variant))) for x in list_mutants()}


def run_all(mesh: DeviceMesh) -> dict[str, str]:
    on, words = live(mesh), {}
    for mutant in list_mutants():
        program, given = seed(mutant), give(mutant.variant)[on.rank]
        words[mutant.name] = attempt(lambda program=program, given=given: link(program, on, is_held=True)(given))
    return words


def test_each_mutant_is_named_in_a_simulation() -> None:
    assert len(list_mutants()) > 60
    assert list_unnamed(simulate_all()) == []


def test_each_mutant_is_named_at_the_first_call_on_two_ranks() -> None:
    for words in run(2, run_all):
        assert list_unnamed(words) == []
