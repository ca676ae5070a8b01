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

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, diags

from .placements import Spec, SpmdError
from .problem import Hub, Problem, Solution, Table, Tables
from .quotient import Colours, End, Group, Quotient
from .redistribute import Move, move_price

INTEGRAL = 1e-6
SCALE = 1e3  # the dearest column's price as the program sees it
ROUNDS = (4, 4)  # of refinement, before each attempt to decide equal parts together
SMALLER = 0.6  # by which the parts that differ must be fewer for that
LARGE = 1_000_000  # columns that a program is too large with
BRANCHED = 20_000  # columns up to which a program that is not whole goes to branch and bound
TOLERANCE = 1e-6
RATES = (1.0, 10.0, 100.0, 1e3)  # of memory against all else, until it fits
SECANTS = 6

Flow = tuple[np.ndarray, np.ndarray, np.ndarray]


# --- the linear program ---------------------------------------------------------------------------------------


class Model:
    """Columns, rows and prices of the program of a quotient, gathered as arrays.

    Classes joined by a hub without arcs share their columns: ``group[v]`` is the first of them and ``choice_of[v][j]``
    the choice that column ``j`` stands for.
    """

    def __init__(self, problem: Problem, tables: Tables, quotient: Quotient) -> None:
        self.problem, self.tables, self.quotient = problem, tables, quotient
        self.variables = [problem.variables[v] for v in quotient.first]
        self.choice_of = [np.arange(len(v.choices)) for v in self.variables]
        self.leader = list(range(len(self.variables)))
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
        for g, group in enumerate(quotient.groups):
            if g not in joined:
                self._add_hub(group)

    def _join(self) -> set[int]:
        """Join a hub's producer and its only consumer where the hub has no arc: one decides the other."""
        joined = set()
        members: dict[int, list[int]] = {}
        groups = self.quotient.groups
        for g in sorted(range(len(groups)), key=lambda g: [(e.variable, e.place) for e in groups[g].source]):
            ends = (groups[g].source, *groups[g].slots)
            if len(ends) != 2 or any(len(e) != 1 for e in ends) or self._hub(groups[g])[2].any():
                continue
            (n, r), (k, i) = ((e.variable, e.place) for (e,) in ends)
            consumer = self.variables[k]
            if not consumer.transparent or self.leader[k] != k or k in members or self.leader[n] == k:
                continue
            wanted = {c.operands[i]: j for j, c in enumerate(consumer.choices)}
            made = [self.variables[n].choices[c].results[r] for c in self.choice_of[n]]
            fits = np.array([s in wanted for s in made])
            if not fits.any():
                continue
            lead = self.leader[n]
            for v in (lead, *members.get(lead, ())):
                self.choice_of[v] = self.choice_of[v][fits]
            self.choice_of[k] = np.array([wanted[s] for s in made if s in wanted])
            self.leader[k] = lead
            members.setdefault(lead, []).append(k)
            joined.add(g)
        return joined

    def _hub(self, group: Group) -> tuple[Hub, Table, np.ndarray]:
        """A group's hub, its table, and the arcs kept: all where the group has not all hubs of the classes at it, for
        then choices around a hub can't change for its sake alone."""
        hub = self.problem.hubs[group.hub]
        table = self.tables.of(hub)
        if hub.tied or all(e.weight == 1.0 for ends in (group.source, *group.slots) for e in ends):
            return hub, table, self.tables.arcs_kept(hub, table)
        return hub, table, np.full(len(table.moves), True)

    def _add_columns(self, cost: np.ndarray) -> int:
        first = self.columns
        self.cost.append(cost)
        self.columns += len(cost)
        return first

    def _add_choices(self) -> list[int]:
        """(1)"""
        compute: dict[int, np.ndarray] = {}
        for v, lead in enumerate(self.leader):
            ratio = self.quotient.sizes[v] / self.quotient.sizes[lead]
            seconds = self.variables[v].compute[self.choice_of[v]] * ratio
            compute[lead] = compute[lead] + seconds if lead in compute else seconds
        first = {lead: self._add_columns(seconds) for lead, seconds in compute.items()}
        rows = np.repeat(np.arange(len(first)), [len(s) for s in compute.values()])
        self.equal.append((rows, np.arange(self.columns), np.ones(self.columns)))
        self.equal_rhs.append(np.array([float(self.quotient.sizes[lead]) for lead in first]))
        self.equal_rows += len(first)
        return [first[lead] for lead in self.leader]

    def _ends(self, table: Table, ends: Sequence[End], made: bool) -> Flow:
        """The columns of the choices at a hub, the state that each makes (or wants), and its weight there."""
        columns, states, weights = [], [], []
        sizes = self.quotient.sizes
        for end in ends:
            picks = self.variables[end.variable].choices
            specs = [(c.results if made else c.operands)[end.place] for c in picks]
            at = np.array([table.index[s] for s in specs if s is not None], dtype=np.int64)
            at = at[self.choice_of[end.variable]]
            columns.append(self.group[end.variable] + np.arange(len(at)))
            states.append(at)
            weight = end.weight * sizes[end.variable] / sizes[self.leader[end.variable]]
            weights.append(np.full(len(at), weight if made else -weight))
        return np.concatenate(columns), np.concatenate(states), np.concatenate(weights)

    def _add_hub(self, group: Group) -> None:
        hub, table, keep = self._hub(group)
        price = self.tables.price(hub, table)[keep]
        arcs = (table.source[keep], table.target[keep])
        made = self._ends(table, group.source, True)
        wants = [self._ends(table, slot, False) for slot in group.slots]
        if len(wants) == 1:
            self._conserve(len(table.states), arcs, self._add_columns(price), [made, wants[0]])
        elif len(wants) == 2:
            self._add_fork(len(table.states), arcs, price, made, wants)
        else:
            self._add_shared(len(table.states), arcs, price, made, wants)

    def _conserve(self, states: int, arcs: tuple[np.ndarray, np.ndarray], flow: int, ends: Sequence[Flow]) -> None:
        """(2): one row a state; what is not an arc enters at its state with its weight (leaves, if negative)."""
        source, target = arcs
        columns = flow + np.arange(len(source))
        rows = np.concatenate([target, source, *(at for _, at, _ in ends)]) + self.equal_rows
        cols = np.concatenate([columns, columns, *(c for c, _, _ in ends)])
        signs = [np.ones(len(source)), -np.ones(len(source)), *(weight for _, _, weight in ends)]
        self.equal.append((rows, cols, np.concatenate(signs)))
        self.equal_rhs.append(np.zeros(states))
        self.equal_rows += states

    def _add_fork(self, states: int, arcs: tuple, price: np.ndarray, made: Flow, wants: list[Flow]) -> None:
        """(4)"""
        at = np.arange(states)
        fork = self._add_columns(np.zeros(states)) + at
        self._conserve(states, arcs, self._add_columns(price), [made, (fork, at, -np.ones(states))])
        for want in wants:
            self._conserve(states, arcs, self._add_columns(price), [(fork, at, np.ones(states)), want])

    def _add_shared(self, states: int, arcs: tuple, price: np.ndarray, made: Flow, wants: list[Flow]) -> None:
        """(3)"""
        count = len(price)
        x = self._add_columns(price) + np.arange(count)
        for want in wants:
            flow = self._add_columns(np.zeros(count))
            self._conserve(states, arcs, flow, [made, want])
            rows = np.tile(np.arange(count), 2) + self.less_rows
            self.less.append((rows, np.concatenate([flow + np.arange(count), x]), np.repeat([1.0, -1.0], count)))
            self.less_rows += count

    def most_active(self) -> int:
        """What the columns of a plan can add up to: its choices, and a path of moves to each consumer."""
        axes = len(self.problem.mesh.axes)
        return sum(self.quotient.sizes) + sum(g.count * len(g.slots) for g in self.quotient.groups) * (axes + 1)

    def matrices(self) -> tuple[np.ndarray, coo_matrix, np.ndarray, coo_matrix | None]:
        def build(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], rows: int) -> coo_matrix:
            r, c, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            return coo_matrix((v, (r, c)), shape=(rows, self.columns)).tocsr()

        less = build(self.less, self.less_rows) if self.less_rows else None
        return np.concatenate(self.cost), build(self.equal, self.equal_rows), np.concatenate(self.equal_rhs), less


