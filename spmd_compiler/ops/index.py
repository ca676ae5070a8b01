"""Lookups and updates by index.

An indexed dim is a factor ``v``: each device looks up the rows it holds and contributes zero for the others
(``Partial("sum")``), or updates its own rows and drops what is meant for others.  Dims of the index are factors
of their own, ``k`` or ``b<i>``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, is_tensor, operands
from ..rules import ANY_OP, Dims, Rule, define, dims, fit
from .forms import both, constant, first, local_index, padded, positions, uneven, zero_unless
from .known import Tie, tie
from .reduce import argument

aten = torch.ops.aten


def _number(node: Node) -> bool:
    """Whether the result can be a sum of contributions."""
    return node.args[0].meta["val"].dtype != torch.bool


# --- embedding ----------------------------------------------------------------------------------------------


@define(aten.embedding.default)
def _(node: Node) -> Rule | None:
    ids = dims("b", node.args[1].meta["val"].dim())

    def form(e: Emit, weight: Node, index: Node, *rest: Any) -> Node:
        if not e.axes("v"):
            return e.call(aten.embedding.default, weight, index, *rest)
        index, inside = local_index(e, index, "v")
        weight = padded(e, weight, 0, "v", 0)
        return zero_unless(e, inside, e.call(aten.embedding.default, weight, index))

    return fit(node, [(("v",), ("d",)), ids], [(*ids, ("d",))], [[0]], form=form)


@define(aten.embedding_renorm.default)
def _(node: Node) -> Rule | None:
    """The rows that ``index`` names, scaled down to the norm that they may have."""
    index, order = node.args[1], node.args[3]

    def form(e: Emit, weight: Node, index: Node, most: float, order: float) -> Node:
        cut = bool(e.axes("v"))
        if cut:
            weight, index = _trashed(e, weight, 0, index)
        index = e.call(aten.reshape.default, index, [-1])
        rows = e.call(aten.index.Tensor, weight, [index])
        size = e.call(aten.abs.default, rows)
        if math.isinf(order):
            top = e.call(aten.amax.default, padded(e, size, 1, "d", 0), [1], True)
            norm = e.all_reduce(top, "d", "max")
        else:
            total = e.call(aten.sum.dim_IntList, e.call(aten.pow.Tensor_Scalar, size, order), [1], True)
            norm = e.call(aten.pow.Tensor_Scalar, e.all_reduce(total, "d"), 1 / order)
        scale = e.call(aten.div.Tensor, constant(e, most, norm), e.call(aten.add.Tensor, norm, 1e-7))
        scale = e.call(aten.where.self, e.call(aten.gt.Scalar, norm, most), scale, constant(e, 1, scale))
        made = e.call(aten.index_put.default, weight, [index], e.call(aten.mul.Tensor, rows, scale))
        return e.call(aten.slice.Tensor, made, 0, 0, e.size("v")) if cut else made

    if order <= 0:
        return None
    return fit(node, [(("v",), ("d",)), ((),) * index.meta["val"].dim()], [(("v",), ("d",))], form=form)


# --- along one dim: gather, scatter and their kin -----------------------------------------------------------


def _along(node: Node, one_d: bool = False) -> tuple[int, Dims, Dims] | None:
    """``dim``, the table's dims (``v`` at ``dim``) and the index's or source's (``k`` at ``dim``).

    Dims whose sizes differ between table and index are tied to nothing.
    """
    table, *others = (o.meta["val"] for o in operands(node))
    if table.dim() == 0:
        return None
    dim = argument(node, "dim") % table.dim()
    if one_d:
        others = [o for o in others if o.dim() == table.dim()]
    if any(o.dim() != table.dim() for o in others):
        return None
    odd = [i for i in range(table.dim()) if any(o.shape[i] != table.shape[i] for o in others)]
    rest = dims("d", table.dim(), odd)
    return dim, (*rest[:dim], ("v",), *rest[dim + 1 :]), (*rest[:dim], ("k",), *rest[dim + 1 :])


@define(aten.gather.default)
def _(node: Node) -> Rule | None:
    found = _along(node)
    if found is None:
        return None
    dim, table, index = found

    def form(e: Emit, x: Node, _: int, i: Node, **kwargs: Any) -> Node:
        if not e.axes("v"):
            return e.call(node.target, x, dim, i)
        i, inside = local_index(e, i, "v")
        made = e.call(node.target, padded(e, x, dim, "v", 0), dim, i)
        return e.call(aten.where.self, inside, made, constant(e, 0, made))

    return fit(
        node, [table, index], [index], [[0]], ANY_OP,
        form=form, whole=frozenset() if _number(node) else frozenset("v"),
    )  # fmt: skip


def _trashed(e: Emit, x: Node, dim: int, index: Node) -> tuple[Node, Node]:
    """A table with a spare row at its end, and local indices in which all others' rows are that one."""
    local, inside = local_index(e, index, "v")
    spare = constant(e, e.size("v"), local)
    return padded(e, x, dim, "v", 0, always=True), e.call(aten.where.self, inside, local, spare)


