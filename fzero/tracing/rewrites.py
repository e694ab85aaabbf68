"""Functions of torch whose code asks for values, written without: a trace has no values.

Each takes the function that it stands for, and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.symbols import is_open
from fzero.base.torch_private import FakeTensor, assert_later, depth, storage_key, unwrap
from fzero.base.torch_private_functions import MATMUL_READS_SIZES, requires_grad, unflatten_linear
from fzero.base.user_line import current_user_line
from fzero.tracing.ctc import ctc_loss
from fzero.values.checkpoint import keep_requires_grad
from fzero.values.sharded import Sharded

_aten: Any = torch.ops.aten
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # torch's stubs lack it


def _one_hot(func: Callable[..., Any], x: Tensor, num_classes: int = -1) -> Tensor:
    """`torch.nn.functional.one_hot`. Refuses a class out of range when the step runs."""
    if num_classes < 0:
        return func(x, num_classes)
    x = _gather(x)
    return x.new_zeros((*x.shape, num_classes)).scatter(-1, x.unsqueeze(-1), 1)


def _cov(
    func: Callable[..., Any],
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """`torch.cov`. Refuses a weight below 0, and weights that sum to 0, when the step runs."""
    if x.ndim > 2:
        return func(x, correction=correction, fweights=fweights, aweights=aweights)  # which raises an error
    x, frequency, weight = _gather(x), _gather(fweights), _gather(aweights)
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    for given in (frequency, weight):
        if given is not None:
            assert_later((given >= 0).all(), "cov found a weight below 0")
    w = frequency if weight is None else weight if frequency is None else frequency * weight
    total = torch.tensor(rows.shape[1], dtype=rows.real.dtype, device=x.device) if w is None else w.sum()
    if w is not None:
        assert_later(total != 0, "cov found weights that sum to 0")
    mean = (rows if w is None else rows * w).sum(1) / total
    removed = correction if weight is None or w is None else correction * (w * weight).sum() / total
    centered = rows - mean.unsqueeze(1)
    weighted = centered if w is None else centered * w
    return ((weighted @ centered.mH) / (total - removed).clamp_min(0)).squeeze()


def _corrcoef(func: Callable[..., Any], x: Tensor) -> Tensor:
    """`torch.corrcoef`."""
    if x.ndim > 2:
        return func(x)  # which raises an error
    c = _cov(torch.cov, x)
    if c.ndim == 0:
        return c / c
    deviation = c.diagonal().real.sqrt()
    c = c / deviation.unsqueeze(1) / deviation
    return torch.view_as_complex(torch.view_as_real(c).clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def _index_fill(func: Callable[..., Any], x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill`. torch asks for the value of a tensor, and for the number of equal indices in its derivative."""
    if not isinstance(value, Tensor):
        return func(x, dim, index, value)
    x = _gather(x)
    is_filled = x.new_zeros(x.shape[dim] if x.ndim else 1, dtype=torch.bool).index_fill(0, _gather(index), True)
    shape = [-1 if i == dim % x.ndim else 1 for i in range(x.ndim)]
    return torch.where(is_filled.reshape(shape), _gather(value).to(x.dtype), x)


