"""The solver's problem as data: variables with their choices, hubs with the specs a value may be held in.

A *hub* is a value in one phase; its *states* are specs, its *arcs* one-axis moves between them.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.tensor import Replicate

from .cost import Profile
from .placements import Mesh, Spec
from .redistribute import LOCAL, Move, move_price, moves
from .rules import Choice

# what counts among plans of one price (`preference`)
HELD, FORWARD, PARTIAL, MOVED, DIM, DRAWN, PLACE = 1024.0, 1.25, 16.0, 16.0, 1.0, 2.0**-4, 2.0**-10


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
    memory: np.ndarray | None = None  # bytes that each choice holds from the forward to the backward, or for good
    late: bool = False  # of the backward
    lasting: bool = False  # an input, held as long as the step
    sends: np.ndarray | None = None  # what of ``compute`` are collectives of the node's own form, under which none hide


@dataclass
class Hub:
    """A value in one phase: who makes it (variable, result) and who wants it (variable, operand).

    A ``tied`` hub allows no move: its ends have one spec.
    """

    source: tuple[int, int]
    consumers: list[tuple[int, int]]
    shape: tuple[int, ...]
    element: float  # bytes, or what part of them is priced (`hidden`)
    tied: bool = False


@dataclass
class Problem:
    mesh: Mesh
    profile: Profile
    variables: list[Variable] = field(default_factory=list)
    hubs: list[Hub] = field(default_factory=list)
    uneven: frozenset[tuple[int, int]] = frozenset()
    tables: dict[object, Table] = field(default_factory=dict, repr=False)  # shared by problems of other weights


@dataclass
class Solution:
    """The choice of each variable, and for each hub the moves that make its copies (target spec -> move)."""

    choices: list[int]
    trees: list[dict[Spec, Move]]
    compute: float
    price: float
    bound: float
    columns: int
    sends: float = 0.0  # what of ``compute`` are collectives


# --- states and arcs of a hub ---------------------------------------------------------------------------------


@dataclass(eq=False)
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
    """Builds tables once for all hubs with the same choices around them and the same divisibility, of a problem and of
    those that weigh its computation and its bytes otherwise."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kept: dict[object, np.ndarray] = {}
        self.by_choices: dict[object, Table] = {}

    def of(self, hub: Hub) -> Table:
        p = self.problem
        producer, result = hub.source
        around = (id(p.variables[producer].choices), result)
        users = tuple(sorted({(id(p.variables[k].choices), i) for k, i in hub.consumers}))
        key = (around, users, hub.shape, hub.element)
        if key not in self.by_choices:
            self.by_choices[key] = self._find(hub)
        return self.by_choices[key]

    def _find(self, hub: Hub) -> Table:
        p = self.problem
        producer, result = hub.source
        made = {s for c in p.variables[producer].choices if (s := c.results[result]) is not None}
        seen = made | {c.operands[i] for k, i in hub.consumers for c in p.variables[k].choices}
        # replicated is always a way station: a dim's outer axis moves only when the inner ones are out of the way
        options = tuple(
            tuple(sorted({s.placements[i] for s in seen} | {Replicate()}, key=str)) for i in range(len(p.mesh.axes))
        )
        even = tuple(
            tuple(n % math.prod(c) == 0 for k in range(1, len(p.mesh.axes) + 1)
                  for c in itertools.combinations(p.mesh.shape, k)) for n in hub.shape
        )  # fmt: skip
        regular = all(s.is_even(hub.shape, p.mesh) for s in seen)
        sent = bool(math.prod(hub.shape) * hub.element)  # what is empty, or of no weight, has other prices
        key = (options, even, sent, frozenset(seen)) if regular else (hub.shape, hub.element, frozenset(seen))
        if key not in p.tables:
            p.tables[key] = self._build(hub, seen, options, regular)
        return p.tables[key]

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

    def price(self, hub: Hub, table: Table) -> np.ndarray:
        """Seconds of every arc of a hub."""
        return table.fixed + table.rate * (math.prod(hub.shape) * hub.element)

    def arcs_kept(self, hub: Hub, table: Table) -> np.ndarray:
        """The arcs that some cheapest plan may need.

        Gathers and exchanges before a `transparent` consumer that is the only one are put off until after it (slices
        are not: they go as early as they can).
        """
        keep = np.full(len(table.moves), not hub.tied)
        if hub.tied or len(hub.consumers) != 1:
            return keep
        producer, consumer = self.problem.variables[hub.source[0]], self.problem.variables[hub.consumers[0][0]]
        key = (id(producer.choices), id(consumer.choices), consumer.transparent, id(table))
        if key not in self.kept:
            wanted = {c.operands[0] for c in consumer.choices} if consumer.transparent else set()
            free = consumer.transparent and not consumer.compute.any()
            for i, move in enumerate(table.moves):
                late = move.kind in ("all_gather", "all_to_all", "permute") or (free and move.kind not in LOCAL)
                if late:
                    keep[i] = move.source not in wanted or (free and move.target not in wanted)
            self.kept[key] = keep
        return self.kept[key]


@functools.lru_cache(maxsize=4096)
def _affine(profile: Profile, mesh: Mesh, kind: str, axes: tuple[str, ...], shards: int) -> tuple[float, float]:
    """A move's price as ``fixed + rate * global bytes``, its result being cut into ``shards``."""
    if kind in LOCAL:
        return 0.0, 0.0
    fixed = profile.collective(mesh, kind, axes, 0.0)
    return fixed, profile.collective(mesh, kind, axes, 1.0 / shards) - fixed


def preference(problem: Problem, index: int, pick: int) -> float:
    """What a choice of variable ``index`` counts where plans cost the same.

    It is the part of new values that a device holds, more in the forward, whose values wait for the backward, and of a
    sum not yet reduced than of its reduction.  Far below lie the dims that are cut (of outer ones pieces are in one
    piece of memory) and axes that cut one in another order than the mesh's, below these a number drawn from the
    choice's text, so that equal parts of different programs are decided alike, and below that the place in the program,
    for parts that are symmetric.
    """
    variable, mesh = problem.variables[index], problem.mesh
    choice = variable.choices[pick]
    made = [s for s in choice.results if s is not None]
    cuts = [cut for s in (*choice.operands, *made) for cut in s.sharding.items()]
    found = DIM * sum(dim * len(axes) + _turned(axes, mesh) for dim, axes in cuts)
    found += DRAWN * _drawn(choice) * (1.0 + PLACE * index)
    if choice.operands and not variable.compute.any():
        return found  # a view
    held = sum(HELD / s.shards(mesh) + PARTIAL * len(s.partial_axes()) for s in made)
    return (1.0 if variable.late else FORWARD) * held + found


@functools.lru_cache(maxsize=1 << 16)
def _drawn(choice: Choice) -> float:
    return zlib.crc32(str(choice).encode()) / 2**32


def _turned(axes: Sequence[str], mesh: Mesh) -> int:
    """How many pairs of axes come in another order than the mesh's."""
    order = [mesh.axes.index(a) for a in axes]
    return sum(a > b for a, b in itertools.combinations(order, 2))


def move_preference(problem: Problem, move: Move) -> float:
    """What a move counts where plans cost the same: itself, and the copy that it makes."""
    return MOVED + HELD / move.target.shards(problem.mesh)


def is_partial(spec: Spec) -> bool:
    return bool(spec.partial_axes())
