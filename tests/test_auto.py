"""Placements that the solver chooses, and the memory budget they keep."""

import itertools
import re

import pytest
import torch
from prices import WIRES
from torch import nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

import spmd_compiler as spmd
from spmd_compiler.placements import Mesh


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return (self.down(self.up(x).relu()) * self.scale).square().mean()


class Deep(nn.Module):
    def __init__(self, layers=4, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x.square().mean()


def plan(model, x, **options):
    return spmd.export(model, (x,), mesh={"a": 4}, placements={"*": "auto"}, backward=True, profile="h100", **options)


def equal_to_one_device(program, model, x):
    loss = model(x)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    got, found = program.simulate(x)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(found, dict(zip([n for n, _ in model.named_parameters()], grads, strict=True)))


def test_gradients_are_placed_as_their_parameters():
    """Large matrices on a small batch: the solver cuts them, and their gradients with them."""
    model, x = Net(), torch.randn(8, 16)
    program = plan(model, x)
    equal_to_one_device(program, model, x)
    grads = {o.name: o.spec for o in program.local.outputs if o.kind == "grad"}
    assert grads == {n: program.placements[n] for n, _ in model.named_parameters()}


def test_a_budget_is_kept():
    model, x = Net(), torch.randn(8, 16)
    whole = sum(p.numel() * 4 for p in model.parameters())
    free = plan(model, x, memory_budget=1e9)
    assert free.memory["parameters"] >= whole and free.memory["optimizer"] == 2 * free.memory["gradients"]
    budget = 0.5 * sum(free.memory.values())
    program = plan(model, x, memory_budget=budget)
    assert sum(program.memory.values()) <= budget
    assert program.price >= free.price * (1 - 1e-9)
    assert any(program.placements[n].sharding for n, _ in model.named_parameters())
    equal_to_one_device(program, model, x)
    states = plan(model, x, memory_budget=1e9, optimizer_states=0)
    assert states.memory["optimizer"] == 0


def test_a_budget_that_nothing_meets():
    """It is said what holds the bytes, and those changes alone that have something to act on."""

    def refused(rows, placements, devices=4, **options):
        with pytest.raises(spmd.SpmdError, match="no plan was found within the memory budget of 1000 B") as error:
            spmd.export(
                Deep(), (torch.randn(rows, 32),), mesh={"a": devices}, placements=placements, memory_budget=1000, **options
            )
        _, largest, helps = str(error.value).split("\n")
        return largest.strip(), helps.partition("what helps: ")[2].split("; ")

    train = {"backward": True, "profile": "h100"}
    auto, states, batch = "or, in export, to leave it to", "an optimizer of fewer states", "a smaller batch"
    largest, helps = refused(4, {"x": {"a": Shard(0)}}, **train)
    assert largest == "largest: 4 layers.*.weight {a: R} 64.00 KiB with gradients and optimizer states"
    assert len(helps) == 2 and helps[0].startswith("to shard layers.*.weight (replicated on a)") and states in helps[1]
    _, helps = refused(4, {"*": "auto"}, **train)
    assert re.fullmatch("more devices on axis 'a', which cuts .* KiB", helps[0]) and states in helps[1]
    largest, helps = refused(512, {"*.weight": {"a": Shard(0)}})
    assert "x {a: R} 64.00 KiB" in largest and "with" not in largest
    assert len(helps) == 2 and "shard x (" in helps[0] and auto in helps[0] and helps[1] == batch
    assert refused(4, {}, 1, optimizer_states=0, **train)[1] == ["more devices on axis 'a'", batch]


def test_placements_given_stay():
    model, x = Net(), torch.randn(8, 16)
    program = spmd.export(
        model, (x,), mesh={"a": 4}, placements={"up.weight": {"a": Shard(1)}, "*": "auto"}, backward=True,
        memory_budget=36_000,
    )  # fmt: skip
    assert program.placements["up.weight"]["a"] == Shard(1)
    equal_to_one_device(program, model, x)


def gathers(program):
    return [c.phase for c in program.collectives if c.kind == "all_gather"]


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 2}])
def test_gathered_parameters_are_kept_where_memory_allows(mesh):
    """Sharded parameters and a large batch: ZeRO-2's traffic with memory to spare, ZeRO-3's without."""
    model, x = Deep(), torch.randn(128, 32)
    cut = {"x": {a: Shard(0) for a in mesh}, "*weight": {a: Shard(0) for a in mesh}}

    def planned(budget):
        return spmd.export(model, (x,), mesh=mesh, placements=cut, backward=True, profile="bytes", memory_budget=budget)

    kept = planned(1e9)
    assert set(gathers(kept)) == {"forward"}
    needed = sum(kept.memory.values())
    again = planned(needed - 1000)
    assert sum(again.memory.values()) <= needed - 1000
    assert again.price > kept.price and kept.gap == 0.0
    # one layer of the three equal ones is enough, or a part of it
    assert 0 < gathers(again).count("backward") <= sum(n > 1 for n in mesh.values())
    for program in (kept, again):
        equal_to_one_device(program, model, x)
        program.verify()


