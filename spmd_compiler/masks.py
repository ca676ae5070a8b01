"""Decompositions of ops that a mask steers: what it lets through, and what it selects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

aten = torch.ops.aten


def _numbered(mask: Tensor) -> Tensor:
    """For each element the number of those let through before it."""
    return mask.reshape(-1).cumsum(0) - mask.reshape(-1).long()


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of ``source``, in order, where ``mask`` holds."""
    x, mask = torch.broadcast_tensors(x, mask)
    source = source.reshape(-1)
    if is_open(source):  # there may be none
        source = torch.cat([source, source.new_zeros(1)])
    elif source.numel() == 0:
        return x.clone()
    at = _numbered(mask).clamp_max(source.numel() - 1)
    return torch.where(mask, source.index_select(0, at).reshape(x.shape), x)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Any) -> Tensor:
    """The gradient of ``source``: what ``mask`` lets through, in order, then zeros."""
    mask = mask.expand(grad.shape)
    count = math.prod(sizes)
    if _unknown(count):  # maybe none: one more takes what is left
        at = torch.minimum(_numbered(mask), torch.full((), count, device=mask.device))
        made = grad.new_zeros(count + 1).index_add(0, at, torch.where(mask, grad, 0).reshape(-1))
        return made[:count].reshape(sizes)
    made = grad.new_zeros(count)
    if made.numel() == 0 or grad.numel() == 0:
        return made.reshape(sizes)
    at = _numbered(mask).clamp_max(made.numel() - 1)
    return made.index_add(0, at, torch.where(mask, grad, 0).reshape(-1)).reshape(sizes)


# --- what a mask selects, a size that data decide: positions first, so that the lookup is one of rows ---------------


def is_open(x: Tensor) -> bool:
    """Whether data decide a size."""
    return any(map(_unknown, x.shape))


def _unknown(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def _positions(indices: Any) -> list[Any]:
    """Indices with the positions of a mask's elements, one index for each dim of it, in its place."""
    found: list[Any] = []
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero().unbind(1) if mask else [index]
    return found


def _masks(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) and i.dim() > 0 for i in indices)


def index(x: Tensor, indices: Any) -> Any:
    return aten.index.Tensor(x, _positions(indices)) if _masks(indices) else NotImplemented


def index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    """With a mask, where there is a value for each element."""
    if not _masks(indices) or not is_open(values):
        return NotImplemented
    return aten.index_put.default(x, _positions(indices), values, accumulate)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


# --- moments of a selection: torch's own gradient asks whether there are two elements -----------------------------


def _spread(root: bool, with_mean: bool) -> Callable[..., Any]:
    def decomposed(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if not is_open(x) or x.is_complex():
            return NotImplemented
        at = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
        mean = x.mean(at, keepdim=True)
        found = (x - mean).square().sum(at, keepdim)
        count = math.prod(x.shape[d] for d in at)
        found = found / torch.sym_max(count - (1 if correction is None else correction), 0)
        if root:
            zero = found == 0
            found = torch.where(zero, found, found.masked_fill(zero, 1).sqrt())
        if not with_mean:
            return found
        return found, mean if keepdim else mean.squeeze(at)

    return decomposed


SPREADS = {
    aten.var.correction: _spread(False, False), aten.std.correction: _spread(True, False),
    aten.var_mean.correction: _spread(False, True), aten.std_mean.correction: _spread(True, True),
}  # fmt: skip


# --- scans: what torch's own ask of a selection, whether it has elements, is not known --------------------------------


def _from_end(op: Any, x: Tensor, dim: int) -> Tensor:
    return op(x.flip(dim), dim).flip(dim)


def _sum_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    return _from_end(torch.cumsum, grad, dim)


def _product_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """A product without one of its elements is a quotient; without its first zero, that with a one in its place.

    (Torch's, as it is traced, has nodes for each element.)  What is differentiated once more needs products without
    two, which is torch's.
    """
    if torch.is_grad_enabled():
        return aten.cumprod_backward(grad, x, dim, out)
    zero = x == 0
    first = zero & (zero.cumsum(dim) == 1)
    other = x.masked_fill(first, 1).cumprod(dim)
    rest = _from_end(torch.cumsum, grad * out.conj(), dim) / x.masked_fill(zero, 1).conj()
    return torch.where(first, _from_end(torch.cumsum, grad * other.conj(), dim), rest)


def _exponents_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """In logarithms, of each sign by itself."""
    parts = [torch.where(g > 0, g, 0).log() - out for g in (grad, -grad)]
    above, below = ((_from_end(torch.logcumsumexp, p, dim) + x).exp() for p in parts)
    return above - below


def _scan(op: Callable[[Tensor, int], Tensor], gradient: Callable[..., Tensor], always: bool) -> Callable[..., Any]:
    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, dim: int) -> Tensor:
            return op(x, dim)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(inputs[0], output)
            ctx.dim = inputs[1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return gradient(grad, *ctx.saved_tensors, ctx.dim), None

    def decomposed(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if not (x.requires_grad and torch.is_grad_enabled() and x.dim() and (always or is_open(x))):
            return NotImplemented
        try:
            return Scan.apply(x if dtype is None else x.to(dtype), dim)
        except NotImplementedError:  # within a gradient of torch.func, which has no place for it: torch's own
            return NotImplemented

    return decomposed


def _extremes(op: Callable[[Tensor, int], Any]) -> Callable[..., Any]:
    def decomposed(x: Tensor, dim: int) -> Any:
        if not is_open(x) or statically_known_true(x.numel() > 0):
            return NotImplemented
        # what comes after has no part in what was scanned before
        made = op(aten.constant_pad_nd(x, [p for n in reversed(x.shape) for p in (0, int(_unknown(n)))]), dim)
        parts = []
        for v in made:
            for d, n in enumerate(x.shape):
                v = aten.slice(v, d, 0, n) if _unknown(n) else v
            parts.append(v)
        return tuple(parts)

    return decomposed


SCANS = {
    aten.cumsum.default: _scan(torch.cumsum, _sum_backward, False),
    aten.cumprod.default: _scan(torch.cumprod, _product_backward, True),
    aten.logcumsumexp.default: _scan(torch.logcumsumexp, _exponents_backward, False),
    aten.cummax.default: _extremes(torch.cummax), aten.cummin.default: _extremes(torch.cummin),
}  # fmt: skip
