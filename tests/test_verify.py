"""The verifier finds what is wrong with a damaged program, and nothing with a sound one."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import spmd_compiler as spmd
from spmd_compiler import collectives as coll
from spmd_compiler.verify import VerificationError, compare, derive


def mlp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    placements = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "out": {}}
    return spmd.export(model, (torch.randn(8, 16),), mesh={"tp": 4}, placements=placements, profile="bytes")


def the_reduction(program):
    return next(n for n in program.local.graph.graph.nodes if n.target is coll.all_reduce)


def test_a_sound_program():
    mlp().verify()


def drop(program):
    node = the_reduction(program)
    node.replace_all_uses_with(node.args[0])


def other_op(program):
    node = the_reduction(program)
    node.args = (*node.args[:3], "max")


def double(program):
    node = the_reduction(program)
    with program.local.graph.graph.inserting_after(node):
        again = program.local.graph.graph.call_function(coll.all_reduce, node.args)
    again.meta = dict(node.meta)
    again.args = (node, *node.args[1:])
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def other_spec(program):
    node = next(n for n in program.local.graph.graph.nodes if n.meta.get("origin") == "relu")
    node.meta["spec"] = spmd.Spec(("tp",), (Shard(0),))


def other_claim(program):
    node = next(n for n in program.local.graph.graph.nodes if n.meta.get("origin") == "relu")
    made = (spmd.Spec(("tp",), (Replicate(),)),)
    node.meta["choice"] = type(node.meta["choice"])(node.meta["choice"].operands, made)
    node.meta["spec"] = made[0]
    node.meta["global"] = tuple(node.meta["val"].shape)


@pytest.mark.parametrize("damage", [other_op, double, other_spec, other_claim])
def test_derive_finds(damage):
    program = mlp()
    damage(program)
    with pytest.raises(VerificationError, match=r"relu|all_reduce"):
        derive(program.local)


@pytest.mark.parametrize("damage", [drop, other_op, double])
def test_compare_finds(damage):
    program = mlp()
    damage(program)
    program.local.graph.recompile()
    with pytest.raises(VerificationError, match="out"):
        compare(program.local)
