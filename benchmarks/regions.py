"""What the first training step of a Llama costs by depth, its layers as regions or inlined.

    python -m benchmarks.regions [--layers 2 --layers 8 --layers 32] [--lower eager|inductor]

CPU seconds of the first forward and backward under ``torch.compile(backend="spmd")`` on a fake group of eight, weights
cut as Megatron does; beside them those of torch's own tracing of the plain model (``backend="aot_eager"``).  A layer is
a region where its ``forward`` is wrapped in ``torch.compiler.nested_compile_region``.  Each figure has a process of its
own; with ``--lower inductor`` Inductor's caches are off, and its C++ compiler's processes aren't counted.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from benchmarks.compile_time import alone


def first_step(layers: int, region: bool, lower: str | None) -> float:
    """CPU seconds of the first step; torch's own tracing where ``lower`` is None."""
    import llama
    from spmd_compiler import Shard, parallelize

    torch.set_num_threads(1), torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = dist.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    if region:
        llama.Block.forward = torch.compiler.nested_compile_region(llama.Block.forward)  # type: ignore[method-assign]
    model: torch.nn.Module = llama.Llama(llama.Config(layers=layers, dim=64, heads=8, kv_heads=8, ffn=128, length=32))
    ids = torch.randint(0, 256, (8, 32))
    if lower is None:
        step = torch.compile(model, backend="aot_eager")
    else:
        model = parallelize(model, mesh, {name: {"tp": Shard(dim)} for name, dim in llama.MEGATRON.items()})
        step = torch.compile(model, backend="spmd", options={"lower": lower})
    began = time.process_time()
    step(ids, ids).backward()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, action="append", help="depths; default 2, 8 and 32")
    parser.add_argument("--lower", default="eager", choices=("eager", "inductor"))
    o = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "PYTHONWARNINGS": "ignore"}
    print(f"first training step, CPU seconds, lower={o.lower!r} (torch's own tracing)")
    print(f"{'layers':>8} {'inlined':>16} {'as regions':>16}")
    for layers in o.layers or (2, 8, 32):
        cells = []
        for region in (False, True):
            ours, theirs = (alone(first_step, layers, region, lower) for lower in (o.lower, None))
            cells.append(f"{ours:>8.1f} ({theirs:>5.1f})")
        print(f"{layers:>8} {cells[0]:>16} {cells[1]:>16}", flush=True)


if __name__ == "__main__":
    main()
