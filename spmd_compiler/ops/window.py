"""Convolutions, `unfold`, and padding that continues a dim: batch, channels and windowed dims may be sharded.

A windowed dim and the dim that slides over it are one factor, cut in as many pieces (`forms.window`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..forms.border import Extension, borders, extended, folded, padded_positions, read
from ..forms.ranges import Several
from ..forms.window import Parts, Window, among, cover, gather, per_dim, settle, spread, trim, windows
from ..ir import argument, operands, results
from ..library import pad, pad_backward, padded_convolution, padded_convolution_backward
from ..rules import Dims, Linear, Rule, define, dims, fit, moved

aten = torch.ops.aten


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
        flops=2.0 * narrow.numel() * each * times, nonempty=True, **fields,
    )  # fmt: skip


@define(aten.convolution.default, padded_convolution)
def _(node: Node) -> Rule | None:
    x, weight, *bias = (o.meta["val"] for o in operands(node))
    t = terms(node, x, weight, node.meta["val"])
    if t is None:
        return None

    def form(e: Emit, x: Local, weight: Local, bias: Local | None, *_: Any) -> Local:
        apart = among(e, t.windows)
        if bias is not None and not t.sizes.get("q"):
            bias = e.first(bias, e.axes("c"))
        if not t.transposed:
            return trim(e, e.call(aten.convolution.default, gather(e, x, apart), weight, bias, *t.local(e)), apart)
        if not apart:
            return e.call(aten.convolution.default, x, weight, bias, *t.local(e))
        made = settle(e, e.call(aten.convolution.default, cover(e, x, apart), weight, None, *t.local(e)), apart)
        return made if bias is None else made + bias.reshape([-1] + [1] * len(t.windows))

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

    def form(e: Emit, grad: Local, x: Local, weight: Local, *rest: Any) -> Any:
        mask = rest[-1]
        bias = grad.sum([0, *range(2, 2 + len(t.windows))]) if mask[2] else None
        return (*(gradients(e, grad, x, weight, mask) if any(mask[:2]) else (None, None)), bias)

    def gradients(e: Emit, grad: Local, x: Local, weight: Local, mask: Sequence[bool]) -> list[Local | None]:
        apart = [w for w in among(e, t.windows) if not w.border]
        bordered = [Parts(e, w, w.border) for w in t.windows if w.border]
        for parts in bordered:
            grad = parts.several.fetch(grad)
        for parts in bordered:
            grad, x = parts.cover(grad), parts.spread(x)
        if t.transposed:
            grad = gather(e, grad, apart)
            for w in apart:
                x = e.filled(x, w.dim, w.factor, w.narrow)
        else:
            grad, x = cover(e, grad, apart), spread(e, x, apart)
        both = e.call(aten.convolution_backward.default, grad, x, weight, None, *t.local(e), [*mask[:2], False])
        made = [both[i] if mask[i] else None for i in (0, 1)]
        if made[0] is not None:
            made[0] = (trim if t.transposed else settle)(e, made[0], apart)
            for parts in bordered:
                made[0] = parts.settle(made[0])
        return made

    res = [d if r is not None else () for d, r in zip((t.left, t.kernel, (t.out[1],)), results(node), strict=True)]
    return _rule(
        t, x if t.transposed else grad, weight, not t.transposed, sum(node.args[-1][:2]), linear=(Linear((0,)),),
        form=form, operands=(t.out, t.left, t.kernel), results=tuple(res), reduce={"c": "none"},
    )  # fmt: skip


# --- sliding and padding ---------------------------------------------------------------------------------------


@define(aten.unfold.default)
def _(node: Node) -> Rule | None:
    x, out = node.args[0].meta["val"], node.meta["val"]
    if x.dim() == 0:
        return None
    dim = node.args[1] % x.dim()
    w = Window(dim, f"d{dim}", x.shape[dim], out.shape[dim], node.args[2], node.args[3])

    def form(e: Emit, x: Local, *args: Any) -> Local:
        return trim(e, e.same(gather(e, x, [w]) if e.axes(w.factor) else x, *args), [w])

    old = dims("d", x.dim())
    return moved(node, [old], [(*old, ())], windows=[w.factor], form=form)


@define(pad)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    found = borders(x.shape, *node.args[1:])

    def form(e: Emit, x: Local, *_: Any) -> Local:
        return extended(x, [Extension(e, d, f"d{d}", b, padded_positions(e, f"d{d}", b)) for d, b in found.items()])

    whole = dims("d", x.dim())
    return moved(node, [whole], [whole], windows=[f"d{d}" for d in found], form=form)


@define(pad_backward)
def _(node: Node) -> Rule | None:
    x = node.meta["val"]
    found = borders(x.shape, *node.args[1:])

    def form(e: Emit, grad: Local, *_: Any) -> Local:
        for d, b in found.items():
            factor = f"d{d}"
            reads, used = read(e, factor, b)
            several = Several(e, d, factor, padded_positions(e, factor, b), [[r[k] for k in used] for r in reads])
            parts = several.parts(several.fetch(grad))
            grad = folded(e, dict(zip(used, parts, strict=True)), d, factor, b, reads)
        return grad

    whole = dims("d", x.dim())
    return fit(node, [whole], [whole], [[0]], windows=[f"d{d}" for d in found], form=form)
