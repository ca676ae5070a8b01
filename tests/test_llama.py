"""A Llama's training step on simulated meshes: loss and gradients, collectives, determinism."""

import functools
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from prices import priced
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from llama import MEGATRON, Config, Llama  # noqa: E402

SMALL = Config(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, ffn=48, length=16)
TP = {name: {"tp": Shard(dim)} for name, dim in MEGATRON.items()}
DATA = {"ids": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
FSDP = DATA | {"*weight": {"dp": Shard(0)}}
FSDP_TP = DATA | {n: {"dp": Shard(0), "tp": Shard(d)} for n, d in MEGATRON.items()} | {"*norm.weight": {"dp": Shard(0)}}


def step(config, batch, dtype):
    """The model, its inputs, and the loss and gradients of a single device."""
    torch.manual_seed(0)
    model = Llama(config).to(dtype)
    ids, targets = (torch.randint(0, config.vocab, (batch, config.length)) for _ in range(2))
    loss = model(ids, targets)
    loss.backward()
    return model, (ids, targets), loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("profile", ["bytes", "h100"])
@pytest.mark.parametrize(
    "mesh, placements, batch",
    [
        ({"tp": 4}, TP, 4),
        ({"dp": 4}, DATA, 4),
        ({"dp": 4}, FSDP, 4),
        ({"dp": 4}, FSDP, 6),  # uneven
        ({"dp": 4}, FSDP, 3),  # a rank with nothing
        ({"dp": 2, "tp": 2}, DATA | TP, 4),
        ({"dp": 2, "tp": 2}, FSDP_TP, 4),
        ({"dp": 2, "tp": 1}, FSDP_TP, 4),
    ],
)
def test_step_equals_one_device(mesh, placements, batch, profile):
    model, args, loss, grads = step(SMALL, batch, torch.float32)
    program = spmd.export(model, args, mesh=mesh, placements=placements, backward=True, profile=profile)
    assert program.gap == 0.0
    assert program.replicated_ops == ()
    got, found = program.simulate(*args)
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=0)
    assert found.keys() == grads.keys()
    for name, want in grads.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-5 * float(want.abs().max()), msg=name)
    specs = {i.name: i.spec for i in program.local.inputs}
    for o in program.local.outputs:
        if o.kind == "grad":
            assert o.spec == specs[o.name]
    program.verify()


def test_three_axes_and_tied_embeddings():
    model, args, loss, grads = step(Config(**{**vars(SMALL), "tied": True, "layers": 1}), 4, torch.float32)
    mesh = {"dp": 2, "tp": 2, "x": 2}
    program = spmd.export(
        model, args, mesh=mesh, placements=DATA | {"embed.weight": {"tp": Shard(0), "x": Shard(1)}}, backward=True,
        profile="h100",
    )  # fmt: skip
    got, found = program.simulate(*args)
    torch.testing.assert_close(got, loss, rtol=1e-6, atol=0)
    for name, want in grads.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-5 * float(want.abs().max()), msg=name)


def test_fsdp_gathers_each_parameter_once_a_phase():
    config = Config(vocab=64, dim=32, layers=2, heads=4, kv_heads=4, ffn=48, length=64)
    with torch.device("meta"):
        model = Llama(config)
    ids = torch.zeros(64, config.length, dtype=torch.int64, device="meta")
    program = spmd.export(model, (ids, ids), mesh={"dp": 4}, placements=FSDP, backward=True, profile="bytes")
    matrices = Counter(tuple(sorted(p.shape)) for p in model.parameters() if p.dim() == 2)
    found = Counter()
    for c in program.collectives:
        whole = [c.shape[0] * 4, *c.shape[1:]] if c.kind == "reduce_scatter" else c.shape
        found[c.phase, c.kind, tuple(sorted(whole))] += 1
        assert c.kind != "all_reduce" or c.shape == (), c
    for shape, count in matrices.items():
        embedding = shape == (config.dim, config.vocab)  # the embedding's table is not read in backward
        assert found["forward", "all_gather", shape] == count
        assert found["backward", "all_gather", shape] == count - embedding
        assert found["backward", "reduce_scatter", shape] == count
    assert {kind for _, kind, _ in found} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_megatron_reduces_twice_a_layer_and_phase():
    config = Config(vocab=256, dim=128, layers=3, heads=4, kv_heads=2, ffn=352, length=16)
    with torch.device("meta"):
        model = Llama(config)
    ids = torch.zeros(2, config.length, dtype=torch.int64, device="meta")
    program = spmd.export(model, (ids, ids), mesh={"tp": 2}, placements=TP, backward=True, profile="bytes")
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    size = 2 * config.length * config.dim
    large = Counter(c.phase for c in program.collectives if math.prod(c.shape) == size)
    assert large == {"forward": 2 * config.layers + 1, "backward": 2 * config.layers + 1}  # the embedding, the head
    rest = [c.shape for c in program.collectives if math.prod(c.shape) != size]
    assert max(torch.Size(s).numel() for s in rest) == 2 * config.length  # the loss: one value a token
    # the price is that of what is in the text
    assert program.price == pytest.approx(priced(program.mesh, program.collectives, spmd.PROFILES["bytes"]), rel=1e-4)