SCATTERS = {
    aten.scatter.value: "set",
    aten.scatter.src: "set",
    aten.scatter_add.default: "sum",
    aten.scatter_reduce.two: "reduce",
    aten.index_reduce.default: "keep",
    aten.scatter.reduce: "keep",
}


@define(*SCATTERS)
def _(node: Node) -> Rule | None:
    kind = SCATTERS[node.target]
    if kind == "reduce":
        reduce = argument(node, "reduce")
        include = argument(node, "include_self")
        kind = {"sum": "sum", "amax": "max", "amin": "min"}.get(reduce, "keep") if include else "keep"
    one_d = node.target._schema.name.startswith("aten::index_")
    found = _along(node, one_d)
    if found is None:
        return None
    dim, table, part = found
    given = operands(node)
    if len(given) == 3 and not one_d and given[1].meta["val"].shape != given[2].meta["val"].shape:
        return None
    if one_d and given[1].meta["val"].dim() != 1:
        return None

    def form(e: Emit, x: Node, _: int, index: Node, *rest: Any, **kwargs: Any) -> Node:
        if kind == "sum":
            x = first(e, x, "k")
        if not e.axes("v"):
            return e.call(node.target, x, dim, index, *rest, **kwargs)
        if kind == "set" and not one_d and given[1].meta["val"].shape[dim] == 1:
            return _compared(e, x, dim, index, rest[0])
        x, index = _trashed(e, x, dim, index)
        made = e.call(node.target, x, dim, index, *rest, **kwargs)
        return e.call(aten.slice.Tensor, made, dim, 0, e.size("v"))

    index = (("k",),) if one_d else part
    groups = {"sum": [[0, 2]], "set": [[0, 2]] if len(given) == 3 else []}.get(kind, [])
    if kind == "set" and len(given) == 2 and node.args[3] == 0:
        groups = [[0]]
    whole = frozenset() if kind in ("sum", "max", "min") else frozenset("k")
    passed = ANY_OP if len(given) == 3 and kind == "set" else ("sum",)
    return fit(
        node, [table, index, part][: len(given)], [table], groups, passed,
        form=form, whole=whole, reduce={"k": kind if kind in ("max", "min") else "sum"},
    )  # fmt: skip


def _compared(e: Emit, x: Node, dim: int, index: Node, value: Any) -> Node:
    """One element a row is set: a comparison with the positions of this device's elements."""
    val = index.meta["val"]
    here = positions(e, "v", index, val.dtype)
    here = e.call(aten.reshape.default, here, [-1 if i == dim else 1 for i in range(val.dim())])
    hit = e.call(aten.eq.Tensor, here, index)
    if not isinstance(value, Node):
        value = constant(e, value, x)
    return e.call(aten.where.self, hit, value, x)


# --- advanced indexing --------------------------------------------------------------------------------------


