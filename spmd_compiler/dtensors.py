"""The border between torch's DTensor specs and `Spec`: the one place that knows of strided shards."""

from __future__ import annotations

from collections.abc import Mapping
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
