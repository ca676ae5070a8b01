"""What a rank measures: the collectives that really run, and a world of two devices."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_": "recv",
}


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
    """A call's result, and how many collectives of each kind process groups were asked for meanwhile."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function(*args, **kwargs)
    names = collections.Counter(e.name for e in profile.events() if e.name.startswith("c10d::"))
    return result, {KINDS[name]: n for name, n in names.items()}


def pair_mesh() -> Any:
    """A mesh ``w`` of two devices: the four ranks are two such worlds that do the same."""
    from test_backend import mesh_of

    return mesh_of(copy=2, w=2)["w"]
