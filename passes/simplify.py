"""Clean the local graph without changing what any collective does."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir import CONSTANTS, Partitioned


def run(local: Partitioned) -> Partitioned:
    """Before: a partitioned graph.  After: the same without values that nobody reads, equal constants made once."""
    graph = local.graph.graph
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target not in CONSTANTS:
            continue
        key = (node.target, str(node.args), str(node.kwargs), node.meta.get("spec"), node.meta.get("phase"))
        same = seen.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    local.graph.recompile()
    return local
