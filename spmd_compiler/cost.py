"""Prices, in seconds: a roofline for local compute and alpha + bytes / bandwidth for a collective.

Profiles are plain data.  Rates are of one device: matmul rates in flop/s and memory rates in bytes/s by element size.

``node_size`` devices of a node share the fast link, ``intra``.  Ranks count along the innermost axis first, so that
``k = node_size // (devices inside it)`` devices of an axis of ``n``, at least 1 and at most ``n``, are in one node.  A
ring (or tree) over all ``n`` passes through each node once and leaves it over the ``k`` network cards of its members:

    seconds = intra.alpha sqrt(steps of k) + inter.alpha sqrt(steps of n / k) + wire bytes / min(intra, k inter)

which is ``intra`` alone for ``k = n`` and ``inter`` alone for ``k = 1`` (NCCL's bus bandwidth,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).  In an exchange each device sends ``n - k`` of its
``n - 1`` messages over its own card.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch.fx import Node

from .collectives import KINDS, axes_of, is_collective, message_bytes, wire_bytes
from .placements import Mesh, SpmdError
from .words import meant, shown

Rates = float | Mapping[int, float]


def _check(name: str, value: Any, zero: bool = False) -> None:
    """Raise `SpmdError` for what is no number above 0 (or, with ``zero``, no finite one of at least 0)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 <= value < math.inf if zero else value > 0):
        raise SpmdError(f"{name} = {shown(value)}: a number {'of at least 0' if zero else 'above 0'} is wanted")


def _mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise SpmdError(f"{name} maps {what}, {shown(value)} does not")
    return value


def _check_link(name: str, value: Any) -> None:
    if not isinstance(value, Link):
        raise SpmdError(f"{name} is a Link(alpha, bandwidth), not {shown(value)}")


@dataclass(frozen=True)
class Link:
    """``alpha`` seconds a message step, ``bandwidth`` bytes/s a device; ``kinds``: those of one kind of collective."""

    alpha: float
    bandwidth: float
    kinds: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("alpha (seconds)", self.alpha, zero=True)
        _check("bandwidth (bytes/s)", self.bandwidth)
        known = tuple(dict.fromkeys(KINDS.values()))
        for kind, link in _mapping("kinds", self.kinds, "collectives to links").items():
            if kind not in known:
                raise SpmdError(f"kinds: there is no collective {shown(kind)}; {meant(kind, known)}")
            _check_link(f"kinds[{kind!r}]", link)

    def of(self, kind: str) -> Link:
        return self.kinds.get(kind, self)


