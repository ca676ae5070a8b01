"""Pooling: what slides a window (`forms.window`) without a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range
from ..emit import Emit, Local
from ..forms.values import lowest
from ..forms.window import Window, among, cover, covering, gather, settle, spread, trim, windows
from ..ir import argument, operands, results
from ..rules import Dims, Rule, define, dims, fit
from ..symbolic import IntExpr

aten, prims = torch.ops.aten, torch.ops.prims


def pooling(node: Node, found: Sequence[Window], **fields: Any) -> Rule | None:
    """The dims before the windowed ones are free; all operands and results have the same dims."""

    def term(t: torch.Tensor | None) -> Dims:
        return () if t is None else (*dims("d", t.dim() - len(found)), *((w.factor,) for w in found))

    ops, res = ([term(t) for t in side] for side in ([o.meta["val"] for o in operands(node)], results(node)))
    return fit(node, ops, res, windows=[w.factor for w in found], **fields)


def pooled(node: Node, count: int, wide: torch.Tensor, narrow: torch.Tensor, dilated: bool = False) -> list[Window]:
    """The windows of a pooling op's arguments."""
    kernel = argument(node, "kernel_size")
    steps = [kernel, argument(node, "stride") or kernel, argument(node, "padding")]
    return windows(wide, narrow, count, *steps, *([argument(node, "dilation")] if dilated else []))


def unpadded(found: Sequence[Window], dilated: bool = False) -> list[Any]:
    """Kernel, stride, no padding (and dilation) of the local call."""
    made = [[w.kernel for w in found], [w.stride for w in found], [0] * len(found)]
    return [*made, [w.dilation for w in found]] if dilated else made


def wider(x: Local) -> Local:
    """``x`` in a dtype in which a sum may be divided without being rounded first."""
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


@define(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default)  # fmt: skip
def _(node: Node) -> Rule | None:
    """A sum over the window, divided by what the window counts where that differs from place to place."""
    backward = "backward" in node.target._schema.name
    x, count = node.args[int(backward)].meta["val"], 2 if "2d" in node.target._schema.name else 3
    narrow = node.args[0].meta["val"] if backward else node.meta["val"]
    found = pooled(node, count, x, narrow)
    if x.dim() == count:
        return None
    divisor, padded = argument(node, "divisor_override"), argument(node, "count_include_pad")
    outside = [w for w in found if w.pad or (w.narrow - 1) * w.stride + w.extent > w.wide + w.pad]
    if divisor is None and outside:
        divided, divisor = True, 1
    else:
        divided = False

    def scale(e: Emit, y: Local, ranges: Sequence[Sequence[Range]]) -> Local:
        """``y``, of these ranges of narrow elements, by the number of elements that its windows count."""
        if not divided:
            return y
        total: Any = math.prod(w.kernel for w in found if w not in outside)
        for w, mine in zip(found, ranges, strict=True):
            if w not in outside:
                continue
            low = e.count(e.mine(w.factor, mine)[0], e.length(w.factor, mine), y) * w.stride - w.pad
            high = (low + w.kernel).clamp_max(w.wide + w.pad)
            if not padded:
                low, high = low.clamp_min(0), high.clamp_max(w.wide)
            total = (high - low).clamp_min(1).along(w.dim, x.dim()) * total
        return y / total.to(y.dtype)

    def form(e: Emit, *args: Any, **kwargs: Any) -> Local:
        if not among(e, found):
            return e.same(*args, **kwargs)
        rest, dtype = [*unpadded(found), False, True, divisor], args[0].dtype
        if not backward:
            made = trim(e, e.same(wider(gather(e, args[0], found)), *rest), found)
            return scale(e, made, [e.pieces(w.factor, w.narrow) for w in found]).to(dtype)
        grad = scale(e, wider(cover(e, args[0], found)), covering(e, found))
        return settle(e, e.same(grad, wider(spread(e, args[1], found)), *rest), found).to(dtype)

    return pooling(node, found, linear=[[0]], form=form, nonempty=True)


def plane(index: Local, sizes: Sequence[IntExpr]) -> list[Local]:
    """The coordinates in a box of an index into its elements."""
    made = []
    for n in reversed(sizes):
        made.append(index % n)
        index = index // n
    return made[::-1]


def flat(places: Sequence[Local], sizes: Sequence[IntExpr]) -> Local:
    """Undo `plane`."""
    index = places[0]
    for place, n in zip(places[1:], sizes[1:], strict=True):
        index = index * n + place
    return index


