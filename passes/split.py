"""Cut a local joint graph into a forward and a backward graph."""

from __future__ import annotations

import copy

from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..collectives import is_collective
from ..ir import Partitioned, tree_nodes


def run(partitioned: Partitioned) -> tuple[GraphModule, GraphModule | None]:
    """Before: a local joint graph whose placeholders are inputs, then tangents.  After: its forward, which returns
    the forward outputs and what the backward needs, and its backward (None where nothing needs a gradient), which
    takes that and the tangents and returns the gradients.

    What is saved is the cheapest cut (in bytes).  A gathered parameter is gathered again, not saved, unless the plan
    keeps it.
    """
    gm = GraphModule(partitioned.graph, copy.deepcopy(partitioned.graph.graph))
    if len(partitioned.outputs) == partitioned.num_forward_outputs:
        return gm, None
    _name_placeholders(gm, partitioned)
    _tag(gm)
    _recompute_gathers(gm, partitioned)
    with functorch_config.patch(cse=False):  # it would merge the gathers of the two phases
        return min_cut_rematerialization_partition(
            gm, None, num_fwd_outputs=partitioned.num_forward_outputs, static_lifetime_input_indices=[]
        )


def _name_placeholders(gm: GraphModule, partitioned: Partitioned) -> None:
    """The partitioner knows tangents by their names."""
    for i, (node, given) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), partitioned.inputs, strict=True)):
        name = f"tangents_{i + 1}" if given.kind == "tangent" else f"primals_{i + 1}"
        node.target = name
        node._rename(name)
    gm.recompile()


def _tag(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        backward = node.meta.get("phase") == "backward"
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"


def _recompute_gathers(gm: GraphModule, partitioned: Partitioned) -> None:
    """Mark every chain of nodes from parameters alone that holds a collective and serves both phases."""
    from_params: dict[Node, bool] = {}  # whether a collective lies on the way
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), partitioned.inputs, strict=True):
        if given.kind == "param":
            from_params[node] = False
    for node in gm.graph.nodes:
        used = tree_nodes((node.args, node.kwargs))
        if node.op == "call_function" and used and all(n in from_params for n in used):
            from_params[node] = is_collective(node) or any(from_params[n] for n in used)
    for node in reversed(list(from_params)):
        phases = {u.meta.get("phase") for u in node.users}
        if from_params[node] and not node.meta.get("kept") and phases == {"forward", "backward"}:
            chain = [node]
            while chain:
                member = chain.pop()
                if member.op == "call_function" and "recompute" not in member.meta:
                    member.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    chain += tree_nodes((member.args, member.kwargs))
