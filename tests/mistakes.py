"""The catalogue of mistakes: wrong steps and wrong programs, each with the message that refuses it.

    IN_A_STEP     steps of a user that let ranks drift apart
    IMPURE        steps of a user that write into memory of others
    UNMEANT       steps that let each rank train alone, or train nothing
    DOUBTFUL      steps that are warned of: they may be meant
    MEANT         steps that resemble these, and are right
    IN_A_PASS     mistakes of a pass, seeded into the program of a good step
    UNSEEN        mistakes of a pass that are the same on all ranks: `verify` accepts them
    WRONG_PASSES  passes from outside of the package, refused by name

Tests show that each mistake is refused, and that virtual ranks crash or compute something else with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from programs import MESH, Case, apply, calls, layers, loss, mlp, on_rows, trained, training
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.passes import defaults
from fzero.program import ops
from fzero.program.program import Program

aten = torch.ops.aten
HYBRID = VirtualMesh(replica=2, fsdp=2)
PER_RANK = "a per-rank value meets a slice of this leaf in"

# mistakes of a user: each a step on one tree of state and this rank's rows


class State(NamedTuple):
    """State of the steps of `IN_A_STEP`: a matrix [5, 5], a vector [5], a 0-d leaf, and a replicated 0-d number."""

    w: Any
    b: Any
    s: Any
    n: Any


def place_state(mesh: Any) -> State:
    """The state on a mesh."""
    w, b, s = torch.linspace(-1, 1, 25).view(5, 5), torch.linspace(1, 2, 5), torch.tensor(0.5)
    placed = fzero.partition({"w": w, "b": b, "s": s}, mesh)
    return State(**placed, n=placed["w"].new_zeros(()))


class WrongStep(NamedTuple):
    """A step that replaces a leaf by `new(state, x)`, with the leaf and the operation that its refusal names."""

    new: Callable[[State, Tensor], Any]
    leaf: str
    operation: str
    shows: bool = True  # in what virtual ranks compute
    has_batch: bool = True  # or it comes from random draws, a collective, or the rank's index

    def step(self, state: State, x: Tensor) -> State:
        return state._replace(**{self.leaf: self.new(state, x)})

    @property
    def message(self) -> str:
        """The beginning of the refusal: leaf, operation and the user's line."""
        problem = "depends on this rank's batch in" if self.has_batch else "differs between ranks in"
        result = f"result {self.leaf!r} is state but {problem}"
        problem = PER_RANK if self.operation == "take" else result
        code = self.new.__code__
        line = f"({code.co_filename}:{code.co_firstlineno} in <lambda>: "
        return f"{self.leaf}: {problem} {self.operation}: ranks would drift apart {line}"


def through_a_view(x: Tensor) -> Tensor:
    total = torch.zeros(2, 5)
    total[0].add_(x[0])
    return total.sum()


def norm_of_a_gradient(b: Any, x: Tensor) -> Tensor:
    return fzero.grad(lambda b: (x @ b).square().mean())(b.full_tensor()).norm()


