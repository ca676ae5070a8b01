"""Founding behaviours B: the distribution API, on four gloo ranks and in the simulator."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_backend import S0, S1, R, close, compiled, mesh_of, whole
from torch import nn

import spmd_compiler as spmd
from gloo.measure import pair_mesh
from spmd_compiler import DTensor, Shard, distribute_module, distribute_tensor, export, parallelize

WORLD = 4


class MLP(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.net1 = nn.Linear(20, 16, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 12, device=device)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

    def reset_parameters(self):
        self.net1.reset_parameters()
        self.net2.reset_parameters()


def test_names_are_torch_s():
    """What torch's do needs no other name for it."""
    import torch.distributed.tensor as theirs

    for name in ("DTensor", "Shard", "Replicate", "Partial", "distribute_tensor", "distribute_module"):
        assert getattr(spmd, name) is getattr(theirs, name)
    assert spmd.init_device_mesh is dist.device_mesh.init_device_mesh
    assert "of its own yet" in spmd.local_map.__doc__  # ours: it says why


# --- B1, B2: distribute_tensor ------------------------------------------------------------------------------


def check_B1():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    for requires_grad in (True, False):
        t = torch.randn(3 * WORLD, 3, requires_grad=requires_grad)
        made = distribute_tensor(t, mesh, [S0])
        assert made.shape == (3 * WORLD, 3) and made.to_local().shape == (3, 3)
        assert made.requires_grad == requires_grad and made.is_leaf
        out = compiled(lambda x: x * 2)(made)
        close(out, t * 2)
        assert out.placements == (S0,) and out.requires_grad == requires_grad and out.to_local().shape == (3, 3)
        if requires_grad:
            out.sum().backward()
            close(made.grad, torch.full_like(t, 2.0))
            assert made.grad.placements == (S0,)
    last = distribute_tensor(torch.randn(3, 3 * WORLD), mesh, [Shard(-1)])
    assert last.placements == (S1,) and last.placements[0].dim == 1
    assert compiled(lambda x: x + 1)(last).placements == (S1,)


def check_B2():
    mesh, other = mesh_of(tp=4), mesh_of(dp=2, tp=2)
    t = torch.randn(12, 3)
    with pytest.raises(ValueError, match="must have the same length"):
        distribute_tensor(t, mesh, [S0, S1])
    with pytest.raises(RuntimeError, match="distribute leaf tensor"):
        distribute_tensor(torch.randn(12, 3, requires_grad=True) + 2, mesh, [S0])
    made = distribute_tensor(t, mesh, [S0])
    with pytest.raises(ValueError, match="to a different device mesh"):
        distribute_tensor(made, other, [S0, R])
    with pytest.raises(ValueError, match="to a different placements"):
        distribute_tensor(made, mesh, [S1])
    assert distribute_tensor(made, mesh, [S0]) is made


# --- B3: uneven ---------------------------------------------------------------------------------------------


def check_B3():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    for extra, dim in itertools.product((1, 2), range(3)):
        shape = [5, 6, 7]
        shape[dim] = 3 * WORLD + extra
        t = torch.randn(shape)
        made = distribute_tensor(t, mesh, [Shard(dim)])
        pieces = t.chunk(WORLD, dim)
        rank = dist.get_rank()
        assert made.shape == t.shape and torch.equal(made.to_local(), pieces[rank])
        out = compiled(lambda x: (x.tanh(), x.sum(0), x.softmax(1)))(made)
        close(out, (t.tanh(), t.sum(0), t.softmax(1)))
        assert torch.equal(out[0].to_local(), pieces[rank].tanh()) and out[0].placements == (Shard(dim),)


def test_B1(gloo4):
    gloo4(check_B1)


def test_B2(gloo4):
    gloo4(check_B2)


def test_B3(gloo4):
    gloo4(check_B3)


