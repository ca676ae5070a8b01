"""The text form of a program, as data: one node, one line, no address, no path, no rank.

`Text.of` reads a partitioned graph, ``str`` prints it, `reader.parse` reads what was printed: ``parse(str(t)) == t``.

    program "block"  mesh(dp=2, tp=4)  profile h100
    memory  parameters 2.00 KiB (2048 B), gradients 0 B, optimizer 0 B, activations 640 B
    %w = param "up.weight"                  f32[64, 16 | 16, 16]  {dp: R, tp: S(0)}
    %x = input "x"                          f32[8, 64 | 4, 16]    {dp: S(0), tp: S(1)}
    %mm = aten.mm(%x, %w)                   f32[8, 16 | 4, 16]    {dp: S(0), tp: P(sum)}  # net.py:7
    %sum = all_reduce[tp, sum](%mm)         f32[8, 16 | 4, 16]    {dp: S(0), tp: R}  # net.py:7  384 B wire
    output "out" = %sum                                           {dp: S(0), tp: R}

A type holds the global shape and, behind a bar, the local one (of coordinate 0) where it differs.  A line of the
backward says so.  What a collective sends follows from its line and the mesh.  Level ``collectives`` leaves out
computed values; level ``summary`` every line, and says in comments what is sent.  The header states the constraints
in the program's middle (`constraints` has their form).  Of a program with dynamic dims it says which and what they must
satisfy, sizes and other integers are expressions of them, and bytes are those at the sizes given:

    dims  batch=8 in 2..64
    guard  Eq(Mod(batch, 2), 0)  # dim 0 of x is cut into 2 on dp

Sizes that data decide are dims ``u0``, ``u1``..., and a line says of what: ``%size = spmd.size(%nonzero, 0, "u0")``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Graph, Node

from . import collectives as coll
from .collectives import KINDS, is_collective
from .constraints import Constraint, constraints_of
from .dims import Dims
from .ir import Captured, Partitioned, body_of, is_tensor, source_line
from .placements import Mesh, Spec, SpmdError
from .symbolic import IntExpr, sized
from .words import shown

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
LEVELS = ("summary", "collectives", "full")
INPUTS = ("param", "buffer", "input", "tangent", "seed", "argument")  # the last of a body, as are results
OUTPUTS = ("output", "mutation", "grad", "result")
COLLECTIVES = tuple(dict.fromkeys(coll.KINDS.values()))
COLUMNS = (0, 58, 92, 116)  # where calls, types, specs and notes begin; fixed, so that a changed line changes no other


def readable(nbytes: float) -> str:
    """``1536.0`` -> ``1.50 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def size(given: Any) -> float:
    """Bytes of a number, or of a text such as ``"60GiB"``, ``"1.5 MB"`` or ``"2e9"``."""
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    number = r"(\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
    match = re.fullmatch(rf"({number}) *(?:([KMGT]?)(i?)B)?", str(given).strip(), re.IGNORECASE)
    if match is None or isinstance(given, bool):
        raise SpmdError(f"{shown(given)} is no number of bytes, such as 6e10 or '60GiB'")
    number, _, power, binary = match.groups()
    return float(number) * (1024 if binary else 1000) ** powers[(power or "").upper()]


