"""Decompositions of our own, for ops that Inductor's table lacks (their parts have rules) or gets wrong."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from .masks import SCANS, SPREADS, index, index_put, masked_scatter, masked_scatter_backward, masked_select
from .placements import SpmdError
from .resampling import RESIZES, adaptive_avg_pool, adaptive_max_pool, grid_sample, max_unpool, resize_by, resize_to

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)  # the modes of an embedding bag


def with_addend(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A product and a sum: ``addmm`` of ``mm``."""

    def decomposed(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        out = product(a, b)
        out = out if alpha == 1 else out * alpha
        if beta == 0:
            return out
        return out + (bias if beta == 1 else bias * beta)

    return decomposed


# --- embedding bags -----------------------------------------------------------------------------------------


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad: bool = False, mode: int = SUM, sparse: bool = False,
    weights: Tensor | None = None, include_last: bool = False, padding: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows looked up, then added (or compared) into the row of their bag.  Raises `SpmdError` where ``sparse``.

    Returns the bags, the bag of each index, the number of indices that count in each bag, and (mode max) the index
    that each element came from, the first of equals.
    """
    if sparse:
        raise SpmdError("embedding_bag: sparse gradients have no placement; leave sparse=True out")
    if include_last:
        offsets = offsets[:-1]
    count, bags, width = indices.shape[0], offsets.shape[0], weight.shape[1]
    place = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets, place, right=True) - 1
    rows = aten.embedding(weight, indices)
    kept = indices != padding
    size = offsets.new_zeros(bags).index_add(0, bag, kept.to(offsets.dtype))
    if mode == MAX:
        lowest = rows.new_full((bags, width), -torch.inf)
        if padding >= 0:
            rows = torch.where(kept.unsqueeze(-1), rows, -torch.inf)
        where = bag.unsqueeze(-1).expand(count, width)
        top = lowest.scatter_reduce(0, where, rows, "amax")
        first = torch.where(rows == top.index_select(0, bag), place.unsqueeze(-1), count - 1)
        first = first.new_full((bags, width), count - 1).scatter_reduce(0, where, first, "amin")
        filled = (size > 0).unsqueeze(-1)
        source = torch.where(filled, indices.index_select(0, first.reshape(-1)).reshape(bags, width), -1)
        return torch.where(filled, top, 0), bag, size, source
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if padding >= 0:
        rows = rows * kept.unsqueeze(-1)
    out = rows.new_zeros((bags, width)).index_add(0, bag, rows)
    if mode == MEAN:
        out = out / size.clamp_min(1).unsqueeze(-1)
    return out, bag, size, offsets.new_zeros(bags)


def embedding_bag_alone(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad: bool = False, mode: int = SUM, sparse: bool = False,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`embedding_bag` without gradients, so that sparse ones do no harm."""
    return embedding_bag(weight, indices, offsets, scale_grad, mode, False, *rest)


def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, bag: Tensor, size: Tensor, source: Tensor, num_weights: int,
    scale_grad: bool, mode: int, sparse: bool, weights: Tensor | None, padding: int = -1,
) -> Tensor:  # fmt: skip
    """The dense gradient of the table."""
    if mode == MAX:
        filled = (size > 0).unsqueeze(-1)
        table = grad.new_zeros((num_weights, grad.shape[1]))
        return table.scatter_add(0, torch.where(filled, source, 0), torch.where(filled, grad, 0))
    if mode == MEAN:
        grad = grad / size.clamp_min(1).unsqueeze(-1)
    rows = grad.index_select(0, bag)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return aten.embedding_dense_backward(rows, indices, num_weights, padding, scale_grad)


def embedding_bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bag: Tensor, mode: int, padding: int = -1
) -> Tensor:
    """The gradient of the weights of samples."""
    made = (grad.index_select(0, bag) * aten.embedding(weight, indices)).sum(-1)
    return made * (indices != padding) if padding >= 0 else made


# --- weight norm --------------------------------------------------------------------------------------------


