"""Orders: the sorted dim may be sharded too, by a network of exchanges."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import collectives as coll
from ..ir import Emit, is_getitem
from ..rules import Rule, define, dims, fit
from ..symbolic import IntExpr, coordinate, table
from .forms import constant, counted, highest, lowest, padded, stacked, stacked_positions, uneven
from .reduce import all_of, along, argument, reduced_dims, reduction, shared, whole_sum

aten, prims = torch.ops.aten, torch.ops.prims


# --- sorting over devices -----------------------------------------------------------------------------------


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

    def __init__(self, e: Emit, x: Node, dim: int, axes: Sequence[str], size: IntExpr, most: int) -> None:
        self.e, self.x, self.dim, self.axes, self.size, self.most = e, x, dim, tuple(axes), size, most
        self.parts = [e.mesh[a] for a in axes]
        self.count = math.prod(self.parts)
        self.blocks = [(i * most, (i + 1) * most) for i in range(self.count)]
        self.place: IntExpr = 0
        for axis, n in zip(self.axes, self.parts, strict=True):
            self.place = self.place * n + coordinate(axis)

    def sorted(self, begin: IntExpr | None, total: int, descending: bool = False) -> list[Node]:
        """The elements in order and (unless ``begin``, the number of the first here, is None) the numbers they had,
        ``most`` of both on each device.  Equal ones stay in order; what fills up short pieces comes last."""
        e, x, dtype = self.e, self.x, self.x.meta["val"].dtype
        if self.size != self.most:
            last = lowest(dtype) if descending else math.nan if dtype.is_floating_point else highest(dtype)
            after = [0, 0] * (x.meta["val"].dim() - 1 - self.dim) + [0, self.most - self.size]
            x = e.call(aten.constant_pad_nd.default, x, after, last)
        made = e.call(aten.sort.stable, x, stable=True, dim=self.dim, descending=descending)
        found = [e.call(operator.getitem, made, i) for i in range(2 - (begin is None))]
        if begin is not None:
            real = e.call(aten.lt.Scalar, found[1], self.size) if self.size != self.most else None
            found[1] = e.call(aten.add.Tensor, found[1], begin)
            if real is not None:
                found[1] = e.call(aten.where.self, real, found[1], constant(e, total, found[1]))
            if total < 2**31:
                found[1] = e.call(prims.convert_element_type.default, found[1], torch.int32)
        for pairs in network(self.count):
            found = self._merged(found, pairs, descending)
        if begin is not None and total < 2**31:
            found[1] = e.call(prims.convert_element_type.default, found[1], torch.int64)
        return found

    def _merged(self, found: list[Node], pairs: Sequence[tuple[int, int]], descending: bool) -> list[Node]:
        """One round: each pair's elements in order, the lower half at the first, the upper at the second."""
        e, dim, other = self.e, self.dim, list(range(self.count))
        for i, j in pairs:
            other[i], other[j] = j, i
        flat = [[i for r in self.blocks for i in r]]
        flat.append([n for i, j in enumerate(other) for n in (*self.blocks[i], *self.blocks[j])])
        two = [e.call(coll.fetch, v, dim, 2 * self.most, *flat, 0, list(self.axes), self.parts) for v in found]
        if len(two) == 2:  # equal values by their numbers
            by = e.call(aten.sort.default, two[1], dim)
            two[1], order = (e.call(operator.getitem, by, k) for k in range(2))
            two[0] = e.call(aten.gather.default, two[0], dim, order)
        made = e.call(aten.sort.stable, two[0], stable=True, dim=dim, descending=descending)
        two[0], order = (e.call(operator.getitem, made, k) for k in range(2))
        if len(two) == 2:
            two[1] = e.call(aten.gather.default, two[1], dim, order)
        begin = table([self.most * (j < i) for i, j in enumerate(other)], self.place)
        halves = [e.call(aten.slice.Tensor, v, dim, begin, begin + self.most) for v in two]
        if all(i != j for i, j in enumerate(other)):
            return halves
        alone = constant(e, table([int(i == j) for i, j in enumerate(other)], self.place), found[0], torch.int64)
        alone = e.call(aten.gt.Scalar, alone, 0)
        return [e.call(aten.where.self, alone, own, half) for own, half in zip(found, halves, strict=True)]

    def picked(self, found: Sequence[Node], at: int | Node) -> list[Node]:
        """Of what `sorted` gave the elements of number ``at`` (each row's, if a tensor) where they are, else zeros."""
        e, value = self.e, found[0].meta["val"]
        number = counted(e, self.place * self.most, self.most, found[0])
        number = e.call(aten.reshape.default, number, [-1 if d == self.dim else 1 for d in range(value.dim())])
        hit = e.call(aten.eq.Tensor if isinstance(at, Node) else aten.eq.Scalar, number, at)
        kept = [e.call(aten.where.self, hit, v, constant(e, 0, v)) for v in found]
        return [e.call(aten.sum.dim_IntList, v, [self.dim], True, dtype=v.meta["val"].dtype) for v in kept]


