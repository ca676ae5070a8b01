"""Parts of a dim, and dims put together of parts: slices, pads, concatenations, turns.

The dim is a window factor, its sizes before and after cut in as many pieces; each device fetches the range of the
operand that its piece of the result lacks (`ir.Emit.fetch`).  Of what is too small to be cut, a single element, the
device that holds it contributes it and the others zero: a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range, sent
from ..ir import Emit, operands, results
from ..rules import Rule, define, dims, fit
from ..symbolic import table
from .reduce import argument
from .view import moved

aten, prims = torch.ops.aten, torch.ops.prims


def cut(e: Emit, x: Node, dim: int, factor: str, ranges: Sequence[Range], step: int = 1) -> Node:
    """The local elements ``begin, begin + step, ...`` before ``end`` of ``dim``; ranges by piece number."""
    ends = [table([r[i] for r in ranges], e.place(factor)) for i in (0, 1)]
    return e.call(aten.slice.Tensor, x, dim, *ends, step)


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

    def fetch(self, x: Node) -> Node:
        return self.e.fetch(x, self.dim, self.factor, self.have, self.unions) if self.travels else x

    def parts(self, x: Node) -> list[Node]:
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


def part(e: Emit, x: Node, dim: int, factor: str, n: int, begin: int, size: int) -> Node:
    """The device's piece of ``x[begin : begin + size]``, of a dim of ``n`` elements, or its share in one element."""
    have = [(b - begin, end - begin) for b, end in e.pieces(factor, n)]
    want = e.pieces(factor, size)
    if size == 1:
        return e.crop(x, dim, factor, have, [(0, 1)] * len(have))
    return e.fetch(x, dim, factor, have, [[w] for w in want])


