"""An independent witness of a partitioned graph: it reads no solver state.

`derive` re-derives the spec of every value along the local graph, from the rules and from what each collective
does.  `compare` runs all simulated ranks on random inputs beside the global graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx import GraphModule, Node

from . import collectives as coll
from . import simulate
from .bodies import Call, border, call_of, returned
from .devices import on_cpu
from .family import member
from .ir import Partitioned, operands, results, source_line
from .placements import Mesh, Spec, SpmdError
from .redistribute import alias_op, slice_op
from .rules import Rule, rule_of
from .symbolic import bind_tree, sized


class VerificationError(SpmdError):
    """The partitioned graph is not what the global graph means: a bug of the compiler, not of its user."""


def verify(local: Partitioned) -> None:
    """`derive`, then `compare`.  Raises `VerificationError`."""
    derive(local)
    compare(local)


def derive(local: Partitioned) -> None:
    """Check every spec of the local graph.

    A redistribution must lead from its operand's spec to its own; a computed value must follow from the specs of
    the operands by the node's rule, axis by axis; every local shape must be the one the spec gives.
    """
    hints = {d.name: d.hint for d in local.captured.data}
    _derive((member(local.captured, hints) if hints else local.captured).graph, local.graph, local.mesh, hints)


def _derive(whole: GraphModule, gm: GraphModule, mesh: Mesh, hints: Mapping[str, int] = {}) -> None:
    joint = {n.name: n for n in whole.graph.nodes}
    for node in gm.graph.nodes:
        spec = node.meta.get("spec")
        if spec is None:
            continue
        expected = bind_tree(spec.local_shape(sized(node.meta["global"], hints), mesh), {})
        if tuple(node.meta["val"].shape) != tuple(expected):
            raise VerificationError(
                f"{_where(node)}: local shape {tuple(node.meta['val'].shape)}, {spec} gives {expected}"
            )
        if "value" in node.meta:
            _check_move(node, mesh)
        elif "joined" in node.meta:
            _check_joined(node, mesh)
        elif node.op == "call_function" and "choice" in node.meta:
            _check_choice(node, joint[node.meta["origin"]])
    for node in gm.graph.nodes:
        if call := call_of(node):
            _check_bodies(node, call, joint[node.meta["origin"]], mesh)


def _check_bodies(node: Node, call: Call, origin: Node, mesh: Mesh) -> None:
    """The specs of a call's operands and results are those of its bodies' inputs and outputs, and of all that a loop
    carries; every spec in a body follows."""
    given = [o.meta["spec"] for o in operands(node)]
    made: list[Spec | None] = [None] * len(results(node))
    for user in node.users:
        made[user.args[1]] = user.meta["spec"]
    meant = call_of(origin)
    assert meant is not None
    for b, (place, whole) in enumerate(zip(call.bodies, meant.bodies, strict=True)):
        body, at = place.meta["val"], border(call, b, given, made, mesh)
        inputs = [n.meta.get("spec") for n in body.graph.find_nodes(op="placeholder")]
        outputs = [v.meta.get("spec") if isinstance(v, Node) else None for v in returned(body)]
        decides = call.asks and b == 0
        expected = [o if s is None else s for s, o in zip(at.outputs, outputs, strict=True)]  # None: nobody reads it
        if inputs != list(at.inputs) or outputs != expected:
            raise VerificationError(f"{_where(node)}: body {b} takes {inputs} and gives {outputs}, its call says {at}")
        if not decides and outputs[: call.carried] != inputs[: call.carried]:
            raise VerificationError(f"{_where(node)}: body {b} carries {inputs[: call.carried]} in and {outputs} out")
        apart = [a for a in mesh.axes if at.mesh[a] != mesh[a]]
        if any(not s[a].is_replicate() for s in (*inputs, *outputs) if s is not None for a in apart):
            raise VerificationError(f"{_where(node)}: body {b} knows {apart}, which part its slices between devices")
        _derive(whole.meta["val"], body, at.mesh)


def _where(node: Node) -> str:
    return f"{node.name} ({source_line(node)})"


def _check_move(node: Node, mesh: Mesh) -> None:
    source, target = node.args[0].meta["spec"], node.meta["spec"]
    changed = [a for a in source.axes if source[a] != target[a]]
    if node.target is coll.permute:
        if changed or source.nesting == target.nesting:
            raise VerificationError(f"{_where(node)}: permute from {source} to {target}")
        return
    axis = coll.axes_of(node)[0] if coll.is_collective(node) else (changed or [""])[0]
    op = coll.reduce_op(node) if coll.is_collective(node) else None
    _check_axis(node, node.target, axis, op, source, target, mesh)


def _check_joined(node: Node, mesh: Mesh) -> None:
    """One member of a joined collective: what that does leads from the member's operand's spec to its own."""
    kind, source, axis, op = node.meta["joined"]
    whole = next((n for n in _above(node) if coll.is_collective(n)), None)
    if whole is None or (coll.KINDS[whole.target], coll.axes_of(whole), coll.reduce_op(whole)) != (kind, (axis,), op):
        raise VerificationError(f"{_where(node)}: it is no part of {kind} over {axis}")
    _check_axis(node, whole.target, axis, op, source, node.meta["spec"], mesh)


def _above(node: Node) -> Iterator[Node]:
    """The nodes that lead to one, through first operands."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


