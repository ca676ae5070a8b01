"""Why a collective is there, what else could be done and what that would cost; and contracts, which say it when broken.

An alternative is a constraint that the user can write.  Each is tried: the graph is planned again with it, so that its
price is that of the whole program under it, whatever else it changes.  What leaves all that is sent is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.fx import Graph, GraphModule, Node

from . import passes
from .annotations import constrain_op
from .collectives import KINDS, Collective, axes_of, collectives, is_collective, message_bytes
from .contracts import Contract, ContractError
from .cost import profile_of
from .ir import Captured, Draft, Partitioned, body_of, is_getitem, nodes_within, source_line
from .memory import Memory, held
from .placements import Mesh, Spec, SpmdError
from .text import Line, Text, Type, readable, refs, type_of, type_text
from .words import listed, shown

SHOWN = 3  # alternatives in words
LARGE = 3000  # nodes of a graph that a broken contract does not plan again


@dataclass(frozen=True)
class Alternative:
    """What to write, and the price (seconds a step) and wire bytes of the program that results.

    All uses of the value see the constraint.  Where the backward holds a result as its operator made it, before the
    constraint that is written behind it, a program may do as well for less: the price is the most that it costs.
    """

    write: str
    spec: Spec | None
    price: float
    wire_bytes: float


@dataclass(frozen=True)
class Explanation:
    """``value`` is what moves, as the user's program has it; ``price`` is that of the program as it is, ``seconds`` the
    collective's part of it.  ``alternatives`` are by price."""

    collective: Collective
    value: str
    type: Any
    made: str
    wanted: tuple[str, ...]
    seconds: float
    price: float
    wire_bytes: float
    alternatives: tuple[Alternative, ...]

    def lines(self) -> list[str]:
        c = self.collective
        op = f", {c.op}" if c.op else ""
        at = f" at {c.source}" if c.source else ""
        found = [
            f"%{c.name} = {c.kind}[{c.axis}{op}]{at}, {c.phase}: {readable(c.wire_bytes)} on the wire, "
            f"{_time(self.seconds)} of {_time(self.price)} a step",
            f"  moves {self.value} {self.type}",
            f"  made  {self.made}",
            *(f"  for   {w}" for w in self.wanted),
        ]
        if not self.alternatives:
            return [*found, "  no other placement of it leads to a program"]
        best = self.alternatives[0].price - self.price
        why = "every other placement costs more" if best > 0 else "others cost the same"
        if best < 0:
            why = "the placements given lead to it, others would be cheaper"
        found.append(f"  why   {why}; a step, with what to write for it:")
        for a in self.alternatives[:SHOWN]:
            sent = a.wire_bytes - self.wire_bytes
            share = f" ({(a.price - self.price) / self.price:+.1%})" if self.price else ""
            moved = f"{'-' if sent < 0 else '+'}{readable(abs(sent))} wire"
            more = a.price - self.price
            found.append(f"    {'-' if more < 0 else '+'}{_time(abs(more))}{share}, {moved}: {a.write}")
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"


def explain(local: Partitioned, collective: Any, memory: Memory | None = None, solve: bool = True) -> Explanation:
    """Why ``collective`` (a `Collective` or its name) is in a program.  ``solve=False`` tries no alternatives."""
    node, whole, within = _find(local, collective)
    c = Collective.of(node)
    joint = {n.name: n for n in whole.graph.nodes}
    if "value" in node.meta:  # a redistribution
        name, r = node.meta["value"]
        value, wanted, operand = _result(joint[name], r), node.meta["spec"], node.args[0]
        made = f"{operand.meta['spec']} by %{operand.name} = {_op(operand)}{_at(operand)}"
    else:  # inside the local form of an operator
        origin = node.meta["origin"]
        results_of = (n for n in within.graph.nodes if n.meta.get("origin") == origin and "choice" in n.meta)
        final = next(results_of, node)
        value, wanted = _result(joint[origin], final.meta.get("result", 0)), final.meta.get("spec")
        made = f"inside {_op(joint[origin])}{_at(joint[origin])}, which gives {wanted}"
    if "members" in node.meta:
        made = f"{node.meta['why']}: {', '.join(node.meta['members'])}"
    users = tuple(dict.fromkeys(_wanted(local, u, node) for u in node.users))
    kind = type_of(value.meta["val"])
    shown = f"{_label(local, value)}{_at(value)}"
    seconds = local.profile.collective(local.mesh, c.kind, axes_of(node), message_bytes(node)) if local.profile else 0.0
    seconds *= max(1, c.times)
    wire = sum(k.wire_bytes for k in collectives(nodes_within(local.graph.graph)))
    solve = solve and within is local.graph  # what is in a body can't be constrained from outside
    tried = list(_alternatives(local, value, wanted, kind, axes_of(node), node, memory)) if solve else []
    tried.sort(key=lambda a: (a.price, a.wire_bytes, a.write))
    return Explanation(c, shown, type_text(kind), made, users, seconds, local.price, wire, tuple(tried))


