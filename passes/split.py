"""Cut a local joint graph into a forward and a backward graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..collectives import is_collective
from ..ir import Partitioned, results, size_op, tree_nodes
from ..symbolic import symbols_in


def run(partitioned: Partitioned) -> tuple[GraphModule, GraphModule | None]:
    """Before: a local joint graph whose placeholders are inputs, then tangents.  After: its forward, which returns
    the forward outputs and what the backward needs, and its backward (None where nothing needs a gradient), which
    takes that and the tangents and returns the gradients.

    What is saved is the cheapest cut (in bytes).  A gathered parameter is gathered again, not saved, unless the plan
    keeps it.  Sizes that data decide in the forward are the last of what it saves (``meta["size"]`` is their name).
    """
    gm = GraphModule(partitioned.graph, copy.deepcopy(partitioned.graph.graph))
    if len(partitioned.outputs) == partitioned.num_forward_outputs:
        return gm, None
    _name_placeholders(gm, partitioned)
    _tag(gm)
    _recompute_gathers(gm, partitioned)
    count = partitioned.num_forward_outputs
    sizes = _return_sizes(gm, count)
    with functorch_config.patch(cse=False):  # it would merge the gathers of the two phases
        forward, backward = min_cut_rematerialization_partition(
            gm, None, num_fwd_outputs=count + len(sizes), static_lifetime_input_indices=[]
        )
    if sizes:
        _pass_sizes(forward, backward, sizes, count)
    return forward, backward


def _return_sizes(gm: GraphModule, count: int) -> dict[str, int]:
    """Make the sizes that data decide in the forward outputs of it; their hints by name."""
    nodes = [n for n in gm.graph.find_nodes(op="call_function", target=size_op) if n.meta.get("phase") != "backward"]
    hints = {n.args[2]: n.meta["val"] for n in nodes}
    nodes = list({n.args[2]: n for n in reversed(nodes)}.values())[::-1]  # others of a name are checks
    out = gm.graph.output_node()
    flat = list(out.args[0])
    out.args = ((*flat[:count], *nodes, *flat[count:]),)
    if len(descs := list(out.meta.get("desc", ()))) == len(flat):
        out.meta["desc"] = [*descs[:count], *(None for _ in nodes), *descs[count:]]
    mode = next((v.fake_mode for n in gm.graph.nodes for v in results(n) if v is not None), None)
    for node in nodes:  # the partitioner weighs values by their bytes
        with mode:
            node.meta["val"] = torch.empty((), dtype=torch.int64)
    return hints


def _pass_sizes(forward: GraphModule, backward: GraphModule, hints: Mapping[str, int], count: int) -> None:
    """Let the backward take those sizes that it speaks of, behind what else is saved."""
    for node in backward.graph.find_nodes(op="call_function", target=size_op):
        if node.meta.get("phase") != "backward":
            backward.graph.erase_node(node)
    own = {n.args[2] for n in backward.graph.find_nodes(op="call_function", target=size_op)}
    spoken: set[str] = set()
    for node in backward.graph.nodes:
        spoken |= {s.name for s in symbols_in([node.args, node.kwargs, node.meta.get("layout")])}
    out = forward.graph.output_node()
    flat = list(out.args[0])
    sizes = {n.args[2]: n for n in flat[count : count + len(hints)]}
    wanted = [name for name in hints if name in spoken and name not in own]
    out.args = ((*flat[:count], *flat[count + len(hints) :], *(sizes[name] for name in wanted)),)
    for name, node in sizes.items():
        node.meta["val"] = hints[name]
    places = backward.graph.find_nodes(op="placeholder")
    first = next((n for n in places if n.name.startswith("tangents_")), None)
    before = first if first is not None else next(n for n in backward.graph.nodes if n.op != "placeholder")
    for name in wanted:
        with backward.graph.inserting_before(before):
            new = backward.graph.placeholder(f"size_{name}")
        new.meta.update(val=hints[name], size=name)
    forward.recompile()
    backward.recompile()


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
