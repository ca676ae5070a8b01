"""Train a small Llama on real English text, on several devices, with ``torch.compile(model, backend="spmd")``.

    python examples/train_llama.py                                   # 4 processes on the CPU, dp=2 x tp=2
    python examples/train_llama.py --mesh dp=4 --placement fsdp
    torchrun --nproc-per-node 8 examples/train_llama.py --device cuda --mesh dp=2,tp=4 --lower inductor

The model is ordinary single-device code (llama.py); the text is the pages of Python's own ``help()``, its bytes are
the tokens.  At the end: what the program communicates, what it holds, and its losses beside those of one device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pydoc_data import topics

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.tensor.placement_types import Placement

import spmd_compiler as spmd
from llama import MEGATRON, Config, Llama
from spmd_compiler import Replicate, Shard

TOLERANCE = 1e-4
"""By how much, relatively, a loss may differ from that of one device."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis=size,...; the processes are as many as its devices")
    parser.add_argument("--placement", default="megatron", choices=("dp", "fsdp", "megatron", "fsdp-tp"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all devices")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=352)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tied", action="store_true", help="one table for the embedding and the output layer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    how = "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "eager"
    parser.add_argument("--lower", default=how, choices=("eager", "inductor"), help="how local code runs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda communicates through NCCL")
    parser.add_argument("--profile", default=None, help="prices to plan by; the device's own if left out")
    parser.add_argument("--no-reference", dest="reference", action="store_false", help="skip the run on one device")
    chosen = parser.parse_args()
    try:
        chosen.axes = {name: int(size) for name, size in (part.split("=") for part in chosen.mesh.split(","))}
    except ValueError:
        parser.error(f"--mesh {chosen.mesh}: expected axis=size,axis=size")
    return chosen


def config(o: argparse.Namespace) -> Config:
    return Config(
        dim=o.dim, layers=o.layers, heads=o.heads, kv_heads=o.kv_heads, ffn=o.ffn, length=o.length,
        dropout=o.dropout, tied=o.tied,
    )  # fmt: skip


# --- placements -----------------------------------------------------------------------------------------------


def parameter_placements(o: argparse.Namespace) -> dict[str, dict[str, Placement]]:
    """Where each parameter lives: the one thing that tells the parallelisms apart."""
    data = [a for a in o.axes if a != "tp"][:1]
    chosen: dict[str, dict[str, Placement]] = {}
    if o.placement in ("megatron", "fsdp-tp") and "tp" in o.axes:
        chosen = {name: {"tp": Shard(dim)} for name, dim in MEGATRON.items()}
    if o.tied:
        chosen.pop("head.weight", None)
    if o.placement in ("fsdp", "fsdp-tp"):
        cut = {axis: Shard(0) for axis in data}
        chosen = {**{name: {**p, **cut} for name, p in chosen.items()}, "*weight": cut}
    return chosen


def batch_placement(o: argparse.Namespace) -> dict[str, Placement]:
    """The batch is cut over the data-parallel axis (with ``--placement dp``, over every axis)."""
    data = list(o.axes) if o.placement == "dp" else [a for a in o.axes if a != "tp"][:1]
    return {axis: Shard(0) for axis in data}


# --- data -----------------------------------------------------------------------------------------------------


def text_tokens() -> torch.Tensor:
    pages = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8).long()


def batches(o: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of every step, the same in every process: ids and targets, each [batch, length]."""
    tokens = text_tokens()
    generator = torch.Generator().manual_seed(o.seed)
    found = []
    for _ in range(o.steps):
        starts = torch.randint(0, len(tokens) - o.length - 1, (o.batch, 1), generator=generator)
        windows = tokens[starts + torch.arange(o.length + 1)]
        found.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return found


# --- training -------------------------------------------------------------------------------------------------


def step_of(model: torch.nn.Module, compiled: torch.nn.Module, lr: float):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = compiled(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def number(loss: torch.Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, spmd.DTensor) else loss).item()


def train(o: argparse.Namespace, rank: int, console: Console) -> None:
    mesh = spmd.init_device_mesh(o.device, tuple(o.axes.values()), mesh_dim_names=tuple(o.axes))
    torch.manual_seed(o.seed)
    with torch.device("meta"):
        model = Llama(config(o))
    ids = torch.empty(o.batch, o.length, dtype=torch.int64, device="meta")
    chosen, data = parameter_placements(o), batch_placement(o)
    program = None
    if rank == 0:  # the plan needs no devices: only shapes and placements
        inputs = {"ids": data, "targets": data}
        program = spmd.export(
            model, (ids, ids), mesh=spmd.Mesh(o.axes), placements={**inputs, **chosen}, backward=True, profile=o.profile
        )
    model = spmd.parallelize(model, mesh, placements=chosen)
    start = {name: p.full_tensor().cpu().clone() for name, p in model.state_dict().items()} if o.reference else {}
    compiled = torch.compile(model, backend="spmd", options={"lower": o.lower, "profile": o.profile})
    step = step_of(model, compiled, o.lr)

    placements = [data.get(axis, Replicate()) for axis in o.axes]
    losses, seconds = [], []
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}")
    )  # fmt: skip
    torch.manual_seed(o.seed)
    with Progress(*columns, console=console, disable=rank != 0) as progress:
        task = progress.add_task("train", total=o.steps, now="compiling")
        for i, batch in enumerate(batches(o)):
            began = time.perf_counter()
            placed = [
                spmd.distribute_tensor(x.to(o.device), mesh, placements, src_data_rank=None) for x in batch
            ]  # fmt: skip
            losses.append(number(step(*placed)))
            seconds.append(time.perf_counter() - began)
            rate = o.batch * o.length / seconds[-1]
            now = f"loss {losses[-1]:.4f}  {seconds[-1] * 1e3:.0f} ms/step  {rate:,.0f} tokens/s"
            progress.update(task, advance=1, now=now)
            if not console.is_terminal and rank == 0 and i % 10 == 0:
                console.print(f"step {i:3d}  {now}")
    dist.barrier()
    dist.destroy_process_group()
    if program is not None:
        report(o, console, program, seconds)
        if o.reference:
            compare(console, o, losses, reference_losses(o, start))


def reference_losses(o: argparse.Namespace, start: dict[str, torch.Tensor]) -> list[float]:
    """The same training on one device, in a process of its own.

    Without dropout that is plain eager PyTorch.  With dropout it is this compiler's program for a mesh of one device,
    since PyTorch's own generator draws other numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        weights, found = os.path.join(folder, "start.pt"), os.path.join(folder, "losses.pt")
        torch.save(start, weights)
        torch.multiprocessing.spawn(run_reference, (o, weights, found), nprocs=1)
        return torch.load(found)


def run_reference(_: int, o: argparse.Namespace, weights: str, found: str) -> None:
    torch.set_num_threads(1)
    model = Llama(config(o))
    model.load_state_dict(torch.load(weights))
    compiled: torch.nn.Module = model
    if o.dropout:
        dist.init_process_group("gloo", init_method=f"file://{found}.store", rank=0, world_size=1)
        model = spmd.parallelize(model, spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("one",)), placements={})
        compiled = torch.compile(model, backend="spmd", options={"lower": "eager"})
    step = step_of(model, compiled, o.lr)
    torch.manual_seed(o.seed)
    torch.save([number(step(*batch)) for batch in batches(o)], found)


# --- the report -----------------------------------------------------------------------------------------------


def readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def report(o: argparse.Namespace, console: Console, program: spmd.Program, seconds: list[float]) -> None:
    table = Table(title=f"collectives of one step, {program.mesh}, placement {o.placement}", box=box.SIMPLE)
    for head, justify in (("phase", "left"), ("kind", "left"), ("axis", "left"), ("count", "right"),
                          ("bytes sent", "right"), ("from", "left")):  # fmt: skip
        table.add_column(head, justify=justify)  # type: ignore[arg-type]
    counts: Counter = Counter()
    sent: Counter = Counter()
    for c in program.collectives:
        key = (c.phase, c.kind, c.axis, c.source)
        counts[key] += 1
        sent[key] += c.wire_bytes
    for key in sorted(counts, key=lambda k: (k[0] != "forward", -sent[k], k)):
        phase, kind, axis, source = key
        table.add_row(phase, kind, axis, str(counts[key]), readable(sent[key]), source)
    table.add_section()
    table.add_row("all", "", "", str(len(program.collectives)), readable(program.wire_bytes), "")
    console.print(table)

    memory = program.memory
    states = 2 * memory["parameters"]
    parts = [f"parameters {readable(memory['parameters'])}", f"gradients {readable(memory['gradients'])}",
             f"AdamW {readable(states)}", f"activations {readable(memory['activations'])} at most"]  # fmt: skip
    console.print(f"memory a device    {', '.join(parts)}")
    steady = statistics.median(seconds[1:] or seconds)
    console.print(
        f"step time          predicted {program.price * 1e3:.1f} ms (computation and communication), "
        f"measured {steady * 1e3:.1f} ms with the optimizer; first step {seconds[0]:.1f} s with compilation"
    )
    console.print(f"plan               within {program.gap:.2%} of the cheapest")
    if program.replicated_ops:
        console.print(f"replicated         {', '.join(program.replicated_ops)} (no rule)")


def compare(console: Console, o: argparse.Namespace, losses: list[float], expected: list[float]) -> None:
    """Both loss curves in columns; exit status 1 where they part."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    table = Table(title="loss", box=box.SIMPLE)
    for head in ("step", f"{len(o.axes)}-axis mesh", "one device", "relative difference"):
        table.add_column(head, justify="right")
    table.add_column("")
    shown = sorted({*range(0, len(losses), max(1, len(losses) // 12)), len(losses) - 1})
    top = max(expected)
    for i in shown:
        bar = "█" * round(40 * expected[i] / top)
        table.add_row(str(i), f"{losses[i]:.6f}", f"{expected[i]:.6f}", f"{apart[i]:.1e}", bar)
    console.print(table)
    verdict = "equal" if max(apart) <= TOLERANCE else "DIFFERENT"
    console.print(f"largest relative difference over {len(losses)} steps: {max(apart):.2e} ({verdict})")
    if max(apart) > TOLERANCE:
        sys.exit(1)


# --- processes ------------------------------------------------------------------------------------------------


def worker(rank: int, o: argparse.Namespace, world: int, port: int | None) -> None:
    torch.set_num_threads(1)
    if port is not None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    if o.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("nccl" if o.device == "cuda" else "gloo")
    train(o, rank, Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 110))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    o = options()
    world = 1
    for size in o.axes.values():
        world *= size
    if "RANK" in os.environ:  # under torchrun
        if int(os.environ["WORLD_SIZE"]) != world:
            sys.exit(f"--mesh {o.mesh} has {world} devices, torchrun started {os.environ['WORLD_SIZE']} processes")
        worker(int(os.environ["RANK"]), o, world, None)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torch.multiprocessing.spawn(worker, (o, world, free_port()), nprocs=world)
    except torch.multiprocessing.ProcessExitedException as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