def weight_norm_backward(
    grad: Tensor, direction: Tensor, size: Tensor, norm: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``direction`` and ``size`` through ``direction * size / norm(direction)``."""
    others = [d for d in range(direction.dim()) if d != dim % direction.dim()]
    grad_size = (grad * direction).sum(others, keepdim=True) / norm
    return (grad - direction * (grad_size / norm)) * (size / norm), grad_size


# --- padding ----------------------------------------------------------------------------------------------


def continued(mode: str) -> Callable[[Tensor, Any], Tensor]:
    """A dim goes on with its own elements."""
    return lambda x, pad: torch.ops.spmd.pad(x, pad, mode)


def continued_backward(mode: str) -> Callable[[Tensor, Tensor, Any], Tensor]:
    return lambda grad, x, pad: torch.ops.spmd.pad_backward(grad, pad, mode)


PADS = {"reflection": "reflect", "replication": "replicate"}


# --- histograms -----------------------------------------------------------------------------------------------


def _edges(x: Tensor, bins: int, ends: Any) -> Tensor:
    """The ends of ``bins`` equal bins from the least of a vector to its greatest, or between the ends given."""
    low, high = (x.new_full((), e) for e in ends) if ends else (x.min(), x.max()) if x.numel() else (0 * x.sum(), 1)
    alone = (low == high) * torch.full_like(low, 0.5)
    low, high = low - alone, high + alone
    place, step = torch.arange(bins + 1, device=x.device), (high - low) / bins
    return torch.where(place < (bins + 1) // 2, low + step * place, high - step * (bins - place))


def bin_edges(x: Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> list[Tensor]:
    ends = [None] * len(bins) if range is None else [range[i : i + 2] for i in builtins.range(0, len(range), 2)]
    rows = x.reshape(-1, len(bins))
    return [_edges(rows[:, d], n, ends[d]) for d, n in enumerate(bins)]


def binned(x: Tensor, edges: Any, *, weight: Tensor | None = None, density: bool = False) -> Tensor:
    """How many rows (or what weight of them) are in each bin; the last bin holds its upper end too."""
    rows = x.reshape(-1, len(edges))
    flat, inside = rows.new_zeros(rows.shape[:1], dtype=torch.int64), True
    for d, e in enumerate(edges):
        column, n = rows[:, d].contiguous(), e.shape[0] - 1
        at = torch.searchsorted(e.contiguous(), column, right=True) - 1
        at = torch.where(column == e[-1], n - 1, at)
        inside, flat = inside & (at >= 0) & (at < n), flat * n + at.clamp(0, n - 1)
    each = torch.ones_like(rows[:, 0]) if weight is None else weight.reshape(-1)
    sizes = [e.shape[0] - 1 for e in edges]
    made = rows.new_zeros(math.prod(sizes)).index_add(0, flat, torch.where(inside, each, 0)).reshape(sizes)
    if density:
        made = made / made.sum()
        for d, e in enumerate(edges):
            made = made / e.diff().reshape([-1 if i == d else 1 for i in range(len(sizes))])
    return made


def bins_of(x: Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Tensor:
    return binned(x, bin_edges(x, bins, range=range), weight=weight, density=density)


def histogram_of(x: Tensor, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    edges = bins if isinstance(bins, Tensor) else _edges(x.reshape(-1), bins, range)
    return binned(x, [edges], weight=weight, density=density), edges.clone()


def histc(x: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Tensor:
    """How many elements are in each of equal bins, the last of which holds its upper end too."""
    flat = x.reshape(-1)
    made = flat.new_zeros(bins)
    if low == high and flat.numel() == 0:
        return made
    if low == high:
        low, high = flat.min(), flat.max()
        same = (low == high).to(x.dtype)
        low, high = low - same, high + same
    at = ((flat - low) * bins / (high - low)).long()
    inside = (flat >= low) & (flat <= high)
    return made.index_add(0, at.clamp(0, bins - 1), inside.to(x.dtype))


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    """Where most elements are asked for, the first of all in order: what is sorted and what is left may be sharded."""
    n = x.shape[dim] if x.dim() else 0
    if not isinstance(n, int) or 2 * k <= n or not n:
        return NotImplemented
    return tuple(_part(v, dim % x.dim(), 0, k) for v in x.sort(dim=dim, descending=largest, stable=True))


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """Of the values that are there most often the least: in order, the longest run.  Where it is, is the last of them
    (torch's kernels give any of many)."""
    if x.dim() == 0 or x.numel() == 0:
        return NotImplemented
    dim, n = dim % x.dim(), x.shape[dim]
    values, where = x.sort(dim=dim, stable=True)
    place = _at(x, dim, torch.arange(n, device=x.device)).expand(x.shape)
    before, after = (aten.slice(values, dim, *ends) for ends in ((0, n - 1), (1, n)))
    begins = aten.constant_pad_nd((before != after).long(), [0, 0] * (x.dim() - 1 - dim) + [1, 0])
    length = place - (place * begins).cummax(dim).values
    last = length.argmax(dim, keepdim=True)
    value, index = values.gather(dim, last), where.gather(dim, last)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


# --- transforms ---------------------------------------------------------------------------------------------------


def fft_c2c(x: Tensor, dims: Any, norm: int, forward: bool) -> Tensor:
    """One dim after the other, so that of each transform all other dims may be sharded."""
    if len(dims) < 2:
        return NotImplemented
    for d in dims:
        x = aten._fft_c2c(x, [d], norm, forward)
    return x


def fft_r2c(x: Tensor, dims: Any, norm: int, onesided: bool) -> Tensor:
    if len(dims) < 2:
        return NotImplemented
    return aten._fft_c2c(aten._fft_r2c(x, dims[-1:], norm, onesided), dims[:-1], norm, True)


def fft_c2r(x: Tensor, dims: Any, norm: int, size: int) -> Tensor:
    if len(dims) < 2:
        return NotImplemented
    return aten._fft_c2r(aten._fft_c2c(x, dims[:-1], norm, False), dims[-1:], norm, size)


# --- losses -------------------------------------------------------------------------------------------------


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss, and which classes are targets.  (Torch 2.13's decomposition counts what stands behind the first -1.)"""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    place = torch.arange(classes, device=x.device)
    end = torch.where(labels == -1, place, classes).amin(-1, keepdim=True)
    counts = place < end
    label = torch.where(counts, labels, 0)
    is_target = ((label.unsqueeze(-1) == place) & counts.unsqueeze(-1)).any(1)
    margin = (1 - rows.gather(1, label).unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0)
    loss = torch.where(counts.unsqueeze(-1) & ~is_target.unsqueeze(1), margin, 0).sum((1, 2)) / classes
    if reduction == 1:
        loss = loss.mean()
    elif reduction == 2:
        loss = loss.sum()
    elif x.dim() < 2:
        loss = loss.squeeze(0)
    return loss, is_target.to(x.dtype).reshape(target.shape)


# --- segments ---------------------------------------------------------------------------------------------


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """The segment of each row of ``data``, their number for rows in none, and the lengths of segments."""
    if offsets is None:
        assert lengths is not None
        ends = lengths.cumsum(0)
        begins = ends - lengths
    else:
        begins, ends = offsets[:-1], offsets[1:]
    place = torch.arange(data.shape[0], device=data.device, dtype=ends.dtype)
    found = torch.searchsorted(ends, place, right=True)
    return torch.where(place >= begins[:1], found, ends.shape[0]), ends - begins


EMPTY = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf}


def segment_reduce(
    data: Tensor, reduce: str, *, lengths: Tensor | None = None, indices: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> Any:  # fmt: skip
    """Rows added (or compared) into the row of their segment."""
    given = lengths if offsets is None else offsets
    if axis or given is None or given.dim() != 1 or reduce not in EMPTY:
        return NotImplemented
    segment, size = _segments(data, lengths, offsets)
    count, rest = size.shape[0], data.shape[1:]
    made = data.new_full((count + 1, *rest), EMPTY[reduce] if initial is None else initial)
    if reduce in ("sum", "mean"):
        made = made.index_add(0, segment, data)[:count]
    else:
        where = segment.reshape([-1] + [1] * len(rest)).expand(data.shape)
        made = made.scatter_reduce(0, where, data, f"a{reduce}")[:count]
    if reduce == "mean":
        size = size.reshape([-1] + [1] * len(rest))
        made = torch.where(size > 0, made / size, made if initial is not None else math.nan)
    return made


def segment_reduce_backward(
    grad: Tensor, output: Tensor, data: Tensor, reduce: str, *, lengths: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, initial: Any = None,
) -> Any:  # fmt: skip
    """Of equal extremes each has its share."""
    given = lengths if offsets is None else offsets
    if axis or given is None or given.dim() != 1 or reduce not in EMPTY:
        return NotImplemented
    segment, size = _segments(data, lengths, offsets)
    inside = (segment < size.shape[0]).reshape([-1] + [1] * (data.dim() - 1))
    segment = segment.clamp_max(size.shape[0] - 1)
    if reduce in ("sum", "mean"):
        if reduce == "mean":
            grad = grad / size.clamp_min(1).reshape([-1] + [1] * (data.dim() - 1))
        return torch.where(inside, grad.index_select(0, segment), 0)
    hit = inside & ((data == output.index_select(0, segment)) | data.isnan())
    equal = torch.zeros_like(grad).index_add(0, segment, hit.to(grad.dtype))
    return torch.where(hit, (grad / equal.clamp_min(1)).index_select(0, segment), 0)


# --- parts of a dim -------------------------------------------------------------------------------------------


def _part(x: Tensor, dim: int, begin: int, size: int) -> Tensor:
    return aten.slice(x, dim, begin, begin + size)


def _at(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """A vector along a dim of ``x``."""
    return places.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def _placed(x: Tensor, dim: int, begin: int, n: int) -> Tensor:
    """``x`` as elements ``begin ...`` of a dim of ``n``, zeros around them."""
    after = n - begin - x.shape[dim]
    return aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [begin, after])


def select(x: Tensor, dim: int, index: int) -> Tensor:
    dim, n = dim % x.dim(), x.shape[dim]
    return _part(x, dim, index + n if index < 0 else index, 1).squeeze(dim)


def laid_out_as_first(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` with a result whose strides are its first operand's, as those of torch's kernels are.

    What writes in place through a view becomes such a call, and the views of the base are taken of its result anew.
    """

    @functools.wraps(f)
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = f(x, *args, **kwargs)
        if made is NotImplemented or free_unbacked_symbols(x):
            return made
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if made.stride() == x.stride() or not x.permute(order).is_contiguous():
            return made
        return made.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])

    return decomposed


@laid_out_as_first
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    dim, n = dim % x.dim(), x.shape[dim]
    hit = torch.arange(n, device=x.device) == (index + n if index < 0 else index)
    return torch.where(_at(x, dim, hit), source.unsqueeze(dim).to(x.dtype), x)


def select_backward(grad: Tensor, sizes: Any, dim: int, index: int) -> Tensor:
    return select_scatter(grad.new_zeros(sizes), grad, dim, index)


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [select(x, dim, i) for i in range(x.shape[dim])]


def split_with_sizes(x: Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [_part(x, dim % x.dim(), end - size, size) for end, size in zip(ends, sizes, strict=True)]


def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    n = x.shape[dim]
    begins = range(0, n, size) if size else [0]
    return [_part(x, dim % x.dim(), b, min(size, n - b)) for b in begins]


def _strided(x: Tensor, step: int, dim: int) -> Tensor:
    """With ``step - 1`` zeros behind each element of a dim."""
    if step == 1:
        return x
    return _placed(x.unsqueeze(dim + 1), dim + 1, 0, step).flatten(dim, dim + 1)


def _begin(start: int | None, n: int) -> int:
    start = 0 if start is None else start
    return min(max(start + n if start < 0 else start, 0), n)


@laid_out_as_first
def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    dim, n, begin = dim % x.dim(), x.shape[dim], _begin(start, x.shape[dim])
    source, m = source.to(x.dtype), source.shape[dim]
    if m == 0 or m == n:
        return (source if m else x).clone()
    place = _at(x, dim, torch.arange(n, device=x.device))
    hit = (place >= begin) & (place < begin + m * step)
    if step > 1:
        hit = hit & ((place - begin) % step == 0)
    return torch.where(hit, source if m == 1 else _placed(_strided(source, step, dim), dim, begin, n), x)


def slice_backward(grad: Tensor, sizes: Any, dim: int, start: int, end: int, step: int) -> Tensor:
    dim, m = dim % len(sizes), grad.shape[dim % len(sizes)]
    if statically_known_true(m == 1) and sizes[dim] > 1:
        return select_backward(grad.squeeze(dim), sizes, dim, _begin(start, sizes[dim]))
    return _placed(_strided(grad, step, dim), dim, _begin(start, sizes[dim]), sizes[dim])


@laid_out_as_first
def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    rows, columns = (_at(x, d, torch.arange(x.shape[d], device=x.device)) for d in (dim1, dim2))
    made = _placed(source, source.dim() - 1, max(0, -offset), x.shape[dim1]).unsqueeze(-1)
    order = [*(d for d in range(x.dim()) if d not in (dim1, dim2)), dim1, dim2]
    made = made.permute([order.index(d) for d in range(x.dim())])
    return torch.where(rows + offset == columns, made, x)


def diagonal_backward(grad: Tensor, sizes: Any, offset: int, dim1: int, dim2: int) -> Tensor:
    return diagonal_scatter(grad.new_zeros(sizes), grad, offset, dim1, dim2)


# --- views of what lies in memory -----------------------------------------------------------------------------


def _places(x: Tensor, size: Any, stride: Any, offset: int | None) -> Tensor | None:
    """Which elements of a contiguous ``x`` a strided view has; None where it leaves it or is a mere reshape."""
    begin = offset or 0
    last = begin + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not x.is_contiguous() or x.storage_offset() or math.prod(size) == 0 or last >= x.numel():
        return None
    if _is_whole(x, size, stride):
        return None
    places = torch.full([], begin, device=x.device)
    for n, s in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n, device=x.device) * s
    return places


def _is_whole(x: Tensor, size: Any, stride: Any) -> bool:
    """Whether a strided view of a contiguous ``x`` is a mere reshape."""
    dense = [math.prod(size[d + 1 :]) for d in range(len(size))]
    return math.prod(size) == x.numel() and all(n == 1 or s == t for n, s, t in zip(size, stride, dense, strict=True))


def as_strided(x: Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    """Elements of a contiguous tensor by their places."""
    places = _places(x, size, stride, offset)
    return NotImplemented if places is None else x.reshape(-1)[places]


@laid_out_as_first
def as_strided_scatter(x: Tensor, source: Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    places = _places(x, size, stride, offset)
    if places is None and x.is_contiguous() and not x.storage_offset() and not offset and _is_whole(x, size, stride):
        return source.to(x.dtype).reshape(x.shape).clone()
    if places is None:
        return NotImplemented
    return x.reshape(-1).index_put([places], source).reshape(x.shape)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


# Those of which the gradient is that of the decomposition, where torch has a kernel of its own for it.
EARLY = (
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default, aten.masked_select.default, *SPREADS,
    *SCANS,
)  # fmt: skip


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """By overload; they go before Inductor's, which serve where one of them returns NotImplemented."""
    named = [(getattr(aten, f"{name}_pad{n}d"), mode) for name, mode in PADS.items() for n in (1, 2, 3)]
    back = [(getattr(aten, f"{name}_pad{n}d_backward"), mode) for name, mode in PADS.items() for n in (1, 2, 3)]
    return {
        **{getattr(aten, name).default: resize_to(*kind) for name, kind in RESIZES.items()},
        **{getattr(aten, name).vec: resize_by(*kind) for name, kind in RESIZES.items()},
        aten.grid_sampler_2d.default: grid_sample,
        aten.grid_sampler_3d.default: grid_sample,
        aten.addbmm.default: with_addend(lambda a, b: torch.tensordot(a, b, ([0, 2], [0, 1]))),
        aten.max_unpool2d.default: max_unpool,
        aten.max_unpool3d.default: max_unpool,
        aten._histogramdd_bin_edges.default: bin_edges,
        aten._histogramdd_from_bin_cts.default: bins_of,
        aten._histogramdd_from_bin_tensors.default: binned,
        aten.histogram.bin_ct: histogram_of,
        aten.histogram.bins_tensor: histogram_of,
        aten.segment_reduce.default: segment_reduce,
        aten._segment_reduce_backward.default: segment_reduce_backward,
        aten.as_strided.default: as_strided,
        aten.as_strided_copy.default: as_strided,
        aten.as_strided_scatter.default: as_strided_scatter,
        aten.select.int: select,
        aten.select_scatter.default: select_scatter,
        aten.select_backward.default: select_backward,
        aten.unbind.int: unbind,
        aten.split.Tensor: split,
        aten.split_copy.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
        aten.slice_scatter.default: slice_scatter,
        aten.slice_backward.default: slice_backward,
        aten.diagonal_scatter.default: diagonal_scatter,
        aten.diagonal_backward.default: diagonal_backward,
        aten._fft_c2c.default: fft_c2c,
        aten._fft_r2c.default: fft_r2c,
        aten._fft_c2r.default: fft_c2r,
        aten.histc.default: histc,
        aten.mode.default: mode,
        aten.topk.default: topk,
        aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
        aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.adaptive_max_pool3d.default: adaptive_max_pool,
        aten._pad_circular.default: continued("circular"),
        **{op.default: continued(mode) for op, mode in named},
        **{op.default: continued_backward(mode) for op, mode in back},
        aten.addmm.default: with_addend(torch.mm),
        aten.baddbmm.default: with_addend(torch.bmm),
        aten._embedding_bag.default: embedding_bag,
        aten._embedding_bag_forward_only.default: embedding_bag_alone,
        aten._embedding_bag_backward.default: embedding_bag_backward,
        aten._embedding_bag_per_sample_weights_backward.default: embedding_bag_weights_backward,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
        aten.masked_scatter.default: masked_scatter,
        aten.masked_scatter_backward.default: masked_scatter_backward,
        aten.index.Tensor: index,
        aten.index_put.default: laid_out_as_first(index_put),
        aten.masked_select.default: masked_select,
        **SPREADS,
        **SCANS,
        aten.glu.default: glu,
    }
