"""Operations: run an operation with a schema on ranks, and say which law its record breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.bits import format_values, has_equal_bits
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.base.torch_private import OpOverload
from fzero.program.operation import Operation
from fzero.program.records import record
from fzero.ranks.live import live as take_part
from fzero.simulation import simulate
from fzero.transform import shard
from fzero.values.collectives import psum
from fzero.values.gradients import grad

MESHES = (VirtualMesh(fsdp=1), VirtualMesh(fsdp=2), VirtualMesh(fsdp=3), VirtualMesh(replica=2, fsdp=2))


def check_operation(
    operation: Any,
    *others: Any,
    shape: Sequence[int] = (3,),
    dtype: torch.dtype = torch.float64,
    meshes: Sequence[VirtualMesh] = MESHES,
    live: Any = None,
) -> list[str]:
    """Call `operation(x, *others)` in steps on virtual ranks, and refuse an operation that breaks a law. `operation` is
    what `fzero.ops.define` returned with a `schema`. Returns the names of the laws that hold for it.

    x is a random tensor of `shape` on each rank. Every call is held to the operation's record (docs/passes.md).

    * "record": on each of `meshes` the operation does what its record says.
    * "linear": of an operation with a `transpose`, the result of a sum is the sum of results.
    * "transpose": `<op(x), y>` and `<x, transpose(y)>`, both summed over ranks, are equal, and `fzero.grad` gives the
      latter.
    * "jvp": the derivative of `torch.func.jvp` along t is `op(t)`.
    * "vmap": `torch.func.vmap` gives what calls one by one give. Left out where the operation refuses to be mapped.
    * "live": with `live`, a `DeviceMesh`, this rank's result on that mesh equals its virtual one, bit for bit. All
      ranks of the mesh make the call.

    Raises:
        FzeroError: with the law that is broken, the mesh and both values; for an operation without a schema, and for
            one that `fzero.ops.define` did not make; with a `transpose`, for a dtype that has no derivative.
    """
    known = record(operation)
    where = f"operation {known.name!r}"
    if not known.is_foreign:
        problem = "is none of fzero.ops.define, and is held to no record"
        raise FzeroError(where, problem, "give what fzero.ops.define returned")
    if known.transpose is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise FzeroError(where, f"has a transpose, and {dtype} has no derivative", "give dtype=torch.float64")
    if not isinstance(operation, OpOverload):
        problem = "has no schema, so no step calls it"
        raise FzeroError(where, problem, "give define(..., schema=...), or check the pass that emits it by check_pass")
    laws = dict[str, None]()
    for mesh in meshes:
        laws |= dict.fromkeys(_check_on(mesh, operation, others, known, (tuple(shape), dtype)))
    if live is not None:
        _check_live(live, operation, others, known, (tuple(shape), dtype))
        laws["live"] = None
    return list(laws)


def _check_on(
    mesh: VirtualMesh,
    operation: Any,
    others: tuple[Any, ...],
    known: Operation,
    like: tuple[tuple[int, ...], torch.dtype],
) -> list[str]:
    """The laws that hold on a mesh."""

    def call(x: Tensor) -> Tensor:
        return operation(x, *others)

    def run(function: Callable[..., Any], *given: _Rows) -> Any:
        return simulate(_take_own(function, given), mesh)(*(rows.values for rows in given))

    x, t = (_draw(mesh, seed, *like) for seed in (0, 1))
    size = simulate(_take_own(call, (x,)), mesh).trace(x.values).returned[0].meta["val"].shape
    run(call, x)
    if known.transpose is None:
        return ["record"]
    y, transpose = _draw(mesh, 2, tuple(size), like[1]), known.transpose

    def differ_from_linear(x: Tensor, t: Tensor) -> Any:
        return call(2 * x - 3 * t), 2 * call(x) - 3 * call(t)

    def multiply(x: Tensor, y: Tensor) -> Any:
        back = transpose(y, *others)
        return _add_ranks(mesh, call(x) * y), _add_ranks(mesh, x * back)

    def differentiate(x: Tensor, y: Tensor) -> Any:
        return grad(lambda x: (call(x) * y).sum())(x), transpose(y, *others)

    def push(x: Tensor, t: Tensor) -> Any:
        return torch.func.jvp(call, (x,), (t,))[1], call(t)

    def map_pair(x: Tensor, t: Tensor) -> Any:
        return torch.func.vmap(call)(torch.stack([x, t])), torch.stack([call(x), call(t)])

    laws = ["record"]
    steps = {"linear": (differ_from_linear, t), "transpose": (multiply, y), "gradient": (differentiate, y)}
    for law, (step, other) in {**steps, "jvp": (push, t), "vmap": (map_pair, t)}.items():
        try:
            pair = run(step, x, other)
        except (FzeroError, NotImplementedError, RuntimeError):
            if law != "vmap":
                raise
            continue
        _compare(known.name, law, mesh, *pair)
        laws += [] if law == "gradient" else [law]
    return laws


def _check_live(
    mesh: Any, operation: Any, others: tuple[Any, ...], known: Operation, like: tuple[tuple[int, ...], torch.dtype]
) -> None:
    virtual, here = mesh_shape(mesh), take_part(mesh)

    drawn = _draw(virtual, 0, *like)
    call, x = _take_own(lambda x: operation(x, *others), (drawn,)), drawn.values
    rows = x.shape[0] // virtual.size()
    got = shard(call, mesh)(x[here.number * rows : (here.number + 1) * rows].to(mesh.device_type))
    step = simulate(call, virtual)
    joined, (result,) = step(x), step.trace(x).tensor_results
    wanted = joined
    if result.varies:
        differing = virtual.join(axis for axis in virtual.names if axis in result.varies)
        wanted = joined.reshape(virtual.size(differing), *got.shape)[virtual.position(here.number, differing)]
    if not has_equal_bits(got.cpu(), wanted):
        problem = f"gives {format_values(got)} on rank {here.number} of {mesh}, and {format_values(wanted)} virtually"
        raise FzeroError(f"operation {known.name!r}", problem, "let perform depend on the rank that it is given alone")


class _Rows(NamedTuple):
    """A tensor of `shape` for each rank, one behind the other: rows of `values`, which a step cuts."""

    values: Tensor
    shape: tuple[int, ...]


def _draw(mesh: VirtualMesh, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> _Rows:
    size = (mesh.size() * shape[0], *shape[1:]) if shape else (mesh.size(),)
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _Rows(values.to(dtype), shape)


def _take_own(function: Callable[..., Any], given: Sequence[_Rows]) -> Callable[..., Any]:
    """`function`, which takes this rank's tensors, as a step that takes its rows of them: [1] for a 0-d tensor."""
    return lambda *args: function(*(x if rows.shape else x[0] for x, rows in zip(args, given)))


def _add_ranks(mesh: VirtualMesh, x: Tensor) -> Tensor:
    total = x.sum()
    for axis in mesh.names:
        total = psum(total, axis)
    return total


def _compare(name: str, law: str, mesh: VirtualMesh, got: Tensor, wanted: Tensor) -> None:
    if not (got.is_floating_point() or got.is_complex()):
        problem = f"has a transpose, and its result is {got.dtype}, which has no derivative"
        raise FzeroError(f"operation {name!r}", problem, "leave out transpose=")
    eps = torch.finfo(got.dtype).eps ** 0.75  # sums of a few numbers of order 1, in another order
    if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=eps, atol=eps):
        return
    problem = f"breaks the law {law!r} on {mesh}: {format_values(got)} is not {format_values(wanted)}"
    ways = {
        "linear": "leave out transpose=, or let the result be linear in the first argument",
        "transpose": "<op(x), y> and <x, transpose(y)>, both summed over ranks, have to be equal (docs/operations.md)",
    }
    raise FzeroError(f"operation {name!r}", problem, ways.get(law, "let the transpose give the cotangent of x"))