def explain_text(text: Text, name: str) -> list[str]:
    """What the text of a program says of a collective, in lines: its source, who makes and who wants the value, and how
    these place it.  Alternatives need the program itself.  Raises `SpmdError` where the text has no such collective."""
    found = {k.name: k for k in text.collectives}
    line = found.get(name.removeprefix("%"))
    if line is None:
        raise SpmdError(f"the text has no collective {shown(name)}; it has {listed(found) or 'none'}")
    op = f", {line.reduce}" if line.reduce else ""
    at = f" at {line.source}" if line.source else ""
    sent = readable(line.wire_bytes(text.mesh))
    rows = [f"%{line.name} = {line.op}[{line.axis}{op}]{at}, {line.phase}: {sent} on the wire"]
    rows.append(f"  gives {type_text(line.type)} {line.spec or ''}".rstrip())
    made = {k.name: k for k in text.lines if k.name}
    for ref in refs(line):
        maker = made.get(ref.name)
        rows.append(f"  made  {_placed(maker)}" if maker is not None else "  made  by a line that the text leaves out")
    rows += [f"  for   {_placed(k)}" for k in text.lines if any(ref.name == line.name for ref in refs(k))]
    return [*rows, "  a text holds no alternatives: plan with --save, and explain the saved program"]


def _placed(line: Line) -> str:
    at = f" at {line.source}" if line.source else ""
    return f"{line.spec or 'in pieces'} by {line.call()}{at}"


def _find(local: Partitioned, collective: Any) -> tuple[Node, GraphModule, GraphModule]:
    """The node, and the global and local graph, the program's or a body's, in which it stands."""

    def within(whole: GraphModule, gm: GraphModule) -> Iterator[tuple[Node, GraphModule, GraphModule]]:
        bodies = {n.name: b for n in whole.graph.nodes if (b := body_of(n)) is not None}
        for node in gm.graph.nodes:
            if is_collective(node):
                yield node, whole, gm
            if (body := body_of(node)) is not None:
                yield from within(bodies[node.meta["origin"]], body)

    name = collective.name if isinstance(collective, Collective) else collective
    found = {place[0].name: place for place in within(local.captured.graph, local.graph)}
    key = name.removeprefix("%") if isinstance(name, str) else None
    if key not in found:
        raise SpmdError(f"the program has no collective {shown(name)}; it has {listed(found) or 'none'}")
    return found[key]


def _op(node: Node) -> str:
    if node.op == "placeholder":
        return "an input"
    if is_collective(node):
        return f"{KINDS[node.target]}[{'/'.join(axes_of(node))}]"
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def _at(node: Node) -> str:
    where = source_line(node)
    return f" at {where}" if where else ""


def _label(local: Partitioned, value: Node) -> str:
    names = dict(zip(local.captured.graph.graph.find_nodes(op="placeholder"), local.captured.inputs, strict=True))
    if value.op == "placeholder" and value not in names:
        return f"argument {value.name!r} of a body"
    return f"{names[value].kind} {names[value].name!r}" if value in names else f"the result of {_op(value)}"


def _wanted(local: Partitioned, user: Node, node: Node) -> str:
    if user.op == "output" and user.graph is not local.graph.graph:
        return "a result of the body"
    if user.op == "output":
        places = [o for v, o in zip(user.args[0], local.outputs, strict=True) if v is node]
        return f"{places[0].kind} {places[0].name!r}, which is {places[0].spec}"
    return f"%{user.name} = {_op(user)}{_at(user)}"


