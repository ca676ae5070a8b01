"""The compiler's pipeline: captured joint graph in, partitioned local graph out.

    annotate -> unmerge -> pad -> propagate -> partition -> simplify -> bucket -> overlap (then `split` cuts it in two)

Each pass is one module with one public function; passes never import each other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bodies import captured as body_of
from ..bodies import drop_unread, with_bodies
from ..cost import Profile, profile_of
from ..devices import unnumber
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
from ..ir import Captured, Partitioned, copied
from ..memory import Memory, OverBudget, peak
from ..placements import Mesh, SpmdError
from ..progress import stage
from ..remedies import remedies
from ..text import captured_text, program_text
from ..timeline import calls, seconds
from ..words import shown
from . import annotate, bucket, overlap, pad, partition, propagate, simplify, unmerge


@dataclass(frozen=True)
class Options:
    """How to compile.  ``profile`` prices the plan (with ``overlap``, what may hide behind computation does;
    with ``buckets``, small collectives are joined); ``verify`` re-derives and simulates the result.

    ``memory`` bounds what a device holds.  ``dump`` names a folder for the text after each pass, on every rank alike:
    ``NAME/1-annotate.txt``, ``NAME/2-unmerge.txt``... of the first program called NAME in a process, then ``NAME.2``.
    """

    profile: str | os.PathLike[str] | Profile | None = None
    verify: bool = False
    lower: str = "inductor"  # or "eager"
    memory: Memory | None = None
    overlap: bool = False
    buckets: bool = False
    dump: Any = None  # a path

    def __post_init__(self) -> None:
        for name in ("verify", "overlap", "buckets"):
            if not isinstance(given := getattr(self, name), bool):
                raise SpmdError(f"{name} is True or False, not {shown(given)}")

    def prices(self, mesh: Mesh | None = None) -> Profile:
        """The profile to plan with.  Raises `SpmdError` for what is none, and for axes in it that ``mesh`` lacks."""
        found = profile_of(self.profile)
        found = found if mesh is None else found.on(mesh)
        overlap, buckets = self.overlap or found.overlap, self.buckets or found.buckets
        return dataclasses.replace(found, overlap=overlap, buckets=buckets)


PREPARING = {"annotate": annotate.run, "unmerge": unmerge.run, "pad": pad.run}
ORDERING = {"bucket": bucket.run, "overlap": overlap.run}
Dump = Callable[[str, Any], None]  # of a graph after a pass
_named: dict[tuple[str, str], int] = {}  # how many programs of a name were dumped in a folder


def _unseen(name: str, found: Any) -> None:
    """The dump of nothing."""


def _dump(folder: Any, program: str) -> Dump:
    """What writes the texts of a program's graphs, numbered, in a folder of its own within ``folder``."""
    if folder is None:
        return _unseen
    if not isinstance(folder, (str, os.PathLike)):
        raise SpmdError(f"dump is the path of a folder, not {shown(folder)}")
    key = (os.fspath(folder), program)
    _named[key] = count = _named.get(key, 0) + 1
    place = Path(folder) / (program if count == 1 else f"{program}.{count}")
    texts: list[str] = []

    def write(name: str, found: Any) -> None:
        texts.append(program_text(found) if isinstance(found, Partitioned) else captured_text(found))
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{len(texts)}-{name}.txt").write_text(texts[-1], encoding="utf-8")
        except OSError as error:
            raise SpmdError(f"the passes' texts can't be written: {error}") from None

    return write


def run(captured: Captured, options: Options = Options()) -> Partitioned:
    """Partition a captured graph.

    Raises `SpmdError` where a placement of the user's cannot be met.
    """
    dump = _dump(options.dump, captured.name)
    local = (_of_data if captured.data else _of_sizes)(captured, options, dump)
    if options.verify:
        from ..verify import verify

        verify(local)
    return local


def _of_sizes(captured: Captured, options: Options, dump: Dump) -> Partitioned:
    return plan(prepared(captured, dump), options.prices(captured.mesh), options.memory, dump)


def _of_data(captured: Captured, options: Options, dump: Dump) -> Partitioned:
    """Partition a graph in which data decide sizes: planned at their hints, its integers are expressions of them."""
    samples = data_samples(captured)
    members = [member(captured, s) for s in samples.sizes()]
    whole = common_global(samples, [prepared(members[0], dump), *map(prepared, members[1:])])
    return plan(dataclasses.replace(whole, data=captured.data), options.prices(captured.mesh), options.memory, dump)


