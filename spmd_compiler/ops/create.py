"""Factories: any dim of what they make may be sharded; positions start at the local piece's offset."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..draws import draw
from ..emit import Emit, Local
from ..ir import operands
from ..rules import Rule, define, dims, fit

aten, prims = torch.ops.aten, torch.ops.prims


def made(node: Node, form: Any, zero: bool = False) -> Rule | None:
    """A value made from nothing (operands give a shape and a dtype alone); zeros are also a sum of zeros."""
    whole = dims("d", node.meta["val"].dim())
    like = [whole if o.meta["val"].shape == node.meta["val"].shape else ((),) * o.meta["val"].dim()
            for o in operands(node)]  # fmt: skip
    return fit(node, like, [whole], [[]] if zero and node.meta["val"].dtype != torch.bool else [], form=form)


@define(aten.full)
def _(node: Node) -> Rule | None:
    value = node.args[1]

    def form(e: Emit, *args: Any, **kwargs: Any) -> Local:
        val = node.meta["val"]
        return e.call(aten.full.default, list(e.shape()), value, dtype=val.dtype, device=val.device)

    return None if isinstance(value, Node) else made(node, form, zero=value == 0)


@define(aten.empty.memory_format, aten.empty_strided, aten.new_empty_strided)
def _(node: Node) -> Rule | None:
    def form(e: Emit, *args: Any, **kwargs: Any) -> Local:
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
    def form(e: Emit, n: int, *, start: int, step: int, **kwargs: Any) -> Local:
        return e.call(prims.iota.default, e.size("d0"), start=start + step * e.offset("d0"), step=step, **kwargs)

    return made(node, form)


@define(draw)
def _(node: Node) -> Rule | None:
    """Any dim may be sharded: a device draws its own elements."""

    def form(e: Emit, seed: Local, stream: int, kind: str, size: Any, offset: Any, shape: Any, *rest: Any) -> Local:
        spec = e.result_specs[0]
        begin = [o + b for o, b in zip(offset, spec.local_offset(node.meta["val"].shape, e.mesh), strict=True)]
        return e.call(draw, seed, stream, kind, list(e.shape()), begin, shape, *rest)

    return fit(node, [()], [dims("d", node.meta["val"].dim())], form=form)
