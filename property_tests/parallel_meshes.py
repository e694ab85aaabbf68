"""Layers of `fzero.parallel` on many meshes: `python -m property_tests.parallel_meshes`.

Each layer on 2 and on 4 ranks along its axis, by 1 and 2 ranks along fsdp, at stages 1 and 3: the loss and all
gradients in float64 against functions of torch on one device. Prints a line for each layer, and fails where one is not
equal to 1e-12.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import parallel_layers as layers
import torch
import torch.nn.functional as F
from parallel_layers import Layer
from torch import Tensor

import fzero
from fzero import VirtualMesh
from fzero.parallel import order_rows, ring_attention, ulysses


def attend_by_heads(window: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
    mask = layers.see(window, fzero.all_gather(documents, "sp", 1))
    return ulysses(F.scaled_dot_product_attention)(q, k, v, mask, enable_gqa=True)


def attend_around(
    how: dict[str, Any], window: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, positions: Tensor
) -> Tensor:
    return ring_attention(q, k, v, window=window, positions=positions, **how)


def list_layers() -> Iterator[tuple[str, str, Layer, Callable[..., Tensor], bool]]:
    """Name, axis, layer, the same by functions of torch, and whether its rows are in balanced order."""
    for sequence in (None, 1):
        yield (
            f"vocabulary, column, row, sequence={sequence}",
            "tp",
            layers.decode(sequence),
            layers.decode_plainly,
            False,
        )
    for how in ({"capacity": None}, {"capacity": 4.0}, {"capacity": 4.0, "overflow": "drop"}):
        yield f"experts {how}", "ep", layers.route(**how), layers.route_plainly, False
    for repeats, remat in itertools.product((1, 2), (False, True)):
        layer = layers.stage(repeats, remat=remat)
        yield f"pipeline, repeats={repeats}, remat={remat}", "pp", layer, layers.stage_plainly, False
    for window, keys in itertools.product((5, layers.PLACES), (1, 2, 4)):
        plainly, about = partial(layers.attend_plainly, window), f"window {window}, {keys} heads of keys"
        yield f"ulysses, {about}", "sp", layers.attend_to_parts(partial(attend_by_heads, window), keys), plainly, False
        for rotate, balanced in itertools.product((False, True), (False, True)):
            around = partial(attend_around, {"rotate": rotate, "balanced": balanced}, window)
            name = f"ring, rotate={rotate}, balanced={balanced}, {about}"
            yield name, "sp", layers.attend_to_parts(around, keys), plainly, balanced


def is_equal(
    axis: str, layer: Layer, plainly: Callable[..., Tensor], balanced: bool, mesh: VirtualMesh, stage: int
) -> bool:
    right = fzero.value_and_grad(plainly)(layer.params, *layer.batch)
    if axis == "sp":
        order = order_rows(layers.PLACES, mesh.size("sp")) if balanced else torch.arange(layers.PLACES)
        layer = layer._replace(batch=tuple(layers.cut(x, mesh, order) for x in layer.batch))
    try:
        torch.testing.assert_close(layer.on_ranks(mesh, stage)[0], right, rtol=1e-12, atol=1e-14)
    except AssertionError:
        return False
    return True


def main() -> None:
    total = wrong = 0
    for name, axis, layer, plainly, balanced in list_layers():
        cases = list(itertools.product((1, 2), (2, 4), (1, 3)))
        equal = [
            is_equal(axis, layer, plainly, balanced, VirtualMesh(fsdp=n, **{axis: m}), stage) for n, m, stage in cases
        ]
        total, wrong = total + len(cases), wrong + equal.count(False)
        print(f"{name}: {sum(equal)} of {len(cases)} equal", flush=True)
    print(f"{total - wrong} of {total} equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
