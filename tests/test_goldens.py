"""What is sent for known models under known placements, reviewed in `golden/` (written by ``pytest --spmd-update``)."""

import pytest
import test_llama
import torch
import transformers as hf
from torch.distributed.tensor import Shard
from versions import TORCH

import spmd_compiler as spmd

pytestmark = pytest.mark.skipif(TORCH == (2, 11), reason="torch 2.11 keeps other values for the backward")

LLAMA = test_llama.Config(vocab=32000, dim=4096, layers=1, heads=32, kv_heads=8, ffn=14336, length=512)
PARALLELISMS = {
    "data": ({"dp": 8}, test_llama.DATA),
    "fsdp": ({"dp": 8}, test_llama.FSDP),
    "tensor": ({"tp": 8}, test_llama.TP),
    "data x tensor": ({"dp": 8, "tp": 8}, test_llama.DATA | test_llama.TP),
    "fsdp x tensor": ({"dp": 8, "tp": 8}, test_llama.FSDP_TP),
}


def plan(model, args, mesh, placements, backward=True):
    return spmd.export(model, args, mesh=mesh, placements=placements, backward=backward, profile="h100")


@pytest.mark.parametrize("name", PARALLELISMS)
def test_llamas(name, spmd_golden):
    with torch.device("meta"):
        model, ids = test_llama.Llama(LLAMA).bfloat16(), torch.empty(8, LLAMA.length, dtype=torch.int64)
    spmd_golden(plan(model, (ids, ids), *PARALLELISMS[name]))


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return self.model(x, labels=labels).loss


def test_resnet(spmd_golden):
    """Batches cut in eight, images in two: halos, and batch statistics summed over the batch."""
    config = hf.ResNetConfig(embedding_size=64, hidden_sizes=[64], depths=[1], layer_type="basic")
    with torch.device("meta"):
        model = Loss(hf.ResNetForImageClassification(config).train())
        args = torch.empty(64, 3, 224, 224), torch.empty(64, dtype=torch.int64)
    spmd_golden(plan(model, args, {"dp": 8, "sp": 2}, {"x": [Shard(0), Shard(2)], "labels": {"dp": Shard(0)}}))


def test_rows_of_an_embedding(spmd_golden):
    """Rows held elsewhere count as zero: one reduction, no gather of the table."""
    with torch.device("meta"):
        table, ids = torch.nn.Embedding(1_000_000, 128), torch.empty(1024, 8, dtype=torch.int64)
    spmd_golden(plan(table, (ids,), {"t": 8}, {"weight": {"t": Shard(0)}, "out": {}}, backward=False), level="full")


class Experts(torch.nn.Module):
    """Two of 16 experts for each token, by sums over one-hot choices."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(512, 16, bias=False)
        self.up = torch.nn.Parameter(torch.empty(16, 512, 1024))
        self.down = torch.nn.Parameter(torch.empty(16, 1024, 512))

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).topk(2, -1)
        gate = torch.zeros(x.shape[0], 16, device=x.device).scatter(1, expert, weight)
        hidden = torch.einsum("te,td,edf->etf", gate, x, self.up).relu()
        return torch.einsum("etf,efd->td", hidden, self.down).square().mean()


def test_experts(spmd_golden):
    with torch.device("meta"):
        model, x = Experts(), torch.empty(4096, 512)
    where = {"x": {"dp": Shard(0)}, "up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}
    spmd_golden(plan(model, (x,), {"dp": 4, "ep": 8}, where))
