"""Prices, in seconds: a roofline for local compute and alpha + bytes / bandwidth for a collective.

Profiles are plain data.  Rates are of one device: matmul rates in flop/s by element size, memory in bytes/s.
An axis of a mesh runs over the fast link when it and all axes inside it fit within ``node_size`` devices.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch.fx import Node

from .collectives import KINDS, axes_of, is_collective, message_bytes, wire_bytes
from .placements import Mesh, SpmdError


@dataclass(frozen=True)
class Link:
    """``alpha`` seconds a message step and ``bandwidth`` bytes/s a device."""

    alpha: float
    bandwidth: float


@dataclass(frozen=True)
class Profile:
    """What a device and its links can do.  ``axis_links`` overrides the link of a named axis."""

    name: str
    matmul: Mapping[int, float]  # flop/s by bytes per element
    memory: float  # bytes/s
    launch: float  # seconds per kernel
    intra: Link
    inter: Link
    node_size: int = 8
    axis_links: Mapping[str, Link] = field(default_factory=dict)
    repeats_work: bool = True  # False: matmul work is never done twice, whatever it would save on the wire

    def __hash__(self) -> int:
        return hash(self.name)

    def link(self, mesh: Mesh, axis: str) -> Link:
        if axis in self.axis_links:
            return self.axis_links[axis]
        inside = math.prod(mesh.shape[mesh.axes.index(axis) :])
        return self.intra if inside <= self.node_size else self.inter

    def collective(self, mesh: Mesh, kind: str, axes: tuple[str, ...], result_bytes: float) -> float:
        """Seconds of a collective over ``axes`` whose result on one device has ``result_bytes``."""
        parts = math.prod(mesh[a] for a in axes)
        if parts == 1:
            return 0.0
        links = [self.link(mesh, a) for a in axes]
        link = max(links, key=lambda k: (1 / k.bandwidth, k.alpha))
        steps = {"all_reduce": 2 * (parts - 1), "permute": 1, "all_to_all": 1}.get(kind, parts - 1)
        return link.alpha * math.sqrt(steps) + wire_bytes(kind, result_bytes, parts) / link.bandwidth

    def collectives(self, mesh: Mesh, nodes: Iterable[Node]) -> float:
        """Seconds of those of the nodes that are collectives."""
        return sum(
            self.collective(mesh, KINDS[n.target], axes_of(n), message_bytes(n)) for n in nodes if is_collective(n)
        )

    def compute(self, flops: float, nbytes: float, element: int) -> float:
        """Seconds of one local kernel: the slower of its matmul flops and its memory traffic, plus the launch."""
        rate = self.matmul.get(element) or self.matmul[min(self.matmul, key=lambda k: abs(k - element))]
        return max(flops / rate, nbytes / self.memory) + self.launch


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


def read_toml(path: str) -> dict[str, Any]:
    """A TOML file's tables.  Raises `SpmdError` where it can't be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SpmdError(f"{path}: {error}") from None


def read_profile(path: str) -> Profile:
    """A profile from a TOML file: its fields, links as tables of ``alpha`` and ``bandwidth``.

    What it leaves out is that of the profile named by ``base`` (``h100`` if it names none).
    """
    given = read_toml(path)
    base = profile_of(given.pop("base", "h100"))
    known = {f.name for f in fields(Profile)}
    if unknown := sorted(given.keys() - known):
        raise SpmdError(f"{path}: a profile has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")

    def link(table: Any) -> Link:
        try:
            return Link(float(table["alpha"]), float(table["bandwidth"]))
        except (TypeError, KeyError, ValueError):
            raise SpmdError(f"{path}: a link is {{alpha = seconds, bandwidth = bytes per second}}") from None

    for key in ("intra", "inter"):
        if key in given:
            given[key] = link(given[key])
    if "axis_links" in given:
        given["axis_links"] = {axis: link(table) for axis, table in given["axis_links"].items()}
    if "matmul" in given:
        given["matmul"] = {int(size): float(rate) for size, rate in given["matmul"].items()}
    return dataclasses.replace(base, **{"name": path, **given})


def profile_of(profile: str | Profile | None) -> Profile:
    """The profile named or given, that of a TOML file, or (None) that of the device at hand."""
    if isinstance(profile, Profile):
        return profile
    if profile is None:
        import torch

        name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
        return next((p for key, p in PROFILES.items() if key in name), PROFILES["h100"])
    if not isinstance(profile, str):
        raise SpmdError(f"a profile is a name, a TOML file or a Profile, not {profile!r}")
    if profile.endswith(".toml"):
        return read_profile(profile)
    if profile not in PROFILES:
        raise SpmdError(f"unknown profile {profile!r}; there are {', '.join(PROFILES)}, a TOML file, or a Profile")
    return PROFILES[profile]