def _check_axis(node: Node, call: Any, axis: str, op: str | None, source: Spec, target: Spec, mesh: Mesh) -> None:
    changed = [a for a in source.axes if source[a] != target[a]]
    if changed != [axis]:
        raise VerificationError(f"{_where(node)}: one collective over {axis} leads from {source} to {target}")
    old, new = source[axis], target[axis]
    legal = {
        coll.all_reduce: isinstance(old, Partial) and isinstance(new, Replicate),
        coll.reduce_scatter: isinstance(old, Partial) and isinstance(new, Shard),
        coll.all_gather: isinstance(old, Shard) and isinstance(new, Replicate),
        coll.all_to_all: isinstance(old, Shard) and isinstance(new, Shard),
        slice_op: isinstance(old, Replicate) and isinstance(new, Shard),
    }.get(call, False)
    if call is alias_op and mesh[axis] == 1:
        return
    inner = not isinstance(old, Shard) or source.axes_of(old.dim)[-1] == axis
    innermost = not isinstance(new, Shard) or target.axes_of(new.dim)[-1] == axis
    if isinstance(old, Partial) and legal:
        legal = op == old.reduce_op
    if not (legal and inner and innermost):
        raise VerificationError(f"{_where(node)}: {call} does not lead from {source} to {target}")


def _check_choice(node: Node, origin: Node) -> None:
    choice, result = node.meta["choice"], node.meta["result"]
    if choice.results[result] != node.meta["spec"]:
        raise VerificationError(f"{_where(node)}: spec {node.meta['spec']}, its choice says {choice.results[result]}")
    r = rule_of(origin)
    whole = all(s.is_replicated() for s in (*choice.operands, *(x for x in choice.results if x is not None)))
    if whole or origin.meta.get("region"):
        return
    if r is None:
        raise VerificationError(f"{_where(node)}: {origin.target} has no rule but runs on {choice.operands}")
    for axis in node.meta["spec"].axes:
        given = [s[axis] for s in choice.operands]
        made = [s[axis] for s, v in zip(choice.results, results(origin), strict=True) if v is not None]
        if not _legal(r, given, made, [v is not None for v in results(origin)]):
            raise VerificationError(
                f"{_where(node)}: on {axis}, {given} do not give {made} by the rule of {origin.target}"
            )
    for spec, o in zip(choice.operands, operands(origin), strict=True):
        _check_order(r, spec, o)


def _legal(r: Rule, given: list, made: list, kept: list[bool]) -> bool:
    """Whether on one axis these operand placements give these result placements."""
    if all(isinstance(p, Replicate) for p in given + made):
        return True
    outs = [d for d, k in zip(r.results, kept, strict=True) if k]
    for way in r.ways:
        if given == list(way.operands) and made == [p for p, k in zip(way.results, kept, strict=True) if k]:
            return True
    for factor in r.shardable():
        expected = [_shard_of(d, factor) or Replicate() for d in r.operands]
        missing = r.reduce.get(factor, "sum")
        ends = [_shard_of(d, factor) or (Replicate() if missing == "none" else Partial(missing)) for d in outs]
        if given == expected and made == ends:
            return True
    for group in r.linear:
        for op in group.ops:
            expected = [Partial(op) if i in group.operands else Replicate() for i in range(len(given))]
            if given == expected and all(p == Partial(op) for p in made):
                return True
    return False


