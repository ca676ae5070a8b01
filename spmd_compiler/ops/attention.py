"""Scaled dot product attention: batch ``b``, heads ``g`` (each with ``r`` query heads), sequences ``s`` and ``t``.

A sharded query sequence makes partial gradients of keys and values.  A sharded key sequence makes local softmaxes,
which the forward merges by their logsumexp (as in ring attention); the backward, which is given the merged one,
needs nothing but a sum for the queries.  A causal mask of a sharded sequence is written out.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from ..ir import Emit, operands, results
from ..rules import Linear, Rule, define, parse_rule
from .forms import constant, positions
from .reduce import argument

aten, prims = torch.ops.aten, torch.ops.prims

Q, K, V, OUT, LSE = "b (g r) s d", "b g t d", "b g t e", "b (g r) s e", "b (g r) s"
MASK = {2: "s t", 4: "b (g r) s t"}


def attention(node: Node, ops: list[str], res: list[str], products: int, whole: str, **fields: Any) -> Rule | None:
    """The rule of a forward (2 products of queries by keys) or a backward (5); None if it drops out.

    The dropout of fused operators draws from the device's generator, which knows no global indices.
    """
    if argument(node, "dropout_p", 0.0):
        return None
    template = parse_rule(", ".join(ops) + " -> " + ", ".join(res))
    found = template.instantiate(node, flops=None, whole=frozenset(whole.split()) | {"d", "e"}, **fields)
    n = found.sizes
    pairs = n["b"] * n["g"] * n["r"] * n["s"] * n["t"]
    flops = 2.0 * products * pairs * (n["d"] + n["e"]) / 2
    return dataclasses.replace(found, flops=flops, even=frozenset(n))


# --- on CPU -------------------------------------------------------------------------------------------------


def _causal(e: Emit, q: Node) -> Node:
    """The additive causal mask of the local queries and keys."""
    places = [positions(e, f, q) for f in "st"]
    seen = e.call(aten.le.Tensor, places[1], e.call(aten.unsqueeze.default, places[0], 1))
    return e.call(aten.where.self, seen, constant(e, 0.0, q), constant(e, -math.inf, q))


def _masked(e: Emit, q: Node, causal: bool, kwargs: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """A causal flag that holds for the global sequence, as one that holds for the local piece."""
    if causal and (e.axes("s") or e.axes("t")):
        return False, {**kwargs, "attn_mask": _causal(e, q)}
    return causal, kwargs


def merged(e: Emit, out: Node, lse: Node, mask: Node | None) -> tuple[Node, Node]:
    """Attention over all keys from the attentions over each device's, under a local additive mask."""
    dtype = out.meta["val"].dtype
    if mask is not None:  # of rows that see none of the local keys the kernel gives a logsumexp of 0
        lost = e.call(aten.eq.Scalar, e.call(aten.amax.default, mask, [-1]), -math.inf)
        lse = e.call(aten.where.self, lost, constant(e, -math.inf, lse), lse)
    top = e.all_reduce(lse, "t", "max")
    nowhere = e.call(aten.eq.Scalar, top, -math.inf)
    top = e.call(aten.where.self, nowhere, constant(e, 0.0, top), top)
    weight = e.call(aten.exp.default, e.call(aten.sub.Tensor, lse, top))
    total = e.all_reduce(weight, "t")
    share = e.call(aten.unsqueeze.default, e.call(aten.div.Tensor, weight, total), -1)
    scaled = e.call(aten.mul.Tensor, out, share)
    some = e.call(aten.gt.Scalar, share, 0)
    made = e.all_reduce(e.call(aten.where.self, some, scaled, constant(e, 0.0, scaled)), "t")
    if made.meta["val"].dtype != dtype:
        made = e.call(prims.convert_element_type.default, made, dtype)
    lse = e.call(aten.add.Tensor, e.call(aten.log.default, total), top)
    return made, e.call(aten.where.self, nowhere, top, lse)


