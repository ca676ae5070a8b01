"""Operators that take a body: replicated at their borders, apart from the dim that `map` runs its body over."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import is_tensor, results
from ..rules import Rule, define, fit


@define(torch.ops.higher_order.map_impl)
def _(node: Node) -> Rule | None:
    """``map_impl(body, mapped, others)``: each device runs the body over its own slices."""
    mapped, others = ([a.meta["val"] for a in part if is_tensor(a.meta.get("val"))] for part in node.args[1:3])
    over = [(("m",), *((),) * (t.dim() - 1)) for t in mapped]
    made = [() if r is None else (("m",), *((),) * (r.dim() - 1)) for r in results(node)]
    return fit(node, [*over, *(((),) * t.dim() for t in others)], made, even=frozenset("m"))
