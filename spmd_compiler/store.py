"""Programs in files: `save` and `load`.

A file is a zip of

    manifest.json         what it is, and its version
    program.json          both graphs (local and global), inputs, outputs, prices, how arguments map to them
    program.txt           the text, for people
    tensors.safetensors   constants
    weights.safetensors   parameters and buffers, if asked for

Operators are named, values described, integers that depend on a device's place written as expressions: nothing in a
file is code, and nothing is unpickled.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import json
import math
import operator
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import sympy
import torch
from safetensors import SafetensorError
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .capture import Binding, Kind, fake_mode, named_state
from .cost import Profile, profile_fields
from .dims import Dim, Dims, Guard
from .family import Decisions, Family
from .ir import Captured, Draft, Input, Output, Partitioned, source_line
from .joint import OutputIndex
from .memory import Memory
from .placements import Mesh, Spec, SpmdError
from .redistribute import Move
from .rules import Choice
from .symbolic import parse as parse_expression
from .words import shown

DAMAGE = (
    zipfile.BadZipFile, zlib.error, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError,
    EOFError, RuntimeError, ArithmeticError,
)  # fmt: skip
FORMAT, VERSION = "spmd_compiler program", 3  # 1 without dynamic dims, 2 without sizes that data decide
# of a node's meta, plain data
KEPT = ("phase", "why", "origin", "result", "region", "of", "kept", "members", "joined", "times", "makes")
CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


# --- values as plain data ---------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """An argument of a node, a constant, a spec as JSON.  Raises `SpmdError` for what can't be written."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, Spec):
        return {"spec": str(value)}
    if isinstance(value, sympy.Basic):
        return {"expression": str(value)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (list, tuple)):
        items = [encode(v) for v in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for name, kind in CONSTANTS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, torch._ops.OpOverload) or _higher_order(value):
        return {"operator": target_name(value)}
    raise SpmdError(f"{shown(value)} ({type(value).__name__}) is no plain data and can't be saved")


