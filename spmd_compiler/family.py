"""A program with dynamic dims is a family: one graph with expressions of dims, one plan, a member for each size.

`member` is the graph of one size, which is planned, partitioned, verified and run like any other; `common` is the local
graph of all sizes.  Every member has the same nodes and specs, so `common` has them; an integer of theirs is a function
of the sizes: its value at the example and its forward differences (Newton), or the power that its ratios show.  A
member that was not among those it was read off must be the one it says, when planning as for every size that is run.

Sizes that data decide are dims as well, but nobody knows them before the graph runs: there is one plan and one local
graph, whose integers are read off members in the same way (`DataSamples`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .dims import Dim, Dims, Guard
from .ir import Captured, Partitioned, copied, size_op, source_line
from .placements import Mesh, Spec, SpmdError
from .redistribute import Move
from .rules import Choice
from .symbolic import IntExpr, dim, is_data_size, number, primes, sized

POINTS = 3  # sizes of data at which a program is looked at


FEW = 64


@dataclass(frozen=True)
class Decisions:
    """A plan without its graph: by the names of nodes, what `passes.propagate` decided.

    ``factors`` are the dims of each node's rule, which must be the same at every size.
    """

    choices: Mapping[str, Choice]
    factors: Mapping[str, Any]
    trees: Mapping[tuple[str, int, str], Mapping[Spec, Move]]
    outputs: Sequence[Spec | None]
    kept: Mapping[str, Spec]
    replicated_ops: tuple[str, ...] = ()


@dataclass
class Family:
    """``captured`` is the joint graph and ``common`` the local one, both with expressions of ``dims``."""

    captured: Captured
    decisions: Decisions
    dims: Dims
    common: Partitioned


# --- one size ---------------------------------------------------------------------------------------------------


def fake_at(value: Any, layout: Any, sizes: Mapping[str, int], mode: Any) -> Any:
    """A fake value like ``value`` whose ``layout``, shape and strides in dims, is that at ``sizes``."""
    if isinstance(value, (tuple, list)):
        return tuple(fake_at(v, at, sizes, mode) for v, at in zip(value, layout, strict=True))
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = sized(layout, sizes)
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def member(captured: Captured, sizes: Mapping[str, int]) -> Captured:
    """The graph of a family at ``sizes``; ``meta["open"]`` has the dims of each result whose sizes data decide."""
    found = dataclasses.replace(copied(captured), dims=None, data=())
    put_sizes(found.graph.graph, sizes)
    return found


def put_sizes(graph: Graph, sizes: Mapping[str, int]) -> None:
    """Put ``sizes`` in place of dims in a graph with expressions of them, and fake values of these sizes."""
    mode = next((v.fake_mode for n in graph.nodes for v in _tensors(n.meta.get("val"))), None)
    for node in graph.nodes:
        node.args, node.kwargs = sized(_plain(node.args), sizes), sized(_plain(node.kwargs), sizes)
        if "global" in node.meta:
            node.meta["global"] = sized(node.meta["global"], sizes)
        if node.target is size_op:
            node.meta["val"] = sizes[node.args[2]]
        layout, value = node.meta.pop("layout", None), node.meta.get("val")
        if layout is None:
            continue
        node.meta["val"] = fake_at(value, layout, sizes, mode)
        each = layout if isinstance(value, (tuple, list)) else (layout,)
        opened = tuple(frozenset(d for d, n in enumerate(at[0] if at else ()) if _of_data(n)) for at in each)
        if any(opened):
            node.meta["open"] = opened


def _of_data(n: Any) -> bool:
    return isinstance(n, sympy.Basic) and any(is_data_size(s.name) for s in n.free_symbols)


def expressions(captured: Captured) -> set[Any]:
    """All the expressions of dims in the graph of a family."""
    found: set[Any] = set()

    def walk(tree: Any) -> None:
        if isinstance(tree, sympy.Basic):
            found.add(tree)
        elif isinstance(tree, dict):
            walk(list(tree.values()))
        elif isinstance(tree, (list, tuple)):
            for x in tree:
                walk(x)

    for node in captured.graph.graph.nodes:
        walk((node.args, node.kwargs, node.meta.get("layout")))
    return found


def _tensors(value: Any) -> Iterator[Any]:
    for v in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(v, torch.Tensor):
            yield v


def _plain(tree: Any) -> Any:
    """FX's own lists and dicts as Python's."""
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(v) for v in tree] if isinstance(tree, list) else tuple(_plain(v) for v in tree)
    return tree


# --- all sizes --------------------------------------------------------------------------------------------------


class Samples:
    """Sizes at which members are looked at: the example's, further ones in steps of ``by``, and one to try (last).

    ``known`` are expressions that integers of members may be.
    """

    def __init__(self, dims: Dims, by: int, known: Iterable[Any] = ()) -> None:
        self.names = list(dims.hints)
        self.start = dims.hints
        self.steps = {n: by for n in self.names}
        self.dims = dims
        count = len(self.names)
        orders = [k for k in itertools.product(range(3), repeat=count) if sum(k) <= 2]
        self.orders = [k for k in sorted(orders, key=lambda k: (sum(k), k)) if self._allowed(k)]
        last = next((k for k in [(3,) * count, (2,) * count, (1,) * count] if count and self._allowed(k)), None)
        self.points = [*self.orders, *([last] if last is not None and last not in self.orders else [])]
        self.known: dict[tuple[Any, ...], Any] = {}
        for k in sorted(set(known), key=lambda k: (len(str(k)), str(k))):
            self.learn([sized(k, s) for s in self.sizes()], k)

    def learn(self, values: Sequence[Any], expression: Any) -> None:
        """What has these values at the points is ``expression``."""
        if isinstance(expression, sympy.Basic):
            self.known.setdefault(tuple(values), expression)

    def _allowed(self, k: Sequence[int]) -> bool:
        return self.dims.allow(self.at(k))

    def at(self, k: Sequence[int]) -> dict[str, int]:
        return {n: self.start[n] + self.steps[n] * i for n, i in zip(self.names, k, strict=True)}

    def sizes(self) -> list[dict[str, int]]:
        return [self.at(k) for k in self.points]

    def fit(self, values: Sequence[int]) -> IntExpr | None:
        """The function of dims with these values at the points; None where it is none that is known."""
        if len(set(values)) == 1:
            return values[0]
        if tuple(values) in self.known:
            return self.known[tuple(values)]
        for found in (self._power(values), self._newton(values)):
            if found is not None and all(sized(found, s) == v for s, v in zip(self.sizes(), values, strict=True)):
                return found
        return None

    def _power(self, values: Sequence[int]) -> IntExpr | None:
        """``n a^i b^j``, if the values are that."""
        if values[0] == 0:
            return None
        made: Any = sympy.Integer(values[0])
        by_point = dict(zip(self.points, values, strict=True))
        for i, name in enumerate(self.names):
            one = tuple(int(i == j) for j in range(len(self.names)))
            if one not in by_point:
                continue
            ratio = sympy.Rational(self.start[name] + self.steps[name], self.start[name])
            seen, power = sympy.Rational(by_point[one], values[0]), 0
            while seen != 1 and power < 4:
                seen, power = seen / ratio, power + 1
            if seen != 1:
                return None
            made = made * (dim(name) / self.start[name]) ** power
        return made

    def _newton(self, values: Sequence[int]) -> IntExpr | None:
        """The polynomial of degree two through the points."""
        by_point = dict(zip(self.points, values, strict=True))
        made: Any = sympy.Integer(0)
        for k in self.orders:
            below = itertools.product(*(range(i + 1) for i in k))
            if any(j not in by_point for j in itertools.product(*(range(i + 1) for i in k))):
                continue
            difference = sum(
                (-1) ** (sum(k) - sum(j)) * math.prod(map(math.comb, k, j)) * by_point[j] for j in below
            )  # fmt: skip
            term: Any = sympy.Integer(difference)
            for i, name in zip(k, self.names, strict=True):
                t = (dim(name) - self.start[name]) / sympy.Integer(self.steps[name])
                for step in range(i):
                    term = term * (t - step) / (step + 1)
            made += term
        return sympy.expand(made)


def _of_few(expression: Any) -> list[Any]:
    """The values of an expression where all sizes are small; a stride of what is empty, ``Max(1, n)``, counts as n."""
    found = expression.replace(sympy.Max, lambda *args: sympy.Max(*(a for a in args if a != 1)))
    return [found.xreplace(dict.fromkeys(found.free_symbols, sympy.Integer(n))) for n in range(FEW)]


class DataSamples(Samples):
    """Sizes of data at which a program is looked at: points that differ in all of them.

    Such a size is nowhere cut, so that an integer that depends on them is an expression of the captured graph, or that
    divided, multiplied or moved by a number.
    """

    def __init__(self, data: Sequence[Dim], points: Sequence[Mapping[str, int]], known: Iterable[Any] = ()) -> None:
        self.dims, self.start = Dims(tuple(data)), dict(points[0])
        self.at_points = [dict(p) for p in points]
        self.known = {}
        self.scaled: dict[Any, tuple[int, Any]] = {}  # by their ratios: the first value, and what has them
        self.moved: dict[Any, tuple[Sequence[int], Any]] = {}  # by the ratios of their differences
        for k in sorted({*map(dim, self.start), *known}, key=lambda k: (len(str(k)), str(k))):
            self.learn([sized(k, s) for s in self.sizes()], k)

    def learn(self, values: Sequence[Any], expression: Any) -> None:
        if isinstance(expression, sympy.Basic) and len(set(values)) > 1:
            other = self.known.get(tuple(values), expression)
            if _of_few(other) != _of_few(expression):
                raise SpmdError(
                    f"{other} and {expression}, sizes that data decide, differ where few elements are selected, and "
                    "a program can't tell them apart; mask instead (torch.where, a weight of 0), or write both alike"
                )
        super().learn(values, expression)
        if isinstance(expression, sympy.Basic) and all(isinstance(v, int) for v in values) and len(set(values)) > 1:
            self.scaled.setdefault(_ratios(values), (values[0], expression))
            self.moved.setdefault(_differences(values), (values, expression))

    def sizes(self) -> list[dict[str, int]]:
        return self.at_points

    def fit(self, values: Sequence[int]) -> IntExpr | None:
        if len(set(values)) == 1:
            return values[0]
        if tuple(values) in self.known:
            return self.known[tuple(values)]
        if (ratios := _ratios(values)) in self.scaled:
            first, found = self.scaled[ratios]
            return found * sympy.Rational(values[0], first)
        if (differences := _differences(values)) in self.moved:
            given, found = self.moved[differences]
            i = next(i for i, v in enumerate(given) if v != given[0])
            by = sympy.Rational(values[i] - values[0], given[i] - given[0])
            return (found - given[0]) * by + values[0] if by.is_Integer else None  # else by chance
        return None


def data_samples(captured: Captured) -> DataSamples:
    """The points at which a graph in which data decide sizes is looked at."""
    names = [d.name for d in captured.data]
    known = expressions(captured)
    static = {abs(n) for n in _integers(captured.graph.graph) if n}
    points = [[d.hint for d in captured.data]]
    while len(points) < POINTS:
        points.append(primes(points[-1], {*static, *(n for p in points for n in p)}))
    return DataSamples(captured.data, [dict(zip(names, p, strict=True)) for p in points], known)


def _integers(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        for n in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("layout"))):
            if type(n) is int:
                yield n


def _ratios(values: Sequence[int]) -> Any:
    return tuple(Fraction(v, values[0]) for v in values) if values[0] else None


def _differences(values: Sequence[int]) -> Any:
    off = [v - values[0] for v in values]
    unit = next(v for v in off if v)
    return tuple(Fraction(v, unit) for v in off)


class Different(ValueError):
    """Values that no expression of dims stands for."""


def common(samples: Samples, members: Sequence[Partitioned]) -> Partitioned:
    """The local graph of all sizes, given that of each sample.

    Its nodes, specs and fake values are those of the first; arguments, ``meta["global"]`` and ``meta["local"]``, the
    local sizes at coordinate 0, are in dims.  Raises `SpmdError` where members are not one program.
    """
    first = copied_local(members[0])
    unify(samples, first.graph.graph, [m.graph.graph for m in members], members[0].mesh)
    return first


def common_global(samples: Samples, members: Sequence[Captured]) -> Captured:
    """The joint graph of all sizes, given that of each sample, with ``meta["layout"]``."""
    first = copied(members[0])
    unify(samples, first.graph.graph, [m.graph.graph for m in members])
    return first


def unify(samples: Samples, first: Graph, members: Sequence[Graph], mesh: Mesh | None = None) -> None:
    """Make ``first``, a copy of the first of ``members``, the graph of all sizes; on a ``mesh`` it is a local one."""
    if len({len(m.nodes) for m in members}) > 1:
        raise _parted(samples, members)
    for node, *same in zip(first.nodes, *(m.nodes for m in members), strict=True):
        if len({(n.name, n.op, str(n.target), n.meta.get("spec")) for n in same}) > 1:
            raise _parted(samples, members)
        try:
            node.args = _unified(samples, [_named(n.args) for n in same], node.args)
            node.kwargs = _unified(samples, [_named(n.kwargs) for n in same], node.kwargs)
            if "global" in node.meta:
                node.meta["global"] = _unified(samples, [n.meta["global"] for n in same])
            if mesh is not None:
                node.meta["local"] = _local(samples, node, [_shapes(n.meta.get("val")) for n in same], mesh)
            if isinstance(samples, DataSamples):
                node.meta["layout"] = _unified(samples, [_layout(n.meta.get("val")) for n in same])
        except Different as error:
            raise SpmdError(
                f"{node.name} ({source_line(node)}): {node.target} has an integer ({error}) that is no polynomial of "
                "the dynamic dims; give those sizes as static ones"
            ) from None


def _layout(value: Any) -> Any:
    """Shape and strides."""
    if isinstance(value, (tuple, list)):
        return tuple(_layout(v) for v in value)
    return (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else None


def _parted(samples: Samples, members: Sequence[Graph]) -> SpmdError:
    """The first node at which members differ."""
    texts = [[(n.name, str(n.target), source_line(n)) for n in m.nodes] for m in members]
    for row in itertools.zip_longest(*texts):
        if len(set(row)) > 1:
            other = next(i for i, n in enumerate(row) if n != row[0])
            name, target, source = next(n for n in (row[0], row[other]) if n is not None)
            at = " and ".join(", ".join(f"{k}={v}" for k, v in samples.sizes()[i].items()) for i in (0, other))
            return SpmdError(
                f"{name} ({source}): {target} is not the same program at {at}; give these dims as static sizes, or an "
                "example whose sizes differ from each other and from those of parameters"
            )
    return SpmdError("members of one family are placed differently")


def check_member(family: Family, local: Partitioned, sizes: Mapping[str, int]) -> None:
    """Raise `SpmdError` where the member at ``sizes`` is not the program that the family's graph says."""
    for said, node in itertools.zip_longest(family.common.graph.graph.nodes, local.graph.graph.nodes):
        pair = [said, node]
        if None not in pair and said.name == node.name and str(said.target) == str(node.target):
            pair = [sized(_named((said.args, said.kwargs, said.meta.get("local"))), sizes),
                    _named((node.args, node.kwargs, _shapes(node.meta.get("val"))))]  # fmt: skip
        if pair[0] != pair[1]:
            at = ", ".join(f"{k}={v}" for k, v in sizes.items())
            which = node if node is not None else said
            raise SpmdError(
                f"{which.name} ({source_line(which)}): at {at} the program is another one than the text says; "
                f"export it with an example of such a size\n  text: {pair[0]}\n  here: {pair[1]}"
            )


