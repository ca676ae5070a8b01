"""Operators that take bodies: partitioned inside, equal to one device on every simulated rank and over gloo."""

import copy
import dataclasses

import pytest
import torch
import torch._higher_order_ops as higher_order
from prices import WIRES, priced
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from versions import TORCH

import spmd_compiler as spmd
from spmd_compiler import capture, passes, plans
from spmd_compiler.capture import capture_graph
from spmd_compiler.collectives import collectives
from spmd_compiler.ir import body_of, nodes_within
from spmd_compiler.reader import parse
from spmd_compiler.text import Text
from spmd_compiler.verify import VerificationError, derive, simulate_outputs


def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def looped(x, a, b):
    return higher_order.scan(lambda c, t: (c + mlp(c, a, b), (c * t).cumsum(-1)), x, torch.arange(3, dtype=x.dtype))


PROGRAMS = {
    "cond": lambda x, a, b: torch.cond(x.sum() > 0, lambda *t: mlp(*t), lambda x, a, b: x.softmax(0) + mlp(x, a, b), (x, a, b)),
    "map": lambda x, a, b: higher_order.map(lambda r, a, b: mlp(r, a, b).softmax(-1), x, a, b),
    "scan": looped,
    "while": lambda x, a, b: higher_order.while_loop(
        lambda i, x: (i < 3) & (x.sum() < 1e9), lambda i, x: (i + 1, x + mlp(x, a, b)), (torch.tensor(0), x)
    ),
    "nested": lambda x, a, b: higher_order.map(
        lambda r, a, b: torch.cond(r.sum() > 0, lambda *t: mlp(*t), lambda r, a, b: r.clone(), (r, a, b)), x, a, b
    ),
}  # fmt: skip
PLACED = {
    "megatron": {"a": {"tp": Shard(1)}, "b": {"tp": Shard(0)}},
    "batch": {"x": {"tp": Shard(0)}},
    "both": {"x": {"dp": Shard(0)}, "a": {"tp": Shard(1)}, "b": {"dp": Shard(1), "tp": Shard(0)}},
}
MESHES = {"megatron": {"tp": 4}, "batch": {"tp": 4}, "both": {"dp": 2, "tp": 2}}


LARGE = (8, 64, 256)  # so that weights are dearer to gather than what comes out of them to reduce


def arguments(n=8, k=6, hidden=16, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (n, k), (k, hidden), (hidden, k)
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).div(2).requires_grad_(grad) for s in shapes)


def total(f):
    leaves = torch.utils._pytree.tree_leaves
    return lambda x, a, b: sum(t.square().sum() for t in leaves(f(x, a, b)) if t.is_floating_point())


def planned(name, placed="megatron", backward=False, sizes=(), **options):
    args = arguments(*sizes, grad=backward)
    f = total(PROGRAMS[name]) if backward else PROGRAMS[name]
    options = {"mesh": MESHES[placed], "placements": PLACED[placed], "profile": "bytes", **options}
    return spmd.export(f, args, backward=backward, **options), args


@pytest.mark.parametrize(
    ("name", "placed", "sizes"),
    [*((name, "batch", (7, 5, 13)) for name in PROGRAMS), *((name, "both", (8, 6, 16)) for name in ("cond", "scan"))],
    ids=str,
)
def test_forward_and_backward(name, placed, sizes):
    for backward in (False, True) if name != "while" else (False,):
        program, args = planned(name, placed, backward, sizes)
        derive(program.local)
        assert not program.replicated_ops
        for sign in (1, -1):  # the other branch
            args = (sign * args[0].detach().abs(), *args[1:])
            if not backward:
                torch.testing.assert_close(program.simulate(*args), PROGRAMS[name](*args))
                continue
            args = [t.detach().requires_grad_() for t in args]
            loss = total(PROGRAMS[name])(*args)
            found, gradients = program.simulate(*args)
            torch.testing.assert_close(found, loss.detach())
            for got, want in zip(gradients.values(), torch.autograd.grad(loss, args), strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("name", "counts"), [("scan", [3, 3]), ("while", [0]), ("cond", [1, 1, 1, 1]), ("map", [8, 8, 1])])
def test_sharded_weights_stay_where_they_are(name, counts):
    """One reduction each way, in a loop once a turn; of the gradient that a `map` stacks once for all slices."""
    program, _ = planned(name, backward=name != "while", sizes=LARGE)
    assert [c.times for c in program.collectives] == counts
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    assert name not in ("scan", "while") or program.wire_bytes == sum(max(1, n) * 2 * 3 / 4 * 8 * 64 * 8 for n in counts)
    assert program.gap == 0.0


def test_a_while_loop_has_no_backward():
    with pytest.raises(spmd.SpmdError, match="the backward of a while_loop, for which each turn"):
        planned("while", backward=True)


