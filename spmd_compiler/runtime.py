"""Running a compiled program: DTensors in, local tensors through the compiled halves, DTensors out.

One autograd function stands for the whole program; nothing else dispatches.  What an argument and a result look
like (mesh, placements, global shape) is worked out once, at compile time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import GraphModule, Node

from .aot import packaged
from .collectives import is_collective
from .devices import device_of, home, settled, storages_overlap
from .dtensors import dtensor_spec, placements_for, spec_in, wrap
from .family import DataSamples, data_samples, put_sizes, unify
from .ir import Output, Partitioned, nodes_within
from .lower import Compiled, Groups, bind, compile_graph, expand_collectives, match_saved
from .passes import overlap, split
from .placements import Mesh, Spec, SpmdError
from .simulate import cut
from .symbolic import bind_tree, sized
from .symints import with_numbers
from .text import program_text


@dataclass
class Slot:
    """Where one argument or result lives: its `Spec`, the mesh's placements, torch's own spec of it, its device.

    A global size that data decide is an expression (and ``dtensor`` None): it is that of every piece.
    """

    name: str
    spec: Spec
    mesh: DeviceMesh
    shape: tuple[Any, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.placements = placements_for(self.spec, self.mesh)
        self.named, at = Mesh.of(self.mesh), self.mesh.get_coordinate()
        self.at = None if at is None or self.spec.partial_axes() else dict(zip(self.named.axes, at, strict=True))
        self.dtensor = None
        if all(isinstance(n, int) for n in self.shape):
            self.dtensor = dtensor_spec(self.spec, self.mesh, torch.Size(self.shape), self.stride, self.dtype)

    def wrap(self, local: torch.Tensor) -> DTensor:
        return wrap(local, self.dtensor if self.dtensor is not None else self._spec_of(local))

    def _spec_of(self, local: torch.Tensor) -> Any:
        shape = [n if isinstance(n, int) else local.shape[d] for d, n in enumerate(self.shape)]
        return dtensor_spec(self.spec, self.mesh, torch.Size(shape), _global_stride(local, shape), self.dtype)

    def place(self, value: torch.Tensor) -> DTensor:
        """``value``, a DTensor placed otherwise or a plain global tensor, as a DTensor placed so (differentiably)."""
        if not isinstance(value, DTensor):
            value = value.to(self.device)
            if self.at is not None and not (value.requires_grad and torch.is_grad_enabled()):
                return self.wrap(cut(value, self.spec, self.named, self.at))
            whole = [Replicate()] * len(self.placements)
            value = DTensor.from_local(value, self.mesh, whole, run_check=False)
        elif value.device_mesh != self.mesh:
            spec = spec_in(value, self.mesh)
            value = DTensor.from_local(
                value.to_local(), self.mesh, placements_for(spec, self.mesh), run_check=False,
                shape=value.shape, stride=value.stride(),
            )  # fmt: skip
        return value.redistribute(placements=self.placements)


@dataclass
class Halves:
    """The compiled forward and backward, and what passes between them.

    ``saved[i]`` says what value ``i`` of those that the backward takes is: ``("input", position)``,
    ``("output", position)`` or ``("value", position)`` among the forward's results.  The strides are those that each
    half was compiled for, of all its arguments.  ``text`` lists what ranks must agree on beside the program's text.
    """

    forward: Compiled
    backward: Compiled | None
    saved: list[tuple[str, int]]
    forward_strides: list[tuple[int, ...] | None]
    backward_strides: list[tuple[int, ...] | None]
    text: str = ""
    watched: Sequence[int] = ()  # inputs of which a view or a copy is saved: a change of theirs must be noticed
    written: Sequence[int] = ()  # what is saved of inputs that the program itself changes, by place in ``saved``
    sizes: Sequence[str] = ()  # data sizes that the forward returns last, and the backward takes behind what is saved


def compile_halves(program: Partitioned, mesh: DeviceMesh | None, how: str) -> Halves:
    """Both halves of a program as code for this rank."""
    forward, backward = split.run(program)
    if program.profile is not None:  # the cut puts what is computed again where it is first read
        for half in filter(None, (forward, backward)):
            overlap.schedule(half, program.mesh, program.profile)
    count = program.num_forward_outputs
    sizes = [] if backward is None else [n.meta["size"] for n in backward.graph.nodes if "size" in n.meta]
    saved, held = saved_values(forward, count, len(sizes)), saved_inputs(forward, count)
    changed = {o.of for o in program.outputs if o.kind == "mutation"}
    watched = sorted(set(held.values()) - changed)
    written = [i for i, k in held.items() if k in changed]
    names = [", ".join(n.name for n in nodes_within(g.graph) if is_collective(n)) for g in (forward, backward) if g]
    samples = data_samples(program.captured) if program.captured.data else None
    forward, members = _for_this_rank(forward, program, mesh, samples)
    run_forward = compile_graph(forward, how, is_inference=backward is None)
    if backward is None:
        return Halves(run_forward, None, saved, _strides(forward), [], "\n".join(names))
    kept = [[n.meta["val"] for n in m.graph.output_node().args[0][count:]] for m in members]
    backward, _ = _for_this_rank(backward, program, mesh, samples, kept)
    if samples is None:
        match_saved(forward, backward, count)
    strides = _strides(backward)
    run_backward = compile_graph(backward, how, is_backward=True)
    return Halves(
        run_forward, run_backward, saved, _strides(forward), strides, "\n".join(names), watched, written, sizes
    )


def compile_whole(program: Partitioned, mesh: DeviceMesh | None, how: str, package: Path | None = None) -> Halves:
    """A program as one piece of code, that of a ``package`` if one is named; it returns gradients beside outputs."""
    if package is not None:
        return Halves(packaged(program, mesh, package), None, [], _strides(program.graph), [])
    graph = GraphModule(program.graph, copy.deepcopy(program.graph.graph))
    samples = data_samples(program.captured) if program.captured.data else None
    graph, _ = _for_this_rank(graph, program, mesh, samples)
    strides = _strides(graph)
    return Halves(compile_graph(graph, how, is_inference=True), None, [], strides, [])


def direct(
    program: Partitioned, binding: Any, mesh: DeviceMesh | None, how: str, backward: bool, package: Path | None = None
) -> Callable[..., Any]:
    """A captured function on this rank: its result, and with ``backward`` a pair (result, {name: gradient}).

    ``binding`` is the `capture.Binding` of the function.  Parameters are taken from its module at each call.
    """
    halves = compile_whole(program, mesh, how, package)
    outputs = program.outputs
    count = sum(o.kind == "output" for o in outputs)
    runner = Runner(program, halves, mesh, is_global=[True] * count, differentiable=[])
    if binding.weights is not None:  # cut once, not at each call
        binding = dataclasses.replace(binding, weights=runner.placed(binding.weights))

    def call(*args: Any, **kwargs: Any) -> Any:
        found = runner.everything(binding.flatten(args, kwargs))
        result = binding.unflatten_outputs([v for v, o in zip(found, outputs, strict=True) if o.kind == "output"])
        if not backward:
            return result
        return result, {o.name: v for v, o in zip(found, outputs, strict=True) if o.kind == "grad"}

    return call


def _for_this_rank(
    gm: GraphModule, program: Partitioned, mesh: DeviceMesh | None, samples: DataSamples | None,
    saved: Sequence[Sequence[Any]] = (),
) -> tuple[GraphModule, list[GraphModule]]:  # fmt: skip
    """A graph with this rank's numbers in it, and what it is at each of the ``samples`` of data sizes.

    ``saved`` are, at each of them, the values of the first placeholders.
    """
    members = []
    for i in range(1 if samples is None else len(samples.sizes())):
        at = gm
        if samples is not None:
            at = GraphModule(gm, copy.deepcopy(gm.graph))
            put_sizes(at.graph, samples.sizes()[i])
        groups = Groups(mesh) if mesh is not None else None
        if mesh is not None:
            at = settled(at, home(program.graph.graph), device_of(mesh))
        at = bind(at, program.mesh, groups.coordinates if groups is not None else {}, saved[i] if saved else ())
        members.append(at if groups is None else expand_collectives(at, groups))
    if samples is None:
        return members[0], members
    whole = GraphModule(members[0], copy.deepcopy(members[0].graph))
    unify(samples, whole.graph, [m.graph for m in members])
    return with_numbers(whole, program.captured.data), members


def _strides(gm: GraphModule) -> list[tuple[Any, ...] | None]:
    """Of each input; where data decide sizes they are expressions of them."""
    found: list[tuple[Any, ...] | None] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value, layout = node.meta.get("val"), node.meta.get("layout")
        strides = layout[1] if layout is not None else value.stride() if isinstance(value, torch.Tensor) else None
        found.append(None if strides is None else tuple(strides))
    return found


def saved_values(forward: GraphModule, num_outputs: int, sizes: int = 0) -> list[tuple[str, int]]:
    """What the forward graph saves for the backward (see `Halves.saved`), its last ``sizes`` results apart."""
    inputs = {n: i for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    returned: Sequence[Node] = forward.graph.output_node().args[0]
    outputs = {n: i for i, n in reversed(list(enumerate(returned[:num_outputs]))) if isinstance(n, Node)}
    found = []
    for i, node in enumerate(returned[num_outputs : len(returned) - sizes]):
        if node in inputs:
            found.append(("input", inputs[node]))
        elif node in outputs:
            found.append(("output", outputs[node]))
        else:
            found.append(("value", num_outputs + i))
    return found


def saved_inputs(forward: GraphModule, num_outputs: int) -> dict[int, int]:
    """The inputs of which the forward saves the value, a view or a redistributed copy: positions, by place in what is
    saved."""
    inputs = {n: i for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    found = {}
    for place, node in enumerate(forward.graph.output_node().args[0][num_outputs:]):
        while isinstance(node, Node) and (is_collective(node) or getattr(node.target, "is_view", False)):
            node = node.args[0]
        if node in inputs:
            found[place] = inputs[node]
    return found


class Runner:
    """Calls a partitioned program on this rank.

    ``results`` maps the program's outputs to the caller's flat results (see `capture.Front`), ``is_global`` says
    which outputs of kind ``output`` come back as DTensors, ``differentiable`` which outputs have tangents.
    """

    def __init__(
        self,
        program: Partitioned,
        halves: Halves,
        mesh: DeviceMesh | None,
        *,
        is_global: Sequence[bool],
        differentiable: Sequence[int],
    ) -> None:
        self.program, self.halves, self.mesh = program, halves, mesh
        self.home = home(program.graph.graph)
        self.device = torch.device(self.home) if mesh is None else device_of(mesh)
        self.checked = mesh is None or not dist.is_initialized() or mesh.size() == 1
        self.inputs = [i for i in program.inputs if i.kind != "tangent"]
        self.seed = next((k for k, i in enumerate(self.inputs) if i.kind == "seed"), None)
        self.generator: torch.Generator | None = None
        self.count = program.num_forward_outputs
        self.differentiable = list(differentiable)
        places = program.graph.graph.find_nodes(op="placeholder")
        self.slots = [self._slot(i.name, i.spec, n) for i, n in zip(self.inputs, places, strict=False)]
        returned = program.graph.graph.output_node().args[0]
        self.out_slots = [self._slot(o.name, o.spec, n) for o, n in zip(program.outputs, returned, strict=True)]
        flags = iter(is_global)
        self.wrapped = [next(flags) if o.kind == "output" else True for o in program.outputs[: self.count]]
        self.mutations = [(k, o) for k, o in enumerate(program.outputs[: self.count]) if o.kind == "mutation"]
        self.grads = [(k, o) for k, o in enumerate(program.outputs[self.count :])]
        self.written = {o.of for _, o in self.mutations if o.of is not None}
        self.apart = [k for k, i in enumerate(self.inputs) if k in self.written or i.kind == "input"]
        self.may_alias = any(self.inputs[k].kind == "input" for k in self.written)
        self.needs_grad = [o.of for _, o in self.grads if o.of is not None]
        tangents = [(i, n) for i, n in zip(program.inputs, places, strict=True) if i.kind == "tangent"]
        self.tangent_slots = [self._slot(i.name, i.spec, n) for i, n in tangents]

    def _slot(self, name: str, spec: Spec | None, node: Any) -> Slot | None:
        if self.mesh is None or spec is None or not isinstance(node, Node):
            return None
        value = node.meta["val"]
        shape = node.meta.get("global", tuple(value.shape))
        stride = _global_stride(value, shape) if all(isinstance(n, int) for n in shape) else ()
        device = self.device if value.device.type == self.home else value.device
        return Slot(name, spec, self.mesh, tuple(shape), stride, value.dtype, device)

    # --- a call ---------------------------------------------------------------------------------------------

    def __call__(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Run on arguments in placeholder order (without the seed); the forward outputs of kind ``output``."""
        tensors = self._given(tensors)
        placed = [self._placed(t, s) for t, s in zip(tensors, self.slots, strict=True)]
        if self.halves.backward is not None and torch.is_grad_enabled():
            outs = list(_Run.apply(self, *placed))
        else:
            outs, _ = self.forward(placed)
        for k, out in self.mutations:
            assert out.of is not None
            self._write_back(tensors[out.of], placed[out.of], outs[k], k in self.differentiable)
        return [x for x, o in zip(outs, self.program.outputs, strict=False) if o.kind == "output"]

    def everything(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Run a program compiled whole: all outputs, gradients included, in their order.

        They are DTensors if an argument is one, or if they are not replicated.
        """
        tensors = self._given(tensors)
        with torch.no_grad():
            placed = [self._placed(t, s) for t, s in zip(tensors, self.slots, strict=True)]
            strides = self.halves.forward_strides
            found = self.halves.forward([laid_out(local_of(t), s) for t, s in zip(placed, strides, strict=True)])
        distributed = any(isinstance(t, DTensor) for t in tensors)
        outs = []
        for value, slot, output in zip(found, self.out_slots, self.program.outputs, strict=True):
            if slot is not None and (distributed or not slot.spec.is_replicated()):
                value = slot.wrap(value)
            if output.kind == "mutation":
                assert output.of is not None
                self._write_back(tensors[output.of], placed[output.of], value, with_grad=False)
            outs.append(value)
        return outs

    def _given(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments of a call, the seed among them, once they and the other ranks' program are as they must be."""
        if self.seed is not None:
            tensors = [*tensors[: self.seed], self._draw(), *tensors[self.seed :]]
        self._check_apart(tensors)
        if not self.checked:
            self._check_agreement()
        return tensors

    def _check_apart(self, tensors: Sequence[Any]) -> None:
        """Raise `SpmdError` where what the program writes to shares memory with another input: it has copies."""
        if not self.written or (self.checked and not self.may_alias):
            return
        held: dict[int, list[int]] = {}
        for k in self.apart:
            if isinstance(tensors[k], torch.Tensor):
                others = held.setdefault(local_of(tensors[k]).untyped_storage()._cdata, [])
                for j in others:
                    pair = local_of(tensors[j]), local_of(tensors[k])
                    if not self.written.isdisjoint((j, k)) and storages_overlap(*pair):
                        names = f"{self.inputs[j].name!r} and {self.inputs[k].name!r}"
                        raise SpmdError(
                            f"inputs {names} share memory, and the program writes to one of them, which the other "
                            "would not show; give a clone of one, or take the view inside the compiled function"
                        )
                others.append(k)

    def placed(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights by name, placed as the program takes them."""
        slots = {i.name: s for i, s in zip(self.inputs, self.slots, strict=True)}
        with torch.no_grad():
            return {n: self._placed(w, slots[n]) if n in slots else w for n, w in weights.items()}

    def _placed(self, tensor: torch.Tensor, slot: Slot | None) -> torch.Tensor:
        if slot is None:
            return tensor
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            if spec.placements == slot.placements and (spec.mesh is slot.mesh or spec.mesh == slot.mesh):
                return tensor
            if spec.mesh != slot.mesh and spec_in(tensor, slot.mesh) == slot.spec:
                return tensor
        elif slot.spec.is_replicated():
            return tensor if tensor.device.type == slot.device.type else tensor.to(slot.device)
        return slot.place(tensor)

    def _write_back(self, target: torch.Tensor, placed: torch.Tensor, value: Any, with_grad: bool) -> None:
        if with_grad and torch.is_grad_enabled() and not target.is_leaf:  # a leaf was written to under no_grad
            target.copy_(value)
        elif placed is target:
            with torch.no_grad():
                local_of(target).copy_(local_of(value))
            if isinstance(target, DTensor):
                increment_version(target)
        else:
            with torch.no_grad():
                target.copy_(value)

    def forward(self, placed: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """The wrapped forward outputs, and everything that the forward graph returned."""
        strides = self.halves.forward_strides
        found = self.halves.forward([laid_out(local_of(t), s) for t, s in zip(placed, strides, strict=True)])
        outs = []
        for value, slot, wrapped, output in zip(
            found, self.out_slots, self.wrapped, self.program.outputs[: self.count], strict=False
        ):
            if output.kind == "mutation":
                assert output.of is not None
                wrapped = isinstance(placed[output.of], DTensor)
            outs.append(slot.wrap(value) if wrapped and slot is not None else value)
        return outs, list(found)

    # --- agreement between ranks ----------------------------------------------------------------------------

    def _draw(self) -> torch.Tensor:
        return torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _check_agreement(self) -> None:
        """Before the first step: every rank runs the same program, and draws from the same random state."""
        assert self.mesh is not None
        group = whole_group(self.mesh)
        text = program_text(self.program) + self.halves.text
        state = _digest(bytes(torch.get_rng_state().tolist())) if self.seed is not None else ""
        everyone: list[Any] = [None] * dist.get_world_size(group)
        with _waiting(self.program.captured.name):
            dist.all_gather_object(everyone, (_digest(text.encode()), state, ""), group=group)
        for rank, (*_, failure) in enumerate(everyone):
            if failure:
                raise SpmdError(f"rank {rank} of the mesh could not compile its part of the program: {failure}")
        if len({d for d, *_ in everyone}) > 1:
            texts: list[Any] = [None] * len(everyone)
            dist.all_gather_object(texts, text, group=group)
            raise SpmdError(_first_difference(texts))
        if len({s for _, s, _ in everyone}) > 1:
            seeds: list[Any] = [None] * len(everyone)
            dist.all_gather_object(seeds, torch.initial_seed(), group=group)
            self.generator = torch.Generator().manual_seed(seeds[0])
        self.checked = True


PATIENCE = 60.0  # seconds before a rank says what it waits for


@contextlib.contextmanager
def _waiting(program: str) -> Iterator[None]:
    """Says so where other ranks don't come: torch fails after the process group's timeout alone, and names nothing."""
    words = (
        "%s is compiled here, and waits since %.0f s for the other ranks of its mesh: one that failed before, or runs "
        "what it had compiled already, keeps it until the process group's timeout; see what the other ranks log"
    )
    timer = threading.Timer(PATIENCE, logging.getLogger(__name__).warning, (words, program, PATIENCE))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report_failure(mesh: DeviceMesh | Mesh, error: Exception) -> None:
    """Tell the ranks of a mesh, which wait for each other before their first step, that this one has no program."""
    if isinstance(mesh, DeviceMesh):
        logging.getLogger(__name__).error("%s (the other ranks are told so where they wait)", error)
        group = whole_group(mesh)
        dist.all_gather_object([None] * dist.get_world_size(group), ("", "", str(error)), group=group)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def whole_group(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of a mesh."""
    groups = Groups(mesh)
    return dist.distributed_c10d._resolve_process_group(groups.name(groups.axes))


def _first_difference(texts: Sequence[str]) -> str:
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        for number, (a, b) in enumerate(itertools.zip_longest(texts[0].splitlines(), text.splitlines()), 1):
            if a != b:
                return (
                    f"ranks compiled different programs; line {number} is\n  on rank 0: {a}\n  on rank {rank}: {b}\n"
                    "make every rank run the same code with the same shapes and placements"
                )
    return "ranks compiled different programs"


def _global_stride(value: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the global value whose dims lie in memory in the order of those of its piece ``value``."""
    if tuple(shape) == tuple(value.shape):
        return tuple(value.stride())
    strides, run = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        strides[d] = run
        run *= max(int(shape[d]), 1)
    return tuple(strides)


def local_of(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Run(torch.autograd.Function):
    """The program as one differentiable operation on DTensors."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *placed: torch.Tensor) -> tuple[Any, ...]:
        outs, found = runner.forward(placed)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for k, o in enumerate(outs) if isinstance(o, torch.Tensor) and k not in runner.differentiable)
        )
        sources = {"input": placed, "output": outs, "value": found}
        watched = (placed[k] for k in runner.halves.watched)
        saved = [sources[kind][k] for kind, k in runner.halves.saved]
        for i in runner.halves.written:  # as it was before
            saved[i] = local_of(saved[i]).clone()
        ctx.save_for_backward(*saved, *watched)
        names = runner.halves.sizes
        ctx.sizes = dict(zip(names, found[len(found) - len(names) :], strict=True))
        ctx.likes = [(t._spec if isinstance(t, DTensor) else None) for t in placed]
        ctx.strides = {k: local_of(placed[k]).stride() for k in runner.needs_grad}
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        sizes = ctx.sizes
        wanted = runner.halves.backward_strides
        strides = iter(sized(wanted, sizes) if sizes else wanted)
        saved = ctx.saved_tensors[: len(runner.halves.saved)]
        values: list[Any] = [laid_out(local_of(t), next(strides)) for t in saved]
        for size in sizes.values():
            next(strides)
            values.append(size)
        for k, slot in zip(runner.differentiable, runner.tangent_slots, strict=True):
            values.append(laid_out(_local_tangent(tangents[k], slot, sizes), next(strides)))
        assert runner.halves.backward is not None
        found = list(runner.halves.backward(values))
        del values
        grads: list[Any] = [None] * (1 + len(ctx.likes))
        while found:
            local = found.pop()
            k, output = runner.grads[len(found)]
            if local is None:
                continue
            assert output.of is not None
            # optimizers expect the layout of the parameter, which the wrapper alone can't promise
            local = laid_out(local, ctx.strides[output.of])
            grads[1 + output.of] = _wrapped_gradient(local, ctx.likes[output.of], runner, k, output)
            del local
        if torch.is_grad_enabled():  # create_graph=True
            made = [i for i, g in enumerate(grads) if g is not None]
            anchor = torch.empty((), requires_grad=True)
            for i, g in zip(made, _Once.apply(anchor, *(grads[i] for i in made)), strict=True):
                grads[i] = g
        return tuple(grads)


class _Once(torch.autograd.Function):
    """Gradients that can't be differentiated again, and say so."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise SpmdError(
            "a gradient of a compiled program is differentiated again (create_graph=True), which can't be done; "
            "take the inner gradient inside the compiled function, with torch.func.grad or torch.autograd.grad, or "
            "leave this part uncompiled"
        )


def _wrapped_gradient(local: torch.Tensor, like: Any, runner: Runner, k: int, output: Output) -> torch.Tensor:
    if like is None:
        return local
    slot, given = runner.out_slots[runner.count + k], runner.slots[output.of or 0]
    if slot is None or (given is not None and slot.spec == given.spec):
        return wrap(local, like)
    return slot.wrap(local)


def _local_tangent(tangent: Any, slot: Slot | None, sizes: Mapping[str, int]) -> torch.Tensor:
    """The local piece of a tangent, redistributed as the backward expects it."""
    if slot is not None:
        if tangent is None:
            tangent = slot.wrap(_zeros(slot, sizes))
        elif isinstance(tangent, DTensor):
            if tangent._spec.placements != slot.placements or tangent._spec.mesh != slot.mesh:
                with torch.no_grad():
                    tangent = slot.place(tangent)
        elif not slot.spec.is_replicated():
            with torch.no_grad():
                tangent = slot.place(tangent)
    return local_of(tangent)


def laid_out(value: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """``value`` in memory of the given strides (None: any)."""
    if stride is None or value.stride() == stride or value.numel() == 0:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _zeros(slot: Slot, sizes: Mapping[str, int]) -> torch.Tensor:
    place = slot.mesh.get_coordinate() or [0] * len(slot.spec.axes)
    mesh = Mesh.of(slot.mesh)
    shape = bind_tree(slot.spec.local_shape(sized(slot.shape, sizes), mesh), dict(zip(mesh.axes, place, strict=True)))
    return torch.zeros(shape, dtype=slot.dtype, device=slot.mesh.device_type)
