"""Llama-3 8B for the command line: a training step, FSDP on ``dp``, Megatron on ``tp``.  Nothing is allocated.

    spmd-compiler plan examples/llama3.py:step --mesh dp=64,tp=8 --profile h100 --level collectives
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.tensor import Shard

from llama import MEGATRON, Config, Llama


def step() -> dict[str, Any]:
    """What `spmd_compiler.export` takes; ``LAYERS`` in the environment says how many of the 32 layers."""
    layers, length = int(os.environ.get("LAYERS", "32")), 8192
    with torch.device("meta"):
        config = Config(vocab=128256, dim=4096, layers=layers, heads=32, kv_heads=8, ffn=14336, length=length)
        model, ids = Llama(config).to(torch.bfloat16), torch.empty(64, length, dtype=torch.int64)
    placements: dict[str, Any] = {name: {"dp": Shard(0), "tp": Shard(dim)} for name, dim in MEGATRON.items()}
    data = {"dp": Shard(0)}
    placements |= {"*norm*": data, "ids": data, "targets": data}
    return {"model_or_fn": model, "args": (ids, ids), "placements": placements, "backward": True}
