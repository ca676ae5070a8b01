"""The text of a small program, whole."""

import torch
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from spmd_compiler.text import readable


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


EXPECTED = """\
program "block"  mesh(dp=2, tp=4)
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
