"""Cases of test_ops.py: what is computed."""

import math

import torch
import transformers.integrations.moe  # noqa: F401  (defines its operators)
from ops_cases import CASES, CUBE, DECOMPOSED, MESHES, NO_RULE, ONE, aten, case, prims
from torch import float32, float64, int64
from versions import TORCH

from spmd_compiler.placements import Mesh

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

# --- matmul -------------------------------------------------------------------------------------------------

case(aten.mm.default, lambda s: [s.f(8, 4), s.f(4, 6)], shards="m k n", meshes=(ONE, CUBE))
case(aten.mm.default, lambda s: [s.f(3, 5), s.f(5, 2)])
case(aten.bmm.default, lambda s: [s.f(4, 3, 8), s.f(4, 8, 2)], shards="b k")

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
for op in (aten.argmax, aten.argmin):
    case(op.default, lambda s: [s.i(8, 6, high=3), 1], shards="d0 r1")
    case(op.default, lambda s: [s.f(3, 6), 0, True], shards="r0")
    case(op.default, lambda s: [s.f(3, 6)], shards="r0 r1")
    case(op.default, lambda s: [s.i(9, 5, high=3), None, True], shards="r0 r1", meshes=(ONE, CUBE))
    case(op.default, lambda s: [torch.full((5, 6), -math.inf)], shards="r0 r1")
    case(op.default, lambda s: [s.f(8, 6).masked_fill_(s.b(8, 6), math.nan)], shards="r0 r1")
for op in (aten.var, aten.var_mean):
    case(op.correction, lambda s: [s.f(8, 5), [1]], lambda s: {"correction": 1, "keepdim": True}, shards="d0 r1")
    case(op.correction, lambda s: [s.f(8, 5, 2), [0, 2]], lambda s: {"correction": 0}, shards="r0 r2")
    case(op.correction, lambda s: [s.f(3, 5)], shards="r0 r1")
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
case(aten.histc.default, lambda s: [s.f(8, 3), 4, -1, 1], to=DECOMPOSED)
case(aten.histc.default, lambda s: [s.f(8, 5), 4], to=DECOMPOSED)
case(aten.histc.default, lambda s: [torch.ones(6), 3], to=DECOMPOSED)
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

# --- linear algebra, transforms, distances --------------------------------------------------------------------


def positive(s, *shape):
    """Symmetric matrices with positive eigenvalues."""
    a = s.f(*shape)
    return a @ a.mT + 3 * torch.eye(shape[-1], dtype=float64)


def triangle(s, *shape):
    return torch.linalg.cholesky(positive(s, *shape))


for shape in ((8, 3, 3), (5, 3, 3)):
    for name in ["linalg_inv_ex", "linalg_cholesky_ex", *["cholesky"] * (TORCH < (2, 14)), "linalg_lu_factor_ex", "linalg_lu", "linalg_qr",
                 "_linalg_eigh", "_linalg_det", "_linalg_slogdet", "linalg_matrix_exp", "linalg_ldl_factor_ex", "geqrf",
                 "_linalg_svd", "linalg_eig"]:  # fmt: skip
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
for x, over in (([8, 4], [1, 0] if TORCH > (2, 11) else [0, 1]), ([5, 8, 4], [1, 2])):  # torch 2.11 takes the last first
    case(aten._fft_c2c.default, lambda s, n=x, d=over: [torch.complex(s.f(*n), s.f(*n)), d, 2, False], to=DECOMPOSED)
for x, over in (([6, 4], [1, 0]), ([4, 8, 6], [0, 2])):
    case(aten._fft_r2c.default, lambda s, n=x, d=over: [s.f(*n), d, 0, True], to=DECOMPOSED)
    case(aten._fft_c2r.default, lambda s, n=x, d=over: [torch.fft.rfftn(s.f(*n), dim=d), d, 1, n[d[-1]]], to=DECOMPOSED)
case(aten.mode.default, lambda s: [s.i(13, high=5)], to=DECOMPOSED)
case(aten.mode.default, lambda s: [s.i(8, 5, high=3).to(float64), 1, True], to=DECOMPOSED)
case(aten.as_strided_copy.default, lambda s: [s.f(8, 5), [4, 3], [5, 2], 3], to=DECOMPOSED)
case(aten.topk.default, lambda s: [s.f(8, 12), 8], to=DECOMPOSED)
case(aten.topk.default, lambda s: [s.f(13), 13, 0, False], to=DECOMPOSED)
