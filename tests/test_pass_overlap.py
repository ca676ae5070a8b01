"""The order of a local graph: collectives start early and are waited for late, and nothing else changes."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import spmd_compiler as spmd
from spmd_compiler import lower, passes
from spmd_compiler.collectives import is_collective
from spmd_compiler.cost import PROFILES, Link
from spmd_compiler.memory import curve, storage
from spmd_compiler.timeline import COMPUTE, timeline

# a matrix product of the net below takes about as long as the gather of its weight
LINK = Link(1e-6, 2e9)
EVEN = dataclasses.replace(PROFILES["h100"], name="even", matmul={4: 2e12}, memory=1e13, launch=1e-7, intra=LINK, inter=LINK)
aten = torch.ops.aten
FSDP = {"x": {"a": Shard(0)}, "*weight": {"a": Shard(0)}}


class Net(nn.Module):
    def __init__(self, layers=6, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def planned(mesh=None, placements=FSDP, rows=2048, profile=EVEN, **options):
    torch.manual_seed(0)
    return spmd.export(
        Net(), (torch.zeros(rows, 64),), mesh=mesh or {"a": 4}, placements=placements, backward=True, profile=profile,
        **options,
    )  # fmt: skip


def unordered(monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setitem(passes.ORDERING, "overlap", lambda local, profile: local)
        return planned(**options)


def step(program):
    return max(e.start + e.seconds for e in timeline(program.local))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize("rows", [16, 10])
def test_only_the_order_changes(monkeypatch, mesh, rows, overlaps):
    options = {"mesh": mesh, "rows": rows, "overlap": overlaps}
    before, after = unordered(monkeypatch, **options), planned(**options)
    calls = [Counter((n.name, n.target, n.args) for n in p.local.graph.graph.nodes if n.op != "output") for p in (before, after)]
    assert {(name, str(t), str(a)) for name, t, a in calls[0]} == {(name, str(t), str(a)) for name, t, a in calls[1]}
    after.local.graph.graph.lint()
    x = torch.randn(rows, 64)
    torch.testing.assert_close(after.simulate(x), before.simulate(x), rtol=0, atol=0)
    assert after.price == before.price
    after.verify()
    assert after.text() == planned(**options).text()


def test_gradients_are_reduced_where_they_are_made(monkeypatch):
    """No whole gradient lives until the end of the step."""
    before, after = unordered(monkeypatch), planned()
    nodes = list(after.local.graph.graph.nodes)
    scattered = [n for n in nodes if n.target is torch.ops.spmd.reduce_scatter.default]
    assert len(scattered) == 6
    assert all(nodes.index(n) == nodes.index(n.args[0]) + 1 for n in scattered)
    whole = 64 * 64 * 4
    last = [max(i for i, n in enumerate(p.local.graph.graph.nodes) if n.target is aten.mm.default) for p in (before, after)]
    held = [curve(p.local)[i] for p, i in zip((before, after), last, strict=True)]
    assert held[0] - held[1] == 5 * whole
    assert after.memory["activations"] <= before.memory["activations"]


def test_operands_that_live_on_are_left_alone():
    """A copy of a value that is read later anyway is not made before it is wanted."""

    def function(x):
        total = x.sum(0)  # partial
        y = x
        for _ in range(4):
            y = (y * total.sum()).sin()
        return y, total

    where = {"x": {"a": Shard(0)}, "out.0": {"a": Shard(0)}, "out.1": {"a": Replicate()}}
    program = spmd.export(function, (torch.zeros(8, 4),), mesh={"a": 4}, placements=where, profile="bytes")
    nodes = list(program.local.graph.graph.nodes)
    for node in filter(is_collective, nodes):
        readers = [n for n in node.args[0].users if n is not node]
        assert all(nodes.index(n) < nodes.index(node) for n in readers)


def test_what_is_priced_as_hidden_is_hidden(monkeypatch):
    """The order reaches the price, which takes gathers and reductions to run beside computation."""
    before, after = unordered(monkeypatch, overlap=True), planned(overlap=True)
    assert before.price == after.price
    assert step(after) < 0.8 * step(before)
    # what no order hides: the first gather and the last reduction
    ends = [e.seconds for e in timeline(after.local) if e.stream != COMPUTE]
    assert step(after) <= after.price + ends[0] + ends[-1] + 1e-6


def test_ordering_again_does_not_make_a_step_longer():
    program = planned(overlap=True, rows=512)
    before = step(program)
    passes.ORDERING["overlap"](program.local, program.local.profile)
    assert step(program) <= before


class Ends(Net):
    """What has weights comes first, and long computation without any behind it, which their gathers can't use."""

    def __init__(self):
        super().__init__(layers=3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        for _ in range(3):
            x = (x @ x.T @ x).tanh()
        return x.square().mean()


def test_asking_for_overlap_makes_no_step_longer():
    """Computation that nothing can run beside is no reason to gather."""
    link = Link(1e-7, 4e9)
    wire = dataclasses.replace(EVEN, name="ends", launch=1e-8, matmul={4: 5e11}, intra=link, inter=link)
    apart, beside = (
        spmd.export(Ends(), (torch.zeros(64, 64),), mesh={"a": 4}, placements=FSDP, backward=True, profile=wire, overlap=o)
        for o in (False, True)
    )
    assert step(beside) <= step(apart)


@pytest.mark.parametrize("bandwidth", [5e7, 2e9, 1e12])
def test_copies_are_gathered_one_ahead(bandwidth):
    """However slow the wire, no more than two copies that nobody has read yet are there."""
    link = Link(1e-6, bandwidth)
    profile = dataclasses.replace(EVEN, name=f"wire {bandwidth}", intra=link, inter=link)
    program = planned(overlap=True, profile=profile)
    gathers = {n for n in program.local.graph.graph.nodes if n.target is torch.ops.spmd.all_gather.default}
    assert len(gathers) >= 6
    unread, most = set(), 0
    for node in program.local.graph.graph.nodes:
        if not getattr(node.target, "is_view", False):
            unread -= {storage(n)[0] for n in node.all_input_nodes}
        unread |= {node} & gathers
        most = max(most, len(unread))
    assert most <= (2 if bandwidth < 1e12 else 1)


# --- real ranks ---------------------------------------------------------------------------------------------------


def trained(how):
    """Two steps of a compiled net equal those of one device; what stands between start and wait in its halves."""
    apart = []
    expand = lower.expand_collectives

    def watched(gm, groups):
        found = expand(gm, groups)
        nodes = list(found.graph.nodes)
        for n in nodes:
            if str(n.target) == "_c10d_functional.wait_tensor.default":
                apart.append(nodes.index(n) - nodes.index(n.args[0]))
                readers = [u for u in n.users if u.op != "output"]
                assert not readers or min(map(nodes.index, readers)) == nodes.index(n) + 1
        return found

    from spmd_compiler import runtime

    runtime.expand_collectives = watched
    try:
        torch.compiler.reset()
        torch.manual_seed(0)
        plain = Net(layers=3).double()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        ours = spmd.parallelize(copy.deepcopy(plain), mesh, {"*weight": {"a": Shard(0)}})
        wire = dataclasses.replace(EVEN, matmul={8: 2e12})
        step = torch.compile(ours, backend="spmd", options={"lower": how, "profile": wire, "overlap": True})
        for seed in range(2):
            x = torch.randn(2048, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            loss = step(distribute_tensor(x, mesh, [Shard(0), Replicate()]))
            loss.backward()
            want = plain(x)
            want.backward()
            torch.testing.assert_close(loss.full_tensor(), want)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    finally:
        runtime.expand_collectives = expand
    return apart


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_steps_on_real_ranks(gloo4, how):
    for apart in gloo4(trained, how):
        assert sum(n > 1 for n in apart) >= 4  # gathers of later layers and reductions of gradients
