"""Padding that continues a dim by its own elements: reflected, repeated, or from its other end.

``spmd::pad(x, pad, mode)`` pads the last dims as ``torch.nn.functional.pad`` does in the modes ``reflect``,
``replicate`` and ``circular``; ``spmd::pad_backward`` is its adjoint.  *Positions* count from the first element of the
dim: those before it are negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..collectives import Range
from ..ir import Emit
from ..rules import Rule, define, dims, fit
from ..symbolic import table
from .ranges import Several
from .view import moved

aten = torch.ops.aten

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define("pad(Tensor x, int[] pad, str mode) -> Tensor")
_LIB.define("pad_backward(Tensor grad, int[] pad, str mode) -> Tensor")
pad, pad_backward = torch.ops.spmd.pad.default, torch.ops.spmd.pad_backward.default


@dataclass(frozen=True)
class Border:
    """How a dim of ``n`` elements goes on for ``before`` and ``after`` positions (a negative number cuts it).

    A range of positions has three *sides*: what is before the dim, in it, and behind it.
    """

    mode: str
    n: int
    before: int
    after: int

    def places(self, device: torch.device) -> Tensor:
        """The element at each position."""
        at = torch.arange(-self.before, self.n + self.after, device=device)
        if self.mode == "circular":
            return at.remainder(self.n)
        if self.mode == "replicate":
            return at.clamp(0, self.n - 1)
        return (self.n - 1) - ((self.n - 1) - at.abs()).abs()

    def side(self, k: int, begin: int, end: int) -> Range:
        """The positions of a range on one side."""
        low, high = ((-self.before, 0), (0, self.n), (self.n, self.n + self.after))[k]
        low, high = max(low, -self.before), min(high, self.n + self.after)
        begin = min(max(begin, low), max(high, low))
        return begin, max(begin, min(end, high))

    def source(self, k: int, begin: int, end: int) -> Range:
        """The elements of the dim at positions of one side; of no repeated ones one that does not exist."""
        if k == 1:
            return begin, end
        if self.mode == "replicate":
            at = self.n if begin == end else 0 if k == 0 else self.n - 1
            return at, at + 1
        return (self.n, self.n) if begin == end else self._turned(k, begin, end)

    def readers(self, k: int, begin: int, end: int) -> Range:
        """The positions of one side at which elements ``begin .. end - 1`` are."""
        if k == 1:
            return self.side(1, begin, end)
        if self.mode == "replicate":
            here = begin <= (0 if k == 0 else self.n - 1) < end
            return self.side(k, -self.before, self.n + self.after) if here else (0, 0)
        return self.side(k, *self._turned(k, begin, end, back=True)) if begin < end else (0, 0)

    def _turned(self, k: int, begin: int, end: int, back: bool = False) -> Range:
        if self.mode == "circular":
            shift = self.n if (k == 0) != back else -self.n
            return begin + shift, end + shift
        axis = 0 if k == 0 else 2 * (self.n - 1)
        return axis - end + 1, axis - begin + 1

    def laid(self, e: Emit, x: Node, dim: int, k: int, count: Any) -> Node:
        """Elements as the ``count`` positions of one side."""
        if k == 1 or self.mode == "circular":
            return x
        if self.mode == "reflect":
            return e.call(aten.flip.default, x, [dim])
        size = list(x.meta["val"].shape)
        return e.call(aten.expand.default, x, [count if d == dim else -1 for d in range(len(size))])

    def gathered(self, e: Emit, x: Node, dim: int, k: int) -> Node:
        """The adjoint of `laid`."""
        if k == 1 or self.mode == "circular":
            return x
        if self.mode == "reflect":
            return e.call(aten.flip.default, x, [dim])
        return e.call(aten.sum.dim_IntList, x, [dim], True)


def positions(e: Emit, factor: str, border: Border) -> list[Range]:
    """Those of each piece of what is padded."""
    padded = border.before + border.n + border.after
    return [(b - border.before, end - border.before) for b, end in e.pieces(factor, padded)]


def sizes(e: Emit, factor: str, ranges: Sequence[Range]) -> Any:
    return table([end - b for b, end in ranges], e.place(factor))


class Extension:
    """The positions ``spans`` (by piece number) of a dim of which each device has its piece."""

    def __init__(self, e: Emit, dim: int, factor: str, border: Border, spans: Sequence[Range]) -> None:
        self.e, self.dim, self.factor, self.border = e, dim, factor, border
        sides = [[border.side(k, *s) for s in spans] for k in range(3)]
        self.sides = {k: s for k, s in enumerate(sides) if k == 1 or any(b < end for b, end in s)}
        want = [[border.source(k, *s[i]) for k, s in self.sides.items()] for i in range(len(spans))]
        self.several = Several(e, dim, factor, e.pieces(factor, border.n), want)

    def lay(self, x: Node) -> Node:
        """The positions, of what `Several.fetch` gave."""
        e, made = self.e, []
        for part, (k, side) in zip(self.several.parts(x), self.sides.items(), strict=True):
            made.append(self.border.laid(e, part, self.dim, k, sizes(e, self.factor, side)))
        return made[0] if len(made) == 1 else e.call(aten.cat.default, made, self.dim)


def extended(x: Node, found: Sequence[Extension]) -> Node:
    """All of them: what is laid out does not travel."""
    for f in found:
        x = f.several.fetch(x)
    for f in found:
        x = f.lay(x)
    return x


def folded(
    e: Emit, parts: Mapping[int, Node], dim: int, factor: str, border: Border, reads: Sequence[Sequence[Range]]
) -> Node:
    """The sums over the positions of each element of the local piece; ``parts[k]`` are those ``reads[i][k]``."""
    made: Node | None = None
    for k, part in parts.items():
        source = [border.source(k, *r[k]) for r in reads]
        part = e.crop(border.gathered(e, part, dim, k), dim, factor, source, e.pieces(factor, border.n))
        made = part if made is None else e.call(aten.add.Tensor, made, part)
    assert made is not None
    return made


def read(e: Emit, factor: str, border: Border) -> tuple[list[list[Range]], list[int]]:
    """The positions of each piece's elements, and the sides on which any piece has some."""
    reads = [[border.readers(k, *r) for k in range(3)] for r in e.pieces(factor, border.n)]
    return reads, [k for k in range(3) if k == 1 or any(r[k][0] < r[k][1] for r in reads)]


