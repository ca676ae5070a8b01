"""``torch.compile(backend="spmd")`` on four gloo ranks, values and gradients against one device."""

import copy
import functools
import logging
import queue

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree

from spmd_compiler import runtime
from spmd_compiler.annotations import constrain
from spmd_compiler.parallelize import parallelize
from spmd_compiler.placements import SpmdError
from spmd_compiler.program import export
from spmd_compiler.runtime import direct
from spmd_compiler.verify import verify

MESHES = {}


def mesh_of(**sizes):
    key = tuple(sizes.items())
    if key not in MESHES:
        MESHES[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return MESHES[key]


def compiled(target, lower="eager", fullgraph=True, **options):
    torch.compiler.reset()
    return torch.compile(target, backend="spmd", fullgraph=fullgraph, options={"lower": lower, **options})


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(ours, theirs):
    torch.testing.assert_close(pytree.tree_map(whole, ours), theirs, rtol=1e-5, atol=5e-5)


def check(function, tensors, placements, lower="eager", mesh=None):
    """A function of tensors: results and gradients as on one device, for given placements of the tensors."""
    mesh = mesh or mesh_of(dp=2, tp=2)
    ours = [
        (distribute_tensor(t.detach(), mesh, p) if p else t.detach().clone()).requires_grad_(t.requires_grad)
        for t, p in zip(tensors, placements, strict=True)
    ]
    theirs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    got, want = compiled(function, lower)(*ours), function(*theirs)
    close(got, want)
    got, want = (pytree.tree_leaves(x) for x in (got, want))
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if isinstance(b, torch.Tensor) and b.requires_grad]
    if not pairs:
        return
    torch.manual_seed(7)
    weights = [torch.randn(b.shape) for _, b in pairs]
    sum((whole(a) * w).sum() for (a, _), w in zip(pairs, weights, strict=True)).backward()
    sum((b * w).sum() for (_, b), w in zip(pairs, weights, strict=True)).backward()
    for a, b, p in zip(ours, theirs, placements, strict=True):
        if b.requires_grad:
            torch.testing.assert_close(whole(a.grad), b.grad)
            if p and b.grad is not None:
                assert a.grad.placements == a.placements


def tensors(*shapes, grad=True):
    torch.manual_seed(1)
    return [torch.randn(s, requires_grad=grad) for s in shapes]


S0, S1, R = Shard(0), Shard(1), Replicate()