def decode(value: Any, nodes: Mapping[str, Node]) -> Any:
    """What `encode` wrote; ``nodes`` are those of the graph."""
    if isinstance(value, list):
        return [decode(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((key, given),) = value.items()
    if key in CONSTANTS:
        found = getattr(torch, given)
        if not isinstance(found, CONSTANTS[key]):
            raise ValueError(f"{given} is no {key}")
        return found
    readers: dict[str, Callable[[Any], Any]] = {
        "node": nodes.__getitem__,
        "spec": Spec.parse,
        "expression": functools.partial(parse_expression, dims=None),
        "float": float,
        "complex": lambda v: complex(*(decode(x, nodes) for x in v)),
        "tuple": lambda v: tuple(decode(x, nodes) for x in v),
        "dict": lambda v: {decode(k, nodes): decode(x, nodes) for k, x in v},
        "slice": lambda v: slice(*(decode(x, nodes) for x in v)),
        "device": torch.device,
        "operator": target_of,
    }
    return readers[key](given)


def _higher_order(target: Any) -> bool:
    name = getattr(target, "__name__", None)
    return isinstance(name, str) and getattr(torch.ops.higher_order, name, None) is target


def target_name(target: Any) -> str:
    """An operator by name: ``aten::mm``, ``aten::slice.Tensor``, ``higher_order::cond``, ``operator::getitem``."""
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    if _higher_order(target):
        return f"higher_order::{target.__name__}"
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return f"operator::{target.__name__}"
    raise SpmdError(f"{shown(target)} is no registered operator and can't be saved; register it with torch.library")


def target_of(name: str) -> Any:
    """The operator of a name."""
    space, _, rest = name.partition("::")
    if space == "operator":
        return getattr(operator, rest)
    try:
        if space != "higher_order" and "." not in rest:
            rest += ".default"
        return functools.reduce(getattr, rest.split("."), getattr(torch.ops, space))
    except (AttributeError, RuntimeError):
        raise SpmdError(f"there is no operator {name}; import what registers it before loading the program") from None


# --- graphs -----------------------------------------------------------------------------------------------------


class Writer:
    """Writes graphs, and gathers the tensors they hold."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def graph(self, gm: GraphModule) -> dict[str, Any]:
        attributes = {}
        for node in gm.graph.find_nodes(op="get_attr"):
            held = operator.attrgetter(node.target)(gm)
            body = isinstance(held, GraphModule)
            attributes[node.target] = {"graph": self.graph(held)} if body else self.tensor(held)
        return {"nodes": [self.node(n) for n in gm.graph.nodes], "attributes": attributes}

    def tensor(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or value.is_sparse:
            raise SpmdError(f"a constant of the program can't be saved: {type(value).__name__} {tuple(value.shape)}")
        key = f"constant.{len(self.tensors)}"
        self.tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": key, "device": value.device.type}

    def node(self, node: Node) -> dict[str, Any]:
        meta = {k: encode(node.meta[k]) for k in KEPT if node.meta.get(k) is not None}
        meta["source"] = source_line(node)
        for key in ("spec", "global", "value", "local", "layout"):
            if key in node.meta:
                meta[key] = encode(node.meta[key])
        choice = node.meta.get("choice")
        if choice is not None:
            meta["choice"] = encode([tuple(choice.operands), tuple(choice.results)])
        found = {"name": node.name, "op": node.op, "meta": meta, "value": describe(node.meta.get("val"))}
        if node.op == "call_function":
            found |= {"target": target_name(node.target), "kwargs": encode(dict(node.kwargs))}
        elif node.op in ("placeholder", "get_attr"):
            found["target"] = node.target
        try:
            return found | {"args": encode(node.args)}
        except SpmdError as error:
            raise SpmdError(f"{node.name} ({source_line(node)}): {error}") from None


def describe(value: Any) -> Any:
    """A fake value as JSON: what it takes to make one like it."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return [dtype, list(map(int, value.shape)), list(map(int, value.stride())), value.device.type]
    if isinstance(value, (list, tuple)):
        return {"tuple": [describe(v) for v in value]}
    return {"number": encode(value)} if isinstance(value, (bool, int, float)) else None


class Reader:
    """Makes graphs of what `Writer` wrote."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], mode: Any) -> None:
        self.tensors, self.mode = tensors, mode

    def graph(self, given: dict[str, Any]) -> GraphModule:
        root = torch.nn.Module()
        for path, held in given["attributes"].items():
            *folders, last = path.split(".")
            place = root
            for folder in folders:
                if not hasattr(place, folder):
                    setattr(place, folder, torch.nn.Module())
                place = getattr(place, folder)
            setattr(place, last, self.graph(held["graph"]) if "graph" in held else self.tensor(held))
        graph, nodes = Graph(), dict[str, Node]()
        for n in given["nodes"]:
            args = decode(n["args"], nodes)
            target = target_of(n["target"]) if n["op"] == "call_function" else n.get("target", "output")
            node = graph.create_node(n["op"], target, args, decode(n.get("kwargs", {"dict": []}), nodes), n["name"])
            node.meta = {k: decode(v, nodes) for k, v in n["meta"].items() if k != "choice"}
            if "choice" in n["meta"]:
                node.meta["choice"] = Choice(*decode(n["meta"]["choice"], nodes))
            node.meta["val"] = self.value(n["value"])
            if n["op"] == "get_attr" and isinstance(operator.attrgetter(target)(root), GraphModule):
                node.meta["val"] = operator.attrgetter(target)(root)
            nodes[n["name"]] = node
        return Draft(root, graph)

    def tensor(self, given: dict[str, Any]) -> torch.Tensor:
        kind = given["device"]  # that of the machine that saved it, maybe not of this
        return self.tensors[given["tensor"]].to(kind if torch.get_device_module(kind).is_available() else "cpu")

    def value(self, given: Any) -> Any:
        if isinstance(given, dict):
            if "number" in given:
                return decode(given["number"], {})
            return tuple(self.value(v) for v in given["tuple"])
        if given is None:
            return None
        dtype, shape, stride, device = given
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


# --- arguments and results --------------------------------------------------------------------------------------


def encode_tree(value: Any) -> Any:
    """The structure of a result whose leaves are numbers."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [type(value).__name__, [[k, encode_tree(getattr(value, k))] for k in value._fields]]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__ if type(value) in (list, tuple) else "list": [encode_tree(v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k), encode_tree(v)] for k, v in value.items()]}
    children, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    names = [(str(getattr(path[0], "name", getattr(path[0], "key", i))), v) for i, (path, v) in enumerate(children)]
    return {"dict": [[k, encode_tree(v)] for k, v in names]}


def decode_tree(given: Any) -> Any:
    if isinstance(given, int):
        return given
    ((kind, items),) = given.items()
    if kind == "named":
        name, fields = items
        return collections.namedtuple(name, [k for k, _ in fields])(*(decode_tree(v) for _, v in fields))
    if kind == "dict":
        return {decode(k, {}): decode_tree(v) for k, v in items}
    return {"list": list, "tuple": tuple}[kind](decode_tree(v) for v in items)


def encode_binding(binding: Binding, writer: Writer) -> dict[str, Any]:
    def slot(kind: str, key: Any) -> Any:
        return [kind, writer.tensor(key) if kind == "constant" else key]

    def expected(name: str, want: Any) -> Any:
        if isinstance(want, Kind):
            return {"kind": [encode(list(want.shape)), str(want.dtype).removeprefix("torch.")]}
        try:
            return {"constant": encode(want)}
        except SpmdError:
            raise SpmdError(
                f"argument {name!r} is {shown(want)}, which is no plain data and can't be saved; close over it in a "
                "function of the other arguments and export that"
            ) from None

    parameters = []
    for p in binding.signature.parameters.values():
        has = p.default is not inspect.Parameter.empty
        parameters.append([p.name, p.kind.name, has, encode(p.default) if has and _is_plain(p.default) else None])
    leaves = pytree.tree_unflatten(range(len(binding.results)), binding.out_tree)
    results = [{"output": r.index} if isinstance(r, OutputIndex) else {"constant": encode(r)} for r in binding.results]
    return {
        "signature": parameters,
        "slots": [slot(*s) for s in binding.slots],
        "out_tree": encode_tree(leaves),
        "results": results,
        "grad_names": binding.grad_names,
        "expected": {n: expected(n, w) for n, w in binding.expected.items()},
    }


def _is_plain(value: Any) -> bool:
    try:
        encode(value)
    except SpmdError:
        return False
    return True


def decode_binding(given: dict[str, Any], reader: Reader) -> Binding:
    parameters = []
    for name, kind, has, default in given["signature"]:
        value = decode(default, {}) if has else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value))

    def expected(want: Any) -> Any:
        if "constant" in want:
            return decode(want["constant"], {})
        shape, dtype = want["kind"]
        return Kind(tuple(decode(shape, {})), getattr(torch, dtype))

    numbers, tree = pytree.tree_flatten(decode_tree(given["out_tree"]))
    results = [given["results"][i] for i in numbers]
    return Binding(
        inspect.Signature(parameters),
        None,
        [(kind, reader.tensor(key) if kind == "constant" else key) for kind, key in given["slots"]],
        tree,
        [OutputIndex(r["output"]) if "output" in r else decode(r["constant"], {}) for r in results],
        given["grad_names"],
        {n: expected(w) for n, w in given["expected"].items()},
        weights={},
    )


