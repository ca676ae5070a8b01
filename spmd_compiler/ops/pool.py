"""Pooling, `unfold` and resizing: what slides a window (`window.Window`) without a weight."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range
from ..ir import Emit, operands, results
from ..rules import Dims, Rule, define, dims, fit
from ..symbolic import IntExpr, table
from .forms import constant, counted, lowest
from .ranges import same
from .reduce import argument
from .view import moved
from .window import (
    Adaptive,
    Window,
    among,
    cover,
    covering,
    emptied,
    filled,
    gather,
    settle,
    spread,
    trim,
    windows,
)

aten, prims = torch.ops.aten, torch.ops.prims


def _dims(t: torch.Tensor | None, found: Sequence[Window]) -> Dims:
    return () if t is None else (*dims("d", t.dim() - len(found)), *((w.factor,) for w in found))


def lead_first(e: Emit, target: Any, given: Sequence[Node], *args: Any, arrange: Any = None, **kwargs: Any) -> Any:
    """A call whose dims before the windowed ones (factors ``d<i>``) are never empty; all tensors have them.

    ``arrange`` makes all arguments of the tensors where they don't come first.
    """
    lead = [(i, f"d{i}") for i in range(given[0].meta["val"].dim()) if e.axes(f"d{i}")]
    full = list(given)
    for d, f in lead:
        full = [filled(e, x, d, f, e.sizes[f]) for x in full]
    made = e.call(target, *(arrange(*full) if arrange else (*full, *args)), **kwargs)
    several = isinstance(made.meta["val"], (tuple, list))
    parts = [e.call(operator.getitem, made, i) for i in range(2)] if several else [made]
    for d, f in lead:
        parts = [emptied(e, x, d, f, e.sizes[f]) for x in parts]
    return tuple(parts) if several else parts[0]


def pooling(node: Node, found: Sequence[Window], **fields: Any) -> Rule | None:
    """The dims before the windowed ones are free; all operands and results have the same dims."""
    return fit(
        node, [_dims(o.meta["val"], found) for o in operands(node)], [_dims(r, found) for r in results(node)],
        windows=[w.factor for w in found], **fields,
    )  # fmt: skip


def pooled(node: Node, count: int, wide: torch.Tensor, narrow: torch.Tensor, dilated: bool = False) -> list[Window]:
    """The windows of a pooling op's arguments."""
    kernel = argument(node, "kernel_size")
    steps = [kernel, argument(node, "stride") or kernel, argument(node, "padding")]
    return windows(wide, narrow, count, *steps, *([argument(node, "dilation")] if dilated else []))


def unpadded(found: Sequence[Window], dilated: bool = False) -> list[Any]:
    """Kernel, stride, no padding (and dilation) of the local call."""
    made = [[w.kernel for w in found], [w.stride for w in found], [0] * len(found)]
    return [*made, [w.dilation for w in found]] if dilated else made


def tabled(e: Emit, w: Window, ranges: Sequence[Range]) -> tuple[IntExpr, IntExpr]:
    """The begin and the size of the local one of ranges."""
    place = e.place(w.factor)
    return table([b for b, _ in ranges], place), table([end - b for b, end in ranges], place)


def numbers(e: Emit, w: Window, ranges: Sequence[Range], x: Node) -> Node:
    """The numbers in the local one of ranges."""
    return counted(e, *tabled(e, w, ranges), x)


def wider(e: Emit, x: Node) -> Node:
    """``x`` in a dtype in which a sum may be divided without being rounded first."""
    coarse = x.meta["val"].dtype in (torch.bfloat16, torch.float16)
    return e.call(prims.convert_element_type.default, x, torch.float32) if coarse else x


def like(e: Emit, x: Node, dtype: torch.dtype) -> Node:
    """``x`` in ``dtype``."""
    return x if x.meta["val"].dtype == dtype else e.call(prims.convert_element_type.default, x, dtype)