FUNCTIONS = {
    "matmul": (lambda x, w: torch.relu(x @ w), ((4, 8), (8, 6)), ([S0, R], [R, S1])),
    "mixed": (lambda x, w: (x + w).cumsum(0), ((4, 6), (6,)), ([S0, S1], None)),
    "plain first": (lambda w, x: w * x.sort(dim=0).values, ((6,), (4, 6)), (None, [S0, R])),
    "pytree": (lambda x, w: {"a": [x * 2, (w.sum(), 3)], "b": None}, ((4, 6), (4, 4)), ([S0, R], [R, S0])),
    "views": (lambda x, w: (x.t(), x.view(2, 2, 6), w[1:], w), ((4, 6), (4, 4)), ([S0, R], [S1, R])),
    "same twice": (lambda x, w: (lambda y: (y, y, y.t()))(x @ w), ((4, 6), (6, 4)), ([S0, R], [R, R])),
    "uneven": (lambda x, w: F.softmax(x @ w, -1), ((5, 3), (3, 7)), ([S0, R], [R, S1])),
    "empty pieces": (lambda x, w: x @ w, ((1, 3), (3, 1)), ([S0, S0], [S1, S1])),
    "detached": (lambda x, w: (x.detach() * w, (x * 2).argmax(1)), ((4, 6), (4, 6)), ([S0, R], [S0, R])),
    "gradient": (lambda x, w: torch.func.grad(lambda w: (x @ w).sin().sum())(w), ((4, 6), (6, 4)), ([S0, R], [R, S1])),
    "constrained": (lambda x, w: constrain(x @ w, {"dp": S1, "tp": S0}), ((4, 6), (6, 4)), ([S0, R], [R, S1])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(gloo4, name):
    gloo4(check_function, name, "eager")


@pytest.mark.parametrize("name", ["matmul", "views", "uneven"])
def test_functions_inductor(gloo4, name):
    gloo4(check_function, name, "inductor")


def check_function(name, lower):
    function, shapes, placements = FUNCTIONS[name]
    check(function, tensors(*shapes), placements, lower)
    with torch.no_grad():
        check(function, tensors(*shapes, grad=False), placements, lower)


def check_constraint():
    x = distribute_tensor(torch.randn(4, 4), mesh_of(dp=2, tp=2), [S0, R])
    y = compiled(lambda x: constrain(x * 2, {"dp": S1, "tp": S0}))(x)
    assert compiled(lambda x: constrain(x * 2, "{dp: S(1), tp: S(0)}"))(x).placements == y.placements
    assert y.placements == (S1, S0)
    assert constrain(x, {"tp": S1}).placements == (R, S1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.down(torch.relu(self.norm(self.up(x))))


NET = {"up.*": {"tp": S0}, "norm.*weight": {"tp": S0}, "down.weight": {"dp": S0, "tp": S1}}


def pair(placements=NET):
    torch.manual_seed(0)
    reference = Net()
    return parallelize(copy.deepcopy(reference), mesh_of(dp=2, tp=2), placements), reference


def same(model, reference):
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.placements == a.placements, name
            message = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=5e-5, msg=message)
    for (name, a), b in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(whole(a), b, msg=functools.partial("{}: {}".format, name))


def check_module(lower):
    """Mutated buffers, plain and distributed inputs, gradients that accumulate, evaluation."""
    model, reference = pair()
    program = compiled(model, lower)
    x = torch.randn(6, 8)
    for given in (distribute_tensor(x, mesh_of(dp=2, tp=2), [S0, R]), x):
        for _ in range(2):
            out, want = program(given), reference(x)
            close(out, want)
            out.full_tensor().square().sum().backward()
            want.square().sum().backward()
            same(model, reference)
    model.eval(), reference.eval()
    with torch.no_grad():
        close(program(x), reference(x))
    same(model, reference)


def check_frozen():
    model, reference = pair()
    for net in (model, reference):
        net.up.weight.requires_grad_(False)
        net.down.bias.requires_grad_(False)
    x = torch.randn(6, 8)
    out, want = compiled(model)(x), reference(x)
    out.full_tensor().sum().backward()
    want.sum().backward()
    same(model, reference)


def check_graph_break():
    def function(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        return (y * 2).cumsum(1)

    mesh = mesh_of(dp=2, tp=2)
    x, w = tensors((4, 6), (6, 4))
    a, b = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in ((x, [S0, R]), (w, [R, S1])))
    out, want = compiled(function, fullgraph=False)(a, b), function(x, w)
    close(out, want)
    out.full_tensor().square().sum().backward()
    want.square().sum().backward()
    close([a.grad, b.grad], [x.grad, w.grad])


def check_tangents():
    """Tangents of every placement, layout and type; a graph kept for a second backward."""
    mesh = mesh_of(dp=2, tp=2)
    x, w = tensors((4, 6), (6, 4))
    a, b = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in ((x, [S0, R]), (w, [R, S1])))
    out, want = compiled(lambda x, w: x @ w)(a, b), x @ w
    g = torch.randn(4, 4)
    for tangent in (
        distribute_tensor(g, mesh, [R, R]),
        distribute_tensor(g, mesh, [S1, S0]),
        distribute_tensor(g.t().contiguous(), mesh, [R, S0]).t(),
        DTensor.from_local(g / 4, mesh, [Partial(), Partial()]),
    ):
        a.grad = b.grad = x.grad = w.grad = None
        out.backward(tangent, retain_graph=True)
        want.backward(g, retain_graph=True)
        close([a.grad, b.grad], [x.grad, w.grad])
    a.grad = b.grad = x.grad = w.grad = None
    out.sum().backward()  # expanded
    want.sum().backward()
    close([a.grad, b.grad], [x.grad, w.grad])


def check_version():
    """A parameter changed between forward and backward is noticed."""
    mesh = mesh_of(dp=2, tp=2)
    x, w = tensors((4, 6), (6, 4))
    a, b = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in ((x, [S0, R]), (w, [R, S1])))
    out = compiled(lambda x, w: x @ w)(a, b)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def check_mutation():
    def function(x, y):
        x.mul_(2)
        y.add_(x.sum(0))
        return x + y

    mesh = mesh_of(dp=2, tp=2)
    x, y = tensors((4, 6), (6,), grad=False)
    a, b = distribute_tensor(x.clone(), mesh, [S0, S1]), y.clone()
    close(compiled(function)(a, b), function(x, y))
    close([a, b], [x, y])

    def in_place(x, y):  # of what is no leaf, and read before and behind
        x.mul_(y)
        return (x.sin() * y).sum()

    def step(function, x, y):
        given = x * 1
        loss = function(given, y)
        (loss + given.square().sum()).backward()
        return loss, x.grad, y.grad, given

    x, y = tensors((6, 8), (1, 8))
    ours = [distribute_tensor(t.detach(), mesh, [S0, S1]).requires_grad_() for t in (x, y)]
    close(step(compiled(in_place), *ours), step(in_place, x, y))

    def writes(x, y):
        y.mul_(3)
        return x.sum(0)

    x = distribute_tensor(torch.ones(6, 8), mesh, [S0, R])
    with pytest.raises(SpmdError, match=r"inputs '[xy]' and '[xy]' share memory, and the program writes to one"):
        compiled(writes)(x, x.view(6, 2, 4))
    close(compiled(writes)(x, x.view(6, 2, 4).clone()), torch.full((8,), 6.0))


