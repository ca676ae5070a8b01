"""What a program may say of placements in its middle, as operators ``spmd::*`` over global values.

====================  =========================================================================================
``constrain``         ``(x, spec)``: ``x``, placed as ``spec``; its gradient is the identity, placed freely
``to_local``          ``(x, spec, sizes, grad_spec)``: each rank's own piece of ``x`` under ``spec``; a *local region*
                      begins, in which operators run as written on every rank
``from_local``        ``(x, spec, sizes, shape, grad_spec)``: the value of ``shape`` whose piece under ``spec`` each
                      rank holds in ``x``; the local region ends
====================  =========================================================================================

``spec`` and ``grad_spec`` are texts of a `Spec`, which may leave axes out (`spec_on` fills them in); ``sizes`` are the
mesh's sizes along the axes of ``spec``.  ``grad_spec`` is the placement of the gradient of the global side.  A fake
piece of an uneven cut has a size that nobody knows, one of torch's own for each cut; elsewhere shapes are those at
coordinate 0.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .dtensors import on_mesh, placements_for
from .placements import Mesh, Spec, SpmdError, no_placement, parse_placement
from .symbolic import pieces
from .words import shown

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define("constrain(Tensor x, str spec) -> Tensor")
_LIB.define("to_local(Tensor x, str spec, int[] sizes, str grad_spec) -> Tensor")
_LIB.define("from_local(Tensor x, str spec, int[] sizes, SymInt[] shape, str grad_spec) -> Tensor")

constrain_op = torch.ops.spmd.constrain.default
to_local_op = torch.ops.spmd.to_local.default
from_local_op = torch.ops.spmd.from_local.default

ANNOTATIONS = (constrain_op, to_local_op, from_local_op)


def spec_on(text: str, mesh: Mesh) -> Spec:
    """The spec that ``text`` means on ``mesh``: ``_i`` is the i-th axis, axes that it doesn't name are Replicate.

    Axes that share a dim with no order given nest as `Spec.of` nests those of a mapping.
    """
    spec = Spec.parse(text)
    given = dict(zip(spec.axes, spec.placements, strict=True))
    rank = 1 + max((p.dim for p in spec.placements if isinstance(p, Shard)), default=0)
    if spec.axes and spec.axes == tuple(f"_{i}" for i in range(len(spec.axes))):
        return Spec.of(mesh, spec.placements, rank)
    return on_mesh(spec, mesh) if "@" in text else Spec.of(mesh, given, rank)


def checked(spec: Spec, ndim: int) -> Spec:
    """``spec`` itself; raises `SpmdError` if it shards a dim that a value of ``ndim`` dims lacks."""
    return Spec.of(Mesh([(a, 1) for a in spec.axes]), spec, ndim)


def gradient_spec(spec: Spec) -> Spec:
    """Where the gradient of a value placed as ``spec`` belongs: the same, with Replicate for Partial."""
    whole = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return Spec(spec.axes, whole, spec.nesting)


def piece_lengths(n: int, spec: Spec, dim: int, sizes: Sequence[int]) -> list[int]:
    """What each piece of a dim of ``n`` elements holds, that at coordinate 0 first."""
    return [end - begin for begin, end in pieces(int(n), [k for _, k in _cut(spec, dim, sizes)])]


@torch.library.impl("spmd::constrain", "CompositeExplicitAutograd", lib=_LIB)
def _(x, spec):
    return x.clone()


@torch.library.register_fake("spmd::constrain", lib=_LIB)
def _(x, spec):
    return torch.empty_like(x)


_uneven: weakref.WeakKeyDictionary[ShapeEnv, dict[Any, torch.SymInt]] = weakref.WeakKeyDictionary()


@torch.library.register_fake("spmd::to_local", lib=_LIB)
def _(x, spec, sizes, grad_spec):
    spec, shape = Spec.parse(spec), []
    env = getattr(getattr(x, "fake_mode", None), "shape_env", None)
    for dim, n in enumerate(x.shape):
        lengths = piece_lengths(n, spec, dim, sizes)
        shape.append(lengths[0])
        if env is not None and len(set(lengths)) > 1:
            known, cut = _uneven.setdefault(env, {}), (int(n), _cut(spec, dim, sizes))
            if cut not in known:
                known[cut] = _unknown(env, min(lengths), max(lengths))
            shape[dim] = known[cut]
    return x.new_empty(shape)


def _unknown(env: ShapeEnv, low: int, high: int) -> torch.SymInt:
    """A size that no node of a graph makes."""
    made = env.create_unbacked_symint()
    symbol = made.node.expr
    if symbol in env.pending_fresh_unbacked_symbols:  # no node has to be named as what makes it
        env.pending_fresh_unbacked_symbols.remove(symbol)
    env.size_like.add(symbol)
    env.constrain_symbol_range(symbol, low, high)
    return made


def _cut(spec: Spec, dim: int, sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """The axes that a dim is cut on, and their sizes."""
    parts = dict(zip(spec.axes, map(int, sizes), strict=True))
    return tuple((a, parts[a]) for a in spec.axes_of(dim))


def whole_shape(piece: torch.Tensor, spec: Spec, sizes: Sequence[int]) -> list[int]:
    """The sizes of the value of which each rank holds a piece like the fake ``piece``; of an uneven cut, those of what
    was cut so.  Raises `SpmdError` where nothing was."""
    shape = []
    for dim, n in enumerate(piece.shape):
        cut = _cut(spec, dim, sizes)
        if isinstance(n, torch.SymInt):
            known = _uneven.get(n.node.shape_env, {})
            found = [size for (size, at), s in known.items() if at == cut and s.node.expr == n.node.expr]
            if not found:
                raise SpmdError(
                    f"the size along dim {dim} of pieces placed as {spec} differs between ranks and isn't known; give "
                    "shape= and stride= of the whole (DTensor.from_local)"
                )
            shape.append(found[0])
        else:
            shape.append(int(n) * math.prod(k for _, k in cut))
    return shape


@torch.library.register_fake("spmd::from_local", lib=_LIB)
def _(x, spec, sizes, shape, grad_spec):
    return x.new_empty(shape)


def _constrain_backward(ctx, grad):
    return grad, None


def _save_specs(ctx, inputs, output):
    x, ctx.spec, ctx.sizes = inputs[0], inputs[1], inputs[2]
    ctx.grad_spec, ctx.shape = inputs[-1], x.shape


def _to_local_backward(ctx, grad):
    return from_local_op(grad, ctx.grad_spec, ctx.sizes, ctx.shape, ctx.spec), None, None, None


def _from_local_backward(ctx, grad):
    return to_local_op(grad, ctx.grad_spec, ctx.sizes, ctx.spec), None, None, None, None


torch.library.register_autograd("spmd::constrain", _constrain_backward, lib=_LIB)
torch.library.register_autograd("spmd::to_local", _to_local_backward, setup_context=_save_specs, lib=_LIB)
torch.library.register_autograd("spmd::from_local", _from_local_backward, setup_context=_save_specs, lib=_LIB)


_tracing: Mesh | None = None


@contextlib.contextmanager
def tracing(mesh: Mesh) -> Iterator[None]:
    """Within, annotations are operators even where torch doesn't know that a program is being captured."""
    global _tracing
    before, _tracing = _tracing, mesh
    try:
        yield
    finally:
        _tracing = before


