"""Reductions, scans, softmax and normalisations.

Kept dims are the factors ``d<i>``, reduced ones ``r<i>`` (``i`` is the operand's dim).  A sum of pieces is
``Partial``; what is not (a variance, a softmax) has a local form that reduces inside and is whole afterwards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands, results
from ..rules import Rule, define, dims, fit
from ..symbolic import IntExpr
from .forms import constant, highest, lowest, padded, stacked, stacked_positions, uneven

aten, prims = torch.ops.aten, torch.ops.prims


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of a node by the name it has in the op's schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = node.target._schema.arguments
    for i, arg in enumerate(schema):
        if arg.name == name:
            if i < len(node.args):
                return node.args[i]
            return arg.default_value if arg.has_default_value() else default
    return default


def reduced_dims(node: Node) -> list[int]:
    """The operand's dims that a reduction removes, from its ``dim`` argument."""
    ndim = node.args[0].meta["val"].dim()
    dim = argument(node, "dim", argument(node, "dims"))
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return sorted({d % ndim for d in ([dim] if isinstance(dim, int) else dim)}) if ndim else []


def reduction(node: Node, kept: Sequence[int] = (), **fields: Any) -> Rule | None:
    """Factors of a reduction of operand 0; every result loses the reduced dims (``keepdim`` leaves a size 1).

    ``kept`` lists results that keep all dims.
    """
    x = node.args[0].meta["val"]
    gone = reduced_dims(node)
    whole = tuple((f"r{i}" if i in gone else f"d{i}",) for i in range(x.dim()))
    res = []
    for i, r in enumerate(results(node)):
        if r is not None and (i in kept or (r.dim() == x.dim() and x.dim() > 0)):
            res.append(whole if i in kept else tuple(() if j in gone else d for j, d in enumerate(whole)))
        else:
            res.append(tuple(d for j, d in enumerate(whole) if j not in gone))
    return fit(node, [whole], res, **fields)


def shared(e: Emit) -> list[str]:
    """The reduced factors that a mesh axis shards."""
    return [f for f in e.sizes if f[0] == "r" and e.axes(f)]


def whole_sum(e: Emit, x: Node, op: str = "sum") -> Node:
    """Reduce a local result over every axis that shards a reduced factor."""
    for f in shared(e):
        x = e.all_reduce(x, f, op)
    return x


def same_op(e: Emit, *args: Any, **kwargs: Any) -> Node:
    return e.call(e.node.target, *args, **kwargs)


def all_of(gone: Sequence[int], op: str) -> dict[str, str]:
    return {f"r{i}": op for i in gone}


# --- sums, extremes, products -------------------------------------------------------------------------------


@define(aten.sum, aten.mean)
def _(node: Node) -> Rule | None:
    return reduction(node, linear=[[0]], form=_mean if node.target.overloadpacket is aten.mean else None)


