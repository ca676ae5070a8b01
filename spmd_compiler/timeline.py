"""A predicted timeline of one step, as a profile prices it: a stream of computation, and one of collectives for every
group of devices, as NCCL has them.

Nodes run in the order of the program.  A collective starts when the computation that stands before it and the
collective before it on its stream are done; computation goes on until it needs the result.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .bodies import call_of
from .collectives import KINDS, axes_of, is_collective, message_bytes
from .cost import Profile, profile_of
from .ir import Partitioned, body_of, is_getitem, nbytes, results, source_line
from .placements import Mesh

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """What runs on a stream, `COMPUTE` or the axes of collectives, from ``start`` for ``seconds``."""

    name: str
    what: str
    stream: str
    start: float
    seconds: float
    phase: str
    source: str


@dataclass(frozen=True)
class Call:
    """What a step runs: a key of its own, seconds on a stream, and the keys of what it reads."""

    key: Any
    seconds: float
    stream: str
    reads: tuple[Any, ...]


def calls(local: Partitioned) -> list[Call]:
    """The calls of a step on a device, in their order, by their nodes."""
    profile, mesh = profile_of(local.profile), local.mesh
    return [Call(n, *duration(n, mesh, profile), tuple(n.all_input_nodes)) for n in local.graph.graph.nodes]


def timed(step: Sequence[Call]) -> list[Call]:
    """The calls of a step that take time; what reads another reads what that was made from."""
    sources: dict[Any, tuple[Any, ...]] = {}
    found = []
    for call in step:
        reads = tuple(dict.fromkeys(s for r in call.reads for s in sources[r]))
        sources[call.key] = (call.key,) if call.seconds else reads
        if call.seconds:
            found.append(dataclasses.replace(call, reads=reads))
    return found


def starts(step: Sequence[Call]) -> list[float]:
    """When each call starts; what it reads from elsewhere is there."""
    ready: dict[Any, float] = {}
    free = {COMPUTE: 0.0}
    found = []
    for call in step:
        begin = max([ready.get(r, 0.0) for r in call.reads], default=0.0)
        if call.seconds:
            begin = max(begin, free[COMPUTE], free.get(call.stream, 0.0))
            free[call.stream] = begin + call.seconds
        ready[call.key] = begin + call.seconds
        found.append(begin)
    return found


def seconds(step: Sequence[Call]) -> float:
    """What a step takes."""
    return max((begin + call.seconds for call, begin in zip(step, starts(step), strict=True)), default=0.0)


def timeline(local: Partitioned) -> list[Event]:
    """The events of one step on a device; views and other calls that take no time are left out."""
    step = calls(local)
    events = []
    for call, begin in zip(step, starts(step), strict=True):
        node, stream = call.key, call.stream
        if call.seconds:
            phase = "backward" if node.meta.get("phase") == "backward" else "forward"
            named = f"{KINDS[node.target]}[{stream}]" if is_collective(node) else str(node.target)
            what = named.removesuffix(".default")
            events.append(Event(node.name, what, stream, begin, call.seconds, phase, source_line(node)))
    return events


def duration(node: Node, mesh: Mesh, profile: Profile) -> tuple[float, str]:
    """``(seconds, stream)`` of a node of a local graph."""
    if is_collective(node):
        axes = axes_of(node)
        return profile.collective(mesh, KINDS[node.target], axes, message_bytes(node)), "/".join(axes)
    if inside := [n for b in map(body_of, node.all_input_nodes) if b is not None for n in b.graph.nodes]:
        call = call_of(node)
        seconds = sum(duration(n, mesh, profile)[0] for n in inside)
        return seconds * max(1, call.trips if call is not None else 1), COMPUTE
    if node.op != "call_function" or is_getitem(node) or getattr(node.target, "is_view", False):
        return 0.0, COMPUTE
    made = [v for v in results(node) if v is not None]
    traffic = sum(map(nbytes, made)) + sum(nbytes(v) for n in node.all_input_nodes for v in results(n))
    return profile.operator(_flops(node), traffic, made[0].element_size() if made else 4), COMPUTE


def _flops(node: Node) -> float:
    """By torch's own formulas; 0.0 where it has none."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def trace(events: list[Event], name: str) -> dict[str, Any]:
    """Chrome's trace format, which Perfetto reads: microseconds, one thread for each stream."""
    threads = {stream: i for i, stream in enumerate(dict.fromkeys([COMPUTE, *(e.stream for e in events)]), 1)}
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for stream, tid in threads.items()
    ]
    found.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{name} (predicted)"}})
    for e in events:
        found.append({
            "ph": "X", "pid": 1, "tid": threads[e.stream], "name": e.what, "cat": e.phase, "ts": e.start * 1e6,
            "dur": e.seconds * 1e6, "args": {"value": f"%{e.name}", "source": e.source},
        })  # fmt: skip
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def write_trace(events: list[Event], name: str, path: str) -> None:
    """Write a trace file for ``ui.perfetto.dev`` or ``chrome://tracing``."""
    with open(path, "w") as file:
        json.dump(trace(events, name), file)
