"""What changes between calls of a compiled module: batch sizes, placements, and what of it must be an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import spmd_compiler as spmd

TP = {"up.weight": {"tp": Shard(0)}, "up.bias": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


def pair(mesh):
    torch.manual_seed(0)
    model = Net().double()
    placed = spmd.parallelize(copy.deepcopy(model), mesh, TP)
    torch.compiler.reset()
    return model, placed, torch.compile(placed, backend="spmd", options={"lower": "eager"})


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def sizes(order):
    """Steps of changing batch sizes; on some ranks the local piece keeps its size where on others it changes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, placed, step = pair(mesh)
    for n, placement in order:
        given = [placement, Replicate()]
        x, y = torch.randn(n, 6, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)
        model.zero_grad(), placed.zero_grad()
        loss, want = step(*(distribute_tensor(t, mesh, given) for t in (x, y))), model(x, y)
        loss.backward(), want.backward()
        torch.testing.assert_close(whole(loss), want)
        for (name, p), q in zip(placed.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=name)
    return len(order)


S, R = Shard(0), Replicate()


@pytest.mark.parametrize(
    "order",
    [
        [(8, S), (7, S), (8, S), (1, S)],
        [(8, S), (10, S), (7, S)],
        [(8, R), (10, R), (7, R)],
        [(8, S), (8, R), (10, S), (10, R)],
    ],
    ids=["uneven", "sharded", "replicated", "both"],
)
def test_batch_sizes(gloo4, order):
    assert gloo4(sizes, order) == [len(order)] * 4


def many():
    """More sizes than Dynamo's own limit of programs; past the one that it keeps, an error says what to do."""
    counts = range(1, 13)
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = torch.compile(lambda x: x.sin().sum(), backend="spmd", options={"lower": "eager"})
    with torch._dynamo.config.patch(accumulated_recompile_limit=len(counts)):
        for n in counts:
            x = torch.randn(n, 6)
            torch.testing.assert_close(step(distribute_tensor(x, mesh, [S, R])).full_tensor(), x.sin().sum())
        with pytest.raises(spmd.SpmdError, match=r"test_changes.py:\d+: <lambda> has 12 programs.*pad its inputs"):
            step(distribute_tensor(torch.randn(20, 6), mesh, [S, R]))
    return len(counts)


def test_more_sizes_than_programs_kept(gloo4):
    assert gloo4(many) == [12] * 4


def twice():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _, _, step = pair(mesh)
    x = distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [S, R]).requires_grad_()
    loss = step(x, torch.randn(8, 6, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(spmd.SpmdError, match="create_graph"):
        grad.full_tensor().square().sum().backward()
    return grad.shape


def test_second_derivatives_are_an_error_and_not_dropped(gloo4):
    assert gloo4(twice) == [(8, 6)] * 4


def again():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(spmd.SpmdError, match=r"'weight'.*P\(sum\)"):
        spmd.parallelize(nn.Linear(4, 4), mesh, {"weight": {"tp": Partial()}})
    model = spmd.parallelize(nn.Linear(4, 4), mesh, {"weight": {"tp": S}})
    spmd.parallelize(model, mesh, {"weight": {"tp": S}})  # nothing to do
    spmd.parallelize(model, mesh)
    with pytest.raises(spmd.SpmdError, match=r"'weight'.*export"):
        spmd.parallelize(nn.Linear(4, 4), mesh, {"weight": "auto"})
    with pytest.raises(spmd.SpmdError, match=r"'weight'.*'S0' is not 'R'.* did you mean 'S\(0\)'"):
        spmd.parallelize(nn.Linear(4, 4), mesh, {"weight": "S0"})
    with pytest.raises(spmd.SpmdError, match=r"'weight'.*already"):
        spmd.parallelize(model, mesh, {"weight": {"tp": Shard(1)}})
    program = spmd.export(nn.Linear(4, 4), (torch.ones(2, 4),), mesh={"a": 2})
    with pytest.raises(spmd.SpmdError, match=r"planned for mesh\(a=2\)"):
        program.compile(mesh)
    return True


def test_parallelize_twice_or_on_another_mesh(gloo4):
    assert all(gloo4(again))
