"""Read what `text` prints: a scanner of one line at a time, with errors that point at the character."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from . import constraints
from .dims import Dim, Dims, Guard
from .placements import Mesh, Spec, SpmdError
from .symbolic import parse as parse_expression
from .symbolic import sized
from .text import COLLECTIVES, INPUTS, LEVELS, OUTPUTS, Argument, Line, Ref, Text, Type, Word, element_size, ranges_of

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"%(\w+)")
_WORD = re.compile(r"[A-Za-z_][\w.<>:]*")
_BOUND = r"[-\w*/+()]+"
_RUN = re.compile(rf"(none|{_BOUND}:{_BOUND}(?: {_BOUND}:{_BOUND})*)(?: ([+-]\d+) x(\d+))?")


def parse(text: str) -> Text:
    """The `Text` that prints as ``text``.  Raises `SpmdError` with the line, the column and what was expected."""
    if not isinstance(text, str):
        raise SpmdError(f"expected the text of a program, got {type(text).__name__}")
    rows = [(i, row.rstrip()) for i, row in enumerate(text.splitlines(), 1) if row.strip()]
    if not rows:
        raise SpmdError("the text is empty; a program's text begins with 'program'")
    number, first = rows[0]
    name, mesh, profile, level = _Scanner(first, number).header()
    memory: tuple[tuple[str, int], ...] = ()
    if len(rows) > 1 and rows[1][1].startswith("memory  "):
        memory = _Scanner(rows[1][1], rows[1][0]).memory()
        del rows[1]
    dims: Dims | None = None
    if len(rows) > 1 and rows[1][1].startswith("dims  "):
        named = _Scanner(rows[1][1], rows[1][0]).dims()
        names = [d.name for d in named]
        last = next((i for i, (_, row) in enumerate(rows[2:], 2) if not row.startswith("guard  ")), len(rows))
        dims = Dims(named, tuple(_Scanner(row, i).guard(names) for i, row in rows[2:last]))
        del rows[1:last]
    asked: list[constraints.Constraint] = []
    while len(rows) > 1 and rows[1][1].startswith("constraint  "):
        asked.append(_Scanner(rows[1][1], rows[1][0]).constraint())
        del rows[1]
    hints = dims.hints if dims is not None else {}
    notes = tuple(row[2:] for _, row in rows[1:] if row.startswith("# ")) if level == "summary" else ()
    lines = tuple(_Scanner(row, i, hints).line(mesh) for i, row in rows[1:] if not row.startswith("#"))
    return Text(name, mesh, profile, lines, memory, level, dims, tuple(asked), notes)


class _Scanner:
    def __init__(self, row: str, number: int, hints: Mapping[str, int] = {}) -> None:
        self.row, self.number, self.at = row, number, 0
        self.hints = hints

    def fail(self, expected: str) -> SpmdError:
        found = self.row[self.at :]
        return SpmdError(f"line {self.number}, column {self.at + 1}: expected {expected}, found {found!r}")

    # --- pieces ---------------------------------------------------------------------------------------------

    def take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self.row, self.at)
        if match is None:
            raise self.fail(expected)
        self.at = match.end()
        return match

    def skip(self, text: str, needed: bool = True) -> bool:
        if self.row.startswith(text, self.at):
            self.at += len(text)
            return True
        if needed:
            raise self.fail(repr(text))
        return False

    def space(self) -> None:
        while self.at < len(self.row) and self.row[self.at] == " ":
            self.at += 1

    def string(self) -> str:
        return json.loads(self.take(_STRING, "a string in quotes")[0])

    def until(self, stops: str) -> str:
        """The text up to one of ``stops`` outside of brackets and strings."""
        begin, depth = self.at, 0
        while self.at < len(self.row):
            c = self.row[self.at]
            if c == '"':
                self.take(_STRING, "a string in quotes")
                continue
            if depth == 0 and c in stops:
                break
            depth += (c in "([{") - (c in ")]}")
            self.at += 1
        return self.row[begin : self.at]

    # --- the header -----------------------------------------------------------------------------------------

    def header(self) -> tuple[str, Mesh, str, str]:
        self.skip("program ")
        name = self.string()
        self.space()
        sizes = self.take(re.compile(r"mesh\(([^)]*)\)"), "mesh(axis=size, ...)")[1]
        try:
            mesh = Mesh([(a, int(n)) for a, n in (part.strip().split("=") for part in sizes.split(","))])
        except ValueError as error:
            raise SpmdError(f"line {self.number}: mesh({sizes}): {error}") from None
        self.space()
        profile = self.take(re.compile(r"\S+"), "a profile's name")[0] if self.skip("profile ", False) else ""
        self.space()
        level = self.take(re.compile(r"\w+"), "a level")[0] if self.skip("level ", False) else "full"
        if level not in LEVELS:
            raise self.fail(f"one of {', '.join(LEVELS)}")
        self.end()
        return name, mesh, profile, level

    def parts(self, head: str, pattern: str, expected: str) -> list[re.Match[str]]:
        """What stands between commas behind ``head``."""
        self.skip(head)
        found = []
        for part in self.row[self.at :].split(", "):
            match = re.fullmatch(pattern, part)
            if match is None:
                raise self.fail(expected)
            found.append(match)
            self.at += len(part) + 2
        return found

    def memory(self) -> tuple[tuple[str, int], ...]:
        found = self.parts("memory  ", r"(\w+) (?:(\d+) B|[\d.]+ \w+ \((\d+) B\))", "a kind and its bytes")
        return tuple((m[1], int(m[2] or m[3])) for m in found)

    def dims(self) -> tuple[Dim, ...]:
        found = self.parts("dims  ", r"(\w+)=(\d+) in (\d+)\.\.(\d*)", "a dim such as batch=8 in 2..64")
        return tuple(Dim(m[1], int(m[2]), int(m[3]), int(m[4]) if m[4] else None) for m in found)

    def guard(self, names: Collection[str]) -> Guard:
        self.skip("guard  ")
        condition, _, reason = self.row[self.at :].partition("  # ")
        try:
            return Guard(parse_expression(condition, names), reason)
        except ValueError:
            raise self.fail("a condition of dims") from None

    def constraint(self) -> constraints.Constraint:
        found = constraints.read(self.row)
        if found is None:
            raise self.fail("a constraint such as 'constraint  {dp: S(0)} of aten.mm  # net.py:7'")
        return found

    def end(self) -> None:
        self.space()
        if self.at < len(self.row):
            raise self.fail("the end of the line")

    # --- a line ---------------------------------------------------------------------------------------------

    def line(self, mesh: Mesh) -> Line:
        self.space()
        depth, start = self.at // 2, self.at
        if self.row.startswith("%", self.at):
            name = self.take(_NAME, "a value's name")[1]
            self.skip(" = ")
            found = self.value(name)
        else:
            op = self.take(_WORD, "a value or an output")[0]
            if op not in OUTPUTS:
                self.at = start
                raise self.fail("a value, or " + ", ".join(OUTPUTS))
            self.skip(" ")
            label = self.string()
            self.skip(" = ")
            found = {"name": "", "op": op, "label": label, "args": (self.argument(" "),)}
        self.space()
        if self.at < len(self.row) and self.row[self.at] not in "{#":
            found["type"] = self.type()
        self.space()
        if self.at < len(self.row) and self.row[self.at] == "{":
            begin = self.at
            self.at = self.row.find("}", begin) + 1 or len(self.row)
            try:
                found["spec"] = Spec.parse(self.row[begin : self.at])
            except SpmdError as error:
                raise SpmdError(f"line {self.number}, column {begin + 1}: {error}") from None
        self.space()
        found |= self.notes()
        for axis in filter(None, found.get("axis", "").split("/")):
            if axis not in mesh.axes:
                raise SpmdError(f"line {self.number}: {mesh} has no axis {axis!r}")
        return Line(**found, depth=depth)

    def value(self, name: str) -> dict[str, Any]:
        op = self.take(_WORD, "an operator")[0]
        if op in INPUTS and self.skip(" ", False):
            return {"name": name, "op": op, "label": self.string()}
        if op in ("constant", "body"):
            return {"name": name, "op": op}
        found: dict[str, Any] = {"name": name, "op": op}
        if op in COLLECTIVES:
            self.skip("[")
            found["axis"] = self.until(",]")
            if self.skip(", ", False):
                found["reduce"] = self.until("]")
            self.skip("]")
        self.skip("(")
        args, kwargs = [], []
        while not self.skip(")", False):
            key = re.compile(r"([A-Za-z_]\w*)=").match(self.row, self.at)
            self.at = key.end() if key else self.at
            value = self.argument(",)")
            kwargs.append((key[1], value)) if key else args.append(value)
            if not self.skip(", ", False) and not self.row.startswith(")", self.at):
                raise self.fail("', ' or ')'")
        return {**found, "args": tuple(args), "kwargs": tuple(kwargs)}

    def argument(self, stops: str) -> Argument:
        if self.row.startswith("[", self.at):
            return self.sequence()
        if self.row.startswith('"', self.at):
            return self.string()
        begin = self.at
        text = self.until(stops)
        if text.startswith("%"):
            if not _NAME.fullmatch(text):
                self.at = begin
                raise self.fail("a value's name")
            return Ref(text[1:])
        if text in ("True", "False", "None"):
            return ast.literal_eval(text)
        for read in (int, float, complex):
            if re.match(r"[-(]?[\d.]", text):
                try:
                    return read(text)
                except ValueError:
                    continue
        try:
            return parse_expression(text, self.hints)
        except ValueError:
            if re.fullmatch(r"[-\w.<>:]+", text):
                return Word(text)
            self.at = begin
            raise self.fail("an argument") from None

    def sequence(self) -> Argument:
        self.skip("[")
        if _RUN.match(self.row, self.at) and not re.compile(r"none\w").match(self.row, self.at):
            return self.ranges()
        items = []
        while not self.skip("]", False):
            items.append(self.argument(",]"))
            if not self.skip(", ", False) and not self.row.startswith("]", self.at):
                raise self.fail("', ' or ']'")
        return tuple(items)

    def ranges(self) -> Argument:
        found: list[tuple[Any, ...]] = []
        while not self.skip("]", False):
            text, step, count = self.take(_RUN, "a range").groups()
            pairs = [] if text == "none" else [p.split(":") for p in text.split(" ")]
            first = tuple(tuple(parse_expression(n, self.hints) for n in p) for p in pairs)
            for i in range(int(count or 1)):
                by = i * int(step or 0)
                found.append(tuple((b + by, e + by) for b, e in first))
            if not self.skip(", ", False) and not self.row.startswith("]", self.at):
                raise self.fail("', ' or ']'")
        return ranges_of(tuple(found), self.hints)

    def type(self) -> Any:
        if self.skip("(", False):
            items = []
            while not self.skip(")", False):
                items.append(self.type())
                self.skip(", ", False)
            return tuple(items)
        begin = self.at
        name = self.take(_WORD, "a type")[0]
        if not self.skip("[", False):
            return Word(name)
        whole, _, local = self.until("]").partition(" | ")
        self.skip("]")
        try:
            element_size(name)
            shape, piece = (self.sizes(part) for part in (whole, local or whole))
        except ValueError:
            self.at = begin
            raise self.fail("a type such as f32[8, 4 | 2, 4]") from None
        sizes = sized(piece, self.hints)
        return Type(name, shape, piece, () if sizes == piece else sizes)

    def sizes(self, text: str) -> tuple[Any, ...]:
        parts = re.split(r", (?![^()]*\))", text) if text else []
        if not self.hints:
            return tuple(map(int, parts))
        return tuple(parse_expression(n, self.hints) for n in parts)

    def notes(self) -> dict[str, Any]:
        if not self.skip("#", False):
            self.end()
            return {}
        parts = [p for p in self.row[self.at :].strip().split("  ") if p]
        times = 1
        if parts and (wire := re.fullmatch(r".* wire(?: x(\d+)|( in loop))?", parts[-1])):
            times = int(wire[1]) if wire[1] else 0 if wire[2] else 1
            parts.pop()
        phase = "backward" if parts and parts[-1] == "backward" else "forward"
        source = "  ".join(parts[: len(parts) - (phase == "backward")])
        return {"phase": phase, "source": source, "times": times}
