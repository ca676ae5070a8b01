"""What `simplify` merges."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import spmd_compiler as spmd


def test_one_halo_serves_several_users():
    """The four corners of bilinear weights read the same rows of the neighbour: they travel once."""
    x = torch.randn(2, 3, 16, 64, dtype=torch.float64)

    def resized(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    where = {"x": {"a": Shard(2)}, "out": {"a": Shard(2)}}
    program = spmd.export(resized, (x,), mesh={"a": 2}, placements=where, profile="bytes")
    torch.testing.assert_close(program.simulate(x), resized(x))
    row = 2 * 3 * 64 * 8
    assert [(c.kind, c.wire_bytes) for c in program.collectives] == [("permute", row)]