def along(e: Emit, x: Node, dim: int, ndim: int) -> Node:
    """A vector as dim ``dim`` of ``ndim``."""
    return e.call(aten.reshape.default, x, [-1 if d == dim else 1 for d in range(ndim)])


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

    def scale(e: Emit, y: Node, ranges: Sequence[Sequence[Range]]) -> Node:
        """``y``, of these ranges of narrow elements, by the number of elements that its windows count."""
        if not divided:
            return y
        ndim, value = x.dim(), y.meta["val"]
        total: Any = math.prod(w.kernel for w in found if w not in outside)
        for w, mine in zip(found, ranges, strict=True):
            if w not in outside:
                continue
            low = e.call(aten.sub.Tensor, e.call(aten.mul.Tensor, numbers(e, w, mine, y), w.stride), w.pad)
            high = e.call(aten.clamp_max.default, e.call(aten.add.Tensor, low, w.kernel), w.wide + w.pad)
            if not padded:
                low = e.call(aten.clamp_min.default, low, 0)
                high = e.call(aten.clamp_max.default, high, w.wide)
            count = e.call(aten.clamp_min.default, e.call(aten.sub.Tensor, high, low), 1)
            total = e.call(aten.mul.Tensor, along(e, count, w.dim, ndim), total)
        return e.call(aten.div.Tensor, y, e.call(prims.convert_element_type.default, total, value.dtype))

    def form(e: Emit, *args: Any, **kwargs: Any) -> Node:
        if not among(e, found):
            return lead_first(e, node.target, args[: 1 + backward], *args[1 + backward :], **kwargs)
        rest, dtype = [*unpadded(found), False, True, divisor], args[0].meta["val"].dtype
        if not backward:
            made = lead_first(e, node.target, [wider(e, gather(e, args[0], found))], *rest)
            made = scale(e, trim(e, made, found), [e.pieces(w.factor, w.narrow) for w in found])
        else:
            grad = scale(e, wider(e, cover(e, args[0], found)), covering(e, found))
            made = lead_first(e, node.target, [grad, wider(e, spread(e, args[1], found))], *rest)
            made = settle(e, made, found)
        return like(e, made, dtype)

    return pooling(node, found, linear=[[0]], form=form)


def plane(e: Emit, index: Node, sizes: Sequence[IntExpr]) -> list[Node]:
    """The coordinates in a box of an index into its elements."""
    made = []
    for n in reversed(sizes):
        made.append(e.call(aten.remainder.Scalar, index, n))
        index = e.call(aten.div.Tensor_mode, index, n, rounding_mode="floor")
    return made[::-1]


def flat(e: Emit, places: Sequence[Node], sizes: Sequence[IntExpr]) -> Node:
    """Undo `plane`."""
    index = places[0]
    for place, n in zip(places[1:], sizes[1:], strict=True):
        index = e.call(aten.add.Tensor, e.call(aten.mul.Tensor, index, n), place)
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

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Any:
        if not among(e, found):
            return lead_first(e, node.target, [x], *args, **kwargs)
        x = gather(e, x, found, lowest(x.meta["val"].dtype))
        made = lead_first(e, node.target, [x], *unpadded(found, dilated=True), False)
        values, index = (trim(e, m, found) for m in made)
        if "offsets" in name:
            return values, index
        begin, size = zip(
            *(tabled(e, w, [w.span(*r) for r in e.pieces(w.factor, w.narrow)]) for w in found), strict=True
        )
        places = [
            e.call(aten.clamp.default, e.call(aten.add.Tensor, p, b), 0, w.wide - 1)
            for p, b, w in zip(plane(e, index, size), begin, found, strict=True)
        ]
        return values, flat(e, places, [w.wide for w in found])

    return pooling(node, found, form=form)


