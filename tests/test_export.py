"""What an exported program checks of its arguments, and what it refuses rather than get wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd

MESH = {"a": 4}
X = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))


def test_inputs_that_share_memory():
    def function(x, y):
        x.add_(1)
        return y * 2

    with pytest.raises(spmd.SpmdError, match="'x' and 'y' share memory"):
        spmd.export(function, (X, X), mesh=MESH)
    program = spmd.export(lambda x, y: x + y, (X, X), mesh=MESH)  # nothing changes: no harm
    torch.testing.assert_close(program.simulate(X, X), X + X)


def test_arguments_are_those_it_was_planned_for():
    program = spmd.export(lambda x, n=3: x * n, (X,), mesh=MESH)
    torch.testing.assert_close(program.simulate(X, 3), X * 3)
    for args, words in (((X, 4), "'n' is 4"), ((X.double(),), "float64"), ((X[:5],), r"\(5, 6\)"), (("x",), "str")):
        with pytest.raises(spmd.SpmdError, match=words):
            program.simulate(*args)


def test_draws_of_each_rank_are_refused():
    with pytest.raises(spmd.SpmdError, match=r"test_export.py:\d+.*poisson"):
        spmd.export(lambda x: torch.poisson(x.abs()), (X,), mesh=MESH)


def test_parameters_of_a_closure_are_refused():
    layer = nn.Linear(6, 6)
    with pytest.raises(spmd.SpmdError, match="export the module"):
        spmd.export(lambda x: layer(x).sum(), (X,), mesh=MESH, backward=True)


def test_verify_takes_outputs_of_any_dtype_and_coarse_steps_inside():
    def autocast(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ w
        return h.float().square().mean()

    spmd.export(
        lambda x: ((x > 0).any(0), x.argmax(1)), (X,), mesh=MESH, placements={"x": {"a": Shard(0)}}, verify=True
    )
    spmd.export(lambda x: x[:1][torch.tensor([0, 0, 0])], (X,), mesh=MESH, verify=True)
    spmd.export(
        autocast, (torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)), mesh={"a": 2, "b": 2},
        placements={"x": {"a": Shard(0), "b": Shard(1)}, "w": {"b": Shard(0)}}, backward=True, verify=True,
    )  # fmt: skip


def test_a_constraint_without_axes_is_replicate():
    program = spmd.export(lambda x: spmd.constrain(x * 2, {}) + 1, (X,), mesh=MESH, placements={"x": {"a": Shard(0)}})
    torch.testing.assert_close(program.simulate(X), X * 2 + 1)
    assert [c.kind for c in program.collectives] == ["all_gather"]
