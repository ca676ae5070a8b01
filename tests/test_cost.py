"""Prices of links: what a node holds, which axis is inner, and the files that say so."""

import dataclasses
import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd
from spmd_compiler.cost import PROFILES, Link, Profile, profile_of
from spmd_compiler.placements import Mesh, SpmdError
from spmd_compiler.timeline import calls, seconds

NEAR, FAR = Link(1e-6, 100e9), Link(1e-5, 10e9)
PLAIN = Profile("plain", {4: 1e12}, 1e12, 0.0, NEAR, FAR, node_size=8)


@pytest.mark.parametrize(
    ("sizes", "order", "held"),
    [
        ({"dp": 64, "tp": 8}, (), {"dp": 1, "tp": 8}),
        ({"dp": 64, "tp": 8}, ("tp", "dp"), {"dp": 8, "tp": 1}),
        ({"dp": 64, "tp": 8}, ("dp",), {"dp": 8, "tp": 1}),
        ({"dp": 4, "tp": 2}, (), {"dp": 4, "tp": 2}),
        ({"dp": 16, "tp": 2}, (), {"dp": 4, "tp": 2}),
        ({"dp": 4, "cp": 8, "tp": 4}, (), {"dp": 1, "cp": 2, "tp": 4}),
        ({"dp": 4, "cp": 8, "tp": 4}, ("cp",), {"dp": 1, "cp": 8, "tp": 1}),
        ({"tp": 3, "dp": 3}, (), {"tp": 2, "dp": 3}),
        ({"x": 64}, (), {"x": 8}),
        ({"x": 64, "y": 1}, (), {"x": 8, "y": 1}),
        ({"tp": 4}, ("pp", "tp"), {"tp": 4}),
    ],
)
def test_what_a_node_holds_of_an_axis(sizes, order, held):
    profile = dataclasses.replace(PLAIN, order=order)
    assert {a: profile.in_node(Mesh(sizes), a) for a in sizes} == held


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_inside_a_node_has_its_link_and_one_across_nodes_the_network(kind):
    mesh = Mesh({"dp": 64, "tp": 8})
    for axis, link in (("tp", NEAR), ("dp", FAR)):
        alone = dataclasses.replace(PLAIN, intra=link, inter=link, node_size=1)
        assert PLAIN.collective(mesh, kind, (axis,), 1e6) == alone.collective(mesh, kind, (axis,), 1e6)
    # the same devices with the axes in the other order
    inner = dataclasses.replace(PLAIN, order=("tp", "dp"))
    assert inner.collective(mesh, kind, ("tp",), 1e6) == PLAIN.collective(Mesh({"tp": 8, "dp": 64}), kind, ("tp",), 1e6)
    assert inner.collective(mesh, kind, ("tp",), 1e6) > PLAIN.collective(mesh, kind, ("tp",), 1e6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{"x": 16}, {"x": 12}, {"x": 64, "y": 2}, {"y": 2, "x": 9}], ids=str)
def test_an_axis_that_leaves_its_node_costs_between_the_two_links(kind, sizes):
    mesh = Mesh(sizes)
    near, far = (dataclasses.replace(PLAIN, intra=k, inter=k) for k in (NEAR, FAR))
    low, seconds, high = (p.collective(mesh, kind, ("x",), 1e8) for p in (near, PLAIN, far))
    assert low < seconds <= high * (1 + 1e-9)
    # what a plan pays grows with bytes along a line, which the solver's tables rely on
    start = PLAIN.collective(mesh, kind, ("x",), 0.0)
    assert PLAIN.collective(mesh, kind, ("x",), 2e8) - start == pytest.approx(2 * (seconds - start))


def test_eight_network_cards_serve_a_ring_through_nodes_of_eight():
    mesh, size = Mesh({"x": 64}), 1e10
    seconds = PLAIN.collective(mesh, "all_gather", ("x",), size)
    assert seconds == pytest.approx(63 / 64 * size / (8 * FAR.bandwidth), rel=1e-3)
    # but an exchange sends 56 of 63 messages over each device's own
    assert PLAIN.collective(mesh, "all_to_all", ("x",), size) == pytest.approx(56 / 64 * size / FAR.bandwidth, rel=1e-3)


def test_the_inner_axis_is_cut_where_the_choice_is_free():
    """One of two axes must be gathered for a product: the one that the fast link joins."""
    x, w = torch.zeros(4096, 4096, device="meta"), torch.zeros(4096, 4096, device="meta")

    def gathered(order):
        profile = dataclasses.replace(PROFILES["h100"], order=order)
        rows = {"x": {"a": Shard(0), "b": Replicate()}, "out": {"a": Shard(0), "b": Shard(1)}}
        program = spmd.export(
            lambda x, w: x @ w, (x, w), mesh={"a": 8, "b": 8}, profile=profile,
            placements={**rows, "w": {"a": Shard(0), "b": Shard(1)}},
        )  # fmt: skip
        assert program.gap == 0.0
        return program

    inner, outer = gathered(()), gathered(("b", "a"))
    assert [c.axis for c in inner.collectives] == [c.axis for c in outer.collectives] == ["a"]
    assert outer.price < inner.price


