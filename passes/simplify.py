"""Clean the local graph without changing what any collective does."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ..bodies import bodies
from ..collectives import is_collective
from ..ir import CONSTANTS, Partitioned


def run(local: Partitioned) -> Partitioned:
    """Before: a partitioned graph.  After: the same without values that nobody reads; of equal constants, and of
    collectives that do the same in one phase (local forms fetch the same halo for several users), there is one."""
    _simplify(local.graph)
    return local


def _simplify(gm: GraphModule) -> None:
    graph = gm.graph
    for body in bodies(gm):
        _simplify(body.meta["val"])
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if is_collective(node) or node.target in CONSTANTS:
            key = (node.target, str(node.args), str(node.kwargs), node.meta.get("spec"), node.meta.get("phase"))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code()
    gm.recompile()
