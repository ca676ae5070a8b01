"""The cut into forward and backward: gathered parameters are never saved, checkpointed regions are recomputed."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

from spmd_compiler import passes
from spmd_compiler.capture import capture_function
from spmd_compiler.collectives import KINDS, is_collective
from spmd_compiler.memory import held
from spmd_compiler.parallelize import parallelize
from spmd_compiler.passes import split
from spmd_compiler.placements import Mesh, Spec
from spmd_compiler.runtime import saved_values


class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.checkpointed = checkpointed

    def hidden(self, x):
        return torch.sigmoid(self.down(torch.sigmoid(self.up(x))))

    def forward(self, x):
        return checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)


def program_of(model, placements, **options):
    """The program of a compiled model on four ranks, and its result, with a batch sharded over them."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parallelize(model, mesh, placements)
    x = distribute_tensor(torch.randn(512, 64), mesh, [Shard(0)])
    options |= {"lower": "eager", "profile": "bytes"}
    out = torch.compile(model, backend="spmd", fullgraph=True, options=options)(x)
    return out.grad_fn.runner.program, out


def saved_of(program, forward):
    """The values, neither inputs nor outputs, that the forward keeps for the backward."""
    returned = forward.graph.output_node().args[0]
    return [returned[i] for kind, i in saved_values(forward, program.num_forward_outputs) if kind == "value"]


def kinds(gm):
    return [KINDS[n.target] for n in gm.graph.nodes if is_collective(n)]


def check_gathered_parameters():
    program, _ = program_of(Net(), {"*": {"dp": Shard(0)}})
    names = [n.name for n in program.graph.graph.nodes]
    forward, backward = split.run(program)
    assert all(tuple(n.meta["val"].shape) != (64, 64) for n in saved_of(program, forward))
    assert kinds(forward).count("all_gather") == 2
    # the first weight is not needed again: x wants no gradient
    assert sorted(kinds(backward)) == ["all_gather", "reduce_scatter", "reduce_scatter"]
    assert names == [n.name for n in program.graph.graph.nodes]


def check_kept_gathers():
    """With memory to spare a parameter's copy is kept for the backward: saved, and not gathered again."""
    grads = []
    for options in ({}, {"memory_budget": 1e9}):
        torch.manual_seed(0)
        model = Net()
        program, out = program_of(model, {"*": {"dp": Shard(0)}}, **options)
        forward, backward = split.run(program)
        kept = [n for n in saved_of(program, forward) if tuple(n.meta["val"].shape) == (64, 64)]
        assert (len(kept), kinds(backward).count("all_gather")) == ((1, 0) if options else (0, 1))
        out.full_tensor().sum().backward()
        grads.append(model.up.weight.grad.full_tensor())
    torch.testing.assert_close(grads[0], grads[1])


def check_checkpointing():
    sizes, live, grads = [], [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Net(checkpointed) for _ in range(3)))
        program, out = program_of(model, {})
        forward, _ = split.run(program)
        sizes.append(sum(n.meta["val"].numel() for n in saved_of(program, forward)))
        live.append(held(program, 0.0)["activations"])
        out.full_tensor().sum().backward()
        grads.append(model[0].up.weight.grad.full_tensor())
    assert sizes[1] < sizes[0]
    assert live[1] < live[0]
    torch.testing.assert_close(grads[0], grads[1])


def test_gathered_parameters_are_not_saved(gloo4):
    gloo4(check_gathered_parameters)


def test_gathered_parameters_are_saved_where_the_plan_keeps_them(gloo4):
    gloo4(check_kept_gathers)


def test_activation_checkpointing(gloo4):
    gloo4(check_checkpointing)


def test_without_gradients_there_is_no_backward():
    mesh = Mesh({"dp": 4})
    captured, _ = capture_function(
        Net(), (torch.randn(8, 64),), mesh=mesh, specs=lambda *a: Spec.replicate(mesh) if a[1] != "output" else None
    )
    _, backward = split.run(passes.run(captured, passes.Options()))
    assert backward is None