def solve(problem: Problem) -> Solution:
    """The cheapest solution within the budget, with a proven bound.  Raises `SpmdError` where no plan exists."""
    return _cheapest(problem) if problem.budget is None else _within(problem, problem.budget)


def _within(problem: Problem, budget: float) -> Solution:
    """The cheapest solution that memory priced at some rate leads to, among those within the budget.

    For a rate ``r`` the cheapest of ``price + r memory`` lies on a lower hull, and ``its value - r budget`` is at most
    the price of every solution within the budget (Lagrange).  The rate where the hull crosses the budget is found by
    secants: between the last solution within it and the last without.
    """
    bound = 0.0

    def at(rate: float) -> tuple[float, float, Solution]:
        nonlocal bound
        variables = [
            v if v.memory is None else dataclasses.replace(v, compute=v.compute + rate * v.memory)
            for v in problem.variables
        ]
        found = _cheapest(dataclasses.replace(problem, variables=variables))
        held, compute = (
            sum(float(a[c]) for a, c in zip(arrays, found.choices, strict=True) if a is not None)
            for arrays in ([v.memory for v in problem.variables], [v.compute for v in problem.variables])
        )
        bound = max(bound, found.bound - rate * budget)
        price = found.price - found.compute + compute
        return held, price, dataclasses.replace(found, compute=compute, price=price)

    outside = at(0.0)
    if outside[0] <= budget:
        return outside[2]
    for rate in RATES:
        within = at(rate * outside[1] / outside[0])
        if within[0] <= budget:
            break
        outside = within
    else:
        raise SpmdError(
            f"no plan holds less than {within[0]:.4g} bytes a device; the memory budget is {budget:.4g} (parameters, "
            "their gradients and optimizer states, and what the forward saves for the backward)"
        )
    for _ in range(SECANTS):
        rate = (within[1] - outside[1]) / (outside[0] - within[0])
        held, price, _ = found = at(rate)
        if price + rate * held >= (within[1] + rate * within[0]) * (1 - TOLERANCE):
            break
        outside, within = (found, within) if held > budget else (outside, found)
    return dataclasses.replace(within[2], bound=min(bound, within[1]))


