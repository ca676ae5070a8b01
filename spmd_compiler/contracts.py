"""What a program may send and hold: contracts of a program, limits of a change."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .collectives import Collective
from .diff import Diff
from .placements import Mesh, SpmdError
from .text import COLLECTIVES, readable, size
from .words import shown


def checked(name: Any) -> str:
    """``name`` of collectives: ``"all_gather"``, ``"all_gather[tp]"``, ``"*[dp]"``.  Raises `SpmdError` for others."""
    match = re.fullmatch(r"(\*|\w+)(?:\[([\w/*]+)\])?", name) if isinstance(name, str) else None
    if match is None or (match[1] != "*" and match[1] not in COLLECTIVES):
        kinds = ", ".join(COLLECTIVES)
        raise SpmdError(f"{shown(name)} names no collective; write one of {kinds} or *, and perhaps [axis]")
    return name


def fits(name: str, kind: str, axis: str) -> bool:
    """Whether a collective is one of those that ``name`` names."""
    wanted, _, on = name.rstrip("]").partition("[")
    return wanted in ("*", kind) and (not on or fnmatch.fnmatchcase(axis, on) or on in axis.split("/"))


def _check_axes(names: Iterable[str], *meshes: Mesh) -> None:
    """Raise `SpmdError` for an axis that none of ``meshes`` has."""
    axes = list(dict.fromkeys(a for m in meshes for a in m.axes))
    for name in names:
        for axis in filter(None, name.rstrip("]").partition("[")[2].split("/")):
            if not fnmatch.filter(axes, axis):
                raise SpmdError(f"{name!r}: {meshes[-1]} has no axis {axis!r}; its axes are {', '.join(axes)}")


class ContractError(SpmdError):
    """A program sends or holds what its contract does not allow."""


@dataclass(frozen=True)
class Broken:
    """A term of a contract that is broken, in words, and the collectives that break it."""

    words: str
    blamed: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Contract:
    """What a program must keep: ``forbid`` names collectives that it must not have, ``expect`` how many it must have of
    those that a name names, ``wire_bytes`` and ``memory`` are the most that a device may send and hold."""

    forbid: tuple[str, ...] = ()
    expect: tuple[tuple[str, int], ...] = ()
    wire_bytes: float | None = None
    memory: float | None = None

    @staticmethod
    def of(forbid: Any = None, expect: Any = None, max_wire_bytes: Any = None, max_memory: Any = None) -> Contract:
        """A checked contract.  ``forbid`` is a name or several, ``expect`` maps names to counts, sizes are bytes or
        texts such as ``"60GiB"``.  Raises `SpmdError` for what is none of that."""
        if not isinstance(forbid, (str, Iterable, type(None))):
            raise SpmdError(f"forbid names collectives, {shown(forbid)} names none")
        names = [forbid] if isinstance(forbid, str) else list(() if forbid is None else forbid)
        expect = {} if expect is None else expect
        if not isinstance(expect, Mapping):
            raise SpmdError(f"expect maps names of collectives to how many there must be, not {shown(expect)}")
        for name, count in expect.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise SpmdError(f"expect[{shown(name)}] is how many there must be, not {shown(count)}")
        sizes = (None if given is None else size(given) for given in (max_wire_bytes, max_memory))
        return Contract(
            tuple(sorted(map(checked, names))), tuple((checked(k), n) for k, n in expect.items()), *sizes
        )

    def __bool__(self) -> bool:
        return self != Contract()

    def on(self, mesh: Mesh) -> Contract:
        """Itself.  Raises `SpmdError` for an axis that ``mesh`` lacks: a term of it would never break."""
        _check_axes((*self.forbid, *(n for n, _ in self.expect)), mesh)
        return self

    def broken(self, made: Sequence[Collective], memory: Mapping[str, int]) -> list[Broken]:
        """The terms that a program breaks, given its collectives and what a device holds."""
        found = []
        for name in self.forbid:
            those = tuple(c for c in made if fits(name, c.kind, c.axis))
            if those:
                found.append(Broken(f"{name} is forbidden, and there {_are(those)}", those))
        for name, count in self.expect:
            those = tuple(c for c in made if fits(name, c.kind, c.axis))
            if sum(max(1, c.times) for c in those) != count:
                found.append(Broken(f"{count} {name} are expected, and there {_are(those)}", those))
        sent, holds = sum(c.wire_bytes for c in made), sum(memory.values())
        if self.wire_bytes is not None and sent > self.wire_bytes:
            words = f"a device sends {readable(sent)}; {readable(self.wire_bytes)} are allowed"
            found.append(Broken(words, tuple(made)))
        if self.memory is not None and holds > self.memory:
            kinds = ", ".join(f"{k} {readable(v)}" for k, v in memory.items())
            words = f"a device holds {readable(holds)} ({kinds}); {readable(self.memory)} are allowed"
            found.append(Broken(f"{words}: memory_budget makes the solver keep within it"))
        return found


def _are(made: Sequence[Collective]) -> str:
    number = sum(max(1, c.times) for c in made)
    count = "is none" if not made else "is 1" if number == 1 else f"are {number}"
    return f"{count}{_places(c.source for c in made)}"


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
        share = re.fullmatch(r"(\d+\.?\d*|\.\d+) *%", increase.strip()) if increase is not None else None
        return Limits(
            float(share[1]) / 100 if share else None if increase is None else size(increase),
            share is None,
            None if memory is None else size(memory),
            tuple(map(checked, forbid)),
        )

    def exceeded(self, change: Diff) -> list[str]:
        """The limits that a change exceeds, in words."""
        found = []
        _check_axes(self.forbid, change.old.mesh, change.new.mesh)
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
