"""Windows over a dim, whose wide side (a convolution's input) and narrow one (its result) are cut in as many pieces.

Element ``o`` of the narrow side is tied to ``o * stride - pad + dilation * j`` of the wide, ``j < kernel``.  What is
computed on the narrow side *gathers* the span of its piece; what is computed on the wide side *covers* its piece by
the narrow elements that touch it.  The local op runs without padding on exactly that range.  Gradients of weights need
no more: over the covering range, with the other elements of the wide side as zeros, they add up to the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..collectives import Range
from ..emit import Emit, Local
from .border import Border, Extension, extended, folded, read
from .ranges import Several


@dataclass(frozen=True)
class Window:
    """One windowed dim: its place among the dims, its factor, the sizes of its two sides.

    ``border`` says how the wide side goes on where its padding is not zeros; ``pad`` is what is before it.
    """

    dim: int
    factor: str
    wide: int
    narrow: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    border: Border | None = dataclasses.field(default=None, kw_only=True)

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def span(self, begin: int, end: int) -> Range:
        """The wide elements, padding included, that narrow ones read; of none of them, one window of padding."""
        if begin >= end:
            return self.wide + self.pad, self.wide + self.pad + self.extent
        return begin * self.stride - self.pad, (end - 1) * self.stride - self.pad + self.extent

    def cover(self, begin: int, end: int) -> Range:
        """The narrow elements that read wide ones; where there are none, one beyond the end."""
        low = max(0, -((self.extent - 1 - begin - self.pad) // self.stride))
        high = min(self.narrow, (end - 1 + self.pad) // self.stride + 1)
        return (low, high) if begin < end and low < high else (self.narrow, self.narrow + 1)


def windows(wide: torch.Tensor, narrow: torch.Tensor, count: int, *args: Any) -> list[Window]:
    """Of the last ``count`` dims; ``args`` are kernel, stride, padding, dilation, as pooling takes them."""
    lead = wide.dim() - count
    each = [per_dim(a, count) for a in args]
    return [
        Window(lead + i, f"w{i}", wide.shape[lead + i], narrow.shape[lead + i], *(a[i] for a in each))
        for i in range(count)
    ]


def per_dim(given: int | Sequence[int], count: int) -> list[int]:
    """One number for each windowed dim, of one for all or of as many."""
    found = [given] if isinstance(given, int) else list(given)
    return found * count if len(found) == 1 else found


def among(e: Emit, found: Sequence[Window]) -> list[Window]:
    """The windows whose dims are sharded, or have a border of their own."""
    return [w for w in found if e.axes(w.factor) or w.border]


def gather(e: Emit, x: Local, found: Sequence[Window], fill: Any = 0) -> Local:
    """What the local narrow elements read, of the local wide ones.  Padding comes last: it need not travel."""
    inside: dict[Window, list[Range]] = {}
    longer = []
    for w in (apart := among(e, found)):
        span = [w.span(*r) for r in e.pieces(w.factor, w.narrow)]
        if w.border:
            low, high = -w.border.before, w.wide + w.border.after
            inside[w] = [(min(max(b, low), high), min(max(end, low), high)) for b, end in span]
            longer.append(Extension(e, w.dim, w.factor, w.border, inside[w]))
            continue
        inside[w] = span if w is apart[-1] else [(max(b, 0), max(b, 0, min(end, w.wide))) for b, end in span]
        x = e.fetch(x, w.dim, w.factor, e.pieces(w.factor, w.wide), [[r] for r in inside[w]], fill)
    x = extended(x, longer)
    for w in found:
        span = [w.span(*r) for r in e.pieces(w.factor, w.narrow)]
        x = e.crop(x, w.dim, w.factor, inside.get(w) or [(0, w.wide)], span, fill)
    return x


def covering(e: Emit, found: Sequence[Window]) -> list[list[Range]]:
    """For each window the ranges of the narrow side that cover the pieces of the wide."""
    return [[w.cover(*r) for r in e.pieces(w.factor, w.wide)] for w in found]


def cover(e: Emit, x: Local, found: Sequence[Window], fill: Any = 0) -> Local:
    """The narrow elements that cover the local wide ones, of the local narrow ones."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.fetch(x, w.dim, w.factor, e.pieces(w.factor, w.narrow), [[r] for r in ranges], fill)
    return x


def spread(e: Emit, x: Local, found: Sequence[Window], fill: Any = 0) -> Local:
    """The local wide elements, cut and padded to all that the covering narrow ones read."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.crop(x, w.dim, w.factor, e.pieces(w.factor, w.wide), [w.span(*r) for r in ranges], fill)
    return x


def settle(e: Emit, x: Local, found: Sequence[Window]) -> Local:
    """Of all wide elements that the covering narrow ones read the local ones."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.crop(x, w.dim, w.factor, [w.span(*r) for r in ranges], e.pieces(w.factor, w.wide))
    return x


def trim(e: Emit, x: Local, found: Sequence[Window]) -> Local:
    """Off with what stands for an empty narrow piece."""
    for w in found:
        x = e.emptied(x, w.dim, w.factor, w.narrow)
    return x


class Parts:
    """The wide elements of a piece where its border is: the three sides of their positions, one after the other.

    Each side is covered by narrow elements of its own, with zeros between, so that one call serves them all.
    """

    def __init__(self, e: Emit, w: Window, border: Border) -> None:
        self.e, self.w, self.border = e, w, border
        self.reads, self.used = read(e, w.factor, border)
        self.covers = [[w.cover(*r[k]) for k in self.used] for r in self.reads]
        self.gap = max(0, -(-w.extent // w.stride) - 1)  # narrow elements between two sides
        rest = (w.narrow, w.narrow + self.gap)
        want = [[r for c in each for r in (c, rest)][:-1] for each in self.covers]
        self.several = Several(e, w.dim, w.factor, e.pieces(w.factor, w.narrow), want)

    def cover(self, x: Local) -> Local:
        """The narrow elements, of what `Several.fetch` gave."""
        return self.e.cat(self.several.parts(x), self.w.dim)

    def spread(self, x: Local) -> Local:
        """What they read, of the local wide ones; zeros for others."""
        e, w, made = self.e, self.w, []
        have = e.pieces(w.factor, w.wide)
        for n, k in enumerate(self.used):
            reads = [r[k] for r in self.reads]
            part = e.crop(x, w.dim, w.factor, have, [self.border.source(k, *r) for r in reads])
            part = self.border.laid(part, w.dim, k, e.length(w.factor, reads))
            spans = [w.span(*c[n]) for c in self.covers]
            if n + 1 < len(self.used):
                spans = [(b, b + self._width(c[n])) for (b, _), c in zip(spans, self.covers, strict=True)]
            made.append(e.crop(part, w.dim, w.factor, reads, spans))
        return e.cat(made, w.dim)

    def settle(self, x: Local) -> Local:
        """The local wide elements' sums of what came of `spread`."""
        e, w, made = self.e, self.w, {}
        for n, k in enumerate(self.used):
            begin = [sum(map(self._width, c[:n])) for c in self.covers]
            spans = [w.span(*c[n]) for c in self.covers]
            side = [(b, b + high - low) for b, (low, high) in zip(begin, spans, strict=True)]
            part = e.cut(x, w.dim, w.factor, side)
            made[k] = e.crop(part, w.dim, w.factor, spans, [r[k] for r in self.reads])
        return folded(e, made, w.dim, w.factor, self.border, self.reads)

    def _width(self, cover: Range) -> int:
        """Wide elements from the first that a side's narrow ones read to the first of the next."""
        return (cover[1] - cover[0] + self.gap) * self.w.stride
