"""The linear program of a network, and its optimum in whole choices.

Variables, all at least 0:

* ``z[n, c]``  so many variables of class ``n`` run choice ``c`` (at a fork: so many copies part in state ``c``)
* ``f[h, a]``  so much of link ``h`` goes through arc ``a``
* ``x[g, a]``  the copy that arc ``a`` makes exists for the links ``g`` that pay it together

Minimise ``sum cost[n, c] z[n, c] + sum price[h, a] f[h, a] + sum price[g, a] x[g, a]`` (the middle sum over the links
that pay for themselves) subject to

(1) ``sum_c z[n, c] = size[n]``                                                                   for every class
(2) ``inflow_f(s) - outflow_f(s) + sum_{c makes s} w z[n, c] - sum_{c wants s} w z[k, c] = 0``    for every link's state
(3) ``f[h, a] <= x[g, a]``                                                      for every link that pays with others

So copies of one value form a tree of moves in which a shared prefix is paid once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, csr_matrix, diags

from .network import Link, Network, Node

INTEGRAL = 1e-6
BRANCHED = 20_000  # columns up to which a program that is not whole goes to branch and bound
NOISY = 60_000  # columns from which a program's prices are parted by noise

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, columns, coefficients


class Program:
    """The linear program of what a network keeps: columns, rows and prices as arrays."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.columns = 0
        self.cost: list[np.ndarray] = []
        self.equal: list[Entries] = []
        self.rhs: list[np.ndarray] = []
        self.equal_rows = 0
        self.less: list[Entries] = []
        self.less_rows = 0
        self.first = {id(n): self._add_columns(n.cost[n.kept]) for n in network.nodes}
        for node in network.classes:
            self._add_node(node)
        together = {id(h) for _, links in network.shared for h in links}
        flow = {
            id(h): self._add_columns(h.price[h.kept] * (id(h) not in together)) for h in network.links
        }
        for link in network.links:
            self._add_link(link, flow[id(link)])
        for price, links in network.shared:
            self._add_shared(price, links, flow)

    def _add_columns(self, cost: np.ndarray) -> int:
        first = self.columns
        self.cost.append(cost)
        self.columns += len(cost)
        return first

    def _add_node(self, node: Node) -> None:
        """(1)"""
        columns = self.first[id(node)] + np.arange(int(node.kept.sum()))
        self.equal.append((np.full(len(columns), self.equal_rows), columns, np.ones(len(columns))))
        self.rhs.append(np.array([node.size]))
        self.equal_rows += 1

    def _add_link(self, link: Link, flow: int) -> None:
        """(2): one row a state; what is not an arc enters at its state with its weight (leaves, if negative)."""
        source, target = link.source[link.kept], link.target[link.kept]
        moves = flow + np.arange(len(source))
        parts = [(target, moves, 1.0), (source, moves, -1.0)]
        for ends, sign in ((link.makers, 1.0), (link.takers, -1.0)):
            for end in ends:
                states = end.states[end.node.kept]
                parts.append((states, self.first[id(end.node)] + np.arange(len(states)), sign * end.weight))
        states = np.concatenate([states for states, _, _ in parts])
        used, rows = np.unique(states, return_inverse=True)
        signs = np.concatenate([np.full(len(states), sign) for states, _, sign in parts])
        self.equal.append((rows + self.equal_rows, np.concatenate([c for _, c, _ in parts]), signs))
        self.rhs.append(np.zeros(len(used)))
        self.equal_rows += len(used)

    def _add_shared(self, price: np.ndarray, links: list[Link], flow: dict[int, int]) -> None:
        """(3)"""
        arcs = np.unique(np.concatenate([h.arcs[h.kept] for h in links]))
        x = self._add_columns(price[arcs])
        for link in links:
            mine = np.searchsorted(arcs, link.arcs[link.kept])
            count = len(mine)
            rows = np.tile(np.arange(count), 2) + self.less_rows
            self.less.append((rows, np.concatenate([flow[id(link)] + np.arange(count), x + mine]),
                              np.repeat([1.0, -1.0], count)))  # fmt: skip
            self.less_rows += count

    def most_active(self) -> float:
        """What the columns of a plan can add up to, of those that have an alternative: choices, and on each link a move
        along every axis and one more."""
        most = len(self.network.problem.mesh.axes) + 1
        nodes = sum(n.size for n in self.network.nodes if n.kept.sum() > 1)
        return nodes + sum(h.count * min(most, int(h.kept.sum())) for h in self.network.links)

    def matrices(self) -> tuple[np.ndarray, csr_matrix, np.ndarray, csr_matrix | None]:
        def build(parts: list[Entries], rows: int) -> csr_matrix:
            r, c, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            return coo_matrix((v, (r, c)), shape=(rows, self.columns)).tocsr()

        less = build(self.less, self.less_rows) if self.less_rows else None
        return np.concatenate(self.cost), build(self.equal, self.equal_rows), np.concatenate(self.rhs), less

    def parts(self, values: np.ndarray) -> list[np.ndarray]:
        """For each class what part of it makes each choice kept."""
        found = []
        for node in self.network.classes:
            first = self.first[id(node)]
            found.append(values[first : first + int(node.kept.sum())] / node.size)
        return found

    def picks(self, values: np.ndarray) -> tuple[list[int], bool]:
        """The choice that most of each class makes, and whether that is all of it everywhere."""
        parts = self.parts(values)
        best = [int(np.argmax(p)) for p in parts]
        whole = all(bool(p[b] > 1 - INTEGRAL) for p, b in zip(parts, best, strict=True))
        return [int(n.picks[n.kept][b]) for n, b in zip(self.network.classes, best, strict=True)], whole


