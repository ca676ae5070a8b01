"""Orders: the sorted dim stays whole, every other dim may be sharded."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..rules import Rule, define, dims, fit
from .reduce import along, argument, reduced_dims, reduction

aten = torch.ops.aten


@define(aten.sort, aten.argsort, aten.msort)
def _(node: Node) -> Rule | None:
    return along(node, whole=frozenset("s"))


@define(aten.topk.default)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    rest = dims("d", x.dim(), [argument(node, "dim") % x.dim()] if x.dim() else ())
    return fit(node, [rest], [rest, rest])


@define(aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def _(node: Node) -> Rule | None:
    return reduction(node, whole=frozenset(f"r{i}" for i in reduced_dims(node)))


@define(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def _(node: Node) -> Rule | None:
    """Values may be sharded, a one-dimensional list of boundaries is whole."""
    if argument(node, "sorter") is not None:
        return None
    order = [1, 0] if node.target is aten.bucketize.Tensor else [0, 1]
    bounds, values = (node.args[i].meta["val"] for i in order)
    if bounds.dim() != 1:
        return None
    whole = dims("d", values.dim())
    terms = [((),), whole]
    return fit(node, [terms[i] for i in order], [whole])


@define(aten.histc.default)
def _(node: Node) -> Rule | None:
    """Counts add up where the range is given."""
    low, high = argument(node, "min"), argument(node, "max")
    if low == high:
        return None
    return fit(node, [dims("r", node.args[0].meta["val"].dim())], [((),)])
