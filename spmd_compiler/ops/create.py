"""Factories: any dim of what they make may be sharded; positions start at the local piece's offset."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands
from ..rules import Rule, define, dims, fit
from .forms import positions
from .reduce import argument

aten, prims = torch.ops.aten, torch.ops.prims


def made(node: Node, form: Any, zero: bool = False) -> Rule | None:
    """A value made from nothing (operands give a shape and a dtype alone); zeros are also a sum of zeros."""
    whole = dims("d", node.meta["val"].dim())
    like = [whole if o.meta["val"].shape == node.meta["val"].shape else ((),) * o.meta["val"].dim()
            for o in operands(node)]  # fmt: skip
    return fit(node, like, [whole], [[]] if zero and node.meta["val"].dtype != torch.bool else [], form=form)


def filled(node: Node, value: Any) -> Rule | None:
    def form(e: Emit, *args: Any, **kwargs: Any) -> Node:
        val = node.meta["val"]
        return e.call(aten.full.default, list(e.shape()), value, dtype=val.dtype, device=val.device)

    return made(node, form, zero=not isinstance(value, Node) and value == 0)


@define(aten.full, aten.full_like, aten.new_full)
def _(node: Node) -> Rule | None:
    value = node.args[2] if node.target is aten.new_full.default else node.args[1]
    return None if isinstance(value, Node) else filled(node, value)


@define(aten.zeros, aten.zeros_like, aten.new_zeros)
def _(node: Node) -> Rule | None:
    return filled(node, 0)


@define(aten.ones, aten.ones_like, aten.new_ones)
def _(node: Node) -> Rule | None:
    return filled(node, 1)


@define(aten.empty.memory_format, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided,
        aten.empty_permuted, prims.empty_strided, prims.empty_permuted)  # fmt: skip
def _(node: Node) -> Rule | None:
    def form(e: Emit, *args: Any, **kwargs: Any) -> Node:
        val = node.meta["val"]
        return e.call(aten.empty.memory_format, list(e.shape()), dtype=val.dtype, device=val.device)

    return made(node, form)


@define(aten.scalar_tensor.default)
def _(node: Node) -> Rule | None:
    if operands(node):
        return None
    return made(node, None, zero=node.args[0] == 0)


@define(prims.iota.default)
def _(node: Node) -> Rule | None:
    def form(e: Emit, n: int, *, start: int, step: int, **kwargs: Any) -> Node:
        return e.call(prims.iota.default, e.size("d0"), start=start + step * e.offset("d0"), step=step, **kwargs)

    return made(node, form)


@define(aten.arange)
def _(node: Node) -> Rule | None:
    start, step = argument(node, "start", 0), argument(node, "step", 1)

    def form(e: Emit, *args: Any, **kwargs: Any) -> Node:
        if not e.axes("d0"):
            return e.call(node.target, *args, **kwargs)
        val = node.meta["val"]
        place = positions(e, "d0", node)
        if val.dtype.is_floating_point:
            place = e.call(prims.convert_element_type.default, place, torch.float64)
        scaled = e.call(aten.add.Tensor, e.call(aten.mul.Tensor, place, step), start)
        if scaled.meta["val"].dtype != val.dtype:
            scaled = e.call(prims.convert_element_type.default, scaled, val.dtype)
        return scaled

    return made(node, form)


@define(aten.eye)
def _(node: Node) -> Rule | None:
    def form(e: Emit, *args: Any, **kwargs: Any) -> Node:
        val = node.meta["val"]
        rows, columns = (positions(e, f, node) for f in ("d0", "d1"))
        same = e.call(aten.eq.Tensor, e.call(aten.unsqueeze.default, rows, 1), columns)
        return e.call(prims.convert_element_type.default, same, val.dtype)

    return made(node, form)


@define(aten.tril.default, aten.triu.default)
def _(node: Node) -> Rule | None:
    """The diagonal shifts by the offsets of the local rows and columns."""
    n = node.meta["val"].dim()
    whole = (*dims("d", n - 2), ("m",), ("n",))

    def form(e: Emit, x: Node, diagonal: int = 0) -> Node:
        return e.call(node.target, x, diagonal + e.offset("m") - e.offset("n"))

    return fit(node, [whole], [whole], [[0]], form=form)
