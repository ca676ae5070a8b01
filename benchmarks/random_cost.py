"""Nanoseconds an element of our random draws and of Inductor's own, each fused by Inductor into one kernel.

    python -m benchmarks.random_cost [--elements 4194304] [--rounds 15]

Ours draw from a counter over global indices (`spmd_compiler.draws`), so that draws do not depend on the mesh.
Inductor's are Philox by position in the local tensor, with ``config.fallback_random`` off.  One thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spmd_compiler.draws import decomposed

CPU = torch.device("cpu")


def ours(kind: str, shape: list[int], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda seed: decomposed(seed, 3, kind, shape, [0] * len(shape), shape, dtype, CPU)


def dropout(seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shape = list(x.shape)
    keep = decomposed(seed, 3, "uniform", shape, [0] * len(shape), shape, torch.float32, CPU) >= 0.1
    return x * keep * (1 / 0.9)


def nanoseconds(functions: dict[str, Callable[[], object]], elements: int, rounds: int) -> dict[str, float]:
    """The median time of each, taken in turns."""
    for function in functions.values():
        function()
    seen: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            seen[name].append((time.perf_counter() - begin) / elements * 1e9)
    return {name: statistics.median(times) for name, times in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape, seed = [given.elements // 1024, 1024], torch.tensor(7)
    x, out = torch.randn(shape), {}
    cases: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {}
    for name, kind, theirs in (("rand", "uniform", torch.rand), ("randn", "normal", torch.randn)):
        mine, other = torch.compile(ours(kind, shape, torch.float32)), torch.compile(lambda f=theirs: f(shape))
        cases[name] = (lambda f=mine: f(seed)), other
    drop, their_drop = torch.compile(dropout), torch.compile(lambda x: F.dropout(x, 0.1))
    cases["dropout"] = (lambda: drop(seed, x)), (lambda: their_drop(x))
    print(f"{'':10}{'ours':>10}{'Inductor':>10}{'ratio':>8}    ns an element, {given.elements} elements")
    for name, (mine, other) in cases.items():
        out = nanoseconds({"ours": mine, "theirs": other}, given.elements, given.rounds)
        print(f"{name:10}{out['ours']:10.2f}{out['theirs']:10.2f}{out['ours'] / out['theirs']:8.2f}")


if __name__ == "__main__":
    main()