def copied_local(local: Partitioned) -> Partitioned:
    graph = copied(dataclasses.replace(local.captured, graph=local.graph)).graph
    return dataclasses.replace(local, graph=graph, inputs=list(local.inputs), outputs=list(local.outputs))


def _named(tree: Any) -> Any:
    return map_arg(_plain(tree), lambda n: _Name(n.name))


@dataclass(frozen=True)
class _Name:
    name: str


def _shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v) for v in value)
    return tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else None


def _unified(samples: Samples, values: Sequence[Any], shown: Any = None) -> Any:
    """One tree for trees that differ in integers; nodes are those of ``shown``."""
    first = values[0]
    if isinstance(first, (tuple, list)):
        if len({len(v) for v in values}) > 1:
            raise Different(", ".join(map(str, values[:2])))
        rows = zip(zip(*values, strict=True), shown or [None] * len(first), strict=True)
        return type(first)(_unified(samples, v, s) for v, s in rows)
    if isinstance(first, dict):
        return {k: _unified(samples, [v[k] for v in values], (shown or {}).get(k)) for k in first}
    if isinstance(first, _Name):
        if len(set(values)) > 1:
            raise Different(", ".join(v.name for v in values[:2]))
        return shown
    if all(v == first and type(v) is type(first) for v in values):
        return first
    if tuple(values) in samples.known:
        return samples.known[tuple(values)]
    if all(isinstance(v, (int, sympy.Basic)) and not isinstance(v, bool) for v in values):
        return _expression(samples, [sympy.sympify(v) for v in values])
    raise Different(", ".join(map(str, values[:2])))