class Advanced:
    """The dims of ``x[indices]``: unindexed dims ``d<i>``, indexed ``v<i>``, those of the broadcast indices ``b<j>``.

    ``after`` counts the result's dims behind the index's.  An indexed dim may be tied to a dim of the index, whose
    factor is then ``v<i>`` too (`known`).
    """

    def __init__(
        self, x: Node, indices: Sequence[Node | None], wrap: bool = False, put: Node | None = None, tied: bool = True
    ) -> None:
        ndim = x.meta["val"].dim()
        at = [i for i, index in enumerate(indices) if index is not None]
        self.at, self.indices = at, [indices[i] for i in at]
        shapes = [i.meta["val"].shape for i in self.indices]
        self.plain = bool(at) and all(i.meta["val"].dtype in (torch.int64, torch.int32) for i in self.indices)
        self.index_dims = dims("b", torch.broadcast_shapes(*shapes)) if self.plain else ()
        self.table: Dims = tuple((f"v{i}",) if i in at else (f"d{i}",) for i in range(ndim))
        adjacent = at == list(range(at[0], at[-1] + 1)) if at else True
        begin = at[0] if at and adjacent else 0
        rest = [d for i, d in enumerate(self.table) if i not in at]
        self.after = len(rest) - begin
        self.ties = self._tied(x, wrap, put) if self.plain and tied else {}
        self.index_dims = tuple(
            next(((t.factor,) for t in self.ties.values() if t.along == j), d) for j, d in enumerate(self.index_dims)
        )
        self.result: Dims = (*rest[:begin], *self.index_dims, *rest[begin:])
        self.row_factors = frozenset(f"v{i}" for i in at if i not in self.ties)
        self.spread = frozenset(f for (f,) in self.index_dims if f[0] == "b")

    def _tied(self, x: Node, wrap: bool, put: Node | None) -> dict[int, Tie]:
        """Ties of known indices; where values are ``put`` nothing else may move along the index's dim."""
        found: dict[int, Tie] = {}
        for i, index in zip(self.at, self.indices, strict=True):
            t = tie(i, x.meta["val"].shape[i], index, len(self.index_dims), wrap)
            if t is None or self.indices.count(index) > 1 or any(t.along == o.along for o in found.values()):
                continue
            others = [o for o in self.indices if o is not index]
            if put is None or (self.moves(put, t, self.after) and not any(self.moves(o, t, 0) for o in others)):
                found[i] = t
        return found

    def moves(self, n: Node, t: Tie, after: int) -> bool:
        """Whether an operand, with ``after`` dims behind the index's, has the index's dim in full."""
        dim = n.meta["val"].dim() - after - len(self.index_dims) + t.along
        return dim >= 0 and n.meta["val"].shape[dim] == t.size

    def windows(self) -> list[str]:
        return [t.factor for t in self.ties.values()]

    def dims_of(self, index: Node) -> Dims:
        """Of an index; what is known is whole along the dim that it is tied to."""
        own = next((t for i, t in self.ties.items() if self.indices[self.at.index(i)] is index), None)
        whole = {} if own is None else {own.along: ()}
        return fitted(tuple(whole.get(j, d) for j, d in enumerate(self.index_dims)), index)

    def fetched(self, e: Emit, x: Node, indices: Sequence[Node | None]) -> tuple[Node, list[Node | None]]:
        """The rows that tied indices read, and these indices counted in them."""
        made = list(indices)
        for i, t in self.ties.items():
            if e.axes(t.factor):
                x, want = t.local_rows(e, x)
                made[i] = t.local_index(e, made[i], want)
        return x, made

    def concerned(self, e: Emit, indices: Sequence[Node | None], values: Node) -> tuple[list[Node | None], Node]:
        """Of tied indices and the values put there those that concern the local rows."""
        made = list(indices)
        for i, t in self.ties.items():
            if e.axes(t.factor):
                dim = values.meta["val"].dim() - self.after - len(self.index_dims) + t.along
                made[i], values = t.local_readers(e, made[i], values, dim)
        return made, values

    def localise(
        self, e: Emit, indices: Sequence[Node | None], wrap: bool, put: bool = False
    ) -> tuple[list[Any], Node | None]:
        """Local indices of sharded dims, and the mask (shaped to fit the result) of rows held here."""
        made, mask = list(indices), None
        for i in self.at:
            if e.axes(f"v{i}") and (i not in self.ties or put):
                made[i], inside = local_index(e, made[i], f"v{i}", wrap)
                mask = both(e, mask, inside)
        for _ in range(self.after if mask is not None else 0):
            mask = e.call(aten.unsqueeze.default, mask, mask.meta["val"].dim())
        return made, mask

    def sharded(self, e: Emit, put: bool = False) -> list[int]:
        return [i for i in self.at if e.axes(f"v{i}") and (i not in self.ties or put)]


def fitted(term: Dims, n: Node) -> Dims:
    """The last of the dims ``term`` for an operand that broadcasts against them."""
    shape = n.meta["val"].shape
    dims_ = term[len(term) - len(shape) :]
    return tuple(() if size == 1 else d for d, size in zip(dims_, shape, strict=True))


def _indices(node: Node, position: int) -> list[Node | None]:
    return [i if isinstance(i, Node) and is_tensor(i.meta.get("val")) else None for i in node.args[position]]


@define(aten.index.Tensor, aten._unsafe_index.Tensor)
def _(node: Node) -> Rule | None:
    a = Advanced(node.args[0], _indices(node, 1), wrap=node.target is aten.index.Tensor)
    if not a.plain:
        return None

    def form(e: Emit, x: Node, indices: Sequence[Any]) -> Node:
        x, indices = a.fetched(e, x, indices)
        for i in a.sharded(e):
            x = padded(e, x, i, f"v{i}", 0)
        indices, mask = a.localise(e, indices, wrap=node.target is aten.index.Tensor)
        made = e.call(node.target, x, indices)
        return made if mask is None else e.call(aten.where.self, mask, made, constant(e, 0, made))

    return fit(
        node, [a.table, *map(a.dims_of, a.indices)], [a.result], [[0]], ANY_OP, windows=a.windows(), form=form,
        whole=frozenset() if _number(node) else a.row_factors,
    )  # fmt: skip


