"""Templates, the choices they give, errors of both, and emission."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx import Graph

from spmd_compiler import rules
from spmd_compiler.emit import Emit, emit_choice
from spmd_compiler.ir import operands
from spmd_compiler.placements import Mesh, Spec
from spmd_compiler.rules import Linear, Rule, choices, parse_rule, register_rule, rule_of

aten = torch.ops.aten


def call(op, *shapes, rest=(), dtype=torch.float32):
    """A node of ``op`` on fake tensors of ``shapes``."""
    mode, graph, args = FakeTensorMode(), Graph(), []
    for i, shape in enumerate(shapes):
        args.append(graph.placeholder(f"x{i}"))
        with mode:
            args[-1].meta["val"] = torch.empty(shape, dtype=dtype)
    node = graph.call_function(op, (*args, *rest))
    with mode:
        node.meta["val"] = op(*(a.meta["val"] for a in args), *rest)
    return mode, node


def texts(found):
    return {" ".join(str(s) for s in (*c.operands, *c.results)) for c in found}


# --- templates ----------------------------------------------------------------------------------------------


def test_a_template_names_the_dims_of_operands_and_results():
    t = parse_rule("m k, k n -> m n")
    assert t.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert t.results == ((("m",), ("n",)),)


def test_a_template_may_hold_composite_dims_ones_and_leading_dims():
    t = parse_rule("... (a b) 1, head_dim -> ...")
    assert t.operands == (("...", ("a", "b"), ()), (("head_dim",),))
    assert t.results == (("...",),)
    assert parse_rule("k, k -> ").results == ((),)
    assert parse_rule("-> n").operands == ()


@pytest.mark.parametrize(
    "text, message",
    [
        ("m k, k n", "one '->' is needed"),
        ("m -> k -> n", "one '->' is needed"),
        ("m k, k & -> m", "unexpected '&'\n  m k, k & -> m\n         ^"),
        ("m -> 2", "unexpected '2'\n  m -> 2\n       ^"),
    ],
)
def test_a_wrong_template_is_an_error_that_points_at_the_character(text, message):
    with pytest.raises(ValueError) as error:
        parse_rule(text)
    assert message in str(error.value)


def test_a_rule_that_does_not_fit_its_op_is_an_error():
    _, node = call(aten.mm.default, (4, 2), (2, 3))
    fields = dict(linear=(), flops=None)
    with pytest.raises(ValueError, match="does not fit aten"):
        parse_rule("m k -> m k").instantiate(node, **fields)
    with pytest.raises(ValueError, match="does not fit shape"):
        parse_rule("m k n, k n -> m n").instantiate(node, **fields)
    with pytest.raises(ValueError, match="size 2 of dim m"):
        parse_rule("m k, m n -> m n").instantiate(node, **fields)


def test_leading_dims_are_aligned_to_the_right_and_broadcast():
    _, node = call(aten.add.Tensor, (4, 1, 3), (5, 3))
    found = parse_rule("... n, ... n -> ... n").instantiate(node, linear=(), flops=None)
    assert found.operands == ((("~1",), (), ("n",)), (("~0",), ("n",)))
    assert found.results == ((("~1",), ("~0",), ("n",)),)


def test_the_size_of_a_factor_that_stands_in_a_composite_dim_alone_is_inferred():
    _, node = call(aten.mm.default, (6, 4), (4, 2))
    found = parse_rule("(a n) k, k n -> (a n) n").instantiate(node, linear=(), flops=None)
    assert found.sizes == {"k": 4, "n": 2, "a": 3}


@pytest.mark.parametrize(
    "old, new, terms, windows",
    [
        ((6, 4), (24,), "f0 1 | f0", {"f0": {6, 24}}),
        ((24,), (6, 4), "f0 | f0 1", {"f0": {6, 24}}),
        ((4, 6, 5), (8, 3, 5), "f0 1 f1 | f0 1 f1", {"f0": {4, 8}}),
        ((2, 3), (3, 2), "f0 1 | f0 1", {"f0": {2, 3}}),
        ((5, 1), (1, 5), "f0 1 | 1 f0", {}),
        ((1, 4, 1, 3), (2, 1, 6, 1), "1 f0 1 1 | f0 1 1 1", {"f0": {2, 4}}),
        ((), (1,), " | 1", {}),
        ((0, 3), (3, 0), "1 1 | 1 1", {}),
    ],
)
def test_reshapes_are_parted_into_blocks(old, new, terms, windows):
    _, node = call(aten.view.default, old, rest=(list(new),))
    rule = rule_of(node)
    (left,), (right,) = rule.operands, rule.results
    assert " | ".join(" ".join(d[0] if d else "1" for d in term) for term in (left, right)) == terms
    assert rule.windows == windows


# --- choices ------------------------------------------------------------------------------------------------


def test_choices_of_a_matmul_on_one_axis():
    _, node = call(aten.mm.default, (4, 8), (8, 12))
    rule = rule_of(node)
    assert rule.flops == 2 * 4 * 8 * 12
    assert texts(choices(rule, Mesh({"a": 2}))) == {
        "{a: R} {a: R} {a: R}",
        "{a: S(0)} {a: R} {a: S(0)}",
        "{a: S(1)} {a: S(0)} {a: P(sum)}",
        "{a: R} {a: S(1)} {a: S(1)}",
        "{a: P(sum)} {a: R} {a: P(sum)}",
        "{a: R} {a: P(sum)} {a: P(sum)}",
    }


def test_axes_that_share_a_factor_nest_either_way():
    _, node = call(aten.relu.default, (8,))
    assert texts(choices(rule_of(node), Mesh({"a": 2, "b": 4}))) == {
        "{a: R, b: R} {a: R, b: R}",
        "{a: S(0), b: R} {a: S(0), b: R}",
        "{a: R, b: S(0)} {a: R, b: S(0)}",
        "{a: S(0)@a/b, b: S(0)@a/b} {a: S(0)@a/b, b: S(0)@a/b}",
        "{a: S(0)@b/a, b: S(0)@b/a} {a: S(0)@b/a, b: S(0)@b/a}",
    }


def test_a_factor_is_cut_unevenly_only_where_allowed():
    _, node = call(aten.relu.default, (6,))
    mesh = Mesh({"a": 4})
    assert len(choices(rule_of(node), mesh)) == 1
    assert len(choices(rule_of(node), mesh, {(6, 4)})) == 2
    _, node = call(aten.view.default, (6, 2), rest=([12],))
    assert len(choices(rule_of(node), mesh, {(6, 4)}, ())) == 2, "12 is even"
    _, node = call(aten.view.default, (6, 3), rest=([18],))
    assert len(choices(rule_of(node), mesh, {(6, 4)}, ())) == 1, "so must all the sizes of a window be"
    assert len(choices(rule_of(node), mesh, {(6, 4), (18, 4)}, ())) == 2


def test_an_axis_of_one_device_gives_no_choices():
    _, node = call(aten.relu.default, (6,))
    assert len(choices(rule_of(node), Mesh({"a": 1}))) == 1


def test_reductions_of_different_kinds_do_not_meet_in_one_spec():
    _, node = call(aten.alias.default, (6,))
    found = choices(rule_of(node), Mesh({"a": 2, "b": 2}), (), ("sum", "max"))
    for choice in found:
        ops = {p.reduce_op for p in choice.results[0].placements if isinstance(p, Partial)}
        assert len(ops) <= 1
    assert "{a: P(max), b: S(0)} {a: P(max), b: S(0)}" in texts(found)


def test_a_result_without_the_factor_is_partial_unless_the_form_made_it_whole():
    dims = ((("r",),),)
    for reduce, placement in (({}, Partial("sum")), ({"r": "max"}, Partial("max")), ({"r": "none"}, Replicate())):
        rule = Rule(operands=dims, results=((),), sizes={"r": 4}, reduce=reduce)
        assert choices(rule, Mesh({"a": 2}))[1].results[0].placements == (placement,)


def test_equal_rules_have_equal_keys():
    (_, one), (_, same), (_, other) = (call(aten.mm.default, (4, 8), (8, n)) for n in (6, 6, 2))
    assert rule_of(one).key() == rule_of(same).key() != rule_of(other).key()
    assert hash(rule_of(one).key()) == hash(rule_of(same).key())


# --- registry and emission ----------------------------------------------------------------------------------


@pytest.fixture
def library():
    kept = dict(rules.RULES)
    with torch.library._scoped_library("rules_test", "FRAGMENT") as lib:
        yield lib
    rules.RULES.clear()
    rules.RULES.update(kept)


def test_a_user_registers_a_rule(library):
    library.define("scaled(Tensor x, Tensor w) -> Tensor")
    library.impl("scaled", lambda x, w: x @ w, "CompositeExplicitAutograd")
    op = torch.ops.rules_test.scaled
    _, node = call(op.default, (4, 8), (8, 2))
    assert rule_of(node) is None
    register_rule(op, "b s, s d -> b d", linear=[[0]], whole="d")
    found = choices(rule_of(node), Mesh({"a": 2}))
    assert "{a: S(1)} {a: S(0)} {a: P(sum)}" in texts(found) and len(found) == 4


def test_an_op_tagged_as_pointwise_needs_no_rule(library):
    library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    _, node = call(torch.ops.rules_test.twice.default, (4, 8))
    assert rule_of(node).shardable() == ["d0", "d1"]


def emitted(rule, choice, mode, node, mesh):
    graph = Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty([int(n) for n in choice.operands[0].local_shape((4, 6), mesh)])
    return x, emit_choice(graph, mesh, mode, node, rule, choice, [x])


def test_emitted_results_carry_their_spec_and_global_shape():
    mode, node = call(aten.max.dim, (4, 6), rest=(1,))
    mesh = Mesh({"a": 2})
    rule = rule_of(node)
    choice = next(c for c in choices(rule, mesh) if c.results[0]["a"] == Shard(0))
    _, (values, where) = emitted(rule, choice, mode, node, mesh)
    assert values.meta["spec"] == where.meta["spec"] == Spec.parse("{a: S(0)}")
    assert values.meta["global"] == (4,) and values.meta["val"].shape == (2,)
    assert where.meta["val"].dtype == torch.int64


def test_a_form_that_returns_its_operand_gets_a_node_of_its_own():
    mode, node = call(aten.relu.default, (4, 6))
    mesh = Mesh({"a": 2})
    rule = Rule(operands=((("m",), ("n",)),), results=((("m",), ("n",)),), sizes={"m": 4, "n": 6}, form=lambda e, x: x)
    x, (y,) = emitted(rule, choices(rule, mesh)[1], mode, node, mesh)
    assert y is not x and "spec" not in x.meta


def test_a_form_whose_result_has_the_wrong_size_is_an_error():
    mode, node = call(aten.sum.dim_IntList, (4, 6), rest=([1],))
    rule = Rule(operands=(((), ()),), results=((("m",),),), sizes={"m": 4})
    mesh = Mesh({"a": 2})
    choice = choices(rule, mesh)[1]
    with pytest.raises(AssertionError, match=r"gives \(4,\) for \{a: S\(0\)\} of \(4,\), not \(2,\)"):
        emitted(rule, choice, mode, node, mesh)


def test_what_a_form_may_ask():
    _, node = call(aten.relu.default, (10, 6))
    e = Emit(Graph(), Mesh({"a": 2, "b": 2}), node, None)
    e.sizes, e.factor_axes, e.result_specs = {"m": 10, "n": 6}, {"m": ("b", "a")}, (Spec.parse("{a: R, b: R}"),)
    assert e.axes("m") == ("b", "a") and e.axes("n") == ()
    assert str(e.size("m")) == "chunk(5, 2, c_a)"
    assert str(e.offset("m")) == "5*c_b + start(5, 2, c_a)"
    assert e.shape() == (10, 6)


def test_linear_groups_are_data():
    assert Linear((0, 1)) == Linear((0, 1), ("sum",))


# --- fused attention of devices that this machine lacks -----------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_fused_attention_on_cuda_emits_local_shapes(kind, causal):
    """Values can't be proven here; what the operators' own shape functions say of the local pieces can."""
    mode, mesh, graph = FakeTensorMode(), Mesh({"a": 2}), Graph()

    def holder(into, shape, dtype=torch.bfloat16):
        node = into.placeholder("x")
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    def node_of(op, *args):
        node = graph.call_function(op, args)
        with mode:
            node.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def check(node, factors):
        rule = rule_of(node)
        assert set(rule.shardable()) == set(factors) and rule.flops > 0
        for choice in choices(rule, mesh):
            local, pieces = Graph(), []
            for operand, spec in zip(operands(node), choice.operands, strict=True):
                value = operand.meta["val"]
                pieces.append(holder(local, spec.local_shape(value.shape, mesh), value.dtype))
            emit_choice(local, mesh, mode, node, rule, choice, pieces)

    def part(node, i):
        value = node.meta["val"][i]
        return holder(graph, value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    q, k, v = (holder(graph, (4, 8, 64, 32)) for _ in range(3))
    factors = "b g" if causal or kind == "efficient" else "b g s"
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    flags = [0.0, causal] if kind == "flash" else [None, True, 0.0, causal]
    made = node_of(forward, q, k, v, *flags)
    check(made, factors.split())
    out = [part(made, i) for i in range(len(made.meta["val"]))]
    if kind == "flash":
        rest = [*out[:6], 0.0, causal, out[6], out[7]]
    elif kind == "efficient":
        rest = [None, *out[:4], 0.0, [True, True, True, False], causal]
    else:
        rest = [out[0], out[1], out[6], out[7], None, *out[2:6], 0.0, causal]
    check(node_of(backward, q, q, k, v, *rest), factors.split())
