"""The cheapest choice for every node at once: a linear program in flow form.

Variables, all in [0, 1]:

* ``z[n, c]``    node ``n`` runs choice ``c``
* ``x[h, a]``    the copy made by arc ``a`` exists at hub ``h`` (a hub is a value in one phase; its states are the
                 specs the value may be held in, its arcs one-axis moves between them)
* ``f[h, k, a]`` consumer ``k`` of hub ``h`` is served through arc ``a`` (``f = x`` where there is one consumer)

Minimise ``sum compute[n, c] z[n, c] + sum price[h, a] x[h, a]`` subject to

(1) ``sum_c z[n, c] = 1``                                                              for every node
(2) ``inflow_f(s) - outflow_f(s) + sum_{c makes s} z[producer, c] - sum_{c wants s} z[k, c] = 0``
                                                                   for every hub, consumer and state ``s``
(3) ``f[h, k, a] <= x[h, a]``                                      for every hub with three consumers or more
(4) for a hub with two consumers the copies are a trunk from the producer to one state ``s`` (``fork[h, s]``) and a
    branch from there to each consumer, three flows conserved as in (2), each paying its arcs

So copies of one value form a tree of moves in which a shared prefix is paid once.  The relaxation's optimum is a
lower bound; it has been integral in practice, and a fractional one goes to branch and bound on the same model.
The answer's price is recomputed from the choices and the trees (`Solution.price`), never read off the program.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix

from .placements import Spec, SpmdError
from .problem import Hub, Problem, Solution, Table, Tables
from .redistribute import Move, move_price

INTEGRAL = 1e-6
SCALE = 1e3  # the dearest column's price as the program sees it


# --- the linear program ---------------------------------------------------------------------------------------


class Model:
    """Columns, rows and prices of the program, gathered as arrays.

    Variables joined by a hub without arcs share their columns: ``group[v]`` is the first of them and
    ``choice_of[v][j]`` the choice that column ``j`` stands for.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = Tables(problem)
        self.hub_tables = [self.tables.of(h) for h in problem.hubs]
        self.choice_of = [np.arange(len(v.choices)) for v in problem.variables]
        self.leader = list(range(len(problem.variables)))
        joined = self._join()
        self.cost: list[np.ndarray] = []
        self.columns = 0
        self.equal: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.equal_rhs: list[np.ndarray] = []
        self.equal_rows = 0
        self.less: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.less_rows = 0
        self.group = self._add_choices()
        self.choices = self.columns
        for h, (hub, table) in enumerate(zip(problem.hubs, self.hub_tables, strict=True)):
            if h not in joined:
                self._add_hub(hub, table)

    def _join(self) -> set[int]:
        """Join a hub's producer and its only consumer where the hub has no arc: one decides the other."""
        joined = set()
        members: dict[int, list[int]] = {}
        order = sorted(range(len(self.problem.hubs)), key=lambda h: self.problem.hubs[h].source)
        for h in order:
            hub, table = self.problem.hubs[h], self.hub_tables[h]
            if len(hub.consumers) != 1 or self.tables.arcs_kept(hub, table).any():
                continue
            (n, r), (k, i) = hub.source, hub.consumers[0]
            consumer = self.problem.variables[k]
            if not consumer.transparent or self.leader[k] != k or k in members:
                continue
            wanted = {c.operands[i]: j for j, c in enumerate(consumer.choices)}
            made = [self.problem.variables[n].choices[c].results[r] for c in self.choice_of[n]]
            fits = np.array([s in wanted for s in made])
            if not fits.any():
                continue
            lead = self.leader[n]
            for v in (lead, *members.get(lead, ())):
                self.choice_of[v] = self.choice_of[v][fits]
            self.choice_of[k] = np.array([wanted[s] for s in made if s in wanted])
            self.leader[k] = lead
            members.setdefault(lead, []).append(k)
            joined.add(h)
        return joined

    def _add_columns(self, cost: np.ndarray) -> int:
        first = self.columns
        self.cost.append(cost)
        self.columns += len(cost)
        return first

    def _add_choices(self) -> list[int]:
        """(1)"""
        compute: dict[int, np.ndarray] = {}
        for v, lead in enumerate(self.leader):
            seconds = self.problem.variables[v].compute[self.choice_of[v]]
            compute[lead] = compute[lead] + seconds if lead in compute else seconds
        first = {lead: self._add_columns(seconds) for lead, seconds in compute.items()}
        rows = np.repeat(np.arange(len(first)), [len(s) for s in compute.values()])
        self.equal.append((rows, np.arange(self.columns), np.ones(self.columns)))
        self.equal_rhs.append(np.ones(len(first)))
        self.equal_rows += len(first)
        return [first[lead] for lead in self.leader]

    def _end(self, variable: int, table: Table, specs: Sequence[Spec | None]) -> tuple[np.ndarray, np.ndarray]:
        """The columns of a variable at a hub, and the state that each makes or wants."""
        at = np.array([table.index[s] for s in specs if s is not None], dtype=np.int64)[self.choice_of[variable]]
        return self.group[variable] + np.arange(len(at)), at

    def _add_hub(self, hub: Hub, table: Table) -> None:
        n, r = hub.source
        keep = self.tables.arcs_kept(hub, table)
        price = self.tables.price(hub, table)[keep]
        arcs = (table.source[keep], table.target[keep])
        made = self._end(n, table, [c.results[r] for c in self.problem.variables[n].choices])
        wants = [
            self._end(k, table, [c.operands[i] for c in self.problem.variables[k].choices]) for k, i in hub.consumers
        ]
        if len(wants) == 1:
            self._conserve(len(table.states), arcs, self._add_columns(price), [(made, 1.0), (wants[0], -1.0)])
        elif len(wants) == 2:
            self._add_fork(len(table.states), arcs, price, made, wants)
        else:
            self._add_shared(len(table.states), arcs, price, made, wants)

    def _conserve(self, states: int, arcs: tuple[np.ndarray, np.ndarray], flow: int, ends: Sequence) -> None:
        """(2): one row a state; ``ends`` are columns with the states they enter (+1) or leave (-1) at."""
        source, target = arcs
        columns = flow + np.arange(len(source))
        rows = np.concatenate([target, source, *(at for (_, at), _ in ends)]) + self.equal_rows
        cols = np.concatenate([columns, columns, *(c for (c, _), _ in ends)])
        signs = [np.ones(len(source)), -np.ones(len(source)), *(np.full(len(at), sign) for (_, at), sign in ends)]
        self.equal.append((rows, cols, np.concatenate(signs)))
        self.equal_rhs.append(np.zeros(states))
        self.equal_rows += states

    def _add_fork(self, states: int, arcs: tuple, price: np.ndarray, made: tuple, wants: list) -> None:
        """(4)"""
        fork = (self._add_columns(np.zeros(states)) + np.arange(states), np.arange(states))
        self._conserve(states, arcs, self._add_columns(price), [(made, 1.0), (fork, -1.0)])
        for want in wants:
            self._conserve(states, arcs, self._add_columns(price), [(fork, 1.0), (want, -1.0)])

    def _add_shared(self, states: int, arcs: tuple, price: np.ndarray, made: tuple, wants: list) -> None:
        """(3)"""
        count = len(price)
        x = self._add_columns(price) + np.arange(count)
        for want in wants:
            flow = self._add_columns(np.zeros(count))
            self._conserve(states, arcs, flow, [(made, 1.0), (want, -1.0)])
            rows = np.tile(np.arange(count), 2) + self.less_rows
            self.less.append((rows, np.concatenate([flow + np.arange(count), x]), np.repeat([1.0, -1.0], count)))
            self.less_rows += count

    def most_active(self) -> int:
        """How many columns a plan can have at one: its choices, and a path of moves to each consumer."""
        axes = len(self.problem.mesh.axes)
        return len(set(self.leader)) + sum(len(h.consumers) for h in self.problem.hubs) * (axes + 1)

    def matrices(self) -> tuple[np.ndarray, coo_matrix, np.ndarray, coo_matrix | None]:
        def build(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], rows: int) -> coo_matrix:
            r, c, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            return coo_matrix((v, (r, c)), shape=(rows, self.columns)).tocsr()

        less = build(self.less, self.less_rows) if self.less_rows else None
        return np.concatenate(self.cost), build(self.equal, self.equal_rows), np.concatenate(self.equal_rhs), less


