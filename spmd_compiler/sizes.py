"""Sizes that a trace leaves open: dims of the user's, and sizes that the program's own data decide.

Torch's symbols become expressions of dims (`dims.Dim`) in a captured graph; ``meta["layout"]`` has shapes and strides
in them.  A size that data decide (`DataSizes`) is named by a node ``spmd.size`` behind the one that makes it, and its
hint is a prime that nothing else in the program is a multiple of, so that no size is taken for another and nothing
seems to divide it.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions as torch_functions

from .annotations import spec_on, to_local_op
from .dims import Dim, Dims, Guard
from .family import fake_at
from .ir import Captured, is_getitem, is_tensor, operands, project_path, size_op, source_line
from .placements import Mesh, SpmdError
from .symbolic import coordinate, dim, number, primes, real

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")  # files that are not the user's
FAR = (2**31 - 1, 2**61 - 1)  # numbers of elements: a size that is the same at both has a limit


class _Env(ShapeEnv):
    """Notes the user's line for each guard, of the frames above that of ``until``."""

    def __init__(self, until: Callable[..., Any]) -> None:
        super().__init__(duck_shape=False, allow_scalar_outputs=False)
        self.until = until

    def _get_sloc(self, framework_loc: Any = None) -> SLoc:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.until.__code__:
            code = frame.f_code
            if not code.co_filename.startswith((*LIBRARIES, os.path.dirname(sympy.__file__))):
                return SLoc(None, f"{project_path(code.co_filename)}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return SLoc(None, None)


class _Sizes:
    """Torch's symbols as dims: ``names`` maps them."""

    names: dict[sympy.Symbol, sympy.Symbol]
    hints: dict[str, int]
    of_user = False

    def expression(self, given: Any, where: str) -> Any:
        """An expression of torch's symbols as one of dims."""
        found = given.xreplace(self.names)
        found = found.xreplace({f: sympy.Rational(float(f)) for f in found.atoms(sympy.Float)})
        for function, same in _SAME_FUNCTIONS.items():
            found = found.replace(function, same)
        foreign = [f for f in found.atoms(sympy.Function) if type(f).__module__.startswith("torch")]
        known = set().union(*(n.free_symbols for n in self.names.values()))
        if self.of_user and not found.free_symbols <= known:
            raise SpmdError(
                f"{where}: a size that depends on data, in a program with dynamic_shapes, which has no others; give "
                "static shapes, or mask instead (torch.where, a weight of 0)"
            )
        if foreign or not found.free_symbols <= known:
            raise SpmdError(
                f"{where}: the size or number {given} is no arithmetic of dynamic dims that a program can hold; where "
                "it is an .item(), compute with the tensor itself, or take it outside the compiled function"
            )
        return found

    def release(self, captured: Captured, mode: FakeTensorMode) -> None:
        """Write expressions of dims where a captured graph computes with sizes, and the example's fake values.

        ``meta["layout"]`` has shape and strides in dims.
        """
        graph, computed = captured.graph.graph, {}
        for node in graph.nodes:
            value = node.meta.get("val")
            where = f"{node.name} ({source_line(node)})"
            if node.op == "get_attr" and (self.of_user or unbacked(value)):
                raise SpmdError(
                    f"{where}: the body of a higher-order operator has no dynamic dims, nor sizes that depend on data; "
                    "give static shapes, or compute what has them outside of it"
                )
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                made = self.expression(value.node.expr, where)
                computed[node] = number(real(made) if isinstance(value, torch.SymFloat) else made)
                continue
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: computed.get(n, n))
            node.meta["layout"] = self._layout(value, where)
            node.meta["val"] = fake_at(value, node.meta["layout"], self.hints, mode)
        for node in reversed(computed):
            graph.erase_node(node)
        captured.graph.recompile()

    def _layout(self, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self._layout(v, where) for v in value)
        if not isinstance(value, torch.Tensor):
            return None
        return tuple(tuple(self.size(n, where) for n in given) for given in (value.shape, value.stride()))

    def size(self, value: Any, where: str = "the result") -> Any:
        """A size, or another number that may depend on sizes, in dims."""
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            made = self.expression(value.node.expr, where)
            return number(real(made) if isinstance(value, torch.SymFloat) else made)
        return value


