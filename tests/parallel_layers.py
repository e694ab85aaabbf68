"""Models of `fzero.parallel` for tests on virtual and on real ranks: each has parameters, their split and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import Program, VirtualMesh, tree
from fzero.parallel import column, experts, pipeline, row, vocab_cross_entropy, vocab_embedding

F64 = torch.float64
WIDTH, VOCABULARY, ROWS = 8, 24, 8


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=F64, generator=generator) / shape[-1] ** 0.5


class Layer(NamedTuple):
    """A loss of parameters and a batch, of which ranks have parts by `split` on a mesh of these data axes."""

    loss: Callable[..., Tensor]
    params: dict[str, Any]
    batch: tuple[Tensor, ...]
    split: dict[str, Any]
    data: tuple[str, ...] = ("fsdp",)

    def step(self, params: Any, *batch: Tensor) -> Any:
        return fzero.value_and_grad(self.loss)(params, *batch)

    def on_one_device(self) -> Any:
        return self.step(self.params, *self.batch)

    def on_ranks(self, mesh: VirtualMesh, stage: int = 3) -> tuple[Any, Program]:
        """The loss and the gradients of ranks, and the program."""
        params = fzero.partition(self.params, mesh, split=self.split)
        step = fzero.simulate(self.step, mesh, data=self.data, stage=stage)
        loss, grads = step(params, *self.batch)
        leaves, treedef = tree.flatten((params, *self.batch))
        return (loss, fzero.unpartition(grads)), step._prepare(treedef, leaves)

    def on_rank(self, mesh: Any, rows: slice) -> tuple[Tensor, Any]:
        """The loss and the gradients on a rank of a real mesh, which takes these rows of the batch."""
        params = fzero.partition(self.params, mesh, split=self.split)
        step = fzero.shard(self.step, mesh, data=self.data)
        loss, grads = step(params, *(x[rows] for x in self.batch))
        return loss, fzero.unpartition(grads)


def list_bytes(program: Program, axis: str) -> dict[str, int]:
    """Collective -> bytes along an axis of float64 values that are no state."""
    found: dict[str, int] = {}
    for entry in program.comm():
        if entry.axis == axis and entry.bucket is None and entry.dtype == F64:
            found[entry.op] = found.get(entry.op, 0) + entry.nbytes
    return found


TOKENS = torch.randint(VOCABULARY, (4, ROWS + 1), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS[:, 1:].masked_fill(TOKENS[:, 1:] % 5 == 0, -100)
HEAD = {"label_smoothing": 0.1, "reduction": "sum"}


def decode(sequence: int | None) -> Layer:
    """A decoder without attention: embedding, column, row, cross entropy, with or without sequence parallelism."""

    def loss(p: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        h = vocab_embedding(tokens, p["embed"], sequence=sequence)
        hidden = column(F.layer_norm(h, (WIDTH,), p["norm"]), p["up"], p["up_bias"], sequence=sequence)
        h = h + row(F.gelu(hidden), p["down"], p["down_bias"], sequence=sequence)
        h = h if sequence is None else fzero.all_gather(h, "tp", sequence)
        chunks = 1 if sequence is None else 3
        total = vocab_cross_entropy(h, p["head"], labels, p["head_bias"], chunks=chunks, **HEAD)
        return total / fzero.pmean((labels != -100).sum().to(F64), "fsdp")

    first = {"embed": draw(VOCABULARY, WIDTH), "up": draw(16, WIDTH), "up_bias": draw(16)}
    first |= {"head": draw(VOCABULARY, WIDTH).flip(0), "head_bias": draw(VOCABULARY)}
    params = {**first, "norm": draw(WIDTH) + 1, "down": draw(WIDTH, 16), "down_bias": draw(WIDTH)}
    split = {**dict.fromkeys(first, ("tp", 0)), "down": ("tp", 1)}
    return Layer(loss, params, (TOKENS[:, :-1], LABELS), split)


def decode_plainly(p: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of `decode`, by functions of torch."""
    h = F.embedding(tokens, p["embed"])
    hidden = F.gelu(F.linear(F.layer_norm(h, (WIDTH,), p["norm"]), p["up"], p["up_bias"]))
    logits = F.linear(h + F.linear(hidden, p["down"], p["down_bias"]), p["head"], p["head_bias"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **HEAD) / (labels != -100).sum()


EXPERTS, CHOSEN = 8, 2


def compute_experts(p: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """What experts make of rows in order of experts."""
    up, down = p["up"].unbind(), p["down"].unbind()

    def apply(rows: Tensor, counts: Tensor) -> Tensor:
        owner = torch.searchsorted(counts.cumsum(0), torch.arange(rows.shape[0]), right=True).unsqueeze(-1)
        made = [torch.where(owner == i, torch.tanh(rows @ up[i].T) @ down[i].T, 0) for i in range(len(up))]
        return torch.stack(made).sum(0)

    return apply


def route(**how: Any) -> Layer:
    """A router and its experts, which have a data axis."""

    def loss(p: Any, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (WIDTH,), p["norm"])
        weights, ids = (x @ p["router"].T).softmax(-1).topk(CHOSEN)
        made = experts(compute_experts(p), x, ids, weights, number=EXPERTS, **how)
        return (x + (made[0] if isinstance(made, tuple) else made)).square().mean()

    params = {"norm": draw(WIDTH) + 1, "router": draw(EXPERTS, WIDTH), "up": draw(EXPERTS, 6, WIDTH)}
    params["down"] = draw(EXPERTS, WIDTH, 6)
    return Layer(loss, params, (draw(8, 3, WIDTH),), {"up": ("ep", 0), "down": ("ep", 0)}, ("fsdp", "ep"))


def route_plainly(p: Any, x: Tensor) -> Tensor:
    """The loss of `route`, where each token goes through all experts."""
    x = F.layer_norm(x, (WIDTH,), p["norm"])
    weights, ids = (x @ p["router"].T).softmax(-1).topk(CHOSEN)
    made = torch.stack([torch.tanh(x @ up.T) @ down.T for up, down in zip(p["up"], p["down"])], -2)
    chosen = made.gather(-2, ids.unsqueeze(-1).expand(*ids.shape, WIDTH))
    return (x + (chosen * weights.unsqueeze(-1)).sum(-2)).square().mean()


DEPTH, MICROBATCHES = 8, 4


def compute_layer(p: Any, h: Tensor) -> Tensor:
    return h + torch.tanh(F.layer_norm(h, (WIDTH,), p["norm"]) @ p["up"].mT)


def stage(repeats: int = 1, **how: Any) -> Layer:
    """Equal layers in a pipeline."""
    lead = (DEPTH,) if repeats == 1 else (repeats, DEPTH // repeats)

    def loss(p: Any, x: Tensor) -> Tensor:
        parts = x.unflatten(0, (MICROBATCHES, -1))
        return pipeline(compute_layer, p, parts, repeats=repeats, **how).square().mean()

    params = {"norm": draw(*lead, WIDTH) + 1, "up": draw(*lead, WIDTH, WIDTH)}
    return Layer(loss, params, (draw(16, WIDTH),), {"*": ("pp", len(lead) - 1)})


def stage_plainly(p: Any, x: Tensor) -> Tensor:
    """The loss of `stage`, layer by layer."""
    norms, ups = p["norm"].reshape(DEPTH, WIDTH), p["up"].reshape(DEPTH, WIDTH, WIDTH)
    for norm, up in zip(norms, ups):
        x = compute_layer({"norm": norm, "up": up}, x)
    return x.square().mean()


PLACES, HEADS, WIDE = 16, 4, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 16, [0] * 2 + [1] * 3 + [2] * 11, [3] * 8 + [4] * 8])
POSITIONS = torch.tensor([[i - row.index(number) for i, number in enumerate(row)] for row in DOCUMENTS.tolist()])


def attend(p: Any, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    """The mean square of attention, of as many heads of keys as the weights have."""
    q, k, v = ((x @ p[name].T).unflatten(-1, (-1, WIDE)).transpose(1, 2) for name in "qkv")
    return attention(q, k, v).square().mean()


def see(window: int, documents: Tensor) -> Tensor:
    """[b, 1, s, s]: the keys that queries see, of `window` places and of their own documents."""
    distance = torch.arange(PLACES).unsqueeze(-1) - torch.arange(PLACES)
    return (((distance >= 0) & (distance < window)) & (documents.unsqueeze(-1) == documents.unsqueeze(-2))).unsqueeze(1)


def attend_to_parts(attention: Callable[..., Tensor], keys: int) -> Layer:
    """Attention whose rows lie along sp: `attention(q, k, v, documents, positions)`."""

    def loss(p: Any, x: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        return attend(p, x, lambda q, k, v: attention(q, k, v, documents, positions))

    params = {"q": draw(HEADS * WIDE, WIDTH), "k": draw(keys * WIDE, WIDTH), "v": draw(keys * WIDE, WIDTH).flip(0)}
    return Layer(loss, params, (draw(4, PLACES, WIDTH), DOCUMENTS, POSITIONS), {}, ("fsdp", "sp"))


def attend_plainly(window: int, p: Any, x: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
    """The same by torch's attention of the whole sequence."""
    mask = see(window, documents)
    return attend(p, x, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))


def cut(x: Tensor, mesh: VirtualMesh, order: Tensor) -> Tensor:
    """Rows of ranks (fsdp, sp), one rank behind the other: examples along fsdp, places in this order along sp."""
    return torch.cat([part for rows in x[:, order].chunk(mesh.size("fsdp")) for part in rows.chunk(mesh.size("sp"), 1)])
