"""Reductions, scans, softmax and normalisations.

Kept dims are the factors ``d<i>``, reduced ones ``r<i>`` (``i`` is the operand's dim).  A sum of pieces is
``Partial``; what is not (a variance, a softmax) has a local form that reduces inside and is whole afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..forms.reduce import SCANS, moments, neutralised, position, scan, shared, total
from ..forms.values import highest, lowest
from ..ir import argument, operands, results
from ..rules import Rule, define, dims, fit

aten = torch.ops.aten


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


def all_of(gone: Sequence[int], op: str) -> dict[str, str]:
    return {f"r{i}": op for i in gone}


# --- sums, extremes, products -------------------------------------------------------------------------------


@define(aten.sum, aten.mean)
def _(node: Node) -> Rule | None:
    return reduction(node, linear=[[0]], form=_mean if node.target.overloadpacket is aten.mean else None)


def _mean(e: Emit, x: Local, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Local:
    if not shared(e):
        return e.same(x, *([] if e.node.target is aten.mean.default else [dim, keepdim]), dtype=dtype)
    return x.sum(dim, keepdim, dtype=dtype or e.node.meta["val"].dtype) / total(e)


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

    def form(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Local:
        return e.same(neutralised(e, x, neutral(dtype)), *args, **kwargs)

    return reduction(node, reduce=all_of(gone, op), form=form, linear=through, linear_ops=(op,))


# --- positions of extremes ----------------------------------------------------------------------------------


@define(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _(node: Node) -> Rule | None:
    """Each device finds its own first extreme; values and global positions are gathered and compared."""
    gone = reduced_dims(node)
    x = node.args[0].meta["val"]
    if not gone or x.dtype.is_complex or x.dtype == torch.bool:
        return reduction(node, whole=frozenset(f"r{i}" for i in gone))
    return reduction(node, reduce=all_of(gone, "none"), form=position)


# --- moments --------------------------------------------------------------------------------------


@define(aten.var.correction, aten.var_mean.correction)
def _(node: Node) -> Rule | None:
    if node.args[0].meta["val"].dtype.is_complex:
        return None
    return reduction(node, reduce=all_of(reduced_dims(node), "none"), form=moments)


# --- scans --------------------------------------------------------------------------------------------------


def along(node: Node, letter: str = "s", **fields: Any) -> Rule | None:
    """Operands and results of one shape; the dim of argument ``dim`` is the factor ``letter``."""
    x = node.args[0].meta["val"]
    dim = argument(node, "dim")
    if x.dim() == 0 or dim is None:
        return fit(node, [((),) * o.meta["val"].dim() for o in operands(node)], [()] * len(results(node)))
    named = tuple((letter,) if i == dim % x.dim() else d for i, d in enumerate(dims("d", x.dim())))
    return fit(node, [named] * len(operands(node)), [named] * len(results(node)), **fields)


@define(*SCANS)
def _(node: Node) -> Rule | None:
    """A local scan, combined with a scan of the totals before it: one value a row and device travels."""
    if node.target is aten.logcumsumexp.default and node.meta["val"].dtype.is_complex:
        return along(node, whole=frozenset("s"))
    linear = [[0]] if node.target is aten.cumsum.default else []
    return along(node, linear=linear, form=scan, reduce={"s": "none"})
