"""Views and other pure data movement: linear in everything, under every reduction.

A reshape is factored by matching products of sizes: ``[6, 4] -> [24]`` is ``a b -> (a b)``; what has no common
factorisation is one whole block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands
from ..rules import ANY_OP, Dims, Linear, Rule, define, dims, fit
from .reduce import argument

aten, prims = torch.ops.aten, torch.ops.prims


def moved(node: Node, ops: Sequence[Dims], res: Sequence[Dims], **fields: Any) -> Rule | None:
    """A rule of data movement: all operands may be partial together, under any reduction."""
    return fit(node, ops, res, [list(range(len(operands(node))))], ANY_OP, **fields)


# --- reshapes -----------------------------------------------------------------------------------------------


def factored(old: Sequence[int], new: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Dims of a reshape's operand and result, the sizes of its factors and those that are never sharded.

    Both shapes are read from the left: the greatest common divisor of what is left of two dims is a factor of
    both; where there is none, the dims up to the next common product are tied to nothing.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    terms: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([() for _ in old], [() for _ in new])
    if math.prod(old) == 0:
        return tuple(terms[0]), tuple(terms[1]), {}, frozenset()
    i = j = 0
    left, right = 1, 1  # what is left of old[i - 1] and new[j - 1]

    def add(side: int, at: int, n: int, shared: str | None = None, fixed: bool = False) -> str:
        name = shared or f"f{len(sizes)}"
        sizes[name] = n
        terms[side][at] += (name,)
        if fixed:
            whole.add(name)
        return name

    while i < len(old) or j < len(new) or left > 1 or right > 1:
        if left == 1 and i < len(old):
            left, i = old[i], i + 1
            continue
        if right == 1 and j < len(new):
            right, j = new[j], j + 1
            continue
        if left == right == 1:
            break
        common = math.gcd(left, right)
        if common > 1:
            add(1, j - 1, common, add(0, i - 1, common))
            left, right = left // common, right // common
            continue
        # nothing in common: both sides grow until their products agree
        add(0, i - 1, left, fixed=True)
        add(1, j - 1, right, fixed=True)
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
                add(0, i - 1, old[i - 1], fixed=True)
            else:
                right, j = right * new[j], j + 1
                add(1, j - 1, new[j - 1], fixed=True)
        left = right = 1
    return tuple(terms[0]), tuple(terms[1]), sizes, frozenset(whole)


def reshape(node: Node) -> Rule:
    old, new, sizes, whole = factored(tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape))

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        return e.call(aten.reshape.default, x, list(e.shape()))

    return Rule((old,), (new,), sizes, whole=whole, linear=(Linear((0,), ANY_OP),), form=form)


@define(aten.view.default, aten._unsafe_view.default, aten.reshape.default, prims.reshape.default,
        aten._reshape_alias.default, aten.flatten.using_ints, aten.unflatten.int)  # fmt: skip
def _(node: Node) -> Rule | None:
    return reshape(node)


@define(aten.as_strided.default)
def _(node: Node) -> Rule | None:
    """Only where it is a reshape of a contiguous tensor."""
    x, out = node.args[0].meta["val"], node.meta["val"]
    if x.numel() != out.numel() or not x.is_contiguous() or not out.is_contiguous() or argument(node, "storage_offset"):
        return None
    return reshape(node)


@define(aten.squeeze, aten.unsqueeze, prims.squeeze)
def _(node: Node) -> Rule | None:
    """Dims of size 1 come and go; the others follow in order."""
    x, out = node.args[0].meta["val"], node.meta["val"]
    if node.target is aten.unsqueeze.default:
        at = node.args[1] % out.dim()
        old = dims("d", x.dim())
        return moved(node, [old], [(*old[:at], (), *old[at:])])
    if node.target is aten.squeeze.default:
        gone = {i for i, n in enumerate(x.shape) if n == 1}
    else:
        listed = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        gone = {d % x.dim() for d in listed if x.shape[d] == 1} if x.dim() else set()
    old = dims("d", x.dim())

    def form(e: Emit, x: Node, *_: Any) -> Node:  # a local piece of size 1 must stay
        return e.call(aten.squeeze.dims, x, sorted(gone)) if gone else e.call(aten.alias.default, x)

    return moved(node, [old], [tuple(d for i, d in enumerate(old) if i not in gone)], form=form)


@define(aten.expand.default, prims.broadcast_in_dim.default)
def _(node: Node) -> Rule | None:
    """New dims may be sharded: each device makes its own piece."""
    x, out = node.args[0].meta["val"], node.meta["val"]
    new = dims("d", out.dim())
    if node.target is aten.expand.default:
        old = new[out.dim() - x.dim() :]
        return moved(node, [old], [new], form=lambda e, x, *_, **__: e.call(aten.expand.default, x, list(e.shape())))
    where = node.args[2]
    return moved(
        node, [tuple(new[i] for i in where)], [new],
        form=lambda e, x, *_: e.call(prims.broadcast_in_dim.default, x, list(e.shape()), list(where)),
    )  # fmt: skip


# --- orders of dims -----------------------------------------------------------------------------------------


def _order(node: Node) -> list[int]:
    ndim = node.args[0].meta["val"].dim()
    order = list(range(ndim))
    target = node.target
    if target in (aten.permute.default, prims.transpose.default):
        return [d % ndim for d in node.args[1]]
    if target in (aten.t.default, aten.numpy_T.default):
        return order[::-1]
    if target in (aten.mT.default, aten.adjoint.default):
        return [*order[:-2], ndim - 1, ndim - 2]
    if target in (aten.movedim.int, aten.movedim.intlist):
        marked = torch.empty(list(range(ndim)), device="meta")
        return list(marked.movedim(*node.args[1:]).shape)
    a, b = node.args[1] % max(ndim, 1), node.args[2] % max(ndim, 1)
    if ndim:
        order[a], order[b] = order[b], order[a]
    return order


@define(aten.permute.default, aten.t.default, aten.transpose.int, aten.mT.default, aten.numpy_T.default,
        aten.movedim.int, aten.movedim.intlist, prims.transpose.default, aten.swapaxes.default)  # fmt: skip
def _(node: Node) -> Rule | None:
    old = dims("d", node.args[0].meta["val"].dim())
    return moved(node, [old], [tuple(old[i] for i in _order(node))])


# --- copies -------------------------------------------------------------------------------------------------


@define(aten.alias, aten.clone, aten.detach, aten.contiguous, aten.lift_fresh_copy, aten.lift_fresh, aten.view_as_real,
        aten.view_as_complex, aten._conj, aten.resolve_conj, aten.resolve_neg, aten.real, aten.imag, prims.clone,
        prims.view_of, aten._neg_view, aten.view_as_real_copy, aten.alias_copy, aten.detach_copy)  # fmt: skip
def _(node: Node) -> Rule | None:
    x, out = node.args[0].meta["val"], node.meta["val"]
    n = min(x.dim(), out.dim())  # one more dim is the pair of real and imaginary part
    return moved(node, [dims("d", n) + ((),) * (x.dim() - n)], [dims("d", n) + ((),) * (out.dim() - n)])


@define(aten.copy.default)
def _(node: Node) -> Rule | None:
    """The values of the second operand in the shape and dtype of the first."""
    x, y = (o.meta["val"] for o in operands(node))
    if x.dtype != y.dtype:
        return None
    whole = dims("d", x.dim())
    return fit(node, [whole, whole[x.dim() - y.dim() :]], [whole], [[1]], ANY_OP)
