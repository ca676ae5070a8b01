"""Matrix products: linear in each factor of the product, jointly with an added bias."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands
from ..rules import Dims, Rule, define, dims, fit, rule
from ..symbolic import IntExpr
from .forms import first

aten = torch.ops.aten

rule(aten.mm, "m k, k n -> m n", linear=[[0], [1]], flops="m k n")
rule(aten.bmm, "b m k, b k n -> b m n", linear=[[0], [1]], flops="b m k n")
rule(aten.dot.default, "k, k -> ", linear=[[0], [1]], flops="k")
rule(aten.vdot.default, "k, k -> ", linear=[[0], [1]], flops="k")
rule(aten.mv.default, "m k, k -> m", linear=[[0], [1]], flops="m k")
rule(aten.outer.default, "m, n -> m n", linear=[[0], [1]], flops="m n")


def _added(e: Emit, bias: Node, *args: Node, **kwargs: object) -> Node:
    """With dims sharded that are summed over the bias counts on the first of their devices alone."""
    gone = [f for f in e.sizes if f not in "".join(PRODUCTS[e.node.target][2])]
    return e.call(e.node.target, first(e, bias, *gone), *args, **kwargs)


PRODUCTS = {
    aten.addmm.default: (("m", "k"), ("k", "n"), ("m", "n")),
    aten.addmv.default: (("m", "k"), ("k",), ("m",)),
    aten.baddbmm.default: (("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n")),
    aten.addbmm.default: (("b", "m", "k"), ("b", "k", "n"), ("m", "n")),
    aten.addr.default: (("m",), ("n",), ("m", "n")),
}


@define(*PRODUCTS)
def _(node: Node) -> Rule | None:
    left, right, out = (tuple((f,) for f in term) for term in PRODUCTS[node.target])
    bias = out[len(out) - operands(node)[0].meta["val"].dim() :]
    found = fit(node, [bias, left, right], [out], [[0, 1], [0, 2]], form=_added)
    if found is None:
        return None
    return dataclasses.replace(found, flops=2.0 * math.prod(found.sizes.values()))


@define(aten.linear.default)
def _(node: Node) -> Rule | None:
    x, w, *bias = (o.meta["val"] for o in operands(node))
    lead = dims("m", x.dim() - 1)
    ops = [(*lead, ("k",)), (("n",), ("k",)), *([(("n",),)] if bias else [])]

    def form(e: Emit, x: Node, w: Node, b: Node | None = None) -> Node:
        return e.call(aten.linear.default, x, w, *([first(e, b, "k")] if b is not None else []))

    linear = [[0, 2], [1, 2]] if bias else [[0], [1]]
    return fit(node, ops, [(*lead, ("n",))], linear, form=form, flops=2.0 * x.numel() * w.shape[0])


@define(aten.tensordot.default)
def _(node: Node) -> Rule | None:
    """Free dims are ``m<i>`` and ``n<i>``, those summed over ``k<i>``; on local pieces it is a product of matrices."""
    a, b = (o.meta["val"] for o in operands(node))
    left, right = node.args[2:4]
    rows = [i for i in range(a.dim()) if i not in left]
    columns = [i for i in range(b.dim()) if i not in right]
    of_a = tuple((f"k{left.index(i)}",) if i in left else (f"m{i}",) for i in range(a.dim()))
    of_b = tuple((f"k{right.index(i)}",) if i in right else (f"n{i}",) for i in range(b.dim()))

    def form(e: Emit, a: Node, b: Node, *_: Any) -> Node:
        def count(term: Dims, at: Sequence[int]) -> IntExpr:
            return math.prod(e.size(f) for i in at for f in term[i]) if at else 1

        def matrix(x: Node, term: Dims, outer: Sequence[int], inner: Sequence[int]) -> Node:
            if [*outer, *inner] != sorted([*outer, *inner]):
                x = e.call(aten.permute.default, x, [*outer, *inner])
            if len(outer) == len(inner) == 1:
                return x
            return e.call(aten.reshape.default, x, [count(term, outer), count(term, inner)])

        made = e.call(aten.mm.default, matrix(a, of_a, rows, left), matrix(b, of_b, right, columns))
        return made if len(rows) == len(columns) == 1 else e.call(aten.reshape.default, made, list(e.shape()))

    flops = 2.0 * a.numel() * math.prod(b.shape[i] for i in columns)
    made = (*(of_a[i] for i in rows), *(of_b[i] for i in columns))
    return fit(node, [of_a, of_b], [made], [[0], [1]], form=form, flops=flops)
