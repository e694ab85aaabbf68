"""Which torch functions are elementwise, which reduce all elements, and which write in place: tables by function name.

One name covers `torch.add`, `Tensor.add` and `Tensor.__add__`. The reflected `Tensor.__radd__` is `radd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.dtypes import accumulator
from fzero.base.errors import FzeroError
from fzero.optim import operations
from fzero.program.blockwise import is_part
from fzero.ranks.performer import MovePerformer
from fzero.values.moves import Cut, find_peak, sum_all

_UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    clone conj conj_physical cos cosh data deg2rad detach digamma erf erfc erfinv exp exp2 expm1 expit floor frac i0
    isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 log_ndtr logical_not nan_to_num
    ndtr neg negative positive rad2deg real reciprocal relu relu6 round rsqrt sigmoid sign signbit silu sin sinc
    sinh softplus softsign selu celu elu gelu mish hardsigmoid hardswish hardtanh leaky_relu logsigmoid tanhshrink
    softshrink hardshrink threshold sqrt square tan tanh trunc fix zeros_like ones_like full_like empty_like
    to type contiguous float double half bfloat16 int long short bool byte char cpu cuda
"""
_BINARY = """
    add radd sub rsub subtract mul rmul multiply div divide true_divide truediv rtruediv floor_divide floordiv
    rfloordiv fmod remainder mod rmod pow rpow float_power atan2 arctan2 maximum minimum fmax fmin hypot
    ldexp logaddexp logaddexp2 xlogy xlog1py heaviside eq ne lt le gt ge not_equal less less_equal
    greater greater_equal isclose logical_and logical_or logical_xor and rand or ror xor rxor invert bitwise_and
    bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift lshift rlshift rshift rrshift
"""
_MORE = "where clamp clamp_min clamp_max clip lerp addcmul addcdiv masked_fill type_as"
ELEMENTWISE = frozenset((_UNARY + _BINARY + _MORE).split())
"""Names of functions of which each output element depends only on the input elements at its own position.

copysign, nextafter, logit and sgn are missing: their derivatives create tensors of the slice's size, which differs
between ranks, but one program serves all ranks.
"""

GATHERED_COMPLEX = frozenset("real isfinite isreal pow rpow float_power softsign".split())
"""Names of elementwise functions that torch composes, for complex numbers, of functions that are not."""

GATHERED_0D = frozenset({"masked_fill"})
"""Names of elementwise functions that take some operand as a number. The slice of a 0-d leaf is 1-d."""

FILLS = frozenset({"copy", "fill", "zero"})
"""Names, without their underscore, of elementwise functions that only exist in place."""

LIST_OPS = operations.STAGES
"""Functions by name, besides `_foreach_*`, on lists of leaves that are elementwise at each position."""

SLICE_OPS = operations.SUMS | operations.MAPS
"""Functions by name on lists of leaves, of which a rank may take its slices although they are not elementwise."""

NEW_SCALES = frozenset({"zero_scales"})
"""Names of functions that make one number for each block of a leaf."""

BLOCKWISE_LIST_OPS = frozenset({"scale_by_adam8bit"})
"""Names of functions on lists whose results lie as the operands do, list by list: codes, and scales of their blocks."""

OWNED_LIST_OPS = frozenset({"orthogonalize"})
"""Names of functions on lists that need whole matrices of the leaves: each runs on one rank, the matrix's owner."""

GATHERED_LIST_OPS = frozenset({"_foreach_mm", "_foreach_powsum"})
"""Names of `_foreach_*` functions whose operands are gathered: neither elementwise nor in `LIST_REDUCTIONS`."""

LIST_REDUCTIONS = {"_foreach_norm": torch.linalg.vector_norm, "_foreach_max": torch.max}
"""Name of a function on a list that reduces each leaf -> the function of one leaf."""

MOVES_STATISTICS = frozenset(
    "batch_norm instance_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update".split()
)
"""Names of functions that write into operands, though neither the name nor `out=` says so."""

