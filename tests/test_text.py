"""The text of a small program, whole; texts that round-trip; errors of the reader."""

import dataclasses

import pytest
import test_llama
import test_programs
import torch
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from spmd_compiler.constraints import Constraint
from spmd_compiler.ir import project_path
from spmd_compiler.reader import parse
from spmd_compiler.symbolic import chunk, coordinate, start
from spmd_compiler.symbolic import parse as parse_expression
from spmd_compiler.text import LEVELS, Line, Ranges, Ref, Text, Type, Word, readable


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


EXPECTED = """\
program "block"  mesh(dp=2, tp=4)  profile bytes
memory parameters 2.00 KiB (2048 B), gradients 0 B, optimizer 0 B, activations 768 B
%up_weight = param "up.weight"                               f32[64, 16 | 16, 16]  {dp: R, tp: S(0)}
%down_weight = param "down.weight"                             f32[16, 64 | 16, 16]  {dp: R, tp: S(1)}
%x = input "x"                                       f32[8, 16 | 4, 16]    {dp: S(0), tp: R}
%permute = aten.permute(%up_weight, [1, 0])          f32[16, 64 | 16, 16]  {dp: R, tp: S(1)}
%mm = aten.mm(%x, %permute)          f32[8, 64 | 4, 16]    {dp: S(0), tp: S(1)}
%permute_1 = aten.permute(%down_weight, [1, 0])        f32[64, 16 | 16, 16]  {dp: R, tp: S(0)}
%mm_1 = aten.mm(%mm, %permute_1)     f32[8, 16 | 4, 16]    {dp: S(0), tp: P(sum)}
%all_reduce = all_reduce[tp, sum](%mm_1)     f32[8, 16 | 4, 16]    {dp: S(0), tp: R}       # 384 B wire
output "out" = %all_reduce                                                 {dp: S(0), tp: R}
"""


def test_text():
    program = spmd.export(
        Block(), (torch.zeros(8, 16),), mesh={"dp": 2, "tp": 4}, name="block", profile="bytes",
        placements={"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "x": {"dp": Shard(0)},
                    "out": {"dp": Shard(0)}},
    )  # fmt: skip
    lines, expected = (  # without sources and the width of columns
        [" ".join(line.split("  # ")[0].split()) for line in text.splitlines()] for text in (program.text(), EXPECTED)
    )
    assert lines == expected
    assert program.text().count("test_text.py:") == 5
    assert "384 B wire" in program.text()
    assert program.collectives[0].wire_bytes == 2 * 3 / 4 * 4 * 16 * 4


def test_readable():
    assert [readable(n) for n in (0, 1023, 1536, 3 * 2**20)] == ["0 B", "1023 B", "1.50 KiB", "3.00 MiB"]


def export(f, args, mesh, **placements):
    return spmd.export(f, args, mesh=mesh, placements=placements, profile="bytes")


def programs():
    """Programs of other tests: uneven sizes, halos, nested axes, constants, several results, both phases."""
    x, mesh = torch.zeros(8, test_programs.CLASSES), {"a": 3, "b": 2}
    for name, f in test_programs.OPS.items():
        yield name, lambda f=f: export(f, (x,), mesh, x={"a": Shard(0), "b": Shard(1)})
    for name in ("convolution", "batch norm"):
        model, shape = test_programs.LAYERS[name]
        loss = torch.nn.Sequential(model, test_programs.Square())
        yield name, lambda loss=loss, shape=shape: spmd.export(
            loss, (torch.zeros(shape),), mesh={"a": 4}, placements={"input": {"a": Shard(2 % len(shape))}}, backward=True
        )
    yield "embedding", lambda: export(
        torch.nn.Embedding(10, 4), (torch.zeros(6, dtype=torch.int64),), {"t": 4}, weight={"t": Shard(0)}
    )
    yield "dropout", lambda: export(torch.nn.Dropout(0.5), (torch.zeros(8, 6),), {"t": 3}, input={"t": Shard(0)})
    yield "constraint", lambda: export(lambda x: spmd.constrain(x, {"a": Shard(1)}) + 1, (torch.zeros(8, 6),), {"a": 2})
    yield "nested axes", lambda: spmd.export(
        torch.nn.Linear(8, 8), (torch.zeros(8, 8),), mesh={"a": 2, "b": 4},
        placements={"weight": "{a: S(0)@b/a, b: S(0)@b/a}", "out": [Shard(0), Shard(0)]},
    )  # fmt: skip
    args = [torch.zeros(4, 16, dtype=torch.int64)] * 2
    yield "llama", lambda: spmd.export(
        test_llama.Llama(test_llama.SMALL), args, mesh={"dp": 2, "tp": 2}, placements=test_llama.FSDP_TP, backward=True
    )


PROGRAMS = dict(programs())


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_round_trip(name):
    program = PROGRAMS[name]()
    for level in LEVELS:
        text = Text.of(program.local, program.memory).at(level)
        assert parse(str(text)) == text
        assert str(parse(program.text(level))) == program.text(level) == str(text)
    read = parse(program.text())
    assert [k.wire_bytes(read.mesh) for k in read.collectives] == [c.wire_bytes for c in program.collectives]
    assert read.memory == tuple(program.memory.items())
    assert {k.phase for k in read.lines} == {n.meta.get("phase") or "forward" for n in program.local.graph.graph.nodes}


