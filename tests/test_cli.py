"""The command line, as a user types it."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import spmd_compiler as spmd
from spmd_compiler import progress
from spmd_compiler.cli import main

SOURCE = '''
import torch
from torch import nn
from torch._higher_order_ops.scan import scan


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def tuple_of():
    with torch.device("meta"):
        return net(), (torch.empty(8, 16),)


def dict_of():
    with torch.device("meta"):
        return dict(model_or_fn=net(), args=(torch.empty(8, 16),), mesh={"a": 2})


def neither():
    return 3


def fails():
    raise RuntimeError("no such dataset")


def does_not_fit():
    with torch.device("meta"):
        return net(), (torch.empty(8, 17),)


def takes(x):
    return x


def scans():
    def body(carry, x):
        carry = torch.tanh(carry + x)
        return carry, carry.clone()

    return lambda init, xs: scan(body, init, xs), (torch.randn(4), torch.randn(3, 4))


def other_keys():
    return dict(model_or_fn=net(), args=(), meshes=3)
'''


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("\ndef net(:\n")
    (tmp_path / "tp.toml").write_text("""['0.*']\ntp = "S(0)"\n['2.weight']\ntp = "S(1)"\n""")
    (tmp_path / "mine.toml").write_text("""base = "a100"\nnode_size = 4\n[inter]\nalpha = 1e-5\nbandwidth = 5e9\n""")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, args)


def without_lines(text):
    """A program's text without its comments: `expected` is planned from another line."""
    return [line.partition("  #")[0].rstrip() for line in text.splitlines()]


def test_plan(run):
    found = run("plan", "job.py:tuple_of", "--mesh", "dp=2,tp=4", "--placements", "tp.toml", "--profile", "h100")
    assert found.exit_code == 0, found.output
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    expected = spmd.export(
        net, (torch.empty(8, 16),), mesh={"dp": 2, "tp": 4}, profile="h100",
        placements={"0.*": {"tp": spmd.Shard(0)}, "2.weight": {"tp": spmd.Shard(1)}},
    )  # fmt: skip
    assert without_lines(found.output) == without_lines(expected.text())
    found = run("plan", "job.py:tuple_of", "--mesh", "dp=2,tp=4", "--placements", "tp.toml", "--level", "collectives")
    assert all(c.why in found.output for c in expected.collectives) and expected.collectives
    assert "0.00%" in found.output


def test_dicts_and_profiles(run):
    given = ("--profile", "mine.toml", "--level", "summary", "--dump", "passes")
    found = run("plan", "job.py:dict_of", "--mesh", "dp=8", *given)
    assert len(list(Path("passes/Sequential").iterdir())) == 7
    assert found.exit_code == 0 and "mesh(dp=8)" in found.output  # the option, not the dict's own mesh


def test_what_dynamo_traces(run):
    """It looks names of the file's functions up in their module."""
    found = run("plan", "job.py:scans", "--mesh", "tp=2")
    assert found.exit_code == 0 and "scan(" in found.output, found.output


def test_saved_programs_are_shown_explained_and_compared(run):
    given = ("plan", "job.py:tuple_of", "--placements", "tp.toml", "--mesh")
    text = run(*given, "tp=4", "--save", "a.spmd").output
    run(*given, "tp=8", "--save", "b.spmd")
    assert run("show", "a.spmd").output == text
    Path("a.txt").write_text(text)
    for file in ("a.spmd", "a.txt"):
        assert run("show", file).output == text
        assert "level collectives" in run("show", file, "--level", "collectives").output
        assert run("show", file, "--level", "summary").output.startswith(text[:20])
    (c,) = spmd.load("a.spmd").collectives
    assert run("explain", "a.spmd").output.startswith(f"%{c.name} = {c.kind}[tp]")
    assert run("explain", "a.spmd", c.name).output == f"{spmd.explain(spmd.load('a.spmd'), c)}\n"
    found = run("explain", "a.spmd", "mm")
    assert found.exit_code == 3 and "no collective 'mm'" in found.output
    assert run("diff", "a.spmd", "a.txt").exit_code == 0
    found = run("diff", "a.spmd", "a.txt", "--forbid", "all_gather[pt]")
    assert found.exit_code == 3 and "no axis 'pt'; its axes are tp" in found.output
    assert "mesh(tp=4) -> mesh(tp=8)" in run("diff", "a.txt", "b.spmd").output
    Path("c.spmd").write_bytes(Path("a.spmd").read_bytes()[:500])
    Path("bytes").write_bytes(b"\xff\xfe")
    for file, words in (("c.spmd", "is damaged"), ("bytes", "neither a saved program nor the text of one")):
        found = run("show", file)
        assert found.exit_code == 3 and words in found.output and "Traceback" not in found.output
        assert words in run("explain", file).output
        assert run("diff", file, "a.txt").exit_code == 3
    assert "takes programs that `spmd-compiler plan --save` wrote" in run("report", "a.txt", "-o", "r.html").output
    run("plan", "job.py:tuple_of", "--mesh", "tp=4", "--save", "none.spmd")
    assert run("explain", "none.spmd").output == "the program has no collectives\n"


