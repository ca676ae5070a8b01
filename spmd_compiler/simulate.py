"""All ranks of a mesh in one process: cut global values, run a local graph in lockstep, join the pieces.

An independent witness: it reads nothing of the solver, and every collective here is written from its
definition on global pieces, not from the code that runs on real devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from . import collectives as coll
from .ir import check_size, size_op
from .placements import Mesh, Spec, SpmdError
from .symbolic import bind_tree, piece, sized

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def identity(op: str, like: torch.Tensor) -> torch.Tensor:
    """The neutral element of a reduction, in the shape of ``like``."""
    if op == "sum":
        return torch.zeros_like(like)
    if op == "product":
        return torch.ones_like(like)
    if like.dtype.is_floating_point:
        extreme: float = math.inf
    elif like.dtype == torch.bool:
        return torch.full_like(like, op == "min")
    else:
        info = torch.iinfo(like.dtype)
        return torch.full_like(like, info.max if op == "min" else info.min)
    return torch.full_like(like, extreme if op == "min" else -extreme)


def cut(value: torch.Tensor, spec: Spec, mesh: Mesh, at: dict[str, int]) -> torch.Tensor:
    """The piece of ``value`` that the rank at ``at`` holds.  A partial value is whole on coordinate 0 of its axes
    and the op's neutral element elsewhere."""
    local = value
    for dim in range(value.dim()):
        for axis in spec.axes_of(dim):
            begin, size = piece(local.shape[dim], mesh[axis], at[axis])
            local = local.narrow(dim, begin, size)
    for axis, p in zip(spec.axes, spec.placements, strict=True):
        if isinstance(p, Partial) and at[axis] != 0:
            local = identity(p.reduce_op, local)
    return local.clone()


