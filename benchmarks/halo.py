"""What a convolution with a sharded spatial dim sends, at full size, and how long its passes take.

    python -m benchmarks.halo

``Conv2d(256, 256, 7, padding=3, groups=256)`` (and a ResNet's first layers) on an image cut along its width: the bytes
that a device sends, beside those of gathering the image.  No process group and no memory is needed: all is planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from spmd_compiler import Shard, export

LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "patches": ((7, 3, 512, 1024), lambda: nn.Conv2d(3, 256, 4, stride=4)),
    "depthwise 7x7": ((7, 256, 128, 256), lambda: nn.Conv2d(256, 256, 7, padding=3, groups=256)),
    "transposed": ((7, 64, 128, 256), lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1)),
    "stem": (
        (8, 3, 512, 1024),
        lambda: nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                              nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.ReLU()),
    ),
}  # fmt: skip


class Trained(nn.Module):
    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.x = layer, nn.Parameter(torch.empty(shape))

    def forward(self) -> torch.Tensor:
        return self.layer(self.x).square().sum()


def run(name: str, world: int) -> str:
    shape, make = LAYERS[name]
    with torch.device("meta"):
        model = Trained(make(), shape)
    began = time.perf_counter()
    where = {"x": {"w": Shard(3)}}
    program = export(model, (), mesh={"w": world}, placements=where, backward=True, profile="bytes")
    seconds = time.perf_counter() - began
    sent = {p: sum(c.wire_bytes for c in program.collectives if c.phase == p and c.kind == "permute")
            for p in ("forward", "backward")}  # fmt: skip
    gathered = model.x.numel() * model.x.element_size() * (world - 1) / world
    kinds = sorted({c.kind for c in program.collectives})
    return (
        f"{name:<14} {world:5} {sent['forward']:14,.0f} {sent['backward']:14,.0f} "
        f"{program.wire_bytes - sum(sent.values()):14,.0f} {gathered:16,.0f} {seconds:8.1f}  {', '.join(kinds)}"
    )


def main() -> None:
    torch.set_num_threads(1)
    print("layer          world   halo forward  halo backward   other bytes   image gathered  seconds  kinds")
    for name in LAYERS:
        for world in (2, 8):
            print(run(name, world), flush=True)


if __name__ == "__main__":
    main()
