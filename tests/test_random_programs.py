"""Random programs of a dozen calls under random placements, forward and backward, beside one device."""

import random

import pytest
import torch
import torch.nn.functional as F
from prices import WIRES, priced
from torch.distributed.tensor import Partial, Replicate, Shard

import spmd_compiler as spmd


def _matmul(x, r):
    k, n = x.shape[-1], r.randint(1, 9)
    return x @ torch.arange(k * n, dtype=x.dtype).mul(r.uniform(1, 2)).cos().reshape(k, n)


def _reshape(x, r):
    """Two neighbouring dims merged, or the first parted."""
    if x.dim() > 2:
        at = r.randrange(x.dim() - 1)
        return x.flatten(at, at + 1)
    n = x.shape[0]
    return x.unflatten(0, (2, n // 2) if n % 2 == 0 else (1, n))


def _dim(x, r):
    return r.randrange(x.dim())


CALLS = {
    "matmul": _matmul,
    "reshape": _reshape,
    "gelu": lambda x, r: F.gelu(x),
    "softmax": lambda x, r: x.softmax(_dim(x, r)),
    "cumsum": lambda x, r: x.cumsum(_dim(x, r)),
    "cumprod": lambda x, r: (x.sigmoid() + 0.5).cumprod(_dim(x, r)),
    "sort": lambda x, r: x.sort(_dim(x, r)).values,
    "transpose": lambda x, r: x.transpose(_dim(x, r), _dim(x, r)),
    "cat": lambda x, r: torch.cat([x, x * 2], _dim(x, r)),
    "slice": lambda x, r: x.narrow(d := _dim(x, r), s := min(1, x.shape[d] - 1), x.shape[d] - s),
    "flip": lambda x, r: x.flip(_dim(x, r)),
    "roll": lambda x, r: x.roll(r.randint(1, 3), _dim(x, r)),
    "centre": lambda x, r: x - x.mean(_dim(x, r), keepdim=True),
    "extreme": lambda x, r: x / (x.abs().amax(_dim(x, r), keepdim=True) + 1),
    "layer_norm": lambda x, r: F.layer_norm(x, x.shape[-1:]),
    "topk": lambda x, r: x.topk(min(3, x.shape[d]), d).values if x.shape[d := _dim(x, r)] else x,
    "take": lambda x, r: x.index_select(d := _dim(x, r), torch.tensor([0, x.shape[d] - 1, 0])),
    "scale": lambda x, r: x * x.detach().sum(_dim(x, r), keepdim=True).tanh(),
}


def draw_program(seed):
    """A function of one tensor, its argument, and the names of its calls."""
    r = random.Random(seed)
    shape = [r.choice([2, 3, 4, 6, 7, 8]) for _ in range(r.choice([2, 3, 3]))]
    names = [r.choice(sorted(CALLS)) for _ in range(8)]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def function(x):
        again = random.Random(seed)
        out = x
        for name in names:
            if out.numel() < 4000:
                out = CALLS[name](out, again)
        return out.square().mean(), out

    return function, x.requires_grad_(), names


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    """What they compute, and what they cost: where computing is free, that is what the emitted collectives cost."""
    function, x, names = draw_program(seed)
    r = random.Random(~seed)
    mesh = r.choice([{"a": 4}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}])
    profile = "bytes" if seed % 2 else WIRES
    options = [Replicate(), Partial(), *(Shard(d) for d in range(x.dim()))]
    placed = [r.choice(options) for _ in mesh]
    program = spmd.export(function, (x,), mesh=mesh, placements={"x": placed}, backward=True, profile=profile)
    (loss, out), grads = program.simulate(x)
    want, wanted = function(x)
    told = f"{names} of {tuple(x.shape)} {placed} on {mesh}"
    torch.testing.assert_close(out, wanted.detach(), msg=lambda m: f"{told}: {m}")
    torch.testing.assert_close(loss, want.detach(), msg=lambda m: f"{told}: {m}")
    torch.testing.assert_close(grads["x"], torch.autograd.grad(want, x)[0], msg=lambda m: f"{told}: {m}")
    if profile is WIRES:
        assert program.price == pytest.approx(priced(program.mesh, program.collectives), rel=1e-9, abs=1e-20), told
