"""Founding behaviours D: embeddings, on four gloo ranks and in the simulator."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_backend import S0, S1, R, close, compiled, mesh_of, whole
from torch import nn
from torch.distributed.tensor import Partial, Shard, distribute_module, distribute_tensor

from gloo.measure import counted
from spmd_compiler import SpmdError, constrain, export

COLUMNS = {
    "2d ids": ((5, 4), 17, 12, None),
    "uneven": ((6, 7, 6), 21, 11, None),
    "4d ids": ((8, 6, 5, 4), 23, 13, None),
    "5d ids": ((8, 6, 5, 4, 7), 23, 16, None),
    "few": ((4,), 15, 14, None),
    "padding": ((34,), 15, 14, 10),
    "4d ids, padding": ((8, 6, 5, 4), 23, 13, 12),
}
ROWS = {
    "even": ((5, 12), 16, 22, None),
    "uneven": ((6, 7, 6), 13, 22, None),
    "padding": ((34,), 15, 14, 10),
}


def table(ids_shape, rows, width, padding, placement, seed=0):
    """A reference module, its distributed twin and ids."""
    torch.manual_seed(seed)
    mesh = mesh_of(tp=4)
    plain = nn.Embedding(rows, width, padding_idx=padding)
    ours = nn.Embedding(rows, width, padding_idx=padding)
    ours.load_state_dict(plain.state_dict())

    def cut(name, module, mesh):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))

    return plain, distribute_module(ours, mesh, cut), torch.randint(0, rows, ids_shape)


def check_columns(name):
    shape, rows, width, padding = COLUMNS[name]
    plain, ours, ids = table(shape, rows, width, padding, S1)
    mesh, last = mesh_of(tp=4), Shard(len(shape))
    given = distribute_tensor(ids, mesh, [R])
    tangent = torch.randn(*shape, width)
    piece = distribute_tensor(tangent, mesh, [last])
    for program in (
        compiled(ours),
        compiled(lambda i: F.embedding(i, ours.weight, padding_idx=padding)),
    ):
        ours.weight.grad = plain.weight.grad = None
        program(given)  # compiles
        out, forward = counted(program, given)
        _, backward = counted(out.backward, piece)
        assert forward == backward == {}
        assert out.placements == (last,) and ours.weight.grad.placements == (S1,)
        want = plain(ids)
        want.backward(tangent)
        close([out, ours.weight.grad], [want, plain.weight.grad])


@pytest.mark.parametrize("name", COLUMNS)
def test_D1_columns(gloo4, name):
    gloo4(check_columns, name)


def check_max_norm(placement, order, lower):
    torch.manual_seed(0)
    mesh = mesh_of(tp=4)
    weight, ids = torch.randn(13, 6) * 2, torch.randint(0, 13, (5, 3))
    a, b = distribute_tensor(weight, mesh, [placement]).requires_grad_(), weight.clone().requires_grad_()

    def looked_up(w):
        return F.embedding(ids, w, max_norm=2.0, norm_type=order) * 1.5

    program = compiled(looked_up, lower)
    for _ in range(2):
        out, want = program(a), looked_up(b)
        close([out, a], [want, b])
        assert a.placements == (placement,)
        whole(out).square().sum().backward()
        want.square().sum().backward()
        close(a.grad, b.grad)
        assert a.grad.placements == (placement,)
        with torch.no_grad():
            a.mul_(3)
            b.mul_(3)


@pytest.mark.parametrize(("placement", "order"), [(S0, 2.0), (S1, 2.0), (R, 2.0), (S0, 1.0), (S1, 3.0), (S0, float("inf"))])
def test_D2_max_norm(gloo4, placement, order):
    gloo4(check_max_norm, placement, order, "inductor" if order == 2 else "eager")


def check_rows(name):
    shape, rows, width, padding = ROWS[name]
    plain, ours, ids = table(shape, rows, width, padding, S0)
    program = compiled(lambda i: constrain(constrain(ours(i), {"tp": Partial()}), {"tp": R}))
    given = distribute_tensor(ids, mesh_of(tp=4), [R])
    program(given)
    out, forward = counted(program, given)
    assert forward == {"all_reduce": 1} and out.placements == (R,)
    tangent = torch.randn(*shape, width)
    _, backward = counted(out.backward, distribute_tensor(tangent, mesh_of(tp=4), [R]))
    assert backward == {} and ours.weight.grad.placements == (S0,)
    want = plain(ids)
    want.backward(tangent)
    close([out, ours.weight.grad], [want, plain.weight.grad])


@pytest.mark.parametrize("name", ROWS)
def test_D3_rows(gloo4, name):
    gloo4(check_rows, name)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("asked", [True, False])
def test_D3_the_lookup_is_partial(name, asked):
    """One all_reduce; where nobody asks for it, one collective that is no dearer (small tables are gathered)."""
    shape, rows, width, padding = ROWS[name]
    ids, weight = torch.randint(0, rows, shape), torch.randn(rows, width)

    def look_up(w, i):
        out = F.embedding(i, w, padding_idx=padding)
        return constrain(out, {"tp": Partial()}) if asked else out

    program = export(look_up, (weight, ids), mesh={"tp": 4}, placements={"w": [S0], "out": [R]}, profile="bytes")
    (reduction,) = program.collectives
    assert program.wire_bytes <= 2 * 3 / 4 * 4 * width * ids.numel()
    if asked:
        assert (reduction.kind, reduction.op, reduction.shape) == ("all_reduce", "sum", (*shape, width))
    torch.testing.assert_close(program.simulate(weight, ids), look_up(weight, ids))


# --- beyond -------------------------------------------------------------------------------------------------

GRID = list(itertools.product([R, S0, S1], repeat=2))


def exported(function, tensors, placements, mesh, loss=True):
    """A scalar function exported with its gradients, simulated and compared; the program."""
    names = [f"a.{i}" for i in range(len(tensors))]
    program = export(
        lambda *a: function(*a), tensors, mesh=mesh, backward=loss, profile="bytes",
        placements={n: p for n, p in zip(names, placements, strict=True) if p is not None},
    )  # fmt: skip
    theirs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    want = function(*theirs)
    got = program.simulate(*tensors)
    if not loss:
        torch.testing.assert_close(got, want)
        return program
    want.backward()
    torch.testing.assert_close(got[0], want)
    for name, t in zip(names, theirs, strict=True):
        if t.requires_grad:
            torch.testing.assert_close(got[1][name], t.grad, msg=lambda m, n=name: f"{n}: {m}")
    return program


def weighted(x):
    return (x * torch.arange(x.numel()).reshape(x.shape).cos()).sum()


@pytest.mark.parametrize("placement", GRID, ids=str)
@pytest.mark.parametrize("ids", [[R, R], [S0, R], [S0, S1]], ids=str)
def test_D4_two_axes(placement, ids):
    torch.manual_seed(0)
    weight, index = torch.randn(13, 10, requires_grad=True), torch.randint(0, 13, (6, 5))
    program = exported(
        lambda w, i: weighted(F.embedding(i, w, padding_idx=3)), (weight, index), (placement, ids), {"dp": 2, "tp": 2}
    )
    assert not program.replicated_ops


BAGS = {
    "offsets": dict(offsets=torch.tensor([0, 3, 3, 8])),
    "offsets, padding": dict(offsets=torch.tensor([0, 3, 3, 9]), padding_idx=3),
    "last offset": dict(offsets=torch.tensor([0, 4, 8, 10]), include_last_offset=True),
    "rows": dict(),
    "rows, padding": dict(padding_idx=2),
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", BAGS)
def test_D4_bags(name, mode):
    torch.manual_seed(0)
    weight = torch.randn(13, 6, requires_grad=True)
    ids = torch.randint(0, 13, (10,) if "offset" in name else (6, 5))
    for placement, index in itertools.product([[R], [S0], [S1]], [[R], [S0]]):
        program = exported(
            lambda w, i: weighted(F.embedding_bag(i, w, mode=mode, **BAGS[name])),
            (weight, ids), (placement, index), {"tp": 4},
        )  # fmt: skip
        assert not program.replicated_ops
    if mode == "sum":
        exported(
            lambda w, i: weighted(F.embedding_bag(i, w, mode=mode, **BAGS[name])),
            (weight, ids), ([S0, S1], [R, R]), {"dp": 2, "tp": 2},
        )  # fmt: skip


@pytest.mark.parametrize("placement", [[R], [S0], [S1]], ids=str)
@pytest.mark.parametrize("name", ["offsets", "offsets, padding", "rows"])
def test_D4_weighted_bags(placement, name):
    torch.manual_seed(0)
    weight = torch.randn(13, 6, requires_grad=True)
    ids = torch.randint(0, 13, (10,) if "offset" in name else (6, 5))
    scale = torch.randn(ids.shape, requires_grad=True)

    def loss(w, i, s):
        return weighted(F.embedding_bag(i, w, mode="sum", per_sample_weights=s, **BAGS[name]))

    for index in ([R], [S0]):
        exported(loss, (weight, ids, scale), (placement, index, index), {"tp": 4})


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_D4_bags_with_column_shards_need_no_communication(mode):
    weight, ids = torch.randn(13, 8, requires_grad=True), torch.randint(0, 13, (6, 5))
    program = export(
        lambda w, i: F.embedding_bag(i, w, mode=mode), (weight, ids), mesh={"tp": 4},
        placements={"w": [S1], "out": [S1]},
    )  # fmt: skip
    assert program.collectives == ()
    torch.testing.assert_close(program.simulate(weight, ids), F.embedding_bag(ids, weight, mode=mode))


def check_bag(lower):
    torch.manual_seed(0)
    mesh = mesh_of(dp=2, tp=2)
    plain = nn.EmbeddingBag(13, 8, mode="mean", max_norm=2.0)
    ids, offsets = torch.randint(0, 13, (10,)), torch.tensor([0, 3, 3, 8])
    ours = nn.EmbeddingBag(13, 8, mode="mean", max_norm=2.0)
    ours.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, [S0, S1]))
    out, want = compiled(ours, lower)(ids, offsets), plain(ids, offsets)
    close([out, ours.weight], [want, plain.weight])
    whole(out).square().sum().backward()
    want.square().sum().backward()
    close(ours.weight.grad, plain.weight.grad)
    assert ours.weight.grad.placements == (S0, S1)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_D4_bag_on_ranks(gloo4, lower):
    gloo4(check_bag, lower)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(14, 8)
        self.head = nn.Linear(8, 14, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        logits = self.head(torch.tanh(self.embedding(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("placement", GRID, ids=str)
def test_D4_tied(placement):
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 14, (4, 5))
    program = export(
        model, (ids,), mesh={"dp": 2, "tp": 2}, backward=True,
        placements={"head.weight": list(placement), "ids": {"dp": S0}},
    )  # fmt: skip
    loss, grads = program.simulate(ids)
    want = model(ids)
    want.backward()
    torch.testing.assert_close(loss, want)
    assert list(grads) == ["embedding.weight"]
    torch.testing.assert_close(grads["embedding.weight"], model.embedding.weight.grad)


@pytest.mark.parametrize("bag", [False, True])
def test_D4_sparse_gradients_are_an_error(bag):
    weight, ids = torch.randn(13, 8, requires_grad=True), torch.randint(0, 13, (6, 5))
    look_up = F.embedding_bag if bag else F.embedding
    with pytest.raises(SpmdError, match="sparse"):
        export(
            lambda w: look_up(ids, w, sparse=True).sum(), (weight,), mesh={"tp": 4},
            placements={"w": [S0]}, backward=True,
        )  # fmt: skip
    export(lambda w: look_up(ids, w, sparse=True), (weight.detach(),), mesh={"tp": 4}, placements={"w": [S0]})
