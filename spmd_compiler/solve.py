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
(3) ``f[h, k, a] <= x[h, a]``                                      for every hub with two consumers or more

So copies of one value form a tree of moves in which a shared prefix is paid once.  The relaxation's optimum is a
lower bound; it has been integral in practice, and a fractional one goes to branch and bound on the same model.
The answer's price is recomputed from the choices and the trees (`Solution.price`), never read off the program.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix
from torch.distributed.tensor import Partial, Shard

from .cost import Profile
from .placements import Mesh, Spec, SpmdError
from .redistribute import Move, move_price, moves
from .rules import Choice

INTEGRAL = 1e-6


@dataclass
class Variable:
    """A node of the problem: its choices and the seconds of local compute of each.

    ``transparent`` says that the node has one operand and that a gather or exchange before it can be put off
    until after it at no higher price.
    """

    name: str
    choices: tuple[Choice, ...]
    compute: np.ndarray
    transparent: bool = False


@dataclass
class Hub:
    """A value in one phase: who makes it (variable, result) and who wants it (variable, operand)."""

    source: tuple[int, int]
    consumers: list[tuple[int, int]]
    shape: tuple[int, ...]
    element: int


@dataclass
class Problem:
    mesh: Mesh
    profile: Profile
    variables: list[Variable] = field(default_factory=list)
    hubs: list[Hub] = field(default_factory=list)
    uneven: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Solution:
    """The choice of each variable, and for each hub the moves that make its copies (target spec -> move)."""

    choices: list[int]
    trees: list[dict[Spec, Move]]
    compute: float
    price: float
    bound: float
    columns: int


# --- states and arcs of a hub ---------------------------------------------------------------------------------


@dataclass
class Table:
    """The states of a hub and its arcs as arrays; an arc costs ``fixed + rate * bytes of the global value``."""

    states: list[Spec]
    index: dict[Spec, int]
    moves: list[Move]
    source: np.ndarray
    target: np.ndarray
    fixed: np.ndarray
    rate: np.ndarray


class Tables:
    """Builds tables once for all hubs with the same placements per axis and the same divisibility."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cache: dict[object, Table] = {}

    def of(self, hub: Hub) -> Table:
        p = self.problem
        producer, result = hub.source
        made = {c.results[result] for c in p.variables[producer].choices}
        wanted = {c.operands[i] for k, i in hub.consumers for c in p.variables[k].choices}
        seen = made | wanted
        options = tuple(tuple(sorted({s.placements[i] for s in seen}, key=str)) for i in range(len(p.mesh.axes)))
        partial = frozenset(x for s in made for x in s.partial_axes())
        even = tuple(
            tuple(n % math.prod(c) == 0 for k in range(1, len(p.mesh.axes) + 1)
                  for c in itertools.combinations(p.mesh.shape, k)) for n in hub.shape
        )  # fmt: skip
        regular = all(s.is_even(hub.shape, p.mesh) for s in seen)
        key = (options, partial, even if regular else hub.shape, frozenset(seen) if not regular else None)
        if key not in self.cache:
            self.cache[key] = self._build(hub, seen, options, regular)
        table = self.cache[key]
        if not seen <= table.index.keys():  # an order of nesting that this hub alone uses
            self.cache[key] = table = self._build(hub, seen | set(table.states), options, regular)
        return table

    def _build(self, hub: Hub, seen: set[Spec], options: Sequence[Sequence], regular: bool) -> Table:
        p = self.problem
        allowed = [frozenset(o) for o in options]
        states = sorted(seen, key=str)
        index = {s: i for i, s in enumerate(states)}
        arcs: list[Move] = []
        queue = list(states)
        while queue:
            spec = queue.pop(0)
            for move in moves(spec, hub.shape, p.mesh, p.uneven):
                if any(t not in a for t, a in zip(move.target.placements, allowed, strict=True)):
                    continue
                if move.target not in index:
                    index[move.target] = len(states)
                    states.append(move.target)
                    queue.append(move.target)
                arcs.append(move)
        scale = math.prod(hub.shape) * hub.element
        fixed, rate = np.zeros(len(arcs)), np.zeros(len(arcs))
        for i, move in enumerate(arcs):
            if regular and scale and move.target.is_even(hub.shape, p.mesh):
                fixed[i], rate[i] = _affine(p.profile, p.mesh, move.kind, move.axes, move.target.shards(p.mesh))
            else:
                rate[i] = 0.0
                fixed[i] = move_price(move, hub.shape, hub.element, p.mesh, p.profile)
        return Table(
            states, index, arcs,
            np.array([index[m.source] for m in arcs], dtype=np.int64),
            np.array([index[m.target] for m in arcs], dtype=np.int64),
            fixed, rate,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _affine(profile: Profile, mesh: Mesh, kind: str, axes: tuple[str, ...], shards: int) -> tuple[float, float]:
    """A move's price as ``fixed + rate * global bytes``, its result being cut into ``shards``."""
    if kind == "slice":
        return 0.0, 2 / (profile.memory * shards)
    fixed = profile.collective(mesh, kind, axes, 0.0)
    return fixed, profile.collective(mesh, kind, axes, 1.0 / shards) - fixed