IN_A_STEP: dict[str, WrongStep] = {
    "a rate of the batch": WrongStep(lambda state, x: state.w - x.abs().mean() * state.w, "w", "sub"),
    "a rate of the batch in a list": WrongStep(
        lambda state, x: torch._foreach_mul([state.w], x.sum())[0], "w", "_foreach_mul"
    ),
    "a random rate": WrongStep(lambda state, x: state.w - torch.rand(()) * state.w, "w", "sub", has_batch=False),
    "a rate of the rank": WrongStep(
        lambda state, x: state.w * fzero.axis_index("replica"), "w", "mul", has_batch=False
    ),
    "a mean over one axis of two": WrongStep(
        lambda state, x: state.w * fzero.pmean(x.mean(), "fsdp"), "w", "mul", has_batch=False
    ),
    "a number of the batch beside a 0-d leaf": WrongStep(lambda state, x: x.mean() * state.s, "s", "mul"),
    "a branch of the batch": WrongStep(lambda state, x: torch.where(x.sum() > 0, state.w, -state.w), "w", "where"),
    "a gradient by hand": WrongStep(lambda state, x: state.w - x.T @ x, "w", "sub"),
    "a gradient in a list": WrongStep(
        lambda state, x: torch._foreach_add([state.w, state.b], [state.w, x.sum(0)])[1], "b", "_foreach_add"
    ),
    "a slice of a gradient by hand": WrongStep(lambda state, x: state.w.slice_of(x.T @ x), "w", "take"),
    "dropout of a parameter": WrongStep(
        lambda state, x: state.w.slice_of(F.dropout(state.w.full_tensor())), "w", "take"
    ),
    "noise on a parameter": WrongStep(
        lambda state, x: state.w + torch.randn_like(state.w), "w", "add", has_batch=False
    ),
    "a parameter on noise": WrongStep(lambda state, x: torch.randn(5) + state.b, "b", "add", has_batch=False),
    "a random mask": WrongStep(
        lambda state, x: state.w * torch.rand_like(state.w).bernoulli(), "w", "mul", has_batch=False
    ),
    "a random tensor": WrongStep(lambda state, x: state.w * torch.rand(5, 5), "w", "mul", has_batch=False),
    "memory that nothing was written to": WrongStep(
        lambda state, x: state.w * torch.empty(()),
        "w",
        "mul",
        shows=False,  # new memory may hold the same by chance
        has_batch=False,
    ),
    "clipping by a norm of its own": WrongStep(lambda state, x: state.b / norm_of_a_gradient(state.b, x), "b", "div_1"),
    "a count of the batch": WrongStep(lambda state, x: state.n + (x > 0).sum(), "n", "add"),
    "a sum of the batch": WrongStep(lambda state, x: state.n + x.sum(), "n", "add"),
    "the rank as state": WrongStep(lambda state, x: state.n + fzero.axis_index("fsdp"), "n", "add", has_batch=False),
    "what was added to zeros": WrongStep(lambda state, x: state.n + torch.zeros(5).add_(x.sum(0)).sum(), "n", "add"),
    "what was added through a view": WrongStep(lambda state, x: state.n + through_a_view(x), "n", "add"),
}
CAPTURED = torch.ones(5)
IMPURE: dict[str, tuple[Callable[..., Any], str]] = {
    "a batch": (lambda params, x: x.mul_(2), "1"),
    "a gathered leaf": (lambda params, x: params["layers"][0]["w"].full_tensor().mul_(2), "layers.0.w"),
    "a captured constant": (lambda params, x: CAPTURED.add_(x.sum(0)), "a tensor that the step captured"),
}
"""`step(params, x)` of `layers(1)`, and what it writes into."""

# steps that compute something, and not what is meant: each on the arguments that one rank of two gives to `shard`


