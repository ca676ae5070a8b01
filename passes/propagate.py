"""Choose a sharding for every value: the cheapest whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .. import bodies
from ..cost import Profile
from ..emit import emit_choice
from ..family import Decisions
from ..hidden import may_hide, shortest
from ..ir import Captured, Input, is_getitem, nbytes, open_dims, operands, producer, results, source_line
from ..memory import Memory, OverBudget, lifetimes
from ..placements import Mesh, Spec, SpmdError
from ..plans import Bodies, Known, Plan, Shared, check_closed, planned_sizes
from ..problem import Hub, Problem, Solution, Variable, is_partial
from ..progress import stage
from ..redistribute import gathered
from ..rules import Choice, Linear, Rule, choices, replicated

WIDE = 0.05  # of the price: a gap within a budget with which uneven cuts are looked at too
TURNS = 8  # of a loop of which nobody knows how often it runs
MANY = 256  # devices from which a view whose pieces are cut unevenly is priced as if all of a piece moved
_CONSTRAIN, _TO_LOCAL, _FROM_LOCAL = "spmd::constrain", "spmd::to_local", "spmd::from_local"


def run(
    captured: Captured, mesh: Mesh, profile: Profile, memory: Memory | None = None,
    holds: Callable[[Plan], tuple[Mapping[str, float], int]] | None = None, known: Known | None = None,
    takes: Callable[[Plan], float] | None = None,
) -> Plan:  # fmt: skip
    """Before: an annotated graph.  After: the same graph, and a `Plan` for it that costs least.

    Within ``memory``: ``holds`` gives the bytes a device of a plan, by kind, and the number of the node at which its
    memory peaks.  ``takes`` gives the seconds of a step in its order, which decide where a profile lets collectives
    overlap.
    """
    say: Callable[[str], None] = stage if known is None else lambda what: None  # nothing of each body and border
    say("listing the choices of every node")
    builder = _Builder(captured, mesh, profile, memory, known=known)
    say(f"choosing placements: {len(builder.problem.variables)} nodes on {mesh}")
    budget = memory.budget if memory is not None and holds is not None else None
    found: list[Plan] = []
    failures: list[OverBudget] = []
    for rough in (False, True):  # where even cuts leave too much, what the solver places may be cut unevenly too
        again = _Builder(captured, mesh, profile, memory, rough=True, known=known) if rough else builder
        if rough and again.uneven == builder.uneven:
            break
        try:
            hubs = [i for i, (n, *_) in enumerate(again.hubs) if n in again.hidden]
            found += shortest(again, hubs, budget, holds, found[0].solution.price if found else math.inf)
        except OverBudget as error:
            failures.append(error)
        if budget is None or (found and found[0].solution.bound >= (1 - WIDE) * found[0].solution.price):
            break
    if not found:
        raise OverBudget.of(failures)
    return min(found, key=takes if takes is not None and len(found) > 1 else lambda p: p.solution.price)


# --- the same plan at other sizes -------------------------------------------------------------------------------


def decided(plan: Plan) -> Decisions:
    """A plan by the names of its nodes."""
    return Decisions(
        {n.name: c for n, c in plan.choice.items()},
        {n.name: _factors(r) for n, r in plan.rules.items()},
        {(n.name, r, phase): tree for (n, r, phase), tree in plan.trees.items()},
        list(plan.outputs),
        {n.name: spec for n, spec in plan.kept.items()},
        plan.replicated_ops,
    )


def _factors(r: Rule) -> Any:
    return r.operands, r.results


def decide(captured: Captured, decisions: Decisions, mesh: Mesh, profile: Profile) -> Plan:
    """Before: the annotated graph of another member of a family.  After: the same, and the family's plan for it.

    Raises `SpmdError` where a node is not there, or runs by another rule.
    """
    builder = _Builder(captured, mesh, profile, None, build=False)
    nodes = {n.name: n for n in captured.graph.graph.nodes}
    if missing := [n for n in decisions.choices if n not in nodes]:
        raise SpmdError(f"at these sizes the program is another one, which has no {missing[0]}")
    rules, compute, sends = {}, 0.0, 0.0
    for name, factors in decisions.factors.items():
        node = nodes[name]
        rules[node] = replicated(node) if node.meta.get("region") else builder.given.get(node) or replicated(node)
        if _factors(rules[node]) != factors:
            raise SpmdError(f"{name} ({source_line(node)}): at these sizes {node.target} is cut by other rules")
        each = builder._compute(node, rules[node], decisions.choices[name])
        compute, sends = compute + each[0], sends + each[1]
    return Plan(
        rules, {nodes[n]: c for n, c in decisions.choices.items()},
        {(nodes[n], r, phase): dict(tree) for (n, r, phase), tree in decisions.trees.items()},
        list(decisions.outputs), Solution([], [], compute, compute, 0.0, 0, sends), decisions.replicated_ops,
        {nodes[n]: spec for n, spec in decisions.kept.items()}, builder.hidden,
        {n: builder.planned(n, decisions.choices[n.name]) for n in rules if bodies.call_of(n)},
    )  # fmt: skip


class _Builder:
    def __init__(
        self, captured: Captured, mesh: Mesh, profile: Profile, memory: Memory | None, build: bool = True,
        rough: bool = False, known: Known | None = None,
    ) -> None:  # fmt: skip
        self.captured, self.mesh, self.profile, self.memory = captured, mesh, profile, memory
        self.graph: Graph = captured.graph.graph
        self.inputs = {n: i for i, n in enumerate(n for n in self.graph.nodes if n.op == "placeholder")}
        self.trained = {o.of for o in captured.outputs if o.kind == "grad"}
        self.problem = Problem(mesh, profile)
        self.rules: dict[Node, Rule] = {}
        self.index: dict[Node, int] = {}
        self.hubs: dict[tuple[Node, int, str], Hub] = {}
        self.partial: dict[tuple[Node, int], frozenset[str]] = {}
        self.fallback: list[str] = []
        self.tangents: dict[int, Node] = {}  # by the output they belong to
        self.domains: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
        self.known = known or Known()
        self.given = {n: self.known.rule(n) for n in self.graph.nodes if n.op == "call_function" and not is_getitem(n)}
        self.uneven = self._uneven(rough)
        self.problem.uneven = self.uneven
        self.shared = self.known.shared.setdefault((mesh, self.uneven), {})
        self.keeps: dict[Node, int] = {}
        self.hidden = may_hide(self.graph, captured.inputs, captured.outputs) if profile.overlap else frozenset()
        self.sinks = self._build() if build else []

    def _build(self) -> list[int | None]:
        inputs = iter(self.captured.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._add_input(node, next(inputs))
            elif node.op == "get_attr":
                if results(node):
                    self._add(node, replicated(node), [])
            elif node.op == "call_function" and not is_getitem(node):
                self._add_call(node)
        sinks = self._add_outputs()
        if self.memory is not None:
            self._add_keeps()
        self.problem.hubs = list(self.hubs.values())
        return sinks

    def plan(self, solution: Solution) -> Plan:
        made = [v.choices[c] for v, c in zip(self.problem.variables, solution.choices, strict=True)]
        picked = {n: made[i] for n, i in self.index.items()}
        trees = dict(zip(self.hubs, solution.trees, strict=True))
        outputs = [None if i is None else made[i].operands[0] for i in self.sinks]
        kept = {n: spec for n, i in self.keeps.items() if (spec := made[i].operands[1]) != picked[n].results[0]}
        inner = {n: self.planned(n, c) for n, c in picked.items() if bodies.call_of(n)}
        fallback = [*self.fallback, *(op for plans in inner.values() for _, p in plans for op in p.replicated_ops)]
        replicated_ops = tuple(dict.fromkeys(fallback))
        return Plan(self.rules, picked, trees, outputs, solution, replicated_ops, kept, self.hidden, inner)

    def planned(self, node: Node, choice: Choice) -> Bodies:
        """The bodies of a call under the border that a choice of it gives, and the plans for them, each made once.

        Raises `SpmdError` where there is none.
        """
        call = bodies.call_of(node)
        assert call is not None
        found = []
        for b, place in enumerate(call.bodies):
            body = place.meta["val"]
            border = bodies.border(call, b, choice.operands, choice.results, self.mesh)
            if (body, border) not in self.known.inner:
                program = bodies.captured(body, self.mesh, border)
                try:
                    self.known.inner[body, border] = program, run(program, border.mesh, self.profile, known=self.known)
                except SpmdError as error:
                    self.known.inner[body, border] = error
            plan = self.known.inner[body, border]
            if isinstance(plan, SpmdError):
                raise plan
            found.append(plan)
        return tuple(found)

    # --- variables ---------------------------------------------------------------------------------------------

    def _uneven(self, rough: bool) -> frozenset[tuple[int, int]]:
        """The uneven cuts in the user's own placements, as (size, pieces), and in what windows lead to from there;
        ``rough``: and all of inputs that the solver places, into no more pieces than there are elements."""
        cuts = set()
        axes = [n for n in self.mesh.shape if n > 1]
        counts = {math.prod(some) for k in range(1, len(axes) + 1) for some in itertools.combinations(axes, k)}

        def add(spec: Spec | None, shape: Any) -> None:
            for dim, n in enumerate(shape if spec is not None else ()):
                parts = 1
                for axis in spec.axes_of(dim):
                    parts *= self.mesh[axis]
                    cuts.add((int(n), parts))

        for node, i in zip(self.inputs, self.captured.inputs, strict=True):
            if results(node):
                add(i.spec, node.meta["val"].shape)
                if rough and i.spec is None:
                    cuts |= {(int(n), k) for n in node.meta["val"].shape for k in counts if k <= n}
        flat = self._flat_outputs()
        for node, o in zip(flat, self.captured.outputs, strict=True):
            if isinstance(node, Node) and results(node):
                add(o.spec, node.meta["val"].shape)
        for node in self.graph.nodes:
            if _name(node) in (_CONSTRAIN, _FROM_LOCAL):
                add(Spec.parse(node.args[1]), node.meta["val"].shape)
        windows = dict.fromkeys(n for r in self.given.values() if r is not None for n in r.windows.values())
        before = 0
        while before < (before := len(cuts)):
            for sizes in windows:
                parts = {p for n, p in cuts if n in sizes}
                cuts |= {(n, p) for n in sizes for p in parts if n > 1}
        return frozenset((n, p) for n, p in cuts if n % p)

    def _flat_outputs(self) -> list[Any]:
        out = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        return list(out.args[0]) if isinstance(out.args[0], (tuple, list)) else [out.args[0]]

    def _add_input(self, node: Node, given: Input) -> None:
        """An input has the user's placement, or any even one; a tangent has that of its output (`_add_outputs`)."""
        if not results(node):
            return self._add(node, (Choice((), ()),), [])
        spec, j = given.spec, node.meta.get("of")
        if given.kind == "tangent" and j is not None:
            spec = spec or self.captured.outputs[j].spec
        if spec is not None:
            domain: tuple[Choice, ...] = (Choice((), (spec,)),)
        else:
            opened = open_dims(node)
            letters = tuple(() if i in opened else (f"d{i}",) for i in range(node.meta["val"].dim()))
            sizes = {f"d{i}": int(n) for i, n in enumerate(node.meta["val"].shape)}
            domain = choices(Rule((), (letters,), sizes), self.mesh, self.uneven)
        if given.kind == "tangent" and j is not None:
            domain = tuple(Choice(c.results, c.results) for c in domain)  # type: ignore[arg-type]
            self.tangents[j] = node
        return self._add(node, domain, [])

    def _add(self, node: Node, domain: Rule | tuple[Choice, ...], used: list[Node]) -> None:
        """Add a node with its domain, and itself as consumer of what it uses."""
        if isinstance(domain, Rule):
            self.rules[node] = domain
            picks, compute, sends = self._shared_choices(node, domain)
        else:
            picks = self.domains.setdefault(domain, domain)  # equal ones are one object, as `shared` ones are
            compute, sends = np.zeros(len(picks)), None
        if not picks:
            raise SpmdError(f"{node.name} ({source_line(node)}): no choice fits mesh {self.mesh}")
        late = node.meta.get("phase") == "backward"
        variable = Variable(node.name, picks, compute, late=late, lasting=node.op == "placeholder", sends=sends)
        windowed = isinstance(domain, Rule) and bool(domain.windows) and not (domain.aligned and not self.uneven)
        variable.transparent = not windowed and _transparent(node, picks)
        index = len(self.problem.variables)
        self.problem.variables.append(variable)
        self.index[node] = index
        for r, value in enumerate(results(node)):
            if value is not None:
                ops = {p.reduce_op for c in picks for p in c.results[r].placements if p.is_partial()}
                self.partial[node, r] = frozenset(ops)
        for i, o in enumerate(used):
            self._want(o, (index, i), node.meta.get("phase", "forward"))

    def count(self, times: Sequence[int], copies: bool = False, of_inputs: bool = False) -> None:
        """Let choices count the bytes they hold: inputs for good, others in the mean over ``times`` (node numbers).

        A value may be read before and after such a time in a spec that is cut into fewer pieces than it was made in: a
        copy which is held besides.  Whether there is one depends on three choices; with ``copies`` the first reader on
        either side counts half of what it wants, so that what is counted may be more than what is held, and with
        ``of_inputs`` of inputs too, the more so.
        """
        lives = lifetimes(self.graph, self.captured.outputs)
        order = {n: i for i, n in enumerate(self.graph.nodes)}

        def share(first: int, last: int) -> float:
            return sum(first <= t <= last for t in times) / len(times)

        def pieces(choices: Sequence[Choice], r: int, first: int, last: int) -> np.ndarray:
            """What part of a value is held: while it is made all of a partial one, then what a reduce-scatter keeps."""
            specs = [s for c in choices if (s := c.results[r]) is not None]
            whole = np.array([1.0 / s.shards(self.mesh) for s in specs])
            after = np.array([1.0 / math.prod([self.mesh[a] for a in s.partial_axes()]) for s in specs])
            return whole * (share(first, first) + share(first + 1, last) * after)

        for node, index in self.index.items():
            variable = self.problem.variables[index]
            held = np.zeros(len(variable.choices))
            for r, value in enumerate(results(node)):
                if node.op == "placeholder":
                    parts = np.array([c.results[r].shards(self.mesh) for c in variable.choices])  # type: ignore[union-attr]
                    held += self._input_share(node) * nbytes(value) / parts
                for span in lives.get((node, r), ()):
                    held += nbytes(value) * pieces(variable.choices, r, *span) if share(*span) else 0.0
            variable.memory = held if held.any() else None
        for index, held in self._copies(times, order, of_inputs).items() if copies else ():
            variable = self.problem.variables[index]
            variable.memory = held if variable.memory is None else variable.memory + held
        for place, index in self.keeps.items():
            uses = [order[n] for n in place.users]
            part = share(min(uses), max(uses))
            variable = self.problem.variables[index]
            kept = [0.0 if s == k else 1.0 / k.shards(self.mesh) for s, k in (c.operands for c in variable.choices)]
            variable.memory = part * nbytes(place.meta["val"]) * np.array(kept)

    def _copies(self, times: Sequence[int], order: Mapping[Node, int], of_inputs: bool) -> dict[int, np.ndarray]:
        """Bytes that choices of readers count for copies, by variable."""
        place = {i: order[n] for n, i in self.index.items()}
        found: dict[int, np.ndarray] = {}
        for (node, r, phase), hub in self.hubs.items():
            if phase or (node.op == "placeholder" and not of_inputs):  # parameters' are `keeps`
                continue
            made = self.problem.variables[hub.source[0]].choices
            most = max(s.shards(self.mesh) for c in made if (s := c.results[r]) is not None)
            whole = math.prod(hub.shape) * hub.element
            for t in times:
                sides = [[(k, i) for k, i in hub.consumers if k in place and (place[k] > t) == after]
                         for after in (False, True)]  # fmt: skip
                if order[node] > t or not all(sides):
                    continue
                for k, i in (side[0] for side in sides):
                    shards = np.array([c.operands[i].shards(self.mesh) for c in self.problem.variables[k].choices])
                    held = np.where(shards < most, 0.5 / shards, 0.0) * (whole / len(times))
                    found[k] = found.get(k, np.zeros(len(held))) + held
        return found

    def _input_share(self, node: Node) -> float:
        """How many times its own bytes an input holds: what trains has a gradient and optimizer states."""
        i = self.inputs[node]
        trains = self.captured.inputs[i].kind == "param" and i in self.trained
        return 2.0 + self.memory.states if trains and self.memory is not None else 1.0

    def _want(self, value: Node, consumer: tuple[int, int], phase: str) -> None:
        source, r = producer(value)
        # a parameter is redistributed for each phase apart: the split gathers it again
        apart = source.op == "placeholder" and self.captured.inputs[self.inputs[source]].kind == "param"
        key = (source, r, phase if apart else "")
        if key not in self.hubs:
            kept = results(source)[r]
            sizes = planned_sizes(source, r, self.uneven)
            self.hubs[key] = Hub((self.index[source], r), [], sizes, kept.element_size())
        self.hubs[key].consumers.append(consumer)

    def _add_keeps(self) -> None:
        """Between the two phases of a parameter: the backward starts from the parameter's own piece, as the forward
        did, or from a copy of the forward's, which is then held until the backward and never made again."""
        for place, r, phase in list(self.hubs):
            if phase != "backward" or (place, r, "forward") not in self.hubs:
                continue
            pairs = [(s, k) for c in self.problem.variables[self.index[place]].choices
                     if (s := c.results[0]) is not None for k in gathered(s)]  # fmt: skip
            if all(s == k for s, k in pairs):
                continue
            self.keeps[place] = index = len(self.problem.variables)
            domain = tuple(Choice((s, k), (k,)) for s, k in pairs)
            self.problem.variables.append(
                Variable(f"{place.name}.keep", self.domains.setdefault(domain, domain), np.zeros(len(pairs)))
            )
            self._tie(place).consumers.append((index, 0))
            self.hubs[place, r, "forward"].consumers.append((index, 1))
            self.hubs[place, r, "backward"].source = (index, 0)

    def _tie(self, place: Node) -> Hub:
        """The hub through which others follow the spec of an input."""
        value = place.meta["val"]
        tie = Hub((self.index[place], 0), [], planned_sizes(place, 0, self.uneven), value.element_size(), tied=True)
        return self.hubs.setdefault((place, 0, "tie"), tie)

    def _add_call(self, node: Node) -> None:
        used = list(operands(node))
        whole = Spec.replicate(self.mesh)
        name = _name(node)
        if name == _CONSTRAIN:
            spec = self._checked(node)
            self._check_partial(node, spec, used[0])
            check_closed(node, 0, spec, self.mesh, f"{node.name} ({source_line(node)})")
            return self._add(node, (Choice((spec,), (spec,)),), used)
        if name == _TO_LOCAL:
            spec = self._checked(node)
            self._check_partial(node, spec, used[0])
            return self._add(node, (Choice((spec,), (whole,)),), used)
        if name == _FROM_LOCAL:
            return self._add(node, (Choice((whole,), (self._checked(node),)),), used)
        if node.meta.get("region"):
            return self._add(node, replicated(node), used)
        r = self.given[node]
        if r is None:
            values = [v for v in results(node) if v is not None]
            if values and any(v.numel() > 1 for v in (*values, *(o.meta["val"] for o in used))):
                self.fallback.append(str(node.target))
            r = replicated(node)
        return self._add(node, self._reachable(r, used), used)

    def _checked(self, node: Node) -> Spec:
        if (spec := Spec.parse(node.args[1])).axes != self.mesh.axes:
            raise SpmdError(f"{node.name} ({source_line(node)}): {spec} is not for {self.mesh}")
        return spec

    def _check_partial(self, node: Node, spec: Spec, value: Node) -> None:
        """Raise `SpmdError` where a constraint asks for a partial value that no choice of its producer makes."""
        asked = {p.reduce_op for p in spec.placements if p.is_partial()}
        if not asked <= self.partial.get(producer(value), frozenset()):
            raise SpmdError(
                f"{node.name} ({source_line(node)}): {spec} asks for a partial value, and {value.name} is never one; "
                "nothing is made partial: constrain it to Shard or Replicate"
            )

    def _reachable(self, r: Rule, used: list[Node]) -> Rule:
        """Leave out partials that no producer can hand over."""
        at_hand = [self.partial.get(producer(o), frozenset()) for o in used]
        linear = []
        for group in r.linear:
            ops = tuple(op for op in group.ops if all(op in at_hand[i] for i in group.operands))
            if ops:
                linear.append(Linear(group.operands, ops))
        return dataclasses.replace(r, linear=tuple(linear))

    def _add_outputs(self) -> list[int | None]:
        sinks: list[int | None] = []
        places = list(self.inputs)
        for j, (value, out) in enumerate(zip(self._flat_outputs(), self.captured.outputs, strict=True)):
            if not isinstance(value, Node) or not results(value):
                sinks.append(None)
                continue
            source, r = producer(value)
            if out.spec is not None:
                check_closed(source, r, out.spec, self.mesh, f"output {out.name!r} ({source_line(value)})")
                if is_partial(out.spec) and out.kind != "result":
                    raise SpmdError(f"output {out.name!r} ({source_line(value)}): {out.spec} asks for a partial value")
                specs = [out.spec]
            elif value.meta.get("region") or source.meta.get("region"):
                specs = [Spec.replicate(self.mesh)]
            else:
                made = self.problem.variables[self.index[source]].choices
                specs = [s for s in dict.fromkeys(c.results[r] for c in made) if s is not None and not is_partial(s)]
                specs = specs or [Spec.replicate(self.mesh)]
            index = len(self.problem.variables)
            if j in self.tangents:
                tangent = self.problem.variables[self.index[self.tangents[j]]]
                allowed = {c.operands[0] for c in tangent.choices}
                specs = [s for s in specs if s in allowed] or sorted(allowed, key=str)
                kept = results(source)[r]
                self.hubs[self.tangents[j], 0, "tie"] = Hub(
                    (index, 0), [(self.index[self.tangents[j]], 0)], planned_sizes(source, r, self.uneven),
                    kept.element_size(), tied=True,
                )
            if out.spec is None and out.of is not None:  # a gradient, or a new value, is placed as its input
                place = places[out.of]
                taken = self.problem.variables[self.index[place]].choices
                specs = [s for c in taken if (s := c.results[0]) is not None]
                domain = tuple(Choice((s, s), (s,)) for s in specs)
                self._tie(place).consumers.append((index, 1))
            else:
                domain = tuple(Choice((s,), (s,)) for s in specs)
            self.problem.variables.append(
                Variable(out.name, self.domains.setdefault(domain, domain), np.zeros(len(specs)))
            )
            self._want(value, (index, 0), value.meta.get("phase", "forward"))
            sinks.append(index)
        return sinks

    # --- prices of choices ---------------------------------------------------------------------------------------

    def _shared_choices(self, node: Node, r: Rule) -> Shared:
        """A node's choices and their seconds (see `_compute`), enumerated once for equal nodes."""
        elements = tuple(0 if v is None else v.element_size() for v in results(node))
        used = tuple(o.meta["val"].element_size() for o in operands(node))
        # what moves depends on strides and pads
        steps = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if r.windows and not isinstance(a, Node)]
        call = bodies.call_of(node)
        inner = tuple(id(b.meta["val"]) for b in call.bodies) if call is not None else ()
        taken = frozenset(u.args[1] for u in node.users if is_getitem(u))  # what else it makes need not travel
        key = (r.key(), node.target, elements, used, taken, str(steps), inner)
        if key not in self.shared:
            picks = choices(r, self.mesh, self.uneven, ("sum", "max", "min", "product"))
            seconds = np.array([self._compute(node, r, c) for c in picks]).reshape(len(picks), 2).T
            if call is not None:
                kept = np.flatnonzero(np.isfinite(seconds[0]))
                picks, seconds = tuple(picks[i] for i in kept), seconds[:, kept]
            if not self.profile.repeats_work and r.flops:
                work = np.array([self._flops(r, c) for c in picks])
                kept = np.flatnonzero(work <= work.min() * (1 + 1e-9))
                picks, seconds = tuple(picks[i] for i in kept), seconds[:, kept]
            self.shared[key] = (picks, seconds[0], seconds[1] if seconds[1].any() else None)
        return self.shared[key]

    def _flops(self, r: Rule, c: Choice) -> float:
        """The most that a device does."""
        parts = {f: math.prod(self.mesh[a] for a in axes) for f, axes in c.factor_axes}
        return r.flops * math.prod(-(-r.sizes[f] // n) / r.sizes[f] for f, n in parts.items())

    def _piece(self, value: torch.Tensor, spec: Spec) -> float:
        """Bytes of the largest piece of a value."""
        if not self.uneven:
            return nbytes(value) / spec.shards(self.mesh)
        sizes = (-(-int(n) // math.prod(self.mesh[a] for a in spec.axes_of(d))) for d, n in enumerate(value.shape))
        return math.prod(sizes) * value.element_size()

    def _compute(self, node: Node, r: Rule, c: Choice) -> tuple[float, float]:
        """Seconds of a choice, and what of them are collectives of the node's own form."""
        if node.op != "call_function":
            return 0.0, 0.0
        if (call := bodies.call_of(node)) is not None:
            return self._turns(node, call, c)
        axes = self._sends(r, c)
        if _is_view(node) and math.prod(self.mesh[a] for a in axes) > MANY:
            piece = self._piece(operands(node)[0].meta["val"], c.operands[0])
            return (self.profile.collective(self.mesh, "permute", axes, piece),) * 2
        inside = self._inside(node, r, c) if axes else 0.0
        if _is_view(node):
            return inside, inside
        used, made = operands(node), results(node)
        pieces = [self._piece(o.meta["val"], s) for o, s in zip(used, c.operands, strict=True)]
        pieces += [self._piece(v, s) for v, s in zip(made, c.results, strict=True) if v is not None and s is not None]
        traffic = sum(pieces)
        element = next((v.element_size() for v in made if v is not None), 4)
        return inside + self.profile.operator(self._flops(r, c), traffic, element), inside

    def _sends(self, r: Rule, c: Choice) -> tuple[str, ...]:
        """The axes over which the local form may hold collectives; none, where it holds none."""
        for f, axes in c.factor_axes:
            parts = math.prod(self.mesh[a] for a in axes)
            if f in r.windows and not (r.aligned and all(n % parts == 0 for n in r.windows[f])):
                return axes
            if r.reduce.get(f) == "none":
                return axes
        return ()

    def _turns(self, node: Node, call: bodies.Call, c: Choice) -> tuple[float, float]:
        """Seconds of a call's bodies: of every turn of a loop, of the longer branch."""
        try:
            each = [(s.price, s.price - s.compute + s.sends) for _, p in self.planned(node, c) if (s := p.solution)]
        except SpmdError:
            return math.inf, 0.0
        if not call.trips:
            return sum(p for p, _ in each) * TURNS, sum(s for _, s in each) * TURNS
        apart = math.prod(bodies.border(call, 0, c.operands, c.results, self.mesh).mesh.shape)
        turns, (price, sends) = -(-call.trips * apart // self.mesh.size), max(each)
        return price * turns, sends * turns

    def _inside(self, node: Node, r: Rule, c: Choice) -> float:
        """Seconds of the collectives that a local form issues itself."""
        scratch = Graph()
        mode = next(v for v in results(node) if v is not None).fake_mode
        local = []
        for o, spec in zip(operands(node), c.operands, strict=True):
            place = scratch.placeholder(o.name)
            with mode:
                shape = [-(-int(n) // math.prod(self.mesh[a] for a in spec.axes_of(d)))
                         for d, n in enumerate(o.meta["val"].shape)]  # fmt: skip
                place.meta["val"] = torch.empty(shape, dtype=o.meta["val"].dtype, device=o.meta["val"].device)
            local.append(place)
        emit_choice(scratch, self.mesh, mode, node, r, c, local)
        return self.profile.collectives(self.mesh, scratch.nodes)


def _is_view(node: Node) -> bool:
    return getattr(node.target, "is_view", False)


def _name(node: Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _transparent(node: Node, picks: tuple[Choice, ...]) -> bool:
    """Whether a gather or exchange before this node may as well come after it (see `solve.Variable`)."""
    used, made = operands(node), results(node)
    if len(used) != 1 or len(made) != 1 or made[0] is None or used[0].op == "placeholder":
        return False
    before, after = used[0].meta["val"], made[0]
    if before.numel() != after.numel() or after.element_size() > before.element_size():
        return False
    taken = [c.operands[0] for c in picks]
    given = [c.results[0] for c in picks]
    return len(set(taken)) == len(taken) == len(set(given)) and any(not is_partial(s) for s in taken)
