"""Our decompositions against the ops that they stand for."""

from types import SimpleNamespace

import opinfo
import ops_cases_compute  # noqa: F401  (fills DECOMPOSED)
import ops_cases_move  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from ops_cases import DECOMPOSED

from spmd_compiler import decompositions as ours
from spmd_compiler import export, resampling

TARGET = torch.tensor([[1, 2, -1, 0, 0, 0], [0, 3, 1, 2, 4, 5], [-1, 1, 1, 1, 1, 1], [4, 4, -1, 2, 2, 2]])


@pytest.mark.parametrize("reduction", range(3))
@pytest.mark.parametrize("rows", [4, None])
def test_multilabel_margin_loss(reduction, rows):
    x, target = (torch.randn(4, 6), TARGET) if rows else (torch.randn(6), TARGET[0])
    got = ours.multilabel_margin_loss(x, target, reduction)
    want = torch.ops.aten.multilabel_margin_loss_forward(x, target, reduction)
    torch.testing.assert_close(got, want)


def test_programs_have_the_right_multilabel_margin_loss():
    """Torch's own kernel for autograd goes before decomposition tables."""
    x = torch.randn(4, 6, requires_grad=True)
    program = export(F.multilabel_margin_loss, (x, TARGET), mesh={"dp": 2}, backward=True, placements={"input": "{dp: S(0)}"})
    loss, grads = program.simulate(x, TARGET)
    want = F.multilabel_margin_loss(x, TARGET)
    want.backward()
    torch.testing.assert_close([loss, grads["input"]], [want, x.grad])


