"""Equal parts of a problem, found by colour refinement and decided together.

Variables and hubs are coloured by what they are, then again and again by the colours around them; after ``k`` rounds
equal colours mean equal surroundings up to distance ``k``, so that the layers of a deep model share their colours.
From the colours come two problems of the size of a few layers, whatever the depth:

* `tied`: variables of one colour make the same choice.  Its optimum is a plan of the whole problem.
* `summed`: of each colour of hubs only the sum of its conservation rows is kept, and the variables that stand alike in
  those rows become their sum.  The sums of any plan satisfy it at the plan's own cost, so its optimum is a lower bound
  of every plan.

Where colours are stable under refinement the two are one problem, and its optimum is exact; on other graphs the two
optima bracket it.  (Linear programs reduced by colour refinement: Grohe, Kersting, Mladenov, Selman, "Dimension
Reduction via Colour Refinement", 2014; truncated rounds are ours.)
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .problem import Problem, Tables


@dataclass(frozen=True)
class End:
    """A class of variables at a group of hubs, by one of its results or operands.

    ``weight`` is what each variable of the class brings to the sum of the hubs' rows.
    """

    variable: int
    place: int
    weight: float


@dataclass(frozen=True)
class Group:
    """``count`` equal hubs, one of them ``hub``: who makes the value, and one slot for each kind of consumer."""

    hub: int
    count: int
    source: tuple[End, ...]
    slots: tuple[tuple[End, ...], ...]


@dataclass(frozen=True)
class Quotient:
    """Classes of variables (``classes[v]``, and of each class a first member and its size), and groups of hubs."""

    classes: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    groups: tuple[Group, ...]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Equal numbers for equal keys, in the order in which they come."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(k, len(seen)) for k in keys]


class Colours:
    """The colours of a problem's variables, refined round by round."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem, self.tables = problem, tables
        self.kinds = _numbered(
            (id(tables.of(h)), math.prod(h.shape) * h.element, h.tied, len(h.consumers) == 1) for h in problem.hubs
        )
        self.reads: list[list[tuple[int, int]]] = [[] for _ in problem.variables]
        self.makes: list[list[tuple[int, int]]] = [[] for _ in problem.variables]
        for j, hub in enumerate(problem.hubs):
            self.makes[hub.source[0]].append((hub.source[1], j))
            for k, i in hub.consumers:
                self.reads[k].append((i, j))
        self.colours = _numbered(
            (id(v.choices), v.compute.tobytes(), b"" if v.memory is None else v.memory.tobytes(), v.transparent)
            for v in problem.variables
        )

    def _hubs(self) -> list[int]:
        """Colours of hubs.  How many consumers of one colour share a value says nothing: they share its copies."""
        c = self.colours
        return _numbered(
            (kind, c[h.source[0]], h.source[1], tuple(sorted({(c[k], i) for k, i in h.consumers})))
            for kind, h in zip(self.kinds, self.problem.hubs, strict=True)
        )

    def refine(self, rounds: int) -> None:
        for _ in range(rounds):
            hubs = self._hubs()
            self.colours = _numbered(
                (c, tuple(sorted((i, hubs[j]) for i, j in reads)), tuple(sorted({(r, hubs[j]) for r, j in makes})))
                for c, reads, makes in zip(self.colours, self.reads, self.makes, strict=True)
            )

    def separate(self) -> None:
        """Give every variable a colour of its own."""
        self.colours = list(range(len(self.problem.variables)))

    def tied(self) -> Quotient:
        """Variables of one colour make one choice."""
        c, hubs = self.colours, self._hubs()
        sizes = collections.Counter(c)
        groups = []
        for members in _members(hubs):
            hub = self.problem.hubs[members[0]]
            slots = dict.fromkeys((c[k], i) for k, i in hub.consumers)
            ends = ((c[hub.source[0]], hub.source[1]), *slots)
            made, *wants = ((End(k, i, len(members) / sizes[k]),) for k, i in ends)
            groups.append(Group(members[0], len(members), made, tuple(wants)))
        return _quotient(c, groups)

    def summed(self) -> Quotient:
        """The rows of equal hubs summed, and with them the variables that stand alike in them."""
        c, hubs = self.colours, self._hubs()
        alike = [collections.Counter((c[k], i) for k, i in h.consumers) for h in self.problem.hubs]
        fine = _numbered(
            (c[v], tuple(sorted((i, hubs[j], alike[j][c[v], i]) for i, j in self.reads[v])),
             tuple(sorted((r, hubs[j]) for r, j in self.makes[v])))
            for v in range(len(c))
        )  # fmt: skip
        sizes = collections.Counter(fine)
        groups = []
        for members in _members(hubs):
            source: dict[tuple[int, int], float] = collections.defaultdict(float)
            slots: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
            for j in members:
                hub = self.problem.hubs[j]
                source[fine[hub.source[0]], hub.source[1]] += 1.0
                for k, i in hub.consumers:  # those that share a slot share its weight
                    slot = slots.setdefault((c[k], i), collections.defaultdict(float))
                    slot[fine[k], i] += 1.0 / alike[j][c[k], i]
            made, *wants = (tuple(End(v, p, w / sizes[v]) for (v, p), w in found.items())
                            for found in (source, *slots.values()))  # fmt: skip
            groups.append(Group(members[0], len(members), made, tuple(wants)))
        return _quotient(fine, groups)


def _members(numbers: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for i, n in enumerate(numbers):
        found[n].append(i)
    return found


def _quotient(classes: list[int], groups: list[Group]) -> Quotient:
    members = _members(classes)
    return Quotient(tuple(classes), tuple(m[0] for m in members), tuple(len(m) for m in members), tuple(groups))
