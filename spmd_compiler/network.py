"""The solver's problem as a network, and what message passing proves of it.

*Nodes* have choices, *links* carry a value from the choices that make it, over one-axis moves (arcs between states), to
the choices that want it.  A hub with one consumer is a link.  One with more is a link to a *fork*, a node whose choices
are the hub's states, and links from there to each consumer: for two, copies are a trunk and two branches; for more,
the moves before the fork fall away and those behind it are paid once by all who share them.

With a potential for each state of each link that obeys ``potential[t] <= potential[s] + price[s -> t]``,

    sum over nodes of  size * min over choices (cost + potentials of what it wants - potentials of what it makes)

is at most the price of any plan (duality of linear programs).  `Network.ascend` raises that bound: forward, each node
passes what its choices cost above the cheapest on to its results, backward to its operands (sequential tree-reweighted
message passing: Kolmogorov, "Convergent Tree-reweighted Message Passing for Energy Minimization", 2006).  A choice or a
move that costs a plan more than ``gap`` above the bound is in no plan cheaper than that (`Network.within`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .problem import Problem, Table, Tables
from .quotient import End as ClassEnd
from .quotient import Group, Quotient
from .redistribute import Move

SCALE = 1e3  # the dearest choice or move as the network prices it first
TOTAL = 1e6  # the bound as the network prices it once it is known
ROUNDING = 1e-9
SWEEPS = 40
GAIN = 2e-5  # of the bound in one sweep, with which it goes on


@dataclass(eq=False)
class Node:
    """``size`` variables that are decided together (a fork: points where copies part): the cost of each choice."""

    cost: np.ndarray
    size: float
    wants: list[End] = field(default_factory=list)
    makes: list[End] = field(default_factory=list)
    picks: np.ndarray = field(init=False)  # the variable's choices that are left
    kept: np.ndarray = field(init=False)  # those of them that some cheap plan may have

    def __post_init__(self) -> None:
        self.picks = np.arange(len(self.cost))
        self.kept = np.full(len(self.cost), True)

    def excess(self) -> np.ndarray:
        """What each choice costs above the cheapest, at the potentials around."""
        found = self.reduced()
        return found - found.min()

    def reduced(self) -> np.ndarray:
        found = self.cost.copy()
        for end in self.wants:
            found += end.weight * end.link.potential[end.states]
        for end in self.makes:
            found -= end.weight * end.link.potential[end.states]
        return found


@dataclass(eq=False)
class Link:
    """``count`` flows of equal values over arcs ``source -> target``, their numbers ``arcs`` in the hub's ``moves``."""

    states: int
    arcs: np.ndarray
    source: np.ndarray
    target: np.ndarray
    price: np.ndarray
    count: float
    moves: Sequence[Move]
    makers: list[End] = field(default_factory=list)
    takers: list[End] = field(default_factory=list)
    potential: np.ndarray = field(init=False)
    kept: np.ndarray = field(init=False)  # the arcs that some cheap plan may have

    def __post_init__(self) -> None:
        self.potential = np.zeros(self.states)
        self.kept = np.full(len(self.arcs), True)

    def reduced(self) -> np.ndarray:
        """The price of each arc at the potentials."""
        return self.price + self.potential[self.source] - self.potential[self.target]

    def below(self, value: np.ndarray) -> np.ndarray:
        """The largest potentials not above ``value``."""
        while len(self.arcs):
            new = value.copy()
            np.minimum.at(new, self.target, value[self.source] + self.price)
            if not (new < value - ROUNDING).any():
                break
            value = new
        return value

    def above(self, value: np.ndarray) -> np.ndarray:
        """The smallest potentials not below ``value``."""
        while len(self.arcs):
            new = value.copy()
            np.maximum.at(new, self.source, value[self.target] - self.price)
            if not (new > value + ROUNDING).any():
                break
            value = new
        return value


@dataclass(eq=False)
class End:
    """The state of a link that each choice of a node makes or wants, and what one variable's flow weighs there."""

    node: Node
    link: Link
    states: np.ndarray
    weight: float


def _least(states: int, ends: list[End], among: list[list[End]], known: dict[int, np.ndarray]) -> np.ndarray:
    """The excess of a unit of flow in each state: the least over the ends, where each node's excess is parted equally
    between all the ends that it is ``among``.  Those ``known``, at the present potentials, are not counted again."""
    found = np.full(states, np.inf)
    for end, others in zip(ends, among, strict=True):
        if id(end.node) not in known:
            known[id(end.node)] = end.node.excess()
        np.minimum.at(found, end.states, known[id(end.node)] / (len(others) * end.weight))
    return found


