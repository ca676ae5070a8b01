"""`local_map` in compiled programs, on two and four gloo ranks."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from test_backend import S0, S1, R, close, compiled, mesh_of, whole
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from spmd_compiler.local_map import local_map
from spmd_compiler.placements import Mesh
from spmd_compiler.program import export
from spmd_compiler.reader import parse
from spmd_compiler.symbolic import pieces as pieces_of


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


# --- regions of uneven pieces: sizes within are those of each rank's own piece --------------------------------------


def sized(piece):
    """Arithmetic that takes the number of rows of a piece, by name and within operators."""
    return piece * piece.mean(0) + piece.shape[0] + piece.sin().sum(-1, keepdim=True) - piece.flip(0)


@pytest.mark.parametrize(
    ("rows", "mesh", "placement"),
    [(7, {"p": 2}, {"p": S0}), (5, {"p": 4}, {"p": S0}), (3, {"p": 4}, {"p": S0}), (7, {"p": 2, "q": 2}, {"p": S0, "q": S0})],
)
def test_uneven_pieces(rows, mesh, placement):
    torch.manual_seed(0)
    x, w = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (rows, 3))
    mapped = local_map(sized, [*placement.values()], ([*placement.values()],))
    program = export(
        lambda x, w: mapped(x @ w).square().sum(), (x, w), mesh=mesh, placements={"x": placement}, backward=True
    )
    loss, grads = program.simulate(x, w)
    pieces = [(x @ w)[b:e] for b, e in pieces_of(rows, list(mesh.values())) if e > b]
    want = torch.cat([sized(piece) for piece in pieces]).square().sum()
    close([loss, grads["x"], grads["w"]], [want, *torch.autograd.grad(want, (x, w))])
    assert str(parse(program.text())) == program.text()


def check_uneven(how):
    """On real ranks, by torch's own methods, the shape of the whole given or not."""
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    x, w = torch.randn(7, 6), torch.randn(6, 6)
    a, b = distribute_tensor(x, mesh, [S0, R]).requires_grad_(), distribute_tensor(w, mesh, [R, S1]).requires_grad_()

    def step(x, w, given):
        y = (x @ w).redistribute(placements=[S0, R])
        shape = {"shape": y.shape, "stride": y.stride()} if given else {}
        return DTensor.from_local(sized(y.to_local()), mesh, y.placements, **shape).square().sum()

    for given in (False, True):
        x, w, a.grad, b.grad = x.detach().requires_grad_(), w.detach().requires_grad_(), None, None
        want = torch.cat([sized(piece) for piece in (x @ w).split(4)]).square().sum()
        want.backward()
        loss = torch.compile(step, backend="spmd", options={"lower": how})(a, b, given)
        loss.backward()
        close([whole(loss), whole(a.grad), whole(b.grad)], [want, x.grad, w.grad])
    with pytest.raises(Exception, match=r"from_local of \(7, 3\) as a piece of \(7, 6\).*elements along dim 0, not 7"):
        compiled(lambda x: DTensor.from_local(x.to_local(), mesh, [S0, R], shape=x.shape, stride=x.stride()))(
            distribute_tensor(w.detach().new_zeros(7, 6), mesh, [R, S1])
        )


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_uneven_pieces_on_ranks(gloo4, how):
    gloo4(check_uneven, how)
