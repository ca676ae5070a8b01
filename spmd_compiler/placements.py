"""`Mesh` and `Spec`: a named grid of devices, and where one value lives on it."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .symbolic import IntExpr, length, offset
from .words import shown

REDUCE_OPS = ("sum", "max", "min", "product")


class SpmdError(ValueError):
    """Bad input: names the node, the source line, the placements and the remedy."""


def depends_on_data(where: str, what: str) -> SpmdError:
    """The error of an op that gives a number, or a shape that no size names, known only when it has run."""
    return SpmdError(
        f"{where}: {what} gives a shape or a number that depends on data, which a program planned ahead can't have; "
        "keep it a tensor, mask instead (torch.where, masked_fill, a weight of 0), or compute it outside the compiled "
        "function"
    )


@dataclass(frozen=True)
class Mesh:
    """A named grid of devices that needs no process group.

    ``Mesh({"dp": 2, "tp": 4})``.  Ranks are numbered in row-major order (the last axis varies fastest).
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | Sequence[tuple[str, int]]) -> None:
        if not isinstance(sizes, (Mapping, Sequence)):
            raise SpmdError(f"a mesh is made of {{axis: size}}, not of {shown(sizes)}")
        items = list(sizes.items() if isinstance(sizes, Mapping) else sizes)
        if not all(isinstance(item, tuple) and len(item) == 2 for item in items):
            raise SpmdError(f"a mesh is made of {{axis: size}}, or of pairs (axis, size), not of {shown(sizes)}")
        if not items:
            raise SpmdError("a mesh needs at least one axis")
        for name, size in items:
            if not isinstance(name, str) or not name.isidentifier():
                raise SpmdError(f"mesh axis name {shown(name)} is not an identifier")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SpmdError(f"mesh axis {name!r} has size {shown(size)}; a positive integer is needed")
        if len({n for n, _ in items}) != len(items):
            raise SpmdError(f"mesh axis names repeat: {[n for n, _ in items]}")
        object.__setattr__(self, "axes", tuple(n for n, _ in items))
        object.__setattr__(self, "shape", tuple(s for _, s in items))

    @staticmethod
    def of(mesh: Any) -> Mesh:
        """``mesh`` itself, a dict, or the abstract form of a torch ``DeviceMesh`` (axes named ``d0``... if unnamed)."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return Mesh(mesh)
        if not hasattr(mesh, "mesh_dim_names"):
            raise SpmdError(f"expected a Mesh, a dict of axis sizes or a DeviceMesh, got {type(mesh).__name__}")
        shape = mesh.shape
        names = mesh.mesh_dim_names or tuple(f"d{i}" for i in range(len(shape)))
        return Mesh(list(zip(names, map(int, shape), strict=True)))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, axis: str) -> int:
        try:
            return self.shape[self.axes.index(axis)]
        except ValueError:
            raise SpmdError(f"{self} has no axis {shown(axis)}; its axes are {', '.join(self.axes)}") from None

    def coordinates(self) -> Iterator[dict[str, int]]:
        """The coordinates of every rank, in rank order."""
        for place in itertools.product(*(range(s) for s in self.shape)):
            yield dict(zip(self.axes, place, strict=True))

    def __repr__(self) -> str:
        return "mesh(" + ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.shape, strict=True)) + ")"


_SPELLINGS = {
    r"r(?:epl\w*)?(?:\(\))?": "R",
    r"s(?:hard)?\(?(?:dim=)?(-?\d+)\)?": "S({})",
    r"p(?:artial)?\(?(sum|max|min|product)\)?": "P({})",
}


def _spelling(text: str) -> str:
    """What a text that is no placement seems to mean, as the end of an error."""
    plain = re.sub(r"[\s'\"]", "", text).lower()
    for pattern, spelled in _SPELLINGS.items():
        if match := re.fullmatch(pattern, plain):
            return f"; did you mean {spelled.format(*match.groups())!r}?"
    return '; did you mean "auto"?' if difflib.get_close_matches(plain, ["auto"], cutoff=0.7) else ""


def parse_placement(text: str) -> Placement:
    """The placement that prints as ``S(0)``, ``R`` or ``P(sum)``."""
    if text == "auto":
        raise SpmdError(
            "\"auto\" is no placement on one axis: a value is the solver's on all axes ({name: \"auto\"} in `export`) "
            "or on none"
        )
    match = re.fullmatch(r"(R)|S\((-?\d+)\)|P\((\w+)\)", text.strip())
    if match is None:
        raise SpmdError(f"{shown(text)} is not 'R', 'S(dim)' or 'P(op)'{_spelling(text)}")
    replicate, dim, op = match.groups()
    return Replicate() if replicate else Shard(int(dim)) if dim is not None else Partial(op)


def placement_text(p: Placement) -> str:
    if isinstance(p, Shard):
        return f"S({p.dim})"
    if isinstance(p, Partial):
        return f"P({p.reduce_op})"
    return "R"


def no_placement(given: Any) -> SpmdError:
    """The error of what is neither placements nor a text of some."""
    return SpmdError(f"{shown(given)} is no placement; give {{axis: Shard(0)}}, or a placement for each axis")


def is_auto(placements: Any, mesh: Mesh) -> bool:
    """Whether a value's placements are ``"auto"``, or say so of every axis."""
    if isinstance(placements, Mapping):
        parts = [placements.get(a) for a in mesh.axes] if len(placements) == len(mesh.axes) else [None]
    elif isinstance(placements, (list, tuple)):
        parts = list(placements) if len(placements) == len(mesh.axes) else [None]
    else:
        parts = [placements]
    return all(isinstance(p, str) and p == "auto" for p in parts)


