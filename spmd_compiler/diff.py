"""What changed between two programs, in words: matched by structure, whatever values and lines are called.

Lines of both texts are aligned: inputs by the user's names, computed values by operator, operands and global type in
program order, so that an inserted operator is one change.  Redistributions are looked through: a collective is known by
the value it moves.  At level ``collectives``, where computed values are left out, by the type it moves.
"""

from __future__ import annotations

import bisect
import collections
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .constraints import Pair, as_json, change_words, compared
from .placements import Mesh, Spec, SpmdError
from .reader import parse
from .text import INPUTS, OUTPUTS, Line, Ref, Text, Type, readable, refs, type_text

MOVES = ("aten.slice.Tensor", "aten.alias")  # what a redistribution without communication is written as
SHOWN = 3  # names and source lines that the words give of many
ROOM = 9  # lines in which a change is told, where its causes leave as many


@dataclass(frozen=True)
class Change:
    """An input, output or value whose placement, type or arguments changed; None: it is not there."""

    name: str
    kind: str
    old: Line | None
    new: Line | None

    @property
    def line(self) -> Line:
        """The new line, or the old one where it went."""
        return self.new or self.old  # type: ignore[return-value]

    @property
    def specs(self) -> tuple[str, str]:
        return tuple(str(k.spec) if k else "none" for k in (self.old, self.new))  # type: ignore[return-value]