def _result(node: Node, r: int) -> Node:
    """The joint node that stands for result ``r`` of a node."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return node
    return next((u for u in node.users if is_getitem(u) and u.args[1] == r), node)


# --- alternatives -----------------------------------------------------------------------------------------------


def _alternatives(
    local: Partitioned, value: Node, wanted: Spec | None, kind: Any, axes: tuple[str, ...], node: Node,
    memory: Memory | None,
) -> Iterator[Alternative]:  # fmt: skip
    """The programs that result where the user places a value, or what it is made from or for, otherwise."""
    captured = local.captured
    places = captured.graph.graph.find_nodes(op="placeholder")
    outputs = [o for u in node.users if u.op == "output"
               for v, o in zip(u.args[0], local.outputs, strict=True) if v is node]  # fmt: skip
    if value in places:
        yield from _inputs(local, places.index(value), axes, memory)
    for o in outputs:
        if o.of is not None and o.kind == "grad":
            yield from _inputs(local, o.of, axes, memory)
        elif captured.outputs[local.outputs.index(o)].spec is not None:
            changed = _changed(captured)
            changed.outputs[local.outputs.index(o)] = dataclasses.replace(o, spec=None)
            yield from _tried(local, changed, f"leave {o.name!r} out of placements", None, memory)
    follows = outputs and all(o.kind == "grad" for o in outputs) and all(u.op == "output" for u in node.users)
    if wanted is None or value.op == "placeholder" or follows or not isinstance(kind, Type):
        return
    for spec in _others(wanted, kind.shape, local.mesh, axes[0]):
        text = _written(spec, local.mesh, len(kind.shape))
        if text is None:
            continue
        changed = _changed(captured)
        graph = changed.graph.graph
        old = next(n for n in graph.nodes if n.name == value.name)
        with graph.inserting_after(old):
            new = graph.call_function(constrain_op, (old, str(spec)))
        new.meta = {**old.meta, "val": old.meta["val"]}
        old.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        at = source_line(value) or "it"
        write = f"x = spmd.constrain(x, {text}) on the value of {at}"
        if value.meta.get("phase") == "backward":
            write = f"x.register_hook(lambda g: spmd.constrain(g, {text})) on the value of {at}"
        yield from _tried(local, changed, write, spec, memory)


def _inputs(local: Partitioned, i: int, axes: tuple[str, ...], memory: Memory | None) -> Iterator[Alternative]:
    """Other placements of an input, and of what follows it."""
    given = local.inputs[i]
    place = local.captured.graph.graph.find_nodes(op="placeholder")[i]
    if given.spec is None or given.kind in ("seed", "tangent"):
        return
    for spec in _others(given.spec, tuple(place.meta["val"].shape), local.mesh, axes[0]):
        changed = _changed(local.captured)
        changed.inputs[i] = dataclasses.replace(given, spec=spec)
        changed.outputs[:] = [dataclasses.replace(o, spec=spec) if o.of == i else o for o in changed.outputs]
        yield from _tried(local, changed, f"placements={{{given.name!r}: {str(spec)!r}}}", spec, memory)


def _others(spec: Spec, shape: tuple[int, ...], mesh: Mesh, axis: str) -> Iterator[Spec]:
    """``spec`` with every other placement on ``axis`` that cuts evenly; the axis is innermost of its dim."""
    for p in (Replicate(), *(Shard(d) for d in range(len(shape)))):
        if p == spec[axis]:
            continue
        if isinstance(p, Shard) and shape[p.dim] % (mesh[axis] * math.prod(mesh[a] for a in spec.axes_of(p.dim))):
            continue
        placements = tuple(p if a == axis else Replicate() if q.is_partial() else q
                           for a, q in zip(spec.axes, spec.placements, strict=True))  # fmt: skip
        sharing = {d: tuple(a for a in axes if a != axis) for d, axes in spec.sharding.items()}
        if isinstance(p, Shard):
            sharing[p.dim] = (*sharing.get(p.dim, ()), axis)
        yield Spec(spec.axes, placements, tuple(axes for axes in sharing.values() if len(axes) > 1))


def _written(spec: Spec, mesh: Mesh, ndim: int) -> str | None:
    """``spec`` as the user writes it to `constrain`; None where that has no words for its nesting."""
    named = {a: p for a, p in zip(spec.axes, spec.placements, strict=True) if isinstance(p, Shard)}
    if Spec.of(mesh, named, ndim) == spec:
        return "{" + ", ".join(f'"{a}": Shard({p.dim})' for a, p in named.items()) + "}"
    if Spec.of(mesh, spec.placements, ndim) == spec:
        words = (f"Shard({p.dim})" if isinstance(p, Shard) else "Replicate()" for p in spec.placements)
        return f"[{', '.join(words)}]"
    return None


def _changed(captured: Captured) -> Captured:
    """A copy to change."""
    graph, env = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(captured.graph.graph, env))
    for old, new in env.items():
        new.meta = dict(old.meta)
    graph.output_node().meta = dict(captured.graph.graph.output_node().meta)
    module = Draft(captured.graph, graph)
    return dataclasses.replace(captured, graph=module, inputs=list(captured.inputs), outputs=list(captured.outputs))


def _tried(
    local: Partitioned, changed: Captured, write: str, spec: Spec | None, memory: Memory | None
) -> Iterator[Alternative]:
    try:
        found = passes.plan(changed, profile_of(local.profile), memory)
    except SpmdError:  # no program meets it
        return
    sent = collectives(nodes_within(found.graph.graph))
    if _same(sent) != _same(collectives(nodes_within(local.graph.graph))):  # else it asks for what is there
        yield Alternative(write, spec, found.price, sum(k.wire_bytes for k in sent))


def _same(sent: Iterable[Collective]) -> Counter[Any]:
    """What collectives send, whatever their names and wherever they are said to be from."""
    return Counter(dataclasses.replace(c, name="", why="", source="") for c in sent)


# --- contracts --------------------------------------------------------------------------------------------------


def enforce(local: Partitioned, contract: Contract, states: float = 0.0, memory: Memory | None = None) -> None:
    """Raise `ContractError`, with the dearest offender explained, where a program breaks a contract."""
    if not contract:
        return
    made = collectives(nodes_within(local.graph.graph))
    broken = contract.broken(made, held(local, states))
    if not broken:
        return
    words = [b.words for b in broken]
    blamed = [c for b in broken for c in b.blamed]
    if blamed:
        small = len(local.captured.graph.graph.nodes) <= LARGE
        worst = max(blamed, key=lambda c: c.wire_bytes)
        words.append(str(explain(local, worst, memory, solve=small)))
    raise ContractError("a contract is broken: " + "\n".join(words))


