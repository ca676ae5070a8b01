"""Integers that depend on a device's place or on sizes: sympy expressions of coordinates ``c_<axis>`` and dims.

A local size or offset is an ``int`` whenever every device agrees on it, and a sympy expression otherwise.
Uneven pieces follow ``torch.chunk``: with ``k = ceil(n / parts)`` the piece of coordinate ``c`` starts at
``min(n, c * k)`` and holds ``max(0, min(k, n - c * k))`` elements.  Both are kept as the uninterpreted
functions ``chunk`` and ``start`` (sympy's own ``Min``/``Max`` take milliseconds to build), which evaluate as
soon as their arguments are numbers.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import sympy

IntExpr: TypeAlias = int | sympy.Expr


def piece(n: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, length)`` of piece ``index`` of ``n`` elements cut into ``parts`` as ``torch.chunk`` does."""
    step = -(-n // parts)
    begin = min(n, index * step)
    return begin, min(step, n - begin)


def pieces(n: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """``(begin, end)`` of every piece of ``n`` elements cut into ``parts``, then each piece again, and so on."""
    cut = [(0, n)]
    for k in parts:
        cut = [(b + begin, b + begin + size) for b, e in cut for begin, size in (piece(e - b, k, i) for i in range(k))]
    return cut


class chunk(sympy.Function):
    """``chunk(n, parts, c)``: the length of piece ``c``."""

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, n: sympy.Expr, parts: sympy.Expr, c: sympy.Expr) -> sympy.Expr | None:
        if n.is_Integer and parts.is_Integer:
            if n % parts == 0:
                return n / parts
            if c.is_Integer:
                return sympy.Integer(piece(int(n), int(parts), int(c))[1])
        return None


class start(sympy.Function):
    """``start(n, parts, c)``: the offset of piece ``c``."""

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, n: sympy.Expr, parts: sympy.Expr, c: sympy.Expr) -> sympy.Expr | None:
        if n.is_Integer and parts.is_Integer:
            if n % parts == 0:
                return n / parts * c
            if c.is_Integer:
                return sympy.Integer(piece(int(n), int(parts), int(c))[0])
        return None


class entry(sympy.Function):
    """``entry(i, v0, v1, ...)``: the ``i``-th of the values."""

    is_integer = True

    @classmethod
    def eval(cls, i: sympy.Expr, *values: sympy.Expr) -> sympy.Expr | None:
        return values[int(i)] if i.is_Integer else None


def table(values: Sequence[int], place: IntExpr) -> IntExpr:
    """``values[place]``: a number where all are equal, a line where they lie on one."""
    first, step = values[0], values[1] - values[0] if len(values) > 1 else 0
    if all(v == first + step * i for i, v in enumerate(values)):
        return first + step * place if step else first
    return entry(place, *values)


class real(sympy.Function):
    """``real(x)``: ``x`` as a floating-point number."""

    is_real = True


_COORDINATES: dict[str, sympy.Symbol] = {}


def coordinate(axis: str) -> sympy.Symbol:
    """The symbol ``c_<axis>``: a device's place on mesh axis ``axis``, in ``0 .. size - 1``."""
    if axis not in _COORDINATES:
        _COORDINATES[axis] = sympy.Symbol(f"c_{axis}", integer=True, nonnegative=True)
    return _COORDINATES[axis]


def is_data_size(name: str) -> bool:
    """Whether a dim is one whose size the program's data decide: ``u0``, ``u1``..."""
    return name[:1] == "u" and name[1:].isdigit()


@functools.cache
def dim(name: str) -> sympy.Symbol:
    """The symbol of a dynamic dim: an integer, the same on all devices; positive, unless data decide it."""
    return sympy.Symbol(name, integer=True, **{"nonnegative" if is_data_size(name) else "positive": True})


def primes(least: Sequence[int], static: Collection[int]) -> list[int]:
    """Distinct primes, each at least as large as asked for, of which no number in ``static`` is a multiple."""
    found: list[int] = []
    for n in least:
        p = sympy.nextprime(max(n, 11) - 1)
        while p in found or any(k % p == 0 for k in static):
            p = sympy.nextprime(p)
        found.append(int(p))
    return found


