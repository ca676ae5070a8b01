"""The cheapest choice for every node at once, with a bound that proves it.

Equal parts of a problem are decided together (`quotient`); the network of what is left (`network`) gives a bound, and
leaves the linear program (`linear`) no more than a plan near the bound may have.  The relaxation's optimum is a lower
bound; it has been integral in practice, and a fractional one goes to branch and bound on the same program.  The
answer's price is recomputed from the choices and the trees of moves (`Solution.price`), never read off the program.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from .linear import TOLERANCE, Minimum, minimum
from .network import SCALE, Network
from .placements import Spec, SpmdError
from .problem import Hub, Problem, Solution, Table, Tables
from .quotient import Colours
from .redistribute import Move, move_price

ROUNDS = (4, 4)  # of refinement, before each attempt to decide equal parts together
SMALLER = 0.6  # by which the parts that differ must be fewer for that
SMALL = 20_000  # columns of a linear program that is solved as it is
NEAR = 1e-3  # of the bound: how far from it the cheapest plan is looked for first
FIRST = 150_000  # columns that are looked at before a plan is known
MOST = 600_000  # and after, in at most so many iterations
ITERATIONS = 25_000
EXACT = 5  # copies of one value whose cheapest tree is looked for among all trees
LARGE = 1_500_000  # columns of a network that is too large to be looked at without deciding equal parts together


def solve(problem: Problem, tables: Tables | None = None) -> Solution:
    """The cheapest solution, with a proven bound.  Raises `SpmdError` where no plan exists.

    ``tables`` are the problem's, or those of one that differs in weights alone.

    Equal parts are decided together (`quotient`) where that makes the problem smaller; surroundings are told apart ever
    further until the bound meets the plan, in the end every variable by itself.
    """
    if not problem.variables:
        return Solution([], [], 0.0, 0.0, 0.0, 0)
    tables = tables or Tables(problem)
    colours = Colours(problem, tables)
    best: Solution | None = None
    bound = columns = 0.0  # of a network, for each class
    for rounds in (*ROUNDS, 0):
        if rounds:
            colours.refine(rounds)
        else:
            colours.separate()
        tied = colours.tied()
        if rounds and len(tied.first) > SMALLER * len(problem.variables):
            continue
        if best is not None and columns * len(tied.first) > LARGE:
            break
        network = Network(problem, tables, tied)
        columns = network.size / len(tied.first)
        upper = _minimum(network)
        if upper is None:
            continue
        summed = colours.summed()
        lower = upper if summed == tied else _minimum(Network(problem, tables, summed, whole=False), upper.value)
        bound = max(bound, lower.bound if lower is not None else 0.0)
        found = _priced(problem, tables, [upper.picks[c] for c in tied.classes], upper.columns)
        if best is None or found.price < best.price:
            best = found
        if best.price - bound <= TOLERANCE * best.price:
            break
    if best is None:
        raise SpmdError("the placements given contradict each other: no plan satisfies all of them")
    return dataclasses.replace(best, bound=min(bound, best.price))


def _minimum(network: Network, price: float = math.inf) -> Minimum | None:
    """The optimum of a network's program in seconds, looked for among what its bound allows near it; None where there
    is none.

    What is left out is in no plan that costs less than the bound and the gap looked at: where the optimum of the rest
    costs no more than that it is the optimum of all, else its own distance from the bound is the next gap, unless too
    much is within it.  A bound above ``price``, which a plan is known to have, is of no use: no more is looked at.
    """
    if not network.feasible:
        return None
    proven = math.inf
    if network.size <= SMALL:
        found = minimum(network)
    else:
        bound = network.ascend()
        known = max(0.0, (1 + TOLERANCE) * (price * network.scale - bound))
        gap = min(NEAR * bound, known)
        while network.within(gap) > FIRST and gap > TOLERANCE * bound:
            gap /= 2
        found = minimum(network)
        while found is None or found.bound > bound + gap:
            if gap == math.inf:
                return None
            before = gap
            if found is not None:
                gap = min((1 + TOLERANCE) * (found.value - bound), known)
            else:  # none is in sight: further, in the end among all
                gap = max(10 * gap, TOLERANCE * SCALE) if gap <= max(bound, SCALE) else math.inf
            while network.within(gap) > MOST and gap > before and found is not None:
                gap /= 2
            wider = minimum(network, None if found is None else ITERATIONS) if gap > before else None
            if wider is None and found is not None:
                proven = bound + before
                break
            found = wider
    if found is None:
        return None
    bound = min(found.bound, proven) / network.scale
    return dataclasses.replace(found, value=found.value / network.scale, bound=bound)


def _priced(problem: Problem, tables: Tables, picks: list[int], columns: int) -> Solution:
    """The solution that choices make: the moves of each hub, and the price of it all."""
    compute = price = sum(float(v.compute[c]) for v, c in zip(problem.variables, picks, strict=True))
    known: dict[object, dict[Spec, Move]] = {}
    trees = []
    for hub in problem.hubs:
        n, r = hub.source
        origin = problem.variables[n].choices[picks[n]].results[r]
        assert origin is not None
        wanted = {problem.variables[k].choices[picks[k]].operands[i] for k, i in hub.consumers} - {origin}
        table = tables.of(hub)
        key = (id(table), hub.shape, hub.element, origin, frozenset(wanted))
        if key not in known:
            known[key] = _tree(hub, table, origin, sorted(wanted, key=str))
        trees.append(known[key])
        price += sum(
            move_price(m, hub.shape, hub.element, problem.mesh, problem.profile) for m in known[key].values()
        )
    sends = sum(float(v.sends[c]) for v, c in zip(problem.variables, picks, strict=True) if v.sends is not None)
    return Solution(picks, trees, compute, price, 0.0, columns, sends)


# --- trees ----------------------------------------------------------------------------------------------------


def _tree(hub: Hub, table: Table, origin: Spec, wanted: Sequence[Spec]) -> dict[Spec, Move]:
    """The cheapest moves that make every copy wanted of a hub's value: the last move into each spec made.

    One copy is a shortest path; for more, shortest paths grow a tree in every order of up to four copies, and then
    along the arcs of a cheapest tree, which may part where no copy is wanted.  Of equal trees the first one counts.
    """
    if not wanted:
        return {}
    price = table.fixed + table.rate * (math.prod(hub.shape) * hub.element)
    leaving: dict[int, list[int]] = {}
    for a, s in enumerate(table.source):
        leaving.setdefault(int(s), []).append(a)
    best: tuple[float, dict[Spec, Move]] | None = None
    orders = list(itertools.permutations(wanted)) if len(wanted) <= 4 else [tuple(wanted)]
    ways = [(order, leaving) for order in orders]
    if 1 < len(wanted) <= EXACT and (arcs := _cheapest_arcs(table, price, origin, wanted)):
        ways.append((tuple(wanted), arcs))
    for order, ways_on in ways:
        total = 0.0
        tree: dict[Spec, Move] = {}
        for goal in order:
            path = _path(table, price, ways_on, {origin, *tree}, goal)
            if path is None:
                raise SpmdError(f"no redistribution leads from {origin} to {goal} for a value of shape {hub.shape}")
            for a in path:
                tree[table.moves[a].target] = table.moves[a]
                total += float(price[a])
        if best is None or total < best[0] - 1e-12:
            best = (total, tree)
    assert best is not None
    return best[1]


def _cheapest_arcs(table: Table, price: np.ndarray, origin: Spec, wanted: Sequence[Spec]) -> dict[int, list[int]]:
    """The arcs of a cheapest tree from ``origin`` to all that is wanted, by the state they leave (none: none is known).

    Dreyfus and Wagner, "The Steiner problem in graphs" (Networks 1, 1971), for directed arcs: a cheapest tree from a
    state to a set of goals is an arc and a cheapest tree from its end, or two trees to parts of the set.
    """
    source, target = (np.asarray(x, dtype=np.int64) for x in (table.source, table.target))
    goals = [table.index[s] for s in wanted]
    least: dict[int, np.ndarray] = {}  # by set of goals: the price of a tree from each state
    parted: dict[int, np.ndarray] = {}  # and the part of the set that the first of two trees has, 0 where there is one
    for goal_set in range(1, 2 ** len(goals)):
        cost, part = np.full(len(table.index), math.inf), np.zeros(len(table.index), dtype=np.int64)
        if goal_set & (goal_set - 1) == 0:
            cost[goals[goal_set.bit_length() - 1]] = 0.0
        first = (goal_set - 1) & goal_set
        while first:
            both = least[first] + least[goal_set ^ first]
            part, cost = np.where(both < cost, first, part), np.minimum(both, cost)
            first = (first - 1) & goal_set
        while True:
            further = cost.copy()
            np.minimum.at(further, source, price + cost[target])
            if not (further < cost - 1e-15).any():
                break
            part, cost = np.where(further < cost, 0, part), further
        least[goal_set], parted[goal_set] = cost, part
    arcs: dict[int, list[int]] = {}
    open_ = [(2 ** len(goals) - 1, table.index[origin])]
    seen = set()
    while open_:
        goal_set, state = here = open_.pop()
        if here in seen:  # moves that cost nothing lead back
            return {}
        seen.add(here)
        cost, first = least[goal_set], int(parted[goal_set][state])
        if first:
            open_ += [(first, state), (goal_set ^ first, state)]
        elif cost[state] == math.inf:
            return {}
        elif cost[state] > 0.0 or goals[goal_set.bit_length() - 1] != state:
            out = np.flatnonzero(source == state)
            arc = int(out[np.argmin(price[out] + cost[target[out]])])
            arcs.setdefault(state, []).append(arc)
            open_.append((goal_set, int(target[arc])))
    return arcs


def _path(
    table: Table, price: np.ndarray, leaving: dict[int, list[int]], have: set[Spec], goal: Spec
) -> list[int] | None:
    """Arcs of a shortest path from any spec at hand to ``goal``."""
    if goal in have:
        return []
    heap = [(0.0, 0, table.index[s]) for s in sorted(have, key=str)]
    distance = {s: 0.0 for _, _, s in heap}
    came: dict[int, int] = {}
    target = table.index[goal]
    while heap:
        cost, hops, state = heapq.heappop(heap)
        if state == target:
            break
        if cost > distance.get(state, math.inf):
            continue
        for a in leaving.get(state, ()):
            t, total = int(table.target[a]), cost + float(price[a])
            if total < distance.get(t, math.inf) - 1e-15:
                distance[t] = total
                came[t] = a
                heapq.heappush(heap, (total, hops + 1, t))
    if target not in came:
        return None
    path = []
    while target in came:
        path.append(came[target])
        target = int(table.source[came[target]])
    return path[::-1]
