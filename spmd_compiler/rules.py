"""Sharding rules in factor notation, and the choices they give a node.

A *factor* is a letter that ties dims of operands and results together: ``"m k, k n -> m n"`` says that
sharding ``m`` shards dim 0 of the first operand and of the result, and that sharding ``k`` shards both operands
and leaves the result ``Partial("sum")``.  A rule speaks of no mesh, rank or number of devices; on one axis it
yields these choices:

* everything replicated;
* one factor sharded: an operand that lacks it is replicated, a result that lacks it is partial;
* partials passed through where the op is linear: the operands of one `Linear` group partial, the others
  replicated, the results partial.

On a mesh a node's choices are the product over axes, each shared factor in every nesting order
(`choices`).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node

from .ir import operands, results
from .placements import REDUCE_OPS, Mesh, Spec, SpmdError
from .words import shown

Dims = tuple[tuple[str, ...], ...]  # of one tensor: for each dim its factors, major first


@dataclass(frozen=True)
class Linear:
    """Operands that may be partial together (the op is linear in them jointly) for each of ``ops``."""

    operands: tuple[int, ...]
    ops: tuple[str, ...] = ("sum",)


@dataclass(frozen=True)
class Way:
    """A way to run a node on one axis, by the placements of its operands and results."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


@dataclass(frozen=True)
class Rule:
    """What is known of one node.

    ``reduce`` gives, for a factor absent from a result, the op that makes the result whole (``"sum"`` if not
    named); ``"none"`` says that the local form has done it already and the result is replicated.  Factors in
    ``whole`` are never sharded.  ``form`` writes the local nodes (`emit.Emit`); without one the same op runs on
    local pieces.  ``flops`` counts matmul-like work of the global op.

    A factor in ``windows`` stands in dims of different sizes (all of them listed; ``sizes`` has a result's): each is
    cut in as many pieces, and the form fetches what a piece of the result needs from pieces of the operands: of an
    ``aligned`` rule nothing where all pieces are even.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    linear: tuple[Linear, ...] = ()
    form: Callable[..., Any] | None = None
    flops: float = 0.0
    even: frozenset[str] = frozenset()  # factors that are cut evenly or not at all (the form can't do uneven pieces)
    windows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    aligned: bool = False
    nonempty: bool = False  # whether torch refuses pieces without elements: the form gets one zero in their place
    ways: tuple[Way, ...] = ()  # to run it on one axis, besides what the factors give

    def key(self) -> tuple[Any, ...]:
        """Equal for rules that give equal choices."""
        return (
            self.operands, self.results, tuple(sorted(self.sizes.items())), tuple(sorted(self.reduce.items())),
            self.whole, self.linear, self.flops, self.even, tuple(sorted(self.windows.items())),
            self.aligned, self.ways,
        )  # fmt: skip

    def shardable(self) -> list[str]:
        """The factors that a mesh axis may shard: not whole, and the major one of every dim they stand in."""
        minor = {f for dims in self.operands + self.results for dim in dims for f in dim[1:]}
        return [f for f in self.sizes if min(self.extents(f)) > 1 and f not in minor and f not in self.whole]

    def extents(self, factor: str) -> Collection[int]:
        """The sizes of the dims in which a factor stands alone."""
        return self.windows.get(factor) or (self.sizes[factor],)

    def composite(self) -> frozenset[str]:
        """Factors that share a dim with others: their pieces must be even to be pieces of the dim."""
        return frozenset(f for dims in self.operands + self.results for dim in dims if len(dim) > 1 for f in dim)


@dataclass(frozen=True)
class Choice:
    """One legal way to run a node: specs of operands and results, and the axes that shard each factor."""

    operands: tuple[Spec, ...]
    results: tuple[Spec | None, ...]
    factor_axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


# --- registry ----------------------------------------------------------------------------------------------

RuleFunction = Callable[[Node], "Rule | None"]
RULES: dict[Any, RuleFunction] = {}
DEFAULTS: list[RuleFunction] = []  # asked in turn for an op that `RULES` does not name


def define_default(function: RuleFunction) -> RuleFunction:
    """Register a function to be asked for every op that has no rule of its own."""
    DEFAULTS.append(function)
    return function


def define(*ops: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function ``node -> Rule`` (None: this use of the op has no rule) for overloads, packets or names.

    A name (``"prims::fma"``) serves operators that may not be registered yet.
    """

    def add(function: RuleFunction) -> RuleFunction:
        for op in ops:
            RULES[op] = function
        return function

    return add