# --- arguments --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """An operand: the value that an earlier line names."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Word:
    """A constant known by its name: a dtype (``f32``), a device (``cpu``), ``inf``, ``contiguous_format``..."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Ranges:
    """What each device holds, or wants, of a dim: the ranges of a ``fetch``.

    Devices whose ranges move on by the same step are written once: ``0:4 +4 x8`` are eight of them.
    """

    ranges: tuple[tuple[tuple[IntExpr, IntExpr], ...], ...]
    hint: tuple[tuple[tuple[int, int], ...], ...] = ()  # at the example's sizes of dynamic dims

    def __str__(self) -> str:
        parts, i = [], 0
        if self.hint:
            rows = (" ".join(":".join("".join(str(n).split()) for n in r) for r in each) for each in self.ranges)
            return "[" + ", ".join(row or "none" for row in rows) + "]"
        while i < len(self.ranges):
            step, count = self._run(i)
            text = " ".join(f"{b}:{e}" for b, e in self.ranges[i]) or "none"
            parts.append(f"{text} {step:+d} x{count}" if count > 2 else text)
            i += count if count > 2 else 1
        return "[" + ", ".join(parts) + "]"

    def _run(self, i: int) -> tuple[int, int]:
        """``(step, count)`` of the devices from ``i`` on whose ranges are moved copies of the first's."""
        first, step, count = self.ranges[i], 0, 1
        if first and i + 1 < len(self.ranges) and self.ranges[i + 1]:
            step = self.ranges[i + 1][0][0] - first[0][0]
            while i + count < len(self.ranges) and self.ranges[i + count] == _moved(first, step * count):
                count += 1
        return step, count


