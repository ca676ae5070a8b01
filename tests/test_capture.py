"""Joint graphs of functions, ahead of time: names, kinds, phases, sources, seeds, nothing allocated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from spmd_compiler.annotations import constrain, constrain_op
from spmd_compiler.capture import capture_function
from spmd_compiler.ir import source_line
from spmd_compiler.placements import Mesh, Spec, SpmdError

MESH = Mesh({"dp": 2, "tp": 2})


def capture(model, *args, backward=False, **kwargs):
    return capture_function(model, args, kwargs, mesh=MESH, specs=lambda *a: Spec.replicate(MESH), backward=backward)


def run(captured, binding, *args, **kwargs):
    """The captured graph on one device: the user's result, mutations and gradients."""
    flat = iter(binding.flatten(args, kwargs))
    given = [torch.tensor(0) if i.kind == "seed" else next(flat) for i in captured.inputs]
    with torch.no_grad():
        outs = captured.graph(*given)
    found = list(zip(captured.outputs, outs, strict=True))
    result = binding.unflatten_outputs([v for o, v in found if o.kind == "output"])
    return (
        result,
        {o.name: v for o, v in found if o.kind == "mutation"},
        {o.name: v for o, v in found if o.kind == "grad"},
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.offset = torch.arange(4.0)

    def forward(self, batch, *args, scale=1.0, **kwargs):
        h = self.norm(self.linear(batch["x"]) + self.offset)
        loss = (h * scale - args[0]).square().mean()
        return loss, {"h": h, "scale": scale, "view": batch["x"].t(), "extra": kwargs["extra"] + 1}


def example():
    x = torch.randn(3, 4)
    return ({"x": x}, torch.randn(3, 4)), {"scale": 2.0, "extra": torch.ones(2)}


def test_names_and_values():
    torch.manual_seed(0)
    model = Net()
    args, kwargs = example()
    captured, binding = capture(model, *args, backward=True, **kwargs)
    assert [(i.name, i.kind) for i in captured.inputs] == [
        ("linear.weight", "param"),
        ("linear.bias", "param"),
        ("norm.weight", "param"),
        ("norm.bias", "param"),
        ("norm.running_mean", "buffer"),
        ("norm.running_var", "buffer"),
        ("norm.num_batches_tracked", "buffer"),
        ("batch.x", "input"),
        ("args.0", "input"),
        ("extra", "input"),
        ("constant.10", "buffer"),
    ]
    kinds = [o.kind for o in captured.outputs]
    assert kinds == ["mutation"] * 3 + ["output"] * 4 + ["grad"] * 4 and captured.num_forward_outputs == 7
    (loss, rest), mutated, grads = run(captured, binding, *args, **kwargs)
    want_loss, want = model(*args, **kwargs)
    want_loss.backward()
    torch.testing.assert_close((loss, rest), (want_loss, want))
    for name, value in mutated.items():
        torch.testing.assert_close(value, model.state_dict()[name])
    assert binding.grad_names == list(grads) == [n for n, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_phases_and_sources():
    args, kwargs = example()
    captured, _ = capture(Net(), *args, backward=True, **kwargs)
    nodes = [n for n in captured.graph.graph.nodes if n.op == "call_function"]
    products = [n for n in nodes if n.target is torch.ops.aten.mm.default]
    assert [n.meta["phase"] for n in products] == ["forward", "backward"]
    assert len({source_line(n) for n in products}) == 1 and source_line(products[0]).startswith("tests/test_capture.py:")
    assert not any(n.target is torch.ops.aten.addmm.default for n in nodes)


def test_meta_model_allocates_nothing():
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    captured, _ = capture(model, torch.empty(2, 1 << 20, device="meta"))
    assert [i.name for i in captured.inputs] == ["weight", "bias", "input"]


def test_tied_frozen_and_inputs_that_require_grad():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).sum()

    captured, binding = capture(Loss(), x, backward=True)
    _, _, grads = run(captured, binding, x)
    Loss()(x).backward()
    assert list(grads) == ["model.0.weight", "model.1.bias", "x"]
    torch.testing.assert_close(grads["model.0.weight"], model[0].weight.grad)
    torch.testing.assert_close(grads["x"], x.grad)


@pytest.mark.parametrize(
    "function, seeds",
    [
        (lambda x: F.dropout(x, 0.5), 1),
        (lambda x: torch.bernoulli(x.sigmoid()), 1),
        (lambda x: x + torch.randn_like(x), 1),
        (lambda x: x.relu(), 0),
        (lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), 0),
    ],
)
def test_seed(function, seeds):
    captured, _ = capture(function, torch.randn(3, 4))
    assert [i.kind for i in captured.inputs].count("seed") == seeds


def test_aliases():
    def function(x, y):
        x.add_(1)
        return x, y, y.t(), y.clone()

    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    captured, binding = capture(function, x.clone(), y)
    result, mutated, _ = run(captured, binding, x.clone(), y)
    torch.testing.assert_close(result, function(x.clone(), y))
    torch.testing.assert_close(mutated, {"x": torch.ones(2, 3)})


def test_constrain():
    def function(x):
        return constrain(x * 2, {"dp": Shard(-1), "tp": Replicate()})

    captured, _ = capture(function, torch.randn(3, 4))
    node = next(n for n in captured.graph.graph.nodes if n.target is constrain_op)
    assert node.args[1] == "{dp: S(1), tp: R}"
    x = torch.randn(3, 4)
    assert function(x).equal(x * 2)
    with pytest.raises(SpmdError, match=r"constrain.*test_capture.py:\d+.*no axis 'pp'"):
        capture(lambda x: constrain(x, {"pp": Shard(0)}), x)
    with pytest.raises(SpmdError, match=r"Shard\(2\).*dim out of range"):
        capture(lambda x: constrain(x, {"dp": Shard(2)}), x)
    for wrong in ({"dp": 1}, {"dp": None}, [None, "R"], "auto", ()):
        with pytest.raises(SpmdError, match=r"no placement"):
            capture(lambda x, wrong=wrong: constrain(x, wrong), x)


def test_loss_must_be_a_scalar():
    with pytest.raises(SpmdError, match="first output must be a real scalar loss"):
        capture(nn.Linear(2, 2), torch.randn(3, 2), backward=True)
