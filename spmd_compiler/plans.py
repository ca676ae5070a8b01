"""What is decided of a program: the plan that `passes.propagate` makes and `passes.partition` writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.distributed.tensor import Shard
from torch.fx import GraphModule, Node

from . import ops  # noqa: F401  (registers the rules)
from .bodies import Border, call_of
from .ir import Captured, open_dims, operands, results
from .placements import Mesh, Spec, SpmdError
from .problem import Solution
from .redistribute import Move
from .rules import Choice, Rule, Way, rule_of
from .symbolic import primes


@dataclass
class Plan:
    """What was decided: for each node its rule and choice, for each value and phase the moves of its copies.

    ``kept`` has the parameters of which the backward takes the forward's copy, with the spec of that; ``hidden`` the
    values whose collectives run beside computation, where the profile says that they do; ``bodies`` those of each call.
    """

    rules: dict[Node, Rule]
    choice: dict[Node, Choice]
    trees: dict[tuple[Node, int, str], dict[Spec, Move]]
    outputs: list[Spec | None]
    solution: Solution
    replicated_ops: tuple[str, ...]
    kept: dict[Node, Spec]
    hidden: frozenset[Node] = frozenset()
    bodies: dict[Node, Bodies] = field(default_factory=dict)


@dataclass
class Known:
    """What the graphs of a program share: rules, choices by mesh and uneven cuts, bodies planned under borders."""

    rules: dict[Node, Rule | None] = field(default_factory=dict)
    calls: dict[Any, Rule | None] = field(default_factory=dict)
    shared: dict[Any, dict[Any, Shared]] = field(default_factory=dict)
    inner: dict[tuple[GraphModule, Border], tuple[Captured, Plan] | SpmdError] = field(default_factory=dict)

    def rule(self, node: Node) -> Rule | None:
        if node not in self.rules:
            found = None if node.meta.get("makes") else self._found(node)
            self.rules[node] = found and closed(found, node)
        return self.rules[node]

    def _found(self, node: Node) -> Rule | None:
        """Calls of the same bodies have one rule: finding it takes what their bodies have of nodes."""
        call = call_of(node)
        if call is None:
            return rule_of(node)
        sides = [o.meta["val"] for o in operands(node)], results(node)
        shapes = [tuple(None if v is None else tuple(v.shape) for v in side) for side in sides]
        given = tuple(b.meta["val"] for b in call.bodies)
        key = (node.target, given, dataclasses.replace(call, bodies=()), *shapes)
        if key not in self.calls:
            self.calls[key] = rule_of(node)
        return self.calls[key]


Shared = tuple[tuple[Choice, ...], np.ndarray, "np.ndarray | None"]  # choices, seconds, what of them are collectives
Bodies = tuple[tuple[Captured, "Plan"], ...]  # those of a call, each with its border and the plan for it


# --- sizes that data decide: no dim of them is cut ----------------------------------------------------------------


def closed(rule: Rule, node: Node) -> Rule:
    """The rule of a node by which no dim is cut whose size data decide."""
    opened = [open_dims(o) for o in operands(node)] + [open_dims(node, r) for r in range(len(results(node)))]
    if not any(opened):
        return rule
    terms = [*rule.operands, *rule.results]
    whole = {f for dims, at in zip(terms, opened, strict=True) for d in at if d < len(dims) for f in dims[d]}

    def cuts(way: Way) -> bool:
        placed = (*way.operands, *way.results)
        return any(isinstance(p, Shard) and p.dim in at for p, at in zip(placed, opened, strict=True))

    ways = tuple(w for w in rule.ways if not cuts(w))
    return dataclasses.replace(rule, whole=rule.whole | whole, ways=ways)


def planned_sizes(node: Node, result: int, uneven: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """The global sizes of a result; a prime for one that data decide, which no number of pieces divides."""
    opened, static = open_dims(node, result), {n for n, _ in uneven}
    return tuple(primes([n], static)[0] if d in opened else int(n)
                 for d, n in enumerate(results(node)[result].shape))  # fmt: skip


def check_closed(node: Node, result: int, spec: Spec, mesh: Mesh, where: str) -> None:
    """Raise `SpmdError` where the user cuts a dim whose size data decide."""
    for d in sorted(open_dims(node, result)):
        if any(mesh[a] > 1 for a in spec.axes_of(d)):
            raise SpmdError(
                f"{where}: {spec} cuts dim {d}, whose size depends on data, so that nobody knows the pieces before the "
                "program runs; replicate it, or shard another dim"
            )
