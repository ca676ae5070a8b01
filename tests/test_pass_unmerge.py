"""Linear layers on more than two dims: any of the leading dims may be sharded, evenly or not, and nothing is sent."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

import spmd_compiler as spmd
from spmd_compiler.passes.unmerge import grouping


@pytest.mark.parametrize(
    ("parted", "merged", "groups"),
    [
        ((2, 3, 4), (6, 4), [[0, 1], [2]]),
        ((2, 3, 4), (2, 12), [[0], [1, 2]]),
        ((2, 3, 4, 5), (6, 20), [[0, 1], [2, 3]]),
        ((6, 4), (6, 4), [[0], [1]]),
        ((6, 4), (4, 6), None),
        ((6, 4), (2, 3, 4), None),
        ((2, 0), (0,), None),
    ],
)
def test_grouping(parted, merged, groups):
    assert grouping(parted, merged) == groups


@pytest.mark.parametrize(
    ("shape", "dim"), [(s, d) for s in ((4, 8, 6), (5, 7, 6), (3, 2, 9, 6)) for d in range(len(s) - 1)]
)
def test_leading_dims_of_linear_layers_stay_where_they_are(shape, dim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3, bias=False), nn.LayerNorm(3)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    program = spmd.export(model, (x,), mesh={"a": 4}, placements={"input": {"a": Shard(dim)}}, profile="bytes")
    assert not program.collectives
    torch.testing.assert_close(program.simulate(x), model(x))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).square().sum()

    program = spmd.export(
        Loss(), (x,), mesh={"a": 4}, placements={"x": {"a": Shard(dim)}}, backward=True, profile="bytes"
    )
    assert not any(c.kind in ("all_gather", "all_to_all") and c.shape[-1] in (6, 10) for c in program.collectives)
    grads = program.simulate(x)[1]
    wanted = torch.autograd.grad(Loss()(x), [*model.parameters(), x])
    for (name, _), want in zip([*Loss().named_parameters(), ("x", None)], wanted, strict=True):
        torch.testing.assert_close(grads[name], want)


def test_a_sequence_sharded_loss():
    torch.manual_seed(0)
    head, x, y = nn.Linear(6, 11), torch.randn(2, 9, 6), torch.randint(0, 11, (2, 9))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x, y):
            return cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    program = spmd.export(
        Loss(), (x, y), mesh={"a": 4}, placements={"x": {"a": Shard(1)}, "y": {"a": Shard(1)}}, backward=True, profile="bytes"
    )
    loss, grads = program.simulate(x, y)
    torch.testing.assert_close(loss, Loss()(x, y))
    for name, want in zip(grads, torch.autograd.grad(Loss()(x, y), list(head.parameters())), strict=True):
        torch.testing.assert_close(grads[name], want)