@define("prims::_low_memory_max_pool_offsets_to_indices")
def _(node: Node) -> Rule | None:
    kernel, plane_, stride = node.args[1:4]
    n = node.meta["val"].dim()
    lead = n - len(kernel)

    def form(e: Emit, *args: Any) -> Node:
        made = same(e, *args)
        for i, s in enumerate(stride):
            if e.axes(f"d{lead + i}"):
                made = e.call(aten.add.Tensor, made, e.offset(f"d{lead + i}") * s * math.prod(plane_[i + 1 :]))
        return made

    return fit(node, [dims("d", n)], [dims("d", n)], form=form)


@define(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)  # fmt: skip
def _(node: Node) -> Rule | None:
    """Each element of the gradient goes to where its index points, if that is here."""
    grad, x = (o.meta["val"] for o in operands(node)[:2])
    name = node.target._schema.name
    count = 3 if "3d" in name else 2
    if x.dim() == count:
        return None
    if "adaptive" in name:
        found: Sequence[Window] = adaptive(x, grad, count)
    else:
        found = pooled(node, count, x, grad, dilated=True)

    def form(e: Emit, grad: Node, x: Node, *args: Any) -> Node:
        index, sizes = args[-1], [w.wide for w in found]
        lead, value = list(e.shape()[:-count]), grad.meta["val"]
        taken, spare = math.prod(w.narrow for w in found), 0
        if among(e, found):
            grad, index = cover(e, grad, found), cover(e, index, found, -1)
            begin, size = zip(*(tabled(e, w, e.pieces(w.factor, w.wide)) for w in found), strict=True)
            taken = math.prod(tabled(e, w, r)[1] for w, r in zip(found, covering(e, found), strict=True))
            inside = e.call(aten.ge.Scalar, index, 0)
            places = [e.call(aten.sub.Tensor, p, b) for p, b in zip(plane(e, index, sizes), begin, strict=True)]
            for p, n in zip(places, size, strict=True):
                here = e.call(aten.ge.Scalar, p, 0), e.call(aten.lt.Scalar, p, n)
                inside = e.call(aten.bitwise_and.Tensor, inside, e.call(aten.bitwise_and.Tensor, *here))
            sizes, spare = list(size), 1  # what points elsewhere falls into a place behind the last
            index = e.call(
                aten.where.self, inside, flat(e, places, sizes), constant(e, math.prod(sizes), index)
            )
        made = e.call(aten.full.default, [*lead, math.prod(sizes) + spare], 0, dtype=value.dtype, device=value.device)
        index, grad = (e.call(aten.reshape.default, v, [*lead, taken]) for v in (index, grad))
        made = e.call(aten.scatter_add.default, made, len(lead), index, grad)
        if spare:
            made = e.call(aten.slice.Tensor, made, len(lead), 0, math.prod(sizes))
        return e.call(aten.reshape.default, made, [*lead, *sizes])

    return pooling(node, found, linear=[[0]], form=form)


# --- adaptive pooling -----------------------------------------------------------------------------------------


def adaptive(wide: torch.Tensor, narrow: torch.Tensor, count: int) -> list[Window]:
    lead = wide.dim() - count
    return [Adaptive(lead + i, f"w{i}", wide.shape[lead + i], narrow.shape[lead + i]) for i in range(count)]


def means(e: Emit, w: Window, x: Node, rows: Sequence[Range], columns: Sequence[Range]) -> Node:
    """The matrix that takes wide elements (columns) to the means of narrow ones (rows), of the ranges given."""

    def share(o: Node, more: int) -> Node:
        over = e.call(aten.add.Tensor, e.call(aten.mul.Tensor, o, w.wide), more)
        return e.call(aten.div.Tensor_mode, over, w.narrow, rounding_mode="floor")

    o, i = e.call(aten.unsqueeze.default, numbers(e, w, rows, x), 1), numbers(e, w, columns, x)
    low, high = share(o, 0), share(o, w.wide + w.narrow - 1)
    hit = e.call(aten.bitwise_and.Tensor, e.call(aten.ge.Tensor, i, low), e.call(aten.lt.Tensor, i, high))
    hit = e.call(prims.convert_element_type.default, hit, x.meta["val"].dtype)
    return e.call(aten.div.Tensor, hit, e.call(aten.sub.Tensor, high, low))