class Unmeant(NamedTuple):
    """`step(*args)`, and the message of the error or the warning."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    message: str = ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


PLAIN = layers(1)
HELD = fzero.partition(PLAIN, MESH)
ROWS = torch.linspace(-1, 1, 10).view(2, 5)
ADAM = optim.adamw(0.1)
MOMENTS = tree.map(torch.zeros_like, PLAIN)
model = Net()
frozen = Net().requires_grad_(False)


def descend(params: Any, x: Tensor) -> Any:
    return tree.map(lambda p, g: p - 0.1 * g, params, torch.func.grad(loss)(params, x))


def descend_together(params: Any, x: Tensor) -> Any:
    grads = fzero.pmean(torch.func.grad(loss)(params, x), "fsdp")
    return tree.map(lambda p, g: p - 0.1 * g, params, grads)


def momentum(params: Any, moments: Any, x: Tensor) -> Any:
    grads = fzero.grad(loss)(params, x)
    moments = tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def forget_moments(params: Any, moments: Any, x: Tensor) -> Any:
    return momentum(params, moments, x)[0], x.sum()


def forget_state(params: Any, state: Any, x: Tensor) -> Any:
    params, _, value = training(ADAM)(params, state, x)
    return params, value


def call_module(params: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def count_steps(params: Any, state: Any, x: Tensor) -> Any:
    rate = 0.1 / (state["count"] + 1)
    return tree.map(lambda p, g: p - rate * g, params, fzero.grad(loss)(params, x)), {"count": state["count"] + 1}


def distil(params: Any, teacher: Any, x: Tensor) -> Any:
    grads = fzero.grad(lambda p: (mlp(p, x) - mlp(teacher, x)).square().mean())(params)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads)


def anchor(params: Any, start: Any, x: Tensor) -> Any:
    def anchored(p: Any) -> Tensor:
        return loss(p, x) + sum((a - b).square().sum() for a, b in zip(tree.leaves(p), tree.leaves(start)))

    return tree.map(lambda p, g: p - 0.1 * g, params, fzero.grad(anchored)(params))


def attack(x: Tensor, y: Tensor) -> Tensor:
    return x + 0.1 * fzero.grad(lambda x: (frozen(x) - y).square().mean())(x).sign()


def explain(x: Tensor, y: Tensor) -> Tensor:
    return x * fzero.grad(lambda x: (frozen(x) - y).square().mean())(x)


ALONE = r": is a plain tensor, which counts as .*batch \(.*\.py:\d+ in .*\): each of 2 ranks would train alone"
STATE = "a plain tensor in the place of state, meets this leaf in"
UNMEANT: dict[str, Unmeant] = {
    "parameters are not partitioned": Unmeant(
        training(ADAM), (PLAIN, ADAM.init(PLAIN), ROWS), rf"^argument 0\.layers\.0\.b{ALONE}"
    ),
    "parameters of an update by hand are not": Unmeant(descend, (PLAIN, ROWS), rf"^argument 0\.layers\.0\.b{ALONE}"),
    "a number is not": Unmeant(
        lambda p, x: p - 0.1 * fzero.grad(lambda p: (p * x).sum())(p), (torch.tensor(0.5), ROWS), rf"^argument 0{ALONE}"
    ),
    "one of two models is not": Unmeant(
        lambda mine, theirs, x: (descend(mine, x), descend(theirs, x)),
        (HELD, PLAIN, ROWS),
        rf"^argument 1\.layers\.0\.b{ALONE}",
    ),
    "the loss calls the module": Unmeant(
        lambda params, x: fzero.value_and_grad(call_module)(params, x),
        (HELD, ROWS),
        r"^model\.blocks\.0\.weight: call_module uses this parameter, and no leaf of its first argument "
        r"\(.*mistakes\.py:\d+ in call_module\): .*; call apply\(params, \.\.\.\)",
    ),
    "moments are plain": Unmeant(
        momentum, (HELD, MOMENTS, ROWS), rf"^layers\.0\.b: argument 1\.layers\.0\.b, {STATE} .*like=params"
    ),
    "the state of an optimizer is plain": Unmeant(
        training(ADAM), (HELD, ADAM.init(PLAIN), ROWS), rf"argument 1\.0\.mu\.\S+, {STATE} .*optimizer\.init\(params\)"
    ),
    "a step count is plain": Unmeant(
        count_steps,
        (HELD, {"count": torch.zeros(())}, ROWS),
        rf"^layers\.0\.b: argument 1\.count, {STATE} .*optimizer\.init\(params\); or make it .*fzero\.pmean\(x, ",
    ),
}

LOST = r"argument {} meets gradients \(.*\.py:\d+ in .*\), and is not returned while other state is"
CAPTURES = r"uses model\.blocks\.0\.weight, model\.blocks\.0\.bias, which requires grad and is no argument"
DOUBTFUL: dict[str, Unmeant] = {
    "the state of an optimizer is not returned": Unmeant(forget_state, (HELD, ADAM.init(HELD), ROWS), LOST.format(1)),
    "moments like parameters are not returned": Unmeant(
        forget_moments, (HELD, fzero.partition(MOMENTS, MESH, like=HELD), ROWS), LOST.format(1)
    ),
    "moments in front of parameters are not returned": Unmeant(
        lambda moments, params, x: forget_moments(params, moments, x),
        (fzero.partition(MOMENTS, MESH, like=HELD), HELD, ROWS),
        LOST.format(0),
    ),
    "a module is captured": Unmeant(lambda params, x: model(x) + mlp(params, x), (HELD, ROWS), CAPTURES),
    "torch.func differentiates a function that calls the module": Unmeant(
        lambda params, x: torch.func.grad(call_module)(params, x), (HELD, ROWS), CAPTURES
    ),
}
MEANT: dict[str, Unmeant] = {
    "training": Unmeant(training(ADAM), (HELD, ADAM.init(HELD), ROWS)),
    "an average of plain gradients": Unmeant(descend_together, (PLAIN, ROWS)),
    "a gradient of inputs": Unmeant(explain, (ROWS, ROWS)),
    "an attack on inputs": Unmeant(attack, (ROWS, ROWS)),
    "recurrent state of a rank": Unmeant(lambda h, x: torch.tanh(h + x @ torch.eye(5)), (torch.zeros(5), ROWS)),
    "a frozen module": Unmeant(lambda params, x: mlp(params, frozen(x)), (HELD, ROWS)),
    "a teacher": Unmeant(distil, (HELD, fzero.partition(layers(1, seed=1), MESH), ROWS)),
    "an anchor": Unmeant(anchor, (HELD, fzero.partition(layers(1, seed=1), MESH, like=HELD), ROWS)),
    "an attack on inputs of a sharded model": Unmeant(
        lambda params, x, y: x + 0.1 * fzero.grad(lambda x: (mlp(params, x) - y).square().mean())(x), (HELD, ROWS, ROWS)
    ),
    "evaluation": Unmeant(loss, (HELD, ROWS)),
    "gradients alone": Unmeant(fzero.grad(loss), (HELD, ROWS)),
}

# mistakes of a pass: each seeded into the program of a good step

CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1, weight_decay=0.1))
TWINS = {"layers": [{"u": torch.linspace(-1, 1, 25).view(5, 5), "v": torch.linspace(-2, 1, 25).view(5, 5)}]}


class Good(NamedTuple):
    """A step, and its program at a stage."""

    case: Case
    program: Program
    stage: int = 3


def twin_loss(params: tree.Tree, x: Tensor) -> Tensor:
    (layer,) = params["layers"]
    return (torch.tanh(x @ layer["u"]) @ layer["v"]).square().mean()


@cache
def good(mesh: VirtualMesh = MESH, stage: int = 3, twins: bool = False) -> Good:
    """Three layers trained with clipped AdamW, after the default passes. On two ranks the slices of a bias and a matrix
    have 5 and 11 elements, 0 and 14. With `twins`, one layer of two matrices."""
    case = trained(CLIPPED, TWINS, mesh, twin_loss) if twins else trained(CLIPPED, layers(), mesh)
    return Good(case, apply(case.trace(), *defaults(stage=stage, in_place=True)), stage)


@cache
def written() -> Good:
    """One layer and every collective, before any pass: a collective a leaf."""

    def every_collective(params: tree.Tree, x: Tensor) -> tuple[Tensor, ...]:
        w = params["layers"][0]["w"]
        rank = fzero.axis_index("fsdp")
        return w.slice_of(w @ w), fzero.grad(lambda w: (x @ w).sum())(w), fzero.psum(x, "fsdp"), rank

    case = on_rows(every_collective, layers(1))
    return Good(case, case.trace_as_written())


def find_node(program: Program, name: str) -> fx.Node:
    """The node of a name: `arg0_1` is the bias and `arg1_1` the matrix of layer 0, `arg2_1` the next bias."""
    return next(node for node in program.graph.nodes if node.name == name)


def leaf(program: Program, target: Any, bucket: str, position: int) -> fx.Node:
    """The first `ops.whole` or `ops.part` that takes this leaf out of a buffer of a bucket: 0 is a bias, 1 a matrix."""
    return next(node for node in calls(program, target) if (node.args[1], node.args[3]) == (bucket, position))


def at(program: Program, target: Any, position: int = 0) -> fx.Node:
    """A call of `target`, counted in order."""
    return calls(program, target)[position]


def emit_behind(program: Program, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new call behind a node."""
    with program.graph.inserting_after(node):
        return program.emit(target, *args)


