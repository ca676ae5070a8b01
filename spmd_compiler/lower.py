"""From a local graph to code that runs on one rank.

`bind` puts this rank's coordinates in, `expand_collectives` turns ``spmd::*`` collectives into functional
collectives of process groups, `compile_graph` hands the result to TorchInductor (or runs it as it is).

Every rank issues the same collectives with the same sizes: uneven pieces are padded to the largest before, and
cut after.  Pieces are those of ``torch.chunk``, so that padding is always at the end of the whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from . import collectives as coll
from .bodies import call_of, made_by
from .ir import body_of
from .placements import Mesh, SpmdError
from .symbolic import bind_tree, symbols_in
from .symints import bind_sizes
from .words import shown

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Compiled = Callable[[list[Any]], Sequence[Any]]
Steps = Generator[None, None, Node]


class Groups:
    """The process groups of a mesh: one for each set of axes, made on first need, in program order on every rank.

    Where the mesh's groups are gloo's, those of all axes and of each axis are made at once, of one thread each: a group
    of two, which is torch's default, writes the name of what it did last from both of them, and two all-gathers that
    end together free it twice.

    Raises `SpmdError` for a mesh whose ranks descend along an axis: torch's groups count them in ascending order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.axes = mesh, Mesh.of(mesh).axes
        for dim, axis in enumerate(self.axes):
            rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim])
            for row in rows[(rows.diff() < 0).any(-1)][:1].tolist():
                raise SpmdError(
                    f"axis {axis!r} of {mesh} runs over ranks {shown(row)}, which torch's groups count in ascending "
                    "order, so that DTensor takes one's piece for another's; list ranks that ascend along each axis"
                )
        self.sizes = dict(zip(self.axes, map(int, mesh.shape), strict=True))
        place = mesh.get_coordinate()
        self.coordinates = dict(zip(self.axes, place or (0,) * len(self.axes), strict=True))

    def name(self, axes: Sequence[str], apart: bool = False) -> str:
        """The name of this rank's group over ``axes``, whose ranks count row-major in mesh order.

        ``apart``: one that no graph's collectives run in, nor the caller's.
        """
        order = tuple(a for a in self.axes if a in axes)
        if len(order) == 1 and not apart and self.gloo is None:
            return self.mesh.get_group(self.axes.index(order[0])).group_name
        made = _GROUPS.setdefault(dist.group.WORLD, {})
        together = [self.axes, *((a,) for a in self.axes)] if self.gloo is not None else []
        for each, aside in (*((t, False) for t in together), (order, apart)):
            if (self.mesh, each, aside) not in made:
                made[self.mesh, each, aside] = self._make(each)
        return made[self.mesh, order, apart]

    @functools.cached_property
    def gloo(self) -> Any:
        """The options of the mesh's own groups, where they are gloo's."""
        if not dist.is_gloo_available():
            return None
        given = self.mesh.get_group(0)._get_backend(torch.device(self.mesh.device_type))
        return given.options if isinstance(given, dist.ProcessGroupGloo) else None

    def _make(self, axes: Sequence[str]) -> str:
        index = tuple(slice(None) if a in axes else self.coordinates[a] for a in self.axes)
        ranks = self.mesh.mesh[index].flatten().tolist()
        own: dict[str, Any] = {"use_local_synchronization": True, "group_desc": "spmd_" + "_".join(axes)}
        if self.gloo is not None:
            if _GLOO.upper() not in dist.Backend.__dict__:
                dist.Backend.register_backend(_GLOO, _one_thread, extended_api=True, devices=["cpu", "cuda"])
            own |= {"backend": _GLOO, "pg_options": self.gloo, "timeout": self.gloo._timeout}
        if ranks != sorted(ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise SpmdError(
                    f"ranks {shown(ranks)} of axes {', '.join(axes)} of {self.mesh} do not ascend, and a group of "
                    f"torch {torch.__version__} can't keep their order; torch 2.13 can"
                )
            own["sort_ranks"] = False
        return dist.new_group(ranks, **own).group_name


# names of groups by the default group (another once torch was started anew), then by mesh, axes and `apart`
_GROUPS: weakref.WeakKeyDictionary[Any, dict[tuple[DeviceMesh, tuple[str, ...], bool], str]]
_GROUPS = weakref.WeakKeyDictionary()
_GLOO = "spmd_gloo"


def _one_thread(place: Any, given: Any) -> Any:
    """A group of gloo's of one thread, on the network and with the timeout of the options ``given``."""
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._timeout, options._threads = given._devices, given._timeout, 1
    options.group_name, options.global_ranks_in_group = place.group_id, place.global_ranks_in_group
    return dist.ProcessGroupGloo(place.store, place.group_rank, place.group_size, options)


# --- this rank's numbers ------------------------------------------------------------------------------------


def bind(gm: GraphModule, mesh: Mesh, coordinates: Mapping[str, int], saved: Sequence[Any] = ()) -> GraphModule:
    """A copy of a local graph with every coordinate replaced by its number and fake values of this rank's sizes.

    ``saved`` are the values of the first placeholders (those of a local form's inside have no spec to tell them).
    """
    writer = _Writer(_fake_mode(gm))
    done: dict[Node, Any] = {}
    given = iter(saved)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = next(given, None)
            own = _own_value(node, mesh, coordinates, writer.fake_mode) if value is None else value
            done[node] = writer.placeholder(node, own)
        elif node.op == "call_function" and not _symbolic(node) and not _changed(node, done):
            done[node] = writer.copy(node, done)
        elif node.op == "call_function" and (call := call_of(node)):
            done[node] = writer.copy(node, done)
            own = call_of(done[node]) or call  # as often as this rank has slices
            done[node].meta["val"] = made_by(own, done[call.bodies[-1]].meta["val"], writer.fake_mode)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), done.__getitem__)
            args, kwargs = bind_tree((args, kwargs), coordinates)
            done[node] = writer.call(node.target, *args, **kwargs)
            writer.annotate(done[node], node)
        else:
            done[node] = writer.copy(node, done)
            if (body := body_of(node)) is not None:
                done[node].meta["val"] = bind(body, mesh, coordinates)
    return writer.module(gm)


