"""From one spec to another: `moves` from a spec, `plan` the cheapest sequence, `price` it, `emit` it.

A move changes one axis by at most one collective:

=================  ====================================================================================
``P -> R``         all_reduce
``P -> S(d)``      reduce_scatter, the axis becoming innermost of ``d``
``S(d) -> R``      all_gather, if the axis is innermost of ``d``
``S(d) -> S(e)``   all_to_all, if the axis is innermost of ``d``; it becomes innermost of ``e``
``R -> S(d)``      a local slice, the axis becoming innermost of ``d``
nesting            permute: the axes that share ``d`` change order (even pieces)
size 1             an axis of one device changes its placement for nothing
=================  ====================================================================================

`plan` is a shortest path over specs, so what several moves cost together is weighed, not each alone.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx import Node

from . import collectives as coll
from .cost import Profile
from .ir import Writer
from .placements import Mesh, Spec, SpmdError
from .symbolic import IntExpr, length, offset

LOCAL = ("slice", "relabel")  # moves that no other device takes part in
alias_op = torch.ops.aten.alias.default
slice_op = torch.ops.aten.slice.Tensor


@dataclass(frozen=True)
class Move:
    """One step between specs.  ``kind`` is a collective's name, ``"slice"`` or ``"relabel"``."""

    kind: str
    axes: tuple[str, ...]
    source: Spec
    target: Spec


