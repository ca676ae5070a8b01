"""Where the values of a program live.

A program is traced on one device, and runs on as many as its mesh has: on rank 3 what it calls ``cuda:0`` may be
``cuda:3``, and what was planned on a laptop's CPU runs on cards.  So a program names kinds of devices only
(`unnumber`), the kind that its inputs live on is its `home`, and whoever runs it is where it is `settled`.  What a
program keeps on the CPU while its home is elsewhere stays there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from .ir import body_of, nodes_within


def unnumber(graph: Graph) -> None:
    """Take the numbers off the devices that a graph and its bodies name: ``cuda``, not ``cuda:3``."""
    _rename(nodes_within(graph), lambda device: torch.device(device.type))


def home(graph: Graph) -> str:
    """The kind of device that a program's values live on: that of its inputs (some may be numbers on the CPU)."""
    values = (n.meta.get("val") for n in graph.find_nodes(op="placeholder"))
    kinds = {v.device.type for v in values if isinstance(v, torch.Tensor)} - {"cpu", "meta"}
    return min(kinds, default="cpu")


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def settled(gm: GraphModule, kind: str, device: torch.device) -> GraphModule:
    """The graph with what it and its bodies have on devices of ``kind`` (arguments, constants, fake values) on
    ``device``: itself where all of it is there."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != kind or value.device == device:
            return value
        mode = getattr(value, "fake_mode", None)
        if mode is None:
            return value.to(device)
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    if kind == device.type and all(moved(v) is v for v in values):
        return gm
    made = GraphModule(gm, copy.deepcopy(gm.graph))
    made.graph.output_node().meta = dict(gm.graph.output_node().meta)
    for node in made.graph.nodes:
        if (body := body_of(node)) is not None:
            node.meta["val"] = settled(body, kind, device)
            setattr(made, node.target, node.meta["val"])
            continue
        node.meta["val"] = map_aggregate(node.meta.get("val"), moved)
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            held = made.get_submodule(owner)
            setattr(held, name, moved(getattr(held, name)))
    _rename(made.graph.nodes, lambda d: device if d.type == kind else d)
    return made


def on_cpu(gm: GraphModule) -> GraphModule:
    """A whole graph, settled on the CPU."""
    return settled(gm, home(gm.graph), torch.device("cpu"))


def storages_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage may have an element in common (those without any count as if: other ranks'
    pieces have some)."""
    if not a.numel() or not b.numel():
        return True
    begins = a.storage_offset(), b.storage_offset()
    ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (a, b)]
    return begins[0] <= ends[1] and begins[1] <= ends[0]


def _rename(nodes: Iterable[Node], rename: Callable[[torch.device], torch.device]) -> None:
    def renamed(value: Any) -> Any:
        return rename(value) if isinstance(value, torch.device) else value

    for node in nodes:
        if any(isinstance(a, torch.device) for a in (*node.args, *node.kwargs.values())):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), renamed)