@define(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _(node: Node) -> Rule | None:
    def form(e: Emit, q: Node, k: Node, v: Node, dropout: float = 0.0, causal: bool = False, **kwargs: Any) -> Any:
        causal, kwargs = _masked(e, q, causal, kwargs)
        made = e.call(node.target, q, k, v, dropout, causal, **kwargs)
        if not e.axes("t"):
            return made
        return merged(e, e.call(operator.getitem, made, 0), e.call(operator.getitem, made, 1), kwargs.get("attn_mask"))

    mask = [MASK[o.meta["val"].dim()] for o in operands(node)[3:]]
    return attention(node, [Q, K, V, *mask], [OUT, LSE], 2, "", form=form, linear=(), reduce={"t": "none"})


@define(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _(node: Node) -> Rule | None:
    def form(e: Emit, grad: Node, q: Node, k: Node, v: Node, out: Node, lse: Node, dropout: float, causal: bool,
             **kwargs: Any) -> Any:  # fmt: skip
        causal, kwargs = _masked(e, q, causal, kwargs)
        return e.call(node.target, grad, q, k, v, out, lse, dropout, causal, **kwargs)

    mask = [MASK[o.meta["val"].dim()] for o in operands(node)[6:]]
    return attention(
        node, [OUT, Q, K, V, OUT, LSE, *mask], [Q, K, V], 5, "", form=form, linear=(Linear((0,)),)
    )  # fmt: skip


# --- on other devices: batch, heads and, where nothing is causal, queries -----------------------------------


def _plain(shape: tuple[int, ...]) -> str:
    """A term that is tied to nothing."""
    return " ".join("1" for _ in shape)


def _fused(
    node: Node, names: list[tuple[str, str]], res: list[str | None], products: int, **fields: Any
) -> Rule | None:  # fmt: skip
    """``names`` gives a term for each tensor argument by name; other tensors and results are whole."""
    terms = dict(names)
    schema = [a.name for a in node.target._schema.arguments]
    given = dict(zip(schema, node.args, strict=False)) | node.kwargs
    ops = [
        terms.get(name, _plain(tuple(value.meta["val"].shape)))
        for name, value in given.items()
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]
    made = [
        term if term is not None and value is not None and value.dim() else _plain(() if value is None else value.shape)
        for term, value in zip(res, results(node), strict=True)
    ]
    whole = "t" + (" s" if argument(node, "is_causal", False) else "")

    def form(e: Emit, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name, factor in (("max_q", "s"), ("max_k", "t")):
            if name in schema[: len(given)]:
                given[schema.index(name)] = e.size(factor)
        return e.call(node.target, *given, **kwargs)

    return attention(node, ops, made, products, whole, form=form, **fields)


TERMS = [
    ("query", Q), ("key", K), ("value", V), ("grad_out", OUT), ("grad_out_", OUT), ("out", OUT), ("attn_bias", MASK[4]),
]  # fmt: skip
NONE = {f: "none" for f in ("b", "g", "s")}  # of random states and the like


@define(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_fused_attention_overrideable.default)
def _(node: Node) -> Rule | None:
    return _fused(node, TERMS, [OUT, LSE, *[None] * 7], 2, linear=(), reduce=NONE)


@define(aten._scaled_dot_product_flash_attention_backward.default)
def _(node: Node) -> Rule | None:
    return _fused(node, [*TERMS, ("logsumexp", LSE)], [Q, K, V], 5, linear=(Linear((0,)),))


@define(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def _(node: Node) -> Rule | None:
    return _fused(node, [*TERMS, ("logsumexp", LSE)], [Q, K, V, MASK[4]], 5, linear=(Linear((0,)),))


@define(aten._scaled_dot_product_cudnn_attention.default)
def _(node: Node) -> Rule | None:
    return _fused(node, TERMS, [OUT, f"{LSE} 1", *[None] * 7], 2, linear=(), reduce=NONE)


@define(aten._scaled_dot_product_cudnn_attention_backward.default)
def _(node: Node) -> Rule | None:
    return _fused(node, [*TERMS, ("logsumexp", f"{LSE} 1")], [Q, K, V], 5, linear=(Linear((0,)),))


# the memory-efficient kernels pad the logsumexp's sequence: queries stay whole
@define(aten._scaled_dot_product_efficient_attention.default)
def _(node: Node) -> Rule | None:
    found = _fused(node, TERMS, [OUT, "b (g r) 1", None, None], 2, linear=(), reduce=NONE)
    return found and dataclasses.replace(found, whole=found.whole | {"s"})


@define(aten._scaled_dot_product_efficient_attention_backward.default)
def _(node: Node) -> Rule | None:
    found = _fused(node, [*TERMS, ("logsumexp", "b (g r) 1")], [Q, K, V, MASK[4]], 5, linear=(Linear((0,)),))
    return found and dataclasses.replace(found, whole=found.whole | {"s"})
