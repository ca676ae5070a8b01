"""Who may import whom, where private torch names may stand, and how long a module may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = 600

# A module imports only from levels above it in this table.
LEVELS = (
    ("symbolic", "progress", "words"),
    ("placements", "collectives"),
    ("masks", "resampling", "dtensors", "cost", "dims"),
    ("decompositions", "ir"),
    ("bodies", "devices"),
    ("annotations", "draws", "rules", "redistribute", "simulate"),
    ("constraints",),
    ("text",),
    ("emit",),
    ("forms",),
    ("forms.ranges", "forms.values"),
    ("forms.border", "forms.known", "forms.reduce"),
    ("forms.order", "forms.window", "library"),
    ("family",),
    ("reader",),
    ("diff",),
    ("contracts",),
    ("ops.attention", "ops.create", "ops.diagonal", "ops.grouped", "ops.higher_order", "ops.index", "ops.linalg",
     "ops.matmul", "ops.pointwise", "ops.pool", "ops.ranges", "ops.reduce", "ops.view", "ops.window"),
    ("ops.sort",),
    ("ops",),
    ("problem", "memory", "remedies", "timeline"),
    ("plans", "quotient"),
    ("network",),
    ("linear",),
    ("solve", "verify"),
    ("blend",),
    ("hidden",),
    ("passes.annotate", "passes.unmerge", "passes.pad", "passes.propagate", "passes.partition", "passes.simplify",
     "passes.bucket",
     "passes.overlap", "passes.split"),
    ("passes",),
    ("explain",),
    ("dynamo",),
    ("sizes", "symints"),
    ("joint",),
    ("capture", "local_map", "lower"),
    ("aot",),
    ("runtime",),
    ("store",),
    ("backend", "program"),
    ("parallelize",),
    ("report", "hf"),
    ("cli", "pytest_plugin"),
    ("", "__main__"),
)  # fmt: skip
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}

# Supporting a new torch means reading these files.
PRIVATE = {"aot", "capture", "dtensors", "dynamo", "joint", "lower", "runtime", "simulate", "sizes",
           "symints"}
# The type of an operator has no public name.
EVERYWHERE = {"torch._ops.OpOverload", "torch.utils._pytree"}


def modules():
    """Every module of the package, by its name without ``spmd_compiler.``."""
    found = {}
    for base, prefix in ((ROOT / "spmd_compiler", ()), (ROOT / "passes", ("passes",))):
        for path in base.rglob("*.py"):
            parts = prefix + path.relative_to(base).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def imports(source, name, is_package):
    """The modules of the package that ``source``, the text of module ``name``, imports."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    package = [p for p in package if p]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "spmd_compiler"]
            yield from (n.removeprefix("spmd_compiler").removeprefix(".") for n in names)
            continue
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif (node.module or "").split(".")[0] == "spmd_compiler":
            base = []
        else:
            continue
        base = base + [p for p in (node.module or "").split(".") if p and p != "spmd_compiler"]
        for alias in node.names:
            deeper = ".".join([*base, alias.name])
            yield deeper if deeper in LEVEL else ".".join(base)


def upward(source, name, is_package=False):
    return [other for other in imports(source, name, is_package) if LEVEL.get(other, -1) >= LEVEL[name]]


def private_names(source):
    """The private torch names in ``source``: imported ones, and chains such as ``torch._C.x`` (operators apart)."""
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Attribute) and (chain := dotted(node)):
            found.add(chain)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return {n for n in found if is_private(n) and not any(f"{n}.".startswith(f"{e}.") for e in EVERYWHERE)}


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def is_private(name):
    root, *rest = name.split(".")
    if root not in ("torch", "functorch") or rest[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_every_module_has_a_level():
    assert sorted(set(MODULES) - set(LEVEL)) == []


@pytest.mark.parametrize("name", sorted(set(MODULES) & set(LEVEL)))
def test_imports_point_to_lower_levels(name):
    path = MODULES[name]
    assert upward(path.read_text(), name, path.name == "__init__.py") == []


@pytest.mark.parametrize("name", sorted(set(MODULES) - PRIVATE))
def test_private_torch_names_stay_in_their_files(name):
    assert sorted(private_names(MODULES[name].read_text())) == []


@pytest.mark.parametrize("path", sorted(
    p for folder in ("spmd_compiler", "passes", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")
), ids=lambda p: str(p.relative_to(ROOT)))  # fmt: skip
def test_no_module_is_long(path):
    assert len(path.read_text().splitlines()) <= LINES


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("ir", "from .passes import run", ["passes"]),
        ("ir", "from . import solve", ["solve"]),
        ("ir", "from .text import Text", ["text"]),
        ("ir", "import spmd_compiler.lower", ["lower"]),
        ("ir", "from spmd_compiler.passes.split import run", ["passes.split"]),
        ("passes.split", "from . import bucket", ["passes.bucket"]),
        ("passes.split", "from ..capture import Captured", ["capture"]),
        ("ir", "from .placements import Spec\nfrom . import symbolic", []),
        ("passes.split", "from ..ir import Captured\nfrom .. import ops", []),
        ("symbolic", "def f():\n    from .program import export", ["program"]),
    ],
)
def test_upward_finds_imports(name, source, found):
    assert upward(source, name) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._inductor.compile_fx import compile_fx", {"torch._inductor.compile_fx.compile_fx"}),
        ("from torch.distributed.tensor import _ops", {"torch.distributed.tensor._ops"}),
        ("import torch\nx = torch._C._distributed_c10d.f()", {"torch._C._distributed_c10d.f"}),
        ("import torch\nx = torch.Tensor._make_subclass", {"torch.Tensor._make_subclass"}),
        ("import torch\nx = torch._ops.OpOverload", set()),
        ("import torch\nx = torch._ops.HigherOrderOperator", {"torch._ops.HigherOrderOperator"}),
        ("import torch\nx = torch.ops.aten._softmax.default\ny = torch.nn.functional.silu", set()),
    ],
)
def test_private_names_are_found(source, found):
    assert private_names(source) == found