# --- dynamic dims ---------------------------------------------------------------------------------------------


def encode_family(family: Family, writer: Writer) -> dict[str, Any]:
    d = family.decisions
    decisions = {
        "choices": {n: (c.operands, c.results, c.factor_axes) for n, c in d.choices.items()},
        "factors": dict(d.factors),
        "trees": {key: {spec: (m.kind, m.axes, m.source, m.target) for spec, m in tree.items()}
                  for key, tree in d.trees.items()},
        "outputs": list(d.outputs), "kept": dict(d.kept), "replicated_ops": d.replicated_ops,
    }  # fmt: skip
    return {
        "dims": [[x.name, x.hint, x.low, x.high] for x in family.dims.dims],
        "guards": [[encode(g.condition), g.reason] for g in family.dims.guards],
        "global": writer.graph(family.captured.graph),
        "outputs": [encode(o.spec) for o in family.captured.outputs],
        "local": writer.graph(family.common.graph),
        "decisions": encode(decisions),
    }


def decode_family(given: dict[str, Any], reader: Reader, local: Partitioned) -> Family:
    d = decode(given["decisions"], {})
    decisions = Decisions(
        {n: Choice(*c) for n, c in d["choices"].items()}, d["factors"],
        {key: {spec: Move(*m) for spec, m in tree.items()} for key, tree in d["trees"].items()},
        d["outputs"], d["kept"], d["replicated_ops"],
    )  # fmt: skip
    outputs = [dataclasses.replace(o, spec=decode(s, {}))
               for o, s in zip(local.captured.outputs, given["outputs"], strict=True)]  # fmt: skip
    captured = dataclasses.replace(local.captured, graph=reader.graph(given["global"]), outputs=outputs)
    dims = Dims(tuple(Dim(*x) for x in given["dims"]), tuple(Guard(decode(c, {}), why) for c, why in given["guards"]))
    return Family(captured, decisions, dims, dataclasses.replace(local, graph=reader.graph(given["local"])))


