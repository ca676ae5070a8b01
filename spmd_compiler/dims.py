"""Dynamic dims: sizes that a program leaves open, and what it asks of them.

A size may also be decided by the program's own data: how many elements a mask selects.  It is a dim all the same,
``u0``, ``u1``..., whose size is known when the node that makes it has run (`ir.size_op`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from .placements import SpmdError
from .symbolic import IntExpr, dim, is_data_size, sized
from .words import listed, shown

LEAST = 2  # sizes 0 and 1 are other programs: 1 is broadcast


@dataclass(frozen=True)
class Dim:
    """A size that is open between ``low`` and ``high`` (None: no limit); ``hint`` is that of the example."""

    name: str
    hint: int
    low: int = LEAST
    high: int | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.hint} in {self.low}..{'' if self.high is None else self.high}"


@dataclass(frozen=True)
class Guard:
    """What sizes must satisfy, and why."""

    condition: Any
    reason: str

    @property
    def words(self) -> str:
        c = self.condition
        if isinstance(c, sympy.Eq) and isinstance(c.args[0], sympy.Mod) and c.args[1] == 0:
            return f"{c.args[0].args[0]} must be divisible by {c.args[0].args[1]}"
        if isinstance(c, sympy.Ne):
            return f"{c.args[0]} must not be {c.args[1]}"
        if isinstance(c, sympy.Eq):
            return f"{c.args[0]} must be {c.args[1]}"
        return f"{c} must hold"


@dataclass(frozen=True)
class Dims:
    """The dynamic dims of a program, and its guards."""

    dims: tuple[Dim, ...]
    guards: tuple[Guard, ...] = ()

    @property
    def hints(self) -> dict[str, int]:
        return {d.name: d.hint for d in self.dims}

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise `SpmdError` where sizes are not those of all dims, out of bounds, or break a guard."""
        names = [d.name for d in self.dims]
        if sorted(sizes) != sorted(names):
            got = ", ".join(sizes) or "none"
            raise SpmdError(f"the program's dynamic dims are {', '.join(names)}; sizes are given of {got}")
        for d in self.dims:
            if not isinstance(sizes[d.name], int) or isinstance(sizes[d.name], bool):
                raise SpmdError(f"{d.name} is a size, not {shown(sizes[d.name])}")
            if not d.low <= sizes[d.name] <= (d.high if d.high is not None else sizes[d.name]):
                raise SpmdError(f"{d.name} is {sizes[d.name]}; the program was planned for {d}")
        for g in self.guards:
            if sized(g.condition, sizes) is not True:
                at = ", ".join(f"{s} is {sizes[s]}" for s in sorted(s.name for s in g.condition.free_symbols))
                raise SpmdError(f"{at}, and {g.words}: {g.reason}; pad it, or export the program at such a size")

    def imply(self, condition: Any) -> bool:
        """Whether the bounds alone say so of a comparison that is linear in dims (False where that isn't known)."""
        if not isinstance(condition, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt, sympy.Ne)):
            return condition == sympy.true
        given = {d.name: d for d in self.dims}
        rest, ends = sympy.expand(condition.args[0] - condition.args[1]), [sympy.Integer(0)] * 2
        for term, factor in rest.as_coefficients_dict().items():
            if term == 1:
                bounds = [1, 1]
            elif term.is_Symbol and term.name in given:
                d = given[term.name]
                bounds = [d.low, sympy.oo if d.high is None else d.high]
            else:
                return False
            low, high = sorted(factor * b for b in bounds)
            ends = [ends[0] + low, ends[1] + high]
        least, most = ends
        if isinstance(condition, sympy.Ne):
            return bool(least > 0 or most < 0)
        return all(condition.func(end, 0) == sympy.true for end in ends)

    def allow(self, sizes: Mapping[str, int]) -> bool:
        try:
            self.check(sizes)
        except SpmdError:
            return False
        return True

    def solve(self, shapes: Iterable[tuple[str, Sequence[IntExpr], Sequence[int]]]) -> dict[str, int]:
        """The sizes of dims, from ``(input, its shape in dims, its shape)``.

        Raises `SpmdError` where shapes do not agree on them.
        """
        sizes: dict[str, int] = {}
        said: dict[str, str] = {}
        for name, wanted, got in shapes:
            if len(wanted) != len(got):
                raise SpmdError(f"input {name!r} has {len(got)} dims; the program was planned for {_shape(wanted)}")
            for i, (w, n) in enumerate(zip(wanted, got, strict=True)):
                if isinstance(w, int):
                    if w != n:
                        planned = f"the program was planned for {_shape(wanted)}"
                        raise SpmdError(f"input {name!r} is {_shape(got)}; {planned}")
                    continue
                (symbol,) = w.free_symbols
                factor = w.coeff(symbol)
                size = (n - w.xreplace({symbol: sympy.Integer(0)})) / factor
                here = f"dim {i} of input {name!r} ({n})"
                if not size.is_Integer:
                    raise SpmdError(f"{here} is not {w} for any {symbol}")
                if sizes.setdefault(symbol.name, int(size)) != int(size):
                    raise SpmdError(f"{here} makes {symbol} {size}, {said[symbol.name]} makes it {sizes[symbol.name]}")
                said.setdefault(symbol.name, here)
        return sizes


def _shape(sizes: Sequence[Any]) -> str:
    return f"({', '.join(map(str, sizes))})"


# --- what the user writes -----------------------------------------------------------------------------------------


