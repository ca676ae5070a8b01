"""Bad input: what it says, and that it says it."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from versions import TORCH

import spmd_compiler as spmd

MESH = {"dp": 2, "tp": 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def export(placements, x=None, fn=None, mesh=MESH, **options):
    return spmd.export(
        fn or Net(), (torch.randn(4, 8) if x is None else x,), mesh=mesh, placements=placements, **options
    )


@pytest.mark.parametrize(
    "placements, words",
    [
        ({"up.wieght": {"tp": Shard(0)}}, ["'up.wieght'", "did you mean 'up.weight'"]),
        ({"up.weight": {"tp": Shard(2)}}, ["'up.weight'", "Shard(2)", "'tp'", "out of range", "2 dims"]),
        ({"up.weight": {"ep": Shard(0)}}, ["'up.weight'", "no axis 'ep'", "dp, tp"]),
        ({"up.weight": [Shard(0)]}, ["'up.weight'", "1 placements", "2 axes"]),
        ({"out": {"tp": Partial()}}, ["'out'", "P(sum)", "partial"]),
        ({"x": {"tp": 3}}, ["'x'", "3", "Shard"]),
    ],
)
def test_placements(placements, words):
    with pytest.raises(spmd.SpmdError) as error:
        export(placements)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "mesh, words",
    [
        ({}, ["at least one axis"]),
        ({"dp": 0}, ["'dp'", "0", "positive"]),
        ({"2d": 2}, ["'2d'", "identifier"]),
        (7, ["DeviceMesh", "int"]),
    ],
)
def test_meshes(mesh, words):
    with pytest.raises(spmd.SpmdError) as error:
        export({}, mesh=mesh)
    for word in words:
        assert word in str(error.value)


def test_profile():
    with pytest.raises(spmd.SpmdError, match=r"'h900'.*h100"):
        export({}, profile="h900")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"args": None}, "a tuple of arguments"),
        ({"args": {"x": 1}}, "a tuple of arguments"),
        ({"args": (Batch(torch.ones(4, 8)),)}, "register_dataclass"),
        ({"kwargs": [1]}, "kwargs is a mapping"),
        ({"placements": [Shard(0)]}, "placements is a mapping"),
        ({"placements": {0: Shard(0)}}, "not by 0"),
        ({"placements": "auto"}, r'\{"\*": "auto"\}, not \'auto\''),
        ({"model_or_fn": Net}, r"Net is a class of modules; give one of them: Net\(\.\.\.\)"),
        ({"name": 3}, "name is a text, not 3"),
        ({"profile": 3}, "not 3"),
        ({"profile": "H100"}, "did you mean 'h100'"),
        ({"backward": "yes"}, "True or False"),
        ({"mesh": 3}, "int"),
        ({"memory_budget": "much"}, "'much' is no number of bytes"),
        ({"memory_budget": -1}, "-1 is no number of bytes"),
        ({"memory_budget": float("nan")}, "nan is no number of bytes"),
        ({"optimizer_states": -1}, "optimizer_states=-1"),
        ({"optimizer_states": "two"}, "optimizer_states='two'"),
        ({"forbid": "all_gather[zz]"}, "no axis 'zz'"),
        ({"expect": {"*[zz]": 1}}, "no axis 'zz'"),
    ],
)
def test_arguments_of_export(arguments, words):
    with pytest.raises(spmd.SpmdError, match=words):
        spmd.export(**{"model_or_fn": Net(), "args": (torch.ones(4, 8),), "mesh": MESH, **arguments})


BIG = torch.randn(50, 50)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(2) for _ in range(200)])

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize(
    "arguments",
    [
        *({name: BIG} for name in (
            "args", "kwargs", "placements", "backward", "verify", "overlap", "buckets", "mesh", "profile", "name", "forbid",
            "expect", "max_wire_bytes", "max_memory", "memory_budget", "optimizer_states", "dynamic_shapes", "dump",
        )),
        {"placements": {"x": BIG}}, {"placements": {"x": {"dp": BIG}}}, {"placements": {BIG: "auto"}}, {"mesh": {"dp": BIG}},
        {"backward": [BIG, {"b": Batch(BIG)}]}, {"backward": Batch(BIG)}, {"backward": BIG.numpy()},
        {"model_or_fn": lambda x, y=BIG: x, "args": (1, 2, 3)}, {"placements": {"x.y": "R"}, "model_or_fn": Many()},
    ], ids=lambda given: ", ".join(given),
)  # fmt: skip
def test_errors_are_short_and_hold_no_values(arguments):
    with pytest.raises(spmd.SpmdError) as error:
        spmd.export(**{"model_or_fn": Net(), "args": (torch.ones(4, 8),), "mesh": MESH, **arguments})
    assert len(str(error.value)) < 260 and "tensor(" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("given", [Shard(0), "S(0)", ["S(0)"], {"tp": "S(0)"}, "{tp: S(0)}", {"tp": Shard(-2)}], ids=str)
def test_a_placement_and_its_text_are_taken_alike(given):
    one, two = spmd.Mesh({"tp": 2}), spmd.Mesh({"dp": 2, "tp": 2})
    assert spmd.Spec.of(one, given, 2) == spmd.Spec(("tp",), (Shard(0),))
    program = export({}, fn=lambda x: spmd.constrain(x, given), mesh=one)
    assert program.placements["out"]["tp"] == Shard(0)
    if isinstance(given, dict) or given == "{tp: S(0)}":
        assert spmd.Spec.of(two, given, 2) == spmd.Spec(("dp", "tp"), (Replicate(), Shard(0)))
    else:
        for refused in (lambda: spmd.Spec.of(two, given, 2), lambda: export({}, fn=lambda x: spmd.constrain(x, given))):
            with pytest.raises(spmd.SpmdError, match=r"1 placements .* for the 2 axes .* name the axes: {'dp': Shard"):
                refused()


def test_auto_is_for_all_axes():
    texts = [export({"up.*": given}, torch.randn(4, 8, requires_grad=True)).text() for given in (
        "auto", {"dp": "auto", "tp": "auto"}, ["auto", "auto"])]  # fmt: skip
    assert len(set(texts)) == 1
    for given in ({"dp": "auto"}, ["auto", Replicate()]):
        with pytest.raises(spmd.SpmdError, match=r"'up.weight'.*\"auto\" is no placement on one axis"):
            export({"up.*": given})
    for given, meant in [
        ("atuo", '"auto"'), ({"dp": "Auto"}, '"auto"'), ("shard(0)", r"'S\(0\)'"), ({"dp": "S1"}, r"'S\(1\)'"),
        ({"dp": "replicate"}, "'R'"), ({"dp": "Partial(sum)"}, r"'P\(sum\)'"),
    ]:  # fmt: skip
        with pytest.raises(spmd.SpmdError, match=f"'up.weight'.* is not 'R', .* did you mean {meant}"):
            export({"up.*": given})


def test_arguments_of_the_rest():
    program = export({})
    for call, words in [
        (lambda: spmd.Mesh([2]), "a mesh is made of"),
        (lambda: spmd.Spec("dp", (Shard(0),)), "a Spec has tuples"),
        (lambda: spmd.Spec.parse(3), "3 is not a text"),
        (lambda: spmd.Spec.parse("{dp: S(0), dp: R}"), "names an axis twice"),
        (lambda: spmd.Link(1.0, 1.0, {"all_gathr": spmd.Link(1.0, 1.0)}), "did you mean 'all_gather'"),
        (lambda: spmd.local_map(3), "local_map runs a function"),
        (lambda: spmd.constrain(3, {}), "constrain takes a tensor, not 3"),
        (lambda: spmd.constrain(BIG, 3), "3 is no placement"),
        (lambda: spmd.Spec.parse("{dp: R}")["tp"], "no axis 'tp'; its axes are dp"),
        (lambda: export({}, fn=torch.abs, x=BIG.numpy()), "'args.0' is an array of numpy"),
        (lambda: dataclasses.replace(spmd.PROFILES["cpu"], matmul={"4": 1.0}), "matmul has rates by bytes .* not by '4'"),
        (lambda: spmd.explain(program, BIG), "no collective a float32 tensor"),
        (lambda: program.use(3), "a mapping from names to tensors"),
        (lambda: program.package(3), "give its path, not 3"),
        (lambda: program.package("/none/p.pt2"), "there is no folder /none"),
        (lambda: spmd.register_rule((), "m -> m"), "no operator"),
        (lambda: spmd.register_rule(torch.ops.aten.digamma, "m -> m", whole=3), "whole can't be 3"),
    ]:
        with pytest.raises(spmd.SpmdError, match=words):
            call()
    with pytest.raises(spmd.SpmdError, match="a rule is a text"):
        spmd.register_rule(torch.ops.aten.digamma, None)
    for op, text, more, words in [
        (torch.digamma, "m -> m", {}, "is no operator: give torch.ops.mylib.myop"),
        ("digamma", "m -> m", {}, "'digamma' is no operator"),
        (torch.ops.aten.digamma, "m", {}, "one '->' is needed"),
        (torch.ops.aten.digamma, "m ? -> m", {}, r"unexpected '\?'"),
        (torch.ops.aten.mm.default, "m k -> m k", {}, r"has 1 -> 1 terms; aten\.mm\.default has 2 -> 1 tensors"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"whole": "x"}, "has no factor 'x' for whole; it has k, m, n"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"flops": "m k z"}, "has no factor 'z' for flops"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"reduce": {"k": "mean"}}, "reduced by one of sum, max.* 'mean'"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"linear": [2]}, r"groups of operands 0\.\.1, such as"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"linear": [(2,)]}, r"groups of operands 0\.\.1, such as"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {"form": "x"}, "form is a function"),
    ]:  # fmt: skip
        with pytest.raises(spmd.SpmdError, match=words):
            spmd.register_rule(op, text, **more)
    with pytest.raises(TypeError, match="wholes"):
        spmd.register_rule(torch.ops.aten.digamma, "m -> m", wholes="m")
    with pytest.raises(spmd.SpmdError, match="not of 3"):
        spmd.Mesh(3)


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda x: x[: int(x.sum().item())], r"_local_scalar_dense.* gives a shape or a number that depends on data"),
        (lambda x: x.sum() if x[x > 0].shape[0] > 3 else x.mean(), r"whether u0 > 3 depends on data.* torch._check"),
        (lambda x: torch.cond(x.sum() > 0, torch.sum, torch.mean, (x[x > 0],)), "body of a higher-order operator has no" if TORCH > (2, 11) else "whether u0 depends on data"),
    ],
)
def test_data_dependent_numbers_name_the_line_and_the_remedy(fn, words):
    with pytest.raises(spmd.SpmdError, match=rf"test_errors.py.*{words}"):
        export({"x": {"dp": Shard(0)}}, fn=fn)


def test_sizes_that_data_decide_are_not_those_of_the_user():
    x = torch.ones(8, 4)
    with pytest.raises(spmd.SpmdError, match=r"a size that depends on data, in a program with dynamic_shapes"):
        spmd.export(lambda x: x[x > 0], (x,), mesh=MESH, dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    with pytest.raises(spmd.SpmdError, match="'u0': such names are those of sizes that data decide"):
        spmd.export(lambda x: x * 2, (x,), mesh=MESH, dynamic_shapes={"x": {0: torch.export.Dim("u0")}})
    program = spmd.export(lambda x, y: x[x > 0] * y[y > 0], (x, x), mesh=MESH)
    with pytest.raises(ValueError, match="a selection has 0 elements where it is taken for one of 32"):
        program.simulate(x, -x)
    with pytest.raises(spmd.SpmdError, match=r"data decide a size \(u0\), and a package has the same sizes"):
        program.package("p.pt2")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: torch.eye(4).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_tensors_that_have_no_placement(make, words):
    with pytest.raises(spmd.SpmdError, match=words):
        export({}, x=make())


@pytest.mark.parametrize(
    "fn, words",
    [
        (None, "NoneType"),
        (5, "int"),
        (lambda x: x, "real scalar loss"),
        (lambda x: (x * 1j).sum(), "real scalar loss"),
        (torch.jit.script(torch.nn.ReLU()), "TorchScript"),
    ],
)
def test_programs_that_cannot_be_traced(fn, words):
    with pytest.raises(spmd.SpmdError, match=words):
        spmd.export(fn, (torch.ones(4, requires_grad=True),), mesh=MESH, backward=True)


@torch.library.custom_op("spmd_tests::spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    return x.amax() - x.amin()


@spread.register_fake
def _(x):
    return x.new_empty(())


def test_an_op_without_a_rule_is_named_and_right():
    x = torch.randn(4, 4, dtype=torch.float64)
    program = spmd.export(spread, (x,), mesh=MESH, placements={"args.0": {"dp": Shard(0)}})
    assert program.replicated_ops == ("spmd_tests.spread.default",)
    torch.testing.assert_close(program.simulate(x), x.amax() - x.amin())


def test_constraints_are_met_or_refused():
    def fn(x):
        return spmd.constrain(x * 2, {"tp": Shard(1)}) + 1

    program = export({"x": {"dp": Shard(0)}}, fn=fn)
    node = next(n for n in program.local.graph.graph.nodes if n.meta.get("origin", "").startswith("mul"))
    assert node.meta["spec"]["tp"] == Shard(1) or any(c.axis == "tp" for c in program.collectives)
    with pytest.raises(spmd.SpmdError, match="out of range"):
        export({}, fn=lambda x: spmd.constrain(x, {"tp": Shard(5)}))
    with pytest.raises(spmd.SpmdError, match=r"test_errors.py:\d+.*P\(sum\).*partial"):
        export({}, fn=lambda x: spmd.constrain(x * 2, {"tp": Partial()}))
    assert program.placements["x"]["tp"] == Replicate()


KEPT = []


def keeps(x):
    KEPT.append(x * 2)
    return (KEPT[0] * x).sum()


def raises(x):
    raise RuntimeError("my own")


BESIDE = torch.ones(8, requires_grad=True)


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda x: x.view(3, 3).sum(), r"test_errors.py:\d+: torch raises RuntimeError.*shape '\[3, 3\]' is invalid"),
        (keeps, rf"test_errors.py:\d+: torch raises {'Assertion' if TORCH > (2, 11) else 'Runtime'}Error.*nothing kept beyond the call"),
        (lambda x: x[x > 0].prod(), r"test_errors.py:\d+: whether Eq\(u1, 0\) depends on data"),
        (lambda x: (x * BESIDE).sum(), r"test_errors.py:\d+: the program reads a tensor of shape \(8,\)"),
    ],
)
def test_what_torch_raises_names_the_line(fn, words):
    with pytest.raises(spmd.SpmdError, match=words):
        export({}, torch.randn(4, 8, requires_grad=True), fn, backward=True)
    with pytest.raises(RuntimeError, match=r"^my own$"):
        export({}, fn=raises)
