"""Whole programs against brute force over every choice of every node, and what the optimum does by itself."""

import functools
import heapq
import itertools
import math
import random

import pytest
import torch
from prices import WIRES, priced
from torch.distributed.tensor import Partial, Replicate, Shard

import spmd_compiler as spmd
from spmd_compiler import passes
from spmd_compiler.capture import capture_function
from spmd_compiler.cost import PROFILES
from spmd_compiler.passes import propagate
from spmd_compiler.placements import Mesh
from spmd_compiler.program import Placements
from spmd_compiler.redistribute import move_price, moves

CALLS = {
    "product": lambda x, y: x @ y,
    "sum": lambda x, y: x + y,
    "softmax": lambda x, y: x.softmax(1),
    "exp": lambda x, y: x.exp(),
    "transpose": lambda x, y: x.t(),
    "centre": lambda x, y: x - x.sum(0),
    "scale": lambda x, y: x * 2,
}


def draw_program(seed, calls):
    names = random.Random(seed).choices(sorted(CALLS), k=calls)

    def function(x, y):
        for name in names:
            x, y = CALLS[name](x, y), x
        return x

    return function, names


def copies_priced(problem):
    """A function of a hub, the spec a value is made in and those wanted of it: the least price of the copies, over every
    spec on the way (Dreyfus-Wagner)."""

    @functools.cache
    def distances(shape, element, tied, start):
        found, heap, pushed = {}, [(0.0, 0, start)], itertools.count(1)
        while heap:
            cost, _, spec = heapq.heappop(heap)
            if spec not in found:
                found[spec] = cost
                for m in () if tied else moves(spec, shape, problem.mesh, problem.uneven):
                    if m.target not in found:
                        more = move_price(m, shape, element, problem.mesh, problem.profile)
                        heapq.heappush(heap, (cost + more, next(pushed), m.target))
        return found

    @functools.cache
    def tree(kind, root, goals):
        reached = distances(*kind, root)
        if len(goals) == 1:
            return reached.get(next(iter(goals)), math.inf)
        splits = [frozenset(p) for n in range(1, len(goals)) for p in itertools.combinations(sorted(goals, key=str), n)]
        return min(
            d + min(tree(kind, middle, part) + tree(kind, middle, goals - part) for part in splits)
            for middle, d in reached.items()
        )

    def priced(hub, origin, wanted):
        goals = wanted - {origin}
        return tree((hub.shape, hub.element, hub.tied), origin, goals) if goals else 0.0

    return priced


def brute_force(problem):
    """The least price of all combinations of choices (a branch that costs more than one known is left)."""
    variables, hubs = problem.variables, problem.hubs
    last = [max(h.source[0], *(k for k, _ in h.consumers)) for h in hubs]  # when a hub's ends are all decided
    due = {i: [h for h, at in zip(hubs, last, strict=True) if at == i] for i in range(len(variables))}
    priced = copies_priced(problem)
    best = math.inf

    def tree(hub, picks):
        origin = variables[hub.source[0]].choices[picks[hub.source[0]]].results[hub.source[1]]
        wanted = frozenset(variables[k].choices[picks[k]].operands[i] for k, i in hub.consumers)
        return priced(hub, origin, wanted)

    def extend(picks, price):
        nonlocal best
        i = len(picks)
        if i == len(variables):
            best = min(best, price)
            return
        for c, seconds in enumerate(variables[i].compute):
            now = [*picks, c]
            total = price + seconds
            for hub in due[i]:
                total += tree(hub, now) if total < best else 0.0
            if total < best:
                extend(now, total)

    extend([], 0.0)
    return best


