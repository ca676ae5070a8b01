"""Steps in which weight gathers and gradient reductions hide behind computation.

A weight's copies may be asked for before they are wanted, and nothing but the end of the step waits for a parameter's
gradient: what their collectives take on the wire, ``hidden``, runs beside computation.  With ``compute`` the seconds of
computation, and ``rest`` those of all else (other collectives, and what the hidden ones take to start),

    step = rest + max(compute, hidden) = max over share in [0, 1] of  rest + (1 - share) compute + share hidden

For a fixed share that is a sum over choices and moves, which `solve` minimises, and its minimum is a bound of every
plan's step.  Where the cheapest plan for share 0 hides all, it is the cheapest; else the share with the highest bound
is looked for, between a plan that hides all and one that does not, where both cost the same.

No order is in these prices: any gather may run beside any computation.  What the order makes of a plan takes longer
where a gather is wanted before there is something to hide behind, and the longer, the more the plan relies on it.  So
the plan that is cheapest at an even share and the one where nothing hides are `ways` too, and of all the one that is
the shortest in its order is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.fx import Graph, Node

from .blend import Planner, within
from .ir import Input, Output, is_getitem, operands
from .memory import OverBudget
from .problem import Hub, Problem, Solution, Tables, Variable
from .redistribute import Move, move_price
from .solve import solve

FIRST = 1e-3  # a share that hardly counts: of plans that hide all, one that sends little
HALF = 0.5  # the share at which what hides counts as much as what it hides behind
LITTLE = 1e-4  # of the step: what a plan is worth that sends little
STEPS = 6
ENOUGH = 1e-3  # of the step: a distance from the bound that is not worth another search
SAME = 1e-9


def may_hide(graph: Graph, inputs: Sequence[Input], outputs: Sequence[Output]) -> frozenset[Node]:
    """The nodes of a joint graph whose values' collectives may hide: those of parameters alone, and those of which
    nothing but gradients of parameters is made, by calls of one operand."""
    weights: set[Node] = set()
    for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if given.kind == "param":
            weights.add(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and all(n in weights for n in node.all_input_nodes):
            weights.add(node)
    params = {i for i, given in enumerate(inputs) if given.kind == "param"}
    ends: dict[Node, bool] = {}  # whether an output is wanted as a gradient alone
    out = graph.output_node()
    for value, o in zip(out.args[0], outputs, strict=True):  # type: ignore[arg-type]
        if isinstance(value, Node):
            ends[value] = ends.get(value, True) and o.kind == "grad" and o.of in params
    late: set[Node] = set()
    for node in reversed(graph.nodes):
        users = [u for u in node.users if u is not out]
        if node.op == "call_function" and ends.get(node, bool(users)) and all(
            u in late and (is_getitem(u) or len(operands(u)) == 1) for u in users
        ):  # fmt: skip
            late.add(node)
    return frozenset(weights | late)


@dataclass(frozen=True)
class Step:
    """The parts of a plan's step, in seconds."""

    rest: float
    compute: float
    hidden: float

    @property
    def seconds(self) -> float:
        return self.rest + max(self.compute, self.hidden)

    def at(self, share: float) -> float:
        return self.rest + (1 - share) * self.compute + share * self.hidden


def step_of(problem: Problem, hidden: Collection[int], solution: Solution) -> Step:
    """The step of a solution; ``hidden`` are numbers of hubs."""
    compute = sum(float(_work(v)[c]) for v, c in zip(problem.variables, solution.choices, strict=True))
    rest, below = solution.sends, 0.0
    for i, (hub, tree) in enumerate(zip(problem.hubs, solution.trees, strict=True)):
        for move in tree.values():
            start, wire = parts(move, hub, problem, i in hidden)
            rest += start
            below += wire
    return Step(rest, compute, below)


def _work(variable: Variable) -> np.ndarray:
    """Seconds of computation alone of each choice."""
    return variable.compute if variable.sends is None else variable.compute - variable.sends


def parts(move: Move, hub: Hub, problem: Problem, hidden: bool) -> tuple[float, float]:
    """Seconds of a move that show, and those that may hide."""
    seconds = move_price(move, hub.shape, hub.element, problem.mesh, problem.profile)
    start = move_price(move, hub.shape, 0, problem.mesh, problem.profile) if hidden else seconds
    return start, seconds - start


def weighted(problem: Problem, hidden: Collection[int], share: float) -> Problem:
    """The problem in which what hides costs ``share`` of itself, and computation the rest of its own."""
    known: dict[int, np.ndarray] = {}  # equal arrays stay one
    variables = [
        dataclasses.replace(v, compute=known.setdefault(id(v.compute), v.compute - share * _work(v)))
        for v in problem.variables
    ]
    hubs = [dataclasses.replace(h) for h in problem.hubs]
    for i in hidden:
        hubs[i].element *= share
    return dataclasses.replace(problem, variables=variables, hubs=hubs)


