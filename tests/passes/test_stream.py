"""The stream pass: leaves larger than a chunk are used chunk by chunk, and are never whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run
from programs import calls, list_programs, measure_peak, tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import ops, optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.program.program import Program
from fzero.program.records import early_of, starts

WIDTH, HIDDEN, BATCH = 16, 64, 8
CHUNK = 1024  # bytes: a quarter of a weight of the MLP
GRANULARITY: Any = {"granularity": lambda path, shape: shape[-1]}
OPTIMIZER = optim.adamw(1e-2, eps=1e-3)  # so that Adam does not blow up roundings of gradients near zero


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def lower(module: nn.Module) -> tuple[tree.Tree, Any]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return fzero.lower(module)


def make_step(loss: Any) -> Any:
    """A step of AdamW on `loss(params, batch)`."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = fzero.value_and_grad(loss)(params, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optim.apply_updates(params, updates), state, value

    return step


def train(step: Any, params: tree.Tree, batch: Any, mesh: VirtualMesh, steps: int = 2, **how: Any) -> Any:
    """Losses and final parameters of some steps, on virtual ranks."""
    simulated, params = fzero.simulate(step, mesh, **how), fzero.partition(params, mesh, **GRANULARITY)
    state, losses = OPTIMIZER.init(params), []
    for _ in range(steps):
        params, state, loss = simulated(params, state, batch)
        losses.append(loss)
    return losses, fzero.unpartition(params)


def train_and_measure(step: Any, params: tree.Tree, batch: Any, mesh: VirtualMesh, **how: Any) -> Any:
    """What `train` returns, and the program, whose peak is as predicted."""
    simulated, given = fzero.simulate(step, mesh, **how), fzero.partition(params, mesh, **GRANULARITY)
    program, most = measure_peak(simulated, given, OPTIMIZER.init(given), batch)
    early = max(sum(x.meta["val"].nbytes for x in early_of(loop)) for loop in calls(program, ops.loop))
    # virtual ranks start no chunk one turn early, and hold no blocks of other ranks while a chunk is scattered
    blocks = max(mesh.size() - 2, 0) * CHUNK // mesh.size()
    assert most <= program.memory().peak <= most + early + blocks + 64
    return train(step, params, batch, mesh, **how), program


def trace(step: Any, params: tree.Tree, batch: Any, mesh: VirtualMesh, **how: Any) -> Program:
    params = fzero.partition(params, mesh, **GRANULARITY)
    return fzero.simulate(step, mesh, **how).trace(params, OPTIMIZER.init(params), batch)


def list_gathered(program: Program) -> list[int]:
    """The bytes of each gathered buffer."""
    nodes = [node for each in list_programs(program) for node in each.graph.nodes]
    return [node.meta["val"].nbytes for node in nodes if starts(node) == "gathered"]


