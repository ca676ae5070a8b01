"""Ranges of sharded dims through the compiled backend, on four gloo ranks, and what they send."""

import pytest
import torch
import torch.nn.functional as F
from test_backend import S0, S1, R, check, tensors
from torch.distributed.tensor import Shard

import spmd_compiler as spmd

FUNCTIONS = {
    "parts": lambda x, w: (x[1:], x[:, ::2], x[-1], x[2:7:2], *x.split(3, 0), x.narrow(1, 2, 3)),
    "put in": lambda x, w: (torch.cat([x, w, w[:1]], 0), F.pad(x, (1, 2, 3, -1), value=2.0), x.slice_scatter(w, 0, 2, 7)),
    "turns": lambda x, w: (x.flip(0, 1), x.roll(3, 1), w.repeat(3, 2), x.diff(dim=0)),
    "windows": lambda x, w: (x.unfold(0, 3, 2), F.avg_pool1d(x[None], 3, 2)[0], F.max_pool1d(x[None], 4, 1)[0]),
    "known places": lambda x, w: (x[torch.arange(8, -1, -2)], x[:, [0, 3, -1]], F.pad(x[None], (2, 3), mode="reflect")),
}
SHAPES = ((9, 6), (5, 6))


@pytest.mark.parametrize("where", [([S0, R], [R, S0]), ([S0, S1], [S1, R]), ([S0, S0], [S0, S0])], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranges(gloo4, name, where):
    gloo4(check_ranges, name, where, "eager")


@pytest.mark.parametrize("name", ["parts", "turns"])
def test_ranges_inductor(gloo4, name):
    gloo4(check_ranges, name, ([S0, S1], [S1, R]), "inductor")


def check_ranges(name, where, lower):
    check(FUNCTIONS[name], tensors(*SHAPES), where, lower)


N, COLUMNS = 64, 16
SENT = {  # rows that the busiest of four devices sends in each exchange, added up
    "a shift": (lambda x: torch.cat([x[2:], x[:2]]), 4),
    "differences": (lambda x: F.pad(x.diff(dim=0), (0, 0, 0, 1)), 2),
    "every other": (lambda x: x[::2], 0),
    "halves": (lambda x: x[:32] + x[32:], 32),
    "padded": (lambda x: F.pad(x, (0, 0, 2, 2)), 4),
    "turned": (lambda x: x.flip(0), 16),
    "rolled": (lambda x: x.roll(3, 0), 3),
}


@pytest.mark.parametrize("name", SENT)
def test_rows_sent(name):
    """Only what moves goes over the wire."""
    function, rows = SENT[name]
    x = torch.randn(N, COLUMNS)
    where = {"x": {"a": Shard(0)}, "out": {"a": Shard(0)}}
    program = spmd.export(function, (x,), mesh={"a": 4}, placements=where, profile="bytes")
    torch.testing.assert_close(program.simulate(x), function(x))
    assert program.wire_bytes <= rows * COLUMNS * 4
    assert {c.kind for c in program.collectives} <= {"permute", "all_to_all"}
