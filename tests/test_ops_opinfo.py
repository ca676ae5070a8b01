"""The proof of test_ops.py over the samples of torch's own operator database.

Every ATen call that a sample makes, forward and backward, is a case: if its op has a rule, each choice on one axis
must equal the op on global values.
"""

import warnings

import pytest
import torch
from ops_cases import Case
from test_ops import joint_node, prove
from torch.testing._internal import common_methods_invocations as database  # needs expecttest
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_compiler.ir import operands
from spmd_compiler.placements import Mesh
from spmd_compiler.rules import ANY_OP, choices, rule_of

SAMPLES = 4  # of one operator
EACH = 6  # cases of one ATen overload
SKIPPED = ("sparse", "fft", "linalg", "ldl", "svd", "geqrf", "lu", "cholesky", "ormqr", "qr", "stft", "istft", "masked",
           "special", "lstsq", "pinverse", "nn.functional.ctc", "nn.functional.grid")  # fmt: skip
EXACT = (torch.float64, torch.complex128, torch.float32, torch.complex64, torch.int64, torch.int32, torch.bool,
         torch.uint8, torch.int8, torch.int16)  # fmt: skip
UNKNOWN = ("DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedOperatorException")
MESH = Mesh({"a": 2})

seen: dict[str, set[str]] = {}


class Recorder(TorchDispatchMode):
    """Keeps the functional calls that no test has proven yet."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))
        out = func(*args, **kwargs)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func)
        plain = all(t.layout == torch.strided and t.dtype in EXACT for t in tensors)
        if func.namespace in ("aten", "prims") and not func._schema.is_mutable and not random and plain:
            key = str(pytree.tree_map_only(torch.Tensor, lambda x: (tuple(x.shape), x.dtype), (args, kwargs)))
            known = seen.setdefault(str(func), set())
            if key not in known and len(known) < EACH and sum(t.numel() for t in tensors) < 20000:
                known.add(key)
                self.calls.append((func, *copies))
        return out


def calls_of(op):
    torch.manual_seed(0)
    dtype = next(t for t in (torch.float64, torch.int64, torch.bool, torch.complex128) if t in op.dtypes)
    grad = dtype == torch.float64 and op.supports_autograd
    recorder = Recorder()
    for sample, _ in zip(op.sample_inputs("cpu", dtype, requires_grad=grad), range(SAMPLES), strict=False):
        with recorder:
            out = op(sample.input, *sample.args, **sample.kwargs)
            outs = [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
            if outs:
                torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    return recorder.calls


@pytest.mark.parametrize(
    "op",
    [o for o in database.op_db if not o.name.startswith(SKIPPED)],
    ids=lambda o: f"{o.name}.{o.variant_test_name}".strip("."),
)
@pytest.mark.filterwarnings("ignore")
def test_samples(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            calls = calls_of(op)
        except Exception as error:
            pytest.skip(f"the sample itself fails: {type(error).__name__}")
    for func, args, kwargs in calls:
        try:
            mode, node, reals = joint_node(func, args, kwargs)
        except Exception as error:
            assert type(error).__name__ in UNKNOWN, error
            continue
        rule = rule_of(node)
        if rule is None:
            continue
        truth = func(*args, **kwargs)
        truth = list(truth) if isinstance(truth, (tuple, list)) else [truth]
        case = Case(func, lambda: None, rtol=1e-5)
        for choice in choices(rule, MESH, {(n, 2) for f in rule.sizes for n in rule.extents(f)}, ANY_OP):
            try:
                prove(case, MESH, rule, mode, node, reals, truth, choice)
            except Exception as error:
                shapes = [tuple(o.meta["val"].shape) for o in operands(node)]
                raise AssertionError(f"{func} {shapes} {args} {choice}:\n{error}") from error
