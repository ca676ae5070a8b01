"""Conformance over torch's operator database: `python -m tests.opinfo [--op NAME] [--seeds N] [--report FILE]`.

Every sample of every entry is captured once, forward and (where it is differentiable) backward, and planned under many
placements of its tensor inputs: each dim of each sharded over one axis of 4, all of them together, each partial, and
some on a 2 x 2 mesh.  Every plan runs in the simulator and must equal the op itself; random ops must draw what they
draw on a mesh of one device.  Even seeds use sizes that 4 divides, odd ones torch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal import common_methods_invocations as database  # needs expecttest
from torch.testing._internal import common_utils
from torch.utils import _pytree as pytree

from spmd_compiler import collectives as coll
from spmd_compiler import linear, passes
from spmd_compiler.capture import capture_function
from spmd_compiler.cost import PROFILES, Profile
from spmd_compiler.ir import Captured, Partitioned
from spmd_compiler.joint import check_dense
from spmd_compiler.ops import linalg
from spmd_compiler.placements import Mesh, Spec, SpmdError
from spmd_compiler.verify import simulate_outputs

LINE, GRID, ONE = Mesh({"a": 4}), Mesh({"a": 2, "b": 2}), Mesh({"a": 1})
EVEN = {"XS": 4, "S": 4, "M": 8, "L": 12}  # in place of torch's 3, 5, 10 and 20
OPTIONS = passes.Options(profile="bytes")


class Sparing(Profile):
    """Wire bytes, where those of a gather count a thousandfold: the plan gathers little if there is such a plan."""

    def collective(self, mesh: Mesh, kind: str, axes: tuple[str, ...], result_bytes: float) -> float:
        return super().collective(mesh, kind, axes, result_bytes) * (1000 if kind == "all_gather" else 1)


SPARING = passes.Options(
    profile=Sparing(**{**vars(PROFILES["bytes"]), "name": "sparing", "repeats_work": True})
)
LARGEST = 20_000  # elements of a sample's inputs
EXACT = 200_000  # columns looked at for the best plan that spares gathers
LONG = 200  # nodes; a longer program is tried under its first two placements alone
OWN_SIZES = ("_segment_reduce",)
UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
ENTRIES = {
    f"{o.name}.{o.variant_test_name}".strip("."): o
    for o in database.op_db if torch.float32 in o.dtypes and not o.name.startswith("jiterator")  # those are for CUDA
}  # fmt: skip


class Wrong(AssertionError):
    """A simulated program that is not what the op gives."""


@dataclasses.dataclass
class Row:
    """What was found for one entry: counts of combinations, and wire bytes of the forward and of the whole program."""

    op: str
    samples: int = 0
    tried: int = 0
    equal: int = 0
    sharded: int = 0  # combinations with a sharded input
    kept: int = 0  # of these, those whose forward gathers no whole sharded input
    spared: int = 0  # those whose forward need not, but does because that sends less of these small inputs
    formless: int = 0  # those that gather because no form does without
    fell: int = 0  # combinations in which some op had no rule
    backward: int = 0
    forward_wire: float = 0.0
    wire: float = 0.0
    fallback: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    gathers: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


# --- samples ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sizes(even: bool) -> Iterator[None]:
    """The sizes that samples are made of."""
    modules = [common_utils, *(m for n, m in sys.modules.items() if n.startswith("torch.testing._internal.opinfo"))]
    modules.append(database)
    saved = [(m, k, getattr(m, k)) for m in modules for k in EVEN if isinstance(getattr(m, k, None), int)]
    try:
        for module, name, _ in saved if even else ():
            setattr(module, name, EVEN[name])
        yield
    finally:
        for module, name, old in saved:
            setattr(module, name, old)


class Sample:
    """A call of an op as a function of its tensors."""

    def __init__(self, op: Any, sample: Any) -> None:
        self.op = op
        leaves, self.tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.leaves = leaves
        self.tensors = [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in self.places]
        self.weights: dict[Any, torch.Tensor] = {}
        self.process = sample.output_process_fn_grad  # what of the output has a gradient worth the name

    def call(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self.leaves)
        for i, t in zip(self.places, tensors, strict=True):
            leaves[i] = t
        x, args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        out = self.op.op(x, *args, **kwargs)
        self.result = out
        return [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor)]

    def with_loss(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """A scalar that weighs every element of the differentiable outputs with its own weight, and the outputs."""
        outs = self.call(*tensors)
        loss: Any = 0.0
        for out in pytree.tree_leaves(self.process(self.result)):
            if isinstance(out, torch.Tensor) and out.requires_grad and out.layout is torch.strided:
                real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
                loss = loss + (real * self.weight(real)).sum()
        return [torch.as_tensor(loss, dtype=torch.float64), *outs]

    def works(self) -> bool:
        """Whether the op takes it (sparse tensors are for `capture` to refuse)."""
        try:
            check_dense(self.tensors)
            self.truth()
        except SpmdError:
            return True
        except Exception:
            return False
        return True

    def weight(self, like: torch.Tensor) -> torch.Tensor:
        def made() -> torch.Tensor:
            return torch.arange(like.numel()).mul(0.7).cos().to(like.dtype).reshape(like.shape)

        if any(isinstance(n, torch.SymInt) for n in like.shape):  # data decide it
            return made()
        key = (like.shape, like.dtype)
        if key not in self.weights:
            with torch.utils._python_dispatch._disable_current_modes():
                self.weights[key] = made()
        return self.weights[key]

    def truth(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
        """Outputs, gradients (None: none) and the inputs as the call leaves them."""
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors]
        leaves = [t.clone() for t in given]
        outs = self.with_loss(*leaves)
        wanted = [t for t in given if t.requires_grad]
        if not wanted or not outs[0].requires_grad:
            return [o.detach() for o in outs[1:]], [None] * len(given), [t.detach() for t in leaves]
        found = iter(torch.autograd.grad(outs[0], wanted, allow_unused=True))
        return (
            [o.detach() for o in outs[1:]],
            [next(found) if t.requires_grad else None for t in given],
            [t.detach() for t in leaves],
        )


def samples_of(op: Any, seed: int, most: int | None) -> list[Sample]:
    """Samples of an entry that the op itself takes, ``most`` of them spread over all there are.

    Entries whose samples stand on torch's own sizes have those for every seed.
    """
    found: list[Sample] = []
    for even in (True, False) if seed % 2 == 0 and op.name not in OWN_SIZES else (False,):
        torch.manual_seed(seed)
        random.seed(seed)
        with sizes(even), contextlib.suppress(RuntimeError, IndexError, ValueError):
            dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
            given = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
            found = [Sample(op, s) for s in itertools.islice(given, 400)]
            found = [s for s in found if sum(t.numel() for t in s.tensors) <= LARGEST]
            step = 1.0 if most is None else max(1.0, len(found) / most)
            count = len(found) if most is None else min(most, len(found))
            shift = seed % max(1, int(step))
            found = [s for i in range(count) if (s := found[int(i * step + shift)]).works()]
        if found:
            break
    return found


# --- placements ---------------------------------------------------------------------------------------------


def placements(tensors: Sequence[torch.Tensor], seed: int, most: int | None) -> list[tuple[Mesh, list[Spec]]]:
    """Specs of the inputs: replicated; each dim of each input sharded; all from the right alike; each partial; and a
    seeded choice on the grid.  ``most`` of them, the first of each kind first."""
    shards = [[d for d, n in enumerate(t.shape) if n > 1] for t in tensors]
    whole: list[Any] = [Replicate()] * len(tensors)

    def one(i: int, p: Any) -> list[Any]:
        return [p if i == j else Replicate() for j in range(len(tensors))]

    line = [one(i, Shard(d)) for i, dims in enumerate(shards) for d in dims]
    together = []
    for back in range(1, max((t.dim() for t in tensors), default=0) + 1):
        alike = [Shard(t.dim() - back) if t.dim() - back in s else Replicate()
                 for t, s in zip(tensors, shards, strict=True)]  # fmt: skip
        if sum(isinstance(p, Shard) for p in alike) > 1:
            together.append(alike)
    partial = [one(i, Partial("sum")) for i, t in enumerate(tensors) if t.dtype != torch.bool]
    draw = random.Random(seed)
    grid = []
    for _ in range(2):
        grid.append([[draw.choice([Replicate(), *map(Shard, s)]) for s in shards] for _ in GRID.axes])
    kinds = [
        [(LINE, [p]) for p in together], [(LINE, [p]) for p in line], [(LINE, [p]) for p in partial],
        [(GRID, p) for p in grid if tensors], [(LINE, [whole])],
    ]  # fmt: skip
    if most is not None:
        for kind in kinds:
            draw.shuffle(kind)
    mixed = [k for ks in itertools.zip_longest(*kinds) for k in ks if k is not None]
    return [(m, [Spec(m.axes, tuple(p)) for p in zip(*axes, strict=True)]) for m, axes in mixed[:most]]


def placed(captured: Captured, mesh: Mesh, specs: Sequence[Spec], at: Sequence[int | None]) -> Captured:
    """A captured graph with other placements of its inputs; ``at`` gives the tensor that each placeholder holds."""
    inputs = [
        dataclasses.replace(i, spec=Spec.replicate(mesh) if k is None else specs[k])
        for i, k in zip(captured.inputs, at, strict=True)
    ]
    return dataclasses.replace(captured, inputs=inputs, mesh=mesh)


def forward_of(captured: Captured) -> Captured:
    """The forward alone, without the loss."""
    keep = [j for j, o in enumerate(captured.outputs) if o.kind != "grad" and o.name not in ("out", "out.0")]
    graph, env = torch.fx.Graph(), {}
    graph.output(graph.graph_copy(captured.graph.graph, env))
    for old, new in env.items():
        new.meta = dict(old.meta)
    out = graph.output_node()
    out.meta = dict(captured.graph.graph.output_node().meta)
    out.args = (tuple(out.args[0][j] for j in keep),)
    gm = torch.fx.GraphModule(captured.graph, graph)
    outputs = [captured.outputs[j] for j in keep]
    return dataclasses.replace(captured, graph=gm, outputs=outputs, num_forward_outputs=len(keep))


# --- one entry ----------------------------------------------------------------------------------------------


def gathered(local: Partitioned) -> str | None:
    """A collective of a program that makes a sharded input whole again on every device, or as much."""
    held = [n.meta["val"].numel() for n, i in zip(local.graph.graph.nodes, local.inputs, strict=False)
            if i.spec is not None and i.spec.sharding]  # fmt: skip
    whole = [math.prod(n.meta["global"]) for n, i in zip(local.graph.graph.nodes, local.inputs, strict=False)
             if i.spec is not None and i.spec.sharding]  # fmt: skip
    for node in local.graph.graph.nodes:
        if held and node.target is coll.all_gather and node.meta["val"].numel() >= max(min(whole), 1):
            return str(node.meta.get("why") or f"inside {node.meta.get('origin')}")
    return None


PAIRS = ("outer", "addr", "kron", "isin", "nn.functional.bilinear")
LOOKUPS = ("index", "gather", "embedding", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "index_put")


def no_form(entry: Entry, specs: Sequence[Spec], why: str) -> str | None:
    """Why no form of an op does without the gather that a plan names; None if one might."""
    ops = {n.target._schema.name.split("::")[1] for n in entry.forward.graph.graph.nodes if hasattr(n.target, "_schema")}
    if ops & {*linalg.MATRICES, *linalg.SOLVES}:
        return "factorisation: every element of a matrix decides on all of the result"
    if why.endswith("}") and "an output wants" in why:
        return "placed whole: the new value of an input that the user keeps whole"
    shared = Counter(a for s in specs for axes in s.sharding.values() for a in axes)
    if max(shared.values(), default=0) < 2:
        return None
    if entry.name in PAIRS:
        return "pairs: an axis cuts two operands of which every element of one meets every one of the other"
    if ops & set(LOOKUPS):
        return "lookup: an axis cuts both the places and what they point into, anywhere"
    return None


def compare(what: str, want: torch.Tensor, got: torch.Tensor) -> None:
    if want.shape != got.shape or want.dtype != got.dtype:
        raise Wrong(f"{what} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
    inexact = want.dtype.is_floating_point or want.dtype.is_complex
    size = float(want.abs().nan_to_num(0, 0, 0).max()) if inexact and want.numel() else 0.0
    close = 1e-7 if want.dtype in (torch.float64, torch.complex128) else 2e-5
    tolerance = {"rtol": 5 * close, "atol": close * max(1.0, size)} if inexact else {"rtol": 0.0, "atol": 0.0}
    try:
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    except AssertionError as error:
        raise Wrong(f"{what}: {' '.join(str(error).split())[:150]}") from None


class Entry:
    """One sample, captured."""

    def __init__(self, name: str, sample: Sample) -> None:
        self.name, self.sample = name, sample
        check_dense(sample.tensors)
        self.outs, self.grads, self.after = sample.truth()
        self.differentiable = any(g is not None for g in self.grads) and all(o.layout is torch.strided for o in self.outs)
        function = sample.with_loss if self.differentiable else sample.call
        self.captured, self.binding = capture_function(
            function, sample.tensors, mesh=LINE, backward=self.differentiable, name=name,
            specs=lambda n, kind, ndim, shape: None if kind == "output" else Spec.replicate(LINE),
        )  # fmt: skip
        self.forward = forward_of(self.captured) if self.differentiable else self.captured
        names = {f"tensors.{i}": i for i in range(len(sample.tensors))}
        self.at = [names.get(i.name) for i in self.captured.inputs]
        self.random = any(i.kind == "seed" for i in self.captured.inputs)
        if self.random:
            for whole in (False, True) if self.differentiable else (False,):
                self._expect_own_draws(whole)

    def _given(self) -> list[torch.Tensor]:
        torch.manual_seed(11)
        flat = iter(self.binding.flatten(self.sample.tensors, {}))
        return [
            torch.empty((), dtype=torch.int64).random_() if i.kind == "seed" else next(flat).detach()
            for i in self.captured.inputs
        ]

    def run(self, local: Partitioned) -> list[tuple[Any, torch.Tensor]]:
        """``(output, value)`` of every output."""
        return list(zip(local.outputs, simulate_outputs(local, self._given()), strict=True))

    def _expect_own_draws(self, whole: bool) -> None:
        """The truth of a random op is what it draws on one device."""
        specs = [Spec.replicate(ONE)] * len(self.sample.tensors)
        captured = self.captured if whole else self.forward
        found = self.run(passes.run(placed(captured, ONE, specs, self.at), OPTIONS))
        outs = [v for o, v in found if o.kind == "output"]
        self.outs = outs[1:] if whole else outs
        for o, value in found:
            if o.kind == "grad":
                self.grads[self.at[o.of]] = value  # type: ignore[index]
            if o.kind == "mutation":
                self.after[self.at[o.of]] = value  # type: ignore[index]

    def check(
        self, mesh: Mesh, specs: Sequence[Spec], whole: bool, options: passes.Options = OPTIONS
    ) -> Partitioned:  # fmt: skip
        """Plan, simulate and compare; raises `Wrong`."""
        captured = self.captured if whole else self.forward
        local = passes.run(placed(captured, mesh, specs, self.at), options)
        outs = iter([None, *self.outs] if whole else self.outs)
        for o, got in self.run(local):
            if o.kind == "output":
                want = next(outs)
            elif o.kind == "mutation":
                want = self.after[self.at[o.of]]  # type: ignore[index]
            else:
                want = self.grads[self.at[o.of]]  # type: ignore[index]
            if want is None or self.name.split(".")[0] in UNINITIALISED:
                continue
            label = f"{o.kind} {o.name} of {'forward and backward' if whole else 'the forward'}"
            compare(label, want, got)
        return local


def describe(sample: Sample, mesh: Mesh, specs: Sequence[Spec]) -> str:
    shapes = ", ".join(f"{tuple(t.shape)} {s}" for t, s in zip(sample.tensors, specs, strict=True))
    return f"{mesh}: {shapes}"


@mock.patch.object(linear, "BRANCHED", 0)  # plans need not be the best, but quick
def sweep(name: str, seed: int = 0, samples: int | None = None, combinations: int | None = None) -> Row:
    """The row of one entry for one seed."""
    began, row, op = time.process_time(), Row(name), ENTRIES[name]
    fell: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, sample in enumerate(samples_of(op, seed, samples)):
            row.samples += 1
            try:
                entry = Entry(name, sample)
            except SpmdError as error:
                row.refused.append(str(error))
                continue
            except Exception as error:
                row.errors.append(f"capture of sample {index}: {type(error).__name__}: {' '.join(str(error).split())}")
                continue
            fixed = {entry.at[o.of] for o in entry.captured.outputs if o.kind == "mutation" and o.of is not None}
            long = len(entry.captured.graph.graph.nodes) > LONG
            salt = zlib.crc32(f"{name} {seed} {index}".encode())
            for mesh, specs in placements(sample.tensors, salt, 2 if long else combinations):
                if any(specs[i].partial_axes() for i in fixed if i is not None):
                    continue  # what is updated in place can't be partial
                row.tried += 1
                try:
                    local = entry.check(mesh, specs, whole=False)
                    row.forward_wire += sum(c.wire_bytes for c in coll.collectives(list(local.graph.graph.nodes)))
                    fell.update(local.replicated_ops)
                    if any(s.sharding for s in specs):
                        row.sharded += 1
                        why = gathered(local)
                        row.kept += why is None
                        if why is not None:
                            with mock.patch.object(linear, "BRANCHED", EXACT):
                                why = gathered(entry.check(mesh, specs, whole=False, options=SPARING))
                            row.spared += why is None
                        if why is not None and (reason := no_form(entry, specs, why)):
                            row.formless += 1
                            row.reasons.append(reason)
                        elif why is not None:
                            row.gathers.append(why)
                    lacking = bool(local.replicated_ops)
                    if entry.differentiable:
                        local = entry.check(mesh, specs, whole=True)
                        row.backward += 1
                        fell.update(local.replicated_ops)
                    row.fell += lacking or bool(local.replicated_ops)
                    row.wire += sum(c.wire_bytes for c in coll.collectives(list(local.graph.graph.nodes)))
                    row.equal += 1
                except Exception as error:
                    text = " ".join(str(error).split())
                    row.errors.append(f"{describe(sample, mesh, specs)}: {type(error).__name__}: {text}"[:600])
    row.fallback = sorted(fell)
    row.refused, row.gathers, row.reasons = (sorted(set(x)) for x in (row.refused, row.gathers, row.reasons))
    row.seconds = time.process_time() - began
    return row


# --- all entries and the report -------------------------------------------------------------------------------


def _job(job: tuple[str, int, int | None, int | None]) -> Row:
    torch.set_num_threads(1)
    return sweep(*job)


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row an entry."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.op not in found:
            found[row.op] = dataclasses.replace(row)
            continue
        old = found[row.op]
        for f in dataclasses.fields(Row):
            a, b = getattr(old, f.name), getattr(row, f.name)
            if isinstance(a, list):
                setattr(old, f.name, sorted({*a, *b}))
            elif not isinstance(a, str):
                setattr(old, f.name, a + b)
    return [found[n] for n in sorted(found)]


def report(rows: Sequence[Row], command: str) -> str:
    total = {f.name: sum(getattr(r, f.name) for r in rows) for f in dataclasses.fields(Row)
             if f.type in ("int", "float")}  # fmt: skip
    formed = total["sharded"] - total["formless"]
    share = 100 * (total["kept"] + total["spared"]) / max(formed, 1)
    full = sum(not r.errors and not r.refused for r in rows)
    lines = [
        "# Conformance over torch's operator database", "",
        f"`{command}`, torch {torch.__version__.split('+')[0]}; the {len(rows)} entries that take "
        "float32 on CPU, in float64 where they take that.  A combination is one "
        "sample under one placement of its inputs (on one axis of 4, or 2 x 2), planned for wire bytes, simulated "
        "forward and, where the op is differentiable, backward, and compared with the op itself.", "",
        "| | |", "|---|---|",
        f"| entries in which every combination is equal | {full} of {len(rows)} |",
        f"| combinations equal, of those tried | {total['equal']:,} of {total['tried']:,} |",
        f"| of these with a backward | {total['backward']:,} |",
        f"| with a sharded input | {total['sharded']:,} |",
        f"| of these, whose plan gathers no whole sharded input | {total['kept']:,} |",
        f"| that need not gather one: an equal plan without is there, dearer at these sizes | {total['spared']:,} |",
        f"| for which no form does without: the last column says why | {total['formless']:,} |",
        f"| that gather one for want of another form | {formed - total['kept'] - total['spared']:,} |",
        f"| gathering nothing, of those for which some form might | {share:.1f}% |",
        f"| in which some op has no rule and is replicated | {total['fell']:,} |",
        f"| wrong values | {sum('Wrong' in e for r in rows for e in r.errors)} |",
        f"| other errors | {sum('Wrong' not in e for r in rows for e in r.errors)} |",
        f"| entries with a sample that is refused, with its reason | {sum(bool(r.refused) for r in rows)} |",
        f"| wire bytes, forward; forward and backward | {total['forward_wire']:,.0f}; {total['wire']:,.0f} |",
        f"| seconds of processor time | {total['seconds']:,.0f} |", "",
        "*Kept* counts combinations whose forward gathers no whole sharded input, *spared* those in which it is merely "
        "cheaper to gather one this small (the plan without was run and compared too); wire bytes are of all "
        "combinations, forward and backward.", "",
        "| op | samples | tried | equal | sharded | kept | spared | no form | fell back | wire bytes | without a rule | why |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        lines.append(f"| {r.op} | {r.samples} | {r.tried} | {r.equal} | {r.sharded} | {r.kept} | {r.spared} | {r.formless} "
                     f"| {r.fell} | {r.wire:,.0f} | {', '.join(r.fallback)} "
                     f"| {', '.join(t.partition(':')[0] for t in r.reasons)} |")  # fmt: skip
    lines += ["", "## Why no form does without a gather", "",
              *(f"* {t}" for t in sorted({t for r in rows for t in r.reasons}))]  # fmt: skip
    for title, kind in (("Gathered for want of a form", "gathers"), ("Refused", "refused"), ("Errors", "errors")):
        listed = [(r.op, e) for r in rows for e in getattr(r, kind)]
        if listed:
            lines += ["", f"## {title}", ""]
            lines += [f"* `{op}`: {text}" for op, text in listed]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--op", action="append", help="an entry, or several (default: all)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1, help="of one entry and seed (0: all)")
    parser.add_argument("--combinations", type=int, default=4, help="placements of one sample (0: all)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path, help="every row, a line each")
    args = parser.parse_args()
    torch.set_warn_always(False)
    names = [n for n in ENTRIES if not args.op or n in args.op or n.split(".")[0] in args.op]
    jobs = [(n, s, args.samples or None, args.combinations or None) for s in range(args.seeds) for n in names]
    rows: list[Row] = []
    context = multiprocessing.get_context("fork")
    with context.Pool(args.workers, maxtasksperchild=60) as pool:
        for row in pool.imap_unordered(_job, jobs):
            rows.append(row)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            bad = f"  {row.errors[0][:300]}" if row.errors else ""
            kept = f"{row.kept:>3}+{row.spared}+{row.formless}"
            print(f"{row.op:<48} {row.equal:>4}/{row.tried:<4} kept {kept:<9}/{row.sharded:<4} "
                  f"{row.seconds:5.1f} s {','.join(row.fallback)}{bad}", flush=True)  # fmt: skip
    command = "python -m tests.opinfo" + "".join(f" {a}" for a in sys.argv[1:] if not a.startswith("/"))
    text = report(merged(rows), command)
    if args.report:
        args.report.write_text(text)
    print(text.partition("| op |")[0])


if __name__ == "__main__":
    main()