def test_slices_of_a_map_are_parted_between_devices():
    program, _ = planned("map", "batch", sizes=LARGE)
    assert not program.collectives
    body = next(filter(None, map(body_of, program.local.graph.graph.nodes)))
    assert all(n.meta["spec"].is_replicated() for n in body.graph.nodes if "spec" in n.meta)


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_and_files_hold_bodies(name, tmp_path):
    program, args = planned(name, sizes=LARGE)
    text = program.text()
    assert str(parse(text)) == text
    assert ("in loop" in text) == (name == "while") and (" wire x3" in text) == (name == "scan")
    assert all(text.count(f"%{n.name} = body") == 1 for n in program.local.graph.graph.nodes if body_of(n))
    program.save(tmp_path / "p.spmd")
    again = spmd.load(tmp_path / "p.spmd")
    assert again.text() == text and spmd.diff(program, again).same
    again.verify()
    torch.testing.assert_close(again.simulate(*args), PROGRAMS[name](*args))
    first = program.collectives[0]
    assert first.name in str(spmd.explain(program, first))


def test_a_change_of_what_a_body_sends_is_told():
    old, new = (planned("scan", sizes=LARGE, **o)[0] for o in ({}, {"placements": {}}))
    words = str(spmd.diff(old, new))
    assert "- all_reduce[tp, sum] of f32[8, 64] at " in words.replace("f64", "f32") and "wire" in words


def bodies_of(program):
    return [body_of(n) for n in program.local.graph.graph.nodes if body_of(n) is not None]


def misplaced(program):
    place = next(n for n in bodies_of(program)[-1].graph.nodes if n.meta["val"].dim() == 2)
    place.meta["spec"] = spmd.Spec(("tp",), (Shard(0),))
    place.meta["val"] = place.meta["val"][:2]


def unreduced(program):
    node = next(n for n in bodies_of(program)[-1].graph.nodes if "all_reduce" in n.name)
    node.replace_all_uses_with(node.args[0])


def other_carry(program):
    body = bodies_of(program)[-1]
    first = next(v for v in body.graph.output_node().args[0] if v.meta["val"].dim() == 2)
    first.meta["spec"] = spmd.Spec(("tp",), (Shard(1),))
    first.meta["global"] = (8, 256)


@pytest.mark.parametrize("damage", [misplaced, unreduced, other_carry])
@pytest.mark.parametrize("name", ["scan", "while"])
def test_the_verifier_looks_inside(name, damage):
    program, _ = planned(name, sizes=LARGE)
    derive(program.local)
    damage(program)
    with pytest.raises(VerificationError):
        program.verify()


# --- on processes -----------------------------------------------------------------------------------------------


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def compiled(name, how, sizes):
    program, args = planned(name, "both", name != "while", sizes)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = program.compile(mesh, lower=how)
    found = step(*[a.detach() for a in args])
    if name == "while":
        torch.testing.assert_close([whole(t) for t in found], list(PROGRAMS[name](*args)))
        return
    loss = total(PROGRAMS[name])(*args)
    torch.testing.assert_close(whole(found[0]), loss.detach())
    for got, want in zip(found[1].values(), torch.autograd.grad(loss, args), strict=True):
        torch.testing.assert_close(whole(got), want)


@pytest.mark.parametrize(
    ("name", "how", "sizes"),
    [("scan", "eager", (7, 5, 13)), ("cond", "eager", (7, 5, 13)), ("while", "inductor", (8, 6, 16)),
     ("scan", "inductor", (8, 6, 16))],
)  # fmt: skip
def test_over_gloo(gloo4, name, how, sizes):
    gloo4(compiled, name, how, sizes)


# --- regions ----------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = drop

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if not self.drop:
            return x + self.down(hidden)
        hidden = nn.functional.dropout(hidden, self.drop) * torch.rand_like(hidden)
        return x + self.down(hidden) + torch.randn_like(x)  # which the backward has no use for


class Block(Flat):
    forward = torch.compiler.nested_compile_region(Flat.forward)


