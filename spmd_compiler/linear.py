"""The linear program of a network, and its optimum in whole choices.

Variables, all at least 0:

* ``z[n, c]``  so many variables of class ``n`` run choice ``c`` (at a fork: so many copies part in state ``c``)
* ``f[h, a]``  so much of link ``h`` goes through arc ``a``
* ``x[g, a]``  the copy that arc ``a`` makes exists for the links ``g`` that pay it together

Minimise ``sum cost[n, c] z[n, c] + sum price[h, a] f[h, a] + sum price[g, a] x[g, a]`` (the middle sum over the links
that pay for themselves) subject to

(1) ``sum_c z[n, c] = size[n]``                                                                   for every class
(2) ``inflow_f(s) - outflow_f(s) + sum_{c makes s} w z[n, c] - sum_{c wants s} w z[k, c] = 0``    for every link's state
(3) ``f[h, a] + slack[h, a] = x[g, a]``                                         for every link that pays with others

So copies of one value form a tree of moves in which a shared prefix is paid once.

The network's potentials and its parts of shared prices are multipliers of these rows: (1) by the least reduced cost of
a class, (2) by the potential, (3) by the link's part.  Taken off, they leave the network's bound and costs of 0 and
more, of which 0 is near the cheapest plan: the dual simplex begins there, and equal prices don't make it stall.
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
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix

from .network import Link, Network, Node
from .problem import move_preference, preference
from .redistribute import Move

INTEGRAL = 1e-6
EQUAL = 1e-7  # the reduced cost that is none (HiGHS's tolerance)
SAME = 1e-9  # of the price: what plans may differ by that cost the same
TOLERANCE = 1e-6  # of the price: how near to its bound a plan is taken as the cheapest
BRANCHED = 5e8  # rows times iterations of all the programs that branch and bound solves (some seconds)


class Program:
    """The linear program of what a network keeps, as arrays, its costs reduced by the network's potentials."""

    def __init__(self, network: Network) -> None:
        self.network, self.base = network, network.bound
        self.size = self.rows = 0
        self._cost: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, columns, coefficients
        self._rhs: list[np.ndarray] = []
        self.moves: list[tuple[np.ndarray, Sequence[Move], np.ndarray]] = []  # columns of moves that are paid
        paid = {id(h) for _, links in network.shared for h in links}
        self.choices = {id(n): self._add_node(n) for n in network.nodes}  # of each node: columns of the choices kept
        flows = {id(h): self._add_link(h) for h in network.links}
        self.moves += [(flows[id(h)], h.moves, h.arcs[h.kept]) for h in network.links if id(h) not in paid]
        for price, links in network.shared:
            self._add_shared(price, links, flows)
        rows, columns, values = (np.concatenate(x) for x in zip(*self._entries, strict=True))
        self.matrix: csr_matrix = coo_matrix((values, (rows, columns)), shape=(self.rows, self.size)).tocsr()
        self.cost, self.rhs = np.maximum(np.concatenate(self._cost), 0.0), np.concatenate(self._rhs)

    def _add_columns(self, cost: np.ndarray) -> np.ndarray:
        self._cost.append(cost)
        self.size += len(cost)
        return np.arange(self.size - len(cost), self.size)

    def _add_rows(self, count: int, rhs: float, *entries: tuple[np.ndarray, np.ndarray, float]) -> None:
        for rows, columns, value in entries:
            self._entries.append((self.rows + rows, columns, np.full(len(columns), value)))
        self._rhs.append(np.full(count, rhs))
        self.rows += count

    def _add_node(self, node: Node) -> np.ndarray:
        """(1)"""
        columns = self._add_columns(node.excess()[node.kept])
        self._add_rows(1, node.size, (np.zeros(len(columns), dtype=np.int64), columns, 1.0))
        return columns

    def _add_link(self, link: Link) -> np.ndarray:
        """(2): one row a state; what is not an arc enters at its state with its weight (leaves, if negative)."""
        flow = self._add_columns(link.reduced()[link.kept])
        entries = [(link.target[link.kept], flow, 1.0), (link.source[link.kept], flow, -1.0)]
        for ends, sign in ((link.makers, 1.0), (link.takers, -1.0)):
            entries += [(e.states[e.node.kept], self.choices[id(e.node)], sign * e.weight) for e in ends]
        row = np.zeros(link.states, dtype=np.int64)
        row[np.concatenate([states for states, _, _ in entries])] = 1
        used = int(row.sum())
        row = np.cumsum(row) - 1
        self._add_rows(used, 0.0, *((row[states], columns, value) for states, columns, value in entries))
        return flow

    def _add_shared(self, price: np.ndarray, links: list[Link], flows: dict[int, np.ndarray]) -> None:
        """(3)"""
        left = price.copy()
        for link in links:
            left[link.arcs[link.kept]] -= link.price[link.kept]
        arcs = np.unique(np.concatenate([h.arcs[h.kept] for h in links]))
        made = self._add_columns(left[arcs])
        self.moves.append((made, links[0].moves, arcs))
        for link in links:
            slack = self._add_columns(link.price[link.kept])
            copies = made[np.searchsorted(arcs, link.arcs[link.kept])]
            rows = np.arange(len(slack))
            self._add_rows(len(slack), 0.0, (rows, flows[id(link)], 1.0), (rows, slack, 1.0), (rows, copies, -1.0))

    def parts(self, values: np.ndarray) -> list[np.ndarray]:
        """For each class what part of it makes each choice kept."""
        return [values[self.choices[id(n)]] / n.size for n in self.network.classes]

    def picks(self, values: np.ndarray) -> tuple[list[int], bool]:
        """The choice that most of each class makes, and whether that is all of it everywhere."""
        parts = self.parts(values)
        best = [int(np.argmax(p)) for p in parts]
        whole = all(bool(p[b] > 1 - INTEGRAL) for p, b in zip(parts, best, strict=True))
        return [int(n.picks[n.kept][b]) for n, b in zip(self.network.classes, best, strict=True)], whole

    # --- solving -----------------------------------------------------------------------------------------------

    def relaxed(self, upper: np.ndarray | None = None, iterations: int | None = None) -> Any:
        """HiGHS's answer without wholeness."""
        return linprog(
            self.cost,
            A_eq=self.matrix,
            b_eq=self.rhs,
            bounds=(0, None) if upper is None else np.stack([np.zeros(self.size), upper], axis=1),
            method="highs-ds",
            options={"presolve": False, "simplex_dual_edge_weight_strategy": "devex", "maxiter": iterations},
        )

    def settled(self, found: Any) -> np.ndarray:
        """Of the optima that a solved program has the one for which `problem.preference` sums to least.

        The optima are the points of the program in which no column has a reduced cost above 0 (complementary
        slackness), so that this is one more linear program, of those columns alone.
        """
        optimal = found.lower.marginals <= EQUAL
        weight = np.zeros(self.size)
        problem = self.network.problem
        for node, v in zip(self.network.classes, self.network.quotient.first, strict=True):
            columns = self.choices[id(node)]
            if len(at := np.flatnonzero(optimal[columns])) > 1:
                weight[columns[at]] = [preference(problem, v, int(c)) for c in node.picks[node.kept][at]]
        for columns, moves, arcs in self.moves:
            at = np.flatnonzero(optimal[columns])
            weight[columns[at]] = [move_preference(problem, moves[a]) for a in arcs[at]]
        kept = np.flatnonzero(optimal)
        other = linprog(weight[kept], A_eq=self.matrix[:, kept], b_eq=self.rhs, bounds=(0, None), method="highs-ds")
        values = np.zeros(self.size)
        if other.success:
            values[kept] = other.x
        same = other.success and self.cost @ values <= found.fun + SAME * (self.base + found.fun)
        return values if same else found.x

    def dive(self, values: np.ndarray, bound: float) -> Minimum | None:
        """Fix what is whole and the class nearest to it, solve again, until all is whole."""
        upper = np.full(self.size, np.inf)
        value = bound
        while True:
            open_ = []
            for node, part in zip(self.network.classes, self.parts(values), strict=True):
                columns, best = self.choices[id(node)], int(np.argmax(part))
                if part[best] > 1 - INTEGRAL:
                    upper[np.delete(columns, best)] = 0.0
                else:
                    open_.append((float(part[best]), -int(columns[0]), columns, best))
            if not open_:
                return Minimum(self.picks(values)[0], value, bound, self.size)
            *_, columns, best = max(open_, key=lambda o: o[:2])
            upper[np.delete(columns, best)] = 0.0
            found = self.relaxed(upper)
            if not found.success:
                return None
            values, value = found.x, self.base + found.fun

    def branch(self, found: Any) -> Minimum | None:
        """Branch and bound from the relaxation ``found`` on, choices alone (moves follow them), begun with a dive.
        None where no plan is whole: what lies near the bound need not hold one.

        The program of least bound is parted by the open class that leaves a cheaper plan the fewest choices: at a
        program's multipliers a choice costs no less than its reduced cost above that program's optimum.
        """
        bound = self.base + found.fun
        best = self.dive(found.x, bound)
        value = math.inf if best is None else best.value
        number = itertools.count()
        heap = [(bound, next(number), np.full(self.size, np.inf), found)]
        left = BRANCHED
        while heap and heap[0][0] < value * (1 - TOLERANCE) and (left > 0 or best is None):
            bound, _, upper, found = heapq.heappop(heap)
            for columns, pick in self._parted(found, upper, value * (1 - SAME) - bound):
                narrower = upper.copy()
                narrower[np.delete(columns, pick)] = 0.0
                inside = self.relaxed(narrower)
                left -= inside.nit * self.rows
                if not inside.success or (reached := self.base + inside.fun) >= value * (1 - SAME):
                    continue
                picks, whole = self.picks(inside.x)
                if whole:
                    best, value = Minimum(picks, reached, bound, self.size), reached
                else:
                    heapq.heappush(heap, (reached, next(number), narrower, inside))
        if best is None:
            return None
        return dataclasses.replace(best, bound=min(heap[0][0], value) if heap else value)

    def _parted(self, found: Any, upper: np.ndarray, slack: float) -> list[tuple[np.ndarray, int]]:
        """The columns of an open class, and each of its choices that is in a plan less than ``slack`` above."""
        open_ = []
        for node, part in zip(self.network.classes, self.parts(found.x), strict=True):
            if part.max() <= 1 - INTEGRAL:
                columns = self.choices[id(node)]
                above = found.lower.marginals[columns] * node.size / slack
                picks = np.flatnonzero((above < 1) & (upper[columns] > 0))
                open_.append((float(np.exp(-3 * above[picks]).sum()), int(columns[0]), columns, picks))
        *_, columns, picks = min(open_, key=lambda o: o[:2])
        return [(columns, int(p)) for p in picks]


@dataclass(frozen=True)
class Minimum:
    """The choice of each class, its price, what no solution of the program costs less than, and the columns it has."""

    picks: list[int]
    value: float
    bound: float
    columns: int


def minimum(network: Network, iterations: int | None = None) -> Minimum | None:
    """The optimum of what a network keeps, in its scale, in whole choices (of a network of sums: of the relaxation).

    None where there is no solution, or none in so many iterations (not seconds: every rank must do the same).
    """
    program = Program(network)
    found = program.relaxed(iterations=iterations)
    if found.status == 2 or (found.status == 1 and iterations is not None):
        return None
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    bound = program.base + found.fun
    picks, whole = program.picks(found.x)
    if not network.whole:
        return Minimum(picks, bound, bound, program.size)
    settled, settled_whole = program.picks(program.settled(found))
    if whole or settled_whole:
        return Minimum(settled if settled_whole else picks, bound, bound, program.size)
    return program.branch(found)
