"""Put the calls of a local graph in an order in which collectives start early and are waited for late.

A collective starts where it stands, behind all computation that stands before it, and is waited for where its result is
first read (`lower.expand_collectives`).  Nothing but the order changes; it is the same on every rank.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from ..collectives import is_collective
from ..cost import Profile
from ..ir import Partitioned, nbytes
from ..memory import storage
from ..placements import Mesh
from ..timeline import COMPUTE, Call, duration, seconds

ROUNDS = 4
NEAR = 64  # how many calls are looked at for one to run while a collective is on its way

Key = tuple[float, ...]


def run(local: Partitioned, profile: Profile) -> Partitioned:
    """Before: a simplified graph.  After: the same calls, in the order of `schedule`, forward before backward."""
    graph = local.graph.graph
    nodes = list(graph.nodes)
    behind = [n.meta.get("phase") == "backward" and n.op != "placeholder" for n in nodes[:-1]]
    halves = [[n for n, b in zip(nodes, behind, strict=False) if b == back] for back in (False, True)]
    _reorder(graph, [n for half in halves for n in _ordered(half, local.mesh, profile)])
    local.graph.recompile()
    return local


def schedule(half: GraphModule, mesh: Mesh, profile: Profile) -> GraphModule:
    """Order one half of a program.

    A collective that makes nothing larger stands right behind the last other call that reads its operand: from there on
    the operand would live for its sake alone.  Under a profile that lets collectives overlap it stands right behind its
    operand; a gather stands so early that computation hides it, but with no more than one copy before it that is not
    read yet, or smaller ones; and calls that need nothing that is on its way run meanwhile.
    """
    _reorder(half.graph, _ordered(list(half.graph.nodes)[:-1], mesh, profile))
    half.recompile()
    return half


def _reorder(graph: Graph, nodes: Sequence[Node]) -> None:
    for before, node in itertools.pairwise(nodes):
        if before.next is not node:
            before.append(node)


def _ordered(nodes: list[Node], mesh: Mesh, profile: Profile) -> list[Node]:
    """What starts early waits less, and what waits less starts the next in time: an order is ordered again, and the
    shortest is kept, be it that in which nothing overlaps."""
    apart = _early(nodes, at_once=False)
    if not profile.overlap:
        return apart
    nodes = _early(nodes, at_once=True)
    took = {n: duration(n, mesh, profile) for n in nodes}
    orders = [nodes]
    while len(orders) <= ROUNDS and (again := _overlapped(orders[-1], took)) not in orders:
        orders.append(again)
    return min([*orders, apart], key=lambda o: seconds([Call(n, *took[n], tuple(n.all_input_nodes)) for n in o]))


def _grows(node: Node) -> bool:
    return nbytes(node.meta["val"]) > nbytes(node.args[0].meta["val"])  # type: ignore[union-attr]


def _early(nodes: list[Node], at_once: bool) -> list[Node]:
    """Collectives that make nothing larger behind their operands, or (not ``at_once``) behind its other readers."""
    place: dict[Node, Key] = {n: (float(i),) for i, n in enumerate(nodes)}
    family: dict[Node, list[Node]] = {}  # what reads a value's memory, by the node that has it
    for node in nodes:
        for used in node.all_input_nodes:
            family.setdefault(storage(used)[0], []).append(node)
    for i, node in enumerate(nodes):
        if not is_collective(node) or _grows(node):
            continue
        operand = node.args[0]
        owner = storage(operand)[0]  # type: ignore[arg-type]
        others = [n for n in family[owner] if n is not node]
        last = max(place.get(n, (0.0,)) for n in ([operand] if at_once else [operand, *others]))  # type: ignore[list-item]
        if owner in place and owner.op != "placeholder" and last < place[node]:
            place[node] = (*last, float(i))
    return sorted(nodes, key=place.__getitem__)


def _overlapped(nodes: list[Node], took: Mapping[Node, tuple[float, str]]) -> list[Node]:
    """A list schedule of the streams of `timeline`; ``took`` has the seconds of each call and its stream."""
    given, nodes = [n for n in nodes if n.op == "placeholder"], [n for n in nodes if n.op != "placeholder"]
    wanted = _wanted(nodes, took)
    index = {n: i for i, n in enumerate(nodes)}
    missing = {n: sum(u in index for u in n.all_input_nodes) for n in nodes}
    ready = sorted((wanted[n], index[n]) for n in nodes if not missing[n])
    there: dict[Node, float] = {}
    now = 0.0  # the time of computation
    sent: dict[str, float] = {}  # when the last collective that started on a stream is done
    unread: dict[Node, float] = {}  # bytes of gathered copies that nothing has read yet
    found: list[Node] = []

    def operands_at(node: Node) -> float:
        return max((there[u] for u in node.all_input_nodes if u in there), default=0.0)

    while ready:
        chosen, blocked, until = None, 0, math.inf
        for i, (at, number) in enumerate(ready[:NEAR]):
            node = nodes[number]
            if at > until:
                break
            if is_collective(node):
                if not _grows(node) or len(unread) < 2 or sum(unread.values()) <= nbytes(node.meta["val"]):
                    chosen = i
                    break
                continue
            arrives = operands_at(node)
            if arrives <= now:
                chosen = i
                break
            if at + arrives - now < until:
                blocked, until = i, at + arrives - now
        _, number = ready.pop(blocked if chosen is None else chosen)
        node = nodes[number]
        arrives = operands_at(node)
        length, stream = took[node]
        if length:
            for used in node.all_input_nodes:
                unread.pop(storage(used)[0], None)
        if is_collective(node):
            there[node] = sent[stream] = max(now, arrives, sent.get(stream, 0.0)) + length
            if _grows(node):
                unread[node] = nbytes(node.meta["val"])
        else:
            there[node] = now = max(now, arrives) + length
        found.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    bisect.insort(ready, (wanted[user], index[user]))
    return given + found


def _wanted(nodes: Sequence[Node], took: Mapping[Node, tuple[float, str]]) -> dict[Node, float]:
    """When each call is to run, in seconds of computation: as it stands, and gathers (with what they are made from,
    where that comes of one input alone) early enough to be there in time.  Negative: before all else."""
    stands: dict[Node, float] = {}
    now = 0.0
    for node in nodes:
        stands[node] = now
        now += took[node][0] if took[node][1] == COMPUTE else 0.0
    first = {n: min((stands[u] for u in n.users if u in stands), default=now) for n in nodes if is_collective(n)}
    exact = dict(stands)
    begins: dict[str, float] = {}  # of the collective that comes next on a stream
    for node in sorted(reversed(first), key=first.__getitem__, reverse=True):  # the latest first
        length, stream = took[node]
        end = min((exact[u] for u in node.users if u in exact), default=now)
        begin = begins[stream] = min(end, begins.get(stream, now)) - length
        if _grows(node):
            chain = [node]
            while chain[-1] in stands and len(chain[-1].all_input_nodes) == 1:
                chain.append(chain[-1].all_input_nodes[0])
            if chain[-1] in stands:  # it is made from several values
                exact[node] = min(exact[node], max(begin, stands[chain[1]]))
            else:
                exact |= {n: min(exact[n], begin) for n in chain[:-1]}
    # what starts during a call starts before it
    starts = sorted(set(stands.values()))
    before = {n: starts[max(0, bisect.bisect_right(starts, at) - 1)] for n, at in exact.items()}
    return {n: stands[n] if at == stands[n] else math.nextafter(before[n], -math.inf) for n, at in exact.items()}
