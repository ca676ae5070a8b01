"""One AOTInductor package of a program for all ranks (``.pt2``): where a rank is, is an input of it.

The pieces of an even program have the same sizes on every rank, and what depends on the place is an offset.  Process
groups go by names of the package's own, under which each process registers its groups when it loads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from . import collectives as coll
from .devices import home
from .ir import Partitioned, size_op, source_line
from .lower import Compiled, Groups, expand_collectives
from .placements import SpmdError
from .symbolic import coordinate, symbols_in
from .text import program_text

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional


class _Names:
    """Stands for `lower.Groups` where there are none: names for the groups of any mesh of this shape."""

    def __init__(self, program: Partitioned) -> None:
        self.sizes, self.prefix = program.mesh.sizes, f"spmd.{digest(program)[:16]}"
        self.axes, self.coordinates = program.mesh.axes, dict.fromkeys(program.mesh.axes, 0)
        self.used: dict[str, tuple[str, ...]] = {}

    def name(self, axes: Sequence[str]) -> str:
        order = tuple(a for a in self.axes if a in axes)
        name = ".".join([self.prefix, *order])
        self.used[name] = order
        return name


def digest(program: Partitioned) -> str:
    """What the program and torch's version determine."""
    return hashlib.sha256(f"{torch.__version__} {program_text(program)}".encode()).hexdigest()


def check(program: Partitioned) -> None:
    """Raise `SpmdError` for what one package can't be for all ranks."""

    def refuse(node: Node, why: str) -> SpmdError:
        return SpmdError(f"{node.name} ({source_line(node)}): {why}; compile it on each rank (aot=False)")

    if any(o.kind == "grad" for o in program.outputs):
        raise SpmdError("a package is for inference: export the program with backward=False, or compile it (aot=False)")
    for node in program.graph.graph.find_nodes(op="call_function", target=size_op):
        raise refuse(node, f"data decide a size ({node.args[2]}), and a package has the same sizes at every call")
    for node in program.graph.graph.nodes:
        spec = node.meta.get("spec")
        if spec is not None and not spec.is_even(node.meta["global"], program.mesh):
            shape = tuple(node.meta["global"])
            raise refuse(node, f"{spec} cuts {shape} unevenly, and a package has the same sizes on every rank")
        if node.op != "call_function":
            continue
        if node.target in (coll.permute, coll.fetch) and coll.group_size(node) > 1:
            raise refuse(node, "what each rank sends to whom depends on its place, and a package's messages do not")
        if _symbolic(node) and _written(node) is None:
            raise refuse(node, f"{node.target} takes no tensor for the number that depends on the place")


class _AnyRank(torch.nn.Module):
    """The local graph as a function of coordinates (a 1-d int64 tensor, one for each axis) and local values."""

    def __init__(self, gm: GraphModule, axes: Sequence[str]) -> None:
        super().__init__()
        self.gm, self.axes = gm, list(axes)

    def forward(self, place: torch.Tensor, *values: torch.Tensor) -> tuple[Any, ...]:
        done: dict[Node, Any] = {}
        feed = iter(values)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                done[node] = next(feed)
            elif node.op == "get_attr":
                done[node] = getattr(self.gm, node.target)
            elif node.op == "output":
                return tuple(map_arg(node.args[0], done.__getitem__))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), done.__getitem__)
                args = [self._number(a, place) for a in args]
                kwargs = {k: self._number(v, place) for k, v in kwargs.items()}
                target = (_written(node) if _symbolic(node) else _apart(node)) or node.target
                done[node] = target(*args, **kwargs)
        raise AssertionError("the graph has no output")

    def _number(self, value: Any, place: torch.Tensor) -> Any:
        """An expression of coordinates as a 0-d tensor."""
        if not isinstance(value, sympy.Basic):
            return value
        symbols = [coordinate(a) for a in self.axes]
        return sympy.lambdify(symbols, value, [_FUNCTIONS, "math"])(*place.unbind())


def _apart(node: Node) -> Callable[..., Any] | None:
    """A collective or its wait with views of its operand and its result; None: ``node`` is neither.

    A thread of gloo's lets go of what was sent, and takes the interpreter's lock to do it if Python knows the tensor.
    A package holds that lock while it runs: it could wait for ever.  Python knows what goes in and what comes out,
    and never the views.
    """
    if node.target is c10d.wait_tensor.default:
        return lambda x: node.target(x).squeeze(-1)
    if getattr(node.target, "namespace", None) == c10d.name:
        return lambda x, *more: node.target(x.unsqueeze(-1), *more)
    return None


