"""Join small collectives of one axis and kind into one, where what that saves is more than the copies cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import collectives as coll
from ..cost import Profile
from ..ir import Partitioned, Writer, nbytes
from ..placements import Mesh
from ..timeline import COMPUTE, Call, calls, seconds, timed

aten = torch.ops.aten
MOST = 2**26  # bytes of one joined operand: what waits for the last of its members
SAME = 1e-9
JOINED = (coll.all_reduce, coll.all_gather, coll.reduce_scatter, coll.all_to_all)


@dataclass(frozen=True)
class _Item:
    """A collective that may be joined: from when its operand is there to when it is wanted (numbers of nodes), and the
    seconds of the copies into and out of the joined one."""

    node: Node
    ready: int
    wanted: int
    cost: float


def run(local: Partitioned, profile: Profile) -> Partitioned:
    """Before: a simplified graph.  After: the same, with collectives of one axis, kind, dtype and phase, of which none
    needs another, joined where that pays: operands are flattened and concatenated, results cut out.  As many bytes
    travel.  Only even pieces of known sizes are joined; ``local.saved`` has the seconds saved.

    Where collectives run beside computation, the graph is in the order of `overlap`, and it pays what makes the step
    of its timeline shorter: a joined collective waits for the last of its operands.

    Nothing changes under a profile that doesn't ask for it, or prices bytes alone.
    """
    if not profile.buckets or not profile.repeats_work:
        return local
    graph = local.graph.graph
    found = iter(_Beside(local, profile).groups()) if profile.overlap else iter(lambda: _next(local, profile), [])
    for members in found:
        local.saved += _saved(members, local.mesh, profile)
        _join(graph, [m.node for m in members], local.mesh, _results(local))
    graph.eliminate_dead_code()
    local.graph.recompile()
    return local


def _next(local: Partitioned, profile: Profile) -> list[_Item]:
    """Items to be joined next (none: all is done)."""
    for items in _items(local, profile):
        for last in sorted(items, key=lambda i: i.wanted):
            found, size = [], 0
            for item in sorted(items, key=lambda i: i.ready):
                more = nbytes(item.node.args[0].meta["val"])  # type: ignore[union-attr]
                if item.ready < last.wanted <= item.wanted and size + more <= MOST:
                    found.append(item)
                    size += more
            if _saved(found, local.mesh, profile) > 0:
                return found
    return []


def _items(local: Partitioned, profile: Profile) -> list[list[_Item]]:
    """What may be joined: collectives of one axis, kind, dtype and phase together."""
    groups: dict[Any, list[_Item]] = {}
    order = {n: i for i, n in enumerate(local.graph.graph.nodes)}
    results = _results(local)
    for node in order:
        if node.target not in JOINED or not _is_even(node, local.mesh):
            continue
        cost = _copies(node, profile, node in results)
        if cost < _start(node, local.mesh, profile):
            phase = node.meta.get("phase")
            key = (node.target, coll.axes_of(node), coll.reduce_op(node), node.meta["val"].dtype, phase)
            item = _Item(node, order[node.args[0]], min(order[u] for u in node.users), cost)  # type: ignore[index]
            groups.setdefault(key, []).append(item)
    return list(groups.values())


class _Beside:
    """What to join in a step whose collectives run beside computation."""

    def __init__(self, local: Partitioned, profile: Profile) -> None:
        self.local, self.profile = local, profile
        self.step = timed(calls(local))

    def groups(self) -> list[list[_Item]]:
        """One after another: collectives in the order in which they are wanted, each with those before it as long as
        that makes the step shorter."""
        found, shortest = [], seconds(self.step)
        for items in _items(self.local, self.profile):
            group: list[_Item] = []
            joined = self.step
            for item in sorted(items, key=lambda i: i.wanted):
                more = [*group, item]
                trial = self._joined(more) if len(more) > 1 else None
                if trial is not None and (took := seconds(trial)) < shortest * (1 - SAME):
                    group, joined, shortest = more, trial, took
                    continue
                if len(group) > 1:
                    found.append(group)
                    self.step = joined
                group = [item]
            if len(group) > 1:
                found.append(group)
                self.step = joined
        return found

    def _joined(self, items: list[_Item]) -> list[Call] | None:
        """The step in which these are one; None where one is wanted before another is ready, or they are large."""
        profile, members = self.profile, {i.node: i for i in items}
        size = sum(nbytes(n.args[0].meta["val"]) for n in members)  # type: ignore[union-attr]
        if size > MOST:
            return None
        place = {c.key: i for i, c in enumerate(self.step)}
        reads = tuple(r for c in self.step if c.key in members for r in c.reads)
        if any(r in members for r in reads):
            return None
        ready = max((place[r] for r in reads), default=-1)
        first: dict[Node, int] = {}
        for i, call in enumerate(self.step):
            for r in call.reads:
                if r in members:
                    first.setdefault(r, i)
        behind = max(ready, min(place[n] for n in members) - 1)
        if min(first.values(), default=len(self.step)) <= behind:
            return None
        node = items[0].node
        axes = coll.axes_of(node)
        whole = sum(coll.message_bytes(n) for n in members)
        alike = tuple(members)
        packed = sum(_traffic(n.args[0].meta["val"], profile) for n in members) + profile.launch  # type: ignore[union-attr]
        new = [
            Call(("packed", alike), packed, COMPUTE, reads),
            Call(alike, profile.collective(self.local.mesh, coll.KINDS[node.target], axes, whole), "/".join(axes),
                 (("packed", alike),)),
        ]  # fmt: skip
        unpacked: dict[int, list[Call]] = {}
        for n in members:
            blocks = n.target in (coll.all_gather, coll.all_to_all)
            took = _traffic(n.meta["val"], profile) + profile.launch if blocks else 0.0
            unpacked.setdefault(first.get(n, len(self.step)), []).append(Call(n, took, COMPUTE, (alike,)))
        made = new if behind < 0 else []
        for i, call in enumerate(self.step):
            made += unpacked.get(i, [])
            if call.key not in members:
                made.append(call)
            if i == behind:
                made += new
        return made + unpacked.get(len(self.step), [])


def _traffic(value: torch.Tensor, profile: Profile) -> float:
    """Seconds of a copy, in a kernel that copies more."""
    return profile.compute(0.0, 2 * nbytes(value), value.element_size()) - profile.launch


def _results(local: Partitioned) -> set[Node]:
    """What is returned, gradients apart: it has memory of its own."""
    values = zip(local.graph.graph.output_node().args[0], local.outputs, strict=True)  # type: ignore[arg-type]
    return {v for v, o in values if o.kind != "grad" and isinstance(v, Node)}


def _saved(items: list[_Item], mesh: Mesh, profile: Profile) -> float:
    if len(items) < 2:
        return 0.0
    return (len(items) - 1) * _start(items[0].node, mesh, profile) - sum(i.cost for i in items) - profile.launch


def _start(node: Node, mesh: Mesh, profile: Profile) -> float:
    return profile.collective(mesh, coll.KINDS[node.target], coll.axes_of(node), 0.0)


def _copies(node: Node, profile: Profile, returned: bool) -> float:
    """Seconds of packing a collective's operand and unpacking its result (a view where pieces arrive in one block)."""
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    blocks = returned or node.target in (coll.all_gather, coll.all_to_all)
    traffic = 2 * (nbytes(before) + (nbytes(after) if blocks else 0))
    return profile.compute(0.0, traffic, after.element_size()) - (0.0 if blocks else profile.launch)


