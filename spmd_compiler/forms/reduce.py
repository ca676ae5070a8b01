"""Reductions whose parts are no partial result, and scans: each device gives what it finds in its own piece.

Reduced factors are ``r<i>`` (``i`` is the operand's dim), the scanned one is ``s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..emit import Emit, Local
from ..symbolic import IntExpr
from .values import highest, lowest, padded, stacked_positions, uneven

aten = torch.ops.aten


def shared(e: Emit) -> list[str]:
    """The reduced factors that a mesh axis shards."""
    return [f for f in e.sizes if f[0] == "r" and e.axes(f)]


def total(e: Emit) -> int:
    """The number of elements of which one is made."""
    return math.prod(n for f, n in e.sizes.items() if f[0] == "r")


def whole_sum(e: Emit, x: Local, op: str = "sum") -> Local:
    """Reduce a local result over every axis that shards a reduced factor."""
    for f in shared(e):
        x = e.all_reduce(x, f, op)
    return x


def neutralised(e: Emit, x: Local, value: Any) -> Local:
    """``x`` with a neutral element more where a piece may be empty."""
    for f in shared(e):
        x = padded(e, x, int(f[1:]), f, value)
    return x


def position(e: Emit, x: Local, dim: int | None = None, keepdim: bool = False) -> Any:
    """Of each device its own first extreme; values and global positions are gathered, and of equal extremes the one
    that comes first counts (and of any number before it what is no number)."""
    target, ndim, dtype = e.node.target, x.ndim, x.dtype
    several = target in (aten.max.dim, aten.min.dim)
    if not shared(e):
        return e.same(x, dim, keepdim)
    big = target in (aten.argmax.default, aten.max.dim)
    x = neutralised(e, x, lowest(dtype) if big else highest(dtype))
    at, below = 0 if dim is None else dim % ndim, 1
    value, index = e.call(aten.max.dim if big else aten.min.dim, x.reshape([-1]) if dim is None else x, at, True)
    if dim is None:
        index, below = _global(e, index, ndim)
    else:
        index, below = index + e.offset(f"r{at}"), e.sizes[f"r{at}"]
    for f in shared(e):
        value, index = e.stacked(value, f, at), stacked_positions(e, index, f, at, 2 * below)
    best = e.call(aten.amax.default if big else aten.amin.default, value, [at], True)
    hit = value.eq(best) | value.isnan() if dtype.is_floating_point else value.eq(best)
    index = e.call(aten.amin.default, hit.where(index, highest(torch.int64)), [at], True)
    if dim is None:
        return index.reshape([1] * ndim if keepdim else [])
    found = [v if keepdim else v.squeeze([at]) for v in ((best, index) if several else (index,))]
    return tuple(found) if several else found[0]


def _global(e: Emit, at: Local, ndim: int) -> tuple[Local, int]:
    """A position among all local elements as one among all, and how many these are."""
    index, stride = None, 1
    for f in (f"r{i}" for i in reversed(range(ndim))):
        held = e.size(f) + int(uneven(e, f))
        term = (at % held + e.offset(f)) * stride
        at, index = at // held, term if index is None else index + term
        stride *= e.sizes[f]
    assert index is not None
    return index, stride


def moments(e: Emit, x: Local, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """The variance, from the global mean."""
    target = e.node.target
    if not shared(e):
        return e.same(x, dim, correction=correction, keepdim=keepdim)
    count, gone = total(e), [int(f[1:]) for f in e.sizes if f[0] == "r"]
    mean = whole_sum(e, x.sum(gone, True)) / count
    off = x - mean
    spread = whole_sum(e, (off * off).sum(gone, keepdim)) / max(count - (1 if correction is None else correction), 0.0)
    if target is aten.var.correction:
        return spread
    return spread, mean if keepdim else mean.squeeze(gone)


# the neutral element of each scan, and how what comes before is combined with what is local
SCANS: dict[Any, tuple[Callable[[torch.dtype], Any], Any]] = {
    aten.cumsum.default: (lambda dtype: 0, aten.add.Tensor),
    aten.cumprod.default: (lambda dtype: 1, aten.mul.Tensor),
    aten.logcumsumexp.default: (lambda dtype: -math.inf, aten.logaddexp.default),
    aten.cummax.default: (lowest, aten.ge.Tensor),
    aten.cummin.default: (highest, aten.le.Tensor),
}


def scan(e: Emit, x: Local, dim: int, **kwargs: Any) -> Any:
    """A local scan, combined with a scan of the totals before it: one value a row and device travels."""
    if not e.axes("s"):
        return e.same(x, dim, **kwargs)
    neutral, combine = SCANS[e.node.target]
    dim, fill = dim % x.ndim, neutral(x.dtype)
    pairs = isinstance(e.node.meta["val"], (tuple, list))
    size, here = e.size("s"), e.place("s")

    def scanned(x: Local) -> list[Local]:
        made = e.same(x, dim, **kwargs)
        return list(made) if pairs else [made]

    local = scanned(padded(e, x, dim, "s", fill))
    last: IntExpr = size if uneven(e, "s") else size - 1
    totals = [e.stacked(local[0].slice(dim, last, last + 1), "s", dim)]
    if pairs:
        local[1] = local[1] + e.offset("s")
        totals.append(stacked_positions(e, local[1].slice(dim, last, last + 1), "s", dim, e.sizes["s"] + 1))
    before = [v.slice(dim, here, here + 1) for v in scanned(totals[0].pad(dim, 1, 0, fill))]
    own = local[0].slice(dim, 0, size)
    newer = e.call(combine, own, before[0])  # of equals the later counts, and so does what is no number
    if not pairs:
        return newer
    where = totals[1].pad(dim, 1, 0).gather(dim, before[1])
    if x.dtype.is_floating_point:
        newer = newer | own.isnan()
    return newer.where(own, before[0]), newer.where(local[1].slice(dim, 0, size), where)
