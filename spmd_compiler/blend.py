"""Plans on the lower hull of price against memory: those where a byte has a price, and those between two of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .memory import Found, OverBudget, cheapest_within
from .problem import Problem, Solution, Tables
from .progress import stage
from .rules import Choice
from .solve import _priced, solve

ROUNDS, MOST_ROUNDS = 3, 8  # of the search within a budget: once a plan fits, and until one does
ENOUGH = 1e-3  # of the price: a gap within a budget that is not worth another search
KINDS = (None, True, False)  # of bytes that have a price: all, those held as long as the step, and those that live


@dataclass(frozen=True)
class Around:
    """Choices that hold no more than ``room`` bytes more than a solution's do."""

    solution: Solution
    room: float


def cheapest_at(
    problem: Problem, rate: float, around: Around | None = None, lasting: bool | None = None
) -> Solution:  # fmt: skip
    """The cheapest solution where a byte that a choice holds (of those ``lasting`` or not) costs ``rate`` seconds,
    among the choices ``around`` another; its price is without those seconds, its bound with them."""
    variables = []
    kept: list[np.ndarray] = []
    domains: dict[Any, tuple[Choice, ...]] = {}  # equal ones stay one object
    for i, v in enumerate(problem.variables):
        keep = np.arange(len(v.choices))
        if v.memory is not None:
            if around is not None:
                keep = np.flatnonzero(v.memory <= v.memory[around.solution.choices[i]] + around.room)
            choices = v.choices
            if len(keep) < len(choices):
                key = (id(choices), keep.tobytes())
                choices = domains.setdefault(key, tuple(choices[c] for c in keep))
            more = rate * v.memory if lasting in (None, v.lasting) else 0.0
            sends = None if v.sends is None else v.sends[keep]
            v = dataclasses.replace(v, choices=choices, compute=(v.compute + more)[keep], memory=None, sends=sends)
        variables.append(v)
        kept.append(keep)
    found = solve(dataclasses.replace(problem, variables=variables))
    picks = [int(keep[c]) for keep, c in zip(kept, found.choices, strict=True)]
    compute = sum(float(v.compute[c]) for v, c in zip(problem.variables, picks, strict=True))
    return dataclasses.replace(found, choices=picks, compute=compute, price=found.price - found.compute + compute)


def counted(problem: Problem, solution: Solution, lasting: bool | None = None) -> float:
    """The bytes (of a kind) that the choices of a solution hold."""
    pairs = zip(problem.variables, solution.choices, strict=True)
    return sum(float(v.memory[c]) for v, c in pairs if v.memory is not None and lasting in (None, v.lasting))


def parts(problem: Problem, a: Solution, b: Solution) -> list[list[int]]:
    """The variables that two solutions decide differently, in parts that no hub connects.

    Each part may be as in ``a`` or as in ``b`` whatever the others are, and prices and memory add up over the parts.
    """
    differ = [i for i, (x, y) in enumerate(zip(a.choices, b.choices, strict=True)) if x != y]
    parent = {i: i for i in differ}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for hub in problem.hubs:
        ends = [root(v) for v in (hub.source[0], *(k for k, _ in hub.consumers)) if v in parent]
        for end in ends[1:]:
            parent[max(root(end), root(ends[0]))] = min(root(end), root(ends[0]))
    found: dict[int, list[int]] = {}
    for i in differ:
        found.setdefault(root(i), []).append(i)
    return list(found.values())


def fitting(problem: Problem, a: Solution, b: Solution, room: float) -> list[list[int]]:
    """Parts in which ``b`` costs less than ``a``, the largest first, as many as ``room`` more bytes are enough for."""
    tables = Tables(problem)
    known = a.price
    taken = []
    for part in sorted(parts(problem, a, b), key=lambda p: -_more(problem, a, b, p)):
        more = _more(problem, a, b, part)
        if more <= room and blended(problem, a, b, [part], tables).price < known:
            taken.append(part)
            room -= more
    return taken


def _more(problem: Problem, a: Solution, b: Solution, part: list[int]) -> float:
    """Bytes that a part takes in ``b`` more than in ``a``."""
    memory = ((problem.variables[i].memory, a.choices[i], b.choices[i]) for i in part)
    return sum(float(m[y] - m[x]) for m, x, y in memory if m is not None)


def blended(
    problem: Problem, a: Solution, b: Solution, taken: list[list[int]], tables: Tables | None = None
) -> Solution:
    """``a`` with the parts ``taken`` as in ``b``."""
    choices = list(a.choices)
    for part in taken:
        for i in part:
            choices[i] = b.choices[i]
    return _priced(problem, tables or Tables(problem), choices, a.columns)


# --- within a budget ---------------------------------------------------------------------------------------------


