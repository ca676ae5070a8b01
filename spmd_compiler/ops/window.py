"""Windows over a dim, and convolutions: batch, channels and windowed dims may be sharded.

A windowed dim has a wide side (a convolution's input) and a narrow one (its result): element ``o`` of the narrow side
is tied to ``o * stride - pad + dilation * j`` of the wide, ``j < kernel``.  Both are one factor, cut in as many pieces.
What is computed on the narrow side *gathers* the span of its piece; what is computed on the wide side *covers* its
piece by the narrow elements that touch it.  The local op runs without padding on exactly that range.  Gradients of
weights need no more: over the covering range, with the other elements of the wide side as zeros, they add up to
the whole.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..collectives import Range
from ..ir import Emit, operands, results
from ..rules import Dims, Linear, Rule, define
from .forms import first
from .pad import Border, Extension, borders, extended, folded, read, sizes
from .ranges import Several, cut
from .reduce import argument

aten = torch.ops.aten


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


@dataclass(frozen=True)
class Adaptive(Window):
    """Windows that share the wide side evenly: ``o`` reads ``floor(o * wide / narrow)`` to
    ``ceil((o + 1) * wide / narrow)``."""

    def span(self, begin: int, end: int) -> Range:
        if begin >= end:
            return self.wide, self.wide + 1
        return begin * self.wide // self.narrow, -(-end * self.wide // self.narrow)

    def cover(self, begin: int, end: int) -> Range:
        if begin >= end:
            return self.narrow, self.narrow + 1
        return begin * self.narrow // self.wide, -(-end * self.narrow // self.wide)


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


def gather(e: Emit, x: Node, found: Sequence[Window], fill: Any = 0) -> Node:
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


def cover(e: Emit, x: Node, found: Sequence[Window], fill: Any = 0) -> Node:
    """The narrow elements that cover the local wide ones, of the local narrow ones."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.fetch(x, w.dim, w.factor, e.pieces(w.factor, w.narrow), [[r] for r in ranges], fill)
    return x


def spread(e: Emit, x: Node, found: Sequence[Window], fill: Any = 0) -> Node:
    """The local wide elements, cut and padded to all that the covering narrow ones read."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.crop(x, w.dim, w.factor, e.pieces(w.factor, w.wide), [w.span(*r) for r in ranges], fill)
    return x


def settle(e: Emit, x: Node, found: Sequence[Window]) -> Node:
    """Of all wide elements that the covering narrow ones read the local ones."""
    for w, ranges in zip(found, covering(e, found), strict=True):
        x = e.crop(x, w.dim, w.factor, [w.span(*r) for r in ranges], e.pieces(w.factor, w.wide))
    return x


def filled(e: Emit, x: Node, dim: int, factor: str, n: int) -> Node:
    """``x`` with one zero where its piece is empty: torch refuses to work on nothing."""
    pieces = e.pieces(factor, n)
    return e.crop(x, dim, factor, pieces, [(b, max(end, b + 1)) for b, end in pieces])


def emptied(e: Emit, x: Node, dim: int, factor: str, n: int) -> Node:
    """Undo `filled` in a result."""
    pieces = e.pieces(factor, n)
    return cut(e, x, dim, factor, [(0, end - b) for b, end in pieces]) if any(b == end for b, end in pieces) else x


def trim(e: Emit, x: Node, found: Sequence[Window]) -> Node:
    """Off with what stands for an empty narrow piece."""
    for w in found:
        x = emptied(e, x, w.dim, w.factor, w.narrow)
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

    def cover(self, x: Node) -> Node:
        """The narrow elements, of what `Several.fetch` gave."""
        parts = self.several.parts(x)
        return self.e.call(aten.cat.default, parts, self.w.dim) if len(parts) > 1 else parts[0]

    def spread(self, x: Node) -> Node:
        """What they read, of the local wide ones; zeros for others."""
        e, w, made = self.e, self.w, []
        have = e.pieces(w.factor, w.wide)
        for n, k in enumerate(self.used):
            reads = [r[k] for r in self.reads]
            part = e.crop(x, w.dim, w.factor, have, [self.border.source(k, *r) for r in reads])
            part = self.border.laid(e, part, w.dim, k, sizes(e, w.factor, reads))
            spans = [w.span(*c[n]) for c in self.covers]
            if n + 1 < len(self.used):
                spans = [(b, b + self._width(c[n])) for (b, _), c in zip(spans, self.covers, strict=True)]
            made.append(e.crop(part, w.dim, w.factor, reads, spans))
        return e.call(aten.cat.default, made, w.dim) if len(made) > 1 else made[0]

    def settle(self, x: Node) -> Node:
        """The local wide elements' sums of what came of `spread`."""
        e, w, made = self.e, self.w, {}
        for n, k in enumerate(self.used):
            begin = [sum(map(self._width, c[:n])) for c in self.covers]
            spans = [w.span(*c[n]) for c in self.covers]
            side = [(b, b + high - low) for b, (low, high) in zip(begin, spans, strict=True)]
            part = cut(e, x, w.dim, w.factor, side)
            made[k] = e.crop(part, w.dim, w.factor, spans, [r[k] for r in self.reads])
        return folded(e, made, w.dim, w.factor, self.border, self.reads)

    def _width(self, cover: Range) -> int:
        """Wide elements from the first that a side's narrow ones read to the first of the next."""
        return (cover[1] - cover[0] + self.gap) * self.w.stride


