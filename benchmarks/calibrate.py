"""Measures a profile on the machine at hand (gloo, CPU) and says how well it predicts the steps of three models.

    python -m benchmarks.calibrate [--processes 2] [--output machine.toml] [--steps 20]

Every process works at once, on one thread, as in a step; each figure is the least of its repetitions, and the slowest
process's counts.  ``alpha`` and ``bandwidth`` are fitted to all collectives at all sizes under the model that prices
them, ``alpha sqrt(steps) + wire bytes / bandwidth`` (least squares of relative errors); the table shows how it fits.
The TOML file is what ``profile=`` and ``--profile`` take.  Steps run the local graph as it is (``lower="eager"``): a
price counts each operator's own traffic, which Inductor's fusion would lessen.  They take milliseconds, so that on a
machine which others use some of them go undisturbed.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = [2**n for n in range(12, 25, 2)]  # bytes of the larger of operand and result
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def least(call: Callable[[], Any], count: int) -> float:
    """Seconds of the quickest of ``count`` calls, started together; of the slowest process."""
    for _ in range(2):
        call()
    found = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    slowest = torch.tensor(min(found), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def collective(kind: str, size: int, processes: int) -> tuple[Callable[[], Any], int]:
    """A call of a collective whose larger side has ``size`` bytes, and the bytes of its result."""
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // processes)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole), size
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part), size
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole), size // processes
    received = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(received, whole), size


def fit(rows: list[tuple[str, float, float, float]]) -> tuple[float, float]:
    """``alpha`` and ``bandwidth`` from (kind, root of the steps, wire bytes, seconds), both positive."""
    from scipy.optimize import nnls

    design = np.array([[steps / seconds, wire / seconds] for _, steps, wire, seconds in rows])
    (alpha, slope), _ = nnls(design, np.ones(len(rows)))
    return float(max(alpha, 1e-9)), float(1 / max(slope, 1e-15))


def links(processes: int, count: int, say: Callable[[str], None]) -> tuple[float, float]:
    from spmd_compiler.collectives import wire_bytes

    rows = []
    for kind in KINDS:
        for size in SIZES:
            call, result = collective(kind, size, processes)
            steps = {"all_reduce": 2 * (processes - 1), "all_to_all": 1}.get(kind, processes - 1)
            rows.append((kind, math.sqrt(steps), wire_bytes(kind, result, processes), least(call, count)))
    alpha, bandwidth = fit(rows)
    say(f"{'collective':<16}" + "".join(f"{size // 1024:>14} KiB" for size in SIZES))
    for kind in KINDS:
        of_kind = [(s, alpha * root + wire / bandwidth) for k, root, wire, s in rows if k == kind]
        say(f"{kind:<16}" + "".join(f"{s * 1e6:>9.0f} ({p * 1e6:>6.0f})" for s, p in of_kind))
    return alpha, bandwidth


def matmul(element: int, count: int) -> float:
    """Flop/s of a linear layer of a few hundred tokens."""
    rows, dim = 256, 512
    x, weight = (torch.randn(n, dim).to(DTYPES[element]) for n in (rows, 4 * dim))
    return 8.0 * rows * dim**2 / least(lambda: x @ weight.T, count)


def memory(count: int) -> float:
    """Bytes/s of a sum of two operands beyond the caches."""
    a, b = torch.randn(2**23), torch.randn(2**23)
    out = torch.empty_like(a)
    return 3.0 * a.numel() * 4 / least(lambda: torch.add(a, b, out=out), count)


def launch(count: int) -> float:
    """Seconds of an operator that has next to nothing to do."""
    a = torch.randn(8)

    def hundred() -> None:
        x = a
        for _ in range(100):
            x = x * 1.5

    return least(hundred, count) / 100


def profile_text(
    processes: int, rates: dict[int, float], bytes_s: float, start: float, link: tuple[float, float]
) -> str:
    alpha, bandwidth = link
    both = f"{{ alpha = {alpha:.3g}, bandwidth = {bandwidth:.3g} }}"
    return "\n".join([
        'base = "cpu"', f"memory = {bytes_s:.3g}", f"launch = {start:.3g}", f"node_size = {processes}",
        f"intra = {both}", f"inter = {both}", "", "[matmul]  # flop/s by bytes an element",
        *(f"{element} = {rate:.3g}" for element, rate in rates.items()), "",
    ])  # fmt: skip


# --- what it predicts -----------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]]:
    """By name: a model, its arguments and placements on the axis ``x``."""
    from benchmarks.models import ResNet
    from llama import MEGATRON, Config, Llama
    from spmd_compiler import Shard

    rows = {"x": Shard(0)}
    c = Config(vocab=1024, dim=128, layers=2, heads=4, kv_heads=2, ffn=352, length=64)
    ids = torch.randint(c.vocab, (4, c.length))
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(100, (4,))
    return {
        "perceptron, batch cut": (Perceptron(256), (torch.randn(256, 256),), {"x": rows}),
        "Llama, Megatron's cut": (Llama(c), (ids, ids), {n: {"x": Shard(d)} for n, d in MEGATRON.items()}),
        "ResNet, batch cut": (ResNet((1, 1), 16, 100), (images, labels), {"images": rows, "labels": rows}),
    }  # fmt: skip


def predict(profile: str, mesh: dist.DeviceMesh, count: int, say: Callable[[str], None]) -> None:
    from spmd_compiler.program import export

    say(f"{'step':<24} {'predicted, ms':>14} {'measured, ms':>14} {'ratio':>7} {'wire, KiB':>10}")
    for name, (model, args, placements) in models().items():
        program = export(model, args, mesh=mesh, placements=placements, backward=True, profile=profile)
        step = program.compile(mesh, lower="eager")
        measured = least(lambda step=step, args=args: step(*args), count)  # type: ignore[misc]
        say(f"{name:<24} {program.price * 1e3:>14.2f} {measured * 1e3:>14.2f} {program.price / measured:>7.2f} "
            f"{program.wire_bytes / 1024:>10.0f}")  # fmt: skip


def worker(rank: int, o: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=o.processes)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    say(f"{o.processes} processes; microseconds, measured (as priced)")
    link = links(o.processes, o.steps, say)
    rates = {element: matmul(element, o.steps) for element in DTYPES}
    text = profile_text(o.processes, rates, memory(o.steps), launch(o.steps), link)
    path = o.output or f"{store}.toml"
    if rank == 0:
        Path(path).write_text(text)
    say("\n" + text)
    dist.barrier()
    mesh = dist.init_device_mesh("cpu", (o.processes,), mesh_dim_names=("x",))
    predict(path, mesh, o.steps, say)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", help="where to write the profile (TOML)")
    parser.add_argument("--steps", type=int, default=50, help="repetitions of everything")
    o = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (o, os.path.join(folder, "store")), nprocs=o.processes)


if __name__ == "__main__":
    main()
