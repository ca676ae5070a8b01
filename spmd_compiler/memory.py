"""What a device holds in one step, and the search for the cheapest plan within a budget of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from .ir import Output, Partitioned, body_of, is_getitem, nbytes, producer, results
from .placements import SpmdError
from .text import readable, size
from .words import shown

T = TypeVar("T")
STEP = 4.0  # between rates of memory, until something fits
MOST = 1e5  # of these rates, against price and bytes of the cheapest plan
FLAT = 0.01  # of the bytes: what another rate of bytes of one kind must save
DEAR = 10.0  # times a plan of fewest bytes: a price above which no plan is looked for
SECANTS = 6


# --- what a program holds -------------------------------------------------------------------------------------


def held(local: Partitioned, states: float) -> dict[str, int]:
    """Bytes a device holds: ``parameters`` (and buffers), ``gradients``, ``optimizer`` states (``states`` times the
    bytes of what trains), and ``activations``: inputs and the values between, at their peak along the schedule."""
    return peak(local, states)[0]


def peak(local: Partitioned, states: float) -> tuple[dict[str, int], int]:
    """What `held` gives, and the number of the node of the joint graph at which activations reach their peak."""
    found = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    nodes = list(local.graph.graph.nodes)
    for node, i in zip((n for n in nodes if n.op == "placeholder"), local.inputs, strict=True):
        if i.kind in ("param", "buffer"):
            found["parameters"] += sum(map(nbytes, results(node)))
    for value, o in zip(nodes[-1].args[0], local.outputs, strict=True):
        if o.kind == "grad" and value is not None:
            found["gradients"] += nbytes(value.meta["val"])
            if o.of is not None and local.inputs[o.of].kind == "param":
                found["optimizer"] += round(states * nbytes(value.meta["val"]))
    order = {n.name: i for i, n in enumerate(local.captured.graph.graph.nodes)}
    now = top = 0
    for node, live in zip(nodes, curve(local), strict=True):
        now = max(now, order.get(node.meta.get("origin", ""), 0))
        if live > found["activations"]:
            found["activations"], top = live, now
    return found, top


def curve(local: Partitioned) -> list[int]:
    """Bytes of live inputs and values at each node of the schedule."""
    graph = local.graph.graph
    given = zip(graph.find_nodes(op="placeholder"), local.inputs, strict=True)
    inputs = sum(sum(map(nbytes, results(n))) for n, i in given if i.kind not in ("param", "buffer"))
    return [inputs + n for n in _levels(graph, lifetimes(graph, local.outputs))]


def _levels(graph: Graph, spans: Mapping[tuple[Node, int], Sequence[tuple[int, int]]]) -> list[int]:
    """Bytes that live at each node, bodies of calls included, of values that live in ``spans`` of node numbers."""
    nodes = list(graph.nodes)
    change = [0] * (len(nodes) + 1)
    for (node, r), lives in spans.items():
        for first, last in lives:
            change[first] += nbytes(results(node)[r])
            change[last + 1] -= nbytes(results(node)[r])
    return [n + _inside(node) for n, node in zip(itertools.accumulate(change[:-1]), nodes, strict=True)]


def _inside(node: Node) -> int:
    """The most bytes of live values that the bodies of a call make, apart from those they return."""
    most = 0
    for body in filter(None, map(body_of, node.all_input_nodes)):
        end = len(body.graph.nodes) - 1
        spans = {key: lives for key, lives in lifetimes(body.graph, ()).items() if lives[-1][1] < end}
        most = max(most, *_levels(body.graph, spans))
    return most


def lifetimes(graph: Graph, outputs: Sequence[Output]) -> dict[tuple[Node, int], tuple[tuple[int, int], ...]]:
    """For every value that has memory of its own, (node, result), when it lives: the numbers of the node that makes it
    and of the last that reads it or a view of it.  Gradients are left out: they live on.

    What activation checkpointing makes again lives twice: to its last reader of the forward, and from the first reader
    of the backward on, or the first node made again that reads it.
    """
    nodes = list(graph.nodes)
    order = {n: i for i, n in enumerate(nodes)}
    again: dict[Node, int] = {}  # before which node of the backward a node of the forward is made again

    def late(node: Node) -> list[int]:
        """The readers in the backward."""
        return [order[u] if _in_backward(u) else again[u] for u in node.users if _in_backward(u) or u in again]

    for node in reversed(nodes):
        if _made_again(node) and (readers := late(node)):
            again[node] = min(readers)
    early: dict[tuple[Node, int], list[int]] = {}
    after: dict[tuple[Node, int], list[int]] = {}
    for node in nodes:
        if node.op == "call_function" and not is_getitem(node) and storage(node) == (node, 0):
            early |= {(node, r): [order[node]] for r, v in enumerate(results(node)) if v is not None}
        if (key := storage(node)) in early:
            early[key] += [order[u] for u in node.users if not _in_backward(u)]
            after.setdefault(key, []).extend(late(node))
    for value, o in zip(nodes[-1].args[0] if outputs else (), outputs, strict=True):
        if o.kind == "grad" and isinstance(value, Node):
            early.pop(storage(value), None)
    return {key: _spans(made, after.get(key, []), key[0] in again) for key, made in early.items()}


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _made_again(node: Node) -> bool:
    """Whether the split makes it again: what one checkpointed region hands to the next is saved."""
    if node.meta.get("recompute") not in _AGAIN or _in_backward(node):
        return False
    regions = [u.meta.get("ac_graph_id", 0) for u in node.users if u.meta.get("recompute") in _AGAIN]
    return max(regions, default=0) <= node.meta.get("ac_graph_id", 0)


def _in_backward(node: Node) -> bool:
    return node.meta.get("phase") == "backward"


def _spans(early: list[int], late: list[int], again: bool) -> tuple[tuple[int, int], ...]:
    if again and late and max(early) < min(late):
        return (min(early), max(early)), (min(late), max(late))
    return ((min(early), max(early + late)),)


def storage(node: Node) -> tuple[Node, int]:
    """The node, and which of its results, whose memory a value lies in: views have none of their own."""
    while True:
        if is_getitem(node):
            return producer(node)
        view = getattr(node.target, "is_view", False) or node.target is torch.ops.aten._unsafe_view.default
        if node.op != "call_function" or not view:
            return node, 0
        node = node.all_input_nodes[0]


# --- the cheapest within a budget -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What a device may hold: ``budget`` bytes of parameters, gradients, optimizer states and live activations.

    A parameter that trains brings its gradient, and ``states`` times its own bytes of optimizer states (AdamW: 2).
    """

    budget: float
    states: float = 2.0

    @staticmethod
    def of(budget: Any, states: Any = 2.0) -> Memory | None:
        """Of bytes, or a text such as ``"60GiB"``; None for None.  Raises `SpmdError` for what is neither."""
        if not isinstance(states, (int, float)) or isinstance(states, bool) or not 0 <= states < math.inf:
            raise SpmdError(f"optimizer_states={shown(states)}: how often what trains is held, such as 2 (AdamW)")
        return None if budget is None else Memory(size(budget), states)