def rule(
    op: Any,
    text: str,
    *,
    reduce: Mapping[str, str] | None = None,
    whole: str | Sequence[str] = (),
    linear: Sequence[Sequence[int]] = (),
    form: Callable[..., Any] | None = None,
    flops: str | None = None,
    even: str | Sequence[str] = (),
) -> None:
    """Register the rule ``text`` for an overload or packet (or several, as a tuple).

    ``text`` is ``"m k, k n -> m n"``: a term per tensor argument and per result; dims are letters, ``1`` (tied to
    nothing), ``(a b)`` (one dim made of two factors) or ``...`` (any number of leading dims, aligned to the
    right and broadcast).  ``linear`` lists groups of operands that may be partial together; ``flops`` names the
    factors whose product is the multiply-add count (2 flops each).  Trailing optional tensors may be absent.
    """
    template = parse_rule(text)

    def instantiate(node: Node) -> Rule | None:
        return template.instantiate(
            node, reduce=dict(reduce or {}), whole=frozenset(whole), form=form, flops=flops, even=frozenset(even),
            linear=tuple(Linear(tuple(g)) for g in linear),
        )  # fmt: skip

    for one in op if isinstance(op, tuple) else (op,):
        RULES[one] = instantiate


def register_rule(
    op: Any,
    text: str,
    *,
    reduce: Mapping[str, str] | None = None,
    whole: str | Sequence[str] = (),
    linear: Sequence[Sequence[int]] = (),
    form: Callable[..., Any] | None = None,
    flops: str | None = None,
    even: str | Sequence[str] = (),
) -> None:
    """`rule` under its public name: teach the compiler an operator of your own (or several, as a tuple).

    An operator is ``torch.ops.mylib.myop`` or an overload of it, what ``torch.library.custom_op`` gives, or a name such
    as ``"mylib::myop"``.  Raises `SpmdError` for anything else, a text that is no rule or has other terms than the
    operator has tensors, and for factors and operands that the text does not have.
    """
    ops = tuple(_operator(one) for one in (op if isinstance(op, tuple) else (op,)))
    if not ops:
        raise SpmdError("register_rule is given no operator")
    for what, value, kinds in (("reduce", reduce, Mapping), ("whole", whole, (str, Sequence)), ("flops", flops, str),
                               ("even", even, (str, Sequence)), ("linear", linear, (list, tuple))):  # fmt: skip
        if value is not None and not isinstance(value, kinds):
            raise SpmdError(f"rule {shown(text)}: {what} can't be {shown(value)}")
    try:
        template = parse_rule(text)
    except ValueError as error:
        raise SpmdError(str(error)) from None
    for one in ops:
        _check_terms(one, template)
    known = {f for term in template.operands + template.results for dim in term if dim != "..." for f in dim}
    given = {"reduce": reduce or {}, "whole": whole, "even": even, "flops": (flops or "").split()}
    for what, factors in given.items():
        if unknown := [f for f in factors if f not in known]:
            raise SpmdError(f"rule {text!r} has no factor {unknown[0]!r} for {what}; it has {', '.join(sorted(known))}")
    for f, by in (reduce or {}).items():
        if by not in (*REDUCE_OPS, "none"):
            ways = ", ".join(REDUCE_OPS)
            raise SpmdError(f"rule {text!r}: {f} is reduced by one of {ways} or none, not by {shown(by)}")
    for group in linear:
        most = len(template.operands) - 1
        if not isinstance(group, (list, tuple)) or not all(isinstance(i, int) and 0 <= i <= most for i in group):
            raise SpmdError(f"rule {text!r}: linear has groups of operands 0..{most}, such as (0,), not {shown(group)}")
    if form is not None and not callable(form):
        raise SpmdError(f"rule {text!r}: form is a function that writes local nodes, not {shown(form)}")
    rule(ops, text, reduce=reduce, whole=whole, linear=linear, form=form, flops=flops, even=even)


