"""Explanations whose alternatives come true when written, and contracts."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd

MESH = {"dp": 2, "tp": 4}
WHERE = {"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "x": {"dp": Shard(0)}}


class Net(nn.Module):
    """``places`` constrains values by name, as explanations say to: 'h', 'y', or the gradient of 'y' as 'gy'."""

    def __init__(self, **places):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.places = places

    def put(self, name, x):
        x = spmd.constrain(x, self.places[name]) if name in self.places else x
        if f"g{name}" in self.places:
            x.register_hook(lambda g: spmd.constrain(g, self.places[f"g{name}"]))
        return x

    def forward(self, x):
        h = self.put("h", self.up(x))
        y = self.put("y", self.down(h.relu()))
        return (x + y).square().mean()


def plan(where=WHERE, backward=True, mesh=MESH, profile="h100", **places):
    x = torch.zeros(1024, 256)
    return spmd.export(Net(**places), (x,), mesh=mesh, placements=where, backward=backward, profile=profile)


@pytest.fixture(scope="module", params=["h100", "bytes"])
def base(request):
    return plan(profile=request.param)


def line(text):
    """Where a line of this file is, as programs say it."""
    return f"tests/test_explain.py:{next(i for i, s in enumerate(open(__file__), 1) if text in s)}"


PLACES = {line("h = self.put"): "h", line("y = self.put"): "y"}


def told(write):
    """``(name of the value, placements)`` that an alternative says to constrain."""
    found = re.match(r"x(.*)spmd.constrain\([xg], (.*?)\)\)? on the value of (.*)", write)
    placements = eval(found[2], {"Shard": Shard, "Replicate": spmd.Replicate})
    return ("g" if "register_hook" in found[1] else "") + PLACES.get(found[3], "?"), placements


def test_the_reduction_of_a_value(base):
    c = next(c for c in base.collectives if c.phase == "forward" and "tp" in c.axis and c.op)
    found = spmd.explain(base, c)
    assert found.collective == c and found.value == f"the result of aten.mm at {line('y = self.put')}"
    assert re.match(r"\{dp: .*, tp: P\(sum\)} by %mm_1 = aten.mm at", found.made)
    assert found.wanted and "aten.add" in found.wanted[0]
    assert 0 < found.seconds < found.price == base.price
    assert found.alternatives == tuple(sorted(found.alternatives, key=lambda a: a.price))
    assert found == spmd.explain(base, c.name) == spmd.explain(base, f"%{c.name}")
    lines = str(found).splitlines()
    assert lines[0].startswith(f"%{c.name} = {c.kind}[tp, sum] at tests/test_explain.py:")
    assert any(found.alternatives[0].write in text for text in lines)


def test_alternatives_come_true_when_written(base):
    """What an explanation says to write has the price and the bytes that it says."""
    tried = set()
    for c in base.collectives:
        for a in spmd.explain(base, c).alternatives:
            if a.write.startswith("placements="):
                name, spec = next(iter(eval(a.write.partition("=")[2]).items()))
                written = plan({**WHERE, name: spec}, profile=base.local.profile)
                assert written.price == pytest.approx(a.price, rel=1e-6)
                assert written.wire_bytes == pytest.approx(a.wire_bytes)
                tried.add(name)
            else:
                name, spec = told(a.write)
                assert a.price >= base.price * (1 - 1e-5)  # the program is the cheapest there is
                if name == "y":
                    written = plan(y=spec, profile=base.local.profile)
                    assert written.price == pytest.approx(a.price, rel=1e-6)
                    assert written.wire_bytes == pytest.approx(a.wire_bytes)
                    tried.add(name)
    assert "y" in tried and tried & {"x", "up.weight", "down.weight"}


def test_what_changes_nothing_is_no_alternative():
    """Such as the constraint of a value to what it is on the way."""
    program = plan()

    def twice(x, w):
        y = spmd.constrain(x * 2, {"dp": Shard(0), "tp": Shard(1)})
        return y @ w

    where = {"x": {"dp": Shard(0), "tp": Shard(1)}, "w": {}, "out": {}}
    gathered = spmd.export(twice, (torch.zeros(32, 64), torch.zeros(64, 512)), mesh=MESH, placements=where)
    for each in (program, gathered):  # by two gathers, on the way of which a constraint stops
        found = [a for c in each.collectives for a in spmd.explain(each, c).alternatives]
        assert found and all(a.price > each.price or a.wire_bytes != each.wire_bytes for a in found)


def test_a_gradient_is_constrained_by_a_hook():
    hooked = plan(gy={"dp": Shard(0), "tp": Shard(1)}, profile="bytes")
    hooked.verify()
    node = next(n for n in hooked.local.captured.graph.graph.nodes if "constrain" in str(n.target))
    assert node.meta["phase"] == "backward" and "tp: S(1)" in node.args[1]


def test_inside_a_local_form():
    x = torch.zeros(2, 3, 16, 16)
    program = spmd.export(nn.Conv2d(3, 4, 3, padding=1), (x,), mesh={"a": 4}, placements={"input": {"a": Shard(2)}})
    c = next(c for c in program.collectives if c.kind == "permute")
    found = spmd.explain(program, c)
    assert found.made.startswith("inside aten.convolution at ") and "{a: S(2)}" in found.made
    assert {str(a.spec) for a in found.alternatives} == {"{a: R}", "{a: S(1)}", "{a: S(3)}"}


def test_an_output_and_a_single_axis():
    f = lambda x, w: x @ w  # noqa: E731
    given = torch.zeros(64, 64), torch.zeros(64, 64)
    where = {"x": {"a": Shard(1)}, "w": {"a": Shard(0)}, "out": {}}
    program = spmd.export(f, given, mesh={"a": 4}, placements=where, profile="bytes")
    (c,) = program.collectives
    found = spmd.explain(program, c)
    assert found.wanted == ("output 'out', which is {a: R}",)
    free = next(a for a in found.alternatives if a.write == "leave 'out' out of placements")
    without = {k: v for k, v in where.items() if k != "out"}
    again = spmd.export(f, given, mesh={"a": 4}, placements=without, profile="bytes")
    assert free.price == pytest.approx(again.price) and free.wire_bytes == again.wire_bytes < program.wire_bytes


def test_what_is_no_collective(base):
    with pytest.raises(spmd.SpmdError, match=r"no collective 'mm'; it has .*all"):
        spmd.explain(base, "mm")
    with pytest.raises(spmd.SpmdError, match="expected a Program"):
        spmd.explain(base.text(), "all_reduce")


# --- contracts --------------------------------------------------------------------------------------------------


def export(**contract):
    return spmd.export(Net(), (torch.zeros(1024, 256),), mesh=MESH, placements=WHERE, profile="h100", **contract)


def test_contracts_that_hold():
    program = export()
    kinds = [f"{c.kind}[{c.axis}]" for c in program.collectives]
    count = {k: len(list(g)) for k, g in itertools.groupby(sorted(kinds))}
    held = sum(program.memory.values())
    export(forbid={"all_to_all", "permute[dp]"}, expect=count | {"*[dp]": sum("dp" in k for k in kinds)}, max_wire_bytes=program.wire_bytes, max_memory=f"{held} B")


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ({"forbid": "*[tp]"}, r"a contract is broken: \*\[tp\] is forbidden, and there (is 1|are \d) at tests/test_explain.py:.*\n%\w+ = .*\[tp(, sum)?\](.|\n)*made .*tp: P\(sum\)(.|\n)*spmd.constrain\(x"),
        ({"expect": {"all_to_all": 2}}, "2 all_to_all are expected, and there is none"),
        ({"max_wire_bytes": "1KiB"}, r"a device sends .* MiB; 1.00 KiB are allowed\n%\w+ = "),
        ({"max_memory": 10_000}, r"a device holds .*parameters .*activations .*; 9.77 KiB are allowed: memory_budget"),
        ({"forbid": ["*[dp]"], "max_memory": 1}, r"dp(.|\n)*a device holds"),
    ],
)  # fmt: skip
def test_broken_contracts_are_explained(contract, words):
    with pytest.raises(spmd.ContractError) as error:
        export(**contract)
    assert re.search(words, str(error.value)), error.value


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ({"forbid": {"gather"}}, "'gather' names no collective; write one of all_reduce"),
        ({"forbid": 3}, "3 names none"),
        ({"expect": ["all_gather"]}, "expect maps names"),
        ({"expect": {"all_gather": -1}}, "how many there must be, not -1"),
        ({"max_wire_bytes": "many"}, "no number of bytes"),
    ],
)
def test_what_is_no_contract(contract, words):
    with pytest.raises(spmd.SpmdError, match=words):
        export(**contract)
