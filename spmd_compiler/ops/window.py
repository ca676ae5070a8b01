"""Convolutions, pooling and resizing: batch and channels may be sharded, windowed dims are whole.

(The halo exchange that a sharded windowed dim needs is not written yet.)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands, results
from ..rules import Dims, Linear, Rule, define, fit
from .forms import first
from .reduce import argument

aten = torch.ops.aten


# --- convolution --------------------------------------------------------------------------------------------


def _terms(node: Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[Dims, Dims, Dims, dict[str, int]] | None:
    """Dims of input, weight and output, and the sizes: batch ``n``, groups ``q``, channels ``c`` in and ``o`` out."""
    if x.dim() != weight.dim():
        return None
    groups, transposed = argument(node, "groups"), argument(node, "transposed")
    sizes = {"n": x.shape[0], "c": x.shape[1] // groups}
    sizes["o"] = weight.shape[1] if transposed else weight.shape[0] // groups
    lead: tuple[str, ...] = ()
    if groups > 1:
        sizes["q"], lead = groups, ("q",)
    rest: Dims = ((),) * (x.dim() - 2)
    kernel = ((*lead, "c"), ("o",)) if transposed else ((*lead, "o"), ("c",))
    return (("n",), (*lead, "c"), *rest), (*kernel, *rest), (("n",), (*lead, "o"), *rest), sizes


def _flops(node: Node, weight: torch.Tensor, out: torch.Tensor, sizes: dict[str, int]) -> float:
    return 2.0 * out.numel() * sizes["c"] * math.prod(weight.shape[2:])


@define(aten.convolution.default)
def _(node: Node) -> Rule | None:
    x, weight, *bias = (o.meta["val"] for o in operands(node))
    found = _terms(node, x, weight)
    if found is None:
        return None
    left, kernel, out, sizes = found

    def form(e: Emit, x: Node, weight: Node, bias: Node | None, *rest: Any) -> Node:
        if bias is not None and not sizes.get("q"):
            bias = first(e, bias, "c")
        groups = e.size("q") if "q" in sizes else rest[-1]
        return e.call(node.target, x, weight, bias, *rest[:-1], groups)

    grouped = tuple(Linear(g) for g in (((0, 2), (1, 2)) if bias else ((0,), (1,))))
    return Rule(
        operands=(left, kernel, *((out[1],) for _ in bias)), results=(out,), sizes=sizes, linear=grouped, form=form,
        flops=_flops(node, weight, node.meta["val"], sizes), even=True,
    )  # fmt: skip


@define(aten.convolution_backward.default)
def _(node: Node) -> Rule | None:
    """The bias's gradient is a sum over the batch; devices that share input channels alone agree on it."""
    grad, x, weight = (o.meta["val"] for o in operands(node))
    found = _terms(node, x, weight)
    if found is None:
        return None
    left, kernel, out, sizes = found

    def form(e: Emit, grad: Node, x: Node, weight: Node, bias_sizes: Any, *rest: Any) -> Node:
        groups = e.size("q") if "q" in sizes else rest[-2]
        if bias_sizes is not None:
            bias_sizes = [math.prod(e.size(f) for f in out[1])]
        return e.call(node.target, grad, x, weight, bias_sizes, *rest[:-2], groups, rest[-1])

    made = [d if r is not None else () for d, r in zip((left, kernel, (out[1],)), results(node), strict=True)]
    return Rule(
        operands=(out, left, kernel), results=tuple(made), sizes=sizes, linear=(Linear((0,)),), form=form,
        reduce={"c": "none"}, flops=_flops(node, weight, grad, sizes) * sum(node.args[-1][:2]), even=True,
    )  # fmt: skip


# --- pooling and resizing -----------------------------------------------------------------------------------

LINEAR = """
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool3d
    _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward upsample_nearest1d upsample_nearest2d
    upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward upsample_bilinear2d_backward
    upsample_bicubic2d_backward reflection_pad1d reflection_pad2d replication_pad2d reflection_pad2d_backward
    adaptive_avg_pool1d upsample_nearest1d_backward upsample_nearest3d upsample_nearest3d_backward
    max_pool3d_with_indices_backward _adaptive_avg_pool3d_backward replication_pad1d replication_pad3d
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward reflection_pad3d
    reflection_pad1d_backward reflection_pad3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
"""
OTHERS = "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"
PRIMS = ("prims::_low_memory_max_pool_with_offsets", "prims::_low_memory_max_pool_offsets_to_indices")


@define(*(getattr(aten, name) for name in (LINEAR + OTHERS).split() if hasattr(aten, name)), *PRIMS)
def _(node: Node) -> Rule | None:
    """The dims before the windowed ones are free."""
    name = node.target._schema.name.split("::")[1]
    windowed = next((int(c) for c in "123" if f"{c}d" in name), 0) or len(node.args[1])
    given = [o.meta["val"] for o in operands(node)]
    if not given or given[0].dim() <= windowed:
        return None

    def term(t: torch.Tensor) -> Dims:
        return (*((f"d{i}",) for i in range(t.dim() - windowed)), *((),) * windowed)

    def form(e: Emit, *args: Any, **kwargs: Any) -> Any:
        sizes = argument(node, "input_size")
        if sizes is not None and len(sizes) == node.meta["val"].dim():  # of the whole result
            at = [a.name for a in node.target._schema.arguments].index("input_size")
            args = (*args[:at], list(e.shape()), *args[at + 1 :])
        return e.call(node.target, *args, **kwargs)

    linear = [[0]] if name in LINEAR.split() else []
    found = fit(node, [term(g) for g in given], [term(r) for r in results(node)], linear, form=form)
    return found and dataclasses.replace(found, even=True)