# --- convolution --------------------------------------------------------------------------------------------

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define(
    "padded_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] dilation, int groups, int[] pad, "
    "str mode) -> Tensor"
)
_LIB.define(
    "padded_convolution_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, int[] dilation, int groups, "
    "int[] pad, str mode, bool[] mask) -> (Tensor, Tensor, Tensor)"
)
padded_convolution = torch.ops.spmd.padded_convolution.default
padded_convolution_backward = torch.ops.spmd.padded_convolution_backward.default


def _padded(x, weight, bias, stride, dilation, groups, pad, mode):
    none = [0] * len(stride)
    x = torch.ops.spmd.pad(x, pad, mode)
    return aten.convolution(x, weight, bias, stride, none, dilation, False, none, groups)


def _padded_backward(grad, x, weight, stride, dilation, groups, pad, mode, mask):
    none = [0] * len(stride)
    x = torch.ops.spmd.pad(x, pad, mode)
    made = aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], stride, none, dilation, False, none, groups, mask
    )  # fmt: skip
    return torch.ops.spmd.pad_backward(made[0], pad, mode) if mask[0] else None, *made[1:]


for _op, _function in ((padded_convolution, _padded), (padded_convolution_backward, _padded_backward)):
    _LIB.impl(_op.name().split("::")[1], _function, "CompositeExplicitAutograd")
    torch.library.register_fake(_op.name(), _function, lib=_LIB)


@dataclass(frozen=True)
class Terms:
    """Dims of a convolution's input, weight and output; sizes of batch ``n``, groups ``q``, channels ``c``, ``o``."""

    left: Dims
    kernel: Dims
    out: Dims
    sizes: dict[str, int]
    windows: list[Window]
    groups: int
    transposed: bool
    behind: tuple[int, ...]  # output_padding

    def nonempty(self, e: Emit, how: Any, x: Node | None, term: Dims) -> Node | None:
        """`filled` or `emptied` of the channels of an operand or a result."""
        for dim, factors in enumerate(term):
            if x is not None and len(factors) == 1 and factors[0] in "co":
                x = how(e, x, dim, factors[0], self.sizes[factors[0]])
        return x

    def local(self, e: Emit) -> list[Any]:
        """Stride, padding and the rest of the local call's arguments: no padding of sharded dims."""
        apart = among(e, self.windows)
        pads = [(0, 0) if w in apart else (w.pad, n) for w, n in zip(self.windows, self.behind, strict=True)]
        return [
            [w.stride for w in self.windows], [p for p, _ in pads], [w.dilation for w in self.windows], self.transposed,
            [n for _, n in pads], e.size("q") if "q" in self.sizes else self.groups,
        ]  # fmt: skip


