"""The report as a browser shows it, and the predicted timeline."""

import json
import shutil
import subprocess

import pytest
import torch
from click.testing import CliRunner
from test_diff import SHARDED, plan
from torch.distributed.tensor import Shard

import spmd_compiler as spmd
from spmd_compiler.cli import main
from spmd_compiler.memory import curve
from spmd_compiler.report import report
from spmd_compiler.timeline import COMPUTE, timeline, trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def programs():
    return plan(), plan(SHARDED)


def test_a_page_holds_everything(programs):
    page = report(programs[0])
    head, after = page.partition("<script>")[0], page.partition("<h1>")[2]
    for text in ("src=", "href=", "@import", "url("):  # nothing is fetched
        assert text not in head.replace('href="data:,"', "") + after
    assert "What changed" not in after
    for c in programs[0].collectives:
        assert f">{c.name}<" in after and c.source in after
    for name in ("up", "down"):
        assert f"<b>{name}</b>" in after
    both = report(programs[1], programs[0]).partition("<h1>")[2]
    assert "What changed" in both and "params layers.*.up.weight" in both.replace("&gt;", ">")


def test_names_are_not_markup():
    page = report(spmd.export(lambda x: x + 1, (torch.zeros(2),), mesh={"a": 2}, name="</script><b>"))
    assert "</script><b>" not in page and "&lt;/script&gt;&lt;b&gt;" in page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; Debian's package is 'chromium'")
def test_in_a_browser(programs, tmp_path):
    """Charts are drawn, filters filter, and nothing is said on the console."""
    page = report(programs[1], programs[0])
    acts = """<script>
    const set = (id, value) => { by(id).value = value; by(id).dispatchEvent(new Event("input")); };
    const shown = rows => [...rows].filter(r => !r.hidden).length;
    const said = [by("count").textContent];
    set("axis", "dp"); said.push(shown(by("collectives").tBodies[0].rows));
    set("phase", "backward"); said.push(by("count").textContent);
    set("find", "no such thing"); said.push(by("count").textContent);
    by("only").checked = true; by("only").dispatchEvent(new Event("input")); said.push(shown(by("graph").children));
    set("part", by("part").options[1].value); said.push(shown(by("graph").children));
    for (const id of ["axes", "sources", "timeline", "memory"]) said.push(document.querySelectorAll(`#${id} .trace, #${id} .bars`).length > 0);
    for (const id of ["axes", "sources", "timeline", "memory"]) said.push(document.querySelector(`#${id} .xtitle`)?.textContent);
    document.title = JSON.stringify(said);
    </script></body>"""
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", acts))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000",
         f"--user-data-dir={tmp_path}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    said = json.loads(done.stdout.partition("<title>")[2].partition("</title>")[0])
    new = programs[1]
    back = [c for c in new.collectives if c.axis == "dp" and c.phase == "backward"]
    assert said[0].startswith(f"{len(new.collectives)} collectives, ")
    assert said[1] == sum(c.axis == "dp" for c in new.collectives)
    assert said[2].startswith(f"{len(back)} collectives, ")
    assert said[3] == "0 collectives, 0 B"
    assert said[4] == len(new.collectives)
    assert said[5] < said[4]
    assert said[6:10] == [True] * 4
    assert said[10:] == ["MiB a device", "MiB a device", "ms", "node"]


def test_the_timeline_is_what_the_program_costs(programs):
    for program in programs:
        events = timeline(program.local)
        end = max(e.start + e.seconds for e in events)
        total = sum(e.seconds for e in events)
        assert max(sum(e.seconds for e in events if e.stream == s) for s in {e.stream for e in events}) <= end <= total
        sent = [e for e in events if e.stream != COMPUTE]
        profile = program.local.profile
        want = [profile.collective(program.mesh, c.kind, tuple(c.axis.split("/")), c.bytes) for c in program.collectives]
        assert [e.seconds for e in sent] == pytest.approx(want)
        assert [e.name for e in sent] == [c.name for c in program.collectives]
        starts = {e.name: e.start for e in events}
        ends = {e.name: e.start + e.seconds for e in events}
        for node in program.local.graph.graph.nodes:  # nothing starts before what it needs
            for used in node.all_input_nodes:
                if node.name in starts and used.name in ends:
                    assert starts[node.name] >= ends[used.name] - 1e-12


def test_products_take_the_time_of_their_flops():
    x = torch.zeros(2048, 2048)
    program = spmd.export(torch.mm, (x, x), mesh={"a": 2}, placements={"args.0": {"a": Shard(0)}}, profile="h100")
    profile = spmd.PROFILES["h100"]
    (event,) = timeline(program.local)
    assert event.seconds == pytest.approx(2 * 1024 * 2048 * 2048 / profile.matmul[4] + profile.launch)
    assert event.seconds == pytest.approx(program.price, rel=1e-3)


def test_memory_over_the_step_peaks_where_it_is_said_to(programs):
    for program in programs:
        assert max(curve(program.local)) == program.memory["activations"]
        assert len(curve(program.local)) == len(program.local.graph.graph.nodes)


def test_the_command_writes_a_page_and_a_trace(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, program in zip(("old.spmd", "new.spmd"), programs, strict=True):
        program.save(name)
    args = ["report", "new.spmd", "--against", "old.spmd", "-o", "report.html", "--trace", "trace.json"]
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert (tmp_path / "report.html").read_text() == report(spmd.load("new.spmd"), spmd.load("old.spmd"))
    events = json.loads((tmp_path / "trace.json").read_text())
    assert events == trace(timeline(programs[1].local), "net")
    spans = [e for e in events["traceEvents"] if e["ph"] == "X"]
    assert spans and all(e["dur"] > 0 and e["ts"] >= 0 and e["tid"] >= 1 for e in spans)
    (tmp_path / "text").write_text(programs[0].text())
    found = CliRunner().invoke(main, ["report", "text", "-o", "x.html"])
    assert found.exit_code == 3 and "not texts" in found.output and not (tmp_path / "x.html").exists()
