"""Parts of a dim, and dims put together of parts: slices, pads, concatenations, turns.

The dim is a window factor, its sizes before and after cut in as many pieces; each device fetches the range of the
operand that its piece of the result lacks (`Emit.pull`).  Of what is too small to be cut, a single element, the
device that holds it contributes it and the others zero: a partial sum.  (`decompositions` makes slices of splits and
selections, and comparisons of what puts a part into a whole.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range
from ..emit import Emit, Local
from ..forms.ranges import around, stepped
from ..ir import argument, operands
from ..rules import Rule, contributed, define, dims, fit, moved

aten, prims = torch.ops.aten, torch.ops.prims


@define(aten.slice.Tensor)
def _(node: Node) -> Rule | None:
    x, out = node.args[0].meta["val"], node.meta["val"]
    dim, step = argument(node, "dim") % x.dim(), argument(node, "step")
    n, m = x.shape[dim], out.shape[dim]
    begin = argument(node, "start") or 0
    begin = min(max(begin + n if begin < 0 else begin, 0), n)
    old, rest, factor = dims("d", x.dim()), dims("d", x.dim(), [dim]), f"d{dim}"
    if n == m:
        return moved(node, [old], [old], form=lambda e, x, *_, **__: x.alias())
    if m == 0:
        return moved(node, [rest], [rest])

    def form(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Local:
        if not e.axes(factor):
            return e.same(x, *args, **kwargs)
        if m == 1:
            held = e.pieces(factor, n)
            return e.crop(x, dim, factor, held, [(begin, begin + 1)] * len(held))
        if step > 1:
            return stepped(e, x, dim, factor, n, begin, step, m)
        return e.pull(x, dim, factor, n, m, lambda b, end: [(b + begin, end + begin)])

    return moved(node, [old], [old if m > 1 else rest], windows=[factor], form=form, reduce=contributed(x, factor))


@define(aten.constant_pad_nd.default)
def _(node: Node) -> Rule | None:
    """Padding with zeros is linear."""
    x, pad = node.args[0].meta["val"], node.args[1]
    value = argument(node, "value", 0)
    pairs = {x.dim() - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = {dim: pair for dim, pair in pairs.items() if any(pair)}
    old = dims("d", x.dim())

    def form(e: Emit, y: Local, *args: Any, **kwargs: Any) -> Local:
        left = [0 if e.axes(f"d{len(old) - 1 - i // 2}") else n for i, n in enumerate(pad)]
        if any(left) or not padded:
            y = e.call(aten.constant_pad_nd.default, y, left, value)
        for dim, (before, after) in padded.items():
            if e.axes(f"d{dim}"):
                n, shift = x.shape[dim], before
                y = e.pull(y, dim, f"d{dim}", n, n + before + after, lambda b, end: [(b - shift, end - shift)], value)  # noqa: B023
        return y

    linear = [[0]] if value == 0 or not padded else []
    return fit(node, [old], [old], linear, windows=[f"d{d}" for d in padded], form=form)


@define(aten.cat.default, prims.cat.default)
def _(node: Node) -> Rule | None:
    given = [o.meta["val"] for o in operands(node)]
    if any(g.dim() != given[0].dim() for g in given) or len({g.dtype for g in given}) > 1:
        return None
    ndim = given[0].dim()
    dim = argument(node, "dim") % ndim
    old, rest, factor = dims("d", ndim), dims("d", ndim, [dim]), f"d{dim}"

    def form(e: Emit, xs: Sequence[Local], *args: Any) -> Local:
        if not e.axes(factor):
            return e.same(list(xs), *args)
        made, begin = [], 0
        for x, g in zip(xs, given, strict=True):
            n, low = g.shape[dim], begin

            def own(b: int, end: int, n: int = n, low: int = low) -> list[Range]:
                return [(min(max(b - low, 0), n), min(max(end - low, 0), n))]

            if n > 1:
                made.append(e.pull(x, dim, factor, n, e.sizes[factor], own))
            else:
                made.append(e.cut(x, dim, factor, [own(*r)[0] for r in e.pieces(factor)]))
            begin += n
        return e.call(aten.cat.default, made, dim)

    return moved(node, [old if g.shape[dim] > 1 else rest for g in given], [old], windows=[factor], form=form)


@define(aten.flip.default, prims.rev.default)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    turned = [d % x.dim() for d in node.args[1]] if x.dim() else []

    def form(e: Emit, y: Local, listed: Sequence[int]) -> Local:
        for d in turned:
            if e.axes(f"d{d}"):
                n = x.shape[d]
                y = e.pull(y, d, f"d{d}", n, n, lambda b, end: [(n - end, n - b)])  # noqa: B023
        return e.same(y, listed)

    return moved(node, [dims("d", x.dim())], [dims("d", x.dim())], windows=[f"d{d}" for d in turned], form=form)


@define(aten.repeat.default)
def _(node: Node) -> Rule | None:
    x, times = node.args[0].meta["val"], node.args[1]
    lead = len(times) - x.dim()
    more = [d for d in range(x.dim()) if times[lead + d] > 1 and x.shape[d] > 1]
    old = dims("d", x.dim(), [d for d in range(x.dim()) if times[lead + d] != 1 and d not in more])

    def form(e: Emit, y: Local, times: Sequence[int]) -> Local:
        for d in more:
            if e.axes(f"d{d}"):
                n, t = x.shape[d], times[lead + d]
                y = e.pull(y, d, f"d{d}", n, n * t, lambda b, end: around(b, end - b, n, t + 1))  # noqa: B023
                times = [1 if i == lead + d else t for i, t in enumerate(times)]
        return e.same(y, list(times))

    return moved(node, [old], [((),) * lead + old], windows=[f"d{d}" for d in more], form=form)