def count_comm(program: Program) -> dict[str, int]:
    """Collective -> the bytes that it moves."""
    total: dict[str, int] = {}
    for entry in program.comm():
        total[entry.op] = total.get(entry.op, 0) + entry.nbytes
    return total


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses and parameters are equal up to the order of sums in float32."""
    torch.testing.assert_close(tree.leaves(ours), tree.leaves(theirs), rtol=rtol, atol=atol)


def mlp() -> tuple[Any, tree.Tree, Tensor]:
    """A step of an MLP, its parameters, and a batch."""
    params, apply = lower(Mlp())
    return make_step(lambda p, x: (apply(p, x) - x).square().mean()), params, torch.randn(BATCH, WIDTH)


@pytest.mark.parametrize(("world", "donate"), [(1, True), (2, True), (2, False), (4, True)])
def test_a_streamed_mlp_trains_as_the_whole_one(world: int, donate: bool) -> None:
    step, params, batch = mlp()
    mesh = VirtualMesh(fsdp=world)
    ours, _ = train_and_measure(step, params, batch, mesh, donate=donate, chunk=CHUNK)
    assert_close(ours, train(step, params, batch, mesh, donate=donate))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_streamed_leaf_is_never_whole_and_moves_as_many_bytes(stage: int) -> None:
    step, params, batch = mlp()
    mesh = VirtualMesh(fsdp=4)
    whole = trace(step, params, batch, mesh)
    streamed = trace(step, params, batch, mesh, stage=stage, chunk=CHUNK)
    assert max(list_gathered(whole)) == 4 * CHUNK and max(list_gathered(streamed)) == CHUNK
    values = [x.meta.get("val") for each in list_programs(streamed) for x in each.graph.nodes]
    assert max(x.numel() for x in values if isinstance(x, Tensor)) < WIDTH * HIDDEN
    assert not streamed.remarks
    # the forward pass uses both weights, the backward pass that of `down`, which stage 3 gathers once for both
    assert count_comm(streamed) == count_comm(whole) | {"all_gather": 3 * 4 * CHUNK}


# uses of a leaf: losses of parameters with leaves of 4 KiB, and a batch of tokens

VOCABULARY = 64


def tables(rows: int = VOCABULARY) -> tree.Tree:
    torch.manual_seed(0)
    return {name: 0.3 * torch.randn(rows, WIDTH) for name in ("embedding", "head")}


def tokens(rows: int = VOCABULARY) -> Any:
    torch.manual_seed(1)
    return {"x": torch.randint(0, rows, (BATCH, 3)), "y": torch.randint(0, rows, (BATCH, 3))}


def look_up(p: Any, batch: Any, **how: Any) -> Tensor:
    return functional.embedding(batch["x"], p["embedding"], **how).tanh()


def has_a_head(p: Any, batch: Any) -> Tensor:
    logits = look_up(p, batch, padding_idx=3) @ p["head"].T
    return functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def is_tied(p: Any, batch: Any) -> Tensor:
    return has_a_head({**p, "head": p["embedding"]}, batch) + p["head"].square().sum() * 1e-3


def adds_a_bias(p: Any, batch: Any) -> Tensor:
    bias = p["head"].detach()[:, 0]
    return functional.linear(look_up(p, batch), p["embedding"], bias).square().mean() + (p["head"] * 2).norm()


def counts_tokens(p: Any, batch: Any) -> Tensor:
    return look_up(p, batch, scale_grad_by_freq=True).square().mean() + p["head"].sum().square()


def sums_over_rows(p: Any, batch: Any) -> Tensor:
    """Products whose results have no rows of the leaf, with a bias and without."""
    x = torch.softmax(look_up(p, batch).flatten(0, 1) @ p["head"].T, -1)
    return (torch.addmm(torch.ones(WIDTH), x, p["head"]) * (x @ p["embedding"])).square().mean()


def is_einsum(p: Any, batch: Any) -> Tensor:
    x = look_up(p, batch)
    logits = torch.einsum("bsd,vd->bsv", x, p["embedding"]) * torch.einsum("bsd,dv->bsv", x, p["head"].T)
    return logits.square().mean()


def weigh(x: Tensor, batch: Any) -> Tensor:
    """A number of the batch times a leaf, which is no elementwise function of a slice."""
    return x * (batch["y"].float().mean() * 0.01 + 0.5)


def reduces(p: Any, batch: Any) -> Tensor:
    """Sums and means of values that are not zero where the leaf has no row, and a product with a vector."""
    x, head = weigh(p["embedding"], batch), weigh(p["head"], batch).exp()
    return x.cos().mean() + head.sum(0).log().mean() + (p["head"] @ head.mean(0)).square().mean()


def is_beside_what_is_spread(p: Any, batch: Any) -> Tensor:
    """Values of the leaf's size that are made from smaller ones, beside it in a product and elementwise."""
    mean = batch["y"].float().mean()
    spread = ((mean + torch.ones(len(p["head"]), 1)) * torch.linspace(0, 1, WIDTH)).exp() / mean.exp()
    of_sums = (p["head"].T @ spread).square().mean()
    return of_sums + (weigh(p["head"], batch) * spread).sin().mean() + look_up(p, batch).square().mean()


def multiplies_what_is_infinite_where_there_is_no_row(p: Any, batch: Any) -> Tensor:
    x = torch.softmax(look_up(p, batch).flatten(0, 1) @ p["head"].T, -1)
    return (x @ weigh(p["head"], batch).abs().log()).square().mean()