def _parsed(text: str, mesh: Mesh) -> Spec | Placement:
    """A spec on ``mesh``, Replicate on axes that its text leaves out, or one placement."""
    if text == "auto":
        raise SpmdError('"auto" is for `export`; parallelize(model, mesh, program) takes what that chose')
    if not text.strip().startswith("{"):
        return parse_placement(text)
    spec = Spec.parse(text)
    for axis in spec.axes:
        mesh[axis]
    known = dict(zip(spec.axes, spec.placements, strict=True))
    return Spec(mesh.axes, tuple(known.get(a, Replicate()) for a in mesh.axes), spec.nesting)


@dataclass(frozen=True)
class Spec:
    """One placement for each mesh axis, of one value, and the nesting of axes that share a dim.

    ``placements[i]`` is the placement on ``axes[i]`` (``Shard(dim)`` with ``dim >= 0``, ``Replicate()`` or
    ``Partial(op)``).  ``nesting`` holds, for each dim sharded on two axes or more, those axes outermost first;
    left out, the order is the mesh's (the first axis is outermost, as in DTensor).  Two specs are equal when
    they place every element alike.
    """

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    nesting: tuple[tuple[str, ...], ...] = ()
    sharding: dict[int, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    _partial: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.axes) is not tuple or type(self.placements) is not tuple:
            got = f"{shown(self.axes)} and {shown(self.placements)}"
            raise SpmdError(f"a Spec has tuples of axes and placements, not {got}")
        if len(self.axes) != len(self.placements):
            raise SpmdError(f"{len(self.placements)} placements for {len(self.axes)} mesh axes {self.axes}")
        # torch's placements have a slow metaclass: the kinds are told apart by type, and once for each spec
        shared: dict[int, list[str]] = {}
        partial = []
        for axis, p in zip(self.axes, self.placements, strict=True):
            if type(p) is Shard:
                if p.dim < 0:
                    raise SpmdError(f"Shard({p.dim}) on axis {axis!r}: a spec's dims are counted from 0")
                shared.setdefault(p.dim, []).append(axis)
            elif type(p) is Partial:
                partial.append(axis)
                if p.reduce_op not in REDUCE_OPS:
                    raise SpmdError(f"Partial({p.reduce_op}) on axis {axis!r}: use one of {', '.join(REDUCE_OPS)}")
            elif type(p) is not Replicate:
                raise SpmdError(f"{shown(p)} on axis {axis!r} is not Shard(dim), Replicate() or Partial(op)")
        given = {frozenset(n): tuple(n) for n in self.nesting}
        sharding = {}
        for dim in sorted(shared):
            axes = tuple(shared[dim])
            sharding[dim] = given.pop(frozenset(axes), axes) if len(axes) > 1 else axes
        if given:
            raise SpmdError(f"nesting {tuple(given.values())} does not match the placements {self.placements}")
        object.__setattr__(self, "nesting", tuple(axes for axes in sharding.values() if len(axes) > 1))
        object.__setattr__(self, "sharding", sharding)
        object.__setattr__(self, "_partial", tuple(partial))
        object.__setattr__(self, "_hash", hash((self.axes, str(self.placements), self.nesting)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.axes, self.placements, self.nesting)  # a hash is good for one process only

    @staticmethod
    def replicate(mesh: Mesh) -> Spec:
        return Spec(mesh.axes, (Replicate(),) * len(mesh.axes))

    @staticmethod
    def of(mesh: Mesh, placements: Any, ndim: int) -> Spec:
        """The spec of ``{axis: placement}`` (axes not named are Replicate), of a sequence in axis order, of one
        placement on a mesh of one axis, of a Spec, or of the text of a placement or a spec (which may leave axes out).

        Where axes share a dim, a sequence nests as DTensor does (the first axis is outermost), a mapping the other
        way round (the last axis is outermost, so that FSDP over TP can gather ``dp`` alone).  Negative dims are
        normalised.  Raises `SpmdError` for an unknown axis, a dim out of range, or a wrong
        number of placements.
        """
        mesh = Mesh.of(mesh)
        if isinstance(placements, str):
            placements = _parsed(placements, mesh)
        if isinstance(placements, Spec):
            if placements.axes != mesh.axes:
                raise SpmdError(f"spec {placements} is for axes {placements.axes}, not for {mesh}")
            placements, nesting = placements.placements, placements.nesting
        else:
            nesting = ()
        reverse = False
        if isinstance(placements, Mapping):
            for axis in placements:
                mesh[axis]
            placements = [placements.get(a, Replicate()) for a in mesh.axes]
            reverse = True
        elif isinstance(placements, Placement):
            placements = [placements]
        elif not isinstance(placements, Sequence):
            raise no_placement(placements)
        placements = [parse_placement(p) if isinstance(p, str) else p for p in placements]
        if len(placements) != len(mesh.axes):
            named = f"{{{mesh.axes[0]!r}: {shown(placements[0] if placements else Shard(0))}}}"
            raise SpmdError(
                f"{len(placements)} placements {shown(placements)} for the {len(mesh.axes)} axes of {mesh}; give one "
                f"for each axis, or name the axes: {named}"
            )
        for i, p in enumerate(placements):
            if isinstance(p, Shard):
                if not isinstance(p.dim, int):
                    raise SpmdError(f"Shard({shown(p.dim)}) on axis {mesh.axes[i]!r}: a dim is an integer")
                if not -ndim <= p.dim < ndim:
                    raise SpmdError(
                        f"Shard({p.dim}) on axis {mesh.axes[i]!r}: dim out of range for a tensor of {ndim} dims"
                    )
                placements[i] = Shard(p.dim % ndim)
        if reverse:
            nesting = tuple(n[::-1] for n in Spec(mesh.axes, tuple(placements)).nesting)
        return Spec(mesh.axes, tuple(placements), nesting)

    def __getitem__(self, axis: str) -> Placement:
        try:
            return self.placements[self.axes.index(axis)]
        except ValueError:
            raise SpmdError(f"{self} has no axis {shown(axis)}; its axes are {', '.join(self.axes)}") from None

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes on which ``dim`` is sharded, outermost first."""
        return self.sharding.get(dim, ())

    def partial_axes(self) -> tuple[str, ...]:
        return self._partial

    def is_replicated(self) -> bool:
        return not self.sharding and not self._partial

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[IntExpr, ...]:
        """The local sizes of a value of global ``shape``; symbolic where ranks differ."""
        local: list[IntExpr] = []
        for dim, n in enumerate(shape):
            size: IntExpr = int(n)
            for axis in self.axes_of(dim):
                size = length(size, mesh[axis], axis)
            local.append(size)
        return tuple(local)

    def local_offset(self, shape: Sequence[int], mesh: Mesh) -> tuple[IntExpr, ...]:
        """The global index of the local piece's first element, one per dim."""
        offsets: list[IntExpr] = []
        for dim, n in enumerate(shape):
            size, begin = int(n), 0
            for axis in self.axes_of(dim):
                begin = begin + offset(size, mesh[axis], axis)
                size = length(size, mesh[axis], axis)
            offsets.append(begin)
        return tuple(offsets)

    def is_even(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether every rank holds the same sizes."""
        return all(isinstance(n, int) for n in self.local_shape(shape, mesh))

    def shards(self, mesh: Mesh) -> int:
        """Into how many pieces the value is cut."""
        return math.prod(mesh[a] for axes in self.sharding.values() for a in axes)

    def __repr__(self) -> str:
        parts = []
        for axis, p in zip(self.axes, self.placements, strict=True):
            text = placement_text(p)
            if isinstance(p, Shard) and len(order := self.axes_of(p.dim)) > 1:
                text += "@" + "/".join(order)
            parts.append(f"{axis}: {text}")
        return "{" + ", ".join(parts) + "}"

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec that prints as ``text``."""
        if not isinstance(text, str):
            raise SpmdError(f"{shown(text)} is not a text such as '{{dp: S(0), tp: R}}'")
        body = text.strip()
        if not (body.startswith("{") and body.endswith("}")):
            raise SpmdError(f"{text!r} is not a spec such as {{dp: S(0), tp: R}}")
        axes, placements, nesting = [], [], set()
        for part in filter(None, (p.strip() for p in body[1:-1].split(","))):
            match = re.fullmatch(r"(\w+): ([^@]*)(?:(?<=\))@([\w/]+))?", part)
            if match is None:
                raise SpmdError(f"{part!r} in spec {text!r} is not 'axis: R', 'axis: S(dim)' or 'axis: P(op)'")
            axis, placement, order = match.groups()
            axes.append(axis)
            placements.append(parse_placement(placement))
            if order:
                nesting.add(tuple(order.split("/")))
        if len(set(axes)) < len(axes):
            raise SpmdError(f"spec {text!r} names an axis twice")
        return Spec(tuple(axes), tuple(placements), tuple(sorted(nesting)))
