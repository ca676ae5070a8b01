"""Convolutions of padded values read the values themselves.

Padding that is not zeros is an operator of its own.  What it makes is cut elsewhere than what it pads, so that more
than the halo would move between the two.  A cast or another function of single elements between them goes before the
padding, its gradient behind the padding's: there are fewer elements, and they are the same.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..ir import Captured, copied
from ..library import pad, pad_backward, padded_convolution, padded_convolution_backward

aten, prims = torch.ops.aten, torch.ops.prims


def run(captured: Captured) -> Captured:
    """Before: an annotated graph.  After: the same values; a convolution of what `library.pad` pads, in dims that it
    does not pad with zeros itself, is one call with the padding, and so is its backward with the padding's."""
    captured = copied(captured)
    graph = captured.graph.graph
    for node in list(graph.nodes):
        if _of_elements(node) and node.args[0].target is pad and len(node.args[0].users) == 1:
            _swap(node, node.args[0])
    for node in reversed(list(graph.nodes)):
        if node.target is pad_backward and _casts(node.args[0]) and len(node.args[0].users) == 1:
            _swap(node, node.args[0])
    for node in list(graph.nodes):
        if node.target is aten.convolution.default and (inner := _padded(node, node.args[0], *node.args[3:9])):
            x, *rest = inner
            stride, _, dilation, *_, groups = node.args[3:9]
            _replace(node, padded_convolution, x, *node.args[1:3], stride, dilation, groups, *rest)
        if node.target is aten.convolution_backward.default:
            _backward(node)
    graph.eliminate_dead_code()
    return captured


def _of_elements(node: Node) -> bool:
    """Whether a node is a function of the elements of its first argument alone."""
    tags = getattr(node.target, "tags", ())
    same = torch.Tag.pointwise in tags or _casts(node)
    return same and torch.Tag.nondeterministic_seeded not in tags and node.all_input_nodes == [node.args[0]]


def _casts(node: Node) -> bool:
    """Whether a node changes between dtypes of fractions."""
    if node.target is not prims.convert_element_type.default:
        return False
    return node.meta["val"].is_floating_point() and node.args[0].meta["val"].is_floating_point()


def _swap(node: Node, inner: Node) -> None:
    """``f(g(x))`` as ``g(f(x))``; ``g`` has no other user."""
    if node.meta.get("region") or inner.meta.get("region"):
        return
    with node.graph.inserting_before(node):
        made = node.graph.call_function(node.target, (inner.args[0], *node.args[1:]), node.kwargs)
        outer = node.graph.call_function(inner.target, (made, *inner.args[1:]), inner.kwargs)
    for new, old in ((made, node), (outer, inner)):
        given = torch.fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with node.meta["val"].fake_mode:
            new.meta = {**old.meta, "val": new.target(*given[0], **given[1])}
    node.replace_all_uses_with(outer)
    node.graph.erase_node(node)
    node.graph.erase_node(inner)


def _padded(
    node: Node, x: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output: Any, groups: int
) -> tuple[Any, ...] | None:  # fmt: skip
    """What is padded, how far and how, if it is the operand ``x`` of a convolution."""
    if x.target is not pad or transposed or any(padding) or len(x.args[1]) > 2 * len(stride) or node.meta.get("region"):
        return None
    return x.args


def _backward(node: Node) -> None:
    grad, x, weight, _, stride, padding, dilation, transposed, output, groups, mask = node.args
    inner = _padded(node, x, stride, padding, dilation, transposed, output, groups)
    if inner is None:
        return
    into = [u for n in node.users if n.target is operator.getitem and n.args[1] == 0 for u in n.users]
    if mask[0] and not all(u.target is pad_backward and u.args[1:] == inner[1:] for u in into):
        return
    x, *rest = inner
    new = _replace(node, padded_convolution_backward, grad, x, weight, stride, dilation, groups, *rest, mask)
    for u in into:
        first = u.args[0]
        u.replace_all_uses_with(first)
        first.meta = {**first.meta, "val": new.meta["val"][0]}


def _replace(node: Node, target: Any, *args: Any) -> Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with args[0].meta["val"].fake_mode:
        new.meta = {**node.meta, "val": target(*given)}
    node.replace_all_uses_with(new)
    return new