def test_same_text_in_every_process():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import torch, spmd_compiler as spmd, test_llama as t\n"
        "model, args, *_ = t.step(t.SMALL, 4, torch.float32)\n"
        "p = spmd.export(model, args, mesh={'dp': 2, 'tp': 2}, placements=t.DATA | t.TP, backward=True, profile='h100')\n"
        "print(p.text())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in (0, 1)
    }  # fmt: skip
    assert len(texts) == 1
    assert 'param "layers.0.attention.wq.weight"' in texts.pop()


# --- changes of one line, as the diff tells them ------------------------------------------------------------------


def planned(mesh, placements, profile="h100", edit=lambda layer: layer):
    """A plan of the small Llama whose first layer is edited."""
    with torch.device("meta"):
        model, ids = Llama(SMALL), torch.empty(4, SMALL.length, dtype=torch.int64)
    model.layers[0].forward = edit(model.layers[0].forward)
    return spmd.export(model, (ids, ids), mesh=mesh, placements=placements, backward=True, profile=profile, name="step")


LAYOUTS = {
    "tensor": ({"tp": 4}, TP, "bytes"),
    "fsdp": ({"dp": 4}, FSDP, "h100"),
    "fsdp x tensor": ({"dp": 2, "tp": 2}, FSDP_TP, "h100"),
}


@functools.cache
def base(layout):
    return planned(*LAYOUTS[layout])


def operator(forward):
    return lambda *args: forward(*args).cos()


def dtype(forward):
    return lambda *args: forward(*args).double().relu().float()


def constraint(forward):
    return lambda *args: spmd.constrain(forward(*args), {"tp": Shard(1)})


@pytest.mark.parametrize("layout", ["tensor"])
def test_an_operator_or_a_dtype_more_is_all_that_changes(layout):
    for edit in (operator, dtype):
        change = spmd.diff(base(layout), planned(*LAYOUTS[layout], edit))
        assert change.ops and not (change.placements or change.added or change.removed or change.moved or change.resized)
        assert len(change.lines()) <= 3, str(change)


@pytest.mark.parametrize("layout", ["tensor", "fsdp x tensor"])
def test_a_constraint_less_changes_its_surroundings(layout):
    change = spmd.diff(planned(*LAYOUTS[layout], constraint), base(layout))
    assert change.removed and not change.placements and not change.ops
    assert all(re.search(r"llama.py:(8[78]|110)$", k.source) for k in (*change.removed, *change.added)), str(change)
    assert len(change.lines()) < 10


@pytest.mark.parametrize(("layout", "step"), [("tensor", 3), ("fsdp x tensor", 7)])
def test_a_weight_placed_otherwise_is_told_in_under_ten_lines(layout, step):
    mesh, placements, profile = LAYOUTS[layout]
    old = base(layout)
    weights = [(n, p.dim()) for n, p in Llama(SMALL).named_parameters() if "layers.0" not in n]
    for i, (name, ndim) in list(enumerate(weights))[::step]:
        given = dict(zip(mesh, old.placements[name].placements, strict=True))
        others = [p for p in (Replicate(), *map(Shard, range(ndim))) if p != given["tp"]]
        other = given | {"tp": others[i % len(others)]}
        change = spmd.diff(old, planned(mesh, {**placements, name: other}, profile))
        lines = change.lines()
        assert len(lines) < 10, f"{name} {other}: {change}"
        assert [c.name for c in change.placements] == [name] and lines[0].startswith("~ param"), lines