def _moved(ranges: tuple[tuple[Any, Any], ...], by: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple((b + by, e + by) for b, e in ranges)


def ranges_of(ranges: tuple[Any, ...], hints: Mapping[str, int]) -> Ranges:
    """`Ranges` whose bounds may hold dynamic dims, which have these sizes in the example."""
    numbers = sized(ranges, hints)
    return Ranges(ranges, () if numbers == ranges else numbers)


Argument: TypeAlias = Any  # Ref, Word, Ranges, int, float, complex, bool, None, str, a sympy expression, or a tuple


def plain(arg: Any) -> Argument:
    """An argument of a node as data."""
    if isinstance(arg, Node):
        return Ref(arg.name)
    if isinstance(arg, (list, tuple)):
        return tuple(plain(a) for a in arg)
    if arg is None or isinstance(arg, (bool, str, sympy.Basic)):
        return arg
    if isinstance(arg, int):
        return int(arg)
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else Word(str(arg))
    if isinstance(arg, complex):
        return arg if math.isfinite(abs(arg)) else Word(str(arg).strip("()"))
    if isinstance(arg, torch.dtype):
        return Word(dtype_text(arg))
    return Word("".join(str(arg).removeprefix("torch.").split()))


def argument_text(arg: Argument) -> str:
    if isinstance(arg, tuple):
        return "[" + ", ".join(argument_text(a) for a in arg) + "]"
    return json.dumps(arg) if isinstance(arg, str) else str(arg)


def dtype_text(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


@functools.cache
def element_size(dtype: str) -> int:
    """Bytes of one element of a dtype by its text."""
    found = {name: d for d, name in DTYPES.items()}.get(dtype) or getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise SpmdError(f"there is no dtype {shown(dtype)}")
    return found.itemsize


# --- the data ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Type:
    """``f32[8192, 512 | 2048, 512]``: dtype, global shape, local shape (of coordinate 0).

    ``hint`` is the local shape at the example's sizes where ``local`` holds dynamic dims."""

    dtype: str
    shape: tuple[IntExpr, ...]
    local: tuple[IntExpr, ...]
    hint: tuple[int, ...] = ()

    @property
    def local_bytes(self) -> int:
        return math.prod(self.hint or self.local) * element_size(self.dtype)

    def __str__(self) -> str:
        whole, local = (", ".join(map(str, s)) for s in (self.shape, self.local))
        return f"{self.dtype}[{whole}]" if whole == local else f"{self.dtype}[{whole} | {local}]"


def type_of(value: Any, shape: Sequence[Any] | None = None, local: Any = None) -> Type | Word | tuple[Any, ...]:
    """The type of a fake value whose global shape is ``shape`` (None: its own) and whose own is ``local`` in dims."""
    if isinstance(value, (tuple, list)):
        return tuple(type_of(v, None, at) for v, at in zip(value, local or [None] * len(value), strict=True))
    if not is_tensor(value):
        return Word("GraphModule" if isinstance(value, torch.nn.Module) else type(value).__name__)
    sizes = tuple(int(s) for s in value.shape)
    piece = sizes if local is None else tuple(local)
    whole = piece if shape is None else tuple(s if isinstance(s, sympy.Basic) else int(s) for s in shape)
    return Type(dtype_text(value.dtype), whole, piece, () if piece == sizes else sizes)


def type_text(kind: Type | Word | tuple[Any, ...] | None) -> str:
    if isinstance(kind, tuple):
        return "(" + ", ".join(map(type_text, kind)) + ")"
    return "" if kind is None else str(kind)


@dataclass(frozen=True)
class Line:
    """One line: ``op`` is a kind of input or output, ``constant``, an operator, or (with an ``axis``) a collective.

    ``label`` is the user's name of an input or output.  A collective's first argument is its operand, the others say
    what it does to which dims.
    """

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    type: Type | Word | tuple[Any, ...] | None = None
    spec: Spec | None = None
    label: str = ""
    axis: str = ""
    reduce: str | None = None
    source: str = ""
    phase: str = "forward"
    depth: int = 0
    times: int = 1

    def wire_bytes(self, mesh: Mesh) -> float:
        """What one device sends, every time that the line runs in a step; 0.0 where the line is no collective."""
        if not self.axis or not isinstance(self.type, Type):
            return 0.0
        size: float = self.type.local_bytes
        ranges = [a for a in self.args if isinstance(a, Ranges)]
        if ranges:
            have, want = (r.hint or r.ranges for r in ranges)
            others = math.prod(n for d, n in enumerate(self.type.hint or self.type.local) if d != self.args[1])
            moved = max(coll.sent([r for (r,) in have], want))  # type: ignore[arg-type]
            size = moved * others * element_size(self.type.dtype)
        return coll.wire_bytes(self.op, size, math.prod(mesh[a] for a in self.axis.split("/"))) * max(1, self.times)

    def call(self) -> str:
        """``%mm = aten.mm(%x, %w)``."""
        if self.op in OUTPUTS:
            return f"{self.op} {json.dumps(self.label)} = {argument_text(self.args[0])}"
        if self.op in INPUTS:
            return f"%{self.name} = {self.op} {json.dumps(self.label)}"
        if self.op in ("constant", "body"):
            return f"%{self.name} = {self.op}"
        head = f"[{self.axis}{f', {self.reduce}' if self.reduce else ''}]" if self.axis else ""
        args = [argument_text(a) for a in self.args] + [f"{k}={argument_text(v)}" for k, v in self.kwargs]
        return f"%{self.name} = {self.op}{head}({', '.join(args)})"

    def text(self, mesh: Mesh) -> str:
        notes = [self.source, "backward" if self.phase == "backward" else ""]
        if self.axis:
            often = "" if self.times == 1 else f" x{self.times}" if self.times else " in loop"
            notes.append(f"{readable(self.wire_bytes(mesh))} wire{often}")
        note = "  ".join(filter(None, notes))
        call = "  " * self.depth + self.call()
        fields = (call, type_text(self.type), str(self.spec or ""), f"# {note}" if note else "")
        line = ""
        for column, text in zip(COLUMNS, fields, strict=True):
            if text:
                line = f"{line:{column}}{text}" if len(line) + 2 <= column or not line else f"{line}  {text}"
        return line


def refs(line: Line) -> list[Ref]:
    """A line's operands."""
    found: list[Ref] = []

    def walk(arg: Any) -> None:
        if isinstance(arg, Ref):
            found.append(arg)
        elif isinstance(arg, tuple):
            for a in arg:
                walk(a)

    walk((line.args, tuple(v for _, v in line.kwargs)))
    return found


def line_of(node: Node, hints: Mapping[str, int] = {}, depth: int = 0) -> Line:
    """The line of a call or a constant of a local graph, whose dynamic dims have these sizes in the example."""
    args = tuple(plain(a) for a in node.args)
    kwargs = tuple((k, plain(v)) for k, v in node.kwargs.items())
    op, axis, reduce = target_text(node), "", None
    if node.op == "get_attr":
        op, args, kwargs = "constant" if body_of(node) is None else "body", (), ()
    elif is_collective(node):
        op, axis, reduce = KINDS[node.target], "/".join(coll.axes_of(node)), coll.reduce_op(node)
        args = (args[0], *_dims(node, hints))
    kind = None if op == "body" else type_of(node.meta.get("val"), node.meta.get("global"), node.meta.get("local"))
    return Line(
        node.name, op, args, kwargs, kind, node.meta.get("spec"), "", axis, reduce,
        " ".join(source_line(node).split()), _phase(node), depth, node.meta.get("times", 1) if axis else 1,
    )  # fmt: skip


def _phase(node: Node) -> str:
    return "backward" if node.meta.get("phase") == "backward" else "forward"


def target_text(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _dims(node: Node, hints: Mapping[str, int]) -> list[Argument]:
    """What a collective does: the dims that it gathers and scatters, orders of axes, ranges."""
    if node.target is coll.all_to_all:
        return [node.args[1], node.args[3]]
    if node.target is coll.permute:
        return [node.args[1], plain(node.args[4])]
    if node.target is coll.fetch:
        sides = [tuple(map(tuple, coll.ranges(node.args[i], coll.group_size(node)))) for i in (3, 4)]
        fill = [plain(node.args[5])] if node.args[5] else []
        return [node.args[1], *(ranges_of(side, hints) for side in sides), *fill]
    return [] if node.target is coll.all_reduce else [node.args[1]]


def _lines(
    graph: Graph, inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str, Spec | None]],
    hints: Mapping[str, int], depth: int,
) -> Iterator[Line]:  # fmt: skip
    """The lines of a graph, and within it of each body, once."""
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            op, label = next(given)
            kind = type_of(node.meta.get("val"), node.meta.get("global"), node.meta.get("local"))
            yield Line(node.name, op, (), (), kind, node.meta.get("spec"), label, depth=depth)
        elif node.op == "output":
            for value, (op, label, spec) in zip(_flat(node), outputs, strict=True):
                yield Line("", op, (plain(value),), spec=spec, label=label, depth=depth)
        else:
            yield line_of(node, hints, depth)
        if (body := body_of(node)) is not None:
            places = body.graph.find_nodes(op="placeholder")
            made = _flat(next(n for n in reversed(body.graph.nodes) if n.op == "output"))
            takes = [("argument", f"{node.name}.{i}") for i in range(len(places))]
            gives = [("result", f"{node.name}.{i}", v.meta.get("spec") if isinstance(v, Node) else None)
                     for i, v in enumerate(made)]  # fmt: skip
            yield from _lines(body.graph, takes, gives, hints, depth + 1)


def _flat(output: Node) -> list[Any]:
    return list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]