def _chunk(n: int, parts: int, c: torch.Tensor) -> torch.Tensor:
    step = -(-n // parts)
    return (n - c * step).clamp(0, step)


_FUNCTIONS = {
    "chunk": _chunk,
    "start": lambda n, parts, c: (c * -(-n // parts)).clamp(max=n),
    "entry": lambda i, *values: torch.tensor(values)[i],
}


def _symbolic(node: Node) -> bool:
    return bool(symbols_in([list(node.args), dict(node.kwargs)]))


def _written(node: Node) -> Callable[..., Any] | None:
    """A call that does what the node does, with tensors for numbers that depend on the place; None: there is none."""
    if node.target is aten.slice.Tensor and len(node.args) == 4 and not _symbolic_size(node):
        size = node.meta["val"].shape[node.args[1]]
        return lambda x, dim, begin, end: torch.index_select(x, dim, begin + torch.arange(size, device=x.device))
    if node.target is prims.iota.default and isinstance(node.args[0], int):
        return lambda n, start, **more: prims.iota.default(n, start=0, **more) + start
    if node.target is aten.full.default and not symbols_in([node.args[0]]):
        return lambda shape, value, **more: aten.add.Tensor(z := aten.full.default(shape, 0, **more), value.to(z.dtype))
    target = node.target
    if target._overloadname == "Scalar" and "Tensor" in target.overloadpacket.overloads():
        target = target.overloadpacket.Tensor
    declared = target._schema.arguments
    given = [*zip(declared, node.args, strict=False), *((a, node.kwargs.get(a.name)) for a in declared)]
    fits = all(isinstance(a.type, torch.TensorType) for a, v in given if symbols_in(v))
    return target if fits else None


def _symbolic_size(node: Node) -> bool:
    return bool(symbols_in(sympy.sympify(node.args[3]) - sympy.sympify(node.args[2])))


def package(program: Partitioned, path: Path) -> None:
    """Write the package of an even inference program.  Needs no process group.  Raises `SpmdError` otherwise."""
    check(program)
    names = _Names(program)
    gm = expand_collectives(program.graph, names)  # type: ignore[arg-type]
    examples = [torch.zeros(len(names.axes), dtype=torch.int64)]
    for node in gm.graph.find_nodes(op="placeholder"):
        v = node.meta["val"]
        examples.append(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).zero_())
    with torch.no_grad(), _standing_in(names):
        exported = torch.export.export(_AnyRank(gm, names.axes), tuple(examples), strict=False)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # others see all of it or nothing
            made = aoti_compile_and_package(
                exported, package_path=str(Path(folder) / "program.pt2"),
                inductor_configs={"aot_inductor.metadata": {"spmd_program": digest(program)}},
            )  # fmt: skip
            os.replace(made, path)


@contextlib.contextmanager
def _standing_in(names: _Names) -> Iterator[None]:
    """Groups of the right sizes under the package's names, with no process behind them."""
    sizes = {name: math.prod(names.sizes[a] for a in axes) for name, axes in names.used.items()}
    made = {name: dist.ProcessGroup(0, size) for name, size in sizes.items()}  # torch holds them weakly
    for name, group in made.items():
        _register_process_group(name, group)
    try:
        yield
    finally:
        for name in made:
            _unregister_process_group(name)


def in_cache(program: Partitioned) -> Path:
    """Where the package of a program lies in Inductor's cache."""
    return Path(cache_dir()) / "spmd" / f"{digest(program)}.pt2"


def packaged(program: Partitioned, mesh: Any, path: Path) -> Compiled:
    """The function of local values that a package is on this rank; the package is written first where it is missing.

    Ranks that share a file system share the package: one writes, the others wait for it.
    """
    check(program)
    if mesh is not None and mesh.device_type != (kind := home(program.graph.graph)):
        raise SpmdError(
            f"the program was planned for {kind}, and its package holds code for that, not for {mesh.device_type}; "
            f"plan it there, or compile it without a package"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            package(program, path)
    try:
        loaded = aoti_load_package(str(path))
    except RuntimeError as error:
        raise SpmdError(f"{path.name} is no package: {error}") from None
    held = loaded.loader.get_metadata().get("spmd_program")
    if held != digest(program):
        raise SpmdError(f"{path.name} is the package of another program, or of another version of torch; remove it")
    place = torch.zeros(len(program.mesh.axes), dtype=torch.int64)
    if mesh is not None:
        groups = Groups(mesh)
        place = torch.tensor([groups.coordinates[a] for a in groups.axes])
        _register(_used(program), groups)

    def run(values: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch._C._AutoDispatchBelowAutograd():  # the collectives' autograd is Python's, see _apart
            return loaded(place, *values)

    return run


def _used(program: Partitioned) -> Mapping[str, tuple[str, ...]]:
    """The groups of a package, by its names: in the order of the program, as every rank makes them."""
    names = _Names(program)
    for node in program.graph.graph.nodes:
        if coll.is_collective(node) and coll.group_size(node) > 1:
            names.name(coll.axes_of(node))
    return names.used


def _register(names: Mapping[str, tuple[str, ...]], groups: Groups) -> None:
    for name, axes in names.items():
        apart = groups.mesh.device_type == "cpu"  # see _apart: no thread of these groups ever waits for the lock
        real = dist.distributed_c10d._resolve_process_group(groups.name(axes, apart))
        with contextlib.suppress(RuntimeError):
            if _resolve_process_group(name) is not real:
                raise SpmdError("a package runs on one mesh in a process; this one is loaded on another already")
            continue
        _register_process_group(name, real)
