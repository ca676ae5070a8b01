"""Diagonals: element ``k`` of the vector is element ``(k + i, k + j)`` of the matrix, ``j - i`` the offset.

Rows and the vector are one window factor: a device takes the elements of its own rows, and these alone travel.  Where
columns are sharded too, a row's element is a sum over columns, to which one device contributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range
from ..ir import Emit
from ..rules import Rule, define, dims
from ..symbolic import table
from .forms import constant, counted
from .ranges import same
from .reduce import argument
from .view import moved

aten = torch.ops.aten


class Diagonal:
    """Of matrices in dims ``rows`` and ``columns`` of ``ndim`` dims, with ``length`` elements."""

    def __init__(self, node: Node, matrix: torch.Tensor, vector: torch.Tensor) -> None:
        self.ndim, self.length = matrix.dim(), vector.shape[-1]
        self.offset = argument(node, "offset")
        self.rows, self.columns = argument(node, "dim1") % self.ndim, argument(node, "dim2") % self.ndim
        self.row, self.column = f"d{self.rows}", f"d{self.columns}"
        added = matrix.dtype != torch.bool
        self.matrix = dims("d", self.ndim, [] if added else [self.columns])
        self.rest = [d for d in range(self.ndim) if d not in (self.rows, self.columns)]
        self.vector = (*(self.matrix[d] for d in self.rest), (self.row,))
        self.shape = matrix.shape

    def sharded(self, e: Emit) -> bool:
        return bool(e.axes(self.row) or e.axes(self.column))

    def own(self, e: Emit) -> list[Range]:
        """The elements that each piece of the rows would hold, were there one in every row."""
        first = max(0, -self.offset)
        return [(b - first, end - first) for b, end in e.pieces(self.row, self.shape[self.rows])]

    def hit(self, e: Emit, like: Node) -> Node:
        """The mask of the local matrix."""
        at = []
        for d in (self.rows, self.columns):
            pieces, place = e.pieces(f"d{d}", self.shape[d]), e.place(f"d{d}")
            begin, size = table([b for b, _ in pieces], place), table([end - b for b, end in pieces], place)
            numbers = counted(e, begin, size, like)
            at.append(e.call(aten.reshape.default, numbers, [-1 if i == d else 1 for i in range(self.ndim)]))
        return e.call(aten.eq.Tensor, e.call(aten.add.Tensor, at[0], self.offset), at[1])

    def taken(self, e: Emit, x: Node) -> Node:
        """The local piece of the vector, of a local matrix."""
        own = self.own(e)
        real = [(min(max(b, 0), self.length), min(max(end, 0), self.length)) for b, end in own]
        if e.axes(self.column):
            dtype = x.meta["val"].dtype
            kept = e.call(aten.where.self, self.hit(e, x), x, constant(e, 0, x))
            x = e.call(aten.sum.dim_IntList, kept, [self.columns], dtype=dtype)
            at = self.rows - (self.columns < self.rows)
            x = e.call(aten.permute.default, x, [*(d for d in range(self.ndim - 1) if d != at), at])
            x = e.crop(x, self.ndim - 2, self.row, own, real)
        else:
            first = table([b for b, _ in e.pieces(self.row, self.shape[self.rows])], e.place(self.row))
            x = e.call(aten.diagonal.default, x, first + self.offset, self.rows, self.columns)
        return e.fetch(x, self.ndim - 2, self.row, real, [[r] for r in e.pieces(self.row, self.length)])

    def put(self, e: Emit, x: Node, vector: Node) -> Node:
        """A local matrix with the local piece of the vector in its diagonal."""
        have = e.pieces(self.row, self.length)
        vector = e.fetch(vector, self.ndim - 2, self.row, have, [[r] for r in self.own(e)])
        order = [*self.rest, self.rows, self.columns]
        made = e.call(aten.unsqueeze.default, vector, self.ndim - 1)
        made = e.call(aten.permute.default, made, [order.index(d) for d in range(self.ndim)])
        return e.call(aten.where.self, self.hit(e, vector), made, x)


@define(aten.diagonal.default)
def _(node: Node) -> Rule | None:
    d = Diagonal(node, node.args[0].meta["val"], node.meta["val"])

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        return d.taken(e, x) if d.sharded(e) else same(e, x, *args, **kwargs)

    return moved(node, [d.matrix], [d.vector], windows=[d.row], form=form)


@define(aten.diagonal_scatter.default)
def _(node: Node) -> Rule | None:
    d = Diagonal(node, *(a.meta["val"] for a in node.args[:2]))

    def form(e: Emit, x: Node, source: Node, *args: Any, **kwargs: Any) -> Node:
        return d.put(e, x, source) if d.sharded(e) else same(e, x, source, *args, **kwargs)

    return moved(node, [d.matrix, d.vector], [d.matrix], windows=[d.row], form=form)