def check_views():
    """A result that is (a view of) an input shares its memory, a copy doesn't."""
    mesh = mesh_of(dp=2, tp=2)
    for function in (
        lambda x: x[:, 1:3], lambda x: x.detach(), lambda x: x.t(), lambda x: x.to(x.dtype), lambda x: x.clone(),
        lambda x: x.t().clone(), lambda x: x[:, 1:3].clone(), lambda x: x.contiguous(),
    ):  # fmt: skip
        x = torch.ones(6, 4)
        ours = distribute_tensor(x.clone(), mesh, [S0, R])
        compiled(function)(ours).mul_(2)
        function(x).mul_(2)
        close(ours, x)


def check_sparse():
    mesh = mesh_of(dp=4)
    x, s = distribute_tensor(torch.ones(6, 8), mesh, [S0]), torch.eye(6).to_sparse()
    ragged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    for function, given, words in (
        (lambda x, s: s @ x, (x, s), r"test_backend.py:\d+.* is sparse.*to_dense"),
        (lambda x: x.to_sparse() @ x.t(), (x,), r"test_backend.py:\d+: to_sparse\(\) is sparse.*to_dense"),
        (lambda x, n: n * 2 + x.sum(), (x, ragged), "nested tensor"),
    ):
        with pytest.raises(Exception, match=words):
            compiled(function, fullgraph=False)(*given)


def check_recurrent():
    torch.manual_seed(0)
    mesh = mesh_of(dp=2, tp=2)
    reference, x = nn.LSTM(8, 6), torch.randn(5, 4, 8)
    ours = parallelize(copy.deepcopy(reference), mesh, {"weight_*": {"tp": S0}})
    out, want = compiled(ours)(distribute_tensor(x, mesh, [S1, R]))[0], reference(x)[0]
    close(out, want)
    out.square().sum().backward(), want.square().sum().backward()
    for name, p in reference.named_parameters():
        close(ours.get_parameter(name).grad, p.grad)


def check_tensor_parallel(use_local, lower):
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    model = copy.deepcopy(reference)
    plan = {"0": ColwiseParallel(use_local_output=use_local), "2": RowwiseParallel(use_local_output=use_local)}
    parallelize_module(model, mesh, plan)
    if not use_local:
        parallelize_module(model, mesh, {"3": SequenceParallel(sequence_dim=0)})
    x = torch.randn(4, 8)
    out, want = compiled(model, lower)(x), reference(x)
    close(out, want)
    whole(out).square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), b.grad)


def check_sequence_parallel():
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    reference = nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
    model = copy.deepcopy(reference)

    class Wrap(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            return self.parts["down"](torch.relu(self.parts["up"](self.parts["norm"](x))))

    model, reference = Wrap(model), Wrap(reference)
    parallelize_module(
        model.parts,
        mesh,
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=S0),
            "down": RowwiseParallel(output_layouts=S0),
        },
    )
    parallelize_module(
        model, mesh, PrepareModuleInput(input_layouts=(R,), desired_input_layouts=(S0,), use_local_output=False)
    )
    x = torch.randn(8, 8)
    out, want = compiled(model, fullgraph=False)(x), reference(x)
    rank = dist.get_rank()
    torch.testing.assert_close(out, want[2 * rank : 2 * rank + 2])
    out.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), b.grad)


