"""Write the local graph that a plan describes."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..bodies import call_of, count_turns
from ..cost import Profile
from ..emit import emit_choice
from ..ir import (
    Captured,
    Draft,
    Partitioned,
    Writer,
    copy_meta,
    is_getitem,
    local_fake,
    operands,
    producer,
    results,
    source_line,
)  # fmt: skip
from ..placements import Mesh, Spec
from ..plans import Plan
from ..problem import Solution
from ..redistribute import Move, emit_move

_IDENTITY = ("spmd::constrain", "spmd::to_local", "spmd::from_local")


def run(captured: Captured, plan: Plan, mesh: Mesh, profile: Profile) -> Partitioned:
    """Before: an annotated graph and the plan for it.  After: a local graph in which every value has the spec the
    plan gave it and every redistribution is explicit, each copy of a value made once (in each phase for a
    parameter), where it is first needed."""
    return _Partitioner(captured, plan, mesh, profile).run()


class _Partitioner:
    def __init__(self, captured: Captured, plan: Plan, mesh: Mesh, profile: Profile) -> None:
        self.captured, self.mesh, self.profile = captured, mesh, profile
        self.plan: Any = plan  # every value here has a spec
        self.graph = Graph()
        self.values: dict[tuple[Node, int], tuple[Node, Spec]] = {}
        self.copies: dict[tuple[Node, int, str], dict[Spec, Node]] = {}
        self.params = {n for n, i in zip(self._placeholders(), captured.inputs, strict=True) if i.kind == "param"}
        self.scalars: dict[Node, Node] = {}
        self.bodies: dict[int, Node] = {}  # the node of each partitioned body, by its plan
        self.fake_mode = next(
            (v.fake_mode for n in captured.graph.graph.nodes for v in results(n) if hasattr(v, "fake_mode")), None
        )

    def _placeholders(self) -> list[Node]:
        return [n for n in self.captured.graph.graph.nodes if n.op == "placeholder"]

    def run(self) -> Partitioned:
        names = iter(self.captured.inputs)
        for node in self.captured.graph.graph.nodes:
            if node.op == "placeholder":
                self._leaf(node, next(names).name)
            elif node.op == "get_attr":
                self._leaf(node, node.name)
            elif node.op == "call_function" and not is_getitem(node):
                self._call(node)
            elif node.op == "output":
                self._output(node)
        inputs = [
            dataclasses.replace(i, spec=self.values[n, 0][1] if (n, 0) in self.values else None)
            for n, i in zip(self._placeholders(), self.captured.inputs, strict=True)
        ]
        outputs = [dataclasses.replace(o, spec=s)
                   for o, s in zip(self.captured.outputs, self.plan.outputs, strict=True)]  # fmt: skip
        attributes = {n.target: n.meta["val"] if isinstance(n.meta.get("val"), GraphModule)
                      else operator.attrgetter(n.target)(self.captured.graph)
                      for n in self.graph.find_nodes(op="get_attr")}  # fmt: skip
        gm = Draft(attributes, self.graph)
        count_turns(gm)
        solution = self.plan.solution
        return Partitioned(
            gm, inputs, outputs, self.captured.num_forward_outputs, self.mesh, self.captured,
            price=self._price(solution), bound=solution.bound, replicated_ops=self.plan.replicated_ops,
            profile=self.profile,
        )  # fmt: skip

    def _leaf(self, node: Node, name: str) -> None:
        if node.op == "get_attr" and node.users and all(u in self.plan.bodies for u in node.users):
            return  # a body, partitioned for each of its calls
        new = self.graph.node_copy(node)
        new.meta = dict(node.meta)
        new._rename(re.sub(r"\W+", "_", name).strip("_") or node.name)
        if new.op == "placeholder":
            new.target = new.name
        if not results(node):
            if node.op == "get_attr":  # the body of a higher-order operator
                new.meta["val"] = operator.attrgetter(node.target)(self.captured.graph)
            self.scalars[node] = new
            return
        spec = self.plan.choice[node].results[0]
        new.meta["val"] = local_fake(node.meta["val"], spec, self.mesh)
        self._mark(new, spec, node.meta["val"])
        self.values[node, 0] = (new, spec)

    def _mark(self, new: Node, spec: Spec, value: torch.Tensor) -> None:
        new.meta["spec"] = spec
        new.meta["global"] = tuple(int(s) for s in value.shape)

    def _call(self, node: Node) -> None:
        choice = self.plan.choice[node]
        local = [self._obtain(o, spec, node) for o, spec in zip(operands(node), choice.operands, strict=True)]
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _IDENTITY:
            new = local[0]
            if node.target._schema.name == "spmd::from_local":  # the same memory under the name of a global value
                new = Writer(self.graph, self.mesh, node, self.fake_mode).call(torch.ops.aten.alias.default, new)
                self._mark(new, choice.results[0], node.meta["val"])
            self.values[node, 0] = (new, choice.results[0])
            return
        rule = self.plan.rules[node]
        if node in self.plan.bodies:
            call = call_of(node)
            assert call is not None
            for place, (captured, plan) in zip(call.bodies, self.plan.bodies[node], strict=True):
                self.scalars[place] = self._body(place, captured, plan)
        made = emit_choice(self.graph, self.mesh, self.fake_mode, node, rule, choice, local, self.scalars)
        for r, new in enumerate(made):
            if new is not None:
                new.meta["choice"], new.meta["result"] = choice, r
                self.values[node, r] = (new, choice.results[r])

    def _body(self, place: Node, captured: Captured, plan: Plan) -> Node:
        """The node of a body partitioned by ``plan``; the names of its values begin with its own."""
        if id(plan) not in self.bodies:
            local = run(captured, plan, captured.mesh, self.profile).graph
            new = self.graph.create_node("get_attr", place.name, name=place.name)
            new.target = new.name
            new.meta = {**place.meta, "val": local, "origin": place.name}
            for node in local.graph.nodes:
                if node.op != "output":
                    node._rename(f"{new.name}_{node.name}")
                if node.op == "placeholder":
                    node.target = node.name
            local.recompile()
            self.bodies[id(plan)] = new
        return self.bodies[id(plan)]

    def _obtain(self, value: Node, wanted: Spec, user: Node | None) -> Node:
        """The local node that holds ``value`` in spec ``wanted``, redistributing it on first need."""
        source, r = producer(value)
        phase = user.meta.get("phase", "forward") if user is not None else value.meta.get("phase", "forward")
        key = (source, r, phase if source in self.params else "")
        node, spec = self.values[source, r]
        if phase == "backward" and key not in self.copies and source in self.plan.kept:
            spec = self.plan.kept[source]
            node = self._obtain(source, spec, None)
            node.meta["kept"] = True
        copies = self.copies.setdefault(key, {spec: node})
        return self._copy(key, copies, wanted, user)

    def _copy(self, key: tuple[Node, int, str], copies: dict[Spec, Node], wanted: Spec, user: Node | None) -> Node:
        if wanted not in copies:
            move: Move = self.plan.trees[key][wanted]
            before = self._copy(key, copies, move.source, user)
            value = results(key[0])[key[1]]
            e = Writer(self.graph, self.mesh, user if user is not None else key[0], self.fake_mode)
            new = emit_move(e, before, move, value.shape)
            self._mark(new, wanted, value)
            new.meta["source"] = source_line(user) if user is not None and user.op != "output" else source_line(key[0])
            wants = user.name if user is not None else "an output"
            new.meta["why"] = f"{self.values[key[0], key[1]][0].name} is {move.source}, {wants} wants {wanted}"
            new.meta["value"] = (key[0].name, key[1])
            new.meta["move"] = move
            new.meta["hides"] = key[0] in self.plan.hidden
            copies[wanted] = new
        return copies[wanted]

    def _output(self, node: Node) -> None:
        flat = list(node.args[0]) if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
        local: list[Any] = []
        for value, spec in zip(flat, self.plan.outputs, strict=True):
            if spec is None:
                local.append(map_arg(value, self.scalars.__getitem__))
            else:
                local.append(self._obtain(value, spec, None))
        out = self.graph.output(local[0] if isinstance(node.args[0], Node) else tuple(local))
        out.meta = dict(node.meta)
        copy_meta(out, node)

    def _price(self, solution: Solution) -> float:
        """Seconds of the step: computation, and the moves that were emitted (those inside local forms are counted with
        their choice).  What of them may hide runs beside computation alone (`hidden`)."""
        moves = [n for n in self.graph.nodes if "move" in n.meta]
        seconds = self.profile.collectives(self.mesh, moves)
        hiding = [n for n in moves if n.meta["hides"]]
        start = self.profile.collectives(self.mesh, hiding, starts=True)
        hidden = self.profile.collectives(self.mesh, hiding) - start
        return seconds - hidden + solution.sends + max(solution.compute - solution.sends, hidden)
