"""What holds the bytes of a plan that a memory budget does not allow, and which changes of the program would help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .ir import Partitioned, nbytes, results
from .placements import Mesh, Spec
from .text import readable

SHARE = 0.1  # of what is held: what holds less is no remedy
SHOWN = 3  # inputs


@dataclass(frozen=True)
class Held:
    """Inputs whose names differ in numbers alone, placed alike: ``layers.*.weight``.  ``bytes`` a device are those of
    the inputs, their gradients and optimizer states; ``given`` is what the user says of them, None: the solver's."""

    name: str
    kind: str
    spec: Spec
    given: Spec | None
    count: int
    bytes: int
    besides: str  # what else than themselves is in ``bytes``

    def replicated(self, mesh: Mesh) -> list[str]:
        """The axes on which the user has it whole."""
        given = self.given
        cut = {a for axes in given.sharding.values() for a in axes} if given is not None else set(mesh.axes)
        return [a for a in mesh.axes if mesh[a] > 1 and a not in cut]

    def __str__(self) -> str:
        count = f"{self.count} " if self.count > 1 else ""
        return f"{count}{self.name} {self.spec} {readable(self.bytes)}{self.besides}"


def inputs_held(local: Partitioned, states: float) -> list[Held]:
    """What a device holds of the inputs of a program, largest first (``states`` as in `memory.Memory`)."""
    places = local.graph.graph.find_nodes(op="placeholder")
    trains = {o.of: nbytes(value.meta["val"])
              for value, o in zip(local.graph.graph.output_node().args[0], local.outputs, strict=True)
              if o.kind == "grad" and value is not None}  # fmt: skip
    groups: dict[tuple[str, str, Spec, Spec | None, str], list[tuple[str, int]]] = {}
    for i, (node, chosen, given) in enumerate(zip(places, local.inputs, local.captured.inputs, strict=True)):
        if chosen.spec is None or chosen.kind not in ("param", "buffer", "input"):
            continue
        own, grad = sum(map(nbytes, results(node))), trains.get(i, 0)
        more = round(states * grad) if chosen.kind == "param" else 0
        besides = " with gradients and optimizer states" if more else " with gradients" if grad else ""
        key = (re.sub(r"\b\d+\b", "*", chosen.name), chosen.kind, chosen.spec, given.spec, besides)
        groups.setdefault(key, []).append((chosen.name, own + grad + more))
    found = [
        Held(pattern if len(each) > 1 else each[0][0], kind, spec, given, len(each), sum(n for _, n in each), besides)
        for (pattern, kind, spec, given, besides), each in groups.items()
    ]
    return sorted(found, key=lambda h: (-h.bytes, h.name))


def remedies(local: Partitioned, holds: Mapping[str, float], states: float) -> str:
    """Two lines: the largest inputs of a plan that holds ``holds`` bytes by kind, and what would make it hold less.

    Named are those changes alone that have something to act on: inputs that are replicated where the solver may not
    cut them, an axis that cuts what is held already, optimizer states, a batch.  Activation checkpointing is not among
    them: `export` takes a function as if it were not there.
    """
    mesh, every, least = local.mesh, inputs_held(local, states), SHARE * sum(holds.values())
    large = [h for h in every if h.bytes >= least] or every[:1]
    live = holds["activations"] >= least  # inputs cut what is made of them, too
    whole = [h for h in every if (h in large or (live and h.kind == "input")) and h.replicated(mesh)][:SHOWN]
    cut = {a: sum(h.bytes for h in every if any(a in axes for axes in h.spec.sharding.values())) for a in mesh.axes}
    axis = max(cut, key=lambda a: cut[a])
    tried = []
    if whole:
        names, axes = ", ".join(h.name for h in whole), dict.fromkeys(a for h in whole for a in h.replicated(mesh))
        tried.append(f'to shard {names} (replicated on {", ".join(axes)}) or, in export, to leave it to "auto"')
    if cut[axis] >= least or mesh.size == 1:
        tried.append(f"more devices on axis {axis!r}" + (f", which cuts {readable(cut[axis])}" if cut[axis] else ""))
    if holds["optimizer"] >= least:
        tried.append(f"an optimizer of fewer states than optimizer_states={states:g}")
    if live and any(h.kind == "input" for h in every):
        tried.append("a smaller batch")
    lines = [f"largest: {'; '.join(map(str, large[:SHOWN]))}"] if every else []
    return "".join(f"\n  {line}" for line in [*lines, f"what helps: {'; '.join(tried) or 'a larger budget'}"])