METADATA = frozenset(
    """
    layout names itemsize nbytes is_leaf grad_fn retains_grad output_nr _version _base _backward_hooks is_sparse
    is_sparse_csr is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_vulkan
    is_xla is_xpu shape ndim dtype device dim ndimension size numel nelement stride storage_offset element_size
    get_device is_contiguous is_complex is_floating_point is_signed is_conj is_neg is_inference is_shared has_names
       """.split()
)
"""Names of functions that tell what a tensor is and read none of its elements: the value itself answers."""
COUNTS = frozenset({"numel", "nelement"})
"""Those that count the elements that a full reduction is of: of a split leaf, those of all ranks."""

BYTES = METADATA | frozenset(
    """
    clone copy detach contiguous to type cpu cuda byte empty_like zeros_like ones_like full_like where masked_fill
    _foreach_masked_fill eq ne equal not_equal
    """.split()
)
"""Names of functions that codes of a quantized leaf and their scales have: those that do not compute with elements."""

WHOLE = "take the leaf whole: fzero.tree.flatten(tree, is_leaf=lambda x: isinstance(x, torch.Tensor))"
"""What to write instead of any other function."""

_WAY_OUT = "differentiate with fzero.value_and_grad(loss)(params), and change gradients between that and the update"
REFUSED = dict.fromkeys(("grad", "backward", "retain_grad", "register_hook", "requires_grad_"), _WAY_OUT)
REFUSED["register_post_accumulate_grad_hook"] = _WAY_OUT
MEMORY = frozenset({"untyped_storage", "storage", "share_memory_", "dlpack"})
"""Names of functions that hand out memory."""

REFUSED |= dict.fromkeys((*MEMORY, "data_ptr"), "give leaf.full_tensor()")
"""Name of a function of autograd, or of memory, -> what to write instead."""

MEMORY_FORMATS = (None, torch.preserve_format, torch.contiguous_format)
"""The memory formats of a flat slice. With any other format an elementwise function gathers."""

_CONVERSIONS = frozenset({"__bool__", "__float__", "__int__", "__index__"})
"""Special methods that return a Python number. Without underscores `__bool__` would be taken for `Tensor.bool`."""

_ALIASES = {"_threshold": "threshold", "log_sigmoid": "logsigmoid", "rdiv": "rtruediv"}
"""A function's `__name__` -> its name in these tables, where they differ."""


_ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
_WRITERS = frozenset(
    """
    __set__ __delete__ __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__ __imatmul__
    """.split()
)
"""Names of special methods that write into their first operand."""


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function in these tables: `add` for `Tensor.__add__`, `T` for the getter of `Tensor.T`."""
    name = getattr(func, "__name__", str(func)).partition(".")[0].removeprefix("special_")
    if is_accessor(func):
        name = func.__self__.__name__  # type: ignore[attr-defined]  # of the attribute
    if name.startswith("__") and name not in _CONVERSIONS:
        name = name.strip("_")
    return _ALIASES.get(name, name)


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into an operand."""
    name = getattr(func, "__name__", "")
    in_place = name in _WRITERS or (name.endswith("_") and not name.startswith("__"))
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def find_target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operand, or the list of operands, that a call writes into, its target; None where it writes into none."""
    if not is_in_place(func, kwargs):
        return None
    first = args[0] if args else next(iter(kwargs.values()), None)  # functions of nn.init may have names only
    return first if kwargs.get("out") is None else kwargs["out"]


def check_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a function that would take the codes or scales of a quantized leaf for numbers."""
    given = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    sharded: Iterator[Any] = (x for x in given if isinstance(x, Tensor) and hasattr(x, "form"))
    path = next((x.path for x in sharded if is_part(x.path, x.dtype, x.shape)), None)
    is_cast = name in ("to", "type") and any(isinstance(x, torch.dtype) and x != torch.uint8 for x in given)
    if path is not None and (is_cast or name.removesuffix("_") not in BYTES):
        raise FzeroError(path, f"is a part of a quantized leaf: {name} would take its bytes for numbers", WHOLE)


