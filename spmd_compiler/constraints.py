"""What a program's text says of the constraints in its middle, and how two texts are compared in that.

    constraint  {dp: S(0), tp: S(1)} of aten.mm  # net.py:7
    constraint  {dp: S(0), tp: R} of input "x"  x32  # net.py:9  backward

A constraint moves a value, if it must be moved at all, and computes nothing: the program shows its effects alone.  So
the header states it: what is asked on all axes of the mesh, of what, how often alike, and where.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .annotations import constrain_op
from .ir import Captured, nodes_within, producer, source_line
from .placements import Spec

_ROW = re.compile(
    r'constraint  (?P<spec>\{[^}]*\}) of (?P<value>[\w.:]+(?: "(?:[^"\\]|\\.)*")?)'
    r"(?:  x(?P<times>\d+))?(?:  # (?P<notes>.*))?"
)


@dataclass(frozen=True)
class Constraint:
    """``spec`` is asked ``times`` times in a line of the user's; ``value`` is an operator, or an input by its name."""

    value: str
    spec: Spec
    source: str = ""
    phase: str = "forward"
    times: int = 1

    def __str__(self) -> str:
        often = f"  x{self.times}" if self.times > 1 else ""
        note = "  ".join(filter(None, (self.source, "backward" if self.phase == "backward" else "")))
        return f"constraint  {self.spec} of {self.value}{often}{f'  # {note}' if note else ''}"

    @property
    def words(self) -> str:
        often = f"  (x{self.times})" if self.times > 1 else ""
        where = f" at {self.source}" if self.source else ""
        where += ", backward" if self.phase == "backward" else ""
        return f"constraint of {self.value}{where}: {self.spec}{often}"


def read(row: str) -> Constraint | None:
    """The constraint that prints as ``row``; None where none does.  Raises `SpmdError` for what is no spec."""
    match = _ROW.fullmatch(row)
    if match is None:
        return None
    notes = (match["notes"] or "").split("  ")
    phase = "backward" if notes[-1] == "backward" else "forward"
    source = "  ".join(notes[: len(notes) - (phase == "backward")])
    return Constraint(match["value"], Spec.parse(match["spec"]), source, phase, int(match["times"] or 1))


def constraints_of(captured: Captured) -> tuple[Constraint, ...]:
    """The constraints of a captured graph and its bodies, in program order; those alike once."""
    places = captured.graph.graph.find_nodes(op="placeholder")
    names = {n: f"{i.kind} {json.dumps(i.name)}" for n, i in zip(places, captured.inputs, strict=True)}

    def value(node: Node) -> str:
        while node.target is constrain_op:
            node = node.args[0]  # type: ignore[assignment]
        node, _ = producer(node)
        if node.op == "placeholder":
            return names.get(node, "argument")
        if node.op != "call_function":
            return "constant"
        if isinstance(node.target, torch._ops.OpOverload):
            return str(node.target).removesuffix(".default")
        return getattr(node.target, "__name__", str(node.target))

    found: collections.Counter[Constraint] = collections.Counter()
    for node in nodes_within(captured.graph.graph):
        if node.target is constrain_op:
            phase = "backward" if node.meta.get("phase") == "backward" else "forward"
            source = " ".join(source_line(node).split())
            found[Constraint(value(node.args[0]), Spec.parse(node.args[1]), source, phase)] += 1
    return tuple(dataclasses.replace(c, times=n) for c, n in found.items())


Pair = tuple[Constraint | None, Constraint | None]


def compared(old: Sequence[Constraint], new: Sequence[Constraint]) -> tuple[Pair, ...]:
    """What came, went, or asks for something else; where a constraint stands in the source does not count."""
    pairs: list[Pair] = []
    left, right = ([dataclasses.replace(c, times=1) for c in side for _ in range(c.times)] for side in (old, new))
    keys: tuple[Callable[[Constraint], Hashable], ...] = (
        lambda c: (c.value, c.spec, c.phase, c.source),
        lambda c: (c.value, c.spec, c.phase),
        lambda c: (c.value, c.phase, c.source),
        lambda c: (c.spec, c.phase, c.source),
    )
    for i, key in enumerate(keys):
        queues: dict[Hashable, collections.deque[Constraint]] = collections.defaultdict(collections.deque)
        for c in right:
            queues[key(c)].append(c)
        rest = []
        for c in left:
            queue = queues[key(c)]
            if not queue:
                rest.append(c)
            elif (other := queue.popleft()) and i > 1:
                pairs.append((c, other))
        left, right = rest, [c for queue in queues.values() for c in queue]
    pairs += [(c, None) for c in left] + [(None, c) for c in right]
    found: collections.Counter[Pair] = collections.Counter(pairs)
    return tuple(
        tuple(c and dataclasses.replace(c, times=n) for c in pair)  # type: ignore[misc]
        for pair, n in found.items()
    )


def change_words(pair: Pair) -> str:
    """A change in words, which begin with ``+``, ``-`` or ``~``."""
    old, new = pair
    if old is None or new is None:
        return f"- {old.words}" if old else f"+ {new.words}" if new else ""
    if old.value != new.value:
        return f"~ {old.words}, now of {new.value}"
    return f"~ {old.words} -> {new.spec}"


def as_json(pairs: Sequence[Pair]) -> list[Any]:
    return [{"old": old and str(old), "new": new and str(new)} for old, new in pairs]
