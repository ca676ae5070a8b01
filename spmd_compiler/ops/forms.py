"""Pieces that local forms share: padding of empty pieces, masks, the first device of a factor, gathered values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import collectives as coll
from ..ir import Emit
from ..symbolic import IntExpr, chunk, coordinate

aten, prims = torch.ops.aten, torch.ops.prims


def lowest(dtype: torch.dtype) -> Any:
    """The neutral element of a maximum."""
    return _extreme(dtype, -1)


def highest(dtype: torch.dtype) -> Any:
    """The neutral element of a minimum."""
    return _extreme(dtype, 1)


def _extreme(dtype: torch.dtype, sign: int) -> Any:
    if dtype == torch.bool:
        return sign > 0
    if dtype.is_floating_point:
        return sign * math.inf
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def constant(e: Emit, value: Any, like: Node, dtype: torch.dtype | None = None) -> Node:
    """A 0-d tensor; ``value`` may be a coordinate expression."""
    val = like.meta["val"]
    return e.call(aten.full.default, [], value, dtype=dtype or val.dtype, device=val.device)


def zero_unless(e: Emit, mask: Node, x: Node) -> Node:
    """``x`` where ``mask`` (broadcast from the left, as leading dims) holds, else 0."""
    missing = x.meta["val"].dim() - mask.meta["val"].dim()
    for _ in range(missing):
        mask = e.call(aten.unsqueeze.default, mask, mask.meta["val"].dim())
    return e.call(aten.where.self, mask, x, constant(e, 0, x))


def first(e: Emit, x: Node, *factors: str) -> Node:
    """``x`` on the first device of every axis of ``factors``, zero elsewhere: a whole term of a partial sum."""
    return first_on(e, x, [a for f in factors for a in e.axes(f)])


def first_on(e: Emit, x: Node, axes: Sequence[str]) -> Node:
    """``x`` on the first device of every one of ``axes``, zero elsewhere."""
    if not axes:
        return x
    one: IntExpr = math.prod(chunk(1, e.mesh[a], coordinate(a)) for a in axes)
    cond = e.call(aten.gt.Scalar, constant(e, one, x, torch.int64), 0)
    return e.call(aten.where.self, cond, x, constant(e, 0, x))


def uneven(e: Emit, *factors: str) -> bool:
    """Whether some device may hold fewer elements of a factor than others, or none."""
    return any(not isinstance(e.size(f), int) for f in factors)


def padded(e: Emit, x: Node, dim: int, factor: str, value: Any, always: bool = False) -> Node:
    """``x`` with one element more at the end of ``dim`` if a piece of ``factor`` may be empty (or ``always``)."""
    if not (always or uneven(e, factor)):
        return x
    pad = [0, 0] * (x.meta["val"].dim() - 1 - dim) + [0, 1]
    return e.call(aten.constant_pad_nd.default, x, pad, value)


def local_index(e: Emit, index: Node, factor: str, wrap: bool = False) -> tuple[Node, Node]:
    """Global indices into a sharded factor as local ones, and the mask of those that this device holds.

    Indices of elements held elsewhere become 0, which is a valid index of a `padded` table.  ``wrap`` admits
    negative indices.
    """
    if wrap:
        below = e.call(aten.lt.Scalar, index, 0)
        wrapped = e.call(aten.add.Tensor, index, e.sizes[factor])
        index = e.call(aten.where.self, below, wrapped, index)
    local = e.call(aten.sub.Tensor, index, e.offset(factor))
    inside = e.call(
        aten.bitwise_and.Tensor,
        e.call(aten.ge.Scalar, local, 0),
        e.call(aten.lt.Scalar, local, e.size(factor)),
    )
    return e.call(aten.where.self, inside, local, constant(e, 0, local)), inside


def counted(e: Emit, begin: IntExpr, size: IntExpr, like: Node, dtype: torch.dtype = torch.int64) -> Node:
    """The ``size`` numbers from ``begin`` on."""
    return e.call(
        prims.iota.default, size, start=begin, step=1, dtype=dtype, device=like.meta["val"].device, requires_grad=False
    )


def positions(e: Emit, factor: str, like: Node, dtype: torch.dtype = torch.int64) -> Node:
    """The global indices of a factor's local elements."""
    return counted(e, e.offset(factor), e.size(factor), like, dtype)


def both(e: Emit, a: Node | None, b: Node | None) -> Node | None:
    """The conjunction of masks, None counting as true."""
    if a is None or b is None:
        return b if a is None else a
    return e.call(aten.bitwise_and.Tensor, a, b)


def stacked(e: Emit, x: Node, factor: str, dim: int) -> tuple[Node, int]:
    """The values (of one size in ``dim``) of all devices that share a factor, in the order of its pieces."""
    total = int(x.meta["val"].shape[dim])
    for axis in reversed(e.axes(factor)):
        total *= e.mesh[axis]
        x = e.call(coll.all_gather, x, dim, total, axis, e.mesh[axis])
    return x, total


def stacked_positions(e: Emit, where: Node, factor: str, dim: int, below: int) -> Node:
    """`stacked` of positions, which are less than ``below``: in 32 bits where they fit."""
    if below >= 2**31:
        return stacked(e, where, factor, dim)[0]
    short, _ = stacked(e, e.call(prims.convert_element_type.default, where, torch.int32), factor, dim)
    return e.call(prims.convert_element_type.default, short, torch.int64)
