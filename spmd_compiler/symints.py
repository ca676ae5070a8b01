"""Sizes that data decide, as numbers that a graph computes: what runs, and what Inductor compiles.

In a bound graph (`lower.bind`) integers are expressions of data sizes.  `with_numbers` writes a node for each, from the
size of what the node before made, and gives every value a fake one of torch's own symbolic sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import CallMethodKey, ShapeEnv
from torch.utils._pytree import SequenceKey

from .dims import Dim
from .ir import check_size, producer, size_op, source_line
from .placements import SpmdError
from .symbolic import real

aten = torch.ops.aten


def computed(value: Any, leaf: Callable[[str], Any], call: Callable[..., Any]) -> Any:
    """An expression of data sizes, in sizes that ``leaf`` gives, by Python's operators, which ``call`` applies.

    Quotients of integers are exact."""

    def chain(op: Any, args: Sequence[Any]) -> Any:
        made = walk(args[0])
        for a in args[1:]:
            made = call(op, made, walk(a))
        return made

    def quotient(x: Any, whole: Any) -> Any:
        over, under = sympy.fraction(sympy.together(x))
        return walk(over) if under == 1 else call(whole, walk(over), walk(under))

    def walk(x: Any) -> Any:
        if x.is_Integer:
            return int(x)
        if x.is_Symbol:
            return leaf(x.name)
        if isinstance(x, real):
            inner = x.args[0]
            if sympy.fraction(sympy.together(inner))[1] == 1:
                return call(torch.sym_float, walk(inner))
            return quotient(inner, operator.truediv)
        if isinstance(x, sympy.floor):
            return quotient(x.args[0], operator.floordiv)
        if isinstance(x, sympy.ceiling):
            return call(operator.neg, quotient(-x.args[0], operator.floordiv))
        if isinstance(x, sympy.Mod):
            return chain(operator.mod, x.args)
        if isinstance(x, (sympy.Max, sympy.Min)):
            return chain(torch.sym_max if isinstance(x, sympy.Max) else torch.sym_min, x.args)
        if sympy.fraction(sympy.together(x))[1] != 1:
            return quotient(x, operator.floordiv)
        if x.is_Add:
            return chain(operator.add, sorted(x.args, key=str))
        if x.is_Mul:
            return chain(operator.mul, sorted(x.args, key=str))
        if x.is_Pow and x.args[1].is_Integer:
            return chain(operator.mul, [x.args[0]] * int(x.args[1]))
        if x.is_Pow and x.args[1].is_Rational:
            return call(operator.pow, call(torch.sym_float, walk(x.args[0])), float(x.args[1]))
        raise NotImplementedError(f"no operator of Python gives {x}, which data decide")

    return walk(value)


def with_numbers(gm: GraphModule, data: Sequence[Dim]) -> GraphModule:
    """A copy of a bound graph, with ``meta["layout"]``, in which every integer is a number or a node that has it."""
    return _Numbers(gm, data).run()


class _Numbers:
    def __init__(self, gm: GraphModule, data: Sequence[Dim]) -> None:
        self.gm, self.graph, self.done = gm, Graph(), dict[Node, Any]()
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.given = {d.name: d for d in data}
        self.symints: dict[str, Any] = {}
        self.nodes: dict[Any, Any] = {}  # by expression, and by the name of a size
        self.makers = {n.args[2]: n for n in reversed(gm.graph.nodes) if n.target is size_op}  # the first of a name

    def run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.get(node)
        for node in self.gm.graph.nodes:
            self.get(node)
        return GraphModule(self.gm, self.graph)

    def get(self, node: Node) -> Any:
        try:
            return self._made(node)
        except NotImplementedError as error:
            raise SpmdError(
                f"{node.name} ({source_line(node)}): {error}; compute it of a tensor (x.new_tensor, a sum of the mask)"
            ) from error

    def _made(self, node: Node) -> Any:
        if node not in self.done:
            # a size is known by its name: what names it comes first, wherever it stood
            args, kwargs = self.tree(node.args), self.tree(node.kwargs)
            if node.target is size_op:
                x, d, name = args
                if name in self.nodes:  # another selection that is taken to be as large
                    self.done[node] = self.graph.call_function(check_size, (x, d, self.nodes[name]))
                    self.done[node].meta = {**node.meta, "val": None}
                    return self.done[node]
                self.done[node] = self.graph.call_function(aten.sym_size.int, (x, d))
                self.nodes[name] = self.done[node]
                self.done[node].meta = {**node.meta, "val": self.symint(name), "names": True}
                return self.done[node]
            new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            new.meta = {**node.meta, "val": self.value(node)}
            self.done[node] = new
            if "size" in node.meta:  # of a value that the other half made
                self.nodes[node.meta["size"]] = new
        return self.done[node]

    def tree(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self.get(value)
        if isinstance(value, sympy.Basic):
            return self.number(value)
        if isinstance(value, dict):
            return {k: self.tree(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self.tree(v) for v in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def number(self, expression: Any) -> Any:
        """The node of an integer, written once."""
        if expression not in self.nodes:
            self.nodes[expression] = computed(expression, self.size, self.call)
        return self.nodes[expression]

    def size(self, name: str) -> Node:
        if name not in self.nodes:
            self.get(self.makers[name])
        return self.nodes[name]

    def call(self, op: Any, *args: Any) -> Node:
        node = self.graph.call_function(op, args)
        node.meta["val"] = op(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        return node

    # --- fake values ----------------------------------------------------------------------------------------

    def symint(self, name: str) -> Any:
        if name not in self.symints:
            made = self.env.create_unbacked_symint()
            self.env.pending_fresh_unbacked_symbols.clear()
            symbolic_shapes._constrain_range_for_size(made, 0, self.given[name].high)
            self.symints[name] = made
        return self.symints[name]

    def value(self, node: Node) -> Any:
        if "size" in node.meta:
            return self.symint(node.meta["size"])
        return self.fake(node.meta.get("val"), node.meta.get("layout"))

    def fake(self, value: Any, layout: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self.fake(v, at) for v, at in zip(value, layout, strict=True))
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = ([n if isinstance(n, int) else computed(n, self.symint, lambda op, *a: op(*a)) for n in given]
                         for given in layout)  # fmt: skip
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def bind_sizes(gm: GraphModule) -> None:
    """Say of each node that makes sizes which of torch's symbols they are, as Inductor expects."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if "names" not in node.meta:
            continue
        maker, r = producer(node.args[0])
        path: tuple[Any, ...] = (CallMethodKey("size"), SequenceKey(node.args[1]))
        if isinstance(maker.meta["val"], (tuple, list)):
            path = (SequenceKey(r), *path)
        maker.meta.setdefault("unbacked_bindings", {})[node.meta["val"].node.expr] = path
