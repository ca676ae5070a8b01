"""Placements that the solver chooses cost no more than layouts written by hand, within the memory that those hold."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from benchmarks.auto import ROOM, Case, expert_layouts, plan, sequence_layouts, table_layouts
from benchmarks.models import DLRM, Experts
from llama import Config, Llama
from spmd_compiler.blend import ENOUGH
from spmd_compiler.cost import PROFILES, Link

# a small machine, on which small models are worth cutting
SMALL = dataclasses.replace(
    PROFILES["cpu"], name="small", intra=Link(1e-7, 2e8), inter=Link(1e-7, 2e8), launch=0.0, matmul={4: 1e9, 2: 1e9}
)


def llama(layers):
    c = Config(vocab=96, dim=64, layers=layers, heads=4, kv_heads=2, ffn=128, length=16)
    ids = torch.arange(8 * 16).reshape(8, 16).remainder(96)
    return Llama(c), (ids, ids.flip(1))


def experts(layers):
    return Experts(16, 32, 4, 8), (torch.randn(4, 12, 16),)


def dlrm(layers):
    rows = (512, 64, 16, 8)
    model = DLRM(rows, 8, 4, 16)
    categories = torch.stack([torch.arange(32).mul(7).remainder(n) for n in rows], 1)
    return model, (torch.randn(32, 4), categories, torch.arange(32).remainder(2).float())


CASES = (
    Case("llama", {"tp": 4}, llama, sequence_layouts()),
    Case("experts", {"ep": 4}, experts, expert_layouts()),
    Case("dlrm", {"x": 4}, dlrm, table_layouts()),
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_auto_costs_no_more_than_what_is_written_by_hand(case):
    torch.manual_seed(0)
    model, args = case.build(1)
    case = dataclasses.replace(case, build=lambda layers: (model, args))
    found = [(p.price, sum(p.memory.values()), layout.name)
             for layout in case.layouts for p in [plan(case, 1, layout, SMALL)]]  # fmt: skip
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    sizes = sorted({round(ROOM * held) for _, held, _ in found})
    for budget in sizes[:1]:
        program = plan(case, 1, None, SMALL, budget)
        assert sum(program.memory.values()) <= budget
        best = min((price, by) for price, held, by in found if held <= budget)
        assert program.price <= best[0] * (1 + ENOUGH), f"{program.price} within {budget}; {best}"
    got, grads = program.simulate(*args)
    torch.testing.assert_close(got, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_experts_exchange_their_tokens():
    """Experts and groups of tokens cut over the same devices: what moves is tokens, not experts."""
    model, (x,) = experts(1)
    cut = {"x": {"ep": Shard(0)}, "up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}
    program = spmd.export(model, (x,), mesh={"ep": 4}, placements=cut, backward=True, profile=SMALL)
    kinds = {c.kind for c in program.collectives if c.bytes > 1024}
    assert kinds == {"all_to_all"}