def _spread(e: Emit, x: Node, dim: int, factor: str) -> Spread:
    return Spread(e, x, dim, e.axes(factor), e.size(factor), int(x.meta["val"].shape[dim]))


@define(aten.sort.default, aten.sort.stable)
def _(node: Node) -> Rule | None:
    return along(node, form=_sort, reduce={"s": "none"})


def _sort(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Any:
    if not e.axes("s"):
        return e.call(e.node.target, x, *args, **kwargs)
    dim = argument(e.node, "dim") % x.meta["val"].dim()
    taken = {u.args[1] for u in e.node.users if is_getitem(u)}
    begin = e.offset("s") if 1 in taken or not taken else None
    spread = _spread(e, x, dim, "s")
    found = spread.sorted(begin, e.sizes["s"], argument(e.node, "descending"))
    made = [e.fetch(v, dim, "s", spread.blocks, [[r] for r in e.pieces("s")]) for v in found]
    return made[0], made[1] if begin is not None else None


@define(aten.kthvalue.default, aten.median, aten.nanmedian)
def _(node: Node) -> Rule | None:
    if node.args[0].meta["val"].numel() == 0:
        return None
    return reduction(node, form=_kth, reduce=all_of(reduced_dims(node), "none"))


def _kth(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Any:
    """Sorted, and the element of one number picked.  What is no number is greater than all else, and is the median if
    there is any."""
    if not shared(e):
        return e.call(e.node.target, x, *args, **kwargs)
    name = e.node.target._schema.name
    factors = [f"r{i}" for i in reduced_dims(e.node)]
    axes = [a for f in factors for a in e.axes(f)]
    total = math.prod(e.sizes[f] for f in factors)
    flat = len(e.node.target._schema.returns) == 1
    if flat:
        x = e.call(aten.reshape.default, x, [-1])
    dim = 0 if flat else reduced_dims(e.node)[0]
    spread = Spread(e, x, dim, axes, math.prod(e.size(f) for f in factors), int(x.meta["val"].shape[dim]))
    at: Any = argument(e.node, "k", 0) - 1 if "kth" in name else (total - 1) // 2
    if "median" in name and x.meta["val"].dtype.is_floating_point:
        bad = e.call(aten.sum.dim_IntList, e.call(aten.isnan.default, x), [dim], True)
        real = e.call(aten.rsub.Scalar, whole_sum(e, bad), total)
        if "nan" in name:
            half = e.call(aten.div.Tensor_mode, e.call(aten.sub.Tensor, real, 1), 2, rounding_mode="trunc")
            at = e.call(aten.clamp_min.default, half, 0)
        else:
            at = e.call(aten.where.self, e.call(aten.lt.Scalar, real, total), real, constant(e, at, real))
    found = spread.picked(spread.sorted(None if flat else e.offset(factors[0]), total), at)
    made = [whole_sum(e, v) for v in found]
    if flat:
        return e.call(aten.reshape.default, made[0], [])
    return tuple(made if argument(e.node, "keepdim") else [e.call(aten.squeeze.dim, v, dim) for v in made])


@define(aten.mode.default)
def _(node: Node) -> Rule | None:
    return reduction(node, whole=frozenset(f"r{i}" for i in reduced_dims(node)))


# --- the best, positions, counts --------------------------------------------------------------------------------


@define(aten.topk.default)
def _(node: Node) -> Rule | None:
    """Each device hands over its own candidates, and the best of all are taken from these."""
    x = node.args[0].meta["val"]
    if x.dim() == 0:
        return fit(node, [()], [(), ()])
    dim = argument(node, "dim") % x.dim()
    rest = dims("d", x.dim(), [dim])
    named = (*rest[:dim], ("s",), *rest[dim + 1 :])
    return fit(node, [named], [rest, rest], form=_topk, reduce={"s": "none"})


def _topk(e: Emit, x: Node, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    """Where pieces are uneven they are filled up to one size, and orders are stable: what fills up counts as behind
    the last element, and loses to all that is real."""
    target = e.node.target
    if not e.axes("s"):
        return e.call(target, x, k, dim, largest, ordered)
    dim, ragged = dim % x.meta["val"].dim(), uneven(e, "s")
    most = int(x.meta["val"].shape[dim])  # of the first device, whose piece is the largest
    if ragged:
        dtype = x.meta["val"].dtype
        fill = lowest(dtype) if largest else highest(dtype)
        after = [0, 0] * (x.meta["val"].dim() - 1 - dim) + [0, most - e.size("s")]
        x = e.call(aten.constant_pad_nd.default, x, after, fill)

    def best(x: Node, count: int) -> list[Node]:
        if not ragged:
            made = e.call(target, x, count, dim, largest, ordered)
            return [e.call(operator.getitem, made, i) for i in range(2)]
        made = e.call(aten.sort.stable, x, stable=True, dim=dim, descending=largest)
        return [e.call(aten.slice.Tensor, e.call(operator.getitem, made, i), dim, 0, count) for i in range(2)]

    value, where = best(x, min(k, most))
    real = e.call(aten.lt.Scalar, where, e.size("s")) if ragged else None
    where = e.call(aten.add.Tensor, where, e.offset("s"))
    if real is not None:
        where = e.call(aten.where.self, real, where, constant(e, e.sizes["s"], where))
    value, _ = stacked(e, value, "s", dim)
    where = stacked_positions(e, where, "s", dim, e.sizes["s"] + 1)
    if ragged:
        made = e.call(aten.sort.default, where, dim)
        where, order = (e.call(operator.getitem, made, i) for i in range(2))
        value = e.call(aten.gather.default, value, dim, order)
    value, at = best(value, k)
    return value, e.call(aten.gather.default, where, dim, at)


@define(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def _(node: Node) -> Rule | None:
    """A position is the number of boundaries below: those of the pieces of a list add up."""
    order = [1, 0] if node.target is aten.bucketize.Tensor else [0, 1]
    bounds, values = (node.args[i].meta["val"] for i in order)
    lead = dims("d", bounds.dim() - 1)
    whole = (*lead, ("k",)) if lead else dims("d", values.dim())
    terms = [(*lead, ("v",)), whole]
    if argument(node, "sorter", None) is not None:
        return fit(node, [*terms, terms[0]], [whole], whole=frozenset("v"))
    return fit(node, [terms[i] for i in order], [whole])


@define(aten.histc.default)
def _(node: Node) -> Rule | None:
    """Counts add up; a range that is not given is that of all elements."""
    low, high = argument(node, "min"), argument(node, "max")

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        if not shared(e) or low != high:
            return e.call(node.target, x, *args, **kwargs)
        bins, dtype, ends = argument(node, "bins"), x.meta["val"].dtype, []
        for op, fill, kind in ((aten.amin.default, highest, "min"), (aten.amax.default, lowest, "max")):
            part = x
            for f in shared(e):
                part = padded(e, part, int(f[1:]), f, fill(dtype))
            ends.append(whole_sum(e, e.call(op, part), kind))
        one = e.call(prims.convert_element_type.default, e.call(aten.eq.Tensor, *ends), dtype)
        begin, end = e.call(aten.sub.Tensor, ends[0], one), e.call(aten.add.Tensor, ends[1], one)
        at = e.call(aten.mul.Tensor, e.call(aten.sub.Tensor, x, begin), bins)
        at = e.call(aten.div.Tensor, at, e.call(aten.sub.Tensor, end, begin))
        at = e.call(prims.convert_element_type.default, e.call(aten.reshape.default, at, [-1]), torch.int64)
        at = e.call(aten.clamp_max.default, at, bins - 1)
        none = e.call(aten.full.default, [bins], 0, dtype=dtype, device=x.meta["val"].device)
        each = e.call(aten.expand.default, constant(e, 1, x), [math.prod(e.size(f) for f in e.sizes)])
        return e.call(aten.index_add.default, none, 0, at, each)

    return fit(node, [dims("r", node.args[0].meta["val"].dim())], [((),)], form=form)
