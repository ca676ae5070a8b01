"""Step time and Python overhead: this compiler, torch.compile on DTensors, and torch.compile on local tensors.

    python -m benchmarks.step_time [--processes 1] [--blocks 4] [--dim 64] [--batch 32] [--steps 100]

A stack of blocks ``x + down(gelu(up(norm(x))))``, ``up`` and ``down`` cut as Megatron does over all processes (gloo),
forward and backward.  Everything is lowered by Inductor.  "local" has the same local sizes and communicates
nothing, so what is over it is Python and communication (with one process: Python alone).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack(blocks: int, dim: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, hidden) for _ in range(blocks)))


def distribute(model: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            last = name.rpartition(".")[2]
            placement = {"up": Shard(0), "down": Shard(1)}.get(last, Replicate())
            placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(placed))
    return model


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def measure(steps: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    for step in steps.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in found.items()}


def loss_step(model: nn.Module, x: torch.Tensor, backend: str) -> Callable[[], None]:
    compiled = torch.compile(Loss(model), backend=backend)
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        compiled(x).backward()

    return step


def worker(rank: int, o: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=o.processes)
    mesh = dist.init_device_mesh("cpu", (o.processes,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    x = torch.randn(o.batch, o.dim)
    placed = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
    hidden = 4 * o.dim
    steps = {
        "local": loss_step(stack(o.blocks, o.dim, hidden // o.processes), x, "inductor"),
        "ours": loss_step(distribute(stack(o.blocks, o.dim, hidden), mesh), placed, "spmd"),
        "DTensor": loss_step(distribute(stack(o.blocks, o.dim, hidden), mesh), placed, "inductor"),
    }
    found = measure(steps, o.steps)
    if rank == 0:
        local = found["local"]
        print(f"{o.processes} process(es), {o.blocks} blocks, dim {o.dim}, batch {o.batch}: forward and backward")
        print("            step, us   over local, us   ratio to local")
        for name, seconds in found.items():
            print(f"{name:<10} {seconds * 1e6:9.0f} {(seconds - local) * 1e6:16.0f} {seconds / local:16.2f}")
        over = (found["ours"] - local) / (found["DTensor"] - local)
        print(f"ours / DTensor: step {found['ours'] / found['DTensor']:.2f}, what is over local {over:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    o = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        if o.processes == 1:
            worker(0, o, store)
        else:
            torch.multiprocessing.spawn(worker, (o, store), nprocs=o.processes)


if __name__ == "__main__":
    main()
