"""ZeRO++ (Wang et al., 2023, arXiv:2306.10209): qwZ, hpZ and qgZ together, on a mesh of nodes.

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("node", "local"))  # state lies along both axes
    step = fzero.shard(train_step, mesh, passes=passes.insert(passes.defaults(stage=3), zeropp, before="offload"))

Of a bucket of N ranks with S elements each, on n nodes: the first gather moves N (S + 4 ceil(S / 256)) bytes over both
axes (`int8_gather`), each further one 4 N S over "local" (`hpz`), and a scatter N B over "local" and n B over "node",
B = ceil(S / 2) + 4 ceil(S / 256) (`qgz`). The exact step moves 4 N S over both axes for each of the three.
"""

from __future__ import annotations

from fzero import Program
from fzero.variants.hpz import hpz
from fzero.variants.int8_gather import int8_gather
from fzero.variants.qgz import qgz


def zeropp(program: Program, *, axis: str = "local", strict: bool = True) -> Program:
    """Gather each bucket as int8 over all ranks once, then parts of that along `axis`; scatter gradients as int4 in two
    hops. Results are those of `int8_gather` and `qgz`, bit for bit.

    Raises:
        FzeroError: as `hpz`, `int8_gather` and `qgz`.
    """
    program = int8_gather(hpz(program, axis=axis, strict=strict), strict=strict)
    return qgz(program, strict=strict)
