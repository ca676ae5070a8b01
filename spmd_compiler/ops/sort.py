"""Orders: the sorted dim may be sharded too (`forms.order`)."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..forms.order import kth, sort, topk
from ..ir import argument
from ..rules import Rule, define, dims, fit
from .reduce import all_of, along, reduced_dims, reduction

aten = torch.ops.aten


@define(aten.sort.default, aten.sort.stable)
def _(node: Node) -> Rule | None:
    return along(node, form=sort, reduce={"s": "none"})


@define(aten.kthvalue.default, aten.median, aten.nanmedian)
def _(node: Node) -> Rule | None:
    if node.args[0].meta["val"].numel() == 0:
        return None
    return reduction(node, form=kth, reduce=all_of(reduced_dims(node), "none"))


@define(aten.topk.default)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    if x.dim() == 0:
        return fit(node, [()], [(), ()])
    dim = argument(node, "dim") % x.dim()
    rest = dims("d", x.dim(), [dim])
    named = (*rest[:dim], ("s",), *rest[dim + 1 :])
    return fit(node, [named], [rest, rest], form=topk, reduce={"s": "none"})


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
