"""AOTInductor packages: one file for all ranks, on real processes."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import spmd_compiler as spmd


class Tower(torch.nn.Module):
    """Rows of a table and columns of a product on other ranks; a cut whose offset is the rank's."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, ids):
        x = self.table(ids)
        return (x + self.down(torch.nn.functional.silu(self.up(x)))).softmax(-1), torch.arange(8) + ids.sum(1)


MEGATRON = {"table.weight": {"tp": Shard(0)}, "up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
PLACED = {"ids": {"dp": Shard(0)}, "out.0": {"dp": Shard(0), "tp": Shard(2)}, "out.1": {"tp": Shard(0)}}


def program_of(model, **more):
    ids = torch.arange(32).reshape(8, 4) * 5 % 32
    return spmd.export(model, (ids,), mesh={"dp": 2, "tp": 2}, placements=MEGATRON | PLACED, **more), ids


def on_a_rank(path, package, state):
    program = spmd.load(path).use(state)
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _, ids = program_of(Tower())
    run = program.compile(mesh, aot=package)
    found = [[x.full_tensor() for x in run(ids)] for ids in (ids, ids.flip(0))]
    with pytest.raises(spmd.SpmdError, match="package of another program"):
        spmd.export(lambda x: x * 2, (ids,), mesh={"dp": 2, "tp": 2}).compile(mesh, aot=package)
    return found


def test_one_package_serves_every_rank(gloo4, tmp_path):
    model = Tower()
    program, ids = program_of(model)
    assert any(s.name.startswith("c_") for n in program.local.graph.graph.nodes for s in spmd_symbols(n))
    program.save(tmp_path / "p.spmd")
    program.package(tmp_path / "p.pt2")  # no process group here
    written = (tmp_path / "p.pt2").stat().st_mtime_ns
    for found in gloo4(on_a_rank, str(tmp_path / "p.spmd"), str(tmp_path / "p.pt2"), model.state_dict()):
        for given, got in zip((ids, ids.flip(0)), found, strict=True):
            torch.testing.assert_close(got, list(model(given)))
    assert (tmp_path / "p.pt2").stat().st_mtime_ns == written


def spmd_symbols(node):
    from spmd_compiler.symbolic import symbols_in

    return symbols_in([list(node.args), dict(node.kwargs)])


KINDS = {  # two collectives of each kind that take an input as it is and return what they received
    "all_gather": ({"t": Shard(0)}, {"t": Replicate()}),
    "all_to_all": ({"t": Shard(0)}, {"t": Shard(1)}),
    "all_reduce": ({"t": Partial()}, {"t": Replicate()}),
    "reduce_scatter": ({"t": Partial()}, {"t": Shard(0)}),
}


def kind_of(placed, out):
    placements = {"x": placed, "y": placed, "out.*": out}
    example = torch.ones(8, 12), torch.ones(4, 4, 3)
    return spmd.export(lambda x, y: (x * 1, y * 1), example, mesh={"t": 4}, placements=placements, profile="bytes")


def many_calls(folder):
    """A package holds the interpreter's lock: no thread of gloo's may wait for it (most runs hung within 300)."""
    mesh, found = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("t",)), {}
    for name, placed in KINDS.items():
        run = kind_of(*placed).compile(mesh, aot=f"{folder}/{name}.pt2")
        given = [torch.arange(96.0).reshape(8, 12), torch.arange(48.0).reshape(4, 4, 3)]
        if name in ("all_reduce", "reduce_scatter"):
            given = [DTensor.from_local(x / 4, mesh, [Partial()]) for x in given]
        for _ in range(300):
            found[name] = [x.full_tensor() if isinstance(x, DTensor) else x for x in run(*given)]
    return found


def test_many_calls_of_packages_on_real_ranks(gloo4, tmp_path):
    for name, placed in KINDS.items():
        assert name in [c.kind for c in kind_of(*placed).collectives], name
    for found in gloo4(many_calls, str(tmp_path)):
        for name, (x, y) in found.items():
            assert torch.equal(x, torch.arange(96.0).reshape(8, 12)), name
            assert torch.equal(y, torch.arange(48.0).reshape(4, 4, 3)), name


@pytest.mark.parametrize(
    ("placements", "f", "words"),
    [
        ({"x": {"t": Shard(0)}}, lambda x: x * 2, r"x \(\): {t: S\(0\)} cuts \(7, 8\) unevenly"),
        ({"x": {"t": Shard(1)}}, lambda x: x + x.roll(1, 1), "what each rank sends to whom depends on its place"),
        ({"x": {"t": Shard(1)}, "out": {"t": Shard(1)}}, lambda x: torch.rand_like(x), "takes no tensor for the number"),
    ],
    ids=["uneven", "halo", "draw"],
)  # fmt: skip
def test_what_has_no_package(placements, f, words, tmp_path):
    program = spmd.export(f, (torch.ones(7, 8),), mesh={"t": 4}, placements=placements)
    with pytest.raises(spmd.SpmdError, match=f"(?s){words}.*; compile it on each rank"):
        program.package(tmp_path / "p.pt2")
    assert not list(tmp_path.iterdir())


def test_training_has_no_package(tmp_path):
    program = spmd.export(lambda x: x.sum(), (torch.ones(8, requires_grad=True),), mesh={"t": 2}, backward=True)
    with pytest.raises(spmd.SpmdError, match="for inference: export the program with backward=False"):
        program.package(tmp_path / "p.pt2")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_mesh": "foo"}, "compile takes a torch DeviceMesh, not 'foo'; init_device_mesh makes one"),
        ({"device_mesh": {"t": 2}}, "compile takes a torch DeviceMesh, not {'t': 2}"),
        ({}, r"the program is for mesh\(t=2\): compile takes the DeviceMesh of its ranks"),
        ({"lower": "foo"}, "lower='foo': use 'inductor' or 'eager'"),
        ({"aot": 3}, "aot is True, False or the path of a package, not 3"),
        ({"aot": True, "lower": "eager"}, "graph as it is; give one"),
    ],
)
def test_wrong_arguments_of_compile(given, words):
    size = 2 if "device_mesh" in given or not given else 1
    program = spmd.export(lambda x: x * 2, (torch.ones(4),), mesh={"t": size})
    with pytest.raises(spmd.SpmdError, match=words):
        program.compile(**given)
