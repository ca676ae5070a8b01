"""spmd_compiler: one globally optimal SPMD program of a single-device PyTorch program."""

from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

from .annotations import constrain
from .collectives import Collective
from .cost import PROFILES, Link, Profile
from .diff import Diff, diff
from .local_map import local_map
from .parallelize import parallelize
from .placements import Mesh, Spec, SpmdError
from .program import Program, export
from .rules import register_rule

__all__ = [
    "PROFILES",
    "Collective",
    "DTensor",
    "DeviceMesh",
    "Diff",
    "Link",
    "Mesh",
    "Partial",
    "Profile",
    "Program",
    "Replicate",
    "Shard",
    "Spec",
    "SpmdError",
    "constrain",
    "diff",
    "distribute_module",
    "distribute_tensor",
    "export",
    "init_device_mesh",
    "local_map",
    "parallelize",
    "register_rule",
]
