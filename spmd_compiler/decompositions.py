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

from .placements import SpmdError

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


def lookup(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """``x`` with the dims of ``places`` in place of the dim that they index."""
    where: list[Any] = [slice(None)] * x.dim()
    where[dim] = places
    return x[tuple(where)]


# --- adaptive pooling -----------------------------------------------------------------------------------------


def adaptive_max_pool(x: Tensor, sizes: Any) -> tuple[Tensor, Tensor]:
    """The maximum of each window and its place in the plane.  Windows of different sizes are filled up to the largest
    with their last element, which changes nothing; where all are equal it is max pooling."""
    count = len(sizes)
    plane = x.shape[x.dim() - count :]
    if all(n % m == 0 for n, m in zip(plane, sizes, strict=True)):
        kernel = [n // m for n, m in zip(plane, sizes, strict=True)]
        pool = aten.max_pool2d_with_indices if count == 2 else aten.max_pool3d_with_indices
        return pool(x, kernel, kernel)
    lead, places = x.dim() - count, []
    for d, (n, m) in enumerate(zip(plane, sizes, strict=True)):
        windows = [(o * n // m, -(-(o + 1) * n // m)) for o in range(m)]
        width = max(end - begin for begin, end in windows)
        o, j = torch.arange(m, device=x.device).unsqueeze(1), torch.arange(width, device=x.device)
        last = ((o + 1) * n + m - 1).div(m, rounding_mode="floor") - 1
        places.append(torch.minimum((o * n).div(m, rounding_mode="floor") + j, last))
        x = lookup(x, places[d], x.dim() - count + d)
    x = x.permute(*range(lead), *range(lead, x.dim(), 2), *range(lead + 1, x.dim(), 2)).flatten(lead + count)
    values, at = x.max(-1)
    index = torch.zeros_like(at)
    for d in reversed(range(count)):
        width = places[d].shape[1]
        digit, at = at.remainder(width), at.div(width, rounding_mode="floor")
        first, last = (places[d][:, k].reshape([-1] + [1] * (count - 1 - d)) for k in (0, -1))
        stride = math.prod(plane[d + 1 :])
        index = index + torch.minimum(first + digit, last) * stride
    return values, index


# --- resizing ---------------------------------------------------------------------------------------------


def resize(x: Tensor, sizes: Any, aligned: bool, scales: Any, cubic: bool, smooth: bool = False) -> Any:
    """Linear or cubic interpolation, a dim after the other: what an element reads is one lookup."""
    if not x.is_floating_point():
        return NotImplemented
    lead = x.dim() - len(sizes)
    y = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    for d, m in enumerate(sizes):
        n, place = x.shape[lead + d], torch.arange(m, dtype=y.dtype, device=x.device)
        step = ((n - 1) / (m - 1) if m > 1 else 0.0) if aligned else 1 / scales[d] if scales[d] else n / m
        at, weights = (_smooth if smooth else _taps)(place, n, step, aligned, cubic)
        y = lookup(y, at.clamp(0, n - 1), lead + d)
        y = (y * weights.reshape(*weights.shape, *[1] * (len(sizes) - 1 - d))).sum(lead + d + 1)
    return y.to(x.dtype)


def _taps(place: Tensor, n: int, step: float, aligned: bool, cubic: bool) -> tuple[Tensor, Tensor]:
    """The elements that each of the result reads, and their weights."""
    source, taps = place * step, 4 if cubic else 2
    if not aligned:
        source = (place + 0.5) * step - 0.5
        source = source if cubic else source.clamp_min(0)
    t = (source - source.floor()).unsqueeze(1)
    weights = _four(t) if cubic else [1 - t, t]
    at = source.floor().long().unsqueeze(1) + torch.arange(taps, device=place.device) - (taps // 2 - 1)
    return at, torch.cat(weights, 1)


def _smooth(place: Tensor, n: int, step: float, aligned: bool, cubic: bool) -> tuple[Tensor, Tensor]:
    """The same where a kernel as wide as the step averages all that it covers, as Pillow does."""
    wide, center = max(step, 1.0), (step * (place + 0.5)).unsqueeze(1)
    support = (2 if cubic else 1) * wide
    begin = (center - support + 0.5).long().clamp_min(0)
    at = begin + torch.arange(2 * math.ceil(support) + 1, device=place.device)
    t = ((at - center + 0.5) / wide).abs()
    weights = torch.where(t < 1, _cubic(t, True, -0.5), _cubic(t, False, -0.5)) if cubic else 1 - t
    inside = (t < 2 if cubic else t < 1) & (at < (center + support + 0.5).long().clamp_max(n))
    weights = torch.where(inside, weights, 0)
    return at, weights / weights.sum(1, keepdim=True)


def _cubic(t: Tensor, near: bool, a: float = -0.75) -> Tensor:
    """Keys' convolution kernel (IEEE ASSP 29, 1981) with torch's ``a``, at distances up to 1 or from 1 to 2."""
    return ((a + 2) * t - (a + 3)) * t * t + 1 if near else ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


def _four(t: Tensor) -> list[Tensor]:
    """Weights of the four elements around a point ``t`` behind the second."""
    return [_cubic(t + 1, False), _cubic(t, True), _cubic(1 - t, True), _cubic(2 - t, False)]


# cubic?, smooth?
RESIZES = {"upsample_linear1d": (False,), "upsample_bilinear2d": (False,), "upsample_trilinear3d": (False,),
           "upsample_bicubic2d": (True,), "_upsample_bilinear2d_aa": (False, True),
           "_upsample_bicubic2d_aa": (True, True)}  # fmt: skip


def grid_sample(x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    """Elements at the points of a grid (mode 1), or weighed means of 2 or 4 in each dim around them (0, 2)."""
    plane, count = x.shape[2:], x.dim() - 2

    def inside(at: Tensor, n: int) -> Tensor:
        """Places as the padding takes them."""
        if padding == 2:
            low, span = (0.0, n - 1) if aligned else (-0.5, n)
            turns = ((at - low).abs() / max(span, 1)).floor()
            rest = (at - low).abs() - turns * span
            at = torch.where(turns % 2 == 0, rest, span - rest) + low
        return at.clamp(0, n - 1) if padding else at

    corners: list[list[tuple[Tensor, Any]]] = []
    for d, n in enumerate(plane):
        at = grid[..., count - 1 - d].unsqueeze(1)
        at = (at + 1) * ((n - 1) / 2) if aligned else ((at + 1) * n - 1) / 2
        at = at if mode == 2 else inside(at, n)
        low, t = at.floor(), at - at.floor()
        if mode == 2:
            corners.append([(inside(low + k - 1, n), w) for k, w in enumerate(_four(t))])
        elif mode == 1:
            near = at.round()
            corners.append([(near, 1 + (near - near.detach()))])  # the gradient of a place is zero, not none
        else:
            corners.append([(low, 1 - t), (low + 1, t)])
    lead = [torch.arange(n, device=x.device).reshape([-1 if i == d else 1 for i in range(x.dim())])
            for d, n in enumerate(x.shape[:2])]  # fmt: skip
    made: Any = 0
    for corner in itertools.product(*corners):
        held: Any = True
        for (at, _), n in zip(corner, plane, strict=True):
            held = (at >= 0) & (at < n) & held
        weight = torch.where(held, math.prod(w for _, w in corner), 0)
        places = [torch.where(held, at, 0).long() for at, _ in corner]
        made = made + x[tuple(lead + places)] * weight.to(x.dtype)
    return made


def resize_to(*kind: bool) -> Callable[..., Any]:
    return lambda x, sizes, aligned, *scales: resize(x, sizes, aligned, [*scales, None, None, None], *kind)


def resize_by(*kind: bool) -> Callable[..., Any]:
    def decomposed(x: Tensor, sizes: Any, aligned: bool, factors: Any) -> Any:
        count = x.dim() - 2
        if sizes is None:
            sizes = [int(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
        return resize(x, sizes, aligned, factors or [None] * count, *kind)

    return decomposed


def max_unpool(x: Tensor, index: Tensor, sizes: Any, *_: Any) -> Tensor:
    """Each element at its place in its plane, zeros elsewhere; of several at one place the greatest."""
    lead, total = x.shape[: x.dim() - len(sizes)], math.prod(sizes)
    if x.numel() == 0:
        return x.new_zeros((*lead, *sizes))
    x, index = (v.reshape(*lead, -1) for v in (x, index))
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    top = x.new_full((*lead, total), low).scatter_reduce(-1, index, x, "amax")
    taken = torch.zeros((*lead, total), dtype=torch.int32, device=x.device)
    taken = taken.scatter_reduce(-1, index, torch.ones_like(index, dtype=torch.int32), "amax")
    return torch.where(taken > 0, top, 0).reshape(*lead, *sizes)


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


# --- views of what lies in memory -----------------------------------------------------------------------------


def _places(x: Tensor, size: Any, stride: Any, offset: int | None) -> Tensor | None:
    """Which elements of a contiguous ``x`` a strided view has; None where it leaves it or is a mere reshape."""
    begin = offset or 0
    last = begin + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not x.is_contiguous() or x.storage_offset() or math.prod(size) == 0 or last >= x.numel():
        return None
    dense = [math.prod(size[d + 1 :]) for d in range(len(size))]
    if math.prod(size) == x.numel() and all(n == 1 or s == t for n, s, t in zip(size, stride, dense, strict=True)):
        return None
    places = torch.full([], begin, device=x.device)
    for n, s in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n, device=x.device) * s
    return places


def as_strided(x: Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    """Elements of a contiguous tensor by their places."""
    places = _places(x, size, stride, offset)
    return NotImplemented if places is None else x.reshape(-1)[places]


def as_strided_scatter(x: Tensor, source: Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    places = _places(x, size, stride, offset)
    if places is None:
        return NotImplemented
    return x.reshape(-1).index_put([places], source).reshape(x.shape)


# --- masks that number what they let through ------------------------------------------------------------------


def _numbered(mask: Tensor) -> Tensor:
    """For each element the number of those let through before it."""
    return mask.reshape(-1).cumsum(0) - mask.reshape(-1).long()


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of ``source``, in order, where ``mask`` holds."""
    x, mask = torch.broadcast_tensors(x, mask)
    if source.numel() == 0:
        return x.clone()
    at = _numbered(mask).clamp_max(source.numel() - 1)
    return torch.where(mask, source.reshape(-1).index_select(0, at).reshape(x.shape), x)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Any) -> Tensor:
    """The gradient of ``source``: what ``mask`` lets through, in order, then zeros."""
    mask = mask.expand(grad.shape)
    made = grad.new_zeros(math.prod(sizes))
    if made.numel() == 0 or grad.numel() == 0:
        return made.reshape(sizes)
    at = _numbered(mask).clamp_max(made.numel() - 1)
    return made.index_add(0, at, torch.where(mask, grad, 0).reshape(-1)).reshape(sizes)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


# Those of which the gradient is that of the decomposition, where torch has a kernel of its own for it.
EARLY = (
    aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
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
        aten.as_strided_scatter.default: as_strided_scatter,
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
        aten.glu.default: glu,
    }
