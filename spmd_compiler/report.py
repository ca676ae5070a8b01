"""One self-contained page of a program: placements, communication, a predicted timeline, memory, the text; or of two.

Charts are plotly's, whose code the page carries: it needs no network.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from .diff import diff
from .memory import curve
from .placements import SpmdError
from .program import Program
from .reader import parse
from .text import COLLECTIVES, Text, Type, readable, type_text
from .timeline import COMPUTE, timeline

MOST = 4000  # bars of a chart; the longest are kept
SOURCES = 25
COLOURS = dict(zip(COLLECTIVES, ("#dc2626", "#2563eb", "#7c3aed", "#d97706", "#059669"), strict=True))


def report(program: Program, old: Program | None = None) -> str:
    """The page as HTML; with ``old``, what changed since.  Raises `SpmdError` where plotly or jinja2 is missing."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise SpmdError(f"a report needs {error.name}: pip install 'spmd-compiler[report]'") from None
    text = parse(program.text())
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((Path(__file__).parent / "report.html").read_text())
    parts = dict.fromkeys(k.source for k in text.lines if k.source)
    return template.render(
        name=text.name, mesh=str(text.mesh), profile=text.profile, plotly=get_plotlyjs(), old=old is not None,
        totals=_totals(program, old), fallback=program.replicated_ops,
        changes=diff(old, program).lines() if old is not None else [], tree=_tree(text),
        axes=list(dict.fromkeys(c.axis for c in program.collectives)), collectives=_collectives(program, text),
        parts=list(parts), charts=_json(_charts(program, old)),
        lines=[{"text": k.text(text.mesh), "collective": bool(k.axis), "part": k.source} for k in text.lines],
    )  # fmt: skip


def _json(value: Any) -> str:
    """JSON that may stand inside a script."""
    return json.dumps(value).replace("<", "\\u003c")


def _totals(program: Program, old: Program | None) -> list[list[str]]:
    """Rows of a table: what, (before,) after."""
    both = [program] if old is None else [old, program]
    rows = [["predicted step"] + [f"{p.price * 1e3:.3f} ms (within {p.gap:.2%} of the cheapest)" for p in both]]
    rows.append(["on the wire"] + [f"{readable(p.wire_bytes)} in {len(p.collectives)} collectives" for p in both])
    return rows + [[kind] + [readable(p.memory[kind]) for p in both] for kind in program.memory]


def _tree(text: Text) -> dict[str, Any]:
    """Parameters and buffers by module; bytes are those of a device."""

    def new(depth: int) -> dict[str, Any]:
        return {"children": {}, "leaves": [], "size": 0, "bytes": "", "depth": depth}

    root = new(0)
    for line in text.lines:
        if line.op in ("param", "buffer") and isinstance(line.type, Type):
            *path, leaf = line.label.split(".")
            place = root
            for depth, part in enumerate(path, 1):
                place["size"] += line.type.local_bytes
                place = place["children"].setdefault(part, new(depth))
            place["size"] += line.type.local_bytes
            place["leaves"].append((leaf, line.op, type_text(line.type), str(line.spec)))
    stack = [root]
    while stack:
        place = stack.pop()
        place["bytes"] = readable(place["size"])
        stack += place["children"].values()
    return root


def _collectives(program: Program, text: Text) -> list[dict[str, Any]]:
    types = {k.name: type_text(k.type) for k in text.collectives}
    return [
        {"name": c.name, "kind": c.kind, "axis": c.axis, "type": types[c.name], "phase": c.phase, "source": c.source,
         "wire": readable(c.wire_bytes), "bytes": c.wire_bytes, "why": c.why}
        for c in sorted(program.collectives, key=lambda c: -c.wire_bytes)
    ]  # fmt: skip


# --- charts -----------------------------------------------------------------------------------------------------


def _charts(program: Program, old: Program | None) -> dict[str, Any]:
    """Plotly figures by the element they stand in."""
    runs = {"": program} if old is None else {"before ": old, "after ": program}
    made = [c for p in runs.values() for c in p.collectives]
    return {
        "axes": _figure(
            [bar for when, p in runs.items() for bar in _by_axis(p, when)], "Wire bytes by axis, phase and kind",
            barmode="stack", xaxis={"title": {"text": "MiB a device"}, "type": "linear"}, height=280,
            margin={"l": 160, "t": 40},
        ),
        "sources": _figure(
            [_by_source(p, when) for when, p in runs.items()], "Wire bytes by source line",
            xaxis={"title": {"text": "MiB a device"}}, height=90 + 22 * min(SOURCES, 1 + len({c.source for c in made})),
            margin={"l": 260, "t": 40}, yaxis={"autorange": "reversed"},
        ),
        "timeline": _figure(
            [bar for when, p in runs.items() for bar in _timeline(p, when)], "Predicted streams of one device",
            barmode="overlay", xaxis={"title": {"text": "ms"}}, height=150 + 90 * len(runs), margin={"l": 160, "t": 40},
        ),
        "memory": _figure(
            [{"type": "scatter", "mode": "lines", "name": f"{when}inputs and values", "line": {"shape": "hv"},
              "y": [n / 2**20 for n in curve(p.local)]} for when, p in runs.items()],
            "Live inputs and values along the schedule", xaxis={"title": {"text": "node"}},
            yaxis={"title": {"text": "MiB a device"}},
            height=320, margin={"t": 40},
        ),
    }  # fmt: skip


def _figure(data: list[dict[str, Any]], title: str, **layout: Any) -> dict[str, Any]:
    return {"data": data, "layout": {"title": {"text": title, "font": {"size": 14}}, **layout}}


def _by_axis(program: Program, when: str) -> list[dict[str, Any]]:
    sent: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for c in program.collectives:
        sent[c.kind][f"{when}{c.axis} {c.phase}"] += c.wire_bytes / 2**20
    return [
        {"type": "bar", "orientation": "h", "name": kind, "legendgroup": kind, "showlegend": when != "before ",
         "marker": {"color": COLOURS[kind]}, "y": list(by), "x": list(by.values())}
        for kind, by in sorted(sent.items())
    ]  # fmt: skip


def _by_source(program: Program, when: str) -> dict[str, Any]:
    sent: collections.Counter[str] = collections.Counter()
    for c in program.collectives:
        sent[c.source or "?"] += c.wire_bytes / 2**20  # type: ignore[assignment]
    most = sent.most_common(SOURCES)
    return {"type": "bar", "orientation": "h", "name": when or "sent", "y": [s for s, _ in most],
            "x": [n for _, n in most]}  # fmt: skip


def _timeline(program: Program, when: str) -> list[dict[str, Any]]:
    events = sorted(timeline(program.local), key=lambda e: -e.seconds)[:MOST]
    bars = []
    for stream, phase in dict.fromkeys((e.stream, e.phase) for e in sorted(events, key=lambda e: e.start)):
        those = [e for e in events if (e.stream, e.phase) == (stream, phase)]
        colour = ("#2563eb" if stream == COMPUTE else "#d97706") + ("" if phase == "forward" else "aa")
        bars.append({
            "type": "bar", "orientation": "h", "name": f"{when}{stream}, {phase}", "marker": {"color": colour},
            "y": [f"{when}{stream}"] * len(those), "base": [e.start * 1e3 for e in those],
            "x": [e.seconds * 1e3 for e in those], "text": [f"{e.what} %{e.name} {e.source}" for e in those],
            "hoverinfo": "text+x", "textposition": "none",
        })  # fmt: skip
    return bars