def _expression(samples: Samples, values: Sequence[Any]) -> Any:
    """One expression for expressions of coordinates: term by term, the arguments of functions apart."""
    if all(v.is_Integer for v in values):
        found = samples.fit([int(v) for v in values])
        if found is None:
            raise Different(", ".join(map(str, values[:3])))
        return found
    if all(v.is_Function and v.func == values[0].func and len(v.args) == len(values[0].args) for v in values):
        return values[0].func(*(_expression(samples, a) for a in zip(*(v.args for v in values), strict=True)))
    terms = [dict(sympy.expand(v).as_coefficients_dict()) for v in values]
    heads = [sorted(t, key=_skeleton) for t in terms]
    if len({tuple(map(_skeleton, h)) for h in heads}) > 1:
        raise Different(", ".join(map(str, values[:3])))
    made: Any = sympy.Integer(0)
    for row in zip(*heads, strict=True):
        by = _expression(samples, [t[h] for t, h in zip(terms, row, strict=True)])
        made += by * (row[0] if len(set(row)) == 1 else _product(samples, row))
    return made


def _product(samples: Samples, values: Sequence[Any]) -> Any:
    factors = [sympy.Mul.make_args(v) for v in values]
    if len({len(f) for f in factors}) > 1 or (len(factors[0]) == 1 and not values[0].is_Function):
        raise Different(", ".join(map(str, values[:3])))
    made: Any = sympy.Integer(1)
    for row in zip(*(sorted(f, key=_skeleton) for f in factors), strict=True):
        made *= row[0] if len(set(row)) == 1 else _expression(samples, row)
    return made