def solve(problem: Problem) -> Solution:
    """The cheapest solution with a proven bound.  Raises `SpmdError` where no plan exists."""
    if not problem.variables:
        return Solution([], [], 0.0, 0.0, 0.0, 0)
    model = Model(problem)
    cost, equal, rhs, less = model.matrices()
    scale = SCALE / max(float(np.max(np.abs(cost), initial=0.0)), 1e-30)
    # equal prices make the simplex stall: a little noise, the same in every run, parts them.  Where it stalls yet it
    # starts anew with more noise and another pricing; limits count iterations, for every rank must do the same
    draw = np.random.default_rng(0).random(model.columns)
    first, rows = _noise(problem, model.columns), model.equal_rows + model.less_rows
    for level, edges, limit in ((first, None, rows // 2 + 10_000), (1e-3, "devex", rows), (1e-1, "devex", 10 * rows)):
        noise = level * draw
        found = linprog(
            cost * scale + noise,
            A_ub=less,
            b_ub=np.zeros(model.less_rows) if less is not None else None,
            A_eq=equal,
            b_eq=rhs,
            bounds=(0, None),
            method="highs-ds",
            options={"presolve": False, "maxiter": limit, "simplex_dual_edge_weight_strategy": edges},
        )
        if found.status != 1:
            break
    if found.status == 2:
        raise SpmdError("the placements given contradict each other: no plan satisfies all of them")
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    picks, integral = _picks(model, found.x)
    if integral:
        # every plan costs at least the noisy optimum less the noise on its own columns
        bound = max(found.fun - float(noise.max(initial=0.0)) * model.most_active(), 0.0) / scale
    else:
        values, bound = _branch(model, cost * scale, equal, rhs, less)
        bound /= scale
        picks, _ = _picks(model, values)
    trees = [_tree(problem, hub, table, picks) for hub, table in zip(problem.hubs, model.hub_tables, strict=True)]
    compute = sum(float(v.compute[c]) for v, c in zip(problem.variables, picks, strict=True))
    price = compute + sum(
        move_price(m, hub.shape, hub.element, problem.mesh, problem.profile)
        for hub, tree in zip(problem.hubs, trees, strict=True) for m in tree.values()
    )  # fmt: skip
    return Solution(picks, trees, compute, price, min(bound, price), model.columns)


def _noise(problem: Problem, columns: int) -> float:
    """How much noise a program of that size wants: little, for it loosens the bound, and none where compute and
    latency tell plans apart."""
    if problem.profile.repeats_work or columns < 50_000:
        return 0.0
    return 1e-6 if columns < 300_000 else 1e-4


def _picks(model: Model, values: np.ndarray) -> tuple[list[int], bool]:
    picks, integral = [], True
    for first, choice_of in zip(model.group, model.choice_of, strict=True):
        part = values[first : first + len(choice_of)]
        best = int(np.argmax(part))
        picks.append(int(choice_of[best]))
        integral &= bool(part[best] > 1 - INTEGRAL)
    return picks, integral


def _branch(model: Model, cost: np.ndarray, equal: Any, rhs: np.ndarray, less: Any) -> tuple[np.ndarray, float]:
    """Branch and bound over the choices (moves follow them): a plan and a bound of every plan."""
    constraints = [LinearConstraint(equal, rhs, rhs)]
    if less is not None:
        constraints.append(LinearConstraint(less, -np.inf, 0.0))
    whole = (np.arange(model.columns) < model.choices).astype(int)
    found = milp(
        cost, constraints=constraints, integrality=whole, bounds=Bounds(0, np.inf),
        options={"time_limit": 120.0, "mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        raise RuntimeError(f"branch and bound found no plan: {found.message}")
    return found.x, found.mip_dual_bound


# --- trees ----------------------------------------------------------------------------------------------------


def _tree(problem: Problem, hub: Hub, table: Table, picks: Sequence[int]) -> dict[Spec, Move]:
    """The cheapest moves found that make every copy a hub's consumers want: the last move into each spec made.

    One copy is a shortest path; for more, shortest paths grow a tree in every order of up to four copies.
    """
    n, r = hub.source
    origin = problem.variables[n].choices[picks[n]].results[r]
    assert origin is not None
    wanted = sorted({problem.variables[k].choices[picks[k]].operands[i] for k, i in hub.consumers} - {origin}, key=str)
    if not wanted:
        return {}
    price = table.fixed + table.rate * (math.prod(hub.shape) * hub.element)
    leaving: dict[int, list[int]] = {}
    for a, s in enumerate(table.source):
        leaving.setdefault(int(s), []).append(a)
    best: tuple[float, dict[Spec, Move]] | None = None
    orders = itertools.permutations(wanted) if len(wanted) <= 4 else [tuple(wanted)]
    for order in orders:
        total = 0.0
        tree: dict[Spec, Move] = {}
        for goal in order:
            path = _path(table, price, leaving, {origin, *tree}, goal)
            if path is None:
                raise SpmdError(f"no redistribution leads from {origin} to {goal} for a value of shape {hub.shape}")
            for a in path:
                tree[table.moves[a].target] = table.moves[a]
                total += float(price[a])
        if best is None or total < best[0] - 1e-12:
            best = (total, tree)
    assert best is not None
    return best[1]


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
