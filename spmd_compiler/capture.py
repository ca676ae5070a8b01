"""From a program to its joint graph: functional ATen calls in global shapes, forward and backward.

Two entries: `capture_graph` takes Dynamo's graph (the backend), `capture_function` a module or function ahead of
time.  Both trace with AOTAutograd and Inductor's decompositions (`joint`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
import torch.fx.traceback as fx_traceback
from torch._functorch._aot_autograd import descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from . import dynamo
from .annotations import constrain_op, to_local_op, tracing
from .dims import Dims, dynamic_sizes, named_dims
from .dtensors import axes_within, spec_from, spec_in, spec_within
from .ir import Captured, Input, source_line
from .joint import Front, OutputIndex, UserLines, assemble, check_dense, is_tangent, trace
from .placements import Mesh, Spec, SpmdError
from .sizes import OpenSizes, check_results, release_data
from .symbolic import IntExpr, sized
from .words import listed, shown

aten = torch.ops.aten


# --- from Dynamo --------------------------------------------------------------------------------------------

_MEMBER = re.compile(r"\._(modules|parameters|buffers)\['([^']*)'\]")


def _name_and_kind(node: Node) -> tuple[str, str]:
    """The qualified name of a parameter or buffer, or the name of an input, of a placeholder of Dynamo's graph."""
    argument = node.meta.get("grapharg")
    source = argument.source.name if argument is not None and argument.source is not None else node.name
    example = argument.example if argument is not None else None
    members = _MEMBER.findall(source)
    if members:
        kind = "param" if members[-1][0] == "parameters" else "buffer"
        return ".".join(name for _, name in members), kind
    name = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    name = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", name).removeprefix("self.")
    return name, "param" if isinstance(example, torch.nn.Parameter) else "input"


def mesh_of_graph(gm: GraphModule, given: Any) -> DeviceMesh | Mesh | None:
    """The mesh of a Dynamo graph: the one given, or that of its DTensors; None if it has none."""
    if given is not None:
        return given
    meshes: list[DeviceMesh] = []
    for node in gm.graph.nodes:
        found = node.meta.get("spmd_mesh") or (dynamo.global_mesh(node) if node.op == "placeholder" else None)
        if found is not None and found not in meshes:
            meshes.append(found)
    if not meshes:
        return None
    for largest in sorted(meshes, key=lambda m: -len(m.shape)):
        if all(axes_within(m, largest) is not None for m in meshes):
            return largest
    return meshes[0]._get_root_mesh()