def split_of(x: Any) -> Any:
    """How the leaf is split whose layout a `Sharded` has; None where one rank has all of it."""
    layout = x.form.layout
    return layout.leaves[x.index].split if layout.splits > 1 else None


def check_splits(x: Any, anchor: Any) -> None:
    """Refuse an elementwise function of two values `Sharded` whose parts are of different elements of the wholes."""
    split, of_anchor = split_of(x), split_of(anchor)
    if x.ndim and split is not None and of_anchor is not None and split != of_anchor:
        problem = f"is split as {tuple(split)}, and an elementwise function pairs it with {anchor.path}, split as"
        way_out = "split both alike"
        raise FzeroError(x.path, f"{problem} {tuple(of_anchor)}: their parts are of other elements", way_out)


def check_wholes(values: Sequence[Any], operands: Sequence[Tensor]) -> None:
    """Refuse an elementwise function of a part and of a whole: some `values` are `Sharded`, and all are `operands`."""
    for value in values:
        whole = tuple(value.global_shape)
        for x in operands if whole != tuple(value.shape) else ():
            if x.ndim and tuple(x.shape) == whole:
                path: str = getattr(x, "path", "an operand")
                problem = f"has all of {list(whole)}, and an elementwise function pairs it with {value.path}, of which"
                way_out = "split a leaf as the other is, or take the part of it that fzero.axis_index says"
                raise FzeroError(path, f"{problem} this rank has {list(value.shape)}", way_out)


_PLACE_OF_DIM = {
    **dict.fromkeys(
        """
        sum mean prod nansum nanmean std var std_mean var_mean logsumexp amax amin max min aminmax all any argmax argmin
        count_nonzero median nanmedian cumsum cumprod cummax cummin logcumsumexp softmax log_softmax softmin
        """.split(),
        1,
    ),
    **dict.fromkeys("norm vector_norm linalg_vector_norm linalg_norm quantile nanquantile normalize".split(), 2),
}
"""Name of a function along dimensions, or of all elements -> the place of `dim` among its arguments."""
_LAST = dict.fromkeys("mode sort argsort".split(), 1) | dict.fromkeys("topk kthvalue".split(), 2)
"""The same for functions along the last dimension unless another is given."""