@dataclass(frozen=True)
class Diff:
    """``placements`` are of inputs and outputs, ``values`` of what is computed, ``ops`` came or went.

    ``added`` and ``removed`` are collectives, ``moved`` and ``resized`` pairs of them.
    """

    old: Text
    new: Text
    placements: tuple[Change, ...]
    values: tuple[Change, ...]
    ops: tuple[Change, ...]
    added: tuple[Line, ...]
    removed: tuple[Line, ...]
    moved: tuple[tuple[Line, Line], ...]
    resized: tuple[tuple[Line, Line], ...]
    constraints: tuple[Pair, ...] = ()

    @property
    def wire(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Wire bytes by axis and phase, before and after."""
        return _pairs(self.old.wire(), self.new.wire(), 0.0)

    @property
    def memory(self) -> dict[str, tuple[int, int]]:
        """Bytes a device by kind, before and after."""
        return _pairs(dict(self.old.memory), dict(self.new.memory), 0)

    @property
    def wire_bytes(self) -> tuple[float, float]:
        return sum(self.old.wire().values()), sum(self.new.wire().values())

    @property
    def header(self) -> dict[str, tuple[str, str]]:
        """What differs of mesh and profile."""
        found = {"mesh": (str(self.old.mesh), str(self.new.mesh)), "profile": (self.old.profile, self.new.profile)}
        return {k: v for k, v in found.items() if v[0] != v[1]}

    @property
    def same(self) -> bool:
        """Whether nothing but names and source lines differs."""
        changes: tuple[Any, ...] = (self.header, self.placements, self.values, self.ops, self.added, self.removed)
        changes += (self.constraints,)
        changed = any(a != b for pairs in (self.wire, self.memory) for a, b in pairs.values())
        return not any((*changes, self.moved, self.resized, changed))

    # --- in words -------------------------------------------------------------------------------------------

    def lines(self, details: bool = False) -> list[str]:
        """The change in words; a line begins with ``+``, ``-``, ``~`` or a space.

        Changes that are alike share a line, and where there is no room for all kinds of consequences, collectives that
        came, went, moved or changed their size are told in one line each, unless ``details`` are asked for.
        """
        if self.same:
            return ["  the programs are the same"]
        old, new = self.old.mesh, self.new.mesh
        causes = [f"~ {what} {a} -> {b}".replace("mesh mesh", "mesh") for what, (a, b) in self.header.items()]
        causes += [change_words(pair) for pair in self.constraints]
        known: dict[str, set[str]] = collections.defaultdict(set)
        for line in (*self.old.lines, *self.new.lines):
            if line.label is not None:
                known[_pattern(line.label)].add(line.label)
        groups: dict[Any, list[Change]] = collections.defaultdict(list)
        for change in self.placements:
            groups[(change.kind, change.name) if details else _placement_key(change)].append(change)
        causes += [_placements_words(group, known) for group in groups.values()]
        told: list[tuple[list[str], list[str]]] = []  # of consequences: by kind, and in one line
        for sign, lines, mesh in (("-", self.removed, old), ("+", self.added, new)):
            one, many = partial(_collective_words, mesh=mesh), partial(_collectives_words, mesh=mesh)
            kinds = [f"{sign} {text}" for text in _grouped(lines, one, _place, many, details)]
            told.append((kinds, [f"{sign} {many(lines)}"] if lines else []))
        for pairs, words, verb in ((self.moved, _moved_words, "moved"), (self.resized, _resized_words, "resized")):
            one, many = partial(words, before=old, after=new), partial(_pairs_words, verb=verb, before=old, after=new)
            kinds = _grouped(pairs, one, lambda p: (_place(p[0]), _place(p[1])), many, details)
            told.append((kinds, [many(pairs)] if pairs else []))
        rest = _grouped(self.ops, _op_words, lambda c: c.old is None, _ops_group, details)
        rest += _grouped(self.values, _value_words, lambda c: 0, _values_group, details) + self.totals()
        while not details and len(causes) + sum(len(kinds) for kinds, _ in told) + len(rest) > ROOM:
            longest = max(range(len(told)), key=lambda i: len(told[i][0]))
            if len(told[longest][0]) < 2:
                break
            told[longest] = told[longest][1], told[longest][1]
        return causes + [text for kinds, _ in told for text in kinds] + rest

    def totals(self) -> list[str]:
        """Wire bytes and memory, where they changed."""
        parts = [f"{axis} {phase} {_change(*v)}" for (axis, phase), v in self.wire.items() if v[0] != v[1]]
        found = [f"  wire    {_change(*self.wire_bytes)} a device: {', '.join(parts)}"] if parts else []
        parts = [f"{kind} {_change(*v)}" for kind, v in self.memory.items() if v[0] != v[1]]
        return found + ([f"  memory  {', '.join(parts)}"] if parts else [])

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def json(self) -> dict[str, Any]:
        """The same as plain data."""

        def change(c: Change) -> dict[str, Any]:
            sides = {"old": c.old, "new": c.new}
            return {"name": c.name, "kind": c.kind} | {k: v and v.text(self.old.mesh) for k, v in sides.items()}

        def collective(k: Line, mesh: Mesh) -> dict[str, Any]:
            return {
                "kind": k.op, "axis": k.axis, "reduce": k.reduce, "type": type_text(k.type), "spec": str(k.spec or ""),
                "phase": k.phase, "source": k.source, "wire_bytes": k.wire_bytes(mesh),
            }  # fmt: skip

        def pairs(given: Iterable[tuple[Line, Line]]) -> list[Any]:
            return [{"old": collective(a, self.old.mesh), "new": collective(b, self.new.mesh)} for a, b in given]

        return {
            "same": self.same,
            "header": {k: list(v) for k, v in self.header.items()},
            **{k: [change(c) for c in getattr(self, k)] for k in ("placements", "values", "ops")},
            "constraints": as_json(self.constraints),
            "added": [collective(k, self.new.mesh) for k in self.added],
            "removed": [collective(k, self.old.mesh) for k in self.removed],
            "moved": pairs(self.moved),
            "resized": pairs(self.resized),
            "wire": [{"axis": a, "phase": p, "old": x, "new": y} for (a, p), (x, y) in self.wire.items()],
            "memory": {k: list(v) for k, v in self.memory.items()},
        }


def _pairs(old: dict[Any, Any], new: dict[Any, Any], absent: Any) -> dict[Any, tuple[Any, Any]]:
    return {k: (old.get(k, absent), new.get(k, absent)) for k in dict.fromkeys([*old, *new])}


def _change(old: float, new: float) -> str:
    share = f" ({(new - old) / old:+.1%})" if old else ""
    words = readable(old), readable(new)
    if words[0] == words[1]:  # too little for the unit
        words, share = (f"{old:.0f} B", f"{new:.0f} B"), ""
    return f"{words[0]} -> {words[1]}{share}"


def _grouped(
    items: Iterable[Any], words: Callable[[Any], str], key: Callable[[Any], Any], group: Callable[[Any], str],
    details: bool,
) -> list[str]:  # fmt: skip
    """The words of each item, or of each group of items with one key."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[words(item) if details else key(item)].append(item)
    found = []
    for members in groups.values():
        alike = dict.fromkeys(map(words, members))
        times = f"  (x{len(members)})" if len(members) > 1 else ""
        found.append(next(iter(alike)) + times if len(alike) == 1 else group(members))
    return found


def _sources(lines: Iterable[Line]) -> str:
    """``net.py:7,9 and loss.py:3``, the first few."""
    files: dict[str, dict[str, None]] = {}
    for line in lines:
        if line.source:
            file, _, number = line.source.rpartition(":")
            files.setdefault(file or line.source, {})[number if file else ""] = None
    count = sum(map(len, files.values()))
    parts, left = [], SHOWN
    for file, numbers in files.items():
        if left > 0:
            named = ",".join(filter(None, list(numbers)[:left]))
            parts.append(f"{file}:{named}" if named else file)
            left -= len(numbers)
    more = f" and {count - SHOWN} more lines" if count > SHOWN else ""
    return f" at {', '.join(parts)}{more}" if parts else ""


def _pattern(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _patterns(names: Sequence[str], known: Mapping[str, Collection[str]]) -> list[str]:
    """Names alike but for numbers as one: ``layers.*.up`` if that is all that ``known`` has, or ``layers.{1,3}.up``."""
    alike: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for name in names:
        alike[_pattern(name)][name] = None
    found = []
    for pattern, members in alike.items():
        if len(members) > 1 and len(members) == len(known[pattern]):
            found.append(pattern)
            continue
        columns = zip(*(re.findall(r"\b\d+\b", name) for name in members), strict=True)
        for column in columns:
            pattern = pattern.replace("*", _listed(list(dict.fromkeys(column))), 1)
        found.append(pattern)
    return found


def _listed(numbers: Sequence[str]) -> str:
    """``7``, ``{1,3}``, ``{0,1,2..31}``."""
    if len(numbers) == 1:
        return numbers[0]
    end = f"..{numbers[-1]}" if len(numbers) > SHOWN else ""
    return f"{{{','.join(numbers[:SHOWN])}{end}}}"


def _placement_key(c: Change) -> Any:
    stays = c.old and c.new and c.old.spec == c.new.spec
    return c.kind, *c.specs, stays and (c.old.type, c.new.type, c.old.label != c.new.label and c.name)  # type: ignore[union-attr]


def _placements_words(group: Sequence[Change], known: Mapping[str, Collection[str]]) -> str:
    """What one change made of inputs or outputs that change alike."""
    first, patterns = group[0], _patterns([c.name for c in group], known)
    more = f" and {len(patterns) - SHOWN} more names" if len(patterns) > SHOWN else ""
    kind = first.kind if len(group) == 1 else f"{len(group)} {first.kind}s"
    named = f"{kind} {', '.join(patterns[:SHOWN])}{more}"
    old, new = first.specs
    if first.old is None or first.new is None:
        sign, types = "+" if first.old is None else "-", {c.line.type for c in group}
        shape = f"{type_text(first.line.type)} " if len(types) == 1 and first.line.type is not None else ""
        return f"{sign} {named}: {shape}{first.line.spec or ''}"
    if old != new:
        return f"~ {named}: {old} -> {new}"
    if first.old.label != first.new.label:
        return f"~ {first.kind} {first.old.label}: now {named.partition(' ')[2]}"
    if _global(first.old) != _global(first.new):
        return f"~ {named}: {type_text(first.old.type)} -> {type_text(first.new.type)}"
    return f"~ {named}: another value, %{refs(first.new)[0].name}" if refs(first.new) else f"~ {named}: another value"


def _head(k: Line) -> str:
    return f"{k.op}[{k.axis}{f', {k.reduce}' if k.reduce else ''}]"


def _collective_words(k: Line, mesh: Mesh) -> str:
    return f"{_head(k)} of {type_text(k.type)}{_sources([k])}, {k.phase}: {readable(k.wire_bytes(mesh))} wire"


def _named(group: Sequence[Line]) -> str:
    """``3 all_gather[tp]``, or ``4 collectives (3 all_gather[tp] and 1 all_reduce[dp])``."""
    count = collections.Counter(f"{k.op}[{k.axis}]" for k in group).most_common()
    if len(count) == 1:
        return f"{len(group)} {count[0][0]}"
    parts = [f"{n} {name}" for name, n in count[:SHOWN]]
    more = [f"{sum(n for _, n in count[SHOWN:])} others"] if len(count) > SHOWN else [parts.pop()]
    return f"{len(group)} collectives ({', '.join(parts)} and {more[0]})"


def _collectives_words(group: Sequence[Line], mesh: Mesh) -> str:
    phases = " and ".join(sorted({k.phase for k in group}, reverse=True))
    sent = readable(sum(k.wire_bytes(mesh) for k in group))
    return f"{_named(group)}{_sources(group)}, {phases}: {sent} wire"


def _moved_words(pair: tuple[Line, Line], before: Mesh, after: Mesh) -> str:
    old, new = pair
    text = f"~ {_collective_words(old, before)} moved"
    if _place(old) != _place(new):
        return f"{text} to {new.op}[{new.axis}]: {readable(new.wire_bytes(after))} wire"
    if old.source != new.source:
        return f"{text} to {new.source or 'elsewhere'}"
    if _global(old) != _global(new):
        return f"{text} to {type_text(new.type)}"
    if old.spec != new.spec:
        return f"{text} to {new.spec}"
    other = _literals(old) != _literals(new)
    return f"{text}: {'other arguments, ' + _called(new) if other else 'issued in another order'}"


def _resized_words(pair: tuple[Line, Line], before: Mesh, after: Mesh) -> str:
    old, new = pair
    sent = f"{type_text(new.type)}, {readable(new.wire_bytes(after))} wire"
    return f"~ {_collective_words(old, before)} resized to {sent}"


def _pairs_words(pairs: Sequence[tuple[Line, Line]], verb: str, before: Mesh, after: Mesh) -> str:
    old, new = [a for a, _ in pairs], [b for _, b in pairs]
    to = f"{_named(new)}, " if any(_place(a) != _place(b) for a, b in pairs) else ""
    sent = readable(sum(k.wire_bytes(after) for k in new))
    return f"~ {_collectives_words(old, before)} {verb} to {to}{sent} wire"


def _op_words(c: Change) -> str:
    return f"{'+' if c.old is None else '-'} {c.line.op} {type_text(c.line.type)}{_sources([c.line])}"


def _ops_group(group: Sequence[Change]) -> str:
    lines = [c.line for c in group]
    count = collections.Counter(k.op for k in lines)
    more = f" and {len(count) - SHOWN} more kinds" if len(count) > SHOWN else ""
    named = ", ".join(f"{n} {op}" if n > 1 else op for op, n in list(count.items())[:SHOWN])
    return f"{'+' if group[0].old is None else '-'} {len(lines)} operators{_sources(lines)}: {named}{more}"


def _value_words(c: Change) -> str:
    text = f"~ {c.line.op}{_sources([c.line])}: "
    (old, new), before = c.specs, c.old or c.line
    if before.op != c.line.op:
        return f"~ {before.op} -> {c.line.op}{_sources([c.line])}"
    if old != new:
        return f"{text}{old} -> {new}"
    if _global(before) != _global(c.line):
        return f"{text}{type_text(before.type)} -> {type_text(c.line.type)}"
    return f"{text}other {'operands' if _literals(before) == _literals(c.line) else 'arguments'}, {_called(c.line)}"


def _values_group(group: Sequence[Change]) -> str:
    placed = sum(c.specs[0] != c.specs[1] for c in group)
    what = "placed otherwise" if placed == len(group) else "of other shapes, arguments or placements"
    return f"~ {len(group)} values{_sources(c.line for c in group)} are {what}; the first: {_value_words(group[0])[2:]}"


# --- matching ---------------------------------------------------------------------------------------------------


class _Side:
    """One text: its inputs, outputs, computed values and collectives, and what stands behind each."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.position = {id(k): i for i, k in enumerate(text.lines)}
        self.by_name = {k.name: k for k in text.lines if k.name}
        self.inputs = {k.label: k for k in text.lines if k.op in INPUTS}
        self.outputs = {(k.op, k.label): k for k in text.lines if k.op in OUTPUTS}
        self.moves = {k.name for k in text.lines if self._is_move(k)}
        self.values = [
            k for k in text.lines
            if k.op not in (*INPUTS, *OUTPUTS, "body") and not k.axis and k.name not in self.moves
        ]  # fmt: skip
        self.tokens: dict[str, str] = {}

    def _is_move(self, line: Line) -> bool:
        """Whether a line only changes a value's placement."""
        if not line.args or not isinstance(line.args[0], Ref) or not isinstance(line.type, Type) or line.spec is None:
            return False
        operand = self.by_name.get(line.args[0].name)
        if operand is None or not isinstance(operand.type, Type) or operand.spec is None:
            return bool(line.axis)
        return operand.type.shape == line.type.shape and (bool(line.axis) or line.op in MOVES)

    def root(self, ref: Ref) -> Line | None:
        """What computed the value, moves looked through; None where the text leaves it out."""
        line = self.by_name.get(ref.name)
        while line is not None and line.name in self.moves:
            line = self.by_name.get(line.args[0].name)
        return line

    def token(self, ref: Ref, depth: int = 4) -> str:
        """A value in few words: the user's name of an input, or an operator and, down a chain, its operand."""
        line = self.root(ref)
        if line is None:
            return "?"
        if line.op in INPUTS:
            return line.label
        used = refs(line)
        return f"{line.op}({self.token(used[0], depth - 1)})" if len(used) == 1 and depth else line.op

    def operands(self, line: Line) -> tuple[str, ...]:
        return tuple(map(self.token, refs(line)))


def _global(line: Line) -> Any:
    return (line.type.dtype, line.type.shape) if isinstance(line.type, Type) else None


def _called(line: Line) -> str:
    return line.call().partition(" = ")[2]


def _literals(line: Line) -> list[str]:
    """A line's arguments that are no operands."""
    return [
        "" if isinstance(a, Ref) else re.sub(r"%\w+", "%", Line("", "", (a,)).call())
        for a in (*line.args, *(v for _, v in line.kwargs))
    ]


def _aligned(old: Sequence[Line], new: Sequence[Line], keys: Sequence[Callable[[Line, bool], Any]]) -> list[Any]:
    """Pairs of lines in program order, those equal under the first key first; then the gaps under the next."""
    if not keys:
        return [(k, None) for k in old] + [(None, k) for k in new]
    a, b = [keys[0](k, True) for k in old], [keys[0](k, False) for k in new]
    found: list[Any] = []
    for tag, i, j, m, n in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            found += zip(old[i:j], new[m:n], strict=True)
        else:
            found += _aligned(old[i:j], new[m:n], keys[1:])
    return found


def diff(old: Any, new: Any) -> Diff:
    """What changed from ``old`` to ``new``: programs, or texts of them.

    Texts of two levels are compared at the coarser.  Raises `SpmdError` for what is no program's text.
    """
    texts = [_text_of(old), _text_of(new)]
    levels = {t.level for t in texts}
    if "summary" in levels:
        raise SpmdError("a summary holds no collectives; compare texts of level 'collectives' or 'full'")
    if "collectives" in levels:
        texts = [t.at("collectives") for t in texts]
    a, b = map(_Side, texts)
    values, ops = [], []
    same: dict[str, str] = {k.name: b.inputs[label].name for label, k in a.inputs.items() if label in b.inputs}
    sides = {True: a, False: b}
    keys: list[Callable[[Line, bool], Any]] = [
        lambda k, first: (k.op, k.phase, _global(k), sides[first].operands(k)),
        lambda k, first: (k.op, k.phase, _global(k), *_literals(k)),
        lambda k, first: (k.op, k.phase, sides[first].operands(k)),
        lambda k, first: (k.op, k.phase, len(refs(k))),
        lambda k, first: (k.phase, _global(k), sides[first].operands(k)),
    ]
    pairs = _aligned(a.values, b.values, keys)
    same |= {x.name: y.name for x, y in pairs if x and y}
    for x, y in pairs:
        if x is None or y is None:
            ops.append(Change((x or y).name, "op", x, y))
            continue
        placed = x.spec == y.spec and a.text.mesh == b.text.mesh
        other = x.op != y.op or _rewired(a, b, same, x, y) or (placed and _literals(x) != _literals(y))
        if x.spec != y.spec or _global(x) != _global(y) or other:
            values.append(Change(y.name, "value", x, y))
    matched, removed, added = _match_collectives(a, b, same)
    stays = _in_order([(a.position[id(x)], b.position[id(y)]) for x, y in matched])
    moved, resized = [], []
    for (x, y), kept in zip(matched, stays, strict=True):
        more = x.wire_bytes(a.text.mesh) != y.wire_bytes(b.text.mesh)
        other = _global(x) != _global(y) or x.spec != y.spec or _literals(x) != _literals(y)
        if not kept or _place(x) != _place(y) or (other and not more):
            moved.append((x, y))
        elif more:
            resized.append((x, y))
    return Diff(
        a.text, b.text, tuple(_placements(a, b, same)), tuple(values), tuple(ops), tuple(added), tuple(removed),
        tuple(moved), tuple(resized), compared(a.text.constraints, b.text.constraints),
    )  # fmt: skip


def _rewired(a: _Side, b: _Side, same: dict[str, str], x: Line, y: Line) -> bool:
    """Whether one takes other values than the other; an operator that came or went between is told already."""
    known = set(same.values())
    for old, new in zip(map(a.root, refs(x)), map(b.root, refs(y)), strict=False):
        if old and new and old.name in same and new.name in known and same[old.name] != new.name:
            return True
    return False


def _text_of(given: Any) -> Text:
    if isinstance(given, Text):
        return given
    if isinstance(given, str):
        return parse(given)
    if callable(getattr(given, "text", None)):
        return parse(given.text())
    raise SpmdError(f"expected a program or its text, got {type(given).__name__}")


def _placements(a: _Side, b: _Side, same: dict[str, str]) -> list[Change]:
    """Inputs and outputs that came, went or changed; gradients that follow their parameters are not repeated."""
    found = []
    follows: dict[str, tuple[Spec | None, Spec | None]] = {}
    for label, (x, y) in _pairs(a.inputs, b.inputs, None).items():
        follows[label] = (x and x.spec, y and y.spec)
        if x is None or y is None or x.spec != y.spec or _global(x) != _global(y):
            found.append(Change(label, (y or x).op, x, y))
    outputs = _pairs(a.outputs, b.outputs, None)
    came = {key: y for key, (x, y) in outputs.items() if x is None}
    for key in [key for key, (_, y) in outputs.items() if y is None]:  # the same value under another name: out, out.0
        x, _ = outputs[key]
        for other, y in came.items():
            if other[0] == key[0] and _made(a, x) and same.get(_made(a, x)) == _made(b, y):
                del outputs[key], came[other]
                outputs[other] = x, y
                break
    for (kind, label), (x, y) in outputs.items():
        specs = (x and x.spec, y and y.spec)
        placed = specs[0] != specs[1] and (kind == "output" or follows.get(label) != specs)
        if placed or (x and y and (x.label != y.label or _rewired(a, b, same, x, y))):
            found.append(Change(label, kind, x, y))
    return found


def _made(side: _Side, output: Line) -> str:
    """The name of the value that an output gives; empty where the text leaves it out."""
    root = side.root(refs(output)[0]) if refs(output) else None
    return root.name if root else ""


def _place(line: Line) -> tuple[str, str]:
    return line.op, line.axis


def _match_collectives(a: _Side, b: _Side, same: dict[str, str]) -> tuple[list[tuple[Line, Line]], Any, Any]:
    """``(pairs, removed, added)``: by what is done to which value; then whatever agrees in less."""

    def value(side: _Side, k: Line) -> str | None:
        root = side.root(k.args[0])
        if root is None:
            return None
        return root.name if side is b else same.get(root.name, f"old {root.name}")

    def known(side: _Side, k: Line) -> Any:
        return value(side, k) or _global(k)

    def whole(side: _Side, k: Line) -> Any:
        return k.op, k.axis, k.reduce, k.phase, known(side, k), str(k.spec)

    def on_a_value(side: _Side, k: Line) -> Any:
        return k.op, k.axis, k.reduce, k.phase, known(side, k)

    def elsewhere(side: _Side, k: Line) -> Any:
        return k.op, k.axis, k.reduce, k.phase, _global(k)

    def across_a_view(side: _Side, k: Line) -> Any:
        return k.op, k.axis, k.reduce, k.phase, k.source, k.wire_bytes(side.text.mesh)

    def another_axis(side: _Side, k: Line) -> Any:
        return k.op, k.reduce, k.phase, known(side, k)

    pairs: list[tuple[Line, Line]] = []
    left, right = list(a.text.collectives), list(b.text.collectives)
    for key in (whole, on_a_value, elsewhere, across_a_view, another_axis):
        queue: dict[Any, collections.deque[Line]] = collections.defaultdict(collections.deque)
        for k in right:
            queue[key(b, k)].append(k)
        rest = []
        for k in left:
            waiting = queue.get(key(a, k))
            pairs.append((k, waiting.popleft())) if waiting else rest.append(k)
        taken = {id(y) for _, y in pairs}
        left, right = rest, [k for k in right if id(k) not in taken]
    return sorted(pairs, key=lambda p: a.position[id(p[0])]), left, right


def _in_order(pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Which of the pairs, ascending in the first, are of the longest run that ascends in the second too."""
    tails: list[int] = []
    length = []
    for _, y in pairs:
        at = bisect.bisect_left(tails, y)
        tails[at : at + 1] = [y]
        length.append(at)
    kept, want = [False] * len(pairs), len(tails) - 1
    for i in reversed(range(len(pairs))):
        if length[i] == want:
            kept[i], want = True, want - 1
    return kept
