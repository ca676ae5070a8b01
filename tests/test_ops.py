"""The proof of every rule: each choice it claims, on every simulated rank, equals the op on global values.

A case is an op overload with sample arguments.  For each mesh and each choice the inputs are cut (partial ones
into random terms), the local form runs on all ranks, the results are joined and compared with the truth.  Sizes
are chosen so that some cuts are even, some uneven, and some leave ranks with nothing.
"""

import itertools
import math
import zlib

import ops_cases_compute  # noqa: F401  (fills CASES)
import ops_cases_move  # noqa: F401
import pytest
import torch
from ops_cases import CASES, MESHES, NO_RULE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from spmd_compiler import ops, simulate  # noqa: F401  (importing ops registers the rules)
from spmd_compiler.emit import emit_choice
from spmd_compiler.ir import operands, results
from spmd_compiler.rules import choices, rule_of

MOST = 96  # choices tried on one mesh; beyond that, every k-th


def joint_node(op, args, kwargs):
    """A graph of one node with fake values, the node, and the real tensors of its operands in order."""
    mode, graph, made = FakeTensorMode(), Graph(), {}

    def place(x):
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = graph.placeholder(f"x{len(made)}")
            made[id(x)].meta["val"] = mode.from_tensor(x)
            made[id(x)].meta["real"] = x
        return made[id(x)]

    nargs, nkwargs = pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(op, tuple(nargs), nkwargs)
    fargs, fkwargs = pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, torch.fx.Node) else n, (nargs, nkwargs))
    with mode:
        node.meta["val"] = op(*fargs, **fkwargs)
    return mode, node, [o.meta["real"] for o in operands(node)]


def tried(found):
    return found if len(found) <= MOST else found[:: math.ceil(len(found) / MOST)]


def prove(case, mesh, rule, mode, node, reals, truth, choice):
    generator = torch.Generator().manual_seed(zlib.crc32(str(choice).encode()))
    local = Graph()
    holders = []
    for i, (real, spec) in enumerate(zip(reals, choice.operands, strict=True)):
        holder = local.placeholder(f"x{i}")
        holder.meta["spec"] = spec
        holder.meta["val"] = mode.from_tensor(simulate.cut(real, spec, mesh, dict.fromkeys(mesh.axes, 0)))
        holders.append(holder)
    made = emit_choice(local, mesh, mode, node, rule, choice, holders)
    local.output(tuple(m for m in made if m is not None))
    feed = [simulate.split(real, spec, mesh, generator) for real, spec in zip(reals, choice.operands, strict=True)]
    inputs = [[pieces[rank] for pieces in feed] for rank in range(mesh.size)]
    outs = simulate.run(GraphModule({}, local), mesh, inputs)
    whole = [r for r in truth if isinstance(r, torch.Tensor)]
    specs = [s for s, m in zip(choice.results, made, strict=True) if m is not None]
    for i, (want, spec) in enumerate(zip(whole, specs, strict=True)):
        if i in case.skip:
            continue
        exact = not want.dtype.is_floating_point and not want.dtype.is_complex
        pieces = [out[i] for out in outs]
        assert all(p.dtype == want.dtype for p in pieces), f"result {i}: {pieces[0].dtype}, not {want.dtype}"
        got = simulate.join(pieces, spec, mesh, want.shape, check=exact)
        if case.uninitialised:
            continue
        if exact or case.exact or case.drawn:
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want)), f"result {i}: {got} != {want}"
        else:
            torch.testing.assert_close(got, want, rtol=case.rtol, atol=case.rtol, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_choice_equals_the_global_op(case):
    args, kwargs = case.make()
    if case.exact:  # whole numbers, whose random terms add up exactly
        rounded = {}
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: rounded.setdefault(id(x), (x * 8).round() if x.dtype == torch.float64 else x),
            (args, kwargs),
        )  # fmt: skip
    mode, node, reals = joint_node(case.op, args, kwargs)
    rule = rule_of(node)
    assert rule is not None, f"{case}: no rule"
    truth = case.op(*args, **kwargs)
    truth = list(truth) if isinstance(truth, (tuple, list)) else [truth]
    assert len(results(node)) == len(truth)
    for mesh in case.meshes or MESHES:
        parts = [math.prod(c) for r in (1, 2, 3) for c in itertools.combinations(mesh.shape, r)]
        uneven = frozenset((n, p) for f in rule.sizes for n in rule.extents(f) for p in parts)
        found = choices(rule, mesh, uneven, ("sum", "max", "min", "product"))
        assert len(found) > 1 or not case.shards, f"{case}: only the replicated choice on {mesh}"
        for choice in tried(found):
            try:
                prove(case, mesh, rule, mode, node, reals, truth, choice)
            except Exception as error:
                raise AssertionError(f"{case} {mesh} {choice}:\n{type(error).__name__}: {error}") from error
    for factor in case.shards:
        assert factor in rule.shardable(), f"{case}: factor {factor} is not shardable: {rule.shardable()}"


@pytest.mark.parametrize("case", NO_RULE, ids=str)
def test_uses_without_a_rule_fall_back(case):
    args, kwargs = case.make()
    _, node, _ = joint_node(case.op, args, kwargs)
    rule = rule_of(node)
    assert rule is None or len(choices(rule, MESHES[0])) == 1
