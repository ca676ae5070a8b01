"""Orders over devices: sorting by a network of exchanges, and what needs no more than candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import collectives as coll
from ..emit import Emit, Local
from ..ir import argument, is_getitem
from ..symbolic import IntExpr, coordinate, table
from .reduce import shared, total, whole_sum
from .values import highest, lowest, stacked_positions, uneven

aten = torch.ops.aten


def network(n: int) -> list[list[tuple[int, int]]]:
    """The rounds of comparisons that sort ``n`` things: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M).

    Where things are sorted blocks of one size, a comparison merges two and leaves the lower half at the first (exercise
    5.3.4-38).
    """
    top = 1 << max(0, (n - 1).bit_length() - 1) if n > 1 else 0
    found, p = [], top
    while p:
        q, r, d = top, 0, p
        while True:
            found.append([(i, i + d) for i in range(n - d) if i & p == r])
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return [pairs for pairs in found if pairs]


class Spread:
    """A dim whose elements are spread over the devices of ``axes``, ``size`` here and ``most`` at the first."""

    def __init__(self, e: Emit, x: Local, dim: int, axes: Sequence[str], size: IntExpr, most: int) -> None:
        self.e, self.x, self.dim, self.axes, self.size, self.most = e, x, dim, tuple(axes), size, most
        self.parts = [e.mesh[a] for a in axes]
        self.count = math.prod(self.parts)
        self.blocks = [(i * most, (i + 1) * most) for i in range(self.count)]
        self.place: IntExpr = 0
        for axis, n in zip(self.axes, self.parts, strict=True):
            self.place = self.place * n + coordinate(axis)

    def sorted(self, begin: IntExpr | None, total: int, descending: bool = False) -> list[Local]:
        """The elements in order and (unless ``begin``, the number of the first here, is None) the numbers they had,
        ``most`` of both on each device.  Equal ones stay in order; what fills up short pieces comes last."""
        x, dtype = self.x, self.x.dtype
        if self.size != self.most:
            last = lowest(dtype) if descending else math.nan if dtype.is_floating_point else highest(dtype)
            x = x.pad(self.dim, 0, self.most - self.size, last)
        made = self.e.call(aten.sort.stable, x, stable=True, dim=self.dim, descending=descending)
        found = [made[i] for i in range(2 - (begin is None))]
        if begin is not None:
            real = found[1] < self.size if self.size != self.most else None
            found[1] = found[1] + begin
            if real is not None:
                found[1] = real.where(found[1], total)
            if total < 2**31:
                found[1] = found[1].to(torch.int32)
        for pairs in network(self.count):
            found = self._merged(found, pairs, descending)
        return found if begin is None else [found[0], found[1].to(torch.int64)]

    def _merged(self, found: list[Local], pairs: Sequence[tuple[int, int]], descending: bool) -> list[Local]:
        """One round: each pair's elements in order, the lower half at the first, the upper at the second."""
        e, dim, other = self.e, self.dim, list(range(self.count))
        for i, j in pairs:
            other[i], other[j] = j, i
        flat = [[i for r in self.blocks for i in r]]
        flat.append([n for i, j in enumerate(other) for n in (*self.blocks[i], *self.blocks[j])])
        two = [e.call(coll.fetch, v, dim, 2 * self.most, *flat, 0, list(self.axes), self.parts) for v in found]
        if len(two) == 2:  # equal values by their numbers
            two[1], order = e.call(aten.sort.default, two[1], dim)
            two[0] = two[0].gather(dim, order)
        two[0], order = two[0].sort(dim, descending)
        if len(two) == 2:
            two[1] = two[1].gather(dim, order)
        begin = table([self.most * (j < i) for i, j in enumerate(other)], self.place)
        halves = [v.slice(dim, begin, begin + self.most) for v in two]
        if all(i != j for i, j in enumerate(other)):
            return halves
        alone = found[0].number(table([int(i == j) for i, j in enumerate(other)], self.place), torch.int64) > 0
        return [alone.where(own, half) for own, half in zip(found, halves, strict=True)]

    def picked(self, found: Sequence[Local], at: int | Local) -> list[Local]:
        """Of what `sorted` gave the elements of number ``at`` (each row's, if a tensor) where they are, else zeros."""
        number = self.e.count(self.place * self.most, self.most, found[0]).along(self.dim, found[0].ndim)
        return [number.eq(at).where(v, 0).sum([self.dim], True, dtype=v.dtype) for v in found]


def sort(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Any:
    if not e.axes("s"):
        return e.same(x, *args, **kwargs)
    dim = argument(e.node, "dim") % x.ndim
    taken = {u.args[1] for u in e.node.users if is_getitem(u)}
    begin = e.offset("s") if 1 in taken or not taken else None
    spread = Spread(e, x, dim, e.axes("s"), e.size("s"), int(x.shape[dim]))
    found = spread.sorted(begin, e.sizes["s"], argument(e.node, "descending"))
    made = [e.fetch(v, dim, "s", spread.blocks, [[r] for r in e.pieces("s")]) for v in found]
    return made[0], made[1] if begin is not None else None


def kth(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Any:
    """Sorted, and the element of one number picked.  What is no number is greater than all else, and is the median if
    there is any."""
    if not shared(e):
        return e.same(x, *args, **kwargs)
    name, flat = e.node.target._schema.name, len(e.node.target._schema.returns) == 1
    factors = [f for f in e.sizes if f[0] == "r"]
    n, dim = total(e), 0 if flat else int(factors[0][1:])
    x = x.reshape([-1]) if flat else x
    spread = Spread(e, x, dim, e.axes(*factors), math.prod(e.size(f) for f in factors), int(x.shape[dim]))
    at: Any = argument(e.node, "k", 0) - 1 if "kth" in name else (n - 1) // 2
    if "median" in name and x.dtype.is_floating_point:
        real = n - whole_sum(e, x.isnan().sum([dim], True))
        if "nan" in name:
            at = e.call(aten.div.Tensor_mode, real - 1, 2, rounding_mode="trunc").clamp_min(0)
        else:
            at = (real < n).where(real, at)
    found = spread.picked(spread.sorted(None if flat else e.offset(factors[0]), n), at)
    made = [whole_sum(e, v) for v in found]
    if flat:
        return made[0].reshape([])
    return tuple(v if argument(e.node, "keepdim") else v.squeeze([dim]) for v in made)


def topk(e: Emit, x: Local, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    """Each device hands over its own candidates, and the best of all are taken from these.

    Where pieces are uneven they are filled up to one size, and orders are stable: what fills up counts as behind
    the last element, and loses to all that is real.
    """
    if not e.axes("s"):
        return e.same(x, k, dim, largest, ordered)
    dim, ragged = dim % x.ndim, uneven(e, "s")
    most = int(x.shape[dim])  # of the first device, whose piece is the largest
    if ragged:
        x = x.pad(dim, 0, most - e.size("s"), lowest(x.dtype) if largest else highest(x.dtype))

    def best(x: Local, count: int) -> list[Local]:
        if not ragged:
            return list(e.same(x, count, dim, largest, ordered))
        return [v.slice(dim, 0, count) for v in x.sort(dim, largest)]

    value, where = best(x, min(k, most))
    real = where < e.size("s") if ragged else None
    where = where + e.offset("s")
    if real is not None:
        where = real.where(where, e.sizes["s"])
    value = e.stacked(value, "s", dim)
    where = stacked_positions(e, where, "s", dim, e.sizes["s"] + 1)
    if ragged:
        where, order = e.call(aten.sort.default, where, dim)
        value = value.gather(dim, order)
    value, at = best(value, k)
    return value, where.gather(dim, at)