def prepared(captured: Captured, dump: Dump = _unseen) -> Captured:
    """A captured graph and its bodies, ready for the solver."""
    stage(f"preparing {len(captured.graph.graph.nodes)} nodes")
    found = captured
    for name, prepare in PREPARING.items():
        found = prepare(found)
        dump(name, found)
    found = with_bodies(found, lambda body: prepared(body_of(body, captured.mesh)).graph)
    drop_unread(found.graph)
    return found


def plan(
    annotated: Captured, profile: Profile, memory: Memory | None = None, dump: Dump = _unseen
) -> Partitioned:
    """Partition a graph that is annotated already."""
    if not annotated.data:
        return _written(annotated, _plan(annotated, profile, memory), profile, dump=dump)
    samples = data_samples(annotated)
    members = [member(annotated, s) for s in samples.sizes()]
    chosen = _plan(members[0], profile, memory)
    decisions = propagate.decided(chosen)
    plans = [chosen, *(propagate.decide(m, decisions, m.mesh, profile) for m in members[1:])]
    first = _written(members[0], plans[0], profile, alike=True, dump=dump)
    others = [_written(m, p, profile, alike=True) for m, p in zip(members[1:], plans[1:], strict=True)]
    local = common(samples, [first, *others])
    return dataclasses.replace(local, captured=annotated)


def _written(
    annotated: Captured, plan: propagate.Plan, profile: Profile, alike: bool = False, dump: Dump = _unseen
) -> Partitioned:
    """The local graph of a plan; ``alike``: what is right at some sizes alone, what to join and what hides, is left."""
    stage("writing the local graph")
    orders = dataclasses.replace(profile, buckets=False, overlap=False) if alike else profile
    local = partition.run(annotated, plan, annotated.mesh, profile)
    dump("partition", local)
    local = simplify.run(local)
    dump("simplify", local)
    beside = orders.overlap and orders.buckets
    for name, order in ORDERING.items():
        local = _joined(local, orders) if beside and name == "bucket" else order(local, orders)
        dump(name, local)
    unnumber(local.graph.graph)
    return local


def _joined(local: Partitioned, orders: Profile) -> Partitioned:
    """`bucket` of a program in its order, by which what to join is judged; or that, where its step is as short."""
    bucketed, ordered = ORDERING["bucket"], ORDERING["overlap"]
    apart = ordered(local, orders)
    joined = bucketed(copied(apart), orders)
    steps = [seconds(calls(p)) for p in (apart, ordered(copied(joined), orders))]
    return joined if steps[1] < steps[0] else apart


def _plan(annotated: Captured, profile: Profile, memory: Memory | None) -> propagate.Plan:
    states = memory.states if memory is not None else 0.0
    smallest: list[tuple[dict[str, int], Partitioned]] = []  # the only one, if any

    def holds(plan: propagate.Plan) -> tuple[dict[str, int], int]:
        local = _written(annotated, plan, profile)
        found, top = peak(local, states)
        if not smallest or sum(found.values()) < sum(smallest[0][0].values()):
            smallest[:] = [(found, local)]
        return found, top

    def takes(plan: propagate.Plan) -> float:
        return seconds(calls(_written(annotated, plan, profile)))

    in_order = takes if profile.overlap else None
    try:
        return propagate.run(annotated, annotated.mesh, profile, memory, holds, takes=in_order)
    except OverBudget as error:
        held, local = smallest[0]
        raise OverBudget(error.budget, held, error.least, remedies(local, held, states)) from None


# --- dynamic dims -----------------------------------------------------------------------------------------------


def run_family(captured: Captured, options: Options = Options()) -> tuple[Partitioned, Family]:
    """Plan a graph with dynamic dims at the sizes of the example, and for all sizes that its guards allow.

    Returns the example's local graph, and the family.
    """
    dims = captured.dims
    assert dims is not None
    profile = options.prices(captured.mesh)
    dump = _dump(options.dump, captured.name)
    annotated = prepared(member(captured, dims.hints), dump)
    chosen = _plan(annotated, profile, options.memory)
    local = _written(annotated, chosen, profile, alike=True, dump=dump)
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