class Planner(Protocol):
    """What makes plans (dataclasses with a ``solution``) of solutions.

    ``count`` lets choices count the bytes that live at the nodes of these numbers."""

    problem: Problem

    def plan(self, solution: Solution) -> Any: ...

    def count(self, times: Sequence[int], copies: bool, of_inputs: bool) -> None: ...


def within(
    builder: Planner, free: Any, budget: float, holds: Callable[[Any], tuple[Mapping[str, float], int]],
    limit: float = math.inf,
) -> Any:  # fmt: skip
    """The cheapest plan found within a budget, for less than ``limit`` seconds; ``free`` is the cheapest of all.
    ``holds``: see `passes.propagate.run`.

    The solver counts what lives where the cheapest of all peaks.  One price for every byte finds plans on the lower
    hull alone: bytes that last and bytes that live have a price by themselves too, which is as valid a bound.  From the
    best of that the search goes on: what is found may peak elsewhere, and that counts too; so do copies, which would
    not leave the bound valid (`Planner.count`), those of inputs where nothing fits without; and room that is left is
    filled by a search among the choices which fit into it.  Where nothing fits, it goes on from the smallest.
    """
    problem = builder.problem
    peaks: list[int] = []
    around: Around | None = None
    smallest: Found[Any] | None = None

    def found(solution: Solution, kind: bool | None = None) -> Found[Any]:
        nonlocal smallest
        choices = tuple(solution.choices)
        if choices not in made:
            plan = builder.plan(solution)
            made[choices] = plan, *holds(plan)
        plan, bytes_held, peak = made[choices]
        peaks.append(peak)
        found = Found(plan, bytes_held, counted(problem, solution, kind), solution.price, solution.bound)
        smallest = found if smallest is None or found.held < smallest.held else smallest
        return found

    def at(rate: float, kind: bool | None = None) -> Found[Any]:
        return found(cheapest_at(problem, rate, around, kind) if rate or around else free.solution, kind)

    def between(small: Any, cheap: Any, room: float) -> list[Callable[[], Found[Any]]]:
        a, b = small.solution, cheap.solution
        taken = fitting(problem, a, b, room)
        return [functools.partial(lambda n: found(blended(problem, a, b, taken[:n])), n + 1)
                for n in range(len(taken))]  # fmt: skip

    held, top = holds(free)
    if sum(held.values()) <= budget:
        return free
    made = {tuple(free.solution.choices): (free, held, top)}
    best: Found[Any] | None = None
    bound = free.solution.bound
    start: float | None = None

    def price() -> float:
        return limit if best is None else min(limit, best.price)

    def keep(*plans: Found[Any] | None) -> None:
        nonlocal best
        fit = [f for f in (best, *plans) if f is not None and f.held <= budget]
        best = min(fit, key=lambda f: f.price, default=None)

    stage("choosing placements within the memory budget")
    builder.count([top], copies=False, of_inputs=False)
    # what is held, gathered once
    worth = problem.profile.collective(problem.mesh, "all_gather", problem.mesh.axes, counted(problem, free.solution))
    search = functools.partial(cheapest_within, between=between, worth=worth)
    for kind in KINDS:
        if bound >= price() * (1 - ENOUGH):
            break
        try:
            priced = functools.partial(at, kind=kind)
            cheapest, below, rate = search(priced, budget=budget, limit=price(), every=kind is None)
        except OverBudget as error:
            if error.least > budget:
                raise
        else:
            bound = max(bound, below)
            keep(cheapest)
            start = rate if kind is None else start
    times, left, stuck = [top], ROUNDS, False
    for attempt in itertools.count(1):
        if bound >= price() * (1 - ENOUGH) or left == 0 or (best is None and attempt == MOST_ROUNDS):
            break
        begin, before = best or smallest, price()
        assert begin is not None
        times += [p for p in reversed(peaks) if p not in times][:1]
        peaks.clear()
        if best is not None:
            left -= 1
            room, around = budget, Around(begin.plan.solution, budget - begin.held) if attempt > 1 else None
        else:  # the cheapest that holds no more than the smallest may hold less
            stuck, closer = attempt > 1, attempt > 2
            room, around = max(budget, begin.held - closer), Around(begin.plan.solution, 0.0) if closer else None
        builder.count(times, copies=True, of_inputs=stuck)
        try:
            cheapest, _, start = search(at, budget=room, start=start or None, limit=price())
            keep(cheapest, smallest)
        except OverBudget:
            if around is not None and smallest is begin:
                break
        if best is not None and attempt > 1 and price() >= before * (1 - ENOUGH):
            break
    if best is None:
        assert smallest is not None
        raise OverBudget(budget, smallest.holds)
    solution = best.plan.solution
    return dataclasses.replace(best.plan, solution=dataclasses.replace(solution, bound=min(bound, solution.price)))