_PACKET = type(torch.ops.aten.add)


def _operator(op: Any) -> Any:
    """An operator as `RULES` knows it."""
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    named = isinstance(op, str) and re.fullmatch(r"\w+::\w+(\.\w+)?", op)
    if not named and not isinstance(op, (torch._ops.OpOverload, _PACKET)):
        remedy = "give torch.ops.mylib.myop, a torch.library.custom_op or 'mylib::myop'"
        raise SpmdError(f"{shown(op)} is no operator: {remedy}")
    return op


def _check_terms(op: Any, template: Template) -> None:
    """Raise `SpmdError` where no overload of an operator has a tensor for each term."""
    packet = isinstance(op, _PACKET)
    overloads = [getattr(op, o) for o in op.overloads()] if packet else [] if isinstance(op, str) else [op]
    terms = len(template.operands), len(template.results)
    counts: list[tuple[int, ...]] = []
    fits = False
    for one in overloads:
        kinds = [[str(a.type) for a in side] for side in (one._schema.arguments, one._schema.returns)]
        if any("List[" in k and "Tensor" in k for side in kinds for k in side):
            return
        counts.append(tuple(sum("Tensor" in k for k in side) for side in kinds))
        optional = sum("Optional" in k for k in kinds[0] if "Tensor" in k)
        fits = fits or (counts[-1][0] - optional <= terms[0] <= counts[-1][0] and terms[1] == counts[-1][1])
    if counts and not fits:
        has = " or ".join(f"{a} -> {b}" for a, b in dict.fromkeys(counts))
        raise SpmdError(f"rule {template.text!r} has {terms[0]} -> {terms[1]} terms; {op} has {has} tensors")


def rule_of(node: Node) -> Rule | None:
    """The rule of a node, found by overload, then by packet, then by name; None when there is none."""
    schema = getattr(node.target, "_schema", None)
    keys = (node.target, getattr(node.target, "overloadpacket", None), getattr(schema, "name", None))
    function = next((RULES[k] for k in keys if k in RULES), None)
    values = [*results(node), *(o.meta["val"] for o in operands(node))]
    if any(any(not isinstance(s, int) for s in t.shape) for t in values if t is not None):
        return None
    if function is not None:
        found = function(node)
    else:
        found = next(filter(None, (f(node) for f in DEFAULTS)), None)
    if found is not None and len(found.operands) != len(operands(node)):
        raise AssertionError(f"{node.target}: rule has {len(found.operands)} operands, node {len(operands(node))}")
    return found


def replicated(node: Node) -> Rule:
    """The rule of last resort: replicated operands and results."""
    return Rule(
        operands=tuple(((),) * o.meta["val"].dim() for o in operands(node)),
        results=tuple(() if r is None else ((),) * r.dim() for r in results(node)),
        sizes={},
    )


ANY_OP = ("sum", "max", "min", "product")  # what pure data movement lets through


def dims(prefix: str, shape: Sequence[Any] | int, without: Collection[int] = ()) -> Dims:
    """One factor for each dim, ``prefix`` and its number; ``()`` for the dims in ``without``."""
    n = shape if isinstance(shape, int) else len(shape)
    return tuple(() if i in without else (f"{prefix}{i}",) for i in range(n))