@define(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
        "prims::_low_memory_max_pool_with_offsets")  # fmt: skip
def _(node: Node) -> Rule | None:
    """Padding never wins.  Indices count in the whole plane, offsets in the window."""
    x, out = node.args[0].meta["val"], results(node)[0]
    name = node.target._schema.name
    count = 3 if "3d" in name else 2 if "2d" in name else len(node.args[1])
    if x.dim() == count or out is None:
        return None
    found = pooled(node, count, x, out, dilated=True)

    def form(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Any:
        if not among(e, found):
            return tuple(e.same(x, *args, **kwargs))
        x = gather(e, x, found, lowest(x.dtype))
        values, index = (trim(e, m, found) for m in e.same(x, *unpadded(found, dilated=True), False))
        if "offsets" in name:
            return values, index
        spans = [[w.span(*r) for r in e.pieces(w.factor, w.narrow)] for w in found]
        places = plane(index, [e.length(w.factor, s) for w, s in zip(found, spans, strict=True)])
        begins = [e.mine(w.factor, s)[0] for w, s in zip(found, spans, strict=True)]
        places = [(p + b).clamp(0, w.wide - 1) for p, b, w in zip(places, begins, found, strict=True)]
        return values, flat(places, [w.wide for w in found])

    return pooling(node, found, form=form, nonempty=True)


@define("prims::_low_memory_max_pool_offsets_to_indices")
def _(node: Node) -> Rule | None:
    kernel, plane_, stride = node.args[1:4]
    n = node.meta["val"].dim()
    lead = n - len(kernel)

    def form(e: Emit, *args: Any) -> Local:
        made = e.same(*args)
        for i, s in enumerate(stride):
            if e.axes(f"d{lead + i}"):
                made = made + e.offset(f"d{lead + i}") * s * math.prod(plane_[i + 1 :])
        return made

    return fit(node, [dims("d", n)], [dims("d", n)], form=form)


@define(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _(node: Node) -> Rule | None:
    """Each element of the gradient goes to where its index points, if that is here."""
    grad, x = (o.meta["val"] for o in operands(node)[:2])
    count = 3 if "3d" in node.target._schema.name else 2
    if x.dim() == count:
        return None
    found = pooled(node, count, x, grad, dilated=True)

    def form(e: Emit, grad: Local, x: Local, *args: Any) -> Local:
        index, sizes, lead = args[-1], [w.wide for w in found], list(e.shape()[:-count])
        taken, spare = math.prod(w.narrow for w in found), 0
        if among(e, found):
            grad, index = cover(e, grad, found), cover(e, index, found, -1)
            taken = math.prod(e.length(w.factor, r) for w, r in zip(found, covering(e, found), strict=True))
            inside, places = index >= 0, plane(index, sizes)
            for i, w in enumerate(found):
                own = e.pieces(w.factor, w.wide)
                places[i], sizes[i] = places[i] - e.mine(w.factor, own)[0], e.length(w.factor, own)
                inside = inside & ((places[i] >= 0) & (places[i] < sizes[i]))
            spare = 1  # what points elsewhere falls into a place behind the last
            index = inside.where(flat(places, sizes), math.prod(sizes))
        total, device = math.prod(sizes), grad.val.device
        made = e.call(aten.full.default, [*lead, total + spare], 0, dtype=grad.dtype, device=device)
        index, grad = (v.reshape([*lead, taken]) for v in (index, grad))
        made = e.call(aten.scatter_add.default, made, len(lead), index, grad)
        return (made.slice(len(lead), 0, total) if spare else made).reshape([*lead, *sizes])

    return pooling(node, found, linear=[[0]], form=form)


@define(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
        aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)  # fmt: skip
def _(node: Node) -> Rule | None:
    """Windows lie where samples say: the dims before the windowed ones are free."""
    name = node.target._schema.name
    given, count = operands(node), 2 if "2d" in name else 3
    lead = given[0].meta["val"].dim() - count
    if lead < 2:  # the samples have a batch dim at any rate
        return None

    def term(t: torch.Tensor | None) -> Dims:
        return () if t is None else dims("d", t.dim(), range(lead, t.dim()))

    linear = [[0]] if "backward" in name else []
    return fit(node, [term(g.meta["val"]) for g in given], [term(r) for r in results(node)], linear, nonempty=True)
