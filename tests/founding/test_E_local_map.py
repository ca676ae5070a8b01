"""Founding behaviours E: `local_map`, on two gloo ranks (and on a 1-d beside a 2-d mesh), and exported."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from test_backend import S0, S1, R, close, compiled, whole
from torch.distributed.tensor import DTensor, Partial, distribute_tensor, init_device_mesh

from gloo.measure import counted, pair_mesh
from spmd_compiler import SpmdError, export, local_map

P = Partial()


def product(w, x):
    return w @ x


def product_reduced(mesh, w, x):
    return funcol.all_reduce(w @ x, "sum", mesh)


def operands(w_placement, x_placement, grad=False, shapes=((12, 8), (8, 16))):
    """Distributed and plain ``W`` and ``X``."""
    torch.manual_seed(0)
    mesh = pair_mesh()
    plain = [torch.randn(s) for s in shapes]
    ours = [distribute_tensor(t, mesh, p) for t, p in zip(plain, (w_placement, x_placement), strict=True)]
    return [t.requires_grad_(grad) for t in ours], [t.requires_grad_(grad) for t in plain]


def called(function, *args, fullgraph=True):
    """The result and the collectives of a compiled function's second call."""
    program = compiled(function, fullgraph=fullgraph)
    program(*args)
    return counted(program, *args)


def check_E1():
    mesh = pair_mesh()
    (w, x), plain = operands([S1], [S0])
    mapped = local_map(product_reduced, [R], (None, [S1], [S0]), device_mesh=mesh)
    out, collectives = called(lambda w, x: mapped(mesh, w, x), w, x)
    assert collectives == {"all_reduce": 1}
    assert isinstance(out, DTensor) and out.placements == (R,)
    close(out, plain[0] @ plain[1])


def all_equal(mesh, a, b):
    flag = torch.tensor([torch.equal(a, b)])
    return bool(torch.all(funcol.all_gather_tensor(flag, 0, mesh)).item())


def product_gathered(mesh, w, x):
    return funcol.all_gather_tensor(w @ x, 0, mesh)


def check_E2():
    mesh = pair_mesh()
    (w, _), _ = operands([S1], [S0])
    mapped = local_map(all_equal, None, (None, [S1], [S1]), device_mesh=mesh)
    for other, want in ((w.detach(), True), (w.detach() + 1, False)):
        out, collectives = called(lambda a, b: mapped(mesh, a, b), w, other, fullgraph=False)
        assert out is want and collectives == {"all_gather": 1}
    # without DTensors the function's result is returned as it is
    a, b = torch.randn(6, 4), torch.randn(4, 8)
    for placements in (None, [S0]):
        plain = local_map(product_gathered, placements, (None, [S0], [R]), device_mesh=mesh)
        out, collectives = called(lambda a, b, f=plain: f(mesh, a, b), a, b)
        assert type(out) is torch.Tensor and collectives == {"all_gather": 1}
        torch.testing.assert_close(out, torch.cat([a @ b, a @ b]))


def scaled(x, w, scale=1.0):
    return x @ w * scale


def check_E3():
    (x, w), plain = operands([S0], [R], shapes=((16, 8), (8, 12)))
    want = plain[0] @ plain[1]

    @local_map(out_placements=[S0], in_placements=([S0], [R]))
    def decorated(x, w):
        return x @ w

    programs = {
        "placements": lambda x, w: local_map(scaled, [S0], ([S0], [R]))(x, w),
        "no placements": lambda x, w: local_map(scaled, [S0], None)(x, w),
        "a scalar": lambda x, w: local_map(scaled, [S0], ([S0], [R], None))(x, w, 2.0),
        "decorator": decorated,
        "tuple": lambda x, w: local_map(scaled, ([S0],), ([S0], [R]))(x, w),
    }
    for name, function in programs.items():
        out, collectives = called(function, x, w)
        assert collectives == {} and out.placements == (S0,), name
        close(out, want * (2 if name == "a scalar" else 1))
    for placements in (None, (None, None), ([S0], [R])):
        mapped = local_map(scaled, [S0], placements, device_mesh=pair_mesh())
        out, collectives = called(lambda x, w, f=mapped: f(x, w), *plain)
        assert type(out) is torch.Tensor and collectives == {}
        close(out, want)
    with pytest.raises(Exception, match="expects placements"):
        compiled(lambda x, w: local_map(scaled, [S0], ([S0], None))(x, w))(x, w)
    with pytest.raises(Exception, match="in_placements"):
        compiled(lambda x, w: local_map(scaled, [S0], ([S0],))(x, w))(x, w)
    with pytest.raises(Exception, match="out_placements"):
        compiled(lambda x, w: local_map(lambda x, w: (x @ w, x), ([S0],), ([S0], [R]))(x, w))(x, w)