def looks_up_in_brackets(p: Any, batch: Any) -> Tensor:
    """Indices in brackets may count from the end."""
    rows = p["embedding"][batch["x"] - (batch["x"] > 20) * len(p["embedding"])]
    return (rows * p["head"].index_select(0, batch["y"].flatten()).view_as(rows)).square().mean()


def list_whole(program: Program, numel: int) -> set[str]:
    """The operations whose results have as many elements as a leaf, in a program and in its loops."""
    nodes = [node for each in list_programs(program) for node in each.graph.nodes]
    return {node.target.__name__ for node in nodes if numel in [x.numel() for x in tensors(node.meta.get("val"))]}


USES = [has_a_head, is_tied, adds_a_bias, counts_tokens, sums_over_rows, is_einsum, reduces, looks_up_in_brackets]


@pytest.mark.parametrize("loss", USES)
def test_uses_of_a_streamed_leaf(loss: Any) -> None:
    mesh = VirtualMesh(fsdp=2)
    streamed = trace(make_step(loss), tables(), tokens(), mesh, chunk=CHUNK)
    given = [make_step(loss), tables(), tokens(), mesh]
    assert_close(train(*given, chunk=CHUNK), train(*given))
    whole = [name for name in ("embedding", "head") if any(remark.startswith(name) for remark in streamed.remarks)]
    assert whole == (["head"] if loss is adds_a_bias else [])
    assert bool(list_whole(streamed, VOCABULARY * WIDTH)) == bool(whole)


UPDATES = {
    "adamw, clipped, a mask": optim.chain(
        optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1, mask=lambda path, leaf: path == "head")
    ),
    "adamw8bit": optim.adamw8bit(1e-2),
    "adafactor": optim.adafactor(1e-2),
    "muon": optim.muon(1e-2, rest=optim.adamw(1e-2), where=lambda path, leaf: path == "head"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_nothing_is_as_large_as_a_streamed_leaf_or_a_remark_names_it(name: str) -> None:
    """Forward pass, backward pass and update. Muon needs whole matrices, each on one rank."""
    optimizer, mesh = UPDATES[name], VirtualMesh(fsdp=4)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = fzero.value_and_grad(has_a_head)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optim.apply_updates(params, updates), state, value

    params = fzero.partition(tables(), mesh)
    program = fzero.simulate(step, mesh, chunk=CHUNK).trace(params, optimizer.init(params), tokens())
    whole, remarks = list_whole(program, VOCABULARY * WIDTH), program.remarks
    if name != "muon":
        assert not whole and not remarks
        return
    assert {each.partition(".")[0] for each in whole} == {"to_owners", "orthogonalize"}
    (remark,) = remarks
    said = "head is gathered whole on one rank, 2.0 KiB with chunks of 1.0 KiB: to_owners uses it (/"
    assert remark.startswith(said) and "optimizer.update(gradients" in remark


ROWS = [
    (1, is_tied),
    (8, has_a_head),
    (2, reduces),
    (2, is_beside_what_is_spread),
    (8, multiplies_what_is_infinite_where_there_is_no_row),
]


@pytest.mark.parametrize(("world", "loss"), ROWS)
def test_rows_that_do_not_divide(world: int, loss: Any) -> None:
    """51 rows: the last ranks have fewer, the last of 8 ranks has 2 of 7. Chunks end in rows of zeros."""
    mesh, batch, step = VirtualMesh(fsdp=world), tokens(51), make_step(loss)
    ours, program = train_and_measure(step, tables(51), batch, mesh, chunk=CHUNK)
    assert not program.remarks and max(list_gathered(program)) <= CHUNK
    assert world == 1 or not list_whole(program, 51 * WIDTH)  # the slice of one rank is the leaf
    assert_close(ours, train(step, tables(51), batch, mesh))


def experts(p: Any, batch: Any) -> Tensor:
    """Products along the dimension of the leaf's rows, which are experts."""
    x = look_up(p, batch).flatten(0, 1).expand(8, -1, -1)
    return (torch.bmm(torch.bmm(x, p["up"]).relu(), p["up"].mT) * x).square().mean()


def test_stacked_experts() -> None:
    params = {"embedding": tables()["embedding"], "up": 0.3 * torch.randn(8, WIDTH, 32)}
    mesh, step = VirtualMesh(fsdp=2), make_step(experts)
    streamed = trace(step, params, tokens(), mesh, chunk=4096)
    assert not streamed.remarks and {4096} == {size for size in list_gathered(streamed) if size > 1024}
    assert_close(train(step, params, tokens(), mesh, chunk=4096), train(step, params, tokens(), mesh))


def test_the_leaf_may_be_cast() -> None:
    """Chunks are cast as they are sent. Sums over chunks are float32, so bfloat16 rounds no more often than before."""

    def step(p: Any, batch: Any) -> Any:
        return fzero.value_and_grad(fzero.precision(torch.bfloat16)(has_a_head))(p, batch)

    mesh = VirtualMesh(fsdp=2)
    params, simulated = fzero.partition(tables(), mesh), fzero.simulate(step, mesh, chunk=CHUNK)
    streamed = simulated.trace(params, tokens())
    assert not streamed.remarks and {(x.dtype, x.nbytes) for x in streamed.comm() if x.op == "all_gather"} == {
        (torch.bfloat16, CHUNK)
    }
    ours, theirs = (fzero.unpartition(run(params, tokens())) for run in (simulated, fzero.simulate(step, mesh)))
    torch.testing.assert_close(ours[0], theirs[0], rtol=2**-8, atol=0)
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=2**-6, atol=2**-8 * gradient.abs().max().item())


