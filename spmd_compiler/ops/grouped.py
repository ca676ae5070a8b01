"""Grouped matrix products, the experts' of a mixture: rows sorted by group, one matrix a group.

``offs`` holds the end of each group's rows.  Of rows (``s``), groups (``e``) and both dims of the matrices (``k``,
``n``) any may be sharded.  A device that holds some rows clamps the ends to them; one that holds some groups rolls
their rows to the front, where the kernel works on no others, and contributes zero for those of other groups.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands
from ..rules import Rule, define, fit
from .forms import both, constant, counted
from .reduce import argument

aten = torch.ops.aten


class Rows:
    """The rows that a device's groups have among those that it holds."""

    def __init__(self, e: Emit, offs: Node) -> None:
        self.e, self.begin, self.mask = e, None, None
        if e.axes("s"):
            local = e.call(aten.clamp_min.default, e.call(aten.sub.Tensor, offs, e.offset("s")), 0)
            offs = e.call(aten.minimum.default, local, constant(e, e.size("s"), offs))
        if e.axes("e"):
            first = e.call(aten.constant_pad_nd.default, offs, [1, 0], 0)
            lower = e.offset("e")
            ends = e.call(aten.slice.Tensor, offs, 0, lower, lower + e.size("e"))
            begin = e.call(aten.slice.Tensor, first, 0, lower, lower + 1)
            place = counted(e, 0, e.size("s"), offs)
            last = e.call(aten.amax.default, e.call(aten.cat.default, [begin, ends]), [0], True)
            self.mask = both(e, e.call(aten.ge.Tensor, place, begin), e.call(aten.lt.Tensor, place, last))
            size = constant(e, e.size("s"), place)
            self.rolled = e.call(aten.remainder.Tensor, e.call(aten.add.Tensor, place, begin), size)
            self.unrolled = e.call(aten.remainder.Tensor, e.call(aten.sub.Tensor, place, begin), size)
            offs = e.call(aten.sub.Tensor, ends, begin)
        self.offs = offs

    def front(self, x: Node, dim: int = 0) -> Node:
        """``x`` with the rows of the device's groups before all others, in its own memory order."""
        if self.mask is None:
            return x
        if dim == 0:
            return self.e.call(aten.index_select.default, x, 0, self.rolled)
        turned = self.front(self.e.call(aten.permute.default, x, [1, 0]))
        return self.e.call(aten.permute.default, turned, [1, 0])

    def back(self, x: Node) -> Node:
        """Rows in their places, those of other devices' groups zero."""
        if self.mask is None:
            return x
        e = self.e
        x = e.call(aten.index_select.default, x, 0, self.unrolled)
        return e.call(aten.where.self, e.call(aten.unsqueeze.default, self.mask, 1), x, constant(e, 0, x))


ROWS, EXPERTS, RESULT = (("s",), ("k",)), (("e",), ("k",), ("n",)), (("s",), ("n",))


@define("transformers::grouped_mm_fallback")
def _(node: Node) -> Rule | None:
    def form(e: Emit, x: Node, w: Node, offs: Node) -> Node:
        rows = Rows(e, offs)
        return rows.back(e.call(node.target, rows.front(x), w, rows.offs))

    x, w = (o.meta["val"] for o in operands(node)[:2])
    return fit(
        node, [ROWS, EXPERTS, ((),)], [RESULT], [[0], [1]], form=form, flops=2.0 * x.numel() * w.shape[2]
    )


@define("transformers::grouped_mm_fallback_backward")
def _(node: Node) -> Rule | None:
    def form(e: Emit, x: Node, w: Node, offs: Node, grad: Node) -> tuple[Node, Node]:
        rows = Rows(e, offs)
        pair = e.call(node.target, rows.front(x), w, rows.offs, rows.front(grad))
        return rows.back(e.call(operator.getitem, pair, 0)), e.call(operator.getitem, pair, 1)

    x, w = (o.meta["val"] for o in operands(node)[:2])
    return fit(
        node, [ROWS, EXPERTS, ((),), RESULT], [ROWS, EXPERTS], [[3]], form=form, flops=4.0 * x.numel() * w.shape[2]
    )


@define(aten._grouped_mm.default)
def _(node: Node) -> Rule | None:
    """Rows times a matrix a group, or (``k s, s n -> e k n``) the products of each group's rows."""
    given = operands(node)
    if len(given) != 3 or argument(node, "offs") is not given[2]:
        return None
    x, w = (o.meta["val"] for o in given[:2])
    if x.dim() != 2 or w.dim() == 1:
        return None
    products = w.dim() == 2

    def form(e: Emit, x: Node, w: Node, offs: Node, *rest: Any, **kwargs: Any) -> Node:
        rows = Rows(e, offs)
        w = rows.front(w) if products else w
        x = rows.front(x, 1 if products else 0)
        if products:  # columns of any length are aligned where they lie in memory as rows
            x = e.call(aten.permute.default, x, [1, 0])
            x = e.call(aten.clone.default, x, memory_format=torch.contiguous_format)
            x = e.call(aten.permute.default, x, [1, 0])
        made = e.call(node.target, x, w, rows.offs, *rest, **kwargs)
        return made if products else rows.back(made)

    dims = [(("k",), ("s",)), RESULT, ((),)] if products else [ROWS, EXPERTS, ((),)]
    found = fit(node, dims, [EXPERTS if products else RESULT], [[0], [1]])
    if found is None:
        return None
    # the kernel wants pieces whose rows begin at multiples of 16 bytes
    odd = frozenset(f for f in ("k", "n") if found.sizes[f] % 512)
    flops = 2.0 * x.numel() * w.shape[-1]
    return fit(node, dims, [EXPERTS if products else RESULT], [[0], [1]], form=form, whole=odd, flops=flops)
