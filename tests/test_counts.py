"""What the literature counts of its own layouts, planned for wire bytes: it must come out of the solver."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd


class Layer(nn.Module):
    """BERT's: the norm stands behind the sum, so that gradients of queries, keys and values meet the residual's."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        x = self.norms[0](x + self.out(out))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Loss(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def equal_to_one_device(program, model, *args):
    loss = model(*args)
    found, grads = program.simulate(*args)
    torch.testing.assert_close(found, loss.detach())
    for (name, _), grad in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(grads[name], grad, msg=lambda m, name=name: f"{name}: {m}")


MEGATRON = {
    **{f"layers.*.{n}.{p}": {"tp": Shard(0)} for n in ("q", "k", "v", "up") for p in ("weight", "bias")},
    **{f"layers.*.{n}.weight": {"tp": Shard(1)} for n in ("out", "down")},
}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_megatron_bert_has_four_all_reduces_a_layer_but_one(layers):
    """Two in the forward and two in the backward; the first layer's input needs no gradient."""
    model, x = Loss(*(Layer(64, 4) for _ in range(layers))), torch.randn(3, 5, 64)
    program = spmd.export(model, (x,), mesh={"tp": 4}, placements=MEGATRON, backward=True, profile="bytes")
    assert Counter(c.kind for c in program.collectives) == {"all_reduce": 4 * layers - 1}
    assert {c.bytes for c in program.collectives} == {x.numel() * 4}
    assert program.gap == 0.0
    equal_to_one_device(program, model, x)


def test_a_zero3_perceptron_reduces_no_whole_parameter():
    model, x = Loss(nn.Linear(64, 64, False), nn.ReLU(), nn.Linear(64, 64, False)), torch.randn(512, 64)
    cut = {"*": {"dp": Shard(0)}}
    program = spmd.export(model, (x,), mesh={"dp": 4}, placements=cut, backward=True, profile="bytes")
    counts = Counter((c.kind, c.phase) for c in program.collectives if c.bytes > 4)
    # the first weight is not needed in the backward: x wants no gradient
    assert counts == {("all_gather", "forward"): 2, ("all_gather", "backward"): 1, ("reduce_scatter", "backward"): 2}
    assert program.gap == 0.0
    equal_to_one_device(program, model, x)


SUMS = {
    "a term is whole": lambda x, y, v: x + y @ v + (y * 2) @ v,
    "the whole term is last": lambda x, y, v: y @ v + (y * 2) @ v + x,
    "minus a multiple": lambda x, y, v: torch.sub(x, y @ v, alpha=2) - (y * 2) @ v,
    "a row is broadcast": lambda x, y, v: x[0] + y @ v + (y * 2) @ v,
    "behind a reshape": lambda x, y, v: (x + y @ v).reshape(-1) + ((y * 2) @ v).reshape(-1),
    "two whole terms": lambda x, y, v: x + y @ v + x.abs() + (y * 2) @ v,
}


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 2}, {"a": 3}], ids=str)
@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_a_sum_of_partial_and_whole_terms_is_reduced_once(case, mesh, dtype):
    draw = [torch.arange(n * m).reshape(n, m).mul(7).remainder(11).to(dtype) for n, m in ((5, 6), (5, 12), (12, 6))]

    def planned(function):
        cut = {"y": {a: Shard(1) for a in mesh}, "v": {a: Shard(0) for a in mesh}, "out": [Replicate()] * len(mesh)}
        return spmd.export(function, draw, mesh=mesh, profile="bytes", placements=cut)

    program = planned(lambda x, y, v: SUMS[case](x, y, v))
    assert program.wire_bytes == planned(lambda x, y, v: y @ v).wire_bytes
    torch.testing.assert_close(program.simulate(*draw), SUMS[case](*draw))
    program.verify()
