"""Small programs that XLA's users find communicating too much, planned for wire bytes, beside XLA's own figures.

    python -m benchmarks.xla_cases [--case NAME]

Eight devices.  ``GSPMD`` is what XLA's partitioner sends (wire bytes a device, JAX 0.9 and 0.10), ``known`` the figure
that the reports of XLA's users, or a count by hand, show to be enough.  Where no placement of the result is given the
solver's own is free, as it is in XLA.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd_compiler.placements import Mesh, Shard, Spec
from spmd_compiler.program import Program, export

LINE = {"x": 8}
ROWS = {"x": {"x": Shard(0)}}
COLUMNS = {"x": {"x": Shard(1)}}


@dataclass(frozen=True)
class Case:
    """``gspmd`` and ``known`` are wire bytes a device; None where none is at hand."""

    name: str
    program: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    placements: dict[str, Any]
    gspmd: int | None
    known: int | None
    mesh: dict[str, int] = field(default_factory=lambda: LINE)
    backward: bool = False
    input_grad: bool = False


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x))).square().mean()


def spec(text: str) -> Spec:
    return Spec.parse(text)


def layers(up: int, down: int) -> dict[str, Any]:
    return {"up.weight": {"x": Shard(up)}, "down.weight": {"x": Shard(down)}}


CASES = (
    Case("topk(8)", lambda x: torch.topk(x, 8), [(64, 8192)], COLUMNS, 1_835_008, 28_672),
    Case("cumsum", lambda x: torch.cumsum(x, 1), [(64, 1024)], COLUMNS, 229_376, 1_792),
    Case("argmax", lambda x: torch.argmax(x, 1), [(64, 8192)], COLUMNS, None, 3_584),
    Case("sort", lambda x: torch.sort(x, 1).values, [(64, 1024)], {**COLUMNS, "out": {"x": Shard(1)}}, None, 57_344),
    Case("logsumexp", lambda x: torch.logsumexp(x, 1), [(64, 8192)], COLUMNS, None, 896),
    Case("softmax", lambda x: torch.softmax(x, 1), [(64, 8192)], COLUMNS, None, 896),
    Case("cross entropy", F.cross_entropy, [(64, 8192), (64,)], {"input": {"x": Shard(1)}}, None, 1_344),
    Case("grouped convolution", lambda x, w: F.conv2d(x, w, groups=4), [(8, 32, 32, 32), (32, 8, 3, 3)], ROWS,
         917_504, 0),
    Case("MLP, column then row", MLP(), [(64, 512)], layers(0, 1), 458_752, 458_752, backward=True,
         input_grad=True),
    Case("MLP, row then column", MLP(), [(64, 512)], layers(1, 0), 1_835_015, 1_835_015, backward=True),
    Case("resharding", lambda x: x * 1, [(64, 64)],
         {"x": spec("{a: S(0)@a/b, b: S(0)@a/b}"), "out": spec("{a: S(0)@b/a, b: S(0)@b/a}")}, 14_336, 2_048,
         mesh={"a": 4, "b": 2}),
)  # fmt: skip


def plan(case: Case) -> Program:
    args = [torch.zeros(s, dtype=torch.int64 if case.name == "cross entropy" and i else torch.float32)
            for i, s in enumerate(case.shapes)]  # fmt: skip
    if case.input_grad:
        args[0].requires_grad_()
    return export(
        case.program, args, mesh=Mesh(case.mesh), placements=case.placements, backward=case.backward, profile="bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", choices=[c.name for c in CASES])
    chosen = parser.parse_args().case
    torch.set_num_threads(1)
    print(f"{'case':<22} {'wire bytes':>12} {'GSPMD':>12} {'known':>12}  collectives")
    for case in CASES:
        if chosen in (None, case.name):
            program = plan(case)
            kinds = Counter(c.kind for c in program.collectives)
            figures = [f"{n:>12,}" if n is not None else " " * 12 for n in (case.gspmd, case.known)]
            print(f"{case.name:<22} {program.wire_bytes:>12,.0f} {' '.join(figures)}  "
                  + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items())), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
