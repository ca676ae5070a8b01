"""How Dynamo sees DTensors while it traces for this compiler: as plain tensors of global shape.

Dynamo would run DTensor's own propagation while it traces, and fail where that does (a plain tensor beside a
DTensor, an op without a strategy).  `install` replaces some of its functions by ones that do as before unless the
active compiler is ours; then

* a DTensor input becomes a fake tensor of its global shape, which is guarded (Dynamo's guard on its spec stays);
* ``DTensor.from_local``, ``.to_local()``, ``.redistribute()`` and ``.full_tensor()`` become the operators of
  `annotations`, ``.placements`` and ``.device_mesh`` answer, and ``isinstance(x, DTensor)`` says whether ``x`` is a
  global value: computed from a DTensor and not made local since;
* a size that data decide is a symbol of Dynamo's, as in ``torch.export``; an op on global values to which Dynamo gives
  none is an error, and so are more programs of one function than Dynamo keeps: without a program the function would run
  eagerly, on DTensors.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import config, convert_frame
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import builder, builtin, tensor
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx import Node
from torch.fx.node import map_arg

from .annotations import constrain_op, from_local_op, gradient_spec, piece_lengths, to_local_op, whole_shape
from .dtensors import placements_for, spec_from
from .placements import Spec, SpmdError, depends_on_data

_BACKENDS: set[Any] = set()


def register_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a backend as ours, and make Dynamo show it DTensors as global tensors."""
    _BACKENDS.add(function)
    install()
    return function


def is_ours(compiler: Any) -> bool:
    """Whether a compiler function, as wrapped by ``torch.compile``, is ours."""
    for _ in range(8):
        try:
            if compiler in _BACKENDS:
                return True
        except TypeError:
            pass
        for name in ("_torchdynamo_orig_backend", "compiler_fn", "func", "__wrapped__"):
            if getattr(compiler, name, None) is not None:
                compiler = getattr(compiler, name)
                break
        else:
            return False
    return False


def _active(tx: Any) -> bool:
    cached = getattr(tx.output, "_spmd_active", None)
    if cached is None:
        cached = tx.output._spmd_active = is_ours(tx.output.compiler_fn)
    return cached


# --- global values ------------------------------------------------------------------------------------------


def dtensor_of(node: Node) -> DTensor | None:
    """The DTensor that a placeholder of Dynamo's graph stands for."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    example = argument.example if argument is not None else None
    return example if isinstance(example, DTensor) else None


def global_mesh(node: Node) -> DeviceMesh | None:
    """The mesh of the DTensors that a node's value is computed from; None for a value that is not global."""
    if "spmd_mesh" in node.meta:
        return node.meta["spmd_mesh"]
    if node.op == "placeholder":
        found = dtensor_of(node)
        mesh = found.device_mesh if found is not None else None
        if found is None and isinstance(node.meta.get("example_value"), torch.Tensor):
            mesh = getattr(node.meta["example_value"], "_spmd_mesh", None)
    elif node.target is to_local_op:
        mesh = None
    else:
        mesh = next(filter(None, map(global_mesh, node.all_input_nodes)), None)
    node.meta["spmd_mesh"] = mesh
    return mesh


def _is_hooked(tx: Any) -> bool:
    """Whether the frame is the ``forward`` of a module whose forward hooks run behind it, in frames of their own."""
    frame = tx.output.root_tx
    module = frame.f_locals.get("self")
    return frame.f_code.co_name == "forward" and bool(getattr(module, "_forward_hooks", None))


def output_placements(node: Node) -> tuple[Any, ...] | None:
    """The placements that hooks expect a module's output in: DTensor's own.  None where nothing is expected."""
    examples = (n.meta.get("example_value") for n in node.graph.find_nodes(op="placeholder"))
    hooked = any(getattr(e, "_spmd_hooked", False) for e in examples)
    placements = propagated_placements(node) if hooked else None
    return None if placements is None or any(p.is_partial() for p in placements) else placements


def _global_fake(value: DTensor, tx: Any, source: Any) -> torch.Tensor:
    with torch._C._DisableFuncTorch(), tx.fake_mode:  # an argument may be met first within torch.func.grad
        fake = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )
        if isinstance(value, torch.nn.Parameter):
            fake._is_param = True  # type: ignore[attr-defined]
        elif value.requires_grad and not value.is_leaf:
            with torch.enable_grad():
                made = fake.clone()  # no leaf either: it may be written to
            fake = made if made.stride() == fake.stride() else fake
    fake._spmd_mesh = value.device_mesh  # type: ignore[attr-defined]
    fake._spmd_hooked = _is_hooked(tx)  # type: ignore[attr-defined]
    # Dynamo guards the local sizes, which may stay on one rank and change on another
    meta = AttrSource(AttrSource(source, "_spec"), "tensor_meta")
    for name in ("shape", "stride"):
        install_guard(AttrSource(meta, name).make_guard(builder.GuardBuilder.EQUALS_MATCH))
    tx.output.input_source_to_sizes_strides[source] = {"size": fake.size(), "stride": fake.stride()}
    return fake


