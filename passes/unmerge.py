"""Undo the merging of dims around products: ``[b, s, k] -> [b s, k]`` hides ``s`` from a mesh axis.

A linear layer on more than two dims reaches us as a product of matrices between reshapes that merge the leading dims
and part them again.  Of a merged dim only the outermost factor can be sharded, and only evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir import Captured, copied, is_tensor, operands

aten, prims = torch.ops.aten, torch.ops.prims
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}
SUMS = {aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.mean.dim}
Groups = list[list[int]]  # for each dim of a merged value the dims of what was merged


def run(captured: Captured) -> Captured:
    """Before: an annotated graph.  After: the same values; products, reductions and pointwise calls on values with
    merged leading dims run on the dims themselves, and what merges them stands behind.  The last dim of a value is
    left as it is."""
    captured = copied(captured)
    graph = captured.graph.graph
    rewriter = _Rewriter(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.meta.get("region") and is_tensor(node.meta.get("val")):
            rewriter.visit(node)
    graph.eliminate_dead_code()
    return captured


def grouping(parted: Sequence[int], merged: Sequence[int]) -> Groups | None:
    """The consecutive dims of ``parted`` that make each dim of ``merged``; None where they do not."""
    groups: Groups = []
    at = 0
    for n in merged:
        group = [at]
        size = parted[at] if at < len(parted) else 0
        at += 1
        while size < n and at < len(parted):
            size *= parted[at]
            group.append(at)
            at += 1
        if size != n:
            return None
        groups.append(group)
    return groups if at == len(parted) and math.prod(merged) > 0 else None


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


class _Rewriter:
    """``parted[v]`` is a value of more dims of which ``v`` is a reshape, with the dims that each dim of ``v`` holds."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parted: dict[Node, tuple[Node, Groups]] = {}

    def visit(self, node: Node) -> None:
        shapes = [_shape(node), *map(_shape, operands(node))]
        if not all(isinstance(n, int) for shape in shapes for n in shape):
            return
        if node.target in RESHAPES:
            self._reshape(node)
        elif not any(o in self.parted for o in operands(node)):
            return
        elif node.target is aten.permute.default:
            source, groups = self.parted[node.args[0]]
            order = [groups[d] for d in node.args[1]]
            made = self._call(node, aten.permute.default, source, [d for g in order for d in g])
            self._replace(node, made, order)
        elif node.target is aten.mm.default:
            self._product(node)
        elif node.target in SUMS:
            self._reduction(node)
        elif node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            self._pointwise(node)

    # --- what makes and ends merged values -----------------------------------------------------------------

    def _reshape(self, node: Node) -> None:
        source = self.parted[node.args[0]][0] if node.args[0] in self.parted else node.args[0]
        if _shape(source) == _shape(node):
            if source is not node.args[0]:
                node.replace_all_uses_with(source)
            return
        if source is not node.args[0]:
            node.target, node.args = aten.reshape.default, (source, list(_shape(node)))
        groups = grouping(_shape(source), _shape(node))
        if groups is None or len(_shape(node)) < 2:
            return
        *lead, last = groups
        if all(len(g) == 1 for g in lead):
            return
        if len(last) > 1:
            source = self._call(node, aten.reshape.default, source, [*_shape(source)[: last[0]], _shape(node)[-1]])
        self.parted[node] = (source, [*lead, last[:1]])

    def _replace(self, node: Node, made: Node, order: Groups) -> None:
        """``node`` is a reshape of ``made``, whose dims stand in the order of ``order``."""
        count = iter(range(len(_shape(made))))
        groups = [[next(count) for _ in g] for g in order]
        if all(len(g) == 1 for g in groups):
            node.replace_all_uses_with(made)
            return
        with self.graph.inserting_after(made):
            merged = self._made(node, aten.reshape.default, (made, list(_shape(node))), {})
        node.replace_all_uses_with(merged)
        self.parted[merged] = (made, groups)

    def _call(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(node):
            return self._made(node, target, args, kwargs)

    def _made(self, node: Node, target: Any, args: Any, kwargs: Any) -> Node:
        new = self.graph.call_function(target, tuple(args), dict(kwargs))
        values = torch.fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with node.meta["val"].fake_mode:
            new.meta = {**node.meta, "val": target(*values[0], **values[1])}
        return new

    # --- what runs on the dims themselves ------------------------------------------------------------------

    def _dims(self, value: Node) -> tuple[Node, Groups]:
        return self.parted.get(value, (value, [[i] for i in range(len(_shape(value)))]))

    def _product(self, node: Node) -> None:
        """A product over equal lists of dims; where the lists differ both are one dim."""
        (a, (rows, left)), (b, (right, columns)) = map(self._dims, node.args)
        if [_shape(a)[d] for d in left] != [_shape(b)[d] for d in right]:
            if min(len(left), len(rows)) > 1 or min(len(right), len(columns)) > 1:
                return
            if len(left) > 1:
                a, rows, left = node.args[0], [0], [1]
            if len(right) > 1:
                b, right, columns = node.args[1], [0], [1]
        if len(rows) == len(left) == len(columns) == 1:
            return
        made = self._call(node, aten.tensordot.default, a, b, left, right)
        self._replace(node, made, [rows, columns])

    def _reduction(self, node: Node) -> None:
        source, groups = self.parted[node.args[0]]
        dims = node.args[1] if len(node.args) > 1 else None
        if not dims:
            return
        gone = {d % len(groups) for d in dims}
        keep = len(node.args) > 2 and bool(node.args[2])
        over = [d for i in sorted(gone) for d in groups[i]]
        made = self._call(node, node.target, source, over, *node.args[2:], **node.kwargs)
        self._replace(node, made, [g for i, g in enumerate(groups) if keep or i not in gone])

    def _pointwise(self, node: Node) -> None:
        """Every operand has the merged dims parted alike, or stands in the last, unmerged ones alone."""
        shape = _shape(node)
        model = next((o for o in operands(node) if o in self.parted and _shape(o) == shape), None)
        if model is None:
            return
        source, groups = self.parted[model]
        plain = len(shape)  # dims from here on are not merged
        while plain and len(groups[plain - 1]) == 1:
            plain -= 1
        new: dict[Node, Node] = {}
        for o in operands(node):
            if o in self.parted and self.parted[o][1] == groups:
                new[o] = self.parted[o][0]
                pairs = list(zip(_shape(new[o]), _shape(source), strict=True))
                if any(n not in (1, m) for n, m in pairs) or (_shape(o) == shape and any(n != m for n, m in pairs)):
                    return
            elif len(_shape(o)) <= len(shape) - plain:
                new[o] = o
            else:
                return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
        made = self._call(node, node.target, *args, **kwargs)
        if _shape(made) == _shape(source):
            self._replace(node, made, groups)
