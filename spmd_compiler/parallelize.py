"""`parallelize`: the parameters and buffers of a module become DTensors, by name; and torch's distribution API.

Meta parameters are materialised one module at a time: initialised whole, as on one device, then cut, so that no
rank ever holds more than its own pieces and one module.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .devices import storages_overlap
from .dtensors import device_mesh, dtensor_spec, spec_of, wrap
from .placements import Mesh, Spec, SpmdError
from .program import Placements, Program
from .runtime import whole_group
from .symbolic import piece
from .words import listed, shown


def parallelize(
    model: torch.nn.Module, mesh: Any, placements: Mapping[str, Any] | Program | None = None
) -> torch.nn.Module:
    """Make DTensors of all parameters and buffers of ``model``, in place.

    A `Program` planned for the model gives its placements, those that the solver chose (``"auto"``) among them.

    ``placements`` maps qualified names or globs of them to ``{axis: placement}``, a sequence in axis order, or one
    placement on a mesh of one axis; what is not named is replicated.  Where a dict shards one dim on several axes,
    the last mesh axis is outermost (FSDP over TP).  Tied tensors stay tied, names in ``state_dict`` stay.  Values are
    those of rank 0.  Modules on ``meta`` are initialised by their ``reset_parameters``, with the same draws as on one
    device.

    Raises `SpmdError` for a name that nothing has, a dim out of range, and a mesh without the axis.
    """
    if not isinstance(model, torch.nn.Module):
        raise SpmdError(f"expected a module, got {type(model).__name__}")
    if placements is not None and not isinstance(placements, (Mapping, Program)):
        raise SpmdError(
            f"placements are a mapping from names to placements, or a Program (for 'auto' plan the model with export, "
            f"and give the program), not {shown(placements)}"
        )
    devices = device_mesh(mesh)
    abstract = Mesh.of(devices)
    if isinstance(placements, Program):
        every = {name for name, _ in _named_tensors(model)}
        planned = {i.name: i.spec for i in placements.local.inputs if i.kind in ("param", "buffer")}
        if missing := [n for n in planned if n not in every]:
            raise SpmdError(
                f"the program was planned for another module, whose parameters are {listed(planned)}; this one has no "
                f"{missing[0]!r}: give it the module that was exported"
            )
        placements = planned
    chosen = Placements(abstract, placements or {}, model)
    specs: dict[int, Spec] = {}
    for name, tensor in _named_tensors(model):
        if id(tensor) in specs:
            continue
        spec = chosen(name, "param", tensor.dim(), tensor.shape)
        wrong = ""
        if spec is None:
            wrong = "'auto' is for a solver: plan the model with export, and give the program"
        elif spec.partial_axes():
            wrong = f"{spec} would give each device a part of the sum, which no optimizer can update"
        elif chosen.given_for(name) and isinstance(tensor, DTensor) and spec_of(tensor) != spec:
            wrong = f"it is a DTensor placed as {spec_of(tensor)} already; redistribute it"
        if spec is None or wrong:
            raise SpmdError(f"placement of {name!r} {tuple(tensor.shape)}: {wrong}")
        specs[id(tensor)] = spec
    chosen.check("parameter or buffer")
    if any(t.is_meta for _, t in _named_tensors(model)):
        _agree_on_draws(devices)

    _warn_of_views(model)
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []  # ids stay taken while their tensors live
    for prefix, module in _children_first(model):
        fresh = _materialise(module, prefix, devices.device_type)
        for store, key, tensor in list(_own_tensors(module)):
            if isinstance(tensor, DTensor):
                continue
            original = fresh.get(key, tensor)
            keep += [original, tensor]
            if id(original) not in made:
                made[id(original)] = _distributed(tensor, specs[id(original)], devices, synced=original.is_meta)
            store[key] = made[id(original)]
    return model


def _warn_of_views(model: torch.nn.Module) -> None:
    """Pieces have memory of their own: buffers that are views of each other no longer are."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.named_buffers():
        if tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
            continue
        other, seen = held.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
        if seen is not tensor and storages_overlap(seen, tensor):
            warnings.warn(
                f"buffers {other!r} and {name!r} share memory; parallelized they don't, so that what writes to one no "
                "longer changes the other: take the view where it is used instead",
                stacklevel=3,
            )


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _children_first(module: torch.nn.Module, prefix: str = "", seen: set[Any] | None = None) -> Iterator[Any]:
    """Every module once, children before parents: the order in which constructors initialise."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.", seen)
    yield prefix.removesuffix("."), module


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for store in (module._parameters, module._buffers):
        for key, tensor in store.items():
            if tensor is not None:
                yield store, key, tensor


def _materialise(module: torch.nn.Module, prefix: str, device: str) -> dict[str, torch.Tensor]:
    """Give a module's own meta tensors memory and values; return the meta tensors by their names in the module.

    Tied tensors are drawn once for each module that has them, as constructors do; the first draw is kept.
    """
    meta = {key: t for _, key, t in _own_tensors(module) if t.is_meta}
    if not meta:
        return meta
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise SpmdError(
            f"module {prefix!r} ({type(module).__name__}) has {', '.join(meta)} on the meta device but no "
            "reset_parameters() to initialise it; give it one, or build the model on a real device"
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()
    return meta


def _distributed(tensor: torch.Tensor, spec: Spec, mesh: DeviceMesh, synced: bool) -> torch.Tensor:
    """``tensor``, as rank 0 has it, as a DTensor; this rank keeps only its own piece."""
    with torch.no_grad():
        whole = tensor.detach().to(mesh.device_type)
        if not synced and dist.is_initialized() and mesh.size() > 1:
            whole = whole.clone()
            dist.broadcast(whole, int(mesh.mesh.flatten()[0]), group=whole_group(mesh))
        local = own_piece(whole, spec, mesh)
        made = wrap(local, dtensor_spec(spec, mesh, tensor.shape, tensor.stride(), tensor.dtype))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def own_piece(whole: torch.Tensor, spec: Spec, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's piece of a global value, in memory of its own."""
    place = dict(zip(spec.axes, mesh.get_coordinate() or [], strict=True))
    sizes = Mesh.of(mesh)
    local = whole
    for dim in range(whole.dim()):
        for axis in spec.axes_of(dim):
            local = local.narrow(dim, *piece(local.shape[dim], sizes[axis], place[axis]))
    return local.clone()


def _agree_on_draws(mesh: DeviceMesh) -> None:
    """Give every rank the random state of rank 0."""
    if not dist.is_initialized() or mesh.size() == 1:
        return
    states: list[Any] = [torch.get_rng_state()]
    dist.broadcast_object_list(states, int(mesh.mesh.flatten()[0]), group=whole_group(mesh))
    torch.set_rng_state(states[0])
