"""Random draws that do not depend on the mesh: a counter-based generator over global element indices.

``spmd::draw(seed, stream, kind, size, offset, shape, dtype, device)`` yields the elements of a global tensor of
``shape`` from ``offset`` on, ``size`` of them in each dim.  Element ``i`` (row-major) is a function of ``seed`` (a 0-d
int64 tensor), ``stream`` (an integer that no other draw of the program has) and ``i`` alone: the bits are
SplitMix64's (Steele, Lea and Flood, OOPSLA 2014), and their key is output ``stream`` of the SplitMix64 that starts at
``seed``.  So streams add: the draws of ``seed + n * STEP`` are those of ``seed`` from stream ``n`` on, and a region
that is called again gets a seed of its own at each call (`number`, `give_seeds`).  The op runs by the same int64
arithmetic that `DECOMPOSITIONS` gives a compiler.

``kind`` is ``bits`` (63 random bits), ``uniform`` (``[0, 1)``, as many bits as the dtype's significand holds),
``normal`` (Box-Muller) or ``exponential`` (both in float64 by polynomials of plain products and sums, which every
device rounds alike, then rounded to the dtype).

`functionalize` replaces torch's random operators by draws.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .bodies import bodies
from .ir import META_KEYS, argument, body_of, copy_meta, fake_value, source_line
from .placements import SpmdError

aten, prims = torch.ops.aten, torch.ops.prims

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define(
    "draw(Tensor seed, int stream, str kind, SymInt[] size, SymInt[] offset, SymInt[] shape, ScalarType dtype, "
    "Device device) -> Tensor"
)
draw = torch.ops.spmd.draw.default


def _signed(n: int) -> int:
    n &= 2**64 - 1
    return n - 2**64 if n >= 2**63 else n


_STEP, _M1, _M2 = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK = 1 << 15  # elements that the eager op computes at once: they stay in cache and on one thread


def _shift(x: Tensor, by: int) -> Tensor:
    """An unsigned shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def _key(seed: Tensor, stream: int) -> Tensor:
    return _mix(seed + _signed((stream + 1) * _STEP))


