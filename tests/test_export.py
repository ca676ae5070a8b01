"""What an exported program checks of its arguments, and what it refuses rather than get wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import spmd_compiler as spmd

MESH = {"a": 4}
X = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))


def test_inputs_that_share_memory():
    def function(x, y):
        x.add_(1)
        return y * 2

    with pytest.raises(spmd.SpmdError, match="'x' and 'y' share memory"):
        spmd.export(function, (X, X), mesh=MESH)
    program = spmd.export(lambda x, y: x + y, (X, X), mesh=MESH)  # nothing changes: no harm
    torch.testing.assert_close(program.simulate(X, X), X + X)


def test_arguments_are_those_it_was_planned_for():
    program = spmd.export(lambda x, n=3: x * n, (X,), mesh=MESH)
    torch.testing.assert_close(program.simulate(X, 3), X * 3)
    for args, words in (((X, 4), "'n' is 4"), ((X.double(),), "float64"), ((X[:5],), r"\(5, 6\)"), (("x",), "str")):
        with pytest.raises(spmd.SpmdError, match=words):
            program.simulate(*args)


def test_draws_of_each_rank_are_refused():
    with pytest.raises(spmd.SpmdError, match=r"test_export.py:\d+.*poisson"):
        spmd.export(lambda x: torch.poisson(x.abs()), (X,), mesh=MESH)


def test_parameters_of_a_closure_are_refused():
    layer = nn.Linear(6, 6)
    with pytest.raises(spmd.SpmdError, match="export the module"):
        spmd.export(lambda x: layer(x).sum(), (X,), mesh=MESH, backward=True)


def test_verify_takes_outputs_of_any_dtype_and_coarse_steps_inside():
    def autocast(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ w
        return h.float().square().mean()

    spmd.export(
        lambda x: ((x > 0).any(0), x.argmax(1)), (X,), mesh=MESH, placements={"x": {"a": Shard(0)}}, verify=True
    )
    spmd.export(lambda x: x[:1][torch.tensor([0, 0, 0])], (X,), mesh=MESH, verify=True)
    spmd.export(
        autocast, (torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)), mesh={"a": 2, "b": 2},
        placements={"x": {"a": Shard(0), "b": Shard(1)}, "w": {"b": Shard(0)}}, backward=True, verify=True,
    )  # fmt: skip


def test_a_constraint_without_axes_is_replicate():
    program = spmd.export(lambda x: spmd.constrain(x * 2, {}) + 1, (X,), mesh=MESH, placements={"x": {"a": Shard(0)}})
    torch.testing.assert_close(program.simulate(X), X * 2 + 1)
    assert [c.kind for c in program.collectives] == ["all_gather"]


def test_tied_parameters_go_by_any_of_their_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(x) + self.up(x)

    for name in ("up.weight", "down.weight", "down.*"):
        program = spmd.export(Tied(), (X,), mesh=MESH, placements={name: {"a": Shard(0)}})
        assert program.placements["up.weight"]["a"] == Shard(0)
    with pytest.raises(spmd.SpmdError, match=r"'up.weight' and 'down.weight' are one tensor"):
        spmd.export(
            Tied(), (X,), mesh=MESH, placements={"up.weight": {"a": Shard(0)}, "down.weight": {"a": Shard(1)}}
        )


def test_globs_mean_outputs_only_where_they_say_so():
    program = spmd.export(lambda x: (x.sum(0), x * 2), (X,), mesh=MESH, placements={"*": {"a": Shard(1)}})
    assert program.placements["x"]["a"] == Shard(1)  # and out.0, of one dim, was not asked for it
    program = spmd.export(lambda x: (x + 1, x * 2), (X,), mesh=MESH, placements={"out.*": {"a": Shard(0)}})
    assert [program.placements[f"out.{i}"]["a"] for i in range(2)] == [Shard(0)] * 2


@pytest.mark.parametrize(
    ("placements", "dim"), [({"*": "R", "w*": "S(0)"}, None), ({"w*": "S(0)", "*": "R"}, 0), ({"*": "R", "w": "S(1)"}, 1)]
)
def test_names_go_before_globs_and_globs_in_the_order_given(placements, dim):
    given = {k: [spmd.Replicate() if v == "R" else Shard(int(v[2]))] for k, v in placements.items()}
    program = spmd.export(lambda x, w: x * w, (X, X), mesh=MESH, placements=given)
    assert program.placements["w"]["a"] == (spmd.Replicate() if dim is None else Shard(dim))


def test_a_loss_keeps_its_shape_and_buffers_their_values():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.norm(x).square().mean().reshape(1, 1)

    model, same = Counts(), Counts()
    program = spmd.export(model, (X,), mesh=MESH, placements={"x": {"a": Shard(0)}}, backward=True)
    loss, grads = program.simulate(X)
    assert model.norm.num_batches_tracked == 0  # simulation changes nothing
    expected = same(X)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, {n: p.grad for n, p in same.named_parameters()})
    torch.testing.assert_close(program.simulate_mutations(X), dict(same.named_buffers()))


def test_compiled_modules_are_what_they_were_made_from():
    layer = nn.Linear(6, 8)
    program = spmd.export(torch.compile(layer), (X,), mesh=MESH, placements={"weight": {"a": Shard(0)}})
    torch.testing.assert_close(program.simulate(X), layer(X))
    assert program.text().startswith('program "Linear"')


def test_an_exported_program():
    """Planned as the module it was exported from; parameters and buffers keep their names."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    exported = torch.export.export(model, (x,))
    where = {"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "input": {"dp": Shard(0)}}
    program = spmd.export(exported, (x,), mesh={"dp": 2, "tp": 2}, placements=where, profile="bytes", verify=True)
    torch.testing.assert_close(program.simulate(x), model(x))
    direct = spmd.export(model, (x,), mesh={"dp": 2, "tp": 2}, placements=where, profile="bytes")
    assert program.wire_bytes == direct.wire_bytes and program.placements == direct.placements


class Wave(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x.sin())


def test_an_exported_program_keeps_its_source_lines():
    exported = torch.export.export(Wave(), (torch.zeros(4),))
    program = spmd.export(exported, (torch.zeros(4),), mesh={"a": 2})
    direct = spmd.export(Wave(), (torch.zeros(4),), mesh={"a": 2})
    sources = [{line.partition("  # ")[2] for line in p.text().splitlines() if "aten." in line} for p in (program, direct)]
    assert sources[0] == sources[1] and len(sources[0]) == 1 and "test_export.py:" in sources[0].pop()


def test_a_module_with_two_names_is_left_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU())
    model.append(model[0])
    x, before = torch.randn(10, 6), model[0].weight
    program = spmd.export(model, (x,), mesh={"d": 4}, placements={"0.weight": {"d": spmd.Shard(0)}})
    assert model[0].weight is before
    torch.testing.assert_close(program.simulate(x), model(x))
