"""Placements that the solver chooses beside hand-written ones, planned under the same prices and budgets.

    python -m benchmarks.auto [--case llama] [--profile h100] [--layers 2]

Each layout by hand is planned as it says (what it leaves open, the solver decides) and its memory printed.  Then the
solver places everything itself (``placements={"*": "auto"}``): with memory without end, and within what each layout by
hand holds and 3% more.  Its price should be no higher than that of any layout which fits.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spmd_compiler import constrain
from spmd_compiler.placements import Mesh, Shard
from spmd_compiler.program import Program, export

PLENTY = 1e15  # bytes
ROOM = 1.03  # times what a layout by hand holds: a budget
S = [Shard(d) for d in range(4)]


@dataclass(frozen=True)
class Layout:
    """Placements of inputs and parameters, and of what modules (by glob) return.

    ``kept``: gathered parameters are kept for the backward, whatever that holds; else they are gathered again.
    """

    name: str
    placements: Mapping[str, Any]
    returned: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False


@dataclass(frozen=True)
class Case:
    name: str
    mesh: Mapping[str, int]
    build: Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]  # of the layers asked for, on meta
    layouts: tuple[Layout, ...]


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return ids, ids


def llama(batch: int, length: int) -> Callable[[int], Any]:
    """Llama-3 8B's layers in bfloat16, with a vocabulary of 32,000."""

    def build(layers: int) -> Any:
        from llama import Config, Llama

        with torch.device("meta"):
            c = Config(vocab=32000, dim=4096, layers=layers, heads=32, kv_heads=8, ffn=14336, length=length)
            return Llama(c).to(torch.bfloat16), tokens(batch, length)

    return build


def experts(layers: int) -> Any:
    from benchmarks.models import Experts

    with torch.device("meta"):
        return Experts(4096, 14336, 8, 640).to(torch.bfloat16), (torch.zeros(16, 2048, 4096, dtype=torch.bfloat16),)


def resnet(batch: int, size: int) -> Callable[[int], Any]:
    def build(layers: int) -> Any:
        from benchmarks.models import ResNet

        with torch.device("meta"):
            images = torch.zeros(batch, 3, size, size)
            return ResNet((layers,) * 4), (images, torch.zeros(batch, dtype=torch.int64))

    return build


def dlrm(layers: int) -> Any:
    from benchmarks.models import DLRM

    rows = (4_000_000, 1_000_000, 400_000, 400_000, 40_000, 4_000, 400, 40)
    with torch.device("meta"):
        model = DLRM(rows, 128, 16, 512)
        return model, (torch.zeros(65536, 16), torch.zeros(65536, len(rows), dtype=torch.int64), torch.zeros(65536))


def data(*axes: str, dim: int = 0) -> dict[str, Any]:
    cut = {a: S[dim] for a in axes}
    return {"ids": cut, "targets": cut}


def weights(*zero: str) -> dict[str, Any]:
    """Megatron's cut on tp, and all cut on ``zero`` too."""
    from llama import MEGATRON

    shared = {a: S[0] for a in zero}
    return {**{n: {"tp": S[d], **shared} for n, d in MEGATRON.items()}, "*norm*": shared}


def llama_layouts() -> tuple[Layout, ...]:
    whole = {"layers.?": {"dp": S[0]}}
    cut = {"layers.?": {"dp": S[0], "tp": S[1]}}
    all_ = {"*weight": {"dp": S[0], "tp": S[0]}}
    both = {"layers.?": {"dp": S[0], "tp": S[0]}}
    return (
        Layout("data parallel", data("dp", "tp"), both),
        Layout("ZeRO-2", {**data("dp", "tp"), **all_}, both, kept=True),
        Layout("ZeRO-3", {**data("dp", "tp"), **all_}, both),
        Layout("Megatron TP x DP", {**data("dp"), **weights()}, whole),
        Layout("the same, sequence parallel", {**data("dp"), **weights()}, cut),
        Layout("FSDP x TP", {**data("dp"), **weights("dp")}, cut),
        Layout("the same, gathers kept", {**data("dp"), **weights("dp")}, cut, kept=True),
    )


def sequence_layouts() -> tuple[Layout, ...]:
    return (
        Layout("sequence", data("tp", dim=1), {"layers.?": {"tp": S[1]}}),
        Layout("sequence, parameters cut", {**data("tp", dim=1), "*weight": {"tp": S[0]}}, {"layers.?": {"tp": S[1]}}),
        Layout("the same, gathers kept", {**data("tp", dim=1), "*weight": {"tp": S[0]}}, {"layers.?": {"tp": S[1]}},
               kept=True),
        Layout("Megatron TP", weights(), {"layers.?": {}}),
        Layout("Megatron TP, sequence parallel", weights(), {"layers.?": {"tp": S[1]}}),
    )  # fmt: skip


def image_layouts() -> tuple[Layout, ...]:
    def images(**cut: int) -> dict[str, Any]:
        return {"images": {a: S[d] for a, d in cut.items()}, "labels": {a: S[0] for a, d in cut.items() if d == 0}}

    return (
        Layout("batch", images(a=0, b=0)),
        Layout("batch, parameters cut", {**images(a=0, b=0), "*weight": {"a": S[0]}}),
        Layout("height", images(a=2, b=2)),
        Layout("batch x height", images(a=0, b=2)),
        Layout("height x width", images(a=2, b=3)),
    )