def _index_fill_(func: Callable[..., Any], x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill_`."""
    return x.copy_(_index_fill(torch.index_fill, x, dim, index, value))


def _masked_select(func: Callable[..., Any], x: Tensor, mask: Tensor) -> Tensor:
    """`masked_select`. torch's derivative asks for open sizes."""
    x, mask = _gather(x), _gather(mask)
    if mask.dtype != torch.bool:
        return func(x, mask)  # which raises an error
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape).reshape(-1)[mask.expand(shape).reshape(-1)]


def set_item(func: Callable[..., Any], is_read: Callable[[Tensor], bool], x: Tensor, key: Any, value: Any) -> None:
    """`x[key] = value`. Of a value that a mask spreads, torch's derivative has a row for each place that is true. One
    row is that of the one place that is true, where the mask `is_read`."""
    keys = tuple(map(_gather, key if isinstance(key, tuple) else (key,)))
    value = _gather(value)
    places = [i for i, each in enumerate(keys) if type(each) not in (int, slice, type(None), type(...))]
    mask: Any = keys[places[0]] if len(places) == 1 else None
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim > 0
    if not is_mask or not isinstance(value, Tensor) or value.dtype != x.dtype or not requires_grad(value):
        return func(x, key, value)
    before, after = keys[: places[0]], keys[places[0] + 1 :]
    whole = x.full_tensor().clone() if isinstance(x, Sharded) else x
    view = whole[(*before, *[slice(None)] * mask.ndim, *after)]
    rest = _count_axes(after) if ... in before else view.ndim - mask.ndim - _count_axes(before)
    first = view.ndim - rest - mask.ndim
    while value.ndim > rest and value.shape[0] == 1 and not is_read(mask):
        value = value[0]
    if mask.shape != view.shape[first : first + mask.ndim] or value.ndim > rest:
        return func(x, key, value)
    view.copy_(torch.where(mask.reshape(*mask.shape, *[1] * rest), value, view))
    if whole is not x:
        x.copy_(whole)
    return None


def _count_axes(keys: tuple[Any, ...]) -> int:
    """How many axes remain of those that keys without `...` index."""
    return sum(not isinstance(each, int) for each in keys)


def _set_attribute(func: Callable[..., Any], x: Tensor, value: Any) -> None:
    """`x.data = value` and its like. `x.data = x.data.to(device)` changes nothing where x is there. Refuses to put a
    value of the trace into a tensor from outside of the step."""
    if func == _SET_DATA and isinstance(x, Tensor) and not isinstance(x, Sharded):
        if value is x or (isinstance(value, Tensor) and _is_same_memory(unwrap(x), unwrap(value))):
            return
        if not isinstance(unwrap(x), FakeTensor):
            problem = "the data of a tensor from outside of the step is replaced, as the conversion of a module does"
            raise FzeroError(current_user_line(), problem, "convert modules, and fill tensors, before the step")
    return func(x, value)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    if type(x) is not type(y) or isinstance(x, Sharded) or storage_key(x) != storage_key(y):
        return False
    return (x.dtype, x.shape, x.stride(), x.storage_offset()) == (y.dtype, y.shape, y.stride(), y.storage_offset())


def _tensor(func: Callable[..., Any], data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor` and `torch.as_tensor`. On the meta device torch makes a tensor that no gradient has made, and
    then refuses to write into it."""
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type != "meta" or isinstance(data, Tensor):
        return func(data, *args, device=device, **options)
    return func(data, *args, device="cpu", **options).to(target)


def _resize_as_(func: Callable[..., Any], x: Tensor, the_template: Tensor, **options: Any) -> Tensor:
    """`resize_as_`. It needs the shape of the template alone, whose elements may differ between ranks."""
    return x.resize_(the_template.shape, **options)


def _lstsq(
    func: Callable[..., Any],
    a: Tensor,
    b: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    out: Any = None,
) -> Any:
    """`torch.linalg.lstsq` of matrices of full rank. A matrix of lower rank raises an error when the step runs."""
    if out is not None or min(a.shape[-2:]) == 0:
        return func(a, b, rcond, driver=driver, **({} if out is None else {"out": out}))
    a, b = _gather(a), _gather(b)
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    rows, columns = a.shape[-2:]
    is_vector = b.ndim == 1 or b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if is_vector else b
    solution = torch.linalg.pinv(a) @ right
    rank = torch.linalg.matrix_rank(a.detach(), rtol=rcond)
    assert_later((rank == min(rows, columns)).all(), "linalg.lstsq: in a step a matrix must have full rank")
    # What a driver does not compute has no elements.
    residuals = values = a.new_empty(0, dtype=a.dtype.to_real())
    if rows > columns and driver != "gelsy":
        residuals = (a @ solution - right).abs().square().sum(-2)
    if driver in ("gelss", "gelsd"):
        values = torch.linalg.svdvals(a.detach())
    rank = rank.new_empty(0) if driver == "gels" else rank
    solution = solution.squeeze(-1) if is_vector else solution
    made = solution, residuals, rank, values
    return torch.return_types.linalg_lstsq(made)  # type: ignore[attr-defined]  # torch's stubs lack it


def _attend(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`. A GPU has fused kernels for most shapes. On the meta device torch has none, and
    would make matrices of all pairs of positions: a plan has the kernel of a GPU in their place.

    torch's kernel for CPU has no derivative by a mask, and torch does not take it for a mask that requires one. Of a
    mask that an outer transform of torch.func differentiates torch does not know."""
    query, key, value, attn_mask = map(_gather, (query, key, value, attn_mask))
    if attn_mask is not None and query.device.type == "cpu" and requires_grad(attn_mask):
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **how)[0]
    is_known = query.device.type == "meta" and query.ndim == key.ndim == value.ndim == 4
    if is_known and attn_mask is None and query.shape[-1] == value.shape[-1]:
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if is_known and not is_causal and query.shape[1] == key.shape[1]:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, query.new_zeros(()), -torch.inf)
        bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, scale=scale)[0]
    return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _linear(func: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`. In front of its kernel torch asks for the values of open sizes of three dimensions, with a bias."""
    if bias is None and MATMUL_READS_SIZES and any(map(is_open, x.shape)):
        return _matmul(torch.matmul, x, weight.t())
    if x.ndim != 3 or bias is None or not any(map(is_open, x.shape)):
        return func(x, weight, bias)
    x, weight, bias = map(_gather, (x, weight, bias))
    is_flat, turned = x.is_contiguous(), weight.t()  # in the order of torch, so that nodes are those of other traces
    if not is_flat:
        return _matmul(torch.matmul, x, turned).add_(bias)
    flat = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    return unflatten_linear(torch.addmm(bias, flat, turned), [x.shape[0], x.shape[1], weight.shape[0]])


def _matmul(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """`x @ y`. torch 2.11 asks for the values of open sizes where it makes two dimensions of the first tensor."""
    is_pair = MATMUL_READS_SIZES and len(args) == 2 and all(isinstance(x, (Tensor, Sharded)) for x in args)
    if not is_pair or args[0].ndim < 3 or args[1].ndim != 2 or not any(map(is_open, args[0].shape)):
        return func(*args, **kwargs)
    x, y = map(_gather, args)
    if not y.requires_grad and not x.is_contiguous():  # as torch decides
        return func(x, y)
    *rows, width = x.shape
    return _aten._unsafe_view(x.reshape(prod(rows), width).mm(y), [*rows, y.shape[1]])


def _dropout(
    func: Callable[..., Any], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **named: bool
) -> Tensor:
    """`dropout`. On a CPU torch asks for the number of elements of open sizes in front of its kernel. `torch.dropout`
    names its third argument `train`, and has no fourth."""
    training = named.get("train", training)
    given = (p, training) if func is torch.dropout else (p, training, inplace)
    is_open_here = not isinstance(x, Sharded) and any(map(is_open, x.shape)) and x.device.type == "cpu"
    if not is_open_here or not training or inplace or not 0 < p < 1:
        return func(x, *given)
    if depth() == 0:
        return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    new = _aten.empty.memory_format([], dtype=x.dtype, layout=x.layout, device=x.device)  # as torch in a transform
    return x * _aten.div_.Scalar(torch.bernoulli(new.expand(x.shape), 1 - p), 1 - p)


def _pad_sequence(
    func: Callable[..., Any],
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """`torch.nn.utils.rnn.pad_sequence`. torch asks for the numbers of open lengths to find the longest one."""
    rows: list[Tensor] = [_gather(x) for x in sequences]
    lengths: list[Any] = [x.shape[0] for x in rows]
    if not any(map(is_open, lengths)):
        return func(rows, batch_first, padding_value, padding_side)
    longest, first = reduce(torch.sym_max, lengths), rows[0]
    sizes = (len(rows), longest) if batch_first else (longest, len(rows))
    how = {"dtype": first.dtype, "layout": first.layout, "device": first.device}
    padded = _aten.full((*sizes, *first.shape[1:]), padding_value, **how)
    for i, (x, length) in enumerate(zip(rows, lengths)):  # in torch's order, so that nodes are those of other traces
        start = longest - length if padding_side == "left" else 0
        place = padded[i].narrow(0, start, length) if batch_first else padded.narrow(0, start, length).select(1, i)
        place.copy_(x)
    return padded


def _gather(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Sharded) else x


REWRITES: dict[str, Callable[..., Any]] = {
    "one_hot": _one_hot,
    "cov": _cov,
    "corrcoef": _corrcoef,
    "index_fill": _index_fill,
    "index_fill_": _index_fill_,
    "resize_as_": _resize_as_,
    "__set__": _set_attribute,
    "ctc_loss": ctc_loss,
    "dropout": _dropout,
    "linalg_lstsq": _lstsq,
    "linear": _linear,
    "masked_select": _masked_select,
    "pad_sequence": _pad_sequence,
    "requires_grad_": keep_requires_grad,
    "tensor": _tensor,
    "as_tensor": _tensor,
    "scaled_dot_product_attention": _attend,
    **({"matmul": _matmul} if MATMUL_READS_SIZES else {}),
}
"""Name of a function of torch -> what is called in its place."""
