"""What lives when: values that activation checkpointing makes again live twice."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import spmd_compiler as spmd
from spmd_compiler.memory import lifetimes, storage


def residual(x, w1, w2, w3):
    for w in (w1, w2, w3):
        x = x + torch.tanh(torch.sin(x @ w) * 2)
    return (x * x).mean()


def in_backward(node):
    return node.meta.get("phase") == "backward"


def schedule(nodes, tagged):
    """(number, node) in the order of running: the backward makes a tagged node again before its first reader there."""
    order, again = [], set()

    def run(at, node, second):
        for used in node.all_input_nodes:
            if second and used in tagged and used not in again:
                again.add(used)
                run(at, used, True)
        order.append((at, node))

    for at, node in enumerate(nodes):
        run(at, node, in_backward(node))
    return order


@pytest.mark.parametrize(
    ("names", "twice"), [((), 0), (("sin", "mul", "tanh"), 9), (("mm", "sin", "mul", "tanh"), 12), (("",), 17)]
)
def test_lifetimes_are_those_of_the_schedule(names, twice):
    d = torch.randn(8, 8, requires_grad=True)
    program = spmd.export(residual, (d, d, d, d), mesh={"t": 1}, backward=True)
    graph = program.local.captured.graph.graph
    nodes = list(graph.nodes)
    tagged = {n for n in nodes if n.op == "call_function" and not in_backward(n) and n.name.startswith(names)}
    for n in tagged:
        n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    expected = {}
    for at, node in schedule(nodes, tagged):
        if node.op == "call_function" and storage(node) == (node, 0):
            expected.setdefault(node, []).append((at, at))
        for made in {storage(used)[0] for used in node.all_input_nodes} & expected.keys():
            expected[made][-1] = (expected[made][-1][0], at)
    found = {n: list(spans) for (n, _), spans in lifetimes(graph, ()).items()}
    assert found == expected
    assert sum(len(s) == 2 for s in found.values()) == twice