# --- files ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a file holds."""

    local: Partitioned
    binding: Binding
    backward: bool
    states: float
    budget: Memory | None
    family: Family | None = None


def path_of(given: Any, writing: bool = False) -> Path:
    """Of a file.  Raises `SpmdError` for what is none, and when ``writing`` where there is no folder for it."""
    if not isinstance(given, (str, os.PathLike)):
        raise SpmdError(f"a program is saved in a file: give its path, not {shown(given)}")
    if (found := Path(given)).is_dir():
        raise SpmdError(f"{found} is a folder; give the path of a file")
    if writing and not found.absolute().parent.is_dir():
        raise SpmdError(f"there is no folder {found.parent} to save {found.name} in")
    return found


def save(stored: Stored, text: str, path: Any, weights: bool) -> None:
    """Write a file.  Raises `SpmdError` for what can't be saved, and for a path that leads nowhere."""
    at = path_of(path, writing=True)
    local, captured, writer = stored.local, stored.local.captured, Writer()
    profile = dataclasses.asdict(local.profile) if local.profile is not None else None
    program = {
        "name": captured.name,
        "mesh": list(zip(local.mesh.axes, local.mesh.shape, strict=True)),
        "local": writer.graph(local.graph),
        "global": writer.graph(captured.graph),
        "inputs": [[i.name, i.kind, encode(i.spec), encode(c.spec)]
                   for i, c in zip(local.inputs, captured.inputs, strict=True)],
        "outputs": [[o.name, o.kind, encode(o.spec), encode(c.spec), o.of]
                    for o, c in zip(local.outputs, captured.outputs, strict=True)],
        "num_forward_outputs": local.num_forward_outputs,
        "price": local.price, "saved": local.saved, "bound": local.bound, "replicated_ops": list(local.replicated_ops),
        "profile": encode(profile),
        "binding": encode_binding(stored.binding, writer),
        "backward": stored.backward, "states": stored.states,
        "budget": [stored.budget.budget, stored.budget.states] if stored.budget is not None else None,
    }  # fmt: skip
    if stored.family is not None:
        program["family"] = encode_family(stored.family, writer)
    if captured.data:
        program["data"] = [[d.name, d.hint, d.low, d.high] for d in captured.data]
    version = 3 if captured.data else 1 if stored.family is None else 2
    manifest = {"format": FORMAT, "version": version, "torch": torch.__version__}
    parts: dict[str, str | bytes] = {
        "manifest.json": json.dumps(manifest),
        "program.json": json.dumps(program),
        "program.txt": text,
        "tensors.safetensors": safetensors.torch.save(writer.tensors),
    }
    if weights:
        parts["weights.safetensors"] = safetensors.torch.save(_weights(stored.binding))
    new = at.with_name(f"{at.name}.{os.getpid()}.new")  # what was there stays until all is written
    try:
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in parts.items():  # no date: equal programs, equal files
                file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        os.replace(new, at)
    except OSError as error:
        raise SpmdError(f"{at} can't be written: {error}") from None
    finally:
        new.unlink(missing_ok=True)


