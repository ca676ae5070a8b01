"""The joint graph: AOTAutograd's export, made a `Captured` graph with named inputs and outputs.

Outputs are cloned before tracing, so that no output is an alias, every output that needs a gradient has a tangent
of its own, and clones of intermediate values are taken out again afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.lowering
import torch.fx.traceback as fx_traceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from . import ops  # noqa: F401  (registers the rules, and operators that decompositions make)
from .annotations import ANNOTATIONS, checked, constrain_op, from_local_op, spec_on
from .bodies import adopt
from .decompositions import EARLY, table
from .draws import give_seeds, is_random, number
from .ir import Captured, Draft, Input, Output, source_line
from .placements import Mesh, Spec, SpmdError, depends_on_data
from .sizes import LIBRARIES

aten = torch.ops.aten


@functools.cache
def all_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions and ours; attention, clones and max pooling's backward stay."""
    kept = ("scaled_dot_product", "aten.clone", "max_pool2d_with_indices_backward")
    theirs = {op: f for op, f in select_decomp_table().items() if not any(k in str(op) for k in kept)}
    return theirs | {op: _first(f, theirs.get(op)) for op, f in table().items()}


def _first(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """NotImplemented, where there is no other, leaves the op as it is."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        return theirs(*args, **kwargs) if made is NotImplemented and theirs is not None else made

    return decomposed


def _native(op: Any, key: Any) -> Callable[..., Any]:
    """The op by torch's own kernel, where Python's takes its place."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kernel = op.py_kernels.pop(key)
        op._dispatch_cache.clear()
        try:
            return op(*args, **kwargs)
        finally:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()

    return call


@dataclass
class Front:
    """A captured program and how its callers' arguments and results map to the graph's.

    ``arguments[i]`` says where placeholder ``i`` (parameters, buffers and inputs only) comes from: a position among
    the caller's flat arguments, or a tensor.  ``results`` has one entry for each flat result of the caller: the index
    of an output of the graph, or a constant.  ``is_global`` says which of the graph's forward outputs are global
    values (DTensors at run time), ``differentiable`` which have a tangent, in the order of the tangents.
    """

    captured: Captured
    arguments: list[int | torch.Tensor]
    results: list[Any]
    is_global: list[bool]
    differentiable: list[int]
    needs_grad: list[int]
    device_mesh: DeviceMesh | None = None


@dataclass
class OutputIndex:
    """Stands for output ``index`` of the graph in `Front.results`."""

    index: int


def trace(module: torch.nn.Module, args: Sequence[Any]) -> Any:
    """AOTAutograd's joint graph.  Raises `SpmdError` for numbers and decisions that depend on data."""
    fixed = torch._dynamo.config.patch(automatic_dynamic_shapes=False)  # bodies are of the sizes at hand
    tables = all_decompositions()
    kept = torch._inductor.config.patch(fallback_random=True)  # draws that nothing reads: others are counted by them
    try:
        with contextlib.ExitStack() as stack:
            for entered in (_compiling(), _own_kernels(), _plain_layers(), _known_regions(), fixed, kept):
                stack.enter_context(entered)
            return aot_export_joint_with_descriptors(stack, module, tuple(args), decompositions=tables)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise depends_on_data(_user_line(error), _what(error)) from error
    except GuardOnDataDependentSymNode as error:
        asked = re.search(r"expression (.*?) \(unhinted", str(error))
        raise SpmdError(
            f"{_user_line(error)}: whether {asked[1] if asked else 'a condition holds'} depends on data (u0, u1... are "
            "sizes or numbers that only a run decides), and a program planned ahead is one for all of them; write what "
            "holds for every size, say so with torch._check, or mask instead (torch.where, a weight of 0)"
        ) from error
    except Exception as error:
        if not _is_torchs(error):
            raise
        said = " ".join(str(error).split("\n\n")[0].split())
        raise SpmdError(
            f"{_user_line(error)}: torch raises {type(error).__name__} where it traces this: {said}; if it runs "
            "untraced, write it as functions of tensors (no backward() inside, nothing kept beyond the call), or "
            "compute it outside the compiled function"
        ) from error


@contextlib.contextmanager
def _plain_layers() -> Iterator[None]:
    """Recurrent layers as the products they are made of."""
    plain = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings():  # torch's, of what it sets for other devices
        warnings.simplefilter("ignore")
        plain.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain.__exit__(None, None, None)


@contextlib.contextmanager
def _known_regions() -> Iterator[None]:
    """The schema of a region once for all of its calls: torch traces the region again to find it, for each of them."""
    region = torch.ops.higher_order.invoke_subgraph
    schema_of = region.gen_schema
    found: dict[Any, Any] = {}

    def schema(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        kinds = tuple((*o.shape, *o.stride(), o.dtype, o.requires_grad) if isinstance(o, torch.Tensor) else (o,)
                      for o in operands)  # fmt: skip
        if identifier is None or any(isinstance(n, torch.SymInt) for kind in kinds for n in kind):
            return schema_of(subgraph, identifier, *operands)
        if (identifier, kinds) not in found:
            found[identifier, kinds] = schema_of(subgraph, identifier, *operands)
        return found[identifier, kinds]

    region.gen_schema = schema
    try:
        yield
    finally:
        region.gen_schema = schema_of


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true inside: models ask it before they look at values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _own_kernels() -> Iterator[None]:
    """Our decompositions in place of torch's own kernels, Python's for autograd and composite ones, that go first."""
    autograd, composite = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    replaced = [(op, autograd) for op in table() if autograd in op.py_kernels or op in EARLY]
    replaced += [(op, composite) for op in table() if op.has_kernel_for_dispatch_key(composite)]
    saved = [op.py_kernels.get(key) for op, key in replaced]
    try:
        for op, key in replaced:
            op.py_kernels[key] = _first(table()[op], op.py_kernels.get(key) or _native(op, key))
            op._dispatch_cache.clear()
        yield
    finally:
        for (op, key), kernel in zip(replaced, saved, strict=True):
            op.py_kernels.pop(key) if kernel is None else op.py_kernels.update({key: kernel})
            op._dispatch_cache.clear()


def check_dense(values: Sequence[Any]) -> None:
    """Raise `SpmdError` for sparse, nested and quantized tensors."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested:
            raise SpmdError(
                "an argument is a nested tensor, which has no global shape to shard; give it as to_padded_tensor() "
                "with a mask, or keep it outside the compiled function"
            )
        shape = tuple(value.shape)
        if value.layout is not torch.strided:
            raise SpmdError(
                f"an argument of shape {shape} is {str(value.layout).removeprefix('torch.')}: sparse tensors have no "
                "placement; give it as to_dense(), or keep it outside the compiled function"
            )
        if value.is_quantized:
            raise SpmdError(f"an argument of shape {shape} is quantized ({value.dtype}); give it as dequantize()")


def _check_values(gm: GraphModule) -> None:
    """Raise `SpmdError` where the program makes a sparse tensor."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise SpmdError(
                f"{node.name} ({source_line(node)}): {node.target} makes a sparse tensor, which has no placement; use "
                "dense ones (sparse=False in an embedding: a table sharded by rows has small gradients already)"
            )


def _what(error: BaseException) -> str:
    """What an error says to depend on data."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(f.name == "backward" and f.filename.endswith("_higher_order_ops/while_loop.py") for f in frames):
        return "the backward of a while_loop, for which each turn keeps its values (a scan of as many turns has one),"
    return str(error) or type(error).__name__


def _is_torchs(error: BaseException) -> bool:
    """Whether torch raises it, not this package nor the program itself."""
    if isinstance(error, SpmdError):
        return False
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith((os.path.dirname(torch.__file__), "<"))


def _user_line(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback; else one that reads a tensor the graph holds."""
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [(f.f_code.co_filename, n) for f, n in frames]
    own = [(name, n) for name, n in files if not name.startswith(LIBRARIES)]
    if own:
        return f"{os.path.basename(own[-1][0])}:{own[-1][1]}"
    for gm in (v for f, _ in frames for v in f.f_locals.values() if isinstance(v, GraphModule)):
        for held in gm.graph.find_nodes(op="get_attr"):
            if found := next((line for n in held.users if (line := source_line(n))), None):
                return found
    trace = fx_traceback.get_current_meta().get("stack_trace") or ""
    noted = re.findall(r'File "(.*?)", line (\d+)', _innermost(trace))
    places = (f"{os.path.basename(file)}:{n}" if n != "0" else f"module {file!r}" for file, n in noted)
    return "".join(places) or "the program"


class UserLines(TorchFunctionMode):
    """Notes the user's line (the innermost frame outside torch and this package) on the nodes of each call.

    Where an exported graph runs, it is the line that the graph's node was traced from.  Frames below the mode's own, of
    whoever traces, are not the program's: what only torch's modules call has no line, and goes by the module's path.
    """

    def __init__(self, owner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.traced: dict[GraphModule, dict[int, str]] = {}  # by line of the graph's code
        self.paths = {m: path for path, m in owner.named_modules()} if owner is not None else {}
        self.bottom: Any = None

    def __enter__(self) -> Any:
        self.bottom = sys._getframe(1)
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the bodies of higher-order operators
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
            if frame is self.bottom:
                fx_traceback.set_stack_trace([self._module_at(sys._getframe(1))])
                return func(*args, **(kwargs or {}))
            if frame.f_code.co_filename.startswith("<eval_with_key>") and (line := self._traced_at(frame)):
                fx_traceback.set_stack_trace([line])
                return func(*args, **(kwargs or {}))
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            code = frame.f_code
            fx_traceback.set_stack_trace([f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'])
        return func(*args, **(kwargs or {}))

    def _module_at(self, frame: Any) -> str:
        """The path of the innermost module whose call a frame belongs to, as a frame without a line."""
        while frame is not self.bottom:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and module in self.paths:
                return f'  File "{self.paths[module] or type(module).__name__}", line 0, in forward\n'
            frame = frame.f_back
        return ""

    def _traced_at(self, frame: Any) -> str | None:
        gm = frame.f_locals.get("self")
        if not isinstance(gm, GraphModule):
            return None
        if gm not in self.traced:
            nodes, start = list(gm.graph.nodes), getattr(gm, "_prologue_start", 0)
            places = getattr(gm, "_lineno_map", None) or {}
            traces = {n + start: nodes[i].stack_trace for n, i in places.items() if i is not None and i < len(nodes)}
            self.traced[gm] = {n: _innermost(trace) for n, trace in traces.items() if trace}
        return self.traced[gm].get(frame.f_lineno)


def _innermost(trace: str) -> str:
    """The innermost frame of a stack trace that is outside torch and this package."""
    frames = [f'  File "{part}' for part in trace.split('  File "')[1:]]
    own = [f for f in frames if not f.removeprefix('  File "').startswith(LIBRARIES)]
    return (own or frames or [trace])[-1]


def _lift_constants(gm: GraphModule, fake_mode: FakeTensorMode) -> list[torch.Tensor]:
    """Turn tensors that the graph holds into placeholders behind the primals; return the tensors."""
    found: dict[str, Node] = {}
    tensors: list[torch.Tensor] = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value = operator.attrgetter(node.target)(gm)
        if not isinstance(value, torch.Tensor):
            continue
        if node.target not in found:
            found[node.target] = _append_primal(gm, fake_mode.from_tensor(value, static_shapes=True))
            tensors.append(value)
        node.replace_all_uses_with(found[node.target])
        gm.graph.erase_node(node)
    return tensors


def _append_primal(gm: GraphModule, value: Any) -> Node:
    """A new placeholder behind the primals and before the tangents."""
    primals = [n for n in gm.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    first = next(iter(gm.graph.nodes))
    taken = {n.target for n in primals}
    name = next(n for i in itertools.count(len(primals) + 1) if (n := f"primals_{i}") not in taken)
    with gm.graph.inserting_after(primals[-1]) if primals else gm.graph.inserting_before(first):
        node = gm.graph.placeholder(name)
    node.meta["val"] = value
    return node


def is_tangent(node: Node) -> bool:
    return isinstance(node.meta.get("desc"), descriptors.TangentAOTInput)


def _set_phases(gm: GraphModule) -> None:
    """Set ``meta["phase"]``: backward is what was traced in backward or depends on a tangent."""
    sources: dict[int, str] = {}
    for node in gm.graph.nodes:
        tangent = node.op == "placeholder" and is_tangent(node)
        tagged = node.meta.get("partitioner_tag") == "is_backward" or node.meta.get("autograd_backward", False)
        backward = tangent or tagged or any(n.meta["phase"] == "backward" for n in node.all_input_nodes)
        node.meta["phase"] = "backward" if backward else "forward"
        number = node.meta.get("seq_nr")
        if number is None:
            continue
        if not backward and node.stack_trace:
            sources.setdefault(number, node.stack_trace)
        elif backward and number in sources:
            node.stack_trace = sources[number]


def _name_axes(gm: GraphModule, mesh: Mesh) -> None:
    """Write the specs of annotations out on all axes of the mesh."""
    for node in [n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]:
        if node.target not in ANNOTATIONS:
            continue
        value = node.meta["val"] if node.target is from_local_op else node.args[0].meta["val"]
        texts = {1, len(node.args) - 1}
        try:
            args = [str(checked(spec_on(a, mesh), value.dim())) if i in texts else a for i, a in enumerate(node.args)]
        except SpmdError as error:
            raise SpmdError(f"{node.name} ({source_line(node)}): {error}") from None
        if node.target is not constrain_op:
            args[2] = list(mesh.shape)
        node.args = tuple(args)


def _check_bodies(gm: GraphModule) -> None:
    """Raise `SpmdError` for draws inside the body of a higher-order operator that no seed reaches (regions get one)."""
    for name, body in gm.named_modules():
        for node in body.graph.nodes if name and isinstance(body, GraphModule) else ():
            if is_random(node) and "stream" not in node.meta:
                raise SpmdError(
                    f"{node.name} ({source_line(node) or name}): {node.target} draws inside the body of a higher-order "
                    "operator, so that each rank would draw its own; draw before it and pass the numbers in"
                )


def _is_token(node: Node) -> bool:
    desc = node.meta.get("desc")
    return desc is not None and "token" in desc.expr()


def _release_checks(gm: GraphModule) -> None:
    """Take calls that return nothing, and so only check, out of the order of effects: a device checks what it holds."""
    for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)):
        token, op, *args = node.args
        if not isinstance(op, torch._ops.OpOverload) or op._schema.returns:
            continue
        with gm.graph.inserting_before(node):
            check = gm.graph.call_function(op, tuple(args), dict(node.kwargs))
        check.meta = {**node.meta, "val": None}
        for taken in list(node.users):
            taken.replace_all_uses_with(token)
            gm.graph.erase_node(taken)
        gm.graph.erase_node(node)
    out = gm.graph.output_node()
    spent = [n for n in gm.graph.find_nodes(op="placeholder") if _is_token(n) and list(n.users) in ([], [out])]
    kept = [(v, d) for v, d in zip(out.args[0], out.meta["desc"], strict=True) if v not in spent]
    out.args, out.meta["desc"] = (tuple(v for v, _ in kept),), [d for _, d in kept]
    for token in spent:
        gm.graph.erase_node(token)


def _remove_clones(gm: GraphModule, shared: Mapping[Node, bool]) -> None:
    """Take out aliases, and the clones of outputs that were there to break them: all of those whose value is known to
    be (a view of) an input (``shared``), and where nobody knows those of what is no input itself."""
    output = gm.graph.output_node()
    for node in gm.graph.find_nodes(op="call_function", target=aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    def unwrapped(value: Any) -> Any:
        if isinstance(value, Node) and value.target is aten.clone.default and len(value.users) == 1:
            source = value.args[0]
            if shared.get(value):
                return source
            strides = [str(v.meta["val"].stride()) for v in (source, value)]  # of numbers or of symbols
            if source.op != "placeholder" and strides[0] == strides[1]:
                return source
        return value

    kept = tuple(unwrapped(v) for v in output.args[0])
    output.args = (kept,)
    gm.graph.eliminate_dead_code()


def assemble(
    joint: Any,
    named: list[Input],
    labels: list[str],
    specs: Sequence[Spec | None],
    mesh: Mesh,
    fake_mode: FakeTensorMode,
    name: str,
    shared: Sequence[bool] = (),
) -> Front:
    """The `Front` of an exported joint graph, from the descriptors of its placeholders and outputs.

    ``shared`` says which outputs share the memory of an input.
    """
    gm: GraphModule = joint.graph_module
    gm.graph.set_codegen(torch.fx.graph.CodeGen())  # flat arguments, not (primals, tangents)
    _check_values(gm)
    _release_checks(gm)
    constants = _lift_constants(gm, fake_mode)
    _set_phases(gm)
    adopt(gm)
    draws = number(gm.graph)
    _check_bodies(gm)
    _name_axes(gm, mesh)
    inputs: list[Input] = []
    arguments: list[int | torch.Tensor] = []
    place: dict[Any, int] = {}
    tangents: list[tuple[Any, Node]] = []
    lifted = iter(constants)
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if isinstance(desc, descriptors.TangentAOTInput):
            tangents.append((desc.output, node))
            continue
        if isinstance(desc, descriptors.PlainAOTInput):
            place[desc] = len(inputs)
            inputs.append(named[desc.idx])
            arguments.append(desc.idx)
        elif desc is None:
            place[desc] = len(inputs)
            inputs.append(Input(f"constant.{len(inputs)}", "buffer", Spec.replicate(mesh)))
            arguments.append(next(lifted))
        elif _is_token(node):
            call = next(iter(node.users), node)
            raise SpmdError(
                f"{source_line(call) or call.name}: {call.args[1] if len(call.args) > 1 else call.target} has a side "
                "effect that orders it among others, which ranks can't share; compute it outside the compiled function"
            )
        else:
            raise SpmdError(f"input {node.name}: {desc.expr()} is not supported; clone one of the views that alias")
    if draws:
        with fake_mode:
            seed = _append_primal(gm, torch.empty((), dtype=torch.int64))
        seed.meta["phase"] = "forward"
        inputs.append(Input("seed", "seed", Spec.replicate(mesh)))
        give_seeds(gm, seed)

    outputs: list[Output] = []
    kept: list[Any] = []
    index: dict[Any, int] = {}
    forward = 0
    node = gm.graph.output_node()
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):
        if value is None:
            continue
        if isinstance(desc, descriptors.PlainAOTOutput):
            outputs.append(Output(labels[desc.idx], "output", specs[desc.idx]))
            forward += 1
        elif isinstance(desc, descriptors.InputMutationAOTOutput):
            of = place[desc.mutated_input]
            outputs.append(Output(inputs[of].name, "mutation", None, of))
            forward += 1
        elif isinstance(desc, descriptors.GradAOTOutput):
            of = place[desc.grad_of]
            outputs.append(Output(inputs[of].name, "grad", None, of))
        else:
            raise SpmdError(f"output {desc.expr()} is not supported")
        index[desc] = len(kept)
        kept.append(value)
    node.args = (tuple(kept),)
    node.meta["desc"] = list(index)
    held = {v: bool(shared and shared[d.idx]) for v, d in zip(kept, index, strict=True)
            if isinstance(d, descriptors.PlainAOTOutput) and isinstance(v, Node)}  # fmt: skip
    _remove_clones(gm, held)
    differentiable = []
    for desc, tangent in tangents:
        differentiable.append(index[desc])
        inputs.append(Input(f"grad({outputs[index[desc]].name})", "tangent", outputs[index[desc]].spec))
        tangent.meta["of"] = index[desc]
    results = [OutputIndex(index[descriptors.PlainAOTOutput(idx=i)]) for i in range(len(labels))]
    captured = Captured(Draft(gm, gm.graph), inputs, outputs, forward, mesh, name)
    needs_grad = [o.of for o in outputs if o.kind == "grad" and o.of is not None]
    return Front(captured, arguments, results, [], differentiable, needs_grad)
