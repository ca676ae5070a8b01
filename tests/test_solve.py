"""The solver against brute force over every combination of choices, on random small graphs."""

import dataclasses
import functools
import itertools
import math
import random

import numpy as np
import pytest

from spmd_compiler import solve as solver
from spmd_compiler.blend import blended, cheapest_at, fitting, parts
from spmd_compiler.cost import PROFILES
from spmd_compiler.linear import Program
from spmd_compiler.memory import Found, cheapest_within
from spmd_compiler.placements import Mesh, Spec, SpmdError
from spmd_compiler.problem import Hub, Problem, Variable
from spmd_compiler.redistribute import move_price, moves
from spmd_compiler.rules import Choice, Linear, Rule, choices
from spmd_compiler.solve import solve

PROFILE = PROFILES["h100"]
SHAPE = (4096, 4096)
RULES = {
    "mm": Rule(((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), {"m": 4096, "k": 4096, "n": 4096},
               linear=(Linear((0,)), Linear((1,)))),
    "add": Rule(((("i",), ("j",)), (("i",), ("j",))), ((("i",), ("j",)),), {"i": 4096, "j": 4096},
                linear=(Linear((0, 1)),)),
    "exp": Rule(((("i",), ("j",)),), ((("i",), ("j",)),), {"i": 4096, "j": 4096}),
    "view": Rule(((("i",), ("j",)),), ((("j",), ("i",)),), {"i": 4096, "j": 4096}, linear=(Linear((0,)),)),
    "row": Rule(((("i",), ("j",)),), ((("i",), ("j",)),), {"i": 4096, "j": 4096}, whole=frozenset("j")),
}  # fmt: skip


def random_problem(seed, sizes, nodes):
    """A random graph: fixed or free inputs, random ops, one sink on the last value and on one other."""
    rng = random.Random(seed)
    mesh = Mesh(sizes)
    p = Problem(mesh, PROFILE)
    letters = Rule((), ((("i",), ("j",)),), {"i": 4096, "j": 4096})
    values, consumers = [], {}
    for _ in range(2):
        domain = choices(letters, mesh)
        picks = domain if rng.random() < 0.3 else (rng.choice(domain),)
        p.variables.append(Variable("input", picks, np.zeros(len(picks))))
        values.append(len(p.variables) - 1)
    for _ in range(nodes):
        name = rng.choice(list(RULES))
        domain = choices(RULES[name], mesh)
        if name in ("exp", "view"):  # gathers may be put off until after these
            base = 0.0 if name == "view" else rng.random() * 1e-4
            compute = np.array([base / c.results[0].shards(mesh) for c in domain])
            p.variables.append(Variable(name, domain, compute, transparent=True))
        else:
            if len(domain) > 5:
                domain = tuple(rng.sample(domain, 5)) + domain[:1]
            p.variables.append(Variable(name, domain, np.array([rng.random() * 1e-4 for _ in domain])))
        me = len(p.variables) - 1
        for i in range(len(RULES[name].operands)):
            consumers.setdefault(rng.choice(values), []).append((me, i))
        values.append(me)
    for value in {values[-1], rng.choice(values)}:
        spec = rng.choice(choices(letters, mesh)).results[0]
        p.variables.append(Variable("sink", (Choice((spec,), ()),), np.zeros(1)))
        consumers.setdefault(value, []).append((len(p.variables) - 1, 0))
    p.hubs = [Hub((v, 0), users, SHAPE, 4) for v, users in consumers.items()]
    return p


def steiner(mesh, origin, wanted):
    """The exact price of the copies ``wanted`` from ``origin`` (Dreyfus-Wagner over every spec)."""
    wanted = sorted(set(wanted) - {origin}, key=str)
    if not wanted:
        return 0.0

    @functools.cache
    def distances(goal_of):
        best, heap, done = {goal_of: 0.0}, [goal_of], set()
        while heap:
            heap.sort(key=lambda s: -best[s])
            spec = heap.pop()
            if spec in done:
                continue
            done.add(spec)
            for m in moves(spec, SHAPE, mesh):
                d = best[spec] + move_price(m, SHAPE, 4, mesh, PROFILE)
                if d < best.get(m.target, math.inf):
                    best[m.target] = d
                    heap.append(m.target)
        return best

    reach = distances(origin)
    if not set(wanted) <= reach.keys():
        return math.inf

    @functools.cache
    def tree(root, goals):
        if not goals:
            return 0.0
        best = math.inf
        for mid, d in distances(root).items():
            if len(goals) == 1:
                rest = 0.0 if mid == goals[0] else math.inf
            else:
                rest = min(
                    tree(mid, tuple(g for g in goals if g in part)) + tree(mid, tuple(g for g in goals if g not in part))
                    for n in range(1, len(goals)) for part in map(set, itertools.combinations(goals, n))
                ) if d < best else math.inf  # fmt: skip
            best = min(best, d + rest)
        return best

    return tree(origin, tuple(wanted))


def held(p, picks):
    return sum(float(v.memory[c]) for v, c in zip(p.variables, picks, strict=True) if v.memory is not None)


def brute_force(p, budget=math.inf):
    cached = functools.cache(lambda origin, wanted: steiner(p.mesh, origin, wanted))
    best = math.inf
    for picks in itertools.product(*(range(len(v.choices)) for v in p.variables)):
        total = sum(v.compute[c] for v, c in zip(p.variables, picks, strict=True))
        if held(p, picks) > budget:
            continue
        for h in p.hubs:
            if total >= best:
                break
            origin = p.variables[h.source[0]].choices[picks[h.source[0]]].results[0]
            wanted = frozenset(p.variables[k].choices[picks[k]].operands[i] for k, i in h.consumers)
            total += cached(origin, wanted)
        best = min(best, total)
    return best


# near the bound of seed 53 there is no whole plan; two copies of a value of seed 27 share a move into a third spec
@pytest.mark.parametrize(
    "sizes, nodes, seed",
    [({"a": 8}, 5, seed) for seed in (*range(8), 53)] + [({"a": 2, "b": 4}, 3, seed) for seed in (*range(8), 27)],
)
def test_equals_brute_force(sizes, nodes, seed, monkeypatch):
    p = random_problem(seed, sizes, nodes)
    expected = brute_force(p)
    for small in (solver.SMALL, 0):  # 0: what message passing leaves
        monkeypatch.setattr(solver, "SMALL", small)
        found = solve(p)
        assert found.price == pytest.approx(expected, rel=1e-9)
        assert found.bound <= expected * (1 + 1e-9)
        assert found.bound == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_is_kept_and_the_bound_holds(seed):
    p = random_problem(seed, {"a": 8}, 5)
    for v in p.variables:
        if v.name in ("input", "mm", "exp"):
            v.memory = np.array([1.0 / c.results[0].shards(p.mesh) for c in v.choices])
    free = solve(p)
    least = sum(float(v.memory.min()) for v in p.variables if v.memory is not None)
    most = held(p, free.choices)

    def found_of(found):
        return Found(found, {"all": held(p, found.choices)}, held(p, found.choices), found.price, found.bound)

    def at(rate):
        return found_of(cheapest_at(p, rate))

    def between(small, cheap, room):
        ends = [blended(p, small, cheap, taken) for taken in ([], parts(p, small, cheap))]
        assert [e.price for e in ends] == pytest.approx([small.price, cheap.price], rel=1e-9)
        taken = fitting(p, small, cheap, room)
        return [lambda n=n: found_of(blended(p, small, cheap, taken[:n])) for n in range(1, len(taken) + 1)]

    for part in (0.0, 0.3, 0.7):
        budget = (least + part * (most - least)) * (1 + 1e-12)
        expected = brute_force(p, budget)
        assert math.isfinite(expected)
        within, bound, _ = cheapest_within(at, between, budget)
        found = within.plan
        assert held(p, found.choices) <= budget
        assert bound <= expected * (1 + 1e-9) <= found.price * (1 + 2e-9)
    with pytest.raises(SpmdError, match="memory budget"):
        cheapest_within(at, between, least * 0.9)


def test_same_problem_same_answer():
    first, second = (solve(random_problem(3, {"a": 2, "b": 4}, 4)) for _ in range(2))
    assert first.choices == second.choices
    assert [list(t) for t in first.trees] == [list(t) for t in second.trees]


def test_a_slice_is_not_put_off_for_ever():
    """A replicated input, a view, and a consumer that wants a piece: one slice, before the view or after it."""
    mesh = Mesh({"a": 8})
    whole, piece = (Choice((), (c,)) for c in (Spec.parse("{a: R}"), Spec.parse("{a: S(0)}")))
    view = choices(RULES["view"], mesh)
    p = Problem(mesh, PROFILE)
    p.variables += [
        Variable("input", (whole,), np.zeros(1)),
        Variable("view", view, np.zeros(len(view)), transparent=True),
        Variable("sink", (Choice(piece.results, ()),), np.zeros(1)),
    ]
    p.hubs = [Hub((0, 0), [(1, 0)], SHAPE, 4), Hub((1, 0), [(2, 0)], SHAPE, 4)]
    found = solve(p)
    assert found.price == 0.0
    assert [m.kind for tree in found.trees for m in tree.values()] == ["slice"]


@pytest.mark.parametrize("seed", [4, 13, 16])
def test_a_plan_that_costs_nothing_is_found(seed, monkeypatch):
    """There the bound of message passing is 0, and whatever is above it by rounding is far above it."""
    p = random_problem(seed, {"a": 2, "b": 2, "c": 2}, 4)
    for v in p.variables:
        v.compute = np.zeros(len(v.compute))
    for small in (solver.SMALL, 0):
        monkeypatch.setattr(solver, "SMALL", small)
        assert solve(p).price == 0.0


def beside(p, q):
    """Two problems that have nothing to do with each other, as one."""
    n = len(p.variables)
    moved = [dataclasses.replace(h, source=(h.source[0] + n, h.source[1]), consumers=[(k + n, i) for k, i in h.consumers])
             for h in q.hubs]  # fmt: skip
    return dataclasses.replace(p, variables=p.variables + q.variables, hubs=p.hubs + moved)


@pytest.mark.parametrize("small", [solver.SMALL, 0])
def test_ties_fall_alike_whatever_stands_beside(small, monkeypatch):
    """Where compute is free many plans cost the same; which of them is chosen depends on nothing but the part itself."""
    monkeypatch.setattr(solver, "SMALL", small)
    tied = compared = 0
    for seed in range(12):
        p, other = (random_problem(s, {"a": 2, "b": 4}, 6) for s in (seed, seed + 100))
        for v in p.variables:
            v.compute = np.where(v.compute > 0, 1e-5, 0.0)
        with monkeypatch.context() as m:
            m.setattr(Program, "settled", lambda program, found: found.x)
            m.setattr(Program, "branch", None)
            try:
                unsettled = [solve(p), solve(beside(other, p))]
            except TypeError:  # relaxations that are not whole are branched on, and ties fall as they may
                continue
        alone, both = solve(p), solve(beside(other, p))
        assert both.choices[len(other.variables) :] == alone.choices, seed
        assert [alone.price, both.price] == pytest.approx([s.price for s in unsettled], rel=1e-9)
        tied += unsettled[0].choices != unsettled[1].choices[len(other.variables) :]
        compared += 1
    assert compared >= 6 and tied  # left to themselves ties fall otherwise
