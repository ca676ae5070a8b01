"""One program for many sizes: dynamic dims against the global program, their guards, their text, their files."""

import dataclasses

import pytest
import sympy
import test_llama
import torch
from torch.distributed.tensor import Shard
from torch.export import Dim

import spmd_compiler as spmd
from spmd_compiler.dims import Dim as spmd_dim
from spmd_compiler.dims import Dims
from spmd_compiler.reader import parse
from spmd_compiler.symbolic import dim
from spmd_compiler.text import Text

BATCH, SEQ = Dim("batch", max=64), Dim("seq")
DATA = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
MEGATRON = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
BOTH = {"x": {0: BATCH, 1: SEQ}, "y": {0: BATCH, 1: SEQ}}


class Block(torch.nn.Module):
    """Attention, products, a norm, numbers made of sizes, a slice; results whose sizes depend on those of inputs."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x, y):
        h = self.up(self.norm(x))
        q = h.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
        o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        h = self.down(torch.nn.functional.gelu(h + o.transpose(1, 2).reshape(x.shape[0], -1, 32)))
        return ((h - y) ** 2).mean() * x.shape[0] ** 0.5, h.softmax(-1), h[:, 1:] + h[:, :-1], x.shape[0] * 2


def inputs(batch, seq):
    generator = torch.Generator().manual_seed(batch * 100 + seq)
    return tuple(torch.randn(batch, seq, 16, generator=generator) for _ in range(2))


def compare(program, model, args):
    """A step at the sizes of ``args`` is the global program's, and so is its text."""
    (loss, *rest), grads = program.simulate(*args)
    model.zero_grad()
    want_loss, *want = model(*args)
    want_loss.backward()
    torch.testing.assert_close([loss, *rest], [want_loss, *want])
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


@pytest.mark.parametrize(
    ("example", "placements", "sizes"),
    [
        ((8, 6), DATA | MEGATRON, [(8, 6), (4, 4), (12, 10)]),
        ((7, 6), DATA | MEGATRON, [(7, 6), (9, 4), (8, 6), (3, 12)]),  # batches cut unevenly, or evenly
        ((5, 9), {"x": {"dp": Shard(1)}, "y": {"dp": Shard(1)}} | MEGATRON, [(5, 9), (3, 7), (8, 15)]),  # and sequences
        ((7, 6), {k: [Shard(0), Shard(0)] for k in ("x", "y")}, [(7, 6), (2, 4), (8, 8), (13, 12)]),  # fewer than devices
    ],
    ids=["even", "uneven batch", "uneven sequence", "two axes"],
)
def test_steps_at_many_sizes(example, placements, sizes):
    model = Block()
    program = spmd.export(
        model, inputs(*example), mesh={"dp": 2, "tp": 2}, placements=placements, backward=True, profile="bytes",
        dynamic_shapes=BOTH,
    )  # fmt: skip
    for size in sizes:
        compare(program, model, inputs(*size))
        program.at(batch=size[0], seq=size[1]).verify()