def fit(
    node: Node,
    ops: Sequence[Dims],
    res: Sequence[Dims],
    linear: Sequence[Sequence[int]] = (),
    linear_ops: tuple[str, ...] = ("sum",),
    windows: Collection[str] = (),
    **fields: Any,
) -> Rule | None:
    """A rule from dims that hold one factor or none, sizes read off the node's tensors.

    A dim of size 1 beside a larger one of the same factor is tied to nothing; sizes that disagree otherwise make
    the factor whole wherever it stands, unless it is one of ``windows``.  Linear groups with a bool operand, or with
    fractions that are rounded, are dropped; complex values add up only.
    """
    values = [o.meta["val"] for o in operands(node)]
    made = results(node)
    if len(ops) != len(values) or len(res) != len(made):
        return None
    terms = list(zip(ops, [tuple(v.shape) for v in values], strict=True))
    terms += [(d, () if r is None else tuple(r.shape)) for d, r in zip(res, made, strict=True)]
    sizes: dict[str, int] = {}
    odd: set[str] = set()
    different: dict[str, set[int]] = {f: set() for f in windows}
    for term, shape in terms:
        if len(term) != len(shape):
            return None
        for dim, n in zip(term, shape, strict=True):
            for f in dim:
                if f in different:
                    sizes[f] = n  # results come last
                    different[f].add(n)
                    continue
                old = sizes.setdefault(f, n)
                if old != n:
                    sizes[f] = max(old, n)
                    if min(old, n) != 1:
                        odd.add(f)

    def tied(term: Dims, shape: tuple[int, ...]) -> Dims:
        return tuple(
            d if d and (sizes[d[0]] == n or d[0] in different) and d[0] not in odd else ()
            for d, n in zip(term, shape, strict=True)
        )

    fitted = [tied(t, s) for t, s in terms]
    if any(t.dtype.is_complex for t in (*values, *made) if t is not None):
        linear_ops = tuple(o for o in linear_ops if o == "sum")
    rounds = any(t is not None and not (t.is_floating_point() or t.is_complex()) for t in made)

    def adds_up(t: torch.Tensor) -> bool:
        return t.dtype != torch.bool and not (rounds and (t.is_floating_point() or t.is_complex()))

    groups = [Linear(tuple(g), linear_ops) for g in linear if all(adds_up(values[i]) for i in g)]
    return Rule(
        operands=tuple(fitted[: len(ops)]), results=tuple(fitted[len(ops) :]),
        sizes={f: n for f, n in sizes.items() if f not in odd}, linear=tuple(groups),
        windows={f: frozenset(n) for f, n in different.items() if n}, **fields,
    )  # fmt: skip


def contributed(x: torch.Tensor, *factors: str) -> dict[str, str]:
    """How results are reduced to which one device contributes and the others zero (of truth values: false)."""
    return dict.fromkeys(factors, "max" if x.dtype == torch.bool else "sum")


def moved(node: Node, ops: Sequence[Dims], res: Sequence[Dims], **fields: Any) -> Rule | None:
    """A rule of data movement: all operands may be partial together, under any reduction."""
    return fit(node, ops, res, [list(range(len(operands(node))))], ANY_OP, **fields)