def split(value: torch.Tensor, spec: Spec, mesh: Mesh, generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """The pieces of every rank, in rank order.

    With a generator, a floating or integer ``Partial("sum")`` is split into random terms, so that an op that is
    not linear in it gives a wrong result.
    """
    partial = [a for a, p in zip(spec.axes, spec.placements, strict=True) if p == Partial("sum")]
    if generator is None or not partial or value.dtype == torch.bool:
        return [cut(value, spec, mesh, at) for at in mesh.coordinates()]
    whole = Spec(spec.axes, tuple(Replicate() if p == Partial("sum") else p for p in spec.placements), spec.nesting)
    corners = list(itertools.product(*(range(mesh[a]) for a in partial)))
    terms = {c: torch.randint(-4, 5, value.shape, generator=generator).to(value.dtype) for c in corners[1:]}
    terms[corners[0]] = value - sum(terms.values())
    return [cut(terms[tuple(at[a] for a in partial)], whole, mesh, at) for at in mesh.coordinates()]


def join(
    pieces: Sequence[torch.Tensor], spec: Spec, mesh: Mesh, shape: Sequence[int], check: bool = True
) -> torch.Tensor:
    """The global value of ``shape`` whose pieces are given in rank order.

    With ``check``, replicas must agree bit for bit and every piece must have its spec's size, or `SpmdError` is
    raised.
    """
    places = list(mesh.coordinates())
    held = {tuple(at.values()): p for at, p in zip(places, pieces, strict=True)}
    for axis, p in zip(spec.axes, spec.placements, strict=True):
        if isinstance(p, Partial):
            i = mesh.axes.index(axis)
            for place in [k for k in held if k[i] == 0]:
                total = held[place]
                for c in range(1, mesh[axis]):
                    total = REDUCTIONS[p.reduce_op](total, held[place[:i] + (c,) + place[i + 1 :]])
                for c in range(mesh[axis]):
                    held[place[:i] + (c,) + place[i + 1 :]] = total
    out = torch.empty(tuple(shape), dtype=pieces[0].dtype)
    seen = torch.zeros(tuple(shape), dtype=torch.bool)
    for at in places:
        local, window, mask = held[tuple(at.values())], out, seen
        for dim in range(len(shape)):
            for axis in spec.axes_of(dim):
                begin, size = piece(window.shape[dim], mesh[axis], at[axis])
                window, mask = window.narrow(dim, begin, size), mask.narrow(dim, begin, size)
        if window.shape != local.shape:
            raise SpmdError(
                f"rank {at} holds {tuple(local.shape)}, spec {spec} of {tuple(shape)} says {tuple(window.shape)}"
            )
        if check and window.numel() and bool(mask.all()):
            if not torch.equal(torch.nan_to_num(window), torch.nan_to_num(local)):
                raise SpmdError(f"replicas of a value with spec {spec} differ on rank {at}")
            continue
        window.copy_(local)
        mask.fill_(True)
    return out


def groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """The ranks that communicate over ``axes``, each group in row-major order of ``axes`` as given."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank, at in enumerate(mesh.coordinates()):
        rest = tuple(c for a, c in at.items() if a not in axes)
        found.setdefault(rest, []).append((tuple(at[a] for a in axes), rank))
    return [[rank for _, rank in sorted(members)] for members in found.values()]


# --- collectives from their definitions -------------------------------------------------------------------------


def _reduce(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    total = values[0]
    for v in values[1:]:
        total = REDUCTIONS[op](total, v)
    return total


def _all_reduce(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    _, _, op = args[0]
    total = _reduce(xs, op)
    return [total.clone() for _ in xs]


def _all_gather(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    dim, total, _, _ = args[0]
    whole = torch.cat(xs, dim)
    if whole.shape[dim] != total:
        raise SpmdError(f"all_gather: pieces of dim {dim} hold {whole.shape[dim]} elements, not {total}")
    return [whole.clone() for _ in xs]


def _reduce_scatter(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    dim, _, _, parts, op = args[0]
    total = _reduce(xs, op)
    return [_piece(total, dim, parts, i, a[1]) for i, a in enumerate(args)]


def _all_to_all(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    gather_dim, total, split_dim, _, _, parts = args[0]
    whole = torch.cat(xs, gather_dim)
    if whole.shape[gather_dim] != total:
        raise SpmdError(f"all_to_all: pieces of dim {gather_dim} hold {whole.shape[gather_dim]}, not {total}")
    return [_piece(whole, split_dim, parts, i, a[3]) for i, a in enumerate(args)]


def _fetch(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    dim, _, have, want, fill, _, _ = args[0]
    low, high = min(0, *have, *want), max(*have, *want)
    shape = list(xs[0].shape)
    shape[dim] = high - low
    whole = torch.full(shape, fill, dtype=xs[0].dtype)
    for i, x in enumerate(xs):
        whole.narrow(dim, have[2 * i] - low, have[2 * i + 1] - have[2 * i]).copy_(x)
    each = len(want) // len(xs)
    found = []
    for i, a in enumerate(args):
        mine = want[i * each : (i + 1) * each]
        parts = [whole.narrow(dim, b - low, e - b) for b, e in zip(mine[::2], mine[1::2], strict=True)]
        found.append(torch.cat(parts, dim))
        if found[-1].shape[dim] != a[1]:
            raise SpmdError(f"fetch: device {i} gets {found[-1].shape[dim]} elements of dim {dim}, not {a[1]}")
    return found


def _permute(xs: list[torch.Tensor], args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    _, _, order, new_order, sizes = args[0]
    places = list(itertools.product(*(range(s) for s in sizes)))  # of the group's members, in `order`
    held = {place: x for place, x in zip(places, xs, strict=True)}
    found = []
    for place in places:
        at = dict(zip(order, place, strict=True))
        index = 0
        for axis in new_order:  # the piece this member must hold, numbered outermost first
            index = index * sizes[order.index(axis)] + at[axis]
        source = []
        for s in reversed(sizes):
            index, c = divmod(index, s)
            source.append(c)
        found.append(held[tuple(reversed(source))].clone())
    return found


def _piece(x: torch.Tensor, dim: int, parts: int, index: int, size: int) -> torch.Tensor:
    begin, expected = piece(x.shape[dim], parts, index)
    if expected != size:
        raise SpmdError(f"piece {index} of {x.shape[dim]} in {parts} holds {expected} elements, not {size}")
    return x.narrow(dim, begin, size).clone()


_RUN = {
    coll.all_reduce: _all_reduce,
    coll.all_gather: _all_gather,
    coll.reduce_scatter: _reduce_scatter,
    coll.all_to_all: _all_to_all,
    coll.fetch: _fetch,
    coll.permute: _permute,
}


def run(gm: GraphModule, mesh: Mesh, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """Run a local graph on every rank in lockstep.

    ``inputs[rank]`` are the placeholders' values.  Returns the flat outputs of each rank.
    """
    places = list(mesh.coordinates())
    env: list[dict[Node, Any]] = [{} for _ in places]
    sizes: list[dict[str, int]] = [{} for _ in places]  # those that data decide
    users = {n: set(n.users) for n in gm.graph.nodes}
    feed = [iter(i) for i in inputs]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            for rank in range(len(places)):
                env[rank][node] = next(feed[rank])
        elif node.op == "get_attr":
            for rank in range(len(places)):
                env[rank][node] = _attribute(gm, node.target)
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            return [[map_arg(x, env[r].__getitem__) for x in flat] for r in range(len(places))]
        else:
            bound = [
                bind_tree(sized(map_arg((node.args, node.kwargs), env[rank].__getitem__), sizes[rank]), at)
                for rank, at in enumerate(places)
            ]
            if node.target is size_op:
                for rank, (args, _) in enumerate(bound):
                    x, dim, name = args
                    check_size(x, dim, sizes[rank].setdefault(name, x.shape[dim]))
                if any(s != sizes[0] for s in sizes):
                    raise SpmdError(f"ranks disagree on {node.args[2]}: {[s[node.args[2]] for s in sizes]}")
            elif coll.is_collective(node):
                for group in groups(mesh, coll.axes_of(node)):
                    made = _RUN[node.target]([bound[r][0][0] for r in group], [tuple(bound[r][0][1:]) for r in group])
                    for rank, value in zip(group, made, strict=True):
                        env[rank][node] = value
            elif node.target in _CALLS:
                for rank, value in enumerate(_CALLS[node.target](mesh, [args for args, _ in bound])):
                    env[rank][node] = value
            else:
                for rank, (args, kwargs) in enumerate(bound):
                    env[rank][node] = node.target(*args, **kwargs)
        _release(node, users, env)
    raise SpmdError("the graph has no output")


# --- operators that take bodies, in lockstep --------------------------------------------------------------------

Ranks = list[tuple[Any, ...]]  # the arguments of each rank


def _agreed(values: Sequence[Any], what: str) -> bool:
    found = {bool(v) for v in values}
    if len(found) != 1:
        raise SpmdError(f"the predicate of a {what} differs between ranks")
    return found.pop()


def _invoke(mesh: Mesh, args: Ranks) -> list[Any]:
    return run(args[0][0], mesh, [a[2:] for a in args])


def _cond(mesh: Mesh, args: Ranks) -> list[Any]:
    return run(args[0][1 if _agreed([a[0] for a in args], "cond") else 2], mesh, [a[3] for a in args])


def _while(mesh: Mesh, args: Ranks) -> list[Any]:
    (asks, body), given = args[0][:2], [list(a[2]) for a in args]
    others = [list(a[3]) if len(a) > 3 else [] for a in args]
    while _agreed([r[0] for r in run(asks, mesh, [g + o for g, o in zip(given, others, strict=True)])], "while_loop"):
        given = run(body, mesh, [g + o for g, o in zip(given, others, strict=True)])
    return given


def _map(mesh: Mesh, args: Ranks) -> list[Any]:
    return _scan(mesh, [(body, [], mapped, others) for body, mapped, others in args])


def _scan(mesh: Mesh, args: Ranks) -> list[Any]:
    given = [list(a[1]) for a in args]
    turns, carried = {len(a[2][0]) for a in args}, len(given[0])
    if len(turns) != 1:
        raise SpmdError(f"ranks run a loop {sorted(turns)} times")
    slices: list[list[list[Any]]] = [[] for _ in args]
    for i in range(turns.pop()):
        outs = run(args[0][0], mesh, [g + [x[i] for x in a[2]] + list(a[3]) for g, a in zip(given, args, strict=True)])
        given = [out[:carried] for out in outs]
        for kept, out in zip(slices, outs, strict=True):
            kept.append(out[carried:])
    return [[*g, *map(torch.stack, zip(*kept, strict=True))] for g, kept in zip(given, slices, strict=True)]


hop = torch.ops.higher_order
_CALLS: dict[Any, Callable[[Mesh, Ranks], list[Any]]] = {
    hop.cond: _cond, hop.map_impl: _map, hop.scan: _scan, hop.while_loop: _while, hop.invoke_subgraph: _invoke,
}  # fmt: skip


def _release(node: Node, users: dict[Node, set[Node]], env: list[dict[Node, Any]]) -> None:
    """Drop values that no later node reads."""
    for used in node.all_input_nodes:
        users[used].discard(node)
        if not users[used]:
            for values in env:
                values.pop(used, None)


def _attribute(gm: GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def run_global(gm: GraphModule, inputs: Iterable[Any]) -> list[Any]:
    """Run a graph in global shapes on one device: the truth that every rank together must give."""
    if gm.graph.find_nodes(op="call_function", target=size_op):
        return run(gm, Mesh({"one": 1}), [list(inputs)])[0]
    out = torch.fx.Interpreter(gm).run(*inputs)
    return list(out) if isinstance(out, (tuple, list)) else [out]