def check_E4():
    mesh = pair_mesh()
    (w, x), plain = operands([S0], [S1])
    mapped = local_map(product_reduced, [R], (None, [S1], [S0]), device_mesh=mesh, redistribute_inputs=True)
    out, collectives = called(lambda w, x: mapped(mesh, w, x), w, x)
    assert sum(collectives.values()) == 3 and collectives["all_reduce"] == 1
    assert out.placements == (R,)
    close(out, plain[0] @ plain[1])
    strict = local_map(product_reduced, [R], (None, [S1], [S0]), device_mesh=mesh, redistribute_inputs=False)
    with pytest.raises(Exception, match="set redistribute_inputs=True"):
        compiled(lambda w, x: strict(mesh, w, x))(w, x)


def check_E5(given):
    (x, w), plain = operands([given], [R], grad=True, shapes=((4, 2), (2, 4)))
    mapped = local_map(
        product, [S0], ([S0], [R]), in_grad_placements=([S0], [P]), device_mesh=pair_mesh(), redistribute_inputs=True
    )
    out = compiled(lambda x, w: mapped(x, w))(x, w)
    assert out.placements == (S0,)
    out.to_local().sum().backward()
    (plain[0] @ plain[1]).sum().backward()
    assert x.grad.placements == (given,) and w.grad.placements == (R,)
    close([x.grad, w.grad], [t.grad for t in plain])


def check_E5_two_meshes(names):
    """X on four devices in a row, W on two by two: the same ranks."""
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("all",) if names else None)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp") if names else None)
    torch.manual_seed(0)
    plain = [torch.randn(8, 4).requires_grad_(), torch.randn(4, 6).requires_grad_()]
    x = distribute_tensor(plain[0].detach(), row, [S0]).requires_grad_()
    w = distribute_tensor(plain[1].detach(), grid, [R, S1]).requires_grad_()
    mapped = local_map(
        product, [S0, S0], ([S0], [R, R]), in_grad_placements=([S0], [P, P]), device_mesh=grid, redistribute_inputs=True
    )
    out, collectives = called(lambda x, w: mapped(x, w), x, w)
    assert collectives == {"all_gather": 1} and out.placements == (S0, S0) and out.device_mesh == grid
    close(out, plain[0] @ plain[1])
    whole(out).square().sum().backward()
    (plain[0] @ plain[1]).square().sum().backward()
    close([x.grad, w.grad], [t.grad for t in plain])
    assert (x.grad.device_mesh, x.grad.placements) == (row, (S0,)) and w.grad.placements == (R, S1)
    close(compiled(lambda x, w: x @ w)(x, w), plain[0] @ plain[1])
    uneven = distribute_tensor(torch.randn(5, 4), row, [S0])
    with pytest.raises(Exception, match="uneven pieces"):
        compiled(lambda x, w: x @ w)(uneven, w)


def check_E6(lower):
    """Intermediate values go in and come out, collectives of its own inside, gradients through it."""
    mesh = pair_mesh()
    (w, x), plain = operands([S1], [S0], grad=True)
    mapped = local_map(product_reduced, [R], (None, [S1], [S0]), in_grad_placements=(None, [S1], [S0]), device_mesh=mesh)
    out = compiled(lambda w, x: mapped(mesh, w * 2, torch.tanh(x)).relu(), lower)(w, x)
    want = ((plain[0] * 2) @ torch.tanh(plain[1])).relu()
    close(out, want)
    g = torch.randn(want.shape)
    out.backward(distribute_tensor(g, mesh, [R]))
    want.backward(g)
    # a function's own all_reduce sums the tangents of all devices, as c10d's does in eager
    close([w.grad, x.grad], [2 * t.grad for t in plain])


def test_E1(gloo4):
    gloo4(check_E1)


def test_E2(gloo4):
    gloo4(check_E2)


def test_E3(gloo4):
    gloo4(check_E3)


def test_E4(gloo4):
    gloo4(check_E4)


@pytest.mark.parametrize("names", [True, False])
def test_E5_two_meshes(gloo4, names):
    gloo4(check_E5_two_meshes, names)


@pytest.mark.parametrize("given", [S0, R], ids=str)
def test_E5(gloo4, given):
    gloo4(check_E5, given)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_E6(gloo4, lower):
    gloo4(check_E6, lower)


def check_E6_text():
    """The program's text has the region: its placements constrain what is around it, its own collective stands in it."""
    mesh = pair_mesh()
    mapped = local_map(product_reduced, [R], (None, [S1], [S0]), device_mesh=mesh)
    w, x = torch.randn(12, 8), torch.randn(8, 16)
    program = export(
        lambda w, x: mapped(mesh, w * 2, x).relu(), (w, x), mesh=mesh, placements={"w": [S1], "x": [S1]}, profile="bytes"
    )
    assert [c.kind for c in program.collectives] == ["all_to_all"]  # of x, as the region asks
    assert "_c10d_functional.all_reduce(" in program.text()
    with pytest.raises(SpmdError, match="in_placements"):
        unplaced = local_map(product_reduced, [R], None, device_mesh=mesh)
        export(lambda w, x: unplaced(mesh, w, x), (w, x), mesh=mesh)


def test_E6_text(gloo4):
    gloo4(check_E6_text)
