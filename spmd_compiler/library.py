"""Operators of our own: padding that continues a dim by its own elements, and convolutions of what is so padded.

``spmd::pad(x, pad, mode)`` pads the last dims as ``torch.nn.functional.pad`` does in the modes ``reflect``,
``replicate`` and ``circular``; ``spmd::pad_backward`` is its adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .forms.border import borders

aten = torch.ops.aten

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define("pad(Tensor x, int[] pad, str mode) -> Tensor")
_LIB.define("pad_backward(Tensor grad, int[] pad, str mode) -> Tensor")
_LIB.define(
    "padded_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] dilation, int groups, int[] pad, "
    "str mode) -> Tensor"
)
_LIB.define(
    "padded_convolution_backward(Tensor grad, Tensor x, Tensor weight, int[] stride, int[] dilation, int groups, "
    "int[] pad, str mode, bool[] mask) -> (Tensor, Tensor, Tensor)"
)
pad, pad_backward = torch.ops.spmd.pad.default, torch.ops.spmd.pad_backward.default
padded_convolution = torch.ops.spmd.padded_convolution.default
padded_convolution_backward = torch.ops.spmd.padded_convolution_backward.default

# --- padding --------------------------------------------------------------------------------------------------


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


# --- convolution ----------------------------------------------------------------------------------------------


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