def sized(tree: Any, sizes: Mapping[str, int]) -> Any:
    """``tree`` with every dynamic dim replaced by its size; coordinates stay."""
    if isinstance(tree, sympy.Basic):
        found = tree.xreplace({s: sympy.Integer(sizes[s.name]) for s in tree.free_symbols if s.name in sizes})
        return number(found)
    if isinstance(tree, (list, tuple)):
        return type(tree)(sized(x, sizes) for x in tree)
    if isinstance(tree, dict):
        return {k: sized(v, sizes) for k, v in tree.items()}
    return tree


def number(value: Any) -> Any:
    """A sympy number or truth value as Python's; others as they are."""
    if isinstance(value, real) and value.args[0].is_number:
        return float(value.args[0])
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_Integer else value


def length(n: IntExpr, parts: int, axis: str) -> IntExpr:
    """The local size of ``n`` elements cut into ``parts`` along mesh axis ``axis``."""
    if parts == 1:
        return n
    if isinstance(n, int) and n % parts == 0:
        return n // parts
    return chunk(n, parts, coordinate(axis))


def offset(n: IntExpr, parts: int, axis: str) -> IntExpr:
    """The offset of the local piece of ``n`` elements cut into ``parts`` along mesh axis ``axis``."""
    if parts == 1 or n == 0:
        return 0
    if isinstance(n, int) and n % parts == 0:
        return (n // parts) * coordinate(axis)
    return start(n, parts, coordinate(axis))


def bind(value: Any, coordinates: Mapping[str, int]) -> Any:
    """``value`` with every coordinate replaced by its number (an axis not named counts as 0)."""
    if not isinstance(value, sympy.Basic):
        return value
    dynamic = [s.name for s in value.free_symbols if not s.name.startswith("c_")]
    if dynamic:
        raise ValueError(f"{value}: no size is given for {', '.join(dynamic)}")
    names = {s: coordinates.get(s.name.removeprefix("c_"), 0) for s in value.free_symbols}
    return int(value.xreplace({s: sympy.Integer(v) for s, v in names.items()}))


def bind_tree(tree: Any, coordinates: Mapping[str, int]) -> Any:
    """`bind` on every leaf of nested lists, tuples, slices and dicts; other leaves are left alone."""
    if isinstance(tree, sympy.Basic):
        return bind(tree, coordinates)
    if isinstance(tree, (list, tuple)):
        return type(tree)(bind_tree(x, coordinates) for x in tree)
    if isinstance(tree, dict):
        return {k: bind_tree(v, coordinates) for k, v in tree.items()}
    return tree


def symbols_in(tree: Any) -> set[sympy.Symbol]:
    """The coordinates that occur in ``tree``."""
    if isinstance(tree, sympy.Basic):
        return set(tree.free_symbols)
    if isinstance(tree, (list, tuple)):
        return set().union(*map(symbols_in, tree))
    if isinstance(tree, dict):
        return symbols_in(list(tree.values()))
    return set()


_FUNCTIONS = {
    f.__name__: f
    for f in (chunk, start, entry, real, sympy.Min, sympy.Max, sympy.Mod, sympy.floor, sympy.ceiling, sympy.sqrt)
} | {"Eq": sympy.Eq, "Ne": sympy.Ne}
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Invert: operator.invert,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def parse(text: str, dims: Collection[str] | None = ()) -> Any:
    """The expression of coordinates and of ``dims`` (None: any name's) that prints as ``text``.

    Raises ValueError for anything else."""

    def read(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return read(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return sympy.Integer(node.value)
        if isinstance(node, ast.Name) and node.id.startswith("c_"):
            return coordinate(node.id.removeprefix("c_"))
        if isinstance(node, ast.Name) and (dims is None or node.id in dims):
            return dim(node.id)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in _OPERATORS:
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
            return _OPERATORS[type(node.op)](*map(read, operands))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return _OPERATORS[type(node.ops[0])](read(node.left), read(node.comparators[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*map(read, node.args))
        raise ValueError(f"{text!r} is no expression of coordinates")

    try:
        return number(read(ast.parse(text, mode="eval")))
    except SyntaxError:
        raise ValueError(f"{text!r} is no expression of coordinates") from None