class Tower(nn.Module):
    def __init__(self, depth, drop=0.0, block=Block):
        super().__init__()
        self.drop, self.blocks = drop, nn.ModuleList(block(drop) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return nn.functional.dropout(x, self.drop).square().mean()


def regions(depth, verify=True, batch=8, profile="bytes", **given):
    """The passes' program of a step of a tower of equal regions: weights on tp, the batch on dp."""
    torch._dynamo.reset()
    found = []

    def plan(gm, args):
        captured = capture_graph(gm, spmd.Mesh({"dp": 2, "tp": 2})).captured
        for i, given in enumerate(captured.inputs):
            dims = {"up": "{dp: R, tp: S(0)}", "down.weight": "{dp: S(0), tp: S(1)}", "x": "{dp: S(0), tp: R}"}
            spec = next((t for k, t in dims.items() if k in given.name and given.kind != "tangent"), None)
            if spec is not None:
                captured.inputs[i] = dataclasses.replace(given, spec=spmd.Spec.parse(spec))
        found.append(passes.run(captured, passes.Options(profile, verify=verify)))
        return gm.forward

    torch.compile(Tower(depth, **given), backend=plan)(torch.randn(batch, 16))
    return found[0]


def test_regions_are_partitioned_once():
    """Whatever the depth there is one body for the forward and one for the backward; what grows is their calls."""
    few, many = regions(3), regions(4, verify=False)
    places = [[n for n in p.graph.graph.nodes if body_of(n) is not None] for p in (few, many)]
    times = {c.times for c in collectives(nodes_within(many.graph.graph)) if "subgraph" in c.name}
    if TORCH > (2, 11):  # which has bodies of their own for the first and the last call
        assert len(places[0]) == len(places[1]) == 2 and times == {3}
    assert len(places[0]) == len(places[1]) and 3 in times
    assert str(parse(str(Text.of(many)))) == str(Text.of(many))


def test_what_a_region_takes_does_not_grow_with_its_calls(monkeypatch):
    """Neither its rule nor its schema, which torch traces it for, is found again for another call of it."""
    region, found = torch.ops.higher_order.invoke_subgraph, []
    trace, schema, rule = capture.trace, region.gen_schema, plans.rule_of

    def traced(*args):
        with monkeypatch.context() as inside:
            inside.setattr(region, "gen_schema", lambda *args: found.append("schema") or schema(*args), raising=False)
            return trace(*args)

    monkeypatch.setattr(capture, "trace", traced)
    monkeypatch.setattr(plans, "rule_of", lambda n: (n.target is region and found.append("rule")) or rule(n))
    regions(4, verify=False)
    few = sorted(found)
    found.clear()
    regions(6, verify=False)
    assert sorted(found) == few and {"rule", "schema"} == set(few)


paired = pytest.mark.skipif(TORCH == (2, 11), reason="torch 2.11 pairs no calls of a region with their backwards")


@paired
@pytest.mark.parametrize("batch", [8, 7])
def test_regions_draw_what_they_draw_inlined(batch):
    """Each call its own numbers, in the backward those of its forward, on every rank and with regions or without."""
    inlined, local = (regions(3, b is Block, batch, drop=0.4, block=b) for b in (Flat, Block))
    assert len({body_of(n) for n in local.graph.graph.nodes} - {None}) == 2
    torch.manual_seed(0)
    places = local.captured.graph.graph.find_nodes(op="placeholder")
    given = {i.name: torch.randn(n.meta["val"].shape) for i, n in zip(local.inputs, places, strict=True) if i.kind != "seed"}
    given["seed"] = torch.tensor(2**62 + 1)
    found = [{o.name + o.kind: v for o, v in zip(p.outputs, simulate_outputs(p, [given[i.name] for i in p.inputs]), strict=True)}
             for p in (inlined, local)]  # fmt: skip
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch", [8, 7])
def test_the_price_of_regions_is_that_of_what_each_call_sends(batch):
    local = regions(3, batch=batch, profile=WIRES)
    sent = collectives(nodes_within(local.graph.graph))
    assert any(c.times > 1 for c in sent)
    assert local.price - local.saved == pytest.approx(priced(local.mesh, sent), rel=1e-9)


def test_a_region_whose_backward_draws_too_is_refused():
    words = r"backward of a region .* draws other numbers than its forward"
    with pytest.raises(Exception, match=words if TORCH > (2, 11) else "which of its calls a backward belongs"):
        regions(3, drop=0.4, block=Noisy)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


class Noisy(Flat):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return Noise.apply(super().forward(x))


def steps_of_regions(drop):
    """Loss and gradients are those of the plain model, and with draws those of the same without regions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for block in (Flat, Block) if drop else (Block,):
        torch.compiler.reset(), torch.manual_seed(0)
        plain = Tower(3, drop, block).double()
        ours = spmd.parallelize(copy.deepcopy(plain), mesh, {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}})
        step = torch.compile(ours, backend="spmd", options={"lower": "eager", "profile": "bytes"})
        x = torch.randn(7, 16, dtype=torch.float64)
        loss = step(distribute_tensor(x, mesh, [Shard(0), Replicate()]))
        loss.backward()
        found.append([whole(loss), *(whole(p.grad) for p in ours.parameters())])
    if not drop:
        want = plain(x)
        want.backward()
        found.append([want, *(p.grad for p in plain.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("drop", [0.0, pytest.param(0.4, marks=paired)])
def test_regions_train_over_gloo(gloo4, drop):
    gloo4(steps_of_regions, drop)
