"""The collectives of a partitioned graph, as operators ``spmd::*`` over named mesh axes.

They are what passes, text and simulator see; ``lower.py`` turns them into functional collectives just before
the local compiler runs.  They hold no rank: sizes that differ between ranks are symbolic arguments
(`symbolic.py`).  An uneven piece is what ``torch.chunk`` gives, ranks with an empty piece take part like any
other.

====================  =========================================================================================
``all_reduce``        ``(x, axis, parts, op)``: reduce ``x`` over ``axis``
``all_gather``        ``(x, dim, total, axis, parts)``: pieces of ``dim`` along ``axis`` -> ``total`` elements
``reduce_scatter``    ``(x, dim, size, axis, parts, op)``: reduce over ``axis``, keep the own piece (``size``)
``all_to_all``        ``(x, gather_dim, total, split_dim, size, axis, parts)``: ``gather_dim`` becomes whole
                      (``total``), of ``split_dim`` the own piece (``size``) is kept
``permute``           ``(x, dim, size, order, new_order, sizes)``: ``dim`` is sharded on the axes ``order`` (outermost
                      first, of ``sizes`` devices); pieces travel so that it is nested as ``new_order``; even only
``fetch``             ``(x, dim, size, have, want, fill, axes, sizes)``: device ``i`` (row-major over ``axes`` as given,
                      of ``sizes``) holds the range ``have[2i:2i+2]`` of ``dim``, no two the same element, and gets the
                      ranges ``want`` lists for it (as many for each device), ``size`` elements one after the other;
                      what nobody holds is ``fill``.  Only what a device lacks travels
====================  =========================================================================================
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

_LIB = torch.library.Library("spmd", "DEF")
_LIB.define("all_reduce(Tensor x, str axis, int parts, str op) -> Tensor")
_LIB.define("all_gather(Tensor x, int dim, SymInt total, str axis, int parts) -> Tensor")
_LIB.define("reduce_scatter(Tensor x, int dim, SymInt size, str axis, int parts, str op) -> Tensor")
_LIB.define(
    "all_to_all(Tensor x, int gather_dim, SymInt total, int split_dim, SymInt size, str axis, int parts) -> Tensor"
)
_LIB.define("permute(Tensor x, int dim, SymInt size, str[] order, str[] new_order, int[] sizes) -> Tensor")
_LIB.define(
    "fetch(Tensor x, int dim, SymInt size, int[] have, int[] want, Scalar fill, str[] axes, int[] sizes) -> Tensor"
)

all_reduce = torch.ops.spmd.all_reduce.default
all_gather = torch.ops.spmd.all_gather.default
reduce_scatter = torch.ops.spmd.reduce_scatter.default
all_to_all = torch.ops.spmd.all_to_all.default
permute = torch.ops.spmd.permute.default
fetch = torch.ops.spmd.fetch.default

KINDS = {
    all_reduce: "all_reduce",
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
    permute: "permute",
    fetch: "permute",
}


def _with_size(x: torch.Tensor, **sizes: int) -> torch.Tensor:
    shape = list(x.shape)
    for dim, size in sizes.items():
        shape[int(dim[1:])] = size
    return x.new_empty(shape)


@torch.library.register_fake("spmd::all_reduce", lib=_LIB)
def _(x, axis, parts, op):
    return x.new_empty(x.shape)


@torch.library.register_fake("spmd::all_gather", lib=_LIB)
def _(x, dim, total, axis, parts):
    return _with_size(x, **{f"d{dim}": total})


@torch.library.register_fake("spmd::reduce_scatter", lib=_LIB)
def _(x, dim, size, axis, parts, op):
    return _with_size(x, **{f"d{dim}": size})


@torch.library.register_fake("spmd::all_to_all", lib=_LIB)
def _(x, gather_dim, total, split_dim, size, axis, parts):
    return _with_size(x, **{f"d{gather_dim}": total, f"d{split_dim}": size})


@torch.library.register_fake("spmd::permute", lib=_LIB)
def _(x, dim, size, order, new_order, sizes):
    return _with_size(x, **{f"d{dim}": size})


@torch.library.register_fake("spmd::fetch", lib=_LIB)
def _(x, dim, size, have, want, fill, axes, sizes):
    return _with_size(x, **{f"d{dim}": size})


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and node.target in KINDS


def axes_of(node: Node) -> tuple[str, ...]:
    """The mesh axes a collective runs over."""
    if node.target in (permute, fetch):
        return tuple(node.args[3 if node.target is permute else 6])
    return (node.args[{all_reduce: 1, all_gather: 3, reduce_scatter: 3, all_to_all: 5}[node.target]],)


def group_size(node: Node) -> int:
    """The number of devices that take part in one instance of a collective."""
    if node.target in (permute, fetch):
        return math.prod(node.args[5 if node.target is permute else 7])
    return node.args[{all_reduce: 2, all_gather: 4, reduce_scatter: 4, all_to_all: 6}[node.target]]


Range = tuple[int, int]


def ranges(flat: Sequence[int], parts: int) -> list[list[Range]]:
    """The ranges of each of ``parts`` devices from the flat list of a ``fetch``."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    each = len(pairs) // parts
    return [pairs[i * each : (i + 1) * each] for i in range(parts)]


