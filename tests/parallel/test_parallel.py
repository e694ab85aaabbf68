"""Layers of `fzero.parallel` on virtual ranks, against functions of torch on one device, with their bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parallel_layers as layers
import pytest
import torch
import torch.nn.functional as F
from parallel_layers import Layer, list_bytes
from torch import Tensor

import fzero
from fzero import FzeroError, Program, VirtualMesh, parallel

FLOAT = 8  # bytes
MESH = VirtualMesh(fsdp=1, pp=2)


def assert_equal(layer: Layer, plainly: Callable[..., Tensor], mesh: VirtualMesh) -> Program:
    """The loss and all gradients are those of one device, by `plainly` and by the layer itself. Returns the program."""
    right = fzero.value_and_grad(plainly)(layer.params, *layer.batch)
    found, program = layer.on_ranks(mesh)
    for each in (layer.on_one_device(), found):
        torch.testing.assert_close(each, right, rtol=1e-12, atol=1e-14)
    return program


@pytest.mark.parametrize(("sequence", "tp"), [(None, 4), (1, 2)])
def test_columns_rows_and_a_vocabulary(sequence: int | None, tp: int) -> None:
    program = assert_equal(layers.decode(sequence), layers.decode_plainly, VirtualMesh(fsdp=2, tp=tp))
    activation, tokens = 2 * layers.ROWS * layers.WIDTH * FLOAT, 2 * layers.ROWS * FLOAT
    found = list_bytes(program, "tp")
    assert found.pop("all_reduce") == 5 * tokens + (0 if sequence else 4 * activation)
    assert found == ({"all_gather": 4 * activation, "psum_scatter": 4 * activation} if sequence else {})


def test_tokens_and_labels_outside_of_the_vocabulary_are_refused() -> None:
    weight, mesh = torch.randn(6, 2), VirtualMesh(fsdp=1, tp=2)

    def step(weight: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        h = parallel.vocab_embedding(tokens, weight)
        return parallel.vocab_cross_entropy(h, weight, labels)

    held, right = fzero.partition(weight, mesh, split={"": ("tp", 0)}), torch.tensor([0, 5])
    run = fzero.simulate(step, mesh, data=("fsdp",))
    torch.testing.assert_close(run(held, right, right), step(weight, right, right))
    for number in (-1, 6):
        wrong = torch.tensor([0, number])
        with pytest.raises(IndexError):
            run(held, wrong, right)
        with pytest.raises(RuntimeError, match="out of bounds"):
            run(held, right, wrong)
    with pytest.raises(FzeroError, match="vocab_cross_entropy: label_smoothing: is 2"):
        parallel.vocab_cross_entropy(weight, weight, right, label_smoothing=2)


def test_a_vocabulary_that_ranks_do_not_divide() -> None:
    """7 rows on 4 ranks: the last has one, and on 5 none. The leaves stay whole, and so does all that knows them."""
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 3, generator=draw).double(), "b": torch.randn(7, generator=draw).double()}
    tokens, labels = torch.tensor([0, 6, 3, 5]), torch.tensor([6, -100, 0, 4])

    def plainly(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(F.embedding(tokens, params["w"]), params["w"], params["b"])
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    def in_parts(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        w, b = params["w"], params["b"]
        return parallel.vocab_cross_entropy(
            parallel.vocab_embedding(tokens, w), w, labels, b, label_smoothing=0.1, chunks=2
        )

    right = fzero.value_and_grad(plainly)(params, tokens, labels)
    torch.testing.assert_close(fzero.value_and_grad(in_parts)(params, tokens, labels), right)
    grids = (
        VirtualMesh(fsdp=1, tp=4),
        VirtualMesh(replica=1, fsdp=2, tp=5),
        VirtualMesh(fsdp=1, tp=4).lay_state(("tp",)),
    )
    for mesh in grids:
        run = fzero.simulate(fzero.value_and_grad(in_parts), mesh, data=mesh.names[:-1])
        held, given = fzero.partition(params, mesh), (tokens, tokens.flip(0)) if mesh.size("fsdp") == 2 else None
        batch = (tokens, labels) if given is None else (torch.cat(given), torch.cat([labels, labels.flip(0)]))
        found = fzero.unpartition(run(held, *batch))
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
        assert (found[1]["w"][5:] != 0).any() and found[1]["w"].shape == (7, 3)
        assert held["w"].form.layout.world == (4 if mesh is grids[2] else mesh.size("fsdp"))  # also of its gradient
    wrong = fzero.simulate(in_parts, VirtualMesh(fsdp=1, tp=4), data=("fsdp",))
    held = fzero.partition(params, VirtualMesh(fsdp=1, tp=4))
    for number in (7, -1):
        with pytest.raises(IndexError):
            wrong(held, torch.tensor([0, number, 1, 1]), labels)
        with pytest.raises(RuntimeError, match="out of bounds"):
            wrong(held, tokens, torch.tensor([0, number, 1, 1]))
    with pytest.raises(FzeroError, match="vocab_embedding: w is split, and is_whole says that each rank has all of it"):
        split = fzero.partition({"w": torch.ones(8, 2)}, MESH, split={"w": ("pp", 0)})
        step = fzero.simulate(lambda p, x: parallel.vocab_embedding(x, p["w"], axis="pp", is_whole=True), MESH,
                              data=("fsdp",))  # fmt: skip
        step.trace(split, tokens)


def test_a_vocabulary_that_is_no_leaf_by_rows() -> None:
    """Views of a whole leaf, and a quantized one, are whole; leaves that are split, and not by rows, are refused."""
    draw, mesh, wide = torch.Generator().manual_seed(0), VirtualMesh(fsdp=1, tp=2), VirtualMesh(fsdp=1, tp=2, ep=2)
    params = {"w": torch.randn(8, 4, generator=draw).double(), "b": torch.randn(8, generator=draw).double()}
    tokens, labels = torch.tensor([0, 6, 3, 5]), torch.tensor([6, -100, 0, 4])

    def run(loss: Any, held: Any, mesh: VirtualMesh = mesh) -> Any:
        return fzero.simulate(loss, mesh, data=("fsdp",))(held, tokens, labels)

    def loss_of(params: Any, tokens: Tensor, labels: Tensor, axis: Any = "tp", rows: int = 7) -> Tensor:
        w, b = params["w"][:rows] if rows < 8 else params["w"], params["b"][:rows] if rows < 8 else params["b"]
        hidden = parallel.vocab_embedding(tokens, w, axis=axis)
        return parallel.vocab_cross_entropy(hidden, w, labels, b, axis=axis)

    right = loss_of(params, tokens, labels)
    torch.testing.assert_close(run(loss_of, fzero.partition(params, mesh)), right)
    coded = fzero.quantize({"w": params["w"]}, where="", block=4)
    for each, split in ((coded, None), (coded, {"w": ("tp", 0)})):
        held = fzero.partition(each | {"b": params["b"]}, mesh, split=split and split | {"b": ("tp", 0)})
        right = loss_of({"w": coded["w"].full_tensor(), "b": params["b"]}, tokens, labels, rows=8)
        torch.testing.assert_close(run(partial(loss_of, rows=8), held), right)
    refused: list[tuple[Any, Any, str]] = [
        ({"w": ("tp", 1)}, "tp", "vocab_embedding: w is split into parts"),
        ({"w": ("tp", 0, 2)}, "tp", "vocab_embedding: w is split into parts"),
        ({"w": ("tp", 0)}, ("tp", "ep"), "no rows for each rank along"),
        ({"w": ("tp", 0)}, "tp", r"the head \[4, 4\] is a part and the bias \[8\] is whole"),
    ]
    for split, axis, words in refused:
        with pytest.raises(FzeroError, match=words):
            run(partial(loss_of, axis=axis, rows=8), fzero.partition(params, wide, split=split), wide)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_cross_entropy_is_that_of_torch(reduction: Any) -> None:
    hidden, head, labels = torch.randn(6, 4), torch.randn(5, 4), torch.tensor([0, 4, -100, 2, 1, 3])
    found = parallel.vocab_cross_entropy(hidden.bfloat16(), head.bfloat16(), labels, reduction=reduction)
    logits = (hidden.bfloat16() @ head.bfloat16().T).float()
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction=reduction))


# experts


def test_experts_of_a_data_axis() -> None:
    program = assert_equal(layers.route(capacity=4.0), layers.route_plainly, VirtualMesh(fsdp=2, ep=2))
    rows = 2 * 3 * layers.CHOSEN  # of this rank
    assert list_bytes(program, "ep") == {"ragged_all_to_all": 4 * rows * layers.WIDTH * FLOAT}


def test_experts_along_two_axes_together_without_a_capacity() -> None:
    layer = layers.route(capacity=None, axis=("ep", "tp"))
    layer = layer._replace(split=dict.fromkeys(("up", "down"), (("ep", "tp"), 0)), data=("fsdp", "ep", "tp"))
    assert_equal(layer, layers.route_plainly, VirtualMesh(fsdp=1, ep=2, tp=2))


def send_all_to_one(overflow: Any) -> Callable[..., Any]:
    """All of six tokens of each rank go to the first of two experts, which double them."""

    def step(x: Tensor, ids: Tensor) -> Any:
        how = {"number": 2, "capacity": 1.25, "overflow": overflow}
        return parallel.experts(lambda rows, counts: 2 * rows, x, ids, torch.ones(ids.shape), **how)

    return step


def test_experts_that_overflow() -> None:
    mesh, x, ids = VirtualMesh(fsdp=1, ep=2), torch.arange(1.0, 13).view(12, 1), torch.zeros(12, 1, dtype=torch.int64)
    drop = fzero.simulate(lambda *args: [y.view(-1, 1) for y in send_all_to_one("drop")(*args)], mesh, data=mesh.names)
    made, dropped = drop(x, ids)
    assert dropped.flatten().tolist() == [4, 0] and made.flatten().tolist() == [*range(2, 18, 2), 0, 0, 0, 0]
    step = fzero.simulate(send_all_to_one("error"), mesh, data=mesh.names)
    even = torch.tensor([0, 1]).repeat(6).view(12, 1)
    assert torch.equal(step(x, even), 2 * x)
    step(x, ids)
    with pytest.raises(FzeroError, match="ragged_all_to_all over 'ep': 12 rows come to a rank, and its bound is 8;"):
        step(x, even)
    with pytest.raises(FzeroError, match="experts: has 3 experts on 2 ranks along 'ep'"):
        fzero.simulate(lambda x: parallel.experts(send_all_to_one, x, ids, ids, number=3), mesh, data=mesh.names)(x)


# pipelines


@pytest.mark.parametrize(("repeats", "pp"), [(1, 4), (2, 2)])
def test_a_pipeline(repeats: int, pp: int) -> None:
    program = assert_equal(layers.stage(repeats), layers.stage_plainly, VirtualMesh(fsdp=2, pp=pp))
    ticks, microbatch = layers.MICROBATCHES * repeats + pp - 1, 2 * layers.WIDTH * FLOAT
    found = list_bytes(program, "pp")
    assert found == {"ppermute": 2 * ticks * pp * microbatch, "all_reduce": 2 * layers.MICROBATCHES * microbatch}


def test_a_pipeline_keeps_one_input_a_tick() -> None:
    """Three times the layers need three times the parameters and gradients, and no more activations. Without `remat`
    each tick keeps a value for each further layer."""
    peaks, mesh = {}, MESH
    for depth, remat in ((4, True), (12, True), (12, False)):
        held = fzero.partition({"w": torch.empty(depth, 8, 8, device="meta")}, mesh, split={"w": ("pp", 0)})

        def loss(p: Any, x: Tensor, remat: bool = remat) -> Tensor:
            return parallel.pipeline(lambda p, h: (h @ p["w"]).tanh(), p, x, remat=remat).square().mean()

        step = fzero.simulate(fzero.grad(loss), mesh, data=("fsdp",))
        peaks[depth, remat] = step.trace(held, torch.empty(4, 512, 8, device="meta")).memory().peak
    activation, parameters = 512 * 8 * 4, (12 - 4) // 2 * 8 * 8 * 4
    assert peaks[12, True] - peaks[4, True] <= 5 * activation + 3 * parameters  # one turn computes five layers more
    assert peaks[12, False] - peaks[12, True] >= 3 * 5 * activation  # of five ticks


def test_a_pipeline_in_groups_keeps_the_inputs_of_one_group() -> None:
    """As 1F1B, whatever the number of microbatches is: `accumulate` takes as many as ranks at once."""

    def sums(p: Any, x: Tensor) -> Any:
        made = parallel.pipeline(lambda p, h: (h @ p["w"]).tanh(), p, x)
        return made.square().sum(), torch.tensor(x.numel())

    def train(p: Any, x: Tensor) -> Any:
        return fzero.accumulate(sums, len(x) // 2)(p, x)

    mesh, w = VirtualMesh(fsdp=1, pp=2), torch.randn(2, 8, 8, dtype=torch.float64)
    step, split = fzero.simulate(train, mesh, data=("fsdp",)), {"w": ("pp", 0)}
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    got = fzero.unpartition(step(fzero.partition({"w": w}, mesh, split=split), x))
    torch.testing.assert_close(got, train({"w": w}, x))
    held = fzero.partition({"w": w.to("meta")}, mesh, split=split)
    given = [torch.empty(count, 512, 8, dtype=torch.float64, device="meta") for count in (4, 8)]
    few, many = (step.trace(held, each).memory().peak for each in given)
    assert many - few == given[0].nbytes


def test_what_no_pipeline_is() -> None:
    two = {"w": torch.ones(2, 4, 1)}
    step = fzero.simulate(lambda x: parallel.pipeline(layers.compute_layer, two, x, repeats=2), MESH, data=("fsdp",))
    with pytest.raises(FzeroError, match="pipeline: 1 microbatches on 2 ranks, 2 rounds"):
        step(torch.ones(1, 1, 1))
    with pytest.raises(FzeroError, match="pipeline: 1 microbatches on 1 ranks, 1 rounds, leaves of layers"):
        parallel.pipeline(layers.compute_layer, {"a": torch.ones(2, 1), "b": torch.ones(3, 1)}, torch.ones(1, 1))
    with pytest.raises(FzeroError, match="pipeline: beside: has 3 tensors for 2 microbatches"):
        parallel.pipeline(lambda p, h, mask: h, {"a": torch.ones(2, 1)}, torch.ones(2, 1), beside=torch.ones(3))


def test_programs_of_the_page_are_those_of_one_device() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)), {})
