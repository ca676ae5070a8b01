"""Simplifications of the whole graph that must come out of the solver: what is sent for a few lines of program."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd

R, ROWS, COLUMNS = [Replicate()], [Shard(0)], [Shard(1)]
F32 = 4
CASES = {
    # program, placements, (kind, bytes of the result) of every collective
    "sums of partials are reduced once": (
        lambda x, y: x @ y + (2 * x) @ y, {"x": COLUMNS, "y": ROWS, "out": R}, [("all_reduce", 64 * F32)]),
    "a reduce-scatter where only pieces are used": (
        lambda x, y: (x @ y).cos(), {"x": COLUMNS, "y": ROWS, "out": ROWS}, [("reduce_scatter", 16 * F32)]),
    "both, after a reshape": (
        lambda x, y: (x @ y + (2 * x) @ y).reshape(8, 2, 4).cos(), {"x": COLUMNS, "y": ROWS, "out": ROWS},
        [("reduce_scatter", 16 * F32)]),
    "one gather for all who read": (
        lambda x, y: (x.cos(), x.sin() * y, x), {"x": ROWS, "y": R, "out.*": R}, [("all_gather", 64 * F32)]),
    "above what grows data": (
        lambda x, y: (x[:, :1].double().cos()[:, None] * torch.ones(1, 5, 1)).sort(0).values, {"x": ROWS, "y": R, "out": R},
        [("all_gather", 8 * F32)]),
    "below what shrinks data": (
        lambda x, y: (x * 2).sum(1).sort(0).values, {"x": ROWS, "y": R, "out": R}, [("all_gather", 8 * F32)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent(case):
    function, placements, expected = CASES[case]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    program = spmd.export(
        lambda x, y: function(x, y), (x, y), mesh={"a": 4}, placements=placements, profile="bytes", name="case"
    )  # fmt: skip
    torch.testing.assert_close(program.simulate(x, y), function(x, y))
    program.verify()
    assert program.gap == 0.0
    assert [(c.kind, c.bytes) for c in program.collectives] == expected