def check_distribute_module():
    torch.manual_seed(0)
    mesh = mesh_of(dp=4)
    reference = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    model = distribute_module(
        copy.deepcopy(reference),
        mesh,
        input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [S0]),
        output_fn=lambda module, out, mesh: out.redistribute(placements=[S0]).to_local(),
    )
    x = torch.randn(20, 20)
    rank = dist.get_rank()
    out, want = compiled(model, fullgraph=False)(x[5 * rank : 5 * rank + 5]), reference(x)
    assert not isinstance(out, DTensor)
    torch.testing.assert_close(out, want[5 * rank : 5 * rank + 5])
    out.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def check_random():
    """The same draws for every placement; other draws at the next call; `manual_seed` repeats them."""
    mesh = mesh_of(dp=2, tp=2)
    drawn = []
    x = torch.rand(8, 6)
    for placement in ([R, R], [S0, R], [S1, S0]):
        program = compiled(lambda x: (torch.bernoulli(x), F.dropout(x, 0.5)))
        a = distribute_tensor(x, mesh, placement)
        torch.manual_seed(11)
        first, second = program(a), program(a)
        assert not whole(first[0]).equal(whole(second[0]))
        drawn.append([whole(v) for v in (*first, *second)])
    for other in drawn[1:]:
        for a, b in zip(drawn[0], other, strict=True):
            assert a.equal(b)


