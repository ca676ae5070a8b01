"""A pool of processes joined by gloo, each waiting for functions to run."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any


class Pool:
    """``pool(function, *args)`` runs ``function(*args)`` on every rank and returns the results in rank order.

    ``function`` is a top-level function of a test module.  If a rank raises, the call raises with its traceback.
    A call that takes longer than ``timeout`` seconds ends the processes, each of which has printed where it stands,
    and the next call starts new ones.
    """

    def __init__(self, world: int, timeout: float = 300.0) -> None:
        self.world, self.timeout = world, timeout
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(prefix="spmd_gloo_")
        self.tasks = [context.Queue() for _ in range(self.world)]
        self.results = context.Queue()
        for rank in range(self.world):
            arguments = (rank, self.world, store, self.tasks[rank], self.results, list(sys.path), self.timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        self.processes = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for tasks in self.tasks:
            tasks.put((function.__module__, function.__qualname__, args))
        results: list[Any] = [None] * self.world
        errors: dict[int, str] = {}
        for _ in range(self.world):
            try:
                rank, value, error = self.results.get(timeout=self.timeout if not errors else 20)
            except Exception:
                self.close()
                raise TimeoutError(f"{function.__qualname__} did not return; {errors or ''}") from None
            results[rank] = value
            if error:
                errors[rank] = error
        if errors:
            if len(errors) < self.world:
                self.close()
            rank, text = min(errors.items())
            raise AssertionError(f"rank {rank} of {function.__qualname__}{args}:\n{text}")
        return results


def _serve(rank: int, world: int, store: str, tasks: Any, results: Any, path: list[str], patience: float) -> None:
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    while True:
        module, name, args = tasks.get()
        faulthandler.dump_traceback_later(0.9 * patience, file=sys.__stderr__)
        try:
            __import__(module)
            results.put((rank, getattr(sys.modules[module], name)(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
