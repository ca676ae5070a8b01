"""Diagonals: element ``k`` of the vector is element ``(k + i, k + j)`` of the matrix, ``j - i`` the offset.

Rows and the vector are one window factor: a device takes the elements of its own rows, and these alone travel.  Where
columns are sharded too, a row's element is a sum over columns, to which one device contributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..forms.values import positions
from ..ir import argument
from ..rules import Rule, contributed, define, dims, moved

aten = torch.ops.aten


@define(aten.diagonal.default)
def _(node: Node) -> Rule | None:
    x, length = node.args[0].meta["val"], node.meta["val"].shape[-1]
    ndim, shift = x.dim(), argument(node, "offset")
    rows, columns = argument(node, "dim1") % ndim, argument(node, "dim2") % ndim
    row, column, at = f"d{rows}", f"d{columns}", rows - (columns < rows)
    matrix = dims("d", ndim)
    vector = (*(matrix[d] for d in range(ndim) if d not in (rows, columns)), (row,))

    def form(e: Emit, y: Local, *args: Any, **kwargs: Any) -> Local:
        if not e.axes(row, column):
            return e.same(y, *args, **kwargs)
        first, held = max(0, -shift), e.pieces(row, x.shape[rows])
        own = [(b - first, end - first) for b, end in held]  # were there an element in every row
        real = [(min(max(b, 0), length), min(max(end, 0), length)) for b, end in own]
        if e.axes(column):
            begin, end = e.mine(row, held)
            places = e.count(begin + shift, end - begin, y).along(rows, ndim)
            kept = places.eq(positions(e, column, y).along(columns, ndim)).where(y, 0)
            y = kept.amax([columns]) if x.dtype == torch.bool else kept.sum([columns], dtype=x.dtype)
            y = y.permute([*(d for d in range(ndim - 1) if d != at), at])
            y = e.crop(y, ndim - 2, row, own, real)
        else:
            y = e.call(aten.diagonal.default, y, e.mine(row, held)[0] + shift, rows, columns)
        return e.fetch(y, ndim - 2, row, real, [[r] for r in e.pieces(row, length)])

    return moved(node, [matrix], [vector], windows=[row], form=form, reduce=contributed(x, column))