class OpenSizes(_Sizes):
    """The dims of a program as sizes that a trace (a call of ``tracer``) leaves open, and what it asked of them."""

    of_user = True

    def __init__(self, dims: Dims, tracer: Callable[..., Any]) -> None:
        self.dims, self.env, self.hints = dims, _Env(tracer), dims.hints
        self.sizes: dict[str, torch.SymInt] = {}
        for d in dims.dims:
            source = ConstantSource(d.name)
            symbol = self.env.create_symbol(d.hint, source, DimDynamic.DYNAMIC)
            made = self.env.create_symintnode(symbol, hint=d.hint, source=source)
            assert isinstance(made, torch.SymInt)
            self.sizes[d.name] = made
        self.names = {s.node._expr: dim(name) for name, s in self.sizes.items()}

    def fake(self, value: torch.Tensor, shape: Sequence[Any], mode: FakeTensorMode) -> torch.Tensor:
        """A fake tensor like the dense ``value``, of a shape in dims."""
        order = sorted(range(value.dim()), key=lambda d: (value.stride(d), -d))
        sizes = [n if isinstance(n, int) else sympy.lambdify(list(n.free_symbols), n)(
            *(self.sizes[s.name] for s in n.free_symbols)) for n in shape]  # fmt: skip
        strides: list[Any] = [0] * value.dim()
        run: Any = 1
        for d in order:
            strides[d], run = run, run * sizes[d]
        device = "cpu" if value.device.type == "meta" else value.device
        with mode:
            fake = torch.empty_strided(sizes, strides, dtype=value.dtype, device=device)
            return fake.requires_grad_(value.requires_grad)

    def guards(self) -> tuple[Guard, ...]:
        """What the trace asked of the sizes.  Raises `SpmdError` where it allows only the example's."""
        found: dict[Any, Guard] = {}
        for asked in self.env.guards:
            where = asked.sloc.maybe_user_loc or "the program"
            condition = self.expression(asked.expr, where)
            if isinstance(condition, sympy.Eq) and condition.args[0].is_Symbol and condition.args[1].is_Integer:
                raise SpmdError(f"dynamic dim {condition.args[0]} is {condition.args[1]} and nothing else for {where}")
            if not self.dims.imply(condition):
                found.setdefault(condition, Guard(condition, f"{where} takes it for granted"))
        for name, size in self.sizes.items():
            if self.env.replace(size.node._expr).is_number:
                raise SpmdError(f"dynamic dim {name} can be nothing but {int(size)} in this program")
        return tuple(found.values())


_SAME_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch_functions.ModularIndexing: lambda x, by, n: sympy.Mod(sympy.floor(x / by), n),
    torch_functions.FloorDiv: lambda x, by: sympy.floor(x / by),
    torch_functions.CeilDiv: lambda x, by: sympy.ceiling(x / by),
    torch_functions.PythonMod: sympy.Mod,
    torch_functions.Mod: sympy.Mod,
    torch_functions.CeilToInt: sympy.ceiling,
    torch_functions.FloorToInt: sympy.floor,
    torch_functions.TruncToInt: sympy.floor,  # sizes are not negative
    torch_functions.PowByNatural: sympy.Pow,
    torch_functions.FloatPow: sympy.Pow,
    torch_functions.FloatTrueDiv: lambda x, by: x / by,
    torch_functions.IntTrueDiv: lambda x, by: x / by,
    torch_functions.ToFloat: lambda x: x,
    torch_functions.Identity: lambda x: x,
    torch_functions.OpaqueUnaryFn_sqrt: sympy.sqrt,
    torch_functions.Max: sympy.Max,
    torch_functions.Min: sympy.Min,
}


