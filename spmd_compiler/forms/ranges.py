"""Ranges of a dim: which of them a piece holds, reads and lacks."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import Range, sent
from ..emit import Emit, Local


class Several:
    """Ranges of ``dim`` that each device wants, each by itself: what it lacks travels once, however often it is wanted.

    ``have`` and ``want`` are by piece number, as `Emit.fetch` takes them; what nobody has is 0.
    """

    def __init__(
        self, e: Emit, dim: int, factor: str, have: Sequence[Range], want: Sequence[Sequence[Range]]
    ) -> None:  # fmt: skip
        self.e, self.dim, self.factor, self.have, self.want = e, dim, factor, have, want
        low, high = have[0][0], have[-1][1]
        self.real = [[(min(max(b, low), high), max(min(end, high), low)) for b, end in w] for w in want]
        unions = [union(w) for w in self.real]
        width = max(len(u) for u in unions)
        self.unions = [[*u, *[(low, low)] * (width - len(u))] for u in unions]
        self.travels = any(sent(have, self.unions))

    def fetch(self, x: Local) -> Local:
        return self.e.fetch(x, self.dim, self.factor, self.have, self.unions) if self.travels else x

    def parts(self, x: Local) -> list[Local]:
        """The ranges, of what `fetch` gave."""
        held = self.unions if self.travels else [[h] for h in self.have]
        whole = [(0, sum(end - b for b, end in u)) for u in held]
        made = []
        for k in range(len(self.want[0])):
            real, want = ([r[k] for r in each] for each in (self.real, self.want))
            at = [within(u, *r) for u, r in zip(held, real, strict=True)]
            part = self.e.crop(x, self.dim, self.factor, whole, at)
            real = [r if r[0] < r[1] else (w[0], w[0]) for r, w in zip(real, want, strict=True)]
            made.append(self.e.crop(part, self.dim, self.factor, real, want))
        return made


def union(ranges: Sequence[Range]) -> list[Range]:
    """The same elements in ranges that ascend and do not touch (one empty range of none)."""
    found: list[Range] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found or [(0, 0)]


def within(held: Sequence[Range], begin: int, end: int) -> Range:
    """Where a range is among ranges that stand one after the other, one of which holds it."""
    at = 0
    for low, high in held:
        if low <= begin < end <= high:
            return at + begin - low, at + end - low
        at += high - low
    return 0, 0


def stepped(e: Emit, x: Local, dim: int, factor: str, n: int, begin: int, step: int, size: int) -> Local:
    """The device's piece of the elements ``begin, begin + step, ...`` (``size`` of them) of a dim of ``n``."""

    def first(at: int) -> int:
        """How many of them come before an element."""
        return min(max(-((begin - at) // step), 0), size)

    held = e.pieces(factor, n)
    have = [(first(b), first(end)) for b, end in held]
    at = [(begin + i * step - b, begin + (j - 1) * step + 1 - b) if i < j else (0, 0)
          for (i, j), (b, _) in zip(have, held, strict=True)]  # fmt: skip
    x = e.cut(x, dim, factor, at, step)
    return e.fetch(x, dim, factor, have, [[w] for w in e.pieces(factor, size)])


def around(begin: int, size: int, n: int, count: int) -> list[Range]:
    """The ``count`` ranges (some empty) of a dim of ``n`` that a range of its endless repetition falls into."""
    found = []
    for _ in range(count):
        at = begin % n
        taken = min(size, n - at)
        found.append((at, at + taken))
        begin, size = begin + taken, size - taken
    return found