def expert_layouts() -> tuple[Layout, ...]:
    batch = {"x": {"ep": S[0]}}
    return (
        Layout("data parallel", batch),
        Layout("ZeRO-3", {**batch, "up": {"ep": S[1]}, "down": {"ep": S[1]}}),
        Layout("experts", {**batch, "up": {"ep": S[0]}, "down": {"ep": S[0]}}),
        Layout("experts cut", {**batch, "up": {"ep": S[2]}, "down": {"ep": S[1]}}),
    )


def table_layouts() -> tuple[Layout, ...]:
    batch = {n: {"x": S[0]} for n in ("dense", "categories", "clicked")}
    return (
        Layout("data parallel", batch),
        Layout("tables cut by rows", {**batch, "tables.[0-4].weight": {"x": S[0]}}),
        Layout("tables cut by columns", {**batch, "tables.*.weight": {"x": S[1]}}),
    )


CASES = (
    Case("llama", {"dp": 4, "tp": 2}, llama(16, 4096), llama_layouts()),
    Case("llama, few tokens", {"dp": 4, "tp": 2}, llama(8, 512), llama_layouts()),
    Case("llama, two nodes", {"dp": 2, "tp": 8}, llama(16, 4096), llama_layouts()),
    Case("long sequence", {"tp": 8}, llama(1, 65536), sequence_layouts()),
    Case("experts", {"ep": 8}, experts, expert_layouts()),
    Case("resnet, many images", {"a": 4, "b": 2}, resnet(256, 224), image_layouts()),
    Case("resnet, large images", {"a": 4, "b": 2}, resnet(4, 2048), image_layouts()),
    Case("dlrm", {"x": 8}, dlrm, table_layouts()),
)  # fmt: skip


@contextlib.contextmanager
def returning(model: nn.Module, placed: Mapping[str, Any]) -> Iterator[None]:
    """Within, what the modules named (by glob) return is constrained to a placement."""
    hooks = [
        module.register_forward_hook(lambda _m, _args, out, cut=cut: constrain(out, cut))
        for glob, cut in placed.items()
        for name, module in model.named_modules() if fnmatch.fnmatchcase(name, glob)
    ]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def plan(case: Case, layers: int, layout: Layout | None, profile: str, budget: float | None = None) -> Program:
    """``layout`` as it says, or (None) what the solver chooses within a budget."""
    model, args = case.build(layers)
    mesh = Mesh(case.mesh)
    if layout is None:
        return export(model, args, mesh=mesh, placements={"*": "auto"}, backward=True, profile=profile,
                      memory_budget=budget)  # fmt: skip
    with returning(model, layout.returned):
        program = export(model, args, mesh=mesh, placements=layout.placements, backward=True, profile=profile,
                         memory_budget=PLENTY if layout.kept else None)  # fmt: skip
    program.states = 2.0
    return program


def row(name: str, program: Program, seconds: float) -> tuple[str, float, float]:
    held = program.memory
    total = sum(held.values())
    parts = " ".join(f"{n / 1e9:7.2f}" for n in held.values())
    text = (
        f"{name:<34} {program.price * 1e3:10.3f} {program.wire_bytes / 1e9:9.3f} {total / 1e9:8.2f} {parts} "
        f"{program.gap:8.1e} {seconds:6.1f}"
    )
    return text, program.price, total


def timed(case: Case, layers: int, layout: Layout | None, profile: str, budget: float | None = None) -> Any:
    torch.set_num_threads(1)
    began = time.process_time()
    program = plan(case, layers, layout, profile, budget)
    name = layout.name if layout is not None else "auto" if budget == PLENTY else f"auto within {budget / 1e9:.2f} GB"  # type: ignore[operator]
    return row(name, program, time.process_time() - began)


def run(case: Case, layers: int, profile: str) -> None:
    mesh = " x ".join(map(str, case.mesh.values()))
    print(f"\n{case.name}, on {mesh} devices; ms a step, GB on the wire, GB held, and the seconds that planning took")
    print(f"{'':<34} {'step, ms':>10} {'wire':>9} {'held':>8} {'params':>7} {'grads':>7} {'states':>7} {'live':>7} "
          f"{'gap':>8} {'plan':>6}")  # fmt: skip
    found = []
    for layout in case.layouts:
        text, price, held = timed(case, layers, layout, profile)
        print(text, flush=True)
        found.append((price, held))
    for budget in (PLENTY, *sorted({round(ROOM * held / 1e7) * 1e7 for _, held in found}, reverse=True)):
        text, price, _ = timed(case, layers, None, profile, budget)
        best = min(p for p, held in found if held <= budget)
        print(f"{text}  {price / best:.4f} of the best by hand that fits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", choices=[c.name for c in CASES])
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--layers", type=int, default=2, help="of a Llama; of each stage of a ResNet")
    o = parser.parse_args()
    for case in CASES:
        if o.case in (None, case.name):
            run(case, o.layers, o.profile)


if __name__ == "__main__":
    main()
