"""The border between torch's DTensor specs and `Spec`: the one place that knows of strided shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .placements import Mesh, Spec, SpmdError


def spec_from(placements: tuple[Placement, ...], mesh: DeviceMesh, ndim: int) -> Spec:
    """The `Spec` of DTensor ``placements`` on ``mesh``; strided shards become a nesting order."""
    given = tuple(Shard(p.dim % ndim) if type(p) is Shard else p for p in placements)
    strided = any(isinstance(p, _StridedShard) for p in given)
    plain, order = DTensorSpec._normalize_placements_into_shard_order(given, mesh, strided)
    abstract = Mesh.of(mesh)
    nesting = tuple(tuple(abstract.axes[i] for i in e.mesh_dims) for e in order if len(e.mesh_dims) > 1)
    return Spec.of(abstract, Spec(abstract.axes, tuple(plain), nesting), ndim)


def spec_of(tensor: DTensor) -> Spec:
    """The `Spec` of a DTensor, on the axes of its own mesh."""
    return spec_from(tensor.placements, tensor.device_mesh, tensor.dim())


def placements_for(spec: Spec, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """DTensor placements of ``spec``; a nesting that is not the mesh's order becomes strided shards."""
    order = tuple(
        ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(spec.axes.index(a) for a in spec.axes_of(dim)))
        for dim in sorted({p.dim for p in spec.placements if isinstance(p, Shard)})
    )
    return tuple(DTensorSpec._convert_shard_order_to_StridedShard(order, tuple(spec.placements), mesh))


def dtensor_spec(spec: Spec, mesh: DeviceMesh, shape: Any, stride: Any, dtype: torch.dtype) -> DTensorSpec:
    """What torch keeps of a DTensor beside its local piece."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, placements_for(spec, mesh), tensor_meta=meta)


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around its local piece, by the cheapest way there is (no autograd, no checks)."""
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[attr-defined]


def on_mesh(spec: Spec, mesh: Mesh) -> Spec:
    """``spec``, given on some of ``mesh``'s axes, on all of them: Replicate on the others."""
    unknown = [a for a in spec.axes if a not in mesh.axes]
    if unknown:
        raise SpmdError(
            f"placement {spec} speaks of axis {unknown[0]!r}, which {mesh} lacks; use one mesh with named axes "
            "(init_device_mesh(..., mesh_dim_names=...)) for all tensors of a program"
        )
    known: Mapping[str, Placement] = dict(zip(spec.axes, spec.placements, strict=True))
    return Spec(mesh.axes, tuple(known.get(a, Replicate()) for a in mesh.axes), spec.nesting)


def axes_within(part: DeviceMesh, whole: DeviceMesh) -> tuple[tuple[str, ...], ...] | None:
    """The axes of ``whole`` that each axis of ``part`` runs over, outermost first; None if it is another grid.

    ``part`` may be a submesh, or the same devices with axes of ``whole`` flattened into one.
    """
    small, large = Mesh.of(part), Mesh.of(whole)
    if part.mesh_dim_names and all(a in large.axes and large[a] == small[a] for a in small.axes):
        return tuple((a,) for a in small.axes)
    place, ranks = whole.get_coordinate() or [0] * len(large.axes), part.mesh.flatten().tolist()
    for count in range(1, len(large.axes) + 1):
        for kept in itertools.combinations(range(len(large.axes)), count):
            index = tuple(slice(None) if i in kept else place[i] for i in range(len(large.axes)))
            if whole.mesh[index].flatten().tolist() == ranks:
                return _runs(small.shape, [(large.axes[i], large.shape[i]) for i in kept])
    return None


def _runs(sizes: Sequence[int], axes: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], ...] | None:
    """``axes`` in runs whose products are ``sizes``; None where they do not fit."""
    left, runs = list(axes), []
    for size in sizes:
        run: list[str] = []
        while size > 1 and left and size % left[0][1] == 0:
            size //= left[0][1]
            run.append(left.pop(0)[0])
        if size > 1:
            return None
        runs.append(tuple(run))
    return tuple(runs)


def spec_within(spec: Spec, part: DeviceMesh, whole: DeviceMesh | Mesh, shape: Sequence[int]) -> Spec:
    """``spec``, given on the axes of ``part``, of a value of global ``shape``, on those of the program's mesh."""
    runs = axes_within(part, whole) if isinstance(whole, DeviceMesh) else None
    mesh = Mesh.of(whole)
    if runs is None:
        return on_mesh(spec, mesh)
    of = dict(zip(spec.axes, runs, strict=True))
    known = {a: p for axis, p in zip(spec.axes, spec.placements, strict=True) for a in of[axis]}
    nesting = []
    for dim in {p.dim for p in spec.placements if isinstance(p, Shard)}:
        order = tuple(a for axis in spec.axes_of(dim) for a in of[axis])
        parts = math.prod(mesh[a] for a in order)
        if len(order) > len(spec.axes_of(dim)) and int(shape[dim]) % parts:
            raise SpmdError(
                f"dim {dim} of {tuple(shape)} is cut in {parts} uneven pieces on {Mesh.of(part)}, not those of "
                f"{mesh}; use one mesh for all tensors of a program, or an even size"
            )
        nesting.append(order)
    placements = tuple(known.get(a, Replicate()) for a in mesh.axes)
    return Spec(mesh.axes, placements, tuple(o for o in nesting if len(o) > 1))


def spec_in(tensor: DTensor, mesh: DeviceMesh | Mesh) -> Spec:
    """The `Spec` of a DTensor on the axes of a program's mesh."""
    return spec_within(spec_of(tensor), tensor.device_mesh, mesh, tensor.shape)


def device_mesh(mesh: Any) -> DeviceMesh:
    """``mesh`` itself, or a DeviceMesh over the default process group for an abstract one."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    abstract = Mesh.of(mesh)
    if not dist.is_initialized():
        raise SpmdError(f"{abstract} needs a process group to run: call torch.distributed.init_process_group first")
    if dist.get_world_size() != abstract.size:
        raise SpmdError(f"{abstract} has {abstract.size} devices, but there are {dist.get_world_size()} ranks")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, abstract.shape, mesh_dim_names=abstract.axes)