@dataclass(frozen=True)
class Found(Generic[T]):
    """A plan that is cheapest when a byte has a price: what it holds by kind, its ``counted`` bytes, those that the
    rate prices (no more than it holds), its own ``price``, and a ``bound`` of price and priced memory of every plan."""

    plan: T
    holds: Mapping[str, float]
    counted: float
    price: float
    bound: float

    @property
    def held(self) -> float:
        return sum(self.holds.values())


class OverBudget(SpmdError):
    """Nothing was found within a budget; ``held`` are the bytes of the smallest plan that was looked at, ``least`` what
    every plan holds (at a price to speak of); ``more`` are lines of what would help."""

    def __init__(self, budget: float, holds: Mapping[str, float], least: float = 0.0, more: str = "") -> None:
        self.budget, self.held, self.least = budget, sum(holds.values()), least
        kinds = ", ".join(f"{readable(n)} of {kind}" for kind, n in holds.items())
        none = f", and every plan holds {readable(least)} or more" if least > budget else ""
        super().__init__(
            f"no plan was found within the memory budget of {readable(budget)} a device{none}; the smallest found "
            f"holds {readable(self.held)} ({self.held:.0f} B): {kinds}{more}"
        )

    @staticmethod
    def of(failures: Sequence[OverBudget]) -> OverBudget:
        """That of the smallest plan of several searches; every plan holds what the least of them says."""
        smallest = min(failures, key=lambda e: e.held)
        smallest.least = min(e.least for e in failures)
        return smallest