def contract(e: Emit, x: Node, dim: int, matrix: Node, sizes: list[IntExpr], rows: IntExpr) -> Node:
    """``matrix`` times dim ``dim`` of ``x``; ``sizes``, those of ``x``, become those of the result."""
    order = [d for d in range(len(sizes)) if d != dim] + [dim]
    lead = [sizes[d] for d in order[:-1]]
    x = e.call(aten.reshape.default, e.call(aten.permute.default, x, order), [math.prod(lead), sizes[dim]])
    x = e.call(aten.mm.default, x, e.call(aten.permute.default, matrix, [1, 0]))
    sizes[dim] = rows
    x = e.call(aten.reshape.default, x, [*lead, rows])
    return e.call(aten.permute.default, x, [order.index(d) for d in range(len(order))])


@define(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)  # fmt: skip
def _(node: Node) -> Rule | None:
    """Of sharded dims a product with the matrix of means."""
    backward = "backward" in node.target._schema.name
    count = 2 if "2d" in node.target._schema.name else 3
    narrow, wide = (v if backward else v2 for v, v2 in zip(
        (node.args[0].meta["val"], node.meta["val"]), (node.meta["val"], node.args[0].meta["val"]), strict=True
    ))  # fmt: skip
    if wide.dim() == count:
        return None
    found = adaptive(wide, narrow, count)

    def form(e: Emit, x: Node, *args: Any) -> Node:
        if not among(e, found):
            given = [x, *args[:1]] if backward else [x]
            return lead_first(e, node.target, given, *args[int(backward) :])
        dtype = x.meta["val"].dtype
        x = wider(e, cover(e, x, found) if backward else gather(e, x, found))
        taken = covering(e, found) if backward else [[w.span(*r) for r in e.pieces(w.factor, w.narrow)] for w in found]
        sizes = [*e.shape()[:-count], *(tabled(e, w, r)[1] for w, r in zip(found, taken, strict=True))]
        for w, ranges in zip(found, taken, strict=True):
            mine = e.pieces(w.factor, w.wide if backward else w.narrow)
            matrix = means(e, w, x, ranges if backward else mine, mine if backward else ranges)
            if backward:
                matrix = e.call(aten.permute.default, matrix, [1, 0])
            x = contract(e, x, w.dim, matrix, sizes, tabled(e, w, mine)[1])
        return like(e, x, dtype)

    return fit(
        node, [_dims(o.meta["val"], found) for o in operands(node)], [_dims(node.meta["val"], found)], [[0]],
        windows=[w.factor for w in found], form=form,
    )  # fmt: skip


# --- others -------------------------------------------------------------------------------------------------


@define(aten.unfold.default)
def _(node: Node) -> Rule | None:
    x, out = node.args[0].meta["val"], node.meta["val"]
    if x.dim() == 0:
        return None
    dim = node.args[1] % x.dim()
    w = Window(dim, f"d{dim}", x.shape[dim], out.shape[dim], node.args[2], node.args[3])

    def form(e: Emit, x: Node, *args: Any) -> Node:
        return trim(e, same(e, gather(e, x, [w]) if e.axes(w.factor) else x, *args), [w])

    old = dims("d", x.dim())
    return moved(node, [old], [(*old, ())], windows=[w.factor], form=form)


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

    def form(e: Emit, *args: Any) -> Any:
        tensors = [i for i, a in enumerate(args) if isinstance(a, Node)]

        def call(*full: Any) -> Any:
            feed = dict(zip(tensors, full, strict=True))
            return [feed.get(i, a) for i, a in enumerate(args)]

        return lead_first(e, node.target, [args[i] for i in tensors], arrange=call)

    linear = [[0]] if "backward" in name else []
    return fit(node, [term(g.meta["val"]) for g in given], [term(r) for r in results(node)], linear, form=form)
