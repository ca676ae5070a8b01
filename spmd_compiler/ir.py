"""Typed access to FX nodes, and `Writer`, which writes nodes of the partitioned graph.

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
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .cost import Profile
from .dims import Dim, Dims
from .placements import Mesh, Spec
from .symbolic import bind_tree

_LIB = torch.library.Library("spmd", "FRAGMENT")
_LIB.define("size(Tensor x, int dim, str name) -> SymInt")
_LIB.define("check_size(Tensor x, int dim, SymInt size) -> ()")
size_op = torch.ops.spmd.size.default  # what the data size ``name`` is: the size of dim ``dim`` of ``x``
check_size = torch.ops.spmd.check_size.default  # that a size is what another is
for _op in (size_op, check_size):
    torch.fx.node.has_side_effect(_op)  # others know a size by its name


@torch.library.impl(_LIB, "size", "CompositeExplicitAutograd")
def _(x: torch.Tensor, dim: int, name: str) -> int:
    return x.shape[dim]


@torch.library.impl(_LIB, "check_size", "CompositeExplicitAutograd")
def _(x: torch.Tensor, dim: int, size: int) -> None:
    if x.shape[dim] != size:
        raise ValueError(f"a selection has {x.shape[dim]} elements where it is taken for one of {size}")


@torch.library.register_fake("spmd::check_size", lib=_LIB)
def _(x: torch.Tensor, dim: int, size: int) -> None:
    return None


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


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of a node by the name it has in the op's schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for i, arg in enumerate(schema):
        if arg.name == name:
            if i < len(node.args):
                return node.args[i]
            return arg.default_value if arg.has_default_value() else default
    return default


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


class Draft(torch.fx.GraphModule):
    """A graph that is read and rewritten but hardly ever run itself: its Python is written when it is."""

    def recompile(self) -> Any:
        if "forward" in vars(type(self)):  # each module has a class of its own
            del type(self).forward

    def forward(self, *args: Any) -> Any:
        super().recompile()  # which makes another `forward`
        return self.forward(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.fx.GraphModule(self, self.graph).__reduce__()


_Of = TypeVar("_Of", "Captured", "Partitioned")


def copied(captured: _Of) -> _Of:
    """The same with a graph of its own, to be rewritten."""
    graph, env = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(captured.graph.graph, env))
    for old, new in env.items():
        new.meta = dict(old.meta)
    ends = [next(n for n in reversed(g.nodes) if n.op == "output") for g in (captured.graph.graph, graph)]
    ends[1].meta = dict(ends[0].meta)
    return dataclasses.replace(captured, graph=Draft(captured.graph, graph))


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
    frames = [f for f in frames if os.path.dirname(f[0]) != os.path.dirname(__file__)] or frames
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
    of them do.  Where ``data`` lists sizes that data decide, integers are expressions of them, ``meta["layout"]`` has
    shapes and strides in them, and ``meta["val"]`` is at their hints.
    """

    graph: torch.fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    num_forward_outputs: int
    mesh: Mesh
    name: str = "main"
    dims: Dims | None = None  # the dynamic dims of which the graph's integers are expressions
    data: tuple[Dim, ...] = ()  # those whose sizes the program's data decide


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


class Writer:
    """Writes nodes of the local graph in place of one joint node."""

    def __init__(self, graph: Graph, mesh: Mesh, origin: Node, fake_mode: Any) -> None:
        self.graph, self.mesh, self.node, self.fake_mode = graph, mesh, origin, fake_mode

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call to the local graph; sympy expressions may stand for integers anywhere in its arguments."""
        if self.node.meta.get("makes") and target is self.node.target:  # replicated: what it makes is known
            return self.call_as(self.node.meta["val"], target, *args, **kwargs)
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


def open_dims(node: Node, result: int = 0) -> frozenset[int]:
    """The dims of a node's result whose sizes data decide: they are cut nowhere."""
    return node.meta["open"][result] if "open" in node.meta else frozenset()


def copy_meta(new: Node, old: Node, keys: Sequence[str] = META_KEYS) -> None:
    for key in keys:
        if key in old.meta:
            new.meta[key] = old.meta[key]
