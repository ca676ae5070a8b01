"""`local_map` with torch's signature, which also works on values whose placement the solver chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import local_map as torch_local_map
from torch.utils import _pytree as pytree

from .annotations import constrain_op, from_local_op, gradient_spec, to_local_op, traced_mesh, whole_shape
from .placements import Mesh, Spec, SpmdError
from .words import shown


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Run ``func`` on every rank's own pieces: `torch.distributed.tensor.experimental.local_map`.

    Within a program that this compiler makes, ``func`` runs as written; an intermediate value is placed as
    ``in_placements`` says, whatever ``redistribute_inputs`` is, since it has no placement of its own yet.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    if not callable(func):
        raise SpmdError(f"local_map runs a function on pieces, not {shown(func)}")
    eager = torch_local_map(
        func, out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs=redistribute_inputs
    )

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if traced_mesh() is not None:
            return _captured(func, out_placements, in_placements, in_grad_placements, args, kwargs)
        if torch.compiler.is_compiling() and in_placements is not None:
            args = _placed(args, in_placements)
        return eager(*args, **kwargs)

    return mapped


def _placed(args: tuple[Any, ...], in_placements: Sequence[Any]) -> Any:
    """Give the values that have no placement yet the one asked for."""
    flat, tree = pytree.tree_flatten(args)
    placed = []
    for i, value in enumerate(flat):
        if isinstance(value, DTensor) and i < len(in_placements) and in_placements[i] is not None:
            if value.placements is None:
                value = value.redistribute(placements=in_placements[i])
        placed.append(value)
    return pytree.tree_unflatten(placed, tree)


def _captured(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: Any,
    in_grad_placements: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The call in a program that is captured ahead of time, where every tensor is a global value."""
    mesh = traced_mesh()
    assert mesh is not None
    if in_placements is None:
        raise SpmdError("local_map in an exported program needs in_placements: tensors have none of their own there")
    sizes = list(mesh.shape)
    flat, tree = pytree.tree_flatten(args)
    if len(flat) != len(in_placements):
        raise SpmdError(f"local_map: {len(in_placements)} in_placements for {len(flat)} arguments")
    local = []
    for i, (value, placements) in enumerate(zip(flat, in_placements, strict=True)):
        if isinstance(value, torch.Tensor) and placements is not None:
            spec = Spec.of(mesh, placements, value.dim())
            grads = in_grad_placements[i] if in_grad_placements is not None else None
            grad_spec = gradient_spec(spec) if grads is None else Spec.of(mesh, grads, value.dim())
            value = to_local_op(constrain_op(value, str(spec)), str(spec), sizes, str(grad_spec))
        local.append(value)
    outs, out_tree = pytree.tree_flatten(func(*pytree.tree_unflatten(local, tree), **kwargs))
    given = out_placements if isinstance(out_placements, tuple) else (out_placements,) * len(outs)
    if len(given) != len(outs):
        raise SpmdError(f"local_map: {len(given)} out_placements for {len(outs)} results")
    return pytree.tree_unflatten([_global(v, p, mesh) for v, p in zip(outs, given, strict=True)], out_tree)


def _global(value: Any, placements: Any, mesh: Mesh) -> Any:
    if placements is None or not isinstance(value, torch.Tensor):
        return value
    spec = Spec.of(mesh, placements, value.dim())
    shape = whole_shape(value, spec, mesh.shape)
    return from_local_op(value, str(spec), list(mesh.shape), shape, str(gradient_spec(spec)))