def _is_even(node: Node, mesh: Mesh) -> bool:
    """Whether all pieces have one size, which is known; and what reads the result is of its phase."""
    x, parts = node.args[0], coll.group_size(node)
    if parts == 1 or not node.users or any("spec" not in n.meta or "global" not in n.meta for n in (node, x)):  # type: ignore[union-attr]
        return False
    if any(u.op != "output" and u.meta.get("phase") != node.meta.get("phase") for u in node.users):
        return False
    shapes = [n.meta["spec"].local_shape(n.meta["global"], mesh) for n in (x, node)]  # type: ignore[union-attr]
    if not all(isinstance(n, int) for shape in shapes for n in shape) or 0 in shapes[0]:
        return False
    dims = {coll.all_gather: [(1, 1)], coll.reduce_scatter: [(0, 1)], coll.all_to_all: [(1, 1), (0, 3)]}
    return all(shapes[side][node.args[i]] % parts == 0 for side, i in dims.get(node.target, []))  # type: ignore[index]


def _join(graph: Graph, nodes: list[Node], mesh: Mesh, results: set[Node]) -> None:
    """Replace collectives by one, right behind the last of their operands."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    nodes.sort(key=order.__getitem__)
    first, parts, kind = nodes[0], coll.group_size(nodes[0]), nodes[0].target
    last = max((n.args[0] for n in nodes), key=order.__getitem__)  # type: ignore[index, type-var]
    with graph.inserting_before(last.next):  # type: ignore[union-attr]
        writers = [_Writer(graph, mesh, n) for n in nodes]
        packed = [w.pack(parts) for w in writers]
        call = writers[0].call
        whole = call(aten.cat.default, packed, packed[0].meta["val"].dim() - 1)
        axis, op = coll.axes_of(first)[0], coll.reduce_op(first)
        args = {
            coll.all_reduce: (axis, parts, op),
            coll.all_gather: (0, parts, axis, parts),
            coll.reduce_scatter: (0, 1, axis, parts, op),
            coll.all_to_all: (1, parts, 0, 1, axis, parts),
        }[kind]  # type: ignore[index]
        joined = call(kind, whole, *args)
        joined.meta["why"] = f"{len(nodes)} of {coll.KINDS[kind]} over {axis} in one"
        joined.meta["members"] = [n.name for n in nodes]
        joined.meta["source"] = first.meta.get("source", "")
        begin = 0
        for node, writer, piece in zip(nodes, writers, packed, strict=True):
            size = int(piece.meta["val"].shape[-1])
            new = writer.unpack(joined, begin, size, parts)
            if node in results and kind in (coll.all_reduce, coll.reduce_scatter):
                new = writer.call(aten.clone.default, new)
            begin += size
            for key in ("spec", "global", "source"):
                new.meta[key] = node.meta[key]
            new.meta["joined"] = (coll.KINDS[kind], node.args[0].meta["spec"], axis, op)  # type: ignore[union-attr]
            node.replace_all_uses_with(new)
    _put_behind(first, new)


def _put_behind(first: Node, last: Node) -> None:
    """Put what stands from ``first`` on and reads what is made up to ``last`` behind it: views of a member's result may
    stand before the last operand, for they take no time."""
    order = {n: i for i, n in enumerate(first.graph.nodes)}
    end, node = last, first
    while node is not last:
        here, node = node, node.next
        if any(order[u] > order[here] for u in here.all_input_nodes):
            end.append(here)
            order[here], end = len(order), here


class _Writer:
    """Writes what comes before and after the joined collective for one of its members."""

    def __init__(self, graph: Graph, mesh: Mesh, node: Node) -> None:
        self.node = node
        self.emit = Writer(graph, mesh, node, node.meta["val"].fake_mode)
        self.origin = node.meta["origin"]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.emit.call(target, *args, **kwargs)
        node.meta["origin"] = self.origin
        return node

    def view(self, x: Node, shape: list[int]) -> Node:
        if not x.meta["val"].is_contiguous():
            x = self.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, x, shape)

    def pack(self, parts: int) -> Node:
        """The operand, flat, in as many rows as its parts go to devices."""
        x: Any = self.node.args[0]
        kind, shape = self.node.target, [int(n) for n in x.meta["val"].shape]
        size = math.prod(shape)
        if kind is coll.all_reduce:
            return self.view(x, [size])
        if kind is coll.all_gather:
            return self.view(x, [1, size])
        dim: Any = self.node.args[1 if kind is coll.reduce_scatter else 3]
        x = self.view(x, [*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]])
        if dim:
            x = self.call(aten.permute.default, x, [dim, *(d for d in range(len(shape) + 1) if d != dim)])
        return self.view(x, [parts, size // parts] if kind is coll.reduce_scatter else [parts, 1, size // parts])

    def unpack(self, joined: Node, begin: int, size: int, parts: int) -> Node:
        """This member's result."""
        kind, shape = self.node.target, [int(n) for n in self.node.meta["val"].shape]
        y = self.call(aten.slice.Tensor, joined, joined.meta["val"].dim() - 1, begin, begin + size)
        if kind in (coll.all_reduce, coll.reduce_scatter):
            return self.call(aten.view.default, y, shape)
        dim: Any = self.node.args[1]
        piece = [n // parts if d == dim else n for d, n in enumerate(shape)]
        y = self.view(y, [parts, *piece])
        if dim:
            y = self.call(aten.permute.default, y, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        return self.view(y, shape)
