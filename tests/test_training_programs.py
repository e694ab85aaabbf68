"""Training programs as people write them around a model: each as a step of fzero on two ranks, beside the loop of plain
torch on the whole batch, with batches of changing sizes. In float64, so that sums in another order are near."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import fzero
from fzero import optim, tree

AXIS = "fsdp"
MESH = fzero.VirtualMesh(fsdp=2)
SGD = optim.sgd(0.1, momentum=0.9)


class Program(NamedTuple):
    """`step(*state, *batch)` returns the next state. `loop` trains the models in plain torch, and returns what the
    first trees of the state are then."""

    step: Callable[..., Any]
    state: tuple[Any, ...]
    batches: list[tuple[Tensor, ...]]
    loop: Callable[[], tuple[Any, ...]]


def draw(*shapes: tuple[int, ...], rows: tuple[int, ...] = (4, 8, 6)) -> list[tuple[Tensor, ...]]:
    """A batch for each number of rows."""
    seeded = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, *s, generator=seeded, dtype=torch.float64) for s in shapes) for n in rows]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def lower(model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """The parameters of a model, which the loop of plain torch does not change, and its function."""
    params, apply = fzero.lower(model)
    return copy.deepcopy(params), apply


def descend(params: Any, state: Any, grads: Any, by: optim.GradientTransformation = SGD) -> tuple[Any, Any]:
    updates, state = by.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def iterate(batches: list[tuple[Tensor, ...]], *models: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Each batch with an optimizer for each model."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    for batch in batches:
        yield (*batch, *optimizers)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def negatives_of_all_ranks() -> Program:
    """A contrastive loss whose negatives are the other examples of the whole batch, and a temperature in bounds."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.scale = mlp(5, 4), mlp(3, 4), nn.Parameter(torch.tensor(1.0).double())

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1), self.scale.exp()

    model, batches = Pair(), draw((5,), (3,))
    params, apply = lower(model)

    def contrast(a: Tensor, b: Tensor, others: Tensor, scale: Tensor, first: Any = 0) -> Tensor:
        return F.cross_entropy(scale * a @ others.T, torch.arange(len(a)) + first)

    def step(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            a, b, scale = apply(params, x, y)
            first = len(a) * fzero.axis_index(AXIS)
            one = contrast(a, b, fzero.all_gather(b, AXIS, 0), scale, first)
            return one + contrast(b, a, fzero.all_gather(a, AXIS, 0), scale, first)

        params, state = descend(params, state, fzero.grad(loss)(params))
        return {**params, "scale": params["scale"].clamp(0, 1.05)}, state

    def loop() -> Any:
        for x, y, optimizer in iterate(batches, model):
            a, b, scale = model(x, y)
            update(optimizer, contrast(a, b, b, scale) + contrast(b, a, a, scale))
            model.scale.data.clamp_(0, 1.05)
        return (fzero.lower(model)[0],)

    return Program(step, (params, SGD.init(params)), batches, loop)


def correlation_of_two_views() -> Program:
    """A matrix over the whole batch, whose diagonal the loss changes in place."""
    model, batches = mlp(5, 6, 4), draw((5,), (5,))
    params, apply = lower(model)

    def redundancy(a: Tensor, b: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        a, b = ((z - mean(z.mean(0))) / (mean(z.square().mean(0)) + 1).sqrt() for z in (a, b))
        matrix = mean((a.T @ b).div_(len(a)))
        on = torch.diagonal(matrix).add_(-1).pow_(2).sum()
        return on + 0.1 * matrix.flatten()[:-1].view(3, 5)[:, 1:].square().sum()

    def step(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return redundancy(apply(params, x), apply(params, y), lambda z: fzero.pmean(z, AXIS))

        return descend(params, state, fzero.grad(loss)(params))

    def loop() -> Any:
        for x, y, optimizer in iterate(batches, model):
            update(optimizer, redundancy(model(x), model(y), lambda z: z.clone()))
        return (fzero.lower(model)[0],)

    return Program(step, (params, SGD.init(params)), batches, loop)


def two_players_with_a_penalty() -> Program:
    """A critic whose gradient by its input is held near 1, and weights in bounds; and a generator."""
    maker, critic, batches = mlp(3, 6, 5), mlp(5, 6, 1), draw((5,), (3,), (1,))
    (made, make), (seen, judge) = lower(maker), lower(critic)

    def step(made: Any, seen: Any, state: Any, other: Any, x: Tensor, z: Tensor, at: Tensor) -> Any:
        fake = make(made, z)

        def loss(seen: Any) -> Tensor:
            slope = torch.func.grad(lambda point: judge(seen, point).sum())(torch.lerp(x, fake, at.sigmoid()))
            return (judge(seen, fake) - judge(seen, x)).mean() + (slope.norm(dim=1) - 1).square().mean()

        seen, other = descend(seen, other, fzero.grad(loss)(seen))
        seen = tree.map(lambda leaf: leaf.clamp(-0.5, 0.5), seen)
        made, state = descend(made, state, fzero.grad(lambda made: -judge(seen, make(made, z)).mean())(made))
        return made, seen, state, other

    def loop() -> Any:
        for x, z, at, one, other in iterate(batches, maker, critic):
            fake = maker(z).detach()
            point = torch.lerp(x, fake, at.sigmoid()).requires_grad_()
            (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
            update(other, (critic(fake) - critic(x)).mean() + (slope.norm(dim=1) - 1).square().mean())
            for param in critic.parameters():
                param.data.clamp_(-0.5, 0.5)
            update(one, -critic(maker(z)).mean())
        return fzero.lower(maker)[0], fzero.lower(critic)[0]

    return Program(step, (made, seen, SGD.init(made), SGD.init(seen)), batches, loop)


def a_climb_before_the_step() -> Program:
    """Sharpness-aware minimization: the gradient behind a step of one length along a first gradient."""
    model, batches = mlp(5, 6, 3), draw((5,), (3,))
    params, apply = lower(model)

    def step(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        slope = fzero.grad(lambda params: F.mse_loss(apply(params, x), y))
        first = slope(params)
        norm = torch.stack([leaf.norm() for leaf in tree.leaves(first)]).norm()
        return descend(params, state, slope(tree.map(lambda p, g: p + p.abs() * g * (0.5 / norm), params, first)))

    def loop() -> Any:
        for x, y, optimizer in iterate(batches, model):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            old = [p.detach().clone() for p in model.parameters()]
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            for param in model.parameters():
                param.data.add_(param.abs().data * param.grad * (0.5 / norm))
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for param, value in zip(model.parameters(), old):
                param.data = value
            optimizer.step()
        return (fzero.lower(model)[0],)

    return Program(step, (params, SGD.init(params)), batches, loop)


def a_teacher_and_a_queue() -> Program:
    """Momentum contrast: keys of a slow copy of the model go into a ring of the last keys of all ranks."""
    model, batches = mlp(5, 4), draw((5,), (5,), rows=(4, 8, 4))
    slow, ring = copy.deepcopy(model), F.normalize(torch.ones(12, 4).double().cumsum(0), dim=1)
    (params, apply), (kept, _) = lower(model), lower(slow)

    def contrast(query: Tensor, key: Tensor, ring: Tensor) -> Tensor:
        logits = torch.cat([torch.einsum("nc,nc->n", query, key)[:, None], query @ ring.T], 1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(query), dtype=torch.long))

    def step(params: Any, kept: Any, state: Any, queue: Any, x: Tensor, y: Tensor) -> Any:
        kept = tree.map(lambda a, b: torch.lerp(a, b, 0.1), kept, params)
        key = F.normalize(apply(kept, y), dim=1)
        loss = lambda p: contrast(F.normalize(apply(p, x), dim=1), key, queue["ring"])  # noqa: E731
        params, state = descend(params, state, fzero.grad(loss)(params))
        keys = fzero.all_gather(key, AXIS, 0)
        places = (queue["next"] + torch.arange(len(keys))) % 12
        queue = {"ring": queue["ring"].index_copy(0, places, keys), "next": queue["next"] + len(keys)}
        return params, kept, state, queue

    def loop() -> Any:
        last, first = ring.clone(), 0
        for x, y, optimizer in iterate(batches, model):
            with torch.no_grad():
                for a, b in zip(slow.parameters(), model.parameters()):
                    a.lerp_(b, 0.1)
                key = F.normalize(slow(y), dim=1)
            update(optimizer, contrast(F.normalize(model(x), dim=1), key, last))
            for row in key:
                last[first % 12], first = row, first + 1
        return fzero.lower(model)[0], fzero.lower(slow)[0]

    queue = {"ring": ring, "next": torch.tensor(0)}
    return Program(step, (params, kept, SGD.init(params), queue), batches, loop)


def words_that_count() -> Program:
    """A recurrent language model with tied weights, over words that are no padding: these are unequally many on ranks.
    Its first hidden state is made like a parameter of the model."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.run, self.out = nn.Embedding(7, 6), nn.GRU(6, 6), nn.Linear(6, 7)
            self.out.weight = self.embed.weight

        def start(self, rows: int) -> Tensor:
            return next(self.parameters()).new_zeros(1, rows, 6)

        def forward(self, words: Tensor, hidden: Tensor) -> Tensor:
            return self.out(self.run(self.embed(words).transpose(0, 1), hidden)[0]).transpose(0, 1)

    torch.manual_seed(0)
    model = Recurrent().double()
    batches = [((x.abs() * torch.arange(1, len(x) + 1)[:, None]).long() % 7,) for (x,) in draw((4,), rows=(4, 8, 4))]
    params, apply = lower(model)

    def sums(call: Callable[..., Tensor], words: Tensor) -> tuple[Tensor, Tensor]:
        targets = words[:, 1:].masked_fill(words[:, 1:] == 0, -100)
        logits = call(words[:, :-1], model.start(len(words)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()

    def step(params: Any, state: Any, words: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            total, count = sums(lambda *args: apply(params, *args), words)
            return total * fzero.axis_size(AXIS) / fzero.psum(count, AXIS)

        whole = fzero.grad(loss)(params)
        turns = fzero.accumulate(lambda p, part: sums(lambda *args: apply(p, *args), part), 2)(params, words)[1]
        return descend(params, state, tree.map(lambda a, b: (a + b) / 2, whole, turns))

    def loop() -> Any:
        for words, optimizer in iterate(batches, model):
            total, count = sums(model, words)
            update(optimizer, total / count)
        return (fzero.lower(model)[0],)

    return Program(step, (params, SGD.init(params)), batches, loop)


def a_long_convolution() -> Program:
    """A state space layer: complex exponentials of parameters, and a convolution by Fourier transforms."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imaginary = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(4, 3))
            self.c, self.out = nn.Parameter(torch.rand(4, 3, 2)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            powers = (torch.complex(-self.real.exp(), self.imaginary)[..., None] * torch.arange(length)).exp()
            kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), powers).real
            both = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x.transpose(1, 2), n=2 * length)
            return self.out(torch.fft.irfft(both, n=2 * length)[..., :length].transpose(1, 2)).mean(1)

    torch.manual_seed(0)
    model = Layer().double()
    batches = [(x[:, :length], y) for (x, y), length in zip(draw((7, 4), (2,)), (5, 7, 6))]
    params, apply = lower(model)

    def step(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        return descend(params, state, fzero.grad(lambda p: F.mse_loss(fzero.remat(apply)(p, x), y))(params))

    def loop() -> Any:
        for x, y, optimizer in iterate(batches, model):
            update(optimizer, F.mse_loss(model(x), y))
        return (fzero.lower(model)[0],)

    return Program(step, (params, SGD.init(params)), batches, loop)


def a_bounded_critic() -> Program:
    """Spectral norms, whose vectors move with each forward; two forwards in one loss, and a reversed gradient."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -grad

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = spectral_norm(nn.Linear(5, 4)), spectral_norm(nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Reverse.apply(torch.tanh(self.a(x))))

    torch.manual_seed(0)
    model, batches = Critic().double(), draw((5,), (5,))
    params, buffers, apply = fzero.lower_stateful(model)
    params, buffers = copy.deepcopy((params, buffers))

    def step(params: Any, buffers: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        def loss(params: Any) -> Any:
            real, after = apply(params, buffers, x)
            fake, after = apply(params, after, y)
            return (F.softplus(-real) + F.softplus(fake)).mean(), after

        grads, after = fzero.grad(loss, has_aux=True)(params)
        params, state = descend(params, state, grads)
        return params, after, state

    def loop() -> Any:
        for x, y, optimizer in iterate(batches, model):
            update(optimizer, (F.softplus(-model(x)) + F.softplus(model(y))).mean())
        return fzero.lower_stateful(model)[:2]

    return Program(step, (params, buffers, SGD.init(params)), batches, loop)


PROGRAMS: tuple[tuple[Callable[[], Program], int], ...] = (
    (negatives_of_all_ranks, 3),
    (correlation_of_two_views, 1),
    (two_players_with_a_penalty, 3),
    (a_climb_before_the_step, 1),
    (a_teacher_and_a_queue, 3),
    (words_that_count, 3),
    (a_long_convolution, 1),
    (a_bounded_critic, 3),
)


@pytest.mark.parametrize(("make", "stage"), PROGRAMS, ids=[make.__name__ for make, _ in PROGRAMS])
def test_a_program_trains_as_the_loop_of_plain_torch(make: Callable[[], Program], stage: int) -> None:
    torch.manual_seed(0)
    program = make()
    step, state = fzero.simulate(program.step, MESH, stage=stage), ()
    for part in program.state:
        state = (*state, fzero.partition(part, MESH, like=state))
    for batch in program.batches:
        state = step(*state, *batch)
    expected = program.loop()
    found = fzero.unpartition(state[: len(expected)])
    assert tree.paths(found) == tree.paths(expected)
    torch.testing.assert_close(tree.leaves(found), tree.leaves(expected), rtol=1e-9, atol=1e-11)
