"""Measures a profile on the machine at hand (gloo, CPU) and says how well it predicts the steps of three models.

    python -m benchmarks.calibrate [--mesh a=2,b=2] [--lower eager] [--output machine.toml] [--steps 20]

Every process works at once, on one thread, as in a step; each figure is the least of its repetitions, and the slowest
process's counts.  A repetition is a row of ten calls: the least of single calls is what no call in a step takes.  A
collective is issued as a step issues it, and stands after a product whose own time is taken off: threads that wait for
messages are asleep by then.

For each axis of the mesh, ``alpha`` and ``bandwidth`` are fitted to all collectives at all sizes, and to each kind by
itself, under the model that prices them, ``alpha sqrt(steps) + wire bytes / bandwidth`` (least squares of relative
errors); the table shows how the kinds' own fit.  Rates of products and of memory are by dtype.  The TOML file is what
``profile=`` and ``--profile`` take.

Steps of each model in two layouts, in milliseconds, so that on a machine which others use some go undisturbed: what is
predicted, what is measured, and whether the layout that is predicted to be the quicker is.  Weights and arguments are
placed beforehand.  ``--lower eager`` runs the local graph as it is, and writes a profile in which nothing ``fuses``.
"""

from __future__ import annotations

import argparse
import inspect
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
from torch.distributed.tensor import Replicate, distribute_tensor

from spmd_compiler.collectives import wire_bytes
from spmd_compiler.cost import Link
from spmd_compiler.lower import Groups

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = [2**n for n in range(12, 25, 2)]  # bytes of the larger of operand and result
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
ROW = 10


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


def row(count: int, *calls: Callable[[], Any]) -> float:
    """Seconds of the calls, one after another, in a row of `ROW` such."""

    def whole() -> None:
        for _ in range(ROW):
            for call in calls:
                call()

    return least(whole, count) / ROW


def collective(kind: str, size: int, processes: int, group: str) -> tuple[Callable[[], Any], int]:
    """A call of a collective whose larger side has ``size`` bytes, and the bytes of its result."""
    c10d = torch.ops._c10d_functional
    n = size // 4 // processes
    whole, part = torch.zeros(size // 4), torch.zeros(n)
    if kind == "all_reduce":
        return lambda: c10d.wait_tensor(c10d.all_reduce(whole, "sum", group)), size
    if kind == "all_gather":
        return lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(part, processes, group)), size
    if kind == "reduce_scatter":
        return lambda: c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "sum", processes, group)), size // processes
    even = [n] * processes
    return lambda: c10d.wait_tensor(c10d.all_to_all_single(whole, even, even, group)), size


def fit(rows: list[tuple[str, float, float, float]]) -> tuple[float, float]:
    """``alpha`` and ``bandwidth`` from (kind, root of the steps, wire bytes, seconds), both positive."""
    from scipy.optimize import nnls

    design = np.array([[steps / seconds, wire / seconds] for _, steps, wire, seconds in rows])
    (alpha, slope), _ = nnls(design, np.ones(len(rows)))
    return float(max(alpha, 1e-9)), float(1 / max(slope, 1e-15))


def links(mesh: dist.DeviceMesh, axis: str, count: int, say: Callable[[str], None]) -> Link:
    """The link of an axis, with each kind of collective's own."""
    groups = Groups(mesh)  # those that programs run in
    group, processes = groups.name([axis]), groups.sizes[axis]
    a, b = torch.randn(128, 256), torch.randn(256, 256)
    alone = row(count, lambda: a @ b)
    rows = []
    for kind in KINDS:
        for size in SIZES:
            call, result = collective(kind, size, processes, group)
            seconds = max(row(count, lambda: a @ b, call) - alone, 1e-6)
            steps = {"all_reduce": 2 * (processes - 1), "all_to_all": 1}.get(kind, processes - 1)
            rows.append((kind, math.sqrt(steps), wire_bytes(kind, result, processes), seconds))
    kinds = {kind: Link(*fit([r for r in rows if r[0] == kind])) for kind in KINDS}
    say(f"{'axis ' + axis:<16}" + "".join(f"{size // 1024:>14} KiB" for size in SIZES))
    for kind, own in kinds.items():
        of_kind = [(s, own.alpha * root + wire / own.bandwidth) for k, root, wire, s in rows if k == kind]
        say(f"{kind:<16}" + "".join(f"{s * 1e6:>9.0f} ({p * 1e6:>6.0f})" for s, p in of_kind))
    return Link(*fit(rows), kinds)


def matmul(element: int, count: int) -> float:
    """Flop/s of a linear layer's three products in training, of a few hundred tokens."""
    rows, dim = 256, 256
    x, weight, y = (torch.randn(n).to(DTYPES[element]) for n in ((rows, dim), (4 * dim, dim), (rows, 4 * dim)))
    seconds = row(count, lambda: x @ weight.T, lambda: y @ weight, lambda: y.T @ x)
    return 3 * 8.0 * rows * dim**2 / seconds


