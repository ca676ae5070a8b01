"""Random bodies of `cond`, `map`, `scan`, `while_loop` and regions under random placements of all that goes into them.

Each is compared with one device, forward and backward (of a `while_loop`, whose turns depend on data, no program that is
planned ahead has a backward).  `tried` takes any seed, and the kind "nested" too.
"""

import dataclasses
import random

import pytest
import torch
import torch._higher_order_ops as higher_order
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import spmd_compiler as spmd
from spmd_compiler import passes
from spmd_compiler.capture import capture_graph

# (Outputs are floating-point: torch has no gradient of a map or scan that has others.)
# Of a value ``c``, a square matrix ``a`` for its last dim, a vector ``b`` along that, and a random dim.
STEPS = {
    "matmul": lambda c, a, b, d: c @ a,
    "mlp": lambda c, a, b, d: torch.relu(c @ a) @ a.t(),
    "bias": lambda c, a, b, d: c * b + b,
    "gelu": lambda c, a, b, d: F.gelu(c),
    "softmax": lambda c, a, b, d: c.softmax(d),
    "cumsum": lambda c, a, b, d: c.cumsum(d).tanh(),
    "centre": lambda c, a, b, d: c - c.mean(d, keepdim=True),
    "norm": lambda c, a, b, d: F.layer_norm(c, c.shape[-1:], b),
    "flip": lambda c, a, b, d: c.flip(d),
    "roll": lambda c, a, b, d: c.roll(1, d),
    "sort": lambda c, a, b, d: c.sort(d).values,
    "halves": lambda c, a, b, d: torch.cat([c.narrow(d, 1, c.shape[d] - 1), c.narrow(d, 0, 1)], d),
    "take": lambda c, a, b, d: c.index_select(d, torch.arange(c.shape[d] - 1, -1, -1)),
    "gram": lambda c, a, b, d: (c @ c.t()) @ c * 0.1 if c.dim() == 2 else c * (c @ b),
    "weight": lambda c, a, b, d: c + (a * a).sum() * 0.01,
}  # fmt: skip
ENDS = {
    "same": lambda c, d: c.sin(),
    "sum": lambda c, d: c.sum(d),
    "turned": lambda c, d: c.t() if c.dim() == 2 else c * 2,
    "top": lambda c, d: c.topk(2, d).values,
    "flat": lambda c, d: c.flatten(),
}
OPTIONS = passes.Options("bytes", verify=True)


def draw_body(r, ndim):
    """A function that keeps the shape of its first argument, and one of what that gives."""
    steps = [(r.choice(sorted(STEPS)), r.randrange(ndim)) for _ in range(3)]
    end = r.choice(sorted(ENDS)), r.randrange(ndim)

    def body(c, a, b):
        for name, d in steps:
            c = STEPS[name](c, a, b, d).tanh()
        return c * 0.9  # torch's scan refuses a carried value that the backward needs

    return body, lambda c: ENDS[end[0]](c, end[1]).clone(), (*steps, end)


def draw_call(kind, r):
    """A call of an operator on ``x, a, b``, the shapes of these, and what it is made of."""
    k = r.choice([4, 6, 7, 8])
    rows = r.choice([3, 4, 5, 8])
    shape = {"map": r.choice([(4, k), (5, rows, k), (8, rows, k)]), "scan": (3, rows, k)}.get(kind, (rows, k))
    inner = len(shape) - (kind in ("map", "scan"))
    (one, ends, first), (two, _, second) = draw_body(r, inner), draw_body(r, inner)
    sign = r.choice([1, -1])

    def cond(x, a, b):
        return torch.cond(sign * x.sum() * x.sum() > 0, one, two, (x, a, b))

    def mapped(x, a, b):
        return higher_order.map(lambda c, a, b: (ends(one(c, a, b)), two(c, a, b)), x, a, b)

    def scan(x, a, b):
        def combine(c, t):
            return one(c + t, a, b), ends(c * t)

        return higher_order.scan(combine, x[0] * 0.5, x)

    def loop(x, a, b):
        return higher_order.while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, c + one(c, a, b)), (torch.tensor(0), x))

    def nested(x, a, b):
        def choose(c, a, b):
            return torch.cond(sign * c.sum() * c.sum() > 0, one, two, (c, a, b))

        return higher_order.scan(lambda c, t: (c + t, choose(c, a, b)), x, torch.arange(2, dtype=x.dtype))

    call = {"cond": cond, "map": mapped, "scan": scan, "while": loop, "nested": nested}[kind]
    return call, (shape, (k, k), (k,)), f"{kind} of {first} and {second}"


