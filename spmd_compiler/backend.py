"""``torch.compile(model, backend="spmd")``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from . import dynamo, passes
from .capture import capture_graph, mesh_of_graph
from .contracts import Contract
from .cost import Profile
from .dtensors import device_mesh
from .explain import enforce
from .joint import Front, OutputIndex
from .lower import compile_alone
from .memory import Memory
from .placements import Mesh, SpmdError
from .runtime import Runner, compile_halves, report_failure
from .words import meant, shown

_ELSEWHERE = {
    "placements": "spmd.parallelize(model, mesh, placements) places parameters, spmd.distribute_tensor inputs",
    "backward": "torch.compile plans the backward of what requires gradients",
    "dynamic_shapes": "they are those of spmd.export",
    "name": "it is one of spmd.export",
}  # options of `export` alone, and what does it here


@dataclass(frozen=True)
class BackendOptions:
    """What ``torch.compile(..., options={...})`` takes.

    ``profile`` prices the plan (a name or a `Profile`; None: the device at hand), ``verify`` re-derives and
    simulates it, ``lower`` is ``"inductor"`` or ``"eager"``, ``mesh`` is the mesh of a program without DTensors.
    Within ``memory_budget`` bytes a device, which count ``optimizer_states`` times the bytes of what trains, gathered
    parameters are kept for the backward where that pays.  ``overlap`` and ``buckets`` are those of `export`;
    ``forbid``, ``expect``, ``max_wire_bytes`` and ``max_memory`` are a contract, as `export` takes it; ``dump`` is a
    folder for the text after each pass.
    """

    profile: str | os.PathLike[str] | Profile | None = None
    verify: bool = False
    lower: str = "inductor"
    mesh: Any = None
    memory_budget: float | str | None = None
    optimizer_states: float = 2.0
    overlap: bool = False
    buckets: bool = False
    forbid: Any = None
    expect: Any = None
    max_wire_bytes: float | str | None = None
    max_memory: float | str | None = None
    dump: Any = None

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> BackendOptions:
        """Checked options; an unknown name or value is a `SpmdError` with the nearest known one."""
        known = list(BackendOptions.__dataclass_fields__)
        if not isinstance(given, (Mapping, type(None))):
            raise SpmdError(f"options of backend 'spmd' are a mapping from names, not {shown(given)}")
        for name in given or {}:
            if name not in known:
                instead = _ELSEWHERE.get(name) or meant(name, known)
                raise SpmdError(f"unknown option {shown(name)} of backend 'spmd'; {instead}")
        options = BackendOptions(**dict(given or {}))
        if options.lower not in ("inductor", "eager"):
            raise SpmdError(f"option lower={shown(options.lower)}: use 'inductor' or 'eager'")
        passes.Options(options.profile, options.verify, overlap=options.overlap, buckets=options.buckets).prices()
        options.contract()
        options.memory()
        return options

    def memory(self) -> Memory | None:
        return Memory.of(self.memory_budget, self.optimizer_states)

    def contract(self) -> Contract:
        return Contract.of(self.forbid, self.expect, self.max_wire_bytes, self.max_memory)


@dynamo.register_backend
def spmd(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile Dynamo's graph for its mesh: that of its DTensors, or ``options["mesh"]``.

    A graph without either is compiled as Inductor alone would.  Where this fails on some ranks alone, the others, which
    wait for these before their first step, raise an error that says so.
    """
    if mode is not None:
        raise SpmdError(
            f"backend 'spmd' has no modes ({shown(mode)}); set Inductor's options in torch._inductor.config"
        )
    chosen = BackendOptions.of(options)
    mesh = mesh_of_graph(gm, device_mesh(chosen.mesh) if chosen.mesh is not None else None)
    if mesh is None:
        return _plain(gm, example_inputs, chosen)
    try:
        return _compiled(gm, mesh, chosen)
    except Exception as error:
        report_failure(mesh, error)
        raise


def _compiled(gm: GraphModule, mesh: DeviceMesh | Mesh, chosen: BackendOptions) -> Callable[..., Any]:
    front = capture_graph(gm, mesh)
    assert front is not None
    contract, memory = chosen.contract().on(front.captured.mesh), chosen.memory()
    how = passes.Options(
        chosen.profile, chosen.verify, chosen.lower, memory, chosen.overlap, chosen.buckets, chosen.dump
    )  # fmt: skip
    program = passes.run(front.captured, how)
    enforce(program, contract, chosen.optimizer_states, memory)
    halves = compile_halves(program, front.device_mesh, chosen.lower)
    run = Runner(
        program, halves, front.device_mesh, is_global=front.is_global, differentiable=front.differentiable
    )  # fmt: skip
    return caller(front, run)


def _plain(gm: GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> Callable[..., Any]:
    if options.lower == "eager":
        return gm.forward
    return compile_alone(gm, list(example_inputs))


def caller(front: Front, run: Runner) -> Callable[..., Any]:
    """The function that Dynamo calls: flat arguments in, flat results out."""
    arguments, results = front.arguments, front.results
    mutations = sum(o.kind == "mutation" for o in front.captured.outputs)

    def call(*args: Any) -> list[Any]:
        outs = run([args[a] if isinstance(a, int) else a for a in arguments])
        return [outs[r.index - mutations] if isinstance(r, OutputIndex) else r for r in results]

    return torch.compiler.disable(call)
