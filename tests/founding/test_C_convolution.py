"""Founding behaviours C: convolutions and their kin with sharded spatial dims, on four gloo ranks and simulated."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from test_backend import R, close, compiled, mesh_of, whole
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from gloo.measure import counted, pair_mesh
from spmd_compiler import export

PATCHES = ((7, 3, 8, 32), lambda: nn.Conv2d(3, 16, 4, stride=4))
DEPTHWISE = ((7, 8, 6, 64), lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8))
LAYERS = {"C1": PATCHES, "C2": DEPTHWISE}
COLUMNS = {"C1": 0, "C2": 3}  # that a device sends to each neighbour
W = Shard(3)


class Weighed(nn.Module):
    """The sum of a layer's results, each times what is given: its gradient is what is given."""

    def __init__(self, layer, x):
        super().__init__()
        self.layer, self.x = layer, nn.Parameter(x)

    def forward(self, g):
        return (self.layer(self.x) * g).sum()


def check_steps(name, lower):
    """Ten steps of SGD, as on one device."""
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    mesh, plain = pair_mesh(), make()
    nn.init.ones_(plain.weight)
    nn.init.zeros_(plain.bias)
    ours = distribute_module(copy.deepcopy(plain), mesh)
    run = compiled(ours, lower, profile="bytes")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (ours, plain)]
    first = True
    for _ in range(10):
        x = torch.randn(shape)
        a, b = distribute_tensor(x, mesh, [W]).requires_grad_(), x.clone().requires_grad_()
        want = plain(b)
        tangent = torch.randn(want.shape) * 1e-3
        if first:
            run(a)  # compiles
        out, forward = counted(run, a)
        _, backward = counted(out.backward, distribute_tensor(tangent, mesh, [W]))
        want.backward(tangent)
        if first:
            a.grad = None
            halo = COLUMNS[name] > 0
            assert forward == ({"all_to_all": 1} if halo else {})
            assert backward == {"all_reduce": 2} | ({"all_to_all": 1} if halo else {})
        first = False
        assert out.placements == (W,)
        close(out, want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.placements == (R,)
        assert (whole(p.detach()) - q).square().mean() <= 1e-6
        assert ((whole(p.detach()) - q) / (q.abs() + 1e-8)).square().mean() <= 1e-6


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_C1_C2_steps(gloo4, name, lower):
    gloo4(check_steps, name, lower)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_C1_C2_bytes(name, world):
    """A device sends its neighbours the columns that they lack, forward and once more for the input's gradient."""
    torch.manual_seed(0)
    shape, make = LAYERS[name]
    model = Weighed(make(), torch.randn(shape))
    g = torch.randn(model.layer(model.x).shape)
    program = export(
        model, (g,), mesh={"w": world}, placements={"x": {"w": W}, "g": {"w": W}}, backward=True, profile="bytes"
    )  # fmt: skip
    loss, grads = program.simulate(g)
    want = model(g)
    want.backward()
    close([loss, grads], [want.detach(), {n: p.grad for n, p in model.named_parameters()}])
    column = 4 * shape[0] * shape[1] * shape[2]
    neighbours = 1 if world == 2 else 2
    sent = {p: [c for c in program.collectives if c.kind == "permute" and c.phase == p] for p in ("forward", "backward")}
    for phase in ("forward", "backward"):
        assert [c.wire_bytes for c in sent[phase]] == [column * COLUMNS[name] * neighbours] * (COLUMNS[name] > 0)
    others = [(c.kind, c.shape) for c in program.collectives if c.kind != "permute"]
    assert sorted(others) == sorted([("all_reduce", ()), *(("all_reduce", tuple(p.shape)) for p in model.layer.parameters())])


# --- C3: what else slides a window ----------------------------------------------------------------------------


def convolutions(pick):
    """A random convolution and the shape of its input."""
    n, transposed = pick((1, 2, 3)), pick((False, False, True))
    groups = pick((1, 1, 2))
    channels = groups * pick((1, 2))
    kernel = [pick((1, 2, 3, 5)) for _ in range(n)]
    dilation = [pick((1, 1, 2)) for _ in range(n)]
    options = {"stride": [pick((1, 1, 2, 3)) for _ in range(n)], "dilation": dilation, "groups": groups,
               "bias": pick((True, False))}  # fmt: skip
    if transposed:
        options["output_padding"] = [pick(range(max(s, d))) for s, d in zip(options["stride"], dilation, strict=True)]
        options["padding"] = [pick(range(d * (k - 1) + 1)) for k, d in zip(kernel, dilation, strict=True)]
    elif pick((True, True, False)):
        options["padding"] = [pick(range(4)) for _ in range(n)]
        options["padding_mode"] = pick(("zeros", "zeros", "circular", "reflect", "replicate"))
    else:
        options["padding"] = pick(("same", "valid"))
        if options["padding"] == "same":
            options["stride"] = 1
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{n}d")
    sizes = [d * (k - 1) + pick((4, 5, 8, 9, 12)) for k, d in zip(kernel, dilation, strict=True)]
    return kind(channels, groups * pick((1, 2)), kernel, **options), (2, channels, *sizes)


def poolings(pick):
    n = pick((1, 2, 2, 3))
    kernel = [pick((2, 3)) for _ in range(n)]
    pad = [pick((0, 1)) for _ in range(n)]
    stride, ceil = [pick((1, 2, 3)) for _ in range(n)], pick((True, False))
    sizes = [pick((6, 8, 9, 12)) for _ in range(n)]
    layers = {
        "max": lambda: getattr(nn, f"MaxPool{n}d")(kernel, stride, pad, ceil_mode=ceil),
        "avg": lambda: getattr(nn, f"AvgPool{n}d")(kernel, stride, pad, ceil_mode=ceil, count_include_pad=pick((True, False))),
        "lp": lambda: getattr(nn, f"LPPool{n}d")(2, kernel if n > 1 else kernel[0], stride),
        "adaptive avg": lambda: getattr(nn, f"AdaptiveAvgPool{n}d")([pick((2, 3, 4)) for _ in range(n)]),
        "adaptive max": lambda: getattr(nn, f"AdaptiveMaxPool{n}d")([pick((2, 3, 4)) for _ in range(n)]),
        "dilated max": lambda: getattr(nn, f"MaxPool{n}d")(2, stride, dilation=2),
    }
    return layers[pick(list(layers))](), (2, 3, *sizes)


def others(pick):
    size = [pick((6, 8, 9)), pick((8, 12))]
    wanted = [2 * size[0], size[1] + 5]
    mode, aligned = pick(("nearest", "nearest-exact", "bilinear", "bicubic")), pick((True, False))
    corners = {"align_corners": aligned} if mode.startswith("bi") else {}
    pad = [pick(range(4)) for _ in range(4)]
    functions = {
        "resize": lambda x: F.interpolate(x, wanted, mode=mode, **corners),
        "unfold": lambda x: F.unfold(x, 3, padding=1, stride=(2, 1)),
        "fold": lambda x: F.fold(F.unfold(x, 2), size, 2),
        "pad": lambda x: F.pad(x, pad, mode=mode_of_pad),
        "windows": lambda x: x.unfold(2, 3, 1).unfold(3, 4, 2),
    }
    mode_of_pad = pick(("constant", "reflect", "replicate", "circular"))
    return Call(functions[pick(list(functions))]), (2, 2, *size)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(x) * self.scale


class Loss(nn.Module):
    """Of a layer and its input, which is a parameter so that its gradient is a result too."""

    def __init__(self, layer, x):
        super().__init__()
        self.layer, self.x = layer, nn.Parameter(x)

    def forward(self):
        y = self.layer(self.x)
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).square().sum()