# steps that repeat what they do


def layers() -> tree.Tree:
    torch.manual_seed(0)
    shapes = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "norm": (WIDTH,)}
    blocks = [{name: 0.2 * torch.randn(shape) for name, shape in shapes.items()} for _ in range(2)]
    return {"blocks": blocks, "head": 0.2 * torch.randn(VOCABULARY, WIDTH)}


def block(h: Tensor, p: Any) -> Tensor:
    return h + ((h * p["norm"]) @ p["up"].T).relu() @ p["down"].T


def in_turn(p: Any, x: Tensor) -> Tensor:
    for layer in p["blocks"]:
        x = block(x, layer)
    return (x @ p["head"].T).square().mean()


def in_regions(p: Any, x: Tensor) -> Tensor:
    for layer in p["blocks"]:
        x = fzero.remat(block)(x, layer)
    return (x @ p["head"].T).square().mean()


def in_a_loop(p: Any, x: Tensor) -> Tensor:
    x, _ = fzero.scan(lambda h, _, layer: (fzero.remat(block)(h, layer), None), x, layers=p["blocks"])
    return (x @ p["head"].T).square().mean()


def in_microbatches(loss: Any, **how: Any) -> Any:
    """A step of two microbatches."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        both = fzero.accumulate(lambda p, x: (loss(p, x) * len(x), torch.tensor(float(len(x)))), 2, **how)
        value, gradients = both(params, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optim.apply_updates(params, updates), state, value

    return step


STEPS = {
    "regions": make_step(in_regions),
    "loop": make_step(in_a_loop),
    "microbatches": in_microbatches(in_turn),
    "microbatches of loops": in_microbatches(in_a_loop, sync="once"),
}
APART: Any = {"layers": lambda path: path if path.endswith(("up", "down")) else None, **GRANULARITY}
"""A bucket for each large leaf, so that all ranks hold equal parts of its rows."""


@pytest.mark.parametrize(("name", "stage"), list(zip(STEPS, (3, 2, 3, 1))))
def test_steps_that_repeat_what_they_do(name: str, stage: int) -> None:
    mesh, batch, results = VirtualMesh(fsdp=2), torch.randn(BATCH, WIDTH), []
    for chunk in (None, CHUNK):
        step, params = fzero.simulate(STEPS[name], mesh, stage=stage, chunk=chunk), layers()
        params = fzero.partition(params, mesh, **APART)
        program = step.trace(params, OPTIMIZER.init(params), batch)
        results.append(fzero.unpartition(step(params, OPTIMIZER.init(params), batch)))
    assert_close(*results)
    assert not program.remarks and max(list_gathered(program)) <= CHUNK
    names = {entry.bucket for entry in program.comm() if entry.op == "all_gather"}
    assert names >= {f"blocks.{i}.{leaf} in 4" for i in (0, 1) for leaf in ("up", "down")}


def test_chunks_beside_a_budget_and_state_on_the_host() -> None:
    """Chunks of a slice on the host are copied to the device one by one."""
    mesh, step, batch = VirtualMesh(fsdp=2), make_step(has_a_head), tokens()
    expected = train(step, tables(), batch, mesh)
    free = trace(step, tables(), batch, mesh, chunk=CHUNK).memory().peak
    budget = trace(step, tables(), batch, mesh, chunk=CHUNK, memory=free)
    assert max(list_gathered(budget)) <= CHUNK and budget.memory().peak <= free
    params = fzero.partition(tables(), mesh, to=fzero.host(), **GRANULARITY)
    state, simulated = OPTIMIZER.init(params), fzero.simulate(step, mesh, chunk=CHUNK)
    program = simulated.trace(params, state, batch)
    copied = [x for each in list_programs(program) for node in calls(each, ops.to_device) for x in node.meta["val"]]
    assert copied and max(x.nbytes for x in copied) <= CHUNK // 2 and program.memory().peak < free
    params, _, loss = simulated(params, state, batch)
    assert_close(loss, expected[0][0])


# what is gathered whole, and bad input


def adds_up_bags(p: Any, batch: Any) -> Tensor:
    return (functional.embedding_bag(batch["x"], p["embedding"]) @ p["head"].T).square().mean()


def has_tiles(p: Any, batch: Any) -> Tensor:
    """A tile sorts the leaf."""
    apply = fzero.tiled(lambda p, h: (h @ p["head"].sort(0).values.T).logsumexp(-1), chunks=2)
    return apply({"head": p["head"]}, look_up(p, batch)).mean()


def multiplies_the_leaf_by_itself(p: Any, batch: Any) -> Tensor:
    return (p["head"] @ p["head"].T).square().mean() + look_up(p, batch).square().mean()


def squeezes_in_place(p: Any, batch: Any) -> Tensor:
    """torch multiplies a vector by a matrix as a matrix of one row, and gives the product another shape in place."""
    return (look_up(p, batch)[0, 0] @ p["head"].T).square().mean()


def multiplies_two_leaves(p: Any, batch: Any) -> Tensor:
    """One loop cannot take both by rows."""
    return (p["embedding"] @ p["head"].T).square().mean() + look_up(p, batch).square().mean()


def sorts_the_gradient(p: Any, batch: Any) -> Tensor:
    """The gradient of a sort has the leaf's size, and no rule for rows."""
    return (p["head"].sort(0).values * torch.arange(WIDTH)).sum() + look_up(p, batch).square().mean()