@define(aten._unsafe_masked_index.default)
def _(node: Node) -> Rule | None:
    """``where(mask, x[indices], fill)``: the first device of sharded rows contributes what is masked out."""
    a = Advanced(node.args[0], _indices(node, 2))
    if not a.plain:
        return None
    mask_dims = fitted(a.result, node.args[1])
    fill = node.args[3]

    def form(e: Emit, x: Node, mask: Node, indices: Sequence[Any], fill: Any) -> Node:
        x, indices = a.fetched(e, x, indices)
        for i in a.sharded(e):
            x = padded(e, x, i, f"v{i}", 0)
        indices, inside = a.localise(e, indices, wrap=False)
        rows = [f"v{i}" for i in a.sharded(e)]
        made = e.call(aten._unsafe_masked_index.default, x, both(e, mask, inside), indices, 0 if rows else fill)
        if not rows or fill == 0:
            return made
        return e.call(aten.where.self, mask, made, first(e, constant(e, fill, made), *rows))

    return fit(
        node, [a.table, mask_dims, *map(a.dims_of, a.indices)], [a.result], [[0]] if fill == 0 else [],
        windows=a.windows(), form=form, whole=frozenset() if _number(node) else a.row_factors,
    )  # fmt: skip


@define(aten.index_put.default, aten._unsafe_masked_index_put_accumulate.default)
def _(node: Node) -> Rule | None:
    """Added contributions may be spread over devices; what is set must be where its row is."""
    masked = node.target is aten._unsafe_masked_index_put_accumulate.default
    adds = masked or bool(argument(node, "accumulate", False))
    values = node.args[3] if masked else node.args[2]
    a = Advanced(node.args[0], _indices(node, 2 if masked else 1), True, values, tied=adds and not masked)
    given = operands(node)
    if not a.plain:
        return None if masked or adds else _masked_fill(node)

    if values.meta["val"].dim() > len(a.result):
        return None

    def form(e: Emit, x: Node, *args: Any) -> Node:
        mask = args[0] if masked else None
        indices, value = args[1:3] if masked else args[:2]
        if adds:
            x = first(e, x, *a.spread)
        indices, value = a.concerned(e, indices, value)
        rows = a.sharded(e, put=True)
        local, inside = a.localise(e, indices, wrap=True, put=True)
        trash = not adds and bool(rows)
        cut = [i for i in rows if trash or uneven(e, f"v{i}")]
        for i in cut:
            x = padded(e, x, i, f"v{i}", 0, always=True)
        if adds and inside is not None:
            value = e.call(aten.where.self, inside, value, constant(e, 0, value))
        elif trash:
            for i in rows:
                i_local, own = local_index(e, indices[i], f"v{i}", wrap=True)
                local[i] = e.call(aten.where.self, own, i_local, constant(e, e.size(f"v{i}"), i_local))
        rest = args[3:] if masked else args[2:]
        made = e.call(node.target, x, *([mask] if masked else []), local, value, *rest)
        for i in cut:
            made = e.call(aten.slice.Tensor, made, i, 0, e.size(f"v{i}"))
        return made

    if not adds:
        whole = a.spread
    else:
        whole = frozenset() if _number(node) else a.spread
    last = len(given) - 1
    return fit(
        node, [a.table, *(fitted(a.result, m) for m in node.args[1:2] if masked), *map(a.dims_of, a.indices),
               fitted(a.result, values)],
        [a.table], [[0, last]], ("sum",) if adds else ANY_OP, form=form, whole=whole, windows=a.windows(),
    )  # fmt: skip


def _masked_fill(node: Node) -> Rule | None:
    """``x[mask] = scalar``."""
    x, indices, value = node.args[0].meta["val"], _indices(node, 1), node.args[2].meta["val"]
    if len(indices) != 1 or indices[0] is None or value.numel() != 1 or indices[0].meta["val"].dtype != torch.bool:
        return None
    whole = dims("d", x.dim())
    n = indices[0].meta["val"].dim()

    def form(e: Emit, x: Node, indices: Sequence[Node], value: Node, *_: Any) -> Node:
        (mask,) = indices
        for _axis in range(len(whole) - n):
            mask = e.call(aten.unsqueeze.default, mask, mask.meta["val"].dim())
        return e.call(aten.where.self, mask, e.call(aten.reshape.default, value, []), x)

    return fit(node, [whole, whole[:n], ((),) * value.dim()], [whole], form=form)
