"""What a Llama's training step communicates, planned for wire bytes alone, beside XLA's two partitioners.

    python -m benchmarks.collectives [--case NAME]

2 layers, d_model 512, 8 heads of 64, 4 kv heads, ffn 1408, vocabulary 8192, float32, untied, no rotary positions; loss
and gradients of all parameters, each placed as its parameter.  XLA's figures (JAX 0.9 and 0.10) are wire bytes a
device right after partitioning.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from llama import MEGATRON, Config, Llama
from spmd_compiler.placements import Mesh, Shard
from spmd_compiler.program import export


@dataclass(frozen=True)
class Case:
    """``xla`` holds the wire bytes of GSPMD and of Shardy."""

    name: str
    mesh: dict[str, int]
    placements: dict[str, Any]
    xla: tuple[int, int]
    batch: int = 8
    length: int = 128


def tensor_parallel(**also: int) -> dict[str, Any]:
    """Megatron's cut on tp; with ``dp``, the other dim on dp (all norms too): 2-D sharded weights."""
    return {name: {"tp": Shard(dim), **{a: Shard(1 - dim) for a in also}} for name, dim in MEGATRON.items()}


BATCH = {"ids": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
FSDP_TP = {**BATCH, **tensor_parallel(dp=1), "*norm.weight": {"dp": Shard(0)}}
CASES = (
    Case("dp", {"dp": 8}, BATCH, (100_025_863, 100_025_863)),
    Case("fsdp", {"dp": 8}, {**BATCH, "*weight": {"dp": Shard(0)}}, (122_411_527, 122_411_527)),
    Case("megatron", {"tp": 4}, tensor_parallel(), (50_350_080, 50_350_080)),
    Case("dp x tp", {"dp": 2, "tp": 4}, {**BATCH, **tensor_parallel()}, (39_472_132, 39_472_132)),
    Case("fsdp x tp", {"dp": 2, "tp": 4}, FSDP_TP, (43_484_164, 69_614_084)),
    Case("fsdp x tp, large", {"dp": 2, "tp": 4}, FSDP_TP, (833_000_000, 2_002_000_000), 64, 512),
)


def run(case: Case) -> str:
    with torch.device("meta"):
        model = Llama(Config(vocab=8192, dim=512, layers=2, heads=8, kv_heads=4, ffn=1408, rotary=False))
    ids = torch.zeros(case.batch, case.length, dtype=torch.int64, device="meta")
    began = time.perf_counter()
    program = export(
        model, (ids, ids), mesh=Mesh(case.mesh), placements=case.placements, backward=True, profile="bytes"
    )  # fmt: skip
    seconds = time.perf_counter() - began
    counts = Counter(f"{c.kind}@{c.axis}" for c in program.collectives)
    best = min(case.xla)
    shape = " x ".join(map(str, case.mesh.values()))
    head = (
        f"{case.name:<17} {shape:>6} {program.wire_bytes:>14,.0f} {case.xla[0]:>14,} {case.xla[1]:>14,} "
        f"{program.wire_bytes / best:7.2f} {program.gap:8.1e} {seconds:7.1f}"
    )
    lines = [head, "    " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))]
    if program.replicated_ops:
        lines.append(f"    replicated: {', '.join(program.replicated_ops)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", choices=[c.name for c in CASES])
    chosen = parser.parse_args().case
    torch.set_num_threads(1)
    print("case                mesh     wire bytes          GSPMD         Shardy   ratio      gap  seconds")
    for case in CASES:
        if chosen in (None, case.name):
            print(run(case), flush=True)


if __name__ == "__main__":
    main()
