"""Planning at size: Llama-3 8B on abstract meshes, FSDP x TP, and two linear layers on three axes.

    python -m benchmarks.scale [--case "32 layers, 32 x 8"] [--profile h100]

Each case has a process of its own on one thread; CPU seconds.  AutoParallel's figures, where there are any, are of its
own pages or measured by its own code: see RESULTS.md.
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.compile_time import alone, planned


@dataclass(frozen=True)
class Case:
    name: str
    mesh: dict[str, int]
    layers: int  # of the Llama; 0: two linear layers and a ReLU


CASES = (
    Case("2 linear layers, 2 x 2 x 2", {"dp": 2, "cp": 2, "tp": 2}, 0),
    Case("2 layers, 8", {"tp": 8}, 2),
    Case("32 layers, 8", {"tp": 8}, 32),
    Case("2 layers, 32 x 8", {"dp": 32, "tp": 8}, 2),
    Case("32 layers, 32 x 8", {"dp": 32, "tp": 8}, 32),
    Case("2 layers, 4 x 8 x 8", {"dp": 4, "cp": 8, "tp": 8}, 2),
    Case("32 layers, 4 x 8 x 8", {"dp": 4, "cp": 8, "tp": 8}, 32),
    Case("2 layers, 4 x 2", {"dp": 4, "tp": 2}, 2),
    Case("2 layers, 64 x 8", {"dp": 64, "tp": 8}, 2),
    Case("2 layers, 2048 x 8", {"dp": 2048, "tp": 8}, 2),
)


def llama(mesh: dict[str, int], layers: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Llama-3 8B's shapes in bfloat16; batch 64 (or the devices', where they are more), sequence 8192; FSDP x TP."""
    from llama import MEGATRON, Config, Llama
    from spmd_compiler import Shard

    with torch.device("meta"):
        model = Llama(
            Config(vocab=128256, dim=4096, layers=layers, heads=32, kv_heads=8, ffn=14336, length=8192)
        ).to(torch.bfloat16)
    fsdp = {"dp": Shard(0)} if "dp" in mesh else {}
    placements: dict[str, Any] = {name: {**fsdp, "tp": Shard(dim)} for name, dim in MEGATRON.items()}
    placements["*norm*"] = fsdp
    data = {**fsdp, **({"cp": Shard(1)} if "cp" in mesh else {})}
    placements |= {"ids": data, "targets": data}
    ids = torch.zeros(max(64, mesh.get("dp", 1)), 8192, dtype=torch.int64, device="meta")
    return model, (ids, ids), placements


def linear(mesh: dict[str, int]) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from spmd_compiler import Shard

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    placements = {"x": {"dp": Shard(0)}, "*0.weight": {"tp": Shard(0)}}
    return Summed(model), (torch.zeros(512, 1024, device="meta"),), placements


class Summed(torch.nn.Module):
    """A model with the sum of its output for a loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()


def run(case: Case, profile: str) -> str:
    torch.set_num_threads(1)
    model, args, placements = llama(case.mesh, case.layers) if case.layers else linear(case.mesh)
    p = planned(model, args, case.mesh, placements, profile)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{case.name:<28} {p.nodes:6d} {p.seconds['trace']:6.1f} "
        f"{p.seconds['annotate'] + p.seconds['propagate']:9.1f} {p.seconds['partition']:10.1f} {p.columns:9d} "
        f"{p.gap:8.1e} {p.local.price * 1e3:10.3f} {peak:9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", choices=[c.name for c in CASES])
    parser.add_argument("--profile", default="h100")
    o = parser.parse_args()
    print(f"forward and backward, profile {o.profile}; CPU seconds, one thread; 'plan' is annotate and propagate")
    print("case                          nodes  trace      plan  partition   columns      gap   step, ms  peak GiB")
    for case in CASES:
        if o.case in (None, case.name):
            print(alone(run, case, o.profile), flush=True)


if __name__ == "__main__":
    main()
