"""What `bucket` joins, and that nothing else changes."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd
from spmd_compiler.collectives import collectives
from spmd_compiler.cost import PROFILES, Link
from spmd_compiler.timeline import timeline

SLOW = dataclasses.replace(PROFILES["h100"], name="slow", intra=Link(1e-5, 1e6), inter=Link(1e-5, 1e6))
KINDS = {
    # one axis `a` of 4: what moves, and the placements that make it move so
    "all_reduce": (lambda x, y: (x.sum(0), (y * 2).sum(0)), [Shard(0)], [Replicate()]),
    "all_gather": (lambda x, y: (x * 2, y.abs()), [Shard(1)], [Replicate()]),
    "reduce_scatter": (lambda x, y: (x.sum(0), (y * 2).sum(0)), [Shard(0)], [Shard(1)]),
    "all_to_all": (lambda x, y: (x * 2, y.abs()), [Shard(0)], [Shard(2)]),
}


def counts(program):
    return Counter(c.kind for c in program.collectives)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_two_become_one(kind, dtype):
    function, source, target = KINDS[kind]
    x, y = (torch.arange(8 * n * 8).remainder(13).reshape(8, n, 8).to(dtype) for n in (4, 12))

    def planned(**options):
        where = {"x": source, "y": source, "out.*": target}
        return spmd.export(
            lambda x, y: function(x, y), (x, y), mesh={"a": 4}, placements=where, profile=SLOW, **options
        )  # fmt: skip

    apart, joined = planned(), planned(buckets=True)
    assert counts(apart) == {kind: 2}
    assert counts(joined) == {kind: 1}
    assert joined.wire_bytes == apart.wire_bytes and joined.price < apart.price
    for got, want in zip(joined.simulate(x, y), apart.simulate(x, y), strict=True):
        assert torch.equal(got, want)
    joined.verify()


class Net(nn.Module):
    def __init__(self, layers=3, width=16):
        super().__init__()
        pairs = [(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)]
        self.layers = nn.Sequential(*(module for pair in pairs for module in pair))

    def forward(self, x):
        return self.layers(x).square().mean()


FSDP = {"x": {"a": Shard(0)}, "*.weight": {"a": Shard(0)}}


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize("placements", [{"x": {"a": Shard(0)}}, FSDP], ids=["data", "fsdp"])
def test_a_step_has_fewer_collectives_and_the_same_results(mesh, placements, tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(512, 16)

    def planned(**options):
        return spmd.export(model, (x,), mesh=mesh, placements=placements, backward=True, profile=SLOW, **options)

    apart, joined = planned(), planned(buckets=True)
    assert len(joined.collectives) < len(apart.collectives)
    assert joined.wire_bytes == apart.wire_bytes
    assert joined.local.price == apart.local.price and joined.price < apart.price
    assert joined.text() == planned(buckets=True).text()
    want, got = apart.simulate(x), joined.simulate(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    joined.verify()
    # what is saved is what starts of collectives cost less, and no more
    starts = [sum(SLOW.collective(p.mesh, c.kind, (c.axis,), 0.0) for c in p.collectives) for p in (apart, joined)]
    assert 0 < apart.price - joined.price < starts[0] - starts[1]
    big = next(c for c in joined.collectives if "in one" in c.why)
    assert "in one" in str(spmd.explain(joined, big))
    joined.save(tmp_path / "p.spmd")
    again = spmd.load(tmp_path / "p.spmd")
    assert again.text() == joined.text() and again.price == joined.price
    again.verify()


def step(program):
    return max(e.start + e.seconds for e in timeline(program.local))


@pytest.mark.parametrize("placements", [{"x": {"a": Shard(0)}}, FSDP], ids=["data", "fsdp"])
def test_beside_computation_nothing_is_joined_that_makes_the_step_longer(placements):
    def planned(alpha, **options):
        link = Link(alpha, 1e9)
        prices = dataclasses.replace(SLOW, name=f"start {alpha}", matmul={4: 1e10}, memory=1e12, intra=link, inter=link)
        return spmd.export(
            Net(), (torch.zeros(256, 16),), mesh={"a": 4}, placements=placements, backward=True, profile=prices,
            overlap=True, **options,
        )  # fmt: skip

    gained = 0
    for alpha in (1e-8, 1e-6, 1e-5):
        apart, joined = planned(alpha), planned(alpha, buckets=True)
        fewer = len(apart.collectives) - len(joined.collectives)
        assert step(joined) < step(apart) if fewer else step(joined) == step(apart)
        gained += fewer
        joined.verify()
    assert gained


def test_each_half_runs_what_it_did_apart():
    from spmd_compiler.passes import split

    model, x = Net(), torch.randn(32, 16)
    program = spmd.export(model, (x,), mesh={"a": 4}, placements=FSDP, backward=True, profile=SLOW, buckets=True)
    forward, backward = split.run(program.local)
    kinds = [Counter(c.kind for c in collectives(list(g.graph.nodes))) for g in (forward, backward)]
    assert kinds[0]["all_gather"] + kinds[1]["all_gather"] >= counts(program)["all_gather"]
    assert kinds[1]["reduce_scatter"] == counts(program)["reduce_scatter"]


@pytest.mark.parametrize(
    ("profile", "x"),
    [
        ("bytes", torch.zeros(32, 16)),
        (dataclasses.replace(SLOW, name="no start", intra=Link(0.0, 1e6), inter=Link(0.0, 1e6)), torch.zeros(32, 16)),
    ],
    ids=["bytes", "no start"],
)
def test_nothing_is_joined_where_it_does_not_pay(profile, x):
    model = Net()

    def text(**options):
        return spmd.export(model, (x,), mesh={"a": 4}, placements=FSDP, backward=True, profile=profile, **options).text()

    assert text() == text(buckets=True)


def test_one_that_needs_the_other_stays_apart():
    def chain(x, w):
        return ((x.sum(0).sin() * w).sum(0)).cos()

    x, w = (torch.randn(90, 16, dtype=torch.float64) for _ in range(2))
    rows = {"a": Shard(0)}
    program = spmd.export(chain, (x, w), mesh={"a": 3}, placements={"x": rows, "w": rows}, profile=SLOW, buckets=True)
    assert counts(program) == {"all_reduce": 2}
    torch.testing.assert_close(program.simulate(x, w), chain(x, w))


def test_views_of_what_is_joined_stand_behind_it():
    def function(x, y):
        return x.t().reshape(4, 16, 8) * 2, (y * 2).reshape(-1).cos()

    x, y = torch.randn(64, 8), torch.randn(64, 8)
    rows, prices = [Shard(0), Shard(0)], dataclasses.replace(spmd.PROFILES["h100"], memory=1e30, launch=0.0)
    program = spmd.export(
        function, (x, y), mesh={"a": 2, "b": 4}, profile=prices, overlap=True, buckets=True,
        placements={"x": rows, "y": [Shard(0), Replicate()], "out*": [Replicate(), Replicate()]},
    )  # fmt: skip
    program.verify()