def _skeleton(value: Any) -> str:
    """An expression without its integers."""
    return str(value.xreplace({i: sympy.Symbol("_") for i in value.atoms(sympy.Integer)}))


def _local(samples: Samples, node: Node, shapes: Sequence[Any], mesh: Mesh) -> Any:
    """Local sizes at coordinate 0: by the spec, else as sizes that are known already are, else a polynomial."""
    spec, whole = node.meta.get("spec"), node.meta.get("global")
    if spec is not None and shapes[0] is not None:
        found = tuple(_piece(n, int(sized(n, samples.start)), [mesh[a] for a in spec.axes_of(d)])
                      for d, n in enumerate(whole))  # fmt: skip
        for row, n in zip(zip(*shapes, strict=True), found, strict=True):
            samples.learn(row, n)
        return found
    if shapes[0] is None:
        return None
    if any(s is None or isinstance(s, tuple) for s in shapes[0]):
        return tuple(_local(samples, node, s, mesh) for s in zip(*shapes, strict=True))
    return tuple(_unified(samples, row) for row in zip(*shapes, strict=True))


def _piece(n: Any, hint: int, parts: Sequence[int]) -> Any:
    """The largest local size of ``n``, which is ``hint`` in the example: that is cut evenly or not, as others are."""
    even = True
    for k in parts:
        even = even and hint % k == 0
        n = sympy.sympify(n) / k if even else sympy.ceiling(sympy.sympify(n) / k)
        hint = -(-hint // k)
    return number(sympy.sympify(n))


# --- guards -----------------------------------------------------------------------------------------------------


def pieces_of(local: Partitioned) -> int:
    """A number that every number of pieces divides into which a dim is cut."""
    found = 1
    for node in local.graph.graph.nodes:
        spec = node.meta.get("spec")
        for axes in spec.sharding.values() if spec is not None else ():
            found = math.lcm(found, math.prod(local.mesh[a] for a in axes))
    return found


def even_cuts(general: Partitioned, dims: Dims) -> tuple[Guard, ...]:
    """What the plan asks of sizes: that a dim which it cuts evenly in the example be cut evenly."""
    asked: dict[Any, dict[int, str]] = {}
    labels = iter(general.inputs)
    for node in general.graph.graph.nodes:
        what = next(labels).name if node.op == "placeholder" else node.name
        spec = node.meta.get("spec")
        for d, n in enumerate(node.meta["global"] if spec is not None else ()):
            parts = 1
            for axis in spec.axes_of(d) if isinstance(n, sympy.Basic) else ():
                parts *= general.mesh[axis]
                factor, rest = sympy.factor_terms(n).as_coeff_Mul()
                if sized(n, dims.hints) % parts or not factor.is_Integer:
                    continue
                by = parts // math.gcd(parts, int(factor))
                axes = "/".join(spec.axes_of(d)[: spec.axes_of(d).index(axis) + 1])
                at = f" ({source_line(node)})" if source_line(node) else ""
                asked.setdefault(rest, {}).setdefault(by, f"dim {d} of {what}{at} is cut into {parts} on {axes}")
    most = {rest: math.lcm(*by) for rest, by in asked.items()}
    guards = []
    for rest, counts in asked.items():
        alone = [most.get(s, 1) for s in sympy.Mul.make_args(rest)] if rest.is_Mul else []
        for k in sorted(counts):
            implied = any(other != k and other % k == 0 for other in counts) or (alone and math.prod(alone) % k == 0)
            if k > 1 and not implied:
                guards.append(Guard(sympy.Eq(sympy.Mod(rest, k), 0, evaluate=False), counts[k]))
    return tuple(guards)
