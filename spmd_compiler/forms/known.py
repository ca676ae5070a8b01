"""Indices known at compile time, such as those of resizing, reflection and rolling: which ranges a piece reads.

They are computed from positions alone.  A dim indexed so and the dim of the index along which it moves are one window
factor: pieces of one read ranges of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..collectives import Range
from ..emit import Emit, Local

aten = torch.ops.aten
MOST = 1 << 20  # elements of an index that is computed here
HALO = 8  # rows that two halves may read more than there are, however few there are


def known(node: Any) -> torch.Tensor | None:
    """The value of a node that depends on no input."""
    if not isinstance(node, Node):
        return None
    if "known" not in node.meta:
        node.meta["known"] = _computed(node)
    return node.meta["known"]


def _computed(node: Node) -> torch.Tensor | None:
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.numel() > MOST or node.op != "call_function":
        return None
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or "empty" in str(target):
        return None
    given = {n: known(n) for n in node.all_input_nodes}
    if any(v is None for v in given.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
    made = target(*args, **{k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()})
    return made if type(made) is torch.Tensor else None


def runs(places: Iterable[int], n: int) -> list[Range]:
    """At most two ranges that hold those of ``places`` that are in ``0 .. n - 1`` (an empty one where one does)."""
    found = sorted({p for p in places if 0 <= p < n})
    if not found:
        return [(0, 0), (0, 0)]
    gap, at = max(((b - a, i) for i, (a, b) in enumerate(itertools.pairwise(found))), default=(0, 0))
    if gap < 2:
        return [(found[0], found[-1] + 1), (0, 0)]
    return [(found[0], found[at] + 1), (found[at + 1], found[-1] + 1)]


class Tie:
    """Dim ``dim`` of a table of ``n`` rows, indexed along dim ``along`` of the index by known numbers.

    ``value`` has all dims of the index; ``size`` is its size in ``along``.
    """

    def __init__(self, dim: int, n: int, along: int, value: torch.Tensor, wrap: bool) -> None:
        self.wraps = wrap and bool((value < 0).any())
        if self.wraps:
            value = torch.where(value < 0, value + n, value)
        self.dim, self.n, self.along, self.size = dim, n, along, value.shape[along]
        self.factor, self.ndim = f"v{dim}", value.dim()
        self.rows = value.movedim(along, 0).reshape(self.size, -1).tolist()

    def read(self, begin: int, end: int) -> list[Range]:
        """The rows that a piece of the index reads."""
        return runs((r for row in self.rows[begin:end] for r in row), self.n)

    def readers(self, begin: int, end: int) -> list[Range]:
        """Where in the index rows ``begin .. end - 1`` are read."""
        return runs((i for i, row in enumerate(self.rows) if any(begin <= r < end for r in row)), self.size)

    def local_rows(self, e: Emit, x: Local) -> tuple[Local, list[list[Range]]]:
        """What the local piece of the index reads of a table."""
        want = trimmed([self.read(*r) for r in e.pieces(self.factor, self.size)])
        return e.fetch(x, self.dim, self.factor, e.pieces(self.factor, self.n), want), want

    def local_index(self, e: Emit, index: Local, want: Sequence[Sequence[Range]]) -> Local:
        """The index's local piece, counting in the rows that `local_rows` fetched."""
        index = e.cut(index, self._dim(index), self.factor, e.pieces(self.factor, self.size))
        if self.wraps:
            index = (index < 0).where(index + self.n, index)
        local = index - e.mine(self.factor, [w[0] for w in want])[0]
        if len(want[0]) > 1:
            second = [(w[1][0] if w[1][0] < w[1][1] else self.n, w[1][0] - (w[0][1] - w[0][0])) for w in want]
            begin, shift = e.mine(self.factor, second)
            local = (index >= begin).where(index - shift, local)
        last = [(0, max(sum(end - b for b, end in w) - 1, 0)) for w in want]
        return local.clamp(*e.mine(self.factor, last))

    def local_readers(self, e: Emit, index: Local, values: Local, dim: int) -> tuple[Local, Local]:
        """The index and the values (indexed by its dim ``dim``) that concern the local rows."""
        want = trimmed([self.readers(*r) for r in e.pieces(self.factor, self.n)])
        values = e.fetch(values, dim, self.factor, e.pieces(self.factor, self.size), want)
        at = self._dim(index)
        return e.cat([e.cut(index, at, self.factor, [w[k] for w in want]) for k in range(len(want[0]))], at), values

    def _dim(self, index: Local) -> int:
        """``along`` as a dim of the index itself, which may lack leading dims."""
        return self.along - (self.ndim - index.ndim)


def trimmed(want: list[list[Range]]) -> list[list[Range]]:
    """Without second ranges where all of them are empty."""
    return [w[:1] for w in want] if all(b == end for _, (b, end) in want) else want


def tie(dim: int, n: int, index: Any, ndim: int, wrap: bool) -> Tie | None:
    """The dim of the index along which pieces read least of a table's dim; None where each reads most of it."""
    value = known(index)
    if value is None or n < 2 or value.dtype not in (torch.int64, torch.int32):
        return None
    value = value.reshape([1] * (ndim - value.dim()) + list(value.shape))
    found: list[tuple[int, Tie]] = []
    for along in range(ndim):
        if (size := value.shape[along]) > 1:
            t = Tie(dim, n, along, value, wrap)
            half = -(-size // 2)
            read = sum(e - b for part in ((0, half), (half, size)) for b, e in t.read(*part))
            found.append((read, t))
    best = min(found, key=lambda f: f[0], default=None)
    return best[1] if best is not None and (2 * best[0] <= 3 * n or best[0] - n <= HALO) else None
