"""Every spec to every spec, in the simulator, and the plans that must not be wasteful."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx import Graph, GraphModule

from spmd_compiler import simulate
from spmd_compiler.collectives import collectives
from spmd_compiler.cost import PROFILES
from spmd_compiler.ir import Writer
from spmd_compiler.placements import Mesh, Spec, SpmdError
from spmd_compiler.redistribute import emit, plan

BYTES = PROFILES["bytes"]


def every_spec(mesh, ndim):
    options = [Replicate(), Partial("sum"), *(Shard(d) for d in range(ndim))]
    for placements in itertools.product(options, repeat=len(mesh.axes)):
        spec = Spec(mesh.axes, placements)
        yield spec
        for group in spec.nesting:
            rest = tuple(n for n in spec.nesting if n != group)
            for order in itertools.permutations(group):
                if order != group:
                    yield Spec(mesh.axes, placements, (*rest, order))


def redistributed(source, target, shape, mesh, profile=BYTES):
    """The local graph that redistributes one value, and its collectives."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    steps = plan(source, target, shape, 4, mesh, profile)
    graph = Graph()
    x = graph.placeholder("x")
    with mode:
        at = dict.fromkeys(mesh.axes, 0)
        x.meta["val"] = torch.empty([simulate.bind_tree(n, at) for n in source.local_shape(shape, mesh)])
    graph.output((emit(Writer(graph, mesh, x, mode), x, steps, shape),))
    gm = GraphModule(torch.nn.Module(), graph)
    return gm, collectives(list(graph.nodes))


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ({"a": 4}, (8, 4)),
        ({"a": 4}, (5, 3)),
        ({"a": 2, "b": 4}, (16, 8)),
        ({"a": 2, "b": 2}, (7, 5)),
        ({"a": 2, "b": 2, "c": 2}, (8,)),
    ],
)
def test_every_pair_keeps_the_value(sizes, shape):
    mesh = Mesh(sizes)
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    generator = torch.Generator().manual_seed(1)
    tried = 0
    for source, target in itertools.product(every_spec(mesh, len(shape)), repeat=2):
        partial = [
            t == s or not isinstance(t, Partial) for s, t in zip(source.placements, target.placements, strict=True)
        ]
        if not all(partial):
            with pytest.raises(SpmdError):
                plan(source, target, shape, 4, mesh, BYTES)
            continue
        gm, _ = redistributed(source, target, shape, mesh)
        pieces = simulate.split(value, source, mesh, generator)
        outs = simulate.run(gm, mesh, [[p] for p in pieces])
        got = simulate.join([o[0] for o in outs], target, mesh, shape)
        torch.testing.assert_close(got, value, msg=lambda m, s=source, t=target: f"{s} -> {t}: {m}")
        tried += 1
    assert tried > 8


@pytest.mark.parametrize(
    "source, target, kinds, wire",
    [
        # DTensor: all_gather + all_to_all + slice; here each device sends less than three of its pieces
        ("{dp: S(0), tp: S(1)}", "{dp: S(1), tp: S(0)}", ["all_to_all", "permute", "all_to_all"], (3 / 4 + 1 + 1 / 2)),
        # two gathers + slice: the inner axis comes out first, then the outer's pieces are shared
        ("{dp: S(0)@dp/tp, tp: S(0)@dp/tp}", "{dp: R, tp: S(0)}", ["permute", "all_gather"], 2),
        ("{dp: P(sum), tp: S(0)}", "{dp: S(0)@tp/dp, tp: S(0)@tp/dp}", ["reduce_scatter"], 1),
        ("{dp: P(sum), tp: S(0)}", "{dp: S(0)@dp/tp, tp: S(0)@dp/tp}", ["reduce_scatter", "permute"], 2),
        ("{dp: P(sum), tp: P(sum)}", "{dp: S(0), tp: S(1)}", ["reduce_scatter", "reduce_scatter"], None),
        ("{dp: S(0), tp: R}", "{dp: S(1), tp: R}", ["all_to_all"], None),
        ("{dp: R, tp: R}", "{dp: S(1), tp: S(0)}", [], 0),
    ],
)
def test_plans_on_two_by_four(source, target, kinds, wire):
    mesh, shape = Mesh({"dp": 2, "tp": 4}), (64, 64)
    _, found = redistributed(Spec.parse(source), Spec.parse(target), shape, mesh)
    assert sorted(c.kind for c in found) == sorted(kinds)
    if wire is not None:
        assert sum(c.wire_bytes for c in found) == pytest.approx(wire * 64 * 64 * 4 / 8)
