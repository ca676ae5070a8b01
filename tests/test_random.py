"""Draws over global indices: their quality, their independence of the mesh, and torch's operators as draws."""

import math

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from versions import TORCH

from spmd_compiler import draws as random
from spmd_compiler.draws import decomposed, draw, functionalize
from spmd_compiler.placements import SpmdError

CPU = torch.device("cpu")
N = 1 << 17
SEED = torch.tensor(20240607)


def drawn(kind, shape=(N,), dtype=torch.float32, seed=SEED, stream=0):
    return draw(seed, stream, kind, list(shape), [0] * len(shape), list(shape), dtype, CPU)


def chi_square(counts, expected):
    """The statistic in standard deviations from its mean."""
    freedom = len(counts) - 1
    return ((((counts - expected) ** 2) / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


# --- quality ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_fills_cells_evenly(seed, dtype):
    x = drawn("uniform", dtype=dtype, seed=torch.tensor(seed))
    assert x.min() >= 0 and x.max() < 1
    assert abs(chi_square(torch.histc(x, 256, 0, 1), N / 256)) < 5


@pytest.mark.parametrize("bit", range(63))
def test_every_bit_is_fair(bit):
    ones = ((drawn("bits", dtype=torch.int64) >> bit) & 1).sum().item()
    assert abs(ones - N / 2) < 5 * math.sqrt(N) / 2


def test_pairs_of_neighbours_fill_the_square():
    x = drawn("uniform")
    cell = (x[:-1] * 32).long() * 32 + (x[1:] * 32).long()
    assert abs(chi_square(torch.bincount(cell, minlength=1024).float(), (N - 1) / 1024)) < 5


@pytest.mark.parametrize(
    "other",
    [dict(stream=1), dict(stream=2**20), dict(seed=SEED + 1), dict(seed=SEED ^ (1 << 40))],
    ids=["stream", "far stream", "seed", "high bit of seed"],
)
def test_streams_and_seeds_are_uncorrelated(other):
    x, y = drawn("uniform", dtype=torch.float64), drawn("uniform", dtype=torch.float64, **other)
    for lag in (0, 1, 7):
        a, b = x[: N - lag] - 0.5, y[lag:] - 0.5
        assert abs((a * b).sum().item()) * 12 / math.sqrt(N) < 5
    a, b = drawn("bits", dtype=torch.int64), drawn("bits", dtype=torch.int64, **other)
    assert not (a == b).any()


def test_normal_has_the_normal_distribution():
    x = drawn("normal", dtype=torch.float64)
    cells = torch.linspace(-3, 3, 61, dtype=torch.float64)
    cdf = torch.special.ndtr(cells)
    p = torch.diff(torch.cat([torch.zeros(1), cdf, torch.ones(1)]))
    assert abs(chi_square(torch.bincount(torch.bucketize(x, cells), minlength=62).double(), p * N)) < 5
    assert abs((x[:-1] * x[1:]).mean().item()) < 5 / math.sqrt(N)


def test_exponential_has_the_exponential_distribution():
    x = drawn("exponential", dtype=torch.float64)
    assert x.min() > 0
    u = torch.exp(-x)
    assert abs(chi_square(torch.histc(u, 128, 0, 1), N / 128)) < 5


def test_polynomials_are_exact_to_float64():
    n = torch.cat([torch.tensor([0, 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1]), torch.arange(0, 2**32, 99991)])
    x = (n.double() + 0.5) / 2**32
    torch.testing.assert_close(random._root(x), torch.sqrt(x), rtol=1e-15, atol=0)
    torch.testing.assert_close(random._log(n), -torch.log(x), rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(random._cosine(n), torch.cos(2 * math.pi * x), rtol=0, atol=2e-15)


# --- pieces and compiled code -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bits", "uniform", "normal", "exponential"])
def test_a_piece_equals_that_piece_of_the_whole(kind):
    dtype = torch.int64 if kind == "bits" else torch.float64
    whole = drawn(kind, (37, 41, 3), dtype)
    piece = draw(SEED, 0, kind, [5, 17, 2], [30, 3, 1], [37, 41, 3], dtype, CPU)
    assert torch.equal(piece, whole[30:35, 3:20, 1:3])


def test_inductor_draws_the_same_bits():
    def every(seed):
        args = [300, 7], [3, 0], [400, 7]
        return (
            decomposed(seed, 3, "bits", *args, torch.int64, CPU),
            decomposed(seed, 4, "uniform", *args, torch.float32, CPU),
            decomposed(seed, 5, "normal", *args, torch.float64, CPU),
            decomposed(seed, 6, "exponential", *args, torch.float32, CPU),
            decomposed(seed, 7, "uniform", *args, torch.bfloat16, CPU),
        )

    for got, want in zip(torch.compile(every)(SEED), every(SEED), strict=True):
        assert torch.equal(got, want)


def test_the_decomposition_equals_the_op():
    for kind, dtype in (("bits", torch.int64), ("uniform", torch.bfloat16), ("normal", torch.float32)):
        args = (SEED, 9, kind, [70000], [5], [80000], dtype, CPU)
        assert torch.equal(draw(*args), decomposed(*args))


# --- torch's operators --------------------------------------------------------------------------------------


def replaced(function, *inputs):
    """``function`` traced, its random operators replaced; a callable of a seed and the inputs."""
    gm = make_fx(torch.func.functionalize(function), tracing_mode="fake")(*inputs)
    graph = Graph()
    seed = graph.placeholder("seed")
    env = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], env.__getitem__))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    seed.meta["val"] = next(
        n.meta["val"].fake_mode for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
    ).from_tensor(torch.tensor(0))
    left = functionalize(graph, seed)
    graph.lint()
    made = GraphModule(gm, graph)
    for node in graph.nodes:
        assert "val" in node.meta or node.op == "output", node
    return made, left


