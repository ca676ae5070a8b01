"""Steps in which collectives run beside computation: predicted seconds of Llama-3 8B layers at H100 prices.

    python -m benchmarks.overlap [--layers 4] [--planning]

``in turn`` is the step of the program planned without ``overlap=True``, ``beside`` with it, both read off the predicted
timeline of the program in its order, and ``joined`` with ``buckets=True`` too; ``price`` is what the solver promised of
``beside``, which knows no order.  ``--planning``: CPU seconds of choosing the placements of one layer, all of them the
solver's, on meshes of 8 to 16,384 devices, each in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

import spmd_compiler as spmd
from benchmarks.compile_time import alone, planned
from benchmarks.models import ResNet
from benchmarks.scale import llama
from spmd_compiler.cost import profile_of
from spmd_compiler.timeline import COMPUTE, timeline

LAYOUTS: dict[str, tuple[dict[str, int], int, int]] = {  # the mesh, sequences and their length
    "FSDP, 8": ({"dp": 8}, 8, 8192),
    "FSDP, 32": ({"dp": 32}, 32, 8192),
    "FSDP, 64": ({"dp": 64}, 64, 8192),
    "FSDP x TP, 8 x 8": ({"dp": 8, "tp": 8}, 32, 8192),
    "FSDP, 64, 512 tokens": ({"dp": 64}, 64, 512),
    "FSDP, 8, 512 tokens": ({"dp": 8}, 8, 512),
    "FSDP, 8, 2048 tokens": ({"dp": 8}, 8, 2048),
}
PLANNED = ({"dp": 4, "tp": 2}, {"dp": 32, "tp": 8}, {"dp": 256, "tp": 8}, {"dp": 2048, "tp": 8})
WAYS: tuple[dict[str, Any], ...] = ({}, {"overlap": True}, {"overlap": True, "buckets": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--planning", action="store_true", help="CPU seconds on meshes of 8 to 16,384 devices")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.planning:
        print("| mesh | in turn, CPU s | beside, CPU s | gap |\n|---|--:|--:|--:|", flush=True)
        for sizes in PLANNED:
            print(alone(planning, sizes, args.profile), flush=True)
        return
    print("| layout | computation, ms | in turn | beside | joined | price | beside / in turn | joined / beside |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    rows = {"dp": spmd.Shard(0)}
    for name, (mesh, batch, length) in LAYOUTS.items():
        model, _, placements = llama(mesh, args.layers)
        if "tp" not in mesh:
            placements = {name: rows for name in ("*weight", "ids", "targets")}
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        report(name, model, (ids, ids), mesh, placements, args.profile)
    with torch.device("meta"):
        net, images = ResNet((3, 4, 6, 3), 64, 1000), torch.zeros(64, 3, 224, 224)
        labels = torch.zeros(64, dtype=torch.int64)
    report("ResNet-50, data, 64", net, (images, labels), {"dp": 64}, {"images": rows, "labels": rows}, args.profile)


def planning(sizes: dict[str, int], profile: str) -> str:
    """A row of ``--planning``."""
    torch.set_num_threads(1)
    model, batch, _ = llama(sizes, 1)
    apart, beside = (
        planned(model, batch, sizes, {"*": "auto"}, dataclasses.replace(profile_of(profile), overlap=overlap))
        for overlap in (False, True)
    )
    seconds = " | ".join(f"{p.seconds['propagate']:.2f}" for p in (apart, beside))
    return f"| {' x '.join(map(str, sizes.values()))} | {seconds} | {beside.gap:.1e} |"


def report(name: str, model: Any, args: Any, mesh: dict[str, int], placements: Any, profile: str) -> None:
    """Print one row."""
    steps: list[float] = []
    prices: list[float] = []
    for way in WAYS:
        program: Any = spmd.export(
            model, args, mesh=mesh, placements=placements, backward=True, profile=profile, **way
        )  # fmt: skip
        events = timeline(program.local)
        steps.append(max(e.start + e.seconds for e in events))
        prices.append(program.price)
        if way == WAYS[1]:
            compute = sum(e.seconds for e in events if e.stream == COMPUTE)
    figures = [f"{1e3 * s:.1f}" for s in (compute, *steps, prices[1])]
    ratios = f"{steps[1] / steps[0]:.2f} | {steps[2] / steps[1]:.3f}"
    print(f"| {name} | {' | '.join(figures)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