# --- templates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    text: str
    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]

    def instantiate(self, node: Node, *, linear: tuple[Linear, ...], flops: str | None, **fields: Any) -> Rule:
        given = [tuple(o.meta["val"].shape) for o in operands(node)]
        made = [() if r is None else tuple(r.shape) for r in results(node)]
        if len(given) > len(self.operands) or len(made) != len(self.results):
            raise ValueError(
                f"rule {self.text!r} does not fit {node.target}: {len(given)} operands, {len(made)} results"
            )
        sizes: dict[str, int] = {}
        shapes = given + [()] * (len(self.operands) - len(given)) + made
        terms = list(zip(self.operands + self.results, shapes, strict=True))
        for term, shape in terms:
            if shape or "..." not in term:
                self._bind_sizes(term, shape, sizes)
        for term, shape in terms:
            self._bind_composite(term, shape, sizes)
        ops = tuple(self._dims(t, s, sizes) for t, s in zip(self.operands, given, strict=False))
        res = tuple(self._dims(t, s, sizes) for t, s in zip(self.results, made, strict=True))
        kept = tuple(g for g in linear if all(i < len(given) for i in g.operands))
        count = 2.0 * math.prod(sizes[f] for f in flops.split()) if flops else 0.0
        return Rule(operands=ops, results=res, sizes=sizes, linear=kept, flops=count, **fields)

    def _expand(self, term: tuple[Any, ...], ndim: int) -> list[tuple[str, ...]]:
        fixed = sum(t != "..." for t in term)
        dims: list[tuple[str, ...]] = []
        for t in term:
            if t == "...":
                extra = ndim - fixed
                dims += [(f"~{i}",) for i in range(extra - 1, -1, -1)]
            else:
                dims.append(t)
        return dims

    def _bind_sizes(self, term: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        for dim, n in zip(self._expand(term, len(shape)), shape, strict=False):
            if len(dim) == 1:
                sizes[dim[0]] = max(sizes.get(dim[0], 1), int(n)) if n != 0 else 0

    def _bind_composite(self, term: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        """The one factor of a composite dim that stands nowhere alone."""
        for dim, n in zip(self._expand(term, len(shape)), shape, strict=False):
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = int(n) // max(1, math.prod(sizes[f] for f in dim if f in sizes))

    def _dims(self, term: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
        dims = self._expand(term, len(shape))
        if len(dims) != len(shape):
            raise ValueError(f"rule {self.text!r}: term {term} does not fit shape {shape}")
        for d, n in zip(dims, shape, strict=True):
            if n != 1 and n != math.prod(sizes[f] for f in d) and d:
                raise ValueError(f"rule {self.text!r}: size {n} of dim {' '.join(d)} does not fit {sizes}")
        # a dim of size 1 beside a larger factor is broadcast: it is tied to nothing
        return tuple(d if math.prod(sizes[f] for f in d) == n else () for d, n in zip(dims, shape, strict=True))


@functools.cache
def parse_rule(text: str) -> Template:
    """Parse ``"m k, k n -> m n"``; errors point at the character."""
    if not isinstance(text, str):
        raise SpmdError(f"a rule is a text such as 'm k, k n -> m n', not {shown(text)}")
    if text.count("->") != 1:
        raise ValueError(f"rule {text!r}: one '->' is needed")
    left, right = text.split("->")

    def side(part: str, begin: int) -> tuple[tuple[Any, ...], ...]:
        terms = []
        for term in part.split(",") if part.strip() else []:
            dims: list[Any] = []
            for match in re.finditer(r"\.\.\.|\(([^()]*)\)|[A-Za-z_]\w*|1|\S", term):
                token = match.group(0)
                if token == "...":
                    dims.append("...")
                elif match.group(1) is not None:
                    dims.append(tuple(match.group(1).split()))
                elif token == "1":
                    dims.append(())
                elif re.fullmatch(r"[A-Za-z_]\w*", token):
                    dims.append((token,))
                else:
                    at = begin + match.start()
                    raise ValueError(f"rule {text!r}: unexpected {token!r}\n  {text}\n  {' ' * at}^")
            terms.append(tuple(dims))
            begin += len(term) + 1
        return tuple(terms)

    return Template(text, side(left, 0), side(right, len(left) + 2) or ((),))


# --- choices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OneAxis:
    """A choice on one axis: a factor, a linear group with its op, or neither."""

    factor: str | None = None
    linear: tuple[tuple[int, ...], str] | None = None


def _on_one_axis(r: Rule) -> list[_OneAxis]:
    found = [_OneAxis()]
    found += [_OneAxis(factor=f) for f in r.shardable()]
    found += [_OneAxis(linear=(g.operands, op)) for g in r.linear for op in g.ops]
    return found


def _placement(dims: Dims, pick: _OneAxis, operand: int | None, r: Rule) -> Any:
    """The placement of an operand (its index) or a result (None) under a one-axis pick; None if impossible."""
    if pick.factor is not None:
        for i, dim in enumerate(dims):
            if dim and dim[0] == pick.factor:
                return Shard(i)
        if operand is not None:
            return Replicate()
        op = r.reduce.get(pick.factor, "sum")
        return Replicate() if op == "none" else Partial(op)
    if pick.linear is not None:
        group, op = pick.linear
        return Partial(op) if operand is None or operand in group else Replicate()
    return Replicate()


_spec = functools.lru_cache(maxsize=65536)(Spec)


def choices(
    r: Rule, mesh: Mesh, uneven: Collection[tuple[int, int]] = (), partial_ops: Collection[str] = ("sum",)
) -> tuple[Choice, ...]:
    """Every choice of a node with rule ``r`` on ``mesh``.

    A factor of size ``n`` is cut into ``p`` pieces only where ``p`` divides ``n`` or ``(n, p)`` is in ``uneven``
    (sizes that the user's own placements cut unevenly); so are all the sizes of a window.  Partials other than those of
    ``partial_ops`` are not passed through.
    """
    if r.ways:
        return _from_ways(r, mesh, uneven)
    options = [o for o in _on_one_axis(r) if o.linear is None or o.linear[1] in partial_ops]
    composite = r.composite()

    def divides(factor: str, axes: Sequence[str]) -> bool:
        parts = math.prod(mesh[a] for a in axes)
        rough = [n for n in r.extents(factor) if n % parts]
        fits = factor not in composite and factor not in r.even
        return not rough or (fits and all((n, parts) in uneven for n in rough))

    per_axis = [[o for o in options if mesh[a] > 1 or o == _OneAxis()] for a in mesh.axes]
    terms = [*((d, i) for i, d in enumerate(r.operands)), *((d, None) for d in r.results)]
    placed = {o: tuple(_placement(d, o, i, r) for d, i in terms) for o in options}
    found: dict[tuple[Any, ...], Choice] = {}
    for combo in itertools.product(*per_axis):
        sharers: dict[str, list[str]] = {}
        for axis, pick in zip(mesh.axes, combo, strict=True):
            if pick.factor is not None:
                sharers.setdefault(pick.factor, []).append(axis)
        if not all(divides(f, axes) for f, axes in sharers.items()):
            continue
        placements = list(zip(*(placed[pick] for pick in combo), strict=True))
        if any(len({p.reduce_op for p in t if type(p) is Partial}) > 1 for t in placements):
            continue  # which reduction comes first would matter
        for orders in itertools.product(*(itertools.permutations(a) for a in sharers.values())):
            shared = {f: o for f, o in zip(sharers, orders, strict=True) if len(o) > 1}
            specs = tuple(
                _spec(mesh.axes, p, tuple(shared[d[0]] for d in dims_ if d and d[0] in shared) if shared else ())
                for (dims_, _), p in zip(terms, placements, strict=True)
            )
            n = len(r.operands)
            if specs not in found:
                found[specs] = Choice(specs[:n], specs[n:], tuple(zip(sharers, orders, strict=True)))
    return tuple(found.values())


def _from_ways(r: Rule, mesh: Mesh, uneven: Collection[tuple[int, int]]) -> tuple[Choice, ...]:
    """The choices of a rule that lists its ways; each dim has a letter of its own."""
    n = len(r.operands)
    terms = (*r.operands, *r.results)
    whole = Way((Replicate(),) * n, (Replicate(),) * len(r.results))
    per_axis = [(whole, *r.ways) if mesh[a] > 1 else (whole,) for a in mesh.axes]
    found: dict[tuple[Spec, ...], Choice] = {}
    for combo in itertools.product(*per_axis):
        placements = list(zip(*((*w.operands, *w.results) for w in combo), strict=True))
        shared = any(len(cut := [p for p in t if type(p) is Shard]) > len(set(cut)) for t in placements)
        for order in itertools.permutations(mesh.axes) if shared else (mesh.axes,):
            specs = tuple(_spec(mesh.axes, p, _nesting(mesh.axes, p, order)) for p in placements)
            fits = specs not in found
            for dims_, spec in zip(terms, specs, strict=True):
                for (f,), axes in ((dims_[d], axes) for d, axes in spec.sharding.items()):
                    size, parts = r.sizes[f], math.prod(mesh[a] for a in axes)
                    fits &= size % parts == 0 or (f not in r.even and (size, parts) in uneven)
            if fits:
                found[specs] = Choice(specs[:n], specs[n:])
    return tuple(found.values())


def _nesting(axes: Sequence[str], placements: Sequence[Placement], order: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The axes that share a dim, nested in ``order``."""
    dims_ = {a: p.dim for a, p in zip(axes, placements, strict=True) if type(p) is Shard}
    groups = [tuple(a for a in order if dims_.get(a) == d) for d in sorted(set(dims_.values()))]
    return tuple(g for g in groups if len(g) > 1)