def borders(shape: Sequence[int], given: Sequence[int], mode: str) -> dict[int, Border]:
    """By dim, of what is padded."""
    pairs = {len(shape) - 1 - i: (given[2 * i], given[2 * i + 1]) for i in range(len(given) // 2)}
    return {d: Border(mode, shape[d], *pair) for d, pair in sorted(pairs.items()) if any(pair)}


@define(pad)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    found = borders(x.shape, *node.args[1:])

    def form(e: Emit, x: Node, *_: Any) -> Node:
        return extended(x, [Extension(e, d, f"d{d}", b, positions(e, f"d{d}", b)) for d, b in found.items()])

    whole = dims("d", x.dim())
    return moved(node, [whole], [whole], windows=[f"d{d}" for d in found], form=form)


@define(pad_backward)
def _(node: Node) -> Rule | None:
    x = node.meta["val"]
    found = borders(x.shape, *node.args[1:])

    def form(e: Emit, grad: Node, *_: Any) -> Node:
        for d, b in found.items():
            factor = f"d{d}"
            reads, used = read(e, factor, b)
            several = Several(e, d, factor, positions(e, factor, b), [[r[k] for k in used] for r in reads])
            parts = several.parts(several.fetch(grad))
            grad = folded(e, dict(zip(used, parts, strict=True)), d, factor, b, reads)
        return grad

    whole = dims("d", x.dim())
    return fit(node, [whole], [whole], [[0]], windows=[f"d{d}" for d in found], form=form)


# --- the operators themselves ---------------------------------------------------------------------------------


def _pad(x: Tensor, given: Sequence[int], mode: str) -> Tensor:
    for d, b in borders(x.shape, given, mode).items():
        x = x.index_select(d, b.places(x.device))
    return x


def _inner(shape: Sequence[int], given: Sequence[int]) -> list[int]:
    """The shape of what was padded."""
    made = list(shape)
    for i in range(len(given) // 2):
        made[-1 - i] -= given[2 * i] + given[2 * i + 1]
    return made


def _pad_backward(grad: Tensor, given: Sequence[int], mode: str) -> Tensor:
    for d, b in borders(_inner(grad.shape, given), given, mode).items():
        shape = list(grad.shape)
        shape[d] = b.n
        grad = grad.new_zeros(shape).index_add(d, b.places(grad.device), grad)
    return grad


def _shape(x: Tensor, given: Sequence[int], mode: str) -> Tensor:
    return x.new_empty(_inner(x.shape, [-n for n in given]))


_LIB.impl("pad", _pad, "CompositeExplicitAutograd")
_LIB.impl("pad_backward", _pad_backward, "CompositeExplicitAutograd")
torch.library.register_fake("spmd::pad", _shape, lib=_LIB)
torch.library.register_fake("spmd::pad_backward", lambda g, given, mode: g.new_empty(_inner(g.shape, given)), lib=_LIB)


def _saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.pad, ctx.mode = inputs


torch.library.register_autograd(
    "spmd::pad", lambda ctx, grad: (torch.ops.spmd.pad_backward(grad, ctx.pad, ctx.mode), None, None),
    setup_context=_saved, lib=_LIB,
)  # fmt: skip