def dynamic_sizes(given: Any, arguments: Mapping[str, Any], variadic: str | None) -> dict[str, dict[int, Any]]:
    """By the name of an input, which of its dims are dynamic: ``{"x": {0: Dim("batch")}}``.

    ``given`` is as `torch.export` takes it: a mapping from names of ``arguments``, or a sequence in their order, of
    trees like the arguments'; a tensor has ``{dim: Dim}``, a sequence with an entry for each dim, or None.  The
    arguments ``variadic`` (``**kwargs``) go by their own names.  Raises `SpmdError` for what does not fit.
    """
    found: dict[str, dict[int, Any]] = {}

    def walk(name: str, value: Any, spec: Any) -> None:
        if spec is None:
            return
        if isinstance(value, torch.Tensor):
            found[name] = _of_tensor(name, value, spec)
            return
        children, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
        if not children or not isinstance(spec, (Mapping, Sequence)):
            raise SpmdError(f"dynamic_shapes: {name!r} is {type(value).__name__}, which has no dims {shown(spec)}")
        inside = {getattr(p[0], "key", getattr(p[0], "idx", getattr(p[0], "name", i))): v
                  for i, (p, v) in enumerate(children)}  # fmt: skip
        for key, s in _entries(name, spec, list(inside)):
            walk(str(key) if name == variadic else f"{name}.{key}", inside[key], s)

    if isinstance(given, Mapping) and variadic is not None:
        inner = arguments.get(variadic, {})
        apart = {k: v for k, v in given.items() if k in inner}
        given = {k: v for k, v in given.items() if k not in apart} | ({variadic: apart} if apart else {})
    for key, spec in _entries("the program", given, list(arguments)):
        walk(key, arguments[key], spec)
    return {name: dims for name, dims in found.items() if dims}


def _entries(name: str, spec: Any, keys: Sequence[Any]) -> list[tuple[Any, Any]]:
    if not isinstance(spec, (Mapping, Sequence)) or isinstance(spec, str):
        raise SpmdError(f"dynamic_shapes: {name} takes a mapping or a sequence, not {shown(spec)}")
    if not isinstance(spec, Mapping):
        if len(spec) > len(keys):
            has = ", ".join(map(str, keys))
            raise SpmdError(f"dynamic_shapes: {name} has {len(keys)} entries ({has}), not {len(spec)}")
        return list(zip(keys, spec, strict=False))
    for key in spec:
        if key not in keys:
            raise SpmdError(f"dynamic_shapes: {name} has no {shown(key)}; it has {listed(keys)}")
    return list(spec.items())


def _of_tensor(name: str, value: torch.Tensor, spec: Any) -> dict[int, Any]:
    if not isinstance(spec, (Mapping, tuple, list)):
        raise SpmdError(f"dynamic_shapes: {name!r} takes {{dim: torch.export.Dim(...)}}, not {shown(spec)}")
    found = {}
    for i, d in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        if not isinstance(i, int) or not -value.dim() <= i < value.dim():
            raise SpmdError(f"dynamic_shapes: {name!r} {tuple(value.shape)} has no dim {shown(i)}")
        i %= value.dim()
        if isinstance(d, type(torch.export.Dim.AUTO)):
            fresh = torch.export.Dim(f"{name.replace('.', '_')}_{i}", min=d.min, max=d.max)
            d = None if d.type == torch.export.Dim.STATIC.type else fresh
        if isinstance(d, torch.export.Dim):
            found[i] = d
        elif d is not None and (not isinstance(d, int) or d != value.shape[i]):
            where = f"dim {i} of {name!r} ({value.shape[i]})"
            raise SpmdError(f"dynamic_shapes: {where} is {shown(d)}, not a torch.export.Dim")
    return found


def named_dims(
    given: Mapping[str, Mapping[int, Any]], shapes: Mapping[str, Sequence[int]]
) -> tuple[Dims, dict[str, tuple[IntExpr, ...]]]:
    """The dims that a user's mean, with hints from the ``shapes`` of inputs, and those shapes in dims."""
    symbolic: dict[str, tuple[IntExpr, ...]] = {}
    roots: dict[str, Any] = {}
    for name, dims in given.items():
        shape: list[Any] = list(shapes[name])
        for i, d in dims.items():
            root = d
            while hasattr(root, "root"):  # a derived dim: 2 * batch + 1
                root = root.root
            if root.__name__.startswith("c_"):
                raise SpmdError(f"dynamic dim {root.__name__!r}: names that begin with 'c_' are those of coordinates")
            if is_data_size(root.__name__):
                raise SpmdError(f"dynamic dim {root.__name__!r}: such names are those of sizes that data decide")
            known = roots.setdefault(root.__name__, root)
            if (known.min, known.max) != (root.min, root.max):
                raise SpmdError(f"dynamic dim {root.__name__!r} is given twice, with different bounds")
            shape[i] = _expression(d)
        symbolic[name] = tuple(shape)
    unbound = [Dim(n, 0) for n in roots]
    hints = Dims(tuple(unbound)).solve((n, s, shapes[n]) for n, s in symbolic.items())
    made = []
    for name, root in roots.items():
        high = int(root.max) if sympy.sympify(root.max).is_Integer else None
        d = Dim(name, hints[name], max(LEAST, int(root.min)), high)
        Dims((d,)).check({name: d.hint})
        made.append(d)
    return Dims(tuple(made)), symbolic


def _expression(d: Any) -> Any:
    return d.fn(_expression(d.root)) if hasattr(d, "root") else dim(d.__name__)