def _ceil_shape(spec: Spec, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The largest local sizes (those of coordinate 0), to which uneven pieces are padded on the wire."""
    local = []
    for dim, n in enumerate(shape):
        for axis in spec.axes_of(dim):
            n = -(-n // mesh[axis])
        local.append(int(n))
    return tuple(local)


def _with(spec: Spec, axis: str, placement: Shard | Replicate) -> Spec:
    """``spec`` with another placement on ``axis``, which becomes the innermost of its dim."""
    placements = tuple(placement if a == axis else p for a, p in zip(spec.axes, spec.placements, strict=True))
    sharding = {d: tuple(a for a in axes if a != axis) for d, axes in spec.sharding.items()}
    if type(placement) is Shard:
        sharding[placement.dim] = (*sharding.get(placement.dim, ()), axis)
    return Spec(spec.axes, placements, tuple(axes for axes in sharding.values() if len(axes) > 1))


def moves(spec: Spec, shape: tuple[int, ...], mesh: Mesh, uneven: Collection[tuple[int, int]] = ()) -> list[Move]:
    """Every move out of ``spec`` for a value of global ``shape``.

    A dim is newly sharded only where the pieces are even or its ``(size, pieces)`` is in ``uneven``.
    """
    found: list[Move] = []

    def may_shard(dim: int, axis: str) -> bool:
        parts = math.prod(mesh[a] for a in spec.axes_of(dim) if a != axis) * mesh[axis]
        return shape[dim] % parts == 0 or (shape[dim], parts) in uneven

    for axis, p in zip(spec.axes, spec.placements, strict=True):
        alone = mesh[axis] == 1
        if type(p) is Shard and spec.axes_of(p.dim)[-1] != axis and not alone:
            continue
        targets: list[Shard | Replicate] = [Shard(d) for d in range(len(shape)) if may_shard(d, axis)]
        if type(p) is not Replicate:
            targets.append(Replicate())
        for t in targets:
            if t == p:
                continue
            if alone:
                kind = "relabel"
            elif type(p) is Partial:
                kind = "all_reduce" if type(t) is Replicate else "reduce_scatter"
            elif type(p) is Shard:
                kind = "all_gather" if type(t) is Replicate else "all_to_all"
            else:
                kind = "slice"
            found.append(Move(kind, (axis,), spec, _with(spec, axis, t)))
    for group in spec.nesting:
        dim = spec[group[0]].dim
        if shape[dim] % math.prod(mesh[a] for a in group):
            continue
        kept = tuple(n for n in spec.nesting if n != group)
        for order in itertools.permutations(group):
            if order != group:
                found.append(Move("permute", group, spec, Spec(spec.axes, spec.placements, (*kept, order))))
    return found


def result_bytes(move: Move, shape: Sequence[int], element: float, mesh: Mesh) -> float:
    """Bytes of a move's result on one device, uneven pieces padded."""
    return math.prod(_ceil_shape(move.target, shape, mesh)) * element


def move_price(move: Move, shape: Sequence[int], element: float, mesh: Mesh, profile: Profile) -> float:
    """Seconds of one move: its collective; a slice is a view and free, like a relabelling."""
    if move.kind in LOCAL:
        return 0.0
    size = result_bytes(move, shape, element, mesh)
    return profile.collective(mesh, move.kind, move.axes, size)


def price(steps: Sequence[Move], shape: Sequence[int], element: int, mesh: Mesh, profile: Profile) -> float:
    """Seconds of a plan for a value of global ``shape`` with ``element`` bytes per element."""
    return sum(move_price(m, shape, element, mesh, profile) for m in steps)


@functools.lru_cache(maxsize=65536)
def plan(
    source: Spec,
    target: Spec,
    shape: tuple[int, ...],
    element: int,
    mesh: Mesh,
    profile: Profile,
    uneven: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[Move, ...]:
    """The cheapest moves from ``source`` to ``target``; ties go to fewer moves, then to the text order of specs.

    Raises `SpmdError` where there is none (nothing moves into ``Partial``).
    """
    if any(type(t) is Partial and s != t for s, t in zip(source.placements, target.placements, strict=True)):
        raise SpmdError(f"no redistribution leads from {source} to {target}: a value can't be made partial")
    # sizes that the two ends themselves cut unevenly may be cut so on the way
    ends = set(uneven)
    for spec in (source, target):
        for dim, n in enumerate(shape):
            parts = 1
            for axis in spec.axes_of(dim):
                parts *= mesh[axis]
                ends.add((n, parts))
    best: dict[Spec, float] = {source: 0.0}
    serial = itertools.count()
    heap: list[tuple[float, int, str, int, Spec, tuple[Move, ...]]] = [(0.0, 0, "", next(serial), source, ())]
    done: set[Spec] = set()
    while heap:
        cost, count, _, _, spec, path = heapq.heappop(heap)
        if spec == target:
            return path
        if spec in done:
            continue
        done.add(spec)
        for move in moves(spec, shape, mesh, ends):
            if move.target in done:
                continue
            total = cost + move_price(move, shape, element, mesh, profile)
            if total <= best.get(move.target, math.inf):
                best[move.target] = total
                heapq.heappush(heap, (total, count + 1, str(move.target), next(serial), move.target, (*path, move)))
    raise SpmdError(f"no redistribution leads from {source} to {target} for shape {shape} on {mesh}")


def gathered(spec: Spec) -> list[Spec]:
    """``spec``, and what gathers on some of its axes make of it."""
    cut = [a for axes in spec.sharding.values() for a in axes]
    found = []
    for n in range(len(cut) + 1):
        for gone in itertools.combinations(cut, n):
            placements = tuple(Replicate() if a in gone else p for a, p in zip(spec.axes, spec.placements, strict=True))
            nesting = tuple(tuple(a for a in axes if a not in gone) for axes in spec.nesting)
            found.append(Spec(spec.axes, placements, tuple(axes for axes in nesting if len(axes) > 1)))
    return found


def emit_move(e: Writer, x: Node, move: Move, shape: Sequence[int]) -> Node:
    """Write one move of the local value ``x`` (global ``shape``) to the graph."""
    size: IntExpr = 0
    total: IntExpr = 0
    if move.kind == "permute":
        order = list(move.axes)
        changed = next(n for n in move.target.nesting if set(n) == set(order))
        dim = move.source[order[0]].dim
        size = move.target.local_shape(shape, e.mesh)[dim]
        return e.call(coll.permute, x, dim, size, order, list(changed), [e.mesh[a] for a in order])
    if move.kind == "relabel":
        return e.call(alias_op, x)
    (axis,) = move.axes
    old, new, parts = move.source[axis], move.target[axis], e.mesh[axis]
    if type(new) is Shard:
        size = move.target.local_shape(shape, e.mesh)[new.dim]
    if type(old) is Shard:
        total = move.target.local_shape(shape, e.mesh)[old.dim]
    if move.kind == "all_reduce":
        return e.call(coll.all_reduce, x, axis, parts, old.reduce_op)
    if move.kind == "reduce_scatter":
        return e.call(coll.reduce_scatter, x, new.dim, size, axis, parts, old.reduce_op)
    if move.kind == "all_gather":
        return e.call(coll.all_gather, x, old.dim, total, axis, parts)
    if move.kind == "all_to_all":
        return e.call(coll.all_to_all, x, old.dim, total, new.dim, size, axis, parts)
    before = move.source.local_shape(shape, e.mesh)[new.dim]
    begin = offset(before, parts, axis)
    return e.call(slice_op, x, new.dim, begin, begin + length(before, parts, axis))


def emit(e: Writer, x: Node, steps: Sequence[Move], shape: Sequence[int]) -> Node:
    """Write a plan to the graph."""
    for move in steps:
        x = emit_move(e, x, move, shape)
    return x