def _cheapest(problem: Problem) -> Solution:
    """The cheapest solution, whatever it holds.

    Equal parts are decided together (`quotient`) where that makes the problem smaller; surroundings are told apart ever
    further until the bound meets the plan, in the end every variable by itself.
    """
    if not problem.variables:
        return Solution([], [], 0.0, 0.0, 0.0, 0)
    tables = Tables(problem)
    colours = Colours(problem, tables)
    best: Solution | None = None
    bound = 0.0
    for rounds in (*ROUNDS, 0):
        if rounds:
            colours.refine(rounds)
            tied = colours.tied()
            if len(tied.first) > SMALLER * len(problem.variables):
                continue
        else:
            if best is not None and best.columns * len(problem.variables) / len(tied.first) > LARGE:
                break
            colours.separate()
            tied = colours.tied()
        upper = _minimum(Model(problem, tables, tied), whole=True)
        if upper is None:
            continue
        summed = colours.summed()
        lower = upper if summed == tied else _minimum(Model(problem, tables, summed), whole=False)
        bound = max(bound, lower.bound if lower is not None else 0.0)
        found = _priced(problem, tables, [upper.picks[c] for c in tied.classes], upper.columns)
        if best is None or found.price < best.price:
            best = found
        if best.price - bound <= TOLERANCE * best.price:
            break
    if best is None:
        raise SpmdError("the placements given contradict each other: no plan satisfies all of them")
    return dataclasses.replace(best, bound=min(bound, best.price))


@dataclass(frozen=True)
class Minimum:
    """The choice of each class, and what no solution of the model costs less than."""

    picks: list[int]
    bound: float
    columns: int


def _minimum(model: Model, whole: bool) -> Minimum | None:
    """The optimum of a model, in whole choices or of the relaxation; None where it has no solution."""
    program = Relaxation(model)
    # where equal prices make the simplex stall it starts anew with a little noise, the same in every run, that parts
    # them, and another pricing; limits count iterations, for every rank must do the same
    rows = model.equal_rows + model.less_rows
    for level, edges, limit in ((0.0, None, rows + 10_000), (1e-3, "devex", rows), (1e-1, "devex", 10 * rows)):
        found, bound = program.solve(level, edges, limit)
        if found.status != 1:
            break
    if found.status == 2:
        return None
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    picks, integral = _picks(model, found.x)
    if integral or not whole:
        return Minimum(picks, bound, model.columns)
    if model.columns <= BRANCHED:
        picks, below = program.branch()
        return Minimum(picks, max(bound, below), model.columns)
    return program.dive(found.x, bound)