def check_parts(name: str, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a function along the dimension over which ranks have parts of its operand `x`, a `Sharded`.

    The part has another sum or norm than the whole. A sum of parts is meant as often as one of the whole, and the
    result of neither says which it is.
    """
    split, place = split_of(x), _PLACE_OF_DIM.get(name, _LAST.get(name))
    if split is None or (place is None and name != "_weight_norm"):
        return
    given = kwargs.get("dim", kwargs.get("axis", args[place] if place and len(args) > place else None))
    if name == "_weight_norm":  # the norms of all dimensions but one
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        given = [i for i in range(x.ndim) if i != dim % x.ndim]
    elif given is None or isinstance(given, bool):
        given = [-1] if name in _LAST else [1] if name == "normalize" else range(x.ndim)
    elif isinstance(given, Tensor):
        return  # of two tensors `max` and `min` are elementwise
    dims = [dim % x.ndim for dim in ([given] if isinstance(given, int) else given)]
    if split.dim in dims:
        problem = f"{name} along dimension {split.dim} would be that of this rank's part: the leaf is split there over"
        way_out = "leaf.full_tensor() is the part, and fzero.psum and fzero.pmax join what parts give"
        raise FzeroError(x.path, f"{problem} {x.form.layout.split_axis!r}", way_out)


def is_accessor(func: Callable[..., Any]) -> bool:
    """Whether a function reads, sets or deletes an attribute."""
    return getattr(func, "__name__", "") in _ACCESSORS


def _sum(x: Tensor, cut: Cut, on: MovePerformer, *, dtype: torch.dtype | None = None) -> Tensor:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    exact = x.dtype if dtype is None and inexact else dtype or torch.int64
    return sum_all(x.to(exact), on, cut).to(exact)


def _mean(x: Tensor, cut: Cut, on: MovePerformer, *, dtype: torch.dtype | None = None) -> Tensor | None:
    to = dtype or x.dtype
    if not (to.is_floating_point or to.is_complex):
        return None  # torch refuses the mean of integers
    return (sum_all(x.to(to), on, cut) / cut.numel).to(to)


def _norm(x: Tensor, cut: Cut, on: MovePerformer, p: Any = 2, *, dtype: torch.dtype | None = None) -> Tensor | None:
    to = dtype or x.dtype
    if not _is_norm_dtype(to, x.dtype) or p not in (1, 2, "fro", None):
        return None
    x = x.to(accumulator(to))  # squares too: those of float16 overflow beyond 256, and vanish below 2e-4
    x = x.abs() if x.is_complex() else x
    total = sum_all(x.abs() if p == 1 else x * x, on, cut)
    return (total if p == 1 else _sqrt(total)).to(to.to_real())


def _is_norm_dtype(to: torch.dtype, given: torch.dtype) -> bool:
    """Whether torch computes the norm of a value of dtype `given` in dtype `to`. Otherwise torch raises an error."""
    inexact = given.is_floating_point or given.is_complex
    return inexact and to.is_complex == given.is_complex and torch.promote_types(to, given) == to


def _sqrt(total: Tensor) -> Tensor:
    """The square root with subgradient 0 at 0, as in torch's norm."""
    zero = total == 0
    return torch.where(zero, torch.zeros_like(total), torch.where(zero, torch.ones_like(total), total).sqrt())


def _vector_norm(x: Tensor, cut: Cut, on: MovePerformer, ord: Any = 2, **kwargs: Any) -> Tensor | None:
    return _norm(x, cut, on, ord, **kwargs)


def _max(x: Tensor, cut: Cut, on: MovePerformer) -> Tensor | None:
    return find_peak(x, on, cut, "max") if cut.numel and x.dtype != torch.bool else None


def _min(x: Tensor, cut: Cut, on: MovePerformer) -> Tensor | None:
    return find_peak(x, on, cut, "min") if cut.numel and x.dtype != torch.bool else None


def _all(x: Tensor, cut: Cut, on: MovePerformer) -> Tensor:
    return sum_all((x == 0).to(torch.int64), on, cut) == 0


def _any(x: Tensor, cut: Cut, on: MovePerformer) -> Tensor:
    return sum_all((x != 0).to(torch.int64), on, cut) > 0


def _count_nonzero(x: Tensor, cut: Cut, on: MovePerformer) -> Tensor:
    return sum_all((x != 0).to(torch.int64), on, cut)


def _restrict_to_full(rule: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`rule` for calls that reduce all elements; None for calls with `dim` or another argument that `rule` lacks."""

    def reduce(x: Tensor, cut: Cut, on: MovePerformer, *args: Any, **kwargs: Any) -> Tensor | None:
        given = {key: value for key, value in kwargs.items() if value is not None and value is not False}
        if set(given) - {"dtype", "p", "ord"}:
            return None
        if args and rule not in (_norm, _vector_norm):
            return None
        return rule(x, cut, on, *args, **given) if len(args) <= 1 else None

    return reduce


_FULL_REDUCTIONS: dict[str, Callable[..., Tensor | None]] = {
    "sum": _sum,
    "mean": _mean,
    "norm": _norm,
    "vector_norm": _vector_norm,
    "linalg_vector_norm": _vector_norm,
    "max": _max,
    "min": _min,
    "amax": _max,
    "amin": _min,
    "all": _all,
    "any": _any,
    "count_nonzero": _count_nonzero,
}

REDUCTIONS = {name: _restrict_to_full(rule) for name, rule in _FULL_REDUCTIONS.items()}
"""Name of a reduction -> its rule `(slice, leaf, on, ...)` for all elements of a value; None: gather the value."""