def memory(element: int, count: int) -> float:
    """Bytes/s of a sum of two operands beyond the caches."""
    a, b = (torch.zeros(2**25 // element, dtype=DTYPES[element]) for _ in range(2))
    out = torch.empty_like(a)
    return 3.0 * a.numel() * element / row(count, lambda: torch.add(a, b, out=out))


def launch(count: int) -> float:
    """Seconds of an operator that has next to nothing to do, called as a graph calls it."""
    a = torch.randn(8)
    times = torch.ops.aten.mul.Tensor

    def hundred() -> None:
        x = a
        for _ in range(100):
            x = times(x, a)

    return least(hundred, count) / 100


def profile_text(
    rates: dict[int, float], memory_rates: dict[int, float], start: float, axes: dict[str, Link], fuses: bool = True
) -> str:  # fmt: skip
    """A profile as TOML.  A link that no axis names is that of the innermost axis measured."""

    def table(name: str, link: Link) -> list[str]:
        own = [f"{k} = {{ alpha = {v.alpha:.3g}, bandwidth = {v.bandwidth:.3g} }}" for k, v in link.kinds.items()]
        return ["", f"[{name}]", f"alpha = {link.alpha:.3g}", f"bandwidth = {link.bandwidth:.3g}", *own]

    inner = list(axes.values())[-1]
    lines = ['base = "cpu"', f"launch = {start:.3g}", f"fuses = {str(fuses).lower()}"]
    for name, found in (("matmul", rates), ("memory", memory_rates)):  # by bytes an element
        lines += ["", f"[{name}]", *(f"{element} = {rate:.3g}" for element, rate in found.items())]
    lines += table("intra", inner) + table("inter", next(iter(axes.values())))
    for axis, link in axes.items():
        lines += table(f"axis_links.{axis}", link)
    return "\n".join([*lines, ""])


# --- what it predicts -----------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


Layouts = dict[str, dict[str, Any]]


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], Layouts]]:
    """By name: a model, its arguments, and by name of a layout, placements on the innermost axis."""
    from benchmarks.models import ResNet
    from llama import MEGATRON, Config, Llama
    from spmd_compiler import Shard

    c = Config(vocab=1024, dim=128, layers=2, heads=4, kv_heads=2, ffn=352, length=64)
    ids, targets = torch.randint(c.vocab, (2, 4, c.length))
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(100, (4,))
    rows, columns = Shard(0), Shard(1)
    return {
        "perceptron": (Perceptron(256), (torch.randn(256, 256),), {
            "batch": {"x": rows},
            "Megatron's": {"up.weight": rows, "down.weight": columns},
        }),
        "Llama": (Llama(c), (ids, targets), {
            "batch": {"ids": rows, "targets": rows},
            "Megatron's": {n: Shard(d) for n, d in MEGATRON.items()},
        }),
        "ResNet": (ResNet((1, 1), 16, 100), (images, labels), {
            "batch": {"images": rows, "labels": rows},
            "height": {"images": Shard(2)},
        }),
    }  # fmt: skip


def predict(profile: str, mesh: dist.DeviceMesh, lower: str, count: int, say: Callable[[str], None]) -> None:
    from spmd_compiler.program import export

    inner = mesh.mesh_dim_names[-1]  # type: ignore[index]
    say(f"{'step':<24} {'predicted, ms':>14} {'measured, ms':>14} {'ratio':>7} {'wire, KiB':>10}")
    for name, (model, args, layouts) in models().items():
        found = []
        for layout, cut in layouts.items():
            placements = {n: {inner: p} for n, p in cut.items()}
            program = export(model, args, mesh=mesh, placements=placements, backward=True, profile=profile)
            step = program.use(model.state_dict()).compile(mesh, lower=lower)
            names = inspect.signature(model.forward).parameters
            given = [placed(a, mesh, cut.get(n)) for n, a in zip(names, args, strict=False)]
            measured = row(count, lambda step=step, given=given: step(*given))  # type: ignore[misc]
            found.append((program.price, measured))
            say(f"{name + ', ' + layout:<24} {program.price * 1e3:>14.2f} {measured * 1e3:>14.2f} "
                f"{program.price / measured:>7.2f} {program.wire_bytes / 1024:>10.0f}")  # fmt: skip
        (p, m), (q, n) = found
        say(f"{'':<24} {'first / second':>14}: {p / q:.2f} predicted, {m / n:.2f} measured")


def placed(value: torch.Tensor, mesh: dist.DeviceMesh, placement: Any) -> torch.Tensor:
    """An argument, cut along the innermost axis, or as it is."""
    if placement is None:
        return value
    whole = [Replicate()] * (mesh.ndim - 1)
    return distribute_tensor(value, mesh, [*whole, placement], src_data_rank=None)


def worker(rank: int, o: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(o.mesh.values()))

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    mesh = dist.init_device_mesh("cpu", tuple(o.mesh.values()), mesh_dim_names=tuple(o.mesh))
    say(f"{mesh.size()} processes; microseconds, measured (as priced)")
    axes = {axis: links(mesh, axis, o.steps, say) for axis in o.mesh}
    rates = {element: matmul(element, o.steps) for element in DTYPES}
    text = profile_text(rates, {element: memory(element, o.steps) for element in DTYPES}, launch(o.steps), axes,
                        o.lower == "inductor")  # fmt: skip
    path = o.output or f"{store}.toml"
    if rank == 0:
        Path(path).write_text(text)
    say("\n" + text)
    dist.barrier()
    predict(path, mesh, o.lower, o.steps, say)
    dist.barrier()
    dist.destroy_process_group()


def sizes(text: str) -> dict[str, int]:
    """``a=2,b=2``"""
    return {axis: int(n) for axis, _, n in (part.partition("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--mesh", type=sizes, default={"x": 2}, help="processes by axis, outermost first: a=2,b=2")
    parser.add_argument("--lower", choices=("inductor", "eager"), default="inductor", help="how steps run")
    parser.add_argument("--output", help="where to write the profile (TOML)")
    parser.add_argument("--steps", type=int, default=10, help="repetitions of everything, of ten calls each")
    o = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (o, os.path.join(folder, "store")), nprocs=math.prod(o.mesh.values()))


if __name__ == "__main__":
    main()