def _weights(binding: Binding) -> dict[str, torch.Tensor]:
    held = binding.weights if binding.weights is not None else named_state(binding.owner)
    found = {}
    for name in (key for kind, key in binding.slots if kind == "state"):
        value = held.get(name)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type == "meta":
            raise SpmdError(f"weight {name!r} has no values to save here; save with weights=False and give it at load")
        found[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return found


def load(path: Any) -> Stored:
    """Read a file.  Raises `SpmdError` where it is none, newer than this version, or damaged."""
    shown = (path := path_of(path)).name
    try:
        with zipfile.ZipFile(path) as file:
            manifest = json.loads(file.read("manifest.json"))
            if manifest["format"] != FORMAT:
                raise SpmdError(f"{shown} holds no program of spmd_compiler")
            if manifest["version"] > VERSION:
                raise SpmdError(
                    f"{shown} is of version {manifest['version']}, this spmd_compiler reads up to {VERSION}: "
                    "install a newer one, or save the program anew with this one"
                )
            program = json.loads(file.read("program.json"))
            tensors = safetensors.torch.load(file.read("tensors.safetensors"))
            held = "weights.safetensors" in file.namelist()
            weights = safetensors.torch.load(file.read("weights.safetensors")) if held else {}
        try:
            return _stored(program, tensors, weights)
        except SpmdError as error:
            raise SpmdError(f"{shown}: {error}") from None
    except FileNotFoundError:
        raise SpmdError(f"there is no file {path}") from None
    except SpmdError:
        raise
    except DAMAGE as error:
        raise SpmdError(f"{shown} is damaged, or no saved program: {type(error).__name__}: {error}") from error


def _stored(program: dict[str, Any], tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> Stored:
    reader = Reader(tensors, fake_mode())
    mesh = Mesh([(a, n) for a, n in program["mesh"]])
    specs = [[decode(s, {}) for s in i[2:4]] for i in program["inputs"]]
    inputs = [Input(name, kind, s) for (name, kind, *_), (s, _) in zip(program["inputs"], specs, strict=True)]
    wanted = [Input(name, kind, c) for (name, kind, *_), (_, c) in zip(program["inputs"], specs, strict=True)]
    outs = [(name, kind, decode(s, {}), decode(c, {}), of) for name, kind, s, c, of in program["outputs"]]
    captured = Captured(
        reader.graph(program["global"]), wanted, [Output(n, k, c, of) for n, k, _, c, of in outs],
        program["num_forward_outputs"], mesh, program["name"],
        data=tuple(Dim(*d) for d in program.get("data", ())),
    )  # fmt: skip
    profile = decode(program["profile"], {})
    if profile is not None:
        profile = Profile(**profile_fields(profile))
    local = Partitioned(
        reader.graph(program["local"]), inputs, [Output(n, k, s, of) for n, k, s, _, of in outs],
        program["num_forward_outputs"], mesh, captured, price=program["price"], bound=program["bound"],
        saved=program.get("saved", 0.0),
        replicated_ops=tuple(program["replicated_ops"]), profile=profile,
    )  # fmt: skip
    binding = dataclasses.replace(decode_binding(program["binding"], reader), weights=dict(weights))
    budget = Memory(*program["budget"]) if program["budget"] is not None else None
    family = decode_family(program["family"], reader, local) if "family" in program else None
    return Stored(local, binding, program["backward"], program["states"], budget, family)