def test_odd_lines_round_trip():
    c, d = coordinate("dp"), coordinate("tp")
    mesh = spmd.Mesh({"dp": 2, "tp": 3})
    kind = Type("float8_e4m3fn", (4, 0), (2, 0))
    lines = (
        Line("a", "input", type=kind, label='batch."odd" # key\\', spec=spmd.Spec.replicate(mesh)),
        Line("b", "my.op.out", (Ref("a"), (), ((1, -2), None), True, -0.5, 1e-30, 1 - 2j, Word("-inf"), Word("nan")),
             (("dtype", Word("bf16")), ("device", Word("cuda:0")), ("mode", 'a, "b" (c]')),
             (kind, Word("NoneType")), source="layers.0.mlp", phase="backward"),
        Line("c", "aten.slice.Tensor", (Ref("b"), 0, 4 * c, chunk(7, 2, c) + start(5, 3, d) - 1)),
        Line("d", "permute", (Ref("c"), 0, Ranges((((0, 2),), ((2, 4),), ((4, 6),), ((8, 9),))),
                              Ranges((((0, 2), (5, 6)), ((1, 3), (6, 7)), ((2, 4), (7, 8)), ((0, 0), (9, 9))))),
             axis="dp/tp", type=Type("f32", (4,), (1,))),
        Line("e", "permute", (Ref("c"), 0, Ranges((((-3, 0),), ((0, 3),))), Ranges(((), ())), 1.5), axis="dp",
             type=Type("f32", (4,), (1,))),
    )  # fmt: skip
    asked = (Constraint('input "odd  # \\"name"', spmd.Spec.replicate(mesh), "net.py:7", "backward", 32),
             Constraint("aten.add.Tensor", spmd.Spec.parse("{dp: S(0)@tp/dp, tp: S(0)@tp/dp}")))  # fmt: skip
    text = Text('a "name"', mesh, "mine.toml", lines, (("parameters", 10**12), ("activations", 3)), constraints=asked)
    assert parse(str(text)) == text


@pytest.mark.parametrize("text", ["c_a", "4*c_a + 4", "chunk(chunk(7, 2, c_a), 3, c_b)", "entry(c_a, 1, -2, 5)", "-c_a/2"])
def test_expressions_round_trip(text):
    assert str(parse_expression(text)) == text


HEAD = 'program "p"  mesh(a=2)\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("prog", "line 1, column 1: expected 'program '"),
        ('program "p"  mesh(a)', "line 1: mesh(a)"),
        ('program "p"  mesh(a=0)', "positive integer"),
        ('program "p"  mesh(a=2)  level all', "one of summary"),
        (HEAD + "%x = aten.neg(%y", "line 2, column 17: expected"),
        (HEAD + "constraint  {a: S(0)} of", "line 2, column 1: expected a constraint such as"),
        (HEAD + '%x = input "x"  f33[2]', "line 2, column 17: expected a type such as"),
        (HEAD + '%x = input "x"  f32[2]  {a: Q}', "line 2, column 25"),
        (HEAD + "%x = aten.neg(y z)", "column 15: expected an argument"),
        (HEAD + "%x = all_reduce[b, sum](%y)", "no axis 'b'"),
        (HEAD + "outcome", "a value, or output"),
        (HEAD + 'output "out" = %x  {a: R} trailing', "line 2, column 27"),
    ],
)
def test_the_reader_points_at_what_it_did_not_expect(text, words):
    with pytest.raises(spmd.SpmdError) as error:
        parse(text)
    assert words in str(error.value)


def test_paths_are_those_within_a_project_or_a_package(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    assert project_path(str(tmp_path / "src" / "net.py")) == "src/net.py"
    assert project_path("/a/lib/python3/site-packages/models/net.py") == "models/net.py"
    assert project_path("/nowhere/net.py") == project_path("net.py") == "net.py"


def test_the_text_after_each_pass(tmp_path):
    def plan(dump):
        return spmd.export(
            torch.nn.Sequential(Block(), test_programs.Square()), (torch.zeros(8, 16),), mesh={"a": 2}, name="block",
            profile="bytes", placements={"0.up.weight": {"a": Shard(0)}}, backward=True, dump=dump,
        )  # fmt: skip

    program = plan(tmp_path)
    texts = {p.name: p.read_text() for p in sorted((tmp_path / "block").iterdir())}
    assert list(texts) == [f"{i}-{name}.txt" for i, name in enumerate(
        ("annotate", "unmerge", "pad", "partition", "simplify", "bucket", "overlap"), 1)]  # fmt: skip
    assert all(str(parse(text)) == text and ' = param "0.up.weight"' in text for text in texts.values())
    assert "all_reduce[a, sum]" not in texts["3-pad.txt"] and "{a: S(0)}" in texts["1-annotate.txt"]
    assert spmd.diff(texts["4-partition.txt"], texts["5-simplify.txt"]).placements == ()
    assert texts["7-overlap.txt"] == str(dataclasses.replace(parse(program.text()), memory=()))
    plan(str(tmp_path))  # of the same name
    assert {p.name: p.read_text() for p in (tmp_path / "block.2").iterdir()} == texts
    (tmp_path / "file").write_text("")
    for dump, words in ((tmp_path / "file", "can't be written"), (3, "the path of a folder, not 3")):
        with pytest.raises(spmd.SpmdError, match=words):
            plan(dump)