@pytest.mark.parametrize(
    ("mesh", "layers", "rows", "below"),
    [({"a": 2, "b": 8}, 1, 1024, 1), ({"a": 4, "b": 2}, 1, 8192, 1), ({"a": 2, "b": 8}, 2, 65536, 0.99)],
)
def test_within_what_a_layout_by_hand_holds_nothing_costs_more_than_it(mesh, layers, rows, below):
    """Copies of inputs count; what lasts and what lives have prices by themselves."""
    with torch.device("meta"):
        model, x = Deep(layers, 512), torch.empty(rows, 512)
    cut = {a: Shard(0) for a in mesh}
    given = dict(mesh=mesh, backward=True, profile="h100")
    hand = spmd.export(model, (x,), placements={"x": cut, "*weight": cut}, memory_budget=1e12, **given)
    budget = 1.01 * sum(hand.memory.values())
    program = spmd.export(model, (x,), placements={"*": "auto"}, memory_budget=budget, **given)
    assert sum(program.memory.values()) <= budget
    assert program.price <= below * hand.price * (1 + 1e-9)


def placed(budget):
    with torch.device("meta"):
        model = Plain()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    x = torch.empty(8, 16, device="meta")
    program = spmd.export(
        model, (x,), mesh=Mesh.of(mesh), placements={"*weight": "auto", "*bias": "auto"}, backward=True,
        memory_budget=budget,
    )  # fmt: skip
    spmd.parallelize(model, mesh, program)
    specs = {n: program.placements[n] for n, _ in model.named_parameters()}
    return {n: (p.to_local().shape, [str(q) for q in p.placements], str(specs[n])) for n, p in model.named_parameters()}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


def test_meta_parameters_materialise_where_the_solver_put_them(gloo4):
    for found in gloo4(placed, 20_000):
        sharded = [shape for shape, placements, _ in found.values() if placements != ["R"]]
        assert sharded and all("S(" in spec or placements == ["R"] for _, placements, spec in found.values())


# --- against every placement ------------------------------------------------------------------------------------


def every_placement(f, args, mesh):
    """``(bytes held, price)`` of the program under every placement of its inputs, uneven cuts among them."""
    kinds = [[Replicate(), *map(Shard, range(x.dim()))] for x in args]
    for where in itertools.product(*(itertools.product(k, repeat=len(mesh)) for k in kinds)):
        placements = {n: list(p) for n, p in zip("xvw", where, strict=True)}
        p = spmd.export(f, args, mesh=mesh, placements=placements, backward=True, profile="bytes", memory_budget=1e9)
        yield sum(p.memory.values()), p.price


def products(x, v, w):
    return ((x @ v).tanh() @ w).square().mean()


