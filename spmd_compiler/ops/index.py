"""Lookups and updates by index.

An indexed dim is a factor ``v``: each device looks up the rows it holds and contributes zero for the others
(``Partial("sum")``), or updates its own rows and drops what is meant for others.  Dims of the index are factors
of their own, ``k`` or ``b<i>``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..forms.known import Tie, tie
from ..forms.values import lengthened, localised, looked_up, padded, positions, put, uneven
from ..ir import argument, is_tensor, operands
from ..rules import ANY_OP, Dims, Rule, contributed, define, dims, fit

aten = torch.ops.aten


# --- embedding ----------------------------------------------------------------------------------------------

TABLE: Dims = (("v",), ("d",))


@define(aten.embedding.default)
def _(node: Node) -> Rule | None:
    ids = dims("b", node.args[1].meta["val"].dim())

    def form(e: Emit, weight: Local, index: Local, *rest: Any) -> Local:
        rest = () if e.axes("v") else rest
        return looked_up(e, weight, {0: "v"}, {0: index}, lambda x, i: e.same(x, i[0], *rest), behind=1)

    return fit(node, [TABLE, ids], [(*ids, ("d",))], [[0]], form=form)


@define(aten.embedding_renorm.default)
def _(node: Node) -> Rule | None:
    """The rows that ``index`` names, scaled down to the norm that they may have."""

    def scaled(e: Emit, weight: Local, index: Local, most: float, order: float) -> Local:
        rows = e.call(aten.index.Tensor, weight, [index])
        size = e.call(aten.abs.default, rows)
        if math.isinf(order):
            norm = e.all_reduce(padded(e, size, 1, "d", 0).amax([1], True), "d", "max")
        else:
            total = e.all_reduce(e.call(aten.pow.Tensor_Scalar, size, order).sum([1], True), "d")
            norm = e.call(aten.pow.Tensor_Scalar, total, 1 / order)
        scale = (norm > most).where(norm.number(most) / (norm + 1e-7), 1)
        return e.call(aten.index_put.default, weight, [index], rows * scale)

    def form(e: Emit, weight: Local, index: Local, *limits: float) -> Local:
        return put(e, weight, {0: "v"}, {0: index.reshape([-1])}, lambda x, i: scaled(e, x, i[0], *limits))

    if node.args[3] <= 0:  # type: ignore[operator]
        return None
    return fit(node, [TABLE, ((),) * node.args[1].meta["val"].dim()], [TABLE], form=form)


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

    def form(e: Emit, x: Local, _: int, i: Local, **kwargs: Any) -> Local:
        return looked_up(e, x, {dim: "v"}, {dim: i}, lambda x, i: x.gather(dim, i[dim]))

    return fit(node, [table, index], [index], [[0]], ANY_OP, form=form, reduce=contributed(node.meta["val"], "v"))


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
    shapes = [g.meta["val"].shape for g in given]
    if (len(shapes[1]) != 1) if one_d else len(given) == 3 and shapes[1] != shapes[2]:
        return None

    def form(e: Emit, x: Local, _: int, index: Local, *rest: Any, **kwargs: Any) -> Local:
        if kind == "sum":
            x = e.first(x, e.axes("k"))
        if e.axes("v") and kind == "set" and not one_d and shapes[1][dim] == 1:  # one element a row
            return positions(e, "v", index, index.dtype).along(dim, index.ndim).eq(index).where(rest[0], x)
        call = lambda x, i: e.same(x, dim, i[dim], *rest, **kwargs)  # noqa: E731
        return put(e, x, {dim: "v"}, {dim: index}, call)

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
        self.wrap = wrap
        self.indices = {i: index for i, index in enumerate(indices) if index is not None}
        at = list(self.indices)
        values = [n.meta["val"] for n in self.indices.values()]
        self.plain = bool(at) and all(v.dtype in (torch.int64, torch.int32) for v in values)
        self.index_dims = dims("b", torch.broadcast_shapes(*(v.shape for v in values))) if self.plain else ()
        self.table: Dims = tuple((f"v{i}",) if i in at else (f"d{i}",) for i in range(ndim))
        begin = at[0] if at and at == list(range(at[0], at[-1] + 1)) else 0
        rest = [d for i, d in enumerate(self.table) if i not in at]
        self.after = len(rest) - begin
        self.ties = self._tied(x, put) if self.plain and tied else {}
        self.index_dims = tuple(
            next(((t.factor,) for t in self.ties.values() if t.along == j), d) for j, d in enumerate(self.index_dims)
        )
        self.result: Dims = (*rest[:begin], *self.index_dims, *rest[begin:])
        self.rows = {i: f"v{i}" for i in at if i not in self.ties}
        self.spread = frozenset(f for (f,) in self.index_dims if f[0] == "b")

    def _tied(self, x: Node, put: Node | None) -> dict[int, Tie]:
        """Ties of known indices; where values are ``put`` nothing else may move along the index's dim."""
        found: dict[int, Tie] = {}
        nodes = list(self.indices.values())
        for i, index in self.indices.items():
            t = tie(i, x.meta["val"].shape[i], index, len(self.index_dims), self.wrap)
            if t is None or nodes.count(index) > 1 or any(t.along == o.along for o in found.values()):
                continue
            others = [o for o in nodes if o is not index]
            if put is None or (self.moves(put, t, self.after) and not any(self.moves(o, t, 0) for o in others)):
                found[i] = t
        return found

    def moves(self, n: Node, t: Tie, after: int) -> bool:
        """Whether an operand, with ``after`` dims behind the index's, has the index's dim in full."""
        dim = n.meta["val"].dim() - after - len(self.index_dims) + t.along
        return dim >= 0 and n.meta["val"].shape[dim] == t.size

    def terms(self) -> list[Dims]:
        """Of the indices; what is known is whole along the dim that it is tied to."""
        found = []
        for i, index in self.indices.items():
            own = self.ties[i].along if i in self.ties else None
            found.append(fitted(tuple(() if j == own else d for j, d in enumerate(self.index_dims)), index))
        return found

    def rule(
        self, node: Node, before: Sequence[Dims], behind: Sequence[Dims], result: Dims, linear: Sequence[Sequence[int]],
        ops: tuple[str, ...] = ("sum",), **fields: Any,
    ) -> Rule | None:  # fmt: skip
        """``before`` and ``behind`` are the dims of operands on either side of the indices; the table comes first."""
        windows = [t.factor for t in self.ties.values()]
        terms = [self.table, *before, *self.terms(), *behind]
        return fit(node, terms, [result], linear, ops, windows=windows, **fields)

    def held(self, e: Emit) -> list[tuple[int, Tie]]:
        return [(i, t) for i, t in self.ties.items() if e.axes(t.factor)]

    def read(self, e: Emit, x: Local, indices: Sequence[Any], call: Any) -> Local:
        """`looked_up` for the result of a lookup, whose tied indices read rows that are fetched."""
        made = list(indices)
        for i, t in self.held(e):
            x, want = t.local_rows(e, x)
            made[i] = t.local_index(e, made[i], want)
        return looked_up(
            e, x, self.rows, {i: made[i] for i in self.indices},
            lambda x, found: call(x, [found.get(i) for i in range(len(made))]), self.after, self.wrap,
        )  # fmt: skip

    def concerned(self, e: Emit, indices: Sequence[Any], values: Local) -> tuple[dict[int, Local], Local]:
        """Of the indices and the values put there those that concern the local rows."""
        made = {i: indices[i] for i in self.indices}
        for i, t in self.held(e):
            dim = values.ndim - self.after - len(self.index_dims) + t.along
            made[i], values = t.local_readers(e, made[i], values, dim)
        return made, values


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

    def form(e: Emit, x: Local, indices: Sequence[Any]) -> Local:
        return a.read(e, x, indices, lambda x, found: e.same(x, found))

    reduce = contributed(node.meta["val"], *a.rows.values())
    return a.rule(node, [], [], a.result, [[0]], ANY_OP, form=form, reduce=reduce) if a.plain else None


