"""What a device holds in one step, and the search for the cheapest plan within a budget of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.fx import Node

from .ir import Partitioned, is_getitem, nbytes, producer, results
from .placements import SpmdError
from .text import readable

T = TypeVar("T")
RATES = (1.0, 10.0, 100.0, 1e3)  # of memory against all else, until it fits
SECANTS = 6


# --- what a program holds -------------------------------------------------------------------------------------


def held(local: Partitioned, states: float) -> dict[str, int]:
    """Bytes a device holds: ``parameters`` (and buffers), ``gradients``, ``optimizer`` states (``states`` times the
    bytes of what trains), and ``activations``: inputs and the values between, at their peak along the schedule."""
    found = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    nodes = list(local.graph.graph.nodes)
    live = 0
    for node, i in zip((n for n in nodes if n.op == "placeholder"), local.inputs, strict=True):
        if i.kind in ("param", "buffer"):
            found["parameters"] += sum(map(nbytes, results(node)))
        else:
            live += sum(map(nbytes, results(node)))
    kept = set()  # gradients, which are counted apart
    for value, o in zip(nodes[-1].args[0], local.outputs, strict=True):
        if o.kind == "grad" and value is not None:
            kept.add(_storage(value))
            found["gradients"] += nbytes(value.meta["val"])
            if o.of is not None and local.inputs[o.of].kind == "param":
                found["optimizer"] += round(states * nbytes(value.meta["val"]))
    last: dict[tuple[Node, int], int] = {}  # where each value is used last, itself or as a view
    for at, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[_storage(used)] = at
    frees: dict[int, int] = {}
    for at, node in enumerate(nodes):
        own = node.op == "call_function" and _storage(node) == (node, 0) and not is_getitem(node)
        for r, value in enumerate(results(node) if own else ()):
            if (node, r) not in kept:
                live += nbytes(value)
                end = last.get((node, r), at)
                frees[end] = frees.get(end, 0) + nbytes(value)
        found["activations"] = max(found["activations"], live)
        live -= frees.get(at, 0)
    return found


def _storage(node: Node) -> tuple[Node, int]:
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


def cheapest_within(
    at: Callable[[float], Found[T]], between: Callable[[T, T], Sequence[Callable[[], Found[T]]]], budget: float
) -> tuple[T, float]:
    """The cheapest plan found within the budget, and a bound of all that fit.

    For a rate ``r`` of memory the cheapest of ``price + r counted``, ``at(r)``, lies on a lower hull, and ``its value -
    r budget`` is at most the price of every plan within the budget (Lagrange).  The edge of the hull that crosses the
    budget is found by secants, between the last plan within and the last without.  ``between(small, cheap)`` gives the
    plans along that edge, ever larger and cheaper: the last of them that fits is taken.

    Raises `SpmdError` where nothing fits.
    """
    bound = 0.0

    def tried(rate: float) -> Found[T]:
        nonlocal bound
        found = at(rate)
        bound = max(bound, found.bound - rate * budget)
        return found

    outside = tried(0.0)
    if outside.held <= budget:
        return outside.plan, bound
    for rate in RATES:
        within = tried(rate * outside.price / max(outside.counted, 1.0))
        if within.held <= budget:
            break
        outside = within
    else:
        raise SpmdError(
            f"no plan was found within the memory budget of {readable(budget)} a device; the smallest holds "
            + ", ".join(f"{readable(n)} of {kind}" for kind, n in within.holds.items())
        )
    for _ in range(SECANTS):
        if outside.counted <= within.counted or within.price <= outside.price:
            break
        found = tried((within.price - outside.price) / (outside.counted - within.counted))
        if found.counted in (outside.counted, within.counted):
            break
        outside, within = (outside, found) if found.held <= budget else (found, within)
    steps = between(within.plan, outside.plan)
    low, high = 0, len(steps)
    while low < high:  # the first `low` fit
        middle = (low + high + 1) // 2
        found = steps[middle - 1]()
        if found.held <= budget:
            low = middle
            within = min(within, found, key=lambda f: f.price)
        else:
            high = middle - 1
    return within.plan, min(bound, within.price)