@pytest.mark.parametrize(
    ("loss", "leaf", "operation"),
    [
        (adds_up_bags, "embedding", "_embedding_bag"),
        (has_tiles, "head", "loop"),
        (multiplies_the_leaf_by_itself, "head", "mm"),
        (squeezes_in_place, "head", "mm"),
        (multiplies_two_leaves, "embedding", "mm"),
        (sorts_the_gradient, "head", "sort"),
    ],
)
def test_a_leaf_with_another_use_is_gathered_whole_and_reported(loss: Any, leaf: str, operation: str) -> None:
    mesh, step, batch = VirtualMesh(fsdp=2), make_step(loss), tokens()
    params = fzero.partition(tables(), mesh)
    simulated = fzero.simulate(step, mesh, chunk=CHUNK)
    report = simulated.report(params, OPTIMIZER.init(params), batch)
    (remark,) = report.remarks
    assert remark.startswith(f"{leaf} is gathered whole, 4.0 KiB with chunks of 1.0 KiB: {operation} uses it (/")
    assert "test_stream.py:" in remark
    assert f"  {remark}" in str(report).splitlines()
    assert f"  {remark}" in str(simulated.trace(params, OPTIMIZER.init(params), batch)).splitlines()
    assert_close(train(step, tables(), batch, mesh, chunk=CHUNK), train(step, tables(), batch, mesh))