@define(aten._unsafe_masked_index.default)
def _(node: Node) -> Rule | None:
    """``where(mask, x[indices], fill)``: the first device of sharded rows contributes what is masked out."""
    a = Advanced(node.args[0], _indices(node, 2))
    fill = node.args[3]

    def form(e: Emit, x: Local, mask: Local, indices: Sequence[Any], fill: Any) -> Local:
        rows = e.axes(*a.rows.values())
        made = a.read(e, x, indices, lambda x, found: e.same(x, mask, found, 0 if rows else fill))
        return mask.where(made, e.first(made.number(fill), rows)) if rows and fill != 0 else made

    if not a.plain:
        return None
    mask, reduce = fitted(a.result, node.args[1]), contributed(node.meta["val"], *a.rows.values())
    return a.rule(node, [mask], [], a.result, [[0]] if fill == 0 else [], form=form, reduce=reduce)


@define(aten.index_put.default, aten._unsafe_masked_index_put_accumulate.default)
def _(node: Node) -> Rule | None:
    """Added contributions may be spread over devices; what is set must be where its row is."""
    masked = node.target is aten._unsafe_masked_index_put_accumulate.default
    adds = masked or bool(argument(node, "accumulate", False))
    at = 2 if masked else 1
    values = node.args[at + 1]
    a = Advanced(node.args[0], _indices(node, at), True, values, tied=adds and not masked)
    if not a.plain:
        return None if masked or adds else _masked_fill(node)
    if values.meta["val"].dim() > len(a.result):
        return None
    every = {i: f"v{i}" for i in a.indices}

    def form(e: Emit, x: Local, *args: Any) -> Local:
        def call(x: Local, found: Mapping[int, Local]) -> Local:
            return e.same(x, *args[: at - 1], [found.get(i) for i in range(len(args[at - 1]))], value, *args[at + 1 :])

        indices, value = a.concerned(e, *args[at - 1 : at + 1])
        if not adds:
            return put(e, x, every, indices, call, wrap=True)
        held = {i: f for i, f in every.items() if e.axes(f)}
        found, inside = localised(e, held, indices, wrap=True)
        x = e.first(x, e.axes(*a.spread))
        ragged = {i: f for i, f in held.items() if uneven(e, f)}
        for i in ragged:
            x = x.pad(i, 0, 1)
        value = value if inside is None else lengthened(inside, a.after).where(value, 0)
        made = call(x, found)
        for i, f in ragged.items():
            made = made.slice(i, 0, e.size(f))
        return made

    whole = frozenset() if adds and node.meta["val"].dtype != torch.bool else a.spread
    mask = [fitted(a.result, m) for m in node.args[1:at]]
    return a.rule(
        node, mask, [fitted(a.result, values)], a.table, [[0, len(operands(node)) - 1]], ("sum",) if adds else ANY_OP,
        form=form, whole=whole,
    )  # fmt: skip


def _masked_fill(node: Node) -> Rule | None:
    """``x[mask] = scalar``."""
    x, indices, value = node.args[0].meta["val"], _indices(node, 1), node.args[2].meta["val"]
    if len(indices) != 1 or indices[0] is None or value.numel() != 1 or indices[0].meta["val"].dtype != torch.bool:
        return None
    whole = dims("d", x.dim())
    n = indices[0].meta["val"].dim()

    def form(e: Emit, x: Local, indices: Sequence[Local], value: Local, *_: Any) -> Local:
        return lengthened(indices[0], len(whole) - n).where(value.reshape([]), x)

    return fit(node, [whole, whole[:n], ((),) * value.dim()], [whole], form=form)