def _static(value: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor with numbers for sizes (symbols take the value at hand, and are guarded)."""
    sizes, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    if all(type(s) is int for s in (*value.shape, *value.stride())) and type(value.storage_offset()) is int:
        return value
    with fake_mode:
        return torch.empty_strided(
            sizes, strides, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )


def capture_graph(gm: GraphModule, mesh: Any = None, name: str = "main") -> Front | None:
    """Capture Dynamo's graph; None when neither it nor the caller knows a mesh."""
    device_mesh = mesh_of_graph(gm, mesh)
    if device_mesh is None:
        return None
    abstract = Mesh.of(device_mesh)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    check_dense([n.meta.get("example_value") for n in placeholders])
    tracing_mode = detect_fake_mode([n.meta.get("example_value") for n in placeholders])
    returned = [n if isinstance(n, Node) else None for n in pytree.tree_leaves(gm.graph.output_node().args[0])]
    constants = [v for v in pytree.tree_leaves(gm.graph.output_node().args[0])]
    returned = [
        n if n is not None and isinstance(n.meta.get("example_value"), torch.Tensor) else None for n in returned
    ]
    is_global = [dynamo.global_mesh(n) is not None for n in returned if n is not None]

    _name_axes(gm, device_mesh)
    wrapped, taken = _specialised(gm, placeholders, returned)
    examples = [_static(placeholders[i].meta["example_value"], tracing_mode) for i in taken]
    joint = trace(wrapped, examples)

    named = []
    for i in taken:
        label, kind = _name_and_kind(placeholders[i])
        found = dynamo.dtensor_of(placeholders[i])
        spec = spec_in(found, device_mesh) if found is not None else Spec.replicate(abstract)
        named.append(Input(label, kind, spec))
    names = _unique([n.name for n in named])
    named = [Input(label, n.kind, n.spec) for label, n in zip(names, named, strict=True)]

    labels = ["out"] if len(is_global) == 1 else [f"out.{i}" for i in range(len(is_global))]
    whole = Spec.replicate(abstract)
    kept = [n for n in returned if n is not None]
    specs = [_output_spec(n, device_mesh) if g else whole for n, g in zip(kept, is_global, strict=True)]
    inputs = {placeholders[i].meta["example_value"].untyped_storage()._cdata for i in taken}
    shared = [n.meta["example_value"].untyped_storage()._cdata in inputs for n in kept]
    front = assemble(joint, named, labels, specs, abstract, tracing_mode, name, shared)
    release_data(front.captured, tracing_mode)
    front.arguments = [taken[a] if isinstance(a, int) else a for a in front.arguments]
    order = iter(front.results)
    front.results = [next(order) if n is not None else _number(c) for n, c in zip(returned, constants, strict=True)]
    front.is_global = is_global
    front.device_mesh = device_mesh if isinstance(device_mesh, DeviceMesh) else None
    return front


def _output_spec(node: Node, mesh: DeviceMesh | Mesh) -> Spec | None:
    """The spec that hooks behind the program expect; None: the solver's."""
    part, value = dynamo.global_mesh(node), node.meta["example_value"]
    placements = dynamo.output_placements(node)
    if part is None or placements is None:
        return None
    return spec_within(spec_from(placements, part, value.dim()), part, mesh, value.shape)


def _name_axes(gm: GraphModule, mesh: DeviceMesh | Mesh) -> None:
    """Write the specs of annotations, given on the axes of the mesh that their values are on, on those of ``mesh``."""
    for node in gm.graph.nodes:
        part = node.meta.get("spmd_spec_mesh")
        if part is None or part == mesh:
            continue
        value = node.args[0] if node.target is to_local_op else node
        args = list(node.args)
        for i in (1,) if node.target is constrain_op else (1, len(args) - 1):
            args[i] = str(spec_within(Spec.parse(args[i]), part, mesh, value.meta["example_value"].shape))
        if node.target is not constrain_op:
            args[2] = list(map(int, mesh.shape))
        node.args = tuple(args)


def _number(value: Any) -> Any:
    """The constant that a result which is no tensor has."""
    if isinstance(value, Node):
        value = value.meta.get("example_value")
    check_results([value])
    return int(value) if isinstance(value, torch.SymInt) else value


def _specialised(
    gm: GraphModule, placeholders: list[Node], returned: list[Node | None]
) -> tuple[GraphModule, list[int]]:
    """A copy of Dynamo's graph whose inputs are tensors alone, whose outputs are tensors alone, cloned."""
    graph = torch.fx.Graph()
    copies: dict[Node, Any] = {}
    taken: list[int] = []
    for i, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            copies[node] = graph.node_copy(node)
            taken.append(i)
        elif isinstance(value, (torch.SymInt, int)):
            copies[node] = int(value)
        elif isinstance(value, (torch.SymFloat, float)):
            copies[node] = float(value)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    outputs = []
    for node in returned:
        if node is not None:
            clone = graph.call_function(torch.clone, (copies[node],))
            outputs.append(clone)
    graph.output(tuple(outputs))
    return GraphModule(gm, graph), taken


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for n in names:
        seen[n] = seen.get(n, -1) + 1
        out.append(n if seen[n] == 0 else f"{n}.{seen[n]}")
    return out


# --- ahead of time ------------------------------------------------------------------------------------------


@dataclass
class Binding:
    """How a user's arguments and results map to those of a captured function."""

    signature: inspect.Signature
    owner: torch.nn.Module | None
    slots: list[tuple[str, Any]]  # of each placeholder: ("state", name), ("input", name) or ("constant", tensor)
    out_tree: Any
    results: list[Any]
    grad_names: list[str] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)  # by input: (shape, dtype), or the value of a constant
    is_global: list[bool] = field(default_factory=list)
    weights: Mapping[str, torch.Tensor] | None = None  # parameters and buffers by name; None: those of the owner

    def sizes(self, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
        """The sizes that dynamic dims have in a call."""
        given = dict(named_inputs(self.signature, args, kwargs or {}))
        wanted = [(n, k.shape, given.get(n)) for n, k in self.expected.items() if isinstance(k, Kind)]
        return dims.solve((n, shape, tuple(v.shape)) for n, shape, v in wanted if isinstance(v, torch.Tensor))

    def at(self, sizes: Mapping[str, int]) -> Binding:
        """The same for these sizes of dynamic dims."""
        expected = {n: Kind(sized(k.shape, sizes), k.dtype) if isinstance(k, Kind) else k
                    for n, k in self.expected.items()}  # fmt: skip
        return dataclasses.replace(self, expected=expected, results=[sized(r, sizes) for r in self.results])

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """Tensors in placeholder order (parameters, buffers and inputs) for a call ``f(*args, **kwargs)``."""
        state = self.weights if self.weights is not None else named_state(self.owner)
        given = dict(named_inputs(self.signature, args, kwargs or {}))
        for name, want in self.expected.items():
            if name in given:
                _check_argument(name, given[name], want)
        values = []
        for kind, key in self.slots:
            if kind == "constant":
                values.append(key)
                continue
            source = state if kind == "state" else given
            if key not in source and kind == "state":
                raise SpmdError(f"weight {key!r} is not given; program.use({{name: tensor, ...}}) gives weights")
            if key not in source:
                raise SpmdError(f"argument {key!r} is missing; the program takes {listed(self.expected)}")
            values.append(source[key])
        return values

    def unflatten_outputs(self, outputs: Sequence[Any]) -> Any:
        """The user's result from the graph's outputs of kind ``output``."""
        leaves = [outputs[r.index] if isinstance(r, OutputIndex) else r for r in self.results]
        return pytree.tree_unflatten(leaves, self.out_tree)


def _check_argument(name: str, value: Any, want: Any) -> None:
    """Raise `SpmdError` where an argument is not what the program was planned for."""
    if isinstance(want, Kind):
        if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (want.shape, want.dtype):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise SpmdError(f"input {name!r} is {got}; the program was planned for {want.dtype} {want.shape}")
    elif not same(value, want):
        raise SpmdError(f"input {name!r} is {shown(value)}; the program was planned for {shown(want)}, export it again")


def same(value: Any, want: Any) -> bool:
    """Whether two values of a user's are equal; tensors, and what can't say so, are not."""
    if isinstance(value, torch.Tensor):
        return False
    try:
        return value is want or bool(value == want)
    except (RuntimeError, ValueError):  # of arrays
        return False


@dataclass(frozen=True)
class Kind:
    """What a tensor argument must be."""

    shape: tuple[IntExpr, ...]
    dtype: torch.dtype


def named_state(owner: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; tied ones once."""
    if owner is None:
        return {}
    return {**dict(owner.named_parameters()), **dict(owner.named_buffers())}


def _signature(owner: torch.nn.Module | None, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(owner.forward if owner is not None else function)
    except ValueError:  # a builtin: its inputs are args.0, args.1...
        return inspect.signature(lambda *args, **kwargs: None)


def named_inputs(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf of a call's arguments: ``ids``, ``args.0``, ``batch.ids``."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(
            f"{p.replace(annotation=p.empty, default=p.empty)}{'' if p.default is p.empty else '=...'}"
            for p in signature.parameters.values()
        )
        raise SpmdError(f"the arguments do not fit the program's signature ({takes}): {error}") from None
    bound.apply_defaults()
    found: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        variadic = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
            found.append((".".join(keys if variadic else [name, *keys]), leaf))
    return found


def fake_mode() -> FakeTensorMode:
    """A mode of its own for the values of graphs that are read, not traced."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake_of(value: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor like ``value``, on the CPU where ``value`` is on meta."""
    device = "cpu" if value.device.type == "meta" else value.device
    with fake_mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return fake.requires_grad_(value.requires_grad)


def untraced(model_or_fn: Any) -> Any:
    """What a compiled or exported module or function stands for.  Raises `SpmdError` for what can't be traced."""
    if isinstance(model_or_fn, torch.export.ExportedProgram):
        return model_or_fn.module()
    if isinstance(model_or_fn, torch._dynamo.OptimizedModule):
        return model_or_fn._orig_mod
    if isinstance(model_or_fn, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise SpmdError("a TorchScript program can't be traced; give the module or function that it was made from")
    if isinstance(model_or_fn, type) and issubclass(model_or_fn, torch.nn.Module):
        raise SpmdError(f"{model_or_fn.__name__} is a class of modules; give one of them: {model_or_fn.__name__}(...)")
    if not callable(model_or_fn):
        raise SpmdError(f"expected a module or a function, got {type(model_or_fn).__name__}")
    return getattr(model_or_fn, "_torchdynamo_orig_callable", model_or_fn)


def own_dynamic_shapes(exported: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sizes that a `torch.export.ExportedProgram` leaves open, as `dims.dynamic_sizes` takes them; None for none.

    Torch keeps no names of them: they go by torch's symbols.
    """
    if not isinstance(exported, torch.export.ExportedProgram):
        return None
    nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    found: list[dict[int, Any] | None] = []
    for name in exported.graph_signature.user_inputs:
        value = nodes[name].meta.get("val") if name in nodes else None
        found.append({} if isinstance(value, torch.Tensor) else None)
        for i, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                symbol, known = size.node.expr, exported.range_constraints
                if symbol not in known:
                    raise SpmdError(f"input {name!r}: dim {i} of an exported program is {symbol}; give dynamic_shapes=")
                high = known[symbol].upper
                limits = {"min": int(known[symbol].lower)} | ({"max": int(high)} if high.is_Integer else {})
                found[-1][i] = torch.export.Dim(str(symbol), **limits)  # type: ignore[index]
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if not any(found) or len(leaves) != len(found):
        return None
    positional, named = pytree.tree_unflatten(found, tree)
    return dict(_signature(exported.module(), None).bind(*positional, **named).arguments)  # type: ignore[arg-type]


class _Function(torch.nn.Module):
    """A user's function of one flat tuple of tensors: state first, then inputs."""

    def __init__(
        self, owner: torch.nn.Module | None, function: Callable[..., Any], state: Sequence[str], mesh: Mesh
    ) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # not a submodule: its parameters are arguments
        object.__setattr__(self, "function", function)
        self.state, self.mesh = list(state), mesh
        self.call: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]] = lambda x: (tuple(x), {})
        self.backward = False
        self.out_tree: Any = None
        self.leaves: list[Any] = []

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.state)
        args, kwargs = self.call(flat[count:])
        with UserLines(self.owner), tracing(self.mesh):
            if self.owner is not None:
                values = dict(zip(self.state, flat, strict=False))
                with _restored(self.owner):
                    out = torch.func.functional_call(self.owner, values, args, kwargs)
            else:
                out = self.function(*args, **kwargs)
        leaves, self.out_tree = pytree.tree_flatten(out)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.leaves = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        if self.backward:
            if not tensors or tensors[0].numel() != 1 or not tensors[0].requires_grad or tensors[0].is_complex():
                raise SpmdError("backward=True: the first output must be a real scalar loss that requires a gradient")
            tensors = [tensors[0]] + [t.detach() for t in tensors[1:]]
        return tuple(t.clone() for t in tensors)


@contextlib.contextmanager
def _restored(owner: torch.nn.Module) -> Iterator[None]:
    """Leave parameters and buffers as they were: torch puts those of a module with two names back wrongly."""
    before = [(held, dict(held)) for m in owner.modules() for held in (m._parameters, m._buffers)]
    try:
        yield
    finally:
        for held, values in before:
            held.update(values)


def capture_function(
    model_or_fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh,
    specs: Callable[[str, str, int, tuple[int, ...]], Spec | None],
    backward: bool = False,
    name: str | None = None,
    dynamic_shapes: Any = None,
) -> tuple[Captured, Binding]:
    """Capture a module or function ahead of time; nothing is allocated, parameters may be meta or fake.

    ``specs(name, kind, ndim, shape)`` gives the placement of each parameter, buffer, input and output.  With
    ``dynamic_shapes`` (see `dims.dynamic_sizes`) integers of the graph are expressions of dims.
    """
    kwargs = kwargs or {}
    name = name or getattr(model_or_fn, "__name__", None) or type(model_or_fn).__name__
    owner = model_or_fn if isinstance(model_or_fn, torch.nn.Module) else None
    if owner is None and isinstance(getattr(model_or_fn, "__self__", None), torch.nn.Module):
        raise SpmdError("give the module itself, not one of its bound methods")
    signature = _signature(owner, model_or_fn)
    state = named_state(owner)
    parameters = dict(owner.named_parameters()) if owner is not None else {}
    given = named_inputs(signature, args, kwargs)
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [(n, v) for n, v in given if isinstance(v, torch.Tensor)]
    check_dense([v for _, v in tensors])
    positions = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    for n, v in given:
        if isinstance(v, np.ndarray):
            raise SpmdError(f"argument {n!r} is an array of numpy, which would be a constant; give a tensor")
        if is_dataclass(v) and any(isinstance(getattr(v, f.name), torch.Tensor) for f in fields(v)):
            raise SpmdError(
                f"argument {n!r}: {type(v).__name__} holds tensors that can't be seen; register it with "
                f"torch.export.register_dataclass({type(v).__name__})"
            )

    open_sizes, symbolic = _open_sizes(dynamic_shapes, signature, args, kwargs, dict(tensors))
    known = detect_fake_mode([*state.values(), *(v for _, v in tensors)])
    if open_sizes is not None:
        shapes, known = open_sizes.env, None
    else:
        shapes = ShapeEnv(allow_scalar_outputs=False)  # loops ask for one
    static = open_sizes is None
    mode = known or FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=static)
    function = _Function(owner, model_or_fn, list(state), mesh)
    function.backward = backward

    def call(flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for i, value in zip(positions, flat, strict=True):
            filled[i] = value
        return pytree.tree_unflatten(filled, tree)

    function.call = call
    named: list[Input] = []
    for n, v in [*state.items(), *tensors]:
        kind = "input" if n not in state else "param" if n in parameters else "buffer"
        named.append(Input(n, kind, specs(n, kind, v.dim(), tuple(v.shape))))
    examples = [_fake_of(v, mode) for v in state.values()]
    for n, v in tensors:
        is_open = open_sizes is not None and n in symbolic
        examples.append(open_sizes.fake(v, symbolic[n], mode) if is_open else _fake_of(v, mode))  # type: ignore[union-attr]
    with torch.set_grad_enabled(backward), fx_traceback.preserve_node_meta():
        joint = trace(function, examples)

    count = sum(function.is_tensor)
    labels = ["out"] if count == 1 else [f"out.{i}" for i in range(count)]
    metas = {d.idx: v for v, d in _forward_values(joint.graph_module)}
    out_specs = [specs(n, "output", metas[i].dim(), tuple(metas[i].shape)) for i, n in enumerate(labels)]
    front = assemble(joint, named, labels, out_specs, mesh, mode, name)
    if any(o.kind == "mutation" for o in front.captured.outputs):
        _check_apart([*state.items(), *tensors])
    if backward:
        placeholders = front.captured.graph.graph.find_nodes(op="placeholder")
        for value, node in zip(front.arguments, placeholders, strict=False):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                where = next((f"{line}: " for n in node.users if (line := source_line(n))), "")
                raise SpmdError(
                    f"{where}the program reads a tensor of shape {tuple(value.shape)} that requires a gradient but is "
                    "no input: export the module that owns it, or pass it as an argument"
                )
        _seed_with_ones(front)
    order = (OutputIndex(i) for i in range(count))
    results = [next(order) if t else x for t, x in zip(function.is_tensor, function.leaves, strict=True)]
    kinds = ["state"] * len(state) + ["input"] * len(tensors)
    slots = [(kinds[a], named[a].name) if isinstance(a, int) else ("constant", a) for a in front.arguments]
    grads = [o.name for o in front.captured.outputs if o.kind == "grad"]
    expected = {n: Kind(symbolic.get(n, tuple(v.shape)), v.dtype) if isinstance(v, torch.Tensor) else v
                for n, v in given}  # fmt: skip
    binding = Binding(signature, owner, slots, function.out_tree, results, grads, expected)
    if open_sizes is None:
        release_data(front.captured, mode)
        check_results(binding.results)
        return front.captured, binding
    open_sizes.release(front.captured, fake_mode())
    binding.results = [open_sizes.size(r) for r in binding.results]
    front.captured.dims = dataclasses.replace(open_sizes.dims, guards=open_sizes.guards())
    return front.captured, binding


def _open_sizes(
    given: Any, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[OpenSizes | None, dict[str, tuple[IntExpr, ...]]]:  # fmt: skip
    """The dims that a user leaves open, and the shapes of inputs in them."""
    if given is None or (isinstance(given, Sized) and not len(given)):
        return None, {}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    kinds = {p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD}
    dynamic = dynamic_sizes(given, bound.arguments, next(iter(kinds), None))
    if not dynamic:
        return None, {}
    dims, symbolic = named_dims(dynamic, {n: tuple(v.shape) for n, v in tensors.items()})
    for n in symbolic:
        if not torch.ops.aten.is_non_overlapping_and_dense(tensors[n]):
            raise SpmdError(f"input {n!r} has dynamic dims and gaps in memory; give it as contiguous()")
    return OpenSizes(dims, trace), symbolic


def _check_apart(values: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise `SpmdError` where two inputs of a program that changes an input share memory."""
    seen: dict[int, str] = {}
    for name, value in values:
        key = value.untyped_storage()._cdata
        if key in seen:
            raise SpmdError(
                f"inputs {seen[key]!r} and {name!r} share memory and the program changes an input; clone one"
            )
        seen[key] = name


def _forward_values(gm: GraphModule) -> list[tuple[torch.Tensor, Any]]:
    node = gm.graph.output_node()
    return [
        (v.meta["val"], d)
        for v, d in zip(node.args[0], node.meta["desc"], strict=True)
        if isinstance(d, descriptors.PlainAOTOutput)
    ]


def _seed_with_ones(front: Front) -> None:
    """Replace the loss's tangent by one."""
    captured = front.captured
    graph = captured.graph.graph
    for node in [n for n in graph.find_nodes(op="placeholder") if is_tangent(n)]:
        value = node.meta["val"]
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            ones = graph.call_function(
                aten.full.default, (list(value.shape), 1), {"dtype": value.dtype, "device": value.device}
            )
        ones.meta.update(val=value, phase="backward")
        node.replace_all_uses_with(ones)
        graph.erase_node(node)
    captured.inputs[:] = [i for i in captured.inputs if i.kind != "tangent"]
    captured.graph.recompile()
