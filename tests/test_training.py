"""Training a Llama with dropout on four gloo ranks: every mesh gives the same losses, those of one device."""

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import init_device_mesh

import spmd_compiler as spmd

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import MEGATRON, Config, Llama

STEPS = 4
TP = {name: {"tp": spmd.Shard(dim)} for name, dim in MEGATRON.items()}
FSDP = {"*weight": {"dp": spmd.Shard(0)}}
LAYOUTS = {
    "dp": ({"dp": 4}, {}),
    "tp": ({"tp": 4}, TP),
    "fsdp": ({"dp": 4}, FSDP),
    "fsdp x tp": ({"dp": 2, "tp": 2}, {n: {**p, "dp": spmd.Shard(0)} for n, p in TP.items()} | FSDP),
    "three axes": ({"dp": 2, "tp": 2, "x": 1}, TP),
}


def config(dropout, layers):
    return Config(vocab=32, dim=32, layers=layers, heads=4, kv_heads=4, ffn=48, length=8, dropout=dropout)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (8, 9), generator=generator) for _ in range(STEPS)]


def losses(layout, dropout, layers):
    """The losses of a few steps, printed in full by rank 0's reckoning; the same on every rank."""
    torch.compiler.reset()  # one process compiles one forward more often than Dynamo allows
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(config(dropout, layers))
    model = spmd.parallelize(model, mesh, placements)
    step = torch.compile(model, backend="spmd", options={"lower": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = [spmd.Shard(0) if axis == "dp" else spmd.Replicate() for axis in sizes]
    torch.manual_seed(7)
    found = []
    for data in batches():
        ids, targets = (spmd.distribute_tensor(t.contiguous(), mesh, batch) for t in (data[:, :-1], data[:, 1:]))
        loss = step(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.full_tensor().item())
    return found


def one_device(layers):
    torch.manual_seed(0)
    model = Llama(config(0.0, layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for data in batches():
        loss = model(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("layout", "layers"), [("fsdp", 1), ("fsdp x tp", 2), ("three axes", 1)])
def test_losses_are_those_of_one_device(gloo4, layout, layers):
    ranks = gloo4(losses, layout, 0.0, layers)
    assert all(r == ranks[0] for r in ranks)
    assert ranks[0] == pytest.approx(one_device(layers), rel=1e-5)


def test_dropout_is_the_same_on_every_mesh(gloo4):
    expected, *others = [gloo4(losses, layout, 0.2, 1)[0] for layout in ("dp", "tp", "fsdp x tp")]
    for found in others:
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(one_device(1), rel=1e-4)