def traced_mesh() -> Mesh | None:
    """The mesh for which a program is being captured ahead of time."""
    return _tracing


def constrain(x: torch.Tensor, placements: Mapping[str, Placement] | Sequence[Placement] | Placement) -> torch.Tensor:
    """``x``, placed as asked: ``constrain(x, {"dp": Shard(0)})``.

    In a program that this compiler makes, ``x`` is placed so (Replicate on axes not named) at this point, for
    its cost in communication.  In eager a DTensor is redistributed and a plain tensor returned as it is.
    """
    if not isinstance(x, torch.Tensor):
        raise SpmdError(f"constrain takes a tensor, not {shown(x)}")
    if torch.compiler.is_compiling() or _tracing is not None:
        return torch.ops.spmd.constrain(x, _text(placements, x.dim()))
    if isinstance(x, DTensor):
        spec = Spec.of(Mesh.of(x.device_mesh), placements, x.dim())
        return x.redistribute(placements=placements_for(spec, x.device_mesh))
    _text(placements, x.dim())
    return x


@torch.compiler.assume_constant_result
def _spec_text(text: str) -> str:
    """A spec's text with the order of axes that share a dim written out; Dynamo doesn't look inside."""
    return str(Spec.parse(text))


def _text(placements: Any, ndim: int) -> str:
    """The text of a spec on the axes that ``placements`` names (``_i`` for the i-th axis of a sequence)."""
    if isinstance(placements, Spec):
        return str(placements)
    if isinstance(placements, str) and placements.strip().startswith("{"):
        return _spec_text(placements)
    if isinstance(placements, str):
        placements = parse_placement(placements)
    if not isinstance(placements, (Mapping, Sequence, Placement)):
        raise no_placement(placements)
    if isinstance(placements, Mapping):
        items = list(placements.items())
    else:
        items = [(f"_{i}", p) for i, p in enumerate([placements] if isinstance(placements, Placement) else placements)]
        if not items:
            raise SpmdError("constrain is given no placements; give {axis: Shard(0)}, or a placement for each axis")
    parts = []
    for axis, given in items:
        p = parse_placement(given) if isinstance(given, str) else given
        if not isinstance(p, Placement):
            raise SpmdError(f"axis {axis!r}: {shown(p)} is no placement; give Shard(dim) or Replicate()")
        if isinstance(p, Shard):
            parts.append(f"{axis}: S({p.dim + ndim if p.dim < 0 else p.dim})")
        elif isinstance(p, Partial):
            parts.append(f"{axis}: P({p.reduce_op})")
        else:
            parts.append(f"{axis}: R")
    return "{" + ", ".join(parts) + "}"
