"""Typed access to FX nodes, and `Emit`, with which local forms write nodes of the partitioned graph.

The *joint graph* holds ATen calls in global shapes: ``meta["val"]`` is a fake tensor (or a tuple of them),
``meta["phase"]`` is ``"forward"`` or ``"backward"``.  The *local graph* holds the same in one device's shapes,
with `collectives` between: ``meta["val"]`` has the shapes of the rank at coordinate 0 of every axis (the
largest pieces), ``meta["spec"]`` the `Spec` of the value, ``meta["global"]`` its global shape, and integer
arguments may be sympy expressions of the coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from . import collectives as coll
from .cost import Profile
from .dims import Dims
from .placements import Mesh, Spec
from .symbolic import IntExpr, bind_tree, coordinate, length, offset, pieces, table

META_KEYS = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "phase",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "source",
)


CONSTANTS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def results(node: Node) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a node makes (None where an output is not a tensor)."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(v if is_tensor(v) else None for v in value)
    return (value,) if is_tensor(value) else ()


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def producer(node: Node) -> tuple[Node, int]:
    """The node that computes a value and which of its results it is; a getitem belongs to its producer."""
    if is_getitem(node):
        return node.args[0], node.args[1]
    return node, 0


def operands(node: Node) -> tuple[Node, ...]:
    """The tensor arguments of a node in the order of its signature, repetitions included."""
    flat: list[Node] = []
    map_arg((node.args, node.kwargs), flat.append)
    return tuple(n for n in flat if is_tensor(n.meta.get("val")))


def body_of(node: Node) -> torch.fx.GraphModule | None:
    """The body that a node stands for."""
    value = node.meta.get("val") if node.op == "get_attr" else None
    return value if isinstance(value, torch.fx.GraphModule) else None


def nodes_within(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph, and behind each that stands for a body those of the body."""
    for node in graph.nodes:
        yield node
        if (body := body_of(node)) is not None:
            yield from nodes_within(body.graph)


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(s) for s in node.meta["val"].shape)


def copied(captured: Captured) -> Captured:
    """The same with a graph of its own, to be rewritten."""
    graph, env = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(captured.graph.graph, env))
    for old, new in env.items():
        new.meta = dict(old.meta)
    ends = [next(n for n in reversed(g.nodes) if n.op == "output") for g in (captured.graph.graph, graph)]
    ends[1].meta = dict(ends[0].meta)
    return dataclasses.replace(captured, graph=torch.fx.GraphModule(captured.graph, graph))


def nbytes(value: torch.Tensor | None) -> int:
    return 0 if value is None else int(value.numel()) * value.element_size()


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@functools.lru_cache(maxsize=4096)
def project_path(path: str) -> str:
    """A file's path within its project (a folder with ``pyproject.toml``, ``setup.py`` or ``.git``) or its installed
    package; else its name.  So it is the same on every rank, wherever it runs."""
    parts = PurePath(path).parts
    for place in ("site-packages", "dist-packages"):
        if place in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(place) :])
    for folder in Path(path).parents:
        if folder.is_absolute() and any((folder / f).exists() for f in ("pyproject.toml", "setup.py", ".git")):
            return PurePath(path).relative_to(folder).as_posix()
    return parts[-1] if parts else path


def source_line(node: Node) -> str:
    """``file.py:line`` of the user's code that a node comes from, or its module path, or an empty string."""
    if "source" in node.meta:
        return node.meta["source"]
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    text = ""
    if frames:
        path, line = frames[-1]
        text = f"{project_path(path)}:{line}" if line != "0" else path  # that of a module
    else:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            text = str(list(stack.values())[-1][0]).removeprefix("L['self'].")
    node.meta["source"] = text
    return text


@dataclass(frozen=True)
class Input:
    """A placeholder of the joint graph, in order.

    ``kind`` is ``param``, ``buffer``, ``input``, ``tangent`` or ``seed`` (a 0-d int64 tensor, equal on all ranks).
    ``spec`` is the user's placement, or None where the solver chooses.
    """

    name: str
    kind: str
    spec: Spec | None = None


@dataclass(frozen=True)
class Output:
    """An output of the joint graph, in order.

    ``kind`` is ``output``, ``mutation`` (the new value of input ``of``) or ``grad`` (the gradient of input ``of``).
    ``spec`` is the user's placement; None: that of input ``of`` for mutations and gradients of inputs that have
    one, else the solver's, never partial.
    """

    name: str
    kind: str
    spec: Spec | None = None
    of: int | None = None


@dataclass
class Captured:
    """A functional ATen graph in global shapes.

    ``graph``'s placeholders match ``inputs`` and its output node holds a flat tuple that matches ``outputs``
    (None entries allowed); the first ``num_forward_outputs`` belong to the forward half.  Without a backward all
    of them do.
    """

    graph: torch.fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    num_forward_outputs: int
    mesh: Mesh
    name: str = "main"
    dims: Dims | None = None  # the dynamic dims of which the graph's integers are expressions


@dataclass
class Partitioned:
    """The local graph, with the specs of every input and output filled in.

    ``price`` is recomputed from the emitted nodes, ``bound`` is a proven lower bound of it (seconds).
    """

    graph: torch.fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    num_forward_outputs: int
    mesh: Mesh
    captured: Captured
    price: float = 0.0
    bound: float = 0.0
    replicated_ops: tuple[str, ...] = ()
    profile: Profile | None = None  # what priced it
    saved: float = 0.0  # seconds that joined collectives save, of the price of them apart