def _shard_of(dims: tuple, factor: str) -> Shard | None:
    return next((Shard(i) for i, d in enumerate(dims) if d and d[0] == factor), None)


def _check_order(r: Rule, spec: Spec, operand: Node) -> None:
    for dim in range(operand.meta["val"].dim()):
        axes = spec.axes_of(dim)
        if len(axes) > 1 and not r.operands:
            raise VerificationError(f"{operand.name}: {spec} nests {axes} on dim {dim}")


def compare(local: Partitioned, seed: int = 0) -> None:
    """Run every simulated rank and the global graph on the same random inputs; every output must agree."""
    places = [n for n in local.captured.graph.graph.nodes if n.op == "placeholder"]
    failure: Exception | None = None
    for most in (1, 0):  # an index of 1 may be out of range, 0 hardly ever
        generator = torch.Generator().manual_seed(seed)
        given = [_random(n, most, generator) for n in places]
        try:
            with torch.no_grad():
                expected = simulate.run_global(on_cpu(local.captured.graph), given)
        except Exception as error:
            failure = error
            continue
        return _compare(local, given, expected)
    raise SpmdError(f"the program can't be verified on random inputs: {failure}; compare simulate() with your own")


def check(local: Partitioned, given: list) -> None:
    """`compare` on these global inputs."""
    with torch.no_grad():
        expected = simulate.run_global(on_cpu(local.captured.graph), given)
    _compare(local, given, expected)


def _compare(local: Partitioned, given: list, expected: list) -> None:
    outs = simulate_outputs(local, given)
    computed = [v for n in local.captured.graph.graph.nodes for v in results(n) if v is not None]
    coarse = max((torch.finfo(v.dtype).eps for v in computed if v.dtype.is_floating_point), default=0.0)
    loose = max(1e-3, 3 * coarse)
    for o, want, got in zip(local.outputs, expected, outs, strict=True):
        if want is None or o.spec is None:
            continue
        inexact = want.dtype.is_floating_point or want.dtype.is_complex
        if want.dtype.is_floating_point:
            want, got = want.double(), got.double()
        size = float(want.abs().max()) if inexact and want.numel() else 1.0
        tolerance = {"rtol": loose, "atol": loose * max(1.0, size) * 0.1} if inexact else {"rtol": 0.0, "atol": 0.0}
        try:
            torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
        except AssertionError as error:
            raise VerificationError(f"output {o.name!r} {o.spec}: {error}") from None


@torch.no_grad()
def simulate_outputs(local: Partitioned, given: list) -> list:
    """The global outputs of all simulated ranks, given the global inputs, on the CPU."""
    ranks = local.mesh.size
    feed: list[list] = [[] for _ in range(ranks)]
    for value, i in zip(given, local.inputs, strict=True):
        value = value.cpu() if isinstance(value, torch.Tensor) else value
        pieces = [value] * ranks if i.spec is None else simulate.split(value, i.spec, local.mesh)
        for rank in range(ranks):
            feed[rank].append(pieces[rank])
    outs = simulate.run(on_cpu(local.graph), local.mesh, feed)
    shapes = _output_shapes(local)
    joined = []
    for j, o in enumerate(local.outputs):
        if o.spec is None:
            joined.append(outs[0][j])
        else:
            pieces = [r[j] for r in outs]
            # a size that data decide is that of every piece
            shape = [n if isinstance(n, int) else pieces[0].shape[d] for d, n in enumerate(shapes[j])]
            joined.append(simulate.join(pieces, o.spec, local.mesh, shape, check=False))
    return joined


def _output_shapes(local: Partitioned) -> list:
    out = next(n for n in reversed(local.captured.graph.graph.nodes) if n.op == "output")
    flat = out.args[0] if isinstance(out.args[0], (tuple, list)) else [out.args[0]]
    return [_shape(v) if isinstance(v, Node) and results(v) else None for v in flat]


def _shape(node: Node) -> tuple[Any, ...]:
    layout = node.meta.get("layout")
    return tuple(node.meta["val"].shape) if layout is None else layout[0]


def _random(node: Node, most: int, generator: torch.Generator) -> torch.Tensor | int:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return int(value)
    shape = tuple(int(s) for s in value.shape)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(value.dtype)
    if value.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=value.dtype)
    return torch.randint(0, most + 1, shape, generator=generator).to(value.dtype)
