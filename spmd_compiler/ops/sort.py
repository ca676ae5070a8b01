"""Orders: the sorted dim stays whole, every other dim may be sharded."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit
from ..rules import Rule, define, dims, fit
from .forms import constant, highest, lowest, stacked, stacked_positions, uneven
from .reduce import along, argument, reduced_dims, reduction

aten = torch.ops.aten


@define(aten.sort, aten.argsort, aten.msort)
def _(node: Node) -> Rule | None:
    return along(node, whole=frozenset("s"))


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


@define(aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def _(node: Node) -> Rule | None:
    return reduction(node, whole=frozenset(f"r{i}" for i in reduced_dims(node)))


@define(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def _(node: Node) -> Rule | None:
    """A position is the number of boundaries below: those of the pieces of a one-dimensional list add up."""
    if argument(node, "sorter") is not None:
        return None
    order = [1, 0] if node.target is aten.bucketize.Tensor else [0, 1]
    bounds, values = (node.args[i].meta["val"] for i in order)
    if bounds.dim() != 1:
        return None
    whole = dims("d", values.dim())
    terms = [(("v",),), whole]
    return fit(node, [terms[i] for i in order], [whole])


@define(aten.histc.default)
def _(node: Node) -> Rule | None:
    """Counts add up where the range is given."""
    low, high = argument(node, "min"), argument(node, "max")
    if low == high:
        return None
    return fit(node, [dims("r", node.args[0].meta["val"].dim())], [((),)])
