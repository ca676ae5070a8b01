"""Programs saved and loaded: the same text, the same numbers, without the model's source."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import test_llama
import test_text
import torch
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd


@pytest.mark.parametrize("name", test_text.PROGRAMS)
def test_programs_are_the_same_once_loaded(name, tmp_path):
    program = test_text.PROGRAMS[name]()
    program.save(tmp_path / "p.spmd")
    loaded = spmd.load(tmp_path / "p.spmd")
    assert loaded.text() == program.text()
    assert loaded.collectives == program.collectives and loaded.memory == program.memory
    assert (loaded.price, loaded.gap, loaded.replicated_ops) == (program.price, program.gap, program.replicated_ops)
    assert spmd.diff(program, loaded).same and loaded.placements == program.placements
    loaded.verify()  # specs derived anew, ranks against the global graph
    loaded.save(tmp_path / "q.spmd")
    assert (tmp_path / "p.spmd").read_bytes() == (tmp_path / "q.spmd").read_bytes()
    for c in program.collectives[:1] if name != "llama" else ():
        assert spmd.explain(loaded, c.name) == spmd.explain(program, c.name)


MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 12)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale=2.0, more=None):
        y = self.down(self.drop(self.norm(self.up(x)).relu())) * scale
        return (y - more["bias"]).square().mean(), {"y": y, "n": (3, None)}
"""
PLACES = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "x": {"dp": Shard(0)}}
READ = """
import sys, torch, spmd_compiler as spmd
assert "net" not in sys.modules
torch.set_num_threads(1)  # sums are ordered as here
program, (x, more, seed) = spmd.load("p.spmd"), torch.load("given.pt")
torch.manual_seed(seed)
found = program.simulate(x, more=more)
torch.save((found, program.simulate_mutations(x, more=more)), "found.pt")
"""


def test_a_fresh_process_without_the_source(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    import net

    torch.manual_seed(0)
    model, x, more = net.Net(), torch.randn(10, 12), {"bias": torch.randn(12)}
    program = spmd.export(
        model, (x,), {"more": more}, mesh={"dp": 4, "tp": 2}, placements=PLACES, backward=True, verify=True
    )
    program.save(tmp_path / "p.spmd", weights=True)
    torch.save((x, more, 7), tmp_path / "given.pt")
    torch.manual_seed(7)
    want = program.simulate(x, more=more), program.simulate_mutations(x, more=more)
    (tmp_path / "net.py").unlink()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    (loss, out), grads = got[0]
    assert out["n"] == (3, None) and set(grads) == {n for n, _ in model.named_parameters()} and loss.dim() == 0
    assert set(got[1]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


SMALL = dataclasses.replace(test_llama.SMALL, layers=1)


def step(program, x):
    mesh = spmd.init_device_mesh("cpu", tuple(program.mesh.shape), mesh_dim_names=program.mesh.axes)
    torch.manual_seed(3)
    loss, grads = program.compile(mesh, lower="eager")(x, x)
    return loss, {n: g.full_tensor() for n, g in grads.items()}


def saved_and_loaded(path, state):
    """On one rank: a step of the model's program, of the loaded one, and of the loaded one given DTensors."""
    model = test_llama.Llama(SMALL)
    model.load_state_dict(state)
    ids = torch.arange(6 * 16).reshape(6, 16) % SMALL.vocab
    given = dict(mesh={"dp": 2, "tp": 2}, placements=test_llama.FSDP_TP, backward=True)
    want = step(spmd.export(model, (ids, ids), **given), ids)
    loaded = spmd.load(path)
    with pytest.raises(spmd.SpmdError, match=r"is not given; program\.use"):
        step(loaded, ids)
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dtensors = {n: spmd.distribute_tensor(w, mesh, [spmd.Replicate(), Shard(0)]) for n, w in state.items()}
    for weights in (state, dtensors):
        torch.testing.assert_close(step(loaded.use(weights), ids), want, rtol=0, atol=0)
    return float(want[0].full_tensor() if hasattr(want[0], "full_tensor") else want[0])


def test_a_loaded_program_runs_on_real_ranks(gloo4, tmp_path):
    model, ids = test_llama.Llama(SMALL), torch.zeros(6, 16, dtype=torch.int64)
    program = spmd.export(
        model, (ids, ids), mesh={"dp": 2, "tp": 2}, placements=test_llama.FSDP_TP, backward=True
    )
    program.save(tmp_path / "p.spmd")
    losses = gloo4(saved_and_loaded, str(tmp_path / "p.spmd"), model.state_dict())
    assert len(set(losses)) == 1
    ids = torch.arange(6 * 16).reshape(6, 16) % SMALL.vocab
    assert losses[0] == pytest.approx(float(model(ids, ids)), rel=1e-5)


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    a: torch.Tensor
    b: torch.Tensor


torch.export.register_dataclass(Result)


def test_structures_of_results(tmp_path):
    def f(x, other=(1, "two")):
        return Pair([x + 1, 5], {"k": x * 2, 7: (None, x[0])}), Result(x, -x)

    x = torch.arange(8.0)
    program = spmd.export(f, (x,), mesh={"a": 2}, placements={"x": {"a": Shard(0)}})
    program.save(tmp_path / "p")
    got, want = spmd.load(tmp_path / "p").simulate(x), program.simulate(x)
    assert type(got[0]).__name__ == "Pair" and got[0]._fields == ("first", "second")
    torch.testing.assert_close(tuple(got[0]), tuple(want[0]))
    torch.testing.assert_close(got[1], {"a": x, "b": -x})  # of a class that the loading process need not know
    with pytest.raises(spmd.SpmdError, match="planned for 1"):
        spmd.load(tmp_path / "p").simulate(x, other=(3, "two"))


def test_control_flow_bodies_and_constants(tmp_path):
    table = torch.arange(6.0)

    def f(x):
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)) + table

    x = torch.randn(4, 6)
    program = spmd.export(f, (x,), mesh={"a": 2}, placements={"x": {"a": Shard(0)}})
    program.save(tmp_path / "p")
    loaded = spmd.load(tmp_path / "p")
    assert loaded.text() == program.text()
    torch.testing.assert_close(loaded.simulate(x), f(x))