class Network:
    """The network of a quotient, without the choices and moves that no plan can have.

    ``whole``: the variables of a class make one choice (the tied quotient); else each its own, and flows are sums.
    Prices are scaled so that the dearest is `SCALE`.
    """

    def __init__(self, problem: Problem, tables: Tables, quotient: Quotient, whole: bool = True) -> None:
        self.problem, self.tables, self.quotient, self.whole = problem, tables, quotient, whole
        variables = [problem.variables[v] for v in quotient.first]
        prices = [self._arcs(g) for g in quotient.groups]
        costs = [*(v.compute for v in variables), *(price for *_, price in prices)]
        self.scale = SCALE / max(1e-30, *(float(np.max(a, initial=0.0)) for a in costs))
        self.classes = [Node(v.compute * self.scale, float(n)) for v, n in zip(variables, quotient.sizes, strict=True)]
        self.links: list[Link] = []
        self.shared: list[tuple[np.ndarray, list[Link]]] = []  # links whose equal arcs are paid once, and their prices
        order = [(i, 0, n) for i, n in enumerate(self.classes)]
        for group, (table, arcs, price) in zip(quotient.groups, prices, strict=True):
            fork = self._add(group, table, arcs, price * self.scale)
            if fork is not None:
                order.append((max(e.variable for e in group.source), 1, fork))
        self.nodes = [n for *_, n in sorted(order, key=lambda o: o[:2])]
        self.feasible = self._drop_impossible()
        self.size = sum(len(n.cost) for n in self.nodes) + sum(len(h.arcs) for h in self.links)

    # --- construction ------------------------------------------------------------------------------------------

    def _arcs(self, group: Group) -> tuple[Table, np.ndarray, np.ndarray]:
        """A group's table, the numbers of the arcs kept, and their prices: all where the group has not all hubs of the
        classes at it, for then choices around a hub can't change for its sake alone."""
        hub = self.problem.hubs[group.hub]
        table = self.tables.of(hub)
        price = self.tables.price(hub, table)
        if hub.tied or all(e.weight == 1.0 for ends in (group.source, *group.slots) for e in ends):
            arcs = np.flatnonzero(self.tables.arcs_kept(hub, table))
        else:
            arcs = np.arange(len(table.moves))
        return table, arcs, price[arcs]

    def _add(self, group: Group, table: Table, arcs: np.ndarray, price: np.ndarray) -> Node | None:
        """The links of a group of hubs, and the fork where there are several consumers."""
        count, states = float(group.count), len(table.states)

        def link(arcs: np.ndarray, price: np.ndarray) -> Link:
            made = Link(states, arcs, table.source[arcs], table.target[arcs], price.copy(), count, table.moves)
            self.links.append(made)
            return made

        def join(to: Link, ends: Sequence[ClassEnd], made: bool) -> None:
            for e in ends:
                picks = self.problem.variables[self.quotient.first[e.variable]].choices
                specs = [(c.results if made else c.operands)[e.place] for c in picks]
                at = np.array([table.index[s] for s in specs if s is not None], dtype=np.int64)
                node = self.classes[e.variable]
                end = End(node, to, at, e.weight)
                (to.makers if made else to.takers).append(end)
                (node.makes if made else node.wants).append(end)

        several = len(group.slots)
        if several == 1:
            only = link(arcs, price)
            join(only, group.source, True)
            join(only, group.slots[0], False)
            return None
        trunk = link(arcs, price) if several == 2 else link(arcs[:0], price[:0])
        join(trunk, group.source, True)
        fork = Node(np.zeros(states), count)
        trunk.takers.append(End(fork, trunk, np.arange(states), 1.0))
        fork.wants.append(trunk.takers[0])
        branches = [link(arcs, price if several == 2 else price / several) for _ in group.slots]
        for branch, slot in zip(branches, group.slots, strict=True):
            branch.makers.append(End(fork, branch, np.arange(states), 1.0))
            fork.makes.append(branch.makers[0])
            join(branch, slot, False)
        if several > 2:
            every = np.zeros(len(table.moves))
            every[arcs] = price
            self.shared.append((every, branches))
        return fork

    def _drop_impossible(self) -> bool:
        """Leave out, until nothing changes, choices that want what nobody can deliver or make what nobody can use."""
        alive = {id(n): np.full(len(n.cost), True) for n in self.nodes}
        live: dict[int, np.ndarray] = {}
        before = -1
        while before != (before := sum(int(a.sum()) for a in alive.values())):
            for link in self.links:
                masks = []
                sides = ((link.makers, link.source, link.target), (link.takers, link.target, link.source))
                for ends, near, far in sides:
                    at = np.full(link.states, False)
                    for end in ends:
                        at[end.states[alive[id(end.node)]]] = True
                    reached = -1
                    while reached != (reached := int(at.sum())):
                        at[far[at[near]]] = True
                    masks.append(at)
                live[id(link)] = masks[0] & masks[1]
                for end in (*link.makers, *link.takers):
                    alive[id(end.node)] &= live[id(link)][end.states]
        for node in self.nodes:
            mask = alive[id(node)]
            for end in (*node.makes, *node.wants):
                end.states = (np.cumsum(live[id(end.link)]) - 1)[end.states[mask]]
            node.cost, node.picks, node.kept = node.cost[mask], node.picks[mask], node.kept[mask]
        for link in self.links:
            mask = live[id(link)]
            number = np.cumsum(mask) - 1
            left = mask[link.source] & mask[link.target]
            link.states, link.potential = int(mask.sum()), link.potential[mask]
            link.arcs, link.price, link.kept = link.arcs[left], link.price[left], link.kept[left]
            link.source, link.target = number[link.source[left]], number[link.target[left]]
        return all(len(n.cost) for n in self.classes)

    # --- the bound ---------------------------------------------------------------------------------------------

    @property
    def bound(self) -> float:
        """What no plan costs less than, scaled."""
        return math.fsum(n.size * float(n.reduced().min()) for n in self.nodes)

    def ascend(self) -> float:
        """Raise the bound in sweeps until they gain little; scale it to `TOTAL`, where it is above 0, and give it."""
        bound = -math.inf
        for _ in range(SWEEPS):
            for node in self.nodes:
                self._forward(node)
            self._share()
            for node in reversed(self.nodes):
                self._backward(node)
            self._share()
            before, bound = bound, self.bound
            if bound - before < GAIN * abs(bound):
                break
        if bound <= ROUNDING * SCALE:  # it may be that something costs nothing
            return 0.0
        self._rescale(TOTAL / bound)
        return self.bound

    def _rescale(self, factor: float) -> None:
        self.scale *= factor
        for node in self.nodes:
            node.cost *= factor
        for link in self.links:
            link.price *= factor
            link.potential *= factor
        for price, _ in self.shared:
            price *= factor

    def _forward(self, node: Node) -> None:
        known: dict[int, np.ndarray] = {}
        raised = [e.link.potential + _least(e.link.states, e.link.makers, [m.node.makes for m in e.link.makers], known)
                  for e in node.makes]  # fmt: skip
        for end, potential in zip(node.makes, raised, strict=True):
            end.link.potential = end.link.below(potential)

    def _backward(self, node: Node) -> None:
        known: dict[int, np.ndarray] = {}
        lowered = [e.link.potential - _least(e.link.states, e.link.takers, [t.node.wants for t in e.link.takers], known)
                   for e in node.wants]  # fmt: skip
        for end, potential in zip(node.wants, lowered, strict=True):
            end.link.potential = end.link.above(potential)

    def _share(self) -> None:
        """What links that pay an arc together need of its price at their potentials, and the rest in equal parts."""
        for price, links in self.shared:
            need = [np.maximum(0.0, h.potential[h.target] - h.potential[h.source]) for h in links]
            left, number = price.copy(), np.zeros(len(price))
            for h, part in zip(links, need, strict=True):
                left[h.arcs] -= part
                number[h.arcs] += 1
            left = np.maximum(left, 0.0) / np.maximum(number, 1)
            for h, part in zip(links, need, strict=True):
                h.price = part + left[h.arcs]

    # --- what a cheap plan may have ----------------------------------------------------------------------------

    def within(self, gap: float) -> int:
        """Keep the choices and moves that a plan of at most the present bound and ``gap`` (scaled) may have; their
        number.  Raises potentials as a forward sweep does."""
        slack = gap + ROUNDING * len(self.nodes)
        for node in self.nodes:
            node.kept = node.excess() * (node.size if self.whole else 1.0) <= slack
            for link in (e.link for e in node.makes):
                made = link.below(link.potential + _least(link.states, link.makers, [[e] for e in link.makers], {}))
                wanted = link.above(link.potential - _least(link.states, link.takers, [[e] for e in link.takers], {}))
                excess = made[link.source] + link.price - wanted[link.target]
                link.kept = excess * (link.count if self.whole else 1.0) <= slack
            self._forward(node)
        for node in reversed(self.nodes):
            self._backward(node)
        return sum(int(n.kept.sum()) for n in self.nodes) + sum(int(h.kept.sum()) for h in self.links)
