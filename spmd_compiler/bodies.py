"""Calls of operators that take bodies (`torch.ops.higher_order`), as data: what goes into a body and what comes out.

A *body* is a graph with values of its own; the specs of its inputs and outputs are its *border*.  A body is planned
and partitioned once for each border, as a program is whose placements are all given.  The border follows from the
choice of the call:

=================  ==========================================================================================
``cond``           both branches have the border of the call; the predicate is replicated, so that all ranks
                   take the same branch
``map``            a body gets one slice of each mapped operand: their specs without dim 0.  Axes that shard dim 0
                   part the slices between devices, so that within the body they don't exist
``scan``           as `map`, but dim 0 is whole; what is carried out is placed as what is carried in
``while_loop``     what is carried out is placed as what is carried in; the predicate is replicated
``invoke_subgraph``  the border is the call's
=================  ==========================================================================================
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.fx import GraphModule, Node

from .ir import Captured, Input, Output, body_of, is_tensor, results, source_line
from .placements import Mesh, Spec

hop = torch.ops.higher_order


@dataclass(frozen=True)
class Call:
    """How a call and its bodies exchange values.

    Placeholder ``i`` of every body gets ``feed[i]``: an operand by its position (see `ir.operands`) or None (a
    number), and whether the body gets one slice of its dim 0 at a time.  Outputs of the last body are the call's
    results, those from ``carried`` on are stacked where ``stacks``.  The first ``carried`` of inputs and outputs
    have one spec.  ``trips`` is how often a body runs, 0 where nobody knows.
    """

    bodies: tuple[Node, ...]
    feed: tuple[tuple[int | None, bool], ...]
    carried: int = 0
    stacks: bool = False
    parts: bool = False  # whether dim 0 of what is sliced and stacked may be sharded
    trips: int = 1
    asks: bool = False  # whether the first body gives the predicate alone

    def slot(self, output: int) -> bool:
        """Whether an output of the body becomes a slice of the call's result."""
        return self.stacks and output >= self.carried


Arguments = Sequence[Any]


def call_of(node: Node) -> Call | None:
    """The call that a node is; None for every other node, and for calls whose bodies are not at hand."""
    form = _FORMS.get(node.target) if node.op == "call_function" else None
    if form is None or node.meta.get("region"):
        return None
    found = form(*node.args, **node.kwargs)
    known = all(isinstance(b, Node) and body_of(b) is not None for b in found.bodies)
    plain = all(v is None or all(isinstance(n, int) for n in v.shape) for v in results(node))
    return found if known and plain else None


def _feed(first: int, *groups: tuple[Arguments, bool]) -> tuple[tuple[int | None, bool], ...]:
    """Operands are counted from ``first``; numbers are none."""
    count = itertools.count(first)
    return tuple(
        (next(count) if isinstance(a, Node) and is_tensor(a.meta.get("val")) else None, sliced)
        for args, sliced in groups
        for a in args
    )


def _cond(predicate: Any, true: Node, false: Node, given: Arguments = ()) -> Call:
    return Call((true, false), _feed(int(isinstance(predicate, Node)), (given, False)))


def _map(body: Node, mapped: Arguments, others: Arguments) -> Call:
    return Call((body,), _feed(0, (mapped, True), (others, False)), 0, True, True, _length(mapped))


def _scan(body: Node, init: Arguments, mapped: Arguments, others: Arguments = ()) -> Call:
    feed = _feed(0, (init, False), (mapped, True), (others, False))
    return Call((body,), feed, len(init), True, False, _length(mapped))


def _while(asks: Node, body: Node, carried: Arguments, others: Arguments = ()) -> Call:
    return Call((asks, body), _feed(0, (carried, False), (others, False)), len(carried), trips=0, asks=True)


def _invoke(body: Node, name: str, *given: Any) -> Call:
    return Call((body,), _feed(0, (given, False)))


_FORMS: dict[Any, Callable[..., Call]] = {
    hop.cond: _cond, hop.map_impl: _map, hop.scan: _scan, hop.while_loop: _while, hop.invoke_subgraph: _invoke,
}  # fmt: skip


def _length(mapped: Arguments) -> int:
    return int(mapped[0].meta["val"].shape[0]) if mapped else 1


def drop_unread(gm: GraphModule) -> None:
    """Take the results that no call reads out of regions (`invoke_subgraph`): a backward one makes the forward's."""
    regions: dict[GraphModule, list[Node]] = {}
    for place in bodies(gm):
        regions.setdefault(place.meta["val"], []).extend(place.users)
    for body, calls in regions.items():
        read = sorted({u.args[1] for c in calls for u in c.users if u.users})
        if any(c.target is not hop.invoke_subgraph for c in calls) or not read or len(read) == len(returned(body)):
            continue
        flat = returned(body)
        body.graph.output_node().args = (tuple(flat[i] for i in read),)
        body.graph.eliminate_dead_code()
        for call in calls:
            call.meta["val"] = tuple(call.meta["val"][i] for i in read)
            for user in list(call.users):
                if user.users:
                    user.args = (call, read.index(user.args[1]))
                else:
                    gm.graph.erase_node(user)