class Emit:
    """Writes the local nodes of one joint node under one choice.

    A local form is a function ``form(e, *args, **kwargs)`` of an `Emit` and the joint node's arguments with
    tensors replaced by local nodes; it returns the local node (or a tuple, one for each result).  It speaks in
    the letters of its rule: ``e.axes("v")`` are the mesh axes that shard factor ``v``, outermost first.
    """

    def __init__(self, graph: Graph, mesh: Mesh, origin: Node, fake_mode: Any) -> None:
        self.graph, self.mesh, self.node, self.fake_mode = graph, mesh, origin, fake_mode
        self.sizes: dict[str, int] = {}
        self.factor_axes: dict[str, tuple[str, ...]] = {}
        self.result_specs: tuple[Spec | None, ...] = ()
        self.operand_specs: tuple[Spec | None, ...] = ()

    # --- what a form may ask -------------------------------------------------------------------------------

    def axes(self, factor: str) -> tuple[str, ...]:
        return self.factor_axes.get(factor, ())

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
        return spec.local_shape(value.shape, self.mesh)

    def place(self, factor: str) -> IntExpr:
        """The number of this device's piece among all pieces of a factor."""
        index: IntExpr = 0
        for axis in self.axes(factor):
            index = index * self.mesh[axis] + coordinate(axis)
        return index

    def pieces(self, factor: str, n: int | None = None) -> list[coll.Range]:
        """``(begin, end)`` of every piece of a factor, or of a dim of ``n`` elements cut as the factor is."""
        return pieces(self.sizes[factor] if n is None else n, [self.mesh[a] for a in self.axes(factor)])

    # --- what a form may do --------------------------------------------------------------------------------

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call to the local graph; sympy expressions may stand for integers anywhere in its arguments."""
        node = self.call_as(None, target, *args, **kwargs)
        node.meta["val"] = fake_value(node, self.fake_mode)
        return node

    def call_as(self, value: Any, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """`call` where the fake result is known."""
        name = getattr(target, "_opname", None) or getattr(target, "__name__", None)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        for key in META_KEYS:
            if key in self.node.meta:
                node.meta[key] = self.node.meta[key]
        node.meta["origin"], node.meta["val"] = self.node.name, value
        return node

    def result(self, result: int) -> torch.Tensor | None:
        """A fake tensor of a result's local piece at coordinate 0, its dims in the memory order of the global value."""
        value, spec = results(self.node)[result], self.result_specs[result]
        return None if value is None or spec is None else local_fake(value, spec, self.mesh)

    def all_reduce(self, x: Node, factor: str, op: str = "sum") -> Node:
        """Reduce ``x`` over every axis of a factor."""
        for axis in self.axes(factor):
            x = self.call(coll.all_reduce, x, axis, self.mesh[axis], op)
        return x

    def fetch(
        self, x: Node, dim: int, factor: str, have: Sequence[coll.Range], want: Sequence[Sequence[coll.Range]],
        fill: Any = 0,
    ) -> Node:  # fmt: skip
        """The ranges of ``dim`` that each device wants, of a value of which it has one range (both by piece number).

        Only what a device lacks travels; what nobody has is ``fill``.
        """
        if any(coll.sent(have, want)):
            axes = self.axes(factor)
            size = table([sum(e - b for b, e in w) for w in want], self.place(factor))
            flat = [[i for r in have for i in r], [i for w in want for r in w for i in r]]
            return self.call(coll.fetch, x, dim, size, *flat, fill, list(axes), [self.mesh[a] for a in axes])
        parts = [self.crop(x, dim, factor, have, each, fill) for each in zip(*want, strict=True)]
        return parts[0] if len(parts) == 1 else self.call(torch.ops.aten.cat.default, parts, dim)

    def crop(
        self, x: Node, dim: int, factor: str, have: Sequence[coll.Range], want: Sequence[coll.Range], fill: Any = 0
    ) -> Node:  # fmt: skip
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
            ends = [table([c[i] for c in cuts], place) for i in (0, 1)]
            x = self.call(torch.ops.aten.slice.Tensor, x, dim, *ends)
        if any(p != (0, 0) for p in pads):
            before = [0, 0] * (x.meta["val"].dim() - 1 - dim)
            pair = [table([p[i] for p in pads], place) for i in (0, 1)]
            x = self.call(torch.ops.aten.constant_pad_nd.default, x, [*before, *pair], fill)
        return x

    def all_gather(self, x: Node, factor: str, dim: int) -> Node:
        """Make ``dim`` of ``x``, cut as the factor is, whole (the innermost axis is gathered first)."""
        levels: list[IntExpr] = [self.sizes[factor]]
        for axis in self.axes(factor):
            levels.append(length(levels[-1], self.mesh[axis], axis))
        for axis, total in zip(reversed(self.axes(factor)), reversed(levels[:-1]), strict=True):
            x = self.call(coll.all_gather, x, dim, total, axis, self.mesh[axis])
        return x


def local_fake(value: torch.Tensor, spec: Spec, mesh: Mesh) -> torch.Tensor:
    """A fake tensor of the piece at coordinate 0, its dims in the memory order of the global value."""
    shape = bind_tree(spec.local_shape(value.shape, mesh), {})
    if tuple(shape) == tuple(value.shape):
        return value
    strides, run_ = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        if value.stride(d) != 0 or value.shape[d] <= 1:
            strides[d] = run_
            run_ *= max(shape[d], 1)
    with value.fake_mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def fake_value(node: Node, fake_mode: Any, coordinates: dict[str, int] | None = None) -> Any:
    """What a node yields on fake tensors, coordinates bound (to 0 if not given).  Scalars stand for themselves."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = bind_tree((args, kwargs), coordinates or {})
    with fake_mode:
        return node.target(*args, **kwargs)


def tree_nodes(tree: Any) -> list[Node]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Node)]


def copy_meta(new: Node, old: Node, keys: Sequence[str] = META_KEYS) -> None:
    for key in keys:
        if key in old.meta:
            new.meta[key] = old.meta[key]