@pytest.mark.parametrize("mode", [ours.SUM, ours.MEAN, ours.MAX])
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_embedding_bag(mode, padding, dtype, index):
    torch.manual_seed(0)
    weight = torch.randn(7, 4).to(dtype).requires_grad_()
    ids, offsets = torch.randint(0, 7, (12,)).to(index), torch.tensor([0, 4, 4, 5, 12]).to(index)
    got = ours.embedding_bag(weight, ids, offsets, mode=mode, padding=padding)
    want = torch.ops.aten._embedding_bag(weight, ids, offsets, False, mode, False, None, False, padding)
    torch.testing.assert_close(got[0], want[0])
    if mode == ours.MEAN:
        assert torch.equal(got[2], want[2])
    tangent = torch.randn(got[0].shape).to(dtype)
    grad = ours.embedding_bag_backward(tangent, ids, offsets, *got[1:], 7, False, mode, False, None, padding)
    (want_grad,) = torch.autograd.grad(want[0], weight, tangent)
    rounding = {"atol": 4e-3, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(grad, want_grad, **rounding)


@pytest.mark.parametrize("dim", [0, -1])
def test_weight_norm_backward(dim):
    torch.manual_seed(0)
    shape = (5, 3, 4)
    v = torch.randn(shape)
    g = torch.randn([n if d == dim % 3 else 1 for d, n in enumerate(shape)])
    _, norm = torch.ops.aten._weight_norm_interface(v, g, dim % 3)
    grad = torch.randn(shape)
    want = torch.ops.aten._weight_norm_interface_backward(grad, v, g, norm, dim % 3)
    torch.testing.assert_close(ours.weight_norm_backward(grad, v, g, norm, dim), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode, shape, size", [
    ("linear", (2, 3, 9), (5,)), ("bilinear", (2, 3, 5, 8), (10, 3)), ("bilinear", (2, 3, 1, 4), (3, 4)),
    ("trilinear", (1, 2, 4, 3, 5), (4, 6, 3)), ("bicubic", (2, 3, 6, 5), (4, 11)), ("bicubic", (2, 3, 2, 3), (1, 6)),
])  # fmt: skip
def test_resize(dtype, aligned, mode, shape, size):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    got = resampling.resize(x, size, aligned, [None] * 3, mode == "bicubic")
    rounding = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, F.interpolate(x, size, mode=mode, align_corners=aligned), **rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_programs_resize_by_a_factor(dtype, mode):
    """The factor given counts, not the sizes; whole numbers, which are rounded, are left to torch's own."""
    torch.manual_seed(0)
    x = (torch.rand(1, 2, 7, 9) * 200).to(dtype)
    program = export(lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode=mode), (x,), mesh={"dp": 2})
    rounding = {"atol": 1, "rtol": 0} if dtype == torch.uint8 else {}
    torch.testing.assert_close(program.simulate(x), F.interpolate(x, scale_factor=(1.7, 0.6), mode=mode), **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, size", [((2, 11, 7), (4, 5)), ((1, 2, 3, 8), (5, 2)), ((2, 2, 5, 4, 7), (2, 4, 3))])
def test_adaptive_pools(dtype, shape, size):
    """Places of the greatest too, of equals the first; means are rounded once."""
    torch.manual_seed(0)
    x = torch.randint(0, 4, shape).to(dtype)
    pool = F.adaptive_max_pool2d if len(size) == 2 else F.adaptive_max_pool3d
    assert resampling.adaptive_max_pool(x, size)[1].equal(pool(x, size, return_indices=True)[1])
    mean = F.adaptive_avg_pool2d if len(size) == 2 else F.adaptive_avg_pool3d
    torch.testing.assert_close(resampling.adaptive_avg_pool(x, size), mean(x.double(), size).to(dtype))
    x[0, 0, 2:4] = torch.nan
    torch.testing.assert_close(resampling.adaptive_max_pool(x, size)[0], pool(x, size), equal_nan=True)


def both_ways(function, args, mesh, placements):
    """A program with its gradients in the simulator, against the function itself."""

    def loss(*args):
        out = function(*args)
        return (out * torch.arange(out.numel(), dtype=out.dtype).cos().reshape(out.shape)).sum(), out

    given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
    program = export(loss, tuple(given), mesh=mesh, backward=True, placements=placements)
    (_, got), grads = program.simulate(*given)
    want_loss, want = loss(*given)
    torch.testing.assert_close(got, want)
    wanted = [a for a in given if a.requires_grad]
    torch.testing.assert_close(list(grads.values()), list(torch.autograd.grad(want_loss, wanted)))
    return program


@pytest.mark.parametrize("size", [(5, 3), (6, 20)], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_smooth_resizing(mode, size):
    torch.manual_seed(0)
    x = torch.randn(2, 1, 12, 8, dtype=torch.float64)
    both_ways(
        lambda x: F.interpolate(x, size, mode=mode, antialias=True), (x,), {"dp": 2}, {"args.0": "{dp: S(2)}"}
    )  # fmt: skip


def test_smooth_resizing_fetches_halos():
    x = torch.randn(1, 1, 64, 64)
    program = export(
        lambda x: F.interpolate(x, (32, 16), mode="bilinear", antialias=True), (x,), mesh={"dp": 4}, profile="bytes",
        placements={"x": "{dp: S(2)}", "out": "{dp: S(2)}"},
    )  # fmt: skip
    assert {c.kind for c in program.collectives} == {"permute"}
    assert program.wire_bytes <= 4 * 64 * 4


@pytest.mark.parametrize("mode, count, padding, aligned", [
    ("bilinear", 3, "zeros", False), ("bilinear", 3, "reflection", True), ("nearest", 3, "border", False),
    ("bilinear", 2, "border", True), ("nearest", 2, "reflection", False), ("bicubic", 2, "reflection", False),
])  # fmt: skip
def test_grid_sampling(mode, count, padding, aligned):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 5, 3, dtype=torch.float64) if count == 3 else torch.randn(2, 2, 4, 5, dtype=torch.float64)
    grid = torch.rand(2, *[3] * count, count, dtype=torch.float64) * 3 - 1.5
    both_ways(
        lambda x, grid: F.grid_sample(x, grid, mode, padding, aligned), (x, grid), {"dp": 2},
        {"args.0": "{dp: S(2)}", "args.1": "{dp: S(1)}"},
    )  # fmt: skip


@pytest.mark.parametrize("dim", [1, 2])
def test_unpooling(dim):
    torch.manual_seed(0)
    pooled, index = F.max_pool2d(torch.randn(2, 4, 8, 8), 2, return_indices=True)
    program = both_ways(
        lambda x, index: F.max_unpool2d(x, index, 2), (pooled, index), {"dp": 2},
        {"args.0": {"dp": f"S({dim})"}, "args.1": {"dp": f"S({dim})"}},
    )  # fmt: skip
    assert not program.replicated_ops


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_histograms(dim, weighted):
    torch.manual_seed(0)
    x, w = torch.randn(9, 2), torch.rand(9)
    x[0], x[1] = torch.tensor([0.5, -0.25]), torch.tensor([2.0, 9.0])

    def histograms(x, w):
        w = w if weighted else None
        whole, edges = torch.histogram(x.reshape(-1), 5, weight=None, density=True)
        some, _ = torch.histogram(x[:, 0].contiguous(), 4, range=(-1.0, 0.5), weight=w)
        given, _ = torch.histogram(x[:, 1].contiguous(), torch.tensor([-1.0, -0.25, 0.5, 9.0]), weight=w)
        return whole, edges, some, given, *torch.histogramdd(x, [2, 3], weight=w, density=weighted)

    program = export(histograms, (x, w), mesh={"dp": 3}, placements={"x": {"dp": f"S({dim})"}})
    torch.testing.assert_close(program.simulate(x, w), histograms(x, w))
    assert not program.replicated_ops


@pytest.mark.parametrize("case", DECOMPOSED, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_placement_of_what_is_made_of_other_ops(case):
    """Forward and backward, on one axis and two; and no plan need gather a sharded operand."""
    args, kwargs = case.make()
    args = [a.requires_grad_(a.is_floating_point() or a.is_complex()) if isinstance(a, torch.Tensor) else a for a in args]
    call = SimpleNamespace(input=args[0], args=tuple(args[1:]), kwargs=kwargs, output_process_fn_grad=lambda out: out)
    entry = opinfo.Entry(str(case), opinfo.Sample(SimpleNamespace(op=case.op), call))
    tried = opinfo.placements(entry.sample.tensors, 0, 5)
    assert any(s.sharding for _, specs in tried for s in specs)
    for i, (mesh, specs) in enumerate(tried):
        if entry.differentiable and i % 2 == 0:
            entry.check(mesh, specs, whole=True)
        local = entry.check(mesh, specs, whole=False, options=opinfo.SPARING)
        assert not local.replicated_ops
        assert mesh is opinfo.GRID or opinfo.gathered(local) is None, (specs, opinfo.gathered(local))


WRITES = {
    "slice": lambda x: x[:, 1:3].mul_(2.0),
    "strided slice": lambda x: x[..., ::2].add_(1.0),
    "select": lambda x: x.select(1, 2).mul_(3.0),
    "diagonal": lambda x: x.diagonal(0, 1, 2).zero_(),
    "index_put": lambda x: x.index_put_((torch.tensor([0, 3]),), torch.tensor(5.0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_through_a_view_keeps_the_strides_of_its_base(write):
    """Views of the base are taken anew of the result, and some are views of its strides alone."""

    def f(x):
        base = (x.permute(2, 0, 1) + 1.0).clone()  # strides are permuted, too
        WRITES[write](base)
        flat = base.permute(1, 2, 0).view(-1)
        return flat.sin().sum() + base.exp().mean()

    x = torch.randn(4, 4, 4, requires_grad=True)
    program = export(f, (x,), mesh={"dp": 2}, placements={"x": "{dp: S(1)}"}, backward=True)
    loss, grads = program.simulate(x)
    want = f(x)
    want.backward()
    torch.testing.assert_close([loss, grads["x"]], [want, x.grad])


@pytest.mark.parametrize("size, stride", [((4, 6), (6, 1)), ((2, 1, 12), (12, 1, 1)), ((24,), (1,))])
def test_all_elements_scattered_as_they_lie_are_a_reshape(size, stride):
    def f(x, source):
        return torch.as_strided_scatter(x * 2, source.sin(), size, stride)

    x, source = torch.randn(4, 6), torch.randn(size)
    program = export(f, (x, source), mesh={"dp": 2}, placements={"x": "{dp: S(0)}"})
    assert not program.replicated_ops
    torch.testing.assert_close(program.simulate(x, source), f(x, source))