@pytest.mark.parametrize(
    ("sizes", "calls"), [({"a": 4}, 3), ({"a": 2, "b": 4}, 2), ({"a": 2, "b": 2, "c": 2}, 1)], ids=str
)
@pytest.mark.parametrize("profile", ["bytes", "h100", "cpu"])
@pytest.mark.parametrize("seed", range(5))
def test_no_combination_of_choices_is_cheaper(sizes, calls, profile, seed):
    function, names = draw_program(seed, calls)
    mesh, prices, draw = Mesh(sizes), PROFILES[profile], random.Random(seed)
    args = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
    options = [Replicate(), Shard(0), Shard(1), Partial()]
    placements = {n: [draw.choice(options[: 4 if n != "out" else 3]) for _ in sizes] for n in ("x", "y", "out")}
    captured, _ = capture_function(function, args, mesh=mesh, specs=Placements(mesh, placements))
    annotated = passes.unmerge.run(passes.annotate.run(captured))
    problem = propagate._Builder(annotated, mesh, prices, None).problem
    told = f"{names} {placements}"
    program = spmd.export(function, args, mesh=mesh, placements=placements, profile=profile)
    assert program.gap == 0.0, told
    assert program.price == pytest.approx(brute_force(problem), rel=1e-6, abs=1e-12), told
    torch.testing.assert_close(program.simulate(*args), function(*args), msg=lambda m: f"{told}: {m}")


# --- what needs no pass -----------------------------------------------------------------------------------------

ROWS, WHOLE = {"x": {"a": Shard(0)}}, {"out": {"a": Replicate()}}
WIRE = {  # function, placements, bytes that a device sends, kinds
    "a gather goes before what grows": (lambda x: torch.cat([x, x.exp()], 1), {**ROWS, **WHOLE}, 3 * 128, ["all_gather"]),
    "a gather goes behind what shrinks": (lambda x: x[:, :2].exp(), {**ROWS, **WHOLE}, 3 * 32, ["all_gather"]),
    "a gather goes behind a cast that narrows": (lambda x: x.half() * 2, {**ROWS, **WHOLE}, 3 * 64, ["all_gather"]),
    "a gather goes before a cast that widens": (lambda x: x.double() * 2, {**ROWS, **WHOLE}, 3 * 128, ["all_gather"]),
    "a gather goes behind a sum": (lambda x: x.sum(1), {**ROWS, **WHOLE}, 3 * 16, ["all_gather"]),
    "one gather for two uses": (lambda x: x.exp().cumsum(0) + x.exp().flip(0), {**ROWS, **WHOLE}, None, ["all_gather"]),
    "pieces of a sum are scattered": (lambda x: x.sum(0), {**ROWS, "out": {"a": Shard(0)}}, 6 * 4, ["reduce_scatter"]),
    "a sum of sums is reduced once": (lambda x: x.sum(0) + x.exp().sum(0), {**ROWS, **WHOLE}, 12 * 4, ["all_reduce"]),
    "a slice goes before the work": (lambda x: x.exp(), {"out": {"a": Shard(0)}}, 0, []),
}  # fmt: skip


@pytest.mark.parametrize("case", WIRE)
def test_the_cheapest_plan_moves_what_is_small(case):
    function, placements, wire, kinds = WIRE[case]
    x = torch.randn(16, 8)
    program = spmd.export(function, (x,), mesh={"a": 4}, placements=placements, profile="bytes")
    assert [c.kind for c in program.collectives] == kinds
    if wire is not None:
        assert program.wire_bytes == wire
    torch.testing.assert_close(program.simulate(x), function(x))


@pytest.mark.parametrize("shapes", itertools.permutations([(0, 8), (8, 8), (16, 8)], 2), ids=str)
def test_what_is_empty_lends_no_price_to_what_is_not(shapes):
    """Moves of the two values share a table, whose prices are by the byte."""
    cut = {n: [Shard(0)] for n in "xy"}
    program = spmd.export(
        lambda x, y: (x.cumsum(0), y.cumsum(0)), tuple(map(torch.zeros, shapes)), mesh={"a": 4}, placements=cut,
        profile=WIRES,
    )  # fmt: skip
    assert program.price == pytest.approx(priced(program.mesh, program.collectives)) and program.gap == 0.0
