"""Sizes that data decide: what becomes of a program that has some (its values: `founding/test_A_slicing.py`)."""

import itertools
import operator

import pytest
import sympy
import torch
import torch.nn.functional as F
from prices import WIRES, priced
from torch.distributed.tensor import Shard
from versions import TORCH

import spmd_compiler as spmd
from spmd_compiler.family import DataSamples, Dim
from spmd_compiler.reader import parse
from spmd_compiler.symbolic import dim, primes, real, sized
from spmd_compiler.symints import computed


class Labelled(torch.nn.Module):
    """A language model whose loss is that of the labelled tokens."""

    def __init__(self):
        super().__init__()
        self.emb, self.up = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, 40, bias=False)

    def forward(self, ids, labels):
        keep = labels != -100
        return F.cross_entropy(self.head(F.gelu(self.up(self.emb(ids)))[keep]), labels[keep])


def batch(share):
    ids = torch.randint(0, 40, (8, 12))
    return ids, torch.where(torch.rand(8, 12) < share, ids, -100)


BATCH = {"ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}
CASES = {
    "megatron": {"mesh": {"dp": 2, "tp": 2}, "placements": BATCH | {"up.*": {"tp": Shard(0)}, "head.*": {"tp": Shard(1)}}},
    "fsdp": {"mesh": {"dp": 4}, "placements": BATCH | {"*weight": {"dp": Shard(0)}}, "overlap": True, "buckets": True},
    "chosen": {"mesh": {"dp": 2}, "placements": {"*": "auto"}, "memory_budget": "80KiB"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_read_saved_verified_and_explained(case, tmp_path):
    torch.manual_seed(0)
    model = Labelled()
    program = spmd.export(model, batch(0.5), backward=True, verify=True, **CASES[case])
    assert [str(d) for d in program.dims.values()] == ["u0=97 in 0..96"]
    text = program.text()
    assert str(parse(text)) == text and "\ndims  u0=97 in 0..96\n" in text and '"u0")' in text
    program.save(tmp_path / "p.spmd", weights=True)
    loaded = spmd.load(tmp_path / "p.spmd")
    assert loaded.text() == text and "the same" in str(spmd.diff(program, loaded))
    for collective in loaded.collectives[:1]:
        assert str(spmd.explain(loaded, collective)) == str(spmd.explain(program, collective))
    for share in (0.1, 0.9):
        given = batch(share)
        model.zero_grad()
        want = model(*given)
        want.backward()
        for p in (program, loaded):
            got, grads = p.simulate(*given)
            torch.testing.assert_close(got, want)
            for name, weight in model.named_parameters():
                torch.testing.assert_close(grads[name], weight.grad)


@pytest.mark.parametrize("case", ["megatron", "fsdp"])
def test_the_price_is_that_of_what_is_sent_at_the_example(case):
    given = {k: CASES[case][k] for k in ("mesh", "placements")}
    program = spmd.export(Labelled(), batch(0.5), backward=True, profile=WIRES, **given)
    assert program.price == pytest.approx(priced(program.mesh, program.collectives), rel=1e-9) and program.gap == 0.0


def test_experts_take_their_tokens():
    """A size for each expert, of which none is cut and none is known."""
    def moe(x, w, who):
        out = torch.zeros_like(x)
        for e in range(len(w)):
            at = torch.where(who == e)[0]
            out = out.index_add(0, at, torch.relu(x[at] @ w[e]) @ w[e].t())
        return out.square().mean()

    torch.manual_seed(0)
    x, w, who = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 6, requires_grad=True), torch.arange(12) % 2
    program = spmd.export(moe, (x, w, who), mesh={"tp": 2}, placements={"w": {"tp": Shard(2)}}, backward=True)
    assert sorted(program.dims) == ["u0", "u1", "u2"]
    theirs = [t.detach().clone().requires_grad_() for t in (x, w)]
    want = moe(*theirs, who)
    want.backward()
    got, grads = program.simulate(x, w, who)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close([grads["x"], grads["w"]], [t.grad for t in theirs])


def test_integers_are_read_off_points():
    u, v = dim("u0"), dim("u1")
    points = [{"u0": 11, "u1": 13}, {"u0": 17, "u1": 19}, {"u0": 23, "u1": 31}]
    samples = DataSamples([Dim("u0", 11, 0), Dim("u1", 13, 0)], points, [u * v + 1, u + v])
    for expression in (u, 6 * u, u / 2, 3 * v - 4, u + v, (u + v) / 2, u * v, sympy.Integer(7)):
        values = [sized(expression, p) for p in points]
        if all(isinstance(n, int) for n in values):
            found = samples.fit(values)
            assert sympy.simplify(found - expression) == 0, (expression, found)
    assert samples.fit([1, 2, 4]) is None
    assert primes([8, 8, 96], {13, 97}) == [11, 17, 101]


def test_expressions_are_computed_by_python():
    u, v = dim("u0"), dim("u1")
    expressions = [u, 2 * u + 3, u * v, (6 * u) / 3, sympy.floor(u / 4), sympy.ceiling(u / 4), sympy.Mod(u, 3), u**2,
                   sympy.Max(u, 1), sympy.Min(u, v) - 1, u * 3 * 2 / sympy.Integer(6), real(u / v), real(u)]  # fmt: skip
    roots = [sympy.sqrt(u), sympy.cbrt(u * v) + 1]
    for e, (a, b) in itertools.product([*expressions, *roots], [(0, 1), (1, 2), (7, 5)]):
        got = computed(e, {"u0": a, "u1": b}.__getitem__, lambda op, *args: op(*args))
        want = sized(e, {"u0": a, "u1": b})
        assert got == (pytest.approx(float(want)) if e in roots else want), e
    assert computed(real(u / 3), {"u0": 1}.__getitem__, lambda op, *args: op(*args)) == operator.truediv(1, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0][:2].var(),  # min(u0, 2) is 2 wherever a program is looked at
        lambda x: x[x > 0][-2:].shape[0] * x.sum(),
        lambda x: torch.ones_like(x[x > 0][:3]).sum(),
        lambda x: torch.ones_like(x[x > 0][3:]).sum() + (x[x > 0].shape[0] - 3),  # max(0, u0 - 3) and u0 - 3
    ],
)
def test_sizes_that_few_elements_change_are_refused(function):
    if TORCH == (2, 11):  # which has sizes of their own for parts of what it can't count
        program = spmd.export(function, (torch.randn(10, 7),), mesh={"dp": 2}, placements={"x": {"dp": Shard(0)}})
        for x in (torch.tensor([[1.0] * n + [-1.0] * (7 - n)] + [[-1.0] * 7] * 9) for n in range(7)):
            torch.testing.assert_close(program.simulate(x), function(x), equal_nan=True)
        return
    with pytest.raises(spmd.SpmdError, match=r"that data decide.*(up to a limit|few elements).*torch\.where"):
        spmd.export(function, (torch.randn(10, 7),), mesh={"dp": 2}, placements={"x": {"dp": Shard(0)}})


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_scans_of_a_selection(name):
    """Forward and backward, with one and two zeros in a product, of none, one and several rows."""

    def function(x):
        found = getattr(torch, name)(x[x[:, 0] > 0], 0)
        return (found if torch.is_tensor(found) else found.values * (1 + found.indices)).sin().sum()

    given = [torch.randn(6, 3, dtype=torch.float64).requires_grad_() for _ in range(4)]
    with torch.no_grad():
        for x, selected in zip(given, (6, 0, 1, 4), strict=True):
            x[:, 0] = torch.where(torch.arange(6) < selected, x[:, 0].abs(), -1)
            x[1, 1] = x[1, 2] = x[3, 2] = 0
    program = spmd.export(function, (given[0],), mesh={"dp": 4}, placements={"x": {"dp": Shard(0)}}, backward=True)
    for x in given:
        want = function(x)
        torch.testing.assert_close(program.simulate(x.detach()), (want, {"x": torch.autograd.grad(want, x)[0]}))