@pytest.mark.parametrize(("sizes", "mesh"), [((9, 7, 5, 3), {"a": 3}), ((6, 8, 4, 10), {"a": 2})], ids=["odd", "even"])
def test_budgets_against_every_placement(sizes, mesh):
    """A fifth above what the smallest holds nothing is refused, and plans are near the cheapest: what the solver counts
    leaves out copies in other specs.  No placement that fits beats the bound."""
    n, *rest = sizes
    args = tuple(torch.zeros(a, b, dtype=torch.float64, requires_grad=i > 0)
                 for i, (a, b) in enumerate(itertools.pairwise((n, *rest))))  # fmt: skip
    known = list(every_placement(products, args, mesh))
    least = min(held for held, _ in known)
    given = dict(mesh=mesh, placements={n: "auto" for n in "xvw"}, backward=True, profile="bytes")
    for budget in sorted({held for held, _ in known if held >= 1.2 * least})[::3]:
        program = spmd.export(products, args, **given, memory_budget=budget)
        assert sum(program.memory.values()) <= budget
        cheapest = min(p for held, p in known if held <= budget)
        assert program.price * (1 - program.gap) <= cheapest * (1 + 1e-6)
        assert program.price <= 1.05 * cheapest
    with pytest.raises(spmd.SpmdError, match="no plan was found within the memory budget") as refused:
        spmd.export(products, args, **given, memory_budget=least // 4)
    assert refused.value.least <= least <= refused.value.held <= 1.2 * least


def test_a_budget_where_the_cheapest_costs_next_to_nothing():
    """What is replicated sends nothing: rates of memory are those of what it takes to gather, whatever that costs."""
    given = dict(mesh={"a": 4}, placements={n: "auto" for n in "xvw"}, backward=True, profile=WIRES)
    args = tuple(torch.zeros(s, requires_grad=True) for s in ((16, 8), (8, 32), (32, 8)))
    free = spmd.export(products, args, **given)
    assert not free.collectives
    for part in (0.9, 0.6, 0.4):
        budget = part * sum(free.memory.values())
        assert sum(spmd.export(products, args, **given, memory_budget=budget).memory.values()) <= budget
    with pytest.raises(spmd.SpmdError, match="every plan holds") as refused:
        spmd.export(products, args, **given, memory_budget=100)
    assert 100 < refused.value.least <= refused.value.held
    for mesh in ({"a": 1}, {"a": 4}):  # a view costs nothing anywhere
        with pytest.raises(spmd.SpmdError, match="no plan was found within the memory budget of 1000 B"):
            spmd.export(torch.t, (torch.zeros(64, 64),), mesh=mesh, placements={"*": "auto"}, memory_budget=1000)


def test_a_budget_that_needs_uneven_cuts():
    """No dim of these parameters is even: what the solver places is cut unevenly where nothing else fits."""
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()
    x = torch.randn(10, 7, dtype=torch.float64)
    given = dict(mesh={"a": 2, "b": 2}, placements={"*": "auto"}, profile="bytes")
    program = spmd.export(model, (x,), **given, memory_budget=1800)
    assert sum(program.memory.values()) <= 1800
    torch.testing.assert_close(program.simulate(x), model(x))
    with pytest.raises(spmd.SpmdError, match=r"smallest found holds 1\.\d\d KiB \(1\d\d\d B\): 4\d\d B of parameters"):
        spmd.export(model, (x,), **given, memory_budget=1000)


def test_neither_names_of_axes_nor_what_was_planned_before_decide():
    def planned(mesh, turned=False):
        torch.manual_seed(0)
        first = next(iter(mesh))
        given = {"x": {first: Shard(0)}, "down.*": "auto", "up.weight": "auto"}
        return spmd.export(
            Net(), (torch.randn(8, 16),), mesh=mesh, placements=dict(reversed(given.items())) if turned else given,
            backward=True, profile="h100", overlap=True, buckets=True, memory_budget="20KiB",
        )  # fmt: skip

    first = planned({"dp": 2, "tp": 4})
    planned({"tp": 2, "dp": 4}), planned({"dp": 8})
    again, named = planned({"dp": 2, "tp": 4}, turned=True), planned({"tp": 2, "dp": 4})
    assert again.text() == first.text() and again.price == first.price == named.price
    names = {"dp": "tp", "tp": "dp"}
    assert re.sub(r"\b(c_)?(dp|tp)\b", lambda m: (m[1] or "") + names[m[2]], named.text()) == first.text()
