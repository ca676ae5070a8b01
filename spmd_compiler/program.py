"""`export`: from an ordinary program and a few placements to a `Program` that can be read, priced and simulated."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import passes
from .aot import in_cache, package
from .capture import Binding, capture_function, own_dynamic_shapes, same, untraced
from .collectives import Collective, collectives
from .contracts import Contract
from .cost import Profile, profile_of
from .dims import Dim, Guard
from .explain import Explanation, enforce
from .explain import explain as why
from .family import Family, check_member
from .ir import Partitioned, nodes_within
from .memory import Memory, held
from .placements import Mesh, Spec, SpmdError, is_auto
from .progress import stage
from .runtime import direct
from .store import Stored, path_of, save
from .store import load as read
from .text import LEVELS, Text, Type, type_of
from .verify import simulate_outputs, verify
from .words import meant, shown


class Program:
    """A partitioned program: its text, its collectives, what they cost, and a simulator of all its ranks."""

    def __init__(
        self, local: Partitioned, binding: Binding, backward: bool, states: float = 0.0, budget: Memory | None = None,
        family: Family | None = None,
    ) -> None:  # fmt: skip
        self.local, self.binding, self.backward, self.states, self.budget = local, binding, backward, states, budget
        self.family = family
        self._members: dict[tuple[tuple[str, int], ...], Program] = {}

    @property
    def mesh(self) -> Mesh:
        return self.local.mesh

    def text(self, level: str = "full") -> str:
        """The program, one node a line (byte-identical on every rank and in every run; `text` has the grammar).

        ``level`` is ``"full"``, ``"collectives"`` (inputs, outputs and collectives alone) or ``"summary"``.
        """
        if level not in LEVELS:
            raise SpmdError(f"level {shown(level)} is none of {', '.join(LEVELS)}")
        family = self.family
        if family is None:
            text = Text.of(self.local, self.memory)
        else:
            text = Text.of(family.common, self.memory, family.dims)
        return str(text.at(level))

    @property
    def dims(self) -> dict[str, Dim]:
        """The dynamic dims, by name, or (``u0``, ``u1``...) the sizes that data decide.  Prices, bytes and shapes are
        those of their hints: the sizes of the example, or a prime of at least the most that there may be."""
        return {d.name: d for d in (self.family.dims.dims if self.family is not None else self.local.captured.data)}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What sizes of dynamic dims must satisfy; it is checked at each call."""
        return self.family.dims.guards if self.family is not None else ()

    def at(self, **sizes: int) -> Program:
        """The program for these sizes of its dynamic dims, placed as all are.

        Raises `SpmdError` where a guard forbids them."""
        if self.family is None:
            raise SpmdError("the program has no dynamic dims; export takes dynamic_shapes={name: {dim: Dim(...)}}")
        self.family.dims.check(sizes)
        key = tuple(sorted(sizes.items()))
        if key not in self._members:
            family = self.family
            local = self.local
            if dict(key) != family.dims.hints:
                local = passes.at(family.captured, family.decisions, sizes, profile_of(local.profile))
                check_member(family, local, sizes)
            self._members[key] = Program(local, self.binding.at(sizes), self.backward, self.states, self.budget)
        return self._members[key]

    def _at_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        assert self.family is not None
        return self.at(**self.binding.sizes(self.family.dims, args, kwargs))

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        return collectives(nodes_within(self.local.graph.graph))

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one step, under ring algorithms."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def replicated_ops(self) -> tuple[str, ...]:
        """Ops that run on replicated inputs for want of a rule."""
        return self.local.replicated_ops

    @property
    def price(self) -> float:
        """Predicted seconds of one step under the profile, less what joined collectives save."""
        return self.local.price - self.local.saved

    @property
    def gap(self) -> float:
        """``(price - proven lower bound) / price`` of collectives apart; 0.0 when the two agree to five millionths."""
        gap = (self.local.price - self.local.bound) / self.local.price if self.local.price else 0.0
        return 0.0 if gap < 5e-6 else gap

    @property
    def placements(self) -> dict[str, Spec | None]:
        """Where every input and output lives, by name."""
        return {i.name: i.spec for i in self.local.inputs} | {o.name: o.spec for o in self.local.outputs}

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes a device holds: ``parameters`` and buffers, ``gradients``, ``optimizer`` states (where a budget counts
        them) and ``activations`` (inputs and the values between, at their peak along the schedule)."""
        return held(self.local, self.states)

    def verify(self) -> None:
        """Re-derive every spec and compare all simulated ranks with the global graph (raises on a difference)."""
        verify(self.local)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run every rank in this process on global values.

        Returns the global result; for ``backward=True`` a pair ``(outputs, {name: gradient})``.  Nothing that is
        given changes: what the program would write into buffers and inputs is `simulate_mutations`'s.
        """
        if self.family is not None:
            return self._at_arguments(args, kwargs).simulate(*args, **kwargs)
        outs = self._simulate(args, kwargs)
        result = self.binding.unflatten_outputs([v for _, v in outs["output"]])
        return (result, dict(outs["grad"])) if self.backward else result

    def simulate_mutations(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """By name, the global values that a call leaves in the buffers and inputs which the program changes."""
        return dict(self._simulate(args, kwargs)["mutation"])

    def _simulate(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
        """``(name, global value)`` of every output, by kind."""
        if self.family is not None:
            return self._at_arguments(args, kwargs)._simulate(args, kwargs)
        values = self.binding.flatten(args, kwargs)
        for (_, name), value in zip(self.binding.slots, values, strict=True):
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise SpmdError(f"{name!r} is on meta: to simulate a program is to compute it, which takes numbers")
        device = next((v.device for v in values if isinstance(v, torch.Tensor) and v.device.type != "cpu"), "cpu")
        flat = iter(values)
        given = [
            torch.empty((), dtype=torch.int64).random_() if i.kind == "seed" else next(flat) for i in self.local.inputs
        ]
        found: dict[str, list[tuple[str, Any]]] = {"output": [], "grad": [], "mutation": []}
        for value, o in zip(simulate_outputs(self.local, given), self.local.outputs, strict=True):
            if value is not None:
                found[o.kind].append((o.name, value.to(device) if isinstance(value, torch.Tensor) else value))
        return found

    def compile(
        self, device_mesh: Any = None, lower: str = "inductor", aot: bool | str | os.PathLike[str] = False
    ) -> Callable[..., Any]:
        """This rank's callable, without Dynamo and its guards.

        ``device_mesh`` is a torch ``DeviceMesh`` of the program's shape (None: only for a mesh of one device).  It
        takes what the program takes, as DTensors or global tensors, and gives the result, or with ``backward`` a
        pair ``(result, {name: gradient})``.  ``lower`` is ``"inductor"``, or ``"eager"`` for the graph as it is.

        ``aot`` names an AOTInductor package (``.pt2``; True: one in the compiler's cache) of an inference program whose
        cuts are even: one package serves every rank.  It is written where it is missing (see `package`), else loaded.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise SpmdError(f"compile takes a torch DeviceMesh, not {shown(device_mesh)}; init_device_mesh makes one")
        if device_mesh is None and self.mesh.size > 1:
            raise SpmdError(f"the program is for {self.mesh}: compile takes the DeviceMesh of its ranks")
        if device_mesh is not None and Mesh.of(device_mesh).shape != self.mesh.shape:
            raise SpmdError(f"the program was planned for {self.mesh}, not for {Mesh.of(device_mesh)}")
        if lower not in ("inductor", "eager"):
            raise SpmdError(f"lower={shown(lower)}: use 'inductor' or 'eager'")
        if not isinstance(aot, (bool, str, os.PathLike)):
            raise SpmdError(f"aot is True, False or the path of a package, not {shown(aot)}")
        if aot and lower == "eager":
            raise SpmdError("aot is a package of Inductor's code, lower='eager' runs the graph as it is; give one")
        if self.family is not None:
            if aot not in (True, False):
                raise SpmdError("each size of dynamic dims has a package of its own: aot=True")
            return self._compiled_by_size(device_mesh, lower, aot)
        path = None if aot is False else in_cache(self.local) if aot is True else path_of(aot)
        return direct(self.local, self.binding, device_mesh, lower, self.backward, path)

    def package(self, path: str | os.PathLike[str]) -> None:
        """Write the AOTInductor package of an inference program, which `compile` takes on every rank as ``aot``.

        No process group is needed.  Raises `SpmdError` where cuts are uneven, or messages depend on the place.
        """
        if self.family is not None:
            raise SpmdError("each size of dynamic dims has a package of its own: program.at(...).package(path)")
        package(self.local, path_of(path, writing=True))

    def _compiled_by_size(self, device_mesh: Any, lower: str, aot: Any) -> Callable[..., Any]:
        made: dict[int, Callable[..., Any]] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._at_arguments(args, kwargs)
            if id(found) not in made:
                made[id(found)] = found.compile(device_mesh, lower, aot)
            return made[id(found)](*args, **kwargs)

        return call

    def use(self, weights: Mapping[str, torch.Tensor]) -> Program:
        """The same program on these parameters and buffers, by name: DTensors, or global tensors that ranks cut."""
        places = self.local.graph.graph.find_nodes(op="placeholder")
        wanted = {i.name: type_of(n.meta["val"], n.meta.get("global"))
                  for i, n in zip(self.local.inputs, places, strict=True)}  # fmt: skip
        names = [key for kind, key in self.binding.slots if kind == "state"]
        if not isinstance(weights, Mapping):
            raise SpmdError(f"weights are a mapping from names to tensors, not {shown(weights)}")
        for name, value in weights.items():
            if name not in names:
                raise SpmdError(f"the program has no weight {shown(name)}; {meant(name, names)}")
            got, kind = type_of(value), wanted[name]
            if not isinstance(got, Type) or (got.dtype, got.shape) != (kind.dtype, kind.shape):
                raise SpmdError(f"weight {name!r} is {got}; the program was planned for {kind}")
        binding = dataclasses.replace(self.binding, weights={**(self.binding.weights or {}), **weights})
        return Program(self.local, binding, self.backward, self.states, self.budget, self.family)

    def save(self, path: Any, weights: bool = False) -> None:
        """Write the program to a file that `load` reads without the model's source; with ``weights`` its parameters and
        buffers too.  Raises `SpmdError` for an argument or constant that is no plain data."""
        stored = Stored(self.local, self.binding, self.backward, self.states, self.budget, self.family)
        save(stored, self.text(), path, weights)

    def __repr__(self) -> str:
        return (
            f"Program({self.local.captured.name!r}, {self.mesh}, {len(self.collectives)} collectives, "
            f"{self.wire_bytes:.0f} wire bytes, gap {self.gap:.1%})"
        )


def explain(program: Program, collective: Collective | str) -> Explanation:
    """Why a collective (or the one of that name) is in a program: its source line, the value it moves, who makes and
    who wants it, and the next best alternatives, each with its price and the constraint to write to get it."""
    if not isinstance(program, Program):
        raise SpmdError(f"expected a Program, got {type(program).__name__}")
    return why(program.local, collective, program.budget)


def load(path: Any) -> Program:
    """The program in a file that `Program.save` wrote.

    It is read, simulated and compiled as the one saved; its weights are those in the file, or `Program.use` gives them.
    Nothing in a file is run or unpickled.  Raises `SpmdError` for what is no saved program, damaged, or newer.
    """
    stored = read(path)
    return Program(stored.local, stored.binding, stored.backward, stored.states, stored.budget, stored.family)


class Placements:
    """The user's placements by name or glob; remembers which were used.

    A tied parameter goes by any of its names; a glob means outputs only where it begins with ``out``.
    """

    def __init__(self, mesh: Mesh, given: Mapping[str, Any], model: Any = None) -> None:
        self.mesh, self.given = mesh, dict(given)
        for key in self.given:
            if not isinstance(key, str):
                raise SpmdError(f"placements are keyed by names of parameters, inputs or outputs, not by {shown(key)}")
        self.used: set[str] = set()
        self.names: list[str] = []
        self.tied: dict[str, list[str]] = {}
        if isinstance(model, torch.nn.Module):
            first: dict[torch.Tensor, str] = {}
            for name, value in itertools.chain(
                model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
            ):
                self.tied.setdefault(first.setdefault(value, name), []).append(name)

    def given_for(self, name: str, kind: str = "param") -> list[str]:
        """The keys that mean a value."""
        names = self.tied.get(name, [name])
        return [
            k for k in self.given
            if any(n == k or fnmatch.fnmatchcase(n, k) for n in names) and (kind != "output" or k.startswith("out"))
        ]  # fmt: skip

    def __call__(self, name: str, kind: str, ndim: int, shape: Sequence[int]) -> Spec | None:
        """The spec of one value.  Not named: Replicate for inputs, the solver's for outputs."""
        names = self.tied.get(name, [name])
        self.names += names
        fits = self.given_for(name, kind)
        if not fits:
            return None if kind == "output" else Spec.replicate(self.mesh)
        self.used.update(fits)
        exact = [k for k in fits if k in names]
        if not all(same(self.given[k], self.given[exact[0]]) for k in exact[1:]):
            raise SpmdError(f"{' and '.join(map(repr, exact))} are one tensor, and their placements differ")
        key = (exact or fits)[0]
        given = self.given[key]
        if is_auto(given, self.mesh):
            return None
        try:
            return Spec.of(self.mesh, given, ndim)
        except SpmdError as error:
            raise SpmdError(f"placement of {name!r} {tuple(shape)}: {error}") from None

    def check(self, what: str = "parameter, buffer, input or output") -> None:
        """Raise `SpmdError` for a name that nothing has."""
        for key in self.given:
            if key not in self.used:
                raise SpmdError(f"no {what} is named {key!r}; {meant(key, self.names)}")


def export(
    model_or_fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    placements: Mapping[str, Any] | None = None,
    backward: bool = False,
    profile: str | os.PathLike[str] | Profile | None = None,
    verify: bool = False,
    name: str | None = None,
    forbid: Any = None,
    expect: Any = None,
    max_wire_bytes: float | str | None = None,
    max_memory: float | str | None = None,
    memory_budget: float | str | None = None,
    optimizer_states: float = 2.0,
    overlap: bool = False,
    buckets: bool = False,
    dynamic_shapes: Any = None,
    dump: Any = None,
) -> Program:
    """Plan a program on a mesh that need not exist: a module, a function, or a `torch.export.ExportedProgram`.

    ``placements`` maps names of parameters, buffers and inputs (``"ids"``, ``"args.0"``, ``"batch.ids"``) and
    outputs (``"out"``, ``"out.0"``), or globs of them, to ``{axis: placement}``, a sequence of placements in axis
    order, one placement on a mesh of one axis, a `Spec`, the text of any of these (``"S(0)"``, ``"{tp: S(0)}"``), or
    ``"auto"`` (on all axes).  Inputs that are not named are replicated; outputs are the solver's.
    A value goes by its own name before globs, and of globs by the first given that fits it.
    With ``backward`` the first output is a scalar loss, and gradients of all parameters and inputs that require
    one are outputs too.

    What is ``"auto"`` is placed by the solver, gradients as their parameters; with ``memory_budget``, bytes a device
    (a number or ``"60GiB"``),
    so that parameters, gradients, optimizer states (``optimizer_states`` times the bytes of what trains; AdamW's are 2)
    and the peak of live activations fit.  Raises `SpmdError` for bad input, and for a budget that nothing found meets.

    With ``overlap`` a step is priced as if gathers of weights and reductions of gradients ran beside computation, and
    only what they take longer than that, and their starts, counted (a profile's ``overlap`` says the same).  With
    ``buckets`` small collectives of one axis and kind are joined where their starts cost more than copies do, and with
    both where that makes the step of the predicted timeline shorter.

    The contract says what the program must keep, whatever placements lead to: no collective that ``forbid`` names
    (``"all_gather"``, ``"all_gather[tp]"``, ``"*[dp]"``), as many as ``expect`` maps a name to, no more than
    ``max_wire_bytes`` sent and ``max_memory`` held a device (bytes, or ``"60GiB"``).  A broken one is a `ContractError`
    that explains the dearest offender.

    ``dynamic_shapes`` leaves sizes of inputs open, as `torch.export.export` takes it: ``{"ids": {0: Dim("batch")}}``.
    Placements are chosen, and budget and contract kept, at the sizes of ``args``; one program then simulates and runs
    at all sizes that its guards allow (`Program.guards`: what is cut evenly in the example must be cut evenly), planned
    for each at its first call.  None: those that an `ExportedProgram` leaves open
    (``{}``: none).

    ``dump`` names a folder for the text after each pass.
    """
    mesh = Mesh.of(mesh)
    contract = Contract.of(forbid, expect, max_wire_bytes, max_memory).on(mesh)
    memory = Memory.of(memory_budget, optimizer_states)
    kwargs, placements = {} if kwargs is None else kwargs, {} if placements is None else placements
    for what, value, kinds, wanted in (
        ("args", args, (tuple, list), "a tuple of arguments, such as (x,)"),
        ("backward", backward, bool, "True or False"),
        ("kwargs", kwargs, Mapping, "a mapping from names"), ("name", name, (str, type(None)), "a text"),
        ("placements", placements, Mapping, 'a mapping from names, or globs of them, to placements: {"*": "auto"}'),
    ):  # fmt: skip
        if not isinstance(value, kinds):
            raise SpmdError(f"{what} is {wanted}, not {shown(value)}")
    if dynamic_shapes is None:
        dynamic_shapes = own_dynamic_shapes(model_or_fn, args, kwargs)
    model_or_fn = untraced(model_or_fn)
    chosen = Placements(mesh, placements, model_or_fn)
    stage("tracing the program")
    captured, binding = capture_function(
        model_or_fn, tuple(args), dict(kwargs), mesh=mesh, specs=chosen, backward=backward, name=name,
        dynamic_shapes=dynamic_shapes,
    )  # fmt: skip
    chosen.check()
    options = passes.Options(profile, verify, memory=memory, overlap=overlap, buckets=buckets, dump=dump)
    family = None
    if captured.dims is None:
        local = passes.run(captured, options)
    else:
        local, family = passes.run_family(captured, options)
    stage("checking the contract")
    enforce(local, contract, optimizer_states, memory)
    return Program(local, binding, backward, optimizer_states, memory, family)
