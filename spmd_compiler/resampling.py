"""Decompositions of what takes elements of a plane together or apart: resizing, grids, adaptive pooling, unpooling.

Which elements are read is a lookup by known numbers wherever that is fixed, so that of a sharded dim only those travel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def lookup(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """``x`` with the dims of ``places`` in place of the dim that they index."""
    where: list[Any] = [slice(None)] * x.dim()
    where[dim] = places
    return x[tuple(where)]


def weighed(x: Tensor, places: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Sums of as many elements of a dim as rows of ``places`` and ``weights`` have."""
    x = lookup(x, places, dim)
    return (x * weights.reshape(*weights.shape, *[1] * (x.dim() - dim - 2))).sum(dim + 1)


def wider(x: Tensor) -> Tensor:
    """``x`` in a dtype in which sums are not rounded in between."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


# --- adaptive pooling -----------------------------------------------------------------------------------------


def _kernel(plane: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """The windows where all have one size and none is shared."""
    pairs = list(zip(plane, sizes, strict=True))
    return None if any(n % m for n, m in pairs) else [n // m for n, m in pairs]


def _windows(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of ``m`` windows that share ``n`` elements evenly, a row each: ``floor(o n / m)`` to ``ceil((o + 1) n / m)``,
    filled up to the largest with their last element; and which of them count."""
    width = max(-(-(o + 1) * n // m) - o * n // m for o in range(m))
    o, j = torch.arange(m, device=device).unsqueeze(1), torch.arange(width, device=device)
    begin, end = ((o * n + k).div(m, rounding_mode="floor") for k in (0, n + m - 1))
    return torch.minimum(begin + j, end - 1), begin + j < end


def adaptive_avg_pool(x: Tensor, sizes: Any) -> Tensor:
    """The mean of each window, a dim after the other."""
    lead = x.dim() - len(sizes)
    if (kernel := _kernel(x.shape[lead:], sizes)) is not None:
        return (aten.avg_pool2d if len(sizes) == 2 else aten.avg_pool3d)(x, kernel, kernel)
    y = wider(x)
    for d, m in enumerate(sizes):
        places, counts = _windows(x.shape[lead + d], m, x.device)
        y = weighed(y, places, counts / counts.sum(1, keepdim=True).to(y.dtype), lead + d)
    return y.to(x.dtype)


def adaptive_max_pool(x: Tensor, sizes: Any) -> tuple[Tensor, Tensor]:
    """The maximum of each window and its place in the plane.  Where all windows are equal it is max pooling."""
    count = len(sizes)
    lead, plane, places = x.dim() - count, x.shape[x.dim() - count :], []
    if (kernel := _kernel(plane, sizes)) is not None:
        return (aten.max_pool2d_with_indices if count == 2 else aten.max_pool3d_with_indices)(x, kernel, kernel)
    for d, m in enumerate(sizes):
        places.append(_windows(plane[d], m, x.device)[0])
        x = lookup(x, places[d], x.dim() - count + d)
    x = x.permute(*range(lead), *range(lead, x.dim(), 2), *range(lead + 1, x.dim(), 2)).flatten(lead + count)
    values, at = x.max(-1)
    index = torch.zeros_like(at)
    for d in reversed(range(count)):
        width = places[d].shape[1]
        digit, at = at.remainder(width), at.div(width, rounding_mode="floor")
        first, last = (places[d][:, k].reshape([-1] + [1] * (count - 1 - d)) for k in (0, -1))
        index = index + torch.minimum(first + digit, last) * math.prod(plane[d + 1 :])
    return values, index


# --- resizing ---------------------------------------------------------------------------------------------


def resize(x: Tensor, sizes: Any, aligned: bool, scales: Any, cubic: bool, smooth: bool = False) -> Any:
    """Linear or cubic interpolation, a dim after the other: what an element reads is one lookup."""
    if not x.is_floating_point():
        return NotImplemented
    lead, y = x.dim() - len(sizes), wider(x)
    for d, m in enumerate(sizes):
        n, place = x.shape[lead + d], torch.arange(m, dtype=y.dtype, device=x.device)
        step = ((n - 1) / (m - 1) if m > 1 else 0.0) if aligned else 1 / scales[d] if scales[d] else n / m
        at, weights = (_smooth if smooth else _taps)(place, n, step, aligned, cubic)
        y = weighed(y, at.clamp(0, n - 1), weights, lead + d)
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
