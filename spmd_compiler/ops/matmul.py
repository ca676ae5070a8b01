"""Matrix products: linear in each factor of the product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..ir import operands
from ..rules import Dims, Rule, define, fit, rule
from ..symbolic import IntExpr

aten = torch.ops.aten

rule(aten.mm, "m k, k n -> m n", linear=[[0], [1]], flops="m k n")
rule(aten.bmm, "b m k, b k n -> b m n", linear=[[0], [1]], flops="b m k n")


@define(aten.tensordot.default)
def _(node: Node) -> Rule | None:
    """Free dims are ``m<i>`` and ``n<i>``, those summed over ``k<i>``; on local pieces it is a product of matrices."""
    a, b = (o.meta["val"] for o in operands(node))
    left, right = node.args[2:4]
    rows = [i for i in range(a.dim()) if i not in left]
    columns = [i for i in range(b.dim()) if i not in right]
    of_a = tuple((f"k{left.index(i)}",) if i in left else (f"m{i}",) for i in range(a.dim()))
    of_b = tuple((f"k{right.index(i)}",) if i in right else (f"n{i}",) for i in range(b.dim()))

    def form(e: Emit, a: Local, b: Local, *_: Any) -> Local:
        def count(term: Dims, at: Sequence[int]) -> IntExpr:
            return math.prod(e.size(f) for i in at for f in term[i]) if at else 1

        def matrix(x: Local, term: Dims, outer: Sequence[int], inner: Sequence[int]) -> Local:
            if [*outer, *inner] != sorted([*outer, *inner]):
                x = x.permute([*outer, *inner])
            flat = len(outer) == len(inner) == 1
            return x if flat else x.reshape([count(term, outer), count(term, inner)])

        made = e.call(aten.mm.default, matrix(a, of_a, rows, left), matrix(b, of_b, right, columns))
        return made if len(rows) == len(columns) == 1 else made.reshape(list(e.shape()))

    flops = 2.0 * a.numel() * math.prod(b.shape[i] for i in columns)
    made = (*(of_a[i] for i in rows), *(of_b[i] for i in columns))
    return fit(node, [of_a, of_b], [made], [[0], [1]], form=form, flops=flops)
