"""A pool of processes joined by gloo, each waiting for functions to run."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Pool:
    """``pool(function, *args)`` runs ``function(*args)`` on every rank and returns the results in rank order.

    ``function`` is a top-level function of a test module.  If a rank raises, the call raises with its traceback.
    A call that takes longer than ``timeout`` seconds, or in which a process dies, ends the processes and raises an
    error that says where each stood; the next call starts new ones.
    """

    def __init__(self, world: int, timeout: float = 300.0) -> None:
        self.world, self.timeout = world, timeout
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.store = Path(tempfile.mktemp(prefix="spmd_gloo_"))
        self.tasks = [context.Queue() for _ in range(self.world)]
        self.results = context.Queue()
        self.stacks = [Path(f"{self.store}_{rank}_stack") for rank in range(self.world)]
        for rank in range(self.world):
            given = self.tasks[rank], self.results, list(sys.path), self.stacks[rank]
            arguments = (rank, self.world, self.store, *given)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        for file in (self.store, *self.stacks) if self.processes else ():
            file.unlink(missing_ok=True)
        self.processes = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for tasks in self.tasks:
            tasks.put((function.__module__, function.__qualname__, args))
        results: list[Any] = [None] * self.world
        errors: dict[int, str] = {}
        missing = set(range(self.world))
        limit = time.monotonic() + self.timeout
        while missing:
            try:
                rank, value, error = self.results.get(timeout=1)
            except queue.Empty:
                dead = {r: p.exitcode for r, p in enumerate(self.processes) if not p.is_alive()}
                if dead or time.monotonic() > limit:
                    raise self._lost(function.__qualname__, missing, dead, errors) from None
                continue
            missing.discard(rank)
            results[rank] = value
            if error:
                errors[rank] = error
                limit = min(limit, time.monotonic() + 20)
        if errors:
            if len(errors) < self.world:
                self.close()
            rank, text = min(errors.items())
            raise AssertionError(f"rank {rank} of {function.__qualname__}:\n{text}")
        return results

    def _stack(self, rank: int) -> str:
        return "\n".join(self.stacks[rank].read_text().splitlines()[1:8])  # the innermost call first

    def _lost(self, name: str, missing: set[int], dead: dict[int, int], errors: dict[int, str]) -> Exception:
        """The error of a call that some ranks do not return from, once the processes have ended."""
        for rank in missing - set(dead):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        told = [f"rank {r} ended with exit code {code}" for r, code in sorted(dead.items())]
        told += [f"rank {r} stands at\n{self._stack(r)}" for r in sorted(missing - set(dead))]
        told += [f"rank {r} raised {text.strip().splitlines()[-1]}" for r, text in sorted(errors.items())]
        self.close()
        return TimeoutError("\n".join([f"{name} did not return on {len(missing)} of {self.world} ranks", *told]))


def _serve(rank: int, world: int, store: Path, tasks: Any, results: Any, path: list[str], stack: Path) -> None:
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"), all_threads=False)
    while True:
        module, name, args = tasks.get()
        try:
            __import__(module)
            results.put((rank, getattr(sys.modules[module], name)(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
