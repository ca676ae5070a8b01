"""Pointwise operators: every dim is a factor, broadcast dims are tied to nothing.

Any functional op that torch tags as pointwise is covered; the tables say which are linear and name those that
lack the tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..ir import is_tensor, operands, results
from ..rules import Rule, define, define_default, dims, fit

aten, prims = torch.ops.aten, torch.ops.prims


def pointwise(node: Node, linear: Sequence[Sequence[int]] = (), **fields: Any) -> Rule | None:
    """The rule of a pointwise node; None if its results are not the broadcast of its operands."""
    made = results(node)
    if not made or any(r is None or r.shape != made[0].shape for r in made):
        return None
    given = [o.meta["val"].shape for o in operands(node)]
    try:
        if not given or torch.broadcast_shapes(*given) != made[0].shape:
            return None
    except RuntimeError:
        return None
    whole = dims("d", made[0].shape)
    return fit(node, [whole[len(whole) - len(s) :] for s in given], [whole] * len(made), linear, **fields)


def _each(node: Node) -> list[list[int]]:
    """Linear in each operand by itself (products)."""
    return [[i] for i in range(len(operands(node)))]


def _first(node: Node) -> list[list[int]]:
    return [[0]]


def _sum(node: Node) -> list[list[int]]:
    """Linear in both terms together; a scalar term would be added once for each device."""
    terms = [a for a in node.args[:2] if isinstance(a, Node) and is_tensor(a.meta.get("val"))]
    if len(terms) < 2:
        return [[0]] if node.args[1] == 0 else []
    return [[0, 1], [0], [1]] if _is_of_many(node) else [[0, 1]]


def _is_of_many(node: Node) -> bool:
    """Whether a sum is a term of another sum and of nothing else, or has such a term.

    In such a sum a whole term may become part of the partial sum that the others make: they are reduced once.
    """
    return _only_added(node) or any(a.target in SUMS and _only_added(a) for a in map(_unshaped, operands(node)))


def _only_added(node: Node) -> bool:
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target in SUMS:
            return True
        if not _reshapes(node):
            return False
    return False


def _unshaped(node: Node) -> Node:
    while _reshapes(node):
        node = node.args[0]
    return node


def _reshapes(node: Node) -> bool:
    return node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


SUMS = (aten.add.Tensor, aten.sub.Tensor)


def _with_whole_terms(e: Emit, *args: Any, **kwargs: Any) -> Local:
    """A sum in which a whole term counts on the first device alone of the axes on which the other is partial."""
    (result,) = e.result_specs
    given = list(args)
    terms = [i for i, a in enumerate(args) if isinstance(a, Local)]
    for i, spec in zip(terms, e.operand_specs, strict=True):
        axes = [a for a in result.partial_axes() if a not in spec.partial_axes()]
        given[i] = e.first(args[i], axes)
    return e.same(*given, **kwargs)


def _cast(node: Node) -> list[list[int]]:
    """Casts are linear where they keep fractions and signs."""
    old, new = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    fraction = [d.is_floating_point or d.is_complex for d in (old, new)]
    narrowed = old.is_complex and not new.is_complex
    return [] if torch.bool in (old, new) or fraction[0] > fraction[1] or narrowed else [[0]]


def _where(node: Node) -> list[list[int]]:
    return [[1, 2]] if len(operands(node)) == 3 else []


def _filled(node: Node) -> list[list[int]]:
    """Filled with zero."""
    return [[0]] if node.args[-1] == 0 else []


LINEAR: dict[object, Callable[[Node], Sequence[Sequence[int]]]] = {
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: _sum,
    aten.sub.Scalar: _sum,
    aten.mul.Tensor: _each,
    aten.mul.Scalar: _first,
    aten.div.Tensor: _first,
    aten.div.Scalar: _first,
    aten.neg.default: _first,
    aten._conj_physical.default: _first,
    aten.lerp.Scalar: lambda n: [[0, 1]],
    aten.addcmul.default: lambda n: [[0, 1], [0, 2]],
    aten.addcdiv.default: lambda n: [[0, 1]],
    aten.where.self: _where,
    aten.masked_fill.Scalar: _filled,
    aten._to_copy.default: _cast,
    prims.convert_element_type.default: _cast,
}


@define("prims::fma")
def _(node: Node) -> Rule | None:
    return pointwise(node, [[0, 2], [1, 2]] if len(operands(node)) == 3 else [])


@define(*LINEAR, aten.where, aten.polar, aten.complex, aten.isnan)
def _(node: Node) -> Rule | None:
    linear = LINEAR.get(node.target)
    groups = linear(node) if linear else ()
    if node.target in SUMS and len(groups) > 1:
        return pointwise(node, groups, form=_with_whole_terms)
    return pointwise(node, groups)


@define_default
def tagged(node: Node) -> Rule | None:
    """Any functional op that carries ``torch.Tag.pointwise``, a user's included."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or node.target._schema.is_mutable:
        return None
    return pointwise(node)
