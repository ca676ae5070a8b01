"""The compiler's pipeline: captured joint graph in, partitioned local graph out.

    annotate -> unmerge -> pad -> propagate -> partition -> simplify -> bucket -> overlap (then `split` cuts it in two)

Each pass is one module with one public function; passes never import each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ..bodies import captured as body_of
from ..bodies import drop_unread, with_bodies
from ..cost import Profile, profile_of
from ..family import (
    Decisions,
    Family,
    Samples,
    common,
    common_global,
    data_samples,
    even_cuts,
    expressions,
    member,
    pieces_of,
)
from ..ir import Captured, Partitioned
from ..memory import Memory, peak
from ..progress import stage
from . import annotate, bucket, overlap, pad, partition, propagate, simplify, unmerge


@dataclass(frozen=True)
class Options:
    """How to compile.  ``profile`` prices the plan (with ``overlap``, what may hide behind computation does;
    with ``buckets``, small collectives are joined); ``verify`` re-derives and simulates the result.

    ``memory`` bounds what a device holds.
    """

    profile: str | Profile | None = None
    verify: bool = False
    lower: str = "inductor"  # or "eager"
    memory: Memory | None = None
    overlap: bool = False
    buckets: bool = False

    def prices(self) -> Profile:
        found = profile_of(self.profile)
        overlap, buckets = self.overlap or found.overlap, self.buckets or found.buckets
        return dataclasses.replace(found, overlap=overlap, buckets=buckets)


def run(captured: Captured, options: Options = Options()) -> Partitioned:
    """Partition a captured graph.

    Raises `SpmdError` where a placement of the user's cannot be met.
    """
    local = (_of_data if captured.data else _of_sizes)(captured, options)
    if options.verify:
        from ..verify import verify

        verify(local)
    return local


def _of_sizes(captured: Captured, options: Options) -> Partitioned:
    return plan(prepared(captured), options.prices(), options.memory)


def _of_data(captured: Captured, options: Options) -> Partitioned:
    """Partition a graph in which data decide sizes: planned at their hints, its integers are expressions of them."""
    samples = data_samples(captured)
    whole = common_global(samples, [prepared(member(captured, s)) for s in samples.sizes()])
    return plan(dataclasses.replace(whole, data=captured.data), options.prices(), options.memory)


def prepared(captured: Captured) -> Captured:
    """A captured graph and its bodies, ready for the solver."""
    stage(f"preparing {len(captured.graph.graph.nodes)} nodes")
    found = pad.run(unmerge.run(annotate.run(captured)))
    found = with_bodies(found, lambda body: prepared(body_of(body, captured.mesh)).graph)
    drop_unread(found.graph)
    return found


def plan(annotated: Captured, profile: Profile, memory: Memory | None = None) -> Partitioned:
    """Partition a graph that is annotated already."""
    if not annotated.data:
        return _written(annotated, _plan(annotated, profile, memory), profile)
    profile = dataclasses.replace(profile, buckets=False)
    samples = data_samples(annotated)
    members = [member(annotated, s) for s in samples.sizes()]
    chosen = _plan(members[0], profile, memory)
    decisions = propagate.decided(chosen)
    plans = [chosen, *(propagate.decide(m, decisions, m.mesh, profile) for m in members[1:])]
    local = common(samples, [_written(m, p, profile) for m, p in zip(members, plans, strict=True)])
    return dataclasses.replace(local, captured=annotated)


def _written(annotated: Captured, plan: propagate.Plan, profile: Profile, alike: bool = False) -> Partitioned:
    """The local graph of a plan; ``alike``: what is right at some sizes alone, what to join and what hides, is left."""
    stage("writing the local graph")
    orders = dataclasses.replace(profile, buckets=False, overlap=False) if alike else profile
    written = simplify.run(partition.run(annotated, plan, annotated.mesh, profile))
    return overlap.run(bucket.run(written, orders), orders)


def _plan(annotated: Captured, profile: Profile, memory: Memory | None) -> propagate.Plan:
    def holds(plan: propagate.Plan) -> tuple[dict[str, int], int]:
        return peak(_written(annotated, plan, profile), memory.states if memory is not None else 0.0)

    return propagate.run(annotated, annotated.mesh, profile, memory, holds)


# --- dynamic dims -----------------------------------------------------------------------------------------------


def run_family(captured: Captured, options: Options = Options()) -> tuple[Partitioned, Family]:
    """Plan a graph with dynamic dims at the sizes of the example, and for all sizes that its guards allow.

    Returns the example's local graph, and the family.
    """
    dims = captured.dims
    assert dims is not None
    profile = options.prices()
    annotated = prepared(member(captured, dims.hints))
    chosen = _plan(annotated, profile, options.memory)
    local = _written(annotated, chosen, profile, alike=True)
    decisions = propagate.decided(chosen)
    samples = Samples(dims, pieces_of(local), expressions(captured))
    members = [local, *(at(captured, decisions, sizes, profile) for sizes in samples.sizes()[1:])]
    general = common(samples, members)
    dims = dataclasses.replace(dims, guards=(*even_cuts(general, dims), *dims.guards))
    if options.verify:
        from ..verify import verify

        for each in members:
            verify(each)
    return local, Family(captured, decisions, dims, general)


def at(captured: Captured, decisions: Decisions, sizes: Mapping[str, int], profile: Profile) -> Partitioned:
    """The member of a family at ``sizes``: the family's plan for the graph of those."""
    annotated = prepared(member(captured, sizes))
    return _written(annotated, propagate.decide(annotated, decisions, annotated.mesh, profile), profile, alike=True)
