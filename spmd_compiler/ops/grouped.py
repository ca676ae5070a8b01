"""Grouped matrix products, the experts' of a mixture: rows sorted by group, one matrix a group.

``offs`` holds the end of each group's rows.  Of rows (``s``), groups (``e``) and both dims of the matrices (``k``,
``n``) any may be sharded.  A device that holds some rows clamps the ends to them; one that holds some groups rolls
their rows to the front, where the kernel works on no others, and contributes zero for those of other groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..ir import argument, operands
from ..rules import Rule, define, fit

aten = torch.ops.aten


class Rows:
    """The rows that a device's groups have among those that it holds."""

    def __init__(self, e: Emit, offs: Local) -> None:
        self.mask: Local | None = None
        if e.axes("s"):
            local = (offs - e.offset("s")).clamp_min(0)
            offs = e.call(aten.minimum.default, local, offs.number(e.size("s")))
        if e.axes("e"):
            lower = e.offset("e")
            ends = offs.slice(0, lower, lower + e.size("e"))
            begin = offs.pad(0, 1, 0).slice(0, lower, lower + 1)
            place = e.count(0, e.size("s"), offs)
            last = e.cat([begin, ends], 0).amax([0], True)
            self.mask = ((place >= begin) & (place < last)).unsqueeze(1)
            size = place.number(e.size("s"))
            self.rolled, self.unrolled = (place + begin) % size, (place - begin) % size
            offs = ends - begin
        self.offs = offs

    def front(self, x: Local, dim: int = 0) -> Local:
        """``x`` with the rows of the device's groups before all others, in its own memory order."""
        if self.mask is None:
            return x
        return x.index_select(0, self.rolled) if dim == 0 else self.front(x.permute([1, 0])).permute([1, 0])

    def back(self, x: Local) -> Local:
        """Rows in their places, those of other devices' groups zero."""
        return x if self.mask is None else self.mask.where(x.index_select(0, self.unrolled), 0)


ROWS, EXPERTS, RESULT = (("s",), ("k",)), (("e",), ("k",), ("n",)), (("s",), ("n",))


@define("transformers::grouped_mm_fallback")
def _(node: Node) -> Rule | None:
    def form(e: Emit, x: Local, w: Local, offs: Local) -> Local:
        rows = Rows(e, offs)
        return rows.back(e.same(rows.front(x), w, rows.offs))

    x, w = (o.meta["val"] for o in operands(node)[:2])
    return fit(
        node, [ROWS, EXPERTS, ((),)], [RESULT], [[0], [1]], form=form, flops=2.0 * x.numel() * w.shape[2]
    )


@define("transformers::grouped_mm_fallback_backward")
def _(node: Node) -> Rule | None:
    def form(e: Emit, x: Local, w: Local, offs: Local, grad: Local) -> tuple[Local, Local]:
        rows = Rows(e, offs)
        pair = e.same(rows.front(x), w, rows.offs, rows.front(grad))
        return rows.back(pair[0]), pair[1]

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

    def form(e: Emit, x: Local, w: Local, offs: Local, *rest: Any, **kwargs: Any) -> Local:
        rows = Rows(e, offs)
        if not products:
            return rows.back(e.same(rows.front(x), w, rows.offs, *rest, **kwargs))
        # columns of any length are aligned where they lie in memory as rows
        turned = rows.front(x, 1).permute([1, 0]).contiguous().permute([1, 0])
        return e.same(turned, rows.front(w), rows.offs, *rest, **kwargs)

    dims = [(("k",), ("s",)), RESULT, ((),)] if products else [ROWS, EXPERTS, ((),)]
    found = fit(node, dims, [EXPERTS if products else RESULT], [[0], [1]])
    if found is None:
        return None
    # the kernel wants pieces whose rows begin at multiples of 16 bytes
    odd = frozenset(f for f in ("k", "n") if found.sizes[f] % 512)
    flops = 2.0 * x.numel() * w.shape[-1]
    return fit(node, dims, [EXPERTS if products else RESULT], [[0], [1]], form=form, whole=odd, flops=flops)