FILE = """
base = "h100"
node_size = 4
order = ["tp", "dp"]
fuses = false
memory = {2 = 1e12, 4 = 2e12}

[matmul]
2 = 5e14

[intra]
alpha = 1e-6
bandwidth = 2e11
reduce_scatter = {alpha = 2e-6, bandwidth = 1e11}

[axis_links.pp]
alpha = 3e-5
bandwidth = 1e9
"""


def test_a_file_says_it_all(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    profile, mesh = profile_of(str(path)), Mesh({"pp": 2, "dp": 4, "tp": 2})
    assert profile.in_node(mesh, "dp") == 4 and profile.in_node(mesh, "tp") == 1
    assert profile.collective(mesh, "all_gather", ("dp",), 1e6) == pytest.approx(1e-6 * math.sqrt(3) + 0.75e6 / 2e11)
    assert profile.collective(mesh, "reduce_scatter", ("dp",), 1e6) == pytest.approx(2e-6 * math.sqrt(3) + 3e6 / 1e11)
    assert profile.collective(mesh, "permute", ("pp",), 1e6) == pytest.approx(3e-5 + 1e6 / 1e9)
    assert profile.inter == PROFILES["h100"].inter and not profile.fuses
    moved = [profile.compute(0.0, 1e6, n) - profile.launch for n in (1, 2, 4, 8)]
    assert moved == pytest.approx([1e-6, 1e-6, 5e-7, 5e-7])
    program = spmd.export(lambda x: x.abs(), (torch.ones(8),), mesh={"pp": 1, "dp": 4, "tp": 1}, placements={"x": {"dp": Shard(0)}}, profile=path)
    program.save(tmp_path / "p.spmd")
    assert spmd.load(tmp_path / "p.spmd").local.profile == profile


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('order = "tp"', "order is a list of axes"),
        ("memory = {x = 1}", "memory has rates"),
        ("matmul = 1e12", "matmul has rates"),
        ("intra = {alpha = 1, bandwith = 2}", "a link has no bandwith"),
        ("intra = {alpha = 1}", "a link is"),
        ("intra = 3", "a link is"),
        ("intra = {alpha = 1, bandwidth = 0}", r"bandwidth \(bytes/s\) = 0.0: a number above 0"),
        ("inter = {alpha = -1, bandwidth = 2}", "alpha .* of at least 0"),
        ("launch = 'fast'", "launch .* = 'fast'"),
        ("launch = nan", "launch .* = nan"),
        ("launch = true", "launch .* = True"),
        ("memory = -5", r"memory \(bytes/s\) = -5.0"),
        ("matmul = {2 = -1}", r"matmul\[2\] = -1.0"),
        ("[matmul]", r"matmul has rates .* not \{\}"),
        ("node_size = 2.5", "node_size = 2.5: a number of devices"),
        ("overlap = 'x'", "overlap is true or false, not 'x'"),
        ("nodes = 3", "a profile has no nodes"),
        ("ordr = ['dp']", "a profile has no ordr; did you mean 'order'"),
        ("order = 3", "order is a list of axes"),
        ("order = ['dp', 'dp']", "order names an axis twice"),
        ("axis_links = 3", "axis_links maps axes to links"),
        ("base = 'h10'", "unknown profile 'h10'; there are h100"),
        ("intra = {alpha = 1, bandwidth = 2, all_gathr = 3}", "a link has no all_gathr; did you mean 'all_gather'"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, line, message):
    path = tmp_path / "wrong.toml"
    path.write_text(line)
    with pytest.raises(SpmdError, match=f"wrong.toml: {message}"):
        profile_of(str(path))


@pytest.mark.parametrize("given", [{"order": ("tq", "dp")}, {"axis_links": {"tq": NEAR}}], ids=str)
def test_axes_that_the_mesh_lacks(given):
    profile = dataclasses.replace(PLAIN, **given)
    with pytest.raises(SpmdError, match=rf"{next(iter(given))} of profile 'plain': .* no axis 'tq'; its axes are dp, tp"):
        spmd.export(torch.abs, (torch.ones(8),), mesh={"dp": 2, "tp": 2}, profile=profile)
    with pytest.raises(SpmdError, match=r"intra is a Link\(alpha, bandwidth\), not 3"):
        dataclasses.replace(PLAIN, intra=3)


def test_where_nothing_fuses_every_operator_starts_a_kernel():
    def step(x, w):
        return (x @ w).exp().t().mul(2.0).sum()

    def priced(fuses):
        profile = dataclasses.replace(PROFILES["cpu"], name=f"fuses {fuses}", fuses=fuses)
        return spmd.export(step, (torch.ones(8, 8), torch.ones(8, 8)), mesh={"x": 2},
                           placements={"x": [Shard(0)]}, profile=profile)  # fmt: skip

    fused, apart = priced(True), priced(False)
    assert apart.price - fused.price == pytest.approx(3 * PROFILES["cpu"].launch)  # exp, mul and sum; a product has one
    assert seconds(calls(apart.local)) == pytest.approx(apart.price)