@torch.library.custom_op("spmd_test_store::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_cannot_be_saved(tmp_path):
    x = torch.zeros(4)
    run = spmd.export(lambda x, f: f(x), (x, torch.sin), mesh={"a": 2})
    with pytest.raises(spmd.SpmdError, match=r"argument 'f' is .* can't be saved; close over it"):
        run.save(tmp_path / "p")
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    program = spmd.export(model, (x,), mesh={"a": 2})
    with pytest.raises(spmd.SpmdError, match="weight 'weight' has no values to save here"):
        program.save(tmp_path / "p", weights=True)
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "p", "there is no folder"), (None, "not None")):
        with pytest.raises(spmd.SpmdError, match=words):
            program.save(path)
    with pytest.raises(spmd.SpmdError, match="'weight' is on meta"):
        program.simulate(x)
    for weights, words in (
        ({"wieght": x}, "no weight 'wieght'; did you mean 'weight'"),
        ({"weight": torch.zeros(4, 5)}, r"weight 'weight' is f32\[4, 5\]; the program was planned for f32\[4, 4\]"),
        ({"weight": torch.zeros(4, 4).double()}, r"is f64\[4, 4\]"),
    ):
        with pytest.raises(spmd.SpmdError, match=words):
            program.use(weights)


def test_what_cannot_be_loaded(tmp_path):
    path = tmp_path / "p.spmd"
    x = torch.zeros(4, 4)
    spmd.export(lambda x: twice(x) @ x, (x,), mesh={"a": 2}).save(path)
    files = {i.filename: zipfile.ZipFile(path).read(i) for i in zipfile.ZipFile(path).infolist()}
    spmd.load(path)

    def changed(**other):
        with zipfile.ZipFile(tmp_path / "q.spmd", "w") as file:
            for name, data in files.items():
                file.writestr(name, other.get(name.partition(".")[0], data))
        return tmp_path / "q.spmd"

    def refused(path, words):
        with pytest.raises(spmd.SpmdError, match=words):
            spmd.load(path)

    manifest = json.loads(files["manifest.json"])
    refused(tmp_path / "none", "there is no file")
    refused(tmp_path, "is a folder")
    refused(3, "not 3")
    refused(changed(manifest=json.dumps(manifest | {"version": 4})), "q.spmd is of version 4, this .* reads up to 3")
    refused(changed(manifest=json.dumps(manifest | {"format": "x"})), "holds no program")
    refused(changed(program=files["program.json"][:-20]), "q.spmd is damaged")
    refused(changed(program=files["program.json"].replace(b"aten::mm", b"aten::nm")), r"\w: there is no operator aten::nm; import")
    refused(changed(program=files["program.json"].replace(b'"price"', b'"prize"')), "damaged.*price")
    refused(changed(tensors=b"x"), "damaged")
    refused(changed(program="[" * 100_000), "damaged.*recursion")
    refused(changed(manifest="[]"), "damaged")
    whole = path.read_bytes()
    (tmp_path / "q.spmd").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "q.spmd", "damaged, or no saved program")
    at = whole.index(files["program.txt"][:10]) if files["program.txt"][:10] in whole else len(whole) // 3
    (tmp_path / "q.spmd").write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    refused(tmp_path / "q.spmd", "damaged")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path, x = tmp_path / "p.spmd", torch.zeros(4, 4)
    spmd.export(lambda x: x @ x, (x,), mesh={"a": 2}).save(path)
    before = path.read_bytes()
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(spmd.SpmdError, match="has no values to save"):
        spmd.export(model, (x.to("meta"),), mesh={"a": 2}).save(path, weights=True)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    program = spmd.export(lambda x: x + x, (x,), mesh={"a": 2})
    program.save(path)
    assert spmd.load(path).text() == program.text() and list(tmp_path.iterdir()) == [path]
    with pytest.raises(spmd.SpmdError, match="can't be written"):
        program.save(Path("/proc/p.spmd"))