def test_guards_have_names():
    program = spmd.export(
        Block(), inputs(8, 6), mesh={"dp": 4}, placements={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
        dynamic_shapes=BOTH,
    )  # fmt: skip
    asked = [g.words for g in program.guards]
    assert "batch must be divisible by 4" in asked
    for sizes, words in [
        ((6, 6), r"batch is 6, and batch must be divisible by 4: dim 0 of x is cut into 4 on dp; pad it, or export"),
        ((68, 6), r"batch is 68; the program was planned for batch=8 in 2\.\.64"),
        ((4, 1), r"seq is 1; the program was planned for seq=6 in 2\.\."),
        ((4, 2), r"seq is 2, and seq - 1 must not be 1: tests/test_dims\.py:\d+ takes it for granted"),
    ]:
        with pytest.raises(spmd.SpmdError, match=words):
            program.simulate(*inputs(*sizes))
    x, y = inputs(8, 6)
    with pytest.raises(spmd.SpmdError, match=r"dim 1 of input 'y' \(5\) makes seq 5, dim 1 of input 'x' \(6\) makes it"):
        program.simulate(x, y[:, :5])
    with pytest.raises(spmd.SpmdError, match=r"input 'y' is \(8, 6, 9\); the program was planned for \(batch, seq, 16\)"):
        program.simulate(x, y[..., :9])
    with pytest.raises(spmd.SpmdError, match="dynamic dims are batch, seq; sizes are given of batch"):
        program.at(batch=8)


@pytest.mark.parametrize("example", [(8, 6), (7, 9)])
def test_texts_are_symbolic_and_round_trip(example, tmp_path):
    program = spmd.export(
        Block(), inputs(*example), mesh={"dp": 2, "tp": 2}, placements=DATA | MEGATRON, backward=True,
        profile="bytes", dynamic_shapes=BOTH,
    )  # fmt: skip
    text = program.text()
    local = "batch/2" if example[0] == 8 else "ceiling(batch/2)"
    assert f"dims  batch={example[0]} in 2..64, seq={example[1]} in 2.." in text
    assert f"f32[batch, seq, 16 | {local}, seq, 16]" in text
    assert str(parse(text)) == text
    assert parse(text) == Text.of(program.family.common, program.memory, program.family.dims)
    # bytes are those at the sizes of the example, which the same program without dynamic dims has
    fixed = program.at(batch=example[0], seq=example[1])
    assert parse(text).wire() == parse(fixed.text()).wire()
    assert [c.wire_bytes for c in program.collectives] == [c.wire_bytes for c in fixed.collectives]
    assert spmd.diff(program, program).same
    assert "dims  " in program.text("summary")


def test_files(tmp_path):
    model = Block()
    program = spmd.export(
        model, inputs(7, 6), mesh={"dp": 2, "tp": 2}, placements=DATA | MEGATRON, backward=True, profile="bytes",
        dynamic_shapes=BOTH,
    )  # fmt: skip
    program.save(tmp_path / "p.spmd", weights=True)
    loaded = spmd.load(tmp_path / "p.spmd")
    assert loaded.text() == program.text()
    assert loaded.guards == program.guards and loaded.dims == program.dims
    for size in [(7, 6), (4, 8)]:
        (_, *want), grads = program.simulate(*inputs(*size))
        (_, *got), same = loaded.simulate(*inputs(*size))
        torch.testing.assert_close((got, same), (want, grads), rtol=0, atol=0)
    loaded.save(tmp_path / "q.spmd", weights=True)
    assert (tmp_path / "p.spmd").read_bytes() == (tmp_path / "q.spmd").read_bytes()


@pytest.mark.parametrize("placements", ["DATA | TP", "FSDP"])
def test_a_language_model(placements):
    """Lookups, rotary tables of the length, a loss over all tokens."""
    config = dataclasses.replace(test_llama.SMALL, layers=1)
    model = test_llama.Llama(config)
    where = test_llama.DATA | test_llama.TP if placements == "DATA | TP" else test_llama.FSDP
    mesh = {"dp": 2, "tp": 2} if "TP" in placements else {"dp": 4}
    ids = torch.randint(0, config.vocab, (8, 12))
    open_sizes = {0: BATCH, 1: SEQ} if "TP" in placements else {0: BATCH}
    shapes = {"ids": open_sizes, "targets": open_sizes}
    program = spmd.export(
        model, (ids, ids), mesh=mesh, placements=where, backward=True, profile="bytes", dynamic_shapes=shapes
    )
    for batch, seq in [(8, 12), (4, 16), (16, 8)] if "TP" in placements else [(8, 12), (4, 12), (24, 12)]:
        ids = torch.randint(0, config.vocab, (batch, seq))
        loss, grads = program.simulate(ids, ids)
        model.zero_grad()
        want = model(ids, ids)
        want.backward()
        torch.testing.assert_close(loss, want)
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-5)


