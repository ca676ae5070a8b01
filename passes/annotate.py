"""Make a captured graph ready for the solver."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..draws import functionalize
from ..ir import CONSTANTS, Captured, copied, copy_meta, is_tensor, source_line
from ..placements import Spec, SpmdError

aten = torch.ops.aten
_SAME = {aten.alias.default, aten.detach.default}
_TO_LOCAL, _FROM_LOCAL = "spmd::to_local", "spmd::from_local"


def run(captured: Captured) -> Captured:
    """Before: a functional joint graph.  After: the same values, and

    * no aliases, no repeated pure calls, no permute of a permute;
    * random ops are draws of the counter-based generator from the seed input;
    * what a parameter's backward use needs (casts, views of it) is computed apart from its forward use, so that
      each phase gathers for itself;
    * constants are made anew for each use: they cost nothing, and each use has its own spec of them;
    * ``meta["region"]`` marks the nodes of local regions, and every output that follows an input has its spec.
    """
    captured = copied(captured)
    graph = captured.graph.graph
    for node in graph.nodes:
        source_line(node)
    seeds = [n for n, i in zip(_placeholders(graph), captured.inputs, strict=True) if i.kind == "seed"]
    if seeds and (left := functionalize(graph, seeds[0])):
        node = left[0]
        raise SpmdError(
            f"{node.name} ({source_line(node)}): {node.target} draws numbers that the mesh-invariant generator does "
            "not make, so that each rank would draw its own; draw outside the compiled function, or build it from "
            "rand, randn or bernoulli (attention with dropout: torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
        )
    _simplify(graph)
    params = [n for n, i in zip(_placeholders(graph), captured.inputs, strict=True) if i.kind == "param"]
    _part_phases(graph, params)
    _part_constants(graph)
    _mark_regions(graph)
    graph.eliminate_dead_code()
    followed = [None if o.of is None else _followed(captured.inputs[o.of].spec, o.kind) for o in captured.outputs]
    outputs = [dataclasses.replace(o, spec=o.spec or spec) for o, spec in zip(captured.outputs, followed, strict=True)]
    return dataclasses.replace(captured, outputs=outputs)


def _followed(spec: Spec | None, kind: str) -> Spec | None:
    """The spec of what follows an input: every term of a partial sum has the gradient of the sum."""
    if spec is None or kind != "grad":
        return spec
    placements = tuple(Replicate() if p == Partial("sum") else p for p in spec.placements)
    return Spec(spec.axes, placements, spec.nesting)


def _placeholders(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _simplify(graph: Graph) -> None:
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _same_as(node)
        if same is None and (key := _pure_key(node)) is not None:
            same = seen.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _same_as(node: Node) -> Node | None:
    """An earlier node with the same value, for calls that change nothing."""
    if node.target in _SAME:
        return node.args[0]
    if node.target is aten.permute.default:
        inner, dims = node.args
        while inner.target is aten.permute.default:
            dims = [inner.args[1][d] for d in dims]
            inner = inner.args[0]
        rank = len(dims)
        dims = [d % rank for d in dims]
        if dims == list(range(rank)):
            return inner
        if inner is not node.args[0]:
            node.args = (inner, dims)
    if node.target is aten.expand.default and list(node.args[1]) == list(node.args[0].meta["val"].shape):
        return node.args[0]
    return None


def _pure_key(node: Node) -> Any:
    """Equal for calls that must give the same value; None where nothing can be said."""
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags or target.namespace not in ("aten", "prims"):
            return None
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    try:
        key = (target, tree, tuple((type(x), x) for x in leaves))
        hash(key)
    except TypeError:
        return None
    return key


def _part_phases(graph: Graph, params: list[Node]) -> None:
    """Give the backward its own copy of cheap calls on parameters alone."""
    derived = set(params)
    for node in graph.nodes:
        if node.op == "call_function" and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in derived:
            value, source = node.meta.get("val"), node.all_input_nodes[0].meta["val"]
            if is_tensor(value) and value.numel() == source.numel():
                derived.add(node)
    copies: dict[Node, Node] = {}

    def backward_copy(node: Node, before: Node) -> Node:
        if node.op == "placeholder" or node.meta.get("phase") == "backward":
            return node
        if node not in copies:
            source = backward_copy(node.all_input_nodes[0], before)
            with graph.inserting_before(before):
                new = graph.node_copy(node, lambda n: source)
            new.meta = {**node.meta, "phase": "backward"}
            copy_meta(new, before, ("partitioner_tag",))
            copies[node] = new
        return copies[node]

    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta.get("phase") == "backward":
            for used in node.all_input_nodes:
                if used in derived and used.op != "placeholder" and used.meta.get("phase") != "backward":
                    node.replace_input_with(used, backward_copy(used, node))


def _part_constants(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target in CONSTANTS:
            for user in list(node.users)[1:]:
                with graph.inserting_before(node):
                    new = graph.node_copy(node)
                new.meta = dict(node.meta)
                user.replace_input_with(node, new)


def _mark_regions(graph: Graph) -> None:
    """Local regions: after ``to_local`` until ``from_local``, and whatever leads to a ``from_local``."""

    def kind(node: Node) -> str:
        target = node.target
        return getattr(target, "_name", "").split(".")[0] if isinstance(target, torch._ops.OpOverload) else ""

    for node in graph.nodes:
        if node.op == "call_function" and kind(node) not in (_TO_LOCAL, _FROM_LOCAL):
            if any(kind(i) == _TO_LOCAL or i.meta.get("region") for i in node.all_input_nodes):
                node.meta["region"] = True
    for node in reversed(graph.nodes):
        wanted = any(kind(u) == _FROM_LOCAL or (u.meta.get("region") and u.op != "output") for u in node.users)
        if wanted and kind(node) not in (_TO_LOCAL, _FROM_LOCAL) and node.op in ("call_function", "placeholder"):
            if node.op == "placeholder" or node.meta.get("val") is not None:
                leads = any(kind(u) == _FROM_LOCAL or u.meta.get("leads") for u in node.users)
                if leads:
                    node.meta["leads"] = node.meta["region"] = True
