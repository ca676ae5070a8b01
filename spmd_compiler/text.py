"""The text form of a partitioned graph: one node, one line, no address, no path, no rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from . import collectives as coll
from .collectives import Collective, is_collective
from .ir import Partitioned, is_tensor, source_line

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def readable(nbytes: float) -> str:
    """``1536.0`` -> ``1.50 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def type_text(value: Any, shape: Sequence[Any] | None = None) -> str:
    """``f32[8192, 512 | 2048, 512]``: dtype, global shape, local shape (of coordinate 0) where it differs."""
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    if not is_tensor(value):
        return type(value).__name__
    local = ", ".join(str(int(s)) for s in value.shape)
    whole = local if shape is None else ", ".join(str(int(s)) for s in shape)
    name = DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{name}[{whole}]" if whole == local else f"{name}[{whole} | {local}]"


def argument_text(arg: Any) -> str:
    if isinstance(arg, Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(argument_text(a) for a in arg) + "]"
    if isinstance(arg, torch.dtype):
        return DTYPES.get(arg, str(arg).removeprefix("torch."))
    if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
        return str(arg).removeprefix("torch.")
    return str(arg) if not isinstance(arg, str) else repr(arg)


def target_text(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
        return name.removeprefix("spmd.") if is_collective(node) else name
    return getattr(target, "__name__", str(target))


def _dims(node: Node) -> list[str]:
    """The dims that a collective works on: gathered, then scattered."""
    if node.target is coll.all_to_all:
        return [f"{node.args[1]} -> {node.args[3]}"]
    if node.target is coll.permute:
        return [str(node.args[1]), "/".join(node.args[3]) + " -> " + "/".join(node.args[4])]
    if node.target is coll.fetch:
        want = [" ".join(f"{b}:{e}" for b, e in r) for r in coll.ranges(node.args[4], coll.group_size(node))]
        return [str(node.args[1]), "[" + ", ".join(want) + "]"]
    return [] if node.target is coll.all_reduce else [str(node.args[1])]


def node_text(node: Node) -> tuple[str, str, str, str]:
    """``(name = call, type, spec, comment)`` of one node."""
    args = [argument_text(a) for a in node.args] + [f"{k}={argument_text(v)}" for k, v in node.kwargs.items()]
    comment = source_line(node)
    if is_collective(node):
        c = Collective.of(node)
        head = c.axis + (f", {c.op}" if c.op else "")
        call = f"{c.kind}[{head}]({', '.join([args[0], *_dims(node)])})"
        comment = f"{comment}  {readable(c.wire_bytes)} wire".strip()
    else:
        call = f"{target_text(node)}({', '.join(args)})"
    return (
        f"%{node.name} = {call}",
        type_text(node.meta.get("val"), node.meta.get("global")),
        str(node.meta.get("spec", "")),
        comment,
    )


def program_text(local: Partitioned) -> str:
    """The whole program, aligned in columns."""
    rows: list[tuple[str, str, str, str]] = []
    inputs = iter(local.inputs)
    lines = []
    for node in local.graph.graph.nodes:
        if node.op == "placeholder":
            i = next(inputs)
            rows.append((
                f'%{node.name} = {i.kind} "{i.name}"',
                type_text(node.meta.get("val"), node.meta.get("global")), str(node.meta.get("spec", "")), "",
            ))  # fmt: skip
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            for value, o in zip(flat, local.outputs, strict=True):
                rows.append((f'{o.kind} "{o.name}" = {argument_text(value)}', "", str(o.spec or ""), ""))
        elif node.op == "get_attr":
            rows.append(
                (f"%{node.name} = constant", type_text(node.meta.get("val")), str(node.meta.get("spec", "")), "")
            )
        else:
            rows.append(node_text(node))
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    widths[0] = min(widths[0], 72)
    for row in rows:
        line = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False))
        lines.append((line + (f"  # {row[3]}" if row[3] else "")).rstrip())
    return f'program "{local.captured.name}"  {local.mesh}\n' + "\n".join(lines) + "\n"