def test_draws_depend_on_no_mesh():
    def f(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(x.shape[0], 3)[:, :1]

    programs = [spmd.export(f, (torch.ones(8, 4),), mesh={"dp": n}, placements={"x": {"dp": Shard(0)}},
                            dynamic_shapes={"x": {0: Dim("n")}}) for n in (1, 4)]  # fmt: skip
    for n in (8, 12):
        drawn = []
        for program in programs:
            torch.manual_seed(3)
            drawn.append(program.simulate(torch.ones(n, 4)))
        torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_windows_over_dynamic_dims():
    """Halos of an image whose height is open: their ranges are expressions."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 5, padding=2))
    program = spmd.export(
        model, (torch.randn(2, 2, 12, 8),), mesh={"sp": 4}, placements={"input": {"sp": Shard(2)}},
        profile="bytes", dynamic_shapes={"input": {2: Dim("height")}},
    )  # fmt: skip
    assert [c.kind for c in program.collectives] == ["permute", "permute"]
    assert "height/4" in program.text()
    assert str(parse(program.text())) == program.text()
    for height in (12, 20, 32):
        x = torch.randn(2, 2, height, 8)
        torch.testing.assert_close(program.simulate(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(spmd.SpmdError, match="height must be divisible by 4"):
        program.simulate(torch.randn(2, 2, 13, 8))


def test_what_dynamic_shapes_takes():
    def f(x, pair, *, scale=1.0, **more):
        return x + pair["a"][:, :-1] * scale, more["z"] * 2 if more else x

    n = Dim("n", min=3)
    args, kwargs = (torch.ones(4, 6), {"a": torch.ones(4, 7), "b": [torch.ones(2)]}), {"scale": 2.0, "z": torch.ones(5)}
    given = {"x": (None, n), "pair": {"a": {1: n + 1}, "b": [None]}, "z": {0: Dim.DYNAMIC}}
    program = spmd.export(f, args, kwargs, mesh={"t": 2}, placements={"x": {"t": Shard(0)}}, dynamic_shapes=given)
    assert {str(d) for d in program.dims.values()} == {"n=6 in 3..", "z_0=5 in 2.."}
    args, kwargs = (torch.ones(4, 9), {"a": torch.ones(4, 10), "b": [torch.ones(2)]}), {"scale": 2.0, "z": torch.ones(3)}
    torch.testing.assert_close(program.simulate(*args, **kwargs), f(*args, **kwargs))
    with pytest.raises(spmd.SpmdError, match=r"dim 1 of input 'pair\.a' \(9\) makes n 8, dim 1 of input 'x' \(9\)"):
        program.simulate(args[0], {"a": torch.ones(4, 9), "b": [torch.ones(2)]}, **kwargs)


def double(x):
    return x * 2


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (double, {"y": {0: Dim("n")}}, "dynamic_shapes: the program has no 'y'; it has x"),
        (double, {"x": {2: Dim("n")}}, r"dynamic_shapes: 'x' \(4, 6\) has no dim 2"),
        (double, {"x": {0: "n"}}, "dim 0 of 'x' .4. is 'n', not a torch.export.Dim"),
        (double, {"x": {0: Dim("c_dp")}}, "begin with 'c_' are those of coordinates"),
        (double, {"x": {0: Dim("n", min=5)}}, r"n is 4; the program was planned for n=4 in 5\.\."),
        (double, {"x": {0: Dim("n", max=9), 1: Dim("n", max=8)}}, "'n' is given twice, with different bounds"),
        (double, {"x": {0: Dim("n"), 1: Dim("n")}}, r"dim 1 of input 'x' \(6\) makes n 6, dim 0 of input 'x' \(4\)"),
        (double, 3, "dynamic_shapes: the program takes a mapping or a sequence"),
        (lambda x: x * torch.arange(4.0)[:, None], {"x": {0: Dim("n")}}, r"dynamic dim n is 4 and nothing else for .*test_dims"),
        (lambda x: x.view(2, -1) if x.shape[0] == 4 else x, {"x": {0: Dim("n")}}, r"dynamic dim n is 4 and nothing else"),
        (lambda x: torch.cond(x.sum() > 0, double, torch.neg, (x,)), {"x": {0: Dim("n")}}, "higher-order operator has no dynamic"),
    ],
)  # fmt: skip
def test_what_is_refused(function, given, words):
    with pytest.raises(spmd.SpmdError, match=words):
        spmd.export(function, (torch.ones(4, 6),), mesh={"t": 2}, dynamic_shapes=given)


@pytest.mark.parametrize("own", [False, True])
def test_an_exported_program_with_dims(own):
    """Given again, or those that it leaves open itself; an empty mapping leaves none open."""
    model, n = Block().eval(), Dim("batch", min=2, max=64)
    shapes = {"x": {0: n}, "y": {0: n}}
    exported = torch.export.export(model, inputs(8, 6), dynamic_shapes=shapes)
    program = spmd.export(exported, inputs(8, 6), mesh={"dp": 2}, placements=DATA, dynamic_shapes=None if own else shapes)
    for batch in (8, 12):
        torch.testing.assert_close(program.simulate(*inputs(batch, 6)), model(*inputs(batch, 6)))
    assert len(program.dims) == 1
    if own:
        assert not spmd.export(exported, inputs(8, 6), mesh={"dp": 2}, placements=DATA, dynamic_shapes={}).dims


def steps_of_each_size(path, state, lower):
    program = spmd.load(path).use(state)
    step = program.compile(spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), lower)
    found = []
    for size in [(7, 6), (4, 8), (7, 6)]:
        (loss, *_), grads = step(*inputs(*size))
        found.append((float(loss), float(grads["up.weight"].full_tensor().norm())))
    with pytest.raises(spmd.SpmdError, match="must be divisible by"):
        step(*inputs(7, 7))
    return found


def test_real_ranks_take_many_sizes(gloo4, tmp_path):
    model = Block()
    program = spmd.export(
        model, inputs(7, 6), mesh={"dp": 2, "tp": 2}, placements=DATA | MEGATRON, backward=True, profile="bytes",
        dynamic_shapes=BOTH,
    )  # fmt: skip
    program.save(tmp_path / "p.spmd")
    found = gloo4(steps_of_each_size, str(tmp_path / "p.spmd"), model.state_dict(), "eager")
    for size, *ranks in zip([(7, 6), (4, 8), (7, 6)], *found, strict=True):
        model.zero_grad()
        loss = model(*inputs(*size))[0]
        loss.backward()
        for rank in ranks:
            assert rank == pytest.approx((float(loss), float(model.up.weight.grad.norm())), rel=1e-5)


def test_what_the_bounds_say_is_no_guard():
    batch = Dim("batch", min=2, max=64)
    program = spmd.export(
        lambda x: x.relu() if x.shape[0] <= 64 else x, (torch.zeros(8, 4),), mesh={"dp": 2},
        placements={"x": {"dp": Shard(0)}}, dynamic_shapes={"x": {0: batch}},
    )  # fmt: skip
    assert [g.words for g in program.guards] == ["batch must be divisible by 2"]
    a, b = dim("a"), dim("b")
    dims = Dims((spmd_dim("a", 4, 2, 6), spmd_dim("b", 4, 3)))
    for condition in (a <= 6, a < 6, a >= 2, a > 2, sympy.Ne(a, 1), sympy.Ne(a, 3), b <= 40, a + b >= 5, a - b <= 3,
                      a - b < 3, 2 * a <= 12, sympy.Ne(2 * a, b), sympy.Ne(b - 1, 1), sympy.Eq(a % 2, 0)):  # fmt: skip
        holds = all(condition.subs({a: i, b: j}) for i in range(2, 7) for j in range(3, 50))
        assert dims.imply(condition) == holds, condition