def test_the_gradient_of_products_has_no_nodes_for_each_element():
    texts = [
        spmd.export(lambda x: x.cumprod(0).sin().sum(), (torch.ones(n, 4, requires_grad=True),), mesh={"dp": 2},
                    placements={"x": {"dp": Shard(1)}}, backward=True).text() for n in (8, 64)
    ]  # fmt: skip
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())


def test_a_size_as_an_exponent_is_refused():
    with pytest.raises(spmd.SpmdError, match=r"test_sizes.*2\*\*u0 has a size .* for an exponent"):
        spmd.export(lambda x: x.sum() * 2.0 ** x[x > 0].shape[0], (torch.randn(4),), mesh={"dp": 2})


@pytest.mark.parametrize("selected", [0, 1, 2, 5, 40])
def test_parts_of_a_selection(selected):
    """What is left of a selection behind a number of elements, before its end, or of every other one."""

    def function(x):
        chosen = x[x > 0]
        return torch.ones_like(chosen[3:]).sum(), torch.ones_like(chosen[:-1]).sum(), chosen[::2].sum(), chosen[1:]

    x = torch.full((10, 7), -1.0)
    program = spmd.export(function, (torch.randn(10, 7),), mesh={"dp": 2}, placements={"x": {"dp": Shard(0)}})
    x.view(-1)[torch.randperm(70)[:selected]] = torch.rand(selected) + 1
    torch.testing.assert_close(program.simulate(x), function(x))