def terms(node: Node, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Terms | None:
    if x.dim() != weight.dim():
        return None
    groups, transposed = argument(node, "groups"), argument(node, "transposed", False)
    padding, around = argument(node, "padding", 0), {}
    if argument(node, "pad"):
        around = borders(x.shape, argument(node, "pad"), argument(node, "mode"))
        padding = [around[d].before if d in around else 0 for d in range(2, x.dim())]
    sizes = {"n": x.shape[0], "c": x.shape[1] // groups}
    sizes["o"] = weight.shape[1] if transposed else weight.shape[0] // groups
    lead: tuple[str, ...] = ()
    if groups > 1:
        sizes["q"], lead = groups, ("q",)
    found = windows(
        *((out, x) if transposed else (x, out)), x.dim() - 2,
        list(weight.shape[2:]), argument(node, "stride"), padding, argument(node, "dilation"),
    )  # fmt: skip
    found = [dataclasses.replace(w, border=around.get(w.dim)) for w in found]
    wide = tuple((w.factor,) for w in found)
    kernel = ((*lead, "c"), ("o",)) if transposed else ((*lead, "o"), ("c",))
    return Terms(
        (("n",), (*lead, "c"), *wide), (*kernel, *((),) * len(found)), (("n",), (*lead, "o"), *wide), sizes,
        found, groups, transposed, tuple(per_dim(argument(node, "output_padding", 0), len(found))),
    )  # fmt: skip


def _rule(t: Terms, narrow: torch.Tensor, weight: torch.Tensor, wide: bool, times: int, **fields: Any) -> Rule:
    """``wide`` says on which side the result is, ``times`` counts products of all of ``narrow`` by the weight."""
    made = {w.factor: w.wide if wide else w.narrow for w in t.windows}
    each = t.sizes["o" if t.transposed else "c"] * math.prod(weight.shape[2:])
    return Rule(
        sizes=t.sizes | made, windows={w.factor: frozenset((w.wide, w.narrow)) for w in t.windows},
        flops=2.0 * narrow.numel() * each * times, **fields,
    )  # fmt: skip


@define(aten.convolution.default, padded_convolution)
def _(node: Node) -> Rule | None:
    x, weight, *bias = (o.meta["val"] for o in operands(node))
    t = terms(node, x, weight, node.meta["val"])
    if t is None:
        return None

    def form(e: Emit, x: Node, weight: Node, bias: Node | None, *_: Any) -> Node:
        if bias is not None and not t.sizes.get("q"):
            bias = first(e, bias, "c")
        x, weight = t.nonempty(e, filled, x, t.left), t.nonempty(e, filled, weight, t.kernel)
        bias = t.nonempty(e, filled, bias, (t.out[1],))
        made = convolved(e, x, weight, bias)
        return t.nonempty(e, emptied, made, t.out)

    def convolved(e: Emit, x: Node, weight: Node, bias: Node | None) -> Node:
        apart = among(e, t.windows)
        if not t.transposed:
            return trim(e, e.call(aten.convolution.default, gather(e, x, apart), weight, bias, *t.local(e)), apart)
        if not apart:
            return e.call(aten.convolution.default, x, weight, bias, *t.local(e))
        made = settle(e, e.call(aten.convolution.default, cover(e, x, apart), weight, None, *t.local(e)), apart)
        if bias is None:
            return made
        return e.call(aten.add.Tensor, made, e.call(aten.reshape.default, bias, [-1] + [1] * len(t.windows)))

    grouped = tuple(Linear(g) for g in (((0, 2), (1, 2)) if bias else ((0,), (1,))))
    return _rule(
        t, x if t.transposed else node.meta["val"], weight, t.transposed, 1, linear=grouped, form=form,
        operands=(t.left, t.kernel, *((t.out[1],) for _ in bias)), results=(t.out,),
    )  # fmt: skip


@define(aten.convolution_backward.default, padded_convolution_backward)
def _(node: Node) -> Rule | None:
    """The bias's gradient is a sum over the batch; devices that share input channels alone agree on it."""
    grad, x, weight = (o.meta["val"] for o in operands(node))
    t = terms(node, x, weight, grad)
    if t is None:
        return None

    def form(e: Emit, grad: Node, x: Node, weight: Node, *rest: Any) -> Any:
        mask = rest[-1]
        made: list[Node | None] = [None] * 3
        if mask[2]:
            made[2] = e.call(aten.sum.dim_IntList, grad, [0, *range(2, 2 + len(t.windows))])
        if any(mask[:2]):
            given = zip((grad, x, weight), (t.out, t.left, t.kernel), strict=True)
            full = [t.nonempty(e, filled, v, d) for v, d in given]
            both = gradients(e, full, mask)
            made[:2] = (t.nonempty(e, emptied, v, d) for v, d in zip(both, (t.left, t.kernel), strict=True))
        return tuple(made)

    def gradients(e: Emit, given: Sequence[Any], mask: Sequence[bool]) -> list[Node | None]:
        grad, x, weight = given
        apart = [w for w in among(e, t.windows) if not w.border]
        bordered = [Parts(e, w, w.border) for w in t.windows if w.border]
        for parts in bordered:
            grad = parts.several.fetch(grad)
        for parts in bordered:
            grad, x = parts.cover(grad), parts.spread(x)
        if t.transposed:
            grad = gather(e, grad, apart)
            for w in apart:
                x = filled(e, x, w.dim, w.factor, w.narrow)
        else:
            grad, x = cover(e, grad, apart), spread(e, x, apart)
        both = e.call(aten.convolution_backward.default, grad, x, weight, None, *t.local(e), [*mask[:2], False])
        made = [e.call(operator.getitem, both, i) if mask[i] else None for i in (0, 1)]
        if mask[0]:
            made[0] = (trim if t.transposed else settle)(e, made[0], apart)
            for parts in bordered:
                made[0] = parts.settle(made[0])
        return made

    res = [d if r is not None else () for d, r in zip((t.left, t.kernel, (t.out[1],)), results(node), strict=True)]
    return _rule(
        t, x if t.transposed else grad, weight, not t.transposed, sum(node.args[-1][:2]), linear=(Linear((0,)),),
        form=form, operands=(t.out, t.left, t.kernel), results=tuple(res), reduce={"c": "none"},
    )  # fmt: skip
