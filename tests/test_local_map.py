"""`local_map` in compiled programs, on two and four gloo ranks."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from test_backend import S0, S1, R, close, compiled, mesh_of, whole
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from spmd_compiler.local_map import local_map
from spmd_compiler.placements import Mesh
from spmd_compiler.program import export


def operands(mesh, w_placement, x_placement, grad=False):
    torch.manual_seed(0)
    w, x = torch.randn(12, 8), torch.randn(8, 16)
    ours = [distribute_tensor(t, mesh, p).requires_grad_(grad) for t, p in ((w, w_placement), (x, x_placement))]
    return ours, [w.requires_grad_(grad), x.requires_grad_(grad)]


def check_reduction():
    """The function's own all_reduce."""
    mesh = mesh_of(tp=4)
    (w, x), plain = operands(mesh, [S1], [S0])

    def product(mesh, w, x):
        return funcol.all_reduce(w @ x, "sum", mesh)

    mapped = local_map(product, [R], (None, [S1], [S0]), device_mesh=mesh)
    out = compiled(lambda w, x: mapped(mesh, w, x))(w, x)
    assert out.placements == (R,)
    close(out, plain[0] @ plain[1])


def check_gradients():
    """Gradients through the region, for intermediate operands, with placements of gradients given."""
    mesh = mesh_of(tp=4)
    (w, x), plain = operands(mesh, [R], [S0], grad=True)
    mapped = local_map(lambda x, w: x @ w, [S0], ([S0], [R]), in_grad_placements=([S0], [Partial()]))
    out = compiled(lambda x, w: mapped(w * 2, x.cumsum(0)).relu())(x, w)
    want = ((plain[0] * 2) @ plain[1].cumsum(0)).relu()
    close(out, want)
    out.full_tensor().square().sum().backward()
    want.square().sum().backward()
    close([w.grad, x.grad], [plain[0].grad, plain[1].grad])


def check_redistribution():
    mesh = mesh_of(tp=4)
    (w, x), plain = operands(mesh, [S0], [S1])
    mapped = local_map(lambda w, x: w @ x, [Partial()], ([S1], [S0]), redistribute_inputs=True)
    close(compiled(lambda w, x: mapped(w, x) * 1)(w, x), plain[0] @ plain[1])
    strict = local_map(lambda w, x: w @ x, [Partial()], ([S1], [S0]))
    with pytest.raises(Exception, match="redistribute_inputs=True"):
        compiled(lambda w, x: strict(w, x) * 1)(w, x)
    assert isinstance(mapped(w, x), DTensor)
    close(whole(mapped(w, x)), plain[0] @ plain[1])


@pytest.mark.parametrize("check", [check_reduction, check_gradients, check_redistribution])
def test_local_map(gloo4, check):
    gloo4(check)


def test_export():
    """Ahead of time the region is opaque, and its placements hold."""
    mapped = local_map(lambda x, w: x @ w, [Shard(0)], ([Shard(0)], [R]), in_grad_placements=([S0], [Partial()]))

    def loss(x, w):
        return mapped(x * 2, w).square().sum()

    torch.manual_seed(0)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    program = export(loss, (x, w), mesh=Mesh({"dp": 4}), placements={"x": [S0]}, backward=True, profile="bytes")
    got, grads = program.simulate(x, w)
    want = (x * 2 @ w).square().sum()
    want.backward()
    close(got, want)
    close([grads["x"], grads["w"]], [x.grad, w.grad])
    assert {c.kind for c in program.collectives} <= {"all_reduce"}
