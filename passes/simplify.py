"""Clean the local graph without changing what any collective does."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ..collectives import is_collective
from ..ir import Partitioned


def run(local: Partitioned) -> Partitioned:
    """Before: a partitioned graph.  After: the same without values that nobody reads, and with one of collectives that
    do the same in one phase (local forms fetch the same halo for several users)."""
    _merge(local.graph.graph)
    local.graph.graph.eliminate_dead_code()
    local.graph.recompile()
    return local


def _merge(graph: Graph) -> None:
    seen: dict[tuple[Any, ...], Node] = {}
    for node in graph.nodes:
        if is_collective(node):
            first = seen.setdefault((node.target, node.meta.get("phase"), str(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
