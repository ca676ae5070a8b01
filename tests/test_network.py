"""What message passing says of a problem, against every plan of it."""

import itertools
import math

import numpy as np
import pytest
from test_solve import random_problem, steiner

from spmd_compiler import network
from spmd_compiler.network import Network
from spmd_compiler.placements import Mesh, Spec
from spmd_compiler.problem import Hub, Problem, Tables, Variable
from spmd_compiler.quotient import Colours
from spmd_compiler.rules import Choice
from spmd_compiler.solve import solve


def network_of(p, merge=False):
    tables = Tables(p)
    colours = Colours(p, tables)
    if not merge:
        colours.separate()
    return Network(p, tables, colours.tied() if not merge else colours.summed(), whole=not merge)


def plans(p):
    """Every plan: its choices and price."""
    for picks in itertools.product(*(range(len(v.choices)) for v in p.variables)):
        price = sum(float(v.compute[c]) for v, c in zip(p.variables, picks, strict=True))
        for h in p.hubs:
            origin = p.variables[h.source[0]].choices[picks[h.source[0]]].results[0]
            price += steiner(p.mesh, origin, [p.variables[k].choices[picks[k]].operands[i] for k, i in h.consumers])
        if math.isfinite(price):
            yield picks, price


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_near_the_bound_is_left_out(seed, monkeypatch):
    monkeypatch.setattr(network, "SWEEPS", 1 + seed % 3)  # far from the best bound
    p = random_problem(seed, {"a": 4}, 4)
    for v in p.variables:  # every plan, not only a cheapest one, keeps its moves
        v.transparent = False
    every = list(plans(p))
    cheapest = min(price for _, price in every)
    n = network_of(p)
    assert n.feasible
    n.ascend()
    bounds = [n.bound / n.scale]
    left_out = 0
    for part in (0.0, 0.02, 0.2, 1.0):
        gap = part * n.bound
        limit = n.bound / n.scale * (1 + part)
        n.within(gap)
        kept = [set(c.picks[c.kept].tolist()) for c in n.classes]
        for picks, price in every:
            if price <= limit * (1 - 1e-9):
                assert all(c in k for c, k in zip(picks, kept, strict=True))
        left_out += sum(len(v.choices) - len(k) for v, k in zip(p.variables, kept, strict=True))
        bounds.append(n.bound / n.scale)
    assert bounds == pytest.approx(sorted(bounds), rel=1e-9) and bounds[-1] <= cheapest * (1 + 1e-9)
    assert left_out


@pytest.mark.parametrize("seed", range(6))
def test_sums_bound_every_plan(seed):
    p = random_problem(seed, {"a": 2, "b": 4}, 4)
    n = network_of(p, merge=True)
    n.ascend()
    assert 0 <= n.bound / n.scale <= solve(p).price * (1 + 1e-9)


def test_impossible_choices_are_dropped_and_contradictions_seen():
    mesh = Mesh({"a": 2})
    specs = {t: Spec.parse(f"{{a: {t}}}") for t in ("R", "S(0)", "P(sum)")}

    def problem(wanted):
        p = Problem(mesh, random_problem(0, {"a": 2}, 1).profile)
        p.variables += [
            Variable("input", tuple(Choice((), (specs[t],)) for t in ("R", "S(0)")), np.zeros(2)),
            Variable("sink", tuple(Choice((specs[t],), ()) for t in wanted), np.zeros(len(wanted))),
        ]
        p.hubs = [Hub((0, 0), [(1, 0)], (4, 4), 4)]
        return p

    n = network_of(problem(("P(sum)", "S(0)")))  # nothing makes a partial value of a whole one
    assert n.feasible and n.classes[1].picks.tolist() == [1]
    assert not network_of(problem(("P(sum)",))).feasible
