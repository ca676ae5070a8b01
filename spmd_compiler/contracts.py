"""What a program may send and hold: contracts of a program, limits of a change."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .diff import Diff
from .placements import SpmdError
from .text import COLLECTIVES, readable, size


def checked(name: Any) -> str:
    """``name`` of collectives: ``"all_gather"``, ``"all_gather[tp]"``, ``"*[dp]"``.  Raises `SpmdError` for others."""
    match = re.fullmatch(r"(\*|\w+)(?:\[([\w/*]+)\])?", name) if isinstance(name, str) else None
    if match is None or (match[1] != "*" and match[1] not in COLLECTIVES):
        raise SpmdError(f"{name!r} names no collective; write one of {', '.join(COLLECTIVES)} or *, and perhaps [axis]")
    return name


def fits(name: str, kind: str, axis: str) -> bool:
    """Whether a collective is one of those that ``name`` names."""
    wanted, _, on = name.rstrip("]").partition("[")
    return wanted in ("*", kind) and (not on or fnmatch.fnmatchcase(axis, on) or on in axis.split("/"))


@dataclass(frozen=True)
class Limits:
    """What a change must not exceed: ``increase`` is a share of the old wire bytes, or (``absolute``) bytes."""

    increase: float | None = None
    absolute: bool = False
    memory: float | None = None
    forbid: tuple[str, ...] = ()

    @staticmethod
    def of(increase: str | None, memory: str | None, forbid: Iterable[str]) -> Limits:
        """Limits as a command line gives them: ``"5%"`` or ``"10MiB"``, ``"60GiB"``, names of collectives."""
        share = re.fullmatch(r"([\d.]+) *%", increase.strip()) if increase is not None else None
        return Limits(
            float(share[1]) / 100 if share else None if increase is None else size(increase),
            share is None,
            None if memory is None else size(memory),
            tuple(map(checked, forbid)),
        )

    def exceeded(self, change: Diff) -> list[str]:
        """The limits that a change exceeds, in words."""
        found = []
        old, new = change.wire_bytes
        if self.increase is not None:
            allowed = self.increase if self.absolute else self.increase * old
            if new - old > allowed:
                found.append(f"a device sends {readable(new - old)} more; {readable(allowed)} are allowed")
        held = sum(v for _, v in change.new.memory)
        if self.memory is not None:
            if not change.new.memory:
                raise SpmdError("the new text does not say what a device holds; print it with program.text()")
            if held > self.memory:
                found.append(f"a device holds {readable(held)}; {readable(self.memory)} are allowed")
        for name in self.forbid:
            arrived = [k for k in change.added if fits(name, k.op, k.axis)]
            arrived += [b for a, b in change.moved
                        if fits(name, b.op, b.axis) and not fits(name, a.op, a.axis)]  # fmt: skip
            if arrived:
                found.append(f"{name} is forbidden, and {len(arrived)} came{_places(k.source for k in arrived)}")
        return found


def _places(sources: Iterable[str]) -> str:
    """The source lines, in order, each once."""
    found: Sequence[str] = list(dict.fromkeys(filter(None, sources)))
    return f" at {', '.join(found)}" if found else ""
