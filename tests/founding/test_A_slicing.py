"""Founding behaviours A: slices, random draws and losses, on two gloo ranks and in the simulator."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_backend import S0, S1, R, close, compiled, mesh_of, whole
from torch.distributed.tensor import Shard, distribute_tensor

from gloo.measure import counted, pair_mesh
from spmd_compiler import SpmdError, export

GRID = list(itertools.product([R, S0, S1], repeat=2))


def mean_squares(got, want):
    """Mean squared differences, absolute and relative."""
    off = (whole(got) - want).detach()
    assert off.square().mean() <= 1e-6
    assert (off / (want.detach().abs() + 1e-8)).square().mean() <= 1e-6


def repeated(function, make, placements, tangent=None, mesh=None):
    """Ten iterations of fresh data: outputs and the gradients of the first input, against one device."""
    mesh = mesh or pair_mesh()
    program = compiled(function)
    for step in range(10):
        torch.manual_seed(step)
        inputs = make()
        ours = [distribute_tensor(t, mesh, p) for t, p in zip(inputs, placements, strict=True)]
        x, y = ours[0].requires_grad_(), inputs[0].clone().requires_grad_()
        got, want = program(x, *ours[1:]), function(y, *inputs[1:])
        mean_squares(got, want)
        g = torch.ones(want.shape) if tangent is None else tangent(want.shape)
        got.backward(distribute_tensor(g, mesh, [R] * mesh.ndim))
        want.backward(g)
        mean_squares(x.grad, y.grad)
        assert x.grad.placements == x.placements


def exported(function, tensors, placements, mesh, **options):
    """``function`` exported with gradients where an input has some, simulated, compared; the program."""
    backward = any(t.requires_grad for t in tensors)
    names = [f"a.{i}" for i in range(len(tensors))]
    program = export(
        lambda *a: function(*a), tensors, mesh=mesh, backward=backward,
        placements=dict(zip(names, placements, strict=True)), **options,
    )  # fmt: skip
    theirs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    got, want = program.simulate(*tensors), function(*theirs)
    if backward:
        want.backward()
        for name, t in zip(names, theirs, strict=True):
            if t.requires_grad:
                torch.testing.assert_close(got[1][name], t.grad)
        got = got[0]
    torch.testing.assert_close(got, want)
    return program


def weighted(x):
    return (x * torch.arange(x.numel()).reshape(x.shape).cos()).sum() if x.dim() else x * 1.0


# --- A1: slices ---------------------------------------------------------------------------------------------


def check_slice(placement):
    repeated(
        lambda x: x[:, :5], lambda: [torch.randn(1024, 10)], [[placement]], lambda shape: torch.randn(shape) * 1e-3
    )


@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_A1_slice(gloo4, placement):
    gloo4(check_slice, placement)


INDEX, MASK = torch.tensor([0, -1, 5, 5]), torch.tensor([True, False, True, True, False, True, False])


def written(x):
    y = x.clone()
    y[:, 1:4] = x[:, :3] * 2
    y[-1] = 0
    y[y > 1] = 0.5
    return y


SLICES = {
    "to": lambda x: x[:, :5],
    "negative": lambda x: x[-3:, :-2],
    "stepped": lambda x: x[::3, 1::2],
    "both": lambda x: x[2:-2, 1:6],
    "select": lambda x: x.select(1, -2),
    "select row": lambda x: x[3],
    "ellipsis": lambda x: x[..., None, 2],
    "narrow": lambda x: x.narrow(0, 2, 5),
    "split": lambda x: x.split([3, 4, 3])[1],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "unbind": lambda x: x.unbind(1)[4],
    "integers": lambda x: x[INDEX],
    "integers in columns": lambda x: x[:, INDEX],
    "pairs of integers": lambda x: x[INDEX, INDEX],
    "integers and a slice": lambda x: x[INDEX, 2:6],
    "take": lambda x: x.take_along_dim(INDEX[:, None], 0),
    "index_select": lambda x: x.index_select(1, INDEX.abs()),
    "mask": lambda x: torch.where(x > 0, x, x * 0.1),
    "write": written,
    "roll": lambda x: x.roll(3, 0),
    "flip": lambda x: x.flip(1),
    "windows": lambda x: x.unfold(0, 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_A1_beyond(name):
    torch.manual_seed(0)
    x = torch.randn(10, 7, requires_grad=True)
    for placement in ([S0, R], [S0, S0], [S0, S1], [R, S1], [S1, S1]):
        exported(lambda x: weighted(SLICES[name](x)), (x,), (placement,), {"dp": 2, "tp": 2}, profile="bytes")


# What a mask selects has a size that data decide: a program names it (u0) and serves every number of elements.
SELECTIONS = {
    "elements": lambda x, w: weighted(x[x > 0]),
    "rows": lambda x, w: weighted(x[x[:, 0] > 0]),
    "rows_matmul": lambda x, w: weighted(x[x[:, 0] > 0] @ w),
    "mask_of_another": lambda x, w: weighted(x[w[:, 0] > 0].exp()) if len(w) == len(x) else weighted(x[x.t()[0] > 0]),
    "mean": lambda x, w: x[x > 0].mean(),
    "spread": lambda x, w: x[x > 0].var() + sum(map(torch.sum, torch.std_mean(x[x[:, 0] > 0], 0, correction=0))),
    "mean_of_rows": lambda x, w: weighted(x[x[:, 0] > 0].mean(0)),
    "two_masks": lambda x, w: x[x > 0].mean() + x[x < 0.5].square().sum(),
    "a_mask_of_a_selection": lambda x, w: weighted((lambda y: y[y[:, 1] > 0] @ w)(x[x[:, 0] > 0])),
    "one_mask_twice": lambda x, w: weighted(x[x > 0] * x.exp()[x > 0]),
    "beside_a_dim": lambda x, w: weighted(x.t()[:, x[:, 0] > 0]),
    "beside_an_index": lambda x, w: weighted(x[x[:, 0] > 0][:, torch.tensor([0, 2, 2])]),
    "masked_select": lambda x, w: weighted(torch.masked_select(x, x[:, :1] > 0)),
    "nonzero": lambda x, w: weighted(x[:, 1][(x[:, 0] > 0).nonzero().squeeze(1)]) + x.nonzero().double().sum(),
    "where": lambda x, w: weighted(x[torch.where(x > 0)]),
    "put": lambda x, w: weighted(x.exp().index_put((x > 0,), x[x > 0].sin())),
    "put_other": lambda x, w: weighted(x.masked_scatter(x > 0, w.flatten()[w.flatten() > -9].repeat(4))),
    "repeats": lambda x, w: weighted(torch.repeat_interleave(x, (x[:, 0] > 0).long() * 2, dim=0)),
    "unique": lambda x, w: torch.unique((x * 2).long()).double().sum() + x.sum(),
    "unique_counts": lambda x, w: weighted(torch.cat([t.double().flatten() for t in torch.unique(
        (x * 2).long(), return_inverse=True, return_counts=True)])) + x.sum(),
    "joined": lambda x, w: weighted(torch.cat([x[x[:, 0] > 0], x, x[x[:, 1] > 0]]).softmax(0)),
    "flattened": lambda x, w: weighted(x[x[:, 0] > 0].reshape(-1) * 2),
    "labelled": lambda x, w: F.cross_entropy(
        (x @ w)[x[:, 0] < 0.5], torch.where(x[:, 0] < 0.5, x[:, 1].gt(0).long(), -100)[x[:, 0] < 0.5], reduction="sum"),
    "integers": lambda x, w: (lambda n: n[n > 0].sum() + x.sum())((x * 5).long()),
}  # fmt: skip
PIECES = [{}, {"x": {"tp": S0}}, {"x": {"tp": S1}}, {"x": {"tp": S0}, "w": {"tp": S1}}, {"x": {"tp": S1}, "w": {"tp": S0}}]


def drawn(step):
    """Numbers of either sign, then none above zero (an empty selection), then all."""
    torch.manual_seed(step)
    x, w = torch.randn(10, 7), torch.randn(7, 4)
    x = [x, -x.abs() - 0.1, x.abs() + 0.1][step % 3]
    return x.requires_grad_(), w.requires_grad_()


@pytest.mark.parametrize("name", SELECTIONS)
def test_A1_selection(name):
    function, turn = SELECTIONS[name], list(SELECTIONS).index(name)
    cases = [({"tp": 2}, PIECES[turn % 5]), ({"tp": 2}, PIECES[(turn + 2) % 5])]
    cases += [({"dp": 2, "tp": 2}, {"x": {"dp": S0, "tp": S1}})] * (turn % 3 == 0)
    for mesh, pieces in cases:
        program = export(function, drawn(0), mesh=mesh, placements=pieces, backward=True)
        for step in range(3):
            ours, theirs = drawn(step), drawn(step)
            got, grads = program.simulate(*ours)
            want = function(*theirs)
            want.backward()
            torch.testing.assert_close(got, want, equal_nan=True)
            for k, t in zip("xw", theirs, strict=True):
                if t.grad is not None:
                    torch.testing.assert_close(grads[k], t.grad, equal_nan=True)
    assert set(program.replicated_ops) <= {"aten.nonzero.default", "aten._unique2.default",
                                           "aten.repeat_interleave.Tensor"}  # fmt: skip


def test_A1_selection_keeps_other_dims_sharded():
    """A mask of its own, (N,), of (N, D): rows are picked of each piece of D, and nothing is sent."""
    def loss(x, w, mask):
        return (x[mask] @ w).square().mean()

    given = torch.randn(64, 512, requires_grad=True), torch.randn(512, 4, requires_grad=True), torch.rand(64) > 0.5
    placements = {"x": {"tp": S1}, "w": {"tp": S0}}
    program = export(loss, given, mesh={"tp": 4}, placements=placements, backward=True)
    assert [(c.kind, c.shape) for c in program.collectives] == [("all_reduce", (67, 4))]
    assert str(program.dims["u0"]) == "u0=67 in 0..64"
    assert "f32[u0, 512 | u0, 128]" in program.text()
    assert program.replicated_ops == ("aten.nonzero.default",)
    rows = export(loss, given, mesh={"tp": 4}, placements={"x": {"tp": S0}}, backward=True)
    for p in (program, rows):
        got, grads = p.simulate(*given)
        theirs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
        want = loss(*theirs)
        want.backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grads["x"], theirs[0].grad)
        torch.testing.assert_close(grads["w"], theirs[1].grad)


def test_A1_selection_as_an_output():
    x, w = drawn(0)
    program = export(lambda x, w: x[x[:, 0] > 0] @ w, (x, w), mesh={"tp": 2},
                     placements={"w": {"tp": S1}, "out": {"tp": S1}})  # fmt: skip
    for step in range(3):
        x, w = drawn(step)
        torch.testing.assert_close(program.simulate(x, w), x[x[:, 0] > 0] @ w)
    assert program.collectives == ()
    with pytest.raises(SpmdError, match=r"output 'out' \(.*test_A_slicing.py:\d+\): .* cuts dim 0, .* depends on data"):
        export(lambda x: x[x > 0], (x,), mesh={"tp": 2}, placements={"out": {"tp": S0}})
    with pytest.raises(SpmdError, match="returns a number that depends on data"):
        export(lambda x: x[x > 0].shape[0], (x,), mesh={"tp": 2})


def check_selection(name, placements, lower):
    """On real processes, forward and backward, with one program for all numbers of elements."""
    function = SELECTIONS[name] if name != "output" else lambda x, w: x[x[:, 0] > 0] @ w
    mesh = pair_mesh()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    program = compiled(function, lower=lower)
    for step in range(3):
        theirs = drawn(step)
        ours = [distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in zip(theirs, placements, strict=True)]
        got, want = program(*ours), function(*theirs)
        torch.testing.assert_close(whole(got), want, equal_nan=True)
        tangent = torch.randn(want.shape)
        want.backward(tangent)
        got.backward(distribute_tensor(tangent, mesh, [R]))
        for t, o in zip(theirs, ours, strict=True):
            if t.grad is not None:
                torch.testing.assert_close(whole(o.grad), t.grad, equal_nan=True)
                assert o.grad.placements == o.placements
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("placements", [([S0], [S1]), ([S1], [S0])], ids=str)
def test_A1_selection_on_processes(gloo4, placements):
    for name in ("rows_matmul", "two_masks", "put", "labelled", "output"):
        gloo4(check_selection, name, placements, "eager")


def test_A1_selection_through_inductor(gloo4):
    gloo4(check_selection, "output", ([S0], [S1]), "inductor")


# --- A2: random draws ---------------------------------------------------------------------------------------


def check_bernoulli(placement):
    mesh = pair_mesh()
    program = compiled(torch.bernoulli)
    seen = []
    for step in range(10):
        torch.manual_seed(step)
        p = torch.rand(1024, 10)
        x = distribute_tensor(p, mesh, [placement]).requires_grad_()
        torch.manual_seed(100 + step)
        out, collectives = counted(program, x) if step else (program(x), {})
        assert collectives == {}
        tangent = distribute_tensor(torch.randn(1024, 10), mesh, [R])
        out.backward(tangent)
        drawn, grad = whole(out).detach(), whole(x.grad)
        everyone = [None] * 4
        dist.all_gather_object(everyone, (drawn, grad))
        for other, other_grad in everyone:
            assert torch.equal(other, drawn) and torch.equal(other_grad, grad)
        assert set(drawn.unique().tolist()) == {0.0, 1.0} and not grad.any()
        assert abs((drawn - p).mean()) < 0.02
        torch.manual_seed(100 + step)
        assert torch.equal(whole(program(x)), drawn)
        assert not torch.equal(whole(program(x)), drawn)
        seen.append(drawn)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    return seen


def test_A2_bernoulli(gloo4):
    """The same draw on all ranks, however it is sharded; `manual_seed` reproduces it; calls differ."""
    want, *others = (gloo4(check_bernoulli, placement)[0] for placement in (R, S0, S1))
    for got in others:
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


DRAWS = {
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "dropout": lambda x: F.dropout(x, 0.4),
    "feature_dropout": lambda x: F.dropout1d(x.unsqueeze(-1), 0.4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randint": lambda x: torch.randint(-5, 900, (24, 10)),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x, 12, replacement=True),
    "randperm": lambda x: torch.randperm(24),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
}
DRAW_MESHES = {
    "one": ({"dp": 1}, [[R]]),
    "2 x 2": ({"dp": 2, "tp": 2}, GRID),
    "3": ({"dp": 3}, [[S0], [S1]]),
    "8": ({"dp": 8}, [[R], [S0], [S1]]),
    "2 x 4 x 2": ({"a": 2, "b": 4, "c": 2}, [[S0, S1, R], [S0, S0, S1], [S1, S0, S0]]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_A2_beyond(name):
    """Bit for bit the same on every mesh and for every placement, and nothing of a draw is communicated."""
    torch.manual_seed(0)
    x = torch.rand(24, 10)
    want = None
    for mesh, placements in DRAW_MESHES.values():
        for placement in placements:
            program = export(lambda x: DRAWS[name](x), (x,), mesh=mesh, placements={"x": placement}, profile="bytes")
            torch.manual_seed(5)
            got, again = program.simulate(x), program.simulate(x)
            want = got if want is None else want
            assert torch.equal(got, want), (mesh, placement)
            assert not torch.equal(again, got)
            assert not [c for c in program.collectives if "draw" in c.why]


# --- A3: losses ---------------------------------------------------------------------------------------------


def check_cross_entropy(placement, target):
    loss = torch.nn.CrossEntropyLoss()
    repeated(
        lambda x, y: loss(x, y), lambda: [torch.randn(1024, 10), torch.randint(0, 10, (1024,))], [[placement], [target]]
    )


@pytest.mark.parametrize("placement, target", [(R, R), (S0, S0), (S1, R)], ids=str)
def test_A3_cross_entropy(gloo4, placement, target):
    gloo4(check_cross_entropy, placement, target)


CLASSES = 12
WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3)) + 0.1
ENTROPIES = {
    "plain": {},
    "ignored": {"ignore_index": 3},
    "weights": {"weight": WEIGHTS},
    "smoothing": {"label_smoothing": 0.1},
    "all": {"weight": WEIGHTS, "label_smoothing": 0.1, "ignore_index": 3},
}


def entropy_case(rows, target):
    torch.manual_seed(rows)
    if target == "d1":
        return torch.randn(rows, CLASSES, 5, requires_grad=True), torch.randint(0, CLASSES, (rows, 5))
    x = torch.randn(rows, CLASSES, requires_grad=True)
    if target == "probabilities":
        return x, torch.rand(rows, CLASSES).softmax(1)
    y = torch.randint(0, CLASSES, (rows,))
    y[1] = 3
    return x, y


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name, target", [
    *((n, "classes") for n in ENTROPIES), ("plain", "d1"), ("all", "d1"), ("plain", "probabilities"),
    ("weights", "probabilities"), ("smoothing", "probabilities"),
])  # fmt: skip
def test_A3_beyond(name, target, reduction):
    """Predictions sharded on batch, on classes, on both; sharded classes cost reductions of one value a row."""
    rows = 9  # uneven on two ranks
    x, y = entropy_case(rows, target)
    most = rows * (5 if target == "d1" else 1)

    def loss(x, y):
        return weighted(F.cross_entropy(x, y, reduction=reduction, **ENTROPIES[name]))

    both = target == "probabilities"
    for placement, labels in [
        ([S0, R], [S0, R]), ([R, S1], [R, S1 if both else R]), ([S0, S1], [S0, S1 if both else R]), ([S1, S1], [R, R]),
    ]:  # fmt: skip
        program = exported(loss, (x, y), (placement, labels), {"dp": 2, "tp": 2}, profile="bytes")
        assert not program.replicated_ops
        for c in program.collectives:
            assert torch.Size(c.shape).numel() <= most, (placement, c)


N = 10
PAIR_LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": lambda a, b, **k: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), **k),
    "bce_with_logits": lambda a, b, **k: F.binary_cross_entropy_with_logits(a, b.sigmoid(), **k),
    "weighted bce": lambda a, b, **k: F.binary_cross_entropy_with_logits(
        a, b.sigmoid(), weight=b.abs(), pos_weight=torch.tensor(2.0), **k
    ),
    "kl_div": lambda a, b, **k: F.kl_div(a.log_softmax(-1), b.softmax(-1), **k),
    "kl_div of logs": lambda a, b, **k: F.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, **k),
    "poisson_nll": lambda a, b, **k: F.poisson_nll_loss(a, b.abs(), **k),
    "soft_margin": lambda a, b, **k: F.soft_margin_loss(a, b.sign(), **k),
    "hinge_embedding": lambda a, b, **k: F.hinge_embedding_loss(a, b.sign(), **k),
    "cosine_embedding": lambda a, b, **k: F.cosine_embedding_loss(a, b, torch.arange(N) % 2 * 2 - 1, **k),
    "margin_ranking": lambda a, b, **k: F.margin_ranking_loss(a, b, b.sign(), **k),
    "triplet_margin": lambda a, b, **k: F.triplet_margin_loss(a, b, a * b, **k),
    "multilabel_soft_margin": lambda a, b, **k: F.multilabel_soft_margin_loss(a, b.sigmoid(), **k),
}
LABEL_LOSSES = {
    "nll": lambda a, y, **k: F.nll_loss(a.log_softmax(1), y, **k),
    "cross_entropy": F.cross_entropy,
    "multi_margin": F.multi_margin_loss,
    "multilabel_margin": lambda a, y, **k: F.multilabel_margin_loss(a, F.one_hot(y, 6) * 3 - 1, **k),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [*PAIR_LOSSES, *LABEL_LOSSES])
def test_A3_losses_of_uneven_batches(name, reduction):
    """Batch 10 on four ranks (3, 3, 3, 1), and classes 6 (2, 2, 2, 0)."""
    torch.manual_seed(1)
    x, y = torch.randn(N, 6, requires_grad=True), torch.randn(N, 6)
    if name in LABEL_LOSSES:
        y, function = torch.randint(0, 6, (N,)), LABEL_LOSSES[name]
        given = [([S0], [S0]), ([S0], [R]), ([S1], [S0]), ([S1], [R])]
    else:
        function = PAIR_LOSSES[name]
        given = [([S0], [S0]), ([S0], [R]), ([R], [S0]), ([S1], [S1]), ([S1], [S0])]
    for placements in given if reduction == "mean" else given[1:3]:
        exported(lambda x, y: weighted(function(x, y, reduction=reduction)), (x, y), placements, {"dp": 4})


def check_losses():
    mesh = mesh_of(tp=4)
    torch.manual_seed(2)
    x, t, y = torch.randn(N, 6), torch.randn(N, 6), torch.randint(0, 6, (N,))
    for name in ("mse", "bce_with_logits", "kl_div", "cosine_embedding", "nll"):
        function, other = (PAIR_LOSSES | LABEL_LOSSES)[name], y if name in LABEL_LOSSES else t
        a, b = distribute_tensor(x, mesh, [S0]).requires_grad_(), x.clone().requires_grad_()
        got = compiled(lambda x, y, f=function: f(x, y, reduction="none").mean())(a, distribute_tensor(other, mesh, [S0]))
        want = function(b, other, reduction="none").mean()
        got.backward()
        want.backward()
        close([got, a.grad], [want, b.grad])
        assert a.grad.placements == (S0,)


def test_A3_losses_of_uneven_batches_on_ranks(gloo4):
    gloo4(check_losses)


def test_A3_three_dims_on_three_axes():
    x, y = torch.randn(4, CLASSES, 6, requires_grad=True), torch.randint(0, CLASSES, (4, 6))
    program = exported(
        lambda x, y: F.cross_entropy(x, y), (x, y), ([S0, S1, Shard(2)], [S0, R, S1]), {"dp": 2, "tp": 2, "cp": 2},
        profile="bytes",
    )  # fmt: skip
    assert all(torch.Size(c.shape).numel() <= 4 * 6 for c in program.collectives)