@pytest.mark.parametrize(
    ("how", "obstacle"),
    [
        ({}, "is cut within rows of 17 elements; cut it between rows with partition(granularity=)"),
        (
            {"layers": lambda path: "both"},
            "shares the bucket 'both' with other leaves; give it one of its own with partition(layers=)",
        ),
    ],
)
def test_a_leaf_whose_slices_are_no_rows_is_gathered_whole(how: Any, obstacle: str) -> None:
    mesh, batch = VirtualMesh(fsdp=2), tokens(60)
    params = fzero.partition({name: torch.randn(60, 17) for name in ("embedding", "head")}, mesh, **how)
    program = fzero.simulate(make_step(has_a_head), mesh, chunk=CHUNK).trace(params, OPTIMIZER.init(params), batch)
    assert [remark.partition(": ")[2] for remark in program.remarks] == [obstacle, obstacle]


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "64", "a lot"])
def test_a_chunk_that_is_no_size(chunk: Any) -> None:
    way_out = "give a (number of bytes above 0|whole number, a text or None)"
    with pytest.raises(fzero.FzeroError, match=f"^chunk: is .*; {way_out}"):
        fzero.simulate(make_step(has_a_head), VirtualMesh(fsdp=2), chunk=chunk)


def test_a_chunk_below_one_row_of_every_rank() -> None:
    with pytest.raises(fzero.FzeroError) as refused:
        trace(make_step(has_a_head), tables(), tokens(), VirtualMesh(fsdp=4), chunk=255)
    assert str(refused.value) == (
        "chunk: is 255 bytes, and one row of embedding of each of 4 ranks has 256; "
        "give at least 256, or None to gather leaves whole"
    )
    trace(make_step(has_a_head), tables(), tokens(), VirtualMesh(fsdp=4), chunk=256)


def test_a_chunk_beside_passes() -> None:
    with pytest.raises(fzero.FzeroError, match=r"chunk: is '1KiB', and passes are given; give it to the passes"):
        fzero.simulate(make_step(has_a_head), 2, chunk="1KiB", passes=fzero.passes.defaults(stage=3))


@pytest.mark.parametrize("index", [-1, VOCABULARY, 51])
def test_an_index_outside_of_the_leaf_is_refused_as_before(index: int) -> None:
    """A chunk has rows of zeros behind the 51 of the leaf."""
    batch = tokens(51)
    batch["x"][0, 0] = index
    with pytest.raises(IndexError, match="index out of range in self"):
        train(make_step(has_a_head), tables(51), batch, VirtualMesh(fsdp=2), chunk=CHUNK)


# live ranks


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(x.untyped_storage().nbytes() for x in tensors(result))])
        return result


def train_on_a_rank(mesh: DeviceMesh) -> Any:
    """Losses and parameters of two steps, streamed and whole, and the largest memory that each of both allocates."""
    rank, batch, found = mesh.get_local_rank(), tokens(), []
    mine = {name: x[4 * rank : 4 * rank + 4] for name, x in batch.items()}
    for chunk in (CHUNK, None):
        step = fzero.shard(make_step(is_tied), mesh, chunk=chunk)
        params, losses = fzero.partition(tables(), mesh), []
        state = OPTIMIZER.init(params)
        for _ in range(2):
            with Largest() as largest:
                params, state, loss = step(params, state, mine)
            losses.append(loss)
        found.append(((losses, fzero.unpartition(params)), largest.nbytes))
    return found


def test_live_ranks_compute_what_virtual_ranks_do_and_allocate_no_whole_leaf() -> None:
    """Bit for bit: both take the same sums in the same order."""
    mesh, leaf = VirtualMesh(fsdp=2), 4 * VOCABULARY * WIDTH
    expected = train(make_step(is_tied), tables(), tokens(), mesh, chunk=CHUNK)
    for (streamed, most), (whole, most_of_whole) in run(2, train_on_a_rank):
        assert_close(streamed, expected, 0, 0)
        assert_close(streamed, whole)
        assert most < leaf <= most_of_whole