def cheapest_within(
    at: Callable[[float], Found[T]],
    between: Callable[[T, T, float], Sequence[Callable[[], Found[T]]]],
    budget: float,
    start: float | None = None,
    limit: float = math.inf,
    every: bool = True,
    worth: float = 0.0,
) -> tuple[Found[T], float, float]:
    """The cheapest plan found within the budget, a bound of all that fit, and the rate at which something did.

    For a rate ``r`` of memory the cheapest of ``price + r counted``, ``at(r)``, lies on a lower hull, and ``its value -
    r budget`` is at most the price of every plan within the budget (Lagrange).  Rates from ``start`` on that grow by
    `STEP` find where plans begin to fit; the edge of the hull that crosses the budget is found by secants, between the
    last plan within and the last without.  ``between(small, cheap, room)`` gives plans along that edge, ever larger and
    cheaper, up to what ``room`` bytes more than the small one's seem to allow: the last of them that fits is taken.
    What costs ``limit`` or more is of no use.  Unless ``every`` rate is tried, they end where no bytes are saved.
    ``worth`` is a price to speak of, in seconds, where the cheapest plan costs next to nothing.

    Raises `OverBudget` where nothing fits.
    """
    smallest = outside = at(0.0)
    bound = outside.bound

    def tried(rate: float) -> Found[T]:
        nonlocal bound, smallest
        found = at(rate)
        bound = max(bound, found.bound - rate * budget)
        smallest = min(smallest, found, key=lambda f: f.held)
        return found

    def enough(found: Found[T]) -> bool:
        return found.held <= budget or found.price >= limit

    if outside.held <= budget:
        return outside, bound, 0.0
    free = outside
    rates = _rates(free, worth)
    for rate in rates if start is None else [start, *(r for r in rates if r > STEP * start)]:
        within = tried(rate)
        if enough(within):
            break
        flat = within.counted > (1 - FLAT) * outside.counted
        if flat and not every and outside.counted < free.counted:
            break
        outside = within
    for _ in range(SECANTS if enough(within) else 0):
        if outside.counted <= within.counted or within.price <= outside.price:
            break
        found = tried(slope := (within.price - outside.price) / (outside.counted - within.counted))
        if found.counted in (outside.counted, within.counted):
            break
        if enough(found):
            within, rate = found, slope
        else:
            outside = found
    if within.held > budget:
        raise OverBudget(budget, smallest.holds, (within.bound - DEAR * max(within.price, worth)) / rate)
    steps = between(within.plan, outside.plan, budget - within.held)
    low, high = 0, len(steps)
    while low < high:  # the first `low` fit
        middle = (low + high + 1) // 2
        found = steps[middle - 1]()
        if found.held <= budget:
            low = middle
            within = min(within, found, key=lambda f: f.price)
        else:
            high = middle - 1
    return within, min(bound, within.price), rate


def _rates(free: Found[Any], worth: float) -> list[float]:
    """Seconds a byte: from the price of the cheapest plan on, and past what is worth to speak of."""
    last = max(free.price, worth) or 1.0
    first = max(free.price, last / STEP**5)
    count = 6 + math.ceil(math.log(last / first, STEP))
    return [r / max(free.counted, 1.0) for r in (*(first * STEP**n for n in range(count)), MOST * last)]