@dataclass(frozen=True)
class Minimum:
    """The choice of each class, its price, what no solution of the program costs less than, and the columns it has."""

    picks: list[int]
    value: float
    bound: float
    columns: int


def minimum(network: Network) -> Minimum | None:
    """The optimum of what a network keeps, in its scale, in whole choices (of a network of sums: of the relaxation).

    None where there is no solution.
    """
    program = Program(network)
    relaxed = Relaxation(program)
    # where equal prices make the simplex stall, as in large programs of equal parts, a little noise, the same in every
    # run, parts them; limits count iterations, for every rank must do the same
    rows = program.equal_rows + program.less_rows
    noisy = [(1e-4, "devex", rows // 2), (1e-2, "devex", rows), (1.0, "devex", 20 * rows)]
    attempts = [(0.0, None, rows + 10_000), *noisy]
    for level, edges, limit in attempts[program.columns > NOISY and max(network.quotient.sizes) > 1 :]:
        found, bound = relaxed.solve(level, edges, limit)
        if found.status != 1:
            break
    if found.status == 2:
        return None
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    picks, whole = program.picks(found.x)
    if whole or not network.whole:
        return Minimum(picks, found.fun, bound, program.columns)
    if program.columns > BRANCHED and (dived := relaxed.dive(found.x, bound)) is not None:
        return dived
    return relaxed.branch(bound)


class Relaxation:
    """The relaxation of a program, and what is done where its optimum is not whole."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cost, self.equal, self.rhs, self.less = program.matrices()
        self.draw = np.random.default_rng(0).random(program.columns)
        for node in program.network.nodes:
            if node.kept.sum() == 1:
                self.draw[program.first[id(node)]] = 0.0

    def solve(self, level: float, edges: str | None, limit: int, upper: Any = None) -> tuple[Any, float]:
        """HiGHS's answer with noise of a ``level`` in the costs, and a bound of every plan."""
        noise = level * self.draw
        found = linprog(
            self.cost + noise,
            A_ub=self.less,
            b_ub=np.zeros(self.program.less_rows) if self.less is not None else None,
            A_eq=self.equal,
            b_eq=self.rhs,
            bounds=(0, None) if upper is None else np.stack([np.zeros(len(upper)), upper], axis=1),
            method="highs-ds",
            options={"maxiter": limit, "simplex_dual_edge_weight_strategy": edges},
        )
        if found.fun is None:
            return found, 0.0
        # every plan costs at least the noisy optimum less the noise on its own columns
        return found, max(found.fun - float(noise.max(initial=0.0)) * self.program.most_active(), 0.0)

    def dive(self, values: np.ndarray, bound: float) -> Minimum | None:
        """Fix what is whole and the class nearest to it, solve again, until all is whole."""
        program = self.program
        upper = np.full(program.columns, np.inf)
        price = 0.0
        while True:
            open_ = []
            for node, part in zip(program.network.classes, program.parts(values), strict=True):
                first, best = program.first[id(node)], int(np.argmax(part))
                if part[best] > 1 - INTEGRAL:
                    upper[first : first + len(part)] = 0.0
                    upper[first + best] = np.inf
                else:
                    open_.append((float(part[best]), -first, len(part), best))
            if not open_:
                return Minimum(program.picks(values)[0], price, bound, program.columns)
            _, first, count, best = max(open_)
            upper[-first : -first + count] = 0.0
            upper[-first + best] = np.inf
            found, _ = self.solve(1e-4, "devex", 10 * (program.equal_rows + program.less_rows), upper)
            if not found.success:
                return None
            values, price = found.x, found.fun

    def branch(self, bound: float) -> Minimum:
        """Branch and bound over the choices (moves follow them)."""
        program = self.program
        unit = np.ones(program.columns)  # how many variables a choice's column stands for: all or none make it
        whole = np.zeros(program.columns, dtype=int)
        for node in program.network.classes:
            first = program.first[id(node)]
            unit[first : first + int(node.kept.sum())] = node.size
            whole[first : first + int(node.kept.sum())] = 1
        constraints = [LinearConstraint(self.equal @ diags(unit), self.rhs, self.rhs)]
        if self.less is not None:
            constraints.append(LinearConstraint(self.less @ diags(unit), -np.inf, 0.0))
        found = milp(
            self.cost * unit, constraints=constraints, integrality=whole, bounds=Bounds(0, np.inf),
            options={"node_limit": 1000, "mip_rel_gap": 0.0},
        )  # fmt: skip
        if found.x is None:
            raise RuntimeError(f"branch and bound found no plan: {found.message}")
        picks, _ = program.picks(found.x * unit)
        return Minimum(picks, found.fun, max(bound, found.mip_dual_bound), program.columns)