MESHES = ({"a": 3}, {"a": 2, "b": 2}, {"a": 4})


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", [convolutions, poolings, others], ids=lambda f: f.__name__)
def test_C3_values(family, seed):
    """Values and gradients of random windows, one or two of their dims sharded, in even and uneven pieces."""
    pick = random.Random(f"{family.__name__} {seed}").choice
    torch.manual_seed(seed)
    layer, shape = family(pick)
    mesh = MESHES[seed % 3]
    dims = [pick(range(2, len(shape))) for _ in mesh]
    model = Loss(layer.double(), torch.randn(shape, dtype=torch.float64))
    where = {a: Shard(d) for a, d in zip(mesh, dims, strict=True)}
    program = export(model, (), mesh=mesh, placements={"x": where}, backward=True, profile="bytes")
    loss, grads = program.simulate()
    want = model()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grads, {n: p.grad for n, p in model.named_parameters()})
    assert program.gap <= 1e-6


def lacked(layer, shape, parts, out_dims):
    """The most elements of dim 2 that a device must send, from what each result depends on."""
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    for p in layer.parameters():
        nn.init.ones_(p)
    out = layer(x)
    owned = [set(c.tolist()) for c in torch.arange(shape[2]).chunk(parts)]
    sent = [0] * parts
    for device, piece in enumerate(out.chunk(parts, out_dims)):
        (g,) = torch.autograd.grad(piece.sum(), x, retain_graph=True)
        read = g.abs().sum([d for d in range(len(shape)) if d != 2]).nonzero().flatten().tolist()
        for i in read:
            for other in range(parts):
                sent[other] += other != device and i in owned[other]
    return max(sent)