LABELS = torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(0))
COMPUTATIONS = {
    "matmul": lambda x, w: x @ w,
    "batched matmul": lambda x, w: torch.einsum("bi,cj->bcij", x, w.t()).sum(1),
    "sum": lambda x, w: x.sum(0) + w.sum(1).sum(),
    "mean": lambda x, w: x.mean() * w.mean(1),
    "extremes": lambda x, w: x.amax(0) - x.amin(1).sum() + w.amax(),
    "moments": lambda x, w: torch.var_mean(x, 0)[0] + x.std(1).sum() + w.var(),
    "softmax": lambda x, w: x.softmax(0) @ w.log_softmax(1),
    "logsumexp": lambda x, w: x.logsumexp(0) + w.logsumexp(0).sum(),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[1:]) @ w,
    "cross_entropy": lambda x, w: F.cross_entropy(x, LABELS[: x.shape[0]].clamp(max=x.shape[1] - 1)) + w.sum(),
    "mse": lambda x, w: F.mse_loss(x, x.detach().flip(0)) * w.sum(),
    "cumsum": lambda x, w: x.cumsum(0).cumsum(1) @ w,
    "sort": lambda x, w: x.sort(0).values @ w.topk(1, 1).values,
    "views": lambda x, w: x.t().reshape(-1)[: x.shape[0]] + torch.cat([x, x * 2], 0)[::2].sum(1) * w.sum(),
    "conv": lambda x, w: F.conv1d(x.unsqueeze(1), w.unsqueeze(1)[:, :, :2], padding=1).mean(0),
    "norm": lambda x, w: x / x.norm(dim=1, keepdim=True) + w.norm(),
}
PLACED = [(S0, R), (S1, R), (R, S0), (S0, S1), (S1, S0)]


@pytest.mark.parametrize("size", [13, 3])
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_B3_computing(name, size):
    """Sizes 3n + 1, and 3, of which the last of four ranks holds nothing: results and gradients."""
    torch.manual_seed(size)
    x, w = torch.randn(size, size + 1, requires_grad=True), torch.randn(size + 1, 5, requires_grad=True)

    def loss(x, w):
        out = COMPUTATIONS[name](x, w)
        return (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum()

    a, b = (t.detach().clone().requires_grad_() for t in (x, w))
    want = loss(a, b)
    want.backward()
    for px, pw in PLACED:
        program = export(loss, (x, w), mesh={"tp": 4}, placements={"x": [px], "w": [pw]}, backward=True)
        got, grads = program.simulate(x, w)
        torch.testing.assert_close([got, grads["x"], grads["w"]], [want, a.grad, b.grad])


# --- B4, B5: distribute_module ------------------------------------------------------------------------------


def check_B4():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    reference = MLP()
    rank = dist.get_rank()
    x = torch.randn(5 * WORLD, 20)
    mine = x[5 * rank : 5 * rank + 5]

    def shard_input(module, inputs, mesh):
        return DTensor.from_local(inputs[0], mesh, [S0])

    def local_output(module, outputs, mesh):
        assert isinstance(outputs, DTensor)
        return outputs.to_local()

    model = distribute_module(copy.deepcopy(reference), mesh, input_fn=shard_input, output_fn=local_output)
    for fullgraph in (True, False):
        reference.zero_grad(), model.zero_grad()
        out, want = compiled(model, fullgraph=fullgraph)(mine), reference(x)
        assert type(out) is torch.Tensor
        torch.testing.assert_close(out, want[5 * rank : 5 * rank + 5])
        out.square().sum().backward()
        want.square().sum().backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(a.grad, DTensor) and a.grad.placements == (R,)
            close(a.grad, b.grad)

    def replicate_input(module, inputs, mesh):
        return DTensor.from_local(inputs[0], mesh, [R])

    model = distribute_module(copy.deepcopy(reference), mesh, input_fn=replicate_input)
    reference.zero_grad(), model.zero_grad()
    out = compiled(model)(x)
    assert isinstance(out, DTensor)
    out.sum().backward()
    reference(x).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(a.grad, DTensor) and a.grad.placements == (R,)
        close(a.grad, b.grad)


def check_B5():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    reference, x = MLP(), torch.randn(5, 20)

    def shard(name, module, mesh):
        if isinstance(module, nn.Linear):
            for key, parameter in list(module.named_parameters()):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [S0])))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = distribute_module(
            copy.deepcopy(reference), mesh, shard,
            input_fn=lambda inputs, mesh: DTensor.from_local(inputs[0], mesh, [R]),
            output_fn=lambda outputs, mesh: outputs.redistribute(placements=[R]).to_local(),
        )  # fmt: skip
    assert sum(w.category is FutureWarning and "Deprecating" in str(w.message) for w in seen) == 2
    out = compiled(model, fullgraph=False)(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, reference(x))
    out.sum().backward()
    reference(x).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad.placements == (S0,)
        close(a.grad, b.grad)