# --- sizes that data decide -----------------------------------------------------------------------------------------


class DataSizes(_Sizes):
    """The sizes of a captured graph that its own data decide, and those of pieces in local regions of an uneven cut:
    these are expressions of coordinates, in whose place each rank puts its own."""

    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        self.makers: dict[sympy.Symbol, tuple[Node, int, int]] = {}  # node, result and dim that have the size
        self.making: list[Node] = []
        self.names, self.hints = {}, {}
        known: dict[Any, sympy.Symbol] = {}
        same = _numbered(gm)
        for node in (n for n in gm.graph.nodes if n.op == "call_function"):
            given = {s for n in node.all_input_nodes for s in unbacked(n.meta.get("val"))}
            if not unbacked(_tensors(node.meta.get("val"))) - given:
                continue
            if node.target is to_local_op:
                x, spec = node.args[0].meta["val"], spec_on(node.args[1], mesh)
                sizes = zip(node.meta["val"].shape, spec.local_shape(x.shape, mesh), strict=True)
                self.names |= {n.node.expr: size for n, size in sizes if isinstance(n, torch.SymInt)}
                self.hints |= dict.fromkeys((coordinate(a).name for a in mesh.axes), 0)
                continue
            self.making.append(node)
            for r, value in enumerate(_tensors(node.meta["val"])):
                for d, n in enumerate(value.shape):
                    symbol = n.node.expr if isinstance(n, torch.SymInt) else None
                    if not isinstance(symbol, sympy.Symbol) or symbol in self.names:
                        continue
                    key = (same[node], r, d)  # a selection that was made before has the size that it had
                    equal = self._equal(n.node.shape_env, symbol)
                    if key not in known:
                        known[key] = equal if equal is not None else dim(f"u{len(set(known.values()))}")
                        self.makers[symbol] = (node, r, d)
                    self.names[symbol] = known[key]

    def _equal(self, env: ShapeEnv, symbol: sympy.Symbol) -> sympy.Symbol | None:
        """A size that is named already, which the program takes to be as large as another."""
        for asked in (a.expr for each in env.deferred_runtime_asserts.values() for a in each):
            if isinstance(asked, sympy.Eq) and symbol in asked.args:
                other = next((s for s in asked.args if s in self.names), None)
                if other is not None:
                    return self.names[other]
        return None

    def expression(self, given: Any, where: str) -> Any:
        found = super().expression(given, where)
        if not self.makers:
            return found
        if any(p.exp.free_symbols for p in found.atoms(sympy.Pow)):
            raise SpmdError(
                f"{where}: {found} has a size that data decide for an exponent, which no program holds; compute the "
                "power of a tensor (mask.sum(), which has a value for each run)"
            )
        far = {found.xreplace(dict.fromkeys(found.free_symbols, sympy.Integer(n))) for n in FAR}
        if isinstance(found, sympy.Expr) and found.free_symbols and len(far) == 1:
            raise SpmdError(
                f"{where}: {found} is a size that data decide up to a limit, and no program takes such a part of what "
                "a mask selects; mask instead (torch.where, a weight of 0), or take a topk of a known number"
            )
        return found

    def release(self, captured: Captured, mode: FakeTensorMode) -> None:
        """Write expressions of data sizes where a captured graph computes with sizes, and name the sizes."""
        graph = captured.graph.graph
        for node in [n for n in graph.nodes if n.target is torch.ops.aten._assert_scalar.default]:
            graph.erase_node(node)  # of what a size is at least
        static = set(_static(graph.nodes))
        highs, made = [], []
        for symbol, (node, _, _) in self.makers.items():
            env = next(v for v in _sizes_of(node.meta["val"]) if isinstance(v, torch.SymInt)).node.shape_env
            upper = env.bound_sympy(symbol).upper
            elements = [math.prod(map(int, o.meta["val"].shape)) for o in operands(node) if not _is_open(o)]
            highs.append(int(upper) if upper.is_Integer else None)
            made.append(highs[-1] or max(elements, default=1))
        for s, h in zip(self.makers, primes(made, static), strict=True):
            self.hints.setdefault(self.names[s].name, h)
        super().release(captured, mode)
        data: list[Dim] = []
        for symbol, high in zip(self.makers, highs, strict=True):
            node, r, d = self.makers[symbol]
            name = self.names[symbol].name
            _name_size(node, r, d, name, self.hints[name])
            if name not in (found.name for found in data):
                data.append(Dim(name, self.hints[name], 0, high))
        if self.makers and len(self.hints) > len(data):
            raise SpmdError(
                f"{source_line(self.making[0])}: a size that depends on data, in a program with uneven pieces in a "
                "local region (to_local, local_map); make the cut even, or write one of them otherwise"
            )
        for node in graph.nodes if not self.makers else ():
            node.meta.pop("layout", None)
            node.meta.pop("unbacked_bindings", None)
        for node in self.making:
            node.meta["makes"] = True
        captured.graph.recompile()
        captured.data = tuple(data)