def give(node: fx.Node, position: int, value: Any) -> None:
    """Change one argument of a node."""
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def swap(a: fx.Node, b: fx.Node, position: int) -> None:
    """Two nodes swap an argument."""
    ours, theirs = a.args[position], b.args[position]
    give(a, position, theirs)
    give(b, position, ours)


def replace_uses(old: fx.Node, new: fx.Node) -> None:
    """All users of `old` except `new` use `new`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def replace_result(program: Program, position: int, node: fx.Node) -> None:
    """Change one result."""
    give(program.output, 0, [*program.output.args[0][:position], node, *program.output.args[0][position + 1 :]])


def drop_scatter(program: Program) -> None:
    part, own = leaf(program, ops.part, "layers.2", 1), at(program, ops.reduce_scatter).args[0][1]
    replace_uses(part, emit_behind(program, part, ops.take, own, "layers.2", 1, 11))


def take_scattered_of_another(program: Program) -> None:
    for position in (0, 1):
        give(leaf(program, ops.part, "layers.1", position), 0, leaf(program, ops.part, "layers.2", position).args[0])


def reduce_padding(program: Program) -> None:
    wait, mean = at(program, ops.wait), at(program, aten.mean.default)
    replace_uses(
        mean, emit_behind(program, mean, aten.add.Tensor, mean, emit_behind(program, wait, aten.mean.default, wait))
    )


def divide_by_local_size(program: Program) -> None:
    at(program, aten.sum.default).target = aten.mean.default


def drop_all_reduce(program: Program) -> None:
    for item in list(at(program, ops.all_reduce_list).users):
        replace_uses(item, item.args[0].args[0][item.args[1]])


def reduce_two_dtypes(program: Program) -> None:
    together = at(program, ops.all_reduce_list)
    first, *others = together.args[0]
    with program.graph.inserting_before(together):
        narrow = program.emit(aten._to_copy.default, first, dtype=torch.bfloat16)
    give(together, 0, [narrow, *others])


def reduce_slices(program: Program) -> None:
    together = at(program, ops.all_reduce_list)
    give(together, 0, [total.args[0] for total in together.args[0]])


def reduce_ragged(program: Program) -> None:
    bias = find_node(program, "arg0_1")
    flipped = emit_behind(program, at(program, aten.mean.default), aten.flip.default, bias, [0])
    total = emit_behind(program, flipped, ops.all_reduce, flipped, "sum", "fsdp")
    give(at(program, ops.adamw_), 5, emit_behind(program, total, aten.sum.default, total))


def count_of_rank(program: Program) -> None:
    add = at(program, aten.add_.Tensor)
    give(add, 1, emit_behind(program, find_node(program, "arg19_1"), ops.axis_index, "fsdp", torch.device("cpu")))


def rotate_gradients(program: Program) -> None:
    update = at(program, ops.adamw_)
    give(update, 1, [*update.args[1][2:], *update.args[1][:2]])


def swap_results(program: Program) -> None:
    first, second, third, *rest = program.output.args[0]
    give(program.output, 0, [third, second, first, *rest])


def add_local_size(program: Program) -> None:
    part = leaf(program, ops.part, "layers.0", 0)  # 5 elements of rank 0, none of rank 1
    ones = emit_behind(program, part, aten.ones.default, [5])
    replace_uses(part, emit_behind(program, ones, aten.add.Tensor, part, ones))


def forget_wait(program: Program) -> None:
    first, second = at(program, ops.wait, 0), at(program, ops.wait, 1)
    replace_uses(second, first)
    program.graph.erase_node(second)


def wait_twice(program: Program) -> None:
    wait = at(program, ops.wait)
    give(next(iter(wait.users)), 0, emit_behind(program, wait, ops.wait, wait.args[0]))


def wait_early(program: Program) -> None:
    at(program, ops.all_gather, 1).append(at(program, ops.wait))
    at(program, ops.wait).append(at(program, ops.all_gather))


def wait_for_nothing(program: Program) -> None:
    give(at(program, ops.wait), 0, find_node(program, "arg0_1"))
    program.graph.erase_node(at(program, ops.all_gather))


def write_in_flight_twice(program: Program) -> None:
    """The second of two collectives that send the same memory is done, the first is not."""
    first, wait, use = at(program, ops.all_gather, 0), at(program, ops.wait), next(iter(at(program, ops.wait).users))
    again = emit_behind(program, first, ops.all_gather, *first.args)
    emit_behind(program, again, ops.wait, again)
    emit_behind(program, again.next, aten.mul_.Tensor, find_node(program, "arg1_1"), 0.9)
    use.prepend(wait)


def write_gathered(program: Program) -> None:
    whole = leaf(program, ops.whole, "layers.0", 1)
    emit_behind(program, whole, aten.mul_.Tensor, whole, 0.9)


def write_rank_into_view(program: Program) -> None:
    bias = find_node(program, "arg6_1").prev
    view = emit_behind(program, at(program, aten.mean.default), aten.slice.Tensor, bias, 0, 0, 1)
    emit_behind(program, view, aten.add_.Tensor, view, at(program, aten.mean.default))


def disorder_leaves(program: Program) -> None:
    gather = at(program, ops.all_gather)
    give(gather, 0, gather.args[0][::-1])
    give(gather, 2, [1, 0])


def mix_dtypes(program: Program) -> None:
    scatter = at(program, ops.reduce_scatter)
    bias, matrix = scatter.args[0]
    give(scatter, 0, [emit_behind(program, bias, aten._to_copy.default, bias), matrix])
    narrow = scatter.args[0][0]
    narrow.kwargs, narrow.meta["val"] = {"dtype": torch.bfloat16}, narrow.meta["val"].to(torch.bfloat16)


def scatter_slice(program: Program) -> None:
    scatter = at(program, ops.reduce_scatter)
    give(scatter, 0, [find_node(program, "arg4_1"), scatter.args[0][1]])


def scatter_shape(program: Program) -> None:
    scatter = at(program, ops.reduce_scatter)
    give(scatter, 0, [scatter.args[0][1], scatter.args[0][0]])


def read_unset(program: Program) -> None:
    unset = emit_behind(program, at(program, aten.mean.default), aten.empty.memory_format, [])
    give(at(program, ops.adamw_), 5, unset)


def reduce_with_torch(program: Program) -> None:
    mean = at(program, aten.mean.default)
    with program.graph.inserting_after(mean):
        foreign = program.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (mean, "avg", "0"))
    foreign.meta["val"] = mean.meta["val"]
    give(at(program, ops.adamw_), 5, foreign)


def swap_moments(program: Program) -> None:
    update = at(program, ops.adamw_)
    update.args = (*update.args[:2], update.args[3], update.args[2], *update.args[4:])


def swap_gradients(program: Program) -> None:
    scatter = at(program, ops.reduce_scatter)
    give(scatter, 0, scatter.args[0][::-1])


def double_rate(program: Program) -> None:
    rate = at(program, ops.adamw_).args[5]
    give(at(program, ops.adamw_), 5, rate * 2)


def drop_mean(program: Program) -> Program:
    """Gradients of a rank's own rows are taken for the mean over ranks. Of a program before any pass."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        with program.graph.inserting_before(node):
            program.substitute(node, program.emit(ops.take, *node.args))
    return program


