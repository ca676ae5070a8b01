"""Views and other pure data movement: linear in everything, under every reduction.

A reshape is parted into blocks of dims of equal size: ``[6, 4, 5] -> [24, 5]`` is ``[6, 4] -> [24]``, ``[5] -> [5]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..ir import argument, operands
from ..rules import ANY_OP, Rule, define, dims, fit, moved

aten, prims = torch.ops.aten, torch.ops.prims


# --- reshapes -----------------------------------------------------------------------------------------------


def blocks(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Runs of dims that a reshape makes of each other: the least of equal size, without dims of size 1 before them."""
    found, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        if old[i] == 1 or new[j] == 1:
            i, j = i + (old[i] == 1), j + (new[j] == 1 and old[i] != 1)
            continue
        begin, (a, b) = (i, j), (old[i], new[j])
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        found.append((range(begin[0], i), range(begin[1], j)))
    return found


def reshape(node: Node) -> Rule | None:
    """Of each block the first dims on both sides are one factor.  Its pieces are ranges of the block's elements, the
    same ones where both are even; else what a piece lacks is fetched."""
    old, new = tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)
    runs = blocks(old, new) if math.prod(old) else []
    left, right = ({run[side][0]: (f"f{k}",) for k, run in enumerate(runs)} for side in (0, 1))
    windows = [f"f{k}" for k, (i, j) in enumerate(runs) if old[i[0]] != new[j[0]]]

    def form(e: Emit, x: Local, *args: Any, **kwargs: Any) -> Local:
        (spec,) = e.operand_specs
        assert spec is not None
        given, made = spec.local_shape(old, e.mesh), list(e.shape())
        for k, (i, j) in enumerate(runs):
            factor, size = f"f{k}", math.prod(old[d] for d in i)
            have, want = ([(b * (size // n), end * (size // n)) for b, end in e.pieces(factor, n)]
                          for n in (old[i[0]], new[j[0]]))  # fmt: skip
            if e.axes(factor) and have != want:
                x = x.reshape([*made[: j[0]], math.prod(given[d] for d in i), *given[i.stop :]])
                x = e.fetch(x, j[0], factor, have, [[w] for w in want])
        return x.reshape(made)

    terms = [tuple(f.get(d, ()) for d in range(len(shape))) for f, shape in ((left, old), (right, new))]
    return moved(node, terms[:1], terms[1:], windows=windows, aligned=True, form=form)


@define(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _(node: Node) -> Rule | None:
    return reshape(node)


@define(aten.as_strided.default, aten.resize.default)
def _(node: Node) -> Rule | None:
    """Only where it is a reshape of a contiguous tensor."""
    x, out = node.args[0].meta["val"], node.meta["val"]
    if x.numel() != out.numel() or not x.is_contiguous() or not out.is_contiguous() or argument(node, "storage_offset"):
        return None
    return reshape(node)


@define(aten.squeeze, aten.unsqueeze)
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

    def form(e: Emit, x: Local, *_: Any) -> Local:  # a local piece of size 1 must stay
        return x.squeeze(sorted(gone)) if gone else x.alias()

    return moved(node, [old], [tuple(d for i, d in enumerate(old) if i not in gone)], form=form)


@define(aten.expand.default)
def _(node: Node) -> Rule | None:
    """New dims may be sharded: each device makes its own piece."""
    new = dims("d", node.meta["val"].dim())
    old = new[len(new) - node.args[0].meta["val"].dim() :]
    return moved(node, [old], [new], form=lambda e, x, *_, **__: x.expand(list(e.shape())))


@define(aten.permute.default, aten.t.default, aten.transpose.int)
def _(node: Node) -> Rule | None:
    old = dims("d", node.args[0].meta["val"].dim())
    order = list(range(len(old)))
    if node.target is aten.permute.default:
        order = [d % len(old) for d in node.args[1]]
    elif len(old) > 1:
        a, b = (0, 1) if node.target is aten.t.default else (d % len(old) for d in node.args[1:3])
        order[a], order[b] = b, a
    return moved(node, [old], [tuple(old[i] for i in order)])


# --- copies -------------------------------------------------------------------------------------------------


@define(aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy, aten.view_as_real, aten.view_as_complex, aten._conj,
        aten._neg_view)  # fmt: skip
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