@dataclass(frozen=True, eq=False)
class Way:
    """A problem that is linear, what is cheapest in it, and a plan found by it: a step with its bound."""

    problem: Problem
    free: Solution
    found: Solution


def ways(problem: Problem, hidden: Collection[int]) -> list[Way]:
    """How to look for short steps: first the cheapest, the last the cheapest where nothing hides."""
    tables = Tables(problem)
    apart = solve(problem, tables)
    if not hidden:
        return [Way(problem, apart, apart)]
    found, free, share, half = cheapest(problem, hidden, tables)
    first = Way(weighted(problem, hidden, share), free, found)
    others = [(weighted(problem, hidden, HALF), half), (problem, apart)]
    return [first, *(Way(p, s, priced(s, step_of(problem, hidden, s), found.bound)) for p, s in others)]


def cheapest(
    problem: Problem, hidden: Collection[int], tables: Tables
) -> tuple[Solution, Solution, float, Solution]:  # fmt: skip
    """The cheapest step found, as a solution with its parts, price and bound; what is cheapest at the share with the
    highest bound, and that share; and what is at `HALF`.  The search ends where the bound is near enough."""
    tried: list[tuple[Step, Solution, float]] = []

    def at(share: float) -> Step:
        solution = solve(weighted(problem, hidden, share), tables)
        tried.append((step_of(problem, hidden, solution), solution, share))
        return tried[-1][0]

    below, above = at(HALF), at(FIRST)
    if above.hidden <= above.compute:
        at(0.0)  # for its bound
    else:
        for _ in range(STEPS):
            bound, best = max(t[1].bound for t in tried), min(t[0].seconds for t in tried)
            if bound >= (1 - ENOUGH) * best:
                break
            if below.hidden >= below.compute:
                if tried[-1][2] == 1.0:
                    break  # nothing hides all
                below = at(1.0)
                continue
            slope = (above.hidden - above.compute) - (below.hidden - below.compute)
            share = (below.at(0.0) - above.at(0.0)) / slope
            found = at(share)
            if found.at(share) >= above.at(share) * (1 - SAME):
                break
            above, below = (found, below) if found.hidden > found.compute else (above, found)
    bound = max(t[1].bound for t in tried)
    step, solution, _ = min(tried, key=lambda t: t[0].seconds * (1 + LITTLE * (t[2] == 0.0)))
    _, free, share = max(tried, key=lambda t: t[1].bound)
    return priced(solution, step, bound), free, share, tried[0][1]


def priced(solution: Solution, step: Step, bound: float) -> Solution:
    compute = step.compute + solution.sends
    return dataclasses.replace(solution, compute=compute, price=step.seconds, bound=min(bound, step.seconds))


def shortest(
    builder: Planner, hubs: Collection[int], budget: float | None,
    holds: Callable[[Any], tuple[Mapping[str, float], int]] | None, limit: float,
) -> list[Any]:  # fmt: skip
    """The cheapest plan; where collectives at ``hubs`` may hide, the plans of all `ways`, equal ones once.

    Within a budget they are looked for by the first way and by the last.  Raises `OverBudget` where nothing fits
    (``holds``: see `passes.propagate.run`; ``limit``: see `blend.within`).
    """
    problem = builder.problem
    found: list[Any] = []
    failures: list[OverBudget] = []
    hidden = [i for i in hubs if not problem.hubs[i].tied]
    bound = 0.0
    made = ways(problem, hidden)
    for way in made:
        plan, below = builder.plan(way.found), way.found.bound
        if budget is not None and holds is not None and (not hidden or sum(holds(plan)[0].values()) > budget):
            if way not in (made[0], made[-1]):
                continue
            builder.problem = way.problem
            nothing_hides = bool(hidden) and way.problem is problem  # its prices are no steps
            try:
                plan = within(builder, builder.plan(way.free), budget, holds, math.inf if nothing_hides else limit)
            except OverBudget as error:
                failures.append(error)
                continue
            below = below if nothing_hides else plan.solution.bound
        bound = max(bound, below)
        if all((plan.solution.choices, plan.solution.trees) != (p.solution.choices, p.solution.trees) for p in found):
            found.append(plan)
    if not found:
        raise OverBudget.of(failures)
    if not hidden:
        return found
    steps = [step_of(problem, hidden, p.solution) for p in found]
    return [dataclasses.replace(p, solution=priced(p.solution, s, bound)) for p, s in zip(found, steps, strict=True)]