def _symbolic(node: Node) -> bool:
    return bool(symbols_in([list(node.args), dict(node.kwargs)]))


def _changed(node: Node, done: Mapping[Node, Any]) -> bool:
    """Whether an operand has other sizes on this rank than at coordinate 0."""
    return any(_layout(n.meta.get("val")) != _layout(done[n].meta.get("val")) for n in node.all_input_nodes)


def _layout(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_layout(v) for v in value]
    return (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else None


def _own_value(node: Node, mesh: Mesh, coordinates: Mapping[str, int], fake_mode: FakeTensorMode) -> Any:
    value, spec = node.meta.get("val"), node.meta.get("spec")
    if spec is None or not isinstance(value, torch.Tensor):
        return value
    shape = bind_tree(spec.local_shape(node.meta["global"], mesh), coordinates)
    return value if tuple(shape) == tuple(value.shape) else resized(value, shape, fake_mode)


def resized(value: torch.Tensor, shape: Sequence[int], fake_mode: Any) -> torch.Tensor:
    """A fake tensor like ``value`` of another shape, its dims in the same memory order."""
    strides, run = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        strides[d] = run
        run *= max(int(shape[d]), 1)
    with fake_mode:
        return torch.empty_strided(tuple(shape), strides, dtype=value.dtype, device=value.device)


def _fake_mode(gm: GraphModule) -> FakeTensorMode:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    own = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)  # there may be another about
    return own or detect_fake_mode() or FakeTensorMode()


class _Writer:
    """Writes nodes with fake values."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.graph, self.fake_mode = Graph(), fake_mode
        self.origin: Node | None = None

    def module(self, gm: GraphModule) -> GraphModule:
        """The graph written, with what ``gm`` holds and with its own bodies."""
        made = GraphModule(gm, self.graph)
        for node in self.graph.find_nodes(op="get_attr"):
            if (body := body_of(node)) is not None:
                setattr(made, node.target, body)
        return made

    def placeholder(self, node: Node, value: Any) -> Node:
        new = self.graph.node_copy(node)
        new.meta = {**node.meta, "val": value}
        return new

    def copy(self, node: Node, done: Mapping[Node, Any]) -> Node:
        new = self.graph.node_copy(node, done.__getitem__)
        new.meta = dict(node.meta)
        return new

    def annotate(self, new: Node, old: Node) -> None:
        new.meta = {**old.meta, "val": new.meta["val"]}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = target(*values, **named)
        return node


# --- collectives --------------------------------------------------------------------------------------------


def expand_collectives(gm: GraphModule, groups: Groups) -> GraphModule:
    """A copy of a bound graph with functional collectives (`torch.ops._c10d_functional`) for ``spmd::*``.

    A collective starts where it stands, and is waited for where its result is first read.
    """
    writer = _Expansion(_fake_mode(gm), groups)
    done: dict[Node, Any] = {}
    started: dict[Node, Steps] = {}
    for node in gm.graph.nodes:
        for used in node.all_input_nodes if node.op != "output" else list(started):
            if used in started:
                done[used] = _result(started.pop(used))
        if coll.is_collective(node):
            args = map_arg(node.args, done.__getitem__)
            steps = getattr(writer, node.target._schema.name.removeprefix("spmd::"))(*args)
            try:
                next(steps)
                started[node] = steps
            except StopIteration as end:
                done[node] = end.value
        else:
            done[node] = writer.copy(node, done)
            if (body := body_of(node)) is not None:
                done[node].meta["val"] = expand_collectives(body, groups)
    return writer.module(gm)


def _result(steps: Steps) -> Node:
    """Wait for a collective that has started."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


