"""`torch.compile(f, backend="spmd")` works where only the wheel is installed, with no import of ours."""

import importlib.metadata
import importlib.util
import sys

import torch


def f(x, w):
    return torch.nn.functional.silu(x @ w).sum()


assert not any(name.partition(".")[0] == "spmd_compiler" for name in sys.modules)
x, w = torch.randn(4, 8), torch.randn(8, 2, requires_grad=True)
out = torch.compile(f, backend="spmd")(x, w)
(grad,) = torch.autograd.grad(out, w)
expected = f(x, w)
torch.testing.assert_close(out, expected)
torch.testing.assert_close(grad, torch.autograd.grad(expected, w)[0])

spec = importlib.util.find_spec("spmd_compiler.passes")
assert spec is not None and spec.origin is not None, "spmd_compiler.passes is not in the wheel"
files = {str(f) for f in importlib.metadata.files("spmd_compiler") or ()}
for wanted in ("spmd_compiler/passes/__init__.py", "spmd_compiler/ops/__init__.py", "spmd_compiler/py.typed",
               "pytest_spmd.py", "spmd_compiler/report.html"):
    assert wanted in files, f"{wanted} is not in the wheel"
print("the wheel works on its own")