def test_a_configuration_of_transformers(run):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    Path("config.json").write_text(json.dumps(sizes | {"model_type": "llama", "num_key_value_heads": 2}))
    Path("dp.toml").write_text('ids = "{dp: S(0)}"\n"*.mlp.*.weight" = "{dp: S(0)}"\n')
    given = ("--config", "config.json", "--mesh", "dp=4", "--batch", "4", "--length", "16", "--placements", "dp.toml")
    found = run("plan", "hf:llama", *given, "--level", "collectives")
    assert found.exit_code == 0, found.output
    assert '"model.layers.0.mlp.up_proj.weight"' in found.output and "bf16[64, 32 | 16, 32]" in found.output
    assert "i64[4, 16 | 1, 16]" in found.output and 'grad "lm_head.weight"' in found.output
    found = run("plan", "hf:gpt2", *given)
    assert found.exit_code == 3 and "no configuration of 'gpt2'" in found.output
    assert "hf:nothing" in run("plan", "hf:nothing", "--mesh", "dp=4").output


def test_texts_are_shown_and_explained(run):
    given = ("plan", "job.py:tuple_of", "--mesh", "tp=4", "--placements", "tp.toml", "--profile", "h100")
    for level in ("full", "collectives", "summary"):
        text = run(*given, "--level", level).output
        Path(f"{level}.txt").write_text(text)
        assert run("show", f"{level}.txt", "--level", level).output == text
    assert run("show", "full.txt", "--level", "collectives").output in Path("collectives.txt").read_text()
    assert run("show", "full.txt", "--level", "summary").output in Path("summary.txt").read_text()
    found = run("show", "collectives.txt")
    assert found.exit_code == 3 and "is of level collectives, which does not hold what level full shows" in found.output
    (line,) = run("explain", "full.txt").output.splitlines()
    name = line.partition(" = ")[0].removeprefix("%")
    found = run("explain", "full.txt", name).output.splitlines()
    assert found[0] == line and "on the wire" in line and " at 2, forward" in line
    assert any(k.startswith("  made  {tp: P(sum)} by %mm_1 = aten.mm(") and k.endswith(" at 2") for k in found)
    assert any(k.startswith("  for   ") for k in found) and "plan with --save" in found[-1]
    found = run("explain", "full.txt", "nothing")
    assert found.exit_code == 3 and f"the text has no collective 'nothing'; it has {name}" in found.output


def test_sources_are_the_users(run):
    """Modules that only torch's own call have no line of the user's: they go by their path."""
    for line in run("plan", "job.py:tuple_of", "--mesh", "tp=2").output.splitlines():
        if line.startswith("%") and " = aten." in line:
            assert line.rpartition("# ")[2] in ("0", "1", "2"), line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals_alone(run):
    found = run("plan", "job.py:tuple_of", "--mesh", "tp=2")
    assert found.stderr == ""
    terminal, stages = Terminal(), []
    with progress.shown(terminal, every=0.01):
        progress.stage("tracing the program")
        time.sleep(0.05)
    rows = terminal.getvalue().split("\r\x1b[K")
    assert len(rows) > 3 and rows[1].endswith("s  tracing the program") and rows[-1] == ""
    with progress.watched(stages.append):
        spmd.export(lambda x: x * 2, (torch.ones(4),), mesh={"a": 2})
    assert stages[0] == "tracing the program" and "choosing placements: 3 nodes on mesh(a=2)" in stages
    progress.stage("nobody listens")


def test_contracts(run):
    given = ("plan", "job.py:tuple_of", "--mesh", "tp=4", "--placements", "tp.toml", "--level", "summary")
    assert run(*given, "--forbid", "permute", "--max-wire", "1GiB", "--expect", "all_to_all=0").exit_code == 0
    for option, words in (
        (("--forbid", "*[tp]"), "*[tp] is forbidden, and there is 1"),
        (("--expect", "all_gather[tp]=7"), "7 all_gather[tp] are expected"),
        (("--max-memory", "1KB"), "1000 B are allowed"),
    ):
        found = run(*given, *option)
        assert found.exit_code == 2 and words in found.output and "Traceback" not in found.output, found.output


