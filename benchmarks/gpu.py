"""One GPU: ``backend="spmd"`` on a mesh of one CUDA device beside plain ``torch.compile``.

    python -m benchmarks.gpu [--dim 1024] [--layers 4] [--batch 8] [--length 1024] [--steps 20]

Checks that the loss and all gradients agree with eager, that Triton kernels were generated, and prints the ratio of
the step times, measured in turns in one run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

import spmd_compiler as spmd
from llama import Config, Llama


def step_of(model: torch.nn.Module, compiled: torch.nn.Module, batch: tuple) -> Callable[[], torch.Tensor]:
    parameters = list(model.parameters())

    def step() -> torch.Tensor:
        for p in parameters:
            p.grad = None
        loss = compiled(*batch)
        loss.backward()
        return loss.detach()

    return step


def seconds(step: Callable[[], torch.Tensor]) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    step()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def kernels(step: Callable[[], torch.Tensor]) -> set[str]:
    """The names of the Triton kernels that a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return {e.key for e in profile.key_averages() if e.key.startswith("triton_")}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, spmd.DTensor) else tensor


def difference(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    """The largest difference of a gradient, relative to its largest element."""
    worst = 0.0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        worst = max(worst, ((whole(p.grad) - q.grad).abs().max() / q.grad.abs().max()).item())
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for name, default in (("dim", 1024), ("layers", 4), ("batch", 8), ("length", 1024), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA device, and torch sees none here")
    torch.manual_seed(0)
    config = Config(
        vocab=8192, dim=o.dim, layers=o.layers, heads=o.dim // 64, kv_heads=o.dim // 128, ffn=o.dim * 11 // 4
    )  # fmt: skip
    with torch.device("cuda"):
        reference = Llama(config)
        batch = tuple(torch.randint(0, config.vocab, (o.batch, o.length)) for _ in range(2))
    plain, ours = copy.deepcopy(reference), copy.deepcopy(reference)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}.store", rank=0, world_size=1)
        mesh = spmd.init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
        ours = spmd.parallelize(ours, mesh, placements={})
        steps = {
            "plain": step_of(plain, torch.compile(plain), batch),
            "spmd": step_of(ours, torch.compile(ours, backend="spmd"), batch),
        }
        expected = step_of(reference, reference, batch)()
        for name, step in steps.items():
            loss = whole(step())
            model = plain if name == "plain" else ours
            print(
                f"{name:<6} loss apart by {abs(loss - expected) / expected:.1e}, "
                f"gradients by {difference(model, reference):.1e}, Triton kernels {len(kernels(step))}"
            )
        if not kernels(steps["spmd"]):
            sys.exit("no Triton kernel ran: Inductor did not lower the program")
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(o.steps):
            for name, step in steps.items():
                times[name].append(seconds(step))
        found = {name: statistics.median(t) for name, t in times.items()}
        print(", ".join(f"{name} {t * 1e3:.2f} ms" for name, t in found.items()))
        print(f"step time of spmd / plain: {found['spmd'] / found['plain']:.3f}  ({torch.cuda.get_device_name()})")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