def overlaps(have: Sequence[Range], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """``(device, begin, end)`` for every part of a range that some device holds; ``have`` ascends."""
    at = bisect.bisect_right(have, begin, key=lambda r: r[1])
    while at < len(have) and have[at][0] < end:
        low, high = max(begin, have[at][0]), min(end, have[at][1])
        if low < high:
            yield at, low, high
        at += 1


def sent(have: Sequence[Range], want: Sequence[Sequence[Range]]) -> list[int]:
    """How many elements of the dim each device sends to others in a ``fetch``."""
    count = [0] * len(have)
    for device, wanted in enumerate(want):
        for begin, end in wanted:
            for source, low, high in overlaps(have, begin, end):
                count[source] += (high - low) * (source != device)
    return count


def message_bytes(node: Node) -> int:
    """The bytes that `wire_bytes` counts from: those of the result, or of a ``fetch`` what the busiest device sends."""
    value = node.meta["val"]
    if node.target is not fetch:
        return value.numel() * value.element_size()
    x, dim, _, have, want, _, _, sizes = node.args
    parts = math.prod(sizes)
    most = max(sent([r for (r,) in ranges(have, parts)], ranges(want, parts)))
    return most * math.prod(n for d, n in enumerate(x.meta["val"].shape) if d != dim) * value.element_size()


def reduce_op(node: Node) -> str | None:
    return {all_reduce: lambda: node.args[3], reduce_scatter: lambda: node.args[5]}.get(node.target, lambda: None)()


def wire_bytes(kind: str, result_bytes: float, parts: int) -> float:
    """Bytes that one device sends under a ring of ``parts`` devices, given the bytes of its (padded) result."""
    if kind == "all_reduce":
        return 2 * (parts - 1) / parts * result_bytes
    if kind in ("all_gather", "all_to_all"):
        return (parts - 1) / parts * result_bytes
    if kind == "reduce_scatter":
        return (parts - 1) * result_bytes
    if kind == "permute":
        return result_bytes
    raise ValueError(f"unknown collective {kind!r}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.  ``bytes`` are those of one device's result, ``wire_bytes`` what it sends.

    Within a loop, or a region that is called again, ``wire_bytes`` are those of all ``times`` that it runs in a step
    (0: nobody knows, and they are those of one turn).
    """

    name: str
    kind: str
    axis: str
    op: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    wire_bytes: float
    phase: str
    source: str
    why: str
    times: int = 1

    @staticmethod
    def of(node: Node) -> Collective:
        value = node.meta["val"]
        nbytes, times = value.numel() * value.element_size(), node.meta.get("times", 1)
        return Collective(
            name=node.name,
            kind=KINDS[node.target],
            axis="/".join(axes_of(node)),
            op=reduce_op(node),
            dtype=value.dtype,
            shape=tuple(int(s) for s in value.shape),
            bytes=nbytes,
            wire_bytes=wire_bytes(KINDS[node.target], message_bytes(node), group_size(node)) * max(1, times),
            phase=node.meta.get("phase", "forward"),
            source=node.meta.get("source", ""),
            why=node.meta.get("why", ""),
            times=times,
        )


def collectives(nodes: Iterable[Node]) -> tuple[Collective, ...]:
    return tuple(Collective.of(n) for n in nodes if is_collective(n))
