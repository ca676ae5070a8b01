"""The cases of test_ops.py: an op, its sample arguments, and the factors that must be shardable."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import float64

import spmd_compiler.ops  # noqa: F401  (defines torch.ops.spmd.draw)
from spmd_compiler.placements import Mesh

aten, prims = torch.ops.aten, torch.ops.prims
MESHES = (Mesh({"a": 4}), Mesh({"a": 2, "b": 2}))
ONE, CUBE = MESHES[0], Mesh({"a": 2, "b": 2, "c": 2})


@dataclass(frozen=True)
class Case:
    op: Any
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    shards: tuple[str, ...] = ()
    exact: bool = False
    rtol: float = 1e-9
    skip: tuple[int, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    uninitialised: bool = False
    drawn: bool = False  # equal bit for bit, operands as they are
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []
NO_RULE: list[Case] = []
DECOMPOSED: list[Case] = []  # ops that are made of others: tried as programs of one call


class Sampler:
    """Sample tensors, the same in every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def f(self, *shape, dtype=float64):
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def p(self, *shape, dtype=float64):
        """Positive, below 1."""
        return torch.rand(shape, generator=self.generator, dtype=dtype) * 0.9 + 0.05

    def i(self, *shape, low=0, high=8):
        return torch.randint(low, high, shape, generator=self.generator)

    def b(self, *shape):
        return torch.rand(shape, generator=self.generator) < 0.5


def case(op, args, kwargs=None, shards="", to=CASES, **options):
    """``args`` and ``kwargs`` are functions of a `Sampler`; ``shards`` names factors that must be shardable."""

    def make():
        s = Sampler()
        return tuple(args(s)), dict(kwargs(s)) if kwargs else {}

    shapes = "_".join(
        "x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else str(a).replace(" ", "")[:16]
        for a in make()[0]
        if not isinstance(a, list) or not a or not isinstance(a[0], torch.Tensor)
    )
    to.append(Case(op, make, tuple(shards.split()), name=f"{op}-{shapes}"[:80], **options))
