"""How long the compiler's own passes take, on one core, for the Llama of ``examples/llama.py``.

    python -m benchmarks.compile_time [--layers 2] [--profile cpu] [--mesh 8] [--mesh 2x4] ... [--dtensor]

Each mesh has a process of its own, so that nothing is cached.  With ``--dtensor``: the time in which torch.compile
(aot_eager) traces the same model on DTensors, which includes DTensor's propagation, less that of the plain model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
MESHES = ("8", "2x4", "2x2x2")


def sizes_of(mesh: str) -> dict[str, int]:
    """``2x4`` -> dp=2, tp=4; the first axis cuts the batch (where there are two or more), the last the weights."""
    numbers = [int(n) for n in mesh.split("x")]
    names = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}[len(numbers)]
    return dict(zip(names, numbers, strict=True))


def placements_on(axes: dict[str, int]) -> dict[str, Any]:
    from llama import MEGATRON
    from spmd_compiler.placements import Shard

    chosen: dict[str, Any] = {name: {"tp": Shard(dim)} for name, dim in MEGATRON.items()}
    if "dp" in axes:
        chosen |= {"ids": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
    return chosen


def timed(call: Callable[..., T], *args: Any) -> tuple[float, T]:
    began = time.process_time()
    result = call(*args)
    return time.process_time() - began, result


def model_and_batch(layers: int, **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    from llama import Config, Llama

    with torch.device("meta"):
        model = Llama(Config(layers=layers, dim=256, heads=8, kv_heads=8, ffn=704, **options))
    return model, torch.zeros(16, 128, dtype=torch.int64, device="meta")


@dataclass(frozen=True)
class Planned:
    """CPU seconds by stage, and what came out."""

    seconds: dict[str, float]
    nodes: int
    columns: int
    local: Any

    @property
    def gap(self) -> float:
        return max(0.0, (self.local.price - self.local.bound) / self.local.price)


def planned(
    model: torch.nn.Module, args: tuple[Any, ...], sizes: dict[str, int], placements: dict[str, Any], profile: Any
) -> Planned:
    """A training step planned pass by pass; ``profile`` is a name or a `Profile`."""
    from spmd_compiler import passes
    from spmd_compiler.capture import capture_function
    from spmd_compiler.cost import profile_of
    from spmd_compiler.placements import Mesh
    from spmd_compiler.program import Placements

    mesh, prices = Mesh(sizes), profile_of(profile)
    specs = Placements(mesh, placements, model)
    trace, (captured, _) = timed(lambda: capture_function(model, args, mesh=mesh, specs=specs, backward=True))
    annotate, annotated = timed(passes.prepared, captured)
    propagate, plan = timed(passes.propagate.run, annotated, mesh, prices)
    partition, local = timed(passes.partition.run, annotated, plan, mesh, prices)
    simplify, local = timed(passes.simplify.run, local)
    seconds = {
        "trace": trace, "annotate": annotate, "propagate": propagate, "partition": partition, "simplify": simplify
    }  # fmt: skip
    return Planned(seconds, len(annotated.graph.graph.nodes), plan.solution.columns, local)


def ours(mesh: str, layers: int, profile: str) -> str:
    torch.set_num_threads(1)
    model, ids = model_and_batch(layers)
    axes = sizes_of(mesh)
    p = planned(model, (ids, ids), axes, placements_on(axes), profile)
    passes = [s for stage, s in p.seconds.items() if stage != "trace"]
    shown = "".join(f" {s:9.2f}" for s in (p.seconds["trace"], *passes, sum(passes)))
    return f"{mesh:>8} {p.nodes:6d}{shown} {p.columns:9d} {p.gap:8.1e}" + (
        f"  replicated: {', '.join(p.local.replicated_ops)}" if p.local.replicated_ops else ""
    )


def dtensor(mesh: str, layers: int) -> str:
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    axes = sizes_of(mesh)
    world = 1
    for size in axes.values():
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    device_mesh = dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    # DTensor has no rule for the CPU's attention kernel
    torch.nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    plain, _ = timed_step(layers, None, axes)
    seconds, error = timed_step(layers, device_mesh, axes)
    shown = f"{seconds:7.2f} s" if error is None else f"failed after {seconds:.1f} s: {error}"
    return f"{mesh:>8}  plain {plain:6.2f} s  DTensor {shown}"


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Attention in operators that DTensor knows (without the causal mask, a plain tensor, which it refuses)."""
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def timed_step(layers: int, mesh: Any, axes: dict[str, int]) -> tuple[float, str | None]:
    """Seconds of the first forward and backward under aot_eager; with an error's first line if there is one."""
    import fnmatch

    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.compiler.reset()
    model, ids = model_and_batch(layers, rotary=False)
    model, ids = model.to_empty(device="cpu"), torch.zeros(ids.shape, dtype=torch.int64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    if mesh is not None:
        # DTensor's norm refuses the masked partial sum that its row-sharded embedding gives
        chosen = {k: v for k, v in placements_on(axes).items() if k not in ("embed.weight", "head.weight")}

        def placed(name: str, value: torch.Tensor) -> torch.Tensor:
            found = next((p for pattern, p in chosen.items() if fnmatch.fnmatchcase(name, pattern)), {})
            return distribute_tensor(value, mesh, [found.get(a, Replicate()) for a in axes], src_data_rank=None)

        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(placed(name, parameter.detach())))
        ids = placed("ids", ids)
    compiled = torch.compile(model, backend="aot_eager")
    began = time.process_time()
    try:
        compiled(ids, ids).backward()
    except Exception as error:
        cause = str(error).rpartition(": got ")[2].strip().splitlines()[0]
        return time.process_time() - began, f"{type(error).__name__}: {cause[:200]}"
    return time.process_time() - began, None


def alone(call: Callable[..., T], *args: Any) -> T:
    """The result of ``call`` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--mesh", action="append", help=f"sizes such as 2x4, one or more; default {MESHES}")
    parser.add_argument("--dtensor", action="store_true", help="also DTensor's own tracing")
    o = parser.parse_args()
    print(f"Llama, {o.layers} layers, forward and backward, profile {o.profile}; CPU seconds, one thread")
    print("    mesh  nodes     trace  annotate propagate partition  simplify    passes   columns      gap")
    for mesh in o.mesh or MESHES:
        print(alone(ours, mesh, o.layers, o.profile), flush=True)
    if o.dtensor:
        print("\ntorch.compile (aot_eager), first forward and backward, fake process group, no rotary positions")
        for mesh in o.mesh or MESHES:
            print(alone(dtensor, mesh, o.layers), flush=True)


if __name__ == "__main__":
    main()
