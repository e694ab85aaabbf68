"""Gradients scattered in two hops in their own dtype: inside of nodes, and then between them.

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("node", "local"))  # state lies along both axes
    two_hops = passes.insert(passes.defaults(stage=3), two_hop_scatter, before="prefetch")

Of N ranks with S elements of b bytes of a bucket each, on n nodes: an all-to-all inside of each node moves b N S bytes.
Each rank takes the mean of what it gets, and an all-to-all between nodes moves b n S bytes of that. One hop moves b N S
bytes between nodes too.
"""

from __future__ import annotations

from fzero import Program
from fzero.variants.codes import Codes, find_sum_dtype
from fzero.variants.scatter_hops import define_scatter
from fzero.variants.scatters import replace_scatters

_plain = Codes(
    count=lambda numel: numel,
    encode=lambda rows, dtype: rows.to(dtype),
    decode=lambda rows, numel: rows.to(find_sum_dtype(rows.dtype)),
)
_scatter = define_scatter("two_hop_scatter", _plain)


def two_hop_scatter(program: Program, *, strict: bool = True) -> Program:
    """Scatter every gradient over the inner axis that state lies along, and then over the outer one. Same results up to
    the order of sums; where gradients are float16 or bfloat16, the mean of a node is rounded once more. No state, so
    that loops may scatter.

    Raises:
        FzeroError: where state does not lie along two axes. If `strict`, where nothing is scattered; else such a
            program stays as it is.
    """
    return replace_scatters(program, "two_hop_scatter", _scatter, strict)
