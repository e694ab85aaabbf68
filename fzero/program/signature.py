"""What a program is given and what it returns: a record for each tensor argument, and for each leaf of its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fzero.base.flags import Flag
from fzero.base.placement import Placement
from fzero.program.kinds import Kind


@dataclass(frozen=True)
class Argument:
    """A tensor argument. `path` is its path among the step's arguments. State has a `bucket` and a `leaf` of its
    layout; the bucket of a batch argument is None.

    The step updates a `donated` argument in place, and the caller cannot use it afterwards. An argument of a loop's
    body has the `kind` of that argument in all turns. An argument that is the value of a `flag` has its class. `role`
    is "seed" or "step" for an argument that random draws follow from. State lies in `place`, None for the device. State
    of a pass whose values differ along axes has the kind `own`, and so has what readings find in captured tensors.
    """

    path: str
    bucket: str | None = None
    leaf: int = 0
    donated: bool = False
    kind: Kind | None = None
    flag: type[Flag] | None = None
    role: str = ""
    place: Placement | None = None
    own: Kind | None = None


@dataclass(frozen=True)
class Result:
    """A leaf of the tree that the step returns: state (`bucket`, `leaf`), another tensor (`bucket` None), or a
    `constant`.

    `varies` names the mesh axes along which a tensor that is no state and has no `kind` differs between ranks, once the
    pass `resolve` has noted them; else it is None. A carry of a loop has the `kind` that it may have in all turns.
    State is returned in `place`, None for the device. `replaces` is the path of the argument in whose place it stands:
    both are leaves of trees of one structure. "" where there is none.
    `own` is as in `Argument`.
    """

    path: str
    bucket: str | None = None
    leaf: int = 0
    constant: Any = None
    is_constant: bool = False
    varies: frozenset[str] | None = None
    kind: Kind | None = None
    place: Placement | None = None
    replaces: str = ""
    own: Kind | None = None