X = torch.linspace(0, 1, 4096)
CASES = {
    "rand": (lambda x: torch.rand(4096), lambda y: abs(y.mean() - 0.5) < 0.03),
    "rand_like": (torch.rand_like, lambda y: y.max() < 1),
    "rand bf16": (lambda x: torch.rand(4096, dtype=torch.bfloat16), lambda y: y.max() < 1),
    "randn": (lambda x: torch.randn(64, 64), lambda y: abs(y.std() - 1) < 0.06),
    "randn_like": (torch.randn_like, lambda y: abs(y.mean()) < 0.08),
    "randint": (lambda x: torch.randint(-3, 4, (4096,)), lambda y: y.min() == -3 and y.max() == 3),
    "randint_like": (lambda x: torch.randint_like(x, 5), lambda y: set(y.tolist()) == {0, 1, 2, 3, 4}),
    "bernoulli": (torch.bernoulli, lambda y: y[:400].mean() < 0.15 and y[-400:].mean() > 0.85),
    "bernoulli p": (lambda x: torch.bernoulli(x, p=0.3), lambda y: abs(y.mean() - 0.3) < 0.04),
    "dropout": (
        lambda x: torch.nn.functional.dropout(x + 1, 0.25),
        lambda y: abs((y == 0).float().mean() - 0.25) < 0.03 and torch.allclose(y[y != 0], (X / 0.75 + 1 / 0.75)[y != 0]),
    ),
    "native_dropout": (lambda x: sum(torch.native_dropout(x + 1, 0.5, True)), lambda y: ((y == 0) | (y > 2)).all()),
    "normal_": (lambda x: x.clone().normal_(3, 0.5), lambda y: abs(y.mean() - 3) < 0.05),
    "normal of tensors": (lambda x: torch.normal(x + 9, x / 8), lambda y: abs((y - X - 9).std() - 0.072) < 0.01),
    "normal of a size": (lambda x: torch.normal(2.0, 0.5, (4096,)), lambda y: abs(y.mean() - 2) < 0.05),
    "rand complex": (
        lambda x: torch.rand(4096, dtype=torch.complex128),
        lambda y: abs(y.real.mean() - 0.5) < 0.03 and abs(y.imag.mean() - 0.5) < 0.03,
    ),
    "randn complex": (
        lambda x: torch.randn(4096, dtype=torch.complex64),
        lambda y: abs(y.real.var() - 0.5) < 0.05 and abs(y.imag.var() - 0.5) < 0.05 and abs((y * y).mean()) < 0.06,
    ),
    "uniform_": (lambda x: x.clone().uniform_(2, 5), lambda y: y.min() >= 2 and y.max() < 5 and abs(y.mean() - 3.5) < 0.1),
    "exponential_": (lambda x: x.clone().exponential_(2.0), lambda y: abs(y.mean() - 0.5) < 0.05),
    "geometric_": (lambda x: x.clone().geometric_(0.25), lambda y: y.min() == 1 and abs(y.mean() - 4) < 0.3),
    "cauchy_": (lambda x: x.clone().cauchy_(1.0), lambda y: abs(y.median() - 1) < 0.1),
    "log_normal_": (lambda x: x.clone().log_normal_(0.0, 0.5), lambda y: abs(y.log().std() - 0.5) < 0.04),
    "randperm": (lambda x: torch.randperm(500), lambda y: y.sort().values.equal(torch.arange(500)) and (y[:9] > 9).any()),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(4096, 3), 1),
        lambda y: not (y == 1).any() and abs((y == 2).float().mean() - 0.75) < 0.04,
    ),
    "multinomial without replacement": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.5, 3.0]).expand(64, 3), 3),
        lambda y: (y.sort(1).values == torch.arange(3)).all(),
    ),
    "multinomial with replacement": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), 4096, replacement=True),
        lambda y: not (y == 1).any() and abs((y == 2).float().mean() - 0.75) < 0.04,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_random_operators_become_draws(name):
    function, holds = CASES[name]
    made, left = replaced(function, X)
    assert not left and not any(random.is_random(n) for n in made.graph.nodes)
    want = function(X)
    got = made(torch.tensor(5), X)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert holds(want) and holds(got)
    assert torch.equal(got, made(torch.tensor(5), X)) and not torch.equal(got, made(torch.tensor(6), X))


def test_each_draw_has_its_own_stream():
    made, _ = replaced(lambda x: (torch.rand(64), torch.rand(64), torch.nn.functional.dropout(x)), X)
    first, second, _ = made(torch.tensor(1), X)
    assert not torch.equal(first, second)
    streams = [n.args[1] for n in made.graph.nodes if n.target is draw]
    assert streams == [0, 1, 2]


def test_operators_without_a_replacement_are_named():
    _, left = replaced(torch.poisson, X)
    assert [str(n.target) for n in left] == ["aten.poisson.default"]


def test_a_generator_of_its_own_is_an_error():
    with pytest.raises(SpmdError if TORCH > (2, 11) else NotImplementedError, match="generator" if TORCH > (2, 11) else "Generator"):
        replaced(lambda x: x + torch.randn(4096, generator=torch.Generator()), X)