def check_plain():
    """Without DTensors and mesh the program is Inductor's alone (or runs as it is)."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    out = compiled(model)(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, model(x))


def check_mesh_option():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    out = compiled(model, mesh=mesh_of(dp=4))(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(2, 4))


def check_disagreement():
    mesh = mesh_of(dp=4)
    scale = 2.0 if dist.get_rank() == 1 else 3.0
    x = distribute_tensor(torch.randn(4, 4), mesh, [S0])
    with pytest.raises(SpmdError, match=r"(?s)ranks compiled different programs; line \d+ is.*on rank 1: "):
        compiled(lambda x: x * scale)(x)


def check_failure():
    """One rank can't compile: the others say so, and don't wait for ever."""
    mesh = mesh_of(dp=4)
    x = distribute_tensor(torch.randn(4, 4), mesh, [S0])
    placement = Shard(7) if dist.get_rank() == 2 else S0
    said = r"Shard\(7\)" if dist.get_rank() == 2 else r"rank 2 of the mesh could not compile.*test_backend.py:\d+.*Shard\(7\)"
    with pytest.raises(Exception, match=f"(?s){said}"):
        compiled(lambda x: constrain(x * 2, {"dp": placement}) + 1)(x)


def check_shapes_change():
    program = compiled(lambda x, s: x.softmax(-1) * s)
    for n in (4, 6, 8):
        (x,) = tensors((n, 4), grad=False)
        close(program(distribute_tensor(x, mesh_of(dp=4), [S0]), torch.ones(n, 1)), x.softmax(-1))


def check_submesh():
    """A parameter on a submesh and an input on the whole mesh meet in one program."""
    mesh = mesh_of(dp=2, tp=2)
    x, w = tensors((4, 6), (6, 4))
    a = distribute_tensor(x.detach(), mesh, [S0, R]).requires_grad_()
    b = distribute_tensor(w.detach(), mesh["tp"], [S1]).requires_grad_()
    out, want = compiled(lambda x, w: x @ w)(a, b), x @ w
    close(out, want)
    out.sum().backward()
    want.sum().backward()
    assert b.grad.device_mesh == b.device_mesh
    close([a.grad, b.grad], [x.grad, w.grad])


def check_direct(lower):
    """A program planned ahead of time, called without Dynamo: plain or distributed arguments, gradients beside."""
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    x = torch.randn(6, 8)

    class Loss(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            out = self.net(x)
            return out.square().sum(), F.dropout(out, 0.0)

    reference = Loss(Net())
    model = copy.deepcopy(reference)
    placements = {f"net.{k}": v for k, v in NET.items()}
    program = export(model, (x,), mesh=mesh, placements={**placements, "x": {"dp": S0}}, backward=True)
    parallelize(model, mesh, placements)
    run = direct(program.local, program.binding, mesh, lower, backward=True)
    for given in (x, distribute_tensor(x, mesh, [S0, R]), distribute_tensor(x, mesh, [S1, S0])):
        result, grads = run(given)
        reference.zero_grad()
        want = reference(x)
        close(result, want)
        want[0].backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(whole(grads[name]), parameter.grad, rtol=1e-5, atol=5e-5)
        close(list(model.buffers()), list(reference.buffers()))


def check_devices():
    """What was planned for cards, on whichever of them, runs where its ranks are."""
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)

    def f(x, w):
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        shift = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return F.pad(x * steps, (0, 3)) @ w + shift + torch.ones(3, device=x.device) + torch.tensor(2.0)

    programs = []
    for device in ("cuda:0", "cuda:1"):
        with FakeTensorMode():
            x, w = torch.empty(6, 8, device=device), torch.empty(11, 3, device=device)
        programs.append(export(f, (x, w), mesh=mesh, placements={"x": {"dp": S0}, "w": {"tp": S0}}))
    assert programs[0].text() == programs[1].text() and "device=cuda," in programs[0].text()
    x, w = torch.randn(6, 8), torch.randn(11, 3)
    verify(programs[1].local)
    close(programs[1].simulate(x, w), f(x, w))
    for lower in ("eager", "inductor"):
        close(programs[1].compile(mesh, lower)(distribute_tensor(x, mesh, [S0, R]), w), f(x, w))


CHECKS = [
    check_recurrent, check_views, check_sparse,
    check_constraint, check_devices, check_frozen, check_graph_break, check_tangents, check_version, check_mutation,
    check_sequence_parallel, check_distribute_module, check_random, check_plain, check_mesh_option,
    check_disagreement, check_failure, check_shapes_change, check_submesh,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_checks(gloo4, check):
    gloo4(check)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_module(gloo4, lower):
    gloo4(check_module, lower)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_direct(gloo4, lower):
    gloo4(check_direct, lower)


@pytest.mark.parametrize("use_local, lower", [(True, "eager"), (False, "eager"), (True, "inductor")])
def test_tensor_parallel(gloo4, use_local, lower):
    gloo4(check_tensor_parallel, use_local, lower)


def test_a_rank_that_waits_says_for_what(monkeypatch):
    said = queue.Queue()
    monkeypatch.setattr(runtime, "PATIENCE", 0.0)
    monkeypatch.setattr(logging.getLogger(runtime.__name__), "warning", lambda words, *given: said.put(words % given))
    with runtime._waiting("step"):
        assert "step is compiled here, and waits" in said.get(timeout=60)


def test_options():
    with pytest.raises(Exception, match=r"unknown option 'lowr'.*did you mean 'lower'"):
        compiled(lambda x: x + 1, lowr=1)(torch.ones(2))
    with pytest.raises(Exception, match=r"unknown option 'placements'.*spmd.parallelize\(model, mesh, placements\)"):
        compiled(lambda x: x + 1, placements={"x": "S(0)"})(torch.ones(2))
    with pytest.raises(Exception, match=r"are a mapping from names, not 3"):
        torch.compile(lambda x: x + 1, backend="spmd", options=3)(torch.ones(2))
    with pytest.raises(Exception, match=r"use 'inductor' or 'eager'"):
        compiled(lambda x: x + 1, lower="triton")(torch.ones(2))
    with pytest.raises(Exception, match=r"overlap is True or False, not 'no'"):
        compiled(lambda x: x + 1, overlap="no")(torch.ones(2))
    with pytest.raises(Exception, match=r"no modes \('max-autotune'\)"):
        torch.compile(lambda x: x + 1, backend="spmd", mode="max-autotune")(torch.ones(2))


def under(contract):
    torch.compiler.reset()
    model = parallelize(nn.Linear(8, 8), mesh_of(dp=4), {"weight": {"dp": Shard(0)}})
    try:
        torch.compile(model, backend="spmd", options={"lower": "eager", "profile": "bytes", **contract})(torch.ones(4, 8))
    except Exception as error:
        return str(error)
    return "kept"


def test_contracts_are_kept(gloo4):
    for contract, words in (
        ({"forbid": {"permute"}, "max_memory": "1GiB"}, "kept"),
        ({"forbid": {"*[dp]"}}, "a contract is broken: *[dp] is forbidden, and there is 1"),
        ({"max_memory": 10}, "10 B are allowed"),
        ({"expect": {"gather": 1}}, "names no collective"),
    ):
        assert all(words in said for said in gloo4(under, contract))
