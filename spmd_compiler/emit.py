"""`emit_choice` writes the local nodes of a joint node; `Emit` and `Local` are what local forms write them with."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from . import collectives as coll
from .ir import Writer, is_tensor, local_fake, results
from .placements import Mesh, Spec
from .rules import Choice, Dims, Rule
from .symbolic import IntExpr, bind_tree, coordinate, length, offset, pieces, table

aten, prims = torch.ops.aten, torch.ops.prims
T = TypeVar("T")


def _binary(tensor: Any, scalar: Any = None) -> Callable[[Local, Any], Local]:
    return lambda x, y: x.e.call(tensor if scalar is None or isinstance(y, Local) else scalar, x, y)


def _named(target: Any) -> Callable[..., Local]:
    return lambda x, *args, **kwargs: x.e.call(target, x, *args, **kwargs)


class Local:
    """A value of the local graph.  Operators and methods are the calls that they would be of a tensor; sympy
    expressions of coordinates may stand for numbers."""

    def __init__(self, e: Emit, node: Node) -> None:
        self.e, self.node = e, node

    @property
    def val(self) -> Any:
        """The fake value at coordinate 0 (of several results a tuple)."""
        return self.node.meta["val"]

    @property
    def shape(self) -> Sequence[int]:
        """At coordinate 0, where pieces are largest."""
        return self.val.shape

    @property
    def ndim(self) -> int:
        return self.val.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.val.dtype

    def __getitem__(self, result: int) -> Local:
        """One of several results."""
        return self.e.call(operator.getitem, self, result)

    def __iter__(self) -> Iterator[Local]:
        return (self[i] for i in range(len(self.val)))

    __add__ = __radd__ = _binary(aten.add.Tensor)
    __sub__ = _binary(aten.sub.Tensor)
    __rsub__ = _named(aten.rsub.Scalar)
    __mul__ = __rmul__ = _binary(aten.mul.Tensor)
    __truediv__ = _binary(aten.div.Tensor)
    __mod__ = _binary(aten.remainder.Tensor, aten.remainder.Scalar)
    __and__ = _binary(aten.bitwise_and.Tensor)
    __or__ = _binary(aten.bitwise_or.Tensor)
    __ge__ = _binary(aten.ge.Tensor, aten.ge.Scalar)
    __gt__ = _binary(aten.gt.Tensor, aten.gt.Scalar)
    __le__ = _binary(aten.le.Tensor, aten.le.Scalar)
    __lt__ = _binary(aten.lt.Tensor, aten.lt.Scalar)
    eq = _binary(aten.eq.Tensor, aten.eq.Scalar)

    def __floordiv__(self, other: Any) -> Local:
        return self.e.call(aten.div.Tensor_mode, self, other, rounding_mode="floor")

    alias = _named(aten.alias.default)
    amax = _named(aten.amax.default)
    clamp = _named(aten.clamp.default)
    clamp_max = _named(aten.clamp_max.default)
    clamp_min = _named(aten.clamp_min.default)
    exp = _named(aten.exp.default)
    expand = _named(aten.expand.default)
    flip = _named(aten.flip.default)
    gather = _named(aten.gather.default)
    index_select = _named(aten.index_select.default)
    isnan = _named(aten.isnan.default)
    log = _named(aten.log.default)
    permute = _named(aten.permute.default)
    reshape = _named(aten.reshape.default)
    slice = _named(aten.slice.Tensor)
    squeeze = _named(aten.squeeze.dims)
    sum = _named(aten.sum.dim_IntList)
    unsqueeze = _named(aten.unsqueeze.default)

    def contiguous(self) -> Local:
        return self.e.call(aten.clone.default, self, memory_format=torch.contiguous_format)

    def to(self, dtype: torch.dtype) -> Local:
        return self if self.dtype == dtype else self.e.call(prims.convert_element_type.default, self, dtype)

    def number(self, value: Any, dtype: torch.dtype | None = None) -> Local:
        """A 0-d tensor of this dtype, or of another; ``value`` may be a coordinate expression."""
        return self.e.call(aten.full.default, [], value, dtype=dtype or self.dtype, device=self.val.device)

    def where(self, x: Any, y: Any) -> Local:
        """``x`` where this mask holds, else ``y``; one of them may be a number."""
        like = x if isinstance(x, Local) else y
        x, y = (v if isinstance(v, Local) else like.number(v) for v in (x, y))
        return self.e.call(aten.where.self, self, x, y)

    def pad(self, dim: int, before: Any, after: Any, value: Any = 0) -> Local:
        around = [0, 0] * (self.ndim - 1 - dim) + [before, after]
        return self.e.call(aten.constant_pad_nd.default, self, around, value)

    def along(self, dim: int, ndim: int) -> Local:
        """A vector as dim ``dim`` of ``ndim``."""
        return self.reshape([-1 if d == dim else 1 for d in range(ndim)])

    def sort(self, dim: int, descending: bool = False) -> tuple[Local, Local]:
        """Values and where they were, equal ones in order."""
        made = self.e.call(aten.sort.stable, self, stable=True, dim=dim, descending=descending)
        return made[0], made[1]


def unwrapped(tree: T) -> T:
    """Arguments with nodes in place of local values."""
    if isinstance(tree, Local):
        return tree.node  # type: ignore[return-value]
    if isinstance(tree, (list, tuple)):
        made = [unwrapped(x) for x in tree]
        return made if isinstance(tree, list) else tuple(made)  # type: ignore[return-value]
    return tree


class Emit:
    """Writes the local nodes of one joint node under one choice.

    A local form is a function ``form(e, *args, **kwargs)`` of an `Emit` and the joint node's arguments with
    tensors replaced by local values; it returns the local value (or a tuple, one for each result).  It speaks in
    the letters of its rule: ``e.axes("v")`` are the mesh axes that shard factor ``v``, outermost first.
    """

    def __init__(self, graph: Graph, mesh: Mesh, origin: Node, fake_mode: Any) -> None:
        self.writer, self.mesh, self.node = Writer(graph, mesh, origin, fake_mode), mesh, origin
        self.sizes: dict[str, int] = {}
        self.factor_axes: dict[str, tuple[str, ...]] = {}
        self.result_specs: tuple[Spec | None, ...] = ()
        self.operand_specs: tuple[Spec | None, ...] = ()

    # --- what a form may ask -------------------------------------------------------------------------------

    def axes(self, *factors: str) -> tuple[str, ...]:
        """The axes that shard a factor, or any of several."""
        return tuple(a for f in factors for a in self.factor_axes.get(f, ()))

    def size(self, factor: str) -> IntExpr:
        """The local size of a factor."""
        n: IntExpr = self.sizes[factor]
        for axis in self.axes(factor):
            n = length(n, self.mesh[axis], axis)
        return n

    def offset(self, factor: str) -> IntExpr:
        """The global index of a factor's first local element."""
        n, begin = self.sizes[factor], 0
        for axis in self.axes(factor):
            begin = begin + offset(n, self.mesh[axis], axis)
            n = length(n, self.mesh[axis], axis)
        return begin

    def shape(self, result: int = 0) -> tuple[IntExpr, ...]:
        """The local shape of a result."""
        value, spec = results(self.node)[result], self.result_specs[result]
        return spec.local_shape(value.shape, self.mesh)  # type: ignore[union-attr]

    def place(self, factor: str) -> IntExpr:
        """The number of this device's piece among all pieces of a factor."""
        index: IntExpr = 0
        for axis in self.axes(factor):
            index = index * self.mesh[axis] + coordinate(axis)
        return index

    def pieces(self, factor: str, n: int | None = None) -> list[coll.Range]:
        """``(begin, end)`` of every piece of a factor, or of a dim of ``n`` elements cut as the factor is."""
        return pieces(self.sizes[factor] if n is None else n, [self.mesh[a] for a in self.axes(factor)])

    def mine(self, factor: str, ranges: Sequence[coll.Range]) -> tuple[IntExpr, IntExpr]:
        """The begin and the end of this device's one of ranges by piece number."""
        place = self.place(factor)
        return table([b for b, _ in ranges], place), table([end for _, end in ranges], place)

    def length(self, factor: str, ranges: Sequence[coll.Range]) -> IntExpr:
        """The size of this device's one of ranges by piece number."""
        return table([end - b for b, end in ranges], self.place(factor))

    # --- what a form may do --------------------------------------------------------------------------------

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Local:
        """Add a call to the local graph; sympy expressions may stand for integers anywhere in its arguments."""
        return Local(self, self.writer.call(target, *unwrapped(args), **{k: unwrapped(v) for k, v in kwargs.items()}))

    def call_as(self, value: Any, target: Any, /, *args: Any, **kwargs: Any) -> Local:
        """`call` where the fake result is known."""
        named = {k: unwrapped(v) for k, v in kwargs.items()}
        return Local(self, self.writer.call_as(value, target, *unwrapped(args), **named))

    def same(self, *args: Any, **kwargs: Any) -> Local:
        """The op itself."""
        return self.call(self.node.target, *args, **kwargs)

    def result(self, result: int) -> torch.Tensor | None:
        """A fake tensor of a result's local piece at coordinate 0, its dims in the memory order of the global value."""
        value, spec = results(self.node)[result], self.result_specs[result]
        return None if value is None or spec is None else local_fake(value, spec, self.mesh)

    def cat(self, parts: Sequence[Local], dim: int) -> Local:
        return parts[0] if len(parts) == 1 else self.call(aten.cat.default, list(parts), dim)

    def count(self, begin: IntExpr, size: IntExpr, like: Local, dtype: torch.dtype = torch.int64) -> Local:
        """The ``size`` numbers from ``begin`` on."""
        device = like.val.device
        return self.call(prims.iota.default, size, start=begin, step=1, dtype=dtype, device=device, requires_grad=False)

    def all_reduce(self, x: Local, factor: str, op: str = "sum") -> Local:
        """Reduce ``x`` over every axis of a factor."""
        for axis in self.axes(factor):
            x = self.call(coll.all_reduce, x, axis, self.mesh[axis], op)
        return x

    def fetch(
        self, x: Local, dim: int, factor: str, have: Sequence[coll.Range], want: Sequence[Sequence[coll.Range]],
        fill: Any = 0,
    ) -> Local:  # fmt: skip
        """The ranges of ``dim`` that each device wants, of a value of which it has one range (both by piece number).

        Only what a device lacks travels; what nobody has is ``fill``.
        """
        if any(coll.sent(have, want)):
            axes = self.axes(factor)
            size = table([sum(e - b for b, e in w) for w in want], self.place(factor))
            flat = [[i for r in have for i in r], [i for w in want for r in w for i in r]]
            return self.call(coll.fetch, x, dim, size, *flat, fill, list(axes), [self.mesh[a] for a in axes])
        return self.cat([self.crop(x, dim, factor, have, each, fill) for each in zip(*want, strict=True)], dim)

    def pull(
        self, x: Local, dim: int, factor: str, n: int, m: int, read: Callable[[int, int], list[coll.Range]],
        fill: Any = 0,
    ) -> Local:  # fmt: skip
        """`fetch` of what ``read`` says that the pieces of a dim of ``m`` elements read of those of ``n``."""
        return self.fetch(x, dim, factor, self.pieces(factor, n), [read(*r) for r in self.pieces(factor, m)], fill)

    def crop(
        self, x: Local, dim: int, factor: str, have: Sequence[coll.Range], want: Sequence[coll.Range], fill: Any = 0
    ) -> Local:  # fmt: skip
        """The range of ``dim`` that each device wants of the one it has (by piece number), ``fill`` where that ends."""
        place, cuts, pads = self.place(factor), [], []
        for (low, high), (begin, end) in zip(have, want, strict=True):
            first, last = max(begin, low), min(end, high)
            if first >= last:
                first = last = low
                begin, end = low, low + end - begin
            cuts.append((first - low, last - low, high - low))
            pads.append((first - begin, end - last))
        if any(c[0] > 0 or c[1] < c[2] for c in cuts):
            x = x.slice(dim, *(table([c[i] for c in cuts], place) for i in (0, 1)))
        if any(p != (0, 0) for p in pads):
            x = x.pad(dim, table([p[0] for p in pads], place), table([p[1] for p in pads], place), fill)
        return x

    def cut(self, x: Local, dim: int, factor: str, ranges: Sequence[coll.Range], *step: int) -> Local:
        """The local elements ``begin, begin + step, ...`` before ``end`` of ``dim``; ranges by piece number."""
        return x.slice(dim, *self.mine(factor, ranges), *step)

    def filled(self, x: Local, dim: int, factor: str, n: int | None = None) -> Local:
        """``x`` with one zero where its piece is empty: torch refuses to work on nothing."""
        held = self.pieces(factor, n)
        return self.crop(x, dim, factor, held, [(b, max(end, b + 1)) for b, end in held])

    def emptied(self, x: Local, dim: int, factor: str, n: int | None = None) -> Local:
        """Undo `filled` in a result."""
        held = self.pieces(factor, n)
        return self.cut(x, dim, factor, [(0, end - b) for b, end in held]) if any(b == end for b, end in held) else x

    def stacked(self, x: Local, factor: str, dim: int) -> Local:
        """The values (of one size in ``dim``) of all devices that share a factor, in the order of its pieces."""
        total = int(x.shape[dim])
        for axis in reversed(self.axes(factor)):
            total *= self.mesh[axis]
            x = self.call(coll.all_gather, x, dim, total, axis, self.mesh[axis])
        return x

    def first(self, x: Local, axes: Sequence[str]) -> Local:
        """``x`` on the first device of every one of ``axes``, zero elsewhere: a whole term of a partial sum."""
        if not axes:
            return x
        one: IntExpr = math.prod(length(1, self.mesh[a], a) for a in axes)
        return (x.number(one, torch.int64) > 0).where(x, 0)


