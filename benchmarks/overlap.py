"""Steps in which collectives run beside computation: predicted seconds of Llama-3 8B layers at H100 prices.

    python -m benchmarks.overlap [--layers 4]

``in turn`` is the step of the program planned without ``overlap=True``, ``beside`` with it, both read off the predicted
timeline of the program in its order; ``price`` is what the solver promised, which knows no order.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import spmd_compiler as spmd
from benchmarks.scale import llama
from spmd_compiler.timeline import COMPUTE, timeline

LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "FSDP, 8": ({"dp": 8}, 8),
    "FSDP, 32": ({"dp": 32}, 32),
    "FSDP, 64": ({"dp": 64}, 64),
    "FSDP x TP, 8 x 8": ({"dp": 8, "tp": 8}, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--profile", default="h100")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| layout | computation, ms | in turn | beside | price | beside / in turn |", flush=True)
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    for name, (mesh, batch) in LAYOUTS.items():
        model, _, placements = llama(mesh, args.layers)
        if "tp" not in mesh:
            placements = {name: {"dp": spmd.Shard(0)} for name in ("*weight", "ids", "targets")}
        ids = torch.zeros(batch, 8192, dtype=torch.int64, device="meta")
        steps: list[float] = []
        for beside in (False, True):
            program: Any = spmd.export(
                model, (ids, ids), mesh=mesh, placements=placements, backward=True, profile=args.profile, overlap=beside
            )
            events = timeline(program.local)
            steps.append(max(e.start + e.seconds for e in events))
        compute = sum(e.seconds for e in events if e.stream == COMPUTE)
        figures = [f"{1e3 * s:.1f}" for s in (compute, *steps, program.price)]
        print(f"| {name} | {' | '.join(figures)} | {steps[1] / steps[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