def draw_placements(r, shapes, mesh):
    return {
        name: {axis: r.choice([Replicate(), Partial(), *map(Shard, range(len(shape)))] if name == "x" else
                              [Replicate(), *map(Shard, range(len(shape)))]) for axis in mesh}
        for name, shape in zip("xab", shapes, strict=True)
    }  # fmt: skip


def draw_mesh(r):
    return r.choice([{"p": 2}, {"p": 3}, {"p": 4}, {"p": 2, "q": 2}])


def total(values):
    return sum(v.square().sum() for v in torch.utils._pytree.tree_leaves(values) if v.is_floating_point())


def tried(kind, seed):
    r = random.Random(f"{kind} {seed}")
    call, shapes, made_of = draw_call(kind, r)
    mesh = draw_mesh(r)
    placed = draw_placements(r, shapes, mesh)
    generator = torch.Generator().manual_seed(seed)
    args = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(kind != "while") for s in shapes]
    told = f"{made_of}: {shapes} {placed} on {mesh}"

    def function(x, a, b):
        out = call(x, a, b)
        return out if kind == "while" else (total(out), out)

    program = spmd.export(function, tuple(args), mesh=mesh, placements=placed, backward=kind != "while", profile="bytes")
    found, want = program.simulate(*args), function(*args)
    if kind != "while":
        wanted = torch.autograd.grad(want[0], args, materialize_grads=True)
        for name, arg, grad in zip("xab", args, wanted, strict=True):
            got = found[1].get(name, torch.zeros_like(arg))
            torch.testing.assert_close(got, grad, msg=lambda m, n=name: f"{told}: gradient of {n}: {m}")
        found = found[0]
    torch.testing.assert_close(
        torch.utils._pytree.tree_leaves(found), [v.detach() for v in torch.utils._pytree.tree_leaves(want)],
        msg=lambda m: f"{told}: {m}",
    )  # fmt: skip


def tried_regions(seed):
    """A region called twice, with gradients: the passes compare the simulated ranks with the global program."""
    r = random.Random(seed)
    k, rows, mesh = r.choice([4, 6, 7]), r.choice([3, 4, 8]), draw_mesh(r)
    shapes = (rows, k), (k, k), (k,)
    body, _, _ = draw_body(r, 2)
    placed = draw_placements(r, shapes, mesh)
    region = torch.compiler.nested_compile_region(body)
    args = [torch.randn(s, generator=torch.Generator().manual_seed(seed)).requires_grad_() for s in shapes]
    ran, given = [], set()

    def plan(gm, _):
        captured = capture_graph(gm, spmd.Mesh(mesh)).captured
        for i, each in enumerate(captured.inputs):
            name = next((n for n in "xab" if each.name.endswith(f"_{n}_") or each.name == n), None)
            if name is not None and each.kind != "tangent":
                spec = spmd.Spec(tuple(mesh), tuple(placed[name].values()))
                captured.inputs[i] = dataclasses.replace(each, spec=spec)
                given.add(name)
        ran.append(passes.run(captured, OPTIONS))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x, a, b: region(region(x, a, b) + x, a, b).square().sum(), backend=plan)(*args)
    assert ran and "x" in given


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["cond", "map", "scan", "while"])
def test_random_bodies(kind, seed):
    tried(kind, seed)


@pytest.mark.parametrize("seed", range(2))
def test_random_regions(seed):
    tried_regions(seed)
