"""What is decided of a program: the plan that `passes.propagate` makes and `passes.partition` writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.fx import GraphModule, Node

from . import ops  # noqa: F401  (registers the rules)
from .bodies import Border
from .ir import Captured
from .placements import Spec, SpmdError
from .problem import Solution
from .redistribute import Move
from .rules import Choice, Rule, rule_of


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
    shared: dict[Any, dict[Any, tuple[tuple[Choice, ...], np.ndarray]]] = field(default_factory=dict)
    inner: dict[tuple[GraphModule, Border], tuple[Captured, Plan] | SpmdError] = field(default_factory=dict)

    def rule(self, node: Node) -> Rule | None:
        if node not in self.rules:
            self.rules[node] = rule_of(node)
        return self.rules[node]


Bodies = tuple[tuple[Captured, "Plan"], ...]  # those of a call, each with its border and the plan for it