class _Expansion(_Writer):
    """One method for each collective of `collectives`, with its arguments."""

    def __init__(self, fake_mode: FakeTensorMode, groups: Groups) -> None:
        super().__init__(fake_mode)
        self.groups = groups

    # --- shapes ---------------------------------------------------------------------------------------------

    def pad(self, x: Node, dim: int, size: int) -> Node:
        """``x`` with zeros behind its ``dim`` up to ``size``."""
        shape = x.meta["val"].shape
        if shape[dim] == size:
            return x
        missing = [size - int(n) if d == dim else int(n) for d, n in enumerate(shape)]
        value = x.meta["val"]
        zeros = self.call(aten.full.default, missing, 0, dtype=value.dtype, device=value.device)
        return self.call(aten.cat.default, [x, zeros], dim)

    def cut(self, x: Node, dim: int, size: int) -> Node:
        if x.meta["val"].shape[dim] == size:
            return x
        return self.dense(self.call(aten.slice.Tensor, x, dim, 0, size))

    def dense(self, x: Node) -> Node:
        if x.meta["val"].is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def view(self, x: Node, shape: Sequence[int]) -> Node:
        return self.call(aten.view.default, self.dense(x), [int(n) for n in shape])

    def split_first(self, x: Node, dim: int, parts: int) -> Node:
        """Cut ``dim`` into ``parts``, which become a new dim 0."""
        shape = list(x.meta["val"].shape)
        if dim == 0:
            return self.view(x, [parts, shape[0] // parts, *shape[1:]])
        y = self.view(x, [*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]])
        order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
        return self.dense(self.call(aten.permute.default, y, order))

    def merge_first(self, x: Node, dim: int) -> Node:
        """Undo `split_first`: dim 0 becomes the major part of ``dim`` (counted without it)."""
        shape = list(x.meta["val"].shape)
        parts, rest = shape[0], shape[1:]
        if dim:
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
            x = self.call(aten.permute.default, x, order)
        rest[dim] *= parts
        return self.view(x, rest)

    # --- dtypes ---------------------------------------------------------------------------------------------

    def reducible(self, x: Node, op: str) -> Node:
        """``x`` in a dtype that the group can reduce (gloo knows no bool, bfloat16 or half precision sums)."""
        value = x.meta["val"]
        if value.dtype == torch.bool:
            return self.cast(x, torch.int32 if op in ("sum", "product") else torch.uint8)
        if value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16):
            return self.cast(x, torch.float32)
        return x

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        if x.meta["val"].dtype == dtype:
            return x
        return self.call(torch.ops.prims.convert_element_type.default, x, dtype)

    def started(self, target: Any, *args: Any) -> Steps:
        work = self.call(target, *args)
        yield
        return self.call(c10d.wait_tensor.default, work)

    # --- the collectives ------------------------------------------------------------------------------------

    def all_reduce(self, x: Node, axis: str, parts: int, op: str) -> Steps:
        value = x.meta["val"]
        if parts == 1 or value.numel() == 0:
            return x
        y = self.dense(self.reducible(x, op))
        y = yield from self.started(c10d.all_reduce.default, y, op, self.groups.name([axis]))
        return self.cast(y, value.dtype)

    def all_gather(self, x: Node, dim: int, total: int, axis: str, parts: int) -> Steps:
        if parts == 1:
            return x
        x = self.dense(self.pad(x, dim, -(-total // parts)))
        shape = list(x.meta["val"].shape)
        if 0 in shape:
            shape[dim] = total
            return self.view(x, shape)
        y = self.view(x, [1, *shape])
        y = yield from self.started(c10d.all_gather_into_tensor.default, y, parts, self.groups.name([axis]))
        return self.cut(self.merge_first(y, dim), dim, total)

    def reduce_scatter(self, x: Node, dim: int, size: int, axis: str, parts: int, op: str) -> Steps:
        value = x.meta["val"]
        if parts == 1:
            return x
        step = -(-int(value.shape[dim]) // parts)
        y = self.split_first(self.pad(self.reducible(x, op), dim, step * parts), dim, parts)
        shape = list(y.meta["val"].shape[1:])
        if 0 in shape:
            shape[dim] = size
            return self.view(self.cast(self.call(aten.slice.Tensor, y, 0, 0, 1), value.dtype), shape)
        y, group = self.dense(y), self.groups.name([axis])
        y = yield from self.started(c10d.reduce_scatter_tensor.default, y, op, parts, group)
        return self.cut(self.cast(self.view(y, shape), value.dtype), dim, size)

    def all_to_all(
        self, x: Node, gather_dim: int, total: int, split_dim: int, size: int, axis: str, parts: int
    ) -> Steps:
        value = x.meta["val"]
        if parts == 1:
            return x
        x = self.pad(x, gather_dim, -(-total // parts))
        step = -(-int(value.shape[split_dim]) // parts)
        y = self.dense(self.split_first(self.pad(x, split_dim, step * parts), split_dim, parts))
        if y.meta["val"].numel() > 0:
            even = [1] * parts
            y = yield from self.started(c10d.all_to_all_single.default, y, even, even, self.groups.name([axis]))
        return self.cut(self.cut(self.merge_first(y, gather_dim), gather_dim, total), split_dim, size)

    def permute(
        self, x: Node, dim: int, size: int, order: Sequence[str], new_order: Sequence[str], sizes: Sequence[int]
    ) -> Steps:
        of = dict(zip(order, sizes, strict=True))
        if math.prod(sizes) == 1 or tuple(order) == tuple(new_order) or x.meta["val"].numel() == 0:
            return x
        mesh_order = [a for a in self.groups.axes if a in of]
        mine = self.groups.coordinates
        piece = _index([mine[a] for a in order], [of[a] for a in order])
        wanted = _index([mine[a] for a in new_order], [of[a] for a in new_order])
        to = dict(zip(new_order, _place(piece, [of[a] for a in new_order]), strict=True))
        source = dict(zip(order, _place(wanted, [of[a] for a in order]), strict=True))

        def rank(place: Mapping[str, int]) -> int:
            return _index([place[a] for a in mesh_order], [of[a] for a in mesh_order])

        return (yield from self.exchange(x, mesh_order, math.prod(sizes), rank(to), rank(source)))

    def fetch(
        self, x: Node, dim: int, size: int, have: Sequence[int], want: Sequence[int], fill: Any, axes: Sequence[str],
        sizes: Sequence[int],
    ) -> Steps:  # fmt: skip
        value, parts = x.meta["val"], math.prod(sizes)
        held = [r for (r,) in coll.ranges(have, parts)]
        wanted = coll.ranges(want, parts)
        me = _index([self.groups.coordinates[a] for a in axes], sizes)
        # a group's ranks count row-major in mesh order, the pieces in the order of `axes`
        mesh_order = [a for a in self.groups.axes if a in axes]
        places = [dict(zip(axes, _place(i, sizes), strict=True)) for i in range(parts)]
        members = sorted(range(parts), key=lambda i: [places[i][a] for a in mesh_order])
        send = {i: [(b, e) for r in wanted[i] for j, b, e in coll.overlaps(held, *r) if i != j == me] for i in members}
        mine = [o for r in wanted[me] for o in coll.overlaps(held, *r)]
        received = {j: [(b, e) for i, b, e in mine if i == j != me] for j in members}
        others = math.prod(int(n) for d, n in enumerate(value.shape) if d != dim)
        own, arrived = held[me][0], {j: 0 for j in members}
        if any(coll.sent(held, wanted)) and others:
            out = [self.call(aten.slice.Tensor, x, dim, b - own, e - own) for i in members for b, e in send[i]]
            y = self.call(aten.cat.default, out, dim) if out else self.call(aten.slice.Tensor, x, dim, 0, 0)
            order = [dim, *(d for d in range(value.dim()) if d != dim)]
            y = self.dense(self.call(aten.permute.default, y, order))
            count = [[sum(e - b for b, e in r[j]) for j in members] for r in (received, send)]
            y = yield from self.started(c10d.all_to_all_single.default, y, *count, self.groups.name(axes))
            y = self.call(aten.permute.default, y, [order.index(d) for d in range(value.dim())])
            first = 0
            for j, n in zip(members, count[0], strict=True):
                arrived[j], first = first, first + n
        made = []
        for begin, end in wanted[me]:
            for j, b, e in coll.overlaps(held, begin, end):
                if b > begin:
                    made.append(self.filled(value, dim, b - begin, fill))
                if j == me:
                    made.append(self.call(aten.slice.Tensor, x, dim, b - own, e - own))
                elif others:
                    made.append(self.call(aten.slice.Tensor, y, dim, arrived[j], arrived[j] + e - b))
                    arrived[j] += e - b
                else:
                    made.append(self.filled(value, dim, e - b, fill))
                begin = e
            if end > begin or not made:
                made.append(self.filled(value, dim, end - begin, fill))
        return self.call(aten.cat.default, made, dim)

    def filled(self, like: torch.Tensor, dim: int, size: int, fill: Any) -> Node:
        shape = [size if d == dim else int(n) for d, n in enumerate(like.shape)]
        return self.call(aten.full.default, shape, fill, dtype=like.dtype, device=like.device)

    def exchange(self, x: Node, axes: Sequence[str], parts: int, to: int, source: int) -> Steps:
        """Send ``x`` to rank ``to`` of a group and return what ``source`` sent."""
        value = x.meta["val"]
        row = self.view(x, [1, value.numel()])
        sent = [int(i == to) for i in range(parts)]
        received = [int(i == source) for i in range(parts)]
        y = yield from self.started(c10d.all_to_all_single.default, row, received, sent, self.groups.name(axes))
        return self.view(y, value.shape)


def _index(place: Sequence[int], sizes: Sequence[int]) -> int:
    """The row-major number of a place."""
    number = 0
    for p, n in zip(place, sizes, strict=True):
        number = number * n + p
    return number


def _place(number: int, sizes: Sequence[int]) -> list[int]:
    place = []
    for n in reversed(sizes):
        place.append(number % n)
        number //= n
    return place[::-1]


# --- code ---------------------------------------------------------------------------------------------------


def compile_graph(gm: GraphModule, how: str, *, is_backward: bool = False, is_inference: bool = False) -> Compiled:
    """A function of a list of local tensors that runs ``gm``: through Inductor, or as it is (``how="eager"``).

    Inductor may choose other strides for values that are no results of the user's; they are written to
    ``meta["val"]`` of the nodes that the output node returns.
    """
    if how == "eager":
        return lambda values: gm(*values)
    examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    fake_mode = _fake_mode(gm)
    output = gm.graph.output_node()
    returned = output.args[0]
    bind_sizes(gm)
    output.meta.setdefault("user_visible_output_idxs", list(range(len(returned))))
    context = TracingContext(fake_mode)
    with tracing(context), V.set_fake_mode(fake_mode), _counting(fake_mode), context.report_output_strides() as strides:
        compiled = compile_fx_inner(gm, examples, is_backward=is_backward, is_inference=is_inference)
    for value, stride in zip(returned, strides or [], strict=False):
        if isinstance(value, Node) and stride is not None and "layout" not in value.meta:
            found = value.meta["val"]
            if tuple(stride) != tuple(found.stride()):
                with fake_mode:
                    value.meta["val"] = torch.empty_strided(
                        found.shape, tuple(map(int, stride)), dtype=found.dtype, device=found.device
                    )
    return compiled


@contextlib.contextmanager
def _counting(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Numbers may be read off tensors, as the loops that Inductor makes of `scan` and `map` read how far they are."""
    shapes = fake_mode.shape_env = fake_mode.shape_env or ShapeEnv()
    before, shapes.settings = shapes.settings, dataclasses.replace(shapes.settings, allow_scalar_outputs=True)
    try:
        yield
    finally:
        shapes.settings = before


def compile_alone(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """What Inductor alone makes of Dynamo's graph."""
    return compile_fx(gm, examples)


def match_saved(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Give the backward's inputs the layout in which the compiled forward leaves them."""
    returned = forward.graph.output_node().args[0][num_outputs:]
    for value, node in zip(returned, backward.graph.find_nodes(op="placeholder"), strict=False):
        node.meta["val"] = value.meta["val"]