def _mean(e: Emit, x: Node, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Node:
    if not shared(e):
        return same_op(e, x, *([] if e.node.target is aten.mean.default else [dim, keepdim]), dtype=dtype)
    count = math.prod(e.sizes[f] for f in e.sizes if f[0] == "r")
    total = e.call(aten.sum.dim_IntList, x, dim, keepdim, dtype=dtype or e.node.meta["val"].dtype)
    return e.call(aten.div.Tensor, total, count)


EXTREMES: dict[Any, tuple[str, Callable[[torch.dtype], Any]]] = {
    aten.amax.default: ("max", lowest),
    aten.amin.default: ("min", highest),
    aten.max.default: ("max", lowest),
    aten.min.default: ("min", highest),
    aten.prod: ("product", lambda dtype: 1),
    aten.any: ("max", lambda dtype: 0),
    aten.all: ("min", lambda dtype: 1),
}


@define(*EXTREMES)
def _(node: Node) -> Rule | None:
    """Partial in their own operation; a piece that may be empty is padded with its neutral element."""
    op, neutral = EXTREMES.get(node.target) or EXTREMES[node.target.overloadpacket]
    gone = reduced_dims(node)
    dtype = node.args[0].meta["val"].dtype
    through = [[0]] if node.target in (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default) else []
    if dtype.is_complex and op != "product":
        return None

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        for f in shared(e):
            x = padded(e, x, int(f[1:]), f, neutral(dtype))
        return same_op(e, x, *args, **kwargs)

    return reduction(node, reduce=all_of(gone, op), form=form, linear=through, linear_ops=(op,))


# --- positions of extremes ----------------------------------------------------------------------------------


@define(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _(node: Node) -> Rule | None:
    """Each device finds its own first extreme; values and global positions are gathered and compared."""
    gone = reduced_dims(node)
    x = node.args[0].meta["val"]
    if not gone or x.dtype.is_complex or x.dtype == torch.bool:
        return reduction(node, whole=frozenset(f"r{i}" for i in gone))
    form = _flat_position if argument(node, "dim") is None else _position
    return reduction(node, reduce=all_of(gone, "none"), form=form)


def _flat_position(e: Emit, x: Node, dim: None = None, keepdim: bool = False) -> Node:
    """The position among all elements: of equal extremes the one that comes first."""
    if not shared(e):
        return same_op(e, x, dim, keepdim)
    ndim, dtype = x.meta["val"].dim(), x.meta["val"].dtype
    big = e.node.target is aten.argmax.default
    for f in shared(e):
        x = padded(e, x, int(f[1:]), f, lowest(dtype) if big else highest(dtype))
    held = [e.size(f"r{i}") + int(uneven(e, f"r{i}")) for i in range(ndim)]
    flat = e.call(aten.reshape.default, x, [-1])
    at = e.call(e.node.target, flat, 0, True)
    value = e.call(aten.gather.default, flat, 0, at)
    index, stride = None, 1
    for i in reversed(range(ndim)):  # the local position, read in local sizes and written in global ones
        digit = e.call(aten.remainder.Scalar, at, held[i])
        at = e.call(aten.div.Tensor_mode, at, held[i], rounding_mode="trunc")
        term = e.call(aten.mul.Tensor, e.call(aten.add.Tensor, digit, e.offset(f"r{i}")), stride)
        index, stride = term if index is None else e.call(aten.add.Tensor, index, term), stride * e.sizes[f"r{i}"]
    for f in shared(e):
        value, _ = stacked(e, value, f, 0)
        index = stacked_positions(e, index, f, 0, 2 * stride)
    best = e.call(aten.amax.default if big else aten.amin.default, value, [0], True)
    hit = e.call(aten.eq.Tensor, value, best)
    if dtype.is_floating_point:
        hit = e.call(aten.bitwise_or.Tensor, hit, e.call(aten.isnan.default, value))
    first_hit = e.call(aten.where.self, hit, index, constant(e, highest(torch.int64), index))
    return e.call(aten.reshape.default, e.call(aten.amin.default, first_hit, [0]), [1] * ndim if keepdim else [])


def _position(e: Emit, x: Node, dim: int, keepdim: bool = False) -> Any:
    target = e.node.target
    if not shared(e):
        return same_op(e, x, dim, keepdim)
    (f,) = shared(e)
    dim, big = int(f[1:]), target in (aten.argmax.default, aten.max.dim)
    dtype = x.meta["val"].dtype
    x = padded(e, x, dim, f, lowest(dtype) if big else highest(dtype))
    extreme, find = (aten.max.dim, aten.argmax.default) if big else (aten.min.dim, aten.argmin.default)
    pair = e.call(extreme, x, dim, True)
    values, _ = stacked(e, e.call(operator.getitem, pair, 0), f, dim)
    where = e.call(aten.add.Tensor, e.call(operator.getitem, pair, 1), e.offset(f))
    where = stacked_positions(e, where, f, dim, e.sizes[f] + 1)
    best = e.call(find, values, dim, True)
    found = [e.call(aten.gather.default, v, dim, best) for v in (values, where)]
    if not keepdim:
        found = [e.call(aten.squeeze.dim, v, dim) for v in found]
    return tuple(found) if target in (aten.max.dim, aten.min.dim) else found[1]


# --- moments --------------------------------------------------------------------------------------


@define(aten.var.correction, aten.var_mean.correction)
def _(node: Node) -> Rule | None:
    if node.args[0].meta["val"].dtype.is_complex:
        return None
    return reduction(node, reduce=all_of(reduced_dims(node), "none"), form=_moments)


def _moments(e: Emit, x: Node, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    target = e.node.target
    if not shared(e):
        return same_op(e, x, dim, correction=correction, keepdim=keepdim)
    count = math.prod(e.sizes[f] for f in e.sizes if f[0] == "r")
    gone = reduced_dims(e.node)
    mean = e.call(aten.div.Tensor, whole_sum(e, e.call(aten.sum.dim_IntList, x, gone, True)), count)
    off = e.call(aten.sub.Tensor, x, mean)
    square = whole_sum(e, e.call(aten.sum.dim_IntList, e.call(aten.mul.Tensor, off, off), gone, keepdim))
    free = count - (1 if correction is None else correction)
    spread = e.call(aten.div.Tensor, square, max(free, 0.0))
    if target is aten.var.correction:
        return spread
    if not keepdim:
        mean = e.call(aten.squeeze.dims, mean, gone)
    return spread, mean


# --- scans --------------------------------------------------------------------------------------------------


def along(node: Node, letter: str = "s", **fields: Any) -> Rule | None:
    """Operands and results of one shape; the dim of argument ``dim`` is the factor ``letter``."""
    x = node.args[0].meta["val"]
    dim = argument(node, "dim")
    if x.dim() == 0 or dim is None:
        return fit(node, [((),) * o.meta["val"].dim() for o in operands(node)], [()] * len(results(node)))
    named = tuple((letter,) if i == dim % x.dim() else d for i, d in enumerate(dims("d", x.dim())))
    return fit(node, [named] * len(operands(node)), [named] * len(results(node)), **fields)


# the neutral element of each scan, and how what comes before is combined with what is local
SCANS: dict[Any, tuple[Callable[[torch.dtype], Any], Any]] = {
    aten.cumsum.default: (lambda dtype: 0, aten.add.Tensor),
    aten.cumprod.default: (lambda dtype: 1, aten.mul.Tensor),
    aten.logcumsumexp.default: (lambda dtype: -math.inf, aten.logaddexp.default),
    aten.cummax.default: (lowest, aten.ge.Tensor),
    aten.cummin.default: (highest, aten.le.Tensor),
}


@define(*SCANS)
def _(node: Node) -> Rule | None:
    """A local scan, combined with a scan of the totals before it: one value a row and device travels."""
    if node.target is aten.logcumsumexp.default and node.meta["val"].dtype.is_complex:
        return along(node, whole=frozenset("s"))
    linear = [[0]] if node.target is aten.cumsum.default else []
    return along(node, linear=linear, form=_scan, reduce={"s": "none"})


def _scan(e: Emit, x: Node, dim: int, **kwargs: Any) -> Any:
    if not e.axes("s"):
        return same_op(e, x, dim, **kwargs)
    neutral, combine = SCANS[e.node.target]
    dim, fill = dim % x.meta["val"].dim(), neutral(x.meta["val"].dtype)
    pairs = isinstance(e.node.meta["val"], (tuple, list))
    size, here = e.size("s"), e.place("s")

    def scan(x: Node) -> list[Node]:
        made = same_op(e, x, dim, **kwargs)
        return [e.call(operator.getitem, made, i) for i in range(2)] if pairs else [made]

    def part(x: Node, begin: IntExpr, end: IntExpr) -> Node:
        return e.call(aten.slice.Tensor, x, dim, begin, end)

    def after(x: Node, value: Any) -> Node:
        return e.call(aten.constant_pad_nd.default, x, [0, 0] * (x.meta["val"].dim() - 1 - dim) + [1, 0], value)

    local = scan(padded(e, x, dim, "s", fill))
    last = size if uneven(e, "s") else size - 1
    totals = [stacked(e, part(local[0], last, last + 1), "s", dim)[0]]
    if pairs:
        local[1] = e.call(aten.add.Tensor, local[1], e.offset("s"))
        totals.append(stacked_positions(e, part(local[1], last, last + 1), "s", dim, e.sizes["s"] + 1))
    before = [part(v, here, here + 1) for v in scan(after(totals[0], fill))]
    own = part(local[0], 0, size)
    if not pairs:
        return e.call(combine, own, before[0])
    where = e.call(aten.gather.default, after(totals[1], 0), dim, before[1])
    newer = e.call(combine, own, before[0])  # of equals the later counts, and so does what is no number
    if x.meta["val"].dtype.is_floating_point:
        newer = e.call(aten.bitwise_or.Tensor, newer, e.call(aten.isnan.default, own))
    found = ((own, before[0]), (part(local[1], 0, size), where))
    return tuple(e.call(aten.where.self, newer, mine, theirs) for mine, theirs in found)
