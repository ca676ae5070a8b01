"""Operators that take bodies: on one axis, the borders that are worth planning their bodies under.

Each rule of a body's nodes ties dims of their operands and results; the dims so tied, through the body and at its
border (what is carried out to what is carried in, branches to one another), are a *class*.  Cutting a class on an axis
is a way to run the call: operands and results in which the class stands are sharded there, the others replicated.
Classes that stand in no tensor together are cut together as well (the hidden dims of a layer's blocks; its weights and
its batch).  A result that the body has partial may stay so, to be reduced outside: once, not in each turn of a loop,
and by a reduce-scatter where its pieces are wanted.

These ways are candidates: they say nothing of what happens inside.  Whoever prices a choice plans the bodies under its
border, with whatever collectives that takes, so that each way is sound, and the cheapest of them is found (the bound of
a program with bodies is of plans with these borders).  All of it is of the size of a body: neither the turns of a loop
nor the calls of a region count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule, Node

from ..bodies import Call, call_of, returned
from ..emit import Emit, Local
from ..ir import is_getitem, is_tensor, operands, producer, results
from ..rules import Dims, Rule, Way, define, rule_of

MOST = 24  # ways on one axis
End = tuple[str, int, int]  # "operand" or "result" of the call, which one, which dim
hop = torch.ops.higher_order


@define(hop.cond, hop.map_impl, hop.scan, hop.while_loop, hop.invoke_subgraph)
def _(node: Node) -> Rule | None:
    call = call_of(node)
    if call is None:
        return None
    given, made = [o.meta["val"] for o in operands(node)], results(node)
    sizes: dict[str, int] = {}

    def lettered(prefix: str, values: Any) -> tuple[Dims, ...]:
        found = []
        for i, v in enumerate(values):
            letters = [f"{prefix}{i}.{d}" for d in range(0 if v is None else v.dim())]
            sizes.update(zip(letters, map(int, () if v is None else v.shape), strict=True))
            found.append(tuple((f,) for f in letters))
        return tuple(found)

    ops, res = lettered("o", given), lettered("r", made)
    parted = {f"o{o}.0" for o, sliced in call.feed if call.parts and sliced and o is not None}
    parted |= {f"r{i}.0" for i in range(len(made)) if call.parts and call.slot(i)}
    return Rule(
        ops, res, sizes, whole=frozenset(sizes), even=frozenset(parted), form=_form,
        ways=tuple(_Ways(node, call).found()),
    )  # fmt: skip


def _form(e: Emit, *args: Any, **kwargs: Any) -> Local:
    """The same call of partitioned bodies, which `passes.partition` has put in the place of the global ones."""
    if e.node.target is hop.invoke_subgraph:  # torch knows a region by a name, and ours by its border too
        args = (args[0], args[0].name, *args[2:])
    return e.call_as(tuple(e.result(i) for i in range(len(e.result_specs))), e.node.target, *args, **kwargs)


class _Ways:
    """The classes of dims at a call's border, and the ways that they give."""

    def __init__(self, node: Node, call: Call) -> None:
        self.node, self.call = node, call
        self.given, self.made = [o.meta["val"] for o in operands(node)], results(node)
        self.graphs: list[GraphModule] = [b.meta["val"] for b in call.bodies]
        self.parent: dict[Any, Any] = {}
        self.cut: set[Any] = set()  # what some rule may cut
        self.rules: dict[Node, Rule | None] = {}
        for body in self.graphs:
            for n in body.graph.nodes:
                if n.op == "call_function" and not is_getitem(n):
                    self.rules[n] = rule_of(n)
        self._tie_bodies()
        self._tie_border()

    # --- ties ----------------------------------------------------------------------------------------------------

    def _root(self, x: Any) -> Any:
        while (up := self.parent.setdefault(x, x)) != x:
            self.parent[x] = x = self.parent.setdefault(up, up)
        return x

    def _tie(self, *ends: Any) -> None:
        for end in ends[1:]:
            self.parent[self._root(end)] = self._root(ends[0])

    def _tie_bodies(self) -> None:
        for n, r in self.rules.items():
            if r is None:
                continue
            terms = [(producer(o), d) for o, d in zip(operands(n), r.operands, strict=True)]
            terms += [((n, i), d) for i, d in enumerate(r.results) if results(n)[i] is not None]
            groups = [[(*value, i) for value, dims in terms for i, d in enumerate(dims) if d and d[0] == f]
                      for f in r.shardable()]  # fmt: skip
            groups += [[(*value, p.dim) for (value, _), p in zip(terms, (*w.operands, *w.results), strict=True)
                        if isinstance(p, Shard)] for w in r.ways]  # fmt: skip
            for ends in groups:
                self._tie(*ends)
                self.cut.update(ends)

    def _tie_border(self) -> None:
        call = self.call
        for body in self.graphs:
            for place, (o, sliced) in zip(body.graph.find_nodes(op="placeholder"), call.feed, strict=True):
                for d in range(0 if o is None else place.meta["val"].dim()):
                    self._tie(("operand", o, d + sliced), (place, 0, d))
        for body in self.graphs[call.asks :]:
            for i, value in enumerate(returned(body)):
                for d in range(value.meta["val"].dim() if self._is_tensor(value) else 0):
                    self._tie(("result", i, d + call.slot(i)), (*producer(value), d))
        for i, made in enumerate(self.made[: call.carried]):
            for d in range(0 if made is None else made.dim()):
                self._tie(("operand", call.feed[i][0], d), ("result", i, d))
        if call.parts:
            slices = [("operand", o, 0) for o, sliced in call.feed if sliced]
            slices += [("result", i, 0) for i in range(len(self.made)) if call.slot(i)]
            self._tie(*slices)
            self.cut.update(slices)

    @staticmethod
    def _is_tensor(value: Any) -> bool:
        return isinstance(value, Node) and is_tensor(value.meta.get("val"))

    # --- ways ----------------------------------------------------------------------------------------------------

    def _sizes(self) -> Iterator[tuple[End, int]]:
        for kind, values in (("operand", self.given), ("result", self.made)):
            for i, v in enumerate(values):
                for d, n in enumerate(() if v is None else v.shape):
                    yield (kind, i, d), int(n)

    def _classes(self) -> list[dict[tuple[str, int], int]]:
        """For each class the dim of each operand and result that it cuts; a tensor in which it stands twice is cut in
        its first dim, or in its last."""
        cut = {self._root(x) for x in self.cut}
        found: dict[Any, list[End]] = {}
        for end, n in self._sizes():
            if n > 1 and self._root(end) in cut:
                found.setdefault(self._root(end), []).append(end)
        made = []
        for ends in found.values():
            first = {(kind, i): d for kind, i, d in reversed(ends)}
            last = {(kind, i): d for kind, i, d in ends}
            made += [first] if first == last else [first, last]
        return made

    def found(self) -> Iterator[Way]:
        """The ways of sets of classes that stand in no tensor together, small sets first."""
        classes = self._classes()
        count = 0
        for size in range(1, len(classes) + 1):
            for group in itertools.combinations(classes, size):
                tensors = [t for c in group for t in c]
                if len(tensors) != len(set(tensors)) or (size > 1 and any(self._parts(c) for c in group)):
                    continue
                if count == MOST:
                    return
                count += 1
                yield from self._way({t: d for c in group for t, d in c.items()})

    def _parts(self, cut: dict[tuple[str, int], int]) -> bool:
        """Whether a class parts the slices between devices: the axis then doesn't exist in the body."""
        return self.call.parts and any(sliced and cut.get(("operand", o)) == 0 for o, sliced in self.call.feed)  # type: ignore[arg-type]

    def _way(self, cut: dict[tuple[str, int], int]) -> Iterator[Way]:
        def placed(kind: str, i: int) -> Placement:
            return Shard(cut[kind, i]) if (kind, i) in cut else Replicate()

        ops = tuple(placed("operand", i) for i in range(len(self.given)))
        res = tuple(placed("result", i) for i in range(len(self.made)))
        left = [self._left(body, ops) for body in self.graphs[self.call.asks :]]
        partial = tuple(
            Partial("sum") if i >= self.call.carried and ("result", i) not in cut and all(i in ends for ends in left)
            else p for i, p in enumerate(res)
        )  # fmt: skip
        yield Way(ops, res)
        if partial != res:
            yield Way(ops, partial)

    def _left(self, body: GraphModule, ops: tuple[Placement, ...]) -> set[int]:
        """The outputs that a body has partial when its inputs are placed so and nothing moves inside."""
        state: dict[tuple[Node, int], Placement] = {}
        for place, (o, sliced) in zip(body.graph.find_nodes(op="placeholder"), self.call.feed, strict=True):
            if o is not None:
                p = ops[o]
                if isinstance(p, Shard) and sliced:
                    p = Shard(p.dim - 1) if p.dim else Replicate()
                state[place, 0] = p
        for n in body.graph.nodes:
            if (r := self.rules.get(n)) is not None:
                made = _through(r, [state.get(producer(o), Replicate()) for o in operands(n)])
                state.update({(n, i): p for i, p in enumerate(made)})
        ends = enumerate(returned(body))
        return {i for i, v in ends if self._is_tensor(v) and state.get(producer(v)) == Partial("sum")}


def _through(r: Rule, given: list[Placement]) -> list[Placement]:
    """The placements of a node's results on one axis where its operands have these; replicated where nothing fits.

    What is replicated may be cut for nothing.
    """
    whole: list[Placement] = [Replicate()] * len(r.results)
    if all(isinstance(p, Replicate) for p in given):
        return whole
    for f in r.shardable():
        wanted = [_dim(dims, f) for dims in r.operands]
        if all(p == w or not (isinstance(p, Shard) or p.is_partial() or w.is_replicate())
               for p, w in zip(given, wanted, strict=True)):  # fmt: skip
            op = r.reduce.get(f, "sum")
            absent: Placement = Replicate() if op == "none" else Partial(op)
            return [p if isinstance(p := _dim(dims, f), Shard) else absent for dims in r.results]
    for group in r.linear:
        for op in group.ops:
            if given == [Partial(op) if i in group.operands else Replicate() for i in range(len(given))]:
                return [Partial(op)] * len(r.results)
    return whole


def _dim(dims: Dims, factor: str) -> Placement:
    return next((Shard(i) for i, d in enumerate(dims) if d and d[0] == factor), Replicate())