# --- B6: casting --------------------------------------------------------------------------------------------


def check_B6():
    torch.manual_seed(0)
    mesh = pair_mesh()
    local = torch.randn(4, 6)
    for made in (DTensor.from_local(local, mesh, [S0]), distribute_tensor(torch.randn(8, 6), mesh, [S1])):
        low = made.to(torch.bfloat16)
        assert low.dtype == low.to_local().dtype == torch.bfloat16 and low.placements == made.placements
        for function in (lambda x: x * 2, lambda x: x.to(torch.bfloat16) * 2, lambda x: x.bfloat16().float().double()):
            for x in (made, low):
                got, want = compiled(function)(x), function(whole(x))
                assert got.dtype == want.dtype == got.to_local().dtype
                close(got, want)
    torch.manual_seed(0)
    reference = MLP()
    model = distribute_module(copy.deepcopy(reference), mesh).to(torch.bfloat16)
    assert all(p.dtype == p.to_local().dtype == torch.bfloat16 for p in model.parameters())
    x = torch.randn(8, 20)
    out = compiled(model)(distribute_tensor(x.bfloat16(), mesh, [S0]))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(whole(out), reference.bfloat16()(x.bfloat16()), rtol=2e-2, atol=2e-2)


def check_B6_autocast(lower):
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    reference = MLP()
    model = parallelize(copy.deepcopy(reference), mesh, {"net1.*": {"tp": S0}, "net2.weight": {"tp": S1}})
    x = torch.randn(8, 20)
    program = compiled(model, lower)
    with torch.autocast("cpu", torch.bfloat16):
        out, want = program(distribute_tensor(x, mesh, [S0, R])), reference(x)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(whole(out), want, rtol=2e-2, atol=2e-2)
    whole(out).float().square().sum().backward()
    want.float().square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32 and a.grad.placements == a.placements
        torch.testing.assert_close(whole(a.grad), b.grad, rtol=5e-2, atol=5e-2, msg=lambda m, n=name: f"{n}: {m}")
    out = program(distribute_tensor(x, mesh, [S0, R]))  # outside, in full precision
    assert out.dtype == torch.float32
    close(out, reference(x))


# --- B7: meta -----------------------------------------------------------------------------------------------


def check_B7():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    model = MLP(device="meta")

    def shard(name, module, mesh):
        if isinstance(module, nn.Linear):
            for key, parameter in list(module.named_parameters()):
                empty = torch.empty_like(parameter, device="cpu")
                module.register_parameter(key, nn.Parameter(distribute_tensor(empty, mesh, [S0])))

    model = distribute_module(model, mesh, shard)
    model.reset_parameters()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and not parameter.is_meta and parameter.device.type == "cpu"
        assert parameter.placements == (S0,)
    x = torch.randn(5, 20)
    reference = MLP()
    reference.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    close(compiled(model)(x), reference(x))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of numbers that one call made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and out.is_floating_point():
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


def check_B7_parallelize():
    """As initialised on one device; a rank keeps its own pieces and no more than one module is whole at a time."""
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(3)
    reference = nn.Sequential(*(MLP() for _ in range(4)))
    with torch.device("meta"):
        model = nn.Sequential(*(MLP() for _ in range(4)))
    torch.manual_seed(3)
    with Largest() as seen:
        parallelize(model, mesh, {"*.weight": {"dp": S0, "tp": S1}, "*.net1.bias": {"tp": S0}})
    assert seen.most <= 20 * 16 * 4
    for (name, a), b in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(a, DTensor) and isinstance(a, nn.Parameter) and not a.is_meta
        assert a._local_tensor.untyped_storage().nbytes() == a._local_tensor.numel() * 4, name
        assert a._local_tensor.numel() <= a.numel() // (4 if "weight" in name else 1)
        assert torch.equal(whole(a), b[1]), name


def test_B4(gloo4):
    gloo4(check_B4)


def test_B5(gloo4):
    gloo4(check_B5)


def test_B6(gloo4):
    gloo4(check_B6)


def test_B7(gloo4):
    gloo4(check_B7)


def test_B7_parallelize(gloo4):
    gloo4(check_B7_parallelize)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_B6_autocast(gloo4, lower):
    gloo4(check_B6_autocast, lower)