# --- one node ------------------------------------------------------------------------------------------------


def _full(e: Emit, rule: Rule, x: Local, dims_: Dims, how: Callable[..., Local]) -> Local:
    """`Emit.filled` or `Emit.emptied` of the dims of an operand or a result of a rule that asks for it."""
    for d, dim in enumerate(dims_ if rule.nonempty else ()):
        if len(dim) == 1 and dim[0] not in rule.windows and e.axes(dim[0]):
            x = how(x, d, dim[0])
    return x


def emit_choice(
    graph: Graph,
    mesh: Mesh,
    fake_mode: Any,
    node: Node,
    rule: Rule,
    choice: Choice,
    local_operands: Sequence[Node],
    scalars: Mapping[Node, Any] | None = None,
) -> tuple[Node | None, ...]:
    """Write the local nodes of ``node`` under ``choice``: one for each result (None where it is not a tensor).

    ``local_operands`` are in the order of `operands` and hold what ``choice.operands`` says; ``scalars`` maps
    arguments that are nodes but not tensors.  Results carry ``meta["spec"]`` and ``meta["global"]``.
    """
    e = Emit(graph, mesh, node, fake_mode)
    e.sizes, e.factor_axes = dict(rule.sizes), dict(choice.factor_axes)
    e.operand_specs, e.result_specs = choice.operands, choice.results
    pairs = zip(local_operands, rule.operands, strict=True)
    feed = (_full(e, rule, Local(e, x), dims_, e.filled) for x, dims_ in pairs)
    args, kwargs = map_arg(
        (node.args, node.kwargs), lambda n: next(feed) if is_tensor(n.meta.get("val")) else (scalars or {})[n]
    )
    made = rule.form(e, *args, **kwargs) if rule.form else e.same(*args, **kwargs)
    values = results(node)
    if not values:  # a check, say
        return ()
    if not isinstance(node.meta.get("val"), (tuple, list)):
        made = (made,)
    elif not isinstance(made, (tuple, list)):
        made = tuple(None if v is None else e.call(operator.getitem, made, i) for i, v in enumerate(values))
    found: list[Node | None] = []
    for one, value, spec, dims_ in zip(made, values, choice.results, rule.results, strict=True):
        if one is None or value is None:
            found.append(None)
            continue
        one = _full(e, rule, one if isinstance(one, Local) else Local(e, one), dims_, e.emptied)
        local = one.node
        if local in local_operands or local in found:
            local = one.alias().node
        expected = bind_tree(spec.local_shape(value.shape, mesh), {})
        if tuple(local.meta["val"].shape) != tuple(expected):
            raise AssertionError(
                f"{node.target}: the local form gives {tuple(local.meta['val'].shape)} for {spec} of "
                f"{tuple(value.shape)}, not {tuple(expected)}"
            )
        local.meta["spec"], local.meta["global"] = spec, tuple(int(s) for s in value.shape)
        found.append(local)
    return tuple(found)