def parts(node: Node, dim: int, ranges: Sequence[Range], form: Any) -> Rule | None:
    """The rule of results that are ``(begin, size)`` of dim ``dim`` of the operand; ``form`` where that is whole."""
    x = node.args[0].meta["val"]
    n, factor = x.shape[dim], f"d{dim}"
    old, rest = dims("d", x.dim()), dims("d", x.dim(), [dim])
    if any(m == 0 or (m == 1 and x.dtype == torch.bool) for _, m in ranges):
        return moved(node, [rest], [rest] * len(ranges), form=form)

    def fetched(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Any:
        if not e.axes(factor):
            return form(e, x, *args, **kwargs)
        made = tuple(part(e, x, dim, factor, n, *r) for r in ranges)
        return made if isinstance(node.meta["val"], (tuple, list)) else made[0]

    return moved(node, [old], [old if m > 1 else rest for _, m in ranges], windows=[factor], form=fetched)


def same(e: Emit, *args: Any, **kwargs: Any) -> Any:
    return e.call(e.node.target, *args, **kwargs)


def every(begin: int, step: int, size: int, pieces: Sequence[Range]) -> list[Range]:
    """Which of the elements ``begin, begin + step, ...`` (``size`` of them) stand in each piece, by their numbers."""

    def first(at: int) -> int:
        return min(max(-((begin - at) // step), 0), size)

    return [(first(b), first(e)) for b, e in pieces]


def local(begin: int, step: int, numbers: Sequence[Range], pieces: Sequence[Range]) -> list[Range]:
    """Where `every`'s elements stand in their pieces."""
    found = []
    for (i, j), (b, _) in zip(numbers, pieces, strict=True):
        at = begin + i * step - b if i < j else 0
        found.append((at, at + (j - i - 1) * step + 1 if i < j else at))
    return found


def slice_of(node: Node, n: int) -> tuple[int, int, int]:
    """The dim, begin and step of a slice (or of what a slice is set to), of a dim of ``n`` elements."""
    begin = argument(node, "start") or 0
    begin = min(max(begin + n if begin < 0 else begin, 0), n)
    return argument(node, "dim") % node.args[0].meta["val"].dim(), begin, argument(node, "step")


# --- one part -----------------------------------------------------------------------------------------------


@define(aten.slice.Tensor)
def _(node: Node) -> Rule | None:
    x, out = node.args[0].meta["val"], node.meta["val"]
    dim = argument(node, "dim") % x.dim()
    n, m = x.shape[dim], out.shape[dim]
    _, begin, step = slice_of(node, n)
    old, factor = dims("d", x.dim()), f"d{dim}"
    if n == m:
        return moved(node, [old], [old], form=lambda e, x, *_, **__: e.call(aten.alias.default, x))
    if step == 1 or m < 2:
        return parts(node, dim, [(begin, m)], same)

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        if not e.axes(factor):
            return same(e, x, *args, **kwargs)
        pieces = e.pieces(factor, n)
        have = every(begin, step, m, pieces)
        x = cut(e, x, dim, factor, local(begin, step, have, pieces), step)
        return e.fetch(x, dim, factor, have, [[w] for w in e.pieces(factor, m)])

    return moved(node, [old], [old], windows=[factor], form=form)


@define(aten.split.Tensor, aten.split_with_sizes.default, aten.split_copy.Tensor)
def _(node: Node) -> Rule | None:
    dim = argument(node, "dim") % node.args[0].meta["val"].dim()
    ranges, begin = [], 0
    for r in results(node):
        assert r is not None
        ranges.append((begin, r.shape[dim]))
        begin += r.shape[dim]
    return parts(node, dim, ranges, same)


@define(aten.select.int, aten.unbind.int)
def _(node: Node) -> Rule | None:
    """One element a result: whoever holds it contributes it."""
    x = node.args[0].meta["val"]
    dim = argument(node, "dim") % x.dim()
    n, factor, made = x.shape[dim], f"d{dim}", results(node)
    one = node.target is aten.select.int
    at = [argument(node, "index") % n] if one else range(n)
    old = dims("d", x.dim(), [dim] if x.dtype == torch.bool else [])

    def form(e: Emit, x: Node, *args: Any) -> Any:
        if not e.axes(factor):
            return same(e, x, *args)
        found = tuple(e.call(aten.squeeze.dims, part(e, x, dim, factor, n, i, 1), [dim]) for i in at)
        return found[0] if one else found

    return moved(node, [old], [old[:dim] + old[dim + 1 :]] * len(made), form=form)


# --- a part put in -------------------------------------------------------------------------------------------


@define(aten.slice_scatter.default, aten.select_scatter.default)
def _(node: Node) -> Rule | None:
    x, source = (o.meta["val"] for o in operands(node))
    selected = node.target is aten.select_scatter.default
    if selected:
        dim, step = argument(node, "dim") % x.dim(), 1
        n = x.shape[dim]
        begin, m = argument(node, "index") % n, 1
    else:
        n = x.shape[argument(node, "dim") % x.dim()]
        dim, begin, step = slice_of(node, n)
        m = source.shape[dim]
    old, rest, factor = dims("d", x.dim()), dims("d", x.dim(), [dim]), f"d{dim}"
    if n == m and not selected:
        return moved(node, [old, old], [old], form=lambda e, x, source, *_, **__: e.call(aten.alias.default, source))

    def form(e: Emit, x: Node, source: Node, *args: Any, **kwargs: Any) -> Node:
        if not e.axes(factor):
            return same(e, x, source, *args, **kwargs)
        if selected:
            source = e.call(aten.unsqueeze.default, source, dim)
        pieces = e.pieces(factor)
        want = every(begin, step, m, pieces)
        if m > 1:
            source = e.fetch(source, dim, factor, e.pieces(factor, m), [[w] for w in want])
        else:
            source = cut(e, source, dim, factor, want)
        ends = [table([r[i] for r in local(begin, step, want, pieces)], e.place(factor)) for i in (0, 1)]
        return e.call(aten.slice_scatter.default, x, source, dim, *ends, step)

    small = rest[:dim] + rest[dim + 1 :] if selected else old if m > 1 else rest
    return moved(node, [old, small], [old], windows=[factor] if m > 1 else [], form=form)


# --- around and beside ---------------------------------------------------------------------------------------


@define(aten.constant_pad_nd.default)
def _(node: Node) -> Rule | None:
    """Padding with zeros is linear."""
    x, pad = node.args[0].meta["val"], node.args[1]
    value = argument(node, "value", 0)
    pairs = {x.dim() - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    around = {dim: pair for dim, pair in pairs.items() if any(pair)}
    old = dims("d", x.dim())

    def form(e: Emit, x: Node, *args: Any, **kwargs: Any) -> Node:
        left = [0 if e.axes(f"d{len(old) - 1 - i // 2}") else n for i, n in enumerate(pad)]
        if any(left) or not around:
            x = e.call(aten.constant_pad_nd.default, x, left, value)
        for dim, (before, _) in around.items():
            factor, n = f"d{dim}", node.args[0].meta["val"].shape[dim]
            if e.axes(factor):
                have = [(b + before, end + before) for b, end in e.pieces(factor, n)]
                x = e.fetch(x, dim, factor, have, [[w] for w in e.pieces(factor)], value)
        return x

    return fit(
        node, [old], [old], [[0]] if value == 0 or not around else [], windows=[f"d{d}" for d in around], form=form,
    )  # fmt: skip


@define(aten.cat.default, prims.cat.default)
def _(node: Node) -> Rule | None:
    given = [o.meta["val"] for o in operands(node)]
    if any(g.dim() != given[0].dim() for g in given) or len({g.dtype for g in given}) > 1:
        return None
    ndim = given[0].dim()
    dim = argument(node, "dim") % ndim
    old, rest, factor = dims("d", ndim), dims("d", ndim, [dim]), f"d{dim}"

    def form(e: Emit, xs: Sequence[Node], *args: Any) -> Node:
        if not e.axes(factor):
            return same(e, list(xs), *args)
        made, begin = [], 0
        for x, g in zip(xs, given, strict=True):
            n = g.shape[dim]
            want = [(min(max(b - begin, 0), n), min(max(end - begin, 0), n)) for b, end in e.pieces(factor)]
            if n > 1:
                x = e.fetch(x, dim, factor, e.pieces(factor, n), [[w] for w in want])
            else:
                x = cut(e, x, dim, factor, want)
            made.append(x)
            begin += n
        return e.call(aten.cat.default, made, dim)

    return moved(node, [old if g.shape[dim] > 1 else rest for g in given], [old], windows=[factor], form=form)


# --- turns --------------------------------------------------------------------------------------------------


@define(aten.flip.default, prims.rev.default)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    turned = [d % x.dim() for d in node.args[1]] if x.dim() else []

    def form(e: Emit, x: Node, listed: Sequence[int]) -> Node:
        for d in turned:
            if e.axes(f"d{d}"):
                pieces, n = e.pieces(f"d{d}"), e.sizes[f"d{d}"]
                x = e.fetch(x, d, f"d{d}", pieces, [[(n - end, n - b)] for b, end in pieces])
        return same(e, x, listed)

    return moved(node, [dims("d", x.dim())], [dims("d", x.dim())], windows=[f"d{d}" for d in turned], form=form)


def around(begin: int, size: int, n: int, count: int) -> list[Range]:
    """The ``count`` ranges (some empty) of a dim of ``n`` that a range of its endless repetition falls into."""
    found = []
    for _ in range(count):
        at = begin % n
        taken = min(size, n - at)
        found.append((at, at + taken))
        begin, size = begin + taken, size - taken
    return found


@define(aten.repeat.default)
def _(node: Node) -> Rule | None:
    x, times = node.args[0].meta["val"], node.args[1]
    lead = len(times) - x.dim()
    more = [d for d in range(x.dim()) if times[lead + d] > 1 and x.shape[d] > 1]
    old = dims("d", x.dim(), [d for d in range(x.dim()) if times[lead + d] != 1 and d not in more])

    def form(e: Emit, x: Node, times: Sequence[int]) -> Node:
        for d in more:
            if e.axes(f"d{d}"):
                n, count = node.args[0].meta["val"].shape[d], times[lead + d]
                want = [around(b, end - b, n, count + 1) for b, end in e.pieces(f"d{d}")]
                x = e.fetch(x, d, f"d{d}", e.pieces(f"d{d}", n), want)
                times = [1 if i == lead + d else t for i, t in enumerate(times)]
        return same(e, x, list(times))

    return moved(node, [old], [((),) * lead + old], windows=[f"d{d}" for d in more], form=form)