class Relaxation:
    """The linear program of a model, scaled, and what is done where its optimum is not whole."""

    def __init__(self, model: Model) -> None:
        self.model = model
        cost, self.equal, self.rhs, self.less = model.matrices()
        self.scale = SCALE / max(float(np.max(np.abs(cost), initial=0.0)), 1e-30)
        self.cost = cost * self.scale
        self.draw = np.random.default_rng(0).random(model.columns)

    def solve(self, level: float, edges: str | None, limit: int, upper: Any = None) -> tuple[Any, float]:
        """HiGHS's answer with noise of a ``level`` in the costs, and a bound of every plan."""
        noise = level * self.draw
        found = linprog(
            self.cost + noise,
            A_ub=self.less,
            b_ub=np.zeros(self.model.less_rows) if self.less is not None else None,
            A_eq=self.equal,
            b_eq=self.rhs,
            bounds=(0, None) if upper is None else np.stack([np.zeros(len(upper)), upper], axis=1),
            method="highs-ds",
            options={"maxiter": limit, "simplex_dual_edge_weight_strategy": edges},
        )
        if found.fun is None:
            return found, 0.0
        # every plan costs at least the noisy optimum less the noise on its own columns
        return found, max(found.fun - float(noise.max(initial=0.0)) * self.model.most_active(), 0.0) / self.scale

    def dive(self, values: np.ndarray, bound: float) -> Minimum | None:
        """Fix what is whole and the class nearest to it, solve again, until all is whole."""
        model = self.model
        upper = np.full(model.columns, np.inf)
        while True:
            open_ = []
            for first, choice_of, lead in zip(model.group, model.choice_of, model.leader, strict=True):
                part = values[first : first + len(choice_of)] / model.quotient.sizes[lead]
                best = int(np.argmax(part))
                if part[best] > 1 - INTEGRAL:
                    upper[first : first + len(choice_of)] = 0.0
                    upper[first + best] = np.inf
                else:
                    open_.append((float(part[best]), -first, len(choice_of), best))
            if not open_:
                return Minimum(_picks(model, values)[0], bound, model.columns)
            _, first, count, best = max(open_)
            upper[-first : -first + count] = 0.0
            upper[-first + best] = np.inf
            found, _ = self.solve(1e-3, "devex", 10 * (model.equal_rows + model.less_rows), upper)
            if not found.success:
                return None
            values = found.x

    def branch(self) -> tuple[list[int], float]:
        """Branch and bound over the choices (moves follow them): a plan and a bound of every plan."""
        model = self.model
        unit = np.ones(model.columns)  # how many variables a choice's column stands for: all or none make it
        for first, choice_of, lead in zip(model.group, model.choice_of, model.leader, strict=True):
            unit[first : first + len(choice_of)] = model.quotient.sizes[lead]
        constraints = [LinearConstraint(self.equal @ diags(unit), self.rhs, self.rhs)]
        if self.less is not None:
            constraints.append(LinearConstraint(self.less @ diags(unit), -np.inf, 0.0))
        whole = (np.arange(model.columns) < model.choices).astype(int)
        found = milp(
            self.cost * unit, constraints=constraints, integrality=whole, bounds=Bounds(0, np.inf),
            options={"node_limit": 1000, "mip_rel_gap": 0.0},
        )  # fmt: skip
        if found.x is None:
            raise RuntimeError(f"branch and bound found no plan: {found.message}")
        return _picks(model, found.x * unit)[0], found.mip_dual_bound / self.scale


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
    return Solution(picks, trees, compute, price, 0.0, columns)


def _picks(model: Model, values: np.ndarray) -> tuple[list[int], bool]:
    picks, integral = [], True
    for first, choice_of, lead in zip(model.group, model.choice_of, model.leader, strict=True):
        part = values[first : first + len(choice_of)] / model.quotient.sizes[lead]
        best = int(np.argmax(part))
        picks.append(int(choice_of[best]))
        integral &= bool(part[best] > 1 - INTEGRAL)
    return picks, integral


# --- trees ----------------------------------------------------------------------------------------------------


def _tree(hub: Hub, table: Table, origin: Spec, wanted: Sequence[Spec]) -> dict[Spec, Move]:
    """The cheapest moves found that make every copy wanted of a hub's value: the last move into each spec made.

    One copy is a shortest path; for more, shortest paths grow a tree in every order of up to four copies.
    """
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
