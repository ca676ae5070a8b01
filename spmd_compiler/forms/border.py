"""Borders: a dim that goes on with its own elements, reflected, repeated, or from its other end.

*Positions* count from the first element of the dim: those before it are negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives import Range
from ..emit import Emit, Local
from .ranges import Several


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

    def laid(self, x: Local, dim: int, k: int, count: Any) -> Local:
        """Elements as the ``count`` positions of one side."""
        if k == 1 or self.mode == "circular":
            return x
        if self.mode == "reflect":
            return x.flip([dim])
        return x.expand([count if d == dim else -1 for d in range(x.ndim)])

    def gathered(self, x: Local, dim: int, k: int) -> Local:
        """The adjoint of `laid`."""
        if k == 1 or self.mode == "circular":
            return x
        if self.mode == "reflect":
            return x.flip([dim])
        return x.sum([dim], True)


def padded_positions(e: Emit, factor: str, border: Border) -> list[Range]:
    """Those of each piece of what is padded."""
    padded = border.before + border.n + border.after
    return [(b - border.before, end - border.before) for b, end in e.pieces(factor, padded)]


class Extension:
    """The positions ``spans`` (by piece number) of a dim of which each device has its piece."""

    def __init__(self, e: Emit, dim: int, factor: str, border: Border, spans: Sequence[Range]) -> None:
        self.e, self.dim, self.factor, self.border = e, dim, factor, border
        sides = [[border.side(k, *s) for s in spans] for k in range(3)]
        self.sides = {k: s for k, s in enumerate(sides) if k == 1 or any(b < end for b, end in s)}
        want = [[border.source(k, *s[i]) for k, s in self.sides.items()] for i in range(len(spans))]
        self.several = Several(e, dim, factor, e.pieces(factor, border.n), want)

    def lay(self, x: Local) -> Local:
        """The positions, of what `Several.fetch` gave."""
        e, made = self.e, []
        for part, (k, side) in zip(self.several.parts(x), self.sides.items(), strict=True):
            made.append(self.border.laid(part, self.dim, k, e.length(self.factor, side)))
        return e.cat(made, self.dim)


def extended(x: Local, found: Sequence[Extension]) -> Local:
    """All of them: what is laid out does not travel."""
    for f in found:
        x = f.several.fetch(x)
    for f in found:
        x = f.lay(x)
    return x


def folded(
    e: Emit, parts: Mapping[int, Local], dim: int, factor: str, border: Border, reads: Sequence[Sequence[Range]]
) -> Local:
    """The sums over the positions of each element of the local piece; ``parts[k]`` are those ``reads[i][k]``."""
    made: Local | None = None
    for k, part in parts.items():
        source = [border.source(k, *r[k]) for r in reads]
        part = e.crop(border.gathered(part, dim, k), dim, factor, source, e.pieces(factor, border.n))
        made = part if made is None else made + part
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
