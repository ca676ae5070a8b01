"""Neutral elements, padding of empty pieces, positions, and lookups of rows that one device holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..emit import Emit, Local


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


def uneven(e: Emit, *factors: str) -> bool:
    """Whether some device may hold fewer elements of a factor than others, or none."""
    return any(not isinstance(e.size(f), int) for f in factors)


def padded(e: Emit, x: Local, dim: int, factor: str, value: Any, always: bool = False) -> Local:
    """``x`` with one element more at the end of ``dim`` if a piece of ``factor`` may be empty (or ``always``)."""
    return x.pad(dim, 0, 1, value) if always or uneven(e, factor) else x


def positions(e: Emit, factor: str, like: Local, dtype: torch.dtype = torch.int64) -> Local:
    """The global indices of a factor's local elements."""
    return e.count(e.offset(factor), e.size(factor), like, dtype)


def stacked_positions(e: Emit, where: Local, factor: str, dim: int, below: int) -> Local:
    """`Emit.stacked` of positions, which are less than ``below``: in 32 bits where they fit."""
    if below >= 2**31:
        return e.stacked(where, factor, dim)
    return e.stacked(where.to(torch.int32), factor, dim).to(torch.int64)


# --- rows -----------------------------------------------------------------------------------------------------


def both(a: Local | None, b: Local | None) -> Local | None:
    """The conjunction of masks, None counting as true."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def local_index(e: Emit, index: Local, factor: str, wrap: bool = False) -> tuple[Local, Local]:
    """Global indices into a sharded factor as local ones, and the mask of those that this device holds.

    Indices of elements held elsewhere become 0, which is a valid index of a `padded` table.  ``wrap`` admits
    negative indices.
    """
    if wrap:
        index = (index < 0).where(index + e.sizes[factor], index)
    local = index - e.offset(factor)
    inside = (local >= 0) & (local < e.size(factor))
    return inside.where(local, 0), inside


def localised(
    e: Emit, factors: Mapping[int, str], indices: Mapping[int, Local], wrap: bool
) -> tuple[dict[int, Local], Local | None]:  # fmt: skip
    """`local_index` of the indices of several dims, and the mask of what is here of all."""
    made, mask = dict(indices), None
    for i, f in factors.items():
        made[i], inside = local_index(e, indices[i], f, wrap)
        mask = both(mask, inside)
    return made, mask


def lengthened(mask: Local, behind: int) -> Local:
    """``mask`` with as many dims of size 1 behind its own."""
    for _ in range(behind):
        mask = mask.unsqueeze(mask.ndim)
    return mask


Rows = Callable[[Local, dict[int, Local]], Local]


def looked_up(
    e: Emit, x: Local, factors: Mapping[int, str], indices: Mapping[int, Local], call: Rows, behind: int = 0,
    wrap: bool = False,
) -> Local:  # fmt: skip
    """``call(x, indices)`` of a table whose dims are indexed by dim: a device looks up the rows that it holds, and has
    zeros for others.  The result has ``behind`` dims behind those of the indices."""
    held = {i: f for i, f in factors.items() if e.axes(f)}
    for i, f in held.items():
        x = padded(e, x, i, f, 0)
    made, inside = localised(e, held, indices, wrap)
    found = call(x, made)
    return found if inside is None else lengthened(inside, behind).where(found, 0)


def put(
    e: Emit, x: Local, factors: Mapping[int, str], indices: Mapping[int, Local], call: Rows, wrap: bool = False
) -> Local:  # fmt: skip
    """``call(x, indices)`` that puts rows into such a table: what is meant for the rows of others goes to a spare row
    at the end, which is cut off again."""
    held, made = {i: f for i, f in factors.items() if e.axes(f)}, dict(indices)
    for i, f in held.items():
        local, inside = local_index(e, indices[i], f, wrap)
        x, made[i] = x.pad(i, 0, 1), inside.where(local, e.size(f))
    x = call(x, made)
    for i, f in held.items():
        x = x.slice(i, 0, e.size(f))
    return x