@pytest.mark.parametrize(
    "args, words",
    [
        (("job.py:nothing", "--mesh", "a=2"), "there are net, tuple_of, dict_of, neither"),
        (("jobs.py:net", "--mesh", "a=2"), "no file jobs.py"),
        (("job.py", "--mesh", "a=2"), "FILE.py:FUNCTION"),
        (("job.py:tuple_of", "--mesh", "a"), "AXIS=SIZE"),
        (("job.py:tuple_of", "--mesh", "a=0"), "positive"),
        (("job.py:tuple_of", "--mesh", "a=2,a=2"), "twice"),
        (("job.py:tuple_of", "--mesh", "a=2", "--profile", "h900"), "unknown profile"),
        (("job.py:tuple_of", "--mesh", "a=2", "--profile", "tp.toml"), "a profile has no"),
        (("job.py:tuple_of", "--mesh", "a=2", "--placements", "tp.toml"), "no axis 'tp'"),
        (("job.py:tuple_of", "--mesh", "a=2", "--backward"), "scalar loss"),
        (("job.py:neither", "--mesh", "a=2"), "int"),
        (("job.py:fails", "--mesh", "a=2"), "job.py:26, in fails: RuntimeError: no such dataset"),
        (("job.py:does_not_fit", "--mesh", "a=2"), "Error: module '0': torch raises RuntimeError where it traces this: a and b must"),
        (("broken.py:net", "--mesh", "a=2"), "broken.py:2: SyntaxError: "),
        (("hf:vit", "--mesh", "a=2"), "for this kind of AutoModel: AutoModelForCausalLM."),
        (("job.py:takes", "--mesh", "a=2"), "called without arguments: missing a required argument: 'x'"),
        (("job.py:other_keys", "--mesh", "a=2"), "the dict has 'meshes', which export does not take; did you mean 'mesh'"),
        (("job.py:tuple_of", "--mesh", "a=2", "--batch", "4"), "--batch: is of hf:KIND"),
        (("job.py:tuple_of", "--mesh", "a=2", "--max-wire", ""), "'' is no number of bytes"),
        (("job.py:tuple_of", "--mesh", "a=2", "--config", "tp.toml"), "--config: is of hf:KIND"),
        (("job.py:tuple_of", "--mesh", "a=2", "--save", "no/folder/x"), "there is no folder"),
        (("job.py:tuple_of", "--mesh", "a=2", "--placements", "bytes.toml"), "bytes.toml: "),
        (("hf:lama", "--mesh", "a=2"), "did you mean llama"),
        (("hf:gpt2", "--mesh", "a=2", "--length", "1025"), "hf:gpt2: 1025 tokens a sequence, and the model has max_position_embeddings=1024"),
        (("hf:llama", "--mesh", "a=2", "--batch", "0"), "--batch"),
        (("job.py:tuple_of", "--mesh", "a=2", "--expect", "all_gather"), "KIND[AXIS]=N"),
    ],
)
def test_errors_have_no_traceback(run, args, words):
    found = run("plan", *args)
    assert found.exit_code == 3 and words in found.output.replace("\n", " "), found.output
    assert "Traceback" not in found.output and isinstance(found.exception, SystemExit)


def test_bad_input_is_3_for_every_command(run):
    """As 2 is a broken contract or limit, for a job of CI that reads no words."""
    for line in ("", "pla", "plan", "plan x.py:f --mush a=2", "show no.txt", "explain", "report -o"):
        assert run(*line.split()).exit_code == 3, line


def test_as_a_module_and_into_a_closed_pipe(run, monkeypatch):
    text = run("plan", "job.py:tuple_of", "--mesh", "tp=4").output
    Path("long.txt").write_text(text + "# more\n" * 100_000)
    command = [sys.executable, "-m", "spmd_compiler", "show", "long.txt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stdout.readline() == text.splitlines(keepends=True)[0]
        shown.stdout.close()
        assert shown.stderr.read() == ""


def test_an_error_of_ours_is_no_verdict(run, monkeypatch):
    """Exit code 1 says that programs differ."""
    Path("a.txt").write_text(run("plan", "job.py:tuple_of", "--mesh", "tp=4").output)
    monkeypatch.setattr("spmd_compiler.cli.compare", lambda old, new: 1 / 0)
    found = run("diff", "a.txt", "a.txt")
    assert found.exit_code == 3 and "ZeroDivisionError" in found.output