# --- the linear program ---------------------------------------------------------------------------------------


class Model:
    """Columns, rows and prices of the program, gathered as arrays."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = Tables(problem)
        self.cost: list[np.ndarray] = []
        self.columns = 0
        self.equal: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.equal_rhs: list[np.ndarray] = []
        self.equal_rows = 0
        self.less: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.less_rows = 0
        self.z = [self._add_columns(v.compute) for v in problem.variables]
        self._one_choice_each()
        self.hub_tables = [self.tables.of(h) for h in problem.hubs]
        for hub, table in zip(problem.hubs, self.hub_tables, strict=True):
            self._add_hub(hub, table)

    def _add_columns(self, cost: np.ndarray) -> int:
        first = self.columns
        self.cost.append(cost)
        self.columns += len(cost)
        return first

    def _one_choice_each(self) -> None:
        """(1)"""
        counts = [len(v.choices) for v in self.problem.variables]
        rows = np.repeat(np.arange(len(counts)), counts)
        self.equal.append((rows, np.arange(self.columns), np.ones(self.columns)))
        self.equal_rhs.append(np.ones(len(counts)))
        self.equal_rows += len(counts)

    def _arcs_kept(self, hub: Hub, table: Table) -> np.ndarray:
        """Arcs worth having: before a transparent only consumer, gathers and exchanges are put off."""
        keep = np.ones(len(table.moves), dtype=bool)
        if len(hub.consumers) == 1 and self.problem.variables[hub.consumers[0][0]].transparent:
            wanted = {c.operands[0] for c in self.problem.variables[hub.consumers[0][0]].choices}
            for i, move in enumerate(table.moves):
                later = move.kind in ("all_gather", "all_to_all", "permute")
                keep[i] = not (later and move.source in wanted)
        return keep

    def _add_hub(self, hub: Hub, table: Table) -> None:
        """(2) and (3)"""
        p = self.problem
        n, r = hub.source
        keep = self._arcs_kept(hub, table)
        price = (table.fixed + table.rate * (math.prod(hub.shape) * hub.element))[keep]
        src, dst = table.source[keep], table.target[keep]
        made = np.array([table.index[c.results[r]] for c in p.variables[n].choices], dtype=np.int64)
        states, count = len(table.states), len(price)
        x = self._add_columns(price)
        shared = len(hub.consumers) > 1
        for k, i in hub.consumers:
            f = self._add_columns(np.zeros(count)) if shared else x
            arcs = np.arange(count)
            wants = np.array([table.index[c.operands[i]] for c in p.variables[k].choices], dtype=np.int64)
            rows = np.concatenate([dst, src, made, wants]) + self.equal_rows
            cols = np.concatenate([f + arcs, f + arcs, self.z[n] + np.arange(len(made)),
                                   self.z[k] + np.arange(len(wants))])  # fmt: skip
            vals = np.concatenate([np.ones(count), -np.ones(count), np.ones(len(made)), -np.ones(len(wants))])
            self.equal.append((rows, cols, vals))
            self.equal_rhs.append(np.zeros(states))
            self.equal_rows += states
            if shared:
                rows = np.concatenate([arcs, arcs]) + self.less_rows
                self.less.append((rows, np.concatenate([f + arcs, x + arcs]), np.repeat([1.0, -1.0], count)))
                self.less_rows += count

    def matrices(self) -> tuple[np.ndarray, coo_matrix, np.ndarray, coo_matrix | None]:
        def build(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], rows: int) -> coo_matrix:
            r, c, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            return coo_matrix((v, (r, c)), shape=(rows, self.columns)).tocsr()

        less = build(self.less, self.less_rows) if self.less_rows else None
        return np.concatenate(self.cost), build(self.equal, self.equal_rows), np.concatenate(self.equal_rhs), less


def solve(problem: Problem) -> Solution:
    """The cheapest solution with a proven bound.  Raises `SpmdError` where no plan exists."""
    model = Model(problem)
    cost, equal, rhs, less = model.matrices()
    scale = max(float(np.max(np.abs(cost), initial=0.0)), 1e-30)
    limits = np.zeros(model.less_rows) if less is not None else None
    found = linprog(
        cost * (1e3 / scale), A_ub=less, b_ub=limits, A_eq=equal, b_eq=rhs, bounds=(0, None), method="highs-ds",
        options={"presolve": False},
    )  # fmt: skip
    if found.status == 2:
        raise SpmdError("the placements given contradict each other: no plan satisfies all of them")
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    bound = found.fun * scale / 1e3
    values = found.x
    picks, integral = _picks(model, values)
    if not integral:
        values, bound = _branch(model, cost, equal, rhs, less, scale)
        picks, _ = _picks(model, values)
    trees = [_tree(problem, hub, table, picks) for hub, table in zip(problem.hubs, model.hub_tables, strict=True)]
    compute = sum(float(v.compute[c]) for v, c in zip(problem.variables, picks, strict=True))
    price = compute + sum(
        move_price(m, hub.shape, hub.element, problem.mesh, problem.profile)
        for hub, tree in zip(problem.hubs, trees, strict=True) for m in tree.values()
    )  # fmt: skip
    return Solution(picks, trees, compute, price, min(bound, price), model.columns)


def _picks(model: Model, values: np.ndarray) -> tuple[list[int], bool]:
    picks, integral = [], True
    for first, v in zip(model.z, model.problem.variables, strict=True):
        part = values[first : first + len(v.choices)]
        picks.append(int(np.argmax(part)))
        integral &= bool(part[picks[-1]] > 1 - INTEGRAL)
    return picks, integral


def _branch(model: Model, cost, equal, rhs, less, scale: float) -> tuple[np.ndarray, float]:
    """Branch and bound over the choices (moves follow them): a plan and a bound of every plan."""
    constraints = [LinearConstraint(equal, rhs, rhs)]
    if less is not None:
        constraints.append(LinearConstraint(less, -np.inf, 0.0))
    choices = sum(len(v.choices) for v in model.problem.variables)
    whole = (np.arange(model.columns) < choices).astype(int)
    found = milp(
        cost * (1e3 / scale), constraints=constraints, integrality=whole, bounds=Bounds(0, np.inf),
        options={"time_limit": 120.0, "mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        raise RuntimeError(f"branch and bound found no plan: {found.message}")
    return found.x, found.mip_dual_bound * scale / 1e3


# --- trees ----------------------------------------------------------------------------------------------------


def _tree(problem: Problem, hub: Hub, table: Table, picks: Sequence[int]) -> dict[Spec, Move]:
    """The cheapest moves found that make every copy a hub's consumers want: the last move into each spec made.

    One copy is a shortest path; for more, shortest paths grow a tree in every order of up to four copies.
    """
    n, r = hub.source
    origin = problem.variables[n].choices[picks[n]].results[r]
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
        total, tree = 0.0, {}
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


def is_partial(spec: Spec) -> bool:
    return any(isinstance(p, Partial) for p in spec.placements)


def is_sharded(spec: Spec) -> bool:
    return any(isinstance(p, Shard) for p in spec.placements)