def drop_average(program: Program) -> Program:
    """Each rank keeps its own loss. Of a program before any pass."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_reduce):
        program.substitute(node, node.args[0])
    return program


class Mistake(NamedTuple):
    """A mistake in the program of `base`, and the message that refuses it."""

    seed: Callable[[Program], Any]  # changes the program, or returns another
    message: str
    base: Callable[[], Good] = good
    shows: bool = True  # in what virtual ranks compute

    def seeded(self) -> Program:
        """The good program with the mistake in it."""
        program = self.base().program.copy()
        changed = self.seed(program)
        return changed if isinstance(changed, Program) else program


MEAN = (
    r"ranks would drift apart( \(.*programs\.py:\d+ in step: .*\))?; "
    r"make it the same on every rank first, with fzero\.pmean\(x, 'fsdp'\)"
)
IN_A_PASS: dict[str, Mistake] = {
    "a scatter is dropped": Mistake(drop_scatter, rf"^layers\.2\.w: {PER_RANK} pow: {MEAN}"),
    "a scattered gradient is labelled as another": Mistake(
        lambda program: swap(at(program, ops.part, 0), at(program, ops.part, 1), 3),
        r"^layers\.0\.u: adamw mixes slices of layers\.0\.u and layers\.0\.v; gather one of them",
        base=partial(good, twins=True),
    ),
    "gradients are taken out of another block": Mistake(
        take_scattered_of_another,
        r"^layers\.1\.[bw]: part\w* takes a scattered buffer of leaves \[0, 1\] of 'layers\.2' for a .* of 'layers\.1'",
    ),
    "two all-gathers are swapped": Mistake(
        lambda program: swap(at(program, ops.all_gather, 0), at(program, ops.all_gather, 1), 0),
        r"^layers\.0: all_gather takes a slice of layers\.1\.b for a slice of layers\.0\.b",
    ),
    "leaves are taken out of another buffer": Mistake(
        lambda program: give(
            leaf(program, ops.whole, "layers.1", 1), 0, leaf(program, ops.whole, "layers.0", 1).args[0]
        ),
        r"^layers\.1\.w: whole\w* takes a gathered buffer .* of 'layers\.0' for a gathered buffer .*layers\.1",
    ),
    "a reduction reads padding": Mistake(
        reduce_padding, r": mean_default reads the padding of a gathered buffer of leaves \[0, 1\] of 'layers\.0'"
    ),
    "a buffer is returned": Mistake(
        lambda program: replace_result(program, -1 % len(program.output.args[0]), at(program, ops.wait)),
        r"^2: result '2' is a gathered buffer of leaves \[0, 1\] of 'layers\.0' in wait",
    ),
    "a mean divides by the size of a slice": Mistake(
        divide_by_local_size, r"^layers\.\d\.[bw]: sum\w* mean divides by the size of a slice .*; sum, and divide"
    ),
    "the all-reduce of a norm is dropped": Mistake(
        drop_all_reduce, rf"^layers\.0\.b: {PER_RANK} _foreach_mul_: {MEAN}"
    ),
    "a norm is reduced over another axis": Mistake(
        lambda program: give(at(program, ops.all_reduce_list), 2, "replica"),
        rf"^layers\.0\.b: {PER_RANK} _foreach_mul_: {MEAN}",
        base=partial(good, HYBRID),
    ),
    "an all-reduce names no axis of the mesh": Mistake(
        lambda program: give(at(program, ops.all_reduce_list), 2, "model"),
        r": all_reduce_list names the axis 'model'; the mesh has \('fsdp',\)",
    ),
    "an all-reduce names no reduction": Mistake(
        lambda program: give(at(program, ops.all_reduce_list), 1, "product"),
        r": all_reduce_list reduces by 'product'; there are",
    ),
    "values of two dtypes are all-reduced": Mistake(
        reduce_two_dtypes, r": all_reduce_list moves bfloat16 and float32 in one buffer; move each dtype on its own"
    ),
    "slices are all-reduced": Mistake(
        reduce_slices, r": all_reduce_list takes a slice of layers\.0\.b for a whole value; gather it first"
    ),
    "values of different sizes are all-reduced": Mistake(
        reduce_ragged,
        r": all_reduce_default_1 takes a value that differs along \['fsdp'\], in shape too for a whole value",
    ),
    "the learning rate is each rank's": Mistake(
        lambda program: give(at(program, ops.adamw_), 5, at(program, aten.mean.default)),
        rf"^layers\.0\.b: {PER_RANK} adamw_: {MEAN}",
    ),
    "the step count is each rank's": Mistake(
        count_of_rank, rf"{PER_RANK} adamw_: {MEAN}|result '1\.1\.0\.count' is state but depends"
    ),
    "rows of the update are misaligned": Mistake(
        rotate_gradients, r"^layers\.0\.b: adamw mixes slices of layers\.0\.b and layers\.1\.b; gather one of them"
    ),
    "two results are swapped": Mistake(
        swap_results,
        r"^layers\.0\.b: result '0\.layers\.0\.b' is a slice of layers\.1\.b, not a slice of layers\.0\.b, in arg2_1",
    ),
    "a result is forgotten": Mistake(
        lambda program: give(program.output, 0, program.output.args[0][:-1]), "^step: returns 20 tensors for 21 results"
    ),
    "a gathered leaf is returned as state": Mistake(
        lambda program: replace_result(program, 0, leaf(program, ops.whole, "layers.0", 0)),
        r"^layers\.0\.b: result '0\.layers\.0\.b' is a whole value, not a slice of layers\.0\.b, in whole",
    ),
    "a tensor of one rank's size meets a slice": Mistake(
        add_local_size, r"^layers\.0\.b: add_\w+ has a whole \[5\] meet a slice; take this rank's slice of it"
    ),
    "a collective is not waited for": Mistake(
        forget_wait, r": all_gather_1 of 'layers\.1' is waited for 0 times; wait for a collective once"
    ),
    "a collective is waited for twice": Mistake(
        wait_twice, r": all_gather of 'layers\.0' is waited for 2 times; wait for a collective once", shows=False
    ),
    "what is on its way is used": Mistake(
        lambda program: give(at(program, ops.whole), 0, at(program, ops.all_gather)),
        r"^layers\.0\.[bw]: whole\w* takes a gathered buffer of .* on its way for a gathered buffer of",
        shows=False,
    ),
    "a wait stands before its start": Mistake(
        wait_early, r": wait stands before its input all_gather; order the nodes"
    ),
    "a wait has no start": Mistake(wait_for_nothing, r"^layers\.0\.b: wait waits for something that was not started"),
    "a parameter is written to while it is sent": Mistake(
        lambda program: emit_behind(
            program, at(program, ops.all_gather, 1), aten.mul_.Tensor, find_node(program, "arg2_1"), 0.9
        ),
        r"^layers\.1\.b: mul__tensor writes to what all_gather_1 is sending; wait for it first",
    ),
    "a parameter is written to while it is sent twice": Mistake(
        write_in_flight_twice, r"^layers\.0\.w: mul__tensor writes to what all_gather is sending; wait for it first"
    ),
    "an argument is written to that is not donated": Mistake(
        lambda program: replace(
            program, arguments=tuple(replace(argument, donated=False) for argument in program.arguments)
        ),
        r"^1\.1\.0\.count: add_ writes into it, but a step is a pure function",
    ),
    "a gathered leaf is written to": Mistake(
        write_gathered,
        r"^layers\.0\.w: mul_ writes into it, but a step is a pure function; write the operation without",
    ),
    "a part of a slice is overwritten": Mistake(write_rank_into_view, rf"^layers\.2\.w: {PER_RANK} add_: {MEAN}"),
    "a buffer has another size": Mistake(
        lambda program: give(at(program, ops.all_gather), 3, 48),
        r": all_gather of 'layers\.0' has 48 elements, its layout 32",
        shows=False,
    ),
    "leaves are in another order": Mistake(disorder_leaves, r": all_gather names leaves \[1, 0\] of 2 in 'layers\.0'"),
    "a slice is missing": Mistake(
        lambda program: give(at(program, ops.all_gather), 0, at(program, ops.all_gather).args[0][:1]),
        r": all_gather moves 1 values as 2 leaves of 'layers\.0'",
    ),
    "a bucket is unknown": Mistake(
        lambda program: give(at(program, ops.all_gather), 1, "layers.7"),
        r": all_gather names the bucket 'layers\.7'; there are \['layers\.0'",
    ),
    "a leaf beyond the buffer is taken": Mistake(
        lambda program: give(at(program, ops.whole), 3, 2), r": whole\w* takes leaf 2 of 2 in a buffer"
    ),
    "a gathered leaf has another shape": Mistake(
        lambda program: give(leaf(program, ops.whole, "layers.1", 1), 4, [25]),
        r"^layers\.1\.w: whole\w* has shape \[25\] where layers\.1\.w has \[5, 5\]",
    ),
    "one buffer has two dtypes": Mistake(mix_dtypes, r": reduce_scatter moves bfloat16 and float32 in one buffer"),
    "a slice is scattered": Mistake(
        scatter_slice, r": reduce_scatter takes a slice of layers\.2\.b for a whole value; gather it first"
    ),
    "gradients are scattered as each other": Mistake(
        scatter_shape, r": reduce_scatter has shape \[5, 5\] where layers\.2\.b has \[5\]"
    ),
    "a bucket is kept while others are used": Mistake(
        lambda program: None,
        r": all_gather_1 of 'layers\.1' is kept from \w+ to mm_6; at stage 3 release",
        base=partial(good, stage=2),
        shows=False,
    ),
    "memory that nothing was written to is read": Mistake(read_unset, rf"^layers\.0\.b: {PER_RANK} adamw_: {MEAN}"),
    "torch's own collective is trusted": Mistake(reduce_with_torch, rf"^layers\.0\.b: {PER_RANK} adamw_: {MEAN}"),
    "a gather names no bucket": Mistake(
        lambda program: give(at(program, ops.gather), 1, "layers.7"),
        r": gather names the bucket 'layers\.7'",
        base=written,
    ),
    "a gather names no leaf": Mistake(
        lambda program: give(at(program, ops.gather), 2, 2),
        r": gather names leaves \[2\] of 2 in 'layers\.0'",
        base=written,
    ),
    "a scatter names no leaf": Mistake(
        lambda program: give(at(program, ops.scatter), 2, -1),
        r": scatter names leaves \[-1\] of 2 in 'layers\.0'",
        base=written,
        shows=False,  # -1 is the last one
    ),
    "a slice is of no leaf": Mistake(
        lambda program: give(at(program, ops.take), 2, 2),
        r": take names leaves \[2\] of 2 in 'layers\.0'",
        base=written,
    ),
    "a sum names no axis": Mistake(
        lambda program: give(at(program, ops.all_reduce), 2, "model"),
        r": all_reduce names the axis 'model'",
        base=written,
    ),
    "a rank is along no axis": Mistake(
        lambda program: give(at(program, ops.axis_index), 0, "model"),
        r": axis_index names the axis 'model'",
        base=written,
    ),
}

UNSEEN: dict[str, Mistake] = {
    "moments are gathered for parameters": Mistake(
        lambda program: give(at(program, ops.all_gather), 0, at(program, ops.adamw_).args[2][:2]), ""
    ),
    "moments change places": Mistake(swap_moments, ""),
    "gradients of one shape change places": Mistake(swap_gradients, "", base=partial(good, twins=True)),
    "a mean is taken for a sum": Mistake(lambda program: give(at(program, ops.all_reduce_list), 1, "avg"), ""),
    "the learning rate is another": Mistake(double_rate, ""),
}

# passes from outside of the package


def returns_nothing(program: Program) -> None:
    program.copy()


def returns_a_graph(program: Program) -> Any:
    return program.graph


def stands_before_its_input(program: Program) -> Program:
    program = program.copy()
    node = next(node for node in program.graph.nodes if node.op == "call_function" and node.all_input_nodes)
    source = next(iter(reversed([n for n in program.graph.nodes if n.op == "call_function"]))).all_input_nodes[0]
    source.append(node)
    first = program.placeholders[-1]
    first.append(source)
    return program


def adds_a_placeholder(program: Program) -> Program:
    program = program.copy()
    with program.graph.inserting_after(program.placeholders[-1]):
        node = program.graph.placeholder("extra")
    node.meta["val"] = program.placeholders[0].meta["val"]
    return program


def drops_a_result(program: Program) -> Program:
    program = program.copy()
    program.output.args = (program.output.args[0][1:],)
    return program


def reduces_by_median(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.all_reduce):
        node.args = (node.args[0], "median", node.args[2])
    return program


WRONG_PASSES: list[tuple[Callable[[Program], Any], str]] = [
    (
        returns_nothing,
        r"pass 'returns_nothing': returns None, not a Program; change program.copy\(\) and return that",
    ),
    (returns_a_graph, "pass 'returns_a_graph': returns a Graph, not a Program"),
    (stands_before_its_input, "pass 'stands_before_its_input': .* stands before its input"),
    (adds_a_placeholder, "pass 'adds_a_placeholder': leaves 4 placeholders for 3 arguments; add state with"),
    (drops_a_result, "pass 'drops_a_result': .*: returns 2 tensors for 3 results"),
    (reduces_by_median, "pass 'reduces_by_median': .* reduces by 'median'"),
]
"""A pass, and the message that refuses it wherever it stands among the passes."""
