"""Our decompositions against the ops that they stand for."""

import pytest
import torch
import torch.nn.functional as F

from spmd_compiler import decompositions as ours
from spmd_compiler import export

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