FORWARDS = {
    "stride below kernel": (lambda: nn.Conv1d(2, 2, 5, stride=2, padding=2), (3, 2, 16)),
    "pieces below the halo": (lambda: nn.Conv1d(2, 2, 9, padding=4), (3, 2, 8)),
    "no padding, uneven": (lambda: nn.Conv2d(2, 2, 3), (3, 2, 19, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 4, stride=2, padding=1), (3, 2, 12, 3)),
    "depth": (lambda: nn.Conv3d(1, 2, 3, padding=1, dilation=1), (2, 1, 8, 3, 4)),
    "max": (lambda: nn.MaxPool2d(3, 2, 1), (3, 2, 16, 6)),
    "average": (lambda: nn.AvgPool2d(3, 1, 1), (3, 2, 12, 6)),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d((8, 3)), (3, 2, 20, 6)),
    "uneven adaptive max": (lambda: nn.AdaptiveMaxPool2d((8, 3)), (3, 2, 13, 7)),
    "cubic": (lambda: nn.Upsample((16, 9), mode="bicubic"), (3, 2, 8, 6)),
    "linear, small": (lambda: nn.Upsample((14, 9), mode="bilinear"), (3, 2, 7, 6)),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (3, 2, 12, 6)),
    "reflected": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (3, 2, 12, 6)),
    "repeated": (lambda: nn.Conv1d(2, 2, 5, stride=2, padding=2, padding_mode="replicate"), (3, 2, 16)),
    "circular": (lambda: nn.Conv2d(2, 2, 5, padding=2, padding_mode="circular"), (3, 2, 16, 6)),
    "circular, pieces below the halo": (lambda: nn.Conv1d(2, 2, 7, padding=3, padding_mode="circular"), (3, 2, 8)),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_C3_bytes(name):
    """No more is sent than what results of one device read of another's."""
    make, shape = FORWARDS[name]
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    program = export(
        layer, (x,), mesh={"a": 4}, placements={"input": {"a": Shard(2)}, "out": {"a": Shard(2)}}, profile="bytes"
    )  # fmt: skip
    torch.testing.assert_close(program.simulate(x), layer(x).detach())
    assert program.wire_bytes <= lacked(layer, shape, 4, 2) * 8 * x.numel() // shape[2]
    assert {c.kind for c in program.collectives} <= {"permute"}
    assert not program.replicated_ops


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_C3_bytes_backward(mode):
    """However a convolution is padded, the halo moves once forward and once, of the output's gradient, backward."""
    torch.manual_seed(0)
    shape, halo = (2, 3, 16, 6), 2
    layer = nn.Conv2d(3, 3, 2 * halo + 1, padding=(halo, 2), padding_mode=mode).double()
    model = Loss(layer, torch.randn(shape, dtype=torch.float64))
    program = export(model, (), mesh={"a": 4}, placements={"x": {"a": Shard(2)}}, backward=True, profile="bytes")
    loss, grads = program.simulate()
    want = model()
    want.backward()
    close([loss, grads], [want.detach(), {n: p.grad for n, p in model.named_parameters()}])
    row = 8 * shape[0] * shape[1] * shape[3]
    assert [c.wire_bytes for c in program.collectives if c.kind != "all_reduce"] == [2 * halo * row] * 2
    assert {c.kind for c in program.collectives} == {"permute", "all_reduce"}


def check_uneven(shape, where, mode):
    """Two spatial dims on two axes, uneven, through the compiled backend."""
    torch.manual_seed(0)
    mesh = mesh_of(dp=2, tp=2)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode=mode), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ours = distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(shape)
    a, b = distribute_tensor(x, mesh, where).requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(ours, profile="bytes")(a), plain(b)
    close(got, want)
    tangent = torch.randn(want.shape)
    (whole(got) * tangent).sum().backward()
    (want * tangent).sum().backward()
    close(a.grad, b.grad)
    assert a.grad.placements == a.placements
    close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


CASES = list(itertools.product([(2, 2, 9, 7), (1, 2, 8, 8)], [[Shard(2), Shard(3)], [Shard(3), Shard(3)]]))


@pytest.mark.parametrize(
    "shape, where, mode", [*((*case, "zeros") for case in CASES), (*CASES[0], "circular"), (*CASES[0], "reflect")], ids=str
)
def test_C3_processes(gloo4, shape, where, mode):
    gloo4(check_uneven, shape, where, mode)
