"""Steps whose weight gathers and gradient reductions hide behind computation."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from spmd_compiler import hidden, passes
from spmd_compiler.capture import capture_function
from spmd_compiler.collectives import message_bytes
from spmd_compiler.cost import PROFILES, Link
from spmd_compiler.ir import is_getitem
from spmd_compiler.passes.propagate import _Builder
from spmd_compiler.placements import Mesh
from spmd_compiler.problem import Tables
from spmd_compiler.program import Placements
from spmd_compiler.solve import _priced


class Net(nn.Module):
    def __init__(self, layers=2, width=32):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean()


def planned(profile, rows=64, overlap=True, placements=None, **options):
    model = Net()
    cut = {"x": {"a": Shard(0)}, "*weight": {"a": Shard(0)}} if placements is None else placements
    program = spmd.export(
        model, (torch.zeros(rows, 32),), mesh={"a": 4}, placements=cut, backward=True, profile=profile, overlap=overlap,
        **options,
    )  # fmt: skip
    return model, program


def slow(bandwidth, alpha=1e-6):
    link = Link(alpha, bandwidth)
    return dataclasses.replace(PROFILES["h100"], name=f"slow {bandwidth}", intra=link, inter=link, matmul={4: 1e9})


def parts(program):
    """(what shows, what may hide) of the emitted collectives, by what they read and who waits for them."""
    nodes = program.local.graph.graph.nodes
    out = program.local.graph.graph.output_node()
    params = {n for n, i in zip(nodes, program.local.inputs, strict=False) if i.kind == "param"}
    weights = set(params)
    for n in nodes:
        if n.op == "call_function" and n.all_input_nodes and all(m in weights for m in n.all_input_nodes):
            weights.add(n)
    grads = {v for v, o in zip(out.args[0], program.local.outputs, strict=True) if o.kind == "grad"}

    def for_gradients(n):
        def leads_there(u):
            return u is not out and (is_getitem(u) or len(u.all_input_nodes) == 1) and for_gradients(u)

        return n in grads or (bool(n.users) and all(map(leads_there, n.users)))

    shows = hides = 0.0
    for c in program.collectives:
        node = next(n for n in nodes if n.name == c.name)
        seconds = program.local.profile.collective(program.mesh, c.kind, (c.axis,), message_bytes(node))
        start = program.local.profile.collective(program.mesh, c.kind, (c.axis,), 0.0)
        may = node in weights or for_gradients(node)
        shows += start if may else seconds
        hides += seconds - start if may else 0.0
    return shows, hides


@pytest.mark.parametrize("bandwidth", [1e10, 1e7], ids=["compute is longer", "the wire is longer"])
def test_the_longer_of_computation_and_what_hides_counts(bandwidth):
    _, apart = planned(slow(bandwidth), overlap=False)
    _, beside = planned(slow(bandwidth))
    shows, hides = parts(beside)
    compute = apart.price - sum(parts(apart))
    assert hides > 0 and compute > 0
    if bandwidth == 1e10:
        assert [c.kind for c in beside.collectives] == [c.kind for c in apart.collectives]
        assert beside.price == pytest.approx(shows + compute)
    else:
        assert beside.price == pytest.approx(shows + hides) and hides > compute
    assert beside.price < apart.price and beside.gap < 1e-3
    assert beside.text().splitlines()[0].endswith("+overlap")


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x).square().mean()


def test_nothing_hides_behind_what_an_operator_itself_sends():
    """Rows of an image fetched from the neighbours, and a weight gathered, where computation is free."""
    placements = {"x": {"a": Shard(2)}, "conv.weight": {"a": Shard(0)}}
    free = dataclasses.replace(slow(1e7), matmul={4: 1e30}, memory={4: 1e30}, launch=0.0, overlap=True)
    program = spmd.export(
        Images(), (torch.zeros(2, 4, 16, 16),), mesh={"a": 4}, placements=placements, backward=True, profile=free
    )
    shows, hides = parts(program)
    assert "permute" in {c.kind for c in program.collectives} and hides > 0
    assert program.price == pytest.approx(shows + hides)


@pytest.mark.parametrize("bandwidth", [1e10, 1e8, 3e7])
def test_no_plan_has_a_shorter_step(bandwidth):
    """All choices of a product and its gradient, with weights for compute and for the wire."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16, 8, device="meta"))

        def forward(self, x):
            return (x @ self.weight).sum()

    mesh, prices = Mesh({"a": 2}), dataclasses.replace(slow(bandwidth, 1e-9), matmul={4: 1e8}, overlap=True)
    model, x = Product(), torch.zeros(32, 16, device="meta")
    specs = Placements(mesh, {"x": {"a": Shard(0)}, "weight": "auto"}, model)
    captured, *_ = capture_function(model, (x,), mesh=mesh, specs=specs, backward=True)
    builder = _Builder(passes.prepared(captured), mesh, prices, None)
    problem, tables = builder.problem, Tables(builder.problem)
    below = [i for i, ((n, *_), hub) in enumerate(builder.hubs.items()) if n in builder.hidden and not hub.tied]
    best = math.inf
    for picks in itertools.product(*(range(len(v.choices)) for v in problem.variables)):
        try:
            solution = _priced(problem, tables, list(picks), 0)
        except spmd.SpmdError:
            continue
        if not any(hub.tied and tree for hub, tree in zip(problem.hubs, solution.trees, strict=True)):
            best = min(best, hidden.step_of(problem, below, solution).seconds)
    found = hidden.ways(problem, below)[0].found
    assert found.bound <= best * (1 + 1e-9)
    assert math.isfinite(best) and best * (1 - 1e-9) <= found.price <= best * (1 + 1e-3)


@pytest.mark.parametrize("budget", [None, 30_000])
def test_the_result_is_that_of_one_device(budget):
    model, program = planned(slow(1e8), placements={"*": "auto"}, memory_budget=budget)
    x = torch.randn(64, 32)
    loss = model(x)
    found, grads = program.simulate(x)
    torch.testing.assert_close(found, loss.detach())
    for (name, _), grad in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(grads[name], grad)
    program.verify()
    if budget is not None:
        assert sum(program.memory.values()) <= budget
    shows, hides = parts(program)
    _, apart = planned(slow(1e8), placements={"*": "auto"}, overlap=False, memory_budget=budget)
    assert shows + hides <= program.price + 1e-12 and program.price <= apart.price * (1 + 1e-9)
