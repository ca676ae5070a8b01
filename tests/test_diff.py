"""What changed between two programs: in words, as JSON, by exit code."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from spmd_compiler.cli import main

MESH = {"dp": 2, "tp": 4}
TP = {"layers.*.up.weight": {"tp": Shard(0)}, "layers.*.down.weight": {"tp": Shard(1)}, "x": {"dp": Shard(0)}}

SHARDED = TP | {"layers.*.up.weight": [Shard(1), Shard(0)], "layers.*.down.weight": [Shard(0), Shard(1)]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, layers=3, middle=None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.middle = middle or (lambda x: x)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.middle(layer(x)) if i == 0 else layer(x)
        return x.square().mean()


def plan(placements=TP, batch=8, mesh=MESH, **net):
    return spmd.export(
        Net(**net), (torch.zeros(batch, 16),), mesh=mesh, placements=placements, backward=True, profile="bytes",
        name="net",
    )  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return plan()


def test_the_same_whatever_values_are_called(base):
    assert spmd.diff(base, plan()).same
    text = re.sub(r"%(\w+)", r"%other_\1", base.text()).replace("test_diff.py:2", "test_diff.py:1")
    change = spmd.diff(base, text)
    assert change.same and change.lines() == ["  the programs are the same"]
    assert spmd.diff(base.text("collectives"), text).same  # at the coarser of the two levels


def test_an_inserted_operator_is_one_change(base):
    change = spmd.diff(base, plan(middle=lambda x: x.cos() * 1.0))
    assert {c.new.op for c in change.ops} >= {"aten.cos"} and all(c.old is None for c in change.ops)
    assert not (change.added or change.removed or change.moved or change.resized or change.placements)
    assert len(change.lines()) <= 4
    back = spmd.diff(change.new, base)
    assert [c.old for c in back.ops] == [c.new for c in change.ops]


def test_other_arguments_are_a_change():
    change = spmd.diff(plan(middle=lambda x: x * 2.0), plan(middle=lambda x: x * 3.0))
    assert {c.new.op for c in change.values} == {"aten.mul.Tensor"} and len(change.values) == 2
    assert all("3.0" in c.new.call() and "2.0" in c.old.call() for c in change.values)
    assert not change.ops and "other" in str(change)


def test_a_constraint_that_went(base):
    constrained = plan(middle=lambda x: spmd.constrain(x, {"dp": Shard(0), "tp": Shard(1)}))
    change = spmd.diff(constrained, base)
    lines = change.lines()
    assert len(lines) < 10
    assert re.fullmatch(r"- constraint of aten.\S+ at tests/test_diff.py:\d+: {dp: S\(0\), tp: S\(1\)}", lines[0])
    assert any(line.startswith("- ") and "reduce_scatter[tp" in line for line in lines)
    back = spmd.diff(base, constrained.text("collectives")).json()["constraints"]
    assert [(c["old"], c["new"][:11]) for c in back] == [(None, "constraint ")]
    assert not change.placements
    assert sum(k.wire_bytes(spmd.Mesh(MESH)) for k in change.removed) > 0


def test_a_weight_placed_otherwise(base):
    other = {"layers.1.up.weight": {}} | TP
    change = spmd.diff(base, plan(other))
    assert [(c.name, c.kind, *c.specs) for c in change.placements] == [
        ("layers.1.up.weight", "param", "{dp: R, tp: S(0)}", "{dp: R, tp: R}")
    ]  # its gradient follows
    assert len(change.lines()) < 10
    assert "~ param layers.1.up.weight: {dp: R, tp: S(0)} -> {dp: R, tp: R}" in change.lines()


@pytest.mark.parametrize("level", ["full", "collectives"])
def test_sizes(base, level):
    change = spmd.diff(base.text(level), plan(batch=16).text(level))
    assert {c.name for c in change.placements} == {"x"}
    old, new = change.wire_bytes
    assert (old, new) == (base.wire_bytes, plan(batch=16).wire_bytes)
    if level == "full":  # the same collectives of larger values
        assert change.resized and not change.added and not change.removed
        assert all(b.wire_bytes(change.new.mesh) == 2 * a.wire_bytes(change.old.mesh) for a, b in change.resized)


def test_another_axis_and_another_mesh(base):
    swapped = {n: {"dp": p["tp"]} if "tp" in p else {"tp": p["dp"]} for n, p in TP.items()}
    change = spmd.diff(base, plan(swapped, mesh={"dp": 4, "tp": 2}))
    assert change.header["mesh"] == ("mesh(dp=2, tp=4)", "mesh(dp=4, tp=2)")
    assert {(a.axis, b.axis) for a, b in change.moved} == {("tp", "dp"), ("dp", "tp")}
    assert not change.added and not change.removed and not change.ops


def test_totals_add_up(base):
    sharded = plan(SHARDED)
    change = spmd.diff(base, sharded)
    sent = sum(k.wire_bytes(sharded.mesh) for k in change.added) - sum(k.wire_bytes(base.mesh) for k in change.removed)
    for old, new in (*change.moved, *change.resized):
        sent += new.wire_bytes(sharded.mesh) - old.wire_bytes(base.mesh)
    assert sent == pytest.approx(sharded.wire_bytes - base.wire_bytes)
    assert sum(b for _, b in change.wire.values()) == pytest.approx(sharded.wire_bytes)
    assert change.memory["parameters"] == (base.memory["parameters"], sharded.memory["parameters"])
    found = json.loads(json.dumps(change.json()))
    assert len(found["added"]) == len(change.added) and found["wire"] and not found["same"]
    assert len(change.lines(details=True)) >= len(change.lines())


def test_order_is_a_change():
    head = 'program "p"  mesh(a=2)\n%x = input "x"  f32[2]  {a: P(sum)}\n%y = input "y"  f32[4]  {a: P(sum)}\n'
    one = "%r = all_reduce[a, sum](%x)  f32[2]  {a: R}\n"
    two = "%s = all_reduce[a, sum](%y)  f32[4]  {a: R}\n"
    change = spmd.diff(head + one + two, head + two + one)
    assert len(change.moved) == 1 and "another order" in str(change) and not change.added


# --- the command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff")
    gathered = plan(SHARDED)
    for name, text in {"old": base.text(), "new": gathered.text("collectives"), "bad": "program", "sum": base.text("summary")}.items():
        (folder / name).write_text(text)
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("old", "old"), 0, "the same"),
        (("old", "old", "--forbid", "*", "--max-wire-increase", "0%"), 0, "the same"),
        (("old", "new"), 1, "+ "),
        (("old", "new", "--forbid", "all_gather[tp]", "--max-memory", "60GiB"), 1, "+ "),
        (("old", "new", "--forbid", "all_to_all"), 2, "! all_to_all is forbidden, and 1 came at tests/test_diff.py:"),
        (("old", "new", "--forbid", "*[dp]"), 2, "! *[dp] is forbidden"),
        (("old", "new", "--max-memory", "1KiB"), 2, "1.00 KiB are allowed"),
        (("old", "new", "--max-wire-increase", "0 B"), 1, "wire"),
        (("old", "missing"), 3, "missing"),
        (("old",), 3, "NEW"),
        (("old", "bad"), 3, "bad: line 1, column"),
        (("old", "sum"), 3, "summary holds no collectives"),
        (("old", "bytes"), 3, "bytes: neither a saved program nor"),
        (("old", "new", "--forbid", "gather"), 3, "names no collective"),
        (("old", "new", "--max-memory", "much"), 3, "no number of bytes"),
        (("old", "new", "--max-memory", "1.2.3"), 3, "no number of bytes"),
        (("old", "new", "--max-wire-increase", "1.2.3%"), 3, "no number of bytes"),
    ],
)  # fmt: skip
def test_exit_codes(files, monkeypatch, args, code, words):
    monkeypatch.chdir(files)
    found = CliRunner().invoke(main, ["diff", *args])
    assert found.exit_code == code, found.output
    assert words in found.output and "\x1b" not in found.output and "Traceback" not in found.output


def test_an_increase_is_a_share_or_bytes(files, base, monkeypatch):
    monkeypatch.chdir(files)
    sharded = plan(SHARDED).wire_bytes
    more = base.wire_bytes - sharded
    share = more / sharded * 100
    for limit, code in ((f"{share - 0.1}%", 2), (f"{share + 0.1}%", 1), (f"{more - 1}", 2), (f"{more + 1} B", 1)):
        assert CliRunner().invoke(main, ["diff", "new", "old", "--max-wire-increase", limit]).exit_code == code


def test_json_and_colour(files, monkeypatch):
    monkeypatch.chdir(files)
    found = CliRunner().invoke(main, ["diff", "old", "new", "--json", "--forbid", "all_to_all"])
    assert found.exit_code == 2 and len(json.loads(found.output)["exceeded"]) == 1
    assert "\x1b[" in CliRunner().invoke(main, ["diff", "old", "new"], color=True).output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in CliRunner().invoke(main, ["diff", "old", "new"], color=True).output


def test_what_is_no_program():
    with pytest.raises(spmd.SpmdError, match="expected a program or its text, got int"):
        spmd.diff(3, 4)


def in_order(*values):
    *values, step = values if isinstance(values[-1], int) else (*values, 1)
    return tuple(values[::step])


def small(function, rows=4):
    args = torch.zeros(rows, 4), torch.zeros(rows, 4)
    return spmd.export(function, args, mesh={"tp": 2}, profile="bytes", name="small")


@pytest.mark.parametrize(
    "old, new, words",
    [
        (lambda x, y: x.sin() * 2, lambda x, y: x.cos() * 2, "~ aten.sin -> aten.cos at "),
        (lambda x, y: x - y, lambda x, y: y - x, "~ aten.sub.Tensor at .*: other operands, "),
        (lambda x, y: x.max(0).values, lambda x, y: x.min(0).values, "~ aten.max.dim -> aten.min.dim at "),
        (lambda x, y: in_order(x.sin(), y.cos()), lambda x, y: in_order(x.sin(), y.cos(), -1), "~ 2 outputs out.*: another value, "),
        (lambda x, y: x.t() @ y, lambda x, y: x @ y.t(), "~ 2 values .* other operands, "),
        (lambda x, y: x.sin(), lambda x, y: (x.sin(), y), "~ output out: now out.0"),
    ],
)
def test_what_keeps_its_type_is_a_change_too(old, new, words):
    """Other operators, operands and outputs, of as many bytes and in the same places."""
    change = spmd.diff(small(old), small(new))
    assert not change.same and any(re.match(words, line) for line in change.lines()), str(change)
    assert len(change.lines()) <= 4 and not spmd.diff(small(new), small(old)).same


def test_draws_that_came_were_not_there_before():
    def dropped(p):
        return plan(middle=lambda x: torch.dropout(torch.dropout(x, p, True).sin(), p, True))

    change = spmd.diff(dropped(0.0), dropped(0.5))
    assert sum(c.line.op == "spmd.draw" for c in change.ops) == 2 and "draw" not in "".join(map(str, change.values))
    assert [str(c.line.label) for c in change.placements] == ["seed"] and len(change.lines()) < 10


def test_names_say_which(base):
    """Of layers alike those that changed are named, and all of them by a star."""
    some = {f"layers.{i}.up.weight": {} for i in (0, 2)} | TP
    assert "~ 2 params layers.{0,2}.up.weight: {dp: R, tp: S(0)} -> {dp: R, tp: R}" in spmd.diff(base, plan(some)).lines()
    every = {"layers.*.up.weight": {}} | {k: p for k, p in TP.items() if "up" not in k}
    assert "~ 3 params layers.*.up.weight: {dp: R, tp: S(0)} -> {dp: R, tp: R}" in spmd.diff(base, plan(every)).lines()
    more = spmd.diff(base, plan(layers=5)).lines()
    assert "+ 2 params layers.{3,4}.up.weight: f32[32, 16 | 8, 16] {dp: R, tp: S(0)}" in more
    wide = spmd.diff(small(torch.add), small(torch.add, rows=6)).lines()
    assert wide[0] == "~ 2 inputs args.*: f32[4, 4] -> f32[6, 4]"