def release_data(captured: Captured, mode: FakeTensorMode) -> None:
    """Make the sizes that a captured graph's data decide dims of it.  Raises `SpmdError` for those it can't have."""
    if any(map(_is_open, captured.graph.graph.nodes)):
        DataSizes(captured.graph, captured.mesh).release(captured, mode)


def check_results(results: Sequence[Any]) -> None:
    """Raise `SpmdError` where a program returns a number that its data decide."""
    for value in results:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and unbacked(value):
            raise SpmdError(
                f"the program returns a number that depends on data ({value}), and ranks pass tensors; return the "
                "tensor whose size it is, or the sum of its mask"
            )


def unbacked(value: Any) -> set[sympy.Symbol]:
    """The symbols of sizes that data decide in a value, or in the values of a body."""
    if isinstance(value, GraphModule):
        return set().union(*(unbacked(n.meta.get("val")) for n in value.graph.nodes))
    if isinstance(value, (tuple, list)):
        return set().union(*map(unbacked, value))
    sized = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return set(symbolic_shapes.free_unbacked_symbols(value)) if sized else set()


def _name_size(node: Node, result: int, d: int, name: str, hint: int) -> None:
    """A node behind ``node`` that names the size of dim ``d`` of its result."""
    graph, value = node.graph, node
    if isinstance(node.meta["val"], (tuple, list)):
        found = [u for u in node.users if is_getitem(u) and u.args[1] == result]
        with graph.inserting_after(node):
            value = found[0] if found else graph.call_function(operator.getitem, (node, result))
        if not found:
            value.meta = {**node.meta, "val": node.meta["val"][result], "layout": node.meta["layout"][result]}
    with graph.inserting_after(value):
        size = graph.call_function(size_op, (value, d, name))
    size.meta = {**node.meta, "val": hint, "layout": None}
    size.meta.pop("unbacked_bindings", None)


def _numbered(gm: GraphModule) -> dict[Node, int]:
    """One number for nodes that have the same value."""
    numbers: dict[Node, int] = {}
    keys: dict[Any, int] = {}
    for node in gm.graph.nodes:
        args = str(map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}"))
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        key = (node.name if node.op != "call_function" or random else "", str(node.target), args)
        numbers[node] = keys.setdefault(key, len(keys))
    return numbers


def _static(nodes: Any) -> Iterator[int]:
    """The numbers of a graph that no size can be taken for: sizes that are known, and integer arguments."""
    for node in nodes:
        for n in itertools.chain(_sizes_of(node.meta.get("val")), pytree.tree_leaves((node.args, node.kwargs))):
            if type(n) is int and n:
                yield abs(n)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if is_tensor(v)]


def _sizes_of(value: Any) -> Iterator[Any]:
    for v in _tensors(value):
        yield from v.shape


def _is_open(node: Node) -> bool:
    return bool(unbacked(node.meta.get("val")))