# --- annotations --------------------------------------------------------------------------------------------


def _constant(variable: Any) -> Any:
    """The Python value of a variable (of a mesh, a placement, a sequence of them or a number)."""
    if variable is None or not isinstance(variable, VariableTracker):
        return variable
    if isinstance(variable, BaseListVariable):
        return [_constant(v) for v in variable.items]
    for name in ("value", "real_obj"):
        real = getattr(variable, name, None)
        if real is not None:
            return getattr(real, "real_obj", real)
    proxy = getattr(variable, "proxy", None)
    if proxy is not None and "grapharg" in proxy.node.meta:
        return proxy.node.meta["grapharg"].example
    return variable.as_python_constant()


def _emit(tx: Any, mesh: DeviceMesh, target: Any, x: TensorVariable, *args: Any) -> VariableTracker:
    """A call of an annotation, whose specs are on the axes of ``mesh``."""
    variables = [SourcelessBuilder.create(tx, a) for a in args]
    proxy = tx.output.create_proxy("call_function", target, *proxy_args_kwargs([x, *variables], {}))
    proxy.node.meta["spmd_spec_mesh"] = mesh
    return wrap_fx_proxy(tx, proxy)


def _bind(signature: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(f"def f({signature}): pass", names)  # the signature is one of the constants below
    bound = inspect.signature(names["f"]).bind(*args, **kwargs)
    bound.apply_defaults()
    return {k: _constant(v) if k != "x" else v for k, v in bound.arguments.items()}


def _sizes(mesh: DeviceMesh) -> list[int]:
    return [int(s) for s in mesh.shape]


def _whole(mesh: DeviceMesh, placements: Any) -> tuple[Any, ...]:
    return tuple(placements) if placements is not None else (Replicate(),) * len(mesh.shape)


def _node_of(x: TensorVariable) -> Node:
    return x.as_proxy().node


def _value(x: TensorVariable) -> torch.Tensor:
    return _node_of(x).meta["example_value"]


def _spec_text(x: Any, mesh: DeviceMesh, placements: Any) -> Spec:
    ndim = x.dim() if isinstance(x, torch.Tensor) else len(x)
    return spec_from(_whole(mesh, placements), mesh, ndim)


def _redistribute(tx: Any, x: TensorVariable, args: Any, kwargs: Any) -> VariableTracker:
    given = _bind(
        "device_mesh=None, placements=None, *, async_op=False, forward_dtype=None, backward_dtype=None", args, kwargs
    )
    mesh = given["device_mesh"] or global_mesh(_node_of(x))
    placements = given["placements"] if given["placements"] is not None else known_placements(_node_of(x))
    return _emit(tx, mesh, constrain_op, x, str(_spec_text(_value(x), mesh, placements)))


def _full_tensor(tx: Any, x: TensorVariable, args: Any, kwargs: Any) -> VariableTracker:
    mesh = global_mesh(_node_of(x))
    spec = _spec_text(_value(x), mesh, None)
    return _emit(tx, mesh, to_local_op, x, str(spec), _sizes(mesh), str(spec))


def _to_local(tx: Any, x: TensorVariable, args: Any, kwargs: Any) -> VariableTracker:
    given = _bind("*, grad_placements=None", args, kwargs)
    node = _node_of(x)
    mesh, placements = global_mesh(node), known_placements(node) or propagated_placements(node)
    if placements is None:
        raise SpmdError(
            f"{_line(tx)}: to_local() of {node.name}, whose placement is the solver's to choose: say which pieces are "
            "meant, with redistribute(placements=...) just before it"
        )
    node.meta["spmd_pieces"] = placements
    spec = _spec_text(_value(x), mesh, placements)
    grads = given["grad_placements"]
    grad_spec = gradient_spec(spec) if grads is None else _spec_text(_value(x), mesh, grads)
    return _emit(tx, mesh, to_local_op, x, str(spec), _sizes(mesh), str(grad_spec))


def _from_local(tx: Any, args: Any, kwargs: Any) -> VariableTracker:
    given = _bind(
        "x, device_mesh=None, placements=None, *, run_check=False, shape=None, stride=None, grad_placements=None",
        args,
        {("x" if k == "local_tensor" else k): v for k, v in kwargs.items()},
    )
    x, mesh = given["x"], given["device_mesh"]
    local = _value(x)
    spec = _spec_text(local, mesh, given["placements"])
    shape = given["shape"] if given["shape"] is not None else whole_shape(local, spec, _sizes(mesh))
    for d, n in enumerate(local.shape):
        lengths = set(piece_lengths(shape[d], spec, d, _sizes(mesh)))
        if isinstance(n, int) and n not in lengths:
            raise SpmdError(
                f"{_line(tx)}: from_local of {tuple(local.shape)} as a piece of {tuple(shape)}: in {spec} pieces have "
                f"{' or '.join(map(str, sorted(lengths)))} elements along dim {d}, not {n}; give the placements "
                "that the piece has"
            )
    grads = given["grad_placements"]
    grad_spec = gradient_spec(spec) if grads is None else _spec_text(local, mesh, grads)
    out = _emit(tx, mesh, from_local_op, x, str(spec), _sizes(mesh), [int(s) for s in shape], str(grad_spec))
    _node_of(out).meta["spmd_mesh"] = mesh
    return out


def known_placements(node: Node) -> tuple[Any, ...] | None:
    """The placements that the program fixes for a value: those of a DTensor input, a constraint, or from_local."""
    found = dtensor_of(node)
    if found is not None:
        return found.placements
    if node.target in (constrain_op, from_local_op):
        return placements_for(Spec.parse(node.args[1]), global_mesh(node))
    return None


def placements_asked(node: Node) -> tuple[Any, ...] | None:
    """What ``.placements`` of a global value says: None where the solver chooses, and nobody took its pieces."""
    return known_placements(node) or node.meta.get("spmd_pieces")


def _line(tx: Any) -> str:
    frame = tx.frame_summary()
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def propagated_placements(node: Node) -> tuple[Any, ...] | None:
    """The placements that DTensor's own propagation gives a value, which is what a bare ``to_local()`` means.

    None where DTensor has no answer.
    """
    mode, env = FakeTensorMode(), dict[Node, Any]()

    def empty(shape: Any, like: Any) -> torch.Tensor:
        with mode:
            return torch.empty(tuple(map(int, shape)), dtype=like.dtype, device=like.device)

    def compute(n: Node) -> Any:
        example = n.meta.get("example_value")
        found = dtensor_of(n)
        if found is not None:
            local = empty(found._local_tensor.shape, found)
            return DTensor.from_local(
                local, found.device_mesh, found.placements, run_check=False, shape=found.shape, stride=found.stride()
            )
        if n.op == "placeholder":
            return empty(example.shape, example) if isinstance(example, torch.Tensor) else int(example)
        args, kwargs = map_arg((n.args, n.kwargs), env.__getitem__)
        if n.target in (constrain_op, from_local_op):
            device_mesh = n.meta["spmd_spec_mesh"]
            placements = placements_for(Spec.parse(args[1]), device_mesh)
            if n.target is constrain_op:
                return args[0].redistribute(device_mesh, placements)
            return DTensor.from_local(
                args[0], device_mesh, placements, run_check=False, shape=torch.Size(args[3]), stride=example.stride()
            )
        if n.op == "call_method":
            return getattr(args[0], n.target)(*args[1:], **kwargs)
        if n.op != "call_function" or n.target is to_local_op:
            raise NotImplementedError
        return n.target(*args, **kwargs)

    needed, pending = {node}, [node]
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in needed:
                needed.add(n)
                pending.append(n)
    try:
        with torch.no_grad(), unset_fake_temporarily(), implicit_replication():
            for n in node.graph.nodes:
                if n in needed:
                    with mode:
                        env[n] = compute(n)
    except Exception:  # whatever DTensor refuses
        return None
    return env[node].placements if isinstance(env[node], DTensor) else None


def _refuse_break(tx: Any, node: Node, error: Unsupported) -> None:
    """Raise `SpmdError` where a graph would break at an op of global values whose result's shape depends on data:
    DTensors would run it eagerly, and fail."""
    if (error.gb_type or "").startswith("Dynamic shape") and any(map(global_mesh, node.all_input_nodes)):
        raise depends_on_data(_line(tx), str(getattr(error.__cause__, "func", node.target))) from None


def _refuse_sparse(tx: Any, what: str) -> None:
    raise SpmdError(
        f"{_line(tx)}: {what} is sparse, and beside DTensors a sparse tensor has no placement; give it as to_dense(), "
        "or keep it outside the compiled function"
    )


METHODS = {"redistribute": _redistribute, "to_local": _to_local, "full_tensor": _full_tensor}
ATTRIBUTES = {"placements": placements_asked, "device_mesh": global_mesh}


# --- installation -------------------------------------------------------------------------------------------


@functools.cache
def install() -> None:
    """Put the hooks in place, once."""
    wrap_input = builder.wrap_to_fake_tensor_and_record
    wrap_float = builder.VariableBuilder.wrap_symfloat
    wrap_tensor = builder.VariableBuilder.wrap_tensor
    call_method = tensor.TensorVariable.call_method
    getattr_name = "var_getattr" if hasattr(tensor.TensorVariable, "var_getattr") else "tp_getattro_impl"  # torch 2.14
    var_getattr = getattr(tensor.TensorVariable, getattr_name)
    call_isinstance = builtin.BuiltinVariable.call_isinstance
    call_function = torch_variables.TorchInGraphFunctionVariable.call_function
    convert, fake_value = convert_frame.ConvertFrameAssert.__call__, builder.get_fake_value

    @functools.wraps(wrap_input)
    def our_wrap_input(e: Any, tx: Any, **kwargs: Any) -> Any:
        if isinstance(e, DTensor) and _active(tx):
            return _global_fake(e, tx, kwargs["source"])
        return wrap_input(e, tx, **kwargs)

    @functools.wraps(wrap_tensor)
    def our_wrap_tensor(self: Any, value: torch.Tensor) -> VariableTracker:
        if value.layout is not torch.strided and not value.is_nested and _active(self.tx):
            if any(isinstance(v, DTensor) for v in self.tx.output.root_tx.f_locals.values()):
                _refuse_sparse(self.tx, f"a tensor of {value.dim()} dims, {str(value.layout).removeprefix('torch.')},")
        return wrap_tensor(self, value)

    @functools.wraps(call_method)
    def our_call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if name in METHODS and _active(tx) and global_mesh(_node_of(self)) is not None:
            return METHODS[name](tx, self, args, kwargs)
        if name.startswith("to_sparse") and _active(tx) and global_mesh(_node_of(self)) is not None:
            _refuse_sparse(tx, f"{name}()")
        return call_method(self, tx, name, args, kwargs)

    @functools.wraps(var_getattr)
    def our_var_getattr(self: Any, tx: Any, name: str) -> VariableTracker:
        if name in ATTRIBUTES and _active(tx) and global_mesh(_node_of(self)) is not None:
            return VariableTracker.build(tx, ATTRIBUTES[name](_node_of(self)))
        return var_getattr(self, tx, name)

    @functools.wraps(call_isinstance)
    def our_call_isinstance(self: Any, tx: Any, arg: Any, kind: Any) -> VariableTracker:
        if type(arg) is TensorVariable and _active(tx) and global_mesh(_node_of(arg)) is not None:
            kinds = kind.as_python_constant()
            if DTensor in (kinds if isinstance(kinds, tuple) else (kinds,)):
                return VariableTracker.build(tx, True)
        return call_isinstance(self, tx, arg, kind)

    @functools.wraps(call_function)
    def our_call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        if self.value == DTensor.from_local and _active(tx):
            return _from_local(tx, args, kwargs)
        return call_function(self, tx, args, kwargs)

    @functools.wraps(wrap_float)
    def our_wrap_float(self: Any, value: float) -> VariableTracker:
        if _active(self.tx):  # a number that changed between calls is a constant all the same: a program is static
            self.install_guards(builder.GuardBuilder.CONSTANT_MATCH)
            return builder.ConstantVariable.create(value=value, source=self.source)
        return wrap_float(self, value)

    @functools.wraps(fake_value)
    def our_fake_value(node: Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return fake_value(node, tx, *args, **kwargs)
        except Unsupported as error:
            if _active(tx):
                _refuse_break(tx, node, error)
            raise

    @functools.wraps(convert)
    def our_convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self._torchdynamo_orig_backend):
            return convert(self, *args, **kwargs)
        # each size is a program of its own, and without a program DTensors would run eagerly: an error at the end
        limit = config.accumulated_recompile_limit
        try:
            with config.patch(
                recompile_limit=limit, fail_on_recompile_limit_hit=True, capture_dynamic_output_shape_ops=True,
                allow_rnn=True,
            ):
                return convert(self, *args, **kwargs)
        except FailOnRecompileLimitHit:
            code = args[0].f_code
            raise SpmdError(
                f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}: {code.co_name} has {limit} programs, one "
                "for each size and constant that it was called with; pad its inputs to a few sizes, or raise "
                "torch._dynamo.config.accumulated_recompile_limit"
            ) from None

    convert_frame.ConvertFrameAssert.__call__ = our_convert
    builder.get_fake_value = our_fake_value
    builder.VariableBuilder.wrap_symfloat = our_wrap_float
    builder.wrap_to_fake_tensor_and_record = our_wrap_input
    builder.VariableBuilder.wrap_tensor = our_wrap_tensor
    tensor.TensorVariable.call_method = our_call_method
    setattr(tensor.TensorVariable, getattr_name, our_var_getattr)
    builtin.BuiltinVariable.call_isinstance = our_call_isinstance
    torch_variables.TorchInGraphFunctionVariable.call_function = our_call_function