@dataclass(frozen=True)
class Profile:
    """What a device and its links can do.

    ``order`` names axes from outermost to innermost where that is not the mesh's order; axes that it leaves out lie
    outside them.  ``axis_links`` gives a named axis a link of its own, whatever nodes hold.
    """

    name: str
    matmul: Mapping[int, float]  # flop/s by bytes per element
    memory: Rates  # bytes/s, of every dtype or by bytes per element
    launch: float  # seconds per kernel
    intra: Link
    inter: Link
    node_size: int = 8
    order: tuple[str, ...] = ()
    axis_links: Mapping[str, Link] = field(default_factory=dict)
    repeats_work: bool = True  # False: matmul work is never done twice, whatever it would save on the wire
    buckets: bool = False  # small collectives of one axis are joined where that costs less (`passes.bucket`)
    overlap: bool = False  # gathers of weights and reductions of gradients run beside computation (`hidden`)
    fuses: bool = True  # False: every operator starts a kernel of its own, not only products (``lower="eager"``)

    def __post_init__(self) -> None:
        """Raises `SpmdError` for what is no rate, time or flag."""
        for name, rates in (("matmul", self.matmul), ("memory", self.memory)):
            if name == "memory" and not isinstance(rates, Mapping):
                _check("memory (bytes/s)", rates)
            elif not isinstance(rates, Mapping) or not rates:
                raise SpmdError(f"{name} has rates by bytes of an element: {{2: 6e14, 4: 3e14}}, not {shown(rates)}")
            else:
                for size, rate in rates.items():
                    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                        raise SpmdError(f"{name} has rates by bytes of an element, 1 or more, not by {shown(size)}")
                    _check(f"{name}[{size}]", rate)
        _check("launch (seconds)", self.launch, zero=True)
        if not isinstance(self.node_size, int) or isinstance(self.node_size, bool) or self.node_size < 1:
            raise SpmdError(f"node_size = {shown(self.node_size)}: a number of devices, 1 or more")
        for which in ("intra", "inter"):
            _check_link(which, getattr(self, which))
        for axis, link in _mapping("axis_links", self.axis_links, "axes to links").items():
            _check_link(f"axis_links[{axis!r}]", link)
        order = self.order
        if not isinstance(order, (tuple, list)) or not all(isinstance(a, str) for a in order):
            raise SpmdError(f"order is a list of axes from outermost to innermost, not {shown(order)}")
        if len(set(order)) < len(order):
            raise SpmdError(f"order names an axis twice: {shown(order)}")
        if not isinstance(self.name, str):
            raise SpmdError(f"name is a text, not {shown(self.name)}")
        for flag in ("buckets", "fuses", "overlap", "repeats_work"):
            if not isinstance(getattr(self, flag), bool):
                raise SpmdError(f"{flag} is true or false, not {shown(getattr(self, flag))}")

    def __hash__(self) -> int:
        return hash(self.name)

    def on(self, mesh: Mesh) -> Profile:
        """Itself.  Raises `SpmdError` where ``order`` or ``axis_links`` names an axis that ``mesh`` lacks."""
        for field_name, axes in (("order", self.order), ("axis_links", self.axis_links)):
            for axis in axes:
                try:
                    mesh[axis]
                except SpmdError as error:
                    raise SpmdError(f"{field_name} of profile {self.name!r}: {error}") from None
        return self

    def in_node(self, mesh: Mesh, axis: str) -> int:
        """How many devices of an axis a node holds."""
        order = [a for a in mesh.axes if a not in self.order] + [a for a in self.order if a in mesh.axes]
        inside = math.prod(mesh[a] for a in order[order.index(axis) + 1 :])
        return max(1, min(mesh[axis], self.node_size // inside))

    def collective(self, mesh: Mesh, kind: str, axes: tuple[str, ...], result_bytes: float) -> float:
        """Seconds of a collective over ``axes`` whose result on one device has ``result_bytes``: at the pace of the
        slowest axis where messages travel along several."""
        parts = math.prod(mesh[a] for a in axes)
        if parts == 1:
            return 0.0
        wire = wire_bytes(kind, result_bytes, parts)
        return max(self._along(mesh, kind, axis, wire) for axis in axes if mesh[axis] > 1)

    def _along(self, mesh: Mesh, kind: str, axis: str, wire: float) -> float:
        n = mesh[axis]
        given = self.axis_links.get(axis)
        k = n if given is not None else self.in_node(mesh, axis)
        near, far = (given or self.intra).of(kind), self.inter.of(kind)
        if k == n:
            return near.alpha * math.sqrt(_steps(kind, n)) + wire / near.bandwidth
        if kind == "permute":
            return far.alpha + wire / far.bandwidth
        if kind == "all_to_all":
            out, inside = wire * (n - k) / (n - 1), wire * (k - 1) / (n - 1)
            return far.alpha + max(out / far.bandwidth, inside / near.bandwidth)
        start = near.alpha * math.sqrt(_steps(kind, k)) + far.alpha * math.sqrt(_steps(kind, -(-n // k)))
        return start + wire / min(near.bandwidth, (n % k or k) * far.bandwidth)

    def collectives(self, mesh: Mesh, nodes: Iterable[Node], starts: bool = False) -> float:
        """Seconds of those of the nodes that are collectives, or what of it they take to start."""
        return sum(
            self.collective(mesh, KINDS[n.target], axes_of(n), 0.0 if starts else message_bytes(n))
            for n in nodes if is_collective(n)
        )  # fmt: skip

    def compute(self, flops: float, nbytes: float, element: int) -> float:
        """Seconds of one local kernel: the slower of its matmul flops and its memory traffic, plus the launch."""
        return max(flops / _rate(self.matmul, element), nbytes / _rate(self.memory, element)) + self.launch

    def operator(self, flops: float, nbytes: float, element: int) -> float:
        """Seconds of an operator: one without matmul flops is a part of another kernel, unless nothing ``fuses``."""
        return self.compute(flops, nbytes, element) - (0.0 if flops or not self.fuses else self.launch)


def _steps(kind: str, n: int) -> int:
    return {"all_reduce": 2 * (n - 1), "permute": 1, "all_to_all": 1}.get(kind, n - 1)


def _rate(rates: Rates, element: int) -> float:
    """That of the element size, or of the size nearest to it."""
    if not isinstance(rates, Mapping):
        return rates
    return rates.get(element) or rates[min(rates, key=lambda k: abs(k - element))]


_NVLINK = Link(4e-6, 370e9)
PROFILES = {
    "h100": Profile("h100", {2: 660e12, 4: 330e12, 8: 50e12}, 2.8e12, 1.5e-6, _NVLINK, Link(9e-6, 42e9)),
    "a100": Profile("a100", {2: 240e12, 4: 120e12, 8: 15e12}, 1.6e12, 2e-6, Link(4e-6, 230e9), Link(9e-6, 20e9)),
    "b200": Profile("b200", {2: 1600e12, 4: 800e12, 8: 30e12}, 6.5e12, 1.5e-6, Link(4e-6, 740e9), Link(9e-6, 42e9)),
    "cpu": Profile("cpu", {2: 20e9, 4: 60e9, 8: 30e9}, 8e9, 2e-6, Link(5e-5, 1e9), Link(5e-5, 1e9)),
    # wire bytes alone: a second is a byte.  Matmul work is free but never repeated, memory traffic is nearly free,
    # and alpha only breaks ties between plans of equal bytes toward fewer collectives.
    "bytes": Profile("bytes", {4: math.inf}, 1e6, 0.0, Link(1.0, 1.0), Link(1.0, 1.0), repeats_work=False),
}


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML file's tables.  Raises `SpmdError` where it can't be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SpmdError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no text at all
        raise SpmdError(f"{path}: {error}") from None


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """A profile from a TOML file: its fields, links as tables of ``alpha`` and ``bandwidth``, and in a link, by the
    name of a collective, what that has of its own.

    What it leaves out is that of the profile named by ``base`` (``h100`` if it names none).
    """
    given = read_toml(path)
    known = sorted({"base", *(f.name for f in fields(Profile))})
    for key in given:
        if key not in known:
            raise SpmdError(f"{path}: a profile has no {key}; {meant(key, known)}")
    try:
        base = profile_of(given.pop("base", "h100"))
        return dataclasses.replace(base, **{"name": os.fspath(path), **profile_fields(given)})
    except SpmdError as error:
        raise SpmdError(f"{path}: {error}") from None


def profile_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a profile from plain data: links from mappings, rates by number.  Raises `SpmdError` for others."""
    made = dict(given)
    for key in made.keys() & {"intra", "inter"}:
        made[key] = _link(made[key])
    if "axis_links" in made:
        tables = _mapping("axis_links", made["axis_links"], "axes to links")
        made["axis_links"] = {axis: _link(table) for axis, table in tables.items()}
    for key in made.keys() & {"matmul", "memory"}:
        made[key] = _rates(key, made[key])
    if "order" in made:
        made["order"] = tuple(made["order"]) if isinstance(made["order"], list) else made["order"]
    return made


def _link(table: Any) -> Link:
    names = dict.fromkeys(KINDS.values())
    try:
        kinds = {k: _link(v) for k, v in (table.get("kinds") or table).items() if k in names}
        known = ("alpha", "bandwidth", *names)
        for key in table:
            if key not in (*known, "kinds"):
                raise SpmdError(f"a link has no {key}; {meant(key, known)}")
        return Link(float(table["alpha"]), float(table["bandwidth"]), kinds)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        if isinstance(error, SpmdError):
            raise
        raise SpmdError("a link is {alpha = seconds, bandwidth = bytes per second}") from None


def _rates(name: str, given: Any) -> Rates:
    try:
        if isinstance(given, Mapping):
            return {int(size): float(rate) for size, rate in given.items()}
        if name == "memory":
            return float(given)
    except (TypeError, ValueError):
        pass
    raise SpmdError(f"{name} has rates by bytes of an element, such as {{2 = 6e14, 4 = 3e14}}, not {shown(given)}")


def profile_of(profile: str | os.PathLike[str] | Profile | None) -> Profile:
    """The profile named or given, that of a TOML file, or (None) that of the device at hand."""
    if isinstance(profile, Profile):
        return profile
    if profile is None:
        import torch

        name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
        return next((p for key, p in PROFILES.items() if key in name), PROFILES["h100"])
    if isinstance(profile, os.PathLike) or (isinstance(profile, str) and profile.endswith(".toml")):
        return read_profile(profile)
    if not isinstance(profile, str):
        raise SpmdError(f"a profile is a name, a TOML file or a Profile, not {shown(profile)}")
    if profile not in PROFILES:
        names = f"{', '.join(PROFILES)}, a file whose name ends in .toml, or a Profile"
        near = f"did you mean {profile.lower()!r}? there" if profile.lower() in PROFILES else "there"
        raise SpmdError(f"unknown profile {profile!r}; {near} are {names}")
    return PROFILES[profile]