@dataclass(frozen=True)
class Text:
    """A program's text as data.  ``memory`` holds bytes a device, by kind; ``notes`` are the comments of a summary."""

    name: str
    mesh: Mesh
    profile: str
    lines: tuple[Line, ...]
    memory: tuple[tuple[str, int], ...] = ()
    level: str = "full"
    dims: Dims | None = None
    constraints: tuple[Constraint, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(local: Partitioned, memory: Mapping[str, int] | None = None, dims: Dims | None = None) -> Text:
        """The text of a partitioned graph, with expressions of ``dims`` if it is that of a family."""
        if dims is None and local.captured.data:
            dims = Dims(local.captured.data)
        hints = dims.hints if dims is not None else {}
        inputs = [(i.kind, i.name) for i in local.inputs]
        outputs = [(o.kind, o.name, o.spec) for o in local.outputs]
        lines = list(_lines(local.graph.graph, inputs, outputs, hints, 0))
        profile = PurePath(local.profile.name).name if local.profile is not None else ""
        profile += "+overlap" if local.profile is not None and local.profile.overlap else ""
        held = tuple((memory or {}).items())
        asked = constraints_of(local.captured)
        return Text(local.captured.name, local.mesh, profile, tuple(lines), held, dims=dims, constraints=asked)

    def at(self, level: str) -> Text:
        """The text at a level: ``collectives`` keeps inputs, outputs and collectives, ``summary`` no line,
        but ``notes``: what is sent by axis and phase.

        Raises `SpmdError` for a level that shows more than the text's own."""
        if level in LEVELS and LEVELS.index(level) > LEVELS.index(self.level):
            raise SpmdError(f"the text is of level {self.level}, which does not hold what level {level} shows")
        kept = {"full": self.lines, "summary": ()}.get(level)
        if kept is None:
            kept = tuple(k for k in self.lines if k.axis or k.op in (*INPUTS, *OUTPUTS, "body"))
        notes = self.notes or self._sent() if level == "summary" else ()
        return dataclasses.replace(self, lines=kept, level=level, notes=notes)

    def _sent(self) -> tuple[str, ...]:
        """What is sent, in words, by axis and phase."""
        count = len(self.collectives)
        rows = [f"wire  {readable(sum(self.wire().values()))} a device in {count} collective{'s' * (count != 1)}"]
        for (axis, phase), sent in self.wire().items():
            kinds = collections.Counter(k.op for k in self.collectives if (k.axis, k.phase) == (axis, phase))
            made = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
            rows.append(f"{axis} {phase}  {readable(sent)} in {made}")
        return tuple(rows)

    @property
    def collectives(self) -> tuple[Line, ...]:
        return tuple(k for k in self.lines if k.axis)

    def wire(self) -> dict[tuple[str, str], float]:
        """Wire bytes by axis and phase."""
        found: dict[tuple[str, str], float] = {}
        for line in self.collectives:
            key = (line.axis, line.phase)
            found[key] = found.get(key, 0.0) + line.wire_bytes(self.mesh)
        return dict(sorted(found.items()))

    def header(self) -> list[str]:
        head = f"program {json.dumps(self.name)}  {self.mesh}"
        head += f"  profile {self.profile}" if self.profile else ""
        head += f"  level {self.level}" if self.level != "full" else ""
        rows = [head]
        if self.memory:
            kinds = (f"{k} {readable(v)}" + (f" ({v} B)" if v >= 1024 else "") for k, v in self.memory)
            rows.append("memory  " + ", ".join(kinds))
        if self.dims is not None:
            rows.append("dims  " + ", ".join(map(str, self.dims.dims)))
            rows += [f"guard  {g.condition}  # {g.reason}" for g in self.dims.guards]
        return rows + [str(c) for c in self.constraints] + [f"# {note}" for note in self.notes]

    def __str__(self) -> str:
        return "\n".join([*self.header(), *(line.text(self.mesh) for line in self.lines)]) + "\n"


def captured_text(captured: Captured) -> str:
    """A graph in global shapes, before it is partitioned: the user's placements are those of inputs and outputs."""
    graph = captured.graph.graph
    inputs = [(i.kind, i.name) for i in captured.inputs]
    outputs = [(o.kind, o.name, o.spec) for o in captured.outputs]
    specs = iter(i.spec for i in captured.inputs)
    lines = [dataclasses.replace(k, spec=next(specs)) if k.op in INPUTS and not k.depth else k
             for k in _lines(graph, inputs, outputs, {}, 0)]  # fmt: skip
    return str(Text(captured.name, captured.mesh, "", tuple(lines)))


def program_text(local: Partitioned) -> str:
    """The whole program."""
    return str(Text.of(local))
