"""The cases of test_ops.py: an op, its sample arguments, and the factors that must be shardable."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (defines its operators)
from torch import float32, float64, int64

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


# --- pointwise ----------------------------------------------------------------------------------------------

case(aten.add.Tensor, lambda s: [s.f(8, 6), s.f(8, 6)], shards="d0 d1")
case(aten.add.Tensor, lambda s: [s.f(8, 6), s.f(6)], lambda s: {"alpha": 3}, shards="d0 d1")
case(aten.add.Tensor, lambda s: [s.f(8, 4), 2.0])
case(aten.add.Tensor, lambda s: [s.f(8, 4), s.f()])
case(aten.add.Tensor, lambda s: [s.f(4, 1, 3), s.f(5, 1)], meshes=(ONE, CUBE))
case(aten.sub.Tensor, lambda s: [s.f(7), s.f(7)])
case(aten.rsub.Scalar, lambda s: [s.f(8), 1.0])
case(aten.mul.Tensor, lambda s: [s.f(8, 4), s.f(8, 1)], meshes=(ONE, CUBE))
case(aten.mul.Tensor, lambda s: [s.f(8, 4), 2.5])
case(aten.mul.Tensor, lambda s: [*[s.f(8, 4)] * 2])
case(aten.mul.Scalar, lambda s: [s.f(5), 3])
case(aten.div.Tensor, lambda s: [s.f(8, 4), s.p(4)])
case(aten.div.Tensor, lambda s: [s.i(8), 2])
case(aten.div.Tensor_mode, lambda s: [s.f(8, 4), s.p(4)], lambda s: {"rounding_mode": "floor"})
case(aten.neg.default, lambda s: [s.f(2, 8)])
case(aten.lerp.Scalar, lambda s: [s.f(8), s.f(8), 0.25])
case(aten.addcmul.default, lambda s: [s.f(8, 2), s.f(8, 2), s.f(2)], lambda s: {"value": 2.0})
case(aten.addcdiv.default, lambda s: [s.f(8), s.f(8), s.p(8)])
case(aten.where.self, lambda s: [s.b(8, 1), s.f(8, 4), s.f(4)])
case(aten.where.self, lambda s: [s.b(8, 4), s.f(8, 4), s.f()])
case(aten.where.ScalarOther, lambda s: [s.b(8), s.f(8), 1.0])
case(aten.masked_fill.Scalar, lambda s: [s.f(8, 3), s.b(8, 1), 0.0])
case(aten.masked_fill.Scalar, lambda s: [s.f(8, 3), s.b(8, 3), -math.inf])
case(aten._to_copy.default, lambda s: [s.i(8, 3)], lambda s: {"dtype": float64})
case(aten._to_copy.default, lambda s: [s.f(8, 3)], lambda s: {"dtype": int64})
case(prims.convert_element_type.default, lambda s: [s.i(8, 3).float(), float64])
case(prims.convert_element_type.default, lambda s: [s.f(8) > 0, float64])
case(prims.fma.default if hasattr(prims, "fma") else aten.addcmul.default, lambda s: [s.f(8), s.f(8), s.f(8)])
case(aten.clamp.default, lambda s: [s.f(8, 4), -0.5, 0.5])
case(aten.clamp.Tensor, lambda s: [s.f(8, 4), s.f(4) - 1, None])
case(aten.pow.Tensor_Scalar, lambda s: [s.f(8), 2])
case(aten.pow.Scalar, lambda s: [2.0, s.f(8)])
case(aten.gelu_backward.default, lambda s: [s.f(8, 2), s.f(8, 2)], lambda s: {"approximate": "tanh"})
case(aten.threshold_backward.default, lambda s: [s.f(8), s.f(8), 0])
case(aten.native_dropout_backward.default, lambda s: [s.f(8), s.b(8), 2.0])
case(aten.frexp.Tensor, lambda s: [s.f(8)])
case(aten.complex.default, lambda s: [s.f(8), s.f(8)])
case(aten.add.Tensor, lambda s: [s.f(), s.f()], shards="")
CASES.pop()  # 0-d: nothing to shard but partials
for name in [
    "exp",
    "tanh",
    "sigmoid",
    "relu",
    "silu",
    "gelu",
    "erf",
    "rsqrt",
    "reciprocal",
    "abs",
    "sqrt",
    "log",
    "sin",
    "sign",
    "isnan",
    "logical_not",
]:
    case(getattr(aten, name).default, lambda s: [s.p(8, 3)], meshes=(ONE,), shards="d0")
for name in ["atan2", "fmod", "maximum", "bitwise_and", "logical_and", "copysign", "hypot"]:
    op = getattr(aten, name)
    integer = name.startswith("bitwise")
    case(
        op.Tensor if "Tensor" in op.overloads() else op.default,
        (lambda s: [s.i(8, 3), s.i(3)]) if integer else (lambda s: [s.f(8, 3), s.p(3)]),
        meshes=(ONE,), shards="d0",
    )  # fmt: skip
for name in ["ge", "lt", "eq", "ne"]:
    case(getattr(aten, name).Scalar, lambda s: [s.i(8, 3), 4], meshes=(ONE,))
    case(getattr(aten, name).Tensor, lambda s: [s.i(8, 3), s.i(8, 1)], meshes=(ONE,))
for name in ["exp", "sin", "sqrt", "floor"]:
    case(getattr(prims, name).default, lambda s: [s.p(8, 3)], meshes=(ONE,), shards="d0")

# --- matmul -------------------------------------------------------------------------------------------------

case(aten.mm.default, lambda s: [s.f(8, 4), s.f(4, 6)], shards="m k n", meshes=(ONE, CUBE))
case(aten.mm.default, lambda s: [s.f(3, 5), s.f(5, 2)])
case(aten.bmm.default, lambda s: [s.f(4, 3, 8), s.f(4, 8, 2)], shards="b k")
case(aten.addmm.default, lambda s: [s.f(6), s.f(8, 4), s.f(4, 6)], shards="m k n")
case(aten.addmm.default, lambda s: [s.f(8, 6), s.f(8, 5), s.f(5, 6)], lambda s: {"beta": 2, "alpha": 3})
case(aten.addmm.default, lambda s: [s.f(1, 6), s.f(8, 4), s.f(4, 6)])
case(aten.baddbmm.default, lambda s: [s.f(4, 2, 3), s.f(4, 2, 8), s.f(4, 8, 3)], shards="b k")
case(aten.addbmm.default, lambda s: [s.f(2, 4), s.f(3, 2, 8), s.f(3, 8, 4)], shards="k n")
case(aten.addmv.default, lambda s: [s.f(8), s.f(8, 4), s.f(4)], shards="m k")
case(aten.mv.default, lambda s: [s.f(8, 4), s.f(4)], shards="m k")
case(aten.dot.default, lambda s: [s.f(8), s.f(8)], shards="k")
case(aten.linear.default, lambda s: [s.f(4, 2, 8), s.f(6, 8), s.f(6)], shards="m0 k n")
case(aten.linear.default, lambda s: [s.f(4, 8), s.f(6, 8)], shards="m0 k n")

# --- grouped products ---------------------------------------------------------------------------------------

grouped = torch.ops.transformers


def halves(s, *shape):
    return s.f(*shape).to(torch.bfloat16)


for ends in ([3, 3, 6, 8], [0, 5, 8, 8], [2, 4, 6, 7], [0, 0, 0, 0]):
    offs = torch.tensor(ends, dtype=torch.int32)
    case(
        grouped.grouped_mm_fallback.default, lambda s, o=offs: [s.f(8, 4), s.f(4, 4, 6), o], shards="s e k n",
        meshes=(ONE, Mesh({"a": 2, "b": 2}), CUBE),
    )  # fmt: skip
    case(
        grouped.grouped_mm_fallback_backward.default,
        lambda s, o=offs: [s.f(8, 4), s.f(4, 4, 6), o, s.f(8, 6)], shards="s e k n",
    )  # fmt: skip
case(
    grouped.grouped_mm_fallback.default, lambda s: [s.f(7, 3), s.f(3, 3, 5), torch.tensor([1, 5, 7])], shards="s e k n"
)
for rows, ends in ((8, [3, 3, 6, 8]), (7, [2, 2, 7])):
    offs, number = torch.tensor(ends, dtype=torch.int32), len(ends)
    case(
        aten._grouped_mm.default, lambda s, r=rows, o=offs, n=number: [halves(s, r, 512), halves(s, n, 512, 512), o],
        shards="s e k n", rtol=2.5,
    )  # fmt: skip
    case(
        aten._grouped_mm.default, lambda s, r=rows, o=offs: [halves(s, r, 512).t(), halves(s, r, 512), o],
        shards="e k n", rtol=2.5,
    )  # fmt: skip

# --- reductions ---------------------------------------------------------------------------------------------

case(aten.sum.default, lambda s: [s.f(8, 3)], shards="r0 r1")
case(aten.sum.dim_IntList, lambda s: [s.f(8, 4, 3), [1]], shards="d0 r1 d2")
case(aten.sum.dim_IntList, lambda s: [s.f(8, 4), [-1], True], shards="d0 r1")
case(aten.sum.dim_IntList, lambda s: [s.f(5, 4), [0, 1]])
case(aten.sum.dim_IntList, lambda s: [s.b(8, 4), [0]], shards="r0 d1")
case(prims.sum.default, lambda s: [s.f(8, 4), [0]], shards="r0 d1")
case(aten.mean.default, lambda s: [s.f(5, 3)], shards="r0 r1")
case(aten.mean.dim, lambda s: [s.f(8, 5), [1], True], shards="d0 r1")
case(aten.mean.dim, lambda s: [s.f(8, 5, dtype=float32), [0]], lambda s: {"dtype": float64}, shards="r0", rtol=1e-6)
for op in (aten.amax, aten.amin):
    case(op.default, lambda s: [s.f(8, 5), [1]], shards="d0 r1")
    case(op.default, lambda s: [s.i(3, 5), [0, 1], True])
for op in (aten.max, aten.min):
    case(op.default, lambda s: [s.f(3, 5)], shards="r0 r1")
    case(op.dim, lambda s: [s.i(8, 6, high=3), 1], shards="d0 r1")
    case(op.dim, lambda s: [s.f(5, 2), 0, True], shards="r0")
case(aten.prod.dim_int, lambda s: [s.p(8, 3), 0], shards="r0")
case(aten.prod.default, lambda s: [s.p(3, 3)], shards="r0")
for op in (aten.any, aten.all):
    case(op.dim, lambda s: [s.b(3, 8), 0], shards="r0")
    case(op.default, lambda s: [s.b(3, 8)], shards="r0")
    case(op.dims, lambda s: [s.i(3, 8, high=2), [1], True], shards="r1")
case(aten.count_nonzero.dim_IntList, lambda s: [s.i(8, 3, high=2), [0]], shards="r0")
for op in (aten.argmax, aten.argmin):
    case(op.default, lambda s: [s.i(8, 6, high=3), 1], shards="d0 r1")
    case(op.default, lambda s: [s.f(3, 6), 0, True], shards="r0")
    case(op.default, lambda s: [s.f(3, 6)], shards="r0 r1")
    case(op.default, lambda s: [s.i(9, 5, high=3), None, True], shards="r0 r1", meshes=(ONE, CUBE))
    case(op.default, lambda s: [torch.full((5, 6), -math.inf)], shards="r0 r1")
    case(op.default, lambda s: [s.f(8, 6).masked_fill_(s.b(8, 6), math.nan)], shards="r0 r1")
case(aten.aminmax.default, lambda s: [s.f(5, 3)], lambda s: {"dim": 0, "keepdim": True}, shards="r0 d1")
case(aten.aminmax.default, lambda s: [s.i(8, 3)], shards="r0 r1")
for op in (aten.var, aten.std, aten.var_mean, aten.std_mean):
    case(op.correction, lambda s: [s.f(8, 5), [1]], lambda s: {"correction": 1, "keepdim": True}, shards="d0 r1")
    case(op.correction, lambda s: [s.f(8, 5, 2), [0, 2]], lambda s: {"correction": 0}, shards="r0 r2")
    case(op.correction, lambda s: [s.f(3, 5)], shards="r0 r1")
case(aten.logsumexp.default, lambda s: [s.f(8, 5), [1]], shards="d0 r1")
case(aten.logsumexp.default, lambda s: [torch.full((3, 5), -math.inf, dtype=float64), [0], True], shards="r0 d1")
for p in (2, 1, 3, math.inf, 0):
    case(aten.linalg_vector_norm.default, lambda s, p=p: [s.f(8, 3), p, [0]], shards="r0 d1")
case(aten.linalg_vector_norm.default, lambda s: [s.f(8, 3)], shards="r0 r1")
case(aten.cumsum.default, lambda s: [s.f(5, 8), 1], shards="d0 s")
case(aten.cumsum.default, lambda s: [s.i(9, 2), 0], shards="s")
case(aten.cumsum.default, lambda s: [s.b(5, 9), 1], shards="d0 s", meshes=(ONE, CUBE))
case(aten.cumsum.default, lambda s: [s.f(9), 0], lambda s: {"dtype": int64}, shards="s")
case(aten.cumprod.default, lambda s: [s.f(8, 3), 0], shards="s d1")
case(aten.cumprod.default, lambda s: [s.i(3, 9, low=1, high=3), 1], shards="s d0")
case(aten.logcumsumexp.default, lambda s: [s.f(5, 8), -1], shards="s d0")
case(aten.logcumsumexp.default, lambda s: [torch.full((9,), -math.inf, dtype=float64), 0], shards="s")
for op in (aten.cummax.default, aten.cummin.default):
    case(op, lambda s: [s.i(5, 9, high=3), 1], shards="s d0", meshes=(ONE, CUBE))
    case(op, lambda s: [s.f(8, 3), 0], shards="s d1")
    case(op, lambda s: [torch.tensor([1.0, math.nan, 3.0, 9.0, math.nan, 2.0, 1.0]), 0], shards="s")
    case(op, lambda s: [torch.full((9,), -math.inf), 0], shards="s")
for op in (aten._softmax, aten._log_softmax):
    case(op.default, lambda s: [s.f(8, 5), -1, False], shards="d0 r0")
    case(op.default, lambda s: [s.f(5, 4), 0, False], shards="r0")
    back = getattr(aten, f"{op.__name__}_backward_data").default
    case(back, lambda s: [s.f(8, 5), s.p(8, 5), -1, float64], shards="d0 r0")

# --- views --------------------------------------------------------------------------------------------------

for shape, new, factors in (
    ((8, 6), (48,), "f0"),
    ((48,), (8, 6), "f0"),
    ((2, 8, 3), (16, 3), "f0 f1"),
    ((8, 12), (8, 3, 4), "f0 f1"),
    ((3, 3), (9,), "f0"),
    ((2, 3), (3, 2), "f0"),
    ((2, 5, 3, 2), (10, 6), "f0 f1"),
    ((6, 1, 4), (4, 6, 1), "f0"),
    ((6, 4), (4, 6), "f0"),
    ((4, 6), (8, 3), "f0"),
    ((5, 1, 3), (5, 3), "f0 f1"),
    ((3, 5), (1, 3, -1, 1), "f0 f1"),
    ((7,), (7, 1), "f0"),
    ((2, 3, 8), (2, 3, 2, 4), "f0 f1 f2"),
    ((2, 3, 4, 8), (2, 12, 8), "f0 f1"),
):
    case(aten.view.default, lambda s, a=shape, b=new: [s.f(*a), list(b)], shards=factors, exact=True)
case(aten.view.default, lambda s: [s.f(4, 8, 3), [32, 3]], exact=True, meshes=(CUBE,))
case(aten._unsafe_view.default, lambda s: [s.f(8, 6), [8, 2, 3]], exact=True)
case(aten.reshape.default, lambda s: [s.f(1), []], exact=True)
case(aten.as_strided.default, lambda s: [s.f(8, 6), [48], [1]], exact=True)
case(aten.expand.default, lambda s: [s.f(5, 1), [4, 5, 8]], shards="d0 d1 d2", exact=True)
case(aten.expand.default, lambda s: [s.f(3), [-1]], exact=True)
case(aten.expand.default, lambda s: [s.f(), [5, 4]], shards="d0 d1", exact=True)
case(aten.permute.default, lambda s: [s.f(2, 4, 3), [2, 0, -2]], shards="d0 d1 d2", exact=True)
case(aten.t.default, lambda s: [s.f(8, 3)], exact=True)
case(aten.transpose.int, lambda s: [s.f(8, 3, 2), -1, 0], exact=True)
case(aten.movedim.int, lambda s: [s.f(8, 3, 2), 0, 2], exact=True)
case(aten.squeeze.dim, lambda s: [s.f(4, 1, 5), 1], exact=True, shards="d0 d2")
case(aten.squeeze.dim, lambda s: [s.f(4, 2), 0], exact=True, shards="d0")
case(aten.squeeze.dims, lambda s: [s.f(4, 1, 1), [1, -1]], exact=True)
case(aten.squeeze.default, lambda s: [s.f(4, 1, 2)], exact=True, shards="d0 d2")
case(aten.unsqueeze.default, lambda s: [s.f(4, 3), -1], exact=True, shards="d0 d1")
case(aten.unsqueeze.default, lambda s: [s.f(), 0], exact=True)
for name in ["alias", "clone", "detach"]:
    case(getattr(aten, name).default, lambda s: [s.f(5, 4)], exact=True, shards="d0 d1")
case(aten.clone.default, lambda s: [s.f(4)], lambda s: {"memory_format": torch.contiguous_format}, exact=True)
case(aten.copy.default, lambda s: [s.f(8, 3), s.f(3)], exact=True)
case(aten.view_as_real.default, lambda s: [torch.complex(s.f(8), s.f(8))])
case(aten.slice.Tensor, lambda s: [s.f(8, 5), 0, 2, 7], exact=True, shards="d0 d1")
case(aten.slice.Tensor, lambda s: [s.f(8, 5), 1, -5, 2**63 - 1], exact=True, shards="d0 d1")
case(aten.slice.Tensor, lambda s: [s.f(8, 5)], exact=True, shards="d0")
case(aten.slice.Tensor, lambda s: [s.f(8, 5), 1, 0, 5, 2], exact=True, shards="d0 d1")
case(aten.slice.Tensor, lambda s: [s.f(3, 19), 1, -18, 17, 3], exact=True, shards="d1")
case(aten.slice.Tensor, lambda s: [s.f(11), 0, 7, 8], exact=True, shards="d0")
case(aten.slice.Tensor, lambda s: [s.b(11), 0, 2, 8], exact=True, shards="d0")
case(aten.slice.Tensor, lambda s: [s.b(11, 4), 0, 2, 3], exact=True, shards="d1")
case(aten.slice.Tensor, lambda s: [s.f(11, 4), 0, 4, 4], exact=True, shards="d1")
case(aten.select.int, lambda s: [s.f(3, 8, 2), 0, -1], exact=True, shards="d0 d1 d2")
case(aten.select.int, lambda s: [s.b(3, 8, 2), 1, 2], exact=True, shards="d0 d2")
case(aten.unbind.int, lambda s: [s.f(3, 8), 0], exact=True, shards="d0 d1")
case(aten.split.Tensor, lambda s: [s.f(8, 5), 2, 1], exact=True, shards="d0 d1")
case(aten.split.Tensor, lambda s: [s.f(8, 6), 3, 0], exact=True, shards="d0 d1")
case(aten.split_with_sizes.default, lambda s: [s.f(8, 5), [1, 4], -1], exact=True, shards="d0 d1")
case(aten.narrow.default, lambda s: [s.f(8, 5), 0, -3, 2], exact=True, shards="d0 d1")
case(aten.unfold.default, lambda s: [s.f(8, 5), 1, 3, 2], exact=True, shards="d0 d1")
case(aten.unfold.default, lambda s: [s.f(19), 0, 2, 4], exact=True, shards="d0")
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(8, 2), 1, 1, 3], exact=True, shards="d0 d1")
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(8, 5), 1, 0, 9], exact=True, shards="d0 d1")
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(1, 5), 0, 5, 6], exact=True, shards="d0 d1")
case(aten.slice_scatter.default, lambda s: [s.f(17), s.f(5), 0, 2, 15, 3], exact=True, shards="d0")
case(aten.select_scatter.default, lambda s: [s.f(8, 5), s.f(8), 1, 3], exact=True, shards="d0 d1")
for shape, offset, dim1, dim2 in (
    ((8, 5, 5), 1, -1, 1), ((9, 9), 0, 0, 1), ((6, 8), -2, 0, 1), ((4, 11), -3, 1, 0), ((7, 2, 5), -1, 2, 0),
    ((5, 9), -4, 0, 1),
):  # fmt: skip
    factors = f"d{dim1 % len(shape)} d{dim2 % len(shape)}" if (offset, shape) != (-4, (5, 9)) else f"d{dim2}"
    where = (offset, dim1, dim2)
    case(aten.diagonal.default, lambda s, n=shape, w=where: [s.f(*n), *w], exact=True, shards=factors)
    case(
        aten.diagonal_scatter.default,
        lambda s, n=shape, w=where: [s.f(*n), s.f(*torch.diagonal(s.f(*n), *w).shape), *w], exact=True, shards=factors,
    )  # fmt: skip
case(aten.diagonal.default, lambda s: [s.b(8, 8)], exact=True, shards="d0")
case(aten.diagonal_copy.default, lambda s: [s.i(8, 8).int()], exact=True, shards="d0 d1")
case(aten.diag_embed.default, lambda s: [s.f(8, 5)], exact=True, shards="d0 d1 d2")
case(aten.diag_embed.default, lambda s: [s.f(3, 7), -2, 0, 2], exact=True, shards="d0 d1 d2", meshes=(ONE, CUBE))
case(aten.flip.default, lambda s: [s.f(8, 5), [1]], exact=True, shards="d0 d1")
case(prims.rev.default, lambda s: [s.f(8, 5), [0, 1]], exact=True, shards="d0 d1")
case(aten.roll.default, lambda s: [s.f(8, 5), [2], [1]], exact=True, shards="d0 d1")
case(aten.roll.default, lambda s: [s.f(9, 8), [-11, 3], [0, 1]], exact=True, shards="d0 d1")
case(aten.repeat.default, lambda s: [s.f(8, 5), [2, 1, 3]], exact=True, shards="d0 d1")
case(aten.repeat.default, lambda s: [s.f(7), [3]], exact=True, shards="d0")
case(aten.constant_pad_nd.default, lambda s: [s.f(8, 5), [1, 2]], exact=True, shards="d0 d1")
case(aten.constant_pad_nd.default, lambda s: [s.f(8, 5), [1, -2], 3.0], exact=True, shards="d0 d1")
case(aten.constant_pad_nd.default, lambda s: [s.f(3, 5, 8), [9, -2, -1, 4]], exact=True, shards="d0 d1 d2")
case(aten.constant_pad_nd.default, lambda s: [s.i(3, 9), [-2, -3], 7], exact=True, shards="d0 d1")
case(aten.cat.default, lambda s: [[s.f(8, 5), s.f(8, 2), s.f(8, 1)], -1], exact=True, shards="d0 d1")
case(aten.cat.default, lambda s: [[s.f(3, 4)] * 2], exact=True, shards="d0 d1")
case(aten.cat.default, lambda s: [[s.f(3, 1)] * 5, 1], exact=True, shards="d0 d1")
case(aten.cat.default, lambda s: [[s.f(2, 3), s.f(0, 3), s.f(11, 3)]], exact=True, shards="d0 d1")
case(aten.stack.default, lambda s: [[s.f(8, 5), s.f(8, 5)], 1], exact=True, shards="d0 d1")

# --- index --------------------------------------------------------------------------------------------------

case(aten.embedding.default, lambda s: [s.f(8, 4), s.i(2, 6)], shards="v d b0 b1")
case(aten.embedding.default, lambda s: [s.f(5, 3), s.i(4, high=5), 2], shards="v d b0")
case(aten.embedding_dense_backward.default, lambda s: [s.f(4, 2, 3), s.i(4, 2, high=5), 5, -1, False], shards="v d b0")
case(aten.embedding_dense_backward.default, lambda s: [s.f(4, 8), s.i(4), 8, 3, False], shards="v d b0")
case(aten.embedding_dense_backward.default, lambda s: [s.f(4, 8), s.i(4, high=3), 8, 1, True], shards="d")
for norm in (1.0, 2.0, 3.0, math.inf):
    case(aten.embedding_renorm.default, lambda s, n=norm: [s.f(8, 4), s.i(2, 6), 1.0, n], shards="v d")
case(aten.embedding_renorm.default, lambda s: [s.f(5, 3), s.i(4, high=5), 0.5, 2.0], shards="v d")
case(aten.gather.default, lambda s: [s.f(8, 6), 1, s.i(8, 1, high=6)], shards="d0 v")
case(aten.gather.default, lambda s: [s.f(5, 8), 0, s.i(3, 8, high=5)], shards="d1 v k")
case(aten.gather.default, lambda s: [s.f(8, 6), 0, s.i(8, 1)], shards="v k")
case(aten.gather.default, lambda s: [s.b(8, 6), 1, s.i(8, 2, high=6)], shards="d0 k")
case(aten.index_select.default, lambda s: [s.f(8, 5, 2), 1, s.i(6, high=5)], shards="d0 v k")
case(aten.scatter.value, lambda s: [s.f(8, 6), 1, s.i(8, 1, high=6), -1.0], shards="d0 v")
case(aten.scatter.value, lambda s: [s.f(8, 6), 1, s.i(8, 3, high=6), 0.0], shards="d0 v")
case(aten.scatter.src, lambda s: [s.f(8, 6), 1, s.i(8, 1, high=6), s.f(8, 1)], shards="d0 v")
case(aten.scatter.src, lambda s: [s.f(5, 3), 0, torch.tensor([[4, 0, 1], [2, 1, 3]]), s.f(2, 3)], shards="v d1")
case(aten.scatter_add.default, lambda s: [s.f(5, 6), 0, s.i(8, 6, high=5), s.f(8, 6)], shards="v k d1")
case(aten.scatter_add.default, lambda s: [s.f(6, 8), 0, s.i(4, 5, high=6), s.f(4, 5)], shards="v k")
for reduce in ("sum", "amax", "amin", "mean"):
    case(
        aten.scatter_reduce.two,
        lambda s, r=reduce: [s.f(5, 6), 0, s.i(8, 6, high=5), s.f(8, 6), r],
        shards="v d1" if reduce == "mean" else "v k d1",
    )
case(
    aten.scatter_reduce.two, lambda s: [s.f(5, 2), 0, s.i(8, 2, high=5), s.f(8, 2), "sum"],
    lambda s: {"include_self": False}, shards="v",
)  # fmt: skip
case(aten.index_add.default, lambda s: [s.f(8, 5), 1, s.i(6, high=5), s.f(8, 6)], shards="d0 v k")
case(aten.index_reduce.default, lambda s: [s.f(9, 3), 0, s.i(5, high=9), s.f(5, 3), "amax"], shards="v d1")
case(aten.index_copy.default, lambda s: [s.f(8, 5), 1, torch.tensor([3, 0]), s.f(8, 2)], shards="d0 v")
case(aten.index_fill.int_Scalar, lambda s: [s.f(8, 5), 1, torch.tensor([3, 0]), 2.0], shards="d0 v")
case(aten.index.Tensor, lambda s: [s.f(8, 5), [s.i(2, 4, low=-8)]], shards="v0 d1 b1")
case(aten.index.Tensor, lambda s: [s.f(3, 8, 5), [None, s.i(4, 1), s.i(3, high=5)]], shards="v1 v2 d0 b0 b1")
case(aten.index.Tensor, lambda s: [s.f(5, 3, 4), [s.i(6, high=5), None, s.i(6, high=4)]], shards="v0 v2 d1 b0")
case(aten.index.Tensor, lambda s: [s.b(8, 5), [None, s.i(4, high=5)]], shards="d0 b0")
case(aten._unsafe_index.Tensor, lambda s: [s.f(5, 8), [s.i(8, high=5)]], shards="v0 d1 b0")
case(
    aten._unsafe_masked_index.default,
    lambda s: [s.f(5, 4), s.b(8, 1), [s.i(8, 1, high=5), s.i(4, high=4)], 0.0],
    shards="v0 v1 b0 b1",
)
case(aten._unsafe_masked_index.default, lambda s: [s.f(5, 4), s.b(8, 4), [s.i(8, high=5), None], 1.0], shards="b0 d1")
case(aten.index_put.default, lambda s: [s.f(5, 8), [s.i(6, high=5)], s.f(6, 8), True], shards="v0 d1 b0")
case(aten.index_put.default, lambda s: [s.f(5, 8), [torch.tensor([3, -5])], s.f(2, 8)], shards="v0 d1")
case(aten.index_put.default, lambda s: [s.f(5, 8), [torch.tensor([3, 0])], s.f()], shards="v0 d1")
case(
    aten.index_put.default,
    lambda s: [s.f(5, 3, 4), [s.i(4, 1, high=5), None, s.i(2, high=4)], s.f(4, 2, 3), True],
    shards="v0 v2 d1 b0 b1",
)
case(
    aten.index_put.default,
    lambda s: [s.f(5, 4), [torch.tensor([1, 4, 0]), torch.tensor([2, 2, 3])], s.f(3)],
    shards="v0 v1",
)
case(aten.index_put.default, lambda s: [s.f(8, 4), [s.b(8)], s.f()], shards="d0 d1")
case(
    aten._unsafe_masked_index_put_accumulate.default,
    lambda s: [s.f(6, 4), s.b(2, 4, 1), [s.i(2, 4, high=6)], s.f(2, 4, 4)],
    shards="v0 d1 b0 b1",
)
case(
    aten._unsafe_masked_index_put_accumulate.default,
    lambda s: [s.f(3, 6, 5), s.b(8), [None, s.i(8, high=6), s.i(8, high=5)], s.f(3, 8)],
    shards="d0 v1 v2 b0",
)

# --- factories ----------------------------------------------------------------------------------------------

case(aten.full.default, lambda s: [[8, 3], 2.0], shards="d0 d1", exact=True)
case(aten.full.default, lambda s: [[5], 0], shards="d0", exact=True)
case(aten.full_like.default, lambda s: [s.f(8, 3), 2.0], shards="d0 d1", exact=True)
case(aten.zeros_like.default, lambda s: [s.f(5, 4)], shards="d0 d1", exact=True)
case(aten.new_zeros.default, lambda s: [s.f(5, 4), [8, 2]], shards="d0", exact=True)
case(aten.new_full.default, lambda s: [s.f(5, 4), [8, 2], 3], shards="d0", exact=True)
case(aten.ones.default, lambda s: [[8]], lambda s: {"dtype": int64}, shards="d0", exact=True)
case(aten.empty.memory_format, lambda s: [[8, 3]], shards="d0", uninitialised=True)
case(aten.scalar_tensor.default, lambda s: [0.0], exact=True)
case(
    prims.iota.default, lambda s: [9],
    lambda s: {"start": 2, "step": 3, "dtype": int64, "device": torch.device("cpu"), "requires_grad": False}, shards="d0",
)  # fmt: skip
case(aten.arange.default, lambda s: [10], shards="d0")
case(aten.arange.start, lambda s: [3, 11], shards="d0")
case(aten.arange.start_step, lambda s: [1.0, 3.0, 0.25], lambda s: {"dtype": float64}, shards="d0")
case(aten.arange.start_step, lambda s: [11, 3, -1], lambda s: {"dtype": float32}, shards="d0")
case(aten.eye.default, lambda s: [8], shards="d0 d1")
case(aten.eye.m, lambda s: [5, 6], shards="d0 d1")
case(aten.tril.default, lambda s: [s.f(2, 8, 5), 1], shards="d0 m n", exact=True)
case(aten.triu.default, lambda s: [s.f(5, 8)], shards="m n", exact=True)

# --- orders -------------------------------------------------------------------------------------------------

WIDE = (*MESHES, Mesh({"a": 8}), Mesh({"a": 3, "b": 2}))


def gaps(x):
    """Some of it no number, some infinite, some equal."""
    flat = x.reshape(-1)
    flat[::5], flat[3::7], flat[1::4] = math.nan, math.inf, 1.0
    return x


case(aten.sort.default, lambda s: [s.f(8, 5), 1], shards="d0 s")
case(aten.sort.default, lambda s: [s.f(19)], shards="s", meshes=WIDE)
STABLE = {"stable": True}
case(aten.sort.stable, lambda s: [gaps(s.f(24))], lambda s: STABLE | {"descending": True}, shards="s", meshes=WIDE)
case(aten.sort.stable, lambda s: [gaps(s.f(3, 13))], lambda s: STABLE, shards="d0 s", meshes=(*MESHES, CUBE))
case(aten.sort.stable, lambda s: [s.i(8, 5)], lambda s: STABLE | {"dim": 0}, shards="d1 s")
case(aten.sort.stable, lambda s: [s.i(21, high=4)], lambda s: STABLE, shards="s", meshes=WIDE)
case(aten.sort.default, lambda s: [s.b(9)], shards="s")
case(aten.topk.default, lambda s: [s.f(8, 5), 2], shards="d0 s")
case(aten.topk.default, lambda s: [s.f(3, 16), 6, -1, False], shards="d0 s")
case(aten.topk.default, lambda s: [s.f(9), 5], shards="s")
case(aten.topk.default, lambda s: [torch.full((9,), -math.inf), 9], shards="s", skip=(1,))
case(aten.topk.default, lambda s: [s.i(3, high=900), 3, 0], shards="s")
case(aten.topk.default, lambda s: [s.f(7, 4), 2, 0], shards="s d1", meshes=(CUBE,))
case(aten.kthvalue.default, lambda s: [s.f(8, 5), 2, 1, True], shards="d0 r1")
case(aten.kthvalue.default, lambda s: [s.f(17), 11], shards="r0")
case(aten.median.dim, lambda s: [s.f(8, 5), 1], shards="d0 r1")
case(aten.median.dim, lambda s: [gaps(s.f(4, 9)), 1], shards="d0 r1")
case(aten.nanmedian.dim, lambda s: [gaps(s.f(9, 3)), 0, True], shards="r0 d1", skip=(1,))
case(aten.median.default, lambda s: [s.f(5, 7)], shards="r0 r1")
case(aten.median.default, lambda s: [gaps(s.f(8, 3))], shards="r0 r1")
case(aten.median.default, lambda s: [s.i(8, 3)], shards="r0 r1")
case(aten.nanmedian.default, lambda s: [gaps(s.f(5, 6))], shards="r0 r1", meshes=(*MESHES, CUBE))
case(aten.searchsorted.Tensor, lambda s: [torch.arange(5.0), s.f(8, 3, dtype=float32)], shards="d0 d1 v")
case(aten.bucketize.Tensor, lambda s: [s.f(8, 3, dtype=float32), torch.arange(5.0)], shards="d0 d1 v")
case(aten.histc.default, lambda s: [s.f(8, 3), 4, -1, 1], shards="r0 r1")
case(aten.histc.default, lambda s: [s.f(8, 5), 4], shards="r0 r1")
case(aten.histc.default, lambda s: [torch.ones(6), 3], shards="r0")
case(aten.searchsorted.Tensor, lambda s: [s.f(3, 9).sort(1).values, s.f(3, 5)], shards="d0 v k")
case(aten.searchsorted.Tensor, lambda s: [s.f(3, 9), s.f(3, 5)], lambda s: {"sorter": s.f(3, 9).argsort(1)}, shards="d0 k")

# --- no rule ------------------------------------------------------------------------------------------------

case(aten.masked_scatter.default, lambda s: [s.f(8, 6), s.b(8, 6), s.f(48)], to=NO_RULE)
case(aten.as_strided.default, lambda s: [s.f(8, 6), [4, 2], [6, 2]], to=NO_RULE)

# --- draws --------------------------------------------------------------------------------------------------

for kind, dtype in (("bits", int64), ("uniform", float32), ("normal", float64), ("exponential", float32)):
    case(
        torch.ops.spmd.draw.default,
        lambda s, k=kind, t=dtype: [torch.tensor(7), 3, k, [8, 5], [0, 0], [8, 5], t, torch.device("cpu")],
        shards="d0 d1", drawn=True,
    )  # fmt: skip


# --- attention ----------------------------------------------------------------------------------------------

flash, flash_back = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def flash_backward(q, k, v, grad, causal, **mask):
    out, lse = flash(q, k, v, 0.0, causal, **mask)
    return [grad, q, k, v, out, lse, 0.0, causal]


for causal in (False, True):
    for q, kv in (((4, 2, 8, 4), (4, 2, 8, 4)), ((2, 8, 4, 4), (2, 4, 4, 4))):
        heads = "" if q[1] == kv[1] == 2 else "g"
        case(flash, lambda s, c=causal, q=q, kv=kv: [s.f(*q), s.f(*kv), s.f(*kv), 0.0, c], shards=f"b s t {heads}")
        case(
            flash_back,
            lambda s, c=causal, q=q, kv=kv: flash_backward(s.f(*q), s.f(*kv), s.f(*kv), s.f(*q), c),
            shards=f"b s t {heads}",
        )
for shape in ((8, 12), (1, 1, 8, 12), (4, 2, 8, 12)):
    case(
        flash, lambda s: [s.f(4, 2, 8, 4), s.f(4, 2, 12, 4), s.f(4, 2, 12, 4)],
        lambda s, shape=shape: {"attn_mask": s.f(*shape)}, shards="b s t",
    )  # fmt: skip
mask = torch.linspace(-1, 1, 96, dtype=float64).reshape(8, 12)
mask = torch.where(
    torch.arange(12) < torch.tensor([[12, 1, 5, 6, 0, 3, 9, 12]]).T, mask, -math.inf
)  # one row sees nothing
case(
    flash, lambda s: [s.f(4, 2, 8, 4), s.f(4, 2, 12, 4), s.f(4, 2, 12, 4)], lambda s: {"attn_mask": mask}, shards="b s t",
)  # fmt: skip
case(
    flash_back,
    lambda s: flash_backward(s.f(4, 2, 8, 4), s.f(4, 2, 12, 4), s.f(4, 2, 12, 4), s.f(4, 2, 8, 4), False, attn_mask=mask),
    lambda s: {"attn_mask": mask}, shards="b s t",
)  # fmt: skip
case(flash, lambda s: [s.f(4, 2, 8, 4), s.f(4, 2, 8, 4), s.f(4, 2, 8, 4), 0.5], to=NO_RULE)

# --- normalisation and windows ------------------------------------------------------------------------------


def layer_norm_backward(grad, x, weight, bias):
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, 1e-5)
    return [grad, x, [x.shape[-1]], mean, rstd, weight, bias, [True] * 3]


def batch_norm_backward(grad, x, weight):
    _, mean, rstd = aten.native_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)
    return [grad, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3]


case(aten.native_layer_norm.default, lambda s: [s.f(8, 5, 6), [6], s.f(6), s.f(6), 1e-5], shards="d0 d1")
case(aten.native_layer_norm.default, lambda s: [s.f(8, 6), [6], None, None, 1e-5], shards="d0")
case(
    aten.native_layer_norm_backward.default,
    lambda s: layer_norm_backward(s.f(8, 5, 6), s.f(8, 5, 6), s.f(6), s.f(6)), shards="d0 d1",
)  # fmt: skip
case(aten._fused_rms_norm.default, lambda s: [s.f(8, 6), [6], s.f(6), 1e-5], shards="d0")
case(aten.native_batch_norm.default, lambda s: [s.f(3, 8, 2), s.f(8), None, None, None, True, 0.1, 1e-5], shards="c")
case(
    aten.native_batch_norm_backward.default,
    lambda s: batch_norm_backward(s.f(3, 8, 2), s.f(3, 8, 2), s.f(8)),
    shards="c",
)


def convolution(s, x, weight, bias=True, stride=(1,), pad=(0,), dilation=(1,), transposed=False, out=(0,), groups=1):
    channels = weight[1] * groups if transposed else weight[0]
    return [s.f(*x), s.f(*weight), s.f(channels) if bias else None, *map(list, (stride, pad, dilation)), transposed,
            list(out), groups]  # fmt: skip


def convolution_backward(s, *args, mask=(True, True, True), **kwargs):
    x, weight, bias, *rest = convolution(s, *args, **kwargs)
    grad = s.f(*aten.convolution(x, weight, bias, *rest).shape)
    return [grad, x, weight, None if bias is None else list(bias.shape), *rest, list(mask)]


CONVOLUTIONS = (  # shape of the input, of the weight, the rest
    ((4, 8, 5), (12, 8, 3), {"pad": (1,)}, "n c o w0"),
    ((4, 8, 5), (12, 2, 3), {"pad": (1,), "groups": 4}, "n q w0"),
    ((5, 3, 8), (2, 3, 3), {"bias": False}, "n w0"),
    ((1, 2, 16), (3, 2, 4), {"stride": (4,)}, "w0"),
    ((2, 2, 11), (2, 2, 3), {"stride": (2,), "pad": (4,), "dilation": (2,)}, "w0"),
    ((1, 1, 13), (1, 1, 2), {"stride": (5,), "pad": (1,)}, "w0"),
    ((1, 1, 6), (1, 1, 7), {"pad": (3,)}, "w0"),
    ((2, 2, 8, 6), (2, 1, 3, 2), {"stride": (1, 2), "pad": (1, 0), "dilation": (1, 1), "groups": 2}, "w0 w1"),
    ((1, 2, 5, 4, 6), (2, 2, 2, 3, 1), {"stride": (1, 1, 2), "pad": (1, 1, 0), "dilation": (1,) * 3}, "w0 w1 w2"),
    ((4, 8, 5, 4), (8, 12, 3, 2), {"bias": False, "stride": (2,) * 2, "pad": (1,) * 2, "dilation": (1,) * 2,
                                   "transposed": True, "out": (1, 0)}, "n c o w0 w1"),
    ((4, 8, 5), (8, 3, 3), {"stride": (2,), "pad": (1,), "transposed": True, "out": (1,), "groups": 4}, "n q w0"),
    ((1, 2, 8), (2, 2, 3), {"stride": (4,), "transposed": True, "out": (3,)}, "w0"),
    ((1, 2, 9), (2, 2, 5), {"pad": (2,), "dilation": (2,), "transposed": True}, "w0"),
)  # fmt: skip
for x, weight, rest, factors in CONVOLUTIONS:
    case(aten.convolution.default, lambda s, a=x, b=weight, r=rest: convolution(s, a, b, **r), shards=factors)
    case(
        aten.convolution_backward.default,
        lambda s, a=x, b=weight, r=rest: convolution_backward(s, a, b, mask=(True, True, r.get("bias", True)), **r),
        shards=factors,
    )
for wanted in ((True, False, False), (False, True, False), (False, False, True)):
    case(
        aten.convolution_backward.default,
        lambda s, m=wanted: convolution_backward(s, (2, 4, 6), (4, 4, 3), pad=(1,), mask=m), shards="c o w0",
    )  # fmt: skip

POOLS = (  # shape, kernel, stride, padding, ceil_mode
    ((4, 8, 4, 4), [2, 2], [2, 2], [0, 0], False),
    ((1, 2, 9, 7), [3, 2], [2, 1], [1, 1], False),
    ((2, 1, 8, 8), [3, 3], [2, 2], [0, 1], True),
    ((1, 1, 6, 5), [5], [1], [2], False),
)
for shape, kernel, stride, pad, ceil in POOLS:
    given = [kernel, stride, pad]
    for count, divisor in ((True, None), (False, None), (False, 3)):
        rest = [*given, ceil, count, divisor]
        case(aten.avg_pool2d.default, lambda s, n=shape, r=rest: [s.f(*n), *r], shards="w0 w1")
        case(
            aten.avg_pool2d_backward.default,
            lambda s, n=shape, r=rest: [s.f(*aten.avg_pool2d(s.f(*n), *r).shape), s.f(*n), *r], shards="w0 w1",
        )  # fmt: skip
    case(aten.max_pool2d_with_indices.default, lambda s, n=shape, r=given, c=ceil: [s.f(*n), *r, [1, 1], c],
         shards="w0 w1")  # fmt: skip
    case(
        aten.max_pool2d_with_indices_backward.default,
        lambda s, n=shape, r=given, c=ceil: (lambda x: (lambda v, i: [s.f(*v.shape), x, *r, [1, 1], c, i])(
            *aten.max_pool2d_with_indices(x, *r, [1, 1], c)))(s.f(*n)), shards="w0 w1",
    )  # fmt: skip
half = torch.bfloat16
case(aten.avg_pool2d.default, lambda s: [s.f(1, 2, 9, 8, dtype=half), [3], [1], [1]], shards="w0 w1", rtol=5e-2)
case(aten.avg_pool2d_backward.default, lambda s: [s.f(1, 2, 9, 8, dtype=half), s.f(1, 2, 9, 8, dtype=half), [3], [1], [1],
     False, True, None], shards="w0 w1", rtol=5e-2, meshes=(ONE,))  # fmt: skip
case(aten.max_pool2d_with_indices.default, lambda s: [s.f(1, 1, 9, 8), [3, 2], [1, 2], [1, 0], [2, 3]], shards="w0 w1")
case(aten.max_pool2d_with_indices.default, lambda s: [torch.full((1, 1, 6, 6), -math.inf), 3, 1, 1], shards="w0 w1")
case(aten.avg_pool3d.default, lambda s: [s.f(1, 2, 5, 4, 6), [2], [1], [1]], shards="w0 w1 w2", meshes=(ONE, CUBE))
case(aten.max_pool3d_with_indices.default, lambda s: [s.f(1, 2, 5, 4, 6), [3, 2, 2], [2, 2, 1], [1]], shards="w0 w1 w2")
case(
    aten.max_pool3d_with_indices_backward.default,
    lambda s: (lambda x: (lambda v, i: [s.f(*v.shape), x, [2], [1], [1], [1], False, i])(
        *aten.max_pool3d_with_indices(x, [2], [1], [1])))(s.f(1, 2, 3, 4, 5)), shards="w0 w1 w2", meshes=(ONE, CUBE),
)  # fmt: skip
for shape, size in (((8, 4, 4), [2, 2]), ((2, 3, 11, 8), [4, 5]), ((1, 1, 5, 6), [8, 2])):
    case(aten._adaptive_avg_pool2d.default, lambda s, n=shape, m=size: [s.f(*n), m], shards="w0 w1")
    case(
        aten._adaptive_avg_pool2d_backward.default, lambda s, n=shape, m=size: [s.f(*n[:-2], *m), s.f(*n)],
        shards="w0 w1",
    )  # fmt: skip
    case(
        aten.adaptive_max_pool2d_backward.default,
        lambda s, n=shape, m=size: (lambda x: [s.f(*n[:-2], *m), x, aten.adaptive_max_pool2d(x, m)[1]])(s.f(*n)),
        shards="w0 w1",
    )  # fmt: skip
case(aten._adaptive_avg_pool3d.default, lambda s: [s.f(1, 2, 5, 4, 6), [3, 2, 4]], shards="w0 w1 w2", meshes=(CUBE,))
PADS = (  # shape, pad
    ((2, 3, 8), [2, 1]),
    ((1, 9), [5, 3]),
    ((1, 2, 5, 4), [3, 0, 0, 2]),
    ((2, 4, 7), [-2, 3]),
    ((2, 3, 4, 6), [1, 1, 0, 2, 2, 0]),
)
for mode, (shape, pad) in itertools.product(("reflect", "replicate", "circular"), PADS):
    factors = " ".join(f"d{len(shape) - 1 - i}" for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2]))
    case(torch.ops.spmd.pad.default, lambda s, n=shape, p=pad, m=mode: [s.f(*n), p, m], shards=factors, exact=True)
    case(
        torch.ops.spmd.pad_backward.default,
        lambda s, n=shape, p=pad, m=mode: [s.f(*torch.ops.spmd.pad(s.f(*n), p, m).shape), p, m], shards=factors,
    )  # fmt: skip
for mode, (n, weight, stride, dilation, groups, pad) in itertools.product(
    ("reflect", "replicate", "circular"),
    [
        ((2, 4, 8), (4, 2, 3), [1], [1], 2, [1, 1]),
        ((1, 2, 11), (2, 2, 4), [2], [2], 1, [3, 4]),
        ((1, 2, 9), (2, 2, 1), [3], [1], 1, [1, 0]),
        ((2, 2, 8, 6), (2, 2, 3, 2), [1, 2], [1, 1], 1, [2, 1, 0, 3]),
        ((1, 2, 5, 4), (2, 2, 3, 3), [1, 1], [1, 2], 1, [3, 2]),
    ],
):
    rest = [stride, dilation, groups, pad, mode]
    case(
        torch.ops.spmd.padded_convolution.default,
        lambda s, n=n, w=weight, r=rest: [s.f(*n), s.f(*w), s.f(w[0]), *r], shards="w0",
    )  # fmt: skip
    for wanted in ([True, True, True], [False, True, False]):
        case(
            torch.ops.spmd.padded_convolution_backward.default,
            lambda s, n=n, w=weight, r=rest, m=wanted: (lambda x, k: [
                s.f(*torch.ops.spmd.padded_convolution(x, k, None, *r).shape), x, k, *r, m])(s.f(*n), s.f(*w)),
            shards="w0",
        )  # fmt: skip
case(aten.upsample_nearest2d.default, lambda s: [s.f(4, 8, 3, 3), [6, 6]], shards="d0 d1")
case(aten.upsample_nearest2d_backward.default, lambda s: [s.f(4, 8, 6, 6), [6, 6], [4, 8, 3, 3]], shards="d0 d1")

case(aten.tensordot.default, lambda s: [s.f(5, 8, 3), s.f(3, 4), [2], [0]], shards="m0 m1 k0 n1", meshes=(ONE, CUBE))
case(aten.tensordot.default, lambda s: [s.f(5, 8, 3), s.f(5, 8, 4), [0, 1], [0, 1]], shards="m2 k0 k1 n2")
case(aten.tensordot.default, lambda s: [s.f(9, 2, 3), s.f(2, 4, 9), [1, 0], [0, 2]], shards="m2 k0 k1 n1")

# --- linear algebra, transforms, distances --------------------------------------------------------------------


def positive(s, *shape):
    """Symmetric matrices with positive eigenvalues."""
    a = s.f(*shape)
    return a @ a.mT + 3 * torch.eye(shape[-1], dtype=float64)


def triangle(s, *shape):
    return torch.linalg.cholesky(positive(s, *shape))


for shape in ((8, 3, 3), (5, 3, 3)):
    for name in ["linalg_inv_ex", "linalg_cholesky_ex", "cholesky", "linalg_lu_factor_ex", "linalg_lu", "linalg_qr",
                 "_linalg_eigh", "_linalg_det", "_linalg_slogdet", "linalg_matrix_exp", "linalg_ldl_factor_ex", "geqrf",
                 "_linalg_svd", "linalg_eig", "linalg_eigvals"]:  # fmt: skip
        case(getattr(aten, name).default, lambda s, n=shape: [positive(s, *n)], shards="b0")
    case(aten.cholesky_inverse.default, lambda s, n=shape: [triangle(s, *n)], shards="b0")
    case(aten.cholesky_solve.default, lambda s, n=shape: [s.f(*n[:-1], 4), triangle(s, *n)], shards="b0 r")
    case(aten.linalg_solve_triangular.default, lambda s, n=shape: [triangle(s, *n), s.f(*n[:-1], 4)],
         lambda s: {"upper": False}, shards="b0 r")  # fmt: skip
    case(aten.linalg_solve_triangular.default, lambda s, n=shape: [triangle(s, *n), s.f(n[0], 4, n[1])],
         lambda s: {"upper": False, "left": False}, shards="b0 r")  # fmt: skip
    case(aten.triangular_solve.default, lambda s, n=shape: [s.f(*n[:-1], 4), triangle(s, *n)], shards="b0 r")
    case(aten._linalg_solve_ex.default, lambda s, n=shape: [positive(s, *n), s.f(*n[:-1], 4)], shards="b0 r")
    case(aten._linalg_solve_ex.default, lambda s, n=shape: [positive(s, *n), s.f(*n[:-1])], shards="b0")
    case(aten.linalg_lu_solve.default, lambda s, n=shape: [*torch.linalg.lu_factor(positive(s, *n)), s.f(*n[:-1], 4)],
         shards="b0 r")  # fmt: skip
    case(aten.lu_unpack.default, lambda s, n=shape: [*torch.linalg.lu_factor(positive(s, *n))], shards="b0")
    case(aten.linalg_householder_product.default, lambda s, n=shape: [*torch.geqrf(positive(s, *n))], shards="b0")
    case(aten.ormqr.default, lambda s, n=shape: [*torch.geqrf(positive(s, *n)), s.f(*n[:-1], 4)], shards="b0 r")
case(aten._linalg_solve_ex.default, lambda s: [positive(s, 2, 4, 3, 3), s.f(4, 3, 2)], shards="b0 b1 r", meshes=(CUBE,))
for shape, over in (((8, 6), [1]), ((5, 4, 3), [0, 2])):
    case(aten._fft_r2c.default, lambda s, n=shape, d=over: [s.f(*n), d, 0, True])
    case(aten._fft_c2c.default, lambda s, n=shape, d=over: [torch.complex(s.f(*n), s.f(*n)), d, 2, False])
    case(aten._fft_c2r.default, lambda s, n=shape, d=over: [torch.complex(s.f(*n), s.f(*n)), d, 1, 2 * n[-1] - 2])
case(aten._cdist_forward.default, lambda s: [s.f(2, 8, 3), s.f(2, 5, 3), 2.0, None], shards="~0 p r")
case(aten._cdist_backward.default, lambda s: [s.f(8, 5), s.f(8, 3), s.f(5, 3), 1.0, s.p(8, 5)], shards="p r")
case(aten._trilinear.default, lambda s: [s.f(8, 3), s.f(5, 3, 4), s.f(8, 4), [1, 3], [0], [1, 2], [2, 3]],
     shards="t0 t1 t2 t3")  # fmt: skip
case(aten.linalg_pinv.atol_rtol_tensor, lambda s: [positive(s, 8, 3, 3)],
     lambda s: {"atol": s.p(8) * 1e-9, "rtol": s.p() * 1e-9}, shards="b0")  # fmt: skip
for n in (2, 3):
    look, back = (getattr(aten, f"grid_sampler_{n}d{b}").default for b in ("", "_backward"))
    x, grid = (lambda s, n=n: s.f(5, 4, *[3] * n)), (lambda s, n=n: s.f(5, 4, *[2] * (n - 1), n))
    case(look, lambda s, x=x, g=grid: [x(s), g(s), 0, 0, False], shards="n c p0")
    case(back, lambda s, x=x, g=grid, n=n: [s.f(5, 4, 4, *[2] * (n - 1)), x(s), g(s), 0, 0, False, [True, True]],
         shards="n c p0")  # fmt: skip
case(aten.fractional_max_pool2d.default, lambda s: [s.f(4, 8, 6, 6), [2, 2], [3, 3], s.p(4, 8, 2)], shards="d0 d1")