def made_by(call: Call, body: GraphModule, fake_mode: Any) -> tuple[Any, ...]:
    """What a call gives, by what its last body gives."""
    values = [v.meta["val"] if isinstance(v, Node) else v for v in returned(body)]
    with fake_mode:
        return tuple(
            v.new_empty((call.trips, *v.shape)) if call.slot(i) and is_tensor(v) else v for i, v in enumerate(values)
        )


# --- borders ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Border:
    """The specs of a body's inputs and outputs (None: no tensor), on the mesh that the body sees."""

    mesh: Mesh
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]


def border(call: Call, body: int, given: Sequence[Spec], made: Sequence[Spec | None], mesh: Mesh) -> Border:
    """The border of one of a call's bodies, from the specs of the call's operands and results."""
    apart = {a for o, sliced in call.feed if sliced and o is not None for a in given[o].axes_of(0)}
    seen = Mesh([(a, 1 if a in apart else n) for a, n in zip(mesh.axes, mesh.shape, strict=True)])
    inputs = tuple(None if o is None else sliced_spec(given[o]) if s else given[o] for o, s in call.feed)
    if call.asks and body == 0:
        return Border(seen, inputs, (Spec.replicate(seen),))
    outputs = tuple(s if s is None or not call.slot(i) else sliced_spec(s) for i, s in enumerate(made))
    return Border(seen, inputs, outputs)


def sliced_spec(spec: Spec) -> Spec:
    """The spec of one slice of dim 0."""
    whole = spec.axes_of(0)
    placements = tuple(
        Replicate() if a in whole else Shard(p.dim - 1) if isinstance(p, Shard) else p
        for a, p in zip(spec.axes, spec.placements, strict=True)
    )
    return Spec(spec.axes, placements, tuple(n for n in spec.nesting if n[0] not in whole))


def returned(body: GraphModule) -> list[Any]:
    """The flat outputs of a body."""
    value = next(n for n in reversed(body.graph.nodes) if n.op == "output").args[0]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def captured(body: GraphModule, mesh: Mesh, at: Border | None = None) -> Captured:
    """A body as a program of its own; without a border its specs are the solver's."""
    places = body.graph.find_nodes(op="placeholder")
    flat = returned(body)
    inputs = at.inputs if at is not None else (None,) * len(places)
    outputs = at.outputs if at is not None else (None,) * len(flat)
    return Captured(
        body,
        [Input(n.name, "seed" if n.meta.get("seed") else "input", s) for n, s in zip(places, inputs, strict=True)],
        [Output(str(i), "result", s if isinstance(v, Node) else None)
         for i, (v, s) in enumerate(zip(flat, outputs, strict=True))],
        len(flat),
        mesh if at is None else at.mesh,
        "body",
    )


def adopt(gm: GraphModule, phase: str = "", source: str = "") -> None:
    """Give the nodes that stand for bodies their bodies as values, and the nodes of a body the phase of its call, and
    its source line where they have none."""
    for node in gm.graph.nodes:
        if phase:
            node.meta["phase"] = phase
            node.meta["source"] = source_line(node) or source
    for node in gm.graph.find_nodes(op="get_attr"):
        body = operator.attrgetter(node.target)(gm)
        if isinstance(body, GraphModule):
            user = next(iter(node.users), node)
            node.meta["val"] = body
            adopt(body, user.meta.get("phase", "forward"), source_line(user))


def bodies(gm: GraphModule) -> list[Node]:
    """The nodes that stand for bodies in a graph."""
    return [n for n in gm.graph.find_nodes(op="get_attr") if body_of(n) is not None]


def count_turns(gm: GraphModule, times: int = 1) -> None:
    """Set ``meta["times"]`` of every node within bodies: how often it runs in a step, 0 where nobody knows.

    Of a `cond` either branch counts.
    """
    found: dict[Node, list[int]] = {}
    for node in gm.graph.nodes:
        if call := call_of(node):
            for place in call.bodies:
                found.setdefault(place, []).append(call.trips)
    for place, trips in found.items():
        body = place.meta["val"]
        total = times * sum(trips) if all(trips) else 0
        for node in body.graph.nodes:
            node.meta["times"] = total
        count_turns(body, total)


def with_bodies(program: Captured, change: Callable[[GraphModule], GraphModule]) -> Captured:
    """The same with every body changed, each once."""
    done: dict[GraphModule, GraphModule] = {}
    for node in bodies(program.graph):
        old = node.meta["val"]
        if old not in done:
            done[old] = change(old)
        node.meta["val"] = done[old]
        setattr(program.graph, node.target, done[old])
    return dataclasses.replace(program)
