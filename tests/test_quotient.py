"""Equal parts decided together: the plan and the bound bracket the whole problem's optimum, and mostly meet."""

import random

import numpy as np
import pytest
from test_solve import PROFILE, RULES, SHAPE

from spmd_compiler import solve as solver
from spmd_compiler.network import Network
from spmd_compiler.placements import Mesh
from spmd_compiler.problem import Hub, Problem, Tables, Variable
from spmd_compiler.quotient import Colours
from spmd_compiler.rules import Choice, Rule, choices
from spmd_compiler.solve import _minimum, _priced, solve


def chain(seed, sizes, layers):
    """Equal layers of random ops: each reads the one before, a weight of its own and a value that all share."""
    rng = random.Random(seed)
    mesh = Mesh(sizes)
    p = Problem(mesh, PROFILE)
    letters = choices(Rule((), ((("i",), ("j",)),), {"i": 4096, "j": 4096}), mesh)
    consumers: dict[int, list[tuple[int, int]]] = {}

    def add(name, picks, compute, reads=()):
        p.variables.append(Variable(name, picks, compute))
        for i, value in enumerate(reads):
            consumers.setdefault(value, []).append((len(p.variables) - 1, i))
        return len(p.variables) - 1

    def fixed():
        pick = (rng.choice(letters),)
        return pick, np.zeros(1)

    weight, shared = fixed(), add("shared", *fixed())
    recipe = []
    for _ in range(rng.randint(2, 4)):
        name = rng.choice(list(RULES))
        domain = choices(RULES[name], mesh)
        domain = tuple(rng.sample(domain, min(len(domain), 5))) + domain[:1]
        reads = [rng.choice(("carry", "weight", "shared")) for _ in RULES[name].operands]
        recipe.append((name, domain, np.array([rng.random() * 1e-4 for _ in domain]), ["carry", *reads[1:]]))
    carry = add("input", *fixed())
    for _ in range(layers):
        own = add("weight", *weight)
        for name, domain, compute, reads in recipe:
            carry = add(name, domain, compute, [{"carry": carry, "weight": own, "shared": shared}[r] for r in reads])
    pick, compute = fixed()
    add("sink", (Choice(pick[0].results, ()),), compute, [carry])
    p.hubs = [Hub((v, 0), users, SHAPE, 4) for v, users in consumers.items()]
    return p


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 2, "b": 4}])
def test_the_whole_problem_lies_between(sizes, seed, monkeypatch):
    p = chain(seed, sizes, 12)
    monkeypatch.setattr(solver, "ROUNDS", ())
    whole = solve(p)
    assert whole.bound == pytest.approx(whole.price, rel=1e-6)
    tables = Tables(p)
    colours = Colours(p, tables)
    sizes_seen = []
    for _ in range(8):
        tied, summed = colours.tied(), colours.summed()
        upper = _minimum(Network(p, tables, tied))
        if upper is not None:  # too few rounds can tie what can't be alike
            found = _priced(p, tables, [upper.picks[c] for c in tied.classes], upper.columns)
            assert found.price >= whole.price * (1 - 1e-9)
            assert found.price == pytest.approx(upper.bound, rel=1e-6)  # the program knew what its plan costs
        lower = _minimum(Network(p, tables, summed, whole=False))
        assert lower is not None and lower.bound <= whole.price * (1 + 1e-9)
        sizes_seen.append(len(tied.first))
        colours.refine(1)
    assert sizes_seen == sorted(sizes_seen) and sizes_seen[0] < len(p.variables) / 2


@pytest.mark.parametrize("seed", range(10))
def test_depth_adds_nothing(seed):
    """The program of a deep chain has the columns of a shallow one, and its optimum is proven."""
    shallow, deep = (solve(chain(seed, {"a": 2, "b": 4}, layers)) for layers in (40, 80))
    assert deep.columns == shallow.columns
    assert deep.bound == pytest.approx(deep.price, rel=1e-5)
