"""Cases of test_ops.py: what is moved, looked up or slid over."""

import itertools
import math

import torch
from ops_cases import CUBE, DECOMPOSED, ONE, aten, case, prims
from torch import int64

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
case(aten.select.int, lambda s: [s.f(3, 8, 2), 0, -1], to=DECOMPOSED)
case(aten.select.int, lambda s: [s.b(3, 8, 2), 1, 2], to=DECOMPOSED)
case(aten.unbind.int, lambda s: [s.f(3, 8), 0], to=DECOMPOSED)
case(aten.split.Tensor, lambda s: [s.f(8, 5), 2, 1], to=DECOMPOSED)
case(aten.split.Tensor, lambda s: [s.f(8, 6), 3, 0], to=DECOMPOSED)
case(aten.split_with_sizes.default, lambda s: [s.f(8, 5), [1, 4], -1], to=DECOMPOSED)
case(aten.unfold.default, lambda s: [s.f(8, 5), 1, 3, 2], exact=True, shards="d0 d1")
case(aten.unfold.default, lambda s: [s.f(19), 0, 2, 4], exact=True, shards="d0")
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(8, 2), 1, 1, 3], to=DECOMPOSED)
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(8, 5), 1, 0, 9], to=DECOMPOSED)
case(aten.slice_scatter.default, lambda s: [s.f(8, 5), s.f(1, 5), 0, 5, 6], to=DECOMPOSED)
case(aten.slice_scatter.default, lambda s: [s.f(17), s.f(5), 0, 2, 15, 3], to=DECOMPOSED)
case(aten.select_scatter.default, lambda s: [s.f(8, 5), s.f(8), 1, 3], to=DECOMPOSED)
for shape, offset, dim1, dim2 in (
    ((8, 5, 5), 1, -1, 1), ((9, 9), 0, 0, 1), ((6, 8), -2, 0, 1), ((4, 11), -3, 1, 0), ((7, 2, 5), -1, 2, 0),
    ((5, 9), -4, 0, 1),
):  # fmt: skip
    factors = f"d{dim1 % len(shape)} d{dim2 % len(shape)}" if (offset, shape) != (-4, (5, 9)) else f"d{dim2}"
    where = (offset, dim1, dim2)
    case(aten.diagonal.default, lambda s, n=shape, w=where: [s.f(*n), *w], exact=True, shards=factors)
    case(
        aten.diagonal_scatter.default,
        lambda s, n=shape, w=where: [s.f(*n), s.f(*torch.diagonal(s.f(*n), *w).shape), *w], to=DECOMPOSED,
    )  # fmt: skip
case(aten.diagonal.default, lambda s: [s.b(8, 8)], exact=True, shards="d0 d1")
case(aten.flip.default, lambda s: [s.f(8, 5), [1]], exact=True, shards="d0 d1")
case(prims.rev.default, lambda s: [s.f(8, 5), [0, 1]], exact=True, shards="d0 d1")
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

# --- index --------------------------------------------------------------------------------------------------

case(aten.embedding.default, lambda s: [s.f(8, 4), s.i(2, 6)], shards="v d b0 b1")
case(aten.embedding.default, lambda s: [s.f(5, 3), s.i(4, high=5), 2], shards="v d b0")
for norm in (1.0, 2.0, 3.0, math.inf):
    case(aten.embedding_renorm.default, lambda s, n=norm: [s.f(8, 4), s.i(2, 6), 1.0, n], shards="v d")
case(aten.embedding_renorm.default, lambda s: [s.f(5, 3), s.i(4, high=5), 0.5, 2.0], shards="v d")
case(aten.gather.default, lambda s: [s.f(8, 6), 1, s.i(8, 1, high=6)], shards="d0 v")
case(aten.gather.default, lambda s: [s.f(5, 8), 0, s.i(3, 8, high=5)], shards="d1 v k")
case(aten.gather.default, lambda s: [s.f(8, 6), 0, s.i(8, 1)], shards="v k")
case(aten.gather.default, lambda s: [s.b(8, 6), 1, s.i(8, 2, high=6)], shards="d0 k")
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
case(aten.index_reduce.default, lambda s: [s.f(9, 3), 0, s.i(5, high=9), s.f(5, 3), "amax"], shards="v d1")
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
case(aten.empty.memory_format, lambda s: [[8, 3]], shards="d0", uninitialised=True)
case(aten.scalar_tensor.default, lambda s: [0.0], exact=True)
case(
    prims.iota.default, lambda s: [9],
    lambda s: {"start": 2, "step": 3, "dtype": int64, "device": torch.device("cpu"), "requires_grad": False}, shards="d0",
)  # fmt: skip

# --- windows ---------------------------------------------------------------------------------------------------


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
    case(aten._adaptive_avg_pool2d.default, lambda s, n=shape, m=size: [s.f(*n), m], to=DECOMPOSED)
    case(aten.adaptive_max_pool2d.default, lambda s, n=shape, m=size: [s.f(*n), m], to=DECOMPOSED)
case(aten._adaptive_avg_pool3d.default, lambda s: [s.f(1, 2, 5, 4, 6), [3, 2, 4]], to=DECOMPOSED)
case(aten._adaptive_avg_pool2d.default, lambda s: [s.f(0, 2, 8, 7), [4, 5]], to=DECOMPOSED)
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

case(aten.tensordot.default, lambda s: [s.f(5, 8, 3), s.f(3, 4), [2], [0]], shards="m0 m1 k0 n1", meshes=(ONE, CUBE))
case(aten.tensordot.default, lambda s: [s.f(5, 8, 3), s.f(5, 8, 4), [0, 1], [0, 1]], shards="m2 k0 k1 n2")
case(aten.tensordot.default, lambda s: [s.f(9, 2, 3), s.f(2, 4, 9), [1, 0], [0, 2]], shards="m2 k0 k1 n1")


def fractional_backward(s, *shape):
    x, kernel, out = s.f(*shape), [2, 2], [3, 3]
    made, index = aten.fractional_max_pool2d(x, kernel, out, s.p(*shape[:2], 2))
    return [s.f(*made.shape), x, kernel, out, index]


for shape in ((4, 8, 6, 6), (3, 5, 6, 6)):
    case(aten.fractional_max_pool2d.default, lambda s, n=shape: [s.f(*n), [2, 2], [3, 3], s.p(*n[:2], 2)], shards="d0 d1")
    case(aten.fractional_max_pool2d_backward.default, lambda s, n=shape: fractional_backward(s, *n), shards="d0 d1")
