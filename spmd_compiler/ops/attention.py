"""Scaled dot product attention: batch ``b``, heads ``g`` (each with ``r`` query heads), sequences ``s`` and ``t``.

A sharded query sequence makes partial gradients of keys and values.  A sharded key sequence makes local softmaxes,
which the forward merges by their logsumexp (as in ring attention); the backward, which is given the merged one,
needs nothing but a sum for the queries.  A causal mask of a sharded sequence is written out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..forms.values import positions
from ..ir import argument, is_tensor, operands, results
from ..rules import Linear, Rule, define, parse_rule

aten = torch.ops.aten

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


def _masked(e: Emit, q: Local, causal: bool, kwargs: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """A causal flag that holds for the global sequence, as an additive mask of the local queries and keys."""
    if not causal or not e.axes("s", "t"):
        return causal, kwargs
    queries, keys = (positions(e, f, q) for f in "st")
    return False, {**kwargs, "attn_mask": (keys <= queries.unsqueeze(1)).where(q.number(0.0), -math.inf)}


def merged(e: Emit, out: Local, lse: Local, mask: Local | None) -> tuple[Local, Local]:
    """Attention over all keys from the attentions over each device's, under a local additive mask."""
    if mask is not None:  # of rows that see none of the local keys the kernel gives a logsumexp of 0
        lse = mask.amax([-1]).eq(-math.inf).where(-math.inf, lse)
    top = e.all_reduce(lse, "t", "max")
    nowhere = top.eq(-math.inf)
    top = nowhere.where(0.0, top)
    weight = (lse - top).exp()
    total = e.all_reduce(weight, "t")
    share = (weight / total).unsqueeze(-1)
    made = e.all_reduce((share > 0).where(out * share, 0.0), "t").to(out.dtype)
    return made, nowhere.where(top, total.log() + top)


@define(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _(node: Node) -> Rule | None:
    def form(e: Emit, q: Local, k: Local, v: Local, dropout: float = 0.0, causal: bool = False, **kwargs: Any) -> Any:
        causal, kwargs = _masked(e, q, causal, kwargs)
        made = e.same(q, k, v, dropout, causal, **kwargs)
        return merged(e, made[0], made[1], kwargs.get("attn_mask")) if e.axes("t") else made

    mask = [MASK[o.meta["val"].dim()] for o in operands(node)[3:]]
    return attention(node, [Q, K, V, *mask], [OUT, LSE], 2, "", form=form, linear=(), reduce={"t": "none"})


@define(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _(node: Node) -> Rule | None:
    def form(e: Emit, grad: Local, q: Local, *rest: Any, **kwargs: Any) -> Any:
        causal, kwargs = _masked(e, q, rest[-1], kwargs)
        return e.same(grad, q, *rest[:-1], causal, **kwargs)

    mask = [MASK[o.meta["val"].dim()] for o in operands(node)[6:]]
    return attention(
        node, [OUT, Q, K, V, OUT, LSE, *mask], [Q, K, V], 5, "", form=form, linear=(Linear((0,)),)
    )  # fmt: skip


# --- on other devices: batch, heads and, where nothing is causal, queries -----------------------------------

# For each kernel the products, the terms of its results (None: whole) and those of its tensors that `TERMS` lacks.
PADDED = "b (g r) 1"  # the memory-efficient kernels pad the logsumexp's sequence: queries stay whole
FUSED: dict[str, tuple[int, list[str | None], str]] = {
    "flash_attention": (2, [OUT, LSE, *[None] * 7], ""),
    "flash_attention_backward": (5, [Q, K, V], LSE),
    "fused_attention_overrideable": (2, [OUT, LSE, *[None] * 7], ""),
    "fused_attention_overrideable_backward": (5, [Q, K, V, MASK[4]], LSE),
    "cudnn_attention": (2, [OUT, f"{LSE} 1", *[None] * 7], ""),
    "cudnn_attention_backward": (5, [Q, K, V], f"{LSE} 1"),
    "efficient_attention": (2, [OUT, PADDED, None, None], PADDED),
    "efficient_attention_backward": (5, [Q, K, V, MASK[4]], PADDED),
}
TERMS = {"query": Q, "key": K, "value": V, "grad_out": OUT, "grad_out_": OUT, "out": OUT, "attn_bias": MASK[4]}
NONE = {f: "none" for f in "bgs"}  # of random states and the like


def _term(term: str | None, value: torch.Tensor | None) -> str:
    """A term, or one that is tied to nothing where there is none."""
    n = 0 if value is None else value.dim()
    return term if term is not None and n else " ".join("1" * n)


@define(*(getattr(aten, f"_scaled_dot_product_{name}").default for name in FUSED))
def _(node: Node) -> Rule | None:
    products, res, lse = FUSED[node.target._schema.name.removeprefix("aten::_scaled_dot_product_")]
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    terms = {**TERMS, "logsumexp": lse}
    ops = [_term(terms.get(name), v.meta["val"]) for name, v in given.items()
           if isinstance(v, Node) and is_tensor(v.meta.get("val"))]  # fmt: skip
    made = [_term(term, value) for term, value in zip(res, results(node), strict=True)]
    whole = "t s" if argument(node, "is_causal", False) or lse == PADDED else "t"

    def form(e: Emit, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name, factor in (("max_q", "s"), ("max_k", "t")):
            if name in names[: len(given)]:
                given[names.index(name)] = e.size(factor)
        return e.same(*given, **kwargs)

    fields: dict[str, Any] = {"linear": (Linear((0,)),)} if products == 5 else {"linear": (), "reduce": NONE}
    return attention(node, ops, made, products, whole, form=form, **fields)
