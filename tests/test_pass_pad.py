"""A convolution of a padded value is one call with the padding, where that changes nothing else."""

import torch
from torch.nn import functional as F

from spmd_compiler import passes
from spmd_compiler.capture import capture_function
from spmd_compiler.passes import annotate, pad
from spmd_compiler.placements import Mesh, Spec
from spmd_compiler.verify import simulate_outputs

MESH = Mesh({"a": 2})
CALLS = ("convolution", "pad", "padded_convolution")
NAMES = [*CALLS, *(f"{name}_backward" for name in CALLS)]


def calls(function, *tensors, **close):
    """The names of what concerns padding in the graph of a function's loss and gradients, after the pass."""
    captured, _ = capture_function(
        lambda *given: (function(*given).square().sum(),), tensors, mesh=MESH, backward=True, name="f",
        specs=lambda name, kind, ndim, shape: None if kind == "output" else Spec.replicate(MESH),
    )  # fmt: skip
    local = passes.run(captured, passes.Options(profile="bytes"))
    wanted = [function(*tensors).square().sum()]
    wanted += torch.autograd.grad(wanted[0], tensors)
    for got, want in zip(simulate_outputs(local, [t.detach() for t in tensors]), wanted, strict=True):
        torch.testing.assert_close(got, want.detach(), **close)
    found = [n.target.name().split("::")[1] for n in pad.run(annotate.run(captured)).graph.graph.nodes
             if isinstance(n.target, torch._ops.OpOverload)]  # fmt: skip
    return sorted(n for n in found if n in NAMES)


def of(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_forward_and_backward_are_one_call_each():
    x, w = of(2, 2, 8, 5), of(3, 2, 3, 3)
    for mode in ("reflect", "replicate", "circular"):
        found = calls(lambda x, w, m=mode: F.conv2d(F.pad(x, (1, 1, 2, 0), mode=m), w), x, w)
        assert found == ["padded_convolution", "padded_convolution_backward"]


def test_two_convolutions_of_one_padded_value_keep_its_gradient_together():
    x, w, v = of(2, 2, 8), of(3, 2, 3), of(3, 2, 3)

    def both(x, w, v):
        y = F.pad(x, (1, 1), mode="reflect")
        return F.conv1d(y, w) + F.conv1d(y, v)

    assert calls(both, x, w, v) == [*["convolution_backward"] * 2, "pad", "pad_backward", *["padded_convolution"] * 2]


def test_other_padding_stays():
    x, w = of(2, 2, 8), of(3, 2, 3)
    assert "padded_convolution" not in calls(lambda x, w: F.conv1d(F.pad(x, (1, 1), mode="reflect"), w, padding=1), x, w)
    deep = of(3, 4, 3)  # its channels are padded
    assert "padded_convolution" not in calls(lambda x, w: F.conv1d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w), x, deep)
    turned = of(2, 3, 3)
    assert "padded_convolution" not in calls(
        lambda x, w: F.conv_transpose1d(F.pad(x, (1, 1), mode="reflect"), w, padding=1), x, turned
    )


def test_what_is_done_to_elements_goes_before_the_padding():
    x, w = of(2, 2, 8), of(3, 2, 3)

    def cast(x, w):
        return F.conv1d(F.pad(x.float(), (1, 1), mode="reflect").double(), w)

    assert calls(cast, x, w, rtol=1e-6, atol=1e-6) == ["padded_convolution", "padded_convolution_backward"]
    captured, _ = capture_function(
        lambda x, w: F.conv1d(F.pad(x, (1, 1), mode="circular").abs().to(torch.float32), w),
        (x.detach(), w.detach().float()), mesh=MESH, backward=False, name="f",
        specs=lambda name, kind, ndim, shape: None if kind == "output" else Spec.replicate(MESH),
    )  # fmt: skip
    names = [n.target.name().split("::")[1] for n in pad.run(annotate.run(captured)).graph.graph.nodes
             if isinstance(n.target, torch._ops.OpOverload)]  # fmt: skip
    assert names == ["abs", "convert_element_type", "padded_convolution"]