def _index(size: Sequence[int], offset: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """The row-major global indices of a piece."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        place = (torch.arange(size[d], dtype=torch.int64, device=device) + offset[d]) * stride
        index = index + place.reshape([-1 if i == d else 1 for i in range(len(shape))])
        stride = stride * shape[d]
    return index


def _log(hi: Tensor) -> Tensor:
    """``-ln((hi + 0.5) / 2**32)`` of 32-bit integers, in float64."""
    bits = (hi.to(torch.float64) + 0.5).view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = mantissa > 1.4142135623730951
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    exponent = exponent + large.to(torch.int64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1 / 21)
    for n in range(19, 0, -2):
        series = series * square + 1 / n
    return (32 - exponent).to(torch.float64) * math.log(2) - 2.0 * s * series


def _root(x: Tensor) -> Tensor:
    """The square root by Newton's method (libraries round theirs differently)."""
    y = ((x.view(torch.int64) >> 1) + (1023 << 51)).view(torch.float64)
    for _ in range(4):
        y = 0.5 * (y + x / y)
    return y


def _cosine(lo: Tensor) -> Tensor:
    """``cos(2 pi (lo + 0.5) / 2**32)`` of 32-bit integers, in float64."""
    quarter = lo >> 30
    x = ((lo & ((1 << 30) - 1)).to(torch.float64) + 0.5) * (0.5 * math.pi / 2**30)  # in (0, pi/2)
    odd = (quarter & 1) == 1  # cos(x + pi/2) = -sin(x) = -cos(pi/2 - x)
    x = torch.where(odd, 0.5 * math.pi - x, x)
    square = x * x
    series = torch.full_like(x, 1 / math.factorial(20))
    for n in range(9, -1, -1):
        series = series * square + (-1) ** n / math.factorial(2 * n)
    return torch.where((quarter == 1) | (quarter == 2), -series, series)


SIGNIFICAND = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _from_bits(bits: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "bits":
        return _shift(bits, 1).to(dtype)
    if kind == "uniform":
        n = SIGNIFICAND[dtype]
        return _shift(bits, 64 - n).to(dtype) * 2.0**-n
    ln = _log(_shift(bits, 32))
    if kind == "normal":
        ln = _root(2.0 * ln) * _cosine(bits & (2**32 - 1))
    return ln.to(dtype)


def decomposed(
    seed: Tensor, stream: int, kind: str, size: Sequence[int], offset: Sequence[int], shape: Sequence[int],
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """`draw` as plain arithmetic."""
    bits = _mix((_key(seed, stream) + _index(size, offset, shape, device)) * _STEP)
    return _from_bits(bits, kind, dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {draw: decomposed}


@torch.library.register_fake("spmd::draw", lib=_LIB)
def _fake(seed, stream, kind, size, offset, shape, dtype, device):
    return torch.empty(size, dtype=dtype, device=device)


@torch.library.impl(_LIB, "draw", "CompositeExplicitAutograd")
def _eager(seed, stream, kind, size, offset, shape, dtype, device):
    key = _key(seed, stream).to(device)
    index = _index(size, offset, shape, device)
    out = torch.empty(size, dtype=dtype, device=device)
    flat, index = out.view(-1), index.reshape(-1)
    for begin in range(0, flat.numel(), _BLOCK if device.type == "cpu" else max(flat.numel(), 1)):
        end = begin + _BLOCK if device.type == "cpu" else flat.numel()
        flat[begin:end] = _from_bits(_mix((key + index[begin:end]) * _STEP), kind, dtype)
    return out


# --- torch's random operators as draws ----------------------------------------------------------------------


class Write:
    """Writes nodes in place of one random node."""

    def __init__(self, graph: Graph, node: Node, seed: Node, stream: int) -> None:
        self.graph, self.node, self.seed, self.stream = graph, node, seed, stream

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta["val"] = fake_value(made, self.seed.meta["val"].fake_mode)
        copy_meta(made, self.node, META_KEYS)
        return made

    def draw(self, kind: str, like: Tensor, dtype: torch.dtype | None = None) -> Node:
        shape = list(like.shape)
        return self.call(
            draw, self.seed, self.stream, kind, shape, [0] * len(shape), shape, dtype or like.dtype, like.device
        )

    def uniform(self, like: Tensor) -> Node:
        """In ``[0, 1)``, in float32 at least."""
        return self.draw("uniform", like, torch.float64 if like.dtype == torch.float64 else torch.float32)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)

    def scaled(self, x: Node, by: Any, plus: Any) -> Node:
        if by != 1:
            x = self.call(aten.mul.Tensor, x, by)
        return x if isinstance(plus, (int, float)) and plus == 0 else self.call(aten.add.Tensor, x, plus)


def _parts(kind: str, scale: float) -> Callable[[Write, Node], Node]:
    """A draw; of a complex dtype two draws, ``scale`` times each."""

    def rewrite(w: Write, n: Node) -> Node:
        value = n.meta["val"]
        if not value.dtype.is_complex:
            return w.draw(kind, value)
        pair = torch.empty((*value.shape, 2), dtype=value.dtype.to_real(), device=value.device)
        return w.call(aten.view_as_complex.default, w.scaled(w.draw(kind, pair), scale, 0))

    return rewrite


_unit, _standard = _parts("uniform", 1), _parts("normal", math.sqrt(0.5))


def _integers(w: Write, n: Node) -> Node | None:
    low, high = argument(n, "low", argument(n, "from", 0)) or 0, argument(n, "high", argument(n, "to"))
    value = n.meta["val"]
    if isinstance(high, Node) or isinstance(low, Node):
        return None
    if high is None:  # every number that the dtype holds
        bits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(value.dtype)
        high = 2**bits + 1 if bits else torch.iinfo(value.dtype).max
    drawn = w.call(aten.remainder.Scalar, w.draw("bits", value, torch.int64), high - low)
    return w.cast(w.scaled(drawn, 1, low), value.dtype)


def _bernoulli(w: Write, n: Node) -> Node:
    value = n.meta["val"]
    p = argument(n, "p", n.args[0])
    test = aten.lt.Tensor if isinstance(p, Node) else aten.lt.Scalar
    return w.cast(w.call(test, w.uniform(value), p), value.dtype)


def _dropout(w: Write, n: Node) -> tuple[Node, Node]:
    x, p, train = n.args[0], n.args[1], argument(n, "train")
    value = x.meta["val"]
    if train is False or p == 0:
        mask = w.call(aten.full.default, list(value.shape), True, dtype=torch.bool, device=value.device)
        return w.call(aten.clone.default, x), mask
    mask = w.call(aten.ge.Scalar, w.uniform(value), p)
    kept = w.call(aten.mul.Tensor, x, w.cast(mask, value.dtype))
    return w.scaled(kept, 0.0 if p == 1 else 1 / (1 - p), 0), mask


def _normal(w: Write, n: Node) -> Node:
    mean, std = argument(n, "mean", 0.0), argument(n, "std", 1.0)
    return w.scaled(_standard(w, n), std, mean)


def _uniform(w: Write, n: Node) -> Node:
    low, high = argument(n, "from", 0.0), argument(n, "to", 1.0)
    return w.scaled(w.draw("uniform", n.meta["val"]), high - low, low)


def _exponential(w: Write, n: Node) -> Node:
    return w.scaled(w.draw("exponential", n.meta["val"]), 1 / argument(n, "lambd", 1.0), 0)


def _geometric(w: Write, n: Node) -> Node:
    """The number of trials: ``ceil`` of an exponential."""
    rate = w.scaled(w.draw("exponential", n.meta["val"], torch.float64), -1 / math.log1p(-argument(n, "p")), 0)
    return w.cast(w.call(aten.clamp_min.default, w.call(aten.ceil.default, rate), 1.0), n.meta["val"].dtype)


def _log_normal(w: Write, n: Node) -> Node:
    return w.call(aten.exp.default, w.scaled(w.draw("normal", n.meta["val"]), argument(n, "std"), argument(n, "mean")))


def _cauchy(w: Write, n: Node) -> Node:
    turned = w.scaled(w.uniform(n.meta["val"]), math.pi, -math.pi / 2)
    made = w.scaled(w.call(aten.tan.default, turned), argument(n, "sigma"), argument(n, "median"))
    return w.cast(made, n.meta["val"].dtype)


def _multinomial(w: Write, n: Node) -> Node | None:
    """A race of exponentials; with replacement the inverse of the cumulative sum."""
    weights, count, replace = n.args[0], n.args[1], argument(n, "replacement", False)
    value = weights.meta["val"]
    if not isinstance(count, int):
        return None
    if count > 1 and replace:
        wide = w.cast(weights, torch.float64)
        summed = w.call(aten.cumsum.default, wide, -1)
        top = w.call(aten.slice.Tensor, summed, value.dim() - 1, value.shape[-1] - 1, value.shape[-1])
        u = w.call(aten.mul.Tensor, w.draw("uniform", n.meta["val"], torch.float64), top)
        return w.call(aten.searchsorted.Tensor, summed, u, right=True)
    race = w.call(aten.div.Tensor, weights, w.draw("exponential", value))
    if count == 1:
        return w.call(aten.argmax.default, race, -1, True)
    if 2 * count <= value.shape[-1]:
        return w.call(operator.getitem, w.call(aten.topk.default, race, count), 1)
    order = w.call(aten.sort.stable, race, stable=True, descending=True)
    return w.call(aten.slice.Tensor, w.call(operator.getitem, order, 1), value.dim() - 1, 0, count)


def _permutation(w: Write, n: Node) -> Node:
    pair = w.call(aten.sort.stable, w.draw("bits", n.meta["val"], torch.int64), stable=True)
    return w.cast(w.call(operator.getitem, pair, 1), n.meta["val"].dtype)


REWRITES: dict[Any, Callable[[Write, Node], Any]] = {
    aten.rand: _unit,
    aten.rand_like: _unit,
    aten.randn: _standard,
    aten.randn_like: _standard,
    aten.randint: _integers,
    aten.randint_like: _integers,
    aten.random: _integers,
    aten.bernoulli: _bernoulli,
    aten.native_dropout: _dropout,
    aten.normal_functional: _normal,
    aten.normal: _normal,
    prims.normal: _normal,
    aten.uniform: _uniform,
    aten.exponential: _exponential,
    aten.geometric: _geometric,
    aten.log_normal: _log_normal,
    aten.cauchy: _cauchy,
    aten.multinomial: _multinomial,
    aten.randperm: _permutation,
}


def is_random(node: Node) -> bool:
    """Whether a node draws from torch's generator (attention with a dropout probability of 0 doesn't)."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for i, given in enumerate(node.target._schema.arguments):
        if given.name == "dropout_p":
            return (node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", given.default_value)) != 0
    return True


def functionalize(graph: Graph, seed: Node) -> list[Node]:
    """Replace every random operator of a joint graph by draws from ``seed``, in the streams that `number` gave them
    (none: counted from 0).

    ``seed`` is a 0-d int64 node that stands before them.  Returns the random nodes that have no replacement (they
    are left alone).  Draws are functions of their arguments: they may be computed again in the backward.
    """
    left = []
    count = 0
    for node in list(graph.nodes):
        rewrite = REWRITES.get(getattr(node.target, "overloadpacket", None)) if node.op == "call_function" else None
        if rewrite is None:
            if is_random(node):
                left.append(node)
            continue
        if argument(node, "generator") is not None:
            raise SpmdError(
                f"{source_line(node) or node.name}: {node.target} draws from a generator of its own, which ranks can't "
                "share; leave generator= out, or draw outside the compiled function"
            )
        with graph.inserting_before(node):
            made = rewrite(Write(graph, node, seed, node.meta.get("stream", count)), node)
        if made is None:
            left.append(node)
            continue
        count += 1
        if isinstance(made, tuple):
            for user in list(node.users):
                user.replace_all_uses_with(made[user.args[1]])
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(made)
        graph.erase_node(node)
    return left


# --- regions --------------------------------------------------------------------------------------------------


def _region_draws(node: Node) -> GraphModule | None:
    """The body that a call of a region runs, where that draws."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    body = body_of(node.args[0])
    return body if body is not None and _draws(body) else None


def _draws(body: GraphModule) -> bool:
    return any(is_random(n) or _region_draws(n) is not None for n in body.graph.nodes)


def number(graph: Graph) -> int:
    """Set ``meta["stream"]`` of every random operator of a joint graph, and of every call of a region that draws the
    first of the streams that are its body's, in the order in which one graph without regions would have them; return
    how many there are.

    A region's backward runs its forward again: its draws are those of the forward call that it belongs to.
    """
    count = 0
    forward: dict[Any, Node] = {}  # by torch's number of a call, which its backward has too
    for node in graph.nodes:
        body = _region_draws(node)
        if body is None:
            if is_random(node):
                node.meta["stream"] = count
                count += 1
            continue
        call = node.meta.get("custom", {}).get("call_id")
        if call is None and node.meta.get("phase") == "backward":
            raise SpmdError(
                f"{source_line(node) or node.name}: a region (nested_compile_region) draws, and this torch doesn't say "
                "to which of its calls a backward belongs (2.13 does); draw outside the region and pass the numbers in"
            )
        first = forward.setdefault(node if call is None else call, node)
        node.meta["stream"] = first.meta.get("stream", count)
        if first is node:
            count += number(body.graph)
        else:
            _follow(node, body, body_of(first.args[0]))  # type: ignore[arg-type]
    return count


def _follow(call: Node, body: GraphModule, forward: GraphModule) -> None:
    """Number a region's backward, which makes the draws of its forward again, in their order."""
    given, again = ([n for n in g.graph.nodes if is_random(n)] for g in (forward, body))
    regions = any(_region_draws(n) is not None for n in body.graph.nodes)
    if regions or [n.target for n in given] != [n.target for n in again]:
        raise SpmdError(
            f"{source_line(call) or call.name}: the backward of a region (nested_compile_region) draws other numbers "
            "than its forward; draw outside the region and pass the numbers in, or leave the region out"
        )
    for old, new in zip(given, again, strict=True):
        new.meta["stream"] = old.meta["stream"]


def give_seeds(gm: GraphModule, seed: Node) -> None:
    """Pass every region that draws a seed as its last operand, so that its streams, counted from 0 in each body, are
    those that `number` gave its call.  ``seed`` is the graph's own."""
    known: dict[int, Node] = {0: seed}
    for call in [n for n in gm.graph.nodes if _region_draws(n) is not None]:
        first = call.meta["stream"]
        if first not in known:
            with gm.graph.inserting_before(call):
                own = gm.graph.call_function(aten.add.Tensor, (seed, _signed(first * _STEP)))
            own.meta.update(val=seed.meta["val"], phase=call.meta.get("phase", "forward"), source=source_line(call))
            known[first] = own
        call.args = (*call.args, known[first])
    for body in {b: None for n in bodies(gm) if (b := body_of(n)) is not None and _draws(b)}:
        places = body.graph.find_nodes(op="placeholder")
        if any(n.meta.get("seed") for n in places):
            continue
        with body.graph.inserting_before(next(n for n in body.graph.nodes if n.op != "placeholder")):
            place = body.graph.placeholder("seed")
        place.meta.update(val=seed.meta["val"], phase="forward", seed=True)
        give_seeds(body, place)
