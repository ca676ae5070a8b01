"""The compiler's pipeline: captured joint graph in, partitioned local graph out.

    annotate -> unmerge -> pad -> propagate -> partition -> simplify (then `split` cuts it into forward and backward)

Each pass is one module with one public function; passes never import each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import Profile, profile_of
from ..ir import Captured, Partitioned
from ..memory import Memory, peak
from . import annotate, pad, partition, propagate, simplify, unmerge


@dataclass(frozen=True)
class Options:
    """How to compile.  ``profile`` prices the plan; ``verify`` re-derives and simulates the result.

    ``memory`` bounds what a device holds.
    """

    profile: str | Profile | None = None
    verify: bool = False
    lower: str = "inductor"  # or "eager"
    memory: Memory | None = None


def run(captured: Captured, options: Options = Options()) -> Partitioned:
    """Partition a captured graph.

    Raises `SpmdError` where a placement of the user's cannot be met.
    """
    annotated = pad.run(unmerge.run(annotate.run(captured)))
    local = plan(annotated, profile_of(options.profile), options.memory)
    if options.verify:
        from ..verify import verify

        verify(local)
    return local


def plan(annotated: Captured, profile: Profile, memory: Memory | None = None) -> Partitioned:
    """Partition a graph that is annotated already."""

    def written(plan: propagate.Plan) -> Partitioned:
        return simplify.run(partition.run(annotated, plan, annotated.mesh, profile))

    def holds(plan: propagate.Plan) -> tuple[dict[str, int], int]:
        return peak(written(plan), memory.states if memory is not None else 0.0)

    return written(propagate.run(annotated, annotated.mesh, profile, memory, holds))
