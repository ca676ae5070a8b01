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
from .contracts import ContractError
from .cost import PROFILES, Link, Profile
from .diff import Diff, diff
from .explain import Alternative, Explanation
from .local_map import local_map
from .parallelize import parallelize
from .placements import Mesh, Spec, SpmdError
from .program import Program, explain, export, load
from .rules import register_rule

__all__ = [
    "PROFILES",
    "Alternative",
    "Collective",
    "ContractError",
    "DTensor",
    "DeviceMesh",
    "Diff",
    "Explanation",
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
    "explain",
    "export",
    "init_device_mesh",
    "load",
    "local_map",
    "parallelize",
    "register_rule",
]
