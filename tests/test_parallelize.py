"""`parallelize`: DTensors by name, meta models, optimizers, clipping and checkpoints, on four gloo ranks."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from spmd_compiler.parallelize import parallelize
from spmd_compiler.placements import SpmdError
from spmd_compiler.program import export

FSDP_TP = {
    "emb.weight": {"dp": Shard(0), "tp": Shard(1)},
    "*.up.weight": {"dp": Shard(0), "tp": Shard(0)},
    "*.down.weight": {"dp": Shard(0), "tp": Shard(1)},
    "*.bias": {"dp": Shard(0)},
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model with tied embeddings."""

    def __init__(self, vocabulary=16, width=8, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mesh2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def same_state(model, reference):
    ours, theirs = model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert isinstance(ours[name], DTensor), name
        torch.testing.assert_close(ours[name].full_tensor(), value, msg=lambda m, name=name: f"{name}: {m}")


def check_meta():
    torch.manual_seed(3)
    reference = Net()
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    parallelize(model, mesh2x2(), FSDP_TP)
    assert model.head.weight is model.emb.weight
    same_state(model, reference)
    up = model.blocks[0].up.weight
    assert up.to_local().shape == (8, 8) and up.to_local().untyped_storage().nbytes() == 8 * 8 * 4
    assert isinstance(up, nn.Parameter) and up.requires_grad


def check_real():
    torch.manual_seed(dist.get_rank())  # rank 0's values win
    model = parallelize(Net(), mesh2x2(), FSDP_TP)
    torch.manual_seed(0)
    same_state(model, Net())


def check_attention_and_norm_on_meta():
    def build():
        return nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "norm": nn.BatchNorm1d(8)})

    torch.manual_seed(1)
    reference = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(1)
    same_state(parallelize(model, {"dp": 4}, {"attention.in_proj_weight": {"dp": Shard(0)}}), reference)


def train(model, reference, optimizer, steps, **options):
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(5))
    compiled = torch.compile(model, backend="spmd", fullgraph=True, options={"lower": "eager"})
    ours, theirs = optimizer(model.parameters(), **options), optimizer(reference.parameters(), **options)
    for _ in range(steps):
        for net, params, opt in ((compiled, model, ours), (reference, reference, theirs)):
            out = net(ids)
            out = out.full_tensor() if isinstance(out, DTensor) else out
            nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
            norm = nn.utils.clip_grad_norm_(params.parameters(), 0.5)
            norms = norm.full_tensor() if isinstance(norm, DTensor) else norm
            opt.step()
            opt.zero_grad()
            if net is compiled:
                kept = norms
        torch.testing.assert_close(kept, norms)
    same_state(model, reference)
    return ours


def check_training(name, options):
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(0)
    model = parallelize(Net(), mesh2x2(), FSDP_TP)
    train(model, reference, getattr(torch.optim, name), 3, **options)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[1:3])


def check_checkpoint(path):
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(0)
    model = parallelize(Net(), mesh2x2(), FSDP_TP)
    train(model, reference, torch.optim.AdamW, 2, lr=0.01)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = parallelize(Net(), {"dp": 4}, {"*": {"dp": Shard(0)}})
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    same_state(other, reference)


@pytest.mark.parametrize("check", [check_meta, check_real, check_attention_and_norm_on_meta])
def test_values(gloo4, check):
    gloo4(check)


@pytest.mark.parametrize(
    "name, options",
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("AdamW", {"lr": 0.01, "foreach": True}),
        ("AdamW", {"lr": 0.01, "fused": True}),
    ],
)
def test_training(gloo4, name, options):
    gloo4(check_training, name, options)


def test_checkpoint(gloo4):
    with tempfile.TemporaryDirectory() as path:
        gloo4(check_checkpoint, path)


def check_errors():
    mesh = mesh2x2()
    with pytest.warns(UserWarning, match="buffers 'whole' and 'part' share memory"):
        parallelize(Part(), mesh, {})
    for placements, message in (
        ({"emb.wieght": {"dp": Shard(0)}}, r"no parameter or buffer is named 'emb.wieght'; did you mean 'emb.weight'"),
        ({"emb.weight": {"dp": Shard(2)}}, r"'emb.weight' \(16, 8\): Shard\(2\) on axis 'dp': dim out of range"),
        ({"emb.weight": {"pp": Shard(0)}}, r"has no axis 'pp'; its axes are dp, tp"),
        ({"emb.weight": "auto"}, r"'emb.weight' \(16, 8\): 'auto' is for a solver: plan the model with export"),
        ({"emb.weight": [Shard(0)]}, r"1 placements .* for the 2 axes .* name the axes"),
        ({"emb.weight": "S(0)"}, r"1 placements .* for the 2 axes .* name the axes"),
        (export(nn.Linear(2, 2), (torch.ones(2, 2),), mesh={"dp": 2}), "planned for another module, .* no 'weight'"),
    ):
        with pytest.raises(SpmdError, match=message):
            parallelize(Net(), mesh, placements)
    with pytest.raises(SpmdError, match=r"mesh\(dp=8\) has 8 devices, but there are 4 ranks"):
        parallelize(Net(), {"dp": 8}, {})
    with torch.device("meta"):
        model = nn.Module()
        model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(SpmdError, match=r"scale on the meta device but no reset_parameters"):
        parallelize(model, mesh, {})


def test_errors(gloo4):
    gloo4(check_errors)
